"""The manager runs any batch of a model over captured graphs.

A step dispatches the batch to a key, copies its inputs into persistent buffers, and replays the key's graph without
Dynamo, see Note [Steps without Dynamo].
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.settings import replay_settings
from graphpass.compat import operators
from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.dispatch.keys import Dispatch, DispatchReason
from graphpass.engine.batch import AttentionMetadataBuilder, Batch, InputSpec
from graphpass.engine.buffers import Sizes, StepBuffers
from graphpass.engine.captured import CapturedLadder
from graphpass.engine.forward import ForwardParts
from graphpass.engine.hooks import ForwardHooks
from graphpass.engine.learn import ModelLearner
from graphpass.engine.model import CompiledModel
from graphpass.engine.refusals import (
    inside_transform,
    no_graph,
    refuse_options,
    too_large,
)
from graphpass.engine.stats import ManagerStats
from graphpass.engine.step import StepRunner
from graphpass.ladder.estimate import MemoryEstimate
from graphpass.ladder.modelstate import modules_of
from graphpass.ladder.traffic import Traffic
from graphpass.ledger import Ledger
from graphpass.modes import resolve_mode
from graphpass.ranks.conversation import IDLE_TOKENS, AgreedSteps, RankDecision
from graphpass.ranks.group import DataParallelAgreement
from graphpass.report import Report

__all__ = ["CudaGraphManager"]

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
        refuse_options(options, _OWN_OPTIONS)
        self.runtime = runtime if runtime is not None else GraphRuntime()
        self.dispatcher = dispatcher
        self.model = model
        self.attention = attention
        modules = modules_of(model)
        self._inputs = StepBuffers(inputs, _device_of(modules) if device is None else torch.device(device))
        if offloader is not None:
            offloader.check_model(modules, self._inputs.device)
        self._bound_mode()
        num_ranks = None if agreement is None else agreement.num_ranks
        parts = ForwardParts(attention, offloader, num_ranks)
        self._compiled = CompiledModel(model, dispatcher, self._inputs, parts, self.runtime, options)
        self._learner = ModelLearner(self._compiled)
        self._runner = StepRunner(self._compiled, self._learner)
        self._ranks = None if agreement is None else self._steps_of_ranks(agreement)
        self._fields = frozenset(dispatcher.capture_fields)
        self._captured = CapturedLadder(self._compiled, self._learner, self._ranks)
        self._ledger = Ledger()
        self._replays, self._fallbacks = (self._ledger.rows("steps", event) for event in ("replayed", "without graph"))
        self._sizes = self._ledger.sizes["num_tokens"]
        self.last_step: Dispatch | None = None
        self._turn = threading.RLock()

    def _steps_of_ranks(self, agreement: DataParallelAgreement) -> AgreedSteps:
        settings = self._compiled.settings
        configuration = {
            "inputs": self._inputs.described(),
            "on_fallback": settings.on_fallback,
            "compiler": settings.compiler,
        }
        idle_tokens = min(IDLE_TOKENS, self._inputs.largest["num_tokens"])
        return AgreedSteps(agreement, self.dispatcher, configuration, idle_tokens=idle_tokens)

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
        transform = operators.active_transform()
        if transform is not None:  # guard: manager_transforms
            raise inside_transform(transform)
        with self._turn:
            if self._ranks is None:
                sizes = self._sizes_of(batch)
                return self._run(self.dispatcher.dispatch(**self._asked(batch)), batch, sizes)
            decision = self._ranks.decide(lambda: self._proposed(batch))
            if not decision.has_batch:
                return self._run_dummy(decision)
            return self._run(decision.step, batch, self._sizes_of(batch), decision)

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
            decision = self._ranks.decide(lambda: self._proposed(None))
            self._run_dummy(decision)
            return decision.agreed.has_work

    def stats(self) -> ManagerStats:
        """A snapshot of the captured keys, their memory and traffic, and the batches without a graph."""
        return ManagerStats(
            keys=tuple(Traffic.of(graph, self._replays) for graph in self._captured.records.values()),
            fallbacks=MappingProxyType({reason: row.n for reason, row in self._fallbacks.items()}),
            fallback_tokens=sum(row.real for row in self._fallbacks.values()),
            left_out=self._captured.left_out,
            pool_bytes=self.runtime.pool_bytes(),
            buffer_bytes=self._learner.buffer_bytes(),
            histogram=dict(self._sizes),
        )

    def report(self) -> Report:
        """What is slow or missing, which keys replay, where padding goes, and what it cost; ``print`` it."""
        return Report(self.stats().figures(self.runtime, type(self.model).__name__))

    def close(self) -> None:
        """Drop all graphs and release the pool. :meth:`capture` can be called again."""
        with self._turn:
            self._captured.close()

    # -- setting up -------------------------------------------------------------------------------------------------

    def _bound_mode(self) -> None:
        """Lower the dispatcher's mode to one that the attention supports."""
        if self.attention is None:
            return
        query_len = self.dispatcher.uniform_decode_query_len
        mode, reason = resolve_mode(self.dispatcher.mode, self.attention.support, query_len=query_len, piecewise=True)
        if mode is not self.dispatcher.mode:
            remedy = f"create the dispatcher with mode {mode}, or use an attention with more support"
            self.runtime.warn(reason, remedy)
            self.dispatcher.initialize_keys(mode, query_len)

    # -- running ----------------------------------------------------------------------------------------------------

    def _asked(self, batch: Batch) -> dict[str, Any]:
        """The dispatcher's arguments for a batch."""
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
        """The dispatcher's arguments that this rank proposes to the others; None without tokens.

        Everything that could fail on this rank alone is checked before the proposal, so that the others do not wait.
        """
        self._captured.refuse_unready()
        if batch is None or batch.num_tokens == 0:
            return None
        sizes = self._sizes_of(batch)
        if batch.inputs is not None:
            self._inputs.paired(batch.inputs, sizes, self._compiled.padded_at(self._inputs.largest).buffers)
        return self._asked(batch)

    def _run_dummy(self, decision: RankDecision) -> Any:
        """Run a dummy batch for a step of the other ranks; returns the result of an empty batch."""
        step, sizes = decision.step, dict.fromkeys(self._inputs.largest, 0)
        if not decision.agreed.has_work:
            return self._run(step, Batch(0), sizes, decision)
        attention = self._compiled.parts.example(step.descriptor, self.dispatcher.uniform_decode_query_len)
        self.runtime.lease.order_after_last_forward()
        with replay_settings(), self._learner.restoring_state(is_step=True):  # guard: ranks_idle_state
            return self._run(step, Batch(0, attention=attention), sizes, decision)

    def _run(self, step: Dispatch, batch: Batch, sizes: Sizes, decision: RankDecision | None = None) -> Any:
        self.last_step = step
        if decision is not None and decision.is_lower:
            text = f"all ranks run {step.mode}, which is less than this rank could"
            self.runtime.warn(text, DispatchReason.AGREED.remedy, at=decision.agreed.why)
        if not step.mode:
            return self._without_graph(step, batch, sizes, decision)
        key = (step.mode, step.descriptor)
        captured = self._captured.step_of(key)
        across_dp = None if decision is None else decision.agreed.num_tokens_across_dp
        with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
            result = self._runner.replay(captured, key, batch, sizes, across_dp)
        row = self._replays[key]  # one look-up: the hash of a descriptor is the most expensive part
        row.n += 1
        row.items += 1
        row.real += batch.num_tokens
        self._sizes[batch.num_tokens] += 1
        return result

    def _without_graph(self, step: Dispatch, batch: Batch, sizes: Sizes, decision: RankDecision | None) -> Any:
        if step.reason is DispatchReason.NOT_CAPTURED:
            self._captured.refuse_none_captured()
        row = self._fallbacks[step.reason]
        row.n += 1
        row.real += batch.num_tokens
        if batch.num_tokens:
            self._sizes[batch.num_tokens] += 1
        cause = step.reason if decision is None else decision.agreed.reason  # the same on all ranks, as is an error
        if cause is not DispatchReason.EMPTY and cause is not DispatchReason.DISABLED:
            self._report_fallback(step, cause, "" if decision is None else decision.agreed.why)
        if step.reason is DispatchReason.EMPTY:
            return self._runner.empty_result(sizes)
        across_dp = None if decision is None else decision.agreed.num_tokens_across_dp
        return self._runner.run_without_graph(step.descriptor, batch, sizes, across_dp)

    def _report_fallback(self, step: Dispatch, cause: DispatchReason, of_ranks: str) -> None:
        text, why = f"the batch runs compiled, without a graph: {cause.explanation}", of_ranks or cause.explanation
        at = f"{step.descriptor}, {of_ranks}" if of_ranks else str(step.descriptor)
        self._compiled.fallbacks.report(text, no_graph(step, why), at=at, is_recorded=True)

    # -- shapes -----------------------------------------------------------------------------------------------------

    def _sizes_of(self, batch: Batch) -> dict[str, int]:
        """The real size of each key field of the inputs.

        Raises:
            ShapeError: the batch is larger than the buffers, or has no ``num_reqs`` although an input needs it.
        """
        sizes = {}
        for field, largest in self._inputs.largest.items():
            size = batch.num_tokens if field == "num_tokens" else batch.num_reqs
            if type(size) is not int or not 0 <= size <= largest:
                raise too_large(field, size, largest)
            sizes[field] = size
        return sizes


def _device_of(modules: Sequence[torch.nn.Module]) -> torch.device:
    first = next((tensor for module in modules[:1] for tensor in module.parameters()), None)
    return torch.device("cpu") if first is None else first.device
