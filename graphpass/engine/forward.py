"""What belongs to a forward besides the model: attention metadata, the forward context, and hooks that move weights."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from graphpass.context import entered, set_forward_context
from graphpass.engine.batch import AttentionMetadataBuilder
from graphpass.engine.hooks import ForwardHooks
from graphpass.engine.metadata import fields_named, slot_mapping_of
from graphpass.engine.padded import PaddedInputs
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = ["ForwardParts"]

_NO_HOOKS = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class ForwardParts:
    """Who takes part in every forward of a model, whatever runs or replays it.

    Attributes:
        attention: makes metadata; None for a model without.
        hooks: move weights around each forward; None for a model whose weights are on the device.
        num_ranks: data-parallel ranks that run the same steps; None without an agreement.
    """

    attention: AttentionMetadataBuilder | None
    hooks: ForwardHooks | None
    num_ranks: int | None

    def splitting_ops(self) -> list[str]:
        """The ops that stay eager in PIECEWISE."""
        return [op for part in (self.attention, self.hooks) if part is not None for op in part.splitting_ops]

    def mixing_ops(self) -> tuple[str, ...]:
        """The ops that may mix the tokens and requests of a batch."""
        return () if self.attention is None else self.attention.splitting_ops

    def example(self, key: BatchDescriptor, query_len: int | None) -> Any:
        """Requests on scratch pages that fill a key, in place of :attr:`Batch.attention`; None without attention.

        Args:
            key: the padded shape.
            query_len: tokens of each request in a uniform decode key.
        """
        return (
            None
            if self.attention is None
            else self.attention.example(key, query_len=query_len if key.uniform else None)
        )

    def metadata(self, attention: Any, key: BatchDescriptor | None, mode: CUDAGraphMode) -> Any:
        """The attention metadata of one forward, that of the key's graph in FULL; None without attention.

        Raises:
            ShapeError: the requests do not fit the key, or each other.
        """
        if self.attention is None:
            return None
        return self.attention.build(attention, key if mode is CUDAGraphMode.FULL else None)

    def context(
        self,
        metadata: Any,
        inputs: PaddedInputs,
        mode: CUDAGraphMode,
        key: BatchDescriptor | None,
        num_tokens: int,
        num_tokens_across_dp: tuple[int, ...] | None = None,
    ) -> entered:
        """The forward context of one forward.

        Args:
            metadata: what the model's attention reads.
            inputs: the padded inputs.
            mode: of the forward.
            key: the padded shape; None before the sizes are known to be a key's.
            num_tokens: real tokens of this rank.
            num_tokens_across_dp: real tokens of each rank; None where all have as many as this one.
        """
        alike = None if self.num_ranks is None else (num_tokens,) * self.num_ranks
        return set_forward_context(
            metadata,
            runtime_mode=mode,
            batch_descriptor=key,
            num_tokens=num_tokens,
            num_tokens_across_dp=alike if num_tokens_across_dp is None else num_tokens_across_dp,
            slot_mapping=slot_mapping_of(self.attention, metadata),
            is_padding=inputs.is_padding,
            extra=None if self.hooks is None else self.hooks.context,
        )

    def hooked(self, mode: CUDAGraphMode) -> contextlib.AbstractContextManager[None]:
        """Let the hooks work around one forward."""
        return _NO_HOOKS if self.hooks is None else self.hooks.forward(replays=mode is CUDAGraphMode.FULL)

    def fields_named(self, metadata: Any) -> fields_named:
        """Let an error about a missing field of the metadata name it and its builder."""
        return fields_named(self.attention, metadata)
