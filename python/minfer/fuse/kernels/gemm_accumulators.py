"""A thread's accumulators of a GEMM's tile, and their way to the neighbouring columns that an epilogue loads and stores.

WGMMA and mma.sync leave a thread 2 rows of every 64, or of every 16 of its warp, and of these pairs of neighbouring columns: of 32 columns,
the four lanes of a quad have a pair of every 8 each. They exchange them by shuffles, so that a lane has 8 neighbouring columns.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from ..gemm_config import GemmConfig


class Accumulators:
    """``acc`` is ((2, 2, tile_n / 8), MMA_M, 1). A ``slot`` is a row of the thread: 2 for every MMA_M."""

    def __init__(self, config: GemmConfig, acc: cute.Tensor, lane: Any):
        self.config, self.acc, self.lane = config, acc, lane

    def chunks(self) -> list[tuple[list[list[int]], int]]:
        """Which groups of 8 accumulator columns make up 32 columns of the epilogue, or 16 where they alternate, one list for each
        accumulator that the function has; and the first of these columns."""
        c = self.config
        groups = c.tile_n // 8
        if c.gate == "halves":
            half = groups // 2
            return [([list(range(g, g + 4)), list(range(half + g, half + g + 4))], 8 * g) for g in range(0, half, 4)]
        if c.gate == "blocks":
            return [([list(range(g, g + 8, 2)), list(range(g + 1, g + 8, 2))], 4 * g) for g in range(0, groups, 8)]
        return [([list(range(g, g + 4))], (4 if c.gate else 8) * g) for g in range(0, groups, 4)]

    def gathered(self, groups: list[int], slot: int) -> list[Any]:
        """A lane's 8 neighbouring columns of a row, of the 32 that its quad has."""
        acc, i, block = self.acc, slot % 2, slot // 2
        v = [[acc[(e, i, group), block, 0] for e in range(2)] for group in groups]
        odd, high = self.lane % 2 == 1, self.lane % 4 >= 2
        pairs = []  # of groups 0 or 1, and of 2 or 3, four columns each
        for a, b in ((v[0], v[1]), (v[2], v[3])):
            keep = [cutlass.select_(odd, y, x) for x, y in zip(a, b, strict=True)]
            got = [cute.arch.shuffle_sync_bfly(cutlass.select_(odd, x, y), offset=1) for x, y in zip(a, b, strict=True)]
            pairs.append(
                [cutlass.select_(odd, y, x) for x, y in zip(keep, got, strict=True)]
                + [cutlass.select_(odd, x, y) for x, y in zip(keep, got, strict=True)]
            )
        keep = [cutlass.select_(high, y, x) for x, y in zip(*pairs, strict=True)]
        got = [cute.arch.shuffle_sync_bfly(cutlass.select_(high, x, y), offset=2) for x, y in zip(*pairs, strict=True)]
        return [cutlass.select_(high, y, x) for x, y in zip(keep, got, strict=True)] + [
            cutlass.select_(high, x, y) for x, y in zip(keep, got, strict=True)
        ]

    def own(self, groups: list[int], slot: int) -> list[Any]:
        """A lane's columns of a row as the accumulators have them: a pair of every 8."""
        return [self.acc[(e, slot % 2, group), slot // 2, 0] for group in groups for e in range(2)]

    def exchanged(self, words: list[Any]) -> list[Any]:
        """Of four words, one of each group of 8 columns, those of one group, from all lanes of the quad."""
        odd, high = self.lane % 2 == 1, self.lane % 4 >= 2

        def both(upper: Any, a: Any, b: Any, offset: int) -> tuple[Any, Any]:
            keep = cutlass.select_(upper, b, a)
            got = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, a, b), offset=offset)
            return cutlass.select_(upper, got, keep), cutlass.select_(upper, keep, got)

        low, high_pair = both(odd, words[0], words[1], 1), both(odd, words[2], words[3], 1)
        first, second = (both(high, a, b, 2) for a, b in zip(low, high_pair, strict=True))
        return [first[0], second[0], first[1], second[1]]
