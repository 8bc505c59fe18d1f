// A mixture of experts around its GEMMs, on CUDA tensors: each token's experts, its rows in the experts' order, the weighted sum of what
// the experts return.
#include "minfer/moe_routing.h"

#include <algorithm>

#include "core/batch_invariance.h"
#include "core/checks.h"
#include "core/device.h"
#include "core/operators.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "gemm.h"

namespace minfer::torch_binding {

namespace {

void check_device(char const* op, char const* name, Tensor const& x, NamedTensor const& other) {
  if (x.device_type() != other.x.device_type() || x.device() != other.x.device()) {
    fail(op, ": ", name, " must be on the device of ", other.name, ", ", DeviceOf{other.x}, ", got ", DeviceOf{x});
  }
}

bool is_router_type(ScalarType type) { return is_16bit_float(type) || type == ScalarType::Float; }

/// The keywords that both routers have.
struct RouterArguments {
  int64_t top_k;
  std::string const& scoring;
  bool renormalize;
  std::optional<Tensor> const& correction_bias;
  int64_t n_group, topk_group;
  double scale;
};

/// All rules but the address of the bias.
RouterRules check_rules(char const* op, RouterArguments const& a, int64_t experts, NamedTensor const& other) {
  RouterRules rules;
  rules.experts = int32_t(experts);
  int64_t const most = std::min(experts, kMaxTopK);
  if (a.top_k < 1 || a.top_k > most) fail(op, ": top_k must be 1 to ", most, " for ", experts, " experts, got ", a.top_k);
  rules.top_k = int32_t(a.top_k);
  if (a.scoring != "softmax" && a.scoring != "sigmoid") fail(op, ": scoring must be softmax or sigmoid, got '", a.scoring, "'");
  rules.scoring = a.scoring == "sigmoid" ? RouterScoring::kSigmoid : RouterScoring::kSoftmax;
  rules.renormalize = a.renormalize;
  if (a.n_group < 1 || a.n_group > experts || experts % a.n_group != 0) {
    fail(op, ": n_group must divide the ", experts, " experts, got ", a.n_group);
  }
  if (a.topk_group < 1 || a.topk_group > a.n_group) {
    fail(op, ": topk_group must be 1 to n_group = ", a.n_group, ", got ", a.topk_group);
  }
  int64_t const stay = experts / a.n_group * a.topk_group;
  if (a.top_k > stay) {
    fail(op, ": top_k must not be more than the ", stay, " experts of ", a.topk_group, " groups, got ", a.top_k);
  }
  rules.n_group = int32_t(a.n_group);
  rules.topk_group = int32_t(a.topk_group);
  rules.scale = in_float32(op, "scale", a.scale);
  if (a.correction_bias) {
    Tensor const& bias = *a.correction_bias;
    if (!same(bias.sizes(), {experts})) fail(op, ": correction_bias must be [experts] = [", experts, "], got ", bias);
    if (bias.scalar_type() != ScalarType::Float) fail(op, ": correction_bias must be Float, got ", bias.scalar_type());
    check_device(op, "correction_bias", bias, other);
  }
  return rules;
}

/// Sets the address of the bias in the rules. The tensor that is returned keeps its memory.
Tensor hold_bias(char const* op, std::optional<Tensor> const& bias, RouterRules* rules) {
  if (!bias) return Tensor();
  Tensor const held = contiguous(op, "correction_bias", *bias);
  rules->correction_bias = static_cast<float const*>(held.data_ptr());
  return held;
}

struct Routed {
  Tensor weights, ids;

