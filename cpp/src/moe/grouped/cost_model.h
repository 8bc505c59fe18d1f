// The analytic cost model of the grouped GEMM planner: microseconds for (kernel, problem, device, whether rows are gathered first), from
// constants measured on the H200.
#pragma once

#include "common/cost_constant.h"
#include "minfer/moe.h"

namespace minfer::moe {

/// Fitted to 4500 timings of 450 random problems on the H200 and to those of Mixtral's, Qwen3's, DeepSeek-V3's and gpt-oss's second
/// products (error 7 %). The rates of tiles of 128 x 128 and more, deep_ and the weights of
/// routings are set by hand.
struct CostModel {
  // 16-bit weights. A tile takes as long as its products, its bytes into the SM, or the gather of its rows, and tile_us.
  double start_us = 2.02, expert_us = 0.0018;  // expert_us: of each expert in the table of tiles
  double gated = 1.74;                         // factor of epilogues
  double power = 2.12;                         // how much of the smaller limit shows
  double l2 = 2.61, l2_power = 5.12;           // times the read bandwidth, of the bytes of all tiles
  double tail = 0.0611;                        // of the bytes' time, for each part of a wave that is empty
  double last_wave = 0.191;                    // tiles' times that are added where tiles differ or are many
  // Rows that the loader gathers: us of a column of k, however few rows a tile has, and bytes/us into one SM.
  double gather_narrow_us = 0.00232, gather_us = 0.003, gather_bytes = 33.3e3;
  double many_rows = 2048, many_rate = 0.882, tall_rate = 0.811;
  double deep_k = 4096, deep_rows = 96, deep_experts = 64, deep_rate = 0.8;
  double copy_share = 0.564;  // of the read bandwidth, of what a launch that gathers before writes
  double copy_us = 1.5;
  // Of the tensor cores' rate and of the read bandwidth, what a kernel's mainloop reaches; bytes/us into one SM; a tile's first and last
  // steps. By its tile.
  double rate_64x16 = 0.204, bandwidth_64x16 = 0.956, load_64x16 = 300e3, tile_64x16_us = 0.432, token_64x16_us = 0.0543;
  double rate_64x64 = 0.541, bandwidth_64x64 = 1.02, load_64x64 = 89e3, tile_64x64_us = 1.17, token_64x64_us = 0.0048;
  double rate_128x128 = 0.95, bandwidth_128x128 = 0.976, load_128x128 = 117e3, tile_128x128_us = 1.24, token_128x128_us = 0.0188;
  double rate_128x192 = 1.02, bandwidth_128x192 = 0.961, load_128x192 = 113e3, tile_128x192_us = 0.934, token_128x192_us = 0.00819;
  double rate_128x256 = 1.1, bandwidth_128x256 = 0.887, load_128x256 = 120e3, tile_128x256_us = 1.46, token_128x256_us = 0.0137;
  double rate_256x128 = 0.985, bandwidth_256x128 = 0.861, load_256x128 = 172e3, tile_256x128_us = 2.19, token_256x128_us = 0.0165;
  double rate_portable = 0.4, bandwidth_portable = 0.7, load_portable = 50e3, tile_portable_us = 3, token_portable_us = 0.03;

  // Quantised weights: a stage takes as long with one token as with all that fit. Constants of int4 are fitted to 325
  // random problems on the H200, two thirds of them in bf16.
  double quantised_start_us = 2.59, quantised_tail = 0.464, quantised_share = 1.56;
  double quantised_last_wave = 0.68, quantised_power = 2.27, quantised_copy_us = 1.24, quantised_gated = 1.19;
  double stage_nvfp4 = 1.15;  // factor
  // us of a stage, by the tokens of a tile; "fine": of kernels for groups of less than 128. The loader's gather does not keep up with
  // stages this short: gather_ is its factor.
  double stage_8_us = 0.489, stage_8_fine_us = 0.58, gather_8 = 1.47, tile_8_us = 0.864, token_8_us = 0.0084;
  double stage_16_us = 0.628, stage_16_fine_us = 0.809, gather_16 = 1.54, tile_16_us = 0.971, token_16_us = 0.00521;
  double stage_32_us = 0.776, gather_32 = 1.5, tile_32_us = 0.977, token_32_us = 0.0107;
  double stage_64_us = 0.511, stage_64_fine_us = 0.586, gather_64 = 1.55, tile_64_us = 1.03, token_64_us = 0.0134;
  double stage_128_us = 0.729, stage_128_fine_us = 0.784, gather_128 = 1.44, tile_128_us = 0.795, token_128_us = 0.019;

