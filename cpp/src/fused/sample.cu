// Tokens drawn from logits (minfer/sampling.h).
//
// A team of CTAs, a cluster where there is more than one, has a row, and each thread vectors of 8 tokens of it, in shared memory as far as
// they fit there, else they are read anew. Everything is decided by comparing keys of 64 bits: a token's logit in the upper half, so that
// unsigned order is that of the logits, and in the lower half its number, the lower token being the larger key. No two are equal.
//   1 largest    the row is loaded and changed by mask, bias and penalties. 128 groups of the team's threads find their largest keys
//   2 draw       of all tokens: each has a score, its logit plus noise; the largest is the result
//     candidates with top-k or top-p: the k-th largest of the groups' keys is at most the row's k-th largest. Tokens from there on, some 60
//                of them for k = 50, are listed; one CTA ranks them, drops the rest, and draws
//   3 search     where top-k or top-p need more than the lists hold: the range of keys in which the last kept one is, is cut to a quarter
//                by counting, or by adding probabilities, in another pass, until its tokens fit into the lists; then one more pass draws
// What is added up to decide are integers: counts, and probabilities relative to the largest in units of 2^-31, so that neither the number
// of CTAs nor the way to the result changes it. The sum for the logarithms of probabilities is of integers, too, each rounded from the 8
// tokens of a vector.
// Limits: a row below 2^24 tokens, for the sum of all their exponentials.
#include "common/activation.cuh"
#include "common/aligned_vector.cuh"
#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "fused/philox.cuh"
#include "fused/row_vector.cuh"
#include "minfer/sampling.h"

