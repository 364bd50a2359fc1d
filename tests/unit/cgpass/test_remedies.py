"""Each remedy that a warning names, followed to the letter: afterwards calls replay, and results are those of eager."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config

import graphpass as gp
from graphpass.errors import CaptureError
from tests.unit.cgpass.attended import Make
from tests.unit.compiled import Compiled
from tests.unit.models import module

HOST = "graphpasstest_remedies::host"


@torch.library.custom_op(HOST, mutates_args=())
def host(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


host.register_fake(torch.empty_like)

Calls = Sequence[tuple[Any, ...]]
DATA_SHAPES = {"capture_dynamic_output_shape_ops": True}
SCALARS = {"capture_scalar_outputs": True}


def graphed_beside(model: nn.Module, **options: Any) -> Compiled:
    torch.compiler.reset()
    fast = gp.graphed(model, compiler="eager", progress=False, **options)
    beside = Compiled(fast.runtime, model)
    beside.fast = fast
    return beside


def rows(*sizes: int) -> Calls:
    return [(torch.randn(size, 6),) for size in sizes]


@dataclass
class Remedy:
    """What is compiled, the problem and the remedy in its report; then what follows the remedy.

    The options and the settings of Dynamo that the remedy names are taken from its text.
    """

    model: Callable[..., Any]
    calls: Calls
    problem: str
    remedy: str
    options: dict[str, Any] = field(default_factory=dict)
    remedied: Callable[..., Any] | None = None  #: the model's own unless said otherwise
    remedied_calls: Calls | None = None
    num_keys: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)  #: of Dynamo, for both


def named_in(problem: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the backend and the settings of Dynamo that a remedy names."""
    options: dict[str, Any] = {
        name: ast.literal_eval(given) for name, given in re.findall(r"(\w+)=(\{.*?\})", problem.remedy)
    }
    if "list it in splitting_ops" in problem.remedy:
        options["splitting_ops"] = re.findall(r"at op \S+ = (\S+) at", problem.what)
    settings = re.findall(r"torch\._dynamo\.config\.(\w+) = (\w+)", problem.remedy)
    return options, {name: ast.literal_eval(given) for name, given in settings}


def says(parts: str, text: str) -> bool:
    return all(part in text for part in parts.split(" … "))


