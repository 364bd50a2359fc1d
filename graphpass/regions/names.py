"""One name for one op, whichever of its forms a graph holds.

A user lists ``aten::add``; Dynamo's graphs hold ``operator.add``, ``torch.add``, ``Tensor.add`` or ``operator.iadd``.
Every callable has a set of names here, see Note [Names of operators]. An in-place form answers to the plain name too,
the plain form never to the in-place name. A name with an overload matches the overload that the call resolves to.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from graphpass.compat import operators
from graphpass.regions.execute import UNDECLARED_WRITES, execute, owner_of, value_of

CALLED = "graphpass_called"


def _table(text: str) -> Mapping[str, str]:
    return dict(pair.split("=") for pair in text.split())


# Python operators and their aten names; an in-place operator is its plain name with an "i" in front.
OPERATOR_NAMES = _table(
    "add=add sub=sub mul=mul truediv=div floordiv=floor_divide mod=remainder pow=pow matmul=matmul neg=neg "
    "pos=positive abs=abs and_=bitwise_and or_=bitwise_or xor=bitwise_xor invert=bitwise_not inv=bitwise_not "
    "lshift=bitwise_left_shift rshift=bitwise_right_shift eq=eq ne=ne lt=lt le=le gt=gt ge=ge"
)

# Two aten names for one op, the one that graphs usually hold on the right.
ALIASES = _table(
    "absolute=abs arccos=acos arccosh=acosh arcsin=asin arcsinh=asinh arctan=atan arctan2=atan2 arctanh=atanh "
    "clip=clamp concat=cat concatenate=cat conv2d_padding=conv2d det=linalg_det divide=div fix=trunc ger=outer "
    "greater=gt greater_equal=ge inverse=linalg_inv less=lt less_equal=le linalg_matmul=matmul "
    "matrix_power=linalg_matrix_power moveaxis=movedim multiply=mul negative=neg not_equal=ne "
    "orgqr=linalg_householder_product row_stack=vstack special_digamma=digamma special_erf=erf special_erfc=erfc "
    "special_exp2=exp2 special_expit=sigmoid special_expm1=expm1 special_gammaln=lgamma special_log1p=log1p "
    "special_log_softmax=log_softmax special_logsumexp=logsumexp special_round=round special_sinc=sinc "
    "special_softmax=softmax special_xlogy=xlogy subtract=sub swapaxes=transpose swapdims=transpose true_divide=div"
)

# Python methods and functions that stand for an aten op of another name.
CALLABLE_NAMES = _table(
    "type_as=to type=to float=to double=to half=to bfloat16=to int=to long=to short=to char=to byte=to bool=to cpu=to "
    "cuda=to unique=_unique2"
)


def names_of(node: fx.Node) -> frozenset[str]:
    """All names that the op of a call node answers to; empty for nodes that call nothing."""
    if node.op == "call_method":
        return _method_names(str(node.target))
    if node.op == "call_module":
        return _module_names(node)
    if node.op != "call_function":
        return frozenset()
    if node.target is operator.getitem or node.target is operator.setitem:
        return _indexing_names(node)
    return callable_names(node.target)


def display_name(node: fx.Node) -> str:
    """The op of a node as reasons and dumps write it, without addresses or paths."""
    if node.op == "call_module":
        return type(module_of(node)).__name__
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    target = node.target
    if hasattr(target, "overloads") or hasattr(target, "overloadpacket"):
        return qualified(target)
    if operators.is_higher_order(target):
        return f"higher_order::{getattr(target, '__name__', '?')}"
    name = getattr(target, "__name__", type(target).__name__)
    dotted = _index().get(id(target), ())
    if dotted:  # the most public one
        return min(dotted, key=lambda name: ("._" in name, name.count("."), name))
    module = str(getattr(target, "__module__", "") or "").lstrip("_")
    return f"{module}.{name}" if module and module != "builtins" else str(name)


def packets_of(node: fx.Node) -> tuple[Any, ...]:
    """The operator packets (``torch.ops.aten.add``) behind the names of a node."""
    named = (name.partition("::") for name in sorted(names_of(node)) if "." not in name)
    found = (operators.operator_packet(namespace, base) for namespace, _, base in named if base)
    return tuple(packet for packet in found if packet is not None)


class Traits(NamedTuple):
    """What an overload is known to do."""

    tags: frozenset[torch.Tag]
    is_out: bool  #: it writes its result into an argument, ``out=``
    writes: bool  #: it writes to an argument, by its schema or as the table of execute says


def traits_of(node: fx.Node, *, out: bool) -> list[Traits]:
    """The traits of each overload that a node may call, without the ``out=`` overloads unless ``out``."""
    if hasattr(node.target, "overloadpacket"):
        overloads: list[Any] = [node.target]
    else:
        overloads = [overload for packet in packets_of(node) for overload in operators.overloads_of(packet)]
    return [traits for traits in map(_traits, overloads) if out or not traits.is_out]


@functools.cache
def _traits(overload: Any) -> Traits:
    schema = operators.schema_of(overload)
    is_out = any(argument.is_out for argument in schema.arguments)
    return Traits(frozenset(overload.tags), is_out, bool(schema.is_mutable) or schema.name in UNDECLARED_WRITES)


def overload_name(overload: Any) -> str:
    """``Tensor`` of ``aten::add.Tensor``; ``default`` where the schema names none."""
    return str(operators.schema_of(overload).overload_name) or "default"


def qualified(target: Any) -> str:
    """``aten::add`` for a packet, ``aten::add.Tensor`` for an overload."""
    name = str(operators.operator_name(target))
    return f"{name}.{overload_name(target)}" if hasattr(target, "overloadpacket") else name


def callable_names(target: Any) -> frozenset[str]:
    """All names that a callable answers to; empty for a Python function that is no op."""
    if hasattr(target, "overloadpacket"):
        return _closure(qualified(target.overloadpacket)) | {qualified(target)}
    if hasattr(target, "overloads"):
        return _closure(qualified(target))
    if operators.is_higher_order(target):
        return frozenset({f"higher_order::{getattr(target, '__name__', '')}"})
    module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    if module in ("_operator", "operator"):
        return _operator_names(name)
    return frozenset[str]().union(*map(_names_of_dotted, _index().get(id(target), ())))


@functools.cache
def _operator_names(name: str) -> frozenset[str]:
    plain = OPERATOR_NAMES.get(name)
    if plain is not None:
        return _closure(f"aten::{plain}")
    in_place = name.removeprefix("i")
    plain = OPERATOR_NAMES.get(in_place) or OPERATOR_NAMES.get(in_place + "_")
    if plain is not None:
        return _closure(f"aten::{plain}_") | _closure(f"aten::{plain}")
    return frozenset({f"operator.{name}"})


@functools.cache
def _method_names(name: str) -> frozenset[str]:
    if name.startswith("__") and name.endswith("__"):
        inner = name.strip("_")
        if inner in ("getitem", "setitem"):
            return frozenset({f"operator.{inner}"})
        inner = inner + "_" if inner in ("and", "or", "xor") else inner
        known = inner if inner in OPERATOR_NAMES or inner.startswith("i") else inner.removeprefix("r")
        return _operator_names(known)
    return _names_of_dotted(f"torch.Tensor.{name}")


@functools.cache
def _names_of_dotted(dotted: str) -> frozenset[str]:
    prefix, _, name = dotted.rpartition(".")
    kind = prefix.rpartition(".")[2].removeprefix("_")
    if kind in ("special", "linalg", "fft") and not name.startswith(f"{kind}_"):
        name = f"{kind}_{name}"
    name = CALLABLE_NAMES.get(name, name)
    if operators.operator_packet("aten", name) is None:
        return frozenset()
    return _closure(f"aten::{name}")


def _indexing_names(node: fx.Node) -> frozenset[str]:
    index = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    by_tensor = any(isinstance(value_of(part), (torch.Tensor, list)) for part in parts)
    if node.target is operator.setitem:
        base = "index_put" if by_tensor else "copy"
        return frozenset({"operator.setitem", f"aten::{base}_", f"aten::{base}"})
    if not isinstance(value_of(node.args[0]), torch.Tensor):
        return frozenset({"operator.getitem"})
    names = {"operator.getitem"} | ({"aten::index"} if by_tensor else set())
    names |= {"aten::slice" for part in parts if isinstance(part, slice)}
    names |= {"aten::unsqueeze" for part in parts if part is None}
    names |= {"aten::select" for part in parts if isinstance(value_of(part), (int, torch.SymInt))}
    return frozenset(names)


def module_of(node: fx.Node) -> torch.nn.Module:
    """The submodule that a ``call_module`` node calls."""
    return owner_of(node).get_submodule(str(node.target))


def _module_names(node: fx.Node) -> frozenset[str]:
    """The names of a module's class, and of the torch functions that its forward calls: noted on the node."""
    if CALLED not in node.meta:
        try:
            node.meta[CALLED] = execute(node).functions
        except Exception:
            node.meta[CALLED] = ()
    kind = type(module_of(node))
    return frozenset({f"{kind.__module__}.{kind.__qualname__}"}).union(*map(callable_names, node.meta[CALLED]))


