"""torch.ops.minfer.attention_paged on a GPU: the planner's choice and every decode kernel by name.

The truth is float64 attention over what the cache holds, the yardstick torch's own attention in 16 bits, see `PagedTruth`. What belongs to
no key is NaN, and entries without a page name none, see `make`; outputs and workspaces lie in memory that was filled with NaN before.
"""

import dataclasses
import itertools
import math
import random
from itertools import pairwise

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES
from minfer.reference import attention as reference_attention, kv_cache as reference_kv_cache

from tests.attention.cases import (
    Truth,
    bad_paged_calls,
    call_options,
    cu_seqlens_of,
    kernels_here,
    peer,
)
from tests.attention.kv_cache_cases import (
    E4M3_NAN,
    KV_FORMATS,
    NOWHERE,
    PAGED_OPTIONS,
    group_tokens_of,
)
from tests.attention.test_gpu import same_bits, views_of
from tests.gemm.cases import DTYPES, name_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
COMPILED = kernels_here()
KERNELS = {k["name"]: k for k in COMPILED if k["name"].endswith("_decode")}
PREFILL = {k["name"]: k for k in COMPILED if k["name"].endswith("_prefill") and k["b_format"] == "dense"}  # of 16 bits
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (128, 64))
UNITS = {"16bit": 8, "fp8_e4m3": 16, "int8": 16, "int4": 32}  # of head dimensions
# From one query head of a KV head to 32 of them.
GROUPS = ((1, 1), (5, 5), (4, 2), (7, 1), (12, 4), (16, 1), (24, 2), (32, 8), (32, 1), (64, 2))
LENGTHS = [1, 77, 128, 1000, 0, 513]
NAN_BYTE = 0xFF  # in all bytes: NaN in every type
SPARE_PAGES = 3
PAGE_OFF = (NOWHERE, 2**30, -1)


@pytest.fixture(autouse=True)
def free_memory():
    yield
    torch.cuda.empty_cache()


# ---- calls -----------------------------------------------------------------------------------------------------------------------


