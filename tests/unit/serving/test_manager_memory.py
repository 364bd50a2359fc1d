"""A manager's memory and its counts: estimates, the report by group, captures within a limit, reasons."""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any

import pytest
import torch

from graphpass import BatchDescriptor, CudaGraphManager, DispatchReason
from graphpass.errors import CaptureError, OptionError
from tests.unit.serving.managed import (
    EVENTS,
    LARGEST,
    Attends,
    GrowingRuntime,
    Requests,
    Rows,
    SlotBuilder,
    assert_right,
    captured,
    hits,
    made,
    notes,
    rows,
    run,
)


def sampled(manager: CudaGraphManager) -> dict[str, list[int]]:
    return {group.name: [key.num_tokens for key in group.sampled] for group in manager.estimate().groups}


def test_the_capture_uses_what_the_estimate_compiled() -> None:
    manager = made(Rows().eval())
    manager.estimate()
    compiled = (manager.runtime.compiled(), len(manager.runtime.callables()))
    manager.capture()
    assert (manager.runtime.compiled(), len(manager.runtime.callables())) == compiled
    assert {(c.captured, c.replayed) for c in manager.runtime.counts().values()} == {(1, 1)}
    assert_right(manager)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_an_estimate_between_steps_changes_no_step(mode: str) -> None:
    model = Attends().eval()
    builder, requests = SlotBuilder(), Requests(model)
    manager = captured(model, mode, attention=builder)
    before = manager.runtime.stats().captured
    for step in range(3):
        requests.agree(manager, [step, step + 1, 7])
        manager.dispatcher.add_key(
            *((mode, BatchDescriptor(5 + step)) if mode == "PIECEWISE" else ("FULL", _key(mode, 5 + step)))
        )
        manager.estimate()
        torch.testing.assert_close(builder.sums[:16], requests.sums)
    assert manager.runtime.stats().captured == before
    assert sum(hits(manager).values()) == 3


def _key(mode: str, size: int) -> BatchDescriptor:
    return BatchDescriptor(size, num_reqs=size, uniform=mode == "FULL_AND_PIECEWISE")


def test_an_estimate_keeps_what_an_engine_wrote_to_the_buffers() -> None:
    """Also behind the largest key: a batch that large runs without a graph."""
    manager = captured(Rows().eval())
    run(manager, rows(LARGEST))
    manager.buffers["x"].copy_(rows(LARGEST) + 1)
    manager.estimate()
    torch.testing.assert_close(manager.buffers["x"], rows(LARGEST) + 1)


def test_an_estimate_is_made_once_for_a_ladder() -> None:
    builder = SlotBuilder()
    manager = made(Attends().eval(), "FULL", attention=builder)
    estimate = manager.estimate()
    EVENTS.clear()
    assert manager.estimate() is estimate
    manager.capture()
    EVENTS.clear()
    assert manager.estimate() is estimate
    assert EVENTS == []
    manager.dispatcher.add_key("FULL", BatchDescriptor(10, num_reqs=10))
    assert sampled(manager) == {"mixed FULL": [10]}
    assert manager.estimate().keys[0][1].num_tokens == 10
    manager.dispatcher.initialize_keys("FULL")
    assert sampled(manager) == {"mixed FULL": [8]}
    manager.close()
    EVENTS.clear()
    assert manager.estimate() is not estimate
    assert "op" in EVENTS


def test_where_a_key_cannot_be_captured_nothing_is_left() -> None:
    class Fails(SlotBuilder):
        def build(self, attention: Any, key: BatchDescriptor | None) -> Any:
            if self.built_for:  # the first run has been
                raise FloatingPointError("on purpose")
            return super().build(attention, key)

    manager = made(Attends().eval(), "PIECEWISE", attention=Fails())
    with pytest.raises(FloatingPointError, match="on purpose"):
        manager.estimate()
    assert manager.runtime.counts() == {}
    assert manager.runtime.scopes.current() is None


# A manager's counts and reasons, as tables and for Prometheus.


