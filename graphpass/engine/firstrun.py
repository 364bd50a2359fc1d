"""The first run of a model under a manager: without a graph, over example inputs, with all its effects undone.

The model is called twice. The first call stops at the entry of the first graph: Dynamo has then compiled it, so the
tensors that the graph writes to and the changes of Python state are known before anything has run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from graphpass.capture.scope import CaptureScope, EnteredCallable
from graphpass.capture.settings import restoring
from graphpass.compat import dynamo
from graphpass.engine.buffers import PaddedInputs
from graphpass.engine.refusals import nothing_reached
from graphpass.engine.results import Reached, ResultRecipe, learn_recipe
from graphpass.ladder.modelstate import (
    PythonState,
    refuse_side_effects,
    refuse_stored_tensors,
    restoring_python_state,
)
from graphpass.paddedmemory import by_tensor, versions_of, written_since

__all__ = ["FirstRun", "restoring_model_state"]

_Item = TypeVar("_Item")


@contextlib.contextmanager
def restoring_model_state(
    modules: Sequence[torch.nn.Module],
    tensors: Sequence[torch.Tensor],
    generators: Sequence[torch.Generator],
    device: torch.device,
) -> Iterator[PythonState]:
    """Save the Python state of modules, these tensors and the random numbers, and restore them after the body."""
    with restoring(tensors, generators, device), restoring_python_state(modules) as state:
        yield state


class FirstRun:
    """One run of a model without a graph.

    Args:
        compiled: the compiled model.
        inputs: its padded inputs.
        scope: an open capture scope; the forward context has mode NONE.
        modules: all modules of the model.
        device: device of the inputs.

    Attributes:
        result: what the model returned; None before :meth:`run`.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        inputs: PaddedInputs,
        scope: CaptureScope,
        modules: Sequence[torch.nn.Module],
        device: torch.device,
    ) -> None:
        self.inputs, self.result = inputs, None
        self._compiled, self._scope = compiled, scope
        self._modules, self._device = modules, device
        self._state: PythonState | None = None
        self._written: list[str] = []

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Restore the model's tensors, Python state and random numbers after a run in the body.

        Raises:
            CaptureError: the run would change state that cannot be restored.
        """
        first = self._first_entry()
        tensors, generators = self._changed_by(first)
        with restoring_model_state(self._modules, tensors, generators, self._device) as self._state:
            if first is not None:
                refuse_side_effects(first.reached.side_effects, self._state)
            yield

    def run(self) -> None:
        """Run the model.

        Raises:
            CaptureError: the model enters no graph, or changes state that cannot be restored.
        """
        assert self._state is not None
        versions = versions_of(self.inputs.buffers)
        self.result = self._compiled(**self.inputs.arguments)
        self._written = written_since(self.inputs.buffers, versions)
        if not self.reached:
            raise nothing_reached(f"{self.inputs.sizes['num_tokens']} tokens")
        refuse_side_effects(self.side_effects, self._state)
        # guard: manager_kept_between_graphs
        refuse_stored_tensors(self._state, {id(tensor) for tensor in self._buffers()})

    @property
    def reached(self) -> Reached:
        """The calls of graphs in this run, in order."""
        return self._scope.reached

    @property
    def side_effects(self) -> tuple[dynamo.SideEffect, ...]:
        """Changes of Python state in the code that Dynamo generated around the graphs."""
        return tuple(effect for call in self.reached for effect in call.callable.side_effects)

    def recipe(self) -> ResultRecipe:
        """The recipe that cuts and builds results with the structure of this run's result."""
        buffers = by_tensor(self.inputs.buffers)
        recipe = learn_recipe(self.result, self.reached, buffers, padded=self.inputs.sizes, written=self._written)
        # guard: manager_several_graphs_state
        return recipe if len(self.reached) == 1 else recipe.with_state(self._buffers(), self._generators())

    def _first_entry(self) -> EnteredCallable | None:
        """Call the model up to the entry of its first graph; None if it enters no graph."""
        self._scope.stops_at_entry = True
        try:
            self._compiled(**self.inputs.arguments)
        except EnteredCallable as entered:
            return entered
        finally:
            self._scope.stops_at_entry = False
        return None

    def _changed_by(self, first: EnteredCallable | None) -> tuple[list[torch.Tensor], list[torch.Generator]]:
        """The tensors, inputs excluded, and the random number generators that a run may change."""
        own = by_tensor(self.inputs.buffers)
        if first is None:
            return [], []
        written = [first.args[position] for position in first.reached.partition.mutated_inputs]
        state = [tensor for tensor in written if id(tensor) not in own]
        generators = [value for value in first.args if isinstance(value, torch.Generator)]
        if first.reached.ends_early is None:
            return state, generators
        # Python code between graphs may change any buffer or generator of the model.
        return _distinct([*state, *self._buffers()]), _distinct([*generators, *self._generators()])

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for module in self._modules for buffer in module.buffers(recurse=False)]

    def _generators(self) -> list[torch.Generator]:
        return [value for module in self._modules for value in vars(module).values() if _is_generator(value)]


def _is_generator(value: object) -> bool:
    return isinstance(value, torch.Generator)


def _distinct(items: Iterable[_Item]) -> list[_Item]:
    return list({id(item): item for item in items}.values())
