"""minfer.attention_paged without a GPU: the CPU kernel against the definition over what a cache holds, checks, fakes, tracing."""

import math
import re
from itertools import pairwise

import minfer
import pytest
import torch
from minfer.reference import attention as reference_attention, kv_cache as reference_kv_cache

from tests.attention.cases import GROUPS, bad_calls, bad_paged_calls, bad_varlen_calls, cu_seqlens_of
from tests.attention.kv_cache_cases import KV_FORMATS, NOWHERE, Contents, group_tokens_of, make_cache
from tests.attention.options import PAGED_OPTIONS, SOFTMAX_SCHEMA, call_options, definition
from tests.attention.test_cpu import assert_defined
from tests.contracts.test_registration import check_op, need
from tests.gemm.cases import DTYPES

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = (1, 37, 0, 64, 95, 130)


def head_dims_of(kv_format):
    return (64, 32) if kv_format == "int4" else (32, 16)


def make_q(*shape, dtype, sharpness=1.0):
    return (torch.randn(shape) * sharpness).to(dtype)


def check_paged(q, cache, seq_lens, table, options, *, cu_seqlens_q=None, max_seqlen_q=1):
    """Every sequence against the definition over `Contents`."""
    lengths = dict(block_table=table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    out, lse = minfer.attention_paged(q, cache.k, cache.v, seq_lens, **lengths, **cache.scales(), **options)
    contents, batch = Contents(cache, table), len(seq_lens)
    assert out.shape == (*q.shape[:-1], contents.head_dim_v) and lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
    assert out.is_contiguous() and lse.is_contiguous()
    ends = [b * max_seqlen_q for b in range(batch + 1)] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    outside = torch.ones(q.shape[0], dtype=torch.bool)
    for b, (first, last) in enumerate(pairwise(ends)):
        own = (out[b], lse[b], q[b]) if q.dim() == 4 else (out[first:last], lse[:, first:last], q[first:last])
        length = int(seq_lens[b])
        left = options.get("window_left", -1)
        begin = max(0, length - own[2].shape[0] - left) if left >= 0 else 0  # before it, nothing may be read
        k, v = contents.sequence(b, length, begin)
        assert_defined(*own, k, v, dict(causal=True) | options)
        outside[b if q.dim() == 4 else slice(first, last)] = False
    if q.dim() == 3:
        assert not out[outside].any() and bool((lse[:, outside] == -math.inf).all())
    return out, lse


# ---- values ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", (True, False), ids=("paged", "contiguous"))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", PAGED_OPTIONS)
def test_against_the_definition(name, kv_format, paged):
    """Every option over every format, one query and several, sequences of no, one, less and more than whole pages."""
    dtype = DTYPES[len(name) % 2]
    options = call_options(PAGED_OPTIONS[name], 4, dtype, "cpu")
    cache, seq_lens, table = make_cache(LENGTHS, kv_format, 2, head_dims_of(kv_format), dtype, paged=paged)
    for seqlen_q in (1, 3):
        q = make_q(len(LENGTHS), seqlen_q, 4, head_dims_of(kv_format)[0], dtype=dtype, sharpness=2)
        check_paged(q, cache, seq_lens, table, options)


@pytest.mark.parametrize("heads", GROUPS, ids=str)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_heads(kv_format, heads):
    """Scales are those of the KV head that a query head reads."""
    cache, seq_lens, table = make_cache((5, 70), kv_format, heads[1], head_dims_of(kv_format), torch.float16)
    check_paged(make_q(2, 2, heads[0], head_dims_of(kv_format)[0], dtype=torch.float16), cache, seq_lens, table, {})


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", ("plain", "window", "all"))
def test_ragged_queries(name, kv_format):
    """No query, one, more than the sequence has keys; rows of q outside every sequence."""
    lengths, dtype = ((40, 0), (64, 1), (70, 5), (3, 6), (0, 2), (100, 3)), torch.bfloat16
    cache, seq_lens, table = make_cache([keys for keys, _ in lengths], kv_format, 2, head_dims_of(kv_format), dtype)
    ends = cu_seqlens_of([queries for _, queries in lengths], first=2)
    q = make_q(int(ends[-1]) + 3, 4, head_dims_of(kv_format)[0], dtype=dtype)
    check_paged(q, cache, seq_lens, table, call_options(PAGED_OPTIONS[name], 4, dtype, "cpu"), cu_seqlens_q=ends, max_seqlen_q=6)


@pytest.mark.parametrize("group_tokens, group_channels, page_size", ((32, 32, 32), (64, 64, 64), (32, 64, 128)))
@pytest.mark.parametrize("window_left", (-1, 20))
def test_residuals_of_every_length(window_left, group_tokens, group_channels, page_size):
    """int4: no token in the residual, all of them, as many as it holds and one group more."""
    lengths = range(group_tokens + 34)
    groups = dict(group_tokens=group_tokens, group_channels=group_channels, page_size=page_size)
    cache, seq_lens, table = make_cache(lengths, "int4", 1, (64, 64), torch.float16, **groups)
    assert group_tokens_of(cache) == group_tokens and cache.v_scale.shape[2] == 2 * 64 // group_channels
    check_paged(make_q(len(lengths), 1, 2, 64, dtype=torch.float16), cache, seq_lens, table, dict(window_left=window_left))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pages_before_a_window(kv_format):
    """They may be gone: NaN, and no longer in the block table."""
    cache, seq_lens, table = make_cache((200, 129), kv_format, 2, head_dims_of(kv_format), torch.float16)
    q = make_q(2, 2, 4, head_dims_of(kv_format)[0], dtype=torch.float16)
    want = check_paged(q, cache, seq_lens, table, dict(window_left=60))
    for b, pages in ((0, 2), (1, 1)):  # of 64 tokens, before tokens 138 and 67
        gone = table[b, :pages].long()
        for x in (cache.k, cache.v, cache.k_scale, cache.v_scale):
            if x is not None and x.dtype in (torch.float16, torch.float32) and x.dim() > 1:
                x[gone] = math.nan
        table[b, :pages] = NOWHERE
    for have, expected in zip(check_paged(q, cache, seq_lens, table, dict(window_left=60)), want, strict=True):
        assert torch.equal(have, expected)
    with pytest.raises(RuntimeError, match=rf"block_table must name one of the \d+ pages, got {NOWHERE} of sequence 0"):
        check_paged(q, cache, seq_lens, table, dict(window_left=75))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_every_key_counts(kv_format):
    """A NaN among a sequence's keys or values reaches its queries, and nobody else's: poison would be seen."""
    cache, seq_lens, table = make_cache((70, 40), kv_format, 1, head_dims_of(kv_format), torch.float16)
    q = make_q(2, 1, 2, head_dims_of(kv_format)[0], dtype=torch.float16)
    for name in ("k", "v"):
        for place in ("first", "last"):
            poisoned = type(cache)(*(x.clone() if isinstance(x, torch.Tensor) else x for x in cache))
            codes, scale = getattr(poisoned, name), getattr(poisoned, f"{name}_scale")
            page, row = int(table[0, 0]), 0
            if place == "last":
                page, row = int(table[0, 1]), 5
            if kv_format == "int4" and place == "last":
                getattr(poisoned, f"{name}_residual")[0, 5] = math.nan
            elif kv_format == "int4" and name == "k":
                scale[page, :, 0] = math.nan
            elif kv_format in ("int8", "int4"):
                scale[page, ..., row] = math.nan
            elif kv_format == "fp8_e4m3":
                codes.view(torch.uint8)[page, row] = 0x7F
            else:
                codes[page, row] = math.nan
            out, _ = minfer.attention_paged(q, poisoned.k, poisoned.v, seq_lens, block_table=table, **poisoned.scales())
            assert bool(out[0].isnan().all()) and bool(out[1].isfinite().all()), (name, place)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_in_float64_it_is_the_definition(kv_format):
    """reference_attention.attention_over_cache of a float64 q: the truth of the GPU tests."""
    cache, seq_lens, table = make_cache((1, 70, 0, 64), kv_format, 2, head_dims_of(kv_format), torch.bfloat16)
    q = torch.randn(4, 3, 4, head_dims_of(kv_format)[0], dtype=torch.float64)
    sinks = torch.randn(4).bfloat16()
    out, lse = reference_attention.attention_over_cache(q, cache, seq_lens, table, window_left=40, softcap=5.0, sinks=sinks)
    assert out.dtype == lse.dtype == torch.float64
    contents = Contents(cache, table)
    for b, length in enumerate(seq_lens.tolist()):
        k, v = contents.sequence(b, length, max(0, length - 43))
        want, want_lse = definition(q[b], k, v, causal=True, window_left=40, softcap=5.0, sinks=sinks)
        torch.testing.assert_close(out[b], want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[b], want_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_gather(kv_format):
    """Keys and values from any token on: in pages, across the residual's begin, in the residual alone."""
    for paged in (True, False):
        cache, seq_lens, table = make_cache((90, 64, 0), kv_format, 2, head_dims_of(kv_format), torch.bfloat16, paged=paged)
        contents = Contents(cache, table)
        for b, begins in enumerate(((0, 5, 32, 63, 64, 70, 90), (0, 10, 64), (0,))):
            for begin in begins:
                have = reference_kv_cache.gather(cache, b, begin, int(seq_lens[b]), table, torch.float64)
                for x, want in zip(have, contents.sequence(b, int(seq_lens[b]), begin), strict=True):
                    torch.testing.assert_close(x, want, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_layouts_of_queries(kv_format):
    """With a batch mode, end to end with one length, with cu_seqlens_q: the same bits."""
    cache, seq_lens, table = make_cache((70, 5, 0), kv_format, 2, head_dims_of(kv_format), torch.float16)
    q = make_q(3, 2, 4, head_dims_of(kv_format)[0], dtype=torch.float16)
    options = dict(block_table=table) | cache.scales()
    out, lse = minfer.attention_paged(q, cache.k, cache.v, seq_lens, **options)
    flat, flat_lse = minfer.attention_paged(q.flatten(0, 1), cache.k, cache.v, seq_lens, max_seqlen_q=2, **options)
    ends = cu_seqlens_of((2, 2, 2))
    ragged, ragged_lse = minfer.attention_paged(
        q.flatten(0, 1), cache.k, cache.v, seq_lens, cu_seqlens_q=ends, max_seqlen_q=9, num_splits=3, **options
    )
    assert torch.equal(out.flatten(0, 1), flat) and torch.equal(flat, ragged)
    assert torch.equal(lse.transpose(0, 1).flatten(1), flat_lse) and torch.equal(flat_lse, ragged_lse)


def test_paged_contiguous_and_tensors_agree():
    """The same keys in pages, in a contiguous cache and as tensors."""
    cache, seq_lens, table = make_cache((70, 64), "16bit", 2, (32, 16), torch.float16)
    q = make_q(2, 3, 4, 32, dtype=torch.float16)
    out, lse = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table, window_left=30)
    k, v = (x[table[:, :2].clamp(max=x.shape[0] - 1).long()].flatten(1, 2) for x in (cache.k, cache.v))
    for have, want in zip(minfer.attention_paged(q, k, v, seq_lens, window_left=30), (out, lse), strict=True):
        assert torch.equal(have, want)
    for b, length in enumerate(seq_lens.tolist()):
        one, one_lse = minfer.attention(q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length], causal=True, window_left=30)
        torch.testing.assert_close(out[b], one[0], rtol=torch.finfo(torch.float16).eps, atol=1e-5)
        torch.testing.assert_close(lse[b], one_lse[0])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_views(kv_format):
    """Caches of a layer among others, K and V side by side, heads before rows; lengths and pages that are strided."""
    cache, seq_lens, table = make_cache((70, 40), kv_format, 2, (64, 64), torch.float16)
    q = make_q(2, 1, 4, 64, dtype=torch.float16)
    want = check_paged(q, cache, seq_lens, table, {})
    raw = [x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (cache.k, cache.v)]
    layers = torch.stack([torch.stack(raw, 1), torch.zeros_like(torch.stack(raw, 1))], 1)
    beside = layers[:, 0].unbind(1)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in raw]
    for k, v in (beside, swapped):
        viewed = cache._replace(k=k.view(cache.k.dtype), v=v.view(cache.v.dtype))
        assert not viewed.k.is_contiguous()
        strided_lens, strided_table = torch.stack([seq_lens, seq_lens], 1)[:, 0], table.t().contiguous().t()
        for have, expected in zip(check_paged(q, viewed, strided_lens, strided_table, {}), want, strict=True):
            assert torch.equal(have, expected)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_formats_by_name_and_by_dtype(kv_format):
    """auto is what the dtype says; fp8 may lie in bytes; a scale may be one for all heads."""
    cache, seq_lens, table = make_cache((70, 40), kv_format, 2, head_dims_of(kv_format), torch.float16)
    q = make_q(2, 1, 4, head_dims_of(kv_format)[0], dtype=torch.float16)
    options = dict(block_table=table) | cache.scales()
    want = minfer.attention_paged(q, cache.k, cache.v, seq_lens, **options)
    calls = [(cache.k, cache.v, options | dict(kv_format="auto"))]
    if kv_format == "fp8_e4m3":
        calls.append((cache.k.view(torch.uint8), cache.v.view(torch.uint8), options))
        one = options | dict(k_scale=cache.k_scale[:1], v_scale=cache.v_scale[:1])
        same = options | dict(k_scale=cache.k_scale[:1].repeat(2), v_scale=cache.v_scale[:1].repeat(2))
        for have, expected in zip(*(minfer.attention_paged(q, cache.k, cache.v, seq_lens, **x) for x in (one, same)), strict=True):
            assert torch.equal(have, expected)
    for k, v, other in calls:
        for have, expected in zip(minfer.attention_paged(q, k, v, seq_lens, **other), want, strict=True):
            assert torch.equal(have, expected)


