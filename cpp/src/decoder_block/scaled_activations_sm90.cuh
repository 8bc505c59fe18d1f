// Activations as 16-bit operands of MMAs, beside weights of 8 and 16 bits, for decoder_block_sm90.cuh: times a power of two for each group
// of 128 that takes the largest to 2^14 or above. That is exact for what is of the operands' type, and in f16 for bf16 numbers down to
// 2^-28 of the largest; it rounds the products of a norm's weight to the operands' 11 or 8 bits.
#pragma once

#include "common/float16.cuh"
#include "decoder_block/layout.h"
#include "minfer/types.h"

namespace minfer::decoder_block {

/// kOperand: the type of the operands.
template <DataType kOperand, int kTokens>
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
};

}  // namespace minfer::decoder_block
