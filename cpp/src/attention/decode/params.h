// The parameters of a decode kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/shared/sequences.cuh"
#include "common/packet.cuh"
#include "cutlass/fast_math.h"
#include "minfer/attention.h"

namespace minfer::attention {

/// The cache is [pages, page_size, heads_kv, head_dim(_v)] of codes or of 16-bit numbers; a contiguous one counts as a page for each
/// sequence. The rows of an output tile are queries that share a KV head: row r is query r / heads_per_kv of the sequence and head r %
/// heads_per_kv of those that read the KV head.
struct DecodeParams : Sequences, PageTable {
  // [pages, heads_kv, column blocks, page_size, columns], where a column block is as wide as a row of shared memory; or a single block of
  // all columns, whose box takes a load for each row of shared memory.
  CUtensorMap k, v;
  int32_t k_loads, v_loads;  // loads of a box
  int32_t row_shift;         // log2 of the tokens in a row of the maps of K and V: where codes of tokens are contiguous, rows are 128 bytes
  void const* q;
  int64_t q_bytes;                 // size of q, or 0 where it has gaps
  int64_t q_batch, q_row, q_head;  // strides in elements; without cu_seqlens_q, sequence b begins at b * q_batch
  void* out;
  int64_t out_batch, out_row;  // heads are head_dim_v apart
  float* lse;
  int64_t lse_batch, lse_head;
  int64_t block_table_bytes;
  int32_t box_rows, boxes_of_block;  // rows of one TMA load of K and V: a power of two >= 8 that divides the page and the key block
  int32_t heads_q, heads_kv, heads_per_kv, head_dim, head_dim_v;
  int32_t row_tiles;                  // tiles of 8 rows in an output tile: 1 or 2
  int32_t window_left, window_right;  // < 0: unlimited
  SoftmaxOptions softmax;
  // Scales. fp8: float32, one or [heads_kv] (stride 0 or 1). int8: float32 [pages, heads_kv, page_size].
  // int4: f16, of K [pages, heads_kv, page_size / group_tokens, 2, head_dim], of V [pages, heads_kv, 2 * groups_v, page_size]: scale,
  // minimum.
  void const *k_scale, *v_scale;
  int64_t k_scale_page, v_scale_page;  // elements of a page
  int32_t scale_stride;
  int32_t group_tokens, token_groups_of_page, groups_v;  // int4: tokens that share a scale of K; scales of a token of V
  uint32_t v_group_of_vector;                            // int4: four bits for each 32 elements of head_dim_v, see group_v_of
  void const *k_residual,
      *v_residual;  // int4: [batch, group_tokens, heads_kv, head_dim(_v)] of q's type, tokens of no complete token group
  // Distribution of the work: tile_scheduler.cuh.
  cutlass::FastDivmod by_heads_per_kv, by_ranges, by_lockstep;  // there are ranges * lockstep CTAs; lockstep divides heads_kv
  int32_t num_splits;                                           // of an output tile's keys, or 0: as many as fill the CTAs
  int32_t min_key_blocks;                                       // of a CTA, with num_splits 0
  int32_t max_steps;      // upper limit of the steps; with num_splits, what there are partial slots for
  Packet* partial_slots;  // [slots, 8 * row_tiles, kHeadDim / 64, kPacketsOfPartial]
  uint64_t nonce;         // no other launch's: packet.cuh

  /// int4: the group of V that holds elements 32 * vector to 32 * vector + 31 of head_dim; the last group behind head_dim_v.
  CUTLASS_HOST_DEVICE uint32_t group_v_of(int vector) const { return v_group_of_vector >> 4 * vector & 15; }
};

}  // namespace minfer::attention
