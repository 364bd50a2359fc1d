"""Tables of a batch: those of its frames one behind the other, counted on where they number tokens, and padded."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpass.encoder.adapters.tables import BatchTables, Frame, Tables, piece_keys
from graphpass.encoder.attention import pieces_of

CPU = torch.device("cpu")
FRAMES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5)


def of_frame(height: int, width: int) -> Tables:
    count = height * width
    return {
        "places": np.arange(2 * count, dtype=np.int32).reshape(count, 2) + height,
        "weights": np.full(count, width / 3, dtype=np.float32),
        "order": np.arange(count, dtype=np.int32)[::-1],
        "row": np.full(height, width, dtype=np.int32),
    }


def tables() -> BatchTables:
    return BatchTables(
        of_frame,
        patch_keys=("places", "weights"),
        token_keys=("order",),
        sequence_kinds=("row",),
        smallest=(1, 1),
    )


@given(frames=FRAMES, missing=st.integers(-3, 9))
def test_frames_one_behind_the_other(frames: list[Frame], missing: int) -> None:
    """Padded to more rows, or to fewer than there are, which leaves them."""
    made, each = tables(), [of_frame(*frame) for frame in frames]
    count = sum(height * width for height, width in frames)
    starts = np.cumsum([0, *(height * width for height, width in frames)])
    pieces = pieces_of(np.concatenate([one["row"] for one in each]))
    expected = {
        "places": np.concatenate([one["places"] for one in each]),
        "weights": np.concatenate([one["weights"] for one in each]),
        "order": np.concatenate([one["order"] + start for one, start in zip(each, starts, strict=False)]),
        **dict(zip(piece_keys("row"), pieces, strict=True)),
    }
    rows = {name: len(table) + missing for name, table in expected.items()}
    found = made.on_device(frames, CPU, rows)
    assert tuple(found) == made.names == tuple(expected)
    for name, table in found.items():
        real = torch.from_numpy(np.ascontiguousarray(expected[name]))
        assert table.dtype == (torch.float32 if name == "weights" else torch.int32)
        assert len(table) == len(real) + max(missing, 0)
        assert torch.equal(table[: len(real)], real.to(table.dtype))
        assert torch.equal(
            table[len(real) :], torch.full_like(table[len(real) :], count if name.endswith(("bounds", "starts")) else 0)
        )
    for name, table in made.on_device(frames, CPU).items():
        assert torch.equal(table, found[name][: len(expected[name])])


def test_no_frames() -> None:
    found = tables().on_device([], CPU, dict.fromkeys(tables().names, 3))
    assert {name: tuple(table.shape) for name, table in found.items()} == {
        "places": (3, 2),
        **dict.fromkeys(("weights", "order", *piece_keys("row")), (3,)),
    }
    assert not any(table.any() for table in found.values())


def test_a_frame_is_computed_once() -> None:
    calls = []

    def counted(height: int, width: int) -> Tables:
        calls.append((height, width))
        return of_frame(height, width)

    made = BatchTables(counted, patch_keys=("places",), token_keys=(), sequence_kinds=("row",), smallest=(1, 1))
    for _ in range(2):
        made.on_device([(2, 3), (2, 3), (3, 2)], CPU)
    assert calls == [(1, 1), (2, 3), (3, 2)]
