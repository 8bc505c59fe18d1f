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

/// weights: as in run_layers.
void run_in_one_launch(std::span<DecoderBlockCall const> calls, DecoderBlockProblem const& problem, DecoderBlockPlan const& plan,
                       Tensor const& out, OnDevice const& on, std::function<bool(size_t, DecoderBlockOperands*, Held*)> const& weights) {
  DecoderBlockCall const& first = calls[0];
  char const* op = first.op;
  std::vector<DecoderBlockOperands> layers(calls.size());
  Held held;
  bool constant = first.constant_weights;
  for (size_t layer = 0; layer < calls.size(); ++layer) {
    DecoderBlockCall const& call = calls[layer];
    DecoderBlockOperands& operands = layers[layer];
    constant = weights(layer, &operands, &held) && constant;
    if (call.attention_call != nullptr) {
      constant = set(*call.attention_call, &operands.attention, &held) && constant;
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
  }
  bool const aligned = first.residual.is_aligned(16);
  Tensor const residual = aligned ? first.residual : copy_of(op, "residual", first.residual);
  DecoderBlockOperands& operands = layers[0];
  operands.weights_are_constant = constant;
  operands.residual = residual.data_ptr();
  operands.d = out.data_ptr();
  operands.eps = first.eps;
  operands.weight_offset = first.weight_offset;
  operands.activation = first.activation;
  operands.exchange = first.exchange;
  Workspace const workspace(op, out, plan.workspace_bytes, "the block of a ", first.a);
  Status const status =
      run_decoder_block(plan, problem, layers.data(), on.properties(), workspace.data(), workspace.bytes(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": a ", first.a, ", residual ", first.residual, ": ", status.message);
  if (!aligned) copy_into(op, "residual", first.residual, residual);
}

void set_numbers(DecoderBlockCall& call, double eps, double weight_offset, std::string const& activation) {
  call.eps = eps_in_float32(call.op, eps);
  call.weight_offset = in_float32(call.op, "weight_offset", weight_offset);
  call.activation = parse_activation(call.op, activation);
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
  set_numbers(call, eps, weight_offset, activation);
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
    run_in_one_launch({&call, 1}, problem, plan, out, on,
                      [&](size_t, DecoderBlockOperands* operands, Held* held) { return weights(operands, held); });
  } else {
    one_by_one(out, on);
  }
  return out;
}

Tensor run_layers(std::span<DecoderBlockCall> calls, DecoderBlockProblem problem, double eps, double weight_offset,
                  std::string const& activation, std::function<bool(size_t, DecoderBlockOperands*, Held*)> const& weights) {
  DecoderBlockCall &first = calls.front(), &last = calls.back();
  char const* op = first.op;
  set_numbers(first, eps, weight_offset, activation);
  problem.layers = int64_t(calls.size());
  problem.next = last.n[3];
  for (DecoderBlockCall const& call : calls) {
    for (int i = 0; i < kDecoderBlockProducts - 1; ++i) {
      if (call.n[i] != first.n[i])
        fail(op, ": layers must have the same sizes, got ", kProductNames[i], "s of ", first.n[i], " and ", call.n[i]);
    }
    if (&call != &last && call.n[3] != problem.qkv()) {
      fail(op, ": next must have ", problem.qkv(), " rows, the columns of qkv, in front of another layer, got ", call.n[3]);
    }
  }
  OnDevice const on(op, first.a);
  Tensor const out = allocate(op, first.a, {1, last.n[3]}, first.a.scalar_type(), "the output of a ", first.a);
  DecoderBlockPlan plan;
  Status const status = plan_decoder_block(problem, on.properties(), true, &plan);
  if (!status.ok()) fail(op, ": a ", first.a, ", residual ", first.residual, ": ", status.message);
  run_in_one_launch(calls, problem, plan, out, on, weights);
  return out;
}

void DecoderLayerCalls::check_count(char const* name, size_t count) const {
  if (count != layers_.k_caches.size())
    fail(layers_.op, ": ", name, " must be of ", layers_.k_caches.size(), " layers, as k_caches, got ", count);
}

std::vector<std::optional<Tensor>> DecoderLayerCalls::optional(char const* name, std::vector<Tensor> const& list) const {
  if (list.empty()) return std::vector<std::optional<Tensor>>(layers_.k_caches.size());
  check_count(name, list.size());
  return {list.begin(), list.end()};
}

DecoderLayerCalls::DecoderLayerCalls(DecoderLayers const& layers) : layers_(layers) {
  DecoderLayers const& x = layers;
  size_t const count = x.k_caches.size();
  if (count == 0) fail(x.op, ": k_caches must be of a layer or more, got none");
  check_count("v_caches", x.v_caches.size());
  check_count("windows", x.windows.size());
  check_count("mlp_norm", x.mlp_norms.size());
  check_count("next_norm", x.next_norms.size());
  q_weights_ = optional("q_weight", x.q_weights);
  k_weights_ = optional("k_weight", x.k_weights);
  o_biases_ = optional("o_bias", x.o_biases);
  down_biases_ = optional("down_bias", x.down_biases);
  next_biases_ = optional("next_bias", x.next_biases);
  DecoderExchange const exchange = exchange_of(x.op, x.exchange, x.rank);
  attention_.reserve(count);
  calls_.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    attention_.push_back({x.op, x.qkv, x.k_caches[i], x.v_caches[i], x.block_table, x.seq_lens, x.slot_mapping, x.positions, x.cos_sin,
                          q_weights_[i], k_weights_[i], x.scale, x.windows[i], x.qk_eps, x.qk_weight_offset});
    check(attention_.back());
    if (!same(x.k_caches[i].sizes(), x.k_caches[0].sizes()) || !same(x.k_caches[i].strides(), x.k_caches[0].strides()))
      fail(x.op, ": caches of all layers must have the same sizes and strides, got ", x.k_caches[0], " and ", x.k_caches[i]);
    if (!a_) a_ = output_like(attention_.back());
    calls_.push_back({x.op, *a_, x.residual, x.mlp_norms[i], x.next_norms[i], o_biases_[i], down_biases_[i], next_biases_[i], x.constant,
                      &attention_.back(), exchange});
    for (Tensor const* cache : {&x.k_caches[i], &x.v_caches[i]}) check_apart(calls_.back(), "a cache", *cache);
  }
}

}  // namespace minfer::torch_binding
