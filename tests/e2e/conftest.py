"""What end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.engines import Engines, engines_made


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """Engines on the CPU for all tests, which count from what they find and leave an engine as it is."""
    with engines_made() as make:
        yield make
