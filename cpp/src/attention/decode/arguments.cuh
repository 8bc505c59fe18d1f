// Fills in the parameters of a decode launch on any architecture, all but the tensor maps.
#pragma once

#include <algorithm>

#include "attention/decode/params.h"
#include "attention/shared/launch.h"
#include "attention/shared/sequence_arguments.cuh"

namespace minfer::attention {

template <class Traits>
void set_decode_arguments(AttentionLaunchArguments const& arguments, DecodeParams* params) {
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  AttentionPlan const& plan = *arguments.plan;
  params->q = o.q;
  params->q_bytes = o.q_strides[1] == p.heads_q * p.head_dim ? p.tokens_q * o.q_strides[1] * 2 : 0;
  params->q_batch = o.q_strides[0];
  params->q_row = o.q_strides[1];
  params->q_head = o.q_strides[2];
  params->out = o.out;
  params->out_row = p.heads_q * p.head_dim_v;
  params->out_batch = p.seqlen_q * params->out_row;
  params->lse = o.lse;
  params->lse_batch = o.lse_strides[0];
  params->lse_head = o.lse_strides[1];
  set_sequences(arguments, params, params);
  params->block_table_bytes = p.paged && p.batch > 0 ? ((p.batch - 1) * o.block_table_stride + p.seqlen_k / p.page_size) * 4 : 0;
  params->box_rows = int32_t(plan.box_rows);
  params->boxes_of_block = int32_t(Traits::kTileN / plan.box_rows);
  params->by_heads_per_kv = cutlass::FastDivmod(int(p.heads_q / p.heads_kv));
  params->by_lockstep = cutlass::FastDivmod(int(plan.lockstep));
  params->by_ranges = cutlass::FastDivmod(int(plan.ctas / plan.lockstep));
  params->heads_q = int32_t(p.heads_q);
  params->heads_kv = int32_t(p.heads_kv);
  params->heads_per_kv = int32_t(p.heads_q / p.heads_kv);
  params->head_dim = int32_t(p.head_dim);
  params->head_dim_v = int32_t(p.head_dim_v);
  params->row_tiles = int32_t(plan.row_tiles);
  params->window_left = int32_t(p.window_left);
  params->window_right = int32_t(p.window_right);
  params->softmax = o.softmax;
  params->k_scale = o.k_scale;
  params->v_scale = o.v_scale;
  params->scale_stride = int32_t(p.scale_per_head);
  params->group_tokens = int32_t(p.group_tokens);
  params->groups_v = int32_t(p.groups_v);
  for (int vector = 0; vector < 8 && p.groups_v > 0; ++vector) {
    params->v_group_of_vector |= uint32_t(std::min(vector * 32 * p.groups_v / p.head_dim_v, p.groups_v - 1)) << 4 * vector;
  }
  params->k_scale_page = p.heads_kv * (Traits::kInt4 ? p.page_size / std::max<int64_t>(p.group_tokens, 1) * 2 * p.head_dim : p.page_size);
  params->v_scale_page = p.heads_kv * p.page_size * (Traits::kInt4 ? 2 * p.groups_v : 1);
  params->token_groups_of_page = int32_t(p.group_tokens > 0 ? p.page_size / p.group_tokens : 0);
  params->k_residual = o.k_residual;
  params->v_residual = o.v_residual;
  params->num_splits = int32_t(p.num_splits);
  params->min_key_blocks = int32_t(plan.min_key_blocks);
  params->max_steps = int32_t(p.num_splits > 0 ? plan.partial_slots / plan.lockstep : kMaxCount);
  params->partial_slots = static_cast<Packet*>(arguments.workspace);
  params->nonce = arguments.nonce;
}

}  // namespace minfer::attention
