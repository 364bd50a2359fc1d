"""A stock decoder with quantised weights, each form in a process of its own: ``python -m tests.bench.quantised``.

A Llama of 8 layers of width 2048 with random weights in bfloat16 (``--form bf16``) or one of torchao's forms makes a
step for ``--batch`` rows of one token: eagerly, by one argument, and under ``reduce-overhead``, in this order; then
``text.CausalLM`` and the model's own ``generate`` go on with as many prompts. Each row is printed as soon as it is
measured. *First* is the time of the first calls, until a graph replays. Memory is what the device has less than before
the model was made. The difference is that of the logits to the eager quantised model's, as a part of their largest
value; of texts, how far the eager logit of a chosen token is behind the best.

torchao's configurations set Inductor's settings, under which a compilation takes minutes: ``--plain-settings`` leaves
them, ``--without-reduce-overhead`` and ``--without-texts`` save compilations, and fewer ``--layers`` make each shorter.
``--smoke`` runs tiny sizes on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

import graphpass as gp
from graphpass.text import CausalLM
from tests.bench.timing import behind, environment, free_bytes, gpu_or_cpu, is_skipped, parser_of, seconds, write_json

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8_weight_only": ("Int8WeightOnlyConfig", {}),
    "int8_dynamic": ("Int8DynamicActivationInt8WeightConfig", {}),
    "fp8_weight_only": ("Float8WeightOnlyConfig", {}),
    # A scale of a whole tensor would mix the requests of a batch.
    "fp8_dynamic": ("Float8DynamicActivationFloat8WeightConfig", {"granularity": "PerRow"}),
    "int4": ("Int4WeightOnlyConfig", {"int4_packing_format": "tile_packed_to_4d"}),
}
REPLAYED_AFTER, PROMPT = 4, 16
COLUMNS = "way | first s | ms a step | graphs | difference | MiB"


@dataclass(frozen=True, slots=True)
class Way:
    """How one way of running the model did."""

    name: str
    first_s: float  #: until a graph replays
    step_ms: float
    graphs: int | None  #: captured ones; None where that is not known
    difference: float  #: of logits from the eager quantised model's; of texts, behind the best eager logit
    memory_mib: float  #: what the device has less than before the model was made

    def row(self, eager_mib: float) -> str:
        """Its figures in the order of :data:`COLUMNS`; memory also as a multiple of ``eager_mib``."""
        graphs = "" if self.graphs is None else str(self.graphs)
        part = f" ({self.memory_mib / eager_mib:.3f})" if eager_mib else ""
        figures = (f"{self.first_s:.1f}", f"{self.step_ms:.3f}", graphs, f"{self.difference:.2g}")
        return " | ".join((self.name, *figures, f"{self.memory_mib:.0f}{part}"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one form."""
    parser = parser_of("quantised", __doc__, batch=1, layers=None, steps=100, tokens=64)
    parser.add_argument("--form", choices=["bf16", *FORMS], default="int8_weight_only")
    parser.add_argument("--plain-settings", action="store_true", help="leave Inductor's settings as they are")
    parser.add_argument("--without-reduce-overhead", action="store_true")
    parser.add_argument("--without-texts", action="store_true", help="no CausalLM and no generate")
    options = parser.parse_args(arguments)
    if is_skipped("quantised", options):
        return
    device = gpu_or_cpu(options.smoke)
    ways, title, console = list[Way](), f"{options.form}, batch {options.batch}", Console(soft_wrap=True)
    console.print(f"{title}\n{COLUMNS}", markup=False)
    with torch.no_grad():
        for way in _measured(options, device):
            ways.append(way)
            console.print(way.row(ways[0].memory_mib), markup=False)
    write_json(options.json, {"environment": environment(device), "title": title, "ways": list(map(asdict, ways))})


