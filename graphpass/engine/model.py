"""A compiled model over a manager's buffers, and what its first run without a graph shows.

In the first run the model is called twice, over example inputs. The first call stops at the entry of the first graph:
Dynamo has then compiled it, so the tensors that the graph writes to and the changes of Python state are known before
anything has run. All effects of the second call are undone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import CaptureScope, EnteredCallable, ReachedCall, ReachedCallable
from graphpass.capture.settings import restoring
from graphpass.capture.staging import storage_id
from graphpass.compat import trees
from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.engine.buffers import InputBuffers, PaddedInputs, Sizes
from graphpass.engine.forward import ForwardParts, fields_named
from graphpass.engine.recipe import (
    LeafSources,
    Reached,
    Recipe,
    cuts_of,
    leaf_sources,
    refuse_mixing,
    refuse_tensors_between,
    result_buffers,
    symbols_of,
)
from graphpass.errors import CaptureError, OptionError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ladder.modelstate import (
    ModelState,
    PythonState,
    entry_of,
    modules_of,
    refuse_side_effects,
    refuse_stored_tensors,
    restoring_python_state,
)
from graphpass.ledger import Reason
from graphpass.options import Fallbacks, Settings
from graphpass.paddedmemory import by_tensor, versions_of, written_since

_LEAST_SYMBOLIC = 2


class Model:
    """A compiled model and its input buffers; it runs once before the first capture, and its graphs are checked."""

    def __init__(
        self,
        model: Any,
        dispatcher: CudagraphDispatcher,
        inputs: InputBuffers,
        parts: ForwardParts,
        runtime: GraphRuntime,
        options: Mapping[str, Any],
    ) -> None:
        self.dispatcher, self.inputs, self.parts, self.runtime = dispatcher, inputs, parts, runtime
        # If an op cannot be captured, the model runs with the PIECEWISE graphs of its regions.
        has_full = dispatcher.mode.has_mode(CUDAGraphMode.FULL)
        self._model = model
        self._options = {
            **options,
            "mode": CUDAGraphMode.FULL_AND_PIECEWISE if has_full else dispatcher.mode,
            "splitting_ops": [*parts.splitting_ops(), *options.get("splitting_ops", ())],
            "outputs": "view",
            "runtime": runtime,
            # A step through Dynamo may reach code that was not captured. A rank that captured it during the step would
            # keep the other ranks waiting.
            "lazy_capture": parts.num_ranks is None and options.get("on_moved_input") != "error",
        }
        self.settings = Settings.of(self._options)  #: the validated options
        self.fallbacks = Fallbacks(runtime, self.settings.on_fallback)  #: reports batches without a graph
        if parts.hooks is not None and self.settings.policy.compare:
            raise _not_with_offloading("compare=True", "debug=True, which runs the same steps eagerly")
        self.modules = modules_of(model)  #: all modules of the model, as of the last capture
        self.recompile()

    def recompile(self) -> None:
        """Compile the model and its module hooks again, and forget what its first run has shown."""
        self.compiled = torch.compile(entry_of(self._model), backend="cgpass", options=self._options)
        self._recipe: Recipe | None = None
        self._checked: set[Any] = set()

    def find_modules(self) -> None:
        """Update :attr:`modules` to the model's current modules."""
        self.modules = modules_of(self._model)

    def buffer_bytes(self) -> int:
        """Bytes of the input and output buffers."""
        return self.inputs.num_bytes() + (0 if self._recipe is None else self._recipe.num_bytes())

    def sizes_of(self, key: BatchDescriptor) -> dict[str, int]:
        """The padded size of each key field; without a request count in the key, the largest number of requests."""
        sizes = {**self.inputs.largest, "num_tokens": key.num_tokens}
        if "num_reqs" in sizes and key.num_reqs is not None:
            sizes["num_reqs"] = key.num_reqs
        if any(size > self.inputs.largest[field] for field, size in sizes.items()):
            raise OptionError(
                f"the key {key} does not fit the buffers",
                expected=f"at most {self.inputs.largest}",
                found=str(sizes),
                remedy="declare the inputs for the dispatcher's largest size (InputSpec.shape)",
            )
        return sizes

    def prepared(self, inputs: PaddedInputs, key: BatchDescriptor, mode: CUDAGraphMode) -> Any:
        """Reset inputs and synchronize hooks for a capture or a first run; returns metadata of example requests."""
        self.inputs.blank()  # guard: manager_blank_capture
        self.inputs.fill(None, self.inputs.real(inputs.sizes, inputs))
        if self.parts.hooks is not None:
            self.parts.hooks.sync_prev_onload()
        return self.parts.metadata(self.parts.example(key, self.dispatcher.uniform_decode_query_len), key, mode)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_of(self, args: Sequence[Any]) -> ModelState | None:
        """The state of the model that a graph with these arguments reads; None if it reads tensors kept elsewhere."""
        own = self.inputs.storages()
        others = [value for value in args if isinstance(value, torch.Tensor) and storage_id(value) not in own]
        return ModelState.of_arguments(self.modules, others)

    @contextlib.contextmanager
    def restoring_state(self, *, is_step: bool = False) -> Iterator[None]:
        """Save the model's tensors, its Python state and the random numbers, and restore them after the body.

        In a step the model's Python code runs only if steps go through Dynamo; otherwise its state is not saved.
        """
        recipe = self.recipe()
        modules = () if is_step and recipe.why_through_dynamo is None else self.modules
        with restoring(recipe.state, recipe.generators, self.inputs.device), restoring_python_state(modules):
            yield

    # -- graphs that keep tokens and requests apart -------------------------------------------------------------------

    def check_graphs(self, reached: Reached, inputs: PaddedInputs) -> None:
        """Check that each graph of a run keeps tokens and requests apart; a graph is checked once.

        The last call of ``reached`` may not have returned.
        """
        if all(call.callable in self._checked for call in reached):
            return
        called = self._model.forward if isinstance(self._model, torch.nn.Module) else self._model
        unpassed = inspect.signature(called).parameters.keys() - self.inputs.tensors.keys()
        graphs = symbols_of(reached, by_tensor(inputs.buffers), inputs.sizes)
        for number, (callable_, symbols) in enumerate(graphs):
            if callable_ not in self._checked:  # guard: manager_mixing_later_graphs
                if number:  # guard: manager_mixing_between_graphs
                    refuse_tensors_between(callable_, symbols, PythonState.of(self.modules))
                refuse_mixing(callable_, symbols, self.parts.mixing_ops(), unpassed)
                self._checked.add(callable_)

    # -- the first run ------------------------------------------------------------------------------------------------

    def recipe(self) -> Recipe:
        """How results are cut and built; the first call runs the model without a graph and allocates output buffers.

        In that run the sizes of all key fields differ, because torch gives two equal sizes the same symbol.
        """
        if self._recipe is None:
            with self.inputs.restoring():  # the caller may have written a batch to the buffers
                self._recipe, never_full = self._learned()
            why = self._recipe.why_through_dynamo
            if why is not None:
                self.runtime.warn(f"every step goes through Dynamo's guards: {why}", why.remedy)
            if never_full is not None and self.dispatcher.mode.has_mode(CUDAGraphMode.FULL):
                self.fallbacks.report_never_full(never_full)
                query_len = self.dispatcher.uniform_decode_query_len
                self.dispatcher.initialize_keys(CUDAGraphMode.PIECEWISE, query_len)
        return self._recipe

    def _learned(self) -> tuple[Recipe, Reason | None]:
        """Run the model; returns its recipe, and why it cannot have FULL graphs, or None."""
        keys = [key for _, keys in self.dispatcher.capture_plan() for key in keys]
        for key in keys:
            self.sizes_of(key)
        num_tokens = max((key.num_tokens for key in keys), default=self.inputs.largest["num_tokens"])
        if num_tokens == self.inputs.largest.get("num_reqs"):
            num_tokens += -1 if num_tokens > _LEAST_SYMBOLIC else 1
        sizes = {**self.inputs.largest, "num_tokens": num_tokens}
        with self._run_once(sizes) as run:
            if len(run.reached) == 1:
                return self._recipe_of(run)
        # Inputs of the second graph get symbolic sizes only after Dynamo has seen a second size.
        with self._run_once({field: size + (-1 if size > _LEAST_SYMBOLIC else 1) for field, size in sizes.items()}):
            pass
        with self._run_once(sizes) as run:
            return self._recipe_of(run)

    @contextlib.contextmanager
    def _run_once(self, sizes: Sizes) -> Iterator[_FirstRun]:
        """Run the model at these sizes over example inputs, without a graph; the effects are undone after the body."""
        parts, inputs, none = self.parts, self.inputs.at(sizes), CUDAGraphMode.NONE
        metadata = self.prepared(inputs, BatchDescriptor(sizes["num_tokens"]), none)
        context = parts.context(metadata, inputs, none, None, sizes["num_tokens"])
        with self.runtime.scopes.opened() as scope, context, fields_named(parts.attention, metadata):
            first = self._first_entry(scope, inputs)
            is_split = any(call.callable.ends_early is not None for call in first)
            changed = self._changed_by(first, inputs, is_split=is_split)
            with restoring(*changed, self.inputs.device), restoring_python_state(self.modules) as state:
                for call in first:
                    refuse_side_effects(call.callable.side_effects, state)
                with parts.hooked(none):
                    versions = versions_of(inputs.buffers)
                    result = self.compiled(**inputs.arguments)
                    written = written_since(inputs.buffers, versions)
                    if not scope.reached:
                        raise nothing_reached(f"{sizes['num_tokens']} tokens")
                    for call in scope.reached:
                        refuse_side_effects(call.callable.side_effects, state)
                    # guard: manager_kept_between_graphs
                    refuse_stored_tensors(state, {id(tensor) for tensor in self._buffers()})
                    if parts.hooks is not None and len(scope.reached) != 1:
                        found = f"a model of {len(scope.reached)} graphs"
                        raise _not_with_offloading(found, "a model without graph breaks")
                    yield _FirstRun(inputs, result, scope.reached, frozenset(written))

    def _first_entry(self, scope: CaptureScope, inputs: PaddedInputs) -> Reached:
        """Call the model up to the entry of its first graph, the only call; empty if it enters no graph."""
        scope.stops_at_entry = True
        try:
            self.compiled(**inputs.arguments)
        except EnteredCallable as entered:
            return [ReachedCall(entered.reached, entered.args, (), None)]
        finally:
            scope.stops_at_entry = False
        return []

    def _changed_by(
        self, calls: Reached, inputs: PaddedInputs, *, is_split: bool
    ) -> tuple[list[torch.Tensor], list[torch.Generator]]:
        """The tensors, inputs excluded, and the random number generators that a run of these graphs may change.

        If the model is split into several graphs, Python code between them may change any of its buffers.
        """
        own = by_tensor(inputs.buffers)
        written = [call.args[position] for call in calls for position in call.callable.partition.mutated_inputs]
        state = {id(tensor): tensor for tensor in written if id(tensor) not in own}
        drawn = [value for call in calls for value in call.args if isinstance(value, torch.Generator)]
        if is_split:
            state |= {id(tensor): tensor for tensor in self._buffers()}
            stored = [value for module in self.modules for value in vars(module).values()]
            drawn += [value for value in stored if isinstance(value, torch.Generator)]
        return list(state.values()), list({id(generator): generator for generator in drawn}.values())

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for module in self.modules for buffer in module.buffers(recurse=False)]

    def _recipe_of(self, run: _FirstRun) -> tuple[Recipe, Reason | None]:
        reached, of_tensor = run.reached, by_tensor(run.inputs.buffers)
        self.check_graphs(reached, run.inputs)
        leaves, spec = trees.flatten(run.result)
        cuts = cuts_of(leaves, reached, of_tensor, run.inputs.sizes)
        sources = leaf_sources(leaves, reached, of_tensor)
        written = [call.args[position] for call in reached for position in call.callable.partition.mutated_inputs]
        mutated = run.written.union(of_tensor[id(value)].name for value in written if id(value) in of_tensor)
        is_split = len(reached) > 1  # guard: manager_several_graphs_state
        state, generators = self._changed_by(reached, run.inputs, is_split=is_split)
        self.inputs.pad_always(mutated)
        recipe = Recipe(
            spec=spec,
            build_result=trees.builder_of(spec),
            cuts=cuts,
            buffers=result_buffers(leaves, cuts, self.inputs.largest),
            sources=sources,
            why_through_dynamo=self._why_through_dynamo(reached, sources),
            mutated=mutated,
            state=tuple(state),
            generators=tuple(generators),
        )
        return recipe, next((call.callable.never_full for call in reached if call.callable.never_full), None)

    def _why_through_dynamo(self, reached: Reached, sources: LeafSources | str) -> Reason | None:
        if isinstance(sources, str):
            return Reason(sources, "return tensors of one graph alone: no graph break, no object made in forward")
        if self.settings.policy.compare:
            return Reason("compare=True", "leave compare out where speed matters: it runs each replay beside eager")
        effects = [effect for call in reached for effect in call.callable.side_effects]
        if effects:  # guard: manager_side_effects
            return Reason(f"the model {effects[0].text}", "keep that state in a buffer, or return it")
        if self.state_of(reached[0].args) is None:
            why = "it reads tensors that are neither arguments, parameters nor buffers"
            return Reason(why, "register them as buffers of the module, or pass them as arguments")
        return None


