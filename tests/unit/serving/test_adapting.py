"""Sizes that padding keeps serving get graphs of their own, when the user asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphpass import CudaGraphManager, GraphRuntime
from graphpass.dispatch.owngraphs import OwnGraphs
from graphpass.errors import CaptureError, OptionError
from graphpass.serving.captured import CapturedKeys
from tests.unit.models import module
from tests.unit.serving.managed import (
    FULL,
    PIECEWISE,
    Attends,
    GrowingRuntime,
    Requests,
    Rows,
    SlotBuilder,
    assert_right,
    captured,
    captured_keys,
    hits,
    made,
    notes,
    rows,
    run,
)
from tests.unit.serving.test_manager_capture import counts_steps


def repeated(manager: CudaGraphManager, *sizes: int, times: int = 3, **given: Any) -> None:
    for size in sizes * times:
        run(manager, rows(size), **given)


def adapted(manager: CudaGraphManager, **given: Any) -> list[tuple[Any, int]]:
    return [(mode, key.num_tokens) for mode, key in manager.adapt(**given)]


def test_a_size_that_recurs_gets_its_own_graph() -> None:
    manager = captured(Rows().eval())
    repeated(manager, 3)
    repeated(manager, 5, times=2)  # not often enough
    repeated(manager, 8, times=5)  # exact already
    assert adapted(manager) == [(FULL, 3)]
    assert_right(manager, (3, 1, 8, 5))
    assert hits(manager) == {(FULL, 8): 2 + 5 + 2, (FULL, 4): 3, (FULL, 3): 1, (FULL, 2): 1}
    assert adapted(manager) == [(FULL, 5)]
    assert adapted(manager) == []
    manager.recapture()
    assert captured_keys(manager) == [(FULL, size, False) for size in (8, 5, 4, 3, 2)]
    assert_right(manager, (5, 3))
    manager.close()


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_mixed_batches_and_decode_are_told_apart(mode: str) -> None:
    model = Attends().eval()
    manager, requests = captured(model, mode, attention=SlotBuilder()), Requests(model)
    kinds = [([0, 1, 2], {}), ([2, 1, 0], {"uniform_decode": True, "num_reqs": 3})]
    for slots, kind in kinds * 3:
        requests.agree(manager, slots, **kind)
    decode = [(FULL, 3)] if mode == "FULL_AND_PIECEWISE" else []
    assert adapted(manager) == [(PIECEWISE, 3), *decode]
    for slots, kind in kinds:
        requests.agree(manager, slots, **kind)
    assert hits(manager)[PIECEWISE, 3] == 2 - len(decode)
    assert hits(manager).get((FULL, 3), 0) == len(decode)
    manager.close()


def test_a_single_token_is_compiled_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``on_fallback="error"`` too: no step meets the compilation."""
    manager = captured(Rows().eval(), compiler="aot_eager", on_fallback="error")
    repeated(manager, 1)
    compiled = manager.runtime.compiled()
    assert adapted(manager) == [(FULL, 1)]
    assert manager.runtime.compiled() > compiled
    assert_right(manager, (1, 2, 1))
    manager.close()


def test_the_most_padded_sizes_come_first() -> None:
    manager = captured(Rows().eval(), sizes=(10,))
    repeated(manager, 9, 2, 5)
    repeated(manager, 8, times=20)
    assert adapted(manager, max_sizes=2) == [(FULL, 8), (FULL, 2)]
    assert adapted(manager) == [(FULL, 5), (FULL, 9)]
    manager.close()


@pytest.mark.parametrize(("graph_bytes", "sizes"), [(0, []), (250, [3, 1]), (99, []), (None, [3, 1, 7])])
def test_graph_bytes_bounds_them(graph_bytes: int | None, sizes: list[int]) -> None:
    manager = captured(Rows().eval(), runtime=GrowingRuntime(), graph_bytes=graph_bytes)
    repeated(manager, 1, 3, times=4)
    repeated(manager, 7)
    repeated(manager, 3)
    found = [size for _, size in adapted(manager)]
    assert found == sizes
    assert ("graph_bytes" in notes(manager)) == (len(sizes) < 3)
    shared = OwnGraphs.on(torch.device("cpu"))
    assert shared.num_bytes() == 100 * len(sizes)
    manager.close()
    assert shared.num_bytes() == 0


def test_a_graph_that_is_no_faster_is_dropped_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = captured(Rows().eval())
    repeated(manager, 3, 5)
    of_tokens = CapturedKeys._seconds
    monkeypatch.setattr(CapturedKeys, "_seconds", lambda *of: {3: 3.97}.get(of[1][1].num_tokens) or of_tokens(*of))
    assert adapted(manager) == [(FULL, 5)]
    captures = manager.runtime.stats().captured
    counts = manager.runtime.counts()
    assert [key.num_tokens for (_, _, key), of_key in counts.items() if of_key.static_sets] == [8, 4, 2, 5]
    assert adapted(manager) == []
    repeated(manager, 3, 5, 8, 1)
    assert_right(manager, (3, 5, 8, 1))
    assert manager.runtime.stats().captured == captures, "other graphs stay as they were"
    manager.close()


