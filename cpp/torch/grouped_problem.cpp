#include "grouped_problem.h"

#include <limits>
#include <string_view>

#include "core/batch_invariance.h"
#include "core/parse.h"
#include "core/plan_cache.h"
#include "core/torch_calls.h"
#include "gemm_planning.h"

namespace minfer::torch_binding {

namespace {

size_t hash_of_problem(GroupedProblem const& p) {
  uint64_t const formats = uint64_t(p.type) | uint64_t(p.b_format) << 8 | uint64_t(p.gated) << 16 | uint64_t(p.gathered) << 17 |
                           uint64_t(p.has_zeros) << 18 | uint64_t(p.d_fp8) << 19 | uint64_t(p.d_type) << 20 | uint64_t(p.b_blocks) << 24 |
                           uint64_t(p.fast_accum) << 25 | uint64_t(p.d_groups) << 26 | uint64_t(p.group_size) << 32 |
                           uint64_t(p.a_group) << 48;
  return hash_of({uint64_t(p.rows), uint64_t(p.experts), uint64_t(p.n), uint64_t(p.k), uint64_t(p.max_rows), formats});
}

GroupedPlan make_plan(char const* op, GroupedProblem const& problem, DeviceProperties const& device, GroupedOverride const* forced) {
  GroupedPlanOptions options;
  options.force_arch = forced_arch();
  if (forced != nullptr) {
    options.kernel = forced->name.c_str();
    options.gather_first = forced->gather_first;
  }
  GroupedPlan plan;
  Status const status = plan_grouped(problem, device, options, &plan);
  if (!status.ok()) fail(op, ": ", status.message);
  return plan;
}

}  // namespace

GroupedOverride parse_grouped_override(char const* op, std::string const& text) {
  size_t const at = text.find('@');
  GroupedOverride result{text.substr(0, at)};
  if (at == std::string::npos) return result;
  if (find_kernel(result.name.c_str()) == nullptr) fail(op, ": kernel '", result.name, "' is not in the registry");
  constexpr std::string_view kOption = "gather_first=";
  std::string const option = text.substr(at + 1);
  if (option.compare(0, kOption.size(), kOption) != 0) {
    fail(op, ": kernel option '", option.substr(0, option.find('=')), "' is not known; expected gather_first");
  }
  result.gather_first = parse_flag((op + std::string(": kernel option gather_first")).c_str(), option.substr(kOption.size()));
  return result;
}

void check_experts(char const* op, char const* name, Tensor const& weight, int64_t experts) {
  if (experts < 1 || experts > kMaxGroupedExperts) {
    fail(op, ": ", name, " must have 1 to ", kMaxGroupedExperts, " experts, got ", weight);
  }
}

int64_t check_experts_of(char const* op, Tensor const& a, Tensor const& b) {
  int64_t const k = a.size(a.dim() - 1);
  if (b.dim() != 3 || b.size(1) != k) {
    fail(op, ": b must be [experts, k, n] with k = ", k, " to match a ", a, ", got b ", b);
  }
  check_experts(op, "b", b, b.size(0));
  check_operand(op, "b", b, a.scalar_type(), b.sizes(), {"a", a});
  return b.size(2);
}

void check_slabs(char const* op, Tensor const& a, Tensor const& b) {
  if (a.dim() != 3 || b.dim() != 3 || a.size(0) != b.size(0)) {
    fail(op, ": a must be [experts, max_rows, k] and b [experts, k, n], got a ", a, " and b ", b);
  }
}

int64_t grouped_rows(char const* op, Tensor const& a, std::optional<Tensor> const& gather) {
  if (a.dim() != 2) fail(op, ": a must be [rows, k], got a ", a);
  if (!gather) return a.size(0);
  if (gather->dim() != 1) fail(op, ": gather must be [rows], got ", *gather);
  if (gather->size(0) > 0 && a.size(0) == 0) fail(op, ": a must have the rows that gather names, got a ", a);
  return gather->size(0);
}

void check_gate(char const* op, char const* weight, char const* extent, int64_t n, std::string const& activation, bool gated,
                std::string const& gate_layout) {
  if (gated) {
    parse_gate_activation(op, activation);
  } else if (activation == kSwigluOai) {
    fail(op, ": activation ", kSwigluOai, " needs gated = True");
  } else {
    parse_activation(op, activation);
  }
  parse_gate_layout(op, gate_layout);
  if (!gated && gate_layout != "halves") fail(op, ": gate_layout ", gate_layout, " needs gated = True");
  if (gated && n % 2 != 0) fail(op, ": ", weight, " must have an even number of ", extent, " when gated, got n = ", n);
  if (gated && gate_layout == "blocks" && n % 16 != 0) {
    fail(op, ": ", weight, " must have a multiple of 16 ", extent, " in blocks of 8 gate and 8 up ", extent, ", got n = ", n);
  }
}

void check_grouped(char const* op, Tensor const& a, int64_t rows, int64_t experts, int64_t n, char const* weight,
                   GroupedArguments const& arguments) {
  auto const& [bias, gather, row_scale, activation, gated, gate_layout, codes, kernel] = arguments;
  NamedTensor const reference{"a", a};
  if (bias) check_operand(op, "bias", *bias, a.scalar_type(), {experts, n}, reference);
  if (gather) check_operand(op, "gather", *gather, ScalarType::Int, {rows}, reference);
  if (row_scale) check_operand(op, "row_scale", *row_scale, ScalarType::Float, {rows}, reference);
  check_gate(op, weight, "columns", n, activation, gated, gate_layout);
  check_output_codes(op, codes, reference);
}

void check_offsets(char const* op, char const* name, Tensor const& offsets, int64_t experts, NamedTensor const& a) {
  check_operand(op, name, offsets, ScalarType::Int, {experts}, a);
}

void check_no_overlap(char const* op, Tensor const& out, GroupedArguments const& arguments) {
  for (auto const& [name, x] : {std::pair{"bias", &arguments.bias}, std::pair{"gather", &arguments.gather},
                                std::pair{"row_scale", &arguments.row_scale}, std::pair{"scale", &arguments.codes.scale}}) {
    if (*x) check_no_overlap(op, out, name, **x);
  }
}

void check_grouped_out(char const* op, Tensor const& out, ScalarType type, int64_t rows, int64_t columns, NamedTensor const& a) {
  check_operand(op, "out", out, type, {rows, columns}, a);
  if (out.stride(1) != 1 && columns > 1) {
    fail(op, ": out must have unit stride along its rows, got strides ", out.stride(0), " and ", out.stride(1));
  }
  if (rows > 1 && out.stride(0) < columns) fail(op, ": out's rows must not overlap, got a row stride of ", out.stride(0));
  check_no_overlap(op, out, a.name, a.x);
}

int64_t check_masked_out(char const* op, Tensor const& out, ScalarType type, int64_t experts, int64_t max_rows, int64_t columns,
                         NamedTensor const& a) {
  check_operand(op, "out", out, type, {experts, max_rows, columns}, a);
  // From one row of out to the next; where every expert has a single row, that is from one expert to the next.
  int64_t const row = max_rows > 1 ? out.stride(1) : experts > 1 ? out.stride(0) : columns;
  bool const walks =
      (out.stride(2) == 1 || columns <= 1) && row >= columns && (experts <= 1 || max_rows == 0 || out.stride(0) == max_rows * row);
  if (!walks) fail(op, ": out must be one run of rows with unit stride along them, got strides ", Listed{out.strides()});
  check_apart(op, out);
  check_no_overlap(op, out, a.name, a.x);
  return row;
}

void set_activation(GroupedCall* call, std::string const& activation, std::string const& gate_layout) {
  GroupedOperands& o = call->operands;
  GateActivation const gate = parse_gate_activation(call->op, activation);
  o.activation = gate.activation;
  o.silu_scale = gate.silu_scale;
  o.gate_max = gate.gate_max;
  o.up_max = gate.up_max;
  o.up_shift = gate.up_shift;
  o.gate_layout = parse_gate_layout(call->op, gate_layout);
}

void set_rows(GroupedCall* call, void const* a, int64_t rows, int64_t lda) {
  call->operands.a = a;
  call->operands.a_rows = rows;
  call->operands.lda = lda;
  call->problem.a_alignment = common_alignment({address_of(a), uint64_t(lda * size_of(call->problem.type))});
}

void set_rows(GroupedCall* call, char const* name, Tensor const& a) {
  bool const readable = (a.stride(1) == 1 || a.size(1) <= 1) && (a.size(0) <= 1 || a.stride(0) != 0);  // TMA has no stride 0
  Tensor rows = readable ? a : copy_of(call->op, name, a);
  if (batch_invariant()) rows = aligned_rows(call->op, name, rows);  // where they lie does not choose the kernel
  set_rows(call, call->held.keep(rows), rows.size(0),
           rows.size(0) > 1 ? rows.stride(0) : unused_stride(call->problem.k, rows.element_size()));
}

void set_bias(GroupedCall* call, char const* name, std::optional<Tensor> const& bias) {
  if (!bias) return;
  Tensor const rows = unit_rows(call->op, name, *bias);
  call->operands.bias = call->held.keep(rows);
  call->operands.bias_stride = rows.stride(0);
}

void set_weight(GroupedCall* call, char const* name, Tensor const& weight, bool transposed) {
  GroupedProblem& p = call->problem;
  GroupedOperands& o = call->operands;
  int64_t const n_mode = transposed ? 2 : 1, k_mode = transposed ? 1 : 2;
  bool const usable =
      (weight.stride(k_mode) == 1 || p.k <= 1) && (p.n <= 1 || weight.stride(n_mode) >= p.k) && (p.experts <= 1 || weight.stride(0) > 0);
  int64_t row = weight.stride(n_mode), expert = weight.stride(0);
  Tensor read = weight;
  if (!usable) {
    row = p.k;
    expert = p.n * p.k;
    int64_t strides[3] = {expert, 0, 0};
    strides[n_mode] = row;
    strides[k_mode] = 1;
    read = copy_with_strides(call->op, name, weight, strides, p.experts * expert);
  }
  o.b = call->held.keep(read);
  int64_t const bytes = weight.element_size();
  o.ldb = p.n > 1 ? row : unused_stride(p.k, bytes);
  o.b_expert_stride = p.experts > 1 ? expert : unused_stride(p.n * o.ldb, bytes);
  p.b_alignment = common_alignment({address_of(o.b), uint64_t(o.ldb * bytes), uint64_t(o.b_expert_stride * bytes)});
}

void set_arguments(GroupedCall* call, GroupedArguments const& arguments, char const* offsets_name, Tensor const& offsets) {
  char const* op = call->op;
  GroupedOperands& o = call->operands;
  call->problem.gated = arguments.gated;
  set_activation(call, arguments.activation, arguments.gate_layout);
  set_bias(call, "bias", arguments.bias);
  if (arguments.gather) {
    call->problem.gathered = true;
    o.gather = static_cast<int32_t const*>(call->held.keep(contiguous(op, "gather", *arguments.gather)));
  }
  if (arguments.row_scale) o.row_scale = static_cast<float const*>(call->held.keep(contiguous(op, "row_scale", *arguments.row_scale)));
  o.offsets = static_cast<int32_t const*>(call->held.keep(contiguous(op, offsets_name, offsets)));
  call->problem.d_fp8 = arguments.codes.given();
  if (call->problem.d_fp8) o.d_scale = static_cast<float const*>(call->held.keep(contiguous(op, "scale", *arguments.codes.scale)));
}

void set_output(GroupedCall* call, void* d, int64_t ldd) {
  call->operands.d = d;
  call->operands.ldd = ldd;
  call->problem.d_alignment = common_alignment({address_of(d), uint64_t(ldd * call->output_bytes())});
}

GroupedPlan plan_of(GroupedCall const& call, std::optional<std::string> const& kernel, OnDevice const& on) {
  GroupedProblem problem = call.problem;
  problem.batch_invariant = batch_invariant();
  if (kernel) {
    GroupedOverride const forced = parse_grouped_override(call.op, *kernel);
    return make_plan(call.op, problem, on.properties(), &forced);
  }
  thread_local PlanCache<GroupedProblem, GroupedPlan, hash_of_problem> cache;
  return cache.get(problem, on.index(), 0, [&] { return make_plan(call.op, problem, on.properties(), nullptr); });
}

void run(GroupedCall const& call, GroupedPlan const& plan, void* workspace, OnDevice const& on) {
  GroupedProblem const& p = call.problem;
  Status const status = run_grouped(plan, p, call.operands, on.properties(), workspace, plan.workspace_bytes, on.stream());
  if (!status.ok()) {
    fail(call.op, ": ", plan.kernel->name, " on rows = ", p.rows, ", experts = ", p.experts, ", n = ", p.n, ", k = ", p.k, ": ",
         status.message);
  }
}

void launch(GroupedCall& call, std::optional<std::string> const& kernel, Tensor const& d, int64_t ldd, OnDevice const& on) {
  if (is_empty(call)) {
    if (!kernel) return;
    char const* family = call.problem.b_format != WeightFormat::kDense ? "moe_w4a16"
                         : size_of(call.problem.type) == 1             ? "moe_scaled"
                                                                       : "moe";
    check_kernel_name(call.op, family, parse_grouped_override(call.op, *kernel).name);
    return;
  }
  set_output(&call, d.data_ptr(), ldd);
  GroupedPlan const plan = plan_of(call, kernel, on);
  Workspace const workspace(call.op, d, plan.workspace_bytes, plan.kernel->name, ", gathered rows [", call.problem.rows, ", ",
                            call.problem.k, ']');
  run(call, plan, workspace.data(), on);
}

Tensor launch(GroupedCall& call, std::optional<std::string> const& kernel, Tensor const& like, OnDevice const& on) {
  ScalarType const narrow = call.problem.d_type == DataType::kF16 ? ScalarType::Half : ScalarType::BFloat16;
  ScalarType const type = call.problem.d_fp8 ? ScalarType::Float8_e4m3fn : size_of(call.problem.type) == 1 ? narrow : like.scalar_type();
  Tensor const out = allocate(call.op, like, {call.problem.rows, call.columns()}, type, "the output of a ", like, ", ",
                              call.problem.experts, " experts, n = ", call.problem.n);
  launch(call, kernel, out, call.columns(), on);
  return out;
}

void launch_out(GroupedCall& call, std::optional<std::string> const& kernel, Tensor const& out, OnDevice const& on) {
  launch(call, kernel, out, out.size(0) > 1 ? out.stride(0) : unused_stride(call.columns(), out.element_size()), on);
}

}  // namespace minfer::torch_binding
