#include "decoder_attention.h"

#include "core/checks.h"
#include "core/torch_calls.h"
#include "kv_formats.h"
#include "rotary_table.h"

namespace minfer::torch_binding {

void check(DecoderAttentionCall const& c) {
  char const* op = c.op;
  NamedTensor const reference{"qkv", c.qkv};
  if (c.qkv.dim() != 3 || c.qkv.size(0) != 1 || c.qkv.size(2) != kDecoderHeadDim) {
    fail(op, ": qkv must be [1, heads + 2 * heads_kv, ", kDecoderHeadDim, "], got ", c.qkv);
  }
  check_16bit(op, "qkv", c.qkv);
  check_cache(op, c.k_cache, c.v_cache, reference);
  check_cache_strides(op, c.k_cache, c.v_cache);
  for (auto const& [name, cache] : {std::pair{"k_cache", &c.k_cache}, std::pair{"v_cache", &c.v_cache}}) {
    if (cache->scalar_type() != c.qkv.scalar_type()) {
      fail(op, ": ", name, " must be ", c.qkv.scalar_type(), ", as qkv, got ", cache->scalar_type());
    }
    if (cache->size(2) != c.heads_kv() || cache->size(3) != kDecoderHeadDim) {
      fail(op, ": ", name, " must be [pages, page_size, heads_kv, ", kDecoderHeadDim, "], got ", *cache);
    }
    check_no_overlap(op, *cache, "qkv", c.qkv, name);
  }
  for (int i = 0; i < 3; ++i) {
    if (c.v_cache.stride(i) != c.k_cache.stride(i)) fail(op, ": v_cache must have k_cache's strides, got ", c.k_cache, " and ", c.v_cache);
  }
  if (c.heads() < 1) {
    fail(op, ": qkv must be [1, heads + 2 * heads_kv, ", kDecoderHeadDim, "], of a cache with heads_kv = ", c.heads_kv(), ", got ", c.qkv);
  }
  if (c.block_table.dim() != 2 || c.block_table.size(0) != 1) fail(op, ": block_table must be [1, pages], got ", c.block_table);
  check_operand(op, "block_table", c.block_table, ScalarType::Int, c.block_table.sizes(), reference);
  check_operand(op, "seq_lens", c.seq_lens, ScalarType::Int, {1}, reference);
  check_operand(op, "slot_mapping", c.slot_mapping, ScalarType::Long, {1}, reference);
  check_rotary_table(op, c.cos_sin, c.positions, kDecoderHeadDim, 1, kDecoderHeadDim, reference);
  if (c.q_weight.has_value() != c.k_weight.has_value()) fail(op, ": q_weight and k_weight must be given together");
  for (auto const& [name, weight] : {std::pair{"q_weight", &c.q_weight}, std::pair{"k_weight", &c.k_weight}}) {
    if (*weight) check_operand(op, name, **weight, c.qkv.scalar_type(), {kDecoderHeadDim}, reference);
  }
  eps_in_float32(op, c.eps);
  in_float32(op, "qk_weight_offset", c.weight_offset);
  in_float32(op, "scale", c.scale);
}

void describe(DecoderAttentionCall const& c, DecoderBlockProblem* problem) {
  problem->heads = c.heads();
  problem->heads_kv = c.heads_kv();
  problem->capacity = c.block_table.size(1) * c.k_cache.size(1);
}

Tensor output_like(DecoderAttentionCall const& c) {
  Tensor const rows = contiguous(c.op, "qkv", c.qkv);
  int64_t const columns = c.heads() * kDecoderHeadDim;
  return view_of(c.op, "the queries", rows, {1, columns}, {columns, 1});
}

bool set(DecoderAttentionCall const& c, DecoderAttention* to, Held* held) {
  char const* op = c.op;
  bool own = true;
  auto const keep = [&](char const* name, Tensor const& given) {
    Tensor const x = aligned_contiguous(op, name, given);
    own = own && x.data_ptr() == given.data_ptr();
    return held->keep(x);
  };
  to->qkv = held->keep(aligned_contiguous(op, "qkv", c.qkv));
  to->k_cache = held->keep(c.k_cache);
  to->v_cache = held->keep(c.v_cache);
  for (int i = 0; i < 3; ++i) to->strides[i] = c.k_cache.stride(i);
  to->pages = c.k_cache.size(0);
  to->page_size = c.k_cache.size(1);
  auto const words = [&](char const* name, Tensor const& given) {  // read by elements, wherever they begin
    Tensor const x = contiguous(op, name, given);
    own = own && x.data_ptr() == given.data_ptr();
    return held->keep(x);
  };
  to->table = static_cast<int32_t const*>(words("block_table", c.block_table));
  to->seq_lens = static_cast<int32_t const*>(words("seq_lens", c.seq_lens));
  to->slots = static_cast<int64_t const*>(words("slot_mapping", c.slot_mapping));
  to->positions = words("positions", c.positions);
  to->positions_64bit = c.positions.scalar_type() == ScalarType::Long;
  to->cos_sin = static_cast<float const*>(keep("cos_sin", c.cos_sin));
  to->length = c.cos_sin.size(0);
  if (c.q_weight) to->q_weight = keep("q_weight", *c.q_weight);
  if (c.k_weight) to->k_weight = keep("k_weight", *c.k_weight);
  to->eps = eps_in_float32(op, c.eps);
  to->weight_offset = in_float32(op, "qk_weight_offset", c.weight_offset);
  to->scale = in_float32(op, "scale", c.scale);
  to->window = c.window_left < 0 ? -1 : c.window_left;
  return own;
}

}  // namespace minfer::torch_binding
