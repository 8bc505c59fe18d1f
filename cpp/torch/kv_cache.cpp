// torch.ops.minfer.kv_cache_append on CUDA tensors. The checks are those of python/minfer/checks_kv_cache.py, in their order.
#include "minfer/kv_cache.h"

#include "bindings.h"
#include "gemm/launch.h"

namespace minfer::torch_binding {

namespace {

std::string text_of(std::vector<int64_t> const& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

std::string device_of(Tensor const& x) {
  return x.is_cuda() ? "cuda:" + std::to_string(x.get_device_index()) : x.is_cpu() ? "cpu" : "another kind of device";
}

/// Checks beside an operand `k`, which messages name.
struct Checks {
  char const* op;
  Tensor const& k;

  void device(char const* name, Tensor const& x) const {
    if (x.is_cuda() != k.is_cuda() || x.get_device_index() != k.get_device_index()) {
      fail(op, ": ", name, " must be on k's device ", device_of(k), ", got ", device_of(x));
    }
  }
  void type(char const* name, Tensor const& x, ScalarType type) const {
    if (x.scalar_type() != type) fail(op, ": ", name, " must be ", dtype_name(type), ", got ", dtype_name(x.scalar_type()));
    device(name, x);
  }
  void shape(char const* name, Tensor const& x, std::vector<int64_t> const& shape) const {
    if (sizes_of(x) != shape) fail(op, ": ", name, " must be ", text_of(shape), ", got ", shape_of(x));
  }
};

/// kDense: of k's type. The dtype of codes tells them, or `name` does.
WeightFormat format_of(char const* op, std::string const& name, ScalarType codes, ScalarType k) {
  struct {
    char const* name;
    WeightFormat format;
    ScalarType type, or_type;
  } const formats[] = {{"16bit", WeightFormat::kDense, k, k},
                       {"fp8_e4m3", WeightFormat::kFp8E4M3, ScalarType::Float8_e4m3fn, ScalarType::Byte},
                       {"int8", WeightFormat::kInt8, ScalarType::Char, ScalarType::Char},
                       {"int4", WeightFormat::kInt4, ScalarType::Byte, ScalarType::Byte}};
  for (auto const& f : formats) {
    if (name == "auto" ? codes != f.type : name != f.name) continue;
    if (codes != f.type && codes != f.or_type) {
      fail(op, ": a cache of kv_format '", f.name, "' must be ", dtype_name(f.type), ", got ", dtype_name(codes));
    }
    return f.format;
  }
  if (name != "auto") fail(op, ": kv_format must be auto, 16bit, fp8_e4m3, int8 or int4, got '", name, "'");
  fail(op, ": k_cache must be ", dtype_name(k), " like k, float8_e4m3fn, int8 or uint8 (int4), got ", dtype_name(codes));
}

/// Scales and residuals, by the names messages give them.
struct Scales {
  std::optional<Tensor> const &k_scale, &v_scale, &k_residual, &v_residual;
};

/// Those that the format has, and no others; sets int4's groups.
void check_scales(Checks const& checks, Scales const& scales, KvAppend* append) {
  char const* op = checks.op;
  KvAppend& p = *append;
  char const* format = p.kv_format == WeightFormat::kDense ? "16bit" : name_of(p.kv_format);
  struct {
    char const* name;
    std::optional<Tensor> const& given;
    bool wanted;
  } const optional[] = {{"k_scale", scales.k_scale, p.kv_format != WeightFormat::kDense},
                        {"v_scale", scales.v_scale, p.kv_format != WeightFormat::kDense},
                        {"k_residual", scales.k_residual, p.kv_format == WeightFormat::kInt4},
                        {"v_residual", scales.v_residual, p.kv_format == WeightFormat::kInt4}};
  for (auto const& [name, given, wanted] : optional) {
    if (given && !wanted) fail(op, ": kv_format '", format, "' has no ", name);
    if (!given && wanted) fail(op, ": kv_format '", format, "' needs ", name);
  }
  if (p.kv_format == WeightFormat::kDense) return;
  if (p.page_size % 8 != 0) {
    fail(op, ": kv_format '", format, "' needs a page size, or length of a contiguous cache, that is a multiple of 8, got ", p.page_size);
  }
  auto const take = [&](char const* name, Tensor const& x, ScalarType type, std::vector<int64_t> const& shape) {
    checks.shape(name, x, shape);
    checks.type(name, x, type);
  };
  Tensor const &k_scale = *scales.k_scale, &v_scale = *scales.v_scale;
  if (p.kv_format == WeightFormat::kFp8E4M3) {
    int64_t const numel = k_scale.numel();
    for (auto const& [name, x] : {std::pair{"k_scale", &k_scale}, std::pair{"v_scale", &v_scale}}) {
      if (x->dim() > 1 || (numel != 1 && numel != p.heads_kv) || x->numel() != numel) {
        fail(op, ": ", name, " must be [1] or [", p.heads_kv, "], both alike, got ", shape_of(*x));
      }
      checks.type(name, *x, ScalarType::Float);
    }
    return;
  }
  if (p.kv_format == WeightFormat::kInt8) {
    take("k_scale", k_scale, ScalarType::Float, {p.pages, p.heads_kv, p.page_size});
    take("v_scale", v_scale, ScalarType::Float, {p.pages, p.heads_kv, p.page_size});
    return;
  }
  if (k_scale.dim() != 5 || v_scale.dim() != 4) {
    fail(op, ": int4 scales must be k_scale [pages, heads_kv, page_size / group, 2, head_dim] and v_scale [pages, heads_kv, 2 * groups, ",
         "page_size], got ", shape_of(k_scale), " and ", shape_of(v_scale));
  }
  int64_t const groups = k_scale.size(2), rows = v_scale.size(2);
  p.group_tokens = groups > 0 && p.page_size % groups == 0 ? p.page_size / groups : 0;
  if (p.page_size != 0 && p.group_tokens != 32 && p.group_tokens != 64) {
    fail(op, ": k_scale must have a group for 32 or 64 tokens of a page, got ", groups, " for ", p.page_size);
  }
  if (p.k.head_dim % 32 != 0 || p.v.head_dim % 32 != 0) {
    fail(op, ": kv_format 'int4' needs head dimensions that are multiples of 32, got ", p.k.head_dim, " and ", p.v.head_dim);
  }
  p.groups_v = rows / 2;
  if (rows < 2 || rows % 2 != 0 || p.v.head_dim / 32 % p.groups_v != 0) {
    fail(op, ": v_scale must have a scale and a minimum for groups of 32, or multiples, of v's head_dim ", p.v.head_dim, ", got ",
         shape_of(v_scale));
  }
  ScalarType const type = checks.k.scalar_type();
  take("k_scale", k_scale, ScalarType::Half, {p.pages, p.heads_kv, groups, 2, p.k.head_dim});
  take("v_scale", v_scale, ScalarType::Half, {p.pages, p.heads_kv, rows, p.page_size});
  take("k_residual", *scales.k_residual, type, {p.batch, p.group_tokens, p.heads_kv, p.k.head_dim});
  take("v_residual", *scales.v_residual, type, {p.batch, p.group_tokens, p.heads_kv, p.v.head_dim});
}

/// That codes are stored 16 bytes at a time, as attention_paged reads them: caches are never copied.
void check_strides(char const* op, char const* name, Tensor const& x) {
  if (x.numel() == 0) return;
  int64_t const unit = 16 / int64_t(x.element_size());
  bool fits = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) != 1) fits = fits && (i + 1 == x.dim() ? x.stride(i) == 1 : x.stride(i) > 0 && x.stride(i) % unit == 0);
  }
  if (!fits) {
    fail(op, ": ", name, " must have a contiguous head_dim, and a base and strides that are multiples of 16 bytes, got ", shape_of(x));
  }
}

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

}  // namespace

