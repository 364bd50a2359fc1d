"""Random Python around a graph: state, identity, sharing, exchanged storages, nested containers; and its calls.

A program is text, as in :mod:`tests.fuzz.programs`: ``print(program)`` gives Python that builds it again.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.fuzz.programs import Pasteable
from tests.unit.scaled import Other, Scaled, quantised

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
EXCHANGES = (
    "{a}.data = {b} * 2",
    "{a}.data = {b}",
    "{a}.set_({b}.clone())",
    "{v} = {a} * 0.5; torch.utils.swap_tensors({v}, {b})",
    "x.data = x * 0.5",
    "self.total.data = self.total * 0.5 + {a}.sum(0)",
    "self.total.data = {a}[0]",
    "self.total.set_({a}.amax(0))",
    "torch.utils.swap_tensors(self.total, {a}.sum(0))",
    "self.inner.weight.data = self.inner.weight * 0.5",
    "self.table[0].data = {a}.amax(0)",
    "self._sgd.step()",
    "self._adam.step()",
)
HELD = (
    "{v} = {a} + cell",
    "cell.add_(0.5)",
    "cell = cell * 0.5 + {a}.sum(0)",
    "cell = {a}[0]",
    "cell.data = {a}.sum(0)",
    "{v} = {a} + shelf[-1]",
    "shelf.append({a}.sum(0)) if len(shelf) < 4 else shelf.pop()",
    "shelf[0] = {a}.sum(0)",
    "shelf[0].mul_(0.5)",
    "{v} = {a} + self.box.value",
    "self.box.value = self.box.value * 0.5 + {a}.sum(0)",
    "self.box.value.copy_({a}.amax(0))",
    "self.box.last = {a}",
    "{v} = {a} if self.box.last is None else {a} + self.box.last.sum()",
)
FROM_THE_END = (
    "{v} = {a}[i]",
    "{v} = {a} + {b}[i].reshape(-1, 4)[0]",
    "{v} = {a} + {b}[i].reshape(-1, 4).sum(0)",
    "{v} = {a} + {b}.take(i.flatten()).sum()",
    "{v} = {a} + {b}[i.flatten()[0], -1]",
    "{v} = {a} + {b}[int(i.flatten()[-1])]",
    "{v} = {a}.index_put((i,), {b}[0])",
    "{v} = {a}.clone(); {v}[i] = 0.25",
    "{a}[i] = 0.5",
    "self.total += {a}[i].reshape(-1, 4)[0]",
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
INDICES = (
    ("torch.tensor(-1)", "torch.tensor(0)"),
    ("torch.tensor([0, 0])", "torch.tensor([-1, 0])", "torch.tensor([-{n}, -1])"),
    ("torch.tensor([{n} - 1])", "torch.tensor([-1])"),
    ("picks({n})",),
)
"""For each program one of them, so that calls differ in the contents."""
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
    "model.inner.weight.data = model.inner.weight * 0.5",
    "model.inner.weight.set_(torch.eye(4))",
    "torch.utils.swap_tensors(model.inner.weight, nn.Parameter(torch.eye(4)))",
    "torch.utils.swap_tensors(model.inner.bias, model.total)",
    "model.total.data = torch.ones(4)",
    "model.total.set_(torch.arange(4.0))",
    "torch.utils.swap_tensors(model.total, torch.ones(4))",
    "model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()}, assign=True)",
    "model._sgd.step()",
    "model._adam.step()",
    "compiled(model._sgd.step)()",
    "compiled(model._adam.step)()",
    "model.table[0].data = torch.ones(4) * 3",
    "model.box.value = torch.ones(4) * 2",
    "model.box.value.mul_(0.5)",
    "held()['cell'].data = torch.ones(4) * 2",
    "held()['cell'].add_(1)",
    "held()['shelf'][0] = torch.ones(4) * 3",
    "held()['shelf'].append(torch.ones(4))",
    "model.prev = None",
)

BETWEEN_WRAPPED = (
    "model.inner.weight.scale.mul_(0.5)",
    "model.inner.weight.mul_(0.5)",
    "model.inner.weight.copy_(Scaled.of(torch.eye(4)))",
    "model.inner.weight.scale = model.inner.weight.scale * 2",
    "model.inner.weight.codes = -model.inner.weight.codes",
    "model.inner.weight.shift = 0.5",
    "model.inner = quantised(linear(7))",
    "model.inner = quantised(linear(7), nested=True)",
    "model.inner = linear(7)",
    "model.inner = copy.deepcopy(model.inner)",
    "model.inner.weight = nn.Parameter(Other.of(torch.eye(4)), False)",
    "model.inner.weight = nn.Parameter(torch.eye(4), False)",
    "torch.utils.swap_tensors(model.inner.weight, nn.Parameter(Scaled.of(torch.eye(4)), False))",
    "model.to(torch.float64).to(torch.float32)",
    "model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)",
)


@dataclass(frozen=True, repr=False)
class PythonProgram(Pasteable):
    """A module's ``forward(self, x, y, parts, flag, k, name, i)`` and its calls.

    A closure holds ``cell`` and ``shelf``; ``i`` are indices, also negative ones.
    """

    lines: tuple[str, ...]  #: the body
    returned: str  #: what it returns
    #: for each call its arguments, made one after the other: x, y, parts, flag, k, name, i
    calls: tuple[tuple[str, ...], ...]
    between: tuple[tuple[int, str], ...] = ()  #: (number of the call before which it runs, statement about ``model``)
    declared: bool = False  #: whether sizes and dimensions are declared
    compiler: str = "eager"  #: compiles regions
    wraps: bool = False  #: whether the layer's weight is a tensor that wraps others

    def source(self) -> str:
        """A function that makes the module's ``forward``, and a function that returns what is held outside of it."""
        body = "".join(f"        {line}\n" for line in self.lines)
        return (
            "def make():\n"
            "    cell, shelf = torch.ones(4), [torch.ones(4)]\n"
            "    def forward(self, x, y, parts, flag, k, name, i):\n"
            f"        nonlocal cell\n{body}        return {self.returned}\n"
            "    return forward, lambda: {'cell': cell, 'shelf': shelf, 'OUTSIDE': OUTSIDE}\n"
        )


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


