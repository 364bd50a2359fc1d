"""Adapters of Qwen's vision towers, which take images and clips of any size as patches and grids."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from graphpass.capture.settings import capture_settings
from graphpass.encoder.adapters.gridtables import BatchTables, Tables, interpolation, piece_keys, position_ids, windows
from graphpass.encoder.adapters.tower import Blocks, WholePatches, checked_count, eagerly, unserved_tower
from graphpass.encoder.attention import PACKED_ATTENTION, most_pieces, pieces_on
from graphpass.encoder.protocol import (
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    EncoderItems,
    EncoderItemSpec,
    EncoderOutput,
)
from graphpass.errors import ShapeError
from graphpass.report import KernelUse

Grid = tuple[int, int, int]
"""Number of temporal slices, and height and width in patches, of an item."""
Grids = npt.NDArray[np.int64]
_KINDS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


@dataclass(frozen=True, slots=True)
class GridItems:
    """The items of a request: images first, then clips."""

    #: (patches [patches, width], grids [items, 3]) of the images and of the clips. One of the two may be missing.
    parts: tuple[tuple[torch.Tensor, Grids], ...]

    @classmethod
    def of(cls, items: EncoderItems, merge: int, width: int) -> Self:
        """Read and check the mapping that a processor returned."""
        named = {name: value for name, value in items.items() if value is not None}
        if "grid_thw" in named and "image_grid_thw" not in named:
            named["image_grid_thw"] = named.pop("grid_thw")
        pairs = [(named.get(pixels), named.get(grids)) for pixels, grids in _KINDS]
        found = [(pixels, grids) for pixels, grids in pairs if pixels is not None and grids is not None]
        # guard: encoder_grids_of_all
        if not found or "grid_thw" in named or any((pixels is None) != (grids is None) for pixels, grids in pairs):
            raise _unfit(
                "pixel_values with image_grid_thw (or grid_thw), pixel_values_videos with video_grid_thw, or both",
                f"the keys {sorted(map(str, named))}",
            )
        parts = tuple((_checked_patches(pixels, width), _checked_grids(grids, merge)) for pixels, grids in found)
        for patches, of_part in parts:
            expected = int(of_part.prod(axis=1).sum())
            if len(patches) != expected:
                raise _unfit(
                    f"as many patches as the grids say, {expected}",
                    f"{len(patches)} patches, grids {of_part[:8].tolist()}",
                )
        return cls(parts)

    @property
    def grids(self) -> list[Grid]:
        """The grids of all items."""
        return [(frames, height, width) for frames, height, width in self._table().tolist()]

    def patches(self) -> torch.Tensor:
        """The patches of all items, [patches, width]."""
        return self.parts[0][0] if len(self.parts) == 1 else torch.cat([patches for patches, _ in self.parts])

    def selected(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The items at ``indices``, as a processor's mapping. The patches are a view if they are contiguous."""
        sizes = [grids.prod(axis=1) for _, grids in self.parts]
        ends = np.concatenate([size.cumsum() for size in sizes])
        starts = ends - np.concatenate(sizes)
        part_of = np.repeat(np.arange(len(self.parts)), [len(size) for size in sizes])
        chosen = np.array(indices, dtype=np.int64)
        part_of, starts, ends = part_of[chosen], starts[chosen], ends[chosen]
        breaks = np.flatnonzero((part_of[1:] != part_of[:-1]) | (starts[1:] != ends[:-1])) + 1
        runs = [run for run in np.split(np.arange(len(chosen)), breaks) if len(run)]
        rows = [self.parts[part_of[run[0]]][0][starts[run[0]] : ends[run[-1]]] for run in runs]
        patches = rows[0] if len(rows) == 1 else torch.cat(rows) if rows else self.parts[0][0][:0]
        return {"pixel_values": patches, "grid_thw": torch.from_numpy(self._table()[chosen])}

    def _table(self) -> Grids:
        return np.concatenate([grids for _, grids in self.parts])


def _checked_patches(patches: Any, width: int) -> torch.Tensor:
    if not isinstance(patches, torch.Tensor) or patches.shape[1:] != (width,):
        shape = tuple(patches.shape) if isinstance(patches, torch.Tensor) else type(patches).__name__
        raise _unfit(f"patches as a tensor of [patches, {width}]", f"{shape}")
    return patches


