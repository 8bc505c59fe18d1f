"""Attention of padded sequences in float64, from the docstrings of minfer.attention and minfer.attention_paged and docs/numerics.md,
section 5.

Error model, of one query, with p the probabilities and s the scores:

* a score is a float32 sum of products: off by accumulation(head_dim) * scale * sum |q k|, in which its own rounding is;
* on CUDA, with softcap, a capped score is off by 1.02 * 2^-11 of itself;
* on CUDA exponentials are rounded to q's dtype (over codes also to float16) before they meet v: one rounding of each term p v. Those near 0
  are subnormal in float16: 2^-25 each, of a row whose sum is at least 1;
* over int8 and int4 codes on CUDA keys, or queries times scales, are rounded, and values, or exponentials times scales: one rounding of
  each
  term q k and p v, over codes in whole tiles a little more. fp8 codes are exact. int4's products of queries and scales near 0 are
  subnormal;
* an error e of a score changes its probability by a factor exp(+-e), and the sum that it is divided by likewise;
* out is rounded once.

The documented bounds are those of the worst case; here roundings of different terms count as independent (compare.of_roundings).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compare import Expected, accumulation, of_roundings, smallest, unit

TANH = 1.02 * 2.0**-11
HALF = unit(torch.float16)
HALF_SUBNORMAL = 2.0**-25  # half a unit in the last place of float16's subnormal numbers
DEVIATION = 0.58  # the standard deviation of a rounding, in units of the largest that it may be


@dataclass
class Codes:
    """What K and V are stored in, if not in q's dtype.

    k, v: magnitudes of what keys and values are made of, for roundings that are relative to it (int4: |code * scale| + |minimum|); floor:
    what an exponential near 0, which is off by 2^-25, multiplies. All [batch, keys, heads_kv, ..]. rounded: not fp8.
    """

    k: Tensor
    v: Tensor
    floor: Tensor
    rounded: bool
    int4: bool


@dataclass
class Attended:
    """out [batch, queries, heads, head_dim_v] and lse [batch, queries, heads], each with a bound, and torch's out."""

    out: Tensor
    out_bound: Tensor
    lse: Tensor
    lse_bound: Tensor
    peer: Tensor
    variance: Tensor  # of out's elements, by the documented roundings in between


