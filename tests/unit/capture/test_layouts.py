"""Shapes, dtypes and strides: a copy never broadcasts, converts or reorders silently, and few launches copy many."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpass.capture.outputs import clone_pool_tensors
from graphpass.capture.staging import distinct_elements, extent, same_view
from graphpass.compat import dynamo
from graphpass.errors import DeviceError, ShapeError

X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(1, 4),
        torch.ones(4),
        torch.ones(()),
        torch.ones(3, 1),
        torch.ones(4, 3),
        torch.ones(2, 4),
        torch.ones(3, 5),
        torch.ones(1, 3, 4),
        torch.ones(3, 4, dtype=torch.float64),
        torch.ones(3, 4, dtype=torch.int64),
        torch.ones(3, 4, dtype=torch.bfloat16),
        torch.ones(3, 4, device="meta"),
    ],
    ids=lambda t: f"{tuple(t.shape)} {t.dtype} {t.device}",
)
def test_an_input_that_a_copy_would_change_is_refused(rig: Any, other: torch.Tensor) -> None:
    wrapper = rig.captured(rig.wrap(lambda x: x + 1, input_names=("hidden",)), X)
    with pytest.raises(ShapeError) as refused:
        rig.call(wrapper, other)
    for text in (
        "input hidden",
        "(3, 4) torch.float32 on cpu",
        f"{tuple(other.shape)} {other.dtype} on {other.device}",
    ):
        assert text in str(refused.value)
    assert rig.counts(wrapper).replayed == 1
    assert torch.equal(rig.call(wrapper, X), X + 1)


def test_a_nested_input_is_refused_by_name(rig: Any) -> None:
    wrapper = rig.captured(rig.wrap(lambda *, table: table[0] + table[1]), table=[X, X * 2])
    with pytest.raises(ShapeError, match=r"input table\[1\]"):
        rig.call(wrapper, table=[X, torch.ones(1, 4)])


def test_an_input_on_another_device_is_refused_at_capture(rig: Any) -> None:
    rig.capture(rig.wrap(lambda x: x + 1), X)
    with pytest.raises(DeviceError, match=r"argument y of other lies on another device.*\(3,\) on meta"):
        rig.capture(rig.wrap(lambda x, y: x, name="other", input_names=("x", "y")), X, torch.ones(3, device="meta"))


def test_strides_at_replay_may_differ_where_the_graph_reads_a_buffer(rig: Any) -> None:
    strides = []

    def region(x: torch.Tensor) -> torch.Tensor:
        strides.append(x.stride())
        return x * 2

    wrapper = rig.wrap(region)
    columns = torch.arange(12.0).reshape(4, 3).t()
    rig.capture(wrapper, columns)
    assert strides == [(1, 3), (1, 3)]  # what the region was called with is what it is captured with
    windows = torch.arange(8.0).as_strided((3, 4), (1, 1))
    for x in (columns + 1, X, torch.arange(48.0).reshape(6, 8)[::2, ::2], X[:, :1].expand(3, 4), windows):
        got = rig.call(wrapper, x)
        assert torch.equal(got, x * 2)
        assert got.stride() == (1, 3)
    assert rig.counts(wrapper).captured == 1


def test_strides_must_match_where_an_output_is_a_view_of_the_input(rig: Any) -> None:
    wrapper = rig.captured(rig.wrap(lambda x: x[1:], input_names=("x",)), X)
    other = X + 1
    assert torch.equal(rig.call(wrapper, other), other[1:])
    with pytest.raises(ShapeError, match=r"input x of region has other strides.*\(4, 1\).*\(1, 3\)"):
        rig.call(wrapper, torch.arange(12.0).reshape(4, 3).t())


def test_expanded_inputs(rig: Any) -> None:
    wrapper = rig.wrap(lambda x: x + 1, input_names=("mask",))
    row = torch.arange(4.0)
    rig.capture(wrapper, row.expand(3, 4))
    assert rig.runtime.buffer_bytes() == 256
    assert torch.equal(rig.call(wrapper, (row * 3).expand(3, 4)), (row * 3 + 1).expand(3, 4))
    with pytest.raises(ShapeError, match=r"input mask .*other strides.*\(0, 1\).*\(4, 1\)"):
        rig.call(wrapper, X)
    scalar = rig.captured(rig.wrap(lambda x: x + 1, name="scalar"), torch.ones(()).expand(3, 4))
    assert torch.equal(rig.call(scalar, torch.full((), 5.0).expand(3, 4)), torch.full((3, 4), 6.0))


@pytest.mark.parametrize(("size", "stride"), [((3, 3), (1, 1)), ((4, 3), (2, 1)), ((2, 2, 2), (4, 1, 1))], ids=str)
def test_overlapping_inputs_are_refused(rig: Any, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    wrapper = rig.wrap(lambda x: x + 1, input_names=("windows",))
    windows = torch.arange(32.0).as_strided(size, stride)
    with pytest.raises(ShapeError, match=r"windows overlaps itself in memory.*contiguous\(\)"):
        rig.capture(wrapper, windows)
    assert wrapper.captured() == []
    assert torch.equal(rig.capture(wrapper, windows.contiguous()), windows + 1)
    with pytest.raises(ValueError, match="does not fit"):
        rig.call(wrapper, windows[:1])


@pytest.mark.parametrize("outputs", ["clone", "view"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_zero_size_tensors(rig: Any, shape: tuple[int, ...], outputs: str) -> None:
    def region(x: torch.Tensor, empty: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, empty * 2, empty, torch.zeros(0)

    wrapper = rig.captured(rig.wrap(region, outputs=outputs), X, torch.ones(shape))
    empty = torch.ones(shape)
    got = rig.call(wrapper, X * 2, empty)
    assert torch.equal(got[0], X * 2 + 1)
    assert got[1].shape == shape
    assert got[2] is empty
    assert got[3].shape == (0,)
    with pytest.raises(ShapeError):
        rig.call(wrapper, X, torch.ones(0, 9))


def test_capture_sizes_share_the_largest_buffer(rig: Any) -> None:
    wrapper = rig.wrap(lambda x: x * 2)
    for rows in (512, 64, 8):
        rig.capture(wrapper, torch.ones(rows), at_key=rows)
    assert rig.runtime.buffer_bytes() == 512 * 4
    for rows in (8, 512, 64):
        assert torch.equal(rig.call(wrapper, torch.full((rows,), 3.0), at_key=rows), torch.full((rows,), 6.0))


# -- layouts by themselves ---------------------------------------------------------------------------------------------


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A view of some memory: slices with steps, permutations and expanded dimensions."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for dim in range(tensor.dim()):
        start, step = draw(st.integers(0, tensor.shape[dim] - 1)), draw(st.integers(1, 2))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    return tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)


@given(strided())
def test_distinct_elements_are_the_tensor_without_repeats(tensor: torch.Tensor) -> None:
    distinct = distinct_elements(tensor, name="x")
    assert torch.equal(distinct.expand_as(tensor), tensor)
    addresses = torch.arange(tensor.untyped_storage().nbytes() // 4).as_strided(
        distinct.shape, distinct.stride(), distinct.storage_offset()
    )
    assert addresses.unique().numel() == distinct.numel()
    first, last = extent(tensor)
    assert (first, last) == (int(addresses.min()) * 4, int(addresses.max()) * 4 + 4)


@given(strided(), st.integers(0, 3))
def test_the_same_view_over_other_memory(tensor: torch.Tensor, shift: int) -> None:
    memory = torch.zeros(tensor.untyped_storage().nbytes() // 4 + shift)
    view = same_view(memory, tensor, byte_offset=shift * 4)
    distinct_elements(view, name="x").copy_(distinct_elements(tensor, name="x"))
    assert torch.equal(view, tensor)
    assert (view.stride(), view.storage_offset()) == (tensor.stride(), shift)


@given(st.lists(strided(), min_size=1, max_size=3))
def test_clones_keep_layouts_and_sharing(tensors: list[torch.Tensor]) -> None:
    pool = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    pairs = [view for tensor in tensors for view in (tensor, tensor[..., -1:], tensor)]
    clones = clone_pool_tensors(pairs, pool)
    for view, clone in zip(pairs, clones, strict=True):
        assert torch.equal(view, clone)
        assert view.stride() == clone.stride() or view.numel() == 1
        assert clone.untyped_storage().data_ptr() not in pool
    for index in range(0, len(pairs), 3):
        assert clones[index] is clones[index + 2]
        assert clones[index].untyped_storage().data_ptr() == clones[index + 1].untyped_storage().data_ptr()
        assert clones[index + 1].data_ptr() - clones[index].data_ptr() == (
            pairs[index + 1].data_ptr() - pairs[index].data_ptr()
        )


def test_clones_of_two_dtypes_in_one_storage() -> None:
    memory = torch.arange(32, dtype=torch.uint8)
    views = [memory[1:4], memory[8:16].view(torch.float32)]
    codes, scales = clone_pool_tensors(views, {memory.untyped_storage().data_ptr()})
    assert torch.equal(codes, views[0])
    assert torch.equal(scales.view(torch.uint8), memory[8:16])
    assert codes.untyped_storage().data_ptr() == scales.untyped_storage().data_ptr()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_turned_weight_is_refused_where_dynamo_does_not_guard_it(
    rig: Any, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keeping the weight alive; a loop of one's own has no guards, and reads the old layout if nobody asks."""
    monkeypatch.setattr(dynamo, "guards_module_layouts", lambda: guarded)
    weight = torch.nn.Parameter(torch.arange(9.0).reshape(3, 3), requires_grad=False)
    wrapper = rig.captured(rig.wrap(lambda x, w: x @ w, input_names=("x", "w")), X[:, :3], weight)
    for _ in range(2):  # compared natively the second time
        assert torch.equal(rig.call(wrapper, X[:, :3] + 1, weight), (X[:, :3] + 1) @ weight)
    weight.data = weight.data.t()
    if not guarded:
        with pytest.raises(ShapeError, match=r"static input w .* another layout.*strides \(3, 1\).*strides \(1, 3\)"):
            rig.call(wrapper, X[:, :3], weight)
    weight.data = weight.data.t()
    assert torch.equal(rig.call(wrapper, X[:, :3], weight), X[:, :3] @ weight)
    died = weakref.ref(weight)
    del weight
    gc.collect()
    assert died() is None


def test_dynamo_s_guards_are_asked_without_a_compilation() -> None:
    """What it answers is what Dynamo does."""
    module = torch.nn.Linear(3, 3)
    graphs: list[Any] = []
    compiled = torch.compile(module, backend=lambda graph, _: graphs.append(graph) or graph.forward)  # type: ignore[func-returns-value]
    with torch.no_grad():
        compiled(torch.ones(2, 3))
        module.weight.data = module.weight.data.t()
        compiled(torch.ones(2, 3))
    assert dynamo.guards_module_layouts() == (len(graphs) == 2)
