"""Sphinx settings: Markdown pages, API pages from docstrings, every unresolved graphpass name an error."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends"), str(ROOT / "docs")]

import generate  # noqa: E402

if TYPE_CHECKING:
    from docutils.nodes import Element, TextElement
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "graphpass"
author = "the graphpass authors"
copyright = "2026, the graphpass authors"  # noqa: A001
try:
    release = metadata.version("graphpass")
except metadata.PackageNotFoundError:
    release = "checkout"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
html_title = f"graphpass {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Pages link CONTRIBUTING and other Markdown outside of this folder; tests/test_documentation.py follows every link.
suppress_warnings = ["myst.xref_missing"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False

# Names of graphpass and cgpass have to resolve; other projects' pages are not fetched, so theirs are not looked up.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"^(?!graphpass\.|cgpass\.).*")]

PUBLIC_HOMES = {name: module for module in generate.PUBLIC_MODULES for name in importlib.import_module(module).__all__}


def find_public_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: TextElement) -> Element | None:
    """Resolve ``graphpass.<module>.Name`` to the module that users import it from, where the API page documents it.

    A name that users do not import, as in the signature of a protocol, stays text if it exists.
    """
    module, _, name = str(node.get("reftarget", "")).rpartition(".")
    if node.get("refdomain") != "py":
        return None
    if name in PUBLIC_HOMES:
        public = f"{PUBLIC_HOMES[name]}.{name}"
        return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)
    behind = sys.modules.get(module)
    return contnode if hasattr(behind, name) else None


def describe_field(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from reading a field's description up to its first colon as a type."""
    if what in ("attribute", "property") and lines and ":" in lines[0]:
        lines[0] = f": {lines[0]}"


def setup(app: Sphinx) -> None:
    """Write the generated pages; connect the resolver, and what describes fields before napoleon (priority 500)."""
    generate.write_not_committed()
    app.connect("missing-reference", find_public_name)
    app.connect("autodoc-process-docstring", describe_field, priority=400)
