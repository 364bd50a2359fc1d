"""What an encoder manager reports of requests that run eagerly, and of graphs that are captured again."""

from __future__ import annotations

from graphpass.capture.runtime import GraphRuntime
from graphpass.encoder.graphs import CapturedEncoder
from graphpass.encoder.protocol import SupportsEncoderCudaGraph, SupportsEncoderKernels
from graphpass.report import KernelUse

_LARGER = (
    "pass token_budgets that hold them (and max_tokens, if the largest batch is smaller), or scale the images down"
)


def attention_kernels(runtime: GraphRuntime, model: SupportsEncoderCudaGraph) -> tuple[KernelUse, ...]:
    """The kernels that the encoder names. Warns of one that is slower than need be."""
    kernels = (model.encoder_attention_kernel(),) if isinstance(model, SupportsEncoderKernels) else ()
    for use in kernels:
        if use.remedy:
            runtime.warn(f"attention runs a slower kernel, {use.kernel}: {use.why}", use.remedy)
    return kernels


def new_weights(runtime: GraphRuntime) -> None:
    """All graphs are captured again during a request."""
    runtime.warn(
        "weights of the encoder were replaced or moved: its graphs are captured again",
        "copy new weights into the old parameters (`parameter.copy_(new)`), or call clear() and capture() yourself",
    )


def another_setting(runtime: GraphRuntime, setting: str) -> None:
    """A request runs eagerly under another setting than that of the capture."""
    runtime.warn(
        f"{setting} changed since the encoder was captured: it runs eagerly",
        "call clear() and capture() under the new setting to use graphs",
        is_recorded=True,
    )


def why_eager(runtime: GraphRuntime, captured: CapturedEncoder | None, num_tokens: int) -> None:
    """An eager call, before the capture or above the largest budget; other eager calls are cheaper than a replay."""
    if captured is None:
        what = "the encoder runs eagerly: it has not been captured"
        runtime.warn(what, "call capture() first", is_recorded=True)
        return
    largest = max((key.tokens for key in captured.budgets), default=0)
    if num_tokens > largest and captured.state.setting_changed() is None:
        failed = next((reason for key, reason in captured.failed if key.tokens >= num_tokens), None)
        runtime.warn(
            f"items have more output tokens than the largest captured budget, {largest}: they run eagerly",
            failed.remedy if failed is not None else _LARGER,
            at=f"{num_tokens} tokens",
        )
