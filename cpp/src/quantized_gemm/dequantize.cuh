// Codes -> 16-bit weights in registers, in the activations' type: fragments of m64k16 (w4_layout.h), times a power of two that goes into
// the scale. With scales on the fragments, weights are rounded products, the very numbers that w4a16_dequantize returns (integers and fp4,
// with zero points that are integers); with scales on the accumulators, products are exact, in fp32.
//
// int4, int8. Bits cut out of a word are, read as fp16 or bf16, a multiple of the smallest subnormal: code * 2^-24 in fp16, code * 2^-133
// in bf16 from bits 0-3 or 0-7, 16 times that from bits 4-7 (whose top bit may be bf16's lowest exponent bit: subnormals and the first
// normal numbers are evenly spaced). One multiply-add by the largest power of two brings them into range and subtracts the zero
// point, exactly. In int4 what is left is a power of two that depends on the row alone (bits 0-3 hold the rows below 8, bits 4-7 those
// above) and goes into the scale. 9 instructions for 8 codes of int4: 4 LOP3, 1 shift, 4 HFMA2; the usual 1024 + code costs an OR-ed
// constant per register and, in bf16, 2 shifts more. Where scales go on the fragments, that is followed by 4 multiplications.
// Symmetric weights in bf16 need none (kFolds): their zero point is a power of two, so that -zero * scale is a bf16 number, and the one
// multiply-add code * scale - zero * scale rounds the number that (code - zero) * scale rounds. The scale times 2^133 would be too large
// for bf16: fragments are 2^-21 of the weights, which the sums make up for. Scales have to be below 2^16.
//
// A code book (nf4): a byte, two codes, is the index of a table of 256 pairs of values in shared memory, one copy for each bank, so that a
// warp's 32 lookups never collide. Entries lie 256 bytes apart, half of it unused, so that one PRMT puts an address together: 8
// instructions for 8 codes, 4 of them loads. (128 bytes apart it takes a shift and a LOP3 each.)
//
// E2M1 (mxfp4, nvfp4): sign, exponent and mantissa moved to the places of a 16-bit number's are the value times 2^-14 in fp16 and 2^-126 in
// bf16, 0.5 as a subnormal number: 10 instructions for 8 codes in bf16, 12 in fp16. The multiplication by the scale makes up for most of
// the power of two, a constant one is left to the sums (Scale::kRest); fp16 with E8M0 has no room for that and multiplies twice.
//
// fp8_e4m3: sign and the other bits are moved to their places, a multiplication makes up for the exponents' biases.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "minfer/types.h"

