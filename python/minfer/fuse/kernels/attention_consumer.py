"""The consumer warpgroups of attention for sm_90a: a tile's scores, the softmax and the output.

A step computes the scores of a tile and, in the same batch of MMAs, the output of the tile before, whose probabilities are in registers;
the function of scores and the softmax run while the tensor cores work for the other warpgroups. Warpgroups issue their MMAs in turns: one
turn for each tile of keys, also for those that they pass on. A warpgroup passes on tiles that it does not visit, up to its first one, and
computes others that are empty for it as partial ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .attention_epilogue import Epilogue
from .attention_instructions import again, opaque
from .attention_key_tiles import EMPTY, FULL, NOTHING
from .attention_scores import Scores
from .attention_soft_cap import SoftCap
from .attention_softmax import OnlineSoftmax
from .attention_tiles import Place

if TYPE_CHECKING:
    from .attention import HopperAttention


class Consumer:
    """One of the warpgroups, of 64 rows each."""

    def __init__(self, kernel: HopperAttention):
        self.kernel, self.config, self.element = kernel, kernel.config, kernel.element
        self.functions, self.tiles, self.shared = kernel.functions, kernel.tiles, kernel.shared
        self.thread, self.lane, self.group = kernel.thread, kernel.lane, kernel.group
        self.panels = kernel.config.head_dim // 64

    # Operands.

    def k_major(self, base: Any, rows: int, pitch: int, stages: int) -> cute.Tensor:
        """(rows, head_dim, PIPE), as TMA leaves it."""
        layout = cute.make_layout(
            ((8, rows // 8), (64, self.panels), stages), stride=((64, 512), (1, pitch * 64), pitch * self.config.head_dim)
        )
        return cute.make_tensor(self.swizzled(base), layout)

    def mn_major(self, base: Any, rows: int, stages: int) -> cute.Tensor:
        """(head_dim, rows, PIPE)"""
        layout = cute.make_layout(
            ((64, self.panels), (8, rows // 8), stages), stride=((1, rows * 64), (64, 512), rows * self.config.head_dim)
        )
        return cute.make_tensor(self.swizzled(base), layout)

    def swizzled(self, base: Any) -> cute.Pointer:
        pointer = cute.make_ptr(self.element, base, cute.AddressSpace.smem, assumed_align=1024)
        return cute.recast_ptr(pointer, cute.make_swizzle(3, 4, 3), self.element)

    def operands(self) -> None:
        c = self.config
        k_mode, mn_mode = OperandMajorMode.K, OperandMajorMode.MN
        self.op_scores = warpgroup.MmaF16BF16Op(self.element, Float32, (64, c.keys, 16), warpgroup.OperandSource.SMEM, k_mode, k_mode)
        self.op_output = warpgroup.MmaF16BF16Op(self.element, Float32, (64, c.head_dim, 16), warpgroup.OperandSource.RMEM, k_mode, mn_mode)
        thread = self.thread % 128
        scores = cute.make_tiled_mma(self.op_scores).get_slice(thread)
        output = cute.make_tiled_mma(self.op_output).get_slice(thread)
        queries = self.k_major(self.shared.q_base + self.group * (64 * 128), 64, c.rows, c.query_stages)
        self.tSrQ = scores.make_fragment_A(scores.partition_A(queries))  # (MMA,MMA_M,MMA_K,PIPE)
        self.tSrK = scores.make_fragment_B(scores.partition_B(self.k_major(self.shared.k_base, c.keys, c.keys, c.stages)))
        self.tOrV = output.make_fragment_B(output.partition_B(self.mn_major(self.shared.v_base, c.keys, c.stages)))
        self.products = scores.make_fragment_C(scores.partition_shape_C((64, c.keys)))
        self.output = output.make_fragment_C(output.partition_shape_C((64, c.head_dim)))
        self.probabilities = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, c.keys // 16)), self.element)
        self.scores = Scores(self.functions, self.products, self.lane, self.shared)
        self.softmax = OnlineSoftmax(self.functions, self.products, self.output, self.probabilities)
        self.soft_cap = None if self.functions.cap is None else SoftCap(self.functions, self.softmax)
        self.epilogue = Epilogue(self.functions, self.softmax, self.lane)

    def multiply_keys(self, q_at: Any, stage: Any) -> None:
        mma = cute.make_tiled_mma(self.op_scores)
        mma.set(warpgroup.Field.ACCUMULATE, self.functions.line >= 0)
        at = 0 if self.config.packed else q_at
        for k in range(self.config.head_dim // 16):
            cute.gemm(mma, self.products, self.tSrQ[None, None, k, at], self.tSrK[None, None, k, stage], self.products)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def multiply_values(self, stage: Any) -> None:
        mma = cute.make_tiled_mma(self.op_output)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for k in range(self.config.keys // 16):
            cute.gemm(mma, self.output, self.probabilities[None, None, k], self.tOrV[None, None, k, stage], self.output)
        warpgroup.commit_group()

    @cute.jit
    def release(self, barrier: cute.Pointer):
        if self.lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def fetch_next(self, where: Any, number: Int32):
        """Of the CTA's tiles behind the first one."""
        if number != 0:
            cute.arch.barrier(barrier_id=8 + self.group, number_of_threads=128)  # no warp's MMAs read the queries before any more
            self.kernel.fetch(where, self.shared.q_base)

    def await_queries(self) -> None:
        """The copies are done, for the MMAs of the warpgroup."""
        cute.arch.inline_ptx("cp.async.wait_all;")
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=8 + self.group, number_of_threads=128)

    @cute.jit
    def clear_values(self, where: Any, word: Int32, stage: Int32):
        """Values behind the end of a sequence, which a page may hold anything in, become zeros: by every warpgroup, before its own MMAs."""
        c = self.config
        begin = where.sk - (word >> 4) * c.keys
        if begin < c.keys:
            vectors = (c.keys - begin) * 8
            for panel in cutlass.range_constexpr(self.panels):
                base = self.shared.v_base + stage * self.shared.tile_bytes + panel * (c.keys * 128) + begin * 128
                i = self.thread % 128
                while i < vectors:
                    there = cute.make_ptr(Int32, base + i * 16, cute.AddressSpace.smem, assumed_align=16)
                    zeros = cute.make_rmem_tensor(4, Int32)
                    zeros.fill(0)
                    cute.autovec_copy(zeros, cute.make_tensor(there, cute.make_layout(4)))
                    i = i + 128
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=8 + self.group, number_of_threads=128)

    def wait_for_turn(self) -> None:
        if self.config.consumers > 1:
            cute.arch.barrier(barrier_id=1 + self.group, number_of_threads=256)

    def pass_turn(self) -> None:
        n = self.config.consumers
        if n > 1:
            following = cutlass.select_(self.group == n - 1, Int32(0), self.group + 1)
            cute.arch.barrier_arrive(barrier_id=1 + following, number_of_threads=256)

    @cute.jit
    def skip(self, word: Int32, k_at: Int32, k_phase: Int32, v_at: Int32, v_phase: Int32):
        """Passes on the turn and the stages of a tile of keys, which have arrived, that this warpgroup's rows do not visit; the word of the
        next one, when that has arrived."""
        self.wait_for_turn()
        self.pass_turn()
        cute.arch.sync_warp()  # all lanes have read the word
        self.release(self.shared.empty_k(k_at))
        cute.arch.mbarrier_wait(self.shared.full_v(v_at), v_phase)  # a stage that is on its way is not given back
        self.release(self.shared.empty_v(v_at))
        result = Int32(NOTHING)
        if (word & 12) != 0:
            at, phase = self.shared.advance(k_at, k_phase)
            cute.arch.mbarrier_wait(self.shared.full_k(at), phase)
            result = self.shared.read_word(at, self.group)
        return result

    def step(self, where: Place, queries: Any, known: Any, steps: Any, before: Any, q_at: Any, k_at: Any, k_phase: Any, v_at: Any,
             v_phase: Any, masked: bool) -> Any:  # fmt: skip
        """The scores of a tile and the output of the one before; the tile's word. All lanes read it before a WGMMA, which they execute
        together and which stands before the stage is given back."""
        cute.arch.mbarrier_wait(self.shared.full_k(k_at), k_phase)
        word = self.shared.read_word(k_at, self.group)
        cute.arch.mbarrier_wait(self.shared.full_v(v_at), v_phase)
        if self.config.paged:
            self.clear_values(where, before, v_at)
        self.wait_for_turn()
        warpgroup.fence()
        self.multiply_keys(q_at, k_at)
        self.multiply_values(v_at)
        self.pass_turn()
        warpgroup.wait_group(1)
        self.release(self.shared.empty_k(k_at))
        if self.soft_cap is not None and not masked:
            warpgroup.wait_group(0)  # from here on the probabilities' registers may be written
            self.release(self.shared.empty_v(v_at))
            raised = self.soft_cap.exponentials()
        else:
            self.scores.modify(where, queries, known, word >> 4, masked, self.shared.numbers_of_keys(k_at, k_phase))
            offsets, raised = self.softmax.maxima(self.scores.bases_of(where, queries, known, word >> 4))
            warpgroup.wait_group(0)
            self.release(self.shared.empty_v(v_at))
            self.softmax.exponentials(offsets, self.softmax.rounded())
            self.scores.prepare(steps)
        self.softmax.rescale_output(raised)
        return word

    def first_row(self) -> Any:
        """The first of the thread's two rows. It is computed where it is needed: kept over the main loop, it would be spilled."""
        thread = opaque(cute.arch.thread_idx()[0])
        return self.group * 64 + ((thread & 96) >> 1) + ((thread & 31) >> 2)

    def await_tile(self, number: Any) -> Any:
        """Whether the CTA has a tile of queries of this number, when it is published and its queries have arrived."""
        cute.arch.mbarrier_wait(self.shared.full_q(number & 1), (number >> 1) & 1)
        return cute.arch.make_warp_uniform(self.shared.record(number & 1)[0]) >= 0

    def start(self) -> None:
        """Of a tile of queries."""
        self.softmax.start()
        if self.soft_cap is not None:
            self.soft_cap.start()

    @cute.jit
    def consume(self):
        c = self.config
        self.operands()
        k_at, k_phase, v_at, v_phase, number = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(c.consumers > 1):
            if self.group == c.consumers - 1:
                self.pass_turn()
        if cutlass.const_expr(c.packed):
            # At once: with few queries, that the first keys take as long is all there is.
            self.kernel.fetch(self.tiles.locate(cute.arch.block_idx()[0]), self.shared.q_base)
        more = self.await_tile(number)
        while more:
            q_at = cute.arch.make_warp_uniform(number & 1)
            where = self.tiles.read(self.shared.record(q_at))
            row = self.first_row()
            rows = [self.tiles.row_of(where, row), self.tiles.row_of(where, row + 8)]
            queries = [(query + where.first, of_query) for query, of_query in rows]
            known = self.functions.known_of_rows(where, queries)
            if cutlass.const_expr(c.packed):
                self.fetch_next(where, number)
                self.await_queries()
            self.start()
            cute.arch.mbarrier_wait(self.shared.full_k(k_at), k_phase)
            word = self.shared.read_word(k_at, self.group)
            if word == NOTHING:
                cute.arch.sync_warp()
                self.release(self.shared.empty_k(k_at))
                k_at, k_phase = self.shared.advance(k_at, k_phase)
            while (word & 3) == EMPTY:
                word = self.skip(word, k_at, k_phase, v_at, v_phase)
                k_at, k_phase = self.shared.advance(k_at, k_phase)
                v_at, v_phase = self.shared.advance(v_at, v_phase)
            if word != NOTHING:
                steps = self.scores.steps_of(where, queries, known)
                self.scores.prepare(again(steps))
                self.wait_for_turn()
                warpgroup.fence()
                self.multiply_keys(q_at, k_at)
                self.pass_turn()
                warpgroup.wait_group(0)
                self.release(self.shared.empty_k(k_at))
                numbers = self.shared.numbers_of_keys(k_at, k_phase)
                k_at, k_phase = self.shared.advance(k_at, k_phase)
                if (word & 3) == FULL:
                    self.scores.modify(where, queries, known, word >> 4, False, numbers)
                else:
                    self.scores.modify(where, queries, known, word >> 4, True, numbers)
                offsets, _ = self.softmax.maxima(self.scores.bases_of(where, queries, known, word >> 4))
                self.softmax.exponentials(offsets, self.softmax.rounded())
                self.scores.prepare(steps)
                while (word & 12) != 0:
                    while (word & 4) != 0:  # partial, or empty behind one that is not
                        word = self.step(where, queries, known, steps, word, q_at, k_at, k_phase, v_at, v_phase, True)
                        k_at, k_phase = self.shared.advance(k_at, k_phase)
                        v_at, v_phase = self.shared.advance(v_at, v_phase)
                    while (word & 12) == 4 * FULL:
                        word = self.step(where, queries, known, steps, word, q_at, k_at, k_phase, v_at, v_phase, False)
                        k_at, k_phase = self.shared.advance(k_at, k_phase)
                        v_at, v_phase = self.shared.advance(v_at, v_phase)
                cute.arch.mbarrier_wait(self.shared.full_v(v_at), v_phase)
                if cutlass.const_expr(c.paged):
                    self.clear_values(where, word, v_at)
                warpgroup.fence()
                self.multiply_values(v_at)
                warpgroup.wait_group(0)
                self.release(self.shared.empty_v(v_at))
                v_at, v_phase = self.shared.advance(v_at, v_phase)
            where = self.tiles.read(self.shared.record(q_at))  # kept over the main loop, its numbers would be spilled
            cute.arch.sync_warp()  # all lanes have read them; the warp's MMAs with these queries are done
            self.release(self.shared.empty_q(q_at))
            number = number + 1
            row = self.first_row()
            self.epilogue.store(where, [self.tiles.row_of(where, row), self.tiles.row_of(where, row + 8)])
            more = self.await_tile(number)
