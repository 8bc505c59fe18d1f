"""Attention with a function of scores and a mask for sm_90a: TMA + WGMMA, warp specialised. After FlashAttention-3 (Shah et
al., 2024); the function and the mask are FlexAttention's (Dong et al., 2024).

Warp roles. Warp 0 of warpgroup 0 is the producer: it finds out which tiles of keys a tile of queries visits, loads their keys and values,
and writes each tile's number and kind beside its keys. The other warpgroups are consumers, of 64 rows each, which load their queries
themselves.
Tiles of keys. Of a block mask, those that it names. Otherwise all: the producer's lanes look at 32 at once, and bounds of the mask's
positions (intervals.py) tell which need not be visited, and which are seen in full. Partial tiles come first, then full ones, without the
mask.
Tiles of queries. CTAs stay and take tiles by turns; with masks and many keys, where tiles differ, each tile has a CTA of its own.
Main loop. A step computes the scores of a tile and, in the same batch of MMAs, the output of the tile before, whose probabilities are in
registers; the function of scores and the softmax run while the tensor cores work for the other warpgroups.
Pipelines. k and v: a ring of `stages` tiles each, full by TMA's bytes, empty by an arrival of each consumer warp.
Registers. A thread has two rows of scores, r and r + 8, and two neighbouring columns of each eight: element 4 j + 2 row + e is in column
8 j + 2 (lane % 4) + e. Values of the function that depend on the row alone are computed once for a tile of queries, those that depend on
the column alone once for both rows.
Packed heads. With few queries, rows are the query heads of a KV head next to each other, query after query: they share loads of K and V.
Paged. Keys lie in pages of a cache, in boxes of rows that a page holds one after the other; boxes behind the end are zeros, values behind
the end within a box are set to zero before they are multiplied, since 0 * NaN is NaN.
Shared memory: queries [head_dim / 64][rows][64], then stages of keys, then of values, [head_dim / 64][keys][64] each, all with the
swizzle of 128 bytes.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import T

from ..artifact import Artifact
from ..attention_config import AttentionConfig, parameters
from ..graph import BOOL, F32, I32, Graph, Node
from ..intervals import Arithmetic, Bounds, Intervals
from .build import compile_kernel
from .numbers import STORAGES, Evaluator, as_storage, cast, constant, from_storage, load_vector, pointer_at, rounded, store_vector

_LOG2_E = math.log2(math.e)
_INFINITY = float("inf")
_RAISE = 8.0  # the maximum that exponentials are relative to is raised where it would grow by a factor of 2^8
_PARTIAL, _FULL, _LAST = 0, 1, 2  # of a tile's word: 4 * tile + last + kind
_NOTHING = -1  # the word of a tile of queries that sees no keys


def _approximate(instruction: str, x: Any) -> Float32:
    options = {"has_side_effects": False, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    return Float32(llvm.inline_asm(T.f32(), [Float32(x).ir_value()], f"{instruction}.f32 $0, $1;", "=f,f", **options))


def exp2(x: Any) -> Float32:
    return _approximate("ex2.approx.ftz", x)


def opaque(x: Any) -> Int32:
    """The same number, which the compiler takes for another."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


class Grid:
    """A value of the function for a thread's elements: of ``rows`` it has one for both of them or one each, of ``columns`` likewise.
    Values follow each other column by column, of each column row by row."""

    def __init__(self, values: list[Any], rows: bool, columns: bool):
        self.values, self.rows, self.columns = values, rows, columns

    def at(self, row: int, column: int) -> Any:
        return self.values[(column if self.columns else 0) * (2 if self.rows else 1) + (row if self.rows else 0)]


class Columns:
    """Positions of keys: ``first`` and some more, all of which float32 holds."""

    def __init__(self, first: Any, offsets: list[int]):
        self.first, self.offsets = first, offsets

    def __len__(self) -> int:
        return len(self.offsets)

    def position(self, i: int) -> Any:
        return self.first + self.offsets[i]


