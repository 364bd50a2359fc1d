"""A copy of a tower that shares its weights and runs its code."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graphpass.capture.modelstate import ModelState, SharesWeights, with_own_code
from graphpass.capture.settings import capture_settings
from graphpass.capture.tape import call_compiled
from graphpass.compat import dynamo, nnmodules, trees
from graphpass.context import set_forward_context
from graphpass.encoder.adapters.tables import unserved_tower
from graphpass.encoder.attention import Pieces, use_packed_attention


class TowerCopy(SharesWeights):
    """A copy of a tower that shares its weights and hooks. It can compile its blocks, and attend to packed images.

    If the tower's weights, modules or training flags have changed, it is copied again.
    """

    def __init__(self, tower: nn.Module, *, is_packed: bool) -> None:
        # A copy would not behave like it, and its hooks would see padding.
        if nnmodules.has_hooks(tower):  # guard: encoder_tower_changed
            raise unserved_tower("hooks on parts of the tower only", "a hook, or a forward, on the tower", tower)
        weight = next(tower.parameters(), None)
        if weight is None or weight.is_meta:
            raise unserved_tower("weights", "none", tower)
        self._tower, self._is_packed = tower, is_packed
        self._pieces: Mapping[int, Pieces] = {}
        self._run: Callable[..., Any] = _call_block
        self._copy()

    def __call__(self, *args: Any, pieces: Mapping[int, Pieces] | None = None, **named: Any) -> Any:
        """Call the copy; pieces of sequences are by the id of their bounds."""
        # guard: encoder_blocks_list, encoder_blocks_train
        if not (self._state.has_weights() and self._state.has_training_flags()):
            self._copy()
        self._pieces = pieces or {}
        return self.module(*args, **named)

    def has_foreign_parts(self) -> bool:
        """Whether blocks have modules of others, hooks or replaced forwards."""
        parts = (part for block in _blocks_of(self._tower) for part in block.modules())
        ours = ("torch.", "transformers.")
        return any(not type(part).__module__.startswith(ours) or nnmodules.has_hooks(part) for part in parts)

    def compile(self, example: Callable[[], object], **options: Any) -> None:
        """Compile one block for all layers and sizes, in one call of ``example``.

        Weights are inputs of the traced function, so all layers share it. Dynamo uses one symbol for sizes that are
        equal in the first call: those of the example must be different and at least 2.
        """
        given, own = {"mode": "NONE", **options}, with_own_code(_call_block)
        compiled = partial(call_compiled, torch.compile(own, backend="cgpass", dynamic=True, options=given))
        # A view in the first call would have Dynamo compare the sizes of bases.
        self._run = lambda block, *given: compiled(block, *trees.map_tensors(torch.clone, given))
        with dynamo.floats_as_constants():
            example()
        self._run = compiled

    def _copy(self) -> None:
        tower = self._tower
        shared = [*tower.parameters(), *tower.buffers(), *nnmodules.hooks_of(tower)]  # guard: encoder_shared_hooks
        self.module = copy.deepcopy(tower, memo={id(value): value for value in shared})
        if self._is_packed:
            use_packed_attention(self.module)
        for block in _blocks_of(self.module):
            if "forward" not in vars(block):
                block.forward = partial(self._call, block)
        for part in self.module.modules():
            if type(part) in (nn.Conv2d, nn.Conv3d) and "forward" not in vars(part):
                part.forward = partial(_convolved, part)
        self._state = ModelState.of_object(tower)

    def _call(self, block: nn.Module, *args: Any, **named: Any) -> Any:
        """Call a block, compiled if it attends within sequences, or if none does.

        It gets the starts of pieces in place of bounds, whose number may be that of another table by chance.
        """
        found = [self._pieces[id(value)] for value in (*args, *named.values()) if id(value) in self._pieces]
        if not found and self._is_packed:
            return _call_block(block, args, named)
        args, named = trees.map_tensors(self._given, (args, named))
        for pieces in found[:1]:
            named |= {"query_bounds": pieces.query_bounds, "key_lengths": pieces.key_lengths}
        return self._run(block, args, named)

    def _given(self, value: torch.Tensor) -> Any:
        pieces = self._pieces.get(id(value))
        return value.contiguous() if pieces is None else pieces.key_starts  # guard: encoder_bounds_replaced


def _blocks_of(tower: nn.Module) -> list[nn.Module]:
    lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList)]
    return list({id(block): block for blocks in lists for block in blocks}.values())


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """:func:`capture_settings`, without graphs, also in the forward of another model."""
    with capture_settings(), set_forward_context():
        yield


def _call_block(block: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    return type(block).forward(block, *args, **named)


def _convolved(convolution: Any, patches: torch.Tensor) -> torch.Tensor:
    """The convolution, as a matrix product, which is faster, if the input has the shape of the kernel.

    On a GPU torch rounds convolutions in float32 differently (TF32), so these stay.
    """
    weight, dims = convolution.weight, len(convolution.kernel_size)
    is_whole = patches.shape[1:] == weight.shape[1:] and convolution.groups == 1  # guard: encoder_whole_patches
    has_padding = convolution.padding != "valid" and any(side != 0 for side in convolution.padding)
    is_rounded = patches.is_cuda and patches.dtype is torch.float32
    if not is_whole or has_padding or is_rounded:
        return type(convolution).forward(convolution, patches)  # type: ignore[no-any-return]
    return F.linear(patches.flatten(1), weight.flatten(1), convolution.bias)[(..., *[None] * dims)]
