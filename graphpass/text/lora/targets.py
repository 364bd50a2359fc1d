"""Selects the layers of a model that get adapters."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from graphpass.compat import nnmodules
from graphpass.errors import OptionError, did_you_mean

__all__ = ["targeted_layers"]


def targeted_layers(model: nn.Module, targets: Collection[str]) -> dict[str, nn.Linear]:
    """{path: layer} of the layers that match a target.

    Raises:
        OptionError: a target matches no layer, a layer that is not a plain ``nn.Linear``, or a shared layer.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    found: dict[str, nn.Linear] = {}
    for target in names or ("",):
        matching = [path for path in modules if path and (path == target or path.endswith(f".{target}"))]
        if not matching:
            last_parts = {path.rpartition(".")[2] for path, module in modules.items() if type(module) is nn.Linear}
            raise OptionError(
                f"target {target!r} names no layer",
                expected=f"the end of a linear layer's path: {', '.join(sorted(last_parts))}",
                found=repr(target),
                remedy=did_you_mean(target, last_parts, otherwise="see model.named_modules()"),
            )
        for path in matching:
            found[path] = _checked_layer(path, modules[path])
    if len({id(layer) for layer in found.values()}) < len(found):
        raise OptionError(
            "a target layer has several paths in the model",
            expected="one path for each layer",
            found=", ".join(sorted(found)),
            remedy="leave shared layers out of the targets",
        )
    return found


def _checked_layer(path: str, layer: nn.Module) -> nn.Linear:
    is_hooked = nnmodules.has_hooks(layer)
    if type(layer) is nn.Linear and not is_hooked:
        return layer
    raise OptionError(
        f"{path} takes no adapters",
        expected="torch.nn.Linear itself, without hooks, not replaced before",
        found=type(layer).__name__ + (" with hooks, which would be lost" if is_hooked else ""),
        remedy="leave it out of the targets; create one LoraAdapters for all adapters, before hooks are added",
    )
