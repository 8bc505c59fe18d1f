"""KV caches: how keys and values are stored for :func:`minfer.attention_paged`, and the operator that stores them.

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

from .._core.signatures import signature_of
from ..checks import common as checks, kv_cache as checks_kv_cache
from .gemm import _differentiated

KV_FORMATS = tuple(checks_kv_cache.FORMATS)

_library = torch.library.Library("minfer", "IMPL")


class KvCache(NamedTuple):
    """Tensors of a cache, see :mod:`minfer.ops.kv_cache`; those that its format does not have are None."""

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


@signature_of(torch.ops.minfer.kv_cache_append.default)
def kv_cache_append(
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
    """Stores the keys and values of new tokens in a cache, in its format; its tensors are written in place.

    Args:
      k: [tokens, heads_kv, head_dim], float16 or bfloat16. Any strides.
      v: [tokens, heads_kv, head_dim_v], k's dtype.
      k_cache, v_cache: as :func:`minfer.attention_paged` takes them, paged or contiguous; 16-bit ones are of k's dtype.
      slot_mapping: int64 [tokens] on k's device: the slot of each token, see :mod:`minfer.ops.kv_cache`. A token with a negative one is
        stored nowhere. The others must differ.
      k_scale, v_scale: fp8: read. int8 and int4: written, contiguous.
      k_residual, v_residual: int4: k's dtype, contiguous, written; of as many sequences as there are in the call. They, scales that are
        written, and the caches and what they are written from, must not overlap each other, which is an error where it can be told.
      cu_seqlens: int32 [batch + 1] on k's device: tokens cu_seqlens[b] to cu_seqlens[b + 1] are of sequence b. Only int4 needs to know,
        whose residuals are sequences'; it stores no token outside of all sequences. None: token i is of sequence i, as in decode.
      kv_format: "16bit", "fp8_e4m3", "int8" or "int4"; "auto" is told by the caches' dtype, of which uint8 is int4.

    int4: a sequence's tokens that have a slot follow each other, in the call and from call to call. The last token of a group has the whole
    group, from the residual and the call, quantised and stored: at the slots up to its own. Tokens of no whole group yet are kept in the
    residual, row slot % group; what its other rows hold afterwards does not matter.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was stored. Values of
        slot_mapping and cu_seqlens that cannot be right are errors on CPU; on CUDA a token whose slot the cache does not have is stored
        nowhere, and nothing outside of the tensors is read or written. Also where an argument requires grad.

    slot_mapping, cu_seqlens and fp8's scales are read on the device: no host synchronises, and a captured graph follows them. Slots that
    are not named keep their bits. In a compiled graph, caches that are views of other tensors have fixed sizes, dynamic or not.

    Numerics: in float32, roundings to nearest, ties to even.
      fp8_e4m3: code = x / scale, saturated at +-448.
      int8: scale = max |x| / 127 of a token and head; code = round(x / scale); all codes are 0 where scale is.
      int4: over the tokens of a group for K, over the channels of a group for V: minimum = float16(min x), scale = float16((max x -
        minimum) / 15), both saturated; code = round((x - minimum) / scale), within 0 to 15; the divisor is 1 where scale is 0.
    Magnitudes are those of finite x: infinite ones and NaN spoil what shares their scale. The same inputs give the same bits in every run.

    Source: int4 is KIVI's (Liu et al., 2024).
    """


def _specialize(x: Tensor) -> None:
    """Fixes the sizes that x's layout depends on: a view at a symbolic offset, Inductor writes at offset 0 (torch 2.13, pytorch#198068)."""
    for size in (*x.shape, *x.stride(), x.storage_offset()):
        int(size)


@torch.library.register_fake("minfer::kv_cache_append", lib=_library)
def _kv_cache_append_fake(k, v, k_cache, v_cache, slot_mapping, **options):
    for x in (k_cache, v_cache, *(options.get(name) for name in checks_kv_cache.SCALES)):
        if x is not None and isinstance(x.storage_offset(), torch.SymInt):
            _specialize(x)
    checks_kv_cache.check_kv_cache_append(k, v, k_cache, v_cache, slot_mapping, **options)


def _kv_cache_append_autograd(keyset, *args, **kwargs):
    """What was stored has no history: nothing that requires grad is taken. Tells autograd that the cache's tensors changed."""
    op = torch.ops.minfer.kv_cache_append.default
    torch._check(
        not _differentiated(args, kwargs),
        lambda: "minfer::kv_cache_append: cannot be differentiated, but an argument requires grad; call it under torch.no_grad()",
    )
    op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)
    written = [args[2], args[3], *(kwargs.get(name) for name in checks_kv_cache.SCALES)]
    torch.autograd.graph.increment_version([x for x in written if x is not None and not x.is_inference()])


_library.impl("kv_cache_append", _kv_cache_append_autograd, "Autograd", with_keyset=True)
