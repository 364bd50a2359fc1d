"""The tables that a tower computes from grids: which they are, computed by item, joined for a batch, padded, copied.

Towers compute them with functions of transformers that take the grids and a dict ``kwargs``: a table in this dict is
taken from it. So one call of a tower with grids says which tables it takes, and how they are made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from graphpass.encoder.adapters.items import Grid
from graphpass.encoder.attention import Pieces, most_pieces, pieces_of
from graphpass.encoder.protocol import Buffers, EncoderGraphKey
from graphpass.errors import EncoderConfigError

_LIBRARY = "transformers."
_ROWS, _INDEX, _BOUNDS, _FRAMES = "rows", "index", "bounds", "frames"
"""Kinds of tables: by patch; places of rows in the batch; bounds of sequences; the grids of frames."""
_KEPT, _KEPT_BATCHES = 256, 16
_STRIP = 64
GRID_KEY = "grid_thw"
Words = npt.NDArray[np.int32]


class _Taken(dict[str, Any]):
    """``kwargs`` that notes the names that are asked for."""

    def pop(self, name: str, *default: Any) -> Any:
        self[name] = None
        return default[0] if default else None


TableCall: TypeAlias = Callable[[torch.Tensor], dict[str, Any]]
"""Makes tables of grids: {name under which the tower takes it: table or number}."""


def tables_of(
    function: Callable[..., Any], arguments: Mapping[str, Any], grid_name: str | None, grids: torch.Tensor
) -> dict[str, Any]:
    """What a function makes of grids, as its argument of this name; None: of something else."""
    taken, given = _Taken(), {grid_name: grids} if grid_name else {}
    found = function(**{**arguments, **given}, kwargs=taken)
    made = dict(zip(taken, found if isinstance(found, tuple) else (found,), strict=True))
    if _tensors_of(made) and set(_tensors_of({**arguments, **given})) != given.keys():
        raise unserved_tower("tables of grids alone", f"{', '.join(made)} of more than these")
    return made


@contextlib.contextmanager
def noted_calls(grids: torch.Tensor) -> Iterator[list[TableCall]]:
    """Note the calls of this thread that make tables."""
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
            is_given = values.pop("kwargs") is not None
            if is_given and function is not None and _tensors_of(values):
                calls.append(functools.partial(tables_of, function, values, given))

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@dataclass(frozen=True, slots=True)
class _TableKind:
    kind: str
    columns: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int32
    patches_per_row: int = 1
    tokens_per_sequence: int = sys.maxsize  #: a frame has one more for so many tokens, at most
    longest: int | None = None  #: most patches of a sequence; None: all patches of a batch


@dataclass
class GridTables:
    """The tables of a batch, the pieces of its sequences, and the grids of its frames, all of 32 bits.

    Raises:
        EncoderConfigError: a table is not made of its items' tables, or the tower does not take it.
    """

    calls: Sequence[TableCall]
    unit: int  #: patches of a token
    merge: int  #: sides of grids are multiples of it

    def __post_init__(self) -> None:
        self._words_of_item = functools.lru_cache(_KEPT)(self._flat_words)
        self._joined = functools.lru_cache(_KEPT_BATCHES)(self._join)
        grids = [(2, 4 * self.merge, 6 * self.merge), (1, 2 * self.merge, 4 * self.merge)]
        one, other, both = self._tables(grids[:1]), self._tables(grids[1:]), self._tables(grids)
        made = _tensors_of(both)
        self._limits = both.keys() - made  # numbers: lengths of sequences
        #: {name of a table that the tower takes: its kind}
        self.kinds = {name: self._kind(name, one[name], other[name], both[name], math.prod(grids[0])) for name in made}
        self._sequences = [name for name, table in self.kinds.items() if table.kind == _BOUNDS]
        if self.calls:
            if not self._sequences:
                raise unserved_tower("bounds of sequences from grids", f"the tables {sorted(self.kinds)}")
            self.kinds[GRID_KEY] = _TableKind(_FRAMES, (3,))
        #: names of all buffers
        self.names = (*self.kinds, *itertools.chain(*map(piece_keys, self._sequences)))

    def arguments(self, tables: Buffers, num_patches: int) -> dict[str, Any]:
        """What the copy of the tower takes. All sequences are at most as long as the batch."""
        pieces = {id(tables[n]): Pieces(*(tables[key] for key in piece_keys(n))) for n in self._sequences}
        named = {name: tables[name] for name in self.kinds} | dict.fromkeys(self._limits, num_patches)
        return {**named, "pieces": pieces}

    def rows(self, key: EncoderGraphKey) -> dict[str, int]:
        """{buffer: its rows for ``key``}."""
        frames = min(key.frames or key.items, key.tokens)
        rows = {name: key.patches // table.patches_per_row for name, table in self.kinds.items()}
        rows[GRID_KEY] = frames + 1
        for name in self._sequences:
            table = self.kinds[name]
            sequences = frames + key.tokens // table.tokens_per_sequence
            pieces = most_pieces(sequences, key.patches, table.longest or key.patches)
            rows |= {name: sequences + 2, **dict(zip(piece_keys(name), (pieces + 1, pieces + 1, pieces), strict=True))}
        return rows

    def on_device(
        self, grids: Sequence[Grid], device: torch.device, key: EncoderGraphKey | None = None
    ) -> dict[str, torch.Tensor]:
        """{buffer: contents for a batch}, padded for ``key`` with a sequence of its own; None: without padding.

        They are joined in pinned memory and copied at once.
        """
        if not self.kinds:
            return {}
        flat, sizes = self._joined(tuple(grid for grid in grids if math.prod(grid)), key, device.type == "cuda")
        # Callers may write to their copy.
        found = dict(zip(self.names, flat.to(device, non_blocking=True, copy=True).split(sizes), strict=True))
        return found | {n: found[n].view(of.dtype).view(-1, *of.columns) for n, of in self.kinds.items()}

    # --

    def _tables(self, grids: Sequence[Grid]) -> dict[str, Any]:
        with torch.device("cpu"), torch.no_grad():
            made = (call(torch.tensor(grids)) for call in self.calls)
            return {name: table for tables in made for name, table in tables.items()}

    def _kind(self, name: str, one: torch.Tensor, other: torch.Tensor, both: torch.Tensor, patches: int) -> _TableKind:
        dtype = torch.float32 if both.is_floating_point() else torch.int32
        per_row = patches // max(1, len(one))
        if len(both) == len(one) + len(other) and per_row * len(one) == patches:
            for kind, following in ((_ROWS, other), (_INDEX, other + len(one))):
                if torch.equal(both, torch.cat([one, following])):
                    return _TableKind(kind, tuple(both.shape[1:]), dtype, per_row)
        if both.dim() == 1 and torch.equal(both, torch.cat([one, other[1:] + one[-1]])) and int(one[-1]) == patches:
            return self._sequences_like(name)
        raise unserved_tower("tables of a batch that are its items'", f"{name} is not, of shape {tuple(both.shape)}")

    def _sequences_like(self, name: str) -> _TableKind:
        """Measure how many sequences a frame has, and their lengths."""
        strips = [side for length in range(1, _STRIP) for side in ((1, length), (length, 1))]
        fewest_tokens, longest = sys.maxsize, 0
        for height, width in (*strips, *itertools.product((2, 3, 5, 8, 13, 16), repeat=2), (_STRIP, _STRIP)):
            lengths = self._tables([(1, height * self.merge, width * self.merge)])[name].diff().tolist()
            if len(lengths) > 1:
                tokens = height * width * self.merge**2 // self.unit
                fewest_tokens, longest = min(fewest_tokens, tokens // (len(lengths) - 1)), max(longest, *lengths)
        if not fewest_tokens:
            raise unserved_tower("sequences of a token or more", f"more sequences than tokens in {name}")
        return _TableKind(_BOUNDS, tokens_per_sequence=fewest_tokens, longest=longest or None)

    def _flat_words(self, grid: Grid) -> dict[str, Words]:
        """Of an item, with lengths of sequences in place of bounds."""
        made = {**self._tables([grid]), GRID_KEY: torch.tensor([(1, *grid[1:])] * grid[0], device="cpu")}
        found = {}
        for name, of in self.kinds.items():
            table = made[name].diff() if of.kind == _BOUNDS else made[name]
            found[name] = table.to(of.dtype).reshape(-1).numpy().view(np.int32)
        return found

    def _join(
        self, grids: tuple[Grid, ...], key: EncoderGraphKey | None, is_pinned: bool
    ) -> tuple[torch.Tensor, list[int]]:
        each = list(map(self._words_of_item, grids))
        words: dict[str, Words] = {}
        for name, of in self.kinds.items():
            parts = [np.empty(0, dtype=np.int32), *(item[name] for item in each)]
            if of.kind == _BOUNDS:
                lengths = np.concatenate(parts)
                parts = [np.append(0, lengths.cumsum())]
                words |= zip(piece_keys(name), pieces_of(lengths), strict=True)
            elif of.kind == _INDEX:
                starts = itertools.accumulate(map(len, parts), initial=0)
                parts = [part + start for part, start in zip(parts, starts, strict=False)]
            words[name] = np.concatenate(parts)
        rows = {} if key is None else self.rows(key)
        columns = {name: math.prod(of.columns) for name, of in self.kinds.items()}
        sizes = [max(len(words[name]), rows.get(name, 0) * columns.get(name, 1)) for name in self.names]
        flat = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        for name, part in zip(self.names, np.split(flat.numpy(), np.cumsum(sizes)[:-1]), strict=True):
            found, kind = len(words[name]), self.kinds[name].kind if name in self.kinds else ""
            part[:found] = words[name]
            padding = {_ROWS: 0, _FRAMES: 1, _INDEX: np.arange(found, len(part))}
            part[found:] = padding.get(kind, words[name][-1:])  # guard: encoder_padded_tables
            if key is not None and kind == _BOUNDS:
                part[-1] = key.patches
        return flat, sizes


def piece_keys(name: str) -> Pieces:
    """The names of the tables of pieces beside these bounds."""
    return Pieces(*(f"{name}_{field}" for field in Pieces._fields))


def unserved_tower(expected: str, found: str, tower: object = None) -> EncoderConfigError:
    """The error for a tower that no adapter serves."""
    problem = f"there is no adapter for this {'tower' if tower is None else type(tower).__name__}"
    return EncoderConfigError(
        problem,
        expected=expected,
        found=found,
        remedy="implement docs/encoder_protocol.md, or torch.compile(tower, backend='cgpass')",
    )


def _tensors_of(arguments: Mapping[str, Any]) -> list[str]:
    return [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
