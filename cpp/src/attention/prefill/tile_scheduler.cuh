// Prefill's tile scheduler: which tile of queries comes next. CTAs are persistent, and the longest tiles come first.
//
// Sequences of one length: the (batch, head tile) pairs are cut into sections whose K and V stay in L2 together. A section's tiles are
// walked from the last queries to the first, so that under a causal mask the tiles with most keys come first. Where tiles differ in cost,
// the last section is larger: with few tiles left, a CTA with a long tile would end long after the others.
// Varlen: each sequence's head tiles are cut into sections likewise, and sequence_table.cuh finds a tile's sequence.
// A CTA's first tile is its own number. The following ones come from a counter in global memory, or, where all tiles cost the same, each at
// a fixed distance from the one before.
#pragma once

#include <cstdint>

#include "attention/prefill/params.h"
#include "attention/shared/mask.h"
#include "attention/shared/sequence_table.cuh"

namespace minfer::attention {

struct QueryTile {
  int32_t batch, head_tile;
  int32_t first;  // query of the sequence to which row 0 of the tile belongs
  int32_t seqlen_q, seqlen_k;
  int32_t row_q, row_k;  // where the sequence begins in q and k
  int32_t first_key;     // the first key that any query of the sequence sees; keys before it are masked for the whole sequence

  __device__ bool is_none() const { return batch < 0; }
};

/// kReverses: CTAs without a counter take their second tiles in reverse.
template <int kTileM, class Table = SequenceTable, bool kReverses = false>
struct PrefillTileScheduler {
  using Storage = typename Table::Storage;

  static __device__ int q_tiles(PrefillParams const& p, int b) { return (p.queries(b).count * p.packed_heads + kTileM - 1) / kTileM; }
  static __device__ auto tile_count(PrefillParams const& p) {
    return [&p](int b) { return q_tiles(p, b) * p.head_tiles; };
  }

  /// Called by all `threads` of the CTA, after the preceding kernel of the stream has finished.
  static __device__ void build(Storage& storage, PrefillParams const& p, int thread, int threads) {
    if (p.cu_seqlens_q != nullptr) Table::build(storage, p.batch, tile_count(p), p.max_tiles, thread, threads);
  }

  static __device__ int32_t count(Storage const& storage, PrefillParams const& p) {
    return p.cu_seqlens_q == nullptr ? p.q_tiles * p.head_tiles * p.batch : Table::total(storage, p.batch);
  }

  /// The CTA's next tile after `tile`, or a number >= count() where none is left. Called by one thread. In reverse, the CTA with the
  /// shortest first tile has the longest second one, as it would have with a counter.
  static __device__ int32_t next(PrefillParams const& p, int32_t tile) {
    int32_t const ctas = int32_t(gridDim.x);
    if (p.tile_counter != nullptr) return ctas + atomicAdd(p.tile_counter, 1);
    return kReverses && tile < ctas ? 2 * ctas - 1 - tile : tile + ctas;
  }

  static __device__ QueryTile at(Storage const& storage, PrefillParams const& p, int32_t tile) {
    QueryTile found;
    bool const varlen = p.cu_seqlens_q != nullptr;
    // `pairs` counts (batch, head tile) pairs; with varlen, the head tiles of the tile's sequence. `last` is the number of the last
    // section.
    int32_t number = tile, pairs = p.batch * p.head_tiles, tiles = p.q_tiles, section = p.section, last = p.last_section;
    if (varlen) {
      found.batch = Table::find(storage, p.batch, tile_count(p), tile, &number);
      int32_t const keys = p.keys(found.batch).count;
      tiles = q_tiles(p, found.batch);
      pairs = section = p.head_tiles;
      last = 0;
      if (int64_t(keys) * p.heads_kv > p.section_keys) {
        section = max(p.section_keys / keys, 1) * (p.heads_per_kv / p.packed_heads);
        last = max(pairs - (p.last_tiles + tiles - 1) / tiles, 0) / section;
      }
    }
    int32_t const in_section = last == 0 ? 0 : min(number / (section * tiles), last), first_pair = in_section * section;
    int32_t const width = in_section < last ? section : pairs - first_pair;
    number -= first_pair * tiles;
    int32_t const from_end = number / width;
    found.head_tile = first_pair + number - from_end * width;
    found.first = (tiles - 1 - from_end) * (kTileM / p.packed_heads);
    if (!varlen) {
      found.batch = found.head_tile / p.head_tiles;
      found.head_tile -= found.batch * p.head_tiles;
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