def centred(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def centred_by_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x - (x * mask[:, None]).sum(0) / mask.sum()


def pooled_by_lengths(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return pooled_by_mask(x, (torch.arange(x.shape[1]) < lengths[:, None]).to(x.dtype))


def pooled_by_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask[..., None]).sum(1) / mask.sum(1)[:, None]


LENGTHS = [(torch.randn(2, n, 6), torch.tensor([n, n - 2])) for n in (5, 6, 7)]


def of_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.norm(x).relu()  # type: ignore[no-any-return]


def normed() -> nn.Module:
    return module(of_norm, norm=nn.LayerNorm(6))


def in_lines(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Dynamo breaks the graph at the LSTM, and does not say why."""
    x = self.before(x)
    x = self.rnn(x)[0]
    return self.after(x)


def in_one_line(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Dynamo leaves out this forward without a graph break, and compiles the layers around the LSTM."""
    return self.after(self.rnn(self.before(x))[0])


def of_lstm(forward: Callable[..., Any]) -> Remedy:
    parts = {"before": normed(), "rnn": nn.LSTM(6, 6, batch_first=True), "after": normed()}
    return Remedy(
        module(forward, **parts).eval(),
        [(torch.randn(3, 5, 6),)],
        "",
        "set torch._dynamo.config.allow_rnn = True",
    )


GRU = nn.GRU(6, 6, batch_first=True).eval()
SEQUENCES = [(torch.randn(n, 4, 6), torch.arange(n, 0, -1).clamp(max=4)) for n in (5, 6, 7)]


def of_packed(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x.sin(), lengths, batch_first=True)
    return GRU(packed)[1][0].sin()  # type: ignore[no-any-return]


def of_padded(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    outputs = GRU(x.sin())[0]
    return outputs[torch.arange(len(outputs)), lengths - 1].sin()  # type: ignore[no-any-return]


def spread(x: torch.Tensor, **given: Any) -> torch.Tensor:
    return torch.repeat_interleave(x, torch.tensor([1, 2, 3]), dim=0, **given) * 2


REMEDIES: dict[str, Remedy] = {
    "a mean is computed from sums under a mask": Remedy(
        centred,
        [(torch.randn(n, 6), torch.ones(n)) for n in (5, 6, 7)],
        "is not padded",
        "padding={'mask': 0}",
        {"padding": {"mask": 0}},
        centred_by_mask,
        num_keys=2,
    ),
    "a mask that the model computes becomes an argument": Remedy(
        pooled_by_lengths,
        LENGTHS,
        "is not padded",
        "a mask that is an argument, not one that the model computes",
        {"dynamic_dims": {"x": {1: "seq"}}},
        pooled_by_mask,
        [(x, (torch.arange(x.shape[1]) < count[:, None]).to(x.dtype)) for x, count in LENGTHS],
        num_keys=2,
    ),
    "Dynamo is told to trace an LSTM in one line": of_lstm(in_one_line),
    "Dynamo is told to trace an LSTM in lines": of_lstm(in_lines),
    "an RNN is called on padded sequences": Remedy(
        of_packed,
        SEQUENCES,
        "",
        "outputs[torch.arange(len(outputs)), lengths - 1]",
        remedied=of_padded,
        num_keys=2,
        settings={"allow_rnn": True},
    ),
    "an op is listed as the error prints it": Remedy(
        lambda x: host(x + 1),
        rows(5, 5),
        "the capture failed … graphpasstest_remedies.host.default",
        "",
        {"compiler": "aot_eager", "mode": "PIECEWISE"},
    ),
    "repeats with a known total are captured": Remedy(
        spread,
        rows(3, 3),
        "data-dependent shape",
        "output_size",
        remedied=lambda x: spread(x, output_size=6),
        settings=DATA_SHAPES,
    ),
    "a number that is a size is read from a shape": Remedy(
        lambda x, count: torch.zeros(count, 6) + x[0],
        [(torch.randn(5, 6), count) for count in (3, 4, 3, 4)],
        "calls with the same number and sizes",
        "where it is a size, pass a tensor that has it, and read its shape (x.shape[0])",
        remedied=lambda x, rows: torch.zeros(rows.shape[0], 6) + x[0],
        remedied_calls=[(torch.randn(5, 6), torch.empty(count)) for count in (3, 4, 3, 4)],
    ),
    "a number that varies is passed as a tensor": Remedy(
        lambda x, number: x * number,
        [(torch.randn(5, 6), number) for number in (3, 4, 3, 4)],
        "calls with the same number and sizes",
        "pass the number as a tensor",
        remedied_calls=[(torch.randn(5, 6), torch.tensor(number)) for number in (3, 4, 3, 4)],
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_that_is_followed_leaves_no_problem(compiled: Make, name: str) -> None:
    case = REMEDIES[name]
    with dynamo_config.patch(**case.settings) if case.settings else nullcontext():
        fast = compiled(case.model, **case.options)
        fast.serve(case.calls, passes=1 if case.remedied_calls and not case.remedied else 3)
        (found,) = [p for p in fast.problems if says(case.problem, p.what) and says(case.remedy, p.remedy)]
        options, settings = named_in(found)
        fast = compiled(case.remedied or case.model, **{**case.options, **options})
        calls = case.remedied_calls or case.calls
        with dynamo_config.patch(**settings) if settings else nullcontext():
            assert fast.serve(calls, passes=3, model=case.model if not case.remedied_calls else None) == len(calls)
    assert fast.problems == ()
    assert case.num_keys in (None, len(fast.rt.report().figures.keys)), "the two smaller sizes share a key"


def test_an_example_of_size_one_is_followed_by_a_larger_one() -> None:
    for example, captured in ((1, 1), (3, 3)):
        torch.compiler.reset()
        fast = gp.graphed(nn.Linear(6, 6).eval(), [1, 4, 8], {"input": 0}, compiler="eager")
        fast.capture(torch.randn(example, 6))
        assert fast.runtime.stats().captured == captured
        problems = [problem.what for problem in fast.report().problems]
        assert len(problems) == (example == 1)
        assert all("one size was captured ahead of the calls" in what for what in problems)


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count = self.count + 1
    return x + self.count


def counts_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count.add_(1)
    return x + self.count


def test_a_buffer_that_is_replaced_again_and_again_is_copied_in_the_end(compiled: Make) -> None:
    def made(forward: Callable[..., Any]) -> nn.Module:
        return module(forward, count=torch.zeros(6))

    fast, eager = compiled(made(counts)), made(counts)
    fast.serve((5, 5), passes=8, model=eager)
    captured = fast.captured
    assert "count" in fast.problem("is replaced again and again").places[0]
    fast.serve((5, 5), passes=8, model=eager)
    assert fast.captured == captured, "no capture more"
    fast = compiled(made(counts_in_place))
    assert fast.serve((5, 5), passes=8, model=made(counts_in_place)) == 2
    assert fast.captured == 1
    assert fast.problems == ()


def test_full_that_is_impossible_is_an_error_where_fallbacks_are(compiled: Make) -> None:
    with dynamo_config.patch(**SCALARS):
        fast = compiled(lambda x: x * x.sum().item(), mode="FULL", on_fallback="error")
        with pytest.raises(CaptureError, match="cannot be captured whole"):
            fast(torch.randn(4, 6))


def test_a_function_that_is_compiled_again_and_again_is_a_problem(compiled: Make) -> None:
    def steps(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * self.step

    fast = compiled(module(steps, step=0), dynamic=False)
    fast.serve((5, 5, 5), passes=4, model=module(steps, step=0))
    assert "buffer" in fast.problem("has compiled a function 8 times").remedy
