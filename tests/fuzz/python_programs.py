"""Random Python around a graph: state, identity, branches, sharing, nested containers; and the calls that meet it.

A program is text, as in :mod:`tests.fuzz.programs`: ``print(program)`` gives Python that builds it again.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["PythonProgram", "choose_python_program", "model_class", "scope_of_calls"]

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Parts:
    """What a call may bring, and a result may be."""

    a: Any
    b: Any = None


torch.export.register_dataclass(Parts)

ROWWISE = (
    "{v} = {a} * {s}",
    "{v} = {a} + {b}",
    "{v} = self.inner({a})",
    "{v} = torch.relu({a}) - {s}",
    "{v} = {a} * {b}.sum(1, keepdim=True)",
    "{v} = torch.where({a} > 0, {a}, {b})",
    "{v} = {a} * self.factor",
    "{v} = torch.cat([{a}[:, 2:], {b}[:, :2]], 1)",
)
MIXING = (
    "{v} = {a} - {a}.mean(0)",
    "{v} = {a}.softmax(0)",
    "{v} = {a} / {a}.shape[0]",
    "{v} = {a} + torch.arange({a}.shape[0])[:, None]",
    "{v} = {a}.flip(0)",
    "{v} = {a}.cumsum(0)",
    "{v} = {a} + {a}.amax()",
    "{v} = {a} * (1 + {a}.argmax(0))",
)
STATE = (
    "self.count += 1",
    "self.prev = {a}",
    "self.prev = {a}[:, :2]",
    "self.kept.append({a}) if len(self.kept) < 3 else None",
    "self.named['last'] = {a}",
    "self.named.pop('last', None)",
    "self.seen.add(name)",
    "self.seen.discard(name)",
    "self.flag = not self.flag",
    "{v} = {a} * (1 + self.count % 3)",
    "{v} = {a} + len(self.kept)",
    "{v} = {a} if self.prev is None else {a} + self.prev.sum()",
    "{v} = {a} * (2 if self.flag else 3)",
    "{v} = {a} * (2 if name in self.seen else 3)",
    "self.total += {a}.sum(0)",
    "self.total.mul_(0.5)",
    "{v} = {a} + self.total",
    "OUTSIDE['n'] = OUTSIDE.get('n', 0) + 1",
    "{v} = {a} + OUTSIDE.get('n', 0) % 2",
    "{v} = {a} + self.table[0]",
    "self.table[0] = self.table[0] + 1",
)
IDENTITY = (
    "{v} = {a} * 2 if x is y else {a} - y",
    "{v} = {a} * 3 if isinstance(x, nn.Parameter) else {a}",
    "{v} = {a} * 3 if x.requires_grad else {a}",
    "{v} = {a} * (2 if x.is_contiguous() else 3)",
    "{v} = {a} * (2 if type(k) is int else 3)",
    "{v} = {a} if {a} is {b} else {a} + {b}",
    "{v} = {a} * (5 if self.prev is x else 1)",
)
BRANCHES = (
    "{v} = {a} * 2 if {a}.shape[0] > 4 else {a} * 3",
    "{v} = {a} * 2 if flag else {b}",
    "{v} = {a} + k",
    "{v} = {a} * 2 if k == 2 else {a} + 1",
    "{v} = {a} * 2 if self.training else {a}",
    "{v} = sum(({a} * i for i in range(int(k))), {a})",
    "{v} = {a} * 2 if float({a}.sum()) > 0 else {a} * 3",
    "{v} = {a} + {a}.max().item()",
    "{v} = {a} * len({a}[:, 0].tolist())",
    "{v} = {a}; torch._dynamo.graph_break()",
    "{v} = sum(parts_of(parts), {a})",
    "{v} = {a} * (2 if name == 'first' else 3)",
    "{v} = {a} if {a}.shape[0] % 2 else {a} * 2",
)
SHARING = (
    "{a}.add_(1)",
    "{a}[:, 0] = 0.5",
    "{v} = {a}; {v}.mul_(0.5)",
    "{v} = {a}.view(-1, 2).repeat(1, 2)[: {a}.shape[0]]",
    "{v} = {a}.t().t()",
    "{v} = {a}[:, :]",
    "{v} = {a}.detach()",
    "{v} = {a}.reshape({a}.shape[0], 2, 2).flatten(1)",
    "{v} = {a}.clone()",
)
RETURNED = (
    "{a}",
    "({a}, {b})",
    "[{a}, {a}, {b}]",
    "{{'a': {a}, 'rest': [{b}, (k, name, None)]}}",
    "Parts({a}, {{'b': {b}}})",
    "Pair({a}, {b}.shape)",
    "({a}, {a}[:, 0], {a}.shape[0])",
    "({a}, x, parts)",
    "{{'rows': {a}.shape[0], 'all': {a}.sum()}}",
    "OrderedDict(b={b}, a={a})",
    "({a}.argmax(1), {b}.amax(0))",
    "({a}, {a}.t(), {b}[1:])",
    "{a} if flag else ({a}, k)",
    "(self.total, {a})",
)
X = ("rows({n})",) * 6 + (
    "rows({n}).requires_grad_()",
    "nn.Parameter(rows({n}))",
    "rows({n}).t().contiguous().t()",
    "rows(2 * {n})[::2]",
    "rows({n} + 2)[1:-1]",
    "rows(1).expand({n}, 4).clone()",
)
Y = ("rows({n})",) * 4 + ("x", "x.clone()", "x[:]", "x.detach()", "rows({n}).t().contiguous().t()", "last({n})")
PARTS = (
    "[rows({n})]",
    "[rows({n}), x]",
    "(rows({n}), rows({n}))",
    "{{'a': rows({n}), 'b': x}}",
    "{{'b': rows({n}), 'a': 2}}",
    "Parts(rows({n}))",
    "Parts(x, rows({n}))",
    "[]",
    "None",
)
BETWEEN = (
    "model.factor = 3.0",
    "model.factor = 2",
    "model.inner = linear(7)",
    "model.eval()",
    "model.train()",
    "model.table[0] = torch.ones(4) * 2",
    "model.named['extra'] = 1",
    "model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})",
    "model.inner.weight.data = torch.ones(4, 4)",
    "model.prev = None",
)


@dataclass(frozen=True)
class PythonProgram:
    """A module's ``forward(self, x, y, parts, flag, k, name)`` and its calls.

    Attributes:
        lines: the body.
        returned: what it returns.
        calls: for each call its arguments, made one after the other: x, y, parts, flag, k, name.
        between: (number of the call before which it runs, statement about ``model``).
        declared: whether sizes and dimensions are declared.
    """

    lines: tuple[str, ...]
    returned: str
    calls: tuple[tuple[str, ...], ...]
    between: tuple[tuple[int, str], ...] = ()
    declared: bool = False

    def source(self) -> str:
        """The module's ``forward``."""
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def forward(self, x, y, parts, flag, k, name):\n{body}    return {self.returned}\n"

    def __str__(self) -> str:
        parts = [f"    {field.name}={getattr(self, field.name)!r},\n" for field in dataclasses.fields(self)]
        return f"PythonProgram(\n{''.join(parts)})\n{self.source()}"


