"""Calls without a forward context: which key serves a call, how its inputs are filled and its outputs cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from cgpass.graphsizes import GraphSizes, InputLayout, cuts_of, layout_numbers, value_at
from graphpass.capture.layout import storage_id
from graphpass.capture.runtime import GraphRuntime
from graphpass.dispatch.recurring import RecurringKey, RecurringKeys
from graphpass.keys import BatchDescriptor
from graphpass.ledger import Reason, Row
from graphpass.modes import CUDAGraphMode
from graphpass.paddedmemory import OutputCuts, PaddedInput, PaddedMemory
from graphpass.padrules import PadRule

__all__ = ["AutoCall", "AutoRules", "CallTable"]

_MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class AutoRules:
    """Keys, padding and checks of one graph's dispatcher.

    Attributes:
        mode: FULL or PIECEWISE: how keys are captured; NONE where ``off`` says why not.
        keys: the key fields, their ladders, and the keys seen so far.
        padded: {position: padding rule} of the inputs that have a padded field among their sizes.
        declared: positions of the inputs whose padding the user declared.
        written: positions of the tensors that the graph writes to.
        dynamic: positions of the tensors that are neither parameters nor buffers.
        checks: when padded calls are checked at run time: once for each key, often if the safety of the padding depends
            on the contents of a call, or never.
        check_contents: what a check writes to the padding of floats: random numbers; or copies of real entries, because
            an operator may fail for other numbers.
        on_fallback: how to react when a key that recurs has no graph.
        is_strict: whether a call without a graph is an error.
        moves: whether a key may be captured again when a static input has moved.
        reads_padding: whether an op of the graph reads the mask of padded rows.
        off: why no call is captured; None if calls are captured.
        unproved: (key field, text, remedy) of each size that is not padded, or padded without proof and check.
    """

    mode: CUDAGraphMode
    keys: RecurringKeys
    padded: Mapping[int, PadRule]
    declared: frozenset[int]
    written: tuple[int, ...]
    dynamic: tuple[int, ...]
    checks: Literal["once", "often", "never"]
    check_contents: Literal["random", "real"]
    on_fallback: Literal["warn", "error", "silent"]
    is_strict: bool
    moves: bool
    reads_padding: bool
    off: Reason | None
    unproved: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class AutoCall:
    """How all calls of the same real sizes are served.

    Attributes:
        key: the key that serves them.
        real: the real size of each key field.
        counts: the row of these calls.
        seen: (counts of the sizes of a key field in all calls, the size in these calls).
        inputs: the padded inputs.
        numbers: (position, value) of the int arguments that depend on the key's sizes.
        cuts: how to cut the outputs; None if nothing is padded and the wrapper stages the inputs.
        mask: bool, one dimension for each padded field, True where a row is padding; None if no op reads it.
        real_rows: the view of ``mask`` over the real rows.
    """

    key: RecurringKey
    real: tuple[int, ...]
    counts: Row
    seen: tuple[tuple[Counter[int], int], ...]
    inputs: tuple[PaddedInput, ...] = ()
    numbers: tuple[tuple[int, int], ...] = ()
    cuts: OutputCuts | None = None
    mask: torch.Tensor | None = None
    real_rows: torch.Tensor | None = None

    @property
    def is_padded(self) -> bool:
        """Whether the key is larger than the call."""
        return self.cuts is not None and self.key.sizes != self.real

    def filled(self, args: Sequence[Any]) -> list[Any]:
        """Fill the padded buffers; the graph's arguments at the key's sizes."""
        filled = list(args)
        for padded in self.inputs:
            padded.fill(args[padded.position])
            filled[padded.position] = padded.buffer
        for position, number in self.numbers:
            filled[position] = number
        if self.mask is not None and self.real_rows is not None:
            self.mask.fill_(True)
            self.real_rows.fill_(False)
        return filled


class CallTable:
    """Maps the sizes and layouts of a call to an :class:`AutoCall`. Owns the padded buffers and the masks.

    Args:
        name: the callable.
        runtime: counts the calls.
        graph: the sizes of the graph.
        rules: keys and padding of the graph.
    """

    def __init__(self, name: str, runtime: GraphRuntime, graph: GraphSizes, rules: AutoRules) -> None:
        self._name, self._runtime, self._graph, self._rules = name, runtime, graph, rules
        self._memory = PaddedMemory[int]()
        self._calls: dict[tuple[Any, ...], AutoCall] = {}
        self._masks: dict[BatchDescriptor, torch.Tensor] = {}
        read = {position for position, dim in graph.places if dim is None}
        self._layout_numbers = tuple(position for position in graph.numbers if position not in read)
        self._may_share = tuple(dict.fromkeys((*rules.dynamic, *rules.written)))
        self._watches_memory = bool(rules.padded) and bool(rules.written) and len(self._may_share) > 1

    def num_bytes(self) -> int:
        """Bytes of the padded inputs."""
        return self._memory.num_bytes()

    def clear(self) -> None:
        """Drop the buffers, the masks and all remembered calls."""
        self._memory.clear()
        self._calls.clear()
        self._masks.clear()

    def ladder_keys(self, args: Sequence[Any]) -> list[RecurringKey]:
        """The keys of all capture sizes, largest first; without capture sizes, the key of ``args`` alone."""
        return self._rules.keys.ladder_keys(self._graph.read(args))

    def call_of(self, args: Sequence[Any], *, as_is: bool) -> AutoCall:
        """How to serve a call with these arguments.

        Args:
            args: the graph's arguments.
            as_is: whether padding is forbidden.
        """
        real = self._graph.read(args)
        layout = tuple([args[position] for position in self._layout_numbers])
        # guard: padded_inputs_share_memory, sizes_of_one_name_differ
        as_is = as_is or self._rules.keys.differs(real) or (self._watches_memory and self._shares_memory(args))
        call = self._calls.get((real, layout, as_is))
        if call is None:
            if len(self._calls) >= _MAX_REMEMBERED:
                self._calls.clear()
            call = self._calls[real, layout, as_is] = self._new_call(real, args, as_is=as_is)
        return call

    def stretched(self, args: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Arguments at other sizes: entries of ``args`` repeated, so that every value is valid."""
        named = self._graph.named(sizes)
        stretched = list(args)
        for position, expression in self._graph.numbers.items():
            if getattr(expression, "free_symbols", frozenset()) <= named.keys():
                stretched[position] = value_at(expression, named)
        for position, layout in self._graph.layouts.items():
            value = args[position]
            for dim, size in enumerate(layout.shape):
                wanted = value_at(size, named)
                if value.shape[dim] != wanted:
                    value = value.index_select(dim, torch.arange(wanted, device=value.device) % value.shape[dim])
            stretched[position] = value
        return stretched

    def _shares_memory(self, args: Sequence[Any]) -> bool:
        """Whether inputs share memory: in separate buffers, a write of the graph to one would not reach the others."""
        storages = [storage for position in self._may_share if (storage := storage_id(args[position]))]
        return len(set(storages)) != len(storages)

    def _new_call(self, real: tuple[int, ...], args: Sequence[Any], *, as_is: bool) -> AutoCall:
        if not self._rules.padded:
            return self._exact(self._rules.keys.key_of(real), real)
        if as_is:
            if self._rules.keys.differs(real):
                self._say_exact(
                    "sizes of one key field differ in a call", "give each a name of its own in dynamic_dims"
                )
            elif self._watches_memory and self._shares_memory(args):
                remedy = "pass a copy (`x.clone()`) of the input that the model only reads"
                self._say_exact("inputs share memory, and the graph writes to an input", remedy)
            return self._exact(self._rules.keys.key_of(real, as_is=True), real)
        key = self._rules.keys.key_of(real)
        found = self._inputs(real, key.sizes, args)
        if isinstance(found, InputLayout):
            name = found.name
            self._say_exact(f"no dense buffer has the strides of {name}", f"make it contiguous (`{name}.contiguous()`)")
            return self._exact(self._rules.keys.key_of(real, as_is=True), real)
        inputs, numbers = found
        mask = self._masks.get(key.descriptor)  # one for each key, because graphs read its address
        mask, real_rows = self._mask(real, key.sizes, args, mask) if self._rules.reads_padding else (None, None)
        if mask is not None:
            self._masks[key.descriptor] = mask
        strides = {e: args[p] for p, e in self._graph.numbers.items() if getattr(e, "is_Symbol", False)}
        return AutoCall(
            key,
            real,
            self._counts(key),
            self._seen(real),
            inputs=inputs,
            numbers=numbers,
            cuts=cuts_of(self._graph, self._graph.named(real), strides),
            mask=mask,
            real_rows=real_rows,
        )

    def amounts(self, call: AutoCall, args: Sequence[Any]) -> list[AutoCall]:
        """``call``; before it, the call with at most half of its padding, if the graph admits that. They share buffers.

        Larger sizes than the key's are never tried: an index into a table could lie beyond its end.
        """
        for share in (4, 3, 2):
            sizes = tuple(real + (size - real) // share for size, real in zip(call.key.sizes, call.real, strict=True))
            if sizes != call.real and self._graph.admits(sizes):
                found = self._inputs(call.real, sizes, args)
                if not isinstance(found, InputLayout):
                    mask, rows = (None, None) if call.mask is None else self._mask(call.real, sizes, args, None)
                    return [replace(call, inputs=found[0], numbers=found[1], mask=mask, real_rows=rows), call]
        return [call]

    def _inputs(
        self, real: Sequence[int], sizes: Sequence[int], args: Sequence[Any]
    ) -> tuple[tuple[PaddedInput, ...], tuple[tuple[int, int], ...]] | InputLayout:
        """The padded inputs and the numbers at ``sizes``; or the layout of an input that no dense buffer has."""
        padded, unpadded = self._graph.named(sizes), self._graph.named(real)
        numbers = layout_numbers(self._graph.layouts, tuple(self._rules.padded), padded, self._graph.numbers)
        if isinstance(numbers, InputLayout):
            return numbers
        for position, expression in self._graph.numbers.items():
            if getattr(expression, "free_symbols", frozenset()) <= padded.keys():
                numbers[position] = value_at(expression, padded)
        inputs = []
        for position, rule in self._rules.padded.items():
            layout = self._graph.layouts[position]
            padded_shape = tuple([value_at(size, padded) for size in layout.shape])
            buffer = self._memory.view(position, padded_shape, args[position], layout.order)
            shape = [value_at(size, unpadded) for size in layout.shape]
            inputs.append(PaddedInput.of(position, buffer, shape, rule, is_written=position in self._rules.written))
        return tuple(inputs), tuple(numbers.items())

    def _say_exact(self, why: str, remedy: str) -> None:
        is_silent = self._rules.on_fallback == "silent"
        self._runtime.warn(f"calls are not padded: {why}", remedy, at=self._name, is_silent=is_silent)

    def _exact(self, key: RecurringKey, real: tuple[int, ...]) -> AutoCall:
        return AutoCall(key, real, self._counts(key), self._seen(real))

    def _mask(
        self, real: Sequence[int], sizes: Sequence[int], args: Sequence[Any], mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mask of padded rows, a new one if there is none yet; and its real rows."""
        fields = zip(self._rules.keys.fields, sizes, real, strict=True)
        named = {field.name: (padded, size) for field, padded, size in fields if field.is_padded}
        in_order = {name: named[name] for name in (*self._fields_in_order(), *named) if name in named}
        if mask is None:
            device = args[next(iter(self._rules.padded))].device
            with torch.inference_mode(False):
                mask = torch.zeros([padded for padded, _ in in_order.values()], dtype=torch.bool, device=device)
        real_rows = mask
        for dim, (_, size) in enumerate(in_order.values()):
            real_rows = real_rows.narrow(dim, 0, size)
        return mask, real_rows

    def _fields_in_order(self) -> list[str]:
        """The padded fields of the input that has the most, in the order of its dimensions."""
        names = {
            symbol: field.name
            for symbol, field in zip(self._graph.symbols, self._rules.keys.fields, strict=True)
            if field.is_padded
        }
        rows = [[names[size] for size in self._graph.layouts[p].shape if size in names] for p in self._rules.padded]
        return max(rows, key=len, default=[])

    def _seen(self, real: Sequence[int]) -> tuple[tuple[Counter[int], int], ...]:
        named = {field.name: size for field, size in zip(self._rules.keys.fields, real, strict=True)}
        return tuple((self._runtime.ledger.sizes[name], size) for name, size in named.items())

    def _counts(self, key: RecurringKey) -> Row:
        return self._runtime.ledger.rows(self._name, "called")[self._rules.mode, key.descriptor]
