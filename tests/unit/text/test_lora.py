"""LoRA adapters under a manager: outputs of merged weights for every mix, keys by number, loading into live graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from graphpass import (
    Batch,
    CudagraphDispatcher,
    CudaGraphManager,
    InputSpec,
    LoraKeys,
)
from graphpass.errors import OptionError, ShapeError
from graphpass.offload import WeightOffloader
from graphpass.text import LoraAdapters
from graphpass.text.lora import LoraLinear
from tests.unit.models import module
from tests.unit.text.adapted import (
    MAX_RANK,
    NAMES,
    WIDTH,
    Adapted,
    Adapter,
    Merged,
    Mlp,
    key_kinds,
    mixes,
)

KINDS = tuple(key_kinds(1))


def pairwise() -> list[tuple[int, str, str, str]]:
    """Each mode with each kind of keys that it has, so NONE with one; numbers of adapters and compilers take turns."""
    return [
        ((i + j) % 3 + 1, mode, kind, ("eager", "aot_eager")[(i + j) % 2])
        for i, mode in enumerate(("FULL", "PIECEWISE", "NONE"))
        for j, kind in enumerate(KINDS[:1] if mode == "NONE" else KINDS)
    ]


def check_every_mix(max_loras: int, mode: str, kind: str, compiler: str) -> None:
    adapted = Adapted(mode, key_kinds(max_loras)[kind], max_loras=max_loras, compiler=compiler)
    captures, replays = adapted.captures(), adapted.replays()
    for seed, names in enumerate(mixes(NAMES[:max_loras])):
        adapted.check(names, seed)
    assert adapted.captures() == captures
    assert (adapted.replays() > replays) == (mode != "NONE")
    adapted.manager.close()


@pytest.mark.parametrize(("max_loras", "mode", "kind", "compiler"), pairwise())
def test_every_mix_is_the_merged_model(max_loras: int, mode: str, kind: str, compiler: str) -> None:
    check_every_mix(max_loras, mode, kind, compiler)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_a_step_computes_the_adapters_that_its_key_counts_and_no_other(mode: str) -> None:
    """What is computed, and belongs to no token, meets its rows times zero: NaN there would show."""
    adapted = Adapted(mode, LoraKeys(3, per_count=True), sizes=[8])
    for active in ([], ["a"], ["c"], ["a", "b"], ["b", "c"]):
        idle = [adapted.adapters.slot_of(name) for name in NAMES if name not in active]
        held = [(t, t.clone()) for layer in adapted.adapters.layers.values() for t in (layer.lora_a, layer.lora_b)]
        for tensor, _ in held:
            tensor[idle] = float("nan")
        adapted.check([None, *active])
        for tensor, values in held:
            tensor.copy_(values)
    adapted.manager.close()


def test_an_adapter_that_overflows_stays_with_its_own_tokens() -> None:
    adapted = Adapted("FULL", LoraKeys(3), sizes=[8])
    adapted.adapters.unload("b")
    huge = torch.full((1, WIDTH), 3e38), torch.ones(8, 1)
    adapted.adapters.load("b", {"up": huge})
    names = ["a", None, "c"]
    adapted.check(names)
    made = adapted.run(["b", *names]).clone()
    assert made[1:].isfinite().all()
    expected = adapted.merged.rows(adapted.rows(4), [None, *names])
    torch.testing.assert_close(made[1:], expected[1:], rtol=1e-5, atol=1e-6)
    adapted.manager.close()


# -- adapters come and go --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_an_adapter_loaded_after_capture_is_served_without_another(mode: str) -> None:
    adapted = Adapted(mode, LoraKeys(3, per_count=True))
    captures, addresses = adapted.captures(), adapted.addresses()
    adapted.check(["a", "b", None])
    first = adapted.run(["a", "b", None]).clone()
    adapted.adapters.unload("a")
    adapted.adapters.unload("b")
    stock = Mlp()
    # Another slot for each than before, and one adapter fewer layers: what "a" left there has to be gone.
    new = {"b": Adapter.random(stock, ("up", "down"), 2, seed=7), "a": Adapter.random(stock, ("up",), 1, seed=8)}
    for name, adapter in new.items():
        adapted.adapters.load(name, adapter.pairs, scaling=adapter.scaling)
    adapted.merged = Merged(stock, {**adapted.known, **new})
    for names in mixes(NAMES):
        adapted.check(names)
    again = adapted.run(["a", "b", None])
    assert not torch.isclose(again[:2], first[:2]).all(dim=1).any()
    assert torch.equal(again[2], first[2])
    assert adapted.captures() == captures
    assert adapted.addresses() == addresses
    adapted.manager.close()


def test_more_adapters_than_slots_are_refused() -> None:
    adapted = Adapted("NONE", LoraKeys(3))
    with pytest.raises(OptionError, match=r"'d' cannot be loaded.*fewer than max_loras=3.*3 loaded"):
        adapted.adapters.load("d", adapted.known["a"].pairs)
    adapted.adapters.unload("b")
    adapted.adapters.load("d", adapted.known["b"].pairs, scaling=adapted.known["b"].scaling)
    assert adapted.adapters.loaded == ("a", "c", "d")
    x = adapted.rows(2)
    batch = adapted.adapters.of_rows(["d", "c"]).added_to(Batch(2, inputs={"x": x}))
    torch.testing.assert_close(adapted.manager.run(batch), adapted.merged.rows(x, ["b", "c"]))
    with pytest.raises(OptionError, match="cannot be loaded"):
        adapted.adapters.load("a", adapted.known["a"].pairs)
    with pytest.raises(OptionError, match="'b' is not loaded"):
        adapted.adapters.of_rows(["b"])


@pytest.mark.parametrize(
    ("name", "given", "factor"),
    [
        (None, {}, 1.0),
        (None, {"scaling": 0.5}, 0.5),
        ("base_model.model.{}.lora_{}.weight", {"alpha": 3.0}, 1.5),
        ("{}.lora_{}.default.weight", {"alpha": 3.0}, 1.5),
    ],
)
def test_weights_come_in_pairs_or_named_as_peft_names_them_and_are_scaled(
    name: str | None, given: Mapping[str, float], factor: float
) -> None:
    model = Mlp()
    pairs = Adapter.random(model, ("up", "down"), 2, seed=1).pairs
    named = {name.format(path, "AB"[at]): pair[at] for path, pair in pairs.items() for at in (0, 1)} if name else pairs
    merged = Adapter(pairs, factor).merged(model)
    adapters = LoraAdapters(model, ("up", "down"), max_loras=1, max_rank=2)
    adapters.load("a", named, **given)
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(adapters.wrap(model)(x=x, **adapters.of_rows(["a"] * 3).inputs), merged(x))
    adapters.unload("a")
    with pytest.raises(OptionError, match="two scales"):
        adapters.load("a", pairs, alpha=1.0, scaling=1.0)


GOOD = (torch.ones(2, WIDTH), torch.ones(8, 2))


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ({}, OptionError, "found no weights"),
        ({"left": GOOD}, OptionError, "a layer that takes no adapters"),
        ({"uo": GOOD}, OptionError, "did you mean 'up'"),
        ({"up": GOOD[0]}, OptionError, "not made of low-rank pairs"),
        ({"up.lora_A.weight": GOOD[0]}, OptionError, "not made of low-rank pairs.*lora_A alone of up"),
        ({"up.lora_embedding_A": GOOD[0]}, OptionError, "not made of low-rank pairs"),
        ({"up": None}, ShapeError, "up of adapter 'a' does not fit"),
        ({"up": (torch.ones(5, WIDTH), torch.ones(8, 5))}, ShapeError, r"rank at most 4.*\(5, 6\)"),
        ({"up": (torch.ones(0, WIDTH), torch.ones(8, 0))}, ShapeError, "does not fit"),
        ({"up": (GOOD[0], torch.ones(8, 3))}, ShapeError, "does not fit"),
        ({"up": (GOOD[1], GOOD[0])}, ShapeError, "does not fit"),
        ({"up": (GOOD[0][0], GOOD[1])}, ShapeError, "does not fit"),
        ({"up": (GOOD[0].half(), GOOD[1].half())}, ShapeError, "torch.float32 on cpu.*torch.float16"),
        ({"up": (GOOD[0].to("meta"), GOOD[1])}, ShapeError, "found .*on meta"),
        ({"up": (GOOD[0], GOOD[1] * float("inf"))}, ShapeError, "is not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_written(
    weights: Mapping[str, Any], error: type[Exception], message: str
) -> None:
    model = Mlp()
    adapters = LoraAdapters(model, ("up", "down"), max_loras=1, max_rank=MAX_RANK)
    layers = list(adapters.layers.values())
    with pytest.raises(error, match=message):
        adapters.load("a", weights)
    assert adapters.loaded == ()
    assert not any(tensor.any() for layer in layers for tensor in (layer.lora_a, layer.lora_b))
    adapters.load("a", {"up": GOOD})


HOOKS = r"up takes no adapters.*found Linear with hooks"


def plain(model: Mlp) -> None:
    pass


def offloaded(model: Mlp) -> None:
    """The layer that takes the place of an offloaded one would run with another layer's weights."""
    WeightOffloader([model.up, *(copy.deepcopy(model.up) for _ in range(2))], num_slots=2)


