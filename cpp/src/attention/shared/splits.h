// Splits of the keys in the batch-invariant mode, and how they are folded. Splits begin at fixed positions of the sequence. Each has an
// online softmax of its own, over key blocks at fixed positions, from its last block to its first one, and splits are folded from the last
// one to the first. So what is added in which order depends on the positions of the keys alone: not on how many queries or sequences a
// launch has, and not on whether one CTA computes all splits of a tile or each one is computed by another.
// The fold is written in roundings that no compiler merges: a CTA that folds its own splits (prefill/split_totals.cuh) and the kernel that
// folds those of others (prefill/split_merge.cuh) must return the same bits. A split without a key that the row sees changes no bit: its
// maximum is -inf, so it is weighted by 0 and what was there by 1.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include "attention/shared/softmax.cuh"
#endif

namespace minfer::attention {

/// Keys of a split, at least: as many key blocks of tile_n keys as that takes, so that prompts of so many are one. Longer ones would leave
/// SMs idle where few sequences are decoded, shorter ones cost prefill more folds.
constexpr int kInvariantSplitKeys = 512;
constexpr int split_blocks_of(int tile_n) { return (kInvariantSplitKeys + tile_n - 1) / tile_n; }
constexpr int split_keys_of(int tile_n) { return split_blocks_of(tile_n) * tile_n; }

/// Key blocks of a split outside of the mode, where the number of splits is chosen (prefill/split_items.h), at least: what a tile costs
/// beside its keys would be more than they do.
constexpr int kLeastSplitBlocks = 3;

/// Whether a kernel divides keys into splits. With longer rows the registers for that would be spilled: all keys are one split there, and a
/// tile's keys are one CTA's.
constexpr bool has_splits(int head_dim) { return head_dim <= 192; }
/// Whether the totals of a kernel that folds splits are in shared memory, else in the workspace.
constexpr bool has_shared_totals(int head_dim) { return head_dim <= 128; }

#if defined(__CUDACC__)
/// The maximum (in units of log2) that a row's exponentials are relative to, and their sum; of no keys, -inf and 0.
struct SplitState {
  float max, sum;
};
/// What outputs are multiplied by: that of the splits before, and that of the split which is added.
struct SplitWeights {
  float keep, add;
};

/// Adds a split's state to the state of those before it.
__device__ __forceinline__ SplitWeights fold_state(SplitState& total, SplitState const& split) {
  float const max = fmaxf(total.max, split.max), base = max == -INFINITY ? 0.0f : max;
  SplitWeights const weights{exp2_fast(__fsub_rn(total.max, base)), exp2_fast(__fsub_rn(split.max, base))};
  total.sum = __fmaf_rn(total.sum, weights.keep, __fmul_rn(split.sum, weights.add));
  total.max = max;
  return weights;
}
/// The same for an element of the output.
__device__ __forceinline__ float fold_output(float total, float split, SplitWeights const& weights) {
  return __fmaf_rn(total, weights.keep, __fmul_rn(split, weights.add));
}
/// An element of the output times `factor`, which finish_row() returns, before it is rounded. Adding zero makes -0 to 0: the sign of a zero
/// is all that splits without keys could change.
__device__ __forceinline__ float finish_output(float total, float factor) { return __fmaf_rn(total, factor, 0.0f); }
#endif

}  // namespace minfer::attention
