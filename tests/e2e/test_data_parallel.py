"""Four processes over gloo: the same mode and size on each, whatever their load; none waits for one that is gone."""

from __future__ import annotations

import functools
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.data_parallel_ranks import NUM_RANKS, STEPS, Seen, agreeing, main, parting
from tests.e2e.lockstep_ranks import decoding, dying, lockstep
from tests.e2e.small_decoders import small_decoder

LIMIT_S = 120
"""A bound on what would hang, far above what it takes."""


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[dict[str, Any]], list[Any]]]:
    """Run something in four processes: what each saw, where it came to its end, and the exit codes."""

    def run(what: Callable[[int], dict[str, Any]], num: int = NUM_RANKS) -> tuple[list[dict[str, Any]], list[Any]]:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.e2e.lockstep_ranks"])  # torch is imported once for all of them
        ranks = [context.Process(target=main, args=(rank, what, tmp_path, num)) for rank in range(num)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT_S)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        files = [tmp_path / f"rank{rank}.pt" for rank in range(num)]
        return [torch.load(file, weights_only=False) if file.exists() else {} for file in files], codes

    return run


WHOLE: dict[str, tuple[Any, ...]] = {
    "mixed load": ("PIECEWISE", 16, 0),
    "all decode": ("FULL", 4, 0),
    "one decodes": ("PIECEWISE", 8, 0),
    "one is idle": ("FULL", 8, 0),
    "one has work": ("PIECEWISE", 4, 0),
    "all are idle": ("NONE", "empty"),
    "one is oversized": ("NONE", "agreed"),
    "adapters": ("PIECEWISE", 8, 3),
    "after all that": ("PIECEWISE", 4, 0),
}
"""What every rank runs of a model that can be one graph: (mode, padded tokens, adapters), or (NONE, reason)."""


def in_regions(ran: tuple[Any, ...]) -> tuple[Any, ...]:
    return ("PIECEWISE", *ran[1:]) if ran[0] == "FULL" else ran


def check_steps(seen: list[dict[str, Seen]], expected: dict[str, tuple[Any, ...]]) -> None:
    """Every rank ran the expected key in every step, and its result is that of one rank alone."""
    oversized = [expected["one is oversized"], ("NONE", "too_large"), *[expected["one is oversized"]] * 2]
    for name, loads in STEPS.items():
        of_step = [of_rank[name] for of_rank in seen]
        wanted = oversized if name == "one is oversized" else [expected[name]] * NUM_RANKS
        assert [one.ran for one in of_step] == wanted, name
        assert all(one.is_right for one in of_step), name
        told = [None if load else any(loads) for load in loads]
        assert [one.others_have_work for one in of_step] == told, name


def test_four_ranks_run_the_same_graph_whatever_their_loads(four: Callable[..., Any]) -> None:
    seen, codes = four(agreeing)
    assert codes == [0] * NUM_RANKS
    check_steps([of_rank["whole"] for of_rank in seen], WHOLE)
    regions = [of_rank["regions"] for of_rank in seen]
    check_steps(regions, {name: in_regions(ran) for name, ran in WHOLE.items()})
    # The op in the model's middle, which needs every rank, saw all of them at one size, and knew the sizes of all.
    for name, ran in WHOLE.items():
        forwards = [of_rank[name].forwards for of_rank in regions]
        if ran[0] != "NONE":
            assert forwards == [[("PIECEWISE", ran[1], (ran[1],) * NUM_RANKS)]] * NUM_RANKS, name
    assert [of_rank["one is oversized"].forwards for of_rank in regions] == [
        [("NONE", tokens, (3, 20, 2, 2))] for tokens in (3, 20, 2, 2)
    ]
    assert [of_rank["all are idle"].forwards for of_rank in regions] == [[]] * NUM_RANKS
    # A dummy batch changes nothing that the model keeps: its count of forwards is that of the rank's own batches.
    own = [sum(loads[rank] is not None for loads in STEPS.values()) for rank in range(NUM_RANKS)]
    assert [of_rank["forwards"] for of_rank in seen] == own
    notes = seen[0]["notes"]
    assert any("rank 1 (20 tokens) has no graph, because the batch is above the largest key" in text for text in notes)
    assert any("rank 1 (5 tokens, mixed) can run at most PIECEWISE" in text for text in notes)

    # A batch that is refused on one rank is an error on all, and the next step runs.
    kinds = [of_rank["one is refused"][0] for of_rank in seen]
    assert kinds == ["AgreementError", "AgreementError", "ShapeError", "AgreementError"]
    assert "rank 2: ShapeError: input 'x' does not fit its buffer" in seen[0]["one is refused"][1]
    assert [of_rank["after a refusal"].ran for of_rank in seen] == [("PIECEWISE", 4, 0)] * NUM_RANKS
    assert all(of_rank["after a refusal"].is_right for of_rank in seen)

    # Where one rank has no memory for more keys, no rank captures them.
    left_out = [of_rank["left out"] for of_rank in seen]
    assert len(left_out[0]) == 7
    assert left_out == [left_out[0]] * NUM_RANKS
    assert [of_rank["a key of all"].ran for of_rank in seen] == [("PIECEWISE", 8, 3)] * NUM_RANKS
    assert [of_rank["a key of none"].ran for of_rank in seen] == [("NONE", "not_captured"), *[("NONE", "agreed")] * 3]
    assert all(of_rank[name].is_right for of_rank in seen for name in ("a key of all", "a key of none"))


