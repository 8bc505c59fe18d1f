// torch.ops.minfer.grouped_w4a16_gemm and moe_ffn_w4a16 on CUDA tensors.
#include "bindings.h"
#include "gemm_planning.h"
#include "grouped.h"
#include "packed_weight.h"

namespace minfer::torch_binding {

namespace {

struct ExpertWeights {
  char const *name, *scales_name, *zeros_name, *alpha_name;  // of the arguments
  Tensor packed, scales;
  std::optional<Tensor> zeros, alpha;
  WeightFormat format;
  int64_t group_size;

  /// [experts, groups, n], as far as it can be read without k.
  int64_t experts(char const* op) const {
    check(scales.dim() == 3, op, ": ", scales_name, " must be [experts, groups, n], got ", shape_of(scales));
    check_experts(op, scales_name, scales, scales.size(0));
    return scales.size(0);
  }
  int64_t n() const { return scales.size(2); }

  /// Against experts that have been counted, k, and activations of `type` on `device`.
  void check_all(char const* op, int64_t experts, int64_t n, int64_t k, ScalarType type, int32_t device) const {
    check_group_size(op, format, group_size);
    check(k % 8 == 0, op, ": k must be a multiple of 8, got ", k);
    check(n % 8 == 0, op, ": ", scales_name, " must have n = ", n, " columns, a multiple of 8, got ", shape_of(scales));
    check_scale_type(op, scales_name, scales, format, type);
    std::vector<int64_t> const groups = {experts, groups_of(group_size, k), n};
    check_operand(op, scales_name, scales, scales.scalar_type(), groups, device);
    std::vector<int64_t> blocks = packed_shape(format, n, k);
    blocks.insert(blocks.begin(), experts);
    check_operand(op, name, packed, ScalarType::Int, blocks, device);
    check(!zeros || has_zero_points(format), op, ": ", zeros_name, " must be None for ", name_of(format));
    if (zeros) check_operand(op, zeros_name, *zeros, scales.scalar_type(), groups, device);
    if (alpha) check_operand(op, alpha_name, *alpha, ScalarType::Float, {experts}, device);
    check_contiguous(op, name, packed);
    check_contiguous(op, scales_name, scales);
    if (zeros) check_contiguous(op, zeros_name, *zeros);
    check(is_aligned(packed), op, ": ", name, " must be 16-byte aligned");
  }

