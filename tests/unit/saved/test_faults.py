"""What differs between the process that saves and the one that loads: harmless and right, or a miss with its reason."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.hooks import RemovableHandle

import graphpass as gp
from graphpass.ledger import Reason
from graphpass.saved import fingerprint
from graphpass.saved.files import SavedFiles
from tests.unit.saved import stack as of
from tests.unit.saved.stack import OPTIONS, Stack, example, stack

Change = Callable[[Stack, pytest.MonkeyPatch], Any]


@dataclass(frozen=True)
class Fault:
    name: str
    says: str | None  #: part of the reason; None if the start is loaded all the same
    model: Change = lambda model, patch: None
    files: Callable[[Path], Any] = lambda folder: None
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


EAGER = "eager_on_recompile"
unless_loaded = torch.compiler.set_stance
"""What is not loaded runs without a compilation, which takes a second; what is loaded by mistake runs all the same."""


def of_kind(kind: str) -> Callable[[Path], list[Path]]:
    return lambda folder: sorted(folder.glob(f"*.{kind}"))


def each(kind: str, change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda folder: [change(path) for path in of_kind(kind)(folder)]


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def other_contents(path: Path) -> None:
    rewritten(path, b"nothing")


def rewritten(path: Path, contents: bytes) -> None:
    magic, header, _ = path.read_bytes().split(b"\n", 2)
    parsed = json.loads(header)
    parsed["sha256"] = hashlib.sha256(contents).hexdigest()
    path.write_bytes(b"\n".join((magic, json.dumps(parsed).encode(), contents)))


def set_data(model: Stack, _: Any) -> None:
    model.layers[0].linear.weight.data = model.layers[0].linear.weight.data.t().contiguous().t()


def doubling(x: torch.Tensor, by: float = 0.5) -> torch.Tensor:
    return torch.relu(x) * 2 + by * x


def hook(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 3


def hook_before(module: nn.Module, args: Any) -> Any:
    return (args[0] + 1,)


def global_hook(model: Stack, patch: pytest.MonkeyPatch) -> Any:
    return nn.modules.module.register_module_forward_hook(hook)


@contextlib.contextmanager
def set_to(setter: Callable[[Any], Any], value: Any, before: Any) -> Any:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextlib.contextmanager
def less_precise() -> Iterator[None]:
    of_devices = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [device.fp32_precision for device in of_devices]
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for device, precision in zip(of_devices, before, strict=True):  # which it has set, too
            device.fp32_precision = precision


def more_threads() -> contextlib.AbstractContextManager[Any]:
    before = torch.get_num_threads()
    return set_to(torch.set_num_threads, before + 1, before)


def attribute(name: str, value: Any) -> Change:
    return lambda model, patch: setattr(model.layers[1], name, value)


def patched(owner: Any, name: str, value: Any) -> Change:
    return lambda model, patch: patch.setattr(owner, name, value)


def reweighted(model: Stack, _: Any) -> None:
    for parameter in model.parameters():
        parameter.normal_()


FAULTS = [
    # weights
    Fault("nothing", None),
    Fault("other weights", None, reweighted),
    Fault("weights that are assigned", None, lambda m, _: m.load_state_dict(stack(seed=5).state_dict(), assign=True)),
    Fault("another buffer", None, lambda m, _: m.layers[0].shift.fill_(2.0)),
    Fault("weights of another type", "tensors differs", lambda m, _: m.double()),
    Fault("a transposed weight", "tensors differs", set_data),
    Fault("a wider buffer", "tensors differs", attribute("shift", torch.ones(1, of.INPUTS))),
    Fault("a weight that needs gradients", "tensors differs", lambda m, _: m.layers[0].norm.weight.requires_grad_()),
    Fault(
        "tied weights",
        "that L['graphed_model']",
        lambda m, _: setattr(m.layers[1].linear, "bias", m.layers[0].linear.bias),
    ),
    # configuration and Python state of the model
    Fault("another epsilon", "attributes differs", lambda m, _: setattr(m.layers[0].norm, "eps", 0.5)),
    Fault("another scale", "attributes differs", attribute("scale", 3.0)),
    Fault("a scale that is an int", "attributes differs", attribute("scale", 1)),
    Fault("another activation", "class differs", attribute("act", nn.GELU())),
    Fault("a layer more", "class differs", lambda m, _: m.layers.append(of.Layer().eval().requires_grad_(False))),
    Fault("a layer less", "differs", lambda m, _: m.layers.__delitem__(1)),
    Fault("training mode", "attributes differs", lambda m, _: m.train()),
    Fault("one layer in training mode", "attributes differs", lambda m, _: m.layers[1].train()),
    Fault("a hook", ": hooks differs", lambda m, _: m.layers[0].register_forward_hook(hook)),
    Fault("a hook before", ": hooks differs", lambda m, _: m.layers[0].register_forward_pre_hook(hook_before)),
    Fault("a hook of all modules", "hooks of all modules", global_hook),
    Fault("a patched forward", "attributes differs", lambda m, _: setattr(m.layers[0], "forward", lambda x: x * 5)),
    Fault("a patched forward of a class", "class differs", patched(of.Layer, "forward", lambda self, x: x * 5)),
    Fault("a patched method of a class", "class differs", patched(of.Norm, "divided", lambda self, x: x * 5)),
    Fault("a patched method of an object", "differs", patched(of.Bend, "apply", lambda self, x: x * 5)),
    Fault("an unread attribute", "attributes differs", attribute("note", "unread")),
    # code
    Fault("a patched function of the module", "the source of", patched(of, "bent", doubling)),
    Fault("another default of a function", "the source of", lambda m, p: p.setattr(of.bent, "__defaults__", (0.25,))),
    Fault("another splitting op", "the implementation of", patched(of.mixed, "_init_fn", doubling)),
    Fault("an edited file", "the source of", patched(fingerprint, "_source_of", lambda module: b"edited")),
    # environment
    Fault("another Python", "Python differs", patched(fingerprint.platform, "python_build", lambda: ("other", ""))),
    Fault("another torch", "torch differs", patched(fingerprint.torch.version, "git_version", "other")),
    Fault("another graphpass", "graphpass differs", patched(fingerprint, "_files_of", lambda *packages: "other")),
    Fault("another processor", "processor differs", patched(fingerprint.platform, "machine", lambda: "z80")),
    Fault("assertions left out", "Python differs", patched(fingerprint.sys, "flags", SimpleNamespace(optimize=1))),
    Fault("another rank", "rank differs", patched(fingerprint, "_rank", lambda: "1 of 2")),
    Fault("autocast", "settings of the compiler", around=lambda: torch.autocast("cpu", torch.bfloat16)),
    Fault(
        "another default type",
        "settings of the compiler",
        around=lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    ),
    Fault(
        "another precision",
        "settings of the compiler",
        around=less_precise,
    ),
    Fault("other threads", "num_threads differs", around=more_threads),
    Fault(
        "deterministic algorithms",
        "settings of the compiler",
        around=lambda: set_to(torch.use_deterministic_algorithms, True, False),
    ),
    # options
    Fault("another mode", "option mode differs", options={"mode": "FULL"}),
    Fault("other sizes", "option capture_sizes differs", options={"capture_sizes": [4]}),
    Fault("no splitting op", "option splitting_ops differs", options={"splitting_ops": []}),
    Fault("outputs that are views", "option policy differs", options={"outputs": "view"}),
    # files
    Fault("a flipped bit of the graphs", "is damaged", files=each("graph", flipped)),
    Fault("a flipped bit of the calls", "is damaged", files=each("call", flipped)),
    Fault("half of the graphs", "is damaged", files=each("graph", halved)),
    Fault("half of the calls", "is damaged", files=each("call", halved)),
    Fault("empty graphs", "is damaged", files=each("graph", lambda path: path.write_bytes(b""))),
    Fault("no graphs", "nothing was saved", files=each("graph", Path.unlink)),
    Fault("no calls", "nothing was saved", files=each("call", Path.unlink)),
    Fault("graphs of other contents", "cannot be loaded", files=each("graph", other_contents)),
    Fault("calls of other contents", "cannot be loaded", files=each("call", other_contents)),
    Fault("graphs that others can write", "written by others", files=each("graph", lambda path: path.chmod(0o666))),
    Fault("links to files", "is no file", files=each("call", linked)),
    Fault("a write that was cut off", None, files=lambda folder: (folder / ".writing-x").write_bytes(b"half")),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "starts"
    fast = gp.graphed(stack(), **OPTIONS, warm_start=folder)
    fast.capture(example())
    assert not [note for note in fast.runtime.notes if "not saved" in note]
    assert len(of_kind("graph")(folder)) == len(of_kind("call")(folder)) == 1
    return folder


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_harmless_or_a_miss(
    fault: Fault, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "starts"))
    torch.compiler.reset()
    counters.clear()
    model = stack()
    handle = fault.model(model, monkeypatch)
    is_changed = fault.files(folder) is not None
    try:
        fast = gp.graphed(model, **{**OPTIONS, **fault.options}, warm_start=folder)
        with fault.around(), torch.no_grad(), unless_loaded("default" if is_changed else EAGER):
            for rows in (4, 3, 4, 3, 4):
                x = example(rows).to(next(model.parameters()).dtype)
                torch.testing.assert_close(fast(x), model(x))
    finally:
        if isinstance(handle, RemovableHandle):
            handle.remove()
    found = [note for note in fast.runtime.notes if "not loaded" in note]
    if fault.says is None:
        assert not found
        assert not counters["frames"]
        assert fast.runtime.compiled() == 0
    else:
        assert any(fault.says in note for note in found), found


def test_changes_after_a_load_are_seen(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    model = stack()
    fast = gp.graphed(model, **OPTIONS, warm_start=Path(shutil.copytree(saved, tmp_path / "starts")))
    x = example()
    torch.testing.assert_close(fast(x), model(x))
    for change, stance in (
        (lambda: monkeypatch.setattr(of, "bent", doubling), EAGER),
        (lambda: setattr(model.layers[0].norm, "eps", 0.5), EAGER),
        (lambda: setattr(model.layers[1], "act", nn.GELU()), EAGER),
        (lambda: setattr(model.layers[0], "scale", 7.0), "default"),
    ):
        change()
        for _ in range(3):
            with unless_loaded(stance):
                torch.testing.assert_close(fast(x), model(x))


def test_other_bits_than_those_that_were_saved_are_noticed(saved: Path, tmp_path: Path) -> None:
    """A constant of the artifacts is another one, in a file that is whole."""
    folder = Path(shutil.copytree(saved, tmp_path / "starts"))
    (path,) = of_kind("graph")(folder)
    contents = path.read_bytes().split(b"\n", 2)[2]
    assert struct.pack(">d", 0.5) in contents
    rewritten(path, contents.replace(struct.pack(">d", 0.5), struct.pack(">d", 0.75)))
    for is_noticed in (True, False):
        torch.compiler.reset()
        model = stack()
        fast = gp.graphed(model, **OPTIONS, warm_start=folder)
        fast.capture(example())
        torch.testing.assert_close(fast(example()), model(example()))
        assert any("other bits" in note for note in fast.runtime.notes) == is_noticed
        assert (fast.runtime.compiled() > 0) == is_noticed


def graphed_bent(folder: Path) -> tuple[gp.GraphRuntime, torch.Tensor]:
    """A start whose example is all zeros, and its result for others."""
    fast = gp.graphed(of.bent, [4], {"x": 0}, compiler="eager", progress=False, warm_start=folder)
    fast.capture(torch.zeros(4, of.INPUTS))
    return fast.runtime, fast(example())


def managed_bent(folder: Path) -> tuple[gp.GraphRuntime, torch.Tensor]:
    dispatcher = gp.CudagraphDispatcher("FULL", [2, 4], max_num_reqs=4)
    inputs = [gp.InputSpec("x", (4, of.INPUTS), torch.float32)]
    made = gp.CudaGraphManager(of.bent, dispatcher, inputs, compiler="eager", progress=False, warm_start=folder)
    made.buffers["x"].copy_(example())
    made.capture()
    assert made.stats().histogram == {}, "the steps that are compared are not counted"
    assert made.runtime.stats().replayed == made.runtime.stats().captured, "each once, after its capture"
    return made.runtime, made.run(gp.Batch(4)).clone()


@pytest.mark.parametrize("can_remove", [True, False])
@pytest.mark.parametrize("start", [graphed_bent, managed_bent])
def test_an_example_of_zeros_hides_no_other_bits(
    start: Any, can_remove: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_noticed in (False, True):
        torch.compiler.reset()
        runtime, result = start(tmp_path / "starts")
        torch.testing.assert_close(result, of.bent(example()))
        assert any("other bits" in note for note in runtime.notes) == is_noticed
        assert runtime.compiled() == 1
        for path in of_kind("graph")(tmp_path / "starts"):
            contents = path.read_bytes().split(b"\n", 2)[2]
            rewritten(path, contents.replace(struct.pack(">d", 0.5), struct.pack(">d", 0.75)))
        if not can_remove:
            monkeypatch.setattr(SavedFiles, "remove", lambda *_: None)
            monkeypatch.setattr(SavedFiles, "write", lambda *_: Reason("it is read-only"))


@pytest.mark.parametrize(
    "model",
    [torch.bernoulli, lambda x: torch.eye(of.INPUTS)[x.long().sum(1)] + x.log1p(), lambda x: x + torch.rand_like(x)],
    ids=["probabilities", "indices", "random"],
)
def test_contents_of_the_comparison_suit_a_model(model: Any, tmp_path: Path) -> None:
    for _ in range(2):
        torch.compiler.reset()
        fast = gp.graphed(model, [4], {"x": 0}, compiler="eager", progress=False, warm_start=tmp_path / "starts")
        fast.capture(torch.zeros(4, of.INPUTS))
        assert not any("other bits" in note for note in fast.runtime.notes)


def test_an_option_without_a_text_is_said(tmp_path: Path) -> None:
    class Ones:
        def __call__(self, real: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
            return torch.cat((real, torch.ones(shape[0] - len(real), of.INPUTS)))

    fast = gp.graphed(of.bent, [4], {"x": 0}, padding={"x": Ones()}, compiler="eager", warm_start=tmp_path / "starts")
    fast.capture(example())
    torch.testing.assert_close(fast(example()), of.bent(example()))
    assert any("compared by identity" in note for note in fast.runtime.notes)


def test_the_directory_is_of_ones_own(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    with pytest.raises(gp.GraphpassError, match="written by others"):
        gp.graphed(stack(), warm_start=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(gp.GraphpassError, match="no directory"):
        gp.graphed(stack(), warm_start=tmp_path / "file")
