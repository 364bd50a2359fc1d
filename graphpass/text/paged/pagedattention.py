"""Builds the metadata of paged attention for each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphpass.dispatch.grid import round_up
from graphpass.errors import ShapeError, positive
from graphpass.keys import AttentionSupport, BatchDescriptor
from graphpass.paddedcalls import PaddedMemory
from graphpass.report import KernelUse
from graphpass.text.paged.huggingface import served_layers
from graphpass.text.paged.kernels import (
    BatchedKeys,
    FlashKeys,
    flash_obstacle,
    kernels_of,
    write_fault,
)
from graphpass.text.paged.kvcache import (
    FIRST_LIVE_PAGE,
    SCRATCH_PAGE,
    LayerMask,
    PageAllocator,
    PagedKVCache,
    PagedLayer,
    PagedRequests,
)
from graphpass.text.paged.metadata import NewTensor, PagedMetadata, Step, TableLayout, check_fits, pinned_memory
from graphpass.text.paged.op import PAGED_ATTENTION

_OfKey = tuple[npt.NDArray[np.int32], dict[str, npt.NDArray[Any]], torch.Tensor, PagedMetadata]
"""Of a FULL key: tables on the host, flat and by name, those on the device, and the metadata."""
_MAX_DECODE_QUERY_LEN = 8
"""An eager batch of requests of equal length counts as prefill if each has more tokens than this."""
_PAGE_SIZE = 16
_MAX_RESERVED_BYTES, _MAX_RESERVED_SHARE = 256 << 20, 0.1
"""Limits of the two reserved pages of a cache whose pages are whole sequences; one is enough."""
_MASK_ALIGNMENT = 8
"""In elements; CUDA's memory-efficient kernel copies a mask of other row lengths."""


