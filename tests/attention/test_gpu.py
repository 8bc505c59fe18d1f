"""torch.ops.minfer.attention, attention_varlen and merge_attention_states on a GPU: the planner's choice and every compiled kernel by name.

The truth is float64, the yardstick torch's own attention in 16 bits, see `cases.Truth`. Outputs are allocated by the operators:
every call is made after memory of their sizes was filled with NaN and given back, so that what is not written shows.
"""

import itertools
import math
import re

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES
from minfer.reference import attention as reference_attention

from tests.attention.cases import (
    GROUPS,
    Truth,
    bad_calls,
    bad_varlen_calls,
    cu_seqlens_of,
    kernels_here,
    make_case,
    make_varlen,
    random_call,
)
from tests.attention.options import OPTIONS, call_options
from tests.gemm.cases import DTYPES, name_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Others read caches: test_paged_decode_gpu and test_paged_prefill_gpu.
KERNELS = {k["name"]: k for k in kernels_here() if k["schedule"] != "split_kv" and k["b_format"] == "dense"}
HEAD_DIMS = (
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 192),
    (256, 256),
    (192, 128),
    (128, 64),
    (72, 40),
    (8, 8),
    (256, 8),
    (248, 200),
)
# Primes, one, an edge of a tile and what is next to it, several tiles.
LENGTHS = (1, 17, 64, 127, 128, 129, 192, 193, 333, 1024)
RAGGED = [(1, 1), (17, 129), (129, 17), (0, 64), (333, 1024), (64, 0), (0, 0), (127, 128), (1, 777), (200, 200)]


def call(args, options):
    """The operator, with NaN in the memory that its outputs are most likely to get: freed blocks of a size are handed out again."""
    q, v = args[0], args[2]
    sizes = (math.prod(q.shape[:-1]) * v.shape[-1] * 2, math.prod(q.shape[:-1]) * 4)
    poison = [torch.full((size,), 0xFF, device=q.device, dtype=torch.uint8) for size in sizes]  # NaN in every type
    del poison
    op = minfer.attention if len(args) == 3 else minfer.attention_varlen
    return op(*args, **options)


def same_bits(have, want) -> bool:
    """Also of NaN."""
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(have, want, strict=True))


def problem_of(args, options) -> str | None:
    """Why a call is wrong, or None; twice, for equal bits."""
    have = call(args, options)
    problem = Truth(args, options).mismatch(*have)
    if problem is None and not same_bits(call(args, options), have):
        return "two runs differ"
    return problem


def judge(cases) -> None:
    """Runs (label, args, options) and reports all that are wrong."""
    failures, count = [], 0
    for label, args, options in cases:
        count += 1
        problem = problem_of(args, options)
        if problem is not None:
            failures.append(f"{label}: {problem}")
    assert count > 0
    assert not failures, "\n".join([f"{len(failures)} of {count} wrong", *failures[:10]])


def head_dims_of(kernel: str) -> tuple[int, int]:
    """head_dim and head_dim_v, from a kernel's name: .._d192x128_.. or, the same for both, .._d128_.."""
    dims = re.search(r"_d(\d+)(?:x(\d+))?_", kernel)
    return int(dims[1]), int(dims[2] or dims[1])


# ---- values ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    """Every kernel by name, at its head dimensions and at smaller ones, which are padded; whole tiles, tails, short and long sequences."""
    kernel = KERNELS[name]
    dtype, (dim, dim_v) = DTYPE_OF[kernel["ab_type"]], head_dims_of(name)
    m, n = kernel["tile_m"], kernel["tile_n"]

    def cases():
        for head_dims in ((dim, dim_v), (dim, dim_v - 8), (dim - 24, dim_v - 24), (dim - 56, 8)):
            for seqlens in ((m, n), (m + 1, n + 1), (m - 1, 5 * n - 1), (3 * m + 7, 2 * n), (1, 3 * n + 5), (2 * m, 1)):
                for option in ("plain", "causal", "all"):
                    options = call_options(OPTIONS[option], 4, dtype, DEVICE) | dict(kernel=name)
                    yield (head_dims, seqlens, option), make_case(2, seqlens, (4, 2), head_dims, dtype, DEVICE), options
        for option in ("plain", "gpt-oss"):
            options = call_options(OPTIONS[option], 4, dtype, DEVICE) | dict(kernel=name)
            yield ("varlen", option), make_varlen(RAGGED, (4, 2), (dim, dim_v), dtype, DEVICE, before=3, after=5), options

    judge(cases())


