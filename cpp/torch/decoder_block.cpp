// What lies between the attentions of two decoder layers, on CUDA tensors: one launch or the operators one by one, as plan_decoder_block
// decides. The checks are those of python/minfer/checks/decoder_block.py, in the same order.
#include "minfer/decoder_block.h"

#include "core/batch_invariance.h"
#include "core/checks.h"
#include "core/json.h"
#include "core/operators.h"
#include "core/parse.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "fused.h"
#include "packed_weight.h"
#include "quantized_gemm_call.h"

namespace minfer::torch_binding {

namespace {

using OptionalTensor = std::optional<Tensor>;
using OptionalText = std::optional<std::string>;

constexpr char const* kOp = "minfer::w4a16_decoder_block";
constexpr char const *kOneLaunch = "one_launch", *kSeparate = "separate";  // of `kernel`
constexpr char const* kWeights[kDecoderBlockProducts] = {"o", "gate_up", "down", "next"};

OptionalTensor const kNone;
OptionalText const kAny;

struct Call {
  Tensor const &a, &residual;
  PackedWeight weights[kDecoderBlockProducts];
  Tensor const &mlp_norm, &next_norm;
  OptionalTensor const &o_bias, &down_bias, &next_bias;
  float eps, weight_offset;
  Activation activation;
  bool constant_weights;

  int64_t width(Tensor const& x) const { return x.size(x.dim() - 1); }
  int64_t rows() const { return residual.numel() / std::max<int64_t>(1, width(residual)); }
  int64_t n(int product) const { return weights[product].scales.size(1); }
  OptionalTensor const& bias(int product) const {
    return product == 0 ? o_bias : product == 2 ? down_bias : product == 3 ? next_bias : kNone;
  }

