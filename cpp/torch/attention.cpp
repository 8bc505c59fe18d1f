// Attention over keys and values in tensors, of sequences of one length or of many, and in a cache; on CUDA tensors. Each operator checks
// and describes its operands; launch(), which they share, plans, allocates the outputs and the workspace, and runs.
#include "minfer/attention.h"

#include <algorithm>
#include <cmath>

#include "attention/cost_model.h"
#include "core/batch_invariance.h"
#include "core/checks.h"
#include "core/cost_models.h"
#include "core/device.h"
#include "core/json.h"
#include "core/operators.h"
#include "core/parse.h"
#include "core/plan_cache.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "kv_formats.h"

namespace minfer::torch_binding {

namespace {

/// Options that stand next to each other in all three schemas: their text there, and the parameter that takes them.
#define MINFER_SOFTMAX_ARGUMENTS "float softcap=0.0, Tensor? sinks=None"
struct SoftmaxArguments {
  double softcap;
  std::optional<Tensor> sinks;

  static constexpr auto kMembers = std::tuple{&SoftmaxArguments::softcap, &SoftmaxArguments::sinks};
};

/// All options that say what is computed. Without a scale it is head_dim ** -0.5.
struct AttentionOptions {
  bool causal;
  std::optional<double> scale;
  int64_t window_left, window_right;
  SoftmaxArguments const& softmax;
};

/// A call as the kernels take it, and the caller's tensors: what is computed, where the operands are, and what keeps their memory.
struct AttentionCall {
  char const* op;
  Tensor const &q, &k, &v;
  AttentionOptions options;
  std::optional<std::string> const& kernel;
  Tensor const* out = nullptr;  // contiguous; none: the call allocates it
  AttentionProblem problem{};
  AttentionOperands operands{};
  Held held{};

