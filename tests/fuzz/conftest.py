"""Warnings of programs that are made to be odd."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def odd_programs_may_warn() -> Iterator[None]:
    """Writing to expanded tensors, reading the grad of a leaf, and the like: eager warns of it too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
