// The analytic cost model. A launch takes
//   start + max(compute of the busiest worker, HBM traffic) + exposed epilogue + fix-up
// with every term in us and every constant measured on the H200 (bench/results/nvidia-h200): they scale with the device's own rates.
#include "gemm/cost_model.h"

#include <algorithm>
#include <cmath>

namespace minfer::gemm {

namespace {

constexpr double kStartUs = 2.3;             // launch, barrier setup, first bytes from HBM, last store
constexpr double kFixupUs = 0.9;             // publish, flag, first read of a partial tile
constexpr double kL2BytesPerUsPerSm = 42e3;  // 5.5 TB/s over 132 SMs
constexpr double kEpilogueBytesPerUs = 60e3; // accumulators through registers and shared memory, per SM

// Share of the matrix rate a tile sustains in steady state: small tiles read more shared memory per flop and issue more instructions.
double tile_efficiency(KernelInfo const& kernel) {
  double const m = kernel.tile_m, n = kernel.tile_n;
  if (kernel.arch < 90) return 0.62 * std::min(1.0, m * n / (128.0 * 128.0) * 0.5 + 0.5);
  double const area = m * n;
  if (area >= 128 * 256) return 1.0;
  if (area >= 128 * 192) return 0.99;
  if (area >= 128 * 128) return 0.97;
  if (area >= 64 * 256) return 0.93;
  if (area >= 64 * 128) return 0.85;
  return 0.85 * std::pow(area / (64.0 * 128.0), 0.35);
}

}  // namespace

double predict_us(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device) {
  if (problem.m == 0 || problem.n == 0 || problem.batch == 0) return 0.0;  // nothing is launched
  TileSchedulerParams const schedule = schedule_of(kernel, problem, launch, device);
  int32_t const cluster = kernel.cluster_m * kernel.cluster_n;
  double const sms = device.sm_count;
  double const share = 1.0 / ctas_per_sm(kernel, device);  // resident CTAs divide an SM
  double const sm_rate = device.matrix_rate / sms * share;
  double const l2_rate = kL2BytesPerUsPerSm * (device.matrix_rate / 750e6) * (132.0 / sms) * share;

  // One k-iteration of one CTA.
  double const mma_us = 2.0 * kernel.tile_m * kernel.tile_n * kernel.tile_k / (sm_rate * tile_efficiency(kernel));
  double const feed_bytes = 2.0 * kernel.tile_k * (double(kernel.tile_m) / kernel.cluster_n + double(kernel.tile_n) / kernel.cluster_m);
  double const iteration_us = std::max(mma_us, feed_bytes / l2_rate);

  // The busiest worker.
  double const tiles = schedule.tiles();
  double iterations, owned;
  bool pieces = false;
  if (schedule.stream_tiles > 0) {
    double const rest = tiles - schedule.stream_tiles;
    iterations = schedule.stretch + (schedule.stretch_remainder > 0 ? 1 : 0) + std::ceil(rest / schedule.workers) * schedule.k_tiles;
    owned = std::ceil(double(schedule.stream_tiles) / schedule.workers) + std::ceil(rest / schedule.workers);
    pieces = true;
  } else {
    double const items = std::ceil(tiles * schedule.splits / schedule.workers);
    iterations = items * std::ceil(double(schedule.k_tiles) / schedule.splits);
    owned = items;
    pieces = schedule.splits > 1;
  }

  // Bytes from HBM: operands once, and again for every band of tiles when a band's working set does not stay in L2.
  double const rows = kernel.swap ? problem.n : problem.m, columns = kernel.swap ? problem.m : problem.n;
  double const a_bytes = 2.0 * rows * problem.k, b_bytes = 2.0 * columns * problem.k;
  double const band = double(schedule.swizzle) * (schedule.raster_along_n ? kernel.tile_m * kernel.cluster_m : kernel.tile_n * kernel.cluster_n);
  double const bands = std::max(1.0, std::ceil((schedule.raster_along_n ? rows : columns) / band));
  double const walked = schedule.raster_along_n ? b_bytes : a_bytes;  // read again by every band
  double const resident = 0.6 * device.l2_bytes;
  double const rereads = walked <= resident ? 1.0 : bands;
  double const bytes = problem.batch * ((schedule.raster_along_n ? a_bytes : b_bytes) + walked * rereads +
                                        double(problem.m) * problem.n * size_of(problem.d_type) * (problem.has_c ? 2.0 : 1.0));
  double const active = std::min(1.0, double(schedule.workers) * cluster / (sms / share));
  double const hbm_us = bytes / (device.read_bandwidth * std::min(1.0, 0.25 + 0.75 * active));

  double const epilogue_us = kernel.tile_m * kernel.tile_n * 2.0 * (problem.has_c ? 1.6 : 1.0) / kEpilogueBytesPerUs;
  bool const hidden = kernel.schedule == Schedule::kPingpong;
  double const exposed = hidden ? epilogue_us * std::min(owned, 1.0) : epilogue_us * owned;
  double fixup = 0.0;
  if (pieces) {
    double const per_tile = schedule.splits > 1 ? schedule.splits - 1 : std::max(1.0, double(schedule.workers) / std::max(1, schedule.stream_tiles));
    double const partial_bytes = 4.0 * kernel.tile_m * kernel.tile_n;
    fixup = kFixupUs + per_tile * partial_bytes / 100e3 + partial_bytes / 200e3;
  }
  return kStartUs + std::max(iterations * iteration_us, hbm_us) + exposed + fixup;
}

}  // namespace minfer::gemm
