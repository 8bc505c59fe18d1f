// Which tile of queries comes next: persistent CTAs, the longest tiles first.
//
// Sequences of one length: (batch, head unit) pairs are cut into sections whose K and V fit in L2 together; a section's tiles go from the last
// queries to the first, so that under a causal mask the long ones come first. Varlen: the same for each sequence; a table in shared memory
// finds the sequence of a tile. A CTA's first tile is its number; the next are handed out by a counter in global memory, or, where all tiles
// cost the same, follow at a fixed distance.
#pragma once

#include <cstdint>

#include "attention/prefill_params.h"

namespace minfer::attention {

struct QueryTile {
  int32_t batch, head_unit;
  int32_t first;  // query of the sequence that the tile's row 0 belongs to
  int32_t seqlen_q, seqlen_k;
  int32_t row_q, row_k;  // where the sequence begins in q and k
};

template <int kTileM>
struct PrefillTiles {
  static constexpr int kTable = 512;
  struct Storage {
    int32_t first_tile[kTable + 1];  // of each group of `step` sequences
    int32_t warp_total[32];
  };

  static __device__ int queries_of(PrefillParams const& p, int b) { return __ldg(p.cu_seqlens_q + b + 1) - __ldg(p.cu_seqlens_q + b); }
  static __device__ int tiles_of(PrefillParams const& p, int queries) { return (queries * p.pack + kTileM - 1) / kTileM; }
  static __device__ int step_of(PrefillParams const& p) { return p.batch > kTable ? (p.batch + kTable - 1) / kTable : 1; }

  /// By all `threads` of the CTA, after the kernel's predecessor has finished.
  static __device__ void build(Storage& storage, PrefillParams const& p, int thread, int threads) {
    if (p.cu_seqlens_q == nullptr) return;
    int const lane = thread % 32, warp = thread / 32, step = step_of(p), groups = (p.batch + step - 1) / step;
    int32_t carry = 0;
    if (thread == 0) storage.first_tile[0] = 0;
    for (int base = 0; base < groups; base += threads) {
      int const g = base + thread;
      int32_t sum = 0;
      for (int b = g * step; g < groups && b < (g + 1) * step && b < p.batch; ++b) sum += tiles_of(p, queries_of(p, b)) * p.head_units;
#pragma unroll
      for (int s = 1; s < 32; s *= 2) {
        int32_t const before = __shfl_up_sync(0xffffffffu, sum, s);
        if (lane >= s) sum += before;
      }
      if (lane == 31) storage.warp_total[warp] = sum;
      __syncthreads();
      int32_t all = 0;
      for (int w = 0; w < threads / 32; ++w) {
        int32_t const total = storage.warp_total[w];
        if (w < warp) sum += total;
        all += total;
      }
      if (g < groups) storage.first_tile[g + 1] = carry + sum;
      carry += all;
      __syncthreads();
    }
  }

  static __device__ int32_t count(Storage const& storage, PrefillParams const& p) {
    if (p.cu_seqlens_q == nullptr) return p.q_tiles * p.head_units * p.batch;
    int const step = step_of(p);
    return storage.first_tile[(p.batch + step - 1) / step];
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
      int const step = step_of(p), groups = (p.batch + step - 1) / step;
      int low = 0, high = groups;  // first_tile[low] <= tile < first_tile[high]
      while (high - low > 1) {
        int const middle = (low + high) / 2;
        if (storage.first_tile[middle] <= tile) {
          low = middle;
        } else {
          high = middle;
        }
      }
      int32_t rest = tile - storage.first_tile[low];
      int b = low * step;
      int32_t tiles = tiles_of(p, queries_of(p, b));
      while (rest >= tiles * p.head_units) {
        rest -= tiles * p.head_units;
        tiles = tiles_of(p, queries_of(p, ++b));
      }
      int32_t const from_end = rest / p.head_units;
      found.batch = b;
      found.head_unit = rest - from_end * p.head_units;
      block = tiles - 1 - from_end;
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
