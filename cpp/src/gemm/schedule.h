// The schedule of one (kernel, problem, launch): shared by planning, which sizes the workspace, and by the launch itself.
#pragma once

#include "common/nonce.h"
#include "gemm/split_reduction.cuh"
#include "gemm/tile_scheduler.h"
#include "minfer/gemm.h"

namespace minfer::gemm {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The k of an MMA. Where the problem has no more, kernels for unaligned operands leave out the rest of their k tile.
constexpr int kBriefK = 16;

/// Resident CTAs per SM. sm_90 kernels are built for a number; of portable ones as many share an SM as their registers and its shared
/// memory allow, two of 128 threads where the kernel does not say.
inline int32_t ctas_per_sm(KernelInfo const& kernel, DeviceProperties const& device) {
  if (kernel.arch >= 90) return kernel.ctas_per_sm;
  int32_t const most = kernel.ctas_per_sm > 1 ? kernel.ctas_per_sm : kernel.threads > 128 ? 1 : 2;
  int32_t const fit = (device.smem_per_block + 1024) / (kernel.smem_bytes + 1024);
  return fit < 1 ? 1 : fit < most ? fit : most;
}

/// Workers (clusters of CTAs) of a launch that are resident together.
inline int32_t resident_workers(KernelInfo const& kernel, DeviceProperties const& device) {
  int32_t const cluster = kernel.cluster_m * kernel.cluster_n;
  int32_t const size = cluster >= 8 ? 3 : cluster >= 4 ? 2 : cluster >= 2 ? 1 : 0;
  int32_t const clusters = size > 0 && device.max_clusters[size] > 0 ? device.max_clusters[size] : device.sm_count / cluster;
  return clusters * ctas_per_sm(kernel, device);
}

/// The workers among which stream-K divides `k_tiles`. Where two CTAs fit on an SM but each would get only a few k tiles, one CTA to an SM
/// is launched, so that the next launch can start next to it. Measured at m = 1 on the H200: 8192 x 8192 (15 k tiles for each of two CTAs)
/// takes 11.2 us with one CTA and 12.9 us with two, 28672 x 4096 (27 k tiles) 17.9 and 16.9 us.
inline int32_t stream_workers(KernelInfo const& kernel, DeviceProperties const& device, int64_t k_tiles) {
  int32_t const resident = resident_workers(kernel, device);
  return kernel.arch >= 90 && kernel.ctas_per_sm == 2 && k_tiles < 20 * int64_t(resident) ? resident / 2 : resident;
}

/// Columns of a CTA's tile.
inline int32_t tile_columns(KernelInfo const& kernel, GemmLaunch const& launch) {
  return kernel.column_step > 0 && launch.columns > 0 ? launch.columns : kernel.tile_n;
}

inline TileSchedulerParams schedule_of(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch,
                                       DeviceProperties const& device) {
  int64_t const rows = kernel.swap ? problem.n : problem.m;
  int64_t const columns = kernel.swap ? problem.m : problem.n;
  int64_t const tiles_m = ceil_div(rows, int64_t(kernel.tile_m) * kernel.cluster_m);
  int64_t const tiles_n = ceil_div(columns, int64_t(tile_columns(kernel, launch)) * kernel.cluster_n),
                k_tiles = ceil_div(problem.k, kernel.tile_k);
  int32_t const workers = launch.decomposition == Decomposition::kStreamK
                              ? stream_workers(kernel, device, tiles_m * tiles_n * problem.batch * k_tiles)
                              : resident_workers(kernel, device);
  TileSchedulerParams schedule = make_schedule(tiles_m, tiles_n, problem.batch, k_tiles, workers, launch.decomposition, launch.splits,
                                               launch.max_swizzle_size, launch.raster_order);
  // Kernels for quantised weights launch the splits of a tile as a cluster where they can: these are neighbours.
  schedule.split_major = kernel.b_format == WeightFormat::kDense && !schedule.in_place && schedule.splits > 1 &&
                         schedule.workers == int64_t(schedule.tiles()) * schedule.splits;
  return schedule;
}

/// The warpgroups that publish a CTA's partial, each its own rows of it: the consumer warpgroups of a cooperative CTA, else one.
inline int32_t split_groups(KernelInfo const& kernel) { return kernel.schedule == Schedule::kCooperative ? kernel.threads / 128 - 1 : 1; }

/// Whether partials carry their flags (TaggedReduction).
inline bool split_is_tagged(KernelInfo const& kernel) {
  return kernel.arch >= 90 && kernel.tile_m * kernel.tile_n <= kMaxTaggedValues * 128 * split_groups(kernel);
}

inline size_t workspace_of(KernelInfo const& kernel, TileSchedulerParams const& schedule) {
  if (schedule.in_place && kernel.b_format != WeightFormat::kDense) return 0;  // sums stay in registers
  int64_t const groups = int64_t(kernel.cluster_m) * kernel.cluster_n * split_groups(kernel);
  int64_t const elements = int64_t(kernel.tile_m) * kernel.tile_n / split_groups(kernel);
  return split_workspace_bytes(schedule.slots() * groups, elements, split_is_tagged(kernel));
}

inline SplitWorkspace split_workspace(void* workspace, int64_t slots, bool tagged) {
  SplitWorkspace w;
  w.flags = static_cast<uint64_t*>(workspace);
  w.partials = reinterpret_cast<float*>(static_cast<char*>(workspace) + (tagged ? 0 : split_flag_bytes(slots)));
  w.nonce = next_nonce();
  return w;
}

}  // namespace minfer::gemm
