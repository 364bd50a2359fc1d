"""What the commands share: their result, errors of the user's code, and the model with its example inputs.

A model comes from a factory or from a Hugging Face configuration.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphpass.errors import CommandError, GraphpassError, did_you_mean
from graphpass.report.drawing import Part

_LIBRARIES = ("site-packages", "dist-packages", str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent))
_REMEDY = "name module:factory, file.py:factory, a config.json, or a model type of transformers"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one command."""

    command: str  #: ``explain``, ``doctor``, ``bench`` or ``plan``
    subject: str  #: the model, file or machine that it is about
    figures: Mapping[str, Any]  #: the content of ``--json``: dicts, lists, strings, numbers, booleans and None
    parts: tuple[Part, ...]  #: the same for people, in reading order; empty tables are not drawn
    failure: str | None = None  #: the check that failed, for exit code 1; None if none did


@contextlib.contextmanager
def users_code(what: str, *, expected: str, remedy: str) -> Iterator[None]:
    """Report an exception in code or a file of the user as a typed error that names the line."""
    try:
        yield
    except GraphpassError:
        raise
    except (Exception, SystemExit) as error:
        own = getattr(error, "inner_exception", None)
        if isinstance(own, GraphpassError):
            raise own from error
        raise CommandError(f"{what} failed", expected=expected, found=summary(error), remedy=remedy) from error


def summary(error: BaseException) -> str:
    """Type, first sentence and place of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next((at for at, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _LIBRARIES) and not f.filename.startswith("<")]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}: `{own[-1].line}`" if own else ""
    return f"{type(error).__name__}" + (f": {' '.join(lines[: first + 1])}" if lines else "") + place


@dataclass(frozen=True, slots=True)
class Program:
    """A model and one example call of it."""

    name: str  #: the target as the user wrote it
    model: Callable[..., Any]  #: the model, on its device and in eval mode
    args: tuple[Any, ...]  #: positional example inputs
    kwargs: Mapping[str, Any]  #: keyword example inputs
    device: torch.device  #: the device that the command asked for


def device_named(name: str | None) -> torch.device:
    """The device of ``--device``; by default the GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if has_gpu else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cuda" and not has_gpu):
        raise CommandError(
            "the device cannot be used",
            expected="cpu" + (", cuda or cuda:INDEX" if has_gpu else ": there is no GPU here"),
            found=str(name),
            remedy="leave --device out, or run the command on a machine with that device",
        )
    return device


def load(
    target: str, *, shapes: Sequence[str] = (), config: Sequence[str] = (), device: torch.device | None = None
) -> Program:
    """The model of ``target`` with an example call, on ``device``.

    A target is ``module:factory``, ``file.py:factory``, a path to ``config.json`` or its folder, a configuration class
    as ``transformers:LlamaConfig``, or a model type of transformers. A factory returns a model, or (model, inputs): a
    tensor, a tuple of arguments, or a dict of keyword arguments. ``shapes`` replace the inputs of the factory.
    """
    device = device or device_named(None)
    with users_code(target, expected="a model and its example inputs", remedy="run it in Python to see the traceback"):
        made = _made(target, config)
        model, args, kwargs = _parts(made)
        model = _on(model, device)
        if isinstance(model, torch.nn.Module):
            model.eval()
        if shapes:
            args, kwargs = inputs_of_shapes(shapes, device)
        elif not args and not kwargs and hasattr(model, "main_input_name"):
            kwargs = inputs_for_config(model, device)
    if not callable(model):
        raise CommandError(
            f"{target} gives no model", expected="a module or a function", found=type(model).__name__, remedy=_REMEDY
        )
    if not args and not kwargs:
        raise CommandError(
            f"{target} has no example inputs",
            expected="a factory that returns (model, inputs), or --input",
            found="a model alone",
            remedy="pass --input 6x16, or --input NAME=SHAPE:DTYPE for each argument",
        )
    return Program(target, model, _on(args, device), _on(kwargs, device), device)


def _parts(made: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(made, tuple):
        return made, (), {}
    if len(made) == 3:
        return made[0], tuple(made[1]), dict(made[2])
    if len(made) != 2:
        raise CommandError(
            "a factory returned a tuple of another length",
            expected="(model, inputs) or (model, args, kwargs)",
            found=f"{len(made)} values",
            remedy="return the model and a tuple or dict of its inputs",
        )
    model, inputs = made
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    return model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def _on(value: Any, device: torch.device) -> Any:
    """``value`` with its modules and tensors on ``device``. Tensors that are fake already stay where they are."""
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        return value if all(_is_there(tensor, device) for tensor in tensors) else value.to(device)
    if isinstance(value, torch.Tensor):
        return value if _is_there(value, device) else value.to(device)
    if isinstance(value, Mapping):
        return {name: _on(item, device) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_on(item, device) for item in value)
    return value


def _is_there(tensor: torch.Tensor, device: torch.device) -> bool:
    is_real = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return not is_real or tensor.device.type == device.type


def _made(target: str, config: Sequence[str]) -> Any:
    path = Path(target)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        return _of_config(_read_json(path), config)
    module_name, _, attribute = target.rpartition(":")
    if not module_name:
        return _of_config({"model_type": target}, config)
    found = _attribute(_module(module_name), attribute, target)
    if isinstance(found, type) and hasattr(found, "model_type"):
        return _of_config({"model_type": found.model_type}, config)
    if config:
        raise CommandError(
            "--config is for configurations", expected="a Hugging Face configuration", found=target, remedy=_REMEDY
        )
    return found if isinstance(found, torch.nn.Module) else found()


def _module(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise CommandError("there is no such file", expected="a Python file", found=name, remedy=_REMEDY)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    if os.getcwd() not in sys.path:  # as `python -m` does; the console script does not
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # it is there, and imports another one
            raise
        raise CommandError(
            "there is no such module",
            expected="a module that can be imported from this folder",
            found=name,
            remedy=f"run the command in its folder, or name its file: path/to/{name.rpartition('.')[2]}.py:factory",
        ) from error


def _attribute(module: Any, name: str, target: str) -> Any:
    value = module
    for part in name.split("."):
        if not hasattr(value, part):
            known = [name for name in dir(value) if not name.startswith("_")]
            raise CommandError(
                f"{target} does not exist",
                expected="a function or class of the module",
                found=repr(part),
                remedy=did_you_mean(part, known, otherwise="name a function that returns (model, inputs)"),
            )
        value = getattr(value, part)
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path} cannot be read", expected="a JSON file", found=f"{type(error).__name__}: {error}", remedy=_REMEDY
        ) from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise CommandError(
            f"{path} is no configuration",
            expected="an object with model_type",
            found=repr(content)[:80],
            remedy=_REMEDY,
        )
    return content


