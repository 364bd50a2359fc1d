"""What must be equal in the process that saves and in the one that loads, as text that is the same in every process.

A part is a name and a text. The first part that differs is the reason why a saved start is not used.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.util
import inspect
import platform
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import sympy
import torch

from graphpass.compat import operators, processgroups, saving
from graphpass.compat.driver import driver_version
from graphpass.compat.subclasses import Rebuild, is_wrapper, rebuild_of
from graphpass.ledger import Reason

Parts: TypeAlias = dict[str, str]
"""{what it is: its text}."""

_NUMBERS_AND_TEXT = (type(None), type(Ellipsis), type(NotImplemented), bool, int, float, complex, str, bytes)
PLAIN = (*_NUMBERS_AND_TEXT, torch.dtype, torch.device, torch.layout, torch.memory_format, Path)
_WITH_SUBCLASSES = (int, float, complex, str, bytes)
_CONTAINERS = (tuple, list, dict, set, frozenset)
_MOST_BYTES = 1 << 30
_WORDS_AT_ONCE = 1 << 21
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))
"""(bits to shift, factor) of each step."""
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)
_LASTING = (*PLAIN, tuple, frozenset, enum.Enum, *_FUNCTIONS)
WITHOUT_METHODS = (*PLAIN, *_CONTAINERS, *_FUNCTIONS, torch.Tensor, torch.nn.Module)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def difference(saved: Mapping[str, str], now: Mapping[str, str]) -> Reason | None:
    """The first part that differs, as a reason; None if none does."""
    for name in dict.fromkeys((*saved, *now)):
        if saved.get(name) != now.get(name):
            was, is_now = (_short(parts.get(name, "absent")) for parts in (saved, now))
            return Reason(f"{name} differs: {was} when it was saved, {is_now} now", is_expected=True)
    return None


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:90]}... ({digest(text)[:8]})"


def digest(*values: Any) -> str:
    """A digest of values that is the same in every process."""
    try:
        return hashlib.sha256("\n".join(map(text_of, values)).encode()).hexdigest()
    except RecursionError as error:
        raise saving.CannotSaveError("an object contains itself") from error


def text_of(value: Any) -> str:
    """All of a value as text."""
    for kinds, text in _TEXTS:
        if isinstance(value, kinds):
            return text(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{_named(type(value))} {[text_of(getattr(value, f.name)) for f in dataclasses.fields(value)]}"
    if (origin := typing.get_origin(value)) is not None:
        return f"{_named(type(value))} {text_of((origin, typing.get_args(value)))}"  # guard: saved_types
    if callable(value) and (isinstance(value, type) or hasattr(value, "__name__")):
        return code_of(value)
    if (placed := processgroups.text_of(value)) is not None:  # guard: saved_placements
        return f"{_named(type(value))} {placed}"
    raise saving.CannotSaveError(f"{type(value).__name__} objects are compared by identity")


def _plain_text(value: Any) -> str:
    base = next((base for base in _WITH_SUBCLASSES if isinstance(value, base) and type(value) is not base), None)
    if base is None or isinstance(value, bool):
        return f"{type(value).__name__} {value!r}"
    return f"{_named(type(value))} {base.__repr__(value)}{_state(value)}"  # of a subclass, which may have another text


def _state(value: Any) -> str:
    held = {**getattr(value, "__dict__", {}), "default_factory": getattr(value, "default_factory", None)}
    found = {name: item for name, item in held.items() if item is not None}
    return f" {text_of(found)}" if found and type(value).__module__ != "builtins" else ""


def _named(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', getattr(kind, '__name__', '?'))}"


def _listed(items: Iterable[Any], container: Any) -> str:
    return f"{_named(type(container))} {list(items)}{_state(container)}"


def _text_of_code(code: types.CodeType) -> str:
    return f"code of {code.co_qualname} #{hashlib.sha256(_code_text(code).encode()).hexdigest()[:16]}"


_TEXTS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (enum.Enum, lambda member: f"{_named(type(member))}.{member.name} = {brief(member.value)}"),
    (PLAIN, _plain_text),
    (sympy.Basic, lambda expression: str(sympy.srepr(expression))),
    ((set, frozenset), lambda held: _listed(sorted(map(text_of, held)), held)),
    (Mapping, lambda held: _listed(((text_of(key), text_of(item)) for key, item in held.items()), held)),
    ((tuple, list), lambda held: _listed(map(text_of, held), held)),
    ((slice, range), lambda cut: f"{type(cut).__name__} {text_of((cut.start, cut.stop, cut.step))}"),
    ((torch.finfo, torch.iinfo), lambda limits: f"{type(limits).__name__} {limits.dtype}"),
    (types.ModuleType, lambda module: f"module {module.__name__}"),
    (types.CodeType, _text_of_code),
    (types.GetSetDescriptorType, lambda held: f"{_named(held.__objclass__)}.{held.__name__}"),
    (property, lambda held: f"property {code_of(held.fget)}"),
    (re.Pattern, lambda pattern: f"pattern {text_of((pattern.pattern, pattern.flags))}"),
    (functools.partial, lambda call: f"partial {text_of((call.func, call.args, call.keywords))}"),
    ((operators.OpOverload, operators.OpOverloadPacket), lambda op: f"{op} {getattr(op, '_schema', '')}"),
)
"""(kinds of values, their text)"""


def contents_of(values: Iterable[Any]) -> str | None:
    """A digest of tensors and plain values; None if a value has no such text, or over 1 GiB would be read on the host.

    Of a tensor on a GPU, 64 bits are computed there.
    """
    found, num_bytes, hashed = list(values), 0, hashlib.sha256()
    for value in found:
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and (value.layout is not torch.strided or value.is_quantized):
            return None
        num_bytes += value.nbytes if is_tensor and not value.is_cuda else 0
    if num_bytes > _MOST_BYTES:
        return None
    sums = []
    for value in found:
        try:
            hashed.update((brief(value) if isinstance(value, torch.Tensor) else text_of(value)).encode())
        except saving.CannotSaveError:
            return None
        if not isinstance(value, torch.Tensor):
            continue
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        if plain.is_cuda:
            sums.append(mixed_sum(plain))
        else:
            hashed.update(plain.numpy().data)
    for each in sums:
        hashed.update(str(each.item()).encode())
    return hashed.hexdigest()


def mixed_sum(plain: torch.Tensor) -> torch.Tensor:
    """64 bits that depend on each byte of a vector and its place: the sum of words of 8 bytes, mixed with the index.

    The mixing is that of splitmix64, a bijection; on the device of ``plain``.
    """
    if len(plain) % 8 or plain.storage_offset() % 8:
        plain = torch.nn.functional.pad(plain, (0, -len(plain) % 8))
    total = torch.zeros((), dtype=torch.int64, device=plain.device)
    for number, words in enumerate(plain.view(torch.int64).split(_WORDS_AT_ONCE)):
        index = torch.arange(1, len(words) + 1, device=plain.device).add_(number * _WORDS_AT_ONCE)
        mixed = index.mul_(_GOLDEN).add_(words)
        for shift, factor in _SPLITMIX:
            mixed.bitwise_xor_((mixed >> shift) & ((1 << 64 - shift) - 1)).mul_(factor)  # a shift without the sign
        total += mixed.sum()
    return total


def code_of(function: Any) -> str:
    """A function, method, class or operator by name, and for Python code a digest of it."""
    if function is None:
        return "none"
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    owner = getattr(function, "__self__", None)
    bound = "" if owner is None or inspect.ismodule(owner) else f" of {brief(owner)}"
    if not isinstance(code, types.CodeType):  # the class of functions has a descriptor
        return _named(function) + bound
    held = [
        [brief(value) for value in contents_of_cell(cell) if value is not inner] for cell in inner.__closure__ or ()
    ]
    defaults = [*map(brief, inner.__defaults__ or ()), brief(inner.__kwdefaults__)]
    shown = hashlib.sha256(f"{_code_text(code)} {held} {defaults}".encode()).hexdigest()
    return f"{_named(inner)} #{shown[:16]}{bound}"


def contents_of_cell(cell: types.CellType) -> list[Any]:
    """What a variable of an enclosing function holds; nothing before it is set."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _code_text(code: types.CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, types.CodeType) else _constant_text(c) for c in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_flags, constants))


