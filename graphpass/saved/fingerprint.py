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
import platform
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import sympy
import torch

from graphpass.compat import operators, saving
from graphpass.ledger import Reason

Parts: TypeAlias = dict[str, str]
"""{what it is: its text}."""

_NUMBERS_AND_TEXT = (type(None), type(Ellipsis), type(NotImplemented), bool, int, float, complex, str, bytes)
_PLAIN = (*_NUMBERS_AND_TEXT, torch.dtype, torch.device, torch.layout, torch.memory_format, Path)
_CONTAINERS = (tuple, list, dict, set, frozenset)
_MOST_BYTES = 1 << 30
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


class UnstableError(Exception):
    """An object has no text that another process would give to an equal one."""


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
    """A digest of values that is the same in every process.

    Raises:
        UnstableError: a value has no such text.
    """
    return hashlib.sha256("\n".join(map(text_of, values)).encode()).hexdigest()


def text_of(value: Any) -> str:
    """All of a value as text.

    Raises:
        UnstableError: it holds an object that is itself and nothing else, such as a tensor.
    """
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, sympy.Basic):
        return str(sympy.srepr(value))
    if isinstance(value, enum.Enum):
        return f"{_named(type(value))}.{value.name}"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} {sorted(map(text_of, value))}"
    if isinstance(value, Mapping):
        return f"{_named(type(value))} {[(text_of(key), text_of(item)) for key, item in value.items()]}"
    if isinstance(value, (tuple, list)):
        return f"{_named(type(value))} {list(map(text_of, value))}"
    if isinstance(value, slice):
        return f"slice {text_of((value.start, value.stop, value.step))}"
    if isinstance(value, functools.partial):
        return f"partial {text_of((value.func, value.args, value.keywords))}"
    if isinstance(value, (operators.OpOverload, operators.OpOverloadPacket)):
        return f"{value} {getattr(value, '_schema', '')}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{_named(type(value))} {[text_of(getattr(value, f.name)) for f in dataclasses.fields(value)]}"
    if callable(value) and (isinstance(value, type) or hasattr(value, "__name__")):
        return code_of(value)
    raise UnstableError(f"{type(value).__name__} objects are compared by identity")


def _named(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', getattr(kind, '__name__', '?'))}"


def contents_of(values: Iterable[Any]) -> str | None:
    """A digest of the contents of tensors and plain values; None if they are more than 1 GiB or have no such text."""
    found, num_bytes, hashed = list(values), 0, hashlib.sha256()
    for value in found:
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and (value.layout is not torch.strided or value.is_quantized):
            return None
        num_bytes += value.nbytes if is_tensor else 0
    if num_bytes > _MOST_BYTES:
        return None
    for value in found:
        try:
            hashed.update((brief(value) if isinstance(value, torch.Tensor) else text_of(value)).encode())
        except UnstableError:
            return None
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            hashed.update(plain.numpy().data)
    return hashed.hexdigest()


def code_of(function: Any) -> str:
    """A function, method, class or operator by name, and for Python code a digest of it."""
    if function is None:
        return "none"
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    if code is None:
        return _named(function)
    held = [_cell_text(cell) for cell in inner.__closure__ or ()]
    defaults = [*map(brief, inner.__defaults__ or ()), brief(inner.__kwdefaults__)]
    shown = hashlib.sha256(f"{_code_text(code)} {held} {defaults}".encode()).hexdigest()
    return f"{_named(inner)} #{shown[:16]}"


def _cell_text(cell: Any) -> str:
    """What a variable of an enclosing function holds."""
    try:
        return brief(cell.cell_contents)
    except ValueError:
        return "empty"


def _code_text(code: types.CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, types.CodeType) else _constant_text(c) for c in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_flags, constants))


