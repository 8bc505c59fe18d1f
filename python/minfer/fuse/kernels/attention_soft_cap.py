"""A soft cap, outer * tanh(inner * score), as the library's own kernels have it (cpp/src/attention/shared/softmax.cuh): exponentials keep
the special function units busy, so tanh of scores up to a limit is a polynomial in full tiles. Both rise with the score, so that the
maximum is found before the cap. Which of them is computed is the same for all lanes of a warp."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from .attention_functions import AttentionFunctions
from .attention_softmax import OnlineSoftmax
from .numbers import approximate


class SoftCap:
    def __init__(self, functions: AttentionFunctions, softmax: OnlineSoftmax):
        self.functions, self.config, self.softmax = functions, functions.config, softmax
        self.low_is_negligible = cute.make_rmem_tensor(1, Int32)

    def start(self) -> None:
        """Of a tile of queries."""
        self.low_is_negligible.fill(0)

    @cute.jit
    def largest_of_warp(self, most: Float32):
        """``most``, or what else tells that a score lies outside of the polynomial's limit: the lowest score, unless those below the limit
        weigh less than 2^-24 of their row's largest."""
        if self.low_is_negligible[0] == 0:
            least = [self.softmax.scores[0], self.softmax.scores[1]]
            for i in cutlass.range_constexpr(2, self.config.keys // 2):
                least[i % 2] = cute.arch.fmin(least[i % 2], self.softmax.scores[i])
            most = cute.arch.fmax(most, -cute.arch.fmin(least[0], least[1]))
        return most

    @cute.jit
    def exponentials(self):
        """Scores, which are products, become exponentials of capped scores, rounded; whether the output must be rescaled."""
        most = self.softmax.of_thread()
        outside = cute.arch.vote_any_sync(self.largest_of_warp(cute.arch.fmax(most[0], most[1])) > self.functions.get("cap_limit"))
        raised = Boolean(False)
        if outside:
            raised = self.exponentials_by_tanh(most)
        else:
            raised = self.exponentials_by_polynomial(most)
            self.judge_low_scores()
        return raised

    def exponentials_by_tanh(self, most: list[Any]) -> Any:
        def capped(x: Any) -> Any:
            return approximate("tanh.approx", x * self.functions.get("cap_inner"))

        offsets, raised = self.softmax.raise_maxima([capped(self.softmax.of_quad(x)) * self.functions.factor() for x in most])
        self.softmax.exponentials(offsets, self.softmax.rounded(), lambda x, row: capped(x) * self.functions.factor() - offsets[row])
        return raised

    def exponentials_by_polynomial(self, most: list[Any]) -> Any:
        most = [self.softmax.of_quad(x) for x in most]
        offsets, raised = self.softmax.raise_maxima([x * self.factor(x) for x in most])
        self.softmax.exponentials(offsets, self.softmax.rounded(), lambda x, row: x * self.factor(x) - offsets[row])
        return raised

    @cute.jit
    def judge_low_scores(self):
        if self.low_is_negligible[0] == 0:
            low = cute.arch.fmin(self.softmax.row_max[0], self.softmax.row_max[1]) >= self.functions.get("cap_negligible")
            self.set_low_is_negligible(cutlass.select_(cute.arch.vote_all_sync(low), Int32(1), Int32(0)))

    def set_low_is_negligible(self, value: Any) -> None:
        self.low_is_negligible[0] = value

    def factor(self, x: Any) -> Any:
        """What a product is multiplied by to become its capped score in units of log2."""
        y = x * self.functions.get("cap_root")
        inside = y * y + self.functions.get("cap_middle")
        return inside * inside + self.functions.get("cap_rest")
