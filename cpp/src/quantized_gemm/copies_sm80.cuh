// The copies of the portable GEMM with 4-bit weights: packed weights, activations, scales and zero points by cp.async, zeros where a tile
// reaches beyond the operands. They walk the schedule on their own, ahead of the MMAs and over the ends of work items.
#pragma once

#include "common/mma_sm80.cuh"
#include "cutlass/cutlass.h"
#include "quantized_gemm/stage_sm80.cuh"

namespace minfer::w4a16 {

/// The operands in global memory.
struct CopySourcesSm80 {
  uint4 const* weights;         // [blocks_n, blocks_k, 128]
  uint16_t const* activations;  // [m, k]
  uint16_t const* scales;       // [groups, n]
  uint16_t const* zeros;        // likewise, or null: 8
  int64_t lda, ld_scales, ld_zeros;
  int32_t m, n, k, groups, blocks_n, blocks_k;
  int32_t group_shift;  // log2 of the group size; 31: one group
};

template <class Stage, class WorkItems>
class CopiesSm80 {
  using Item = decltype(cute::declval<WorkItems&>().first());
  static constexpr int kTileM = Stage::kTileM, kTileN = Stage::kTileN, kTileK = Stage::kTileK;
  static constexpr int kThreads = Stage::kThreads, kBlocks = Stage::kBlocks;

 public:
  CUTLASS_DEVICE CopiesSm80(CopySourcesSm80 const& sources, WorkItems const& items, int thread)
      : sources_(sources), items_(items), thread_(thread) {
    begin(items_.first());
  }

  /// Starts the copies of the next k tile, one group of them; an empty one when the walk is over, so that groups stay in step with k tiles.
  CUTLASS_DEVICE void copy(Stage& stage) {
    if (items_.valid(item_)) {
      copy_weights(stage);
      copy_activations(stage);
      copy_scales(stage);
      if (++k_ == k_end_) begin(items_.next(item_));
    }
    commit_copies();
  }

 private:
  /// The first item from this one on that has k tiles.
  CUTLASS_DEVICE void begin(Item item) {
    while (items_.valid(item) && item.k_count == 0) item = items_.next(item);
    item_ = item;
    if (!items_.valid(item)) return;
    auto const tile = items_.tile(item);
    k_ = item.k_begin;
    k_end_ = item.k_begin + item.k_count;
    row_ = tile.m * kTileM;
    token_ = tile.n * kTileN;
  }

  CUTLASS_DEVICE void copy_weights(Stage& stage) const {
    constexpr int kCopies = Stage::kMmaM * kBlocks, kWarpgroups = Stage::kWarpgroups;
#pragma unroll
    for (int i = 0; i < kCopies; i += kWarpgroups) {
      int const u = i + thread_ / 128, mi = u / kBlocks, block = u % kBlocks;
      if (kCopies % kWarpgroups == 0 || u < kCopies) {
        int const block_n = row_ / kBlockN + mi, block_k = k_ * kBlocks + block;
        uint4 const* source = sources_.weights + (int64_t(block_n) * sources_.blocks_k + block_k) * 128 + thread_ % 128;
        copy_async_16(&stage.weights[mi][block][thread_ % 128], source, block_n < sources_.blocks_n && block_k < sources_.blocks_k);
      }
    }
  }

  /// Eight threads copy 64 of k of a token.
  CUTLASS_DEVICE void copy_activations(Stage& stage) const {
    constexpr int kTogether = kThreads / 8;                           // tokens, or tokens of several blocks
    constexpr int kTokens = kTileN < kTogether ? kTileN : kTogether;  // different ones
    int const vector = thread_ % 8;
#pragma unroll
    for (int i = 0; i < kBlocks * kTileN; i += kTogether) {
      int const t = thread_ / 8 % kTokens + i % kTileN, block = i / kTileN + thread_ / 8 / kTokens;
      if (kBlocks * kTileN % kTogether == 0 || block < kBlocks) {
        int const column = k_ * kTileK + block * kBlockK + vector * 8;
        uint16_t const* source = sources_.activations + int64_t(token_ + t) * sources_.lda + column;
        copy_async_16(&stage.activations[block][t][vector ^ t % 8], source, token_ + t < sources_.m && column < sources_.k);
      }
    }
  }

  CUTLASS_DEVICE void copy_scales(Stage& stage) const {
    constexpr int kVectors = kTileM / 8;
    static_assert(Stage::kScaleRows * kVectors <= kThreads);
    int const scale_row = thread_ / kVectors, column = thread_ % kVectors * 8;
    if (scale_row == 0 || scale_row < kTileK >> sources_.group_shift) {
      int const group = (k_ * kTileK >> sources_.group_shift) + scale_row;
      bool const inside = row_ + column < sources_.n && group < sources_.groups;
      copy_async_16(&stage.scales[scale_row][column], sources_.scales + group * sources_.ld_scales + row_ + column, inside);
      if (sources_.zeros != nullptr) {
        copy_async_16(&stage.zeros[scale_row][column], sources_.zeros + group * sources_.ld_zeros + row_ + column, inside);
      }
    }
  }

  CopySourcesSm80 const& sources_;
  WorkItems items_;
  int const thread_;
  Item item_;
  int k_ = 0, k_end_ = 0;  // in k tiles
  int row_ = 0, token_ = 0;
};

}  // namespace minfer::w4a16
