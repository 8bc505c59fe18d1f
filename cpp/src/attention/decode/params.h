// What a decode launch hands to its kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/shared/packet.cuh"
#include "attention/shared/sequences.cuh"
#include "cutlass/fast_math.h"

namespace minfer::attention {

/// The cache is [pages, page_size, heads_kv, head_dim(_v)] of codes; a contiguous one is a page for each sequence.
/// Rows of a unit are the queries that share a KV head: row r is query r / group of the sequence, of head r % group.
struct DecodeParams : Sequences, PageTable {
  // [pages, heads_kv, column blocks, page_size, columns of a shared-memory row]; or one block of all columns, which takes a load for each
  // shared-memory row's width.
  CUtensorMap k, v;
  int32_t k_loads, v_loads;  // of a box
  int32_t row_shift;         // tokens of a row of K's and V's maps, log2: where codes of tokens follow each other, rows are 128 bytes
  void const* q;
  int64_t q_bytes;                 // of the whole, 0 where it has gaps
  int64_t q_batch, q_row, q_head;  // strides in elements; without cu_seqlens_q, sequence b begins at b * q_batch
  void* out;
  int64_t out_batch, out_row;  // heads are head_dim_v apart
  float* lse;
  int64_t lse_batch, lse_head;
  int64_t block_table_bytes;
  int32_t box_rows, boxes_of_slice;  // rows of one TMA load of K and V: a power of two from 8 on, divides the page and the slice
  int32_t heads_q, heads_kv, group, head_dim, head_dim_v;
  int32_t columns;                    // tiles of 8 rows that a unit has: 1 or 2
  int32_t window_left, window_right;  // < 0: unlimited
  float scale, softcap;               // softcap 0: none
  void const* sinks;                  // [heads_q] of q's type, or null
  // Scales. fp8: float32, one or [heads_kv] (stride 0 or 1). int8: float32 [pages, heads_kv, page_size].
  // int4: f16, of K [pages, heads_kv, page_size / group_tokens, 2, head_dim], of V [pages, heads_kv, 2 * groups_v, page_size]: scale, minimum.
  void const *k_scale, *v_scale;
  int64_t k_scale_page, v_scale_page;  // elements of a page
  int32_t scale_stride;
  int32_t group_tokens, groups_of_page, groups_v;  // int4: tokens of a scale of K, scales of a page; scales of a token of V
  uint32_t groups_of_v;                            // int4: see group_v_of
  void const *k_residual, *v_residual;  // int4: [batch, group_tokens, heads_kv, head_dim(_v)] of q's type: tokens of no whole group
  // Work: see decode_pieces.cuh.
  cutlass::FastDivmod by_group, by_ranges, by_lockstep;  // ranges * lockstep CTAs; lockstep divides heads_kv
  int32_t num_splits;                                    // of a unit's keys, or 0: as many as fill the CTAs
  int32_t min_slices;                                    // of a CTA, with num_splits 0
  int32_t max_items;                                     // what rows of CTAs share out, at most: with num_splits, what there are slots for
  Packet* slots;                                         // of parts: [slots, 8 * columns, kHeadDim / 64, kPacketsOfChunk]
  uint64_t nonce;                                        // no other launch's: packet.cuh

  /// int4: the group of V that has elements 32 chunk to 32 chunk + 31 of head_dim; where head_dim_v has none, the last.
  CUTLASS_HOST_DEVICE uint32_t group_v_of(int chunk) const { return groups_of_v >> 4 * chunk & 15; }
};

}  // namespace minfer::attention
