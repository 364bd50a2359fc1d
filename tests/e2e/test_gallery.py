"""The pages of docs/gallery: short programs over stock models, whose results are those of the model by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphpass as gp
from tests.e2e.gallery import FOLDER, MAX_LINES, PAGES, GalleryPage, Namespace
from tests.e2e.greedy import continued
from tests.e2e.one_argument import difference, tensors_of
from tests.observed import calls_with_graph

#: Their rows in the index come with figures.
NOT_MEASURED = {"parakeet", "qwen3_vl"}


def check_calls(names: Namespace) -> None:
    model, fast, runtime = names["model"], names["fast"], gp.runtime_of(names["fast"])
    with torch.inference_mode():
        for batch in names["batches"]:
            calls = calls_with_graph(runtime)
            assert difference(tensors_of(fast(**batch)), tensors_of(model(**batch))) == ""
            assert calls_with_graph(runtime) == calls + 1, "a batch replays"
    assert runtime.stats().captured <= len(names["batches"]) * len(names.get("adapters", [model]))
    runtime.close()


def check_text(names: Namespace) -> None:
    lm, model = names["lm"], names["model"]
    replays = lm.stats().replays
    assert lm.generate(names["prompts"], max_new_tokens=names["new_tokens"]) == names["texts"]
    assert lm.stats().replays > replays
    lm.close()
    model.generation_config.eos_token_id = None  # as on the pages
    for which, (prompt, text) in enumerate(zip(names["prompts"], names["texts"], strict=True)):
        continued(model, prompt, names["new_tokens"]).check(text, which)


def check_images(names: Namespace) -> None:
    manager, model = names["manager"], names["model"]
    before = manager.get_cumulative_stats()
    assert (before.requests, before.misses) == (len(names["requests"]), 0)
    for request in names["requests"]:
        found = manager.execute(request)
        grids = request["image_grid_thw"]
        patches = request["pixel_values"].split(grids.prod(1).tolist())
        with torch.no_grad():
            expected = [model(p, g.view(1, 3).to(p.device)).pooler_output for p, g in zip(patches, grids, strict=True)]
        torch.testing.assert_close(list(found), expected, atol=2e-5, rtol=1e-4)
    assert manager.get_cumulative_stats().replays > before.replays
    manager.clear()


def check_attached(names: Namespace) -> None:
    attached, model = names["attached"], names["model"]
    stats = attached.manager.get_cumulative_stats()
    assert (stats.requests, stats.misses) == (len(names["requests"]), 0)
    attached.detach()
    for inputs, text in zip(names["requests"], names["texts"], strict=True):
        assert model.generate(**inputs, max_new_tokens=4, do_sample=False).tolist() == text


CHECKS: dict[str, Callable[[Namespace], Any]] = {
    "calls": check_calls,
    "text": check_text,
    "images": check_images,
    "attached": check_attached,
}


ROUTES = {
    "t5": pytest.mark.route("one argument"),
    "qwen3": pytest.mark.route("CausalLM"),
    "qwen3_vl": pytest.mark.route("attach"),
    "peft": pytest.mark.route("PEFT"),
}


def marked(page: GalleryPage) -> Any:
    marks = [pytest.mark.cuda] if page.needs_gpu else [ROUTES[page.name]] if page.name in ROUTES else []
    return pytest.param(page, id=page.name, marks=marks)


@pytest.mark.parametrize("page", [marked(page) for page in PAGES.values()])
def test_a_page_runs_and_its_results_are_eager_ones(page: GalleryPage) -> None:
    """In float32, with a small model."""
    pytest.importorskip(page.needs)
    torch.manual_seed(0)
    CHECKS[page.kind](page.run_small())


@pytest.mark.parametrize("page", PAGES.values(), ids=str)
def test_a_program_is_short(page: GalleryPage) -> None:
    assert len([line for line in page.program.splitlines() if line.strip()]) <= MAX_LINES


def test_each_page_is_tested_and_has_figures_in_the_index() -> None:
    """But for those that no GPU has measured yet."""
    assert {path.stem for path in FOLDER.glob("*.md")} == {*PAGES, "index"}
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(.+?)\]\((\w+)\.md\) \|", index, re.MULTILINE) == [
        (p.title, p.name) for p in PAGES.values() if p.name not in NOT_MEASURED
    ]
