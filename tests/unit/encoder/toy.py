"""A small tower over packed patches, as the encoder protocol has it: attention within each item, two patches a token.

It keeps no model library: what the tests of the manager need of a tower, each in a few lines. Variants return a second
output, count frames, have a path of their own for clips, or an axis.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from graphpass import EncoderCudaGraphManager, EncoderOptions
from graphpass.encoder import EncoderCudaGraphConfig, EncoderItemSpec
from graphpass.encoder.protocol import EncoderAxis, EncoderGraphKey, EncoderItems, EncoderOutput

PATCH, WIDTH, MERGE = 6, 8, 2
BUDGETS = (4, 8, 16, 32)
MIXED = (4, 8, 2, 40, 64, 70, 2, 0, 12)
"""Patches, two a token: of which 70 is above the largest budget."""
NUM_WITH_TOKENS = sum(size > 0 for size in MIXED)
KEYS = ("patches", "positions", "lengths", "scale")


class Block(nn.Module):
    """Attention among the patches of one item, and an MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 1, 2, WIDTH // 2)).permute(1, 2, 3, 0, 4)
        # Padding rows are of no item: NaN in their values must not be multiplied by a weight of zero.
        v = v.masked_fill((item < 0)[None, None, :, None], 0)
        k = k.masked_fill((item < 0)[None, None, :, None], 0)
        allowed = (item[:, None] == item[None, :]) | (item < 0)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed[None, None])
        x = x + self.drop(self.out(mixed.permute(2, 0, 1, 3).flatten(1)))
        return x + nn.functional.gelu(x)