class GridEvaluator(Evaluator):
    """A graph's nodes as Grids; ``leaf`` gives those of values, ``gather`` loads of a captured tensor at indices. Floating-point values
    that are linear in the key's position are a product and a sum of each element: a number of the row times the column, plus another."""

    def __init__(self, graph: Graph, of_columns: list[bool], columns: Columns | None, leaf: Any, gather: Any):
        super().__init__(graph, 0, None, None)
        self.of_columns, self.columns, self.leaf_of, self.gather = of_columns, columns, leaf, gather
        self.lines: dict[int, tuple[Grid, Grid | None] | None] = {}

    def value(self, number: int) -> Grid:
        if number not in self.known:
            self.known[number] = self._grid(number, self.graph.nodes[number])
        return self.known[number]

    def _grid(self, number: int, node: Node) -> Grid:
        if node.op == "constant":
            return Grid([constant(node.attrs[0], node.dtype)], False, False)
        if node.op == "value":
            return self.leaf_of(node)
        line = self._line(number) if node.dtype == F32 and self.of_columns[number] else None
        if line is not None:
            base, step = line
            offsets = Grid([Float32(offset) for offset in self.columns.offsets], False, True)
            return self._each([base, step, offsets], lambda x: x[0] + x[1] * x[2])
        operands = [self.value(i) for i in node.inputs]
        types = [self.graph.nodes[i].dtype for i in node.inputs]
        if node.op == "round":
            return Grid(rounded(operands[0].values, types[0], node.dtype, node.attrs[0]), operands[0].rows, operands[0].columns)
        return self._each(operands, lambda x: self.gather(node, x) if node.op == "gather" else self._number(node, types, x))

    def _each(self, operands: list[Grid], function: Any) -> Grid:
        rows, columns = any(x.rows for x in operands), any(x.columns for x in operands)
        values = [
            function([x.at(row, column) for x in operands])
            for column in range(len(self.columns) if columns else 1)
            for row in range(2 if rows else 1)
        ]
        return Grid(values, rows, columns)

    def _line(self, number: int) -> tuple[Grid, Grid | None] | None:
        """The value at the first column, and what each further column adds, or None where that is nothing; None where it is no line."""
        if number not in self.lines:
            self.lines[number] = self._new_line(number, self.graph.nodes[number])
        return self.lines[number]

    def _new_line(self, number: int, node: Node) -> tuple[Grid, Grid | None] | None:
        if not self.of_columns[number]:
            return self.value(number), None
        if node.op == "value" and node.attrs[0] == "kv":
            return Grid([cast(self.columns.first, I32, node.dtype)], False, False), Grid([constant(1, node.dtype)], False, False)
        if node.op not in ("add", "sub", "mul", "neg", "cast") or node.dtype not in (F32, I32):
            return None
        lines = [self._line(i) for i in node.inputs]
        if any(x is None for x in lines):
            return None
        types = [self.graph.nodes[i].dtype for i in node.inputs]
        if node.op == "mul":
            if node.dtype == I32 or all(step is not None for _, step in lines):
                return None
            (base, step), (factor, _) = lines if lines[0][1] is not None else lines[::-1]
            return self._each([base, factor], lambda x: x[0] * x[1]), self._each([step, factor], lambda x: x[0] * x[1])
        if BOOL in types:
            return None
        bases = self._each([base for base, _ in lines], lambda x: self._number(node, types, x))
        steps = [step for _, step in lines]
        if None in steps:  # of add and sub
            one = steps[0] if steps[1] is None else self._each([steps[1]], lambda x: -x[0] if node.op == "sub" else x[0])
            return bases, one
        return bases, self._each(steps, lambda x: self._number(node, types, x))

    def _number(self, node: Node, types: list[str], x: list[Any]) -> Any:
        if node.op == "tanh":
            return _approximate("tanh.approx", x[0])
        if node.op == "exp":
            return exp2(x[0] * Float32(_LOG2_E))
        if node.op == "exp2":
            return exp2(x[0])
        return self._scalar(node, types, x)


_BOUNDS = Arithmetic(
    least=lambda x, y: cutlass.select_(x < y, x, y),
    most=lambda x, y: cutlass.select_(x > y, x, y),
    choose=cutlass.select_,
    integer=Int64,
    truth=Boolean,
    both=lambda x, y: x & y,
    either=lambda x, y: x | y,
    negate=lambda x: x ^ Boolean(True),
)


class _Place:
    """Where a tile of queries is, as numbers of the kernel."""

    def __init__(self, **numbers: Any):
        self.__dict__.update(numbers)


