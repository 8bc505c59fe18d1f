"""The online softmax of attention kernels: of a thread's two rows the maxima that exponents are relative to and the sums, and the output,
which is rescaled where a maximum is raised."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from .attention_functions import AttentionFunctions
from .attention_instructions import exp2, packed_here

_INFINITY = float("inf")
_RAISE = 8.0  # the maximum that exponentials are relative to is raised where it would grow by a factor of 2^8


class OnlineSoftmax:
    """``scores``, ``output``: a thread's accumulators; ``probabilities``: registers for exponentials that are rounded, if any."""

    def __init__(self, functions: AttentionFunctions, scores: cute.Tensor, output: cute.Tensor, probabilities: cute.Tensor | None = None):
        self.functions, self.config = functions, functions.config
        self.scores, self.output, self.probabilities = scores, output, probabilities
        self.row_max = cute.make_rmem_tensor(2, Float32)  # in units of log2
        self.row_sum = cute.make_rmem_tensor(2, Float32)
        self.rescale = cute.make_rmem_tensor(2, Float32)

    def start(self) -> None:
        """Of a tile of queries."""
        self.output.fill(0.0)
        self.row_max.fill(-_INFINITY)
        self.row_sum.fill(0.0)

    def run(self) -> Any:
        """Scores become exponentials, which are added to the sums; whether the output must be rescaled."""
        offsets, raised = self.maxima()
        self.exponentials(offsets, None)
        return raised

    def maxima(self, bases: list[Any] | None = None) -> tuple[list[Any], Any]:
        """The rows' maxima, raised where the scores ask for it: what exponents are relative to, and whether the output must be rescaled.
        ``bases``: what is to be added to the rows' exponents."""
        most = [self.of_quad(x) * self.functions.factor() for x in self.of_thread()]
        if bases is None:
            return self.raise_maxima(most)
        offsets, raised = self.raise_maxima([x + base for x, base in zip(most, bases, strict=True)])
        return [x - base for x, base in zip(offsets, bases, strict=True)], raised

    def of_thread(self) -> list[Any]:
        """The largest scores that the thread has of its two rows."""
        found = []
        for row in range(2):
            chains: list[Any] = [None, None]
            for n, i in enumerate(range(0, self.config.keys // 2, 4)):
                pair = cute.arch.fmax(self.scores[i + 2 * row], self.scores[i + 2 * row + 1])
                chains[n % 2] = pair if chains[n % 2] is None else cute.arch.fmax(chains[n % 2], pair)
            found.append(cute.arch.fmax(chains[0], chains[1]))
        return found

    def of_quad(self, most: Any) -> Any:
        """The maximum over the lanes that share a row."""
        most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1))
        return cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=2))

    def raise_maxima(self, most: list[Any]) -> tuple[list[Any], Any]:
        offsets, raised = [], Boolean(False)
        for row in range(2):
            before = self.row_max[row]
            grows = most[row] > before + Float32(_RAISE)
            after = cutlass.select_(grows, most[row], before)
            self.row_max[row] = after
            self.rescale[row] = cutlass.select_(grows, exp2(before - after), Float32(1.0))
            raised = raised | grows
            offsets.append(cutlass.select_(after == Float32(-_INFINITY), Float32(0.0), after))
        return offsets, cute.arch.vote_any_sync(raised)

    def rounded(self) -> cute.Tensor:
        """The probabilities' registers."""
        return cute.recast_tensor(self.probabilities, Int32)

    def exponentials(self, offsets: list[Any], words: Any, exponent: Any = None) -> None:
        """Scores become exponentials, which are added to the sums; ``words``: takes them rounded, in pairs, in the place of the scores."""
        factor = self.functions.factor() if exponent is None else None
        sums: list[list[Any]] = [[None, None], [None, None]]
        for i in range(0, self.config.keys // 2, 2):
            row, pair = i // 2 % 2, []
            for e in range(2):
                score = self.scores[i + e]
                x = exp2(score * factor - offsets[row] if exponent is None else exponent(score, row))
                sums[row][e] = x if sums[row][e] is None else sums[row][e] + x
                pair.append(x)
            if words is None:
                self.scores[i], self.scores[i + 1] = pair
            else:
                words[i // 2] = packed_here(pair, self.config.element)
        for row in range(2):
            self.row_sum[row] = self.row_sum[row] * self.rescale[row] + (sums[row][0] + sums[row][1])

    @cute.jit
    def rescale_output(self, raised: Boolean):
        if raised:
            self.multiply_output()

    def multiply_output(self) -> None:
        for i in range(self.config.head_dim // 2):
            self.output[i] = self.output[i] * self.rescale[i // 2 % 2]
