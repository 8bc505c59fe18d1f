// Checks of a KV cache among an operator's arguments: its format, its rows, its scales and residuals. They are the checks of
// python/minfer/checks/kv_cache.py, in the same order. `other` is the operand that a cache is compared with: the new keys of an append, the
// queries of attention.
#pragma once

#include <optional>
#include <string>

#include "core/checks.h"

namespace minfer::torch_binding {

/// The cache format that `name` says, or for "auto" the one that follows from the dtype of the cache. kDense: 16-bit values of the other
/// operand's type.
WeightFormat check_format(char const* op, std::string const& name, ScalarType codes, NamedTensor const& other);

/// Cache elements in one element of the cache tensor: int4 stores two codes in a byte.
inline int64_t codes_per_byte(WeightFormat format) { return format == WeightFormat::kInt4 ? 2 : 1; }

/// The head dimensions of K and of V, in elements: multiples of 8, and V's no larger than K's.
void check_head_dims(char const* op, NamedTensor const& other, int64_t head_dim, int64_t head_dim_v);

/// Both caches are [pages or batch, page_size or length, heads_kv, head_dim], of one type and on the other operand's device; only their
/// head dimensions may differ.
void check_cache(char const* op, Tensor const& k_cache, Tensor const& v_cache, NamedTensor const& other);

/// TMA can address both caches as they are: caches are never copied.
void check_cache_strides(char const* op, Tensor const& k_cache, Tensor const& v_cache);

struct KvSizes {
  WeightFormat format;
  int64_t pages, page_size, heads_kv, head_dim, head_dim_v;
  int64_t batch;  // sequences, each with a residual
};

struct KvScales {
  std::optional<Tensor> const &k_scale, &v_scale, &k_residual, &v_residual;
};

/// What one scale is for.
struct KvGroups {
  bool scale_per_head = false;  // fp8: a scale for each KV head; otherwise one for all heads
  int64_t group_tokens = 0;     // int4: tokens that share the scales of K
  int64_t groups_v = 0;         // int4: groups of channels of V, each with a scale for each token
};

/// The call has the scales and residuals of its format and no others; residuals are of the other operand's type.
KvGroups check_scales(char const* op, KvSizes const& sizes, KvScales const& scales, NamedTensor const& other);

}  // namespace minfer::torch_binding
