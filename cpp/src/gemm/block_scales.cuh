// Scales of operands of 8 bits: of blocks of 128 of k, and, of a weight, of 128 rows (DeepSeek-V3, 2024).
#pragma once

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "minfer/gemm.h"

namespace minfer::gemm {

constexpr int kScaleBlock = 128;

/// Scales of one operand by strides in elements, of which those along a mode that has one scale alone are 0.
struct ScaleView {
  void const* data;  // null: all are 1
  int64_t row_stride, k_stride;
  bool exponents;  // bytes that are powers of two, e8m0; else fp32

  /// Whether four may be read at once from each fourth row on: rows are contiguous, and blocks begin at multiples of 16 bytes.
#if defined(__CUDACC__)
  __host__ __device__
#endif
      bool
      by_fours() const {
    return data != nullptr && !exponents && row_stride == 1 && k_stride % 4 == 0 && reinterpret_cast<uint64_t>(data) % 16 == 0;
  }

#if defined(__CUDACC__)
  /// row, block: of the scale, not of the operand.
  __device__ __forceinline__ int64_t offset(int32_t row, int32_t block) const { return row * row_stride + block * k_stride; }
  __device__ __forceinline__ float load(int64_t at) const {
    if (data == nullptr) return 1.0f;
    if (!exponents) return load_operand(static_cast<float const*>(data) + at);
    uint32_t const exponent = load_operand(static_cast<uint8_t const*>(data) + at);
    return __uint_as_float(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fffffffu : exponent << 23);  // 2^-127, NaN
  }

  /// Those of rows row .. row + 3, of which `count` exist; 0 for the others.
  __device__ __forceinline__ float4 load_four(int32_t row, int32_t block, int32_t count) const {
    float x[4];
    int64_t at = offset(row, block);
#pragma unroll
    for (int i = 0; i < 4; ++i, at += row_stride) x[i] = i < count ? load(at) : 0.0f;
    return make_float4(x[0], x[1], x[2], x[3]);
  }
#endif
};

/// What a mainloop multiplies the sums of each 128 of k by.
struct BlockScales {
  ScaleView tokens, weight;  // [m, k / 128], [n / 128, k / 128]
  int32_t m, n;
  bool halves;        // a gated weight's gates and ups have scales of their own, [n / 256, k / 128]
  int64_t up_offset;  // from those of the gates to those of the ups
};

}  // namespace minfer::gemm