  static void check_contiguous(char const* op, char const* name, Tensor const& x) {
    check(x.is_contiguous(), op, ": ", name, " must be contiguous, got a view of ", shape_of(x));
  }
  static bool is_aligned(Tensor const& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0; }
};

/// Contiguous scales where TMA can read them.
Tensor aligned(Tensor const& x) { return ExpertWeights::is_aligned(x) ? x : torch::stable::clone(x); }

GroupedCall prepare(char const* op, Tensor const& a, ExpertWeights const& w, Tensor const& offsets, GroupedArguments const& arguments) {
  int64_t const rows = grouped_rows(op, a, arguments.gather);
  int64_t const experts = w.experts(op), n = w.n(), k = a.size(1);
  int32_t const device = a.get_device_index();
  w.check_all(op, experts, n, k, a.scalar_type(), device);
  torch::stable::accelerator::DeviceGuard const guard(device);
  GroupedCall call = grouped_call(op, aligned_rows(a), rows, experts, n, w.scales_name, arguments);
  set_offsets(&call, "offsets", offsets);
  GroupedProblem& p = call.problem;
  GroupedOperands& o = call.operands;
  call.b = w.packed;
  o.b = call.b.data_ptr();
  if (k == 0) {  // only the epilogue is left, which the kernels of 16-bit weights compute
    check(!call.kernel, op, ": kernel ", call.kernel.value_or(""), " cannot compute this problem: it needs k > 0");
    o.ldb = 8;
    o.b_expert_stride = n * o.ldb;
    return call;
  }
  p.b_format = w.format;
  p.group_size = planned_group(w.group_size, k);
  p.has_zeros = w.zeros.has_value();
  call.scales = aligned(w.scales);
  o.b_scales = call.scales->data_ptr();
  if (w.zeros) {
    call.zeros = aligned(*w.zeros);
    o.b_zeros = call.zeros->data_ptr();
  }
  if (w.alpha) {
    call.alpha = torch::stable::contiguous(*w.alpha);
    o.alpha = static_cast<float const*>(call.alpha->data_ptr());
  }
  return call;
}

GroupedCall prepare(char const* op, Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros,
                    Tensor const& offsets, int64_t group_size, std::string const& w4_format, std::optional<Tensor> const& alpha,
                    std::optional<Tensor> const& bias, std::optional<Tensor> const& gather, std::optional<Tensor> const& row_scale,
                    std::string const& activation, bool gated, std::optional<std::string> const& kernel) {
  ExpertWeights const w = {"qweight", "scales", "zeros", "alpha", qweight, scales, zeros, alpha, parse_format(op, 4, w4_format),
                           group_size};
  return prepare(op, a, w, offsets, {bias, gather, row_scale, activation, gated, gated ? "blocks" : "halves", kernel});
}

}  // namespace

Tensor grouped_w4a16_gemm(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, Tensor offsets, int64_t group_size,
                          std::string w4_format, std::optional<Tensor> alpha, std::optional<Tensor> bias, std::optional<Tensor> gather,
                          std::optional<Tensor> row_scale, std::string activation, bool gated, std::optional<std::string> kernel) {
  GroupedCall call = prepare("minfer::grouped_w4a16_gemm", a, qweight, scales, zeros, offsets, group_size, w4_format, alpha, bias, gather,
                             row_scale, activation, gated, kernel);
  return launch_grouped(call);
}

Tensor grouped_w4a16_gemm_out(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, Tensor offsets, int64_t group_size,
                              std::string w4_format, std::optional<Tensor> alpha, std::optional<Tensor> bias, std::optional<Tensor> gather,
                              std::optional<Tensor> row_scale, std::string activation, bool gated, std::optional<std::string> kernel,
                              Tensor out) {
  GroupedCall call = prepare("minfer::grouped_w4a16_gemm.out", a, qweight, scales, zeros, offsets, group_size, w4_format, alpha, bias,
                             gather, row_scale, activation, gated, kernel);
  return launch_grouped_out(call, out);
}

Tensor moe_ffn_w4a16(Tensor x, Tensor w13, Tensor w13_scales, std::optional<Tensor> w13_zeros, Tensor w2, Tensor w2_scales,
                     std::optional<Tensor> w2_zeros, Tensor weights, Tensor ids, int64_t group_size, std::string w4_format,
                     std::optional<Tensor> alpha13, std::optional<Tensor> alpha2, std::string activation, std::optional<Tensor> b13,
                     std::optional<Tensor> b2) {
  char const* op = "minfer::moe_ffn_w4a16";
  check_tokens(op, x);
  WeightFormat const format = parse_format(op, 4, w4_format);
  ExpertWeights const first = {"w13", "w13_scales", "w13_zeros", "alpha13", w13, w13_scales, w13_zeros, alpha13, format, group_size};
  ExpertWeights const second = {"w2", "w2_scales", "w2_zeros", "alpha2", w2, w2_scales, w2_zeros, alpha2, format, group_size};
  int64_t const experts = first.experts(op), n = first.n(), hidden = x.size(1);
  int32_t const device = x.get_device_index();
  check(n % 16 == 0, op, ": w13_scales must have a multiple of 16 columns in blocks of 8 gate and 8 up columns, got n = ", n);
  first.check_all(op, experts, n, hidden, x.scalar_type(), device);
  second.check_all(op, experts, hidden, n / 2, x.scalar_type(), device);
  check_layer(op, x, experts, n, weights, ids, b13, b2, activation, "blocks");
  torch::stable::accelerator::DeviceGuard const guard(device);
  auto const [token_index, offsets, inverse, scale] = moe_sort(ids, experts, weights);
  GroupedCall up = prepare(op, x, first, offsets, {b13, token_index, std::nullopt, activation, true, "blocks", std::nullopt});
  Tensor const h = launch_grouped(up);
  GroupedCall down = prepare(op, h, second, offsets, {b2, std::nullopt, scale, "none", false, "halves", std::nullopt});
  return moe_combine(launch_grouped(down), inverse, std::nullopt);
}

}  // namespace minfer::torch_binding
