// Quantisation as a row is stored: 8 numbers of a thread become 8 codes. The rules are those of minfer::RowQuant.
// Codes of int8 follow from their scale as those of e4m3 do (common/e4m3.cuh).
#pragma once

#include "common/e4m3.cuh"
#include "fused/row_params.h"

namespace minfer::fused {

constexpr float kLargestInt8 = 127.0f;

struct QuantScale {
  float scale, inverse;
};

/// Of the largest magnitude that it is for.
__device__ __forceinline__ QuantScale scale_of(float scale) { return {scale, code_factor(scale, __fdiv_rn(1.0f, scale))}; }
__device__ __forceinline__ QuantScale scale_for(float largest, float largest_code) { return scale_of(__fdiv_rn(largest, largest_code)); }

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

/// fp8_block128: of the results of 16 neighbouring threads, all of which call it. One without elements has a `count` of 0.
__device__ __forceinline__ QuantScale scale_of_block(float const (&v)[kVectorElements], int count) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectorElements; ++i) largest = i < count ? fmaxf(largest, fabsf(v[i])) : largest;
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  return scale_for(largest, kLargestE4M3);
}

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
