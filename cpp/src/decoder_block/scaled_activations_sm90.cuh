// Activations as 16-bit operands of MMAs, beside weights of 8 and 16 bits, for decoder_block_sm90.cuh: times a power of two for each group
// of 128 that takes the largest to 2^14 or above. That is exact for what is of the operands' type, and in f16 for bf16 numbers down to
// 2^-28 of the largest; it rounds the products of a norm's weight to the operands' 11 or 8 bits.
// The tokens' columns are repeated, so that lanes of all columns of an MMA have sums. Of 32 activations are stored, one after the other,
// for each lane % 4 its four of the first 16 and its four of the others; which those are, the weights say.
#pragma once

#include "common/float16.cuh"
#include "decoder_block/layout.h"
#include "minfer/types.h"

namespace minfer::decoder_block {

/// kOperand: the type of the operands; kColumns: of a stage, that a consumer warp has.
template <DataType kOperand, int kTokens, int kColumns>
struct ScaledActivations {
  using F16 = Float16<kOperand>;

  struct Group {  // of 128 activations, by tokens
    float factors[kTokens];
  };

  /// What becomes of a converter's 8 numbers, and what is known of their group, which are 16 threads'.
  struct Made {
    uint32_t pairs[4];
    int exponent;
    uint32_t most;
  };
  static __device__ __forceinline__ Made make(float const (&x)[8]) {
    Made made;
    uint32_t most = 0;  // as bits, of which those of NaN and infinity are the largest
#pragma unroll
    for (int e = 0; e < 8; ++e) most = max(most, __float_as_uint(x[e]) & 0x7fffffffu);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
    made.most = most;
    // Times the power of two that takes the largest to 2^14 or above, below 2^15.
    made.exponent = min(max(int(most >> 23), 15), 254);
    float const factor = __uint_as_float(uint32_t(268 - made.exponent) << 23);
#pragma unroll
    for (int p = 0; p < 4; ++p) made.pairs[p] = F16::pack(x[2 * p] * factor, x[2 * p + 1] * factor);
    return made;
  }
  /// By all threads of a group; v: of the thread, as column_of has it.
  static __device__ __forceinline__ void store_factor(Made const& made, Group* groups, int token, int v, int lane) {
    if (lane % 16 != 0) return;
    float const place = __uint_as_float(uint32_t(made.exponent - 14) << 23);
    groups[v / 16].factors[token] = made.most >= 0x7f800000u ? __uint_as_float(0x7fffffffu) : place;
  }

  static constexpr int kMostHeld = 0;  // as Int4Weights has these
  static constexpr int kStep = kWarps * kColumns * 2, kGroupStep = kWarps * kColumns / 128;
  static __device__ __forceinline__ int group_of(int warp) { return warp * kColumns / 128; }
  struct Activations {
    uint4 b[kColumns / 32];
    float factors[kTokens];
  };
  static __device__ __forceinline__ uint32_t first_of(uint32_t rows, int pitch, int, int warp, int lane) {
    return rows + lane / 4 % kTokens * pitch + lane % 4 * 16 + warp * kColumns * 2;
  }
  static __device__ __forceinline__ Activations load(uint32_t at, Group const& group, int) {
    Activations x;
#pragma unroll
    for (int j = 0; j < kColumns / 32; ++j) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.b[j].x), "=r"(x.b[j].y), "=r"(x.b[j].z), "=r"(x.b[j].w)
                   : "r"(at + 64 * j)
                   : "memory");
    }
#pragma unroll
    for (int token = 0; token < kTokens; ++token) x.factors[token] = group.factors[token];
    return x;
  }
  static __device__ __forceinline__ float total(float const (&sums)[4], int half, int token, int) { return sums[half * 2 + token]; }
};

}  // namespace minfer::decoder_block
