"""Size grids: the named ladders of a dispatcher, and the descriptor for each combination of their sizes.

A list of token counts is a grid with the single field ``num_tokens``. Of several fields, a descriptor's ``num_tokens``
is the product, unless one is ``num_tokens`` itself (beside a bucketed maximum length, say). ``num_reqs`` is the
descriptor's attribute; all other fields are in ``extra``. PIECEWISE keys have no ``num_reqs``: if it is a factor of the
product, division gives it back; besides a ``num_tokens`` field it is in ``extra``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from graphpass.errors import DispatchError, positive
from graphpass.keys import BatchDescriptor

Extra = tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Bounds of the generated keys."""

    max_num_reqs: int  #: the largest number of requests in a batch
    query_len: int  #: tokens per request in a uniform decode batch
    max_num_tokens: int | None  #: tokens of the largest expected batch; None for no bound

    def __post_init__(self) -> None:
        positive(self.max_num_reqs, "max_num_reqs", error=DispatchError)
        positive(self.query_len, "uniform_decode_query_len", error=DispatchError)
        if self.max_num_tokens is not None:
            positive(self.max_num_tokens, "max_num_tokens", error=DispatchError)


@dataclass(frozen=True, slots=True)
class SizeGrid:
    """Field name -> requested sizes, in the order of the caller's mapping."""

    sizes: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(capture_sizes: Sequence[int] | Mapping[str, Sequence[int]]) -> SizeGrid:
        """The grid of a list of token counts or of named ladders; the caller's collections are copied."""
        if not isinstance(capture_sizes, Mapping):
            return SizeGrid({"num_tokens": _checked_sizes(capture_sizes, "a capture size")})
        if not capture_sizes:
            raise DispatchError(
                "capture_sizes names no field",
                expected="{field: sizes}, or a list of token counts",
                found="an empty mapping",
                remedy="name a field, such as {'num_tokens': [1, 2, 4]}",
            )
        return SizeGrid(
            {name: _checked_sizes(ladder, f"a capture size of {name!r}") for name, ladder in capture_sizes.items()}
        )

    def descriptors(
        self, limits: KeyLimits, *, is_full: bool, uniform: bool, adapters: int
    ) -> Iterator[BatchDescriptor]:
        """The keys of uniform decode batches, which are FULL, or of all others, for one number of adapters.

        Without a ``num_tokens`` field the token counts of uniform batches are those of combinations that hold whole
        requests.
        """
        query_len = limits.query_len if uniform else 1
        for sizes, num_tokens in self._combinations(limits, decode=uniform):
            if num_tokens % query_len == 0:
                num_reqs = sizes.get("num_reqs", min(num_tokens // query_len, limits.max_num_reqs)) if is_full else None
                yield self.describe(sizes, num_reqs=num_reqs, uniform=uniform, adapters=adapters)

    def _combinations(self, limits: KeyLimits, *, decode: bool) -> Iterator[tuple[dict[str, int], int]]:
        ladders = {name: capture_sizes_within(ladder, None, limits.query_len) for name, ladder in self.sizes.items()}
        counted = "num_tokens" in ladders
        if counted:
            ladders["num_tokens"] = capture_sizes_within(ladders["num_tokens"], limits.max_num_tokens, limits.query_len)
        if counted and decode:
            ladders["num_tokens"] = decode_sizes(ladders["num_tokens"], limits.max_num_reqs, limits.query_len)
            ladders.pop("num_reqs", None)  # the token count of a uniform batch determines the number of its requests
        for values in product(*ladders.values()):
            sizes = dict(zip(ladders, values, strict=True))
            num_tokens = self.num_tokens(sizes)
            if counted or limits.max_num_tokens is None or num_tokens <= limits.max_num_tokens:
                yield sizes, num_tokens

    @staticmethod
    def num_tokens(sizes: Mapping[str, int]) -> int:
        """The token count of one combination of sizes: its ``num_tokens`` field if there is one, else the product."""
        return sizes["num_tokens"] if "num_tokens" in sizes else math.prod(sizes.values())

    def describe(
        self, sizes: Mapping[str, int], *, num_reqs: int | None = None, uniform: bool = False, adapters: int = 0
    ) -> BatchDescriptor:
        """The descriptor of one combination of sizes."""
        own = {"num_tokens"} if "num_tokens" in sizes and num_reqs is None else {"num_tokens", "num_reqs"}
        return BatchDescriptor(
            num_tokens=self.num_tokens(sizes),
            num_reqs=num_reqs,
            uniform=uniform,
            has_lora=adapters > 0,
            num_active_loras=adapters,
            extra=tuple((name, size) for name, size in sizes.items() if name not in own),
        )

    def fields(self, descriptor: BatchDescriptor) -> dict[str, int]:
        """Field name -> size, from a descriptor."""
        named = named_values(descriptor.extra, descriptor.num_tokens, descriptor.num_reqs)
        if "num_reqs" not in named and "num_reqs" in self.sizes and "num_tokens" not in self.sizes:
            others = math.prod(self._count(named, name) for name in self.sizes if name != "num_reqs")
            if others and descriptor.num_tokens % others == 0:
                named["num_reqs"] = descriptor.num_tokens // others
        return {name: self._count(named, name) for name in self.sizes}

    def read(self, num_tokens: int | None, num_reqs: int | None, extra: Extra) -> tuple[dict[str, int], Extra]:
        """Split the numbers of a batch into (field name -> size, the other pairs of ``extra`` in order of name)."""
        named = named_values(extra, num_tokens, num_reqs)
        sizes = {name: self._count(named, name) for name in self.sizes}
        return sizes, without(sizes, extra)

    def _count(self, named: Mapping[str, object], name: str) -> int:
        try:
            count = operator.index(named[name])  # type: ignore[arg-type]  # numpy integers are counts too
        except (KeyError, TypeError):
            count = -1
        if count < 0:
            where = f"{name}=..." if name in ("num_tokens", "num_reqs") else f"extra=(({name!r}, ...),)"
            raise DispatchError(
                f"field {name!r} of the capture sizes cannot be padded",
                expected=f"a count of at least 0 for each of {', '.join(self.sizes)}",
                found=repr(named[name]) if name in named else "no such field",
                remedy=f"pass {where}",
            )
        return count


def without(fields: Collection[str], extra: Extra) -> Extra:
    """The pairs of ``extra`` that are no sizes of ``fields``, sorted by name."""
    return tuple(sorted((pair for pair in extra if pair[0] not in fields), key=lambda pair: pair[0]))


def _checked_sizes(sizes: Iterable[int], name: str) -> tuple[int, ...]:
    return tuple(positive(size, name, error=DispatchError) for size in sizes)


def named_values(extra: Extra, num_tokens: int | None, num_reqs: int | None) -> dict[str, Hashable]:
    """{name: value} of the numbers of a batch or a key and of its ``extra``."""
    try:
        named = dict(extra)
        well_formed = len(named) == len(extra) and all(isinstance(name, str) for name in named)
        hash(tuple(named.values()))
    except (TypeError, ValueError):
        named, well_formed = {}, False
    if not well_formed:
        raise DispatchError(
            "extra cannot name a key",
            expected="a tuple of (name, hashable value) pairs, each name once",
            found=repr(extra),
            remedy="pass extra=(('seq_len', 64),)",
        )
    counts = {"num_tokens": num_tokens, "num_reqs": num_reqs}
    return named | {name: count for name, count in counts.items() if count is not None}


def capture_sizes_within(sizes: Sequence[int], max_num_tokens: int | None, query_len: int) -> tuple[int, ...]:
    """The token counts to capture, ascending and without duplicates."""
    within = tuple(sorted(set(sizes)))
    if max_num_tokens is not None:
        bound = round_up(max_num_tokens, query_len)
        within = tuple(size for size in within if size <= bound)
    if not within:
        raise DispatchError(
            "there is no size to capture",
            expected="a size of at least 1" + ("" if max_num_tokens is None else f" and at most {max_num_tokens}"),
            found=repr(list(sizes)),
            remedy="list the sizes to capture, raise max_num_tokens, or use mode NONE",
        )
    return within


def decode_sizes(sizes: Sequence[int], max_num_reqs: int, query_len: int) -> tuple[int, ...]:
    """Token counts of the uniform decode keys, ascending multiples of ``query_len``.

    Capture sizes are rounded up to whole requests, and that of ``max_num_reqs`` requests is added; larger ones, and
    those above the largest capture size, are left out.
    """
    largest = min(max_num_reqs * query_len, round_up(max(sizes), query_len))
    rounded = {round_up(size, query_len) for size in sizes} | {max_num_reqs * query_len}
    return tuple(sorted(size for size in rounded if query_len <= size <= largest))


def round_up(size: int, stride: int) -> int:
    """The smallest multiple of ``stride`` that is at least ``size``."""
    return -(-size // stride) * stride
