"""Models that read Python state, and a change of that state that the text of what they read may not show."""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Build = Callable[[nn.Module, bool], None]
Forward = Callable[[Any, torch.Tensor], torch.Tensor]

PLACE: Any = types.ModuleType("graphpass_saved_state")
"""A Python module whose variables are read."""


class Box:
    """An object with attributes."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Derived(Box):
    """Whose attributes a change adds."""


class Slotted:
    __slots__ = ("by", "late")


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Left:
    by = 2.0


class Right:
    by = 3.0


class Config(dict[str, Any]):
    """A configuration of a library: attributes are items."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


@dataclass(frozen=True)
class Reads:
    """A model that computes the one or the other thing."""

    name: str
    build: Build  #: gives a model its state, as it was or changed
    forward: Forward

    def model(self, is_changed: bool) -> nn.Module:
        made = type("Reading", (nn.Module,), {"forward": self.forward, "__module__": __name__})()
        torch.manual_seed(0)
        self.build(made, is_changed)
        return made.eval().requires_grad_(False)


def held(**pairs: tuple[Any, Any]) -> Build:
    """Attributes of ``model.box``, each as (it was, it is); ``...`` is absent."""

    def build(model: Any, is_changed: bool) -> None:
        model.box = Box(**{name: pair[is_changed] for name, pair in pairs.items() if pair[is_changed] is not ...})

    return build


def placed(**pairs: tuple[Any, Any]) -> Build:
    """Variables of a Python module."""

    def build(model: Any, is_changed: bool) -> None:
        for name, pair in pairs.items():
            vars(PLACE).pop(name, None)
            if pair[is_changed] is not ...:
                setattr(PLACE, name, pair[is_changed])

    return build


LATE = held(late=(..., 3.0))


