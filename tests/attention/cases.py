"""Operands, the truth and the error rules of the attention tests, and the calls that cannot be right."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import minfer
import torch
from minfer.reference import attention as reference_attention

from tests.attention.kv_cache_cases import make_cache, scale_calls
from tests.attention.options import draw_softmax_options, peer, wrong_options


def kernels_here() -> list[dict]:
    """Kernels of attention that this build has for the GPU that is here; where it has none, and tests are skipped, all of the table."""
    compiled = [kernel for kernel in minfer.kernels("attention") if kernel["compiled"]]
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        portable = any(f"{major}{x}" in minfer.build_info()["archs"].split(";") for x in range(minor + 1))  # they are not compiled for 90a
        compiled = [kernel for kernel in compiled if ((major, minor) == (9, 0) if kernel["arch_exact"] else portable)]
    return compiled or list(minfer.kernels("attention"))


GROUPS = ((3, 3), (4, 2), (8, 1), (6, 2))  # heads_q, heads_kv


def make_case(batch, seqlens, heads, head_dims, dtype, device="cpu", *, sharpness=1.0):
    """q, k, v; ``seqlens``, ``heads`` and ``head_dims`` are pairs. ``sharpness`` scales q, so that few keys have most of the weight."""
    randn = lambda *shape: torch.randn(shape, device=device)  # noqa: E731
    (seqlen_q, seqlen_k), (heads_q, heads_kv), (head_dim, head_dim_v) = seqlens, heads, head_dims
    q = (randn(batch, seqlen_q, heads_q, head_dim) * sharpness).to(dtype)
    return q, randn(batch, seqlen_k, heads_kv, head_dim).to(dtype), randn(batch, seqlen_k, heads_kv, head_dim_v).to(dtype)


def cu_seqlens_of(lengths, device="cpu", *, first=0) -> torch.Tensor:
    return torch.tensor(list(accumulate(lengths, initial=first)), dtype=torch.int32, device=device)


def make_varlen(lengths, heads, head_dims, dtype, device="cpu", *, before=0, after=0, sharpness=1.0):
    """args of attention_varlen; ``lengths`` are (seqlen_q, seqlen_k) pairs, ``before`` and ``after`` rows of none, NaN in k and v."""
    q_lengths, k_lengths = ([pair[side] for pair in lengths] for side in (0, 1))
    rows = [before + sum(x) + after for x in (q_lengths, k_lengths)]
    q, k, v = (x[0] for x in make_case(1, rows, heads, head_dims, dtype, device, sharpness=sharpness))
    for x in (k, v):
        x[:before] = math.nan
        x[rows[1] - after :] = math.nan
    ends = (cu_seqlens_of(x, device, first=before) for x in (q_lengths, k_lengths))
    return q, k, v, *ends, max(q_lengths, default=0), max(k_lengths, default=0)


def random_call(seed: int, *, longest: int, dims: tuple[int, ...]) -> tuple[dict, dict]:
    """Arguments for `make_case` and options, drawn from everything that is legal."""
    draw = random.Random(seed)
    head_dim = draw.choice(dims)
    head_dim_v = draw.choice([d for d in dims if d <= head_dim])
    options: dict = {"causal": draw.random() < 0.4}
    for name in ("window_left", "window_right"):
        if draw.random() < 0.4:
            options[name] = draw.choice((0, 1, draw.randrange(longest), draw.randrange(2 * longest)))
    options |= draw_softmax_options(draw, head_dim)
    lengths = [(draw.randrange(longest), draw.randrange(longest)) for _ in range(draw.randint(1, 4))]
    return dict(lengths=lengths, heads=draw.choice(GROUPS), head_dims=(head_dim, head_dim_v)), options


# ---- truth and tolerance ---------------------------------------------------------------------------------------------------------


class Truth:
    """What a call should give, in float64, and torch's error against it; ``mismatch`` judges results."""

    tiny = 0.0  # an error of any element that is allowed beside rule 2
    score_error = 0.0  # beside those of products in q's dtype

    def __init__(self, args, options: dict):
        self.varlen, self.options = len(args) > 3, options
        q, k, v = args[:3]
        self.q_ends, self.k_ends = (x.tolist() for x in args[3:5]) if self.varlen else (None, None)
        self.dtype, device = q.dtype, q.device
        up = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items() if name != "kernel"}
        self.out, self.lse = self._reference(q.double(), k.double(), v.double(), up)
        # The sum of p |v|: what a relative error of every probability makes of an output.
        self.spread, _ = self._reference(q.double(), k.double(), v.double().abs(), up)
        by_torch = torch.zeros(self.out.shape, dtype=q.dtype, device=device)
        if self.varlen:
            for b in range(len(self.q_ends) - 1):
                rows, keys = slice(self.q_ends[b], self.q_ends[b + 1]), slice(self.k_ends[b], self.k_ends[b + 1])
                by_torch[rows] = peer(q[rows], k[keys], v[keys], **options)
        else:
            for b in range(q.shape[0]):
                by_torch[b] = peer(q[b], k[b], v[b], **options)
        self.peer_error = torch.linalg.vector_norm(by_torch.double() - self.out)

    def _reference(self, q, k, v, options):
        if self.varlen:
            return reference_attention.attention_varlen(q, k, v, self.q_ends, self.k_ends, **options)
        return reference_attention.attention(q, k, v, **options)

    def mismatch(self, out, lse) -> str | None:
        """Why a result is wrong, or None.

        Rule 1, over all: ||out - truth|| <= 2x that of torch, plus one rounding. Rule 2, per element: within 16 roundings of the sum of
        p |v|, so that no row is wrong alone, and exactly 0 where no key is seen. lse: within 1e-2, and -inf exactly where the truth is.
        softcap * tanh.approx is off by up to softcap * 2^-11, which is added to rule 2 and to lse, as is `score_error`.
        """
        for name, have, want, dtype in (("out", out, self.out, self.dtype), ("lse", lse, self.lse, torch.float32)):
            if have.shape != want.shape or have.dtype != dtype or not have.is_contiguous():
                got = f"{name} is {have.dtype} {list(have.shape)} with strides {have.stride()}"
                return f"{got}, expected contiguous {dtype} {list(want.shape)}"
        if out.numel() == 0:
            return None
        unseen, cap = self.lse == -math.inf, self.options.get("softcap", 0.0) * 2.0**-11
        off = (lse.double() - self.lse).masked_fill(unseen & (lse == -math.inf), 0.0).abs()
        near = off <= 1e-2 + cap + self.score_error
        if not bool(near.all()):
            return f"lse is off: {describe(off, near)}"
        unit = torch.finfo(self.dtype).eps / 2
        tiny = torch.finfo(self.dtype).smallest_normal * torch.finfo(self.dtype).eps + self.tiny
        difference = (out.double() - self.out).abs()
        error, norm = torch.linalg.vector_norm(difference), torch.linalg.vector_norm(self.out)
        limit = 2 * self.peer_error + unit * norm + tiny * math.sqrt(out.numel())
        fits = difference <= (16 * unit + 2 * (cap + self.score_error)) * self.spread + tiny
        fits &= (self.spread > 0) | (out == 0)
        if not bool(fits.all()):
            return f"out is off: {describe(difference, fits)}"
        if not bool(error <= limit):
            return f"error {float(error / norm):.3g}, allowed {float(limit / norm):.3g} (torch: {float(self.peer_error / norm):.3g})"
        return None


