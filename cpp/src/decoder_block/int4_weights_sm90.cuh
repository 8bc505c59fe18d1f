// Products of activations with int4 weights (w4_layout.h), in groups of 128 times a power of two or all of k, for decoder_block_sm90.cuh.
//
// A token is one column of an MMA, of which eight come at the price of one. So activations, times a power of two for each group of 128, are
// cut in three digits of 8 bits, a column each, and the MMAs are those of int8: codes need no conversion to 16 bits, but a mask (the upper
// four bits of a byte are the codes times 16, which goes into the sum), and half as many MMAs. Sums of 128 products are exact. An
// accumulator begins with the bits of 1.5 2^23, so that its bits are the float of the sum plus that, less what the codes' zero point
// makes of the digits.
// Order of k in an MMA: lane l has of a word of packed codes columns 2 (l % 4) + {0, 8, 1, 9} of 16, so digits are stored in that order. A
// converter's 8 numbers are 4 of one half of 16 columns and the 4 beside them.
#pragma once

#include "common/mma_sm80.cuh"
#include "decoder_block/layout.h"
#include "fused/row_operation.cuh"

namespace minfer::decoder_block {

constexpr float kMagic = 12582912.0f;  // 1.5 2^23: integers of up to 22 bits are the low bits of their sum with it
constexpr uint32_t kMagicBits = 0x4b400000u;
constexpr int kZero = 8;  // the zero point of symmetric weights

template <DataType kType, int kTokens>
struct Int4Weights {
  static constexpr WeightFormat kFormat = WeightFormat::kInt4;
  static constexpr bool kInOrder = false;
  using T = fused::RowType<kType>;
  static_assert(kDigits * kTokens <= 8);

  struct Group {       // of 128 activations, by columns of the MMA
    int32_t first[8];  // what a sum over a row's codes begins with, of rows 0 to 7: that the codes are less their zero point
    float factors[8];
  };

