"""Pages of reports in a browser: hostile names are text, nothing is requested, and dark follows the system."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from graphpass.report import Report
from tests.pages import Page
from tests.unit.report.models import HOSTILE, hostile_figures

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
OWN_HOSTS = ("google.com", "googleapis.com", "gvt1.com")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--enable-logging=stderr",
    "--window-size=400,300",
]
CONTROL = """<!doctype html><title>control</title><body>
<img src="http://127.0.0.1:9/x.png" alt=""><script>console.error("an error")</script>"""


@dataclass(frozen=True, slots=True)
class Visit:
    """What a browser made of a page."""

    dom: Page  #: the document after it was loaded
    console: list[str]  #: the lines of its console
    requests: set[str]  #: what the page asked the network for, without what the browser asks for itself
    corner: tuple[int, ...]  #: the colour of the pixel in its upper left corner


def visited(page: str, folder: Path, *, is_dark: bool) -> Visit:
    from PIL import Image

    assert BROWSER is not None
    file, log, picture = folder / "page.html", folder / "net.json", folder / "page.png"
    file.write_text(page, encoding="utf-8")
    command = [
        *(BROWSER, *QUIET),
        f"--user-data-dir={folder / 'profile'}",
        f"--log-net-log={log}",
        f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        f"--screenshot={picture}",
        "--dump-dom",
        file.as_uri(),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    urls = {str(event["params"]["url"]) for event in events if "url" in event.get("params", {})}
    hosts = {url: url.partition("://")[2].partition("/")[0] for url in urls if url.startswith("http")}
    with Image.open(picture) as image:
        corner = image.convert("RGB").getpixel((2, 2))
    assert isinstance(corner, tuple)
    return Visit(
        Page(finished.stdout),
        [line for line in finished.stderr.splitlines() if "CONSOLE" in line],
        {url for url, host in hosts.items() if not host.endswith(OWN_HOSTS)},
        corner,
    )


def test_hostile_names_are_text_on_a_page() -> None:
    page = Page(Report(hostile_figures()).to_html())
    assert "script" not in page.tags
    assert page.handlers == []
    assert page.text.count(HOSTILE) >= 30
    assert page.tags.count("table") == 10
    links = [reference.removeprefix("#") for reference in page.references if reference != "data:,"]
    assert len(links) == 4, "three regions and the end of the graph"
    assert set(links) <= set(page.ids)


def test_tables_can_be_scrolled_by_keyboard() -> None:
    text = Report(hostile_figures()).to_html()
    assert text.count('<div class="scroll" tabindex="0" role="region" aria-label=') == text.count("<table>")
    assert ":focus-visible" in text


@in_browser
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_a_page_in_a_browser(is_dark: bool, tmp_path: Path) -> None:
    visit = visited(Report(hostile_figures()).to_html(), tmp_path, is_dark=is_dark)
    assert visit.dom.tags.count("table") == 10
    assert visit.dom.tags.count("svg") == 3
    assert visit.console == []
    assert visit.requests == set()
    assert visit.dom.handlers == []
    assert (max(visit.corner) < 64) if is_dark else (min(visit.corner) > 192), visit.corner


@in_browser
def test_the_visit_sees_requests_and_errors(tmp_path: Path) -> None:
    visit = visited(CONTROL, tmp_path, is_dark=False)
    assert visit.requests == {"http://127.0.0.1:9/x.png"}
    assert len(visit.console) == 1
