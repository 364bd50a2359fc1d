"""Figures of the pages in docs/gallery: ``python -m tests.bench.gallery [NAMES] [--out DIR] [--from FILE]``.

Needs a GPU, transformers, timm and diffusers; a checkout on ``PYTHONPATH`` is enough. Each page's program runs as it is
printed, in a process of its own. All processes compile and capture at the same time; then they are measured one after
the other, while the others wait. Of each page eager, torch.compile, reduce-overhead and graphpass are timed in
interleaved rounds; results are compared with eager ones, in the dtype of the page.

Writes ``gallery.json`` to ``--out`` and the rows of the pages to the table of ``index.md``. ``--from FILE`` writes the
rows of such a file, and measures nothing. ``--small`` runs the small models of the tests, on any machine: the code, not
the figures.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import cgpass
from graphpass.capture.modelstate import entry_of
from tests.bench.timing import Spread, Timing, environment, interleaved, write_json
from tests.bench.turns import in_turn, take_turn
from tests.e2e.gallery import FOLDER, PAGES, GalleryPage, Namespace

VARIANTS = ("eager", "torch.compile", "reduce-overhead", "graphpass")
Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is timed of a page."""

    name: str  #: the first column of its row
    units: int  #: what its time is divided by: calls, or new tokens
    runs: Mapping[str, Run]  #: {variant: runs it once}; a variant returns what eager returns
    counts_host: bool = False  #: whether the time until the run returns is a figure, too
    rounds: int = 100  #: at most so many values are behind each median


# -- variants of a page -------------------------------------------------------------------------------------------


def workloads(page: GalleryPage, names: Namespace) -> list[Workload]:
    """The workloads of a page whose program has run."""
    if page.kind == "text":
        return _of_text(names)
    if page.kind == "attached":
        return []  # tests/bench/first_token.py measures it
    variants = _compiled(names["model"], page.dynamic)
    return _of_calls(names, variants) if page.kind == "calls" else _of_images(names, variants)


def _compiled(model: Any, dynamic: bool | None) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"eager": model, "torch.compile": _compiled_apart(model, dynamic, backend="aot_eager")}
    reduced = _compiled_apart(model, dynamic, mode="reduce-overhead")
    return {"eager": model, "torch.compile": _compiled_apart(model, dynamic), "reduce-overhead": reduced}


def _compiled_apart(model: Any, dynamic: bool | None, **how: Any) -> Callable[..., Any]:
    """Compiled by ``torch.compile``, apart from the other variants."""
    compiled = torch.compile(entry_of(lambda kwargs: model(**kwargs)), dynamic=dynamic, **how)
    return lambda **kwargs: compiled(kwargs)


def _of_calls(names: Namespace, variants: Mapping[str, Any]) -> list[Workload]:
    batches = names["batches"]
    calls = {**variants, "graphpass": names["fast"]}
    least = min(batches, key=lambda batch: len(next(iter(batch.values()))))
    return [
        Workload(
            f"{len(batches)} batches, ms each", len(batches), {v: partial(_all, c, batches) for v, c in calls.items()}
        ),
        Workload("the smallest batch, ms", 1, {v: partial(_all, c, [least]) for v, c in calls.items()}, True),
    ]


