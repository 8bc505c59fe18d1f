// Online softmax over blocks of scores in WGMMA's accumulator layout: value e + 2 h + 4 j of a thread is row lane / 4 + 8 h of its warp's 16,
// column 8 j + 2 (lane % 4) + e. Four neighbouring lanes share a row.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/shared/mask.h"

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

/// Scores become tanh(score * inner).
template <int kValues, class Scores>
__device__ __forceinline__ void cap_scores(Scores& scores, float inner) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) scores(i) = tanh_fast(scores(i) * inner);
}

/// A softcap of scores: softcap * tanh(inner * score). For scores up to `limit` by a polynomial (relative error 2^-12.2; tanh.approx: 2^-11),
/// as exponentials keep the special function units busy. In units of log2: score * (((root * score)^2 + middle)^2 + rest).
struct Softcap {
  float inner;  // scale / softcap
  float limit;
  float root, middle, rest;
  float settled;  // a row's highest from which on what lies under -limit is less than 2^-24 of it

  static Softcap make(double scale, double softcap) {
    // tanh(x) = x (0.9997852 - 0.3262967 x^2 + 0.09735545 x^4) to x = 3 / 4; that rises with x everywhere
    constexpr double kLimit = 0.75, kFirst = 0.9997852, kThird = -0.3262967, kFifth = 0.09735545;
    double const inner = scale / softcap, unit = scale * double(kLog2E), middle = kThird / (2 * sqrt(kFifth));
    return {float(inner),
            float(kLimit / inner),
            float(sqrt(sqrt(kFifth * unit)) * inner),
            float(middle * sqrt(unit)),
            float((kFirst - middle * middle) * unit),
            float(24.0 - softcap * double(kLog2E) * tanh(kLimit))};
  }
  /// What a score is multiplied by.
  __device__ float factor(float score) const {
    float const x = score * root, inside = fmaf(x, x, middle);
    return fmaf(inside, inside, rest);
  }
};

/// kValues: scores of a thread in a block.
template <int kValues>
struct OnlineSoftmax {
  float scale_log2;  // of scores, log2(e) in it
  float highest[2];  // of a row so far, in units of log2; -inf: no key yet
  float sum[2];      // of this thread's columns

  __device__ explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2), highest{-INFINITY, -INFINITY}, sum{0.0f, 0.0f} {}

  /// Scores become exp(score - highest). Returns whether sums so far are to be multiplied by `rescale`, the same for a warp: a maximum that
  /// grows by less than a factor 2^8 of the exponentials is not followed (FlashAttention-4), P stays below 2^8.
  template <class Scores>
  __device__ bool step(Scores& scores, float (&rescale)[2]) {
    float top[2], offset[2];
    find_highest(scores, top);
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = of_row(top[h]) * scale_log2;
    bool const grown = follow(top, rescale, offset);
    add_exponentials(scores, rescale, [&](float score, int h) { return fmaf(score, scale_log2, -offset[h]); });
    return __any_sync(0xffffffffu, grown);
  }

  /// Beneath a softcap, of which scale_log2 is: whether a warp's scores in a block, none of them masked, are small enough for step_small();
  /// else step_large(). top: what both are to be given. settled: whether low scores do not matter any more; false before the first block.
  template <class Scores>
  __device__ bool are_small(Scores const& scores, float (&top)[2], Softcap const& cap, bool settled) const {
    find_highest(scores, top);
    float farthest = fmaxf(top[0], top[1]);
    if (!settled) {
      float lowest[2] = {scores(0), scores(1)};
#pragma unroll
      for (int i = 2; i < kValues; ++i) lowest[i % 2] = fminf(lowest[i % 2], scores(i));
      farthest = fmaxf(farthest, -fminf(lowest[0], lowest[1]));
    }
    return !__any_sync(0xffffffffu, farthest > cap.limit);
  }

  template <class Scores>
  __device__ bool step_small(Scores& scores, float (&rescale)[2], float (&top)[2], Softcap const& cap, bool& settled) {
    float offset[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = of_row(top[h]);
      top[h] *= cap.factor(top[h]);
    }
    bool const grown = follow(top, rescale, offset);
    add_exponentials(scores, rescale, [&](float score, int h) { return fmaf(score, cap.factor(score), -offset[h]); });
    if (!settled) settled = __all_sync(0xffffffffu, fminf(highest[0], highest[1]) >= cap.settled);
    return __any_sync(0xffffffffu, grown);
  }

  template <class Scores>
  __device__ bool step_large(Scores& scores, float (&rescale)[2], float (&top)[2], Softcap const& cap) {
    float offset[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = tanh_fast(of_row(top[h]) * cap.inner) * scale_log2;
    bool const grown = follow(top, rescale, offset);
    add_exponentials(scores, rescale, [&](float score, int h) { return fmaf(tanh_fast(score * cap.inner), scale_log2, -offset[h]); });
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
    float const higher = fmaxf(highest[h], sink * kLog2E), base = higher == -INFINITY ? 0.0f : higher;
    float const keep = exp2_fast(highest[h] - base), total = fmaf(sum[h], keep, exp2_fast(sink * kLog2E - base));
    *lse = (base + log2_fast(total)) * kLn2;
    return total == 0.0f ? 0.0f : keep * inverse_fast(total);
  }

 private:
  /// Of a thread's columns.
  template <class Scores>
  static __device__ void find_highest(Scores const& scores, float (&highest)[2]) {
    float top[2][2];  // two chains each, for their latency
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i / 2][i % 2] = fmaxf(scores(2 * i), scores(2 * i + 1));
      // Values 2 i and 2 i + 1 are of row i % 2.
#pragma unroll
    for (int i = 4; i < kValues / 2; ++i) {
      float& chain = top[i / 2 % 2][i % 2];
      chain = fmaxf(chain, fmaxf(scores(2 * i), scores(2 * i + 1)));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) highest[h] = fmaxf(top[0][h], top[1][h]);
  }

  static __device__ float of_row(float highest) {
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
    return fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
  }

  /// top: of the block's rows, in units of log2. Returns whether one of the thread's rows is to be rescaled.
  __device__ bool follow(float const (&top)[2], float (&rescale)[2], float (&offset)[2]) {
    constexpr float kSlack = 8.0f;
    bool grown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      bool const follow = top[h] > highest[h] + kSlack;
      rescale[h] = 1.0f;
      if (follow) {
        rescale[h] = exp2_fast(highest[h] - top[h]);
        highest[h] = top[h];
      }
      grown = grown || follow;
      offset[h] = highest[h] == -INFINITY ? 0.0f : highest[h];
    }
    return grown;
  }

  /// Scores become 2^exponent(score, row).
  template <class Scores, class Exponent>
  __device__ void add_exponentials(Scores& scores, float const (&rescale)[2], Exponent const& exponent) {
    float total[2][2] = {};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      scores(i) = exp2_fast(exponent(scores(i), i / 2 % 2));
      total[i % 2][i / 2 % 2] += scores(i);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = fmaf(sum[h], rescale[h], total[0][h] + total[1][h]);
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
