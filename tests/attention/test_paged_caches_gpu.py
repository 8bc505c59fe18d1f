"""attention_paged on a GPU: what a cache holds, and where it lies.

Residuals of int4, pages that are gone, garbage in what is unused; views, contiguous caches, offsets and strides beyond 2^31 elements.
"""

import dataclasses
import itertools
import math

import minfer
import pytest
import torch

from tests.attention.kv_cache_cases import E4M3_NAN, KV_FORMATS
from tests.attention.paged_cases import DEVICE, PAGE_OFF, PagedTruth, judge, make, raw
from tests.attention.test_gpu import same_bits, views_of
from tests.gemm.cases import DTYPES, name_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("groups", tuple(itertools.product((32, 64), (32, 64, 128))), ids=str)
def test_residuals_of_every_length(groups, dtype):
    """int4: no token in the residual, all of them, as many as it holds and a group more; groups of tokens and channels of each size."""

    def cases():
        lengths = [*range(groups[0] + 34), 300, 301, 1000, 7 * groups[0], 7 * groups[0] - 1]
        for page_size, options in ((64, {}), (None, dict(window_left=20)), (128, dict(num_splits=3))):
            yield (page_size, options), make(lengths, "int4", (4, 2), (128, 128), dtype, page_size=page_size, groups=groups), options
        dims = (256, 256) if groups[1] == 128 else (96, 96) if groups[1] == 32 else (192, 64)
        yield dims, make(lengths, "int4", (4, 2), dims, dtype, page_size=128, groups=groups, queries=2), {}

    judge(cases())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pages_before_a_window(kv_format):
    """They may be gone: NaN, and no longer in the block table. The same bits."""
    call = make([500, 129, 333], kv_format, (8, 2), (128, 128), torch.float16, queries=2)
    for options in (dict(window_left=60), dict(window_left=60, num_splits=3)):
        before = call.table.clone()
        want = call.run(**options)
        assert PagedTruth(call, options).mismatch(*want) is None
        for b, length in enumerate(call.lengths):
            pages = (length - 2 - 60) // 64
            gone = before[b, :pages].long()
            for x in (call.cache.k, call.cache.v, call.cache.k_scale, call.cache.v_scale):
                if x is not None and x.dtype in (torch.float16, torch.float32) and x.dim() > 1:
                    x[gone] = math.nan
                elif x is not None and x.dtype == torch.float8_e4m3fn:
                    raw(x)[gone] = E4M3_NAN
            call.table[b, :pages] = torch.tensor([PAGE_OFF[i % 3] for i in range(pages)], dtype=torch.int32)
        assert same_bits(call.run(**options), want), options
        assert PagedTruth(call, options).mismatch(*want) is None
        call = make([500, 129, 333], kv_format, (8, 2), (128, 128), torch.float16, queries=2)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_what_is_unused_does_not_matter(kv_format):
    """Other garbage gives the same bits: infinities and large numbers where NaN were, other pages where none were named."""
    call = make([500, 129, 0, 64], kv_format, (8, 2), (128, 128), torch.bfloat16)
    want = call.run()
    floats = [x for x in call.cache[1:] if x is not None and x.dtype in (torch.float16, torch.bfloat16, torch.float32)]
    unused = [x.isnan() for x in floats]
    off = (call.table < 0) | (call.table >= call.cache.k.shape[0])
    for garbage in (math.inf, -60000.0, 0.0):
        for x, where in zip(floats, unused, strict=True):
            x.masked_fill_(where, garbage)
        assert same_bits(call.run(), want), garbage
        call.table.masked_fill_(off, int(garbage == 0.0))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_views(kv_format):
    """Caches of a layer among others, K and V side by side, heads before rows; queries, lengths, tables and scales that are strided."""
    call = make([300, 40, 100], kv_format, (8, 2), (128, 128), torch.float16, queries=2)
    want = call.run()
    assert PagedTruth(call, {}).mismatch(*want) is None
    pair = [raw(x) for x in (call.cache.k, call.cache.v)]
    layers = torch.stack([torch.stack(pair, 1), torch.full_like(torch.stack(pair, 1), 77)], 1)
    beside = layers[:, 0].unbind(1)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in pair]
    for k, v in (beside, swapped):
        viewed = call.cache._replace(k=k.view(call.cache.k.dtype), v=v.view(call.cache.v.dtype))
        assert not viewed.k.is_contiguous()
        strided_lens, strided_table = torch.stack([call.seq_lens, call.seq_lens + 1], 1)[:, 0], call.table.t().contiguous().t()
        have = dataclasses.replace(call, cache=viewed, seq_lens=strided_lens, table=strided_table).run()
        assert same_bits(have, want)
        wide_table = torch.cat([call.table, call.table], 1)[:, : call.table.shape[1]]
        assert same_bits(dataclasses.replace(call, cache=viewed, table=wide_table).run(), want)
    for name, q in views_of(call.q).items():
        assert same_bits(dataclasses.replace(call, q=q).run(), want), name
    if kv_format == "fp8_e4m3":
        as_bytes = call.cache._replace(k=call.cache.k.view(torch.uint8), v=call.cache.v.view(torch.uint8))
        assert same_bits(dataclasses.replace(call, cache=as_bytes).run(), want)
        one = call.cache._replace(k_scale=call.cache.k_scale[:1], v_scale=call.cache.v_scale[:1])
        same = call.cache._replace(k_scale=call.cache.k_scale[:1].repeat(2), v_scale=call.cache.v_scale[:1].repeat(2))
        assert same_bits(dataclasses.replace(call, cache=one).run(), dataclasses.replace(call, cache=same).run())
    elif kv_format != "16bit":
        every_second = {name: torch.stack([x, x], -1)[..., 0] for name in ("k_scale", "v_scale") for x in [getattr(call.cache, name)]}
        assert same_bits(dataclasses.replace(call, cache=call.cache._replace(**every_second)).run(), want)


