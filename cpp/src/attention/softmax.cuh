// Online softmax over blocks of scores in WGMMA's accumulator layout: value e + 2 h + 4 j of a thread is row lane / 4 + 8 h of its warp's 16,
// column 8 j + 2 (lane % 4) + e. Four neighbouring lanes share a row.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/mask.h"

namespace minfer::attention {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float inverse_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// kValues: scores of a thread in a block.
template <int kValues>
struct OnlineSoftmax {
  float scale_log2;  // of scores, log2(e) in it
  float highest[2];  // of a row so far, of unscaled scores; -inf: no key yet
  float sum[2];      // of this thread's columns

  __device__ explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2), highest{-INFINITY, -INFINITY}, sum{0.0f, 0.0f} {}

  /// Scores become exp(score - highest). Returns whether sums so far are to be multiplied by `rescale`, the same for a warp: a maximum that
  /// grows by less than a factor 2^8 of the exponentials is not followed (FlashAttention-4), P stays below 2^8.
  template <class Scores>
  __device__ bool step(Scores& scores, float (&rescale)[2]) {
    constexpr float kSlack = 8.0f;
    float top[2][2];  // two chains each, for their latency
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i / 2][i % 2] = fmaxf(scores(2 * i), scores(2 * i + 1));
      // Values 2 i and 2 i + 1 are of row i % 2.
#pragma unroll
    for (int i = 4; i < kValues / 2; ++i) {
      float& chain = top[i / 2 % 2][i % 2];
      chain = fmaxf(chain, fmaxf(scores(2 * i), scores(2 * i + 1)));
    }
    float offset[2];
    bool grown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest_now = fmaxf(top[0][h], top[1][h]);
      highest_now = fmaxf(highest_now, __shfl_xor_sync(0xffffffffu, highest_now, 1));
      highest_now = fmaxf(highest_now, __shfl_xor_sync(0xffffffffu, highest_now, 2));
      bool const follow = highest_now * scale_log2 > highest[h] * scale_log2 + kSlack;
      rescale[h] = 1.0f;
      if (follow) {
        rescale[h] = exp2_fast((highest[h] - highest_now) * scale_log2);
        highest[h] = highest_now;
      }
      grown = grown || follow;
      offset[h] = highest[h] == -INFINITY ? 0.0f : highest[h] * scale_log2;
    }
    float total[2][2] = {};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      scores(i) = exp2_fast(fmaf(scores(i), scale_log2, -offset[i / 2 % 2]));
      total[i % 2][i / 2 % 2] += scores(i);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = fmaf(sum[h], rescale[h], total[0][h] + total[1][h]);
    return __any_sync(0xffffffffu, grown);
  }

  /// Sums of the whole rows; before finish(), once.
  __device__ void add_up() {
#pragma unroll
    for (int x = 1; x < 4; x *= 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], x);
    }
  }

  /// What the row's output is to be multiplied by. lse: natural logarithm of what it was divided by, so that output * exp(lse) adds up over
  /// parts of the keys; a sink is a key without a value and counts.
  __device__ float finish(int h, float sink, float* lse) const {
    float const top = highest[h] * scale_log2, higher = fmaxf(top, sink * kLog2E), base = higher == -INFINITY ? 0.0f : higher;
    float const keep = exp2_fast(top - base), total = fmaf(sum[h], keep, exp2_fast(sink * kLog2E - base));
    *lse = (base + log2_fast(total)) * kLn2;
    return total == 0.0f ? 0.0f : keep * inverse_fast(total);
  }
};

/// Bits of a thread's columns of a row that lie below `limit`: bit e + 2 j is column 8 j + e, e < 2.
__device__ __forceinline__ uint32_t columns_below(int limit) {
  int const pairs = limit >> 3, single = limit & 7, bits = limit <= 0 ? 0 : 2 * pairs + (single < 2 ? single : 2);
  return bits < 32 ? (1u << bits) - 1u : 0xffffffffu;
}

/// Columns of the block from key `block_begin` on that a row does not see become -inf.
template <int kValues, class Scores>
__device__ __forceinline__ void apply_mask(Scores& scores, int32_t const (&begin)[2], int32_t const (&end)[2], int32_t block_begin,
                                           int lane) {
  static_assert(kValues <= 64);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int const first = block_begin + 2 * (lane % 4);
    uint32_t const seen = columns_below(end[h] - first) & ~columns_below(begin[h] - first);
#pragma unroll
    for (int j = 0; j < kValues / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((seen & 1u << (2 * j + e)) == 0) scores(4 * j + 2 * h + e) = -INFINITY;
      }
    }
  }
}

}  // namespace minfer::attention
