"""The captured keys of a manager: captures all keys in order within a memory limit, or one key in a step."""

from __future__ import annotations

import contextlib

from graphpass.capture.settings import replay_settings
from graphpass.engine.capture import CapturedStep, KeyCapturer
from graphpass.engine.learn import ModelLearner
from graphpass.engine.model import CompiledModel
from graphpass.engine.refusals import moved_weights, nothing_captured, nothing_to_capture
from graphpass.engine.stats import keys_by_group
from graphpass.ladder.estimate import Key, KeyPool, MemoryEstimate, PoolModel, capture_within, estimated
from graphpass.ladder.progress import capture_progress
from graphpass.ladder.traffic import CapturedGraph
from graphpass.ranks.conversation import AgreedSteps

__all__ = ["CapturedLadder"]


class CapturedLadder:
    """The captured keys of a manager; captures missing ones and drops all of them on :meth:`close`.

    Args:
        model: the model over its buffers. Its dispatcher lists the keys; each captured key is marked there.
        learner: describes the model's results and the state that it writes to.
        ranks: data-parallel ranks that capture the same keys together; None without an agreement.

    Attributes:
        steps: {key: its captured step}.
        records: {key: seconds and memory of its capture}, in the order of capture.
        left_out: keys that were not captured because of ``max_bytes``.
    """

    def __init__(
        self,
        model: CompiledModel,
        learner: ModelLearner,
        ranks: AgreedSteps | None,
    ) -> None:
        self._model, self._learner, self._ranks = model, learner, ranks
        self._dispatcher, self._inputs, self._runtime = model.dispatcher, model.inputs, model.runtime
        self._capturer = KeyCapturer(model, learner)
        self._estimate: MemoryEstimate | None = None
        self.steps: dict[Key, CapturedStep] = {}
        self.records: dict[Key, CapturedGraph] = {}
        self.left_out: tuple[Key, ...] = ()

    def missing(self) -> list[Key]:
        """The keys without a graph, in the order of capture."""
        return [key for key in self._all() if key not in self.steps]

    def _all(self) -> list[Key]:
        """All keys in the order of capture: mixed batches before uniform ones."""
        keys = [(mode, key) for mode, keys in self._dispatcher.capture_plan() for key in keys]
        return sorted(keys, key=lambda key: key[1].uniform)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Report a failure of the body to the other ranks."""
        return contextlib.nullcontext() if self._ranks is None else self._ranks.capturing()

    def _on_some_rank(self, here: bool) -> bool:
        """Whether a condition is true on this rank or on any other rank of the agreement."""
        return here if self._ranks is None else self._ranks.stops(here, len(self.missing()))

    # -- all of them --------------------------------------------------------------------------------------------------

    def capture_missing(self, max_bytes: int | None) -> None:
        """Capture every key that has no graph, see :meth:`CudaGraphManager.capture`."""
        if not self.missing():
            raise nothing_to_capture(len(self.records))
        limited = self._on_some_rank(max_bytes is not None)
        fits = self.estimate().pool if limited else None
        with (
            replay_settings(),
            self._inputs.restoring(),
            self._learner.restoring_state(),  # guard: manager_state
            self._runtime.capturing(by_calls=False),
        ):
            self.left_out = self._capture_in_order(max_bytes, fits)
        self._capturer.meter.settle()  # release the memory that warm-ups have left in the allocator's cache
        if self.left_out:
            mode, descriptor = self.left_out[0]
            self._runtime.warn(
                f"keys left out: the pool would exceed {max_bytes} bytes",
                "raise max_bytes, or pass fewer or smaller capture sizes: batches of these keys run without a graph",
                at=f"{mode} {descriptor}" + (f" and {len(self.left_out) - 1} more" if len(self.left_out) > 1 else ""),
                is_recorded=True,
            )

    def _capture_in_order(self, max_bytes: int | None, fits: PoolModel | None) -> tuple[Key, ...]:
        """Capture the missing keys, or as many as fit; returns the keys that are left out."""
        missing = self.missing()  # the first run may have removed the FULL keys
        with capture_progress(missing, self._model.settings.progress) as progress:

            def captured(key: Key) -> None:
                progress.set_postfix_str(f"{key[0]} {key[1]}")
                self._capture(key)
                progress.update()

            if fits is None:
                for key in missing:
                    self._on_some_rank(False)  # raises if another rank has failed
                    captured(key)
                return ()
            pool = KeyPool(self._runtime.pool_bytes, captured, self._drop_graphs, self._on_some_rank)
            return capture_within(max_bytes, pool, list(self.records), missing, fits)

    def estimate(self) -> MemoryEstimate:
        """Estimate the memory of all keys, see :meth:`CudaGraphManager.estimate`."""
        with replay_settings():
            self._learner.results()
            keys, known = self._all(), self._estimate
            if self._on_some_rank(known is None or known.keys != tuple(keys)):  # guard: estimates_of_the_ladder
                with self._inputs.restoring():  # guard: throwaway_buffers_kept
                    known = estimated(
                        keys_by_group(keys),
                        self._runtime,
                        self._capturer.meter,
                        lambda key: self._capturer.capture(key)[1].memory,
                        self._learner.restoring_state,
                        buffer_bytes=self._learner.buffer_bytes(),
                    )
            assert known is not None
            self._estimate = known
            return known

    def refuse_unready(self) -> None:
        """Check that this rank can replay its graphs, before the other ranks rely on it.

        Raises:
            CaptureError: nothing has been captured yet.
            StaticInputError: weights of the model were replaced.
        """
        self.refuse_none_captured()
        for key, step in {id(step.model): (key, step) for key, step in self.steps.items()}.values():
            if not step.holds(self._model.modules, self._runtime.lease.generation):
                raise moved_weights(key, "call recapture() on every rank")

    def refuse_none_captured(self) -> None:
        """Refuse to run if the dispatcher has keys and none of them is captured.

        Raises:
            CaptureError: nothing has been captured yet.
        """
        if not (self.steps or self.left_out) and self.missing():
            raise nothing_captured(len(self.missing()))

    # -- one of them --------------------------------------------------------------------------------------------------

    def step_of(self, key: Key) -> CapturedStep:
        """The captured step of a key; captures the key if it has no graph or its graph reads replaced weights.

        Raises:
            StaticInputError: the key would have to be captured, but ``on_moved_input`` is ``"error"`` or ranks agree
                on each step.
            CaptureError: the key cannot be captured.
        """
        step = self.steps.get(key)
        if step is not None and step.holds(self._model.modules, self._runtime.lease.generation):
            return step
        return self._recaptured(key, step)

    def _recaptured(self, key: Key, stale: CapturedStep | None) -> CapturedStep:
        mode, descriptor = key
        is_known = key in self.records
        # A rank that captures during a step would keep the other ranks waiting.
        if self._ranks is not None or (is_known and self._model.settings.policy.on_moved_input == "error"):
            everywhere = self._ranks is not None
            remedy = "call recapture()" + (" on every rank" if everywhere else ", or set on_moved_input='copy'")
            raise moved_weights(key, remedy)
        if is_known:
            self._runtime.warn(
                "captured again, because weights were replaced or a graph was dropped",
                "call recapture() after a change of weights, or copy the new weights into the old parameters",
                at=f"{mode} {descriptor}",
            )
        if stale is not None:  # drop all steps of the old weights, which would stay allocated until each key's next use
            self.steps = {other: step for other, step in self.steps.items() if step.model is not stale.model}
            del stale
        self._runtime.lease.order_after_last_forward()
        with (
            replay_settings(),
            self._inputs.restoring(),
            self._learner.restoring_state(),
            self._runtime.scopes.opened(),
        ):
            return self._capture(key)

    def _capture(self, key: Key) -> CapturedStep:
        self.steps[key], self.records[key] = self._capturer.capture(key)
        self._dispatcher.mark_captured(*key)
        return self.steps[key]

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop all graphs, release the pool, and discard the compiled code and the description of the results."""
        self._drop_graphs()
        self.left_out, self._estimate = (), None
        self._capturer.forget()
        self._learner.forget()
        self._model.recompile()

    def _drop_graphs(self) -> None:
        self.steps.clear()
        self.records.clear()
        self._dispatcher.forget_captured()
        self._runtime.close()