def adapted(model: Mlp) -> None:
    LoraAdapters(model, "up", max_loras=1, max_rank=1)


@pytest.mark.parametrize(
    ("change", "targets", "message"),
    [
        (plain, (), "names no layer"),
        (plain, ("middle",), "target 'middle' names no layer.*down, shared, up"),
        (plain, ("dow",), "did you mean 'down'"),
        (plain, ("own",), "names no layer"),
        (plain, ("act",), "act takes no adapters.*found Tanh"),
        (plain, ("shared",), "has several paths"),
        (offloaded, ("up", "down"), HOOKS),
        (
            lambda model: nn.utils.spectral_norm(model.up),
            ("up", "down"),
            r"up takes no adapters.*found Linear with hooks",
        ),
        (lambda model: setattr(model.up, "forward", model.up.forward), ("up",), HOOKS),
        (adapted, ("up", "down"), r"up takes no adapters.*not replaced before; found LoraLinear"),
    ],
)
def test_targets_that_take_no_adapters_are_refused(
    change: Callable[[Mlp], object], targets: Sequence[str], message: str
) -> None:
    model = Mlp()
    model.act, shared = nn.Tanh(), nn.Linear(2, 2)
    model.first, model.second = nn.ModuleDict({"shared": shared}), nn.ModuleDict({"shared": shared})
    change(model)
    before = dict(model.named_modules())
    with pytest.raises(OptionError, match=message):
        LoraAdapters(model, targets, max_loras=1, max_rank=1)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("limits", [{"max_loras": 0}, {"max_rank": 0}, {"max_loras": True}, {"max_rank": 1.5}])
