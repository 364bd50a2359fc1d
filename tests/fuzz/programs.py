"""Random programs: lines of tensor code, and how their calls are made; a seed chooses both.

A program is text, so that a failing case can be read, pasted into a test and run: ``print(program)`` gives Python that
builds it again. Lines are made from templates over the values that exist so far, and are kept if eager runs them at
every size that the program will be called with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from tests.fuzz.ops import OPS, SPLITTABLE, Op, namespace

COLUMNS, STATE_ROWS = 4, 8
STATE: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"b": (STATE_ROWS, COLUMNS), "c": (COLUMNS,), "w": (COLUMNS, COLUMNS)}
)
"""What a module holds: two buffers and, named w, a parameter.

It asks for no gradient: AOTAutograd refuses views of one that does when the program writes to it under ``no_grad``.
"""

_SIZES = (3, 5, 6, 2, 4, 8, 1)
_ODD_LAYOUTS = ("same", "offset", "rows", "transposed", "columns", "overlap", "buffer")
_PLAIN_LAYOUTS = ("fresh", "fresh", "refill", "refill", "feedback", "swapped")
_MODES = ("FULL", "FULL", "PIECEWISE", "PIECEWISE", "NONE")
_INDICES = range(16)
_ALLOWED = (True, True, True)
ROUTES = ("direct",) * 22 + ("dynamo",) * 2 + ("graphed",)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a program."""

    mode: str  #: the forward context's runtime mode
    rows: int  #: size of the dynamic dimension
    layout: str = "fresh"  #: where the inputs lie, see :mod:`tests.fuzz.inputs`
    instance: int = 0  #: which of two modules of one class is called


class Pasteable:
    """A program that is printed as Python: what builds it again, and its source."""

    def source(self) -> str:
        """The function as Python."""
        raise NotImplementedError

    def __repr__(self) -> str:
        parts = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            items = "".join(f"        {item!r},\n" for item in value) if isinstance(value, tuple) else ""
            if field.default != value:
                parts.append(f"    {field.name}=" + (f"(\n{items}    ),\n" if items else f"{value!r},\n"))
        return f"{type(self).__name__}(\n{''.join(parts)})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.source()}"


@dataclass(frozen=True, repr=False)
class Program(Pasteable):
    """A function of ``x`` and ``y`` ``[rows, 4]``, ``i`` ``[rows]`` (0 or 1) and its module's :data:`STATE`."""

    lines: tuple[str, ...]  #: the function's body
    returned: tuple[str, ...]  #: what it returns, as a tuple
    calls: tuple[Call, ...]  #: how it is called, in order
    splitting_ops: tuple[str, ...] = ()  #: the backend's option
    outputs: str = "clone"  #: the backend's option
    dynamic: bool = True  #: whether one graph serves all sizes, or one each
    #: ``direct``: its FX graph is handed to the backend; ``dynamo``: through torch.compile; ``graphed``: through
    #: graphpass.graphed, padded
    route: str = "direct"
    padding: str = "zero"  #: what ``graphed`` fills padded rows of ``x`` and ``y`` with

    def source(self) -> str:
        """The function as Python."""
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def forward(self, x, y, i):\n{body}    return ({', '.join(self.returned)},)\n"


def module_class(program: Program, device: torch.device | str = "cpu") -> Callable[[int], torch.nn.Module]:
    """A module class with the program as its ``forward``; instances with equal seeds are equal."""
    scope = namespace(device)
    exec(program.source(), scope)

    class Module(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            for name, value in state_tensors(seed).items():
                value = value.to(device)
                if name == "w":
                    self.w = torch.nn.Parameter(value, requires_grad=False)
                else:
                    self.register_buffer(name, value)

        forward = scope["forward"]

    return Module


def state_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in STATE.items()}


