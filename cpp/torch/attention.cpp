// torch.ops.minfer.attention, attention_varlen and attention_paged on CUDA tensors: check, describe, plan, allocate, run.
#include "minfer/attention.h"

#include <algorithm>
#include <cmath>

#include "bindings.h"
#include "grouped.h"
#include "kv_formats.h"

namespace minfer::torch_binding {

namespace {

struct AttentionArguments {
  bool causal;
  std::optional<double> scale;
  int64_t window_left, window_right;
  double softcap;
  std::optional<Tensor> sinks;
  std::optional<std::string> kernel;
};

/// A call, checked and described; its tensors are what the operands point to, copies where they had to be.
struct AttentionCall {
  char const* op;
  Tensor q, k, v;
  std::optional<std::string> kernel;
  int32_t device;
  AttentionProblem problem{};
  AttentionOperands operands{};
  std::optional<Tensor> sinks{}, cu_seqlens_q{}, cu_seqlens_k{}, seq_lens{}, block_table{};
  std::optional<Tensor> k_scale{}, v_scale{}, k_residual{}, v_residual{};
};

void set_strides(int64_t (&strides)[3], Tensor const& x) {
  int64_t const lead = x.dim() - 3;  // 1 with a batch mode
  strides[0] = lead > 0 ? x.stride(0) : 0;
  strides[1] = x.stride(lead);
  strides[2] = x.stride(lead + 1);
}

/// Heads and head dimensions, which the problem has already.
void check_sizes(char const* op, AttentionProblem const& p, Tensor const& q) {
  if (p.heads_kv == 0 ? p.heads_q != 0 : p.heads_q % p.heads_kv != 0) {
    fail(op, ": q's heads must be a multiple of k's, got ", p.heads_q, " and ", p.heads_kv);
  }
  check_head_dims(op, {"q", q}, p.head_dim, p.head_dim_v);
}

void set_options(AttentionCall* call, AttentionArguments const& arguments) {
  AttentionProblem& p = call->problem;
  char const* op = call->op;
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
  call->operands.scale = float(scale);
  call->operands.softcap = float(arguments.softcap);
  if (arguments.sinks) {
    check_operand(op, "sinks", *arguments.sinks, call->q.scalar_type(), {p.heads_q}, {"q", call->q});
    torch::stable::accelerator::DeviceGuard const guard(call->device);
    call->sinks = torch::stable::contiguous(*arguments.sinks);
    call->operands.sinks = call->sinks->data_ptr();
  }
}

/// How a kernel reads q: split-KV ones without TMA, by a load of each lane's part of a row, a 32nd (decode_queries.cuh).
RowAccess access_to_queries(KernelInfo const& kernel) {
  if (kernel.schedule != Schedule::kSplitKv) return kTmaRows;
  return {kernel.tile_k / 32 * size_of(kernel.ab_type), false};
}

/// q, k and v as the kernel reads them.
void set_inputs(AttentionCall* call, KernelInfo const& kernel) {
  AttentionProblem const& p = call->problem;
  AttentionOperands& o = call->operands;
  call->q = readable(call->q, access_to_queries(kernel));
  o.q = call->q.data_ptr();
  set_strides(o.q_strides, call->q);
  if (call->q.dim() == 3 && !p.varlen) o.q_strides[0] = p.seqlen_q * o.q_strides[1];
  if (!p.cached) {  // a cache fits, which was checked
    call->k = readable(call->k, kTmaRows);
    call->v = readable(call->v, kTmaRows);
  }
  o.k = call->k.data_ptr();
  o.v = call->v.data_ptr();
  set_strides(o.k_strides, call->k);
  set_strides(o.v_strides, call->v);
}

/// All but lengths, inputs and outputs. q, k and v have `modes` modes.
AttentionCall prepare(char const* op, Tensor const& q, Tensor const& k, Tensor const& v, int64_t modes,
                      AttentionArguments const& arguments) {
  char const* layout = modes == 4 ? "[batch, seqlen, heads, head_dim]" : "[tokens, heads, head_dim]";
  struct {
    char const* name;
    Tensor const& x;
  } const inputs[] = {{"q", q}, {"k", k}, {"v", v}};
  for (auto const& [name, x] : inputs) {
    if (x.dim() != modes) fail(op, ": ", name, " must be ", layout, ", got ", shape_of(x));
    check_16bit(op, name, x, {"q", q});
  }
  int64_t const lead = modes - 3;
  for (int64_t i = 0; i < lead + 2; ++i) {
    if (k.size(i) != v.size(i)) fail(op, ": v must have k's modes but the last, got k ", shape_of(k), " and v ", shape_of(v));
  }
  AttentionCall call{op, q, k, v, arguments.kernel, q.get_device_index()};
  AttentionProblem& p = call.problem;
  p.heads_q = q.size(lead + 1);
  p.heads_kv = k.size(lead + 1);
  p.head_dim = q.size(lead + 2);
  p.head_dim_v = v.size(lead + 2);
  p.type = data_type(q.scalar_type());
  if (k.size(lead + 2) != p.head_dim) {
    fail(op, ": k must have q's head_dim = ", p.head_dim, ", got k ", shape_of(k));
  }
  check_sizes(op, p, q);
  set_options(&call, arguments);
  return call;
}

/// Plans, copies what the kernel cannot read, allocates the outputs and the workspace, runs.
std::tuple<Tensor, Tensor> launch(AttentionCall& call, std::vector<int64_t> const& shape, std::vector<int64_t> const& lse_shape) {
  AttentionProblem const& p = call.problem;
  torch::stable::accelerator::DeviceGuard const guard(call.device);
  Tensor out = torch::stable::new_empty(call.q, shape), lse = torch::stable::new_empty(call.q, lse_shape, ScalarType::Float);
  if (p.tokens_q == 0 || p.heads_q == 0) return {out, lse};
  call.operands.out = out.data_ptr();
  call.operands.lse = static_cast<float*>(lse.data_ptr());
  int64_t const lse_modes = lse.dim();  // [batch, heads, seqlen_q] or [heads, tokens]
  call.operands.lse_strides[0] = lse_modes == 3 ? lse.stride(0) : p.seqlen_q;
  call.operands.lse_strides[1] = lse.stride(lse_modes - 2);
  AttentionPlanOptions options;
  if (call.kernel) options.kernel = call.kernel->c_str();
  AttentionPlan plan;
  Status status = plan_attention(p, device_properties(call.device), options, &plan);
  if (!status.ok()) fail(call.op, ": ", status.message);
  set_inputs(&call, *plan.kernel);
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
  check_operand(op, "cu_seqlens_q", cu_seqlens_q, ScalarType::Int, {p.batch + 1}, {"q", q});
  check_operand(op, "cu_seqlens_k", cu_seqlens_k, ScalarType::Int, {p.batch + 1}, {"q", q});
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

namespace {

/// As kernels read them: those of tokens 16 bytes at a time, fp8's one by one.
void set_scales(AttentionCall* call, KvScales const& scales) {
  AttentionOperands& o = call->operands;
  bool const wide = call->problem.kv_format != WeightFormat::kFp8E4M3;
  auto const take = [&](std::optional<Tensor> const& x, std::optional<Tensor>* to, void const** data) {
    if (!x) return;
    *to = wide ? aligned_contiguous(*x) : torch::stable::contiguous(*x);
    *data = (*to)->data_ptr();
  };
  take(scales.k_scale, &call->k_scale, &o.k_scale);
  take(scales.v_scale, &call->v_scale, &o.v_scale);
  take(scales.k_residual, &call->k_residual, &o.k_residual);
  take(scales.v_residual, &call->v_residual, &o.v_residual);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, std::optional<Tensor> block_table,
                                           std::optional<Tensor> cu_seqlens_q, int64_t max_seqlen_q, std::optional<Tensor> k_scale,
                                           std::optional<Tensor> v_scale, std::optional<Tensor> k_residual,
                                           std::optional<Tensor> v_residual, std::string kv_format, bool causal,
                                           std::optional<double> scale, int64_t window_left, double softcap, std::optional<Tensor> sinks,
                                           std::optional<int64_t> num_splits, std::optional<std::string> kernel) {
  char const* op = "minfer::attention_paged";
  int64_t const modes = q.dim() == 4 ? 4 : 3, lead = modes - 3;
  if (q.dim() != modes) {
    fail(op, ": q must be [batch, seqlen_q, heads, head_dim] or [tokens, heads, head_dim], got ", shape_of(q));
  }
  check_16bit(op, "q", q);
  Beside const beside{"q", q};
  AttentionCall call{op, q, k_cache, v_cache, kernel, q.get_device_index()};
  AttentionProblem& p = call.problem;
  p.type = data_type(q.scalar_type());
  p.cached = true;
  p.kv_format = check_format(op, kv_format, k_cache.scalar_type(), beside);
  int64_t const per_byte = codes_per_byte(p.kv_format);
  check_cache(op, k_cache, v_cache, beside);
  p.heads_q = q.size(lead + 1);
  p.head_dim = q.size(lead + 2);
  p.pages = k_cache.size(0);
  p.page_size = k_cache.size(1);
  p.heads_kv = k_cache.size(2);
  p.head_dim_v = v_cache.size(3) * per_byte;
  if (k_cache.size(3) * per_byte != p.head_dim) {
    fail(op, ": k_cache must have q's head_dim = ", p.head_dim, per_byte == 2 ? ", two to a byte" : "", ", got ", shape_of(k_cache));
  }
  check_sizes(op, p, q);
  if (seq_lens.dim() != 1) fail(op, ": seq_lens must be [batch], got ", shape_of(seq_lens));
  p.batch = seq_lens.size(0);
  check_operand(op, "seq_lens", seq_lens, ScalarType::Int, {p.batch}, beside);
  if (max_seqlen_q < 0) fail(op, ": max_seqlen_q must not be negative, got ", max_seqlen_q);
  p.varlen = cu_seqlens_q.has_value();
  if (p.varlen) {
    if (modes != 3) fail(op, ": with cu_seqlens_q, q must be [tokens, heads, head_dim], got ", shape_of(q));
    check_operand(op, "cu_seqlens_q", *cu_seqlens_q, ScalarType::Int, {p.batch + 1}, beside);
    p.tokens_q = q.size(0);
    p.seqlen_q = std::min(max_seqlen_q, p.tokens_q);
  } else if (modes == 4) {
    if (q.size(0) != p.batch) fail(op, ": q must have seq_lens' batch ", p.batch, ", got ", shape_of(q));
    p.seqlen_q = q.size(1);
    p.tokens_q = p.batch * p.seqlen_q;
  } else {
    p.seqlen_q = max_seqlen_q;
    p.tokens_q = q.size(0);
    if (p.tokens_q != p.batch * p.seqlen_q) {
      fail(op, ": without cu_seqlens_q, q must have batch * max_seqlen_q = ", p.batch * p.seqlen_q, " tokens, got ", shape_of(q));
    }
  }
  p.paged = block_table.has_value();
  if (p.paged) {
    if (block_table->dim() != 2) fail(op, ": block_table must be [batch, pages], got ", shape_of(*block_table));
    check_operand(op, "block_table", *block_table, ScalarType::Int, {p.batch, block_table->size(1)}, beside);
    if (p.page_size <= 0 || p.page_size % 8 != 0) fail(op, ": the page size must be a multiple of 8, got ", p.page_size);
    p.seqlen_k = block_table->size(1) * p.page_size;
  } else {
    if (p.pages != p.batch) fail(op, ": without a block_table, k_cache must have seq_lens' batch ", p.batch, ", got ", shape_of(k_cache));
    p.seqlen_k = p.page_size;
  }
  p.tokens_k = p.pages * p.page_size;
  if (num_splits && (*num_splits < 1 || *num_splits > 256)) fail(op, ": num_splits must be 1 to 256, got ", *num_splits);
  p.num_splits = num_splits ? *num_splits : 0;
  KvScales const scales{k_scale, v_scale, k_residual, v_residual};
  KvGroups const groups =
      check_scales(op, {p.kv_format, p.pages, p.page_size, p.heads_kv, p.head_dim, p.head_dim_v, p.batch}, scales, beside);
  p.scale_per_head = groups.scale_per_head;
  p.group_tokens = groups.group_tokens;
  p.groups_v = groups.groups_v;
  check_cache_strides(op, k_cache, v_cache);
  set_options(&call, {causal, scale, window_left, -1, softcap, sinks, kernel});
  torch::stable::accelerator::DeviceGuard const guard(call.device);
  AttentionOperands& o = call.operands;
  set_scales(&call, scales);
  call.seq_lens = torch::stable::contiguous(seq_lens);
  o.seq_lens = static_cast<int32_t const*>(call.seq_lens->data_ptr());
  if (p.varlen) {
    call.cu_seqlens_q = torch::stable::contiguous(*cu_seqlens_q);
    o.cu_seqlens_q = static_cast<int32_t const*>(call.cu_seqlens_q->data_ptr());
  }
  if (p.paged) {
    call.block_table = unit_rows(*block_table);
    o.block_table = static_cast<int32_t const*>(call.block_table->data_ptr());
    o.block_table_stride = call.block_table->stride(0);
  }
  if (modes == 4) return launch(call, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, {p.batch, p.heads_q, p.seqlen_q});
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
