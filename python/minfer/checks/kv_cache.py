"""Argument checks of KV caches: of the operator that fills them, and what attention shares with it; messages as in
:mod:`minfer.checks.common`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._core.torch_private import is_certain
from ..formats import table
from .common import (
    DTYPES,
    Checker,
    Result,
    ValueChecker,
    check_dense,
    check_device,
    check_eps,
    check_rotary_table,
    check_scalar,
    check_shape,
    check_tensor,
    is_integer,
)

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
PAGE_MULTIPLE = 8  # tokens of a page; of 8 and 4-bit codes also of a contiguous cache's length
GROUPS_OF_TOKENS = (32, 64)  # int4: that a scale of K may be of
CHANNELS_MULTIPLE = 32  # int4: head dimensions, and elements of a scale of V
# Types of the codes; the first of them is the one from which "auto" infers the format. 16bit's is that of the operands.
FORMATS: dict[str, tuple[torch.dtype, ...]] = {
    name: tuple(getattr(torch, dtype) for dtype in storage) for name, (storage, _) in table.CACHES.items()
}
SCALES = ("k_scale", "v_scale", "k_residual", "v_residual")
# What head dimensions of caches are multiples of: whole 16 bytes of codes (see check_strides), for int4 whole groups of channels.
CACHE_HEAD_DIM_MULTIPLES = {name: multiple for name, (_, multiple) in table.CACHES.items()}


def check_head_dims(check: Checker, other: str, head_dim: Any, head_dim_v: Any) -> None:
    """``other``: whose head_dim limits that of v."""
    unit = HEAD_DIM_MULTIPLE
    for good in (head_dim > 0, head_dim % unit == 0, head_dim <= MAX_HEAD_DIM):
        check(good, "head_dim must be a multiple of {} up to {}, got {}", unit, MAX_HEAD_DIM, head_dim)
    for good in (head_dim_v > 0, head_dim_v % unit == 0, head_dim_v <= head_dim):
        check(good, "v's head_dim must be a multiple of {} up to {}'s {}, got {}", unit, other, head_dim, head_dim_v)


def check_ascending(check: Checker, name: str, ends: list[int], tokens_name: str, tokens: int) -> None:
    """Values of cu_seqlens, which only CPU kernels know."""
    inside = ends[0] >= 0 and ends[-1] <= tokens
    check(inside, "{} must lie in 0 to {} = {}, got {} to {}", name, tokens_name, tokens, ends[0], ends[-1])
    for begin, end in pairwise(ends):
        check(begin <= end, "{} must ascend, got {} before {}", name, begin, end)


# ---- allocation ------------------------------------------------------------------------------------------------------------------


def check_allocate_kv_cache(
    pages: Any,
    page_size: Any,
    heads_kv: Any,
    head_dim: Any,
    head_dim_v: Any,
    kv_format: str,
    dtype: torch.dtype,
    batch: Any,
    group_tokens: Any,
    group_channels: Any,
    paged: bool,
) -> None:
    """That the operators take the cache that these make; ValueErrors."""
    check = ValueChecker("allocate_kv_cache")
    check(kv_format in FORMATS, "kv_format must be one of {}, got '{}'", ", ".join(FORMATS), kv_format)
    check(dtype in DTYPES, "dtype must be float16 or bfloat16, as the queries are, got {}", dtype)
    for name, size in (("pages", pages), ("page_size", page_size), ("heads_kv", heads_kv), ("batch", batch)):
        check(is_integer(size) and 0 <= size < 1 << 63, "{} must be an integer, 0 or more, got {}", name, size)
    unit = CACHE_HEAD_DIM_MULTIPLES[kv_format]
    for name, size, limit, maximum in (("head_dim", head_dim, "", MAX_HEAD_DIM), ("head_dim_v", head_dim_v, "head_dim ", head_dim)):
        good = is_integer(size) and 0 < size <= maximum and size % unit == 0
        check(good, "{} must be a multiple of {} up to {}{} for {}, got {}", name, unit, limit, maximum, kv_format, size)
    whole = page_size % PAGE_MULTIPLE == 0
    if paged:
        text = "page_size must be a positive multiple of {} where paged is True, got {}"
        check(whole and page_size > 0, text, PAGE_MULTIPLE, page_size)
    check(whole or kv_format == "16bit", "page_size must be a multiple of {} for {}, got {}", PAGE_MULTIPLE, kv_format, page_size)
    if kv_format == "int4":
        check(page_size > 0, "page_size must be positive for int4, got {}", page_size)
        good = is_integer(group_tokens) and group_tokens in GROUPS_OF_TOKENS and page_size % group_tokens == 0
        sizes = " or ".join(map(str, GROUPS_OF_TOKENS))
        check(good, "group_tokens must be {} and divide page_size {}, got {}", sizes, page_size, group_tokens)
        good = is_integer(group_channels) and group_channels > 0 and group_channels % unit == 0 and head_dim_v % group_channels == 0
        check(good, "group_channels must be a multiple of {} that divides head_dim_v {}, got {}", unit, head_dim_v, group_channels)


# ---- the cache -----------------------------------------------------------------------------------------------------------------


def check_format(check: Checker, kv_format: str, codes: torch.dtype, other: str, dtype: torch.dtype) -> str:
    """Which format codes of a dtype are, by name or by "auto"; ``dtype`` is that of operand ``other``."""
    formats = FORMATS | {"16bit": (dtype,)}
    if kv_format == "auto":
        for known, dtypes in formats.items():
            if codes == dtypes[0]:
                return known
        check(False, "k_cache must be {} like {}, float8_e4m3fn, int8 or uint8 (int4), got {}", dtype, other, codes)
    check(kv_format in formats, "kv_format must be auto, 16bit, fp8_e4m3, int8 or int4, got '{}'", kv_format)
    dtypes = formats[kv_format]
    check(codes in dtypes, "a cache of kv_format '{}' must be {}, got {}", kv_format, dtypes[0], codes)
    return kv_format


def check_cache(check: Checker, k_cache: Tensor, v_cache: Tensor, other: str, like: Tensor) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        text = "{} must be [pages or batch, page_size or length, heads_kv, head_dim], got {}"
        check(x.dim() == 4, text, name, x.shape)
        check_tensor(check, name, x, x.dtype, other, like)
    check(v_cache.dtype == k_cache.dtype, "v_cache must be {} like k_cache, got {}", k_cache.dtype, v_cache.dtype)
    for of_k, of_v in zip(k_cache.shape[:3], v_cache.shape[:3], strict=True):
        text = "v_cache must have k_cache's modes but the last, got k_cache {} and v_cache {}"
        check(of_k == of_v, text, k_cache.shape, v_cache.shape)


def check_strides(check: Checker, name: str, x: Tensor) -> None:
    """That TMA addresses it as it is: caches are never copied. The allocation itself is taken to be aligned."""
    if is_certain(x.numel() == 0):
        return
    text, unit = "{} must have a contiguous head_dim, and a base and strides that are multiples of 16 bytes, got {}", 16 // x.element_size()
    check(x.storage_offset() % unit == 0, text, name, x.shape)
    for i, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if is_certain(size == 1):
            continue
        if i + 1 == x.dim():
            check(stride == 1, text, name, x.shape)
        else:
            for good in (stride > 0, stride % unit == 0):
                check(good, text, name, x.shape)


def check_scales(
    check: Checker,
    kv_format: str,
    k_cache: Tensor,
    scales: dict[str, Tensor | None],
    head_dims: tuple[Any, Any],
    batch: Any,
    other: str,
    like: Tensor,
) -> None:
    """The scales and residuals that a format has, and no others; residuals are of ``like``'s type, of ``batch`` sequences."""
    wanted = {"16bit": (), "int4": SCALES}.get(kv_format, SCALES[:2])
    for name, x in scales.items():
        check(x is None or name in wanted, "kv_format '{}' has no {}", kv_format, name)
        check(x is not None or name not in wanted, "kv_format '{}' needs {}", kv_format, name)
    if kv_format == "16bit":
        return
    pages, page_size, heads_kv, _ = k_cache.shape
    text = "kv_format '{}' needs a page size, or length of a contiguous cache, that is a multiple of {}, got {}"
    check(page_size % PAGE_MULTIPLE == 0, text, kv_format, PAGE_MULTIPLE, page_size)

    def take(name: str, dtype: torch.dtype, *shape: Any) -> None:
        check_shape(check, name, scales[name], shape)
        check_tensor(check, name, scales[name], dtype, other, like)

    k_scale, v_scale = scales["k_scale"], scales["v_scale"]
    if kv_format == "fp8_e4m3":
        numel = k_scale.numel()
        for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
            text = "{} must be [1] or [{}], both alike, got {}"
            check(x.dim() <= 1, text, name, heads_kv, x.shape)
            if not is_certain(numel == 1):
                check(numel == heads_kv, text, name, heads_kv, x.shape)
            check(x.numel() == numel, text, name, heads_kv, x.shape)
            check_tensor(check, name, x, torch.float32, other, like)
        return
    if kv_format == "int8":
        for name in ("k_scale", "v_scale"):
            take(name, torch.float32, pages, heads_kv, page_size)
        return
    head_dim, head_dim_v = head_dims
    text = (
        "int4 scales must be k_scale [pages, heads_kv, page_size / group, 2, head_dim] and v_scale [pages, heads_kv, 2 * groups, "
        "page_size], got {} and {}"
    )
    check(k_scale.dim() == 5 and v_scale.dim() == 4, text, k_scale.shape, v_scale.shape)
    groups = k_scale.shape[2]
    group_tokens = page_size // groups if groups > 0 and page_size % groups == 0 else 0
    legal = page_size == 0 or group_tokens in GROUPS_OF_TOKENS
    check(legal, "k_scale must have a group for 32 or 64 tokens of a page, got {} for {}", groups, page_size)
    unit = CHANNELS_MULTIPLE
    for good in (head_dim % unit == 0, head_dim_v % unit == 0):
        check(good, "kv_format 'int4' needs head dimensions that are multiples of {}, got {} and {}", unit, head_dim, head_dim_v)
    rows = v_scale.shape[2]
    text = "v_scale must have a scale and a minimum for groups of 32, or multiples, of v's head_dim {}, got {}"
    for good in (rows >= 2, rows % 2 == 0, rows >= 2 and head_dim_v // unit % (rows // 2) == 0):
        check(good, text, head_dim_v, v_scale.shape)
    take("k_scale", torch.float16, pages, heads_kv, groups, 2, head_dim)
    take("v_scale", torch.float16, pages, heads_kv, rows, page_size)
    take("k_residual", like.dtype, batch, group_tokens, heads_kv, head_dim)
    take("v_residual", like.dtype, batch, group_tokens, heads_kv, head_dim_v)


# ---- append ----------------------------------------------------------------------------------------------------------------------


def check_kv_cache_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_residual: Tensor | None = None,
    v_residual: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kv_format: str = "auto",
) -> None:
    """All arguments of minfer::kv_cache_append but values."""
    check = Checker("kv_cache_append")
    for name, x in (("k", k), ("v", v)):
        check_dense(check, name, x)
        check(x.dim() == 3, "{} must be [tokens, heads_kv, head_dim], got {}", name, x.shape)
        check(k.dtype in DTYPES, "k must be float16 or bfloat16, got {}", k.dtype)
        check(x.dtype == k.dtype, "{} must be float16 or bfloat16 like k, got {} beside {}", name, x.dtype, k.dtype)
        check_device(check, name, x, "k", k)
    for of_k, of_v in zip(k.shape[:2], v.shape[:2], strict=True):
        check(of_k == of_v, "v must have k's modes but the last, got k {} and v {}", k.shape, v.shape)
    tokens, heads_kv, head_dim = k.shape
    head_dim_v = v.shape[2]
    scales = dict(zip(SCALES, (k_scale, v_scale, k_residual, v_residual), strict=True))
    _check_append(check, k_cache, v_cache, slot_mapping, scales, cu_seqlens, kv_format, (tokens, heads_kv, head_dim, head_dim_v), "k", k)


