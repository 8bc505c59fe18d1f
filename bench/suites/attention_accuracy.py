"""Accuracy: how far results are from float64, and what a cache's format costs before any kernel reads it.

  prefill, decode     16 bits: our error beside that of torch's scaled_dot_product_attention; at most twice as large
  over codes          our error against float64 over the values that codes stand for, beside torch's in 16 bits over these values: decode,
                      and a chunk of queries at the end by the kernel that converts codes on their way (the CPU has one for both)
  cache               float64 over these values against float64 over what was stored, on Gaussian keys and on keys with outlier channels;
                      beside int4 whose keys, too, have a scale for each token, where KIVI's have one for each channel

Nothing is timed. All but the last run our operators; the last does not depend on the device. All run on CPU, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import minfer
import torch
from minfer.formats.kv_cache import KV_FORMATS
from minfer.reference import kv_cache as reference_kv_cache

from bench.suites.attention_common import (
    DTYPES,
    codes_kernel,
    decode_kernel,
    planned_kernel,
    truth_of,
)
from bench.suites.moe import relative_error

PEERS = ("torch_sdpa",)
PER_TOKEN = "int4 per token"  # the yardstick of caches
FORMATS = tuple(kv_format for kv_format in KV_FORMATS if kv_format != "16bit")
PREFILL = {64: (4, 2), 128: (4, 2), 256: (2, 1)}  # head_dim: heads
PREFILL_KEYS, DECODE_KEYS = 1024, 4096
DECODE_HEADS, BATCH, PAGE, GROUP, CHUNK = (8, 2), 4, 64, 64, 192
OUTLIERS, OUTLIER_SCALE = 4, 10.0  # channels of each KV head, and how much larger their keys are
KEYS = ("Gaussian", "outlier channels")


def cells(dtypes: list[str], head_dims: list[int]) -> list[dict[str, Any]]:
    """``m``: keys of a sequence."""
    found = []
    for dtype in dtypes:
        for head_dim in head_dims:
            heads_q, heads_kv = PREFILL[head_dim]
            shape = dict(suite="accuracy", dtype=dtype, head_dim=head_dim)
            prefill = shape | dict(m=PREFILL_KEYS, heads_q=heads_q, heads_kv=heads_kv)
            found += [prefill | dict(model=f"prefill, {mask}", kind="prefill") for mask in ("causal", "full")]
            shape |= dict(m=DECODE_KEYS, heads_q=DECODE_HEADS[0], heads_kv=DECODE_HEADS[1])
            found += [shape | dict(model=f"decode, {kv_format}", kind="decode", format=kv_format) for kv_format in KV_FORMATS]
            chunk = shape | dict(queries=CHUNK, kind="decode")
            found += [chunk | dict(model=f"chunk of {CHUNK}, {kv_format}", format=kv_format) for kv_format in FORMATS]
            if head_dim == 128:
                found += [
                    shape | dict(model=f"{kv_format} cache, {keys} K", kind="cache", format=kv_format, keys=keys)
                    for keys in KEYS
                    for kv_format in FORMATS
                ]
    return found


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """torch's own, [batch, seqlen, heads, head_dim]; causal masks are aligned to the bottom right, as ours."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend, queries, keys = torch.nn.functional.scaled_dot_product_attention, q.shape[2], k.shape[2]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries) if causal and 1 < queries < keys else None
    causal = causal and queries == keys
    return attend(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def errors_of(outs: Iterable[torch.Tensor], truth: torch.Tensor) -> list[float]:
    return [relative_error(out.double(), truth) for out in outs]


# ---- caches ----------------------------------------------------------------------------------------------------------------------


def draw(cell: dict[str, Any], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [batch, queries, heads_q, head_dim], k and v [batch, m, heads_kv, head_dim]: the same numbers on every device."""
    generator, sizes = torch.Generator().manual_seed(cell["head_dim"]), (BATCH, cell["m"], cell["heads_kv"], cell["head_dim"])
    q, k, v = (
        torch.randn(shape, generator=generator)
        for shape in ((BATCH, cell.get("queries", 1), cell["heads_q"], cell["head_dim"]), sizes, sizes)
    )
    if cell.get("keys") == "outlier channels":
        for head in range(cell["heads_kv"]):
            k[:, :, head, torch.randperm(cell["head_dim"], generator=generator)[:OUTLIERS]] *= OUTLIER_SCALE
    return tuple(x.to(DTYPES[cell["dtype"]]).to(device) for x in (q, k, v))


def fill(cell: dict[str, Any], k: torch.Tensor, v: torch.Tensor) -> tuple[minfer.KvCache, torch.Tensor]:
    """A cache with pages in random order that holds all tokens, and its block table."""
    pages = BATCH * cell["m"] // PAGE
    options = dict(kv_format=cell["format"], dtype=k.dtype, device=k.device, batch=BATCH, group_tokens=GROUP)
    cache = minfer.allocate_kv_cache(pages, PAGE, cell["heads_kv"], cell["head_dim"], **options)
    if cell["format"] == "fp8_e4m3":  # the largest magnitude of a head is the largest code
        for scale, x in ((cache.k_scale, k), (cache.v_scale, v)):
            scale.copy_(x.float().abs().amax((0, 1, 3)) / torch.finfo(torch.float8_e4m3fn).max)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(BATCH, -1).to(k.device)
    slots = (table.long()[:, :, None] * PAGE + torch.arange(PAGE, device=k.device)).view(-1)
    ends = torch.arange(BATCH + 1, device=k.device, dtype=torch.int32) * cell["m"]
    minfer.kv_cache_append(k.flatten(0, 1), v.flatten(0, 1), cache.k, cache.v, slots, cu_seqlens=ends, **cache.scales())
    return cache, table


def values_of(cache: minfer.KvCache, table: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cache holds in float64, [batch, m, heads_kv, head_dim]."""
    k, v = zip(*(reference_kv_cache.gather(cache, b, 0, m, table, torch.float64) for b in range(BATCH)), strict=True)
    return torch.stack(k), torch.stack(v)


def per_token(x: torch.Tensor) -> torch.Tensor:
    """x as int4 with a scale and a minimum for each token and group of channels, for K as for V."""
    codes, scale, minimum = reference_kv_cache.quantize_int4(x.unflatten(-1, (-1, GROUP)), -1)
    return (codes.double() * scale.double() + minimum.double()).flatten(-2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The last queries of each sequence: [batch, queries, heads_q, head_dim]."""
    rows = torch.arange(q.shape[1], device=q.device)
    return torch.stack([truth_of(q[b], k[b], v[b], rows, dict(causal=True), dtype) for b in range(len(q))])


# ---- cells -----------------------------------------------------------------------------------------------------------------------


def prefill(cell: dict[str, Any], device: str) -> tuple[str, str, float, float]:
    """Op, kernel, our error and the peer's."""
    generator, dtype, causal = torch.Generator().manual_seed(1), DTYPES[cell["dtype"]], cell["model"].endswith("causal")
    q, k, v = (
        torch.randn(1, cell["m"], heads, cell["head_dim"], generator=generator).to(dtype).to(device)
        for heads in (cell["heads_q"], cell["heads_kv"], cell["heads_kv"])
    )
    truth = truth_of(q[0], k[0], v[0], torch.arange(cell["m"], device=device), dict(causal=causal), torch.float64)
    sizes = [1, cell["m"], cell["m"], cell["heads_q"], cell["heads_kv"], cell["head_dim"], cell["head_dim"]]
    kernel = planned_kernel(sizes, cell["dtype"], dict(causal=causal), False) if device == "cuda" else "cpu"
    return "attention", kernel, *errors_of((minfer.attention(q, k, v, causal=causal)[0][0], sdpa(q, k, v, causal)[0]), truth)


def decode(cell: dict[str, Any], device: str) -> tuple[str, str, float, float]:
    """torch reads the values of the codes in 16 bits; ours reads the codes. The last group of int4 is not whole."""
    m = cell["m"] - (GROUP // 2 if cell["format"] == "int4" else 0)
    q, k, v = draw(cell, device)
    cache, table = fill(cell, k, v)
    if cell["format"] == "int4":  # a residual of its own, for what was appended made whole groups
        cache.k_residual[:, : GROUP // 2] = k[:, m:]
        cache.v_residual[:, : GROUP // 2] = v[:, m:]
    lengths = torch.full((BATCH,), m, dtype=torch.int32, device=device)
    sizes, kernel = (cell["dtype"], cell["head_dim"]), None
    if device == "cuda":
        kernel = (codes_kernel if "queries" in cell else decode_kernel)(*sizes, cell["format"])
    out = minfer.attention_paged(q, cache.k, cache.v, lengths, block_table=table, kernel=kernel, **cache.scales())[0]
    keys, values = values_of(cache, table, m)
    peer = sdpa(q, keys.to(q.dtype), values.to(q.dtype), True)
    return "attention_paged", kernel or "cpu", *errors_of((out, peer), attend(q, keys, values))


def cache_error(cell: dict[str, Any], device: str) -> tuple[str, str, float, float]:
    """Of the format alone: both sides in float64."""
    q, k, v = draw(cell, device)
    truth = attend(q, k, v)
    own = attend(q, *values_of(*fill(cell, k, v), cell["m"]))
    return "kv_cache_append", "float64", *errors_of((own, attend(q, per_token(k), per_token(v))), truth)


KINDS: dict[str, Callable[[dict[str, Any], str], tuple[str, str, float, float]]] = {
    "prefill": prefill,
    "decode": decode,
    "cache": cache_error,
}


def measure(cell: dict[str, Any], args: argparse.Namespace, results, peers: list[str]) -> str:
    """A row has errors where others have times, and ratio = peer_err / rel_err.

    Raises:
      ArithmeticError: our error is more than twice torch's and one rounding.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    op, kernel, error, peer_error = KINDS[cell["kind"]](cell, device)
    peer = PER_TOKEN if cell["kind"] == "cache" else "torch_sdpa"
    row = dict(suite="accuracy", op=op, kernel=kernel, shape={n: x for n, x in cell.items() if n not in ("suite", "dtype")})
    row |= dict(dtype=cell["dtype"], peer=peer, rel_err=float(f"{error:.3e}"), peer_err=float(f"{peer_error:.3e}"))
    results.add(row | dict(ratio=round(peer_error / error, 4)))
    head = f"accuracy {cell['dtype']} d{cell['head_dim']} {cell['heads_q']}/{cell['heads_kv']} {cell['model']} {cell['m']}"
    limit = 2 * peer_error + torch.finfo(DTYPES[cell["dtype"]]).eps / 2
    if peer == "torch_sdpa" and not error <= limit:
        raise ArithmeticError(f"relative error {error:.3g}, at most {limit:.3g}")
    return f"{head}: {error:.3g}, {peer} {peer_error:.3g}  [{kernel}]"
