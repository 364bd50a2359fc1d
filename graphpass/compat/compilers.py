"""The compilers of a region, and the global settings that they read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from graphpass.compat import symbolic

AtenHook = Callable[[fx.GraphModule], None]
"""A callback that receives the ATen graph of a region before the compiler changes it."""


def inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], show: AtenHook | None = None
) -> Callable[..., Any]:
    """Compile with Inductor, whose CUDA graphs are off, and so is the pass that returns ``x`` itself for ``x * 1``.

    That pass gives results that torch's semantics keep apart one memory (``x * torch.ones(n)`` on 2.13, also ``x * 1``
    and ``x + 0`` on 2.15). The code after the graph may write to a result, so its input would change.

    Args:
        graph_module: the FX graph to compile.
        example_inputs: fake tensors and symbolic sizes.
        show: called with the ATen graph. It disables AOTAutograd's cache, which would skip the trace; Inductor's cache
            stays on.
    """
    from torch._functorch import config as aot_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_inner(aten: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        if show is not None:
            show(aten)
        return compile_fx_inner(aten, inputs, **settings)

    # guard: results_folded_into_inputs
    off = dict.fromkeys(("triton.cudagraphs", "triton.cudagraph_trees", "joint_graph_constant_folding"), False)
    with aot_config.patch(enable_autograd_cache=False) if show is not None else contextlib.nullcontext():
        compiled: Callable[..., Any] = compile_fx(  # type: ignore[assignment]
            graph_module, list(example_inputs), inner_compile=compile_inner, config_patches=off
        )
    return compiled


def aot_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], show: AtenHook | None = None
) -> Callable[..., Any]:
    """Compile with AOTAutograd alone and run its ATen graph unchanged; ``show`` receives that graph."""
    from torch._dynamo.backends.debugging import aot_eager as backend
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config as aot_config

    def run_as_it_is(aten: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if show is not None:
            show(aten)
        return boxed_nop(aten, list(inputs))

    # As with Inductor, the graph creates its effect tokens, which order ops, instead of taking them as inputs.
    with aot_config.patch(unlift_effect_tokens=True):
        compiled: Callable[..., Any] = backend(graph_module, list(example_inputs), fw_compiler=run_as_it_is)
    return compiled


@contextlib.contextmanager
def tracing_with(fake_mode: Any) -> Iterator[None]:
    """Within the body, compilers use ``fake_mode`` and do not see the tracing context of Dynamo's current frame."""
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield


@contextlib.contextmanager
def floats_as_tensors(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Within the body, compilers expect that their graph computes with tensors where the model has Python floats.

    AOTAutograd makes Dynamo start again, with a constant, for each float that its graph does not read as a number.
    """
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    symbols = symbolic.hints_of(symbolic.shape_env_of(example_inputs))
    floats = {str(symbol) for symbol in symbols if symbol_is_type(symbol, SymT.FLOAT)}
    floats -= TensorifyState.force_specializations
    TensorifyState.force_specializations |= floats
    try:
        yield
    finally:
        TensorifyState.force_specializations -= floats


def compiler_settings() -> tuple[Any, ...]:
    """All global state that a compiler reads: modes, precision, and the configuration of AOTAutograd and Inductor."""
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
