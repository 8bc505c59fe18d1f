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
fp8_e4m3    float8_e4m3fn    float32 [1] or [heads_kv], given by the caller                          code * scale
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

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks_kv_cache
from .ops import _differentiated

KV_FORMATS = tuple(checks_kv_cache.FORMATS)
# Head dimensions are multiples of so many: whole 16 bytes of codes, for int4 whole groups of channels.
_HEAD_DIM_UNITS = {"16bit": 8, "fp8_e4m3": 16, "int8": 16, "int4": 32}

_library = torch.library.Library("minfer", "IMPL")


class KvCache(NamedTuple):
    """Tensors of a cache, see :mod:`minfer.kv_cache`; those that its format does not have are None."""

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
) -> KvCache:
    """A cache of ``pages`` pages of ``page_size`` tokens, or of ``pages`` sequences of up to ``page_size``.

    Args:
      pages, page_size: of a paged cache; the batch and the length of a contiguous one. page_size is a multiple of 8, of group_tokens for
        int4; the length of a contiguous 16-bit cache is any.
      heads_kv, head_dim, head_dim_v: of the keys and values; head_dim_v is head_dim if None. Multiples of 8 up to 256, of 16 for fp8 and
        int8, of 32 for int4.
      kv_format: "16bit", "fp8_e4m3", "int8" or "int4".
      dtype: of 16-bit codes and of residuals: that of the queries.
      batch: int4: the sequences that residuals are kept for; ``pages`` if None.
      group_tokens: int4: tokens of a scale of K, 32 or 64.
      group_channels: int4: elements of head_dim_v of a scale of V, a multiple of 32 that divides head_dim_v; if None 64, or 32 where 64
        does not divide it.

    Returns:
      KvCache of zeros; fp8's scales are ones, one for each head.

    Raises:
      ValueError: an argument cannot be right.
    """
    if kv_format not in KV_FORMATS:
        raise ValueError(f"kv_format must be one of {', '.join(KV_FORMATS)}, got {kv_format!r}")
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    unit = _HEAD_DIM_UNITS[kv_format]
    if head_dim % unit != 0 or head_dim_v % unit != 0:
        raise ValueError(f"{kv_format}: head_dim and head_dim_v must be multiples of {unit}, got {head_dim} and {head_dim_v}")
    if kv_format != "16bit" and page_size % 8 != 0:
        raise ValueError(f"{kv_format}: page_size must be a multiple of 8, got {page_size}")

    def zeros(*shape: int, of: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    def zero_codes(d: int) -> Tensor:
        if kv_format == "16bit":
            return zeros(pages, page_size, heads_kv, d, of=codes)
        strides = (heads_kv * page_size * d, d, page_size * d, 1)
        return torch.empty_strided((pages, page_size, heads_kv, d), strides, dtype=codes, device=device).zero_()

    codes = dtype if kv_format == "16bit" else checks_kv_cache.FORMATS[kv_format][0]
    per_byte = 2 if kv_format == "int4" else 1
    k, v = (zero_codes(d // per_byte) for d in (head_dim, head_dim_v))
    if kv_format == "16bit":
        return KvCache(kv_format, k, v)
    if kv_format == "fp8_e4m3":
        return KvCache(kv_format, k, v, *(torch.ones(heads_kv, dtype=torch.float32, device=device) for _ in range(2)))
    if kv_format == "int8":
        return KvCache(kv_format, k, v, *(zeros(pages, heads_kv, page_size, of=torch.float32) for _ in range(2)))
    if group_tokens not in checks_kv_cache.GROUPS_OF_TOKENS or page_size % group_tokens != 0:
        raise ValueError(f"int4: group_tokens must be 32 or 64 and divide page_size {page_size}, got {group_tokens}")
    if group_channels is None:
        group_channels = 64 if head_dim_v % 64 == 0 else 32
    if group_channels < 32 or group_channels % 32 != 0 or head_dim_v % group_channels != 0:
        raise ValueError(f"int4: group_channels must be a multiple of 32 that divides head_dim_v {head_dim_v}, got {group_channels}")
    k_scale = zeros(pages, heads_kv, page_size // group_tokens, 2, head_dim, of=torch.float16)
    v_scale = zeros(pages, heads_kv, 2 * (head_dim_v // group_channels), page_size, of=torch.float16)
    sequences = pages if batch is None else batch
    residuals = (zeros(sequences, group_tokens, heads_kv, d, of=dtype) for d in (head_dim, head_dim_v))
    return KvCache(kv_format, k, v, k_scale, v_scale, *residuals)


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
      slot_mapping: int64 [tokens] on k's device: the slot of each token, see :mod:`minfer.kv_cache`. A token with a negative one is stored
        nowhere. The others must differ.
      k_scale, v_scale: fp8: read. int8 and int4: written, contiguous.
      k_residual, v_residual: int4: k's dtype, contiguous, written; of as many sequences as there are in the call.
      cu_seqlens: int32 [batch + 1] on k's device: tokens cu_seqlens[b] to cu_seqlens[b + 1] are of sequence b. Only int4 needs to know,
        whose residuals are sequences'; it stores no token outside of all sequences. None: token i is of sequence i, as in decode.
      kv_format: "16bit", "fp8_e4m3", "int8" or "int4"; "auto" is told by the caches' dtype, of which uint8 is int4.

    int4: a sequence's tokens that have a slot follow each other, in the call and from call to call. The last token of a group has the whole
    group, from the residual and the call, quantised and stored: at the slots up to its own. Tokens of no whole group yet are kept in the
    residual, row slot % group; what its other rows hold afterwards does not matter.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was stored. Values of
        slot_mapping and cu_seqlens that cannot be right are errors on CPU and undefined on CUDA. Also where an argument requires grad.

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
    torch.ops.minfer.kv_cache_append.default(
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
        k_residual=k_residual,
        v_residual=v_residual,
        cu_seqlens=cu_seqlens,
        kv_format=kv_format,
    )


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
