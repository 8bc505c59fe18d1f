// Fills in the parameters of a prefill launch on any architecture, all but the tensor maps, and clears the tile counter.
#pragma once

#include <algorithm>

#include "attention/prefill/params.h"
#include "attention/shared/launch.h"
#include "attention/shared/sequence_arguments.cuh"
#include "common/cuda_check.h"

namespace minfer::attention {

/// Chooses the sections of tiles (tile_scheduler.cuh). A section takes an eighth of L2: queries and output pass through it together with
/// the section's K and V, and each half of L2 may hold a copy of these (H200, 512 tokens: with 30 MB of K and V in a section, 1.0 to 2.1
/// times the operands' bytes came from memory; with 8 MB, 1.0 to 1.2 times).
inline void set_sections(AttentionLaunchArguments const& arguments, int tile_m, PrefillParams* params) {
  constexpr int64_t kL2Fraction = 8;  // a section takes 1 / kL2Fraction of L2
  constexpr int64_t kLastTiles = 2;   // tiles of a CTA in the last section, where tiles differ
  AttentionProblem const& p = *arguments.problem;
  int64_t const sms = arguments.device->sm_count, tiles = std::max(params->q_tiles, 1);
  int64_t const pairs = int64_t(params->batch) * params->head_tiles, tiles_per_kv = params->heads_per_kv / params->packed_heads;
  int64_t const key_bytes = std::max<int64_t>((p.head_dim + p.head_dim_v) * bits_of(p.kv_format) / 8, 1);
  params->section_keys = int32_t(arguments.device->l2_bytes / kL2Fraction / key_bytes);
  params->last_tiles = tiles_cost_the_same(p) ? 1 : int32_t(kLastTiles * sms);
  int64_t section = tiles_per_kv * std::max<int64_t>(params->section_keys / std::max<int64_t>(p.seqlen_k, 1), 1);
  if (!tiles_cost_the_same(p)) {
    section = std::max(section, (sms + tiles * tiles_per_kv - 1) / (tiles * tiles_per_kv) * tiles_per_kv);
  } else if (p.seqlen_q * params->packed_heads % tile_m == 0) {
    // All tiles are full, so no CTA always gets the short last tile of a sequence: neighbouring CTAs read the same K and V at the same
    // time.
    section = tiles_per_kv;
  }
  params->section = int32_t(std::max<int64_t>(std::min(section, pairs), 1));
  params->last_section = int32_t(std::max<int64_t>(pairs - (params->last_tiles + tiles - 1) / tiles, 0) / params->section);
}

inline void set_prefill_arguments(AttentionLaunchArguments const& arguments, int tile_m, PrefillParams* params) {
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  AttentionPlan const& plan = *arguments.plan;
  int64_t const packed_heads = plan.packed_heads;
  params->out = o.out;
  params->out_row = p.heads_q * p.head_dim_v;
  params->out_batch = p.seqlen_q * params->out_row;
  params->out_head = p.head_dim_v;
  params->lse = o.lse;
  params->lse_batch = o.lse_strides[0];
  params->lse_head = o.lse_strides[1];
  set_sequences(arguments, params, params);
  params->box_rows = int32_t(plan.box_rows);
  params->heads_q = int32_t(p.heads_q);
  params->heads_kv = int32_t(p.heads_kv);
  params->packed_heads = int32_t(packed_heads);
  params->head_tiles = int32_t(p.heads_q / packed_heads);
  params->heads_per_kv = int32_t(p.heads_q / p.heads_kv);
  params->head_dim_v = int32_t(p.head_dim_v);
  params->q_tiles = int32_t((p.seqlen_q * packed_heads + tile_m - 1) / tile_m);
  params->max_tiles = int32_t(std::min((p.tokens_q * packed_heads / tile_m + p.batch) * params->head_tiles, kMaxCount));
  set_sections(arguments, tile_m, params);
  params->window_left = int32_t(p.window_left);
  params->window_right = int32_t(p.window_right);
  params->softmax = o.softmax;
  if (o.softmax.softcap > 0.0f) params->cap = Softcap::make(o.softmax.scale, o.softmax.softcap);
  params->tile_counter = plan.counted ? static_cast<int32_t*>(arguments.workspace) : nullptr;
  params->keys_end_at_extent = !p.varlen && !p.cached;
}

/// Of batch-invariant kernels. The workspace holds the tile counter, then the partials of splits and their states, then the totals of CTAs.
template <class Traits>
void set_split_arguments(AttentionLaunchArguments const& arguments, typename Traits::Params* params) {
  AttentionPlan const& plan = *arguments.plan;
  SplitWorkspace const at = split_workspace_of(*plan.kernel, plan, *arguments.device);
  auto* const workspace = static_cast<char*>(arguments.workspace);
  params->split_count = int32_t(plan.split_count);
  params->split_rows = int32_t(plan.split_rows);
  params->max_splits = int32_t(plan.max_splits);
  params->slot_rows = int32_t(plan.slot_rows);
  params->max_items = int32_t(plan.partial_slots);
  params->partials = reinterpret_cast<float*>(workspace + at.partials);
  params->partial_states = reinterpret_cast<SplitState*>(workspace + at.states);
  params->totals = reinterpret_cast<float4*>(workspace + at.totals);
  params->packets = folds_in_launch(*plan.kernel, plan, *arguments.device) ? reinterpret_cast<Packet*>(workspace + at.partials) : nullptr;
  params->nonce = arguments.nonce;
}

inline Status clear_tile_counter(AttentionLaunchArguments const& arguments, PrefillParams const& params) {
  if (!arguments.plan->counted) return Status::success();
  return cuda_status(cudaMemsetAsync(params.tile_counter, 0, sizeof(int32_t), arguments.stream), "cudaMemsetAsync(tile counter)");
}

}  // namespace minfer::attention
