// Rows of a that a tile gathers, into a stage of the ring by cp.async: what three of the producer's four warps do.
//
// A stage's tokens are columns of 64 elements, [kRows][128 bytes] each, 16-byte units at u ^ row % 8, as TMA would put them. The fence between
// cp.async's proxy and the tensor cores' is the consumers': here it would wait for the copies under way.
#pragma once

#include <cstdint>

#include "cutlass/arch/barrier.h"
#include "moe/expert_tiles.cuh"

namespace minfer::moe {

template <int kRows, int kHalves, int kBarrier>  // kHalves: columns of 64 in a stage; kBarrier: a named one that nobody else uses
struct RowGather {
  static constexpr int kThreads = 96, kRowsAtOnce = kThreads / 8;                              // eight threads fetch the 128 bytes of a row
  static constexpr int kBatch = kRows >= 6 * kRowsAtOnce ? 6 : (kRows - 1) / kRowsAtOnce + 1;  // copies whose sources are read together
  static constexpr uint32_t kNoRow = ~0u;

  static __device__ void synchronize() { asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory"); }

  /// Where the rows of a tile begin, in units of 16 bytes.
  static __device__ void find(uint32_t* source, int32_t const* gather, uint32_t row_units, ExpertTile const& tile, int thread) {
    synchronize();  // the previous tile's rows are not needed any more
    for (int row = thread; row < kRows; row += kThreads) {
      source[row] = row < tile.tokens ? uint32_t(__ldg(gather + tile.row + row)) * row_units : kNoRow;
    }
    synchronize();
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
            asm volatile(
                "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to + half * (kRows * 128) + r * 128 + (unit ^ r % 8) * 16),
                "l"(from + uint64_t(at[i]) * 16), "r"(bytes));
          }
        }
      }
    }
  }

  /// The thread's arrival at a stage's barrier, when its copies are there.
  static __device__ void arrive(uint64_t* full) { cutlass::arch::cpasync_barrier_arrive_noinc(full); }
  static __device__ void drain() { asm volatile("cp.async.wait_all;" ::: "memory"); }
};

}  // namespace minfer::moe
