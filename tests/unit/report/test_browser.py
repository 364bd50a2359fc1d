"""Pages of reports in a browser: hostile names are text, and nothing is requested."""

from __future__ import annotations

import json
import re
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


def visited(page: str, folder: Path) -> Visit:
    assert BROWSER is not None
    file, log = folder / "page.html", folder / "net.json"
    file.write_text(page, encoding="utf-8")
    command = [
        *(BROWSER, *QUIET),
        f"--user-data-dir={folder / 'profile'}",
        f"--log-net-log={log}",
        "--dump-dom",
        file.as_uri(),
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    urls = {str(event["params"]["url"]) for event in events if "url" in event.get("params", {})}
    hosts = {url: url.partition("://")[2].partition("/")[0] for url in urls if url.startswith("http")}
    return Visit(
        Page(finished.stdout),
        [line for line in finished.stderr.splitlines() if "CONSOLE" in line],
        {url for url, host in hosts.items() if not host.endswith(OWN_HOSTS)},
    )


def unfolded(text: str) -> str:
    """Text without spaces and rules of tables: a name that is folded within a cell of one column is whole again."""
    return re.sub(r"[\s│]", "", text)


def test_hostile_names_are_text_on_a_page() -> None:
    page = Page(Report(hostile_figures()).to_html())
    assert set(page.tags) == {"html", "head", "meta", "style", "body", "pre", "code", "span"}
    assert page.handlers == page.references == []
    assert unfolded(page.text).count(unfolded(HOSTILE)) >= 10


@in_browser
def test_a_page_in_a_browser(tmp_path: Path) -> None:
    visit = visited(Report(hostile_figures()).to_html(), tmp_path)
    assert "script" not in visit.dom.tags
    assert visit.console == []
    assert visit.requests == set()
    assert visit.dom.handlers == []


@in_browser
def test_the_visit_sees_requests_and_errors(tmp_path: Path) -> None:
    visit = visited(CONTROL, tmp_path)
    assert visit.requests == {"http://127.0.0.1:9/x.png"}
    assert len(visit.console) == 1
