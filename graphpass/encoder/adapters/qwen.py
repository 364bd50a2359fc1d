"""Common base of the adapters for Qwen2.5-VL and Qwen3-VL: images and clips as packed patches with grids."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpass.capture.torchsettings import capture_settings
from graphpass.encoder.adapters.blocks import Blocks, eagerly
from graphpass.encoder.adapters.checks import checked_count
from graphpass.encoder.adapters.items import Grid, GridItems
from graphpass.encoder.adapters.patches import WholePatches
from graphpass.encoder.adapters.tables import BatchTables, Tables, piece_keys
from graphpass.encoder.attention import PACKED_ATTENTION, pieces_on
from graphpass.encoder.pieces import Pieces, most_pieces
from graphpass.encoder.protocol import (
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    EncoderItems,
    EncoderItemSpec,
    EncoderOutput,
)
from graphpass.report import KernelUse

__all__ = ["Grid", "GridAdapter"]

_EXAMPLE_TOKENS_AN_IMAGE = 256
_EXAMPLE_LENGTHS = (409,) * 5
"""Sequence lengths of the example for compilation. Inductor selects kernels by its sizes, which are those of typical
batches."""


class GridAdapter(ABC):
    """An adapter for a tower that takes ``(pixel_values, grid_thw)``.

    Items are the output of the model's processor: ``pixel_values`` with ``image_grid_thw`` (or ``grid_thw``), and
    ``pixel_values_videos`` with ``video_grid_thw``. Images come first, then clips. Every temporal slice of a clip is a
    separate attention sequence. Keep grids on the CPU: they are read on the host.

    Args:
        tower: the stock tower, in eval mode and on its device. It is not changed; its weights are shared.
        min_tokens: the smallest budget, in output tokens.
        max_tokens: the largest budget.
        max_items: maximum number of images and clips in a batch.
        max_frames: maximum number of temporal slices in a batch. A higher limit makes the attention of every graph
            slightly slower.

    Raises:
        EncoderConfigError: an option has a wrong value.
    """

    #: Kinds of attention sequences. Each kind has three buffers, its :class:`~graphpass.encoder.pieces.Pieces`.
    sequence_kinds: tuple[str, ...] = ("frame",)
    #: Buffers with a row for each patch. They are padded with zero, which is a valid index.
    patch_keys: tuple[str, ...]
    #: Buffers with the index of a token for each token.
    token_keys: tuple[str, ...] = ()

    def __init__(
        self,
        tower: Any,
        *,
        min_tokens: int = 16,
        max_tokens: int = 4096,
        max_items: int = 32,
        max_frames: int = 32,
    ) -> None:
        min_tokens = checked_count("min_tokens", min_tokens)
        max_tokens = checked_count("max_tokens", max_tokens, at_least=min_tokens)
        max_items = checked_count("max_items", max_items)
        max_frames = checked_count("max_frames", max_frames, at_least=max_items)
        self.tower = tower
        self._merge: int = tower.spatial_merge_size
        self._range, self._max_items, self._max_frames = (min_tokens, max_tokens), max_items, max_frames
        config = tower.config
        self._patch_width: int = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self._blocks = Blocks(tower, "blocks", PACKED_ATTENTION)
        self._tables = BatchTables(
            self._frame_tables,
            patch_keys=self.patch_keys,
            token_keys=self.token_keys,
            sequence_kinds=self.sequence_kinds,
            smallest=(self._merge, self._merge),
        )
        self._rows = functools.cache(self._rows_of)

    # -- what each tower adds

    @abstractmethod
    def _frame_tables(self, height: int, width: int) -> Tables:
        """The tables of one temporal slice, and the lengths of its sequences under each of ``sequence_kinds``."""

    @abstractmethod
    def _most_pieces(self, key: EncoderGraphKey) -> Mapping[str, int]:
        """{kind of sequences: the most pieces of a batch on ``key``}."""

    @abstractmethod
    def _forward(self, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tower's forward over full buffers."""

    @property
    @abstractmethod
    def _output_widths(self) -> tuple[int, ...]:
        """Columns of each output."""

    # -- the protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Images and clips. The adapter pads the tables itself; the manager pads only the patches."""
        widths = self._output_widths
        return EncoderCudaGraphConfig(
            modalities=("image", "video"),
            buffer_keys=("pixel_values", *self._tables.names),
            output_width=widths[0] if len(widths) == 1 else widths,
            patches_per_token=self._merge**2,
            max_frames=self._max_frames,
            max_items=self._max_items,
        )

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        """``min_tokens`` and ``max_tokens``."""
        return self._range

    def get_encoder_cudagraph_item_specs(self, items: EncoderItems) -> list[EncoderItemSpec]:
        """One spec for each image and clip.

        Raises:
            ShapeError: grids and patches contradict each other, or a grid is not a multiple of the merged block.
        """
        return [self._spec(grid) for grid in self._read(items).grids]

    def select_encoder_cudagraph_items(self, items: EncoderItems, indices: Sequence[int]) -> EncoderItems:
        """The images and clips at ``indices``, as ``pixel_values`` and ``grid_thw``."""
        return self._read(items).selected(indices)

    def get_encoder_example_items(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype, num_items: int | None = None
    ) -> EncoderItems:
        """Black images that fill ``key``, nearly square; by default of a typical size."""
        grids = self._example_grids(key, num_items)
        num_patches = sum(math.prod(grid) for grid in grids)
        pixels = torch.zeros(num_patches, self._patch_width, device=device, dtype=dtype)
        return {"pixel_values": pixels, "grid_thw": torch.tensor(grids, device="cpu")}

    def prepare_encoder_cudagraph_capture_inputs(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        """The patches and padded tables of the example items."""
        pixels = torch.zeros(key.patches, self._patch_width, device=device, dtype=dtype)
        return {"pixel_values": pixels, **self._on_device(self._example_grids(key), device, key)}

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: EncoderItems, key: EncoderGraphKey
    ) -> Mapping[str, torch.Tensor | None]:
        """The patches, unchanged, and the tables of their grids, padded on the host and copied in one transfer."""
        found = self._read(items)
        return {"pixel_values": found.patches(), **self._on_device(found.grids, self._device, key)}

    def encoder_cudagraph_forward(self, buffers: Mapping[str, torch.Tensor], key: EncoderGraphKey) -> EncoderOutput:
        """Each output of the tower, [key.tokens, width]."""
        with capture_settings():
            return self._forward(buffers)

    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        """The forward without padding."""
        found = self._read(items)
        pixels = found.patches()
        if not len(pixels):
            weight = next(self.tower.parameters())
            return tuple(weight.new_empty(0, width) for width in self._output_widths)
        tables = self._on_device(found.grids, self._device)
        if not self._blocks.compute_rows_alone():
            # The tower's own attention may split the sequences on the host and refuse empty ones.
            for kind in self.sequence_kinds:
                tables[_bounds_key(kind)] = tables[piece_keys(kind).key_starts].unique_consecutive()
        with eagerly():
            return self._forward({"pixel_values": pixels.to(self._device), **tables})

    def postprocess_encoder_output(
        self, output: tuple[torch.Tensor, ...], specs: Sequence[EncoderItemSpec]
    ) -> list[EncoderOutput]:
        """The rows of each item; if there are several outputs, a tuple of its rows of each output."""
        lengths = [spec.output_tokens for spec in specs]
        by_output = [tensor.split(lengths) for tensor in output]
        return [rows[0] if len(rows) == 1 else rows for rows in zip(*by_output, strict=True)]

    def encoder_attention_kernel(self) -> KernelUse:
        """The kernel of the blocks' attention."""
        return self._blocks.kernel()

    def compile_encoder(self, compiler: str, runtime: Any) -> None:
        """Compile one block for all layers and sizes."""
        weight = next(self.tower.parameters())
        config = self.tower.config
        num_patches = sum(_EXAMPLE_LENGTHS)
        hidden = torch.zeros(num_patches, config.hidden_size, device=weight.device, dtype=weight.dtype)
        head_dim = config.hidden_size // config.num_heads
        angles = torch.zeros(num_patches, head_dim, device=weight.device, dtype=torch.float32)
        pieces = pieces_on(_EXAMPLE_LENGTHS, weight.device)
        self._blocks.compile(compiler, runtime, hidden, _block_arguments(pieces, (angles, angles.clone())))

    def _read(self, items: EncoderItems) -> GridItems:
        return GridItems.of(items, self._merge, self._patch_width)

    # -- shared with the towers

    def _embed(self, patches: torch.Tensor) -> torch.Tensor:
        with WholePatches():
            hidden: torch.Tensor = self.tower.patch_embed(patches)
        return hidden

    @staticmethod
    def _within(
        kind: str, buffers: Mapping[str, torch.Tensor], position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> dict[str, Any]:
        """Arguments of a block that attends within sequences of ``kind``."""
        pieces = Pieces(*(buffers[name] for name in piece_keys(kind)))
        return _block_arguments(pieces, position_embeddings, bounds=buffers.get(_bounds_key(kind)))

    @property
    def _device(self) -> torch.device:
        weight: torch.Tensor = next(self.tower.parameters())
        return weight.device

    def _rows_of(self, key: EncoderGraphKey) -> Mapping[str, int]:
        """{table: its rows for ``key``}."""
        rows = dict.fromkeys(self.patch_keys, key.patches) | dict.fromkeys(self.token_keys, key.tokens)
        for kind, most in self._most_pieces(key).items():
            rows |= zip(piece_keys(kind), (most + 1, most + 1, most), strict=True)
        return rows

    def _example_grids(self, key: EncoderGraphKey, num_items: int | None = None) -> list[Grid]:
        """At least one and at most ``key.items`` grids, with at most ``key.tokens`` tokens together.

        Sides are chosen between a square and 1 : 4, so that few tokens remain unused.
        """
        count = min(key.items, key.tokens, num_items or -(-key.tokens // _EXAMPLE_TOKENS_AN_IMAGE))
        each, more = divmod(key.tokens, count)
        return [self._example_grid(each + (place < more)) for place in range(count)]

    def _example_grid(self, tokens: int) -> Grid:
        square = math.isqrt(tokens)
        height = max(range(square, square // 2, -1), key=lambda height: tokens // height * height)
        return 1, height * self._merge, tokens // height * self._merge

    def _frames(self, key: EncoderGraphKey) -> int:
        """Maximum number of temporal slices of a batch; each has at least one token."""
        return min(key.frames or key.items, key.tokens)

    def _frame_pieces(self, key: EncoderGraphKey) -> int:
        return most_pieces(self._frames(key), key.patches, key.patches)

    def _spec(self, grid: Grid) -> EncoderItemSpec:
        patches = math.prod(grid)
        return EncoderItemSpec(patches, patches // self._merge**2, grid[0])

    def _on_device(
        self, grids: Sequence[Grid], device: torch.device, key: EncoderGraphKey | None = None
    ) -> dict[str, torch.Tensor]:
        """The tables of a batch, padded to the rows of ``key``."""
        frames = [(height, width) for t, height, width in grids for _ in range(t) if height * width]
        return self._tables.on_device(frames, device, None if key is None else self._rows(key))


def _bounds_key(kind: str) -> str:
    """The name of the table with the bounds of the sequences of ``kind``, without empty sequences."""
    return f"{kind}_bounds"


def _block_arguments(
    pieces: Pieces[torch.Tensor],
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *,
    bounds: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Arguments of a block; transformers passes unknown arguments on to the attention function.

    An attention that is part of the tower reads ``cu_seqlens``. Without ``bounds`` these are the ``key_starts``, which
    are also bounds of the sequences, with additional empty sequences.
    """
    return {
        "cu_seqlens": pieces.key_starts if bounds is None else bounds,
        "max_seqlen": len(position_embeddings[0]),
        "query_bounds": pieces.query_bounds,
        "key_starts": pieces.key_starts,
        "key_lengths": pieces.key_lengths,
        "position_embeddings": position_embeddings,
    }
