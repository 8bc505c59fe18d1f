// GEMMs of many experts at once of 8-bit operands with scales, e4m3 and int8, and a layer of such experts; on CUDA tensors.
#include <algorithm>
#include <tuple>

#include "core/operators.h"
#include "core/torch_calls.h"
#include "fused.h"
#include "grouped_problem.h"
#include "moe_layer.h"

namespace minfer::torch_binding {

namespace {

constexpr int64_t kBlock = 128;               // of k, and of a weight's rows, to a scale
constexpr int64_t kGroups[] = {128, 64, 32};  // of k, to a scale of a row

int64_t blocks_of(int64_t extent) { return (extent + kBlock - 1) / kBlock; }

/// The largest number of k that so many scales of a row are of, or 0.
int32_t group_of_scales(int64_t k, int64_t scales) {
  for (int64_t group : kGroups) {
    if ((k + group - 1) / group == scales) return int32_t(group);
  }
  return 0;
}

/// The names of an operator's arguments and their types.
struct Names {
  char const *op, *a, *b, *a_scale, *b_scale;
};

/// Float32, or of blocks bytes that are exponents of two.
void check_scale_type(Names const& names, char const* name, Tensor const& scale, bool blocks, bool fp8, OperandScales* s) {
  if (scale.scalar_type() == ScalarType::Byte && blocks && fp8) {
    s->exponents = true;
  } else if (scale.scalar_type() != ScalarType::Float) {
    fail(names.op, ": ", name, " must be Float", fp8 ? " (of blocks also Byte, exponents of two)" : "", ", got ", scale.scalar_type());
  }
}

/// Scales of the rows of a: rows are [rows] or, masked, [experts, max_rows].
void set_row_scale(GroupedCall* call, Names const& names, Tensor const& scale, Shape rows, Tensor const& a) {
  check_same_device(names.op, names.a_scale, scale, {names.a, a});
  GroupedProblem& p = call->problem;
  GroupedOperands& o = call->operands;
  bool const fp8 = p.type == DataType::kE4M3;
  int64_t const modes = int64_t(rows.size());
  bool const has_columns = scale.dim() == modes + 1;
  bool of_rows = scale.dim() == modes || has_columns;
  for (int64_t i = 0; of_rows && i < modes; ++i) of_rows = scale.size(i) == rows[size_t(i)];
  int64_t const columns = has_columns ? scale.size(modes) : 1;
  // One column of floats is a number for each row; exponents are of blocks.
  bool const may_be_blocks = of_rows && has_columns && (columns != 1 || scale.scalar_type() == ScalarType::Byte);
  int32_t const group = may_be_blocks ? group_of_scales(p.k, columns) : 0;
  bool const blocks = group > 0, one = scale.numel() == 1 && scale.dim() <= modes + 1;
  if (!one && !blocks && !(of_rows && columns == 1)) {
    fail(names.op, ": ", names.a_scale, " must be one number, ", Listed{rows}, " or [.., 1], or [.., ", blocks_of(p.k),
         "] of 128 of k each (or of 64, or of 32), got ", scale);
  }
  o.a_scale = OperandScales{};
  check_scale_type(names, names.a_scale, scale, blocks, fp8, &o.a_scale);
  if (blocks && p.k == 0) return;  // none
  o.a_scale.blocks = blocks;
  p.a_group = group;
  o.a_scale.data = call->held.keep(scale);
  if (one) return;  // strides of 0
  o.a_scale.row_stride = scale.stride(modes - 1);
  o.a_scale.k_stride = blocks ? scale.stride(modes) : 0;
  o.a_scale_expert_stride = modes > 1 ? scale.stride(0) : 0;
}

/// Scales of the experts' weights, of n rows each.
void set_weight_scale(GroupedCall* call, Names const& names, Tensor const& scale, Tensor const& a) {
  check_same_device(names.op, names.b_scale, scale, {names.a, a});
  GroupedProblem& p = call->problem;
  GroupedOperands& o = call->operands;
  bool const fp8 = p.type == DataType::kE4M3;
  int64_t const half_blocks = blocks_of(p.gated ? p.n / 2 : p.n), rows = p.gated ? 2 * half_blocks : half_blocks;
  int64_t const dim = scale.dim();
  bool const one = scale.numel() == 1 && dim <= 1;
  bool const experts = dim >= 1 && scale.size(0) == p.experts;
  bool const of_expert = experts && (dim == 1 || (dim == 2 && scale.size(1) == 1));
  bool const of_rows = experts && ((dim == 2 && scale.size(1) == p.n) || (dim == 3 && scale.size(1) == p.n && scale.size(2) == 1));
  bool const blocks = fp8 && experts && dim == 3 && scale.size(1) == rows && scale.size(2) == blocks_of(p.k) && !of_rows;
  if (!one && !of_expert && !of_rows && !blocks) {
    if (fp8) {
      fail(names.op, ": ", names.b_scale, " must be one number, [", p.experts, "], [", p.experts, ", ", p.n, "] or, of blocks, [",
           p.experts, ", ", rows, ", ", blocks_of(p.k), "], got ", scale);
    }
    fail(names.op, ": ", names.b_scale, " must be one number, [", p.experts, "] or [", p.experts, ", ", p.n, "], got ", scale);
  }
  o.b_scale = OperandScales{};
  check_scale_type(names, names.b_scale, scale, blocks, fp8, &o.b_scale);
  if (blocks && p.k == 0) return;
  o.b_scale.data = call->held.keep(scale);
  if (one) return;
  o.b_scale_expert_stride = scale.stride(0);
  if (of_rows && !of_expert) o.b_scale.row_stride = scale.stride(1);
  if (!blocks) return;
  p.b_blocks = o.b_scale.blocks = true;
  o.b_scale.row_stride = scale.stride(1);
  o.b_scale.k_stride = scale.stride(2);
  o.b_scale.halves = p.gated;
  o.b_scale.up_offset = p.gated ? half_blocks * scale.stride(1) : 0;
}

/// A weight [experts, n, k], or with `transposed` [experts, k, n], copied where TMA cannot address its rows.
void set_codes(GroupedCall* call, char const* name, Tensor const& weight, bool transposed) {
  GroupedProblem& p = call->problem;
  int64_t const n_mode = transposed ? 2 : 1, k_mode = transposed ? 1 : 2;
  bool const usable = (weight.stride(k_mode) == 1 || p.k <= 1) && weight.is_aligned(16) &&
                      (p.n <= 1 || (weight.stride(n_mode) >= p.k && weight.stride(n_mode) % 16 == 0)) &&
                      (p.experts <= 1 || (weight.stride(0) > 0 && weight.stride(0) % 16 == 0));
  if (usable || p.k == 0) {
    set_weight(call, name, weight, transposed);
    if (p.k == 0) p.b_alignment = 16;
    return;
  }
  int64_t const row = round_up(p.k, 16);
  int64_t strides[3] = {p.n * row, 0, 0};
  strides[n_mode] = row;
  strides[k_mode] = 1;
  set_weight(call, name, copy_with_strides(call->op, name, weight, strides, p.experts * p.n * row), transposed);
}

/// Gates and ups of a number that is no multiple of 8 get rows of zeros behind them, as kernels take 8 of each at a time: copies of the
/// weight, its rows' scales and the bias, of which d is then wider. Outputs of such rows are 0.
struct PaddedGates {
  int64_t half, padded;

