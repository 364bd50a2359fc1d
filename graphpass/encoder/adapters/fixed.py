"""Adapters of towers whose images all have one size: CLIP and SigLIP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpass.capture.settings import capture_settings
from graphpass.encoder.adapters.tower import Blocks, checked_count, eagerly
from graphpass.encoder.attention import EQUAL_ATTENTION
from graphpass.encoder.protocol import (
    EncoderCudaGraphConfig,
    EncoderGraphKey,
    EncoderItems,
    EncoderItemSpec,
    EncoderOutput,
)
from graphpass.errors import EncoderConfigError, ShapeError, one_of
from graphpass.report import KernelUse

LAST_HIDDEN_STATE, POOLER_OUTPUT, BOTH = "last_hidden_state", "pooler_output", "both"
_EXAMPLE_IMAGES = 3


class FixedSizeAdapter(ABC):
    """An adapter for a tower that takes ``pixel_values`` [images, channels, height, width] of one size.

    Args:
        tower: the stock tower, in eval mode and on its device. It is not changed; its weights are shared.
        output: the result of an image: ``last_hidden_state`` [positions, width], ``pooler_output`` [width], or
            ``both``, a tuple of the two. Budgets count the rows of an image: positions, 1, or positions + 1. A tower
            without a pooling head only has ``last_hidden_state``.
        max_items: number of images in the largest batch.

    Raises:
        EncoderConfigError: an option has a wrong value.
    """

    def __init__(self, tower: Any, *, output: str | None = None, max_items: int = 64) -> None:
        embeddings = tower.embeddings
        self.tower = tower
        self._positions: int = embeddings.num_positions
        rows = {LAST_HIDDEN_STATE: self._positions}
        if getattr(tower, "use_head", True):
            rows |= {POOLER_OUTPUT: 1, BOTH: self._positions + 1}
        default, problem = list(rows)[-1], f"option output of the adapter for {type(tower).__name__} has a wrong value"
        self._output = default if output is None else output
        remedy = f"omit the option for {default!r}"
        one_of(self._output, tuple(rows), problem, remedy=remedy, error=EncoderConfigError)
        self._rows = rows[self._output]
        self._max_items = checked_count("max_items", max_items)
        self._image_shape = (tower.config.num_channels, embeddings.image_size, embeddings.image_size)
        self._blocks = Blocks(tower, "encoder.layers", EQUAL_ATTENTION, seq_len=self._positions)

    # -- what each tower adds

    @abstractmethod
    def _embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The input of the first block, [images, positions, width]."""

    @abstractmethod
    def _finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``last_hidden_state`` and ``pooler_output`` from the output of the last block, [images, positions, width]."""

    # -- the protocol

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """Images only."""
        return EncoderCudaGraphConfig(
            modalities=("image",),
            buffer_keys=("pixel_values",),
            output_width=self.tower.config.hidden_size,
            patches_per_token=self._positions if self._output == POOLER_OUTPUT else 1,
            token_multiple=self._rows,
            max_items=self._max_items,
        )

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        """The rows of one image, and of the largest batch."""
        return self._rows, self._rows * self._max_items

    def get_encoder_cudagraph_item_specs(self, items: EncoderItems) -> list[EncoderItemSpec]:
        """One spec for each image; all are equal."""
        return [EncoderItemSpec(self._positions, self._rows)] * len(self._images(items))

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

    def encoder_cudagraph_forward(self, buffers: Mapping[str, torch.Tensor], key: EncoderGraphKey) -> EncoderOutput:
        """The rows of all images in order, [key.tokens, width]; rows after the last image are zero."""
        with capture_settings():
            rows = self._forward(buffers["pixel_values"])
        return torch.cat([rows, rows.new_zeros(key.tokens - len(rows), rows.shape[1])])

    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        """The forward over all images without padding, [images * rows, width]."""
        images = self._images(items)
        weight: torch.Tensor = next(self.tower.parameters())
        if not len(images):
            return weight.new_empty(0, self.tower.config.hidden_size)
        with eagerly():
            return self._forward(images.to(weight.device))

    def postprocess_encoder_output(
        self, output: tuple[torch.Tensor, ...], specs: Sequence[EncoderItemSpec]
    ) -> list[EncoderOutput]:
        """The result of each image, see ``output`` of the class."""
        (rows,) = output
        images = rows[: len(specs) * self._rows].unflatten(0, (len(specs), self._rows)).unbind() if specs else ()
        if self._output == LAST_HIDDEN_STATE:
            return list(images)
        if self._output == POOLER_OUTPUT:
            return [image[0] for image in images]
        return [(image[:-1], image[-1]) for image in images]

    def encoder_attention_kernel(self) -> KernelUse:
        """The kernel of the blocks' attention."""
        return self._blocks.kernel()

    def compile_encoder(self, compiler: str, runtime: Any, **options: Any) -> None:
        """Compile one block for all layers and sizes."""
        weight = next(self.tower.parameters())
        shape = (1, _EXAMPLE_IMAGES * self._positions, self.tower.config.hidden_size)
        hidden = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        self._blocks.compile(hidden, {"attention_mask": None}, compiler=compiler, runtime=runtime, **options)

    # --

    def _forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[images * rows, width]."""
        hidden = self._embed(pixel_values)
        blocks, arguments = self._blocks, {"attention_mask": None}
        blocks.follow()
        # Embeddings of a single image have transposed strides, but blocks are compiled for one layout.
        rows = hidden.contiguous()
        are_alone = blocks.compute_rows_alone()  # guard: encoder_images_apart
        if are_alone:  # all images are one row, because a batch of one image would be compiled separately
            rows = rows.view(1, -1, hidden.shape[-1])
        for layer in range(len(blocks)):
            rows = blocks(layer, rows, arguments, is_stock=not are_alone)
        last, pooled = self._finish(rows.view(hidden.shape))
        if self._output == LAST_HIDDEN_STATE:
            return last.flatten(0, 1)
        assert pooled is not None
        if self._output == POOLER_OUTPUT:
            return pooled
        return torch.cat([last, pooled.unsqueeze(1)], dim=1).flatten(0, 1)

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


class ClipAdapter(FixedSizeAdapter):
    """The adapter for ``CLIPVisionModel``."""

    def _embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tower.pre_layrnorm(self.tower.embeddings(pixel_values))
        return embedded

    def _finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return hidden, self.tower.post_layernorm(hidden[:, 0])


class SiglipAdapter(FixedSizeAdapter):
    """The adapter for ``SiglipVisionModel``. Without the head (``vision_use_head=False``) there is no pooled output."""

    def _embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tower.embeddings(pixel_values)
        return embedded

    def _finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        last = self.tower.post_layernorm(hidden)
        return last, self.tower.head(last) if self.tower.use_head else None
