"""Few tiles of queries over many keys, which plans outside of the batch-invariant mode divide: numbers against float64, ragged batches
whose lengths the device alone knows, graphs, and calls over tensors."""

import dataclasses
import itertools
import json

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES

from tests.attention.kv_cache_cases import KV_FORMATS
from tests.attention.options import call_options
from tests.attention.paged_cases import DEVICE, captured, judge, make
from tests.attention.test_gpu import same_bits
from tests.gemm.cases import DTYPES, name_of

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.is_available() and not HERE, reason="kernels of 9.0 divide keys so")]

OPTIONS = ({}, dict(window_left=3333), dict(softcap=7.0), dict(sinks=True), dict(window_left=1500, softcap=15.0, sinks=True))


def plan_of(batch, queries, keys, heads, head_dims, dtype, kv_format="16bit", page_size=64, varlen=False, window_left=-1) -> dict:
    """That of attention_paged over a cache of so many keys."""
    sizes = [batch, queries, keys, *heads, *head_dims]
    return json.loads(
        torch.ops.minfer._plan_attention(sizes, DTYPE_NAMES[dtype], window_left, 0, varlen, None, True, 0, kv_format, page_size, False)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_numbers(kv_format, dtype):
    """What nobody sees is NaN."""
    planned = []

    def cases():
        for (head_dims, heads), queries, options in itertools.product(
            (((128, 128), (8, 2)), ((128, 128), (7, 1)), ((64, 64), (4, 4)), ((96, 96), (8, 1)), ((192, 192), (4, 2))), (40, 200), OPTIONS
        ):
            for keys in (6000, 9001):
                window = options.get("window_left", -1)
                plan = plan_of(1, queries, -(-keys // 64) * 64, heads, head_dims, dtype, kv_format, window_left=window)
                planned.append(plan["split_count"] > 1)
                call = make([keys], kv_format, heads, head_dims, dtype, queries=queries)
                yield (head_dims, heads, queries, keys), call, call_options(options, heads[0], dtype, DEVICE)

    judge(cases())
    assert sum(planned) >= len(planned) // 5  # what this test is about


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_ragged(kv_format, dtype):
    """Sequences of any length beside a long one, with as many queries each or with their own number."""

    def cases():
        for lengths, queries in (
            ([8000, 70, 3000, 64], 64), ([8000, 1, 0, 500], 1 if kv_format == "int4" else 33), ([9000, 300, 5000], [100, 7, 64]),
            ([7000, 7000, 100, 4000], [0, 90, 100, 1]),
        ):  # fmt: skip
            for options in (OPTIONS[0], OPTIONS[4]):
                call = make(lengths, kv_format, (8, 2), (128, 128), dtype, queries=queries)
                yield (lengths, queries, list(options)), call, call_options(options, 8, dtype, DEVICE)

    judge(cases())


@pytest.mark.parametrize("kv_format", ("16bit", "fp8_e4m3", "int8"))
def test_graphs_follow_their_lengths(kv_format):
    """A graph captured over a long context, replayed with other lengths, has the bits of calls of these lengths."""
    dtype = torch.float16 if kv_format == "int8" else torch.bfloat16
    call = make([12000, 4000], kv_format, (8, 2), (128, 128), dtype, queries=64, most=12032)
    assert plan_of(2, 64, 12032 + 128, (8, 2), (128, 128), dtype, kv_format)["split_count"] > 1
    graph, have = captured(call)
    for lengths in ([12000, 4000], [11999, 64], [64, 65], [700, 9000], [12000, 4000]):
        call.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(dataclasses.replace(call, lengths=lengths).run(), have), lengths


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_tensors(dtype):
    """attention over tensors, without a cache: a few queries at the end of many keys, causal or not, and one query."""
    for queries, keys, heads, head_dim in ((64, 9000, (8, 2), 128), (1, 20000, (4, 4), 128), (190, 5001, (16, 2), 64)):
        q = torch.randn(1, queries, heads[0], head_dim, device=DEVICE, dtype=dtype)
        k, v = (torch.randn(1, keys, heads[1], head_dim, device=DEVICE, dtype=dtype) for _ in range(2))
        for causal in (False, True):
            out, lse = minfer.attention(q, k, v, causal=causal)
            up = [x.double().repeat_interleave(heads[0] // x.shape[2], 2).transpose(1, 2) for x in (q, k, v)]
            scores = up[0] @ up[1].mT * head_dim**-0.5
            if causal:
                hidden = torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).triu(keys - queries + 1)
                scores = scores.masked_fill(hidden, -torch.inf)
            want = (scores.softmax(-1) @ up[2]).transpose(1, 2)
            assert torch.linalg.vector_norm(out - want) < (4e-3 if dtype == torch.bfloat16 else 6e-4) * torch.linalg.vector_norm(want)
            assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=2e-3)


def test_plans():
    plan = plan_of(1, 64, 32768, (32, 8), (128, 128), torch.bfloat16)
    assert plan["split_count"] > 1 and "splits of each sequence" in plan["reason"]
    assert plan_of(1, 4096, 32768, (32, 8), (128, 128), torch.bfloat16)["split_count"] == 0
    call = make([9000], "16bit", (8, 2), (128, 128), torch.bfloat16, queries=64)
    with minfer.batch_invariant():  # another way to divide them, which no plan outside of the mode has
        want = call.run()
    assert not same_bits(call.run(), want) and torch.allclose(call.run()[0].float(), want[0].float(), atol=2e-2)