  /// What becomes of a converter's 8 numbers, and what is known of their group, which are 16 threads'.
  struct Made {
    uint32_t words[kDigits][2];
    int sums[kDigits], exponent;
    uint32_t most;
  };
  static __device__ __forceinline__ Made make(float const (&x)[8]) {
    Made made;
    uint32_t most = 0;  // as bits, of which those of NaN and infinity are the largest
#pragma unroll
    for (int e = 0; e < 8; ++e) most = max(most, __float_as_uint(x[e]) & 0x7fffffffu);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
    // Times the power of two that takes the largest to 2^21 or above, below 2^22.
    int const exponent = made.exponent = min(max(int(most >> 23), 22), 254);
    made.most = most;
    float const factor = __uint_as_float(uint32_t(275 - exponent) << 23);
    uint32_t biased[8];  // a digit is a byte of this less 128
#pragma unroll
    for (int e = 0; e < 8; ++e) biased[e] = __float_as_uint(fmaf(x[e], factor, kMagic)) - kMagicBits + 0x00808080u;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      uint32_t const low01 = __byte_perm(biased[2 * q], biased[2 * q + 4], 0x5140);
      uint32_t const low23 = __byte_perm(biased[2 * q + 1], biased[2 * q + 5], 0x5140);
      uint32_t const high01 = __byte_perm(biased[2 * q], biased[2 * q + 4], 0x0062);
      uint32_t const high23 = __byte_perm(biased[2 * q + 1], biased[2 * q + 5], 0x0062);
      made.words[0][q] = __byte_perm(high01, high23, 0x5410) ^ 0x80808080u;
      made.words[1][q] = __byte_perm(low01, low23, 0x7632) ^ 0x80808080u;
      made.words[2][q] = __byte_perm(low01, low23, 0x5410) ^ 0x80808080u;
    }
#pragma unroll
    for (int d = 0; d < kDigits; ++d)
      made.sums[d] = __dp4a(int(made.words[d][0]), 0x01010101, __dp4a(int(made.words[d][1]), 0x01010101, 0));
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) {
#pragma unroll
      for (int d = 0; d < kDigits; ++d) made.sums[d] += __shfl_xor_sync(0xffffffffu, made.sums[d], offset);
    }
    return made;
  }
  /// rows: of all tokens' digits; v: of the thread, as column_of has it.
  static __device__ __forceinline__ void store(Made const& made, char* rows, int pitch, Group* groups, int token, int v, int lane) {
    char* const to = rows + token * kDigits * pitch + v * 8;
#pragma unroll
    for (int d = 0; d < kDigits; ++d) *reinterpret_cast<uint2*>(to + d * pitch) = make_uint2(made.words[d][0], made.words[d][1]);
    if (lane % 16 < kDigits) {
      int const d = lane % 16;
      Group& group = groups[v / 16];
      group.first[token * kDigits + d] = int32_t(kMagicBits) - kZero * (d == 0 ? made.sums[0] : d == 1 ? made.sums[1] : made.sums[2]);
      float const place = __uint_as_float(uint32_t(made.exponent - 21 + 16 - 8 * d) << 23);
      group.factors[token * kDigits + d] = made.most >= 0x7f800000u ? __uint_as_float(0x7fffffffu) : place;
    }
  }

  /// Activations of a warp's 128 columns of a stage.
  static constexpr int kMostHeld = kTokens == 1 ? 2 : 0;  // stages of a row whose activations stay in registers from unit to unit
  struct Activations {
    uint32_t b[2][4];
    int first[4];  // of the lane's sums
    float2 factors;
  };
  /// Where a lane's part of those of the first stage is.
  static __device__ __forceinline__ uint32_t first_of(uint32_t rows, int pitch, int m, int warp, int lane) {
    return rows + min(lane % 8, kDigits * m - 1) * pitch + lane / 8 * 16 + warp * 128;
  }
  static constexpr int kStep = kStageK, kGroupStep = kWarps;                 // bytes, and groups, from one stage's to the next
  static __device__ __forceinline__ int group_of(int warp) { return warp; }  // of the first stage
  static __device__ __forceinline__ Activations load(uint32_t at, Group const& group, int lane) {
    Activations x;
    load_matrices(at, x.b[0]);
    load_matrices(at + 64, x.b[1]);
    int2 const first = *reinterpret_cast<int2 const*>(&group.first[lane % 4 * 2]);
    x.first[0] = first.x;
    x.first[1] = first.y;
    // Of rows 8 to 15: 16 times as much, relative to kMagicBits.
    x.first[2] = int(uint32_t(first.x) * 16 - 15 * kMagicBits);
    x.first[3] = int(uint32_t(first.y) * 16 - 15 * kMagicBits);
    x.factors = *reinterpret_cast<float2 const*>(&group.factors[lane % 4 * 2]);
    return x;
  }

  /// A lane's codes of a stage, and the scales of rows lane / 4 and 8 further on.
  struct Codes {
    uint4 chunks[2];
    float scales[2];
  };
  /// scales_at: of row lane / 4.
  static __device__ __forceinline__ Codes load_codes(char const* codes, char const* scales_at, int lane) {
    T const* const scales = reinterpret_cast<T const*>(scales_at);
    return {{*reinterpret_cast<uint4 const*>(codes + lane * 16), *reinterpret_cast<uint4 const*>(codes + lane * 16 + 512)},
            {minfer::to_float(scales[0]), minfer::to_float(scales[8])}};
  }
  /// d[v] = 128 products of row lane / 4 + 8 (v / 2) and the digits of column 2 (lane % 4) + v % 2; those of rows 8 to 15 are 16 times as
  /// large.
  static __device__ __forceinline__ void multiply(Codes const& codes, Activations const& x, int32_t (&d)[4]) {
    constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
#pragma unroll
    for (int v = 0; v < 4; ++v) d[v] = x.first[v];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 const& chunk = codes.chunks[i / 2];
      uint32_t const first = i % 2 == 0 ? chunk.x : chunk.z, second = i % 2 == 0 ? chunk.y : chunk.w;
      uint32_t const a[4] = {first & kLow, first & kHigh, second & kLow, second & kHigh};
      asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x.b[i / 2][i % 2 * 2]), "r"(x.b[i / 2][i % 2 * 2 + 1]));
    }
  }
  static __device__ __forceinline__ void add(int32_t const (&d)[4], Codes const& codes, Activations const& x, float (&sums)[4]) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      float const whole = __int_as_float(d[v]) - kMagic;
      sums[v] = fmaf(codes.scales[v / 2] * (v % 2 == 0 ? x.factors.x : x.factors.y), whole, sums[v]);
    }
  }

  /// Of a token and row lane / 4 + 8 half, in lanes that are multiples of 4: the sum over its digits, in their order.
  static __device__ __forceinline__ float total(float const (&sums)[4], int half, int token, int) {
    constexpr unsigned kAll = 0xffffffffu;
    float const even = sums[half * 2], odd = sums[half * 2 + 1];
    float sum;
    if (token == 0) {  // columns 0 and 1, and 2 of the next lane
      sum = even + odd + __shfl_down_sync(kAll, even, 1);
    } else {  // column 3 of the next lane, and both of the one behind it
      sum = __shfl_down_sync(kAll, odd, 1) + __shfl_down_sync(kAll, even, 2) + __shfl_down_sync(kAll, odd, 2);
    }
    return half == 0 ? sum : sum * 0.0625f;
  }
};

}  // namespace minfer::decoder_block
