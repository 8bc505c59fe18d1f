// The analytic cost model. A launch takes
//   start + combined(busiest worker's k-iterations and tiles, HBM traffic) + exposed epilogue + fix-up of partials
// in us. The constants are a fit to 19000 timings of 80 kernels over 318 problems on the H200 (m from 1 to 8192, 60 of them with odd
// extents), weighted towards each problem's fastest candidates, so they describe the choice among good candidates rather than the hardware;
// rates scale with the device's own.
#include "gemm/cost_model.h"

#include <algorithm>
#include <cmath>

#include "quantized_gemm/cost_model.h"

namespace minfer::gemm {

namespace {

constexpr double kStartUs = 3.18;      // launch, set-up, first bytes, last store
constexpr double kOverlapUs = 2.65;    // of it, hidden when the next launch sets up on the SMs this one leaves free
constexpr double kClusterUs = 0.022;   // cluster launch and the barrier at its start, for each doubling
constexpr double kSmPeak = 8.1e6;      // flop/us of one busy SM at its highest clock; all of them together are held to kMatrixPeak by power
constexpr double kMatrixPeak = 949e6;  // before the shared-memory term below: a large tile sustains 750e6
constexpr double kInstructionColumns = 11;  // columns a WGMMA costs on top of its own: reading A from shared memory
constexpr double kIdleWarpgroup = 0.349;    // a pingpong CTA with a single tile has no other warpgroup to fill its waits: what it adds
constexpr double kIdleFactor = 1.91;        // with more tiles, for the first and the last one: factor * tiles ^ -power of it
constexpr double kIdlePower = 1.61;
constexpr double kL2PeakPerSm = 75.0e3;  // bytes/us
// Of the MMAs' time, by schedule, where rows of k do not start on whole lines of 128 bytes: L2 is then the limit sooner.
constexpr double kUnevenCooperative = 0.68, kUnevenPingpong = 1.04;
constexpr double kWidePingpong = 0.973;                     // more than 128 columns
constexpr double kStreamK = 1.017;                          // CTAs are at different k, so less of what they read is shared
constexpr double kMulticastFraction = 0.741;                // of the bytes that a multicast could save
constexpr double kTileUs = 0.268, kPingpongTileUs = 0.401;  // a tile's first bytes and the change of tiles, in addition to its epilogue
constexpr double kEpilogueBytes = 13.8e3;                   // D bytes/us of one SM
constexpr double kNarrowBoxes = 0.16;                       // exponent: D leaving in boxes of 32 or 16 columns, not 64
constexpr double kFixupUs = 0.72;                           // a partial's publication, flag and first read
constexpr double kFixupBytes = 62.8e3;                      // bytes/us of one SM
constexpr double kHbmFraction = 1.46;                       // of the device's read bandwidth: launches overlap
constexpr double kHbmSms = 0.15;                            // fraction of the SMs that saturates it
constexpr double kPortableRate = 0.38;                      // mma.sync against WGMMA, per SM
constexpr double kPortableStartUs = 1.5;                    // no prologue under the predecessor's tail

}  // namespace

double predict_us(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device) {
  if (problem.m == 0 || problem.n == 0 || problem.batch == 0) return 0.0;  // nothing is launched
  if (problem.b_format != WeightFormat::kDense) return w4a16::predict_us(kernel, problem, launch, device);
  TileSchedulerParams const schedule = schedule_of(kernel, problem, launch, device);
  double const tile_n = tile_columns(kernel, launch);
  double const scale = device.matrix_rate / 750e6, sms = device.sm_count;
  double const per_sm_scale = scale * 132.0 / sms;
  double const ctas_of_sm = ctas_per_sm(kernel, device);
  double const cluster = kernel.cluster_m * kernel.cluster_n;
  double const active = std::min(sms, schedule.workers * cluster / ctas_of_sm);  // SMs at work
  bool const portable = kernel.arch < 90;

  // One k tile of one CTA: tensor cores, or operands out of L2.
  double const rate = std::min(kSmPeak * per_sm_scale, kMatrixPeak * scale / active) / ctas_of_sm * (portable ? kPortableRate : 1.0);
  bool const pingpong = kernel.schedule == Schedule::kPingpong, uneven = !portable && problem.k % 64 != 0;
  double const mma_us = 2.0 * kernel.tile_m * (tile_n + kInstructionColumns) * kernel.tile_k / rate *
                        (pingpong && tile_n > 128 ? kWidePingpong : 1.0) * (uneven ? pingpong ? kUnevenPingpong : kUnevenCooperative : 1.0);
  double const a_rows = kernel.tile_m * (1.0 - kMulticastFraction * (1.0 - 1.0 / kernel.cluster_n));
  double const b_rows = tile_n * (1.0 - kMulticastFraction * (1.0 - 1.0 / kernel.cluster_m));
  double const l2_us = 2.0 * kernel.tile_k * (a_rows + b_rows) * ctas_of_sm / (kL2PeakPerSm * per_sm_scale);

  // The busiest worker.
  double const tiles = schedule.tiles();
  double const items = std::ceil(tiles * schedule.splits / schedule.workers);
  double iterations, owned, partials;
  if (schedule.stream_tiles > 0) {
    double const rest = std::ceil((tiles - schedule.stream_tiles) / schedule.workers);
    iterations = schedule.range_k_tiles + (schedule.range_remainder > 0 ? 1 : 0) + rest * schedule.k_tiles;
    owned = std::ceil(double(schedule.stream_tiles) / schedule.workers) + rest;
    partials = std::max(1.0, double(schedule.workers) / schedule.stream_tiles);
  } else {
    iterations = items * std::ceil(double(schedule.k_tiles) / schedule.splits);
    owned = schedule.splits > 1 ? std::ceil(tiles / schedule.workers) : items;
    partials = schedule.splits - 1;
  }
  double const idle = !pingpong ? 0.0
                      : schedule.stream_tiles == 0 && items < 2
                          ? kIdleWarpgroup
                          : kIdleWarpgroup * kIdleFactor * std::pow(std::max(owned, 1.5), -kIdlePower);
  double const busy_us = iterations * std::max(mma_us * (1.0 + idle), l2_us) * (schedule.stream_tiles > 0 ? kStreamK : 1.0) +
                         owned * (pingpong ? kPingpongTileUs : kTileUs);

  // HBM: operands once, and the walked one again for every band of tiles when a band's working set leaves L2.
  double const rows = kernel.swap ? problem.n : problem.m, columns = kernel.swap ? problem.m : problem.n;
  double const a_bytes = 2.0 * rows * problem.k, b_bytes = 2.0 * columns * problem.k;
  double const band = double(schedule.swizzle) * (schedule.raster_along_n ? kernel.tile_m * kernel.cluster_m : tile_n * kernel.cluster_n);
  double const bands = std::max(1.0, std::ceil((schedule.raster_along_n ? rows : columns) / band));
  double const walked = schedule.raster_along_n ? b_bytes : a_bytes;
  double const rereads = walked <= 0.61 * device.l2_bytes ? 1.0 : bands;
  double const d_bytes = double(problem.m) * problem.n * size_of(problem.d_type) * (problem.gated ? 0.5 : 1.0);
  double const bytes = problem.batch * (a_bytes + b_bytes + walked * (rereads - 1.0) + d_bytes * (problem.has_c ? 2.0 : 1.0));
  double const hbm_us = bytes / (kHbmFraction * device.read_bandwidth * std::min(1.0, active / (kHbmSms * sms)));
  double const main_us = std::pow(std::pow(busy_us, 4) + std::pow(hbm_us, 4), 0.25);  // the larger, and a little of the other

  double const box = kernel.swap || portable || int(tile_n) % 64 == 0 ? 64 : int(tile_n) % 32 == 0 ? 32 : 16;
  double const epilogue_us = 2.0 * kernel.tile_m * tile_n * (problem.has_c ? 1.5 : 1.0) * std::pow(64.0 / box, kNarrowBoxes) * ctas_of_sm /
                             (kEpilogueBytes * per_sm_scale);
  // Pingpong shows the last epilogue only, unless they take longer than the mainloops that should hide them.
  double const tile_us = main_us / std::max(1.0, owned);
  double const exposed_us =
      pingpong ? epilogue_us + 0.5 * std::max(0.0, owned - 1.0) * std::max(0.0, epilogue_us - tile_us) : epilogue_us * owned;
  double const partial_bytes = 4.0 * kernel.tile_m * tile_n * ctas_of_sm;
  double const fixup_us = partials > 0 ? partials * kFixupUs + (partials + 1.0) * partial_bytes / (kFixupBytes * per_sm_scale) : 0.0;
  bool const overlaps = active <= 0.5 * sms && !portable;
  double const start_us = kStartUs + (portable ? kPortableStartUs : 0.0) - (overlaps ? kOverlapUs : 0.0) + kClusterUs * std::log2(cluster);
  return start_us + main_us + exposed_us + fixup_us;
}

}  // namespace minfer::gemm
