"""What the stitched code of a callable calls for each region."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from graphpass.capture.policy import CapturePolicy
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.wrapper import CUDAGraphWrapper
from graphpass.compile import CompiledRegion
from graphpass.context import current_context
from graphpass.modes import CUDAGraphMode
from graphpass.regions.split import Partition
from graphpass.regions.symbols import layout_inputs
from graphpass.report.records import RegionId

__all__ = ["wrapped_regions"]


class _EagerRegion:
    """Runs the code of an eager region; during a FULL capture, through the capture's record of region calls.

    Args:
        name: the region's name in its runtime.
        run: its code.
    """

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.name = name
        self.run = run

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        context = current_context()
        if context is None or context.capture is None:
            return self.run(*args)
        return context.capture.call(self.name, self.run, args, {})


def wrapped_regions(
    name: str,
    partition: Partition,
    compiled: Mapping[str, CompiledRegion],
    runtime: GraphRuntime,
    policy: CapturePolicy,
) -> dict[str, Callable[..., Any]]:
    """Region name -> callable for the stitched code: a PIECEWISE wrapper, or the eager region itself."""
    # Results stay in the pool between regions; the callable clones those that it returns.
    inner = replace(policy, outputs="view")
    given = {graph_input.name: graph_input for graph_input in partition.inputs}
    callees: dict[str, Callable[..., Any]] = {}
    for region in partition.regions:
        if region.kind == "eager":
            callees[region.name] = _EagerRegion(f"{name}.{region.name}", region.graph_module.forward)
            continue
        static = [p for p, value in enumerate(region.inputs) if value in given and given[value].is_static]
        callees[region.name] = CUDAGraphWrapper(
            compiled[region.name],
            CUDAGraphMode.PIECEWISE,
            runtime=runtime,
            name=RegionId(name, region.name),
            static_inputs=static,
            module_inputs=[p for p in static if given[region.inputs[p]].source_name is None],
            mutated_inputs=region.mutated_inputs,
            layout_inputs=layout_inputs(region.graph_module.graph),
            input_names=region.inputs,
            policy=inner,
        )
    return callees