def test_limits_are_checked(limits: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"max_(loras|rank) of the adapters cannot be used"):
        LoraAdapters(Mlp(), "up", **{"max_loras": 1, "max_rank": 1, **limits})


# -- the layer -------------------------------------------------------------------------------------------------------


def test_an_adapted_model_is_the_stock_one_to_everybody_else() -> None:
    model, x = Mlp(), torch.randn(3, WIDTH)
    stock = copy.deepcopy(model)
    adapters = LoraAdapters(model, ("up",), max_loras=2, max_rank=2)
    adapters.load("a", {"up": GOOD})
    assert isinstance(model.up, LoraLinear)
    assert type(model.down) is nn.Linear
    assert torch.equal(model(x), stock(x))
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in stock.named_parameters()]
    stock.up.weight.data.neg_()
    model.load_state_dict(stock.state_dict())
    assert torch.equal(model(x), stock(x))


def pools(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Its second layer sees one row, whatever there were."""
    return self.pooled(self.each(x).sum(0, keepdim=True))


def test_a_layer_that_does_not_see_each_token_once_is_refused() -> None:
    model = module(pools, each=nn.Linear(WIDTH, WIDTH), pooled=nn.Linear(WIDTH, 2))
    adapters = LoraAdapters(model, ("each", "pooled"), max_loras=1, max_rank=1)
    dispatcher = CudagraphDispatcher("FULL", [4], max_num_reqs=8, lora=LoraKeys(1))
    specs = [InputSpec("x", (8, WIDTH), torch.float32), *adapters.input_specs(8)]
    manager = CudaGraphManager(adapters.wrap(model), dispatcher, specs, compiler="eager")
    with pytest.raises(ShapeError, match="a row for each of 4 tokens; found 1 rows"):
        manager.capture()
