// torch.ops.minfer.moe_router, moe_router_gemm, moe_sort and moe_combine on CUDA tensors.
#include "minfer/moe_routing.h"

#include <algorithm>
#include <cmath>

#include "bindings.h"
#include "gemm/launch.h"

namespace minfer::torch_binding {

namespace {

/// Whether launches on the device may begin under their predecessor's tail.
bool programmatic(int32_t device) { return device_properties(device).compute_capability() >= 90 && gemm::programmatic_launch_enabled(); }

void check_device(char const* op, char const* name, Tensor const& tensor, char const* other, int32_t device) {
  check(tensor.is_cuda() && tensor.get_device_index() == device, op, ": ", name, " must be on the device of ", other, ", cuda:", device,
        ", got ", tensor.is_cuda() ? "cuda:" + std::to_string(tensor.get_device_index()) : std::string("another kind of device"));
}

bool is_router_type(ScalarType type) { return is_16bit_float(type) || type == ScalarType::Float; }

int64_t leading(Tensor const& x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); }

Tensor empty(Tensor const& like, std::vector<int64_t> const& shape, ScalarType type) { return torch::stable::new_empty(like, shape, type); }

/// The keywords that both routers have.
struct RouterArguments {
  int64_t top_k;
  std::string const& scoring;
  bool renormalize;
  std::optional<Tensor> const& correction_bias;
  int64_t n_group, topk_group;
  double scale;
};

/// Without the bias' address.
RouterRules check_rules(char const* op, RouterArguments const& a, int64_t experts, char const* other, int32_t device) {
  RouterRules rules;
  rules.experts = int32_t(experts);
  int64_t const most = std::min(experts, kMaxTopK);
  check(a.top_k >= 1 && a.top_k <= most, op, ": top_k must be 1 to ", most, " for ", experts, " experts, got ", a.top_k);
  rules.top_k = int32_t(a.top_k);
  check(a.scoring == "softmax" || a.scoring == "sigmoid", op, ": scoring must be softmax or sigmoid, got '", a.scoring, "'");
  rules.scoring = a.scoring == "sigmoid" ? RouterScoring::kSigmoid : RouterScoring::kSoftmax;
  rules.renormalize = a.renormalize;
  check(a.n_group >= 1 && a.n_group <= experts && experts % a.n_group == 0, op, ": n_group must divide the ", experts, " experts, got ",
        a.n_group);
  check(a.topk_group >= 1 && a.topk_group <= a.n_group, op, ": topk_group must be 1 to n_group = ", a.n_group, ", got ", a.topk_group);
  check(a.top_k <= experts / a.n_group * a.topk_group, op, ": top_k must not be more than the ", experts / a.n_group * a.topk_group,
        " experts of ", a.topk_group, " groups, got ", a.top_k);
  rules.n_group = int32_t(a.n_group);
  rules.topk_group = int32_t(a.topk_group);
  check(std::isfinite(a.scale) && std::isfinite(float(a.scale)), op, ": scale must be finite in float32, got ", a.scale);
  rules.scale = float(a.scale);
  if (a.correction_bias) {
    Tensor const& bias = *a.correction_bias;
    check(bias.dim() == 1 && bias.size(0) == experts, op, ": correction_bias must be [experts] = [", experts, "], got ", shape_of(bias));
    check(bias.scalar_type() == ScalarType::Float, op, ": correction_bias must be Float, got ", dtype_name(bias.scalar_type()));
    check_device(op, "correction_bias", bias, other, device);
  }
  return rules;
}

struct Routed {
  Tensor weights, ids;
  Routes routes() const { return {static_cast<float*>(weights.data_ptr()), static_cast<int32_t*>(ids.data_ptr())}; }
};

Routed allocate_routes(Tensor const& like, int64_t tokens, int64_t top_k) {
  return {empty(like, {tokens, top_k}, ScalarType::Float), empty(like, {tokens, top_k}, ScalarType::Int)};
}

/// Sets the rules' bias; the tensor keeps its memory.
Tensor hold_bias(std::optional<Tensor> const& bias, RouterRules* rules) {
  if (!bias) return Tensor();
  Tensor held = torch::stable::contiguous(*bias);
  rules->correction_bias = static_cast<float const*>(held.data_ptr());
  return held;
}

}  // namespace

