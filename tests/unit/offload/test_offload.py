"""Offloaded weights on the tape: which layer is in which slot when, in every mode and any order of modes.

Copies are as late as they may be here: a slot is NaN from the moment its last layer has been passed until somebody
waits for the next one. What is read too early, or after its time, is not a number.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import Batch, CudagraphDispatcher, CudaGraphManager, GraphpassError, InputSpec
from graphpass.errors import CaptureError, ContextError, DeviceError, OffloadError, OptionError
from graphpass.offload import WeightOffloader
from graphpass.offload import offloader as offload
from graphpass.offload.slots import HostCopies
from graphpass.text import CausalLM
from tests.e2e.greedy import continued
from tests.e2e.small_decoders import small_decoder
from tests.observed import reported_regions

WIDTH, LARGEST = 6, 10
X = InputSpec("x", (LARGEST, WIDTH), torch.float32)


class LateCopies(HostCopies):
    """Copies arrive when they are waited for, and slots are NaN until then."""

    def __init__(self) -> None:
        self.launched: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def launch(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        target.fill_(0xFF)
        self.launched[slot] = target, source

    def wait(self, slot: int) -> None:
        target, source = self.launched.pop(slot)
        target.copy_(source)

    def settle(self) -> None:
        for slot in tuple(self.launched):
            self.wait(slot)

    def is_recording(self) -> bool:
        try:
            torch.ones(()).item()
        except CaptureError:
            return True
        return False


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "copies_to", lambda device, num_slots: LateCopies())


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale


class Stack(nn.Module):
    def __init__(self, num_layers: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 5)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def offloaded(num_layers: int = 4, num_slots: int = 2) -> tuple[Stack, Stack, WeightOffloader]:
    """(the model, the same one without offloading, the first one's offloader)"""
    reference = Stack(num_layers)
    model = copy.deepcopy(reference)
    return model, reference, WeightOffloader(model.layers, num_slots=num_slots)


def managed(model: Any, offloader: WeightOffloader | None, mode: str = "FULL", **options: Any) -> CudaGraphManager:
    dispatcher = CudagraphDispatcher(mode, [4, 8], max_num_reqs=LARGEST)
    options = {"compiler": "eager", "on_fallback": "silent", **options}
    return CudaGraphManager(model, dispatcher, [X], offloader=offloader, **options)


def captured(*args: Any, **given: Any) -> CudaGraphManager:
    manager = managed(*args, **given)
    if manager.needs_capture():
        manager.capture()
    return manager


def rows(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(num_tokens))


def run(manager: CudaGraphManager, num_tokens: int, *, uniform: bool = False) -> torch.Tensor:
    batch = Batch(num_tokens, inputs={"x": rows(num_tokens)}, num_reqs=num_tokens, uniform_decode=uniform)
    result: torch.Tensor = manager.run(batch)
    return result


@torch.no_grad()
def expected(model: nn.Module, num_tokens: int) -> torch.Tensor:
    result: torch.Tensor = model(rows(num_tokens))
    return result


def assert_right(manager: CudaGraphManager, reference: nn.Module, sizes: tuple[int, ...] = (3, 8, 9, 1)) -> None:
    for num_tokens in sizes:
        for uniform in (False, True):
            result = run(manager, num_tokens, uniform=uniform)
            torch.testing.assert_close(result, expected(reference, num_tokens))


def replays(manager: CudaGraphManager) -> int:
    return sum(counts.replayed for counts in manager.runtime.counts().values())


# -- right answers


@pytest.mark.parametrize(
    ("mode", "num_layers", "num_slots"),
    [("NONE", 5, 2), ("PIECEWISE", 4, 2), ("FULL", 4, 2), ("FULL", 7, 3), ("FULL_AND_PIECEWISE", 5, 4)],
)
def test_every_mode_is_right(mode: str, num_layers: int, num_slots: int) -> None:
    model, reference, offloader = offloaded(num_layers, num_slots)
    manager = captured(model, offloader, mode)
    captures = replays(manager)
    assert_right(manager, reference)
    # Of 8 batches two are above the largest size, and half of those left are uniform.
    regions = num_layers + 1
    graphed = {"PIECEWISE": 6 * regions, "FULL": 6, "FULL_AND_PIECEWISE": 3 * regions + 3}
    assert replays(manager) - captures == graphed.get(mode, 0)


def test_modes_managers_and_plain_calls_follow_each_other_in_any_order() -> None:
    model, reference, offloader = offloaded(5, 3)
    one = captured(model, offloader, "FULL_AND_PIECEWISE")
    other = captured(model, offloader, "FULL")
    order = random.Random(0)
    for _ in range(60):
        num_tokens = order.choice([1, 2, 3, 7, 8, 9])
        manager = order.choice([one, other, None])
        if manager is None:
            result = expected(model, num_tokens)
        else:
            result = run(manager, num_tokens, uniform=order.random() < 0.5)
        torch.testing.assert_close(result, expected(reference, num_tokens))


def test_layers_share_their_code() -> None:
    model, _, offloader = offloaded(5)
    manager = captured(model, offloader, "PIECEWISE")
    kinds = [kind for _, kind, _ in reported_regions(manager.runtime)]
    assert kinds.count("captured") == 6
    assert kinds.count("eager") == 5
    assert manager.runtime.compiled() == 3  # before the layers, a layer, the last one and what follows it


def test_a_stock_decoder_generates_the_same() -> None:
    pytest.importorskip("transformers")
    model = small_decoder("LlamaForCausalLM", num_hidden_layers=3)
    prompts = [[5, 7, 11], [3] * 9]
    expected = [continued(model, prompt, 6).tokens for prompt in prompts]
    offloader = WeightOffloader(model.model.layers, num_slots=2)
    sizes: dict[str, Any] = {"max_num_reqs": 2, "max_num_tokens": 8, "max_seq_len": 32, "capture_sizes": [2, 8]}
    lm = CausalLM(model, compiler="eager", offloader=offloader, **sizes)
    assert lm.generate(prompts, max_new_tokens=6) == expected


# -- memory


def test_a_quarter_of_the_weights_is_on_the_device() -> None:
    model, _, offloader = offloaded(8, 2)
    num_bytes = sum(weight.nbytes for weight in Stack(8).layers.parameters())
    assert offloader.host_bytes() == 4 * offloader.device_bytes()
    assert offloader.host_bytes() >= num_bytes
    slots = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.layers.parameters()
    }
    assert sum(slots.values()) == offloader.device_bytes()
    assert not any(weight.requires_grad for weight in model.layers.parameters())


