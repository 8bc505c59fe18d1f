// The compile-time facts of a decode kernel: types, the sizes of a key block, of its scales and of a warp's share of the output, on any
// architecture. Shared memory, threads and pipelines belong to the kernel.
#pragma once

#include "attention/decode/params.h"
#include "attention/decode/tile_scheduler.cuh"
#include "attention/shared/kv_dequant.cuh"
#include "common/cutlass_element.cuh"
#include "cute/util/type_traits.hpp"
#include "cutlass/numeric_types.h"
#include "minfer/types.h"

namespace minfer::attention {

/// kWarps_: consumer warps. kMaxMerged: elements of head_dim that the warps merge at a time in shared memory.
template <class Config, int kWarps_, int kMaxMerged = 128>
struct DecodeTraits {
  static constexpr DataType kType = Config::kType;
  static constexpr WeightFormat kFormat = Config::kFormat;
  static constexpr int kHeadDim = Config::kHeadDim, kTileN = Config::kSlice, kStages = Config::kStages;
  using Element = CutlassElement<kType>;
  using Codes = KvCodes<kFormat>;
  static constexpr bool k16Bit = kFormat == WeightFormat::kDense, kInt8 = kFormat == WeightFormat::kInt8,
                        kInt4 = kFormat == WeightFormat::kInt4;
  // A warp computes kWarpKeys keys of a block at a time, as registers allow; of int4 more, since a scale of K's channels belongs to 32 or
  // 64 tokens.
  static constexpr int kMaxWarpKeys = (kHeadDim <= 128 ? 32 : 16) * (kInt4 ? 2 : 1);
  static constexpr int kWarpKeys = kTileN < kMaxWarpKeys ? kTileN : kMaxWarpKeys, kWarpsOfBlock = kTileN / kWarpKeys;
  static constexpr DataType kMmaType = k16Bit ? kType : DataType::kF16;
  static constexpr int kWarps = kWarps_, kConsumerThreads = 32 * kWarps;
  static constexpr int kMaxRowTiles = Config::kRows / 8;  // tiles of 8 rows of an output tile: 1 or 2, as registers allow
  // Shared memory: a token's row is cut into boxes of kSwizzle bytes, the width of TMA's shared-memory swizzle.
  static constexpr int kRowBytes = kHeadDim * Codes::kBits / 8, kSwizzle = kRowBytes < 128 ? kRowBytes : 128, kBoxes = kRowBytes / kSwizzle;
  static constexpr int kCodeBytes = kTileN * kRowBytes;  // of K, and of V, in a key block
  static constexpr int kTokenTiles = kWarpKeys / 16, kSteps = kHeadDim / 16;
  // Scales of a key block. int8: a float of K for each token, then of V. int4: for each token group scales and minima of K's channels, then
  // for each token a scale and a minimum of each group of V.
  static constexpr int kMaxGroupsV = kHeadDim / 32;
  static constexpr int kGroupBytes = 2 * kHeadDim * 2,  // int4: of a token group
      kMaxGroups = kTileN < 32 ? 1 : kTileN / 32;       // int4: token groups in a key block
  static constexpr int kScaleBytes = kInt8 ? 2 * kTileN * 4 : kInt4 ? kMaxGroups * kGroupBytes + 2 * kMaxGroupsV * kTileN * 2 : 16;
  static constexpr bool kScales = kInt8 || kInt4;
  static constexpr int kMergedDim = kHeadDim < kMaxMerged ? kHeadDim : kMaxMerged, kMergePasses = kHeadDim / kMergedDim;
  static constexpr int kPitch = kMergedDim + 4;
  static_assert(kHeadDim % 64 == 0 && kTileN % kWarpKeys == 0 && (!kInt4 || kWarpsOfBlock == 1) && kSwizzle * 8 % 128 == 0);

  using TileScheduler = DecodeTileScheduler<kTileN, kWarps, kInt4>;
  using Params = DecodeParams;

  /// The queries of a work item.
  struct Queries {
    uint2 of[kMaxRowTiles][kSteps][32];  // B operands of S^T = K.Q^T
    float scale[8 * kMaxRowTiles];       // what each row was divided by
    DecodeWorkItem work;
    uint32_t loaded;  // key blocks of the work items before it
  };
  /// The shared addresses of a key block.
  struct KeyBlockAddress {
    uint32_t keys, values, scales;
  };
};

}  // namespace minfer::attention
