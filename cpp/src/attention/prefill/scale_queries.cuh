// Queries of bf16 in shared memory -> f16, where keys and values are f16 (PrefillTileFacts::kScalesQueries). Each row is divided by a power
// of two close to its largest element, so that it fits into f16; its scores are multiplied by that power, which is exact. A row's bits thus
// depend on the row alone.
// Elements keep their places, whatever the shared-memory swizzle is: a row of 64 elements is 128 bytes, of which eight lanes take 16 each.
#pragma once

#include <cstdint>

#include "attention/shared/query_factor.cuh"
#include "common/float16.cuh"
#include "cutlass/cutlass.h"

namespace minfer::attention {

/// Converts kVectors vectors of 16 bytes of a row, `stride` bytes apart from shared address `at` on; lanes that differ in the bits of
/// kLanes - 1 alone have the row's others. Returns what the row's scores are to be multiplied by. sign: sign_of_keys().
template <int kVectors, int kLanes>
CUTLASS_DEVICE float scale_query(uint32_t at, uint32_t stride, float sign) {
  using From = Float16<DataType::kBF16>;
  uint32_t x[kVectors][4];
  float max = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                 : "r"(at + i * stride)
                 : "memory");
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 const pair = From::unpack(x[i][j]);
      max = fmaxf(max, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lanes));
  float const factor = query_factor(max), signed_factor = factor * sign;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 const pair = From::unpack(x[i][j]);
      x[i][j] = Float16<DataType::kF16>::pack(pair.x * signed_factor, pair.y * signed_factor);
    }
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at + i * stride), "r"(x[i][0]), "r"(x[i][1]), "r"(x[i][2]), "r"(x[i][3])
                 : "memory");
  }
  return inverse_of_power(factor);
}

}  // namespace minfer::attention
