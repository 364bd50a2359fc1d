"""Rules of the house that no linter knows: public names, where private torch may stand, what a file may hold."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "graphpass").rglob("*.py"), *(ROOT / "backends" / "cgpass").rglob("*.py")])
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 60
MAX_TEST_LINES = 500
# Public API of named tuples in spite of the underscore.
TUPLE_METHODS = {"_asdict", "_fields", "_make", "_replace"}
# Torch's own, also where a class of ours has a field of that name.
TORCH_ATTRIBUTES = {"_buffers", "_modules", "_parameters", "_version"}

PUBLIC_TEXT = """
graphpass: AttentionMetadataBuilder AttentionSupport Batch BatchDescriptor CUDAGraphMode CUDAGraphWrapper
    CudaGraphManager CudagraphDispatcher Dispatch DispatchReason EncoderCudaGraphManager EncoderOptions ForwardContext
    GraphRuntime GraphedModel GraphpassError InputSpec LoraKeys get_forward_context graphed
    is_forward_context_available partition plan_sizes precapture resolve_mode rows_apart runtime_of
    set_forward_context zero_padding
graphpass.capture: CallableRecord CapturePolicy CaptureScope CompileSeconds Counts ReachedCall
    ReachedCallable RegionId RegionRecord RegionUse RuntimeStats SizeRecord
graphpass.dispatch: SizePlan
graphpass.encoder: AttachedEncoder EncoderAxis EncoderCudaGraphConfig EncoderGraphKey EncoderItemSpec EncoderStats
    ItemShares PackedBatch PackingCosts SupportsEncoderCompilation SupportsEncoderCudaGraph SupportsEncoderExamples
    SupportsEncoderKernels attach balance_items generate_budgets pack_items smallest_fitting_budget
graphpass.encoder.adapters: TowerAdapter
    adapter_for
graphpass.serving: CapturedGraph CapturedGroup ForwardHooks GroupEstimate ManagerStats MemoryEstimate MemoryGrowth
    Traffic
graphpass.errors: AgreementError CaptureError CommandError ContextError DeviceError DispatchError EncoderConfigError
    MismatchError OffloadError OptionError OutOfPagesError PartitionError PoolBusyError ShapeError StaticInputError
graphpass.offload: WeightOffloader
graphpass.ranks: DataParallelAgreement
graphpass.regions: AtenGraph DEFAULT_RULES GraphInput OpCall PaddedValue PaddingFinding PaddingProof PaddingReason
    PaddingRule Partition Region SplitReason SplitRule Verdict padding_of register_padding_rule splits_at
graphpass.report: Costs CountedReason KernelUse KeyUse Problem Reason Report ReportFigures SizeTraffic Table
graphpass.text: AdapterBatch CausalLM CausalLMConfig Drafter Generation GenerationStats LayerMask LoraAdapters
    LoraModel NewToken NgramDrafter PageAllocator PagedAttention PagedKVCache PagedLayer PagedRequests PositionScale
    Request
cgpass: backend explain options
"""
PUBLIC_NAMES = {
    package: names.split() for package, names in re.findall(r"^([\w.]+): (.+(?:\n    .+)*)", PUBLIC_TEXT, re.MULTILINE)
}

# A package's front, the class that runs it, its options.
SHARED_FILE_NAMES = {"__init__", "manager", "options"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_in_compat(path: Path) -> bool:
    return path.parent == ROOT / "graphpass" / "compat"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def torch_aliases(tree: ast.Module) -> dict[str, str]:
    """Local name → dotted torch name, for everything the module imports from torch."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def imported_torch_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names of all torch modules and members that import statements name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The dotted torch name that an attribute chain spells, or None when it starts elsewhere."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in aliases:
        return ".".join([aliases[node.id], *reversed(parts)])
    return None


def torch_names(tree: ast.Module) -> set[str]:
    """Every dotted torch name that a module imports or reaches through an attribute chain."""
    aliases = torch_aliases(tree)
    reached = {dotted(node, aliases) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {*imported_torch_names(tree), *(name for name in reached if name is not None)}


def is_private(name: str) -> bool:
    """Whether a dotted torch name has an underscored part. Operators are public API whatever their name."""
    if name.startswith("torch.ops."):
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_attributes(tree: ast.Module) -> set[str]:
    """Names with one leading underscore that the module reaches as attributes, of whatever object."""
    reached = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in reached if re.match(r"_(?!_)", name)}


def attributes_of_torch(tree: ast.Module) -> set[str]:
    """The names of torch's private attributes that the module reaches otherwise than as ``self``'s own."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in TORCH_ATTRIBUTES
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }


def too_long(source: Path) -> dict[str, int]:
    """The file and the functions that exceed their limits, by ``path`` or ``path::name``, with their lines."""
    text = source.read_text(encoding="utf-8")
    found = {name_of(source): len(text.splitlines())} if len(text.splitlines()) > MAX_FILE_LINES else {}
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found[f"{name_of(source)}::{node.name}"] = lines
    return found


def names_made(tree: ast.Module) -> Iterator[str]:
    """Names that the module defines: functions, classes, variables, fields, attributes it assigns, slots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names_are_the_list(module: str) -> None:
    assert sorted(import_module(module).__all__) == PUBLIC_NAMES[module]


