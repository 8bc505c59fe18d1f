// GEMMs of many experts at once with 16-bit weights, and a layer of such experts; on CUDA tensors.
#include "minfer/moe.h"

#include "core/batch_invariance.h"
#include "core/cost_models.h"
#include "core/json.h"
#include "core/operators.h"
#include "core/torch_calls.h"
#include "gemm_planning.h"
#include "grouped_problem.h"
#include "moe/grouped/cost_model.h"
#include "moe_layer.h"
#include "packed_weight.h"

namespace minfer::torch_binding {

namespace {

GroupedCall described(char const* op, Tensor const& a, Tensor const& b, int64_t rows, GroupedArguments const& arguments,
                      char const* offsets_name, Tensor const& offsets) {
  GroupedCall call{op};
  GroupedProblem& p = call.problem;
  p.rows = rows;
  p.experts = b.size(0);
  p.n = b.size(2);
  p.k = b.size(1);
  p.type = data_type(a.scalar_type());
  set_arguments(&call, arguments, offsets_name, offsets);
  set_weight(&call, "b", b, true);
  return call;
}

/// Checks a product of rows in expert order; returns the number of rows of d.
int64_t check_sorted(char const* op, Tensor const& a, Tensor const& b, Tensor const& offsets, GroupedArguments const& arguments) {
  int64_t const rows = grouped_rows(op, a, arguments.gather);
  check_16bit(op, "a", a);
  int64_t const n = check_experts_of(op, a, b);
  check_grouped(op, a, rows, b.size(0), n, "b", arguments);
  check_offsets(op, "offsets", offsets, b.size(0), {"a", a});
  return rows;
}

GroupedCall described_sorted(char const* op, Tensor const& a, Tensor const& b, Tensor const& offsets, int64_t rows,
                             GroupedArguments const& arguments) {
  GroupedCall call = described(op, a, b, rows, arguments, "offsets", offsets);
  set_rows(&call, "a", a);
  return call;
}

void check_masked(char const* op, Tensor const& a, Tensor const& b, Tensor const& counts, GroupedArguments const& arguments) {
  check_slabs(op, a, b);
  check_16bit(op, "a", a);
  int64_t const n = check_experts_of(op, a, b), experts = a.size(0), max_rows = a.size(1);
  NamedTensor const reference{"a", a};
  if (arguments.bias) check_operand(op, "bias", *arguments.bias, a.scalar_type(), {experts, n}, reference);
  if (arguments.row_scale) check_operand(op, "row_scale", *arguments.row_scale, ScalarType::Float, {experts, max_rows}, reference);
  check_gate(op, "b", "columns", n, arguments.activation, arguments.gated, arguments.gate_layout);
  check_output_codes(op, arguments.codes, reference);
  check_offsets(op, "counts", counts, experts, reference);
}

GroupedCall described_masked(char const* op, Tensor const& a, Tensor const& b, Tensor const& counts, GroupedArguments const& arguments) {
  int64_t const experts = a.size(0), max_rows = a.size(1), k = a.size(2);
  GroupedCall call = described(op, a, b, experts * max_rows, arguments, "counts", counts);
  call.problem.max_rows = max_rows;
  bool const walks = (a.stride(2) == 1 || k <= 1) && (experts <= 1 || max_rows <= 1 || a.stride(0) == max_rows * a.stride(1));
  int64_t const all = experts * max_rows;
  bool const repeated = all > 1 && a.stride(max_rows > 1 ? 1 : 0) == 0;  // TMA has no stride 0
  Tensor const rows = walks && !repeated ? a : copy_of(op, "a", a);
  set_rows(&call, call.held.keep(rows), all, all > 1 ? rows.stride(max_rows > 1 ? 1 : 0) : unused_stride(k, a.element_size()));
  return call;
}

std::optional<Tensor> const kNoGather;

Tensor grouped_gemm(Tensor const& a, Tensor const& b, Tensor const& offsets, std::optional<Tensor> const& bias,
                    std::optional<Tensor> const& gather, std::optional<Tensor> const& row_scale, std::string const& activation, bool gated,
                    std::string const& gate_layout, std::optional<std::string> const& quant, std::optional<Tensor> const& scale,
                    std::optional<std::string> const& kernel) {
  char const* op = "minfer::grouped_gemm";
  GroupedArguments const arguments{bias, gather, row_scale, activation, gated, gate_layout, {quant, scale}, kernel};
  int64_t const rows = check_sorted(op, a, b, offsets, arguments);
  OnDevice const on(op, a);
  GroupedCall call = described_sorted(op, a, b, offsets, rows, arguments);
  return launch(call, kernel, a, on);
}

Tensor grouped_gemm_out(Tensor const& a, Tensor const& b, Tensor const& offsets, std::optional<Tensor> const& bias,
                        std::optional<Tensor> const& gather, std::optional<Tensor> const& row_scale, std::string const& activation,
                        bool gated, std::string const& gate_layout, std::optional<std::string> const& quant,
                        std::optional<Tensor> const& scale, std::optional<std::string> const& kernel, Tensor const& out) {
  char const* op = "minfer::grouped_gemm";
  GroupedArguments const arguments{bias, gather, row_scale, activation, gated, gate_layout, {quant, scale}, kernel};
  int64_t const rows = check_sorted(op, a, b, offsets, arguments);
  check_grouped_out(op, out, arguments.codes.type(a.scalar_type()), rows, gated ? b.size(2) / 2 : b.size(2), {"a", a});
  check_no_overlap(op, out, "b", b);
  check_no_overlap(op, out, "offsets", offsets);
  check_no_overlap(op, out, arguments);
  OnDevice const on(op, a);
  GroupedCall call = described_sorted(op, a, b, offsets, rows, arguments);
  launch_out(call, kernel, out, on);
  return out;
}

Tensor grouped_gemm_masked(Tensor const& a, Tensor const& b, Tensor const& counts, std::optional<Tensor> const& bias,
                           std::optional<Tensor> const& row_scale, std::string const& activation, bool gated,
                           std::string const& gate_layout, std::optional<std::string> const& quant, std::optional<Tensor> const& scale,
                           std::optional<std::string> const& kernel) {
  char const* op = "minfer::grouped_gemm_masked";
  GroupedArguments const arguments{bias, kNoGather, row_scale, activation, gated, gate_layout, {quant, scale}, kernel};
  check_masked(op, a, b, counts, arguments);
  OnDevice const on(op, a);
  GroupedCall call = described_masked(op, a, b, counts, arguments);
  Tensor const out = allocate(op, a, {call.problem.experts, call.problem.max_rows, call.columns()}, arguments.codes.type(a.scalar_type()),
                              "the output of a ", a, " and b ", b);
  fill_with_zeros(op, "the output", out);
  launch(call, kernel, out, call.columns(), on);
  return out;
}

Tensor grouped_gemm_masked_out(Tensor const& a, Tensor const& b, Tensor const& counts, std::optional<Tensor> const& bias,
                               std::optional<Tensor> const& row_scale, std::string const& activation, bool gated,
                               std::string const& gate_layout, std::optional<std::string> const& quant, std::optional<Tensor> const& scale,
                               std::optional<std::string> const& kernel, Tensor const& out) {
  char const* op = "minfer::grouped_gemm_masked";
  GroupedArguments const arguments{bias, kNoGather, row_scale, activation, gated, gate_layout, {quant, scale}, kernel};
  check_masked(op, a, b, counts, arguments);
  int64_t const columns = gated ? b.size(2) / 2 : b.size(2);
  int64_t const row = check_masked_out(op, out, arguments.codes.type(a.scalar_type()), a.size(0), a.size(1), columns, {"a", a});
  check_no_overlap(op, out, "b", b);
  check_no_overlap(op, out, "counts", counts);
  check_no_overlap(op, out, arguments);
  OnDevice const on(op, a);
  GroupedCall call = described_masked(op, a, b, counts, arguments);
  launch(call, kernel, out, row, on);
  return out;
}

Tensor moe_ffn(Tensor const& x, Tensor const& w13, Tensor const& w2, Tensor const& weights, Tensor const& ids,
               std::string const& activation, std::optional<Tensor> const& b13, std::optional<Tensor> const& b2,
               std::string const& gate_layout) {
  char const* op = "minfer::moe_ffn";
  check_tokens(op, x);
  int64_t const hidden = x.size(1);
  if (w13.dim() != 3 || w13.size(1) % 2 != 0) fail(op, ": w13 must be [experts, 2 * inter, hidden], got ", w13);
  int64_t const experts = w13.size(0), n = w13.size(1);
  check_experts(op, "w13", w13, experts);
  NamedTensor const reference{"x", x};
  check_operand(op, "w13", w13, x.scalar_type(), {experts, n, hidden}, reference);
  check_operand(op, "w2", w2, x.scalar_type(), {experts, hidden, n / 2}, reference);
  LayerArguments const arguments{x, weights, ids, b13, b2, activation, gate_layout};
  check_layer(op, arguments, experts, n, "w13");
  OnDevice const on(op, x);
  GroupedCall up = layer_product(op, arguments, experts, n, hidden, true);
  set_weight(&up, "w13", w13, false);
  GroupedCall down = layer_product(op, arguments, experts, hidden, n / 2, false);
  set_weight(&down, "w2", w2, false);
  return run_layer(op, arguments, up, down, on);
}

constexpr Operator kOperators[] = {
    // d = row_scale * activation(a.b[e] + bias[e]), where the rows of a, or of a[gather], are in expert order and those of expert e end at
    // offsets[e]. Gated: activation(gate) * up. With quant = 'fp8_tensor' the e4m3 codes of d / scale.
    {"grouped_gemm(Tensor a, Tensor b, Tensor offsets, *, Tensor? bias=None, Tensor? gather=None, Tensor? row_scale=None, "
     "str activation='none', bool gated=False, str gate_layout='halves', str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&grouped_gemm>, boxed<&grouped_gemm_out>},
    // The same of masked rows: a is [experts, max_rows, k], and expert e uses the first counts[e] of its rows.
    {"grouped_gemm_masked(Tensor a, Tensor b, Tensor counts, *, Tensor? bias=None, Tensor? row_scale=None, "
     "str activation='none', bool gated=False, str gate_layout='halves', str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&grouped_gemm_masked>, boxed<&grouped_gemm_masked_out>},
    // A layer of experts: sort, the two products, the sum. w13 is [experts, 2 * inter, hidden], w2 is [experts, hidden, inter].
    {"moe_ffn(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor ids, *, str activation='silu', Tensor? b13=None, Tensor? b2=None, "
     "str gate_layout='halves') -> Tensor",
     boxed<&moe_ffn>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

GroupedProblem problem_of(char const* op, std::vector<int64_t> const& sizes, std::string const& type, bool gated, bool gathered,
                          std::optional<std::string> const& w4_format, int64_t group_size, bool has_zeros) {
  if (sizes.size() != 4) fail(op, ": sizes must be [rows, experts, n, k], got ", sizes.size(), " numbers");
  GroupedProblem p;
  p.rows = sizes[0];
  p.experts = sizes[1];
  p.n = sizes[2];
  p.k = sizes[3];
  bool const e4m3 = type == name_of(DataType::kE4M3), s8 = type == name_of(DataType::kS8);
  p.type = e4m3 ? DataType::kE4M3 : s8 ? DataType::kS8 : parse_16bit_type(op, type);
  p.gated = gated;
  p.gathered = gathered;
  p.a_alignment = p.b_alignment = e4m3 || s8 || p.k * size_of(p.type) % 16 == 0 ? 16 : size_of(p.type);
  if (e4m3 || s8) {  // scales of rows are of group_size of k; those of e4m3 weights are then of blocks
    if (w4_format || has_zeros) fail(op, ": operands of 8 bits are not quantised otherwise");
    p.a_group = int32_t(group_size > 0 ? group_size : 0);
    p.b_blocks = e4m3 && group_size > 0;
    return p;
  }
  if (w4_format) {
    p.b_format = parse_format(op, 4, *w4_format);
    check_group_size(op, p.b_format, group_size);
    if (has_zeros && !has_zero_points(p.b_format)) fail(op, ": has_zeros must be False for ", *w4_format);
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

std::string plan_grouped_json(std::vector<int64_t> const& sizes, std::string const& type, bool gated, bool gathered,
                              std::optional<std::string> const& kernel, bool only_runnable, int64_t device,
                              std::optional<std::string> const& w4_format, int64_t group_size, bool has_zeros) {
  char const* op = "minfer::_plan_grouped";
  GroupedPlanOptions options;
  options.only_runnable = only_runnable;
  options.force_arch = forced_arch();
  GroupedOverride forced;
  if (kernel) {
    forced = parse_grouped_override(op, *kernel);
    options.kernel = forced.name.c_str();
    options.gather_first = forced.gather_first;
  }
  GroupedPlan plan;
  GroupedProblem problem = problem_of(op, sizes, type, gated, gathered, w4_format, group_size, has_zeros);
  problem.batch_invariant = batch_invariant();
  Status const status = plan_grouped(problem, device_properties(op, device), options, &plan);
  if (!status.ok()) fail(op, ": ", status.message);
  Json json;
  write_plan(json, plan);
  return json.text();
}

std::string grouped_model() { return model_text<moe::CostModel>(moe::kCostConstants); }

/// Writes us[i, j], what the i-th model predicts of the j-th candidate, NaN where this build has no such kernel, and floor_us[j]. A
/// candidate is a line of rows, experts, n, k, type, gated, gathered, w4_format ("dense": 16 bits), group_size, has_zeros, a routing
/// ("uniform", "zipf" or "one_hot"), the experts of a token (0: not known) and an override, one space between any two.
void predict_grouped(std::string const& models, std::string const& candidates, int64_t device, Tensor const& us, Tensor const& floor_us) {
  char const* op = "minfer::_predict_grouped";
  struct Candidate {
    GroupedProblem problem;
    KernelInfo const* kernel;
    bool gather_first;
    std::string routing;
    double top_k;
  };
  std::vector<Candidate> parsed;
  for (std::string const& line : split(candidates, '\n')) {
    if (line.empty()) continue;
    std::vector<std::string> const cells = split(line, ' ');
    if (cells.size() != 13) fail(op, ": expected 13 cells in a candidate's line, got '", line, "'");
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < 4; ++i) sizes.push_back(parse_integer(op, cells[i], 0, INT32_MAX));
    bool known = false;
    std::optional<std::string> const format = cells[7] == "dense" ? std::nullopt : std::optional<std::string>(cells[7]);
    GroupedOverride const forced = parse_grouped_override(op, cells[12]);
    parsed.push_back({problem_of(op, sizes, cells[4], parse_flag(op, cells[5]), parse_flag(op, cells[6]), format,
                                 parse_integer(op, cells[8], -1, INT32_MAX), parse_flag(op, cells[9])),
                      find_kernel(forced.name.c_str()), forced.gather_first, cells[10],
                      double(parse_integer(op, cells[11], 0, INT32_MAX))});
    for (char const* name : {"uniform", "zipf", "one_hot"}) known = known || cells[10] == name;
    if (!known) fail(op, ": the routing must be uniform, zipf or one_hot, got '", cells[10], "'");
  }
  auto const read = read_cost_models<moe::CostModel>(op, models, moe::kCostConstants);
  DeviceProperties const& properties = device_properties(op, device);
  double* out = predictions(op, "us", us, {int64_t(read.size()), int64_t(parsed.size())});
  double* floor = predictions(op, "floor_us", floor_us, {int64_t(parsed.size())});
  for (moe::CostModel const& model : read) {
    for (Candidate const& c : parsed) {
      moe::Routing const routing = c.routing == "uniform" ? moe::even_routing(c.problem, c.top_k)
                                   : c.routing == "zipf"  ? moe::zipf_routing(model, c.problem, c.top_k)
                                                          : moe::same_routing(model, c.problem, c.top_k);
      *out++ = c.kernel == nullptr ? std::nan("") : moe::predict_us(model, *c.kernel, c.problem, routing, properties, c.gather_first);
    }
  }
  for (Candidate const& c : parsed) *floor++ = moe::floor_us(c.problem, properties);
}

/// JSON texts of what would run, and what the fit of the cost model needs.
constexpr Operator kPlanning[] = {
    {"_grouped_model() -> str", boxed<&grouped_model>},
    {"_predict_grouped(str models, str candidates, int device, Tensor(a!) us, Tensor(b!) floor_us) -> ()", boxed<&predict_grouped>},
    {"_plan_grouped(int[] sizes, str type, bool gated, bool gathered, str? kernel, bool only_runnable, int device, str? w4_format=None, "
     "int group_size=128, bool has_zeros=False) -> str",
     boxed<&plan_grouped_json>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kPlanning); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kPlanning); }

}  // namespace

}  // namespace minfer::torch_binding