def describe(difference, fits) -> str:
    bad = (~fits).nonzero()
    where = f"first at {bad[0].tolist()}, last at {bad[-1].tolist()}"
    return f"{len(bad)} of {fits.numel()} elements, {where}, by up to {difference.max().item():.3g}"


# ---- calls that cannot be right ----------------------------------------------------------------------------------------------------


def bad_calls(device="cpu"):
    """name -> (what the message must say, q, k, v, options) of attention."""
    q, k, v = make_case(2, (5, 7), (4, 2), (32, 16), torch.float16, device)
    wide = torch.zeros(2, 5, 4, 264, device=device, dtype=torch.float16)
    return {
        "q rank": (r"q must be \[batch, seqlen, heads, head_dim\], got \[5, 4, 32\]", q[0], k, v, {}),
        "k rank": (r"k must be \[batch, seqlen, heads, head_dim\]", q, k[0], v, {}),
        "v rank": (r"v must be \[batch, seqlen, heads, head_dim\]", q, k, v[0], {}),
        "q type": ("q must be float16 or bfloat16", q.float(), k, v, {}),
        "k type": ("k must be float16 or bfloat16 like q", q, k.bfloat16(), v, {}),
        "v type": ("v must be float16 or bfloat16 like q", q, k, v.bfloat16(), {}),
        "batch": (r"k and v must have q's batch 2, got k \[1, 7, 2, 32\]", q, k[:1], v[:1], {}),
        "v batch": (r"v must have k's modes but the last, got k \[2, 7, 2, 32\] and v \[1, 7, 2, 16\]", q, k, v[:1], {}),
        "v rows": ("v must have k's modes but the last", q, k, v[:, :6], {}),
        "v heads": ("v must have k's modes but the last", q, k, v[:, :, :1], {}),
        "head_dim of k": (r"k must have q's head_dim = 32, got k \[2, 7, 2, 24\]", q, k[..., :24], v, {}),
        "heads": ("q's heads must be a multiple of k's, got 3 and 2", q[:, :, :3], k, v, {}),
        "no heads of k": ("q's heads must be a multiple of k's, got 4 and 0", q, k[:, :, :0], v[:, :, :0], {}),
        "head_dim of 8": ("head_dim must be a multiple of 8 up to 256, got 28", q[..., :28], k[..., :28], v, {}),
        "head_dim of 0": ("head_dim must be a multiple of 8 up to 256, got 0", q[..., :0], k[..., :0], v, {}),
        "large head_dim": ("head_dim must be a multiple of 8 up to 256, got 264", wide, wide, wide[..., :16], {}),
        "head_dim_v of 8": ("v's head_dim must be a multiple of 8 up to q's 32, got 12", q, k, v[..., :12], {}),
        "head_dim_v of 0": ("v's head_dim must be a multiple of 8 up to q's 32, got 0", q, k, v[..., :0], {}),
        "large head_dim_v": ("v's head_dim must be a multiple of 8 up to q's 16, got 32", q[..., :16], k[..., :16], k, {}),
        "kernel": ("is not in the registry", q, k, v, dict(kernel="attention_sm90_f16_d1")),
        "kernel's launch": ("is not in the registry", q, k, v, dict(kernel="attention_sm90_f16_d64_192x128_prefill@splits=2")),
    } | {name: (message, q, k, v, options) for name, (message, options) in wrong_options(q).items()}


