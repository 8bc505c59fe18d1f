// torch.ops.minfer.attention, attention_varlen and attention_paged on CUDA tensors: check, describe, plan, allocate, run.
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

/// Whether TMA can address it: unit stride along the last mode, 16-byte aligned base and strides, no broadcast mode.
bool fits_tma(Tensor const& x) {
  int64_t const unit = 16 / int64_t(x.element_size());
  bool fits = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i < x.dim(); ++i) {
    int64_t const stride = x.stride(i);
    if (x.size(i) > 1) fits = fits && (i + 1 == x.dim() ? stride == 1 : stride > 0 && stride % unit == 0);
  }
  return fits;
}
/// A copy where it cannot.
Tensor addressable(Tensor const& x) { return fits_tma(x) ? x : torch::stable::contiguous(x); }

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

void check_q(char const* op, Tensor const& q, int64_t modes, char const* layout) {
  if (q.dim() != modes) fail(op, ": q must be ", layout, ", got ", shape_of(q));
  if (!is_16bit_float(q.scalar_type())) fail(op, ": q must be float16 or bfloat16, got ", dtype_name(q.scalar_type()));
}

/// Heads and head dimensions, which the problem has already.
void check_sizes(char const* op, AttentionProblem const& p) {
  if (p.heads_kv == 0 ? p.heads_q != 0 : p.heads_q % p.heads_kv != 0) {
    fail(op, ": q's heads must be a multiple of k's, got ", p.heads_q, " and ", p.heads_kv);
  }
  if (p.head_dim <= 0 || p.head_dim % 8 != 0 || p.head_dim > kMaxHeadDim) {
    fail(op, ": head_dim must be a multiple of 8 up to ", kMaxHeadDim, ", got ", p.head_dim);
  }
  if (p.head_dim_v <= 0 || p.head_dim_v % 8 != 0 || p.head_dim_v > p.head_dim) {
    fail(op, ": v's head_dim must be a multiple of 8 up to q's ", p.head_dim, ", got ", p.head_dim_v);
  }
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
    torch::stable::accelerator::DeviceGuard const guard(call->device);
    check_operand(op, "sinks", *arguments.sinks, call->q.scalar_type(), {p.heads_q}, call->device);
    call->sinks = torch::stable::contiguous(*arguments.sinks);
    call->operands.sinks = call->sinks->data_ptr();
  }
}

