#include "grouped.h"

#include <limits>

#include "gemm_planning.h"

namespace minfer::torch_binding {

namespace {

/// gpt-oss's clamped swiglu: gate * sigmoid(1.702 * gate) * (up + 1) of gate <= 7 and |up| <= 7.
constexpr char const* kSwigluOai = "swigluoai";

/// Raises unless a product can have the activation and, gated, the order of gate and up rows.
void check_gate(char const* op, std::string const& activation, bool gated, std::string const& gate_layout) {
  if (activation == kSwigluOai) {
    check(gated, op, ": activation ", kSwigluOai, " needs gated = True");
  } else {
    parse_activation(op, activation);
  }
  check(gate_layout == "halves" || gate_layout == "alternating" || gate_layout == "blocks", op,
        ": gate_layout must be halves, alternating or blocks, got '", gate_layout, "'");
  check(gated || gate_layout == "halves", op, ": gate_layout ", gate_layout, " needs gated = True");
}

void set_activation(GroupedCall* call, std::string const& activation, std::string const& gate_layout) {
  GroupedOperands& o = call->operands;
  float const infinity = std::numeric_limits<float>::infinity();
  o.gate_max = o.up_max = infinity;
  if (activation == kSwigluOai) {
    o.activation = Activation::kSilu;
    o.silu_scale = 1.702f;
    o.gate_max = o.up_max = 7.0f;
    o.up_shift = 1.0f;
  } else {
    o.activation = parse_activation(call->op, activation);
  }
  o.gate_layout = gate_layout == "halves" ? GateLayout::kHalves : gate_layout == "blocks" ? GateLayout::kBlocks : GateLayout::kAlternating;
}

void check_shape_and_type(char const* op, char const* name, Tensor const& x, ScalarType type, std::vector<int64_t> const& shape) {
  bool same = x.dim() == int64_t(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i) same = x.size(int64_t(i)) == shape[i];
  if (!same) fail(op, ": ", name, " must be ", list_of(shape), ", got ", shape_of(x));
  check(x.scalar_type() == type, op, ": ", name, " must be ", dtype_name(type), ", got ", dtype_name(x.scalar_type()));
}

}  // namespace

void check_operand(char const* op, char const* name, Tensor const& x, ScalarType type, std::vector<int64_t> const& shape, int32_t device) {
  check_shape_and_type(op, name, x, type, shape);
  check_same_device(op, name, x, device);
}

void check_operand(char const* op, char const* name, Tensor const& x, ScalarType type, std::vector<int64_t> const& shape,
                   Beside const& other) {
  check_shape_and_type(op, name, x, type, shape);
  check_same_device(op, name, x, other);
}

void check_16bit(char const* op, char const* name, Tensor const& x) {
  check(is_16bit_float(x.scalar_type()), op, ": ", name, " must be float16 or bfloat16, got ", dtype_name(x.scalar_type()));
}

void check_16bit(char const* op, char const* name, Tensor const& x, Beside const& other) {
  check_16bit(op, other.name, other.x);
  ScalarType const type = other.x.scalar_type();
  if (x.scalar_type() != type) {
    fail(op, ": ", name, " must be float16 or bfloat16 like ", other.name, ", got ", dtype_name(x.scalar_type()), " beside ",
         dtype_name(type));
  }
  check_same_device(op, name, x, other);
}

void check_experts(char const* op, char const* name, Tensor const& weight, int64_t experts) {
  check(experts >= 1 && experts <= kMaxGroupedExperts, op, ": ", name, " must have 1 to ", kMaxGroupedExperts, " experts, got ",
        shape_of(weight));
}

int64_t grouped_rows(char const* op, Tensor const& a, std::optional<Tensor> const& gather) {
  check(a.dim() == 2, op, ": a must be [rows, k], got a ", shape_of(a));
  check(!gather || gather->dim() == 1, op, ": gather must be [rows], got ", gather ? shape_of(*gather) : std::string());
  int64_t const rows = gather ? gather->size(0) : a.size(0);
  check(!gather || rows == 0 || a.size(0) > 0, op, ": a must have the rows that gather names, got a ", shape_of(a));
  check_16bit(op, "a", a);
  return rows;
}

GroupedCall grouped_call(char const* op, Tensor const& a, int64_t rows, int64_t experts, int64_t n, char const* weight,
                         GroupedArguments const& arguments) {
  auto const& [bias, gather, row_scale, activation, gated, gate_layout, kernel] = arguments;
  GroupedCall call;
  call.op = op;
  call.kernel = kernel;
  call.device = a.get_device_index();
  GroupedProblem& p = call.problem;
  GroupedOperands& o = call.operands;
  p.experts = experts;
  p.k = a.size(1);
  p.n = n;
  p.rows = rows;
  p.type = data_type(a.scalar_type());
  p.gated = gated;
  if (bias) check_operand(op, "bias", *bias, a.scalar_type(), {experts, n}, call.device);
  if (gather) check_operand(op, "gather", *gather, ScalarType::Int, {rows}, call.device);
  if (row_scale) check_operand(op, "row_scale", *row_scale, ScalarType::Float, {rows}, call.device);
  check_gate(op, activation, gated, gate_layout);
  set_activation(&call, activation, gate_layout);
  check(!gated || n % 2 == 0, op, ": ", weight, " must have an even number of columns when gated, got n = ", n);
  check(!gated || gate_layout != "blocks" || n % 16 == 0, op, ": ", weight,
        " must have a multiple of 16 columns in blocks of 8 gate and 8 up columns, got n = ", n);

  torch::stable::accelerator::DeviceGuard const guard(call.device);
  call.a = unit_rows(a);
  o.a = call.a.data_ptr();
  o.a_rows = a.size(0);
  o.lda = a.size(0) > 1 ? call.a.stride(0) : round_up(p.k, 8);
  p.a_alignment = common_alignment({uint64_t(reinterpret_cast<uintptr_t>(o.a)), uint64_t(o.lda * 2)});
  if (bias) {
    call.bias = unit_rows(*bias);
    o.bias = call.bias->data_ptr();
    o.bias_stride = call.bias->stride(0);
  }
  if (gather) {
    p.gathered = true;
    call.gather = torch::stable::contiguous(*gather);
    o.gather = static_cast<int32_t const*>(call.gather->data_ptr());
  }
  if (row_scale) {
    call.row_scale = torch::stable::contiguous(*row_scale);
    o.row_scale = static_cast<float const*>(call.row_scale->data_ptr());
  }
  return call;
}

void set_offsets(GroupedCall* call, char const* name, Tensor const& offsets) {
  check_operand(call->op, name, offsets, ScalarType::Int, {call->problem.experts}, call->device);
  torch::stable::accelerator::DeviceGuard const guard(call->device);
  call->offsets = torch::stable::contiguous(offsets);
  call->operands.offsets = static_cast<int32_t const*>(call->offsets.data_ptr());
}

void launch_grouped(GroupedCall& call, Tensor const& d, int64_t ldd) {
  GroupedProblem& p = call.problem;
  if (p.rows == 0 || p.n == 0) return;
  torch::stable::accelerator::DeviceGuard const guard(call.device);
  call.operands.d = d.data_ptr();
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
    workspace = torch::stable::new_empty(d, bytes, ScalarType::Byte);
  }
  status = run_grouped(plan, p, call.operands, device_properties(call.device), plan.workspace_bytes > 0 ? workspace.data_ptr() : nullptr,
                       plan.workspace_bytes, current_stream(call.device));
  check(status.ok(), call.op, ": ", plan.kernel->name, " on rows = ", p.rows, ", experts = ", p.experts, ", n = ", p.n, ", k = ", p.k, ": ",
        status.message);
}