def test_a_rank_that_stays_away_or_dies_is_an_error_on_the_others(four: Callable[..., Any]) -> None:
    seen, codes = four(parting)
    assert codes == [0, 7, 0, 0]
    assert seen[1] == {}
    for rank in (0, 2, 3):
        of_rank = seen[rank]
        assert of_rank["together"].ran == of_rank["the others go on"].ran == ("PIECEWISE", 4, 0)
        assert of_rank["one dies"][0] == "AgreementError"
        assert "the other ranks cannot be reached" in of_rank["one dies"][1]
    for rank in (0, 2):
        assert seen[rank]["one stays away"][0] == "AgreementError"
        assert seen[rank]["again"] == seen[rank]["one stays away"], "it is not tried again"


def test_ranks_in_lockstep_decide_alike_over_two_thousand_calls(four: Callable[..., Any]) -> None:
    seen, codes = four(lockstep)
    assert codes == [0] * NUM_RANKS
    for name in seen[0]:
        of_groups = [seen] if name.startswith("four") else [seen[:2], seen[2:]]
        for ranks in of_groups:
            first = ranks[0][name]
            assert [rank[name] for rank in ranks] == [first] * len(ranks), name
            assert first["wrong"] == [], name
            own = [key for key in first["counts"] if "exact" in key]
            assert len(own) >= 3, name
            assert sum(captured == 0 for captured, _ in first["counts"].values()) >= 1, "captures that failed"


def test_a_rank_that_dies_in_lockstep_is_an_error_in_the_replay_of_the_others(four: Callable[..., Any]) -> None:
    seen, codes = four(dying)
    assert codes == [0, 7, 0, 0]
    for rank in (0, 2, 3):
        assert seen[rank]["replayed"] >= 2
        assert seen[rank]["one dies"][0] == "AgreementError"
        assert "the other ranks cannot be reached" in seen[rank]["one dies"][1]


@pytest.mark.parametrize("how", ["close", "leave"])
def test_a_program_with_captured_collectives_ends(how: str) -> None:
    command = [sys.executable, "-m", "tests.e2e.lockstep_ranks", how]
    ended = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "closed", "graphs go before the communicators, which wait for them"


@pytest.mark.route("ranks")
def test_a_decoder_by_tp_plan_has_the_tokens_of_its_own_generate_on_two_ranks(
    four: Callable[..., Any], tmp_path: Path
) -> None:
    small_decoder("LlamaForCausalLM").save_pretrained(tmp_path)
    seen, codes = four(functools.partial(decoding, tmp_path), 2)
    assert codes == [0, 0]
    assert seen[0] == seen[1]
    assert seen[0]["tokens"] == seen[0]["own"]
    assert seen[0]["full"] >= 1
    assert seen[0]["replayed"] == 6
    assert seen[0]["equal"]
