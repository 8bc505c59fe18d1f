// What every prefill launch, of any architecture, tells its kernel: all of PrefillParams but the tensor maps, and the tile counter at zero.
#pragma once

#include <algorithm>

#include "attention/launch.h"
#include "attention/prefill_params.h"
#include "common/cuda_check.h"

namespace minfer::attention {

inline void set_prefill_arguments(AttentionLaunchArguments const& arguments, int tile_m, PrefillParams* params) {
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  AttentionPlan const& plan = *arguments.plan;
  int64_t const pack = plan.pack;
  params->out = o.out;
  params->out_row = p.heads_q * p.head_dim_v;
  params->out_batch = p.seqlen_q * params->out_row;
  params->out_head = p.head_dim_v;
  params->lse = o.lse;
  params->lse_batch = o.lse_strides[0];
  params->lse_head = o.lse_strides[1];
  params->cu_seqlens_q = o.cu_seqlens_q;
  params->cu_seqlens_k = o.cu_seqlens_k;
  params->seq_lens = o.seq_lens;
  params->block_table = o.block_table;
  params->block_table_stride = o.block_table_stride;
  params->page_size = int32_t(p.page_size);
  params->box_rows = int32_t(plan.box_rows);
  params->batch = int32_t(p.batch);
  params->tokens_q = int32_t(p.tokens_q);
  params->heads_q = int32_t(p.heads_q);
  params->heads_kv = int32_t(p.heads_kv);
  params->seqlen_q = int32_t(p.seqlen_q);
  params->seqlen_k = int32_t(p.tokens_k > 0 ? p.seqlen_k : 0);
  params->pack = int32_t(pack);
  params->head_units = int32_t(p.heads_q / pack);
  params->group = int32_t(p.heads_q / p.heads_kv);
  params->head_dim_v = int32_t(p.head_dim_v);
  params->q_tiles = int32_t((p.seqlen_q * pack + tile_m - 1) / tile_m);
  int64_t const kv_bytes = std::max<int64_t>(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * bits_of(p.kv_format) / 8);
  int64_t const kv_heads = std::max<int64_t>(1, arguments.device->l2_bytes / 2 / kv_bytes);
  int64_t const pairs = int64_t(params->batch) * params->head_units;
  params->section = int32_t(std::max<int64_t>(std::min(kv_heads * params->group / pack, pairs), 1));
  params->window_left = int32_t(p.window_left);
  params->window_right = int32_t(p.window_right);
  params->scale = o.scale;
  params->softcap = o.softcap;
  params->tile_counter = plan.counted ? static_cast<int32_t*>(arguments.workspace) : nullptr;
  params->sinks = o.sinks;
  params->keys_end_at_extent = !p.varlen && !p.cached;
}

inline Status clear_tile_counter(AttentionLaunchArguments const& arguments, PrefillParams const& params) {
  if (!arguments.plan->counted) return Status::success();
  return cuda_status(cudaMemsetAsync(params.tile_counter, 0, sizeof(int32_t), arguments.stream), "cudaMemsetAsync(tile counter)");
}

}  // namespace minfer::attention
