"""KV caches of the attention and cache tests: random ones, what they hold element by element, and the calls that cannot be right."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import minfer
import torch
from minfer.formats.kv_cache import KV_FORMATS

NOWHERE = 2**31 - 1  # a page that no cache has
E4M3_NAN = 0x7F


def group_tokens_of(cache) -> int:
    """int4: tokens of a scale of K."""
    return cache.k.shape[1] // cache.k_scale.shape[2]


def in_codes(cache, length: int) -> int:
    """Tokens of a sequence that are in pages."""
    return length // group_tokens_of(cache) * group_tokens_of(cache) if cache.kv_format == "int4" else length


def make_cache(
    lengths, kv_format, heads_kv, head_dims, dtype, device="cpu", *, page_size=64, paged=True, spare=3, group_tokens=32, group_channels=32
):
    """cache, seq_lens and block_table (None unless ``paged``) of sequences with ``lengths`` random keys and values of about 1.

    Pages lie in any order, ``spare`` of them unused. What belongs to no key is NaN, or has scales that are, and entries of the block table
    without a page name none.
    """
    batch, (head_dim, head_dim_v) = len(lengths), head_dims
    columns = max(1, -(-max(lengths, default=1) // page_size))
    pages = sum(-(-length // page_size) for length in lengths) + spare if paged else batch
    length = page_size if paged else columns * page_size
    options = dict(head_dim_v=head_dim_v, kv_format=kv_format, dtype=dtype, batch=batch, paged=paged)
    if kv_format == "int4":
        options |= dict(group_tokens=group_tokens, group_channels=group_channels)
    cache = minfer.allocate_kv_cache(pages, length, heads_kv, head_dim, **options)
    order = random.Random(batch).sample(range(pages), pages)
    table = torch.full((batch, columns + 1), NOWHERE, dtype=torch.int32)
    used = torch.zeros(pages, length, dtype=torch.bool)
    for b, keys in enumerate(lengths):
        for i in range(-(-in_codes(cache, keys) // length)):
            table[b, i] = page = order.pop() if paged else b
            used[page, : in_codes(cache, keys) - i * length] = True
    _fill(cache, used, lengths)
    cache = type(cache)(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in cache))
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return cache, seq_lens, table.to(device) if paged else None


def _fill(cache, used, lengths) -> None:
    unused = ~used
    for codes in (cache.k, cache.v):
        if cache.kv_format == "16bit":
            codes.copy_(torch.randn(codes.shape))[unused] = math.nan
        elif cache.kv_format == "fp8_e4m3":
            bits = torch.randn(codes.shape).to(torch.float8_e4m3fn).view(torch.uint8)
            bits[unused] = E4M3_NAN
            codes.view(torch.uint8).copy_(bits)
        elif cache.kv_format == "int8":
            codes.copy_(torch.randint(-127, 128, codes.shape))
        else:
            codes.copy_(torch.randint(0, 256, codes.shape))
    if cache.kv_format == "fp8_e4m3":
        for scale in (cache.k_scale, cache.v_scale):
            scale.copy_(torch.rand(scale.shape) + 0.5)
    elif cache.kv_format == "int8":
        for scale in (cache.k_scale, cache.v_scale):
            scale.copy_((torch.rand(scale.shape) + 0.5) / 64).mT[unused] = math.nan
    elif cache.kv_format == "int4":
        group, groups_v = group_tokens_of(cache), cache.v_scale.shape[2] // 2
        for scales, minima in (cache.k_scale.unbind(3), cache.v_scale.split(groups_v, 2)):
            scales.copy_((torch.rand(scales.shape) + 0.5) / 8)
            minima.copy_(torch.randn(minima.shape) / 2 - 1)
        cache.k_scale.transpose(1, 2)[unused[:, ::group]] = math.nan
        cache.v_scale.permute(0, 3, 1, 2)[unused] = math.nan
        for residual in (cache.k_residual, cache.v_residual):
            residual.copy_(torch.randn(residual.shape))
            for b, length in enumerate(lengths):
                residual[b, length % group :] = math.nan


# ---- what a cache holds, by the table of minfer.ops.kv_cache -----------------------------------------------------------------------------


def e4m3(bits: int) -> float:
    sign, exponent, mantissa = -1.0 if bits & 128 else 1.0, bits >> 3 & 15, bits & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


class Contents:
    """A cache as lists; ``keys`` and ``values`` of a sequence are computed in float64, element by element."""

    def __init__(self, cache, block_table=None):
        self.format, self.page_size = cache.kv_format, cache.k.shape[1]
        self.table = None if block_table is None else block_table.tolist()
        as_list = lambda x: None if x is None else (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x).tolist()  # noqa: E731
        self.k, self.v, self.k_scale, self.v_scale, self.k_residual, self.v_residual = map(as_list, cache[1:])
        self.heads, per_byte = cache.k.shape[2], 2 if self.format == "int4" else 1
        self.head_dim, self.head_dim_v = cache.k.shape[3] * per_byte, cache.v.shape[3] * per_byte
        if self.format == "int4":
            self.group = group_tokens_of(cache)
            self.groups_v = cache.v_scale.shape[2] // 2

    def _place(self, b: int, token: int) -> tuple[int, int]:
        if self.table is None:
            return b, token
        return self.table[b][token // self.page_size], token % self.page_size

    def key(self, page: int, row: int, h: int, d: int) -> float:
        if self.format == "int4":
            scale, minimum = (x[d] for x in self.k_scale[page][h][row // self.group])
            return (self.k[page][row][h][d // 2] >> 4 * (d % 2) & 15) * scale + minimum
        return self._plain(self.k, self.k_scale, page, row, h, d)

    def value(self, page: int, row: int, h: int, d: int) -> float:
        if self.format == "int4":
            g = d // (self.head_dim_v // self.groups_v)
            scale, minimum = (self.v_scale[page][h][x][row] for x in (g, self.groups_v + g))
            return (self.v[page][row][h][d // 2] >> 4 * (d % 2) & 15) * scale + minimum
        return self._plain(self.v, self.v_scale, page, row, h, d)

    def _plain(self, codes, scale, page, row, h, d) -> float:
        code = codes[page][row][h][d]
        if self.format == "16bit":
            return code
        if self.format == "fp8_e4m3":
            return e4m3(code) * scale[h if len(scale) > 1 else 0]
        return code * scale[page][h][row]

    def sequence(self, b: int, length: int, begin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [length - begin, heads_kv, ..] from token ``begin`` on."""
        found = []
        for element, residual, head_dim in ((self.key, self.k_residual, self.head_dim), (self.value, self.v_residual, self.head_dim_v)):
            rows = []
            for t in range(begin, length):
                if self.format == "int4" and t >= length // self.group * self.group:
                    rows.append(residual[b][t % self.group])
                else:
                    page, row = self._place(b, t)
                    rows.append([[element(page, row, h, d) for d in range(head_dim)] for h in range(self.heads)])
            found.append(torch.tensor(rows, dtype=torch.float64).reshape(length - begin, self.heads, head_dim))
        return found[0], found[1]