@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_warpgroups(name):
    """64 rows of a tile each, or its 8, which meet blocks of their own: fewer at the diagonal, fewer before a window, none behind the
    queries."""
    kernel = KERNELS[name]
    dtype, head_dims = DTYPE_OF[kernel["ab_type"]], head_dims_of(name)
    m, n = kernel["tile_m"], kernel["tile_n"]
    lengths = ((max(m - 63, 1), 3 * n - 5), (m + 65, m + 65), (2 * m - 1, 3 * n + 1), (3 * m, 5 * n + 3), (130, 700), (64, 513), (m, 40))
    masks = [dict(causal=True), dict(window_left=40, window_right=10)]
    masks += [dict(causal=True, window_left=left) for left in (0, 1, n // 2, 150)]

    def cases():
        for mask in masks:
            options = mask | dict(kernel=name)
            for seqlens in lengths:
                yield (seqlens, mask), make_case(2, seqlens, (8, 2), head_dims, dtype, DEVICE), options
            yield ("varlen", mask), make_varlen(lengths, (8, 2), head_dims, dtype, DEVICE, before=1, after=7), options

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_head_dims(head_dims, dtype):
    def cases():
        for name, heads, seqlens in itertools.product(("plain", "causal", "all"), GROUPS[:2], ((1, 333), (129, 257), (500, 129))):
            options = call_options(OPTIONS[name], heads[0], dtype, DEVICE)
            yield (name, heads, seqlens), make_case(2, seqlens, heads, head_dims, dtype, DEVICE), options
            lengths = [seqlens, (7, 64), (0, 3), (5, 0)]
            yield (name, heads, lengths), make_varlen(lengths, heads, head_dims, dtype, DEVICE, after=3), options

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ("plain", "causal", "sliding"))
def test_lengths(name, dtype):
    """All pairs of lengths, fewer keys than queries among them: there, causal queries see nothing."""
    options = OPTIONS[name]
    judge((x, make_case(2, x, (4, 2), (128, 128), dtype, DEVICE), options) for x in itertools.product(LENGTHS, LENGTHS))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, dtype):
    def cases():
        for head_dims, heads, seqlens in itertools.product(((64, 64), (128, 128)), GROUPS, ((37, 150), (300, 300), (261, 130))):
            options = call_options(OPTIONS[name], heads[0], dtype, DEVICE)
            yield (head_dims, heads, seqlens), make_case(3, seqlens, heads, head_dims, dtype, DEVICE), options
            yield (head_dims, heads, "varlen"), make_varlen([seqlens, *RAGGED], heads, head_dims, dtype, DEVICE), options

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_small_and_large_scores_are_capped(dtype):
    """Blocks of scores that are small beside the cap have a tanh of their own, and very low scores need none: no key, some and all of them
    large, keys that every query scores low, and a few large queries."""

    def cases():
        for (head_dim, heads), cap in itertools.product(((64, (2, 2)), (128, (4, 1)), (256, (2, 1))), (0.5, 5.0, 30.0, 50.0)):
            for keys, what in ((slice(0), "none"), (slice(150, 290), "large"), (slice(None), "large"), (slice(150, 400), "low")):
                q, k, v = make_case(1, (300, 500), heads, (head_dim, head_dim), dtype, DEVICE)
                q[:, 100:107] *= 4
                if what == "large":
                    k[:, keys] *= 8
                else:
                    q[..., 0] = 8
                    k[:, keys, :, 0] = -60
                yield (head_dim, cap, keys, what), (q, k, v), dict(softcap=cap, causal=True)

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_windows(dtype):
    """Window edges at, before and behind the edges of tiles, with both sides open or closed."""
    edges = (-1, 0, 1, 63, 64, 79, 80, 127, 128, 129, 191, 400, 2**31 - 1)
    args = make_case(1, (411, 523), (4, 2), (128, 128), dtype, DEVICE)
    judge(((left, right), args, dict(window_left=left, window_right=right)) for left, right in itertools.product(edges, edges))


