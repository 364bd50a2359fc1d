"""Saved starts on a GPU: one process compiles by Inductor and saves, another one loads kernels with empty caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.saved.starts import STARTS, assert_loaded, started

pytestmark = pytest.mark.cuda
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.mark.parametrize("kind", STARTS)
def test_another_process_loads_and_compiles_nothing(kind: str, tmp_path: Path) -> None:
    empty = ({name: str(tmp_path / process / name) for name in CACHES} for process in ("first", "second"))
    saved, loaded = (started("inductor", tmp_path, [kind], **caches)[kind] for caches in empty)
    assert_loaded(kind, saved, loaded)
