"""The kernels of paged attention: which serves which steps and why, and flash attention by a plain stand-in."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpass import AttentionSupport, BatchDescriptor
from graphpass.compat import operators
from graphpass.compat.operators import PackedSequences
from graphpass.report import KernelUse
from graphpass.text import LayerMask, PagedAttention, PagedLayer
from graphpass.text.paged import kernels, kvcache, pagedattention
from graphpass.text.paged.kernels import kernels_of
from tests.unit.text.paged_reference import Heads, Paged, assert_right, attend_by, kind_of, reference, run, uniform_key
from tests.unit.text.test_paged_attention import PLAIN_HEADS, STEPS

CPU = torch.device("cpu")


def plain_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: PackedSequences,
    *,
    scale: float,
    causal_window: int | None = None,
) -> torch.Tensor:
    """What the kernel does: NaN where it does not write, and it reads nothing but the keys in use."""
    assert causal_window is not None
    bounds, starts, lengths, max_query_len, max_key_len = sequences
    assert len(bounds) == len(starts) == len(lengths) + 1
    out = torch.full_like(query, torch.nan)
    heads = Heads(query.shape[1], key.shape[1], query.shape[2], causal_window)
    for (q0, q1), k0, length in zip(
        itertools.pairwise(bounds.tolist()), starts.tolist(), lengths.tolist(), strict=False
    ):
        assert q1 - q0 <= max_query_len
        assert length <= max_key_len
        own = slice(k0, k0 + length)
        if length == 0:
            out[q0:q1] = 0.0
        elif q1 > q0:
            out[q0:q1] = reference(query[q0:q1] * (scale / heads.scale), key[own], value[own], heads).to(query.dtype)
    return out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The stand-in, which serves every plain layer."""
    attend_by(plain_flash, monkeypatch)
    return monkeypatch


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("page_size", [4, 32], ids=["small pages", "pages of whole sequences"])
@pytest.mark.parametrize("heads", PLAIN_HEADS, ids=str)
def test_keys_are_packed_or_read_in_place(heads: Heads, page_size: int) -> None:
    """Of prompts, decode and drafts, in keys and eagerly; the free positions of pages are NaN."""
    paged = Paged(heads, page_size=page_size, num_pages=160 // page_size + 1, support=AttentionSupport.ALWAYS)
    requests = [paged.begin() for _ in range(3)]
    mixed = BatchDescriptor(20, num_reqs=6)
    for query_lens in STEPS:
        step, tensors = paged.grow(requests, query_lens)
        is_uniform = len(set(query_lens)) == 1
        of_keys: list[BatchDescriptor | None] = [None, mixed]
        if is_uniform and page_size == 32:
            of_keys.append(uniform_key(5, query_lens[0]))
        for key in of_keys:
            metadata = paged.attention.build(step, key)
            kind = "in place" if page_size == 32 else "batched" if is_uniform and key is not mixed else "packed"
            assert kind_of(metadata) == kind
            assert_right(run(paged, tensors, metadata, 20 if key is None else key.num_tokens), tensors)


@pytest.mark.usefixtures("flash")
def test_unused_requests_of_a_key_come_and_go() -> None:
    paged = Paged(Heads(4, 2, 16), page_size=32, num_pages=6)
    requests = [paged.begin() for _ in range(4)]
    for count in (4, 1, 3):
        step, tensors = paged.grow(requests[:count], [1] * count)
        assert_right(run(paged, tensors, paged.attention.build(step, uniform_key(5)), 5), tensors)


def test_the_kernel_is_tried_over_pages(flash: pytest.MonkeyPatch) -> None:
    def fault() -> str | None:
        return kernels.fault_in_place.__wrapped__(CPU, torch.bfloat16, 16)

    def reads_on(query: Any, key: Any, value: Any, sequences: PackedSequences, **options: Any) -> torch.Tensor:
        """A kernel that goes by the starts alone, as torch documents it."""
        lengths = torch.diff(sequences.key_starts).clamp(min=0, max=sequences.max_key_len)
        return plain_flash(query, key, value, sequences._replace(key_lengths=lengths.to(torch.int32)), **options)

    def refuses(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("seqused_k is not supported")

    assert fault() is None
    flash.setattr(operators, "flash_attention", reads_on)
    assert fault() == "with heads of width 16 it attends to wrong keys"
    flash.setattr(operators, "flash_attention", refuses)
    assert fault() == "seqused_k is not supported"


@pytest.mark.parametrize(
    ("sizes", "page_size", "num_pages"),
    [
        ({"max_num_reqs": 40, "max_seq_len": 1001}, 1008, 40),
        ({"max_num_reqs": 1, "max_seq_len": 1001}, 1008, 1),
        ({"max_num_reqs": 19, "max_seq_len": 1 << 17}, 16, 19 << 13),
        ({"max_num_reqs": 20, "max_seq_len": 1 << 17}, 1 << 17, 20),
        ({"max_num_reqs": 40, "max_seq_len": 1001, "num_pages": 7}, 16, 7),
        ({"max_num_reqs": 40, "max_seq_len": 1001, "page_size": 8}, 8, 40 * 126),
    ],
    ids=["whole", "small", "large reserve", "small share", "own number", "own size"],
)
def test_a_page_is_a_whole_sequence_where_that_saves_copies(
    sizes: dict[str, int], page_size: int, num_pages: int, flash: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class StopError(Exception):
        pass

    def stop(layers: Any, **options: Any) -> None:
        given.update(options)
        raise StopError

    model: Any = SimpleNamespace(dtype=torch.bfloat16, device=CPU)
    flash.setattr(pagedattention, "served_layers", lambda *_, **__: [PagedLayer(8, 128)] * 4)
    flash.setattr(pagedattention, "PagedKVCache", stop)
    with pytest.raises(StopError):
        PagedAttention.for_model(model, max_num_tokens=64, **sizes)
    assert (given["page_size"], given["num_pages"]) == (page_size, num_pages)
    flash.setattr(pagedattention, "flash_obstacle", lambda *_: "it runs on CUDA")
    with pytest.raises(StopError):
        PagedAttention.for_model(model, max_num_tokens=64, **sizes)
    assert given["page_size"] == sizes.get("page_size", 16)


def test_a_kernel_that_fails_its_trial_reads_no_pages(flash: pytest.MonkeyPatch) -> None:
    def of_own_rows(query: Any, key: Any, value: Any, sequences: PackedSequences, **options: Any) -> torch.Tensor:
        starts = sequences.query_bounds
        return plain_flash(query, key, value, sequences._replace(key_starts=starts), **options)

    flash.setattr(operators, "flash_attention", of_own_rows)
    paged = Paged(Heads(4, 2, 16), page_size=32, num_pages=6)
    step, tensors = paged.grow([paged.begin(), paged.begin()], [1, 1])
    metadata = paged.attention.build(step, None)
    assert kind_of(metadata) == "batched"
    assert_right(run(paged, tensors, metadata, 2), tensors)


class PlainRowWriter:
    """What the kernel of a write does, by its arguments; rows of slots that the cache does not have are skipped."""

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def write(slots: torch.Tensor, num_slots: int, num_heads: int, *arguments: Any, num_warps: int) -> None:
            *rows, block = arguments
            assert (grid, num_warps) == ((len(slots), num_heads), 1)
            for new, *strides, stored, dim in (rows[:6], rows[6:]):
                assert dim <= block < 2 * max(rows[5], rows[11])
                assert block.bit_count() == 1
                given = new.as_strided((len(slots), num_heads, dim), strides, new.storage_offset())
                for slot, row in zip(slots.tolist(), given, strict=True):
                    if 0 <= slot < num_slots:
                        stored.view(-1)[slot * num_heads * dim :][: num_heads * dim] = row.flatten()

        return write


@pytest.mark.parametrize("key", [uniform_key(5), uniform_key(5, 3), BatchDescriptor(20, num_reqs=6)], ids=str)
@pytest.mark.parametrize("heads", [*PLAIN_HEADS, Heads(4, 2, 16, value_dim=6)], ids=str)
def test_one_kernel_writes_the_keys_and_values_of_full_keys(
    heads: Heads, key: BatchDescriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has the same bits as after two plain writes, also where padded rows are NaN."""
    monkeypatch.setattr(kvcache, "_row_writer", PlainRowWriter)
    query_len = key.num_tokens // key.num_reqs if key.uniform else None
    written = []
    for fault in ("none for cpu", None):
        monkeypatch.setattr(pagedattention, "write_fault", lambda *_, fault=fault: fault)
        paged = Paged(heads, support=AttentionSupport.ALWAYS)
        requests = [paged.begin() for _ in range(3)]
        for query_lens, of_step in (([7, 2, 4], None), ([query_len or 1, query_len or 4, query_len or 2], key)):
            step, tensors = paged.grow(requests, query_lens)
            metadata = paged.attention.build(step, of_step)
            assert metadata.writes_in_one_kernel == (fault is None and of_step is not None)
            outs = run(paged, tensors, metadata, sum(query_lens) if of_step is None else key.num_tokens)
            assert_right(outs, tensors, padded=query_len is None)
        written.append([pages.view(torch.int32) for pages in paged.pages()])
    assert all(torch.equal(plain, fused) for plain, fused in zip(*written, strict=True))


# -- the choice ------------------------------------------------------------------------------------------------------

PLAIN = PagedLayer(2, 64)
TABLES, IN_PLACE, PACKED, MASKED = (
    "varlen_attn over pages (block_table)",
    "flash attention over pages of whole sequences",
    "flash attention over packed keys",
    "scaled_dot_product_attention over gathered keys",
)


Choice = tuple[bool, bool, tuple[KernelUse, ...]]
"""Whether flash attention serves the layers, whether it reads the pages, and which kernel serves which steps."""


def chosen(
    layer: PagedLayer = PLAIN, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", page_size: int = 16
) -> Choice:
    """The choice for two layers, the second one plain."""
    memory: Any = SimpleNamespace(
        device=torch.device(device), dtype=dtype, layers=(layer, None, PLAIN), page_size=page_size
    )
    return kernels_of(memory, 64)


def served(choice: Choice) -> dict[str, str]:
    return {use.kernel: use.serves for use in choice[2]}


def why(choice: Choice, kernel: str) -> str:
    return next(use.why for use in choice[2] if use.kernel == kernel)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU whose flash attention passes its trial."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "fault_in_place", lambda *_: None)
    return monkeypatch


@pytest.mark.usefixtures("gpu")
def test_pages_of_whole_sequences_are_read_in_place_and_keys_of_small_ones_packed_or_gathered() -> None:
    choice = chosen(page_size=64)
    assert served(choice) == {TABLES: "none", IN_PLACE: "all steps", PACKED: "none", MASKED: "none"}
    assert choice[:2] == (True, True)
    choice = chosen()
    assert choice[:2] == (True, False)
    assert served(choice) == {
        TABLES: "none",
        IN_PLACE: "none",
        PACKED: "prompts and mixed steps",
        MASKED: "steps with the same number of tokens in every request",
    }
    assert why(choice, IN_PLACE) == "a page has 16 positions, a sequence up to 64: its keys are apart"


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "none for cpu"),
        ({"dtype": torch.float32}, "not float32"),
        ({"layer": PagedLayer(2, 64, mask=LayerMask(chunk=8))}, "chunked"),
        ({"layer": PagedLayer(2, 64, is_plain=False)}, "soft cap"),
        ({"layer": PagedLayer(2, 64, value_dim=32)}, "64 and 32"),
        ({"layer": PagedLayer(2, 264)}, "264"),
        ({"layer": PagedLayer(2, 20)}, "20"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_other_caches_use_masked_attention_and_the_table_says_why(
    changes: dict[str, Any], reason: str, page_size: int
) -> None:
    choice = chosen(**changes, page_size=page_size)
    assert served(choice) == {TABLES: "none", IN_PLACE: "none", PACKED: "none", MASKED: "all steps"}
    assert reason in why(choice, PACKED)
    assert reason in why(choice, IN_PLACE)


def test_the_gpu_and_this_torch_are_asked(gpu: pytest.MonkeyPatch) -> None:
    def with_tables(q: Any, *, block_table: Any) -> None:
        raise AssertionError

    def without_tables(q: Any) -> None:
        raise AssertionError

    gpu.setattr("torch.nn.attention.varlen.varlen_attn", with_tables)
    assert "last owner" in why(chosen(), TABLES)
    gpu.setattr("torch.nn.attention.varlen.varlen_attn", without_tables)
    assert "has none" in why(chosen(), TABLES)
    gpu.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert "7.5" in why(chosen(), PACKED)
    gpu.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    gpu.setattr(kernels, "fault_in_place", lambda *_: "it attends to wrong keys")
    choice = chosen(page_size=64)
    assert choice[:2] == (True, False)
    assert why(choice, IN_PLACE) == "it attends to wrong keys"