  explicit PaddedGates(GroupedProblem const& p) : half(p.n / 2), padded(round_up(half, 8)) {}
  bool needed(GroupedProblem const& p) const { return p.gated && half != padded; }

  /// x is [experts, n, k], or [experts, n] with k = 1, of these strides; the copy is [experts, 2, padded, row].
  Tensor copy(char const* op, char const* name, Tensor const& x, int64_t experts, int64_t k, int64_t row, Shape strides,
              GateLayout layout) const {
    bool const alternating = layout == GateLayout::kAlternating;
    Tensor const to = allocate(op, x, {experts, 2, padded, row}, x.scalar_type(), "a padded copy of ", name, " ", x);
    fill_with_zeros(op, name, to);
    int64_t const line = strides[1];
    Tensor const from = view_of(op, name, x, {experts, 2, half, k},
                                {strides[0], alternating ? line : half * line, alternating ? 2 * line : line, strides[2]});
    copy_into(op, name, view_of(op, name, to, {experts, 2, half, k}, {2 * padded * row, padded * row, row, 1}), from);
    return to;
  }
};

/// The weight with such rows, and what belongs to them.
void set_padded_weight(GroupedCall* call, char const* name, Tensor const& weight, bool transposed, char const* scale_name,
                       Tensor const& scale, char const* bias_name, std::optional<Tensor> const& bias) {
  GroupedProblem& p = call->problem;
  GroupedOperands& o = call->operands;
  char const* op = call->op;
  PaddedGates const gates(p);
  int64_t const n_mode = transposed ? 2 : 1, k_mode = transposed ? 1 : 2, row = round_up(std::max<int64_t>(p.k, 1), 16),
                experts = p.experts;
  Tensor const padded =
      gates.copy(op, name, weight, experts, p.k, row, {weight.stride(0), weight.stride(n_mode), weight.stride(k_mode)}, o.gate_layout);
  o.b = call->held.keep(padded);
  o.ldb = row;
  o.b_expert_stride = 2 * gates.padded * row;
  p.b_alignment = 16;
  if (!o.b_scale.blocks && o.b_scale.row_stride != 0) {
    Tensor const rows = gates.copy(op, scale_name, scale, experts, 1, 1, {o.b_scale_expert_stride, o.b_scale.row_stride, 1}, o.gate_layout);
    o.b_scale.data = call->held.keep(rows);
    o.b_scale.row_stride = 1;
    o.b_scale_expert_stride = 2 * gates.padded;
  }
  if (bias) {
    Tensor const rows = gates.copy(op, bias_name, *bias, experts, 1, 1, {bias->stride(0), bias->stride(1), 1}, o.gate_layout);
    o.bias = call->held.keep(rows);
    o.bias_stride = 2 * gates.padded;
  }
  o.gate_layout = GateLayout::kHalves;
  p.n = 2 * gates.padded;
}

bool is_8bit(ScalarType type) { return type == ScalarType::Float8_e4m3fn || type == ScalarType::Char; }

/// The type of d: bfloat16, float16, or of e4m3 products codes.
ScalarType output_type(char const* op, bool fp8, std::optional<ScalarType> out_dtype, std::optional<Tensor> const& out_scale,
                       Tensor const& a) {
  ScalarType const type = out_dtype.value_or(out_scale ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16);
  if (!is_16bit_float(type) && !(fp8 && type == ScalarType::Float8_e4m3fn)) {
    fail(op, ": out_dtype must be Half", fp8 ? ", BFloat16 or Float8_e4m3fn" : " or BFloat16", ", got ", type);
  }
  if (out_scale.has_value() != (type == ScalarType::Float8_e4m3fn)) {
    fail(op, ": out_scale must be given for a D of Float8_e4m3fn, and for no other, got out_dtype ", type);
  }
  if (out_scale) check_operand(op, "out_scale", *out_scale, ScalarType::Float, {1}, {"a", a});
  return type;
}

/// All arguments of a grouped product.
struct Arguments {
  Names names;
  ScalarType operands;
  Tensor const &a, &b, &a_scale, &b_scale, &offsets;
  bool masked;  // offsets are counts
  std::optional<Tensor> const &bias, &gather, &row_scale;
  std::string const& activation;
  bool gated;
  std::string const& gate_layout;
  std::optional<ScalarType> out_dtype;
  std::optional<Tensor> const& out_scale;
  bool fast_accum;
  std::optional<std::string> const& kernel;

