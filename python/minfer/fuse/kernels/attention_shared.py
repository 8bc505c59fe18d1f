"""The shared memory of attention kernels for sm_90a: barriers, words and operands.

k and v: a ring of `stages` tiles each, full by TMA's bytes, empty by an arrival of each consumer warp. q: two published tiles, full by
TMA's bytes, empty likewise when their queries and their record have been read.
A warpgroup's word of a tile of keys is 16 * tile + 4 * kind of the next tile + kind; a next tile of the kind NOTHING means that this is the
last, and a word of NOTHING that the tile of queries visits no keys.
Numbers by key: what functions look up by a key's position alone, [value][keys] for each tile of keys. They are full with their tile's keys,
and have places for twice as many tiles: a warpgroup reads them when it has given the keys' stage back, and has read them when it gives
that stage back once more.
Operands: queries [head_dim / 64][rows][64] in their stages, then stages of keys, then of values, [head_dim / 64][keys][64] each, all with
the swizzle of 128 bytes.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from ..attention_config import AttentionConfig
from .attention_instructions import held
from .attention_tiles import PLACE

_WORDS = 4  # of a stage: of up to four warpgroups


class SharedMemory:
    def __init__(self, config: AttentionConfig):
        self.config = c = config
        barriers = cute.arch.alloc_smem(Int64, 4 * c.stages + 4, alignment=8)  # full_k, empty_k, full_v, empty_v, full_q, empty_q
        words = cute.arch.alloc_smem(Int32, _WORDS * c.stages + 2 * PLACE, alignment=16)
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        base = held((base + 1023) & Int32(-1024))
        self.barriers = cute.make_ptr(Int64, held(barriers.toint()), cute.AddressSpace.smem, assumed_align=8)
        self.words = held(words.toint())
        self.q_bytes, self.tile_bytes = 2 * c.head_dim * c.rows, 2 * c.head_dim * c.keys
        self.q_base = base
        self.k_base = base + c.query_stages * self.q_bytes
        self.v_base = base + (c.query_stages * self.q_bytes + c.stages * self.tile_bytes)
        self.numbers_base = base + (c.query_stages * self.q_bytes + 2 * c.stages * self.tile_bytes)

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

    def read_word(self, stage: Any, group: Any) -> Any:
        return cute.arch.make_warp_uniform(self.shared_words(stage * _WORDS + group, 1)[0])

    def numbers_of_keys(self, stage: Any, phase: Any) -> Any:
        """The address of a tile's numbers by key: of the keys in a stage, when its barriers have this phase."""
        return self.numbers_base + (stage + phase * self.config.stages) * self.config.key_bytes

    def key_numbers(self, numbers: Any, words: int, dtype: Any, column: Any, count: int) -> cute.Tensor:
        """``count`` neighbouring numbers of a tile's value that has ``words`` words of each key in front of it."""
        size = 8 if dtype is Int64 else 4
        address = numbers + column * size + words * 4 * self.config.keys
        return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=count * size), cute.make_layout(count))

    def record(self, stage: Any) -> cute.Tensor:
        """Of a published tile of queries: head, batch, block, part, keys."""
        return self.shared_words(_WORDS * self.config.stages + stage * PLACE, PLACE)

    def advance(self, at: Any, phase: Any) -> tuple[Any, Any]:
        """The stage behind one, and the phase of its barriers."""
        wraps = at == self.config.stages - 1
        return cutlass.select_(wraps, Int32(0), at + 1), cutlass.select_(wraps, phase ^ 1, phase)