def _constant_text(value: Any) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def brief(value: Any) -> str:
    """A value as far as a trace reads it at once: scalars, code, layouts of tensors, items or keys, classes."""
    if isinstance(value, torch.Tensor):
        place = (tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
        if is_wrapper(value):  # guard: saved_wrappers
            parts = list[Any]()
            return f"{text_of(rebuild_of(value, parts))} {place} {list(map(brief, parts))}"
        return f"{type(value).__name__} {place}" if value.layout is torch.strided else f"{value.layout} {value.dtype}"
    if isinstance(value, _CONTAINERS):
        items = items_of(value)
        ordered = sorted(items) if isinstance(value, (set, frozenset)) else items
        return f"{_named(type(value))} of {len(value)} {ordered}"
    try:
        if isinstance(value, Mapping):  # such as the environment, whose values may be secrets
            return f"{_named(type(value))} #{digest(*value.items())[:16]}"
        return text_of(value)
    except (saving.CannotSaveError, RecursionError):
        return f"a {_named(type(value))}"


def items_of(container: Iterable[Any]) -> list[str]:
    """The items of a container, of a mapping its keys, in their order; of those that can change, the classes."""
    return [brief(item) if isinstance(item, _LASTING) else _named(type(item)) for item in container]


# -- parts ----------------------------------------------------------------------------------------------------------


def environment(devices: Iterable[torch.device]) -> Parts:
    """Versions, and the hardware of the devices."""
    cuda = next((device for device in devices if device.type == "cuda"), None)
    parts = {
        "Python": f"{sys.version} {platform.python_build()} optimized {sys.flags.optimize}",  # guard: saved_python
        "torch": f"{torch.__version__} {torch.version.git_version}",  # guard: saved_torch
        "graphpass": _files_of("graphpass", "cgpass"),  # guard: saved_graphpass
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",  # guard: saved_processor
        "rank": _rank(),  # guard: saved_rank
    }
    if cuda is not None:
        name, capability = torch.cuda.get_device_name(cuda), torch.cuda.get_device_capability(cuda)
        parts["GPU"] = f"{name} {capability}"  # guard: saved_gpu
        parts |= _cuda()
    return parts


def _rank() -> str:
    """This process's place in its group, which a trace reads without a guard."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return "no process group"
    return f"{distributed.get_rank()} of {distributed.get_world_size()}, {distributed.get_backend()}"


def _cuda() -> Parts:
    triton = importlib.import_module("triton")
    return {"CUDA": f"{torch.version.cuda}, driver {driver_version()}", "Triton": str(triton.__version__)}


_IMPLEMENTATION = "the implementation of "
_PACKAGE = "the package of a tensor that wraps others: "


def implementations(of: Iterable[Any]) -> Parts:
    """The Python code behind each custom operator, or class that wraps tensors, among targets or saved parts."""
    of = list(of)
    packages = {kind.__module__.partition(".")[0] for op in of if isinstance(op, Rebuild) for kind in op.kinds()}
    packages |= {str(op).removeprefix(_PACKAGE) for op in of if str(op).startswith(_PACKAGE)}
    names = [
        str(op).removeprefix(_IMPLEMENTATION)
        for op in of
        if isinstance(op, (operators.OpOverload, operators.OpOverloadPacket)) or str(op).startswith(_IMPLEMENTATION)
    ]
    found = {name: saving.implementations_of(name) for name in sorted(set(names))}
    hidden = next((name for name, code in found.items() if code is None), None)
    if hidden is not None:  # guard: saved_composites
        raise saving.CannotSaveError(f"the operator {hidden} is made of others by code that torch does not hand out")
    wrappers = {f"{_PACKAGE}{name}": _files_of(name) for name in packages - {"torch"}}  # guard: saved_wrapper_code
    return {f"{_IMPLEMENTATION}{name}": reached(code) for name, code in found.items() if code} | wrappers


def reached(functions: Iterable[Any]) -> str:
    """A digest of functions and of the Python code and values that they reach by name, but not through objects.

    What is of torch or the standard library is of their versions.
    """
    found: dict[int, Any] = {}
    texts: list[str] = []
    todo = list(functions)
    while todo:
        function = inspect.unwrap(todo.pop())
        code = getattr(function, "__code__", None)
        if id(function) in found or code is None:
            continue
        found[id(function)] = function
        held = [("", value) for cell in function.__closure__ or () for value in contents_of_cell(cell)]
        if not _is_own(function):  # a wrapper of torch: its cells hold the user's code, and flags of this process
            todo += [item for _, value in held for item in _code_in(value)]
            continue
        texts.append(code_of(function))
        names = names_in(code)
        held += [(n, function.__globals__[n]) for n in names if n in function.__globals__]
        held += [(n, vars(value)[n]) for _, value in held if is_own_module(value) for n in names if n in vars(value)]
        for name, value in held:
            inner = getattr(value, "fn", value)  # of a Triton kernel, its function
            todo += [item for item in _code_in(inner) if _is_own(item)]
            texts.append(f"{name} {brief(value)}")
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]


def names_in(code: types.CodeType) -> dict[str, None]:
    """The names in code, and the texts, which may be names."""
    found, todo = dict.fromkeys(code.co_names), list(code.co_consts)
    for value in todo:  # which grows
        if isinstance(value, types.CodeType):
            found |= names_in(value)
        elif isinstance(value, (tuple, frozenset)):
            todo += value
        elif isinstance(value, str) and value.isidentifier():
            found[value] = None
    return found


def _is_own(value: Any) -> bool:
    """Whether code or a module is neither torch's nor of the standard library."""
    return not is_of_torch(value) and _package(value) not in sys.stdlib_module_names


def is_of_torch(value: Any) -> bool:
    """Whether code or a module is torch's or of what torch builds on."""
    return _package(value) in ("torch", "triton", "numpy", "sympy")


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None) or getattr(value, "__name__", "")).partition(".")[0]