@dataclass(frozen=True, slots=True)
class _FirstRun:
    """One run of a model without a graph."""

    inputs: PaddedInputs
    result: Any  #: what the model returned
    reached: Reached  #: the calls of graphs, in order
    written: frozenset[str]  #: names of the inputs that the run wrote to, also between graphs


class GraphChecks:
    """Observes one step through Dynamo, and checks each graph before it runs.

    A model whose code has changed since the capture is compiled again in a step, and that graph is new.
    """

    def __init__(self, model: Model, inputs: PaddedInputs) -> None:
        self._model, self._inputs = model, inputs
        self._reached: list[ReachedCall] = []

    def entering(self, callable_: ReachedCallable, args: tuple[Any, ...]) -> None:
        """Check a graph that is about to run, together with those before it."""
        self._model.check_graphs([*self._reached, ReachedCall(callable_, args, (), None)], self._inputs)

    def returned(self, call: ReachedCall) -> None:
        """Keep a call whose outputs a later graph may read."""
        self._reached.append(call)


def nothing_reached(what: str) -> CaptureError:
    """A call of the model during a capture entered no compiled graph."""
    return CaptureError(
        f"nothing was captured for {what}",
        expected="a call that enters a compiled graph",
        found="none: the model returns its inputs as they are, Dynamo skips it, or Dynamo reached its recompile limit",
        remedy="let the model compute something; do not loop over a size that varies, or raise "
        "torch._dynamo.config.recompile_limit",
    )


def _not_with_offloading(found: str, expected: str) -> OptionError:
    return OptionError(
        "the offloader cannot copy weights in time for this model or option",
        expected=expected,
        found=found,
        remedy="use the expected model or option, or run the model without an offloader",
    )
