// torch.ops.minfer.attention and attention_varlen on CUDA tensors: check, describe, plan, allocate, run.
#include "minfer/attention.h"

#include <algorithm>
#include <cmath>

#include "bindings.h"
#include "grouped.h"

namespace minfer::torch_binding {

namespace {

constexpr int64_t kMaxHeadDim = 256;

struct AttentionArguments {
  bool causal;
  std::optional<double> scale;
  int64_t window_left, window_right;
  double softcap;
  std::optional<Tensor> sinks;
  std::optional<std::string> kernel;
};

/// As TMA can address it: unit stride along the last mode, 16-byte aligned base and strides, no broadcast mode; a copy where it is not.
Tensor addressable(Tensor const& x) {
  bool fits = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i < x.dim(); ++i) {
    int64_t const stride = x.stride(i);
    if (x.size(i) > 1) fits = fits && (i + 1 == x.dim() ? stride == 1 : stride > 0 && stride % 8 == 0);
  }
  return fits ? x : torch::stable::contiguous(x);
}

/// A call, checked and described; its tensors are what the operands point to, copies where they had to be.
struct AttentionCall {
  char const* op;
  Tensor q, k, v;
  std::optional<Tensor> sinks, cu_seqlens_q, cu_seqlens_k;
  std::optional<std::string> kernel;
  AttentionProblem problem;
  AttentionOperands operands;
  int32_t device;
};

void set_strides(int64_t (&strides)[3], Tensor const& x) {
  int64_t const lead = x.dim() - 3;  // 1 with a batch mode
  strides[0] = lead > 0 ? x.stride(0) : 0;
  strides[1] = x.stride(lead);
  strides[2] = x.stride(lead + 1);
}

/// All but lengths and outputs. q, k and v have `modes` modes.
AttentionCall prepare(char const* op, Tensor const& q, Tensor const& k, Tensor const& v, int64_t modes,
                      AttentionArguments const& arguments) {
  char const* layout = modes == 4 ? "[batch, seqlen, heads, head_dim]" : "[tokens, heads, head_dim]";
  struct {
    char const* name;
    Tensor const& x;
  } const inputs[] = {{"q", q}, {"k", k}, {"v", v}};
  for (auto const& [name, x] : inputs) {
    if (x.dim() != modes) fail(op, ": ", name, " must be ", layout, ", got ", shape_of(x));
    if (!is_16bit_float(x.scalar_type()) || x.scalar_type() != q.scalar_type()) {
      fail(op, ": ", name, " must be float16 or bfloat16 like q, got ", dtype_name(x.scalar_type()), " beside ",
           dtype_name(q.scalar_type()));
    }
    check_same_device(op, name, x, q.get_device_index());
  }
  int64_t const lead = modes - 3;
  for (int64_t i = 0; i < lead + 2; ++i) {
    if (k.size(i) != v.size(i)) fail(op, ": v must have k's modes but the last, got k ", shape_of(k), " and v ", shape_of(v));
  }
  AttentionCall call{op, q, k, v, std::nullopt, std::nullopt, std::nullopt, arguments.kernel, {}, {}, q.get_device_index()};
  AttentionProblem& p = call.problem;
  p.heads_q = q.size(lead + 1);
  p.heads_kv = k.size(lead + 1);
  p.head_dim = q.size(lead + 2);
  p.head_dim_v = v.size(lead + 2);
  p.type = data_type(q.scalar_type());
  if (k.size(lead + 2) != p.head_dim) {
    fail(op, ": k must have q's head_dim = ", p.head_dim, ", got k ", shape_of(k));
  }
  if (p.heads_kv == 0 ? p.heads_q != 0 : p.heads_q % p.heads_kv != 0) {
    fail(op, ": q's heads must be a multiple of k's, got ", p.heads_q, " and ", p.heads_kv);
  }
  if (p.head_dim <= 0 || p.head_dim % 8 != 0 || p.head_dim > kMaxHeadDim) {
    fail(op, ": head_dim must be a multiple of 8 up to ", kMaxHeadDim, ", got ", p.head_dim);
  }
  if (p.head_dim_v <= 0 || p.head_dim_v % 8 != 0 || p.head_dim_v > p.head_dim) {
    fail(op, ": v's head_dim must be a multiple of 8 up to q's ", p.head_dim, ", got ", p.head_dim_v);
  }
  double const scale = arguments.scale ? *arguments.scale : 1.0 / std::sqrt(double(p.head_dim));
  if (!(scale > 0.0)) fail(op, ": scale must be positive, got ", scale);
  if (!std::isfinite(float(scale))) fail(op, ": scale must be finite in float32, got ", scale);
  if (!(arguments.softcap >= 0.0)) fail(op, ": softcap must be 0 (none) or positive, got ", arguments.softcap);
  if (!std::isfinite(float(arguments.softcap))) fail(op, ": softcap must be finite in float32, got ", arguments.softcap);
  p.window_left = arguments.window_left;
  p.window_right = arguments.window_right;
  if (arguments.causal && (p.window_right < 0 || p.window_right > 0)) p.window_right = 0;
  // Negative windows, and those beyond every sequence, do not limit anything; kernels count keys in 32 bits.
  constexpr int64_t kUnlimited = int64_t(1) << 30;
  for (int64_t* const window : {&p.window_left, &p.window_right}) {
    if (*window < 0 || *window >= kUnlimited) *window = -1;
  }

  torch::stable::accelerator::DeviceGuard const guard(call.device);
  call.q = addressable(q);
  call.k = addressable(k);
  call.v = addressable(v);
  AttentionOperands& o = call.operands;
  o.q = call.q.data_ptr();
  o.k = call.k.data_ptr();
  o.v = call.v.data_ptr();
  set_strides(o.q_strides, call.q);
  set_strides(o.k_strides, call.k);
  set_strides(o.v_strides, call.v);
  o.scale = float(scale);
  o.softcap = float(arguments.softcap);
  if (arguments.sinks) {
    check_operand(op, "sinks", *arguments.sinks, q.scalar_type(), {p.heads_q}, call.device);
    call.sinks = torch::stable::contiguous(*arguments.sinks);
    o.sinks = call.sinks->data_ptr();
  }
  return call;
}

/// Plans, allocates the outputs and the workspace, runs.
std::tuple<Tensor, Tensor> launch(AttentionCall& call, std::vector<int64_t> const& shape, std::vector<int64_t> const& lse_shape) {
  AttentionProblem const& p = call.problem;
  torch::stable::accelerator::DeviceGuard const guard(call.device);
  Tensor out = torch::stable::new_empty(call.q, shape), lse = torch::stable::new_empty(call.q, lse_shape, ScalarType::Float);
  if (p.tokens_q == 0 || p.heads_q == 0) return {out, lse};
  call.operands.out = out.data_ptr();
  call.operands.lse = static_cast<float*>(lse.data_ptr());
  AttentionPlanOptions options;
  if (call.kernel) options.kernel = call.kernel->c_str();
  AttentionPlan plan;
  Status status = plan_attention(p, device_properties(call.device), options, &plan);
  if (!status.ok()) fail(call.op, ": ", status.message);
  Tensor workspace;
  if (plan.workspace_bytes > 0) {
    std::vector<int64_t> const bytes = {int64_t(plan.workspace_bytes)};
    workspace = torch::stable::new_empty(out, bytes, ScalarType::Byte);
  }
  status = run_attention(plan, p, call.operands, device_properties(call.device), plan.workspace_bytes > 0 ? workspace.data_ptr() : nullptr,
                         plan.workspace_bytes, current_stream(call.device));
  if (!status.ok()) {
    fail(call.op, ": ", plan.kernel->name, " on q ", shape_of(call.q), ", k ", shape_of(call.k), ": ", status.message);
  }
  return {out, lse};
}

}  // namespace

