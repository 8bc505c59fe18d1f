"""Attention over keys and values in tensors and in caches.

    out, lse = minfer.attention(q, k, v, causal=True)                                             # sequences of one length
    out, lse = minfer.attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, causal=True)            # sequences end to end
    out, lse = minfer.attention_paged(q, k_cache, v_cache, seq_lens, block_table=block_table)     # keys in a cache
    out, lse = minfer.merge_attention_states([out_prefix, out_suffix], [lse_prefix, lse_suffix])  # keys in parts

Scores never reach memory. Lengths and block tables are read on the device: no host synchronises, and a captured graph follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .._core.operator import operator
from ..checks import attention as checks
from ..reference import attention as reference

__all__ = [
    "attention",
    "attention_varlen",
    "attention_paged",
    "merge_attention_states",
]


@operator(check=checks.check_attention, reference=reference.attention)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """out = softmax(scale * q.k^T).v over the keys that each query sees, and the logarithm of the softmax's denominator.

    Args:
      q: [batch, seqlen_q, heads_q, head_dim], float16 or bfloat16.
      k: [batch, seqlen_k, heads_kv, head_dim], q's dtype. heads_q must be a multiple of heads_kv: query head h reads KV head
        h // (heads_q // heads_kv), so that multi-head, grouped-query and multi-query attention are one call and no head is copied.
      v: [batch, seqlen_k, heads_kv, head_dim_v], q's dtype. Head dimensions are multiples of 8, head_dim at most 256 and head_dim_v at
        most head_dim. Strided and offset views of q, k and v are taken as they are where TMA addresses them (last dimension contiguous,
        base and strides multiples of 16 bytes), copied first otherwise.
      causal: query i sees the keys up to i + seqlen_k - seqlen_q: the last query is aligned to the last key (bottom right).
      scale: of the scores, positive; head_dim ** -0.5 if None.
      window_left: query i sees the keys from i + seqlen_k - seqlen_q - window_left on; all of them if negative.
      window_right: query i sees the keys up to i + seqlen_k - seqlen_q + window_right; all of them if negative. ``causal`` is a
        window_right of 0.
      softcap: scores become softcap * tanh(scale * q.k / softcap), before masks (Gemma 2), tanh to 2^-11 of itself; 0 is none.
      sinks: [heads_q], q's dtype: the score, neither scaled nor capped, of a key without a value that all queries of a head see (gpt-oss).
        It adds exp(sink) to the softmax's denominator.
      kernel: for measurements: a name of ``minfer.kernels("attention")``. On CPU it is checked and otherwise ignored.

    Returns:
      out: [batch, seqlen_q, heads_q, head_dim_v], q's dtype, contiguous.
      lse: float32 [batch, heads_q, seqlen_q], contiguous: the natural logarithm of the softmax's denominator, sink included, so that
        out * exp(lse) adds up over disjoint parts of the keys, see :func:`merge_attention_states`.
      A query that sees no key has an out of zeros and an lse of -inf (with a sink: of the sink). Any batch, seqlen_q and seqlen_k >= 0.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: scores and the sum of values are accumulated in float32, the softmax is float32, its exponentials are rounded to q's dtype
    for the product with v (not on CPU), out is rounded once. v must be finite in keys that some query of the sequence sees, also for
    the other queries: where a tile holds both, 0 * NaN reaches those that do not see the key. Keys before all windows may hold anything.
    docs/numerics.md has the bounds. The same inputs, shapes and kernel give the same bits in every run.
    There is no backward.

    Source: FlashAttention-3 (Shah et al., 2024); the online softmax is Milakov and Gimelshein's (2018).
    """


@operator(check=checks.check_attention_varlen, reference=reference.attention_varlen, values=reference.check_varlen_values)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attention` of sequences of different lengths that lie end to end, without padding.

    Args:
      q: [tokens_q, heads_q, head_dim], float16 or bfloat16: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
      k, v: [tokens_k, heads_kv, head_dim] and [tokens_k, heads_kv, head_dim_v], q's dtype, with the rows cu_seqlens_k[b] to
        cu_seqlens_k[b + 1]. Heads, head dimensions and views as in :func:`attention`.
      cu_seqlens_q, cu_seqlens_k: int32 [batch + 1] on q's device. They must ascend within the rows there are; a sequence may be empty on
        either side. On CUDA they are read on the device and not checked: others are cut to the rows that there are, and of what such a
        call returns no more is said than that nothing outside of its tensors was read or written.
      max_seqlen_q, max_seqlen_k: upper bounds of the lengths, which only size the launch. A longer sequence is an error on CPU; on
        CUDA it only takes longer. In a CUDA graph they are those of the capture.
      causal, scale, window_left, window_right, softcap, sinks, kernel: as in :func:`attention`, of each sequence by its own lengths.

    Returns:
      out: [tokens_q, heads_q, head_dim_v], q's dtype, contiguous.
      lse: float32 [heads_q, tokens_q], contiguous.
      Rows of q outside every sequence have an out of zeros and an lse of -inf, whatever the sinks are.

    Raises:
      RuntimeError: as :func:`attention`.

    Numerics and source: as :func:`attention`. What lies behind or between the sequences' rows is never used, NaN included.
    """


