"""attention_paged with many queries on a GPU: chunks of prompts over 16-bit pages, and every prefill kernel over fp8, int8 and int4."""

import dataclasses
import itertools
import math

import minfer
import pytest
import torch

from tests.attention.kv_cache_cases import E4M3_NAN
from tests.attention.options import PAGED_OPTIONS, call_options
from tests.attention.paged_cases import (
    CODES,
    DEVICE,
    DTYPE_OF,
    OVER_CODES,
    PAGE_OFF,
    PREFILL,
    QUANTISED,
    PagedTruth,
    captured,
    judge,
    legal,
    make,
    raw,
)
from tests.attention.test_gpu import same_bits, views_of
from tests.gemm.cases import DTYPES, name_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("page_size", (8, 16, 40, 64, 256, None), ids=str)
def test_many_queries(page_size, dtype):
    """Chunks of a prompt over 16-bit pages, which tiles of queries read."""

    def cases():
        for head_dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
            for options in ({}, dict(window_left=60), dict(causal=False)):
                call = make([300, 777, 100], "16bit", (8, 2), head_dims, dtype, queries=90, page_size=page_size)
                yield (head_dims, options), call, options
            options = call_options(PAGED_OPTIONS["all"], 8, dtype, DEVICE)
            ragged = [100, 0, 150, 5, 40, 1]
            call = make([300, 70, 200, 40, 20, 0], "16bit", (8, 2), head_dims, dtype, queries=ragged, page_size=page_size)
            yield (head_dims, ragged), call, options
        many = make([200] * 40, "16bit", (8, 2), (128, 128), dtype, queries=33, page_size=page_size)
        yield "40 sequences", many, dict(window_left=150)

    judge(cases())
    for name, kernel in PREFILL.items():
        if DTYPE_OF[kernel["ab_type"]] == dtype:
            head_dims = (kernel["tile_k"], kernel["head_dim_v"])
            for queries in (1, 7, 200):
                call = make([300, 777, 100], "16bit", (4, 2), head_dims, dtype, queries=queries, page_size=page_size)
                assert call.problem(kernel=name) is None, (name, queries)


# ---- codes -----------------------------------------------------------------------------------------------------------------------


def padded_dims(kernel, kv_format) -> list:
    """Head dimensions that the kernel computes and the format may have: its own, and smaller ones."""
    dims = ((64, 64), (80, 80), (96, 96), (128, 128), (128, 64), (16, 16), (160, 32), (192, 192), (192, 128), (256, 256))
    least = kernel["tile_k"] // 2 if kernel["tile_k"] > 128 else 0
    return [x for x in dims if least < x[0] <= kernel["tile_k"] and legal(kv_format, x)]


def layouts_of(kv_format) -> tuple:
    """Page sizes, contiguous, and the groups of int4."""
    if kv_format == "int4":
        return ((32, (32, 32)), (64, (64, None)), (96, (32, None)), (256, (64, 32)), (None, (32, None)), (None, (64, None)))
    return tuple((size, (64, None)) for size in (8, 16, 40, 64, 256, None))


@pytest.mark.parametrize(("name", "kv_format"), OVER_CODES)
def test_tiles_over_codes(name, kv_format):
    """By name: head dimensions, pages, and lengths at the edges of blocks; chunks behind a prefix, alone and end to end."""
    kernel = CODES[name]
    dtype, dim, n = DTYPE_OF[kernel["ab_type"]], kernel["tile_k"], kernel["tile_n"]
    edges = [n, 1, n - 1, n + 1, 0, 3 * n + 5, 2 * n, 777]

    def cases():
        for head_dims, heads in itertools.product(padded_dims(kernel, kv_format), ((8, 2), (3, 3))):
            yield (head_dims, heads), make(edges, kv_format, heads, head_dims, dtype, queries=90), dict(kernel=name)
        for (size, groups), queries in itertools.product(layouts_of(kv_format), (33, [5, 0, 128, 129, 3, 200, 1, 700])):
            call = make(edges, kv_format, (4, 1), (dim, dim), dtype, queries=queries, page_size=size, groups=groups)
            yield (size, groups, queries), call, dict(kernel=name)
        for queries in (1, 2, 127, 700):
            yield queries, make([777, 700, 5], kv_format, (16, 2), (dim, dim), dtype, queries=queries), dict(kernel=name)
        yield "long", make([9000, 40], kv_format, (4, 2), (dim, dim), dtype, queries=[300, 40]), dict(kernel=name)
        many = [7 * b % 300 for b in range(150)]
        yield "batch", make(many, kv_format, (2, 1), (dim, dim), dtype, queries=[b % 5 * 20 for b in range(150)]), dict(kernel=name)

    judge(cases())


