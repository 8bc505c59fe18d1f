// The analytic cost model of the attention planner: microseconds for (kernel, problem, device), from constants measured on an H100.
#pragma once

#include "common/cost_constant.h"
#include "minfer/attention.h"

namespace minfer::attention {

/// Prefill is bound by its busiest SM, by the bytes from memory or by those from L2. A tile of queries takes fixed_us for its first and
/// last products and its output, plus a multiple of the time that its products would take at the tensor cores' rate: `all` times that of
/// all its warpgroups, and `longest` times that of the warpgroup with most keys, since under a causal mask others have fewer; or as long as
/// its keys take to be loaded, by boxes of a page, or to be converted from codes. Of portable kernels estimated, not measured.
///
/// Split-KV is bound by the steps of its CTAs, which all have as many, or by bytes likewise. A step is a key and 8 or 16 rows; every output
/// tile, or part of one, takes item_us for its queries and its merge.
///
/// Fitted to the timings of 612 of 817 problems on an H100, random ones and short caches of three models' heads (error 8 %; of the problems
/// that were held out, plans lose 0.6 %); `uneven` is set by hand. An H200 differs by its bandwidth alone.
struct CostModel {
  double start_us = 2.99;
  double next_tile = 1.25;       // of fixed_us, of tiles behind a CTA's first one
  double next_cached_us = 1.08;  // of these over a cache: the counter, the length and the pages follow each other
  double fixed_d64_us = 1.34, all_d64 = 0.764, longest_d64 = 1.3;
  double fixed_tall_us = 1.71, all_tall = 0.584, longest_tall = 0.83;  // head_dim 128, 192 queries
  double fixed_d128_us = 2.24, all_d128 = 0.404, longest_d128 = 1.03;
  double fixed_d192x128_us = 2.63, all_d192x128 = 0.418, longest_d192x128 = 0.964;
  double fixed_d192_us = 2.51, all_d192 = 0.415, longest_d192 = 0.855;
  double fixed_d256_us = 2.5, all_d256 = 0.477, longest_d256 = 0.753;
  double fixed_codes_d128_us = 2.53, all_codes_d128 = 0.609, longest_codes_d128 = 1.81;
  double fixed_codes_d256_us = 3.49, all_codes_d256 = 0.692, longest_codes_d256 = 1.63;
  double fixed_portable_us = 2.7, all_portable = 1.7, longest_portable = 0;
  double last_wave = 0.628;                                   // tiles' times that are added where there are more tiles than SMs
  double block_us = 0.629, box_us = 0.0307, page_us = 0.204;  // of the loads of a block of keys, of each TMA box and where there are pages
  // The time of a tile for K and V of 128 keys and 128 columns where a warpgroup converts them from codes.
  double convert_int4_us = 2.27, convert_int8_us = 1.91, convert_fp8_us = 1.24;
  double residual_us = 2.83;                             // of a tile over int4 codes: the newest tokens, in 16 bits
  double bandwidth = 0.971, l2 = 2.97;                   // times the read bandwidth
  double decode_start_us = 2.6, decode_table_us = 2.99;  // table: of more than 32 sequences
  double item_d64_us = 1.51, item_d128_us = 2.1, item_d256_us = 3.06;
  double item_codes = 1.61, item_rows = 1.03;  // factors: over codes, and of a second 8 rows
  double merge_us = 0.243;                     // of 8 rows of 128 columns that another CTA leaves
  // Of a step, multiples of the time that the products of 8 rows would take at the tensor cores' rate: of its key, and of each 8 rows.
  double key_dense = 9.65, key_fp8 = 3.3, key_int8 = 5, key_int4 = 6.14;
  double rows_d64 = 2.69, rows_d128 = 1.96, rows_d256 = 2.09;
  double decode_portable = 1.5;  // factor of steps
  double decode_bandwidth = 1.09, decode_l2 = 1.17;
  // Prefill over a cache of several sequences: these may be of different lengths, which split-KV alone evens out. Squared where tiles do
  // not fill the SMs, so that the longest sequence decides.
  double uneven = 1.05;
};

/// The constants by name, as _predict_attention takes them.
constexpr CostConstant<CostModel> kCostConstants[] = {
    MINFER_COST_CONSTANT(start_us),
    MINFER_COST_CONSTANT(next_tile),
    MINFER_COST_CONSTANT(next_cached_us),
    MINFER_COST_CONSTANT(fixed_d64_us),
    MINFER_COST_CONSTANT(all_d64),
    MINFER_COST_CONSTANT(longest_d64),
    MINFER_COST_CONSTANT(fixed_tall_us),
    MINFER_COST_CONSTANT(all_tall),
    MINFER_COST_CONSTANT(longest_tall),
    MINFER_COST_CONSTANT(fixed_d128_us),
    MINFER_COST_CONSTANT(all_d128),
    MINFER_COST_CONSTANT(longest_d128),
    MINFER_COST_CONSTANT(fixed_d192x128_us),
    MINFER_COST_CONSTANT(all_d192x128),
    MINFER_COST_CONSTANT(longest_d192x128),
    MINFER_COST_CONSTANT(fixed_d192_us),
    MINFER_COST_CONSTANT(all_d192),
    MINFER_COST_CONSTANT(longest_d192),
    MINFER_COST_CONSTANT(fixed_d256_us),
    MINFER_COST_CONSTANT(all_d256),
    MINFER_COST_CONSTANT(longest_d256),
    MINFER_COST_CONSTANT(fixed_codes_d128_us),
    MINFER_COST_CONSTANT(all_codes_d128),
    MINFER_COST_CONSTANT(longest_codes_d128),
    MINFER_COST_CONSTANT(fixed_codes_d256_us),
    MINFER_COST_CONSTANT(all_codes_d256),
    MINFER_COST_CONSTANT(longest_codes_d256),
    MINFER_COST_CONSTANT(fixed_portable_us),
    MINFER_COST_CONSTANT(all_portable),
    MINFER_COST_CONSTANT(longest_portable),
    MINFER_COST_CONSTANT(last_wave),
    MINFER_COST_CONSTANT(block_us),
    MINFER_COST_CONSTANT(box_us),
    MINFER_COST_CONSTANT(page_us),
    MINFER_COST_CONSTANT(convert_int4_us),
    MINFER_COST_CONSTANT(convert_int8_us),
    MINFER_COST_CONSTANT(convert_fp8_us),
    MINFER_COST_CONSTANT(residual_us),
    MINFER_COST_CONSTANT(bandwidth),
    MINFER_COST_CONSTANT(l2),
    MINFER_COST_CONSTANT(decode_start_us),
    MINFER_COST_CONSTANT(decode_table_us),
    MINFER_COST_CONSTANT(item_d64_us),
    MINFER_COST_CONSTANT(item_d128_us),
    MINFER_COST_CONSTANT(item_d256_us),
    MINFER_COST_CONSTANT(item_codes),
    MINFER_COST_CONSTANT(item_rows),
    MINFER_COST_CONSTANT(merge_us),
    MINFER_COST_CONSTANT(key_dense),
    MINFER_COST_CONSTANT(key_fp8),
    MINFER_COST_CONSTANT(key_int8),
    MINFER_COST_CONSTANT(key_int4),
    MINFER_COST_CONSTANT(rows_d64),
    MINFER_COST_CONSTANT(rows_d128),
    MINFER_COST_CONSTANT(rows_d256),
    MINFER_COST_CONSTANT(decode_portable),
    MINFER_COST_CONSTANT(decode_bandwidth),
    MINFER_COST_CONSTANT(decode_l2),
    MINFER_COST_CONSTANT(uneven),
};
static_assert(sizeof(kCostConstants) / sizeof(kCostConstants[0]) == sizeof(CostModel) / sizeof(double), "every constant has a name");

constexpr int64_t kMinSplitKeys = 128;  // of a split-KV CTA

inline bool splits_keys(KernelInfo const& kernel) { return kernel.schedule == Schedule::kSplitKv; }

/// Whether the kernel is prefill over a cache of codes.
inline bool converts(KernelInfo const& kernel) { return kernel.b_format != WeightFormat::kDense && !splits_keys(kernel); }

/// Whether the kernel reads keys and values of that format.
inline bool reads(KernelInfo const& kernel, WeightFormat format) {
  if (kernel.b_format != WeightFormat::kCodes) return format == kernel.b_format;
  return format != WeightFormat::kDense && (format != WeightFormat::kInt8 || kernel.ab_type == DataType::kF16);
}

/// Packed query rows of a KV head in a sequence: the queries of all heads that read it.
inline int64_t rows_of(AttentionProblem const& p) { return p.heads_kv > 0 ? p.seqlen_q * (p.heads_q / p.heads_kv) : 0; }

/// Tiles of queries of all sequences; with varlen, as if all had the mean length.
double tiles_of(AttentionProblem const& problem, int tile_m, int64_t packed_heads);

/// Packs all heads of a KV head into a tile where that makes fewer tiles: short queries, which then also share the loads of K and V.
int64_t choose_packed_heads(KernelInfo const& kernel, AttentionProblem const& problem);

/// No launch is faster.
double floor_us(AttentionProblem const& problem, DeviceProperties const& device);

/// The problem where every sequence has keys on all its pages, and on this share of its last one.
AttentionProblem with_last_page(AttentionProblem const& problem, double share);
/// Plans reckon with both of these, since they know the number of pages alone.
constexpr double kFullPage = 0.875, kEmptyPage = 0.125;

/// Without regard to the floor; of a prefill kernel with the packed heads that are chosen for it.
double predict_us(CostModel const& model, KernelInfo const& kernel, AttentionProblem const& problem, DeviceProperties const& device);

}  // namespace minfer::attention
