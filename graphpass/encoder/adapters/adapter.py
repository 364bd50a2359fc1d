"""The adapter of stock towers: it calls a copy of the tower, with its weights, on packed or batched images.

Nothing here knows a tower. What it takes and returns is found by calling it once with small images, and that a graph of
it is right for any contents is tried with others, before the adapter exists.
"""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphpass.capture.settings import capture_settings
from graphpass.capture.tape import TapeDevice
from graphpass.encoder.adapters.items import Grid, GridItems
from graphpass.encoder.adapters.tables import GRID_KEY, GridTables, noted_calls
from graphpass.encoder.adapters.tower import TowerCopy, checked_count, eagerly, refuse_changed, unserved_tower
from graphpass.encoder.protocol import (
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    EncoderItems,
    EncoderItemSpec,
    EncoderOutput,
    SupportsEncoderCudaGraph,
)
from graphpass.errors import CaptureError, EncoderConfigError, GraphpassError, ShapeError, one_of
from graphpass.report import KernelUse

LAST_HIDDEN_STATE, POOLER_OUTPUT, BOTH = "last_hidden_state", "pooler_output", "both"
_EXAMPLE_TOKENS_AN_IMAGE = 256
_EXAMPLE_GRID, _EXAMPLE_IMAGES = (1, 16, 26), 5
"""The example for compilation. Inductor selects kernels by its sizes, which are those of typical batches."""
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
"""What a tower raises that does not take what it is given."""
_TOLERANCE = {torch.float32: 5e-3, torch.float64: 5e-3}
_TOLERANCE_OF_HALF = 5e-2


