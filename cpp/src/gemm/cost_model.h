// The analytic cost model of the GEMM planner: microseconds for (kernel, launch, problem, device), from constants measured on the device.
#pragma once

#include "gemm/schedule.h"

namespace minfer {

/// Constants of one GPU, by `minfer tune --device` (python/minfer/planning/calibrate.py).
struct GemmRates {
  double start;                        // us of a launch: set-up, first bytes, last store
  double overlap_two;                  // us of it that are hidden where two launches are resident together
  double overlap_three, overlap_four;  // and more where three and four are
  double cluster;                      // us for each doubling of the cluster
  double sm_rate;                      // flop/us of one SM while the others rest
  double gpu_rate;                     // flop/us of all together
  double columns;                      // columns that a k tile costs an SM on top of its own
  double latency;                      // us in which a CTA's ring of stages can be filled once
  double tile, tile_pingpong;          // us of a change of tiles
  double epilogue;                     // D's bytes/us of one SM
  double c_epilogue, c_start;          // factor and us where C is read
  double fixup;                        // us of a partial's publication, flag and first read
  double partial;                      // us of each further partial of a tile
  double fixup_bytes;                  // bytes/us of one SM
  double fixup_pingpong;               // factor where one warpgroup does it
  double fixup_cluster;                // us of all partials where a tile's splits are a cluster
  double cluster_partial;              // factor of such a partial's bytes
  double bandwidth;                    // bytes/us of all SMs
  double c_bytes;                      // share of C's bytes that is felt
  double idle, idle_tiles;             // share of a tile in which a pingpong CTA has one warpgroup at work: of a single tile, of several
  double stream;                       // slower k tiles in stream-K
  double narrow_split, narrow_rounds;  // slower k tiles of 8 bits in split-K: where all splits run at a time, and where they do not
  double narrow_l2;                    // bytes/us of all SMs out of L2, into stages of operands of 8 bits
  double exposed;                      // share of an epilogue longer than its tile's mainloop that pingpong does not hide
  double uneven;                       // factor of k tiles whose rows do not start on whole lines of 128 bytes
  double general, general_c;           // factors of an epilogue that TMA cannot store, without C and with
  double block_scales;                 // factor of a k tile whose 8-bit operands are scaled by blocks, where rows of a tile are tokens
  double block_scales_swap;            // and where its columns are
  double copy;                         // us of a realigning copy in front of the kernel
  double copy_bandwidth;               // its bytes/us, of what crosses HBM
  double copy_transposed;              // transposed bytes count as so many times more
  // Of kernels with quantised weights, whose mainloop dequantises and keeps other rates.
  double quantized_start, quantized_overlap_two, quantized_overlap_three;
  double quantized_bandwidth, quantized_sm_bandwidth, quantized_ahead;
  double quantized_cycles;   // of an SM, each us
  double quantized_latency;  // cycles of an MMA of a warpgroup that works alone
  double quantized_tile, quantized_epilogue, quantized_stream;
  double quantized_tagged, quantized_flagged;  // us of a partial with tags, and with a flag
  double quantized_partial;                    // us of each further partial of a tile
  double quantized_partial_bytes;              // bytes/us of one SM
  double quantized_cluster;                    // us of all partials inside a cluster
};

/// Factors of one kernel on these.
struct GemmKernelFactors {
  float compute = 1, tile = 1, start = 1, epilogue = 1, latency = 1, bytes = 1;
};

struct GemmModel {
  GemmRates rates;
  GemmKernelFactors const* factors;  // in the registry's order
};

/// The rates by name, as model tables have them.
struct GemmRateName {
  char const* name;
  double GemmRates::*rate;
};
inline constexpr GemmRateName kGemmRateNames[] = {
    {"start", &GemmRates::start},
    {"overlap_two", &GemmRates::overlap_two},
    {"overlap_three", &GemmRates::overlap_three},
    {"overlap_four", &GemmRates::overlap_four},
    {"cluster", &GemmRates::cluster},
    {"sm_rate", &GemmRates::sm_rate},
    {"gpu_rate", &GemmRates::gpu_rate},
    {"columns", &GemmRates::columns},
    {"latency", &GemmRates::latency},
    {"tile", &GemmRates::tile},
    {"tile_pingpong", &GemmRates::tile_pingpong},
    {"epilogue", &GemmRates::epilogue},
    {"c_epilogue", &GemmRates::c_epilogue},
    {"c_start", &GemmRates::c_start},
    {"fixup", &GemmRates::fixup},
    {"partial", &GemmRates::partial},
    {"fixup_bytes", &GemmRates::fixup_bytes},
    {"fixup_pingpong", &GemmRates::fixup_pingpong},
    {"fixup_cluster", &GemmRates::fixup_cluster},
    {"cluster_partial", &GemmRates::cluster_partial},
    {"bandwidth", &GemmRates::bandwidth},
    {"c_bytes", &GemmRates::c_bytes},
    {"idle", &GemmRates::idle},
    {"idle_tiles", &GemmRates::idle_tiles},
    {"stream", &GemmRates::stream},
    {"narrow_split", &GemmRates::narrow_split},
    {"narrow_rounds", &GemmRates::narrow_rounds},
    {"narrow_l2", &GemmRates::narrow_l2},
    {"exposed", &GemmRates::exposed},
    {"uneven", &GemmRates::uneven},
    {"general", &GemmRates::general},
    {"general_c", &GemmRates::general_c},
    {"block_scales", &GemmRates::block_scales},
    {"block_scales_swap", &GemmRates::block_scales_swap},
    {"copy", &GemmRates::copy},
    {"copy_bandwidth", &GemmRates::copy_bandwidth},
    {"copy_transposed", &GemmRates::copy_transposed},
    {"quantized_start", &GemmRates::quantized_start},
    {"quantized_overlap_two", &GemmRates::quantized_overlap_two},
    {"quantized_overlap_three", &GemmRates::quantized_overlap_three},
    {"quantized_bandwidth", &GemmRates::quantized_bandwidth},
    {"quantized_sm_bandwidth", &GemmRates::quantized_sm_bandwidth},
    {"quantized_ahead", &GemmRates::quantized_ahead},
    {"quantized_cycles", &GemmRates::quantized_cycles},
    {"quantized_latency", &GemmRates::quantized_latency},
    {"quantized_tile", &GemmRates::quantized_tile},
    {"quantized_epilogue", &GemmRates::quantized_epilogue},
    {"quantized_stream", &GemmRates::quantized_stream},
    {"quantized_tagged", &GemmRates::quantized_tagged},
    {"quantized_flagged", &GemmRates::quantized_flagged},
    {"quantized_partial", &GemmRates::quantized_partial},
    {"quantized_partial_bytes", &GemmRates::quantized_partial_bytes},
    {"quantized_cluster", &GemmRates::quantized_cluster},
};

/// The name by which model tables know a kernel: its registry name without the family and the element type, which share the factors.
struct GemmModelName {
  char text[128] = {0};
};
GemmModelName model_name_of(KernelInfo const& kernel);

/// The model that ships for a device of this name, or null.
GemmModel const* shipped_gemm_model(char const* device_name);

namespace gemm {

/// options.model, else the one that ships for the device, else the H200's, whose rates follow the device's own.
struct ScaledModel {
  GemmModel const* model;
  double sm_scale = 1;      // compute rate of an SM against that of the model's device
  double memory_scale = 1;  // read bandwidth
};
ScaledModel model_of(GemmPlanOptions const& options, DeviceProperties const& device);

/// The kernel's factors of the model.
GemmKernelFactors const& factors_of(GemmModel const& model, KernelInfo const& kernel);

/// The rates with their scales multiplied in: a model of these alone predicts what the scaled one does.
GemmRates scaled_rates(ScaledModel const& scaled);

/// The model for the launches of one kernel in tiles of one width: what they share is computed once.
class TileCost {
 public:
  TileCost(KernelInfo const& kernel, GemmProblem const& problem, int32_t tile_n, DeviceProperties const& device, ScaledModel const& scaled);

