// Eight consecutive elements of a row, in registers: how they are loaded and stored, whole or in part, at any alignment.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/dependent_launch.cuh"
#include "common/float16.cuh"
#include "common/opaque.cuh"
#include "fused/row_params.h"

namespace minfer::fused {

/// As they lie in memory.
template <class T>
struct RowVector {
  static constexpr int kWords = kVectorElements * int(sizeof(T)) / 16;
  uint4 words[kWords];
};

/// 16 bytes that are read once: they take no room in L1 from what is read again.
__device__ __forceinline__ uint4 load_once(uint4 const* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

/// Elements `at` to `at` + 7 of a row, of which `count` are there; the others are zeros.
template <bool kOnce = true, class T>
__device__ __forceinline__ RowVector<T> load_vector(T const* row, uint32_t at, int count, bool aligned) {
  RowVector<T> x = {};
  if (aligned) {
    if (count > 0) {
      auto const* from = reinterpret_cast<uint4 const*>(row + at);
#pragma unroll
      for (int i = 0; i < RowVector<T>::kWords; ++i) x.words[i] = kOnce ? load_once(from + i) : load_operand(from + i);
    }
  } else {
    T elements[kVectorElements];
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) elements[i] = i < count ? load_operand(row + at + i) : from_float<T>(0.0f);
    memcpy(&x, elements, sizeof(x));
  }
  return x;
}

template <class T>
__device__ __forceinline__ void store_vector(RowVector<T> const& x, T* row, uint32_t at, int count, bool aligned) {
  if (aligned) {
    if (count > 0) {
#pragma unroll
      for (int i = 0; i < RowVector<T>::kWords; ++i) reinterpret_cast<uint4*>(row + at)[i] = x.words[i];
    }
  } else {
    T elements[kVectorElements];
    memcpy(elements, &x, sizeof(x));
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      if (i < count) row[at + i] = elements[i];
    }
  }
}

using minfer::make_opaque;
/// Hides from the compiler where the elements come from: what was computed of them before is computed again.
template <class T>
__device__ __forceinline__ void make_opaque(RowVector<T>& x) {
#pragma unroll
  for (int i = 0; i < RowVector<T>::kWords; ++i) {
    asm volatile("" : "+r"(x.words[i].x), "+r"(x.words[i].y), "+r"(x.words[i].z), "+r"(x.words[i].w));
  }
}

template <class T>
__device__ __forceinline__ void unpack(RowVector<T> const& x, float (&v)[kVectorElements]) {
  if constexpr (sizeof(T) == 4) {
    memcpy(v, &x, sizeof(x));
  } else {
    uint32_t pairs[4];
    memcpy(pairs, &x, sizeof(x));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kDataTypeOf<T> == DataType::kBF16) {  // one instruction each, where the conversion takes three for both
        v[2 * i] = __uint_as_float(pairs[i] << 16);
        v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
      } else {
        float2 const two = Float16<kDataTypeOf<T>>::unpack(pairs[i]);
        v[2 * i] = two.x;
        v[2 * i + 1] = two.y;
      }
    }
  }
}

/// Rounds to nearest.
template <class T>
__device__ __forceinline__ RowVector<T> pack(float const (&v)[kVectorElements]) {
  RowVector<T> x;
  if constexpr (sizeof(T) == 4) {
    memcpy(&x, v, sizeof(x));
  } else {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = Float16<kDataTypeOf<T>>::pack(v[2 * i], v[2 * i + 1]);
    memcpy(&x, pairs, sizeof(x));
  }
  return x;
}

}  // namespace minfer::fused
