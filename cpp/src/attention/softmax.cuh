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
/// exp2 by the FMA pipe, beside a busy special function unit: 2^i from rounding, 2^f, |f| <= 1/2, by a polynomial (relative error 3e-6).
/// Of -infinity 0.
__device__ __forceinline__ float exp2_polynomial(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: its sum with x ends in x's integer
  x = fmaxf(x, -127.0f);
  float const rounded = x + kRound, f = x - (rounded - kRound);
  float y = fmaf(f, 0.00958285294f, 0.0559064262f);
  y = fmaf(y, f, 0.240240991f);
  y = fmaf(y, f, 0.693124175f);
  y = fmaf(y, f, 1.0f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(rounded) << 23));
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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
  static constexpr int kByPolynomial = 2;  // of so many exponentials one, where another function takes as many of the unit's slots

  float scale_log2;  // of scores, log2(e) in it
  float highest[2];  // of a row so far, of unscaled scores; -inf: no key yet
  float sum[2];      // of this thread's columns

  __device__ explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2), highest{-INFINITY, -INFINITY}, sum{0.0f, 0.0f} {}

  /// Scores become exp(score - highest). Returns whether sums so far are to be multiplied by `rescale`, the same for a warp: a maximum that
  /// grows by less than a factor 2^8 of the exponentials is not followed (FlashAttention-4), P stays below 2^8.
  /// capped: scores are tanh of something, which took as long as their exponentials.
  template <class Scores>
  __device__ bool step(Scores& scores, float (&rescale)[2], bool capped) {
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
    if (capped) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        float const x = fmaf(scores(i), scale_log2, -offset[i / 2 % 2]);
        scores(i) = i % kByPolynomial == 0 ? exp2_polynomial(x) : exp2_fast(x);
        total[i % 2][i / 2 % 2] += scores(i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        scores(i) = exp2_fast(fmaf(scores(i), scale_log2, -offset[i / 2 % 2]));
        total[i % 2][i / 2 % 2] += scores(i);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = fmaf(sum[h], rescale[h], total[0][h] + total[1][h]);
    return __any_sync(0xffffffffu, grown);
  }

  /// What the row's output is to be multiplied by. lse: natural logarithm of what it was divided by, so that output * exp(lse) adds up over
  /// parts of the keys; a sink is a key without a value and counts.
  __device__ float finish(int h, float sink, float* lse) {
    float total = sum[h];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    float top = highest[h] * scale_log2;
    if (sink > -INFINITY) {
      float const higher = fmaxf(top, sink * kLog2E);
      total = total * exp2_fast(top - higher) + exp2_fast(sink * kLog2E - higher);
      *lse = (higher + log2_fast(total)) * kLn2;
      return __fdividef(exp2_fast(top - higher), total);
    }
    *lse = total == 0.0f ? -INFINITY : (top + log2_fast(total)) * kLn2;
    return total == 0.0f ? 0.0f : __fdividef(1.0f, total);
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
