// Sliced-K: each stage's k is divided among the warpgroups of a CTA, whose sums are added in shared memory.
#pragma once

#include "common/named_barrier.cuh"
#include "quantized_gemm/stage_sm90.cuh"

namespace minfer::w4a16 {

/// Adds the sums of the other slices to those of the first slice, in the order of k. Returns whether this warpgroup has the first slice,
/// and so the total.
template <class S, class Storage, class Accumulator>
CUTLASS_DEVICE bool add_slices(Storage& storage, Accumulator& accumulator, int consumer, int thread) {
  if constexpr (S::kSlices > 1) {
    int const slice = consumer / S::kRowGroups, rows = consumer % S::kRowGroups;
    NamedBarrier<S::kSlices * 128> const written{S::kRowGroups + 1 + rows}, read{2 * S::kRowGroups + 1 + rows};  // epilogues have the first
    static_assert(3 * S::kRowGroups < S::kBookBarrier);
    if (slice > 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < S::kValues / 4; ++i) {
        storage.slices.of[slice - 1][rows][i][thread] =
            make_float4(accumulator(4 * i), accumulator(4 * i + 1), accumulator(4 * i + 2), accumulator(4 * i + 3));
      }
      written.arrive();
      read.sync();
      return false;
    }
    written.sync();
    CUTLASS_PRAGMA_UNROLL
    for (int other = 0; other < S::kSlices - 1; ++other) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < S::kValues / 4; ++i) {
        float4 const part = storage.slices.of[other][rows][i][thread];
        accumulator(4 * i) += part.x;
        accumulator(4 * i + 1) += part.y;
        accumulator(4 * i + 2) += part.z;
        accumulator(4 * i + 3) += part.w;
      }
    }
    read.arrive();
  }
  return true;
}

}  // namespace minfer::w4a16