namespace minfer {

namespace fused {
namespace {

using Key = uint64_t;

constexpr unsigned kSampleThreads = 512, kWarps = kSampleThreads / 32;
constexpr unsigned kMostCtas = 8;
constexpr unsigned kGroups = 128;
constexpr unsigned kMostListed = kSampleThreads;  // tokens, one for each thread
constexpr unsigned kFirstGuess = 64;              // tokens that top-p alone is expected to keep
constexpr int kMostValues = 6;                    // that are reduced together
constexpr int kTogether = 4;                      // vectors that a thread requests before it uses the first
constexpr float kLog2E = 1.44269504f, kInfinite = __builtin_inff();
static_assert(kGroups >= kMostTopLogprobs);

struct SampleParams {
  Sampling s;
  uint32_t ctas;                                                // of a row
  uint32_t slots;                                               // vectors of a thread
  bool resident;                                                // in shared memory
  bool aligned, bias_aligned, counts_aligned, allowed_aligned;  // a vector of 8 is one access, or two
};

/// NaN is above all others; -0 is 0.
__device__ __forceinline__ uint32_t ordered(float v) {
  uint32_t const bits = __float_as_uint(v + 0.0f);
  return v != v ? 0xffffffffu : bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float number_of(uint32_t order) {
  return __uint_as_float(order ^ (order >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}
__device__ __forceinline__ Key key_of(float v, uint32_t token) { return Key(ordered(v)) << 32 | ~token; }
__device__ __forceinline__ float number_of(Key key) { return number_of(uint32_t(key >> 32)); }
__device__ __forceinline__ uint32_t token_of(Key key) { return ~uint32_t(key); }
__device__ __forceinline__ Key first_key(float v) { return Key(ordered(v)) << 32; }  // the smallest of a logit

enum Parameter { kTemperature, kMinP, kTopP, kTopK, kRepetition, kPresence, kFrequency, kSeed, kOffset, kParameters };

struct SampleStorage {
  Key largest[kGroups];
  // Two sets, used by turns: a set is written again only after a barrier that all threads reach after they have read it.
  uint64_t of_warp[2][kMostValues][kWarps];
  uint64_t of_cta[2][kMostValues][kMostCtas];
  Key list[kMostListed];  // this CTA's
  uint32_t listed;        // more than the list holds, if there are more
  Key all[kMostListed];   // the lists of all CTAs
  uint64_t weight[kMostListed];
  Key found;
  uint64_t parameter[kParameters];  // the row's
  Key row_largest;
  Key raw_largest;    // of the logits as they were given
  float raw_log_sum;  // the logarithm of the sum of their probabilities, relative to it
};

/// As bits.
template <class T>
__device__ __forceinline__ uint64_t of_row(PerRow<T> const& p, uint32_t row) {
  T const value = p.of_rows != nullptr ? load_operand(p.of_rows + row) : p.value;
  if constexpr (sizeof(T) == 4) return uint64_t(reinterpret_cast<uint32_t const&>(value));
  return uint64_t(value);
}

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
template <class T, bool kProcessed>
class SampledRow {
 public:
  __device__ __forceinline__ SampledRow(SampleParams const& params, SampleStorage& storage, uint4* held)
      : params_(params), s_(params.s), storage_(storage), held_(held) {
    row_ = params.ctas > 1 ? blockIdx.x / params.ctas : blockIdx.x;
    rank_ = params.ctas > 1 ? uint32_t(cluster_rank()) : 0;
    if (params.ctas > 1) cluster_arrive();
    logits_ = static_cast<T const*>(s_.logits) + int64_t(row_) * s_.logits_stride;
  }

  __device__ __forceinline__ void run() {
    uint64_t const own = request_parameter();
    if constexpr (kProcessed) {
      share_parameter(own);
      __syncthreads();
    }
    Largest own_largest, raw;
    load_row(&own_largest, &raw);
    if constexpr (!kProcessed) share_parameter(own);
    if (params_.ctas > 1) cluster_wait();  // all CTAs have started
    share_largest(own_largest.key());
    Key const largest = largest_of_groups();
    storage_.row_largest = largest;
    top_ = number_of(largest);
    Key raw_largest = largest;
    if constexpr (kProcessed) {
      uint64_t x[1] = {raw.key()};
      reduce<1>(x);
      raw_largest = x[0];
    }
    storage_.raw_largest = raw_largest;
    raw_top_ = raw_largest == 0 ? -kInfinite : number_of(raw_largest);
    bool const drawable = has_distribution();
    if (kProcessed || !drawable) sum_raw();  // else as tokens are drawn
    if (!drawable) {
      if (is_first_thread()) write(-1, __int_as_float(0x7fffffff));
    } else if (truncates()) {
      draw_of_candidates();
    } else {
      draw_of_all(!kProcessed);
    }
    if (s_.top_n > 0) write_top();
    if (params_.ctas > 1) {  // others read this CTA's lists
      cluster_arrive();
      cluster_wait();
    }
  }

 private:
  __device__ __forceinline__ bool is_first_thread() const { return rank_ == 0 && threadIdx.x == 0; }

  // ---- the row ----

  /// The parameter that the thread has, if it has one.
  __device__ __forceinline__ uint64_t request_parameter() const {
    switch (threadIdx.x) {
      case kTemperature: return of_row(s_.temperature, row_);
      case kMinP: return of_row(s_.min_p, row_);
      case kTopP: return of_row(s_.top_p, row_);
      case kTopK: return of_row(s_.top_k, row_);
      case kRepetition: return of_row(s_.repetition, row_);
      case kPresence: return of_row(s_.presence, row_);
      case kFrequency: return of_row(s_.frequency, row_);
      case kSeed: return of_row(s_.seed, row_);
      case kOffset: return of_row(s_.offset, row_);
      default: return 0;
    }
  }
  __device__ __forceinline__ void share_parameter(uint64_t value) {
    if (threadIdx.x < kParameters) storage_.parameter[threadIdx.x] = value;
  }
  __device__ __forceinline__ float parameter(Parameter name) const { return __uint_as_float(uint32_t(storage_.parameter[name])); }
  __device__ __forceinline__ float temperature() const { return parameter(kTemperature); }
  __device__ __forceinline__ float top_p() const { return parameter(kTopP); }
  /// 0: all.
  __device__ __forceinline__ uint32_t top_k() const {
    int32_t const k = int32_t(uint32_t(storage_.parameter[kTopK]));
    return k > 0 && k < s_.vocabulary ? uint32_t(k) : 0;
  }
  __device__ __forceinline__ bool greedy() const { return temperature() <= 0.0f; }
  __device__ __forceinline__ bool truncates() const { return !greedy() && (top_k() > 0 || top_p() < 1.0f); }

  /// Of the thread's vector j.
  __device__ __forceinline__ uint32_t first_token(uint32_t j) const {
    return ((j * params_.ctas + rank_) * kSampleThreads + threadIdx.x) * kVectorElements;
  }
  __device__ __forceinline__ int count(uint32_t at) const {
    return at < s_.vocabulary ? int(min(uint32_t(s_.vocabulary) - at, uint32_t(kVectorElements))) : 0;
  }
  __device__ __forceinline__ RowVector<T> request(uint32_t at) const {
    int const left = count(at);
    return load_vector<false>(logits_, at, left, params_.aligned && left == kVectorElements);
  }
  /// Tokens that the row does not have are -inf.
  __device__ __forceinline__ void unpack_logits(RowVector<T> const& x, uint32_t at, float (&v)[kVectorElements]) const {
    unpack(x, v);
    int const left = count(at);
    if (left < kVectorElements) {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) v[i] = i < left ? v[i] : -kInfinite;
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
        float const repetition = parameter(kRepetition);
        if (counts[i] != 0) v[i] = v[i] > 0.0f ? __fdiv_rn(v[i], repetition) : v[i] * repetition;
        if (counts[i] > 0) v[i] -= __fadd_rn(__fmul_rn(parameter(kFrequency), float(counts[i])), parameter(kPresence));
      }
    }
  }
  __device__ __forceinline__ uint4& held(uint32_t j, int word, int words) {
    return held_[(j * words + word) * kSampleThreads + threadIdx.x];
  }

  /// Vector j: what tokens are drawn by, or kRaw the logits as they were given.
  template <bool kRaw>
  __device__ __forceinline__ void values(uint32_t j, float (&v)[kVectorElements]) {
    if (params_.resident && !kProcessed) {
      RowVector<T> x;
#pragma unroll
      for (int w = 0; w < RowVector<T>::kWords; ++w) x.words[w] = held(j, w, RowVector<T>::kWords);
      unpack(x, v);
    } else if (params_.resident && !kRaw) {
      RowVector<float> x;
#pragma unroll
      for (int w = 0; w < 2; ++w) x.words[w] = held(j, w, 2);
      unpack(x, v);
    } else {
      uint32_t const at = first_token(j);
      unpack_logits(request(at), at, v);
      if (!kRaw && kProcessed) process(at, v);
    }
  }
  template <bool kRaw, class Body>
  __device__ __forceinline__ void for_each_vector(Body&& body) {
#pragma unroll 1
    for (uint32_t j = 0; j < params_.slots; ++j) {
      float v[kVectorElements];
      values<kRaw>(j, v);
      body(v, first_token(j));
    }
  }

  /// The largest number of several, the first of equal ones; a NaN where there is one. Of nothing but -inf the key is 0.
  struct Largest {
    float v = -kInfinite;
    uint32_t token = 0;
    bool is_nan = false;
    __device__ __forceinline__ void take(float const (&of)[kVectorElements], uint32_t at) {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {
        is_nan |= of[i] != of[i];
        if (of[i] > v) v = of[i], token = at + i;
      }
    }
    __device__ __forceinline__ Key key() const { return is_nan ? ~Key(0) : v == -kInfinite ? 0 : key_of(v, token); }
  };

  __device__ __forceinline__ void load_row(Largest* largest, Largest* raw) {
#pragma unroll 1
    for (uint32_t first = 0; first < params_.slots; first += kTogether) {
      RowVector<T> x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i < params_.slots) x[i] = request(first_token(first + i));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        uint32_t const j = first + i, at = first_token(j);
        if (j >= params_.slots) break;
        float v[kVectorElements];
        unpack_logits(x[i], at, v);
        if constexpr (kProcessed) {
          raw->take(v, at);
          process(at, v);
          if (params_.resident) {
            RowVector<float> const changed = pack<float>(v);
#pragma unroll
            for (int w = 0; w < 2; ++w) held(j, w, 2) = changed.words[w];
          }
        } else if (params_.resident) {
          if (count(at) < kVectorElements) x[i] = pack<T>(v);
#pragma unroll
          for (int w = 0; w < RowVector<T>::kWords; ++w) held(j, w, RowVector<T>::kWords) = x[i].words[w];
        }
        largest->take(v, at);
      }
    }
  }

