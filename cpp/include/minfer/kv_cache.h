// Stores new keys and values in a KV cache. The caller owns all memory; nothing is allocated, nothing synchronised.
#pragma once

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

constexpr int64_t kMaxCacheHeadDim = 256;

/// K or V of a call. Strides are in elements.
struct KvRows {
  void const* x = nullptr;               // [tokens, heads_kv, head_dim]; any strides, 16-byte aligned rows are faster
  int64_t x_strides[3] = {0, 0, 0};      // of all three modes
  int64_t head_dim = 0;                  // a multiple of 8 up to kMaxCacheHeadDim; of 32 for int4
  void* cache = nullptr;                 // [pages, page_size, heads_kv, head_dim] codes, two of int4 in a byte; rows 16-byte aligned
  int64_t cache_strides[3] = {0, 0, 0};  // of all modes but the last, which is contiguous
  void* scale = nullptr;                 // fp8: float [heads_kv], read
                                         // int8: float [pages, heads_kv, page_size], written
                                         // int4: half K [pages, heads_kv, page_size / group_tokens, 2, head_dim]: scales, minima
                                         //            V [pages, heads_kv, 2 * groups_v, page_size]: scales, then minima
  int64_t scale_stride = 0;              // fp8: of heads, 0 where they share one scale; other formats' scales are contiguous
  void* residual = nullptr;              // int4: [batch, group_tokens, heads_kv, head_dim], contiguous
};

/// Token i is stored in row slots[i] % page_size of page slots[i] / page_size, or nowhere if the cache has no such slot.
/// int4: a sequence's tokens that have a slot are consecutive, within the call and from call to call. The last token of a token group has
/// the whole group quantised and stored; tokens of an incomplete group are left in the residual, in row slot % group_tokens.
struct KvAppend {
  DataType type = DataType::kBF16;                // of x and the residuals: 16-bit
  WeightFormat kv_format = WeightFormat::kDense;  // kDense: codes are of x's type; or kFp8E4M3, kInt8, kInt4
  KvRows k, v;
  int64_t tokens = 0, heads_kv = 0, pages = 0, page_size = 0;
  int64_t const* slots = nullptr;  // [tokens]
  int64_t slots_stride = 1;
  int64_t batch = 0;  // sequences; this and the following are read for int4 only
  int32_t const* cu_seqlens =
      nullptr;  // [batch + 1] where each sequence's tokens begin, and the end of the last; tokens outside are not stored.
                // null: token i belongs to sequence i
  int64_t cu_seqlens_stride = 1;
  int64_t group_tokens = 0;  // tokens that share a scale of K: 32 or 64, a divisor of page_size
  int64_t groups_v = 0;      // groups of channels of V; each has head_dim / groups_v channels, a multiple of 32
};

/// What is done with the heads of keys before they are stored, and with those of queries, in fp32 and rounded once: x / sqrt(mean(x^2) +
/// eps) * (weight + weight_offset) where there is a weight, then the rotation of rotate() (minfer/fused.h). Keys are quantised as they are
/// after that rounding.
struct NormRope {
  void const* q =
      nullptr;  // [tokens, heads, head_dim] of the keys' type and head_dim; rows at multiples of 16 bytes, as K and V and the weights
  int64_t q_strides[3] = {0, 0, 0};
  void* q_out = nullptr;  // [tokens, heads, head_dim], contiguous, 16-byte aligned
  int64_t heads = 0;
  void const *q_weight = nullptr, *k_weight = nullptr;  // [head_dim], or null: no normalisation
  float eps = 0.0f, weight_offset = 0.0f;
  float const* cos_sin = nullptr;   // [length, rotary_dim]: cosines, then sines; contiguous
  int64_t length = 0;               // positions outside of 0..length - 1 read zeros
  int64_t rotary_dim = 0;           // even, up to head_dim
  void const* positions = nullptr;  // [tokens], contiguous
  bool positions_64bit = true;
  bool interleaved = false;
};

/// Is one launch. Slots, cu_seqlens and scales are read on the device. norm_rope: null where keys are stored as they are.
/// programmatic: launch with programmatic stream serialization (from compute capability 9.0 on).
Status append_to_kv_cache(KvAppend const& append, NormRope const* norm_rope, DeviceProperties const& device, bool programmatic,
                          Stream stream);

}  // namespace minfer
