// Tokens drawn from logits (minfer/sampling.h).
//
// A team of CTAs, a cluster where there is more than one, has a row (fused/sample_team.cuh), in shared memory as far as it fits there
// (fused/sample_row.cuh), and walks over it as often as its parameters take:
//   load         everywhere. Mask, bias and penalties change the row; each thread has its largest token
//   sum          the temperature is 0, or the row was changed: the sum of the exponentials of the logits as they were given, of which
//                log-probabilities are made. Other rows add it up in the walk that follows
//   draw         of all tokens: each has a score, its logit plus noise; the largest is the result
//   candidates   top-k up to 128, or top-p: the tokens from the n-th largest of 128 groups' largest ones on are listed, n being k, or a
//                guess of what top-p keeps (fused/sample_candidates.cuh). One CTA sorts them, drops the rest, and draws
// Where top-k needs more than the lists hold, its last token is found first (fused/sample_selection.cuh). Where top-p does, a token is
// drawn of all, and a walk adds up the probabilities of those before it: if top-p keeps it, it is the result, since the largest score of
// all is that of the kept ones, too. If not, neither it nor what comes behind it is kept, and the next draw is of the tokens before it.
// That ends after few draws, of which the first succeeds with the probability top_p (source of the idea: FlashInfer's sampling without
// sorting).
//
// A walk costs few instructions for each token: vectors of 16 bits are compared by packed maxima, and a vector whose largest logit cannot
// matter is done. A draw makes the noise's bits of each token, but scores only those that can exceed the largest score so far: the
// logarithm of an exponential variate of uniform u is at least log(u), so that the least of a vector's bits and the largest of its
// logits tell. That largest score is the CTA's, and begins with the best of the groups' largest tokens.
//
// What is added up to decide are integers, so that neither the number of CTAs nor the way to the result changes it: counts; probabilities
// relative to the largest in units of 2^-31; and where top-p is of all tokens their sum, of integers in units of 2^-40, each rounded from
// the 8 tokens of a vector, as is the sum for the logarithms of probabilities.
// Limits: a row below 2^24 tokens, for the sum of all their exponentials.
#include <cstring>

#include "common/activation.cuh"
#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "fused/philox.cuh"
#include "fused/row_vector.cuh"
#include "fused/sample_candidates.cuh"
#include "fused/sample_key.cuh"
#include "fused/sample_row.cuh"
#include "fused/sample_selection.cuh"
#include "fused/sample_team.cuh"
#include "minfer/sampling.h"

namespace minfer {

namespace fused {
namespace {

constexpr uint32_t kFirstGuess = 64;    // tokens that top-p alone is expected to keep
constexpr float kLeastScore = -4.6f;    // that of the largest token is above: a variate is below 33 log(2) = 2^4.52
constexpr float kScoreSlack = 0x1p-7f;  // more than the roundings of scores
constexpr float kLog2E = 1.44269504f;
static_assert(kGroups >= kMostTopLogprobs);

template <unsigned kThreads>
struct SampleStorage {
  typename Team<kThreads>::Storage team;
  typename Candidates<kThreads>::Storage candidates;
  union {  // a selection's counts have been read when its list is sorted
    typename Candidates<kThreads>::Order order;
    typename Selection<kThreads>::Storage selection;
  };
  uint64_t parameter[kParameters];  // the row's
  Penalties penalties;
  float raw_top;        // the largest logit as it was given, of a changed row
  float raw_log_sum;    // the logarithm of the sum of the probabilities of the logits as they were given, relative to the largest
  uint32_t best_score;  // of the CTA, ordered as the upper half of a key
};

template <class T, bool kProcessed, unsigned kThreads>
class Sampler : public Selection<kThreads> {
 public:
  using Base = Selection<kThreads>;
  using Base::ctas, Base::rank, Base::synchronize, Base::is_first_thread;
  using Storage = SampleStorage<kThreads>;

  __device__ __forceinline__ Sampler(SampleParams const& params, Storage& storage, uint4* kept)
      : Base(storage.team, storage.candidates, storage.order, storage.selection, params.ctas,
             params.ctas > 1 ? uint32_t(cluster_rank()) : 0),
        params_(params),
        s_(params.s),
        storage_(storage),
        row_(params, storage.penalties, kept, row_index(), rank()) {
    if (params.ctas > 1) cluster_arrive_relaxed();
  }

