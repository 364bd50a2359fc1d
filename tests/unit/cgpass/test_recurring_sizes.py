"""Sizes that recur get graphs of their own on the tape, where rows stand for times."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphpass as gp
from cgpass.paddingcheck import PaddedCall
from graphpass import GraphRuntime
from graphpass.compile import PlainRegion, chosen
from graphpass.compile.tuning import SizedArtifact
from graphpass.dispatch.owngraphs import OwnGraphs, RecurringSize, RecurringSizes, Serve
from tests.threads import in_threads
from tests.unit.compiled import Compiled, agrees
from tests.unit.models import module

# A size of 17 pads to 24: 7 rows a call, and a capture counts as 16 * 17 rows.
SIZE, KEY, CALLS = 17, 24, -(-16 * 17 // 7)
MODES = pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])


def row_by_row(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.second(self.first(x).relu() * 3).tanh()


def rowwise() -> Any:
    """Row-wise, so that its batch is padded."""
    return module(row_by_row, first=nn.Linear(6, 12), second=nn.Linear(12, 6)).eval()


class Served(Compiled):
    """A model under auto dispatch that has compiled its sizes."""

    def __init__(
        self,
        rt: GraphRuntime,
        model: Callable[..., Any] | None = None,
        mode: str = "FULL_AND_PIECEWISE",
        **options: Any,
    ) -> None:
        splits = ["aten::relu"] if mode == "PIECEWISE" else []
        options = {"dispatch": "auto", "dynamic": True, "splitting_ops": splits, **options}
        super().__init__(rt, model or rowwise(), mode=mode, **options)
        self.call(3, 2)

    def call(self, *sizes: int, times: int = 1) -> None:
        self.serve(sizes * times)

    def exact(self) -> dict[int, int]:
        return exact(self.rt)


def exact(rt: GraphRuntime) -> dict[int, int]:
    """{size: replays} of the sizes that have graphs of their own now."""
    found: dict[int, int] = {}
    for (_, _, key), counts in rt.counts().items():
        sizes = dict(key.extra)
        if "exact" in sizes and counts.static_sets:
            size = sizes.get("x[0]", key.num_tokens)
            found[size] = max(found.get(size, 0), counts.replayed)
    return found


@MODES
def test_a_size_gets_a_graph_once_its_padding_has_cost_one(mode: str, rt: GraphRuntime) -> None:
    fast = Served(rt, mode=mode)
    fast.call(KEY, times=2)
    for times, replayed in ((CALLS, {}), (1, {SIZE: 1}), (5, {SIZE: 6})):
        fast.call(SIZE, times=times)
        assert fast.exact() == replayed


def test_zero_bytes_mean_none(rt: GraphRuntime) -> None:
    fast = Served(rt, graph_bytes=0)
    fast.call(SIZE, times=3 * CALLS)
    assert fast.exact() == {}


def test_beside_declared_sizes_only_with_bytes_of_the_user() -> None:
    declared: dict[str, Any] = {"capture_sizes": {"rows": [8, KEY]}, "compiler": "eager"}
    for options, expected in ((declared, False), ({**declared, "graph_bytes": 1 << 20}, True)):
        graphed = gp.graphed(rowwise(), dynamic_dims={"x": {0: "rows"}}, **options)
        for size in [KEY] * 3 + [SIZE] * 2 * CALLS:
            graphed(torch.randn(size, 6))
        assert bool(exact(graphed.runtime)) is expected
        graphed.close()


def test_a_scope_never_sees_one(rt: GraphRuntime) -> None:
    fast = Served(rt)
    fast.call(SIZE, times=CALLS + 3)
    replayed = fast.exact()[SIZE]
    with rt.capturing():
        fast.call(SIZE, times=3)
    assert fast.exact()[SIZE] == replayed
    fast.call(SIZE)
    assert fast.exact()[SIZE] == replayed + 1


def test_they_do_not_count_towards_max_graphs(rt: GraphRuntime) -> None:
    fast = Served(rt, max_graphs=2)
    fast.call(KEY, times=2)
    fast.call(SIZE, times=CALLS + 2)
    assert list(fast.exact()) == [SIZE]
    fast.call(12, times=3)
    fast.call(8, times=3)
    assert {key.num_tokens for _, _, key in rt.counts()} == {SIZE, KEY, 12}


def test_a_graph_above_the_bound_goes_when_the_present_forward_ends(
    rt: GraphRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, turn = Served(rt, graph_bytes=1), rt.lease.turn
    captured_own = RecurringSizes.captured_own

    def captured_beside_a_forward(*args: Any) -> bool:
        turn.acquire(forward=rt, who="another forward")
        return captured_own(*args)

    monkeypatch.setattr(RecurringSizes, "captured_own", captured_beside_a_forward)
    fast.call(SIZE, times=CALLS + 2)
    assert shared_bytes() > 1
    turn.release()
    assert shared_bytes() == 0
    fast.call(SIZE, times=2 * CALLS)
    assert fast.exact() == {}


def shared_bytes() -> int:
    return OwnGraphs.on(torch.device("cpu")).num_bytes()


def test_a_size_that_was_forgotten_among_many_gets_its_graph(rt: GraphRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpass.dispatch.owngraphs._MOST_SIZES", 1)
    fast = Served(rt)
    fast.call(KEY, KEY, SIZE, SIZE + 1)
    fast.call(SIZE, times=CALLS + 3)
    assert fast.exact()[SIZE] > 2
    assert shared_bytes() > 0


def test_weights_that_moved_without_dying_fall_back_to_padding(rt: GraphRuntime) -> None:
    model = rowwise()
    fast = Served(rt, model)
    fast.call(SIZE, times=CALLS + 3)
    kept = model.first.weight
    model.first.weight = nn.Parameter(torch.randn(12, 6))
    fast.call(SIZE)
    assert fast.exact() == {}
    fast.call(SIZE, times=2 * CALLS)
    assert fast.exact() == {}, "two sets of weights have the padded key, so padding keeps the size"
    assert kept is not None


def test_instances_that_share_a_graph_stay_padded(rt: GraphRuntime) -> None:
    """A capture for one would serve no other, so that each would be captured in turn."""
    instances = [rowwise() for _ in range(2)]
    for instance in instances:
        options = {"compiler": "eager", "runtime": rt, "dispatch": "auto"}
        instance.compile(backend="cgpass", dynamic=True, options=options)
    for instance in instances * 2 * CALLS:
        x = torch.randn(SIZE, 6)
        with torch.no_grad():
            agrees(instance(x), instance.forward(x))
    assert rt.compiled() == 1
    assert not any("exact" in dict(key.extra) for _, _, key in rt.counts())


@pytest.mark.parametrize("num_calls", [200, pytest.param(2000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", pytest.param("PIECEWISE", marks=pytest.mark.soak)])
def test_threads_captures_replacements_and_new_weights(mode: str, num_calls: int, rt: GraphRuntime) -> None:
    model = rowwise()
    fast = Served(rt, model, mode, graph_bytes=12_000)
    changes, seen = [0], set[int]()

    def change(number: int) -> None:
        changes[0] += 1  # odd while the weight changes
        if number % 2:
            model.first.weight = nn.Parameter(model.first.weight.detach() * 1.01)
        else:
            model.first.weight.data.mul_(1.01)
        changes[0] += 1

    def run(number: int) -> None:
        rng, contents = random.Random(number), torch.Generator().manual_seed(number)
        for count in range(num_calls):
            if number == 0 and count % 100 == 99:
                change(count // 100)
            x = torch.randn(rng.choice((17, 18, 19, 25, 26, 9)), 6, generator=contents)
            before = changes[0]
            with torch.no_grad():
                result, expected = fast(x), model(x)
            if before == changes[0] and not before % 2:
                agrees(result, expected)
            seen.update(fast.exact())

    in_threads(run, 6)
    assert seen, "some size had a graph of its own"
    assert shared_bytes() <= 12_000
    fast.call(SIZE, times=5)
    rt.close()
    assert shared_bytes() == 0


def test_a_weight_that_changes_during_the_check_is_no_leak(rt: GraphRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rowwise()
    fast, unpadded, changes = Served(rt, model), PaddedCall.unpadded, [1.01, 1.0]

    def changed_meanwhile(call: PaddedCall) -> Any:
        model.first.weight.data.mul_(changes.pop(0) if changes else 1.0)
        return unpadded(call)

    monkeypatch.setattr(PaddedCall, "unpadded", changed_meanwhile)
    for size in (KEY, KEY, SIZE, SIZE, SIZE):
        fast(torch.randn(size, 6))  # the result of the call meanwhile is that of the old weight
    assert not changes
    (replays,) = [counts.replayed for (_, _, key), counts in rt.counts().items() if key.num_tokens == KEY]
    assert replays == 4, "the size is padded"


# -- without what makes padding neutral --------------------------------------------------------------------------------


def centred(x: torch.Tensor) -> torch.Tensor:
    """Padding is made, for the sum over rows."""
    return x - x.exp().sum(0)


@pytest.fixture
def plain_when_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As soon as a size has a graph of its own, insertions have cost enough. The rows of calls of plain artifacts."""
    plain_rows: list[int] = []
    function_for = PlainRegion.function_for

    def own_or_plain(self: RecurringSizes, size: RecurringSize, own_s: float) -> Serve:
        size.insertions_s = own_s
        return Serve.PLAIN

    def counted(self: PlainRegion, args: Any) -> Any:
        function = function_for(self, args)
        rows = next(len(given) for given in args if isinstance(given, torch.Tensor))
        plain_rows.extend([] if function is None else [rows])
        return function

    monkeypatch.setattr(RecurringSizes, "_own_or_plain", own_or_plain)
    monkeypatch.setattr(PlainRegion, "function_for", counted)
    return plain_rows


