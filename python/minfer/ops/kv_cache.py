"""The operator that stores keys and values in a cache; the layouts are in :mod:`minfer.formats.kv_cache`."""

from __future__ import annotations

from torch import Tensor

from .._core.operator import operator
from ..checks.kv_cache import check_kv_cache_append, check_qk_norm_rope_append
from ..formats.kv_cache import KvCache, allocate_kv_cache
from ..reference import kv_cache as reference

__all__ = ["KvCache", "allocate_kv_cache", "kv_cache_append", "qk_norm_rope_append"]


@operator(check=check_kv_cache_append, reference=reference.kv_cache_append, values=reference.check_values)
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
        written, and the caches and what they are written from, must not overlap each other, which is an error where it can be detected.
      cu_seqlens: int32 [batch + 1] on k's device: tokens cu_seqlens[b] to cu_seqlens[b + 1] are of sequence b. Only int4 needs
        this, since each sequence has residuals; it stores no token outside of all sequences. None: token i is of sequence i, as in decode.
      kv_format: "16bit", "fp8_e4m3", "int8" or "int4"; "auto" follows from the caches' dtype, where uint8 means int4.

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


@operator(check=check_qk_norm_rope_append, reference=reference.qk_norm_rope_append, values=reference.check_prepared_values)
def qk_norm_rope_append(
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
) -> Tensor:
    """What stands between the GEMM of q, k and v and attention, in one launch: :func:`minfer.rms_norm` of each head of q and k where there
    are weights, :func:`minfer.rope` of both, and :func:`kv_cache_append` of k and v.

    Args:
      qkv: [tokens, heads + 2 * heads_kv, head_dim], float16 or bfloat16: heads of queries, then those of keys, then those of values; the
        cache says how many the latter are. Rows that do not begin at multiples of 16 bytes are copied first.
      q_weight, k_weight: [head_dim] of qkv's dtype, of the norms of each head (Qwen3, Gemma 3); None: no normalisation.
      cos_sin, positions, interleaved, rotary_dim: as in :func:`minfer.rope`.
      k_cache, v_cache, slot_mapping, k_scale, v_scale, k_residual, v_residual, cu_seqlens, kv_format: as in :func:`kv_cache_append`; the
        caches are of keys and values of head_dim elements. They must not overlap qkv. On CUDA residuals begin at multiples of 16 bytes.
      eps, weight_offset: as in :func:`minfer.rms_norm`.

    Returns:
      The queries, [tokens, heads, head_dim] of qkv's dtype, contiguous. Those of tokens that have no slot are among them.

    Raises:
      RuntimeError: an argument cannot be right, as in :func:`minfer.rope` and :func:`kv_cache_append`.

    Numerics: norm and rotation are float32, and their result is rounded once, to qkv's dtype: there is no rounding between the two. What
    is stored of a key follows from that rounded value, as :func:`kv_cache_append` would store it. Values are stored as they are.
    """