@pytest.mark.parametrize(("name", "kv_format"), OVER_CODES)
def test_options_over_codes(name, kv_format):
    kernel = CODES[name]
    dtype, dim = DTYPE_OF[kernel["ab_type"]], kernel["tile_k"]

    def cases():
        for option in PAGED_OPTIONS:
            for heads, queries in (((8, 2), 100), ((4, 4), [70, 0, 300, 1, 130])):
                options = call_options(PAGED_OPTIONS[option], heads[0], dtype, DEVICE) | dict(kernel=name)
                yield (
                    (option, heads, queries),
                    make([300, 77, 400, 900, 130], kv_format, heads, (dim, dim), dtype, queries=queries),
                    options,
                )
        for left in (0, 31, 32, 63, 64, 127, 128, 300):
            call = make([611, 64, 165, 200], kv_format, (8, 2), (dim, dim), dtype, queries=[200, 64, 1, 40])
            yield ("window", left), call, dict(window_left=left, kernel=name)
        for sharpness, size in ((0.01, 1.0), (4.0, 1.0), (1.0, 1e-2), (1.0, 30.0)):
            call = make([600, 77], kv_format, (8, 2), (dim, dim), dtype, queries=60, sharpness=sharpness)
            for x in (call.cache.v_scale, call.cache.v_residual):
                if x is not None:
                    x.mul_(size)
            yield ("size", sharpness, size), call, dict(kernel=name)

    judge(cases())


@pytest.mark.parametrize("name", [name for name, kv_format in OVER_CODES if kv_format == "fp8_e4m3"])
def test_signs_of_fp8_scales_over_codes(name):
    """Negative ones and 0, of K and of V; one for all heads."""
    kernel = CODES[name]

    def cases():
        for softcap in (0.0, 3.0):
            call = make([300, 77], "fp8_e4m3", (8, 4), (128, 128), DTYPE_OF[kernel["ab_type"]], queries=70)
            call.cache.k_scale.copy_(torch.tensor([0.7, -0.7, 0.0, 1.3]))
            call.cache.v_scale.copy_(torch.tensor([-1.1, 0.0, 0.6, -0.2]))
            yield ("per head", softcap), call, dict(kernel=name, softcap=softcap)
            one = call.cache._replace(k_scale=call.cache.k_scale[1:2], v_scale=call.cache.v_scale[:1])
            yield ("one", softcap), dataclasses.replace(call, cache=one), dict(kernel=name, softcap=softcap)

    judge(cases())


@pytest.mark.parametrize(("name", "kv_format"), OVER_CODES)
def test_queries_of_any_size_over_codes(name, kv_format):
    """Queries beyond float16's range, each row another size, and rows of zeros: only their products with keys must fit."""
    kernel = CODES[name]
    dtype, dim = DTYPE_OF[kernel["ab_type"]], kernel["tile_k"]

    def cases():
        for low, high in ((-30, 0), (0, 30), (-30, 30)) if dtype == torch.bfloat16 else ((-10, 0), (0, 4)):
            call = make([300, 77], kv_format, (8, 2), (dim, dim), dtype, queries=70)
            rows = torch.randint(low, high + 1, (*call.q.shape[:-1], 1), device=DEVICE)
            call.q.copy_(call.q.float().ldexp(rows).clamp(-(2.0**40), 2.0**40))
            call.q[:, 1] = 0
            for options in (dict(scale=2.0**-high * 0.1), dict(scale=2.0**-high * 0.1, softcap=3.0, window_left=100)):
                yield (low, high, options), call, dict(kernel=name) | options

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", QUANTISED)
def test_chunks_over_codes(kv_format, dtype):
    """What the planner chooses: few tiles over long contexts, and many of them; the whole prompt, and a chunk behind a prefix."""

    def cases():
        for head_dim, heads in ((64, (8, 2)), (128, (32, 8)), (256, (8, 4))):
            for lengths, queries in (([700], 700), ([5000], 40), ([4000, 3000], 512), ([300] * 40, 33), ([900, 64, 1], [700, 64, 1])):
                call = make(lengths, kv_format, heads, (head_dim, head_dim), dtype, queries=queries)
                yield (head_dim, heads, lengths[0], queries), call, {}

    judge(cases())


