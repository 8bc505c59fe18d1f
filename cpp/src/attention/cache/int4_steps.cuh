// The quantisation of a group of int4: scale and minimum from the group's extrema, and the code of an element.
#pragma once

#include <cstdint>

#include "common/float16.cuh"

namespace minfer::attention {

constexpr float kHalfMax = 65504.0f;

/// How a group's elements are quantised: an element is code * step + minimum. A scale of 0 has a step of 1.
struct Steps {
  float minimum, step, reciprocal;
};

/// Stores a group's scale and minimum as float16; codes are computed from what was stored. NaN passes through.
template <class T>
__device__ __forceinline__ Steps make_steps(T min, T max, __half* scale, __half* minimum) {
  float const low = to_float(min);
  __half const bottom = __float2half_rn(low < -kHalfMax ? -kHalfMax : low > kHalfMax ? kHalfMax : low);
  float const exact = __fdiv_rn(__fsub_rn(to_float(max), __half2float(bottom)), 15.0f);
  __half const size = __float2half_rn(exact < 0.0f ? 0.0f : exact > kHalfMax ? kHalfMax : exact);
  *scale = size;
  *minimum = bottom;
  float const step = size == __half(0.0f) ? 1.0f : __half2float(size);
  return {__half2float(bottom), step, __frcp_rn(step)};
}

/// round((x - minimum) / step), clamped to 0 .. 15; NaN becomes 0. Up to 32 the quotient is IEEE's (Markstein, 1990: a step is a float16,
/// so neither its reciprocal nor the remainder is subnormal); beyond 32, where the code is 15 or 0 anyway, it may be infinite and has no
/// remainder.
__device__ __forceinline__ uint32_t code_int4(float x, Steps steps) {
  float const dividend = __fsub_rn(x, steps.minimum), estimate = __fmul_rn(dividend, steps.reciprocal);
  float const exact = __fmaf_rn(__fmaf_rn(-estimate, steps.step, dividend), steps.reciprocal, estimate);
  return uint32_t(__float2int_rn(fminf(fmaxf(fabsf(estimate) < 32.0f ? exact : estimate, 0.0f), 15.0f)));
}

}  // namespace minfer::attention