def test_empty():
    for batch, seqlen_q, heads in ((0, 1, (4, 2)), (2, 0, (4, 2)), (2, 1, (0, 2)), (2, 1, (0, 0))):
        for kv_format in KV_FORMATS:
            cache, seq_lens, table = make_cache((0,) * batch, kv_format, heads[1], head_dims_of(kv_format), torch.float16)
            q = make_q(batch, seqlen_q, heads[0], head_dims_of(kv_format)[0], dtype=torch.float16)
            out, lse = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table, **cache.scales())
            assert out.shape == (*q.shape[:3], head_dims_of(kv_format)[1]) and lse.shape == (batch, heads[0], seqlen_q)
            assert not out.any() and bool((lse == -math.inf).all())
    cache, seq_lens, _ = make_cache((0, 0), "16bit", 2, (32, 16), torch.float16, paged=False)
    q, sinks = make_q(2, 3, 4, 32, dtype=torch.float16), torch.randn(4).half()
    out, lse = minfer.attention_paged(q, cache.k[:, :0], cache.v[:, :0], seq_lens, sinks=sinks)
    assert not out.any() and torch.equal(lse, sinks.float()[None, :, None].expand(2, 4, 3))
    assert minfer.attention_paged(q[:0, 0], cache.k[:0], cache.v[:0], seq_lens[:0], max_seqlen_q=0)[0].shape == (0, 4, 16)


