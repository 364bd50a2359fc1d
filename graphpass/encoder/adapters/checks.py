"""What options of adapters may be."""

from __future__ import annotations

from typing import Any

from graphpass.errors import EncoderConfigError

__all__ = ["check_option", "unserved_tower"]


def check_option(name: str, value: Any, *, at_least: int) -> None:
    """Refuse what is not an integer of at least that.

    Raises:
        EncoderConfigError: it is not.
    """
    if type(value) is not int or value < at_least:
        raise EncoderConfigError(
            f"option {name} of the adapter cannot be used",
            expected=f"an integer of at least {at_least}",
            found=repr(value),
            remedy="leave it out for the default",
        )


def unserved_tower(tower: Any, expected: str, found: str) -> EncoderConfigError:
    """The error for a tower of a known class that does something its adapter does not."""
    return EncoderConfigError(
        f"{type(tower).__name__} does something that its adapter does not",
        expected=expected,
        found=found,
        remedy='write an adapter for it: "Add your tower" in docs/encoder.md',
    )