def visible(queries: Tensor, keys: Tensor, most_queries: int, most_keys: int, causal: bool, left: int, right: int) -> Tensor:
    """[batch, most_queries, most_keys]: which keys a query sees; queries and keys [batch]: the sequences' lengths. The last query is
    aligned to the last key."""
    i = torch.arange(most_queries, device=queries.device)[None, :, None]
    j = torch.arange(most_keys, device=queries.device)[None, None, :]
    aligned = i + (keys - queries)[:, None, None]
    seen = (i < queries[:, None, None]) & (j < keys[:, None, None])
    if causal:
        seen &= j <= aligned
    if left >= 0:
        seen &= j >= aligned - left
    if right >= 0:
        seen &= j <= aligned + right
    return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    dtype: torch.dtype,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    codes: Codes | None = None,
) -> Attended:
    """q [batch, queries, heads_q, head_dim], k and v [batch, keys, heads_kv, ..], float64, with zeros where nobody sees; ``dtype``: q's
    own."""
    (batch, queries, heads_q, head_dim), keys, heads_kv, d_v = q.shape, k.shape[1], k.shape[2], v.shape[3]
    cuda = q.device.type == "cuda"
    group = heads_q // heads_kv if heads_kv else 1
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    grouped = q.view(batch, queries, heads_kv, group, head_dim).permute(0, 2, 3, 1, 4).reshape(batch, heads_kv, group * queries, head_dim)
    by_head = lambda x: x.permute(0, 2, 1, 3)  # noqa: E731  [batch, heads_kv, keys, ..]
    of_group = lambda x: x.view(batch, heads_kv, group, queries, x.shape[-1])  # noqa: E731
    mask = seen[:, None, None]

    scores = of_group(grouped @ by_head(k).mT) * scale
    absolute = scale * of_group(grouped.abs() @ by_head(k if codes is None else codes.k).abs().mT)
    capped = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
    capped = capped.masked_fill(~mask, -math.inf)
    sink = None if sinks is None else sinks.double().view(1, heads_kv, group, 1)

    def softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities, the logarithm of their denominator, and the denominator over the largest exponential."""
        highest = scores.amax(-1) if keys else scores.new_full(scores.shape[:-1], -math.inf)
        if sink is not None:
            highest = torch.maximum(highest, sink.to(scores.dtype))
        base = highest.masked_fill(highest == -math.inf, 0.0)
        e = (scores - base[..., None]).exp()
        total = e.sum(-1)
        if sink is not None:
            total = total + (sink.to(scores.dtype) - base).exp()
        return e / total.masked_fill(total == 0, 1.0)[..., None], base + total.log(), total

    p, lse, total = softmax(capped)
    values = by_head(v)

    def times(p: Tensor, values: Tensor) -> Tensor:
        return of_group(p.reshape(batch, heads_kv, group * queries, keys) @ values)

    out, magnitude, squares = times(p, values), times(p, values.abs()), times(p * p, values * values)

    # Errors of scores, [batch, heads_kv, group, queries, keys], of the keys that are seen; `moved`: their variance.
    off, moved = accumulation(head_dim) * absolute, torch.zeros_like(absolute)
    if cuda and softcap > 0:
        cap = TANH * capped.masked_fill(~mask, 0.0).abs()
        off, moved = off + cap, moved + (DEVIATION * cap).square()
    coded = codes is not None and codes.rounded and cuda
    rounding = 1.1 * max(unit(dtype), HALF)
    if coded:
        squared = scale * scale * of_group(grouped.square() @ by_head(codes.k).square().mT)
        off, moved = off + of_roundings(rounding, absolute, squared), moved + 2 * (DEVIATION * rounding) ** 2 * squared
    if codes is not None and cuda:
        largest = of_group(grouped.abs().amax(-1, keepdim=True))
        off = off + HALF_SUBNORMAL * largest * scale * of_group(torch.ones_like(grouped) @ by_head(codes.k).mT)
        if codes.int4:
            off = off + 15 * 2.0**-21 * scale * head_dim * largest
    farthest = off.masked_fill(~mask, 0.0).amax(-1) if keys else off.new_zeros(off.shape[:-1])

    probability = unit(dtype) if codes is None else max(unit(dtype), HALF)
    sums = 2.0**-20 + accumulation(keys) + (2.0**-24 * keys if cuda and softcap > 0 else 0.0)
    bound = (torch.expm1(2.0 * farthest.clamp(max=20.0)) + sums)[..., None] * magnitude
    weighed = p * p * moved.masked_fill(~mask, 0.0)
    variance = times(weighed, values.square()) + weighed.sum(-1, keepdim=True) * out.square()
    if cuda:
        bound = bound + of_roundings(probability, magnitude, squares)
        variance = variance + (DEVIATION * probability) ** 2 * squares
        if codes is not None or dtype == torch.float16:
            small = values.abs() if codes is None else by_head(codes.floor)
            bound = bound + HALF_SUBNORMAL * times(mask.expand_as(capped).double(), small) / total.clamp(min=1.0)[..., None]
    if coded:
        v_magnitude = by_head(codes.v)
        v_squares = times(p * p, v_magnitude.square())
        bound = bound + of_roundings(rounding, times(p, v_magnitude), v_squares)
        variance = variance + (DEVIATION * rounding) ** 2 * v_squares
    if codes is not None and codes.int4 and cuda:
        bound = bound + 2.0**-24  # the residual becomes float16
    bound = bound + unit(dtype) * (out.abs() + bound) + smallest(dtype)
    lse_bound = farthest + sums + 2.0**-21 * lse.abs().nan_to_num(posinf=0.0)
    variance = variance.masked_fill(~mask.any(-1, keepdim=True), 0.0)

    # torch: products of 16-bit operands summed in float32, probabilities rounded to 16 bits, out rounded once, as its fused attention does.
    low = lambda x: x.to(dtype).float()  # noqa: E731
    score32 = of_group(low(grouped) @ low(by_head(k)).mT) * scale
    if softcap > 0:
        score32 = softcap * torch.tanh(score32 / softcap)
    p32, _, _ = softmax(score32.masked_fill(~mask, -math.inf))
    peer = times(low(p32), low(values)).to(dtype)

    back = lambda x: x.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads_q, d_v)  # noqa: E731
    lse_back = lambda x: x.permute(0, 3, 1, 2).reshape(batch, queries, heads_q)  # noqa: E731
    return Attended(back(out), back(bound), lse_back(lse), lse_back(lse_bound), back(peer), back(variance))


def expected_of(a: Attended, dtype: torch.dtype) -> list[Expected]:
    """Results of a call with a batch mode: out as it is, lse [batch, heads, queries]."""
    return [
        Expected("out", dtype, a.out, a.out_bound, a.peer, usual=float(a.variance.sum().sqrt())),
        Expected("lse", torch.float32, a.lse.transpose(1, 2), a.lse_bound.transpose(1, 2)),
    ]


def expected_rows(a: Attended, queries: list[int], starts: list[int], tokens: int, dtype: torch.dtype) -> list[Expected]:
    """Results of sequences end to end: out [tokens, heads, head_dim_v] and lse [heads, tokens]; rows of no sequence are zeros and -inf."""
    heads, d_v = a.out.shape[2:]
    device = a.out.device
    sequence = torch.tensor([b for b, n in enumerate(queries) for _ in range(n)], dtype=torch.long, device=device)
    place = torch.tensor([i for n in queries for i in range(n)], dtype=torch.long, device=device)
    row = torch.tensor([start + i for start, n in zip(starts, queries, strict=True) for i in range(n)], dtype=torch.long, device=device)

    def spread(x: Tensor, empty: float) -> Tensor:
        whole = x.new_full((tokens, *x.shape[2:]), empty)
        whole[row] = x[sequence, place]
        return whole

    usual = float(spread(a.variance, 0.0).sum().sqrt())
    out = Expected("out", dtype, spread(a.out, 0.0), spread(a.out_bound, 0.0), spread(a.peer, 0.0), usual=usual)
    lse = Expected("lse", torch.float32, spread(a.lse, -math.inf).t(), spread(a.lse_bound, 0.0).t())
    assert out.truth.shape == (tokens, heads, d_v)
    return [out, lse]
