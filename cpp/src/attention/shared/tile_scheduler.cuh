// Which tile of queries comes next: persistent CTAs, the longest tiles first.
//
// Sequences of one length: (batch, head unit) pairs are cut into sections whose K and V stay in L2 together; a section's tiles go from the last
// queries to the first, so that under a causal mask the long ones come first. The last section is larger where tiles differ: with few tiles a
// CTA would end long after the others. Varlen: head units of each sequence likewise, see sequence_table.cuh. A CTA's first tile is its number;
// the next are handed out by a counter in global memory, or, where all tiles cost the same, follow at a fixed distance.
#pragma once

#include <cstdint>

#include "attention/prefill/params.h"
#include "attention/shared/mask.h"
#include "attention/shared/sequence_table.cuh"

namespace minfer::attention {

struct QueryTile {
  int32_t batch, head_unit;
  int32_t first;  // query of the sequence that the tile's row 0 belongs to
  int32_t seqlen_q, seqlen_k;
  int32_t row_q, row_k;  // where the sequence begins in q and k
  int32_t first_key;     // that a query of the sequence sees: what lies before it is nobody's

  static __device__ QueryTile none() { return {-1}; }
  __device__ bool is_none() const { return batch < 0; }
};

template <int kTileM>
struct PrefillTiles {
  using Storage = SequenceTable::Storage;

  static __device__ int blocks_of(PrefillParams const& p, int b) { return (p.queries(b).count * p.pack + kTileM - 1) / kTileM; }
  static __device__ auto tiles_of(PrefillParams const& p) {
    return [&p](int b) { return blocks_of(p, b) * p.head_units; };
  }

  /// By all `threads` of the CTA, after the kernel's predecessor has finished.
  static __device__ void build(Storage& storage, PrefillParams const& p, int thread, int threads) {
    if (p.cu_seqlens_q != nullptr) SequenceTable::build(storage, p.batch, tiles_of(p), p.max_tiles, thread, threads);
  }

  static __device__ int32_t count(Storage const& storage, PrefillParams const& p) {
    return p.cu_seqlens_q == nullptr ? p.q_tiles * p.head_units * p.batch : SequenceTable::total(storage, p.batch);
  }

  /// The tile after `tile` for this CTA, by one thread: count() or more where there is none.
  static __device__ int32_t next(PrefillParams const& p, int32_t tile) {
    return p.tile_counter != nullptr ? int32_t(gridDim.x) + atomicAdd(p.tile_counter, 1) : tile + int32_t(gridDim.x);
  }

  static __device__ QueryTile at(Storage const& storage, PrefillParams const& p, int32_t tile) {
    QueryTile found;
    bool const varlen = p.cu_seqlens_q != nullptr;
    // Units are (batch, head unit) pairs or, of varlen, head units of the tile's sequence; `last` is the number of the last section.
    int32_t number = tile, units = p.batch * p.head_units, blocks = p.q_tiles, section = p.section, last = p.last_section;
    if (varlen) {
      found.batch = SequenceTable::find(storage, p.batch, tiles_of(p), tile, &number);
      int32_t const keys = p.keys(found.batch).count;
      blocks = blocks_of(p, found.batch);
      units = section = p.head_units;
      last = 0;
      if (int64_t(keys) * p.heads_kv > p.section_keys) {
        section = max(p.section_keys / keys, 1) * (p.group / p.pack);
        last = max(units - (p.last_tiles + blocks - 1) / blocks, 0) / section;
      }
    }
    int32_t const in_section = last == 0 ? 0 : min(number / (section * blocks), last), first_unit = in_section * section;
    int32_t const width = in_section < last ? section : units - first_unit;
    number -= first_unit * blocks;
    int32_t const from_end = number / width;
    found.head_unit = first_unit + number - from_end * width;
    found.first = (blocks - 1 - from_end) * (kTileM / p.pack);
    if (!varlen) {
      found.batch = found.head_unit / p.head_units;
      found.head_unit -= found.batch * p.head_units;
    }
    RowRange const queries = p.queries(found.batch), keys = p.keys(found.batch);
    found.seqlen_q = queries.count;
    found.row_q = queries.first;
    found.seqlen_k = keys.count;
    found.row_k = keys.first;
    found.first_key = Mask(queries.count, keys.count, p.window_left, p.window_right).begin(0);
    return found;
  }
};

}  // namespace minfer::attention