namespace minfer::w4a16 {

__device__ __forceinline__ uint32_t both_halves(uint16_t v) { return __byte_perm(v, 0, 0x1010); }

/// Where a kernel applies the scales: in fp32 to the accumulators of 128 of k; to the weights, groups being multiples of 128; to the
/// weights, groups of 32 or more; in fp32 to the accumulators of 32 of k (nvfp4: 16).
enum class Scaling { kAccumulators, kFragments, kFine, kFineAccumulators };

template <DataType kType>
struct Half2;
template <>
struct Half2<DataType::kF16> {
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
  static constexpr bool kFolds = false;            // what 2^-21 of most scales would round to has too few bits
  static constexpr uint32_t kRaise = 0x78007800u;  // 2^15
  static __device__ constexpr uint32_t factor(int row) { return row == 0 ? 0x18001800u : 0x28002800u; }   // 2^-9, 2^-5
  static __device__ constexpr uint32_t inverse(int row) { return row == 0 ? 0x60006000u : 0x50005000u; }  // 2^9, 2^5
  static constexpr uint32_t kEight = 0x48004800u;  // the zero point of symmetric weights
  static __device__ constexpr float inverse_float(int row) { return row == 0 ? 512.0f : 32.0f; }
  static __device__ float to_float(uint16_t v) { return __half2float(__ushort_as_half(v)); }
};
template <>
struct Int4<DataType::kBF16> {
  static constexpr bool kFolds = true;
  static constexpr float kFoldedRest = 0x1p21f;                                                                 // of folded fragments' sums
  static __device__ constexpr uint32_t folded_factor(int row) { return row == 0 ? 0x77807780u : 0x75807580u; }  // 2^112, 2^108
  static constexpr uint32_t kFoldedEight = 0xb680b680u, kFolded128 = 0xb880b880u;                               // -8 * 2^-21, -128 * 2^-21
  static constexpr uint32_t kRaise = 0x7f007f00u;                                                               // 2^127
  static __device__ constexpr uint32_t factor(int row) { return row == 0 ? 0x3c803c80u : 0x3e803e80u; }         // 2^-6, 2^-2
  static __device__ constexpr uint32_t inverse(int row) { return row == 0 ? 0x42804280u : 0x40804080u; }        // 2^6, 2^2
  static constexpr uint32_t kEight = 0x41004100u;
  static __device__ constexpr float inverse_float(int row) { return row == 0 ? 64.0f : 4.0f; }
  static __device__ float to_float(uint16_t v) { return __uint_as_float(uint32_t(v) << 16); }
};

/// One word of eight codes -> the four registers of an m64k16 A fragment; register i is of row i % 2.
/// @param raise, minus_zero  of the two rows, twice in a register: what a register's subnormal bits are multiplied by, and what is added
template <DataType kType>
__device__ __forceinline__ void int4_codes(uint32_t word, uint32_t const (&raise)[2], uint32_t const (&minus_zero)[2], uint32_t (&a)[4]) {
  using H = Half2<kType>;
  uint32_t const upper = word >> 8;
  a[0] = H::fma(word & 0x000f000fu, raise[0], minus_zero[0]);
  a[1] = H::fma(word & 0x00f000f0u, raise[1], minus_zero[1]);
  a[2] = H::fma(upper & 0x000f000fu, raise[0], minus_zero[0]);
  a[3] = H::fma(upper & 0x00f000f0u, raise[1], minus_zero[1]);
}
/// The same, (code - zero) * factor.
/// @param minus_zero  -zero * factor of the two rows, twice in a register
template <DataType kType>
__device__ __forceinline__ void int4_codes(uint32_t word, uint32_t const (&minus_zero)[2], uint32_t (&a)[4]) {
  int4_codes<kType>(word, {Int4<kType>::kRaise, Int4<kType>::kRaise}, minus_zero, a);
}

/// The code book in shared memory, and the bank of the lane's own copy, in bytes.
struct Book {
  char const* base;
  uint32_t bank;
};

/// How a thread dequantises its codes of a k block, kWords words, by format. A register of row r is (value - zero) * factor(r).
/// kOnFragments: the scales are applied to the fragments, not to sums. kFolds: folded() makes fragments of symmetric weights, with their
/// scales, but for kFoldedRest: raise holds scales times folded_factor(row), minus_zero scales times kFoldedZero.
template <DataType kType, WeightFormat kFormat, bool kOnFragments>
struct Codes;

template <DataType kType, bool kOnFragments>
struct Codes<kType, WeightFormat::kInt4, kOnFragments> : Int4<kType> {
  static constexpr int kWords = 1;
  static constexpr uint32_t kSymmetricZero = Int4<kType>::kEight;
  static __device__ __forceinline__ void fragment(uint32_t const (&words)[1], uint32_t const (&minus_zero)[2], Book, uint32_t (&a)[4]) {
    int4_codes<kType>(words[0], minus_zero, a);
  }
  static constexpr uint32_t kFoldedZero = kType == DataType::kBF16 ? Int4<DataType::kBF16>::kFoldedEight : 0;
  static __device__ __forceinline__ void folded(uint32_t const (&words)[1], uint32_t const (&raise)[2], uint32_t const (&minus_zero)[2],
                                                uint32_t (&a)[4]) {
    int4_codes<kType>(words[0], raise, minus_zero, a);
  }
};

template <DataType kType, bool kOnFragments>
struct Codes<kType, WeightFormat::kInt8, kOnFragments> {
  static constexpr int kWords = 2;
  static constexpr bool kFolds = Int4<kType>::kFolds;
  static constexpr uint32_t kSymmetricZero = kType == DataType::kF16 ? 0x58005800u : 0x43004300u;  // 128
  static __device__ constexpr uint32_t factor(int) { return Int4<kType>::factor(0); }
  static __device__ constexpr uint32_t inverse(int) { return Int4<kType>::inverse(0); }
  static __device__ constexpr float inverse_float(int) { return Int4<kType>::inverse_float(0); }
  static __device__ __forceinline__ void fragment(uint32_t const (&words)[2], uint32_t const (&minus_zero)[2], Book, uint32_t (&a)[4]) {
    multiply_add(words, {Int4<kType>::kRaise, Int4<kType>::kRaise}, minus_zero, a);
  }
  static constexpr float kFoldedRest = Int4<DataType::kBF16>::kFoldedRest;
  static constexpr uint32_t kFoldedZero = Int4<DataType::kBF16>::kFolded128;
  static __device__ constexpr uint32_t folded_factor(int) { return Int4<DataType::kBF16>::folded_factor(0); }
  static __device__ __forceinline__ void folded(uint32_t const (&words)[2], uint32_t const (&raise)[2], uint32_t const (&minus_zero)[2],
                                                uint32_t (&a)[4]) {
    multiply_add(words, raise, minus_zero, a);
  }