def _measured(options: Any, device: torch.device) -> Any:
    before = free_bytes(device)
    model = _quantised(_decoder(device, options.layers, small=options.smoke), options)
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (options.batch, 1), generator=torch.Generator().manual_seed(1)).to(device)

    def way(name: str, step: Callable[[], torch.Tensor], runtime: gp.GraphRuntime | None = None) -> Way:
        first_s = seconds(lambda: [step() for _ in range(REPLAYED_AFTER)], device)
        got = step().float().clone()
        step_ms = seconds(step, device, calls=options.steps) * 1e3
        if device.type == "cuda":
            torch.cuda.empty_cache()
        used, want = (before - free_bytes(device)) / 2**20, expected.get("logits", got)
        expected.setdefault("logits", got)
        difference = ((got - want).abs().max() / want.abs().max()).item()
        return Way(name, first_s, step_ms, None if runtime is None else _graphs(runtime), difference, used)

    expected: dict[str, torch.Tensor] = {}
    yield way("eager", lambda: model(ids, use_cache=False).logits)
    runtime = gp.GraphRuntime()
    given = {"runtime": runtime, "dispatch": "auto", "compiler": "aot_eager" if options.smoke else "inductor"}
    fast = torch.compile(model, backend="cgpass", options=given)
    yield way("one argument", lambda: fast(ids, use_cache=False).logits, runtime)
    runtime.close()
    torch._dynamo.reset()
    if not options.without_reduce_overhead and not options.smoke:
        reduced = torch.compile(model, mode="reduce-overhead")
        yield way("reduce-overhead", lambda: reduced(ids, use_cache=False).logits)
        del reduced
        torch._dynamo.reset()
    if not options.without_texts:
        yield from _texts(model, options, device, before)


def _texts(model: Any, options: Any, device: torch.device, before: int) -> Any:
    """Its own ``generate``, and a :class:`CausalLM`; a step is one token of all texts."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(1, model.config.vocab_size, (options.batch, PROMPT), generator=generator)
    tokens, longest = options.tokens, 256

    def own() -> list[list[int]]:
        given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return model.generate(prompts.to(device), **given)[:, PROMPT:].tolist()  # type: ignore[no-any-return]

    first_s = seconds(own, device)
    want, own_ms = own(), seconds(own, device) * 1e3 / tokens
    far = behind(model, prompts.tolist(), want, device)
    yield Way("generate", first_s, own_ms, None, far, (before - free_bytes(device)) / 2**20)
    started = time.perf_counter()
    text = CausalLM(
        model, max_num_reqs=options.batch, max_num_tokens=max(64, options.batch), max_seq_len=longest, progress=False
    )
    text.capture()

    def ours() -> list[list[int]]:
        return list(map(list, text.generate(prompts.tolist(), max_new_tokens=tokens)))

    got = ours()
    first_s, step_ms = time.perf_counter() - started, seconds(ours, device) * 1e3 / tokens
    used = (before - free_bytes(device)) / 2**20
    graphs = _graphs(text.manager.runtime)
    text.close()
    yield Way("CausalLM", first_s, step_ms, graphs, behind(model, prompts.tolist(), got, device), used)


def _graphs(runtime: gp.GraphRuntime) -> int:
    return sum(bool(counts.captured) for counts in runtime.counts().values())


def _decoder(device: torch.device, layers: int | None, *, small: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, vocabulary = (256, 512) if small else (2048, 32000)
    layers = layers or (2 if small else 8)
    sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 128, "num_key_value_heads": max(1, width // 256)}
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=4096, **sizes, **heads)
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).eval()
    return model.to(torch.float32 if small else torch.bfloat16)


def _quantised(model: Any, options: Any) -> Any:
    if options.form == "bf16":
        return model
    from torchao import quantization

    name, given = FORMS[options.form]
    if "granularity" in given:
        given = {**given, "granularity": getattr(quantization, given["granularity"])()}
    settings = {"set_inductor_config": False} if options.plain_settings else {}
    quantization.quantize_(model, getattr(quantization, name)(**given, **settings))
    return model


if __name__ == "__main__":
    main()
