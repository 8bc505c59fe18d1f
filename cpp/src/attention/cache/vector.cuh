// Eight 16-bit elements of a row of keys or values, in registers: a vector of 16 bytes, whichever way it lies in memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/cache/append_params.cuh"
#include "common/float16.cuh"

namespace minfer::attention {

template <class To, class From>
__device__ __forceinline__ To bits_as(From const& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

/// The vector that a lane or thread holds.
struct Vector {
  uint32_t pair[4];  // two 16-bit numbers each
};

/// kWidth: elements that one access loads, 8 or 1; with 8, `stride` is 1.
template <int kWidth>
__device__ __forceinline__ Vector load_vector(uint16_t const* row, int64_t stride, int vector) {
  Vector x;
  if constexpr (kWidth == kPerVector) {
    uint4 const v = reinterpret_cast<uint4 const*>(row)[vector];
    x = {v.x, v.y, v.z, v.w};
  } else {
    uint16_t const* first = row + int64_t(vector) * kPerVector * stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) x.pair[i] = uint32_t(first[2 * i * stride]) | uint32_t(first[(2 * i + 1) * stride]) << 16;
  }
  return x;
}

template <int kWidth>
__device__ __forceinline__ void store_vector(Vector const& x, uint16_t* row, int vector) {
  if constexpr (kWidth == kPerVector) {
    reinterpret_cast<uint4*>(row)[vector] = make_uint4(x.pair[0], x.pair[1], x.pair[2], x.pair[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) row[vector * kPerVector + i] = uint16_t(x.pair[i / 2] >> 16 * (i % 2));
  }
}

template <class T>
__device__ __forceinline__ void unpack(Vector const& x, float (&values)[kPerVector]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const two = Float16<kDataTypeOf<T>>::unpack(x.pair[i]);
    values[2 * i] = two.x;
    values[2 * i + 1] = two.y;
  }
}

}  // namespace minfer::attention
