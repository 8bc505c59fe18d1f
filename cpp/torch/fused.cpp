// The operators between the GEMMs, on CUDA tensors. The checks are those of python/minfer/checks/fused.py, in the same order.
#include "fused.h"

#include <algorithm>

#include "core/batch_invariance.h"
#include "core/checks.h"
#include "core/device.h"
#include "core/operators.h"
#include "core/parse.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "minfer/fused.h"
#include "rotary_table.h"
#include "row_tensors.h"

namespace minfer::torch_binding {

namespace {

using OptionalTensor = std::optional<Tensor>;
using OptionalText = std::optional<std::string>;

// ---- arguments -----------------------------------------------------------------------------------------------------------------------

bool is_row_type(ScalarType type, bool float32) { return is_16bit_float(type) || (float32 && type == ScalarType::Float); }

void check_rows(char const* op, Tensor const& x, bool float32) {
  if (!is_row_type(x.scalar_type(), float32)) {
    fail(op, ": x must be float16", float32 ? ", bfloat16 or float32" : " or bfloat16", ", got ", x.scalar_type());
  }
  if (x.dim() < 1) fail(op, ": x must have at least one mode, got ", x);
}

/// [width], of x's type.
void check_factors(char const* op, char const* name, OptionalTensor const& factors, int64_t width, NamedTensor const& x) {
  if (factors) check_operand(op, name, *factors, x.x.scalar_type(), {width}, x);
}

RowQuant parse_quant(char const* op, std::string const& name) {
  for (RowQuant quant : kRowQuants) {
    if (name == name_of(quant)) return quant;
  }
  fail(op, ": quant must be one of fp8_tensor, fp8_token, fp8_block128, int8_token, got '", name, "'");
}

/// The scale of fp8_tensor, which the others do not have.
void check_scale(char const* op, RowQuant quant, OptionalTensor const& scale, NamedTensor const& x) {
  if (quant != RowQuant::kFp8Tensor) {
    if (scale) fail(op, ": scale must be None for ", name_of(quant), ", whose scales are computed, got ", *scale);
    return;
  }
  if (!scale) fail(op, ": scale must be given for fp8_tensor");
  check_operand(op, "scale", *scale, ScalarType::Float, {1}, x);
}

RowOverride parse_kernel(char const* op, std::string const& text) {
  RowOverride result;
  size_t const at = text.find('@');
  std::string const name = text.substr(0, at);
  check_kernel_name(op, "fused", name);
  result.kernel = find_kernel(name.c_str());
  if (at == std::string::npos) return result;
  for (std::string const& item : split(text.substr(at + 1), ',')) {
    size_t const equals = item.find('=');
    std::string const key = item.substr(0, equals), value = equals == std::string::npos ? "" : item.substr(equals + 1);
    std::string const what = std::string(op) + ": kernel option " + key;
    int32_t* const number = key == "threads"   ? &result.launch.threads
                            : key == "rows"    ? &result.launch.rows_per_cta
                            : key == "cluster" ? &result.launch.cluster
                            : key == "parts"   ? &result.launch.parts
                                               : nullptr;
    if (number == nullptr) fail(op, ": kernel option '", key, "' is not known; expected threads, rows, cluster or parts");
    if (*number != 0) fail(what, " is given twice");
    *number = parse_launch_number(what.c_str(), value);
  }
  return result;
}

void check_out(char const* op, Tensor const& out, Shape shape, ScalarType type, NamedTensor const& x) {
  check_operand(op, "out", out, type, shape, x);
  check_apart(op, out);
}

// ---- calls ---------------------------------------------------------------------------------------------------------------------------

/// A call of an operator on rows: what the operators have in common from the checks on.
struct RowCall {
  char const* op;
  Tensor const& x;
  OptionalText const& kernel;
  RowProblem problem{};
  RowOperands operands{};
  Tensor weight{}, bias{}, residual{};  // of what there is

