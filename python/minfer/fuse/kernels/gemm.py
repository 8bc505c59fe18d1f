"""GEMMs whose epilogue, and what is done to A as it is loaded, is a graph: TMA and WGMMA, for sm_90a.

Warps. Warpgroup 0 produces: one of its warps requests tiles of A and B through a ring of stages, by TMA. One or two warpgroups multiply:
cooperative, they share a tile of 128 or 256 rows; pingpong, each has every other tile of the CTA, and the epilogue of one is hidden under
the main loop of the other, which a pair of named barriers puts in order. CTAs stay, one an SM, and take tiles by turns, in bands of rows.

Ring. A stage holds [tile_m, 128 bytes] of A and [tile_n, 128 bytes] of B (or [tile_n / 64, 64 of k, 64 of n], where B is n-major), swizzled
by 128 bytes. `full` counts the bytes of the copies, `empty` the warps that have read the stage. CTAs of a cluster lie along m and load the
halves of their tile of B for each other; `empty` counts the warps of both then.

Epilogue. A thread's accumulators are 2 rows of every 64, and of these pairs of neighbouring columns. The four lanes of a quad, which have
32 columns of the same rows, exchange theirs by shuffles, so that a lane has 8 neighbouring columns: tensors of rows are loaded and stored
by vectors of up to 16 bytes, a quad's next to each other, and no shared memory is needed. Where no tensor of rows is read and results have
16 bits, the results are exchanged instead, two in a word. The graph is evaluated for 32 columns after another; the tensors of rows that the
next ones need are loaded before. Reductions are of a row of the tile, in the order of its columns; a kernel of rows puts the tiles
together.

Prologue. A's tile is copied as it is stored. A warpgroup reads its rows as WGMMA takes them from registers, evaluates the graph, and
multiplies from there.

Limits: TMA's 16-byte rows of A and B. Rows and columns beyond the end are zeros in shared memory and take part in nothing.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int16, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers

from ..artifact import Artifact
from ..dtypes import bytes_of
from ..gemm_config import GemmConfig, parameters
from ..graph import COLUMN, FULL, REDUCTIONS, ROW, SCALAR, Graph, Node
from .build import compile_kernel
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
from .rows import register_of_storage, tree

_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # of 384 threads, which begin with 168
_ORDER = 2  # the first named barrier
_AHEAD = 40  # registers of a thread for tensors of rows that are loaded before they are needed


def dsl_types(graph: Graph, config: GemmConfig) -> list[Any]:
    """What the DSL takes for each parameter."""
    types: list[Any] = []
    prologue: Any = config.prologue_graph()
    for kind, i in parameters(graph, config):
        if kind == "map":
            types.append(("tensor_map", cutlass.BFloat16))
        elif kind == "a":
            types.append(("pointer", STORAGES[config.a_stored or config.a]))
        elif kind == "b":
            types.append(("pointer", STORAGES[config.a]))
        elif kind == "address":
            types.append(("pointer", STORAGES[graph.inputs[i].storage]))
        elif kind == "out":
            types.append(("pointer", STORAGES[graph.outputs[i].storage]))
        elif kind == "partial":
            types.append(("pointer", REGISTERS[graph.nodes[i].dtype]))
        elif kind == "offsets":
            types.append(("pointer", Int32))
        elif kind == "number":
            types.append(("scalar", REGISTERS[register_of_storage(graph.inputs[i].storage)]))
        elif kind == "a_address":
            types.append(("pointer", STORAGES[prologue.inputs[i].storage]))
        elif kind == "a_number":
            types.append(("scalar", REGISTERS[register_of_storage(prologue.inputs[i].storage)]))
        else:
            types.append(("scalar", Int64 if kind.endswith("stride") or kind.startswith("ld") else Int32))
    return types


class Gemm:
    def __init__(self, graph: Graph, config: GemmConfig, values: dict[tuple[str, int], Any]):
        self.graph, self.config, self.values = graph, config, values
        self.prologue = config.prologue_graph()
        self.operand = STORAGES[config.a]
        self.m, self.n = values["m", 0], values["n", 0]
        self.k_tiles, self.m_tiles, self.n_tiles = (values[name, 0] for name in ("k_tiles", "m_tiles", "n_tiles"))
        self.release_count = 4 * config.sharing * config.cluster
        scattered = {y.into for y in graph.outputs if y.index >= 0}
        self.fetched = [i for i, x in enumerate(graph.inputs) if x.extent == FULL and x.rank < 0 and i not in scattered]
        self.reductions = [i for i, node in enumerate(graph.nodes) if node.op in REDUCTIONS]

    # The walk over tiles.

    def place_of(self, tile: Any) -> tuple[Any, Any]:
        """A tile's number along m and n: bands of rows, and in them column after column, so that CTAs load nearly a square at a time."""
        band = self.values["band", 0]
        per_band = band * self.n_tiles
        number = tile // per_band
        first = number * band
        height = cutlass.min(self.m_tiles - first, band)
        rest = tile - number * per_band
        n_tile = rest // height
        return first + (rest - n_tile * height), n_tile

    # Shared memory.

    def barrier(self, kind: int, stage: Any) -> Any:
        """``kind``: 0 full, 1 empty."""
        return self.barriers + (stage + kind * self.config.stages)

    def lay_out(self) -> None:
        c = self.config
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        self.base_a, self.base_b = base, base + c.stages * c.a_bytes
        barriers = base + c.stages * c.stage_bytes
        self.barriers = cute.make_ptr(Int64, barriers.toint(), cute.AddressSpace.smem, assumed_align=8)
        kinds = warpgroup.SmemLayoutAtomKind
        k_major = warpgroup.make_smem_layout_atom(kinds.K_SW128, self.operand)
        if c.b_major == "k":
            b = cute.tile_to_shape(k_major, (c.tile_n, c.tile_k, c.stages), order=(0, 1, 2))
        else:
            n_major = warpgroup.make_smem_layout_atom(kinds.MN_SW128, self.operand)
            b = cute.tile_to_shape(n_major, (c.tile_n, c.tile_k, c.stages), order=(1, 0, 2))
        if self.prologue is None:
            a = cute.tile_to_shape(k_major, (c.tile_m, c.tile_k, c.stages), order=(0, 1, 2))
            self.sA = cute.make_tensor(cute.recast_ptr(self.base_a, a.inner, dtype=self.operand), a.outer)  # (tile_m, tile_k, stages)
        self.sB = cute.make_tensor(cute.recast_ptr(self.base_b, b.inner, dtype=self.operand), b.outer)  # (tile_n, tile_k, stages)

    def a_place(self, stage: Any) -> Any:
        """Of A's tile in a stage."""
        return (self.base_a + stage * self.config.a_bytes).toint()

    # The producer.

    def copy(self, map_of: int, target: Any, stage: Any, coordinates: list[Any], mask: int = 0) -> None:
        names = ", ".join(f"{{$r{i + 3}}}" for i in range(len(coordinates)))
        modes = f"{len(coordinates)}d"
        arguments = [target.toint(), self.values["map", map_of], self.barrier(0, stage).toint(), *coordinates]
        if mask:
            arguments.append(Int16(mask))
        cute.arch.inline_ptx(
            f"cp.async.bulk.tensor.{modes}.shared::cluster.global.mbarrier::complete_tx::bytes{'.multicast::cluster' if mask else ''} "
            f"[{{$r0}}], [{{$r1}}, {{{names}}}], [{{$r2}}]" + (f", {{$r{len(arguments) - 1}}};" if mask else ";"),
            read_only_args=arguments,
        )

    def request(self, stage: Any, k: Any, row: Any, n_tile: Any, expert: Any) -> None:
        """One stage's copies, by one thread. ``k``: in numbers of K."""
        c = self.config
        cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(0, stage), c.stage_bytes)
        self.copy(0, self.base_a + stage * c.a_bytes, stage, [k, row])
        more = [expert] if c.grouped else []
        box = c.tile_n // c.boxes  # columns
        for i in range(c.boxes):
            column = n_tile * c.tile_n + i * box
            if c.gate == "halves":
                half = c.boxes // 2
                column = n_tile * c.columns + (i % half) * box + (self.n if i >= half else 0)
            target = self.base_b + stage * (c.tile_n * 128) + i * (box * 128)
            coordinates = [k, column] if c.b_major == "k" else [column, k]
            if c.cluster == 1:
                self.copy(1, target, stage, [*coordinates, *more])
            else:
                self.copy_shared(i, target, stage, *coordinates)

    @cute.jit
    def copy_shared(self, box: cutlass.Constexpr, target: Any, stage: Any, first: Any, second: Any):
        """A box of B that one CTA loads for both."""
        if self.rank == box * self.config.cluster // self.config.boxes:
            self.copy(1, target, stage, [first, second], (1 << self.config.cluster) - 1)

    @cute.jit
    def prefetch(self, row: Int32, n_tile: Int32, limit: Int32):
        """The epilogue's tensors of rows into L2, line by line, when the tile's last copies are requested."""
        c = self.config
        column = n_tile * c.columns
        for i in cutlass.range_constexpr(len(self.fetched)):
            size = bytes_of(self.graph.inputs[self.fetched[i]].storage)
            lines = max(c.columns * size // 128, 1)  # of a row
            for part in cutlass.range(c.tile_m * lines // 32, unroll=1):
                place = part * 32 + self.lane
                at, to = row + place // lines, column + place % lines * (128 // size)
                if (at < limit) & (to < self.n):
                    start = Int64(at) * self.values["stride", self.fetched[i]] + Int64(to)
                    cute.arch.inline_ptx(
                        "prefetch.global.L2 [{$r0}];", read_only_args=[self.values["address", self.fetched[i]].toint() + start * size]
                    )

    @cute.jit
    def produce(self, tile: Int32, tiles: Int32, step: Int32):
        c = self.config
        stage, phase = Int32(0), Int32(1)
        expert, first, last, before = Int32(0), Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(c.grouped):
            expert, first, last, before = self.first_expert()
        while tile < tiles:
            row, n_tile = Int32(0), Int32(0)
            if cutlass.const_expr(c.grouped):
                while tile >= before + self.tiles_of(first, last):
                    before = before + self.tiles_of(first, last)
                    expert = expert + 1
                    first = last
                    last = cutlass.max(self.end_of(expert), first)
                row, n_tile = self.place_in_expert(tile - before, first, last)
            else:
                m_tile, n_tile = self.place_of(tile)
                row = (m_tile * c.cluster + self.rank) * c.tile_m
            k_tiles = self.k_tiles
            if cutlass.const_expr(c.grouped):
                k_tiles = cutlass.select_(expert < self.values["experts", 0], k_tiles, Int32(0))
            for k_tile in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(self.barrier(1, stage), phase)
                with cute.arch.elect_one():
                    self.request(stage, k_tile * c.tile_k, row, n_tile, expert)
                stage = stage + 1
                if stage == c.stages:
                    stage = Int32(0)
                    phase = phase ^ 1
            if cutlass.const_expr(len(self.fetched) > 0):
                self.prefetch(row, n_tile, last if cutlass.const_expr(c.grouped) else self.m)
            tile = tile + step
        if cutlass.const_expr(c.cluster > 1):  # the other CTA arrives at this one's barriers: stay until it has
            for _ in cutlass.range(c.stages, unroll=1):
                cute.arch.mbarrier_wait(self.barrier(1, stage), phase)
                stage = stage + 1
                if stage == c.stages:
                    stage = Int32(0)
                    phase = phase ^ 1

    # Experts. Their tiles follow each other; the rows behind the last one's are an expert without a matrix.

    def end_of(self, expert: Any) -> Any:
        """The row behind an expert's, in 0 .. m; m behind all of them."""
        experts = self.values["experts", 0]
        value = cute.make_tensor(self.values["offsets", 0] + cutlass.min(expert, experts - 1), cute.make_layout(1))[0]
        return cutlass.select_(expert < experts, cutlass.min(cutlass.max(value, Int32(0)), self.m), self.m)

    def first_expert(self) -> tuple[Any, Any, Any, Any]:
        return Int32(0), Int32(0), self.end_of(Int32(0)), Int32(0)

    def tiles_of(self, first: Any, last: Any) -> Any:
        c = self.config
        return (last - first + (c.tile_m - 1)) // c.tile_m * self.n_tiles

    def place_in_expert(self, tile: Any, first: Any, last: Any) -> tuple[Any, Any]:
        c = self.config
        height = (last - first + (c.tile_m - 1)) // c.tile_m
        n_tile = tile // height
        return first + (tile - n_tile * height) * c.tile_m, n_tile

    # Consumers.

    def multiply(self, stage: Any, start: bool) -> None:
        """The products of one stage are added to the accumulators, or become them."""
        warpgroup.fence()
        for k in range(self.config.tile_k * bytes_of(self.config.a) // 32):
            mma = self.mma_first if start and k == 0 else self.mma
            a = self.tCrA[None, None, k, stage] if self.prologue is None else self.tCrA[None, None, k]
            cute.gemm(mma, self.acc, a, self.tCrB[None, None, k, stage], self.acc)
        warpgroup.commit_group()

    @cute.jit
    def release(self, stage: Int32):
        """By each warp that has read a stage."""
        if cutlass.const_expr(self.config.cluster > 1):
            if self.lane < self.config.cluster:
                cute.arch.mbarrier_arrive(self.barrier(1, stage), self.lane)
        else:
            if self.lane == 0:
                cute.arch.mbarrier_arrive(self.barrier(1, stage))

    @cute.jit
    def main_loop(self, stage: Int32, phase: Int32):
        """A tile's products, into the accumulators."""
        c = self.config
        cute.arch.mbarrier_wait(self.barrier(0, stage), phase)
        self.multiply(stage, True)
        last = stage
        stage = stage + 1
        if stage == c.stages:
            stage = Int32(0)
            phase = phase ^ 1
        for _ in cutlass.range(self.k_tiles - 1, unroll=1):
            cute.arch.mbarrier_wait(self.barrier(0, stage), phase)
            self.multiply(stage, False)
            warpgroup.wait_group(1)
            self.release(last)
            last = stage
            stage = stage + 1
            if stage == c.stages:
                stage = Int32(0)
                phase = phase ^ 1
        return last, stage, phase

    @cute.jit
    def main_loop_of_prologue(self, stage: Int32, phase: Int32, row: Int32, expert: Int32):
        """The same with A through registers: the next stage's is computed while tensor cores multiply this one's."""
        c = self.config
        self.of_tile = Prologue(self, row, expert)
        self.acc.fill(0.0)
        cute.arch.mbarrier_wait(self.barrier(0, stage), phase)
        self.of_tile.compute(stage, Int32(0))
        for k_tile in cutlass.range(self.k_tiles - 1, unroll=1):
            self.of_tile.hand_over()
            self.multiply(stage, False)
            last = stage
            stage = stage + 1
            if stage == c.stages:
                stage = Int32(0)
                phase = phase ^ 1
            cute.arch.mbarrier_wait(self.barrier(0, stage), phase)
            self.of_tile.compute(stage, (k_tile + 1) * c.tile_k)
            warpgroup.wait_group(0)
            self.release(last)
        self.of_tile.hand_over()
        self.multiply(stage, False)
        read = stage
        stage = stage + 1
        if stage == c.stages:
            stage = Int32(0)
            phase = phase ^ 1
        return read, stage, phase

    def skipped(self, stage: Any, phase: Any) -> tuple[Any, Any]:
        """The stages of a tile that the other warpgroup has."""
        stage = stage + self.k_tiles
        turns = stage // self.config.stages
        return stage - turns * self.config.stages, phase ^ (turns & 1)

    @cute.jit
    def consume(self, tile: Int32, tiles: Int32, step: Int32):
        c = self.config
        stage, phase = Int32(0), Int32(0)
        if cutlass.const_expr(c.pingpong):
            if self.group == 1:
                if tile < tiles:  # the first tile is the other's
                    cute.arch.barrier_arrive(barrier_id=_ORDER, number_of_threads=256)
                stage, phase = self.skipped(stage, phase)
                tile = tile + step
        expert, first, last, before = Int32(0), Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(c.grouped):
            expert, first, last, before = self.first_expert()
        while tile < tiles:
            row, n_tile, limit = Int32(0), Int32(0), self.m
            if cutlass.const_expr(c.grouped):
                while tile >= before + self.tiles_of(first, last):
                    before = before + self.tiles_of(first, last)
                    expert = expert + 1
                    first = last
                    last = cutlass.max(self.end_of(expert), first)
                row, n_tile = self.place_in_expert(tile - before, first, last)
                limit = last
            else:
                m_tile, n_tile = self.place_of(tile)
                row = (m_tile * c.cluster + self.rank) * c.tile_m
            if cutlass.const_expr(c.pingpong):
                cute.arch.barrier(barrier_id=_ORDER + self.group, number_of_threads=256)
            read = Int32(0)
            if cutlass.const_expr(c.grouped):
                if expert < self.values["experts", 0]:
                    if cutlass.const_expr(self.prologue is None):
                        read, stage, phase = self.main_loop(stage, phase)
                    else:
                        read, stage, phase = self.main_loop_of_prologue(stage, phase, row, expert)
                    self.epilogue(row, n_tile, limit, expert, read)
                else:
                    self.store_zeros(row, n_tile, limit)
            else:
                if cutlass.const_expr(self.prologue is None):
                    read, stage, phase = self.main_loop(stage, phase)
                else:
                    read, stage, phase = self.main_loop_of_prologue(stage, phase, row, expert)
                if cutlass.const_expr(c.pingpong):
                    if tile + step < tiles:
                        cute.arch.barrier_arrive(barrier_id=_ORDER + 1 - self.group, number_of_threads=256)
                self.epilogue(row, n_tile, limit, expert, read)
            if cutlass.const_expr(c.pingpong):
                stage, phase = self.skipped(stage, phase)
            tile = tile + step * (2 if cutlass.const_expr(c.pingpong) else 1)

    # The epilogue.

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

    @cute.jit
    def epilogue(self, row: Int32, n_tile: Int32, limit: Int32, expert: Int32, read: Int32):
        of_tile = Epilogue(self, row, n_tile, limit, expert)
        of_tile.begin()
        warpgroup.wait_group(0)
        self.release(read)
        of_tile.run()

    @cute.jit
    def finish(self, row: Int32, n_tile: Int32, limit: Int32, expert: Int32):
        """The epilogue of accumulators that are complete."""
        of_tile = Epilogue(self, row, n_tile, limit, expert)
        of_tile.begin()
        of_tile.run()

    @cute.jit
    def store_zeros(self, row: Int32, n_tile: Int32, limit: Int32):
        Epilogue(self, row, n_tile, limit, Int32(0)).run_zeros()

    # The kernel.

    @cute.jit
    def run(self):
        c = self.config
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        self.lane, self.warp, self.group = thread % 32, warp % 4, warp // 4 - 1
        self.rank = Int32(0) if c.cluster == 1 else cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        self.lay_out()
        if thread == 0:
            for stage in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(self.barrier(0, Int32(stage)), 1)
                cute.arch.mbarrier_init(self.barrier(1, Int32(stage)), self.release_count)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(c.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if thread == 0:
            for i in cutlass.range_constexpr(2):
                cute.arch.inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[self.values["map", i]])
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        tile, step = cute.arch.block_idx()[0] // c.cluster, cute.arch.grid_dim()[0] // c.cluster
        tiles = self.m_tiles * self.n_tiles
        if cutlass.const_expr(c.grouped):
            tiles = self.all_tiles()
        if warp < 4:
            if cutlass.const_expr(c.moves_registers):
                cute.arch.setmaxregister_decrease(_PRODUCER_REGISTERS)
            if warp == 0:
                self.produce(tile, tiles, step)
        else:
            if cutlass.const_expr(c.moves_registers):
                cute.arch.setmaxregister_increase(_CONSUMER_REGISTERS)
            self.prepare()
            self.consume(tile, tiles, step)

    @cute.jit
    def all_tiles(self):
        """Of all experts: each has its own."""
        total, first = Int32(0), Int32(0)
        for expert in cutlass.range(self.values["experts", 0] + 1, unroll=1):
            last = cutlass.max(self.end_of(expert), first)
            total = total + self.tiles_of(first, last)
            first = last
        return total

    def prepare(self) -> None:
        """What a warpgroup multiplies with."""
        c = self.config
        major = warpgroup.OperandMajorMode
        source = warpgroup.OperandSource.SMEM if self.prologue is None else warpgroup.OperandSource.RMEM
        b_major = major.K if c.b_major == "k" else major.MN
        made = [
            hopper_helpers.make_trivial_tiled_mma(
                self.operand, self.operand, major.K, b_major, Float32, (c.sharing, 1, 1), (64, c.tile_n), source
            )
            for _ in range(2)
        ]
        self.mma_first, self.mma = made
        self.mma_first.set(warpgroup.Field.ACCUMULATE, False)
        self.mma.set(warpgroup.Field.ACCUMULATE, True)
        of_group = self.mma.get_slice(self.group * 128 if c.sharing == 2 else 0)
        if self.prologue is None:
            self.tCrA = self.mma.make_fragment_A(of_group.partition_A(self.sA))  # (MMA, MMA_M, MMA_K, stages)
        else:
            self.tCrA = cute.make_rmem_tensor(self.mma.partition_shape_A((c.tile_m, c.tile_k)), self.operand)  # ((2, 2, 2), 1, MMA_K)
        self.tCrB = self.mma.make_fragment_B(of_group.partition_B(self.sB))  # (MMA, MMA_N, MMA_K, stages)
        self.acc = cute.make_rmem_tensor(self.mma.partition_shape_C((c.tile_m, c.tile_n)), Float32)  # ((2, 2, tile_n / 8), MMA_M, 1)


class Prologue:
    """Of a warpgroup's rows of one tile. A lane has of every 16 columns the pairs from 2 * (lane % 4) and from 8 behind, in two rows."""

    def __init__(self, gemm: Gemm, row: Any, expert: Any):
        self.gemm, self.config, self.values, self.expert = gemm, gemm.config, gemm.values, expert
        assert gemm.prologue is not None
        self.graph = gemm.prologue
        c = self.config
        self.inner = gemm.warp * 16 + gemm.lane // 4 + (gemm.group * 64 if c.sharing == 2 else 0)
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
                    turn = row % 8 if row_bytes == 128 else row // 2 % 4
                    place = self.gemm.a_place(stage) + (row * row_bytes + (column // 16 ^ turn) * 16 + column % 16)
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


class Epilogue:
    """Of one tile."""

    def __init__(self, gemm: Gemm, row: Any, n_tile: Any, limit: Any, expert: Any):
        self.gemm, self.graph, self.config, self.values = gemm, gemm.graph, gemm.config, gemm.values
        c = self.config
        self.n_tile, self.expert = n_tile, expert
        sharing = 64 * c.sharing
        inner = gemm.warp * 16 + gemm.lane // 4 + (gemm.group * 64 if c.sharing == 2 else 0)
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
                exchanged = self.gemm.exchanged([words[i] for i in range(4)])
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
        self.columns = [self.first + offset for _, offset in self.gemm.chunks()]
        words = 0  # registers for what 32 columns need
        for x in self.graph.inputs:
            if x.rank < 0 and x.extent in (FULL, ROW):
                words += self.each * bytes_of(x.storage) // 4 * (self.config.rows if x.extent == FULL else 1)
        self.ahead = max(min(_AHEAD // max(words, 1), len(self.columns)), 1)
        self.loaded = [self.loads(column) for column in self.columns[: self.ahead]]

    def run(self) -> None:
        chunks, columns = self.gemm.chunks(), self.columns
        taken = self.gemm.own if self.late else self.gemm.gathered
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
                for _, offset in self.gemm.chunks():
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


def build(graph: Graph, config: dict[str, Any], *, name: str, architecture: str) -> Artifact:
    c = GemmConfig(**config)

    def body(values: list[Any]) -> None:
        Gemm(graph, c, dict(zip(parameters(graph, c), values, strict=True))).run()

    return compile_kernel(
        body,
        dsl_types(graph, c),
        name=name,
        architecture=architecture,
        block=c.block,
        cluster=c.cluster,
        shared_bytes=c.shared_bytes,
        alone=c.moves_registers,
    )
