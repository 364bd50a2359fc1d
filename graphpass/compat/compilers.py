"""The compilers of a region, and the settings that they read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

AtenHook = Callable[[fx.GraphModule], None]
"""Called with the aten graph of what is compiled, before the compiler changes it."""


def inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], show: AtenHook | None = None
) -> Callable[..., Any]:
    """Inductor without CUDA graphs of its own.

    Args:
        graph_module: what to compile.
        example_inputs: fake tensors and symbolic sizes.
        show: called with the aten graph. AOTAutograd's cache would skip the trace, so it is off then; Inductor's own
            cache serves all the same.
    """
    from torch._functorch import config as aot_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_inner(aten: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        if show is not None:
            show(aten)
        return compile_fx_inner(aten, inputs, **settings)

    off = {"triton.cudagraphs": False, "triton.cudagraph_trees": False}
    with aot_config.patch(enable_autograd_cache=False) if show is not None else contextlib.nullcontext():
        compiled: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
            graph_module, list(example_inputs), inner_compile=compile_inner, config_patches=off
        )
    return compiled


def aot_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], show: AtenHook | None = None
) -> Callable[..., Any]:
    """AOTAutograd with its ATen graph run as it is; ``show`` is called with that graph."""
    from torch._dynamo.backends.debugging import aot_eager as backend
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config as aot_config

    def run_as_it_is(aten: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if show is not None:
            show(aten)
        return boxed_nop(aten, list(inputs))

    # Tokens that keep ops in order are made inside of the graph, as Inductor has them, and are no inputs.
    with aot_config.patch(unlift_effect_tokens=True):
        compiled: Callable[..., Any] = backend(graph_module, list(example_inputs), fw_compiler=run_as_it_is)
    return compiled


@contextlib.contextmanager
def tracing_with(fake_mode: Any) -> Iterator[None]:
    """Within the body compilers see ``fake_mode`` as that of the graph, and none of what Dynamo traces now."""
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield


def compiler_settings() -> tuple[Any, ...]:
    """Everything ambient that a compiler reads: modes, precision, and the configuration of its parts."""
    from torch._functorch import config as aot_config
    from torch._inductor import config as inductor_config

    autocast = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return (
        autocast,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        inductor_config.get_hash(),
        aot_config.get_hash(),
    )