@operator(check=checks.check_attention_paged, reference=reference.attention_paged, values=reference.check_paged_values)
def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    *,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 1,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_residual: Tensor | None = None,
    v_residual: Tensor | None = None,
    kv_format: str = "auto",
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attention` over keys and values in a cache: decode, speculative decode, chunks of a prompt.

    Args:
      q: [batch, seqlen_q, heads_q, head_dim], or [tokens, heads_q, head_dim] with sequences end to end: cu_seqlens_q says where; without it
        each has max_seqlen_q rows. float16 or bfloat16. Views as in :func:`attention`.
      k_cache, v_cache: [pages, page_size, heads_kv, head_dim] and [.., head_dim_v], or without a block_table [batch, length, heads_kv, ..]:
        16-bit numbers of q's dtype, or fp8, int8 or int4 codes, laid out as :mod:`minfer.ops.kv_cache` says. Heads and head dimensions as
        in :func:`attention`; a page_size is a multiple of 8, and so is the length of a contiguous cache of codes. Strided and offset
        views are taken as they are, and must be what TMA addresses: last mode contiguous, base and strides multiples of 16 bytes.
      seq_lens: int32 [batch] on q's device: keys of each sequence, its queries' own with them, which :func:`minfer.kv_cache_append` has put
        into the cache already. 0 is legal.
      block_table: int32 [batch, n] on q's device: row b names the pages of sequence b in order. Entries of pages that no query needs may be
        anything.
      cu_seqlens_q: int32 [batch + 1] on q's device, as in :func:`attention_varlen`.
      max_seqlen_q: of a q of 3 modes: its sequences' length, with cu_seqlens_q an upper bound of it, which only sizes the launch. A longer
        sequence is an error on CPU; on CUDA it only takes longer. Of a q of 4 modes it is
        not used, but not negative either.
      k_scale, v_scale, k_residual, v_residual: what the cache's format has beside codes: ``**cache.scales()`` of a :class:`minfer.KvCache`.
      kv_format: "16bit", "fp8_e4m3", "int8" or "int4"; "auto" is told by the caches' dtype, of which uint8 is int4.
      causal: the last query is aligned to the last key: query i sees the keys up to i + seq_lens[b] - seqlen_q. False: all of them.
      scale, window_left, softcap, sinks: as in :func:`attention`, of each sequence by its own lengths.
      num_splits: parts that every sequence's keys are cut into, 1 to 256: the bits of a sequence's results do not depend on the rest of the
        batch. None: as many as fill the device, and they may. On CPU it is checked and otherwise ignored; on CUDA each part takes memory
        until the parts are added up, 8.5 bytes for each of q's elements (rounded up to rows of 64), and more than a quarter of the
        device's memory is an error.
      kernel: as in :func:`attention`.

    Returns:
      out: [batch, seqlen_q, heads_q, head_dim_v] or [tokens, heads_q, head_dim_v], q's dtype, contiguous.
      lse: float32 [batch, heads_q, seqlen_q] or [heads_q, tokens], contiguous.
      Queries that see no key, and rows of q outside every sequence, as in :func:`attention` and :func:`attention_varlen`.

    Raises:
      RuntimeError: as :func:`attention`. Values that cannot be right, lengths and pages beyond the cache, are errors on CPU. On CUDA
        lengths are taken as 0 to what the table, or the sequence's own cache, has room for, and a page that there is not as one of zeros
        (codes and scales): no value of an index leads outside of the tensors.

    seq_lens, block_table, cu_seqlens_q and the scales are read on the device: no host synchronises, and a captured graph follows them.
    Unused pages, rows behind seq_lens and rows before all windows may hold anything, NaN included, and so may their entries in block_table
    where a whole page is of such rows; other keys and values must be finite.

    Numerics: as :func:`attention`, code * scale (int4: + minimum) being the keys and values. On CUDA, with few queries, codes become
    float16 exactly, and what multiplies them is rounded to float16: exponentials times V's scales, queries (int4: times K's scales); parts
    of the keys are summed in order in float32. With many queries, keys and values are rounded to q's dtype, once (fp8: codes, exactly). The
    same inputs, shapes, kernel and num_splits give the same bits in every run. There is no backward.

    Source: FlashDecoding (Dao et al., 2023) for the splits, PagedAttention (Kwon et al., 2023) for the pages.
    """


def _of_lists(call: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The operator takes lists and tuples; others of a sequence's kind become lists."""

    def run(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return call(list(outs), list(lses))

    return run


@operator(check=checks.check_merge_attention_states, reference=reference.merge_attention_states, before=_of_lists)
def merge_attention_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention over all keys, of the attention over disjoint parts of them: shared prefixes, split KV caches, chunks, other ranks.

    Args:
      outs: one or more tensors of one shape, [batch, seqlen, heads, head_dim_v] or [tokens, heads, head_dim_v], and of one type, float16,
        bfloat16 or float32.
      lses: as many float32 tensors, [batch, heads, seqlen] or [heads, tokens], as :func:`attention` returns them. A sink belongs in one
        part only: in each it would be counted each time.

    Returns:
      out: outs' shape and dtype, contiguous, the sum of outs[i] * exp(lses[i] - lse).
      lse: lses' shape, contiguous, the logarithm of the sum of exp(lses[i]).
      A part whose lse is -inf adds nothing, whatever its out holds; where all are, out is zeros and lse -inf.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is.

    Numerics: in float32 in the order of the parts, out rounded once. The same inputs give the same bits in every run. There is no backward.
    On CUDA up to 16 parts are one launch, more a launch for each 16. Views are read as they are where head_dim_v is contiguous, bases and
    strides being multiples of 16 bytes, and where a row of head_dim_v is none; others are copied first.

    Source: the merge operator of cascade inference (FlashInfer, Ye et al., 2024).
    """
