"""A compiled model over a manager's buffers: shared by the first run, captures and steps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.staging import storage_id
from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.engine.buffers import PaddedInputs, Sizes, StepBuffers
from graphpass.engine.forward import ForwardParts
from graphpass.engine.refusals import not_with_offloading, too_large_key
from graphpass.keys import BatchDescriptor
from graphpass.ladder.modelstate import ModelState, entry_of, modules_of
from graphpass.modes import CUDAGraphMode
from graphpass.options import Fallbacks, Settings

__all__ = ["CompiledModel"]


class CompiledModel:
    """A compiled model and its input buffers.

    Args:
        model: the module or function to compile, called with one keyword argument for each input.
        dispatcher: lists the keys.
        inputs: the persistent input buffers.
        parts: attention, hooks and ranks.
        runtime: owner of the graph pool and the statistics.
        options: the user's options of the backend.

    Attributes:
        settings: the validated options.
        fallbacks: reports batches without a graph.
        modules: all modules of the model, as of the last capture.
        compiled: the model after ``torch.compile``.

    Raises:
        OptionError: an option is not valid.
    """

    def __init__(
        self,
        model: Any,
        dispatcher: CudagraphDispatcher,
        inputs: StepBuffers,
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
        self.settings = Settings.of(self._options)
        self.fallbacks = Fallbacks(runtime, self.settings.on_fallback)
        if parts.hooks is not None and self.settings.policy.compare:
            raise not_with_offloading("compare=True", "debug=True, which runs the same steps eagerly")
        self.modules = modules_of(model)
        self._shapes: dict[tuple[int, ...], PaddedInputs] = {}
        self.recompile()

    def recompile(self) -> None:
        """Compile the model and its module hooks again, without the code of earlier compilations."""
        self._entry = entry_of(self._model)
        self.compiled = torch.compile(self._entry, backend="cgpass", options=self._options)

    def unpassed(self) -> frozenset[str]:
        """The names of the model's parameters that no input has; the model makes such arguments itself."""
        called = self._model.forward if isinstance(self._model, torch.nn.Module) else self._model
        return frozenset(inspect.signature(called).parameters) - self.inputs.tensors.keys()

    def find_modules(self) -> None:
        """Update :attr:`modules` to the model's current modules."""
        self.modules = modules_of(self._model)

    def padded_at(self, sizes: Sizes) -> PaddedInputs:
        """The model's inputs at these padded sizes, the same tensor objects in every call."""
        known = self._shapes.get(tuple(sizes.values()))
        if known is None:
            buffers = self.inputs.at(sizes)
            arguments = {name: buffer.tensor for name, buffer in buffers.items()}
            known = PaddedInputs(dict(sizes), buffers, arguments, self.inputs.is_padding(sizes["num_tokens"]))
            self._shapes[tuple(sizes.values())] = known
        return known

    def sizes_of(self, key: BatchDescriptor) -> dict[str, int]:
        """The padded size of each key field; without a request count in the key, the largest number of requests.

        Raises:
            OptionError: the key is larger than the buffers.
        """
        sizes = {**self.inputs.largest, "num_tokens": key.num_tokens}
        if "num_reqs" in sizes and key.num_reqs is not None:
            sizes["num_reqs"] = key.num_reqs
        if any(size > self.inputs.largest[field] for field, size in sizes.items()):
            raise too_large_key(key, sizes, self.inputs.largest)
        return sizes

    def prepared(self, inputs: PaddedInputs, key: BatchDescriptor, mode: CUDAGraphMode) -> Any:
        """Prepare a capture or a first run: reset the inputs to padding, synchronize the hooks, build example metadata.

        Returns:
            The attention metadata; None without attention.
        """
        self.inputs.blank()  # guard: manager_blank_capture
        self.inputs.fill(None, inputs.sizes, inputs.buffers)
        if self.parts.hooks is not None:
            self.parts.hooks.sync_prev_onload()
        example = self.parts.example(key, self.dispatcher.uniform_decode_query_len)
        return self.parts.metadata(example, key, mode)

    def state_of(self, args: Sequence[Any]) -> ModelState | None:
        """The state of the model that a graph with these arguments reads.

        Returns:
            None if an argument is a tensor that is neither an input nor stored in a module of the model.
        """
        own = self.inputs.storages()
        others = [value for value in args if isinstance(value, torch.Tensor) and storage_id(value) not in own]
        return ModelState.of_arguments(self.modules, others)