 private:
  static __device__ __forceinline__ void multiply_add(uint32_t const (&words)[2], uint32_t const (&raise)[2],
                                                      uint32_t const (&minus_zero)[2], uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Half2<kType>::fma(words[i / 2] >> (i % 2 * 8) & 0x00ff00ffu, raise[i % 2], minus_zero[i % 2]);
  }
};

/// Formats whose values need no power of two.
struct UnitFactor {
  static constexpr bool kFolds = false;
  static constexpr uint32_t kSymmetricZero = 0;
  static __device__ constexpr float inverse_float(int) { return 1.0f; }
};

template <DataType kType, bool kOnFragments>
struct Codes<kType, WeightFormat::kFp8E4M3, kOnFragments> : UnitFactor {
  static constexpr int kWords = 2;
  static __device__ constexpr uint32_t factor(int) { return kType == DataType::kF16 ? 0x3c003c00u : 0x3f803f80u; }
  static __device__ constexpr uint32_t inverse(int) { return factor(0); }
  static __device__ __forceinline__ void fragment(uint32_t const (&words)[2], uint32_t const (&)[2], Book, uint32_t (&a)[4]) {
    constexpr uint32_t kRaise = kType == DataType::kF16 ? 0x5c005c00u : 0x7b807b80u;  // 2^8, 2^120
    constexpr int kShift = kType == DataType::kF16 ? 1 : 4;                           // from a byte's 7 low bits to exponent and mantissa
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t const word = i % 2 == 0 ? words[i / 2] << 8 : words[i / 2];
      a[i] = Half2<kType>::mul((word & 0x80008000u) | ((word & 0x7f007f00u) >> kShift), kRaise);
    }
  }
};

/// The tables of formats.toml, where device code can read them.
static __constant__ CodeBooks const kBookValues = kCodeBooks;

/// E2M1: sign, exponent and mantissa at fp32's places, 2^126 for the biases.
__device__ __forceinline__ float e2m1_value(uint32_t code) { return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f; }

constexpr int kBookEntryBytes = 256, kBookBytes = 256 * kBookEntryBytes - 128;  // an entry: the pair of values, once for each bank

/// Writes the format's code book; `thread` of `threads`, which divide 256.
template <DataType kType, WeightFormat kFormat>
__device__ __forceinline__ void fill_book(char* book, int thread, int threads) {
  constexpr float kFactor = book_factor_of(kFormat, kType);
  for (int pair = thread; pair < 256; pair += threads) {
    auto const& values = kBookValues.values[code_book_of(kFormat)];
    float const low = values[pair & 15] * kFactor, high = values[pair >> 4] * kFactor;
    uint32_t value;
    if constexpr (kType == DataType::kF16) {
      __half2 const v = __floats2half2_rn(low, high);
      value = *reinterpret_cast<uint32_t const*>(&v);
    } else {
      __nv_bfloat162 const v = __floats2bfloat162_rn(low, high);
      value = *reinterpret_cast<uint32_t const*>(&v);
    }
    uint4* entry = reinterpret_cast<uint4*>(book + pair * kBookEntryBytes);
#pragma unroll
    for (int i = 0; i < 8; ++i) entry[(i + thread) % 8] = make_uint4(value, value, value, value);  // eight lanes, eight groups of banks
  }
}