def raw(x):
    """float8 as bytes, which can be indexed and copied everywhere."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


@dataclasses.dataclass
class Call:
    q: torch.Tensor  # [batch, seqlen_q, heads_q, head_dim], or [tokens, heads_q, head_dim] with `ends`
    cache: minfer.KvCache
    lengths: list  # of the keys, what seq_lens holds
    seq_lens: torch.Tensor
    table: torch.Tensor | None
    ends: list | None = None  # cu_seqlens_q

    def query_ends(self) -> list:
        return [b * self.q.shape[1] for b in range(len(self.lengths) + 1)] if self.ends is None else self.ends

    def arguments(self) -> dict:
        found = dict(block_table=self.table) | self.cache.scales()
        if self.ends is not None:
            ends = torch.tensor(self.ends, dtype=torch.int32, device=self.q.device)
            found |= dict(cu_seqlens_q=ends, max_seqlen_q=max((b - a for a, b in pairwise(self.ends)), default=0))
        return found

    def run(self, **options):
        """The operator, with NaN in the memory that its outputs and its workspace are most likely to get."""
        head_dim_v = self.cache.v.shape[3] * (2 if self.cache.kv_format == "int4" else 1)
        rows = math.prod(self.q.shape[:-1])
        arguments = self.arguments() | options
        sizes = (rows * head_dim_v * 2, rows * 4, 1 << 19, 1 << 21, 1 << 23)
        poison = [torch.full((size,), NAN_BYTE, device=self.q.device, dtype=torch.uint8) for size in sizes]
        del poison
        return minfer.attention_paged(self.q, self.cache.k, self.cache.v, self.seq_lens, **arguments)

    def problem(self, **options) -> str | None:
        """Why a call is wrong, or None; twice, for equal bits."""
        have = self.run(**options)
        problem = PagedTruth(self, options).mismatch(*have)
        if problem is None and not same_bits(self.run(**options), have):
            return "two runs differ"
        return problem

    def tensors(self) -> list:
        """All that a captured call reads."""
        found = [self.q, self.seq_lens, self.table, *self.cache[1:]]
        return [raw(x) for x in found if x is not None]

    def subset(self, chosen, q=None) -> "Call":
        """A batch of some of the sequences; ``q``: theirs, where there are `ends`."""
        at = torch.tensor(list(chosen), device=self.q.device)
        names = ["k_residual", "v_residual"]
        if self.table is None:
            names += ["k", "v"] + (["k_scale", "v_scale"] if self.cache.kv_format in ("int8", "int4") else [])
        own = {name: raw(x)[at].view(x.dtype) for name in names if (x := getattr(self.cache, name)) is not None}
        table = None if self.table is None else self.table[at]
        q = self.q[at] if q is None else q
        return Call(q, self.cache._replace(**own), [self.lengths[b] for b in chosen], self.seq_lens[at], table)


def fill(cache, unused, lengths) -> None:
    """Random keys and values of about 1; NaN, or scales that are, in ``unused`` [pages, page_size] and behind the residuals' tokens."""
    randn, rand = lambda x: torch.randn(x.shape, device=x.device), lambda x: torch.rand(x.shape, device=x.device)  # noqa: E731
    rows = unused[:, :, None, None]
    for codes in (cache.k, cache.v):
        if cache.kv_format == "16bit":
            codes.normal_().masked_fill_(rows, math.nan)
        elif cache.kv_format == "fp8_e4m3":
            raw(codes).copy_(raw(randn(codes).to(torch.float8_e4m3fn))).masked_fill_(rows, E4M3_NAN)
        else:
            codes.copy_(torch.randint(*((-127, 128) if cache.kv_format == "int8" else (0, 256)), codes.shape, device=codes.device))
    if cache.kv_format == "fp8_e4m3":
        for scale in (cache.k_scale, cache.v_scale):
            scale.copy_(rand(scale) + 0.5)
    elif cache.kv_format == "int8":
        for scale in (cache.k_scale, cache.v_scale):
            scale.copy_((rand(scale) + 0.5) / 64).masked_fill_(unused[:, None], math.nan)
    elif cache.kv_format == "int4":
        group = group_tokens_of(cache)
        for scales, minima in (cache.k_scale.unbind(3), cache.v_scale.chunk(2, 2)):
            scales.copy_((rand(scales) + 0.5) / 8)
            minima.copy_(randn(minima) / 2 - 1)
        cache.k_scale.masked_fill_(unused[:, None, ::group, None, None], math.nan)
        cache.v_scale.masked_fill_(unused[:, None, None], math.nan)
        for residual in (cache.k_residual, cache.v_residual):
            own = torch.tensor(lengths, device=residual.device)[:, None] % group
            empty = torch.arange(group, device=residual.device) >= own
            residual.normal_().masked_fill_(empty[:, :, None, None], math.nan)