  char const* offsets_name() const { return masked ? "counts" : "offsets"; }
};

std::optional<Tensor> const kNoTensor;

/// bias is of D's 16-bit type or float32; returns the 16-bit type of the call. Codes leave it to the bias.
ScalarType narrow_of(char const* op, char const* name, std::optional<Tensor> const& bias, ScalarType type, Shape shape,
                     NamedTensor const& a) {
  bool const codes = !is_16bit_float(type);
  ScalarType const own = bias && is_16bit_float(bias->scalar_type()) ? bias->scalar_type() : ScalarType::BFloat16;
  ScalarType const narrow = codes ? own : type;
  if (bias) {
    ScalarType const given = bias->scalar_type();
    if (given != narrow && given != ScalarType::Float) {
      fail(op, ": ", name, " must be ",
           codes                      ? "Half, BFloat16"
           : type == ScalarType::Half ? "Half"
                                      : "BFloat16",
           " or Float, got ", given);
    }
    check_operand(op, name, *bias, given, shape, a);
  }
  return narrow;
}

bool is_float32(std::optional<Tensor> const& bias) { return bias && bias->scalar_type() == ScalarType::Float; }

/// What the checks of a call find.
struct Checked {
  ScalarType type, narrow;  // of d; its 16-bit type, where d holds codes that of bias
  int64_t experts, rows, max_rows, n;
  int64_t columns(bool gated) const { return gated ? n / 2 : n; }
};

/// Checks everything but a given output.
Checked check(Arguments const& x) {
  char const* op = x.names.op;
  bool const fp8 = x.operands == ScalarType::Float8_e4m3fn;
  NamedTensor const reference{"a", x.a};
  Checked c{};
  if (x.masked) {
    check_slabs(op, x.a, x.b);
    c.max_rows = x.a.size(1);
    c.rows = x.a.size(0) * c.max_rows;
  } else {
    c.rows = grouped_rows(op, x.a, x.gather);
    if (x.gather) check_operand(op, "gather", *x.gather, ScalarType::Int, {c.rows}, reference);
  }
  if (x.a.scalar_type() != x.operands) fail(op, ": a must be ", x.operands, ", got ", x.a.scalar_type());
  c.n = check_experts_of(op, x.a, x.b);
  c.experts = x.b.size(0);
  check_gate(op, "b", "columns", c.n, x.activation, x.gated, x.gate_layout);
  c.type = output_type(op, fp8, x.out_dtype, x.out_scale, x.a);
  c.narrow = narrow_of(op, "bias", x.bias, c.type, {c.experts, c.n}, reference);
  if (x.row_scale) {
    if (x.masked) {
      check_operand(op, "row_scale", *x.row_scale, ScalarType::Float, {c.experts, c.max_rows}, reference);
    } else {
      check_operand(op, "row_scale", *x.row_scale, ScalarType::Float, {c.rows}, reference);
    }
  }
  check_offsets(op, x.offsets_name(), x.offsets, c.experts, reference);
  return c;
}

/// Codes whose rows, one after the other, TMA can address: [rows, k], or slabs [experts, max_rows, k].
void set_code_rows(GroupedCall* call, Tensor const& a) {
  GroupedProblem& p = call->problem;
  if (p.k == 0) {
    set_rows(call, a.data_ptr(), a.dim() == 3 ? a.size(0) * a.size(1) : a.size(0), 16);
    p.a_alignment = 16;
    return;
  }
  if (a.dim() == 2) {
    set_rows(call, "a", aligned_rows(call->op, "a", a));
    return;
  }
  int64_t const experts = a.size(0), max_rows = a.size(1), all = experts * max_rows;
  int64_t const row = a.stride(max_rows > 1 ? 1 : 0);
  bool const walks = (a.stride(2) == 1 || p.k <= 1) && a.is_aligned(16) && (all <= 1 || (row > 0 && row % 16 == 0)) &&
                     (experts <= 1 || max_rows <= 1 || a.stride(0) == max_rows * a.stride(1));
  int64_t const padded = round_up(p.k, 16);
  Tensor const rows = walks ? a : copy_with_strides(call->op, "a", a, {max_rows * padded, padded, 1}, all * padded);
  set_rows(call, call->held.keep(rows), all, all > 1 ? rows.stride(max_rows > 1 ? 1 : 0) : padded);
}

GroupedCall described(Arguments const& x, Checked const& c) {
  char const* op = x.names.op;
  GroupedCall call{op};
  GroupedProblem& p = call.problem;
  p.rows = c.rows;
  p.experts = c.experts;
  p.n = c.n;
  p.k = x.a.size(x.a.dim() - 1);
  p.type = data_type(x.operands);
  p.d_type = data_type(c.narrow);
  p.gated = x.gated;
  p.max_rows = c.max_rows;
  p.fast_accum = x.fast_accum;
  GroupedOperands& o = call.operands;
  set_activation(&call, x.activation, x.gate_layout);
  set_bias(&call, "bias", x.bias);
  o.bias_f32 = is_float32(x.bias);
  if (x.gather) {
    p.gathered = true;
    o.gather = static_cast<int32_t const*>(call.held.keep(contiguous(op, "gather", *x.gather)));
  }
  if (x.row_scale) o.row_scale = static_cast<float const*>(call.held.keep(contiguous(op, "row_scale", *x.row_scale)));
  o.offsets = static_cast<int32_t const*>(call.held.keep(contiguous(op, x.offsets_name(), x.offsets)));
  p.d_fp8 = c.type == ScalarType::Float8_e4m3fn;
  if (p.d_fp8) o.d_scale = static_cast<float const*>(call.held.keep(contiguous(op, "out_scale", *x.out_scale)));
  if (x.masked) {
    set_row_scale(&call, x.names, x.a_scale, {c.experts, c.max_rows}, x.a);
  } else {
    set_row_scale(&call, x.names, x.a_scale, {x.a.size(0)}, x.a);
  }
  set_weight_scale(&call, x.names, x.b_scale, x.a);
  if (PaddedGates(p).needed(p)) {
    set_padded_weight(&call, "b", x.b, true, "b_scale", x.b_scale, "bias", x.bias);
  } else {
    set_codes(&call, "b", x.b, true);
  }
  set_code_rows(&call, x.a);
  return call;
}

/// Runs into `out`, whose rows are `row` elements apart. A wider d is a tensor of its own, of which out gets its columns; `keeps`: rows
/// that are not computed keep what out holds.
void run_to(Arguments const& x, Checked const& c, GroupedCall& call, Tensor const& out, int64_t row, bool keeps, OnDevice const& on) {
  int64_t const columns = c.columns(x.gated), wide = call.columns();
  if (columns == wide || c.rows == 0 || columns == 0) {
    launch(call, x.kernel, out, row, on);
    return;
  }
  char const* op = x.names.op;
  Tensor const d = allocate(op, out, {c.rows, wide}, c.type, "the output with padded gates of a ", x.a, " and b ", x.b);
  Tensor const inside = view_of(op, "the output", d, {c.rows, columns}, {wide, 1}),
               rows = view_of(op, "out", out, {c.rows, columns}, {row, 1});
  if (keeps) copy_into(op, "out", inside, rows);
  launch(call, x.kernel, d, wide, on);
  copy_into(op, "out", rows, inside);
}

Tensor into_new(Arguments const& x) {
  Checked const c = check(x);
  OnDevice const on(x.names.op, x.a);
  GroupedCall call = described(x, c);
  int64_t const columns = c.columns(x.gated);
  if (!x.masked) {
    Tensor const out = allocate(x.names.op, x.a, {c.rows, columns}, c.type, "the output of a ", x.a, " and b ", x.b);
    run_to(x, c, call, out, columns, false, on);
    return out;
  }
  Tensor const out = allocate(x.names.op, x.a, {c.experts, c.max_rows, columns}, c.type, "the output of a ", x.a, " and b ", x.b);
  fill_with_zeros(x.names.op, "the output", out);
  run_to(x, c, call, out, columns, true, on);
  return out;
}

Tensor into_given(Arguments x, Tensor const& out) {
  char const* op = x.names.op;
  if (!x.out_dtype) x.out_dtype = out.scalar_type();
  Checked const c = check(x);
  NamedTensor const reference{"a", x.a};
  int64_t const columns = c.columns(x.gated);
  int64_t row = columns;
  if (x.masked) {
    row = check_masked_out(op, out, c.type, c.experts, c.max_rows, columns, reference);
  } else {
    check_grouped_out(op, out, c.type, c.rows, columns, reference);
    row = out.size(0) > 1 ? out.stride(0) : unused_stride(columns, out.element_size());
  }
  auto const apart = [&](char const* name, std::optional<Tensor> const& other) {
    if (other) check_no_overlap(op, out, name, *other);
  };
  check_no_overlap(op, out, "b", x.b);
  check_no_overlap(op, out, "a_scale", x.a_scale);
  check_no_overlap(op, out, "b_scale", x.b_scale);
  check_no_overlap(op, out, x.offsets_name(), x.offsets);
  apart("bias", x.bias);
  apart("gather", x.gather);
  apart("row_scale", x.row_scale);
  apart("out_scale", x.out_scale);
  OnDevice const on(op, x.a);
  GroupedCall call = described(x, c);
  run_to(x, c, call, out, row, x.masked, on);
  return out;
}

constexpr Names names_of(char const* op) { return {op, "a", "b", "a_scale", "b_scale"}; }

#define MINFER_FP8_ARGUMENTS(op, offsets, masked, gather)                                                                         \
  Arguments {                                                                                                                     \
    names_of(op), ScalarType::Float8_e4m3fn, a, b, a_scale, b_scale, offsets, masked, bias, gather, row_scale, activation, gated, \
        gate_layout, out_dtype, out_scale, fast_accum, kernel                                                                     \
  }
#define MINFER_INT8_ARGUMENTS(op, offsets, masked, gather)                                                                            \
  Arguments {                                                                                                                         \
    names_of(op), ScalarType::Char, a, b, a_scale, b_scale, offsets, masked, bias, gather, row_scale, activation, gated, gate_layout, \
        out_dtype, kNoTensor, false, kernel                                                                                           \
  }

using OptionalTensor = std::optional<Tensor>;
using OptionalType = std::optional<ScalarType>;
using OptionalText = std::optional<std::string>;

Tensor grouped_gemm_fp8(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, Tensor const& offsets,
                        OptionalTensor const& bias, OptionalTensor const& gather, OptionalTensor const& row_scale,
                        std::string const& activation, bool gated, std::string const& gate_layout, OptionalType out_dtype,
                        OptionalTensor const& out_scale, bool fast_accum, OptionalText const& kernel) {
  return into_new(MINFER_FP8_ARGUMENTS("minfer::grouped_gemm_fp8", offsets, false, gather));
}
Tensor grouped_gemm_fp8_out(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, Tensor const& offsets,
                            OptionalTensor const& bias, OptionalTensor const& gather, OptionalTensor const& row_scale,
                            std::string const& activation, bool gated, std::string const& gate_layout, OptionalType out_dtype,
                            OptionalTensor const& out_scale, bool fast_accum, OptionalText const& kernel, Tensor const& out) {
  return into_given(MINFER_FP8_ARGUMENTS("minfer::grouped_gemm_fp8", offsets, false, gather), out);
}
Tensor grouped_gemm_fp8_masked(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, Tensor const& counts,
                               OptionalTensor const& bias, OptionalTensor const& row_scale, std::string const& activation, bool gated,
                               std::string const& gate_layout, OptionalType out_dtype, OptionalTensor const& out_scale, bool fast_accum,
                               OptionalText const& kernel) {
  return into_new(MINFER_FP8_ARGUMENTS("minfer::grouped_gemm_fp8_masked", counts, true, kNoTensor));
}
Tensor grouped_gemm_fp8_masked_out(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, Tensor const& counts,
                                   OptionalTensor const& bias, OptionalTensor const& row_scale, std::string const& activation, bool gated,
                                   std::string const& gate_layout, OptionalType out_dtype, OptionalTensor const& out_scale, bool fast_accum,
                                   OptionalText const& kernel, Tensor const& out) {
  return into_given(MINFER_FP8_ARGUMENTS("minfer::grouped_gemm_fp8_masked", counts, true, kNoTensor), out);
}
Tensor grouped_gemm_int8(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, Tensor const& offsets,
                         OptionalTensor const& bias, OptionalTensor const& gather, OptionalTensor const& row_scale,
                         std::string const& activation, bool gated, std::string const& gate_layout, OptionalType out_dtype,
                         OptionalText const& kernel) {
  return into_new(MINFER_INT8_ARGUMENTS("minfer::grouped_gemm_int8", offsets, false, gather));
}
Tensor grouped_gemm_int8_out(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, Tensor const& offsets,
                             OptionalTensor const& bias, OptionalTensor const& gather, OptionalTensor const& row_scale,
                             std::string const& activation, bool gated, std::string const& gate_layout, OptionalType out_dtype,
                             OptionalText const& kernel, Tensor const& out) {
  return into_given(MINFER_INT8_ARGUMENTS("minfer::grouped_gemm_int8", offsets, false, gather), out);
}
Tensor grouped_gemm_int8_masked(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, Tensor const& counts,
                                OptionalTensor const& bias, OptionalTensor const& row_scale, std::string const& activation, bool gated,
                                std::string const& gate_layout, OptionalType out_dtype, OptionalText const& kernel) {
  return into_new(MINFER_INT8_ARGUMENTS("minfer::grouped_gemm_int8_masked", counts, true, kNoTensor));
}
Tensor grouped_gemm_int8_masked_out(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, Tensor const& counts,
                                    OptionalTensor const& bias, OptionalTensor const& row_scale, std::string const& activation, bool gated,
                                    std::string const& gate_layout, OptionalType out_dtype, OptionalText const& kernel, Tensor const& out) {
  return into_given(MINFER_INT8_ARGUMENTS("minfer::grouped_gemm_int8_masked", counts, true, kNoTensor), out);
}
#undef MINFER_FP8_ARGUMENTS
#undef MINFER_INT8_ARGUMENTS

/// A layer of experts whose weights have the type `codes`.
Tensor run_scaled_layer(char const* op, ScalarType codes, Tensor const& x, Tensor const& w13, Tensor const& w2, Tensor const& w13_scale,
                        Tensor const& w2_scale, Tensor const& weights, Tensor const& ids, OptionalTensor const& x_scale,
                        std::string const& activation, OptionalTensor const& b13, OptionalTensor const& b2, std::string const& gate_layout,
                        OptionalType out_dtype, bool fast_accum) {
  bool const fp8 = codes == ScalarType::Float8_e4m3fn;
  if (x.dim() != 2) fail(op, ": x must be [tokens, hidden], got ", x);
  if (!is_16bit_float(x.scalar_type()) && x.scalar_type() != codes) {
    fail(op, ": x must be Half, BFloat16 or ", codes, ", got ", x.scalar_type());
  }
  if (x_scale.has_value() != is_8bit(x.scalar_type())) fail(op, ": x_scale must be given for an x of ", codes, ", and for no other");
  int64_t const tokens = x.size(0), hidden = x.size(1);
  if (w13.dim() != 3 || w13.size(1) % 2 != 0) fail(op, ": w13 must be [experts, 2 * inter, hidden], got ", w13);
  int64_t const experts = w13.size(0), n = w13.size(1);
  check_experts(op, "w13", w13, experts);
  NamedTensor const reference{"x", x};
  check_operand(op, "w13", w13, codes, {experts, n, hidden}, reference);
  check_operand(op, "w2", w2, codes, {experts, hidden, n / 2}, reference);
  LayerArguments const given{x, weights, ids, b13, b2, activation, gate_layout};
  check_routes(op, given);
  check_gate(op, "w13", "rows", n, activation, true, gate_layout);
  ScalarType const out = out_dtype.value_or(is_16bit_float(x.scalar_type()) ? x.scalar_type() : ScalarType::BFloat16);
  if (!is_16bit_float(out)) fail(op, ": out_dtype must be Half or BFloat16, got ", out);
  narrow_of(op, "b13", b13, out, {experts, n}, reference);
  narrow_of(op, "b2", b2, out, {experts, hidden}, reference);
  OnDevice const on(op, x);

  auto const product = [&](int64_t rows, int64_t k, bool gated) {
    GroupedCall call = layer_product(op, given, experts, rows, k, gated);
    GroupedProblem& p = call.problem;
    p.type = data_type(codes);
    p.d_type = data_type(out);
    p.d_groups = gated;
    p.fast_accum = fast_accum;
    call.operands.bias_f32 = is_float32(gated ? b13 : b2);
    return call;
  };
  GroupedCall up = product(n, hidden, true), down = product(hidden, n / 2, false);
  set_weight_scale(&up, {op, "x", "w13", "x_scale", "w13_scale"}, w13_scale, x);
  set_weight_scale(&down, {op, "x", "w2", "x_scale", "w2_scale"}, w2_scale, x);
  if (hidden == 0) return allocate(op, x, {tokens, hidden}, out, "the output of x ", x);
  Tensor q = x, q_scale;
  if (x_scale) {
    q_scale = *x_scale;
  } else {
    RowQuant const quant = !fp8 ? RowQuant::kInt8Token : up.problem.b_blocks ? RowQuant::kFp8Block128 : RowQuant::kFp8Token;
    std::tie(q, q_scale) = quantize_rows(op, x, quant, on);
  }
  set_row_scale(&up, {op, "x", "w13", "x_scale", "w13_scale"}, q_scale, {tokens}, x);
  if (PaddedGates(up.problem).needed(up.problem)) {
    set_padded_weight(&up, "w13", w13, false, "w13_scale", w13_scale, "b13", b13);
  } else {
    set_codes(&up, "w13", w13, false);
  }
  set_codes(&down, "w2", w2, false);
  LayerArguments const arguments{q, weights, ids, b13, b2, activation, gate_layout};
  return run_layer(op, arguments, up, down, out, on);
}

Tensor moe_ffn_fp8(Tensor const& x, Tensor const& w13, Tensor const& w2, Tensor const& w13_scale, Tensor const& w2_scale,
                   Tensor const& weights, Tensor const& ids, OptionalTensor const& x_scale, std::string const& activation,
                   OptionalTensor const& b13, OptionalTensor const& b2, std::string const& gate_layout, OptionalType out_dtype,
                   bool fast_accum) {
  return run_scaled_layer("minfer::moe_ffn_fp8", ScalarType::Float8_e4m3fn, x, w13, w2, w13_scale, w2_scale, weights, ids, x_scale,
                          activation, b13, b2, gate_layout, out_dtype, fast_accum);
}

Tensor moe_ffn_int8(Tensor const& x, Tensor const& w13, Tensor const& w2, Tensor const& w13_scale, Tensor const& w2_scale,
                    Tensor const& weights, Tensor const& ids, OptionalTensor const& x_scale, std::string const& activation,
                    OptionalTensor const& b13, OptionalTensor const& b2, std::string const& gate_layout, OptionalType out_dtype) {
  return run_scaled_layer("minfer::moe_ffn_int8", ScalarType::Char, x, w13, w2, w13_scale, w2_scale, weights, ids, x_scale, activation, b13,
                          b2, gate_layout, out_dtype, false);
}

constexpr Operator kOperators[] = {
    // grouped_gemm of a * a_scale and b * b_scale, e4m3
    {"grouped_gemm_fp8(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor offsets, *, Tensor? bias=None, Tensor? gather=None, "
     "Tensor? row_scale=None, str activation='none', bool gated=False, str gate_layout='halves', ScalarType? out_dtype=None, "
     "Tensor? out_scale=None, bool fast_accum=False, str? kernel=None) -> Tensor",
     boxed<&grouped_gemm_fp8>, boxed<&grouped_gemm_fp8_out>},
    {"grouped_gemm_fp8_masked(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor counts, *, Tensor? bias=None, "
     "Tensor? row_scale=None, str activation='none', bool gated=False, str gate_layout='halves', ScalarType? out_dtype=None, "
     "Tensor? out_scale=None, bool fast_accum=False, str? kernel=None) -> Tensor",
     boxed<&grouped_gemm_fp8_masked>, boxed<&grouped_gemm_fp8_masked_out>},
    // the same of int8
    {"grouped_gemm_int8(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor offsets, *, Tensor? bias=None, Tensor? gather=None, "
     "Tensor? row_scale=None, str activation='none', bool gated=False, str gate_layout='halves', ScalarType? out_dtype=None, "
     "str? kernel=None) -> Tensor",
     boxed<&grouped_gemm_int8>, boxed<&grouped_gemm_int8_out>},
    {"grouped_gemm_int8_masked(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor counts, *, Tensor? bias=None, "
     "Tensor? row_scale=None, str activation='none', bool gated=False, str gate_layout='halves', ScalarType? out_dtype=None, "
     "str? kernel=None) -> Tensor",
     boxed<&grouped_gemm_int8_masked>, boxed<&grouped_gemm_int8_masked_out>},
    // moe_ffn with such weights. x of 16 bits is quantised first, the first product's result as it is stored.
    {"moe_ffn_fp8(Tensor x, Tensor w13, Tensor w2, Tensor w13_scale, Tensor w2_scale, Tensor weights, Tensor ids, *, "
     "Tensor? x_scale=None, str activation='silu', Tensor? b13=None, Tensor? b2=None, str gate_layout='halves', "
     "ScalarType? out_dtype=None, bool fast_accum=False) -> Tensor",
     boxed<&moe_ffn_fp8>},
    {"moe_ffn_int8(Tensor x, Tensor w13, Tensor w2, Tensor w13_scale, Tensor w2_scale, Tensor weights, Tensor ids, *, "
     "Tensor? x_scale=None, str activation='silu', Tensor? b13=None, Tensor? b2=None, str gate_layout='halves', "
     "ScalarType? out_dtype=None) -> Tensor",
     boxed<&moe_ffn_int8>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
