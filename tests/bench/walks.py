"""The files that one call enters, in order, and the records that it builds: ``python -m tests.bench.walks [walk ...]``.

A walk starts with the first call of a function of graphpass or cgpass, and ends when that function returns. It needs no
GPU. Not counted: ``compat``, whose functions wrap single calls of torch; the tape, which only replaces the device;
special methods such as ``__hash__``; lambdas and comprehensions. Records are dataclasses and named tuples.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import graphpass
from graphpass import Batch, BatchDescriptor, CudagraphDispatcher, CudaGraphManager, CUDAGraphMode, InputSpec

ROOT = Path(__file__).parent.parent.parent
HOMES = {str(ROOT / "graphpass"): "graphpass", str(ROOT / "backends" / "cgpass"): "cgpass"}
LEFT_OUT = ("graphpass/compat/", "graphpass/capture/tape.py", "graphpass/capture/outputs.py fill_with_sentinel")
"""Beginnings of ``file function`` that do not count."""
SPECIAL_METHODS = ("__init__", "__call__", "__post_init__", "__enter__", "__exit__")
"""The special methods that count."""
SIZES = (1, 2, 4, 8)
WIDTH = 16


@functools.cache
def short_name(name: str) -> str | None:
    """A file as ``graphpass/...`` or ``cgpass/...``, None for code of others."""
    for home, short in HOMES.items():
        if name.startswith(f"{home}/"):
            return short + name.removeprefix(home)
    return None


def counts(file: str, function: str) -> bool:
    last = function.rpartition(".")[2]
    special = last.startswith("__") and last not in SPECIAL_METHODS
    return not (special or last.startswith("<") or f"{file} {last}".startswith(LEFT_OUT))


def walk_of(call: Callable[[], object]) -> dict[str, str]:
    """{file: the function that enters it} of a call.

    Only the first function of graphpass or cgpass that the call reaches counts, and what that one calls.
    """
    entered: dict[str, str] = {}
    entry: list[FrameType] = []

    def follow(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and entry and frame is entry[0]:
            sys.setprofile(None)
        file = short_name(frame.f_code.co_filename) if event == "call" else None
        if file is None or not counts(file, frame.f_code.co_qualname):
            return
        entry[:] = entry or [frame]
        entered.setdefault(file, frame.f_code.co_qualname)

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def records_of(call: Callable[[], object]) -> dict[str, int]:
    """{kind of record: how many} that a call builds."""
    built: dict[str, int] = {}

    def follow(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_name
        if event != "call" or name not in ("__init__", "__new__"):
            return
        made = type(frame.f_locals.get("self")) if name == "__init__" else frame.f_locals.get("_cls")
        is_ours = isinstance(made, type) and made.__module__.partition(".")[0] in HOMES.values()
        is_ours = is_ours and made.__module__ != "graphpass.capture.tape"
        if is_ours and (dataclasses.is_dataclass(made) or issubclass(made, tuple)):
            built[made.__qualname__] = built.get(made.__qualname__, 0) + 1

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return built


def records_of_calls() -> dict[str, dict[str, int]]:
    """The records of calls of one argument at a new size: the first, which runs without a graph, and the capture."""
    fast = torch.compile(Net().eval(), backend="cgpass", options={"mode": "FULL", "compiler": "aot_eager"})
    with torch.no_grad():
        for size in (5, 6, 7, 8):
            fast(torch.randn(size, WIDTH))
        first = records_of(lambda: fast(torch.randn(21, WIDTH)))
        capture = records_of(lambda: fast(torch.randn(21, WIDTH)))
        replay = records_of(lambda: fast(torch.randn(21, WIDTH)))
    return {"a first call": first, "a capture": capture, "a replay": replay}


class Net(nn.Module):
    """Two layers, with an operation between them that can split the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(nn.functional.gelu(self.inner(x)))
        return out


def compile_net() -> dict[str, str]:
    fast = torch.compile(
        Net().eval(), backend="cgpass", options={"splitting_ops": ["aten::gelu"], "compiler": "aot_eager"}
    )
    with torch.no_grad():
        return walk_of(lambda: fast(torch.randn(4, WIDTH)))


