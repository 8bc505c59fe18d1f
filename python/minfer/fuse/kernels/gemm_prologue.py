"""The prologue of GEMM kernels: a graph of A's numbers, evaluated on the fragments that tensor cores take from registers.

A's tile is in shared memory as A is stored. A warpgroup reads its rows of it as WGMMA and mma.sync take them from registers, evaluates the
graph, and multiplies from there.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int16, Int32, Int64, cute

from ..dtypes import bytes_of, register_of_storage
from ..graph import COLUMN, FULL, ROW, SCALAR, Node
from .gemm_kernel import GemmKernel, swizzled
from .numbers import REGISTERS, STORAGES, Evaluator, as_storage, from_storage, load_vector


class Prologue:
    """Of a warpgroup's rows of one tile. A lane has of every 16 columns the pairs from 2 * (lane % 4) and from 8 behind, in two rows."""

    def __init__(self, gemm: GemmKernel, row: Any, expert: Any):
        self.gemm, self.config, self.values, self.expert = gemm, gemm.config, gemm.values, expert
        assert gemm.prologue is not None
        self.graph = gemm.prologue
        c = self.config
        self.inner = gemm.first_row()
        self.rows = [row + self.inner + 8 * i for i in range(2)]
        self.blocks = c.tile_k // 16
        self.next = cute.make_rmem_tensor(self.blocks * 8, gemm.operand)
        self.numbers: dict[Any, Any] = {}
        for node in self.graph.nodes:  # before the loop, in which they are the same
            if node.op == "input" and self.graph.inputs[node.attrs[0]].extent in (COLUMN, SCALAR):
                for i in range(2):
                    self.number(node, i)

    def start(self, number: int, i: int) -> Any:
        x = self.graph.inputs[number]
        start = Int64(0)
        if x.extent in (FULL, COLUMN):
            start = Int64(cutlass.min(self.rows[i], self.gemm.m - 1)) * self.values["a_stride", number]
        if number in self.config.prologue_per_expert:
            start = start + Int64(self.expert) * self.values["a_expert_stride", number]
        return start

    def number(self, node: Node, i: int) -> Any:
        (number,) = node.attrs
        x = self.graph.inputs[number]
        if x.by_value:
            return self.values["a_number", number]
        key = number, i if x.extent == COLUMN else 0
        if key not in self.numbers:
            stored = load_vector(self.values["a_address", number], self.start(number, i), 1, x.storage)
            self.numbers[key] = from_storage(stored, 1, node.dtype, x.storage)[0]
        return self.numbers[key]

    def stored(self, stage: Any) -> list[Any]:
        """A's numbers, from shared memory: for each 16 columns, for both pairs, for both rows, two."""
        c = self.config
        size = bytes_of(c.a_stored)
        row_bytes, word = c.a_swizzle, {1: Int16, 2: Int32}[size]
        words = cute.make_rmem_tensor(self.blocks * 4, word)
        at = 0
        for block in range(self.blocks):
            for half in range(2):
                column = (block * 16 + half * 8) * size + self.gemm.lane % 4 * (2 * size)  # in bytes
                for i in range(2):
                    row = self.inner + 8 * i
                    place = self.gemm.a_place(stage) + (row * row_bytes + swizzled(row, column // 16, row_bytes) * 16 + column % 16)
                    pointer = cute.make_ptr(word, place, cute.AddressSpace.smem, assumed_align=2 * size)
                    words[at] = cute.make_tensor(pointer, cute.make_layout(1))[0]
                    at += 1
        return from_storage(cute.recast_tensor(words, STORAGES[c.a_stored]), self.blocks * 8, register_of_storage(c.a_stored), c.a_stored)

    def compute(self, stage: Any, k: Any) -> None:
        """What the warpgroup multiplies next. ``k``: the tile's first column."""
        stored = self.stored(stage)
        limit = self.values["k", 0]
        pairs = [k + (block * 16 + half * 8) + self.gemm.lane % 4 * 2 for block in range(self.blocks) for half in range(2)]

        def leaf(number: int, node: Node, operands: list[Any]) -> Any:
            if node.op == "value":
                name = node.attrs[0]
                if name == "a":
                    return stored
                if name == "row":
                    return [REGISTERS[node.dtype](self.rows[i]) for _ in pairs for i in range(2) for _ in range(2)]
                return [REGISTERS[node.dtype](pair + e) for pair in pairs for _ in range(2) for e in range(2)]
            (i,) = node.attrs
            x = self.graph.inputs[i]
            if x.extent == SCALAR or x.by_value:
                return self.number(node, 0)
            if x.extent == COLUMN:
                return [self.number(node, row) for _ in pairs for row in range(2) for _ in range(2)]
            result: list[Any] = []
            for pair in pairs:
                for row in range(2):
                    result += result[-2:] if x.extent == ROW and row else self.pair(i, row, pair, node.dtype)
            return result

        evaluator = Evaluator(self.graph, self.blocks * 8, leaf, lambda node: node.extent != SCALAR)
        y = self.graph.outputs[0]
        values = evaluator.each(y.node)
        zero = REGISTERS[self.graph.nodes[y.node].dtype](0)
        values = [cutlass.select_(pairs[n // 4] + n % 2 < limit, value, zero) for n, value in enumerate(values)]
        for n in range(0, len(values), 8):
            made = as_storage(values[n : n + 8], self.graph.nodes[y.node].dtype, self.config.a)
            for e in range(8):
                self.next[n + e] = made[e]

    def pair(self, number: int, row: int, column: Any, dtype: str) -> list[Any]:
        x, width = self.graph.inputs[number], min(self.config.prologue_vector, 2)
        result: list[Any] = []
        for e in range(0, 2, width):
            inside = cutlass.min(column + e, self.values["k", 0] - width)
            stored = load_vector(self.values["a_address", number], self.start(number, row) + Int64(inside), width, x.storage)
            result += from_storage(stored, width, dtype, x.storage)
        return result

    def hand_over(self) -> None:
        """To the tensor cores, which have read what they had."""
        for block in range(self.blocks):
            for half in range(2):
                for i in range(2):
                    for e in range(2):
                        self.gemm.tCrA[(e, i, half), 0, block] = self.next[((block * 2 + half) * 2 + i) * 2 + e]
