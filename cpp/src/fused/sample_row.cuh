// A CTA's part of a row of logits: how it is loaded, changed by mask, bias and penalties, kept in shared memory, and walked over.
//
// Vectors of eight tokens are dealt to the team's threads by turns, so that a thread's vector j has the same number in shared memory for
// all of them. A row that is not changed is kept as it lies in memory, another one in fp32; tokens behind its end are -inf there. What does
// not fit into shared memory is read, and changed, anew in each walk.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/aligned_vector.cuh"
#include "common/dependent_launch.cuh"
#include "fused/row_vector.cuh"
#include "fused/sample_key.cuh"
#include "minfer/sampling.h"

namespace minfer::fused {

/// What a row has a value of.
enum Parameter { kTemperature, kMinP, kTopP, kTopK, kRepetition, kPresence, kFrequency, kSeed, kOffset, kParameters };

struct SampleParams {
  Sampling s;
  // The parameters' PerRow: of 32 bits up to kFrequency, of 64 bits from kSeed on.
  void const* of_rows[kParameters];
  uint64_t value[kParameters];                                  // as bits
  uint32_t ctas;                                                // of a row
  uint32_t slots;                                               // vectors of a thread
  bool resident;                                                // in shared memory
  bool aligned, bias_aligned, counts_aligned, allowed_aligned;  // a vector of 8 is one access, or two
};

struct Penalties {
  float repetition, presence, frequency;
};

/// 8 of a row's numbers from `at` on, those that the row does not have being zero.
template <class T>
__device__ __forceinline__ void load_8(T const* row, uint32_t at, int count, bool aligned, T (&v)[8]) {
  constexpr int kAtOnce = 16 / sizeof(T) < 8 ? 16 / sizeof(T) : 8;
  using Vector = AlignedVector<T, kAtOnce>;
  if (aligned && count == 8) {
#pragma unroll
    for (int i = 0; i < 8; i += kAtOnce) {
      Vector const x = load_operand(reinterpret_cast<Vector const*>(row + at + i));
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) v[i + e] = x.value[e];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = i < count ? load_operand(row + at + i) : T{};
  }
}

/// kProcessed: with mask, bias or penalties.
template <class T, bool kProcessed, unsigned kThreads>
class SampledRow {
 public:
  using Kept = std::conditional_t<kProcessed, float, T>;
  /// What a walk sees: what tokens are drawn by, or kRaw the logits as they were given.
  template <bool kRaw>
  using Seen = std::conditional_t<kRaw, T, Kept>;

  /// penalties: in shared memory, written before the row is loaded.
  __device__ __forceinline__ SampledRow(SampleParams const& params, Penalties const& penalties, uint4* kept, uint32_t row, uint32_t rank)
      : params_(params), s_(params.s), penalties_(penalties), kept_(kept + threadIdx.x), row_(row) {
    logits_ = static_cast<T const*>(s_.logits) + int64_t(row) * s_.logits_stride;
    first_ = (rank * kThreads + threadIdx.x) * kVectorElements;
  }

