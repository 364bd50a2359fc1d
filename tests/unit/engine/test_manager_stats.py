"""A manager's counts and reasons, as tables and for Prometheus."""

from __future__ import annotations

import importlib.util
import logging
import sys

import pytest

from graphpass import Batch, DispatchReason
from graphpass.errors import CaptureError, OptionError, ShapeError
from tests.unit.engine.managed import Rows, assert_right, captured, notes, rows, run


def test_stats_count_batches_tokens_and_reasons() -> None:
    model = Rows().eval()
    manager = captured(model, "FULL_AND_PIECEWISE")
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
    assert "Dispatches" in str(stats)
    assert [row[:3] for row in stats["Without a graph"].rows] == [("too_large", "2"), ("empty", "1")]


def test_a_batch_that_is_refused_is_not_counted() -> None:
    manager = captured(Rows().eval())
    with pytest.raises(ShapeError):
        manager.run(Batch(3, inputs={"x": rows(4)}))
    stats = manager.stats()
    assert (stats.replays, dict(stats.fallbacks)) == (0, {})


@pytest.mark.skipif(importlib.util.find_spec("prometheus_client") is None, reason="prometheus-client is not here")
def test_prometheus_text() -> None:
    manager = captured(Rows().eval())
    for num_tokens in (3, 3, 8, 9):
        run(manager, rows(num_tokens))
    lines = manager.stats().prometheus().splitlines()
    assert 'graphpass_replays_total{key="4 tokens num_reqs=4",mode="FULL"} 2.0' in lines
    assert 'graphpass_real_tokens_total{key="4 tokens num_reqs=4",mode="FULL"} 6.0' in lines
    assert 'graphpass_padded_tokens_total{key="4 tokens num_reqs=4",mode="FULL"} 8.0' in lines
    assert 'graphpass_fallbacks_total{reason="too_large"} 1.0' in lines
    assert any(line.startswith('graphpass_capture_seconds{key="8 tokens') for line in lines)
    assert any(line.startswith("graphpass_pool_bytes ") for line in lines)
    assert any(line.startswith("graphpass_buffer_bytes ") for line in lines)


def test_prometheus_text_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = captured(Rows().eval())
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OptionError, match="prometheus-client") as raised:
        manager.stats().prometheus()
    assert "pip install" in raised.value.remedy


@pytest.mark.parametrize("on_fallback", ["warn", "silent", "error"])
def test_a_batch_without_a_graph_says_why(on_fallback: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Rows().eval()
    manager = captured(model, on_fallback=on_fallback)
    with caplog.at_level(logging.WARNING, "graphpass"):
        for _ in range(2):
            if on_fallback == "error":
                with pytest.raises(CaptureError, match="no graph") as raised:
                    run(manager, rows(9))
                assert "too_large" in raised.value.found
            else:
                assert_right(manager, model, [9])
    said = [record for record in caplog.records if "above the largest key" in record.getMessage()]
    assert len(said) == (on_fallback == "warn"), "once"
    if on_fallback != "error":
        assert "above the largest key" in notes(manager)
    assert_right(manager, model)
