// Products of activations with weights [n, k] of their own 16-bit type, for decoder_block_sm90.cuh.
//
// A warp has 64 columns of a stage: half of a group of activations. Lane l has of 16 columns 2 (l % 4) and the next, and those 8 further
// on.
#pragma once

#include "common/mma_sm80.cuh"
#include "decoder_block/layout.h"
#include "decoder_block/scaled_activations_sm90.cuh"
#include "minfer/types.h"

namespace minfer::decoder_block {

template <DataType kType, int kTokens>
struct DenseWeights : ScaledActivations<kType, kTokens, 64> {
  using Scaled = ScaledActivations<kType, kTokens, 64>;
  static constexpr WeightFormat kFormat = WeightFormat::kDense;
  static constexpr bool kInOrder = false;
  using typename Scaled::Activations, typename Scaled::Group, typename Scaled::Made;
  /// As Int4Weights::store.
  static __device__ __forceinline__ void store(Made const& made, char* rows, int pitch, Group* groups, int token, int v, int lane) {
    int const chunk = v / 2, half = v % 2;  // the numbers of l % 4 = 2 half, and of the next, of 16
    char* const to = rows + token * pitch + chunk / 2 * 64 + chunk % 2 * 8 + half * 32;
#pragma unroll
    for (int q = 0; q < 2; ++q) *reinterpret_cast<uint2*>(to + 16 * q) = make_uint2(made.pairs[q], made.pairs[2 + q]);
    Scaled::store_factor(made, groups, token, v, lane);
  }

  /// sums[v] += 64 products of a stage, of row lane / 4 + 8 (v / 2) and token v % 2 (both are the same of one token). codes: 16 rows of 128
  /// bytes, swizzled by TMA.
  static __device__ __forceinline__ void multiply(char const* codes, Activations const& x, int lane, float (&sums)[4]) {
    int const row = lane % 16;
    uint32_t const at = shared_address(codes) + row * 128 + (lane / 16 ^ row % 8) * 16;
    float d[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t a[4];
      load_matrices(at ^ (j * 32), a);
      uint4 const& b = x.b[j / 2];
      multiply_16x8x16<kType>(d[j % 2], a, j % 2 == 0 ? b.x : b.z, j % 2 == 0 ? b.y : b.w);
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) sums[v] = fmaf(x.factors[v % kTokens], d[0][v] + d[1][v], sums[v]);
  }
};

}  // namespace minfer::decoder_block
