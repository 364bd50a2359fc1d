"""Padding on a GPU: leaks, floats that are inputs, negative indices, TF32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphpass as gp
from graphpass.compat import operators
from tests.observed import calls_with_graph
from tests.unit.cgpass.leaks import is_padded, refusals

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("closed_runtimes")]

STEPS = range(27)
"""Of calls whose keys recur, and whose lengths do not; no kernel's tile divides them."""


def check_padded(model: Any, arguments: Iterable[Sequence[torch.Tensor]], close: float, **options: Any) -> str:
    """Compare the calls with eager; all of them may be padded, and some are. Returns the report."""
    runtime = gp.GraphRuntime()
    given = {"dispatch": "auto", "runtime": runtime, **options}
    fast = torch.compile(model, backend="cgpass", dynamic=True, options=given)
    with torch.no_grad():
        for args in arguments:
            torch.testing.assert_close(fast(*args), model(*args), rtol=close, atol=close)
    assert refusals(runtime) == []
    assert is_padded(runtime)
    return str(runtime.report())


# cuDNN computes convolutions in float32 as TF32, unless it is told not to; a GPU picks other kernels for other lengths.


class Convolved(nn.Module):
    """The front of a speech encoder, which halves the length three times, and an attention over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.ModuleList([nn.Conv1d(wide, 256, 7, stride=2) for wide in (1, 256, 256)])
        self.norm, self.attends = nn.LayerNorm(256), nn.MultiheadAttention(256, 4, batch_first=True)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        x = sound[:, None]
        for layer in self.front:
            x = F.gelu(layer(x))
        x = self.norm(x.mT)
        return x + self.attends(x, x, x, need_weights=False)[0]


@pytest.fixture
def slow_path() -> Iterator[None]:
    """Torch's layers as single operators: before 2.13 Dynamo runs those of their fast path as they are."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("tf32", [True, False])
def test_convolutions_in_tf32_are_padded(cuda: torch.device, *, tf32: bool) -> None:
    sounds = ([torch.randn(2 + step % 3, 4000 + 1222 * (step % 9) - step // 9, device=cuda)] for step in STEPS)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        check_padded(Convolved().eval().to(cuda), sounds, 2e-2 if tf32 else 1e-4)


@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("lacks_number", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_without_a_mask_hides_padded_keys_in_its_own_kernel(
    cuda: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, lacks_number: bool
) -> None:
    """Heads of 64, which cuDNN takes in 16 bits where a GPU prefers it."""
    if lacks_number:
        monkeypatch.setattr(operators, "attention_to_lengths", lambda dtype, width: None)
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval().to(cuda, dtype)
    shapes = ((2 + step % 3, 23 + 24 * (step % 9) - step // 9, 256) for step in STEPS)
    calls = ([torch.randn(*shape, device=cuda, dtype=dtype)] for shape in shapes)
    report = check_padded(model, calls, 1e-4 if dtype == torch.float32 else 3e-2)
    assert ("the number of real keys" in report) is not lacks_number


class Shared(nn.Module):
    """Attention of eight heads over keys and values of two, of another length than the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(256, 256), nn.Linear(256, 128), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (8, 32)).transpose(1, 2)
        k, v = self.kv(other).unflatten(-1, (2, 2, 32)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_heads_that_share_keys_are_not_computed_in_parts(cuda: torch.device, compiler: str) -> None:
    lengths = ((23 + 24 * (step % 9) - step // 9, 40 + 16 * (step % 5) - step // 5) for step in STEPS)
    calls = (
        [torch.randn(2 + step % 3, length, 256, device=cuda, dtype=torch.bfloat16) for length in of_step]
        for step, of_step in enumerate(lengths)
    )
    model = Shared().eval().to(cuda, torch.bfloat16)
    assert "the number of real keys" in check_padded(model, calls, 3e-2, compiler=compiler)


def marked(mask: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    mask = mask * 2
    mask[torch.arange(mask.shape[0], device=mask.device), last] = 1
    return mask


def hidden(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[~mask] = 0
    return x


@pytest.mark.parametrize("put", [marked, hidden])
def test_a_number_that_is_put_at_indices_or_where_a_mask_says_is_captured(put: Any, cuda: torch.device) -> None:
    """AOTAutograd has the number on the CPU, from where a capture copies nothing; a look at a mask would wait."""
    runtime = gp.GraphRuntime()
    options = {"compiler": "aot_eager", "dispatch": "auto", "runtime": runtime}
    fast = torch.compile(put, backend="cgpass", dynamic=True, options=options)
    for step in range(6):
        given = torch.zeros(5, 8, dtype=torch.long, device=cuda), torch.arange(5, device=cuda)
        if put is hidden:
            given = torch.randn(2, 17 + step, 8, device=cuda), torch.rand(2, 17 + step, device=cuda) < 0.5
        torch.testing.assert_close(fast(*given), put(*given))
    assert refusals(runtime) == []
    assert calls_with_graph(runtime) >= 4


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_bias_that_hides_padding_is_aligned_and_infinite(
    cuda: torch.device, compiler: str, dtype: torch.dtype, tolerance: float
) -> None:
    """The efficient kernel, that of float32, refuses rows of 63 entries; ATen pads them where it chooses the kernel.

    In 16 bits cuDNN's adds -65504 where a mask is False, which does not hide padding.
    """

    def attends(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
        both = mask[:, None, None] & mask[:, None, :, None]
        attended = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=both)
        return attended.where(mask[:, None, :, None], 0)  # rows without keys are whatever a kernel makes of them

    def arguments(length: int) -> list[torch.Tensor]:
        x, mask = torch.randn(3, length, 64, device=cuda, dtype=dtype), torch.rand(3, length, device=cuda) < 0.7
        mask[:, 0] = True
        return [x, mask]

    check_padded(attends, map(arguments, (64, 63, 57, 61, 72, 55, 71, 62, 80, 79)), tolerance, compiler=compiler)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache")
def test_relative_positions_that_are_made_on_the_cpu(cuda: torch.device) -> None:
    """WavLM makes them there for each length, and draws a number for each layer that nobody reads."""
    transformers = pytest.importorskip("transformers")
    config = transformers.WavLMConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128)
    model, runtime = transformers.WavLMModel(config).eval().to(cuda), gp.GraphRuntime()
    fast = torch.compile(model, backend="cgpass", dynamic=True, options={"dispatch": "auto", "runtime": runtime})
    with torch.no_grad():
        for step in range(48):
            sound = torch.randn(1 + step % 4, 8000 + 1711 * (step * 7 % 24), device=cuda)
            torch.manual_seed(step)
            expected, after = model(sound).last_hidden_state, torch.rand(1)
            torch.manual_seed(step)
            torch.testing.assert_close(fast(sound).last_hidden_state, expected, rtol=2e-2, atol=2e-2)
            assert torch.equal(torch.rand(1), after)
    assert [len(record.regions) for record in runtime.callables()] == [1] * len(runtime.callables())
    assert refusals(runtime) == []
    assert is_padded(runtime)
    assert calls_with_graph(runtime) >= 24