std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> scale, int64_t window_left,
                                     int64_t window_right, double softcap, std::optional<Tensor> sinks, std::optional<std::string> kernel) {
  char const* op = "minfer::attention";
  AttentionCall call = prepare(op, q, k, v, 4, {causal, scale, window_left, window_right, softcap, sinks, kernel});
  AttentionProblem& p = call.problem;
  p.batch = q.size(0);
  if (k.size(0) != p.batch) fail(op, ": k and v must have q's batch ", p.batch, ", got k ", shape_of(k));
  p.seqlen_q = q.size(1);
  p.seqlen_k = k.size(1);
  p.tokens_q = p.batch * p.seqlen_q;
  p.tokens_k = p.batch * p.seqlen_k;
  return launch(call, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, {p.batch, p.heads_q, p.seqlen_q});
}

std::tuple<Tensor, Tensor> attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int64_t max_seqlen_q,
                                            int64_t max_seqlen_k, bool causal, std::optional<double> scale, int64_t window_left,
                                            int64_t window_right, double softcap, std::optional<Tensor> sinks,
                                            std::optional<std::string> kernel) {
  char const* op = "minfer::attention_varlen";
  AttentionCall call = prepare(op, q, k, v, 3, {causal, scale, window_left, window_right, softcap, sinks, kernel});
  AttentionProblem& p = call.problem;
  if (cu_seqlens_q.dim() != 1 || cu_seqlens_q.size(0) < 1) {
    fail(op, ": cu_seqlens_q must be [batch + 1], got ", shape_of(cu_seqlens_q));
  }
  p.varlen = true;
  p.batch = cu_seqlens_q.size(0) - 1;
  check_operand(op, "cu_seqlens_q", cu_seqlens_q, ScalarType::Int, {p.batch + 1}, call.device);
  check_operand(op, "cu_seqlens_k", cu_seqlens_k, ScalarType::Int, {p.batch + 1}, call.device);
  if (max_seqlen_q < 0 || max_seqlen_k < 0) {
    fail(op, ": max_seqlen_q and max_seqlen_k must not be negative, got ", max_seqlen_q, " and ", max_seqlen_k);
  }
  p.tokens_q = q.size(0);
  p.tokens_k = k.size(0);
  p.seqlen_q = std::min(max_seqlen_q, p.tokens_q);
  p.seqlen_k = std::min(max_seqlen_k, p.tokens_k);
  torch::stable::accelerator::DeviceGuard const guard(call.device);
  call.cu_seqlens_q = torch::stable::contiguous(cu_seqlens_q);
  call.cu_seqlens_k = torch::stable::contiguous(cu_seqlens_k);
  call.operands.cu_seqlens_q = static_cast<int32_t const*>(call.cu_seqlens_q->data_ptr());
  call.operands.cu_seqlens_k = static_cast<int32_t const*>(call.cu_seqlens_k->data_ptr());
  return launch(call, {p.tokens_q, p.heads_q, p.head_dim_v}, {p.heads_q, p.tokens_q});
}

