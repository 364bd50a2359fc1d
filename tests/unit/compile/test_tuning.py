"""Tuning over a fake device and a fake compiler: which variants are tried, which are kept, which are refused."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

import cgpass
import graphpass as gp
from cgpass import pipeline
from cgpass.servedcalls import ExactGraphs
from graphpass.compat import dynamo, symbolic
from graphpass.compile import once, tuning
from graphpass.compile.compilers import Compiler
from graphpass.errors import OptionError
from graphpass.report.records import TunedRange
from tests.unit.compile.tuned import AUTOTUNE, COMBO, DESCENT, PDL, Bench, captured, layer, notes, tuned
from tests.unit.compiled import Compiled
from tests.unit.models import linear, module


def fake_matrix(*, lowest: int) -> torch.Tensor:
    """[rows, 4] with any number of rows from ``lowest`` on."""
    mode = symbolic.new_fake_mode()
    rows = symbolic.new_symbol(mode.shape_env, "rows", lowest, None, 7)
    with mode:
        return torch.empty(symbolic.size_of(mode.shape_env, rows, {rows: rows}), 4)


def test_each_setting_is_kept_or_dropped_before_the_next(bench: Bench, rt: gp.GraphRuntime) -> None:
    bench.replay_s = {(PDL,): 1.1, (DESCENT,): 0.8, (DESCENT, COMBO): 0.6, (DESCENT, COMBO, AUTOTUNE): 0.7}
    captured(layer(), rt)
    assert bench.tried() == [(PDL,), (DESCENT,), (DESCENT, COMBO), (DESCENT, COMBO, AUTOTUNE)]
    assert tuned(rt) == (TunedRange("g0.r0", "9 and more", f"{DESCENT} + {COMBO}", 1.0, 0.6, pytest.approx(4.0)),)
    assert tuned(rt)[0].gain == pytest.approx(0.4)
    assert "tuned without max_autotune: it is no faster" in notes(rt)
    assert (bench.is_closed, bench.open_runs) == (True, 0)


# -- what is refused ---------------------------------------------------------------------------------------------------


OF_16: Any = {"capture_sizes": [16], "dynamic_dims": {"x": 0}}
LARGER = "its results are further from those in a wide type"
UNSTEADY = "30 replays over equal inputs did not give equal bits"


@pytest.mark.parametrize(
    ("faults", "kept", "why"),
    [
        ({"replay_s": {(PDL,): 0.999}}, "untuned", ""),
        ({"scaled": {(PDL,): 1.001}}, DESCENT, f"tuned without triton.enable_pdl: {LARGER}"),
        ({"scaled": {(): 1 + 3e-7, (PDL,): 1 + 2e-7}, "replay_s": {(PDL,): 0.5}}, PDL, ""),
        ({"scaled": {(): 1 + 1e-6}, "unsteady": {(PDL,)}}, DESCENT, UNSTEADY),
        (
            {"fails": {(PDL,): RuntimeError("no kernel\nfor this")}, "replay_s": {(DESCENT,): 0.9}},
            DESCENT,
            "tuned without triton.enable_pdl: it failed: RuntimeError: no kernel",
        ),
    ],
    ids=["hardly faster", "a larger error", "it rounds otherwise", "replays differ", "it fails"],
)
def test_a_variant_that_is_no_better_or_wrong_is_not_kept(
    bench: Bench, rt: gp.GraphRuntime, faults: dict[str, Any], kept: str, why: str
) -> None:
    bench.replay_s = {(PDL,): 0.5, (DESCENT,): 0.9}
    for name, value in faults.items():
        setattr(bench, name, value)
    captured(layer(), rt)
    assert tuned(rt)[0].settings == kept
    assert why in notes(rt)


def test_results_in_other_memory_are_refused(
    bench: Bench, rt: gp.GraphRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_it = bench.compile

    def transposed(graph: Any, examples: Any, show: Any = None, settings: Any = ()) -> Any:
        made = compile_it(graph, examples, show, settings)
        return (lambda *args: tuple(r.t().contiguous().t() for r in made(*args))) if settings else made

    monkeypatch.setattr(once, "compiler_named", lambda name: Compiler(transposed, False, False))
    bench.replay_s = {(PDL,): 0.5}
    captured(layer(), rt)
    assert tuned(rt)[0].settings == "untuned"
    assert "its results lie in memory in another way" in notes(rt)


@pytest.mark.parametrize(
    ("found", "untuned", "exact", "agrees"),
    [
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.1], [1.0, 2.1], [1.0, 2.0], True),
        ([1.0, 2.14], [1.0, 2.1], [1.0, 2.0], True),
        ([1.0, 2.16], [1.0, 2.1], [1.0, 2.0], False),
        ([1.0, 2.001], [1.0, 2.0], [1.0, 2.0], False),
        ([math.nan, 2.0], [math.nan, 2.0], [math.nan, 2.0], True),
        ([1.0, 2.0], [math.nan, 2.0], [math.nan, 2.0], False),
        ([math.nan, 2.0], [1.0, 2.1], [1.0, 2.0], False),
        ([math.inf, 2.0], [math.inf, 2.1], [math.inf, 2.0], True),
        ([-math.inf, 2.0], [math.inf, 2.0], [math.inf, 2.0], False),
        ([-1e38, 2.001], [-1e38, 2.0], [-1e38, 2.0], False),
    ],
)
def test_agreement_is_relative_to_the_untuned_error(
    found: list[float], untuned: list[float], exact: list[float], agrees: bool
) -> None:
    tensors = (torch.tensor(values) for values in (found, untuned))
    assert tuning._is_as_right(*tensors, torch.tensor(exact, dtype=torch.float64)) is agrees


def test_agreement_of_integers_and_of_few_entries() -> None:
    ones = torch.ones(8, dtype=torch.int64)
    one_off, two_off = ones.clone(), ones.clone()
    one_off[0], two_off[:2] = 2, 2
    assert tuning._is_as_right(one_off, one_off, ones)
    assert not tuning._is_as_right(two_off, one_off, ones)
    assert not tuning._is_as_right(one_off, ones, ones)
    # A scalar whose untuned rounding is right by chance: the next number of its type is as good.
    exact = torch.tensor(1.0, dtype=torch.float64)
    one = torch.ones((), dtype=torch.bfloat16)
    assert tuning._is_as_right(torch.nextafter(one, one * 2), one, exact)
    assert not tuning._is_as_right(one * 1.02, one, exact)


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count.add_(1)
    return x + self.count


def test_the_run_in_a_wide_type_starts_from_the_same_inputs(bench: Bench, rt: gp.GraphRuntime) -> None:
    bench.replay_s = {(PDL,): 0.5}
    bench.scaled = {(PDL,): 1.01}
    captured(module(counts, count=torch.zeros(4)), rt)
    assert tuned(rt)[0].settings == "untuned"


def test_replays_start_from_equal_inputs(bench: Bench, rt: gp.GraphRuntime) -> None:
    bench.replay_s = {(PDL,): 0.5}
    model: Any = module(counts, count=torch.zeros(4))
    graphed = captured(model, rt)
    assert tuned(rt)[0].settings == PDL
    assert torch.equal(model.count, torch.ones(4))  # the example is a call like any other
    assert torch.equal(graphed(torch.zeros(16, 4)), torch.full((16, 4), 2.0))


def allocates(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A region allocates what the op after it fills, as the result of attention."""
    out = x.new_empty(x.shape)
    torch.ops.compiletest.fill(x * 2, out)
    return out + 1