def _check_append(
    check: Checker,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: dict[str, Tensor | None],
    cu_seqlens: Tensor | None,
    kv_format: str,
    sizes: tuple[Any, Any, Any, Any],
    other: str,
    like: Tensor,
) -> None:
    """The cache and what belongs to it, for (tokens, heads_kv, head_dim, head_dim_v) new rows of the operand ``like``."""
    tokens, heads_kv, head_dim, head_dim_v = sizes
    check_head_dims(check, other, head_dim, head_dim_v)
    kv_format = check_format(check, kv_format, k_cache.dtype, other, like.dtype)
    check_cache(check, k_cache, v_cache, other, like)
    per_byte = 2 if kv_format == "int4" else 1
    for name, cache, own in (("k", k_cache, head_dim), ("v", v_cache, head_dim_v)):
        text = "{}_cache must have {}'s heads_kv = {} and head_dim = {}{}, got {}"
        for good in (cache.shape[2] == heads_kv, cache.shape[3] * per_byte == own):
            check(good, text, name, name, heads_kv, own, ", two to a byte" if per_byte == 2 else "", cache.shape)
    check_shape(check, "slot_mapping", slot_mapping, (tokens,))
    check_tensor(check, "slot_mapping", slot_mapping, torch.int64, other, like)
    batch = tokens
    if cu_seqlens is not None:
        text = "cu_seqlens must be [batch + 1], got {}"
        check(cu_seqlens.dim() == 1, text, cu_seqlens.shape)
        check(cu_seqlens.shape[0] >= 1, text, cu_seqlens.shape)
        check_tensor(check, "cu_seqlens", cu_seqlens, torch.int32, other, like)
        batch = cu_seqlens.shape[0] - 1
    check_scales(check, kv_format, k_cache, scales, (head_dim, head_dim_v), batch, other, like)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_strides(check, name, x)
    for name, x in scales.items():
        if x is not None and kv_format != "fp8_e4m3":
            check(x.is_contiguous(), "{} must be contiguous, for it is written, got strides {}", name, list(x.stride()))