class _Names:
    """Fills a template with names: ``format_map`` asks it for each placeholder."""

    def __init__(self, trial: _Trial, picks: tuple[int, int, int], count: int, *, writes: bool) -> None:
        self._trial, self._picks, self._count, self._writes = trial, picks, count, writes
        self._subject: str | None = None

    def __getitem__(self, placeholder: str) -> str:
        first, second, third = self._picks
        if placeholder in ("t", "u", "v"):
            return f"{placeholder}{self._count}"
        if placeholder == "s":
            return ("0.5", "-0.25", "2", "1.5")[third % 4]
        if placeholder in ("a", "m", "r"):
            if self._subject is None:
                self._subject = self._trial.pick(first, self._trial.subjects(placeholder, writes=self._writes))
            return self._subject
        subject = self._subject or "x"
        return self._trial.pick(second, self._trial.fitting(subject, elsewhere=placeholder == "other"))


class _Trial:
    """Runs lines at every size while they are made; the names of the float tensors that exist so far."""

    def __init__(self, sizes: Sequence[int], *, by_row: bool) -> None:
        self.names = ["x", "y", *(f"self.{name}" for name in STATE)]
        self._scopes = [self._scope(rows) for rows in sizes]
        self._by_row = by_row

    @staticmethod
    def _scope(rows: int) -> dict[str, Any]:
        class State:
            pass

        holder = State()
        holder.__dict__.update(state_tensors(0))
        generator = torch.Generator().manual_seed(rows)
        x, y = (torch.randn(rows, COLUMNS, generator=generator) for _ in range(2))
        i = torch.randint(0, min(2, rows), (rows,), generator=generator)
        return {**namespace(), "self": holder, "x": x, "y": y, "i": i}

    def value(self, name: str, scope: Mapping[str, Any] | None = None) -> torch.Tensor:
        scope = scope or self._scopes[0]
        found: torch.Tensor = getattr(scope["self"], name[5:]) if name.startswith("self.") else scope[name]
        return found

    def subjects(self, placeholder: str, *, writes: bool) -> list[str]:
        """The names that ``{a}``, ``{m}`` and ``{r}`` may stand for; what overlaps itself is not written to."""
        names = [name for name in self.names if not writes or _has_distinct_elements(self.value(name))]
        matrices = [name for name in names if self.value(name).dim() == 2]
        return names if placeholder == "a" else matrices if placeholder == "m" else self._with_input_rows(matrices)

    def _with_input_rows(self, names: list[str]) -> list[str]:
        """Those with a row for each of ``x`` that are no rows of the state, which has more than ``x`` shows."""
        state = {self.value(f"self.{name}").untyped_storage().data_ptr() for name in STATE}
        return [
            name
            for name in names
            if self.value(name).untyped_storage().data_ptr() not in state
            and all(len(self.value(name, scope)) == len(scope["x"]) for scope in self._scopes)
        ]

    def pick(self, index: int, among: list[str]) -> str:
        """One of ``among``, the latest values first, so that programs are chains and not bushes."""
        return among[-1 - index % len(among)] if among else "x"

    def fitting(self, subject: str, *, elsewhere: bool) -> list[str]:
        """The values that broadcast to ``subject`` at every size; ``elsewhere``: in other memory."""
        return [name for name in self.names if all(self._fits(subject, name, elsewhere, s) for s in self._scopes)]

    def _fits(self, subject: str, name: str, elsewhere: bool, scope: Mapping[str, Any]) -> bool:
        target, operand = self.value(subject, scope), self.value(name, scope)
        if elsewhere and target.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr():
            return False
        try:
            return bool(torch.broadcast_shapes(target.shape, operand.shape) == target.shape)
        except RuntimeError:
            return False

    def run(self, lines: Sequence[str]) -> bool:
        """Run them at every size; whether all sizes could and made tensors worth having."""
        code = compile("\n".join(lines), "<trial>", "exec")
        for scope in self._scopes:
            try:
                exec(code, scope)
            except (RuntimeError, IndexError, TypeError, ValueError):
                return False
        found = [name for name in self._scopes[0] if name[0] in "tuv" and name[1:].isdigit()]
        for name in found:
            if name not in self.names and self._is_value(name):
                self.names.append(name)
        return True

    def _is_value(self, name: str) -> bool:
        values = [scope[name] for scope in self._scopes]
        return all(isinstance(v, torch.Tensor) and v.is_floating_point() and 0 < v.numel() <= 400 for v in values)


