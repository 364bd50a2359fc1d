"""Learns a model's behavior from a first run without a graph: its results, the state it writes, its need of Dynamo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphpass.capture.scope import CallObserver, ReachedCall, ReachedCallable
from graphpass.compat import dynamo, trees
from graphpass.engine.buffers import OutputBuffers, PaddedInputs, Sizes
from graphpass.engine.firstrun import FirstRun, restoring_model_state
from graphpass.engine.forward import fields_named
from graphpass.engine.mixing import refuse_mixing, refuse_tensors_between
from graphpass.engine.model import CompiledModel
from graphpass.engine.refusals import not_with_offloading
from graphpass.engine.results import LeafSources, Reached, ResultRecipe, leaf_sources, symbols_of
from graphpass.errors import ShapeError
from graphpass.keys import BatchDescriptor
from graphpass.ladder.modelstate import PythonState
from graphpass.ledger import Reason
from graphpass.modes import CUDAGraphMode
from graphpass.paddedmemory import by_tensor

__all__ = ["ModelLearner", "ModelResults"]

_LEAST_SYMBOLIC = 2


@dataclass(frozen=True, slots=True)
class ModelResults:
    """The structure of a model's results, and the buffers that every step writes them to.

    Attributes:
        recipe: how to cut and build results.
        outputs: one buffer per leaf of the result.
        sources: the graph output or input that each leaf is; None if the graph's outputs do not determine the result.
        why_through_dynamo: the reason why steps go through Dynamo, or None; see Note [Steps without Dynamo].
    """

    recipe: ResultRecipe
    outputs: OutputBuffers
    sources: LeafSources | None
    why_through_dynamo: Reason | None

    def leaves(self, flat: Sequence[Any], inputs: PaddedInputs) -> list[Any]:
        """The leaves of the result, from the flat outputs of a captured graph."""
        assert self.sources is not None
        return [
            flat[source] if isinstance(source, int) else source and inputs.arguments[source.name]
            for source in self.sources
        ]

    def keep(self, inputs: PaddedInputs, flat: list[Any]) -> list[Any]:
        """Copy the flat outputs of a graph into the buffers, as part of its capture.

        Returns:
            The flat outputs, each replaced by a view of its buffer.

        Raises:
            ShapeError: the number of outputs differs from the first run.
        """
        assert self.sources is not None
        num_outputs = len({source for source in self.sources if isinstance(source, int)})
        if len(flat) != num_outputs:
            raise self.other_structure(f"{len(flat)} tensors")
        self.outputs.store(self.leaves(flat, inputs), inputs.sizes)
        leaves = list(flat)
        for index, source in enumerate(self.sources):
            if isinstance(source, int):
                leaves[source] = self.outputs.cut(index, inputs.sizes)
        return leaves

    def store(self, result: Any, sizes: Sizes) -> None:
        """Copy a result of the model into the buffers.

        Args:
            result: the model's result at padded sizes.
            sizes: the padded size of each key field.

        Raises:
            ShapeError: the structure or a shape differs from the first run.
        """
        leaves, spec = trees.flatten(result)
        if spec != self.recipe.spec:
            raise self.other_structure(str(spec))
        self.outputs.store(leaves, sizes)

    def other_structure(self, found: str) -> ShapeError:
        """The error for a result whose structure differs from the first run."""
        return ShapeError(
            "the model returned another structure than in its first run",
            expected=str(self.recipe.spec),
            found=found,
            remedy="return the same structure for every batch",
        )

    def result(self, sizes: Sizes) -> Any:
        """The model's result at these sizes, as views of the buffers."""
        return self.recipe.build_result([self.outputs.cut(index, sizes) for index in range(len(self.outputs.buffers))])


