"""Random models that read Python values from all kinds of places, and other values that they may hold.

A program has reads, each of a place and of a use. A use has several values; a changed model has another in one place.
"""

from __future__ import annotations

import collections
import enum
import functools
import linecache
import pathlib
import random
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphpass.saved.fingerprint import digest

MODULE = "graphpass_fuzzed_state"
MODULE_OF_FORWARD = "graphpass_fuzzed_forward"


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Left:
    by = 2.0

    def __call__(self, x: Any) -> Any:
        return x * 2.0


class Right(Left):
    by = 3.0

    def __call__(self, x: Any) -> Any:
        return x * 3.0


class Box:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Slotted:
    __slots__ = ("a", "late")


class Config(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Behind:
    """Whose attribute is a property."""

    def __init__(self, value: Any) -> None:
        self._a = value

    @property
    def a(self) -> Any:
        return self._a


class Asked:
    """Whose attributes are found when they are asked for."""

    def __init__(self, value: Any) -> None:
        self.table = {"a": value}

    def __getattr__(self, name: str) -> Any:
        return self.table[name]


@dataclass
class Data:
    a: Any
    other: float = 1.0


class Sized:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class Whole(int):
    """An integer whose text is always the same."""

    def __repr__(self) -> str:
        return "whole"


Pair = collections.namedtuple("Pair", "a b")


def twice(x: Any) -> Any:
    return x * 2.0


def thrice(x: Any) -> Any:
    return x * 3.0


def scaling(by: float) -> Callable[[Any], Any]:
    return lambda x: x * by


MODULES = (torch, re, functools, collections, pathlib, types, sys)
SCOPE: dict[str, Any] = {module.__name__: module for module in MODULES}
SCOPE |= {made.__name__: made for made in (Kind, Number, Left, Right, Box, Slotted, Config, Behind, Asked, Data, Sized)}
SCOPE |= {"Whole": Whole, "Pair": Pair, "twice": twice, "thrice": thrice, "scaling": scaling, "nn": nn}

# -- uses: (text of a factor or of a call, the values that P may have, made anew for each model) ----------------------

USES: list[tuple[str, tuple[str, ...]]] = [
    ("(2.0 if P else 3.0)", ("True", "False", "None", "0", "1", "''", "[]", "[0]", "{}", "()", "Sized(0)", "Sized(1)")),
    ("(2.0 if P is True else 3.0)", ("True", "1", "1.0", "None")),
    ("(2.0 if P is None else 3.0)", ("None", "0", "False", "Box()")),
    ("(2.0 if isinstance(P, int) else 3.0)", ("2", "2.0", "True", "'2'", "Number.TWO", "Whole(2)")),
    ("(2.0 if P == 'a' else 3.0)", ("'a'", "'b'", "b'a'", "None")),
    ("(2.0 if P.startswith('a') else 3.0)", ("'ab'", "'ba'", "'a'")),
    ("float(P)", ("2", "3", "True", "2 ** 40", "Whole(2)", "Whole(3)")),
    ("(2.0 if P == P else 3.0)", ("float('nan')", "1.5", "2.5")),
    ("(1.0 + P)", ("2.5", "3.5", "2", "-1.5")),
    (
        "float(len(P))",
        ("[1]", "[1, 2]", "(1, 2)", "{1: 2}", "{1, 2}", "'ab'", "'abc'", "Sized(3)", "range(4)", "Pair(1, 2)"),
    ),
    ("(2.0 if 1 in P else 3.0)", ("[1]", "[2]", "{1}", "{2}", "frozenset({1})", "(2,)", "{1: 0}", "{2: 0}")),
    (
        "(2.0 if (1, 2) in P else 3.0)",
        ("{(1, 2): 0}", "{(1, 3): 0}", "frozenset({(1, 2)})", "frozenset({(1, 3)})", "[(1, 2)]"),
    ),
    ("(2.0 if Left in P else 3.0)", ("{Left: 0}", "{Right: 0}", "frozenset({Left})", "frozenset({Right})", "(Left,)")),
    ("float(sum(P))", ("[1, 2]", "[1, 3]", "(1, 2)", "(1, 3)", "range(3)", "range(1, 4)")),
    ("float(sum(len(each) for each in P))", ("[[1], [2, 3]]", "[[1], [2]]", "[(1,), 'ab']", "['a', 'b']")),
    ("float(next(iter(P.values())))", ("{1: 2.0, 2: 3.0}", "{2: 3.0, 1: 2.0}", "collections.OrderedDict(a=2, b=3)")),
    ("float(P.get('late', 2.0))", ("{}", "{'late': 3.0}", "{'other': 3.0}", "Config(late=4.0)")),
    ("float(P['a'][0][1])", ("{'a': [(1, 2)]}", "{'a': [(1, 3)]}", "{'a': ((1, 3),)}")),
    ("(2.0 if isinstance(P, Right) else 3.0)", ("Left()", "Right()", "Box()")),
    ("(2.0 if type(P) is Left else 3.0)", ("Left()", "Right()", "Box()")),
    ("(2.0 if P is Left else 3.0)", ("Left", "Right", "int")),
    ("P.by", ("Left()", "Right()", "Left", "Right", "Box(by=4.0)")),
    ("P().by", ("Left", "Right")),
    ("(2.0 if P is Kind.ONE else 3.0)", ("Kind.ONE", "Kind.TWO", "Number.ONE")),
    ("float(P.value)", ("Kind.ONE", "Kind.TWO", "Number.ONE", "Number.TWO")),
    ("(2.0 if hasattr(P, 'late') else 3.0)", ("Box()", "Box(late=1)", "Slotted()", "Config()", "Config(late=1)", "re")),
    (
        "getattr(P, 'late', 2.0)",
        ("Box()", "Box(late=3.0)", "Box(late=4.0)", "Config(late=3.0)", "types.SimpleNamespace()"),
    ),
    ("caught(P)", ("Box()", "Box(late=3.0)", "types.SimpleNamespace(late=3.0)", "Slotted()")),
    ("(2.0 if 'late' in P.__dict__ else 3.0)", ("Box()", "Box(late=1)", "Box(other=1)")),
    ("(2.0 if 'late' in vars(P) else 3.0)", ("Box()", "Box(late=1)", "Box(other=1)")),
    ("float(P.bits)", ("torch.finfo(torch.float16)", "torch.finfo(torch.float32)", "torch.iinfo(torch.int8)")),
    ("(2.0 if P.max > 1e10 else 3.0)", ("torch.finfo(torch.float16)", "torch.finfo(torch.bfloat16)")),
    ("(2.0 if P.max > 200 else 3.0)", ("torch.iinfo(torch.int8)", "torch.iinfo(torch.int16)")),
    ("(2.0 if P.pattern == 'a' else 3.0)", ("re.compile('a')", "re.compile('b')", "re.compile('a', re.I)")),
    ("(2.0 if P.match('A') else 3.0)", ("re.compile('a')", "re.compile('a', re.I)", "re.compile('A')")),
    ("(2.0 if P == torch.float16 else 3.0)", ("torch.float16", "torch.float32", "None")),
    ("float(P.itemsize)", ("torch.float16", "torch.float32", "torch.int64")),
    ("(2.0 if P.type == 'cpu' else 3.0)", ("torch.device('cpu')", "torch.device('meta')")),
    ("float(P.stop)", ("slice(0, 2)", "slice(0, 3)", "range(4)")),
    ("float(P.numel())", ("torch.Size([1, 2])", "torch.Size([1, 3])")),
    (
        "float(P.a)",
        ("Pair(2, 3)", "Pair(3, 3)", "Data(2)", "Data(3)", "Box(a=4)", "Behind(2)", "Behind(3)", "Asked(3)"),
    ),
    ("(2.0 if P == (1, (Left, 2)) else 3.0)", ("(1, (Left, 2))", "(1, (Right, 2))", "(1, (Left, 3))")),
    ("(2.0 if P.__name__ == 're' else 3.0)", ("re", "sys", "Left")),
    ("(2.0 if P is self.shared else 3.0)", ("model.shared", "Box()", "None")),
    ("(2.0 if P is self.linear.weight else 3.0)", ("model.linear.weight", "nn.Parameter(model.linear.weight.clone())")),
    ("(2.0 if P is self.linear else 3.0)", ("model.linear", "linear()")),
    ("(2.0 if P.suffix == '.a' else 3.0)", ("pathlib.PurePosixPath('x.a')", "pathlib.PurePosixPath('x.b')")),
    ("(2.0 if P in ('a', 'b') else 3.0)", ("'a'", "'c'", "None")),
    ("float(P.real)", ("1 + 2j", "2 + 2j", "3")),
    ("float(P['a'])", ("types.MappingProxyType({'a': 2})", "types.MappingProxyType({'a': 3})", "{'a': 4}")),
    ("float(len(P))", ("collections.deque([1])", "collections.deque([1, 2])", "collections.deque([1], maxlen=3)")),
    ("float(P())", ("lambda: 2", "lambda: 3", "functools.partial(int, 2)", "functools.partial(int, 3)")),
    (
        "float(P(2))",
        ("twice", "thrice", "Left()", "Right()", "scaling(2.5)", "scaling(3.5)", "functools.partial(max, 5)"),
    ),
    (
        "CALL",
        (
            "twice",
            "thrice",
            "Left()",
            "Right()",
            "torch.relu",
            "torch.abs",
            "scaling(2.5)",
            "scaling(3.5)",
            "nn.ReLU()",
            "nn.SiLU()",
        ),
    ),
    ("CALL", ("functools.partial(torch.clamp, max=1.0)", "functools.partial(torch.clamp, max=0.5)", "Box(f=twice).f")),
    ("CALL", ("scaling(2.5)", "scaling(3.5)", "nn.Sequential(nn.ReLU())", "nn.Sequential(nn.ReLU(), nn.Tanh())")),
]

# -- places: (text of what is read, statements that put `value` there) -------------------------------------------------

PLACES: list[tuple[str, str]] = [
    ("self.a{n}", "model.a{n} = value"),
    ("self.box.a{n}", "model.box.a{n} = value"),
    ("self.box.inner.a{n}", "model.box.inner.a{n} = value"),
    ("self.items['a{n}']", "model.items['a{n}'] = value"),
    ("self.box.table['a{n}'][0]", "model.box.table['a{n}'] = [value]"),
    ("self.pairs[{n}].a", "model.pairs[{n}] = Pair(value, 0)"),
    ("self.config.a{n}", "model.config['a{n}'] = value"),
    ("self.slotted{n}.a", "model.slotted{n} = Slotted(); model.slotted{n}.a = value"),
    ("self.behind{n}.a", "model.behind{n} = Behind(value)"),
    ("self.asked{n}.a", "model.asked{n} = Asked(value)"),
    ("self.data{n}.a", "model.data{n} = Data(value)"),
    ("self.space.a{n}", "model.space.a{n} = value"),
    ("self.linear.a{n}", "model.linear.a{n} = value"),
    ("STATE.a{n}", "state.a{n} = value"),
    ("STATE.Made{n}.a", "state.Made{n} = type('Made{n}', (), dict(a=value, __module__=state.__name__))"),
    ("STATE.Made{n}().a", "state.Made{n} = type('Made{n}', (), dict(a=value, __module__=state.__name__))"),
    ("STATE.box.a{n}", "state.box.a{n} = value"),
    ("GLOBAL{n}", "scope['GLOBAL{n}'] = value"),
    ("default{n}()", "scope['default{n}'].__defaults__ = (value,)"),
    ("keyword{n}()", "scope['keyword{n}'].__kwdefaults__ = dict(a=value)"),
    ("closure{n}()", "scope['closure{n}'] = scope['closing{n}'](value)"),
    ("type(self).a{n}", "type(model).a{n} = value"),
]

FUNCTIONS = """
def default{n}(a=None):
    return a
def keyword{n}(*, a=None):
    return a
def closing{n}(a):
    def inner():
        return a
    return inner
"""


@dataclass(frozen=True, slots=True)
class Read:
    place: int
    use: int
    value: int  #: which value it has in the model that is saved


@dataclass(frozen=True, slots=True)
class SavedProgram:
    """A model that is saved; one that is changed has another value in one read."""

    reads: tuple[Read, ...]

    def changes(self) -> list[tuple[int, int]]:
        """(read, other value) of each changed model."""
        return [
            (number, other)
            for number, read in enumerate(self.reads)
            for other in range(len(USES[read.use][1]))
            if other != read.value
        ]

    def __str__(self) -> str:
        texts = [f"{USES[r.use][0]} where P = {PLACES[r.place][0]}, {USES[r.use][1][r.value]}" for r in self.reads]
        return "; ".join(texts)

    def source(self) -> str:
        """Python code of the forward and of the functions that it calls."""
        lines = [
            "import torch",
            "class Model(torch.nn.Module):",
            "    def forward(self, x):",
            "        x = self.linear(x)",
        ]
        for number, read in enumerate(self.reads):
            place, (use, _) = PLACES[read.place][0].format(n=number), USES[read.use]
            factor = re.sub(r"(?<!\w)P(?!\w)", place, use)
            lines.append(f"        x = {place}(x)" if use == "CALL" else f"        x = x * {factor}")
        lines += ["        return x", "def caught(a):", "    try:", "        return a.late"]
        lines += ["    except AttributeError:", "        return 2.0"]
        return "\n".join((*lines, *(FUNCTIONS.format(n=number) for number in range(len(self.reads)))))

    def model(self, change: tuple[int, int] | None = None) -> nn.Module:
        """A new model. It replaces what the Python modules hold, on which the model before depends."""
        state, home = (sys.modules.setdefault(name, types.ModuleType(name)) for name in (MODULE, MODULE_OF_FORWARD))
        for module in (state, home):
            vars(module).clear()
            vars(module)["__name__"] = MODULE if module is state else MODULE_OF_FORWARD
        scope, source = vars(home), self.source()
        scope |= SCOPE | {"STATE": state}
        filename = f"<fuzzed {digest(source)[:8]}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        exec(compile(source, filename, "exec"), scope)
        torch.manual_seed(0)
        model = scope["Model"]()
        model.box, model.items, model.config, model.space = (
            Box(inner=Box(), table={}),
            {},
            Config(),
            types.SimpleNamespace(),
        )
        model.pairs, model.linear, model.shared, state.box = [None] * len(self.reads), linear(), Box(), Box()
        for number, read in enumerate(self.reads):
            value = change[1] if change is not None and change[0] == number else read.value
            made = {"model": model, "state": state, "scope": scope}
            made["value"] = eval(USES[read.use][1][value], SCOPE | {"linear": linear, "model": model})
            exec(PLACES[read.place][1].format(n=number), SCOPE | made)
        return model.eval().requires_grad_(False)


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def choose_saved_program(seed: int) -> SavedProgram:
    """One to four reads; each pair of a place and a use comes early in some seed."""
    chosen, combinations = random.Random(seed), len(PLACES) * len(USES)
    numbers = [(seed * 7919) % combinations, *(chosen.randrange(combinations) for _ in range(chosen.randrange(4)))]
    reads = []
    for number in numbers:
        place, use = divmod(number, len(USES))
        reads.append(Read(place, use, chosen.randrange(len(USES[use][1]))))
    return SavedProgram(tuple(reads))


def some_changes(program: SavedProgram, seed: int, count: int) -> Sequence[tuple[int, int]]:
    changes = program.changes()
    return random.Random(seed).sample(changes, min(count, len(changes)))
