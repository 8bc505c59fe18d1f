"""Seeded random problems: what speed is judged on where no table helps, and what the plan's cost model is fitted to.

Every problem has a generator of its own, seeded by its list's seed and its place, so that a part of a list is drawn without the rest.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import torch

from ..planning.plan import LAYOUTS, Problem, W4Problem

MOST_BYTES = 10**9  # of A, B, C and D of a 16-bit problem together
MOST_FLOPS = 1.5e12  # some 2 ms on an H200
MOST_M = 8192
_C_SHARE = _F16_SHARE = 0.25


def log_uniform(rng: random.Random, low: int, high: int, multiple: int = 1) -> int:
    """A multiple of ``multiple`` in [low, high], which are multiples of it, whose logarithm is spread evenly."""
    return multiple * round(math.exp(rng.uniform(math.log(low), math.log(high))) / multiple)


def _feasible(m: int, n: int, k: int, c: bool) -> bool:
    return 2 * (m * k + n * k + m * n * (2 if c else 1)) <= MOST_BYTES and 2 * m * n * k <= MOST_FLOPS


def _first_feasible(rng: random.Random, c: bool, draw: Callable[[], tuple[int, int, int]]) -> tuple[int, int, int]:
    while True:
        m, n, k = draw()
        if _feasible(m, n, k, c):
            return m, n, k


def _dense(suite: str, seed: int, index: int, low: int, high: int, multiple: int) -> Problem:
    rng = random.Random(f"{suite}/{seed}/{index}")
    c, f16 = rng.random() < _C_SHARE, rng.random() < _F16_SHARE

    def draw() -> tuple[int, int, int]:
        return log_uniform(rng, 1, MOST_M), log_uniform(rng, low, high, multiple), log_uniform(rng, low, high, multiple)

    m, n, k = _first_feasible(rng, c, draw)
    return Problem(m, n, k, dtype=torch.float16 if f16 else torch.bfloat16, layout=LAYOUTS[index % len(LAYOUTS)], c=c)


def aligned(seed: int, index: int) -> Problem:
    """m in 1 to 8192; n, k multiples of 64 in 256 to 32768; all log-uniform. The layouts come by turns, C and float16 one time in four."""
    return _dense("aligned", seed, index, 256, 32768, 64)


def unaligned(seed: int, index: int) -> Problem:
    """Like :func:`aligned` with any n, k in 1 to 8192."""
    return _dense("unaligned", seed, index, 1, 8192, 1)


def w4a16(seed: int, index: int) -> W4Problem:
    """m in 1 to 8192; n, k multiples of 128, what every peer's format takes, in 256 to 32768; groups of 128; float16 one time in two."""
    return _quantised("w4a16", seed, index, "int4", 128)


def _quantised(suite: str, seed: int, index: int, w4_format: str, group_size: int) -> W4Problem:
    rng = random.Random(f"{suite}/{seed}/{index}")
    f16 = rng.random() < 0.5

    def draw() -> tuple[int, int, int]:
        return log_uniform(rng, 1, MOST_M), log_uniform(rng, 256, 32768, 128), log_uniform(rng, 256, 32768, 128)

    m, n, k = _first_feasible(rng, False, draw)
    return W4Problem(m, n, k, dtype=torch.float16 if f16 else torch.bfloat16, group_size=group_size, w4_format=w4_format)


_CALIBRATED = (("int4", 128), ("int4", 32), ("int4", 128), ("nf4", 64), ("int4", 128), ("mxfp4", 32), ("int4", 128), ("nvfp4", 16))


def calibration(seed: int) -> Iterator[Problem | W4Problem]:
    """Endless problems for the fit: of ten, five aligned, one of n and k in multiples of 8, one of any n and k, one gated or float32, two
    with 4-bit weights, every other one of these int4 in groups of 128."""
    for index in itertools.count():
        kind, turn = index % 10, index // 10
        if kind < 5:
            yield aligned(seed, index)
        elif kind == 5:
            yield _dense("eight", seed, turn, 256, 32768, 8)
        elif kind == 6:
            yield _dense("any", seed, turn, 16, 8192, 1)
        elif kind == 7:
            p = _dense("special", seed, turn // 2, 256, 32768, 64)
            special = {"gated": True} if turn % 2 == 0 else {"out_dtype": torch.float32, "c": p.c}
            yield Problem(p.m, p.n, p.k, dtype=p.dtype, layout=p.layout, **special)
        else:
            yield _quantised("quantised", seed, index, *_CALIBRATED[(2 * turn + kind) % len(_CALIBRATED)])
