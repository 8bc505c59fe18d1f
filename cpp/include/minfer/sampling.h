// Drawing tokens from logits: mask, bias, penalties, temperature, min-p, top-k, top-p and the draw, in one launch. Memory in the caller's
// hands; nothing is allocated, nothing synchronised.
//
// programmatic: launched with programmatic stream serialization (compute capability 9.0 on).
#pragma once

#include "minfer/registry.h"
#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

/// One value for all rows, or where `of_rows` is not null one for each.
template <class T>
struct PerRow {
  T value{};
  T const* of_rows = nullptr;
};

/// What is done with each row of logits, in fp32 and in this order:
///   mask         forbidden tokens become -inf
///   bias         is added
///   penalties    of a token with count != 0: l > 0 ? l / repetition : l * repetition. Of one with count > 0, after that: l -= frequency *
///                count + presence. A negative count is that of a token of the prompt alone
///   temperature  l / temperature. 0 or less: the largest is taken, and what follows is left out
///   min_p        tokens of less than min_p times the probability of the most probable one are dropped
///   top_k        the k largest are kept. 0 or less, or as many as there are tokens: all
///   top_p        the fewest largest whose probabilities, of those kept until here, reach top_p. 1 or more: all
///   draw         of those kept, in proportion to their probabilities
/// Of equal logits that of the lower token comes first.
///
/// The draw is the token with the largest l / temperature - log(e), e being exponentially distributed noise: a function of seed, offset and
/// token alone (Philox 4x32-10; source: Salmon et al., 2011). Sums that decide are integers, so that a row's result does not depend on how
/// it was computed: it is the same in any batch.
///
/// A row of -inf alone, or with a NaN, or (unless the largest is taken) with a +inf, has no distribution: its id is -1.
struct Sampling {
  DataType type = DataType::kBF16;   // of the logits: 16-bit or float32
  int64_t rows = 0, vocabulary = 0;  // below 2^31; up to kMostTokens
  void const* logits = nullptr;      // [rows, vocabulary], rows contiguous
  int64_t logits_stride = 0;         // elements from row to row
  PerRow<float> temperature{1.0f}, min_p{0.0f}, top_p{1.0f};
  PerRow<int32_t> top_k{0};
  PerRow<float> repetition{1.0f}, presence{0.0f}, frequency{0.0f};
  int32_t const* counts = nullptr;  // [rows, vocabulary]: without them there are no penalties
  int64_t counts_stride = 0;
  float const* bias = nullptr;  // [rows, vocabulary], or one row for all: stride 0
  int64_t bias_stride = 0;
  bool const* allowed = nullptr;  // [rows, vocabulary], stride as of the bias
  int64_t allowed_stride = 0;
  uint32_t const* allowed_bits = nullptr;  // [rows, ceil(vocabulary / 32)]: bit t % 32 of word t / 32 is that of token t
  int64_t allowed_bits_stride = 0;
  PerRow<int64_t> seed{0}, offset{0};
  int64_t* ids = nullptr;      // [rows]
  float* logprobs = nullptr;   // [rows]: of the ids, by the logits as they were given
  int64_t top_n = 0;           // up to kMostTopLogprobs and the vocabulary
  int64_t* top_ids = nullptr;  // [rows, top_n]: the largest logits as they were given, and their logprobs
  float* top_logprobs = nullptr;
};
constexpr int64_t kMostTopLogprobs = 128, kMostTokens = (int64_t(1) << 24) - 1;

Status sample(Sampling const& sampling, DeviceProperties const& device, bool programmatic, Stream stream);

}  // namespace minfer
