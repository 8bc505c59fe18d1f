"""Which tokens a draw may be, in float64: written from the documentation of minfer.sample, with a sort and without minfer.

Noise is an exact function of its place: Philox 4x32-10 in integers, of Python or of tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MASS_ERROR = 2e-5  # of sums of probabilities, for exponentials of float32 arguments; and for each token
TOKEN_ERROR = 2.0**-32
SCORE_ERROR = 1e-4


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Salmon et al., 2011. Words are integers or int64 tensors, whose products wrap around and keep their 64 bits."""
    a, b, c, d = counter
    k, j = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32 & WORD) ^ b ^ k, second & WORD, (first >> 32 & WORD) ^ d ^ j, first & WORD
        k, j = k + 0x9E3779B9 & WORD, j + 0xBB67AE85 & WORD
    return a, b, c, d


def exponentials(tokens: Tensor, seed: int, offset: int) -> Tensor:
    """The tokens' exponentially distributed numbers, float64. tokens: int64 [n]."""
    words = philox((tokens // 4, 0, offset & WORD, offset >> 32 & WORD), (seed & WORD, seed >> 32 & WORD))
    u = (torch.stack(words).gather(0, tokens[None] % 4)[0].double() + 0.5) * 2.0**-32
    return (-torch.log1p(-u.clamp(max=1 - 2.0**-33))).clamp(min=2.0**-33)


@dataclass
class Kept:
    """Tokens of a row by logit, the largest first. ``surely``: whether one is kept whatever roundings do; ``maybe``: or some make it so."""

    tokens: Tensor
    surely: Tensor
    maybe: Tensor


def kept(v: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Kept:
    """``v``: a row's logits behind mask, bias and penalties, float64 [vocabulary] of a distribution that exists."""
    tokens = v.sort(descending=True, stable=True).indices
    x = (v[tokens] - v.max()) / max(temperature, 1e-30)
    surely, maybe = v[tokens] > -math.inf, v[tokens] > -math.inf
    if min_p > 0:
        least, error = math.log(min(min_p, 1.0)), 1e-5 * (1 + v.max().abs() / max(temperature, 1e-30))
        surely, maybe = surely & (x >= least + error), maybe & (x >= least - error)
        surely[0] = maybe[0] = True
        equal = v[tokens] == v.max()
        surely, maybe = surely | equal, maybe | equal
    if 0 < top_k < len(v):
        surely[top_k:] = maybe[top_k:] = False
    if top_p < 1:
        p = x.exp()
        error = MASS_ERROR + TOKEN_ERROR * len(v) + 2.0**-22 * float(x[maybe].abs().clamp(max=40).max())
        of_most, of_least = p * maybe, p * surely
        before = p.cumsum(0) - p
        surely &= before < top_p * of_least.sum() - error * of_most.sum()
        maybe &= before <= top_p * of_most.sum() + error * of_most.sum()
        surely[0] = maybe[0] = True
    return Kept(tokens, surely, maybe)


def accepts(token: int, v: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, offset: int) -> bool:
    """Whether a row's draw may be this token."""
    v = v.double()
    if not 0 <= token < len(v):
        return False
    if temperature <= 0:
        return token == int((v == v.max()).nonzero()[0])
    row = kept(v, temperature, top_k, top_p, min_p)
    if not bool((row.tokens[row.maybe] == token).any()):
        return False

    def scores(of: Tensor) -> Tensor:
        return (v[of] - v.max()) / temperature - exponentials(of, seed, offset).log()

    own = float(scores(torch.tensor([token], device=v.device)))
    error = SCORE_ERROR * (1 + abs(own)) + 2.0**-22 * float(v.max().abs()) / temperature
    rivals = row.tokens[row.surely & (row.tokens != token)]
    return bool((scores(rivals) <= own + error).all())


def probabilities(v: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """float64 [vocabulary], of parameters that no rounding decides on."""
    row = kept(v.double(), temperature, top_k, top_p, min_p)
    assert torch.equal(row.surely, row.maybe)
    p = torch.zeros(len(v), dtype=torch.float64, device=v.device)
    chosen = row.tokens[row.surely]
    p[chosen] = ((v[chosen].double() - v.max().double()) / temperature).exp()
    return p / p.sum()