# ---- calls that cannot be right ----------------------------------------------------------------------------------------------------


def scale_calls(kv_format, cache, heads_kv, page_size, other, batch):
    """name -> (what the message must say, keywords instead of ``cache.scales()``) of both operators; ``other``: some tensor."""
    scales = {name: x for name, x in cache.scales().items() if name != "kv_format"} | dict(kv_format=kv_format)
    calls = {}
    for name in ("k_scale", "v_scale", "k_residual", "v_residual"):
        if name in scales:
            calls[f"no {name}"] = (f"kv_format '{kv_format}' needs {name}", scales | {name: None})
        else:
            calls[f"spare {name}"] = (f"kv_format '{kv_format}' has no {name}", scales | {name: other})
    shape = lambda *sizes: r"\[" + ", ".join(str(x) for x in sizes) + r"\]"  # noqa: E731
    pages = cache.k.shape[0]
    if kv_format == "fp8_e4m3":
        for name in ("k_scale", "v_scale"):
            text = rf"{name} must be \[1\] or {shape(heads_kv)}, both alike, got "
            x = scales[name]
            calls |= {
                f"{name} size": (text + shape(3), scales | {name: x.new_zeros(3)}),
                f"{name} rank": (text + shape(1, heads_kv), scales | {name: x[None]}),
                f"{name} type": (f"{name} must be ", scales | {name: x.half()}),
            }
        calls["scales unlike"] = (rf"v_scale must be \[1\] or {shape(heads_kv)}, both alike", scales | dict(v_scale=scales["v_scale"][:1]))
    if kv_format == "int8":
        for name in ("k_scale", "v_scale"):
            x = scales[name]
            calls |= {
                f"{name} shape": (
                    f"{name} must be {shape(pages, heads_kv, page_size)}, got {shape(pages, page_size, heads_kv)}",
                    scales | {name: x.mT.contiguous()},
                ),
                f"{name} type": (f"{name} must be ", scales | {name: x.half()}),
            }
    if kv_format == "int4":
        k, v, group = scales["k_scale"], scales["v_scale"], group_tokens_of(cache)
        head_dim, head_dim_v = k.shape[4], cache.v.shape[3] * 2
        ranks = r"int4 scales must be k_scale \[pages, heads_kv, page_size / group, 2, head_dim\] and v_scale "
        ranks += r"\[pages, heads_kv, 2 \* groups, page_size\], got "
        tokens = "k_scale must have a group for 32 or 64 tokens of a page, got "
        groups = rf"v_scale must have a scale and a minimum for groups of 32, or multiples, of v's head_dim {head_dim_v}, got "
        residual = scales["k_residual"]
        calls |= {
            "k_scale rank": (ranks, scales | dict(k_scale=k[:, :, 0])),
            "v_scale rank": (ranks, scales | dict(v_scale=v[None])),
            "group of tokens": (tokens + f"{page_size // 16} for {page_size}", scales | dict(k_scale=k.repeat(1, 1, group // 16, 1, 1))),
            "no group of tokens": (tokens + f"0 for {page_size}", scales | dict(k_scale=k[:, :, :0])),
            "k_scale shape": (f"k_scale must be {shape(*k.shape[:4], head_dim)}, got", scales | dict(k_scale=k[..., :-8])),
            "k_scale type": ("k_scale must be ", scales | dict(k_scale=k.float())),
            "groups of channels": (groups, scales | dict(v_scale=v.repeat(1, 1, head_dim_v // 16, 1))),
            "odd groups of channels": (groups, scales | dict(v_scale=v.repeat(1, 1, 2, 1)[:, :, :3])),
            "no groups of channels": (groups, scales | dict(v_scale=v[:, :, :0])),
            "v_scale shape": (f"v_scale must be {shape(*v.shape[:3], page_size)}, got", scales | dict(v_scale=v[..., :-8])),
            "residual batch": (
                f"k_residual must be {shape(batch, *residual.shape[1:])}, got {shape(batch + 1, *residual.shape[1:])}",
                scales | dict(k_residual=torch.cat([residual, residual[:1]])),
            ),
            "residual type": ("v_residual must be ", scales | dict(v_residual=scales["v_residual"].float())),
        }
    if kv_format != "16bit":
        calls["format's dtype"] = ("a cache of kv_format '16bit' must be ", dict(kv_format="16bit"))
        calls["other format"] = (
            f"a cache of kv_format '{'int8' if kv_format != 'int8' else 'int4'}' must be ",
            scales | dict(kv_format="int8" if kv_format != "int8" else "int4"),
        )
    calls["unknown format"] = ("kv_format must be auto, 16bit, fp8_e4m3, int8 or int4, got 'int3'", scales | dict(kv_format="int3"))
    return calls


def append_args(kv_format, device="cpu", dtype=torch.float16, *, lengths=(3, 2), head_dims=(64, 64), page_size=64, pages=4):
    """k, v, slots of new tokens of sequences that begin on a page each, from page 1 on, an empty cache and cu_seqlens."""
    cache = minfer.allocate_kv_cache(
        pages, page_size, 2, head_dims[0], head_dim_v=head_dims[1], kv_format=kv_format, dtype=dtype, batch=len(lengths), device=device
    )
    k, v = (torch.randn(sum(lengths), 2, d).to(device, dtype) for d in head_dims)
    first = accumulate((-(-n // page_size) for n in lengths), initial=1)  # page of each sequence
    slots = [page_size * page + i for page, n in zip(first, lengths, strict=False) for i in range(n)]
    slots = torch.tensor(slots, dtype=torch.int64, device=device)
    ends = torch.tensor([sum(lengths[:b]) for b in range(len(lengths) + 1)], dtype=torch.int32, device=device)
    return k, v, slots, cache, ends


def bad_append_calls(device="cpu"):
    """name -> (what the message must say, args, options) of kv_cache_append."""
    k, v, slots, cache, ends = append_args("16bit", device, head_dims=(32, 16))
    ck, cv = cache.k, cache.v
    layout = r" must be \[tokens, heads_kv, head_dim\], got "
    modes = r" must be \[pages or batch, page_size or length, heads_kv, head_dim\], got "
    tma = "_cache must have a contiguous head_dim, and a base and strides that are multiples of 16 bytes, got"
    wide = torch.zeros(4, 64, 2, 72, device=device).half()
    calls = {
        "k rank": ("k" + layout + r"\[1, 5, 2, 32\]", (k[None], v, ck, cv, slots), {}),
        "v rank": ("v" + layout + r"\[5, 16\]", (k, v[:, 0], ck, cv, slots), {}),
        "k type": ("k must be float16 or bfloat16", (k.float(), v, ck, cv, slots), {}),
        "v type": ("v must be float16 or bfloat16 like k", (k, v.bfloat16(), ck, cv, slots), {}),
        "v tokens": (r"v must have k's modes but the last, got k \[5, 2, 32\] and v \[4, 2, 16\]", (k, v[1:], ck, cv, slots), {}),
        "v heads": ("v must have k's modes but the last", (k, v[:, 1:], ck, cv, slots), {}),
        "head_dim of 8": ("head_dim must be a multiple of 8 up to 256, got 28", (k[..., :28], v, ck[..., :28], cv, slots), {}),
        "large head_dim_v": ("v's head_dim must be a multiple of 8 up to k's 16, got 32", (v, k, cv, ck, slots), {}),
        "k_cache type": (
            r"k_cache must be .* like k, float8_e4m3fn, int8 or uint8 \(int4\), got",
            (k, v, ck.bfloat16(), cv.bfloat16(), slots),
            {},
        ),
        "v_cache type": ("v_cache must be .* like k_cache, got", (k, v, ck, cv.bfloat16(), slots), {}),
        "k_cache rank": ("k_cache" + modes + r"\[64, 2, 32\]", (k, v, ck[0], cv, slots), {}),
        "v_cache rank": ("v_cache" + modes + r"\[64, 2, 16\]", (k, v, ck, cv[0], slots), {}),
        "v_cache rows": ("v_cache must have k_cache's modes but the last", (k, v, ck, cv[:, 8:], slots), {}),
        "heads of k_cache": (
            r"k_cache must have k's heads_kv = 1 and head_dim = 32, got \[4, 64, 2, 32\]",
            (k[:, :1], v[:, :1], ck, cv, slots),
            {},
        ),
        "head_dim of k_cache": ("k_cache must have k's heads_kv = 2 and head_dim = 24, got", (k[..., :24], v, ck, cv, slots), {}),
        "head_dim of v_cache": ("v_cache must have v's heads_kv = 2 and head_dim = 8, got", (k, v[..., :8], ck, cv, slots), {}),
        "slot_mapping size": (r"slot_mapping must be \[5\], got \[4\]", (k, v, ck, cv, slots[1:]), {}),
        "slot_mapping rank": (r"slot_mapping must be \[5\], got \[1, 5\]", (k, v, ck, cv, slots[None]), {}),
        "slot_mapping type": ("slot_mapping must be ", (k, v, ck, cv, slots.int()), {}),
        "cu_seqlens rank": (r"cu_seqlens must be \[batch \+ 1\], got \[1, 3\]", (k, v, ck, cv, slots), dict(cu_seqlens=ends[None])),
        "cu_seqlens of 0": (r"cu_seqlens must be \[batch \+ 1\], got \[0\]", (k, v, ck, cv, slots), dict(cu_seqlens=ends[:0])),
        "cu_seqlens type": ("cu_seqlens must be ", (k, v, ck, cv, slots), dict(cu_seqlens=ends.long())),
        "stride of head_dim": ("k" + tma, (k, v, wide[..., 0:64:2], cv, slots), {}),
        "base": ("k" + tma, (k, v, wide[..., 4:36], cv, slots), {}),
        "stride of v_cache": ("v" + tma, (k, v, ck, wide[..., 0:32:2], slots), {}),
        "broadcast pages": ("v" + tma, (k, v, ck, cv[:1].expand(4, -1, -1, -1), slots), {}),
    }
    for kv_format in KV_FORMATS:
        k, v, slots, cache, ends = append_args(kv_format, device)
        for name, (message, scales) in scale_calls(kv_format, cache, 2, 64, k, 2).items():
            calls[f"{kv_format}: {name}"] = (message, (k, v, cache.k, cache.v, slots), dict(cu_seqlens=ends) | scales)
    # the last of them, int4
    args, scales = (k, v, cache.k, cache.v, slots), cache.scales()
    strided = lambda x: x.mT.contiguous().mT  # noqa: E731
    calls["int4: residuals without cu_seqlens"] = (r"k_residual must be \[5, 64, 2, 64\], got \[2, 64, 2, 64\]", args, scales)
    for name in ("k_scale", "v_scale", "k_residual", "v_residual"):
        calls[f"int4: strided {name}"] = (
            f"{name} must be contiguous, for it is written, got strides",
            args,
            dict(cu_seqlens=ends) | scales | {name: strided(scales[name])},
        )
    text = r"k_cache must have k's heads_kv = 2 and head_dim = 32, two to a byte, got \[4, 64, 2, 32\]"
    calls["int4: head_dim"] = (text, (k[..., :32], v[..., :32], *args[2:]), dict(cu_seqlens=ends) | scales)
    units = "kv_format 'int4' needs head dimensions that are multiples of 32, got 48 and 48"
    calls["int4: unit of head_dim"] = (
        units,
        (k[..., :48], v[..., :48], cache.k[..., :24], cache.v[..., :24], slots),
        dict(cu_seqlens=ends) | scales,
    )
    k, v, slots, cache, _ = append_args("int8", device)
    strided_scale = dict(k_scale=strided(cache.k_scale), v_scale=cache.v_scale)
    calls["int8: strided k_scale"] = ("k_scale must be contiguous", (k, v, cache.k, cache.v, slots), strided_scale)
    codes, scale = torch.zeros(2, 12, 2, 64, dtype=torch.int8, device=device), torch.zeros(2, 2, 12, device=device)
    length = "kv_format 'int8' needs a page size, or length of a contiguous cache, that is a multiple of 8, got 12"
    calls["int8: length"] = (length, (k, v, codes, codes, slots), dict(k_scale=scale, v_scale=scale))
    return calls