def _constant_text(value: Any) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def brief(value: Any) -> str:
    """A value as far as a trace reads it at once: scalars, code, layouts of tensors, keys of containers, classes."""
    if isinstance(value, torch.Tensor):
        place = (tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
        return f"{type(value).__name__} {place}" if value.layout is torch.strided else f"{value.layout} {value.dtype}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, _CONTAINERS):
        scalars = [repr(item) for item in value if isinstance(item, _PLAIN)]  # of a dict, its keys
        ordered = sorted(scalars) if isinstance(value, (set, frozenset)) else scalars
        return f"{_named(type(value))} of {len(value)} {ordered}"
    try:
        return text_of(value)
    except UnstableError:
        return f"a {_named(type(value))}"


# -- parts ----------------------------------------------------------------------------------------------------------


def environment(devices: Iterable[torch.device]) -> Parts:
    """Versions, and the hardware of the devices."""
    cuda = next((device for device in devices if device.type == "cuda"), None)
    parts = {
        "Python": f"{sys.implementation.name} {sys.version_info} {platform.python_build()}",  # guard: saved_python
        "torch": f"{torch.__version__} {torch.version.git_version}",  # guard: saved_torch
        "graphpass": _own_source(),  # guard: saved_graphpass
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",  # guard: saved_processor
    }
    if cuda is not None:
        name, capability = torch.cuda.get_device_name(cuda), torch.cuda.get_device_capability(cuda)
        parts["GPU"] = f"{name} {capability}"  # guard: saved_gpu
        parts |= _cuda()
    return parts


def _cuda() -> Parts:
    triton = importlib.import_module("triton")
    driver: Any = operators.torch_attribute("_C._cuda_getDriverVersion")
    return {"CUDA": f"{torch.version.cuda}, driver {driver()}", "Triton": str(triton.__version__)}


_IMPLEMENTATION = "the implementation of "


def implementations(of: Iterable[Any]) -> Parts:
    """The Python code of each custom operator among the targets of a graph's nodes, or the names of saved parts."""
    names = [
        str(op).removeprefix(_IMPLEMENTATION)
        for op in of
        if isinstance(op, (operators.OpOverload, operators.OpOverloadPacket)) or str(op).startswith(_IMPLEMENTATION)
    ]
    found = {name: saving.implementation_of(name) for name in sorted(set(names))}
    return {f"{_IMPLEMENTATION}{name}": code_of(code) for name, code in found.items() if code is not None}


@functools.cache
def _own_source() -> str:
    """A digest of all Python files of graphpass and of its backend."""
    hashed = hashlib.sha256()
    for package in ("graphpass", "cgpass"):
        folder = Path(str(importlib.util.find_spec(package).origin)).parent  # type: ignore[union-attr]
        for path in sorted(folder.rglob("*.py")):
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def modules(model: Any) -> Parts:
    """The tree of a model's modules: classes, attributes, hooks, code of forward, and layouts of its tensors."""
    if not isinstance(model, torch.nn.Module):
        return {"the function": code_of(model)}
    parts = {"hooks of all modules": _hooks(torch.nn.modules.module, "_global")}  # guard: saved_global_hooks
    for path, module in model.named_modules():
        own = vars(module)
        scalars = {
            name: brief(value)
            for name, value in own.items()
            if isinstance(value, (*_PLAIN, enum.Enum, types.FunctionType, types.MethodType))
        }
        named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        tensors = [(name, brief(tensor)) for name, tensor in named]
        place = f"module {path!r}" if path else "the model"
        parts[f"{place}: class"] = f"{_named(type(module))} {code_of(type(module).forward)}"  # guard: saved_forward
        parts[f"{place}: attributes"] = str(scalars)  # guard: saved_attributes
        parts[f"{place}: hooks"] = _hooks(module, "")  # guard: saved_hooks
        parts[f"{place}: tensors"] = str(tensors)  # guard: saved_tensors
    return parts


def _hooks(owner: Any, prefix: str) -> str:
    found = {name: getattr(owner, prefix + name, None) for name in _HOOKS}
    return str({name: list(map(brief, hooks.values())) for name, hooks in found.items() if hooks})


def assumed(values: Mapping[str, Any]) -> Parts:
    """What a trace assumes of the model and of global variables: {expression: value}."""
    return {f"the value of {expression}": brief(value) for expression, value in values.items()}


def sources(names: Iterable[str]) -> Parts:
    """A digest of the file of each Python module; torch's own are of its version."""
    files = {name: _source_of(name) for name in sorted(names) if not name.startswith("torch.")}
    return {f"the source of {name}": hashlib.sha256(text).hexdigest()[:16] for name, text in files.items()}


def _source_of(name: str) -> bytes:
    try:
        return Path(str(importlib.import_module(name).__file__)).read_bytes()
    except (ImportError, OSError, AttributeError):
        return b""
