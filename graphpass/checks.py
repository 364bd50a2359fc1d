"""Sizes that users give: integers of at least 1."""

from __future__ import annotations

from collections.abc import Mapping

from graphpass.errors import OptionError

__all__ = ["check_positive"]


def check_positive(sizes: Mapping[str, int], what: str) -> None:
    """Raise for the first size that is below 1.

    Args:
        sizes: by name.
        what: whose sizes they are.

    Raises:
        OptionError: one is below 1, or no integer.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise OptionError(
                f"{name} of {what} cannot be used",
                expected="an integer of at least 1",
                found=repr(size),
                remedy=f"pass {name}=1 or more",
            )
