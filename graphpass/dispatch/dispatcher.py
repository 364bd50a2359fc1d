"""The dispatcher: from a batch to the key that replays it.

Only the dispatcher's keys decide which graphs may replay. A decision tries at most three routes in order of
preference: FULL for uniform decode, FULL for mixed batches, PIECEWISE. On each route, one table look-up returns the
smallest key that fits the batch. If no graph can replay, the decision's reason says why.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from graphpass.dispatch.decision import Dispatch, DispatchReason
from graphpass.dispatch.grid import Extra, KeyLimits, SizeGrid
from graphpass.dispatch.keyset import KeySet
from graphpass.dispatch.lora import LoraKeys
from graphpass.errors import DispatchError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = ["CudagraphDispatcher", "Dispatch", "DispatchReason"]

# Where several routes fail, the decision reports the reason that is closest to a replay: the last in this order.
_CLOSENESS = (
    DispatchReason.DISABLED,
    DispatchReason.NO_KEY,
    DispatchReason.TOO_LARGE,
    DispatchReason.NOT_CAPTURED,
).index


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
        self._counts_tokens_only = self._grid.counts_tokens_only()
        self._max_num_reqs = max_num_reqs
        self._max_num_tokens = max_num_tokens
        self._lora = lora
        self._key_adapters = (0,) if lora is None else lora.count_table()
        self._lazy = lazy
        self._revision = 0
        self.initialize_keys(mode, uniform_decode_query_len)

    @property
    def mode(self) -> CUDAGraphMode:
        """The mode that determines the keys."""
        return self._keys.mode

    @property
    def capture_fields(self) -> tuple[str, ...]:
        """The fields of ``capture_sizes``; a list has ``num_tokens`` only."""
        return tuple(self._grid.sizes)

    @property
    def uniform_decode_query_len(self) -> int:
        """Tokens of one request in a uniform decode batch."""
        return self._keys.limits.query_len

    @property
    def is_lazy(self) -> bool:
        """Whether decisions may name keys that are not captured yet."""
        return self._lazy

    @property
    def revision(self) -> int:
        """A counter that increases with every change of the keys or of their captured marks."""
        return self._revision

    # -- keys ----------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> Mapping[CUDAGraphMode, frozenset[BatchDescriptor]]:
        """A snapshot of every key by runtime mode, captured or not."""
        return MappingProxyType(
            {mode: frozenset(self._keys.descriptors(mode)) for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)}
        )

    def initialize_keys(self, mode: CUDAGraphMode | str, uniform_decode_query_len: int = 1) -> None:
        """Replace all keys with the keys of ``mode``; none of the new keys is marked captured.

        Raises:
            DispatchError: ``uniform_decode_query_len`` is below 1, or no size is left.
            OptionError: unknown mode.
        """
        parsed = CUDAGraphMode.parse(mode)
        limits = KeyLimits(self._max_num_reqs, uniform_decode_query_len, self._max_num_tokens)
        self._keys = KeySet(parsed, self._grid, limits, self._lora)
        self._revision += 1

    def add_key(self, mode: CUDAGraphMode | str, descriptor: BatchDescriptor) -> None:
        """Add one key, not captured yet; adding a key twice changes nothing.

        Raises:
            DispatchError: no batch can ever dispatch to the key, or it lacks a field of ``capture_sizes``.
        """
        self._keys.add(CUDAGraphMode.parse(mode), descriptor)
        self._revision += 1

    def mark_captured(self, mode: CUDAGraphMode | str, descriptor: BatchDescriptor) -> None:
        """Record that the key's graph exists, so that batches may replay it.

        Raises:
            DispatchError: the dispatcher has no such key.
        """
        self._keys.mark_captured(CUDAGraphMode.parse(mode), descriptor)
        self._revision += 1

    def is_captured(self, mode: CUDAGraphMode | str, descriptor: BatchDescriptor) -> bool:
        """Whether :meth:`mark_captured` was called for this key."""
        return self._keys.is_captured(CUDAGraphMode.parse(mode), descriptor)

    def forget_captured(self) -> None:
        """Record that no graph exists any more; the keys stay and can be captured again."""
        self._keys.forget_captured()
        self._revision += 1

    def with_captured(self, keys: Iterable[tuple[CUDAGraphMode, BatchDescriptor]]) -> CudagraphDispatcher:
        """A copy of this dispatcher in which exactly ``keys``, all of which it must have, are marked captured."""
        other = copy.deepcopy(self)
        other.forget_captured()
        for mode, descriptor in keys:
            other.mark_captured(mode, descriptor)
        return other

    def capture_plan(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Every key in capture order: PIECEWISE, then FULL, each from the largest to the smallest."""
        return self._keys.capture_plan()

    def fields(self, descriptor: BatchDescriptor) -> Mapping[str, int]:
        """A descriptor's size in every field of ``capture_sizes``; where those are a list, ``num_tokens`` only.

        Raises:
            DispatchError: the descriptor does not name a field.
        """
        return self._grid.fields(descriptor)

    def read(
        self, num_tokens: int | None = None, *, num_reqs: int | None = None, extra: Extra = ()
    ) -> tuple[Mapping[str, int], Extra]:
        """A batch's size in every field of ``capture_sizes``, and the remaining entries of ``extra``, sorted by name.

        Raises:
            DispatchError: a field is missing or is not a count.
        """
        return self._grid.read(num_tokens, num_reqs, extra)

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
            raise _negative(num_tokens, num_reqs)
        if self._counts_tokens_only and num_tokens is not None and not extra:
            sizes: tuple[int, ...] = (num_tokens,)
            rest: Extra = ()
        else:
            fields, rest = self._grid.read(num_tokens, num_reqs, extra)
            sizes = tuple(fields.values())
            num_tokens = self._grid.num_tokens(fields)
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
                found=repr(descriptor),
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
        query_len = self._keys.limits.query_len
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
        """The key of the first route that fits the batch, or NONE."""
        missed = DispatchReason.DISABLED
        keys = self._keys
        for route in keys.uniform_routes if uniform else keys.mixed_routes:
            if allowed is not None and route.mode not in allowed:
                continue
            family = route.family(identity)
            if family is None:
                missed = max(missed, DispatchReason.NO_KEY, key=_CLOSENESS)
                continue
            rung = family.smallest(sizes, num_reqs)
            if rung is None:
                missed = max(missed, DispatchReason.TOO_LARGE, key=_CLOSENESS)
            elif self._lazy or route.is_ready(rung):
                if uniform and keys.has_decode_routine and not route.uniform:
                    return rung.relaxed
                return rung.exact if rung.sizes == sizes else rung.padded
            else:
                missed = DispatchReason.NOT_CAPTURED
        return self._eager(sizes, missed, allowed)

    def _eager(
        self, sizes: tuple[int, ...], reason: DispatchReason, allowed: frozenset[CUDAGraphMode] | None
    ) -> Dispatch:
        """NONE with the unpadded shape; a DispatchError if NONE is not allowed."""
        if allowed is not None and CUDAGraphMode.NONE not in allowed:
            raise DispatchError(
                f"no graph serves this batch, since {reason.explanation}",
                expected=f"a batch that fits a key of {', '.join(sorted(map(str, allowed)))}, as NONE is not allowed",
                found=f"sizes {dict(zip(self._grid.sizes, sizes, strict=True))}",
                remedy="allow NONE, or add and capture a key that holds the batch",
            )
        if self._counts_tokens_only:
            return Dispatch(CUDAGraphMode.NONE, BatchDescriptor(sizes[0]), reason)
        fields = dict(zip(self._grid.sizes, sizes, strict=True))
        return Dispatch(CUDAGraphMode.NONE, self._grid.describe(fields, num_reqs=fields.get("num_reqs")), reason)

    def _holds_whole_requests(self, num_tokens: int) -> bool:
        """Whether the count is a multiple of the query length; if not, an error where the mode has decode keys."""
        if num_tokens % self._keys.limits.query_len == 0:
            return True
        if not self._keys.has_decode_routine:
            return False
        raise DispatchError(
            "a uniform decode batch holds whole requests",
            expected=f"a multiple of {self._keys.limits.query_len} tokens (uniform_decode_query_len)",
            found=f"{num_tokens} tokens",
            remedy="pass uniform_decode=False, or the total number of tokens of all requests",
        )

    def _captured_adapters(self, num_active_loras: int) -> int:
        """The adapter count of the keys for a batch with ``num_active_loras`` adapters."""
        if 0 <= num_active_loras < len(self._key_adapters):
            return self._key_adapters[num_active_loras]
        raise DispatchError(
            "num_active_loras contradicts the configuration",
            expected=f"0 to {len(self._key_adapters) - 1}" if self._lora else "0, since the dispatcher has lora=None",
            found=str(num_active_loras),
            remedy="create the dispatcher with lora=LoraKeys(max_loras), where max_loras is at least the batch's count",
        )


def _negative(num_tokens: int | None, num_reqs: int | None) -> DispatchError:
    return DispatchError(
        "a batch has counts",
        expected="num_tokens and num_reqs of at least 0",
        found=f"num_tokens={num_tokens}, num_reqs={num_reqs}",
        remedy="pass the real, unpadded counts",
    )


def _runtime_modes(allowed_modes: Collection[CUDAGraphMode | str]) -> frozenset[CUDAGraphMode]:
    """The allowed modes as a frozenset.

    Raises:
        DispatchError: ``allowed_modes`` is empty, or one of its members is a pair.
        OptionError: one of its members is no mode and no name of one.
    """
    allowed = frozenset(map(CUDAGraphMode.parse, allowed_modes))
    if allowed and all(mode.is_valid_runtime_mode() for mode in allowed):
        return allowed
    raise DispatchError(
        "allowed_modes is empty" if not allowed else "allowed_modes contains a value that is not a runtime mode",
        expected="one or more of CUDAGraphMode.NONE, PIECEWISE and FULL",
        found=", ".join(sorted(map(str, allowed))) or "no mode",
        remedy="leave allowed_modes out to allow every mode",
    )
