"""The dispatcher: from a batch to the key that replays it.

A decision tries FULL for uniform decode, FULL for mixed batches and PIECEWISE, in this order, and takes the smallest
key that fits the batch; or its reason says why no graph can replay. It is remembered for batches between the same sizes
of keys.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from graphpass.dispatch.dispatchkeys import Dispatch, DispatchReason, Key, LoraKeys, keys_of
from graphpass.dispatch.grid import Extra, KeyLimits, SizeGrid
from graphpass.errors import DispatchError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.ledger import named_sizes

# (mode, whether its keys are for uniform decode), in order of preference.
_ROUTES = ((CUDAGraphMode.FULL, True), (CUDAGraphMode.FULL, False), (CUDAGraphMode.PIECEWISE, False))
# Where several routes fail, the decision reports the reason that is closest to a replay: the last in this order.
_CLOSENESS = (
    DispatchReason.DISABLED,
    DispatchReason.NO_KEY,
    DispatchReason.TOO_LARGE,
    DispatchReason.NOT_CAPTURED,
).index

_Answer: TypeAlias = tuple[Key, Dispatch, Dispatch] | DispatchReason
"""A key with the decisions for batches of exactly its sizes and for smaller ones; or why no key serves."""


@dataclass(frozen=True, slots=True)
class _Table:
    keys: tuple[Key, ...]  #: from small to large
    #: the sizes of all keys in each field, and the numbers of requests that they hold, ascending. Batches that fall
    #: between the same rungs fit the same keys.
    rungs: tuple[list[int], ...]
    answers: dict[tuple[object, ...], _Answer]  #: (allowed modes, rungs above the batch) -> answer


class CudagraphDispatcher:
    """Chooses the runtime mode and the padded shape of every batch.

    Args:
        mode: the graphs to create keys for, a mode or its name in any case.
        capture_sizes: token counts to capture, or ``{field: sizes}`` for several dimensions, each rounded up among its
            own sizes. :meth:`dispatch` then reads ``num_tokens`` and ``num_reqs`` from its arguments and every other
            field from its ``extra``.
        max_num_reqs: most requests of a batch.
        uniform_decode_query_len: tokens of one request in a uniform decode batch: 1, or 1 + draft tokens.
        max_num_tokens: tokens of the largest batch; larger capture sizes are dropped.
        lora: adapter counts to create keys for; None: batches use no adapter.
        lazy: also return keys that are not captured yet; the wrapper then captures them at their first batch.

    Raises:
        DispatchError: a size or a limit is below 1, or no size is left.
        OptionError: unknown mode.
    """

    def __init__(
        self,
        mode: CUDAGraphMode | str,
        capture_sizes: Sequence[int] | Mapping[str, Sequence[int]],
        *,
        max_num_reqs: int,
        uniform_decode_query_len: int = 1,
        max_num_tokens: int | None = None,
        lora: LoraKeys | None = None,
        lazy: bool = False,
    ) -> None:
        self._grid = SizeGrid.of(capture_sizes)
        self.capture_fields = tuple(self._grid.sizes)  #: fields of ``capture_sizes``; a list has ``num_tokens`` only
        self._counts_tokens_only = self.capture_fields == ("num_tokens",)
        self.max_num_reqs = max_num_reqs  #: most requests of a batch
        self._max_num_tokens = max_num_tokens
        self._lora = lora
        self._key_adapters = (0,) if lora is None else lora.count_table()
        self.is_lazy = lazy  #: whether decisions may name keys that are not captured yet
        self.uniform_decode_query_len: int  #: tokens of one request in a uniform decode batch
        self.revision = 0  #: increases with every change of the keys or of their captured marks
        self.initialize_keys(mode, uniform_decode_query_len)

    @property
    def mode(self) -> CUDAGraphMode:
        """The mode that determines the keys; :meth:`initialize_keys` changes it."""
        return self._mode

    # -- keys ----------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> Mapping[CUDAGraphMode, frozenset[BatchDescriptor]]:
        """A snapshot of every key by runtime mode, captured or not."""
        modes = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
        return MappingProxyType({m: frozenset(d for mode, d in self._keys if mode is m) for m in modes})

    def initialize_keys(self, mode: CUDAGraphMode | str, uniform_decode_query_len: int = 1) -> None:
        """Replace all keys with the keys of ``mode``; none of the new keys is marked captured.

        Raises:
            DispatchError: ``uniform_decode_query_len`` is below 1, or no size is left.
            OptionError: unknown mode.
        """
        parsed = CUDAGraphMode.parse(mode)
        limits = KeyLimits(self.max_num_reqs, uniform_decode_query_len, self._max_num_tokens)
        keys = {(key.mode, key.descriptor): key for key in keys_of(parsed, self._grid, limits, self._lora)}
        self._keys: dict[tuple[CUDAGraphMode, BatchDescriptor], Key] = keys
        self._mode, self.uniform_decode_query_len = parsed, uniform_decode_query_len
        self._changed()

    def add_key(self, mode: CUDAGraphMode | str, descriptor: BatchDescriptor) -> None:
        """Add one key, not captured yet; adding a key twice changes nothing.

        Raises:
            DispatchError: no batch can ever dispatch to the key, or it lacks a field of ``capture_sizes``.
        """
        mode = CUDAGraphMode.parse(mode)
        fault = self._fault(mode, descriptor)
        if fault is not None:
            expected, remedy = fault
            found = f"{mode} {descriptor}"
            raise DispatchError("the key could never be dispatched", expected=expected, found=found, remedy=remedy)
        self._keys.setdefault((mode, descriptor), Key.of(mode, descriptor, self._grid))
        self._changed()

    def remove_key(self, mode: CUDAGraphMode | str, descriptor: BatchDescriptor) -> None:
        """Remove one key, so that no batch is dispatched to it; an unknown key is ignored."""
        self._keys.pop((CUDAGraphMode.parse(mode), descriptor), None)
        self._changed()

    def mark_captured(self, mode: CUDAGraphMode | str, descriptor: BatchDescriptor) -> None:
        """Record that the key's graph exists, so that batches may replay it.

        Raises:
            DispatchError: the dispatcher has no such key.
        """
        mode = CUDAGraphMode.parse(mode)
        key = self._keys.get((mode, descriptor))
        if key is None:
            raise DispatchError(
                "the dispatcher has no such key to mark as captured",
                expected="a mode and a descriptor of capture_plan()",
                found=f"{mode} {descriptor}",
                remedy="call add_key(mode, descriptor) first",
            )
        key.is_captured = True
        self._changed()

    def is_captured(self, mode: CUDAGraphMode | str, descriptor: BatchDescriptor) -> bool:
        """Whether :meth:`mark_captured` was called for this key."""
        key = self._keys.get((CUDAGraphMode.parse(mode), descriptor))
        return key is not None and key.is_captured

    def forget_captured(self) -> None:
        """Record that no graph exists any more; the keys stay and can be captured again."""
        for key in self._keys.values():
            key.is_captured = False
        self._changed()

    def with_captured(self, keys: Iterable[tuple[CUDAGraphMode, BatchDescriptor]]) -> CudagraphDispatcher:
        """A copy of this dispatcher in which exactly ``keys``, all of which it must have, are marked captured."""
        other = copy.deepcopy(self)
        other.forget_captured()
        for mode, descriptor in keys:
            other.mark_captured(mode, descriptor)
        return other

    def capture_plan(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Every key in capture order: PIECEWISE, then FULL, each from the largest to the smallest."""
        ordered = sorted(self._keys.values(), key=_capture_order, reverse=True)
        plan = [
            (mode, [key.descriptor for key in ordered if key.mode is mode])
            for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
        ]
        return [(mode, descriptors) for mode, descriptors in plan if descriptors]

    def fields(self, descriptor: BatchDescriptor) -> Mapping[str, int]:
        """A descriptor's size in every field of ``capture_sizes``; where those are a list, ``num_tokens`` only.

        Raises:
            DispatchError: the descriptor does not name a field.
        """
        return self._grid.fields(descriptor)

    def at_size(self, descriptor: BatchDescriptor, num_tokens: int) -> BatchDescriptor:
        """A key like ``descriptor`` for exactly so many tokens, of a dispatcher with a field ``num_tokens``."""
        num_reqs = descriptor.num_reqs
        if num_reqs is not None and (descriptor.uniform or "num_reqs" not in self.capture_fields):
            query_len = self.uniform_decode_query_len if descriptor.uniform else 1
            num_reqs = min(num_reqs, num_tokens // query_len)
        return replace(descriptor, num_tokens=num_tokens, num_reqs=num_reqs)

    def read(
        self, num_tokens: int | None = None, *, num_reqs: int | None = None, extra: Extra = ()
    ) -> tuple[Mapping[str, int], Extra]:
        """A batch's size in every field of ``capture_sizes``, and the remaining entries of ``extra``, sorted by name.

        Raises:
            DispatchError: a field is missing or is not a count.
        """
        return self._grid.read(num_tokens, num_reqs, extra)

    def _changed(self) -> None:
        self.revision += 1
        self._tables: dict[tuple[object, bool], _Table] = {}

    def _fault(self, mode: CUDAGraphMode, key: BatchDescriptor) -> tuple[str, str] | None:
        """(expected, remedy) for a key that no batch can dispatch to; None for a valid key."""
        if not mode or not mode.is_valid_runtime_mode() or not self._mode.has_mode(mode):
            return (f"a runtime mode of {self._mode}, not NONE", "call initialize_keys() with a mode that includes it")
        if key.num_tokens < 1 or (key.num_reqs is not None and key.num_reqs < 1):
            return ("at least 1 token and 1 request", "pass the padded counts")
        if mode is CUDAGraphMode.PIECEWISE and (key.num_reqs is not None or key.uniform):
            return ("num_reqs=None, uniform=False: PIECEWISE keys serve any requests", "leave both fields out")
        num_reqs, rest = divmod(key.num_tokens, self.uniform_decode_query_len)
        if key.uniform and (rest or key.num_reqs not in (None, num_reqs)):
            return (
                f"{self.uniform_decode_query_len} tokens a request in uniform keys",
                "set num_tokens and num_reqs accordingly",
            )
        if key.has_lora != (key.num_active_loras > 0) or key.num_active_loras not in self._key_adapters:
            counts = sorted(set(self._key_adapters))
            expected = f"num_active_loras one of {counts}, and has_lora only where it is not 0"
            return (expected, "use one of these counts")
        num_tokens = self._grid.num_tokens(self._grid.fields(key))
        if num_tokens != key.num_tokens:
            return (f"num_tokens={num_tokens}, the product of its fields", "set num_tokens to the product")
        return None

    # -- decisions -----------------------------------------------------------------------------------------------

    def dispatch(
        self,
        num_tokens: int | None = None,
        *,
        num_reqs: int | None = None,
        uniform_decode: bool = False,
        num_active_loras: int = 0,
        allowed_modes: Collection[CUDAGraphMode | str] | None = None,
        extra: Extra = (),
    ) -> Dispatch:
        """The key that replays a batch, or NONE with the unpadded shape.

        A uniform decode batch prefers a FULL key for uniform decode, then a key for mixed batches. EXACT and PADDED
        refer to the sizes alone: rounding up the number of adapters is not padding.

        Args:
            num_tokens: tokens of the batch; computed from the capture fields where ``num_tokens`` is not one of them.
            num_reqs: requests of the batch; None: any number that the key holds.
            uniform_decode: every request has ``uniform_decode_query_len`` tokens.
            num_active_loras: adapters the batch uses.
            allowed_modes: runtime modes to choose from, None for all; not modified.
            extra: the other capture fields, and further entries that the key's ``extra`` must equal, in any order.

        Raises:
            OptionError: ``allowed_modes`` has a value that is no mode and no name of one.
            DispatchError: a count is negative, missing or contradicts the configuration, ``allowed_modes`` is empty or
                contains a mode that is not a runtime mode, or
                no key fits and NONE is not allowed.
        """
        if (num_tokens is not None and num_tokens < 0) or (num_reqs is not None and num_reqs < 0):
            raise DispatchError(
                "a batch has counts",
                expected="num_tokens and num_reqs of at least 0",
                found=f"num_tokens={num_tokens}, num_reqs={num_reqs}",
                remedy="pass the real, unpadded counts",
            )
        if self._counts_tokens_only and num_tokens is not None and not extra:
            sizes: tuple[int, ...] = (num_tokens,)
            rest: Extra = ()
        else:
            fields, rest = self._grid.read(num_tokens, num_reqs, extra)
            sizes = tuple(fields.values())
            product = self._grid.num_tokens(fields)
            if num_tokens is not None and num_tokens != product:
                raise DispatchError(
                    "num_tokens contradicts the sizes of the batch",
                    expected=f"num_tokens={product}, the tokens of {named_sizes(fields.items())}",
                    found=f"num_tokens={num_tokens}",
                    remedy="pass the batch's sizes in extra, and num_tokens as their product",
                )
            num_tokens = product
            num_reqs = fields.get("num_reqs", num_reqs)
        uniform = uniform_decode and self._holds_whole_requests(num_tokens)
        adapters = self._captured_adapters(num_active_loras) if num_active_loras or self._lora is not None else 0
        allowed = None if allowed_modes is None else _runtime_modes(allowed_modes)
        if num_tokens == 0:
            return self._eager(sizes, DispatchReason.EMPTY, allowed)
        return self._decide(sizes, num_reqs or 0, uniform, (adapters, rest), allowed)

    def dispatch_descriptor(self, descriptor: BatchDescriptor) -> Dispatch:
        """Like :meth:`dispatch`, for a batch described by an unpadded descriptor.

        ``has_lora`` without a count stands for the largest number of adapters.

        Raises:
            DispatchError: as :meth:`dispatch`; or ``num_active_loras`` is not 0 although ``has_lora`` is False.
        """
        adapters = descriptor.num_active_loras
        if descriptor.has_lora and adapters == 0:
            adapters = max(len(self._key_adapters) - 1, 1)
        elif adapters and not descriptor.has_lora:
            raise DispatchError(
                "the descriptor contradicts itself",
                expected="has_lora=True where num_active_loras is not 0",
                found=str(descriptor),
                remedy="set has_lora=num_active_loras > 0",
            )
        fields = self._grid.fields(descriptor)
        return self.dispatch(
            descriptor.num_tokens,
            num_reqs=fields.get("num_reqs", descriptor.num_reqs),
            uniform_decode=descriptor.uniform,
            num_active_loras=adapters,
            extra=descriptor.extra,
        )

    def runtime_mode(self, num_reqs: int, num_tokens: int, max_query_len: int) -> tuple[CUDAGraphMode, int | None]:
        """The runtime mode and the padded token count of a batch; the count is None in mode NONE.

        The batch is uniform decode if ``max_query_len`` is ``uniform_decode_query_len`` and ``num_tokens`` is
        ``num_reqs`` times that length.

        Raises:
            DispatchError: as :meth:`dispatch`.
        """
        query_len = self.uniform_decode_query_len
        uniform = max_query_len == query_len and num_tokens == num_reqs * query_len
        step = self.dispatch(num_tokens, num_reqs=num_reqs, uniform_decode=uniform)
        return step.mode, step.descriptor.num_tokens if step.mode else None

    def _decide(
        self,
        sizes: tuple[int, ...],
        num_reqs: int,
        uniform: bool,
        identity: tuple[int, Extra],
        allowed: frozenset[CUDAGraphMode] | None,
    ) -> Dispatch:
        table = self._tables.get((identity, uniform)) or self._table(identity, uniform)
        question = (allowed, *map(bisect_left, table.rungs, (*sizes, num_reqs)))
        answer = table.answers.get(question)
        if answer is None:
            answer = table.answers[question] = self._answer(table, sizes, num_reqs, uniform, allowed)
        if isinstance(answer, DispatchReason):
            return self._eager(sizes, answer, allowed)
        key, exact, padded = answer
        return exact if key.sizes == sizes else padded

    def _table(self, identity: tuple[int, Extra], uniform: bool) -> _Table:
        """The keys for batches of this kind; batches whose identity no key has share a table without keys."""
        alike = sorted(self._keys.values(), key=lambda key: key.order)
        alike = [key for key in alike if key.identity == identity and uniform >= key.descriptor.uniform]
        known = identity if alike else None
        if (known, uniform) not in self._tables:
            columns = zip(*((*key.sizes, key.capacity) for key in alike), strict=True)
            rungs = tuple(sorted(set(column)) for column in columns)
            self._tables[known, uniform] = _Table(tuple(alike), rungs, answers={})
        return self._tables[known, uniform]

    def _answer(
        self,
        table: _Table,
        sizes: tuple[int, ...],
        num_reqs: int,
        uniform: bool,
        allowed: frozenset[CUDAGraphMode] | None,
    ) -> _Answer:
        mixed, routes = self._mode.mixed_mode(), {key.route for key in self._keys.values()}
        lacks_mixed = bool(mixed) and (mixed, False) not in routes
        is_above = lacks_mixed and (allowed is None or mixed in allowed)  # the mode has such graphs, but no size does
        missed = DispatchReason.TOO_LARGE if is_above else DispatchReason.DISABLED
        for mode, is_decode in _ROUTES:
            if (mode, is_decode) not in routes or is_decode > uniform or (allowed is not None and mode not in allowed):
                continue
            keys = [key for key in table.keys if key.route == (mode, is_decode)]
            key = next((key for key in keys if key.holds(sizes, num_reqs)), None)
            if key is None:
                missed = max(missed, DispatchReason.TOO_LARGE if keys else DispatchReason.NO_KEY, key=_CLOSENESS)
            elif self.is_lazy or key.is_captured:
                is_relaxed = uniform and not is_decode and self._mode.separate_routine()
                reasons = (DispatchReason.RELAXED,) * 2 if is_relaxed else (DispatchReason.EXACT, DispatchReason.PADDED)
                exact, padded = (Dispatch(mode, key.descriptor, reason) for reason in reasons)
                return key, exact, padded
            else:
                missed = DispatchReason.NOT_CAPTURED
        return missed

    def _eager(
        self, sizes: tuple[int, ...], reason: DispatchReason, allowed: frozenset[CUDAGraphMode] | None
    ) -> Dispatch:
        if allowed is not None and CUDAGraphMode.NONE not in allowed:
            raise DispatchError(
                f"no graph serves this batch, since {reason.explanation}",
                expected=f"a batch that fits a key of {', '.join(sorted(map(str, allowed)))}, as NONE is not allowed",
                found=named_sizes(zip(self._grid.sizes, sizes, strict=True)),
                remedy="allow NONE, or add and capture a key that holds the batch",
            )
        if self._counts_tokens_only:
            return Dispatch(CUDAGraphMode.NONE, BatchDescriptor(sizes[0]), reason)
        fields = dict(zip(self._grid.sizes, sizes, strict=True))
        return Dispatch(CUDAGraphMode.NONE, self._grid.describe(fields, num_reqs=fields.get("num_reqs")), reason)

    def _holds_whole_requests(self, num_tokens: int) -> bool:
        if num_tokens % self.uniform_decode_query_len == 0:
            return True
        if not self._mode.separate_routine():
            return False
        raise DispatchError(
            "a uniform decode batch holds whole requests",
            expected=f"a multiple of {self.uniform_decode_query_len} tokens (uniform_decode_query_len)",
            found=f"{num_tokens} tokens",
            remedy="pass uniform_decode=False, or the total number of tokens of all requests",
        )

    def _captured_adapters(self, num_active_loras: int) -> int:
        if 0 <= num_active_loras < len(self._key_adapters):
            return self._key_adapters[num_active_loras]
        raise DispatchError(
            "num_active_loras contradicts the configuration",
            expected=f"0 to {len(self._key_adapters) - 1}" if self._lora else "0, since the dispatcher has lora=None",
            found=str(num_active_loras),
            remedy="create the dispatcher with lora=LoraKeys(max_loras), where max_loras is at least the batch's count",
        )


def _runtime_modes(allowed_modes: Collection[CUDAGraphMode | str]) -> frozenset[CUDAGraphMode]:
    allowed = frozenset() if isinstance(allowed_modes, str) else frozenset(map(CUDAGraphMode.parse, allowed_modes))
    if allowed and all(mode.is_valid_runtime_mode() for mode in allowed):
        return allowed
    raise DispatchError(
        "allowed_modes contains a value that is not a runtime mode" if allowed else "allowed_modes is no set of modes",
        expected="a set with one or more of CUDAGraphMode.NONE, PIECEWISE and FULL",
        found=", ".join(sorted(map(str, allowed))) or repr(allowed_modes),
        remedy="leave allowed_modes out to allow every mode",
    )


def _capture_order(key: Key) -> tuple[int, int, int]:
    return key.descriptor.num_tokens, key.descriptor.num_reqs or 0, key.descriptor.num_active_loras
