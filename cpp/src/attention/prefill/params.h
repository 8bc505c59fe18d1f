// What a prefill launch hands to its kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/shared/key_rows.cuh"
#include "attention/shared/sequences.cuh"
#include "attention/shared/softmax.cuh"
#include "cutlass/fast_math.h"
#include "minfer/types.h"

namespace minfer::attention {

/// Queries of up to `pack` heads that share a KV head lie side by side in a tile: row r is query r / pack of head r % pack.
struct PrefillParams : Sequences, PageTable {
  CUtensorMap q;     // [batch, head units, seqlen_q, pack, head_dim]; varlen: batch 1, tokens for seqlen_q
  CUtensorMap k, v;  // [batch, rows, heads_kv, head_dim(_v)]; paged: [pages, page_size, heads_kv, head_dim(_v)]
  CUtensorMap o;     // as q, in boxes of 64 rows
  void* out;
  int64_t out_batch, out_row, out_head;  // strides in elements
  float* lse;                            // or null
  int64_t lse_batch, lse_head;
  int32_t box_rows;  // rows of one TMA load of K and V: a divisor of the page and of the tile
  int32_t heads_q, heads_kv;
  int32_t pack, head_units, group;    // head_units * pack = heads_q; group = heads_q / heads_kv
  int32_t q_tiles;                    // of a sequence of seqlen_q queries
  int32_t max_tiles;                  // of the launch: those of sequences that do not overlap
  int32_t section, last_section;      // (batch, head unit) pairs of a section; number of the last one, which has all that are left
  int32_t section_keys, last_tiles;   // varlen: keys of all KV heads of a section of a sequence; tiles of the last one, at least
  int32_t head_dim_v;                 // of the output
  int32_t window_left, window_right;  // < 0: unlimited
  float scale, softcap;               // softcap 0: none
  Softcap cap;                        // where there is one
  int32_t* tile_counter;              // zero before the launch, or null: tiles at a fixed distance
  void const* sinks;                  // [heads_q], or null
  bool keys_end_at_extent;            // rows behind the last key are zeros of the TMA load
};

/// Keys or values of a cache as codes; see attention_paged's documentation for the scales.
struct CodesSide {
  KeyRows rows;          // [pages, page_size, heads_kv, head_dim]
  void const* scale;     // fp8: float32, one or [heads_kv]. int8: float32 [pages, heads_kv, page_size]. int4: f16 scales and minima,
                         // of K [pages, heads_kv, page_size / group_tokens, 2, head_dim], of V [pages, heads_kv, 2 * groups_v, page_size]
  int64_t scale_page;    // elements of a page
  void const* residual;  // int4: [batch, group_tokens, heads_kv, head_dim] of q's type: tokens of no whole group
  int32_t head_dim;      // a multiple of what 16 bytes hold
};

/// k and v of PrefillParams are not used.
struct PrefillCodesParams : PrefillParams {
  CodesSide keys, values;
  WeightFormat format;                // kFp8E4M3, kInt8 or kInt4
  int32_t scale_stride;               // fp8: of heads, 0 or 1
  int32_t group_tokens;               // int4: tokens of a scale of K, 32 or 64; else 0
  int32_t groups_v, chunks_of_group;  // int4: scales of a token of V, and chunks of 32 channels of each
};

}  // namespace minfer::attention