class Box:
    """An object that is no module."""

    def __init__(self) -> None:
        self.value = torch.ones(4)
        self.last: Any = None


def model_class(program: PythonProgram) -> tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]:
    """A module class with the program as its ``forward``, and a function that returns the variables outside of it."""
    scope = {"torch": torch, "nn": nn, "Pair": Pair, "Parts": Parts, "OrderedDict": OrderedDict, "OUTSIDE": {}}
    exec(program.source(), {**scope, "parts_of": parts_of}, made := {})
    function, held = made["make"]()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = quantised(linear(0)) if program.wraps else linear(0)
            self.register_buffer("total", torch.zeros(4))
            self.count, self.factor, self.flag = 0, 1.5, True
            self.prev: Any = None
            self.kept: list[Any] = []
            self.named: dict[str, Any] = {}
            self.seen: set[str] = set()
            self.table = [torch.ones(4)]
            self.box = Box()
            trained = [self.inner.bias] if program.wraps else list(self.inner.parameters())
            for parameter in trained:
                parameter.grad = parameter.detach() * 0.5 + 0.1
            self._sgd = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
            self._adam = torch.optim.Adam(trained, lr=0.1)

        forward = function

    return Model, held


def scope_of_calls(seed: int, last: Sequence[Any]) -> dict[str, Any]:
    """What the arguments of a call are made with; ``last`` are the tensors that the last call returned."""
    generator = torch.Generator().manual_seed(seed)

    def rows(n: int) -> torch.Tensor:
        return torch.randn(n, 4, generator=generator)

    def last_of(n: int) -> torch.Tensor:
        found = rows(n)
        return next((tensor for tensor in last if tensor.shape == found.shape and tensor.dtype == found.dtype), found)

    def picks(n: int) -> torch.Tensor:
        return torch.randint(-n, n, (n,), generator=generator)

    named = {"rows": rows, "last": last_of, "picks": picks, "linear": linear}
    named |= {"quantised": quantised, "Scaled": Scaled, "Other": Other}
    return {**named, "nn": nn, "torch": torch, "Parts": Parts, "copy": copy}


def choose_python_program(seed: int) -> PythonProgram:
    """A program by a seed; eager may refuse some of its calls."""
    chosen = random.Random(seed)
    names = ["x", "y", "x"]
    lines: list[str] = []
    kinds = [ROWWISE, ROWWISE, STATE, STATE, IDENTITY, BRANCHES, SHARING, EXCHANGES, HELD, FROM_THE_END]
    kinds.append(MIXING if chosen.random() < 0.4 else ROWWISE)
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
    indices = chosen.choice(INDICES)
    calls = []
    for _ in range(chosen.randint(6, 16)):
        n = chosen.choice(sizes)
        tensors = (chosen.choice(values).format(n=n) for values in kinds_of)
        calls.append((*tensors, *map(chosen.choice, flags), chosen.choice(indices).format(n=n)))
    between = tuple((chosen.randrange(2, 6), chosen.choice(BETWEEN)) for _ in range(chosen.choice((0, 0, 0, 1, 2, 3))))
    declared, compiler = chosen.random() < 0.5, "aot_eager" if chosen.random() < 0.1 else "eager"
    return PythonProgram(tuple(lines), returned, tuple(calls), between, declared, compiler)


def choose_wrapping_program(seed: int) -> PythonProgram:
    """The same program over a weight that wraps tensors, which changes between calls."""
    program, chosen = choose_python_program(seed), random.Random(seed + 1)
    apart = tuple((at, statement) for at, statement in program.between if "inner.weight" not in statement)
    changed = tuple((chosen.randrange(2, 6), chosen.choice(BETWEEN_WRAPPED)) for _ in range(chosen.choice((0, 1, 2))))
    y = chosen.choice(("self.inner(x)", "x @ self.inner.weight", "x @ -self.inner.weight", "self.inner(x).relu()"))
    lines = (f"w = {y}", *program.lines) if chosen.random() < 0.7 else program.lines
    returned = f"({program.returned}, w)" if lines is not program.lines else program.returned
    return replace(program, wraps=True, between=(*apart, *changed), lines=lines, returned=returned)


FLAGS = (("True", "False"), ("1", "2", "2.0", "True"), ("'first'", "'second'"))
