"""attention_paged with few queries on a GPU: every decode kernel by name, and the planner's choice over shapes, options and values."""

import dataclasses
import itertools
import math
import random

import minfer
import pytest
import torch

from tests.attention.kv_cache_cases import KV_FORMATS
from tests.attention.options import PAGED_OPTIONS, call_options, draw_softmax_options
from tests.attention.paged_cases import DEVICE, DTYPE_OF, GROUPS, KERNELS, UNITS, format_of, judge, legal, make
from tests.gemm.cases import DTYPES, name_of

pytestmark = pytest.mark.gpu

HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (128, 64))
LENGTHS = [1, 77, 128, 1000, 0, 513]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    """Every kernel by name, at its head dimension and at smaller ones, which are padded; edges of slices and of the warps' rounds."""
    kernel = KERNELS[name]
    kv_format, dtype, dim, n = format_of(kernel), DTYPE_OF[kernel["ab_type"]], kernel["tile_k"], kernel["tile_n"]
    edges = [1, n - 1, n, n + 1, 0, 2 * n + 3, 8 * n, 8 * n + 1, 27 * n - 5, 1000]

    def cases():
        dims = ((dim, dim), (dim, dim - 32), (dim - 32, dim - 32), (dim - 32, 32))
        for head_dims, heads, page_size in itertools.product(dims, ((8, 2), (4, 4), (16, 1)), (64, None)):
            if head_dims == (dim, dim) or (heads == (8, 2)) == (page_size is None):
                yield (head_dims, heads, page_size), make(edges, kv_format, heads, head_dims, dtype, page_size=page_size), dict(kernel=name)
        for splits in (1, 3, 256):
            call = make(edges, kv_format, (8, 2), (dim, dim), dtype)
            yield ("splits", splits), call, dict(kernel=name, num_splits=splits)
        for queries in (2, 5, [0, 3, 1, 0, 2, 17, 1, 1, 40, 4]):
            for option in ("plain", "all"):
                options = call_options(PAGED_OPTIONS[option], 8, dtype, DEVICE) | dict(kernel=name)
                yield (queries, option), make(edges, kv_format, (8, 2), (dim, dim), dtype, queries=queries), options
        yield "long", make([5000, 9], kv_format, (8, 2), (dim, dim), dtype), dict(kernel=name)

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format, head_dims", [x for x in itertools.product(KV_FORMATS, HEAD_DIMS) if legal(*x)], ids=str)
def test_head_dims(kv_format, head_dims, dtype):
    def cases():
        for heads, page_size in (((8, 2), 64), ((4, 4), None), ((16, 1), 128)):
            yield (heads, page_size), make(LENGTHS, kv_format, heads, head_dims, dtype, page_size=page_size), {}
        options = call_options(PAGED_OPTIONS["all"], 8, dtype, DEVICE)
        yield "all", make(LENGTHS, kv_format, (8, 2), head_dims, dtype, queries=3), options

    judge(cases())


@pytest.mark.parametrize("head_dims", ((72, 40), (8, 8), (256, 8), (248, 200)), ids=str)
def test_odd_head_dims(head_dims):
    """Multiples of 8 alone, which 16 bits may be; of 16 and 32, the others' least."""
    judge((dtype, make(LENGTHS, "16bit", (4, 2), head_dims, dtype), {}) for dtype in DTYPES)
    least = [(kv_format, (UNITS[kv_format], UNITS[kv_format])) for kv_format in KV_FORMATS]
    judge((x, make(LENGTHS, x[0], (4, 2), x[1], torch.float16), {}) for x in least)


