// GEMMs of many experts at once with weights in 4-bit codes, and a layer of such experts; on CUDA tensors.
#include "core/operators.h"
#include "core/torch_calls.h"
#include "gemm_planning.h"
#include "grouped_problem.h"
#include "moe_layer.h"
#include "packed_weight.h"

namespace minfer::torch_binding {

namespace {

struct ExpertWeights {
  char const *name, *scales_name, *zeros_name, *alpha_name;  // as the operator calls its arguments
  Tensor const &packed, &scales;
  std::optional<Tensor> const &zeros, &alpha;
  WeightFormat format;
  int64_t group_size;

  /// Of scales [experts, groups, n]; how many groups there are is checked later, with k.
  int64_t experts(char const* op) const {
    if (scales.dim() != 3) fail(op, ": ", scales_name, " must be [experts, groups, n], got ", scales);
    check_experts(op, scales_name, scales, scales.size(0));
    return scales.size(0);
  }
  int64_t n() const { return scales.size(2); }
};

/// The weights of a product with k columns of a and n outputs, whose experts have been checked.
void check_weights(char const* op, ExpertWeights const& w, int64_t n, int64_t k, NamedTensor const& a) {
  int64_t const experts = w.scales.size(0);
  check_group_size(op, w.format, w.group_size);
  if (k % 8 != 0) fail(op, ": k must be a multiple of 8, got ", k);
  if (n % 8 != 0) fail(op, ": ", w.scales_name, " must have n = ", n, " columns, a multiple of 8, got ", w.scales);
  check_scale_type(op, w.scales_name, w.scales, w.format, a.x.scalar_type());
  int64_t const groups[] = {experts, groups_of(w.group_size, k), n};
  check_operand(op, w.scales_name, w.scales, w.scales.scalar_type(), groups, a);
  auto const blocks = packed_shape(w.format, n, k);
  check_operand(op, w.name, w.packed, ScalarType::Int, {experts, blocks[0], blocks[1], blocks[2]}, a);
  if (w.zeros) {
    if (!has_zero_points(w.format)) fail(op, ": ", w.zeros_name, " must be None for ", name_of(w.format));
    check_operand(op, w.zeros_name, *w.zeros, w.scales.scalar_type(), groups, a);
  }
  if (w.alpha) check_operand(op, w.alpha_name, *w.alpha, ScalarType::Float, {experts}, a);
  auto const check_contiguous = [&](char const* name, Tensor const& x) {
    if (!x.is_contiguous()) fail(op, ": ", name, " must be contiguous, got a view of ", x);
  };
  check_contiguous(w.name, w.packed);
  check_contiguous(w.scales_name, w.scales);
  if (w.zeros) check_contiguous(w.zeros_name, *w.zeros);
}

/// Codes, scales and zero points, copied where TMA cannot read them.
void set_weights(GroupedCall* call, ExpertWeights const& w) {
  char const* op = call->op;
  GroupedProblem& p = call->problem;
  GroupedOperands& o = call->operands;
  o.b = call->held.keep(aligned_contiguous(op, w.name, w.packed));
  if (p.k == 0) {  // only the epilogue is left, which the kernels of 16-bit weights compute
    o.ldb = unused_stride(0, size_of(p.type));
    o.b_expert_stride = p.n * o.ldb;
    return;
  }
  p.b_format = w.format;
  p.group_size = planned_group(w.group_size, p.k);
  p.has_zeros = w.zeros.has_value();
  int64_t const groups = w.scales.size(1), row = round_up(p.n, 16 / w.scales.element_size());
  bool const padded = row != p.n;  // scales of one byte, n no multiple of 16
  Tensor const scales = padded ? copy_with_strides(op, w.scales_name, w.scales, {groups * row, row, 1}, p.experts * groups * row)
                               : aligned_contiguous(op, w.scales_name, w.scales);
  o.b_scales = call->held.keep(scales);
  o.ld_scales = row;
  if (w.zeros) o.b_zeros = call->held.keep(aligned_contiguous(op, w.zeros_name, *w.zeros));
  if (w.alpha) o.alpha = static_cast<float const*>(call->held.keep(contiguous(op, w.alpha_name, *w.alpha)));
}

/// Checks a grouped product; returns the number of rows of d.
int64_t check_call(char const* op, Tensor const& a, ExpertWeights const& w, Tensor const& offsets, GroupedArguments const& arguments) {
  check_16bit(op, "a", a);
  int64_t const rows = grouped_rows(op, a, arguments.gather), experts = w.experts(op), n = w.n();
  NamedTensor const reference{"a", a};
  check_weights(op, w, n, a.size(1), reference);
  check_grouped(op, a, rows, experts, n, w.scales_name, arguments);
  check_offsets(op, "offsets", offsets, experts, reference);
  if (a.size(1) == 0 && arguments.kernel) fail(op, ": kernel ", *arguments.kernel, " cannot compute this problem: it needs k > 0");
  return rows;
}

GroupedCall described(char const* op, Tensor const& a, ExpertWeights const& w, Tensor const& offsets, int64_t rows,
                      GroupedArguments const& arguments) {
  GroupedCall call{op};
  GroupedProblem& p = call.problem;
  p.rows = rows;
  p.experts = w.scales.size(0);
  p.n = w.n();
  p.k = a.size(1);
  p.type = data_type(a.scalar_type());
  set_arguments(&call, arguments, "offsets", offsets);
  set_weights(&call, w);
  set_rows(&call, "a", aligned_rows(op, "a", a));
  return call;
}

ExpertWeights weights_of(char const* op, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros,
                         std::optional<Tensor> const& alpha, std::string const& w4_format, int64_t group_size) {
  return {"qweight", "scales", "zeros", "alpha", qweight, scales, zeros, alpha, parse_format(op, 4, w4_format), group_size};
}

std::string const kBlocks = "blocks", kHalves = "halves";

Tensor grouped_w4a16_gemm(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros,
                          Tensor const& offsets, int64_t group_size, std::string const& w4_format, std::optional<Tensor> const& alpha,
                          std::optional<Tensor> const& bias, std::optional<Tensor> const& gather, std::optional<Tensor> const& row_scale,
                          std::string const& activation, bool gated, std::optional<std::string> const& quant,
                          std::optional<Tensor> const& scale, std::optional<std::string> const& kernel) {
  char const* op = "minfer::grouped_w4a16_gemm";
  ExpertWeights const w = weights_of(op, qweight, scales, zeros, alpha, w4_format, group_size);
  GroupedArguments const arguments{bias, gather, row_scale, activation, gated, gated ? kBlocks : kHalves, {quant, scale}, kernel};
  int64_t const rows = check_call(op, a, w, offsets, arguments);
  OnDevice const on(op, a);
  GroupedCall call = described(op, a, w, offsets, rows, arguments);
  return launch(call, kernel, a, on);
}

Tensor grouped_w4a16_gemm_out(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros,
                              Tensor const& offsets, int64_t group_size, std::string const& w4_format, std::optional<Tensor> const& alpha,
                              std::optional<Tensor> const& bias, std::optional<Tensor> const& gather,
                              std::optional<Tensor> const& row_scale, std::string const& activation, bool gated,
                              std::optional<std::string> const& quant, std::optional<Tensor> const& scale,
                              std::optional<std::string> const& kernel, Tensor const& out) {
  char const* op = "minfer::grouped_w4a16_gemm";
  ExpertWeights const w = weights_of(op, qweight, scales, zeros, alpha, w4_format, group_size);
  GroupedArguments const arguments{bias, gather, row_scale, activation, gated, gated ? kBlocks : kHalves, {quant, scale}, kernel};
  int64_t const rows = check_call(op, a, w, offsets, arguments);
  check_grouped_out(op, out, arguments.codes.type(a.scalar_type()), rows, gated ? w.n() / 2 : w.n(), {"a", a});
  check_no_overlap(op, out, "qweight", qweight);
  check_no_overlap(op, out, "scales", scales);
  if (zeros) check_no_overlap(op, out, "zeros", *zeros);
  if (alpha) check_no_overlap(op, out, "alpha", *alpha);
  check_no_overlap(op, out, "offsets", offsets);
  check_no_overlap(op, out, arguments);
  OnDevice const on(op, a);
  GroupedCall call = described(op, a, w, offsets, rows, arguments);
  launch_out(call, kernel, out, on);
  return out;
}

Tensor moe_ffn_w4a16(Tensor const& x, Tensor const& w13, Tensor const& w13_scales, std::optional<Tensor> const& w13_zeros, Tensor const& w2,
                     Tensor const& w2_scales, std::optional<Tensor> const& w2_zeros, Tensor const& weights, Tensor const& ids,
                     int64_t group_size, std::string const& w4_format, std::optional<Tensor> const& alpha13,
                     std::optional<Tensor> const& alpha2, std::string const& activation, std::optional<Tensor> const& b13,
                     std::optional<Tensor> const& b2) {
  char const* op = "minfer::moe_ffn_w4a16";
  check_tokens(op, x);
  WeightFormat const format = parse_format(op, 4, w4_format);
  ExpertWeights const first = {"w13", "w13_scales", "w13_zeros", "alpha13", w13, w13_scales, w13_zeros, alpha13, format, group_size};
  ExpertWeights const second = {"w2", "w2_scales", "w2_zeros", "alpha2", w2, w2_scales, w2_zeros, alpha2, format, group_size};
  int64_t const experts = first.experts(op), n = first.n(), hidden = x.size(1);
  if (n % 16 != 0) fail(op, ": w13_scales must have a multiple of 16 columns in blocks of 8 gate and 8 up columns, got n = ", n);
  if (second.experts(op) != experts) {
    fail(op, ": w2_scales must have w13_scales' ", experts, " experts, got ", w2_scales);
  }
  NamedTensor const reference{"x", x};
  check_weights(op, first, n, hidden, reference);
  check_weights(op, second, hidden, n / 2, reference);
  LayerArguments const arguments{x, weights, ids, b13, b2, activation, kBlocks};
  check_layer(op, arguments, experts, n, "w13");
  OnDevice const on(op, x);
  GroupedCall up = layer_product(op, arguments, experts, n, hidden, true);
  set_weights(&up, first);
  GroupedCall down = layer_product(op, arguments, experts, hidden, n / 2, false);
  set_weights(&down, second);
  return run_layer(op, arguments, up, down, on);
}

constexpr Operator kOperators[] = {
    // grouped_gemm with b[e] = alpha[e] * (code - zero) * scale, [n, k] in 4-bit codes; gated rows are in blocks of 8 gate and 8 up rows.
    {"grouped_w4a16_gemm(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros, Tensor offsets, *, int group_size=128, "
     "str w4_format='int4', Tensor? alpha=None, Tensor? bias=None, Tensor? gather=None, Tensor? row_scale=None, "
     "str activation='none', bool gated=False, str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&grouped_w4a16_gemm>, boxed<&grouped_w4a16_gemm_out>},
    // moe_ffn with such weights.
    {"moe_ffn_w4a16(Tensor x, Tensor w13, Tensor w13_scales, Tensor? w13_zeros, Tensor w2, Tensor w2_scales, Tensor? w2_zeros, "
     "Tensor weights, Tensor ids, *, int group_size=128, str w4_format='int4', Tensor? alpha13=None, Tensor? alpha2=None, "
     "str activation='silu', Tensor? b13=None, Tensor? b2=None) -> Tensor",
     boxed<&moe_ffn_w4a16>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