def test_paged_contiguous_and_tensors_agree():
    """The same keys in pages, in a contiguous cache and as tensors; with splits the first two have the same bits."""
    call = make([300, 64, 77], "16bit", (8, 2), (128, 128), torch.bfloat16, queries=3, most=320)
    pages = call.table[:, :5].long()
    pages[(pages < 0) | (pages >= call.cache.k.shape[0])] = 0
    k, v = (x[pages].flatten(1, 2) for x in (call.cache.k, call.cache.v))
    contiguous = dataclasses.replace(call, cache=call.cache._replace(k=k, v=v), table=None)
    assert same_bits(contiguous.run(num_splits=4, window_left=90), call.run(num_splits=4, window_left=90))
    out, lse = call.run()
    for b, length in enumerate(call.lengths):
        one, one_lse = minfer.attention(call.q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length], causal=True)
        torch.testing.assert_close(out[b], one[0], rtol=1.6e-2, atol=1e-2)
        torch.testing.assert_close(lse[b], one_lse[0], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_large_offsets(kv_format):
    """Pages that begin behind 2^31 elements of the caches."""
    near = make([300, 64, 129], kv_format, (8, 2), (128, 128), torch.bfloat16)
    count, page = near.cache.k.shape[0], near.cache.k[0].numel()
    pages = 2**31 // page + 2 * count
    far = minfer.allocate_kv_cache(pages, 64, 2, 128, kv_format=kv_format, device=DEVICE, batch=3)
    first = pages - count
    for name in ("k", "v", "k_scale", "v_scale"):
        x = getattr(near.cache, name)
        if x is not None and x.dim() > 1:
            raw(getattr(far, name))[first:] = raw(x)
    if kv_format == "fp8_e4m3":
        far = far._replace(k_scale=near.cache.k_scale, v_scale=near.cache.v_scale)
    table = torch.where((near.table >= 0) & (near.table < count), near.table + first, near.table)
    far = far._replace(k_residual=near.cache.k_residual, v_residual=near.cache.v_residual)
    assert far.k.numel() > 2**31
    for options in ({}, dict(num_splits=3)):
        want = near.run(**options)
        assert PagedTruth(near, options).mismatch(*want) is None
        assert same_bits(dataclasses.replace(near, cache=far, table=table).run(**options), want), options


def test_large_strides():
    """Sequences of q and of contiguous caches 2^31 elements apart."""
    far = 2**31 + 1024
    whole = torch.empty(far + 2**20, device=DEVICE, dtype=torch.bfloat16)
    call = make([300, 129], "16bit", (8, 2), (128, 128), torch.bfloat16, queries=2, page_size=None)

    def spread(x, offset):
        view = whole.as_strided(x.shape, (far, *x.stride()[1:]), offset)
        return view.copy_(x)

    k, v = spread(call.cache.k, 0), spread(call.cache.v, 2**18)
    apart = dataclasses.replace(call, q=spread(call.q, 2**19), cache=call.cache._replace(k=k, v=v))
    for options in ({}, dict(num_splits=3)):
        assert same_bits(apart.run(**options), call.run(**options)), options