def test_memory_without_contents_is_not_compared(
    bench: Bench, rt: gp.GraphRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = iter(range(10**6))
    run = bench.compile

    def poisoned(graph: Any, *given: Any, **settings: Any) -> Any:
        made, returned = run(graph, *given, **settings), graph.graph.output_node().args[0]

        def call(*args: Any) -> Any:
            results = made(*args)
            for node, result in zip(returned, results, strict=True):
                if node.target == "new_empty":
                    result.fill_(next(contents))
            return results

        return call

    monkeypatch.setattr(once, "compiler_named", lambda name: Compiler(poisoned, False, False))
    bench.replay_s = {(PDL,): 0.5}
    graphed = captured(module(allocates), rt, splitting_ops=["compiletest::fill"])
    assert [found.settings for found in tuned(rt)] == [PDL, PDL]
    assert torch.equal(graphed(torch.ones(16, 4)), torch.full((16, 4), 3.0))


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile_s", [60.0, 50.0])
def test_no_variant_is_begun_once_the_time_is_spent(compile_s: float, bench: Bench, rt: gp.GraphRuntime) -> None:
    """Nor where the longest so far would end too late."""
    bench.compile_s, bench.replay_s = compile_s, {(PDL,): 0.9, (PDL, DESCENT): 0.8, (PDL, DESCENT, COMBO): 0.1}
    report = captured(layer(), rt).report()
    assert bench.tried() == [(PDL,), (PDL, DESCENT)]
    assert tuned(rt)[0].settings == f"{PDL} + {DESCENT}"
    assert any("tune_seconds is spent" in problem.what for problem in report.problems)


def test_an_interrupt_keeps_the_best_so_far(bench: Bench, rt: gp.GraphRuntime) -> None:
    bench.replay_s = {(PDL,): 0.5}
    bench.fails = {(PDL, DESCENT): KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        captured(layer(), rt)
    assert tuned(rt)[0].settings == PDL
    assert (bench.is_closed, bench.open_runs) == (True, 0)


def test_a_capture_is_charged_without_its_tuning(
    bench: Bench, rt: gp.GraphRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[float] = []
    monkeypatch.setattr(ExactGraphs, "captured", lambda graphs, key, size, calls, seconds: charged.append(seconds))
    bench.compile_s = 25.0
    captured(layer(), rt)
    charged.append(sum(use.captured.seconds for use in rt.uses()))
    # The fake clock says 100 s of a capture that took less than a few.
    assert [round(seconds / 100) for seconds in charged] == [-1, -1]


# -- what is tuned -----------------------------------------------------------------------------------------------------


def test_each_range_of_sizes_has_its_own_choice(bench: Bench, rt: gp.GraphRuntime) -> None:
    graphed = captured(layer(), rt, capture_sizes=[4, 8, 16, 64])
    assert [found.sizes for found in tuned(rt)] == ["9 and more", "2 to 8"]
    assert len(bench.compiled) == 8
    hints = [int(size) for _, sizes in bench.compiled for size in sizes]
    assert hints == [64] * 4 + [8] * 4
    bench.ran.clear()
    graphed(torch.randn(4, 4))
    assert len(bench.compiled) == 8


def test_the_choice_of_one_range_does_not_run_in_another(bench: Bench, rt: gp.GraphRuntime) -> None:
    bench.replay_s = {(PDL,): 0.5}
    graphed = captured(layer(), rt)
    bench.ran.clear()
    with torch.no_grad(), gp.set_forward_context():
        graphed(torch.randn(5, 4))
        assert bench.ran == [()]
        graphed(torch.randn(9, 4))
    assert bench.ran == [(), (PDL,)]


def test_size_one_is_compiled_for_itself(bench: Bench, rt: gp.GraphRuntime) -> None:
    """A region whose symbol admits size 1; Dynamo's own graphs of size 1 have no symbol."""
    examples = [fake_matrix(lowest=1)]
    compiled: list[Any] = []

    def within(bounds: Any, sizes: Any, settings: Any) -> tuning.SizedArtifact:
        compiled.append((list(bounds.values()), settings))
        return tuning.SizedArtifact(lambda x: (x * 2,), ((0, 0),), tuple(bounds.values()), tuple(bounds), ())

    class Region:
        name, mutated_inputs, graph_module = "r0", (), torch.fx.symbolic_trace(lambda x: (x * 2,))

    for node in Region.graph_module.graph.nodes:
        node.meta["val"] = examples[0]

    exact = lambda region, args: [args[0].double() * 2]  # noqa: E731
    ways = tuning.Tuning("g0", rt.ledger, 120.0, False, exact)
    region = tuning.TunedRegion(ways, Region(), examples, within)
    for rows in (1, 3):
        region.tune(lambda x: (x * 2,), [torch.ones(rows, 4)], bench)
    assert compiled[0] == ([(1, 1)], {})
    assert [bounds for bounds, _ in compiled] == [[(1, 1)]] * 5 + [[(2, 8)]] * 4


def test_what_is_made_of_padding_is_in_each_variant_and_in_the_run_in_a_wide_type(
    bench: Bench, rt: gp.GraphRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that tunes has 13 rows in a graph for 16: without the insertions a wide type would show an error."""

    def compile_it(graph: Any, examples: Any, *show: Any, settings: Any = ()) -> Any:
        return bench.compile(dynamo.aot_eager(graph, examples, *show), examples, settings=settings)

    monkeypatch.setattr(once, "compiler_named", lambda name: Compiler(compile_it, opaque=True, functionalizes=True))
    bench.replay_s, bench.scaled = {(PDL,): 0.5, (DESCENT,): 0.9}, {(PDL,): 1.001}
    model = module(lambda self, x: self.linear(x).mean(0), linear=linear(4)).eval()
    fast = Compiled(rt, model, compiler="inductor", dispatch="auto", dynamic=True, tune="measure", **OF_16)
    calls = [(torch.randn(rows, 4),) for rows in (13, 13, 9, 14, 16)]
    assert fast.serve(calls, passes=2) == len(calls)
    assert [found.settings for found in tuned(rt)] == [DESCENT]
    assert f"tuned without {PDL}: {LARGER}" in notes(rt)
    assert set(bench.ran[-5:]) == {(DESCENT,)}
    (size, *_) = rt.callables()[0].sizes
    assert size.verdict == "made"
    assert fast.is_padded


def test_other_settings_than_those_of_the_compilation_are_not_tuned_under(bench: Bench, rt: gp.GraphRuntime) -> None:
    given = {"capture_sizes": [16], "dynamic_dims": {"x": 0}, "tune": "measure", "runtime": rt}
    graphed = gp.graphed(layer().eval(), **given)
    graphed(torch.randn(16, 4))
    with inductor_config.patch(max_fusion_size=7), rt.capturing():
        graphed(torch.randn(16, 4))
    assert not bench.compiled
    assert "not tuned: autocast, a precision or a setting of the compiler" in notes(rt)


def test_collectives_are_not_tuned(bench: Bench, rt: gp.GraphRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "calls_collectives", lambda parts: True)
    captured(layer(), rt)
    assert not bench.compiled
    assert "its collectives wait for ranks" in notes(rt)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tune": "always"}, "'measure'"),
        ({"tune": True}, "'measure'"),
        ({"tune_seconds": 0}, "a number of seconds above 0"),
        ({"tune_seconds": "120"}, "a number of seconds above 0"),
        ({"tune_seconds": True}, "a number of seconds above 0"),
        ({"tune_seconds": math.inf}, "a number of seconds above 0"),
    ],
)
def test_options_are_validated(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        cgpass.options(**options)


@pytest.mark.parametrize(("compiler", "why"), [("inductor", "needs a GPU"), ("aot_eager", "aot_eager has no variants")])
def test_without_a_gpu_or_variants_it_is_said_once(
    compiler: str, why: str, rt: gp.GraphRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "graphpass"):
        graphed = captured(layer(), rt, compiler=compiler)
    assert graphed(torch.randn(11, 4)).shape == (11, 4)
    assert len([record for record in caplog.records if why in record.message]) == 1
    assert not tuned(rt)


# -- who hands the options through -------------------------------------------------------------------------------------


def test_a_manager_is_tuned(bench: Bench) -> None:
    bench.replay_s = {(COMBO,): 0.5}
    dispatcher = gp.CudagraphDispatcher("FULL", [4, 16], max_num_reqs=16)
    manager = gp.CudaGraphManager(
        layer().eval(), dispatcher, [gp.InputSpec("x", (16, 4), torch.float32)], tune="measure", tune_seconds=50
    )
    manager.capture()
    assert [(found.sizes, found.settings) for found in manager.report().figures.costs.tuned] == [
        ("9 and more", COMBO),
        ("2 to 8", COMBO),
    ]
