// A KV cache among an operator's arguments: its format, its rows, its scales and residuals. Checks are those of python/minfer/checks/kv_cache.py,
// in their order. `other` is the operand that a cache is compared with: the new keys of an append, the queries of attention.
#pragma once

#include <optional>
#include <string>

#include "core/checks.h"

namespace minfer::torch_binding {

/// kDense: of the other operand's type. The dtype of codes tells them, or `name` does.
WeightFormat check_format(char const* op, std::string const& name, ScalarType codes, Beside const& other);

/// 2 where a byte has so many codes.
inline int64_t codes_per_byte(WeightFormat format) { return format == WeightFormat::kInt4 ? 2 : 1; }

/// Those of K and of V, in elements; the other operand's limit K's.
void check_head_dims(char const* op, Beside const& other, int64_t head_dim, int64_t head_dim_v);

/// That both have the same type, the other's device and, but for head_dim, the same modes: [pages or batch, page_size or length, heads_kv,
/// head_dim].
void check_cache(char const* op, Tensor const& k_cache, Tensor const& v_cache, Beside const& other);

/// That TMA addresses both as they are: caches are never copied.
void check_cache_strides(char const* op, Tensor const& k_cache, Tensor const& v_cache);

struct KvSizes {
  WeightFormat format;
  int64_t pages, page_size, heads_kv, head_dim, head_dim_v;
  int64_t batch;  // of residuals
};

struct KvScales {
  std::optional<Tensor> const &k_scale, &v_scale, &k_residual, &v_residual;
};

/// What scales are of.
struct KvGroups {
  bool scale_per_head = false;  // fp8: else one for all
  int64_t group_tokens = 0;     // int4: tokens of a scale of K
  int64_t groups_v = 0;         // int4: scales of a token of V
};

/// The scales and residuals that a format has, and no others; residuals are of the other operand's type.
KvGroups check_scales(char const* op, KvSizes const& sizes, KvScales const& scales, Beside const& other);

}  // namespace minfer::torch_binding