class _Attention:
    def __init__(self, graph: Graph, config: AttentionConfig, values: dict[tuple[str, int, int], Any]):
        self.graph, self.config, self.values = graph, config, values
        self.element = STORAGES[config.element]
        self.panels = config.head_dim // 64
        self.score = graph.outputs[0].node if config.scores else -1
        self.mask = graph.outputs[-1].node if config.masks else -1
        self.of_columns = self._depends("kv", "score")
        self.of_rows = self._depends("q", *(["h"] if config.packed else []))

    def _depends(self, *names: str) -> list[bool]:
        result: list[bool] = []
        for node in self.graph.nodes:
            result.append(node.op == "value" and node.attrs[0] in names or any(result[i] for i in node.inputs))
        return result

    def get(self, name: str, i: int = 0, mode: int = 0) -> Any:
        return self.values[name, i, mode]

    # Shared memory and barriers.

    def place(self) -> None:
        c = self.config
        self.thread = cute.arch.thread_idx()[0]
        self.warp = cute.arch.make_warp_uniform(self.thread // 32)
        self.lane = self.thread % 32
        self.group = cute.arch.make_warp_uniform(self.thread // 128) - 1  # the consumer warpgroup
        self.barriers = cute.arch.alloc_smem(Int64, 4 * c.stages, alignment=8)  # full_k, empty_k, full_v, empty_v
        self.words = cute.arch.alloc_smem(Int32, c.stages, alignment=4)
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        base = (base + 1023) & Int32(-1024)
        self.q_bytes, self.tile_bytes = 2 * c.head_dim * c.rows, 2 * c.head_dim * c.keys
        self.q_base = base
        self.k_base = base + self.q_bytes
        self.v_base = base + (self.q_bytes + c.stages * self.tile_bytes)

    def full_k(self, stage: Any) -> Any:
        return self.barriers + stage

    def empty_k(self, stage: Any) -> Any:
        return self.barriers + (stage + self.config.stages)

    def full_v(self, stage: Any) -> Any:
        return self.barriers + (stage + 2 * self.config.stages)

    def empty_v(self, stage: Any) -> Any:
        return self.barriers + (stage + 3 * self.config.stages)

    def word_of(self, stage: Any) -> cute.Tensor:
        return cute.make_tensor(self.words + stage, cute.make_layout(1))

    def write_word(self, stage: Any, word: Any) -> None:
        self.word_of(stage)[0] = word

    # Tiles of queries.

    def locate(self, tile: Any) -> _Place:
        """Sections of heads, whose keys and values the L2 cache holds, follow each other. In a section the last queries of all heads come
        first: with a causal mask they have the most keys."""
        heads, batch, tiles = self.get("walk_heads"), self.get("batch"), self.get("tiles")
        size = self.get("section")
        section = tile // (size * tiles)
        within = tile - section * (size * tiles)
        size = cutlass.min(size, heads * batch * self.get("parts") - section * size)
        block = within // size
        number = section * self.get("section") + (within - block * size)
        rest = number // heads
        head = number - rest * heads
        b, part = rest, Int32(0)
        if self.config.split:
            part = rest // batch
            b = rest - part * batch
        block = tiles - 1 - block
        sq, sk = self.get("sq"), self.get("sk")
        if self.config.paged:
            length = cute.make_tensor(pointer_at(self.get("lengths"), b, "i32", 4), cute.make_layout(1))[0]
            most = self.get("table_columns") * self.get("page_size")
            sk = cutlass.max(cutlass.min(length, most), Int32(0))
        group = self.get("group")
        kv_head = head if self.config.packed else head // group
        return _Place(
            head=head, batch=b, block=block, part=part, sk=sk, sq=sq, kv_head=kv_head, first=sk - sq if self.config.paged else Int32(0)
        )

    def row_of(self, where: _Place, row: Any) -> tuple[Any, Any]:
        """The query and the query head of a row of the tile."""
        row = where.block * self.config.rows + row
        if not self.config.packed:
            return row, where.head
        group = self.get("group")
        query = row // group
        return query, where.head * group + (row - query * group)

    def keys_of(self, where: _Place) -> tuple[Any, Any]:
        """The first tile of keys of the part, and the one behind its last."""
        tiles = (where.sk + (self.config.keys - 1)) // self.config.keys
        if not self.config.split:
            return Int32(0), tiles
        parts = self.get("parts")
        return tiles * where.part // parts, tiles * (where.part + 1) // parts

    # The producer.

    def queries_of(self, where: _Place) -> tuple[Any, Any]:
        """The first and last query of a tile, as positions."""
        c = self.config
        begin, end = where.block * c.rows, where.block * c.rows + (c.rows - 1)
        if c.packed:
            group = self.get("group")
            begin, end = begin // group, end // group
        return begin + where.first, cutlass.min(end, where.sq - 1) + where.first

    def kind_of(self, where: _Place, tile: Any, end: Any) -> Any:
        """0: not visited, 1: partial, 2: full."""
        c = self.config
        first = tile * c.keys
        inside = first + c.keys <= where.sk
        valid = tile < end
        if self.mask < 0 or c.listed:
            return cutlass.select_(valid, cutlass.select_(inside, Int32(2), Int32(1)), Int32(0))
        begin, last = self.queries_of(where)
        bounds = {
            "q": Bounds(begin.to(Int64), last.to(Int64), 1 << 24),
            "kv": Bounds(first.to(Int64), cutlass.min(first + (c.keys - 1), where.sk - 1).to(Int64), 1 << 24),
        }
        numbers = self.evaluator(where, None, None, None)

        def exact(number: int) -> Bounds | None:
            node = self.graph.nodes[number]
            if self.of_columns[number] or self.of_rows[number] or node.op == "constant":
                return None
            value = numbers.value(number).values[0]
            return Bounds(value, value) if node.dtype == BOOL else Bounds(value.to(Int64), value.to(Int64), 1 << 31)

        if c.packed:
            group = self.get("group")
            head = (where.head * group).to(Int64)
            bounds["h"] = Bounds(head, head + (group - 1).to(Int64), 1 << 24)
        found = Intervals(self.graph, _BOUNDS, bounds.get, exact).of(self.mask)
        if found is None:
            return cutlass.select_(valid, Int32(1), Int32(0))
        kind = cutlass.select_(found.low & inside, Int32(2), Int32(1))
        return cutlass.select_(valid & found.high, kind, Int32(0))

    def listed_tile(self, where: _Place, wanted: Any, place: Any, count: Any) -> tuple[Any, Any]:
        """Of a block mask's list, the tile of keys at a place, and its kind as above."""
        c = self.config
        entry = place if c.listed_k == 1 else place // c.listed_k
        start = Int64(self.list_row(where)) * Int64(self.get("list_length"))
        index = self.listed(wanted, "index", start + Int64(cutlass.max(cutlass.min(entry, count - 1), Int32(0))))
        tiles = (where.sk + (c.keys - 1)) // c.keys
        tile = index if c.listed_k == 1 else index * c.listed_k + (place - entry * c.listed_k)
        valid = (entry < count) & (index >= 0) & (index < tiles) & (tile < tiles)
        kind = cutlass.select_((wanted == 1) & (tile * c.keys + c.keys <= where.sk), Int32(2), Int32(1))
        return tile, cutlass.select_(valid, kind, Int32(0))

    def listed(self, wanted: Any, what: str, place: Any) -> Any:
        """A number of the list of partial or of full tiles."""
        address = cutlass.select_(wanted == 1, self.get(f"all_{what}").toint(), self.get(f"some_{what}").toint()) + place * 4
        return cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(1))[0]

    def list_row(self, where: _Place) -> Any:
        """The row of a block mask's lists: of the batch, the head and the block of queries."""
        block = where.block if self.config.listed_q == 1 else where.block // self.config.listed_q
        return where.batch * self.get("list_batch") + where.head * self.get("list_head") + cutlass.min(block, self.get("list_rows") - 1)

    def list_count(self, where: _Place, wanted: Any) -> Any:
        count = self.listed(wanted, "count", Int64(self.list_row(where)))
        return cutlass.max(cutlass.min(count, self.get("list_length")), Int32(0))

    @cute.jit
    def produce(self):
        c = self.config
        k_at, k_phase, v_at, v_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        tile = cute.arch.block_idx()[0]
        while tile < self.total:
            where = self.locate(tile)
            first, end = self.keys_of(where)
            pending = Int32(_NOTHING)
            wanted = Int32(0)
            while wanted < 2:
                begin, stop = first, end
                count = Int32(0)
                if cutlass.const_expr(c.listed):
                    count = self.list_count(where, wanted)
                    begin, stop = Int32(0), count * c.listed_k
                while begin < stop:
                    number = begin + self.lane
                    kind = Int32(0)
                    if cutlass.const_expr(c.listed):
                        number, kind = self.listed_tile(where, wanted, number, count)
                        kind = cutlass.select_(kind != 0, wanted + 1, Int32(0)) | (kind << 8)
                    else:
                        kind = self.kind_of(where, number, end)
                        kind = kind | (kind << 8)
                    word = number * 4 + cutlass.select_((kind >> 8) == 2, Int32(_FULL), Int32(_PARTIAL))
                    chosen = cute.arch.vote_ballot_sync((kind & 255) == wanted + 1)
                    while chosen != 0:
                        lowest = cute.arch.popc((chosen ^ (chosen - 1)) & 0x7FFFFFFF)
                        lowest = cutlass.select_((chosen & 0x7FFFFFFF) == 0, Int32(31), lowest - 1)
                        chosen = chosen & (chosen - 1)
                        if pending != _NOTHING:
                            self.load(where, pending, k_at, k_phase, v_at, v_phase)
                            k_at, k_phase = self.advance(k_at, k_phase)
                            v_at, v_phase = self.advance(v_at, v_phase)
                        pending = cute.arch.shuffle_sync(word, lowest)
                    begin = begin + 32
                wanted = wanted + 1
            if pending != _NOTHING:
                self.load(where, pending | _LAST, k_at, k_phase, v_at, v_phase)
                v_at, v_phase = self.advance(v_at, v_phase)
            else:
                cute.arch.mbarrier_wait(self.empty_k(k_at), k_phase ^ 1)
                if self.lane == 0:
                    self.write_word(k_at, Int32(_NOTHING))
                    cute.arch.mbarrier_arrive(self.full_k(k_at))
                cute.arch.sync_warp()
            k_at, k_phase = self.advance(k_at, k_phase)
            tile = tile + cute.arch.grid_dim()[0]

    def advance(self, at: Any, phase: Any) -> tuple[Any, Any]:
        wraps = at == self.config.stages - 1
        return cutlass.select_(wraps, Int32(0), at + 1), cutlass.select_(wraps, phase ^ 1, phase)

    @cute.jit
    def load(self, where: Any, word: Int32, k_at: Int32, k_phase: Int32, v_at: Int32, v_phase: Int32):
        """A tile's keys and values, by the warp."""
        c = self.config
        tile = word >> 2
        boxes = c.keys // c.box
        box = self.lane * (c.box * 128) if boxes > 1 else 0  # in bytes
        row = tile * c.keys
        page = where.batch
        if cutlass.const_expr(c.paged):
            row = tile * c.keys + cutlass.min(self.lane, Int32(boxes - 1)) * c.box
            size = self.get("page_size")
            column = row // size
            needed = row < where.sk
            place = Int64(where.batch) * self.get("table_stride") + Int64(cutlass.select_(needed, column, Int32(0)))
            page = cute.make_tensor(pointer_at(self.get("table"), place, "i32", 4), cute.make_layout(1))[0]
            absent = (needed ^ Boolean(True)) | (page < 0) | (page >= self.get("pages"))
            page = cutlass.select_(absent, self.get("pages"), page)  # behind the last: zeros
            row = row - column * size
        cute.arch.mbarrier_wait(self.empty_k(k_at), k_phase ^ 1)
        if self.lane == 0:
            self.write_word(k_at, word)
            cute.arch.mbarrier_arrive_and_expect_tx(self.full_k(k_at), self.tile_bytes)
        cute.arch.sync_warp()
        if self.lane < boxes:
            self.copy("k_map", self.k_base + k_at * self.tile_bytes + box, c.keys, row, where.kv_head, page, self.full_k(k_at))
        cute.arch.mbarrier_wait(self.empty_v(v_at), v_phase ^ 1)
        if self.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full_v(v_at), self.tile_bytes)
        cute.arch.sync_warp()
        if self.lane < boxes:
            self.copy("v_map", self.v_base + v_at * self.tile_bytes + box, c.keys, row, where.kv_head, page, self.full_v(v_at))
        cute.arch.sync_warp()

    def copy(self, name: str, base: Any, rows: int, row: Any, head: Any, page: Any, barrier: Any) -> None:
        """A box of each 64 columns, by a lane."""
        for panel in range(self.panels):
            target = base + panel * (rows * 128)
            cute.arch.inline_ptx(
                "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}}], [{$r6}];",
                read_only_args=[target, self.get(name), Int32(64 * panel), row, head, page, barrier.toint()],
            )

    # The consumers: operands.

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
        queries = self.k_major(self.q_base + self.group * (64 * 128), 64, c.rows, 1)
        self.tSrQ = scores.make_fragment_A(scores.partition_A(queries))  # (MMA,MMA_M,MMA_K,PIPE)
        self.tSrK = scores.make_fragment_B(scores.partition_B(self.k_major(self.k_base, c.keys, c.keys, c.stages)))
        self.tOrV = output.make_fragment_B(output.partition_B(self.mn_major(self.v_base, c.keys, c.stages)))
        self.scores = scores.make_fragment_C(scores.partition_shape_C((64, c.keys)))
        self.output = output.make_fragment_C(output.partition_shape_C((64, c.head_dim)))
        self.probabilities = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, c.keys // 16)), self.element)
        self.row_max = cute.make_rmem_tensor(2, Float32)  # in units of log2
        self.row_sum = cute.make_rmem_tensor(2, Float32)
        self.rescale = cute.make_rmem_tensor(2, Float32)

    def multiply_keys(self, stage: Any) -> None:
        mma = cute.make_tiled_mma(self.op_scores)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(self.config.head_dim // 16):
            cute.gemm(mma, self.scores, self.tSrQ[None, None, k, 0], self.tSrK[None, None, k, stage], self.scores)
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

    # The consumers: queries.

    def fetch(self, tile: Any) -> None:
        """Starts copies of a warpgroup's rows of a tile's queries: thread t has the vectors t, t + 128, ..."""
        c = self.config
        vectors = c.head_dim // 8
        inside = tile < self.total
        where = self.locate(cutlass.select_(inside, tile, Int32(0)))
        column = self.thread % vectors * 8
        start = Int64(where.batch) * self.get("q_stride", 0) + Int64(column)
        inside = inside & (column < self.get("head_dim"))
        for i in range(64 * vectors // 128):
            row = self.group * 64 + self.thread % 128 // vectors + i * (128 // vectors)
            query, head = self.row_of(where, row)
            valid = inside & (query < where.sq)
            offset = start + Int64(head) * self.get("q_stride", 1) + Int64(query) * self.get("q_stride", 2)
            source = self.get("q").toint() + cutlass.select_(valid, offset, Int64(0)) * 2
            target = self.q_base + (column // 64) * (c.rows * 128) + row * 128 + ((column // 8 % 8) ^ (row % 8)) * 16
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                read_only_args=[target, source, cutlass.select_(valid, Int32(16), Int32(0))],
            )

    def await_queries(self) -> None:
        """The copies are done, for the MMAs of the warpgroup."""
        cute.arch.inline_ptx("cp.async.wait_all;")
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=8 + self.group, number_of_threads=128)

    # The consumers: the function of scores, the mask and the softmax.

    def evaluator(self, where: _Place, queries: Any, columns: Columns | None, scores: Any) -> GridEvaluator:
        """``queries``: of the two rows: position and head; ``scores``: column by column, of each column row by row."""

        def leaf(node: Node) -> Grid:
            name = node.attrs[0]
            if name == "score":
                return Grid(scores, True, True)
            if name == "b":
                grid = Grid([where.batch], False, False)
            elif name == "h":
                grid = Grid([head for _, head in queries], True, False) if self.config.packed else Grid([where.head], False, False)
            elif name == "q":
                grid = Grid([position for position, _ in queries], True, False)
            else:
                grid = Grid([columns.position(i) for i in range(len(columns))], False, True)
            return Grid([cast(x, I32, node.dtype) for x in grid.values], grid.rows, grid.columns)

        return GridEvaluator(self.graph, self.of_columns, columns, leaf, self.gather)

    def gather(self, node: Node, indices: list[Any]) -> Any:
        """A number of a captured tensor: indices count from the end where they are negative, and are clamped to what there is."""
        i = node.attrs[0]
        storage = self.graph.inputs[i].storage
        place = Int64(0)
        for mode, index in enumerate(indices):
            size = self.get("captured_size", i, mode)
            index = index.to(Int32)
            index = cutlass.select_(index < 0, index + size, index)
            index = cutlass.min(cutlass.max(index, Int32(0)), size - 1)
            place = place + Int64(index) * self.get("captured_stride", i, mode)
        return from_storage(load_vector(self.get("captured", i), place, 1, storage), 1, node.dtype, storage)[0]

    def known_of_rows(self, where: _Place, queries: Any) -> dict[int, Grid]:
        """Values that do not depend on the column, and that others need which do."""
        evaluator = self.evaluator(where, queries, None, None)
        needed = {i for number, node in enumerate(self.graph.nodes) if self.of_columns[number] for i in node.inputs}
        for number in sorted(needed):
            if not self.of_columns[number] and self.graph.nodes[number].op != "constant":
                evaluator.value(number)
        return evaluator.known

    def modify(self, where: _Place, queries: Any, known: dict[int, Grid], word: Any, masked: bool) -> None:
        """Scores are what the softmax takes; of a partial tile, -inf where a key is not seen. By two columns: values live shortly."""
        c = self.config
        if self.score < 0 and not masked:
            return
        first = (word >> 2) * c.keys + (self.lane % 4) * 2
        scale = self.get("scale")
        for i in range(0, c.keys // 2, 4):
            columns = Columns(first, [2 * i, 2 * i + 1])
            scores = [self.scores[i + e] * scale for e in (0, 2, 1, 3)] if self.score >= 0 else None
            evaluator = self.evaluator(where, queries, columns, scores)
            evaluator.known.update(known)
            grid = evaluator.value(self.score) if self.score >= 0 else None
            seen = evaluator.value(self.mask) if masked and self.mask >= 0 else None
            for column in range(2):
                inside = columns.position(column) < where.sk if masked else None
                for row in range(2):
                    e = i + 2 * row + column
                    x = self.scores[e] if grid is None else grid.at(row, column)
                    if masked:
                        x = cutlass.select_(inside if seen is None else inside & seen.at(row, column), x, Float32(-_INFINITY))
                    self.scores[e] = x

    def softmax(self) -> Any:
        """Scores become exponentials, which are added to the sums; whether the output must be rescaled."""
        factor = Float32(_LOG2_E) if self.score >= 0 else self.get("scale") * Float32(_LOG2_E)
        count = self.config.keys // 2
        raised = Boolean(False)
        for row in range(2):
            chains: list[Any] = [None, None]
            for n, i in enumerate(range(0, count, 4)):
                pair = cute.arch.fmax(self.scores[i + 2 * row], self.scores[i + 2 * row + 1])
                chains[n % 2] = pair if chains[n % 2] is None else cute.arch.fmax(chains[n % 2], pair)
            most = cute.arch.fmax(chains[0], chains[1])
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1))
            most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=2)) * factor
            before = self.row_max[row]
            grows = most > before + Float32(_RAISE)
            after = cutlass.select_(grows, most, before)
            rescale = cutlass.select_(grows, exp2(before - after), Float32(1.0))
            self.row_max[row] = after
            self.rescale[row] = rescale
            raised = raised | grows
            offset = cutlass.select_(after == Float32(-_INFINITY), Float32(0.0), after)
            sums: list[Any] = [None, None]
            for i in range(0, count, 4):
                for e in range(2):
                    x = exp2(self.scores[i + 2 * row + e] * factor - offset)
                    self.scores[i + 2 * row + e] = x
                    sums[e] = x if sums[e] is None else sums[e] + x
            self.row_sum[row] = self.row_sum[row] * rescale + (sums[0] + sums[1])
        return cute.arch.vote_any_sync(raised)

    def round(self) -> None:
        words = cute.recast_tensor(self.probabilities, Int32)
        for i in range(self.config.keys // 4):
            words[i] = packed([self.scores[2 * i], self.scores[2 * i + 1]], self.element)

    @cute.jit
    def rescale_output(self, raised: Boolean):
        if raised:
            self.multiply_output()

    def multiply_output(self) -> None:
        for i in range(self.config.head_dim // 2):
            self.output[i] = self.output[i] * self.rescale[i // 2 % 2]

    @cute.jit
    def clear_values(self, where: Any, word: Int32, stage: Int32):
        """Values behind the end of a sequence, which a page may hold anything in, become zeros: by every warpgroup, before its own MMAs."""
        c = self.config
        begin = where.sk - (word >> 2) * c.keys
        if begin < c.keys:
            vectors = (c.keys - begin) * 8
            for panel in cutlass.range_constexpr(self.panels):
                base = self.v_base + stage * self.tile_bytes + panel * (c.keys * 128) + begin * 128
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
    def following(self, word: Int32, k_at: Int32, k_phase: Int32):
        """The word of the next tile of keys, when it has arrived."""
        result = Int32(_NOTHING)
        if (word & _LAST) == 0:
            cute.arch.mbarrier_wait(self.full_k(k_at), k_phase)
            result = self.word_of(k_at)[0]
        return cute.arch.make_warp_uniform(result)

    def step(
        self, where: _Place, queries: Any, known: Any, word: Any, before: Any, k_at: Any, v_at: Any, v_phase: Any, masked: bool
    ) -> None:
        """The scores of a tile and the output of the one before."""
        cute.arch.mbarrier_wait(self.full_v(v_at), v_phase)
        if self.config.paged:
            self.clear_values(where, before, v_at)
        self.wait_for_turn()
        warpgroup.fence()
        self.multiply_keys(k_at)
        self.multiply_values(v_at)
        self.pass_turn()
        warpgroup.wait_group(1)
        self.release(self.empty_k(k_at))
        self.modify(where, queries, known, word, masked)
        raised = self.softmax()
        warpgroup.wait_group(0)
        self.release(self.empty_v(v_at))
        self.round()
        self.rescale_output(raised)

    @cute.jit
    def consume(self):
        c = self.config
        self.operands()
        k_at, k_phase, v_at, v_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(c.consumers > 1):
            if self.group == c.consumers - 1:
                self.pass_turn()
        tile = cute.arch.block_idx()[0]
        self.fetch(tile)
        self.await_queries()
        while tile < self.total:
            where = self.locate(tile)
            row = self.group * 64 + (self.warp % 4) * 16 + self.lane // 4
            rows = [self.row_of(where, row), self.row_of(where, row + 8)]
            queries = [(query + where.first, head) for query, head in rows]
            known = self.known_of_rows(where, queries)
            self.output.fill(0.0)
            self.row_max.fill(-_INFINITY)
            self.row_sum.fill(0.0)
            cute.arch.mbarrier_wait(self.full_k(k_at), k_phase)
            word = cute.arch.make_warp_uniform(self.word_of(k_at)[0])
            if word == _NOTHING:
                self.release(self.empty_k(k_at))
                k_at, k_phase = self.advance(k_at, k_phase)
                self.fetch(tile + cute.arch.grid_dim()[0])
            else:
                self.wait_for_turn()
                warpgroup.fence()
                self.multiply_keys(k_at)
                self.pass_turn()
                warpgroup.wait_group(0)
                self.release(self.empty_k(k_at))
                k_at, k_phase = self.advance(k_at, k_phase)
                if (word & 1) == _PARTIAL:
                    self.modify(where, queries, known, word, True)
                else:
                    self.modify(where, queries, known, word, False)
                self.softmax()
                self.round()
                before = word
                word = self.following(before, k_at, k_phase)
                while word != _NOTHING:
                    while (word & -2147483647) == _PARTIAL:
                        self.step(where, queries, known, word, before, k_at, v_at, v_phase, True)
                        k_at, k_phase = self.advance(k_at, k_phase)
                        v_at, v_phase = self.advance(v_at, v_phase)
                        before = word
                        word = self.following(before, k_at, k_phase)
                    while (word & -2147483647) == _FULL:
                        self.step(where, queries, known, word, before, k_at, v_at, v_phase, False)
                        k_at, k_phase = self.advance(k_at, k_phase)
                        v_at, v_phase = self.advance(v_at, v_phase)
                        before = word
                        word = self.following(before, k_at, k_phase)
                cute.arch.barrier(barrier_id=8 + self.group, number_of_threads=128)  # no warp's MMAs read the queries any more
                self.fetch(tile + cute.arch.grid_dim()[0])
                cute.arch.mbarrier_wait(self.full_v(v_at), v_phase)
                if cutlass.const_expr(c.paged):
                    self.clear_values(where, before, v_at)
                warpgroup.fence()
                self.multiply_values(v_at)
                warpgroup.wait_group(0)
                self.release(self.empty_v(v_at))
                v_at, v_phase = self.advance(v_at, v_phase)
            self.await_queries()  # before the stores, which its fence would wait for
            where, row = self.locate(opaque(tile)), opaque(row)  # kept over the main loop, its numbers would be spilled
            self.store(where, [self.row_of(where, row), self.row_of(where, row + 8)])
            tile = tile + cute.arch.grid_dim()[0]

    # The epilogue.

    def store(self, where: _Place, rows: Any) -> None:
        c = self.config
        for row in range(2):
            query, head = rows[row]
            total = self.row_sum[row]
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
            seen = total > Float32(0.0)
            factor = cutlass.select_(seen, cute.math.rcp(total, approx=True), Float32(0.0))
            lse = (self.row_max[row] + cute.math.log2(total)) * Float32(math.log(2.0))
            lse = cutlass.select_(seen, lse, Float32(-_INFINITY))
            valid = query < where.sq
            heads = self.get("walk_heads") * self.get("group") if c.packed else self.get("walk_heads")
            number = (Int64(where.part) * self.get("batch").to(Int64) + Int64(where.batch)) * heads.to(Int64) + Int64(head)
            number = number * where.sq.to(Int64) + Int64(query)
            store_vector(self.get("lse"), number, as_storage([lse], F32, "f32"), 1, "f32", valid & (self.lane % 4 == 0))
            values = [self.output[4 * (i // 2) + 2 * row + i % 2] * factor for i in range(c.head_dim // 4)]
            if c.split:
                for j in range(c.head_dim // 8):
                    column = 8 * j + 2 * (self.lane % 4)
                    start = number * self.get("head_dim_v").to(Int64) + column.to(Int64)
                    self.store_pair(start, values[2 * j], values[2 * j + 1], valid & (column < self.get("head_dim_v")))
            else:
                start = Int64(where.batch) * self.get("out_stride", 0) + Int64(head) * self.get("out_stride", 1)
                start = start + Int64(query) * self.get("out_stride", 2)
                for j in range(0, c.head_dim // 8, 4):
                    words = transposed([packed(values[2 * (j + n) : 2 * (j + n) + 2], self.element) for n in range(4)], self.lane)
                    column = 8 * (j + self.lane % 4)
                    self.store_words(start + Int64(column), words, valid & (column < self.get("head_dim_v")))

    @cute.jit
    def store_pair(self, start: Int64, first: Float32, second: Float32, valid: Boolean):
        if valid:
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0], pair[1] = first, second
            cute.autovec_copy(pair, cute.make_tensor(pointer_at(self.get("out"), start, "f32", 8), cute.make_layout(2)))

    @cute.jit
    def store_words(self, start: Int64, words: list, valid: Boolean):
        if valid:
            vector = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                vector[i] = words[i]
            address = self.get("out").toint() + start * 2
            there = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(vector, cute.make_tensor(there, cute.make_layout(4)))

    # All.

    @cute.jit
    def run(self):
        c = self.config
        self.place()
        if self.thread == 0:
            for stage in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(self.full_k(stage), 1)
                cute.arch.mbarrier_init(self.full_v(stage), 1)
                cute.arch.mbarrier_init(self.empty_k(stage), 4 * c.consumers)
                cute.arch.mbarrier_init(self.empty_v(stage), 4 * c.consumers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        self.total = self.get("tiles") * self.get("walk_heads") * self.get("batch") * self.get("parts")
        if self.group < 0:
            if cutlass.const_expr(c.consumers > 1):
                cute.arch.setmaxregister_decrease(40 if c.consumers == 2 else 32)
            if self.warp == 0:
                self.produce()
        else:
            if cutlass.const_expr(c.consumers > 1):
                cute.arch.setmaxregister_increase(232 if c.consumers == 2 else 160)
            self.consume()


def packed(values: list[Any], element: Any) -> Int32:
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0], pair[1] = values
    narrow = cute.make_rmem_tensor(2, element)
    narrow.store(pair.load().to(element))
    return cute.recast_tensor(narrow, Int32)[0]


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


def dsl_types(graph: Graph, config: AttentionConfig) -> list[Any]:
    element = STORAGES[config.element]
    kinds = {
        "k_map": ("tensor_map", element), "v_map": ("tensor_map", element), "q": ("pointer", element),
        "out": ("pointer", Float32 if config.split else element), "lse": ("pointer", Float32), "scale": ("scalar", Float32),
        "k": ("pointer", element), "v": ("pointer", element), "k_stride": ("scalar", Int64), "v_stride": ("scalar", Int64),
        "q_stride": ("scalar", Int64), "out_stride": ("scalar", Int64), "captured_stride": ("scalar", Int64),
        "table_stride": ("scalar", Int64), "table": ("pointer", Int32), "lengths": ("pointer", Int32), "some_count": ("pointer", Int32),
        "some_index": ("pointer", Int32), "all_count": ("pointer", Int32), "all_index": ("pointer", Int32),
    }  # fmt: skip
    return [
        ("pointer", STORAGES[graph.inputs[i].storage]) if name == "captured" else kinds.get(name, ("scalar", Int32))
        for name, i, _ in parameters(graph, config)
    ]


def build(graph: Graph, config: dict[str, Any], *, name: str, architecture: str) -> Artifact:
    c = AttentionConfig(**config)

    def body(values: list[Any]) -> None:
        _Attention(graph, c, dict(zip(parameters(graph, c), values, strict=True))).run()

    return compile_kernel(body, dsl_types(graph, c), name=name, architecture=architecture, block=c.block, shared_bytes=c.shared_bytes)
