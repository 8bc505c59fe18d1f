// The parameters of the kernels that append tokens to a KV cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "minfer/kv_cache.h"

namespace minfer::attention {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kPerVector = 8;  // 16-bit elements in a vector of 16 bytes

/// K or V of a call.
struct RowsParams {
  uint16_t const* x;                   // [tokens, heads_kv, head_dim]
  int64_t x_token, x_head, x_element;  // strides
  uint8_t* cache;                      // [pages, page_size, heads_kv, bytes of codes]
  int64_t page_bytes, row_bytes, head_bytes;
  void* scale;  // KvRows::scale
  int64_t scale_stride;
  uint16_t* residual;  // [batch, group_tokens, heads_kv, head_dim]
  int32_t vectors;     // head_dim / 8

  __device__ __forceinline__ uint16_t const* row(int64_t token, int64_t head) const { return x + token * x_token + head * x_head; }
  __device__ __forceinline__ uint8_t* codes(int64_t page, int64_t row, int64_t head) const {
    return cache + page * page_bytes + row * row_bytes + head * head_bytes;
  }
};

struct AppendParams {
  RowsParams side[2];  // K, V
  int64_t const* slots;
  int64_t slots_stride, capacity, page_size;
  uint32_t tokens, heads;
  // int4
  int32_t const* cu_seqlens;
  int64_t cu_seqlens_stride, batch;
  int32_t group, group_log2, groups_v;  // group: tokens of a token group
  int32_t cta_tokens;                   // tokens of a CTA, 1 to 16

  __device__ __forceinline__ int64_t slot(int64_t token) const { return slots[token * slots_stride]; }
  /// Whether the cache has such a slot; skipped tokens have negative ones.
  __device__ __forceinline__ bool stored(int64_t slot) const { return uint64_t(slot) < uint64_t(capacity); }
  __device__ __forceinline__ int64_t page_of(int64_t slot) const { return int64_t(uint64_t(slot) / uint64_t(page_size)); }
  __device__ __forceinline__ int64_t seqlen_at(int64_t i) const { return cu_seqlens[i * cu_seqlens_stride]; }
};

}  // namespace minfer::attention