template <DataType kType, WeightFormat kFormat, bool kOnFragments>
  requires(order_of(kFormat) == CodeOrder::kBook)
struct Codes<kType, kFormat, kOnFragments> : UnitFactor {
  static constexpr int kWords = 1;
  static __device__ constexpr uint32_t factor(int) { return kType == DataType::kF16 ? 0x3c003c00u : 0x3f803f80u; }
  static __device__ constexpr uint32_t inverse(int) { return factor(0); }
  static __device__ constexpr float inverse_float(int) { return 1.0f / book_factor_of(kFormat, kType); }
  static __device__ __forceinline__ void fragment(uint32_t const (&words)[1], uint32_t const (&)[2], Book book, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // byte i of the word above the bank's byte
      a[i] = *reinterpret_cast<uint32_t const*>(book.base + __byte_perm(words[0], book.bank, 0x5504 | i << 4));
    }
  }
};
/// E2M1 codes times a power of two, for which Scale::rows and kRest make up, or inverse_float.
template <DataType kType>
struct E2M1Codes {
  static constexpr int kWords = 1;
  static constexpr bool kFolds = false;
  static __device__ __forceinline__ void fragment(uint32_t const (&words)[1], uint32_t const (&)[2], Book, uint32_t (&a)[4]) {
    uint32_t const word = words[0];
    // Products put a magnitude and its sign, which move by different distances, in their places, and none of their bits overlap.
    if constexpr (kType == DataType::kBF16) {
      constexpr uint32_t kMask = 0x81c081c0u;
      a[0] = word & kMask;
      a[1] = word << 3 & kMask;
      a[2] = (word & 0x40074007u) * 66u & kMask;
      a[3] = (word >> 3 & 0x01c001c0u) | (word << 2 & 0x80008000u);
    } else {
      constexpr uint32_t kMask = 0x8e008e00u;
      a[0] = (word & 0x81c081c0u) * 9u & kMask;
      a[1] = (word & 0x10381038u) * 72u & kMask;
      a[2] = (word & 0x40074007u) * 514u & kMask;
      a[3] = (word & 0x0e000e00u) | (word << 2 & 0x80008000u);
    }
  }
};
template <DataType kType>
struct Codes<kType, WeightFormat::kNvFp4, true> : E2M1Codes<kType> {};
template <>
struct Codes<DataType::kBF16, WeightFormat::kMxFp4, true> : E2M1Codes<DataType::kBF16> {};
template <>
struct Codes<DataType::kF16, WeightFormat::kMxFp4, false> : E2M1Codes<DataType::kF16> {
  static __device__ constexpr float inverse_float(int) { return 16384.0f; }
};
template <>
struct Codes<DataType::kF16, WeightFormat::kMxFp4, true> : E2M1Codes<DataType::kF16> {
  static __device__ __forceinline__ void fragment(uint32_t const (&words)[1], uint32_t const (&zero)[2], Book book, uint32_t (&a)[4]) {
    E2M1Codes<DataType::kF16>::fragment(words, zero, book, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Half2<DataType::kF16>::mul(a[i], 0x74007400u);  // 2^14
  }
};

/// A stored scale -> fp32 (to_float), or the scales of two rows times a constant in the activations' type, each twice in a register (rows).
/// kRest: the factor that products of fragments and rows' scales still lack to be the weights.
template <DataType kType, WeightFormat kFormat>
struct Scale {
  using Stored = uint16_t;
  static constexpr float kRest = 1.0f / book_factor_of(kFormat, kType);
  static __device__ __forceinline__ void rows(Stored const (&v)[2], uint32_t (&twice)[2]) {
    twice[0] = both_halves(v[0]);
    twice[1] = both_halves(v[1]);
  }
  static __device__ __forceinline__ float to_float(Stored v) { return Int4<kType>::to_float(v); }
};
template <DataType kType>
__device__ __forceinline__ uint32_t twice(float v) {
  if constexpr (kType == DataType::kF16) {
    __half2 const pair = __float2half2_rn(v);
    return *reinterpret_cast<uint32_t const*>(&pair);
  } else {
    __nv_bfloat162 const pair = __float2bfloat162_rn(v);
    return *reinterpret_cast<uint32_t const*>(&pair);
  }
}
/// E8M0: 2^(v - 127). In fp32 and fp16 its smallest value, 2^-127, counts as 0 and its NaN, 255, as infinity: four instructions instead of
/// six. In bf16, where 2^62 of the codes' 2^126 are in the scale, NaN and values above 2^65 count as infinity.
template <DataType kType>
struct Scale<kType, WeightFormat::kMxFp4> {
  using Stored = uint8_t;
  static constexpr float kRest = kType == DataType::kF16 ? 1.0f : 0x1p64f;
  static __device__ __forceinline__ float to_float(Stored v) { return __uint_as_float(uint32_t(v) << 23); }
  static __device__ __forceinline__ void rows(Stored const (&v)[2], uint32_t (&twice)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kType == DataType::kF16) {
        twice[r] = w4a16::twice<kType>(to_float(v[r]));
      } else {
        twice[r] = min(uint32_t(v[r]) + 62u, 255u) * 0x00800080u;  // a bf16's exponent
      }
    }
  }
};
/// E4M3; 0x7f and 0xff are NaN. The conversion of two is one instruction from sm_89 on. rows: times 2^5 in fp16, where products with codes
/// then are multiples of 2^-19, and 2^118 in bf16.
template <DataType kType>
struct Scale<kType, WeightFormat::kNvFp4> {
  using Stored = uint8_t;
  static constexpr float kRest = kType == DataType::kF16 ? 0x1p9f : 0x1p8f;
  static __device__ __forceinline__ float to_float(Stored v) {  // sign, exponent and mantissa to their places, 2^120 for the biases
    float const value = __uint_as_float((uint32_t(v) & 0x80u) << 24 | (uint32_t(v) & 0x7fu) << 20) * 0x1p120f;
    return (v & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : value;
  }
  static __device__ __forceinline__ void rows(Stored const (&v)[2], uint32_t (&twice)[2]) {
    uint32_t both;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(uint16_t(uint32_t(v[0]) | uint32_t(v[1]) << 8)));
    if constexpr (kType == DataType::kBF16) {
      float2 const wide = __half22float2(*reinterpret_cast<__half2 const*>(&both));
      __nv_bfloat162 const narrow = __float22bfloat162_rn(wide);  // exact: four bits of mantissa
      both = *reinterpret_cast<uint32_t const*>(&narrow);
    }
    both = Half2<kType>::mul(both, kType == DataType::kF16 ? 0x50005000u : 0x7a807a80u);
    twice[0] = __byte_perm(both, 0, 0x1010);
    twice[1] = __byte_perm(both, 0, 0x3232);
  }
};

