// What a row of queries in bf16 is multiplied by to fit into f16.
#pragma once

#include <cuda_runtime.h>

namespace minfer::attention {

/// A power of two that brings `max`, the largest magnitude of a row, to 1 to 2 (the very largest to 4); 1 where max is zero, subnormal, or
/// not finite.
__device__ __forceinline__ float query_factor(float max) {
  int const exponent = __float_as_int(max) >> 23;
  return exponent > 0 && exponent < 255 ? __int_as_float((exponent < 253 ? 254 - exponent : 1) << 23) : 1.0f;
}

/// 1 / x of a power of two whose inverse is a normal number, as x is. A division would be a call.
__device__ __forceinline__ float inverse_of_power(float x) { return __int_as_float((254 << 23) - __float_as_int(x)); }

}  // namespace minfer::attention
