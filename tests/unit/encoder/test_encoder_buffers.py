"""What is read and written of each request; items of no tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from graphpass import EncoderCudaGraphManager
from graphpass.encoder import EncoderItemSpec
from graphpass.errors import EncoderConfigError, ShapeError
from tests.unit.encoder import toy
from tests.unit.encoder.toy import assert_same

Values = dict[str, Any]


METHODS = {
    "specs": "get_encoder_cudagraph_item_specs",
    "capture": "prepare_encoder_cudagraph_capture_inputs",
    "replay": "prepare_encoder_cudagraph_replay_buffers",
    "forward": "encoder_cudagraph_forward",
    "eager": "encoder_eager_forward",
    "postprocess": "postprocess_encoder_output",
}


def spoilt(method: str, spoil: Callable[[Any], Any], **config: Any) -> toy.ToyEncoder:
    """An encoder of which one method returns something else than it should."""
    return toy.changed(toy.ToyEncoder(**config), METHODS[method], lambda call, *given: spoil(call(*given)))


def made(encoder: toy.ToyEncoder, budgets: Sequence[int] = (4, 8)) -> EncoderCudaGraphManager:
    return toy.made(encoder, token_budgets=budgets)


def without(name: str) -> Callable[[Values], Values]:
    return lambda values: {other: value for other, value in values.items() if other != name}


def with_(name: str, change: Callable[[Any], Any]) -> Callable[[Values], Values]:
    return lambda values: {**values, name: change(values.get(name))}


EAGER = r"eager_forward.*\[\(20, 8\)\]; found \["


def specs_of(**change: Any) -> Callable[[Any], list[EncoderItemSpec]]:
    return lambda _: [EncoderItemSpec(**{"input_size": 4, "output_tokens": 2, **change})]


@pytest.mark.parametrize(
    ("method", "sizes", "spoil", "error", "text"),
    [
        ("replay", [2], without("lengths"), EncoderConfigError, r"'lengths'.*None for an unchanged one; found"),
        ("replay", [2], with_("extra", lambda _: None), EncoderConfigError, r"other buffers from.*'extra'"),
        ("replay", [2], with_("patches", lambda p: p.repeat(9, 1)), ShapeError, r"\(8, 6\).*found \(18, 6\)"),
        ("replay", [2], with_("patches", lambda p: p[:, :1]), ShapeError, r"\(8, 6\).*found \(2, 1\)"),
        ("replay", [2], with_("patches", lambda p: p[0]), ShapeError, r"found \(6,\)"),
        ("replay", [2], with_("positions", lambda p: p.int()), ShapeError, r"int64.*int32"),
        ("replay", [2], with_("positions", lambda p: p.float()), ShapeError, r"int64.*float32"),
        ("replay", [2], with_("scale", lambda _: torch.ones(1)), ShapeError, r"found \(1,\)"),
        ("replay", [2], with_("patches", lambda p: p.numpy()), ShapeError, r"a tensor.*\(8, 6\).*found ndarray"),
        ("specs", [4], specs_of(output_tokens=-1), EncoderConfigError, "at least 0"),
        ("specs", [4], specs_of(input_size=-1), EncoderConfigError, "at least 0"),
        ("specs", [4], specs_of(frames=-1), EncoderConfigError, "at least 0"),
        ("specs", [4], specs_of(path="video"), EncoderConfigError, r"a path among \[''\]"),
        ("specs", [4], specs_of(axes=(("size", 1),)), EncoderConfigError, r"axes \[\]"),
        ("eager", [40], lambda rows: rows[1:], EncoderConfigError, rf"{EAGER}\(19, 8\)\]"),
        ("eager", [40], lambda rows: rows[:, 1:], EncoderConfigError, rf"{EAGER}\(20, 7\)\]"),
        ("eager", [40], lambda rows: (rows, rows), EncoderConfigError, rf"{EAGER}\(20, 8\), \(20, 8\)\]"),
        ("postprocess", [4, 4], lambda results: results[1:], EncoderConfigError, "2, one for each item; found 1"),
    ],
)
def test_what_a_model_returns_for_a_request_is_refused_where_it_does_not_fit(
    method: str, sizes: list[int], spoil: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    manager = made(spoilt(method, spoil))
    with pytest.raises(error, match=text):
        manager.execute(toy.images(sizes))


@pytest.mark.parametrize(
    ("method", "spoil", "text"),
    [
        ("capture", without("scale"), r"other buffers from .*capture_inputs: expected.*'scale'"),
        ("capture", with_("more", lambda _: torch.ones(1)), r"other buffers from.*'more'"),
        ("forward", lambda rows: rows[1:], r"\(8, 8\).*found \[\(7, 8\)"),
        ("forward", lambda rows: rows[:, 1:], r"\(8, 8\).*found \[\(8, 7\)"),
        ("forward", lambda rows: (rows, rows), r"found \[\(8, 8\), \(8, 8\)\]"),
    ],
)
def test_a_capture_that_breaks_the_configuration_is_refused(
    method: str, spoil: Callable[[Any], Any], text: str
) -> None:
    with pytest.raises(EncoderConfigError, match=text):
        made(spoilt(method, spoil))


def test_a_buffer_that_shrinks_is_refused() -> None:
    encoder = spoilt(
        "capture", lambda values: {**values, "positions": torch.zeros(20 - len(values["positions"])).long()}
    )
    with pytest.raises(EncoderConfigError, match=r"at most 4 elements.*found \(\(12,\)"):
        made(encoder)


def test_other_values_on_a_rounding_axis_are_refused() -> None:
    manager = made(toy.ToyEncoder(axes=(toy.LONGEST,)))
    with pytest.raises(EncoderConfigError, match=r"integers on axes that round up; found .*'long'"):
        manager.execute(toy.images([4], axes=[(("longest", "long"),)]))


def test_the_last_of_no_rows_is_zero() -> None:
    no_rows = with_("patches", lambda patches: patches[:0])
    manager = made(spoilt("replay", no_rows, padding={"patches": "repeat", "lengths": "repeat"}), [4])
    manager.buffers["patches"].fill_(torch.nan)
    manager.execute(toy.images([6]))
    assert manager.buffers["patches"].unique().tolist() == [0]


def test_reduced_precision_is_cast_into_the_buffer() -> None:
    encoder = toy.ToyEncoder()
    items = toy.images([4])
    expected = toy.one_by_one(encoder, items)
    manager = made(encoder)
    found = manager.execute({**items, "patches": items["patches"].double()})
    torch.testing.assert_close(found, expected)


# Items of no tokens: an empty result for each, and nothing that runs for them.


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("captures", [True, False])
def test_items_without_tokens_run_nothing(captures: bool, levels: int) -> None:
    encoder = toy.ToyEncoder(toy.ToyTower(levels=levels))
    manager = toy.made(encoder, capture=captures)
    forwards = len(encoder.forwards)
    for sizes in ([0], [0, 0, 0], [0, 4, 0]):
        items = toy.images(sizes)
        found = manager.execute(items)
        for size, result in zip(sizes, found, strict=True):
            for part in (result,) if levels == 1 else result:
                assert isinstance(part, torch.Tensor)
                assert (tuple(part.shape), part.dtype) == ((size // 2, toy.WIDTH), torch.float32)
        assert len(encoder.prepared) == (captures and sum(sizes) > 0)
        assert encoder.eager_calls == ([1] if not captures and sum(sizes) else [])
    assert_same(found, toy.one_by_one(encoder, items))
    stats = manager.get_cumulative_stats()
    assert (stats.hits, stats.misses, stats.requests) == (int(captures), int(not captures), 3)
    assert (stats.replays, len(encoder.forwards) - forwards) == (int(captures), 0)


def test_items_without_tokens_have_the_dtype_of_the_other_results() -> None:
    """Under another autocast than at capture the encoder runs eagerly, in the dtype of that autocast."""
    manager = toy.made(toy.ToyEncoder())
    with torch.autocast("cpu", torch.bfloat16):
        dtypes = [result.dtype for result in manager.execute(toy.images([0, 4]))]  # type: ignore[union-attr]
    assert dtypes == [torch.bfloat16] * 2
