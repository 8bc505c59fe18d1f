"""Attention with a function of scores and a mask for sm_90a: TMA + WGMMA, warp specialised. After FlashAttention-3 (Shah et
al., 2024); the function and the mask are FlexAttention's (Dong et al., 2024).

Warp roles. Warp 0 of warpgroup 0 is the producer: it publishes tiles of queries and loads their queries, finds out which tiles of keys
they visit, loads these keys and values, and writes each tile's number and kinds beside its keys. The other warpgroups are consumers, of 64
rows each.
Tiles of keys. Of a block mask, those that it names. Otherwise all: the producer's lanes look at 32 at once, and bounds of the mask's
positions (intervals.py) tell which need not be visited, and which are seen in full, by each warpgroup's rows. Tiles that are partial for
one come first, then those that are full for all. A warpgroup passes on tiles that it does not visit, up to its first one, and computes
others that are empty for it as partial ones.
Tiles of queries. CTAs stay and take tiles by turns, or by a counter where a mask makes tiles differ. The next tile's queries are loaded
when this tile's last keys are.
Main loop. A step computes the scores of a tile and, in the same batch of MMAs, the output of the tile before, whose probabilities are in
registers; the function of scores and the softmax run while the tensor cores work for the other warpgroups. Warpgroups issue their MMAs in
turns: one turn for each tile of keys, also for those that they pass on.
Pipelines. k and v: a ring of `stages` tiles each, full by TMA's bytes, empty by an arrival of each consumer warp. q: two published tiles,
full by TMA's bytes, empty likewise when their queries and their record have been read.
Registers. A thread has two rows of scores, r and r + 8, and two neighbouring columns of each eight: element 4 j + 2 row + e is in column
8 j + 2 (lane % 4) + e. Values of the function that depend on the row alone are computed once for a tile of queries, those that depend on
the column alone once for both rows.
Functions with a way of their own: a positive factor is left to the exponent, a line over the keys' positions that is added is what products
are accumulated onto, and a soft cap is a polynomial where scores are small.
Packed heads. With few queries, rows are the query heads of a KV head next to each other, query after query: they share loads of K and V.
The consumers load them themselves.
Paged. Keys lie in pages of a cache, in boxes of rows that a page holds one after the other; boxes behind the end are zeros, values behind
the end within a box are set to zero before they are multiplied, since 0 * NaN is NaN.
Shared memory: queries [head_dim / 64][rows][64] in their stages, then stages of keys, then of values, [head_dim / 64][keys][64] each, all
with the swizzle of 128 bytes.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import T

from ..artifact import Artifact
from ..attention_config import CAP_NUMBERS, AttentionConfig, outer_factor, parameters, soft_cap
from ..graph import BOOL, F32, I32, Graph, Node
from ..intervals import Arithmetic, Bounds, Intervals
from .build import compile_kernel
from .numbers import STORAGES, Evaluator, as_storage, cast, constant, from_storage, load_vector, pointer_at, rounded, store_vector

_LOG2_E = math.log2(math.e)
_INFINITY = float("inf")
_RAISE = 8.0  # the maximum that exponentials are relative to is raised where it would grow by a factor of 2^8
# What a tile of keys is to a warpgroup's rows. A warpgroup's word of a tile is 16 * tile + 4 * kind of the next tile + kind; a next tile of
# the kind _NOTHING means that this is the last, and a word of _NOTHING that the tile of queries visits no keys.
_NOTHING, _PARTIAL, _FULL, _EMPTY = 0, 1, 2, 3
_WORDS = 4  # of a stage: of up to four warpgroups
_PLACE = 8  # words of a published tile of queries


def _approximate(instruction: str, x: Any) -> Float32:
    options = {"has_side_effects": False, "is_align_stack": False, "asm_dialect": llvm.AsmDialect.AD_ATT}
    return Float32(llvm.inline_asm(T.f32(), [Float32(x).ir_value()], f"{instruction}.f32 $0, $1;", "=f,f", **options))


def exp2(x: Any) -> Float32:
    return _approximate("ex2.approx.ftz", x)


def opaque(x: Any) -> Int32:
    """The same number, which the compiler takes for another."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def held(x: Any) -> Int32:
    """The same number, of the whole warp, which the compiler keeps instead of computing it anew in each step of a loop."""
    return cute.arch.make_warp_uniform(opaque(x))


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


def lines_of(graph: Graph, of_columns: list[bool]) -> list[bool]:
    """Which values are linear in the key's position, or do not depend on the column at all. What is truncated is no line, and neither are
    products of integers, which may wrap."""
    lines: list[bool] = []
    for number, node in enumerate(graph.nodes):
        types = [graph.nodes[i].dtype for i in node.inputs]
        if not of_columns[number]:
            line = True
        elif node.op == "value":
            line = node.attrs[0] == "kv"
        elif node.op not in ("add", "sub", "mul", "neg", "cast") or node.dtype not in (F32, I32):
            line = False
        elif node.op == "mul":
            line = node.dtype == F32 and not all(of_columns[i] for i in node.inputs)
        else:
            line = BOOL not in types and (node.dtype == F32 or F32 not in types)
        lines.append(line and all(lines[i] for i in node.inputs))
    return lines