class ModelLearner:
    """Runs a model once before the first capture, and checks each graph that it enters.

    Args:
        model: the model over its buffers.
    """

    def __init__(self, model: CompiledModel) -> None:
        self._model = model
        self._results: ModelResults | None = None
        self._checked: set[Any] = set()

    def forget(self) -> None:
        """Discard the description of the results, because the model is compiled again."""
        self._results = None
        self._checked.clear()

    def buffer_bytes(self) -> int:
        """Bytes of the input and output buffers."""
        return self._model.inputs.num_bytes() + (0 if self._results is None else self._results.outputs.num_bytes())

    def results(self) -> ModelResults:
        """The description of the model's results; the first call runs the model without a graph and allocates buffers.

        In that run the sizes of all key fields differ, because torch gives two equal sizes the same symbol.

        Raises:
            CaptureError, ShapeError: the model cannot be captured.
        """
        if self._results is None:
            with self._model.inputs.restoring():  # the caller may have written a batch to the buffers
                self._results, never_full = self._first_run()
            if self._results.why_through_dynamo is not None:
                why = self._results.why_through_dynamo
                self._model.runtime.warn(f"every step goes through Dynamo's guards: {why}", why.remedy)
            if never_full is not None:
                self._give_up_full(never_full)
        return self._results

    def check_graphs(self, reached: Reached, inputs: PaddedInputs) -> None:
        """Check that each graph of a run keeps tokens and requests apart; a graph is checked once.

        Args:
            reached: the calls of the run so far; the last one may not have returned.
            inputs: the inputs of the run.

        Raises:
            CaptureError: a graph mixes them; the error names op and line.
        """
        if all(call.callable in self._checked for call in reached):
            return
        declared = self._model.parts.mixing_ops()
        symbols = symbols_of(reached, by_tensor(inputs.buffers), inputs.sizes)
        for number, (call, of_graph) in enumerate(zip(reached, symbols, strict=True)):
            callable_ = call.callable
            if callable_ not in self._checked:  # guard: manager_mixing_later_graphs
                if number:  # guard: manager_mixing_between_graphs
                    refuse_tensors_between(callable_, of_graph, PythonState.of(self._model.modules))
                refuse_mixing(callable_, of_graph, declared, self._model.unpassed())
                self._checked.add(callable_)

    def checking_graphs(self, inputs: PaddedInputs) -> CallObserver:
        """An observer of one step through Dynamo that checks each graph before it runs.

        A model whose code has changed since the capture is compiled again in a step, and that graph is new.
        """
        return _GraphChecks(self, inputs)

    def restoring_state(self, *, is_step: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Save the model's tensors, its Python state and the random numbers, and restore them after the body.

        Args:
            is_step: the body is a step, not a capture. The model's Python code then runs only if steps go through
                Dynamo, so otherwise its Python state is not saved.
        """
        results, device = self.results(), self._model.inputs.device
        modules = () if is_step and results.why_through_dynamo is None else self._model.modules
        return restoring_model_state(modules, results.recipe.state, results.recipe.generators, device)

    def _first_run(self) -> tuple[ModelResults, Reason | None]:
        """Run the model once; returns its results, and why it cannot have FULL graphs, or None."""
        model = self._model
        keys = [key for _, keys in model.dispatcher.capture_plan() for key in keys]
        for key in keys:
            model.sizes_of(key)
        num_tokens = max((key.num_tokens for key in keys), default=model.inputs.largest["num_tokens"])
        if num_tokens == model.inputs.largest.get("num_reqs"):
            num_tokens += -1 if num_tokens > _LEAST_SYMBOLIC else 1
        sizes = {**model.inputs.largest, "num_tokens": num_tokens}
        with self._run_once(sizes) as run:
            if len(run.reached) == 1:
                return self._learned_from(run)
        # Inputs of the second graph get symbolic sizes only after Dynamo has seen a second size.
        with self._run_once({field: size + (-1 if size > _LEAST_SYMBOLIC else 1) for field, size in sizes.items()}):
            pass
        with self._run_once(sizes) as run:
            return self._learned_from(run)

    @contextlib.contextmanager
    def _run_once(self, sizes: Sizes) -> Iterator[FirstRun]:
        """Run the model at these sizes over example inputs, without a graph; the effects are undone after the body."""
        model, parts, num_tokens = self._model, self._model.parts, sizes["num_tokens"]
        inputs = model.padded_at(sizes)
        metadata = model.prepared(inputs, BatchDescriptor(num_tokens), CUDAGraphMode.NONE)
        context = parts.context(metadata, inputs, CUDAGraphMode.NONE, None, num_tokens)
        with model.runtime.scopes.opened() as scope, context, fields_named(parts.attention, metadata):
            run = FirstRun(model.compiled, inputs, scope, model.modules, model.inputs.device)
            with run.undone(), parts.hooked(CUDAGraphMode.NONE):
                run.run()
                if parts.hooks is not None and len(run.reached) != 1:
                    found = f"a model of {len(run.reached)} graphs"
                    raise not_with_offloading(found, "a model without graph breaks")
                yield run

    def _learned_from(self, run: FirstRun) -> tuple[ModelResults, Reason | None]:
        self.check_graphs(run.reached, run.inputs)
        recipe, inputs = run.recipe(), self._model.inputs
        leaves = trees.flatten(run.result)[0]
        sources = leaf_sources(leaves, run.reached, by_tensor(run.inputs.buffers))
        never_full = next((found for call in run.reached if (found := call.callable.never_full) is not None), None)
        why = self._why_through_dynamo(run.side_effects, sources, run.reached[0].args)
        inputs.pad_always(recipe.mutated)
        outputs = OutputBuffers.like(leaves, recipe.cuts, inputs.largest)
        return ModelResults(recipe, outputs, None if isinstance(sources, str) else sources, why), never_full

    def _why_through_dynamo(
        self, side_effects: Sequence[dynamo.SideEffect], sources: LeafSources | str, args: Sequence[Any]
    ) -> Reason | None:
        if isinstance(sources, str):
            return Reason(sources, "return tensors of one graph alone: no graph break, no object made in forward")
        if self._model.settings.policy.compare:
            return Reason("compare=True", "leave compare out where speed matters: it runs each replay beside eager")
        if side_effects:  # guard: manager_side_effects
            return Reason(f"the model {side_effects[0].text}", "keep that state in a buffer, or return it")
        if self._model.state_of(args) is None:
            why = "it reads tensors that are neither arguments, parameters nor buffers"
            return Reason(why, "register them as buffers of the module, or pass them as arguments")
        return None

    def _give_up_full(self, reason: Reason) -> None:
        dispatcher = self._model.dispatcher
        if not dispatcher.mode.has_mode(CUDAGraphMode.FULL):
            return
        self._model.fallbacks.report_never_full(reason)
        dispatcher.initialize_keys(CUDAGraphMode.PIECEWISE, dispatcher.uniform_decode_query_len)


class _GraphChecks:
    """Checks the graphs of one step."""

    def __init__(self, learner: ModelLearner, inputs: PaddedInputs) -> None:
        self._learner, self._inputs = learner, inputs
        self._reached: list[ReachedCall] = []

    def entering(self, callable_: ReachedCallable, args: tuple[Any, ...]) -> None:
        self._learner.check_graphs([*self._reached, ReachedCall(callable_, args, (), None)], self._inputs)

    def returned(self, call: ReachedCall) -> None:
        self._reached.append(call)
