// Codes of a KV cache as ldmatrix leaves them in registers -> operands of mma.sync m16n8k16, and which element of head_dim each operand is.
//
// A vector of 16 bytes of a token holds 8, 16 or 32 elements of head_dim, and a matrix of ldmatrix is 8 tokens x 16 bytes: with 8-bit codes
// a lane gets two elements for each one that it gets of a 16-bit matrix, with 4-bit codes four. Products over head_dim (K.Q^T) may take the
// elements in any order, as long as both operands follow it, and rows of the output (head_dim of V) may lie in any order that the store
// undoes. So codes are never moved between lanes; the order of elements adapts to where they are. For lane 4 g + c:
//   16 bits   elements as in memory
//   8 bits    keys: k = 2c, 2c + 1 are elements 4c, 4c + 1 of 16, k = 8 + 2c, .. are 4c + 2, 4c + 3.
//             Values: rows g, g + 8 are 2g, 2g + 1 of 16
//   4 bits    keys: of 32 elements, k = 2c, 2c + 1 of the first product are 8c, 8c + 4, k = 8 + 2c, .. are 8c + 1, 8c + 5; of the second
//             8c + 2, 8c + 6 and 8c + 3, 8c + 7. Values: rows g, g + 8 of the first tile are 4g, 4g + 1 of 32, of the second 4g + 2, 4g + 3
// Codes become f16 exactly. int8: 1024 + (code + 128) - 1152. e4m3: by the conversion that GPUs have from sm_89 on. int4: as f16's
// subnormal numbers, which tensor cores multiply as any others: the four bits stay where they are and all others are cleared, which is
// 2^-24 code. Every other one of a register's eight codes stands four bits higher and is 2^-20 code: the second halves of k (8 to 15) of
// keys, and rows g + 8 of values.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "minfer/types.h"

namespace minfer::attention {

template <WeightFormat kFormat>
struct KvCodes {
  static constexpr int kBits = bits_of(kFormat);
  static constexpr int kPerVector = 128 / kBits;  // elements in 16 bytes
  static constexpr int kPerPair = 16 / kBits;     // products, or row tiles, of two vectors

  /// Where element d of a query stands among the B operands: k block of head_dim, register, lane % 4, half of the register.
  struct Operand {
    int step, word, c, half;
  };
  static __host__ __device__ constexpr Operand operand_of(int d) {
    if (kBits == 16) return {d / 16, d % 16 / 8, d % 8 / 2, d % 2};
    if (kBits == 8) return {d / 16, d % 4 / 2, d % 16 / 4, d % 2};
    return {d / 32 * 2 + d % 4 / 2, d % 2, d % 32 / 8, d % 8 / 4};
  }
  /// The element of head_dim that row g (upper: row g + 8) of row tile `tile` of the output is.
  static __device__ int row_of(int tile, int g, int upper) {
    if (kBits == 16) return 16 * tile + g + 8 * upper;
    if (kBits == 8) return 16 * tile + 2 * g + upper;
    return tile / 2 * 32 + 4 * g + tile % 2 * 2 + upper;
  }

  static __device__ uint32_t select(uint32_t x, uint32_t y, uint32_t order) {
    uint32_t z;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(order));
    return z;
  }
  static __device__ uint32_t add(uint32_t x, uint32_t y) {
    uint32_t z;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
  }
  static __device__ uint32_t from_e4m3(uint32_t low_half) {
    uint32_t z;
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 x; cvt.u16.u32 x, %1; cvt.rn.f16x2.e4m3x2 %0, x; }" : "=r"(z) : "r"(low_half));
#else
    // The code's seven bits, put where f16 has its exponent and upper mantissa, are 1 / 256 of its value, for subnormal values, too. The
    // code of NaN would be 480. It is the only one that overflows f16 when it is multiplied by 36000 / 256, and 0 * inf adds the NaN.
    uint32_t const x = select(low_half, 0, 0x1404);  // bytes 0 and 1, each the upper one of a half
    uint32_t const small = (x >> 1 & 0x3f803f80) | (x & 0x80008000);
    uint32_t large;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(large) : "r"(small), "r"(0x78657865u));  // 36000
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(small), "r"(0x5c005c00u));      // 256
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(large), "r"(0u), "r"(z));
#endif
    return z;
  }
  static constexpr float kInt4LowScale = 0x1p24f, kInt4HighScale = 0x1p20f;  // make codes of the numbers of low and high ones
  /// Codes kIndex and kIndex + 4 of eight; those of odd kIndex are the high ones.
  template <int kIndex>
  static __device__ uint32_t from_int4(uint32_t x) {
    return (kIndex / 2 ? x >> 8 : x) & (kIndex % 2 == 0 ? 0x000f000fu : 0x00f000f0u);
  }

  /// The A operand of product kProduct over two vectors of keys. x: {tokens 0-7, 8-15 of the first vector, of the second}.
  template <int kProduct>
  static __device__ void keys(uint32_t const (&x)[4], uint32_t (&a)[4]) {
    if constexpr (kBits == 16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = x[i];
    } else if constexpr (kBits == 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t const codes = x[2 * kProduct + i];
        if constexpr (kFormat == WeightFormat::kInt8) {
          uint32_t const biased = codes ^ 0x80808080u;
          a[i] = add(select(biased, 0x64646464u, 0x4140), 0xe480e480u);  // -1152
          a[2 + i] = add(select(biased, 0x64646464u, 0x4342), 0xe480e480u);
        } else {
          a[i] = from_e4m3(codes);
          a[2 + i] = from_e4m3(codes >> 16);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t const codes = x[kProduct / 2 * 2 + i];
        a[i] = from_int4<kProduct % 2 * 2>(codes);
        a[2 + i] = from_int4<kProduct % 2 * 2 + 1>(codes);
      }
    }
  }

  /// The A operand of row tile kTile of two vectors of values, transposed. x: {tokens 0-7 of the first vector, of the second, tokens 8-15
  /// likewise}.
  template <int kTile>
  static __device__ void values(uint32_t const (&x)[4], uint32_t (&a)[4]) {
    if constexpr (kBits == 16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = x[i];
    } else if constexpr (kBits == 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t const codes = x[kTile + 2 * i];
        if constexpr (kFormat == WeightFormat::kInt8) {
          uint32_t const biased = codes ^ 0x80808080u;
          a[2 * i] = add(select(biased, 0x64646464u, 0x4240), 0xe480e480u);
          a[2 * i + 1] = add(select(biased, 0x64646464u, 0x4341), 0xe480e480u);
        } else {
          uint32_t const paired = select(codes, codes, 0x3120);
          a[2 * i] = from_e4m3(paired);
          a[2 * i + 1] = from_e4m3(paired >> 16);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t const codes = x[kTile / 2 + 2 * i];
        a[2 * i] = from_int4<kTile % 2 * 2>(codes);
        a[2 * i + 1] = from_int4<kTile % 2 * 2 + 1>(codes);
      }
    }
  }
};

}  // namespace minfer::attention
