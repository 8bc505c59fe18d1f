// Elements of any type, in device code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "minfer/types.h"

namespace minfer::bench {

inline __device__ double load(void const* data, DataType type, int64_t i) {
  switch (type) {
    case DataType::kF16: return double(__half2float(static_cast<__half const*>(data)[i]));
    case DataType::kBF16: return double(__bfloat162float(static_cast<__nv_bfloat16 const*>(data)[i]));
    default: return double(static_cast<float const*>(data)[i]);
  }
}

inline __device__ void store(void* data, DataType type, int64_t i, float value) {
  switch (type) {
    case DataType::kF16: static_cast<__half*>(data)[i] = __float2half(value); break;
    case DataType::kBF16: static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(value); break;
    default: static_cast<float*>(data)[i] = value;
  }
}

}  // namespace minfer::bench
