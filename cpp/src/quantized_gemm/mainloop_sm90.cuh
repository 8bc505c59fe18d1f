// The mainloop of a kernel's stages: one of four.
#pragma once

#include "quantized_gemm/mainloop_accumulators_sm90.cuh"
#include "quantized_gemm/mainloop_fine_accumulators_sm90.cuh"
#include "quantized_gemm/mainloop_fragments_sm90.cuh"
#include "quantized_gemm/mainloop_sync_sm90.cuh"

namespace minfer::w4a16 {

/// accumulator = (a warpgroup's rows of the weights) x (the tile's tokens)^T over the next k_count stages, which it waits for and releases.
/// S: StageSm90. has_zeros: whether zero points are read; constants stand for them elsewhere.
template <class S, class Accumulator>
CUTLASS_DEVICE void multiply(typename S::SharedStorage& storage, typename S::Ring& ring, Accumulator& accumulator, int k_count,
                             int group_shift, bool has_zeros, int consumer, int thread) {
  if constexpr (S::kSync || S::kScaling == Scaling::kFineAccumulators) {  // compiled with and without zero points
    auto const run = [&](auto zero_points) {
      if constexpr (S::kSync) {
        mainloop_sync<S, zero_points>(storage, ring, accumulator, k_count, group_shift, consumer, thread);
      } else {
        mainloop_fine_accumulators<S, zero_points>(storage, ring, accumulator, k_count, group_shift, consumer, thread);
      }
    };
    if (S::kHasZeros && has_zeros) {
      run(cute::bool_constant<S::kHasZeros>{});
    } else {
      run(cute::false_type{});
    }
  } else if constexpr (S::kScaling == Scaling::kAccumulators) {
    mainloop_accumulators<S>(storage, ring, accumulator, k_count, group_shift, consumer, thread);
  } else {
    mainloop_fragments<S>(storage, ring, accumulator, k_count, group_shift, consumer, thread);
  }
}

}  // namespace minfer::w4a16
