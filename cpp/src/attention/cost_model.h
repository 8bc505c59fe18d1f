// The analytic cost model of the attention planner: microseconds for (kernel, problem, device), from constants measured on the H200.
#pragma once

#include "minfer/attention.h"

namespace minfer::attention {

/// The time of a tile of queries in prefill: fixed_us for its first and last products and its output, plus a multiple of the time that its
/// products would take at the tensor cores' rate: `all` times that of all its warpgroups, and `longest` times that of the warpgroup with
/// most keys, since under a causal mask others have fewer. Fitted to 20 times (H200, head_dim 128, causal and full, 256 to 1024 queries, 1
/// and 4 heads per KV head; error 2 %, at most 6 %); of portable kernels estimated, not measured.
///
/// Split-KV is bound by the bytes of keys and values, read from memory and again from L2 for every further output tile, or by instructions:
/// it reaches a sixth of the tensor cores' rate, over int4 a ninth (H200, head_dim 128, 64 rows and more: 95 to 147 TFLOP/s, 79 to 86).
struct CostModel {
  double start_us = 4.0;
  double fixed_192_us = 3.0, all_192 = 0.37, longest_192 = 2.2;  // tiles of 192 queries
  double fixed_128_us = 2.6, all_128 = 1.0, longest_128 = 0.5;
  double fixed_portable_us = 2.7, all_portable = 1.7, longest_portable = 0.0;
  double last_wave = 0.4;  // tiles' times that are added where there are more tiles than SMs
  // The time of a tile for K and V of 128 keys and 128 columns where a warpgroup converts them from codes (H200, 8192 and 65536 keys).
  double convert_int4_us = 3.1, convert_int8_us = 2.6, convert_fp8_us = 2.4;
  double decode_start_us = 6.0;
  double decode_l2 = 2.0;  // times the read bandwidth, of the reads from L2
  double decode_mma = 6.0, decode_mma_int4 = 9.0;
};

/// The constants by name, as _predict_attention takes them.
struct CostConstant {
  char const* name;
  double CostModel::*value;
};
#define MINFER_COST_CONSTANT(name) \
  CostConstant { #name, &CostModel::name }
constexpr CostConstant kCostConstants[] = {
    MINFER_COST_CONSTANT(start_us),         MINFER_COST_CONSTANT(fixed_192_us),      MINFER_COST_CONSTANT(all_192),
    MINFER_COST_CONSTANT(longest_192),      MINFER_COST_CONSTANT(fixed_128_us),      MINFER_COST_CONSTANT(all_128),
    MINFER_COST_CONSTANT(longest_128),      MINFER_COST_CONSTANT(fixed_portable_us), MINFER_COST_CONSTANT(all_portable),
    MINFER_COST_CONSTANT(longest_portable), MINFER_COST_CONSTANT(last_wave),         MINFER_COST_CONSTANT(convert_int4_us),
    MINFER_COST_CONSTANT(convert_int8_us),  MINFER_COST_CONSTANT(convert_fp8_us),    MINFER_COST_CONSTANT(decode_start_us),
    MINFER_COST_CONSTANT(decode_l2),        MINFER_COST_CONSTANT(decode_mma),        MINFER_COST_CONSTANT(decode_mma_int4),
};
#undef MINFER_COST_CONSTANT
static_assert(sizeof(kCostConstants) / sizeof(kCostConstants[0]) == sizeof(CostModel) / sizeof(double), "every constant has a name");

inline bool splits_keys(KernelInfo const& kernel) { return kernel.schedule == Schedule::kSplitKv; }

/// Whether the kernel is prefill over a cache of codes.
inline bool converts(KernelInfo const& kernel) { return kernel.b_format == WeightFormat::kCodes; }

/// Packed query rows of a KV head in a sequence: the queries of all heads that read it.
inline int64_t rows_of(AttentionProblem const& p) { return p.heads_kv > 0 ? p.seqlen_q * (p.heads_q / p.heads_kv) : 0; }

/// Tiles of queries of all sequences; with varlen, as if all had the mean length.
double tiles_of(AttentionProblem const& problem, int tile_m, int64_t packed_heads);

/// Packs all heads of a KV head into a tile where that makes fewer tiles: short queries, which then also share the loads of K and V.
int64_t choose_packed_heads(KernelInfo const& kernel, AttentionProblem const& problem);

/// No launch is faster.
double floor_us(AttentionProblem const& problem, DeviceProperties const& device);

/// Without regard to the floor; of a prefill kernel with the packed heads that are chosen for it.
double predict_us(CostModel const& model, KernelInfo const& kernel, AttentionProblem const& problem, DeviceProperties const& device);

}  // namespace minfer::attention
