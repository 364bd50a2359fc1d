"""Tokens a second of stock Hugging Face decoders: ``python -m tests.bench.generate``.

Decoders with random weights (``--models``: Qwen3 with 28 layers of width 1024; Olmo2, whose every head has keys of its
own, Granite and Mistral with 16 layers of width 2048) go on with random prompts, greedily, in ways that a user of
transformers can choose from, each with the same weights in a copy of its own:

* ``ours``: a manager with FULL graphs for decode and PIECEWISE ones for prefill;
* ``tuned``: the same with ``tune="measure"``;
* ``alone``: the same without ``capture_sizes``: for one request, single tokens alone are compiled, and prompts run
  uncompiled;
* ``loaded``: the same as ``ours`` over artifacts that another engine saved in a directory of ``warm_start`` before;
* ``padded``: ``ours`` for one request more, which has no key for a single token: a single request runs padded to two;
* ``adapted``: the same after ``adapt()``, which follows its first call;
* ``static``: ``generate`` with a static cache and the compilation that it does by itself;
* ``continuous``: ``generate_batch``, continuous batching over paged SDPA, on the largest batch only.

Each decoder and batch has a process of its own. *First* is the time of the first call. For ``ours`` that is building,
compiling, capturing and generating the first token, for the others their first call as a whole, since they hand out
nothing before its end. Compiler caches are empty then; what any first compilation of a process costs has been paid
before, by compiling one linear layer. With ``--parallel`` above 1 several processes make their first calls at a time.
The other figures are medians over rounds in which the ways take turns while all other processes wait. *Of the floor*
divides the time to read the weights once, at the rate at which the device copies its own memory, by the time of a step.

``--smoke`` runs tiny sizes on a CPU: the code, not the figures. ``continuous`` sizes its cache by a GPU's memory and is
left out there.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from graphpass.text import CausalLM, Generation, Request
from tests.bench.timing import (
    cache_folders,
    environment,
    gpu_or_cpu,
    is_skipped,
    listed,
    parser_of,
    plain_compiled,
    seconds,
    table_of,
    write_json,
)
from tests.bench.turns import in_turn, take_turn

OURS, TUNED, ALONE, LOADED, PADDED, ADAPTED = "ours", "tuned", "alone", "loaded", "padded", "adapted"
STATIC, CONTINUOUS = "static", "continuous"
WAYS = (OURS, TUNED, ALONE, LOADED, PADDED, ADAPTED, STATIC, CONTINUOUS)
TUNE_SECONDS = 200
Prompts = list[list[int]]
Texts = list[list[int]]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes of a stock decoder."""

    class_name: str  #: of its config in transformers
    num_layers: int  #: of the model
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int = 32000

    def config(self, max_positions: int) -> transformers.PretrainedConfig:
        """The config of transformers; no token ends a text."""
        sizes = {} if self.head_dim * self.num_heads == self.hidden else {"head_dim": self.head_dim}
        made: transformers.PretrainedConfig = getattr(transformers, self.class_name)(
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=max_positions,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            **sizes,
        )
        return made