def test_kernel_and_splits_are_checked_and_ignored():
    kernel = minfer.kernels("attention")[0]["name"]
    cache, seq_lens, table = make_cache((70, 40), "16bit", 2, (32, 16), torch.float16)
    q = make_q(2, 1, 4, 32, dtype=torch.float16)
    want = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table)
    for options in (dict(kernel=kernel), dict(num_splits=1), dict(num_splits=256)):
        for have, expected in zip(minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table, **options), want, strict=True):
            assert torch.equal(have, expected)


# ---- checks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_calls_that_cannot_be_right(device):
    for name, (message, args, options) in bad_paged_calls(device).items():
        with pytest.raises(RuntimeError) as error:
            minfer.attention_paged(*args, **options)
        assert re.search(f"minfer::attention_paged: .*{message}", str(error.value)), (name, error.value)


def test_checks_of_the_cuda_functions():
    """Calls that cannot be right are refused before anything needs a device, in the words of the CPU's checks: so are CPU tensors."""
    ops, cuda = torch.ops.minfer, torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    calls = [(ops.attention, (message, (q, k, v), options)) for message, q, k, v, options in bad_calls().values()]
    calls += [(ops.attention_varlen, call) for call in bad_varlen_calls().values()]
    calls += [(ops.attention_paged, call) for call in bad_paged_calls().values()]
    for op, (message, args, options) in calls:
        if "kernel" not in options:  # names are looked up last, by the plan
            with pytest.raises(RuntimeError, match=f"{op._qualified_op_name}: .*{message}"):
                op.default.redispatch(cuda, *args, **options)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_operands_of_another_device(kv_format):
    cache, seq_lens, table = make_cache((5, 70), kv_format, 2, (64, 64), torch.float16)
    args = (make_q(2, 1, 4, 64, dtype=torch.float16), cache.k, cache.v, seq_lens)
    options = dict(block_table=table, sinks=torch.zeros(4).half()) | cache.scales()
    names = ("k_cache", "v_cache", "seq_lens")
    calls = {name: ((*args[:i], args[i].to("meta"), *args[i + 1 :]), options) for i, name in enumerate(names, 1)}
    calls |= {name: (args, options | {name: x.to("meta")}) for name, x in options.items() if isinstance(x, torch.Tensor)}
    assert len(calls) == {"16bit": 5, "int4": 9}.get(kv_format, 7)
    for name, (positional, keywords) in calls.items():
        with pytest.raises(RuntimeError, match=f"minfer::attention_paged: {name} must be on q's device cpu, got meta"):
            minfer.attention_paged(*positional, **keywords)