def test_a_public_name_has_one_home() -> None:
    names = [name for names in PUBLIC_NAMES.values() for name in names]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names_exist_and_say_what_they_are(module: str) -> None:
    public = {name: getattr(import_module(module), name) for name in PUBLIC_NAMES[module]}
    described = {name: value for name, value in public.items() if inspect.isclass(value) or inspect.isfunction(value)}
    undocumented = [name for name, value in described.items() if not (value.__doc__ or "").strip()]
    assert undocumented == []


def test_backend_is_registered_by_the_distribution() -> None:
    try:
        points = distribution("graphpass").entry_points
    except PackageNotFoundError:
        pytest.skip("graphpass is not installed here")
    found = {point.name: point.value for point in points if point.group == "torch_dynamo_backends"}
    assert found == {"cgpass": "cgpass:backend"}


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_private_torch_is_named_in_compat_only(source: Path) -> None:
    if is_in_compat(source):
        pytest.skip("the one place for it")
    assert sorted(filter(is_private, torch_names(parsed(source)))) == []


def test_private_attributes_are_our_own() -> None:
    """What starts with an underscore and is defined nowhere in graphpass belongs to torch: `tensor._version`, say."""
    trees = {name_of(source): parsed(source) for source in SOURCES if not is_in_compat(source)}
    own = {name for tree in trees.values() for name in names_made(tree)}
    foreign = {
        name: sorted((private_attributes(tree) - own - TUPLE_METHODS) | attributes_of_torch(tree))
        for name, tree in trees.items()
    }
    assert {name: found for name, found in foreign.items() if found} == {}


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("import torch\ntorch.nn.Module", []),
        ("import torch\ntorch._C.Graph", ["torch._C", "torch._C.Graph"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch\ntorch._foreach_copy_([], [])", ["torch._foreach_copy_"]),
        ("from torch._inductor import config", ["torch._inductor.config"]),
        ("from torch import fx\nfx._pytree", ["torch.fx._pytree"]),
        ("import torch.fx as graphs\ngraphs._x.y", ["torch.fx._x", "torch.fx._x.y"]),
        ("import torch\ntorch.__version__", []),
        ("import torch\ntorch.ops.aten._unsafe_view", []),
    ],
)
def test_the_scan_sees_private_names(text: str, private: list[str]) -> None:
    assert sorted(filter(is_private, torch_names(ast.parse(text)))) == private


@pytest.mark.parametrize(("layer", "unknown"), [("capture", "torch.fx"), ("regions", "torch.cuda")])
def test_a_layer_does_not_know(layer: str, unknown: str) -> None:
    knowing = {
        name_of(source)
        for source in (ROOT / "graphpass" / layer).rglob("*.py")
        for name in torch_names(parsed(source))
        if f"{name}.".startswith(f"{unknown}.")
    }
    assert knowing == set()


def reads_environment(tree: ast.Module) -> bool:
    """Whether ``environ`` or ``getenv`` is named, as an attribute or by import."""
    reached = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return bool({"environ", "getenv"} & (reached | imported))


def test_environment_is_read_in_one_file() -> None:
    readers = {name_of(source) for source in SOURCES if reads_environment(parsed(source))}
    assert readers <= {"graphpass/environment.py"}


@pytest.mark.parametrize("source", [*SOURCES, *TESTS], ids=name_of)
def test_a_file_is_finished(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    # Spelt apart, so that this file does not find itself.
    assert re.findall(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b", text) == []
    assert len(text.splitlines()) < (MAX_TEST_LINES if source in TESTS else MAX_FILE_LINES)


def test_files_and_functions_are_short() -> None:
    assert {name: lines for source in SOURCES for name, lines in too_long(source).items()} == {}


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_a_file_has_the_form_of_the_house(source: Path) -> None:
    """`__all__` in package fronts, fields described where they stand, sections in docstrings of what users call."""
    tree = parsed(source)
    is_front = source.name == "__init__.py" or source.parent.name + "." + source.stem in PUBLIC_NAMES
    assigned = {ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)}
    assert is_front or "__all__" not in assigned
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
            described = (ast.get_docstring(node) or "").partition("Attributes:\n")[2]
            assert fields.isdisjoint(re.findall(r"^    (\w+):", described, re.MULTILINE)), node.name
        elif isinstance(node, ast.FunctionDef) and re.match(r"_(?!_)", node.name):
            assert not re.search(r"^(Args|Returns|Raises):$", ast.get_docstring(node) or "", re.MULTILINE), node.name


def test_no_two_files_have_one_name() -> None:
    names = Counter(source.stem for source in SOURCES)
    assert {name for name, count in names.items() if count > 1} - SHARED_FILE_NAMES == set()


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for source in SOURCES:
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(source))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_each_note_is_cited_by_the_code_and_each_citation_has_a_note() -> None:
    notes = set(re.findall(r"^## Note \[(.+)\]$", (ROOT / "docs/design/notes.md").read_text(encoding="utf-8"), re.M))
    cited = {name for source in SOURCES for name in re.findall(r"Note\s+\[(.+?)\]", source.read_text(encoding="utf-8"))}
    assert notes == cited
