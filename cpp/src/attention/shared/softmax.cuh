// Online softmax over blocks of scores that lie in the accumulator layout of WGMMA (and of mma.sync m16n8): value e + 2 h + 4 j of a thread
// is in row lane / 4 + 8 h of its warp's 16 rows and in column 8 j + 2 (lane % 4) + e. Four neighbouring lanes share a row.
// Exponentials are powers of two: scores are multiplied by log2(e), so row_max and every exponent below are in units of log2.
// Sources: online softmax (Milakov and Gimelshein, 2018); the threshold below which a growing maximum is ignored (FlashAttention-4).
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/shared/mask.h"
#include "minfer/attention.h"

namespace minfer::attention {

constexpr float kRaiseThreshold = 8.0f;  // by which a row's maximum must grow, in units of log2, before exponentials are relative to it
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

/// a * b; kExact: rounded, also where a sum follows.
template <bool kExact>
__device__ __forceinline__ float multiply(float a, float b) {
  return kExact ? __fmul_rn(a, b) : a * b;
}

/// The end of a row, for all kernels: returns what the row's output is to be multiplied by, where exponentials are relative to row_max (in
/// units of log2) and add up to row_sum. lse is the natural logarithm of the softmax's denominator, so that outputs over parts of the keys
/// add up when each is multiplied by exp(lse). A sink is a key without a value: it counts in the denominator of rows that hold a query.
/// kExact: products are rounded before they are used, so that the compiler cannot merge them with a sum in one place and not in another.
template <class Element, bool kExact = false>
__device__ __forceinline__ float finish_row(SoftmaxOptions const& options, int head, bool is_query, float row_max, float row_sum,
                                            float* lse) {
  float sink = -INFINITY;
  if (options.sinks != nullptr && is_query) sink = multiply<kExact>(float(static_cast<Element const*>(options.sinks)[head]), kLog2E);
  float const max_with_sink = fmaxf(row_max, sink), base = max_with_sink == -INFINITY ? 0.0f : max_with_sink;
  float const keep = exp2_fast(row_max - base), sum = fmaf(row_sum, keep, exp2_fast(sink - base));
  float const factor = sum == 0.0f ? 0.0f : keep * inverse_fast(sum);
  *lse = (base + log2_fast(sum)) * kLn2;
  return factor;
}

/// Replaces each score by tanh(score * inner), of the thread's row.
template <int kValues, class Scores>
__device__ __forceinline__ void cap_scores(Scores& scores, float const (&inner)[2]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) scores(i) = tanh_fast(scores(i) * inner[i / 2 % 2]);
}

template <int kValues, class Scores>
__device__ __forceinline__ void cap_scores(Scores& scores, float inner) {
  float const of_rows[2] = {inner, inner};
  cap_scores<kValues>(scores, of_rows);
}

/// A softcap replaces each score by softcap * tanh(inner * score). Exponentials already keep the special function units busy, so tanh of
/// small scores, up to `limit`, is a polynomial (relative error 2^-12.2, where tanh.approx has 2^-11). In units of log2 the polynomial is
/// score * (((root * score)^2 + middle)^2 + rest).
struct Softcap {
  float inner;  // scale / softcap
  float limit;
  float root, middle, rest;
  float negligible_min;  // where a row's maximum is at least this, a score below -limit weighs less than 2^-24 of the row's largest

  static Softcap make(double scale, double softcap) {
    // tanh(x) is approximated by x (0.9997852 - 0.3262967 x^2 + 0.09735545 x^4) up to x = 3 / 4; this polynomial rises with x everywhere.
    constexpr double kLimit = 0.75, kFirst = 0.9997852, kThird = -0.3262967, kFifth = 0.09735545;
    double const inner = scale / softcap, unit = scale * double(kLog2E), middle = kThird / (2 * sqrt(kFifth));
    return {float(inner),
            float(kLimit / inner),
            float(sqrt(sqrt(kFifth * unit)) * inner),
            float(middle * sqrt(unit)),
            float((kFirst - middle * middle) * unit),
            float(24.0 - softcap * double(kLog2E) * tanh(kLimit))};
  }
  /// What a score is multiplied by to become its capped score in units of log2.
  __device__ float factor(float score) const {
    float const x = score * root, inside = fmaf(x, x, middle);
    return fmaf(inside, inside, rest);
  }
};

