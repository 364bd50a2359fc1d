"""Writes what the pages say from the code: ``python docs/generate.py``, or ``--check`` whether it is fresh.

The guarantees are a committed page, and so are the tables of names, options, commands, reasons and packages, each
between two marks of its page. Only a build writes the API in full and the tree of files, to ``docs/generated``.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

import typer  # noqa: E402

from graphpass import DispatchReason  # noqa: E402
from graphpass.capture import CapturePolicy  # noqa: E402
from graphpass.cli.app import app  # noqa: E402
from graphpass.options import Settings  # noqa: E402
from tests.mutations import GUARANTEES, Guarantee, guarantees, mutations  # noqa: E402

GENERATED = DOCS / "generated"
PUBLIC_MODULES = (
    "graphpass",
    "graphpass.regions",
    "graphpass.capture",
    "graphpass.dispatch",
    "graphpass.serving",
    "graphpass.encoder",
    "graphpass.encoder.adapters",
    "graphpass.text",
    "graphpass.offload",
    "graphpass.ranks",
    "graphpass.report",
    "graphpass.errors",
    "cgpass",
)
API_HEAD = """\
# API in full

Each name is imported from the module in the title of its section. Modules behind these may move.
"""
GUARANTEES_HEAD = """\
# What graphpass guarantees

A replay runs what was recorded, at the addresses of the capture. Each line below is a guarantee that prevents a wrong
answer. The lines of code that hold it are marked as guards; `tox run -e mutate` removes every guard, one at a time, and
requires its tests to fail. The tests stand below each section. `python docs/generate.py` writes this page from
`tests/mutations`.
"""
TREE_HEAD = """\
# The tree

Imports run downwards: `tool.importlinter` in `pyproject.toml` states the layers, and the lint run checks them. The
library never imports the backend. Each line is the first sentence of a file's docstring.
"""


def api_page() -> str:
    """A section for each public module, with all names that it exports."""
    sections = [f"## `{module}`\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n" for module in PUBLIC_MODULES]
    return "\n".join([API_HEAD, *sections])


def api_block() -> str:
    """For each public module the names that it exports, each with the first sentence of its docstring."""
    lines = list[str]()
    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        lines += [f"## `{name}`", "", "| name | is |", "|---|---|"]
        lines += [f"| {_named(module, public)} |" for public in sorted(module.__all__)]
        lines += [""]
    return "\n".join(lines).rstrip()


def _named(module: Any, public: str) -> str:
    """A name with its parameters, linked to its file, and what it is."""
    value = getattr(module, public)
    code = getattr(value, "__module__", None) if inspect.isclass(value) or inspect.isfunction(value) else None
    if code is None or not code.startswith(("graphpass", "cgpass")):
        shown = re.sub(r"[\w.]+\.(?=\w)", "", str(value)).replace("|", "\\|")
        return f"`{public}` | {'a tuple of rules' if isinstance(value, tuple) else f'`{shown}`'}"
    taken = f"({', '.join(inspect.signature(value).parameters)})" if inspect.isfunction(value) else ""
    file = Path(inspect.getsourcefile(value) or "").relative_to(ROOT)
    return f"[`{public}{taken}`](../{file}) | {_first_sentence(inspect.getdoc(value) or '')}"


def guarantees_page() -> str:
    """Each guarantee with its tests and the number of its guards, from the tables of ``tests/mutations``."""
    sections = tomllib.loads(GUARANTEES.read_text(encoding="utf-8"))
    lines = GUARANTEES_HEAD.splitlines()
    for section, group in itertools.groupby(guarantees(mutations()), key=lambda guarantee: guarantee.section):
        intro, entries = sections[section].get("intro"), list(group)
        lines += ["", f"## {section}", "", *([intro, ""] if intro else [])]
        lines += [f"{number}. {entry.text}" for number, entry in enumerate(entries, start=1)]
        lines += ["", f"<details><summary>Tests of: {section}</summary>", ""]
        lines += [f"{number}. {_tests(entry)}" for number, entry in enumerate(entries, start=1)]
        lines += ["", "</details>"]
    unseen = [f"- {item}" for item in sections["What it cannot see"]["items"]]
    return "\n".join([*lines, "", "## What it cannot see", "", *unseen]) + "\n"


def _tests(guarantee: Guarantee) -> str:
    """The number of its guards, and the files of its tests."""
    files = dict.fromkeys(test.partition("::")[0] for test in guarantee.tests)
    guards = [f"{guarantee.num_guards} guard{'s' * (guarantee.num_guards != 1)}"] * bool(guarantee.num_guards)
    return ", ".join([*guards, *(f"[{Path(file).stem}](../{file})" for file in files)])


def tree_page() -> str:
    """Every file of the product with the first sentence of its docstring."""
    lines = TREE_HEAD.splitlines()
    for folder, files in _folders():
        lines += ["", f"## {folder}", ""]
        lines += [f"- `{file.name}`: {_first_sentence(_docstring_of(file))}" for file in files]
    return "\n".join(lines) + "\n"


def _folders() -> Iterator[tuple[str, list[Path]]]:
    for source in ("graphpass", "backends/cgpass"):
        files = sorted((ROOT / source).rglob("*.py"))
        for folder in sorted({file.parent for file in files}):
            yield str(folder.relative_to(ROOT)), [file for file in files if file.parent == folder]


def _docstring_of(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def _first_sentence(text: str) -> str:
    sentence = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", sentence).replace("``", "`")


def options_block() -> str:
    """The options of the backend: names and defaults of the dataclasses, with what is said of each field there."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for owner, field in _options():
        default = {None: "", False: "off", (): "", dataclasses.MISSING: ""}.get(field.default, f"`{field.default}`")
        rows.append(f"| `{field.name}` | {default} | {_description(owner, field.name)} |")
    return "\n".join(rows)


