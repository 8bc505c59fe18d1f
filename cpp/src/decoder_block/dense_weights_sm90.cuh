// Products of activations with weights [n, k] of their own 16-bit type, for decoder_block_sm90.cuh.
//
// A warp has 64 columns of a stage: half of a group of activations. The tokens' columns are repeated, so that lanes of all columns have
// sums. Of 32 activations are stored, one after the other, for each l % 4 its four of the first 16, which are columns 2 (l % 4) and the
// next and those 8 further on, and its four of the others.
#pragma once

#include "common/mma_sm80.cuh"
#include "decoder_block/layout.h"
#include "decoder_block/scaled_activations_sm90.cuh"
#include "minfer/types.h"

namespace minfer::decoder_block {

template <DataType kType, int kTokens>
struct DenseWeights {
  static constexpr WeightFormat kFormat = WeightFormat::kDense;
  using Scaled = ScaledActivations<kType, kTokens>;
  using Group = typename Scaled::Group;
  using Made = typename Scaled::Made;
  static __device__ __forceinline__ Made make(float const (&x)[8]) { return Scaled::make(x); }
  /// As Int4Weights::store.
  static __device__ __forceinline__ void store(Made const& made, char* rows, int pitch, Group* groups, int token, int v, int lane) {
    int const chunk = v / 2, half = v % 2;  // the numbers of l % 4 = 2 half, and of the next, of 16
    char* const to = rows + token * pitch + chunk / 2 * 64 + chunk % 2 * 8 + half * 32;
#pragma unroll
    for (int q = 0; q < 2; ++q) *reinterpret_cast<uint2*>(to + 16 * q) = make_uint2(made.pairs[q], made.pairs[2 + q]);
    Scaled::store_factor(made, groups, token, v, lane);
  }

  static constexpr int kMostHeld = 0;
  struct Activations {
    uint4 b[2];  // of 32 columns each
    float factors[kTokens];
  };
  static __device__ __forceinline__ uint32_t first_of(uint32_t rows, int pitch, int m, int warp, int lane) {
    return rows + lane / 4 % kTokens * pitch + lane % 4 * 16 + warp * 128;
  }
  static constexpr int kStep = kStageK, kGroupStep = kWarps / 2;
  static __device__ __forceinline__ int group_of(int warp) { return warp / 2; }
  static __device__ __forceinline__ Activations load(uint32_t at, Group const& group, int lane) {
    Activations x;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.b[j].x), "=r"(x.b[j].y), "=r"(x.b[j].z), "=r"(x.b[j].w)
                   : "r"(at + 64 * j)
                   : "memory");
    }
#pragma unroll
    for (int token = 0; token < kTokens; ++token) x.factors[token] = group.factors[token];
    return x;
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

  static __device__ __forceinline__ float total(float const (&sums)[4], int half, int token, int) { return sums[half * 2 + token]; }
};

}  // namespace minfer::decoder_block