  // Of kernels that add up k in order, and of one of the batch-invariant mode: stages of 128 of k, by their tile.
  double stage_ordered_64x8_us = 0.324, stage_ordered_128x8_us = 0.502, stage_ordered_128x16_us = 0.612, stage_invariant_64x32_us = 0.463;
  double stage_ordered_fine = 1.08;  // factor of those for groups of less than 128
  double stage_folded = 0.876;       // factor where scales and zero points of fragments are one multiply-add

  // Operands of 8 bits, fitted to 450 random problems (seeds 2000, 3000, 4000) on an H100, but for the share of the bandwidth, which is the
  // H200's. A k tile of 128 takes as long as its products, or its loads, at least stage_ us; a tile's first and last steps.
  double scaled_start_us = 2.32, scaled_share = 0.93, scaled_last_wave = 0.243, scaled_power = 2.67, scaled_gated = 1.46;
  double scaled_copy_us = 1.62;
  double scaled_gather = 1.55;   // factor of a k tile whose rows the loader gathers
  double scaled_cluster = 0.95;  // and of one whose tokens are multicast, else
  double scaled_tail = 0.0786;   // of the bytes' time, for each part of a wave that is empty
  double scaled_blocks = 1.08;   // factor of a k tile with scales of groups
  // And more for each further group in it: by whether tokens are the columns of the MMA, or its rows.
  double scaled_parts = 0.311, scaled_parts_rows = 0.27;
  // us of a k tile of 128, however few tokens, and of each token; us of a tile and of each of its tokens. By the rows of the weight and the
  // tokens of the kernel's tile; "rows": tokens are the rows of the MMA.
  double stage_64x16_us = 0.17, column_64x16_us = 0.000955, scaled_tile_64x16_us = 0.633, scaled_token_64x16_us = 0.0324;
  double stage_64x64_us = 0.212, column_64x64_us = 0.00478, scaled_tile_64x64_us = 1.16, scaled_token_64x64_us = 0.0119;
  double stage_128x128_us = 0.356, column_128x128_us = 0.00451, scaled_tile_128x128_us = 1.37, scaled_token_128x128_us = 0.0274;
  double stage_rows_128_us = 0.338, column_rows_128_us = 0.00221, scaled_tile_rows_128_us = 1.7, scaled_token_rows_128_us = 0.00321;
  double stage_rows_256_us = 0.582, column_rows_256_us = 0.00122, scaled_tile_rows_256_us = 2.69, scaled_token_rows_256_us = 0.0053;

