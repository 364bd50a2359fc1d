"""What an encoder has to offer for whole-encoder graphs: a protocol of nine methods, and the records they speak in.

The manager knows no model. It asks for the sizes of the items of a request, packs items into batches, has the model
turn a batch into the contents of a few buffers, and replays one graph over them. The unit of a graph's size, its
*budget*, is the number of **output** tokens; whatever else a graph bakes in (patches, frames, items, axes) is a limit
of its key.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from graphpass.keys import BatchDescriptor
from graphpass.padrules import PadRule

__all__ = [
    "Axes",
    "EncoderAxis",
    "EncoderCudaGraphConfig",
    "EncoderGraphKey",
    "EncoderItemSpec",
    "EncoderItems",
    "EncoderOutput",
    "PaddingRule",
    "SupportsEncoderCompilation",
    "SupportsEncoderCudaGraph",
    "SupportsEncoderExamples",
]

EncoderItems: TypeAlias = Mapping[str, Any]
"""Some items as one mapping, as Hugging Face processors return it: ``{"pixel_values": ..., "image_grid_thw": ...}``."""

EncoderOutput: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""What an encoder returns: one tensor with a row for each token, or several (deepstack levels)."""

PaddingRule: TypeAlias = PadRule | None
"""What fills a buffer behind a batch's own rows, see :data:`graphpass.padrules.PadRule`; None leaves what is there."""

Axes: TypeAlias = tuple[tuple[str, Hashable], ...]
"""Values of the axes of a key or an item, as (name, value), in the order of the configuration."""


@dataclass(frozen=True, slots=True)
class EncoderItemSpec:
    """The sizes of one item: an image, or a clip.

    Attributes:
        input_size: patches, the rows that the encoder reads.
        output_tokens: rows that the encoder returns for it; what budgets count.
        frames: frames of a clip; 1 for an image.
        path: which of the configuration's paths it takes.
        axes: its value on each axis of the configuration.
    """

    input_size: int
    output_tokens: int
    frames: int = 1
    path: str = ""
    axes: Axes = ()


@dataclass(frozen=True, slots=True)
class EncoderAxis:
    """One more thing that a graph bakes in, such as an image size, or a bound of the longest sequence.

    Attributes:
        name: as items and keys spell it.
        values: what graphs are captured for. Items with other values run eagerly.
        rounds_up: the values are ordered, and a graph serves every item whose value is at most its own, so that items
            with different values share a replay. Else only items with the same value do.
    """

    name: str
    values: tuple[Hashable, ...]
    rounds_up: bool = False


@dataclass(frozen=True, slots=True)
class EncoderCudaGraphConfig:
    """What the manager has to know of an encoder.

    Attributes:
        modalities: what items may be, for reports: ``("image",)``, ``("image", "video")``.
        buffer_keys: the names of the buffers that graphs read.
        output_width: columns of the encoder's output; a tuple where it returns several tensors.
        padding: {buffer key: rule}; a key that is not listed is padded with zero.
        patches_per_token: patches that one output token stands for (the square of the spatial merge size). The
            buffers of a budget hold this many patches for each of its tokens.
        token_multiple: what the output tokens of every item are a multiple of; inferred budgets are, too.
        paths: forwards that differ in more than size (images, clips); each has graphs of its own.
        axes: what else graphs bake in; each combination of values has graphs of its own.
        max_frames: how many frames a batch may have in all; None: frames are not counted.
        max_items: how many items a batch may have; None: as many as its tokens allow, inferred from the budgets.
    """

    modalities: tuple[str, ...]
    buffer_keys: tuple[str, ...]
    output_width: int | tuple[int, ...]
    padding: Mapping[str, PaddingRule] = field(default_factory=dict)
    patches_per_token: int = 1
    token_multiple: int = 1
    paths: tuple[str, ...] = ("",)
    axes: tuple[EncoderAxis, ...] = ()
    max_frames: int | None = None
    max_items: int | None = None

    @property
    def output_widths(self) -> tuple[int, ...]:
        """The columns of each output."""
        return (self.output_width,) if isinstance(self.output_width, int) else tuple(self.output_width)