@pytest.mark.parametrize("heads", ((1, 1), (5, 5), (7, 1), (12, 4), (16, 1), (32, 8), (64, 1), (96, 1), (128, 2)), ids=str)
def test_heads(heads):
    """Groups that fit side by side in a tile, that are larger than one, and that are no power of two; few queries and many."""

    def cases():
        for seqlens, name in itertools.product(((1, 200), (3, 200), (16, 130), (200, 200)), ("causal", "all")):
            options = call_options(OPTIONS[name], heads[0], torch.bfloat16, DEVICE)
            yield (seqlens, name), make_case(2, seqlens, heads, (64, 64), torch.bfloat16, DEVICE), options
            yield (name, "varlen"), make_varlen([seqlens, (2, 9), (0, 4)], heads, (64, 64), torch.bfloat16, DEVICE, after=2), options

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_scales(dtype):
    """Flat and peaked softmaxes, small and large values, and scores that grow along the keys: the running maximum moves in every block."""

    def cases():
        for sharpness, size in ((0.01, 1.0), (8.0, 1.0), (60.0, 1.0), (1.0, 1e-3), (1.0, 300.0)):
            q, k, v = make_case(2, (200, 600), (4, 2), (128, 128), dtype, DEVICE, sharpness=sharpness)
            for name in ("plain", "causal", "sinks"):
                yield (sharpness, size, name), (q, k, v * size), call_options(OPTIONS[name], 4, dtype, DEVICE)
        for ramp in (torch.linspace(0, 3, 600, device=DEVICE), torch.linspace(3, 0, 600, device=DEVICE)):
            q, k, v = make_case(2, (200, 600), (4, 2), (128, 128), dtype, DEVICE)
            yield "ramp", (q.abs(), (k.abs() * ramp[:, None, None]).to(dtype), v), {}
        # All scores far below 0: sums must not underflow.
        q, k, v = make_case(2, (200, 600), (4, 2), (128, 128), dtype, DEVICE)
        yield "low", ((q.abs() + 2).to(dtype), (-k.abs() - 2).to(dtype), v), {}

    judge(cases())


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed):
    case, options = random_call(seed, longest=700, dims=(8, 64, 80, 96, 128, 192, 256))
    dtype = DTYPES[seed % 2]
    options = call_options(options, case["heads"][0], dtype, DEVICE)
    ragged = make_varlen(**case, dtype=dtype, device=DEVICE, before=seed % 5, after=seed % 7, sharpness=1 + seed % 3)
    even = make_case(2, case["lengths"][0], case["heads"], case["head_dims"], dtype, DEVICE)
    judge([(("varlen", case, options), ragged, options), ((case, options), even, options)])


def test_queries_that_see_nothing():
    """Zeros and -inf, or the sink, exactly; in tiles of their own and in tiles with others."""
    for seqlens in ((300, 100), (130, 2), (1000, 1), (64, 0), (1, 0)):
        q, k, v = make_case(2, seqlens, (4, 2), (128, 128), torch.bfloat16, DEVICE)
        blind = seqlens[0] - seqlens[1]
        out, lse = call((q, k, v), dict(causal=True))
        assert not out[:, :blind].any() and bool((lse[..., :blind] == -math.inf).all()), seqlens
        assert Truth((q, k, v), dict(causal=True)).mismatch(out, lse) is None, seqlens
        sinks = torch.tensor([0.5, -3.0, 20.0, -math.inf], device=DEVICE).bfloat16()
        out, lse = call((q, k, v), dict(causal=True, sinks=sinks))
        assert not out[:, :blind].any()
        torch.testing.assert_close(lse[..., :blind], sinks.float()[None, :, None].expand(2, 4, blind), rtol=1e-5, atol=1e-5)
        assert Truth((q, k, v), dict(causal=True, sinks=sinks)).mismatch(out, lse) is None, seqlens


def test_empty():
    for batch, seqlens, heads in ((0, (3, 4), (4, 2)), (2, (0, 4), (4, 2)), (2, (3, 0), (4, 2)), (2, (3, 4), (0, 2)), (2, (3, 4), (0, 0))):
        args = make_case(batch, seqlens, heads, (64, 64), torch.float16, DEVICE)
        assert problem_of(args, dict(causal=True)) is None, (batch, seqlens, heads)
    # No sequence, sequences without rows, and rows of no sequence, with sinks that these do not see.
    sinks = torch.randn(4, device=DEVICE).half()
    for lengths, options in itertools.product(([], [(0, 0)], [(0, 5), (0, 0)], [(4, 0)], [(0, 0)] * 300), ({}, dict(sinks=sinks))):
        for spare in (0, 2, 300):
            args = make_varlen(lengths, (4, 2), (64, 64), torch.float16, DEVICE, before=spare, after=spare)
            assert problem_of(args, options) is None, (lengths, options.keys(), spare)


