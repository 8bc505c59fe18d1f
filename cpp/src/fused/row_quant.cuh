// Quantisation as a row is stored: 8 numbers of a thread become 8 codes. The rules are those of minfer::RowQuant.
//
// A code is what common/e4m3.cuh says, of int8 likewise; where y has a factor of its row's, that is a part of the product with the inverse:
// the code may differ from round(y / scale) where that is within 2^-22 of a tie.
#pragma once

#include "common/e4m3.cuh"
#include "fused/row_params.h"

namespace minfer::fused {

constexpr float kLargestInt8 = 127.0f;

struct QuantScale {
  float scale, inverse;
};

/// Of the largest magnitude that it is for.
__device__ __forceinline__ QuantScale scale_of(float scale) { return {scale, code_factor(scale, __frcp_rn(scale))}; }
__device__ __forceinline__ QuantScale scale_for(float largest, float largest_code) { return scale_of(__fdiv_rn(largest, largest_code)); }

/// The factor of numbers that lack their row's: finite as the inverse is.
__device__ __forceinline__ float times_inverse(float of_row, float inverse) {
  float const factor = of_row * inverse;
  return factor > __FLT_MAX__ ? __FLT_MAX__ : factor;
}

__device__ __forceinline__ float largest_magnitude(float const (&v)[kVectorElements]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectorElements; ++i) largest = fmaxf(largest, fabsf(v[i]));
  return largest;
}

__device__ __forceinline__ uint2 codes_e4m3(float const (&v)[kVectorElements], float inverse) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kVectorElements; i += 2) words[i / 4] |= minfer::codes_e4m3(v[i], v[i + 1], inverse) << 8 * (i % 4);
  return make_uint2(words[0], words[1]);
}

/// NaN becomes 0.
__device__ __forceinline__ uint2 codes_int8(float const (&v)[kVectorElements], float inverse) {
  uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    int code[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) code[i] = max(__float2int_rn(v[4 * w + i] * inverse), -127);
    uint32_t upper;  // the first two operands of an instruction become its result's bytes 1 and 0
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(code[3]), "r"(code[2]));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(words[w]) : "r"(code[1]), "r"(code[0]), "r"(upper));
  }
  return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ uint2 codes_of(float const (&v)[kVectorElements], RowQuant quant, float inverse) {
  return quant == RowQuant::kInt8Token ? codes_int8(v, inverse) : codes_e4m3(v, inverse);
}

/// fp8_block128: the scales of the blocks that vectors j of 16 neighbouring threads are, all of which make one together, for all j at once.
/// Each exchange halves the blocks that a thread has the largest magnitude of, until 16 / kVectors threads have the same one: its scale,
/// two divisions, is computed there, and inverses are handed around.
template <int kVectors>
class BlockScales {
  static_assert(kVectors == 1 || kVectors == 2 || kVectors == 4 || kVectors == 8);
  static constexpr uint32_t kThreads = 16, kSame = kThreads / kVectors;

 public:
  /// largest: magnitudes of the thread's vectors, 0 where it has none.
  __device__ __forceinline__ explicit BlockScales(float (&largest)[kVectors]) { exchange<kVectors, kThreads / 2>(largest); }
  /// The block whose scale this thread has, the first of those that have the same.
  __device__ __forceinline__ uint32_t block() const { return threadIdx.x % kThreads / kSame; }
  __device__ __forceinline__ bool is_first_thread() const { return threadIdx.x % kSame == 0; }
  __device__ __forceinline__ float scale() const { return scale_.scale; }
  /// Of block j.
  __device__ __forceinline__ float inverse(int j) const {
    return kVectors == 1 ? scale_.inverse : __shfl_sync(0xffffffffu, scale_.inverse, int(kSame) * j, int(kThreads));
  }

 private:
  template <int kCount, int kOffset>
  __device__ __forceinline__ void exchange(float (&largest)[kVectors]) {
    constexpr int kKept = kCount > 1 ? kCount / 2 : 1;
    bool const upper = kCount > 1 && (threadIdx.x & kOffset) != 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      float const above = kCount > 1 ? largest[(kKept + i) % kVectors] : largest[i], below = largest[i];
      largest[i] = fmaxf(upper ? above : below, __shfl_xor_sync(0xffffffffu, upper ? below : above, kOffset));
    }
    if constexpr (kOffset > 1) {
      exchange<kKept, kOffset / 2>(largest);
    } else {
      scale_ = scale_for(largest[0], kLargestE4M3);
    }
  }

  QuantScale scale_;
};

__device__ __forceinline__ void store_codes(uint2 const& codes, uint8_t* row, uint32_t at, int count, bool aligned) {
  if (aligned) {
    if (count > 0) *reinterpret_cast<uint2*>(row + at) = codes;
  } else {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      if (i < count) row[at + i] = uint8_t((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
    }
  }
}

}  // namespace minfer::fused
