"""A step's tables over a paged KV cache: the slots of each token's key and value, on the host and on the device.

A slot is a position in a layer's cache, ``page * page_size + offset``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from graphpass.errors import ShapeError
from graphpass.text.paged.cache import FIRST_LIVE_PAGE, NULL_PAGE, SCRATCH_PAGE, PagedKVCache, PagedRequests

__all__ = ["Step", "TableLayout", "Tables", "check_fits"]

_Ints = npt.NDArray[np.integer[Any]]
_Table = TypeVar("_Table")


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of one step, after checks that need no other input.

    Attributes:
        query_lens, seq_lens: as given, [requests].
        num_pages: pages in use of each request, [requests].
        pages: those, request by request.
        num_tokens: of all requests.
    """

    query_lens: _Ints
    seq_lens: _Ints
    num_pages: _Ints
    pages: _Ints
    num_tokens: int

    @classmethod
    def of(cls, requests: PagedRequests, cache: PagedKVCache) -> Step:
        """Read and check requests against the cache.

        Raises:
            ShapeError: they contradict each other, or have pages that they cannot have.
        """
        query_lens, seq_lens = (np.asarray(n, dtype=np.int64) for n in (requests.query_lens, requests.seq_lens))
        if not len(query_lens) == len(seq_lens) == len(requests.block_tables):
            raise ShapeError(
                "the lists of a step's requests differ in length",
                expected="one query length, one sequence length and one block table a request",
                found=f"{len(query_lens)}, {len(seq_lens)} and {len(requests.block_tables)}",
                remedy="give every request an entry in each list",
            )
        if len(query_lens) == 0:
            return cls(query_lens, seq_lens, seq_lens, seq_lens, 0)
        # In every step: reductions of ufuncs take half the time of the methods of arrays.
        if np.minimum.reduce(np.minimum(query_lens - 1, seq_lens - query_lens)) < 0:
            at = int(np.argmax((query_lens < 1) | (seq_lens < query_lens)))
            raise ShapeError(
                f"request {at} of the step has invalid lengths",
                expected="at least one token in this step, and a sequence that includes them",
                found=f"{query_lens[at]} tokens, a sequence of {seq_lens[at]}",
                remedy="seq_lens are the lengths after the step; leave requests without tokens out",
            )
        num_pages = -(-seq_lens // cache.page_size)
        pages = _used_pages(requests.block_tables, num_pages, cache.page_size)
        _check_pages(pages, num_pages, cache.num_pages, requests.is_scratch)
        return cls(query_lens, seq_lens, num_pages, pages, int(np.add.reduce(query_lens)))


def _used_pages(block_tables: Any, num_pages: _Ints, page_size: int) -> _Ints:
    """The pages in use, grouped by request.

    Raises:
        ShapeError: a request has fewer pages than its sequence needs.
    """
    is_array = isinstance(block_tables, np.ndarray)
    if is_array:
        lengths = np.full(len(num_pages), block_tables.shape[1])
    else:
        lengths = np.fromiter(map(len, block_tables), np.int64, len(num_pages))
    spare = lengths - num_pages
    if np.minimum.reduce(spare) < 0:
        at = int(np.argmax(spare < 0))
        raise ShapeError(
            f"request {at} of the step has too few pages",
            expected=f"{num_pages[at]} pages of {page_size} positions for its sequence",
            found=f"{lengths[at]}",
            remedy="allocate pages before the step that needs them",
        )
    if is_array:
        used: _Ints = block_tables[np.arange(block_tables.shape[1]) < num_pages[:, None]]
        return used
    if np.logical_or.reduce(spare):
        block_tables = [table[:count] for table, count in zip(block_tables, num_pages.tolist(), strict=True)]
    return np.fromiter(chain.from_iterable(block_tables), np.int64, int(np.add.reduce(num_pages)))


def _check_pages(pages: _Ints, num_pages: _Ints, num_live: int, is_scratch: bool) -> None:
    lowest, highest = (SCRATCH_PAGE, SCRATCH_PAGE) if is_scratch else (FIRST_LIVE_PAGE, num_live + FIRST_LIVE_PAGE - 1)
    if lowest <= np.minimum.reduce(pages) and np.maximum.reduce(pages) <= highest:
        return
    entry = int(np.argmax((pages < lowest) | (pages > highest)))
    request = int(np.searchsorted(np.cumsum(num_pages), entry, side="right"))
    reserved = {
        NULL_PAGE: "the null page, which is never written",
        SCRATCH_PAGE: "the scratch page, which is never read",
    }
    page = int(pages[entry])
    raise ShapeError(
        f"request {request} of the step has an invalid page",
        expected="only the scratch page" if is_scratch else f"pages {lowest} to {highest}",
        found=f"{page}" + (f", {reserved[page]}" if page in reserved else ""),
        remedy="use the pages that PageAllocator.allocate() returned",
    )


@dataclass(frozen=True, slots=True)
class Tables(Generic[_Table]):
    """A step's tables: arrays on the host, tensors on the device. Each set is a view of one flat allocation.

    Attributes:
        slot_mapping: slot that each token's key and value are written to, int64 [tokens]; scratch for padding.
        block_tables: page numbers, [requests, pages]; null behind the last.
        seq_lens: [requests]; 0 for unused ones.
        query_start_loc: where each request's tokens begin, [requests + 1]; the count of real tokens behind the last.
        first_positions: position of each request's first token of this step, [requests]; 0 for unused ones.
        token_rows: of mixed batches: where each token stands in [requests, max_query_len], [tokens]; -1 for padding.
        key_start_loc: of packed keys: where each request's begin, [requests + 1].
        key_slots: of packed keys: the slot of every position of every request, [keys]; null behind the last.
        positions: where layers scale queries by position: each token's, [tokens]; 0 for padding.
    """

    slot_mapping: _Table
    block_tables: _Table
    seq_lens: _Table
    query_start_loc: _Table
    first_positions: _Table
    token_rows: _Table
    key_start_loc: _Table
    key_slots: _Table
    positions: _Table


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The sizes of one metadata object's tables, all of them int32 in one piece but the int64 slot mapping before.

    Attributes:
        num_tokens: padded.
        num_reqs: padded.
        query_len: tokens of each request in a uniform batch, None in a mixed one.
        max_query_len: most tokens of a request.
        limit: longest sequence.
        max_seq_len: that in whole pages.
        num_keys: packed keys, 0 where keys are not packed.
        page_size: of the cache.
        has_positions: whether there is a table of positions.
    """

    num_tokens: int
    num_reqs: int
    query_len: int | None
    max_query_len: int
    limit: int
    max_seq_len: int
    num_keys: int
    page_size: int
    has_positions: bool

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        is_mixed = self.query_len is None
        return (
            (self.num_reqs, self.max_seq_len // self.page_size),
            (self.num_reqs,),
            (self.num_reqs + 1,),
            (self.num_reqs,),
            (self.num_tokens if is_mixed else 0,),
            (self.num_reqs + 1 if self.num_keys else 0,),
            (self.num_keys,),
            (self.num_tokens if self.has_positions else 0,),
        )

    def num_int32(self) -> int:
        """Size of the flat memory."""
        return 2 * self.num_tokens + sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in self._shapes())

    def views(self, flat: Any, int64: Any) -> Tables[Any]:
        """The tables in ``flat``, a tensor or array of :meth:`num_int32`; ``int64`` is its kind's 64-bit dtype."""
        start = 2 * self.num_tokens
        views = [flat[:start].view(int64)]
        for shape in self._shapes():
            size = shape[0] * (shape[1] if len(shape) > 1 else 1)
            views.append(flat[start : start + size].reshape(shape))
            start += size
        return Tables(*views)

    def check(self, step: Step) -> None:
        """Whether a step fits.

        Raises:
            ShapeError: it has more requests, tokens or positions, or another query length.
        """
        check_fits(step, num_reqs=self.num_reqs, num_tokens=self.num_tokens, max_seq_len=self.limit)
        if self.query_len is not None and np.logical_or.reduce(step.query_lens != self.query_len):
            raise ShapeError(
                "a step is not the uniform batch of its key",
                expected=f"{self.query_len} tokens of every request",
                found=f"{step.query_lens.min()} to {step.query_lens.max()}",
                remedy="dispatch with uniform_decode=False",
            )

    def fill(self, tables: Tables[_Ints], step: Step) -> None:
        """Write a step that fits into tables on the host."""
        count, num_tokens, page_size = len(step.query_lens), step.num_tokens, self.page_size
        block_tables, starts = tables.block_tables, tables.query_start_loc
        block_tables.fill(NULL_PAGE)
        block_tables[:count][np.arange(block_tables.shape[1]) < step.num_pages[:, None]] = step.pages
        first_positions = step.seq_lens - step.query_lens
        for table, values in ((tables.seq_lens, step.seq_lens), (tables.first_positions, first_positions)):
            table[:count] = values
            table[count:] = 0
        starts[0] = 0
        starts[1 : count + 1] = step.query_lens.cumsum()
        starts[count + 1 :] = num_tokens
        requests, within = self._places(step, starts)
        slots, padding = tables.slot_mapping, np.arange(self.num_tokens - num_tokens)
        positions = first_positions[requests] + within
        slots[:num_tokens] = self._slots(block_tables, requests, positions)
        slots[num_tokens:] = SCRATCH_PAGE * page_size + padding % page_size
        if self.query_len is None:
            tables.token_rows[:num_tokens] = requests * self.max_query_len + within
            tables.token_rows[num_tokens:] = -1
        if self.has_positions:
            tables.positions[:num_tokens] = positions
            tables.positions[num_tokens:] = 0
        if self.num_keys:
            self._fill_keys(tables, step)

    def _places(self, step: Step, starts: _Ints) -> tuple[_Ints, _Ints | int]:
        """For each token the index of its request, and its position among the request's tokens of this step."""
        count, tokens = len(step.query_lens), np.arange(step.num_tokens)
        if self.query_len == 1:
            return tokens, 0
        if self.query_len is not None:
            return tokens // self.query_len, tokens % self.query_len
        requests = np.repeat(np.arange(count), step.query_lens)
        return requests, tokens - starts[requests]

    def _slots(self, block_tables: _Ints, requests: _Ints, positions: _Ints) -> _Ints:
        pages, offsets = np.divmod(positions, self.page_size)
        return block_tables[requests, pages] * self.page_size + offsets

    def _fill_keys(self, tables: Tables[_Ints], step: Step) -> None:
        count, num_keys = len(step.seq_lens), int(step.seq_lens.sum())
        starts = tables.key_start_loc
        starts[0] = 0
        starts[1 : count + 1] = step.seq_lens.cumsum()
        starts[count + 1 :] = num_keys
        requests = np.repeat(np.arange(count), step.seq_lens)
        tables.key_slots[:num_keys] = self._slots(tables.block_tables, requests, np.arange(num_keys) - starts[requests])
        tables.key_slots[num_keys:] = NULL_PAGE * self.page_size


def check_fits(step: Step, *, num_reqs: int, num_tokens: int, max_seq_len: int) -> None:
    """Whether a step is within these bounds.

    Raises:
        ShapeError: it has more requests, tokens or positions.
    """
    for what, found, limit in (
        ("requests", len(step.query_lens), num_reqs),
        ("tokens", step.num_tokens, num_tokens),
        ("positions in its longest sequence", int(np.maximum.reduce(step.seq_lens, initial=0)), max_seq_len),
    ):
        if found > limit:
            raise ShapeError(
                f"a step has too many {what}",
                expected=f"at most {limit}, the bound of its key or of PagedAttention",
                found=str(found),
                remedy="dispatch with the step's own sizes, PagedAttention.extra() among them, or schedule less",
            )
