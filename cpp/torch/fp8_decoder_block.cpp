// What lies between the attentions of two decoder layers, of e4m3 weights, on CUDA tensors.
#include <array>

#include "core/checks.h"
#include "core/operators.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "decoder_block_call.h"
#include "fused.h"
#include "scaled_gemm.h"

namespace minfer::torch_binding {

namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr char const* kOp = "minfer::fp8_decoder_block";
OptionalTensor const kNone;

struct Weight {
  Tensor const &codes, &scale;
  OperandScales scales{};  // how it is read

  RowQuant quant() const { return scales.blocks ? RowQuant::kFp8Block128 : RowQuant::kFp8Token; }  // of the activations in front of it
};

/// A weight [n, k], or of any n where `n` is -1. Returns n.
int64_t check_one_weight(DecoderBlockCall const& call, Weight& weight, int product, int64_t n, int64_t k) {
  std::string const name = std::string(kProductNames[product]) + "_weight", scale_name = std::string(kProductNames[product]) + "_scale";
  Tensor const& codes = weight.codes;
  if (codes.scalar_type() != ScalarType::Float8_e4m3fn) fail(call.op, ": ", name, " must be Float8_e4m3fn, got ", codes.scalar_type());
  check_same_device(call.op, name.c_str(), codes, {"a", call.a});
  if (codes.dim() != 2) fail(call.op, ": ", name, " must be [n, k], got ", codes);
  if (codes.size(1) != k) fail(call.op, ": ", name, " must have ", k, " columns, got ", codes);
  if (n >= 0 && codes.size(0) != n) fail(call.op, ": ", name, " must have ", n, " rows, got ", codes);
  n = codes.size(0);
  if (product == 1 && n % 16 != 0)
    fail(call.op, ": ", name, " must have a multiple of 16 rows (blocks of 8 gate and 8 up rows), got ", codes);
  weight.scales = check_weight_scale(call.op, scale_name.c_str(), weight.scale, n, k, product == 1, call.a);
  return n;
}

void check(DecoderBlockCall& call, Weight* weights) {
  check_tokens(call);
  int64_t const hidden = call.hidden();
  call.n[0] = check_one_weight(call, weights[0], 0, hidden, call.attention());
  call.n[1] = check_one_weight(call, weights[1], 1, -1, hidden);
  call.n[2] = check_one_weight(call, weights[2], 2, hidden, call.n[1] / 2);
  call.n[3] = check_one_weight(call, weights[3], 3, -1, hidden);
  check_norms_and_biases(call);
  for (int i = 0; i < kDecoderBlockProducts; ++i) {
    check_apart(call, std::string(kProductNames[i]) + "_weight", weights[i].codes);
    check_apart(call, std::string(kProductNames[i]) + "_scale", weights[i].scale);
  }
  check_apart(call);
}

/// What the scales of all weights that have rows are of.
DecoderBlockScales scales_of(DecoderBlockCall const& call, Weight const* weights) {
  int blocks = 0;
  for (int i = 0; i < call.products(); ++i) {
    if (weights[i].scales.exponents) return DecoderBlockScales::kOther;
    blocks += weights[i].scales.blocks;
  }
  return blocks == 0 ? DecoderBlockScales::kRows : blocks == call.products() ? DecoderBlockScales::kBlocks : DecoderBlockScales::kOther;
}

bool set_weights(DecoderBlockCall const& call, Weight const* weights, DecoderBlockOperands* operands, Held* held) {
  bool own = true;
  for (int i = 0; i < call.products(); ++i) {
    Tensor const& given = weights[i].codes;
    bool const readable = given.stride(1) == 1 && given.stride(0) % 16 == 0 && given.is_aligned(16);
    Tensor const codes = readable ? given : copy_of(call.op, "a weight", given), scale = contiguous(call.op, "a scale", weights[i].scale);
    DecoderBlockOperands::Product& product = operands->products[i];
    product.weight = held->keep(codes);
    product.ld_weight = codes.stride(0);
    product.scales = held->keep(scale);
    product.one_scale = scale.numel() == 1 && !weights[i].scales.blocks;
    own = own && readable && scale.data_ptr() == weights[i].scale.data_ptr();
  }
  return own;
}

/// The rows of a contiguous tensor of any modes, as a matrix.
Tensor matrix(Tensor const& x) {
  int64_t const width = x.size(x.dim() - 1);
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return view_of(kOp, "rows", x, {rows, width}, {width, 1});
}

void run_one_by_one(DecoderBlockCall const& call, Weight const* weights, Tensor const& out, OnDevice const& on) {
  auto const product = [&](int i, std::tuple<Tensor, Tensor> const& x, OptionalTensor const& c, Tensor const& to) {
    Tensor const codes = matrix(std::get<0>(x)), scales = weights[i].scales.blocks ? std::get<1>(x) : matrix(std::get<1>(x));
    bool const gated = i == 1;
    run({kOp, codes, scales, weights[i].codes, weights[i].scale, c, call.bias(i), gated ? call.activation : Activation::kNone, gated,
         call.constant_weights},
        to);
  };
  auto const normalized = [&](int i, Tensor const& x, OptionalTensor const& weight) {
    return normalize(check_norm(kOp, x, weight, call.eps, call.weight_offset, kNone), weights[i].quant(), on);
  };
  auto const allocated = [&](int64_t width, char const* what) {
    return allocate(kOp, call.a, {call.rows(), width}, call.a.scalar_type(), what);
  };
  Tensor const residual = matrix(call.residual);
  Tensor const x = allocated(call.hidden(), "the residual and the attention's output");
  Tensor const h = allocated(call.n[1] / 2, "the MLP's activations");
  OptionalTensor const mlp_norm = call.mlp_norm, next_norm = call.next_norm, before = residual, sum = x;
  product(0, quantize_rows(kOp, call.a, weights[0].quant(), on), before, x);
  product(1, normalized(1, x, mlp_norm), kNone, h);
  product(2, quantize_rows(kOp, h, weights[2].quant(), on), sum, residual);
  if (call.products() < kDecoderBlockProducts) return;
  product(3, normalized(3, residual, next_norm), kNone, matrix(out));
}

Tensor run(DecoderBlockCall& call, Weight* weights, double eps, double weight_offset, std::string const& activation,
           std::optional<std::string> const& kernel) {
  check(call, weights);
  DecoderBlockProblem problem = call.problem();
  problem.weights = WeightFormat::kFp8E4M3;
  problem.scales = scales_of(call, weights);
  return run(
      call, problem, eps, weight_offset, activation, kernel,
      [&](DecoderBlockOperands* operands, Held* held) { return set_weights(call, weights, operands, held); },
      [&](Tensor const& out, OnDevice const& on) { run_one_by_one(call, weights, out, on); });
}

Tensor fp8_decoder_block(Tensor const& a, Tensor const& residual, Tensor const& o_weight, Tensor const& o_scale, Tensor const& mlp_norm,
                         Tensor const& gate_up_weight, Tensor const& gate_up_scale, Tensor const& down_weight, Tensor const& down_scale,
                         Tensor const& next_norm, Tensor const& next_weight, Tensor const& next_scale, double eps, double weight_offset,
                         OptionalTensor const& o_bias, OptionalTensor const& down_bias, OptionalTensor const& next_bias,
                         std::string const& activation, bool constant_weights, std::optional<std::string> const& kernel) {
  Weight weights[] = {{o_weight, o_scale}, {gate_up_weight, gate_up_scale}, {down_weight, down_scale}, {next_weight, next_scale}};
  DecoderBlockCall call{kOp, a, residual, mlp_norm, next_norm, o_bias, down_bias, next_bias, constant_weights};
  return run(call, weights, eps, weight_offset, activation, kernel);
}

using Tensors = std::vector<Tensor>;

Tensor fp8_decoder_layers(Tensor const& qkv, Tensor const& residual, Tensors const& k_caches, Tensors const& v_caches,
                          Tensor const& block_table, Tensor const& seq_lens, Tensor const& slot_mapping, Tensor const& positions,
                          Tensor const& cos_sin, Tensors const& q_weight, Tensors const& k_weight, double scale,
                          std::vector<int64_t> const& windows, double qk_eps, double qk_weight_offset, Tensors const& o_weight,
                          Tensors const& o_scale, Tensors const& mlp_norm, Tensors const& gate_up_weight, Tensors const& gate_up_scale,
                          Tensors const& down_weight, Tensors const& down_scale, Tensors const& next_norm, Tensors const& next_weight,
                          Tensors const& next_scale, double eps, double weight_offset, Tensors const& o_bias, Tensors const& down_bias,
                          Tensors const& next_bias, std::string const& activation, bool constant, std::vector<int64_t> const& exchange,
                          int64_t rank) {
  char const* op = "minfer::_fp8_decoder_layers";
  DecoderLayers const layers{op,        qkv,       residual, k_caches,  v_caches,  block_table, seq_lens, slot_mapping,
                             positions, cos_sin,   q_weight, k_weight,  scale,     windows,     qk_eps,   qk_weight_offset,
                             mlp_norm,  next_norm, o_bias,   down_bias, next_bias, constant,    exchange, rank};
  DecoderLayerCalls all(layers);
  std::pair<char const*, Tensors const*> const lists[] = {
      {"o_weight", &o_weight},       {"o_scale", &o_scale},       {"gate_up_weight", &gate_up_weight}, {"gate_up_scale", &gate_up_scale},
      {"down_weight", &down_weight}, {"down_scale", &down_scale}, {"next_weight", &next_weight},       {"next_scale", &next_scale}};
  for (auto const& [name, list] : lists) all.check_count(name, list->size());
  std::vector<std::array<Weight, kDecoderBlockProducts>> weights;
  weights.reserve(all.calls().size());
  DecoderBlockScales scales = DecoderBlockScales::kOther;
  for (size_t i = 0; i < all.calls().size(); ++i) {
    weights.push_back({{{o_weight[i], o_scale[i]},
                        {gate_up_weight[i], gate_up_scale[i]},
                        {down_weight[i], down_scale[i]},
                        {next_weight[i], next_scale[i]}}});
    check(all.calls()[i], weights[i].data());
    DecoderBlockScales const own = scales_of(all.calls()[i], weights[i].data());
    if (i > 0 && own != scales) fail(op, ": scales of all layers must be of rows, or all of blocks");
    scales = own;
  }
  DecoderBlockProblem problem = all.calls()[0].problem();
  problem.weights = WeightFormat::kFp8E4M3;
  problem.scales = scales;
  return run_layers(all.calls(), problem, eps, weight_offset, activation, [&](size_t i, DecoderBlockOperands* operands, Held* held) {
    return set_weights(all.calls()[i], weights[i].data(), operands, held);
  });
}

constexpr Operator kOperators[] = {
    // as w4a16_decoder_block, of e4m3 weights
    {"fp8_decoder_block(Tensor a, Tensor(a!) residual, Tensor o_weight, Tensor o_scale, Tensor mlp_norm, Tensor gate_up_weight, "
     "Tensor gate_up_scale, Tensor down_weight, Tensor down_scale, Tensor next_norm, Tensor next_weight, Tensor next_scale, "
     "float eps=1e-06, *, float weight_offset=0.0, Tensor? o_bias=None, Tensor? down_bias=None, Tensor? next_bias=None, "
     "str activation='silu', bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&fp8_decoder_block>},
    // As _w4a16_decoder_layers.
    {"_fp8_decoder_layers(Tensor qkv, Tensor(a!) residual, Tensor(b!)[] k_caches, Tensor(c!)[] v_caches, Tensor block_table, "
     "Tensor seq_lens, Tensor slot_mapping, Tensor positions, Tensor cos_sin, Tensor[] q_weight, Tensor[] k_weight, float scale, "
     "int[] windows, float qk_eps, float qk_weight_offset, Tensor[] o_weight, "
     "Tensor[] o_scale, Tensor[] mlp_norm, Tensor[] gate_up_weight, Tensor[] gate_up_scale, Tensor[] down_weight, "
     "Tensor[] down_scale, Tensor[] next_norm, Tensor[] next_weight, Tensor[] next_scale, float eps, float weight_offset, Tensor[] o_bias, "
     "Tensor[] down_bias, Tensor[] next_bias, "
     "str activation, bool constant, int[] exchange=[], int rank=0) -> Tensor",
     boxed<&fp8_decoder_layers>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
