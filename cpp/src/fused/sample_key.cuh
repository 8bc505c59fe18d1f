// The order of a row's tokens: by their logits, and of equal ones the lower token first.
//
// A key has a token's logit in its upper 32 bits, changed so that unsigned order is that of the numbers, and the complement of its number
// in the lower ones. So no two keys are equal, and the larger key is the token that comes first. A NaN is above all others, and -0 is 0.
// Walks over a row compare logits; they make keys of the few tokens that pass.
#pragma once

#include <cstdint>

#include "fused/row_vector.cuh"

namespace minfer::fused {

using Key = uint64_t;
constexpr Key kNanKey = ~Key(0);
constexpr float kInfinite = __builtin_inff();

__device__ __forceinline__ uint32_t ordered(float v) {
  uint32_t const bits = __float_as_uint(v + 0.0f);
  return v != v ? 0xffffffffu : bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float number_of(uint32_t order) {
  return __uint_as_float(order ^ (order >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}
__device__ __forceinline__ Key key_of(float v, uint32_t token) { return Key(ordered(v)) << 32 | ~token; }
__device__ __forceinline__ float number_of(Key key) { return number_of(uint32_t(key >> 32)); }
__device__ __forceinline__ uint32_t token_of(Key key) { return ~uint32_t(key); }
__device__ __forceinline__ Key first_key(float v) { return Key(ordered(v)) << 32; }  // the smallest of a logit

/// Of two numbers the larger one, or NaN if one is.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}
/// The same of both halves of words with two elements.
template <class T>
__device__ __forceinline__ uint32_t larger_pair_or_nan(uint32_t a, uint32_t b) {
  uint32_t larger;
  if constexpr (kDataTypeOf<T> == DataType::kBF16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}

/// A vector's largest number, or NaN if it has one: of 16-bit elements by six instructions.
template <class T>
__device__ __forceinline__ float largest_of(RowVector<T> const& x) {
  if constexpr (sizeof(T) == 4) {
    float v[kVectorElements];
    unpack(x, v);
    float const a = larger_or_nan(larger_or_nan(v[0], v[1]), larger_or_nan(v[2], v[3]));
    float const b = larger_or_nan(larger_or_nan(v[4], v[5]), larger_or_nan(v[6], v[7]));
    return larger_or_nan(a, b);
  } else {
    uint4 const w = x.words[0];
    uint32_t const pair = larger_pair_or_nan<T>(larger_pair_or_nan<T>(w.x, w.y), larger_pair_or_nan<T>(w.z, w.w));
    if constexpr (kDataTypeOf<T> == DataType::kBF16) {
      return larger_or_nan(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    } else {
      float2 const two = Float16<kDataTypeOf<T>>::unpack(pair);
      return larger_or_nan(two.x, two.y);
    }
  }
}

/// The largest number of a thread's vectors, and the first vector that has it.
struct Largest {
  float v = -kInfinite;
  uint32_t slot = 0;
  __device__ __forceinline__ void take(float largest, uint32_t of_slot) {
    slot = largest <= v ? slot : of_slot;
    v = larger_or_nan(v, largest);
  }
};

}  // namespace minfer::fused
