// int4 weights as the A operand of WGMMAs of 8 bits: a warpgroup's fragments of 64 rows by 128 of k, from packed blocks in shared memory.
//
// Blocks are packed for MMAs of 16 bits (w4_layout.h), so that one packed weight serves activations of 16 bits and of 8. In a step of 16
// columns thread q of a quad has columns 2 q, 2 q + 1 and the same 8 further on; WGMMAs of 8 bits want its columns 4 q to 4 q + 3. These
// are halves of the words of threads 2 (q % 2) and 2 (q % 2) + 1: each thread reads both words, which neighbours do as well, and one byte
// permutation makes them four columns of two rows.
#pragma once

#include "cutlass/cutlass.h"
#include "quantized_gemm/w4_layout.h"

namespace minfer::w4a8 {

constexpr int kTileK = 128, kMmaK = 32;
constexpr int kRowBlockBytes = 2 * w4a16::kChunkBytes;  // of 64 rows by kTileK, of a stage
constexpr int kFragmentRegisters = 4 * (kTileK / kMmaK);

/// Four columns of two rows, byte i of column i: the low nibble is the first row's, the high one that of the row 8 below. As operands.
template <bool kIntegers>
struct DecodeInt4;

/// e4m3, which has every code's number.
template <>
struct DecodeInt4<false> {
  static constexpr float kUnit = 1.0f;  // of what an operand of 1 stands for
  /// Numbers of four codes of 4 bits, by their low three bits among those below 8 and from 8 on, then by the highest bit.
  static CUTLASS_DEVICE uint32_t look_up(uint32_t low_bits, uint32_t high_bit) {
    uint32_t const negative = __byte_perm(0xCACCCED0u, 0xB8C0C4C8u, low_bits);  // -8 to -1
    uint32_t const positive = __byte_perm(0x44403800u, 0x4E4C4A48u, low_bits);  // 0 to 7
    return __byte_perm(negative, positive, high_bit);
  }
  static CUTLASS_DEVICE void run(uint32_t codes, uint32_t& first, uint32_t& second) {
    uint32_t const low_bits = codes & 0x77777777u, high_bit = (codes >> 1 & 0x44444444u) | 0x32103210u;
    uint32_t const columns01 = look_up(low_bits, high_bit), columns23 = look_up(low_bits >> 16, high_bit >> 16);
    first = __byte_perm(columns01, columns23, 0x6420);
    second = __byte_perm(columns01, columns23, 0x7531);
  }
};

/// s8: 16 times the number, whose bits are the code's in two's complement.
template <>
struct DecodeInt4<true> {
  static constexpr float kUnit = 1.0f / 16;
  static CUTLASS_DEVICE void run(uint32_t codes, uint32_t& first, uint32_t& second) {
    first = (codes << 4 & 0xF0F0F0F0u) ^ 0x80808080u;
    second = (codes & 0xF0F0F0F0u) ^ 0x80808080u;
  }
};

/// Where a thread of a warpgroup reads in a row block, and which bytes of the words it takes.
struct Int4Reader {
  uint32_t offset, bytes;
  CUTLASS_DEVICE explicit Int4Reader(int thread)
      : offset(uint32_t(16 * ((thread & ~3) + 2 * (thread & 1)))), bytes(thread & 2 ? 0x7531 : 0x6420) {}

  /// The fragments of the row block at shared memory address `block`: registers 4 j to 4 j + 3 are those of k step j of 32.
  template <bool kIntegers>
  CUTLASS_DEVICE void read(uint32_t block, uint32_t (&fragments)[kFragmentRegisters]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {  // 64 of k
      uint32_t of[2][4];                    // of two threads of the quad, a word for each 16 of k
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(of[i][0]), "=r"(of[i][1]), "=r"(of[i][2]), "=r"(of[i][3])
                     : "r"(block + offset + half * w4a16::kChunkBytes + 16 * i)
                     : "memory");
      }
      CUTLASS_PRAGMA_UNROLL
      for (int s = 0; s < 4; ++s) {
        uint32_t* const to = fragments + 8 * half + 2 * s;
        DecodeInt4<kIntegers>::run(__byte_perm(of[0][s], of[1][s], bytes), to[0], to[1]);
      }
    }
  }
};

}  // namespace minfer::w4a8