def test_stats_count_batches_tokens_and_reasons() -> None:
    manager = captured(Rows().eval(), "FULL_AND_PIECEWISE")
    for num_tokens, uniform in ((3, False), (4, False), (3, True), (8, True), (9, False), (10, True), (0, False)):
        run(manager, rows(num_tokens), uniform_decode=uniform)
    stats = manager.stats()
    used = {
        (str(key.captured.mode), key.captured.descriptor.num_tokens): (key.replays, key.real_tokens, key.padded_tokens)
        for key in stats.keys
    }
    assert used == {
        ("PIECEWISE", 8): (0, 0, 0),
        ("PIECEWISE", 4): (2, 7, 8),
        ("PIECEWISE", 2): (0, 0, 0),
        ("FULL", 8): (1, 8, 8),
        ("FULL", 4): (1, 3, 4),
        ("FULL", 2): (0, 0, 0),
    }
    assert [key.padding for key in stats.keys if key.replays] == [1 - 7 / 8, 0, 1 - 3 / 4]
    assert stats.fallbacks == {DispatchReason.TOO_LARGE: 2, DispatchReason.EMPTY: 1}
    assert (stats.replays, stats.fallback_tokens, stats.left_out) == (4, 19, ())
    assert stats.buffer_bytes > 0
    assert stats.histogram == {3: 2, 4: 1, 8: 1, 9: 1, 10: 1}
    run(manager, rows(3))
    assert stats.replays == 4, "a snapshot"
    assert stats["Dispatches"].columns[2:4] == ("replays", "real tokens")
    assert [row[:3] for row in stats["Without a graph"].rows] == [("too_large", "2"), ("empty", "1")]


@pytest.mark.skipif(importlib.util.find_spec("prometheus_client") is None, reason="prometheus-client is not here")
def test_prometheus_text() -> None:
    manager = captured(Rows().eval(), runtime=GrowingRuntime())
    for num_tokens in (3, 3, 8, 9):
        run(manager, rows(num_tokens))
    lines = manager.stats().prometheus().splitlines()
    assert 'graphpass_group_bytes{group="mixed FULL",kind="pool"} 300.0' in lines
    assert 'graphpass_group_bytes{group="mixed FULL",kind="driver"} 0.0' in lines
    assert 'graphpass_replays_total{key="4 tokens num_reqs=4",mode="FULL"} 2.0' in lines
    assert 'graphpass_real_tokens_total{key="4 tokens num_reqs=4",mode="FULL"} 6.0' in lines
    assert 'graphpass_padded_tokens_total{key="4 tokens num_reqs=4",mode="FULL"} 8.0' in lines
    assert 'graphpass_fallbacks_total{reason="too_large"} 1.0' in lines
    of_group = 'graphpass_group_seconds{group="mixed FULL"}'
    for start in (
        of_group,
        'graphpass_capture_seconds{key="8 tokens',
        "graphpass_pool_bytes ",
        "graphpass_buffer_bytes ",
    ):
        assert any(line.startswith(start) for line in lines)


def test_prometheus_text_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = captured(Rows().eval())
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OptionError, match="prometheus-client") as raised:
        manager.stats().prometheus()
    assert "pip install" in raised.value.remedy


@pytest.mark.parametrize("on_fallback", ["warn", "silent", "error"])
def test_a_batch_without_a_graph_says_why(on_fallback: str, caplog: pytest.LogCaptureFixture) -> None:
    manager = captured(Rows().eval(), on_fallback=on_fallback)
    with caplog.at_level(logging.WARNING, "graphpass"):
        for _ in range(2):
            if on_fallback == "error":
                with pytest.raises(CaptureError, match="without a graph") as raised:
                    run(manager, rows(9))
                assert "too_large" in raised.value.found
            else:
                assert_right(manager, [9])
    said = [record for record in caplog.records if "above the largest key" in record.getMessage()]
    assert len(said) == (on_fallback == "warn"), "once"
    if on_fallback != "error":
        assert "above the largest key" in notes(manager)
    assert_right(manager)
