"""A real encoder with real weights: every way to run it agrees, and the counts say what ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import cgpass
import graphpass as gp
from graphpass.compile import CompiledRegion

SDPA = "torch.nn.functional.scaled_dot_product_attention"
LADDER = {"num_reqs": [2, 4], "seq_len": [16, 32]}
# below, on and between the capture sizes
SIZES = [(1, 9), (2, 16), (3, 20), (4, 32), (2, 31), (4, 16)]


@contextmanager
def region_calls() -> Iterator[Counter[str]]:
    """Count the calls of compiled regions, whoever makes them."""
    counted: Counter[str] = Counter()
    call = CompiledRegion.__call__

    def counting(region: CompiledRegion, *args: Any) -> Any:
        counted["region"] += 1
        return call(region, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledRegion, "__call__", counting)
        yield counted


def graphed(minilm: Any, mode: str, compiler: str) -> gp.GraphedModel:
    return gp.graphed(
        minilm.model,
        capture_sizes=LADDER,
        dynamic_dims={"input_ids": {0: "num_reqs", 1: "seq_len"}},
        padding={"attention_mask": 0, "input_ids": 0},
        splitting_ops=[SDPA],
        mode=mode,
        compiler=compiler,
    )


@pytest.mark.parametrize("mode", ["PIECEWISE", pytest.param("FULL", marks=pytest.mark.soak)])
def test_graphed_agrees_with_eager_at_every_size(minilm: Any, mode: str) -> None:
    fast = graphed(minilm, mode, "eager")
    fast.capture(**minilm.batch(3, 20))
    calls: Counter[tuple[int, int]] = Counter()
    for size in SIZES:
        batch = minilm.batch(*size)
        with torch.inference_mode():
            expected = minilm.model(**batch)
        found = fast(**batch)
        for one, other in zip(found, expected, strict=True):
            assert minilm.difference(one, other) < minilm.tolerance
        if size[0] > 1:  # a batch of one has a graph of its own in Dynamo, whose first call is not captured
            calls[
                next(n for n in LADDER["num_reqs"] if n >= size[0]), next(s for s in LADDER["seq_len"] if s >= size[1])
            ] += 1
    counts = fast.runtime.counts()
    num_regions = 7 if mode == "PIECEWISE" else 1
    assert len(counts) == num_regions * 4
    for (region, counted_mode, key), record in counts.items():
        num_reqs = key.num_tokens // dict(key.extra)["seq_len"]
        assert str(counted_mode) == mode
        assert region.endswith(".full") == (mode == "FULL")
        # Captured once; replayed once by the capturing call and once by each call of that key.
        assert (record.warmed, record.captured) == (1, 1), region
        assert record.replayed == 1 + calls[num_reqs, dict(key.extra)["seq_len"]], region
    fast.close()


@pytest.mark.parametrize("mode", ["PIECEWISE", pytest.param("FULL", marks=pytest.mark.soak)])
def test_no_python_of_a_captured_region_runs_in_a_replay(minilm: Any, mode: str) -> None:
    fast = graphed(minilm, mode, "eager")
    with region_calls() as counted:
        fast.capture(**minilm.batch(4, 32))
    captures = fast.runtime.stats().captured
    # Each graph: one warm-up and one recording of each of the 7 regions it holds; and one call of the example itself.
    assert counted["region"] == 2 * captures * (7 if mode == "FULL" else 1) + 7
    with region_calls() as counted:
        for size in SIZES[1:]:
            fast(**minilm.batch(*size))
    assert counted["region"] == 0
    fast.close()


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_an_engine_sets_the_mode_and_counts_replays(minilm: Any, compiler: str) -> None:
    """One compile, every mode: no context, PIECEWISE and FULL agree with eager; each key is captured once."""
    dispatcher = gp.CudagraphDispatcher("FULL_AND_PIECEWISE", LADDER, max_num_reqs=4)
    with gp.GraphRuntime() as runtime, torch.inference_mode():
        compiled = torch.compile(
            minilm.model,
            backend="cgpass",
            dynamic=True,
            options=cgpass.options(
                splitting_ops=[SDPA],
                mode="FULL_AND_PIECEWISE",
                capture_sizes=LADDER,
                dynamic_dims={"input_ids": {0: "num_reqs", 1: "seq_len"}},
                compiler=compiler,
                runtime=runtime,
            ),
        )
        for size in SIZES[1:4]:
            agree(minilm, compiled(**minilm.batch(*size)), size, size)
        assert runtime.counts() == {}
        with runtime.capturing() as scope:
            for mode, keys in dispatcher.capture_plan():
                for key in keys:
                    padded = tuple(dispatcher.fields(key).values())
                    with gp.set_forward_context(runtime_mode=mode, batch_descriptor=key):
                        agree(minilm, compiled(**minilm.batch(*padded)), padded, padded)
                    dispatcher.mark_captured(mode, key)
        (record,) = runtime.report().figures.callables
        assert [region.kind for region in record.regions] == ["captured", "eager"] * 6 + ["captured"]
        plans = [call.plan for call in scope.reached if call.plan is not None]
        assert [len(plan.rows) for plan in plans] == [7] * 4 + [1] * 4
        calls: Counter[tuple[Any, Any]] = Counter()
        for uniform in (False, True):
            for num_reqs, seq_len in SIZES:
                step = dispatcher.dispatch(num_reqs=num_reqs, uniform_decode=uniform, extra=(("seq_len", seq_len),))
                assert step.mode is (gp.CUDAGraphMode.FULL if uniform else gp.CUDAGraphMode.PIECEWISE)
                padded = tuple(dispatcher.fields(step.descriptor).values())
                batch = padded_to(minilm.batch(num_reqs, seq_len), padded)
                with gp.set_forward_context(runtime_mode=step.mode, batch_descriptor=step.descriptor):
                    agree(minilm, compiled(**batch), padded, (num_reqs, seq_len))
                calls[step.mode, step.descriptor] += 1
        counts = runtime.counts()
        assert {name for name, _, _ in counts} == {f"g0.r{i}" for i in range(0, 13, 2)} | {"g0.full"}
        for (_, mode, key), record in counts.items():
            assert (record.captured, record.replayed) == (1, 1 + calls[mode, key])


def padded_to(batch: dict[str, torch.Tensor], padded: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The batch with zero rows and columns up to the padded size."""
    num_reqs, seq_len = batch["input_ids"].shape
    return {
        name: torch.nn.functional.pad(value, (0, padded[1] - seq_len, 0, padded[0] - num_reqs))
        for name, value in batch.items()
    }


def agree(minilm: Any, found: Any, padded: tuple[int, ...], real: tuple[int, ...]) -> None:
    """The real part of ``found`` is what eager makes of the real batch."""
    num_reqs, seq_len = real
    hidden, pooled = found
    assert hidden.shape[:2] == padded
    expected = minilm.model(**minilm.batch(*real))
    assert minilm.difference(hidden[:num_reqs, :seq_len], expected[0]) < minilm.tolerance
    assert minilm.difference(pooled[:num_reqs], expected[1]) < minilm.tolerance
