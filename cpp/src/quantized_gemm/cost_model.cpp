// The analytic cost model of kernels with quantised weights: the weight stream and the busiest SM's dequantisation and MMAs, plus the
// launch, the epilogue and the fix-up. The rates and the kernels' factors are the device's (gemm/cost_model.h), fitted to timings of random
// problems; the cycles below are where the factors start from. Those of the portable kernels are estimates, on the slow side.
#include "quantized_gemm/cost_model.h"

#include <algorithm>
#include <cmath>

#include "quantized_gemm/cluster_split.h"

namespace minfer::w4a16 {

double weight_bytes(GemmProblem const& p) {
  double const groups = p.group_size > 0 ? std::ceil(double(p.k) / p.group_size) : 1.0;
  return double(p.n) * p.k * bits_of(p.b_format) / 8.0 + groups * p.n * (scale_bytes_of(p.b_format) + (p.has_zeros ? 2.0 : 0.0));
}

namespace {

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
// Portable kernels, by counting instructions, not measured: where the sm_90 kernels run, which are measured, they count as slower.
constexpr double kPortableStartUs = 4.0;  // no prologue under the predecessor's tail
constexpr double kPortableCyclesPerUs = 1755;
constexpr double kPortableMma = 35;  // issue cycles of the weights of an m64k16 MMA, of each warpgroup
constexpr double kPortableMmaPerToken = 0.26;
constexpr double kPortableL2Bytes = 45e3;  // bytes/us into one SM
constexpr double kPortableRate = 0.8;      // of the device's matrix rate
constexpr double kPortablePower = 2;  // issue, L2 and tensor cores hide behind each other in part: else narrow tiles did for many tokens
constexpr double kPortableMmaLatency = 40;       // of one warpgroup that works alone on its scheduler
constexpr double kPortableTileUs = 1.33;         // a tile's first bytes, the change of tiles and its last store
constexpr double kPortableHbmSms = 0.60;         // fraction of the SMs that saturates the bandwidth
constexpr double kPortableEpilogueBytes = 79e3;  // bytes/us of one SM
constexpr double kPortableFlaggedUs = 0.91, kPortablePartialUs = 0.58, kPortablePartialBytes = 107e3;
constexpr double kPortableMmaBesideWgmma = 80, kPortableRateBesideWgmma = 0.44, kPortableBesideWgmma = 1.3;

/// Of the weights' cycles, where (code - zero) * scale is one multiply-add.
constexpr double kFoldedMma = 0.8;

double mma_cycles_of(KernelInfo const& kernel, GemmProblem const& problem) {
  MmaCycles const& cycles = kernel.b_format == WeightFormat::kInt4      ? kMmaInt4
                            : kernel.b_format == WeightFormat::kInt8    ? kMmaInt8
                            : kernel.b_format == WeightFormat::kFp8E4M3 ? kMmaFp8
                            : kernel.b_format == WeightFormat::kMxFp4   ? kMmaMxFp4
                            : kernel.b_format == WeightFormat::kNvFp4   ? kMmaNvFp4
                                                                        : kMmaBook;
  bool const fine = kernel.group_multiple < 128;
  double const few = kMmaPerToken * kernel.tile_n, many = kMmaPerTokenOfMany * kernel.tile_n;
  if (scales_fragments(kernel)) {
    double const folded = folds(problem.ab_type, problem.b_format, problem.has_zeros) ? kFoldedMma : 1.0;
    return (fine ? cycles.fine : cycles.fragments) * folded + (kernel.tile_n > (fine ? 16 : 32) ? many : few);
  }
  switch (kernel.tile_n) {
    case 8: return (fine ? cycles.fine8 : cycles.tokens8) + few;
    case 16: return (fine ? cycles.fine16 : cycles.tokens16) + few;
    case 32:
      if (!fine) return cycles.tokens32 + few;
  }
  return cycles.fine + many;
}

/// Whether the device has WGMMA or its successor, which mma.sync does not keep up with.
bool has_wgmma(DeviceProperties const& device) { return device.compute_major >= 9 && device.compute_major < 12; }

/// What the busiest worker of a launch does.
struct Work {
  double workers, iterations, owned;  // k tiles, and tiles that it stores, or whose partials it leaves
  double partials;                    // that it adds to a tile
};
Work work_of(gemm::TileSchedulerParams const& schedule) {
  Work work{};
  double const tiles = schedule.tiles(), workers = schedule.workers;
  work.workers = workers;
  if (schedule.stream_tiles > 0) {
    double const rest = std::ceil((tiles - schedule.stream_tiles) / workers);
    work.iterations = schedule.range_k_tiles + (schedule.range_remainder > 0 ? 1 : 0) + rest * schedule.k_tiles;
    work.owned = std::ceil(schedule.stream_tiles / workers) + rest;
    work.partials = std::max(1.0, workers / schedule.stream_tiles);
  } else {
    double const splits = schedule.in_place ? 1.0 : schedule.splits, items = std::ceil(tiles * splits / workers);
    work.iterations = items * std::ceil(double(schedule.k_tiles) / splits);
    work.owned = items;
    work.partials = splits - 1;
  }
  return work;
}

/// Bytes of HBM: the weight again for every band of token tiles that walk side by side, where L2 does not hold it and the order does not
/// take all tokens of a weight's rows one after the other.
double bytes_of(KernelInfo const& kernel, GemmProblem const& problem, gemm::TileSchedulerParams const& schedule,
                DeviceProperties const& device) {
  double const token_tiles = kernel.swap ? schedule.tiles_n : schedule.tiles_m;
  bool const once = weight_bytes(problem) <= 0.5 * device.l2_bytes || schedule.raster_along_n == kernel.swap;
  double const rereads = once ? 1.0 : std::max(1.0, std::ceil(token_tiles / std::max(1, schedule.swizzle)));
  double const outputs = double(problem.m) * problem.n * (problem.gated ? 0.5 : 1.0);
  return weight_bytes(problem) * rereads + 2.0 * problem.m * problem.k +
         outputs * (d_element_bytes(problem) + (problem.has_c ? size_of(problem.d_type) : 0));
}

/// Kernels for sm_80 onward.
double portable_us(KernelInfo const& kernel, GemmProblem const& problem, gemm::TileSchedulerParams const& schedule,
                   DeviceProperties const& device) {
  Work const work = work_of(schedule);
  bool const wgmma = has_wgmma(device);
  double const sms = device.sm_count;
  // Clocks and an SM's paths to memory differ less between devices without WGMMA than their matrix rates do.
  double const scale = wgmma ? device.matrix_rate / 750e6 * 132.0 / sms : 1.0;
  double const together = std::max(1.0, std::min(double(gemm::ctas_per_sm(kernel, device)), work.workers / sms));
  double const active = std::min(sms, work.workers);

  double const mmas = kernel.tile_m / 64.0 * (kernel.tile_k / 16.0), warpgroups = kernel.threads / 128.0;
  double const mma_cycles = (wgmma ? kPortableMmaBesideWgmma : kPortableMma) * warpgroups + kPortableMmaPerToken * kernel.tile_n;
  double const issue_us = std::max(mmas * mma_cycles * together, mmas * kPortableMmaLatency) / (kPortableCyclesPerUs * scale);
  double const l2_us = kernel.tile_k * (0.5 * kernel.tile_m + 2.0 * kernel.tile_n) * together / kPortableL2Bytes;
  double const rate = device.matrix_rate / sms * (wgmma ? kPortableRateBesideWgmma : kPortableRate);
  double const tensor_us = mmas * 2.0 * 64 * 16 * kernel.tile_n * together / rate;
  double const iteration_us = std::sqrt(issue_us * issue_us + l2_us * l2_us + tensor_us * tensor_us);

  double const busy_us = work.iterations * iteration_us + work.owned * kPortableTileUs;
  double const hbm_us =
      bytes_of(kernel, problem, schedule, device) / (device.read_bandwidth * std::min(1.0, active / (kPortableHbmSms * sms)));
  double const tile_values = double(kernel.tile_m) * kernel.tile_n * together;
  double const fixup_us = work.partials <= 0 ? 0.0
                                             : kPortableFlaggedUs + kPortablePartialUs * (work.partials - 1.0) +
                                                   (work.partials + 1.0) * 4.0 * tile_values / (kPortablePartialBytes * scale);
  double const epilogue_us = 2.0 * tile_values / (kPortableEpilogueBytes * scale);
  double const us = kPortableStartUs + std::max(busy_us, hbm_us) + epilogue_us * work.owned + fixup_us;
  return wgmma ? kPortableBesideWgmma * us : us;
}

double cube(double x) { return x * x * x; }

}  // namespace

double predict_us(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device,
                  gemm::ScaledModel const& scaled) {
  gemm::TileSchedulerParams const schedule = gemm::schedule_of(kernel, problem, launch, device);
  if (kernel.arch < 90) return portable_us(kernel, problem, schedule, device);
  GemmRates const& r = scaled.model->rates;
  GemmKernelFactors const& factors = gemm::factors_of(*scaled.model, kernel);
  Work const work = work_of(schedule);
  double const sms = device.sm_count, rate = scaled.sm_scale, memory = scaled.memory_scale;
  double const ctas = work.workers * kernel.cluster_m, room = gemm::ctas_per_sm(kernel, device);
  bool const in_cluster = cluster_partials(kernel.b_format, kernel.tile_n, kernel.ctas_per_sm, schedule, device) > 0;
  // CTAs of the busiest SM. Those of a cluster are put on as few SMs as have room for them.
  double const together = in_cluster ? room : std::min(room, std::max(1.0, std::ceil(ctas / sms)));

  double const warpgroups = kernel.threads / 128.0 - 1.0, mmas = kernel.tile_m / 64.0 * (kernel.tile_k / 16.0);
  double const cycles = mmas * mma_cycles_of(kernel, problem) * factors.compute * together,
               latency = mmas / warpgroups * r.quantized_latency;
  double const iteration_us =
      std::sqrt(std::sqrt(cycles * cycles * cycles * cycles + latency * latency * latency * latency)) / (r.quantized_cycles * rate);
  double const busy_us = work.iterations * iteration_us * (schedule.stream_tiles > 0 ? 1.0 + r.quantized_stream : 1.0) +
                         work.owned * r.quantized_tile * factors.tile;

  double const bytes = bytes_of(kernel, problem, schedule, device) / memory;
  double const resident = std::floor(room * sms / ctas);  // launches that are
  double const sm_us = bytes / (r.quantized_sm_bandwidth * std::min(sms, ctas) * 132.0 / sms);
  double const hbm_us = factors.bytes * std::max(bytes / r.quantized_bandwidth, sm_us - (resident >= 2 ? r.quantized_ahead : 0.0));
  double const main_us = std::cbrt(cube(busy_us) + cube(hbm_us));

  double const tile_values = double(kernel.tile_m) * kernel.tile_n * together;
  double const fixup_us = work.partials <= 0 ? 0.0
                          : in_cluster       ? r.quantized_cluster
                                             : (gemm::split_is_tagged(kernel) ? r.quantized_tagged : r.quantized_flagged) +
                                             r.quantized_partial * (work.partials - 1.0) +
                                             (work.partials + 1.0) * 4.0 * tile_values / (r.quantized_partial_bytes * rate);
  double const epilogue_us = 2.0 * tile_values / (r.quantized_epilogue * rate);
  double const start_us =
      r.quantized_start - (resident >= 2 ? r.quantized_overlap_two : 0.0) - (resident >= 3 ? r.quantized_overlap_three : 0.0);
  return start_us * factors.start + main_us + epilogue_us * work.owned + fixup_us;
}

}  // namespace minfer::w4a16
