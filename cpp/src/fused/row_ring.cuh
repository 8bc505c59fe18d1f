// Whole rows that are too wide for registers: they pass through a ring in shared memory that bulk copies fill (sm_90 onward).
//
// CTAs stay, as many as are resident at once, and share the rows out by turns; a row has a CTA or the CTAs of a cluster. Each warp has a
// ring of its own: slots of a vector of 8 elements for each lane, and an mbarrier for each entry, that counts the bytes of its copies. Nobody
// but the warp reads or frees a slot, so that the warps of a CTA meet only where a row's statistics are exchanged.
// The row's vectors stay in their slots through all walks. In the last walk a slot is free when its vector has been used, and lane 0 at once
// requests the vector that is to come there, of a later row: what the ring holds beside the row is in flight all the time, also while
// statistics are exchanged and results are stored.
// With a residual, an entry has two slots, which x and the residual are copied into. The sum takes the residual's place.
// Shared memory: kRingBytes of slots in rings of 16 warps. Limits: rows of vectors whose addresses are multiples of 16 bytes; a thread has
// at most kRingVectors of a row (kRingVectors / 2 where a number has 4 bytes, or with a residual).
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "fused/row_whole.cuh"

namespace minfer::fused {

template <class T>
struct RingStorage {
  static constexpr int kWarps = kMaxRowThreads / 32;
  static constexpr int kSlotBytes = 32 * kVectorElements * int(sizeof(T));
  static constexpr int kSlots = kRingBytes / (kWarps * kSlotBytes);  // of a warp
  alignas(128) char slots[kWarps][kSlots][kSlotBytes];
  alignas(8) uint64_t full[kWarps][kSlots];  // of its entries
  RowStorage group;
};

template <class T>
class RowRing {
  using Storage = RingStorage<T>;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

 public:
  __device__ __forceinline__ RowRing(RowParams const& params, Storage& storage)
      : params_(params),
        slots_(&storage.slots[threadIdx.x / 32][0][0]),
        full_(&storage.full[threadIdx.x / 32][0]),
        streams_(params.residual.data != nullptr ? 2 : 1),
        entries_(uint32_t(Storage::kSlots) / streams_),
        lane_(threadIdx.x % 32) {
    if (lane_ == 0) {
      for (uint32_t i = 0; i < entries_; ++i) Barrier::init(&full_[i], 1);
      cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
    uint32_t const rank = params.cluster > 1 ? blockIdx.x % params.cluster : 0;
    first_ = (rank * params.threads + threadIdx.x / 32 * 32) * kVectorElements;
    step_ = params.threads * params.cluster * kVectorElements;
  }

  /// Requests as much as the ring holds, from row `row` on.
  __device__ __forceinline__ void start(uint32_t row) {
    seek(row);
    for (uint32_t i = 0; i < entries_; ++i) request(i);
  }
  /// Rows that the launch works on together.
  __device__ __forceinline__ uint32_t row_step() const { return gridDim.x / params_.cluster; }

  /// For the thread's vector j of the row.
  __device__ __forceinline__ void wait(uint32_t j) const {
    uint32_t const entry = entry_of(j), phase = phase_ ^ uint32_t(at_ + j >= entries_);
    Barrier::wait(&full_[entry], phase);
  }
  /// Of x, or of the sum in the residual's place; which = 1: of x beside a residual.
  __device__ __forceinline__ RowVector<T> read(uint32_t j, int which) const { return *slot_of(entry_of(j), which); }
  __device__ __forceinline__ void write(uint32_t j, RowVector<T> const& x) { *slot_of(entry_of(j), 0) = x; }
  /// After the last use of vector j.
  __device__ __forceinline__ void release(uint32_t j) {
    if (streams_ == 2) cutlass::arch::fence_view_async_shared();  // sums were written here, which the copies overwrite
    __syncwarp();
    request(entry_of(j));
  }
  __device__ __forceinline__ void next_row() {
    at_ += params_.vectors;
    if (at_ >= entries_) {
      at_ -= entries_;
      phase_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ uint32_t entry_of(uint32_t j) const {
    uint32_t const entry = at_ + j;
    return entry >= entries_ ? entry - entries_ : entry;
  }
  __device__ __forceinline__ RowVector<T>* slot_of(uint32_t entry, int which) const {
    return reinterpret_cast<RowVector<T>*>(slots_ + (entry * streams_ + which) * Storage::kSlotBytes) + lane_;
  }
  __device__ __forceinline__ void seek(uint32_t row) {
    requested_row_ = row;
    requested_column_ = first_;
    if (row < params_.rows) {
      x_ = row_in<T const>({params_.x.data, params_.x.outer_stride, params_.x.inner_stride}, params_.inner, row);
      if (streams_ == 2)
        residual_ =
            row_in<T const>({params_.residual.data, params_.residual.outer_stride, params_.residual.inner_stride}, params_.inner, row);
    }
  }
  /// Of the vector that comes after those requested so far, of which there may be none. One that the row lacks is complete at once.
  __device__ __forceinline__ void request(uint32_t entry) {
    if (requested_row_ >= params_.rows) return;
    if (lane_ == 0) {
      uint32_t const at = requested_column_, left = at < params_.width ? params_.width - at : 0;
      uint32_t const bytes = min(left * uint32_t(sizeof(T)), uint32_t(Storage::kSlotBytes));
      Barrier::arrive_and_expect_tx(&full_[entry], bytes * streams_);
      if (bytes > 0) {
        auto const copy = [&](T const* from, int which) {
          cute::SM90_BULK_COPY_G2S::copy(from + at, &full_[entry], slots_ + (entry * streams_ + which) * Storage::kSlotBytes,
                                         int32_t(bytes));
        };
        copy(streams_ == 2 ? residual_ : x_, 0);
        if (streams_ == 2) copy(x_, 1);
      }
    }
    requested_column_ += step_;
    if (requested_column_ - first_ >= params_.vectors * step_) seek(requested_row_ + row_step());
  }

  RowParams const& params_;
  char* slots_;     // of this warp
  uint64_t* full_;  // likewise
  uint32_t streams_, entries_, lane_;
  uint32_t first_, step_;        // column of the warp's first vector, and from one to the next
  uint32_t at_ = 0, phase_ = 0;  // entry of the row's first vector, and the parity that it completes
  uint32_t requested_row_ = 0, requested_column_ = 0;
  T const *x_ = nullptr, *residual_ = nullptr;  // of the row requested
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) row_ring_kernel(__grid_constant__ RowParams const params) {
  using T = RowType<Config::kType>;
  extern __shared__ __align__(128) char smem[];
  auto& storage = *reinterpret_cast<RingStorage<T>*>(smem);
  static_assert(sizeof(RingStorage<T>) <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
  RowRing<T> ring(params, storage);
  WholeRow<Config, RowRing<T>> row(params, storage.group, &ring);
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  row.prefetch();
  wait_for_predecessor();
#endif
  row.run();
}

template <class Config>
Status launch_row_ring(RowLaunchArguments const& arguments) {
  static std::atomic<uint64_t> allowed{0};
  if (!arguments.params.fast) return launch_slow_rows<Config>(arguments);
  LaunchShape shape = shape_of(arguments);
  shape.grid = dim3(arguments.params.groups * arguments.params.cluster);
  shape.smem_bytes = Config::kSmemBytes;
  shape.shared_memory_allowed = &allowed;
  return launch(shape, "launch", &row_ring_kernel<Config>, arguments.params);
}

}  // namespace minfer::fused
