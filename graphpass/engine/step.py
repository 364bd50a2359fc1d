"""What a manager holds of each key: the padded arguments, and how a step replays past Dynamo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.replayplan import ReplayPlan
from graphpass.engine.buffers import OutputBuffers, Sizes
from graphpass.engine.results import LeafSources, ResultRecipe
from graphpass.errors import ShapeError
from graphpass.ladder.modelstate import ModelState
from graphpass.ladder.padding import PaddedBuffer

__all__ = ["CapturedStep", "Learned", "PaddedInputs"]


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """The model's inputs at one padded shape: views of the persistent buffers.

    Attributes:
        sizes: the padded size of each key field.
        buffers: by input.
        arguments: the tensors alone, as the model is called with them.
        is_padding: which tokens are padding.
    """

    sizes: Sizes
    buffers: Mapping[str, PaddedBuffer]
    arguments: Mapping[str, torch.Tensor]
    is_padding: torch.Tensor


@dataclass(frozen=True, slots=True)
class Learned:
    """What a first run without a graph taught about the model's results.

    Attributes:
        recipe: how to cut and build them.
        outputs: the buffers that they are left in.
        sources: which outputs of the graph they are; None where the graph alone does not tell.
        why_through_dynamo: why a step cannot go past Dynamo, or None.
    """

    recipe: ResultRecipe
    outputs: OutputBuffers
    sources: LeafSources | None
    why_through_dynamo: str | None

    def leaves(self, flat: Sequence[Any], inputs: PaddedInputs) -> list[Any]:
        """The result's leaves, of the flat outputs of a graph that was captured: those, as many as in the first run."""
        assert self.sources is not None
        return [
            flat[source] if isinstance(source, int) else source and inputs.arguments[source.name]
            for source in self.sources
        ]

    def keep(self, inputs: PaddedInputs, flat: list[Any]) -> list[Any]:
        """Copy the flat outputs of a graph at capture into the buffers; they, with what lies there in their place.

        Raises:
            ShapeError: the graph has another number of outputs than that of the first run.
        """
        assert self.sources is not None
        num_outputs = len({source for source in self.sources if isinstance(source, int)})
        if len(flat) != num_outputs:
            raise self.other_structure(f"{len(flat)} tensors")
        self.outputs.store(self.leaves(flat, inputs), inputs.sizes)
        kept = list(flat)
        for index, source in enumerate(self.sources):
            if isinstance(source, int):
                kept[source] = self.outputs.cut(index, inputs.sizes)
        return kept

    def other_structure(self, found: str) -> ShapeError:
        """The error for a result of another structure than the first."""
        return ShapeError(
            "the model returned another structure than in its first run",
            expected=str(self.recipe.spec),
            found=found,
            remedy="return the same structure for every batch",
        )

    def result(self, sizes: Sizes) -> Any:
        """The model's result over the first entries of the buffers."""
        return self.recipe.build_result([self.outputs.cut(index, sizes) for index in range(len(self.outputs.buffers))])


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """One captured key.

    Attributes:
        inputs: the padded inputs.
        args: the graph's arguments: those inputs, their sizes, parameters.
        plan: what replays; None where a step goes through Dynamo.
        returns_flat: the plan returns a flat tuple or list.
        model: compared in every step that goes past Dynamo.
    """

    inputs: PaddedInputs
    args: tuple[Any, ...]
    plan: ReplayPlan | None
    returns_flat: bool
    model: ModelState | None

    def holds(self, modules: Sequence[torch.nn.Module], generation: int) -> bool:
        """Whether what was captured can be replayed as it is."""
        if self.plan is None or self.model is None:
            return True
        return self.model.serves(modules) and self.plan.serves(self.args, generation)