def _all(call: Callable[..., Any], batches: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    return [_first_tensor(call(**batch)) for batch in batches]


def _first_tensor(result: Any) -> torch.Tensor:
    first = result if isinstance(result, torch.Tensor) else result[0]
    return first.clone()  # the next replay of reduce-overhead overwrites it


def _of_images(names: Namespace, towers: Mapping[str, Any]) -> list[Workload]:
    manager, device = names["manager"], next(names["model"].parameters()).device
    rows = []
    for request in names["requests"]:
        given = {"hidden_states": request["pixel_values"], "grid_thw": request["image_grid_thw"].to(device)}
        runs = {variant: partial(_pooled, tower, given) for variant, tower in towers.items()}
        runs["graphpass"] = partial(_executed, manager, request)
        tokens = int(request["image_grid_thw"].prod(1).sum()) // 4
        count = len(request["image_grid_thw"])
        rows.append(Workload(f"{count} image{'s' * (count > 1)}, {tokens} tokens, ms", 1, runs))
    return rows


def _pooled(tower: Callable[..., Any], given: Mapping[str, Any]) -> list[torch.Tensor]:
    return [tower(**given).pooler_output.clone()]


def _executed(manager: Any, request: Mapping[str, Any]) -> list[torch.Tensor]:
    return [torch.cat(list(manager.execute(request)))]


def _of_text(names: Namespace) -> list[Workload]:
    lm, model, prompts, new = names["lm"], names["model"], names["prompts"], names["new_tokens"]
    config = copy.deepcopy(names["config"])
    config._attn_implementation = "sdpa"
    with torch.device(model.device):
        stock = type(model)(config).to(model.dtype).eval()
    stock.load_state_dict(model.state_dict())
    stock.generation_config.eos_token_id = None  # as on the pages
    runs: dict[str, Run] = {"eager": partial(_generated, stock, prompts, new)}
    if torch.cuda.is_available():
        runs["reduce-overhead"] = partial(_generated, stock, prompts, new, cache_implementation="static")
    runs["graphpass"] = lambda: [torch.tensor(lm.generate(prompts, max_new_tokens=new, progress=False))]
    count = f"{len(prompts)} text{'s' * (len(prompts) > 1)}"
    return [Workload(f"{count} of {new} tokens, ms a step", new, runs, rounds=2)]


def _generated(model: Any, prompts: Sequence[Sequence[int]], new: int, **cache: Any) -> list[torch.Tensor]:
    """By Transformers, with its dynamic cache; or with its static cache, where it compiles the step itself."""
    length, device = max(map(len, prompts)), model.device
    ids = torch.tensor([[0] * (length - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=device)
    given = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **cache}
    return [model.generate(ids, attention_mask=mask, **given)[:, length:].cpu()]


# -- one page, in its process -------------------------------------------------------------------------------------


def measure(page: GalleryPage, given: argparse.Namespace, wait: Callable[[], None]) -> dict[str, Any]:
    """Warm up all variants, wait until this process may measure, and time them."""
    torch.manual_seed(0)
    start = time.monotonic()
    until = start + given.ready_s - 20
    names = page.run_small() if given.small else page.run()
    ready = {"graphpass": time.monotonic() - start}
    device = next(names["model"].parameters()).device
    figures: dict[str, Any] = {"title": page.title, "dynamic": page.dynamic, "rows": [], "ready_s": ready, "failed": {}}
    with torch.inference_mode():
        measured = workloads(page, names)
        differences = _warmed_up(measured, figures, until)
        wait()
        for workload, found in zip(measured, differences, strict=True):
            runs = {variant: run for variant, run in workload.runs.items() if variant not in figures["failed"]}
            rounds = min(given.rounds, workload.rounds)
            timings = interleaved(runs, device=device, rounds=rounds, steps_a_round=1, host_calls=1)
            figures["rows"].append(_row(workload, timings, found))
    if "fast" in names:
        import graphpass

        figures["graphs"] = graphpass.runtime_of(names["fast"]).stats().captured
    return {**figures, **environment(device)}


def _warmed_up(measured: Sequence[Workload], figures: dict[str, Any], until: float) -> list[dict[str, float]]:
    """Run each variant of each workload; for each workload how its variants differ from eager.

    A variant of torch that fails, or that would make this process late, is not measured.
    """
    expected = [workload.runs["eager"]() for workload in measured]
    differences: list[dict[str, float]] = [{} for _ in measured]
    variants = ["graphpass", *(variant for variant in measured[0].runs if variant != "graphpass")]
    for left, variant in zip(range(len(variants), 0, -1), variants, strict=True):
        start = time.monotonic()
        try:
            with _limit((until - start) / left if variant in ("torch.compile", "reduce-overhead") else None):
                for which, workload in enumerate(measured):
                    for _ in range(3):
                        made = workload.runs[variant]()
                    differences[which][variant] = _difference(made, expected[which])
        except Exception as error:
            if variant in ("eager", "graphpass"):
                raise
            figures["failed"][variant] = f"{type(error).__name__}: {error}"[:500]
        figures["ready_s"][variant] = figures["ready_s"].get(variant, 0) + time.monotonic() - start
    return differences


@contextmanager
def _limit(seconds: float | None) -> Iterator[None]:
    """A TimeoutError after so many seconds."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not ready within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(0 if seconds is None else max(1, round(seconds)))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _difference(made: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest norm of a difference, as a share of the norm; of tokens, the share that differs."""
    pairs = list(zip(made, expected, strict=True))
    if not expected[0].is_floating_point():
        return max(float((one != other).float().mean()) for one, other in pairs)
    return max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs)


def _row(workload: Workload, timings: Mapping[str, Timing], differences: Mapping[str, float]) -> dict[str, Any]:
    return {
        "name": workload.name,
        "ms": {variant: _ms(timing.step, workload.units) for variant, timing in timings.items()},
        "host_us": {variant: asdict(timing.host) for variant, timing in timings.items()}
        if workload.counts_host
        else None,
        "difference": {variant: differences[variant] for variant in timings},
    }


def _ms(spread: Spread, units: int) -> dict[str, float]:
    return {name: value / units / 1e3 for name, value in asdict(spread).items()}


# -- all pages ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the pages and write their rows."""
    given = _parsed(arguments)
    if given.one:
        _in_this_process(given)
        return
    if given.from_file:
        _write(json.loads(given.from_file.read_text(encoding="utf-8")))
        return
    console = Console(width=140)
    found: dict[str, Any] = {}
    asked = ["--rounds", str(given.rounds), "--ready-s", str(given.ready_s), *["--small"] * given.small]
    commands = {name: ["--one", name, *asked] for name in given.names or PAGES}
    with tempfile.TemporaryDirectory() as folder:
        for name, found[name] in in_turn("gallery", commands, Path(folder), given.ready_s):
            said = "\n".join(rows_of(PAGES[name], found[name])) if "rows" in found[name] else found[name]["problem"]
            console.print(f"{name}\n{said}", markup=False)
            write_json(given.out and given.out / "gallery.json", found)
    if not given.small:
        _write(found)


def _in_this_process(given: argparse.Namespace) -> None:
    page = PAGES[given.one]
    if "cgpass" not in torch._dynamo.list_backends():  # graphpass is not installed
        torch._dynamo.register_backend(cgpass.backend, name="cgpass")
    take_turn(lambda wait: {**measure(page, given, wait), page.needs: version(page.needs)})


# -- the table ----------------------------------------------------------------------------------------------------


def _write(found: Mapping[str, Any]) -> None:
    """Replace the rows of the pages that were measured; a row with a link is the first one of its page."""
    index = FOLDER / "index.md"
    before, begin, rest = index.read_text(encoding="utf-8").partition("<!-- figures: begin -->\n")
    table, end, after = rest.partition("<!-- figures: end -->")
    head, *groups = re.split(r"^(?=\| \[)", table, flags=re.MULTILINE)
    rows = {re.findall(r"\((\w+)\.md\)", group)[0]: group for group in groups}
    for name, figures in found.items():
        if "rows" in figures:
            rows[name] = "".join(f"{row}\n" for row in rows_of(PAGES[name], figures))
    table = head + "".join(rows[name] for name in PAGES if name in rows)
    index.write_text(before + begin + table + end + after, encoding="utf-8")


def rows_of(page: GalleryPage, figures: Mapping[str, Any]) -> list[str]:
    """The rows of a page: first its link, then the machine with the versions, then the circumstances."""
    rows = []
    for row in figures["rows"]:
        rows.append((row["name"], {variant: f"{ms['median']:.3g}" for variant, ms in row["ms"].items()}))
        if row["host_us"]:
            rows.append(("… host time, µs", {v: f"{host['median']:.0f}" for v, host in row["host_us"].items()}))
    worst = {v: max(row["difference"][v] for row in figures["rows"]) for v in figures["rows"][0]["ms"]}
    difference = "tokens that differ" if page.kind == "text" else "difference from eager"
    rows.append((difference, {variant: f"{share:.1g}" for variant, share in worst.items()}))
    notes = [f"{figures['graphs']} graphs"] * ("graphs" in figures) + ["`dynamic=True`"] * bool(figures["dynamic"])
    notes += [f"{variant} was not measured: {_why(text)}" for variant, text in figures["failed"].items()]
    versions = f"torch {figures['torch']}, {page.needs} {figures[page.needs]}, {figures['device']}"
    firsts = [f"[{page.title}]({page.name}.md)", versions, "; ".join(notes), *[""] * len(rows)]
    return [
        f"| {first} | {name} | {' | '.join(cells.get(variant, '-') for variant in VARIANTS)} |"
        for first, (name, cells) in zip(firsts, rows, strict=False)
    ]


def _why(text: str) -> str:
    """The reason in an error's text; compilers wrap the error that ends them."""
    if "not ready within" in text:
        return "its compilation took longer than the run allowed"
    return text.splitlines()[0].partition(". ")[0]


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *PAGES], help="pages; all by default")
    parser.add_argument("--out", type=Path, help="a folder for gallery.json")
    parser.add_argument("--from", type=Path, dest="from_file", help="write the rows of this gallery.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ready-s", type=float, default=170, help="what compiles longer is left out")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--one", choices=list(PAGES), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
