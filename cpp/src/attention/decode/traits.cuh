// What a decode kernel's configuration comes to: types, the sizes of a slice, of its scales and of a warp's share of an output. Of any
// architecture; shared memory, threads and pipelines are the kernel's own.
#pragma once

#include "attention/decode/params.h"
#include "attention/decode/pieces.cuh"
#include "attention/shared/kv_dequant.cuh"
#include "cute/util/type_traits.hpp"
#include "cutlass/numeric_types.h"
#include "minfer/types.h"

namespace minfer::attention {

/// Of a power of two, normal as x; a division is a call.
__device__ __forceinline__ float inverse_of(float x) { return __int_as_float((254 << 23) - __float_as_int(x)); }

/// kWarps_: that take slices, one each. kMerged: elements of head_dim whose parts are merged at a time.
template <class Config, int kWarps_, int kMerged = 128>
struct DecodeTraits {
  static constexpr DataType kType = Config::kType;
  static constexpr WeightFormat kFormat = Config::kFormat;
  static constexpr int kHeadDim = Config::kHeadDim, kSlice = Config::kSlice, kStages = Config::kStages;
  using Element = cute::conditional_t<kType == DataType::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  using Codes = KvCodes<kFormat>;
  static constexpr bool k16Bit = kFormat == WeightFormat::kDense, kInt8 = kFormat == WeightFormat::kInt8,
                        kInt4 = kFormat == WeightFormat::kInt4;
  static constexpr int kMostAtOnce = (kHeadDim <= 128 ? 32 : 16) * (kInt4 ? 2 : 1);  // int4: scales of K's channels are of 32 or 64 tokens
  static constexpr int kPart = kSlice < kMostAtOnce ? kSlice : kMostAtOnce;          // tokens of a slice that are in registers at a time
  static constexpr int kParts = kSlice / kPart;
  static constexpr DataType kMmaType = k16Bit ? kType : DataType::kF16;
  static constexpr int kWarps = kWarps_, kConsumerThreads = 32 * kWarps;
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
  static constexpr int kHalf = kHeadDim < kMerged ? kHeadDim : kMerged, kHalves = kHeadDim / kHalf;
  static constexpr int kPitch = kHalf + 4;
  static_assert(kHeadDim % 64 == 0 && kSlice % kPart == 0 && (!kInt4 || kParts == 1) && kSwizzle * 8 % 128 == 0);

  using Pieces = DecodePieces<kSlice, kInt4>;
  using Params = DecodeParams;

  /// Rows of a piece.
  struct Queries {
    uint2 of[kMaxColumns][kSteps][32];  // B operands
    float scale[8 * kMaxColumns];       // what a row was divided by
    DecodePiece piece;
    uint32_t loaded;  // slices of the pieces before it
  };
  /// A slice in shared memory.
  struct SliceAddress {
    uint32_t keys, values, scales;
  };
};

}  // namespace minfer::attention