  /// Loads the row: its largest number, and the largest one as it was given.
  __device__ __forceinline__ void load(Largest* largest, float* raw_largest) {
    uint32_t const slots = params_.slots;
    uint32_t at = first_;
    auto const take = [&](RowVector<T> const& x, uint32_t j) {
      if constexpr (kProcessed) *raw_largest = larger_or_nan(*raw_largest, largest_of(x));
      RowVector<Kept> const changed = process(x, at);
      if (params_.resident) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) kept_[(j * kWords + w) * kThreads] = changed.words[w];
      }
      largest->take(largest_of(changed), j);
      at += step();
    };
    uint32_t first = 0;
    if (params_.aligned) {  // vectors that are whole
      auto const* from = reinterpret_cast<uint4 const*>(logits_ + at);
#pragma unroll 1
      for (; first + kTogether <= slots && at + (kTogether - 1) * step() + kVectorElements <= uint32_t(s_.vocabulary); first += kTogether) {
        RowVector<T> x[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
          for (int w = 0; w < RowVector<T>::kWords; ++w) x[i].words[w] = load_operand(from + w);
          from += step() / kVectorElements * RowVector<T>::kWords;
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) take(x[i], first + i);
      }
    }
#pragma unroll 1
    for (; first < slots; first += kTogether) {
      RowVector<T> x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i < slots) x[i] = request(at + i * step());
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= slots) break;
        fill_end(x[i], at);
        take(x[i], first + i);
      }
    }
  }

  /// Calls the body with each of the thread's vectors and its first token.
  template <bool kRaw, class Body>
  __device__ __forceinline__ void for_each_vector(Body&& body) const {
    uint32_t at = first_;
    uint4 const* kept = kept_;
#pragma unroll 1
    for (uint32_t left = params_.slots; left > 0; --left) {
      body(vector<kRaw>(kept, at), at);
      kept += kWords * kThreads;
      at += step();
    }
  }

  /// The key of a thread's largest number: of nothing but -inf it is 0.
  template <bool kRaw>
  __device__ __forceinline__ Key key_of_largest(Largest const& largest) const {
    if (largest.v != largest.v) return kNanKey;
    if (largest.v == -kInfinite) return 0;
    uint32_t const at = first_ + largest.slot * step();
    float v[kVectorElements];
    unpack(vector<kRaw>(kept_ + largest.slot * (kWords * kThreads), at), v);
    uint32_t i = kVectorElements - 1;
#pragma unroll
    for (int e = kVectorElements - 2; e >= 0; --e) i = v[e] == largest.v ? e : i;
    return key_of(largest.v, at + i);
  }

  /// A token's logit as it was given.
  __device__ __forceinline__ float raw_of(uint32_t token) const { return to_float(load_operand(logits_ + token)); }
  /// What a token is drawn by, in any thread.
  __device__ __forceinline__ float number_at(uint32_t token) const {
    if constexpr (!kProcessed) return raw_of(token);
    uint32_t const at = token / kVectorElements * kVectorElements, i = token % kVectorElements;
    RowVector<T> const x = request(at);
    float v[kVectorElements];
    unpack(process(x, at), v);
    float number = v[0];
#pragma unroll
    for (int e = 1; e < kVectorElements; ++e) number = i == uint32_t(e) ? v[e] : number;
    return number;
  }

 private:
  static constexpr int kWords = RowVector<Kept>::kWords;
  static constexpr int kTogether = (kProcessed ? 2 : 4) / RowVector<T>::kWords;  // vectors requested before the first is used

  /// A vector that is in shared memory from `kept` on, if the row is, and whose first token is `at`.
  template <bool kRaw>
  __device__ __forceinline__ RowVector<Seen<kRaw>> vector(uint4 const* kept, uint32_t at) const {
    if constexpr (!kRaw || !kProcessed) {
      if (params_.resident) {
        RowVector<Kept> x;
#pragma unroll
        for (int w = 0; w < kWords; ++w) x.words[w] = kept[w * kThreads];
        return x;
      }
    }
    RowVector<T> x = request(at);
    fill_end(x, at);
    if constexpr (kRaw) {
      return x;
    } else {
      return process(x, at);
    }
  }

  /// Tokens from the thread's vector to its next.
  __device__ __forceinline__ uint32_t step() const { return params_.ctas * (kThreads * kVectorElements); }
  __device__ __forceinline__ int count(uint32_t at) const {
    return at < uint32_t(s_.vocabulary) ? int(min(uint32_t(s_.vocabulary) - at, uint32_t(kVectorElements))) : 0;
  }
  __device__ __forceinline__ RowVector<T> request(uint32_t at) const {
    int const left = count(at);
    return load_vector<false>(logits_, at, left, params_.aligned && left == kVectorElements);
  }
  /// Tokens that the row does not have are -inf.
  static __device__ __forceinline__ void fill_end(RowVector<T>& x, int left) {
    if (left == kVectorElements) return;
    float v[kVectorElements];
    unpack(x, v);
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) v[i] = i < left ? v[i] : -kInfinite;
    x = pack<T>(v);
  }
  __device__ __forceinline__ void fill_end(RowVector<T>& x, uint32_t at) const {
    if (at + kVectorElements > uint32_t(s_.vocabulary)) fill_end(x, count(at));
  }

  __device__ __forceinline__ RowVector<Kept> process(RowVector<T> const& x, uint32_t at) const {
    if constexpr (!kProcessed) {
      return x;
    } else {
      float v[kVectorElements];
      unpack(x, v);
      process(at, v);
      return pack<float>(v);
    }
  }
  __device__ __forceinline__ void process(uint32_t at, float (&v)[kVectorElements]) const {
    int const left = count(at);
    if (s_.allowed != nullptr) {
      uint8_t allowed[kVectorElements];
      load_8(reinterpret_cast<uint8_t const*>(s_.allowed) + int64_t(row_) * s_.allowed_stride, at, left, params_.allowed_aligned, allowed);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) v[i] = allowed[i] != 0 ? v[i] : -kInfinite;
    }
    if (s_.allowed_bits != nullptr && left > 0) {
      uint32_t const bits = load_operand(s_.allowed_bits + int64_t(row_) * s_.allowed_bits_stride + at / 32) >> at % 32;
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) v[i] = (bits >> i & 1) != 0 ? v[i] : -kInfinite;
    }
    if (s_.bias != nullptr) {
      float bias[kVectorElements];
      load_8(s_.bias + int64_t(row_) * s_.bias_stride, at, left, params_.bias_aligned, bias);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) v[i] += bias[i];
    }
    if (s_.counts != nullptr) {
      int32_t counts[kVectorElements];
      load_8(s_.counts + int64_t(row_) * s_.counts_stride, at, left, params_.counts_aligned, counts);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {
        if (counts[i] != 0) v[i] = v[i] > 0.0f ? __fdiv_rn(v[i], penalties_.repetition) : v[i] * penalties_.repetition;
        if (counts[i] > 0) v[i] -= __fadd_rn(__fmul_rn(penalties_.frequency, float(counts[i])), penalties_.presence);
      }
    }
  }

  SampleParams const& params_;
  Sampling const& s_;
  Penalties const& penalties_;
  uint4* kept_;  // the thread's first word
  T const* logits_;
  uint32_t row_;
  uint32_t first_;  // the first token of the thread's first vector
};

}  // namespace minfer::fused