@pytest.mark.parametrize(("name", "kv_format"), OVER_CODES)
def test_pages_before_a_window_over_codes(name, kv_format):
    """They may be gone, and other garbage in what is unused does not change a bit."""
    dtype = DTYPE_OF[CODES[name]["ab_type"]]
    for heads, window in (((8, 2), 60), ((4, 4), 200)):
        call = make([500, 129, 333], kv_format, heads, (128, 128), dtype, queries=70)
        options = dict(kernel=name, window_left=window)
        want = call.run(**options)
        assert PagedTruth(call, options).mismatch(*want) is None
        for garbage in (math.nan, math.inf, 0.0):
            for b, length in enumerate(call.lengths):
                gone = call.table[b, : max(length - 70 - window, 0) // 64].clone()
                known = gone[(gone >= 0) & (gone < call.cache.k.shape[0])].long()
                for x in (call.cache.k, call.cache.v, call.cache.k_scale, call.cache.v_scale):
                    if x is not None and x.dtype in (torch.float16, torch.float32) and x.dim() > 1:
                        x[known] = garbage
                    elif x is not None and x.dtype == torch.float8_e4m3fn:
                        raw(x)[known] = E4M3_NAN
                if garbage == 0.0:
                    call.table[b, : len(gone)] = torch.tensor([PAGE_OFF[i % 3] for i in range(len(gone))], dtype=torch.int32)
            assert same_bits(call.run(**options), want), (heads, window, garbage)


@pytest.mark.parametrize(("name", "kv_format"), OVER_CODES)
def test_graphs_over_codes(name, kv_format):
    """A captured chunk of several tiles, replayed with other lengths, pages, contents and queries."""
    shape = dict(kv_format=kv_format, heads=(8, 2), head_dims=(128, 128), dtype=DTYPE_OF[CODES[name]["ab_type"]], queries=150, most=1500)
    call, options = make([300] * 6, **shape), dict(kernel=name, window_left=900)
    graph, have = captured(call, **options)
    for lengths in ([300] * 6, [1500, 0, 0, 0, 0, 0], [1, 64, 0, 999, 65, 2], [0] * 6, [1500] * 6, [17] * 6):
        other = make(lengths, **shape)
        for x, y in zip(call.tensors(), other.tensors(), strict=True):
            x.copy_(y)
        for x in have:
            x.fill_(math.nan)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        problem = PagedTruth(other, options).mismatch(*have)
        assert problem is None, (lengths, problem)
        assert same_bits(have, call.run(**options)), lengths


@pytest.mark.parametrize(("name", "kv_format"), OVER_CODES)
def test_views_and_offsets_over_codes(name, kv_format):
    """Caches of a layer among others, heads before rows, views of q; pages that begin behind 2^31 codes: the same bits."""
    call = make([300, 200, 129], kv_format, (8, 2), (128, 128), DTYPE_OF[CODES[name]["ab_type"]], queries=70)
    want = call.run(kernel=name)
    assert PagedTruth(call, {}).mismatch(*want) is None
    pair = [raw(x) for x in (call.cache.k, call.cache.v)]
    layers = torch.stack([torch.stack(pair, 1), torch.full_like(torch.stack(pair, 1), 77)], 1)
    for k, v in (layers[:, 0].unbind(1), [x.transpose(1, 2).contiguous().transpose(1, 2) for x in pair]):
        viewed = call.cache._replace(k=k.view(call.cache.k.dtype), v=v.view(call.cache.v.dtype))
        assert same_bits(dataclasses.replace(call, cache=viewed).run(kernel=name), want)
    for label, q in views_of(call.q).items():
        assert same_bits(dataclasses.replace(call, q=q).run(kernel=name), want), label
    count, page = call.cache.k.shape[0], call.cache.k[0].numel()
    first = 2**31 // page + count
    far = minfer.allocate_kv_cache(first + count, 64, 2, 128, kv_format=kv_format, dtype=call.q.dtype, device=DEVICE, batch=3)
    for part in ("k", "v", "k_scale", "v_scale"):
        x = getattr(call.cache, part)
        if x.dim() > 1:
            raw(getattr(far, part))[first:] = raw(x)
    far = far._replace(k_residual=call.cache.k_residual, v_residual=call.cache.v_residual)
    if kv_format == "fp8_e4m3":
        far = far._replace(k_scale=call.cache.k_scale, v_scale=call.cache.v_scale)
    table = torch.where((call.table >= 0) & (call.table < count), call.table + first, call.table)
    assert same_bits(dataclasses.replace(call, cache=far, table=table).run(kernel=name), want)