def test_slots_by_bytes() -> None:
    _, _, offloader = offloaded(8, 2)
    slot = offloader.device_bytes() // 2
    assert WeightOffloader(Stack(8).layers, max_device_bytes=3 * slot + 1).num_slots == 3


def test_state_dict_holds_all_layers() -> None:
    model, reference, offloader = offloaded()
    wanted = reference.state_dict()
    for state in (model.state_dict(), {**wanted, **{f"layers.{n}": t for n, t in offloader.state_dict().items()}}):
        assert list(state) == list(wanted)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


# -- weights are read and written in host memory


def loaded_all(model: Stack, offloader: WeightOffloader, reference: Stack) -> None:
    model.load_state_dict(reference.state_dict())


def written_one(model: Stack, offloader: WeightOffloader, reference: Stack) -> None:
    offloader.write("0.up.weight", reference.layers[0].up.weight)
    offloader.write("3.down.weight", reference.layers[3].down.weight)


@pytest.mark.parametrize("update", [loaded_all, written_one])
def test_graphs_read_new_weights(update: Callable[..., None]) -> None:
    model, reference, offloader = offloaded()
    manager = captured(model, offloader)
    assert_right(manager, reference)
    for name in ("layers.0.up.weight", "layers.3.down.weight"):
        nn.init.normal_(reference.get_parameter(name))
    captures = manager.runtime.stats().captured
    update(model, offloader, reference)
    assert_right(manager, reference)
    assert manager.runtime.stats().captured == captures


# -- forwards that go wrong


class Without(Stack):
    """Leaves layers out."""

    left_out: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index not in self.left_out:
                x = layer(x)
        return self.last(x)


class Exits(Without):
    left_out = (2, 3)


class Skips(Without):
    left_out = (1,)


class Breaks(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return self.last(x)


@pytest.mark.parametrize(
    ("mode", "kind", "error", "found"),
    [
        ("NONE", Exits, OffloadError, "the end of the forward"),
        ("FULL", Skips, OffloadError, "expected layer 1; found layer 2"),
        ("PIECEWISE", Breaks, OptionError, "graphs"),
    ],
)
def test_forwards_without_some_layers_are_refused(
    mode: str, kind: type[Stack], error: type[GraphpassError], found: str
) -> None:
    model = kind()
    manager = managed(model, WeightOffloader(model.layers, num_slots=2), mode)
    with pytest.raises(error, match=found):
        manager.capture() if manager.needs_capture() else run(manager, 3)


def test_after_a_failed_forward_the_next_one_is_right() -> None:
    model, reference, offloader = offloaded()
    manager = captured(model, offloader, "FULL_AND_PIECEWISE")

    def fail(*_: Any) -> None:
        raise ArithmeticError

    hook = model.layers[2].up.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        expected(model, 3)
    assert_right(manager, reference)
    with pytest.raises(ArithmeticError):
        expected(model, 3)
    hook.remove()
    torch.testing.assert_close(expected(model, 3), expected(reference, 3))


def test_compiled_by_others_it_is_refused_and_not_wrong() -> None:
    model, _, _ = offloaded(4)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(ContextError, match="pass offloader= to CudaGraphManager"):
        expected(compiled, 3)


@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda model: model.double(), "moved or converted"), (copy.deepcopy, "cannot be copied")],
    ids=["converted", "copied"],
)
def test_weights_leave_their_slots(change: Callable[[Stack], Any], found: str) -> None:
    model, _, offloader = offloaded(4)
    manager = captured(model, offloader)

    def changed() -> None:
        change(model)
        run(manager, 3)

    with pytest.raises(OffloadError, match=found):
        changed()


