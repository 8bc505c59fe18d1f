// Codes -> 16-bit weights in registers: w = (code - zero) * scale in the activations' type. Scales on the weights are rounded products, the very
// numbers that w4a16_dequantize returns (integer zero points); scales on the accumulators are exact, in fp32.
//
// int4. Four bits cut out of a word are, read as fp16 or bf16, a multiple of the smallest subnormal: code * 2^-24 in fp16 and code * 2^-133 in
// bf16 from bits 0-3, 16 times that from bits 4-7 (whose top bit may be bf16's lowest exponent bit: subnormals and the first normal numbers are
// evenly spaced). One multiply-add by the largest power of two brings them into range and subtracts the zero point, exactly. What is left is a
// power of two that depends on the row alone (bits 0-3 hold the rows below 8, bits 4-7 those above: w4_layout.h) and goes into the scale.
// 9 instructions for 8 codes: 4 LOP3, 1 shift, 4 HFMA2; the usual 1024 + code costs an OR-ed constant per register and, in bf16, 2 shifts more.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "minfer/types.h"

namespace minfer::w4a16 {

__device__ __forceinline__ uint32_t both_halves(uint16_t v) { return __byte_perm(v, 0, 0x1010); }

/// Where a kernel applies the scales: in fp32 to the accumulators of 128 of k; to the weights, groups being multiples of 128; or of 32.
enum class Scaling { kAccumulators, kFragments, kFine };

template <DataType kType>
struct Half2;
template <>
struct Half2<DataType::kF16> {
  static __device__ __forceinline__ uint32_t sub(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
};
template <>
struct Half2<DataType::kBF16> {
  static __device__ __forceinline__ uint32_t sub(uint32_t a, uint32_t b) { return fma(b, 0xbf80bf80u, a); }  // a - b, exact product
  static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) { return fma(a, b, 0x80008000u); }  // + -0
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
};

/// Constants of int4 in a 16-bit type: a register of row r is (code - zero) * factor(r).
template <DataType kType>
struct Int4;
template <>
struct Int4<DataType::kF16> {
  static constexpr uint32_t kRaise = 0x78007800u;                                                         // 2^15
  static __device__ constexpr uint32_t factor(int row) { return row == 0 ? 0x18001800u : 0x28002800u; }   // 2^-9, 2^-5
  static __device__ constexpr uint32_t inverse(int row) { return row == 0 ? 0x60006000u : 0x50005000u; }  // 2^9, 2^5
  static constexpr uint32_t kEight = 0x48004800u;  // the zero point of symmetric weights
  static __device__ constexpr float inverse_float(int row) { return row == 0 ? 512.0f : 32.0f; }
  static __device__ float to_float(uint16_t v) { return __half2float(__ushort_as_half(v)); }
};
template <>
struct Int4<DataType::kBF16> {
  static constexpr uint32_t kRaise = 0x7f007f00u;                                                         // 2^127
  static __device__ constexpr uint32_t factor(int row) { return row == 0 ? 0x3c803c80u : 0x3e803e80u; }   // 2^-6, 2^-2
  static __device__ constexpr uint32_t inverse(int row) { return row == 0 ? 0x42804280u : 0x40804080u; }  // 2^6, 2^2
  static constexpr uint32_t kEight = 0x41004100u;
  static __device__ constexpr float inverse_float(int row) { return row == 0 ? 64.0f : 4.0f; }
  static __device__ float to_float(uint16_t v) { return __uint_as_float(uint32_t(v) << 16); }
};

/// One word of eight codes -> the four registers of an m64k16 A fragment, (code - zero) * factor; register i is of row i % 2.
/// @param minus_zero  -zero * factor of the two rows, twice in a register
template <DataType kType>
__device__ __forceinline__ void int4_codes(uint32_t word, uint32_t const (&minus_zero)[2], uint32_t (&a)[4]) {
  using H = Half2<kType>;
  uint32_t const upper = word >> 8;
  a[0] = H::fma(word & 0x000f000fu, Int4<kType>::kRaise, minus_zero[0]);
  a[1] = H::fma(word & 0x00f000f0u, Int4<kType>::kRaise, minus_zero[1]);
  a[2] = H::fma(upper & 0x000f000fu, Int4<kType>::kRaise, minus_zero[0]);
  a[3] = H::fma(upper & 0x00f000f0u, Int4<kType>::kRaise, minus_zero[1]);
}

}  // namespace minfer::w4a16