  // ---- what the team's threads do together ----

  __device__ __forceinline__ void synchronize() {
    if (params_.ctas > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  /// Adds up the threads' values, of the first kMaxima the largest is found, in a CTA.
  template <int kMaxima, int kValues>
  __device__ __forceinline__ void reduce_in_cta(uint64_t (&x)[kValues]) {
    auto const of_lanes = [&](int lanes) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        for (int offset = lanes / 2; offset > 0; offset /= 2) {
          uint64_t const other = __shfl_xor_sync(0xffffffffu, x[i], offset);
          x[i] = i >= kMaxima ? x[i] + other : max(x[i], other);
        }
      }
    };
    auto& of_warp = storage_.of_warp[cta_set_];
    uint32_t const lane = threadIdx.x % 32;
    of_lanes(32);
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) of_warp[i][threadIdx.x / 32] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = of_warp[i][lane % kWarps];
    of_lanes(kWarps);
    cta_set_ ^= 1;
  }
  /// In the team.
  template <int kMaxima, int kValues>
  __device__ __forceinline__ void reduce(uint64_t (&x)[kValues]) {
    static_assert(kValues <= kMostValues);
    reduce_in_cta<kMaxima>(x);
    if (params_.ctas == 1) return;
    auto& of_cta = storage_.of_cta[team_set_];
    if (threadIdx.x < params_.ctas) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) store_to_cta(&of_cta[i][rank_], x[i], int(threadIdx.x));
    }
    synchronize();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      x[i] = of_cta[i][0];
      for (uint32_t rank = 1; rank < params_.ctas; ++rank) x[i] = i >= kMaxima ? x[i] + of_cta[i][rank] : max(x[i], of_cta[i][rank]);
    }
    team_set_ ^= 1;
  }

  /// The largest key of each group of threads, to all CTAs.
  __device__ __forceinline__ void share_largest(Key key) {
    uint32_t const lanes = kSampleThreads * params_.ctas / kGroups;  // of a group, at least as many as CTAs
    for (uint32_t offset = lanes / 2; offset > 0; offset /= 2) key = max(key, __shfl_xor_sync(0xffffffffu, key, offset));
    uint32_t const thread = rank_ * kSampleThreads + threadIdx.x, lane = thread % lanes;
    if (lane < params_.ctas) store_to_cta(&storage_.largest[thread / lanes], key, int(lane));
    synchronize();
  }
  __device__ __forceinline__ Key largest_of_groups() const {
    Key largest = 0;
#pragma unroll
    for (unsigned i = 0; i < kGroups; i += 32) largest = max(largest, storage_.largest[i + threadIdx.x % 32]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    return largest;
  }
  /// The n-th largest of the groups' keys, n from 1 on: at least n of the row's keys are as large.
  __device__ __forceinline__ Key nth_of_groups(uint32_t n) {
    __syncthreads();  // `found` was read
    if (threadIdx.x < kGroups) {
      Key const key = storage_.largest[threadIdx.x];
      uint32_t before = 0;
#pragma unroll 4
      for (unsigned i = 0; i < kGroups; ++i) {
        Key const other = storage_.largest[i];
        before += other > key || (other == key && i < threadIdx.x);  // groups without a token have 0
      }
      if (before == n - 1) storage_.found = key;
    }
    __syncthreads();
    return storage_.found;
  }

  // ---- lists ----

  /// Nothing of the lists before is read any more: since then the team has synchronised.
  __device__ __forceinline__ void begin_list() {
    if (threadIdx.x == 0) storage_.listed = 0;
    __syncthreads();
  }
  __device__ __forceinline__ void list(Key key) {
    uint32_t const at = atomicAdd(&storage_.listed, 1u);
    if (at < kMostListed) storage_.list[at] = key;
  }
  /// The `total` tokens of all CTAs' lists into this CTA's `all`. Behind a reduction whose value `index` was each thread's number of listed
  /// tokens.
  __device__ __forceinline__ void gather(uint32_t total, int index) {
    uint32_t at = threadIdx.x, rank = 0;
    if (at < total) {
      if (params_.ctas > 1) {
        auto const& counts = storage_.of_cta[team_set_ ^ 1][index];
        while (at >= counts[rank]) at -= uint32_t(counts[rank++]);
      }
      storage_.all[threadIdx.x] = load_from_cta(&storage_.list[at], int(rank));
    }
    __syncthreads();
  }
  /// Of the thread's gathered token: how many are larger, and the sum of their weights.
  __device__ __forceinline__ void rank_of(Key key, uint64_t weight, uint32_t total, uint32_t* rank, uint64_t* before) {
    if (threadIdx.x < total) storage_.weight[threadIdx.x] = weight;
    __syncthreads();
    *rank = 0;
    *before = 0;
    if (threadIdx.x < total) {
#pragma unroll 4
      for (uint32_t i = 0; i < total; ++i) {
        if (storage_.all[i] > key) {
          ++*rank;
          *before += storage_.weight[i];
        }
      }
    }
  }

  // ---- probabilities ----

  /// In units of 2^-31 of the largest.
  __device__ __forceinline__ uint32_t mass_of(float v) const {
    return __float2uint_rn(approximate_exp2((v - top_) * log2_scale_) * 0x1p31f);
  }
  /// The sum that a kept token's predecessors are below.
  static __device__ __forceinline__ uint64_t target_of(float top_p, uint64_t sum) {
    if (!(top_p < 1.0f)) return ~uint64_t(0);
    return max(uint64_t(__double2ull_ru(double(top_p) * double(sum))), uint64_t(1));
  }

  __device__ __forceinline__ bool has_distribution() {
    float const t = temperature(), min_p = parameter(kMinP);
    log2_scale_ = t > 0.0f ? fminf(__fdiv_rn(kLog2E, t), __FLT_MAX__) : 0.0f;
    threshold_ = min_p > 0.0f ? fmaxf(fmaf(logf(fminf(min_p, 1.0f)), t, top_), -__FLT_MAX__) : -__FLT_MAX__;
    return storage_.row_largest != 0 && storage_.row_largest != ~Key(0) && t == t && (t <= 0.0f || top_ < kInfinite);
  }

  /// Of the logits as they were given, relative to the largest, in units of 2^-40: of 8 tokens.
  __device__ __forceinline__ uint64_t raw_sum_of(float const (&v)[kVectorElements]) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) sum += approximate_exp2((v[i] - raw_top_) * kLog2E);
    return __float2ull_rn(sum * 0x1p40f);
  }
  __device__ __forceinline__ void set_raw_sum(uint64_t sum) {
    bool const finite = raw_top_ > -kInfinite && raw_top_ < kInfinite;  // false: -inf alone, +inf or NaN
    storage_.raw_log_sum = finite ? logf(float(sum) * 0x1p-40f) : __int_as_float(0x7fffffff);
  }
  __device__ __forceinline__ void sum_raw() {
    uint64_t x[1] = {0};
    for_each_vector<true>([&](float const(&v)[kVectorElements], uint32_t) { x[0] += raw_sum_of(v); });
    reduce<0>(x);
    set_raw_sum(x[0]);
  }
  __device__ __forceinline__ float logprob_of(float raw) const { return raw - raw_top_ - storage_.raw_log_sum; }

  // ---- draws ----

  /// Of four tokens from `at` on, a multiple of four.
  __device__ __forceinline__ uint4 noise_at(uint32_t at) const {
    uint64_t const seed = storage_.parameter[kSeed], offset = storage_.parameter[kOffset];
    return philox(make_uint4(at / 4, 0, uint32_t(offset), uint32_t(offset >> 32)), make_uint2(uint32_t(seed), uint32_t(seed >> 32)));
  }
  __device__ __forceinline__ float score_of(float v, uint32_t bits) const {
    return (v - top_) * log2_scale_ - log2_exponential_variate(bits);
  }

  /// One draw of the tokens from the key `from` on, or the largest. sums_raw: the pass adds up the logits' probabilities, too.
  __device__ __forceinline__ void draw_of_all(bool sums_raw, Key from = 0) {
    uint64_t x[2] = {greedy() ? storage_.row_largest : 0, 0};
    float best = greedy() ? kInfinite : -kInfinite;  // a score
    for_each_vector<false>([&](float const(&v)[kVectorElements], uint32_t at) {
      if (sums_raw) x[1] += raw_sum_of(v);
#pragma unroll
      for (int q = 0; q < kVectorElements; q += 4) {
        bool kept[4], any = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float const most = (v[q + i] - top_) * log2_scale_ - kLeastLog2Variate;  // a score that no token of this logit exceeds
          kept[i] = v[q + i] >= threshold_ && most >= best && (from == 0 || key_of(v[q + i], at + q + i) >= from);
          any |= kept[i];
        }
        if (!any) continue;
        uint4 const noise = noise_at(at + q);
        uint32_t const bits[4] = {noise.x, noise.y, noise.z, noise.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!kept[i]) continue;
          float const score = score_of(v[q + i], bits[i]);
          best = fmaxf(best, score);
          x[0] = max(x[0], key_of(score, at + q + i));
        }
      }
    });
    reduce<1>(x);
    if (sums_raw) set_raw_sum(x[1]);
    if (is_first_thread()) {
      uint32_t const token = token_of(x[0]);
      write(token, logprob_of(to_float(load_operand(logits_ + token))));
    }
  }

  /// With top-k or top-p.
  __device__ __forceinline__ void draw_of_candidates() {
    bool const few = top_k() <= kGroups, adds = top_k() == 0;  // whether the groups bound the k-th; whether all probabilities are needed
    Key const lowest = first_key(threshold_);
    Key const bound = few ? max(nth_of_groups(adds ? kFirstGuess : top_k()), lowest) : ~Key(0);
    float const from = number_of(bound);
    enum { kRawSum, kListed, kMass, kListedMass };
    uint64_t x[4] = {0, 0, 0, 0};
    begin_list();
    for_each_vector<false>([&](float const(&v)[kVectorElements], uint32_t at) {
      if constexpr (!kProcessed) x[kRawSum] += raw_sum_of(v);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {
        uint32_t const mass = adds && v[i] >= threshold_ ? mass_of(v[i]) : 0;
        x[kMass] += mass;
        if (v[i] >= from) {
          Key const key = key_of(v[i], at + i);
          if (key >= bound) {
            list(key);
            ++x[kListed];
            x[kListedMass] += mass;
          }
        }
      }
    });
    if (adds) {
      reduce<0>(x);
    } else {
      uint64_t fewer[2] = {x[kRawSum], x[kListed]};
      reduce<0>(fewer);
      x[kRawSum] = fewer[0], x[kListed] = fewer[1];
    }
    if constexpr (!kProcessed) set_raw_sum(x[kRawSum]);
    bool const complete = !adds || bound == lowest || x[kListedMass] >= target_of(top_p(), x[kMass]);
    if (few && x[kListed] <= kMostListed && complete) {
      if (rank_ == 0) draw_of_listed(uint32_t(x[kListed]), x[kMass]);
    } else {
      draw_of_search(lowest);
    }
  }

  /// The leading CTA: of the lists.
  __device__ __forceinline__ void draw_of_listed(uint32_t total, uint64_t mass_of_all) {
    gather(total, 1);
    bool const mine = threadIdx.x < total;
    Key const key = mine ? storage_.all[threadIdx.x] : 0;
    float const v = number_of(key);
    uint64_t const mass = mine ? mass_of(v) : 0;
    uint32_t rank;
    uint64_t before;
    rank_of(key, mass, total, &rank, &before);
    bool kept = mine && (top_k() == 0 || rank < top_k());
    if (top_k() > 0 && top_p() < 1.0f) {
      uint64_t sum[1] = {kept ? mass : 0};
      reduce_in_cta<0>(sum);
      mass_of_all = sum[0];
    }
    kept = kept && before < target_of(top_p(), mass_of_all);
    uint32_t const token = token_of(key);
    uint64_t score[1] = {0};
    if (kept) {
      uint4 const noise = noise_at(token);
      uint32_t const i = token % 4;
      score[0] = key_of(score_of(v, i == 0 ? noise.x : i == 1 ? noise.y : i == 2 ? noise.z : noise.w), token);
    }
    Key const own = score[0];
    reduce_in_cta<1>(score);
    if (kept && own == score[0]) write(token, logprob_of(kProcessed ? to_float(load_operand(logits_ + token)) : v));
  }

  /// The team: with as many passes as it takes.
  __device__ __forceinline__ void draw_of_search(Key lowest) {
    Key from = lowest;
    if (top_k() > 0) from = last_kept<false, Weight::kOne>(from, storage_.row_largest, top_k());
    if (top_p() < 1.0f) from = last_kept<false, Weight::kProbability>(from, storage_.row_largest, 0);
    draw_of_all(false, from);
  }

  /// What a token counts for where the kept ones are counted.
  enum class Weight { kOne, kProbability };

  /// The key from which on tokens are kept: of those from `from` on the first whose predecessors' weights add up to less than the target
  /// while those with its own do not. Of probabilities the target is top_p of all.
  template <bool kRaw, Weight kWeight>
  __device__ __forceinline__ Key last_kept(Key from, Key largest, uint64_t target) {
    // The weights from `low` on reach the target, those from `high` on do not.
    Key low = from, high = largest + 1;
    uint32_t count_of_low = 0, count_of_high = 0;
    uint64_t sum_of_high = 0;
    auto const weight_of = [&](float v) { return kWeight == Weight::kProbability ? uint64_t(mass_of(v)) : 1; };
    for (bool first = true; first || count_of_low - count_of_high > kMostListed; first = false) {
      Key pivots[3];
      Key const span = high - low;  // above kMostListed, or of the first pass
#pragma unroll
      for (int i = 0; i < 3; ++i) pivots[i] = first ? low + span / 3 * i : low + span / 4 * (i + 1);
      uint32_t counts[3] = {0, 0, 0};
      uint64_t sums[3] = {0, 0, 0};
      for_each_vector<kRaw>([&](float const(&v)[kVectorElements], uint32_t at) {
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) {
          Key const key = key_of(v[i], at + i);
          if (key < pivots[0]) continue;
          uint64_t const weight = weight_of(v[i]);
#pragma unroll
          for (int p = 0; p < 3; ++p) {
            if (key >= pivots[p]) {
              ++counts[p];
              sums[p] += weight;
            }
          }
        }
      });
      uint64_t x[6] = {counts[0], counts[1], counts[2], sums[0], sums[1], sums[2]};
      reduce<0>(x);
      if (first) {
        if (kWeight == Weight::kProbability) target = target_of(top_p(), x[3]);
        if (x[3] < target) return from;
        count_of_low = uint32_t(x[0]);
      }
      bool found = false;
#pragma unroll
      for (int p = 2; p >= 0; --p) {
        if (found || pivots[p] >= high) continue;
        if (x[3 + p] >= target) {
          low = pivots[p];
          count_of_low = uint32_t(x[p]);
          found = true;
        } else {
          high = pivots[p];
          count_of_high = uint32_t(x[p]);
          sum_of_high = x[3 + p];
        }
      }
    }
    uint32_t const total = list_range<kRaw>(low, high);
    gather(total, 0);
    bool const mine = threadIdx.x < total;
    Key const key = mine ? storage_.all[threadIdx.x] : 0;
    uint32_t rank;
    uint64_t before;
    rank_of(key, mine ? weight_of(number_of(key)) : 0, total, &rank, &before);
    // The smallest kept key is the largest complement.
    uint64_t last[1] = {mine && sum_of_high + before < target ? ~key : 0};
    reduce_in_cta<1>(last);
    synchronize();
    return ~last[0];
  }

  /// Lists the keys from `low` on and below `high`: how many there are in the team.
  template <bool kRaw>
  __device__ __forceinline__ uint32_t list_range(Key low, Key high) {
    uint64_t x[1] = {0};
    begin_list();
    for_each_vector<kRaw>([&](float const(&v)[kVectorElements], uint32_t at) {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {
        Key const key = key_of(v[i], at + i);
        if (key >= low && key < high) {
          list(key);
          ++x[0];
        }
      }
    });
    reduce<0>(x);
    return uint32_t(x[0]);
  }

  // ---- results ----

  __device__ __forceinline__ void write(int64_t id, float logprob) const {
    s_.ids[row_] = id;
    s_.logprobs[row_] = logprob;
  }

  /// The largest logits as they were given.
  __device__ __forceinline__ void write_top() {
    uint32_t const n = uint32_t(s_.top_n);
    synchronize();  // lists and groups' keys before are not read any more
    if (storage_.raw_largest == ~Key(0)) {
      if (rank_ == 0 && threadIdx.x < n) write_top(threadIdx.x, -1, __int_as_float(0x7fffffff));
      return;
    }
    if constexpr (kProcessed) {
      Largest largest;
      for_each_vector<true>([&](float const(&v)[kVectorElements], uint32_t at) { largest.take(v, at); });
      share_largest(largest.key());
    }
    Key const last = key_of(-kInfinite, uint32_t(s_.vocabulary - 1));  // tokens behind the row's have smaller ones
    Key const from = max(nth_of_groups(n), last);
    uint32_t total = list_range<true>(from, ~Key(0));
    if (total > kMostListed) {
      Key const kept = last_kept<true, Weight::kOne>(last, max(storage_.raw_largest, key_of(-kInfinite, 0)), n);
      total = list_range<true>(kept, ~Key(0));
    }
    if (rank_ != 0) return;
    gather(total, 0);
    bool const mine = threadIdx.x < total;
    Key const key = mine ? storage_.all[threadIdx.x] : 0;
    uint32_t rank;
    uint64_t before;
    rank_of(key, 0, total, &rank, &before);
    if (mine && rank < n) write_top(rank, token_of(key), logprob_of(number_of(key)));
  }
  __device__ __forceinline__ void write_top(uint32_t at, int64_t id, float logprob) const {
    s_.top_ids[row_ * s_.top_n + at] = id;
    s_.top_logprobs[row_ * s_.top_n + at] = logprob;
  }

  SampleParams const& params_;
  Sampling const& s_;
  SampleStorage& storage_;
  uint4* held_;
  T const* logits_;
  uint32_t row_, rank_;
  int cta_set_ = 0, team_set_ = 0;
  float top_, raw_top_;  // logits of the largest keys
  float log2_scale_;     // the logarithm of a probability, of a difference of logits
  float threshold_;      // the lowest logit that min_p keeps, or that is drawn at all
};