class ToyTower(nn.Module):
    """Patches [n, PATCH], of items whose numbers of patches are multiples of MERGE; a token for each MERGE of them."""

    def __init__(self, *, levels: int = 1, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(PATCH, WIDTH)
        self.position = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.merger = nn.Linear(MERGE * WIDTH, WIDTH)
        self.levels = levels

    def forward(
        self, patches: torch.Tensor, positions: torch.Tensor, item: torch.Tensor, scale: torch.Tensor
    ) -> EncoderOutput:
        x = self.embed(patches) * scale + self.position(positions)
        found = []
        for block in self.blocks:
            x = block(x, item)
            found.append(self.merger(x.reshape(-1, MERGE * WIDTH)))
        return found[-1] if self.levels == 1 else tuple(found[-self.levels :])


def item_of_patch(lengths: torch.Tensor, count: int) -> torch.Tensor:
    """Which item each of ``count`` patches belongs to, by cumulative ``lengths``; -1 behind the last."""
    at = torch.arange(count, device=lengths.device)
    item = torch.searchsorted(lengths, at, right=True)
    return torch.where(at < lengths[-1], item, -1)


class ToyEncoder:
    """The encoder protocol over :class:`ToyTower`. Items: {"patches": [n, PATCH], "sizes": patches of each item}.

    Args:
        tower: the model.
        budget_range: as the protocol asks for it.
        config: what differs from the plain configuration.
    """

    def __init__(
        self, tower: ToyTower | None = None, *, budget_range: tuple[int, int] = (1, 32), **config: Any
    ) -> None:
        self.tower = (tower or ToyTower()).eval()
        self.budget_range = budget_range
        widths: Any = WIDTH if self.tower.levels == 1 else (WIDTH,) * self.tower.levels
        given = {"padding": {"lengths": "repeat", "patches": 0.0, "scale": None}, "patches_per_token": MERGE, **config}
        self.config = EncoderCudaGraphConfig(("image",), KEYS, widths, **given)
        self.eager_calls: list[int] = []
        self.prepared: list[EncoderGraphKey] = []
        self.forwards: list[EncoderGraphKey] = []

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return self.config

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        return self.budget_range

    def get_encoder_cudagraph_item_specs(self, items: EncoderItems) -> list[EncoderItemSpec]:
        count = len(items["sizes"])
        frames = items.get("frames", [1] * count)
        paths = items.get("paths", [self.config.paths[0]] * count)
        axes = items.get("axes", [()] * count)
        return [
            EncoderItemSpec(size, size // MERGE, frames[i], paths[i], tuple(axes[i]))
            for i, size in enumerate(items["sizes"])
        ]

    def select_encoder_cudagraph_items(self, items: EncoderItems, indices: Sequence[int]) -> EncoderItems:
        parts = items["patches"].split(list(items["sizes"]))
        lists = {name: [values[i] for i in indices] for name, values in items.items() if name != "patches"}
        empty = items["patches"][:0]
        return {**lists, "patches": torch.cat([parts[i] for i in indices]) if len(indices) else empty}

    def prepare_encoder_cudagraph_capture_inputs(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        return {
            "patches": torch.randn(key.patches, PATCH, device=device, dtype=dtype),
            "positions": torch.arange(key.patches, device=device) % 64,
            "lengths": torch.full((key.items,), key.patches, device=device),
            "scale": torch.ones((), device=device, dtype=dtype),
        }

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: EncoderItems, key: EncoderGraphKey
    ) -> Mapping[str, torch.Tensor | None]:
        self.prepared.append(key)
        return {**self.inputs(items), "scale": None}

    def inputs(self, items: EncoderItems) -> dict[str, torch.Tensor]:
        sizes = torch.tensor(list(items["sizes"]), dtype=torch.int64)
        positions = [torch.arange(int(size)) % 64 for size in sizes]
        return {
            "patches": items["patches"],
            "positions": torch.cat(positions) if positions else sizes,
            "lengths": sizes.cumsum(0),
        }

    def encoder_cudagraph_forward(self, buffers: Mapping[str, torch.Tensor], key: EncoderGraphKey) -> EncoderOutput:
        self.forwards.append(key)
        item = item_of_patch(buffers["lengths"], key.patches)
        patches = buffers["patches"]
        if self.config.axes:
            patches = patches * dict(key.axes).get("gain", 1)
        return self.tower(patches, buffers["positions"], item, buffers["scale"])

    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        self.eager_calls.append(len(items["sizes"]))
        inputs = {name: value.to(items["patches"].device) for name, value in self.inputs(items).items()}
        patches = inputs["patches"]
        if any(name == "gain" for axes in items.get("axes", []) for name, _ in axes):
            gains = [dict(axes)["gain"] for axes in items["axes"]]
            patches = patches * torch.tensor(gains).repeat_interleave(torch.tensor(items["sizes"]))[:, None]
        lengths = inputs["lengths"] if len(inputs["lengths"]) else torch.zeros(1, dtype=torch.int64)
        item = item_of_patch(lengths.to(patches.device), len(patches))
        return self.tower(
            patches, inputs["positions"], item, torch.ones((), dtype=patches.dtype, device=patches.device)
        )

    def postprocess_encoder_output(
        self, output: tuple[torch.Tensor, ...], specs: Sequence[EncoderItemSpec]
    ) -> Sequence[EncoderOutput]:
        cut = [part.split([spec.output_tokens for spec in specs]) for part in output]
        return cut[0] if self.tower.levels == 1 else list(zip(*cut, strict=True))


class WithExamples(ToyEncoder):
    """Its eager call can be timed."""

    def get_encoder_example_items(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype, num_items: int | None = None
    ) -> EncoderItems:
        each, more = divmod(key.tokens, min(num_items or 1, key.items))
        sizes = [MERGE * (each + (place < more)) for place in range(min(num_items or 1, key.items))]
        return {"patches": torch.zeros(key.patches, PATCH, device=device, dtype=dtype), "sizes": sizes}


def images(sizes: Sequence[int], *, seed: int = 1, **lists: Any) -> dict[str, Any]:
    """Items of ``sizes`` patches, each different."""
    generator = torch.Generator().manual_seed(seed)
    return {"patches": torch.randn(sum(sizes), PATCH, generator=generator), "sizes": list(sizes), **lists}


def one_by_one(encoder: ToyEncoder, items: EncoderItems) -> list[EncoderOutput]:
    """What the tower says of each item alone."""
    with torch.no_grad():
        found = []
        for index in range(len(items["sizes"])):
            alone = encoder.select_encoder_cudagraph_items(items, [index])
            specs = encoder.get_encoder_cudagraph_item_specs(alone)
            result = encoder.encoder_eager_forward(alone)
            outputs = (result,) if isinstance(result, torch.Tensor) else result
            found += encoder.postprocess_encoder_output(outputs, specs)
        encoder.eager_calls.clear()
        return found


GAINS = EncoderAxis("gain", (1, 2))
LONGEST = EncoderAxis("longest", (8, 64), rounds_up=True)


class Compiled(ToyEncoder):
    """Its block can be compiled: once, for all layers and sizes."""

    compiled_with: str | None = None

    def compile_encoder(self, compiler: str, runtime: Any, **options: Any) -> None:
        self.compiled_with = compiler
        options |= {"compiler": compiler, "runtime": runtime, "mode": "FULL"}
        for block in self.tower.blocks:
            block.compile(backend="cgpass", dynamic=True, options=options)


Encoder = TypeVar("Encoder", bound=ToyEncoder)


def changed(encoder: Encoder, method: str, change: Callable[..., Any]) -> Encoder:
    """The encoder; a call of ``method`` is ``change(method, *arguments)``."""
    setattr(encoder, method, functools.partial(change, getattr(encoder, method)))
    return encoder


def made(encoder: ToyEncoder, *, capture: bool = True, device: str = "cpu", **options: Any) -> EncoderCudaGraphManager:
    encoder.tower.to(device)
    given = {"token_budgets": BUDGETS, "costs": None, **options}
    manager = EncoderCudaGraphManager(encoder, options=EncoderOptions(**given), device=device, dtype=torch.float32)
    if capture:
        manager.capture()
    return manager


def poison(manager: EncoderCudaGraphManager) -> None:
    """What no batch writes is NaN, or an integer that is valid and wrong."""
    for name, memory in manager.buffers.items():
        if name != "scale":  # kept on purpose
            memory.fill_(torch.nan if memory.is_floating_point() else 1)


def assert_same(found: Sequence[EncoderOutput], expected: Sequence[EncoderOutput], tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def assert_right(
    manager: EncoderCudaGraphManager, encoder: ToyEncoder, sizes: Sequence[int] = MIXED, **lists: Any
) -> None:
    """Items of these sizes have the results that the tower has for each alone."""
    items = images(sizes, **lists)
    assert_same(manager.execute(items), one_by_one(encoder, items))


def least_of_cuts(ordered: Sequence[int], cost_of: Callable[[Sequence[int]], float]) -> float:
    """The least cost of consecutive batches of all items, with each cut tried; 0 without items."""
    cuts = (cut for count in range(len(ordered)) for cut in itertools.combinations(range(1, len(ordered)), count))
    bounds = (itertools.pairwise((0, *cut, len(ordered))) for cut in cuts)
    return min((sum(cost_of(ordered[a:b]) for a, b in of_cut) for of_cut in bounds), default=0.0)