DECODERS = {
    "qwen3": DecoderConfig("Qwen3Config", 28, 1024, 16, 8, 128),
    "olmo2": DecoderConfig("Olmo2Config", 16, 2048, 16, 16, 128),
    "granite": DecoderConfig("GraniteConfig", 16, 2048, 16, 4, 128),
    "mistral": DecoderConfig("MistralConfig", 16, 2048, 16, 4, 128),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What one run measures."""

    name: str  #: of the decoder
    device: torch.device  #: where it runs
    compiler: str  #: of our regions
    decoder: DecoderConfig  #: the model
    prompt_tokens: int  #: of each request
    new_tokens: int
    rounds: int  #: values behind each median

    @property
    def max_seq_len(self) -> int:
        """Tokens of a finished text."""
        return self.prompt_tokens + self.new_tokens

    def model(self) -> torch.nn.Module:
        """The decoder with seeded weights."""
        config = self.decoder.config(max(1024, self.max_seq_len))
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        with torch.device(self.device):
            model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        return model

    def prompts(self, batch: int) -> Prompts:
        """Random tokens, other ones for each request."""
        seeded = random.Random(batch)
        return [[seeded.randrange(self.decoder.vocabulary) for _ in range(self.prompt_tokens)] for _ in range(batch)]


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one way at one batch size."""

    model: str  #: a decoder of the command line
    batch: int  #: requests
    way: str  #: which
    tokens_a_second: float  #: new tokens of all requests, median
    step_ms: float  #: milliseconds of a whole call by new tokens of a request, median
    floor_ms: float  #: see the module
    first_s: float  #: see the module
    call_s: list[float]  #: seconds of each call behind the medians


@dataclass(frozen=True, slots=True)
class Way:
    """One way to generate: ``first`` sets it up and returns seconds, ``call`` generates and returns the new tokens."""

    name: str
    first: Callable[[], float]
    call: Callable[[], Texts]
    close: Callable[[], None]


class Ours:
    """A decoder over captured graphs, made at its first call."""

    def __init__(
        self,
        setup: Setup,
        model: torch.nn.Module,
        prompts: Prompts,
        *,
        more_reqs: int = 0,
        declares: bool = True,
        adapts: bool = False,
        **options: Any,
    ) -> None:
        self._setup, self._model, self._prompts, self._options = setup, model, prompts, options
        self._num_reqs, self._adapts, self._declares = len(prompts) + more_reqs, adapts, declares
        self._lm: CausalLM | None = None

    def first(self) -> float:
        """Seconds until the first token is known."""
        setup, batch = self._setup, self._num_reqs
        start = time.perf_counter()
        most = max(len(self._prompts) * setup.prompt_tokens, batch)
        self._lm = CausalLM(
            self._model,
            max_num_reqs=batch,
            max_num_tokens=most,
            max_seq_len=setup.max_seq_len,
            capture_sizes=sorted({batch, most}) if self._declares else None,
            compiler=setup.compiler,
            **self._options,
        )
        self._lm.capture()
        with Generation(self._lm.manager) as generation:
            for index, prompt in enumerate(self._prompts):
                generation.add(Request.of(str(index), prompt, setup.new_tokens))
            while not generation.step():
                pass
            return time.perf_counter() - start

    def call(self) -> Texts:
        """Generate once."""
        assert self._lm is not None
        texts = self._lm.generate(self._prompts, max_new_tokens=self._setup.new_tokens, progress=False)
        if self._adapts:
            self._lm.adapt()
            self._adapts = False
        return texts

    def close(self) -> None:
        """Give the graphs back."""
        if self._lm is not None:
            self._lm.close()


def static_cache(setup: Setup, model: Any, prompts: Prompts) -> Texts:
    """``generate`` with a static cache; on CUDA it compiles its decode step by itself."""
    ids = torch.tensor(prompts, device=setup.device)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=setup.new_tokens,
        do_sample=False,
        cache_implementation="static",
    )
    texts: Texts = made[:, setup.prompt_tokens :].tolist()
    return texts


