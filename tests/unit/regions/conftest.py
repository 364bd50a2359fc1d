"""Partition what torch.compile hands a backend, and check the stitched callable against the function itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from graphpass import partition
from graphpass.regions import DEFAULT_RULES, Partition, SplitRule


@pytest.fixture
def dynamo_split() -> Callable[..., Partition]:
    """``dynamo_split(function, *args, ops=...)``: the one partition, its results and mutations compared with eager."""

    def split(
        function: Callable[..., Any],
        *args: Any,
        ops: Sequence[object] = (),
        rules: Sequence[SplitRule] = DEFAULT_RULES,
        dynamic: bool | None = None,
        **config: Any,
    ) -> Partition:
        made: list[Partition] = []

        def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            before = str(gm.graph)
            made.append(partition(gm, ops, rules=rules))
            assert str(gm.graph) == before, "partition() left the caller's graph as it was"
            return made[-1].stitched

        ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
        with torch._dynamo.config.patch(specialize_float=True, **config):
            compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
            torch.manual_seed(0)
            got = compiled(*ours)
        torch.manual_seed(0)
        want = function(*theirs)
        assert pytree.tree_structure(got) == pytree.tree_structure(want)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(ours, theirs)
        assert len(made) == 1
        return made[0]

    return split