  __device__ __forceinline__ void run() {
    uint64_t const own = request_parameter();
    if constexpr (kProcessed) {
      share_parameter(own);
      if (threadIdx.x == kRepetition) storage_.penalties.repetition = __uint_as_float(uint32_t(own));
      if (threadIdx.x == kPresence) storage_.penalties.presence = __uint_as_float(uint32_t(own));
      if (threadIdx.x == kFrequency) storage_.penalties.frequency = __uint_as_float(uint32_t(own));
      __syncthreads();
    }
    Largest of_thread;
    float raw_largest = -kInfinite;
    row_.load(&of_thread, &raw_largest);
    if constexpr (!kProcessed) share_parameter(own);
    if (ctas() > 1) cluster_wait();  // all CTAs have started
    this->share_largest(row_.template key_of_largest<false>(of_thread));
    Key const largest = this->largest_of_groups();
    top_ = largest == 0 ? -kInfinite : number_of(largest);
    if constexpr (kProcessed) {
      uint64_t x[1] = {ordered(raw_largest)};
      this->template reduce<1>(x);
      if (threadIdx.x == 0) storage_.raw_top = number_of(uint32_t(x[0]));
      __syncthreads();
    }
    bool const drawable = has_distribution(largest);
    if (kProcessed || !drawable || greedy()) sum_raw();  // else as tokens are drawn
    if (!drawable) {
      if (is_first_thread()) write(-1, __int_as_float(0x7fffffff));
    } else if (greedy()) {
      if (is_first_thread()) write_drawn(token_of(largest));
    } else {
      Choice const choice = truncates() ? draw_of_candidates() : Choice{};
      if (!choice.drawn) draw_of_tokens(choice, !kProcessed && !truncates());
    }
    if (s_.top_n > 0) write_top();
    if (s_.top_n > 0 || truncates()) this->leave();  // CTAs read each other's lists
  }

 private:
  /// CTAs are as many as a power of two.
  __device__ __forceinline__ uint32_t row_index() const { return blockIdx.x >> (31 - __clz(int(ctas()))); }

  // ---- parameters ----

  /// The parameter that the thread has, if it has one.
  __device__ __forceinline__ uint64_t request_parameter() const {
    uint32_t const i = threadIdx.x, row = row_index();
    if (i >= kParameters) return 0;
    void const* const of_rows = params_.of_rows[i];
    if (of_rows == nullptr) return params_.value[i];
    if (i < kSeed) return load_operand(static_cast<uint32_t const*>(of_rows) + row);
    return load_operand(static_cast<uint64_t const*>(of_rows) + row);
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
  __device__ __forceinline__ TokenNoise noise() const {
    uint64_t const seed = storage_.parameter[kSeed], offset = storage_.parameter[kOffset];
    return {make_uint2(uint32_t(seed), uint32_t(seed >> 32)), make_uint2(uint32_t(offset), uint32_t(offset >> 32))};
  }

  __device__ __forceinline__ bool has_distribution(Key largest) {
    float const t = temperature(), min_p = parameter(kMinP);
    log2_scale_ = t > 0.0f ? fminf(__fdiv_rn(kLog2E, t), __FLT_MAX__) : 0.0f;
    threshold_ = min_p > 0.0f ? fmaxf(fmaf(logf(fminf(min_p, 1.0f)), t, top_), -__FLT_MAX__) : -__FLT_MAX__;
    return largest != 0 && largest != kNanKey && t == t && (t <= 0.0f || top_ < kInfinite);
  }

  // ---- probabilities ----

  /// The logarithm of a token's probability relative to the largest.
  __device__ __forceinline__ float log2_of(float v) const { return (v - top_) * log2_scale_; }
  /// The probability in units of 2^-31.
  __device__ __forceinline__ uint32_t mass_of(float v) const { return __float2uint_rn(approximate_exp2(log2_of(v)) * 0x1p31f); }
  static constexpr float kSumUnit = 0x1p-40f;
  /// Of a vector's tokens that min_p keeps, in units of 2^-40.
  __device__ __forceinline__ uint64_t sum_of(float const (&v)[kVectorElements]) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      float const probability = approximate_exp2(log2_of(v[i]));
      if (v[i] >= threshold_) sum += probability;
    }
    return __float2ull_rn(sum * (1.0f / kSumUnit));
  }
  /// The sum that a kept token's predecessors are below, in units of 2^-31.
  static __device__ __forceinline__ uint64_t target_of(float top_p, double sum) {
    if (!(top_p < 1.0f)) return ~uint64_t(0);
    return max(uint64_t(__double2ull_ru(double(top_p) * sum)), uint64_t(1));
  }