def continuous_batching(setup: Setup, model: Any, prompts: Prompts) -> Texts:
    """``generate_batch`` as it comes, over paged SDPA."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=setup.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    made = model.generate_batch(prompts, generation_config=config)
    return [output.generated_tokens for output in made.values()]


def first_loaded(ours: Ours, folder: Path) -> float:
    """Seconds until the first token of an engine, after another one has saved its artifacts."""
    with empty_caches(folder / "saving"):
        ours.first()
    ours.close()
    torch.compiler.reset()
    with empty_caches(folder / "loading"):
        return ours.first()


def make_way(name: str, setup: Setup, model: torch.nn.Module, prompts: Prompts, folder: Path) -> Way:
    """One way over a copy of the model; ``folder`` is its own."""
    own = copy.deepcopy(model)
    tuned, loaded = {"tune": "measure", "tune_seconds": TUNE_SECONDS}, {"warm_start": folder / "saved"}
    padded, adapted = {"more_reqs": 1}, {"more_reqs": 1, "adapts": True}
    options: dict[str, dict[str, Any]] = {
        OURS: {},
        TUNED: tuned,
        ALONE: {"declares": False},
        LOADED: loaded,
        PADDED: padded,
        ADAPTED: adapted,
    }
    if name in options:
        ours = Ours(setup, own, prompts, **options[name])
        first = partial(first_loaded, ours, folder) if name == LOADED else ours.first
        return Way(name, first, ours.call, ours.close)
    if name == CONTINUOUS:
        own.set_attn_implementation("paged|sdpa")  # type: ignore[operator]
    call = partial({STATIC: static_cache, CONTINUOUS: continuous_batching}[name], setup, own, prompts)
    return Way(name, lambda: seconds(call, setup.device), call, lambda: None)


@contextmanager
def empty_caches(folder: Path) -> Iterator[None]:
    """Compiler caches in a folder of their own; what was compiled goes on being loaded from it."""
    folders = cache_folders(folder)
    before = {name: os.environ.get(name) for name in folders}
    os.environ.update(folders)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def measure(setup: Setup, batch: int, names: Sequence[str], wait: Callable[[], None]) -> dict[str, Any]:
    """All ways at one batch size: first calls one by one, then, in this process's turn, rounds of one call of each."""
    any_compile_s = _compile_something(setup)
    model, prompts = setup.model(), setup.prompts(batch)
    with tempfile.TemporaryDirectory(prefix="generate_") as directory:
        ways, first_s = [make_way(name, setup, model, prompts, Path(directory) / name) for name in names], {}
        for way in ways:
            with empty_caches(Path(directory) / way.name):
                first_s[way.name] = way.first()
        wait()
        call_s: dict[str, list[float]] = {way.name: [] for way in ways}
        for _ in range(setup.rounds + 1):
            for way in ways:
                texts: list[Texts] = []
                taken_s = seconds(lambda way=way, texts=texts: texts.append(way.call()), setup.device)
                assert [len(text) for text in texts[0]] == [setup.new_tokens] * batch, f"{way.name} lost tokens"
                call_s[way.name].append(taken_s)
    for way in ways:
        way.close()
    medians = {name: statistics.median(call_s[name][1:]) for name in names}
    floor_ms = weights_ms(model)
    rows = [
        Row(
            model=setup.name,
            batch=batch,
            way=name,
            tokens_a_second=batch * setup.new_tokens / medians[name],
            step_ms=medians[name] / setup.new_tokens * 1e3,
            floor_ms=floor_ms,
            first_s=first_s[name],
            call_s=call_s[name][1:],
        )
        for name in names
    ]
    return {"any_compile_s": any_compile_s, "setup": _plain(setup), "rows": [asdict(row) for row in rows]}


