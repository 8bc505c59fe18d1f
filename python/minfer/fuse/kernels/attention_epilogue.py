"""The epilogue of attention kernels: outputs are divided by their rows' sums and stored, with the logarithms of the sums."""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from ..graph import F32
from .attention_functions import AttentionFunctions
from .attention_instructions import packed
from .attention_softmax import OnlineSoftmax
from .attention_tiles import Place
from .numbers import STORAGES, approximate, as_storage, pointer_at, store_vector

_INFINITY = float("inf")


class Epilogue:
    def __init__(self, functions: AttentionFunctions, softmax: OnlineSoftmax, lane: Any):
        self.functions, self.config, self.softmax, self.lane = functions, functions.config, softmax, lane
        self.element = STORAGES[self.config.element]

    def store(self, where: Place, rows: Any) -> None:
        c = self.config
        for row in range(2):
            query, head = rows[row]
            total = self.softmax.row_sum[row]
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
            seen = total > Float32(0.0)
            factor = cutlass.select_(seen, approximate("rcp.approx.ftz", total), Float32(0.0))  # the sum has the maximum: it is normal
            lse = (self.softmax.row_max[row] + approximate("lg2.approx.ftz", total)) * Float32(math.log(2.0))  # within 2^-22 of itself
            lse = cutlass.select_(seen, lse, Float32(-_INFINITY))
            valid = query < where.sq
            heads = self.functions.get("walk_heads") * self.functions.get("group") if c.packed else self.functions.get("walk_heads")
            number = (Int64(where.part) * self.functions.get("batch").to(Int64) + Int64(where.batch)) * heads.to(Int64) + Int64(head)
            number = number * where.sq.to(Int64) + Int64(query)
            store_vector(self.functions.get("lse"), number, as_storage([lse], F32, "f32"), 1, "f32", valid & (self.lane % 4 == 0))
            values = [self.softmax.output[4 * (i // 2) + 2 * row + i % 2] * factor for i in range(c.head_dim // 4)]
            if c.split:
                for j in range(c.head_dim // 8):
                    column = 8 * j + 2 * (self.lane % 4)
                    start = number * self.functions.get("head_dim_v").to(Int64) + column.to(Int64)
                    self.store_pair(start, values[2 * j], values[2 * j + 1], valid & (column < self.functions.get("head_dim_v")))
            else:
                start = Int64(where.batch) * self.functions.get("out_stride", 0) + Int64(head) * self.functions.get("out_stride", 1)
                start = start + Int64(query) * self.functions.get("out_stride", 2)
                for j in range(0, c.head_dim // 8, 4):
                    words = transposed([packed(values[2 * (j + n) : 2 * (j + n) + 2], self.element) for n in range(4)], self.lane)
                    column = 8 * (j + self.lane % 4)
                    self.store_words(start + Int64(column), words, valid & (column < self.functions.get("head_dim_v")))

    @cute.jit
    def store_pair(self, start: Int64, first: Float32, second: Float32, valid: Boolean):
        if valid:
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0], pair[1] = first, second
            cute.autovec_copy(pair, cute.make_tensor(pointer_at(self.functions.get("out"), start, "f32", 8), cute.make_layout(2)))

    @cute.jit
    def store_words(self, start: Int64, words: list, valid: Boolean):
        if valid:
            vector = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                vector[i] = words[i]
            address = self.functions.get("out").toint() + start * 2
            there = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(vector, cute.make_tensor(there, cute.make_layout(4)))


def transposed(words: list[Any], lane: Any) -> list[Any]:
    """A 4 x 4 matrix over the four lanes of a quad: word i of lane c becomes word c of lane i."""
    words = list(words)
    for bit in (1, 2):
        upper = (lane & bit) != 0
        for i in range(4):
            if i & bit == 0:
                other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, words[i], words[i + bit]), offset=bit)
                words[i] = cutlass.select_(upper, other, words[i])
                words[i + bit] = cutlass.select_(upper, words[i + bit], other)
    return words
