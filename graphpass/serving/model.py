"""A compiled model over a manager's buffers, and what its first run without a graph shows.

The first run is a call over example inputs, whose effects are undone. At the entry of the first graph Dynamo has
compiled it, so the tensors that the graph writes to and the changes of Python state are known before anything has run.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpass.capture.modelstate import (
    ModelState,
    PythonState,
    entry_of,
    modules_of,
    refuse_side_effects,
    refuse_stored_tensors,
    restoring_python_state,
)
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import CallObserver, ReachedCall
from graphpass.capture.settings import replay_settings, restoring
from graphpass.capture.staging import storage_id
from graphpass.compat import nnmodules, trees
from graphpass.compat.subclasses import plain_tensors
from graphpass.context import ForwardContext, entered
from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.errors import CaptureError, ContextError, OptionError, did_you_mean
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import Reason
from graphpass.options import Fallbacks, Settings
from graphpass.paddedcalls import versions_of, written_since
from graphpass.saved.calls import SavedCalls
from graphpass.serving.batch import AttentionMetadataBuilder, ForwardHooks
from graphpass.serving.buffers import InputBuffers, PaddedInputs, RealInputs, Sizes
from graphpass.serving.recipe import (
    FollowedSizes,
    LeafSources,
    Reached,
    Recipe,
    cuts_of,
    leaf_sources,
    refuse_mixing,
    refuse_tensors_between,
    result_buffers,
)
from graphpass.serving.tokenmixing import ProvedUncompiled, proved_uncompiled

_LEAST_SYMBOLIC = 2
_SMALL_BYTES = 1 << 20
_LEARNED_AT = 7  # tokens of the first run where every key has one; parts of two would have sizes without a symbol
_PYTHON_AROUND = Reason("Python code of the model runs before or after its graph", "remove the graph break")
_NO_DEFAULT = inspect.Parameter.empty
_NO_HOOKS = contextlib.nullcontext()


class Model:
    """A compiled model and its input buffers; it runs once before the first capture, and its graphs are checked."""

    def __init__(
        self,
        model: Any,
        dispatcher: CudagraphDispatcher,
        inputs: InputBuffers,
        runtime: GraphRuntime,
        options: Mapping[str, Any],
        attention: AttentionMetadataBuilder | None,
        hooks: ForwardHooks | None,
        num_ranks: int | None,
    ) -> None:
        self.dispatcher, self.inputs, self.runtime = dispatcher, inputs, runtime
        self.attention = attention  #: None for a model without attention metadata
        self.hooks = hooks  #: move weights around each forward; None if all weights are on the device
        self._num_ranks = num_ranks  # data-parallel ranks that run the same steps; None without an agreement
        eager_ops = [op for part in (attention, hooks) if part is not None for op in part.splitting_ops]
        # If an op cannot be captured, the model runs with the PIECEWISE graphs of its regions.
        has_full = dispatcher.mode.has_mode(CUDAGraphMode.FULL)
        self._model = model
        self._options = {
            **options,
            "mode": CUDAGraphMode.FULL_AND_PIECEWISE if has_full else dispatcher.mode,
            "splitting_ops": [*eager_ops, *options.get("splitting_ops", ())],
            "outputs": "view",
            "runtime": runtime,
            # A step through Dynamo may reach code that was not captured. A rank that captured it during the step would
            # keep the other ranks waiting.
            "lazy_capture": num_ranks is None and options.get("on_moved_input") != "error",
        }
        self.settings = Settings.of(self._options)  #: the validated options
        self.fallbacks = Fallbacks(runtime, self.settings.on_fallback)  #: reports batches without a graph
        if hooks is not None and self.settings.policy.compare:
            raise _not_with_offloading(
                "compare=True", "a dispatcher of mode 'NONE', which runs the same steps without graphs"
            )
        self.modules = modules_of(model)  #: all modules of the model, as of the last capture
        self.recompile()

    def recompile(self) -> None:
        """Compile the model and its module hooks again, and forget what its first run has shown."""
        function = entry_of(self._model)
        #: Dynamo's work for calls of the model, saved with ``warm_start``
        self.saved = SavedCalls(self._model, ("model",), "cgpass", self._options, None)
        with replay_settings():
            self.saved.load(function, tuple(self.inputs.tensors))
        self.uncompiled = function  #: the model as it is
        self._entry = nnmodules.code_name(function.__code__)  # of a graph that begins where the call does
        self.compiled = torch.compile(function, backend="cgpass", options=self._options)
        self._recipe: Recipe | None = None
        self._proved: ProvedUncompiled | None = None  # where one token alone is compiled
        self._checked: set[Any] = set()
        self._with_saved_calls: set[Any] = set()

    def save_call(self, inputs: PaddedInputs, reached: Reached) -> None:
        """Save Dynamo's work for a call with these inputs, which has reached these callables; each once."""
        new = {call.callable for call in reached} - self._with_saved_calls
        if new:  # guard: saved_calls_once
            self._with_saved_calls |= new
            self.saved.save(entry_of(self._model), tuple(self.inputs.tensors), (), inputs.arguments)

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
        RealInputs(self.inputs, inputs.sizes, inputs).fill(None)
        if self.hooks is not None:
            self.hooks.sync_prev_onload()
        return self.metadata(self.example(key), key, mode)

    # -- one forward --------------------------------------------------------------------------------------------------

    def example(self, key: BatchDescriptor) -> Any:
        """Example requests on scratch pages, in place of :attr:`Batch.attention`; None without attention."""
        if self.attention is None:
            return None
        query_len = self.dispatcher.uniform_decode_query_len if key.uniform else None
        return self.attention.example(key, query_len=query_len)

    def metadata(self, attention: Any, key: BatchDescriptor | None, mode: CUDAGraphMode) -> Any:
        """The attention metadata of one forward; in FULL mode the object that the key's graph reads."""
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
        *,
        observer: CallObserver | None = None,
    ) -> entered:
        """The forward context of one forward, which has no ``key`` in a first run.

        ``num_tokens`` of this rank are real ones, and of every rank by default.
        """
        alike = None if self._num_ranks is None else (num_tokens,) * self._num_ranks
        return entered(
            ForwardContext(
                attn_metadata=metadata,
                runtime_mode=mode,
                batch_descriptor=key,
                num_tokens=num_tokens,
                num_tokens_across_dp=alike if num_tokens_across_dp is None else num_tokens_across_dp,
                slot_mapping=self._slot_mapping_of(metadata),
                is_padding=inputs.is_padding,
                extra=None if self.hooks is None else self.hooks.context,
                observer=observer,
            )
        )

    def _slot_mapping_of(self, metadata: Any) -> Any:
        if metadata is None:
            return None
        try:
            return metadata["slot_mapping"] if isinstance(metadata, Mapping) else metadata.slot_mapping
        except (AttributeError, KeyError) as error:
            place = "the manager reads it for the forward context"
            raise _missing(self.attention, metadata, "slot_mapping", place) from error

    def hooked(self, mode: CUDAGraphMode) -> contextlib.AbstractContextManager[None]:
        """The hooks' context manager for one forward in this mode; does nothing without hooks."""
        return _NO_HOOKS if self.hooks is None else self.hooks.forward(replays=mode is CUDAGraphMode.FULL)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_of(self, args: Sequence[Any]) -> ModelState | None:
        """The state of the model that a graph with these arguments reads; None if it reads tensors kept elsewhere."""
        own = self.inputs.storages()
        others = [value for value in args if isinstance(value, torch.Tensor) and storage_id(value) not in own]
        return ModelState.of_arguments(self.modules, others)

    @contextlib.contextmanager
    def restoring_state(self, *, is_step: bool = False) -> Iterator[None]:
        """Save the model's tensors, its Python state and the random numbers, and restore them after the body.

        In a step without Dynamo no Python code of the model runs.
        """
        recipe = self.recipe()
        modules = () if is_step and recipe.why_through_dynamo is None else self.modules
        with restoring(recipe.state, recipe.generators, self.inputs.device), restoring_python_state(modules):
            yield

    @contextlib.contextmanager
    def learning_writes(self, inputs: PaddedInputs) -> Iterator[Callable[[Reached], None]]:
        """Undo what a capture in the body writes; yields what adds to the recipe what its first graph writes.

        That of the first run may have written less, or to other tensors, or been the whole model. One with Python
        around its graph may write to all of its buffers.
        """
        if self.recipe().why_through_dynamo is not None:
            yield lambda calls: None
            return
        with contextlib.ExitStack() as undo:  # Python state is restored after all captures
            undo.enter_context(restoring(self._small_buffers(), [], self.inputs.device))
            yield lambda calls: self._learn_writes(calls, inputs, undo)

    def _learn_writes(self, calls: Reached, inputs: PaddedInputs, undo: contextlib.ExitStack) -> None:
        recipe, is_split = self.recipe(), not self.is_whole(calls)
        state, generators = self._changed_by(calls, inputs)
        names, first = self._written_inputs(calls, inputs), set(map(id, recipe.state[: recipe.num_state]))
        late = [tensor for tensor in state if id(tensor) not in first]
        new = [tensor for tensor in late if not any(tensor is one for one in recipe.state)]
        if new or is_split or not names <= recipe.mutated:  # guard: manager_writes_of_sizes
            self.inputs.pad_always(names)
            if is_split:
                self._warn_of_dynamo(_PYTHON_AROUND)
            self._recipe = replace(
                recipe,
                why_through_dynamo=_PYTHON_AROUND if is_split else None,  # guard: manager_python_around_graphs_of_sizes
                mutated=recipe.mutated | names,
                state=(*recipe.state, *new),
            )
        undo.enter_context(restoring(late, generators, self.inputs.device))  # guard: manager_state_of_sizes

    @staticmethod
    def _written_inputs(calls: Reached, inputs: PaddedInputs) -> frozenset[str]:
        by_graphs = {id(value) for call in calls for value in _written_by(call)}
        return frozenset(name for name, own in inputs.arguments.items() if id(own) in by_graphs)

    # -- graphs that keep tokens and requests apart -------------------------------------------------------------------

    def is_whole(self, reached: Reached) -> bool:
        """Whether a call of the model was one graph, without Python code before or after it."""
        starts_and_ends = [(call.callable.code, call.callable.ends_early) for call in reached]
        return starts_and_ends == [(self._entry, None)]

    def check_graphs(self, inputs: PaddedInputs, reached: Reached) -> None:
        """Check that each graph of a run keeps tokens and requests apart, once.

        The last call may not have returned. Graphs are new where some sizes or changed code have their own.
        """
        if all(call.callable in self._checked for call in reached):
            return
        called = self._model.forward if isinstance(self._model, torch.nn.Module) else self._model
        unpassed = inspect.signature(called).parameters.keys() - self.inputs.tensors.keys()
        declared = () if self.attention is None else self.attention.splitting_ops
        followed = FollowedSizes(inputs)
        for number, call in enumerate(reached):
            symbols = followed.symbols_of(call)
            if call.callable not in self._checked:  # guard: manager_mixing_later_graphs
                # guard: manager_mixing_between_graphs
                if number or call.callable.code != self._entry:
                    refuse_tensors_between(call.callable, symbols, PythonState.of(self.modules))
                refuse_mixing(call.callable, symbols, declared, unpassed)
                self._checked.add(call.callable)

    # -- the first run ------------------------------------------------------------------------------------------------

    def recipe(self, *, beyond_one: bool = False) -> Recipe:
        """How results are cut and built; the first call runs the model without a graph and allocates output buffers.

        In that run the sizes of all key fields differ, because torch gives two equal sizes the same symbol. If a batch
        has one request, every key one token, and it is proved that the model may run uncompiled, it is compiled for one
        token alone, until ``beyond_one`` is set.
        """
        if self._recipe is None or (beyond_one and self._proved is not None):
            with self.inputs.restoring():  # the caller may have written a batch to the buffers
                self._recipe = self._learned(beyond_one)
            why, never_full = self._recipe.why_through_dynamo, self._recipe.never_full
            if why is not None:
                self._warn_of_dynamo(why)
            if never_full is not None and self.dispatcher.mode.has_mode(CUDAGraphMode.FULL):
                self.fallbacks.report_never_full(never_full)
                query_len = self.dispatcher.uniform_decode_query_len
                self.dispatcher.initialize_keys(CUDAGraphMode.PIECEWISE, query_len)
        return self._recipe

    def _warn_of_dynamo(self, why: Reason) -> None:
        self.runtime.warn(f"every step goes through Dynamo's guards: {why}", why.remedy)

    def _learned(self, beyond_one: bool) -> Recipe:
        keys = [key for _, keys in self.dispatcher.capture_plan() for key in keys]
        for key in keys:
            self.sizes_of(key)
        largest = self.inputs.largest["num_tokens"]
        num_tokens = max((key.num_tokens for key in keys), default=largest)
        self._proved = None if num_tokens > 1 or beyond_one else self._proved_uncompiled()
        if num_tokens == 1 and self._proved is None:
            # Attention may refuse more tokens than the largest batch has; the buffers have two more.
            most = largest if self.attention is not None else max(largest, _LEAST_SYMBOLIC)
            num_tokens = min(_LEARNED_AT, most)  # guard: learned_from_several_tokens
        if num_tokens == self.inputs.largest.get("num_reqs") and num_tokens > 1:
            num_tokens += -1 if num_tokens > _LEAST_SYMBOLIC else 1
        sizes = {**self.inputs.largest, "num_tokens": num_tokens}
        learned = self._run_once(sizes, most_graphs=1)
        if learned is None:
            # Inputs of the second graph get symbolic sizes only after Dynamo has seen a second size.
            others = {field: size + (-1 if size > _LEAST_SYMBOLIC else 1) for field, size in sizes.items()}
            self._run_once(others, most_graphs=0)
            learned = self._run_once(sizes)
        assert learned is not None, "a run of however many graphs has a recipe"
        return learned

    def _proved_uncompiled(self) -> ProvedUncompiled | None:
        """The proof that batches of one request may run uncompiled; None beside hooks, ranks and saved starts, too."""
        largest = self.inputs.largest
        if self.saved.used is not None:
            return None  # guard: uncompiled_unsaved
        has_one_request = self.dispatcher.max_num_reqs == 1 == largest.get("num_reqs", 1)
        if not has_one_request or largest["num_tokens"] == 1 or self.hooks is not None or self._num_ranks is not None:
            return None  # guard: uncompiled_single_requests
        sizes, none = {**largest, "num_tokens": min(_LEARNED_AT, largest["num_tokens"])}, CUDAGraphMode.NONE
        inputs = self.inputs.at(sizes)
        metadata = self.prepared(inputs, BatchDescriptor(sizes["num_tokens"]), none)
        with self.context(metadata, inputs, none, None, sizes["num_tokens"]):
            return proved_uncompiled(
                self._model, inputs, () if self.attention is None else self.attention.splitting_ops
            )

    def runs_uncompiled(self, num_tokens: int, num_reqs: int) -> bool:
        """Whether a batch without a graph runs uncompiled: a proof is about it, and one token alone is compiled."""
        self.recipe()
        # guard: uncompiled_several_requests
        return self._proved is not None and num_reqs == 1 and self._proved(self._model, num_tokens)

    def _run_once(self, sizes: Sizes, *, most_graphs: float = math.inf) -> Recipe | None:
        """The recipe of a run at these sizes over example inputs, undone; None of more than ``most_graphs`` graphs."""
        inputs, none = self.inputs.at(sizes), CUDAGraphMode.NONE
        metadata = self.prepared(inputs, BatchDescriptor(sizes["num_tokens"]), none)
        with contextlib.ExitStack() as undo:
            # Python code of the model may run before its first graph.
            undo.enter_context(restoring(self._small_buffers(), [], self.inputs.device))  # guard: manager_first_entry
            state = undo.enter_context(restoring_python_state(self.modules))

            def entering(calls: Reached) -> None:
                if len(calls) == 1:
                    refuse_side_effects(calls[0].callable.side_effects, state)
                    undo.enter_context(restoring(*self._changed_by(calls, inputs), self.inputs.device))

            reached = (observer := CallObserver(self.runtime, entering)).reached
            context = self.context(metadata, inputs, none, None, sizes["num_tokens"], observer=observer)
            versions = versions_of(inputs.arguments)
            with self.runtime.scopes.opened(), context, fields_named(self.attention, metadata), self.hooked(none):
                try:
                    result = self.compiled(**inputs.arguments)
                except TypeError as error:
                    _refuse_names(self._model, list(inputs.arguments), error)
                    raise
                written = written_since(inputs.arguments, versions)
                if not reached:
                    raise nothing_reached(f"{sizes['num_tokens']} tokens")
                self.save_call(inputs, reached)
                for call in reached:
                    refuse_side_effects(call.callable.side_effects, state)
                # guard: manager_kept_between_graphs
                refuse_stored_tensors(state, {id(tensor) for tensor in self._buffers()})
                if self.hooks is not None and len(reached) != 1:
                    found = f"a model of {len(reached)} graphs"
                    raise _not_with_offloading(found, "a model without graph breaks")
                return None if len(reached) > most_graphs else self._recipe_of(inputs, result, reached, written)

    def _changed_by(self, calls: Reached, inputs: PaddedInputs) -> tuple[list[torch.Tensor], list[torch.Generator]]:
        """The tensors, inputs excluded, and the random number generators that a run of these graphs may change.

        Python code around graphs may change any buffer.
        """
        own = {id(tensor) for tensor in inputs.arguments.values()}
        state = {id(tensor): tensor for call in calls for tensor in _written_by(call) if id(tensor) not in own}
        drawn = [value for call in calls for value in call.args if isinstance(value, torch.Generator)]
        if not self.is_whole(calls):  # guard: manager_several_graphs_state
            state |= {id(tensor): tensor for tensor in self._plain_buffers()}
            stored = [value for module in self.modules for value in vars(module).values()]
            drawn += [value for value in stored if isinstance(value, torch.Generator)]
        return list(state.values()), list({id(generator): generator for generator in drawn}.values())

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer for module in self.modules for buffer in module.buffers(recurse=False)]

    def _plain_buffers(self) -> list[torch.Tensor]:
        return [plain for buffer in self._buffers() for _, plain in plain_tensors(buffer)]

    def _small_buffers(self) -> list[torch.Tensor]:
        """The buffers that Python code beside a graph may count in; not those of quantized weights, which are large."""
        return [buffer for buffer in self._plain_buffers() if buffer.nbytes <= _SMALL_BYTES]

    def _recipe_of(self, inputs: PaddedInputs, result: Any, reached: Reached, written: Collection[str]) -> Recipe:
        """The recipe of a run that wrote to the inputs in ``written``, also between its graphs."""
        self.check_graphs(inputs, reached)
        leaves, spec = trees.flatten(result)
        cuts, sources = cuts_of(leaves, reached, inputs), leaf_sources(leaves, reached, inputs)
        mutated = frozenset(written) | self._written_inputs(reached, inputs)
        state, generators = self._changed_by(reached, inputs)
        self.inputs.pad_always(mutated)
        return Recipe(
            spec=spec,
            build_result=trees.builder_of(spec),
            cuts=cuts,
            buffers=result_buffers(leaves, cuts, self.inputs.largest),
            sources=sources,
            why_through_dynamo=self._why_through_dynamo(reached, sources),
            mutated=mutated,
            state=tuple(state),
            num_state=len(state),
            generators=tuple(generators),
            never_full=next((call.callable.never_full for call in reached if call.callable.never_full), None),
        )

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


