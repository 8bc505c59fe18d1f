// The compile-time facts of a batch-invariant kernel for few rows (few_rows_sm90.cuh): sizes, warps and shared memory.
#pragma once

#include "attention/prefill/tile_facts.cuh"
#include "common/cutlass_element.cuh"
#include "common/ring.cuh"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace minfer::attention {

template <class Config>
struct FewRowsTraits : PrefillTileFacts<Config> {
  using Facts = PrefillTileFacts<Config>;
  using Facts::kConverts, Facts::kFormat, Facts::kHeadDim, Facts::kSplitBlocks, Facts::kTileM, Facts::kTileN, Facts::kType;
  using Facts::kMmaType, Facts::kScalesQueries;
  using typename Facts::Tile, typename Facts::TileScheduler;
  using Element = CutlassElement<kType>;        // of queries in global memory, and of the output
  using MmaElement = CutlassElement<kMmaType>;  // of the MMAs' operands
  static constexpr int kStages = Config::kStages, kQueryStages = 2, kCtasPerSm = Config::kCtasPerSm;
  static constexpr bool kCodes = kConverts, kFp8 = kFormat == WeightFormat::kFp8E4M3, kInt8 = kFormat == WeightFormat::kInt8,
                        kInt4 = kFormat == WeightFormat::kInt4;
  static constexpr bool kSigns = kFp8 && !kScalesQueries;  // codes of K and queries take the sign of K's scale
  // Each consumer warp, or pair of warps where they convert codes, has a block of a split, and each has channels of the output.
  static constexpr int kWarpsOfBlock = kCodes ? 2 : 1, kConsumerWarps = kSplitBlocks * kWarpsOfBlock <= 4 ? 4 : 8;
  // Alone on an SM, blocks are loaded by several producers in turn: one would issue its copies slower than they arrive.
  static constexpr int kProducerWarps = kCtasPerSm == 1 ? 4 : 1;
  static constexpr int kConsumerThreads = 32 * kConsumerWarps, kThreads = kConsumerThreads + 32 * kProducerWarps;
  static constexpr int kTokenTiles = kTileN / 16, kWarpTiles = kTokenTiles / kWarpsOfBlock;  // of 16 keys: of a block, of a warp
  static constexpr int kChannelTiles = kHeadDim / (16 * kConsumerWarps);                     // of 16 channels, of a warp
  static_assert(Facts::kFolds && kTileM == 8 && Config::kHeadDimV == kHeadDim && kTileN % 16 == 0 && kHeadDim % 64 == 0);
  static constexpr int kRowBytes = kHeadDim * bits_of(kFormat) / 8;  // of a key in the ring: boxes of 128 bytes, or 64
  static constexpr int kBoxBytes = kRowBytes < 128 ? kRowBytes : 128, kColumns = kRowBytes / kBoxBytes;
  static constexpr int kBoxTokens = kInt4 ? 32 : kTileN;  // that a box has at most: int4's scales come by 32 tokens
  // Scales of a token in the ring: of int8 one float32, of int4 its share of a unit (few_rows_int4.cuh).
  using Scale = cute::conditional_t<kInt4, uint16_t, float>;
  static constexpr int kTokenScales = kInt8 ? 1 : kInt4 ? 8 : 0, kScaleBytes = kTokenScales * int(sizeof(Scale));
  static_assert(kSplitBlocks * kWarpsOfBlock <= kConsumerWarps && kTokenTiles % kWarpsOfBlock == 0);
  static_assert(kHeadDim % (16 * kConsumerWarps) == 0 && kRowBytes % kBoxBytes == 0 &&
                (!kCodes || (kChannelTiles == 1 && kTokenTiles % 2 == 0)));

  struct SharedStorage {
    alignas(1024) MmaElement q[kQueryStages][kTileM * kHeadDim];  // [head_dim / 64][row][64], as TMA swizzles them
    alignas(1024) uint8_t ring[kStages][kTileN * kRowBytes];      // blocks of keys, then of values: [column][key][kBoxBytes]
    alignas(16) Scale scales[kTokenScales > 0 ? kStages : 1][kTokenScales > 0 ? kTileN* kTokenScales : 8];  // of a block's tokens
    alignas(16) uint2 probabilities[kSplitBlocks * kTokenTiles][32];                                        // B operands, of 16 keys each
    float warp_sum[kTileM][kSplitBlocks][8];  // of the first warp of a block's pair
    float block_max[kTileM][kSplitBlocks][kWarpsOfBlock], rescale[kTileM][kSplitBlocks], block_sum[kTileM][kSplitBlocks][4];
    float query_scale[kTileM];  // what scores are multiplied by: scale_queries.cuh
    alignas(8) uint64_t full_q[kQueryStages], empty_q[kQueryStages], full[kStages], empty[kStages], full_tile[2], empty_tile[2];
    Tile tile[2];
    uint64_t stamp;  // of the CTA's packets
    typename TileScheduler::Storage tiles;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static constexpr int kStageBytes = kTileN * (kRowBytes + kScaleBytes) + 16;  // with its barriers

  using Ring = minfer::Ring<kStages>;
  /// The division is many instructions, which decode would wait for several times; most tiles have all of a KV head's queries.
  template <class P>
  static CUTLASS_DEVICE int kv_head_of(P const& params, Tile const& tile) {
    return params.packed_heads == params.heads_per_kv ? tile.head_tile : Facts::kv_head_of(params, tile);
  }
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
};

}  // namespace minfer::attention
