"""KV caches: how keys and values are stored for :func:`minfer.attention_paged`, by :func:`minfer.kv_cache_append`.

    cache = minfer.allocate_kv_cache(pages, 64, heads_kv, head_dim, kv_format="int8", device="cuda")
    minfer.kv_cache_append(k, v, cache.k, cache.v, slot_mapping, **cache.scales())
    out, lse = minfer.attention_paged(q, cache.k, cache.v, seq_lens, block_table=block_table, **cache.scales())

Layouts. A paged cache is [pages, page_size, heads_kv, head_dim]; a contiguous one is [batch, length, heads_kv, head_dim], which is a page
for each sequence: below, "pages" and "page_size" stand for both. Slot s is row s % page_size of page s // page_size. The operators take
any order of pages, tokens and heads in memory. 8 and 4-bit codes that :func:`allocate_kv_cache` gives have heads before tokens: a head's
rows of a page follow each other, and decode on Hopper reads those of less than 128 bytes several at a time.

==========  ===============  ======================================================================  =================================
kv_format   codes            scales                                                                  value
==========  ===============  ======================================================================  =================================
16bit       q's dtype        none                                                                    code
fp8_e4m3    float8_e4m3fn    float32 [], [1] or [heads_kv], of the caller                             code * scale
            (or uint8)
int8        int8             float32 [pages, heads_kv, page_size], of K and of V: a token's          code * scale
                             largest magnitude / 127
int4        uint8, element   K: float16 [pages, heads_kv, page_size / group, 2, head_dim]: a scale   code * scale + minimum
            2i the low       and a minimum of each channel in a group of 32 or 64 tokens.
            nibble           V: float16 [pages, heads_kv, 2 * groups, page_size]: scales of a
                             token's groups of channels, then their minima
==========  ===============  ======================================================================  =================================

int4 is KIVI's (Liu et al., 2024): keys have channels that are large in every token, so K is quantised along tokens. That takes whole
groups: the newest tokens, which make none yet, are in residuals of q's dtype, k_residual and v_residual [batch, group, heads_kv, head_dim],
token t of a call's sequence b in row t % group of [b].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import common as checks, kv_cache as checks_kv_cache

KV_FORMATS = tuple(checks_kv_cache.FORMATS)


class KvCache(NamedTuple):
    """Tensors of a cache, see :mod:`minfer.formats.kv_cache`; those that its format does not have are None."""

    kv_format: str
    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_residual: Tensor | None = None
    v_residual: Tensor | None = None

    def scales(self) -> dict[str, Tensor | str]:
        """What the operators take beside k and v, by keyword."""
        return {name: x for name, x in self._asdict().items() if name not in ("k", "v") and x is not None}


def allocate_kv_cache(
    pages: int,
    page_size: int,
    heads_kv: int,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    kv_format: str = "16bit",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    batch: int | None = None,
    group_tokens: int = 64,
    group_channels: int | None = None,
    paged: bool = True,
) -> KvCache:
    """A cache of ``pages`` pages of ``page_size`` tokens, or of ``pages`` sequences of up to ``page_size``.

    Args:
      pages, page_size: of a paged cache; the batch and the length of a contiguous one. page_size is a multiple of 8, of group_tokens for
        int4; with ``paged=False`` the length of a 16-bit cache is any.
      heads_kv, head_dim, head_dim_v: of the keys and values; head_dim_v is head_dim if None, and at most that. Multiples of 8 up to 256,
        of 16 for fp8 and int8, of 32 for int4.
      kv_format: "16bit", "fp8_e4m3", "int8" or "int4".
      dtype: of 16-bit codes and of residuals: that of the queries, float16 or bfloat16.
      batch: int4: the sequences that residuals are kept for; ``pages`` if None.
      group_tokens: int4: tokens of a scale of K, 32 or 64.
      group_channels: int4: elements of head_dim_v of a scale of V, a multiple of 32 that divides head_dim_v; if None 64, or 32 where 64
        does not divide it.
      paged: whether there will be a block table. A cache made with True can be used without one, too.

    Returns:
      KvCache of zeros; fp8's scales are ones, one for each head.

    Raises:
      ValueError: an argument cannot be right: no operator would take the cache. The message names it, what it must be and what it is.
      RuntimeError: torch could not allocate it (torch.OutOfMemoryError on CUDA); the message says how much that was, and for what.
    """
    if head_dim_v is None:
        head_dim_v = head_dim
    if group_channels is None and kv_format == "int4":
        group_channels = 64 if checks.is_integer(head_dim_v) and head_dim_v % 64 == 0 else 32
    batch = pages if batch is None else batch
    checks_kv_cache.check_allocate_kv_cache(
        pages, page_size, heads_kv, head_dim, head_dim_v, kv_format, dtype, batch, group_tokens, group_channels, paged
    )
    per_byte = 2 if kv_format == "int4" else 1
    codes = dtype if kv_format == "16bit" else checks_kv_cache.FORMATS[kv_format][0]
    shapes = {name: ((pages, page_size, heads_kv, d // per_byte), codes) for name, d in (("k", head_dim), ("v", head_dim_v))}
    if kv_format == "fp8_e4m3":
        shapes |= {name: ((heads_kv,), torch.float32) for name in ("k_scale", "v_scale")}
    elif kv_format == "int8":
        shapes |= {name: ((pages, heads_kv, page_size), torch.float32) for name in ("k_scale", "v_scale")}
    elif kv_format == "int4":
        shapes |= {
            "k_scale": ((pages, heads_kv, page_size // group_tokens, 2, head_dim), torch.float16),
            "v_scale": ((pages, heads_kv, 2 * (head_dim_v // group_channels), page_size), torch.float16),
            "k_residual": ((batch, group_tokens, heads_kv, head_dim), dtype),
            "v_residual": ((batch, group_tokens, heads_kv, head_dim_v), dtype),
        }
    try:
        tensors = {name: _zeros(shape, of, device, kv_format != "16bit" and name in ("k", "v")) for name, (shape, of) in shapes.items()}
    except RuntimeError as error:
        size = sum(math.prod(shape) * of.itemsize for shape, of in shapes.values())
        what = f"a cache of {pages} x {page_size} tokens, {heads_kv} heads of {head_dim} and {head_dim_v}, {kv_format}"
        raise checks.allocation_error("allocate_kv_cache", size, what, error) from error
    if kv_format == "fp8_e4m3":
        for name in ("k_scale", "v_scale"):
            tensors[name].fill_(1.0)
    return KvCache(kv_format, **tensors)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None, heads_first: bool) -> Tensor:
    """``heads_first``: a cache [pages, page_size, heads_kv, width] with heads before tokens in memory."""
    if not heads_first:
        return torch.zeros(shape, dtype=dtype, device=device)
    _, page_size, heads_kv, width = shape
    strides = (heads_kv * page_size * width, width, page_size * width, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
