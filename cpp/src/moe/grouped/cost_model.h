// The analytic cost model of the grouped GEMM planner: microseconds for (kernel, problem, device, whether rows are gathered first), from
// constants measured on the H200.
#pragma once

#include "minfer/moe.h"

namespace minfer::moe {

/// The prediction is the larger of the busiest CTA's tiles and the bytes, plus the start.
struct CostModel {
  // 16-bit weights. A tile takes as long as its products, its bytes into the SM, or the gather of its rows, and tile_us.
  double start_us = 2.18, expert_us = 0.00186;  // expert_us: of each expert in the table of tiles
  double gated = 1.82;  // factor of epilogues
  double power = 2.27;  // how much of the smaller limit shows
  double l2 = 2.71, l2_power = 2.83;  // times the read bandwidth, of the bytes of all tiles
  double tail = 0.122;   // of the bytes' time, for each part of a wave that is empty
  double last_wave = 0.336;  // tiles' times that are added where tiles differ or are many
  // Rows that the loader gathers: us of a column of k, however few rows a tile has, and bytes/us into one SM.
  double gather_narrow_us = 0.00254, gather_us = 0.00349, gather_bytes = 42e3;
  double many_rows = 2048, many_rate = 0.677, tall_rate = 0.891;
  double deep_k = 4096, deep_rows = 96, deep_experts = 64, deep_rate = 0.456;
  double copy_share = 0.497;  // of the read bandwidth, of what a launch that gathers before writes
  double copy_us = 1.45;
  // Of the tensor cores' rate and of the read bandwidth, what a kernel's mainloop reaches; bytes/us into one SM; a tile's first and last
  // steps. By its tile.
  double rate_64x16 = 0.227, bandwidth_64x16 = 1.04, load_64x16 = 220e3, tile_64x16_us = 0.485, token_64x16_us = 0.0446;
  double rate_64x64 = 0.78, bandwidth_64x64 = 1.08, load_64x64 = 94e3, tile_64x64_us = 1.08, token_64x64_us = 0.00806;
  double rate_128x128 = 1.61, bandwidth_128x128 = 1.07, load_128x128 = 119e3, tile_128x128_us = 1.47, token_128x128_us = 0.0174;
  double rate_128x192 = 1.52, bandwidth_128x192 = 0.965, load_128x192 = 122e3, tile_128x192_us = 0.778, token_128x192_us = 0.0109;
  double rate_128x256 = 1.52, bandwidth_128x256 = 0.943, load_128x256 = 107e3, tile_128x256_us = 1.09, token_128x256_us = 0.0188;
  double rate_256x128 = 1.15, bandwidth_256x128 = 0.88, load_256x128 = 216e3, tile_256x128_us = 1.8, token_256x128_us = 0.0191;
  double rate_portable = 0.4, bandwidth_portable = 0.7, load_portable = 50e3, tile_portable_us = 3, token_portable_us = 0.03;

  // Quantised weights: a stage takes as long with one token as with all that fit.
  double quantised_start_us = 2.73, quantised_tail = 0.519, quantised_share = 1.78;
  double quantised_last_wave = 0.6, quantised_power = 1.74, quantised_copy_us = 1.22, quantised_gated = 1.24;
  double stage_nvfp4 = 1.15;       // factor
  // us of a stage, by the tokens of a tile; "fine": of kernels for groups of less than 128. The loader's gather does not keep up with
  // stages this short: gather_ is its factor.
  double stage_8_us = 0.446, stage_8_fine_us = 0.58, gather_8 = 1.8, tile_8_us = 0.675, token_8_us = 0.0153;
  double stage_16_us = 0.717, stage_16_fine_us = 0.814, gather_16 = 1.65, tile_16_us = 0.696, token_16_us = 0.00806;
  double stage_32_us = 0.701, gather_32 = 1.49, tile_32_us = 1.27, token_32_us = 0.0213;
  double stage_64_us = 0.443, stage_64_fine_us = 0.548, gather_64 = 1.7, tile_64_us = 1.08, token_64_us = 0.0115;
  double stage_128_us = 0.632, stage_128_fine_us = 0.8, gather_128 = 1.78, tile_128_us = 0.577, token_128_us = 0.0202;

  // The routings that a plan reckons with, which knows of none which it will be, and how likely they are: rows that are spread evenly; by the
  // experts' popularity (Zipf's law); and rows that all have the same few experts.
  double even_weight = 1.0, zipf_weight = 1.0, same_weight = 0.2;
  double zipf_experts = 4.0, same_experts = 2.0;  // of a token, as assumed where they are not known
};

/// The constants by name, as _predict_grouped takes them.
struct CostConstant {
  char const* name;
  double CostModel::*value;
};
#define MINFER_COST_CONSTANT(name) \
  CostConstant { #name, &CostModel::name }
constexpr CostConstant kCostConstants[] = {
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
    MINFER_COST_CONSTANT(even_weight),
    MINFER_COST_CONSTANT(zipf_weight),
    MINFER_COST_CONSTANT(same_weight),
    MINFER_COST_CONSTANT(zipf_experts),
    MINFER_COST_CONSTANT(same_experts),
};
#undef MINFER_COST_CONSTANT
static_assert(sizeof(kCostConstants) / sizeof(kCostConstants[0]) == sizeof(CostModel) / sizeof(double), "every constant has a name");

inline bool quantised(GroupedProblem const& p) { return p.b_format != WeightFormat::kDense; }

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
