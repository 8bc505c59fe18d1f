// The threads that have a row of logits together: those of a CTA, or of a cluster's CTAs.
#pragma once

#include <cstdint>

#include "common/cluster.cuh"

namespace minfer::fused {

constexpr unsigned kMostCtas = 8;  // the most that a cluster has on every device of sm_90

__device__ __forceinline__ uint64_t largest_of_warp(uint64_t x) {
  uint32_t const high = __reduce_max_sync(0xffffffffu, uint32_t(x >> 32));
  uint32_t const low = __reduce_max_sync(0xffffffffu, uint32_t(x >> 32) == high ? uint32_t(x) : 0);
  return uint64_t(high) << 32 | low;
}
/// Of parts of 22 bits, whose sums have 32.
__device__ __forceinline__ uint64_t sum_of_warp(uint64_t x) {
  constexpr uint32_t kPart = (1u << 22) - 1;
  uint64_t const low = __reduce_add_sync(0xffffffffu, uint32_t(x) & kPart);
  uint64_t const middle = __reduce_add_sync(0xffffffffu, uint32_t(x >> 22) & kPart);
  uint64_t const high = __reduce_add_sync(0xffffffffu, uint32_t(x >> 44));
  return low + (middle << 22) + (high << 44);
}

template <unsigned kThreads>
class Team {
 public:
  static constexpr unsigned kWarps = kThreads / 32;
  static constexpr int kMostValues = 3;  // that are reduced together

  struct Storage {
    // Two sets, used by turns: a set is written again only after a barrier that all threads reach after they have read it.
    uint64_t of_warp[2][kMostValues][kMostCtas * kWarps];
    uint64_t of_leader[kWarps];
  };

  __device__ __forceinline__ Team(Storage& storage, uint32_t ctas, uint32_t rank) : storage_(storage), ctas_(ctas), rank_(rank) {}

  __device__ __forceinline__ uint32_t ctas() const { return ctas_; }
  __device__ __forceinline__ uint32_t rank() const { return rank_; }
  __device__ __forceinline__ bool is_first_thread() const { return rank_ == 0 && threadIdx.x == 0; }

  __device__ __forceinline__ void synchronize() const {
    if (ctas_ > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  /// Before the CTA ends, whose shared memory others may read until they come here.
  __device__ __forceinline__ void leave() const {
    if (ctas_ > 1) {
      cluster_arrive_relaxed();
      cluster_wait();
    }
  }

  /// Adds up the threads' values; of the first kMaxima the largest is found. Each warp tells all CTAs, so that one barrier is enough.
  template <int kMaxima, int kValues>
  __device__ __forceinline__ void reduce(uint64_t (&x)[kValues]) {
    static_assert(kValues <= kMostValues);
    uint32_t const lane = threadIdx.x % 32;
    auto& of_warp = storage_.of_warp[set_];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      x[i] = i < kMaxima ? largest_of_warp(x[i]) : sum_of_warp(x[i]);
      if (lane < ctas_) store_to_cta(&of_warp[i][rank_ * kWarps + threadIdx.x / 32], x[i], int(lane));
    }
    synchronize();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      x[i] = 0;
      for (uint32_t warp = lane; warp < ctas_ * kWarps; warp += 32) {
        uint64_t const other = of_warp[i][warp];
        x[i] = i < kMaxima ? max(x[i], other) : x[i] + other;
      }
      x[i] = i < kMaxima ? largest_of_warp(x[i]) : sum_of_warp(x[i]);
    }
    set_ ^= 1;
  }

  /// The largest value of a CTA's threads. Once for each kernel.
  __device__ __forceinline__ uint64_t largest_of_cta(uint64_t x) {
    x = largest_of_warp(x);
    if (threadIdx.x % 32 == 0) storage_.of_leader[threadIdx.x / 32] = x;
    __syncthreads();
    return largest_of_warp(storage_.of_leader[threadIdx.x % kWarps]);
  }

 private:
  Storage& storage_;
  uint32_t ctas_, rank_;
  int set_ = 0;
};

}  // namespace minfer::fused
