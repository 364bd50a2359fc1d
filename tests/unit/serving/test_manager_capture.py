"""What a manager captures: in which order, over what, how much, and how it starts anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphpass import DispatchReason
from graphpass.errors import CaptureError
from graphpass.regions import register_padding_rule
from tests.unit.models import module
from tests.unit.serving.managed import (
    EVENTS,
    LARGEST,
    WIDTH,
    Attends,
    GrowingRuntime,
    Rows,
    SlotBuilder,
    assert_right,
    captured,
    captured_keys,
    made,
    notes,
    run,
)


@pytest.mark.parametrize(("mode", "query_len"), [("FULL", None), ("FULL_DECODE_ONLY", 1), ("FULL_DECODE_ONLY", 2)])
def test_inputs_and_metadata_are_prepared_before_the_warm_up_and_before_the_recording(
    mode: str, query_len: int | None
) -> None:
    builder = SlotBuilder()
    manager = made(Attends().eval(), mode, attention=builder, query_len=query_len or 1)
    EVENTS.clear()
    manager.capture()
    keys = [key.captured.descriptor for key in manager.stats().keys]
    assert [key.num_tokens for key in keys] == [8, 4, 2]
    _learning, *examples = builder.examples
    assert examples == [(key, query_len) for key in keys for _ in range(2)]
    assert builder.built_for == [None, *(key for key in keys for _ in range(2))]
    # Learning; then for each key, before and after the warm-up.
    assert ["example", "build", "op", *["example", "build", "op"] * 2 * len(keys)] == EVENTS
    assert not builder.sums[: builder.num_slots].any(), "only scratch was written"


@pytest.mark.parametrize(("max_bytes", "num_captured"), [(0, 0), (99, 0), (100, 1), (250, 2), (300, 3)])
def test_capture_keeps_to_max_bytes_and_says_what_was_left_out(max_bytes: int, num_captured: int) -> None:
    manager = made(Rows().eval(), runtime=GrowingRuntime())
    manager.capture(max_bytes=max_bytes)
    assert len(manager.stats().keys) == num_captured
    assert manager.stats().pool_bytes <= max_bytes
    left_out = [key.num_tokens for _, key in manager.stats().left_out]
    assert left_out == [8, 4, 2][num_captured:]
    assert manager.needs_capture() == bool(left_out)
    assert len(manager.stats()["Left out"].rows) == len(left_out)
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        assert f"FULL {left_out[0]} tokens num_reqs={left_out[0]}{more}: keys left out" in notes(manager)
    assert_right(manager, range(1, LARGEST + 1))
    before = captured_keys(manager)
    if left_out:
        manager.capture()
        assert captured_keys(manager)[: len(before)] == before, "what was captured is not captured again"
        assert manager.stats().left_out == ()
        assert not manager.needs_capture()
    assert_right(manager, range(1, LARGEST + 1))


@pytest.mark.parametrize(("rank", "shown"), [(None, True), (0, True), (1, False)])
def test_a_progress_bar_on_the_first_rank(
    rank: int | None, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rank is not None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    manager = made(Rows().eval(), "PIECEWISE", (4,), progress=True)
    capsys.readouterr()
    manager.capture()
    assert ("capturing" in capsys.readouterr().err) == shown


@pytest.mark.parametrize(
    ("mode", "num_keys", "found", "remedy"),
    [("FULL", 3, "3 keys", "recapture"), ("NONE", 0, "a dispatcher without keys", "mode and sizes")],
)
def test_where_nothing_is_to_be_captured_a_capture_is_refused(
    mode: str, num_keys: int, found: str, remedy: str
) -> None:
    manager = captured(Rows().eval(), mode)
    with pytest.raises(CaptureError, match="nothing to capture") as raised:
        manager.capture()
    assert found in raised.value.found
    assert remedy in raised.value.remedy
    assert manager.runtime.stats().captured == num_keys
    assert_right(manager)
    assert manager.stats().fallbacks == ({} if num_keys else {DispatchReason.DISABLED: 3})


@torch.library.custom_op("graphpass_manager_test::fails_at", mutates_args=())
def fails_at(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] in FAILS_AT:
        raise FloatingPointError("on purpose")
    return x + 1


fails_at.register_fake(torch.empty_like)


register_padding_rule("graphpass_manager_test::fails_at", lambda call: call.tensor("x"))
FAILS_AT: set[int] = set()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_key_that_cannot_be_captured_is_named_and_the_others_stay(mode: str) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.graphpass_manager_test.fails_at(x)

    manager = made(Fails(), mode)
    FAILS_AT.add(4)
    try:
        with pytest.raises(CaptureError, match="4 tokens"):
            manager.capture()
    finally:
        FAILS_AT.clear()
    assert [num_tokens for _, num_tokens, _ in captured_keys(manager)] == [8]
    assert_right(manager, model=lambda x: x + 1)
    manager.capture()
    assert [num_tokens for _, num_tokens, _ in captured_keys(manager)] == [8, 4, 2]
    assert_right(manager, model=lambda x: x + 1)


def counts_steps(self: Any, x: torch.Tensor) -> torch.Tensor:
    """In a buffer too large to be saved beside what the first run writes."""
    self.steps.add_(1)
    return nn.functional.dropout(x, 0.5) + self.steps[0]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_capture_leaves_the_state_of_the_model_as_it_was(mode: str) -> None:
    """Captures run over made-up rows: they never enter statistics, count as steps or draw the program's numbers."""
    model, eager = (module(counts_steps, steps=torch.zeros(1 << 19)) for _ in range(2))
    x = torch.ones(8, WIDTH)
    manager = made(model, mode)
    for look in (manager.estimate, manager.capture):
        torch.manual_seed(3)
        look()
        found = torch.rand(4)
        torch.manual_seed(3)
        torch.testing.assert_close(found, torch.rand(4))
        assert model.steps.unique().tolist() == [0]
    torch.manual_seed(1)
    got = [run(manager, x).clone() for _ in range(3)]
    torch.manual_seed(1)
    torch.testing.assert_close(got, [eager(x) for _ in range(3)])
    assert model.steps.unique().tolist() == [3]