std::string plan_attention_json(std::vector<int64_t> sizes, std::string type, int64_t window_left, int64_t window_right, bool varlen,
                                std::optional<std::string> kernel, bool only_runnable, int64_t device) {
  char const* op = "_plan_attention";
  if (sizes.size() != 7) fail(op, ": sizes must be batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim and head_dim_v");
  AttentionProblem p;
  p.batch = sizes[0];
  p.seqlen_q = sizes[1];
  p.seqlen_k = sizes[2];
  p.heads_q = sizes[3];
  p.heads_kv = sizes[4];
  p.head_dim = sizes[5];
  p.head_dim_v = sizes[6];
  p.tokens_q = p.batch * p.seqlen_q;
  p.tokens_k = p.batch * p.seqlen_k;
  p.window_left = window_left;
  p.window_right = window_right;
  p.varlen = varlen;
  p.type = type == "f16" ? DataType::kF16 : DataType::kBF16;
  AttentionPlanOptions options;
  options.only_runnable = only_runnable;
  if (kernel) options.kernel = kernel->c_str();
  AttentionPlan plan;
  Status const status = plan_attention(p, device < 0 ? h200_properties() : device_properties(int32_t(device)), options, &plan);
  if (!status.ok()) fail(op, ": ", status.message);
  Json json;
  json.open('{').key("kernel").value(plan.kernel->name).key("pack").value(plan.pack).key("counted").value(plan.counted);
  json.key("workspace_bytes").value(int64_t(plan.workspace_bytes)).key("predicted_us").value(plan.predicted_us);
  json.key("floor_us").value(plan.floor_us).key("reason").value(plan.reason).close('}');
  return json.text();
}

}  // namespace minfer::torch_binding
