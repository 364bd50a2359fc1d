"""One step of a manager: fill the buffers, replay the key's graph or run the compiled model, and cut the results."""

from __future__ import annotations

from typing import Any

from graphpass.capture.settings import replay_settings
from graphpass.compat import trees
from graphpass.engine.batch import Batch
from graphpass.engine.buffers import PaddedInputs, Sizes
from graphpass.engine.capture import CapturedStep
from graphpass.engine.forward import fields_named
from graphpass.engine.learn import ModelLearner, ModelResults
from graphpass.engine.model import CompiledModel
from graphpass.keys import BatchDescriptor
from graphpass.ladder.estimate import Key
from graphpass.modes import CUDAGraphMode

__all__ = ["StepRunner"]


class StepRunner:
    """Runs the steps of a model, with or without a graph as the dispatcher has decided.

    Args:
        model: the model over its buffers.
        learner: describes the model's results.
    """

    def __init__(self, model: CompiledModel, learner: ModelLearner) -> None:
        self._model, self._learner = model, learner

    def replay(
        self, step: CapturedStep, key: Key, batch: Batch, sizes: Sizes, across_dp: tuple[int, ...] | None
    ) -> Any:
        """Replay a key's graph over a batch.

        Args:
            step: the captured step of the key; the caller has checked that it is still valid.
            key: mode and padded shape.
            batch: the batch, without padding.
            sizes: the real size of each key field.
            across_dp: real tokens of each data-parallel rank; None without an agreement.

        Returns:
            The model's result at real sizes, as views of the output buffers, which the next step overwrites.

        Raises:
            CaptureError: the step goes through Dynamo, which compiles the model again, and it mixes tokens or requests.
            ShapeError: the inputs or requests do not fit the key.
            ContextError: the attention metadata lacks a field that the model reads.
        """
        mode, descriptor = key
        model, parts, results = self._model, self._model.parts, self._learner.results()
        # A replay on another stream may still be reading the buffers.
        model.runtime.lease.order_after_last_forward()
        model.inputs.fill(batch.inputs, sizes, step.inputs.buffers)
        metadata = parts.metadata(batch.attention, descriptor, mode)
        observer = self._learner.checking_graphs(step.inputs) if step.plan is None else None
        entered = parts.context(metadata, step.inputs, mode, descriptor, batch.num_tokens, across_dp, observer=observer)
        with entered as context, parts.hooked(mode), fields_named(parts.attention, metadata):
            if step.plan is None:
                with replay_settings():
                    results.store(model.compiled(**step.inputs.arguments), step.inputs.sizes)
            else:
                assert context is not None
                model.runtime.lease.acquire(context, (step.inputs.is_padding,), "a manager")
                try:
                    step.plan.check(step.args, context)
                    returned = step.plan.run(step.args, model.runtime.lease)
                    if mode is CUDAGraphMode.PIECEWISE:
                        flat = returned if step.returns_flat else trees.flatten(returned)[0]
                        results.outputs.store(results.leaves(flat, step.inputs), step.inputs.sizes)
                finally:
                    model.runtime.lease.release()
        _copy_back(results, batch, sizes, step.inputs)
        return results.result(sizes)

    def run_without_graph(
        self, padded: BatchDescriptor, batch: Batch, sizes: Sizes, across_dp: tuple[int, ...] | None
    ) -> Any:
        """Run the compiled model over a batch at its real number of tokens.

        Args:
            padded: the shape that the ranks agreed on, which a batch without tokens runs at.
            batch: the batch, without padding.
            sizes: the real size of each key field.
            across_dp: real tokens of each data-parallel rank; None without an agreement.

        Raises:
            CaptureError: the model is compiled again and now mixes tokens or requests.
            ShapeError: the inputs or requests do not fit the buffers.
        """
        with replay_settings():
            model, parts, results = self._model, self._model.parts, self._learner.results()
            # Inputs with a request dimension have all their rows, so that regions are not compiled for each count.
            num_loras = batch.num_active_loras
            unpadded = BatchDescriptor(
                batch.num_tokens or padded.num_tokens,
                batch.num_reqs,
                has_lora=num_loras > 0,
                num_active_loras=num_loras,
            )
            inputs = model.padded_at({**model.inputs.largest, "num_tokens": unpadded.num_tokens})
            model.runtime.lease.order_after_last_forward()
            model.inputs.fill(batch.inputs, sizes, inputs.buffers)
            metadata = parts.metadata(batch.attention, None, CUDAGraphMode.NONE)
            observer = self._learner.checking_graphs(inputs)  # guard: manager_mixing_in_steps
            context = parts.context(
                metadata, inputs, CUDAGraphMode.NONE, unpadded, batch.num_tokens, across_dp, observer=observer
            )
            with context, parts.hooked(CUDAGraphMode.NONE), fields_named(parts.attention, metadata):
                results.store(model.compiled(**inputs.arguments), inputs.sizes)
        _copy_back(results, batch, sizes, inputs)
        return results.result(sizes)

    def empty_result(self, sizes: Sizes) -> Any:
        """The result of a batch without tokens; nothing runs."""
        with replay_settings():
            return self._learner.results().result(sizes)


def _copy_back(results: ModelResults, batch: Batch, sizes: Sizes, inputs: PaddedInputs) -> None:
    """Copy what the model wrote to an input into the caller's tensor."""
    if batch.inputs is not None:
        for name in results.recipe.mutated:
            batch.inputs[name].copy_(inputs.buffers[name].real(sizes))