  RowCall(char const* op, RowOperation operation, Tensor const& x, OptionalText const& kernel) : op(op), x(x), kernel(kernel) {
    problem.operation = operation;
    problem.type = data_type(x.scalar_type());
    problem.batch_invariant = batch_invariant();
    problem.width = x.size(x.dim() - 1);
  }
  void set_factors(OptionalTensor const& weights, OptionalTensor const& biases) {
    if (weights) weight = contiguous(op, "weight", *weights);
    if (biases) bias = contiguous(op, "bias", *biases);
  }
  /// Of the output, whose last mode is `problem.width`.
  ShapeArray shape() const {
    ShapeArray result(x.sizes());
    result.back() = problem.width;
    return result;
  }
  int64_t rows() const {
    int64_t rows = 1;
    for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
    return rows;
  }
};

/// Everything but what the results are stored in: `finish` sets that.
template <class Finish>
void run(RowCall* call, OnDevice const& on, Finish&& finish) {
  char const* op = call->op;
  RowProblem& problem = call->problem;
  RowOperands& o = call->operands;
  problem.rows = call->rows();
  problem.adds = call->residual.defined();
  std::optional<RowOverride> forced;
  if (call->kernel) forced = parse_kernel(op, *call->kernel);
  if (problem.rows == 0 || problem.width == 0) return;
  RowWalk walk(op, "x", call->x);
  if (call->residual.defined()) o.residual = walk.write("residual", call->residual, true);
  finish(walk);
  o.x = walk.x();
  o.inner = walk.inner();
  if (call->weight.defined()) o.weight = call->weight.data_ptr();
  if (call->bias.defined()) o.bias = call->bias.data_ptr();
  RowPlan plan;
  if (Status const status = plan_rows(problem, on.properties(), forced ? &*forced : nullptr, &plan); !status.ok()) {
    fail(op, ": x ", call->x, ": ", status.message);
  }
  if (Status const status = run_rows(plan, problem, o, on.programmatic(), on.stream()); !status.ok()) {
    fail(op, ": ", plan.kernel->name, " on x ", call->x, ": ", status.message);
  }
  walk.store();
}

/// Into `out`, of the output's shape and any strides.
void run_into(RowCall* call, Tensor const& out, OnDevice const& on) {
  run(call, on, [&](RowWalk& walk) { call->operands.y = walk.write("out", out, false); });
}

Tensor run_to_new(RowCall* call, OnDevice const& on, ScalarType type) {
  Tensor const out = allocate(call->op, call->x, call->shape(), type, "the output of x ", call->x);
  run_into(call, out, on);
  return out;
}

/// Codes and scales. fp8_tensor: no scales.
std::tuple<Tensor, Tensor> run_quantized(RowCall* call, RowQuant quant, OptionalTensor const& scale, OptionalTensor const& norm,
                                         OnDevice const& on) {
  char const* op = call->op;
  call->problem.quant = quant;
  bool const int8 = quant == RowQuant::kInt8Token;
  Tensor const q = allocate(op, call->x, call->shape(), int8 ? ScalarType::Char : ScalarType::Float8_e4m3fn, "the codes of x ", call->x);
  int64_t const rows = call->rows(), width = call->problem.width;
  Tensor scales;
  RowOperands& o = call->operands;
  if (quant == RowQuant::kFp8Tensor) {
    scales = allocate(op, call->x, {0}, ScalarType::Float, "no scales");
  } else if (quant == RowQuant::kFp8Block128) {
    int64_t const blocks = (width + kQuantBlock - 1) / kQuantBlock;
    o.scales_stride = std::max<int64_t>(round_up(rows, 4), 4);  // TMA's 16 bytes
    scales = allocate_strided(op, call->x, {rows, blocks}, {1, o.scales_stride}, ScalarType::Float, "the scales of x ", call->x);
  } else {
    ShapeArray shape = call->shape();
    shape.back() = 1;
    scales = allocate(op, call->x, shape, ScalarType::Float, "the scales of x ", call->x);
  }
  if (width == 0 && scales.numel() > 0) fill_with_zeros(op, "scales", scales);
  Tensor held_scale;
  if (scale) held_scale = contiguous(op, "scale", *scale);
  run(call, on, [&](RowWalk& walk) {
    o.q = q.data_ptr();
    o.scales = static_cast<float*>(scales.data_ptr());
    if (held_scale.defined()) o.scale = static_cast<float const*>(held_scale.data_ptr());
    if (norm) o.y = walk.write("norm", *norm, false);
  });
  return {q, scales};
}

// ---- normalisation -------------------------------------------------------------------------------------------------------------------

struct RmsNormCall : RowCall {
  RmsNormCall(char const* op, Tensor const& x, OptionalTensor const& weights, double eps, double weight_offset, OptionalText const& kernel,
              char const* weight_name = "weight")
      : RowCall(op, RowOperation::kRmsNorm, (check_rows(op, x, false), x), kernel) {
    check_factors(op, weight_name, weights, problem.width, {"x", x});
    operands.eps = eps_in_float32(op, eps);
    float const offset = in_float32(op, "weight_offset", weight_offset);
    operands.weight_offset = weights ? offset : 0.0f;
    set_factors(weights, std::nullopt);
  }
  void add(Tensor const& to, OptionalTensor const& weights, char const* weight_name = "weight") {
    check_operand(op, "residual", to, x.scalar_type(), x.sizes(), {"x", x});
    check_apart(op, to, "residual");
    check_no_overlap(op, to, "x", x, "residual");
    if (weights) check_no_overlap(op, to, weight_name, *weights, "residual");
    residual = to;
  }
  void check_norm(OptionalTensor const& to, OptionalTensor const& weights) const {
    if (!to) return;
    check_operand(op, "norm", *to, x.scalar_type(), x.sizes(), {"x", x});
    check_apart(op, *to, "norm");
    check_no_overlap(op, *to, "x", x, "norm");
    if (residual.defined()) check_no_overlap(op, *to, "residual", residual, "norm");
    if (weights) check_no_overlap(op, *to, "weight", *weights, "norm");
  }
};

Tensor rms_norm(Tensor const& x, OptionalTensor const& weight, double eps, double weight_offset, OptionalText const& kernel) {
  RmsNormCall call("minfer::rms_norm", x, weight, eps, weight_offset, kernel);
  return run_to_new(&call, OnDevice(call.op, x), x.scalar_type());
}

Tensor rms_norm_out(Tensor const& x, OptionalTensor const& weight, double eps, double weight_offset, OptionalText const& kernel,
                    Tensor const& out) {
  RmsNormCall call("minfer::rms_norm", x, weight, eps, weight_offset, kernel);
  check_out(call.op, out, x.sizes(), x.scalar_type(), {"x", x});
  if (!is_same_view(out, x)) check_no_overlap(call.op, out, "x", x);
  if (weight) check_no_overlap(call.op, out, "weight", *weight);
  run_into(&call, out, OnDevice(call.op, x));
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_quantized(Tensor const& x, std::string const& quant, OptionalTensor const& weight, double eps,
                                              double weight_offset, OptionalTensor const& scale, OptionalTensor const& norm,
                                              OptionalText const& kernel) {
  RmsNormCall call("minfer::rms_norm_quantized", x, weight, eps, weight_offset, kernel);
  RowQuant const mode = parse_quant(call.op, quant);
  check_scale(call.op, mode, scale, {"x", x});
  call.check_norm(norm, weight);
  return run_quantized(&call, mode, scale, norm, OnDevice(call.op, x));
}

Tensor add_rms_norm(Tensor const& x, Tensor const& residual, OptionalTensor const& weight, double eps, double weight_offset,
                    OptionalText const& kernel) {
  RmsNormCall call("minfer::add_rms_norm", x, weight, eps, weight_offset, kernel);
  call.add(residual, weight);
  return run_to_new(&call, OnDevice(call.op, x), x.scalar_type());
}

std::tuple<Tensor, Tensor> add_rms_norm_quantized(Tensor const& x, Tensor const& residual, std::string const& quant,
                                                  OptionalTensor const& weight, double eps, double weight_offset,
                                                  OptionalTensor const& scale, OptionalTensor const& norm, OptionalText const& kernel) {
  RmsNormCall call("minfer::add_rms_norm_quantized", x, weight, eps, weight_offset, kernel);
  call.add(residual, weight);
  RowQuant const mode = parse_quant(call.op, quant);
  check_scale(call.op, mode, scale, {"x", x});
  call.check_norm(norm, weight);
  return run_quantized(&call, mode, scale, norm, OnDevice(call.op, x));
}

struct LayerNormCall : RowCall {
  LayerNormCall(Tensor const& x, OptionalTensor const& weights, OptionalTensor const& biases, double eps, OptionalText const& kernel)
      : RowCall("minfer::layer_norm", RowOperation::kLayerNorm, (check_rows("minfer::layer_norm", x, false), x), kernel) {
    check_factors(op, "weight", weights, problem.width, {"x", x});
    check_factors(op, "bias", biases, problem.width, {"x", x});
    operands.eps = eps_in_float32(op, eps);
    set_factors(weights, biases);
  }
};

Tensor layer_norm(Tensor const& x, OptionalTensor const& weight, OptionalTensor const& bias, double eps, OptionalText const& kernel) {
  LayerNormCall call(x, weight, bias, eps, kernel);
  return run_to_new(&call, OnDevice(call.op, x), x.scalar_type());
}

Tensor layer_norm_out(Tensor const& x, OptionalTensor const& weight, OptionalTensor const& bias, double eps, OptionalText const& kernel,
                      Tensor const& out) {
  LayerNormCall call(x, weight, bias, eps, kernel);
  check_out(call.op, out, x.sizes(), x.scalar_type(), {"x", x});
  if (!is_same_view(out, x)) check_no_overlap(call.op, out, "x", x);
  if (weight) check_no_overlap(call.op, out, "weight", *weight);
  if (bias) check_no_overlap(call.op, out, "bias", *bias);
  run_into(&call, out, OnDevice(call.op, x));
  return out;
}

// ---- softmax -------------------------------------------------------------------------------------------------------------------------

struct SoftmaxCall : RowCall {
  SoftmaxCall(char const* op, Tensor const& x, bool logarithm, OptionalText const& kernel)
      : RowCall(op, RowOperation::kSoftmax, (check_rows(op, x, true), x), kernel) {
    operands.logarithm = logarithm;
  }
};

template <bool kLogarithm>
constexpr char const* kSoftmaxName = kLogarithm ? "minfer::log_softmax" : "minfer::softmax";

template <bool kLogarithm>
Tensor softmax(Tensor const& x, OptionalText const& kernel) {
  SoftmaxCall call(kSoftmaxName<kLogarithm>, x, kLogarithm, kernel);
  return run_to_new(&call, OnDevice(call.op, x), x.scalar_type());
}

template <bool kLogarithm>
Tensor softmax_out(Tensor const& x, OptionalText const& kernel, Tensor const& out) {
  SoftmaxCall call(kSoftmaxName<kLogarithm>, x, kLogarithm, kernel);
  check_out(call.op, out, x.sizes(), x.scalar_type(), {"x", x});
  if (!is_same_view(out, x)) check_no_overlap(call.op, out, "x", x);
  run_into(&call, out, OnDevice(call.op, x));
  return out;
}

// ---- activation ----------------------------------------------------------------------------------------------------------------------

struct ActivationCall : RowCall {
  ActivationCall(Tensor const& x, std::string const& activation, OptionalTensor const& biases, OptionalText const& kernel)
      : RowCall("minfer::activation", RowOperation::kActivation, (check_rows("minfer::activation", x, true), x), kernel) {
    operands.activation = parse_activation(op, activation);
    check_factors(op, "bias", biases, problem.width, {"x", x});
    set_factors(std::nullopt, biases);
  }
};

Tensor activation(Tensor const& x, std::string const& activation, OptionalTensor const& bias, OptionalText const& kernel) {
  ActivationCall call(x, activation, bias, kernel);
  return run_to_new(&call, OnDevice(call.op, x), x.scalar_type());
}

Tensor activation_out(Tensor const& x, std::string const& activation, OptionalTensor const& bias, OptionalText const& kernel,
                      Tensor const& out) {
  ActivationCall call(x, activation, bias, kernel);
  check_out(call.op, out, x.sizes(), x.scalar_type(), {"x", x});
  if (!is_same_view(out, x)) check_no_overlap(call.op, out, "x", x);
  if (bias) check_no_overlap(call.op, out, "bias", *bias);
  run_into(&call, out, OnDevice(call.op, x));
  return out;
}

struct GatedCall : RowCall {
  GatedCall(char const* op, Tensor const& x, std::string const& activation, std::string const& gate_layout, OptionalText const& kernel)
      : RowCall(op, RowOperation::kGatedActivation, (check_rows(op, x, false), x), kernel) {
    GateActivation const gate = parse_gate_activation(op, activation);
    operands.activation = gate.activation;
    operands.sigmoid_slope = gate.silu_scale;
    operands.gate_max = gate.gate_max;
    operands.up_max = gate.up_max;
    operands.up_shift = gate.up_shift;
    operands.gate_layout = parse_gate_layout(op, gate_layout);
    int64_t const multiple = operands.gate_layout == GateLayout::kBlocks ? 16 : 2;
    if (problem.width % multiple != 0) fail(op, ": x must have a multiple of ", multiple, " columns, gate and up, got ", x);
    problem.width /= 2;
  }
};

Tensor gated_activation(Tensor const& x, std::string const& activation, std::string const& gate_layout, OptionalText const& kernel) {
  GatedCall call("minfer::gated_activation", x, activation, gate_layout, kernel);
  return run_to_new(&call, OnDevice(call.op, x), x.scalar_type());
}

Tensor gated_activation_out(Tensor const& x, std::string const& activation, std::string const& gate_layout, OptionalText const& kernel,
                            Tensor const& out) {
  GatedCall call("minfer::gated_activation", x, activation, gate_layout, kernel);
  check_out(call.op, out, call.shape(), x.scalar_type(), {"x", x});
  check_no_overlap(call.op, out, "x", x);
  run_into(&call, out, OnDevice(call.op, x));
  return out;
}

std::tuple<Tensor, Tensor> gated_activation_quantized(Tensor const& x, std::string const& quant, std::string const& activation,
                                                      std::string const& gate_layout, OptionalTensor const& scale,
                                                      OptionalText const& kernel) {
  GatedCall call("minfer::gated_activation_quantized", x, activation, gate_layout, kernel);
  RowQuant const mode = parse_quant(call.op, quant);
  check_scale(call.op, mode, scale, {"x", x});
  return run_quantized(&call, mode, scale, std::nullopt, OnDevice(call.op, x));
}

// ---- quantisation --------------------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> quantize(Tensor const& x, std::string const& quant, OptionalTensor const& scale, OptionalText const& kernel) {
  char const* op = "minfer::quantize";
  check_rows(op, x, false);
  RowCall call(op, RowOperation::kQuantize, x, kernel);
  RowQuant const mode = parse_quant(op, quant);
  check_scale(op, mode, scale, {"x", x});
  return run_quantized(&call, mode, scale, std::nullopt, OnDevice(op, x));
}

Tensor dequantize(Tensor const& q, Tensor const& scales, std::string const& quant, ScalarType dtype) {
  char const* op = "minfer::dequantize";
  RowQuant const mode = parse_quant(op, quant);
  bool const int8 = mode == RowQuant::kInt8Token;
  if (q.scalar_type() != (int8 ? ScalarType::Char : ScalarType::Float8_e4m3fn)) {
    fail(op, ": q must be ", int8 ? "int8" : "float8_e4m3fn", " for ", quant, ", got ", q.scalar_type());
  }
  if (q.dim() < 1) fail(op, ": q must have at least one mode, got ", q);
  if (!is_row_type(dtype, true)) fail(op, ": dtype must be float16, bfloat16 or float32, got ", dtype);
  Dequantize d;
  d.quant = mode;
  d.type = data_type(dtype);
  d.width = q.size(q.dim() - 1);
  d.rows = 1;
  for (int64_t i = 0; i + 1 < q.dim(); ++i) d.rows *= q.size(i);
  int64_t const blocks = (d.width + kQuantBlock - 1) / kQuantBlock;
  ShapeArray token_shape(q.sizes());
  token_shape.back() = 1;
  int64_t const block_shape[] = {d.rows, blocks}, tensor_shape[] = {1};
  Shape shape = token_shape;
  if (mode == RowQuant::kFp8Tensor) shape = Shape(tensor_shape, 1);
  if (mode == RowQuant::kFp8Block128) shape = Shape(block_shape, 2);
  check_operand(op, "scales", scales, ScalarType::Float, shape, {"q", q});
  OnDevice const on(op, q);
  Tensor const out = allocate(op, q, q.sizes(), dtype, "the numbers of q ", q);
  Tensor const codes = contiguous(op, "q", q);
  Tensor const factors = mode == RowQuant::kFp8Block128 ? scales : contiguous(op, "scales", scales);
  d.q = codes.data_ptr();
  d.scales = static_cast<float const*>(factors.data_ptr());
  d.y = out.data_ptr();
  if (mode == RowQuant::kFp8Block128) {
    d.scales_row_stride = factors.stride(0);
    d.scales_block_stride = factors.stride(1);
  } else if (mode != RowQuant::kFp8Tensor) {
    d.scales_row_stride = 1;
  }
  Status const status = minfer::dequantize(d, on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": q ", q, ": ", status.message);
  return out;
}

// ---- rotary embedding ----------------------------------------------------------------------------------------------------------------

Rope::Heads heads_of(Tensor const& x) { return {x.data_ptr(), x.size(1), x.stride(0), x.stride(1)}; }

void check_heads(char const* op, char const* name, Tensor const& x) {
  if (x.dim() != 3) fail(op, ": ", name, " must be [tokens, heads, head_dim], got ", x);
  if (!is_16bit_float(x.scalar_type())) fail(op, ": ", name, " must be float16 or bfloat16, got ", x.scalar_type());
  if (x.size(2) > 1 && x.stride(2) != 1) {
    fail(op, ": ", name, " must be contiguous along head_dim, got strides ", Listed{x.strides()});
  }
  check_apart(op, x, name);
}

void rope(Tensor const& q, OptionalTensor const& k, Tensor const& cos_sin, Tensor const& positions, bool interleaved,
          std::optional<int64_t> rotary_dim) {
  char const* op = "minfer::rope";
  check_heads(op, "q", q);
  NamedTensor const reference{"q", q};
  int64_t const tokens = q.size(0), head_dim = q.size(2);
  if (k) {
    check_heads(op, "k", *k);
    if (k->scalar_type() != q.scalar_type()) fail(op, ": k must have q's dtype ", q.scalar_type(), ", got ", k->scalar_type());
    if (k->size(0) != tokens || k->size(2) != head_dim) {
      fail(op, ": k must be [tokens = ", tokens, ", heads_kv, head_dim = ", head_dim, "], got ", *k);
    }
    check_same_device(op, "k", *k, reference);
    check_no_overlap(op, q, "k", *k, "q");
  }
  RotaryTable const rotary = check_rotary_table(op, cos_sin, positions, rotary_dim, tokens, head_dim, reference);
  check_no_overlap(op, q, "cos_sin", cos_sin, "q");
  check_no_overlap(op, q, "positions", positions, "q");
  if (k) check_no_overlap(op, *k, "cos_sin", cos_sin, "k");
  if (k) check_no_overlap(op, *k, "positions", positions, "k");
  OnDevice const on(op, q);
  Tensor const table = contiguous(op, "cos_sin", cos_sin), places = contiguous(op, "positions", positions);
  Rope r;
  r.type = data_type(q.scalar_type());
  r.q = heads_of(q);
  if (k) r.k = heads_of(*k);
  r.tokens = tokens;
  r.rotary_dim = rotary.rotary_dim;
  r.cos_sin = static_cast<float const*>(table.data_ptr());
  r.length = rotary.length;
  r.positions = places.data_ptr();
  r.positions_64bit = rotary.positions_64bit;
  r.interleaved = interleaved;
  Status const status = rotate(r, on.properties(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": q ", q, ": ", status.message);
}

// ---- embedding -----------------------------------------------------------------------------------------------------------------------

struct EmbeddingCall {
  char const* op = "minfer::embedding";
  Embedding embedding{};
  Tensor const &ids, &weight;
  ShapeArray shape;

  EmbeddingCall(Tensor const& ids, Tensor const& weight, std::optional<double> scale)
      : ids(ids), weight(weight), shape(size_t(ids.dim() + 1)) {
    if (!is_index(ids.scalar_type())) fail(op, ": ids must be int64 or int32, got ", ids.scalar_type());
    if (weight.dim() != 2) fail(op, ": weight must be [vocabulary, width], got ", weight);
    if (!is_row_type(weight.scalar_type(), true)) {
      fail(op, ": weight must be float16, bfloat16 or float32, got ", weight.scalar_type());
    }
    check_same_device(op, "ids", ids, {"weight", weight});
    embedding.scaled = scale.has_value();
    embedding.scale = in_float32(op, "scale", scale.value_or(1.0));
    std::copy_n(ids.sizes().begin(), ids.dim(), shape.data());
    shape.back() = weight.size(1);
    embedding.type = data_type(weight.scalar_type());
    embedding.ids_64bit = ids.scalar_type() == ScalarType::Long;
    embedding.count = ids.numel();
    embedding.vocabulary = weight.size(0);
    embedding.width = weight.size(1);
  }

  void run(Tensor const& out, OnDevice const& on) {
    RowModes const modes(out);
    bool const direct = modes.walks && modes.inner == 1;
    Tensor const to = direct ? out : allocate(op, out, out.sizes(), out.scalar_type(), "a contiguous out");
    Tensor const held_ids = contiguous(op, "ids", ids), rows = unit_rows(op, "weight", weight);
    embedding.ids = held_ids.data_ptr();
    embedding.weight = rows.data_ptr();
    embedding.weight_stride = leading(rows);
    embedding.out = to.data_ptr();
    embedding.out_stride = direct ? modes.outer_stride : embedding.width;
    Status const status = embed(embedding, on.programmatic(), on.stream());
    if (!status.ok()) fail(op, ": ids ", ids, ", weight ", weight, ": ", status.message);
    if (!direct) copy_into(op, "out", out, to);
  }
};

Tensor embedding(Tensor const& ids, Tensor const& weight, std::optional<double> scale) {
  EmbeddingCall call(ids, weight, scale);
  OnDevice const on(call.op, weight);
  Tensor const out = allocate(call.op, weight, call.shape, weight.scalar_type(), "the output of ids ", ids, " and weight ", weight);
  call.run(out, on);
  return out;
}

Tensor embedding_out(Tensor const& ids, Tensor const& weight, std::optional<double> scale, Tensor const& out) {
  EmbeddingCall call(ids, weight, scale);
  check_out(call.op, out, call.shape, weight.scalar_type(), {"weight", weight});
  check_no_overlap(call.op, out, "ids", ids);
  check_no_overlap(call.op, out, "weight", weight);
  call.run(out, OnDevice(call.op, weight));
  return out;
}

// ---- Hadamard transform --------------------------------------------------------------------------------------------------------------

struct HadamardCall {
  char const* op = "minfer::hadamard";
  Hadamard hadamard{};
  Tensor const& x;

  HadamardCall(Tensor const& x, int64_t block, bool transpose) : x(x) {
    check_rows(op, x, true);
    HadamardShape shape;
    if (!find_hadamard_shape(block, &shape)) {
      fail(op, ": block must be a power of two, or 12, 20 or 28 times one, up to ", kMostHadamardBlock, ", got ", block);
    }
    hadamard.width = x.size(x.dim() - 1);
    if (hadamard.width % block != 0) fail(op, ": x must have whole blocks of ", block, " columns, got ", x);
    hadamard.type = data_type(x.scalar_type());
    hadamard.block = block;
    hadamard.transpose = transpose;
  }

  void run(Tensor const& out, OnDevice const& on) {
    if (x.numel() == 0) return;
    RowWalk walk(op, "x", x);
    hadamard.y = walk.write("out", out, false);
    hadamard.x = walk.x();
    hadamard.rows = walk.rows();
    hadamard.inner = walk.inner();
    Status const status = transform(hadamard, on.properties(), on.programmatic(), on.stream());
    if (!status.ok()) fail(op, ": x ", x, ": ", status.message);
    walk.store();
  }
};

Tensor hadamard(Tensor const& x, int64_t block, bool transpose) {
  HadamardCall call(x, block, transpose);
  OnDevice const on(call.op, x);
  Tensor const out = allocate(call.op, x, x.sizes(), x.scalar_type(), "the output of x ", x);
  call.run(out, on);
  return out;
}

Tensor hadamard_out(Tensor const& x, int64_t block, bool transpose, Tensor const& out) {
  HadamardCall call(x, block, transpose);
  check_out(call.op, out, x.sizes(), x.scalar_type(), {"x", x});
  if (!is_same_view(out, x)) check_no_overlap(call.op, out, "x", x);
  call.run(out, OnDevice(call.op, x));
  return out;
}

constexpr Operator kOperators[] = {
    {"rms_norm(Tensor x, Tensor? weight=None, float eps=1e-06, *, float weight_offset=0.0, str? kernel=None) -> Tensor", boxed<&rms_norm>,
     boxed<&rms_norm_out>},
    {"rms_norm_quantized(Tensor x, str quant, Tensor? weight=None, float eps=1e-06, *, float weight_offset=0.0, Tensor? scale=None, "
     "Tensor(a!)? norm=None, str? kernel=None) -> (Tensor q, Tensor scales)",
     boxed<&rms_norm_quantized>},
    {"add_rms_norm(Tensor x, Tensor(a!) residual, Tensor? weight=None, float eps=1e-06, *, float weight_offset=0.0, str? kernel=None) "
     "-> Tensor",
     boxed<&add_rms_norm>},
    {"add_rms_norm_quantized(Tensor x, Tensor(a!) residual, str quant, Tensor? weight=None, float eps=1e-06, *, float weight_offset=0.0, "
     "Tensor? scale=None, Tensor(b!)? norm=None, str? kernel=None) -> (Tensor q, Tensor scales)",
     boxed<&add_rms_norm_quantized>},
    {"layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, *, str? kernel=None) -> Tensor", boxed<&layer_norm>,
     boxed<&layer_norm_out>},
    {"softmax(Tensor x, *, str? kernel=None) -> Tensor", boxed<&softmax<false>>, boxed<&softmax_out<false>>},
    {"log_softmax(Tensor x, *, str? kernel=None) -> Tensor", boxed<&softmax<true>>, boxed<&softmax_out<true>>},
    {"activation(Tensor x, str activation, *, Tensor? bias=None, str? kernel=None) -> Tensor", boxed<&activation>, boxed<&activation_out>},
    {"gated_activation(Tensor x, str activation='silu', *, str gate_layout='halves', str? kernel=None) -> Tensor", boxed<&gated_activation>,
     boxed<&gated_activation_out>},
    {"gated_activation_quantized(Tensor x, str quant, str activation='silu', *, str gate_layout='halves', Tensor? scale=None, "
     "str? kernel=None) -> (Tensor q, Tensor scales)",
     boxed<&gated_activation_quantized>},
    // 8-bit codes and float32 scales of 16-bit numbers, and back.
    {"quantize(Tensor x, str quant, *, Tensor? scale=None, str? kernel=None) -> (Tensor q, Tensor scales)", boxed<&quantize>},
    {"dequantize(Tensor q, Tensor scales, str quant, *, ScalarType dtype) -> Tensor", boxed<&dequantize>},
    {"rope(Tensor(a!) q, Tensor(b!)? k, Tensor cos_sin, Tensor positions, *, bool interleaved=False, int? rotary_dim=None) -> ()",
     boxed<&rope>},
    {"hadamard(Tensor x, int block, *, bool transpose=False) -> Tensor", boxed<&hadamard>, boxed<&hadamard_out>},
    {"embedding(Tensor ids, Tensor weight, *, float? scale=None) -> Tensor", boxed<&embedding>, boxed<&embedding_out>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

OptionalText const kAnyKernel;

}  // namespace

int64_t Norm::rows() const { return RowCall(op, RowOperation::kRmsNorm, x, kAnyKernel).rows(); }

Norm check_norm(char const* op, Tensor const& x, OptionalTensor const& weight, double eps, double weight_offset,
                OptionalTensor const& residual) {
  RmsNormCall call(op, x, weight, eps, weight_offset, kAnyKernel, "norm_weight");
  if (residual) call.add(*residual, weight, "norm_weight");
  return {op, x, weight, residual, call.operands.eps, call.operands.weight_offset};
}

void check_apart_from_residual(Norm const& norm, char const* name, OptionalTensor const& other) {
  if (norm.residual && other) check_no_overlap(norm.op, *norm.residual, name, *other, "residual");
}

std::tuple<Tensor, Tensor> quantize_rows(char const* op, Tensor const& x, RowQuant quant, OnDevice const& on) {
  RowCall call(op, RowOperation::kQuantize, x, kAnyKernel);
  return run_quantized(&call, quant, std::nullopt, std::nullopt, on);
}

namespace {

RowCall call_of(Norm const& norm) {
  RowCall call(norm.op, RowOperation::kRmsNorm, norm.x, kAnyKernel);
  call.operands.eps = norm.eps;
  call.operands.weight_offset = norm.weight_offset;
  call.set_factors(norm.weight, std::nullopt);
  if (norm.residual) call.residual = *norm.residual;
  return call;
}

}  // namespace

void normalize(Norm const& norm, Tensor const& to, OnDevice const& on) {
  RowCall call = call_of(norm);
  run_into(&call, to, on);
}

std::tuple<Tensor, Tensor> normalize(Norm const& norm, RowQuant quant, OnDevice const& on) {
  RowCall call = call_of(norm);
  return run_quantized(&call, quant, std::nullopt, std::nullopt, on);
}

}  // namespace minfer::torch_binding