@MODES
def test_an_own_graph_without_insertions_serves_its_size_alone(
    mode: str, rt: GraphRuntime, plain_when_asked: list[int]
) -> None:
    fast = Served(rt, centred, mode, compiler="aot_eager", splitting_ops=["aten::exp"] * (mode == "PIECEWISE"))
    fast.call(KEY, times=2)
    fast.call(SIZE, times=CALLS + 4)
    assert set(plain_when_asked) == {SIZE}, "it was captured"
    calls, replayed = len(plain_when_asked), fast.exact()[SIZE]
    fast.call(SIZE, SIZE - 1, KEY - 1, SIZE, times=2)
    assert (len(plain_when_asked), fast.exact()[SIZE]) == (calls, replayed + 4), "later calls replay"
    fast.call(11, times=4)  # in another key, which is captured now
    assert len(plain_when_asked) == calls
    assert any("without what makes padding neutral" in note for note in rt.ledger.notes())


def test_where_the_compilation_fails_the_graph_keeps_its_insertions(
    rt: GraphRuntime, plain_when_asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: PlainRegion) -> bool:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(PlainRegion, "compile", fails)
    fast = Served(rt, centred, compiler="aot_eager")
    fast.call(KEY, times=2)
    fast.call(SIZE, times=CALLS + 6)
    assert plain_when_asked == []
    assert fast.exact()[SIZE] > 3
    assert any("no compiler" in note for note in rt.ledger.notes())


def test_another_thread_never_runs_a_plain_artifact() -> None:
    region = PlainRegion([], lambda _, is_plain: SizedArtifact(len, (), (), (), ()))
    assert region.compile()
    with chosen([region]):
        assert region.function_for([]) is len
        elsewhere: list[object] = []
        in_threads(lambda _: elsewhere.append(region.function_for([])), 1)
    assert elsewhere == [None]
    assert region.function_for([]) is None
