"""Embed a folder of images with Ray Data: one actor a device, each with an encoder's graphs of its own.

Ray reads and prepares images in tasks on the CPU and hands batches of them to the actors. An actor holds one tower and
has captured it before the first batch comes. Without a folder, photographs of scikit-image are embedded; without
``--model``, the tower is built from its config with seeded random weights, and nothing is downloaded.

    python docs/examples/embed_folder.py photographs --output embeddings --check

Exits with 1 when an image was left out, when nothing was replayed, or, with ``--check``, when an embedding is not that
of the stock tower. Needs ``pip install "ray[data]" transformers scikit-image``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transformers
from PIL import Image
from ray.data import ActorPoolStrategy, DataContext, Dataset
from rich.console import Console
from rich.table import Table

import graphpass

SIDE = 64
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 16,
}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
# The tower to compare with runs in float32 on the CPU.
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """A ``CLIP`` or ``Siglip`` tower, with the weights of ``name`` (a folder, or a name on the hub) or random ones."""

    family: str
    name: str | None

    def tower(self) -> Any:
        """The stock tower, in float32 on the CPU."""
        kind = getattr(transformers, f"{self.family}VisionModel")
        if self.name is not None:
            return kind.from_pretrained(self.name, dtype=torch.float32).eval()
        torch.manual_seed(0)
        return kind(kind.config_class(**SMALL)).eval()

    def processor(self) -> Any:
        """The image processor that comes with the tower, over Pillow."""
        kind = getattr(transformers, f"{self.family}ImageProcessorPil")
        if self.name is not None:
            return kind.from_pretrained(self.name)
        return kind(
            size={"height": SIDE, "width": SIDE}, **({"do_center_crop": False} if self.family == "CLIP" else {})
        )


class Embedder:
    """An actor: a tower on the device that Ray gave it, captured before the first batch.

    Each row that it returns says who made it and what its manager has counted by then. An actor's highest counts are
    its last, so that nobody has to ask the actors before they go.
    """

    def __init__(self, model: Model, device: str, batch_size: int) -> None:
        self.place: dict[str, Any] = {"device": device, "dtype": DTYPE[device]}
        # A replay gains nothing on a CPU: by measured costs the manager might rightly never choose one there.
        options = graphpass.EncoderOptions(costs="measured" if device == "cuda" else None)
        self.manager = graphpass.EncoderCudaGraphManager.from_model(
            model.tower().to(**self.place), options=options, output="pooler_output", max_items=batch_size
        )
        self.manager.capture()
        self.actor, self.seconds = ray.get_runtime_context().get_actor_id(), 0.0

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        begun = time.perf_counter()
        pixels = torch.tensor(batch["pixel_values"]).to(**self.place)
        embeddings = torch.stack(self.manager.execute({"pixel_values": pixels})).float().cpu().numpy()  # type: ignore[arg-type]
        self.seconds += time.perf_counter() - begun
        stats = self.manager.get_cumulative_stats()
        counts = {name: getattr(stats, name) for name in ("requests", "replays", "hits", "misses", "padding_waste")}
        counts |= {"actor": self.actor, "seconds": self.seconds}
        columns = {name: np.full(len(embeddings), count) for name, count in counts.items()}
        return {"path": batch["path"], "embedding": embeddings, **columns}


def prepared(folder: Path, processor: Any) -> Dataset:
    """Path and pixels of every image below ``folder``, in the order of their paths; nothing is read yet."""

    def pixels_of(row: dict[str, Any]) -> dict[str, Any]:
        pixels = processor(images=Image.fromarray(row["image"]), return_tensors="np")["pixel_values"][0]
        return {"path": row["path"], "pixel_values": pixels}

    return ray.data.read_images(str(folder), mode="RGB", include_paths=True).map(pixels_of)


def embedded(images: Dataset, model: Model, *, device: str, actors: int, batch_size: int) -> Dataset:
    """Path, embedding and counts of every image; each actor has a GPU to itself, or they share the CPU."""
    rows: Dataset = images.map_batches(
        Embedder,
        fn_constructor_args=(model, device, batch_size),
        batch_size=batch_size,
        compute=ActorPoolStrategy(size=actors),
        # Where actors compute on the CPU, they leave Ray some of it for reading.
        **({"num_gpus": 1} if device == "cuda" else {"num_cpus": 0.5}),
    ).materialize()
    return rows


def last_of_each_actor(rows: Iterable[Row]) -> list[Row]:
    """The row with the last counts of each actor."""
    last: dict[str, Row] = {}
    for row in rows:
        if row["requests"] > last.get(row["actor"], {"requests": 0})["requests"]:
            last[row["actor"]] = row
    return list(last.values())


def actors_table(last: Sequence[Row]) -> Table:
    """One row an actor."""
    table = Table(title="Actors", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("actor", "images", "batches", "replays", "hits", "misses", "padding", "images/s"):
        table.add_column(column, justify="left" if column == "actor" else "right")
    for row in last:
        num_images = row["hits"] + row["misses"]
        counts = (num_images, row["requests"], row["replays"], row["hits"], row["misses"])
        shares = (f"{100 * row['padding_waste']:.1f} %", f"{num_images / row['seconds']:.0f}")
        table.add_row(row["actor"][:8], *map(str, counts), *shares)
    return table


@torch.no_grad()
def worst_difference(rows: Iterable[Row], model: Model) -> float:
    """The largest relative norm by which an embedding differs from that of the stock tower for its image alone."""
    tower, processor, worst = model.tower(), model.processor(), 0.0
    for row in rows:
        with Image.open(row["path"]) as image:
            pixels = processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"]
        expected = tower(pixel_values=pixels).pooler_output[0]
        worst = max(worst, float((torch.tensor(row["embedding"]) - expected).norm() / expected.norm()))
    return worst


def write_photographs(folder: Path) -> None:
    """Four photographs of scikit-image, each whole, and cut in two ways."""
    from skimage import data

    for photograph in (data.astronaut, data.chelsea, data.coffee, data.rocket):
        whole = photograph()  # type: ignore[no-untyped-call]
        height, width = whole.shape[:2]
        cuts = {"whole": whole, "wide": whole[height // 4 : height // 2], "tall": whole[:, width // 3 : width // 2]}
        for cut, pixels in cuts.items():
            Image.fromarray(pixels).save(folder / f"{photograph.__name__}_{cut}.png")


def run(folder: Path, given: argparse.Namespace, console: Console) -> bool:
    """Embed, show, write and check; whether all is well."""
    model, begun = Model(given.tower, given.model), time.perf_counter()
    num_gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    device, actors = "cuda" if num_gpus else "cpu", given.actors or num_gpus or 1
    images = prepared(folder, model.processor())
    rows = embedded(images, model, device=device, actors=actors, batch_size=given.batch_size)
    seconds, num_images = time.perf_counter() - begun, rows.count()
    last = last_of_each_actor(rows.iter_rows())
    shape = (num_images, len(last[0]["embedding"]) if last else 0)
    console.print(f"{num_images} images in {seconds:.1f} s, with the start of the actors; embeddings: {shape}\n")
    console.print(actors_table(last))
    is_fine = sum(row["hits"] + row["misses"] for row in last) == num_images and any(row["replays"] for row in last)
    if given.output is not None:
        rows.select_columns(["path", "embedding"]).write_parquet(str(given.output))
        console.print(f"\nwritten to {given.output}: path and embedding of each image")
    if given.check:
        worst = worst_difference(rows.iter_rows(), model)
        console.print(f"\nlargest difference from the stock tower, image by image: {worst:.1e} (relative norm)")
        is_fine = is_fine and worst < TOLERANCE[device]
    return is_fine


def main(argv: list[str] | None = None) -> int:
    """Run the example; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of images; left out: photographs of scikit-image")
    parser.add_argument("--output", type=Path, help="a new folder for the embeddings, as Parquet")
    parser.add_argument("--tower", default="CLIP", choices=["CLIP", "Siglip"])
    parser.add_argument("--model", help="a folder or a name on the hub with weights; left out: a small random tower")
    parser.add_argument("--actors", type=int, help="left out: one a GPU, or one on the CPU")
    parser.add_argument("--batch-size", type=int, default=32, help="images of the largest graph")
    parser.add_argument("--check", action="store_true", help="compare with the stock tower on the CPU")
    given = parser.parse_args(argv)
    if given.output is not None and given.output.exists():
        parser.error(f"{given.output} is there already")
    ray.init(include_dashboard=False, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.wait_for_min_actors_s = 600  # all actors have captured before the first batch is handed out
    with tempfile.TemporaryDirectory() as photographs:
        if given.folder is None:
            write_photographs(Path(photographs))
        is_fine = run(given.folder or Path(photographs), given, Console(width=118))
    if not is_fine:
        print("FAILED: an image was left out, nothing was replayed, or an embedding differs")
    return int(not is_fine)


if __name__ == "__main__":
    sys.exit(main())
