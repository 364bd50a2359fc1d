"""The protocol of encoders for whole-encoder graphs: nine methods, and the records that they exchange.

The manager reads the sizes of the items of a request, packs items into batches, lets the encoder compute the contents
of a few buffers for each batch, and replays one graph over the buffers. The size of a graph, its *budget*, is the
number of **output** tokens. The other sizes (patches, frames, items, axes) are limits of its key.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from graphpass.errors import EncoderConfigError
from graphpass.keys import BatchDescriptor
from graphpass.paddedcalls import PadRule
from graphpass.report import KernelUse

EncoderItems: TypeAlias = Mapping[str, Any]
"""Items as Hugging Face processors return them: ``{"pixel_values": ..., "image_grid_thw": ...}``."""

EncoderOutput: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""The output of an encoder: one tensor [tokens, width], or several (deepstack levels)."""

Outputs: TypeAlias = tuple[torch.Tensor, ...]
"""Outputs, [tokens, width] each."""

Buffers: TypeAlias = Mapping[str, torch.Tensor]

Axes: TypeAlias = tuple[tuple[str, Hashable], ...]
"""(name, value) of each axis of a key or an item, in the order of the configuration."""


@dataclass(frozen=True, slots=True)
class EncoderItemSpec:
    """The sizes of one item, which is an image or a clip."""

    input_size: int  #: number of patches, the input rows of the encoder
    output_tokens: int  #: number of output rows of the encoder; the unit of budgets
    frames: int = 1  #: number of frames of a clip; 1 for an image
    path: str = ""  #: one of the configuration's paths
    axes: Axes = ()  #: the item's value on each axis of the configuration


@dataclass(frozen=True, slots=True)
class EncoderAxis:
    """Another property that is constant in a graph, such as an image size or a bound on the longest sequence."""

    name: str  #: name in items and keys
    values: tuple[Hashable, ...]  #: the values that graphs are captured for. Items above or beside them run eagerly.
    #: True: values are ordered, and a graph serves every item whose value is at most the graph's value, so items with
    #: different values can share a replay. False: only items with equal values share a replay.
    rounds_up: bool = False


@dataclass(frozen=True, slots=True)
class EncoderCudaGraphConfig:
    """Describes an encoder to the manager."""

    modalities: tuple[str, ...]  #: kinds of items, for reports: ``("image",)``, ``("image", "video")``
    buffer_keys: tuple[str, ...]  #: names of the buffers that graphs read
    #: columns of the encoder's output; a tuple if the encoder returns several tensors
    output_width: int | tuple[int, ...]
    #: {buffer key: how padding rows are filled, see :data:`graphpass.paddedcalls.PadRule`; None leaves them unchanged}.
    #: Other buffers are padded with zero.
    padding: Mapping[str, PadRule | None] = field(default_factory=dict)
    #: patches per output token (the square of the spatial merge size), for which the buffers of a budget have room
    patches_per_token: int = 1
    #: a number that divides the output tokens of every item; inferred budgets are multiples of it
    token_multiple: int = 1
    #: forwards that differ in more than size (images, clips). Each path has separate graphs.
    paths: tuple[str, ...] = ("",)
    #: additional constants of graphs. Each combination of values has separate graphs.
    axes: tuple[EncoderAxis, ...] = ()
    max_frames: int | None = None  #: maximum number of frames in a batch; None: frames are not counted
    max_items: int | None = None  #: maximum number of items in a batch; None: inferred from the budgets

    @property
    def output_widths(self) -> tuple[int, ...]:
        """The columns of each output."""
        return (self.output_width,) if isinstance(self.output_width, int) else tuple(self.output_width)


