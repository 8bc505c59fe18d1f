"""Attention with a function of scores and a mask for architectures without WGMMA, from sm_80 on: cp.async and mma.sync, after
FlashAttention-2 (Dao, 2023). Functions, masks, bounds, block masks, pages and the softmax are those of sm_90a's kernel.

A warp has 16 rows and all keys of a tile, so that rows lie within quads of lanes as they do with WGMMA. Every warp finds the tiles of keys
itself. All threads copy a tile's keys and values, 16 bytes each: values arrive while scores are computed, the next tile's keys while the
softmax and the output are. What lies behind the last key is zero in shared memory.
Shared memory: queries [head_dim / 64][rows][64], keys and values [head_dim / 64][keys][64], 16-byte pieces swizzled by their row.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ..artifact import Artifact
from ..attention_config import AttentionConfig, parameters
from ..graph import Graph
from .attention_epilogue import Epilogue
from .attention_instructions import opaque, packed
from .attention_kernel import AttentionKernel, attention_parameter_types
from .attention_key_tiles import EMPTY, FULL, NOTHING, PARTIAL
from .attention_scores import Scores
from .attention_softmax import OnlineSoftmax
from .build import compile_kernel, overlaps
from .mma_sync import load_matrices, multiply
from .numbers import pointer_at


class PortableAttention(AttentionKernel):
    def __init__(self, graph: Graph, config: AttentionConfig, values: dict[tuple[str, int, int], Any], dependent: bool):
        super().__init__(graph, config, values)
        self.dependent = dependent  # whether launches may overlap: from sm_90 on

    def place(self) -> None:
        c = self.config
        self.thread = cute.arch.thread_idx()[0]
        self.warp = cute.arch.make_warp_uniform(self.thread // 32)
        self.lane = self.thread % 32
        self.group = self.warp // 4
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        self.q_base = (base + 1023) & Int32(-1024)
        self.k_base = self.q_base + 2 * c.head_dim * c.rows
        self.v_base = self.k_base + 2 * c.head_dim * c.keys
        self.products = cute.make_rmem_tensor(c.keys // 2, Float32)
        self.output = cute.make_rmem_tensor(c.head_dim // 2, Float32)
        self.scores = Scores(self.functions, self.products, self.lane)
        self.softmax = OnlineSoftmax(self.functions, self.products, self.output)
        self.epilogue = Epilogue(self.functions, self.softmax, self.lane)

    # Copies.

    def load(self, where: Any, name: str, tile: Any) -> None:
        """Starts the copies of a tile's keys or values."""
        c = self.config
        vectors = c.head_dim // 8
        base, width = (self.k_base, self.get("head_dim")) if name == "k" else (self.v_base, self.get("head_dim_v"))
        column = self.thread % vectors * 8
        start = Int64(where.kv_head) * self.get(f"{name}_stride", 1) + Int64(column)
        for i in range(c.keys * vectors // c.block):
            row = self.thread // vectors + i * (c.block // vectors)
            key = tile * c.keys + row
            valid = (key < where.sk) & (column < width)
            page = where.batch
            if c.paged:
                size = self.get("page_size")
                number = cutlass.select_(valid, key // size, Int32(0))
                place = Int64(where.batch) * self.get("table_stride") + Int64(number)
                page = cute.make_tensor(pointer_at(self.get("table"), place, "i32", 4), cute.make_layout(1))[0]
                valid = valid & (page >= 0) & (page < self.get("pages"))
                key = key - number * size
            offset = start + Int64(page) * self.get(f"{name}_stride", 0) + Int64(key) * self.get(f"{name}_stride", 2)
            source = self.get(name).toint() + cutlass.select_(valid, offset, Int64(0)) * 2
            target = base + (column // 64) * (c.keys * 128) + row * 128 + ((column // 8 % 8) ^ (row % 8)) * 16
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                read_only_args=[target, source, cutlass.select_(valid, Int32(16), Int32(0))],
            )

    def commit(self) -> None:
        cute.arch.inline_ptx("cp.async.commit_group;")

    def await_copies(self) -> None:
        """All but the last group of copies have arrived, those of every thread."""
        cute.arch.inline_ptx("cp.async.wait_group 1;")
        cute.arch.sync_threads()

    # Products.

    def address(self, base: Any, rows: int, row: Any, piece: Any) -> Any:
        """Of 16 bytes of a row of shared memory."""
        return base + (piece // 8) * (rows * 128) + row * 128 + ((piece % 8) ^ (row % 8)) * 16

    def product(self, a: list[Any], b: list[Any], into: cute.Tensor, first: int) -> None:
        for i, result in enumerate(multiply(self.config.element, a, b, [into[first + i] for i in range(4)])):
            into[first + i] = result

    def multiply_keys(self, stage: Any = None) -> None:
        """S = Q.K^T of the warp's rows."""
        c = self.config
        matrix, inner = self.lane // 8, self.lane % 8
        self.products.fill(0.0)
        for k in range(c.head_dim // 16):
            a = load_matrices(self.address(self.q_base, c.rows, self.warp * 16 + matrix % 2 * 8 + inner, 2 * k + matrix // 2), False)
            for n in range(c.keys // 16):
                b = load_matrices(self.address(self.k_base, c.keys, 16 * n + matrix // 2 * 8 + inner, 2 * k + matrix % 2), False)
                for half in range(2):
                    self.product(a, b[2 * half : 2 * half + 2], self.products, 4 * (2 * n + half))

    def multiply_values(self, words: list[Any]) -> None:
        """O += P.V; ``words``: the probabilities, rounded, in pairs."""
        c = self.config
        matrix, inner = self.lane // 8, self.lane % 8
        for k in range(c.keys // 16):
            for n in range(c.head_dim // 16):
                b = load_matrices(self.address(self.v_base, c.keys, 16 * k + matrix % 2 * 8 + inner, 2 * n + matrix // 2), True)
                for half in range(2):
                    self.product(words[4 * k : 4 * k + 4], b[2 * half : 2 * half + 2], self.output, 4 * (2 * n + half))

    # A tile of keys.

    @cute.jit
    def step(self, where: Any, queries: Any, known: Any, word: Int32, following: Int32):
        """Of a tile whose keys are on their way, and the tile after it."""
        self.load(where, "v", word >> 2)
        self.commit()
        self.await_copies()
        self.multiply_keys()
        cute.arch.sync_threads()
        if following != NOTHING:
            self.load(where, "k", following >> 2)
        self.commit()
        if (word & 1) == PARTIAL:
            self.scores.modify(where, queries, known, word >> 2, True)
        else:
            self.scores.modify(where, queries, known, word >> 2, False)
        raised = self.softmax.run()
        words = [packed([self.products[2 * i], self.products[2 * i + 1]], self.element) for i in range(self.config.keys // 4)]
        self.softmax.rescale_output(raised)
        self.await_copies()
        self.multiply_values(words)
        cute.arch.sync_threads()

    @cute.jit
    def attend(self):
        c = self.config
        tile = cute.arch.block_idx()[0]
        while tile < self.total:
            where = self.tiles.locate(tile)
            row = self.warp * 16 + self.lane // 4
            rows = [self.tiles.row_of(where, row), self.tiles.row_of(where, row + 8)]
            queries = [(query + where.first, head) for query, head in rows]
            known = self.functions.known_of_rows(where, queries)
            self.softmax.start()
            self.fetch(where, self.q_base)
            first, end = self.tiles.keys_of(where)
            pending = Int32(NOTHING)  # 4 * tile + kind
            begin, stop, wanted = first, end, Int32(0)
            some, count = Int32(0), Int32(0)
            if cutlass.const_expr(c.listed):
                some, count = self.key_tiles.list_counts(where)
                stop, wanted = count * c.listed_k, Int32(1)
            while wanted < 2:
                begin = Int32(0) if cutlass.const_expr(c.listed) else first
                while begin < stop:
                    chosen, word = self.candidates(where, wanted, begin, end, some, count)
                    while chosen != 0:
                        lowest = lowest_bit(chosen)
                        chosen = chosen & (chosen - 1)
                        following = cute.arch.shuffle_sync(word, lowest)
                        if pending == NOTHING:
                            self.load(where, "k", following >> 2)
                            self.commit()
                        else:
                            self.step(where, queries, known, pending, following)
                        pending = following
                    begin = begin + 32
                wanted = wanted + 1
            if pending != NOTHING:
                self.step(where, queries, known, pending, Int32(NOTHING))
            where, row = self.tiles.locate(opaque(tile)), opaque(row)  # kept over the loop, its numbers would be spilled
            self.epilogue.store(where, [self.tiles.row_of(where, row), self.tiles.row_of(where, row + 8)])
            cute.arch.inline_ptx("cp.async.wait_all;")
            cute.arch.sync_threads()
            tile = tile + cute.arch.grid_dim()[0]

    def candidates(self, where: Any, wanted: Any, begin: Any, end: Any, some: Any, count: Any) -> tuple[Any, Any]:
        """Of 32 tiles, one for each lane: bits of those of the wanted kind, and the lane's word."""
        number = begin + self.lane
        if self.config.listed:
            number, kind = self.key_tiles.listed_tile(where, number, some, count)
            chosen = kind != EMPTY
        else:
            kind = self.key_tiles.kind_of(where, number, end)
            chosen = kind == wanted + PARTIAL
        word = number * 4 + cutlass.select_(kind == FULL, Int32(FULL), Int32(PARTIAL))
        return cute.arch.vote_ballot_sync(chosen), word

    @cute.jit
    def run(self):
        self.place()
        if cutlass.const_expr(self.dependent):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        self.total = self.tiles.count()
        self.attend()


def lowest_bit(bits: Any) -> Any:
    """The number of the lowest bit that is set."""
    below = cute.arch.popc((bits ^ (bits - 1)) & 0x7FFFFFFF)
    return cutlass.select_((bits & 0x7FFFFFFF) == 0, Int32(31), below - 1)


def build(graph: Graph, config: dict[str, Any], *, name: str, architecture: str) -> Artifact:
    c = AttentionConfig(**config)

    def body(values: list[Any]) -> None:
        PortableAttention(graph, c, dict(zip(parameters(graph, c), values, strict=True)), overlaps(architecture)).run()

    return compile_kernel(
        body, attention_parameter_types(graph, c), name=name, architecture=architecture, block=c.block, shared_bytes=c.shared_bytes
    )
