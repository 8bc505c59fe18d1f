// Whole rows that are too wide for registers: they pass through a ring in shared memory that bulk copies fill (sm_90 onward).
//
// CTAs stay, as many as are resident at once, and share the rows out by turns; a row has a CTA or the CTAs of a cluster. Each warp has a
// ring of its own, whose stages hold a warp tile: kTileVectors vectors of 8 elements for each lane, consecutive 2 KB of the row (4 KB of
// float32), with an mbarrier that counts the bytes of the copy. Only the warp itself reads or frees a stage, so that the warps of a CTA
// synchronise only where a row's statistics are exchanged.
// The row stays in its stages through all walks. In the last walk a stage is free when its vectors have been used, and lane 0 at once
// requests the tile that is to come there, of a later row: what the ring holds in addition to the row is in flight all the time, also while
// statistics are exchanged and results are stored.
// With a residual, a stage has two tiles, which the residual and x are copied into. The sum takes the residual's place.
// Shared memory: kRingBytes for each of kRingWarps warps. Limits: rows of vectors whose addresses are multiples of 16 bytes; a thread has
// at most kRingVectors of a row (kRingVectors / 2 where a number has 4 bytes, or with a residual).
//
// 256 MB of rows of 65536 and 262144 columns on an H100, where a copy of as many bytes takes 91.5 us: rms_norm took 125 and 146 us in the
// registers of clusters, 135 and 149 in rings of copies of 512 bytes, and takes 99 and 108 in those of 2 KB. Two CTAs of 256 threads an SM,
// which need clusters of twice as many, took 103 and 109; layer_norm 123 and 159 instead of 122 and 141.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "fused/row_whole.cuh"

namespace minfer::fused {

template <class T>
struct RingStorage {
  static constexpr int kTileBytes = kTileVectors * 32 * kVectorElements * int(sizeof(T));
  static constexpr int kTiles = kRingBytes / kTileBytes;  // of a warp
  alignas(128) char tiles[kRingWarps][kTiles][kTileBytes];
  alignas(8) uint64_t full[kRingWarps][kTiles];  // of its stages
  RowStorage group;
};

template <class T>
class RowRing {
  using Storage = RingStorage<T>;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

 public:
  static constexpr uint32_t kVectorStep = 32 * kVectorElements;  // columns from one vector of a tile to the next

  __device__ __forceinline__ RowRing(RowParams const& params, Storage& storage)
      : params_(params),
        tiles_(&storage.tiles[threadIdx.x / 32][0][0]),
        full_(&storage.full[threadIdx.x / 32][0]),
        streams_(params.residual.data != nullptr ? 2 : 1),
        stages_(uint32_t(Storage::kTiles) / streams_),
        lane_(threadIdx.x % 32) {
    if (lane_ == 0) {
      for (uint32_t i = 0; i < stages_; ++i) Barrier::init(&full_[i], 1);
      cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
    uint32_t const rank = params.cluster > 1 ? blockIdx.x % params.cluster : 0;
    first_ = (rank * (params.threads / 32) + threadIdx.x / 32) * kTileVectors * kVectorStep;
    step_ = params.threads / 32 * params.cluster * kTileVectors * kVectorStep;
  }

  /// Requests as much as the ring holds, from row `row` on.
  __device__ __forceinline__ void start(uint32_t row) {
    seek(row);
    for (uint32_t i = 0; i < stages_; ++i) request(i);
  }
  /// Rows that the launch works on together.
  __device__ __forceinline__ uint32_t row_step() const { return gridDim.x / params_.cluster; }
  /// Of the first vector that the thread has of its tile `tile` of a row.
  __device__ __forceinline__ uint32_t column(uint32_t tile) const { return first_ + tile * step_ + lane_ * kVectorElements; }

  /// For the copy of the row's tile.
  __device__ __forceinline__ void wait(uint32_t tile) const {
    Barrier::wait(&full_[stage_of(tile)], phase_ ^ uint32_t(at_ + tile >= stages_));
  }
  /// Vector i of the thread: of x, or of the residual with the sum in it; which = 1: of x beside a residual.
  __device__ __forceinline__ RowVector<T>& vector(uint32_t tile, int i, int which = 0) const {
    return reinterpret_cast<RowVector<T>*>(tiles_ + (stage_of(tile) * streams_ + which) * Storage::kTileBytes)[i * 32 + lane_];
  }
  /// After the last use of a tile.
  __device__ __forceinline__ void release(uint32_t tile) {
    if (streams_ == 2) cutlass::arch::fence_view_async_shared();  // sums were written here, which the copies overwrite
    __syncwarp();
    request(stage_of(tile));
  }
  __device__ __forceinline__ void next_row() {
    at_ += params_.vectors / kTileVectors;
    if (at_ >= stages_) {
      at_ -= stages_;
      phase_ ^= 1;
    }
  }

 private:
  __device__ __forceinline__ uint32_t stage_of(uint32_t tile) const {
    uint32_t const stage = at_ + tile;
    return stage >= stages_ ? stage - stages_ : stage;
  }
  __device__ __forceinline__ void seek(uint32_t row) {
    requested_row_ = row;
    requested_column_ = first_;
    if (row >= params_.rows) return;
    auto const begin = [&](RowTensor const& x) { return row_in<T const>({x.data, x.outer_stride, x.inner_stride}, params_.inner, row); };
    x_ = begin(params_.x);
    if (streams_ == 2) residual_ = begin(params_.residual);
  }
  /// Of the tile that comes after those requested so far, of which there may be none. One that the row lacks is complete at once.
  __device__ __forceinline__ void request(uint32_t stage) {
    if (requested_row_ >= params_.rows) return;
    if (lane_ == 0) {
      uint32_t const at = requested_column_, left = at < params_.width ? params_.width - at : 0;
      uint32_t const bytes = min(left, uint32_t(kTileVectors * kVectorStep)) * uint32_t(sizeof(T));
      Barrier::arrive_and_expect_tx(&full_[stage], bytes * streams_);
      if (bytes > 0) {
        auto const copy = [&](T const* from, int which) {
          char* const to = tiles_ + (stage * streams_ + which) * Storage::kTileBytes;
          cute::SM90_BULK_COPY_G2S::copy(from + at, &full_[stage], to, int32_t(bytes));
        };
        copy(streams_ == 2 ? residual_ : x_, 0);
        if (streams_ == 2) copy(x_, 1);
      }
    }
    requested_column_ += step_;
    if (requested_column_ - first_ >= params_.vectors / kTileVectors * step_) seek(requested_row_ + row_step());
  }

  RowParams const& params_;
  char* tiles_;     // of this warp
  uint64_t* full_;  // likewise
  uint32_t streams_, stages_, lane_;
  uint32_t first_, step_;        // column of the warp's first tile, and from one to the next
  uint32_t at_ = 0, phase_ = 0;  // stage of the row's first tile, and the parity that it completes
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
