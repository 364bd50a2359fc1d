"""A model through Dynamo, over a manager's buffers: what every forward of it needs, whatever runs or replays it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpass.capture.fallbacks import Fallbacks
from graphpass.capture.layout import storage_id
from graphpass.capture.runtime import GraphRuntime
from graphpass.dispatch.dispatcher import CudagraphDispatcher
from graphpass.engine.buffers import Sizes, StepBuffers
from graphpass.engine.forward import ForwardParts
from graphpass.engine.inputviews import PaddedInputs
from graphpass.engine.refusals import not_with_offloading, too_large_key
from graphpass.keys import BatchDescriptor
from graphpass.ladder.modelstate import ModelState, modules_of
from graphpass.ladder.owncode import entry_of
from graphpass.modes import CUDAGraphMode
from graphpass.options import Settings

__all__ = ["CompiledModel"]


class CompiledModel:
    """A compiled model and the buffers that it is called with.

    Args:
        model: what is compiled, called with one keyword argument for each input.
        dispatcher: its keys.
        inputs: the persistent input buffers.
        parts: who else takes part in each forward.
        runtime: owner of pool and statistics.
        options: the backend's, the manager's own left out.

    Attributes:
        settings: the options, validated.
        fallbacks: reports batches without a graph.
        modules: all modules of the model, as of the last capture.
        compiled: the model through Dynamo.

    Raises:
        OptionError: an option cannot be used.
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
        # A model with an op that no graph can hold goes on with regions.
        has_full = dispatcher.mode.has_mode(CUDAGraphMode.FULL)
        self._model = model
        self._options = {
            **options,
            "mode": CUDAGraphMode.FULL_AND_PIECEWISE if has_full else dispatcher.mode,
            "splitting_ops": [*parts.splitting_ops(), *options.get("splitting_ops", ())],
            "outputs": "view",
            "runtime": runtime,
            # Where a step goes through Dynamo, it may reach other code than the one that was captured. Ranks that
            # capture in a step leave the others behind.
            "lazy_capture": parts.num_ranks is None and options.get("on_moved_input") != "error",
        }
        self.settings = Settings.of(self._options)
        self.fallbacks = Fallbacks(runtime, self.settings.on_fallback)
        if parts.hooks is not None and self.settings.policy.compare:
            raise not_with_offloading("compare=True", "debug=True, which runs the same steps eagerly")
        self.modules = modules_of(model)
        self._shapes: dict[tuple[int, ...], PaddedInputs] = {}
        self.compile_anew()

    def compile_anew(self) -> None:
        """Compile the model, hooks and all, as if it never had been."""
        self._entry = entry_of(self._model)
        self.compiled = torch.compile(self._entry, backend="cgpass", options=self._options)

    def find_modules(self) -> None:
        """Take the model's modules as they are now."""
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
        """The padded size of each field; all rows of an input by request, where the key names no number of them.

        Raises:
            OptionError: the buffers are smaller.
        """
        sizes = {**self.inputs.largest, "num_tokens": key.num_tokens}
        if "num_reqs" in sizes and key.num_reqs is not None:
            sizes["num_reqs"] = key.num_reqs
        if any(size > self.inputs.largest[field] for field, size in sizes.items()):
            raise too_large_key(key, sizes, self.inputs.largest)
        return sizes

    def prepared(self, inputs: PaddedInputs, key: BatchDescriptor, mode: CUDAGraphMode) -> Any:
        """Fill the inputs with valid entries and make example metadata: what a capture, or a first run, reads."""
        self.inputs.blank()
        self.inputs.fill(None, inputs.sizes, inputs.buffers)
        if self.parts.hooks is not None:
            self.parts.hooks.sync_prev_onload()
        example = self.parts.example(key, self.dispatcher.uniform_decode_query_len)
        return self.parts.metadata(example, key, mode)

    def state_of(self, args: Sequence[Any]) -> ModelState | None:
        """The model behind a graph with these arguments; None where it reads tensors that no module keeps."""
        own = self.inputs.storages()
        kept = [value for value in args if isinstance(value, torch.Tensor) and storage_id(value) not in own]
        return ModelState.of_arguments(self.modules, kept)