class PagedAttention:
    """Builds the metadata of steps over one paged KV cache; an ``AttentionMetadataBuilder``.

    The bound of sequence lengths is the key's field ``max_seq_len``, if the dispatcher has sizes for it
    (``capture_sizes={"num_tokens": [...], "max_seq_len": [256, 1024]}``), and otherwise ``max_seq_len`` of this object.
    The next step of a FULL key overwrites its tables, in the order of the current stream.

    Args:
        cache: the KV cache.
        max_num_reqs: most requests of a step.
        max_num_tokens: most tokens of a step, padding included.
        max_seq_len: longest sequence, in tokens.
        support: batches that FULL graphs may serve. Mixed batches are possible (``ALWAYS``), but their graphs gather
            ``num_reqs * max_seq_len`` keys in every layer.

    Raises:
        OptionError: a limit is below 1.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        max_seq_len: int,
        support: AttentionSupport = AttentionSupport.UNIFORM_BATCH,
    ) -> None:
        self.max_num_reqs = positive(max_num_reqs, "max_num_reqs of paged attention")
        self.max_num_tokens = max_num_tokens = positive(max_num_tokens, "max_num_tokens of paged attention")
        self.max_seq_len = max_seq_len = positive(max_seq_len, "max_seq_len of paged attention")
        self.cache = cache
        self.pages = PageAllocator(cache.num_pages)  #: allocates the cache's pages, for schedulers
        self.support = support  #: the batches with which it can be captured
        self._length_step = math.lcm(cache.page_size, _MASK_ALIGNMENT)
        longest = max(round_up(max_seq_len, self._length_step), _power_of_two(max_num_tokens), max_num_reqs + 1)
        of_layers = [LayerMask() if layer is None else layer.mask.within(max_seq_len) for layer in cache.layers]
        masks = sorted({mask for mask, layer in zip(of_layers, cache.layers, strict=True) if layer is not None})
        #: the fields of the metadata that are equal for all steps
        self._fixed: dict[str, Any] = {
            "cache": cache,
            "longest": max_seq_len,
            "masks": tuple(masks),
            "mask_of": tuple(masks.index(mask) if mask in masks else 0 for mask in of_layers),
            "numbers": torch.arange(longest, dtype=torch.int32, device=cache.device),
            "value_offsets": torch.tensor([0, cache.num_slots], device=cache.device).view(2, 1, 1),
        }
        self._has_flash, self._in_place, self._uses = kernels_of(cache, max_seq_len)
        self._write_fault = write_fault(cache.device, cache.dtype)  # guard: paged_write_tried
        self._has_positions = any(layer is not None and layer.query_scale is not None for layer in cache.layers)
        self._by_key: dict[BatchDescriptor, _OfKey] = {}
        self._shared: PaddedMemory[str] = PaddedMemory()

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        num_pages: int | None = None,
        page_size: int | None = None,
        max_num_reqs: int,
        max_num_tokens: int,
        max_seq_len: int,
        support: AttentionSupport = AttentionSupport.UNIFORM_BATCH,
    ) -> PagedAttention:
        """Paged attention with a cache for a Hugging Face decoder; sets the decoder to use it.

        The decoder runs once, on a row of a few tokens, to find out what its layers need. It is then called as
        ``model(input_ids=[1, tokens], position_ids=[1, tokens], use_cache=False)``, the tokens of all requests
        concatenated.

        Args:
            model: the decoder.
            num_pages: live pages of the cache; None: enough for ``max_num_reqs`` sequences of ``max_seq_len`` tokens.
            page_size: positions of a page. None: a whole sequence if ``num_pages`` is None too and flash attention can
                then read the pages without a copy, unless the two reserved pages would take over 256 MiB and over a
                tenth of the cache; otherwise 16.
            max_num_reqs: as for the class.
            max_num_tokens: as for the class.
            max_seq_len: as for the class.
            support: as for the class.

        Raises:
            OptionError: a layer does not use the attention that is set, or needs attention that is not supported; the
                model is then as before.
        """
        layers = served_layers(model, max_seq_len=positive(max_seq_len, "max_seq_len of paged attention"))
        if page_size is None:
            in_place = num_pages is None and flash_obstacle(layers, max_seq_len, model.dtype, model.device) is None
            whole = _whole_sequence(layers, max_num_reqs, max_seq_len, model.dtype) if in_place else None
            page_size = whole or _PAGE_SIZE
        if num_pages is None:
            num_pages = max_num_reqs * -(-max_seq_len // positive(page_size, "page_size of a KV cache"))
        cache = PagedKVCache(
            layers,
            num_pages=num_pages,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
        )
        return cls(
            cache,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            support=support,
        )

    def kernels(self) -> tuple[KernelUse, ...]:
        """Which attention kernel serves which steps, and why."""
        fault = self._write_fault
        serves, why = ("none", fault) if fault else ("FULL graphs", "elsewhere two kernels start sooner than Triton's")
        return (*self._uses, KernelUse("one kernel that writes keys and values", serves, why))

    @property
    def splitting_ops(self) -> tuple[str, ...]:
        """The op that stays eager in PIECEWISE."""
        return (PAGED_ATTENTION,)

    def extra(self, attention: PagedRequests) -> tuple[tuple[str, int], ...]:
        """The key field that bounds the longest sequence."""
        return (("max_seq_len", int(max(attention.seq_lens, default=0))),)

    def example(self, key: BatchDescriptor, *, query_len: int | None) -> PagedRequests:
        """Requests without history that fill ``key``, all on the scratch page."""
        num_reqs = key.num_reqs or min(key.num_tokens // (query_len or 1), self.max_num_reqs)
        if query_len is None:
            each, more = divmod(key.num_tokens, num_reqs)
            lengths = [min(each + (n < more), self._key_length(key)) for n in range(num_reqs)]
        else:
            lengths = [query_len] * num_reqs
        tables = [[SCRATCH_PAGE] * -(-length // self.cache.page_size) for length in lengths]
        return PagedRequests(lengths, lengths, tables, is_scratch=True)

    def build(self, attention: PagedRequests, key: BatchDescriptor | None) -> PagedMetadata:
        """The metadata of one step: of the FULL key whose graph reads it, or at real sizes without a graph.

        Raises:
            ShapeError: the requests contradict each other, have invalid pages, or do not fit the key or the limits.
        """
        step = Step.of(attention, self.cache)
        device = self.cache.device
        if key is None:
            layout = self._eager_layout(step)
            pinned = pinned_memory(layout.num_int32(), torch.int32, device)
            layout.fill(layout.views(pinned.numpy(), np.int64), step)
            return self._metadata(layout, pinned.to(device, non_blocking=True), None)
        host, host_tables, flat, metadata = self._by_key.get(key) or self._added_key(key, step)
        metadata.layout.check(step)
        metadata.layout.fill(host_tables, step)
        pinned = pinned_memory(len(host), torch.int32, device)
        pinned.numpy()[:] = host
        flat.copy_(pinned, non_blocking=True)
        return metadata

    def _added_key(self, key: BatchDescriptor, step: Step) -> _OfKey:
        """The tables and the metadata of ``key``, if the step fits it."""
        layout = self._key_layout(key)
        layout.check(step)
        host = np.zeros(layout.num_int32(), dtype=np.int32)
        with torch.inference_mode(False):  # a later step may be built outside of it
            flat = torch.zeros(len(host), dtype=torch.int32, device=self.cache.device)
        of_key = host, layout.views(host, np.int64), flat, self._metadata(layout, flat, key)
        return self._by_key.setdefault(key, of_key)

    def _eager_layout(self, step: Step) -> TableLayout:
        """The real sizes of a step."""
        limits = {"num_reqs": self.max_num_reqs, "num_tokens": self.max_num_tokens, "max_seq_len": self.max_seq_len}
        check_fits(step, **limits)
        shortest, most = (int(step.query_lens.min()), int(step.query_lens.max())) if step.num_tokens else (1, 1)
        is_uniform = shortest == most <= _MAX_DECODE_QUERY_LEN
        return self._layout(
            num_tokens=step.num_tokens,
            num_reqs=len(step.query_lens),
            query_len=most if is_uniform else None,
            max_query_len=most,
            longest=int(step.seq_lens.max(initial=1)),
            num_keys=int(step.seq_lens.sum()),
        )

    def _key_layout(self, key: BatchDescriptor) -> TableLayout:
        """The sizes of one FULL key."""
        num_tokens, longest = key.num_tokens, self._key_length(key)
        num_reqs = key.num_reqs or min(num_tokens, self.max_num_reqs)
        is_within = num_tokens <= self.max_num_tokens and num_reqs <= self.max_num_reqs and longest <= self.max_seq_len
        if not is_within or num_reqs < 1 or (key.uniform and num_tokens % num_reqs):
            raise ShapeError(
                f"paged attention cannot serve the key {key}",
                expected=f"at most {self.max_num_tokens} tokens, {self.max_num_reqs} requests and sequences of "
                f"{self.max_seq_len}; in a uniform key whole requests",
                found=f"{num_tokens} tokens, {num_reqs} requests, sequences of {longest}",
                remedy="create the dispatcher and PagedAttention with the same limits",
            )
        # In a mixed key one request may have all tokens.
        query_len = num_tokens // num_reqs if key.uniform else None
        return self._layout(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            query_len=query_len,
            max_query_len=query_len or _power_of_two(num_tokens),
            longest=longest,
            num_keys=num_reqs * longest,
        )

    def _layout(
        self, *, num_tokens: int, num_reqs: int, query_len: int | None, max_query_len: int, longest: int, num_keys: int
    ) -> TableLayout:
        is_packed = query_len is None and self._has_flash and not self._in_place
        return TableLayout(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            query_len=query_len,
            max_query_len=max_query_len,
            limit=longest,
            max_seq_len=round_up(longest, self._length_step),
            num_keys=num_keys if is_packed else 0,
            page_size=self.cache.page_size,
            has_positions=self._has_positions,
        )

    def _key_length(self, key: BatchDescriptor) -> int:
        length = dict(key.extra).get("max_seq_len", self.max_seq_len)
        assert isinstance(length, int)
        return length

    def _metadata(self, layout: TableLayout, flat: torch.Tensor, key: BatchDescriptor | None) -> PagedMetadata:
        new: NewTensor = self._new_tensor if key is None else self._shared_tensor
        kind = FlashKeys if self._in_place or layout.num_keys else BatchedKeys
        return kind(
            **self._fixed,
            **layout.views(flat, torch.int64),
            layout=layout,
            new=new,
            # Padded tokens of a uniform key belong to unused requests, whose result is zero anyway.
            is_padded=key is not None and not key.uniform,
            writes_in_one_kernel=key is not None and self._write_fault is None,
        )

    def _new_tensor(self, _: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # it may be written outside of it
            return torch.empty(shape, dtype=dtype, device=self.cache.device)

    def _shared_tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory that the steps of FULL keys share, one at a time. Existing blocks never move."""
        return self._shared.view(name, shape, torch.empty(0, dtype=dtype, device=self.cache.device))


def _whole_sequence(
    layers: Sequence[PagedLayer | None], max_num_reqs: int, max_seq_len: int, dtype: torch.dtype
) -> int | None:
    """The size of a page for a whole sequence; None if the reserved ones would take too much memory."""
    size = round_up(max_seq_len, _MASK_ALIGNMENT)
    elements = sum(layer.num_kv_heads * (layer.head_dim + layer.dim_of_values) for layer in layers if layer is not None)
    reserved = FIRST_LIVE_PAGE * size * elements * dtype.itemsize
    is_small = reserved <= _MAX_RESERVED_BYTES or max_num_reqs * _MAX_RESERVED_SHARE >= FIRST_LIVE_PAGE
    return size if is_small else None


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