template <class T, bool kProcessed>
__global__ void __launch_bounds__(kSampleThreads, kProcessed ? 1 : 2) sample_kernel(__grid_constant__ SampleParams const params) {
  __shared__ SampleStorage storage;
  extern __shared__ uint4 held[];
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  SampledRow<T, kProcessed>(params, storage, held).run();
}

bool rows_begin_vectors(void const* data, int64_t stride, int64_t element) { return begins_vector(data) && stride * element % 16 == 0; }

template <class T, bool kProcessed>
Status launch_sample(Sampling const& s, DeviceProperties const& device, bool programmatic, Stream stream) {
  SampleParams params{};
  params.s = s;
  params.aligned = rows_begin_vectors(s.logits, s.logits_stride, sizeof(T));
  params.bias_aligned = rows_begin_vectors(s.bias, s.bias_stride, sizeof(float));
  params.counts_aligned = rows_begin_vectors(s.counts, s.counts_stride, sizeof(int32_t));
  params.allowed_aligned = rows_begin_vectors(s.allowed, s.allowed_stride, 1);
  // Few rows take as many CTAs as there are; of many a CTA should have enough to do between two barriers.
  int64_t const tokens_of_cta = s.rows * kMostCtas <= device.sm_count ? 4096 : 16384;
  params.ctas = 1;
  while (device.compute_major == 9 && params.ctas < kMostCtas && params.ctas * tokens_of_cta < s.vocabulary) params.ctas *= 2;
  int64_t const vectors = (s.vocabulary + kVectorElements - 1) / kVectorElements, threads = int64_t(kSampleThreads) * params.ctas;
  params.slots = uint32_t((vectors + threads - 1) / threads);
  if (s.rows > 0x7fffffff / params.ctas) {
    return Status::failure(StatusCode::kNotSupported, "%lld rows are more than a launch covers", (long long)s.rows);
  }
  int64_t const most = device.smem_per_block - int64_t(sizeof(SampleStorage));
  int64_t const bytes = int64_t(params.slots) * kSampleThreads * kVectorElements * (kProcessed ? sizeof(float) : sizeof(T));
  params.resident = bytes <= most;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(&sample_kernel<T, kProcessed>), int(most), allowed);
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  }
  LaunchShape shape;
  shape.grid = dim3(unsigned(s.rows) * params.ctas);
  shape.threads = kSampleThreads;
  shape.smem_bytes = params.resident ? size_t(bytes) : 0;
  shape.cluster = dim3(params.ctas);
  shape.programmatic = programmatic;
  shape.stream = stream;
  return launch(shape, "launch of sample", &sample_kernel<T, kProcessed>, params);
}

template <class T>
Status launch_sample(Sampling const& s, DeviceProperties const& device, bool programmatic, Stream stream) {
  bool const processed = s.allowed != nullptr || s.allowed_bits != nullptr || s.bias != nullptr || s.counts != nullptr;
  return processed ? launch_sample<T, true>(s, device, programmatic, stream) : launch_sample<T, false>(s, device, programmatic, stream);
}

}  // namespace
}  // namespace fused

Status sample(Sampling const& sampling, DeviceProperties const& device, bool programmatic, Stream stream) {
  if (sampling.rows == 0) return Status::success();
  switch (sampling.type) {
    case DataType::kF16: return fused::launch_sample<__half>(sampling, device, programmatic, stream);
    case DataType::kBF16: return fused::launch_sample<__nv_bfloat16>(sampling, device, programmatic, stream);
    case DataType::kF32: return fused::launch_sample<float>(sampling, device, programmatic, stream);
    default: return Status::failure(StatusCode::kInvalidArgument, "logits of type %s", name_of(sampling.type));
  }
}

}  // namespace minfer
