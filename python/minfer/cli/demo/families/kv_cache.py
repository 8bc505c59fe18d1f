"""Storing keys and values in paged caches of every format.

The truth is the keys and values that were given, so the error is that of the cache format. The yardstick is the same quantisation by
PyTorch in eager mode. PyTorch is timed on a 16-bit cache, where storing is a copy of rows to their slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

import minfer

from ....measure.benchmarking import bytes_of
from ....reference import kv_cache as reference_kv_cache
from ..case import Case, Operands, Peer, Work
from ..sizes import Sizes

FAMILY = "KV cache"
KV_FORMATS = ("16bit", "fp8_e4m3", "int8", "int4")
# Both sides store the nearest codes, so the errors of a row agree but for ties and the last bit of a scale. The rule of twice the error
# would also accept codes that are cut off instead of rounded.
ROOM = 1.05
PAGE = 64
GROUP = 64  # int4: tokens that share a scale of K, elements of head_dim that share a scale of V


def empty_cache(sizes: Sizes, kv_format: str, tokens: int) -> Operands:
    """A cache with room for ``tokens`` of each sequence, its pages in random order; keys and values to store, and their slots."""
    batch, heads, dim, device = sizes.batch, sizes.heads_kv, sizes.head_dim, sizes.device
    columns = -(-tokens // PAGE)
    options = {"kv_format": kv_format, "dtype": sizes.dtype, "device": device, "batch": batch}
    if kv_format == "int4":
        options |= {"group_tokens": GROUP, "group_channels": GROUP}
    cache = minfer.allocate_kv_cache(batch * columns, PAGE, heads, dim, **options)
    table = torch.randperm(batch * columns, device=device).to(torch.int32).view(batch, columns)
    at = torch.arange(tokens, device=device)
    slots = table.long()[:, at // PAGE] * PAGE + at % PAGE
    k, v = (sizes.normal(batch * tokens, heads, dim) for _ in range(2))
    if kv_format == "fp8_e4m3":  # the caller chooses the scales: here a head's largest element becomes 448, the format's largest
        for scale, x in ((cache.k_scale, k), (cache.v_scale, v)):
            scale.copy_(x.float().abs().amax((0, 2)) / torch.finfo(torch.float8_e4m3fn).max)
    ends = torch.arange(batch + 1, device=device, dtype=torch.int32) * tokens
    return {"cache": cache, "table": table, "k": k, "v": v, "slots": slots.flatten(), "ends": ends}


def append(s: Operands) -> minfer.KvCache:
    """Stores all tokens of a set of operands."""
    cache = s["cache"]
    minfer.kv_cache_append(s["k"], s["v"], cache.k, cache.v, s["slots"], cu_seqlens=s["ends"], **cache.scales())
    return cache


def filled_cache(sizes: Sizes, kv_format: str, tokens: int) -> Operands:
    s = empty_cache(sizes, kv_format, tokens)
    append(s)
    return s


def gather_all(cache: minfer.KvCache, table: Tensor, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V [batch, tokens, heads_kv, head_dim] that a cache stands for."""
    found = [reference_kv_cache.gather(cache, b, 0, tokens, table, torch.float64) for b in range(table.shape[0])]
    k, v = (torch.stack([pair[i].to(dtype) for pair in found]) for i in range(2))
    return k, v


def _quantised_by_torch(x: Tensor, kv_format: str, keys: bool, scale: Tensor | None) -> Tensor:
    """x [batch, tokens, heads_kv, head_dim] through a format and back, in eager mode."""
    if kv_format == "16bit":
        return x
    if kv_format == "fp8_e4m3":
        return reference_kv_cache.quantize_fp8(x, scale).double() * scale.double()[:, None]
    if kv_format == "int8":
        codes, scale = reference_kv_cache.quantize_int8(x)
        return codes.double() * scale.double()[..., None]
    dim = 1 if keys else 3
    codes, scale, minimum = reference_kv_cache.quantize_int4(x.unflatten(dim, (-1, GROUP)), dim + 1)
    return (codes.double() * scale.double() + minimum.double()).flatten(dim, dim + 1)


def _case(sizes: Sizes, kv_format: str) -> Case:
    batch, tokens = sizes.batch, sizes.chunk

    def stored(s: Operands, cache: minfer.KvCache) -> Tensor:
        return torch.stack(gather_all(cache, s["table"], tokens, torch.float64))

    def by_sequence(s: Operands) -> list[Tensor]:
        return [s[name].unflatten(0, (batch, tokens)) for name in ("k", "v")]

    def yardstick(s: Operands) -> Tensor:
        scales = (s["cache"].k_scale, s["cache"].v_scale)
        parts = zip(by_sequence(s), (True, False), scales, strict=True)
        return torch.stack([_quantised_by_torch(x, kv_format, keys, scale) for x, keys, scale in parts])

    def copy_to_slots(s: Operands) -> None:
        for rows, x in ((s["k_rows"], s["k"]), (s["v_rows"], s["v"])):
            rows.index_copy_(0, s["slots"], x)

    def in_16_bits(s: Operands) -> Operands:
        rows = s["table"].numel() * PAGE
        own = {name: s[name] for name in ("k", "v", "slots")}
        return own | {f"{name}_rows": torch.zeros(rows, *s[name].shape[1:], dtype=sizes.dtype, device=sizes.device) for name in ("k", "v")}

    def copied(s: Operands, _: None) -> Tensor:
        return torch.stack([s[name][s["slots"]].unflatten(0, (batch, tokens)) for name in ("k_rows", "v_rows")])

    def work(s: Operands) -> Work:
        scales = [x for x in (s["cache"].k_scale, s["cache"].v_scale) if x is not None]
        return Work(bytes_of([s["k"], s["v"], s["slots"], s["cache"].k, s["cache"].v, scales]))

    return Case(
        FAMILY,
        f"append, {kv_format}",
        f"{batch} x {tokens}, {sizes.heads_kv} heads x {sizes.head_dim}",
        lambda: empty_cache(sizes, kv_format, tokens),
        append,
        lambda s: torch.stack(by_sequence(s)).double(),  # [K and V, batch, tokens, heads_kv, head_dim]
        (Peer("index_copy, 16-bit", copy_to_slots, compiled=True, read=copied),),
        work,
        sizes.dtype,
        read=stored,
        peer_operands=in_16_bits,
        yardstick=yardstick,
        allowed=lambda error, dtype: ROOM * error,
    )


def cases(sizes: Sizes) -> list[Case]:
    return [_case(sizes, kv_format) for kv_format in KV_FORMATS]