class GridEvaluator(Evaluator):
    """A graph's nodes as Grids; ``leaf`` gives those of values, ``gather`` loads of a captured tensor at indices. Floating-point values
    that are linear in the key's position are a product and a sum of each element: a number of the row times the column, plus another."""

    def __init__(self, graph: Graph, of_columns: list[bool], columns: Columns | None, leaf: Any, gather: Any):
        super().__init__(graph, 0, None, None)
        self.of_columns, self.columns, self.leaf_of, self.gather = of_columns, columns, leaf, gather
        self.is_line = lines_of(graph, of_columns)
        self.lines: dict[int, tuple[Grid, Grid | None]] = {}

    def value(self, number: int) -> Grid:
        if number not in self.known:
            self.known[number] = self._grid(number, self.graph.nodes[number])
        return self.known[number]

    def _grid(self, number: int, node: Node) -> Grid:
        if node.op == "constant":
            return Grid([constant(node.attrs[0], node.dtype)], False, False)
        if node.op == "value":
            return self.leaf_of(node)
        if node.dtype == F32 and self.of_columns[number] and self.is_line[number]:
            base, step = self.line(number)
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

    def line(self, number: int) -> tuple[Grid, Grid | None]:
        """Of one that lines_of() says is a line: its value at the first column, and what each further column adds, or None where that is
        nothing."""
        if number not in self.lines:
            self.lines[number] = self._new_line(number, self.graph.nodes[number])
        return self.lines[number]

    def _new_line(self, number: int, node: Node) -> tuple[Grid, Grid | None]:
        if not self.of_columns[number]:
            return self.value(number), None
        if node.op == "value":
            return Grid([cast(self.columns.first, I32, node.dtype)], False, False), Grid([constant(1, node.dtype)], False, False)
        lines = [self.line(i) for i in node.inputs]
        types = [self.graph.nodes[i].dtype for i in node.inputs]
        if node.op == "mul":
            (base, step), (factor, _) = lines if lines[0][1] is not None else lines[::-1]
            return self._each([base, factor], lambda x: x[0] * x[1]), self._each([step, factor], lambda x: x[0] * x[1])
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
        self.outer, self.inner = outer_factor(graph, self.score) if config.scores else (1.0, -1)
        self.cap = soft_cap(graph, config)
        self.of_columns = self._depends("kv", "score")
        self.line, self.line_sign = self._added_line()
        self.of_rows = self._depends("q", *(["h"] if config.packed else []))

    def _depends(self, *names: str) -> list[bool]:
        result: list[bool] = []
        for node in self.graph.nodes:
            result.append(node.op == "value" and node.attrs[0] in names or any(result[i] for i in node.inputs))
        return result

    def _added_line(self) -> tuple[int, int]:
        """A value that is linear in the key's position and all that the function adds to the score, with its sign, or -1."""
        if self.inner < 0:
            return -1, 0
        node = self.graph.nodes[self.inner]
        if node.op not in ("add", "sub") or self.config.portable:
            return -1, 0
        lines = lines_of(self.graph, self.of_columns)
        for score, line in ((0, 1), (1, 0)) if node.op == "add" else ((0, 1),):
            other, number = self.graph.nodes[node.inputs[score]], node.inputs[line]
            is_line = self.of_columns[number] and lines[number] and self.graph.nodes[number].dtype == F32
            if other.op == "value" and other.attrs[0] == "score" and is_line:
                return number, 1 if node.op == "add" else -1
        return -1, 0

    def get(self, name: str, i: int = 0, mode: int = 0) -> Any:
        return self.values[name, i, mode]

    # Shared memory and barriers.

    def place(self) -> None:
        c = self.config
        self.thread = cute.arch.thread_idx()[0]
        self.warp = cute.arch.make_warp_uniform(self.thread // 32)
        self.lane = self.thread % 32
        self.group = cute.arch.make_warp_uniform(self.thread // 128) - 1  # the consumer warpgroup
        barriers = cute.arch.alloc_smem(Int64, 4 * c.stages + 4, alignment=8)  # full_k, empty_k, full_v, empty_v, full_q, empty_q
        words = cute.arch.alloc_smem(Int32, _WORDS * c.stages + 2 * _PLACE, alignment=16)
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        base = held((base + 1023) & Int32(-1024))
        self.barriers = cute.make_ptr(Int64, held(barriers.toint()), cute.AddressSpace.smem, assumed_align=8)
        self.words = held(words.toint())
        self.q_bytes, self.tile_bytes = 2 * c.head_dim * c.rows, 2 * c.head_dim * c.keys
        self.q_base = base
        self.k_base = base + c.query_stages * self.q_bytes
        self.v_base = base + (c.query_stages * self.q_bytes + c.stages * self.tile_bytes)

    def full_k(self, stage: Any) -> Any:
        return self.barriers + stage

    def empty_k(self, stage: Any) -> Any:
        return self.barriers + (stage + self.config.stages)

    def full_v(self, stage: Any) -> Any:
        return self.barriers + (stage + 2 * self.config.stages)

    def empty_v(self, stage: Any) -> Any:
        return self.barriers + (stage + 3 * self.config.stages)

    def full_q(self, stage: Any) -> Any:
        return self.barriers + (stage + 4 * self.config.stages)

    def empty_q(self, stage: Any) -> Any:
        return self.barriers + (stage + (4 * self.config.stages + 2))

    def shared_words(self, number: Any, count: int) -> cute.Tensor:
        there = cute.make_ptr(Int32, self.words + number * 4, cute.AddressSpace.smem, assumed_align=4 * min(count, 4))
        return cute.make_tensor(there, cute.make_layout(count))

    def write_word(self, stage: Any, group: Any, word: Any) -> None:
        self.shared_words(stage * _WORDS + group, 1)[0] = word

    def read_word(self, stage: Any) -> Any:
        return cute.arch.make_warp_uniform(self.shared_words(stage * _WORDS + self.group, 1)[0])

    def record(self, stage: Any) -> cute.Tensor:
        """Of a published tile of queries: head, batch, block, part, keys."""
        return self.shared_words(_WORDS * self.config.stages + stage * _PLACE, _PLACE)

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
        sk = self.get("sk")
        if self.config.paged:
            length = cute.make_tensor(pointer_at(self.get("lengths"), b, "i32", 4), cute.make_layout(1))[0]
            most = self.get("table_columns") * self.get("page_size")
            sk = cutlass.max(cutlass.min(length, most), Int32(0))
        return self.place_of(head, b, block, part, sk)

    def place_of(self, head: Any, b: Any, block: Any, part: Any, sk: Any) -> _Place:
        sq = self.get("sq")
        kv_head = head if self.config.packed else head // self.get("group")
        return _Place(
            head=head, batch=b, block=block, part=part, sk=sk, sq=sq, kv_head=kv_head, first=sk - sq if self.config.paged else Int32(0)
        )

    def read_place(self, stage: Any) -> _Place:
        """Of the tile of queries in a stage, as the producer has published it."""
        numbers = cute.make_rmem_tensor(_PLACE, Int32)
        cute.autovec_copy(self.record(stage), numbers)
        return self.place_of(*(cute.arch.make_warp_uniform(numbers[i]) for i in range(5)))

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

    def queries_of(self, where: _Place, first_row: int, rows: int) -> tuple[Any, Any]:
        """The first and last query of rows of a tile, as positions; behind one another where the rows are none of queries."""
        c = self.config
        begin = where.block * c.rows + first_row
        end = begin + (rows - 1)
        if c.packed:
            group = self.get("group")
            begin, end = begin // group, end // group
        return begin + where.first, cutlass.min(end, where.sq - 1) + where.first

    def kind_of(self, where: _Place, tile: Any, end: Any, first_row: int = 0, rows: int | None = None) -> Any:
        """What a tile of keys is to some rows of a tile of queries."""
        c = self.config
        first = tile * c.keys
        inside = first + c.keys <= where.sk
        begin, last = self.queries_of(where, first_row, rows or c.rows)
        valid = (tile < end) & (begin <= last)
        if self.mask < 0 or c.listed:
            return cutlass.select_(valid, cutlass.select_(inside, Int32(_FULL), Int32(_PARTIAL)), Int32(_EMPTY))
        bounds = {
            "q": Bounds(Int64(begin), Int64(last), 1 << 24),
            "kv": Bounds(Int64(first), Int64(cutlass.min(first + (c.keys - 1), where.sk - 1)), 1 << 24),
        }
        numbers = self.evaluator(where, None, None, None)

        def exact(number: int) -> Bounds | None:
            node = self.graph.nodes[number]
            if self.of_columns[number] or self.of_rows[number] or node.op == "constant":
                return None
            value = numbers.value(number).values[0]
            return Bounds(value, value) if node.dtype == BOOL else Bounds(Int64(value), Int64(value), 1 << 31)

        if c.packed:
            group = self.get("group")
            head = Int64(where.head * group)
            bounds["h"] = Bounds(head, head + Int64(group - 1), 1 << 24)
        found = Intervals(self.graph, _BOUNDS, bounds.get, exact).of(self.mask)
        if found is None:
            return cutlass.select_(valid, Int32(_PARTIAL), Int32(_EMPTY))
        kind = cutlass.select_(found.low & inside, Int32(_FULL), Int32(_PARTIAL))
        return cutlass.select_(valid & found.high, kind, Int32(_EMPTY))

    def kinds_of(self, where: _Place, tile: Any, end: Any) -> tuple[Any, Any]:
        """What a tile of keys is to each warpgroup, two bits each, and to all together: full where it is full to all that have queries."""
        kinds, partial, visited = Int32(0), Boolean(False), Boolean(False)
        for group in range(self.config.consumers):
            kind = self.kind_of(where, tile, end, 64 * group, 64)
            begin, last = self.queries_of(where, 64 * group, 64)
            kinds = kinds | (kind << (2 * group))
            partial = partial | ((kind != _FULL) & (begin <= last))
            visited = visited | (kind != _EMPTY)
        together = cutlass.select_(partial, Int32(_PARTIAL), Int32(_FULL))
        return kinds, cutlass.select_(visited, together, Int32(_EMPTY))

    def listed_tile(self, where: _Place, wanted: Any, place: Any, count: Any) -> tuple[Any, Any]:
        """Of a block mask's list, the tile of keys at a place, and its kind as above."""
        c = self.config
        entry = place if c.listed_k == 1 else place // c.listed_k
        start = Int64(self.list_row(where)) * Int64(self.get("list_length"))
        index = self.listed(wanted, "index", start + Int64(cutlass.max(cutlass.min(entry, count - 1), Int32(0))))
        tiles = (where.sk + (c.keys - 1)) // c.keys
        tile = index if c.listed_k == 1 else index * c.listed_k + (place - entry * c.listed_k)
        valid = (entry < count) & (index >= 0) & (index < tiles) & (tile < tiles)
        kind = cutlass.select_((wanted == 1) & (tile * c.keys + c.keys <= where.sk), Int32(_FULL), Int32(_PARTIAL))
        return tile, cutlass.select_(valid, kind, Int32(_EMPTY))

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
    def publish(self, tile: Int32, number: Int32):
        """Makes the CTA's tile of queries of this number, or that none is left, known to the consumers, and loads its queries."""
        c = self.config
        at, phase = number & 1, (number >> 1) & 1
        inside = tile < self.total
        where = self.locate(cutlass.select_(inside, tile, Int32(0)))
        cute.arch.mbarrier_wait(self.empty_q(at), phase ^ 1)
        if self.lane == 0:
            numbers = cute.make_rmem_tensor(_PLACE, Int32)
            numbers.fill(0)
            numbers[0] = cutlass.select_(inside, where.head, Int32(-1))
            numbers[1], numbers[2], numbers[3], numbers[4] = where.batch, where.block, where.part, where.sk
            cute.autovec_copy(numbers, self.record(at))
            count = cutlass.select_(inside, Int32(0 if c.packed else self.q_bytes), Int32(0))
            cute.arch.mbarrier_arrive_and_expect_tx(self.full_q(at), count)
            if cutlass.const_expr(not c.packed):
                if inside:
                    target = self.q_base + at * self.q_bytes
                    self.copy("q_map", target, c.rows, where.block * c.rows, where.head, where.batch, self.full_q(at))
        cute.arch.sync_warp()

    @cute.jit
    def claim(self, tile: Int32):
        """The CTA's next tile of queries. Where tiles differ in their keys it is the next that no CTA has."""
        following = tile + cute.arch.grid_dim()[0]
        if cutlass.const_expr(self.config.counted):
            if self.get("claims") != 0:
                taken = Int32(0)
                if self.lane == 0:
                    taken = cute.arch.atomic_add(self.get("counter"), Int32(1), sem="relaxed", scope="gpu")
                following = cute.arch.shuffle_sync(taken, 0) + cute.arch.grid_dim()[0]
        return following

    @cute.jit
    def produce(self):
        c = self.config
        k_at, k_phase, v_at, v_phase, number_of_tile = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        tile = cute.arch.block_idx()[0]
        self.publish(tile, number_of_tile)
        while tile < self.total:
            where = self.read_place(number_of_tile & 1)
            first, end = self.keys_of(where)
            pending = Int32(_NOTHING)  # 64 * tile + kinds
            wanted = Int32(0)
            while wanted < 2:
                begin, stop = first, end
                count = Int32(0)
                if cutlass.const_expr(c.listed):
                    count = self.list_count(where, wanted)
                    begin, stop = Int32(0), count * c.listed_k
                place = begin + self.lane
                while begin < stop:
                    number = first + (end - 1) - place  # the last keys first: with a causal mask, those that the first rows do not see
                    kinds, kind = Int32(0), Int32(0)
                    if cutlass.const_expr(c.listed):
                        number, kind = self.listed_tile(where, wanted, place, count)
                        for group in cutlass.range_constexpr(c.consumers):
                            queries = self.queries_of(where, 64 * group, 64)
                            kinds = kinds | (cutlass.select_(queries[0] <= queries[1], kind, Int32(_EMPTY)) << (2 * group))
                        kind = cutlass.select_(kind != _EMPTY, wanted + _PARTIAL, Int32(_EMPTY))
                    else:
                        kinds, kind = self.kinds_of(where, number, end)
                        kind = cutlass.select_(number >= first, kind, Int32(_EMPTY))
                    word = number * 64 + kinds
                    chosen = cute.arch.vote_ballot_sync(kind == wanted + _PARTIAL)
                    while chosen != 0:
                        lowest = cute.arch.popc((chosen ^ (chosen - 1)) & 0x7FFFFFFF)
                        lowest = cutlass.select_((chosen & 0x7FFFFFFF) == 0, Int32(31), lowest - 1)
                        chosen = chosen & (chosen - 1)
                        following = cute.arch.shuffle_sync(word, lowest)
                        if pending != _NOTHING:
                            self.load(where, pending, following, k_at, k_phase, v_at, v_phase)
                            k_at, k_phase = self.advance(k_at, k_phase)
                            v_at, v_phase = self.advance(v_at, v_phase)
                        pending = following
                    begin = begin + 32
                    place = place + 32
                wanted = wanted + 1
            if pending != _NOTHING:
                self.load(where, pending, Int32(_NOTHING), k_at, k_phase, v_at, v_phase)
                v_at, v_phase = self.advance(v_at, v_phase)
            else:
                cute.arch.mbarrier_wait(self.empty_k(k_at), k_phase ^ 1)
                self.write_words(k_at, Int32(_NOTHING), Int32(_NOTHING))
                if self.lane == 0:
                    cute.arch.mbarrier_arrive(self.full_k(k_at))
                cute.arch.sync_warp()
            k_at, k_phase = self.advance(k_at, k_phase)
            # The other stage is that of the tile before this one. All that its consumers wait for was loaded: they will give it back.
            number_of_tile = number_of_tile + 1
            tile = self.claim(tile)  # not before: it would be spilled, and the consumers have all stages to work on meanwhile
            self.publish(tile, number_of_tile)

    @cute.jit
    def write_words(self, stage: Int32, pending: Int32, following: Int32):
        """Each warpgroup's word of a tile."""
        if self.lane < self.config.consumers:
            shift = 2 * self.lane
            word = (pending >> 6) * 16 + ((following >> shift) & 3) * 4 + ((pending >> shift) & 3)
            self.write_word(stage, self.lane, word)
        cute.arch.sync_warp()

    def advance(self, at: Any, phase: Any) -> tuple[Any, Any]:
        wraps = at == self.config.stages - 1
        return cutlass.select_(wraps, Int32(0), at + 1), cutlass.select_(wraps, phase ^ 1, phase)

    @cute.jit
    def load(self, where: Any, pending: Int32, following: Int32, k_at: Int32, k_phase: Int32, v_at: Int32, v_phase: Int32):
        """A tile's keys and values, by the warp."""
        c = self.config
        tile = pending >> 6
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
        self.write_words(k_at, pending, following)
        if self.lane == 0:
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
        queries = self.k_major(self.q_base + self.group * (64 * 128), 64, c.rows, c.query_stages)
        self.tSrQ = scores.make_fragment_A(scores.partition_A(queries))  # (MMA,MMA_M,MMA_K,PIPE)
        self.tSrK = scores.make_fragment_B(scores.partition_B(self.k_major(self.k_base, c.keys, c.keys, c.stages)))
        self.tOrV = output.make_fragment_B(output.partition_B(self.mn_major(self.v_base, c.keys, c.stages)))
        self.scores = scores.make_fragment_C(scores.partition_shape_C((64, c.keys)))
        self.output = output.make_fragment_C(output.partition_shape_C((64, c.head_dim)))
        self.probabilities = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, c.keys // 16)), self.element)
        self.row_max = cute.make_rmem_tensor(2, Float32)  # in units of log2
        self.row_sum = cute.make_rmem_tensor(2, Float32)
        self.rescale = cute.make_rmem_tensor(2, Float32)
        self.low_is_negligible = cute.make_rmem_tensor(1, Int32)

    def multiply_keys(self, q_at: Any, stage: Any) -> None:
        mma = cute.make_tiled_mma(self.op_scores)
        mma.set(warpgroup.Field.ACCUMULATE, self.line >= 0)
        at = 0 if self.config.packed else q_at
        for k in range(self.config.head_dim // 16):
            cute.gemm(mma, self.scores, self.tSrQ[None, None, k, at], self.tSrK[None, None, k, stage], self.scores)
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

    def fetch(self, where: _Place) -> None:
        """Starts copies of a warpgroup's rows of a tile's queries: thread t has the vectors t, t + 128, ..."""
        c = self.config
        vectors = c.head_dim // 8
        column = self.thread % vectors * 8
        start = Int64(where.batch) * self.get("q_stride", 0) + Int64(column)
        inside = column < self.get("head_dim")
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

    @cute.jit
    def fetch_next(self, where: Any, number: Int32):
        """Of the CTA's tiles behind the first one."""
        if number != 0:
            cute.arch.barrier(barrier_id=8 + self.group, number_of_threads=128)  # no warp's MMAs read the queries before any more
            self.fetch(where)

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

    def modify(self, where: _Place, queries: Any, known: dict[int, Grid], tile: Any, masked: bool) -> None:
        """Scores are what the softmax takes; of a partial tile, -inf where a key is not seen. By two columns: values live shortly."""
        c = self.config
        if self.scores_are_products():
            if not masked:
                return
            self.cut(where.sk - tile * c.keys)
            if self.mask < 0:
                return
        first = tile * c.keys + (self.lane % 4) * 2
        scale = self.get("scale")
        for i in range(0, c.keys // 2, 4):
            columns = Columns(first, [2 * i, 2 * i + 1])
            scores = None if self.scores_are_products() else [self.scores[i + e] * scale for e in (0, 2, 1, 3)]
            evaluator = self.evaluator(where, queries, columns, scores)
            evaluator.known.update(known)
            if self.cap is not None:
                capped = [_approximate("tanh.approx", self.scores[i + e] * self.get("cap_inner")) for e in (0, 2, 1, 3)]
                evaluator.known[self.inner] = Grid(capped, True, True)
            grid = None if self.scores_are_products() else evaluator.value(self.inner)
            seen = evaluator.value(self.mask) if masked and self.mask >= 0 else None
            for column in range(2):
                for row in range(2):
                    e = i + 2 * row + column
                    x = self.scores[e] if grid is None else grid.at(row, column)
                    self.scores[e] = x if seen is None else cutlass.select_(seen.at(row, column), x, Float32(-_INFINITY))
        if masked and not self.scores_are_products():
            self.cut(where.sk - tile * c.keys)

    @cute.jit
    def cut(self, keys: Int32):
        """Leaves ``keys`` keys of a tile."""
        if keys < self.config.keys:
            self.cut_columns(keys - (self.lane % 4) * 2)

    def cut_columns(self, end: Any) -> None:
        for i in range(self.config.keys // 2):
            self.scores[i] = cutlass.select_(end > 8 * (i // 4) + i % 2, self.scores[i], Float32(-_INFINITY))

    # A line, base + step * (key - first key of the tile), which the function adds to scores, as a bias of distances does: products are
    # accumulated onto what the columns add to the base, which is the same in all tiles, in units of products. No number is computed for a
    # score then, and these are as small as a tile is wide, however far the keys are: each of up to 8 MMAs cuts its sum off within 2^-23 of
    # them, together 2^-20 of what the line changes by over a tile. The base is added to the rows' maxima alone.

    def line_of(self, where: _Place, queries: Any, known: dict[int, Grid], tile: Any) -> tuple[list[Any], list[Any]]:
        """Of the two rows, base and step."""
        evaluator = self.evaluator(where, queries, Columns(tile * self.config.keys, [0]), None)
        evaluator.known.update(known)
        base, step = evaluator.line(self.line)
        if self.line_sign < 0:
            base, step = (Grid([-y for y in x.values], x.rows, x.columns) for x in (base, step))
        return tuple([x.at(row, 0) for row in range(2)] for x in (base, step))

    def steps_of(self, where: _Place, queries: Any, known: dict[int, Grid]) -> list[tuple[Any, Any]] | None:
        """Of the two rows, what a column and what the thread's first column add to a product."""
        if self.line < 0:
            return None
        unit = cute.math.rcp(self.get("scale"), approx=True)
        lane = Float32((self.lane % 4) * 2)
        _, steps = self.line_of(where, queries, known, Int32(0))
        found = [(step * unit, step * unit * lane) for step in steps[: 1 if steps[0] is steps[1] else 2]]
        return [found[0], found[-1]]

    def bases_of(self, where: _Place, queries: Any, known: dict[int, Grid], tile: Any) -> list[Any] | None:
        """Of the two rows, in units of log2."""
        if self.line < 0:
            return None
        return [base * Float32(_LOG2_E * self.outer) for base in self.line_of(where, queries, known, tile)[0]]

    def prepare_scores(self, steps: list[tuple[Any, Any]] | None) -> None:
        """What the next products are added to; scores are not needed any more."""
        if steps is not None:
            for i in range(self.config.keys // 2):
                step, first = steps[i // 2 % 2]
                self.scores[i] = multiply_add_here(step, 8 * (i // 4) + i % 2, first)

    def scores_are_products(self) -> bool:
        """Whether the function multiplies scores by a constant, if it does anything but what was added before."""
        if self.score < 0 or self.line >= 0:
            return True
        node = self.graph.nodes[self.inner]
        return node.op == "value" and node.attrs[0] == "score"

    def factor(self) -> Any:
        """What scores are multiplied by before they are exponents of two: with a positive factor at the end of the function in it."""
        factor = Float32(_LOG2_E * self.outer)
        return self.get("scale") * factor if self.scores_are_products() else factor

    def softmax(self) -> Any:
        """Scores become exponentials, which are added to the sums; whether the output must be rescaled."""
        offsets, raised = self.maxima()
        self.exponentials(offsets, None)
        return raised

    def maxima(self, bases: list[Any] | None = None) -> tuple[list[Any], Any]:
        """The rows' maxima, raised where the scores ask for it: what exponents are relative to, and whether the output must be rescaled.
        ``bases``: what is to be added to the rows' exponents."""
        most = [self.of_quad(x) * self.factor() for x in self.of_thread()]
        if bases is None:
            return self.raise_maxima(most)
        offsets, raised = self.raise_maxima([x + base for x, base in zip(most, bases, strict=True)])
        return [x - base for x, base in zip(offsets, bases, strict=True)], raised

    def of_thread(self) -> list[Any]:
        """The largest scores that the thread has of its two rows."""
        found = []
        for row in range(2):
            chains: list[Any] = [None, None]
            for n, i in enumerate(range(0, self.config.keys // 2, 4)):
                pair = cute.arch.fmax(self.scores[i + 2 * row], self.scores[i + 2 * row + 1])
                chains[n % 2] = pair if chains[n % 2] is None else cute.arch.fmax(chains[n % 2], pair)
            found.append(cute.arch.fmax(chains[0], chains[1]))
        return found

    def of_quad(self, most: Any) -> Any:
        """The maximum over the lanes that share a row."""
        most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1))
        return cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=2))

    def raise_maxima(self, most: list[Any]) -> tuple[list[Any], Any]:
        offsets, raised = [], Boolean(False)
        for row in range(2):
            before = self.row_max[row]
            grows = most[row] > before + Float32(_RAISE)
            after = cutlass.select_(grows, most[row], before)
            self.row_max[row] = after
            self.rescale[row] = cutlass.select_(grows, exp2(before - after), Float32(1.0))
            raised = raised | grows
            offsets.append(cutlass.select_(after == Float32(-_INFINITY), Float32(0.0), after))
        return offsets, cute.arch.vote_any_sync(raised)

    def exponentials(self, offsets: list[Any], words: Any, exponent: Any = None) -> None:
        """Scores become exponentials, which are added to the sums; ``words``: takes them rounded, in pairs, in the place of the scores."""
        factor = self.factor() if exponent is None else None
        sums: list[list[Any]] = [[None, None], [None, None]]
        for i in range(0, self.config.keys // 2, 2):
            row, pair = i // 2 % 2, []
            for e in range(2):
                score = self.scores[i + e]
                x = exp2(score * factor - offsets[row] if exponent is None else exponent(score, row))
                sums[row][e] = x if sums[row][e] is None else sums[row][e] + x
                pair.append(x)
            if words is None:
                self.scores[i], self.scores[i + 1] = pair
            else:
                words[i // 2] = packed_here(pair, self.config.element)
        for row in range(2):
            self.row_sum[row] = self.row_sum[row] * self.rescale[row] + (sums[row][0] + sums[row][1])

    # A soft cap, outer * tanh(inner * score), as the library's own kernels have it (cpp/src/attention/shared/softmax.cuh): exponentials
    # keep the special function units busy, so tanh of scores up to a limit is a polynomial in full tiles. Both rise with the score, so that
    # the maximum is found before the cap. Which of them is computed is the same for all lanes of a warp.

    @cute.jit
    def largest_of_warp(self, most: Float32):
        """``most``, or what else tells that a score lies outside of the polynomial's limit: the lowest score, unless those below the limit
        weigh less than 2^-24 of their row's largest."""
        if self.low_is_negligible[0] == 0:
            least = [self.scores[0], self.scores[1]]
            for i in cutlass.range_constexpr(2, self.config.keys // 2):
                least[i % 2] = cute.arch.fmin(least[i % 2], self.scores[i])
            most = cute.arch.fmax(most, -cute.arch.fmin(least[0], least[1]))
        return most

    @cute.jit
    def capped_exponentials(self):
        """Scores, which are products, become exponentials of capped scores, rounded; whether the output must be rescaled."""
        most = self.of_thread()
        outside = cute.arch.vote_any_sync(self.largest_of_warp(cute.arch.fmax(most[0], most[1])) > self.get("cap_limit"))
        raised = Boolean(False)
        if outside:
            raised = self.exponentials_by_tanh(most)
        else:
            raised = self.exponentials_by_polynomial(most)
            self.judge_low_scores()
        return raised

    def exponentials_by_tanh(self, most: list[Any]) -> Any:
        def capped(x: Any) -> Any:
            return _approximate("tanh.approx", x * self.get("cap_inner"))

        offsets, raised = self.raise_maxima([capped(self.of_quad(x)) * self.factor() for x in most])
        self.exponentials(offsets, self.rounded(), lambda x, row: capped(x) * self.factor() - offsets[row])
        return raised

    def exponentials_by_polynomial(self, most: list[Any]) -> Any:
        most = [self.of_quad(x) for x in most]
        offsets, raised = self.raise_maxima([x * self.cap_factor(x) for x in most])
        self.exponentials(offsets, self.rounded(), lambda x, row: x * self.cap_factor(x) - offsets[row])
        return raised

    @cute.jit
    def judge_low_scores(self):
        if self.low_is_negligible[0] == 0:
            low = cute.arch.fmin(self.row_max[0], self.row_max[1]) >= self.get("cap_negligible")
            self.set_low_is_negligible(cutlass.select_(cute.arch.vote_all_sync(low), Int32(1), Int32(0)))

    def set_low_is_negligible(self, value: Any) -> None:
        self.low_is_negligible[0] = value

    def cap_factor(self, x: Any) -> Any:
        """What a product is multiplied by to become its capped score in units of log2."""
        y = x * self.get("cap_root")
        inside = y * y + self.get("cap_middle")
        return inside * inside + self.get("cap_rest")

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
        begin = where.sk - (word >> 4) * c.keys
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
    def skip(self, word: Int32, k_at: Int32, k_phase: Int32, v_at: Int32, v_phase: Int32):
        """Passes on the turn and the stages of a tile of keys, which have arrived, that this warpgroup's rows do not visit; the word of the
        next one, when that has arrived."""
        self.wait_for_turn()
        self.pass_turn()
        cute.arch.sync_warp()  # all lanes have read the word
        self.release(self.empty_k(k_at))
        cute.arch.mbarrier_wait(self.full_v(v_at), v_phase)  # a stage that is on its way is not given back
        self.release(self.empty_v(v_at))
        result = Int32(_NOTHING)
        if (word & 12) != 0:
            at, phase = self.advance(k_at, k_phase)
            cute.arch.mbarrier_wait(self.full_k(at), phase)
            result = self.read_word(at)
        return result

    def step(self, where: _Place, queries: Any, known: Any, steps: Any, before: Any, q_at: Any, k_at: Any, k_phase: Any, v_at: Any,
             v_phase: Any, masked: bool) -> Any:  # fmt: skip
        """The scores of a tile and the output of the one before; the tile's word. All lanes read it before a WGMMA, which they execute
        together and which stands before the stage is given back."""
        cute.arch.mbarrier_wait(self.full_k(k_at), k_phase)
        word = self.read_word(k_at)
        cute.arch.mbarrier_wait(self.full_v(v_at), v_phase)
        if self.config.paged:
            self.clear_values(where, before, v_at)
        self.wait_for_turn()
        warpgroup.fence()
        self.multiply_keys(q_at, k_at)
        self.multiply_values(v_at)
        self.pass_turn()
        warpgroup.wait_group(1)
        self.release(self.empty_k(k_at))
        if self.cap is not None and not masked:
            warpgroup.wait_group(0)  # from here on the probabilities' registers may be written
            self.release(self.empty_v(v_at))
            raised = self.capped_exponentials()
        else:
            self.modify(where, queries, known, word >> 4, masked)
            offsets, raised = self.maxima(self.bases_of(where, queries, known, word >> 4))
            warpgroup.wait_group(0)
            self.release(self.empty_v(v_at))
            self.exponentials(offsets, self.rounded())
            self.prepare_scores(steps)
        self.rescale_output(raised)
        return word

    def rounded(self) -> cute.Tensor:
        """The probabilities' registers."""
        return cute.recast_tensor(self.probabilities, Int32)

    def first_row(self) -> Any:
        """The first of the thread's two rows. It is computed where it is needed: kept over the main loop, it would be spilled."""
        thread = opaque(cute.arch.thread_idx()[0])
        return self.group * 64 + ((thread & 96) >> 1) + ((thread & 31) >> 2)

    def await_tile(self, number: Any) -> Any:
        """Whether the CTA has a tile of queries of this number, when it is published and its queries have arrived."""
        cute.arch.mbarrier_wait(self.full_q(number & 1), (number >> 1) & 1)
        return cute.arch.make_warp_uniform(self.record(number & 1)[0]) >= 0

    @cute.jit
    def consume(self):
        c = self.config
        self.operands()
        k_at, k_phase, v_at, v_phase, number = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(c.consumers > 1):
            if self.group == c.consumers - 1:
                self.pass_turn()
        if cutlass.const_expr(c.packed):
            self.fetch(self.locate(cute.arch.block_idx()[0]))  # at once: with few queries, that the first keys take as long is all there is
        more = self.await_tile(number)
        while more:
            q_at = cute.arch.make_warp_uniform(number & 1)
            where = self.read_place(q_at)
            row = self.first_row()
            rows = [self.row_of(where, row), self.row_of(where, row + 8)]
            queries = [(query + where.first, of_query) for query, of_query in rows]
            known = self.known_of_rows(where, queries)
            if cutlass.const_expr(c.packed):
                self.fetch_next(where, number)
                self.await_queries()
            self.output.fill(0.0)
            self.row_max.fill(-_INFINITY)
            self.row_sum.fill(0.0)
            self.low_is_negligible.fill(0)
            cute.arch.mbarrier_wait(self.full_k(k_at), k_phase)
            word = self.read_word(k_at)
            if word == _NOTHING:
                cute.arch.sync_warp()
                self.release(self.empty_k(k_at))
                k_at, k_phase = self.advance(k_at, k_phase)
            while (word & 3) == _EMPTY:
                word = self.skip(word, k_at, k_phase, v_at, v_phase)
                k_at, k_phase = self.advance(k_at, k_phase)
                v_at, v_phase = self.advance(v_at, v_phase)
            if word != _NOTHING:
                steps = self.steps_of(where, queries, known)
                self.prepare_scores(again(steps))
                self.wait_for_turn()
                warpgroup.fence()
                self.multiply_keys(q_at, k_at)
                self.pass_turn()
                warpgroup.wait_group(0)
                self.release(self.empty_k(k_at))
                k_at, k_phase = self.advance(k_at, k_phase)
                if (word & 3) == _FULL:
                    self.modify(where, queries, known, word >> 4, False)
                else:
                    self.modify(where, queries, known, word >> 4, True)
                offsets, _ = self.maxima(self.bases_of(where, queries, known, word >> 4))
                self.exponentials(offsets, self.rounded())
                self.prepare_scores(steps)
                while (word & 12) != 0:
                    while (word & 4) != 0:  # partial, or empty behind one that is not
                        word = self.step(where, queries, known, steps, word, q_at, k_at, k_phase, v_at, v_phase, True)
                        k_at, k_phase = self.advance(k_at, k_phase)
                        v_at, v_phase = self.advance(v_at, v_phase)
                    while (word & 12) == 4 * _FULL:
                        word = self.step(where, queries, known, steps, word, q_at, k_at, k_phase, v_at, v_phase, False)
                        k_at, k_phase = self.advance(k_at, k_phase)
                        v_at, v_phase = self.advance(v_at, v_phase)
                cute.arch.mbarrier_wait(self.full_v(v_at), v_phase)
                if cutlass.const_expr(c.paged):
                    self.clear_values(where, word, v_at)
                warpgroup.fence()
                self.multiply_values(v_at)
                warpgroup.wait_group(0)
                self.release(self.empty_v(v_at))
                v_at, v_phase = self.advance(v_at, v_phase)
            where = self.read_place(q_at)  # kept over the main loop, its numbers would be spilled
            cute.arch.sync_warp()  # all lanes have read them; the warp's MMAs with these queries are done
            self.release(self.empty_q(q_at))
            number = number + 1
            row = self.first_row()
            self.store(where, [self.row_of(where, row), self.row_of(where, row + 8)])
            more = self.await_tile(number)

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
            for name in ("k_map", "v_map") if c.packed else ("q_map", "k_map", "v_map"):
                cute.arch.inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[self.get(name)])
            for stage in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(self.full_k(stage), 1)
                cute.arch.mbarrier_init(self.full_v(stage), 1)
                cute.arch.mbarrier_init(self.empty_k(stage), 4 * c.consumers)
                cute.arch.mbarrier_init(self.empty_v(stage), 4 * c.consumers)
            for stage in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(self.full_q(stage), 1)
                cute.arch.mbarrier_init(self.empty_q(stage), 4 * c.consumers)
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


def packed_here(values: list[Any], element: str) -> Int32:
    """Two numbers rounded, next to the instructions that compute them: the compiler would move conversions behind the branch that follows,
    where no other instruction hides them."""
    kind = "bf16x2" if element == "bf16" else "f16x2"
    return cute.arch.inline_ptx(f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=values[::-1])


def again(steps: list[tuple[Any, Any]] | None) -> list[tuple[Any, Any]] | None:
    """The same numbers, which the compiler takes for others: it would keep what follows from them until it is needed once more."""
    if steps is None:
        return None
    found = [tuple(cute.arch.shuffle_sync_bfly(x, offset=0) for x in row) for row in steps[: 1 if steps[0] is steps[1] else 2]]
    return [found[0], found[-1]]


def multiply_add_here(x: Any, number: int, y: Any) -> Float32:
    """x * number + y, in a loop where it does not change but would take a register for each number."""
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    code = f"fma.rn.f32 {{$w0}}, {{$r0}}, 0f{bits:08X}, {{$r1}};"
    return cute.arch.inline_ptx(code, write_only_types=[Float32], read_only_args=[x, y])


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
        "q_map": ("tensor_map", element), "counter": ("pointer", Int32),
        "out": ("pointer", Float32 if config.split else element), "lse": ("pointer", Float32), "scale": ("scalar", Float32),
        **{name: ("scalar", Float32) for name in CAP_NUMBERS},
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
