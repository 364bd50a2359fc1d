"""A manager and its attention: whose metadata, refilled when, and which modes it allows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from graphpass import AttentionSupport, CudagraphDispatcher, CudaGraphManager
from graphpass.errors import ShapeError
from tests.unit.engine.managed import (
    EVENTS,
    FULL,
    MODES,
    PIECEWISE,
    Attends,
    DictBuilder,
    Requests,
    SlotBuilder,
    X,
    captured,
    hits,
    made,
    notes,
    rows,
    run,
)


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
        x, slots = rows(num_tokens), [(5 * n + step) % 16 for n in range(num_tokens)]
        got = run(manager, x, attention=slots, uniform_decode=bool(step % 2))
        torch.testing.assert_close(got, requests.step(x, slots))
        torch.testing.assert_close(builder.sums[:16], requests.sums)


def test_the_metadata_of_a_full_key_is_one_object_refilled_in_every_step() -> None:
    builder = SlotBuilder()
    model = Attends().eval()
    manager = captured(model, "FULL", attention=builder)
    requests = Requests(model)
    builder.built_for.clear()
    EVENTS.clear()
    for slots in ([1, 2, 3], [4, 5], [6, 7, 8, 9]):
        x = rows(len(slots))
        torch.testing.assert_close(run(manager, x, attention=slots), requests.step(x, slots))
    assert [key.num_tokens for key in builder.built_for if key] == [4, 2, 4]
    assert EVENTS == ["build"] * 3, "the op is in the graph"
    torch.testing.assert_close(builder.sums[:16], requests.sums)


@pytest.mark.parametrize(
    ("asked", "query_len", "support", "expected"),
    [
        ("FULL", 1, AttentionSupport.ALWAYS, "FULL"),
        ("FULL", 1, AttentionSupport.UNIFORM_BATCH, "FULL_AND_PIECEWISE"),
        ("FULL", 2, AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE, "PIECEWISE"),
        ("FULL_AND_PIECEWISE", 1, AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE, "FULL_AND_PIECEWISE"),
        ("FULL_AND_PIECEWISE", 2, AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE, "PIECEWISE"),
        ("FULL_AND_PIECEWISE", 1, AttentionSupport.NEVER, "PIECEWISE"),
        ("FULL_DECODE_ONLY", 1, AttentionSupport.NEVER, "PIECEWISE"),
        ("NONE", 1, AttentionSupport.NEVER, "NONE"),
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


def test_a_bounded_manager_runs_every_batch() -> None:
    builder = SlotBuilder(AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    model = Attends().eval()
    manager = captured(model, "FULL", attention=builder)
    requests = Requests(model)
    for uniform in (False, True):
        x = rows(3)
        got = run(manager, x, attention=[1, 2, 3], uniform_decode=uniform)
        torch.testing.assert_close(got, requests.step(x, [1, 2, 3]))
    assert hits(manager) == {(PIECEWISE, 4): 1, (FULL, 4): 1}


def test_a_key_field_of_attention_chooses_the_key() -> None:
    """A bucketed maximum length beside the token count."""

    class Bounded(SlotBuilder):
        def extra(self, attention: Any) -> tuple[tuple[str, Any], ...]:
            return (("max_seq_len", max(attention) + 1),)

    builder = Bounded()
    model = Attends().eval()
    dispatcher = CudagraphDispatcher("FULL", {"num_tokens": [4, 8], "max_seq_len": [8, 16]}, max_num_reqs=8)
    manager = CudaGraphManager(model, dispatcher, [X], attention=builder, compiler="eager", on_fallback="silent")
    manager.capture()
    assert len(manager.stats().keys) == 4
    requests = Requests(model)
    for slots in ([1, 2], [9, 3], [7] + [1] * 0, list(range(8)), [15, 0, 1, 2, 3]):
        x = rows(len(slots))
        torch.testing.assert_close(run(manager, x, attention=slots), requests.step(x, slots))
    used = [
        (key.captured.descriptor.num_tokens, dict(key.captured.descriptor.extra)["max_seq_len"], key.replays)
        for key in manager.stats().keys
    ]
    assert sorted(used) == [(4, 8, 2), (4, 16, 1), (8, 8, 1), (8, 16, 1)]
    learned = [key for key in builder.built_for if key is None]
    assert len(learned) == 1


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_metadata_that_does_not_fit_is_refused_and_the_next_batch_is_right(mode: str) -> None:
    builder = SlotBuilder()
    model = Attends().eval()
    manager = captured(model, mode, attention=builder)
    requests = Requests(model)
    if mode == "FULL":
        with pytest.raises(ShapeError, match="too many slots"):
            run(manager, rows(3), attention=[1, 2, 3, 4, 5])
    with pytest.raises((TypeError, ValueError)):
        run(manager, rows(3), attention=["no slot"] * 3)
    assert not builder.sums[:16].any()
    for slots in ([1, 2, 3], [3, 4]):
        x = rows(len(slots))
        torch.testing.assert_close(run(manager, x, attention=slots), requests.step(x, slots))
    torch.testing.assert_close(builder.sums[:16], requests.sums)
