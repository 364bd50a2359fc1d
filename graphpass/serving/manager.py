"""The manager runs any batch of a model over captured graphs.

A step dispatches the batch to a key, copies its inputs into persistent buffers, and replays the key's graph without
Dynamo, see Note [Steps without Dynamo].
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from graphpass.capture.modelstate import modules_of
from graphpass.capture.replay import without_grad
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import CallObserver
from graphpass.capture.settings import replay_settings
from graphpass.compat import operators, processgroups, trees
from graphpass.context import entered
from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.dispatch.dispatchkeys import Dispatch, DispatchReason
from graphpass.errors import OptionError, ShapeError, positive
from graphpass.keys import BatchDescriptor, CUDAGraphMode, resolve_mode
from graphpass.ledger import Ledger, Row, uncounted
from graphpass.paddedcalls import run
from graphpass.ranks.conversation import IDLE_TOKENS, AgreedSteps
from graphpass.ranks.decision import AgreedStep
from graphpass.ranks.group import DataParallelAgreement
from graphpass.ranks.lockstep import Lockstep, LockstepGroups
from graphpass.report import Report
from graphpass.serving.batch import AttentionMetadataBuilder, Batch, ForwardHooks, InputSpec
from graphpass.serving.buffers import InputBuffers, PaddedInputs, RealInputs, Sizes
from graphpass.serving.captured import CapturedKey, CapturedKeys, Checked, ServedStep
from graphpass.serving.estimate import Key, MemoryEstimate
from graphpass.serving.model import Model, fields_named
from graphpass.serving.recipe import Recipe, StepResults
from graphpass.serving.stats import ManagerStats
from graphpass.serving.traffic import Traffic

_OWN_OPTIONS = ("mode", "capture_sizes", "dynamic_dims", "outputs", "runtime", "lazy_capture")


class CudaGraphManager:
    """Runs any batch of a model over the graphs of a dispatcher's keys.

    Args:
        model: a module or function, called with one keyword argument for each input.
        dispatcher: lists the keys to capture and chooses one for each batch. The manager marks keys as captured.
        inputs: the model's tensor inputs, each with its shape at the largest batch.
        attention: builds the metadata that the model's attention reads from the forward context; None for a model
            without attention metadata. Its ``support`` may lower the dispatcher's mode.
        runtime: owner of the graph pool and the statistics; None: the manager creates one.
        agreement: data-parallel ranks that run the same steps, see
            :class:`graphpass.ranks.group.DataParallelAgreement`; None for a model without data parallelism.
        offloader: copies the weights of the model's layers from host memory, such as a
            :class:`graphpass.offload.WeightOffloader`; None if all weights are on the device.
        device: device of the buffers; None: that of the model's first parameter, or the CPU if it has none.
        options: options of the backend, see :func:`cgpass.options`. The manager sets mode, sizes and outputs itself.

    Attributes:
        runtime: owner of the graph pool and the statistics.
        dispatcher: lists the keys and chooses one for each batch.
        last_step: mode, padded shape and reason of the last run; None before the first run.

    Raises:
        OptionError: an option, an input or a size is not valid.
        GraphpassError: the offloader was created for another model or device.
    """

    def __init__(
        self,
        model: Any,
        dispatcher: CudagraphDispatcher,
        inputs: Sequence[InputSpec],
        *,
        attention: AttentionMetadataBuilder | None = None,
        runtime: GraphRuntime | None = None,
        agreement: DataParallelAgreement | None = None,
        offloader: ForwardHooks | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        own = next((name for name in sorted(options) if name in _OWN_OPTIONS), None)
        if own is not None:
            raise OptionError(
                f"option {own!r} is set by the manager",
                expected="other options of the backend: compiler, splitting_ops, on_fallback, on_moved_input, compare, "
                "...",
                found=f"{own}={options[own]!r}",
                remedy="leave it out: the dispatcher sets mode and sizes, and outputs are views of the manager's "
                "buffers",
            )
        self.runtime = runtime if runtime is not None else GraphRuntime()
        self.dispatcher = dispatcher
        self.model = model
        self.attention = attention
        modules = modules_of(model)
        if device is None:
            first = next((parameter for module in modules[:1] for parameter in module.parameters()), None)
            device = "cpu" if first is None else first.device
        self._inputs = InputBuffers(inputs, torch.device(device))
        if offloader is not None:
            offloader.check_model(modules, self._inputs.device)
        self._lower_mode()
        ranks = None if agreement is None else agreement.num_ranks
        self._model = Model(model, dispatcher, self._inputs, self.runtime, options, attention, offloader, ranks)
        self._ranks: AgreedSteps | None = None
        if agreement is not None:
            settings = self._model.settings
            configuration = {"on_fallback": settings.on_fallback, "compiler": settings.compiler}
            configuration["inputs"] = self._inputs.described()
            idle = min(IDLE_TOKENS, self._inputs.largest["num_tokens"])
            self._ranks = AgreedSteps(agreement, dispatcher, configuration, idle_tokens=idle)
        together: AgreedSteps | Lockstep | None = self._ranks
        #: seconds that a step may wait for other ranks; None if it waits for none
        self.timeout_s = None if agreement is None else agreement.timeout_s
        if self._model.settings.ranks is not None:
            together = together or self.runtime.owned(LockstepGroups).of()
            self.timeout_s = processgroups.timeout_s(None)
        self._captured = CapturedKeys(self._model, together, owns_runtime=runtime is None)
        self._fields = frozenset(dispatcher.capture_fields)
        self._ledger = Ledger()
        self._replays, self._fallbacks = (self._ledger.rows("steps", event) for event in ("replayed", "without graph"))
        self._sizes = self._ledger.sizes["num_tokens"]
        # Code of the user runs around each forward, whichever graph it replays.
        self._is_hooked = offloader is not None or any(callable(spec.padding) for spec in inputs)
        self.last_step: Dispatch | None = None
        self._turn = threading.RLock()

    # -- what users call ------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The input buffers at the largest batch, by name; after writing a batch here, pass ``inputs=None``."""
        return self._inputs.tensors

    def needs_capture(self) -> bool:
        """Whether a key of the dispatcher has no graph yet."""
        return bool(self._captured.missing())

    def capture(self, max_bytes: int | None = None) -> None:
        """Capture every key that has no graph: mixed batches, then uniform decode, each from the largest size down.

        Before the warm-up of a key, and again before its recording, the manager fills the inputs and builds example
        attention metadata: short sequences on scratch pages.

        Args:
            max_bytes: limit of the graph pool after the captures; None: no limit. An estimate (:meth:`estimate`)
                selects the keys that fit. Keys that do not fit are listed in ``stats().left_out``, and their batches
                run without a graph. If a key exceeds the limit despite the estimate, the pool is dropped and the
                other keys are captured again, so the pool may exceed the limit during one capture.

        Raises:
            CaptureError: all keys are captured already, or a key could not be captured; the error names the key.
            AgreementError: another rank could not capture its keys.
        """
        with self._turn, self._captured.together():
            self._captured.capture_missing(max_bytes)
            for _ in range(2):  # once more after it was compiled: then the bits are saved
                if self._captured.give_saved_bits(self._example_step):  # guard: saved_bits_of_managers
                    break
                self._captured.close()
                self._captured.capture_missing(max_bytes)

    def estimate(self) -> MemoryEstimate:
        """Estimate the device memory that the graphs of all keys need, by capturing at most three keys of each mode.

        These captures use temporary pools, which are released afterwards; existing graphs stay valid. The estimate is
        cached until the dispatcher's keys change or :meth:`close` is called. Like a capture, it overwrites the results
        of the last run, and no other callable of the runtime may run at the same time. Under an agreement every rank
        must call it.

        Raises:
            CaptureError: a key could not be captured; the error names the key.
            AgreementError: another rank could not capture a key.
        """
        with self._turn, self._captured.together():
            return self._captured.estimate()

    def recapture(self, max_bytes: int | None = None) -> None:
        """Drop all graphs and capture every key again, after weights were replaced or a setting of torch changed.

        Args:
            max_bytes: see :meth:`capture`.

        Raises:
            CaptureError, AgreementError: see :meth:`capture`.
        """
        self.close()
        self.capture(max_bytes)

    def adapt(self, max_sizes: int = 8) -> tuple[Key, ...]:
        """Capture graphs for each number of tokens that padding has served at least three times.

        Call it between requests: a size that the model is not compiled for, as a single token, is compiled first. Sizes
        come in the order of the tokens that padding has added. A size whose graph is no faster than the padded one, or
        whose capture fails, stays padded, and its graphs are dropped, unless other code shares the runtime. All such
        graphs of the process take at most ``graph_bytes``, and the pool at most the ``max_bytes`` of the last
        :meth:`capture`. Like a capture, it overwrites the results of the last run.

        Args:
            max_sizes: most sizes to capture now; a size has a graph for each value of the other key fields.

        Returns:
            (mode, key) of the new graphs.

        Raises:
            CaptureError: nothing has been captured yet, or a setting of torch differs from the capture.
            OptionError: ``max_sizes`` is below 1, or the manager has an agreement, whose ranks would differ in keys.
        """
        positive(max_sizes, "max_sizes")
        if not self._captured.is_alone:  # guard: adapted_alone
            raise OptionError(
                "ranks cannot adapt to their own traffic",
                expected="a manager of a process that runs alone",
                found="ranks in lockstep or under an agreement, which run the same keys",
                remedy="create the dispatchers of all ranks with these sizes (report().suggested_sizes())",
            )
        with self._turn:
            return self._captured.adapt(max_sizes, self._example_step)

    def run(self, batch: Batch) -> Any:
        """Run a batch: replay the graph of its key, or run the compiled model if no key fits.

        Returns:
            The model's result at real sizes. Its tensors are views of the manager's output buffers, which the next
            run overwrites.

        Raises:
            ShapeError: the batch is larger than the buffers, or its inputs or requests do not have its sizes.
            CaptureError: nothing has been captured yet, torch's settings differ from those of the capture, or the
                call is inside ``vmap``, ``grad`` or forward-mode AD.
            StaticInputError: weights were replaced, and ``on_moved_input`` is ``"error"`` or ranks agree on each step.
            ContextError: the attention metadata lacks a field that the model reads.
            AgreementError: another data-parallel rank failed, does not answer, or is configured differently; nothing
                has run.
        """
        return self._run_after({}, batch)

    def _run_after(self, checked: Checked, batch: Batch) -> Any:
        """:meth:`run`, where weights and settings are known to be those of the capture for the keys in ``checked``."""
        operators.refuse_transform("a manager", operators.active_transform())  # guard: manager_transforms
        with self._turn:
            return self._run(self._next(batch), batch, checked)

    def unattended(self) -> UnattendedSteps:
        """Steps of a loop in which nobody else has control between two of them, see :class:`UnattendedSteps`."""
        return UnattendedSteps(self)

    def run_idle(self) -> bool:
        """Take part in a step of the data-parallel ranks without a batch.

        If another rank has a batch, a dummy batch of the agreed size runs here: its inputs are padding, its attention
        metadata uses scratch pages, and the model's state is restored afterwards.

        Returns:
            Whether a rank has a batch; False without an agreement.

        Raises:
            AgreementError: as :meth:`run`.
            CaptureError: nothing has been captured yet.
            StaticInputError: weights were replaced.
        """
        with self._turn:
            if self._ranks is None:
                return False
            step = self._next(None)
            self._run(step, Batch(0), {})
            return step.is_dummy

    def stats(self) -> ManagerStats:
        """A snapshot of the captured keys, their memory and traffic, and the batches without a graph."""
        return ManagerStats(
            keys=tuple(Traffic.of(graph, self._replays) for graph in list(self._captured.costs.values())),
            fallbacks=MappingProxyType({reason: row.n for reason, row in self._fallbacks.items()}),
            fallback_tokens=sum(row.real for row in self._fallbacks.values()),
            left_out=self._captured.left_out,
            pool_bytes=self.runtime.pool_bytes(),
            buffer_bytes=self._model.buffer_bytes(),
            histogram=dict(self._sizes),
        )

    def report(self) -> Report:
        """What is slow or missing, which keys replay, where padding goes, and what it cost; ``print`` it."""
        adapts = self._captured.is_alone and bool(self._captured.recurring())
        return Report(self.stats().figures(self.runtime, type(self.model).__name__, adapts=adapts))

    def close(self) -> None:
        """Drop all graphs and release the pool. :meth:`capture` can be called again."""
        with self._turn:
            self._captured.close()

    # -- setting up -------------------------------------------------------------------------------------------------

    def _lower_mode(self) -> None:
        if self.attention is None:
            return
        query_len = self.dispatcher.uniform_decode_query_len
        mode, reason = resolve_mode(self.dispatcher.mode, self.attention.support, query_len=query_len, piecewise=True)
        if mode is not self.dispatcher.mode:
            remedy = f"create the dispatcher with mode {mode}, or use an attention with more support"
            self.runtime.warn(reason, remedy)
            self.dispatcher.initialize_keys(mode, query_len)

    # -- deciding ---------------------------------------------------------------------------------------------------

    def _next(self, batch: Batch | None) -> _NextStep:
        """Decide the next step, alone or with the other ranks; None if this rank has no batch, which only ranks ask."""
        if self._ranks is None:
            assert batch is not None, "a step without a batch needs other ranks"
            sizes = self._sizes_of(batch)
            return _NextStep(self.dispatcher.dispatch(**self._asked(batch)), sizes)
        decided = self._ranks.decide(lambda: self._proposed(batch))
        agreed = decided.agreed
        if decided.is_lower:
            text = f"all ranks run {decided.step.mode}, which is less than this rank could"
            self.runtime.warn(text, DispatchReason.AGREED.remedy, at=agreed.why)
        if batch is None or not decided.has_batch:
            return _NextStep(decided.step, dict.fromkeys(self._inputs.largest, 0), agreed, agreed.has_work)
        return _NextStep(decided.step, self._sizes_of(batch), agreed)

    def _asked(self, batch: Batch) -> dict[str, Any]:
        extra = batch.extra
        if self.attention is not None:
            # A field without capture sizes has one bound for all keys.
            extra = (*extra, *(pair for pair in self.attention.extra(batch.attention) if pair[0] in self._fields))
        return {
            "num_tokens": batch.num_tokens,
            "num_reqs": batch.num_reqs,
            "uniform_decode": batch.uniform_decode,
            "num_active_loras": batch.num_active_loras,
            "extra": extra,
        }

    def _proposed(self, batch: Batch | None) -> dict[str, Any] | None:
        """The dispatcher's arguments that this rank proposes; others do not wait for what fails here."""
        self._captured.refuse_unready()
        if batch is None or batch.num_tokens == 0:
            return None
        sizes = self._sizes_of(batch)
        if batch.inputs is not None:
            RealInputs(self._inputs, sizes, self._inputs.at(self._inputs.largest)).checked(batch.inputs)
        return self._asked(batch)

    def _sizes_of(self, batch: Batch) -> dict[str, int]:
        sizes = {}
        for field, largest in self._inputs.largest.items():
            size = batch.num_tokens if field == "num_tokens" else batch.num_reqs
            if type(size) is not int or not 0 <= size <= largest:
                raise ShapeError(
                    "the batch does not fit the buffers",
                    expected=f"{field} from 0 to {largest}",
                    found=f"{field}={size!r}",
                    remedy="split the batch, or declare larger inputs (InputSpec.shape)",
                )
            sizes[field] = size
        return sizes

    # -- running ----------------------------------------------------------------------------------------------------

    def _run(self, step: _NextStep, batch: Batch, checked: Checked) -> Any:
        decision = self.last_step = step.decision
        if step.is_dummy:
            model = self._model
            model.runtime.lease.order_after_last_forward()
            attention = model.example(decision.descriptor)
            with replay_settings(), model.restoring_state(is_step=True):  # guard: ranks_idle_state
                return self._run(step._replace(is_dummy=False), Batch(0, attention=attention), checked)
        if not decision.mode:
            checked.clear()
            return self._without_graph(step, batch)
        key = (decision.mode, decision.descriptor)
        captured = self._captured.of(key, checked)
        known = self._captured.steps_of(captured, step.sizes, self._replays[key])
        seen = self.runtime.given_up.watch() if captured.plan is None else None
        result = self._replayed(step, batch, captured, known, checked)
        self._sizes[batch.num_tokens] += 1
        # guard: steps_that_dynamo_runs_as_they_are
        if seen is not None and not self._model.fallbacks.report_uncompiled(seen):
            return result
        known.replays += 1
        row = known.row
        assert row is not None, "a step is served with the counts of its key"
        row.n += 1
        row.items += 1
        row.real += batch.num_tokens
        return result

    def _replayed(
        self, step: _NextStep, batch: Batch, captured: CapturedKey, known: ServedStep, checked: Checked
    ) -> Any:
        """The result of a step over the graph of a key; counts nothing."""
        decision, model, recipe = step.decision, self._model, captured.recipe
        with without_grad():
            if captured.is_bare and not self._is_hooked:  # no forward context is made, as the graph reads none
                return run(known, batch.inputs, model.runtime.lease, "a manager")
            mode, real = decision.mode, known.inputs
            if self._is_hooked or captured.plan is None or mode is not CUDAGraphMode.FULL:
                checked.clear()  # guard: attended_steps
            if captured.plan is None:
                leaves = self._forward(step, real, batch, partial(_stored, model, recipe))
                return known.results.of_step(batch.inputs, leaves)
            metadata, in_context = self._filled(step, real, batch)
            reads = None
            # guard: metadata_of_unattended_steps
            if metadata is not None and checked.get(captured) is metadata:
                reads = captured.beside_metadata
            elif captured in checked:
                checked[captured] = metadata
            with in_context as context, model.hooked(mode), fields_named(model.attention, metadata):
                lease = model.runtime.lease
                return run(known, batch.inputs, lease, "a manager", context=context, reads=reads, is_filled=True)

    def _example_step(self, key: Key, captured: CapturedKey, sizes: Sizes | None) -> Callable[..., Any]:
        """A step of a captured key, which is not counted: from inputs of these sizes, or None over padding alone."""
        mode, descriptor = key
        sizes = sizes or dict.fromkeys(self._inputs.largest, 0)
        step = _NextStep(Dispatch(mode, descriptor, DispatchReason.EXACT), sizes)
        attention = self._model.example(descriptor)
        known = self._captured.step_of_sizes(captured, sizes, Row())
        checked: Checked = {captured: None}
        rows = [row for row, _ in captured.plan.rows] if captured.plan is not None else []

        def run_example(inputs: Mapping[str, torch.Tensor] | None = None) -> Any:
            with uncounted(rows):
                batch = Batch(sizes["num_tokens"], inputs=inputs, attention=attention)
                return self._replayed(step, batch, captured, known, checked)

        return run_example

    def _without_graph(self, step: _NextStep, batch: Batch) -> Any:
        """Run the model over a batch at its real number of tokens; uncompiled if it is compiled for one token alone."""
        decision, model = step.decision, self._model
        if decision.reason is DispatchReason.NOT_CAPTURED:
            self._captured.refuse_none_captured()
        with replay_settings():
            is_uncompiled = model.runs_uncompiled(batch.num_tokens, batch.num_reqs or 1)
            needs_more = not is_uncompiled and batch.num_tokens != 1
            recipe = model.recipe(beyond_one=needs_more)  # guard: uncompiled_else_proved
        row = self._fallbacks[decision.reason]
        row.n += 1
        row.real += batch.num_tokens
        if batch.num_tokens:
            self._sizes[batch.num_tokens] += 1
        cause, why = (decision.reason, "") if step.agreed is None else (step.agreed.reason, step.agreed.why)
        if cause is not DispatchReason.EMPTY and cause is not DispatchReason.DISABLED:
            at = f"{decision.descriptor}, {why}" if why else str(decision.descriptor)
            compiled = "the batch runs compiled, without a graph"
            how = "the batch runs uncompiled and without a graph" if is_uncompiled else compiled
            model.fallbacks.report(
                f"{how}: {cause.explanation}",
                expected="a batch that fits a captured key",
                found=f"{decision.descriptor} ({decision.reason}): {why or cause.explanation}",
                remedy=decision.reason.remedy or DispatchReason.AGREED.remedy,
                at=at,
                is_recorded=True,
            )
        with replay_settings():
            if decision.reason is not DispatchReason.EMPTY:
                num_tokens, num_loras = batch.num_tokens or decision.descriptor.num_tokens, batch.num_active_loras
                key = BatchDescriptor(num_tokens, batch.num_reqs, has_lora=num_loras > 0, num_active_loras=num_loras)
                # Inputs with a request dimension have all their rows: regions are not compiled for each count.
                padded = self._inputs.at({**self._inputs.largest, "num_tokens": num_tokens})
                inputs = RealInputs(self._inputs, step.sizes, padded)
                call = partial(_uncompiled, model) if is_uncompiled else partial(_stored, model, recipe)
                result = self._forward(step._replace(decision=replace(decision, descriptor=key)), inputs, batch, call)
                if is_uncompiled:
                    inputs.copy_back(batch.inputs, recipe.mutated, recipe.buffers)
                    return trees.map_tensors(torch.Tensor.detach, result)
                return StepResults.of(recipe, inputs).of_step(batch.inputs, result)
            return recipe.result(recipe.views(step.sizes))

    def _filled(
        self, step: _NextStep, real: RealInputs, batch: Batch, observer: CallObserver | None = None
    ) -> tuple[Any, entered]:
        model, mode, descriptor = self._model, step.decision.mode, step.decision.descriptor
        model.runtime.lease.order_after_last_forward()  # a replay on another stream may still be reading the buffers
        real.fill(batch.inputs)
        metadata = model.metadata(batch.attention, descriptor, mode)
        across_dp = None if step.agreed is None else step.agreed.num_tokens_across_dp
        return metadata, model.context(
            metadata, real.padded, mode, descriptor, batch.num_tokens, across_dp, observer=observer
        )

    def _forward(self, step: _NextStep, real: RealInputs, batch: Batch, call: Callable[[PaddedInputs], Any]) -> Any:
        """Fill the buffers, and run code of the model, which ``call`` does, in a forward context."""
        model = self._model
        # guard: manager_mixing_in_steps
        observer = CallObserver(model.runtime, partial(model.check_graphs, real.padded))
        metadata, in_context = self._filled(step, real, batch, observer)
        with in_context, model.hooked(step.decision.mode), fields_named(model.attention, metadata), replay_settings():
            return call(real.padded)