# ---- varlen ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_order_of_tiles(name):
    """Keys and values of far more heads than stay in L2, whose tiles are taken in sections: the bits of each sequence alone."""
    dtype, (dim, dim_v) = DTYPE_OF[KERNELS[name]["ab_type"]], head_dims_of(name)
    masks = (dict(), dict(causal=True), dict(causal=True, window_left=60))
    for batch, seqlen, heads in ((96, 200, (8, 8)), (40, 384, (16, 16)), (160, 200, (8, 2))):
        args = make_case(batch, (seqlen, seqlen), heads, (dim, dim_v), dtype, DEVICE)
        for mask in masks:
            have = call(args, mask | dict(kernel=name))
            for b in range(batch):
                want = call([x[b : b + 1] for x in args], mask | dict(kernel=name))
                assert same_bits([x[b : b + 1] for x in have], want), (batch, seqlen, heads, mask, b)
    lengths = ((2600, 2600), (40, 40), (1100, 3000), (7, 900))
    args = make_varlen(lengths, (32, 32), (dim, dim_v), dtype, DEVICE)
    q_ends, k_ends = (x.tolist() for x in args[3:5])
    for mask in masks:
        out, lse = call(args, mask | dict(kernel=name))
        for b in range(len(lengths)):
            rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
            want = call((args[0][None, rows], args[1][None, keys], args[2][None, keys]), mask | dict(kernel=name))
            assert same_bits((out[None, rows], lse[None, :, rows].contiguous()), want), (mask, b)


@pytest.mark.parametrize("name", ("plain", "causal", "gpt-oss", "all"))
def test_ragged(name):
    """Many sequences, most of them short, and a few long ones; bounds that are exact and that are far too large."""
    torch.manual_seed(5)
    lengths = [(int(a), int(b)) for a, b in zip(torch.randint(0, 40, (150,)), torch.randint(0, 90, (150,)), strict=True)]
    lengths[70], lengths[149], lengths[3] = (1500, 1500), (700, 900), (1, 2048)
    for heads, head_dims in (((8, 2), (128, 128)), ((4, 4), (64, 64)), ((16, 16), (192, 128))):
        args = make_varlen(lengths, heads, head_dims, torch.bfloat16, DEVICE, before=7, after=300)
        options = call_options(OPTIONS[name], heads[0], torch.bfloat16, DEVICE)
        assert problem_of(args, options) is None, (heads, head_dims)
        have = call((*args[:5], 10_000, 1_000_000), options)
        assert Truth(args, options).mismatch(*have) is None, (heads, head_dims, "bounds")


@pytest.mark.parametrize("head_dims", ((64, 64), (128, 128), (192, 128), (256, 256)), ids=str)
def test_nan_behind_the_keys(head_dims):
    """What lies behind a sequence's keys is its neighbour's or nobody's: with NaN there the bits are the same."""
    for lengths in ([(5, 9), (130, 131), (64, 1)], [(1, 333), (300, 127), (17, 80)], [(200, 192)]):
        clean = make_varlen(lengths, (4, 2), head_dims, torch.float16, DEVICE)
        for causal in (False, True):
            want = call(clean, dict(causal=causal))
            for b in range(len(lengths)):
                q, k, v, q_ends, k_ends, *most = clean
                keys, rows = slice(k_ends[b], k_ends[b + 1]), slice(q_ends[b], q_ends[b + 1])
                nans = [torch.full_like(x, math.nan) for x in (k, v)]
                for x, y in zip(nans, (k, v), strict=True):
                    x[keys] = y[keys]
                alone = torch.full_like(q, math.nan)
                alone[rows] = q[rows]
                out, lse = call((alone, *nans, q_ends, k_ends, *most), dict(causal=causal))
                assert same_bits((out[rows], lse[:, rows].contiguous()), (want[0][rows], want[1][:, rows].contiguous())), (
                    lengths,
                    b,
                    causal,
                )


def test_infinities_behind_the_keys():
    args = make_varlen([(70, 70), (33, 45)], (4, 2), (128, 128), torch.bfloat16, DEVICE, before=1, after=1)
    for x in args[1:3]:
        x[0], x[-1] = math.inf, -math.inf
    assert problem_of(args, dict(causal=True)) is None