  int64_t tiles() const { return tiles_; }
  int64_t tiles_m() const { return tiles_m_; }
  int64_t tiles_n() const { return tiles_n_; }
  int64_t k_tiles() const { return k_tiles_; }
  int64_t workers() const { return workers_; }
  /// Predicted time, us.
  double us(GemmLaunch const& launch) const;
  /// No launch of this kernel and width is predicted to take less.
  double least_us() const;

 private:
  double iteration_us(double workers, double latency) const;
  double grid_us(double workers, double iterations, double owned, double partials) const;

  GemmRates const& rates_;
  GemmKernelFactors const& factors_;
  int64_t tiles_m_, tiles_n_, tiles_, k_tiles_, workers_;
  int32_t stream_workers_, most_cluster_splits_;  // 0: this kernel's splits are no clusters
  double k_fill_;                                 // share of its k tiles that a product fills, where that counts
  double sms_, cluster_, narrow_us_, alone_, shared_, latency_, epilogue_us_, partial_us_, tile_us_, bytes_us_, reread_us_, start_us_;
  double ring_stages_, partial_stages_;       // of a ring; that a partial takes the place of, where a tile's splits are a cluster
  bool pingpong_, portable_, grid_, narrow_;  // grid_: a data-parallel launch has a CTA for each tile; narrow_: operands of 8 bits
};

/// Predicted time of a legal candidate, us.
double predict_us(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device,
                  ScaledModel const& scaled);

/// Predicted time of the copies in front of a launch, us: what the kernel's prediction grows by.
double predict_copies_us(GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device, ScaledModel const& scaled);

}  // namespace gemm
}  // namespace minfer
