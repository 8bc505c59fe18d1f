"""Calls of attention_paged for the GPU tests: random caches with their queries, the float64 truth of a call, and the kernels that are here.

The truth is float64 attention over what the cache holds, the yardstick torch's own attention in 16 bits, see `PagedTruth`. What belongs to
no key is NaN, and entries without a page name none, see `make`; outputs and workspaces lie in memory that was filled with NaN before.
"""

import dataclasses
import math
import random
from itertools import pairwise

import minfer
import torch
from minfer.planning.plan import DTYPE_NAMES
from minfer.reference import attention as reference_attention, kv_cache as reference_kv_cache

from tests.attention.cases import Truth, cu_seqlens_of, kernels_here
from tests.attention.kv_cache_cases import E4M3_NAN, KV_FORMATS, NOWHERE, group_tokens_of
from tests.attention.options import peer
from tests.attention.test_gpu import same_bits

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
COMPILED = kernels_here()
KERNELS = {k["name"]: k for k in COMPILED if k["name"].endswith("_decode")}
PREFILL = {k["name"]: k for k in COMPILED if k["name"].endswith("_prefill") and k["b_format"] == "dense"}  # of 16 bits
CODES = {k["name"]: k for k in COMPILED if k["name"].endswith("_prefill") and k["b_format"] != "dense"}  # which convert them
UNITS = {"16bit": 8, "fp8_e4m3": 16, "int8": 16, "int4": 32}  # of head dimensions
# heads_q, heads_kv: from one query head of a KV head to 32 of them.
GROUPS = ((1, 1), (5, 5), (4, 2), (7, 1), (12, 4), (16, 1), (24, 2), (32, 8), (32, 1), (64, 2))
NAN_BYTE = 0xFF  # in all bytes: NaN in every type
SPARE_PAGES = 3
PAGE_OFF = (NOWHERE, 2**30, -1)
QUANTISED = KV_FORMATS[1:]


def formats_of(kernel) -> tuple[str, ...]:
    """Of the caches that a kernel reads."""
    if kernel["b_format"] != "codes":
        return (format_of(kernel),)
    return tuple(name for name in QUANTISED if name != "int8" or kernel["ab_type"] == "f16")


def format_of(kernel) -> str:
    return "16bit" if kernel["b_format"] == "dense" else kernel["b_format"]


OVER_CODES = [(name, kv_format) for name, kernel in CODES.items() for kv_format in formats_of(kernel)]


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


# ---- truth -----------------------------------------------------------------------------------------------------------------------


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
        kernel = options.get("kernel")
        # Prefill over codes, which the planner also takes for few queries, rounds keys to 16 bits on their way into shared memory.
        planned = kernel is None and (options.get("num_splits") or 0) < 2  # prefill does not split the keys
        if cache.kv_format != "16bit" and (planned or "_prefill" in (kernel or "")):
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


# ---- kernels ---------------------------------------------------------------------------------------------------------------------


def legal(kv_format, head_dims) -> bool:
    return all(d % UNITS[kv_format] == 0 for d in head_dims)


# ---- graphs ----------------------------------------------------------------------------------------------------------------------


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