def test_sequences_in_batches():
    """The keys of one batch entry do not reach the next: NaN in one of them stays there."""
    q, k, v = make_case(3, (150, 201), (4, 2), (128, 128), torch.bfloat16, DEVICE)
    want = call((q, k, v), {})
    for b in range(3):
        k_nan, v_nan = k.clone(), v.clone()
        k_nan[b], v_nan[b] = math.nan, math.nan
        out, lse = call((q, k_nan, v_nan), {})
        for other in {0, 1, 2} - {b}:
            assert same_bits((out[other], lse[other]), (want[0][other], want[1][other])), (b, other)
        assert bool(out[b].isnan().all())


# ---- views -----------------------------------------------------------------------------------------------------------------------


def views_of(x):
    """name -> a view with x's values and NaN around them."""

    def filled(shape, view):
        whole = torch.full(shape, math.nan, device=x.device, dtype=x.dtype)
        part = view(whole)
        part.copy_(x)
        return part

    *lead, rows, heads, dim = x.shape
    views = {
        "heads outside rows": filled((*lead, heads, rows, dim), lambda w: w.transpose(-3, -2)),
        "wide rows": filled((*lead, rows, 2 * heads + 1, dim), lambda w: w[..., 1 : heads + 1, :]),
        "every second head": filled((*lead, rows, 2 * heads, dim), lambda w: w[..., ::2, :]),
        "padded heads": filled((*lead, rows, heads, dim + 16), lambda w: w[..., 8 : dim + 8]),
        "row offset": filled((*lead, rows + 9, heads, dim), lambda w: w[..., 5 : rows + 5, :, :]),
        "every third row": filled((*lead, 3 * rows, heads, dim), lambda w: w[..., 1::3, :, :]),
        "odd base": filled((*lead, rows, heads, dim + 8), lambda w: w[..., 3 : dim + 3]),
        "odd strides": filled((*lead, rows, heads, dim + 3), lambda w: w[..., :dim]),
        "head_dim outside": filled((*lead, dim, rows, heads), lambda w: w.movedim(-3, -1)),
        "every second value": filled((*lead, rows, heads, 2 * dim), lambda w: w[..., ::2]),
    }
    if lead:
        views["batch inside"] = filled((rows, *lead, heads, dim), lambda w: w.transpose(0, 1))
        views["every second batch"] = filled((2 * lead[0], rows, heads, dim), lambda w: w[1::2])
    return views


@pytest.mark.parametrize("heads", ((4, 2), (2, 2)), ids=str)
@pytest.mark.parametrize("varlen", (False, True), ids=("batched", "varlen"))
def test_views(varlen, heads):
    """Each operand in turn as each kind of view, and all of them: the values of contiguous ones."""
    if varlen:
        q, k, v, *rest = make_varlen([(40, 65), (3, 130), (130, 7)], heads, (64, 64), torch.float16, DEVICE)
    else:
        (q, k, v), rest = make_case(2, (140, 150), heads, (64, 64), torch.float16, DEVICE), []
    truth = Truth((q, k, v, *rest), dict(causal=True))
    views = [views_of(x) for x in (q, k, v)]
    for name in views[0]:
        of_q, of_k, of_v = (x[name] for x in views)
        for which, tensors in (("q", (of_q, k, v)), ("k", (q, of_k, v)), ("v", (q, k, of_v)), ("all", (of_q, of_k, of_v))):
            problem = truth.mismatch(*call((*tensors, *rest), dict(causal=True)))
            assert problem is None, (name, which, problem)


def test_packed_qkv():
    """q, k and v as the projection of a layer leaves them: slices of one matrix's rows."""
    for heads_q, heads_kv, dim in ((8, 2, 128), (6, 6, 64), (7, 1, 80)):
        width = (heads_q + 2 * heads_kv) * dim
        qkv = torch.randn(2, 150, width, device=DEVICE).bfloat16()
        q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads_q, heads_kv, heads_kv), dim=2)
        assert q.data_ptr() == qkv.data_ptr() and not k.is_contiguous()
        assert problem_of((q, k, v), dict(causal=True)) is None, (heads_q, heads_kv, dim)
        ends = cu_seqlens_of((100, 50), DEVICE)
        assert problem_of((q[0], k[0], v[0], ends, ends, 100, 100), dict(causal=True)) is None, (heads_q, heads_kv, dim, "varlen")


