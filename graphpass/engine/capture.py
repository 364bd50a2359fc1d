"""How a manager captures: it learns what the model returns, then takes one key after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from graphpass.capture import CaptureScope, GraphRuntime
from graphpass.capture.fallbacks import Fallbacks
from graphpass.capture.layout import storage_id
from graphpass.compat import sideeffects, trees
from graphpass.context import entered, set_forward_context
from graphpass.dispatch import CudagraphDispatcher
from graphpass.engine.batch import AttentionMetadataBuilder
from graphpass.engine.buffers import OutputBuffers, Sizes, StepBuffers
from graphpass.engine.firstrun import FirstRun, model_state_kept
from graphpass.engine.hooks import ForwardHooks
from graphpass.engine.metadata import fields_named, slot_mapping_of
from graphpass.engine.mixing import refuse_mixing, refuse_tensors_between
from graphpass.engine.pythonstate import PythonState
from graphpass.engine.refusals import nothing_reached
from graphpass.engine.results import LeafSources, Reached, leaf_sources, symbols_of
from graphpass.engine.step import CapturedStep, Learned, PaddedInputs
from graphpass.errors import OptionError
from graphpass.keys import BatchDescriptor
from graphpass.ladder import DeviceMemory, Key, MemoryMeter
from graphpass.ladder.modelstate import ModelState, modules_of
from graphpass.ladder.owncode import entry_of
from graphpass.ladder.padding import PaddedBuffer, by_tensor
from graphpass.ladder.traffic import CapturedGraph
from graphpass.modes import CUDAGraphMode
from graphpass.options import Settings

__all__ = ["KeyCapturer"]

_LEAST_SYMBOLIC = 2
_NOTHING_OFFLOADED = contextlib.nullcontext()


class KeyCapturer:
    """Compiles a model and captures its keys over a manager's buffers.

    Args:
        model: what is compiled, called with one keyword argument for each input.
        dispatcher: its keys.
        inputs: the persistent input buffers.
        attention: makes metadata; None for a model without.
        runtime: owner of pool and statistics.
        options: the backend's, the manager's own left out.
        offloader: brings weights that lie in host memory; None for a model whose weights are on the device.
        num_ranks: data-parallel ranks that run the same keys; None without an agreement.

    Attributes:
        settings: the options, validated.
        fallbacks: what is said where there is no graph.
        modules: all modules of the model, as of the last capture.
        compiled: the model through Dynamo.
        meter: reads what a capture takes of the device's memory.
    """

    def __init__(
        self,
        model: Any,
        dispatcher: CudagraphDispatcher,
        inputs: StepBuffers,
        attention: AttentionMetadataBuilder | None,
        runtime: GraphRuntime,
        options: Mapping[str, Any],
        offloader: ForwardHooks | None = None,
        num_ranks: int | None = None,
    ) -> None:
        self._model, self._dispatcher, self._inputs = model, dispatcher, inputs
        self._attention, self._runtime = attention, runtime
        self._offloader, self._num_ranks = offloader, num_ranks
        splitting = [op for part in (attention, offloader) if part is not None for op in part.splitting_ops]
        # A model with an op that no graph can hold goes on with regions.
        has_full = dispatcher.mode.has_mode(CUDAGraphMode.FULL)
        given = {
            **options,
            "mode": CUDAGraphMode.FULL_AND_PIECEWISE if has_full else dispatcher.mode,
            "splitting_ops": [*splitting, *options.get("splitting_ops", ())],
            "outputs": "view",
            "runtime": runtime,
            # Where a step goes through Dynamo, it may reach other code than the one that was captured. Ranks that
            # capture in a step leave the others behind.
            "lazy_capture": num_ranks is None and options.get("on_moved_input") != "error",
        }
        self.settings = Settings.of(given)
        self.fallbacks = Fallbacks(runtime, self.settings.on_fallback)
        if offloader is not None and self.settings.policy.compare:
            raise _not_with_offloading("compare=True", "debug=True, which runs the same steps eagerly")
        self._options = given
        self.modules = modules_of(model)
        self._entry = entry_of(model)
        self.compiled = torch.compile(self._entry, backend="cgpass", options=given)
        self.meter: MemoryMeter = DeviceMemory(inputs.device, runtime)
        self._learned: Learned | None = None
        self._states: dict[Any, ModelState] = {}
        self._checked: set[Any] = set()
        self._shapes: dict[tuple[int, ...], PaddedInputs] = {}

    def forget(self) -> None:
        """Nothing is captured any more; the model is compiled and learned anew, hooks and all."""
        self._learned = None
        self._states.clear()
        self._checked.clear()
        self._entry = entry_of(self._model)
        self.compiled = torch.compile(self._entry, backend="cgpass", options=self._options)

    def buffer_bytes(self) -> int:
        """Bytes of the input and output buffers."""
        return self._inputs.num_bytes() + (0 if self._learned is None else self._learned.outputs.num_bytes())

    # -- learning ---------------------------------------------------------------------------------------------------

    def learn(self) -> Learned:
        """Run once, without a graph, to see what the model returns, and make buffers for it.

        The sizes of this run differ from each other: torch takes two sizes that are equal by chance for one symbol.
        """
        if self._learned is None:
            with self._inputs.kept():  # an engine may have written its batch there
                self._learned, never_full = self._first_run()
            if self._learned.why_through_dynamo is not None:
                self._runtime.note(f"every step goes through Dynamo's guards: {self._learned.why_through_dynamo}")
            if never_full is not None:
                self._give_up_full(never_full)
        return self._learned

    def _first_run(self) -> tuple[Learned, str | None]:
        """What a first run teaches, and why there is no FULL, or None."""
        keys = [key for _, keys in self._dispatcher.capture_plan() for key in keys]
        for key in keys:
            self._key_sizes(key)
        num_tokens = max((key.num_tokens for key in keys), default=self._inputs.largest["num_tokens"])
        if num_tokens == self._inputs.largest.get("num_reqs"):
            num_tokens += -1 if num_tokens > _LEAST_SYMBOLIC else 1
        sizes = {**self._inputs.largest, "num_tokens": num_tokens}
        with self._run_once(sizes) as run:
            if len(run.reached) == 1:
                return self._learned_from(run)
        # What the second graph takes is symbolic once Dynamo has seen another size of it.
        with self._run_once({field: size + (-1 if size > _LEAST_SYMBOLIC else 1) for field, size in sizes.items()}):
            pass
        with self._run_once(sizes) as run:
            return self._learned_from(run)

    @contextlib.contextmanager
    def _run_once(self, sizes: Sizes) -> Iterator[FirstRun]:
        """Run at these sizes without a graph, over example inputs; when the body is left, the run is undone."""
        inputs, num_tokens = self.inputs_at(sizes), sizes["num_tokens"]
        metadata = self._prepared(inputs, BatchDescriptor(num_tokens), CUDAGraphMode.NONE)
        context = self.context_of(metadata, inputs, CUDAGraphMode.NONE, None, num_tokens)
        with self._runtime.scopes.opened() as scope, context, fields_named(self._attention, metadata):
            run = FirstRun(self.compiled, inputs, scope, self.modules, self._inputs.device)
            with run.undone(), self.onloaded(CUDAGraphMode.NONE):
                run.run()
                if self._offloader is not None and len(run.reached) != 1:
                    found = f"a model of {len(run.reached)} graphs"
                    raise _not_with_offloading(found, "a model without graph breaks")
                yield run

    def _learned_from(self, run: FirstRun) -> tuple[Learned, str | None]:
        self._check_graphs(run.reached, run.inputs)
        recipe = run.recipe()
        leaves = trees.flatten(run.result)[0]
        sources = leaf_sources(leaves, run.reached, by_tensor(run.inputs.buffers))
        never_full = next((c.never_full for c, _, _ in run.reached if c.never_full is not None), None)
        why = self._why_through_dynamo(run.side_effects, sources, run.reached[0][1])
        self._inputs.pad_always(recipe.mutated)
        outputs = OutputBuffers.like(leaves, recipe.cuts, self._inputs.largest)
        return Learned(recipe, outputs, None if isinstance(sources, str) else sources, why), never_full

    def _check_graphs(self, reached: Reached, inputs: PaddedInputs) -> None:
        """Ask each graph that a run has entered for the first time whether it leaves tokens and requests apart."""
        declared = () if self._attention is None else self._attention.splitting_ops
        symbols = symbols_of(reached, by_tensor(inputs.buffers), inputs.sizes)
        for number, ((callable_, _, _), of_graph) in enumerate(zip(reached, symbols, strict=True)):
            if callable_ not in self._checked:
                if number:
                    refuse_tensors_between(callable_, of_graph, PythonState.of(self.modules))
                refuse_mixing(callable_, of_graph, declared)
                self._checked.add(callable_)

    def state_kept(self, *, is_step: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Undo what runs in the body do to the model's tensors, to its Python state, and to random numbers.

        Args:
            is_step: the body is a step of a model that was learned, not a capture: Python of the model runs only where
                steps go through Dynamo.
        """
        learned = self.learn()
        modules = () if is_step and learned.why_through_dynamo is None else self.modules
        return model_state_kept(modules, learned.recipe.state, learned.recipe.generators, self._inputs.device)

    def _why_through_dynamo(
        self, side_effects: Sequence[sideeffects.SideEffect], sources: LeafSources | str, args: Sequence[Any]
    ) -> str | None:
        if isinstance(sources, str):
            return sources
        if self.settings.policy.compare:
            return "compare=True"
        if side_effects:
            return f"the model {side_effects[0].text}"
        if self._state_of(args) is None:
            return "it reads tensors that are neither arguments, parameters nor buffers"
        return None

    def _state_of(self, args: Sequence[Any]) -> ModelState | None:
        """The model behind a graph with these arguments; None where it reads tensors that no module keeps."""
        own = self._inputs.storages()
        kept = [value for value in args if isinstance(value, torch.Tensor) and storage_id(value) not in own]
        return ModelState.of_arguments(self.modules, kept)

    def _give_up_full(self, reason: str) -> None:
        if not self._dispatcher.mode.has_mode(CUDAGraphMode.FULL):
            return
        self.fallbacks.report_never_full(reason)
        self._dispatcher.initialize_keys(CUDAGraphMode.PIECEWISE, self._dispatcher.uniform_decode_query_len)

    # -- capturing --------------------------------------------------------------------------------------------------

    def _prepared(self, inputs: PaddedInputs, key: BatchDescriptor, mode: CUDAGraphMode) -> Any:
        """Fill the inputs with valid entries and make example metadata: what a capture, or a first run, reads."""
        self._inputs.blank()
        self._inputs.fill(None, inputs.sizes, inputs.buffers)
        if self._offloader is not None:
            self._offloader.sync_prev_onload()
        if self._attention is None:
            return None
        query_len = self._dispatcher.uniform_decode_query_len if key.uniform else None
        example = self._attention.example(key, query_len=query_len)
        return self._attention.build(example, key if mode is CUDAGraphMode.FULL else None)

    def capture(self, key: Key) -> tuple[CapturedStep, CapturedGraph]:
        """Capture one key inside an open scope, and learn how to replay it past Dynamo.

        That it is captured is for the caller to tell the dispatcher.
        """
        mode, descriptor = key
        learned, scope = self.learn(), self._runtime.scopes.current()
        assert scope is not None
        inputs = self.inputs_at(self._key_sizes(descriptor))
        before, started = self.meter.reading(), time.perf_counter()
        scope.reached.clear()
        scope.plans.clear()
        is_direct = learned.why_through_dynamo is None
        scope.prepare = partial(self._prepared, inputs, descriptor, mode)
        scope.keep_results = self._end_of_forward(learned, inputs) if is_direct or self._offloader else None
        try:
            metadata = scope.prepare()
            context = self.context_of(metadata, inputs, mode, descriptor, descriptor.num_tokens)
            with context, self.onloaded(mode), fields_named(self._attention, metadata):
                result = self.compiled(**inputs.arguments)
        finally:
            scope.prepare = scope.keep_results = None
        if not scope.reached:
            raise nothing_reached(f"{mode} {descriptor}")
        self._check_graphs(scope.reached, inputs)
        # Python that a branch on the size adds has to run, though the first run had none.
        is_direct = is_direct and not any(callable_.side_effects for callable_, _, _ in scope.reached)
        step = self._key_step(scope, inputs, result) if is_direct else CapturedStep(inputs, (), None, False, None)
        scope.reached.clear()  # it holds results, which keep their pool memory
        elapsed = time.perf_counter() - started
        return step, CapturedGraph(mode, descriptor, elapsed, self.meter.reading() - before)

    def _end_of_forward(self, learned: Learned, inputs: PaddedInputs) -> Callable[[list[Any]], list[Any]]:
        """What ends a forward that is captured as a whole, inside of the capture."""

        def end(flat: list[Any]) -> list[Any]:
            if self._offloader is not None:
                self._offloader.join_after_forward()
            return learned.keep(inputs, flat) if learned.why_through_dynamo is None else flat

        return end

    def _key_step(self, scope: CaptureScope, inputs: PaddedInputs, result: Any) -> CapturedStep:
        assert self._learned is not None
        leaves, spec = trees.flatten(result)
        sources = leaf_sources(leaves, scope.reached, by_tensor(inputs.buffers))
        if spec != self._learned.recipe.spec or _names_of(sources) != _names_of(self._learned.sources):
            raise self._learned.other_structure(str(spec))
        self.modules = modules_of(self._model)
        callable_, args, _ = scope.reached[0]
        state = self._states.get(callable_)
        if state is None or not state.serves(self.modules):
            state = self._state_of(args)
            assert state is not None
            self._states[callable_] = state
        plan = next((plan for plan in reversed(scope.plans) if plan.name == callable_.name), None)
        return CapturedStep(inputs, tuple(args), plan, callable_.returns_flat, state)

    def _key_sizes(self, key: BatchDescriptor) -> dict[str, int]:
        """The padded size of each field; all rows of an input by request, where the key names no number of them."""
        sizes = {**self._inputs.largest, "num_tokens": key.num_tokens}
        if "num_reqs" in sizes and key.num_reqs is not None:
            sizes["num_reqs"] = key.num_reqs
        if any(size > self._inputs.largest[field] for field, size in sizes.items()):
            raise OptionError(
                f"the key {key} does not fit the buffers",
                expected=f"at most {self._inputs.largest}",
                found=str(sizes),
                remedy="declare the inputs at the dispatcher's largest size",
            )
        return sizes

    def onloaded(self, mode: CUDAGraphMode) -> contextlib.AbstractContextManager[None]:
        """Around each forward, whatever runs or replays it: the layers' weights come in time."""
        if self._offloader is None:
            return _NOTHING_OFFLOADED
        return self._offloader.forward(replays=mode is CUDAGraphMode.FULL)

    def context_of(
        self,
        metadata: Any,
        inputs: PaddedInputs,
        mode: CUDAGraphMode,
        key: BatchDescriptor | None,
        num_tokens: int,
        num_tokens_across_dp: tuple[int, ...] | None = None,
    ) -> entered:
        """The forward context of one step; of one that all ranks make alike, where the tokens of each are not told."""
        alike = None if self._num_ranks is None else (num_tokens,) * self._num_ranks
        return set_forward_context(
            metadata,
            runtime_mode=mode,
            batch_descriptor=key,
            num_tokens=num_tokens,
            num_tokens_across_dp=alike if num_tokens_across_dp is None else num_tokens_across_dp,
            slot_mapping=slot_mapping_of(self._attention, metadata),
            is_padding=inputs.is_padding,
            extra=None if self._offloader is None else self._offloader.context,
        )

    def inputs_at(self, sizes: Sizes) -> PaddedInputs:
        """The model's inputs at these padded sizes, the same tensor objects in every call."""
        known = self._shapes.get(tuple(sizes.values()))
        if known is None:
            buffers = self._inputs.at(sizes)
            arguments = {name: buffer.tensor for name, buffer in buffers.items()}
            known = PaddedInputs(dict(sizes), buffers, arguments, self._inputs.is_padding(sizes["num_tokens"]))
            self._shapes[tuple(sizes.values())] = known
        return known


def _not_with_offloading(found: str, expected: str) -> OptionError:
    return OptionError(
        "offloaded weights cannot be brought in time",
        expected=expected,
        found=found,
        remedy="leave it out, or run the model without an offloader",
    )


def _names_of(sources: LeafSources | str | None) -> Any:
    """Sources that can be compared between keys: buffers of one input by its name."""
    if not isinstance(sources, tuple):
        return sources
    return [source.name if isinstance(source, PaddedBuffer) else source for source in sources]