def test_values_that_cannot_be_right():
    """Lengths, pages and cu_seqlens_q, which are the host's on CPU."""
    cache, seq_lens, table = make_cache((40, 100), "16bit", 2, (32, 16), torch.float16)
    pages, ints = cache.k.shape[0], lambda *x: torch.tensor(x, dtype=torch.int32)
    q, flat = make_q(2, 1, 4, 32, dtype=torch.float16), make_q(3, 4, 32, dtype=torch.float16)
    missing, negative = table.clone(), table.clone()
    missing[1, 1], negative[0, 0] = pages, -1
    for x, lens, options, message in (
        (q, ints(40, -1), dict(block_table=table), "seq_lens must not be negative, got -1 of sequence 1"),
        (q, ints(40, 193), dict(block_table=table), "seq_lens must be at most the 192 rows of a sequence, got 193 of sequence 1"),
        (q, ints(40, 129), dict(block_table=table), f"block_table must name one of the {pages} pages, got {NOWHERE} of sequence 1"),
        (q, seq_lens, dict(block_table=missing), f"block_table must name one of the {pages} pages, got {pages} of sequence 1"),
        (q, seq_lens, dict(block_table=negative), f"block_table must name one of the {pages} pages, got -1 of sequence 0"),
        (flat, seq_lens, dict(cu_seqlens_q=ints(0, 1, 4), max_seqlen_q=9), "cu_seqlens_q must lie in 0 to tokens_q = 3, got 0 to 4"),
        (flat, seq_lens, dict(cu_seqlens_q=ints(-1, 1, 3), max_seqlen_q=9), "cu_seqlens_q must lie in 0 to tokens_q = 3, got -1 to 3"),
        (flat, seq_lens, dict(cu_seqlens_q=ints(2, 1, 3), max_seqlen_q=9), "cu_seqlens_q must ascend, got 2 before 1"),
        (flat, seq_lens, dict(cu_seqlens_q=ints(0, 1, 3)), "max_seqlen_q must be at least the 2 rows of sequence 1, got 1"),
    ):
        with pytest.raises(RuntimeError, match="minfer::attention_paged: " + message):
            minfer.attention_paged(x, cache.k, cache.v, lens, **dict(block_table=table) | options)
    contiguous = cache.k[:2], cache.v[:2]
    with pytest.raises(RuntimeError, match="seq_lens must be at most the 64 rows of a sequence, got 100 of sequence 1"):
        minfer.attention_paged(q, *contiguous, seq_lens)
    # Of a sequence without queries, no page is needed.
    ends = dict(cu_seqlens_q=cu_seqlens_of((1, 0)))
    assert minfer.attention_paged(q[:1, 0], cache.k, cache.v, seq_lens, block_table=missing, **ends)[0].shape == (1, 4, 16)