def is_own_module(value: Any) -> bool:
    """Whether a value is a Python module of neither torch nor the standard library."""
    return isinstance(value, types.ModuleType) and _is_own(value)


def _code_in(value: Any) -> list[Any]:
    """The functions that a function, a property, a class or a container of these consists of."""
    if isinstance(value, property):
        return [part for part in (value.fget, value.fset) if part is not None]
    if isinstance(value, type):
        return [part for held in vars(value).values() if not isinstance(held, type) for part in _code_in(held)]
    if isinstance(value, (tuple, list, dict)):
        items = value.values() if isinstance(value, dict) else value
        return [part for item in items if not isinstance(item, (tuple, list, dict)) for part in _code_in(item)]
    inner = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) or hasattr(value, "__func__") else None
    return [inner] if isinstance(inner, types.FunctionType) else []


def class_digests() -> Callable[[type], str]:
    """A function that digests a class: all methods, patched ones included, and attributes. It reads each class once."""

    @functools.cache
    def texts_of(base: type) -> list[str]:
        # Dynamo patches two of its base class, when it first traces.
        by_dynamo = {"__init__", "__setstate__"} if base is torch.nn.Module else set()
        own = [(name, held) for name, held in vars(base).items() if name not in by_dynamo]
        code = [f"{name} {code_of(function)}" for name, held in own for function in _code_in(held)]
        values = own if _is_own(base) else ()
        return code + [f"{name} {brief(held)}" for name, held in values if not _code_in(held)]  # guard: saved_classes

    @functools.cache
    def digest_of(kind: type) -> str:
        texts = [text for base in kind.__mro__ for text in texts_of(base)]
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

    return digest_of


