"""The input tensors of a generation's steps, and the way of its new tokens back to the host.

Copies are asynchronous, from new pinned memory, and to the host into two buffers in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from graphpass.ranks.group import wait_for
from graphpass.text.lora import ORDER, SLOTS, LoraAdapters
from graphpass.text.paged.metadata import pinned_memory
from graphpass.text.scheduler import Ints, StepPlan


class StepTensors:
    """Builds a step's input tensors on the device, with one copy from the host, and takes its new tokens.

    Decoding rows read their token from the result of the step before, unless all texts are on the host. A step with the
    same rows as the one before copies nothing.
    """

    def __init__(
        self,
        max_num_tokens: int,
        last_rows: Sequence[int],
        device: torch.device,
        adapters: LoraAdapters | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._timeout_s = timeout_s  # of other ranks, which a step waits for
        max_num_reqs, *self._last_shape = last_rows
        self._num_last = self._last_shape[0] if self._last_shape else 1
        self._device, self._adapters = device, adapters
        size = 2 * max_num_tokens + (2 + self._num_last) * max_num_reqs
        size += 0 if adapters is None else adapters.max_loras + max_num_tokens
        num_new = max_num_reqs * self._num_last
        with torch.inference_mode(False):
            self._stage = torch.zeros(size, dtype=torch.int64, device=device)
            #: the new tokens of the last step, int64; rows without a request are undefined
            self.tokens = torch.zeros(num_new, dtype=torch.int64, device=device)
            self._hosts = deque(pinned_memory(num_new, torch.int64, device) for _ in range(2))
        self._copied = deque(torch.cuda.Event() if device.type == "cuda" else None for _ in range(2))
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque(maxlen=2)
        self._row_of = np.zeros(max_num_reqs, dtype=np.int64)
        self._views: dict[str, torch.Tensor] = {}
        self._takes_tokens = False
        self.num_active_loras = 0  #: number of different adapters in the last step

    def inputs(self, plan: StepPlan, texts: Sequence[Ints] | None = None) -> dict[str, torch.Tensor]:
        """The inputs of a step, valid until the next call."""
        if not plan.same_rows:
            self._views, self._takes_tokens = self._staged(plan, texts), False
            return self._views
        if not self._takes_tokens:
            self._views = {**self._views, "input_ids": self.tokens[: plan.num_tokens].unsqueeze(0)}
            self._takes_tokens = True
        self._views["position_ids"].add_(1)
        return self._views

    def _staged(self, plan: StepPlan, texts: Sequence[Ints] | None) -> dict[str, torch.Tensor]:
        num_tokens, num_rows = plan.num_tokens, len(plan.requests)
        num_decodes = int(plan.decodes.sum()) if texts is None else 0
        of_loras = () if self._adapters is None else (self._adapters.max_loras, num_tokens)
        fields = (num_tokens, num_tokens, num_rows * self._num_last, num_decodes, num_decodes, *of_loras)
        host = pinned_memory(sum(fields), torch.int64, self._device)
        self._fill(plan, texts, np.split(host.numpy(), np.cumsum(fields)[:-1]))
        stage = self._stage[: len(host)].copy_(host, non_blocking=True)
        ids, positions, last_rows, sources, targets, *loras = stage.split(fields)
        if num_decodes:
            ids.index_copy_(0, targets, self.tokens.index_select(0, sources))
        views = {"input_ids": ids.unsqueeze(0), "position_ids": positions.unsqueeze(0)}
        views["last_rows"] = last_rows.view(-1, *self._last_shape)
        return views | dict(zip((ORDER, SLOTS), loras, strict=False))

    def _fill(self, plan: StepPlan, texts: Sequence[Ints] | None, fields: Sequence[Ints]) -> None:
        ids, positions, last_rows, sources, targets, *of_loras = fields
        starts, ends = plan.seq_lens - plan.query_lens, np.cumsum(plan.query_lens)
        first = ends - plan.query_lens
        np.add(np.arange(plan.num_tokens), np.repeat(plan.seq_lens - ends, plan.query_lens), out=positions)
        newest = ends[:, None] - np.arange(self._num_last, 0, -1)
        last_rows[:] = np.maximum(first[:, None], newest).reshape(-1)
        if texts is not None:
            rows = zip(texts, starts.tolist(), plan.seq_lens.tolist(), strict=True)
            np.concatenate([text[start:end] for text, start, end in rows], out=ids)
        else:
            for row in np.flatnonzero(~plan.decodes).tolist():
                ids[first[row] : ends[row]] = plan.requests[row].prompt[starts[row] : plan.seq_lens[row]]
            sources[:] = self._row_of[plan.slots[plan.decodes]]
            targets[:] = first[plan.decodes]
            self._row_of[plan.slots] = np.arange(len(plan.requests))
        if self._adapters is not None:
            slots, order, self.num_active_loras = self._adapters.numbers_of([r.adapter for r in plan.requests])
            of_loras[0][:], of_loras[1][:] = order, np.repeat(slots, plan.query_lens)

    def take(self, tokens: torch.Tensor) -> None:
        """Copy a step's tokens, which the next run overwrites."""
        on_device = self.tokens[: len(tokens)].copy_(tokens)
        self._hosts.rotate()
        self._copied.rotate()
        host, copied = self._hosts[0][: len(tokens)].copy_(on_device, non_blocking=True), self._copied[0]
        if copied is not None:
            copied.record(torch.cuda.current_stream(self._device))
        self._pending.append((host, copied))

    def oldest(self) -> list[int]:
        """The tokens of the earliest step that was not read yet, one per row."""
        host, copied = self._pending.popleft()
        if copied is not None:
            wait_for(copied, self._timeout_s)
        tokens: list[int] = host.tolist()
        return tokens

    def forget(self) -> None:
        """Drop the pending copies to the host."""
        self._pending.clear()
