"""The benchmark of clips of random length: its runners written by hand are right, and all of it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import graphpass as gp
from tests.bench.bucketed_runners import BucketedRunner, HifiGanRunner
from tests.bench.ragged_audio import SOUNDS, _difference, built, first_tensor, main


def results(name: str, runner_of: type[BucketedRunner] | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of a runner and of eager, for calls of which some come after a longer one of their bucket."""
    sound = SOUNDS[name]
    model = built(sound, small=True)
    runner = (runner_of or sound.by_hand)(model, sound.buckets(2))
    with torch.inference_mode():
        calls = sound.calls(4, longest_s=2, largest=3)
        found = [runner(**call) for call in calls]
        expected = [first_tensor(model(**call)) for call in calls]
    assert len(runner.buckets) < len(calls), "a bucket serves several calls"
    return found, expected


@pytest.mark.parametrize("name", [name for name in SOUNDS if "masked" not in name])
def test_a_runner_returns_what_eager_does(name: str) -> None:
    found, expected = results(name)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert all(bool((one != one.flatten()[0]).any()) for one in expected), "the model hears its clips"


@pytest.mark.parametrize("name", [name for name in SOUNDS if "masked" in name])
def test_a_runner_returns_what_eager_does_with_a_mask(name: str) -> None:
    """At real entries; the benchmark compares no others."""
    found, expected = results(name)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one[0], other[0], atol=2e-5, rtol=1e-4)  # the first clip has the batch's length


def test_the_ends_of_clips_tell_a_runner_that_hides_nothing() -> None:
    """A vocoder's convolutions read what lies behind a clip."""

    class HidesNothing(HifiGanRunner):
        def run(self, clips: torch.Tensor, frames: torch.Tensor) -> Any:
            return self.model(clips)

    found, expected = results("hifi_gan", HidesNothing)
    assert any((one - other).abs().max() > 1e-3 for one, other in zip(found, expected, strict=True))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["parakeet_masked", "wav2vec2_masked"])
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_lengths_of_clips_and_of_their_mask_are_padded_as_one(name: str) -> None:
    """Nothing in these models compares the two, so a trace of Dynamo's after its first has two symbols."""
    sound = SOUNDS[name]
    model, calls = built(sound, small=True), sound.calls(12, longest_s=2, largest=3)
    runner = sound.by_hand(model, sound.buckets(2))
    fast = torch.compile(model, backend="cgpass", options={"compiler": "aot_eager"})
    with torch.inference_mode():
        for call in calls * 2:
            assert _difference(fast, runner, call, first_tensor(model(**call))) < 1e-5
    runtime = gp.runtime_of(fast)
    lengths = [size for record in runtime.callables() for size in record.sizes if size.field.endswith("[1]")]
    assert {size.verdict for size in lengths} == {"made"}
    assert {size.field.partition("[")[0] for size in lengths}.isdisjoint({"attention_mask"})
    assert runtime.stats().replayed >= len(calls)


def test_the_benchmark_runs_with_a_small_model(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--small", "--model", "hifi_gan", "--dtype", "float32", "--clips", "3", "--rounds", "2"]
    main([*arguments, "--json", str(path)])
    figures = json.loads(path.read_text(encoding="utf-8"))["models"]["hifi_gan"]["float32"]
    assert figures["is_equal"]
    assert figures["problem"] == ""
    assert max(figures["difference"].values()) < 1e-5
    assert figures["graphs"]["by hand"] <= 3
    assert figures["over_eager"] == figures["pass_us"]["eager"]["median"] / figures["pass_us"]["graphpass"]["median"]
