// Gathers the rows of A that belong to a tile into the stages of the ring, by cp.async: the work of the producer warpgroup's other warps.
//
// A stage's tokens are columns of 128 bytes, [kRows][128 bytes] each, with 16-byte vector v of a row at v ^ row % 8, as TMA would store
// them. While the weights of the ring are in flight a load takes as long as theirs, microseconds. So the copies of all stages are in flight
// together, and the row numbers of a tile are loaded one tile ahead. The consumers execute the fence between the proxy of cp.async and that
// of the tensor cores: here it would wait for the copies in flight. A row number outside of A gives a row of zeros: no value of `gather`
// leads outside of it.
#pragma once

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "common/named_barrier.cuh"
#include "common/ring.cuh"
#include "cutlass/arch/barrier.h"
#include "moe/grouped/expert_tiles.cuh"

namespace minfer::moe {

/// kHalves: 128-byte columns of a stage. kBarrier: the number of a named barrier without another use. kWarps_: those that gather.
template <int kRows, int kHalves, int kStages, int kBarrier, int kWarps_ = kRows <= 16 ? 1 : 3>
struct RowGather {
  static constexpr int kWarps = kWarps_, kThreads = 32 * kWarps;
  static constexpr int kRowsAtOnce = kThreads / 8;  // eight threads load the 128 bytes of a row
  // Copies of a thread whose sources are read together.
  static constexpr int kBatch = kRows >= 6 * kRowsAtOnce ? 6 : (kRows - 1) / kRowsAtOnce + 1;
  static constexpr int kThreadRows = (kRows + kThreads - 1) / kThreads;  // rows of a tile whose numbers a thread loads
  static constexpr uint32_t kNoRow = ~0u, kZeroRow = kNoRow - 1;         // no token; a token with a row number outside of A

  static __device__ void synchronize() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      ConstantNamedBarrier<kBarrier, kThreads>::sync();
    }
  }

  /// Shared memory: `source` has kRows words; `full` and `empty` are the ring's barriers, and a stage's full one expects kThreads arrivals;
  /// `tokens` is the shared address of the first stage's tokens.
  struct Stages {
    uint32_t* source;
    uint64_t *full, *empty;
    uint32_t tokens;
  };

  /// Where a token's row comes from.
  template <class Element>
  struct Source {
    Element const* a;       // [a_rows, k]
    int32_t const* gather;  // [rows]
    uint32_t a_rows;
    uint32_t row_vectors;  // of 16 bytes, from one row of a to the next; a_rows * row_vectors is less than kZeroRow
    int32_t k;
  };

  /// Loads the tiles first, first + step, ... of `tiles`; at(t) describes tile t.
  template <class Element, class At>
  static __device__ void run(Stages const& stages, At const& at, int first, int tiles, int step, int k_tiles, Source<Element> const& from,
                             int thread) {
    auto ring = Ring<kStages>::of_producer();
    int tokens = 0;
    uint32_t sources[kThreadRows];
    auto const load_row_numbers = [&](int t) {
      ExpertTile const tile = at(t);
      tokens = tile.tokens;
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        int const row = thread + i * kThreads;
        sources[i] = kNoRow;
        if (row < tile.tokens) {
          uint32_t const source = uint32_t(load_operand(from.gather + tile.row + row));
          sources[i] = source < from.a_rows ? source * from.row_vectors : kZeroRow;
        }
      }
    };
    if (first < tiles) load_row_numbers(first);
    for (int t = first; t < tiles; t += step) {
      synchronize();  // the copies of the previous tile have read their sources
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        if (kRows % kThreads == 0 || thread + i * kThreads < kRows) stages.source[thread + i * kThreads] = sources[i];
      }
      synchronize();
      int const rows = tokens;
      if (t + step < tiles) load_row_numbers(t + step);
#pragma unroll 1
      for (int i = 0; i < k_tiles; ++i) {
        cutlass::arch::ClusterBarrier::wait(&stages.empty[ring.index], ring.phase);
        load(stages.tokens + ring.index * (kRows * kHalves * 128), stages.source, from.a, i * kHalves * (128 / int(sizeof(Element))),
             from.k, rows, thread);
        cutlass::arch::cpasync_barrier_arrive_noinc(&stages.full[ring.index]);
        ring.advance();
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  /// The 128 * kHalves bytes from column0 on of A's rows, of the first `tokens` rows of the tile; zeros behind k.
  template <class Element>
  static __device__ void load(uint32_t to, uint32_t const* source, Element const* a, int column0, int k, int tokens, int thread) {
    constexpr int kElements = 16 / int(sizeof(Element));  // of a vector
    int const vector = thread % 8, first = thread / 8;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      int const column = column0 + half * 8 * kElements + vector * kElements;
      int const bytes = min(max(k - column, 0), kElements) * int(sizeof(Element));
      char const* const from = reinterpret_cast<char const*>(a + (bytes > 0 ? column : 0));
#pragma unroll 1
      for (int row = first; row < tokens; row += kBatch * kRowsAtOnce) {
        uint32_t row_source[kBatch];  // read together: read one by one, each would wait for the copy before it
#pragma unroll
        for (int i = 0; i < kBatch; ++i) row_source[i] = row + i * kRowsAtOnce < kRows ? source[row + i * kRowsAtOnce] : kNoRow;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          int const r = row + i * kRowsAtOnce;
          if (row_source[i] != kNoRow) {
            uint32_t const destination = to + half * (kRows * 128) + r * 128 + (vector ^ r % 8) * 16;
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
                         "l"(from + uint64_t(row_source[i]) * 16), "r"(row_source[i] != kZeroRow ? bytes : 0));
          }
        }
      }
    }
  }
};

}  // namespace minfer::moe