# -- what cannot be offloaded


def stacks_of(kind: str) -> Any:
    layers = Stack(5).layers
    if kind == "tied":
        layers[3].up.weight = layers[1].up.weight
    elif kind == "one memory":
        layers[3].up.weight.data = layers[1].up.weight.data
    elif kind == "wider":
        layers[2].up = nn.Linear(WIDTH, WIDTH)
    elif kind == "more":
        layers[2].gate = nn.Linear(WIDTH, WIDTH)
    elif kind == "other dtype":
        layers[2].half()
    elif kind == "without weights":
        return [nn.Tanh() for _ in range(5)]
    elif kind == "two layers":
        return layers[:2]
    elif kind == "offloaded":
        WeightOffloader(layers, num_slots=2)
    elif kind == "compiled":
        torch.compile(layers[4], backend="eager")(rows(2))
    return layers


@pytest.mark.parametrize(
    ("kind", "given", "error", "message"),
    [
        ("tied", {"num_slots": 2}, OffloadError, "are one parameter"),
        ("one memory", {"num_slots": 2}, OffloadError, "are views of the same memory"),
        ("wider", {"num_slots": 2}, OptionError, "layer 2 does not fit"),
        ("more", {"num_slots": 2}, OptionError, "layer 2 does not fit"),
        ("other dtype", {"num_slots": 2}, OptionError, "layer 2 does not fit"),
        ("without weights", {"num_slots": 2}, OptionError, "0 parameters"),
        ("two layers", {"num_slots": 2}, OptionError, "at least 3 layers"),
        ("offloaded", {"num_slots": 2}, OffloadError, "already"),
        ("compiled", {"num_slots": 2}, OffloadError, "already"),
        ("plain", {"num_slots": 1}, OptionError, "2 to 4 slots for 5"),
        ("plain", {"num_slots": 5}, OptionError, "2 to 4 slots for 5"),
        ("plain", {"max_device_bytes": 100}, OptionError, "0 in 100 bytes"),
        ("plain", {}, OptionError, "neither"),
        ("plain", {"num_slots": 2, "max_device_bytes": 10}, OptionError, "both"),
    ],
)
def test_what_cannot_be_offloaded(kind: str, given: dict[str, int], error: type[GraphpassError], message: str) -> None:
    layers = stacks_of(kind)
    with pytest.raises(error, match=message):
        WeightOffloader(layers, **given)


def tie_to_a_head(model: Stack) -> None:
    model.head = nn.Linear(WIDTH, 2 * WIDTH)
    model.head.weight = model.layers[2].up.weight


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (tie_to_a_head, {}, OffloadError, "Linear.weight is also a weight of an offloaded layer"),
        (lambda model: setattr(model, "layers", Stack(4).layers), {}, OptionError, "another model"),
        (lambda model: None, {"device": "meta"}, DeviceError, "another device"),
        (lambda model: None, {"compare": True}, OptionError, "compare=True"),
    ],
    ids=["tied", "another model", "another device", "compare"],
)
def test_managers_that_cannot_use_it(
    change: Callable[[Stack], None], options: dict[str, Any], error: type[GraphpassError], message: str
) -> None:
    model, _, offloader = offloaded(4)
    change(model)
    with pytest.raises(error, match=message):
        managed(model, offloader, **options)


def assigned(model: Stack, _: WeightOffloader) -> None:
    model.load_state_dict(Stack(4).state_dict(), assign=True)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda model, _: managed(model, None).capture(), ContextError, "pass offloader= to CudaGraphManager"),
        (lambda model, _: model(rows(3).requires_grad_()), OffloadError, "autograd"),
        (assigned, OffloadError, "assign=True"),
        (lambda _, offloader: offloader.write("9.up.weight", torch.ones(1)), OffloadError, "cannot be written"),
        (lambda _, offloader: offloader.write("0.nothing", torch.ones(1)), OffloadError, "cannot be written"),
        (lambda _, offloader: offloader.write("x.up.weight", torch.ones(1)), OffloadError, "cannot be written"),
        (lambda _, offloader: offloader.write("0.up.weight", torch.ones(1)), OffloadError, "cannot be written"),
    ],
    ids=["no offloader", "autograd", "assigned", "no layer", "no weight", "no number", "another shape"],
)
def test_uses_that_are_refused(use: Callable[..., object], error: type[GraphpassError], message: str) -> None:
    model, _, offloader = offloaded(4)
    with pytest.raises(error, match=message):
        use(model, offloader)


def test_layers_by_hand_need_the_first_ones_there() -> None:
    _, _, offloader = offloaded(4)
    with pytest.raises(OffloadError, match="expected sync_prev_onload"):
        offloader.onload(0)
    offloader.sync_prev_onload()
    offloader.onload(0)
