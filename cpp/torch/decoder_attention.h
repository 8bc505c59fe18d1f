// The attention in front of a decoder block, as part of its launch: one token over a paged cache of 16 bits.
#pragma once

#include <optional>

#include "core/readable.h"
#include "core/tensor.h"
#include "minfer/decoder_block.h"

namespace minfer::torch_binding {

/// Arguments in the words of minfer.qk_norm_rope_append and minfer.attention_paged. Heads have 128 elements, all of which are rotated.
struct DecoderAttentionCall {
  char const* op;
  Tensor const &qkv, &k_cache, &v_cache, &block_table, &seq_lens, &slot_mapping, &positions, &cos_sin;
  std::optional<Tensor> const &q_weight, &k_weight;
  double scale;
  int64_t window_left;
  double eps, weight_offset;

  int64_t heads_kv() const { return k_cache.size(2); }
  int64_t heads() const { return qkv.size(1) - 2 * heads_kv(); }
};

/// Checks all of it and completes the problem.
void check(DecoderAttentionCall const& call);
void describe(DecoderAttentionCall const& call, DecoderBlockProblem* problem);
/// What stands where the output of the attention would: [1, heads * 128], of which only modes, type and device count.
Tensor output_like(DecoderAttentionCall const& call);
/// Returns whether all of it is the caller's own memory.
bool set(DecoderAttentionCall const& call, DecoderAttention* to, Held* held);

}  // namespace minfer::torch_binding
