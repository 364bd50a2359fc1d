"""Attention over pages on a GPU: the kernels that only CUDA has, both dtypes, and real graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import graphpass as gp
from graphpass import AttentionSupport, BatchDescriptor, CUDAGraphMode
from graphpass.text import PagedKVCache, PagedLayer, PagedRequests
from graphpass.text.paged.kernels import fault_in_place, write_fault
from tests.gpu.shared import graph_of
from tests.unit.text.paged_reference import (
    Heads,
    Paged,
    StepTensors,
    assert_right,
    kind_of,
    run,
    run_eager,
    uniform_key,
)

pytestmark = pytest.mark.cuda

FULL = CUDAGraphMode.FULL
PLAIN_HEADS = [Heads(4, 2, 16), Heads(16, 8, 128), Heads(4, 4, 64), Heads(4, 2, 64, window=5)]
MASKED_HEADS = [
    Heads(4, 2, 64, chunk=6),
    Heads(4, 2, 64, value_dim=32),
    Heads(4, 2, 64, softcap=2.0),
    Heads(4, 2, 64, has_sinks=True),
    Heads(4, 2, 264),
]
"""Layers that flash attention does not serve."""
HEADS = [*PLAIN_HEADS, *MASKED_HEADS]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
PAGE_SIZES = pytest.mark.parametrize("page_size", [4, 32], ids=["small pages", "pages of whole sequences"])
STEPS = [[5, 3, 9], [4, 1, 2], [1, 1, 1], [3, 3, 3], [1, 6, 1]]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@DTYPES
@PAGE_SIZES
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_eager_steps_and_mixed_keys(heads: Heads, page_size: int, dtype: torch.dtype, cuda: torch.device) -> None:
    """Half precision goes to flash attention, float32 to one masked attention, as do uniform batches of small pages."""
    paged = Paged(heads, page_size=page_size, dtype=dtype, device=cuda, support=AttentionSupport.ALWAYS)
    requests = [paged.begin() for _ in range(3)]
    key = BatchDescriptor(20, num_reqs=6)
    for query_lens in STEPS:
        step, tensors = paged.grow(requests, query_lens)
        eager = paged.attention.build(step, None)
        has_flash, is_mixed = dtype is torch.bfloat16 and heads in PLAIN_HEADS, len(set(query_lens)) > 1
        by_flash = "in place" if page_size == 32 else "packed" if is_mixed else "batched"
        assert kind_of(eager) == (by_flash if has_flash else "batched")
        assert_right(run(paged, tensors, eager, 25, torch.nan), tensors)
        assert_right(run(paged, tensors, paged.attention.build(step, key), 20, torch.nan), tensors)
    assert not any(pages[0].any() for pages in paged.pages())


@DTYPES
@PAGE_SIZES
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_uniform_keys(heads: Heads, query_len: int, page_size: int, dtype: torch.dtype, cuda: torch.device) -> None:
    """Real rows have the same bits whatever padding holds."""
    results = []
    for padding in (0.0, 7.5, torch.nan):
        paged = Paged(heads, page_size=page_size, dtype=dtype, device=cuda)
        requests = [paged.begin() for _ in range(3)]
        run_eager(paged, requests, [7, 2, 4])
        key = uniform_key(5, query_len, 24)
        step, tensors = paged.grow(requests, [query_len] * 3)
        outs = run(paged, tensors, paged.attention.build(step, key), key.num_tokens, padding)
        assert_right(outs, tensors, padded=padding == 0.0)
        results.append([out[: 3 * query_len] for out in outs])
    for outs in results[1:]:
        assert all(torch.equal(out, first) for out, first in zip(outs, results[0], strict=True))


@DTYPES
@PAGE_SIZES
@pytest.mark.parametrize(
    ("key", "query_lens"),
    [
        (uniform_key(4, 1, 32), [[1, 1, 1], [1, 1], [1, 1, 1]]),
        (uniform_key(4, 3), [[3, 3, 3], [3, 3], [3]]),
        (BatchDescriptor(20, num_reqs=6), [[4, 1, 2], [9, 1], [1, 2, 3]]),
    ],
    ids=["decode", "drafts", "mixed"],
)
def test_a_captured_op_follows_its_refilled_metadata(
    key: BatchDescriptor, query_lens: list[list[int]], page_size: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    paged = Paged(Heads(4, 2, 64), page_size=page_size, dtype=dtype, device=cuda, support=AttentionSupport.ALWAYS)
    requests = [paged.begin() for _ in range(3)]
    run_eager(paged, requests, [7, 2, 4])
    example = paged.attention.example(key, query_len=key.num_tokens // key.num_reqs if key.uniform else None)
    metadata = paged.attention.build(example, key)
    shape = (key.num_tokens, 2, 64)
    inputs = [StepTensors(paged.random(shape[0], 4, 64), *(paged.random(*shape) for _ in range(3))) for _ in range(2)]
    outs = [torch.empty_like(layer.query) for layer in inputs]

    def layers() -> None:
        with gp.set_forward_context(metadata):
            for n, (layer, out) in enumerate(zip(inputs, outs, strict=True)):
                torch.ops.graphpass.paged_attention(layer.query, layer.key, layer.value, out, n, paged.heads.scale, -1)

    with graph_of(layers) as (graph, _):
        for counts in query_lens:
            step, tensors = paged.grow(requests[: len(counts)], counts)
            assert paged.attention.build(step, key) is metadata
            for layer, given in zip(inputs, tensors, strict=True):
                for name in ("query", "key", "value"):
                    getattr(layer, name).copy_(Paged.padded(getattr(given, name), key.num_tokens, 7.5))
            graph.replay()
            assert_right(outs, tensors)


def test_tables_reach_the_gpu_although_the_host_goes_on(cuda: torch.device) -> None:
    """Steps are built faster than a busy stream takes them: none overwrites what another's transfer reads."""
    paged = Paged(Heads(2, 2, 16), device=cuda)
    key = uniform_key(4)
    metadata = paged.attention.build(PagedRequests([1], [1], [[2]]), key)
    copies = []
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    for page in range(2, 34):
        assert paged.attention.build(PagedRequests([1], [1], [[page]]), key) is metadata
        copies.append(metadata.block_tables[0, 0].clone())
    assert torch.stack(copies).tolist() == list(range(2, 34))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_flash_attention_reads_pages_of_whole_sequences(head_dim: int, dtype: torch.dtype, cuda: torch.device) -> None:
    assert fault_in_place(cuda, dtype, head_dim) is None


