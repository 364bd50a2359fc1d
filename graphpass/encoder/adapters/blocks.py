"""The repeated blocks of a tower, called eagerly or through one compiled function for all blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from graphpass.capture.regioncalls import call_compiled
from graphpass.capture.torchsettings import capture_settings
from graphpass.compat import dynamo, nnmodules
from graphpass.context import set_forward_context
from graphpass.encoder.attention import kernel_of, use_attention
from graphpass.ladder.modelstate import ModelState, SharesWeights
from graphpass.ladder.owncode import with_own_code
from graphpass.report import KernelUse

__all__ = ["Blocks", "eagerly"]


class Blocks(SharesWeights):
    """Copies of a tower's blocks that share its weights and use an attention function for packed images.

    :meth:`follow` copies the blocks again if weights, modules, the list of blocks or training flags of the tower
    changed.

    Args:
        tower: the stock tower. It is not changed.
        path: path of its list of blocks, which have one class and one configuration.
        attention: name of the attention function.
        seq_len: tokens of each sequence if all have the same length.
    """

    def __init__(self, tower: torch.nn.Module, path: str, attention: str, *, seq_len: int | None = None) -> None:
        self._tower, self._path = tower, path
        self._attention, self._seq_len = attention, seq_len
        self._copy()
        self._call: Callable[..., Any] = with_own_code(_call_block)

    def __len__(self) -> int:
        return len(self._stock)

    def __call__(self, index: int, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """The hidden states after block ``index``."""
        output: torch.Tensor = self._call(self._blocks[index], hidden, arguments)
        return output

    def follow(self) -> None:
        """Copy the blocks again if the tower changed. Called once in a forward, before the first block."""
        is_same = self._stock is self._copied and len(self._stock) == len(self._blocks)
        if not (is_same and self._state.has_weights() and self._state.has_training_flags()):
            self._copy()

    def compute_rows_alone(self) -> bool:
        """Whether only the attention function reads several rows, so that images can be concatenated.

        Modules from outside torch and transformers, hooks and replaced forwards may read all rows.
        """
        return not any(map(_may_see_all_rows, self._stock.modules()))

    def kernel(self) -> KernelUse:
        """The kernel of the attention function."""
        return kernel_of(self._blocks)

    def call_stock(self, index: int, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """The hidden states after block ``index`` of the tower itself, with the tower's own attention."""
        output: torch.Tensor = self._call(self._stock[index], hidden, arguments)
        return output

    @property
    def _stock(self) -> torch.nn.ModuleList:
        found = self._tower.get_submodule(self._path)
        assert isinstance(found, torch.nn.ModuleList)
        return found

    def compile(self, compiler: str, runtime: Any, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> None:
        """Compile one block for all layers and all sizes.

        Weights are inputs of the traced function, so all layers share it. Dynamo specialises sizes of 0 and 1, and uses
        one symbol for sizes that are equal in the first call. So all independent sizes of the example must be
        different and at least 2.

        Args:
            compiler: the compiler of regions.
            runtime: counts artifacts.
            hidden: example hidden states.
            arguments: example arguments of the block.
        """
        options = {"compiler": compiler, "runtime": runtime, "mode": "NONE"}
        own = with_own_code(_call_block)
        self._call = partial(call_compiled, torch.compile(own, backend="cgpass", dynamic=True, options=options))
        self.follow()
        with eagerly(), dynamo.floats_as_constants():
            self(0, hidden, arguments)

    def _copy(self) -> None:
        self._copied = self._stock
        own = use_attention(self._copied, self._attention, seq_len=self._seq_len)
        assert isinstance(own, torch.nn.ModuleList)
        self._blocks, self._state = own, ModelState.of_object(self._copied)


def _may_see_all_rows(module: torch.nn.Module) -> bool:
    is_known = type(module).__module__.startswith(("torch.", "transformers."))
    return not is_known or nnmodules.has_hooks(module)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """:func:`capture_settings`, and no graph is asked for, also where the caller is in the forward of another model."""
    with capture_settings(), set_forward_context():
        yield


def _call_block(block: torch.nn.Module, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
    return block(hidden, **arguments)