  Routed(char const* op, Tensor const& like, int64_t tokens, int64_t top_k)
      : weights(allocate(op, like, {tokens, top_k}, ScalarType::Float, "the weights of ", tokens, " tokens' ", top_k, " experts")),
        ids(allocate(op, like, {tokens, top_k}, ScalarType::Int, "the ids of ", tokens, " tokens' ", top_k, " experts")) {}
  Routes routes() const { return {static_cast<float*>(weights.data_ptr()), static_cast<int32_t*>(ids.data_ptr())}; }
};

/// The weights of token-expert pairs: float32, of the shape of `pairs`.
void check_pair_weights(char const* op, Tensor const& weights, Tensor const& pairs, NamedTensor const& other) {
  if (!same(weights.sizes(), pairs.sizes())) fail(op, ": weights must be [tokens, top_k] = ", pairs, ", got ", weights);
  if (weights.scalar_type() != ScalarType::Float) fail(op, ": weights must be Float, got ", weights.scalar_type());
  check_device(op, "weights", weights, other);
}

std::tuple<Tensor, Tensor> moe_router(Tensor const& logits, int64_t top_k, std::string const& scoring, bool renormalize,
                                      std::optional<Tensor> const& correction_bias, int64_t n_group, int64_t topk_group, double scale) {
  char const* op = "minfer::moe_router";
  if (logits.dim() != 2) fail(op, ": logits must be [tokens, experts], got ", logits);
  if (!is_router_type(logits.scalar_type())) {
    fail(op, ": logits must be float16, bfloat16 or float32, got ", logits.scalar_type());
  }
  int64_t const tokens = logits.size(0), experts = logits.size(1);
  if (experts < 1 || experts > kMaxExperts) fail(op, ": logits must have 1 to ", kMaxExperts, " experts, got ", logits);
  RouterRules rules =
      check_rules(op, {top_k, scoring, renormalize, correction_bias, n_group, topk_group, scale}, experts, {"logits", logits});
  OnDevice const on(op, logits);
  Routed const routed(op, logits, tokens, top_k);
  Tensor const rows = unit_rows(op, "logits", logits), bias = hold_bias(op, correction_bias, &rules);
  Status const status = route_logits(rows.data_ptr(), data_type(rows.scalar_type()), leading(rows), tokens, rules, routed.routes(),
                                     on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": logits ", logits, ", top_k = ", top_k, ": ", status.message);
  return {routed.weights, routed.ids};
}

std::tuple<Tensor, Tensor> moe_router_gemm(Tensor const& x, Tensor const& w_gate, int64_t top_k, std::string const& scoring,
                                           bool renormalize, std::optional<Tensor> const& correction_bias, int64_t n_group,
                                           int64_t topk_group, double scale) {
  char const* op = "minfer::moe_router_gemm";
  if (x.dim() != 2) fail(op, ": x must be [tokens, hidden], got ", x);
  check_16bit(op, "x", x);
  int64_t const tokens = x.size(0), hidden = x.size(1);
  if (w_gate.dim() != 2 || w_gate.size(1) != hidden) fail(op, ": w_gate must be [experts, hidden = ", hidden, "], got ", w_gate);
  int64_t const experts = w_gate.size(0);
  if (experts < 1 || experts > kMaxExperts) fail(op, ": w_gate must have 1 to ", kMaxExperts, " experts, got ", w_gate);
  if (w_gate.scalar_type() != x.scalar_type()) {
    fail(op, ": w_gate must have x's dtype ", x.scalar_type(), ", got ", w_gate.scalar_type());
  }
  NamedTensor const reference{"x", x};
  check_device(op, "w_gate", w_gate, reference);
  if (hidden >= int64_t(1) << 31) fail(op, ": x must have less than 2^31 columns, got ", x);
  RouterRules rules = check_rules(op, {top_k, scoring, renormalize, correction_bias, n_group, topk_group, scale}, experts, reference);
  OnDevice const on(op, x);
  Routed const routed(op, x, tokens, top_k);
  Tensor const bias = hold_bias(op, correction_bias, &rules);
  Status status;
  if (tokens > kRouteTokensMax || batch_invariant()) {  // the kernel of few tokens cuts k by their number
    Tensor const logits = product_in_float(op, x, w_gate, on);
    status = route_logits(logits.data_ptr(), DataType::kF32, experts, tokens, rules, routed.routes(), on.programmatic(), on.stream());
  } else {
    Tensor const x_rows = unit_rows(op, "x", x), w_rows = unit_rows(op, "w_gate", w_gate);
    RouterGemm problem;
    problem.x = x_rows.data_ptr();
    problem.ldx = leading(x_rows);
    problem.w_gate = w_rows.data_ptr();
    problem.ldw = leading(w_rows);
    problem.type = data_type(x.scalar_type());
    problem.tokens = tokens;
    problem.hidden = hidden;
    Workspace const workspace(op, x, route_tokens_workspace(tokens, hidden, experts, on.properties()), "x ", x, " and w_gate ", w_gate);
    status =
        route_tokens(problem, rules, routed.routes(), on.properties(), workspace.data(), workspace.bytes(), on.programmatic(), on.stream());
  }
  if (!status.ok()) fail(op, ": x ", x, ", w_gate ", w_gate, ", top_k = ", top_k, ": ", status.message);
  return {routed.weights, routed.ids};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_sort(Tensor const& ids, int64_t num_experts, std::optional<Tensor> const& weights) {
  char const* op = "minfer::moe_sort";
  if (ids.dim() != 2) fail(op, ": ids must be [tokens, top_k], got ", ids);
  if (ids.scalar_type() != ScalarType::Int) fail(op, ": ids must be Int, got ", ids.scalar_type());
  if (num_experts < 1 || num_experts > kMaxExperts) {
    fail(op, ": num_experts must be 1 to ", kMaxExperts, ", got ", num_experts);
  }
  if (weights) check_pair_weights(op, *weights, ids, {"ids", ids});
  OnDevice const on(op, ids);
  ExpertSort sort;
  sort.tokens = ids.size(0);
  sort.top_k = ids.size(1);
  sort.experts = num_experts;
  int64_t const pairs = sort.tokens * sort.top_k;
  Tensor const held_ids = contiguous(op, "ids", ids), held_weights = weights ? contiguous(op, "weights", *weights) : Tensor();
  auto const numbers = [&](Shape shape, ScalarType type, char const* what) {
    return allocate(op, ids, shape, type, what, " of ids ", ids);
  };
  Tensor const token_index = numbers({pairs}, ScalarType::Int, "token_index"), offsets = numbers({num_experts}, ScalarType::Int, "offsets");
  Tensor const inverse = numbers(ids.sizes(), ScalarType::Int, "inverse");
  Tensor const sorted_weights = numbers({weights ? pairs : 0}, ScalarType::Float, "sorted_weights");
  sort.ids = static_cast<int32_t const*>(held_ids.data_ptr());
  sort.token_index = static_cast<int32_t*>(token_index.data_ptr());
  sort.offsets = static_cast<int32_t*>(offsets.data_ptr());
  sort.inverse = static_cast<int32_t*>(inverse.data_ptr());
  if (weights && pairs > 0) {
    sort.weights = static_cast<float const*>(held_weights.data_ptr());
    sort.sorted_weights = static_cast<float*>(sorted_weights.data_ptr());
  }
  Status const status = sort_by_expert(sort, on.properties(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": ids ", ids, ", num_experts = ", num_experts, ": ", status.message);
  return {token_index, offsets, inverse, sorted_weights};
}

Tensor moe_combine(Tensor const& y, Tensor const& inverse, std::optional<Tensor> const& weights) {
  char const* op = "minfer::moe_combine";
  if (y.dim() != 2) fail(op, ": y must be [rows, n], got ", y);
  if (!is_router_type(y.scalar_type())) fail(op, ": y must be float16, bfloat16 or float32, got ", y.scalar_type());
  if (inverse.dim() != 2) fail(op, ": inverse must be [tokens, top_k], got ", inverse);
  if (inverse.scalar_type() != ScalarType::Int) fail(op, ": inverse must be Int, got ", inverse.scalar_type());
  NamedTensor const reference{"y", y};
  check_device(op, "inverse", inverse, reference);
  if (weights) check_pair_weights(op, *weights, inverse, reference);
  OnDevice const on(op, y);
  Tensor const rows = unit_rows(op, "y", y), held_inverse = contiguous(op, "inverse", inverse);
  Tensor const held_weights = weights ? contiguous(op, "weights", *weights) : Tensor();
  Tensor const out = allocate(op, y, {inverse.size(0), y.size(1)}, y.scalar_type(), "the output of y ", y, " and inverse ", inverse);
  ExpertSum sum;
  sum.y = rows.data_ptr();
  sum.type = data_type(y.scalar_type());
  sum.rows = rows.size(0);
  sum.n = rows.size(1);
  sum.ld = leading(rows);
  sum.inverse = static_cast<int32_t const*>(held_inverse.data_ptr());
  sum.weights = weights ? static_cast<float const*>(held_weights.data_ptr()) : nullptr;
  sum.tokens = inverse.size(0);
  sum.top_k = inverse.size(1);
  sum.out = out.data_ptr();
  Status const status = sum_experts(sum, on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": y ", y, ", inverse ", inverse, ": ", status.message);
  return out;
}

constexpr Operator kOperators[] = {
    // The top_k experts of each token and their weights.
    {"moe_router(Tensor logits, int top_k, *, str scoring='softmax', bool renormalize=True, Tensor? correction_bias=None, "
     "int n_group=1, int topk_group=1, float scale=1.0) -> (Tensor weights, Tensor ids)",
     boxed<&moe_router>},
    // moe_router of the logits x.w_gate^T.
    {"moe_router_gemm(Tensor x, Tensor w_gate, int top_k, *, str scoring='softmax', bool renormalize=True, Tensor? correction_bias=None, "
     "int n_group=1, int topk_group=1, float scale=1.0) -> (Tensor weights, Tensor ids)",
     boxed<&moe_router_gemm>},
    // The expert order of the token-expert pairs, where each expert ends in it, and where each pair went.
    {"moe_sort(Tensor ids, int num_experts, *, Tensor? weights=None) "
     "-> (Tensor token_index, Tensor offsets, Tensor inverse, Tensor sorted_weights)",
     boxed<&moe_sort>},
    // out[token] = sum over the token's pairs of weights * y[inverse].
    {"moe_combine(Tensor y, Tensor inverse, Tensor? weights=None) -> Tensor", boxed<&moe_combine>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
