// torch.ops.minfer.grouped_gemm and grouped_gemm_masked on CUDA tensors: check, describe, plan, allocate, run.
#include "minfer/moe.h"

#include <limits>

#include "bindings.h"
#include "gemm_planning.h"

namespace minfer::torch_binding {

namespace {

struct Call {
  char const* op;
  Tensor a, b, offsets;  // as they are passed on: a and b may be copies
  std::optional<Tensor> bias, gather, row_scale;
  std::optional<std::string> kernel;
  GroupedProblem problem;
  GroupedOperands operands;
  int32_t device;
};

void check_operand(char const* op, char const* name, Tensor const& x, ScalarType type, std::vector<int64_t> const& shape, int32_t device) {
  bool same = x.dim() == int64_t(shape.size());
  std::string expected;
  for (size_t i = 0; i < shape.size(); ++i) {
    same = same && x.size(int64_t(i)) == shape[i];
    expected += (i ? ", " : "") + std::to_string(shape[i]);
  }
  check(same, op, ": ", name, " must be [", expected, "], got ", shape_of(x));
  check(x.scalar_type() == type, op, ": ", name, " must be ", dtype_name(type), ", got ", dtype_name(x.scalar_type()));
  check_same_device(op, name, x, device);
}

/// gpt-oss's clamped swiglu: gate * sigmoid(1.702 * gate) * (up + 1) of gate <= 7 and |up| <= 7.
constexpr char const* kSwigluOai = "swigluoai";

void set_activation(Call* call, std::string const& activation, bool gated, std::string const& gate_layout) {
  GroupedOperands& o = call->operands;
  float const infinity = std::numeric_limits<float>::infinity();
  o.gate_max = o.up_max = infinity;
  if (activation == kSwigluOai) {
    check(gated, call->op, ": activation ", kSwigluOai, " needs gated = True");
    o.activation = Activation::kSilu;
    o.silu_scale = 1.702f;
    o.gate_max = o.up_max = 7.0f;
    o.up_shift = 1.0f;
  } else {
    o.activation = parse_activation(call->op, activation);
  }
  check(gate_layout == "halves" || gate_layout == "alternating" || gate_layout == "blocks", call->op,
        ": gate_layout must be halves, alternating or blocks, got '", gate_layout, "'");
  check(gated || gate_layout == "halves", call->op, ": gate_layout ", gate_layout, " needs gated = True");
  o.gate_layout = gate_layout == "halves" ? GateLayout::kHalves : gate_layout == "blocks" ? GateLayout::kBlocks : GateLayout::kAlternating;
}

/// a [rows, k] and b [experts, k, n] with k contiguous; copies where they are not.
void describe(Call* call, Tensor const& a, Tensor const& b) {
  GroupedProblem& p = call->problem;
  GroupedOperands& o = call->operands;
  call->a = unit_rows(a);
  o.a = call->a.data_ptr();
  o.a_rows = a.size(0);
  o.lda = a.size(0) > 1 ? call->a.stride(0) : round_up(p.k, 8);
  Tensor weights = torch::stable::transpose(b, 1, 2);  // [experts, n, k]
  bool const usable = (weights.stride(2) == 1 || p.k <= 1) && (weights.size(1) <= 1 || weights.stride(1) >= p.k) &&
                      (weights.size(0) <= 1 || weights.stride(0) > 0);
  call->b = usable ? weights : torch::stable::contiguous(weights);
  o.b = call->b.data_ptr();
  o.ldb = call->b.size(1) > 1 ? call->b.stride(1) : round_up(p.k, 8);
  o.b_expert_stride = call->b.size(0) > 1 ? call->b.stride(0) : round_up(p.n * o.ldb, 8);
  p.a_alignment = common_alignment({uint64_t(reinterpret_cast<uintptr_t>(o.a)), uint64_t(o.lda * 2)});
  p.b_alignment = common_alignment({uint64_t(reinterpret_cast<uintptr_t>(o.b)), uint64_t(o.ldb * 2), uint64_t(o.b_expert_stride * 2)});
  if (call->bias) {
    call->bias = unit_rows(*call->bias);
    o.bias = call->bias->data_ptr();
    o.bias_stride = call->bias->stride(0);
  }
}

/// All but what a masked call lays out differently.
Call prepare(char const* op, Tensor const& a, Tensor const& b, int64_t rows, int64_t k, std::optional<Tensor> const& bias,
             std::optional<Tensor> const& gather, std::optional<Tensor> const& row_scale, std::string const& activation, bool gated,
             std::string const& gate_layout, std::optional<std::string> const& kernel) {
  Call call;
  call.op = op;
  call.bias = bias;
  call.kernel = kernel;
  check(is_16bit_float(a.scalar_type()), op, ": a must be float16 or bfloat16, got ", dtype_name(a.scalar_type()));
  check(b.dim() == 3 && b.size(1) == k, op, ": b must be [experts, k, n] with k = ", k, " to match a ", shape_of(a), ", got b ",
        shape_of(b));
  call.device = a.get_device_index();
  GroupedProblem& p = call.problem;
  p.experts = b.size(0);
  p.k = k;
  p.n = b.size(2);
  p.rows = rows;
  p.type = data_type(a.scalar_type());
  p.gated = gated;
  check(p.experts >= 1 && p.experts <= kMaxGroupedExperts, op, ": b must have 1 to ", kMaxGroupedExperts, " experts, got b ", shape_of(b));
  check_operand(op, "b", b, a.scalar_type(), {p.experts, p.k, p.n}, call.device);
  check(!gated || p.n % 2 == 0, op, ": b must have an even number of columns when gated, got ", shape_of(b));
  if (bias) check_operand(op, "bias", *bias, a.scalar_type(), {p.experts, p.n}, call.device);
  if (gather) {
    check_operand(op, "gather", *gather, ScalarType::Int, {rows}, call.device);
    p.gathered = true;
  }
  if (row_scale) check_operand(op, "row_scale", *row_scale, ScalarType::Float, {rows}, call.device);
  set_activation(&call, activation, gated, gate_layout);
  check(!gated || gate_layout != "blocks" || p.n % 16 == 0, op,
        ": b must have a multiple of 16 columns in blocks of 8 gate and 8 up columns, got ", shape_of(b));
  torch::stable::accelerator::DeviceGuard const guard(call.device);
  if (gather) {
    call.gather = torch::stable::contiguous(*gather);
    call.operands.gather = static_cast<int32_t const*>(call.gather->data_ptr());
  }
  if (row_scale) {
    call.row_scale = torch::stable::contiguous(*row_scale);
    call.operands.row_scale = static_cast<float const*>(call.row_scale->data_ptr());
  }
  describe(&call, a, b);
  return call;
}

void launch(Call& call, Tensor const& out, int64_t ldd) {
  GroupedProblem& p = call.problem;
  if (p.rows == 0 || p.n == 0) return;
  torch::stable::accelerator::DeviceGuard const guard(call.device);
  call.operands.d = out.data_ptr();
  call.operands.ldd = ldd;
  p.d_alignment = common_alignment({uint64_t(reinterpret_cast<uintptr_t>(call.operands.d)), uint64_t(ldd * 2)});
  GroupedPlanOptions options;
  options.force_arch = forced_arch();
  if (call.kernel) options.kernel = call.kernel->c_str();
  GroupedPlan plan;
  Status status = plan_grouped(p, device_properties(call.device), options, &plan);
  check(status.ok(), call.op, ": ", status.message);
  Tensor workspace;
  if (plan.workspace_bytes > 0) {
    std::vector<int64_t> const bytes = {int64_t(plan.workspace_bytes)};
    workspace = torch::stable::new_empty(out, bytes, ScalarType::Byte);
  }
  status = run_grouped(plan, p, call.operands, device_properties(call.device), plan.workspace_bytes > 0 ? workspace.data_ptr() : nullptr,
                       plan.workspace_bytes, current_stream(call.device));
  check(status.ok(), call.op, ": ", plan.kernel->name, " on rows = ", p.rows, ", experts = ", p.experts, ", n = ", p.n, ", k = ", p.k, ": ",
        status.message);
}

Call prepare_sorted(char const* op, Tensor const& a, Tensor const& b, Tensor const& offsets, std::optional<Tensor> const& bias,
                    std::optional<Tensor> const& gather, std::optional<Tensor> const& row_scale, std::string const& activation, bool gated,
                    std::string const& gate_layout, std::optional<std::string> const& kernel) {
  check(a.dim() == 2, op, ": a must be [rows, k], got a ", shape_of(a));
  check(!gather || gather->dim() == 1, op, ": gather must be [rows], got ", gather ? shape_of(*gather) : std::string());
  int64_t const rows = gather ? gather->size(0) : a.size(0);
  check(!gather || rows == 0 || a.size(0) > 0, op, ": a must have the rows that gather names, got a ", shape_of(a));
  Call call = prepare(op, a, b, rows, a.size(1), bias, gather, row_scale, activation, gated, gate_layout, kernel);
  check_operand(op, "offsets", offsets, ScalarType::Int, {call.problem.experts}, call.device);
  torch::stable::accelerator::DeviceGuard const guard(call.device);
  call.offsets = torch::stable::contiguous(offsets);
  call.operands.offsets = static_cast<int32_t const*>(call.offsets.data_ptr());
  return call;
}

Call prepare_masked(char const* op, Tensor const& a, Tensor const& b, Tensor const& counts, std::optional<Tensor> const& bias,
                    std::optional<Tensor> const& row_scale, std::string const& activation, bool gated, std::string const& gate_layout,
                    std::optional<std::string> const& kernel) {
  check(a.dim() == 3 && b.dim() == 3 && a.size(0) == b.size(0), op, ": a must be [experts, max_rows, k] and b [experts, k, n], got a ",
        shape_of(a), " and b ", shape_of(b));
  int64_t const experts = a.size(0), max_rows = a.size(1), k = a.size(2);
  bool const walks = (a.stride(2) == 1 || k <= 1) && (experts <= 1 || max_rows == 0 || a.stride(0) == max_rows * a.stride(1));
  Tensor const plain = walks ? a : torch::stable::contiguous(a);
  std::vector<int64_t> const shape = {experts * max_rows, k};
  Tensor const rows = torch::stable::view(plain, shape);
  std::optional<Tensor> scale = row_scale;
  if (scale) {
    check_operand(op, "row_scale", *scale, ScalarType::Float, {experts, max_rows}, a.get_device_index());
    std::vector<int64_t> const flat = {experts * max_rows};
    scale = torch::stable::view(torch::stable::contiguous(*scale), flat);
  }
  Call call = prepare(op, rows, b, experts * max_rows, k, bias, std::nullopt, scale, activation, gated, gate_layout, kernel);
  call.problem.max_rows = max_rows;
  check_operand(op, "counts", counts, ScalarType::Int, {experts}, call.device);
  torch::stable::accelerator::DeviceGuard const guard(call.device);
  call.offsets = torch::stable::contiguous(counts);
  call.operands.offsets = static_cast<int32_t const*>(call.offsets.data_ptr());
  return call;
}

int64_t columns_of(GroupedProblem const& p) { return p.gated ? p.n / 2 : p.n; }

}  // namespace

Tensor grouped_gemm(Tensor a, Tensor b, Tensor offsets, std::optional<Tensor> bias, std::optional<Tensor> gather,
                    std::optional<Tensor> row_scale, std::string activation, bool gated, std::string gate_layout,
                    std::optional<std::string> kernel) {
  Call call = prepare_sorted("minfer::grouped_gemm", a, b, offsets, bias, gather, row_scale, activation, gated, gate_layout, kernel);
  std::vector<int64_t> const shape = {call.problem.rows, columns_of(call.problem)};
  Tensor out = torch::stable::new_empty(a, shape);
  launch(call, out, shape[1]);
  return out;
}

Tensor grouped_gemm_out(Tensor a, Tensor b, Tensor offsets, std::optional<Tensor> bias, std::optional<Tensor> gather,
                        std::optional<Tensor> row_scale, std::string activation, bool gated, std::string gate_layout,
                        std::optional<std::string> kernel, Tensor out) {
  char const* op = "minfer::grouped_gemm.out";
  Call call = prepare_sorted(op, a, b, offsets, bias, gather, row_scale, activation, gated, gate_layout, kernel);
  int64_t const columns = columns_of(call.problem);
  check_operand(op, "out", out, a.scalar_type(), {call.problem.rows, columns}, call.device);
  check(out.stride(1) == 1 || columns <= 1, op, ": out must have unit stride along its rows, got strides ", out.stride(0), " and ",
        out.stride(1));
  check(out.size(0) <= 1 || out.stride(0) >= columns, op, ": out's rows must not overlap, got a row stride of ", out.stride(0));
  launch(call, out, out.size(0) > 1 ? out.stride(0) : round_up(columns, 8));
  return out;
}

Tensor grouped_gemm_masked(Tensor a, Tensor b, Tensor counts, std::optional<Tensor> bias, std::optional<Tensor> row_scale,
                           std::string activation, bool gated, std::string gate_layout, std::optional<std::string> kernel) {
  Call call = prepare_masked("minfer::grouped_gemm_masked", a, b, counts, bias, row_scale, activation, gated, gate_layout, kernel);
  std::vector<int64_t> const shape = {call.problem.experts, call.problem.max_rows, columns_of(call.problem)};
  Tensor out = torch::stable::new_zeros(a, shape);
  launch(call, out, shape[2]);
  return out;
}

Tensor grouped_gemm_masked_out(Tensor a, Tensor b, Tensor counts, std::optional<Tensor> bias, std::optional<Tensor> row_scale,
                               std::string activation, bool gated, std::string gate_layout, std::optional<std::string> kernel, Tensor out) {
  char const* op = "minfer::grouped_gemm_masked.out";
  Call call = prepare_masked(op, a, b, counts, bias, row_scale, activation, gated, gate_layout, kernel);
  GroupedProblem const& p = call.problem;
  int64_t const columns = columns_of(p);
  check_operand(op, "out", out, a.scalar_type(), {p.experts, p.max_rows, columns}, call.device);
  bool const walks = (out.stride(2) == 1 || columns <= 1) && (p.max_rows <= 1 || out.stride(1) >= columns) &&
                     (p.experts <= 1 || p.max_rows == 0 || out.stride(0) == p.max_rows * out.stride(1));
  check(walks, op, ": out must be one run of rows with unit stride along them, got strides ", out.stride(0), ", ", out.stride(1), " and ",
        out.stride(2));
  launch(call, out, out.stride(1));
  return out;
}

Tensor moe_ffn(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor ids, std::string activation, std::optional<Tensor> b13,
               std::optional<Tensor> b2, std::string gate_layout) {
  char const* op = "minfer::moe_ffn";
  check(x.dim() == 2, op, ": x must be [tokens, hidden], got ", shape_of(x));
  check(is_16bit_float(x.scalar_type()), op, ": x must be float16 or bfloat16, got ", dtype_name(x.scalar_type()));
  int64_t const tokens = x.size(0), hidden = x.size(1);
  check(w13.dim() == 3 && w13.size(1) % 2 == 0, op, ": w13 must be [experts, 2 * inter, hidden], got ", shape_of(w13));
  int64_t const experts = w13.size(0), n = w13.size(1);
  check(experts >= 1 && experts <= kMaxGroupedExperts, op, ": w13 must have 1 to ", kMaxGroupedExperts, " experts, got ", shape_of(w13));
  int32_t const device = x.get_device_index();
  check_operand(op, "w13", w13, x.scalar_type(), {experts, n, hidden}, device);
  check_operand(op, "w2", w2, x.scalar_type(), {experts, hidden, n / 2}, device);
  check(ids.dim() == 2, op, ": ids must be [tokens, top_k], got ", shape_of(ids));
  int64_t const top_k = ids.size(1);
  check_operand(op, "ids", ids, ScalarType::Int, {tokens, top_k}, device);
  check_operand(op, "weights", weights, ScalarType::Float, {tokens, top_k}, device);
  if (b13) check_operand(op, "b13", *b13, x.scalar_type(), {experts, n}, device);
  if (b2) check_operand(op, "b2", *b2, x.scalar_type(), {experts, hidden}, device);
  torch::stable::accelerator::DeviceGuard const guard(device);
  auto const [token_index, offsets, inverse, scale] = moe_sort(ids, experts, weights);
  Tensor const h = grouped_gemm(x, torch::stable::transpose(w13, 1, 2), offsets, b13, token_index, std::nullopt, activation, true,
                                gate_layout, std::nullopt);
  Tensor const y =
      grouped_gemm(h, torch::stable::transpose(w2, 1, 2), offsets, b2, std::nullopt, scale, "none", false, "halves", std::nullopt);
  return moe_combine(y, inverse, std::nullopt);
}

namespace {

GroupedProblem problem_of(char const* op, std::vector<int64_t> const& sizes, std::string const& type, bool gated, bool gathered) {
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
                              bool only_runnable, int64_t device) {
  char const* op = "_plan_grouped";
  GroupedPlanOptions options;
  options.only_runnable = only_runnable;
  options.force_arch = forced_arch();
  if (kernel) options.kernel = kernel->c_str();
  GroupedPlan plan;
  Status const status = plan_grouped(problem_of(op, sizes, type, gated, gathered),
                                     device < 0 ? h200_properties() : device_properties(int32_t(device)), options, &plan);
  check(status.ok(), op, ": ", status.message);
  Json json;
  write_plan(json, plan);
  return json.text();
}

}  // namespace minfer::torch_binding
