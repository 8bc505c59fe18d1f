"""attention_paged on a GPU: CUDA graphs replayed with other lengths, pages and values, other streams, chains of launches, torch.compile."""

import dataclasses
import math
import random

import minfer
import pytest
import torch

from tests.attention.cases import cu_seqlens_of
from tests.attention.kv_cache_cases import KV_FORMATS
from tests.attention.paged_cases import DEVICE, Call, PagedTruth, captured, make
from tests.attention.test_gpu import same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("splits", (None, 3))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_graphs_follow_lengths_and_pages(kv_format, splits):
    """One captured call, replayed with other lengths, pages, contents and queries."""
    shape = dict(kv_format=kv_format, heads=(8, 2), head_dims=(128, 128), dtype=torch.bfloat16, queries=2, most=1500)
    call = make([300] * 6, **shape)
    graph, have = captured(call, num_splits=splits, window_left=900)
    for lengths in ([300] * 6, [1500, 0, 0, 0, 0, 0], [1, 64, 0, 999, 65, 2], [0] * 6, [1500] * 6, [0, 0, 0, 0, 0, 31], [17] * 6):
        other = make(lengths, **shape)
        for x, y in zip(call.tensors(), other.tensors(), strict=True):
            x.copy_(y)
        for x in have:
            x.fill_(math.nan)
        graph.replay()
        graph.replay()  # back to back: nothing is left over from the first
        torch.cuda.synchronize()
        options = dict(num_splits=splits, window_left=900)
        problem = PagedTruth(other, options).mismatch(*have)
        assert problem is None, (lengths, problem)
        assert same_bits(have, call.run(**options)), lengths


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_graph_of_a_growing_cache(kv_format):
    """As decode replays it: longer sequences each time, some that end, and the residuals' tokens with them."""
    call = make([1280] * 5, kv_format, (8, 2), (128, 128), torch.float16, most=1280)
    graph, have = captured(call)
    draw, lengths = random.Random(1), [0, 1, 60, 250, 900]
    for step in range(80):
        lengths = [0 if n > 1200 or draw.random() < 0.02 else n + draw.choice((1, 1, 1, 7, 40)) for n in lengths]
        call.seq_lens.copy_(torch.tensor(lengths))
        call.q.normal_()
        for residual in (call.cache.k_residual, call.cache.v_residual):
            if residual is not None:
                residual.normal_()
        for x in have:
            x.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        now = dataclasses.replace(call, lengths=lengths)
        assert same_bits(have, now.run()), (step, lengths)
        if step % 8 == 0:
            problem = PagedTruth(now, {}).mismatch(*have)
            assert problem is None, (step, lengths, problem)


@pytest.mark.parametrize("splits", (None, 16, 33))
def test_graph_of_new_values(splits):
    """Scores stay as they are: parts of a replay differ from those of the one before in their outputs alone."""
    for heads, length in (((8, 8), 3000), ((64, 8), 4096), ((8, 1), 20000)):
        call = make([length], "16bit", heads, (128, 128), torch.bfloat16)
        graph, have = captured(call, num_splits=splits)
        for step in range(200):
            call.cache.v.normal_()
            graph.replay()
            graph.replay()
            assert same_bits(have, call.run(num_splits=splits)), (heads, step)


def test_other_stream():
    """Work is ordered on the current stream: a long kernel before it delays the inputs."""
    for kv_format in KV_FORMATS:
        ready = make([300, 17, 900], kv_format, (8, 2), (128, 128), torch.bfloat16)
        want = ready.run()
        empty = [None if x is None else torch.zeros_like(x) for x in (ready.q, ready.seq_lens, ready.table, *ready.cache[1:])]
        late = Call(empty[0], minfer.KvCache(kv_format, *empty[3:]), ready.lengths, *empty[1:3])
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for x, y in zip(late.tensors(), ready.tensors(), strict=True):
                x.copy_(y, non_blocking=True)
            have = minfer.attention_paged(late.q, late.cache.k, late.cache.v, late.seq_lens, **late.arguments())
            copies = [x * 1 for x in have]
        stream.synchronize()
        assert same_bits(copies, want), kv_format


def test_several_streams():
    """Launches that share the device: parts of the keys that other CTAs have are waited for all the same."""
    calls = [make([3000, 40, 999], kv_format, (32, 8), (128, 128), torch.bfloat16) for kv_format in KV_FORMATS]
    calls += [make([700] * 40, "16bit", (8, 2), (64, 64), torch.float16), make([20000], "int8", (8, 8), (128, 128), torch.float16)]
    want = [call.run() for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        have = []
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                have += [[call.run() for _ in range(2)]]
        torch.cuda.synchronize()
        for results, expected, call in zip(have, want, calls, strict=True):
            assert all(same_bits(x, expected) for x in results), call.cache.kv_format


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_chain(kv_format):
    """Attention of attention, launched to overlap, each reading what the one before it wrote; always the same bits."""
    call = make([900, 0, 129, 71, 4000], kv_format, (8, 2), (128, 128), torch.bfloat16)
    arguments = call.arguments()

    def chain():
        x = call.q
        for i in range(10):
            splits = dict(num_splits=3) if i % 3 == 1 else {}
            x, _ = minfer.attention_paged(x, call.cache.k, call.cache.v, call.seq_lens, **arguments, **splits)
        return x

    first = chain()
    torch.cuda.synchronize()
    assert bool(first.any()) and not first.isnan().any()
    for _ in range(30):
        assert torch.equal(chain(), first)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch._dynamo.reset()

    def layer(q, cache, seq_lens, table, ends):
        options = dict(block_table=table) | cache.scales()
        out, lse = minfer.attention_paged(q * 2, cache.k, cache.v, seq_lens, cu_seqlens_q=ends, max_seqlen_q=16, **options)
        short, short_lse = minfer.attention_paged(q[: len(seq_lens)], cache.k, cache.v, seq_lens, window_left=9, num_splits=4, **options)
        return out[: len(seq_lens)] + short, lse[:, : len(seq_lens)] + short_lse

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    calls = [("int4", (70, 140), (1, 2)), ("int4", (20, 3, 333), (3, 1, 1))]
    calls += [("fp8_e4m3", (70, 40), (1, 2)), ("int8", (9, 64), (1, 2)), ("16bit", (9, 164), (1, 2))] if not dynamic else []
    with torch.inference_mode():
        for kv_format, lengths, queries in calls:
            call = make(lengths, kv_format, (4, 2), (64, 64), torch.bfloat16, queries=list(queries), before=0, after=0)
            args = call.q, call.cache, call.seq_lens, call.table, cu_seqlens_of(queries, DEVICE)
            for have, want in zip(compiled(*args), layer(*args), strict=True):
                torch.testing.assert_close(have, want, rtol=1.6e-2, atol=1e-2)
