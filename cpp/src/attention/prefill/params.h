// The parameters of a prefill kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/shared/paged_rows.cuh"
#include "attention/shared/sequences.cuh"
#include "attention/shared/softmax.cuh"
#include "attention/shared/splits.h"
#include "common/packet.cuh"
#include "cutlass/fast_math.h"
#include "minfer/attention.h"

namespace minfer::attention {

/// Packed heads: a tile's rows hold `packed_heads` query heads of one KV head next to each other, so that row r of a tile is query
/// r / packed_heads of head r % packed_heads. A head tile is one such set of heads.
struct PrefillParams : Sequences, PageTable {
  CUtensorMap q;     // [batch, head_tiles, seqlen_q, packed_heads, head_dim]; varlen: batch is 1 and tokens_q stands for seqlen_q
  CUtensorMap k, v;  // [batch, rows, heads_kv, head_dim(_v)]; paged: [pages, page_size, heads_kv, head_dim(_v)]
  CUtensorMap o;     // as q, in boxes of 64 rows
  void* out;
  int64_t out_batch, out_row, out_head;  // strides in elements
  float* lse;                            // or null
  int64_t lse_batch, lse_head;
  int32_t box_rows;  // rows of one TMA load of K and V; it divides the page and the tile
  int32_t heads_q, heads_kv;
  int32_t packed_heads, head_tiles, heads_per_kv;  // head_tiles * packed_heads = heads_q; heads_per_kv = heads_q / heads_kv
  int32_t q_tiles;                                 // tiles of a sequence with seqlen_q queries
  int32_t max_tiles;                               // tiles of the launch where no sequences overlap
  int32_t section, last_section;      // (batch, head tile) pairs in a section; the number of the last section, which takes all that remain
  int32_t section_keys, last_tiles;   // varlen: keys of a section, over all KV heads; the minimum number of tiles of the last section
  int32_t head_dim_v;                 // of the output
  int32_t window_left, window_right;  // < 0: unlimited
  Softcap cap;                        // valid where softmax.softcap > 0
  int32_t* tile_counter;              // zero before the launch; or null, and a CTA takes a tile of every gridDim.x
  SoftmaxOptions softmax;
  bool keys_end_at_extent;  // TMA fills the rows behind the last key with zeros
};

/// The keys or the values of a cache of codes. The scales are documented at attention_paged.
struct QuantizedRows {
  PagedRows rows;        // [pages, page_size, heads_kv, head_dim]
  void const* scale;     // fp8: float32, one or [heads_kv]. int8: float32 [pages, heads_kv, page_size]. int4: f16 scales and minima,
                         // of K [pages, heads_kv, page_size / group_tokens, 2, head_dim], of V [pages, heads_kv, 2 * groups_v, page_size]
  int64_t scale_page;    // elements of `scale` in a page
  void const* residual;  // int4: [batch, group_tokens, heads_kv, head_dim] of q's type, the tokens of no complete token group
  int32_t head_dim;      // its codes fill whole vectors of 16 bytes
};

/// PrefillParams::k and v are unused.
struct PrefillCodesParams : PrefillParams {
  QuantizedRows keys, values;
  WeightFormat format;                 // kFp8E4M3, kInt8 or kInt4
  int32_t scale_stride;                // fp8: 1 where every KV head has a scale of its own, else 0
  int32_t group_tokens;                // int4: tokens that share a scale of K, 32 or 64; else 0
  int32_t groups_v, vectors_of_group;  // int4: scales of a token of V, and the vectors of codes (32 channels) that share one
};

/// What batch-invariant kernels have in addition: see split_scheduler.cuh.
struct SplitFields {
  int32_t split_count;         // splits of a sequence outside of the batch-invariant mode; 0: splits have the mode's length
  int32_t split_rows;          // packed rows of a sequence up to which its splits are items of their own; 0: of none
  int32_t max_splits;          // of such a sequence
  int32_t max_items;           // of the launch where no sequences overlap
  int32_t slot_rows;           // rows of a slot of partials
  float* partials;             // [slots, slot_rows, kHeadDimV]
  SplitState* partial_states;  // [slots, slot_rows]
  float4* totals;              // of each CTA, where shared memory has no room for them: split_totals.cuh
  Packet* packets;             // of partials that the launch folds itself, or null: few_rows_results.cuh
  uint64_t nonce;              // no other launch's: packet.cuh
};
template <class Base>
struct SplitParams : Base, SplitFields {};

}  // namespace minfer::attention