@functools.cache
def _files_of(*packages: str) -> str:
    hashed = hashlib.sha256()
    for package in packages:
        module = importlib.import_module(package)
        file = Path(str(getattr(module, "__file__", None)))
        files = sorted(file.parent.rglob("*.py")) if hasattr(module, "__path__") else [file]
        if not files or not files[0].is_file():
            raise saving.CannotSaveError(f"the module {package} has no file")
        for path in files:
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def modules(model: Any) -> Parts:
    """The tree of a model's modules: classes, attributes, hooks, code of methods, and layouts of its tensors."""
    if not isinstance(model, torch.nn.Module):
        return {"the function": _function(model)}
    parts = {"hooks of all modules": _hooks(torch.nn.modules.module, "_global")}  # guard: saved_global_hooks
    digest_of = class_digests()
    for path, module in model.named_modules():
        own = vars(module)
        scalars = {
            name: brief(value)
            for name, value in own.items()
            if isinstance(value, (*PLAIN, enum.Enum, types.FunctionType, types.MethodType))
        }
        named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        tensors = [(name, brief(tensor)) for name, tensor in named]
        place = f"module {path!r}" if path else "the model"
        parts[f"{place}: class"] = f"{_named(type(module))} {digest_of(type(module))}"  # guard: saved_forward
        parts[f"{place}: attributes"] = str(scalars)  # guard: saved_attributes
        parts[f"{place}: hooks"] = _hooks(module, "")  # guard: saved_hooks
        parts[f"{place}: tensors"] = str(tensors)  # guard: saved_tensors
    return parts


def _function(model: Any) -> str:
    try:
        return text_of(model)
    except saving.CannotSaveError:
        return f"{brief(model)} {class_digests()(type(model))}"


def _hooks(owner: Any, prefix: str) -> str:
    found = {name: getattr(owner, prefix + name, None) for name in _HOOKS}
    return str({name: list(map(brief, hooks.values())) for name, hooks in found.items() if hooks})


def sources(names: Iterable[str]) -> Parts:
    """A digest of the file of each Python module and of its code as it is now; torch's own are of its version."""
    return {f"the source of {name}": _source_digest(name) for name in sorted(names) if not name.startswith("torch.")}


def _source_digest(name: str) -> str:
    module = importlib.import_module(name)
    own = {n: held for n, held in vars(module).items() if getattr(held, "__module__", name) == name}
    texts = [f"{n} {code_of(part)}" for n, held in own.items() for part in _code_in(held)]  # guard: saved_code
    return hashlib.sha256(_source_of(module) + "\n".join(texts).encode()).hexdigest()[:16]


def _source_of(module: types.ModuleType) -> bytes:
    try:
        return Path(str(module.__file__)).read_bytes()
    except (OSError, AttributeError):
        return b""