# ---- registration ----------------------------------------------------------------------------------------------------------------


def test_schema():
    op = torch.ops.minfer.attention_paged.default
    assert str(op._schema).startswith(
        "minfer::attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, *, Tensor? block_table=None, "
        "Tensor? cu_seqlens_q=None, int max_seqlen_q=1, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_residual=None, "
        'Tensor? v_residual=None, str kv_format="auto", bool causal=True, float? scale=None, int window_left=-1, '
        f"{SOFTMAX_SCHEMA}, int? num_splits=None, str? kernel=None) -> (Tensor"
    )
    assert torch.Tag.needs_fixed_stride_order in op.tags and len(op._schema.returns) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_opcheck(kv_format, device):
    cache, seq_lens, table = make_cache((70, 40), kv_format, 2, head_dims_of(kv_format), torch.bfloat16, device)
    q = make_q(2, 3, 4, head_dims_of(kv_format)[0], dtype=torch.bfloat16).to(device)
    options = call_options(PAGED_OPTIONS["all"], 4, torch.bfloat16, device) | cache.scales() | dict(block_table=table)
    if kv_format == "fp8_e4m3":  # of float8, opcheck cannot say whether it was written
        cache = cache._replace(k=cache.k.view(torch.uint8), v=cache.v.view(torch.uint8))
    check_op(torch.ops.minfer.attention_paged.default, (q, cache.k, cache.v, seq_lens), options)
    ragged = options | dict(cu_seqlens_q=cu_seqlens_of((2, 3), device, first=1), max_seqlen_q=4, num_splits=2)
    check_op(torch.ops.minfer.attention_paged.default, (q.flatten(0, 1), cache.k, cache.v, seq_lens), ragged)


