// Conversions between the 16-bit floating-point types and fp32, rounded to nearest even: by C++ type, and by DataType for code that holds
// pairs of numbers as 32-bit words.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "minfer/types.h"

namespace minfer {

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float2 to_floats(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 to_floats(__nv_bfloat162 x) { return __bfloat1622float2(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

/// The CUDA types of kF16 and kBF16, and the conversions of pairs: the first number is the lower half of the word.
template <DataType kType>
struct Float16 {
  static_assert(kType == DataType::kF16 || kType == DataType::kBF16);
  static constexpr bool kIsHalf = kType == DataType::kF16;
  using Type = std::conditional_t<kIsHalf, __half, __nv_bfloat16>;
  using Pair = std::conditional_t<kIsHalf, __half2, __nv_bfloat162>;

  static __device__ __forceinline__ Type of_bits(uint16_t bits) {
    if constexpr (kIsHalf) {
      return __ushort_as_half(bits);
    } else {
      return __ushort_as_bfloat16(bits);
    }
  }
  static __device__ __forceinline__ float to_float(Type x) { return minfer::to_float(x); }
  static __device__ __forceinline__ Type from_float(float x) { return minfer::from_float<Type>(x); }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    Pair pair;
    if constexpr (kIsHalf) {
      pair = __floats2half2_rn(low, high);
    } else {
      pair = __floats2bfloat162_rn(low, high);
    }
    return reinterpret_cast<uint32_t const&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) { return to_floats(reinterpret_cast<Pair const&>(pair)); }
};

/// The same of a type that is known at run time.
struct AnyFloat16 {
  using Type = uint16_t;  // bits
  bool bf16;

  __device__ __forceinline__ float to_float(Type x) const {
    return bf16 ? __uint_as_float(uint32_t(x) << 16) : __half2float(__ushort_as_half(x));
  }
  __device__ __forceinline__ Type from_float(float x) const {
    return bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
  }
  __device__ __forceinline__ uint32_t pack(float low, float high) const {
    return bf16 ? Float16<DataType::kBF16>::pack(low, high) : Float16<DataType::kF16>::pack(low, high);
  }
  __device__ __forceinline__ float2 unpack(uint32_t pair) const {
    return bf16 ? Float16<DataType::kBF16>::unpack(pair) : Float16<DataType::kF16>::unpack(pair);
  }
};

/// The DataType of a CUDA type: Float16<kDataTypeOf<T>> is what belongs to the element type T.
template <class T>
inline constexpr DataType kDataTypeOf = DataType::kF32;
template <>
inline constexpr DataType kDataTypeOf<__half> = DataType::kF16;
template <>
inline constexpr DataType kDataTypeOf<__nv_bfloat16> = DataType::kBF16;

}  // namespace minfer
