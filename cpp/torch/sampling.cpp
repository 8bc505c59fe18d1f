// Drawing tokens from logits, on CUDA tensors. The checks are those of python/minfer/checks/sampling.py, in the same order.
#include "minfer/sampling.h"

#include <algorithm>
#include <limits>

#include "core/checks.h"
#include "core/device.h"
#include "core/operators.h"
#include "core/readable.h"
#include "core/torch_calls.h"

namespace minfer::torch_binding {

namespace {

using OptionalTensor = std::optional<Tensor>;

/// The arguments between logits and results, in the schema's order.
struct Rules {
  double temperature;
  int64_t top_k;
  double top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  int64_t seed, offset;
  OptionalTensor temperatures, top_ks, top_ps, min_ps, repetition_penalties, presence_penalties, frequency_penalties, seeds, offsets;
  OptionalTensor counts, bias, allowed;
  int64_t top_logprobs;

  static constexpr auto kMembers = std::tuple{&Rules::temperature,
                                              &Rules::top_k,
                                              &Rules::top_p,
                                              &Rules::min_p,
                                              &Rules::repetition_penalty,
                                              &Rules::presence_penalty,
                                              &Rules::frequency_penalty,
                                              &Rules::seed,
                                              &Rules::offset,
                                              &Rules::temperatures,
                                              &Rules::top_ks,
                                              &Rules::top_ps,
                                              &Rules::min_ps,
                                              &Rules::repetition_penalties,
                                              &Rules::presence_penalties,
                                              &Rules::frequency_penalties,
                                              &Rules::seeds,
                                              &Rules::offsets,
                                              &Rules::counts,
                                              &Rules::bias,
                                              &Rules::allowed,
                                              &Rules::top_logprobs};
};

constexpr char const* kOp = "minfer::sample";

void check_range(char const* name, double value, double least, double most, char const* must) {
  if (!(value >= least && value <= most)) fail(kOp, ": ", name, " must be ", must, ", got ", value);
}

/// A value for each row.
void check_of_rows(char const* name, OptionalTensor const& x, ScalarType type, int64_t rows, NamedTensor const& logits) {
  if (x) check_operand(kOp, name, *x, type, {rows}, logits);
}

/// [rows, columns], or one row for all.
void check_of_tokens(char const* name, Tensor const& x, ScalarType type, int64_t rows, int64_t columns, NamedTensor const& logits) {
  check_operand(kOp, name, x, type, {x.dim() == 2 && x.size(0) == 1 ? 1 : rows, columns}, logits);
}

template <class T>
void set(PerRow<T>* to, OptionalTensor const& x, Held* held) {
  if (x) to->of_rows = static_cast<T const*>(held->keep(contiguous(kOp, "a parameter of rows", *x)));
}

template <class T>
int64_t set_rows(T const** to, char const* name, Tensor const& x, Held* held) {
  Tensor const rows = unit_rows(kOp, name, x);
  *to = static_cast<T const*>(held->keep(rows));
  return x.size(0) == 1 ? 0 : leading(rows);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample(Tensor const& logits, Rules const& rules) {
  if (logits.dim() != 2) fail(kOp, ": logits must be [rows, vocabulary], got ", logits);
  if (!is_16bit_float(logits.scalar_type()) && logits.scalar_type() != ScalarType::Float) {
    fail(kOp, ": logits must be float16, bfloat16 or float32, got ", logits.scalar_type());
  }
  NamedTensor const reference{"logits", logits};
  int64_t const rows = logits.size(0), vocabulary = logits.size(1);
  if (vocabulary < 1 || vocabulary > kMostTokens) fail(kOp, ": logits must have 1 to 2^24 - 1 columns, got ", logits);
  constexpr double kMost = std::numeric_limits<float>::max();
  check_range("temperature", rules.temperature, 0, kMost, "finite in float32 and not negative");
  if (rules.top_k < -1 || rules.top_k >= int64_t(1) << 31) fail(kOp, ": top_k must be -1 to 2^31 - 1, got ", rules.top_k);
  check_range("top_p", rules.top_p, 0, 1, "0 to 1");
  check_range("min_p", rules.min_p, 0, 1, "0 to 1");
  check_range("repetition_penalty", rules.repetition_penalty, std::numeric_limits<float>::min(), kMost, "a normal float32 above 0");
  in_float32(kOp, "presence_penalty", rules.presence_penalty);
  in_float32(kOp, "frequency_penalty", rules.frequency_penalty);
  check_of_rows("temperatures", rules.temperatures, ScalarType::Float, rows, reference);
  check_of_rows("top_ks", rules.top_ks, ScalarType::Int, rows, reference);
  check_of_rows("top_ps", rules.top_ps, ScalarType::Float, rows, reference);
  check_of_rows("min_ps", rules.min_ps, ScalarType::Float, rows, reference);
  check_of_rows("repetition_penalties", rules.repetition_penalties, ScalarType::Float, rows, reference);
  check_of_rows("presence_penalties", rules.presence_penalties, ScalarType::Float, rows, reference);
  check_of_rows("frequency_penalties", rules.frequency_penalties, ScalarType::Float, rows, reference);
  check_of_rows("seeds", rules.seeds, ScalarType::Long, rows, reference);
  check_of_rows("offsets", rules.offsets, ScalarType::Long, rows, reference);
  if (rules.counts) {
    check_operand(kOp, "counts", *rules.counts, ScalarType::Int, {rows, vocabulary}, reference);
  } else if (rules.repetition_penalty != 1 || rules.presence_penalty != 0 || rules.frequency_penalty != 0 || rules.repetition_penalties ||
             rules.presence_penalties || rules.frequency_penalties) {
    fail(kOp, ": counts must be given for penalties");
  }
  if (rules.bias) check_of_tokens("bias", *rules.bias, ScalarType::Float, rows, vocabulary, reference);
  bool const bits = rules.allowed && rules.allowed->scalar_type() == ScalarType::Int;
  if (rules.allowed) {
    if (!bits && rules.allowed->scalar_type() != ScalarType::Bool) {
      fail(kOp, ": allowed must be bool or int32, got ", rules.allowed->scalar_type());
    }
    check_of_tokens("allowed", *rules.allowed, rules.allowed->scalar_type(), rows, bits ? (vocabulary + 31) / 32 : vocabulary, reference);
  }
  int64_t const n = rules.top_logprobs, most = std::min(vocabulary, kMostTopLogprobs);
  if (n < 0 || n > most) fail(kOp, ": top_logprobs must be 0 to ", most, ", got ", n);
  OnDevice const on(kOp, logits);
  Tensor const ids = allocate(kOp, logits, {rows}, ScalarType::Long, "the ids of logits ", logits);
  Tensor const logprobs = allocate(kOp, logits, {rows}, ScalarType::Float, "the logprobs of logits ", logits);
  Tensor const top_ids = allocate(kOp, logits, {rows, n}, ScalarType::Long, "the top ids of logits ", logits);
  Tensor const tops = allocate(kOp, logits, {rows, n}, ScalarType::Float, "the top logprobs of logits ", logits);
  Tensor const held_logits = unit_rows(kOp, "logits", logits);
  Held held;
  Sampling s;
  s.type = data_type(logits.scalar_type());
  s.rows = rows;
  s.vocabulary = vocabulary;
  s.logits = held_logits.data_ptr();
  s.logits_stride = leading(held_logits);
  s.temperature.value = float(rules.temperature);
  s.top_k.value = int32_t(rules.top_k);
  s.top_p.value = float(rules.top_p);
  s.min_p.value = float(rules.min_p);
  s.repetition.value = float(rules.repetition_penalty);
  s.presence.value = float(rules.presence_penalty);
  s.frequency.value = float(rules.frequency_penalty);
  s.seed.value = rules.seed;
  s.offset.value = rules.offset;
  set(&s.temperature, rules.temperatures, &held);
  set(&s.top_k, rules.top_ks, &held);
  set(&s.top_p, rules.top_ps, &held);
  set(&s.min_p, rules.min_ps, &held);
  set(&s.repetition, rules.repetition_penalties, &held);
  set(&s.presence, rules.presence_penalties, &held);
  set(&s.frequency, rules.frequency_penalties, &held);
  set(&s.seed, rules.seeds, &held);
  set(&s.offset, rules.offsets, &held);
  if (rules.counts) s.counts_stride = set_rows(&s.counts, "counts", *rules.counts, &held);
  if (rules.bias) s.bias_stride = set_rows(&s.bias, "bias", *rules.bias, &held);
  if (rules.allowed && bits) s.allowed_bits_stride = set_rows(&s.allowed_bits, "allowed", *rules.allowed, &held);
  if (rules.allowed && !bits) s.allowed_stride = set_rows(&s.allowed, "allowed", *rules.allowed, &held);
  s.ids = static_cast<int64_t*>(ids.data_ptr());
  s.logprobs = static_cast<float*>(logprobs.data_ptr());
  s.top_n = n;
  s.top_ids = static_cast<int64_t*>(top_ids.data_ptr());
  s.top_logprobs = static_cast<float*>(tops.data_ptr());
  Status const status = minfer::sample(s, on.properties(), on.programmatic(), on.stream());
  if (!status.ok()) fail(kOp, ": logits ", logits, ": ", status.message);
  return {ids, logprobs, top_ids, tops};
}

constexpr Operator kOperators[] = {
    // One token of each row of logits.
    {"sample(Tensor logits, *, float temperature=1.0, int top_k=0, float top_p=1.0, float min_p=0.0, float repetition_penalty=1.0, "
     "float presence_penalty=0.0, float frequency_penalty=0.0, int seed=0, int offset=0, Tensor? temperatures=None, Tensor? top_ks=None, "
     "Tensor? top_ps=None, Tensor? min_ps=None, Tensor? repetition_penalties=None, Tensor? presence_penalties=None, "
     "Tensor? frequency_penalties=None, Tensor? seeds=None, Tensor? offsets=None, Tensor? counts=None, Tensor? bias=None, "
     "Tensor? allowed=None, int top_logprobs=0) -> (Tensor ids, Tensor logprobs, Tensor top_ids, Tensor top_logprobs)",
     boxed<&sample>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