def test_meta_is_like_cpu():
    on_meta = lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x  # noqa: E731
    for kv_format in KV_FORMATS:
        for dtype in DTYPES:
            for lengths in ((70, 5), ()):
                cache, *rest = make_cache(lengths, kv_format, 2, head_dims_of(kv_format), dtype)
                # Outputs are contiguous whatever q is.
                q = make_q(len(lengths), 4, 3, head_dims_of(kv_format)[0], dtype=dtype).transpose(1, 2)
                for queries, options in ((q, {}), (q.flatten(0, 1), dict(max_seqlen_q=3))):
                    args, options = (queries, cache.k, cache.v, rest[0]), options | dict(block_table=rest[1]) | cache.scales()
                    reals = minfer.attention_paged(*args, **options)
                    fakes = minfer.attention_paged(*map(on_meta, args), **{name: on_meta(x) for name, x in options.items()})
                    for fake, real in zip(fakes, reals, strict=True):
                        assert (fake.shape, fake.dtype, fake.stride(), fake.device.type) == (real.shape, real.dtype, real.stride(), "meta")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend, dynamic):
    """In one graph with lengths, batches and caches that change, and a kernel by name."""
    need(backend)
    kernel = minfer.kernels("attention")[0]["name"]

    def layer(q, cache, seq_lens, table, ends, scale):
        options = dict(block_table=table) | cache.scales()
        out, lse = minfer.attention_paged(q * 2, cache.k, cache.v, seq_lens, cu_seqlens_q=ends, max_seqlen_q=16, scale=scale, **options)
        named, named_lse = minfer.attention_paged(
            q[: len(seq_lens)], cache.k, cache.v, seq_lens, window_left=9, kernel=kernel, num_splits=4, **options
        )
        return out[: len(seq_lens)] + named, lse[:, : len(seq_lens)] + named_lse

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    calls = [("int4", (70, 40), 0.3), ("int4", (20, 3, 33), 0.5)]
    calls += [("fp8_e4m3", (70, 40), 0.3), ("int8", (9, 64), 0.3), ("16bit", (9, 64), 0.3)] if not dynamic else []
    for kv_format, lengths, scale in calls:
        cache, seq_lens, table = make_cache(lengths, kv_format, 2, head_dims_of(kv_format), torch.float16)
        ends = cu_seqlens_of([b + 1 for b in range(len(lengths))])
        args = make_q(int(ends[-1]), 4, head_dims_of(kv_format)[0], dtype=torch.float16), cache, seq_lens, table, ends, scale
        with torch.no_grad():
            for have, want in zip(compiled(*args), layer(*args), strict=True):
                torch.testing.assert_close(have, want, rtol=2e-3, atol=1e-3)