def test_broadcast_operands():
    """Strides of 0: one set of keys for all of a batch, one KV head for all."""
    q, k, v = make_case(3, (70, 90), (4, 2), (64, 64), torch.float16, DEVICE)
    assert problem_of((q, k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1)), {}) is None
    assert problem_of((q, k[:, :, :1].expand(-1, -1, 4, -1), v[:, :, :1].expand(-1, -1, 4, -1)), {}) is None
    assert problem_of((q[:, :1].expand(-1, 70, -1, -1), k, v), dict(causal=True)) is None


def test_strides_of_single_modes():
    """A mode of one element may have any stride; it must not be taken for an address."""
    for batch, seqlens, heads in ((1, (1, 1), (1, 1)), (1, (1, 50), (2, 1)), (1, (50, 1), (1, 1)), (2, (1, 9), (2, 2))):
        q, k, v = make_case(batch, seqlens, heads, (64, 64), torch.bfloat16, DEVICE)

        def odd(x):
            strides = [3 + 2 * i if size == 1 else stride for i, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True))]
            return x.as_strided(x.shape, strides)

        assert problem_of((odd(q), odd(k), odd(v)), {}) is None, (batch, seqlens, heads)
        ends = cu_seqlens_of((seqlens[0],), DEVICE), cu_seqlens_of((seqlens[1],), DEVICE)
        assert problem_of((odd(q)[0], odd(k)[0], odd(v)[0], *ends, *seqlens), {}) is None, (batch, seqlens, heads, "varlen")


def test_strided_small_operands():
    """sinks and cu_seqlens that are not contiguous, or not aligned to 16 bytes."""
    q, k, v, q_ends, k_ends, *most = make_varlen([(40, 65), (3, 130)], (4, 2), (64, 64), torch.float16, DEVICE)
    sinks = torch.randn(4, device=DEVICE).half()
    want = call((q, k, v, q_ends, k_ends, *most), dict(sinks=sinks))

    def every_second(x):
        whole = torch.full((2 * len(x) + 1,), 77, device=DEVICE, dtype=x.dtype)
        whole[1::2] = x
        return whole[1::2]

    have = call((q, k, v, every_second(q_ends), every_second(k_ends), *most), dict(sinks=every_second(sinks)))
    assert same_bits(have, want)


