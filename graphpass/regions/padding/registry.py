"""Look-up of padding rules: the built-in tables, and rules that users register for custom operators."""

from __future__ import annotations

from typing import Any

from graphpass.compat import operators
from graphpass.errors import OptionError, did_you_mean
from graphpass.regions.padding.calls import PaddingRule
from graphpass.regions.padding.nodes import operator_named
from graphpass.regions.padding.rules import BUILT_IN, rule_of_tags

__all__ = ["is_registered", "register_padding_rule", "rule_for"]

_REGISTERED: dict[str, PaddingRule] = {}


def register_padding_rule(op: Any, rule: PaddingRule) -> None:
    """Register the padding rule of a custom operator, for all graphs of this process.

    Args:
        op: an overload, a packet (all its overloads), or the qualified name of either: ``mylib::attention``.
        rule: takes an :class:`OpCall`; returns the :class:`PaddedValue` of the result, a tuple of them for several
            results, or a :class:`PaddingReason` if real entries may depend on padding. One of the call's arguments
            stands for each result of its sizes, and says that row i depends on row i of it alone. An exception in the
            rule counts as such a reason.

    Raises:
        OptionError: ``op`` names no operator, ``rule`` is not callable, or the operator has a rule already.

    Example:
        An operator that works row by row along all dimensions but the last::

            def scaled(call: OpCall) -> PaddedValue:
                x = call.tensor("x")
                call.unpadded(x, [x.rank - 1], "normalises over")
                return x


            register_padding_rule("mylib::scale_rows", scaled)
    """
    name = _qualified(op)
    if not callable(rule):
        raise OptionError(
            f"the padding rule of {name} cannot be called",
            expected="a function of one OpCall",
            found=type(rule).__name__,
            remedy="pass a function that returns a PaddedValue or a PaddingReason",
        )
    if name in _REGISTERED or name.partition(".")[0] in {*BUILT_IN, *_REGISTERED}:
        raise OptionError(
            f"{name} has a padding rule already",
            expected="one registration for each operator",
            found="a second one",
            remedy="register the rule once, where the operator is defined",
        )
    _REGISTERED[name] = rule


def rule_for(name: str) -> PaddingRule | None:
    """The rule for a qualified operator name (``aten::add.Tensor``): registered, built in, or implied by its tags."""
    packet = name.partition(".")[0]
    rule = _REGISTERED.get(name) or _REGISTERED.get(packet) or BUILT_IN.get(packet)
    if rule is not None:
        return rule
    op = operator_named(name)
    return rule_of_tags(op) if op is not None else None


def is_registered(name: str) -> bool:
    """Whether a user registered the rule of the operator with this qualified name."""
    return name in _REGISTERED or name.partition(".")[0] in _REGISTERED


def _qualified(op: Any) -> str:
    if isinstance(op, operators.OpOverload):
        return str(op.name())
    if isinstance(op, operators.OpOverloadPacket):
        return str(operators.schema_name(operators.overloads_of(op)[0]))
    if not isinstance(op, str):
        raise OptionError(
            "the operator of a padding rule cannot be identified",
            expected="an OpOverload, an OpOverloadPacket or a qualified name such as 'mylib::attention'",
            found=repr(op),
            remedy="pass torch.ops.mylib.attention or its name",
        )
    namespace, separator, rest = op.partition("::")
    base, _, overload = rest.partition(".")
    packet = operators.operator_packet(namespace, base) if separator else None
    if packet is None or (overload and operator_named(op) is None):
        raise OptionError(
            f"no operator is named {op!r}",
            expected="the qualified name of a registered operator",
            found=repr(op),
            remedy=did_you_mean(
                op, operators.registered_operator_names(), otherwise="define the operator before its padding rule"
            ),
        )
    return op