def _stored(model: Model, recipe: Recipe, inputs: PaddedInputs) -> list[Any]:
    return recipe.store(model.compiled(**inputs.arguments), inputs.sizes)


def _uncompiled(model: Model, inputs: PaddedInputs) -> Any:
    return model.uncompiled(**inputs.arguments)  # guard: uncompiled_beyond_one


class UnattendedSteps:
    """Steps of a manager that follow each other: nobody but graphpass has control between two of them.

    The first step of a key compares weights, modules, settings and fields of attention metadata, as :meth:`run
    <CudaGraphManager.run>` always does; later ones do not, until :meth:`attended` or a step in which code of the model
    or of the user has run. The attention builder counts as code of the loop.
    """

    def __init__(self, manager: CudaGraphManager) -> None:
        self._manager = manager
        self._checked: Checked = {}

    def attended(self) -> None:
        """Somebody else has had control: the next step compares everything again."""
        self._checked.clear()  # guard: attended

    def run(self, batch: Batch) -> Any:
        """Run the next batch, see :meth:`CudaGraphManager.run`."""
        try:
            return self._manager._run_after(self._checked, batch)
        except BaseException:
            self._checked.clear()
            raise


class _NextStep(NamedTuple):
    decision: Dispatch  #: mode, padded shape and reason
    sizes: Sizes  #: the real size of each key field
    agreed: AgreedStep | None = None  #: the step of all ranks; None without an agreement
    is_dummy: bool = False  #: this rank has no batch, and runs a dummy batch because another rank has one
