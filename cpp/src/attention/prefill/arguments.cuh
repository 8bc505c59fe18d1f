// What every prefill launch, of any architecture, tells its kernel: all of PrefillParams but the tensor maps, and the tile counter at zero.
#pragma once

#include <algorithm>

#include "attention/prefill/params.h"
#include "attention/shared/launch.h"
#include "attention/shared/sequence_arguments.cuh"
#include "common/cuda_check.h"

namespace minfer::attention {

/// Sections of tiles, see tile_scheduler.cuh. Queries and output pass through L2 beside a section's K and V, and each of its halves may hold a
/// copy of them (H200, 512 tokens: with 30 MB of K and V a section 1.0 to 2.1 times the operands' bytes came from memory, with 8 MB 1.0 to 1.2).
inline void set_sections(AttentionLaunchArguments const& arguments, int tile_m, PrefillParams* params) {
  constexpr int64_t kOfL2 = 8;       // one part in so many
  constexpr int64_t kLastTiles = 2;  // of a CTA in the last section, where tiles differ
  AttentionProblem const& p = *arguments.problem;
  int64_t const sms = arguments.device->sm_count, tiles = std::max(params->q_tiles, 1);
  int64_t const pairs = int64_t(params->batch) * params->head_units, of_kv_head = params->group / params->pack;
  int64_t const key_bytes = std::max<int64_t>((p.head_dim + p.head_dim_v) * bits_of(p.kv_format) / 8, 1);
  params->section_keys = int32_t(arguments.device->l2_bytes / kOfL2 / key_bytes);
  params->last_tiles = tiles_alike(p) ? 1 : int32_t(kLastTiles * sms);
  int64_t section = of_kv_head * std::max<int64_t>(params->section_keys / std::max<int64_t>(p.seqlen_k, 1), 1);
  if (!tiles_alike(p)) {
    section = std::max(section, (sms + tiles * of_kv_head - 1) / (tiles * of_kv_head) * of_kv_head);
  } else if (p.seqlen_q * params->pack % tile_m == 0) {  // without a shorter one that some CTAs would always get
    section = of_kv_head;                                // neighbours read the same K and V at once
  }
  params->section = int32_t(std::max<int64_t>(std::min(section, pairs), 1));
  params->last_section = int32_t(std::max<int64_t>(pairs - (params->last_tiles + tiles - 1) / tiles, 0) / params->section);
}

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
  set_sequences(arguments, params, params);
  params->box_rows = int32_t(plan.box_rows);
  params->heads_q = int32_t(p.heads_q);
  params->heads_kv = int32_t(p.heads_kv);
  params->pack = int32_t(pack);
  params->head_units = int32_t(p.heads_q / pack);
  params->group = int32_t(p.heads_q / p.heads_kv);
  params->head_dim_v = int32_t(p.head_dim_v);
  params->q_tiles = int32_t((p.seqlen_q * pack + tile_m - 1) / tile_m);
  params->max_tiles = int32_t(std::min((p.tokens_q * pack / tile_m + p.batch) * params->head_units, kMaxCounted));
  set_sections(arguments, tile_m, params);
  params->window_left = int32_t(p.window_left);
  params->window_right = int32_t(p.window_right);
  params->scale = o.scale;
  params->softcap = o.softcap;
  if (o.softcap > 0.0f) params->cap = Softcap::make(o.scale, o.softcap);
  params->tile_counter = plan.counted ? static_cast<int32_t*>(arguments.workspace) : nullptr;
  params->sinks = o.sinks;
  params->keys_end_at_extent = !p.varlen && !p.cached;
}

inline Status clear_tile_counter(AttentionLaunchArguments const& arguments, PrefillParams const& params) {
  if (!arguments.plan->counted) return Status::success();
  return cuda_status(cudaMemsetAsync(params.tile_counter, 0, sizeof(int32_t), arguments.stream), "cudaMemsetAsync(tile counter)");
}

}  // namespace minfer::attention