/// The running maximum and sum of a thread's two rows. kValues: scores that a thread has of a block.
///
/// Each step() takes a block: it replaces the scores by exp(score - maximum), adds them to the sums, and returns whether the output that
/// was accumulated so far must be multiplied by `rescale`; all lanes of a warp get the same answer. The maximum is only raised when it
/// grows by more than a factor 2^8 of the exponentials (FlashAttention-4): probabilities then stay below 2^8, and most blocks rescale
/// nothing.
/// kExact: as of finish_row(). kScales: of scales, one for all rows or one for each of the thread's two.
template <int kValues, bool kExact = false, int kScales = 1>
struct OnlineSoftmax {
  float scale_log2[kScales];  // of the scores, times log2(e)
  float row_max[2];           // the maximum that exponentials are relative to, in units of log2; -inf before the first key
  float row_sum[2];           // over this thread's columns; reduce_sums() adds up the row's four lanes

  __device__ explicit OnlineSoftmax(float scale_log2) : row_max{-INFINITY, -INFINITY}, row_sum{0.0f, 0.0f} {
#pragma unroll
    for (int h = 0; h < kScales; ++h) this->scale_log2[h] = scale_log2;
  }
  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_max[h] = -INFINITY;
      row_sum[h] = 0.0f;
    }
  }

  /// A block of scores without a softcap, or of scores to which cap_scores() was applied.
  template <class Scores>
  __device__ bool step(Scores& scores, float (&rescale)[2]) {
    float block_max[2], offset[2];
    find_max(scores, block_max);
#pragma unroll
    for (int h = 0; h < 2; ++h) block_max[h] = multiply<kExact>(reduce_max(block_max[h]), scale_log2[h % kScales]);
    bool const raised = raise_max(block_max, rescale, offset);
    add_exponentials(scores, rescale, [&](float score, int h) { return fmaf(score, scale_log2[h % kScales], -offset[h]); });
    return __any_sync(0xffffffffu, raised);
  }

  /// With a softcap, whose factor is then in scale_log2: whether all of a warp's scores in an unmasked block are within the limit of the
  /// polynomial, for step_polynomial(); otherwise the block takes step_tanh(). block_max is filled in for both. min_is_negligible: scores
  /// below the limit do not count, so their minimum need not be found; it is false before the first block, and step_polynomial() sets it.
  template <class Scores>
  __device__ bool within_polynomial(Scores const& scores, float (&block_max)[2], Softcap const& cap, bool min_is_negligible) const {
    find_max(scores, block_max);
    float largest = fmaxf(block_max[0], block_max[1]);
    if (!min_is_negligible) {
      float block_min[2] = {scores(0), scores(1)};
#pragma unroll
      for (int i = 2; i < kValues; ++i) block_min[i % 2] = fminf(block_min[i % 2], scores(i));
      largest = fmaxf(largest, -fminf(block_min[0], block_min[1]));
    }
    return !__any_sync(0xffffffffu, largest > cap.limit);
  }

  template <class Scores>
  __device__ bool step_polynomial(Scores& scores, float (&rescale)[2], float (&block_max)[2], Softcap const& cap, bool& min_is_negligible) {
    float offset[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      block_max[h] = reduce_max(block_max[h]);
      block_max[h] *= cap.factor(block_max[h]);
    }
    bool const raised = raise_max(block_max, rescale, offset);
    add_exponentials(scores, rescale, [&](float score, int h) { return fmaf(score, cap.factor(score), -offset[h]); });
    if (!min_is_negligible) min_is_negligible = __all_sync(0xffffffffu, fminf(row_max[0], row_max[1]) >= cap.negligible_min);
    return __any_sync(0xffffffffu, raised);
  }

  template <class Scores>
  __device__ bool step_tanh(Scores& scores, float (&rescale)[2], float (&block_max)[2], Softcap const& cap) {
    float offset[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) block_max[h] = tanh_fast(reduce_max(block_max[h]) * cap.inner) * scale_log2[h % kScales];
    bool const raised = raise_max(block_max, rescale, offset);
    add_exponentials(scores, rescale,
                     [&](float score, int h) { return fmaf(tanh_fast(score * cap.inner), scale_log2[h % kScales], -offset[h]); });
    return __any_sync(0xffffffffu, raised);
  }

  /// Makes row_sum the sum of the whole row; once, before finish_row().
  __device__ void reduce_sums() {
#pragma unroll
    for (int x = 1; x < 4; x *= 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], x);
    }
  }

 private:
  /// The maximum over a thread's own columns of both rows.
  template <class Scores>
  static __device__ void find_max(Scores const& scores, float (&thread_max)[2]) {
    float chain[2][2];  // two independent chains for each row hide the latency of fmaxf
#pragma unroll
    for (int i = 0; i < 4; ++i) chain[i / 2][i % 2] = fmaxf(scores(2 * i), scores(2 * i + 1));
      // Values 2 i and 2 i + 1 are in row i % 2.
#pragma unroll
    for (int i = 4; i < kValues / 2; ++i) {
      float& longest = chain[i / 2 % 2][i % 2];
      longest = fmaxf(longest, fmaxf(scores(2 * i), scores(2 * i + 1)));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) thread_max[h] = fmaxf(chain[0][h], chain[1][h]);
  }

  /// The maximum over the four lanes that share a row.
  static __device__ float reduce_max(float thread_max) {
    thread_max = fmaxf(thread_max, __shfl_xor_sync(0xffffffffu, thread_max, 1));
    return fmaxf(thread_max, __shfl_xor_sync(0xffffffffu, thread_max, 2));
  }

  /// Raises row_max to block_max (in units of log2) where it grew past the threshold. Returns whether one of the thread's two rows was
  /// raised.
  __device__ bool raise_max(float const (&block_max)[2], float (&rescale)[2], float (&offset)[2]) {
    bool any = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      bool const raised = block_max[h] > row_max[h] + kRaiseThreshold;
      rescale[h] = 1.0f;
      if (raised) {
        rescale[h] = exp2_fast(row_max[h] - block_max[h]);
        row_max[h] = block_max[h];
      }
      any = any || raised;
      offset[h] = row_max[h] == -INFINITY ? 0.0f : row_max[h];
    }
    return any;
  }

  /// Replaces each score by 2^exponent(score, row) and adds it to its row's sum.
  template <class Scores, class Exponent>
  __device__ void add_exponentials(Scores& scores, float const (&rescale)[2], Exponent const& exponent) {
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      scores(i) = exp2_fast(exponent(scores(i), i / 2 % 2));
      sum[i % 2][i / 2 % 2] += scores(i);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[h] = fmaf(row_sum[h], rescale[h], sum[0][h] + sum[1][h]);
  }
};

/// The bits of a thread's columns of a row that lie below `limit`: bit e + 2 j stands for column 8 j + e, where e < 2.
__device__ __forceinline__ uint32_t columns_below(int limit) {
  int const pairs = limit >> 3, single = limit & 7, bits = limit <= 0 ? 0 : 2 * pairs + (single < 2 ? single : 2);
  return bits < 32 ? (1u << bits) - 1u : 0xffffffffu;
}

/// Sets the scores of keys that a row does not see to -inf. The block begins at key `block_begin`; row h sees keys begin[h] to end[h] - 1.
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
