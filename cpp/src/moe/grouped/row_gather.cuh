// Rows of a that a tile gathers, into a stage of the ring by cp.async: what the producer's other warps do.
//
// A stage's tokens are columns of 64 elements, [kRows][128 bytes] each, 16-byte units at u ^ row % 8, as TMA would put them. While the ring's
// weights are under way a load takes as long as they do, microseconds: all stages' copies are in flight together, and a tile's rows are looked up
// a tile ahead. The fence between cp.async's proxy and the tensor cores' is the consumers': here it would wait for the copies under way.
// A row that `a` does not have is zeros: no value of `gather` leads outside of it.
#pragma once

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "common/named_barrier.cuh"
#include "common/ring.cuh"
#include "cutlass/arch/barrier.h"
#include "moe/grouped/expert_tiles.cuh"

namespace minfer::moe {

/// kHalves: columns of 64 in a stage; kBarrier: a named one that nobody else uses.
template <int kRows, int kHalves, int kStages, int kBarrier>
struct RowGather {
  static constexpr int kWarps = kRows <= 16 ? 1 : 3, kThreads = 32 * kWarps;
  static constexpr int kRowsAtOnce = kThreads / 8;                                             // eight threads fetch the 128 bytes of a row
  static constexpr int kBatch = kRows >= 6 * kRowsAtOnce ? 6 : (kRows - 1) / kRowsAtOnce + 1;  // copies whose sources are read together
  static constexpr int kMine = (kRows + kThreads - 1) / kThreads;                              // rows whose sources a thread looks up
  static constexpr uint32_t kNoRow = ~0u, kZeroRow = kNoRow - 1;  // of no token; of one whose row `a` does not have

  static __device__ void synchronize() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      NamedBarrier<kThreads>{kBarrier}.sync();
    }
  }

  /// What `run` needs: `source` is kRows words of shared memory; `full` and `empty` the ring's barriers, of which a stage's full one expects
  /// kThreads arrivals; `tokens` is the shared address of the first stage's tokens.
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
    uint32_t row_units;  // of 16 bytes, from one row of a to the next; a_rows of them are fewer than kZeroRow
    int32_t k;
  };

  /// Walks the CTA's tiles. at(t): the t-th tile.
  template <class Element, class At>
  static __device__ void run(Stages const& stages, At const& at, int first, int tiles, int step, int k_tiles, Source<Element> const& from,
                             int thread) {
    auto ring = Ring<kStages>::of_producer();
    int tokens = 0;
    uint32_t mine[kMine];
    auto const look_up = [&](int t) {  // ahead of its use by a tile
      ExpertTile const tile = at(t);
      tokens = tile.tokens;
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        int const row = thread + i * kThreads;
        mine[i] = kNoRow;
        if (row < tile.tokens) {
          uint32_t const source = uint32_t(load_operand(from.gather + tile.row + row));
          mine[i] = source < from.a_rows ? source * from.row_units : kZeroRow;
        }
      }
    };
    if (first < tiles) look_up(first);
    for (int t = first; t < tiles; t += step) {
      synchronize();  // the previous tile's rows are not needed any more
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (kRows % kThreads == 0 || thread + i * kThreads < kRows) stages.source[thread + i * kThreads] = mine[i];
      }
      synchronize();
      int const rows = tokens;
      if (t + step < tiles) look_up(t + step);
#pragma unroll 1
      for (int i = 0; i < k_tiles; ++i) {
        cutlass::arch::ClusterBarrier::wait(&stages.empty[ring.index], ring.phase);
        fetch(stages.tokens + ring.index * (kRows * kHalves * 128), stages.source, from.a, i * kHalves * 64, from.k, rows, thread);
        cutlass::arch::cpasync_barrier_arrive_noinc(&stages.full[ring.index]);
        ring.advance();
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  /// Columns column0 to column0 + 64 * kHalves of a's k, of the first `tokens` rows; zeros behind k.
  template <class Element>
  static __device__ void fetch(uint32_t to, uint32_t const* source, Element const* a, int column0, int k, int tokens, int thread) {
    int const unit = thread % 8, first = thread / 8;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      int const column = column0 + half * 64 + unit * 8;
      int const bytes = column < k ? 16 : 0;
      char const* const from = reinterpret_cast<char const*>(a + (bytes > 0 ? column : 0));
#pragma unroll 1
      for (int row = first; row < tokens; row += kBatch * kRowsAtOnce) {
        uint32_t at[kBatch];  // read together: one by one, each would wait for the copy before it
#pragma unroll
        for (int i = 0; i < kBatch; ++i) at[i] = row + i * kRowsAtOnce < kRows ? source[row + i * kRowsAtOnce] : kNoRow;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          int const r = row + i * kRowsAtOnce;
          if (at[i] != kNoRow) {
            uint32_t const destination = to + half * (kRows * 128) + r * 128 + (unit ^ r % 8) * 16;
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(from + uint64_t(at[i]) * 16),
                         "r"(at[i] != kZeroRow ? bytes : 0));
          }
        }
      }
    }
  }
};

}  // namespace minfer::moe
