// Tokens to the GPUs that have their experts, and the experts' sums back, among GPUs of one host that reach each other's memory: two
// launches around the experts' products, instead of collectives and the copies in front of and behind them.
//
// Each rank has an exchange buffer, which all ranks' processes map. A launch counts epochs in its own buffer, so that it can be replayed in
// a CUDA graph; all ranks must launch the same calls in the same order, each of them send_tokens and then return_sums, on one stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

constexpr int32_t kMostExchangeRanks = 8;

/// Where the parts of an exchange buffer begin, in bytes. Those of tokens have [ranks * capacity] places in each call: rank r's tokens have
/// those from r * capacity on.
struct ExpertExchangeLayout {
  size_t ids;      // int32 [places, top_k]: numbers among this rank's experts, -1: another rank's or nobody's
  size_t weights;  // float32 [places, top_k]
  size_t rows;     // 16 bits [places, hidden]: where there is an id; else what was there
  size_t sums;     // 16 bits [places, hidden]: of this rank's tokens, by the ranks that have made them
  size_t bytes;    // of it all
};

/// most: tokens of a rank, the largest capacity.
ExpertExchangeLayout expert_exchange_layout(int32_t ranks, int64_t most, int64_t hidden, int64_t top_k);

struct ExpertExchange {
  DataType type;                           // of tokens and sums, float16 or bfloat16
  int32_t ranks = 1, rank = 0;             // 2 to kMostExchangeRanks
  void* buffers[kMostExchangeRanks] = {};  // of all ranks, where this process has mapped them: of the layout's bytes, first zeros
  int64_t most = 0;                        // what the buffers are for
  int64_t hidden = 0, top_k = 0;           // likewise; hidden is a multiple of 8
  int64_t capacity = 0;                    // places for a rank's tokens in this call, on every rank: 1 to most
  int64_t experts = 0;                     // of each rank
  int64_t tokens = 0;                      // of this rank: 0 to capacity
  int32_t const* ids = nullptr;            // [tokens, top_k]: of the whole layer; others are nobody's
};

/// x: [tokens, hidden], rows of 16-byte vectors, ldx elements apart. weights: [tokens, top_k]. When the launch has ended, this rank's
/// buffer has all ranks' tokens.
Status send_tokens(ExpertExchange const& exchange, void const* x, int64_t ldx, float const* weights, bool programmatic, Stream stream);

/// y: [rows, hidden], 16-byte aligned, what the experts of this rank have made of the pairs. inverse: [places, pairs], the row of each
/// pair of a place; others than rows of y add nothing. out: [tokens, hidden], 16-byte aligned, the sums of this rank's tokens: of each
/// rank, in fp32 in the order of its pairs, rounded; then of the ranks, in fp32 in their order, rounded.
Status return_sums(ExpertExchange const& exchange, void const* y, int64_t rows, int32_t const* inverse, int64_t pairs, void* out,
                   bool programmatic, Stream stream);

}  // namespace minfer
