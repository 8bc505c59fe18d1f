// Products of activations with e4m3 weights [n, k], which have a scale for each row, or for each block of 128 x 128, for
// decoder_block_sm90.cuh.
//
// Both operands of the MMAs are f16: codes by the conversion of two, which is one instruction, and activations as
// scaled_activations_sm90.cuh makes them, where operators of 8-bit activations would leave 4 bits.
// Order of k in an MMA: lane l has of 16 codes those from 4 (l % 4) on, the first two as columns 2 (l % 4) and the next of the MMA, the
// others as those 8 behind them.
#pragma once

#include "common/mma_sm80.cuh"
#include "decoder_block/layout.h"
#include "decoder_block/scaled_activations_sm90.cuh"
#include "minfer/types.h"

namespace minfer::decoder_block {

template <int kTokens>
struct E4m3Weights : ScaledActivations<DataType::kF16, kTokens, 128> {
  using Scaled = ScaledActivations<DataType::kF16, kTokens, 128>;
  static constexpr WeightFormat kFormat = WeightFormat::kFp8E4M3;
  static constexpr bool kInOrder = false;
  using typename Scaled::Activations, typename Scaled::Group, typename Scaled::Made;
  static __device__ __forceinline__ void store(Made const& made, char* rows, int pitch, Group* groups, int token, int v, int lane) {
    int const chunk = v / 2, first = v % 2;  // the numbers of l % 4 = first, and of first + 2, of 16
    char* const to = rows + token * pitch + chunk / 2 * 64 + chunk % 2 * 8 + first * 16;
#pragma unroll
    for (int q = 0; q < 2; ++q) *reinterpret_cast<uint2*>(to + 32 * q) = make_uint2(made.pairs[2 * q], made.pairs[2 * q + 1]);
    Scaled::store_factor(made, groups, token, v, lane);
  }

  static __device__ __forceinline__ void convert(uint32_t codes, uint32_t& low, uint32_t& high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high)
        : "r"(codes));
  }
  /// sums[v] += 128 products of a stage, of row lane / 4 + 8 (v / 2) and token v % 2 (both are the same of one token). codes: 16 rows of
  /// 128 bytes, swizzled by TMA; scales: of rows 0 to 7 and of the others.
  static __device__ __forceinline__ void multiply(char const* codes, float2 scales, Activations const& x, int lane, float (&sums)[4]) {
    int const row = lane % 16;
    uint32_t const at = shared_address(codes) + row * 128 + (lane / 16 ^ row % 8) * 16;
    float d[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t r[4];
      load_matrices(at ^ (j * 32), r);
      uint32_t a[2][4];
#pragma unroll
      for (int h = 0; h < 4; ++h) convert(r[h], a[h / 2][h % 2], a[h / 2][h % 2 + 2]);
      multiply_16x8x16<DataType::kF16>(d[0], a[0], x.b[j].x, x.b[j].y);
      multiply_16x8x16<DataType::kF16>(d[1], a[1], x.b[j].z, x.b[j].w);
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      sums[v] = fmaf((v < 2 ? scales.x : scales.y) * x.factors[v % kTokens], d[0][v] + d[1][v], sums[v]);
    }
  }
};

}  // namespace minfer::decoder_block