  /// The largest logit as it was given.
  __device__ __forceinline__ float raw_top() const { return kProcessed ? storage_.raw_top : top_; }
  /// Of the logits as they were given, relative to the largest, in units of 2^-40: of a vector's tokens.
  __device__ __forceinline__ uint64_t raw_sum_of(float const (&v)[kVectorElements]) const {
    float const top = raw_top();
    float sum = approximate_exp2((v[0] - top) * kLog2E);
#pragma unroll
    for (int i = 1; i < kVectorElements; ++i) sum += approximate_exp2((v[i] - top) * kLog2E);
    return __float2ull_rn(sum * (1.0f / kSumUnit));
  }
  /// All threads come to a barrier before others than the first read it.
  __device__ __forceinline__ void set_raw_sum(uint64_t sum) {
    if (threadIdx.x != 0) return;
    bool const finite = raw_top() > -kInfinite && raw_top() < kInfinite;  // false: -inf alone, +inf or NaN
    storage_.raw_log_sum = finite ? logf(float(sum) * kSumUnit) : __int_as_float(0x7fffffff);
  }
  __device__ __forceinline__ void sum_raw() {
    uint64_t x[1] = {0};
    row_.template for_each_vector<true>([&](RowVector<T> const& given, uint32_t) {
      float v[kVectorElements];
      unpack(given, v);
      x[0] += raw_sum_of(v);
    });
    this->template reduce<0>(x);
    set_raw_sum(x[0]);
  }
  __device__ __forceinline__ float logprob_of(float raw) const { return raw - raw_top() - storage_.raw_log_sum; }

  // ---- draws ----

  /// By one rounding wherever it is called, so that the way to a draw does not matter.
  __device__ __forceinline__ float score_of(float v, uint32_t bits) const {
    return fmaf(v - top_, log2_scale_, -log2_exponential_variate(bits));
  }
  /// What the logarithm of bits whose score is `best` or more is at most, but for kScoreSlack.
  __device__ __forceinline__ float most_bits(float v, float best) const {
    return approximate_exp2(fmaf(v - top_, log2_scale_, 32.0f + kScoreSlack - best));
  }

