"""Batches, inputs and options that cannot be: refused by name, and the next batch is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpass import Batch, CudagraphDispatcher, CudaGraphManager, GraphRuntime, InputSpec
from graphpass.errors import CaptureError, ContextError, OptionError, ShapeError
from tests.unit.serving.managed import (
    LARGEST,
    SIZES,
    WIDTH,
    Attends,
    DictBuilder,
    Rows,
    SlotBuilder,
    X,
    assert_right,
    captured,
    made,
    refused,
    rows,
    run,
)

BAD: Mapping[str, Callable[[], Any]] = {
    "missing": dict,
    "another": lambda: {"y": rows(3)},
    "extra": lambda: {"x": rows(3), "y": rows(3)},
    "fewer rows": lambda: {"x": rows(2)},
    "more rows": lambda: {"x": rows(4)},
    "one row, which would be broadcast": lambda: {"x": rows(1)},
    "narrower": lambda: {"x": rows(3, 5)},
    "flat": lambda: {"x": rows(3).flatten()},
    "float64": lambda: {"x": rows(3).double()},
    "integers": lambda: {"x": rows(3).long()},
    "another device": lambda: {"x": rows(3).to("meta")},
    "no tensor": lambda: {"x": rows(3).tolist()},
    "None": lambda: {"x": None},
}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_inputs_that_do_not_fit_are_refused_and_nothing_is_written(mode: str) -> None:
    manager = captured(Rows().eval(), mode, (4, 8))
    for name, inputs in BAD.items():
        run(manager, rows(8))
        before = manager.buffers["x"].clone()
        with pytest.raises(ShapeError) as raised:
            manager.run(Batch(3, inputs=inputs()))
        assert raised.value.expected != raised.value.found, name
        torch.testing.assert_close(manager.buffers["x"], before, rtol=0, atol=0)
        assert_right(manager, [3, 8, 9])


@pytest.mark.parametrize("option", ["mode", "capture_sizes", "dynamic_dims", "outputs", "runtime", "lazy_capture"])
def test_options_that_are_its_own_are_refused_by_name(option: str) -> None:
    dispatcher = CudagraphDispatcher("FULL", SIZES, max_num_reqs=LARGEST)
    given = {option: GraphRuntime() if option == "runtime" else "clone"}
    if option == "runtime":
        assert CudaGraphManager(Rows(), dispatcher, [X], compiler="eager", **given).runtime is given["runtime"]
        return
    with pytest.raises(OptionError, match=f"'{option}' is set by the manager") as raised:
        CudaGraphManager(Rows(), dispatcher, [X], **given)
    assert "dispatcher" in raised.value.remedy


@pytest.mark.parametrize(
    ("options", "match"),
    [({"compilr": "eager"}, "unknown option"), ({"compiler": "gcc"}, "compiler"), ({"on_fallback": "no"}, "fallback")],
)
def test_options_that_cannot_be_are_refused_at_construction(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        made(Rows(), **options)


def test_a_key_larger_than_the_buffers_is_refused_by_name_and_one_as_large_is_not() -> None:
    model = Rows().eval()
    manager = made(model, sizes=(4, 16))
    with pytest.raises(OptionError, match="does not fit the buffers") as raised:
        manager.capture()
    assert f"{LARGEST}" in raised.value.expected
    assert "16" in raised.value.found
    # As large as the buffers, and torch takes a view as long as its base for another graph.
    manager = captured(model, sizes=(4, LARGEST))
    assert_right(manager, [3, 4, 5, LARGEST])
    assert manager.stats().replays == 4


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return x * scale + shift


@pytest.mark.parametrize("names", [["x"], ["x", "scle"], ["x", "scale", "mask"]])
def test_inputs_that_are_no_arguments_of_the_model_are_refused_at_capture_with_their_names(names: list[str]) -> None:
    """The remedy is followed: what it names is declared, in place of what is not known."""
    specs = [InputSpec(name, (LARGEST, WIDTH), torch.float32) for name in names]
    error = refused("not the arguments of the model", Scaled(), specs=specs, error=OptionError)
    assert error.expected == "x, scale, shift"
    named = re.search(r"'(\w+)'", error.remedy)
    known = [spec for spec in specs if spec.name in error.expected]
    declared = [*known, *([] if named is None else [InputSpec(named[1], (LARGEST, WIDTH), torch.float32)])]
    made(Scaled(), specs=declared).capture()


def test_another_type_error_of_the_model_stays_what_it_is() -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + object()  # type: ignore[operator]

    refused("unsupported operand", Fails(), error=Exception)


# -- metadata without a field


class LeavesOut(SlotBuilder):
    """Metadata without one of its fields: always, or once the capture is over."""

    field = "sums"
    lacks = True

    def build(self, attention: Any, key: Any) -> Any:
        built = super().build(attention, key)
        fields = {"sums": built.sums, "slot_mapping": built.slot_mapping}
        return SimpleNamespace(**{n: v for n, v in fields.items() if n != self.field}) if self.lacks else built


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_metadata_without_a_field_that_an_op_reads_is_refused_by_builder_field_and_op(mode: str) -> None:
    builder = LeavesOut()
    manager = made(Attends().eval(), mode, attention=builder)
    with pytest.raises(ContextError, match="no field 'sums'") as raised:
        manager.capture()
    assert "LeavesOut.build()" in raised.value.expected
    assert "SimpleNamespace" in raised.value.found
    assert "add_to_slots" in raised.value.found
    builder.lacks = False
    manager.capture()
    assert not builder.sums[: builder.num_slots].any()


def test_a_key_that_a_dict_lacks_is_added_to_it() -> None:
    class Lacks(DictBuilder):
        def build(self, attention: Any, key: Any) -> Any:
            return {"sums": super().build(attention, key)["sums"]}

    error = refused("no field 'slot_mapping'", Attends().eval(), attention=Lacks(), error=ContextError)
    assert "add 'slot_mapping' to dict" in error.remedy
    made(Attends().eval(), attention=DictBuilder()).capture()


def test_other_missing_attributes_stay_what_they_are() -> None:
    class Fails(SlotBuilder):
        def build(self, attention: Any, key: Any) -> Any:
            return attention.no_such_attribute

    refused("no_such_attribute", Attends().eval(), attention=Fails(), error=AttributeError)


# -- function transforms


@pytest.mark.parametrize("name", ["vmap", "grad", "jvp"])
def test_a_batch_inside_a_function_transform_is_refused_by_name(name: str) -> None:
    manager = captured(Rows().eval())

    def step(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run(manager, x).sum()
        return result

    calls: Mapping[str, Callable[[], Any]] = {
        "vmap": lambda: torch.vmap(step)(rows(6).view(2, 3, WIDTH)),
        "grad": lambda: torch.func.grad(step)(rows(3)),
        "jvp": lambda: torch.func.jvp(step, (rows(3),), (rows(3),)),
    }
    with pytest.raises(CaptureError, match=f"under {name}") as raised:
        calls[name]()
    assert "transform the model itself" in raised.value.remedy
    assert_right(manager)