/// q, k and v as TMA reads them.
void set_inputs(AttentionCall* call) {
  torch::stable::accelerator::DeviceGuard const guard(call->device);
  AttentionOperands& o = call->operands;
  call->q = addressable(call->q);
  call->k = addressable(call->k);
  call->v = addressable(call->v);
  o.q = call->q.data_ptr();
  o.k = call->k.data_ptr();
  o.v = call->v.data_ptr();
  set_strides(o.q_strides, call->q);
  set_strides(o.k_strides, call->k);
  set_strides(o.v_strides, call->v);
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
  check_sizes(op, p);
  set_options(&call, arguments);
  set_inputs(&call);
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
  int64_t const lse_modes = lse.dim();  // [batch, heads, seqlen_q] or [heads, tokens]
  call.operands.lse_strides[0] = lse_modes == 3 ? lse.stride(0) : p.seqlen_q;
  call.operands.lse_strides[1] = lse.stride(lse_modes - 2);
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

namespace {

/// kDense: of q's type. The dtype of codes tells them, or `name` does.
WeightFormat cache_format(char const* op, std::string const& name, ScalarType cache, ScalarType q) {
  struct {
    char const* name;
    WeightFormat format;
    ScalarType type, or_type;
  } const formats[] = {{"16bit", WeightFormat::kDense, q, q},
                       {"fp8_e4m3", WeightFormat::kFp8E4M3, ScalarType::Float8_e4m3fn, ScalarType::Byte},
                       {"int8", WeightFormat::kInt8, ScalarType::Char, ScalarType::Char},
                       {"int4", WeightFormat::kInt4, ScalarType::Byte, ScalarType::Byte}};
  for (auto const& f : formats) {
    if (name == "auto" ? cache == f.type : name == f.name) {
      if (cache != f.type && cache != f.or_type) {
        fail(op, ": a cache of kv_format '", f.name, "' must be ", dtype_name(f.type), ", got ", dtype_name(cache));
      }
      return f.format;
    }
  }
  if (name != "auto") fail(op, ": kv_format must be auto, 16bit, fp8_e4m3, int8 or int4, got '", name, "'");
  fail(op, ": k_cache must be ", dtype_name(q), " like q, float8_e4m3fn, int8 or uint8 (int4), got ", dtype_name(cache));
}

/// The scales and residuals that a format has, and no others; `batch` sequences.
void set_scales(AttentionCall* call, std::optional<Tensor> const& k_scale, std::optional<Tensor> const& v_scale,
                std::optional<Tensor> const& k_residual, std::optional<Tensor> const& v_residual) {
  char const* op = call->op;
  AttentionProblem& p = call->problem;
  AttentionOperands& o = call->operands;
  char const* format = p.kv_format == WeightFormat::kDense ? "16bit" : name_of(p.kv_format);
  struct {
    char const* name;
    std::optional<Tensor> const& given;
    bool wanted;
  } const optional[] = {{"k_scale", k_scale, p.kv_format != WeightFormat::kDense},
                        {"v_scale", v_scale, p.kv_format != WeightFormat::kDense},
                        {"k_residual", k_residual, p.kv_format == WeightFormat::kInt4},
                        {"v_residual", v_residual, p.kv_format == WeightFormat::kInt4}};
  for (auto const& [name, given, wanted] : optional) {
    if (given && !wanted) fail(op, ": kv_format '", format, "' has no ", name);
    if (!given && wanted) fail(op, ": kv_format '", format, "' needs ", name);
  }
  if (p.kv_format == WeightFormat::kDense) return;
  if (p.page_size % 8 != 0) {
    fail(op, ": kv_format '", format, "' needs a page size, or length of a contiguous cache, that is a multiple of 8, got ", p.page_size);
  }
  auto const take = [&](char const* name, Tensor const& x, ScalarType type, std::vector<int64_t> const& shape, std::optional<Tensor>* to) {
    check_operand(op, name, x, type, shape, call->device);
    *to = torch::stable::contiguous(x);
    if (reinterpret_cast<uintptr_t>((*to)->data_ptr()) % 16 != 0 && p.kv_format != WeightFormat::kFp8E4M3) {
      fail(op, ": ", name, "'s data must be 16-byte aligned");
    }
    return (*to)->data_ptr();
  };
  torch::stable::accelerator::DeviceGuard const guard(call->device);
  if (p.kv_format == WeightFormat::kFp8E4M3) {
    p.scale_per_head = k_scale->numel() != 1;
    for (auto const& [name, given] : {std::pair{"k_scale", &k_scale}, std::pair{"v_scale", &v_scale}}) {
      int64_t const numel = (*given)->numel();
      if ((*given)->dim() > 1 || (numel != 1 && numel != p.heads_kv) || (numel != 1) != p.scale_per_head) {
        fail(op, ": ", name, " must be [1] or [", p.heads_kv, "], both alike, got ", shape_of(**given));
      }
      check_operand(op, name, **given, ScalarType::Float, sizes_of(**given), call->device);
    }
    call->k_scale = torch::stable::contiguous(*k_scale);
    call->v_scale = torch::stable::contiguous(*v_scale);
    o.k_scale = call->k_scale->data_ptr();
    o.v_scale = call->v_scale->data_ptr();
    return;
  }
  if (p.kv_format == WeightFormat::kInt8) {
    std::vector<int64_t> const shape = {p.pages, p.heads_kv, p.page_size};
    o.k_scale = take("k_scale", *k_scale, ScalarType::Float, shape, &call->k_scale);
    o.v_scale = take("v_scale", *v_scale, ScalarType::Float, shape, &call->v_scale);
    return;
  }
  if (k_scale->dim() != 5 || v_scale->dim() != 4) {
    fail(op, ": int4 scales must be k_scale [pages, heads_kv, page_size / group, 2, head_dim] and v_scale [pages, heads_kv, 2 * groups, ",
         "page_size], got ", shape_of(*k_scale), " and ", shape_of(*v_scale));
  }
  int64_t const groups = k_scale->size(2);
  p.group_tokens = groups > 0 && p.page_size % groups == 0 ? p.page_size / groups : 0;
  if (p.page_size > 0 && p.group_tokens != 32 && p.group_tokens != 64) {
    fail(op, ": k_scale must have a group for 32 or 64 tokens of a page, got ", groups, " for ", p.page_size);
  }
  if (p.head_dim % 32 != 0 || p.head_dim_v % 32 != 0) {
    fail(op, ": kv_format 'int4' needs head dimensions that are multiples of 32, got ", p.head_dim, " and ", p.head_dim_v);
  }
  p.groups_v = v_scale->size(2) / 2;
  if (v_scale->size(2) % 2 != 0 || p.groups_v == 0 || (p.head_dim_v / 32) % p.groups_v != 0) {
    fail(op, ": v_scale must have a scale and a minimum for groups of 32, or multiples, of v's head_dim ", p.head_dim_v, ", got ",
         shape_of(*v_scale));
  }
  o.k_scale = take("k_scale", *k_scale, ScalarType::Half, {p.pages, p.heads_kv, groups, 2, p.head_dim}, &call->k_scale);
  o.v_scale = take("v_scale", *v_scale, ScalarType::Half, {p.pages, p.heads_kv, 2 * p.groups_v, p.page_size}, &call->v_scale);
  ScalarType const type = call->q.scalar_type();
  o.k_residual = take("k_residual", *k_residual, type, {p.batch, p.group_tokens, p.heads_kv, p.head_dim}, &call->k_residual);
  o.v_residual = take("v_residual", *v_residual, type, {p.batch, p.group_tokens, p.heads_kv, p.head_dim_v}, &call->v_residual);
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
  check_q(op, q, modes, "[batch, seqlen_q, heads, head_dim] or [tokens, heads, head_dim]");
  AttentionCall call{op, q, k_cache, v_cache, kernel, q.get_device_index()};
  AttentionProblem& p = call.problem;
  p.type = data_type(q.scalar_type());
  p.cached = true;
  p.kv_format = cache_format(op, kv_format, k_cache.scalar_type(), q.scalar_type());
  int64_t const per_byte = p.kv_format == WeightFormat::kInt4 ? 2 : 1;
  for (auto const& [name, x] : {std::pair{"k_cache", &k_cache}, std::pair{"v_cache", &v_cache}}) {
    if (x->dim() != 4) fail(op, ": ", name, " must be [pages or batch, page_size or length, heads_kv, head_dim], got ", shape_of(*x));
    check_same_device(op, name, *x, call.device);
  }
  if (v_cache.scalar_type() != k_cache.scalar_type()) {
    fail(op, ": v_cache must be ", dtype_name(k_cache.scalar_type()), " like k_cache, got ", dtype_name(v_cache.scalar_type()));
  }
  for (int64_t i = 0; i < 3; ++i) {
    if (k_cache.size(i) != v_cache.size(i)) {
      fail(op, ": v_cache must have k_cache's modes but the last, got k_cache ", shape_of(k_cache), " and v_cache ", shape_of(v_cache));
    }
  }
  p.heads_q = q.size(lead + 1);
  p.head_dim = q.size(lead + 2);
  p.pages = k_cache.size(0);
  p.page_size = k_cache.size(1);
  p.heads_kv = k_cache.size(2);
  p.head_dim_v = v_cache.size(3) * per_byte;
  if (k_cache.size(3) * per_byte != p.head_dim) {
    fail(op, ": k_cache must have q's head_dim = ", p.head_dim, per_byte == 2 ? ", two to a byte" : "", ", got ", shape_of(k_cache));
  }
  check_sizes(op, p);
  if (seq_lens.dim() != 1) fail(op, ": seq_lens must be [batch], got ", shape_of(seq_lens));
  p.batch = seq_lens.size(0);
  check_operand(op, "seq_lens", seq_lens, ScalarType::Int, {p.batch}, call.device);
  if (max_seqlen_q < 0) fail(op, ": max_seqlen_q must not be negative, got ", max_seqlen_q);
  p.varlen = cu_seqlens_q.has_value();
  if (p.varlen) {
    if (modes != 3) fail(op, ": with cu_seqlens_q, q must be [tokens, heads, head_dim], got ", shape_of(q));
    check_operand(op, "cu_seqlens_q", *cu_seqlens_q, ScalarType::Int, {p.batch + 1}, call.device);
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
  torch::stable::accelerator::DeviceGuard const guard(call.device);
  AttentionOperands& o = call.operands;
  if (p.paged) {
    if (block_table->dim() != 2) fail(op, ": block_table must be [batch, pages], got ", shape_of(*block_table));
    check_operand(op, "block_table", *block_table, ScalarType::Int, {p.batch, block_table->size(1)}, call.device);
    if (p.page_size <= 0 || p.page_size % 8 != 0) fail(op, ": the page size must be a multiple of 8, got ", p.page_size);
    call.block_table = unit_rows(*block_table);
    o.block_table = static_cast<int32_t const*>(call.block_table->data_ptr());
    o.block_table_stride = call.block_table->stride(0);
    p.seqlen_k = block_table->size(1) * p.page_size;
  } else {
    if (p.pages != p.batch) fail(op, ": without a block_table, k_cache must have seq_lens' batch ", p.batch, ", got ", shape_of(k_cache));
    p.seqlen_k = p.page_size;
  }
  p.tokens_k = p.pages * p.page_size;
  if (num_splits && (*num_splits < 1 || *num_splits > 256)) fail(op, ": num_splits must be 1 to 256, got ", *num_splits);
  p.num_splits = num_splits ? *num_splits : 0;
  set_scales(&call, k_scale, v_scale, k_residual, v_residual);
  for (auto const& [name, x] : {std::pair{"k_cache", &k_cache}, std::pair{"v_cache", &v_cache}}) {  // never copied
    if (x->numel() > 0 && !fits_tma(*x)) {
      fail(op, ": ", name, " must have a contiguous head_dim, and a base and strides that are multiples of 16 bytes, got ", shape_of(*x));
    }
  }
  set_options(&call, {causal, scale, window_left, -1, softcap, sinks, kernel});
  call.q = addressable(q);
  o.q = call.q.data_ptr();
  set_strides(o.q_strides, call.q);
  if (modes == 3 && !p.varlen) o.q_strides[0] = p.seqlen_q * o.q_strides[1];
  o.k = k_cache.data_ptr();
  o.v = v_cache.data_ptr();
  set_strides(o.k_strides, k_cache);
  set_strides(o.v_strides, v_cache);
  call.seq_lens = torch::stable::contiguous(seq_lens);
  o.seq_lens = static_cast<int32_t const*>(call.seq_lens->data_ptr());
  if (p.varlen) {
    call.cu_seqlens_q = torch::stable::contiguous(*cu_seqlens_q);
    o.cu_seqlens_q = static_cast<int32_t const*>(call.cu_seqlens_q->data_ptr());
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