  /// The token of the largest score of those from the key `from` on. sums: the walk adds up the exponentials of the logits, too.
  __device__ __forceinline__ uint32_t draw(Key from, bool sums) {
    float const least = fmaxf(threshold_, from != 0 ? number_of(from) : -kInfinite);
    if (threadIdx.x == 0) storage_.best_score = ordered(kLeastScore);
    __syncthreads();
    uint64_t x[2] = {0, 0};  // the key of the largest score, the sum
    if (threadIdx.x < kGroups) {
      Key const key = this->largest_of_group(threadIdx.x);
      uint32_t const token = token_of(key);
      if (key != 0 && key >= from && number_of(key) >= threshold_) x[0] = key_of(score_of(number_of(key), noise().of_token(token)), token);
      uint32_t const best = __reduce_max_sync(0xffffffffu, uint32_t(x[0] >> 32));
      if (threadIdx.x % 32 == 0) atomicMax(&storage_.best_score, best);
    }
    __syncthreads();
    row_.template for_each_vector<false>([&](auto const& kept, uint32_t at) {
      float v[kVectorElements];
      unpack(kept, v);
      if constexpr (!kProcessed) {
        if (sums) x[1] += raw_sum_of(v);
      }
      float const largest = largest_of(kept);
      float best = number_of(*const_cast<uint32_t volatile*>(&storage_.best_score));
      // No noise makes up for more than 33.
      if (!(largest >= least && fmaf(largest - top_, log2_scale_, -kLeastLog2Variate + kScoreSlack) >= best)) return;
      uint32_t bits[kVectorElements];
      noise().of_vector(at, bits);  // the seed is read again: keys of all rounds would take 20 registers throughout the loop
      uint32_t const lowest = min(min(min(bits[0], bits[1]), min(bits[2], bits[3])), min(min(bits[4], bits[5]), min(bits[6], bits[7])));
      if (!(float(lowest) <= most_bits(largest, best))) return;
      bool rises = false;
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {
        if (v[i] >= least && float(bits[i]) <= most_bits(v[i], best) && (from == 0 || key_of(v[i], at + i) >= from)) {
          float const score = score_of(v[i], bits[i]);
          x[0] = max(x[0], key_of(score, at + i));
          rises |= score > best;
          best = fmaxf(best, score);
        }
      }
      if (rises) atomicMax(&storage_.best_score, ordered(best));
    });
    this->template reduce<1>(x);
    if constexpr (!kProcessed) {
      if (sums) set_raw_sum(x[1]);
    }
    return token_of(x[0]);
  }
  /// The tokens from the key `from` on, of which top-p keeps those before `target`; or, where that is 0, before top_p of their sum.
  struct Choice {
    Key from = 0;
    uint64_t target = kNoTarget;
    bool drawn = false;  // of the lists
  };
  static constexpr uint64_t kNoTarget = ~uint64_t(0), kLargestAlone = uint64_t(1) << 31;  // what the largest token reaches

  /// sums: as of draw.
  __device__ __forceinline__ void draw_of_tokens(Choice choice, bool sums) {
    uint32_t token;
    while (true) {
      Key next = choice.from;
      if (choice.target != 0) {
        if (choice.target <= kLargestAlone) {
          token = token_of(this->largest_of_groups());
          break;
        }
        token = draw(choice.from, sums);
        if (choice.target == kNoTarget) break;
        sums = false;
        next = key_of(row_.number_at(token), token) + 1;
      }
      uint64_t const mass = mass_from(next);
      if (choice.target == 0) {
        choice.target = target_of(top_p(), double(mass));
      } else if (mass < choice.target) {
        break;
      } else {
        choice.from = next;
      }
    }
    if (is_first_thread()) write_drawn(token);
  }

  /// The sum of the probabilities of all tokens from a key on.
  __device__ __forceinline__ uint64_t mass_from(Key from) {
    uint64_t x[1] = {0};
    // Of logits equal to that of the key those up to its token belong to it.
    float const equal = number_of(from), above = number_of(uint32_t(from >> 32) + 1);
    uint32_t const last = token_of(from);
    row_.template for_each_vector<false>([&](auto const& kept, uint32_t at) {
      if (!(largest_of(kept) >= equal)) return;
      float v[kVectorElements];
      unpack(kept, v);
      float const least = at + (kVectorElements - 1) <= last ? equal : above;
      uint64_t sum = 0;
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {
        if (v[i] >= least) sum += mass_of(v[i]);
      }
      if (at <= last && last < at + (kVectorElements - 1)) {  // one vector of the row
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) {
          if (v[i] == equal && at + i <= last) sum += mass_of(v[i]);
        }
      }
      x[0] += sum;
    });
    this->template reduce<0>(x);
    return x[0];
  }