@functools.cache
def _closure(name: str) -> frozenset[str]:
    """``name`` with its alias, and for an in-place op the plain one's; only names that are registered."""
    namespace, _, base = name.partition("::")
    found = {canonical(name)}
    if namespace == "aten" and base.startswith("_scaled_dot_product_"):
        found.add("aten::scaled_dot_product_attention")
    if base.endswith("_") and not base.endswith("__") and operators.operator_packet(namespace, base[:-1]) is not None:
        found.add(canonical(name[:-1]))
    return frozenset(found | {name})


def canonical(name: str) -> str:
    """The name under which the aliases of one op meet: ``aten::divide`` is ``aten::div``."""
    namespace, _, base = name.partition("::")
    if namespace != "aten":
        return name
    if base.endswith("_") and base[:-1] in ALIASES:
        return f"aten::{ALIASES[base[:-1]]}_"
    return f"aten::{ALIASES.get(base, base)}"


@functools.cache
def _index() -> Mapping[int, tuple[str, ...]]:
    """Identity of every torch function and Tensor method -> its dotted names; torch keeps these objects for ever."""
    found: dict[int, list[str]] = {}
    for prefix, namespace in operators.operator_namespaces():
        for name in dir(namespace):
            value = getattr(namespace, name, None)
            if callable(value) and not isinstance(value, type) and not name.startswith("__"):
                found.setdefault(id(value), []).append(f"{prefix}.{name}")
    return {key: tuple(names) for key, names in found.items()}


def dotted_names() -> Iterable[str]:
    """The dotted names of all torch functions and Tensor methods, sorted."""
    return sorted({dotted for names in _index().values() for dotted in names})