def _has_distinct_elements(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted((d, s) for s, d in zip(tensor.shape, tensor.stride(), strict=True) if s > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _body(
    steps: Sequence[tuple[Op, int, int, int]], sizes: Sequence[int], *, by_row: bool
) -> tuple[list[str], list[str]]:
    """Lines for the steps that eager can run at every size, and the names of the values they leave."""
    kept: list[str] = []
    trial = _Trial(sizes, by_row=by_row)
    for count, (op, *picks) in enumerate(steps):
        text = op.text.format_map(_Names(trial, (picks[0], picks[1], picks[2]), count, writes=op.writes))
        lines = text.split("; ")
        if trial.run(lines):
            kept += lines
        else:  # it may have run in part
            trial = _Trial(sizes, by_row=by_row)
            trial.run(kept)
    return kept, trial.names


class Choices:
    """Of a seed: what a program is."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one_of(self, values: Sequence[_T]) -> _T:
        return self._random.choice(values)

    def many(self, least: int, most: int) -> range:
        """Of a number of numbers from ``least`` to ``most``."""
        return range(self._random.randint(least, most))


def choose_program(choices: Choices, *, draws: bool = True) -> Program:
    """A program that eager can run; of :data:`ROUTES` to compile it each is as likely as often as it stands there.

    Without ``draws`` it draws no random numbers: AOTAutograd drops draws that nothing reads, so that later ones differ
    from eager's, with graphpass or without.
    """
    route = choices.one_of(ROUTES)
    by_row = route == "graphed"
    ops = [
        op
        for op in OPS
        if (op.random <= draws, op.mixes_rows <= (not by_row), op.reshapes <= (route == "dynamo")) == _ALLOWED
    ]
    steps = [
        (choices.one_of(ops), choices.one_of(_INDICES), choices.one_of(_INDICES), choices.one_of(_INDICES))
        for _ in choices.many(2, 12)
    ]
    calls = _choose_calls(choices, most_sizes=2 if route == "direct" else 3)
    lines, names = _body(steps, sorted({call.rows for call in calls} | ({3, 5} if by_row else set())), by_row=by_row)
    returned = [names[-1 - choices.one_of(_INDICES) % len(names)] for _ in choices.many(1, 4)]
    if not by_row and choices.one_of(range(10)) == 9:
        returned.append("x.size(0)")
    return Program(
        lines=tuple(lines),
        returned=tuple(returned),
        calls=calls,
        splitting_ops=tuple(sorted({choices.one_of(SPLITTABLE) for _ in choices.many(0, 4)})),
        outputs=choices.one_of(("clone", "view")),
        dynamic=choices.one_of((False, True)),
        route=route,
        padding=choices.one_of(("zero", "nan")) if by_row else "zero",
    )


def _choose_calls(choices: Choices, *, most_sizes: int) -> tuple[Call, ...]:
    sizes = [choices.one_of(_SIZES) for _ in choices.many(1, most_sizes)]
    # Every layout with strides of its own costs a trace: two odd ones a program.
    layouts = (*_PLAIN_LAYOUTS, choices.one_of(_ODD_LAYOUTS), choices.one_of(_ODD_LAYOUTS))
    calls = [
        Call(
            mode=choices.one_of(_MODES),
            rows=choices.one_of(sizes),
            # Some lines run on ordinary inputs only: most programs should run at least once.
            layout=choices.one_of(layouts if step else ("fresh", "fresh", *layouts)),
            instance=choices.one_of((0, 0, 0, 1)),
        )
        for step in choices.many(2, 6)
    ]
    if all(call.mode != "FULL" for call in calls):
        calls.append(Call("FULL", sizes[0]))
    return tuple(calls)
