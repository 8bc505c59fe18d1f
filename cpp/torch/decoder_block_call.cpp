// What the decoder blocks' calls have in common: checks, and the launch or the operators one by one, as plan_decoder_block decides. The
// checks are those of python/minfer/checks/decoder_block.py, in the same order.
#include "decoder_block_call.h"

#include "core/batch_invariance.h"
#include "core/checks.h"
#include "core/parse.h"
#include "core/torch_calls.h"

namespace minfer::torch_binding {

namespace {

constexpr char const *kOneLaunch = "one_launch", *kSeparate = "separate";  // of `kernel`
std::optional<Tensor> const kNone;

void check_one_bias(DecoderBlockCall const& call, int product) {
  if (!call.bias(product)) return;
  Tensor const &bias = *call.bias(product), &a = call.a;
  std::string const name = std::string(kProductNames[product]) + "_bias";
  if (bias.scalar_type() != a.scalar_type() && bias.scalar_type() != ScalarType::Float) {
    fail(call.op, ": ", name, " must be ", a.scalar_type(), " or Float, got ", bias.scalar_type());
  }
  check_same_device(call.op, name.c_str(), bias, {"a", a});
  if (bias.dim() != 1 || bias.size(0) != call.n[product]) {
    fail(call.op, ": ", name, " must be [n] = [", call.n[product], "], got ", bias);
  }
}

void run_in_one_launch(DecoderBlockCall const& call, DecoderBlockProblem const& problem, DecoderBlockPlan const& plan, Tensor const& out,
                       OnDevice const& on, std::function<bool(DecoderBlockOperands*, Held*)> const& weights) {
  char const* op = call.op;
  DecoderBlockOperands operands;
  Held held;
  operands.weights_are_constant = weights(&operands, &held) && call.constant_weights;
  if (call.attention_call != nullptr) {
    operands.weights_are_constant = set(*call.attention_call, &operands.attention, &held) && operands.weights_are_constant;
  } else {
    operands.a = held.keep(aligned_contiguous(op, "a", call.a));
  }
  Tensor const* const norms[kDecoderBlockProducts] = {nullptr, &call.mlp_norm, nullptr, &call.next_norm};
  for (int i = 0; i < call.products(); ++i) {
    DecoderBlockOperands::Product& product = operands.products[i];
    if (norms[i] != nullptr) product.norm = held.keep(aligned_contiguous(op, i == 1 ? "mlp_norm" : "next_norm", *norms[i]));
    if (call.bias(i)) {
      Tensor const bias = contiguous(op, "bias", *call.bias(i));
      product.bias = held.keep(bias);
      product.bias_type = data_type(bias.scalar_type());
    }
  }
  bool const aligned = call.residual.is_aligned(16);
  Tensor const residual = aligned ? call.residual : copy_of(op, "residual", call.residual);
  operands.residual = residual.data_ptr();
  operands.d = out.data_ptr();
  operands.eps = call.eps;
  operands.weight_offset = call.weight_offset;
  operands.activation = call.activation;
  operands.exchange = call.exchange;
  Workspace const workspace(op, out, plan.workspace_bytes, "the block of a ", call.a);
  Status const status =
      run_decoder_block(plan, problem, operands, on.properties(), workspace.data(), workspace.bytes(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": a ", call.a, ", residual ", call.residual, ": ", status.message);
  if (!aligned) copy_into(op, "residual", call.residual, residual);
}

}  // namespace

std::optional<Tensor> const& DecoderBlockCall::bias(int product) const {
  return product == 0 ? o_bias : product == 2 ? down_bias : product == 3 ? next_bias : kNone;
}

DecoderBlockProblem DecoderBlockCall::problem() const {
  DecoderBlockProblem p;
  p.type = data_type(a.scalar_type());
  p.m = rows();
  p.attention = attention();
  p.hidden = hidden();
  p.inter = n[1] / 2;
  p.next = n[3];
  p.batch_invariant = batch_invariant();
  if (attention_call != nullptr) describe(*attention_call, &p);
  return p;
}

DecoderExchange exchange_of(char const* op, std::vector<int64_t> const& buffers, int64_t rank) {
  DecoderExchange exchange;
  if (buffers.empty()) return exchange;
  int64_t const ranks = int64_t(buffers.size());
  if (ranks < 2 || ranks > kMostDecoderRanks) fail(op, ": exchange must be of 2 to ", kMostDecoderRanks, " ranks, got ", ranks);
  if (rank < 0 || rank >= ranks) fail(op, ": rank must be that of a buffer, got ", rank);
  exchange.ranks = int32_t(ranks);
  exchange.rank = int32_t(rank);
  for (int64_t i = 0; i < ranks; ++i) exchange.buffers[i] = reinterpret_cast<void*>(buffers[size_t(i)]);
  return exchange;
}

void check_tokens(DecoderBlockCall const& call) {
  char const* op = call.op;
  Tensor const &a = call.a, &residual = call.residual;
  if (a.dim() < 1) fail(op, ": a must have at least one mode, got ", a);
  check_16bit(op, "a", a);
  if (residual.scalar_type() != a.scalar_type())
    fail(op, ": residual must have a's dtype ", a.scalar_type(), ", got ", residual.scalar_type());
  check_same_device(op, "residual", residual, {"a", a});
  bool rows = residual.dim() == a.dim();
  for (int64_t i = 0; rows && i + 1 < a.dim(); ++i) rows = residual.size(i) == a.size(i);
  if (!rows) fail(op, ": residual must be [..., hidden] with a's rows, got a ", a, ", residual ", residual);
  if (!residual.is_contiguous()) fail(op, ": residual must be contiguous, got ", residual);
}

void check_norms_and_biases(DecoderBlockCall const& call) {
  Tensor const& a = call.a;
  check_operand(call.op, "mlp_norm", call.mlp_norm, a.scalar_type(), {call.hidden()}, {"a", a});
  check_operand(call.op, "next_norm", call.next_norm, a.scalar_type(), {call.hidden()}, {"a", a});
  for (int i : {0, 2, 3}) check_one_bias(call, i);
}

void check_apart(DecoderBlockCall const& call, std::string const& name, Tensor const& x) {
  check_no_overlap(call.op, call.residual, name.c_str(), x, "residual");
}

void check_apart(DecoderBlockCall const& call) {
  check_apart(call, "a", call.a);
  for (int i : {0, 2, 3}) {
    if (call.bias(i)) check_apart(call, std::string(kProductNames[i]) + "_bias", *call.bias(i));
  }
  check_apart(call, "mlp_norm", call.mlp_norm);
  check_apart(call, "next_norm", call.next_norm);
}

Tensor run(DecoderBlockCall& call, DecoderBlockProblem problem, double eps, double weight_offset, std::string const& activation,
           std::optional<std::string> const& kernel, std::function<bool(DecoderBlockOperands*, Held*)> const& weights,
           std::function<void(Tensor const&, OnDevice const&)> const& one_by_one) {
  char const* op = call.op;
  Tensor const &a = call.a, &residual = call.residual;
  call.eps = eps_in_float32(op, eps);
  call.weight_offset = in_float32(op, "weight_offset", weight_offset);
  call.activation = parse_activation(op, activation);
  if (kernel && *kernel != kOneLaunch && *kernel != kSeparate) fail(op, ": kernel must be one_launch or separate, got '", *kernel, "'");
  OnDevice const on(op, a);
  ShapeArray shape(a.sizes());
  shape.back() = call.n[3];
  Tensor const out = allocate(op, a, shape, a.scalar_type(), "the output of a ", a);
  if (call.rows() == 0) return out;
  DecoderBlockPlan plan;
  if (!kernel || *kernel == kOneLaunch) {
    Status const status = plan_decoder_block(problem, on.properties(), kernel.has_value(), &plan);
    if (!status.ok()) fail(op, ": a ", a, ", residual ", residual, ": ", status.message);
  }
  if (plan.one_launch) {
    run_in_one_launch(call, problem, plan, out, on, weights);
  } else {
    one_by_one(out, on);
  }
  return out;
}

}  // namespace minfer::torch_binding
