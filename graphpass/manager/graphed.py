"""The three-line form: a model that dispatches, pads, replays and cuts by itself."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphpass import compat
from graphpass.capture import EnteredCallable, GraphRuntime
from graphpass.capture.loop import capture_progress, quietly
from graphpass.capture.outputs import clone_pool_tensors
from graphpass.context import set_forward_context
from graphpass.dispatch import CudagraphDispatcher, Dispatch, DispatchReason
from graphpass.dispatch.ladder import least_padded_to
from graphpass.errors import CaptureError, ShapeError
from graphpass.keys import BatchDescriptor
from graphpass.manager.buffers import BufferSet, KeyInputs
from graphpass.manager.fallbacks import Fallbacks
from graphpass.manager.guards import entry_of, local_values, modules_of
from graphpass.manager.keyrun import KeyRun, learn_key, nothing_reached
from graphpass.manager.learned import SharedDims, candidate_dims, shared_dims, stand_in, trace_sizes
from graphpass.manager.padding import PadRule, by_tensor, checked_rule, versions_of, written_since
from graphpass.manager.paddingcheck import PaddedCall, compare_with_unpadded, poisoned
from graphpass.manager.signature import CallSignature
from graphpass.manager.traffic import Traffic
from graphpass.modes import CUDAGraphMode
from graphpass.tables import Report

__all__ = ["GraphedModel", "graphed"]


def graphed(
    model: Callable[..., Any],
    capture_sizes: Sequence[int] | Mapping[str, Sequence[int]],
    dynamic_dims: Mapping[str, int | Mapping[int, str]],
    *,
    padding: Mapping[str, PadRule] | None = None,
    cut: Mapping[int | str, Mapping[int, str]] | None = None,
    mode: str | CUDAGraphMode = "FULL",
    check_padding: bool = True,
    poison: bool = False,
    **options: Any,
) -> GraphedModel:
    """Run ``model`` over CUDA graphs: each call is padded to a captured size, replayed, and cut back.

    Args:
        model: a module or function of tensors; it runs under ``no_grad``.
        capture_sizes: padded sizes to capture, or {key field: sizes} for several dimensions.
        dynamic_dims: {argument: dimension}, or {argument: {dimension: key field}}. Other arguments whose dimensions
            carry the same symbol are found.
        padding: {argument: rule}; zeros where nothing is said. See :data:`graphpass.manager.padding.PadRule`.
        cut: {output: {dimension: key field}} for outputs whose symbolic shape does not say it; an output is its index
            in the flattened result, or its key in a dict.
        mode: ``FULL``, ``PIECEWISE``, or a pair.
        check_padding: run each key's first padded call once more, without padding and graph, and compare.
        poison: replay every padded call with other contents, NaN among them, in the padding of the arguments that
            ``padding`` does not name, and compare real rows bit for bit. For tests: it multiplies the work.
        options: the backend's, see :func:`cgpass.options`.

    Raises:
        OptionError: an option, a size or a rule cannot be used.
    """
    checks: dict[str, Any] = {"check_padding": check_padding, "poison": poison}
    return GraphedModel(model, capture_sizes, dynamic_dims, padding=padding, cut=cut, mode=mode, **checks, **options)


class GraphedModel:
    """See :func:`graphed`. Call it like the model; it owns its input buffers and, unless given one, its runtime.

    Copied or pickled it is the model, without graphs; attributes it does not have itself are the model's.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        capture_sizes: Sequence[int] | Mapping[str, Sequence[int]],
        dynamic_dims: Mapping[str, int | Mapping[int, str]],
        *,
        padding: Mapping[str, PadRule] | None = None,
        cut: Mapping[int | str, Mapping[int, str]] | None = None,
        mode: str | CUDAGraphMode = "FULL",
        check_padding: bool = True,
        poison: bool = False,
        runtime: GraphRuntime | None = None,
        **options: Any,
    ) -> None:
        # Not at the top: whoever imports cgpass first (its entry point does) is importing graphpass from within it.
        from cgpass.settings import Settings

        self.runtime = runtime if runtime is not None else GraphRuntime()
        given = {
            # The dispatcher says what has a graph: one that was dropped with a tensor it read is captured anew.
            "lazy_capture": options.get("on_moved_input") != "error",
            **options,
            "mode": mode,
            "capture_sizes": capture_sizes,
            "dynamic_dims": dynamic_dims,
            "runtime": self.runtime,
        }
        self._settings = Settings.of(given)
        self._dims = self._settings.dynamic_dims
        self._ladders = self._settings.capture_sizes
        self._signature = CallSignature(model, self._dims, self._ladders)
        self._signature.refuse_unknown("padding", padding or {})
        self._rules = {name: checked_rule(name, rule) for name, rule in (padding or {}).items()}
        self._cut = dict(cut or {})
        self._model = model
        self._modules = modules_of(model)
        # A model with an op that no graph can hold goes on with regions, so whoever asks for FULL gets both levels.
        asks_for_full = self._settings.mode.has_mode(CUDAGraphMode.FULL)
        self._options = {**given, "mode": CUDAGraphMode.FULL_AND_PIECEWISE} if asks_for_full else given
        self._entry = entry_of(model)
        self._compiled = torch.compile(self._entry, backend="cgpass", options=self._options)
        self._has_graph_breaks = False
        self._dispatcher = self._new_dispatcher(self._settings.mode)
        self._shared: SharedDims | None = None
        self._refuted: set[tuple[str, int]] = set()
        self._buffers: BufferSet | None = None
        self._inputs: dict[BatchDescriptor, KeyInputs] = {}
        self._runs: dict[tuple[CUDAGraphMode, BatchDescriptor], KeyRun] = {}
        self._checks_padding = check_padding
        self._poisons = poison
        self._checked: set[tuple[CUDAGraphMode, BatchDescriptor]] = set()
        self._traffic = Traffic()
        self._fallbacks = Fallbacks(self.runtime, self._settings.on_fallback)
        # The buffers are filled before the runtime hands out the pool, so calls of one model take turns from the start.
        self._turn = threading.RLock()

    # -- what users call ------------------------------------------------------------------------------------------

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture every key, largest first, with a progress bar; the example's sizes do not matter.

        Args:
            *args: an example call, each declared dimension at least 1.
            **kwargs: the same.

        Raises:
            CaptureError: a key could not be captured; it names the key.
        """
        with self._turn, quietly():
            given = self._signature.bind(args, kwargs)
            self._learn(given)
            plan = [(mode, key) for mode, keys in self._dispatcher.capture_plan() for key in keys]
            with self.runtime.capturing(), capture_progress(plan) as progress:
                for mode, key in progress:
                    progress.set_postfix_str(f"{mode} {key}")
                    if (mode, key) not in self._runs:
                        self._capture_key(mode, key, given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments, over a graph where one fits."""
        with self._turn, quietly():
            given = self._signature.bind(args, kwargs)
            sizes = self._signature.sizes(given)
            step = self._dispatch(sizes)
            if step.mode and (self._shared is None or self._is_refuted(given, sizes)):
                self._learn(given)
                step = self._dispatch(sizes)
            if not step.mode:
                self._traffic.saw(step, sizes, None)
                return self._without_key(step, given)
            if self._is_out_of_reach(step.mode, step.descriptor, given):
                self._traffic.saw(replace(step, mode=CUDAGraphMode.NONE), sizes, None)
                return self._without_graph(given)
            self._traffic.saw(step, sizes, self._dispatcher.fields(step.descriptor))
            return self._replay(step.mode, step.descriptor, given, sizes)

    def report(self) -> Report:
        """Regions with reasons, keys with counts, dispatches with real and padded sizes, notes, bytes."""
        return Report((*self._traffic.tables(), *self.runtime.report().tables))

    def close(self) -> None:
        """Drop all graphs and buffers and give the pool back; it can be captured again."""
        with self._turn:
            self.runtime.close()
            self._forget()

    def __getattr__(self, name: str) -> Any:
        # What it does not have itself (state_dict, parameters, config) is the model's.
        if name == "_model":  # asked for before __init__ has run
            raise AttributeError(name)
        return getattr(self._model, name)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        # Graphs and their memory cannot be copied: a copy, pickled or not, is the model's.
        return (_model_itself, (self._model,))

    # -- dispatch --------------------------------------------------------------------------------------------------

    def _new_dispatcher(self, mode: CUDAGraphMode) -> CudagraphDispatcher:
        sizes = self._ladders["num_tokens"] if set(self._ladders) == {"num_tokens"} else self._ladders
        largest = math.prod(max(ladder) for ladder in self._ladders.values())
        return CudagraphDispatcher(mode, sizes, max_num_reqs=largest, lazy=True)

    def _dispatch(self, sizes: Mapping[str, int]) -> Dispatch:
        if set(sizes) == {"num_tokens"}:
            return self._dispatcher.dispatch(sizes["num_tokens"])
        return self._dispatcher.dispatch(
            sizes.get("num_tokens"),
            num_reqs=sizes.get("num_reqs"),
            extra=tuple((name, size) for name, size in sizes.items() if name not in ("num_tokens", "num_reqs")),
        )

    # -- where there is no graph -----------------------------------------------------------------------------------

    def _without_key(self, step: Dispatch, given: Mapping[str, Any]) -> Any:
        if step.reason is DispatchReason.EMPTY:
            return self._model(**given)
        self._fallbacks.report(
            f"no graph for {step.descriptor}: {step.reason}; it runs compiled, without a graph",
            CaptureError(
                "this batch has no graph, and on_fallback is 'error'",
                expected=f"sizes within {dict(self._ladders)}",
                found=f"{step.descriptor} ({step.reason})",
                remedy="add a larger capture size, or set on_fallback='warn'",
            ),
            once_for=str(step.reason),
        )
        return self._without_graph(given)

    def _is_out_of_reach(self, mode: CUDAGraphMode, key: BatchDescriptor, given: Mapping[str, Any]) -> bool:
        """Whether Dynamo, at its recompile limit, would run the model past the backend: nothing could be captured."""
        if (mode, key) in self._runs:
            return False
        arguments = local_values(self._entry, self._key_inputs(key, given).arguments())
        if not compat.is_past_recompile_limit(self._entry, arguments):
            return False
        self._fallbacks.report(
            f"no graph for {key}: Dynamo is at its recompile limit and no longer calls the backend",
            CaptureError(
                f"{mode} {key} cannot be captured, and on_fallback is 'error'",
                expected="at most torch._dynamo.config.recompile_limit compilations of the model",
                found="one more, past Dynamo's recompile limit: it would run the model as it is",
                remedy="give dynamic_dims every dimension that varies, raise the limit, or set on_fallback='warn'",
            ),
            once_for="recompile limit",
        )
        return True

    def _without_graph(self, given: Mapping[str, Any]) -> Any:
        with set_forward_context():
            return self._compiled(**given)

    # -- learning -----------------------------------------------------------------------------------------------------

    def _learn(self, given: Mapping[str, Any]) -> None:
        """Trace once, without running anything, to see which dimensions of which arguments carry a key field."""
        if self._shared is not None:
            return
        sizes = self._signature.sizes(given)
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        candidates = {
            name: {dim: field for dim, field in dims.items() if (name, dim) not in self._refuted}
            for name, dims in candidate_dims(self._dims, tensors, sizes).items()
        }
        try:
            reached = self._traced(given, tensors, candidates)
        except Exception as error:
            if not compat.came_from_tracing(error):
                raise
            # What has size 1 may have to keep it (a mask that is broadcast over heads).
            candidates = {n: {d: f for d, f in dims.items() if sizes[f] != 1} for n, dims in candidates.items()}
            reached = self._traced(given, tensors, candidates)
        self._shared = shared_dims(reached.partition, self._dims, candidates, tensors)
        largest = {field: max(ladder) for field, ladder in self._ladders.items()}
        self._buffers = BufferSet(self._shared.by_argument, largest, self._rules)
        if reached.never_full is not None and self._settings.mode.has_mode(CUDAGraphMode.FULL):
            self._fallbacks.report_never_full(reached.never_full)
            self._dispatcher = self._new_dispatcher(CUDAGraphMode.PIECEWISE)

    def _forget(self) -> None:
        self._shared = self._buffers = None
        self._inputs.clear()
        self._runs.clear()
        self._checked.clear()
        self._dispatcher.forget_captured()

    def _is_refuted(self, given: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
        """Whether this call shows that an argument is not padded after all; what was captured is dropped then."""
        assert self._shared is not None
        refuted = self._shared.refuted_by(given, sizes)
        for name, dim in refuted:
            field = self._shared.by_position[name][dim]
            self.runtime.note(f"dimension {dim} of input {name!r} is not {field} after all: captured anew")
        if refuted:
            self._refuted.update(refuted)
            self._forget()
        return bool(refuted)

    def _traced(
        self, given: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], candidates: Mapping[str, Mapping[int, str]]
    ) -> Any:
        """The first callable that a call with stand-ins for the arguments reaches."""
        sizes = trace_sizes(self._signature.sizes(given), self._ladders)
        stand_ins = {name: stand_in(t, {**candidates, **self._dims}[name], sizes) for name, t in tensors.items()}
        reached = self._reached_first({**given, **stand_ins})
        if reached.ends_early is not None and not self._has_graph_breaks:
            # Later graphs take intermediate tensors: only dynamic=True makes their sizes symbols from the first call.
            self._has_graph_breaks = True
            self._compiled = torch.compile(self._entry, backend="cgpass", dynamic=True, options=self._options)
            reached = self._reached_first({**given, **stand_ins})
        return reached

    def _reached_first(self, traced: Mapping[str, Any]) -> Any:
        largest = max((key for _, keys in self._dispatcher.capture_plan() for key in keys), key=lambda k: k.num_tokens)
        mode = next(iter(self._dispatcher.capture_plan()))[0]
        context = set_forward_context(runtime_mode=mode, batch_descriptor=largest)
        with self.runtime.scope_opened() as scope, context:
            scope.stops_at_entry = True
            try:
                self._compiled(**traced)
            except EnteredCallable as entered:
                return entered.reached
        raise CaptureError(
            "nothing of the model could be captured",
            expected="a model that torch.compile hands to the backend, called without gradients",
            found="a call that entered no compiled graph",
            remedy="see torch._logging.set_logs(graph_breaks=True); a model that never reaches the backend stays eager",
        )

    # -- keys ------------------------------------------------------------------------------------------------------

    def _key_inputs(self, key: BatchDescriptor, given: Mapping[str, Any]) -> KeyInputs:
        made = self._inputs.get(key)
        if made is None:
            assert self._buffers is not None
            self._signature.check_complete(given)
            made = self._inputs[key] = self._buffers.inputs(self._dispatcher.fields(key), given)
        return made

    def _capture_key(self, mode: CUDAGraphMode, key: BatchDescriptor, given: Mapping[str, Any]) -> None:
        if self._is_out_of_reach(mode, key, given):
            return
        inputs = self._key_inputs(key, given)
        # As much padding as a call at this key can have: what padding changes shows then.
        sizes = {field: least_padded_to(size, self._ladders[field]) for field, size in inputs.padded.items()}
        example = inputs.cut(inputs.stretched(given), sizes)
        with inputs.forward(self.runtime, mode, key, sizes):
            inputs.fill(example, sizes)
            leaves, run = self._graphed_call(mode, key, inputs)
            if self._needs_padding_check(mode, key, inputs, sizes):
                self._check_padding(mode, key, inputs, run, example, sizes, run.cut(leaves, example, sizes))

    def _replay(
        self, mode: CUDAGraphMode, key: BatchDescriptor, given: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> Any:
        inputs = self._key_inputs(key, given)
        # The buffers are filled within the forward: a replay on another stream may still be reading them.
        with inputs.forward(self.runtime, mode, key, sizes):
            if not self._settings.policy.clones_outputs:
                # A view that an earlier call returned may come back as an argument, and this replay overwrites it.
                given = dict(zip(given, self.runtime.without_stale(list(given.values())), strict=True))
            inputs.fill(given, sizes)
            run = self._runs.get((mode, key))
            if run is not None:
                run.refuse_shared_memory(given)
            if run is None or (run.direct is not None and not run.direct.guards.hold(self._modules)):
                with self._capturing():
                    leaves, run = self._graphed_call(mode, key, inputs)
                run.refuse_shared_memory(given)
            else:
                leaves = self._replayed(inputs, run)
            needs_check = self._needs_padding_check(mode, key, inputs, sizes)
            leaves = run.cut(leaves, given, sizes)
            if needs_check and not self._settings.policy.clones_outputs:  # replays follow before the caller reads
                leaves = clone_pool_tensors(leaves, self.runtime.forward_pool_storages())
            for name in run.mutated:
                given[name].copy_(inputs.buffers[name].real(sizes))
            if needs_check:
                self._check_padding(mode, key, inputs, run, given, sizes, leaves)
            if self._settings.policy.debug and not self._settings.policy.clones_outputs:
                leaves = self.runtime.watched(leaves, self.runtime.forward_pool_storages(), "graphed")
        return run.build_result(leaves)

    def _replayed(self, inputs: KeyInputs, run: KeyRun) -> list[Any]:
        """The leaves of one captured call over what the buffers hold."""
        if run.direct is not None:
            return run.direct.run()
        leaves, spec = compat.tree_flatten(self._compiled(**inputs.arguments()))
        if spec != run.spec:
            raise ShapeError(
                "the model returned another structure than at capture",
                expected=str(run.spec),
                found=str(spec),
                remedy="return the same structure in every call",
            )
        return list(leaves)

    def _needs_padding_check(
        self, mode: CUDAGraphMode, key: BatchDescriptor, inputs: KeyInputs, sizes: Mapping[str, int]
    ) -> bool:
        is_new = self._checks_padding and (mode, key) not in self._checked
        return (is_new or self._poisons) and sizes != inputs.padded

    def _check_padding(
        self,
        mode: CUDAGraphMode,
        key: BatchDescriptor,
        inputs: KeyInputs,
        run: KeyRun,
        given: Mapping[str, Any],
        sizes: Mapping[str, int],
        returned: Sequence[Any],
    ) -> None:
        """See :mod:`graphpass.manager.paddingcheck`."""
        call = PaddedCall(
            key=f"{mode} {key}",
            inputs=inputs,
            given=given,
            sizes=sizes,
            written=run.mutated,
            state=run.state,
            generators=run.generators,
            returned=returned,
            cut_as_told=run.declared,
            replay=lambda: run.cut(self._replayed(inputs, run), given, sizes),
        )
        why_not = run.why_not_repeated
        if why_not is None and self._poisons:
            poisoned(call, self._rules)
        if self._checks_padding and (mode, key) not in self._checked:
            why_not = why_not or compare_with_unpadded(call, self._model)
            self._checked.add((mode, key))
        if why_not is not None:
            text = f"whether padding changes real rows is not checked: {why_not}"
            if self._poisons:
                self._fallbacks.warn_once(text, once_for=text)
            self.runtime.note(text)

    def _capturing(self) -> contextlib.AbstractContextManager[Any]:
        scope = self.runtime.scope()
        return contextlib.nullcontext(scope) if scope is not None else self.runtime.scope_opened()

    def _graphed_call(self, mode: CUDAGraphMode, key: BatchDescriptor, inputs: KeyInputs) -> tuple[list[Any], KeyRun]:
        """Run a key through Dynamo inside a capture scope, and learn from the callables it reached."""
        scope = self.runtime.scope()
        assert scope is not None
        scope.reached.clear()
        versions = versions_of(inputs.buffers)
        result = self._compiled(**inputs.arguments())
        if not scope.reached:
            raise nothing_reached(f"{mode} {key}")
        self._modules = modules_of(self._model)
        run = learn_key(
            result,
            scope.reached,
            by_tensor(inputs.buffers),
            padded=self._dispatcher.fields(key),
            declared_cuts=self._cut,
            entry=self._entry,
            arguments=inputs.arguments(),
            written=written_since(inputs.buffers, versions),
            modules=self._modules,
        )
        if run.direct is None:
            self.runtime.note(f"calls go through Dynamo's guards, tens of microseconds each: {run.why_not_direct}")
        self._runs[mode, key] = run
        return compat.tree_flatten(result)[0], run


def _model_itself(model: Any) -> Any:
    return model