/// One code's value in fp32, before zero point and scale; `book`: of a format that has one, its values.
template <WeightFormat kFormat>
__device__ __forceinline__ float value_of(uint32_t code, [[maybe_unused]] float const* book) {
  if constexpr (values_of(kFormat) == CodeValues::kInteger) {
    return __uint_as_float(0x4b000000u | code) - 8388608.0f;  // conversions have an eighth of an addition's rate
  } else if constexpr (values_of(kFormat) == CodeValues::kE4M3) {
    return Scale<DataType::kBF16, WeightFormat::kNvFp4>::to_float(uint8_t(code));
  } else if constexpr (values_of(kFormat) == CodeValues::kE2M1) {
    return e2m1_value(code);
  } else {
    return book[code];
  }
}

/// A stored scale in fp32; of E8M0 also its ends, which the GEMM's kernels simplify.
template <DataType kType, WeightFormat kFormat>
__device__ __forceinline__ float exact_scale(typename Scale<kType, kFormat>::Stored v) {
  float const scale = Scale<kType, kFormat>::to_float(v);
  if constexpr (kFormat == WeightFormat::kMxFp4) return v == 0 ? 0x1p-127f : v == 255 ? __uint_as_float(0x7fc00000u) : scale;
  return scale;
}

}  // namespace minfer::w4a16