def test_compile_keeps_strides():
    """The graph calls the operator with eager mode's strides: neither a packed qkv nor a cache is copied."""
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    nodes = []

    def record(graph, inputs):
        nodes.extend(n for n in graph.graph.nodes if n.target is torch.ops.minfer.attention_paged.default)
        return graph

    qkv, both = torch.randn(2, 8, 32).half(), torch.randn(3, 2, 64, 2, 32).half()
    args = torch.tensor([9, 70], dtype=torch.int32), torch.tensor([[0, 0], [1, 2]], dtype=torch.int32)
    compiled = torch.compile(
        lambda x, both, lens, table: minfer.attention_paged(x[:, :4], *both.unbind(1), lens, block_table=table),
        fullgraph=True,
        backend=aot_autograd(fw_compiler=record),
    )
    compiled(qkv, both, *args)
    (node,) = nodes
    assert [x.meta["val"].stride() for x in node.args[:3]] == [qkv.stride(), *(x.stride() for x in both.unbind(1))]


def test_compile_bad_input():
    torch._dynamo.reset()
    cache, seq_lens, table = make_cache((9, 70), "int8", 2, (32, 16), torch.float16)
    q = make_q(2, 1, 4, 32, dtype=torch.float16)
    call = torch.compile(lambda q, table: minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table), fullgraph=True)
    with pytest.raises(Exception, match="minfer::attention_paged: kv_format 'int8' needs k_scale"):
        call(q, table)


def test_no_backward():
    """Whatever requires grad: forward works, backward raises."""
    cache, seq_lens, table = make_cache((9, 70), "16bit", 2, (32, 16), torch.float16)
    q, sinks = make_q(2, 1, 4, 32, dtype=torch.float16), torch.randn(4).half()
    for x in (q, cache.k, cache.v, sinks):
        x.requires_grad_()
        out, lse = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table, sinks=sinks)
        for result in (out, lse):
            assert result.requires_grad
            with pytest.raises(RuntimeError, match="has no backward"):
                result.sum().backward()
        with torch.no_grad():
            assert not minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=table, sinks=sinks)[0].requires_grad
        x.requires_grad_(False)
