"""GEMMs whose epilogue, and what is done to A as it is loaded, is a graph: TMA and WGMMA, for sm_90a.

Warps. Warpgroup 0 produces: one of its warps requests tiles of A and B through a ring of stages, by TMA. One or two warpgroups multiply:
cooperative, they share a tile of 128 or 256 rows; pingpong, each has every other tile of the CTA, and the epilogue of one is hidden under
the main loop of the other, which a pair of named barriers puts in order. CTAs stay, one an SM, and take tiles by turns (gemm_tiles.py).

Ring. A stage holds [tile_m, 128 bytes] of A and [tile_n, 128 bytes] of B (or [tile_n / 64, 64 of k, 64 of n], where B is n-major), swizzled
by 128 bytes. `full` counts the bytes of the copies, `empty` the warps that have read the stage. CTAs of a cluster lie along m and load the
halves of their tile of B for each other; `empty` counts the warps of both then.

Epilogue (gemm_epilogue.py). It begins with its loads while tensor cores finish, and frees the ring's last stage behind them.

Prologue (gemm_prologue.py). A's tile is copied as it is stored, and multiplied from registers: the next stage's is computed while tensor
cores multiply this one's.

Limits: TMA's 16-byte rows of A and B. Rows and columns beyond the end are zeros in shared memory and take part in nothing.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int16, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers

from ..artifact import Artifact
from ..dtypes import bytes_of
from ..gemm_config import GemmConfig, parameters
from ..graph import FULL, Graph
from .build import compile_kernel
from .gemm_epilogue import Epilogue
from .gemm_kernel import GemmKernel, gemm_parameter_types
from .gemm_prologue import Prologue

_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # of 384 threads, which begin with 168
_ORDER = 2  # the first named barrier


class _HopperGemm(GemmKernel):
    def __init__(self, graph: Graph, config: GemmConfig, values: dict[tuple[str, int], Any]):
        super().__init__(graph, config, values)
        self.release_count = 4 * config.sharing * config.cluster
        scattered = {y.into for y in graph.outputs if y.index >= 0}
        self.fetched = [i for i, x in enumerate(graph.inputs) if x.extent == FULL and x.rank < 0 and i not in scattered]

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

    @cute.jit
    def next(self, stage: Int32, phase: Int32):
        """The stage behind one, and the phase of its barriers."""
        stage = stage + 1
        if stage == self.config.stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    def a_place(self, stage: Any) -> Any:
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
        before, expert, first, last = self.tiles.begin()
        while tile < tiles:
            row, n_tile, limit, before, expert, first, last = self.tiles.place(tile, before, expert, first, last)
            k_tiles = self.k_tiles
            if cutlass.const_expr(c.grouped):
                k_tiles = cutlass.select_(self.tiles.has_matrix(expert), k_tiles, Int32(0))
            for k_tile in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(self.barrier(1, stage), phase)
                with cute.arch.elect_one():
                    self.request(stage, k_tile * c.tile_k, row, n_tile, expert)
                stage, phase = self.next(stage, phase)
            if cutlass.const_expr(len(self.fetched) > 0):
                self.prefetch(row, n_tile, limit)
            tile = tile + step
        if cutlass.const_expr(c.cluster > 1):  # the other CTA arrives at this one's barriers: stay until it has
            for _ in cutlass.range(c.stages, unroll=1):
                cute.arch.mbarrier_wait(self.barrier(1, stage), phase)
                stage, phase = self.next(stage, phase)

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
        cute.arch.mbarrier_wait(self.barrier(0, stage), phase)
        self.multiply(stage, True)
        last = stage
        stage, phase = self.next(stage, phase)
        for _ in cutlass.range(self.k_tiles - 1, unroll=1):
            cute.arch.mbarrier_wait(self.barrier(0, stage), phase)
            self.multiply(stage, False)
            warpgroup.wait_group(1)
            self.release(last)
            last = stage
            stage, phase = self.next(stage, phase)
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
            stage, phase = self.next(stage, phase)
            cute.arch.mbarrier_wait(self.barrier(0, stage), phase)
            self.of_tile.compute(stage, (k_tile + 1) * c.tile_k)
            warpgroup.wait_group(0)
            self.release(last)
        self.of_tile.hand_over()
        self.multiply(stage, False)
        read = stage
        stage, phase = self.next(stage, phase)
        return read, stage, phase

    @cute.jit
    def products(self, stage: Int32, phase: Int32, row: Int32, expert: Int32):
        if cutlass.const_expr(self.prologue is None):
            read, stage, phase = self.main_loop(stage, phase)
        else:
            read, stage, phase = self.main_loop_of_prologue(stage, phase, row, expert)
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
        before, expert, first, last = self.tiles.begin()
        while tile < tiles:
            row, n_tile, limit, before, expert, first, last = self.tiles.place(tile, before, expert, first, last)
            if cutlass.const_expr(c.pingpong):
                cute.arch.barrier(barrier_id=_ORDER + self.group, number_of_threads=256)
            read = Int32(0)
            if cutlass.const_expr(c.grouped):
                if self.tiles.has_matrix(expert):
                    read, stage, phase = self.products(stage, phase, row, expert)
                    self.epilogue(row, n_tile, limit, expert, read)
                else:
                    self.store_zeros(row, n_tile, limit)
            else:
                read, stage, phase = self.products(stage, phase, row, expert)
                if cutlass.const_expr(c.pingpong):
                    if tile + step < tiles:
                        cute.arch.barrier_arrive(barrier_id=_ORDER + 1 - self.group, number_of_threads=256)
                self.epilogue(row, n_tile, limit, expert, read)
            if cutlass.const_expr(c.pingpong):
                stage, phase = self.skipped(stage, phase)
            tile = tile + step * (2 if cutlass.const_expr(c.pingpong) else 1)

    @cute.jit
    def epilogue(self, row: Int32, n_tile: Int32, limit: Int32, expert: Int32, read: Int32):
        of_tile = Epilogue(self, row, n_tile, limit, expert)
        of_tile.begin()
        warpgroup.wait_group(0)
        self.release(read)
        of_tile.run()

    # The kernel.

    @cute.jit
    def run(self):
        c = self.config
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        self.rank = Int32(0) if c.cluster == 1 else cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        self.enter(thread % 32, warp % 4, warp // 4 - 1, self.rank)
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
        tiles = self.tiles.count()
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
        self.accumulate_in(cute.make_rmem_tensor(self.mma.partition_shape_C((c.tile_m, c.tile_n)), Float32))


def build(graph: Graph, config: dict[str, Any], *, name: str, architecture: str) -> Artifact:
    c = GemmConfig(**config)

    def body(values: list[Any]) -> None:
        _HopperGemm(graph, c, dict(zip(parameters(graph, c), values, strict=True))).run()

    return compile_kernel(
        body,
        gemm_parameter_types(graph, c),
        name=name,
        architecture=architecture,
        block=c.block,
        cluster=c.cluster,
        shared_bytes=c.shared_bytes,
        alone=c.moves_registers,
    )
