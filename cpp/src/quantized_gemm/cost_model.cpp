// The analytic cost model of kernels with quantised weights: the larger of the weight stream and the busiest CTA's dequantisation and MMAs,
// plus the launch, the epilogue and the fix-up. The constants are a fit to 2900 timings over 111 problems on the H200 (m from 1 to 256,
// nine layers, int4, nf4, mxfp4 and nvfp4; the choice costs 1.8 % on the average of them), so they describe the choice and not the
// hardware; those of 8-bit weights are scaled, those of the fp4s with few tokens were set afterwards by 28672 x 4096, and those of the
// portable kernels are estimates, on the slow side.
#include "quantized_gemm/cost_model.h"

#include <algorithm>
#include <cmath>

#include "quantized_gemm/cluster_split.h"

namespace minfer::w4a16 {

namespace {

constexpr double kStartUs = 2.03;              // launch, set-up, activations' first bytes
constexpr double kOverlapUs = 1.34;            // of it, hidden where the next launch starts on the SMs this one leaves free
constexpr double kSharedStartUs = 0.15;        // of one CTA to an SM with room for two, stream-K: the next launch starts next to it
constexpr double kSlicedSharedStartUs = 0.78;  // the same, sliced-K
constexpr double kClusterStartUs = 3.5;        // of clusters with room for two CTAs on an SM: they do not spread evenly
constexpr double kCyclesPerUs = 1755;          // of an SM
// Cycles of the weights of an m64k16 MMA on an SM, by format, tokens of the tile and where the scales are applied; and for each token of
// the tile.
struct MmaCycles {
  double tokens8, tokens16, tokens32, fine8, fine16, fragments, fine;
};
constexpr MmaCycles kMmaInt4 = {25.7, 30.5, 33.3, 30.4, 38.3, 32.0, 40.9};
constexpr MmaCycles kMmaBook = {0, 0, 0, 36.1, 38.2, 0, 45.4}, kMmaMxFp4 = {0, 0, 0, 37.7, 42.8, 0, 45.4};
constexpr MmaCycles kMmaNvFp4 = {0, 0, 0, 45.5, 51.4, 0, 50.5};
constexpr MmaCycles kMmaInt8 = {26, 50, 51, 42, 46, 43, 67}, kMmaFp8 = {27, 51, 52, 43, 47, 53, 76};
constexpr double kMmaPerToken = 0.156, kMmaPerTokenOfMany = 0.314;
constexpr double kFourWarpgroups = 0.9;                                   // of those cycles, with four consumer warpgroups in a CTA
constexpr double kMmaLatency = 40;                                        // of one warpgroup that works alone on its scheduler
constexpr double kTileUs = 1.33;                                          // a tile's first bytes, the change of tiles and its last store
constexpr double kTaggedUs = 0.48, kFlaggedUs = 0.91, kPartialUs = 0.58;  // a partial's way to its owner; of each further partial
constexpr double kClusterPartialsUs = 0.2;                                // all of them, inside a cluster
constexpr double kPartialBytes = 107e3;                                   // bytes/us of one SM
constexpr double kEpilogueBytes = 79e3;
constexpr double kHbmFraction = 0.934;  // of the read bandwidth
constexpr double kHbmSms = 0.60;        // fraction of the SMs that saturates it
constexpr double kPower = 11.1;         // how much of the smaller limit shows: next to nothing
// Portable kernels, by counting instructions, not measured: where the sm_90 kernels run, which are measured, they count as slower.
constexpr double kPortableStartUs = 2.0;  // no prologue under the predecessor's tail
constexpr double kPortableMma = 35;       // issue cycles of the weights of an m64k16 MMA, of each warpgroup
constexpr double kPortableMmaPerToken = 0.26;
constexpr double kPortableL2Bytes = 45e3;  // bytes/us into one SM
constexpr double kPortableRate = 0.8;      // of the device's matrix rate
constexpr double kPortablePower = 2;  // issue, L2 and tensor cores hide behind each other in part: else narrow tiles did for many tokens
constexpr double kPortableHbmFraction = 1.0;
constexpr double kPortableMmaBesideWgmma = 80, kPortableRateBesideWgmma = 0.44, kPortableBesideWgmma = 1.3;

double mma_cycles_of(KernelInfo const& kernel) {
  MmaCycles const& cycles = kernel.b_format == WeightFormat::kInt4      ? kMmaInt4
                            : kernel.b_format == WeightFormat::kInt8    ? kMmaInt8
                            : kernel.b_format == WeightFormat::kFp8E4M3 ? kMmaFp8
                            : kernel.b_format == WeightFormat::kMxFp4   ? kMmaMxFp4
                            : kernel.b_format == WeightFormat::kNvFp4   ? kMmaNvFp4
                                                                        : kMmaBook;
  bool const fine = kernel.group_multiple < 128;
  double const few = kMmaPerToken * kernel.tile_n, many = kMmaPerTokenOfMany * kernel.tile_n;
  switch (kernel.tile_n) {
    case 8: return (fine ? cycles.fine8 : cycles.tokens8) + few;
    case 16: return (fine ? cycles.fine16 : cycles.tokens16) + few;
    case 32:
      if (!fine) return cycles.tokens32 + few;  // scales on the accumulators (w4a16.toml)
  }
  return (fine ? cycles.fine : cycles.fragments) + many;
}

/// Sliced-K: more k in a stage than one warpgroup's 128 (w4a16.toml).
bool is_sliced(KernelInfo const& kernel) { return kernel.arch >= 90 && kernel.tile_k > 128; }

/// Whether the device has WGMMA or its successor, which mma.sync does not keep up with.
bool has_wgmma(DeviceProperties const& device) { return device.compute_major >= 9 && device.compute_major < 12; }

/// One k tile of a CTA, while `together` CTAs work on its SM.
double iteration_us(KernelInfo const& kernel, DeviceProperties const& device, double together, double scale) {
  double const mmas = kernel.tile_m / 64.0 * (kernel.tile_k / 16.0);
  if (kernel.arch < 90) {  // every warpgroup dequantises the whole tile
    double const warpgroups = kernel.threads / 128.0;
    bool const wgmma = has_wgmma(device);
    double const mma_cycles = (wgmma ? kPortableMmaBesideWgmma : kPortableMma) * warpgroups + kPortableMmaPerToken * kernel.tile_n;
    double const issue = mmas * mma_cycles * together;
    double const issue_us = std::max(issue, mmas * kMmaLatency) / (kCyclesPerUs * scale);
    double const l2_us = kernel.tile_k * (0.5 * kernel.tile_m + 2.0 * kernel.tile_n) * together / kPortableL2Bytes;
    double const rate = device.matrix_rate / device.sm_count * (wgmma ? kPortableRateBesideWgmma : kPortableRate);
    double const tensor_us = mmas * 2.0 * 64 * 16 * kernel.tile_n * together / rate;
    return std::pow(std::pow(issue_us, kPortablePower) + std::pow(l2_us, kPortablePower) + std::pow(tensor_us, kPortablePower),
                    1.0 / kPortablePower);
  }
  double const warpgroups = kernel.threads / 128.0 - 1.0;
  double const mma_cycles = mma_cycles_of(kernel) * (warpgroups == 4 ? kFourWarpgroups : 1.0);
  double const cycles = std::max(mmas * mma_cycles * together, mmas / warpgroups * kMmaLatency);
  return cycles / (kCyclesPerUs * scale);
}

}  // namespace

double weight_bytes(GemmProblem const& p) {
  double const groups = p.group_size > 0 ? std::ceil(double(p.k) / p.group_size) : 1.0;
  return double(p.n) * p.k * bits_of(p.b_format) / 8.0 + groups * p.n * (scale_bytes_of(p.b_format) + (p.has_zeros ? 2.0 : 0.0));
}

double predict_us(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device) {
  gemm::TileSchedulerParams const schedule = gemm::schedule_of(kernel, problem, launch, device);
  double const sms = device.sm_count, ctas_of_sm = gemm::ctas_per_sm(kernel, device);
  bool const portable = kernel.arch < 90;
  // Clocks and an SM's paths to memory differ less between devices without WGMMA than their matrix rates do.
  double const scale = portable && !has_wgmma(device) ? 1.0 : device.matrix_rate / 750e6 * 132.0 / sms;
  double const ctas = double(schedule.workers) * kernel.cluster_m;
  double const together = std::max(1.0, std::min(ctas_of_sm, ctas / sms));  // CTAs at work on a busy SM
  double const active = std::min(sms, ctas);

  double const tiles = schedule.tiles();
  double iterations, owned, partials;
  if (schedule.stream_tiles > 0) {
    double const rest = std::ceil((tiles - schedule.stream_tiles) / schedule.workers);
    iterations = schedule.range_k_tiles + (schedule.range_remainder > 0 ? 1 : 0) + rest * schedule.k_tiles;
    owned = std::ceil(double(schedule.stream_tiles) / schedule.workers) + rest;
    partials = std::max(1.0, double(schedule.workers) / schedule.stream_tiles);
  } else {
    double const items = std::ceil(tiles * schedule.splits / schedule.workers);
    iterations = items * std::ceil(double(schedule.k_tiles) / schedule.splits);
    owned = schedule.splits > 1 ? std::ceil(tiles / schedule.workers) : items;
    partials = schedule.splits - 1;
  }
  double const busy_us = iterations * iteration_us(kernel, device, together, scale) + owned * kTileUs;

  double const token_tiles = kernel.swap ? schedule.tiles_n : schedule.tiles_m;
  double const rereads =
      weight_bytes(problem) <= 0.5 * device.l2_bytes ? 1.0 : std::max(1.0, std::ceil(token_tiles / std::max(1, schedule.swizzle)));
  double const d_bytes = double(problem.m) * problem.n * size_of(problem.d_type) * (problem.gated ? 0.5 : 1.0);
  double const bytes = weight_bytes(problem) * rereads + 2.0 * problem.m * problem.k + d_bytes * (problem.has_c ? 2.0 : 1.0);
  double const hbm_fraction = portable ? kPortableHbmFraction : kHbmFraction;
  double const hbm_us = bytes / (device.read_bandwidth * hbm_fraction * std::min(1.0, active / (kHbmSms * sms)));
  double const main_us = std::pow(std::pow(busy_us, kPower) + std::pow(hbm_us, kPower), 1.0 / kPower);

  double const epilogue_us = 2.0 * kernel.tile_m * kernel.tile_n * together / (kEpilogueBytes * scale);
  double const partial_bytes = 4.0 * kernel.tile_m * kernel.tile_n * together;
  bool const in_cluster = !portable && cluster_partials(kernel.b_format, kernel.tile_n, kernel.ctas_per_sm, schedule, device) > 0;
  double const fixup_us = partials <= 0 ? 0.0
                          : in_cluster  ? kClusterPartialsUs
                                        : (gemm::split_is_tagged(kernel) ? kTaggedUs : kFlaggedUs) + kPartialUs * (partials - 1.0) +
                                             (partials + 1.0) * partial_bytes / (kPartialBytes * scale);
  bool const room_for_two = kernel.ctas_per_sm > 1 && ctas <= sms;
  double const start_us = portable                                    ? kStartUs + kPortableStartUs
                          : room_for_two && schedule.stream_tiles > 0 ? (is_sliced(kernel) ? kSlicedSharedStartUs : kSharedStartUs)
                          : room_for_two && in_cluster                ? kClusterStartUs
                                                                      : kStartUs - (active <= 0.5 * sms ? kOverlapUs : 0.0);
  double const beside_wgmma = portable && has_wgmma(device) ? kPortableBesideWgmma : 1.0;
  return beside_wgmma * (start_us + main_us + epilogue_us * owned + fixup_us);
}

}  // namespace minfer::w4a16
