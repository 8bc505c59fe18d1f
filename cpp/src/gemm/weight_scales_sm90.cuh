// The block scales of a weight whose rows are the columns of a tile: what consumers multiply the sums of a k tile by, beside the scales of
// its rows.
#pragma once

#include "cutlass/cutlass.h"
#include "gemm/block_scales.cuh"

namespace minfer::gemm {

/// Where a work item's columns and k begin, which are the weight's rows and blocks of k.
struct WeightColumns {
  int column, k;
};

constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

/// Scales of tiles of kColumns, kScales of each column block: of a gated weight those of gates and of ups, else one. A lane of each warp
/// holds that of one of kKTiles k tiles, so that a k tile's are a shuffle; those of the next kKTiles are on their way. Loaded one by one,
/// they would be uniform to the compiler, which waits for such a load where it is made.
/// Tiles begin at multiples of kColumns: their columns are of one block of the weight, or of two.
template <int kColumns, int kScales>
class WeightScales {
 public:
  static constexpr int kBlock = kScaleBlock * kScales;                 // columns that share their scales
  static constexpr int kSpan = common_divisor(kColumns, kScaleBlock);  // into which blocks may divide a tile
  static constexpr int kRows = kBlock % kColumns == 0 ? 1 : 2;         // blocks of a tile
  static constexpr int kKTiles = 32;
  static_assert(kColumns <= 256 && 16 <= kSpan);

  CUTLASS_DEVICE WeightScales(BlockScales const& scales, WeightColumns const& at, int k_count, int lane)
      : scales_(scales), lane_(lane), k_(at.k), end_(at.k + k_count) {
    int const last = (scales.n - 1) / kBlock;
    row_ = at.column / kBlock < last ? at.column / kBlock : last;  // a cluster has tiles that begin behind the last column
    boundary_ = ((row_ + 1) * kBlock - at.column) / kSpan;
    load(0);
  }

  /// Calls range(begin, end) for ranges of k tiles, counted from the work item's first, each behind the other.
  template <class Range>
  CUTLASS_DEVICE void for_each_range(int k_count, Range const& range) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int begin = 0; begin < k_count; begin += kKTiles) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kScales; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r) held_[j][r] = next_[j][r];
      }
      load(begin + kKTiles);
      range(begin, begin + kKTiles < k_count ? begin + kKTiles : k_count);
    }
  }
  /// The scales of k tile `k` of a range. Asynchronous MMAs that have been sent before do not wait for them.
  CUTLASS_DEVICE void read(int k) {
    int lane = k % kKTiles;
    asm volatile("" : "+r"(lane));  // or else the shuffle, and the wait for its operand, would be moved in front of the MMAs
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kScales; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) now_[j][r] = __shfl_sync(~0u, held_[j][r], lane);
    }
  }
  /// The j-th scale of columns `span` * kSpan and on, of the k tile that was read last. `span` is known to the compiler.
  CUTLASS_DEVICE float of(int j, int span) const {
    if (kRows == 1 || span == 0) return now_[j][0];
    if (span * kSpan >= kBlock) return now_[j][kRows - 1];
    if (kColumns % kBlock == 0) return now_[j][0];
    return span < boundary_ ? now_[j][0] : now_[j][kRows - 1];
  }

 private:
  CUTLASS_DEVICE void load(int first) {
    int const block = k_ + first + lane_;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kScales; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        bool const exists = block < end_ && (r == 0 || (row_ + 1) * kBlock < scales_.n);
        next_[j][r] = exists ? scales_.weight.load(scales_.weight.offset(row_ + r, block) + (j > 0 ? scales_.up_offset : 0)) : 0.0f;
      }
    }
  }

  BlockScales const& scales_;
  int lane_, k_, end_, row_, boundary_;
  float next_[kScales][kRows], held_[kScales][kRows], now_[kScales][kRows];
};

/// Where nothing is scaled by blocks.
template <int kColumns>
class WeightScales<kColumns, 0> {
 public:
  CUTLASS_DEVICE WeightScales(BlockScales const&, WeightColumns const&, int, int) {}
  CUTLASS_DEVICE void read(int) {}
  template <class Range>
  CUTLASS_DEVICE void for_each_range(int k_count, Range const& range) {
    range(0, k_count);
  }
};

}  // namespace minfer::gemm
