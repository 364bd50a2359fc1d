"""Outputs: independent clones, views that go stale, and aliases that stay aliases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from graphpass.capture.tape import TapeDevice
from graphpass.errors import StaticInputError

X = torch.arange(8.0)


def test_clones_are_independent(rig: Any) -> None:
    wrapper = rig.wrap(lambda x: x + 1)
    results = [rig.capture(wrapper, X)]
    results += [rig.call(wrapper, X + step) for step in range(1, 5)]
    for step, result in enumerate(results):
        assert torch.equal(result, X + step + 1)
    results[0].fill_(-1)
    assert torch.equal(rig.call(wrapper, X), X + 1)


@pytest.mark.parametrize(
    ("dtype", "sentinel"),
    [
        (torch.float32, float("nan")),
        (torch.bfloat16, float("nan")),
        (torch.int64, torch.iinfo(torch.int64).min),
        (torch.uint8, 255),
        (torch.bool, True),
        (torch.complex64, complex("nan")),
    ],
)
def test_a_view_is_stale_after_a_replay_of_another_key(rig: Any, dtype: torch.dtype, sentinel: Any) -> None:
    wrapper = rig.wrap(lambda x: ((x * 1).to(dtype), x + 1), outputs="view")
    view, _ = rig.capture(wrapper, X, at_key=8)
    rig.capture(wrapper, X[:4], at_key=4)
    view, plain = rig.call(wrapper, X * 0, at_key=8)
    assert torch.equal(view, torch.zeros(8, dtype=dtype))
    assert torch.equal(plain, torch.ones(8))
    rig.call(wrapper, X[:4] * 2, at_key=4)
    if view.is_floating_point() or view.is_complex():
        assert view.isnan().all()
    else:
        assert (view == sentinel).all()
    assert plain.isnan().all()


def test_a_region_that_reads_the_pool_reads_no_other_memory(rig: Any) -> None:
    first = rig.wrap(lambda x: x + 1, "PIECEWISE", name="first", outputs="view")
    second = rig.wrap(lambda x: x * 2, "PIECEWISE", name="second", outputs="view", input_names=("hidden",))
    rig.capture(lambda x: second(first(x)), X, at_mode="PIECEWISE")
    with pytest.raises(StaticInputError, match="input hidden of second has another address than at capture"):
        rig.call(second, X, at_mode="PIECEWISE")
    assert rig.counts(second).replayed == 1
    assert torch.equal(rig.call(lambda x: second(first(x)), X * 4, at_mode="PIECEWISE"), (X * 4 + 1) * 2)


def test_the_recorded_result_is_stale_until_its_first_replay(rig: Any) -> None:
    """What a recording leaves in its outputs is not the answer: on a GPU nothing ran."""
    wrapper = rig.wrap(lambda x: x + 1, outputs="view")
    stale: list[list[torch.Tensor]] = []

    class Watched(TapeDevice):
        def make_stale(self, outputs: Sequence[torch.Tensor]) -> None:
            super().make_stale(outputs)
            stale.append([output.clone() for output in outputs])

    rig.runtime.lease._device = Watched()
    assert torch.equal(rig.capture(wrapper, X), X + 1)
    (recorded,) = stale[0]
    assert recorded.isnan().all()


# -- aliases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["clone", "view"])
@pytest.mark.parametrize("static", [False, True], ids=["staged", "static"])
def test_outputs_that_alias_an_input_are_views_of_the_callers_tensor(rig: Any, outputs: str, static: bool) -> None:
    def region(x: torch.Tensor) -> dict[str, torch.Tensor]:
        x.mul_(2)
        return {"same": x, "row": x[1], "turned": x.t(), "bits": x[0].view(torch.int32), "fresh": x + 1}

    wrapper = rig.wrap(region, outputs=outputs, static_inputs=[0] if static else [], mutated_inputs=[0])
    x = torch.arange(12.0).reshape(3, 4)
    eager_x = x.clone()
    rig.capture(wrapper, x)
    region(eager_x)
    if not static:
        x, eager_x = x.clone(), eager_x.clone()  # the aliases are those of this call's tensor
    got, want = rig.call(wrapper, x), region(eager_x)
    assert got["same"] is x
    for name, value in want.items():
        assert torch.equal(got[name], value)
        assert got[name].stride() == value.stride()
        assert (got[name].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) is (name != "fresh")
    x.fill_(9)
    assert torch.equal(got["row"], torch.full((4,), 9.0))
    assert torch.equal(got["turned"], torch.full((4, 3), 9.0))


@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_outputs_that_share_storage_share_it_afterwards(rig: Any, outputs: str) -> None:
    def region(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.cat([x, x + 1]).reshape(4, 4)
        return y[1], y.t(), y, y[1:, ::2], y, x * 3

    wrapper = rig.captured(rig.wrap(region, outputs=outputs), X)
    row, turned, whole, corner, again, apart = rig.call(wrapper, X * 2)
    for got, want in zip((row, turned, whole, corner, again, apart), region(X * 2), strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
    assert again is whole
    storages = {t.untyped_storage().data_ptr() for t in (row, turned, whole, corner)}
    assert len(storages) == 1
    assert apart.untyped_storage().data_ptr() not in storages
    whole.zero_()
    assert torch.equal(corner, torch.zeros(3, 2))


@pytest.mark.parametrize("outputs", ["clone", "view"])
def test_memory_that_the_region_reaches_by_itself_is_never_overwritten(rig: Any, outputs: str) -> None:
    table = torch.arange(8.0)
    wrapper = rig.captured(rig.wrap(lambda x: (x + table, table, table[2:4]), outputs=outputs), X, at_key=8)
    rig.capture(wrapper, X[:8] * 2, at_key=16)
    for key in (8, 16, 8):
        total, same, part = rig.call(wrapper, X, at_key=key)
        assert torch.equal(total, X * 2)
        assert same is table
        assert part.data_ptr() == table[2:].data_ptr()
    assert torch.equal(table, torch.arange(8.0))
