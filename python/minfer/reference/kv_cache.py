"""What KV caches hold, as ATen compositions on any device: codes to values, values to codes. Layouts:
:mod:`minfer.formats.kv_cache`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..checks import common as checks, kv_cache as checks_kv_cache
from ..formats.kv_cache import KvCache
from .rotary import check_indices, rotate


def group_tokens_of(k_cache: Tensor, k_scale: Tensor) -> int:
    """int4: tokens of a scale of K."""
    return k_cache.shape[1] // k_scale.shape[2]


def unpack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [.., n] -> [.., 2 n], the low nibble first."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def dequantize(codes: Tensor, scale: Tensor | None, kv_format: str, keys: bool, dtype: torch.dtype) -> Tensor:
    """Whole pages: codes [pages, page_size, heads_kv, ..] -> values [pages, page_size, heads_kv, head_dim] of ``dtype``."""
    if kv_format == "16bit":
        return codes.to(dtype)
    if kv_format == "fp8_e4m3":
        values = codes.view(torch.float8_e4m3fn).to(torch.float32).to(dtype)
        return values * scale.to(dtype).reshape(-1, 1)
    if kv_format == "int8":
        return codes.to(dtype) * scale.to(dtype).transpose(1, 2).unsqueeze(-1)
    values = unpack_nibbles(codes).to(dtype)
    if keys:  # [pages, heads, groups, 2, head_dim] -> [pages, page_size, heads, 2, head_dim]
        factors = scale.to(dtype).repeat_interleave(codes.shape[1] // scale.shape[2], 2).transpose(1, 2)
        return values * factors[..., 0, :] + factors[..., 1, :]
    groups = scale.shape[2] // 2  # [pages, heads, 2 groups, page_size] -> [pages, page_size, heads, head_dim] each
    factors = scale.to(dtype).permute(0, 3, 1, 2).repeat_interleave(values.shape[-1] // groups, -1)
    return values * factors[..., : values.shape[-1]] + factors[..., values.shape[-1] :]


def in_codes(cache: KvCache, length: int) -> int:
    """How many of a sequence's tokens are in pages; int4: the rest are in its residual."""
    if cache.kv_format != "int4" or length == 0:
        return length
    group = group_tokens_of(cache.k, cache.k_scale)
    return length // group * group