def full_replay() -> dict[str, str]:
    key = BatchDescriptor(8, num_reqs=8, uniform=True)
    runtime = graphpass.GraphRuntime()
    options = {"mode": "FULL", "compiler": "aot_eager", "runtime": runtime}
    fast = torch.compile(Net().eval(), backend="cgpass", dynamic=True, options=options)
    x = torch.randn(8, WIDTH)
    with (
        torch.no_grad(),
        graphpass.set_forward_context(runtime_mode=CUDAGraphMode.FULL, batch_descriptor=key),
    ):
        with runtime.capturing():
            fast(x)
        fast(x)
        return walk_of(lambda: fast(x))


def one_argument() -> dict[str, str]:
    fast = torch.compile(Net().eval(), backend="cgpass", options={"mode": "FULL", "compiler": "aot_eager"})
    with torch.no_grad():
        for size in [5, 6, 7, 8] * 4:
            fast(torch.randn(size, WIDTH))
        return walk_of(lambda: fast(torch.randn(5, WIDTH)))


def engine_batch() -> dict[str, str]:
    dispatcher = CudagraphDispatcher("FULL", SIZES, max_num_reqs=8)
    manager = CudaGraphManager(
        Net().eval(), dispatcher, [InputSpec("x", (8, WIDTH), torch.float32)], compiler="aot_eager"
    )
    manager.capture()
    batch = Batch(5, inputs={"x": torch.randn(5, WIDTH)})
    for _ in range(3):
        manager.run(batch)
    return walk_of(lambda: manager.run(batch))


def generate_step() -> dict[str, str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from graphpass.text import CausalLM, Generation, Request

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    lm = CausalLM(
        LlamaForCausalLM(config).eval(),
        max_num_reqs=4,
        max_num_tokens=32,
        max_seq_len=64,
        capture_sizes=[2, 4, 16, 32],
        compiler="aot_eager",
    )
    lm.capture()
    with Generation(lm.manager) as generation:
        for name in ("a", "b"):
            generation.add(Request.of(name, [5, 7, 11], max_new_tokens=20))
        for _ in range(5):
            generation.step()
        return walk_of(generation.step)


def pixel_buffer() -> dict[str, str]:
    from graphpass import EncoderCudaGraphManager, EncoderOptions
    from tests.e2e.hugging_face import CPU
    from tests.e2e.towers import TOWERS

    tower = next(tower for tower in TOWERS if tower.family == "qwen3_vl")
    model = tower.build(CPU)
    options = EncoderOptions(token_budgets=[16, 32, 64], costs=None)  # always a replay
    manager = EncoderCudaGraphManager.from_model(model, options=options, **tower.options)
    manager.capture()
    grids = torch.tensor([[1, 4, 4], [1, 6, 8]])
    patch = 3 * model.config.temporal_patch_size * model.config.patch_size**2
    images = {"pixel_values": torch.randn(int(grids.prod(1).sum()), patch), "image_grid_thw": grids}
    with torch.no_grad():
        for _ in range(2):
            manager.execute(images)
        return walk_of(lambda: manager.execute(images))


WALKS: dict[str, Callable[[], dict[str, str]]] = {
    "compile": compile_net,
    "replay": full_replay,
    "one_argument": one_argument,
    "batch": engine_batch,
    "generate": generate_step,
    "pixels": pixel_buffer,
}


def main() -> None:
    for name in sys.argv[1:] or WALKS:
        entered = WALKS[name]()
        print(f"\n## {name}: {len(entered)} files\n")
        for place, (file, function) in enumerate(entered.items(), 1):
            print(f"{place}. `{file}`: `{function}`")
    if not sys.argv[1:]:
        for name, built in records_of_calls().items():
            print(f"\n## Records of {name}: {len(built)} kinds\n")
            print(", ".join(f"{kind} ({number})" for kind, number in built.items()))


if __name__ == "__main__":
    main()
