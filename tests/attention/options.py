"""The options of attention: what tests choose from, values that cannot be right, and what the options mean, as the definition in float64
and as torch's own computation in q's type. The tests of this folder and the random tests (``tests/fuzz``) take them from here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from minfer.reference import attention as reference_attention


class Option(NamedTuple):
    """An option that all three operators have. A value of True stands for a random tensor, see `call_options`."""

    default: Any
    alone: Any  # its value in calls without another option
    together: Any  # its value in calls that have all options
    usual: Callable[[random.Random, int], Any]  # a random value; takes head_dim
    edges: Callable[[int], tuple]  # values that the random tests (tests/fuzz) choose from; takes head_dim
    wrong: tuple[tuple[Any, str], ...]  # values that it cannot have, or functions of a q with 4 heads, and what the message must say


SOFTMAX_OPTIONS = {
    "softcap": Option(
        default=0.0,
        alone=4.0,
        together=3.0,
        usual=lambda draw, head_dim: draw.uniform(1.0, 10.0),
        edges=lambda head_dim: (0.5, 3.0, 30.0, 50.0),
        wrong=(
            (-1.0, r"softcap must be 0 \(none\) or positive, got -1"),
            (math.nan, r"softcap must be 0 \(none\) or positive, got -?nan"),
            (math.inf, "softcap must be finite in float32, got inf"),
        ),
    ),
    "scale": Option(
        default=None,
        alone=0.37,
        together=0.3,
        usual=lambda draw, head_dim: draw.uniform(0.5, 2.0) * head_dim**-0.5,
        edges=lambda head_dim: tuple(x * head_dim**-0.5 for x in (0.37, 1.0, 2.0)),
        wrong=(
            (0.0, "scale must be positive, got 0"),
            (-1.0, "scale must be positive, got -1"),
            (math.nan, "scale must be positive, got -?nan"),
            (math.inf, "scale must be finite in float32, got inf"),
            (1e300, r"scale must be finite in float32, got 1e\+?300"),
        ),
    ),
    "sinks": Option(
        default=None,
        alone=True,
        together=True,
        usual=lambda draw, head_dim: True,
        edges=lambda head_dim: (True,),
        wrong=(
            (lambda q: q.new_zeros(2), r"sinks must be \[4\], got \[2\]"),
            (lambda q: q.new_zeros(7), r"sinks must be \[4\], got \[7\]"),
            (lambda q: q.new_zeros(1, 4), r"sinks must be \[4\], got \[1, 4\]"),
            (lambda q: torch.zeros(4, device=q.device), "sinks must be "),
        ),
    ),
}
# What the three schemas have in common, beside the scale.
SOFTMAX_SCHEMA = "float softcap=0., Tensor? sinks=None"

_ALONE = {name: {name: option.alone} for name, option in SOFTMAX_OPTIONS.items()}
_TOGETHER = {name: option.together for name, option in SOFTMAX_OPTIONS.items()}

# Options of attention and attention_varlen.
OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "left": dict(window_left=5),
    "right": dict(window_right=3),
    "window": dict(window_left=4, window_right=2),
    "aligned key": dict(window_left=0, window_right=0),
    "sliding": dict(causal=True, window_left=7),
    "causal within right": dict(causal=True, window_right=9),
    "windows past every key": dict(window_left=2**40, window_right=2**31 - 1),
    **_ALONE,
    "gemma": dict(causal=True, window_left=40, softcap=6.0, scale=0.2),
    "gpt-oss": dict(causal=True, window_left=15, sinks=True),
    "all": dict(causal=True, window_left=21, window_right=4) | _TOGETHER,
}
# Options of attention_paged beside its lengths.
PAGED_OPTIONS = {
    "plain": {},
    "all keys": dict(causal=False),
    "window": dict(window_left=21),
    "aligned key": dict(window_left=0),
    "window without causal": dict(causal=False, window_left=9),
    "window past every key": dict(window_left=2**40),
    **_ALONE,
    "all": dict(window_left=40) | _TOGETHER,
}


def call_options(options: dict, heads_q: int, dtype, device) -> dict:
    """Options with sinks drawn: some far below the scores, some above."""
    if options.get("sinks") is not True:
        return dict(options)
    return options | dict(sinks=(torch.randn(heads_q, device=device) * 2).to(dtype))


def draw_softmax_options(draw: random.Random, head_dim: int) -> dict:
    """Some of the options, with usual values."""
    return {name: option.usual(draw, head_dim) for name, option in SOFTMAX_OPTIONS.items() if draw.random() < 0.3}


def wrong_options(q: torch.Tensor) -> dict:
    """name -> (what the message must say, options) of calls with a ``q`` of 4 heads."""
    return {
        f"{name} {i}": (message, {name: value(q) if callable(value) else value})
        for name, option in SOFTMAX_OPTIONS.items()
        for i, (value, message) in enumerate(option.wrong)
    }


# ---- what the options mean -----------------------------------------------------------------------------------------------------


def definition(q, k, v, *, causal=False, scale=None, window_left=-1, window_right=-1, softcap=0.0, sinks=None):
    """Attention of one sequence, query by query, in float64: out [seqlen_q, heads_q, head_dim_v] and lse [heads_q, seqlen_q]."""
    (seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, _) = q.shape, k.shape
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(seqlen_q, heads_q, v.shape[-1], dtype=torch.float64)
    lse = torch.full((heads_q, seqlen_q), -math.inf, dtype=torch.float64)
    for h in range(heads_q):
        kv = h // (heads_q // heads_kv)
        for i in range(seqlen_q):
            aligned = i + seqlen_k - seqlen_q
            keys = [
                j
                for j in range(seqlen_k)
                if (not causal or j <= aligned)
                and (window_left < 0 or j >= aligned - window_left)
                and (window_right < 0 or j <= aligned + window_right)
            ]
            scores = k[keys, kv] @ q[i, h] * (1 / math.sqrt(head_dim) if scale is None else scale)
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            terms = scores if sinks is None else torch.cat([scores, sinks[h : h + 1].double()])
            if len(terms):
                lse[h, i] = torch.logsumexp(terms, 0)
                out[i, h] = (scores - lse[h, i]).exp() @ v[keys, kv]
    return out, lse


def peer(q, k, v, *, causal=False, scale=None, window_left=-1, window_right=-1, softcap=0.0, sinks=None, kernel=None):
    """One sequence by torch in q's dtype: products in it, softmax in float32, probabilities rounded to it."""
    (seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv, _) = q.shape, k.shape
    if seqlen_q == 0 or seqlen_k == 0 or heads_q == 0:
        return q.new_zeros(seqlen_q, heads_q, v.shape[-1])
    k, v = (x.repeat_interleave(heads_q // heads_kv, 1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k.mT).float() * (head_dim**-0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    seen = reference_attention.visible(0, seqlen_q, seqlen_q, seqlen_k, causal, window_left, window_right, q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, seqlen_q, 1)], -1)
    # Of a row without a key, softmax is NaN.
    p = torch.softmax(scores, -1).nan_to_num(0.0)[..., :seqlen_k].to(q.dtype)
    return (p @ v).transpose(0, 1)