@pytest.mark.parametrize("heads", GROUPS, ids=str)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_heads(kv_format, heads):
    """Rows of a KV head: one, fewer and more than are computed side by side; scales are those of the KV head."""

    def cases():
        for queries, dtype in ((1, torch.bfloat16), (2, torch.float16), ([1, 0, 5, 1], torch.bfloat16)):
            yield queries, make([300, 77, 9, 130], kv_format, heads, (128, 128), dtype, queries=queries), {}

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_page_sizes(kv_format, dtype):
    """From 8 tokens to several slices, powers of two or not; contiguous caches of lengths that are multiples of nothing."""

    def cases():
        for size in (8, 16, 24, 32, 40, 64, 96, 128, 256, 1024, None):
            group = 64 if size is None or size % 64 == 0 else 32
            if kv_format == "int4" and size is not None and size % group != 0:
                continue
            for head_dims, lengths in (((128, 128), [300, 77, 2, 900, 0]), ((256, 256), [257, 100, 1]), ((64, 64), [1023, 8])):
                yield (size, head_dims), make(lengths, kv_format, (8, 2), head_dims, dtype, page_size=size, groups=(group, None)), {}
        if kv_format == "16bit":
            for length in (1, 7, 333, 1001):
                yield length, make([length, length // 2], kv_format, (8, 2), (128, 128), dtype, page_size=None), {}

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", PAGED_OPTIONS)
def test_options(name, kv_format, dtype):
    def cases():
        for head_dim, heads, queries in ((128, (8, 2), 1), (64, (8, 2), 3), (128, (4, 4), [2, 0, 1, 4, 5]), (256, (16, 1), 1)):
            options = call_options(PAGED_OPTIONS[name], heads[0], dtype, DEVICE)
            yield (
                (head_dim, heads, queries),
                make([300, 77, 2, 900, 0], kv_format, heads, (head_dim, head_dim), dtype, queries=queries),
                options,
            )

    judge(cases())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_windows(kv_format):
    """Edges at, before and behind those of slices, pages and the residual; with both kinds of splits."""

    def cases():
        for left in (0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 127, 200, 511, 2**31 - 1, 2**40):
            for queries, options in ((1, {}), (3, dict(num_splits=2)), (2, dict(causal=False))):
                call = make([411, 64, 65, 200, 31, 1], kv_format, (8, 2), (128, 128), torch.bfloat16, queries=queries)
                yield (left, queries, options), call, dict(window_left=left) | options

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_scales(kv_format, dtype):
    """Flat and peaked softmaxes, small and large values, all scores far below 0 or growing along the keys."""

    def cases():
        for sharpness, size in ((0.01, 1.0), (4.0, 1.0), (1.0, 1e-2), (1.0, 30.0)):
            call = make([600, 77, 1], kv_format, (8, 2), (128, 128), dtype, queries=2, sharpness=sharpness)
            for x in (call.cache.v if kv_format == "16bit" else call.cache.v_scale, call.cache.v_residual):
                if x is not None:
                    x.mul_(size)
            yield (sharpness, size), call, {}
        if kv_format == "16bit":
            ramp = torch.linspace(0, 3, 640, device=DEVICE)
            for name, factor in (("rising", ramp), ("falling", ramp.flip(0)), ("low", -torch.ones_like(ramp))):
                call = make([600, 77, 1], kv_format, (8, 2), (128, 128), dtype, page_size=None, most=640)
                call.q.abs_()
                call.cache.k.copy_(call.cache.k.abs() * factor[:, None, None])
                yield name, call, {}
                yield (name, "splits"), call, dict(num_splits=7)

    judge(cases())


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed):
    draw = random.Random(seed)
    kv_format, dtype = KV_FORMATS[seed % 4], DTYPES[seed // 4 % 2]
    unit = UNITS[kv_format]
    head_dim = draw.choice((64, 128, 256, unit * draw.randint(1, 256 // unit)))
    head_dim_v = draw.choice((head_dim, head_dim, unit * draw.randint(1, head_dim // unit)))
    batch, longest = draw.choice((1, 2, 5, 40)), draw.choice((20, 300, 2000))
    lengths = [draw.choice((0, 1, draw.randrange(longest), draw.randrange(longest))) for _ in range(batch)]
    queries = draw.choice((1, 1, draw.randint(1, 6), [draw.choice((0, 1, 1, draw.randrange(9))) for _ in range(batch)]))
    heads = draw.choice(GROUPS)
    groups = (draw.choice((32, 64)), None)
    page_size = draw.choice((64, 128, None)) if kv_format == "int4" else draw.choice((8, 16, 64, 72, 256, None))
    options = dict(causal=draw.random() < 0.8)
    if draw.random() < 0.4:
        options["window_left"] = draw.choice((0, 1, draw.randrange(longest)))
    options |= draw_softmax_options(draw, head_dim)
    if draw.random() < 0.5:
        options["num_splits"] = draw.choice((1, 2, 3, 16, 256))
    call = make(lengths, kv_format, heads, (head_dim, head_dim_v), dtype, queries=queries, page_size=page_size, groups=groups)
    judge([((kv_format, dtype, heads, queries, page_size, options), call, call_options(options, heads[0], dtype, DEVICE))])


def test_empty():
    for batch, seqlen_q, heads in ((0, 1, (4, 2)), (2, 0, (4, 2)), (2, 1, (0, 2)), (2, 1, (0, 0))):
        for kv_format in KV_FORMATS:
            call = make([0] * batch, kv_format, heads, (64, 64), torch.float16, queries=seqlen_q)
            out, lse = call.run()
            assert out.shape == (batch, seqlen_q, heads[0], 64) and lse.shape == (batch, heads[0], seqlen_q)
            assert not out.any() and bool((lse == -math.inf).all())
    sinks = torch.randn(4, device=DEVICE).half()
    call = make([0, 0], "16bit", (4, 2), (64, 64), torch.float16, queries=3, page_size=None)
    for cache in (call.cache, call.cache._replace(k=call.cache.k[:, :0], v=call.cache.v[:, :0])):
        out, lse = dataclasses.replace(call, cache=cache).run(sinks=sinks)
        assert not out.any()
        torch.testing.assert_close(lse, sinks.float()[None, :, None].expand(2, 4, 3), rtol=1e-5, atol=1e-5)
    # Rows of q, and no sequence that they could belong to.
    call = make([], "16bit", (4, 2), (64, 64), torch.float16, queries=[])
    q = torch.randn(300, 4, 64, device=DEVICE).half()
    ends = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out, lse = minfer.attention_paged(
        q, call.cache.k, call.cache.v, call.seq_lens, block_table=call.table, cu_seqlens_q=ends, max_seqlen_q=0
    )
    assert not out.any() and bool((lse == -math.inf).all())
