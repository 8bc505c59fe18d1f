// Elements of any type, in device code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "minfer/types.h"

namespace minfer::bench {

inline __device__ double load(void const* data, DataType type, int64_t i) {
  switch (type) {
    case DataType::kF16: return double(__half2float(static_cast<__half const*>(data)[i]));
    case DataType::kBF16: return double(__bfloat162float(static_cast<__nv_bfloat16 const*>(data)[i]));
    case DataType::kE4M3: {
      __half_raw const half = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t const*>(data)[i], __NV_E4M3);
      return double(__half2float(__half(half)));
    }
    case DataType::kS8: return double(static_cast<int8_t const*>(data)[i]);
    default: return double(static_cast<float const*>(data)[i]);
  }
}

/// Rounds to nearest; values that a type of 8 bits does not reach become its largest, of either sign.
inline __device__ void store(void* data, DataType type, int64_t i, float value) {
  switch (type) {
    case DataType::kF16: static_cast<__half*>(data)[i] = __float2half(value); break;
    case DataType::kBF16: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value); break;
    case DataType::kE4M3: static_cast<__nv_fp8_storage_t*>(data)[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3); break;
    case DataType::kS8: static_cast<int8_t*>(data)[i] = int8_t(rintf(fminf(fmaxf(value, -127.0f), 127.0f))); break;
    default: static_cast<float*>(data)[i] = value;
  }
}

}  // namespace minfer::bench