  int32_t const* keep_lengths(char const* name, Tensor const& x) { return static_cast<int32_t const*>(held.keep(contiguous(op, name, x))); }
};

/// The strides of batch, row and head.
void set_strides(int64_t (&strides)[3], Tensor const& x) {
  int64_t const lead = x.dim() - 3;  // 1 where there is a batch mode
  strides[0] = lead > 0 ? x.stride(0) : 0;
  strides[1] = x.stride(lead);
  strides[2] = x.stride(lead + 1);
}

/// Checks heads and head dimensions, which are in the problem already.
void check_sizes(char const* op, AttentionProblem const& p, Tensor const& q) {
  if (p.heads_kv == 0 ? p.heads_q != 0 : p.heads_q % p.heads_kv != 0) {
    fail(op, ": q's heads must be a multiple of k's, got ", p.heads_q, " and ", p.heads_kv);
  }
  check_head_dims(op, {"q", q}, p.head_dim, p.head_dim_v);
}

/// The options, checked; set_softmax_tensors() puts in what may have to be copied, on the call's device.
void set_options(AttentionCall* call) {
  AttentionOptions const& options = call->options;
  auto const& [softcap, sinks] = options.softmax;
  AttentionProblem& p = call->problem;
  SoftmaxOptions& softmax = call->operands.softmax;
  char const* op = call->op;
  double const scale = options.scale ? *options.scale : 1.0 / std::sqrt(double(p.head_dim));
  if (!(scale > 0.0)) fail(op, ": scale must be positive, got ", scale);
  softmax.scale = in_float32(op, "scale", scale);
  if (!(softcap >= 0.0)) fail(op, ": softcap must be 0 (none) or positive, got ", softcap);
  softmax.softcap = in_float32(op, "softcap", softcap);
  p.batch_invariant = batch_invariant();
  p.window_left = options.window_left;
  p.window_right = options.window_right;
  if (options.causal && (p.window_right < 0 || p.window_right > 0)) p.window_right = 0;
  // A negative window limits nothing, and neither does one that is longer than every sequence; kernels count keys in 32 bits.
  constexpr int64_t kUnlimited = int64_t(1) << 30;
  for (int64_t* const window : {&p.window_left, &p.window_right}) {
    if (*window < 0 || *window >= kUnlimited) *window = -1;
  }
  if (sinks) check_operand(op, "sinks", *sinks, call->q.scalar_type(), {p.heads_q}, {"q", call->q});
}

void set_softmax_tensors(AttentionCall* call) {
  std::optional<Tensor> const& sinks = call->options.softmax.sinks;
  if (sinks) call->operands.softmax.sinks = call->held.keep(contiguous(call->op, "sinks", *sinks));
}

/// How a kernel reads q: by TMA, but in split-KV kernels each of a warp's 32 lanes loads its part of a row (decode/queries.cuh).
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
  // A cache is never copied: check_cache_strides() has seen that TMA can address it.
  Tensor const k = p.cached ? call->k : readable(op, "k", call->k, kTmaRows), v = p.cached ? call->v : readable(op, "v", call->v, kTmaRows);
  o.k = call->held.keep(k);
  o.v = call->held.keep(v);
  set_strides(o.k_strides, k);
  set_strides(o.v_strides, v);
}

/// Checks and describes all but the lengths. q, k and v have `modes` modes.
AttentionCall checked_call(char const* op, Tensor const& q, Tensor const& k, Tensor const& v, int64_t modes,
                           AttentionOptions const& options, std::optional<std::string> const& kernel) {
  char const* layout = modes == 4 ? "[batch, seqlen, heads, head_dim]" : "[tokens, heads, head_dim]";
  NamedTensor const reference{"q", q};
  for (auto const& [name, x] : {std::pair{"q", &q}, std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (x->dim() != modes) fail(op, ": ", name, " must be ", layout, ", got ", *x);
    check_16bit(op, name, *x, reference);
  }
  int64_t const lead = modes - 3;
  for (int64_t i = 0; i < lead + 2; ++i) {
    if (k.size(i) != v.size(i)) fail(op, ": v must have k's modes but the last, got k ", k, " and v ", v);
  }
  AttentionCall call{op, q, k, v, options, kernel};
  AttentionProblem& p = call.problem;
  p.heads_q = q.size(lead + 1);
  p.heads_kv = k.size(lead + 1);
  p.head_dim = q.size(lead + 2);
  p.head_dim_v = v.size(lead + 2);
  p.type = data_type(q.scalar_type());
  if (k.size(lead + 2) != p.head_dim) fail(op, ": k must have q's head_dim = ", p.head_dim, ", got k ", k);
  check_sizes(op, p, q);
  set_options(&call);
  return call;
}

size_t hash_of_problem(AttentionProblem const& p) {
  uint64_t const dimensions = uint64_t(p.head_dim) | uint64_t(p.head_dim_v) << 16 | uint64_t(p.kv_format) << 32 | uint64_t(p.type) << 48;
  return hash_of({uint64_t(p.batch), uint64_t(p.heads_q), uint64_t(p.heads_kv), uint64_t(p.seqlen_q), uint64_t(p.seqlen_k),
                  uint64_t(p.tokens_q), uint64_t(p.tokens_k), uint64_t(p.window_left), uint64_t(p.window_right), uint64_t(p.num_splits),
                  dimensions, uint64_t(p.batch_invariant)});
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
  thread_local PlanCache<AttentionProblem, AttentionPlan, hash_of_problem> cache;
  return cache.get(call.problem, on.index(), 0, [&] { return make_plan(call, on.properties()); });
}

/// Plans, copies the inputs that the kernel cannot read, allocates the outputs and the workspace, and runs.
std::tuple<Tensor, Tensor> launch(AttentionCall& call, Shape shape, Shape lse_shape, OnDevice const& on) {
  char const* op = call.op;
  AttentionProblem const& p = call.problem;
  Tensor const out = call.out != nullptr ? *call.out : allocate(op, call.q, shape, call.q.scalar_type(), "the output of q ", call.q);
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
  set_softmax_tensors(&call);
  Workspace const workspace(op, out, plan.workspace_bytes, plan.kernel->name, " on q ", call.q, " and k ", call.k,
                            p.num_splits > 0 ? ", num_splits = " + std::to_string(p.num_splits) : std::string());
  Status const status = run_attention(plan, p, call.operands, on.properties(), workspace.data(), workspace.bytes(), on.stream());
  if (!status.ok()) fail(op, ": ", plan.kernel->name, " on q ", call.q, ", k ", call.k, ": ", status.message);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention(Tensor const& q, Tensor const& k, Tensor const& v, bool causal, std::optional<double> scale,
                                     int64_t window_left, int64_t window_right, SoftmaxArguments const& softmax,
                                     std::optional<std::string> const& kernel) {
  char const* op = "minfer::attention";
  AttentionCall call = checked_call(op, q, k, v, 4, {causal, scale, window_left, window_right, softmax}, kernel);
  AttentionProblem& p = call.problem;
  p.batch = q.size(0);
  if (k.size(0) != p.batch) fail(op, ": k and v must have q's batch ", p.batch, ", got k ", k);
  p.seqlen_q = q.size(1);
  p.seqlen_k = k.size(1);
  p.tokens_q = p.batch * p.seqlen_q;
  p.tokens_k = p.batch * p.seqlen_k;
  OnDevice const on(op, q);
  return launch(call, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, {p.batch, p.heads_q, p.seqlen_q}, on);
}

std::tuple<Tensor, Tensor> attention_varlen(Tensor const& q, Tensor const& k, Tensor const& v, Tensor const& cu_seqlens_q,
                                            Tensor const& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal,
                                            std::optional<double> scale, int64_t window_left, int64_t window_right,
                                            SoftmaxArguments const& softmax, std::optional<std::string> const& kernel) {
  char const* op = "minfer::attention_varlen";
  AttentionCall call = checked_call(op, q, k, v, 3, {causal, scale, window_left, window_right, softmax}, kernel);
  AttentionProblem& p = call.problem;
  if (cu_seqlens_q.dim() != 1 || cu_seqlens_q.size(0) < 1) fail(op, ": cu_seqlens_q must be [batch + 1], got ", cu_seqlens_q);
  p.varlen = true;
  p.batch = cu_seqlens_q.size(0) - 1;
  NamedTensor const reference{"q", q};
  check_operand(op, "cu_seqlens_q", cu_seqlens_q, ScalarType::Int, {p.batch + 1}, reference);
  check_operand(op, "cu_seqlens_k", cu_seqlens_k, ScalarType::Int, {p.batch + 1}, reference);
  if (max_seqlen_q < 0 || max_seqlen_k < 0) {
    fail(op, ": max_seqlen_q and max_seqlen_k must not be negative, got ", max_seqlen_q, " and ", max_seqlen_k);
  }
  p.tokens_q = q.size(0);
  p.tokens_k = k.size(0);
  p.seqlen_q = std::min(max_seqlen_q, p.tokens_q);
  p.seqlen_k = std::min(max_seqlen_k, p.tokens_k);
  OnDevice const on(op, q);
  call.operands.cu_seqlens_q = call.keep_lengths("cu_seqlens_q", cu_seqlens_q);
  call.operands.cu_seqlens_k = call.keep_lengths("cu_seqlens_k", cu_seqlens_k);
  return launch(call, {p.tokens_q, p.heads_q, p.head_dim_v}, {p.heads_q, p.tokens_q}, on);
}

/// The format, the sizes and the heads of a cache, and the heads of the queries, which have `modes` modes.
void describe_cache(AttentionCall* call, int64_t modes, std::string const& kv_format) {
  char const* op = call->op;
  AttentionProblem& p = call->problem;
  Tensor const &q = call->q, &k_cache = call->k, &v_cache = call->v;
  NamedTensor const reference{"q", q};
  p.cached = true;
  p.type = data_type(q.scalar_type());
  p.kv_format = check_format(op, kv_format, k_cache.scalar_type(), reference);
  check_cache(op, k_cache, v_cache, reference);
  int64_t const per_byte = codes_per_byte(p.kv_format);
  p.heads_q = q.size(modes - 2);
  p.head_dim = q.size(modes - 1);
  p.pages = k_cache.size(0);
  p.page_size = k_cache.size(1);
  p.heads_kv = k_cache.size(2);
  p.head_dim_v = v_cache.size(3) * per_byte;
  p.tokens_k = p.pages * p.page_size;
  if (k_cache.size(3) * per_byte != p.head_dim) {
    fail(op, ": k_cache must have q's head_dim = ", p.head_dim, per_byte == 2 ? ", two to a byte" : "", ", got ", k_cache);
  }
  check_sizes(op, p, q);
}

/// The batch, and how its queries lie in q: all sequences have as many, or cu_seqlens_q says where each one's end.
void describe_queries(AttentionCall* call, int64_t modes, Tensor const& seq_lens, std::optional<Tensor> const& cu_seqlens_q,
                      int64_t max_seqlen_q) {
  char const* op = call->op;
  AttentionProblem& p = call->problem;
  Tensor const& q = call->q;
  NamedTensor const reference{"q", q};
  if (seq_lens.dim() != 1) fail(op, ": seq_lens must be [batch], got ", seq_lens);
  p.batch = seq_lens.size(0);
  check_operand(op, "seq_lens", seq_lens, ScalarType::Int, {p.batch}, reference);
  if (max_seqlen_q < 0) fail(op, ": max_seqlen_q must not be negative, got ", max_seqlen_q);
  p.varlen = cu_seqlens_q.has_value();
  if (p.varlen) {
    if (modes != 3) fail(op, ": with cu_seqlens_q, q must be [tokens, heads, head_dim], got ", q);
    check_operand(op, "cu_seqlens_q", *cu_seqlens_q, ScalarType::Int, {p.batch + 1}, reference);
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
}

/// The most keys that a sequence can have: those of its row of the block table, or those of its own part of a contiguous cache.
void describe_pages(AttentionCall* call, std::optional<Tensor> const& block_table) {
  char const* op = call->op;
  AttentionProblem& p = call->problem;
  p.paged = block_table.has_value();
  if (p.paged) {
    if (block_table->dim() != 2) fail(op, ": block_table must be [batch, pages], got ", *block_table);
    check_operand(op, "block_table", *block_table, ScalarType::Int, {p.batch, block_table->size(1)}, {"q", call->q});
    if (p.page_size <= 0 || p.page_size % 8 != 0) fail(op, ": the page size must be a multiple of 8, got ", p.page_size);
    p.seqlen_k = block_table->size(1) * p.page_size;
  } else {
    if (p.pages != p.batch) fail(op, ": without a block_table, k_cache must have seq_lens' batch ", p.batch, ", got ", call->k);
    p.seqlen_k = p.page_size;
  }
}

void describe_scales(AttentionCall* call, KvScales const& scales) {
  AttentionProblem& p = call->problem;
  KvSizes const sizes{p.kv_format, p.pages, p.page_size, p.heads_kv, p.head_dim, p.head_dim_v, p.batch};
  KvGroups const groups = check_scales(call->op, sizes, scales, {"q", call->q});
  p.scale_per_head = groups.scale_per_head;
  p.group_tokens = groups.group_tokens;
  p.groups_v = groups.groups_v;
}

/// Scales and residuals as kernels read them: the scales of an fp8 cache one by one, all others in vectors of 16 bytes.
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

void set_block_table(AttentionCall* call, Tensor const& block_table) {
  Tensor const rows = unit_rows(call->op, "block_table", block_table);
  call->operands.block_table = static_cast<int32_t const*>(call->held.keep(rows));
  call->operands.block_table_stride = rows.stride(0);
}

/// A call's q, k and v are the queries and the caches.
std::tuple<Tensor, Tensor> attend_to_pages(AttentionCall& call, Tensor const& seq_lens, std::optional<Tensor> const& block_table,
                                           std::optional<Tensor> const& cu_seqlens_q, int64_t max_seqlen_q, KvScales const& scales,
                                           std::string const& kv_format, std::optional<int64_t> num_splits) {
  char const* op = call.op;
  Tensor const &q = call.q, &k_cache = call.k, &v_cache = call.v;
  int64_t const modes = q.dim();
  if (modes != 3 && modes != 4) fail(op, ": q must be [batch, seqlen_q, heads, head_dim] or [tokens, heads, head_dim], got ", q);
  check_16bit(op, "q", q);
  AttentionProblem& p = call.problem;
  describe_cache(&call, modes, kv_format);
  describe_queries(&call, modes, seq_lens, cu_seqlens_q, max_seqlen_q);
  describe_pages(&call, block_table);
  if (num_splits && (*num_splits < 1 || *num_splits > 256)) fail(op, ": num_splits must be 1 to 256, got ", *num_splits);
  if (num_splits && batch_invariant()) fail(op, ": num_splits must be None in the batch-invariant mode, got ", *num_splits);
  p.num_splits = num_splits ? *num_splits : 0;
  describe_scales(&call, scales);
  check_cache_strides(op, k_cache, v_cache);
  set_options(&call);
  OnDevice const on(op, q);
  set_scales(&call, scales);
  call.operands.seq_lens = call.keep_lengths("seq_lens", seq_lens);
  if (p.varlen) call.operands.cu_seqlens_q = call.keep_lengths("cu_seqlens_q", *cu_seqlens_q);
  if (p.paged) set_block_table(&call, *block_table);
  if (modes == 4) return launch(call, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v}, {p.batch, p.heads_q, p.seqlen_q}, on);
  if (call.out != nullptr) {
    check_operand(op, "out", *call.out, q.scalar_type(), {p.tokens_q, p.heads_q, p.head_dim_v}, {"q", q});
    if (!call.out->is_contiguous() || !call.out->is_aligned(16))
      fail(op, ": out must be contiguous and begin at 16 bytes, got ", *call.out);
  }
  return launch(call, {p.tokens_q, p.heads_q, p.head_dim_v}, {p.heads_q, p.tokens_q}, on);
}

std::tuple<Tensor, Tensor> attention_paged(Tensor const& q, Tensor const& k_cache, Tensor const& v_cache, Tensor const& seq_lens,
                                           std::optional<Tensor> const& block_table, std::optional<Tensor> const& cu_seqlens_q,
                                           int64_t max_seqlen_q, std::optional<Tensor> const& k_scale, std::optional<Tensor> const& v_scale,
                                           std::optional<Tensor> const& k_residual, std::optional<Tensor> const& v_residual,
                                           std::string const& kv_format, bool causal, std::optional<double> scale, int64_t window_left,
                                           SoftmaxArguments const& softmax, std::optional<int64_t> num_splits,
                                           std::optional<std::string> const& kernel) {
  AttentionCall call{"minfer::attention_paged", q, k_cache, v_cache, {causal, scale, window_left, -1, softmax}, kernel};
  KvScales const scales{k_scale, v_scale, k_residual, v_residual};
  return attend_to_pages(call, seq_lens, block_table, cu_seqlens_q, max_seqlen_q, scales, kv_format, num_splits);
}

/// Into a tensor of the caller's, of whom the lse is not asked for.
void attention_paged_into(Tensor const& q, Tensor const& k_cache, Tensor const& v_cache, Tensor const& seq_lens, Tensor const& block_table,
                          Tensor const& cu_seqlens_q, int64_t max_seqlen_q, std::optional<Tensor> const& k_scale,
                          std::optional<Tensor> const& v_scale, std::string const& kv_format, bool causal, double scale,
                          int64_t window_left, SoftmaxArguments const& softmax, Tensor const& out) {
  std::optional<std::string> const kernel;
  AttentionCall call{"minfer::_attention_paged_into", q, k_cache, v_cache, {causal, scale, window_left, -1, softmax}, kernel};
  call.out = &out;
  if (q.dim() != 3) fail(call.op, ": q must be [tokens, heads, head_dim], got ", q);
  std::optional<Tensor> const table = block_table, ends = cu_seqlens_q;
  KvScales const scales{k_scale, v_scale, std::nullopt, std::nullopt};
  attend_to_pages(call, seq_lens, table, ends, max_seqlen_q, scales, kv_format, std::nullopt);
}

constexpr Operator kOperators[] = {
    // softmax(scale * q k^T) v over the keys that each query sees (causal and windows are aligned to the last query and the last key), and
    // the logarithm of what the softmax divided by. q is [batch, seqlen_q, heads_q, head_dim], k and v are [batch, seqlen_k, heads_kv,
    // head_dim].
    {"attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None, int window_left=-1, "
     "int window_right=-1, " MINFER_SOFTMAX_ARGUMENTS ", str? kernel=None) -> (Tensor, Tensor)",
     boxed<&attention>},
    // The sequences lie end to end: q, k and v are [tokens, heads, head_dim].
    {"attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, *, "
     "bool causal=False, float? scale=None, int window_left=-1, int window_right=-1, " MINFER_SOFTMAX_ARGUMENTS
     ", str? kernel=None) -> (Tensor, Tensor)",
     boxed<&attention_varlen>},
    // Keys and values in a cache [pages, page_size, heads_kv, head_dim], or without a block_table [batch, length, heads_kv, head_dim].
    {"attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, *, Tensor? block_table=None, Tensor? cu_seqlens_q=None, "
     "int max_seqlen_q=1, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_residual=None, Tensor? v_residual=None, "
     "str kv_format='auto', bool causal=True, float? scale=None, int window_left=-1, " MINFER_SOFTMAX_ARGUMENTS
     ", int? num_splits=None, str? kernel=None) -> (Tensor, Tensor)",
     boxed<&attention_paged>},
    // The same for engines that have the output already.
    {"_attention_paged_into(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, Tensor block_table, Tensor cu_seqlens_q, "
     "int max_seqlen_q, Tensor? k_scale, Tensor? v_scale, str kv_format, bool causal, float scale, int window_left, float softcap, "
     "Tensor? sinks, Tensor(a!) out) -> ()",
     boxed<&attention_paged_into>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

/// The problem's keys and values lie in a cache: pages of page_size tokens, or with 0 a sequence each.
void plan_over_cache(char const* op, std::string const& kv_format, int64_t page_size, AttentionProblem* problem) {
  AttentionProblem& p = *problem;
  p.cached = true;
  p.kv_format = kv_format == "16bit" ? WeightFormat::kDense : parse_format(op, 0, kv_format);
  p.paged = page_size > 0;
  p.page_size = p.paged ? page_size : p.seqlen_k;
  int64_t const pages = p.paged ? (p.seqlen_k + page_size - 1) / page_size : 1;  // of a sequence
  p.seqlen_k = pages * p.page_size;
  p.pages = p.batch * pages;
  p.tokens_k = p.pages * p.page_size;
}

AttentionProblem problem_of(char const* op, std::vector<int64_t> const& sizes, std::string const& type, int64_t window_left,
                            int64_t window_right, bool varlen, std::optional<std::string> const& kv_format, int64_t page_size) {
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
  p.type = parse_16bit_type(op, type);
  if (kv_format) plan_over_cache(op, *kv_format, page_size, &p);
  return p;
}

std::string plan_attention_json(std::vector<int64_t> const& sizes, std::string const& type, int64_t window_left, int64_t window_right,
                                bool varlen, std::optional<std::string> const& kernel, bool only_runnable, int64_t device,
                                std::optional<std::string> const& kv_format, int64_t page_size, bool batch_invariant) {
  char const* op = "minfer::_plan_attention";
  AttentionProblem p = problem_of(op, sizes, type, window_left, window_right, varlen, kv_format, page_size);
  p.batch_invariant = batch_invariant;
  AttentionPlanOptions options;
  options.only_runnable = only_runnable;
  if (kernel) options.kernel = kernel->c_str();
  AttentionPlan plan;
  Status const status = plan_attention(p, device_properties(op, device), options, &plan);
  if (!status.ok()) fail(op, ": ", status.message);
  Json json;
  json.open('{').key("kernel").value(plan.kernel->name).key("pack").value(plan.packed_heads).key("counted").value(plan.counted);
  json.key("split_keys").value(plan.split_keys).key("split_rows").value(plan.split_rows).key("max_splits").value(plan.max_splits);
  json.key("split_count").value(plan.split_count);
  json.key("workspace_bytes").value(int64_t(plan.workspace_bytes)).key("predicted_us").value(plan.predicted_us);
  json.key("floor_us").value(plan.floor_us).key("reason").value(plan.reason).close('}');
  return json.text();
}

std::string attention_model() { return model_text<attention::CostModel>(attention::kCostConstants); }

/// Writes us[i, j], what the i-th model predicts of the j-th candidate, NaN where this build has no such kernel, and floor_us[j]. A
/// candidate is a line of batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v, type, window_left, window_right, varlen,
/// kv_format ("tensors": no cache), page_size, the keys of each sequence (0: the last page is nearly full, -1: nearly empty) and a kernel,
/// one space between any two.
void predict_attention(std::string const& models, std::string const& candidates, int64_t device, Tensor const& us, Tensor const& floor_us) {
  char const* op = "minfer::_predict_attention";
  struct Candidate {
    AttentionProblem problem;
    KernelInfo const* kernel;
    int64_t keys;
  };
  std::vector<Candidate> parsed;
  for (std::string const& line : split(candidates, '\n')) {
    if (line.empty()) continue;
    std::vector<std::string> const cells = split(line, ' ');
    if (cells.size() != 15) fail(op, ": expected 15 cells in a candidate's line, got '", line, "'");
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < 7; ++i) sizes.push_back(parse_integer(op, cells[i], 0, INT32_MAX));
    std::optional<std::string> const format = cells[11] == "tensors" ? std::nullopt : std::optional<std::string>(cells[11]);
    parsed.push_back(
        {problem_of(op, sizes, cells[7], parse_integer(op, cells[8], -1, INT32_MAX), parse_integer(op, cells[9], -1, INT32_MAX),
                    parse_flag(op, cells[10]), format, parse_integer(op, cells[12], 0, INT32_MAX)),
         find_kernel(cells[14].c_str()), parse_integer(op, cells[13], -1, INT32_MAX)});
  }
  auto const read = read_cost_models<attention::CostModel>(op, models, attention::kCostConstants);
  DeviceProperties const& properties = device_properties(op, device);
  double* out = predictions(op, "us", us, {int64_t(read.size()), int64_t(parsed.size())});
  double* floor = predictions(op, "floor_us", floor_us, {int64_t(parsed.size())});
  for (attention::CostModel const& model : read) {
    for (Candidate const& c : parsed) {
      AttentionProblem p = attention::with_last_page(c.problem, c.keys < 0 ? attention::kEmptyPage : attention::kFullPage);
      if (c.keys > 0) p.seqlen_k = c.keys;
      *out++ = c.kernel == nullptr ? std::nan("") : attention::predict_us(model, *c.kernel, p, properties);
    }
  }
  for (Candidate const& c : parsed) *floor++ = attention::floor_us(c.problem, properties);
}

/// JSON texts of what would run, and what the fit of the cost model needs.
constexpr Operator kPlanning[] = {
    {"_attention_model() -> str", boxed<&attention_model>},
    {"_predict_attention(str models, str candidates, int device, Tensor(a!) us, Tensor(b!) floor_us) -> ()", boxed<&predict_attention>},
    {"_plan_attention(int[] sizes, str type, int window_left, int window_right, bool varlen, str? kernel, bool only_runnable, int device, "
     "str? kv_format=None, int page_size=0, bool batch_invariant=False) -> str",
     boxed<&plan_attention_json>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kPlanning); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kPlanning); }

}  // namespace

}  // namespace minfer::torch_binding