def _options() -> Iterator[tuple[type, dataclasses.Field[Any]]]:
    """Each option with the dataclass that has it; ``policy`` stands for the options of another one."""
    for field in dataclasses.fields(Settings):
        if field.name == "policy":
            yield from ((CapturePolicy, option) for option in dataclasses.fields(CapturePolicy))
        else:
            yield Settings, field


def _description(owner: type, name: str) -> str:
    """The ``#:`` comment of a field, in Markdown."""
    lines = inspect.getsource(owner).splitlines()
    at = next(number for number, line in enumerate(lines) if re.match(rf"    {name}: ", line))
    first = at
    while lines[first - 1].startswith("    #: "):
        first -= 1
    said = [line.strip().removeprefix("#: ") for line in lines[first:at]] or [lines[at].partition("#: ")[2]]
    return " ".join(said).replace("``", "`")


def commands_block() -> str:
    """Each command with its help, and the options of all commands."""
    group: Any = typer.main.get_command(app)
    lines = [group.help.partition("\n\n")[2]]
    options: dict[tuple[str, str], list[str]] = {}
    for name, command in group.commands.items():
        text, _, examples = command.help.partition("\n\n\b\nExamples:\n")
        lines += ["", f"## {name.capitalize()}", "", text, "", "```text"]
        lines += [*(line.strip() for line in examples.splitlines()), "```"]
        for given in command.params:
            if given.name != "help":
                options.setdefault(_option(given), []).append(f"`{name}`")
    lines += ["", "## Arguments and options", "", "| | of | meaning |", "|---|---|---|"]
    every = [f"`{name}`" for name in group.commands]
    for (usage, meaning), names in options.items():
        lines.append(f"| `{usage}` | {'all' if names == every else ', '.join(names)} | {meaning} |")
    return "\n".join(lines)


def _option(given: Any) -> tuple[str, str]:
    """How an argument or option is written, and what it means."""
    if given.param_type_name == "argument":
        return given.metavar, given.help
    usage = "/".join([*given.opts, *given.secondary_opts])
    value = "" if given.is_flag else f" {given.metavar or 'VALUE'}"
    default = given.default if isinstance(given.default, int | str) and not given.is_flag else None
    return usage + value, given.help + (f" By default {default}." if default is not None else "")


def reasons_block() -> str:
    """Each reason of a dispatcher's decision."""
    rows = [f"| `{reason.name}` | {reason.explanation} |" for reason in DispatchReason]
    return "\n".join(["| reason | meaning |", "|---|---|", *rows])


def packages_block() -> str:
    """Each package with the first sentence of its docstring."""
    rows = [
        f"| `{folder}` | {_first_sentence(_docstring_of(ROOT / folder / '__init__.py'))} |" for folder, _ in _folders()
    ]
    return "\n".join(["| package | holds |", "|---|---|", *rows])


BLOCKS: Mapping[str, Callable[[], str]] = {
    "api.md": api_block,
    "architecture.md": packages_block,
    "command_line.md": commands_block,
    "concepts/keys.md": reasons_block,
    "options.md": options_block,
}
BEGIN, END = "<!-- made by docs/generate.py: begin -->", "<!-- made by docs/generate.py: end -->"
NOT_COMMITTED: Mapping[str, Callable[[], str]] = {"generated/api.md": api_page, "generated/tree.md": tree_page}


def committed() -> Iterator[tuple[Path, str]]:
    """Each committed page, as the code says it."""
    yield DOCS / "guarantees.md", guarantees_page()
    for name, block in BLOCKS.items():
        before, _, rest = (DOCS / name).read_text(encoding="utf-8").partition(BEGIN)
        yield DOCS / name, f"{before}{BEGIN}\n\n{block()}\n\n{END}{rest.partition(END)[2]}"


def write_not_committed() -> None:
    """Write the pages for a build; one that has not changed is left alone."""
    GENERATED.mkdir(exist_ok=True)
    for name, page in NOT_COMMITTED.items():
        file, text = DOCS / name, page()
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        stale = [path.name for path, text in committed() if path.read_text(encoding="utf-8") != text]
        sys.exit(f"stale: {', '.join(stale)}; write them: python docs/generate.py" if stale else 0)
    for path, text in committed():
        path.write_text(text, encoding="utf-8")
    write_not_committed()
