"""What the proof of padding adds to the compilation of stock models.

``python -m tests.bench.padding_proof [layers ...]``; needs no GPU. Sizes are small, as they do not change what is
compiled. All seconds are CPU seconds, those of compilers in other processes included, so that they are the same
whatever runs beside. *call* is the first call without a proof, from Dynamo to the compiler; *compile* is the compiler's
part of it; *proof* is what a proof adds: reading aten graphs, tracing eager regions, and the proof itself. *again* is
the compiler's part with warm caches, without and with a proof: a graph that is to be read is traced again, where
AOTAutograd's cache would have skipped the trace.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

from graphpass import partition
from graphpass.compat import symbolic
from graphpass.compile import RegionCompiler, reading, traced_regions
from graphpass.regions import AtenGraph, PaddingProof, Partition
from graphpass.regions.floats import floats_as_tensors
from graphpass.regions.partitionproof import prove_partition

LAYERS = (12, 48)
WIDTH, HEADS, NUM_IDS = 64, 4, 100
ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


def bert(**sizes: int) -> nn.Module:
    """A BERT encoder, of the base size where nothing is said."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes)).eval()


def llama(**sizes: int) -> nn.Module:
    """A Llama decoder without a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes)).eval()


SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH, "vocab_size": NUM_IDS}
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "BERT": lambda layers: bert(num_hidden_layers=layers, **SIZES),
    "Llama": lambda layers: llama(num_hidden_layers=layers, num_key_value_heads=HEADS // 2, **SIZES),
}
COLUMNS = "model | layers | compiler | regions | call | compile | proof | of compile | of call | again | proved"


@dataclass
class Backend:
    """A backend that compiles regions and, if asked, proves what may be padded; it keeps the seconds of each part."""

    compiler: str
    splitting_ops: tuple[str, ...]
    proves: bool
    call_s: float = 0.0
    compile_s: float = 0.0
    read_s: float = 0.0
    proof_s: float = 0.0
    num_regions: int = 0
    proofs: list[PaddingProof] = field(default_factory=list)

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        floats_as_tensors(graph_module)
        parts = partition(graph_module, self.splitting_ops)
        self.num_regions = len(parts.regions)  # of the last graph: Dynamo may start again
        captured = [region for region in parts.regions if region.kind == "captured"]
        start_s, read_s = cpu_s(), self.read_s
        compiled = RegionCompiler().compile(captured, self.compiler, trace=reading(self._read) if self.proves else None)
        self.compile_s += cpu_s() - start_s - (self.read_s - read_s)
        if self.proves:
            start_s = cpu_s()
            eager = traced_regions([region for region in parts.regions if region.kind == "eager"], AtenGraph.of)
            graphs = {**compiled.traces, **eager}
            self.proofs.append(prove_partition(parts, graphs, _symbols_of(parts), _declared(parts)))
            self.proof_s += cpu_s() - start_s
        callees = {region.name: region.graph_module.forward for region in parts.regions}
        bound: Callable[..., Any] = parts.bind({**callees, **compiled.by_name})
        return bound

    def _read(self, aten: fx.GraphModule) -> AtenGraph:
        start_s = cpu_s()
        graph = AtenGraph.of(aten)
        self.read_s += cpu_s() - start_s
        return graph


def _symbols_of(parts: Partition) -> Mapping[sympy.Symbol, str]:
    found = {}
    for given in parts.inputs:
        if isinstance(given.value, torch.Tensor) and not given.is_static:
            for dim, size in enumerate(given.value.shape):
                expression = symbolic.expression_of(size)
                if isinstance(expression, sympy.Symbol):
                    found.setdefault(expression, f"{given.source_name}[{dim}]")
    return found


def _declared(parts: Partition) -> dict[int, int]:
    return {p: 0 for p, given in enumerate(parts.inputs) if given.source_name == "attention_mask"}


def cpu_s() -> float:
    """CPU seconds of this process and of the compilers that it ran."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def compiled_once(model: nn.Module, backend: Backend) -> Backend:
    """Compile ``model`` with the backend by one call."""
    torch.compiler.reset()
    shape = (3, 7)
    given = {"input_ids": torch.randint(0, NUM_IDS, shape), "attention_mask": torch.ones(shape, dtype=torch.int64)}
    start_s = cpu_s()
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=True)(**given)
    backend.call_s = cpu_s() - start_s
    return backend


def measure(name: str, num_layers: int, compiler: str, splitting_ops: tuple[str, ...]) -> tuple[str, ...]:
    """One row of the table, without and with a proof of one and the same compilation."""
    model = MODELS[name](num_layers)
    with fresh_cache():
        first = compiled_once(model, Backend(compiler, splitting_ops, proves=True))
        again = [compiled_once(model, Backend(compiler, splitting_ops, proves=proves)) for proves in (False, True)]
    added_s = first.read_s + first.proof_s
    call_s = first.call_s - added_s
    verdicts = [verdict.name for proof in first.proofs for verdict in proof.verdicts.values()]
    return (
        name,
        str(num_layers),
        compiler,
        str(first.num_regions),
        f"{call_s:.1f}",
        f"{first.compile_s:.1f}",
        f"{added_s:.2f}",
        f"{1 + added_s / first.compile_s:.3f}",
        f"{1 + added_s / call_s:.3f}",
        " / ".join(f"{one.compile_s + one.read_s + one.proof_s:.1f}" for one in again),
        f"{verdicts.count('PROVED')} of {len(verdicts)}",
    )


def main(layers: tuple[int, ...] = LAYERS) -> None:
    """Print the table, a row as soon as it is measured."""
    console = Console(width=140)
    table = Table(*COLUMNS.split(" | "), title=f"torch {torch.__version__}, CPU seconds")
    with inductor_config.patch(compile_threads=1):  # compilers in this process, so that their seconds count
        measure("BERT", 1, "inductor", ())  # imports
        for num_layers, compiler, name in itertools.product(layers, ("aot_eager", "inductor"), MODELS):
            for splitting_ops in ((), (ATTENTION,)):
                row = measure(name, num_layers, compiler, splitting_ops)
                table.add_row(*row)
                print(*row, sep="  ", file=sys.stderr, flush=True)
    console.print(table)


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or LAYERS)
