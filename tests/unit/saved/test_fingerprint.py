"""What text a fingerprint has for code and values, without a compilation."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpass.compat.saving import CannotSaveError, require_lasting
from graphpass.ledger import Reason
from graphpass.options import Settings
from graphpass.saved.calls import assumed
from graphpass.saved.fingerprint import class_digests, contents_of, digest, implementations, mixed_sum, sources
from graphpass.saved.graphs import GraphIdentity

PLACE = "graphpass_saved_module"


def module_of(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module without a file, as of a notebook."""
    made = types.ModuleType(PLACE)
    exec(text, vars(made))
    monkeypatch.setitem(sys.modules, PLACE, made)
    return made


CODE = [
    "def f(x): return x * {}",
    "class C:\n    def f(self, x): return x * {}",
    "class C:\n    @property\n    def f(self): return {}",
    "class C:\n    @staticmethod\n    def f(x): return x * {}",
    "table = dict(a=lambda x: x * {})",
    "def outer(by):\n    def inner(x): return x * by\n    return inner\nf = outer({})",
    "def f(x, by={}): return x * by",
]


@pytest.mark.parametrize("code", CODE)
def test_an_edited_module_without_a_file_differs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number in (2, 3, 2):
        module_of(code.format(number), monkeypatch)
        found.append(sources([PLACE]))
    assert found[0] == found[2] != found[1]


def test_the_methods_of_objects_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        def apply(self, x: int) -> int:
            return x

    class Derived(Base):
        pass

    before = read({"it": Derived()})
    assert before == read({"it": Derived()})
    monkeypatch.setattr(Base, "apply", lambda self, x: x + 1)
    assert read({"it": Derived()}) != before


def read(values: dict[str, Any]) -> dict[str, str]:
    """What a trace assumes that compares a part of these values, such as their classes."""
    return assumed((), values)


@torch.library.custom_op("graphpass_saved::reaching", mutates_args=())
def reaching(x: torch.Tensor) -> torch.Tensor:
    return sys.modules[PLACE].helper(x).clone()


def reached_through(helper: Callable[..., Any]) -> Any:
    def named(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = helper.scaled(x)
        return made

    return named


@pytest.mark.parametrize("text", ["def scaled(x): return x * {}", "K = {}\ndef scaled(x): return x * K"])
@pytest.mark.parametrize("part", ["_init_fn", "_abstract_fn"])
def test_code_that_an_operator_reaches_is_compared(text: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number in (2, 3, 2):
        monkeypatch.setattr(reaching, part, reached_through(module_of(text.format(number), monkeypatch)))
        found.append(implementations([torch.ops.graphpass_saved.reaching.default]))
    assert found[0] == found[2] != found[1]


def test_an_operator_of_hidden_code_is_refused() -> None:
    library = torch.library.Library("graphpass_saved_hidden", "DEF")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x * 2, "CompositeImplicitAutograd")
    with pytest.raises(CannotSaveError, match="made of others"):
        implementations([torch.ops.graphpass_saved_hidden.f.default])
    assert implementations([torch.ops.aten.matmul.default]) == {}


def test_a_graph_with_a_kernel_of_the_user_is_not_saved() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = FakeTensorMode().from_tensor(torch.ones(4))
    numbers = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
    graph.call_function(triton_kernel_wrapper_mutation, kwargs={**numbers, "kwargs": {"p": x}})
    graph.output((x,))
    found = GraphIdentity.of(fx.GraphModule({}, graph), None, (), Settings.of({}))
    assert isinstance(found, Reason)
    assert "Triton kernel" in found.why


def reads_environment(x: int) -> int:
    return x if os.getenv("HOME") else 2 * x


def iterates(x: int) -> int:
    for name in {"add", "multiply"}:  # noqa: PLC0208
        x = x + 2 if name == "add" else x * 3
    return x


def is_member(x: str) -> bool:
    return x in {"add", "multiply"}


def iterates_numbers(x: int) -> int:
    return sum(n * x for n in (2, 3))


def test_what_no_guard_holds_is_refused() -> None:
    for lasting in (reads_environment, is_member, iterates_numbers):
        require_lasting(lasting.__code__)
    for code in (os.getenv.__code__, iterates.__code__):
        with pytest.raises(CannotSaveError):
            require_lasting(code)


def test_a_set_that_a_trace_read_is_in_its_order() -> None:
    one = dict.fromkeys(("a", "b", "c"))
    assert "iterated as" in read({"it": set(one)})["the value of it"]


@dataclass
class Config:
    me: Any = None


def test_what_contains_itself_has_no_digest_and_ends() -> None:
    config = Config()
    config.me = config
    with pytest.raises(CannotSaveError, match="itself"):
        digest(config)

    def again(x: int) -> int:
        return again(x - 1) if x else 0

    assert read({"it": again}) == read({"it": again})
    assert read({"it": config})


def test_values_of_the_environment_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHPASS_SECRET", "hush")
    before = read({"it": os.environ})
    assert "hush" not in str(before)
    monkeypatch.setenv("GRAPHPASS_SECRET", "other")
    assert read({"it": os.environ}) != before


def bits_of(tensor: torch.Tensor) -> int:
    return int(mixed_sum(tensor.contiguous().reshape(-1).view(torch.uint8)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.uint8, torch.int64])
def test_a_changed_or_moved_element_has_another_sum(dtype: torch.dtype) -> None:
    values = torch.arange(997).mul(13).remainder(251).to(dtype)
    found = {bits_of(values)}
    for place in (0, 3, 500, 996):
        changed = values.clone()
        changed[place] = 0 if values[place] else 1
        found.add(bits_of(changed))
    swapped = values.clone()
    swapped[[250, 251]] = values[[251, 250]] if dtype != torch.bool else ~values[[250, 251]]
    found |= {bits_of(swapped), bits_of(values[1:])}
    assert len(found) == 7
    assert bits_of(values[1:]) == bits_of(values[1:].clone()), "wherever it begins in its memory"
    assert bits_of(values[::3]) == bits_of(values[::3].clone())
    assert bits_of(values[:0]) == 0
    large = torch.arange(3 * 2**21 + 5)
    assert bits_of(large) != bits_of(large.roll(2**21)), "the index goes on from one part to the next"


def test_a_conjugate_or_negative_view_has_the_digest_of_its_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert contents_of([values.conj()]) == contents_of([values.conj().resolve_conj()]) != contents_of([values])
    negative = values.conj().imag
    assert negative.is_neg()
    assert contents_of([negative]) == contents_of([values.conj().resolve_conj().imag]) != contents_of([values.imag])


def test_a_class_is_digested_with_its_attributes_and_methods() -> None:
    """Those of its bases, too; where they lie in memory does not count."""

    def made(by: float, base: type = object, method: object = lambda self: 1) -> type:
        return type("Made", (base,), {"by": by, "method": method, "__module__": __name__})

    plain, again, methodical = made(2.0), made(2.0), made(2.0, method=lambda self: 2)
    digests = [class_digests()(kind) for kind in (plain, made(3.0), methodical, made(2.0, made(3.0)))]
    assert len(set(digests)) == 4
    assert class_digests()(again) == digests[0]
