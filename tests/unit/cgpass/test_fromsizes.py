"""What a graph makes on the CPU from sizes is made before each call: no cut, and its padding is that of an input.

There is no GPU here, so float64 and int32 stand for tensors on the device, and other types for those on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphpass.regions import fromsizes
from tests.unit.cgpass.attended import Make
from tests.unit.compiled import Compiled, agrees

SIZES = [(2, 5), (3, 9), (2, 7), (4, 11), (2, 6), (3, 13), (2, 9), (4, 7), (2, 12), (3, 10)]


@pytest.fixture(autouse=True)
def types_as_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fromsizes, "main_device", lambda graph: torch.device("cuda"))
    monkeypatch.setattr(fromsizes, "_is_cpu", lambda tensor: tensor.dtype not in (torch.float64, torch.int32))


def buckets(size: int) -> torch.Tensor:
    """Relative positions in buckets, as WavLM makes them."""
    at = torch.arange(size)
    apart = at[None] - at[:, None]
    bucket = (apart > 0).to(torch.long) * 8
    apart = apart.abs()
    far = (4 + torch.log(apart.float() / 4) / math.log(4) * 4).to(torch.long)
    bucket += torch.where(apart < 4, apart, torch.min(far, torch.full_like(far, 7)))
    return bucket


class Biased(nn.Module):
    """Attention with a bias of relative positions, behind a first entry; a dead draw for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, 1:]
        bias = self.table(buckets(x.shape[1]).to(torch.int32))[..., 0]
        for _ in range(2):
            torch.rand([])
            x = x + (x @ x.mT + bias).softmax(-1) @ x
        return x


class Strided(Biased):
    """The same behind convolutions: the length is a quotient, of which there are two forms."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(*(nn.Conv1d(4, 4, 3, 2, dtype=torch.float64) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.convs(x.mT).mT)


def features(size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*size, 4, dtype=torch.float64),)


def served(compiled: Make, model: Callable[..., Any], **options: Any) -> Compiled:
    given: dict[str, Any] = {"compiler": "aot_eager", "dynamic": True, "dispatch": "auto", **options}
    return compiled(model, make=features, **given)


def num_taken(function: Callable[..., Any], *args: torch.Tensor) -> tuple[int, int] | None:
    """How many nodes run before the graph that Dynamo makes of a function, and how many of its tensors they make."""
    found: list[fromsizes.Beforehand | None] = []

    def backend(graph_module: Any, _: Any) -> Any:
        found.append(fromsizes.found_beforehand(graph_module.graph))
        return graph_module.forward

    torch.compile(function, backend=backend, dynamic=True)(*args)
    return None if found[0] is None else (len(found[0][3]), len(found[0][2]))


@pytest.mark.parametrize(("kind", "times"), [(Biased, 1), (Strided, 4)])
def test_it_pads_and_draws_as_before(kind: type[Biased], times: int, compiled: Make) -> None:
    model = kind().eval()
    fast = served(compiled, model)
    for batch, length in SIZES * 2:
        (x,) = features((batch, times * length))
        torch.manual_seed(3)
        with torch.no_grad():
            expected, after = model(x), torch.rand(1)
        torch.manual_seed(3)
        agrees(fast(x), expected)
        assert torch.equal(torch.rand(1), after)
    assert fast.is_padded
    (record,) = fast.rt.callables()
    assert [region.kind for region in record.regions] == ["captured"]
    assert "made" in {size.verdict for size in record.sizes}


def on_device(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(x.shape[0]).to(torch.int32)[:, None]


def used_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(x.shape[0])
    return x * at.to(torch.int32)[:, None], at


def written_outside(x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(x.shape[0])
    at.add_(x[:, 0].long())
    return x * at.to(torch.int32)[:, None]


def drawn_between(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.rand([])
    return x * torch.rand(x.shape[0]).to(torch.float64)[:, None], torch.rand(2)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (on_device, (1, 1)),
        (lambda x: x * (x[:, 0].float() * 2).to(torch.float64)[:, None], None),
        (used_twice, None),
        (written_outside, None),
        (lambda x: x * torch.rand(x.shape[0]).to(torch.float64)[:, None], (1, 1)),
        (drawn_between, None),
        (lambda x: x * torch.rand_like(torch.zeros(x.shape[0]), dtype=torch.float64)[:, None], None),
        (lambda x: x * torch.ones(6).nonzero().to(torch.int32).sum(), None),
    ],
    ids=["of a size", "of an input", "used twice", "written", "drawn", "drawn between", "drawn like", "of data"],
)
def test_only_what_sizes_determine_is_made_ahead(
    function: Callable[..., Any], expected: tuple[int, int] | None
) -> None:
    assert num_taken(function, torch.randn(5, 4, dtype=torch.float64)) == expected


def test_autocast_on_the_cpu_is_left_alone() -> None:
    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return on_device(x)

    assert num_taken(cast, torch.randn(5, 4, dtype=torch.float64)) is None


def test_it_is_not_saved(compiled: Make, tmp_path: Path) -> None:
    fast = served(compiled, Biased().eval(), warm_start=tmp_path)
    fast(*features((2, 5)))
    assert "makes tensors on the CPU before each call" in fast.problem("saved").what
