// What lies between the attentions of two decoder layers, of weights in 16 bits, on CUDA tensors.
#include "core/checks.h"
#include "core/operators.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "decoder_block_call.h"
#include "fused.h"
#include "gemm_call.h"

namespace minfer::torch_binding {

namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr char const* kOp = "minfer::decoder_block";
OptionalTensor const kNone;
std::optional<std::string> const kAny;

using Weights = Tensor const* const[kDecoderBlockProducts];

/// A weight [n, k], or of any n where `n` is -1. Returns n.
int64_t check_one_weight(DecoderBlockCall const& call, Tensor const& weight, int product, int64_t n, int64_t k) {
  std::string const name = std::string(kProductNames[product]) + "_weight";
  if (weight.scalar_type() != call.a.scalar_type())
    fail(call.op, ": ", name, " must have a's dtype ", call.a.scalar_type(), ", got ", weight.scalar_type());
  check_same_device(call.op, name.c_str(), weight, {"a", call.a});
  if (weight.dim() != 2) fail(call.op, ": ", name, " must be [n, k], got ", weight);
  if (weight.size(1) != k) fail(call.op, ": ", name, " must have ", k, " columns, got ", weight);
  if (n >= 0 && weight.size(0) != n) fail(call.op, ": ", name, " must have ", n, " rows, got ", weight);
  n = weight.size(0);
  if (product == 1 && n % 16 != 0)
    fail(call.op, ": ", name, " must have a multiple of 16 rows (blocks of 8 gate and 8 up rows), got ", weight);
  return n;
}

void check(DecoderBlockCall& call, Weights const& weights) {
  check_tokens(call);
  int64_t const hidden = call.hidden();
  call.n[0] = check_one_weight(call, *weights[0], 0, hidden, call.attention());
  call.n[1] = check_one_weight(call, *weights[1], 1, -1, hidden);
  call.n[2] = check_one_weight(call, *weights[2], 2, hidden, call.n[1] / 2);
  call.n[3] = check_one_weight(call, *weights[3], 3, -1, hidden);
  check_norms_and_biases(call);
  for (int i = 0; i < kDecoderBlockProducts; ++i) check_apart(call, std::string(kProductNames[i]) + "_weight", *weights[i]);
  check_apart(call);
}

bool set_weights(DecoderBlockCall const& call, Weights const& weights, DecoderBlockOperands* operands, Held* held) {
  bool own = true;
  for (int i = 0; i < call.products(); ++i) {
    Tensor const& given = *weights[i];
    bool const readable = given.stride(1) == 1 && given.stride(0) % 8 == 0 && given.is_aligned(16);
    Tensor const weight = readable ? given : copy_of(call.op, "a weight", given);
    operands->products[i].weight = held->keep(weight);
    operands->products[i].ld_weight = weight.stride(0);
    own = own && readable;
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

void run_one_by_one(DecoderBlockCall const& call, Weights const& weights, Tensor const& out, OnDevice const& on) {
  auto const product = [&](int i, Tensor const& x, OptionalTensor const& c, Tensor const& to) {
    Tensor const& w = *weights[i];
    Tensor const b = view_of(kOp, "a weight", w, {w.size(1), w.size(0)}, {w.stride(1), w.stride(0)});
    GemmCall gemm{kOp, x, b, c, call.bias(i), kAny, {kAny, kNone}};
    gemm.beta = c ? 1.0f : 0.0f;
    gemm.gated = i == 1;
    gemm.activation = gemm.gated ? call.activation : Activation::kNone;
    gemm.constant_weights = call.constant_weights;
    gemm.sizes = {x.size(0), w.size(0), w.size(1), 1, false};
    run(gemm, to, on);
  };
  auto const allocated = [&](int64_t width, char const* what) {
    return allocate(kOp, call.a, {call.rows(), width}, call.a.scalar_type(), what);
  };
  auto const normalized = [&](Tensor const& x, OptionalTensor const& weight) {
    Tensor const y = allocated(call.hidden(), "a norm");
    normalize(check_norm(kOp, x, weight, call.eps, call.weight_offset, kNone), y, on);
    return y;
  };
  Tensor const residual = matrix(call.residual);
  Tensor const x = allocated(call.hidden(), "the residual and the attention's output");
  Tensor const h = allocated(call.n[1] / 2, "the MLP's activations");
  OptionalTensor const mlp_norm = call.mlp_norm, next_norm = call.next_norm, before = residual, sum = x;
  product(0, matrix(contiguous(kOp, "a", call.a)), before, x);
  product(1, normalized(x, mlp_norm), kNone, h);
  product(2, h, sum, residual);
  if (call.products() < kDecoderBlockProducts) return;
  product(3, normalized(residual, next_norm), kNone, matrix(out));
}

Tensor run(DecoderBlockCall& call, Weights const& weights, double eps, double weight_offset, std::string const& activation,
           std::optional<std::string> const& kernel) {
  check(call, weights);
  DecoderBlockProblem problem = call.problem();
  problem.weights = WeightFormat::kDense;
  return run(
      call, problem, eps, weight_offset, activation, kernel,
      [&](DecoderBlockOperands* operands, Held* held) { return set_weights(call, weights, operands, held); },
      [&](Tensor const& out, OnDevice const& on) { run_one_by_one(call, weights, out, on); });
}

Tensor decoder_block(Tensor const& a, Tensor const& residual, Tensor const& o_weight, Tensor const& mlp_norm, Tensor const& gate_up_weight,
                     Tensor const& down_weight, Tensor const& next_norm, Tensor const& next_weight, double eps, double weight_offset,
                     OptionalTensor const& o_bias, OptionalTensor const& down_bias, OptionalTensor const& next_bias,
                     std::string const& activation, bool constant_weights, std::optional<std::string> const& kernel) {
  DecoderBlockCall call{kOp, a, residual, mlp_norm, next_norm, o_bias, down_bias, next_bias, constant_weights};
  return run(call, {&o_weight, &gate_up_weight, &down_weight, &next_weight}, eps, weight_offset, activation, kernel);
}

using Tensors = std::vector<Tensor>;

Tensor decoder_layers(Tensor const& qkv, Tensor const& residual, Tensors const& k_caches, Tensors const& v_caches,
                      Tensor const& block_table, Tensor const& seq_lens, Tensor const& slot_mapping, Tensor const& positions,
                      Tensor const& cos_sin, Tensors const& q_weight, Tensors const& k_weight, double scale,
                      std::vector<int64_t> const& windows, double qk_eps, double qk_weight_offset, Tensors const& o_weight,
                      Tensors const& mlp_norm, Tensors const& gate_up_weight, Tensors const& down_weight, Tensors const& next_norm,
                      Tensors const& next_weight, double eps, double weight_offset, Tensors const& o_bias, Tensors const& down_bias,
                      Tensors const& next_bias, std::string const& activation, bool constant, std::vector<int64_t> const& exchange,
                      int64_t rank) {
  char const* op = "minfer::_decoder_layers";
  DecoderLayers const layers{op,        qkv,       residual, k_caches,  v_caches,  block_table, seq_lens, slot_mapping,
                             positions, cos_sin,   q_weight, k_weight,  scale,     windows,     qk_eps,   qk_weight_offset,
                             mlp_norm,  next_norm, o_bias,   down_bias, next_bias, constant,    exchange, rank};
  DecoderLayerCalls all(layers);
  std::pair<char const*, Tensors const*> const lists[] = {
      {"o_weight", &o_weight}, {"gate_up_weight", &gate_up_weight}, {"down_weight", &down_weight}, {"next_weight", &next_weight}};
  for (auto const& [name, list] : lists) all.check_count(name, list->size());
  for (size_t i = 0; i < all.calls().size(); ++i)
    check(all.calls()[i], {&o_weight[i], &gate_up_weight[i], &down_weight[i], &next_weight[i]});
  DecoderBlockProblem problem = all.calls()[0].problem();
  problem.weights = WeightFormat::kDense;
  return run_layers(all.calls(), problem, eps, weight_offset, activation, [&](size_t i, DecoderBlockOperands* operands, Held* held) {
    return set_weights(all.calls()[i], {&o_weight[i], &gate_up_weight[i], &down_weight[i], &next_weight[i]}, operands, held);
  });
}

constexpr Operator kOperators[] = {
    // as w4a16_decoder_block, of weights in a's type
    {"decoder_block(Tensor a, Tensor(a!) residual, Tensor o_weight, Tensor mlp_norm, Tensor gate_up_weight, Tensor down_weight, "
     "Tensor next_norm, Tensor next_weight, float eps=1e-06, *, float weight_offset=0.0, Tensor? o_bias=None, Tensor? down_bias=None, "
     "Tensor? next_bias=None, str activation='silu', bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&decoder_block>},
    // As _w4a16_decoder_layers.
    {"_decoder_layers(Tensor qkv, Tensor(a!) residual, Tensor(b!)[] k_caches, Tensor(c!)[] v_caches, Tensor block_table, "
     "Tensor seq_lens, Tensor slot_mapping, Tensor positions, Tensor cos_sin, Tensor[] q_weight, Tensor[] k_weight, float scale, "
     "int[] windows, float qk_eps, float qk_weight_offset, Tensor[] o_weight, "
     "Tensor[] mlp_norm, Tensor[] gate_up_weight, Tensor[] down_weight, Tensor[] next_norm, Tensor[] next_weight, float eps, float "
     "weight_offset, Tensor[] o_bias, Tensor[] down_bias, Tensor[] next_bias, "
     "str activation, bool constant, int[] exchange=[], int rank=0) -> Tensor",
     boxed<&decoder_layers>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