def linear(seed: int) -> nn.Linear:
    """The same layer for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    made = nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return made


def parts_of(parts: Any) -> list[Any]:
    """The tensors with rows in what a call brings."""
    found = (
        list(parts.values())
        if isinstance(parts, dict)
        else [parts.a, parts.b]
        if isinstance(parts, Parts)
        else list(parts or ())
    )
    return [value for value in found if isinstance(value, torch.Tensor)]


def model_class(program: PythonProgram) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    """A module class with the program as its ``forward``, and the variable that lies outside of it."""
    outside: dict[str, Any] = {}
    scope = {"torch": torch, "nn": nn, "Pair": Pair, "Parts": Parts, "OrderedDict": OrderedDict, "OUTSIDE": outside}
    exec(program.source(), {**scope, "parts_of": parts_of}, made := {})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear(0)
            self.register_buffer("total", torch.zeros(4))
            self.count, self.factor, self.flag = 0, 1.5, True
            self.prev: Any = None
            self.kept: list[Any] = []
            self.named: dict[str, Any] = {}
            self.seen: set[str] = set()
            self.table = [torch.ones(4)]

        forward = made["forward"]

    return Model, outside


def scope_of_calls(seed: int, last: Sequence[Any]) -> dict[str, Any]:
    """What the arguments of a call are made with; ``last`` are the tensors that the last call returned."""
    generator = torch.Generator().manual_seed(seed)

    def rows(n: int) -> torch.Tensor:
        return torch.randn(n, 4, generator=generator)

    def last_of(n: int) -> torch.Tensor:
        found = rows(n)
        return next((tensor for tensor in last if tensor.shape == found.shape and tensor.dtype == found.dtype), found)

    return {"rows": rows, "last": last_of, "nn": nn, "torch": torch, "Parts": Parts, "linear": linear, "copy": copy}


def choose_python_program(seed: int) -> PythonProgram:
    """A program by a seed; eager may refuse some of its calls."""
    chosen = random.Random(seed)
    names = ["x", "y", "x"]
    lines: list[str] = []
    kinds = (ROWWISE, ROWWISE, STATE, STATE, IDENTITY, BRANCHES, SHARING, MIXING if chosen.random() < 0.4 else ROWWISE)
    for number in range(chosen.randint(2, 6)):
        template = chosen.choice(chosen.choice(kinds))
        value = f"t{number}"
        a, b = chosen.choice(names[-3:]), chosen.choice(names)
        text = template.format(v=value, a=a, b=b, s=chosen.choice((0.5, 2, -1.5)))
        lines += text.split("; ")
        if "{v}" in template:
            names.append(value)
    returned = chosen.choice(RETURNED).format(a=names[-1], b=chosen.choice(names))
    sizes = [chosen.choice((1, 2, 3, 4, 5, 6, 7, 8)) for _ in range(chosen.choice((1, 2, 3)))]
    kinds_of = [[chosen.choice(values) for _ in range(chosen.choice((1, 1, 2)))] for values in (X, Y, PARTS)]
    flags = [[chosen.choice(values) for _ in range(chosen.choice((1, 1, 2)))] for values in FLAGS]
    calls = []
    for _ in range(chosen.randint(6, 12)):
        n = chosen.choice(sizes)
        calls.append(tuple(chosen.choice(values).format(n=n) for values in kinds_of) + tuple(map(chosen.choice, flags)))
    between = tuple((chosen.randrange(2, 6), chosen.choice(BETWEEN)) for _ in range(chosen.choice((0, 0, 0, 1, 2))))
    return PythonProgram(tuple(lines), returned, tuple(calls), between, declared=chosen.random() < 0.5)


FLAGS = (("True", "False"), ("1", "2", "2.0", "True"), ("'first'", "'second'"))