Tensor launch_grouped(GroupedCall& call) {
  std::vector<int64_t> const shape = {call.problem.rows, call.columns()};
  Tensor out = torch::stable::new_empty(call.a, shape);
  launch_grouped(call, out, shape[1]);
  return out;
}

Tensor launch_grouped_out(GroupedCall& call, Tensor const& out) {
  int64_t const columns = call.columns();
  check_operand(call.op, "out", out, call.a.scalar_type(), {call.problem.rows, columns}, call.device);
  check(out.stride(1) == 1 || columns <= 1, call.op, ": out must have unit stride along its rows, got strides ", out.stride(0), " and ",
        out.stride(1));
  check(out.size(0) <= 1 || out.stride(0) >= columns, call.op, ": out's rows must not overlap, got a row stride of ", out.stride(0));
  launch_grouped(call, out, out.size(0) > 1 ? out.stride(0) : round_up(columns, 8));
  return out;
}

void check_tokens(char const* op, Tensor const& x) {
  check(x.dim() == 2, op, ": x must be [tokens, hidden], got ", shape_of(x));
  check_16bit(op, "x", x);
}

void check_layer(char const* op, Tensor const& x, int64_t experts, int64_t n, Tensor const& weights, Tensor const& ids,
                 std::optional<Tensor> const& b13, std::optional<Tensor> const& b2, std::string const& activation,
                 std::string const& gate_layout) {
  int32_t const device = x.get_device_index();
  check(ids.dim() == 2, op, ": ids must be [tokens, top_k], got ", shape_of(ids));
  int64_t const tokens = x.size(0), hidden = x.size(1), top_k = ids.size(1);
  check_operand(op, "ids", ids, ScalarType::Int, {tokens, top_k}, device);
  check_operand(op, "weights", weights, ScalarType::Float, {tokens, top_k}, device);
  if (b13) check_operand(op, "b13", *b13, x.scalar_type(), {experts, n}, device);
  if (b2) check_operand(op, "b2", *b2, x.scalar_type(), {experts, hidden}, device);
  check_gate(op, activation, true, gate_layout);
}

}  // namespace minfer::torch_binding