def pages_of(cache: KvCache, begin: int, end: int) -> range:
    """Which of a sequence's pages hold its tokens begin .. end - 1, of all ``end``."""
    page_size, codes_end = cache.k.shape[1], in_codes(cache, end)
    return range(begin // page_size, -(-codes_end // page_size)) if begin < codes_end else range(0)


def gather(cache: KvCache, b: int, begin: int, end: int, block_table: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V [end - begin, heads_kv, ..] of the tokens from ``begin`` on of sequence b, which has ``end`` of them."""
    pages, codes_end = pages_of(cache, begin, end), in_codes(cache, end)
    own = torch.tensor([b] * len(pages)) if block_table is None else block_table[b, pages.start : pages.stop]
    own = own.to(cache.k.device, torch.int64)
    first, found = pages.start * cache.k.shape[1], []
    for codes, scale, residual, keys in (
        (cache.k, cache.k_scale, cache.k_residual, True),
        (cache.v, cache.v_scale, cache.v_residual, False),
    ):
        of_pages = scale if scale is None or cache.kv_format == "fp8_e4m3" else scale[own]
        raw = codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes  # indexing of fp8 is not everywhere
        values = dequantize(raw[own], of_pages, cache.kv_format, keys, dtype).flatten(0, 1)[begin - first : codes_end - first]
        if residual is not None:
            values = torch.cat([values, residual[b, max(begin - codes_end, 0) : end - codes_end].to(dtype)])
        found.append(values)
    return found[0], found[1]


# ---- values to codes ---------------------------------------------------------------------------------------------------------------


def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x [.., heads_kv, head_dim] / scale, to the nearest of e4m3, saturated."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale.reshape(-1, 1)).clamp(-limit, limit).to(torch.float8_e4m3fn)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., head_dim] -> codes and a float32 scale without the last mode."""
    scale = x.float().abs().amax(-1) / 127.0
    return (x.float() / torch.where(scale == 0, 1.0, scale)[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def quantize_int4(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Over all of ``dim``: codes 0 to 15 (uint8) and float16 scale and minimum, which keep the mode."""
    x = x.float()
    limit = torch.finfo(torch.float16).max
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    minimum = low.clamp(-limit, limit).half()
    scale = ((high - minimum.float()) / 15.0).clamp(0, limit).half()
    steps = torch.where(scale == 0, 1.0, scale.float())
    return ((x - minimum.float()) / steps).round().clamp(0, 15).to(torch.uint8), scale, minimum


def append(k: Tensor, v: Tensor, cache: KvCache, slot_mapping: Tensor, cu_seqlens: list[int] | None = None) -> None:
    """What :func:`minfer.kv_cache_append` does; any device."""
    if cache.kv_format == "int4":
        slots = slot_mapping.tolist()
        ends = range(len(slots) + 1) if cu_seqlens is None else cu_seqlens
        for b, (begin, end) in enumerate(pairwise(ends)):
            tokens = [i for i in range(begin, end) if slots[i] >= 0]
            _append_groups(k, v, cache, b, tokens, [slots[i] for i in tokens])
        return
    tokens = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[tokens]
    page, row = slots // cache.k.shape[1], slots % cache.k.shape[1]
    for x, codes, scale in ((k[tokens], cache.k, cache.k_scale), (v[tokens], cache.v, cache.v_scale)):
        if cache.kv_format == "16bit":
            codes[page, row] = x.to(codes.dtype)
        elif cache.kv_format == "fp8_e4m3":
            codes.view(torch.uint8)[page, row] = quantize_fp8(x, scale).view(torch.uint8)
        else:
            codes[page, row], scale[page, :, row] = quantize_int8(x)


def _append_groups(k: Tensor, v: Tensor, cache: KvCache, b: int, tokens: list[int], slots: list[int]) -> None:
    """int4: tokens of sequence b, which follow each other, to its residual; groups that become whole, to the cache."""
    group, channels = group_tokens_of(cache.k, cache.k_scale), v.shape[-1] // (cache.v_scale.shape[2] // 2)
    at = 0
    while at < len(tokens):
        page, row = divmod(slots[at], cache.k.shape[1])
        begin = row % group
        count = min(group - begin, len(tokens) - at)
        cache.k_residual[b, begin : begin + count] = k[tokens[at : at + count]].to(cache.k_residual.dtype)
        cache.v_residual[b, begin : begin + count] = v[tokens[at : at + count]].to(cache.v_residual.dtype)
        at += count
        if begin + count < group:
            continue
        rows = slice(row - begin, row - begin + group)
        codes, scale, minimum = quantize_int4(cache.k_residual[b], 0)
        cache.k[page, rows] = pack_nibbles(codes)
        cache.k_scale[page, :, row // group] = torch.stack([scale[0], minimum[0]], 1)
        values = cache.v_residual[b].unflatten(-1, (-1, channels))  # [group, heads, groups, channels]
        codes, scale, minimum = quantize_int4(values, -1)
        cache.v[page, rows] = pack_nibbles(codes.flatten(-2))
        cache.v_scale[page, :, :, rows] = torch.cat([scale[..., 0], minimum[..., 0]], -1).permute(1, 2, 0)


def _cache_of(op: str, name: str, k: Tensor, k_cache: Tensor, v_cache: Tensor, kv_format: str, scales: dict[str, Tensor | None]) -> KvCache:
    """``name``: of the argument that has the new keys, ``k``."""
    kv_format = checks_kv_cache.check_format(checks.Checker(op), kv_format, k_cache.dtype, name, k.dtype)
    return KvCache(kv_format, k_cache, v_cache, **scales)


def _check_cache_values(op: str, cache: KvCache, slot_mapping: Tensor, cu_seqlens: Tensor | None) -> None:
    """What only reading memory can check: slots and ends, and that what is written does not overlap."""
    if cache.kv_format in ("int8", "int4"):
        checks.check_no_overlap(op, cache.k_scale, "k_scale", v_scale=cache.v_scale)
    if cache.kv_format == "int4":
        checks.check_no_overlap(op, cache.k_residual, "k_residual", v_residual=cache.v_residual)
    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    group = group_tokens_of(cache.k, cache.k_scale) if cache.kv_format == "int4" else None
    checks_kv_cache.check_append_values(op, slot_mapping.tolist(), ends, cache.k.shape[0] * cache.k.shape[1], group)


def check_values(k, v, k_cache, v_cache, slot_mapping, *, cu_seqlens=None, kv_format="auto", **scales) -> None:
    """Of :func:`minfer.kv_cache_append`."""
    op = "kv_cache_append"
    checks.check_no_overlap(op, k_cache, "k_cache", k=k)
    checks.check_no_overlap(op, v_cache, "v_cache", v=v)
    _check_cache_values(op, _cache_of(op, "k", k, k_cache, v_cache, kv_format, scales), slot_mapping, cu_seqlens)


def kv_cache_append(k, v, k_cache, v_cache, slot_mapping, *, cu_seqlens=None, kv_format="auto", **scales) -> None:
    """:func:`append` with the operator's arguments."""
    cache = _cache_of("kv_cache_append", "k", k, k_cache, v_cache, kv_format, scales)
    append(k, v, cache, slot_mapping, None if cu_seqlens is None else cu_seqlens.tolist())


# ---- behind normalisation and rotation -----------------------------------------------------------------------------------------------


def _prepared(x: Tensor, weight: Tensor | None, cos_sin: Tensor, positions: Tensor, eps: float, offset: float, interleaved: bool) -> Tensor:
    """Heads [tokens, heads, head_dim], normalised where there is a weight, and rotated; rounded once."""
    y = x.contiguous().float()
    if weight is not None:
        y = y * (weight.float() + offset) * (y.square().mean(-1, keepdim=True) + eps).rsqrt()
    rotate(y, cos_sin, positions, interleaved)
    return y.to(x.dtype)


def check_prepared_values(
    qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, *, cu_seqlens=None, kv_format="auto", **options
) -> None:
    """Of :func:`minfer.qk_norm_rope_append`."""
    op = "qk_norm_rope_append"
    scales = {name: options.get(name) for name in checks_kv_cache.SCALES}
    checks.check_no_overlap(op, k_cache, "k_cache", qkv=qkv)
    checks.check_no_overlap(op, v_cache, "v_cache", qkv=qkv)
    _check_cache_values(op, _cache_of(op, "qkv", qkv, k_cache, v_cache, kv_format, scales), slot_mapping, cu_seqlens)
    check_indices(op, "positions", positions, cos_sin.shape[0], "rows of cos_sin")


def qk_norm_rope_append(
    qkv,
    q_weight,
    k_weight,
    cos_sin,
    positions,
    k_cache,
    v_cache,
    slot_mapping,
    *,
    eps=1e-6,
    weight_offset=0.0,
    interleaved=False,
    rotary_dim=None,
    cu_seqlens=None,
    kv_format="auto",
    **scales,
) -> Tensor:
    heads_kv = k_cache.shape[2]
    q, k, v = qkv.split([qkv.shape[1] - 2 * heads_kv, heads_kv, heads_kv], 1)
    how = (cos_sin, positions, eps, weight_offset, interleaved)
    cache = _cache_of("qk_norm_rope_append", "qkv", qkv, k_cache, v_cache, kv_format, scales)
    append(_prepared(k, k_weight, *how), v, cache, slot_mapping, None if cu_seqlens is None else cu_seqlens.tolist())
    return _prepared(q, q_weight, *how)
