"""The tables that a tower computes from grids: which they are, computed by item, joined for a batch, padded, copied.

Towers compute them with functions of transformers that take the grids first and a dict ``kwargs``: a table that is in
this dict is taken from it. So a tower that is called once with grids says which tables it takes, and how they are made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphpass.encoder.adapters.items import Grid
from graphpass.encoder.attention import Pieces, most_pieces, pieces_of
from graphpass.encoder.protocol import EncoderGraphKey
from graphpass.errors import EncoderConfigError

_LIBRARY = "transformers."
_ROWS, _INDEX, _BOUNDS = "rows", "index", "bounds"
_KEPT, _KEPT_BATCHES = 256, 16
OWN_TOWER = "implement the protocol for it: docs/encoder_protocol.md"
_STRIP = 64
GRID_KEY = "grid_thw"
Words = npt.NDArray[np.int32]


class _Taken(dict[str, Any]):
    """A ``kwargs`` without tables that notes which ones are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def pop(self, name: str, *default: Any) -> Any:
        self.names.append(name)
        return default[0] if default else None


@dataclass(frozen=True, slots=True)
class TableCall:
    """A call that makes tables: ``function(**{grid_name: grids}, **arguments, kwargs=...)``."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    grid_name: str | None  #: the argument that the grids are; None: it takes something else

    def tables(self, **grids: torch.Tensor) -> dict[str, Any]:
        """{name under which the tower takes it: table, or a number}."""
        taken = _Taken()
        found = self.function(**{**self.arguments, **grids}, kwargs=taken)
        return dict(zip(taken.names, found if isinstance(found, tuple) else (found,), strict=True))


@contextlib.contextmanager
def noted_calls(grids: torch.Tensor) -> Iterator[list[TableCall]]:
    """Note the calls of this thread, within the body, of functions that make tables from ``grids``."""
    calls: list[TableCall] = []
    running: list[Any] = []

    def seen(frame: Any, event: str, _: object) -> None:
        if event == "return" and running and frame is running[0]:
            running.clear()
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if event != "call" or running or "kwargs" not in arguments:
            return
        if frame.f_globals.get("__name__", "").startswith(_LIBRARY):
            running.append(frame)
            values = {name: frame.f_locals[name] for name in arguments}
            given = next((name for name, value in values.items() if value is grids), None)
            function = frame.f_globals.get(code.co_name)
            is_given = values.pop("kwargs") is not None  # else the tower takes no tables in place of these
            if is_given and function is not None and _tensors_of(values):
                calls.append(TableCall(function, values, given))

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@dataclass(frozen=True, slots=True)
class _TableKind:
    """What one table is like."""

    kind: str  #: a row for each patch; the place of each row among those of a batch; or the bounds of sequences
    columns: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int32
    patches_per_row: int = 1
    tokens_per_sequence: int = 0  #: of sequences: a frame has one more for so many tokens, at most; 0: it is one
    longest: int | None = None  #: of sequences: most patches; None: all patches of a batch

    def sequences(self, frames: int, tokens: int) -> int:
        """The most sequences that so many frames with so many tokens together have."""
        return frames + (tokens // self.tokens_per_sequence if self.tokens_per_sequence else 0)


@dataclass
class GridTables:
    """The tables of a batch, with the pieces of its sequences, and the grids of its frames, all of 32 bits.

    Raises:
        EncoderConfigError: a table is not made of its items' tables, or the tower does not take it.
    """

    calls: Sequence[TableCall]
    unit: int  #: patches of a token
    merge: int  #: sides of grids are multiples of it
    limits: list[str] = field(default_factory=list)  #: names of numbers that the tower takes: lengths of sequences
    kinds: dict[str, _TableKind] = field(default_factory=dict)  #: {name: what it is like}

    def __post_init__(self) -> None:
        self._words_of_item = functools.lru_cache(_KEPT)(self._flat_words)
        self._joined = functools.lru_cache(_KEPT_BATCHES)(self._join)
        first, second = (2, 4 * self.merge, 6 * self.merge), (1, 2 * self.merge, 4 * self.merge)
        numbers = (first, 2 * first[1] * first[2]), (second, second[1] * second[2])
        (one, patches), (other, _) = ((self._tables([grid]), count) for grid, count in numbers)
        both = self._tables([first, second])
        for name, table in both.items():
            if isinstance(table, torch.Tensor):
                self.kinds[name] = self._kind(name, one[name], other[name], table, patches)
            else:
                self.limits.append(name)
        self._sequences = [name for name, table in self.kinds.items() if table.kind == _BOUNDS]
        if not self._sequences:
            raise _unfit("bounds of sequences from grids", f"the tables {sorted(self.kinds)}")
        #: names of all buffers
        self.names = (*self.kinds, GRID_KEY, *itertools.chain(*map(piece_keys, self._sequences)))

    def arguments(self, tables: Mapping[str, torch.Tensor], num_patches: int) -> dict[str, Any]:
        """What the tower takes instead of computing it. All sequences are at most as long as the batch."""
        return {name: tables[name] for name in (*self.kinds, GRID_KEY)} | dict.fromkeys(self.limits, num_patches)

    def pieces(self, tables: Mapping[str, torch.Tensor]) -> dict[int, Pieces[torch.Tensor]]:
        """{id of a table of bounds: the pieces of its sequences}."""
        return {id(tables[n]): Pieces(*(tables[key] for key in piece_keys(n))) for n in self._sequences}

    def rows(self, key: EncoderGraphKey) -> dict[str, int]:
        """{buffer: its rows for ``key``}."""
        frames = min(key.frames or key.items, key.tokens)
        rows = {name: key.patches // table.patches_per_row for name, table in self.kinds.items()}
        rows[GRID_KEY] = frames + 1
        for name in self._sequences:
            table = self.kinds[name]
            rows[name] = table.sequences(frames, key.tokens) + 2
            most = most_pieces(rows[name] - 2, key.patches, table.longest or key.patches)
            rows |= zip(piece_keys(name), (most + 1, most + 1, most), strict=True)
        return rows

    def on_device(
        self, grids: Sequence[Grid], device: torch.device, key: EncoderGraphKey | None = None
    ) -> dict[str, torch.Tensor]:
        """{buffer: contents for a batch, on the device}, padded for ``key``; None: without padding.

        They are joined and padded in pinned memory, and copied at once. Padding is a sequence of its own.
        """
        flat, sizes = self._joined(tuple(grid for grid in grids if math.prod(grid)), key, device.type == "cuda")
        # Callers may write to their copy.
        parts = flat.to(device, non_blocking=True, copy=True).split(sizes)
        return {name: self._shaped(name, part) for name, part in zip(self.names, parts, strict=True)}

    # --

    def _tables(self, grids: Sequence[Grid]) -> dict[str, Any]:
        tables: dict[str, Any] = {}
        with torch.device("cpu"), torch.no_grad():
            as_tensor = torch.tensor(grids)
            for call in self.calls:
                made = call.tables(**({call.grid_name: as_tensor} if call.grid_name else {}))
                others = [name for name, value in made.items() if isinstance(value, torch.Tensor)]
                if others and (call.grid_name is None or _tensors_of(call.arguments) - {call.grid_name}):
                    raise _unfit("tables of grids alone", f"{', '.join(others)} of more than these")
                tables |= made
        return tables

    def _kind(self, name: str, one: torch.Tensor, other: torch.Tensor, both: torch.Tensor, patches: int) -> _TableKind:
        """What a table is like, from those of two items and of both together."""
        dtype = torch.float32 if both.is_floating_point() else torch.int32
        per_row = patches // max(1, len(one))
        if len(both) == len(one) + len(other) and per_row * len(one) == patches:
            if torch.equal(both, torch.cat([one, other])):
                return _TableKind(_ROWS, tuple(both.shape[1:]), dtype, per_row)
            if torch.equal(both, torch.cat([one, other + len(one)])):
                return _TableKind(_INDEX, tuple(both.shape[1:]), dtype, per_row)
        if both.dim() == 1 and torch.equal(both, torch.cat([one, other[1:] + one[-1]])) and int(one[-1]) == patches:
            return self._sequences_like(name)
        raise _unfit("tables of a batch that are its items' tables", f"{name} is not, of shape {tuple(both.shape)}")

    def _sequences_like(self, name: str) -> _TableKind:
        """Measure into how many sequences frames are cut, and how long these are."""
        strips = [side for length in range(1, _STRIP) for side in ((1, length), (length, 1))]
        cut: list[tuple[int, list[int]]] = []
        for height, width in (*strips, *itertools.product((2, 3, 5, 8, 13, 16), repeat=2), (_STRIP, _STRIP)):
            lengths = self._tables([(1, height * self.merge, width * self.merge)])[name].diff().tolist()
            if len(lengths) > 1:
                cut.append((height * width * self.merge**2 // self.unit, lengths))
        if not cut:
            return _TableKind(_BOUNDS)
        per_sequence = min(tokens // (len(lengths) - 1) for tokens, lengths in cut)
        if not per_sequence:
            raise _unfit("sequences of a token or more", f"more sequences than tokens in {name}")
        return _TableKind(_BOUNDS, tokens_per_sequence=per_sequence, longest=max(max(lengths) for _, lengths in cut))

    def _columns(self, name: str) -> int:
        return 3 if name == GRID_KEY else math.prod(self.kinds[name].columns) if name in self.kinds else 1

    def _flat_words(self, grid: Grid) -> dict[str, Words]:
        """Of an item: words of its tables, the lengths of its sequences in place of their bounds."""
        made = {name: table for name, table in self._tables([grid]).items() if name in self.kinds}
        for name in self._sequences:
            made[name] = made[name].diff()
        return {name: t.to(self.kinds[name].dtype).reshape(-1).numpy().view(np.int32) for name, t in made.items()}

    def _join(
        self, grids: tuple[Grid, ...], key: EncoderGraphKey | None, is_pinned: bool
    ) -> tuple[torch.Tensor, list[int]]:
        """The words of all tables of a batch, and how many each table has."""
        each = list(map(self._words_of_item, grids))
        words: dict[str, Words] = {}
        for name, table in self.kinds.items():
            parts = [np.empty(0, dtype=np.int32), *(item[name] for item in each)]
            if table.kind == _BOUNDS:
                lengths = np.concatenate(parts)
                parts = [np.append(0, lengths.cumsum())]
                words |= zip(piece_keys(name), pieces_of(lengths), strict=True)
            elif table.kind == _INDEX:
                starts = itertools.accumulate(map(len, parts), initial=0)
                parts = [part + start for part, start in zip(parts, starts, strict=False)]
            words[name] = np.concatenate(parts)
        frames = [(1, height, width) for count, height, width in grids for _ in range(count)]
        words[GRID_KEY] = np.array(frames, dtype=np.int32).reshape(-1)
        rows = {} if key is None else self.rows(key)
        sizes = [max(len(words[name]), rows.get(name, 0) * self._columns(name)) for name in self.names]
        flat = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        for name, part in zip(self.names, np.split(flat.numpy(), np.cumsum(sizes)[:-1]), strict=True):
            found = len(words[name])
            part[:found] = words[name]
            part[found:] = self._padding(name, part[:found], len(part))  # guard: encoder_padded_tables
            if key is not None and name in self._sequences:
                part[-1] = key.patches
        return flat, sizes

    def _padding(self, name: str, found: Words, size: int) -> Any:
        """Rows of padding: valid indices, places of their own, sequences without patches, frames of one patch."""
        if name == GRID_KEY:
            return 1
        if name in self.kinds:
            kind = self.kinds[name].kind
            return np.arange(len(found), size) if kind == _INDEX else found[-1] if kind == _BOUNDS else 0
        is_bounds = name.endswith((_PIECES.query_bounds, _PIECES.key_starts))
        return found[-1] if is_bounds else 0

    def _shaped(self, name: str, words: torch.Tensor) -> torch.Tensor:
        if name == GRID_KEY:
            return words.view(-1, 3)
        table = self.kinds.get(name)
        return words if table is None else words.view(table.dtype).view(-1, *table.columns)


_PIECES = Pieces(*(f"_{name}" for name in Pieces._fields))


def piece_keys(name: str) -> Pieces[str]:
    """The names of the three tables of the pieces of a kind of sequences."""
    return Pieces(*(name + ending for ending in _PIECES))


def _tensors_of(arguments: Mapping[str, Any]) -> set[str]:
    return {name for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def _unfit(expected: str, found: str) -> EncoderConfigError:
    return EncoderConfigError("a tower's tables cannot be made", expected=expected, found=found, remedy=OWN_TOWER)