def late_or_not(self: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * self.box.late
    except AttributeError:
        return x * 2.0


def by_each_key(self: Any, x: torch.Tensor) -> torch.Tensor:
    for key in self.box.of:
        x = x * key[1]
    return x


def by_each_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    for key in self.box.of:
        x = x * key.by
    return x


def default_of_a_dataclass(model: Any, is_changed: bool) -> None:
    PLACE.Made = dataclasses.make_dataclass(
        "Made", [("by", float, 3.0 if is_changed else 2.0)], namespace={"__module__": PLACE.__name__}
    )


def attribute_of_a_class(model: Any, is_changed: bool) -> None:
    PLACE.Made = type("Made", (), {"by": 3.0 if is_changed else 2.0, "__module__": PLACE.__name__})


def name_of_a_class(model: Any, is_changed: bool) -> None:
    PLACE.Made = type("Made", (), {"__module__": PLACE.__name__, **({"late": 3.0} if is_changed else {})})


def late_of_a_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * PLACE.Made.late
    except AttributeError:
        return x * 2.0


def tied(model: Any, is_changed: bool) -> None:
    model.a, model.b = linear(), linear()
    model.b.weight.data.copy_(model.a.weight.data)
    if is_changed:
        model.b.weight = model.a.weight


def one_box(model: Any, is_changed: bool) -> None:
    model.a = Box(by=2.0)
    model.b = model.a if is_changed else Box(by=2.0)


def one_of_two_places(model: Any, is_changed: bool) -> None:
    model.a = Box(by=2.0)
    PLACE.one = Box(by=2.0) if is_changed else model.a


def one_module(model: Any, is_changed: bool) -> None:
    model.a = linear()
    model.b = model.a if is_changed else linear()


def one_place(model: Any, is_changed: bool) -> None:
    PLACE.one = Left
    PLACE.other = Left if is_changed else Right


def is_module(model: Any, is_changed: bool) -> None:
    PLACE.one = re if is_changed else sys


def class_attribute(model: Any, is_changed: bool) -> None:
    model.box = Derived()
    if hasattr(Derived, "late"):
        del Derived.late
    if is_changed:
        Derived.late = 3.0  # type: ignore[attr-defined]


def plus_each(self: Any, x: torch.Tensor) -> torch.Tensor:
    for each in self.box.of:
        x = x + each
    return x


def config(model: Any, is_changed: bool) -> None:
    model.config = Config(by=2.0, **({"late": 3.0} if is_changed else {}))


def slotted(model: Any, is_changed: bool) -> None:
    model.box = Slotted()
    model.box.by = 2.0
    if is_changed:
        model.box.late = 3.0


def noted(model: Any, is_changed: bool) -> None:
    model.weight = nn.Parameter(torch.ones(8))
    if is_changed:
        model.weight.late = 3.0


READS = [
    Reads("getattr with a default", LATE, lambda self, x: x * getattr(self.box, "late", 2.0)),
    Reads("hasattr", LATE, lambda self, x: x * (3.0 if hasattr(self.box, "late") else 2.0)),
    Reads("try and except", LATE, late_or_not),
    Reads("a name in __dict__", LATE, lambda self, x: x * (3.0 if "late" in self.box.__dict__ else 2.0)),
    Reads(
        "finfo", held(of=(torch.finfo(torch.float16), torch.finfo(torch.bfloat16))), lambda self, x: x + self.box.of.max
    ),
    Reads(
        "a dictionary with keys that are tuples",
        held(of=({(1, 2): 2.0}, {(1, 3): 3.0})),
        lambda self, x: x * (2.0 if (1, 2) in self.box.of else 3.0),
    ),
    Reads(
        "a dictionary with keys that are classes",
        held(of=({Left: 2.0}, {Right: 2.0})),
        lambda self, x: x * (2.0 if Left in self.box.of else 3.0),
    ),
    Reads("the keys of a dictionary that are tuples", held(of=({(1, 2): 2.0}, {(1, 3): 2.0})), by_each_key),
    Reads("the keys of a dictionary that are classes", held(of=({Left: 2.0}, {Right: 2.0})), by_each_class),
    Reads(
        "a frozenset of tuples",
        held(of=(frozenset({(1, 2)}), frozenset({(1, 3)}))),
        lambda self, x: x * (2.0 if (1, 2) in self.box.of else 3.0),
    ),
    Reads(
        "a set of tuples", held(of=({(1, 2)}, {(1, 3)})), lambda self, x: x * (2.0 if (1, 2) in self.box.of else 3.0)
    ),
    Reads(
        "a regular expression",
        held(of=(re.compile("a+"), re.compile("b+"))),
        lambda self, x: x * (2.0 if self.box.of.pattern == "a+" else 3.0),
    ),
    Reads(
        "the default of a dataclass made in the forward", default_of_a_dataclass, lambda self, x: x * PLACE.Made().by
    ),
    Reads("an attribute of a class", attribute_of_a_class, lambda self, x: x * PLACE.Made.by),
    Reads("an attribute of an object made in the forward", attribute_of_a_class, lambda self, x: x * PLACE.Made().by),
    Reads("try and except of a class", name_of_a_class, late_of_a_class),
    Reads(
        "a type with arguments",
        held(of=(typing.List[int], typing.List[float])),  # noqa: UP006
        lambda self, x: x * (2.0 if self.box.of == typing.List[int] else 3.0),  # noqa: UP006
    ),
    Reads("a method of tensors", held(of=(torch.Tensor.sin, torch.Tensor.cos)), lambda self, x: self.box.of(x)),
    Reads(
        "a method of tensors in a list",
        held(of=([torch.Tensor.sin], [torch.Tensor.cos])),
        lambda self, x: self.box.of[0](x),
    ),
    Reads(
        "an attribute of tensors",
        held(of=(torch.Tensor.T, torch.Tensor.mT)),
        lambda self, x: x * (2.0 if self.box.of is torch.Tensor.T else 3.0),
    ),
    Reads(
        "an attribute of tensors in a Python module",
        placed(of=(torch.Tensor.real, torch.Tensor.imag)),
        lambda self, x: x * (2.0 if PLACE.of is torch.Tensor.real else 3.0),
    ),
    Reads(
        "a property",
        held(of=(torch.UntypedStorage.is_cuda, torch.UntypedStorage.is_hpu)),
        lambda self, x: x * (2.0 if self.box.of is torch.UntypedStorage.is_cuda else 3.0),
    ),
    Reads(
        "a generator",
        held(of=(torch.default_generator, torch.Generator())),
        lambda self, x: x * (2.0 if self.box.of is torch.default_generator else 3.0),
    ),
    Reads("tied weights", tied, lambda self, x: self.b(self.a(x)) * (3.0 if self.a.weight is self.b.weight else 2.0)),
    Reads("a is b", one_box, lambda self, x: x * (3.0 if self.a is self.b else 2.0)),
    Reads(
        "an object to which one way is guarded",
        one_of_two_places,
        lambda self, x: x * (3.0 if PLACE.one is self.a else 2.0),
    ),
    Reads("one module twice", one_module, lambda self, x: self.b(self.a(x)) * (3.0 if self.a is self.b else 2.0)),
    Reads(
        "hasattr of a Python module",
        placed(late=(..., 3.0)),
        lambda self, x: x * (3.0 if hasattr(PLACE, "late") else 2.0),
    ),
    Reads("getattr of a Python module", placed(late=(..., 3.0)), lambda self, x: x * getattr(PLACE, "late", 2.0)),
    Reads(
        "is on a Python module's variables", one_place, lambda self, x: x * (3.0 if PLACE.one is PLACE.other else 2.0)
    ),
    Reads("a Python module that is another", is_module, lambda self, x: x * (3.0 if PLACE.one is re else 2.0)),
    Reads("an attribute that a class gives", held(of=(Left, Right)), lambda self, x: x * self.box.of.by),
    Reads(
        "an attribute of the class of an object", class_attribute, lambda self, x: x * getattr(self.box, "late", 2.0)
    ),
    Reads(
        "an object of another class",
        held(of=(Left(), Right())),
        lambda self, x: x * (2.0 if isinstance(self.box.of, Left) else 3.0),
    ),
    Reads(
        "a member of an enumeration",
        held(of=(Kind.ONE, Kind.TWO)),
        lambda self, x: x * (2.0 if self.box.of is Kind.ONE else 3.0),
    ),
    Reads("an item with a default", held(of=({}, {"late": 3.0})), lambda self, x: x * self.box.of.get("late", 2.0)),
    Reads(
        "an item of nested containers",
        held(of=({"a": [(1, {"b": 2.0})]}, {"a": [(1, {"b": 3.0})]})),
        lambda self, x: x * self.box.of["a"][0][1]["b"],
    ),
    Reads("the length of a list", held(of=([Left, Left], [Left, Left, Left])), lambda self, x: x * len(self.box.of)),
    Reads("a range", held(of=(range(2), range(3))), plus_each),
    Reads(
        "a configuration whose attributes are items",
        config,
        lambda self, x: x * getattr(self.config, "late", self.config.by),
    ),
    Reads("a slot that is set", slotted, lambda self, x: x * getattr(self.box, "late", 2.0)),
    Reads(
        "a comparison with a tuple of classes",
        held(of=((Left, (1, Left)), (Left, (1, Right)))),
        lambda self, x: x * (2.0 if self.box.of == (Left, (1, Left)) else 3.0),
    ),
    Reads("a slice", held(of=(slice(0, 2), slice(1, 2))), lambda self, x: x * x[:, self.box.of].sum(1, keepdim=True)),
    Reads("a size", held(of=(torch.Size([1, 2]), torch.Size([1, 3]))), lambda self, x: x * self.box.of.numel()),
    Reads(
        "a bound method of another object",
        held(of=(Box(by=2.0).__init__, Box(by=3.0).__init__)),
        lambda self, x: x * self.box.of.__self__.by,
    ),
    Reads("an attribute of a weight", noted, lambda self, x: x * self.weight * getattr(self.weight, "late", 2.0)),
]
