"""GEMMs of graphs for architectures without WGMMA, from sm_80 on: cp.async and mma.sync, with the tiles, epilogue and prologue of gemm.py.

Four warps have 64 rows and 64 or 128 columns, eight warps 128 rows; a warp has 16 rows in all columns of the tile, so that rows stay within
quads of lanes as they do with WGMMA. A stage of the ring holds [tile_m, 128 bytes] of A and [tile_n, 128 bytes] of B (or [tile_n / 64, 64
of k, 64 of n] where B is n-major), 16-byte pieces swizzled by their row, which ldmatrix reads without conflicts. Copies run `stages` - 1
tiles of k ahead; one barrier a tile of k. What lies beyond the end of a matrix is zero in shared memory.

Limits: rows of A and B at multiples of 16 bytes; products of 16-bit numbers.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ..artifact import Artifact
from ..dtypes import bytes_of
from ..gemm_config import GemmConfig, parameters
from ..graph import Graph
from .build import compile_kernel, overlaps
from .gemm_epilogue import Epilogue
from .gemm_kernel import GemmKernel, gemm_parameter_types, swizzled
from .gemm_prologue import Prologue
from .mma_sync import load_matrices, multiply

_PIECE = 16  # bytes


class _PortableGemm(GemmKernel):
    def __init__(self, graph: Graph, config: GemmConfig, values: dict[tuple[str, int], Any], dependent: bool):
        super().__init__(graph, config, values)
        self.dependent = dependent  # whether launches may overlap: from sm_90 on

    # Copies.

    def copy_piece(self, target: Any, source: Any, size: Any) -> None:
        """16 bytes into shared memory, of which ``size`` are read and the others zero."""
        cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, size])

    def place_of_piece(self, row: Any, piece: Any, row_bytes: int) -> Any:
        """Bytes from the start of a tile."""
        return row * row_bytes + swizzled(row, piece, row_bytes) * _PIECE

    def copy_rows(
        self, base: Any, first: Any, stride: Any, row_of: Any, rows: int, limit: Any, row_bytes: int, column: Any, columns: Any, size: int
    ) -> None:  # fmt: skip
        """``rows`` rows of ``row_bytes``, from the numbers ``column`` on, of which a row has ``columns``."""
        pieces = row_bytes // _PIECE
        step = self.config.block // pieces
        piece, own = self.thread % pieces, self.thread // pieces
        at = column + piece * (_PIECE // size)
        left = cutlass.max(cutlass.min(columns - at, Int32(_PIECE // size)), Int32(0)) * size
        for part in range(0, rows, step):
            row = own + part
            there = row_of(row)
            length = cutlass.select_(there < limit, left, Int32(0))
            start = cutlass.select_(length > 0, Int64(there) * stride + Int64(at), Int64(0))
            self.copy_piece(base + self.place_of_piece(row, piece, row_bytes), first + start * size, length)

    def request(self, slot: Any, k_tile: Any, row: Any, n_tile: Any, expert: Any) -> None:
        c, v = self.config, self.values
        k = k_tile * c.tile_k
        size_a, size = bytes_of(c.a_stored or c.a), bytes_of(c.a)
        base_a, base_b = self.base + slot * c.stage_bytes, self.base + (slot * c.stage_bytes + c.a_bytes)
        self.copy_rows(
            base_a, v["a", 0].toint(), v["lda", 0], lambda x: row + x, c.tile_m, self.m, c.a_swizzle, k, v["k", 0], size_a
        )  # fmt: skip
        first = v["b", 0].toint()
        if c.grouped:
            first = first + Int64(expert) * v["ldb_expert", 0] * size
        columns = self.n * 2 if c.gate else self.n

        def column_of(x: Any) -> Any:
            """Of the matrix, from that of the tile."""
            if c.gate == "halves":
                upper = x >= c.columns
                return n_tile * c.columns + cutlass.select_(upper, x - c.columns + self.n, x)
            return n_tile * c.tile_n + x

        if c.b_major == "k":
            self.copy_rows(base_b, first, v["ldb", 0], column_of, c.tile_n, columns, 128, k, v["k", 0], size)
            return
        piece, own = self.thread % 8, self.thread // 8
        for block in range(c.tile_n // 64):
            at = column_of(block * 64 + piece * 8)
            left = cutlass.max(cutlass.min(columns - at, Int32(_PIECE // size)), Int32(0)) * size
            for part in range(0, c.tile_k, c.block // 8):
                there = k + own + part
                length = cutlass.select_(there < v["k", 0], left, Int32(0))
                start = cutlass.select_(length > 0, Int64(there) * v["ldb", 0] + Int64(at), Int64(0))
                target = base_b + (block * 64 * 128 + self.place_of_piece(own + part, piece, 128))
                self.copy_piece(target, first + start * size, length)

    # Products.

    def multiply_tile(self, slot: Any) -> None:
        """One tile of k is added to the accumulators."""
        c = self.config
        base_a, base_b = self.base + slot * c.stage_bytes, self.base + (slot * c.stage_bytes + c.a_bytes)
        matrix, inner = self.lane // 8, self.lane % 8
        for k in range(c.tile_k // 16):
            if self.prologue is None:
                row = self.group * 64 + self.warp * 16 + matrix % 2 * 8 + inner
                a = load_matrices(base_a + self.place_of_piece(row, k * 2 + matrix // 2, 128), False)
            else:
                words = cute.recast_tensor(self.of_tile.next, Int32)
                a = [words[k * 4 + i] for i in range(4)]
            for group in range(0, c.tile_n // 8, 2):
                if c.b_major == "k":
                    b = load_matrices(base_b + self.place_of_piece(group * 8 + matrix // 2 * 8 + inner, k * 2 + matrix % 2, 128), False)
                else:
                    row = k * 16 + matrix % 2 * 8 + inner
                    place = group // 8 * (64 * 128) + self.place_of_piece(row, group % 8 + matrix // 2, 128)
                    b = load_matrices(base_b + place, True)
                for half in range(2):
                    self.product(a, b[2 * half : 2 * half + 2], group + half)

    def product(self, a: list[Any], b: list[Any], group: int) -> None:
        places = [((e, i, group), 0, 0) for i in range(2) for e in range(2)]
        for place, result in zip(places, multiply(self.config.a, a, b, [self.acc[place] for place in places]), strict=True):
            self.acc[place] = result

    @cute.jit
    def main_loop_of(self, row: Int32, n_tile: Int32, expert: Int32):
        c = self.config
        self.acc.fill(0.0)
        if cutlass.const_expr(self.prologue is not None):
            self.of_tile = Prologue(self, row, expert)
        for stage in cutlass.range_constexpr(c.stages - 1):
            if stage < self.k_tiles:
                self.request(Int32(stage), Int32(stage), row, n_tile, expert)
            cute.arch.cp_async_commit_group()
        slot, ahead = Int32(0), Int32(c.stages - 1)
        for k_tile in cutlass.range(self.k_tiles, unroll=1):
            cute.arch.cp_async_wait_group(c.stages - 2)
            cute.arch.sync_threads()  # all have this tile, and have read the one before, whose place is filled now
            if k_tile + (c.stages - 1) < self.k_tiles:
                self.request(ahead, k_tile + (c.stages - 1), row, n_tile, expert)
            cute.arch.cp_async_commit_group()
            if cutlass.const_expr(self.prologue is not None):
                self.of_tile.compute(slot, k_tile * c.tile_k)
            self.multiply_tile(slot)
            slot = slot + 1
            if slot == c.stages:
                slot = Int32(0)
            ahead = ahead + 1
            if ahead == c.stages:
                ahead = Int32(0)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    def a_place(self, stage: Any) -> Any:
        return self.base + stage * self.config.stage_bytes

    @cute.jit
    def tile_of(self, row: Int32, n_tile: Int32, limit: Int32, expert: Int32):
        self.main_loop_of(row, n_tile, expert)
        of_tile = Epilogue(self, row, n_tile, limit, expert)
        of_tile.begin()
        of_tile.run()

    @cute.jit
    def run(self):
        c = self.config
        self.thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(self.thread // 32)
        self.enter(self.thread % 32, warp % 4, warp // 4, Int32(0))
        self.base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        self.accumulate_in(cute.make_rmem_tensor(((2, 2, c.tile_n // 8), 1, 1), Float32))
        if cutlass.const_expr(self.dependent):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tile, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        tiles = self.tiles.count()
        before, expert, first, last = self.tiles.begin()
        while tile < tiles:
            row, n_tile, limit, before, expert, first, last = self.tiles.place(tile, before, expert, first, last)
            if cutlass.const_expr(c.grouped):
                if self.tiles.has_matrix(expert):
                    self.tile_of(row, n_tile, limit, expert)
                else:
                    self.store_zeros(row, n_tile, limit)
            else:
                self.tile_of(row, n_tile, limit, expert)
            tile = tile + step


def build(graph: Graph, config: dict[str, Any], *, name: str, architecture: str) -> Artifact:
    c = GemmConfig(**config)
    dependent = overlaps(architecture)

    def body(values: list[Any]) -> None:
        _PortableGemm(graph, c, dict(zip(parameters(graph, c), values, strict=True)), dependent).run()

    return compile_kernel(
        body, gemm_parameter_types(graph, c), name=name, architecture=architecture, block=c.block, shared_bytes=c.shared_bytes
    )
