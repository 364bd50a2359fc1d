"""Input tensors and new tokens of a generation's steps.

Copies between host and device are asynchronous: a copy from a host buffer may be pending when the host prepares the
next step. So each class alternates between host buffers or waits for the last copy of a buffer before it writes to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from graphpass.text.scheduler import StepPlan

__all__ = ["HostBuffer", "StepInputs", "StepTokens", "TextInputs"]


class HostBuffer:
    """Host memory for copies to or from a device, pinned on CUDA, with an event behind its last copy.

    Attributes:
        memory: int64 (size,).
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        with torch.inference_mode(False):
            self.memory = torch.zeros(size, dtype=torch.int64, pin_memory=on_cuda)
        self._device = device
        self._copied = torch.cuda.Event() if on_cuda else None

    def mark_copied(self) -> None:
        """Record the event behind a copy that was just enqueued on the current stream."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Block the host until the last copy is done."""
        if self._copied is not None:
            self._copied.synchronize()


class StepInputs:
    """Builds a step's input tensors on the device, with one copy from the host.

    Decoding rows read their token from the result of the step before, on the device. If the step has the same rows as
    the one before (``StepPlan.same_rows``), nothing is copied from the host.

    Args:
        max_num_tokens: most tokens of a step.
        max_num_reqs: most requests of a step.
        device: device of the inputs.
    """

    def __init__(self, max_num_tokens: int, max_num_reqs: int, device: torch.device) -> None:
        size = 2 * max_num_tokens + 3 * max_num_reqs
        self._hosts = deque(HostBuffer(size, device) for _ in range(2))
        with torch.inference_mode(False):
            self._stage = torch.zeros(size, dtype=torch.int64, device=device)
        self._row_of = np.zeros(max_num_reqs, dtype=np.int64)
        self._views: dict[str, torch.Tensor] = {}
        self._takes_tokens = False

    def of(self, plan: StepPlan, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs of a step, valid until the next call.

        Args:
            plan: the step.
            tokens: the new token of each row of the step before, on the device, int64 (most rows,).
        """
        if not plan.same_rows:
            self._views, self._takes_tokens = self._staged(plan, tokens), False
            return self._views
        if not self._takes_tokens:
            self._views = {**self._views, "input_ids": tokens[: plan.num_tokens].unsqueeze(0)}
            self._takes_tokens = True
        self._views["position_ids"].add_(1)
        return self._views

    def _staged(self, plan: StepPlan, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        num_decodes = int(plan.decodes.sum())
        fields = (plan.num_tokens, plan.num_tokens, len(plan.requests), num_decodes, num_decodes)
        self._hosts.rotate()
        host = self._hosts[0]
        host.wait()
        self._fill(plan, np.split(host.memory.numpy()[: sum(fields)], np.cumsum(fields)[:-1]))
        stage = self._stage[: sum(fields)].copy_(host.memory[: sum(fields)], non_blocking=True)
        host.mark_copied()
        ids, positions, last_rows, sources, targets = stage.split(fields)
        if num_decodes:
            ids.index_copy_(0, targets, tokens.index_select(0, sources))
        return {"input_ids": ids.unsqueeze(0), "position_ids": positions.unsqueeze(0), "last_rows": last_rows}

    def _fill(self, plan: StepPlan, fields: Sequence[npt.NDArray[np.int64]]) -> None:
        """Write prompt tokens, positions, last rows, and the source and target indices of decoding rows' tokens."""
        ids, positions, last_rows, sources, targets = fields
        starts, behind = plan.seq_lens - plan.query_lens, np.cumsum(plan.query_lens)
        first = behind - plan.query_lens
        _fill_positions(plan, positions)
        for row in np.flatnonzero(~plan.decodes).tolist():
            ids[first[row] : behind[row]] = plan.requests[row].prompt[starts[row] : plan.seq_lens[row]]
        np.subtract(behind, 1, out=last_rows)
        sources[:] = self._row_of[plan.slots[plan.decodes]]
        targets[:] = first[plan.decodes]
        self._row_of[plan.slots] = np.arange(len(plan.requests))


class TextInputs:
    """Builds the input tensors of steps with drafts, whose tokens are all on the host, with one copy to the device.

    Args:
        max_num_tokens: most tokens of a step.
        last_rows: shape of the model's input of that name, (requests, 1 + k).
        device: device of the inputs.
    """

    def __init__(self, max_num_tokens: int, last_rows: Sequence[int], device: torch.device) -> None:
        max_num_reqs, self._num_last = last_rows
        size = 2 * max_num_tokens + max_num_reqs * self._num_last
        self._host = HostBuffer(size, device)
        with torch.inference_mode(False):
            self._stage = torch.zeros(size, dtype=torch.int64, device=device)

    def of(self, plan: StepPlan, texts: Sequence[npt.NDArray[np.int64]]) -> dict[str, torch.Tensor]:
        """The inputs of a step, valid until the next call.

        Args:
            plan: the step.
            texts: all tokens of each row's request, its drafts included, int64 (tokens,) each.
        """
        fields = (plan.num_tokens, plan.num_tokens, len(plan.requests) * self._num_last)
        self._host.wait()
        memory = self._host.memory[: sum(fields)]
        ids, positions, last_rows = np.split(memory.numpy(), np.cumsum(fields)[:-1])
        rows = zip(texts, (plan.seq_lens - plan.query_lens).tolist(), plan.seq_lens.tolist(), strict=True)
        np.concatenate([text[start:end] for text, start, end in rows], out=ids)
        _fill_positions(plan, positions)
        behind = np.cumsum(plan.query_lens)[:, None]
        last_rows[:] = np.maximum(behind - plan.query_lens[:, None], behind - np.arange(self._num_last, 0, -1)).reshape(
            -1
        )
        stage = self._stage[: sum(fields)].copy_(memory, non_blocking=True)
        self._host.mark_copied()
        on_device = stage.split(fields)
        return {
            "input_ids": on_device[0].unsqueeze(0),
            "position_ids": on_device[1].unsqueeze(0),
            "last_rows": on_device[2].view(-1, self._num_last),
        }


def _fill_positions(plan: StepPlan, positions: npt.NDArray[np.int64]) -> None:
    """Write the position of each token in its request into ``positions``, (tokens,)."""
    behind = np.cumsum(plan.query_lens)
    np.add(np.arange(plan.num_tokens), np.repeat(plan.seq_lens - behind, plan.query_lens), out=positions)


class StepTokens:
    """The new tokens of the last steps: a copy on the device for the next step, and pending copies to the host.

    Args:
        max_num_reqs: most new tokens of a step.
        device: device of the steps.

    Attributes:
        on_device: the new tokens of the last step, int64 (max_num_reqs,); rows without a request are undefined.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.on_device = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._hosts = deque(HostBuffer(max_num_reqs, device) for _ in range(2))
        self._coming: deque[tuple[HostBuffer, int]] = deque(maxlen=len(self._hosts))

    def take(self, tokens: torch.Tensor) -> None:
        """Copy a step's tokens, (rows,), out of the manager's buffer, which the next run overwrites."""
        copied = self.on_device[: len(tokens)].copy_(tokens)
        self._hosts.rotate()
        host = self._hosts[0]
        host.memory[: len(tokens)].copy_(copied, non_blocking=True)
        host.mark_copied()
        self._coming.append((host, len(tokens)))

    def oldest(self) -> list[int]:
        """The tokens of the earliest step that was not read yet, one per row; waits for that step only."""
        host, num_rows = self._coming.popleft()
        host.wait()
        tokens: list[int] = host.memory[:num_rows].tolist()
        return tokens

    def forget(self) -> None:
        """Drop the pending copies to the host: their tokens will not be read."""
        self._coming.clear()