def test_beside_others_in_a_runtime_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = GraphRuntime()
    other = captured(Attends().eval(), attention=SlotBuilder(), sizes=(3, 8), runtime=runtime)
    manager = captured(Rows().eval(), runtime=runtime)
    repeated(manager, 3)
    monkeypatch.setattr(CapturedKeys, "_seconds", lambda *of: 1.0)
    assert adapted(manager) == []
    captures = runtime.stats().captured
    requests = Requests(other.model)
    for _ in range(2):
        requests.agree(other, [0, 1, 2])
        assert_right(manager)
    assert runtime.stats().captured == captures
    assert adapted(manager) == []


def test_keys_of_replaced_weights_are_left_alone() -> None:
    manager = captured(Rows().eval())
    repeated(manager, 3)
    with torch.no_grad():
        manager.model.inner.weight.data = 2 * manager.model.inner.weight
    assert adapted(manager) == []
    repeated(manager, 3)
    assert adapted(manager) == [(FULL, 3)]
    assert_right(manager)
    repeated(manager, 5)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="autocast"):
        manager.adapt()


def test_a_key_of_dropped_graphs_is_not_revived(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = captured(Rows().eval(), sizes=(1, 2, 4, 8))
    manager.runtime.lease.entries_dropped()  # as if a graph had died with a parameter
    repeated(manager, 3)  # captures size 4 again, and forgets those of its callable

    def stale() -> list[int]:
        keys = manager._captured
        return [key.num_tokens for (_, key), one in keys._by_key.items() if not keys._is_valid(one)]

    assert stale() == [1]
    monkeypatch.setattr(CapturedKeys, "_seconds", lambda *of: 1.0)
    assert adapted(manager) == []
    assert stale() == [1]
    assert_right(manager)


class Fails(nn.Module):
    """Cannot run one size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise ValueError("not one")
        return x * 2


def test_a_size_that_cannot_be_captured_stays_padded_and_the_others_adapt() -> None:
    manager = captured(Fails().eval())
    for _ in range(3):
        for size in (1, 3):
            x = rows(size)
            torch.testing.assert_close(run(manager, x), x * 2)
    assert adapted(manager) == [(FULL, 3)]
    assert "a size that recurs stays padded" in notes(manager)
    assert "not one" in notes(manager)
    assert adapted(manager) == []
    torch.testing.assert_close(run(manager, rows(1)), rows(1) * 2)


def test_an_interrupt_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = captured(Rows().eval())
    repeated(manager, 3, 5)
    of_key = CapturedKeys._captured

    def interrupted(keys: CapturedKeys, key: Any) -> Any:
        if key[1].num_tokens == 3:
            raise KeyboardInterrupt
        return of_key(keys, key)

    monkeypatch.setattr(CapturedKeys, "_captured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manager.adapt()
    assert sum(counts.static_sets for counts in manager.runtime.counts().values()) == 3
    monkeypatch.undo()
    assert adapted(manager) == [(FULL, 5), (FULL, 3)]
    assert_right(manager, (5, 3))


def test_keys_of_other_fields_keep_their_batches() -> None:
    """A key of fewer tokens that is longer must not take the batches of a shorter one."""
    sizes: Any = {"num_tokens": [2, 8], "length": [32, 4096]}
    manager = captured(Rows().eval(), sizes=sizes)
    repeated(manager, 6, extra=(("length", 4000),))
    keys = [(key.num_tokens, dict(key.extra)["length"]) for _, key in manager.adapt()]
    assert keys == [(6, 4096), (6, 32)]
    for length, padded in ((20, 32), (100, 4096)):
        run(manager, rows(5), extra=(("length", length),))
        assert manager.last_step is not None
        assert dict(manager.last_step.descriptor.extra)["length"] == padded


def test_max_bytes_of_the_capture_holds() -> None:
    manager = made(Rows().eval(), runtime=GrowingRuntime())
    manager.capture(max_bytes=350)
    repeated(manager, 3)
    assert adapted(manager) == []
    assert manager.runtime.pool_bytes() == 300


def test_state_of_the_model_and_inputs_stay_as_they_were() -> None:
    model = module(counts_steps, steps=torch.zeros(1 << 19)).eval()
    manager = captured(model)
    repeated(manager, 3)
    manager.buffers["x"].fill_(7)
    assert adapted(manager) == [(FULL, 3)]
    assert model.steps.unique().tolist() == [3]
    assert manager.buffers["x"].eq(7).all()
    assert manager.stats().replays == 3
    manager.close()


def test_the_report_says_where_it_would_help() -> None:
    manager = captured(Rows().eval())
    repeated(manager, 3)
    assert "or adapt() between requests" in str(manager.report())
    manager.adapt()
    repeated(manager, 9)  # no key holds it
    report = str(manager.report())
    assert "Suggested for this traffic" in report
    assert "adapt()" not in report
    manager.close()


@pytest.mark.parametrize(
    ("max_sizes", "is_captured", "error", "match"),
    [(0, True, OptionError, "max_sizes"), (8, False, CaptureError, "nothing has been captured yet")],
)
def test_what_is_refused(max_sizes: int, is_captured: bool, error: type[Exception], match: str) -> None:
    manager = (captured if is_captured else made)(Rows().eval())
    with pytest.raises(error, match=match):
        manager.adapt(max_sizes)
    manager.close()


def test_sizes_that_are_products_of_other_fields_stay_padded() -> None:
    manager = captured(Rows().eval(), sizes={"batch": [2], "seq": [4]})  # type: ignore[arg-type]
    repeated(manager, 6, extra=(("batch", 2), ("seq", 3)))
    assert hits(manager) == {(FULL, 8): 3}
    assert manager.adapt() == ()
    manager.close()
