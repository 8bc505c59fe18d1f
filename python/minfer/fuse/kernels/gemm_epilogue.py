"""The epilogue of GEMM kernels: a graph of the product, evaluated on the accumulators of a tile and stored.

A quad of lanes has whole rows of 32 columns. Its lanes exchange their accumulators, so that tensors of rows are loaded and stored by
vectors of up to 16 bytes, a quad's next to each other, and no shared memory is needed. Where no tensor of rows is read and results have
16 bits, the results are exchanged instead, two in a word. The graph is evaluated for 32 columns after another; the tensors of rows that the
next ones need are loaded before. Reductions are of a row of the tile, in the order of its columns; a kernel of rows puts the tiles
together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ..dtypes import bytes_of
from ..graph import COLUMN, FULL, ROW, SCALAR, Node
from .numbers import (
    REGISTERS,
    STORAGES,
    Evaluator,
    as_storage,
    combine,
    from_storage,
    identity,
    load_vector,
    store_vector,
)
from .reductions import tree

if TYPE_CHECKING:
    from .gemm_kernel import GemmKernel

_AHEAD = 40  # registers of a thread for tensors of rows that are loaded before they are needed


class Epilogue:
    """Of one tile."""

    def __init__(self, gemm: GemmKernel, row: Any, n_tile: Any, limit: Any, expert: Any):
        self.gemm, self.graph, self.config, self.values = gemm, gemm.graph, gemm.config, gemm.values
        c = self.config
        self.n_tile, self.expert = n_tile, expert
        sharing = 64 * c.sharing
        inner = gemm.first_row()
        self.rows = [row + inner + (slot // 2 * sharing + slot % 2 * 8) for slot in range(c.rows)]
        self.valid_rows = [x < limit for x in self.rows]
        self.read_rows = [cutlass.min(x, gemm.m - 1) for x in self.rows]
        whole = [x for x in self.graph.inputs if x.extent == FULL and x.rank < 0]
        stored = [y for y in self.graph.outputs if y.extent == FULL]
        # Whether results are exchanged, and not accumulators.
        self.late = not whole and c.gate != "alternating" and all(STORAGES[y.storage].width == 16 for y in stored)
        self.each = 4 if c.gate == "alternating" else 8  # columns of a lane
        self.store_first = n_tile * c.columns + gemm.lane % 4 * self.each
        self.first = n_tile * c.columns + gemm.lane % 4 * 2 if self.late else self.store_first
        # Where a lane's columns lie, from its first one.
        self.places = [8 * (e // 2) + e % 2 for e in range(8)] if self.late else list(range(self.each))
        self.numbers: dict[Any, Any] = {}  # of inputs that are not of columns
        self.targets: dict[int, list[Any]] = {}
        self.totals: dict[int, list[Any]] = {}

    # Inputs.

    def start(self, number: int, slot: int) -> Any:
        """The first element of a row."""
        key = "start", number, slot
        if key not in self.numbers:
            x = self.graph.inputs[number]
            start = Int64(0)
            if x.extent in (FULL, COLUMN):
                start = Int64(self.read_rows[slot]) * self.values["stride", number]
            if number in self.config.per_expert:
                start = start + Int64(self.expert) * self.values["expert_stride", number]
            self.numbers[key] = start
        return self.numbers[key]

    def width(self) -> int:
        return min(self.config.vector, 2 if self.late else self.each)

    def load(self, number: int, slot: int, column: Any) -> list[cute.Tensor]:
        """A lane's columns of a row, in pieces."""
        x, width = self.graph.inputs[number], self.width()
        start = self.start(number, slot)
        return [
            load_vector(self.values["address", number], start + Int64(self.inside(column + place)), width, x.storage)
            for place in self.places[::width]
        ]

    def inside(self, column: Any) -> Any:
        return cutlass.min(column, self.gemm.n - self.width())

    def valid(self, column: Any) -> Any:
        return column < self.gemm.n

    def loads(self, column: Any) -> dict[tuple[int, int], list[cute.Tensor]]:
        result = {}
        for i, x in enumerate(self.graph.inputs):
            if x.rank >= 0:
                continue
            for slot in range(self.config.rows if x.extent == FULL else 1):
                if x.extent in (FULL, ROW):
                    result[i, slot] = self.load(i, slot, column)
        return result

    def number(self, node: Node, slot: int) -> Any:
        """One that is the same in all columns."""
        (i,) = node.attrs
        key = "number", i, slot
        if key not in self.numbers:
            x = self.graph.inputs[i]
            stored = load_vector(self.values["address", i], self.start(i, slot), 1, x.storage)
            self.numbers[key] = from_storage(stored, 1, node.dtype, x.storage)[0]
        return self.numbers[key]

    def evaluator(self, acc: list[list[Any]], column: Any, loaded: dict[tuple[int, int], list[cute.Tensor]]) -> Evaluator:
        """Of a lane's columns in all of its rows, row after row."""
        slots, each = range(self.config.rows), self.each

        def leaf(number: int, node: Node, operands: list[Any]) -> Any:
            if node.op == "value":
                name = node.attrs[0]
                if name.startswith("acc"):
                    return acc[int(name[3:] or 0)]
                if name == "row":
                    return [REGISTERS[node.dtype](self.rows[slot]) for slot in slots for _ in range(each)]
                return [REGISTERS[node.dtype](column + place) for _ in slots for place in self.places]
            i = node.attrs[0]
            x = self.graph.inputs[i]
            if x.by_value:
                return self.values["number", i]
            if x.extent == SCALAR:
                return self.number(node, 0)
            if x.extent == COLUMN:
                return [self.number(node, slot) for slot in slots for _ in range(each)]
            result: list[Any] = []
            for slot in slots:
                if x.extent == ROW and slot:
                    result += result[:each]
                    continue
                for piece in loaded[i, slot]:
                    result += from_storage(piece, self.width(), node.dtype, x.storage)
            return result

        return Evaluator(self.graph, self.config.rows * each, leaf, lambda node: node.extent != SCALAR)

    # Results.

    def target(self, number: int, evaluator: Evaluator | None) -> list[tuple[Any, Any, Any]]:
        """For each row of an output: the address, the first element, and whether it is stored."""
        if number in self.targets:
            return self.targets[number]
        y = self.graph.outputs[number]
        if y.into >= 0:
            pointer, stride = self.values["address", y.into], self.values.get(("stride", y.into))
        else:
            pointer, stride = self.values["out", number], self.values.get(("out_stride", number), Int64(1))
        result = []
        for slot in range(self.config.rows):
            row, valid = self.rows[slot], self.valid_rows[slot]
            if y.index >= 0:
                assert evaluator is not None
                index = Int64(evaluator.each(y.index)[slot * self.each])
                valid = valid & (index >= 0) & (index < Int64(self.values["limit", number]))
                row = index
            result.append((pointer, Int64(row) * stride, valid))
        self.targets[number] = result
        return result

    def store(self, number: int, evaluator: Evaluator, column: Any) -> None:
        y, width = self.graph.outputs[number], min(self.config.vector, self.each)
        values = evaluator.each(y.node)
        register = self.graph.nodes[y.node].dtype
        for slot, (pointer, start, valid) in enumerate(self.target(number, evaluator)):
            row = values[slot * self.each : (slot + 1) * self.each]
            whole = None
            if self.late:
                words = cute.recast_tensor(as_storage(row, register, y.storage), Int32)
                exchanged = self.gemm.accumulators.exchanged([words[i] for i in range(4)])
                whole = cute.make_rmem_tensor(4, Int32)
                for i in range(4):
                    whole[i] = exchanged[i]
                whole = cute.recast_tensor(whole, STORAGES[y.storage])
            for i in range(0, self.each, width):
                if whole is None:
                    stored = as_storage(row[i : i + width], register, y.storage)
                else:
                    stored = cute.make_rmem_tensor(width, STORAGES[y.storage])
                    for e in range(width):
                        stored[e] = whole[i + e]
                store_vector(pointer, start + Int64(column + i), stored, width, y.storage, valid & self.valid(column + i))

    def store_numbers(self, evaluator: Evaluator) -> None:
        """Outputs of one number a row, by the first lane of the first tile."""
        for number, y in enumerate(self.graph.outputs):
            if y.extent != COLUMN:
                continue
            values = evaluator.each(y.node)
            for slot, (pointer, start, valid) in enumerate(self.target(number, evaluator)):
                stored = as_storage([values[slot * self.each]], self.graph.nodes[y.node].dtype, y.storage)
                store_vector(pointer, start, stored, 1, y.storage, valid & (self.first == 0))

    # Reductions.

    def reduce(self, evaluator: Evaluator, column: Any) -> None:
        width = self.width()
        for number in self.gemm.reductions:
            node = self.graph.nodes[number]
            dtype = self.graph.nodes[node.inputs[0]].dtype
            values = evaluator.each(node.inputs[0])
            totals = self.totals.setdefault(number, [None] * self.config.rows)
            for slot in range(self.config.rows):
                for i in range(0, self.each, width):
                    part = tree(node.op, values[slot * self.each + i : slot * self.each + i + width], dtype)
                    part = cutlass.select_(self.valid(column + self.places[i]), part, identity(node.op, dtype))
                    totals[slot] = part if totals[slot] is None else combine(node.op, totals[slot], part, dtype)

    def store_partials(self) -> None:
        for number, totals in self.totals.items():
            node = self.graph.nodes[number]
            for slot, total in enumerate(totals):
                for offset in (1, 2):
                    total = combine(node.op, total, cute.arch.shuffle_sync_bfly(total, offset=offset), node.dtype)
                start = Int64(self.rows[slot]) * self.gemm.n_tiles + self.n_tile
                stored = as_storage([total], node.dtype, node.dtype)
                predicate = self.valid_rows[slot] & (self.gemm.lane % 4 == 0)
                store_vector(self.values["partial", number], start, stored, 1, node.dtype, predicate)

    def begin(self) -> None:
        """Loads what the first columns need, while tensor cores finish."""
        self.columns = [self.first + offset for _, offset in self.gemm.accumulators.chunks()]
        words = 0  # registers for what 32 columns need
        for x in self.graph.inputs:
            if x.rank < 0 and x.extent in (FULL, ROW):
                words += self.each * bytes_of(x.storage) // 4 * (self.config.rows if x.extent == FULL else 1)
        self.ahead = max(min(_AHEAD // max(words, 1), len(self.columns)), 1)
        self.loaded = [self.loads(column) for column in self.columns[: self.ahead]]

    def run(self) -> None:
        chunks, columns = self.gemm.accumulators.chunks(), self.columns
        taken = self.gemm.accumulators.own if self.late else self.gemm.accumulators.gathered
        for i, (groups, offset) in enumerate(chunks):
            ready = self.loaded[i]
            if i + self.ahead < len(chunks):
                self.loaded.append(self.loads(columns[i + self.ahead]))
            acc = [[x for slot in range(self.config.rows) for x in taken(part, slot)] for part in groups]
            if self.config.gate == "alternating":
                acc = [acc[0][0::2], acc[0][1::2]]
            evaluator = self.evaluator(acc, columns[i], ready)
            self.reduce(evaluator, columns[i])
            if i == 0:
                self.store_numbers(evaluator)
            for number, y in enumerate(self.graph.outputs):
                if y.extent == FULL:
                    self.store(number, evaluator, self.store_first + offset)
        self.store_partials()

    def run_zeros(self) -> None:
        """Rows of no expert: zero in what the kernel returns; what it writes into is left alone."""
        width = min(self.config.vector, self.each)
        for number, y in enumerate(self.graph.outputs):
            if y.into >= 0 or y.index >= 0:
                continue
            register = self.graph.nodes[y.node].dtype
            zeros = [cutlass.select_(Boolean(True), REGISTERS[register](0), REGISTERS[register](0))] * width
            for pointer, start, valid in self.target(number, None):
                if y.extent == COLUMN:
                    store_vector(pointer, start, as_storage(zeros[:1], register, y.storage), 1, y.storage, valid & (self.first == 0))
                    continue
                stored = as_storage(zeros, register, y.storage)
                for _, offset in self.gemm.accumulators.chunks():
                    for i in range(0, self.each, width):
                        column = self.store_first + offset + i
                        store_vector(pointer, start + Int64(column), stored, width, y.storage, valid & self.valid(column))
        for number in self.gemm.reductions:
            node = self.graph.nodes[number]
            for slot in range(self.config.rows):
                start = Int64(self.rows[slot]) * self.gemm.n_tiles + self.n_tile
                stored = as_storage([REGISTERS[node.dtype](0)], node.dtype, node.dtype)
                store_vector(
                    self.values["partial", number], start, stored, 1, node.dtype, self.valid_rows[slot] & (self.gemm.lane % 4 == 0)
                )
