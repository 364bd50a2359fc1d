"""A runtime for the tests of several folders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphpass import GraphRuntime


@pytest.fixture
def rt() -> Iterator[GraphRuntime]:
    with GraphRuntime() as runtime:
        yield runtime
