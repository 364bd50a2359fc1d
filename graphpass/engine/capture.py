"""Captures one key of a manager, and records its replay plan and arguments: Note [Steps without Dynamo]."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphpass.capture.replay import ReplayPlan
from graphpass.capture.scope import CaptureScope
from graphpass.compat import trees
from graphpass.engine.buffers import PaddedInputs
from graphpass.engine.forward import fields_named
from graphpass.engine.learn import ModelLearner, ModelResults
from graphpass.engine.model import CompiledModel
from graphpass.engine.refusals import nothing_reached
from graphpass.engine.results import LeafSources, leaf_sources
from graphpass.ladder.estimate import DeviceMemory, Key
from graphpass.ladder.modelstate import ModelState
from graphpass.ladder.traffic import CapturedGraph
from graphpass.paddedmemory import PaddedBuffer, by_tensor

__all__ = ["CapturedStep", "KeyCapturer"]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """One captured key, ready to replay.

    Attributes:
        inputs: the padded inputs.
        args: flat arguments of the graph: the padded inputs, their sizes, the model's parameters and buffers; a list,
            as the native comparison of addresses requires, and never changed.
        plan: the plan that replays the graph; None if steps of this key go through Dynamo.
        generation: the pool's generation at capture.
        returns_flat: the plan returns a flat tuple or list.
        model: state of the model at capture, which a step without Dynamo checks; None if steps go through Dynamo.
    """

    inputs: PaddedInputs
    args: list[Any]
    plan: ReplayPlan | None
    generation: int
    returns_flat: bool
    model: ModelState | None

    def holds(self, modules: Sequence[torch.nn.Module], generation: int) -> bool:
        """Whether the graph can be replayed: model and plan are still valid.

        Args:
            modules: all modules of the model.
            generation: the pool's generation, which changes when graphs are dropped.
        """
        if self.plan is None or self.model is None:
            return True
        # guard: manager_dead_graphs
        return self.model.serves(modules) and generation == self.generation and self.plan.serves(self.args)


class KeyCapturer:
    """Captures the keys of a model, one at a time.

    Args:
        model: the model over its buffers.
        learner: describes the model's results.

    Attributes:
        meter: measures the device memory that a capture allocates.
    """

    def __init__(self, model: CompiledModel, learner: ModelLearner) -> None:
        self._model, self._learner = model, learner
        self.meter = DeviceMemory(model.inputs.device, model.runtime)
        self._states: dict[Any, ModelState] = {}

    def forget(self) -> None:
        """Drop the model states that captures share."""
        self._states.clear()

    def capture(self, key: Key) -> tuple[CapturedStep, CapturedGraph]:
        """Capture one key inside an open capture scope.

        The caller marks the key as captured in the dispatcher.

        Returns:
            The step to replay, and the record of seconds and memory.

        Raises:
            CaptureError: the key cannot be captured.
            ShapeError: the model returns another structure than in its first run.
        """
        mode, descriptor = key
        model, results = self._model, self._learner.results()
        scope = model.runtime.scopes.current()
        assert scope is not None
        inputs = model.padded_at(model.sizes_of(descriptor))
        before, started = self.meter.reading(), time.perf_counter()
        scope.reached.clear()
        is_direct = results.why_through_dynamo is None
        scope.prepare = partial(model.prepared, inputs, descriptor, mode)
        scope.keep_results = self._end_of_forward(results, inputs) if is_direct or model.parts.hooks else None
        try:
            metadata = scope.prepare()
            context = model.parts.context(metadata, inputs, mode, descriptor, descriptor.num_tokens)
            with context, model.parts.hooked(mode), fields_named(model.parts.attention, metadata):
                result = model.compiled(**inputs.arguments)
        finally:
            scope.prepare = scope.keep_results = None
        if not scope.reached:
            raise nothing_reached(f"{mode} {descriptor}")
        self._learner.check_graphs(scope.reached, inputs)  # guard: manager_mixing_of_sizes
        # The graph for this size may have side effects in Python that the graph of the first run did not have.
        # guard: manager_side_effects_of_sizes
        is_direct = is_direct and not any(call.callable.side_effects for call in scope.reached)
        through_dynamo = CapturedStep(inputs, [], None, 0, False, None)
        step = self._past_dynamo(scope, inputs, result) if is_direct else through_dynamo
        scope.reached.clear()  # release the results, which keep pool memory alive
        elapsed = time.perf_counter() - started
        return step, CapturedGraph(mode, descriptor, elapsed, self.meter.reading() - before)

    def _end_of_forward(self, results: ModelResults, inputs: PaddedInputs) -> Callable[[list[Any]], list[Any]]:
        """The function that a FULL capture calls at the end of the forward, with the graph's flat outputs."""
        hooks = self._model.parts.hooks

        def end(flat: list[Any]) -> list[Any]:
            if hooks is not None:
                hooks.join_after_forward()
            return results.keep(inputs, flat) if results.why_through_dynamo is None else flat

        return end

    def _past_dynamo(self, scope: CaptureScope, inputs: PaddedInputs, result: Any) -> CapturedStep:
        model, results = self._model, self._learner.results()
        leaves, spec = trees.flatten(result)
        sources = leaf_sources(leaves, scope.reached, by_tensor(inputs.buffers))
        if spec != results.recipe.spec or _names_of(sources) != _names_of(results.sources):
            raise results.other_structure(str(spec))
        model.find_modules()
        callable_, args = scope.reached[0].callable, scope.reached[0].args
        state = self._states.get(callable_)
        if state is None or not state.serves(model.modules):
            state = model.state_of(args)
            assert state is not None
            self._states[callable_] = state
        generation = model.runtime.lease.generation
        return CapturedStep(inputs, list(args), scope.reached[0].plan, generation, callable_.returns_flat, state)


def _names_of(sources: LeafSources | str | None) -> Any:
    """The sources in a form that is equal for all keys: a buffer is replaced by the name of its input."""
    if not isinstance(sources, tuple):
        return sources
    return [source.name if isinstance(source, PaddedBuffer) else source for source in sources]