  /// With top-k or top-p.
  __device__ __forceinline__ Choice draw_of_candidates() {
    bool const few = top_k() <= kGroups, of_all = top_k() == 0;  // whether the groups bound the k-th; whether top-p is of all tokens
    Key const lowest = first_key(threshold_);
    Key const bound = few ? max(this->nth_of_groups(of_all ? kFirstGuess : top_k()), lowest) : kNanKey;
    float const least = few ? number_of(bound) : kInfinite;
    enum { kRawSum, kSum, kListedMass };
    uint64_t x[3] = {0, 0, 0};
    this->begin();
    if (!kProcessed || few) {
      row_.template for_each_vector<false>([&](auto const& kept, uint32_t at) {
        float v[kVectorElements];
        unpack(kept, v);
        if constexpr (!kProcessed) x[kRawSum] += raw_sum_of(v);
        if (of_all) x[kSum] += sum_of(v);
        if (!(largest_of(kept) >= least)) return;
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) {
          if (v[i] >= least && key_of(v[i], at + i) >= bound) {
            this->add(key_of(v[i], at + i));
            x[kListedMass] += mass_of(v[i]);
          }
        }
      });
    }
    this->template reduce<0>(x);
    if constexpr (!kProcessed) set_raw_sum(x[kRawSum]);
    uint32_t const listed = this->total();
    uint64_t const target = target_of(top_p(), double(x[kSum]) * (double(kSumUnit) * 0x1p31));
    bool const complete = !of_all || bound == lowest || x[kListedMass] >= target;
    if (few && listed <= kMostListed && complete) {
      if (rank() == 0) draw_of_listed(listed, target);
      return {.drawn = true};
    }
    if (of_all) return {lowest, target};
    return {this->template nth<false>(row_, lowest, top_k()), top_p() < 1.0f ? 0 : kNoTarget};
  }

  /// The leading CTA: of the lists. The target is that of top-p alone.
  __device__ __forceinline__ void draw_of_listed(uint32_t listed, uint64_t target) {
    this->sort(listed, [&](float v) { return mass_of(v); });
    if (top_k() > 0) {
      listed = min(listed, top_k());
      target = target_of(top_p(), double(this->before(listed - 1) + mass_of(number_of(this->sorted(listed - 1)))));
    }
    uint64_t best = 0;
    float logit = 0.0f;
    for (uint32_t i = threadIdx.x; i < listed && this->before(i) < target; i += kThreads) {
      Key const key = this->sorted(i);
      uint32_t const token = token_of(key);
      Key const score = key_of(score_of(number_of(key), noise().of_token(token)), token);
      if (score > best) best = score, logit = number_of(key);
    }
    Key const largest = this->largest_of_cta(best);
    if (best == largest) {
      uint32_t const token = token_of(best);
      write(token, logprob_of(kProcessed ? row_.raw_of(token) : logit));
    }
  }

  // ---- results ----

  __device__ __forceinline__ void write(int64_t id, float logprob) const {
    s_.ids[row_index()] = id;
    s_.logprobs[row_index()] = logprob;
  }
  __device__ __forceinline__ void write_drawn(uint32_t token) const { write(token, logprob_of(row_.raw_of(token))); }

  /// The largest logits as they were given.
  __device__ __forceinline__ void write_top() {
    uint32_t const n = uint32_t(s_.top_n);
    synchronize();  // lists and groups' keys before are not read any more
    if (raw_top() != raw_top()) {
      if (rank() == 0 && threadIdx.x < n) write_top(threadIdx.x, -1, __int_as_float(0x7fffffff));
      return;
    }
    if constexpr (kProcessed) {
      Largest of_thread;
      uint32_t slot = 0;
      row_.template for_each_vector<true>([&](RowVector<T> const& given, uint32_t) { of_thread.take(largest_of(given), slot++); });
      this->share_largest(row_.template key_of_largest<true>(of_thread));
    }
    Key const last = key_of(-kInfinite, uint32_t(s_.vocabulary - 1));  // tokens behind the row's have smaller ones
    Key from = max(this->nth_of_groups(n), last);
    uint32_t total;
    while ((total = this->template list<true>(row_, from, kNanKey)) > kMostListed) from = this->template nth<true>(row_, last, n);
    if (rank() != 0) return;
    this->sort(total, [](float) { return 0u; });
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) write_top(i, token_of(this->sorted(i)), logprob_of(number_of(this->sorted(i))));
  }
  __device__ __forceinline__ void write_top(uint32_t at, int64_t id, float logprob) const {
    s_.top_ids[row_index() * s_.top_n + at] = id;
    s_.top_logprobs[row_index() * s_.top_n + at] = logprob;
  }

  SampleParams const& params_;
  Sampling const& s_;
  Storage& storage_;
  SampledRow<T, kProcessed, kThreads> row_;
  float top_;         // the largest logit
  float log2_scale_;  // the logarithm of a probability, of a difference of logits
  float threshold_;   // the lowest logit that min_p keeps, or that is drawn at all
};