def _checked_grids(grids: Any, merge: int) -> Grids:
    table = _as_table(grids)
    if table is None or (table < 0).any() or (table[:, 1:] % merge).any():
        shown = grids.tolist() if hasattr(grids, "tolist") else grids
        raise _unfit(
            f"grids as integers [items, 3], none below 0, heights and widths in multiples of {merge}", f"{shown!r:.100}"
        )
    return table


def _as_table(grids: Any) -> Grids | None:
    """Grids from a tensor, an array or a list; None if they are not integers [items, 3]."""
    try:
        table = np.asarray(grids.cpu() if isinstance(grids, torch.Tensor) else grids)
    except ValueError:  # rows of different lengths
        return None
    if table.shape in ((0,), (0, 3)):  # without items, of whatever dtype
        return np.empty((0, 3), dtype=np.int64)
    if table.ndim != 2 or table.shape[1] != 3 or table.dtype.kind not in "iu":
        return None
    return table.astype(np.int64)


def _unfit(expected: str, found: str) -> ShapeError:
    return ShapeError(
        "images or clips do not fit their grids",
        expected=expected,
        found=found,
        remedy="pass the output of the model's processor with return_tensors='pt'",
    )


_BOUNDS = "_bounds"
"""After a kind of sequences: the name of the table with their bounds, without empty sequences."""
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

    #: Kinds of attention sequences. Each kind has three buffers, its :class:`~graphpass.encoder.attention.Pieces`.
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

    def _most_pieces(self, key: EncoderGraphKey) -> Mapping[str, int]:
        """{kind of sequences: the most pieces of a batch on ``key``}; here of frames alone."""
        return {"frame": most_pieces(self._frames(key), key.patches, key.patches)}

    @abstractmethod
    def _forward(self, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]: ...

    @property
    @abstractmethod
    def _output_widths(self) -> tuple[int, ...]: ...

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
        """One spec for each image and clip."""
        grids = [(math.prod(grid), grid[0]) for grid in self._read(items).grids]
        return [EncoderItemSpec(patches, patches // self._merge**2, frames) for patches, frames in grids]

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
                tables[kind + _BOUNDS] = tables[piece_keys(kind).key_starts].unique_consecutive()
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

    def compile_encoder(self, compiler: str, runtime: Any, **options: Any) -> None:
        """Compile one block for all layers and sizes."""
        weight = next(self.tower.parameters())
        config = self.tower.config
        num_patches = sum(_EXAMPLE_LENGTHS)
        hidden = torch.zeros(num_patches, config.hidden_size, device=weight.device, dtype=weight.dtype)
        head_dim = config.hidden_size // config.num_heads
        angles = torch.zeros(num_patches, head_dim, device=weight.device, dtype=torch.float32)
        kind = self.sequence_kinds[0]
        pieces = zip(piece_keys(kind), pieces_on(_EXAMPLE_LENGTHS, weight.device), strict=True)
        arguments = self._within(kind, dict(pieces), (angles, angles.clone()))
        self._blocks.compile(hidden, arguments, compiler=compiler, runtime=runtime, **options)

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
        """Arguments of a block that attends within sequences of ``kind``.

        Transformers passes unknown arguments of a block on to the attention function. An attention that is part of the
        tower reads ``cu_seqlens``. Without a table of bounds these are the ``key_starts``, which are also bounds of the
        sequences, with additional empty sequences.
        """
        pieces = {field: buffers[name] for field, name in piece_keys(kind)._asdict().items()}
        return {
            "cu_seqlens": buffers.get(kind + _BOUNDS, pieces["key_starts"]),  # guard: encoder_bounds_of_sequences
            "max_seqlen": len(position_embeddings[0]),
            "position_embeddings": position_embeddings,
            **pieces,
        }

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

    def _on_device(
        self, grids: Sequence[Grid], device: torch.device, key: EncoderGraphKey | None = None
    ) -> dict[str, torch.Tensor]:
        """The tables of a batch, padded to the rows of ``key``."""
        frames = [(height, width) for t, height, width in grids for _ in range(t) if height * width]
        return self._tables.on_device(frames, device, None if key is None else self._rows(key))


class Qwen25VLAdapter(GridAdapter):
    """The adapter for ``Qwen2_5_VisionTransformerPretrainedModel``.

    The result of an item is its merged tokens [tokens, width], in the order of the image.
    """

    patch_keys = ("position_ids",)
    token_keys = ("window_index", "reverse_index")
    sequence_kinds = ("frame", "window")

    def __init__(self, tower: Any, **options: Any) -> None:
        self._unit: int = tower.spatial_merge_size**2
        self._tokens_a_side: int = tower.window_size // tower.spatial_merge_size // tower.patch_size
        super().__init__(tower, **options)

    def _frame_tables(self, height: int, width: int) -> Tables:
        order, tokens = windows(height, width, self._merge, self._tokens_a_side)
        by_token = position_ids(height, width, self._merge).reshape(-1, self._unit, 2)
        return {
            "position_ids": by_token[order].reshape(-1, 2),
            "window_index": order,
            "reverse_index": np.argsort(order).astype(np.int32),
            "frame": np.array([height * width], dtype=np.int32),
            "window": tokens * np.int32(self._unit),
        }

    def _most_pieces(self, key: EncoderGraphKey) -> Mapping[str, int]:
        """A frame of n tokens has at most n / side + 1 windows: as many if it is one token high."""
        windows = key.tokens // self._tokens_a_side + self._frames(key)
        longest = self._unit * self._tokens_a_side**2
        return {**super()._most_pieces(key), "window": most_pieces(windows, key.patches, longest)}

    @property
    def _output_widths(self) -> tuple[int, ...]:
        return (self.tower.merger.mlp[-1].out_features,)

    def _forward(self, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tower = self.tower
        hidden = self._embed(buffers["pixel_values"])
        by_token = hidden.reshape(-1, self._unit, hidden.shape[-1])
        hidden = by_token.index_select(0, buffers["window_index"]).reshape(hidden.shape)
        rotation = tower.rotary_pos_emb(hidden, buffers["position_ids"])
        within_frames, within_windows = (self._within(kind, buffers, rotation) for kind in self.sequence_kinds)
        whole = set(tower.fullatt_block_indexes)
        self._blocks.follow()
        for layer in range(len(self._blocks)):
            hidden = self._blocks(layer, hidden, within_frames if layer in whole else within_windows)
        return (tower.merger(hidden).index_select(0, buffers["reverse_index"]),)


_TAPS = 4


class Qwen3VLAdapter(GridAdapter):
    """The adapter for ``Qwen3VLVisionModel``.

    The result of an item is a tuple: its merged tokens, then its deepstack features of each level, each
    [tokens, width].

    Raises:
        EncoderConfigError: the tower's interpolation of position embeddings is not bilinear.
    """

    patch_keys = ("position_ids", "interp_indices", "interp_weights")

    def __init__(self, tower: Any, **options: Any) -> None:
        if tower.interpolation_mode != "bilinear":
            raise unserved_tower(tower, "bilinear position embeddings", repr(tower.interpolation_mode))
        super().__init__(tower, **options)

    def _frame_tables(self, height: int, width: int) -> Tables:
        tower = self.tower
        indices, weights = interpolation(
            height, width, self._merge, tower.num_grid_per_side, align_corners=tower.interpolation_align_corners
        )
        return {
            "position_ids": position_ids(height, width, self._merge),
            "interp_indices": indices,
            "interp_weights": weights,
            "frame": np.array([height * width], dtype=np.int32),
        }

    @property
    def _output_widths(self) -> tuple[int, ...]:
        mergers = [self.tower.merger, *self._deepstack.values()]
        return tuple(merger.linear_fc2.out_features for merger in mergers)

    @property
    def _deepstack(self) -> Mapping[int, Any]:
        """{layer: the merger of its output}, in the order of layers."""
        indexes = list(self.tower.deepstack_visual_indexes)
        mergers = self.tower.deepstack_merger_list
        return {layer: mergers[indexes.index(layer)] for layer in range(len(self._blocks)) if layer in indexes}

    def _forward(self, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tower = self.tower
        hidden = self._embed(buffers["pixel_values"])
        hidden = hidden + self._position_embeddings(buffers).to(hidden.dtype)
        rotation = tower.rotary_pos_emb(hidden, buffers["position_ids"])
        arguments = self._within("frame", buffers, rotation)
        mergers, features = self._deepstack, []
        self._blocks.follow()
        for layer in range(len(self._blocks)):
            hidden = self._blocks(layer, hidden, arguments)
            if layer in mergers:
                features.append(mergers[layer](hidden))
        return (tower.merger(hidden), *features)

    def _position_embeddings(self, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Resample one tap at a time, because all taps together would be the largest tensor of the graph."""
        indices, weights = buffers["interp_indices"], buffers["interp_weights"]
        parts = (self.tower.pos_embed(indices[:, tap]) * weights[:, tap, None] for tap in range(_TAPS))
        total: torch.Tensor = sum(parts)
        return total
