"""What the tests of LoRA share: a small model, adapters with random weights, and the same weights merged."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphpass import Batch, CudagraphDispatcher, CudaGraphManager, InputSpec, LoraKeys
from graphpass.text import LoraAdapters

WIDTH, LARGEST, MAX_RANK = 6, 10, 4
SIZES = (2, 8)
NAMES = ("a", "b", "c")
Names = Sequence[str | None]


class Mlp(nn.Module):
    """Two layers with a split between them, in PIECEWISE: each of its regions has a layer that takes adapters."""

    splitting_ops = ("torch.tanh",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


@dataclass(frozen=True)
class Adapter:
    """Pairs by layer, and what their product is multiplied by."""

    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    scaling: float

    @classmethod
    def random(cls, model: nn.Module, layers: Sequence[str], rank: int, seed: int) -> Adapter:
        seeded = torch.Generator().manual_seed(seed)
        pairs = {}
        for path in layers:
            weight = model.get_submodule(path).weight
            assert isinstance(weight, torch.Tensor)
            down = torch.randn(rank, weight.shape[1], generator=seeded) / weight.shape[1] ** 0.5
            up = torch.randn(weight.shape[0], rank, generator=seeded)
            pairs[path] = down.to(weight), up.to(weight)
        return cls(pairs, 0.25 * (seed + 1))

    def merged(self, model: nn.Module) -> nn.Module:
        """A copy of a stock model that computes with this adapter alone."""
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for path, (down, up) in self.pairs.items():
                weight = copied.get_submodule(path).weight
                assert isinstance(weight, torch.Tensor)
                weight.add_(self.scaling * (up.float() @ down.float()).to(weight.dtype))
        return copied


class Merged:
    """The model as it was, and one for each adapter; each row goes through its own."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, Adapter]) -> None:
        self.models = {None: copy.deepcopy(model), **{name: a.merged(model) for name, a in adapters.items()}}

    @torch.no_grad()
    def rows(self, x: torch.Tensor, names: Names) -> torch.Tensor:
        return torch.cat([self.models[name](row.unsqueeze(0)) for row, name in zip(x, names, strict=True)])


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """One of the largest rank, one of rank 1, one that leaves a layer out."""
    layers = (("up", "down"), ("up", "down"), ("down",))
    return {name: Adapter.random(model, layers[n], (MAX_RANK, 1, 3)[n], seed=n) for n, name in enumerate(NAMES)}


class Adapted:
    """A model under a manager, its adapters loaded, and the merged models beside it."""

    def __init__(
        self,
        mode: str,
        keys: LoraKeys | None,
        *,
        max_loras: int = 3,
        compiler: str = "eager",
        device: str = "cpu",
        sizes: Sequence[int] = SIZES,
    ) -> None:
        model = Mlp().to(device)
        self.known = dict(list(adapters_of(model).items())[:max_loras])
        self.merged = Merged(model, self.known)
        self.adapters = LoraAdapters(model, ("up", "down"), max_loras=max_loras, max_rank=MAX_RANK)
        for name, adapter in self.known.items():
            self.adapters.load(name, adapter.pairs, scaling=adapter.scaling)
        self.device = device
        self.manager = CudaGraphManager(
            self.adapters.wrap(model),
            CudagraphDispatcher(mode, sizes, max_num_reqs=LARGEST, lora=keys),
            [InputSpec("x", (LARGEST, WIDTH), torch.float32), *self.adapters.input_specs(LARGEST)],
            compiler=compiler,
            on_fallback="silent",
            splitting_ops=Mlp.splitting_ops,
        )
        if self.manager.needs_capture():
            self.manager.capture()

    def run(self, names: Names, seed: int = 0) -> torch.Tensor:
        x = self.rows(len(names), seed)
        result: torch.Tensor = self.manager.run(self.adapters.of_rows(names).added_to(Batch(len(x), inputs={"x": x})))
        return result

    def rows(self, count: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def check(self, names: Names, seed: int = 0, **tolerance: float) -> None:
        """Each row is what the model with that row's adapter merged makes of it."""
        expected = self.merged.rows(self.rows(len(names), seed), names)
        torch.testing.assert_close(self.run(names, seed), expected, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))

    def replays(self) -> int:
        return sum(counts.replayed for counts in self.manager.runtime.counts().values())

    def captures(self) -> int:
        return sum(counts.captured for counts in self.manager.runtime.counts().values())

    def addresses(self) -> list[int]:
        return [t.data_ptr() for layer in self.adapters.layers.values() for t in (layer.lora_a, layer.lora_b)]


def mixes(names: Sequence[str]) -> list[list[str | None]]:
    """None, each alone, all at once, each beside none, and random ones; of every size from 1 to the largest."""
    seeded = random.Random(0)
    found: list[list[str | None]] = [[None], [None] * 5, [*names], [*names, None], [None, *reversed(names)] * 2]
    for name in names:
        found += [[name], [name] * 7, [None, name, name]]
    found += [[seeded.choice([None, *names]) for _ in range(count)] for count in range(1, LARGEST + 1)]
    return [mix[:LARGEST] for mix in found]


def key_kinds(max_loras: int) -> dict[str, Any]:
    """Every kind of adapter keys there is."""
    return {
        f"{'per_count' if per_count else 'any'}-{'without' if without else 'always'}": LoraKeys(
            max_loras, per_count=per_count, without=without
        )
        for per_count in (True, False)
        for without in (True, False)
    }
