// Writes new keys and values into a cache, on CUDA tensors. The checks are those of python/minfer/checks/kv_cache.py, in the same order.
#include "minfer/kv_cache.h"

#include "core/checks.h"
#include "core/device.h"
#include "core/operators.h"
#include "kv_formats.h"

namespace minfer::torch_binding {

namespace {

/// The new rows of K or of V, and the cache that they go to.
void set_rows(KvRows* rows, Tensor const& x, Tensor const& cache, std::optional<Tensor> const& scale,
              std::optional<Tensor> const& residual) {
  rows->x = x.data_ptr();
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
  check_head_dims(op, reference, p.k.head_dim, p.v.head_dim);
  p.kv_format = check_format(op, kv_format, k_cache.scalar_type(), reference);
  check_cache(op, k_cache, v_cache, reference);
  p.pages = k_cache.size(0);
  p.page_size = k_cache.size(1);
  int64_t const per_byte = codes_per_byte(p.kv_format);
  for (auto const& [name, cache, own] : {std::tuple{"k", &k_cache, p.k.head_dim}, std::tuple{"v", &v_cache, p.v.head_dim}}) {
    if (cache->size(2) != p.heads_kv || cache->size(3) * per_byte != own) {
      fail(op, ": ", name, "_cache must have ", name, "'s heads_kv = ", p.heads_kv, " and head_dim = ", own,
           per_byte == 2 ? ", two to a byte" : "", ", got ", *cache);
    }
  }
  check_operand(op, "slot_mapping", slot_mapping, ScalarType::Long, {p.tokens}, reference);
  p.batch = p.tokens;
  if (cu_seqlens) {
    if (cu_seqlens->dim() != 1 || cu_seqlens->size(0) < 1) fail(op, ": cu_seqlens must be [batch + 1], got ", *cu_seqlens);
    check_operand(op, "cu_seqlens", *cu_seqlens, ScalarType::Int, cu_seqlens->sizes(), reference);
    p.batch = cu_seqlens->size(0) - 1;
    p.cu_seqlens = static_cast<int32_t const*>(cu_seqlens->data_ptr());
    p.cu_seqlens_stride = cu_seqlens->stride(0);
  }
  KvSizes const sizes{p.kv_format, p.pages, p.page_size, p.heads_kv, p.k.head_dim, p.v.head_dim, p.batch};
  KvGroups const groups = check_scales(op, sizes, {k_scale, v_scale, k_residual, v_residual}, reference);
  p.group_tokens = groups.group_tokens;
  p.groups_v = groups.groups_v;
  check_cache_strides(op, k_cache, v_cache);
  if (p.kv_format != WeightFormat::kFp8E4M3) {
    for (auto const& [name, x] : {std::pair{"k_scale", &k_scale}, std::pair{"v_scale", &v_scale}, std::pair{"k_residual", &k_residual},
                                  std::pair{"v_residual", &v_residual}}) {
      if (!*x || (*x)->is_contiguous()) continue;
      fail(op, ": ", name, " must be contiguous, for it is written, got strides ", Listed{(*x)->strides()});
    }
  }
  if (k_scale && v_scale && p.kv_format != WeightFormat::kFp8E4M3) check_no_overlap(op, *k_scale, "v_scale", *v_scale, "k_scale");
  if (k_residual && v_residual) check_no_overlap(op, *k_residual, "v_residual", *v_residual, "k_residual");
  check_no_overlap(op, k_cache, "k", k, "k_cache");
  check_no_overlap(op, v_cache, "v", v, "v_cache");
  set_rows(&p.k, k, k_cache, k_scale, k_residual);
  set_rows(&p.v, v, v_cache, v_scale, v_residual);
  p.slots = static_cast<int64_t const*>(slot_mapping.data_ptr());
  p.slots_stride = slot_mapping.stride(0);
  OnDevice const on(op, k);
  Status const status = append_to_kv_cache(p, on.properties(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": k ", k, ", v ", v, " to a cache ", k_cache, ": ", status.message);
}

constexpr Operator kOperators[] = {
    // Token i of k and v goes to slot slot_mapping[i] of the cache, in the cache's format.
    {"kv_cache_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, *, Tensor(c!)? k_scale=None, "
     "Tensor(d!)? v_scale=None, Tensor(e!)? k_residual=None, Tensor(f!)? v_residual=None, Tensor? cu_seqlens=None, "
     "str kv_format='auto') -> ()",
     boxed<&kv_cache_append>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(minfer, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(minfer, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