def check_qk_norm_rope_append(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_residual: Tensor | None = None,
    v_residual: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kv_format: str = "auto",
) -> Result:
    """All arguments of minfer::qk_norm_rope_append but values."""
    check = Checker("qk_norm_rope_append")
    check_dense(check, "qkv", qkv)
    text = "qkv must be [tokens, heads + 2 * heads_kv, head_dim], got {}"
    check(qkv.dim() == 3, text, qkv.shape)
    check(qkv.dtype in DTYPES, "qkv must be float16 or bfloat16, got {}", qkv.dtype)
    tokens, all_heads, head_dim = qkv.shape
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_shape(check, name, weight, (head_dim,))
            check_tensor(check, name, weight, qkv.dtype, "qkv", qkv)
    check_eps(check, eps)
    check_scalar(check, "weight_offset", weight_offset)
    check_rotary_table(check, cos_sin, positions, rotary_dim, tokens, head_dim, "qkv", qkv)
    heads_kv = k_cache.shape[2] if k_cache.dim() == 4 else 0
    scales = dict(zip(SCALES, (k_scale, v_scale, k_residual, v_residual), strict=True))
    sizes = (tokens, heads_kv, head_dim, head_dim)
    _check_append(check, k_cache, v_cache, slot_mapping, scales, cu_seqlens, kv_format, sizes, "qkv", qkv)
    text = "qkv must be [tokens, heads + 2 * heads_kv, head_dim], of a cache with heads_kv = {}, got {}"
    check(all_heads >= 2 * heads_kv, text, heads_kv, qkv.shape)
    return Result(qkv, (tokens, all_heads - 2 * heads_kv, head_dim), qkv.dtype)


def check_append_values(op: str, slots: list[int], ends: list[int] | None, capacity: int, group: int | None) -> None:
    """Values of slot_mapping and cu_seqlens, which only the CPU kernel knows; ``group``: int4's tokens of a scale of K."""
    check = Checker(op)
    for i, slot in enumerate(slots):
        check(slot < capacity, "slot_mapping must name one of the cache's {} slots, got {} for token {}", capacity, slot, i)
    if ends is not None:
        check_ascending(check, "cu_seqlens", ends, "tokens", len(slots))
    whole = ends is None or group is None  # else tokens of no sequence are stored nowhere
    if not whole:
        text = "slot_mapping must follow the positions of a sequence's tokens where kv_format is 'int4', got {} behind {}"
        for begin, end in pairwise(ends):
            for before, slot in pairwise(x for x in slots[begin:end] if x >= 0):
                check(slot == before + 1 if (before + 1) % group else slot % group == 0, text, slot, before)
    first: dict[int, int] = {}
    for i in range(len(slots)) if whole else range(ends[0], ends[-1]):
        slot = slots[i]
        once = slot < 0 or first.setdefault(slot, i) == i
        check(once, "slot_mapping must name a slot once, got {} for tokens {} and {}", slot, first.get(slot), i)
