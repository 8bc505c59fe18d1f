// What lies between the attentions of two decoder layers, of int4 weights, on CUDA tensors.
#include "core/batch_invariance.h"
#include "core/checks.h"
#include "core/json.h"
#include "core/operators.h"
#include "core/parse.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "decoder_block_call.h"
#include "fused.h"
#include "packed_weight.h"
#include "quantized_gemm_call.h"

namespace minfer::torch_binding {

namespace {

using OptionalTensor = std::optional<Tensor>;
using OptionalText = std::optional<std::string>;

constexpr char const* kOp = "minfer::w4a16_decoder_block";
OptionalTensor const kNone;
OptionalText const kAny;

struct Weights {
  PackedWeight of[kDecoderBlockProducts];
};

/// A weight [n, k], or of any n where `n` is -1. Returns n.
int64_t check_one_weight(DecoderBlockCall const& call, Weights const& weights, int product, int64_t n, int64_t k) {
  auto const& [qweight, scales, zeros, format, group_size, alpha] = weights.of[product];
  std::string const name = kProductNames[product], scales_name = name + "_scales", qweight_name = name + "_qweight";
  auto const bad = [&](auto const&... what) { fail(call.op, ": ", name, what...); };
  if (scales.dim() != 2) bad("_scales must be [groups, n], got ", scales);
  check_scale_type(call.op, scales_name.c_str(), scales, format, call.a.scalar_type());
  check_same_device(call.op, scales_name.c_str(), scales, {"a", call.a});
  if (n >= 0 && scales.size(1) != n) bad("_scales must have ", n, " columns, got ", scales);
  n = scales.size(1);
  if (product == 1 && n % 16 != 0) bad("_scales must have a multiple of 16 columns (blocks of 8 gate and 8 up rows), got ", scales);
  if (k % 8 != 0) fail(call.op, ": k must be a multiple of 8, got ", k);
  int64_t const groups = groups_of(group_size, k);
  if (scales.size(0) != groups) {
    bad("_scales must be [groups, n] = [", groups, ", ", n, "] for k = ", k, " and group_size = ", group_size, ", got ", scales);
  }
  if (n % 8 != 0) bad("_scales must have n = ", n, " columns, a multiple of 8, got ", scales);
  if (qweight.scalar_type() != ScalarType::Int) bad("_qweight must be Int, got ", qweight.scalar_type());
  check_same_device(call.op, qweight_name.c_str(), qweight, {scales_name.c_str(), scales});
  auto const packed = packed_shape(format, n, k);
  if (!same(qweight.sizes(), packed)) {
    bad("_qweight must be [ceil(n / 64), ceil(k / 64), ", packed[2], "] = ", Listed{packed}, " (w4a16_pack), got ", qweight);
  }
  return n;
}

void check(DecoderBlockCall& call, Weights const& weights) {
  check_group_size(call.op, WeightFormat::kInt4, weights.of[0].group_size);
  check_tokens(call);
  int64_t const hidden = call.hidden();
  call.n[0] = check_one_weight(call, weights, 0, hidden, call.attention());
  call.n[1] = check_one_weight(call, weights, 1, -1, hidden);
  call.n[2] = check_one_weight(call, weights, 2, hidden, call.n[1] / 2);
  call.n[3] = check_one_weight(call, weights, 3, -1, hidden);
  check_norms_and_biases(call);
  for (int i = 0; i < kDecoderBlockProducts; ++i) {
    check_apart(call, std::string(kProductNames[i]) + "_qweight", weights.of[i].packed);
    check_apart(call, std::string(kProductNames[i]) + "_scales", weights.of[i].scales);
  }
  check_apart(call);
}

bool set_weights(DecoderBlockCall const& call, Weights const& weights, DecoderBlockOperands* operands, Held* held) {
  bool own = true;
  for (int i = 0; i < call.products(); ++i) {
    Weight const weight = describe(call.op, weights.of[i], call.n[i], call.k(i));
    DecoderBlockOperands::Product& product = operands->products[i];
    product.weight = held->keep(weight.packed);
    product.scales = held->keep(weight.scales);
    product.ld_scales = weight.ld(weight.scales);
    own = own && weight.is_callers(weights.of[i]);
  }
  return own;
}

void run_one_by_one(DecoderBlockCall const& call, Weights const& weights, Tensor const& out, OnDevice const& on) {
  Tensor const &a = call.a, &residual = call.residual;
  Activation const none = Activation::kNone;
  bool const constant = call.constant_weights;
  auto const like = [&](Tensor const& x, char const* what) { return allocate(kOp, x, x.sizes(), x.scalar_type(), what); };
  auto const normalized = [&](Tensor const& x, OptionalTensor const& weight) {
    Tensor const y = like(x, "a norm");
    normalize(check_norm(kOp, x, weight, call.eps, call.weight_offset, kNone), y, on);
    return y;
  };
  OptionalTensor const mlp_norm = call.mlp_norm, next_norm = call.next_norm, addend = residual;
  Tensor const x = like(residual, "the residual and the attention's output");
  run({kOp, a, weights.of[0], kNone, addend, call.o_bias, none, false, constant, kAny, {kAny, kNone}}, x, on);
  QuantizedGemmCall const gated{
      kOp, normalized(x, mlp_norm), weights.of[1], kNone, kNone, kNone, call.activation, true, constant, kAny, {kAny, kNone}};
  Tensor const h = allocate_output(gated);
  run(gated, h, on);
  OptionalTensor const sum = x;
  run({kOp, h, weights.of[2], kNone, sum, call.down_bias, none, false, constant, kAny, {kAny, kNone}}, residual, on);
  if (call.products() < kDecoderBlockProducts) return;
  run({kOp, normalized(residual, next_norm), weights.of[3], kNone, kNone, call.next_bias, none, false, constant, kAny, {kAny, kNone}}, out,
      on);
}

Weights weights_of(Tensor const& o_qweight, Tensor const& o_scales, Tensor const& gate_up_qweight, Tensor const& gate_up_scales,
                   Tensor const& down_qweight, Tensor const& down_scales, Tensor const& next_qweight, Tensor const& next_scales,
                   int64_t group_size) {
  auto const weight = [&](Tensor const& packed, Tensor const& scales) {
    return PackedWeight{packed, scales, kNone, WeightFormat::kInt4, group_size, 1.0};
  };
  return {{weight(o_qweight, o_scales), weight(gate_up_qweight, gate_up_scales), weight(down_qweight, down_scales),
           weight(next_qweight, next_scales)}};
}

Tensor run(DecoderBlockCall& call, Weights const& weights, double eps, double weight_offset, std::string const& activation,
           OptionalText const& kernel) {
  check(call, weights);
  DecoderBlockProblem problem = call.problem();
  problem.group_size = std::max<int64_t>(0, weights.of[0].group_size);
  return run(
      call, problem, eps, weight_offset, activation, kernel,
      [&](DecoderBlockOperands* operands, Held* held) { return set_weights(call, weights, operands, held); },
      [&](Tensor const& out, OnDevice const& on) { run_one_by_one(call, weights, out, on); });
}

Tensor w4a16_decoder_block(Tensor const& a, Tensor const& residual, Tensor const& o_qweight, Tensor const& o_scales, Tensor const& mlp_norm,
                           Tensor const& gate_up_qweight, Tensor const& gate_up_scales, Tensor const& down_qweight,
                           Tensor const& down_scales, Tensor const& next_norm, Tensor const& next_qweight, Tensor const& next_scales,
                           double eps, double weight_offset, OptionalTensor const& o_bias, OptionalTensor const& down_bias,
                           OptionalTensor const& next_bias, int64_t group_size, std::string const& activation, bool constant_weights,
                           OptionalText const& kernel) {
  DecoderBlockCall call{kOp, a, residual, mlp_norm, next_norm, o_bias, down_bias, next_bias, constant_weights};
  return run(
      call,
      weights_of(o_qweight, o_scales, gate_up_qweight, gate_up_scales, down_qweight, down_scales, next_qweight, next_scales, group_size),
      eps, weight_offset, activation, kernel);
}

using Tensors = std::vector<Tensor>;

Tensor w4a16_decoder_layers(Tensor const& qkv, Tensor const& residual, Tensors const& k_caches, Tensors const& v_caches,
                            Tensor const& block_table, Tensor const& seq_lens, Tensor const& slot_mapping, Tensor const& positions,
                            Tensor const& cos_sin, Tensors const& q_weight, Tensors const& k_weight, double scale,
                            std::vector<int64_t> const& windows, double qk_eps, double qk_weight_offset, Tensors const& o_qweight,
                            Tensors const& o_scales, Tensors const& mlp_norm, Tensors const& gate_up_qweight, Tensors const& gate_up_scales,
                            Tensors const& down_qweight, Tensors const& down_scales, Tensors const& next_norm, Tensors const& next_qweight,
                            Tensors const& next_scales, double eps, double weight_offset, Tensors const& o_bias, Tensors const& down_bias,
                            Tensors const& next_bias, int64_t group_size, std::string const& activation, bool constant,
                            std::vector<int64_t> const& exchange, int64_t rank) {
  char const* op = "minfer::_w4a16_decoder_layers";
  DecoderLayers const layers{op,        qkv,       residual, k_caches,  v_caches,  block_table, seq_lens, slot_mapping,
                             positions, cos_sin,   q_weight, k_weight,  scale,     windows,     qk_eps,   qk_weight_offset,
                             mlp_norm,  next_norm, o_bias,   down_bias, next_bias, constant,    exchange, rank};
  DecoderLayerCalls all(layers);
  std::pair<char const*, Tensors const*> const lists[] = {
      {"o_qweight", &o_qweight},           {"o_scales", &o_scales},         {"gate_up_qweight", &gate_up_qweight},
      {"gate_up_scales", &gate_up_scales}, {"down_qweight", &down_qweight}, {"down_scales", &down_scales},
      {"next_qweight", &next_qweight},     {"next_scales", &next_scales}};
  for (auto const& [name, list] : lists) all.check_count(name, list->size());
  std::vector<Weights> weights;
  weights.reserve(all.calls().size());  // they refer to tensors
  for (size_t i = 0; i < all.calls().size(); ++i) {
    weights.push_back(weights_of(o_qweight[i], o_scales[i], gate_up_qweight[i], gate_up_scales[i], down_qweight[i], down_scales[i],
                                 next_qweight[i], next_scales[i], group_size));
    check(all.calls()[i], weights[i]);
  }
  DecoderBlockProblem problem = all.calls()[0].problem();
  problem.group_size = std::max<int64_t>(0, group_size);
  return run_layers(all.calls(), problem, eps, weight_offset, activation, [&](size_t i, DecoderBlockOperands* operands, Held* held) {
    return set_weights(all.calls()[i], weights[i], operands, held);
  });
}

constexpr Operator kOperators[] = {
    // x = residual + a.Wo^T + bias; h = act(gate) * up of rms_norm(x).Wgu^T; residual = x + h.Wd^T + bias; rms_norm(residual).Wn^T + bias
    {"w4a16_decoder_block(Tensor a, Tensor(a!) residual, Tensor o_qweight, Tensor o_scales, Tensor mlp_norm, Tensor gate_up_qweight, "
     "Tensor gate_up_scales, Tensor down_qweight, Tensor down_scales, Tensor next_norm, Tensor next_qweight, Tensor next_scales, "
     "float eps=1e-06, *, float weight_offset=0.0, Tensor? o_bias=None, Tensor? down_bias=None, Tensor? next_bias=None, "
     "int group_size=128, str activation='silu', bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&w4a16_decoder_block>},
    // The same behind qk_norm_rope_append and attention_paged of one token, layer after layer, in one launch, for engines that have planned
    // it. The first layer's qkv is given, D is what the last one returns. constant: of weights, and of all that attention reads but qkv,
    // nothing is written by what still runs. exchange: of layers that are divided among GPUs, which each have some heads and some columns
    // of the MLP: where this process has the ranks' buffers; rank: this one.
    {"_w4a16_decoder_layers(Tensor qkv, Tensor(a!) residual, Tensor(b!)[] k_caches, Tensor(c!)[] v_caches, Tensor block_table, "
     "Tensor seq_lens, Tensor slot_mapping, Tensor positions, Tensor cos_sin, Tensor[] q_weight, Tensor[] k_weight, float scale, "
     "int[] windows, float qk_eps, float qk_weight_offset, Tensor[] o_qweight, "
     "Tensor[] o_scales, Tensor[] mlp_norm, Tensor[] gate_up_qweight, Tensor[] gate_up_scales, Tensor[] down_qweight, "
     "Tensor[] down_scales, Tensor[] next_norm, Tensor[] next_qweight, Tensor[] next_scales, float eps, float weight_offset, Tensor[] "
     "o_bias, Tensor[] down_bias, Tensor[] next_bias, "
     "int group_size, str activation, bool constant, int[] exchange=[], int rank=0) -> Tensor",
     boxed<&w4a16_decoder_layers>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

/// What a call would do, for `minfer.plan`. sizes: m, and columns of a, the residual, the MLP's activations and the result; with the
/// attention in front also heads, heads_kv, and rows of its sequence's pages.
/// weights: "int4", of e4m3 what their scales are of, "rows" or "blocks", or "dense": of `type`.
std::string plan_json(std::vector<int64_t> const& sizes, std::string const& type, std::string const& weights, int64_t group_size,
                      bool forced, int64_t device) {
  char const* op = "minfer::_plan_decoder_block";
  if (sizes.size() != 5 && sizes.size() != 8) {
    fail(op, ": sizes must be [m, attention, hidden, inter, next], or these and [heads, heads_kv, capacity], got ", sizes.size(),
         " values");
  }
  check_group_size(op, WeightFormat::kInt4, group_size);
  DecoderBlockProblem problem;
  problem.type = parse_16bit_type(op, type);
  problem.m = sizes[0];
  problem.attention = sizes[1];
  problem.hidden = sizes[2];
  problem.inter = sizes[3];
  problem.next = sizes[4];
  if (sizes.size() == 8) {
    problem.heads = sizes[5];
    problem.heads_kv = sizes[6];
    problem.capacity = sizes[7];
  }
  if (weights != "int4" && weights != "rows" && weights != "blocks" && weights != "dense")
    fail(op, ": weights must be int4, rows, blocks or dense, got '", weights, "'");
  if (weights == "rows" || weights == "blocks") problem.weights = WeightFormat::kFp8E4M3;
  if (weights == "dense") problem.weights = WeightFormat::kDense;
  problem.scales = weights == "blocks" ? DecoderBlockScales::kBlocks : DecoderBlockScales::kRows;
  problem.group_size = std::max<int64_t>(0, group_size);
  problem.batch_invariant = batch_invariant();
  DecoderBlockPlan plan;
  if (Status const status = plan_decoder_block(problem, device_properties(op, device), forced, &plan); !status.ok()) {
    fail(op, ": ", status.message);
  }
  Json json;
  json.open('{').key("one_launch").value(plan.one_launch);
  json.key("ctas").value(int64_t(plan.ctas)).key("stages").value(int64_t(plan.stages)).key("ahead").value(int64_t(plan.ahead));
  json.key("most_layers").value(int64_t(plan.most_layers));
  json.key("smem_bytes").value(int64_t(plan.smem_bytes)).key("workspace_bytes").value(int64_t(plan.workspace_bytes));
  json.key("reason").value(plan.reason).close('}');
  return json.text();
}

int64_t exchange_bytes(int64_t hidden, int64_t ranks) { return int64_t(decoder_exchange_bytes(hidden, int32_t(ranks))); }

constexpr Operator kPlans[] = {
    // Of a rank's buffer for divided layers of `hidden` columns.
    {"_decoder_exchange_bytes(int hidden, int ranks) -> int", boxed<&exchange_bytes>},
    {"_plan_decoder_block(int[] sizes, str type, str weights, int group_size, bool forced, int device) -> str", boxed<&plan_json>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kPlans); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kPlans); }

}  // namespace

}  // namespace minfer::torch_binding