void kv_cache_append(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping, std::optional<Tensor> k_scale,
                     std::optional<Tensor> v_scale, std::optional<Tensor> k_residual, std::optional<Tensor> v_residual,
                     std::optional<Tensor> cu_seqlens, std::string kv_format) {
  char const* op = "minfer::kv_cache_append";
  Checks const checks{op, k};
  KvAppend p;
  for (auto const& [name, x] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (x->dim() != 3) fail(op, ": ", name, " must be [tokens, heads_kv, head_dim], got ", shape_of(*x));
    if (!is_16bit_float(k.scalar_type())) fail(op, ": k must be float16 or bfloat16, got ", dtype_name(k.scalar_type()));
    if (x->scalar_type() != k.scalar_type()) {
      fail(op, ": ", name, " must be float16 or bfloat16 like k, got ", dtype_name(x->scalar_type()), " beside ",
           dtype_name(k.scalar_type()));
    }
    checks.device(name, *x);
  }
  if (v.size(0) != k.size(0) || v.size(1) != k.size(1)) {
    fail(op, ": v must have k's modes but the last, got k ", shape_of(k), " and v ", shape_of(v));
  }
  p.type = data_type(k.scalar_type());
  p.tokens = k.size(0);
  p.heads_kv = k.size(1);
  p.k.head_dim = k.size(2);
  p.v.head_dim = v.size(2);
  if (p.k.head_dim <= 0 || p.k.head_dim % 8 != 0 || p.k.head_dim > kMaxCacheHeadDim) {
    fail(op, ": head_dim must be a multiple of 8 up to ", kMaxCacheHeadDim, ", got ", p.k.head_dim);
  }
  if (p.v.head_dim <= 0 || p.v.head_dim % 8 != 0 || p.v.head_dim > p.k.head_dim) {
    fail(op, ": v's head_dim must be a multiple of 8 up to k's ", p.k.head_dim, ", got ", p.v.head_dim);
  }
  p.kv_format = format_of(op, kv_format, k_cache.scalar_type(), k.scalar_type());
  for (auto const& [name, x] : {std::pair{"k_cache", &k_cache}, std::pair{"v_cache", &v_cache}}) {
    if (x->dim() != 4) fail(op, ": ", name, " must be [pages or batch, page_size or length, heads_kv, head_dim], got ", shape_of(*x));
    checks.device(name, *x);
  }
  if (v_cache.scalar_type() != k_cache.scalar_type()) {
    fail(op, ": v_cache must be ", dtype_name(k_cache.scalar_type()), " like k_cache, got ", dtype_name(v_cache.scalar_type()));
  }
  for (int64_t i = 0; i < 3; ++i) {
    if (k_cache.size(i) != v_cache.size(i)) {
      fail(op, ": v_cache must have k_cache's modes but the last, got k_cache ", shape_of(k_cache), " and v_cache ", shape_of(v_cache));
    }
  }
  p.pages = k_cache.size(0);
  p.page_size = k_cache.size(1);
  int64_t const per_byte = p.kv_format == WeightFormat::kInt4 ? 2 : 1;
  for (auto const& [name, cache, own] : {std::tuple{"k", &k_cache, p.k.head_dim}, std::tuple{"v", &v_cache, p.v.head_dim}}) {
    if (cache->size(2) != p.heads_kv || cache->size(3) * per_byte != own) {
      fail(op, ": ", name, "_cache must have ", name, "'s heads_kv = ", p.heads_kv, " and head_dim = ", own,
           per_byte == 2 ? ", two to a byte" : "", ", got ", shape_of(*cache));
    }
  }
  checks.shape("slot_mapping", slot_mapping, {p.tokens});
  checks.type("slot_mapping", slot_mapping, ScalarType::Long);
  p.batch = p.tokens;
  if (cu_seqlens) {
    if (cu_seqlens->dim() != 1 || cu_seqlens->size(0) < 1) fail(op, ": cu_seqlens must be [batch + 1], got ", shape_of(*cu_seqlens));
    checks.type("cu_seqlens", *cu_seqlens, ScalarType::Int);
    p.batch = cu_seqlens->size(0) - 1;
    p.cu_seqlens = static_cast<int32_t const*>(cu_seqlens->data_ptr());
    p.cu_seqlens_stride = cu_seqlens->stride(0);
  }
  Scales const scales{k_scale, v_scale, k_residual, v_residual};
  check_scales(checks, scales, &p);
  check_strides(op, "k_cache", k_cache);
  check_strides(op, "v_cache", v_cache);
  if (p.kv_format != WeightFormat::kFp8E4M3) {
    for (auto const& [name, x] : {std::pair{"k_scale", &k_scale}, std::pair{"v_scale", &v_scale}, std::pair{"k_residual", &k_residual},
                                  std::pair{"v_residual", &v_residual}}) {
      if (!*x || (*x)->is_contiguous()) continue;
      std::vector<int64_t> strides;
      for (int64_t i = 0; i < (*x)->dim(); ++i) strides.push_back((*x)->stride(i));
      fail(op, ": ", name, " must be contiguous, for it is written, got strides ", text_of(strides));
    }
  }
  set_rows(&p.k, k, k_cache, k_scale, k_residual);
  set_rows(&p.v, v, v_cache, v_scale, v_residual);
  p.slots = static_cast<int64_t const*>(slot_mapping.data_ptr());
  p.slots_stride = slot_mapping.stride(0);
  int32_t const index = k.get_device_index();
  torch::stable::accelerator::DeviceGuard const guard(index);
  DeviceProperties const& device = device_properties(index);
  bool const programmatic = device.compute_capability() >= 90 && gemm::programmatic_launch_enabled();
  Status const status = append_to_kv_cache(p, device, programmatic, current_stream(index));
  check(status.ok(), op, ": ", status.message);
}

}  // namespace minfer::torch_binding
