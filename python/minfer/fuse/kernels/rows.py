"""Functions of rows: elementwise, or with reductions over each row.

A row has `threads` threads, of one CTA or of a cluster's; a CTA has one row, or several of up to 32 threads each. A thread takes
`vectors` vectors of `width` neighbouring numbers of each tensor, at steps of all threads' vectors, so that a warp's loads lie together.

    load      every vector of every input of rows, at once: all bytes are in flight before the first is used. Rows of many numbers take
              what all rows have in common where it is used: kept over the reductions, it would cost registers and with them rows in flight
    pass      what the next reductions need is computed in registers; each thread reduces its own part, then
                  the threads of a warp by shuffles
                  the warps through shared memory, each reduction in a slot of its own, so that one barrier is enough for a pass
                  the CTAs of a cluster through each other's shared memory, each pass with an mbarrier of its own
    ...       as many passes as reductions depend on each other
    store     vectors of the results, once

Loads of rows and columns beyond the end are clamped to the last ones and take no part in reductions; stores are predicated.

Without reductions a CTA takes a part of a row, and the number of columns is a parameter. CTAs with neighbouring numbers have the parts of
a row: those that run at a time read memory in one piece. Where much is read that all rows have in common, the vectors of a thread are those
of several rows, at the same columns (`down`), and what they have in common is read once.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ..artifact import Artifact
from ..graph import COLUMN, FULL, REDUCTIONS, ROW, SCALAR, Graph, Node
from ..row_config import RowConfig, parameters
from .build import compile_kernel, overlaps, parameter_types
from .numbers import REGISTERS, Evaluator, as_storage, combine, from_storage, identity, load_vector, store_vector
from .reductions import across_lanes, across_warps, init_arrivals, tree


def shared_words(graph: Graph, config: RowConfig) -> int:
    """4-byte words of shared memory: each reduction's partials of all warps of all CTAs of a row."""
    reductions = sum(node.op in REDUCTIONS for node in graph.nodes)
    warps = max(config.threads // 32, 1) * config.cluster
    return reductions * warps if warps > 1 else 0


def body(graph: Graph, config: RowConfig, values: list[Any], dependent: bool) -> None:
    """The kernel. ``values`` are its parameters. ``dependent``: launches may overlap, which architectures from sm_90 on can."""
    _Rows(graph, config, dict(zip(parameters(graph), values, strict=True))).run(dependent)


class _Rows:
    def __init__(self, graph: Graph, config: RowConfig, values: dict[tuple[str, int], Any]):
        self.graph, self.config, self.values = graph, config, values
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()
        c = config
        rows = values["rows", 0]
        self.columns = c.columns if c.columns else values["columns", 0]
        group = block[0] if c.cluster == 1 else block[0] // c.cluster
        self.part = Int32(0)
        if not c.columns:
            parts = (self.columns + (c.width * c.threads - 1)) // (c.width * c.threads)
            group, self.part = block[0] // parts, block[0] % parts
        self.rank = Int32(0) if c.cluster == 1 else cute.arch.block_idx_in_cluster()
        self.lane = thread if c.rows == 1 else thread % c.threads
        row = group if c.rows == 1 else group * c.rows + thread // c.threads
        self.row_valid = Boolean(True) if c.rows == 1 else row < rows
        self.row = row if c.rows == 1 else cutlass.min(row, rows - 1)
        # Of the thread's first vector, in vectors.
        first = self.lane + (self.rank if c.columns else self.part) * c.threads
        step = c.threads * c.cluster
        of_row = self.columns // c.width
        self.exact = bool(c.columns) and of_row == step * c.vectors
        self.valid, self.column, self.rows = [], [], []
        for i in range(c.vectors):
            vector = first if c.down else first + i * step
            own = group * c.vectors + i if c.down else self.row
            valid = Boolean(True) if self.exact else vector < of_row
            self.valid.append(valid & (own < rows) if c.down else valid)
            self.column.append((vector if self.exact else cutlass.min(vector, of_row - 1)) * c.width)
            self.rows.append(cutlass.min(own, rows - 1) if c.down else own)
        self.elements = c.vectors * c.width
        self.late = graph.has_reductions() and self.elements >= 32 and c.threads >= 256
        self.evaluator = Evaluator(graph, self.elements, self.leaf, lambda node: node.extent in (FULL, ROW))
        self.loaded: dict[int, list[cute.Tensor]] = {}
        self.slot = 0

    # Inputs.

    def start(self, number: int, vector: int = 0) -> Any:
        """The first element of a vector's row, in elements."""
        stride = self.values.get(("stride", number))
        return Int64(0) if stride is None else Int64(self.rows[vector]) * stride

    def load_all(self) -> None:
        for i, x in enumerate(self.graph.inputs):
            if x.extent in (FULL, ROW) and x.rank < 0 and not (self.late and x.extent == ROW):
                self.load(i)

    def load(self, i: int) -> None:
        c, x = self.config, self.graph.inputs[i]
        one = c.down and x.extent == ROW
        vectors = [
            load_vector(self.values["address", i], self.start(i, v) + Int64(self.column[v]), c.width, x.storage)
            for v in range(1 if one else c.vectors)
        ]
        self.loaded[i] = vectors * c.vectors if one else vectors

    def leaf(self, number: int, node: Node, operands: list[Any]) -> Any:
        if node.op == "value":  # "column"
            return [REGISTERS[node.dtype](column + e) for column in self.column for e in range(self.config.width)]
        i = node.attrs[0]
        x = self.graph.inputs[i]
        if x.by_value:
            return self.values["number", i]
        if x.extent in (FULL, ROW) and x.rank < 0 and i not in self.loaded:
            self.load(i)
        if i in self.loaded:
            values: list[Any] = []
            for vector in self.loaded[i]:
                values += from_storage(vector, self.config.width, node.dtype, x.storage)
            return values
        stored = load_vector(self.values["address", i], self.start(i), 1, x.storage)
        return from_storage(stored, 1, node.dtype, x.storage)[0]

    # Reductions.

    def reduce(self, numbers: list[int], shared: Any, arrived: Any) -> None:
        """All of one pass. ``arrived``: the mbarrier of a cluster's exchange."""
        partials = []
        for number in numbers:
            node = self.graph.nodes[number]
            values = self.evaluator.each(node.inputs[0])
            dtype = self.graph.nodes[node.inputs[0]].dtype
            total = None
            for i in range(self.config.vectors):
                part = values[i * self.config.width : (i + 1) * self.config.width]
                value = tree(node.op, part, dtype)
                if not self.exact:
                    value = cutlass.select_(self.valid[i], value, identity(node.op, dtype))
                total = value if total is None else combine(node.op, total, value, dtype)
            partials.append(total)
        kinds = [(self.graph.nodes[number].op, self.graph.nodes[number].dtype) for number in numbers]
        partials = across_lanes(kinds, partials, min(self.config.threads, 32))
        if shared is not None:
            partials = across_warps(
                kinds, partials, shared, self.slot, self.lane, self.rank, self.config.threads // 32, self.config.cluster, arrived, 0
            )
            self.slot += len(numbers)
        for number, total in zip(numbers, partials, strict=True):
            self.evaluator.known[number] = total

    # Results.

    def store(self, number: int) -> None:
        y = self.graph.outputs[number]
        c = self.config
        register = self.graph.nodes[y.node].dtype
        stride = self.values.get(("out_stride", number))
        if y.into >= 0:
            pointer, starts = self.values["address", y.into], [self.start(y.into, v) for v in range(c.vectors)]
        else:
            pointer, starts = self.values["out", number], [Int64(0) if stride is None else Int64(row) * stride for row in self.rows]
        if y.extent in (COLUMN, SCALAR):
            first = self.lane + self.rank == 0
            if not c.columns:
                first = first & (self.part == 0)
            if y.extent == SCALAR:
                first = first & (self.row == 0)
            stored = as_storage([self.evaluator.value(y.node)], register, y.storage)
            store_vector(pointer, starts[0], stored, 1, y.storage, first & self.row_valid)
            return
        values = self.evaluator.each(y.node)
        for i in range(c.vectors):
            stored = as_storage(values[i * c.width : (i + 1) * c.width], register, y.storage)
            predicate = self.row_valid if self.exact else self.row_valid & self.valid[i]
            if y.extent == ROW:
                predicate = predicate & (self.row == 0)
            store_vector(pointer, starts[i] + Int64(self.column[i]), stored, c.width, y.storage, predicate)

    def run(self, dependent: bool) -> None:
        graph, c = self.graph, self.config
        words = shared_words(graph, c)
        shared = cute.arch.alloc_smem(Int32, words, alignment=16) if words else None
        depths = graph.depths()
        passes = max(depths, default=0)
        barriers = cute.arch.alloc_smem(Int64, passes, alignment=8) if c.cluster > 1 else None
        if c.cluster > 1:
            init_arrivals(barriers, passes, self.lane)
            cute.arch.cluster_arrive_relaxed()
        if dependent:
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        self.load_all()
        if c.cluster > 1:
            cute.arch.cluster_wait()  # all CTAs of the cluster run: their shared memory may be written
        for depth in range(1, passes + 1):
            numbers = [i for i, node in enumerate(graph.nodes) if node.op in REDUCTIONS and depths[i] == depth]
            self.reduce(numbers, shared, None if barriers is None else barriers + (depth - 1))
        for number in range(len(graph.outputs)):
            self.store(number)


def build(graph: Graph, config: dict[str, Any], *, name: str, architecture: str) -> Artifact:
    c = RowConfig(**config)
    dependent = overlaps(architecture)
    return compile_kernel(
        lambda values: body(graph, c, values, dependent),
        parameter_types(graph, parameters(graph)),
        name=name,
        architecture=architecture,
        block=c.block,
        cluster=c.cluster,
    )
