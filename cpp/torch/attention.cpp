// torch.ops.minfer.attention, attention_varlen and attention_paged on CUDA tensors: check, describe, plan, allocate, run.
#include "minfer/attention.h"

#include <algorithm>
#include <cmath>

#include "bindings.h"
#include "core/checks.h"
#include "core/device.h"
#include "core/json.h"
#include "core/parse.h"
#include "core/plan_cache.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "kv_formats.h"

namespace minfer::torch_binding {

namespace {

struct AttentionArguments {
  bool causal;
  std::optional<double> scale;
  int64_t window_left, window_right;
  double softcap;
  std::optional<Tensor> const& sinks;
};

/// A call: what is computed, and where its operands are.
struct AttentionCall {
  char const* op;
  Tensor const &q, &k, &v;
  std::optional<std::string> const& kernel;
  AttentionProblem problem{};
  AttentionOperands operands{};
  Held held{};

  int32_t const* keep_lengths(char const* name, Tensor const& x) { return static_cast<int32_t const*>(held.keep(contiguous(op, name, x))); }
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

/// Scale, softcap, windows and sinks, checked; sinks are described later.
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
  if (arguments.sinks) check_operand(op, "sinks", *arguments.sinks, call->q.scalar_type(), {p.heads_q}, {"q", call->q});
}

void set_sinks(AttentionCall* call, std::optional<Tensor> const& sinks) {
  if (sinks) call->operands.sinks = call->held.keep(contiguous(call->op, "sinks", *sinks));
}

/// How a kernel reads q: split-KV ones without TMA, by a load of each lane's part of a row, a 32nd (decode_queries.cuh).
RowAccess access_to_queries(KernelInfo const& kernel) {
  if (kernel.schedule != Schedule::kSplitKv) return kTmaRows;
  return {kernel.tile_k / 32 * size_of(kernel.ab_type), false};
}

/// q, k and v as the kernel reads them.
void set_inputs(AttentionCall* call, KernelInfo const& kernel) {
  char const* op = call->op;
  AttentionProblem const& p = call->problem;
  AttentionOperands& o = call->operands;
  Tensor const q = readable(op, "q", call->q, access_to_queries(kernel));
  o.q = call->held.keep(q);
  set_strides(o.q_strides, q);
  if (q.dim() == 3 && !p.varlen) o.q_strides[0] = p.seqlen_q * o.q_strides[1];
  // A cache fits, which was checked.
  Tensor const k = p.cached ? call->k : readable(op, "k", call->k, kTmaRows), v = p.cached ? call->v : readable(op, "v", call->v, kTmaRows);
  o.k = call->held.keep(k);
  o.v = call->held.keep(v);
  set_strides(o.k_strides, k);
  set_strides(o.v_strides, v);
}

/// All checks but those of lengths. q, k and v have `modes` modes.
AttentionCall checked_call(char const* op, Tensor const& q, Tensor const& k, Tensor const& v, int64_t modes,
                           AttentionArguments const& arguments, std::optional<std::string> const& kernel) {
  char const* layout = modes == 4 ? "[batch, seqlen, heads, head_dim]" : "[tokens, heads, head_dim]";
  Beside const beside{"q", q};
  for (auto const& [name, x] : {std::pair{"q", &q}, std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (x->dim() != modes) fail(op, ": ", name, " must be ", layout, ", got ", *x);
    check_16bit(op, name, *x, beside);
  }
  int64_t const lead = modes - 3;
  for (int64_t i = 0; i < lead + 2; ++i) {
    if (k.size(i) != v.size(i)) fail(op, ": v must have k's modes but the last, got k ", k, " and v ", v);
  }
  AttentionCall call{op, q, k, v, kernel};
  AttentionProblem& p = call.problem;
  p.heads_q = q.size(lead + 1);
  p.heads_kv = k.size(lead + 1);
  p.head_dim = q.size(lead + 2);
  p.head_dim_v = v.size(lead + 2);
  p.type = data_type(q.scalar_type());
  if (k.size(lead + 2) != p.head_dim) fail(op, ": k must have q's head_dim = ", p.head_dim, ", got k ", k);
  check_sizes(op, p, q);
  set_options(&call, arguments);
  return call;
}

PlanKey<14> key_of(AttentionProblem const& p, int32_t device) {
  uint64_t const flags = uint64_t(p.type) | uint64_t(p.varlen) << 2 | uint64_t(p.cached) << 3 | uint64_t(p.paged) << 4 |
                         uint64_t(p.scale_per_head) << 5 | uint64_t(p.kv_format) << 8 | uint64_t(uint32_t(device)) << 32;
  uint64_t const dimensions = uint64_t(p.head_dim) | uint64_t(p.head_dim_v) << 32;  // 9 bits each, which was checked
  uint64_t const groups = uint64_t(p.group_tokens) | uint64_t(p.groups_v) << 16 | uint64_t(p.num_splits) << 32;
  return {uint64_t(p.batch),
          uint64_t(p.heads_q),
          uint64_t(p.heads_kv),
          uint64_t(p.seqlen_q),
          uint64_t(p.seqlen_k),
          uint64_t(p.tokens_q),
          uint64_t(p.tokens_k),
          uint64_t(p.pages),
          uint64_t(p.page_size),
          uint64_t(p.window_left),
          uint64_t(p.window_right),
          flags,
          dimensions,
          groups};
}

AttentionPlan make_plan(AttentionCall const& call, DeviceProperties const& device) {
  AttentionPlanOptions options;
  if (call.kernel) options.kernel = call.kernel->c_str();
  AttentionPlan plan;
  Status const status = plan_attention(call.problem, device, options, &plan);
  if (!status.ok()) fail(call.op, ": ", status.message);
  return plan;
}

AttentionPlan plan_of(AttentionCall const& call, OnDevice const& on) {
  if (call.kernel) return make_plan(call, on.properties());
  thread_local PlanCache<14, AttentionPlan> cache;
  return cache.get(key_of(call.problem, on.index()), 0, [&] { return make_plan(call, on.properties()); });
}

/// Plans, copies what the kernel cannot read, allocates the outputs and the workspace, runs.
std::tuple<Tensor, Tensor> launch(AttentionCall& call, Shape shape, Shape lse_shape, OnDevice const& on) {
  char const* op = call.op;
  AttentionProblem const& p = call.problem;
  Tensor const out = allocate(op, call.q, shape, call.q.scalar_type(), "the output of q ", call.q);
  Tensor const lse = allocate(op, call.q, lse_shape, ScalarType::Float, "the lse of q ", call.q);
  if (p.tokens_q == 0 || p.heads_q == 0) {
    if (call.kernel) check_kernel_name(op, "attention", *call.kernel);
    return {out, lse};
  }
  call.operands.out = out.data_ptr();
  call.operands.lse = static_cast<float*>(lse.data_ptr());
  int64_t const lse_modes = lse.dim();  // [batch, heads, seqlen_q] or [heads, tokens]
  call.operands.lse_strides[0] = lse_modes == 3 ? lse.stride(0) : p.seqlen_q;
  call.operands.lse_strides[1] = lse.stride(lse_modes - 2);
  AttentionPlan const plan = plan_of(call, on);
  set_inputs(&call, *plan.kernel);
  Workspace const workspace(op, out, plan.workspace_bytes, plan.kernel->name, " on q ", call.q, " and k ", call.k,
                            p.num_splits > 0 ? ", num_splits = " + std::to_string(p.num_splits) : std::string());
  Status const status = run_attention(plan, p, call.operands, on.properties(), workspace.data(), workspace.bytes(), on.stream());
  if (!status.ok()) fail(op, ": ", plan.kernel->name, " on q ", call.q, ", k ", call.k, ": ", status.message);
  return {out, lse};
}

}  // namespace

std::tuple<Tensor, Tensor> attention(Tensor const& q, Tensor const& k, Tensor const& v, bool causal, std::optional<double> scale,
                                     int64_t window_left, int64_t window_right, double softcap, std::optional<Tensor> const& sinks,
                                     std::optional<std::string> const& kernel) {
  char const* op = "minfer::attention";
  AttentionCall call = checked_call(op, q, k, v, 4, {causal, scale, window_left, window_right, softcap, sinks}, kernel);
  AttentionProblem& p = call.problem;
  p.batch = q.size(0);
  if (k.size(0) != p.batch) fail(op, ": k and v must have q's batch ", p.batch, ", got k ", k);
  p.seqlen_q = q.size(1);
  p.seqlen_k = k.size(1);
  p.tokens_q = p.batch * p.seqlen_q;
  p.tokens_k = p.batch * p.seqlen_k;
  OnDevice const on(op, q);
  set_sinks(&call, sinks);
  return launch(call, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, {p.batch, p.heads_q, p.seqlen_q}, on);
}

std::tuple<Tensor, Tensor> attention_varlen(Tensor const& q, Tensor const& k, Tensor const& v, Tensor const& cu_seqlens_q,
                                            Tensor const& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal,
                                            std::optional<double> scale, int64_t window_left, int64_t window_right, double softcap,
                                            std::optional<Tensor> const& sinks, std::optional<std::string> const& kernel) {
  char const* op = "minfer::attention_varlen";
  AttentionCall call = checked_call(op, q, k, v, 3, {causal, scale, window_left, window_right, softcap, sinks}, kernel);
  AttentionProblem& p = call.problem;
  if (cu_seqlens_q.dim() != 1 || cu_seqlens_q.size(0) < 1) fail(op, ": cu_seqlens_q must be [batch + 1], got ", cu_seqlens_q);
  p.varlen = true;
  p.batch = cu_seqlens_q.size(0) - 1;
  Beside const beside{"q", q};
  check_operand(op, "cu_seqlens_q", cu_seqlens_q, ScalarType::Int, {p.batch + 1}, beside);
  check_operand(op, "cu_seqlens_k", cu_seqlens_k, ScalarType::Int, {p.batch + 1}, beside);
  if (max_seqlen_q < 0 || max_seqlen_k < 0) {
    fail(op, ": max_seqlen_q and max_seqlen_k must not be negative, got ", max_seqlen_q, " and ", max_seqlen_k);
  }
  p.tokens_q = q.size(0);
  p.tokens_k = k.size(0);
  p.seqlen_q = std::min(max_seqlen_q, p.tokens_q);
  p.seqlen_k = std::min(max_seqlen_k, p.tokens_k);
  OnDevice const on(op, q);
  set_sinks(&call, sinks);
  call.operands.cu_seqlens_q = call.keep_lengths("cu_seqlens_q", cu_seqlens_q);
  call.operands.cu_seqlens_k = call.keep_lengths("cu_seqlens_k", cu_seqlens_k);
  return launch(call, {p.tokens_q, p.heads_q, p.head_dim_v}, {p.heads_q, p.tokens_q}, on);
}

namespace {

/// As kernels read them: those of tokens 16 bytes at a time, fp8's one by one.
void set_scales(AttentionCall* call, KvScales const& scales) {
  AttentionOperands& o = call->operands;
  bool const wide = call->problem.kv_format != WeightFormat::kFp8E4M3;
  auto const take = [&](char const* name, std::optional<Tensor> const& x, void const** data) {
    if (x) *data = call->held.keep(wide ? aligned_contiguous(call->op, name, *x) : contiguous(call->op, name, *x));
  };
  take("k_scale", scales.k_scale, &o.k_scale);
  take("v_scale", scales.v_scale, &o.v_scale);
  take("k_residual", scales.k_residual, &o.k_residual);
  take("v_residual", scales.v_residual, &o.v_residual);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_paged(Tensor const& q, Tensor const& k_cache, Tensor const& v_cache, Tensor const& seq_lens,
                                           std::optional<Tensor> const& block_table, std::optional<Tensor> const& cu_seqlens_q,
                                           int64_t max_seqlen_q, std::optional<Tensor> const& k_scale, std::optional<Tensor> const& v_scale,
                                           std::optional<Tensor> const& k_residual, std::optional<Tensor> const& v_residual,
                                           std::string const& kv_format, bool causal, std::optional<double> scale, int64_t window_left,
                                           double softcap, std::optional<Tensor> const& sinks, std::optional<int64_t> num_splits,
                                           std::optional<std::string> const& kernel) {
  char const* op = "minfer::attention_paged";
  int64_t const modes = q.dim() == 4 ? 4 : 3, lead = modes - 3;
  if (q.dim() != modes) fail(op, ": q must be [batch, seqlen_q, heads, head_dim] or [tokens, heads, head_dim], got ", q);
  check_16bit(op, "q", q);
  Beside const beside{"q", q};
  AttentionCall call{op, q, k_cache, v_cache, kernel};
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
    fail(op, ": k_cache must have q's head_dim = ", p.head_dim, per_byte == 2 ? ", two to a byte" : "", ", got ", k_cache);
  }
  check_sizes(op, p, q);
  if (seq_lens.dim() != 1) fail(op, ": seq_lens must be [batch], got ", seq_lens);
  p.batch = seq_lens.size(0);
  check_operand(op, "seq_lens", seq_lens, ScalarType::Int, {p.batch}, beside);
  if (max_seqlen_q < 0) fail(op, ": max_seqlen_q must not be negative, got ", max_seqlen_q);
  p.varlen = cu_seqlens_q.has_value();
  if (p.varlen) {
    if (modes != 3) fail(op, ": with cu_seqlens_q, q must be [tokens, heads, head_dim], got ", q);
    check_operand(op, "cu_seqlens_q", *cu_seqlens_q, ScalarType::Int, {p.batch + 1}, beside);
    p.tokens_q = q.size(0);
    p.seqlen_q = std::min(max_seqlen_q, p.tokens_q);
  } else if (modes == 4) {
    if (q.size(0) != p.batch) fail(op, ": q must have seq_lens' batch ", p.batch, ", got ", q);
    p.seqlen_q = q.size(1);
    p.tokens_q = p.batch * p.seqlen_q;
  } else {
    p.seqlen_q = max_seqlen_q;
    p.tokens_q = q.size(0);
    if (p.tokens_q != p.batch * p.seqlen_q) {
      fail(op, ": without cu_seqlens_q, q must have batch * max_seqlen_q = ", p.batch * p.seqlen_q, " tokens, got ", q);
    }
  }
  p.paged = block_table.has_value();
  if (p.paged) {
    if (block_table->dim() != 2) fail(op, ": block_table must be [batch, pages], got ", *block_table);
    check_operand(op, "block_table", *block_table, ScalarType::Int, {p.batch, block_table->size(1)}, beside);
    if (p.page_size <= 0 || p.page_size % 8 != 0) fail(op, ": the page size must be a multiple of 8, got ", p.page_size);
    p.seqlen_k = block_table->size(1) * p.page_size;
  } else {
    if (p.pages != p.batch) fail(op, ": without a block_table, k_cache must have seq_lens' batch ", p.batch, ", got ", k_cache);
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
  set_options(&call, {causal, scale, window_left, -1, softcap, sinks});
  OnDevice const on(op, q);
  AttentionOperands& o = call.operands;
  set_sinks(&call, sinks);
  set_scales(&call, scales);
  o.seq_lens = call.keep_lengths("seq_lens", seq_lens);
  if (p.varlen) o.cu_seqlens_q = call.keep_lengths("cu_seqlens_q", *cu_seqlens_q);
  if (p.paged) {
    Tensor const table = unit_rows(op, "block_table", *block_table);
    o.block_table = static_cast<int32_t const*>(call.held.keep(table));
    o.block_table_stride = table.stride(0);
  }
  if (modes == 4) return launch(call, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, {p.batch, p.heads_q, p.seqlen_q}, on);
  return launch(call, {p.tokens_q, p.heads_q, p.head_dim_v}, {p.heads_q, p.tokens_q}, on);
}

std::string plan_attention_json(std::vector<int64_t> const& sizes, std::string const& type, int64_t window_left, int64_t window_right,
                                bool varlen, std::optional<std::string> const& kernel, bool only_runnable, int64_t device) {
  char const* op = "minfer::_plan_attention";
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
  if (type != "f16" && type != "bf16") fail(op, ": type must be f16 or bf16, got '", type, "'");
  p.type = type == "f16" ? DataType::kF16 : DataType::kBF16;
  AttentionPlanOptions options;
  options.only_runnable = only_runnable;
  if (kernel) options.kernel = kernel->c_str();
  AttentionPlan plan;
  Status const status = plan_attention(p, device_properties(op, device), options, &plan);
  if (!status.ok()) fail(op, ": ", status.message);
  Json json;
  json.open('{').key("kernel").value(plan.kernel->name).key("pack").value(plan.packed_heads).key("counted").value(plan.counted);
  json.key("workspace_bytes").value(int64_t(plan.workspace_bytes)).key("predicted_us").value(plan.predicted_us);
  json.key("floor_us").value(plan.floor_us).key("reason").value(plan.reason).close('}');
  return json.text();
}

}  // namespace minfer::torch_binding