@dataclass(frozen=True, slots=True)
class EncoderGraphKey:
    """What one graph was captured for: the most that a batch on it may have.

    Attributes:
        tokens: output tokens, the budget; the rows of each output.
        patches: input rows.
        items: number of items.
        frames: frames in all; None where they are not counted.
        path: the path of all its items.
        axes: the value of each axis.
    """

    tokens: int
    patches: int
    items: int
    frames: int | None = None
    path: str = ""
    axes: Axes = ()

    @property
    def descriptor(self) -> BatchDescriptor:
        """The descriptor under which it is captured and replayed."""
        extra = ((("path", self.path),) if self.path else ()) + self.axes
        return BatchDescriptor(self.tokens, num_reqs=self.items, extra=extra)

    def __str__(self) -> str:
        return str(self.descriptor)


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """An encoder that can run as a whole in one graph.

    What the host computes from a batch (rotary positions, window indices, lengths) is computed eagerly, in
    :meth:`prepare_encoder_cudagraph_replay_buffers`; :meth:`encoder_cudagraph_forward` only reads buffers.
    """

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """What the manager has to know; always the same."""
        ...

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        """The output tokens of the smallest item, and of the largest batch worth a graph."""
        ...

    def get_encoder_cudagraph_item_specs(self, items: EncoderItems) -> Sequence[EncoderItemSpec]:
        """The sizes of each item, in order."""
        ...

    def select_encoder_cudagraph_items(self, items: EncoderItems, indices: Sequence[int]) -> EncoderItems:
        """Those items, in the order of ``indices``."""
        ...

    def prepare_encoder_cudagraph_capture_inputs(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        """Every buffer of ``key``, at its full size, with contents that the forward accepts.

        Only contents, shapes and dtypes matter: the manager keeps buffers of its own, of which the smaller keys use a
        prefix. A buffer grows with the key along dimension 0, or not at all.
        """
        ...

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: EncoderItems, key: EncoderGraphKey
    ) -> Mapping[str, torch.Tensor | None]:
        """What each buffer has to hold for ``items``: at most as many rows as the buffer of ``key`` has.

        Rows beyond are padded as the configuration says. None keeps the buffer as it is; an absent key is an error.
        """
        ...

    def encoder_cudagraph_forward(self, buffers: Mapping[str, torch.Tensor], key: EncoderGraphKey) -> EncoderOutput:
        """The encoder over full buffers: each output has ``key.tokens`` rows. No host read, no shape from contents.

        Rows of a batch's items come first, in order. What padding rows hold must not reach them.
        """
        ...

    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        """The encoder over ``items`` as they are, packed in one call: the rows of each item after the other.

        It returns tensors of their own, which no later call writes to.
        """
        ...

    def postprocess_encoder_output(
        self, output: tuple[torch.Tensor, ...], specs: Sequence[EncoderItemSpec]
    ) -> Sequence[EncoderOutput]:
        """``output``, of which each tensor has the rows of all ``specs`` one after the other, as one result an item."""
        ...


@runtime_checkable
class SupportsEncoderCompilation(Protocol):
    """An encoder that can compile what its graphs are captured from, once for all sizes."""

    def compile_encoder(self, compiler: str, runtime: Any) -> None:
        """Compile the repeated block with the cgpass backend and symbolic sizes; called before the first capture.

        Args:
            compiler: what compiles regions: ``inductor``, ``aot_eager``, ``eager``.
            runtime: the :class:`~graphpass.GraphRuntime` that counts artifacts.
        """
        ...


@runtime_checkable
class SupportsEncoderExamples(Protocol):
    """An encoder that can make items up, so that its eager call can be timed when graphs are captured.

    Without it, what is timed is :meth:`~SupportsEncoderCudaGraph.encoder_cudagraph_forward`, run eagerly over buffers.
    """

    def get_encoder_example_items(self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype) -> EncoderItems:
        """Items that fill ``key`` as far as they can: of its path and axes, together of at most ``key.tokens``."""
        ...
