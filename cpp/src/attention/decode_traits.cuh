// What a decode kernel's configuration comes to: types, the sizes of a slice, of its scales and of a warp's share of an output. Of any
// architecture; shared memory, threads and pipelines are the kernel's own.
#pragma once

#include "attention/decode_params.h"
#include "attention/decode_pieces.cuh"
#include "attention/kv_dequant.cuh"
#include "cute/util/type_traits.hpp"
#include "cutlass/numeric_types.h"
#include "minfer/types.h"

namespace minfer::attention {

/// kWarps_: that take slices, one each; 8 / kWarps rows of a tile of 8 are a warp's when their parts are merged.
template <class Config, int kWarps_>
struct DecodeTraits {
  static constexpr DataType kType = Config::kType;
  static constexpr WeightFormat kFormat = Config::kFormat;
  static constexpr int kHeadDim = Config::kHeadDim, kSlice = Config::kSlice, kStages = Config::kStages;
  static constexpr int kPart = kHeadDim <= 128 && kSlice >= 32 ? 32 : 16;  // tokens of a slice that are in registers at a time
  using Element = cute::conditional_t<kType == DataType::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  using Codes = KvCodes<kFormat>;
  static constexpr bool k16Bit = kFormat == WeightFormat::kDense, kInt8 = kFormat == WeightFormat::kInt8,
                        kInt4 = kFormat == WeightFormat::kInt4;
  static constexpr DataType kMmaType = k16Bit ? kType : DataType::kF16;
  static constexpr int kWarps = kWarps_, kConsumerThreads = 32 * kWarps, kRowsOfWarp = 8 / kWarps;
  static constexpr int kMaxColumns = Config::kRows / 8;  // tiles of 8 rows: 1 or 2, as registers allow
  static constexpr int kRowBytes = kHeadDim * Codes::kBits / 8, kSwizzle = kRowBytes < 128 ? kRowBytes : 128, kBoxes = kRowBytes / kSwizzle;
  static constexpr int kCodeBytes = kSlice * kRowBytes;  // of K, and of V, in a slice
  static constexpr int kTokenTiles = kPart / 16, kSteps = kHeadDim / 16;
  // int8: a float a token of K, then of V. int4: of each group of tokens scales and minima of K's
  // channels, then a scale and a minimum of each group of V a token.
  static constexpr int kMaxGroupsV = kHeadDim / 32;
  static constexpr int kGroupBytes = 2 * kHeadDim * 2,
                       kMaxGroups = kSlice < 32 ? 1 : kSlice / 32;  // int4: of a group of tokens; in a slice
  static constexpr int kScaleBytes = kInt8 ? 2 * kSlice * 4 : kInt4 ? kMaxGroups * kGroupBytes + 2 * kMaxGroupsV * kSlice * 2 : 16;
  static constexpr bool kScales = kInt8 || kInt4;
  static constexpr int kHalf = kHeadDim < 128 ? kHeadDim : 128, kHalves = kHeadDim / kHalf, kVector = kHalf / 32;
  static constexpr int kPitch = kHalf + 4;
  static_assert(kHeadDim % 64 == 0 && kSlice % kPart == 0 && kSwizzle * 8 % 128 == 0 && 8 % kWarps == 0);

  using Pieces = DecodePieces<kSlice, kInt4>;
  using Params = DecodeParams;

  /// Rows of a piece.
  struct Queries {
    uint2 of[kMaxColumns][kSteps][32];  // B operands
    float scale[8 * kMaxColumns];       // what a row was divided by
    DecodePiece piece;
  };
  /// A slice in shared memory.
  struct SliceAddress {
    uint32_t keys, values, scales;
  };
};

}  // namespace minfer::attention
