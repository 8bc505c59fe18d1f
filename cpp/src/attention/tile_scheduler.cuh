// Which tile of queries comes next: persistent CTAs, the longest tiles first.
//
// Sequences of one length: (batch, head unit) pairs are cut into sections whose K and V fit in L2 together; a section's tiles go from the last
// queries to the first, so that under a causal mask the long ones come first. Varlen: the same for each sequence, see sequence_table.cuh. A
// CTA's first tile is its number; the next are handed out by a counter in global memory, or, where all tiles cost the same, follow at a fixed
// distance.
#pragma once

#include <cstdint>

#include "attention/prefill_params.h"
#include "attention/sequence_table.cuh"

namespace minfer::attention {

struct QueryTile {
  int32_t batch, head_unit;
  int32_t first;  // query of the sequence that the tile's row 0 belongs to
  int32_t seqlen_q, seqlen_k;
  int32_t row_q, row_k;  // where the sequence begins in q and k

  static __device__ QueryTile none() { return {-1}; }
  __device__ bool is_none() const { return batch < 0; }
};

template <int kTileM>
struct PrefillTiles {
  using Storage = SequenceTable::Storage;

  static __device__ int queries_of(PrefillParams const& p, int b) { return __ldg(p.cu_seqlens_q + b + 1) - __ldg(p.cu_seqlens_q + b); }
  static __device__ int blocks_of(PrefillParams const& p, int b) { return (queries_of(p, b) * p.pack + kTileM - 1) / kTileM; }
  static __device__ auto tiles_of(PrefillParams const& p) {
    return [&p](int b) { return blocks_of(p, b) * p.head_units; };
  }

  /// By all `threads` of the CTA, after the kernel's predecessor has finished.
  static __device__ void build(Storage& storage, PrefillParams const& p, int thread, int threads) {
    if (p.cu_seqlens_q != nullptr) SequenceTable::build(storage, p.batch, tiles_of(p), thread, threads);
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
    int32_t block;
    if (p.cu_seqlens_q == nullptr) {
      int32_t const pairs = p.batch * p.head_units, section = tile / (p.section * p.q_tiles);
      int32_t const inside = tile - section * p.section * p.q_tiles;
      int32_t const width = pairs - section * p.section < p.section ? pairs - section * p.section : p.section;
      int32_t const from_end = inside / width, pair = section * p.section + inside - from_end * width;
      found.batch = pair / p.head_units;
      found.head_unit = pair - found.batch * p.head_units;
      block = p.q_tiles - 1 - from_end;
      found.seqlen_q = p.seqlen_q;
      found.row_q = 0;
    } else {
      int32_t rest;
      int const b = SequenceTable::find(storage, p.batch, tiles_of(p), tile, &rest);
      int32_t const from_end = rest / p.head_units;
      found.batch = b;
      found.head_unit = rest - from_end * p.head_units;
      block = blocks_of(p, b) - 1 - from_end;
      found.row_q = __ldg(p.cu_seqlens_q + b);
      found.seqlen_q = queries_of(p, b);
    }
    found.first = block * (kTileM / p.pack);
    found.row_k = p.cu_seqlens_k != nullptr ? __ldg(p.cu_seqlens_k + found.batch) : 0;
    found.seqlen_k = p.cu_seqlens_k != nullptr ? __ldg(p.cu_seqlens_k + found.batch + 1) - found.row_k
                     : p.seq_lens != nullptr   ? __ldg(p.seq_lens + found.batch)
                                               : p.seqlen_k;
    return found;
  }
};

}  // namespace minfer::attention
