"""The adapter of stock towers: it calls a copy of the tower, with its weights, on packed patches or batched images.

Nothing here knows a tower. A call with small images shows what it takes and returns, and a graph is tried with others,
before the adapter exists.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from graphpass.capture.settings import capture_settings
from graphpass.capture.tape import TapeDevice
from graphpass.compat import trees
from graphpass.encoder.adapters.items import Grid, GridItems
from graphpass.encoder.adapters.tables import GRID_KEY, GridTables, noted_calls, unserved_tower
from graphpass.encoder.adapters.tower import TowerCopy, eagerly
from graphpass.encoder.attention import kernel_of
from graphpass.encoder.protocol import (
    Buffers,
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    EncoderItems,
    EncoderItemSpec,
    EncoderOutput,
    Outputs,
    SupportsEncoderCudaGraph,
)
from graphpass.errors import CaptureError, EncoderConfigError, GraphpassError, one_of, positive
from graphpass.report import KernelUse

LAST_HIDDEN_STATE, POOLER_OUTPUT, BOTH = "last_hidden_state", "pooler_output", "both"
_EXAMPLE_TOKENS_AN_IMAGE = 256
_EXAMPLE_PATCHES, _EXAMPLE_IMAGES = 16 * 26, 5
"""The example for compilation is a typical batch: Inductor selects kernels by its sizes."""
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
_TOLERANCE, _TOLERANCE_OF_HALF = 5e-3, 5e-2


class TowerAdapter(SupportsEncoderCudaGraph):
    """The adapter of a stock tower.

    Items are the output of the model's processor. A tower that takes ``(pixel_values, grid_thw)``, and tables that are
    made from the grids, takes images as ``pixel_values`` with ``image_grid_thw`` (or ``grid_thw``) and clips as
    ``pixel_values_videos`` with ``video_grid_thw``; images come first. Keep grids on the CPU. A tower of one size takes
    ``pixel_values`` [images, channels, height, width] alone. The result of its image is a tuple of the outputs, or the
    only one, without the batch dimension. Budgets count the rows of all outputs of an image, if these have one width,
    otherwise images.

    Args:
        tower: the stock tower, in eval mode and on its device. It is not changed; its weights are shared.
        output: the result of an item: a field of what the tower returns, or ``both``, all of them. None: ``both`` of a
            tower of one size, else ``pooler_output`` or ``last_hidden_state``, and the fields that are lists
            (deepstack).
        min_tokens: the smallest budget, in output tokens. None: 16, or one image of one size.
        max_tokens: the largest budget. None: 4096, or ``max_items`` images of one size.
        max_items: number of images and clips in the largest batch. None: 32, or 64 of one size.
        max_frames: number of temporal slices in the largest batch. A higher limit makes attention slightly slower.
            None: 32, or ``max_items`` if that is more.

    Raises:
        EncoderConfigError: an option has a wrong value, or the tower cannot be served; the error says why.
    """

    def __init__(
        self,
        tower: Any,
        *,
        output: str | None = None,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
        max_items: int | None = None,
        max_frames: int | None = None,
    ) -> None:
        self.tower, self._output, self._has_grids = tower, output, takes_grids(tower)
        self._own = TowerCopy(tower, is_packed=self._has_grids)
        of_config = getattr(getattr(tower, "config", None), "spatial_merge_size", 1)
        self._merge: int = getattr(tower, "spatial_merge_size", of_config)
        grids = [(1, 4 * self._merge, 6 * self._merge), (1, 2 * self._merge, 4 * self._merge)]
        if not self._has_grids:
            grids = [(1, 1, 1)] * 2
        pixels, stock, calls = self._called(grids)
        parts, self._structure = trees.flatten(self._read(stock))
        shapes, num_rows = [part.shape for part in parts], len(pixels)
        self._unit = max(num_rows // shape[0] for shape in shapes)  # rows of the input for a token
        if any(num_rows % shape[0] or self._unit % (num_rows // shape[0]) for shape in shapes):
            raise unserved_tower("outputs of rows for patches, tokens or images", f"outputs of shapes {shapes}", tower)
        self._row_shapes = [shape[1:] for shape in shapes]
        #: values of each part for a token, or for an image of the one size
        self._sizes = [shape.numel() * self._unit // num_rows for shape in shapes]
        self._widths, self._each = self._sizes, 1
        if not self._has_grids:  # all parts are one output, of rows of one width where they have one
            widths = {shape[-1] for shape in shapes}
            self._widths = [widths.pop() if len(widths) == 1 else sum(self._sizes)]
            self._each = sum(self._sizes) // self._widths[0]  # tokens of an image
        self._tables = GridTables(calls if self._has_grids else (), self._unit, self._merge)
        tokens = num_rows * self._each // self._unit + 3 * self._each
        key = EncoderGraphKey(tokens, tokens * self._unit, 3, 3)
        self._try(parts, {"pixel_values": pixels, GRID_KEY: grids}, key)

        def checked(name: str, value: int | None, usual: int, at_least: int = 1) -> int:
            what, remedy = f"option {name} of the adapter", "omit the option for its default"
            given = usual if value is None else value
            return positive(given, what, at_least=at_least, remedy=remedy, error=EncoderConfigError)

        self._max_items = checked("max_items", max_items, 32 if self._has_grids else 64)
        self._max_frames = checked("max_frames", max_frames, max(32, self._max_items), self._max_items)
        least = checked("min_tokens", min_tokens, 16 if self._has_grids else self._each)
        most = checked("max_tokens", max_tokens, 4096 if self._has_grids else self._each * self._max_items, least)
        self._range = least, most

    # -- what the tower takes and returns

    def _called(self, grids: Sequence[Grid]) -> tuple[torch.Tensor, Any, Any]:
        """Rows that the tower takes, what it returned, and how it made tables."""
        seeded, reasons = torch.Generator().manual_seed(0), []
        on_device, count = torch.tensor(grids).to(self._weight.device), sum(map(math.prod, grids))
        named = {GRID_KEY: on_device} if self._has_grids else {}
        for shape, is_batch in itertools.product(_row_shapes(self.tower, self._has_grids), (False, self._has_grids)):
            self.row_shape, self._is_batch = shape, is_batch
            pixels = torch.randn(count, *shape, generator=seeded, device="cpu").to(self._weight)
            try:
                with eagerly(), noted_calls(on_device) as calls:
                    return pixels, self.tower(self.as_taken(pixels), **named), calls
            except _FAILURES as error:
                reasons.append(f"{type(error).__name__}: {error}")
        what = "patches and grid_thw" if self._has_grids else f"images {self.row_shape}"
        raise unserved_tower(f"a forward of {what} alone", reasons[0], self.tower)

    def as_taken(self, pixels: torch.Tensor) -> torch.Tensor:
        """Rows as the tower's first argument."""
        return pixels.unsqueeze(0) if self._is_batch else pixels

    def _read(self, output: Any) -> Any:
        """The chosen fields of the tower's output."""
        if not hasattr(output, "keys"):
            raise unserved_tower("named outputs (config.return_dict)", type(output).__name__, self.tower)
        usual = (POOLER_OUTPUT if POOLER_OUTPUT in output else LAST_HIDDEN_STATE) if self._has_grids else BOTH
        chosen = self._output or usual
        problem = f"option output of the adapter for {type(self.tower).__name__} has a wrong value"
        one_of(chosen, (*output, BOTH), problem, remedy=f"omit the option for {usual!r}", error=EncoderConfigError)
        if chosen == BOTH:
            return output
        has_lists = self._output is None
        return {n: v for n, v in output.items() if n == chosen or (has_lists and not isinstance(v, torch.Tensor))}

    def _by_token(self, parts: Sequence[torch.Tensor]) -> Outputs:
        rows = [part.reshape(-1, size) for part, size in zip(parts, self._sizes, strict=True)]
        return tuple(rows) if self._has_grids else (torch.cat(rows, dim=1).reshape(-1, self._widths[0]),)

    def _as_returned(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of the tower's output."""
        if not self._has_grids:
            outputs = outputs[0].reshape(-1, sum(self._sizes)).split(self._sizes, dim=1)
        return [rows.reshape(-1, *shape) for rows, shape in zip(outputs, self._row_shapes, strict=True)]

    def as_output(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The tower's output for all items, with ``output="both"``."""
        return trees.unflatten(self._as_returned(outputs), self._structure)

    def _forward(self, pixels: torch.Tensor, tables: Buffers) -> Outputs:
        output = self._own(self.as_taken(pixels), **self._tables.arguments(tables, len(pixels)))
        return self._by_token(trees.tensors(self._read(output)))

    def _try(self, stock: Sequence[torch.Tensor], items: EncoderItems, key: EncoderGraphKey) -> None:
        """Compare a recorded forward over ``items`` with the tower's output."""
        dtype = self._weight.dtype
        recorder = TapeDevice()
        try:
            with eagerly():
                buffers = self.prepare_encoder_cudagraph_capture_inputs(key, self._weight.device, dtype)
                graph, outputs = recorder.record(lambda: self._forward(buffers["pixel_values"], buffers), [])
                for name, value in self.prepare_encoder_cudagraph_replay_buffers(items, key).items():
                    buffers[name][: len(value)] = value
                graph.replay()
                graph.reset()
        except GraphpassError as error:
            if isinstance(error, CaptureError) and self._own.has_foreign_parts():
                return  # they run eagerly
            raise unserved_tower(error.expected, f"{error.problem}: {error.found}", self.tower) from error
        except _FAILURES as error:
            raise unserved_tower("a forward from tables", str(error), self.tower) from error
        for found, by_stock in zip(outputs, self._by_token(stock), strict=True):
            expected = by_stock.double()
            differs_by = float((found[: len(expected)].double() - expected).norm() / expected.norm())
            most = math.inf if self.tower.training else _TOLERANCE_OF_HALF if dtype.itemsize < 4 else _TOLERANCE
            if differs_by > most:  # guard: encoder_trial
                raise unserved_tower("its own results", f"results that differ by {differs_by:.1e}", self.tower)

    # -- the protocol

    @override
    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=("image", "video") if self._has_grids else ("image",),
            buffer_keys=("pixel_values", *self._tables.names),
            output_width=self._widths[0] if len(self._widths) == 1 else tuple(self._widths),
            patches_per_token=self._unit,
            token_multiple=self._each,
            max_frames=self._max_frames if self._has_grids else None,
            max_items=self._max_items,
        )

    @override
    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        return self._range

    @override
    def get_encoder_cudagraph_item_specs(self, items: EncoderItems) -> list[EncoderItemSpec]:
        sizes = [(math.prod(grid) * self._each, grid[0]) for grid in self._items(items).grids]
        return [EncoderItemSpec(size, size // self._unit, frames) for size, frames in sizes]

    @override
    def select_encoder_cudagraph_items(self, items: EncoderItems, indices: Sequence[int]) -> EncoderItems:
        return self._items(items).selected(indices)

    def get_encoder_example_items(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype, num_items: int | None = None
    ) -> EncoderItems:
        """Black images that fill ``key``."""
        grids = list(self._example_grids(key, num_items))
        pixels = torch.zeros(sum(map(math.prod, grids)), *self.row_shape, device=device, dtype=dtype)
        return {"pixel_values": pixels, GRID_KEY: torch.tensor(grids, device="cpu")}

    @override
    def prepare_encoder_cudagraph_capture_inputs(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype
    ) -> Buffers:
        what, remedy = "a budget in tokens, of which one image has more,", f"choose multiples of {self._each}"
        positive(key.tokens, what, at_least=self._each, remedy=remedy, error=EncoderConfigError)
        pixels = torch.zeros(key.patches // self._each, *self.row_shape, device=device, dtype=dtype)
        return {"pixel_values": pixels, **self._tables.on_device(list(self._example_grids(key)), device, key)}

    @override
    def prepare_encoder_cudagraph_replay_buffers(
        self, items: EncoderItems, key: EncoderGraphKey
    ) -> dict[str, torch.Tensor]:
        found = self._items(items)
        return {"pixel_values": found.rows(), **self._tables.on_device(found.grids, self._weight.device, key)}

    @override
    def encoder_cudagraph_forward(self, buffers: Buffers, key: EncoderGraphKey) -> EncoderOutput:
        with capture_settings():
            outputs = self._forward(buffers["pixel_values"], buffers)
        missing = key.tokens - len(outputs[0])  # of a budget between two numbers of images
        return tuple(F.pad(rows, (0, 0, 0, missing)) for rows in outputs) if missing else outputs

    @override
    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        found, device = self._items(items), self._weight.device
        with eagerly():
            return self._forward(found.rows().to(device), self._tables.on_device(found.grids, device))

    @override
    def postprocess_encoder_output(self, output: Outputs, specs: Sequence[EncoderItemSpec]) -> list[EncoderOutput]:
        by_part: list[Sequence[torch.Tensor]] = []
        for part, size, shape in zip(self._as_returned(output), self._sizes, self._row_shapes, strict=True):
            each = size // shape.numel()
            of_items = part.split([spec.output_tokens * each for spec in specs]) if self._has_grids else part.unbind()
            by_part.append(of_items)
        return [parts[0] if len(parts) == 1 else parts for parts in zip(*by_part, strict=True)]

    def encoder_attention_kernel(self) -> KernelUse:
        """The kernel of the blocks' attention."""
        if self._has_grids:
            return kernel_of(self._own.module)
        return KernelUse("the tower's own", "all items", "images of one size are a batch")

    def compile_encoder(self, compiler: str, runtime: Any, **options: Any) -> None:
        """Compile one block for all layers and sizes."""
        tokens = _EXAMPLE_IMAGES * (_EXAMPLE_PATCHES // self._unit if self._has_grids else self._each)
        key = EncoderGraphKey(tokens, tokens * self._unit, _EXAMPLE_IMAGES)
        example = self.get_encoder_example_items(key, self._weight.device, self._weight.dtype, _EXAMPLE_IMAGES)
        run = functools.partial(self.encoder_eager_forward, example)
        self._own.compile(run, compiler=compiler, runtime=runtime, **options)

    # --

    @property
    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = next(self.tower.parameters())
        return weight

    def _items(self, items: EncoderItems) -> GridItems:
        return GridItems.of(items, self.row_shape, self._merge if self._has_grids else None)

    def _example_grids(self, key: EncoderGraphKey, num_items: int | None = None) -> Iterator[Grid]:
        """Grids of typical items, or so many, that fill ``key``, between square and 1 : 4."""
        if not self._has_grids:
            yield from [(1, 1, 1)] * min(key.items, key.tokens // self._each)
            return
        cells = key.tokens * self._unit // self._merge**2
        count = min(key.items, cells, num_items or -(-key.tokens // _EXAMPLE_TOKENS_AN_IMAGE))
        each, more = divmod(cells, count)
        for place in range(count):
            tokens = each + (place < more)
            square = math.isqrt(tokens)
            height = max(range(square, square // 2, -1), key=lambda height: tokens // height * height)
            yield 1, height * self._merge, tokens // height * self._merge


def _row_shapes(tower: Any, has_grids: bool) -> list[tuple[int, ...]]:
    """The shape of an image, or those that a patch may have by the weights that embed it."""
    if not has_grids:
        side = tower.config.image_size
        return [(getattr(tower.config, "num_channels", 3), *((side, side) if isinstance(side, int) else side))]
    kinds: tuple[Any, ...] = ((nn.Conv2d, nn.Conv3d), nn.Linear)
    firsts = (next((module for module in tower.modules() if isinstance(module, kind)), None) for kind in kinds)
    shapes = [tuple(module.weight.shape[1:]) for module in firsts if module is not None]
    return list(dict.fromkeys(of for shape in shapes for of in ((math.prod(shape),), shape)))


def takes_grids(tower: nn.Module) -> bool:
    """Whether a tower takes images of any size."""
    return GRID_KEY in inspect.signature(tower.forward).parameters
