// Epilogue of the portable GEMMs whose output is one matrix, or a batch of them: fp32 accumulators through shared memory, some rows of D at
// a time, finished and stored by the general, coalesced loop (epilogue.cuh), whose warps write 32 neighbours of n.
//
// Staging is [rows of D][columns + padding] fp32. The padding keeps addresses affine and puts the values that a warp stores together in
// different banks: 8 columns where a thread's pairs of values are neighbours of a row; 4 where the operands are swapped and they are
// neighbours of a column.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "gemm/epilogue.cuh"
#include "gemm/tile_scheduler.h"

namespace minfer::gemm {

/// Where operands have 8 bits.
struct ScaledEpilogueSm80Params : EpilogueParams, ScaledOutput {};

/// kStageBytes: 0 where the staging holds the whole tile, in bytes that no thread reads any more when the mainloop returns. Else the
/// staging is one stage of this size, which other threads may still read then.
template <class Config, class TiledMma, int kStageBytes = 0>
class EpilogueSm80 {
  static constexpr int kThreads = Config::kThreads;
  static constexpr bool kSwap = Config::kSwap, kInStage = kStageBytes > 0, kScaled = size_of(Config::kType) == 1;
  static constexpr int kRows = kSwap ? Config::kTileN : Config::kTileM, kColumns = kSwap ? Config::kTileM : Config::kTileN;
  static constexpr int kStagedRow = kColumns + (kSwap ? 4 : 8);
  static constexpr int staged_rows() {
    int rows = kRows;
    while (kInStage && rows * kStagedRow * 4 > kStageBytes) rows /= 2;
    return rows;
  }
  static constexpr int kStagedRows = staged_rows();
  static constexpr int kRowMode = kSwap ? 1 : 0, kColumnMode = 1 - kRowMode;  // of the MMA's (m,n)
  static_assert(kStagedRows % cute::tile_size<kRowMode>(TiledMma{}) == 0 && (kStagedRows & (kStagedRows - 1)) == 0);

 public:
  using Params = cute::conditional_t<kScaled, ScaledEpilogueSm80Params, EpilogueParams>;
  struct TensorStorage {
    float staged[kStagedRows * kStagedRow];
  };
  struct PipelineStorage {};

  CUTLASS_DEVICE EpilogueSm80(Params const& params, TensorStorage& storage, PipelineStorage&, int, int thread)
      : params_(params), staged_(storage.staged), thread_(thread) {}
  CUTLASS_DEVICE void move_staging(TensorStorage& storage) { staged_ = storage.staged; }

  /// In tiles of the kernel's own m and n.
  using Output = TileCoord;
  static CUTLASS_DEVICE Output locate(TileCoord const& tile, int) { return tile; }

  template <class SchedulerParams, class SchedulerStorage>
  static CUTLASS_DEVICE void begin(Params const&, SchedulerParams const&, SchedulerStorage const&, int, int) {}
  CUTLASS_DEVICE void prefetch(Output const&) {}

  /// accumulator: (MMA,MMA_M,MMA_N), partitioned by TiledMma.
  template <class Accumulator>
  CUTLASS_DEVICE void store(Accumulator const& accumulator, Output const& tile) const {
    using namespace cute;
    int const first_row = kSwap ? tile.n * Config::kTileN : tile.m * Config::kTileM;
    int const first_column = kSwap ? tile.m * Config::kTileM : tile.n * Config::kTileN;
    auto const row_of = [](auto const& coordinate) { return get<kRowMode>(coordinate); };
    auto const column_of = [](auto const& coordinate) { return get<kColumnMode>(coordinate); };
    Tensor whole = make_identity_tensor(Shape<Int<Config::kTileM>, Int<Config::kTileN>>{});
    auto const thread_first = TiledMma{}.get_slice(thread_).partition_C(whole)(_0{});
    Tensor value_offsets = TiledMma{}.get_slice(_0{}).partition_C(whole);  // (MMA,MMA_M,MMA_N) -> (m,n), counted from thread_first
    float* const thread_staged = staged_ + row_of(thread_first) * kStagedRow + column_of(thread_first);
    int row = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    do {
      if (kInStage) __syncthreads();  // all have read the stage, or the previous rows
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(accumulator); ++i) {
        int const value_row = row_of(value_offsets(i));
        if (kStagedRows == kRows || value_row / kStagedRows == row / kStagedRows) {
          thread_staged[value_row % kStagedRows * kStagedRow + column_of(value_offsets(i))] = accumulator(i);
        }
      }
      __syncthreads();
      if constexpr (kScaled) {
        store_scaled(first_row + row, first_column, tile.l);
      } else {
        store_rectangle(Float16<Config::kType>{}, params_, first_row + row, first_column, tile.l, kStagedRows, kColumns, thread_, kThreads,
                        [&](int r, int c) { return staged_[r * kStagedRow + c]; });
      }
      row += kStagedRows;
    } while (row < kRows && first_row + row < params_.m);
  }

 private:
  static CUTLASS_DEVICE float scale_of(ScaleVector const& scales, int at) {
    return scales.data == nullptr ? 1.0f : load_operand(scales.data + at * scales.stride);
  }
  /// The staged rows, of operands with 8 bits.
  CUTLASS_DEVICE void store_scaled(int m0, int n0, int l) const {
    auto const staged = [&](int r, int c) { return staged_[r * kStagedRow + c]; };
    if (params_.integers) {
      store_integers(params_, m0, n0, l, kStagedRows, kColumns, thread_, kThreads, staged);
      return;
    }
    store_rectangle(AnyFloat16{params_.bf16}, params_, m0, n0, l, kStagedRows, kColumns, thread_, kThreads, [&](int r, int c) {
      float const value = without_zero(params_, staged(r, c), m0 + r, n0 + c);
      return value * (scale_of(params_.m_scales, m0 + r) * scale_of(params_.n_scales, n0 + c));
    });
  }

  Params const& params_;
  float* staged_;
  int thread_;
};

}  // namespace minfer::gemm
