"""A stock decoder by its own ``tp_plan``: ``torchrun --nproc-per-node 2 -m tests.bench.two_gpus``.

One decode step in each form that a user could run: eager, ``reduce-overhead`` (which may not get ready: 90 s are its
limit; ``--without-reduce-overhead`` leaves it out), one argument with ``ranks="lockstep"``, FULL and PIECEWISE; beside
FULL, in the same rounds, the replay of its graph and nothing else. Then mixed steps with sizes that recur, compared
with eager and between the ranks; then ``CausalLM`` beside the model's own ``generate``. Each figure is printed as soon
as it is there. The process ends without ``close()``. ``--smoke`` runs tiny sizes over gloo on a CPU.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from rich.console import Console
from torch import distributed

import graphpass as gp
from graphpass.text import CausalLM
from tests.bench.timing import behind, gpu_or_cpu, parser_of, seconds, write_json

READY_S, ROUNDS, SETTLED, PIECES = 90, 15, 40, "torch.nn.functional.scaled_dot_product_attention"
TOLERANCE = 3e-2  #: of logits in bfloat16


@contextmanager
def within(limit_s: int) -> Iterator[None]:
    """A TimeoutError in the body after so many seconds."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def decoder(layers: int, width: int, device: torch.device) -> Any:
    """A Mistral with seeded weights, sharded as its ``tp_plan`` says."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(4, width // 64),
        num_key_value_heads=max(2, width // 256),
        vocab_size=512,
        tie_word_embeddings=False,
    )
    path = f"/tmp/graphpass-two-gpus-{layers}-{width}"
    if distributed.get_rank() == 0:
        transformers.MistralForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    distributed.barrier()
    plan = import_module("transformers.distributed").DistributedConfig(tp_plan="auto")
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(path, distributed_config=plan, dtype=torch.bfloat16).to(device).eval()


def steps_ms(steps: Mapping[str, Callable[[], Any]], device: torch.device, calls: int) -> dict[str, float]:
    """Of each the median of some rounds, in which they take turns."""
    rounds = [{name: seconds(step, device, calls=calls) for name, step in steps.items()} for _ in range(ROUNDS)]
    return {f"{name} ms": statistics.median(of[name] for of in rounds) * 1e3 for name in steps}


def raw_replay(fast: Any, call: Callable[[], Any]) -> Callable[[], None]:
    """The replay of the graph that a compiled model's ``call`` replays, once it has the last one that it captures."""
    for _ in range(SETTLED):
        call()
    tables = gp.runtime_of(fast)._tables()
    *_, entry = (entry for table in tables for key in table.descriptors() for entry in table.at(key))
    return entry.graph.replay


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, as a part of the largest entry."""
    return float((found - expected).abs().max() / expected.abs().max())


def mixed(model: Any, fast: Any, steps: int, device: torch.device) -> dict[str, Any]:
    """Steps of random sizes; each thousandth is compared with eager, and its sum with the other ranks'."""
    sizes, worst, unequal = random.Random(0), 0.0, 0
    for step in range(steps):
        size = sizes.choice((3, 5, 7, 12, 20, sizes.randint(2, 64)))
        ids = torch.randint(512, (1, size), device=device, generator=torch.Generator(device).manual_seed(step))
        logits = fast(ids, use_cache=False).logits
        if step % max(1, steps // 10) == 0:
            worst = max(worst, difference(logits, model(ids, use_cache=False).logits))
            least, most = logits.clone(), logits.clone()
            distributed.all_reduce(least, distributed.ReduceOp.MIN)
            distributed.all_reduce(most, distributed.ReduceOp.MAX)
            unequal += not torch.equal(least, most)
    stats = gp.runtime_of(fast).stats()
    return {"steps": steps, "worst": worst, "unequal": unequal, "captured": stats.captured, "replayed": stats.replayed}


def tokens_a_second(generate: Callable[[], Sequence[Any]], device: torch.device) -> float:
    generate()
    start_s = time.perf_counter()
    count = sum(map(len, generate()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return count / (time.perf_counter() - start_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("two_gpus", __doc__, layers=None, width=None, steps=None)
    parser.add_argument("--without-reduce-overhead", action="store_true")
    options = parser.parse_args(arguments)
    if torch.cuda.is_available() and not options.smoke:
        torch.cuda.set_device(distributed.get_node_local_rank())
    device = gpu_or_cpu(options.smoke)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    small = device.type == "cpu"
    model = decoder(options.layers or (1 if small else 8), options.width or (64 if small else 2048), device)
    compiler, calls = ("aot_eager", 1) if small else ("inductor", 20)
    ids, found = torch.randint(512, (4, 1), device=device), dict[str, Any]()

    def tell(what: str, figure: Any) -> None:
        found[what] = figure
        if distributed.get_rank() == 0:
            Console(soft_wrap=True).print(f"{what}: {figure}", markup=False)

    def compiled(**given: Any) -> Any:
        return torch.compile(model, backend="cgpass", options={"ranks": "lockstep", "compiler": compiler, **given})

    forms = {
        "eager": lambda: model,
        "reduce-overhead": lambda: torch.compile(model, mode="reduce-overhead"),
        "FULL": lambda: compiled(mode="FULL"),
        "PIECEWISE": lambda: compiled(splitting_ops=[PIECES]),
    }
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits.clone()
        for name, make in forms.items():
            if name == "reduce-overhead" and (small or options.without_reduce_overhead):
                continue
            called, start_s = make(), time.perf_counter()
            try:
                with within(READY_S if name == "reduce-overhead" else 600):
                    for _ in range(4):
                        logits = called(ids, use_cache=False).logits.clone()
            except TimeoutError:
                tell(name, f"not ready within {READY_S} s")
                continue
            ready_s, far = time.perf_counter() - start_s, difference(logits, expected)
            assert far < TOLERANCE, f"{name} differs from eager by {far:.1e}"
            steps = {"step": lambda: called(ids, use_cache=False)}  # noqa: B023
            if name == "FULL":
                steps["raw replay"] = raw_replay(called, steps["step"])
            tell(name, {"ready s": ready_s, "difference": far, **steps_ms(steps, device, calls)})
        fast = torch.compile(model, backend="cgpass", dynamic=True, options={"ranks": "lockstep", "compiler": compiler})
        tell("mixed", mixed(model, fast, options.steps or (40 if small else 10_000), device))
    prompts, new = [list(range(3, 3 + size)) for size in (5, 9)], 4 if small else 64

    def own() -> list[Any]:
        given = [torch.tensor([prompt], device=device) for prompt in prompts]
        return [model.generate(one, max_new_tokens=new, do_sample=False)[0, one.shape[1] :].tolist() for one in given]

    own_tokens = own()
    tell("generate, tokens/s", tokens_a_second(own, device))
    engine = CausalLM(model, max_num_reqs=2, max_num_tokens=32, max_seq_len=128, ranks="lockstep")
    tokens = engine.generate(prompts, max_new_tokens=new)
    tell("tokens equal", tokens == own_tokens)
    tell("CausalLM, tokens/s", tokens_a_second(lambda: engine.generate(prompts, max_new_tokens=new), device))
    engine.close()
    tell("tokens behind eager's best", behind(model, prompts, tokens, device))
    if distributed.get_rank() == 0:
        write_json(options.json, found)
    distributed.destroy_process_group()  # closes what holds its collectives


if __name__ == "__main__":
    main()
