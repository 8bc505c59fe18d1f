// The compile-time facts of a batch-invariant kernel for few rows (few_rows_sm90.cuh): sizes, shared memory, layouts and MMAs.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "attention/prefill/smem_layouts.cuh"
#include "attention/prefill/tile_facts.cuh"
#include "common/cutlass_element.cuh"
#include "common/ring.cuh"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace minfer::attention {

template <class Config>
struct FewRowsTraits : PrefillTileFacts<Config> {
  using Facts = PrefillTileFacts<Config>;
  using Facts::kConverts, Facts::kHeadDim, Facts::kSplitBlocks, Facts::kTileM, Facts::kTileN, Facts::kType;
  using Facts::kMmaType, Facts::kScalesQueries;
  using typename Facts::Tile, typename Facts::TileScheduler;
  using Element = CutlassElement<kType>;        // of queries in global memory, and of the output
  using MmaElement = CutlassElement<kMmaType>;  // of the MMAs' operands
  static constexpr int kStages = Config::kStages, kQueryStages = 2;
  static constexpr int kProducerWarps = kConverts ? 4 : 1, kThreads = 128 + 32 * kProducerWarps;  // warps 0 to 3 are the consumers
  static constexpr int kConsumerRegisters = 120, kConverterRegisters = 136;  // of a thread, where keys and values are converted
  static constexpr int kSplitKeys = kSplitBlocks * kTileN, kPanels = (kSplitKeys + 63) / 64;
  static constexpr int kScoreTiles = (kTileN + 63) / 64;  // MMAs of 64 keys that a block takes; the last ones may overlap
  static constexpr int kScorePitch = kSplitKeys + 8;      // floats: eight keys of four rows are in different banks
  static_assert(Facts::kFolds && kTileM == 8 && Config::kHeadDimV == kHeadDim && kTileN % 16 == 0 && kTileN >= 64 && kHeadDim % 64 == 0);
  static_assert(kSplitBlocks % 2 == 0, "two threads share the blocks of a row's column");

  struct SharedStorage {
    alignas(1024) MmaElement q[kQueryStages][kTileM * kHeadDim];  // [head_dim / 64][row][64], with the 128-byte swizzle, as of the next two
    alignas(1024) MmaElement ring[kStages][kTileN * kHeadDim];    // blocks of keys, then of values: [head_dim / 64][key][64]
    alignas(1024) MmaElement probabilities[kPanels * kTileM * 64];  // [panel of 64 keys][row][64]
    alignas(16) float scores[kTileM * kScorePitch];                 // [row][key]
    SplitState states[kTileM];
    float block_max[kTileM][kSplitBlocks], rescale[kTileM][kSplitBlocks], block_sum[kTileM][kSplitBlocks][4], row_max[kTileM];
    float query_scale[kTileM];  // what scores are multiplied by: scale_queries.cuh
    alignas(8) uint64_t full_q[kQueryStages], empty_q[kQueryStages], full[kStages], empty[kStages], full_tile[2], empty_tile[2];
    Tile tile[2];
    typename TileScheduler::Storage tiles;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));

  using Ring = minfer::Ring<kStages>;
  static __device__ int query_stage(int iteration) { return iteration % kQueryStages; }
  static __device__ uint32_t query_phase(int iteration) { return iteration / kQueryStages % 2; }

  /// Calls compute(split, its blocks of `blocks`) for each split that has any, from the last one to the first.
  template <class Compute>
  static CUTLASS_DEVICE void for_splits(KeyBlocks<kTileN> const& blocks, Compute const& compute) {
    for (int split = (blocks.end - 1) / kSplitBlocks; blocks.begin < blocks.end && split >= blocks.begin / kSplitBlocks; --split) {
      KeyBlocks<kTileN> own = blocks;
      own.cut(split * kSplitBlocks, (split + 1) * kSplitBlocks);
      compute(split, own);
    }
  }

  // ---- layouts and MMAs: S^T = K.Q^T and O^T = V^T.P^T -----------------------------------------------------------------------------

  using KeysLayout = KMajorRows<64, kTileN, kHeadDim, kStages>;              // (64 of the keys,head_dim,PIPE)
  using QueriesLayout = KMajorRows<kTileM, kTileM, kHeadDim, kQueryStages>;  // (rows,head_dim,PIPE)
  using ProbabilitiesLayout = KMajorRows<kTileM, kTileM, kPanels * 64, 1>;   // (rows,keys,1)
  using ValuesLayout = MnMajorRows<kTileN, kHeadDim, kStages>;               // (head_dim,N,PIPE)
  using Instruction = cute::Shape<cute::_64, cute::Int<kTileM>, cute::_16>;
  using MmaScores =
      decltype(cute::make_tiled_mma(cute::SM90::GMMA::ss_op_selector<MmaElement, MmaElement, float, Instruction, cute::SM90::GMMA::Major::K,
                                                                     cute::SM90::GMMA::Major::K>()));
  using MmaOutput =
      decltype(cute::make_tiled_mma(cute::SM90::GMMA::ss_op_selector<MmaElement, MmaElement, float, Instruction,
                                                                     cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::K>()));
};

}  // namespace minfer::attention
