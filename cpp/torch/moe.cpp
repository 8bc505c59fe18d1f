// torch.ops.minfer.grouped_gemm and grouped_gemm_masked on CUDA tensors: check, describe, plan, allocate, run.
#include "minfer/moe.h"

#include "bindings.h"
#include "gemm_planning.h"
#include "grouped.h"
#include "packed_weight.h"

namespace minfer::torch_binding {

namespace {

/// b [experts, k, n] with k contiguous; a copy where it is not.
void set_weight(GroupedCall* call, Tensor const& b) {
  GroupedProblem& p = call->problem;
  GroupedOperands& o = call->operands;
  torch::stable::accelerator::DeviceGuard const guard(call->device);
  Tensor weights = torch::stable::transpose(b, 1, 2);  // [experts, n, k]
  bool const usable = (weights.stride(2) == 1 || p.k <= 1) && (weights.size(1) <= 1 || weights.stride(1) >= p.k) &&
                      (weights.size(0) <= 1 || weights.stride(0) > 0);
  call->b = usable ? weights : torch::stable::contiguous(weights);
  o.b = call->b.data_ptr();
  o.ldb = call->b.size(1) > 1 ? call->b.stride(1) : round_up(p.k, 8);
  o.b_expert_stride = call->b.size(0) > 1 ? call->b.stride(0) : round_up(p.n * o.ldb, 8);
  p.b_alignment = common_alignment({uint64_t(reinterpret_cast<uintptr_t>(o.b)), uint64_t(o.ldb * 2), uint64_t(o.b_expert_stride * 2)});
}

/// All but what a masked call lays out differently.
GroupedCall prepare(char const* op, Tensor const& a, Tensor const& b, int64_t rows, GroupedArguments const& arguments) {
  int64_t const k = a.size(1);
  check(b.dim() == 3 && b.size(1) == k, op, ": b must be [experts, k, n] with k = ", k, " to match a ", shape_of(a), ", got b ",
        shape_of(b));
  int64_t const experts = b.size(0), n = b.size(2);
  check_experts(op, "b", b, experts);
  check_operand(op, "b", b, a.scalar_type(), {experts, k, n}, a.get_device_index());
  GroupedCall call = grouped_call(op, a, rows, experts, n, "b", arguments);
  set_weight(&call, b);
  return call;
}

GroupedCall prepare_sorted(char const* op, Tensor const& a, Tensor const& b, Tensor const& offsets, GroupedArguments const& arguments) {
  int64_t const rows = grouped_rows(op, a, arguments.gather);
  GroupedCall call = prepare(op, a, b, rows, arguments);
  set_offsets(&call, "offsets", offsets);
  return call;
}

GroupedCall prepare_masked(char const* op, Tensor const& a, Tensor const& b, Tensor const& counts, GroupedArguments arguments) {
  check(a.dim() == 3 && b.dim() == 3 && a.size(0) == b.size(0), op, ": a must be [experts, max_rows, k] and b [experts, k, n], got a ",
        shape_of(a), " and b ", shape_of(b));
  check_16bit(op, "a", a);
  int64_t const experts = a.size(0), max_rows = a.size(1), k = a.size(2);
  bool const walks = (a.stride(2) == 1 || k <= 1) && (experts <= 1 || max_rows == 0 || a.stride(0) == max_rows * a.stride(1));
  Tensor const plain = walks ? a : torch::stable::contiguous(a);
  std::vector<int64_t> const shape = {experts * max_rows, k};
  Tensor const rows = torch::stable::view(plain, shape);
  if (std::optional<Tensor>& scale = arguments.row_scale) {
    check_operand(op, "row_scale", *scale, ScalarType::Float, {experts, max_rows}, a.get_device_index());
    std::vector<int64_t> const flat = {experts * max_rows};
    scale = torch::stable::view(torch::stable::contiguous(*scale), flat);
  }
  GroupedCall call = prepare(op, rows, b, experts * max_rows, arguments);
  call.problem.max_rows = max_rows;
  set_offsets(&call, "counts", counts);
  return call;
}

}  // namespace

Tensor grouped_gemm(Tensor a, Tensor b, Tensor offsets, std::optional<Tensor> bias, std::optional<Tensor> gather,
                    std::optional<Tensor> row_scale, std::string activation, bool gated, std::string gate_layout,
                    std::optional<std::string> kernel) {
  GroupedCall call =
      prepare_sorted("minfer::grouped_gemm", a, b, offsets, {bias, gather, row_scale, activation, gated, gate_layout, kernel});
  return launch_grouped(call);
}

Tensor grouped_gemm_out(Tensor a, Tensor b, Tensor offsets, std::optional<Tensor> bias, std::optional<Tensor> gather,
                        std::optional<Tensor> row_scale, std::string activation, bool gated, std::string gate_layout,
                        std::optional<std::string> kernel, Tensor out) {
  GroupedCall call =
      prepare_sorted("minfer::grouped_gemm.out", a, b, offsets, {bias, gather, row_scale, activation, gated, gate_layout, kernel});
  return launch_grouped_out(call, out);
}

Tensor grouped_gemm_masked(Tensor a, Tensor b, Tensor counts, std::optional<Tensor> bias, std::optional<Tensor> row_scale,
                           std::string activation, bool gated, std::string gate_layout, std::optional<std::string> kernel) {
  GroupedCall call =
      prepare_masked("minfer::grouped_gemm_masked", a, b, counts, {bias, std::nullopt, row_scale, activation, gated, gate_layout, kernel});
  std::vector<int64_t> const shape = {call.problem.experts, call.problem.max_rows, call.columns()};
  Tensor out = torch::stable::new_zeros(a, shape);
  launch_grouped(call, out, shape[2]);
  return out;
}

Tensor grouped_gemm_masked_out(Tensor a, Tensor b, Tensor counts, std::optional<Tensor> bias, std::optional<Tensor> row_scale,
                               std::string activation, bool gated, std::string gate_layout, std::optional<std::string> kernel, Tensor out) {
  char const* op = "minfer::grouped_gemm_masked.out";
  GroupedCall call = prepare_masked(op, a, b, counts, {bias, std::nullopt, row_scale, activation, gated, gate_layout, kernel});
  GroupedProblem const& p = call.problem;
  int64_t const columns = call.columns();
  check_operand(op, "out", out, a.scalar_type(), {p.experts, p.max_rows, columns}, call.device);
  bool const walks = (out.stride(2) == 1 || columns <= 1) && (p.max_rows <= 1 || out.stride(1) >= columns) &&
                     (p.experts <= 1 || p.max_rows == 0 || out.stride(0) == p.max_rows * out.stride(1));
  check(walks, op, ": out must be one run of rows with unit stride along them, got strides ", out.stride(0), ", ", out.stride(1), " and ",
        out.stride(2));
  launch_grouped(call, out, out.stride(1));
  return out;
}

Tensor moe_ffn(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor ids, std::string activation, std::optional<Tensor> b13,
               std::optional<Tensor> b2, std::string gate_layout) {
  char const* op = "minfer::moe_ffn";
  check_tokens(op, x);
  int64_t const hidden = x.size(1);
  check(w13.dim() == 3 && w13.size(1) % 2 == 0, op, ": w13 must be [experts, 2 * inter, hidden], got ", shape_of(w13));
  int64_t const experts = w13.size(0), n = w13.size(1);
  check_experts(op, "w13", w13, experts);
  int32_t const device = x.get_device_index();
  check_operand(op, "w13", w13, x.scalar_type(), {experts, n, hidden}, device);
  check_operand(op, "w2", w2, x.scalar_type(), {experts, hidden, n / 2}, device);
  check_layer(op, x, experts, n, weights, ids, b13, b2, activation, gate_layout);
  check(gate_layout != "blocks" || n % 16 == 0, op, ": w13 must have a multiple of 16 rows in blocks of 8 gate and 8 up rows, got ",
        shape_of(w13));
  torch::stable::accelerator::DeviceGuard const guard(device);
  auto const [token_index, offsets, inverse, scale] = moe_sort(ids, experts, weights);
  Tensor const h = grouped_gemm(x, torch::stable::transpose(w13, 1, 2), offsets, b13, token_index, std::nullopt, activation, true,
                                gate_layout, std::nullopt);
  Tensor const y =
      grouped_gemm(h, torch::stable::transpose(w2, 1, 2), offsets, b2, std::nullopt, scale, "none", false, "halves", std::nullopt);
  return moe_combine(y, inverse, std::nullopt);
}

namespace {

GroupedProblem problem_of(char const* op, std::vector<int64_t> const& sizes, std::string const& type, bool gated, bool gathered,
                          std::optional<std::string> const& w4_format, int64_t group_size, bool has_zeros) {
  check(sizes.size() == 4, op, ": sizes must be [rows, experts, n, k], got ", sizes.size(), " numbers");
  check(type == "f16" || type == "bf16", op, ": type must be f16 or bf16, got '", type, "'");
  GroupedProblem p;
  p.rows = sizes[0];
  p.experts = sizes[1];
  p.n = sizes[2];
  p.k = sizes[3];
  p.type = type == "f16" ? DataType::kF16 : DataType::kBF16;
  p.gated = gated;
  p.gathered = gathered;
  p.a_alignment = p.b_alignment = p.k % 8 == 0 ? 16 : 2;
  if (w4_format) {
    p.b_format = parse_format(op, 4, *w4_format);
    check_group_size(op, p.b_format, group_size);
    check(!has_zeros || has_zero_points(p.b_format), op, ": has_zeros must be False for ", *w4_format);
    p.group_size = planned_group(group_size, p.k);
    p.has_zeros = has_zeros;
  }
  return p;
}

void write_plan(Json& json, GroupedPlan const& plan) {
  json.open('{').key("kernel").value(plan.kernel->name).key("predicted_us").value(plan.predicted_us);
  json.key("floor_us").value(plan.floor_us).key("source").value(name_of(plan.source)).key("reason").value(plan.reason);
  json.key("gather_first").value(plan.gather_first).key("workspace_bytes").value(int64_t(plan.workspace_bytes));
  json.key("compiled").value(plan.kernel->launch != nullptr).close('}');
}

}  // namespace

std::string plan_grouped_json(std::vector<int64_t> sizes, std::string type, bool gated, bool gathered, std::optional<std::string> kernel,
                              bool only_runnable, int64_t device, std::optional<std::string> w4_format, int64_t group_size,
                              bool has_zeros) {
  char const* op = "_plan_grouped";
  GroupedPlanOptions options;
  options.only_runnable = only_runnable;
  options.force_arch = forced_arch();
  if (kernel) options.kernel = kernel->c_str();
  GroupedPlan plan;
  Status const status = plan_grouped(problem_of(op, sizes, type, gated, gathered, w4_format, group_size, has_zeros),
                                     device < 0 ? h200_properties() : device_properties(int32_t(device)), options, &plan);
  check(status.ok(), op, ": ", status.message);
  Json json;
  write_plan(json, plan);
  return json.text();
}

}  // namespace minfer::torch_binding