  DecoderBlockProblem problem() const {
    DecoderBlockProblem p;
    p.type = data_type(a.scalar_type());
    p.m = rows();
    p.attention = width(a);
    p.hidden = width(residual);
    p.inter = n(1) / 2;
    p.next = n(3);
    p.group_size = std::max<int64_t>(0, weights[0].group_size);
    p.batch_invariant = batch_invariant();
    return p;
  }
};

/// A weight [n, k], or of any n where `n` is -1.
void check_one_weight(Call const& call, int product, int64_t n, int64_t k) {
  auto const& [qweight, scales, zeros, format, group_size, alpha] = call.weights[product];
  std::string const name = kWeights[product], scales_name = name + "_scales", qweight_name = name + "_qweight";
  auto const bad = [&](auto const&... what) { fail(kOp, ": ", name, what...); };
  if (scales.dim() != 2) bad("_scales must be [groups, n], got ", scales);
  check_scale_type(kOp, scales_name.c_str(), scales, format, call.a.scalar_type());
  check_same_device(kOp, scales_name.c_str(), scales, {"a", call.a});
  if (n >= 0 && scales.size(1) != n) bad("_scales must have ", n, " columns, got ", scales);
  n = scales.size(1);
  if (product == 1 && n % 16 != 0) bad("_scales must have a multiple of 16 columns (blocks of 8 gate and 8 up rows), got ", scales);
  if (k % 8 != 0) fail(kOp, ": k must be a multiple of 8, got ", k);
  int64_t const groups = groups_of(group_size, k);
  if (scales.size(0) != groups) {
    bad("_scales must be [groups, n] = [", groups, ", ", n, "] for k = ", k, " and group_size = ", group_size, ", got ", scales);
  }
  if (n % 8 != 0) bad("_scales must have n = ", n, " columns, a multiple of 8, got ", scales);
  if (qweight.scalar_type() != ScalarType::Int) bad("_qweight must be Int, got ", qweight.scalar_type());
  check_same_device(kOp, qweight_name.c_str(), qweight, {scales_name.c_str(), scales});
  auto const packed = packed_shape(format, n, k);
  if (!same(qweight.sizes(), packed)) {
    bad("_qweight must be [ceil(n / 64), ceil(k / 64), ", packed[2], "] = ", Listed{packed}, " (w4a16_pack), got ", qweight);
  }
}

void check_one_bias(Call const& call, int product) {
  if (!call.bias(product)) return;
  Tensor const &bias = *call.bias(product), &a = call.a;
  std::string const name = std::string(kWeights[product]) + "_bias";
  if (bias.scalar_type() != a.scalar_type() && bias.scalar_type() != ScalarType::Float) {
    fail(kOp, ": ", name, " must be ", a.scalar_type(), " or Float, got ", bias.scalar_type());
  }
  check_same_device(kOp, name.c_str(), bias, {"a", a});
  if (bias.dim() != 1 || bias.size(0) != call.n(product)) fail(kOp, ": ", name, " must be [n] = [", call.n(product), "], got ", bias);
}

void check(Call const& call) {
  Tensor const &a = call.a, &residual = call.residual;
  check_group_size(kOp, WeightFormat::kInt4, call.weights[0].group_size);
  if (a.dim() < 1) fail(kOp, ": a must have at least one mode, got ", a);
  check_16bit(kOp, "a", a);
  if (residual.scalar_type() != a.scalar_type())
    fail(kOp, ": residual must have a's dtype ", a.scalar_type(), ", got ", residual.scalar_type());
  check_same_device(kOp, "residual", residual, {"a", a});
  bool rows = residual.dim() == a.dim();
  for (int64_t i = 0; rows && i + 1 < a.dim(); ++i) rows = residual.size(i) == a.size(i);
  if (!rows) fail(kOp, ": residual must be [..., hidden] with a's rows, got a ", a, ", residual ", residual);
  if (!residual.is_contiguous()) fail(kOp, ": residual must be contiguous, got ", residual);
  int64_t const hidden = call.width(residual);
  check_one_weight(call, 0, hidden, call.width(a));
  check_one_weight(call, 1, -1, hidden);
  check_one_weight(call, 2, hidden, call.n(1) / 2);
  check_one_weight(call, 3, -1, hidden);
  check_operand(kOp, "mlp_norm", call.mlp_norm, a.scalar_type(), {hidden}, {"a", a});
  check_operand(kOp, "next_norm", call.next_norm, a.scalar_type(), {hidden}, {"a", a});
  for (int i : {0, 2, 3}) check_one_bias(call, i);
  auto const apart = [&](char const* name, Tensor const& x) { check_no_overlap(kOp, residual, name, x, "residual"); };
  apart("a", a);
  for (int i = 0; i < kDecoderBlockProducts; ++i) {
    apart((std::string(kWeights[i]) + "_qweight").c_str(), call.weights[i].packed);
    apart((std::string(kWeights[i]) + "_scales").c_str(), call.weights[i].scales);
    if (call.bias(i)) apart((std::string(kWeights[i]) + "_bias").c_str(), *call.bias(i));
  }
  apart("mlp_norm", call.mlp_norm);
  apart("next_norm", call.next_norm);
}

void run_in_one_launch(Call const& call, DecoderBlockPlan const& plan, Tensor const& out, OnDevice const& on) {
  DecoderBlockProblem const problem = call.problem();
  DecoderBlockOperands operands;
  Held held;
  operands.weights_are_constant = call.constant_weights;
  Tensor const* const norms[kDecoderBlockProducts] = {nullptr, &call.mlp_norm, nullptr, &call.next_norm};
  for (int i = 0; i < kDecoderBlockProducts; ++i) {
    DecoderBlockOperands::Product& product = operands.products[i];
    Weight const weight = describe(kOp, call.weights[i], call.n(i), problem.k(i));
    product.weight = held.keep(weight.packed);
    product.scales = held.keep(weight.scales);
    product.ld_scales = weight.ld(weight.scales);
    if (!weight.is_callers(call.weights[i])) operands.weights_are_constant = false;
    if (norms[i] != nullptr) product.norm = held.keep(aligned_contiguous(kOp, i == 1 ? "mlp_norm" : "next_norm", *norms[i]));
    if (call.bias(i)) {
      Tensor const bias = contiguous(kOp, "bias", *call.bias(i));
      product.bias = held.keep(bias);
      product.bias_type = data_type(bias.scalar_type());
    }
  }
  bool const aligned = call.residual.is_aligned(16);
  Tensor const residual = aligned ? call.residual : copy_of(kOp, "residual", call.residual);
  operands.a = held.keep(aligned_contiguous(kOp, "a", call.a));
  operands.residual = residual.data_ptr();
  operands.d = out.data_ptr();
  operands.eps = call.eps;
  operands.weight_offset = call.weight_offset;
  operands.activation = call.activation;
  Workspace const workspace(kOp, out, plan.workspace_bytes, "the block of a ", call.a);
  Status const status =
      run_decoder_block(plan, problem, operands, on.properties(), workspace.data(), workspace.bytes(), on.programmatic(), on.stream());
  if (!status.ok()) fail(kOp, ": a ", call.a, ", residual ", call.residual, ": ", status.message);
  if (!aligned) copy_into(kOp, "residual", call.residual, residual);
}

void run_one_by_one(Call const& call, Tensor const& out, OnDevice const& on) {
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
  run({kOp, a, call.weights[0], kNone, addend, call.o_bias, none, false, constant, kAny, {kAny, kNone}}, x, on);
  QuantizedGemmCall const gated{
      kOp, normalized(x, mlp_norm), call.weights[1], kNone, kNone, kNone, call.activation, true, constant, kAny, {kAny, kNone}};
  Tensor const h = allocate_output(gated);
  run(gated, h, on);
  OptionalTensor const sum = x;
  run({kOp, h, call.weights[2], kNone, sum, call.down_bias, none, false, constant, kAny, {kAny, kNone}}, residual, on);
  run({kOp, normalized(residual, next_norm), call.weights[3], kNone, kNone, call.next_bias, none, false, constant, kAny, {kAny, kNone}},
      out, on);
}

Tensor w4a16_decoder_block(Tensor const& a, Tensor const& residual, Tensor const& o_qweight, Tensor const& o_scales, Tensor const& mlp_norm,
                           Tensor const& gate_up_qweight, Tensor const& gate_up_scales, Tensor const& down_qweight,
                           Tensor const& down_scales, Tensor const& next_norm, Tensor const& next_qweight, Tensor const& next_scales,
                           double eps, double weight_offset, OptionalTensor const& o_bias, OptionalTensor const& down_bias,
                           OptionalTensor const& next_bias, int64_t group_size, std::string const& activation, bool constant_weights,
                           OptionalText const& kernel) {
  auto const weight = [&](Tensor const& packed, Tensor const& scales) {
    return PackedWeight{packed, scales, kNone, WeightFormat::kInt4, group_size, 1.0};
  };
  Call call{a,
            residual,
            {weight(o_qweight, o_scales), weight(gate_up_qweight, gate_up_scales), weight(down_qweight, down_scales),
             weight(next_qweight, next_scales)},
            mlp_norm,
            next_norm,
            o_bias,
            down_bias,
            next_bias,
            0.0f,
            0.0f,
            Activation::kNone,
            constant_weights};
  check(call);
  call.eps = eps_in_float32(kOp, eps);
  call.weight_offset = in_float32(kOp, "weight_offset", weight_offset);
  call.activation = parse_activation(kOp, activation);
  if (kernel && *kernel != kOneLaunch && *kernel != kSeparate) fail(kOp, ": kernel must be one_launch or separate, got '", *kernel, "'");
  OnDevice const on(kOp, a);
  ShapeArray shape(a.sizes());
  shape.back() = call.n(3);
  Tensor const out = allocate(kOp, a, shape, a.scalar_type(), "the output of a ", a);
  if (call.rows() == 0) return out;
  DecoderBlockPlan plan;
  if (!kernel || *kernel == kOneLaunch) {
    Status const status = plan_decoder_block(call.problem(), on.properties(), kernel.has_value(), &plan);
    if (!status.ok()) fail(kOp, ": a ", a, ", residual ", residual, ": ", status.message);
  }
  if (plan.one_launch) {
    run_in_one_launch(call, plan, out, on);
  } else {
    run_one_by_one(call, out, on);
  }
  return out;
}

constexpr Operator kOperators[] = {
    // x = residual + a.Wo^T + bias; h = act(gate) * up of rms_norm(x).Wgu^T; residual = x + h.Wd^T + bias; rms_norm(residual).Wn^T + bias
    {"w4a16_decoder_block(Tensor a, Tensor(a!) residual, Tensor o_qweight, Tensor o_scales, Tensor mlp_norm, Tensor gate_up_qweight, "
     "Tensor gate_up_scales, Tensor down_qweight, Tensor down_scales, Tensor next_norm, Tensor next_qweight, Tensor next_scales, "
     "float eps=1e-06, *, float weight_offset=0.0, Tensor? o_bias=None, Tensor? down_bias=None, Tensor? next_bias=None, "
     "int group_size=128, str activation='silu', bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&w4a16_decoder_block>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

/// What a call would do, for `minfer.plan`. sizes: m, and columns of a, the residual, the MLP's activations and the result.
std::string plan_json(std::vector<int64_t> const& sizes, std::string const& type, int64_t group_size, bool forced, int64_t device) {
  char const* op = "minfer::_plan_decoder_block";
  if (sizes.size() != 5) fail(op, ": sizes must be [m, attention, hidden, inter, next], got ", sizes.size(), " values");
  check_group_size(op, WeightFormat::kInt4, group_size);
  DecoderBlockProblem problem;
  problem.type = parse_16bit_type(op, type);
  problem.m = sizes[0];
  problem.attention = sizes[1];
  problem.hidden = sizes[2];
  problem.inter = sizes[3];
  problem.next = sizes[4];
  problem.group_size = std::max<int64_t>(0, group_size);
  problem.batch_invariant = batch_invariant();
  DecoderBlockPlan plan;
  if (Status const status = plan_decoder_block(problem, device_properties(op, device), forced, &plan); !status.ok()) {
    fail(op, ": ", status.message);
  }
  Json json;
  json.open('{').key("one_launch").value(plan.one_launch);
  json.key("ctas").value(int64_t(plan.ctas)).key("stages").value(int64_t(plan.stages)).key("ahead").value(int64_t(plan.ahead));
  json.key("smem_bytes").value(int64_t(plan.smem_bytes)).key("workspace_bytes").value(int64_t(plan.workspace_bytes));
  json.key("reason").value(plan.reason).close('}');
  return json.text();
}

constexpr Operator kPlans[] = {
    {"_plan_decoder_block(int[] sizes, str type, int group_size, bool forced, int device) -> str", boxed<&plan_json>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kPlans); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kPlans); }

}  // namespace

}  // namespace minfer::torch_binding
