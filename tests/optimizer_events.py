"""What changes between two steps of an optimizer, and what its steps change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import optim

Event = Callable[[int, optim.Optimizer], None]


def nothing(number: int, optimizer: optim.Optimizer) -> None:
    """No event between the steps."""


def parameters(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def state_of(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """Copies of the parameters and of the optimizer's tensors."""
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    return [t.detach().clone() for t in (*parameters(optimizer), *state)]


def lr_is_refilled() -> Event:
    def event(number: int, optimizer: optim.Optimizer) -> None:
        if number in (3, 5):
            optimizer.param_groups[0]["lr"].mul_(0.5)

    return event


def state_is_loaded() -> Event:
    saved: list[dict[str, Any]] = []

    def event(number: int, optimizer: optim.Optimizer) -> None:
        if number == 2:
            saved.append(copy.deepcopy(optimizer.state_dict()))
        if number == 5:
            optimizer.load_state_dict(saved.pop())

    return event


def data_is_replaced() -> Event:
    def event(number: int, optimizer: optim.Optimizer) -> None:
        if number in (3, 5):
            for p in parameters(optimizer):
                p.data = p.data * 0.5

    return event
