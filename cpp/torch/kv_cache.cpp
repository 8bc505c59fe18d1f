// Writes new keys and values into a cache, on CUDA tensors. The checks are those of python/minfer/checks/kv_cache.py, in the same order.
#include "minfer/kv_cache.h"

#include "common/aligned_vector.cuh"
#include "core/checks.h"
#include "core/device.h"
#include "core/operators.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "kv_formats.h"
#include "rotary_table.h"

namespace minfer::torch_binding {

namespace {

/// The new rows of K or of V, which are the heads from `first_head` on of x [tokens, heads, head_dim], and the cache that they go to.
void set_rows(KvRows* rows, Tensor const& x, int64_t first_head, Tensor const& cache, std::optional<Tensor> const& scale,
              std::optional<Tensor> const& residual) {
  rows->x = static_cast<char*>(x.data_ptr()) + first_head * x.stride(1) * 2;
  rows->cache = cache.data_ptr();
  for (int64_t i = 0; i < 3; ++i) {
    rows->x_strides[i] = x.stride(i);
    rows->cache_strides[i] = cache.stride(i);
  }
  if (scale) {
    rows->scale = scale->data_ptr();
    rows->scale_stride = scale->numel() > 1 ? scale->stride(0) : 0;
  }
  if (residual) rows->residual = residual->data_ptr();
}

using OptionalTensor = std::optional<Tensor>;

/// The cache that tokens are appended to, and what belongs to it.
struct AppendTo {
  Tensor const &k_cache, &v_cache, &slot_mapping;
  OptionalTensor const &k_scale, &v_scale, &k_residual, &v_residual, &cu_seqlens;
  std::string const& kv_format;
};

/// Checks it against `p`, which knows type, tokens, heads and head dimensions of the new rows, and completes that but for these rows.
void check_append(char const* op, AppendTo const& to, NamedTensor const& reference, KvAppend* p) {
  check_head_dims(op, reference, p->k.head_dim, p->v.head_dim);
  p->kv_format = check_format(op, to.kv_format, to.k_cache.scalar_type(), reference);
  check_cache(op, to.k_cache, to.v_cache, reference);
  p->pages = to.k_cache.size(0);
  p->page_size = to.k_cache.size(1);
  int64_t const per_byte = codes_per_byte(p->kv_format);
  for (auto const& [name, cache, own] : {std::tuple{"k", &to.k_cache, p->k.head_dim}, std::tuple{"v", &to.v_cache, p->v.head_dim}}) {
    if (cache->size(2) != p->heads_kv || cache->size(3) * per_byte != own) {
      fail(op, ": ", name, "_cache must have ", name, "'s heads_kv = ", p->heads_kv, " and head_dim = ", own,
           per_byte == 2 ? ", two to a byte" : "", ", got ", *cache);
    }
  }
  check_operand(op, "slot_mapping", to.slot_mapping, ScalarType::Long, {p->tokens}, reference);
  p->batch = p->tokens;
  if (to.cu_seqlens) {
    Tensor const& ends = *to.cu_seqlens;
    if (ends.dim() != 1 || ends.size(0) < 1) fail(op, ": cu_seqlens must be [batch + 1], got ", ends);
    check_operand(op, "cu_seqlens", ends, ScalarType::Int, ends.sizes(), reference);
    p->batch = ends.size(0) - 1;
    p->cu_seqlens = static_cast<int32_t const*>(ends.data_ptr());
    p->cu_seqlens_stride = ends.stride(0);
  }
  KvSizes const sizes{p->kv_format, p->pages, p->page_size, p->heads_kv, p->k.head_dim, p->v.head_dim, p->batch};
  KvGroups const groups = check_scales(op, sizes, {to.k_scale, to.v_scale, to.k_residual, to.v_residual}, reference);
  p->group_tokens = groups.group_tokens;
  p->groups_v = groups.groups_v;
  check_cache_strides(op, to.k_cache, to.v_cache);
  if (p->kv_format != WeightFormat::kFp8E4M3) {
    for (auto const& [name, x] : {std::pair{"k_scale", &to.k_scale}, std::pair{"v_scale", &to.v_scale},
                                  std::pair{"k_residual", &to.k_residual}, std::pair{"v_residual", &to.v_residual}}) {
      if (!*x || (*x)->is_contiguous()) continue;
      fail(op, ": ", name, " must be contiguous, for it is written, got strides ", Listed{(*x)->strides()});
    }
  }
  if (to.k_scale && to.v_scale && p->kv_format != WeightFormat::kFp8E4M3) {
    check_no_overlap(op, *to.k_scale, "v_scale", *to.v_scale, "k_scale");
  }
  if (to.k_residual && to.v_residual) check_no_overlap(op, *to.k_residual, "v_residual", *to.v_residual, "k_residual");
  p->slots = static_cast<int64_t const*>(to.slot_mapping.data_ptr());
  p->slots_stride = to.slot_mapping.stride(0);
}

void kv_cache_append(Tensor const& k, Tensor const& v, Tensor const& k_cache, Tensor const& v_cache, Tensor const& slot_mapping,
                     std::optional<Tensor> const& k_scale, std::optional<Tensor> const& v_scale, std::optional<Tensor> const& k_residual,
                     std::optional<Tensor> const& v_residual, std::optional<Tensor> const& cu_seqlens, std::string const& kv_format) {
  char const* op = "minfer::kv_cache_append";
  NamedTensor const reference{"k", k};
  KvAppend p;
  for (auto const& [name, x] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (x->dim() != 3) fail(op, ": ", name, " must be [tokens, heads_kv, head_dim], got ", *x);
    check_16bit(op, name, *x, reference);
  }
  if (v.size(0) != k.size(0) || v.size(1) != k.size(1)) {
    fail(op, ": v must have k's modes but the last, got k ", k, " and v ", v);
  }
  p.type = data_type(k.scalar_type());
  p.tokens = k.size(0);
  p.heads_kv = k.size(1);
  p.k.head_dim = k.size(2);
  p.v.head_dim = v.size(2);
  check_append(op, {k_cache, v_cache, slot_mapping, k_scale, v_scale, k_residual, v_residual, cu_seqlens, kv_format}, reference, &p);
  check_no_overlap(op, k_cache, "k", k, "k_cache");
  check_no_overlap(op, v_cache, "v", v, "v_cache");
  set_rows(&p.k, k, 0, k_cache, k_scale, k_residual);
  set_rows(&p.v, v, 0, v_cache, v_scale, v_residual);
  OnDevice const on(op, k);
  Status const status = append_to_kv_cache(p, nullptr, on.properties(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": k ", k, ", v ", v, " to a cache ", k_cache, ": ", status.message);
}

bool rows_begin_vectors(Tensor const& x) {
  return begins_vector(x.data_ptr()) && x.stride(2) == 1 && x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0;
}

Tensor qk_norm_rope_append(Tensor const& qkv, std::optional<Tensor> const& q_weight, std::optional<Tensor> const& k_weight,
                           Tensor const& cos_sin, Tensor const& positions, Tensor const& k_cache, Tensor const& v_cache,
                           Tensor const& slot_mapping, double eps, double weight_offset, bool interleaved,
                           std::optional<int64_t> const& rotary_dim, std::optional<Tensor> const& k_scale,
                           std::optional<Tensor> const& v_scale, std::optional<Tensor> const& k_residual,
                           std::optional<Tensor> const& v_residual, std::optional<Tensor> const& cu_seqlens, std::string const& kv_format) {
  char const* op = "minfer::qk_norm_rope_append";
  NamedTensor const reference{"qkv", qkv};
  if (qkv.dim() != 3) fail(op, ": qkv must be [tokens, heads + 2 * heads_kv, head_dim], got ", qkv);
  check_16bit(op, "qkv", qkv);
  int64_t const tokens = qkv.size(0), head_dim = qkv.size(2);
  for (auto const& [name, weight] : {std::pair{"q_weight", &q_weight}, std::pair{"k_weight", &k_weight}}) {
    if (*weight) check_operand(op, name, **weight, qkv.scalar_type(), {head_dim}, reference);
  }
  NormRope of;
  of.eps = eps_in_float32(op, eps);
  of.weight_offset = in_float32(op, "weight_offset", weight_offset);
  RotaryTable const table = check_rotary_table(op, cos_sin, positions, rotary_dim, tokens, head_dim, reference);
  KvAppend p;
  p.type = data_type(qkv.scalar_type());
  p.tokens = tokens;
  p.heads_kv = k_cache.dim() == 4 ? k_cache.size(2) : 0;
  p.k.head_dim = p.v.head_dim = head_dim;
  check_append(op, {k_cache, v_cache, slot_mapping, k_scale, v_scale, k_residual, v_residual, cu_seqlens, kv_format}, reference, &p);
  int64_t const heads = qkv.size(1) - 2 * p.heads_kv;
  if (heads < 0) {
    fail(op, ": qkv must be [tokens, heads + 2 * heads_kv, head_dim], of a cache with heads_kv = ", p.heads_kv, ", got ", qkv);
  }
  check_no_overlap(op, k_cache, "qkv", qkv, "k_cache");
  check_no_overlap(op, v_cache, "qkv", qkv, "v_cache");
  OnDevice const on(op, qkv);
  Tensor const q = allocate(op, qkv, {tokens, heads, head_dim}, qkv.scalar_type(), "the queries of qkv ", qkv);
  auto const aligned = [&](char const* name, OptionalTensor const& x) {
    if (!x) return Tensor();
    Tensor const held = contiguous(op, name, *x);
    return begins_vector(held.data_ptr()) ? held : copy_of(op, name, held);
  };
  Tensor const rows = rows_begin_vectors(qkv) ? qkv : copy_of(op, "qkv", qkv);
  Tensor const of_q = aligned("q_weight", q_weight), of_k = aligned("k_weight", k_weight);
  Tensor const held_table = contiguous(op, "cos_sin", cos_sin), held_positions = contiguous(op, "positions", positions);
  set_rows(&p.k, rows, heads, k_cache, k_scale, k_residual);
  set_rows(&p.v, rows, heads + p.heads_kv, v_cache, v_scale, v_residual);
  of.q = rows.data_ptr();
  for (int64_t i = 0; i < 3; ++i) of.q_strides[i] = rows.stride(i);
  of.q_out = q.data_ptr();
  of.heads = heads;
  if (of_q.defined()) of.q_weight = of_q.data_ptr();
  if (of_k.defined()) of.k_weight = of_k.data_ptr();
  of.cos_sin = static_cast<float const*>(held_table.data_ptr());
  of.length = table.length;
  of.rotary_dim = table.rotary_dim;
  of.positions = held_positions.data_ptr();
  of.positions_64bit = table.positions_64bit;
  of.interleaved = interleaved;
  Status const status = append_to_kv_cache(p, &of, on.properties(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": qkv ", qkv, " to a cache ", k_cache, ": ", status.message);
  return q;
}

constexpr Operator kOperators[] = {
    // Token i of k and v goes to slot slot_mapping[i] of the cache, in the cache's format.
    {"kv_cache_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, *, Tensor(c!)? k_scale=None, "
     "Tensor(d!)? v_scale=None, Tensor(e!)? k_residual=None, Tensor(f!)? v_residual=None, Tensor? cu_seqlens=None, "
     "str kv_format='auto') -> ()",
     boxed<&kv_cache_append>},
    // The same of a GEMM's q, k and v, of which q and k are normalised and rotated first; the queries.
    {"qk_norm_rope_append(Tensor qkv, Tensor? q_weight, Tensor? k_weight, Tensor cos_sin, Tensor positions, Tensor(a!) k_cache, "
     "Tensor(b!) v_cache, Tensor slot_mapping, *, float eps=1e-06, float weight_offset=0.0, bool interleaved=False, "
     "int? rotary_dim=None, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, Tensor(e!)? k_residual=None, "
     "Tensor(f!)? v_residual=None, Tensor? cu_seqlens=None, str kv_format='auto') -> Tensor",
     boxed<&qk_norm_rope_append>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
