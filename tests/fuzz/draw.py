"""What is drawn, and from which distributions: everything follows from one text, so that a case is reproduced from its name.

Sizes have heavy tails. Most calls are small, so that many of them fit into a minute, and the edges come often: 0, 1, multiples of tiles and
their neighbours, primes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

PRIMES = (2, 3, 5, 7, 11, 13, 17, 31, 61, 97, 127, 131, 257, 509, 1021, 2053, 4099)
TILES = (8, 16, 32, 64, 128, 256)


class Limits(NamedTuple):
    """How large a case may be. ``elements``: of a tensor; ``work``: multiplications of the call; ``scores``: of attention."""

    elements: int
    work: int
    scores: int
    cuda: bool

    @property
    def small(self) -> bool:
        """Whether a case should be one for the CPU, of tens of milliseconds."""
        return self.work < 1 << 30


CPU = Limits(elements=1 << 17, work=1 << 23, scores=1 << 17, cuda=False)
CUDA = Limits(elements=1 << 24, work=1 << 32, scores=1 << 23, cuda=True)


class Draw(random.Random):
    """Seeded by a text: the same draws in every process and on every machine."""

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def pick(self, *items: Any) -> Any:
        return self.choice(items)

    def weighted(self, table: Mapping[Any, float]) -> Any:
        return self.choices(list(table), list(table.values()))[0]

    def spread(self, low: int, high: int) -> int:
        """Log-uniform over low .. high."""
        if high <= low:
            return low
        return min(high, int(low * math.exp(self.random() * math.log((high + 1) / low)))) if low > 0 else self.spread(1, high + 1) - 1

    def extent(self, most: int, *, zero: float = 0.03, tiles: Sequence[int] = TILES) -> int:
        """A size up to ``most``: log-uniform, a multiple of a tile or beside one, a prime, 1, or with probability ``zero`` 0."""
        if self.chance(zero) or most < 1:
            return 0
        kind = self.weighted({"spread": 4, "tile": 3, "prime": 2, "one": 1})
        if kind == "one":
            return 1
        if kind == "tile":
            tile = self.choice([t for t in tiles if t <= most] or [1])
            return max(1, min(most, tile * self.spread(1, max(1, most // tile)) + self.pick(-1, 0, 0, 1)))
        if kind == "prime":
            return self.choice([p for p in PRIMES if p <= most] or [1])
        return self.spread(1, most)

    def multiple(self, unit: int, most: int, *, zero: float = 0.0) -> int:
        """A multiple of ``unit`` up to ``most``."""
        if self.chance(zero):
            return 0
        return unit * max(1, self.extent(max(1, most // unit), zero=0.0, tiles=(4, 8, 16)))

    def split(self, total: int, parts: int, *, empty: float = 0.2) -> list[int]:
        """``parts`` sizes that add up to ``total``, some of them 0, unevenly."""
        weights = [0.0 if self.chance(empty) else self.expovariate(1.0) ** 2 for _ in range(parts)]
        if parts == 0:
            return []
        if sum(weights) == 0:
            weights[self.randrange(parts)] = 1.0
        sizes, left, mass = [], total, sum(weights)
        for w in weights:
            take = left if w >= mass else round(left * w / mass)
            sizes.append(take)
            left, mass = left - take, mass - w
        sizes[max(range(parts), key=lambda i: weights[i])] += left
        return sizes


class Data:
    """Random tensors on a device."""

    def __init__(self, device: torch.device, seed: int):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, device=self.device, dtype=torch.float32, generator=self.generator)
        return (x if scale == 1.0 else x.mul_(scale)).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.rand(shape, device=self.device, dtype=torch.float32, generator=self.generator)
        return x.mul_(high - low).add_(low).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """low to high - 1."""
        return torch.randint(low, high, shape, device=self.device, generator=self.generator).to(dtype)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, device=self.device, generator=self.generator)

    def tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