@dataclass(frozen=True, slots=True)
class EncoderGraphKey:
    """The key of one graph: the limits of the batches that it can replay."""

    tokens: int  #: maximum number of output tokens, the budget; also the rows of each output
    patches: int  #: maximum number of input rows
    items: int  #: maximum number of items
    frames: int | None = None  #: maximum number of frames of all items; None if frames are not counted
    path: str = ""  #: the path of all items
    axes: Axes = ()  #: the value of each axis
    descriptor: BatchDescriptor = field(init=False, repr=False, compare=False)  #: the batch descriptor of the graph

    def __post_init__(self) -> None:
        extra = ((("path", self.path),) if self.path else ()) + self.axes
        object.__setattr__(self, "descriptor", BatchDescriptor(self.tokens, num_reqs=self.items, extra=extra))

    def __str__(self) -> str:
        return str(self.descriptor)


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """An encoder whose whole forward can be captured in one graph.

    Everything that the host computes from a batch (rotary positions, window indices, lengths) is computed eagerly in
    :meth:`prepare_encoder_cudagraph_replay_buffers`. :meth:`encoder_cudagraph_forward` only reads buffers.
    """

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """The description of the encoder; every call returns the same."""
        ...

    def get_encoder_cudagraph_budget_range(self) -> tuple[int, int]:
        """Output tokens of the smallest item, and of the largest batch for which a graph is worthwhile."""
        ...

    def get_encoder_cudagraph_item_specs(self, items: EncoderItems) -> Sequence[EncoderItemSpec]:
        """The sizes of each item, in order."""
        ...

    def select_encoder_cudagraph_items(self, items: EncoderItems, indices: Sequence[int]) -> EncoderItems:
        """The items at ``indices``, in that order, as one mapping."""
        ...

    def prepare_encoder_cudagraph_capture_inputs(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype
    ) -> Buffers:
        """Example contents of every buffer of ``key``, at full size, that the forward accepts.

        The manager copies them into its own buffers; smaller keys use a prefix of the same memory. A buffer may grow
        with the key along dimension 0 only.
        """
        ...

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: EncoderItems, key: EncoderGraphKey
    ) -> Mapping[str, torch.Tensor | None]:
        """The contents of each buffer for ``items``, with at most as many rows as the buffer of ``key``.

        The manager copies them and pads the other rows by the rules of the configuration. None leaves a buffer
        unchanged; a missing buffer is an error.
        """
        ...

    def encoder_cudagraph_forward(self, buffers: Buffers, key: EncoderGraphKey) -> EncoderOutput:
        """Encode full buffers. Each output has ``key.tokens`` rows: the rows of the items, in order, then padding.

        It must not read device data on the host, and no shape may depend on contents. Contents of padding rows must not
        change the rows of items.
        """
        ...

    def encoder_eager_forward(self, items: EncoderItems) -> EncoderOutput:
        """Encode ``items`` without padding in one call. The outputs have the rows of the items, in order.

        The caller owns the returned tensors: no later call may write to them.
        """
        ...

    def postprocess_encoder_output(self, output: Outputs, specs: Sequence[EncoderItemSpec]) -> Sequence[EncoderOutput]:
        """Split outputs into one result for each item.

        Args:
            output: tensors [sum of output tokens, width], with the rows of the items in order.
            specs: sizes of the items.
        """
        ...


@runtime_checkable
class SupportsEncoderCompilation(Protocol):
    """An encoder that can compile its forward once for all sizes, before graphs are captured."""

    def compile_encoder(self, compiler: str, runtime: Any, **options: Any) -> None:
        """Compile the repeated block with the cgpass backend and symbolic sizes; called before the first capture.

        Args:
            compiler: the compiler of regions: ``inductor``, ``aot_eager`` or ``eager``.
            runtime: the :class:`~graphpass.GraphRuntime` that counts artifacts.
            options: further options of the backend, if the user sets some: ``tune``, ``tune_seconds``, ``progress``.
        """
        ...


@runtime_checkable
class SupportsEncoderKernels(Protocol):
    """An encoder that says which kernel computes its attention; the manager warns if there is a faster one."""

    def encoder_attention_kernel(self) -> KernelUse:
        """The kernel, as of now."""
        ...


@runtime_checkable
class SupportsEncoderExamples(Protocol):
    """An encoder that can create example items, with which eager calls are timed after the capture.

    For other encoders, :meth:`~SupportsEncoderCudaGraph.encoder_cudagraph_forward` over full buffers is timed instead.
    """

    def get_encoder_example_items(
        self, key: EncoderGraphKey, device: torch.device, dtype: torch.dtype, num_items: int | None = None
    ) -> EncoderItems:
        """Items with the path and axes of ``key`` that fill it as far as possible, within its limits.

        Args:
            key: the key that the items replay.
            device: device of the items.
            dtype: dtype of the items.
            num_items: number of items, at most ``key.items``, of about equal size; None: items of a usual size. An
                encoder whose items all have one size ignores it.
        """
        ...


def group_of(config: EncoderCudaGraphConfig, path: str, axes: Axes) -> Hashable:
    """What items that share a replay have in common."""
    return (path, *(value for axis, (_, value) in zip(config.axes, axes, strict=True) if not axis.rounds_up))


def grouped(config: EncoderCudaGraphConfig, keys: Sequence[EncoderGraphKey]) -> dict[Hashable, list[EncoderGraphKey]]:
    """{group: its keys}, in the order of ``keys``."""
    groups: dict[Hashable, list[EncoderGraphKey]] = {}
    for key in keys:
        groups.setdefault(group_of(config, key.path, key.axes), []).append(key)
    return groups


def checked_specs(specs: Sequence[EncoderItemSpec], config: EncoderCudaGraphConfig) -> list[EncoderItemSpec]:
    """``specs``, if they agree with the configuration."""
    names, specs = [axis.name for axis in config.axes], list(specs)
    for item, spec in enumerate(specs):
        if (
            min(spec.input_size, spec.output_tokens, spec.frames) < 0
            or spec.path not in config.paths
            or [name for name, _ in spec.axes] != names
            or any(axis.rounds_up and type(v) is not int for axis, (_, v) in zip(config.axes, spec.axes, strict=True))
        ):
            expected = (
                f"sizes of at least 0, a path among {list(config.paths)}, values of the axes {names}, and integers on "
                "axes that round up"
            )
            raise contradiction(f"item {item} of get_encoder_cudagraph_item_specs", expected, spec)
    return specs


def contradiction(what: str, expected: str, found: object) -> EncoderConfigError:
    """The error for what a method returns against the configuration."""
    remedy = "correct what the method returns, or what get_encoder_cudagraph_config returns"
    problem = f"the encoder contradicts its configuration: {what}"
    return EncoderConfigError(problem, expected=expected, found=repr(found), remedy=remedy)