std::tuple<Tensor, Tensor> moe_router(Tensor logits, int64_t top_k, std::string scoring, bool renormalize,
                                      std::optional<Tensor> correction_bias, int64_t n_group, int64_t topk_group, double scale) {
  char const* op = "minfer::moe_router";
  check(logits.dim() == 2, op, ": logits must be [tokens, experts], got ", shape_of(logits));
  check(is_router_type(logits.scalar_type()), op, ": logits must be float16, bfloat16 or float32, got ", dtype_name(logits.scalar_type()));
  int64_t const tokens = logits.size(0), experts = logits.size(1);
  check(experts >= 1 && experts <= kMaxExperts, op, ": logits must have 1 to ", kMaxExperts, " experts, got ", shape_of(logits));
  int32_t const device = logits.get_device_index();
  RouterRules rules =
      check_rules(op, {top_k, scoring, renormalize, correction_bias, n_group, topk_group, scale}, experts, "logits", device);
  torch::stable::accelerator::DeviceGuard const guard(device);
  Routed const routed = allocate_routes(logits, tokens, top_k);
  Tensor const rows = unit_rows(logits), bias = hold_bias(correction_bias, &rules);
  Status const status = route_logits(rows.data_ptr(), data_type(rows.scalar_type()), leading(rows), tokens, rules, routed.routes(),
                                     programmatic(device), current_stream(device));
  check(status.ok(), op, ": ", status.message);
  return {routed.weights, routed.ids};
}