def make(
    lengths, kv_format, heads, head_dims, dtype, *, queries=1, page_size=64, groups=(64, None), most=None, sharpness=1.0, before=2, after=3
) -> Call:
    """A cache of ``lengths`` keys and its queries, so many of each sequence or, of a list, of each its own end to end.

    Pages lie in any order among spare ones; ``page_size`` None is a contiguous cache. What belongs to no key is NaN, or has scales that
    are, and entries of the block table without a page name none. ``most``: keys that there is room for of every sequence. ``groups``: of
    int4, tokens and channels. ``before`` and ``after``: rows of q of nobody.
    """
    batch, (heads_q, heads_kv), (head_dim, head_dim_v) = len(lengths), heads, head_dims
    int4 = kv_format == "int4"
    in_codes = [length // groups[0] * groups[0] if int4 else length for length in lengths]
    longest = max(max(lengths, default=0), 1) if most is None else most
    unit = page_size or {"16bit": 1, "int4": groups[0]}.get(kv_format, 8)
    columns = -(-longest // unit)
    rows = page_size or columns * unit
    counts = [-(-length // rows) for length in in_codes]
    if page_size is None:
        counts, pages = [1] * batch, batch
    else:
        pages = (sum(counts) if most is None else batch * columns) + SPARE_PAGES
    options = dict(group_tokens=groups[0], group_channels=groups[1]) if int4 else {}
    options["paged"] = page_size is not None
    cache = minfer.allocate_kv_cache(
        pages, rows, heads_kv, head_dim, head_dim_v=head_dim_v, kv_format=kv_format, dtype=dtype, device=DEVICE, batch=batch, **options
    )
    order = random.Random(sum(lengths)).sample(range(pages), pages) if page_size else list(range(pages - 1, -1, -1))
    table, used = [[PAGE_OFF[(b + i) % 3] for i in range(columns + 2)] for b in range(batch)], [0] * pages
    for b, count in enumerate(counts):
        for i in range(count):
            table[b][i] = order.pop()
            used[table[b][i]] = min(rows, in_codes[b] - i * rows)
    unused = torch.arange(rows, device=DEVICE) >= torch.tensor(used, device=DEVICE)[:, None]
    fill(cache, unused, lengths)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    block_table = torch.tensor(table, dtype=torch.int32, device=DEVICE).reshape(batch, columns + 2) if page_size else None
    ends = None if isinstance(queries, int) else cu_seqlens_of(queries, first=before).tolist()
    shape = (batch, queries) if ends is None else (ends[-1] + after,)
    q = (torch.randn(*shape, heads_q, head_dim, device=DEVICE) * sharpness).to(dtype)
    return Call(q, cache, list(lengths), seq_lens, block_table, ends)


class PagedTruth(Truth):
    """Of a `Call`; torch's attention has keys and values in q's type, rounded where they are codes.

    Exponentials are float16 there, which has no small ones: a token's part in `spread` is more than what its value says. int4's minima
    are of the codes' own size, so that its roundings are those of a token's largest value.
    """

    def __init__(self, call: Call, options: dict):
        self.options = dict(causal=True) | {name: x for name, x in options.items() if name not in ("kernel", "num_splits")}
        q, cache, ends, left = call.q, call.cache, call.query_ends(), self.options.get("window_left", -1)
        self.dtype, keys, values, k_ends = q.dtype, [], [], [0]
        for b, (first, last) in enumerate(pairwise(ends)):
            begin = max(0, call.lengths[b] - (last - first) - left) if left >= 0 else 0
            k, v = reference_kv_cache.gather(cache, b, begin, call.lengths[b], call.table, torch.float64)
            keys.append(k)
            values.append(v)
            k_ends.append(k_ends[-1] + k.shape[0])
        flat, k, v = q.flatten(0, 1) if q.dim() == 4 else q, torch.cat(keys), torch.cat(values)
        size = v.abs()
        if cache.kv_format != "16bit":
            largest = size.amax(-1, keepdim=True)
            size = size + largest / 1024 if cache.kv_format != "int4" else 2 * largest.expand_as(v)
        up = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in self.options.items()}
        both, lse = reference_attention.attention_varlen(flat.double(), k, torch.cat([v, size], -1), ends, k_ends, **up)
        out, spread = (x.contiguous() for x in both.chunk(2, -1))
        by_torch = torch.zeros(out.shape, dtype=q.dtype, device=q.device)
        k, v = k.to(q.dtype), v.to(q.dtype)
        if "codes" in (options.get("kernel") or ""):  # keys are rounded to q's type on their way into shared memory
            _, rounded = reference_attention.attention_varlen(flat.double(), k.double(), v.double(), ends, k_ends, **up)
            self.score_error = 2 * (rounded - lse).nan_to_num(0.0).abs().max().item() if lse.numel() else 0.0
        for (first, last), (begin, end) in zip(pairwise(ends), pairwise(k_ends), strict=True):
            by_torch[first:last] = peer(flat[first:last], k[begin:end], v[begin:end], **self.options)
        self.peer_error = torch.linalg.vector_norm(by_torch.double() - out)
        self.out, self.spread, self.lse = out, spread, lse
        if q.dim() == 4:
            self.out, self.spread = (x.view(*q.shape[:2], *x.shape[1:]) for x in (out, spread))
            self.lse = lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1)


def judge(cases) -> None:
    """Runs (label, call, options) and reports all that are wrong."""
    failures, count = [], 0
    for label, call, options in cases:
        count += 1
        problem = call.problem(**options)
        if problem is not None:
            failures.append(f"{label}: {problem}")
    assert count > 0
    assert not failures, "\n".join([f"{len(failures)} of {count} wrong", *failures[:10]])


def legal(kv_format, head_dims) -> bool:
    return all(d % UNITS[kv_format] == 0 for d in head_dims)


def format_of(kernel) -> str:
    return "16bit" if kernel["b_format"] == "dense" else kernel["b_format"]


# ---- values ----------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_lengths(kv_format):
    """Every length up to a few rounds of slices, and more than a warp's lanes know."""

    def cases():
        for dtype, head_dim, options in ((torch.float16, 128, {}), (torch.bfloat16, 64, dict(num_splits=3))):
            yield options, make(range(300), kv_format, (4, 1), (head_dim, head_dim), dtype), options

    judge(cases())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_large_batches(kv_format):
    """31, 32, 33 sequences and 600 of them: lanes of a warp and tables; ragged, empty ones among them."""

    def cases():
        for batch in (31, 32, 33, 600):
            draw = random.Random(batch)
            lengths = [draw.choice((0, 1, draw.randrange(20), draw.randrange(300))) for _ in range(batch)]
            lengths[batch // 3] = 3000
            for options in ({}, dict(num_splits=2), dict(window_left=50)):
                if batch < 600 or not options:
                    yield (batch, options), make(lengths, kv_format, (4, 1), (128, 128), torch.bfloat16), options
        queries = [draw.choice((0, 1, 1, 2, 5)) for _ in lengths]
        yield "queries", make(lengths, kv_format, (4, 1), (64, 64), torch.float16, queries=queries), {}
        yield "none", make([0] * 40, kv_format, (4, 2), (128, 128), torch.float16), {}
        yield "one key each", make([1] * 300, kv_format, (8, 8), (64, 64), torch.bfloat16), {}

    judge(cases())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_several_queries(kv_format, dtype):
    """Of one number, and ragged: none, more than there are keys; the rows of q of nobody are zeros and -inf, whatever the sinks are."""
    lengths = [300, 77, 2, 900, 0]
    sinks = torch.randn(8, device=DEVICE).to(dtype)

    def cases():
        for queries in (2, 3, 4, 9):
            for heads, options in (((8, 2), {}), ((8, 2), dict(causal=False)), ((16, 1), dict(window_left=30)), ((8, 8), {})):
                yield (queries, heads, options), make(lengths, kv_format, heads, (128, 128), dtype, queries=queries), options
        for queries in ([3, 0, 17, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 4], [0] * 5, [6, 80, 5, 1, 2]):
            for options in ({}, dict(sinks=sinks), dict(causal=False, num_splits=3), dict(window_left=8, softcap=5.0)):
                yield (queries, options), make(lengths, kv_format, (8, 2), (128, 128), dtype, queries=queries), options

    judge(cases())
    call = make(lengths, kv_format, (8, 2), (128, 128), dtype, queries=[3, 0, 2, 1, 0])
    for options in ({}, dict(sinks=sinks), dict(num_splits=2)):
        out, lse = call.run(**options)
        for outside in (slice(0, 2), slice(8, None)):
            assert not out[outside].any() and bool((lse[:, outside] == -math.inf).all()), options
        # An upper bound may be far too large.
        for have, want in zip(call.run(**options, max_seqlen_q=1000), (out, lse), strict=True):
            torch.testing.assert_close(have, want, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_layouts_of_queries(kv_format):
    """With a batch mode and end to end with one length: the same bits."""
    call = make([300, 5, 0], kv_format, (8, 2), (128, 128), torch.float16, queries=2)
    out, lse = call.run()
    flat, flat_lse = dataclasses.replace(call, q=call.q.flatten(0, 1)).run(max_seqlen_q=2)
    assert same_bits((out.flatten(0, 1), lse.transpose(0, 1).flatten(1).contiguous()), (flat, flat_lse))


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
    if draw.random() < 0.3:
        options["softcap"] = draw.uniform(1.0, 10.0)
    if draw.random() < 0.3:
        options["scale"] = draw.uniform(0.5, 2.0) * head_dim**-0.5
    if draw.random() < 0.3:
        options["sinks"] = True
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


# ---- splits ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_splits(kv_format, dtype):
    """Parts of few slices, of one and of none; more units than CTAs, and one."""

    def cases():
        for splits in (1, 2, 3, 4, 5, 6, 7, 256):
            for lengths, heads in (([4000], (8, 2)), ([40, 1000, 7, 0, 129] * 3, (8, 8)), ([1, 64, 33], (16, 1))):
                yield (splits, lengths, heads), make(lengths, kv_format, heads, (128, 128), dtype), dict(num_splits=splits)
        yield "queries", make([500, 30], kv_format, (8, 2), (128, 128), dtype, queries=[9, 2]), dict(num_splits=5, window_left=200)
        options = call_options(dict(sinks=True), 4, dtype, DEVICE) | dict(num_splits=6)
        yield "sinks", make([500, 0], kv_format, (4, 2), (64, 64), dtype), options

    judge(cases())


def test_numbers_of_parts():
    """As many as are merged at once, as a warp has lanes, and one more or less."""

    def cases():
        for splits in (8, 9, 15, 16, 17, 31, 32, 33, 34, 64, 65, 131):
            for heads, queries in (((4, 1), 1), ((16, 1), 1), ((8, 1), 3)):
                call = make([131 * 64 * 3 + 5], "16bit", heads, (128, 128), torch.bfloat16, queries=queries)
                yield (splits, heads, queries), call, dict(num_splits=splits)

    judge(cases())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_long_contexts(kv_format):
    def cases():
        for lengths, heads in (([70000], (32, 8)), ([3000] * 9, (32, 32)), ([20000, 1, 5000], (8, 1)), ([1500] * 40, (16, 2))):
            yield (lengths[0], heads), make(lengths, kv_format, heads, (128, 128), torch.bfloat16), {}

    judge(cases())


@pytest.mark.parametrize("page_size", (64, None), ids=("paged", "contiguous"))
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_bits_do_not_depend_on_the_batch(kv_format, page_size):
    """With a number of splits, a sequence has the same bits alone, in parts of the batch and in all of it."""
    draw = random.Random(3)
    for batch, heads, queries, options in (
        (5, (8, 2), 1, {}),
        (40, (8, 2), 1, dict(window_left=100)),
        (40, (16, 1), 3, dict(softcap=5.0)),
        (300, (4, 1), 1, {}),
    ):
        lengths = [draw.choice((0, 1, draw.randrange(60), draw.randrange(700))) for _ in range(batch)]
        lengths[0], lengths[-1] = 2500, 333
        call = make(lengths, kv_format, heads, (128, 128), torch.bfloat16, queries=queries, page_size=page_size)
        for splits in (1, 3, 8, 256):
            out, lse = call.run(num_splits=splits, **options)
            for chosen in ([0], [batch - 1], [batch // 2], list(range(0, batch, 2)), list(range(batch - 1, 0, -3))):
                have = call.subset(chosen).run(num_splits=splits, **options)
                assert same_bits(have, (out[chosen], lse[chosen])), (batch, heads, splits, chosen[:3])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_bits_do_not_depend_on_ragged_neighbours(kv_format):
    """Queries of neighbours, of no query and of many, and other rows of q."""
    queries = [3, 0, 1, 17, 1, 2] * 7
    call = make([200, 50, 900, 77, 0, 64] * 7, kv_format, (8, 2), (128, 128), torch.float16, queries=queries)
    for splits in (2, 5):
        out, lse = call.run(num_splits=splits)
        for b in (0, 2, 3, 5, 20, 41):
            rows = slice(call.ends[b], call.ends[b + 1])
            have = call.subset([b], call.q[rows][None]).run(num_splits=splits)
            assert same_bits(have, (out[rows][None], lse[:, rows][None].contiguous())), (b, splits)


# ---- what a cache holds ------------------------------------------------------------------------------------------------------------


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


# ---- streams, graphs, compile ------------------------------------------------------------------------------------------------------


def captured(call, **options):
    """A graph of one call behind another kernel, and its outputs."""
    arguments = call.arguments() | options

    def step():
        return minfer.attention_paged(call.q * 1, call.cache.k, call.cache.v, call.seq_lens, **arguments)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = step()
    return graph, have


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


# ---- checks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bad_paged_calls())
def test_calls_that_cannot_be_right(name):
    message, args, options = bad_paged_calls(DEVICE)[name]
    with pytest.raises(RuntimeError, match=f"minfer::attention_paged: .*{message}"):
        minfer.attention_paged(*args, **options)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_operands_of_another_device(kv_format):
    call = make([5, 70], kv_format, (4, 2), (64, 64), torch.float16)
    args, options = (call.q, call.cache.k, call.cache.v, call.seq_lens), call.arguments()
    for i, name in enumerate(("k_cache", "v_cache", "seq_lens"), 1):
        with pytest.raises(RuntimeError, match=f"minfer::attention_paged: {name} must be on"):
            minfer.attention_paged(*args[:i], args[i].cpu(), *args[i + 1 :], **options)
    for name, x in (options | dict(sinks=torch.zeros(4, device=DEVICE).half())).items():
        if isinstance(x, torch.Tensor):
            with pytest.raises(RuntimeError, match=f"minfer::attention_paged: {name} must be on"):
                minfer.attention_paged(*args, **options | {name: x.cpu()})


def test_kernels_that_do_not_fit():
    """A kernel by name for another format, other head dimensions or another type is refused, not run."""
    refused = lambda why: pytest.raises(RuntimeError, match=f"minfer::attention_paged: .*{why}")  # noqa: E731
    for name, kernel in KERNELS.items():
        dtype, kv_format = DTYPE_OF[kernel["ab_type"]], format_of(kernel)
        other = DTYPES[1 - DTYPES.index(dtype)]
        with refused("another element type"):
            make([70], kv_format, (2, 2), (64, 64), other).run(kernel=name)
        if kernel["tile_k"] < 256:
            with refused("head dimensions are smaller"):
                make([70], kv_format, (2, 2), (256, 64), dtype).run(kernel=name)
        for other_format in KV_FORMATS:
            if other_format != kv_format:
                with refused("another cache format"):
                    make([70], other_format, (2, 2), (64, 64), dtype).run(kernel=name)
        x = torch.zeros(1, 5, 2, 64, device=DEVICE, dtype=dtype)
        with pytest.raises(RuntimeError, match="minfer::attention: .*reads keys and values from a cache"):
            minfer.attention(x, x, x, kernel=name)
    for name, kernel in PREFILL.items():
        dtype = DTYPE_OF[kernel["ab_type"]]
        with refused("does not split the keys"):
            make([70], "16bit", (2, 2), (64, 64), dtype).run(kernel=name, num_splits=2)
        for kv_format in KV_FORMATS[1:]:
            with refused("another cache format"):
                make([70], kv_format, (2, 2), (64, 64), dtype).run(kernel=name)
    with refused("is not in the registry"):
        make([70], "16bit", (2, 2), (64, 64), torch.float16).run(kernel="attention_sm90_f16_d64_int3_decode")


# ---- tiles of queries over codes -----------------------------------------------------------------------------------------------------

CODES = {k["name"]: k for k in COMPILED if k["b_format"] == "codes"}
QUANTISED = KV_FORMATS[1:]


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


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("name", CODES)
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


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("name", CODES)
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


@pytest.mark.parametrize("name", CODES)
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


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("name", CODES)
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


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("name", CODES)
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


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("name", CODES)
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


def test_tiles_over_codes_that_cannot_be():
    for name, kernel in CODES.items():
        dtype = DTYPE_OF[kernel["ab_type"]]
        with pytest.raises(RuntimeError, match="another cache format"):
            make([70], "16bit", (2, 2), (64, 64), dtype, queries=40).run(kernel=name)
        with pytest.raises(RuntimeError, match="does not split the keys"):
            make([70], "int8", (2, 2), (64, 64), dtype, queries=40).run(kernel=name, num_splits=2)
        x = torch.zeros(1, 5, 2, 64, device=DEVICE, dtype=dtype)
        with pytest.raises(RuntimeError, match="minfer::attention: .*reads keys and values from a cache"):
            minfer.attention(x, x, x, kernel=name)