class TowerAdapter(SupportsEncoderCudaGraph, ABC):
    """What adapters of stock towers have in common.

    Args:
        tower: the stock tower, in eval mode and on its device. It is not changed; its weights are shared.
        output: the result of an item: a field of what the tower returns, or ``both``, all of them. None: see the class.
        max_items: number of images and clips in the largest batch.

    Raises:
        EncoderConfigError: an option has a wrong value, or the tower cannot be served; the error says why.
    """

    _is_packed: bool

    def __init__(self, tower: Any, *, output: str | None, max_items: int) -> None:
        refuse_changed(tower)  # guard: encoder_tower_changed
        self.tower, self._output = tower, output
        self._max_items = checked_count("max_items", max_items)
        self._own = TowerCopy(tower, is_packed=self._is_packed)

    # -- what the tower returns

    def _read(self, output: Any) -> dict[str, tuple[torch.Tensor, ...]]:
        """{field of the output that is asked for: its tensors}."""
        if not hasattr(output, "keys"):
            raise unserved_tower(self.tower, "named outputs (config.return_dict)", type(output).__name__)
        fields = {n: (value,) if isinstance(value, torch.Tensor) else tuple(value) for n, value in output.items()}
        chosen = self._output or self._default_of(fields)
        problem = f"option output of the adapter for {type(self.tower).__name__} has a wrong value"
        names, remedy = (*fields, BOTH), f"omit the option for {self._default_of(fields)!r}"
        one_of(chosen, names, problem, remedy=remedy, error=EncoderConfigError)
        self._kind, self._single = type(output), {name for name in fields if isinstance(output[name], torch.Tensor)}
        return fields if chosen == BOTH else self._only(fields, chosen)

    def as_output(self, results: Sequence[EncoderOutput]) -> Any:
        """What the tower returns for all items together, of the results of each with ``output="both"``."""
        parts = zip(*((result,) if isinstance(result, torch.Tensor) else result for result in results), strict=True)
        tensors = map(self._joined, parts)
        named = {name: [next(tensors) for _ in range(count)] for name, count in self._counts.items()}
        return self._kind(**{name: value[0] if name in self._single else value for name, value in named.items()})

    @abstractmethod
    def _default_of(self, fields: Mapping[str, Any]) -> str: ...

    @abstractmethod
    def _only(self, fields: dict[str, Any], chosen: str) -> dict[str, Any]: ...

    @staticmethod
    @abstractmethod
    def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor: ...

    @abstractmethod
    def _forward(self, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The chosen outputs by token, for full buffers."""

    # -- the trial

    def _try(self, stock: Mapping[str, Sequence[torch.Tensor]], items: EncoderItems, key: EncoderGraphKey) -> None:
        """Record the forward over an example, run it over ``items``, and compare with what the tower returned."""
        self._counts = {name: len(parts) for name, parts in stock.items()}
        device, dtype = self._device, next(self.tower.parameters()).dtype
        buffers = self.prepare_encoder_cudagraph_capture_inputs(key, device, dtype)
        recorder = TapeDevice()
        try:
            with eagerly():
                graph, outputs = recorder.record(lambda: self._forward(buffers), [])
                values = self.prepare_encoder_cudagraph_replay_buffers(items, key)
                for name, value in values.items():
                    assert value is not None
                    buffers[name][: len(value)] = value
                graph.replay()
                graph.reset()
        except GraphpassError as error:
            if isinstance(error, CaptureError) and self._own.has_foreign_parts():
                return  # they run eagerly
            raise unserved_tower(self.tower, error.expected, f"{error.problem}: {error.found}") from error
        except _FAILURES as error:
            raise unserved_tower(self.tower, "a forward from tables", str(error)) from error
        for found, by_stock in zip(outputs, self._by_token(stock), strict=True):
            expected = by_stock.double()
            differs_by = float((found[: len(expected)].double() - expected).norm() / expected.norm())
            most = math.inf if self.tower.training else _TOLERANCE.get(dtype, _TOLERANCE_OF_HALF)
            if differs_by > most:  # guard: encoder_trial
                raise unserved_tower(self.tower, "its own results", f"results that differ by {differs_by:.1e}")

    @abstractmethod
    def _by_token(self, fields: Mapping[str, Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        """The chosen outputs, [tokens, width] each."""

    # -- the protocol

    def encoder_cudagraph_forward(self, buffers: Mapping[str, torch.Tensor], key: EncoderGraphKey) -> EncoderOutput:
        """Each chosen output of the tower, [key.tokens, width]."""
        with capture_settings():
            outputs = self._forward(buffers)
        missing = [key.tokens - len(rows) for rows in outputs]
        return tuple(
            torch.cat([rows, rows.new_zeros(more, rows.shape[1])]) if more else rows
            for rows, more in zip(outputs, missing, strict=True)
        )

    def encoder_attention_kernel(self) -> KernelUse:
        """The kernel of the blocks' attention."""
        return self._own.kernel()

    @property
    def _device(self) -> torch.device:
        weight: torch.Tensor = next(self.tower.parameters())
        return weight.device


class GridAdapter(TowerAdapter):
    """The adapter for a tower that takes ``(pixel_values, grid_thw)``, and tables that are made from the grids.

    Items are the output of the model's processor: ``pixel_values`` with ``image_grid_thw`` (or ``grid_thw``), and
    ``pixel_values_videos`` with ``video_grid_thw``. Images come first, then clips. Keep grids on the CPU: they are read
    on the host.

    Args:
        tower: see :class:`TowerAdapter`.
        min_tokens: the smallest budget, in output tokens.
        max_tokens: the largest budget.
        max_items: maximum number of images and clips in a batch.
        max_frames: maximum number of temporal slices in a batch. A higher limit makes the attention of every graph
            slightly slower.
        output: None: ``pooler_output``, or ``last_hidden_state`` of a tower without it, and the fields that are lists
            (deepstack). ``both``: all fields.
    """

    _is_packed = True

    def __init__(
        self,
        tower: Any,
        *,
        min_tokens: int = 16,
        max_tokens: int = 4096,
        max_items: int = 32,
        max_frames: int = 32,
        output: str | None = None,
    ) -> None:
        min_tokens = checked_count("min_tokens", min_tokens)
        max_tokens = checked_count("max_tokens", max_tokens, at_least=min_tokens)
        max_items = checked_count("max_items", max_items)
        max_frames = checked_count("max_frames", max_frames, at_least=max_items)
        super().__init__(tower, output=output, max_items=max_items)
        self._range, self._max_frames = (min_tokens, max_tokens), max_frames
        of_config = getattr(tower.config, "spatial_merge_size", 1)
        self._merge: int = getattr(tower, "spatial_merge_size", of_config)
        grids = torch.tensor([(1, 4, 6), (1, 2, 4)], device="cpu") * torch.tensor([1, self._merge, self._merge])
        num_patches = int(grids.prod(1).sum())
        pixels, stock, calls = self._called(num_patches, grids)
        fields = self._read(stock)
        shapes = [part.shape for parts in fields.values() for part in parts]
        self._unit = max(num_patches // shape[0] for shape in shapes)
        if any(num_patches % shape[0] or self._unit % (num_patches // shape[0]) for shape in shapes):
            raise unserved_tower(tower, "outputs of rows for patches or tokens", f"outputs of shapes {shapes}")
        self._row_widths = [shape[1:].numel() for shape in shapes]
        self._widths = [shape.numel() * self._unit // num_patches for shape in shapes]
        self._tables = GridTables(calls, self._unit, self._merge)
        tokens = num_patches // self._unit + 3
        key = EncoderGraphKey(tokens, tokens * self._unit, 3, 3)
        self._try(fields, {"pixel_values": pixels, GRID_KEY: grids}, key)

    def _called(self, num_patches: int, grids: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        """Patches of the first shape that the tower takes, what it returned for them, and how it made its tables."""
        seeded, weight = torch.Generator().manual_seed(0), next(self.tower.parameters())
        reasons = []
        for shape in _patch_shapes(self.tower):
            for self._is_batch in (False, True):
                self.patch_shape = shape
                pixels = torch.randn(num_patches, *shape, generator=seeded, device="cpu").to(weight)
                on_device = grids.to(weight.device)
                try:
                    with eagerly(), noted_calls(on_device) as calls:
                        stock = self.tower(self.as_taken(pixels), grid_thw=on_device)
                    return pixels, stock, list(calls)
                except _FAILURES as error:
                    reasons.append(f"{type(error).__name__}: {error}")
        raise unserved_tower(self.tower, "a forward of patches and grid_thw alone", reasons[0] if reasons else "none")

    def as_taken(self, pixels: torch.Tensor) -> torch.Tensor:
        """Patches as the tower's first argument."""
        return pixels.unsqueeze(0) if self._is_batch else pixels

    def _default_of(self, fields: Mapping[str, Any]) -> str:
        return POOLER_OUTPUT if POOLER_OUTPUT in fields else LAST_HIDDEN_STATE

    def _only(self, fields: dict[str, Any], chosen: str) -> dict[str, Any]:
        lists = set() if self._output else fields.keys() - self._single
        return {name: parts for name, parts in fields.items() if name == chosen or name in lists}

    @staticmethod
    def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def _by_token(self, fields: Mapping[str, Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        outputs = (part for parts in fields.values() for part in parts)
        return tuple(part.reshape(-1, width) for part, width in zip(outputs, self._widths, strict=True))

    def _forward(self, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        pixels = self.as_taken(buffers["pixel_values"])
        named = self._tables.arguments(buffers, len(buffers["pixel_values"]))
        return self._by_token(self._read(self._own(pixels, pieces=self._tables.pieces(buffers), **named)))

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Images and clips. The adapter pads the tables itself; the manager pads only the patches."""
        return EncoderCudaGraphConfig(
            modalities=("image", "video"),
            buffer_keys=("pixel_values", *self._tables.names),
            output_width=self._widths[0] if len(self._widths) == 1 else tuple(self._widths),
            patches_per_token=self._unit,
            max_frames=self._max_frames,
            max_items=self._max_items,
        )

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        """``min_tokens`` and ``max_tokens``."""
        return self._range

    def get_encoder_cudagraph_item_specs(self, items: EncoderItems) -> list[EncoderItemSpec]:
        """One spec for each image and clip."""
        grids = [(math.prod(grid), grid[0]) for grid in self._items(items).grids]
        return [EncoderItemSpec(patches, patches // self._unit, frames) for patches, frames in grids]

    def select_encoder_cudagraph_items(self, items: EncoderItems, indices: Sequence[int]) -> EncoderItems:
        """The images and clips at ``indices``, as ``pixel_values`` and ``grid_thw``."""
        return self._items(items).selected(indices)

    def get_encoder_example_items(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype, num_items: int | None = None
    ) -> EncoderItems:
        """Black images that fill ``key``, nearly square; by default of a typical size."""
        grids = list(self._example_grids(key, num_items))
        pixels = torch.zeros(sum(map(math.prod, grids)), *self.patch_shape, device=device, dtype=dtype)
        return {"pixel_values": pixels, GRID_KEY: torch.tensor(grids, device="cpu")}

    def prepare_encoder_cudagraph_capture_inputs(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        """The patches and padded tables of the example items."""
        pixels = torch.zeros(key.patches, *self.patch_shape, device=device, dtype=dtype)
        return {"pixel_values": pixels, **self._tables.on_device(list(self._example_grids(key)), device, key)}

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: EncoderItems, key: EncoderGraphKey
    ) -> Mapping[str, torch.Tensor | None]:
        """The patches, unchanged, and the tables of their grids, padded on the host and copied in one transfer."""
        found = self._items(items)
        return {"pixel_values": found.patches(), **self._tables.on_device(found.grids, self._device, key)}

    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        """The forward without padding."""
        found = self._items(items)
        pixels = found.patches().to(self._device)
        if not len(pixels):
            weight = next(self.tower.parameters())
            return tuple(weight.new_empty(0, width) for width in self._widths)
        with eagerly():
            return self._forward({"pixel_values": pixels, **self._tables.on_device(found.grids, self._device)})

    def postprocess_encoder_output(
        self, output: tuple[torch.Tensor, ...], specs: Sequence[EncoderItemSpec]
    ) -> list[EncoderOutput]:
        """The rows of each item; if there are several outputs, a tuple of its rows of each output."""
        lengths = [spec.output_tokens for spec in specs]
        by_output = [
            [rows.reshape(-1, width) for rows in tensor.split(lengths)]
            for tensor, width in zip(output, self._row_widths, strict=True)
        ]
        return [rows[0] if len(rows) == 1 else rows for rows in zip(*by_output, strict=True)]

    def compile_encoder(self, compiler: str, runtime: Any, **options: Any) -> None:
        """Compile one block for all layers and sizes."""
        grids = [(1, *(side * self._merge // 2 if self._merge > 1 else side for side in _EXAMPLE_GRID[1:]))]
        grids *= _EXAMPLE_IMAGES
        pixels = torch.zeros(sum(map(math.prod, grids)), *self.patch_shape).to(next(self.tower.parameters()))
        example = {"pixel_values": pixels, GRID_KEY: grids}
        run = functools.partial(self.encoder_eager_forward, example)
        self._own.compile(run, compiler=compiler, runtime=runtime, **options)

    def _items(self, items: EncoderItems) -> GridItems:
        return GridItems.of(items, self._merge, self.patch_shape)

    def _example_grids(self, key: EncoderGraphKey, num_items: int | None = None) -> Iterator[Grid]:
        """At least one and at most ``key.items`` grids, with at most ``key.tokens`` tokens together.

        Sides are chosen between a square and 1 : 4, so that few tokens remain unused.
        """
        cells = key.tokens * self._unit // self._merge**2
        count = min(key.items, cells, num_items or -(-key.tokens // _EXAMPLE_TOKENS_AN_IMAGE))
        each, more = divmod(cells, count)
        for place in range(count):
            tokens = each + (place < more)
            square = math.isqrt(tokens)
            height = max(range(square, square // 2, -1), key=lambda height: tokens // height * height)
            yield 1, height * self._merge, tokens // height * self._merge


class FixedSizeAdapter(TowerAdapter):
    """The adapter for a tower that takes ``pixel_values`` [images, channels, height, width] of one size alone.

    The result of an image is a tuple of the tower's outputs without their batch dimension; one output is not a tuple.
    Budgets count the rows of all outputs of an image, if these have one width, otherwise images.

    Args:
        tower: see :class:`TowerAdapter`.
        output: None: ``both``, all that the tower returns.
        max_items: number of images in the largest batch.
    """

    _is_packed = False

    def __init__(self, tower: Any, *, output: str | None = None, max_items: int = 64) -> None:
        super().__init__(tower, output=output, max_items=max_items)
        config, weight = tower.config, next(tower.parameters())
        side = config.image_size
        self._image_shape = (getattr(config, "num_channels", 3), *((side, side) if isinstance(side, int) else side))
        pixels = torch.randn(2, *self._image_shape, generator=torch.Generator().manual_seed(0), device="cpu").to(weight)
        try:
            with eagerly():
                stock = self._read(tower(pixels))
        except _FAILURES as error:
            if isinstance(error, GraphpassError):
                raise
            found = f"{type(error).__name__}: {error}"
            raise unserved_tower(tower, f"a forward of images {self._image_shape} alone", found) from error
        self._shapes = [part.shape[1:] for parts in stock.values() for part in parts]
        if any(len(part) != 2 for parts in stock.values() for part in parts):
            raise unserved_tower(tower, "outputs of a row for each image", f"outputs of shapes {self._shapes}")
        total, widths = sum(shape.numel() for shape in self._shapes), {shape[-1] for shape in self._shapes}
        self._width = widths.pop() if len(widths) == 1 else total
        self._rows = total // self._width
        key = EncoderGraphKey(3 * self._rows, 3 * self._rows, 3)
        self._try(stock, {"pixel_values": pixels}, key)

    def _default_of(self, fields: Mapping[str, Any]) -> str:
        return BOTH if len(fields) > 1 else next(iter(fields))

    def _only(self, fields: dict[str, Any], chosen: str) -> dict[str, Any]:
        return {chosen: fields[chosen]}

    @staticmethod
    def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parts))

    def _by_token(self, fields: Mapping[str, Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        outputs = [part.flatten(1) for parts in fields.values() for part in parts]
        return (torch.cat(outputs, dim=1).reshape(-1, self._width),)

    def _forward(self, buffers: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self._by_token(self._read(self._own(buffers["pixel_values"])))

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Images only."""
        return EncoderCudaGraphConfig(
            modalities=("image",),
            buffer_keys=("pixel_values",),
            output_width=self._width,
            token_multiple=self._rows,
            max_items=self._max_items,
        )

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        """The rows of one image, and of the largest batch."""
        return self._rows, self._rows * self._max_items

    def get_encoder_cudagraph_item_specs(self, items: EncoderItems) -> list[EncoderItemSpec]:
        """One spec for each image; all are equal."""
        return [EncoderItemSpec(self._rows, self._rows)] * len(self._images(items))

    def select_encoder_cudagraph_items(self, items: EncoderItems, indices: Sequence[int]) -> EncoderItems:
        """The images at ``indices``; consecutive images are not copied."""
        images = self._images(items)
        first, count = (indices[0] if indices else 0), len(indices)
        if list(indices) == list(range(first, first + count)):
            return {"pixel_values": images[first : first + count]}
        return {"pixel_values": images.index_select(0, torch.tensor(indices, device=images.device))}

    def get_encoder_example_items(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype, num_items: int | None = None
    ) -> EncoderItems:
        """As many black images as fit ``key``; they have one size, so no other number fills it."""
        return self.prepare_encoder_cudagraph_capture_inputs(key, device, dtype)

    def prepare_encoder_cudagraph_capture_inputs(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        """Black images."""
        num_images = min(key.items, key.tokens // self._rows)
        if not num_images:
            raise EncoderConfigError(
                f"no image of {type(self.tower).__name__} fits a budget",
                expected=f"at least {self._rows} tokens, the rows of one image",
                found=str(key.tokens),
                remedy=f"choose budgets in multiples of {self._rows}",
            )
        return {"pixel_values": torch.zeros(num_images, *self._image_shape, device=device, dtype=dtype)}

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: EncoderItems, key: EncoderGraphKey
    ) -> Mapping[str, torch.Tensor | None]:
        """The images, unchanged."""
        return {"pixel_values": self._images(items)}

    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        """The forward over all images without padding."""
        images = self._images(items).to(self._device)
        if not len(images):
            return torch.empty(0, self._width).to(next(self.tower.parameters()))
        with eagerly():
            return self._forward({"pixel_values": images})

    def postprocess_encoder_output(
        self, output: tuple[torch.Tensor, ...], specs: Sequence[EncoderItemSpec]
    ) -> list[EncoderOutput]:
        """The outputs of each image."""
        images = output[0].reshape(len(specs), -1) if specs else output[0][:0]
        sizes = [shape.numel() for shape in self._shapes]
        parts = [
            part.reshape(-1, *shape).unbind()
            for part, shape in zip(images.split(sizes, dim=1), self._shapes, strict=True)
        ]
        return [each[0] if len(each) == 1 else each for each in zip(*parts, strict=True)] if specs else []

    def compile_encoder(self, compiler: str, runtime: Any, **options: Any) -> None:
        """Compile one block for all layers, and for one image and any number."""
        images = torch.zeros(3, *self._image_shape, device="cpu").to(next(self.tower.parameters()))
        run = functools.partial(self.encoder_eager_forward, {"pixel_values": images})
        self._own.compile(run, compiler=compiler, runtime=runtime, **options)

    def _images(self, items: EncoderItems) -> torch.Tensor:
        images = items.get("pixel_values")
        if not isinstance(images, torch.Tensor) or tuple(images.shape[1:]) != self._image_shape:
            raise ShapeError(
                f"images do not have the size of {type(self.tower).__name__}",
                expected=f"pixel_values of shape {('images', *self._image_shape)}",
                found=f"shape {tuple(images.shape)}" if isinstance(images, torch.Tensor) else f"keys {sorted(items)}",
                remedy="pass the output of the model's image processor: the tower's position embeddings have one size",
            )
        return images


def _patch_shapes(tower: nn.Module) -> list[tuple[int, ...]]:
    """Shapes that a patch may have, by the weights of the part that embeds it."""
    convolutions, products = ([m for m in tower.modules() if isinstance(m, of)] for of in (_CONVOLUTIONS, nn.Linear))
    shapes = [tuple(module.weight.shape[1:]) for module in (*convolutions[:1], *products[:1])]
    return list(dict.fromkeys(of for shape in shapes for of in ((math.prod(shape),), shape)))


def takes_grids(tower: nn.Module) -> bool:
    """Whether a tower takes images of any size, as patches with grids."""
    return GRID_KEY in inspect.signature(tower.forward).parameters
