// The analytic cost model of the grouped GEMM planner: microseconds for (kernel, problem, device, whether rows are gathered first), from
// constants measured on the H200.
#pragma once

#include "minfer/moe.h"

namespace minfer::moe {

/// The prediction is the larger of the busiest CTA's tiles and the bytes, plus the start.
struct CostModel {
  // 16-bit weights: a fit to 216 timings of 36 problems on the H200 (Mixtral, Qwen3, DeepSeek-V3 and gpt-oss from 1 to 4096 tokens; the
  // choice costs 0.5 % on their average); narrow_gather, many_*, tall_rate and deep_* were set afterwards, by a few cells each, and the
  // portable kernels' are a guess.
  double start_us = 1.6;
  double cooperative_tile_us = 2.8,
         pingpong_tile_us = 0.52;  // a tile's first bytes and stores; the other warpgroup's mainloop hides a part
  double tail = 0.48;              // of the bytes' time, for each part of a wave that is empty
  double power = 2.9;              // how much of the smaller limit shows
  double spread = 0.085;           // experts differ: standard deviations of a Poisson's below a tile's edge that still need a tile more
  double gather_bytes = 23e3, gather_power = 4;  // bytes/us into one SM by the loader's gather
  double narrow_gather = 1.2;
  // Routing that is not even gives some expert many of the rows, and narrow tiles then read its weights again and again (gpt-oss, 64 tokens
  // that agree: half the speed). Tiles of 64 tokens cost up to 5 % more where routing is even.
  double narrow_risk = 1.06;
  double narrow_rows = 64;  // with so few the risk is small
  double many_rows = 2048, many_rate = 0.96, tall_rate = 0.92;
  double deep_k = 4096, deep_rows = 96, deep_experts = 64, deep_rate = 0.8;
  double copy_share = 0.65;  // of the read bandwidth, of what a launch that gathers before writes
  double copy_us = 4.0;
  // Of the tensor cores' rate and of the read bandwidth, what a kernel's mainloop reaches, by its tile.
  double rate_64x16 = 0.25, bandwidth_64x16 = 1.0;
  double rate_64x64 = 0.38, bandwidth_64x64 = 0.96;
  double rate_128x128 = 0.86, bandwidth_128x128 = 0.99;
  double rate_128x192 = 1.0, bandwidth_128x192 = 0.98;
  double rate_128x256 = 1.02, bandwidth_128x256 = 0.925;
  double rate_256x128 = 1.05, bandwidth_256x128 = 0.95;
  double rate_other = 0.8, bandwidth_other = 0.95;
  double rate_portable = 0.4, bandwidth_portable = 0.7;

  // Quantised weights: a stage takes as long with one token as with all that fit. A fit to 258 timings of 71 problems on the H200 (int4 in
  // groups of 128, mxfp4; the choice costs 0.4 % on their average); groups of 32 and nvfp4 are guesses from the W4A16 GEMMs, the tile of 32
  // tokens and the gather were set afterwards.
  double quantised_start_us = 3.35, quantised_tile_us = 1.19, quantised_tail = 0.84, quantised_power = 6.8, quantised_share = 1.05;
  double quantised_gather = 1.55;  // the loader's copies do not keep up with stages this short
  double stage_nvfp4 = 1.15;       // factor
  // us of a stage, by the tokens of a tile; "fine": of kernels for groups of less than 128.
  double stage_8_us = 0.446, stage_8_fine_us = 0.58;
  double stage_16_us = 0.637, stage_16_fine_us = 0.708;
  double stage_32_us = 0.75;
  double stage_64_us = 0.507, stage_64_fine_us = 0.536;
  double stage_128_us = 0.71, stage_128_fine_us = 0.72;
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
    MINFER_COST_CONSTANT(cooperative_tile_us),
    MINFER_COST_CONSTANT(pingpong_tile_us),
    MINFER_COST_CONSTANT(tail),
    MINFER_COST_CONSTANT(power),
    MINFER_COST_CONSTANT(spread),
    MINFER_COST_CONSTANT(gather_bytes),
    MINFER_COST_CONSTANT(gather_power),
    MINFER_COST_CONSTANT(narrow_gather),
    MINFER_COST_CONSTANT(narrow_risk),
    MINFER_COST_CONSTANT(narrow_rows),
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
    MINFER_COST_CONSTANT(rate_64x64),
    MINFER_COST_CONSTANT(bandwidth_64x64),
    MINFER_COST_CONSTANT(rate_128x128),
    MINFER_COST_CONSTANT(bandwidth_128x128),
    MINFER_COST_CONSTANT(rate_128x192),
    MINFER_COST_CONSTANT(bandwidth_128x192),
    MINFER_COST_CONSTANT(rate_128x256),
    MINFER_COST_CONSTANT(bandwidth_128x256),
    MINFER_COST_CONSTANT(rate_256x128),
    MINFER_COST_CONSTANT(bandwidth_256x128),
    MINFER_COST_CONSTANT(rate_other),
    MINFER_COST_CONSTANT(bandwidth_other),
    MINFER_COST_CONSTANT(rate_portable),
    MINFER_COST_CONSTANT(bandwidth_portable),
    MINFER_COST_CONSTANT(quantised_start_us),
    MINFER_COST_CONSTANT(quantised_tile_us),
    MINFER_COST_CONSTANT(quantised_tail),
    MINFER_COST_CONSTANT(quantised_power),
    MINFER_COST_CONSTANT(quantised_share),
    MINFER_COST_CONSTANT(quantised_gather),
    MINFER_COST_CONSTANT(stage_nvfp4),
    MINFER_COST_CONSTANT(stage_8_us),
    MINFER_COST_CONSTANT(stage_8_fine_us),
    MINFER_COST_CONSTANT(stage_16_us),
    MINFER_COST_CONSTANT(stage_16_fine_us),
    MINFER_COST_CONSTANT(stage_32_us),
    MINFER_COST_CONSTANT(stage_64_us),
    MINFER_COST_CONSTANT(stage_64_fine_us),
    MINFER_COST_CONSTANT(stage_128_us),
    MINFER_COST_CONSTANT(stage_128_fine_us),
};
#undef MINFER_COST_CONSTANT
static_assert(sizeof(kCostConstants) / sizeof(kCostConstants[0]) == sizeof(CostModel) / sizeof(double), "every constant has a name");

inline bool quantised(GroupedProblem const& p) { return p.b_format != WeightFormat::kDense; }

/// No launch is faster, with rows that are spread evenly over the experts.
double floor_us(GroupedProblem const& problem, DeviceProperties const& device);

/// Without regard to the floor. gather_first: rows are gathered by a launch of its own.
double predict_us(CostModel const& model, KernelInfo const& kernel, GroupedProblem const& problem, DeviceProperties const& device,
                  bool gather_first);

}  // namespace minfer::moe
