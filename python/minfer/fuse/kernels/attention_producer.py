"""The producer warp of attention for sm_90a: it takes tiles of queries, finds out which tiles of keys they visit, and loads both.

Tiles of keys. Of a block mask, those that it names. Otherwise all: the lanes look at 32 at once, and bounds of the mask's positions tell
which need not be visited, and which are seen in full, by each warpgroup's rows. Tiles that are partial for one come first, then those that
are full for all.
Tiles of queries. CTAs stay and take tiles by turns, or by a counter where a mask makes tiles differ. The next tile's queries are loaded
when this tile's last keys are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ..graph import BOOL, I32
from .attention_grid import Columns
from .attention_key_tiles import EMPTY, NOTHING, PARTIAL
from .attention_tiles import PLACE
from .numbers import REGISTERS, cast, pointer_at

if TYPE_CHECKING:
    from .attention import HopperAttention


class Producer:
    def __init__(self, kernel: HopperAttention):
        self.config, self.get = kernel.config, kernel.get
        self.functions, self.tiles, self.key_tiles, self.shared = kernel.functions, kernel.tiles, kernel.key_tiles, kernel.shared
        self.lane, self.total, self.panels = kernel.lane, kernel.total, kernel.config.head_dim // 64

    @cute.jit
    def publish(self, tile: Int32, number: Int32):
        """Makes the CTA's tile of queries of this number, or that none is left, known to the consumers, and loads its queries."""
        c = self.config
        at, phase = number & 1, (number >> 1) & 1
        inside = tile < self.total
        where = self.tiles.locate(cutlass.select_(inside, tile, Int32(0)))
        cute.arch.mbarrier_wait(self.shared.empty_q(at), phase ^ 1)
        if self.lane == 0:
            numbers = cute.make_rmem_tensor(PLACE, Int32)
            numbers.fill(0)
            numbers[0] = cutlass.select_(inside, where.head, Int32(-1))
            numbers[1], numbers[2], numbers[3], numbers[4] = where.batch, where.block, where.part, where.sk
            cute.autovec_copy(numbers, self.shared.record(at))
            count = cutlass.select_(inside, Int32(0 if c.packed else self.shared.q_bytes), Int32(0))
            cute.arch.mbarrier_arrive_and_expect_tx(self.shared.full_q(at), count)
            if cutlass.const_expr(not c.packed):
                if inside:
                    target = self.shared.q_base + at * self.shared.q_bytes
                    self.copy("q_map", target, c.rows, where.block * c.rows, where.head, where.batch, self.shared.full_q(at))
        cute.arch.sync_warp()

    @cute.jit
    def claim(self, tile: Int32):
        """Begins to find the CTA's next tile of queries, by lane 0. Where tiles differ in their keys it is the next that no CTA has."""
        taken = tile
        if cutlass.const_expr(self.config.counted):
            if (self.get("claims") != 0) & (self.lane == 0):
                taken = self.next_number()
        return taken

    def next_number(self) -> Any:
        """Of the counter. Of additions the compiler would make one for all lanes, and wait for what it gives where it is begun."""
        code = "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};"
        return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=[self.get("counter").toint(), Int32(0x7FFFFFFF)])

    def claimed(self, taken: Any) -> Any:
        """The CTA's next tile of queries."""
        return (cute.arch.shuffle_sync(taken, 0) if self.config.counted else taken) + cute.arch.grid_dim()[0]

    @cute.jit
    def produce(self):
        c = self.config
        k_at, k_phase, v_at, v_phase, number_of_tile = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        tile = cute.arch.block_idx()[0]
        self.publish(tile, number_of_tile)
        while tile < self.total:
            where = self.tiles.read(self.shared.record(number_of_tile & 1))
            first, end = self.tiles.keys_of(where)
            pending = Int32(NOTHING)  # 64 * tile + kinds
            begin, stop, wanted = first, end, Int32(0)
            some, count = Int32(0), Int32(0)
            if cutlass.const_expr(c.listed):
                some, count = self.key_tiles.list_counts(where)
                stop, wanted = count * c.listed_k, Int32(1)  # both lists at once: a look into memory takes as long as half a tile of keys
            while wanted < 2:
                begin = Int32(0) if cutlass.const_expr(c.listed) else first
                while begin < stop:
                    place = begin + self.lane
                    number = first + (end - 1) - place  # the last keys first: with a causal mask, those that the first rows do not see
                    kinds, kind = Int32(0), Int32(0)
                    if cutlass.const_expr(c.listed):
                        number, kind = self.key_tiles.listed_tile(where, place, some, count)
                        for group in cutlass.range_constexpr(c.consumers):
                            queries = self.tiles.queries_of(where, 64 * group, 64)
                            kinds = kinds | (cutlass.select_(queries[0] <= queries[1], kind, Int32(EMPTY)) << (2 * group))
                        kind = cutlass.select_(kind != EMPTY, wanted + PARTIAL, Int32(EMPTY))
                    else:
                        kinds, kind = self.key_tiles.kinds_of(where, number, end)
                        kind = cutlass.select_(number >= first, kind, Int32(EMPTY))
                    word = number * 64 + kinds
                    chosen = cute.arch.vote_ballot_sync(kind == wanted + PARTIAL)
                    while chosen != 0:
                        lowest = cute.arch.popc((chosen ^ (chosen - 1)) & 0x7FFFFFFF)
                        lowest = cutlass.select_((chosen & 0x7FFFFFFF) == 0, Int32(31), lowest - 1)
                        chosen = chosen & (chosen - 1)
                        following = cute.arch.shuffle_sync(word, lowest)
                        if pending != NOTHING:
                            self.load(where, pending, following, k_at, k_phase, v_at, v_phase)
                            k_at, k_phase = self.shared.advance(k_at, k_phase)
                            v_at, v_phase = self.shared.advance(v_at, v_phase)
                        pending = following
                    begin = begin + 32
                wanted = wanted + 1
            taken = self.claim(tile)  # it comes while a stage for the last tile of keys is waited for
            if pending != NOTHING:
                self.load(where, pending, Int32(NOTHING), k_at, k_phase, v_at, v_phase)
                v_at, v_phase = self.shared.advance(v_at, v_phase)
            else:
                cute.arch.mbarrier_wait(self.shared.empty_k(k_at), k_phase ^ 1)
                self.write_words(k_at, Int32(NOTHING), Int32(NOTHING))
                if self.lane == 0:
                    cute.arch.mbarrier_arrive(self.shared.full_k(k_at))
                cute.arch.sync_warp()
            k_at, k_phase = self.shared.advance(k_at, k_phase)
            # The other stage is that of the tile before this one. All that its consumers wait for was loaded: they will give it back.
            number_of_tile = number_of_tile + 1
            tile = self.claimed(taken)
            self.publish(tile, number_of_tile)

    @cute.jit
    def write_words(self, stage: Int32, pending: Int32, following: Int32):
        """Each warpgroup's word of a tile."""
        if self.lane < self.config.consumers:
            shift = 2 * self.lane
            word = (pending >> 6) * 16 + ((following >> shift) & 3) * 4 + ((pending >> shift) & 3)
            self.shared.write_word(stage, self.lane, word)
        cute.arch.sync_warp()

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
        cute.arch.mbarrier_wait(self.shared.empty_k(k_at), k_phase ^ 1)
        self.write_words(k_at, pending, following)
        if self.lane == 0:
            if cutlass.const_expr(c.key_words > 0):
                cute.arch.mbarrier_expect_tx(self.shared.full_k(k_at), self.shared.tile_bytes)
            else:
                cute.arch.mbarrier_arrive_and_expect_tx(self.shared.full_k(k_at), self.shared.tile_bytes)
        cute.arch.sync_warp()
        if self.lane < boxes:
            target = self.shared.k_base + k_at * self.shared.tile_bytes + box
            self.copy("k_map", target, c.keys, row, where.kv_head, page, self.shared.full_k(k_at))
        if cutlass.const_expr(c.key_words > 0):
            self.look_up(where, pending, self.shared.numbers_of_keys(k_at, k_phase))
            cute.arch.sync_warp()
            if self.lane == 0:
                cute.arch.mbarrier_arrive(self.shared.full_k(k_at))
        cute.arch.mbarrier_wait(self.shared.empty_v(v_at), v_phase ^ 1)
        if self.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.shared.full_v(v_at), self.shared.tile_bytes)
        cute.arch.sync_warp()
        if self.lane < boxes:
            target = self.shared.v_base + v_at * self.shared.tile_bytes + box
            self.copy("v_map", target, c.keys, row, where.kv_head, page, self.shared.full_v(v_at))
        cute.arch.sync_warp()

    @cute.jit
    def look_up(self, where: Any, pending: Int32, numbers: Int32):
        """A tile's numbers by key, while its keys are on their way. Masks alone need none where it is full for all warpgroups."""
        if cutlass.const_expr(len(self.functions.by_key(self.functions.score)) > 0):
            self.write_numbers(where, pending >> 6, numbers)
        else:
            if (pending & (4**self.config.consumers // 3)) != 0:  # the lower bit of each kind
                self.write_numbers(where, pending >> 6, numbers)

    def write_numbers(self, where: Any, tile: Any, numbers: Any) -> None:
        """A lane has every 32nd key. Behind the last key of all, indices are clamped to what there is, as anywhere."""
        c = self.config
        evaluator = self.functions.evaluator(where, None, Columns(tile * c.keys + self.lane, list(range(0, c.keys, 32))), None)
        found = {number: evaluator.value(number) for number in self.functions.key_places}
        for number, words in self.functions.key_places.items():
            dtype = self.functions.graph.nodes[number].dtype
            for i, offset in enumerate(range(0, c.keys, 32)):
                value = found[number].at(0, i)
                value = cast(value, BOOL, I32) if dtype == BOOL else value
                there = self.shared.key_numbers(numbers, words, REGISTERS[I32 if dtype == BOOL else dtype], self.lane + offset, 1)
                if offset + 32 <= c.keys:
                    there[0] = value
                else:
                    self.write_inside(there, value, self.lane + offset)

    @cute.jit
    def write_inside(self, there: cute.Tensor, value: Any, column: Int32):
        if column < self.config.keys:
            there[0] = value

    def copy(self, name: str, base: Any, rows: int, row: Any, head: Any, page: Any, barrier: Any) -> None:
        """A box of each 64 columns, by a lane."""
        for panel in range(self.panels):
            target = base + panel * (rows * 128)
            cute.arch.inline_ptx(
                "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}}], [{$r6}];",
                read_only_args=[target, self.get(name), Int32(64 * panel), row, head, page, barrier.toint()],
            )
