"""The example that embeds a folder with Ray Data: two actors on the CPU share a folder of real photographs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.e2e.hugging_face import CPU, difference
from tests.processes import ROOT, environment

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: tox run -e ray", allow_module_level=True)

EXAMPLES = ROOT / "docs" / "examples"
# An actor's row: images, batches, replays, hits, misses.
ROW = re.compile(r"^[0-9a-f]{8} │" + r" +(\d+) │" * 5, re.MULTILINE)
NUM_IMAGES, BATCH_SIZE = 12, 3


@dataclass(frozen=True)
class Ran:
    """What a run of the example printed, and wrote: rows of a name and an embedding."""

    printed: str
    written: Sequence[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("embed_folder")


@pytest.fixture(scope="module")
def photographs(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("skimage.data")
    folder = tmp_path_factory.mktemp("photographs")
    example.write_photographs(folder)
    return folder


@pytest.fixture(scope="module")
def ran(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    from pyarrow import parquet

    output = tmp_path_factory.mktemp("written") / "embeddings"
    given = (str(photographs), "--output", str(output), "--actors", "2", "--batch-size", str(BATCH_SIZE), "--check")
    printed = run_example(*given)
    rows = parquet.read_table(output).to_pylist()
    return Ran(printed, [(Path(row["path"]).name, torch.tensor(row["embedding"])) for row in rows])


def run_example(*arguments: str) -> str:
    """What it prints; Ray's files and its token are gone afterwards."""
    settings = {
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    driver = Path(__file__).parent / "embed_folder_driver.py"
    # Sockets lie in the folder: pytest's own would make their paths too long.
    with tempfile.TemporaryDirectory(prefix="ray") as ray_folder:
        ended = subprocess.run(
            [sys.executable, str(driver), ray_folder, *arguments],
            env=environment(EXAMPLES, **settings),
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_both_actors_serve_images_from_graphs(ran: Ran) -> None:
    actors = [tuple(map(int, row)) for row in ROW.findall(ran.printed)]
    assert len(actors) == 2
    for images, batches, replays, hits, misses in actors:
        assert 0 < batches == replays
        assert (hits, misses) == (images, 0)
    assert sum(images for images, *_ in actors) == NUM_IMAGES


def test_embeddings_are_those_of_the_stock_tower(ran: Ran, photographs: Path, example: ModuleType) -> None:
    from PIL import Image

    model = example.Model("CLIP", None)
    tower, processor = model.tower(), model.processor()
    for name, found in ran.written:
        with torch.no_grad():
            image = Image.open(photographs / name).convert("RGB")
            expected = tower(**processor(images=[image], return_tensors="pt")).pooler_output[0]
        assert difference(found, expected) < CPU.tolerance
        others = (embedding for other, embedding in ran.written if other != name)
        assert min(difference(other, expected) for other in others) > 100 * CPU.tolerance