// 64 registers, for half of an SM's threads.
template <class T, bool kProcessed, unsigned kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) sample_kernel(__grid_constant__ SampleParams const params) {
  __shared__ SampleStorage<kThreads> storage;
  extern __shared__ uint4 kept[];
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  Sampler<T, kProcessed, kThreads> sampler(params, storage, kept);
#if __CUDA_ARCH__ >= 900
  wait_for_predecessor();
#endif
  sampler.run();
}

template <class T>
void set(SampleParams& params, Parameter name, PerRow<T> const& p) {
  params.of_rows[name] = p.of_rows;
  params.value[name] = 0;
  std::memcpy(&params.value[name], &p.value, sizeof(T));
}

template <class T, bool kProcessed, unsigned kThreads>
Status launch_sample(Sampling const& s, DeviceProperties const& device, bool programmatic, Stream stream) {
  SampleParams params{};
  params.s = s;
  set(params, kTemperature, s.temperature);
  set(params, kMinP, s.min_p);
  set(params, kTopP, s.top_p);
  set(params, kTopK, s.top_k);
  set(params, kRepetition, s.repetition);
  set(params, kPresence, s.presence);
  set(params, kFrequency, s.frequency);
  set(params, kSeed, s.seed);
  set(params, kOffset, s.offset);
  params.aligned = begin_vectors(s.logits, sizeof(T), {s.logits_stride});
  params.bias_aligned = begin_vectors(s.bias, sizeof(float), {s.bias_stride});
  params.counts_aligned = begin_vectors(s.counts, sizeof(int32_t), {s.counts_stride});
  params.allowed_aligned = begin_vectors(s.allowed, 1, {s.allowed_stride});
  // Few rows take as many CTAs as there are; of many a CTA should have enough to do between two barriers.
  int64_t const most_ctas = s.rows * kMostCtas, sms = device.sm_count;
  int64_t const tokens_of_cta = most_ctas <= sms ? 4096 : most_ctas <= 4 * sms ? 8192 : 16384;
  params.ctas = 1;
  while (device.compute_major == 9 && params.ctas < kMostCtas && params.ctas * tokens_of_cta < s.vocabulary) params.ctas *= 2;
  int64_t const vectors = (s.vocabulary + kVectorElements - 1) / kVectorElements, threads = int64_t(kThreads) * params.ctas;
  params.slots = uint32_t((vectors + threads - 1) / threads);
  if (s.rows > 0x7fffffff / params.ctas) {
    return Status::failure(StatusCode::kNotSupported, "%lld rows are more than a launch covers", (long long)s.rows);
  }
  int64_t const most = device.smem_per_block - int64_t(sizeof(SampleStorage<kThreads>));
  int64_t const bytes = int64_t(params.slots) * kThreads * kVectorElements * (kProcessed ? sizeof(float) : sizeof(T));
  params.resident = bytes <= most;
  auto* const kernel = &sample_kernel<T, kProcessed, kThreads>;
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(kernel), int(most), allowed); error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  }
  LaunchShape shape;
  shape.grid = dim3(unsigned(s.rows) * params.ctas);
  shape.threads = kThreads;
  shape.smem_bytes = params.resident ? size_t(bytes) : 0;
  shape.cluster = dim3(params.ctas);
  shape.programmatic = programmatic;
  shape.stream = stream;
  return launch(shape, "launch of sample", kernel, params);
}

template <class T>
Status launch_sample(Sampling const& s, DeviceProperties const& device, bool programmatic, Stream stream) {
  bool const processed = s.allowed != nullptr || s.allowed_bits != nullptr || s.bias != nullptr || s.counts != nullptr;
  if (processed) return launch_sample<T, true, 512>(s, device, programmatic, stream);
  // An SM has two CTAs of 512 threads. Where there are more, smaller ones: while some load their rows, the others compute.
  if (s.rows * kMostCtas > 2 * int64_t(device.sm_count)) return launch_sample<T, false, 256>(s, device, programmatic, stream);
  return launch_sample<T, false, 512>(s, device, programmatic, stream);
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
