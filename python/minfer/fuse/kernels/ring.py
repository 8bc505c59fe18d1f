"""Functions of rows that are too wide for registers: rows pass through rings in shared memory, which bulk copies fill.

CTAs stay, one an SM, and share the rows out by turns; a row has a CTA or the CTAs of a cluster, and all of a CTA's warps. A warp has a ring
of its own. A stage holds a tile, TILE neighbouring numbers, and an mbarrier that counts the bytes of its copy. Only the warp itself reads
or frees a stage, so that warps meet only where a row's statistics are exchanged.

    request   lane 0 copies the next tile of this warp, of this row or a later one, into a stage
    pass      the first one waits for tile after tile; the row stays in its stages through all passes, and what a pass needs is computed
              anew from there
    last      a tile's lanes read it, its stage is requested for a later row, and its results are stored

What a ring holds in addition to a row is in flight all the time, also while statistics are exchanged. Slots and barriers of the exchange
alternate from row to row: a warp that is ahead writes slots that nobody reads any more, since each row has an exchange that all warps take
part in.

What all rows have in common, such as a norm's weight, has no room beside the ring and comes from L2 in every pass, requested a tile ahead:
where it is used at once, layer_norm of 1,024 rows of 65,536 numbers took 125 us on an H100 instead of 101, and with 8 warps of twice as
many tiles 117.

Limits: one input of rows, which start at multiples of 16 bytes, of numbers of 2 or 4 bytes; reductions; a warp's tiles of a row fit the
ring.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ..artifact import Artifact
from ..dtypes import bytes_of
from ..graph import COLUMN, FULL, REDUCTIONS, ROW, SCALAR, Graph, Node
from ..row_config import TILE, RingConfig, parameters
from .build import compile_kernel, parameter_types
from .numbers import (
    REGISTERS,
    STORAGES,
    Evaluator,
    as_storage,
    combine,
    from_storage,
    identity,
    load_vector,
    pointer_at,
    store_vector,
)
from .reductions import across_lanes, across_warps, init_arrivals, tree

_VECTOR = 8
_VECTORS = TILE // (32 * _VECTOR)  # of a lane, in a tile


class _Ring:
    def __init__(self, graph: Graph, config: RingConfig, values: dict[tuple[str, int], Any]):
        self.graph, self.config, self.values = graph, config, values
        self.stream = next(i for i, x in enumerate(graph.inputs) if x.extent == FULL and x.rank < 0)
        self.storage = graph.inputs[self.stream].storage
        self.stage_bytes = TILE * bytes_of(self.storage)
        depths = graph.depths()
        self.passes = [
            [i for i, node in enumerate(graph.nodes) if node.op in REDUCTIONS and depths[i] == depth]
            for depth in range(1, max(depths, default=0) + 1)
        ]
        self.slots = sum(map(len, self.passes))
        sources = [[graph.nodes[i].inputs[0] for i in numbers] for numbers in self.passes]
        sources.append([y.node for y in graph.outputs if y.extent in (FULL, ROW)])
        self.shared_rows = [self.rows_behind(nodes) for nodes in sources]

    def rows_behind(self, nodes: list[int]) -> list[int]:
        """The inputs of one row for all that a pass computes these nodes from."""
        found, seen, left = [], set(), list(nodes)
        while left:
            number = left.pop()
            node = self.graph.nodes[number]
            if number in seen or node.op in REDUCTIONS:
                continue
            seen.add(number)
            left += node.inputs
            if node.op == "input":
                x = self.graph.inputs[node.attrs[0]]
                if x.extent == ROW and not x.by_value and x.rank < 0 and node.attrs[0] not in found:
                    found.append(node.attrs[0])
        return sorted(found)

    # Places.

    def stage_of(self, at: Any, tile: int) -> Any:
        stage = at + tile
        return cutlass.select_(stage >= self.config.stages, stage - self.config.stages, stage)

    def column_of(self, tile: int) -> Any:
        """Of the warp's tile."""
        return (self.first_tile + tile * (self.config.warps * self.config.cluster)) * TILE

    def barrier(self, stage: Any) -> Any:
        return self.barriers + (self.warp * self.config.stages + stage)

    def next_wanted(self, row: Any, tile: Any, step: Any) -> tuple[Any, Any]:
        """Row and tile of the request after this one."""
        ends = tile + 1 == self.config.tiles
        return cutlass.select_(ends, row + step, row), cutlass.select_(ends, Int32(0), tile + 1)

    @cute.jit
    def request(self, stage: Int32, row: Int32, tile: Int32):
        """By lane 0: a tile of a row, or what is left of the row there, which may be nothing."""
        if (self.lane == 0) & (row < self.values["rows", 0]):
            column = (self.first_tile + tile * (self.config.warps * self.config.cluster)) * TILE
            left = cutlass.max(cutlass.min(Int32(self.config.columns) - column, Int32(TILE)), Int32(0))
            cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(stage), left * bytes_of(self.storage))
            if left > 0:
                self.copy(stage, row, column, left)

    def copy(self, stage: Any, row: Any, column: Any, left: Any) -> None:
        place = Int64(row) * self.values["stride", self.stream] + Int64(column)
        source = pointer_at(self.values["address", self.stream], place, self.storage, 16)
        target = self.stages + (self.warp * self.config.stages + stage) * self.stage_bytes
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[target.toint(), source.toint(), left * bytes_of(self.storage), self.barrier(stage).toint()],
        )

    def vectors_of_row(self, i: int, tile: int) -> list[cute.Tensor]:
        """A lane's, of an input of one row for all."""
        result = []
        for v in range(_VECTORS):
            column = self.column_of(tile) + (self.lane + v * 32) * _VECTOR
            if self.valid(tile, v) is not True:
                column = cutlass.min(column, Int32(self.config.columns - _VECTOR))
            result.append(load_vector(self.values["address", i], Int64(column), _VECTOR, self.graph.inputs[i].storage))
        return result

    def tile_evaluator(self, at: Any, tile: int, row: Any, known: dict[int, Any], loaded: dict[int, list[cute.Tensor]]) -> Evaluator:
        """Of a lane's numbers of a tile; ``known`` are the row's statistics and its single numbers, ``loaded`` what all rows have in
        common."""
        stage = self.stage_of(at, tile)
        column = self.column_of(tile) + self.lane * _VECTOR

        def leaf(number: int, node: Node, operands: list[Any]) -> Any:
            if node.op == "value":  # "column"
                return [REGISTERS[node.dtype](column + (v * 32 * _VECTOR + e)) for v in range(_VECTORS) for e in range(_VECTOR)]
            i = node.attrs[0]
            x = self.graph.inputs[i]
            if x.by_value:
                return self.values["number", i]
            if x.extent in (COLUMN, SCALAR):
                start = Int64(row) * self.values["stride", i] if x.extent == COLUMN else Int64(0)
                return from_storage(load_vector(self.values["address", i], start, 1, x.storage), 1, node.dtype, x.storage)[0]
            values: list[Any] = []
            for v in range(_VECTORS):
                if x.extent == ROW:
                    if i not in loaded:
                        loaded[i] = self.vectors_of_row(i, tile)
                    stored = loaded[i][v]
                else:
                    place = (self.warp * self.config.stages + stage) * self.stage_bytes
                    place = place + (self.lane + v * 32) * (_VECTOR * bytes_of(x.storage))
                    pointer = cute.recast_ptr(self.stages + place, dtype=STORAGES[x.storage])
                    pointer = cute.make_ptr(STORAGES[x.storage], pointer.toint(), cute.AddressSpace.smem, assumed_align=16)
                    stored = cute.make_rmem_tensor(_VECTOR, STORAGES[x.storage])
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(_VECTOR)), stored)
                values += from_storage(stored, _VECTOR, node.dtype, x.storage)
            return values

        evaluator = Evaluator(self.graph, TILE // 32, leaf, lambda node: node.extent in (FULL, ROW))
        evaluator.known.update(known)
        return evaluator

    def valid(self, tile: int, vector: int) -> Any:
        """Whether a lane's vector is in the row; True where all are."""
        tiles = self.config.warps * self.config.cluster * self.config.tiles
        if self.config.columns == tiles * TILE:
            return True
        return self.column_of(tile) + (self.lane + vector * 32) * _VECTOR < self.config.columns

    def reduce(self, depth: int, at: Any, phase: Any, row: Any, known: dict[int, Any], exchange: tuple[Any, Any], loads: _Loads) -> _Loads:
        """A pass. ``phase``: of the tiles' barriers, where they are not known to have come. ``exchange``: which of the two sets of slots
        and barriers, and their phase. Returns the next pass's loads."""
        numbers = self.passes[depth]
        kinds = [(self.graph.nodes[i].op, self.graph.nodes[i].dtype) for i in numbers]
        totals: list[Any] = [None] * len(numbers)
        for tile in range(self.config.tiles):
            loaded = loads.of(tile)
            if phase is not None:
                wraps = cutlass.select_(at + tile >= self.config.stages, Int32(1), Int32(0))
                cute.arch.mbarrier_wait(self.barrier(self.stage_of(at, tile)), phase ^ wraps)
            evaluator = self.tile_evaluator(at, tile, row, known, loaded)
            for k, number in enumerate(numbers):
                op, dtype = kinds[k]
                values = evaluator.each(self.graph.nodes[number].inputs[0])
                for v in range(_VECTORS):
                    part = tree(op, values[v * _VECTOR : (v + 1) * _VECTOR], dtype)
                    valid = self.valid(tile, v)
                    part = part if valid is True else cutlass.select_(valid, part, identity(op, dtype))
                    totals[k] = part if totals[k] is None else combine(op, totals[k], part, dtype)
        totals = across_lanes(kinds, totals, 32)
        following = _Loads(self, self.shared_rows[depth + 1])
        turn, turn_phase = exchange
        slot = turn * self.slots + sum(map(len, self.passes[:depth]))
        arrived = None if self.arrivals is None else self.arrivals + (turn * len(self.passes) + depth)
        results = across_warps(
            kinds, totals, self.shared, slot, self.thread, self.rank, self.config.warps, self.config.cluster, arrived, turn_phase
        )
        known.update(zip(numbers, results, strict=True))
        return following

    def store_tile(self, evaluator: Evaluator, tile: int, row: Any) -> None:
        column = self.column_of(tile) + self.lane * _VECTOR
        for number, y in enumerate(self.graph.outputs):
            if y.extent not in (FULL, ROW):
                continue
            pointer, start = self.target(number, row)
            values = evaluator.each(y.node)
            for v in range(_VECTORS):
                valid = self.valid(tile, v)
                predicate = Boolean(True) if valid is True else valid
                if y.extent == ROW:
                    predicate = predicate & (row == 0)
                stored = as_storage(values[v * _VECTOR : (v + 1) * _VECTOR], self.graph.nodes[y.node].dtype, y.storage)
                store_vector(pointer, start + Int64(column + v * 32 * _VECTOR), stored, _VECTOR, y.storage, predicate)

    def target(self, number: int, row: Any) -> tuple[Any, Any]:
        y = self.graph.outputs[number]
        if y.into >= 0:
            stride = self.values.get(("stride", y.into))
            return self.values["address", y.into], Int64(0) if stride is None else Int64(row) * stride
        stride = self.values.get(("out_stride", number))
        return self.values["out", number], Int64(0) if stride is None else Int64(row) * stride

    def store_numbers(self, row: Any, known: dict[int, Any]) -> None:
        """Results of one number each, which need no tile."""
        chosen = [(i, y) for i, y in enumerate(self.graph.outputs) if y.extent in (COLUMN, SCALAR)]
        if not chosen:
            return
        evaluator = self.tile_evaluator(Int32(0), 0, row, known, {})
        for number, y in chosen:
            pointer, start = self.target(number, row)
            first = self.thread + self.rank == 0
            if y.extent == SCALAR:
                first = first & (row == 0)
            stored = as_storage([evaluator.value(y.node)], self.graph.nodes[y.node].dtype, y.storage)
            store_vector(pointer, start, stored, 1, y.storage, first)

    def place(self) -> None:
        c = self.config
        self.thread = cute.arch.thread_idx()[0]
        self.warp, self.lane = cute.arch.make_warp_uniform(self.thread // 32), self.thread % 32
        self.rank = Int32(0) if c.cluster == 1 else cute.arch.block_idx_in_cluster()
        self.first_tile = self.rank * c.warps + self.warp
        words = 2 * self.slots * c.warps * c.cluster
        self.shared = cute.arch.alloc_smem(Int32, words, alignment=16)
        self.arrivals = cute.arch.alloc_smem(Int64, 2 * len(self.passes), alignment=8) if c.cluster > 1 else None
        self.barriers = cute.arch.alloc_smem(Int64, c.warps * c.stages, alignment=8)
        self.stages = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128)

    @cute.jit
    def run(self):
        c = self.config
        rows = self.values["rows", 0]
        self.place()
        if self.lane == 0:
            for stage in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(self.barrier(stage), 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        if cutlass.const_expr(c.cluster > 1):
            init_arrivals(self.arrivals, 2 * len(self.passes), self.thread)
            cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        step = cute.arch.grid_dim()[0] // c.cluster
        row = cute.arch.block_idx()[0] // c.cluster
        wanted_row, wanted_tile = row, Int32(0)  # of the next request
        for stage in cutlass.range_constexpr(c.stages):
            self.request(Int32(stage), wanted_row, wanted_tile)
            wanted_row, wanted_tile = self.next_wanted(wanted_row, wanted_tile, step)
        if cutlass.const_expr(c.cluster > 1):
            cute.arch.cluster_wait()  # all CTAs of the cluster run: their shared memory may be written
        at, phase, turn, turn_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        while row < rows:
            wanted_row, wanted_tile = self.whole_row(row, at, phase, (turn, turn_phase), wanted_row, wanted_tile, step)
            at = at + c.tiles
            if at >= c.stages:
                at = at - c.stages
                phase = phase ^ 1
            turn_phase = turn_phase ^ turn
            turn = turn ^ 1
            row = row + step

    def whole_row(
        self, row: Any, at: Any, phase: Any, exchange: tuple[Any, Any], wanted_row: Any, wanted_tile: Any, step: Any
    ) -> tuple[Any, Any]:
        """Returns what is to be requested next."""
        known: dict[int, Any] = {}
        loads = _Loads(self, self.shared_rows[0])
        for depth in range(len(self.passes)):
            loads = self.reduce(depth, at, None if depth else phase, row, known, exchange, loads)
        self.store_numbers(row, known)
        for tile in range(self.config.tiles):
            evaluator = self.tile_evaluator(at, tile, row, known, loads.of(tile))
            for number, node in enumerate(self.graph.nodes):
                if node.op == "input" and node.attrs[0] == self.stream:
                    evaluator.value(number)
            cute.arch.sync_warp()  # all lanes have read the stage
            self.request(self.stage_of(at, tile), wanted_row, wanted_tile)
            wanted_row, wanted_tile = self.next_wanted(wanted_row, wanted_tile, step)
            self.store_tile(evaluator, tile, row)
        return wanted_row, wanted_tile


class _Loads:
    """A lane's vectors of what all rows have in common, for a pass: of each tile requested before the tile before it is used, of the first
    one before the statistics that the pass needs are exchanged."""

    def __init__(self, ring: _Ring, inputs: list[int]):
        self.ring, self.inputs = ring, inputs
        self.tiles = [self._load(0)]

    def _load(self, tile: int) -> dict[int, list[cute.Tensor]]:
        return {i: self.ring.vectors_of_row(i, tile) for i in self.inputs}

    def of(self, tile: int) -> dict[int, list[cute.Tensor]]:
        """Of the pass's tiles, in order."""
        if len(self.tiles) < self.ring.config.tiles:
            self.tiles.append(self._load(len(self.tiles)))
        return self.tiles[tile]


def build(graph: Graph, config: dict[str, Any], *, name: str, architecture: str) -> Artifact:
    c = RingConfig(**config)
    storage = next(x.storage for x in graph.inputs if x.extent == FULL and x.rank < 0)

    def body(values: list[Any]) -> None:
        _Ring(graph, c, dict(zip(parameters(graph), values, strict=True))).run()

    return compile_kernel(
        body, parameter_types(graph, parameters(graph)), name=name, architecture=architecture, block=c.block, cluster=c.cluster,
        shared_bytes=c.warps * c.stages * TILE * bytes_of(storage),
    )  # fmt: skip
