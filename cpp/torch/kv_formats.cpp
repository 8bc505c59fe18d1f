#include "kv_formats.h"

#include "core/readable.h"
#include "minfer/kv_cache.h"

namespace minfer::torch_binding {

WeightFormat check_format(char const* op, std::string const& name, ScalarType codes, NamedTensor const& other) {
  ScalarType const type = other.x.scalar_type();
  struct {
    char const* name;
    WeightFormat format;
    ScalarType type, or_type;
  } const formats[] = {{"16bit", WeightFormat::kDense, type, type},
                       {"fp8_e4m3", WeightFormat::kFp8E4M3, ScalarType::Float8_e4m3fn, ScalarType::Byte},
                       {"int8", WeightFormat::kInt8, ScalarType::Char, ScalarType::Char},
                       {"int4", WeightFormat::kInt4, ScalarType::Byte, ScalarType::Byte}};
  for (auto const& f : formats) {
    if (name == "auto" ? codes != f.type : name != f.name) continue;
    if (codes != f.type && codes != f.or_type) {
      fail(op, ": a cache of kv_format '", f.name, "' must be ", f.type, ", got ", codes);
    }
    return f.format;
  }
  if (name != "auto") fail(op, ": kv_format must be auto, 16bit, fp8_e4m3, int8 or int4, got '", name, "'");
  fail(op, ": k_cache must be ", type, " like ", other.name, ", float8_e4m3fn, int8 or uint8 (int4), got ", codes);
}

void check_head_dims(char const* op, NamedTensor const& other, int64_t head_dim, int64_t head_dim_v) {
  if (head_dim <= 0 || head_dim % 8 != 0 || head_dim > kMaxCacheHeadDim) {
    fail(op, ": head_dim must be a multiple of 8 up to ", kMaxCacheHeadDim, ", got ", head_dim);
  }
  if (head_dim_v <= 0 || head_dim_v % 8 != 0 || head_dim_v > head_dim) {
    fail(op, ": v's head_dim must be a multiple of 8 up to ", other.name, "'s ", head_dim, ", got ", head_dim_v);
  }
}

void check_cache(char const* op, Tensor const& k_cache, Tensor const& v_cache, NamedTensor const& other) {
  for (auto const& [name, x] : {std::pair{"k_cache", &k_cache}, std::pair{"v_cache", &v_cache}}) {
    if (x->dim() != 4) fail(op, ": ", name, " must be [pages or batch, page_size or length, heads_kv, head_dim], got ", *x);
    check_same_device(op, name, *x, other);
  }
  if (v_cache.scalar_type() != k_cache.scalar_type()) {
    fail(op, ": v_cache must be ", k_cache.scalar_type(), " like k_cache, got ", v_cache.scalar_type());
  }
  for (int64_t i = 0; i < 3; ++i) {
    if (k_cache.size(i) != v_cache.size(i)) {
      fail(op, ": v_cache must have k_cache's modes but the last, got k_cache ", k_cache, " and v_cache ", v_cache);
    }
  }
}

void check_cache_strides(char const* op, Tensor const& k_cache, Tensor const& v_cache) {
  for (auto const& [name, x] : {std::pair{"k_cache", &k_cache}, std::pair{"v_cache", &v_cache}}) {
    if (!fits(*x, kTmaRows)) {
      fail(op, ": ", name, " must have a contiguous head_dim, and a base and strides that are multiples of 16 bytes, got ", *x);
    }
  }
}

namespace {

/// fp8: one scale for all heads, or one for each head.
KvGroups check_scales_of_heads(char const* op, KvSizes const& sizes, KvScales const& scales, NamedTensor const& other) {
  int64_t const numel = scales.k_scale->numel();
  for (auto const& [name, x] : {std::pair{"k_scale", &*scales.k_scale}, std::pair{"v_scale", &*scales.v_scale}}) {
    if (x->dim() > 1 || (numel != 1 && numel != sizes.heads_kv) || x->numel() != numel) {
      fail(op, ": ", name, " must be [1] or [", sizes.heads_kv, "], both alike, got ", *x);
    }
    check_operand(op, name, *x, ScalarType::Float, x->sizes(), other);
  }
  KvGroups groups;
  groups.scale_per_head = numel != 1;
  return groups;
}

/// int4: K has a scale and a minimum for each channel of a token group, V has them for each group of channels of a token.
KvGroups check_scales_of_groups(char const* op, KvSizes const& sizes, KvScales const& scales, NamedTensor const& other) {
  Tensor const &k_scale = *scales.k_scale, &v_scale = *scales.v_scale;
  if (k_scale.dim() != 5 || v_scale.dim() != 4) {
    fail(op, ": int4 scales must be k_scale [pages, heads_kv, page_size / group, 2, head_dim] and v_scale [pages, heads_kv, 2 * groups, ",
         "page_size], got ", k_scale, " and ", v_scale);
  }
  int64_t const groups_k = k_scale.size(2), rows_v = v_scale.size(2);
  KvGroups groups;
  groups.group_tokens = groups_k > 0 && sizes.page_size % groups_k == 0 ? sizes.page_size / groups_k : 0;
  if (sizes.page_size != 0 && groups.group_tokens != 32 && groups.group_tokens != 64) {
    fail(op, ": k_scale must have a group for 32 or 64 tokens of a page, got ", groups_k, " for ", sizes.page_size);
  }
  if (sizes.head_dim % 32 != 0 || sizes.head_dim_v % 32 != 0) {
    fail(op, ": kv_format 'int4' needs head dimensions that are multiples of 32, got ", sizes.head_dim, " and ", sizes.head_dim_v);
  }
  groups.groups_v = rows_v / 2;
  if (rows_v < 2 || rows_v % 2 != 0 || sizes.head_dim_v / 32 % groups.groups_v != 0) {
    fail(op, ": v_scale must have a scale and a minimum for groups of 32, or multiples, of v's head_dim ", sizes.head_dim_v, ", got ",
         v_scale);
  }
  auto const [format, pages, page_size, heads_kv, head_dim, head_dim_v, batch] = sizes;
  ScalarType const type = other.x.scalar_type();
  check_operand(op, "k_scale", k_scale, ScalarType::Half, {pages, heads_kv, groups_k, 2, head_dim}, other);
  check_operand(op, "v_scale", v_scale, ScalarType::Half, {pages, heads_kv, rows_v, page_size}, other);
  check_operand(op, "k_residual", *scales.k_residual, type, {batch, groups.group_tokens, heads_kv, head_dim}, other);
  check_operand(op, "v_residual", *scales.v_residual, type, {batch, groups.group_tokens, heads_kv, head_dim_v}, other);
  return groups;
}

}  // namespace

KvGroups check_scales(char const* op, KvSizes const& sizes, KvScales const& scales, NamedTensor const& other) {
  bool const dense = sizes.format == WeightFormat::kDense, int4 = sizes.format == WeightFormat::kInt4;
  char const* format = dense ? "16bit" : name_of(sizes.format);
  struct {
    char const* name;
    std::optional<Tensor> const& given;
    bool wanted;
  } const optional[] = {{"k_scale", scales.k_scale, !dense},
                        {"v_scale", scales.v_scale, !dense},
                        {"k_residual", scales.k_residual, int4},
                        {"v_residual", scales.v_residual, int4}};
  for (auto const& [name, given, wanted] : optional) {
    if (given && !wanted) fail(op, ": kv_format '", format, "' has no ", name);
    if (!given && wanted) fail(op, ": kv_format '", format, "' needs ", name);
  }
  if (dense) return {};
  if (sizes.page_size % 8 != 0) {
    fail(op, ": kv_format '", format, "' needs a page size, or length of a contiguous cache, that is a multiple of 8, got ",
         sizes.page_size);
  }
  if (sizes.format == WeightFormat::kFp8E4M3) return check_scales_of_heads(op, sizes, scales, other);
  if (int4) return check_scales_of_groups(op, sizes, scales, other);
  int64_t const shape[] = {sizes.pages, sizes.heads_kv, sizes.page_size};
  check_operand(op, "k_scale", *scales.k_scale, ScalarType::Float, shape, other);
  check_operand(op, "v_scale", *scales.v_scale, ScalarType::Float, shape, other);
  return {};
}

}  // namespace minfer::torch_binding
