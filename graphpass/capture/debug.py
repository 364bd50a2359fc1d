"""``debug=True``: the same wrapper, buffers and padding, but the region runs eagerly instead of replaying a graph.

If a wrong result remains, the model or the compiler causes it; if it disappears, the capture does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphpass.capture.device import Graph
from graphpass.capture.layout import distinct_elements, storage_id
from graphpass.errors import CaptureError

__all__ = ["EagerGraph"]


class EagerGraph(Graph):
    """Runs ``body`` in each replay and copies its results to the addresses of the first run's results.

    Args:
        name: the region.
        body: the region over its fixed inputs; returns flat outputs.
        inside: returns the settings and context in which the body runs, for the current forward context.
        graph_inputs: the fixed inputs. Outputs that are views of them are not copied.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[], Sequence[Any]],
        inside: Callable[[], AbstractContextManager[Any]],
        graph_inputs: Sequence[Any],
    ) -> None:
        self._name = name
        self._body: Callable[[], Sequence[Any]] | None = body
        self._inside = inside
        self._inference = torch.is_inference_mode_enabled()
        self._inputs = frozenset(storage_id(leaf) for leaf in graph_inputs if isinstance(leaf, torch.Tensor)) - {0}
        self.outputs = tuple(body())

    def replay(self) -> None:
        """Run the region and copy its results to the addresses that a graph would write.

        Raises:
            CaptureError: a tensor has another shape, or a number another value, than at capture.
        """
        assert self._body is not None
        with torch.inference_mode(self._inference), torch.no_grad():
            with self._inside():
                results = self._body()
            for index, (fixed, result) in enumerate(zip(self.outputs, results, strict=True)):
                if not isinstance(fixed, torch.Tensor):
                    if fixed != result:
                        raise self._changed(index, fixed, result)
                elif not isinstance(result, torch.Tensor) or result.shape != fixed.shape:
                    raise self._changed(index, fixed, result)
                elif storage_id(fixed) not in self._inputs and storage_id(fixed) != storage_id(result):
                    target, source = (distinct_elements(t, name=f"output {index}") for t in (fixed, result))
                    target.copy_(source)

    def reset(self) -> None:
        """Drop the reference to the region."""
        self._body = None

    def _changed(self, index: int, fixed: Any, result: Any) -> CaptureError:
        def shown(value: Any) -> str:
            return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)

        return CaptureError(
            f"output {index} of {self._name} is baked into the graph, and differs from its value at capture",
            expected=shown(fixed),
            found=shown(result),
            remedy="put the value that it depends on into the key: BatchDescriptor(..., extra=((name, value),))",
        )