class fields_named:  # noqa: N801 - a context manager, named like one
    """Translate the error of an op that reads a missing field of ``metadata`` into a ContextError with the builder."""

    __slots__ = ("_builder", "_metadata")

    def __init__(self, builder: AttentionMetadataBuilder | None, metadata: Any) -> None:
        self._builder, self._metadata = builder, metadata

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or self._metadata is None:
            return
        for cause in _chain(error):
            field = _field_of(cause, self._metadata)
            if field is not None:
                place = nnmodules.place_of_failure(cause) or "read while the model runs"
                raise _missing(self._builder, self._metadata, field, place) from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _field_of(error: BaseException, metadata: Any) -> str | None:
    if isinstance(error, AttributeError) and error.obj is metadata:  # guard: manager_metadata_fields
        return str(error.name)
    is_key = isinstance(error, KeyError) and isinstance(metadata, Mapping) and len(error.args) == 1
    return str(error.args[0]) if is_key and error.args[0] not in metadata else None


def _missing(builder: object, metadata: Any, field: str, place: str) -> ContextError:
    return ContextError(
        f"attention metadata has no field {field!r}",
        expected=f"{type(builder).__name__}.build() to return every field that the model's attention reads",
        found=f"a {type(metadata).__name__} without it; {place}",
        remedy=f"add {field!r} to {type(metadata).__name__}, for steps with a key and without",
    )


def _written_by(call: ReachedCall) -> list[Any]:
    return [call.args[position] for position in call.callable.partition.mutated_inputs]


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


def _refuse_names(model: Any, names: list[str], error: TypeError) -> None:
    signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as unfit:
        needed = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
        missing = [name for name in needed if name not in names and signature.parameters[name].default is _NO_DEFAULT]
        unknown = [name for name in names if name not in needed]
        declared = f"declare {missing[0]!r} with an InputSpec of that name" if missing else "leave it out"
        raise OptionError(
            "the declared inputs are not the arguments of the model",
            expected=", ".join(needed),
            found=f"{', '.join(names)}: {unfit}",
            remedy=did_you_mean(unknown[0], needed, otherwise=declared) if unknown else declared,
        ) from error