@pytest.mark.parametrize("heads", [Heads(16, 2, 64), Heads(4, 4, 128)], ids=str)
def test_long_sequences_in_place(heads: Heads, cuda: torch.device) -> None:
    """Over several blocks of keys; the kernel splits them among multiprocessors. The pages had other owners before."""
    paged = Paged(
        heads, num_layers=1, page_size=1024, num_pages=3, max_num_tokens=2048, max_seq_len=1024, dtype=torch.bfloat16,
        device=cuda,
    )  # fmt: skip
    for query_lens in ([700, 130, 257], [300, 1, 64]):
        requests = [paged.begin() for _ in query_lens]
        run_eager(paged, requests, query_lens)
        for counts in ([1, 1, 1], [4, 4, 4], [1, 5, 2]):
            run_eager(paged, requests, counts)
        for request in requests:
            paged.end(request)


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(128, 128), (24, 40)], ids=str)
def test_one_kernel_writes_keys_and_values(dim: int, value_dim: int, dtype: torch.dtype, cuda: torch.device) -> None:
    """The bits of two plain writes, in slots of several pages and in the scratch page, for any strides."""
    assert write_fault(cuda, dtype) is None
    layer, slots = PagedLayer(3, dim, value_dim=value_dim), torch.tensor([17, 8, 4, 23, 5], device=cuda)
    new = [torch.randn(3, 5, dim, device=cuda).transpose(0, 1), torch.randn(5, 3, value_dim, device=cuda)]
    keys, values = (rows.to(dtype).index_fill_(0, torch.tensor([2, 4], device=cuda), torch.nan) for rows in new)
    written, launched = [], []
    for in_one_kernel in (False, True):
        memory = PagedKVCache([layer], num_pages=4, page_size=4, dtype=dtype, device=cuda).memories[0]
        assert memory is not None
        memory.write(slots, keys, values, in_one_kernel=in_one_kernel)
        written.append([tensor.nan_to_num(7.5) for tensor in (memory.keys, memory.values)])
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            memory.write(slots, keys, values, in_one_kernel=in_one_kernel)
            torch.cuda.synchronize()
        launched.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events()))
    assert all(torch.equal(plain, fused) for plain, fused in zip(*written, strict=True))
    assert launched == [2, 1]
    memory.write(torch.tensor([-1, 24], device=cuda), keys[:2], values[:2], in_one_kernel=True)
    assert torch.equal(memory.keys.nan_to_num(7.5), written[1][0]), "slots that the cache does not have are skipped"


@pytest.mark.parametrize(
    "key", [None, uniform_key(4), BatchDescriptor(20, num_reqs=6)], ids=["eager", "decode", "mixed"]
)
def test_steps_of_full_keys_write_in_one_kernel(key: BatchDescriptor | None, cuda: torch.device) -> None:
    paged = Paged(Heads(4, 2, 16), device=cuda, support=AttentionSupport.ALWAYS)
    metadata = paged.attention.build(PagedRequests([1], [1], [[2]]), key)
    assert metadata.writes_in_one_kernel == (key is not None)
    assert paged.attention.kernels()[-1].serves == "FULL graphs"