def test_large_offsets():
    """Batches 2^31 elements apart in q, k and v, and an output of more than 2^31."""
    far = 2**31 + 1024
    whole = torch.empty(far + 2**20, device=DEVICE, dtype=torch.bfloat16)
    shapes = ((2, 150, 4, 128), (2, 300, 2, 128), (2, 300, 2, 128))
    args = [whole.as_strided(x, (far, x[2] * 128, 128, 1), i * 2**18) for i, x in enumerate(shapes)]
    for x in args:
        x.normal_()
    assert problem_of(args, dict(causal=True)) is None
    del whole, args, x
    torch.cuda.empty_cache()
    seqlen = 2**17 + 33
    q = torch.empty(1, seqlen, 128, 128, device=DEVICE, dtype=torch.bfloat16).normal_()
    _, k, v = make_case(1, (1, 40), (128, 1), (128, 128), torch.bfloat16, DEVICE)
    out, lse = minfer.attention(q, k, v)
    assert out.numel() > 2**31
    for rows in (slice(0, 50), slice(seqlen // 2, seqlen // 2 + 50), slice(seqlen - 50, seqlen)):
        part = Truth((q[:, rows], k, v), {})
        problem = part.mismatch(out[:, rows].contiguous(), lse[:, :, rows].contiguous())
        assert problem is None, (rows, problem)


def test_many_sequences():
    """More (sequence, head) pairs than a grid's second dimension counts."""
    q, k, v = make_case(9000, (1, 3), (8, 8), (64, 64), torch.bfloat16, DEVICE)
    have = call((q, k, v), {})
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8
    want = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
    assert torch.linalg.vector_norm(have[0].double() - want) <= 4e-3 * torch.linalg.vector_norm(want)
    torch.testing.assert_close(have[1].double(), scores.logsumexp(-1), rtol=0, atol=1e-2)
    ends = torch.arange(9001, device=DEVICE, dtype=torch.int32)
    ragged = call((*(x.flatten(0, 1) for x in (q, k, v)), ends, 3 * ends, 1, 3), {})
    assert torch.linalg.vector_norm(ragged[0].double() - want.flatten(0, 1)) <= 4e-3 * torch.linalg.vector_norm(want)
    torch.testing.assert_close(ragged[1].double(), scores.logsumexp(-1)[..., 0].mT, rtol=0, atol=1e-2)


# ---- streams, graphs, compile ------------------------------------------------------------------------------------------------------


def test_other_stream():
    """Work is ordered on the current stream: a long kernel before it delays the inputs."""
    ready = make_varlen([(300, 400), (17, 129)], (4, 2), (128, 128), torch.bfloat16, DEVICE)
    want = call(ready, dict(causal=True))
    args = [torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for x in ready]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, y in zip(args[:5], ready[:5], strict=True):
            x.copy_(y, non_blocking=True)
        have = minfer.attention_varlen(*args, causal=True)
        copies = [x * 1 for x in have]
    stream.synchronize()
    assert same_bits(copies, want)


@pytest.mark.parametrize("name", ("plain", "causal", "all"))
def test_graph_of_a_batch(name):
    """One captured call behind another kernel, replayed with other values."""
    options = call_options(OPTIONS[name], 8, torch.bfloat16, DEVICE)
    q, k, v = make_case(2, (333, 500), (8, 2), (128, 128), torch.bfloat16, DEVICE)
    minfer.attention(q * 1, k, v, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = minfer.attention(q * 1, k, v, **options)
    for _ in range(3):
        for x in (q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor))):
            x.normal_()
        for x in have:
            x.fill_(math.nan)
        graph.replay()
        graph.replay()  # back to back: nothing is left over from the first
        torch.cuda.synchronize()
        assert Truth((q, k, v), options).mismatch(*have) is None
        assert same_bits(have, minfer.attention(q, k, v, **options))


@pytest.mark.parametrize("name", ("plain", "causal", "all"))
def test_graphs_follow_their_lengths(name):
    """One captured call, replayed with other values and other lengths: fewer sequences' rows, more, empty ones, rows of nobody."""
    options = call_options(OPTIONS[name], 8, torch.bfloat16, DEVICE)
    q, k, v, q_ends, k_ends, *_ = make_varlen([(100, 100)] * 6, (8, 2), (128, 128), torch.bfloat16, DEVICE)
    most = (600, 600)
    minfer.attention_varlen(q * 1, k, v, q_ends, k_ends, *most, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = minfer.attention_varlen(q * 1, k, v, q_ends, k_ends, *most, **options)
    for lengths in (
        [(100, 100)] * 6,
        [(600, 600)] + [(0, 0)] * 5,
        [(1, 300), (0, 17), (129, 1), (200, 0), (3, 200), (64, 82)],
        [(0, 0)] * 6,
        [(17, 33)] * 6,
        [(0, 0)] * 5 + [(599, 128)],
        [(100, 100)] * 6,
    ):
        for x in (q, k, v):
            x.normal_()
        for x, side in ((q_ends, 0), (k_ends, 1)):
            x.copy_(cu_seqlens_of([pair[side] for pair in lengths]))
        for x in have:
            x.fill_(math.nan)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        problem = Truth((q, k, v, q_ends, k_ends, *most), options).mismatch(*have)
        assert problem is None, (lengths, problem)


def test_chain():
    """Attention of attention, launched to overlap, each reading what the one before it wrote; always the same bits."""
    ends = cu_seqlens_of((300, 0, 129, 71), DEVICE)
    x = torch.randn(500, 4, 64, device=DEVICE).bfloat16()

    def chain():
        y = x
        for _ in range(6):
            y = minfer.attention(y[None], y[None], y[None], causal=True)[0][0]
            y = minfer.attention_varlen(y, y, y, ends, ends, 300, 300)[0]
        return y

    first = chain()
    torch.cuda.synchronize()
    assert bool(first.any()) and not first.isnan().any()
    for _ in range(30):
        assert torch.equal(chain(), first)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch._dynamo.reset()
    sinks = torch.randn(4, device=DEVICE).bfloat16()

    def layer(qkv, ends):
        q, k, v = qkv.split((4, 2, 2), dim=1)
        out, lse = minfer.attention_varlen(q * 2, k, v, ends, ends, 400, 400, causal=True, sinks=sinks)
        whole, whole_lse = minfer.attention(q[None] * 2, k[None], v[None], window_left=30)
        merged, merged_lse = minfer.merge_attention_states([out[None], whole], [lse[None], whole_lse])
        return merged + 1, merged_lse

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    with torch.inference_mode():
        for tokens in (300, 77, 301):
            qkv, ends = torch.randn(tokens, 8, 64, device=DEVICE).bfloat16(), cu_seqlens_of((70, tokens - 70), DEVICE)
            for have, want in zip(compiled(qkv, ends), layer(qkv, ends), strict=True):
                torch.testing.assert_close(have, want, rtol=1.6e-2, atol=1e-2)


# ---- merge -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_merge_of_parts_is_the_whole(dtype):
    """Keys cut at odd places, one part empty, the sink in one part."""
    q, k, v = make_case(2, (70, 700), (8, 2), (128, 128), dtype, DEVICE)
    sinks = torch.randn(8, device=DEVICE).to(dtype)
    for cuts, sink in itertools.product(((0, 700), (0, 333, 700), (0, 1, 1, 129, 640, 700)), (None, sinks)):
        states = [
            minfer.attention(q, k[:, a:b], v[:, a:b], sinks=sink if i == 0 else None) for i, (a, b) in enumerate(itertools.pairwise(cuts))
        ]
        out, lse = minfer.merge_attention_states(*zip(*states, strict=True))
        truth = Truth((q, k, v), dict(sinks=sink))
        # Every part was rounded once more than the whole.
        truth.peer_error *= 2
        problem = truth.mismatch(out, lse)
        assert problem is None, (cuts, sink is not None, problem)


def test_merge_in_a_graph():
    outs = [torch.randn(100, 4, 64, device=DEVICE).half() for _ in range(3)]
    lses = [torch.randn(4, 100, device=DEVICE) for _ in range(3)]
    minfer.merge_attention_states(outs, lses)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = minfer.merge_attention_states(outs, lses)
    for _ in range(3):
        for x in (*outs, *lses):
            x.normal_()
        lses[1][:, ::3] = -math.inf
        graph.replay()
        assert same_bits(have, minfer.merge_attention_states(outs, lses))
        want, want_lse = reference_attention.merge_attention_states([x.double() for x in outs], [x.double() for x in lses])
        torch.testing.assert_close(have[0].double(), want, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(have[1].double(), want_lse, rtol=1e-5, atol=1e-5)


# ---- checks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bad_calls())
def test_calls_that_cannot_be_right(name):
    message, q, k, v, options = bad_calls(DEVICE)[name]
    with pytest.raises(RuntimeError, match=f"minfer::attention: .*{message}"):
        minfer.attention(q, k, v, **options)


@pytest.mark.parametrize("name", bad_varlen_calls())
def test_varlen_calls_that_cannot_be_right(name):
    message, args, options = bad_varlen_calls(DEVICE)[name]
    with pytest.raises(RuntimeError, match=f"minfer::attention_varlen: .*{message}"):
        minfer.attention_varlen(*args, **options)


def test_operands_of_another_device():
    q, k, v = make_case(2, (5, 7), (4, 2), (32, 16), torch.float16, DEVICE)
    args = make_varlen([(5, 7)], (4, 2), (32, 16), torch.float16, DEVICE)
    for message, function in (
        ("k must be on", lambda: minfer.attention(q, k.cpu(), v)),
        ("v must be on", lambda: minfer.attention(q, k, v.cpu())),
        ("sinks must be on", lambda: minfer.attention(q, k, v, sinks=torch.zeros(4).half())),
        ("cu_seqlens_q must be on", lambda: minfer.attention_varlen(*args[:3], args[3].cpu(), *args[4:])),
        ("cu_seqlens_k must be on", lambda: minfer.attention_varlen(*args[:4], args[4].cpu(), *args[5:])),
    ):
        with pytest.raises(RuntimeError, match=message):
            function()


def test_kernels_that_do_not_fit():
    """A kernel by name for other head dimensions or another type is refused, not run."""
    for name, kernel in KERNELS.items():
        dtype = DTYPE_OF[kernel["ab_type"]]
        other = DTYPES[1 - DTYPES.index(dtype)]
        q, k, v = make_case(1, (5, 7), (2, 2), (64, 64), other, DEVICE)
        with pytest.raises(RuntimeError, match="minfer::attention: .*element type"):
            minfer.attention(q, k, v, kernel=name)
        if head_dims_of(name)[0] < 256:
            q, k, v = make_case(1, (5, 7), (2, 2), (256, 64), dtype, DEVICE)
            with pytest.raises(RuntimeError, match="minfer::attention: .*head dimensions"):
                minfer.attention(q, k, v, kernel=name)
