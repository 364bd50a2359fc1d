"""What adapters share: checks of a tower and of options, its repeated blocks, and its patch embedding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from graphpass.capture.settings import capture_settings
from graphpass.capture.tape import call_compiled
from graphpass.compat import dynamo, nnmodules
from graphpass.context import set_forward_context
from graphpass.encoder.attention import kernel_of, use_attention
from graphpass.errors import EncoderConfigError, positive
from graphpass.ladder.modelstate import ModelState, SharesWeights, with_own_code
from graphpass.report import KernelUse

_STOCK_ATTENTION = ("eager", "sdpa", "flash_attention", "flex_attention", "paged|")
"""Prefixes of the names of transformers' attention functions."""


def checked_count(name: str, value: int, *, at_least: int = 1) -> int:
    """The value of the adapter's option ``name`` as an int."""
    what, remedy = f"option {name} of the adapter", "omit the option for its default"
    return positive(value, what, at_least=at_least, remedy=remedy, error=EncoderConfigError)


def unserved_tower(tower: Any, expected: str, found: str) -> EncoderConfigError:
    """The error for a tower of a known class with behaviour that its adapter does not implement."""
    return EncoderConfigError(
        f"the adapter for {type(tower).__name__} does not support this tower",
        expected=expected,
        found=found,
        remedy='write an adapter for it: "Add your tower" in docs/encoder.md',
    )


def refuse_changed(tower: Any, stock: type) -> None:
    """Refuse a tower with changes outside its blocks: adapters call the parts of a tower instead of its forward."""
    if getattr(type(tower), "forward", None) is not getattr(stock, "forward", None) or "forward" in vars(tower):
        raise unserved_tower(tower, f"the forward of {stock.__name__}", "another one")
    for name, module in (("the tower", tower), ("its encoder", getattr(tower, "encoder", None))):
        if module is not None and nnmodules.has_hooks(module):
            raise unserved_tower(tower, "hooks on blocks and other parts only", f"a hook, or a forward, on {name}")
    attention = getattr(tower.config, "_attn_implementation", None)
    if attention is not None and not attention.startswith(_STOCK_ATTENTION):
        raise unserved_tower(tower, "an attention function of transformers", f"attn_implementation={attention!r}")


class Blocks(SharesWeights):
    """Copies of a tower's blocks that share its weights and use an attention function for packed images.

    :meth:`follow` copies the blocks again if weights, modules, the list of blocks or training flags of the tower
    changed.
    """

    def __init__(self, tower: torch.nn.Module, path: str, attention: str, *, seq_len: int | None = None) -> None:
        self._tower, self._path = tower, path
        self._attention, self._seq_len = attention, seq_len
        self._copy()
        self._call: Callable[..., Any] = with_own_code(_call_block)

    def __len__(self) -> int:
        return len(self._stock)

    def __call__(
        self, index: int, hidden: torch.Tensor, arguments: Mapping[str, Any], *, is_stock: bool = False
    ) -> torch.Tensor:
        """The hidden states after block ``index``, or after the tower's own block with the tower's own attention."""
        blocks = self._stock if is_stock else self._blocks
        output: torch.Tensor = self._call(blocks[index], hidden, arguments)
        return output

    def follow(self) -> None:
        """Copy the blocks again if the tower changed. Called once in a forward, before the first block."""
        is_same = self._stock is self._copied and len(self._stock) == len(self._blocks)  # guard: encoder_blocks_list
        # guard: encoder_blocks_train
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

    @property
    def _stock(self) -> torch.nn.ModuleList:
        found = self._tower.get_submodule(self._path)
        assert isinstance(found, torch.nn.ModuleList)
        return found

    def compile(self, hidden: torch.Tensor, arguments: Mapping[str, Any], **options: Any) -> None:
        """Compile one block for all layers and all sizes, with these options of the backend.

        Weights are inputs of the traced function, so all layers share it. Dynamo specialises sizes of 0 and 1, and uses
        one symbol for sizes that are equal in the first call. So all independent sizes of the example must be
        different and at least 2.
        """
        given, own = {"mode": "NONE", **options}, with_own_code(_call_block)
        self._call = partial(call_compiled, torch.compile(own, backend="cgpass", dynamic=True, options=given))
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


class WholePatches(TorchFunctionMode):
    """A mode that replaces ``conv3d`` by a matrix product if the input has the shape of the kernel.

    The convolution is slow: in bfloat16, 1024 patches of 1536 values take 366 µs on an H100. Float32 convolutions on a
    GPU are not replaced, because torch rounds them differently from matrix products (TF32). The calling module, its
    hooks and autocast work as before.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, or the matrix product instead of ``conv3d``."""
        kwargs = kwargs or {}
        product = _product(*args, **kwargs) if func is F.conv3d else None
        return func(*args, **kwargs) if product is None else product


def _product(
    input: torch.Tensor,  # noqa: A002  # the name of conv3d's argument
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: object = 1,
    padding: Any = 0,
    dilation: object = 1,
    groups: int = 1,
) -> torch.Tensor | None:
    """The convolution of [patches, *kernel] as [patches, width, 1, 1, 1]; None if it is not a matrix product."""
    paddings = [padding] if isinstance(padding, int | str) else padding
    # guard: encoder_whole_patches
    if input.shape[1:] != weight.shape[1:] or groups != 1 or any(side not in (0, "valid") for side in paddings):
        return None
    if dilation not in (1, (1, 1, 1)):  # the kernel reads inputs beyond its shape
        return None
    if input.is_cuda and input.dtype is torch.float32:
        return None
    return F.linear(input.flatten(1), weight.flatten(1), bias)[..., None, None, None]