  // The routings that a plan reckons with, since it does not know which it will be, and how likely they are: rows that are spread evenly;
  // by the experts' popularity (Zipf's law); and rows that all have the same few experts.
  double even_weight = 1.0, zipf_weight = 1.0, same_weight = 0.2;
  double zipf_experts = 4.0, same_experts = 2.0;  // of a token, as assumed where they are not known
};

/// The constants by name, as _predict_grouped takes them.
constexpr CostConstant<CostModel> kCostConstants[] = {
    MINFER_COST_CONSTANT(start_us),
    MINFER_COST_CONSTANT(expert_us),
    MINFER_COST_CONSTANT(gated),
    MINFER_COST_CONSTANT(power),
    MINFER_COST_CONSTANT(l2),
    MINFER_COST_CONSTANT(l2_power),
    MINFER_COST_CONSTANT(tail),
    MINFER_COST_CONSTANT(last_wave),
    MINFER_COST_CONSTANT(gather_narrow_us),
    MINFER_COST_CONSTANT(gather_us),
    MINFER_COST_CONSTANT(gather_bytes),
    MINFER_COST_CONSTANT(many_rows),
    MINFER_COST_CONSTANT(many_rate),
    MINFER_COST_CONSTANT(tall_rate),
    MINFER_COST_CONSTANT(deep_k),
    MINFER_COST_CONSTANT(deep_rows),
    MINFER_COST_CONSTANT(deep_experts),
    MINFER_COST_CONSTANT(deep_rate),
    MINFER_COST_CONSTANT(copy_share),
    MINFER_COST_CONSTANT(copy_us),
    MINFER_COST_CONSTANT(rate_64x16),
    MINFER_COST_CONSTANT(bandwidth_64x16),
    MINFER_COST_CONSTANT(load_64x16),
    MINFER_COST_CONSTANT(tile_64x16_us),
    MINFER_COST_CONSTANT(token_64x16_us),
    MINFER_COST_CONSTANT(rate_64x64),
    MINFER_COST_CONSTANT(bandwidth_64x64),
    MINFER_COST_CONSTANT(load_64x64),
    MINFER_COST_CONSTANT(tile_64x64_us),
    MINFER_COST_CONSTANT(token_64x64_us),
    MINFER_COST_CONSTANT(rate_128x128),
    MINFER_COST_CONSTANT(bandwidth_128x128),
    MINFER_COST_CONSTANT(load_128x128),
    MINFER_COST_CONSTANT(tile_128x128_us),
    MINFER_COST_CONSTANT(token_128x128_us),
    MINFER_COST_CONSTANT(rate_128x192),
    MINFER_COST_CONSTANT(bandwidth_128x192),
    MINFER_COST_CONSTANT(load_128x192),
    MINFER_COST_CONSTANT(tile_128x192_us),
    MINFER_COST_CONSTANT(token_128x192_us),
    MINFER_COST_CONSTANT(rate_128x256),
    MINFER_COST_CONSTANT(bandwidth_128x256),
    MINFER_COST_CONSTANT(load_128x256),
    MINFER_COST_CONSTANT(tile_128x256_us),
    MINFER_COST_CONSTANT(token_128x256_us),
    MINFER_COST_CONSTANT(rate_256x128),
    MINFER_COST_CONSTANT(bandwidth_256x128),
    MINFER_COST_CONSTANT(load_256x128),
    MINFER_COST_CONSTANT(tile_256x128_us),
    MINFER_COST_CONSTANT(token_256x128_us),
    MINFER_COST_CONSTANT(rate_portable),
    MINFER_COST_CONSTANT(bandwidth_portable),
    MINFER_COST_CONSTANT(load_portable),
    MINFER_COST_CONSTANT(tile_portable_us),
    MINFER_COST_CONSTANT(token_portable_us),
    MINFER_COST_CONSTANT(quantised_start_us),
    MINFER_COST_CONSTANT(quantised_tail),
    MINFER_COST_CONSTANT(quantised_share),
    MINFER_COST_CONSTANT(quantised_last_wave),
    MINFER_COST_CONSTANT(quantised_power),
    MINFER_COST_CONSTANT(quantised_copy_us),
    MINFER_COST_CONSTANT(quantised_gated),
    MINFER_COST_CONSTANT(stage_nvfp4),
    MINFER_COST_CONSTANT(stage_8_us),
    MINFER_COST_CONSTANT(stage_8_fine_us),
    MINFER_COST_CONSTANT(gather_8),
    MINFER_COST_CONSTANT(tile_8_us),
    MINFER_COST_CONSTANT(token_8_us),
    MINFER_COST_CONSTANT(stage_16_us),
    MINFER_COST_CONSTANT(stage_16_fine_us),
    MINFER_COST_CONSTANT(gather_16),
    MINFER_COST_CONSTANT(tile_16_us),
    MINFER_COST_CONSTANT(token_16_us),
    MINFER_COST_CONSTANT(stage_32_us),
    MINFER_COST_CONSTANT(gather_32),
    MINFER_COST_CONSTANT(tile_32_us),
    MINFER_COST_CONSTANT(token_32_us),
    MINFER_COST_CONSTANT(stage_64_us),
    MINFER_COST_CONSTANT(stage_64_fine_us),
    MINFER_COST_CONSTANT(gather_64),
    MINFER_COST_CONSTANT(tile_64_us),
    MINFER_COST_CONSTANT(token_64_us),
    MINFER_COST_CONSTANT(stage_128_us),
    MINFER_COST_CONSTANT(stage_128_fine_us),
    MINFER_COST_CONSTANT(gather_128),
    MINFER_COST_CONSTANT(tile_128_us),
    MINFER_COST_CONSTANT(token_128_us),
    MINFER_COST_CONSTANT(stage_ordered_64x8_us),
    MINFER_COST_CONSTANT(stage_ordered_128x8_us),
    MINFER_COST_CONSTANT(stage_ordered_128x16_us),
    MINFER_COST_CONSTANT(stage_invariant_64x32_us),
    MINFER_COST_CONSTANT(stage_ordered_fine),
    MINFER_COST_CONSTANT(stage_folded),
    MINFER_COST_CONSTANT(scaled_start_us),
    MINFER_COST_CONSTANT(scaled_share),
    MINFER_COST_CONSTANT(scaled_last_wave),
    MINFER_COST_CONSTANT(scaled_power),
    MINFER_COST_CONSTANT(scaled_gated),
    MINFER_COST_CONSTANT(scaled_copy_us),
    MINFER_COST_CONSTANT(scaled_gather),
    MINFER_COST_CONSTANT(scaled_tail),
    MINFER_COST_CONSTANT(scaled_parts),
    MINFER_COST_CONSTANT(scaled_parts_rows),
    MINFER_COST_CONSTANT(scaled_blocks),
    MINFER_COST_CONSTANT(stage_64x16_us),
    MINFER_COST_CONSTANT(column_64x16_us),
    MINFER_COST_CONSTANT(scaled_tile_64x16_us),
    MINFER_COST_CONSTANT(scaled_token_64x16_us),
    MINFER_COST_CONSTANT(stage_64x64_us),
    MINFER_COST_CONSTANT(column_64x64_us),
    MINFER_COST_CONSTANT(scaled_tile_64x64_us),
    MINFER_COST_CONSTANT(scaled_token_64x64_us),
    MINFER_COST_CONSTANT(stage_128x128_us),
    MINFER_COST_CONSTANT(column_128x128_us),
    MINFER_COST_CONSTANT(scaled_tile_128x128_us),
    MINFER_COST_CONSTANT(scaled_token_128x128_us),
    MINFER_COST_CONSTANT(stage_rows_128_us),
    MINFER_COST_CONSTANT(column_rows_128_us),
    MINFER_COST_CONSTANT(scaled_tile_rows_128_us),
    MINFER_COST_CONSTANT(scaled_token_rows_128_us),
    MINFER_COST_CONSTANT(stage_rows_256_us),
    MINFER_COST_CONSTANT(column_rows_256_us),
    MINFER_COST_CONSTANT(scaled_tile_rows_256_us),
    MINFER_COST_CONSTANT(scaled_token_rows_256_us),
    MINFER_COST_CONSTANT(even_weight),
    MINFER_COST_CONSTANT(zipf_weight),
    MINFER_COST_CONSTANT(same_weight),
    MINFER_COST_CONSTANT(zipf_experts),
    MINFER_COST_CONSTANT(same_experts),
    MINFER_COST_CONSTANT(scaled_cluster),
};
static_assert(sizeof(kCostConstants) / sizeof(kCostConstants[0]) == sizeof(CostModel) / sizeof(double), "every constant has a name");

inline bool quantised(GroupedProblem const& p) { return p.b_format != WeightFormat::kDense; }
inline bool has_8_bits(GroupedProblem const& p) { return p.type == DataType::kE4M3 || p.type == DataType::kS8; }

/// No launch is faster, with rows that are spread evenly over the experts.
double floor_us(GroupedProblem const& problem, DeviceProperties const& device);

/// How rows are spread over experts: groups of experts with about as many rows each.
struct Routing {
  static constexpr int kMaxGroups = 6;
  struct Group {
    double experts;  // that have rows
    double rows;     // of each, on average
    bool exact;      // all have as many
  };
  Group groups[kMaxGroups];
  int count = 0;
};
/// Rows of `top_k` experts for each token; 0: not known. Then even rows are each for themselves, and others as the model assumes.
Routing even_routing(GroupedProblem const& problem, double top_k = 0.0);
Routing zipf_routing(CostModel const& model, GroupedProblem const& problem, double top_k = 0.0);
Routing same_routing(CostModel const& model, GroupedProblem const& problem, double top_k = 0.0);

/// Without regard to the floor. gather_first: rows are gathered by a launch of its own.
double predict_us(CostModel const& model, KernelInfo const& kernel, GroupedProblem const& problem, Routing const& routing,
                  DeviceProperties const& device, bool gather_first);

}  // namespace minfer::moe
