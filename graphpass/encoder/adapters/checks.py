"""Checks of adapter options, and of towers that an adapter cannot replace."""

from __future__ import annotations

from typing import Any

from graphpass.checks import positive
from graphpass.compat import nnmodules
from graphpass.errors import EncoderConfigError

__all__ = ["checked_count", "refuse_changed", "unserved_tower"]

_STOCK_ATTENTION = ("eager", "sdpa", "flash_attention", "flex_attention", "paged|")
"""Prefixes of the names of transformers' attention functions."""


def checked_count(name: str, value: int, *, at_least: int = 1) -> int:
    """The value of the adapter's option ``name`` as an int.

    Raises:
        EncoderConfigError: ``value`` is not an integer, or below ``at_least``.
    """
    what, remedy = f"option {name} of the adapter", "omit the option for its default"
    return positive(value, what, at_least=at_least, remedy=remedy, error=EncoderConfigError)


def unserved_tower(tower: Any, expected: str, found: str) -> EncoderConfigError:
    """The error for a tower of a known class with behaviour that its adapter does not implement."""
    return EncoderConfigError(
        f"the adapter for {type(tower).__name__} does not support this tower",
        expected=expected,
        found=found,
        remedy='write an adapter for it: "Add your tower" in docs/encoder.md',
    )


def refuse_changed(tower: Any, stock: type) -> None:
    """Refuse a tower with changes outside its blocks: adapters call the parts of a tower instead of its forward.

    Args:
        tower: an instance of ``stock`` or of a subclass.
        stock: the class that has an adapter.

    Raises:
        EncoderConfigError: the tower overrides forward, has hooks, or uses an attention function that is not part of
            transformers.
    """
    if getattr(type(tower), "forward", None) is not getattr(stock, "forward", None) or "forward" in vars(tower):
        raise unserved_tower(tower, f"the forward of {stock.__name__}", "another one")
    for name, module in (("the tower", tower), ("its encoder", getattr(tower, "encoder", None))):
        if module is not None and nnmodules.has_hooks(module):
            raise unserved_tower(tower, "hooks on blocks and other parts only", f"a hook, or a forward, on {name}")
    attention = getattr(tower.config, "_attn_implementation", None)
    if attention is not None and not attention.startswith(_STOCK_ATTENTION):
        raise unserved_tower(tower, "an attention function of transformers", f"attn_implementation={attention!r}")
