// What a prefill launch hands to its kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace minfer::attention {

/// Queries of up to `pack` heads that share a KV head lie side by side in a tile: row r is query r / pack of head r % pack.
struct PrefillParams {
  CUtensorMap q;     // [batch, head units, seqlen_q, pack, head_dim]; varlen: batch 1, tokens for seqlen_q
  CUtensorMap k, v;  // [batch, rows, heads_kv, head_dim(_v)]; paged: [pages, page_size, heads_kv, head_dim(_v)]
  CUtensorMap o;     // as q, in boxes of 64 rows
  void* out;
  int64_t out_batch, out_row, out_head;  // strides in elements
  float* lse;                            // or null
  int64_t lse_batch, lse_head;
  int32_t const* cu_seqlens_q;  // [batch + 1], or null: every sequence has seqlen_q queries
  int32_t const* cu_seqlens_k;  // [batch + 1], or null
  int32_t const* seq_lens;      // [batch] keys in the cache, or null: seqlen_k
  int32_t const* block_table;   // [batch, ..] pages, or null
  int64_t block_table_stride;
  int32_t page_size, box_rows;  // rows of one TMA load of K and V: a divisor of the page and of the tile
  int32_t batch, tokens_q, heads_q, heads_kv, seqlen_q, seqlen_k;
  int32_t pack, head_units, group;    // head_units * pack = heads_q; group = heads_q / heads_kv
  int32_t q_tiles;                    // of a sequence of seqlen_q queries
  int32_t section;                    // (batch, head unit) pairs whose K and V share L2
  int32_t head_dim_v;                 // of the output
  int32_t window_left, window_right;  // < 0: unlimited
  float scale, softcap;               // softcap 0: none
  int32_t* tile_counter;              // zero before the launch, or null: tiles at a fixed distance
  void const* sinks;                  // [heads_q], or null
  bool keys_end_at_extent;            // rows behind the last key are zeros of the TMA load
};

}  // namespace minfer::attention
