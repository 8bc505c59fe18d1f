// Products of activations with int4 weights in the batch-invariant mode, for in_order_sm90.cuh.
#pragma once

#include "common/mma_sm80.cuh"
#include "decoder_block/layout.h"
#include "quantized_gemm/dequantize.cuh"

namespace minfer::decoder_block {

/// Weights of int4 as fragments of a 16-bit type, with the bits of w4a16_gemm's. Activations lie as ScaledActivations has them.
template <DataType kType>
struct InOrderInt4Weights {
  static constexpr WeightFormat kFormat = WeightFormat::kInt4;
  static constexpr bool kInOrder = true;
  struct Group {};
  using Codes = w4a16::Codes<kType, kFormat, true>;
  using H = w4a16::Half2<kType>;

  /// Of rows lane / 4 and 8 further on, in a group: what fragments are made with.
  struct Factors {
    uint32_t scale[2], zero[2];
  };
  /// scales: of rows lane / 4 and 8 further on.
  static __device__ __forceinline__ Factors factors_of(uint16_t const (&scales)[2]) {
    Factors f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t const twice = w4a16::both_halves(scales[r]);
      if constexpr (Codes::kFolds) {
        f.scale[r] = H::mul(twice, Codes::folded_factor(r));
        f.zero[r] = H::mul(twice, Codes::kFoldedZero);
      } else {
        f.scale[r] = H::mul(twice, Codes::inverse(r));
        f.zero[r] = H::mul(Codes::kSymmetricZero, Codes::factor(r) ^ 0x80008000u);
      }
    }
    return f;
  }
  /// What sums still lack.
  static constexpr float rest() {
    if constexpr (Codes::kFolds) {
      return Codes::kFoldedRest;
    } else {
      return w4a16::Scale<kType, kFormat>::kRest;
    }
  }

  /// A lane's codes of a block of 64 k and activations; of every second block, the scales of both.
  struct Block {
    uint4 codes, x[2];
    uint16_t scales[2];
  };
  /// sums += 64 products of rows lane / 4 and 8 further on.
  static __device__ __forceinline__ void multiply(Block const& block, Factors const& f, float (&sums)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t const word[1] = {i == 0 ? block.codes.x : i == 1 ? block.codes.y : i == 2 ? block.codes.z : block.codes.w};
      uint32_t a[4];
      if constexpr (Codes::kFolds) {
        Codes::folded(word, f.scale, f.zero, a);
      } else {
        Codes::fragment(word, f.zero, {}, a);
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = H::mul(a[r], f.scale[r % 2]);
      }
      uint4 const& b = block.x[i / 2];
      multiply_16x8x16<kType>(sums, a, i % 2 == 0 ? b.x : b.z, i % 2 == 0 ? b.y : b.w);
    }
  }
};

}  // namespace minfer::decoder_block
