"""Models that are no single graph, attention and its metadata, several managers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import AttentionSupport, Batch, CudagraphDispatcher, CudaGraphManager, GraphRuntime, InputSpec
from graphpass.errors import CaptureError, ShapeError
from tests.unit.models import module
from tests.unit.serving.managed import (
    LARGEST,
    MODES,
    PIECEWISE,
    SIZES,
    WIDTH,
    Attends,
    DictBuilder,
    Doubled,
    Requests,
    Rows,
    SlotBuilder,
    X,
    assert_right,
    captured,
    captured_keys,
    made,
    notes,
    replays,
    rows,
    run,
)


def test_compare_compares_every_step() -> None:
    """Through Dynamo, in any grad mode of the caller."""
    manager = captured(Rows().eval(), compare=True)
    assert "compare=True" in notes(manager)
    before = replays(manager)
    assert_right(manager, range(1, 9))
    assert replays(manager) == before + 8


def test_a_tensor_that_the_model_keeps_elsewhere_goes_through_dynamo() -> None:
    model: Any = module(lambda self, x: x * self.table[0], table=[torch.ones(WIDTH)])
    manager = captured(model)
    assert "neither arguments, parameters nor buffers" in notes(manager)
    assert_right(manager)
    model.table[0] = torch.full((WIDTH,), 3.0)
    assert_right(manager)


class ReadsItem(nn.Module):
    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x * first[0].item() + 1


@pytest.mark.parametrize("on_fallback", ["warn", "silent", "error"])
def test_a_model_that_full_cannot_hold_goes_on_in_regions(on_fallback: str, caplog: pytest.LogCaptureFixture) -> None:
    specs = [X, InputSpec("first", (1,), torch.float32, token_dim=None)]
    manager = made(ReadsItem(), "FULL", specs=specs, on_fallback=on_fallback)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        if on_fallback == "error":
            with pytest.raises(CaptureError, match="FULL is not possible") as raised:
                manager.capture()
            assert "PIECEWISE" in raised.value.remedy
            return
        with caplog.at_level(logging.WARNING, "graphpass"):
            manager.capture()
        said = [record for record in caplog.records if "FULL is not possible" in record.getMessage()]
        assert len(said) == (on_fallback == "warn")
        assert "FULL is not possible, PIECEWISE instead" in notes(manager)
        assert [mode for mode, _, _ in captured_keys(manager)] == [PIECEWISE] * 3
        for num_tokens in (3, 8, 1, 9):
            x, first = rows(num_tokens), torch.tensor([float(num_tokens)])
            got = manager.run(Batch(num_tokens, inputs={"x": x, "first": first}))
            torch.testing.assert_close(got, x * num_tokens + 1)
    assert manager.stats().replays == 3


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_another_structure_at_another_size_is_refused_by_name(mode: str) -> None:
    manager = captured(lambda x: (x + 1, x * 2) if x.shape[0] > 8 else (x + 1,), mode, sizes=(2, 8))
    with pytest.raises(ShapeError, match="another structure"):
        run(manager, rows(9))
    torch.testing.assert_close(run(manager, rows(3)), (rows(3) + 1,))
    manager = made(lambda x: (x + 1, x * 2) if x.shape[0] > 4 else (x + 1,), mode, sizes=(2, 8))
    with pytest.raises(ShapeError, match=r"another structure|does not fit"):
        manager.capture()


def test_another_dtype_at_another_size_is_refused_by_name() -> None:
    manager = made(lambda x: x.bfloat16() if x.shape[0] > 4 else x)
    with pytest.raises(ShapeError, match="output 0") as raised:
        manager.capture()
    assert "bfloat16" in raised.value.expected
    assert "float32" in raised.value.found


# A manager and its attention: whose metadata, refilled when, and which modes it allows.


@pytest.mark.parametrize(
    ("mode", "compiler", "made_by"),
    [
        *((mode, "eager", SlotBuilder) for mode in MODES),
        ("FULL", "aot_eager", SlotBuilder),
        ("PIECEWISE", "aot_eager", SlotBuilder),
        *((mode, "eager", DictBuilder) for mode in MODES),
    ],
)
def test_attention_keeps_what_it_keeps_without_graphs_and_padding(
    mode: str, compiler: str, made_by: type[SlotBuilder]
) -> None:
    builder = made_by()
    model = Attends().eval()
    manager = captured(model, mode, attention=builder, compiler=compiler)
    requests = Requests(model)
    for step, num_tokens in enumerate((3, 8, 1, 9, 10, 2, 5, 4)):
        slots = [(5 * n + step) % 16 for n in range(num_tokens)]
        requests.agree(manager, slots, uniform_decode=bool(step % 2))
        torch.testing.assert_close(builder.sums[:16], requests.sums)


@pytest.mark.parametrize(
    ("asked", "query_len", "support", "expected"),
    [
        ("FULL", 1, AttentionSupport.ALWAYS, "FULL"),
        ("FULL", 2, AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE, "PIECEWISE"),
        ("FULL_AND_PIECEWISE", 1, AttentionSupport.NEVER, "PIECEWISE"),
    ],
)
def test_what_attention_can_be_captured_with_bounds_the_mode(
    asked: str, query_len: int, support: AttentionSupport, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "graphpass"):
        manager = made(Attends().eval(), asked, attention=SlotBuilder(support), query_len=query_len)
    assert str(manager.dispatcher.mode) == expected
    assert manager.dispatcher.uniform_decode_query_len == query_len
    warned = [record.getMessage() for record in caplog.records if record.name == "graphpass"]
    assert len(warned) == (asked != expected)
    assert all("attention support" in text and text in notes(manager) for text in warned)


# Several managers of a runtime, a model or a dispatcher; several threads.


@pytest.mark.parametrize("shares", ["a runtime", "a class", "a model"])
def test_two_managers_keep_apart(shares: str) -> None:
    one = Rows().eval()
    two = {"a runtime": Doubled(), "a class": Rows().eval(), "a model": one}[shares]
    if shares == "a class":
        nn.init.ones_(two.inner.weight)
    runtime = GraphRuntime() if shares == "a runtime" else None
    first, smaller = captured(one, runtime=runtime), InputSpec("x", (6, WIDTH), torch.float32)
    second, sizes = captured(two, "PIECEWISE", (3, 6), [smaller], runtime=runtime), [1, 3, 5]
    for _ in range(2):
        assert_right(first)
        assert_right(second, sizes)
    one.inner.weight = nn.Parameter(torch.ones(5, WIDTH))
    assert_right(second, sizes)
    assert_right(first)
    first.close()
    assert first.needs_capture()
    assert_right(second, sizes)
    first.capture()
    assert_right(first)
    assert_right(second, sizes)


def test_closing_one_manager_of_a_runtime_leaves_the_other_right() -> None:
    runtime = GraphRuntime()
    model = Rows().eval()
    first, second = captured(model, runtime=runtime), captured(model, runtime=runtime)
    assert_right(second)
    first.close()
    assert_right(second)
    before = runtime.stats().captured
    assert_right(second)
    assert runtime.stats().captured == before


def test_a_lazy_dispatcher_captures_each_key_at_its_first_use() -> None:
    """As the refusal of a run before the capture says."""
    model = Rows().eval()
    dispatcher = CudagraphDispatcher("FULL", SIZES, max_num_reqs=LARGEST, lazy=True)
    manager = CudaGraphManager(model, dispatcher, [X], compiler="eager", on_moved_input="error")
    assert_right(manager, [3, 4, 8])
    assert [key.num_tokens for _, _, key in manager.runtime.counts()] == [4, 8]
    assert "weights were replaced" not in notes(manager)
