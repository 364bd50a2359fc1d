"""A tensor that wraps others, as quantised weights do, with nothing but torch: integer codes and a scale a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class Scaled(torch.Tensor):
    """``codes * scale``; ``codes`` may be another :class:`Scaled`. ``shift`` is metadata, which is added."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, shift: float = 0.0) -> Any:
        kind = {"dtype": scale.dtype, "device": codes.device, "strides": codes.stride()}
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, **kind)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, shift: float = 0.0) -> None:
        self.codes, self.scale, self.shift = codes, scale, shift

    @classmethod
    def of(cls, tensor: torch.Tensor, shift: float = 0.0, *, nested: bool = False) -> Scaled:
        """A tensor in codes of 8 bits, each row with its scale; ``nested`` scales the codes twice."""
        with torch.no_grad():
            scale = (tensor - shift).abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127
            codes = ((tensor - shift) / scale).round().to(torch.int8)
            inner = cls(codes, torch.ones_like(scale)) if nested else codes
            return cls(inner, scale, shift)

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({self.codes}, {self.scale}, {self.shift})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.shift]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, metadata: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"], *metadata)

    def dequantize(self) -> torch.Tensor:
        """The plain tensor."""
        codes = self.codes.dequantize() if isinstance(self.codes, Scaled) else self.codes.to(self.scale.dtype)
        return codes * self.scale + self.shift

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        this = args[0] if args else None
        if func in (aten.detach.default, aten.clone.default, aten.alias.default) and isinstance(this, Scaled):
            made = type(this)(func(this.codes), func(this.scale), this.shift)
            return return_and_correct_aliasing(func, args, kwargs, made)
        if func is aten.t.default and isinstance(this, Scaled) and this.scale.numel() == 1:
            made = type(this)(this.codes.t(), this.scale, this.shift)
            return return_and_correct_aliasing(func, args, kwargs, made)
        if func is aten._to_copy.default and isinstance(this, Scaled):
            dtype, others = kwargs.get("dtype"), {k: v for k, v in kwargs.items() if k == "device"}
            scale = func(this.scale, **others, **({} if dtype is None else {"dtype": dtype}))
            return type(this)(func(this.codes, **others), scale, this.shift)
        if func is aten.copy_.default and isinstance(this, Scaled) and isinstance(args[1], Scaled):
            this.codes.copy_(args[1].codes)
            this.scale.copy_(args[1].scale)
            return return_and_correct_aliasing(func, args, kwargs, this)
        if func is aten.mul_.Tensor and isinstance(this, Scaled):
            this.scale.mul_(args[1])
            return return_and_correct_aliasing(func, args, kwargs, this)
        if func is aten.neg.default and isinstance(this, Scaled):
            return type(this)(this.codes, -this.scale, -this.shift)
        plain = tree_map_only(Scaled, Scaled.dequantize, (args, kwargs))
        return func(*plain[0], **plain[1])


class Other(Scaled):
    """Another class of the same parts, whose values are three times as large."""

    def dequantize(self) -> torch.Tensor:
        return super().dequantize() * 3


def plain(value: Any) -> Any:
    """A tensor as it is, or what a wrapper stands for."""
    return value.dequantize() if isinstance(value, Scaled) else value


torch.serialization.add_safe_globals([Scaled, Other])


def quantised(model: nn.Module, kind: type[Scaled] = Scaled, **options: Any) -> nn.Module:
    """The model with all weights of its linear layers in codes."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind.of(module.weight, **options), requires_grad=False)
            if module.bias is not None:
                module.bias.requires_grad_(False)
    return model
