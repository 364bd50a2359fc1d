"""Audio models in CUDA graphs as people write it by hand: one graph for each bucket of batch size and length.

A runner copies a call into the static inputs of its bucket, replays, and cuts the result. What each model needs beside
that, so that its padding changes no real entry, is its class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.bench.timing import HandCapture

BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The graph of a bucket."""

    given: dict[str, torch.Tensor]  #: its static inputs
    replay: Callable[[], Any]
    made: torch.Tensor  #: where its result lies


class BucketedRunner:
    """Graphs that are captured when their bucket is first needed; nothing hides the padding.

    That suits a causal model.
    """

    def __init__(self, model: Any, lengths: Sequence[int], dim: int = 1) -> None:
        self.model, self.lengths, self.dim = model, lengths, dim
        self.device = next(model.parameters()).device
        self.buckets: dict[tuple[int, int], Bucket] = {}
        self._captures = HandCapture(self.device)

    def __call__(self, **given: torch.Tensor) -> torch.Tensor:
        """The result of a call, in memory of its own."""
        clips = next(iter(given.values()))
        batch, length = clips.shape[0], clips.shape[self.dim]
        sizes = next(b for b in BATCHES if b >= batch), next(one for one in self.lengths if one >= length)
        bucket = self.buckets.get(sizes)
        if bucket is None:
            bucket = self.buckets[sizes] = self._captured(self.inputs(clips, *sizes))
        self.fill(bucket.given, given, batch, length)
        bucket.replay()
        return bucket.made[:batch].narrow(self.dim, 0, self.entries(length)).clone()

    def _captured(self, inputs: dict[str, torch.Tensor]) -> Bucket:
        replay, (made,) = self._captures.capture(lambda: (self.run(**inputs),))
        return Bucket(inputs, replay, made)

    def inputs(self, clips: torch.Tensor, batch: int, length: int) -> dict[str, torch.Tensor]:
        """Static inputs of a bucket."""
        shape = list(clips.shape)
        shape[0], shape[self.dim] = batch, length
        return {"clips": clips.new_zeros(shape)}

    def fill(self, static: dict[str, torch.Tensor], given: dict[str, torch.Tensor], batch: int, length: int) -> None:
        """Copy a call; what an earlier one has left becomes zero."""
        static["clips"].zero_()
        static["clips"][:batch].narrow(self.dim, 0, length).copy_(next(iter(given.values())))

    def run(self, clips: torch.Tensor) -> Any:
        """What is captured."""
        return self.model(clips)

    def entries(self, length: int) -> int:
        """How many entries a result has along its length."""
        return length


class MaskedRunner(BucketedRunner):
    """With a mask that hides the padding from the model."""

    def inputs(self, clips: torch.Tensor, batch: int, length: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(batch, length, dtype=torch.long, device=clips.device)
        return {**super().inputs(clips, batch, length), "mask": mask}

    def fill(self, static: dict[str, torch.Tensor], given: dict[str, torch.Tensor], batch: int, length: int) -> None:
        super().fill(static, given, batch, length)
        static["mask"].fill_(1)  # a row of padding alone attends to itself
        static["mask"][:batch, length:] = 0
        if "attention_mask" in given:
            static["mask"][:batch, :length].copy_(given["attention_mask"])

    def run(self, clips: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.model(clips, attention_mask=mask).last_hidden_state


class ParakeetRunner(MaskedRunner):
    """Of ``ParakeetEncoder``."""

    def entries(self, length: int) -> int:
        return int(self.model._get_subsampling_output_length(torch.tensor(length)))


class Wav2Vec2Runner(MaskedRunner):
    """Of ``Wav2Vec2Model`` with layer norm in its convolutions; as the model makes its mask, it cannot be captured."""

    def run(self, clips: torch.Tensor, mask: torch.Tensor) -> Any:
        features = self.model.feature_extractor(clips).transpose(1, 2)
        states, _ = self.model.feature_projection(features)
        frames = self.model._get_feat_extract_output_lengths(mask.sum(-1))
        heard = torch.arange(states.shape[1], device=states.device) < frames[:, None]
        return self.model.encoder(states, attention_mask=heard)[0]

    def entries(self, length: int) -> int:
        return int(self.model._get_feat_extract_output_lengths(length))


class HifiGanRunner(BucketedRunner):
    """Of ``SpeechT5HifiGan``: each convolution reads zeros behind a clip, as where it ends by itself."""

    def inputs(self, clips: torch.Tensor, batch: int, length: int) -> dict[str, torch.Tensor]:
        frames = torch.zeros((), dtype=torch.long, device=clips.device)
        return {**super().inputs(clips, batch, length), "frames": frames}

    def fill(self, static: dict[str, torch.Tensor], given: dict[str, torch.Tensor], batch: int, length: int) -> None:
        super().fill(static, given, batch, length)
        static["frames"].fill_(length)

    def run(self, clips: torch.Tensor, frames: torch.Tensor) -> Any:
        masks: dict[int, torch.Tensor] = {}

        def hide(_: nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
            size = given[0].shape[-1]
            if size not in masks:
                masks[size] = torch.arange(size, device=clips.device) < frames * (size // clips.shape[1])
            return given[0] * masks[size]

        convolutions = [part for part in self.model.modules() if isinstance(part, nn.Conv1d | nn.ConvTranspose1d)]
        hooks = [convolution.register_forward_pre_hook(hide) for convolution in convolutions]
        try:
            return self.model(clips)
        finally:
            for hook in hooks:
                hook.remove()

    def entries(self, length: int) -> int:
        return length * math.prod(self.model.config.upsample_rates)


class MimiRunner(BucketedRunner):
    """Of the decoder of ``MimiModel``, in which nothing looks ahead."""

    def __init__(self, model: Any, lengths: Sequence[int]) -> None:
        super().__init__(model, lengths, dim=2)

    def entries(self, length: int) -> int:
        return length * int(self.model.samples_a_code)
