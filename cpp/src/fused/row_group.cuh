// The threads that share a row: which row it is, which vectors of a row a thread has, reductions over the row.
//
//   up to 32 threads     a part of a warp; a CTA has several rows. Reductions are exchanges in the warp
//   more                 a CTA, or the CTAs of a cluster. Warps exchange their partials in shared memory, CTAs in each other's, where an
//                        mbarrier counts what has come
//
// Vector j (8 elements) of a thread is the row's number (j * cluster + rank) * threads + thread. Partials are
// combined in the same order in every thread, so all get the same bits, and the order depends on nothing but the launch.
// Of the warps' partials each thread reads all, four to an access, and combines them itself: that takes half the time of more exchanges,
// and few rows are a chain of such steps.
#pragma once

#include "common/cluster.cuh"
#include "cutlass/arch/barrier.h"
#include "fused/row_params.h"

namespace minfer::fused {

constexpr int kMostFloats = 2;  // of what is reduced

struct RowStorage {
  // Two sets, used by turns: a set is written again only after an exchange that all threads take part in after they have read it.
  alignas(16) float of_warp[2][kMostFloats][kMaxRowThreads / 32];
  float of_cta[2][kMostFloats][8];
  uint64_t arrived[2];  // mbarriers of what CTAs send
};

class RowGroup {
 public:
  __device__ __forceinline__ RowGroup(RowParams const& params, RowStorage& storage) : params_(params), storage_(storage) {
    if (params.threads <= 32) {
      lane_ = threadIdx.x & (params.threads - 1);
      row_ = blockIdx.x * params.rows_per_cta + (threadIdx.x >> (31 - __clz(params.threads)));
    } else {
      lane_ = threadIdx.x;
      row_ = params.cluster > 1 ? blockIdx.x / params.cluster : blockIdx.x;
      rank_ = params.cluster > 1 ? uint32_t(cluster_rank()) : 0;
    }
#if __CUDA_ARCH__ >= 900
    if (params.cluster > 1) {
      if (threadIdx.x == 0) {
        for (uint64_t& barrier : storage.arrived) cutlass::arch::ClusterTransactionBarrier::init(&barrier, 1);
        cutlass::arch::fence_barrier_init();
      }
      __syncwarp();
      cluster_arrive_relaxed();
    }
#endif
  }

  /// There may be none.
  __device__ __forceinline__ uint32_t row() const { return row_; }
  __device__ __forceinline__ bool is_first_thread() const { return lane_ == 0 && rank_ == 0; }
  /// Column of the thread's first vector, and from one to the next.
  __device__ __forceinline__ uint32_t column() const { return (rank_ * params_.threads + lane_) * kVectorElements; }
  __device__ __forceinline__ uint32_t column_step() const { return params_.threads * params_.cluster * kVectorElements; }

  /// Partial: kFloats numbers v[], of nothing where it is made, and combine().
  template <class Partial>
  __device__ __forceinline__ void reduce(Partial* x) {
    reduce_lanes(x);
    reduce_warps(x);
  }
  /// Over the lanes of a warp that have the same row.
  template <class Partial>
  __device__ __forceinline__ void reduce_lanes(Partial* x) const {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      if (offset < int(params_.threads)) {
        Partial other;
#pragma unroll
        for (int i = 0; i < Partial::kFloats; ++i) other.v[i] = __shfl_xor_sync(0xffffffffu, x->v[i], offset);
        x->combine(other);
      }
    }
  }
  /// Over what the warps' lanes agree on.
  template <class Partial>
  __device__ __forceinline__ void reduce_warps(Partial* x) {
    if (params_.threads <= 32) return;
    auto& of_warp = storage_.of_warp[set_];
    uint32_t const warps = params_.threads / 32, warp_lane = threadIdx.x % 32;
    if (warp_lane == 0) {
#pragma unroll
      for (int i = 0; i < Partial::kFloats; ++i) of_warp[i][threadIdx.x / 32] = x->v[i];
    }
    if (threadIdx.x >= warps && threadIdx.x < (warps + 3) / 4 * 4) {  // the last access of four
      Partial const none;
#pragma unroll
      for (int i = 0; i < Partial::kFloats; ++i) of_warp[i][threadIdx.x] = none.v[i];
    }
    __syncthreads();
    *x = Partial{};
#pragma unroll 1
    for (uint32_t first = 0; first < warps; first += 4) {
      float4 four[Partial::kFloats];
#pragma unroll
      for (int i = 0; i < Partial::kFloats; ++i) four[i] = *reinterpret_cast<float4 const*>(&of_warp[i][first]);
      Partial a, b, c, d;
#pragma unroll
      for (int i = 0; i < Partial::kFloats; ++i) a.v[i] = four[i].x, b.v[i] = four[i].y, c.v[i] = four[i].z, d.v[i] = four[i].w;
      a.combine(b);
      c.combine(d);
      a.combine(c);
      x->combine(a);
    }
#if __CUDA_ARCH__ >= 900
    if (params_.cluster > 1) {
      auto& of_cta = storage_.of_cta[set_];
      if (!all_started_) cluster_wait();
      all_started_ = true;
      using Barrier = cutlass::arch::ClusterTransactionBarrier;
      uint64_t* const arrived = &storage_.arrived[set_];
      if (threadIdx.x == 0) Barrier::arrive_and_expect_tx(arrived, params_.cluster * Partial::kFloats * uint32_t(sizeof(float)));
      if (threadIdx.x < params_.cluster) {
#pragma unroll
        for (int i = 0; i < Partial::kFloats; ++i) send_to_cta(&of_cta[i][rank_], x->v[i], arrived, int(threadIdx.x));
      }
      Barrier::wait(arrived, phase_);
      phase_ ^= uint32_t(set_);
#pragma unroll
      for (int i = 0; i < Partial::kFloats; ++i) x->v[i] = of_cta[i][0];
      for (uint32_t rank = 1; rank < params_.cluster; ++rank) {
        Partial other;
#pragma unroll
        for (int i = 0; i < Partial::kFloats; ++i) other.v[i] = of_cta[i][rank];
        x->combine(other);
      }
    }
#endif
    set_ ^= 1;
  }

  /// At the end: no CTA of a cluster ends before all have started.
  __device__ __forceinline__ void finish() {
    if (params_.cluster > 1 && !all_started_) cluster_wait();
  }

 private:
  RowParams const& params_;
  RowStorage& storage_;
  uint32_t row_, lane_, rank_ = 0;
  int set_ = 0;
  uint32_t phase_ = 0;  // of the barrier of the set
  bool all_started_ = false;
};

/// A row's first element in a tensor.
template <class T>
__device__ __forceinline__ T* row_in(RowTensor const& x, uint32_t inner, uint32_t row) {
  uint32_t const outer = inner == 1 ? row : row / inner;
  return static_cast<T*>(x.data) + outer * x.outer_stride + (row - outer * inner) * x.inner_stride;
}

}  // namespace minfer::fused