def bad_varlen_calls(device="cpu"):
    """name -> (what the message must say, args, options) of attention_varlen."""
    q, k, v, q_ends, k_ends, *most = make_varlen([(3, 5), (4, 2)], (4, 2), (32, 16), torch.float16, device)
    lengths = (q_ends, k_ends, *most)
    return {
        "q rank": (r"q must be \[tokens, heads, head_dim\], got \[1, 7, 4, 32\]", (q[None], k, v, *lengths), {}),
        "v rows": ("v must have k's modes but the last", (q, k, v[:6], *lengths), {}),
        "heads": ("q's heads must be a multiple of k's, got 3 and 2", (q[:, :3], k, v, *lengths), {}),
        "head_dim": ("head_dim must be a multiple of 8 up to 256, got 12", (q[..., :12], k[..., :12], v, *lengths), {}),
        "cu_seqlens_q rank": (r"cu_seqlens_q must be \[batch \+ 1\], got \[1, 3\]", (q, k, v, q_ends[None], k_ends, *most), {}),
        "cu_seqlens_q of 0": (r"cu_seqlens_q must be \[batch \+ 1\], got \[0\]", (q, k, v, q_ends[:0], k_ends, *most), {}),
        "cu_seqlens_q type": ("cu_seqlens_q must be ", (q, k, v, q_ends.long(), k_ends, *most), {}),
        "cu_seqlens_k size": (r"cu_seqlens_k must be \[3\], got \[2\]", (q, k, v, q_ends, k_ends[:2], *most), {}),
        "cu_seqlens_k type": ("cu_seqlens_k must be ", (q, k, v, q_ends, k_ends.long(), *most), {}),
        "max_seqlen_q": ("max_seqlen_q and max_seqlen_k must not be negative", (q, k, v, q_ends, k_ends, -1, 5), {}),
        "max_seqlen_k": ("max_seqlen_q and max_seqlen_k must not be negative", (q, k, v, q_ends, k_ends, 4, -1), {}),
        "kernel": ("is not in the registry", (q, k, v, *lengths), dict(kernel="attention_sm90_f16_d1")),
    } | {name: (message, (q, k, v, *lengths), options) for name, (message, options) in wrong_options(q).items()}