def weights_ms(model: torch.nn.Module) -> float:
    """Milliseconds to read once what a step reads of the weights: all but the table of input embeddings."""
    embeddings = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    read = [weight for weight in model.parameters() if weight is head or weight is not embeddings]
    num_bytes = sum(weight.numel() * weight.element_size() for weight in read)
    source = torch.ones(1 << (28 if head.is_cuda else 22), dtype=torch.float32, device=head.device)
    target = torch.empty_like(source)
    copies_s = [seconds(lambda: target.copy_(source), head.device) for _ in range(10)]
    bytes_a_second = 2 * source.numel() * source.element_size() / statistics.median(copies_s)
    return num_bytes / bytes_a_second * 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each decoder and batch size in a process of its own and print one table."""
    options, console = _parsed(arguments), Console(width=120)
    if is_skipped("generate", options):
        return
    batches = options.batches or ([1, 2] if options.smoke else [1, 8, 64])
    if options.one:
        name, batch = options.one[0], int(options.one[1])
        take_turn(lambda wait: measure(_setup(options, name), batch, options.rows, wait))
        return
    commands = {}
    for name, batch in itertools.product(options.models, batches):
        serves_continuous = batch == max(batches) and not options.smoke
        rows = [row for row in options.rows if row != CONTINUOUS or serves_continuous]
        commands[f"{name} {batch}"] = ["--one", name, str(batch), "--rows", ",".join(rows), *_numbers(options)]
    found: dict[str, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="generate_") as directory:
        for first in range(0, len(commands), options.parallel):
            some = dict(list(commands.items())[first : first + options.parallel])
            for name, figures in in_turn("generate", some, Path(directory), options.ready_s, measured_s=300):
                found[name] = figures
                console.print(name, figures.get("problem", "measured"), markup=False)
                write_json(options.json, {"environment": environment(gpu_or_cpu(options.smoke)), "measured": found})
    console.print(_table([Row(**row) for figures in found.values() for row in figures.get("rows", ())]))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(WAYS):
            raise argparse.ArgumentTypeError(f"rows are {', '.join(WAYS)}")
        return chosen

    parser = parser_of("generate", __doc__, layers=None, rounds=None)
    parser.add_argument("--rows", type=names, default=[OURS, STATIC, CONTINUOUS])
    parser.add_argument("--batches", type=listed, default=None)
    parser.add_argument("--models", nargs="+", choices=list(DECODERS), default=["qwen3"])
    parser.add_argument("--parallel", type=int, default=1, help="processes that compile side by side")
    parser.add_argument("--ready-s", type=float, default=600, help="a process that compiles longer is left out")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "BATCH"), help="a process that waits for its turn")
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


def _numbers(options: argparse.Namespace) -> list[str]:
    """What a process of one decoder has to be told beside the decoder."""
    given = {"--layers": options.layers, "--rounds": options.rounds}
    told = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    return [*told, *["--smoke"] * options.smoke]


def _setup(options: argparse.Namespace, name: str) -> Setup:
    decoder = DECODERS[name]
    if options.smoke:
        small = replace(
            decoder, num_layers=options.layers or 2, hidden=16 * decoder.num_heads, head_dim=16, vocabulary=256
        )
        return Setup(name, torch.device("cpu"), "eager", small, 8, 8, options.rounds or 1)
    decoder = replace(decoder, num_layers=options.layers or decoder.num_layers)
    return Setup(name, gpu_or_cpu(), "inductor", decoder, 64, 128, options.rounds or 5)


def _compile_something(setup: Setup) -> float:
    """Seconds of the first compilation in this process."""
    layer = torch.nn.Linear(16, 16, device=setup.device)
    compiled = plain_compiled(layer, setup.compiler)
    return seconds(lambda: compiled(torch.ones(2, 16, device=setup.device)), setup.device)


def _plain(setup: Setup) -> dict[str, Any]:
    return {**asdict(setup), "device": str(setup.device)}


def _table(rows: Sequence[Row]) -> Table:
    ours, cells = {(row.model, row.batch): row for row in rows if row.way == OURS}, []
    for row in rows:
        own = ours.get((row.model, row.batch))
        beside = ("", "")
        if own is not None:
            beside = (f"{own.tokens_a_second / row.tokens_a_second:.2f} x", f"{row.first_s / own.first_s:.1f} x")
        floor = f"{row.floor_ms / row.step_ms:.0%}"
        figures = (f"{row.tokens_a_second:.0f}", f"{row.step_ms:.2f}", floor, f"{row.first_s:.1f}")
        cells.append((row.model, row.batch, row.way, *figures, *beside))
    columns = (
        "model | batch | way | tokens/s | ms a step | of the floor | first, s | ours is faster by | ours is first by"
    )
    return table_of("Generating text", columns, cells)


if __name__ == "__main__":
    main()