std::tuple<Tensor, Tensor> moe_router_gemm(Tensor x, Tensor w_gate, int64_t top_k, std::string scoring, bool renormalize,
                                           std::optional<Tensor> correction_bias, int64_t n_group, int64_t topk_group, double scale) {
  char const* op = "minfer::moe_router_gemm";
  check(x.dim() == 2, op, ": x must be [tokens, hidden], got ", shape_of(x));
  check(is_16bit_float(x.scalar_type()), op, ": x must be float16 or bfloat16, got ", dtype_name(x.scalar_type()));
  int64_t const tokens = x.size(0), hidden = x.size(1);
  check(w_gate.dim() == 2 && w_gate.size(1) == hidden, op, ": w_gate must be [experts, hidden = ", hidden, "], got ", shape_of(w_gate));
  int64_t const experts = w_gate.size(0);
  check(experts >= 1 && experts <= kMaxExperts, op, ": w_gate must have 1 to ", kMaxExperts, " experts, got ", shape_of(w_gate));
  check(w_gate.scalar_type() == x.scalar_type(), op, ": w_gate must have x's dtype ", dtype_name(x.scalar_type()), ", got ",
        dtype_name(w_gate.scalar_type()));
  int32_t const device = x.get_device_index();
  check_device(op, "w_gate", w_gate, "x", device);
  check(hidden < (int64_t(1) << 31), op, ": x must have less than 2^31 columns, got ", shape_of(x));
  RouterRules rules = check_rules(op, {top_k, scoring, renormalize, correction_bias, n_group, topk_group, scale}, experts, "x", device);
  torch::stable::accelerator::DeviceGuard const guard(device);
  Routed const routed = allocate_routes(x, tokens, top_k);
  Tensor const bias = hold_bias(correction_bias, &rules);
  Status status;
  if (tokens > kRouteTokensMax) {
    Tensor const logits =
        gemm(x, torch::stable::transpose(w_gate, 0, 1), std::nullopt, std::nullopt, 1.0, 0.0, "none", ScalarType::Float, std::nullopt);
    status = route_logits(logits.data_ptr(), DataType::kF32, experts, tokens, rules, routed.routes(), programmatic(device),
                          current_stream(device));
  } else {
    Tensor const x_rows = unit_rows(x), w_rows = unit_rows(w_gate);
    RouterGemm problem;
    problem.x = x_rows.data_ptr();
    problem.ldx = leading(x_rows);
    problem.w_gate = w_rows.data_ptr();
    problem.ldw = leading(w_rows);
    problem.type = data_type(x.scalar_type());
    problem.tokens = tokens;
    problem.hidden = hidden;
    DeviceProperties const& properties = device_properties(device);
    size_t const bytes = route_tokens_workspace(tokens, hidden, experts, properties);
    Tensor const workspace = empty(x, {int64_t(bytes)}, ScalarType::Byte);
    status = route_tokens(problem, rules, routed.routes(), properties, workspace.data_ptr(), bytes, programmatic(device),
                          current_stream(device));
  }
  check(status.ok(), op, ": ", status.message);
  return {routed.weights, routed.ids};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_sort(Tensor ids, int64_t num_experts, std::optional<Tensor> weights) {
  char const* op = "minfer::moe_sort";
  check(ids.dim() == 2, op, ": ids must be [tokens, top_k], got ", shape_of(ids));
  check(ids.scalar_type() == ScalarType::Int, op, ": ids must be Int, got ", dtype_name(ids.scalar_type()));
  check(num_experts >= 1 && num_experts <= kMaxExperts, op, ": num_experts must be 1 to ", kMaxExperts, ", got ", num_experts);
  int32_t const device = ids.get_device_index();
  ExpertSort sort;
  sort.tokens = ids.size(0);
  sort.top_k = ids.size(1);
  sort.experts = num_experts;
  if (weights) {
    check(weights->dim() == 2 && weights->size(0) == sort.tokens && weights->size(1) == sort.top_k, op,
          ": weights must be [tokens, top_k] = ", shape_of(ids), ", got ", shape_of(*weights));
    check(weights->scalar_type() == ScalarType::Float, op, ": weights must be Float, got ", dtype_name(weights->scalar_type()));
    check_device(op, "weights", *weights, "ids", device);
  }
  torch::stable::accelerator::DeviceGuard const guard(device);
  int64_t const pairs = sort.tokens * sort.top_k;
  Tensor const held_ids = torch::stable::contiguous(ids), held_weights = weights ? torch::stable::contiguous(*weights) : Tensor();
  Tensor const token_index = empty(ids, {pairs}, ScalarType::Int), offsets = empty(ids, {num_experts}, ScalarType::Int);
  Tensor const inverse = empty(ids, {sort.tokens, sort.top_k}, ScalarType::Int);
  Tensor const sorted_weights = empty(ids, {weights ? pairs : 0}, ScalarType::Float);
  sort.ids = static_cast<int32_t const*>(held_ids.data_ptr());
  sort.token_index = static_cast<int32_t*>(token_index.data_ptr());
  sort.offsets = static_cast<int32_t*>(offsets.data_ptr());
  sort.inverse = static_cast<int32_t*>(inverse.data_ptr());
  if (weights && pairs > 0) {
    sort.weights = static_cast<float const*>(held_weights.data_ptr());
    sort.sorted_weights = static_cast<float*>(sorted_weights.data_ptr());
  }
  Status const status = sort_by_expert(sort, device_properties(device), programmatic(device), current_stream(device));
  check(status.ok(), op, ": ", status.message);
  return {token_index, offsets, inverse, sorted_weights};
}

Tensor moe_combine(Tensor y, Tensor inverse, std::optional<Tensor> weights) {
  char const* op = "minfer::moe_combine";
  check(y.dim() == 2, op, ": y must be [rows, n], got ", shape_of(y));
  check(is_router_type(y.scalar_type()), op, ": y must be float16, bfloat16 or float32, got ", dtype_name(y.scalar_type()));
  check(inverse.dim() == 2, op, ": inverse must be [tokens, top_k], got ", shape_of(inverse));
  check(inverse.scalar_type() == ScalarType::Int, op, ": inverse must be Int, got ", dtype_name(inverse.scalar_type()));
  int32_t const device = y.get_device_index();
  check_device(op, "inverse", inverse, "y", device);
  if (weights) {
    check(weights->dim() == 2 && weights->size(0) == inverse.size(0) && weights->size(1) == inverse.size(1), op,
          ": weights must be [tokens, top_k] = ", shape_of(inverse), ", got ", shape_of(*weights));
    check(weights->scalar_type() == ScalarType::Float, op, ": weights must be Float, got ", dtype_name(weights->scalar_type()));
    check_device(op, "weights", *weights, "y", device);
  }
  torch::stable::accelerator::DeviceGuard const guard(device);
  Tensor const rows = unit_rows(y), held_inverse = torch::stable::contiguous(inverse);
  Tensor const held_weights = weights ? torch::stable::contiguous(*weights) : Tensor();
  Tensor const out = empty(y, {inverse.size(0), y.size(1)}, y.scalar_type());
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
  Status const status = sum_experts(sum, programmatic(device), current_stream(device));
  check(status.ok(), op, ": ", status.message);
  return out;
}

}  // namespace minfer::torch_binding
