"""What options of adapters may be."""

from __future__ import annotations

from typing import Any

from graphpass.checks import positive
from graphpass.compat import nnmodules
from graphpass.errors import EncoderConfigError

__all__ = ["checked_count", "refuse_changed", "unserved_tower"]

_STOCK_ATTENTION = ("eager", "sdpa", "flash_attention", "flex_attention", "paged|")
"""How names of transformers' own attention functions begin."""


def checked_count(name: str, value: int, *, at_least: int = 1) -> int:
    """The value of the adapter's option ``name`` as an int.

    Raises:
        EncoderConfigError: ``value`` is no integer, or below ``at_least``.
    """
    what, remedy = f"option {name} of the adapter", "leave it out for the default"
    return positive(value, what, at_least=at_least, remedy=remedy, error=EncoderConfigError)


def unserved_tower(tower: Any, expected: str, found: str) -> EncoderConfigError:
    """The error for a tower of a known class that does something its adapter does not."""
    return EncoderConfigError(
        f"{type(tower).__name__} does something that its adapter does not",
        expected=expected,
        found=found,
        remedy='write an adapter for it: "Add your tower" in docs/encoder.md',
    )


def refuse_changed(tower: Any, stock: type) -> None:
    """Refuse a tower that does more than its class says around its blocks: adapters call its parts, and not itself.

    Args:
        tower: of the class ``stock``, or of one derived from it.
        stock: the class that has an adapter.

    Raises:
        EncoderConfigError: it has a forward of its own, hooks, or an attention function that is not transformers'.
    """
    if getattr(type(tower), "forward", None) is not getattr(stock, "forward", None) or "forward" in vars(tower):
        raise unserved_tower(tower, f"the forward of {stock.__name__}", "another one")
    for name, module in (("the tower", tower), ("its encoder", getattr(tower, "encoder", None))):
        if module is not None and nnmodules.has_hooks(module):
            raise unserved_tower(tower, "hooks on blocks and other parts only", f"a hook, or a forward, on {name}")
    attention = getattr(tower.config, "_attn_implementation", None)
    if attention is not None and not attention.startswith(_STOCK_ATTENTION):
        raise unserved_tower(tower, "an attention function of transformers", f"attn_implementation={attention!r}")