def bad_paged_calls(device="cpu"):
    """name -> (what the message must say, args, options) of attention_paged."""
    cache, lens, table = make_cache((40, 100), "16bit", 2, (32, 16), torch.float16, device)
    q, k, v, pages = torch.zeros(2, 1, 4, 32, device=device).half(), cache.k, cache.v, cache.k.shape[0]
    paged, flat, ends = dict(block_table=table), q[:, 0], cu_seqlens_of((1, 1), device)
    wide = torch.zeros(pages, 64, 2, 72, device=device).half()
    tma = "k_cache must have a contiguous head_dim, and a base and strides that are multiples of 16 bytes, got"
    batch = rf"without a block_table, k_cache must have seq_lens' batch 2, got \[{pages}, 64, 2, 32\]"
    layouts = r"q must be \[batch, seqlen_q, heads, head_dim\] or \[tokens, heads, head_dim\], got "
    modes = r"must be \[pages or batch, page_size or length, heads_kv, head_dim\], got "
    like_k = rf"v_cache must have k_cache's modes but the last, got k_cache \[{pages}, 64, 2, 32\] and v_cache "
    calls = {
        "q rank": (layouts + r"\[4, 32\]", (flat[0], k, v, lens), paged),
        "large q rank": (layouts + r"\[1, 2, 1, 4, 32\]", (q[None], k, v, lens), paged),
        "q type": ("q must be float16 or bfloat16", (q.float(), k, v, lens), paged),
        "k_cache type": (r"k_cache must be .* like q, float8_e4m3fn, int8 or uint8 \(int4\), got", (q, k.bfloat16(), v, lens), paged),
        "v_cache type": ("v_cache must be .* like k_cache, got", (q, k, v.bfloat16(), lens), paged),
        "k_cache rank": ("k_cache " + modes + r"\[64, 2, 32\]", (q, k[0], v, lens), paged),
        "v_cache rank": ("v_cache " + modes + r"\[64, 2, 16\]", (q, k, v[0], lens), paged),
        "v_cache pages": (like_k + rf"\[{pages - 1}, 64, 2, 16\]", (q, k, v[1:], lens), paged),
        "v_cache rows": (like_k + rf"\[{pages}, 56, 2, 16\]", (q, k, v[:, 8:], lens), paged),
        "v_cache heads": (like_k + rf"\[{pages}, 64, 1, 16\]", (q, k, v[:, :, 1:], lens), paged),
        "head_dim of k_cache": (rf"k_cache must have q's head_dim = 32, got \[{pages}, 64, 2, 24\]", (q, k[..., :24], v, lens), paged),
        "heads": ("q's heads must be a multiple of k's, got 3 and 2", (q[:, :, :3], k, v, lens), paged),
        "head_dim of 8": ("head_dim must be a multiple of 8 up to 256, got 28", (q[..., :28], k[..., :28], v, lens), paged),
        "head_dim_v of 8": ("v's head_dim must be a multiple of 8 up to q's 32, got 12", (q, k, v[..., :12], lens), paged),
        "large head_dim_v": ("v's head_dim must be a multiple of 8 up to q's 16, got 32", (q[..., :16], v, k, lens), paged),
        "seq_lens rank": (r"seq_lens must be \[batch\], got \[1, 2\]", (q, k, v, lens[None]), paged),
        "seq_lens type": ("seq_lens must be ", (q, k, v, lens.long()), paged),
        "max_seqlen_q": ("max_seqlen_q must not be negative, got -1", (q, k, v, lens), paged | dict(max_seqlen_q=-1)),
        "batch of q": (r"q must have seq_lens' batch 2, got \[1, 1, 4, 32\]", (q[:1], k, v, lens), paged),
        "tokens": (
            r"without cu_seqlens_q, q must have batch \* max_seqlen_q = 4 tokens, got \[2, 4, 32\]",
            (flat, k, v, lens),
            paged | dict(max_seqlen_q=2),
        ),
        "cu_seqlens_q with a batch": (
            r"with cu_seqlens_q, q must be \[tokens, heads, head_dim\], got \[2, 1, 4, 32\]",
            (q, k, v, lens),
            paged | dict(cu_seqlens_q=ends),
        ),
        "cu_seqlens_q size": (r"cu_seqlens_q must be \[3\], got \[2\]", (flat, k, v, lens), paged | dict(cu_seqlens_q=ends[1:])),
        "cu_seqlens_q type": ("cu_seqlens_q must be ", (flat, k, v, lens), paged | dict(cu_seqlens_q=ends.long())),
        "block_table rank": (r"block_table must be \[batch, pages\], got \[2\]", (q, k, v, lens), dict(block_table=table[:, 0])),
        "block_table batch": (r"block_table must be \[2, 3\], got \[1, 3\]", (q, k, v, lens), dict(block_table=table[:1])),
        "block_table type": ("block_table must be ", (q, k, v, lens), dict(block_table=table.long())),
        "page size": ("the page size must be a multiple of 8, got 12", (q, k[:, :12], v[:, :12], lens), paged),
        "no page size": ("the page size must be a multiple of 8, got 0", (q, k[:, :0], v[:, :0], lens), paged),
        "batch of k_cache": (batch, (q, k, v, lens), {}),
        "no splits": ("num_splits must be 1 to 256, got 0", (q, k, v, lens), paged | dict(num_splits=0)),
        "splits": ("num_splits must be 1 to 256, got 257", (q, k, v, lens), paged | dict(num_splits=257)),
        "stride of head_dim": (tma, (q, wide[..., 0:64:2], v, lens), paged),
        "stride of heads": (tma, (q, wide.reshape(-1, 36)[: pages * 128].view(pages, 64, 2, 36)[..., :32], v, lens), paged),
        "base": (tma, (q, wide[..., 4:36], v, lens), paged),
        "broadcast pages": (tma, (q, k[:1].expand(pages, -1, -1, -1), v, lens), paged),
        "stride of v_cache": (tma.replace("k_", "v_"), (q, k, wide[..., 0:32:2], lens), paged),
        "kernel": ("is not in the registry", (q, k, v, lens), paged | dict(kernel="attention_sm90_f16_d1")),
    } | {name: (message, (q, k, v, lens), paged | options) for name, (message, options) in wrong_options(q).items()}
    for kv_format in ("16bit", "fp8_e4m3", "int8", "int4"):
        head_dims = (64, 64) if kv_format == "int4" else (32, 16)
        cache, lens, table = make_cache((40, 100), kv_format, 2, head_dims, torch.float16, device)
        q = torch.zeros(2, 1, 4, head_dims[0], device=device).half()
        for name, (message, scales) in scale_calls(kv_format, cache, 2, 64, lens.new_zeros(2).float(), 2).items():
            calls[f"{kv_format}: {name}"] = (message, (q, cache.k, cache.v, lens), dict(block_table=table) | scales)
    packed = rf"k_cache must have q's head_dim = 32, two to a byte, got \[{pages}, 64, 2, 32\]"
    bytes_32 = torch.zeros(pages, 64, 2, 32, dtype=torch.uint8, device=device)
    calls["int4: head_dim"] = (packed, (q[..., :32], bytes_32, bytes_32, lens), dict(block_table=table) | cache.scales())
    units = "kv_format 'int4' needs head dimensions that are multiples of 32, got 48 and 48"
    calls["int4: unit of head_dim"] = (
        units,
        (q[..., :48], cache.k[..., :24], cache.v[..., :24], lens),
        dict(block_table=table) | cache.scales(),
    )
    length = "kv_format 'int8' needs a page size, or length of a contiguous cache, that is a multiple of 8, got 12"
    codes, scale = torch.zeros(2, 12, 2, 64, dtype=torch.int8, device=device), torch.zeros(2, 2, 12, device=device)
    calls["int8: length"] = (length, (q, codes, codes, lens), dict(k_scale=scale, v_scale=scale))
    return calls
