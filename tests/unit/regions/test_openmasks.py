"""A mask of attention that hides nothing is left out; any other stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from graphpass.regions.openmasks import without_open_masks

Mask = Callable[[int, int], torch.Tensor]


def queries(length: int, offset: int = 0) -> torch.Tensor:
    return (torch.arange(length) + offset)[None, None, :, None]


def of_written_indices(batch: int, n: int) -> torch.Tensor:
    indices = torch.arange(n)
    indices.sub_(1)
    return (indices[:, None] >= 0).expand(n, n)


def of_indices_written_by_a_view(batch: int, n: int) -> torch.Tensor:
    indices = torch.arange(n)
    indices[1:].sub_(3)
    return (indices[:, None] >= 0).expand(n, n)


def written_afterwards(batch: int, n: int) -> torch.Tensor:
    mask = (torch.arange(n)[:, None] >= 0).expand(n, n).contiguous()
    mask[0] = False
    return mask


def written_before_it_is_expanded(batch: int, n: int) -> torch.Tensor:
    mask = torch.arange(n)[:, None] >= 0
    mask[0] = False
    return mask.expand(n, n)


MASKS: dict[str, tuple[bool, Mask]] = {
    "as Transformers makes it": (True, lambda batch, n: (queries(n) >= 0).expand(batch, -1, n, n)),
    "from a later index": (True, lambda batch, n: (queries(n, 3) >= 2).expand(batch, 1, n, n)),
    "hides all from one query": (False, lambda batch, n: (queries(n) >= 1).expand(batch, -1, n, n)),
    "from an earlier index": (False, lambda batch, n: (queries(n, -1) >= 0).expand(batch, -1, n, n)),
    "backwards": (False, lambda batch, n: (torch.add(torch.arange(n), 1, alpha=-2)[:, None] >= 0).expand(n, n)),
    "from the second index": (False, lambda batch, n: (torch.arange(-1, n - 1)[:, None] >= 0).expand(n, n)),
    "of written indices": (False, of_written_indices),
    "of indices that a view writes": (False, of_indices_written_by_a_view),
    "written": (False, written_afterwards),
    "written, then expanded": (False, written_before_it_is_expanded),
    "by keywords": (False, lambda batch, n: torch.ge(input=queries(n), other=1).expand(batch, 1, n, n)),
    "causal": (False, lambda batch, n: torch.arange(n) <= queries(n)),
}


@pytest.mark.parametrize("given", ["by name", "by position"])
@pytest.mark.parametrize("name", MASKS)
def test_only_a_mask_that_hides_nothing_is_left_out(name: str, given: str) -> None:
    is_open, make = MASKS[name]

    def attend(x: torch.Tensor) -> torch.Tensor:
        batch, _, length, _ = x.shape
        mask = make(batch, length)
        if given == "by position":
            return F.scaled_dot_product_attention(x, x, x, mask)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    graphs: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(graph_module)
        without_open_masks(graph_module.graph)
        graph_module.recompile()
        return graph_module.forward

    x = torch.randn(1, 2, 5, 8)
    with torch.no_grad():
        got = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)(x)
        torch.testing.assert_close(got, attend(x), equal_nan=True)
    (attention,) = graphs[0].graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert (len(attention.all_input_nodes) == 1) is is_open, "query, key and value are one"
    assert (not graphs[0].graph.find_nodes(op="call_function", target=torch.arange)) is is_open
