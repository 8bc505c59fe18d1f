// Numbers as e4m3 codes with a scale: the rule of all kernels that store them.
//
// A code is round(x * (1 / scale)), the inverse being rounded once: it may differ from round(x / scale) where that is within 2^-23 of a
// tie. Rounding is to nearest even, saturated at +-448, and NaN has NaN's code.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace minfer {

constexpr float kLargestE4M3 = 448.0f;

/// What a number is multiplied by before it is rounded, of a scale and its `inverse`, which is 1 / scale rounded to nearest. Of a scale
/// of 0 the codes of numbers are 0, and the largest number stands in for infinity, so that zeros stay zeros.
__device__ __forceinline__ float code_factor(float scale, float inverse) {
  return scale == 0.0f ? 0.0f : inverse > __FLT_MAX__ ? __FLT_MAX__ : inverse;
}

/// 1 / x rounded to nearest, as __fdiv_rn(1, x) is, whose rare cases are a subroutine: a GEMM with 192 x 192 tiles spills 11 registers
/// around its call. Two steps of Newton's method in double: the reciprocal of a number of 24 bits is farther from any tie of float than
/// their result is from the reciprocal.
__device__ __forceinline__ float reciprocal_without_call(float x) {
  double const wide = x;
  double first;  // 20 bits, and what infinities and NaN have for a reciprocal
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(first) : "d"(wide));
  double const second = fma(first, fma(-wide, first, 1.0), first), third = fma(second, fma(-wide, second, 1.0), second);
  return fabsf(x) <= __FLT_MAX__ ? float(third) : float(first);
}

/// Codes of two numbers; the first is the lower byte.
__device__ __forceinline__ uint32_t codes_e4m3(float low, float high, float inverse) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low * inverse, high * inverse), __NV_SATFINITE, __NV_E4M3);
}

}  // namespace minfer
