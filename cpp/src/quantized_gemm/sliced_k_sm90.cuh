// Sliced-K: the warpgroups of a CTA that share out each stage's k bring their sums together in shared memory.
#pragma once

#include "quantized_gemm/stage_sm90.cuh"

namespace minfer::w4a16 {

/// The other slices' sums are added to the first one's, in their order. Returns whether this warpgroup has them now.
template <class S, class Storage, class Accumulator>
CUTLASS_DEVICE bool add_slices(Storage& storage, Accumulator& accumulator, int consumer, int thread) {
  if constexpr (S::kSlices > 1) {
    int const slice = consumer / S::kRowGroups, rows = consumer % S::kRowGroups;
    int const written = S::kRowGroups + 1 + rows, read = 2 * S::kRowGroups + 1 + rows;  // barriers; the epilogues have 1 to S::kRowGroups
    static_assert(3 * S::kRowGroups < S::kBookBarrier);
    if (slice > 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < S::kValues / 4; ++i) {
        storage.slices.of[slice - 1][rows][i][thread] =
            make_float4(accumulator(4 * i), accumulator(4 * i + 1), accumulator(4 * i + 2), accumulator(4 * i + 3));
      }
      asm volatile("bar.arrive %0, %1;" ::"r"(written), "n"(S::kSlices * 128) : "memory");
      asm volatile("bar.sync %0, %1;" ::"r"(read), "n"(S::kSlices * 128) : "memory");
      return false;
    }
    asm volatile("bar.sync %0, %1;" ::"r"(written), "n"(S::kSlices * 128) : "memory");
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
    asm volatile("bar.arrive %0, %1;" ::"r"(read), "n"(S::kSlices * 128) : "memory");
  }
  return true;
}

}  // namespace minfer::w4a16
