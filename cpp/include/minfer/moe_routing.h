// Around the experts of a mixture-of-experts layer: which experts a token goes to, its rows in the order of the experts, the sum of what
// they return. Memory in the caller's hands; nothing is allocated, nothing synchronised.
//
// programmatic: launched with programmatic stream serialization (compute capability 9.0 on).
#pragma once

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxTopK = 32;

enum class RouterScoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

/// How a token's experts are chosen and weighed.
///   score    softmax over all experts or sigmoid of the logit, fp32
///   choice   score + correction_bias; without a bias the logit, which has the scores' order
///   groups   n_group equal groups of consecutive experts; the topk_group best stay. A group is as good as its best choice, with a bias
///            as the sum of its two best (DeepSeek-V2, V3)
///   weight   the score, divided by the sum of the chosen ones (renormalize; where that is 0 it stays 0), times scale
/// Among equals the lower index is the better one. A NaN counts as -inf in the choice and makes the token's weights NaN. Softmax
/// gives equal scores to logits of +inf, or to all if all are -inf, and 0 to all others.
struct RouterRules {
  int32_t experts = 0;  // 1 to kMaxExperts
  int32_t top_k = 0;    // 1 to kMaxTopK, and not more than the experts of the groups that stay
  RouterScoring scoring = RouterScoring::kSoftmax;
  bool renormalize = true;
  int32_t n_group = 1, topk_group = 1;
  float scale = 1.0f;
  float const* correction_bias = nullptr;  // [experts], or null
};

/// What a router writes, contiguous, a token's experts in descending order of choice.
struct Routes {
  float* weights = nullptr;  // [tokens, top_k]
  int32_t* ids = nullptr;    // [tokens, top_k]
};

/// logits [tokens, experts] of `type`, leading dimension ld.
Status route_logits(void const* logits, DataType type, int64_t ld, int64_t tokens, RouterRules const& rules, Routes const& routes,
                    bool programmatic, Stream stream);

/// The router's own matrix in front of it: logits = x.w_gate^T in fp32.
struct RouterGemm {
  void const* x = nullptr;  // [tokens, hidden], leading dimension ldx; any alignment, 16 bytes are faster
  int64_t ldx = 0;
  void const* w_gate = nullptr;  // [experts, hidden], leading dimension ldw, of x's type
  int64_t ldw = 0;
  DataType type = DataType::kBF16;  // 16-bit
  int64_t tokens = 0, hidden = 0;
};

/// route_tokens takes no more tokens than this: what it stands for is one launch for few of them.
constexpr int64_t kRouteTokensMax = 64;

/// Bytes of route_tokens' workspace; any content.
size_t route_tokens_workspace(int64_t tokens, int64_t hidden, int64_t experts, DeviceProperties const& device);

/// One launch; workspace 256-byte aligned.
Status route_tokens(RouterGemm const& gemm, RouterRules const& rules, Routes const& routes, DeviceProperties const& device, void* workspace,
                    size_t workspace_bytes, bool programmatic, Stream stream);

/// A stable sort of the pairs (t, j), in the order t * top_k + j, by expert. A pair whose id is outside 0..experts - 1 is left out, and as
/// many positions at the end are unused.
struct ExpertSort {
  int32_t const* ids = nullptr;     // [tokens, top_k]
  float const* weights = nullptr;   // [tokens, top_k], or null
  int64_t tokens = 0, top_k = 0;    // their product below 2^31
  int64_t experts = 0;              // 1 to kMaxExperts
  int32_t* token_index = nullptr;   // [tokens * top_k] t of each place; 0 past the last pair
  int32_t* offsets = nullptr;       // [experts] place behind each expert's last
  int32_t* inverse = nullptr;       // [tokens, top_k] place of each pair, or -1
  float* sorted_weights = nullptr;  // [tokens * top_k] weights in order, 0 past the last pair; with `weights`
};

/// One launch. All tensors contiguous.
Status sort_by_expert(ExpertSort const& sort, DeviceProperties const& device, bool programmatic, Stream stream);

/// out[t] = sum over j in order of weights[t, j] * y[inverse[t, j]], in fp32, rounded once.
struct ExpertSum {
  void const* y = nullptr;  // [rows, n], leading dimension ld; any alignment, 16 bytes are faster
  DataType type = DataType::kBF16;
  int64_t rows = 0, n = 0, ld = 0;
  int32_t const* inverse = nullptr;  // [tokens, top_k]; what is outside 0..rows - 1 adds nothing
  float const* weights = nullptr;    // [tokens, top_k], or null: ones
  int64_t tokens = 0, top_k = 0;
  void* out = nullptr;  // [tokens, n], contiguous
};

Status sum_experts(ExpertSum const& sum, bool programmatic, Stream stream);

}  // namespace minfer
