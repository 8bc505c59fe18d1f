#include "moe_layer.h"

#include <algorithm>

#include "core/torch_calls.h"
#include "minfer/moe_routing.h"

namespace minfer::torch_binding {

namespace {

/// Divides one allocation among several buffers, each 256-byte aligned, as torch's allocations are.
class BufferOffsets {
 public:
  /// The offset of the next buffer.
  int64_t add(int64_t bytes) {
    int64_t const offset = bytes_;
    bytes_ += round_up(bytes, 256);
    return offset;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

}  // namespace

void check_tokens(char const* op, Tensor const& x) {
  if (x.dim() != 2) fail(op, ": x must be [tokens, hidden], got ", x);
  check_16bit(op, "x", x);
}

void check_routes(char const* op, LayerArguments const& arguments) {
  auto const& [x, weights, ids, b13, b2, activation, gate_layout] = arguments;
  NamedTensor const reference{"x", x};
  if (ids.dim() != 2) fail(op, ": ids must be [tokens, top_k], got ", ids);
  int64_t const tokens = x.size(0), top_k = ids.size(1);
  check_operand(op, "ids", ids, ScalarType::Int, {tokens, top_k}, reference);
  check_operand(op, "weights", weights, ScalarType::Float, {tokens, top_k}, reference);
}

void check_layer(char const* op, LayerArguments const& arguments, int64_t experts, int64_t n, char const* w13) {
  auto const& [x, weights, ids, b13, b2, activation, gate_layout] = arguments;
  NamedTensor const reference{"x", x};
  check_routes(op, arguments);
  if (b13) check_operand(op, "b13", *b13, x.scalar_type(), {experts, n}, reference);
  if (b2) check_operand(op, "b2", *b2, x.scalar_type(), {experts, x.size(1)}, reference);
  check_gate(op, w13, "rows", n, activation, true, gate_layout);
}

GroupedCall layer_product(char const* op, LayerArguments const& arguments, int64_t experts, int64_t n, int64_t k, bool gated) {
  static std::string const none = "none", halves = "halves";
  GroupedCall call{op};
  GroupedProblem& p = call.problem;
  p.rows = arguments.ids.numel();
  p.experts = experts;
  p.n = n;
  p.k = k;
  p.type = data_type(arguments.x.scalar_type());
  p.gated = gated;
  set_activation(&call, gated ? arguments.activation : none, gated ? arguments.gate_layout : halves);
  set_bias(&call, gated ? "b13" : "b2", gated ? arguments.b13 : arguments.b2);
  return call;
}

Tensor run_layer(char const* op, LayerArguments const& arguments, GroupedCall& up, GroupedCall& down, OnDevice const& on) {
  return run_layer(op, arguments, up, down, arguments.x.scalar_type(), on);
}

Tensor run_layer(char const* op, LayerArguments const& arguments, GroupedCall& up, GroupedCall& down, ScalarType out_type,
                 OnDevice const& on) {
  std::optional<std::string> const any_kernel;
  Tensor const& x = arguments.x;
  Tensor const ids = contiguous(op, "ids", arguments.ids), weights = contiguous(op, "weights", arguments.weights);
  int64_t const tokens = x.size(0), hidden = x.size(1), pairs = ids.numel(), inter = up.columns(), experts = up.problem.experts;
  int64_t const bytes = 2, number_bytes = 4;  // of the result's numbers; of int32 and float32

  // The plans come first, since they say how much workspace is needed. They depend on the alignment of buffers, not on where these lie.
  bool const codes = up.problem.d_groups, aligned = codes || up.problem.b_format != WeightFormat::kDense;
  int64_t const h_row = codes ? round_up(inter, 16) : inter, h_bytes = codes ? 1 : bytes;
  set_rows(&up, "x", aligned ? aligned_rows(op, "x", x) : x);
  up.problem.gathered = true;
  set_output(&up, nullptr, h_row);
  set_rows(&down, nullptr, pairs, pairs > 1 ? h_row : unused_stride(h_row, h_bytes));
  set_output(&down, nullptr, hidden);
  GroupedPlan const plan_up = is_empty(up) ? GroupedPlan() : plan_of(up, any_kernel, on);
  int64_t groups = 0;  // of a row of h
  if (codes && !is_empty(up)) {
    down.problem.a_group = d_group_of(*plan_up.kernel);
    groups = (inter + down.problem.a_group - 1) / down.problem.a_group;
  }
  GroupedPlan const plan_down = is_empty(down) ? GroupedPlan() : plan_of(down, any_kernel, on);

  BufferOffsets buffers;
  int64_t const token_index = buffers.add(pairs * number_bytes), scale = buffers.add(pairs * number_bytes),
                inverse = buffers.add(pairs * number_bytes);
  int64_t const offsets = buffers.add(experts * number_bytes), h = buffers.add(pairs * h_row * h_bytes);
  int64_t const h_scales = buffers.add(pairs * groups * number_bytes);
  // The output of the second product shares memory with the workspace of the first, which is done before the second begins.
  int64_t const y = buffers.add(std::max(pairs * hidden * bytes, int64_t(plan_up.workspace_bytes)));
  int64_t const workspace = buffers.add(int64_t(plan_down.workspace_bytes));
  Tensor const memory = allocate(op, x, {buffers.bytes()}, ScalarType::Byte, "what lies between the products of x ", x, ", ids ", ids, ", ",
                                 experts, " experts and inter = ", inter);
  Tensor const out = allocate(op, x, {tokens, hidden}, out_type, "the output of x ", x);
  auto const at = [&](int64_t offset) { return static_cast<char*>(memory.data_ptr()) + offset; };

  ExpertSort sort;
  sort.ids = static_cast<int32_t const*>(ids.data_ptr());
  sort.tokens = tokens;
  sort.top_k = ids.size(1);
  sort.experts = experts;
  sort.token_index = reinterpret_cast<int32_t*>(at(token_index));
  sort.offsets = reinterpret_cast<int32_t*>(at(offsets));
  sort.inverse = reinterpret_cast<int32_t*>(at(inverse));
  if (pairs > 0) {
    sort.weights = static_cast<float const*>(weights.data_ptr());
    sort.sorted_weights = reinterpret_cast<float*>(at(scale));
  }
  Status status = sort_by_expert(sort, on.properties(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": sorting ids ", ids, ": ", status.message);

  up.operands.gather = sort.token_index;
  up.operands.offsets = down.operands.offsets = sort.offsets;
  up.operands.d = at(h);
  down.operands.a = at(h);
  if (groups > 0) {
    up.operands.d_scales = reinterpret_cast<float*>(at(h_scales));
    up.operands.d_scales_stride = groups;
    down.operands.a_scale = OperandScales{at(h_scales), groups, 1, true};
  }
  down.operands.row_scale = sort.sorted_weights;
  down.operands.d = at(y);
  if (!is_empty(up)) run(up, plan_up, at(y), on);
  if (!is_empty(down)) run(down, plan_down, at(workspace), on);

  ExpertSum sum;
  sum.y = at(y);
  sum.type = data_type(out_type);
  sum.rows = pairs;
  sum.n = sum.ld = hidden;
  sum.inverse = sort.inverse;
  sum.tokens = tokens;
  sum.top_k = ids.size(1);
  sum.out = out.data_ptr();
  status = sum_experts(sum, on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": the sum of ids ", ids, " rows of ", hidden, ": ", status.message);
  return out;
}

}  // namespace minfer::torch_binding