def _of_config(content: Mapping[str, Any], overrides: Sequence[str]) -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise CommandError(
            "configurations need transformers",
            expected="the package transformers, or module:factory",
            found="no such package",
            remedy="pip install transformers",
        ) from error
    changed = named_values(overrides, "a setting", example="write --config num_hidden_layers=2")
    content = {**content, **changed}
    known = transformers.CONFIG_MAPPING.keys()
    if content["model_type"] not in known:
        raise CommandError(
            f"transformers has no model type {content['model_type']!r}",
            expected="a model type of transformers",
            found=str(content["model_type"]),
            remedy=_instead_of(str(content["model_type"]), known),
        )
    config = transformers.AutoConfig.for_model(**content)
    settings = transformers.AutoConfig.for_model(content["model_type"]).to_dict()
    for name in changed:
        if name not in settings:
            raise CommandError(
                f"{type(config).__name__} has no such setting",
                expected="a setting of the configuration",
                found=repr(name),
                remedy=did_you_mean(name, settings, otherwise="leave it out"),
            )
    names = content.get("architectures") or ()
    classes = [made for name in names if (made := getattr(transformers, name, None)) is not None]
    return classes[0](config) if classes else transformers.AutoModel.from_config(config)


def _instead_of(name: str, known: Iterable[str]) -> str:
    if Path(f"{name}.py").is_file():
        return f"name the function that returns (model, inputs): {name}:FUNCTION"
    return did_you_mean(name, known, otherwise=_REMEDY)


def named_values(texts: Iterable[str], what: str, *, example: str) -> dict[str, Any]:
    """{name: value} of texts NAME=VALUE, where a value that is no JSON is a string."""
    values = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise CommandError(f"{what} cannot be read", expected="NAME=VALUE", found=repr(text), remedy=example)
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


_SHAPE = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dims>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?(?:<(?P<below>\d+))?")
# Sizes that no other dimension of a model is likely to have: equal sizes would count as one.
_BATCH, _LENGTH, _FRAMES, _SAMPLES = 3, 11, 3000, 4000
_INPUT_REMEDY = "write NAME=SHAPE:DTYPE<BELOW, as 6x16, x=6x16:float16 or input_ids=3x11:int64<30522"


def inputs_of_shapes(shapes: Sequence[str], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random tensors for ``--input``: positional arguments and keyword arguments."""
    args: list[torch.Tensor] = []
    kwargs: dict[str, Any] = {}
    for text in shapes:
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise CommandError("an input cannot be read", expected="a shape", found=repr(text), remedy=_INPUT_REMEDY)
        shape = [int(size) for size in match["dims"].split("x")]
        tensor = _random(shape, _dtype(match["dtype"] or "float32"), int(match["below"] or 2), device)
        if match["name"]:
            kwargs[match["name"]] = tensor
        else:
            args.append(tensor)
    return tuple(args), kwargs


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CommandError(
            "an input has an unknown dtype", expected="a dtype of torch", found=name, remedy=_INPUT_REMEDY
        )
    return dtype


def _random(shape: Sequence[int], dtype: torch.dtype, below: int, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, below, tuple(shape), device=device).to(dtype)


def inputs_for_config(model: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Small inputs for a Hugging Face model, by the name of its main input."""
    config, name = model.config, str(model.main_input_name)
    text = getattr(config, "text_config", config)
    if name == "input_ids" and hasattr(text, "vocab_size"):
        ids = _random((_BATCH, _LENGTH), torch.int64, min(text.vocab_size, 1000), device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    shape: tuple[int, ...]
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (_BATCH, int(getattr(vision, "num_channels", 3)), int(height), int(width))
    elif name == "input_features":
        shape = (_BATCH, int(config.num_mel_bins), 2 * int(getattr(config, "max_source_positions", _FRAMES // 2)))
    elif name == "input_values":
        shape = (_BATCH, _SAMPLES)
    else:
        raise CommandError(
            f"graphpass knows no small inputs for {type(model).__name__}",
            expected="a model whose main input is input_ids, pixel_values, input_features or input_values",
            found=name,
            remedy="write a factory that returns (model, inputs), and name it as module:factory",
        )
    return {name: _random(shape, dtype, 2, device)}
