// The packed layout of quantised weights: the one definition that packer, kernels and reference share.
//
// A weight matrix [n, k] is cut in blocks of 64 x 64, stored as [n / 64, k / 64, block] with both extents rounded up. Inside a block, codes
// lie in the order in which tensor cores take the A operand of m64k16 (WGMMA from registers, and four mma.sync m16n8k16 above each other),
// so that a thread reads all its codes of a block by one 16-byte access, in shared memory without bank conflicts, and neither kernel
// exchanges data:
//
//   4-bit: 512 words of 32 bits. Word 4 t + s belongs to thread t of 128 and k block s (columns 16 s to 16 s + 15). Nibble p of a word:
//     row     16 (t / 32) + 8 (p % 2) + t % 32 / 4
//     column  16 s + 8 (p / 2 % 2) + 2 (t % 4) + p / 4
//   Nibbles i and i + 4 are neighbours along k, the low and the high half of fragment register i: `word >> 4 i & 0x000f000f` is that
//   register's two codes, four bits each in a half of 16.
//   A code book (nf4) has the pair side by side instead, byte i of the word, which is the index of the pair of values:
//     row     16 (t / 32) + 8 (p / 2 % 2) + t % 32 / 4
//     column  16 s + 8 (p / 4) + 2 (t % 4) + p % 2
//   E2M1 (mxfp4, nvfp4) has int4's halves of 16 bits, in which the bits of code i lie apart: the magnitude's three from bit 6, 3, 0, 9 on,
//   the sign in bit 15, 12, 14, 13. Sign and exponent of bf16 and fp16 are then a mask away, or a shift or a multiplication and a mask.
//   8-bit: 1024 words, two halves of 32 columns. Word 512 h + 4 t + 2 s + j belongs to thread t, k block 2 h + s. Byte p of a word:
//     row     16 (t / 32) + 8 (p % 2) + t % 32 / 4
//     column  16 (2 h + s) + 8 j + 2 (t % 4) + p / 2
//   `word >> 8 i & 0x00ff00ff` is fragment register 2 j + i's two codes.
//
// Either way a chunk is 128 threads x 16 bytes: all 64 columns of a 4-bit block, half of an 8-bit one.
#pragma once

#include <cstdint>

#include "minfer/types.h"

namespace minfer::w4a16 {

constexpr int kBlockN = 64, kBlockK = 64;
constexpr int kChunkBytes = 2048;
constexpr int block_words(int bits) { return kBlockN * kBlockK * bits / 32; }
constexpr int kBlockWords4 = block_words(4), kBlockBytes4 = 4 * kBlockWords4;

/// Formats whose codes are looked up in a table.
constexpr bool has_code_book(WeightFormat format) { return order_of(format) == CodeOrder::kBook; }

/// Formats with E2M1 codes, sign << 3 | magnitude.
constexpr bool is_e2m1(WeightFormat format) { return order_of(format) == CodeOrder::kE2M1; }

/// Where the magnitude and the sign of E2M1 code i are in a half of 16 bits.
constexpr int e2m1_magnitude(int i) { return i == 0 ? 6 : i == 1 ? 3 : i == 2 ? 0 : 9; }
constexpr int e2m1_sign(int i) { return i == 0 ? 15 : i == 1 ? 12 : i == 2 ? 14 : 13; }

/// Where the codes of fragment register i are in a thread's word of a k block: the shift of the even column's code, and of the odd one's.
/// Register i has half i % 2 of the rows and half i / 2 % 2 of the columns; a word of 8-bit codes has two registers. Not for E2M1.
constexpr int shift_of(WeightFormat format, int i, int odd) {
  return has_code_book(format) ? 8 * i + 4 * odd : bits_of(format) == 4 ? 4 * i + 16 * odd : 8 * i + 16 * odd;
}

/// A code's bits in the word, and the code of a word's bits.
constexpr uint32_t placed(WeightFormat format, uint32_t code, int i, int odd) {
  if (is_e2m1(format)) return ((code & 7) << e2m1_magnitude(i) | code >> 3 << e2m1_sign(i)) << 16 * odd;
  return code << shift_of(format, i, odd);
}
constexpr uint32_t code_at(WeightFormat format, uint32_t word, int i, int odd) {
  if (is_e2m1(format)) return (word >> 16 * odd >> e2m1_magnitude(i) & 7) | (word >> 16 * odd >> e2m1_sign(i) & 1) << 3;
  return word >> shift_of(format, i, odd) & ((1u << bits_of(format)) - 1);
}

/// log2 of a group size, or 30 where all of k is one group.
inline int group_shift(int64_t group_size, int64_t k) {
  if (group_size == 0 || group_size >= k) return 30;
  int shift = 0;
  while ((int64_t(1) << shift) < group_size) ++shift;
  return shift;
}

}  // namespace minfer::w4a16
