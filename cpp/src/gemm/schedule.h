// The schedule of one (kernel, problem, launch): shared by planning, which sizes the workspace, and by the launch itself.
#pragma once

#include "gemm/split_reduction.cuh"
#include "gemm/tile_scheduler.h"
#include "minfer/gemm.h"

namespace minfer::gemm {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Resident CTAs per SM. sm_90 kernels fill an SM; two portable ones of 128 threads share one where shared memory allows it.
inline int32_t ctas_per_sm(KernelInfo const& kernel, DeviceProperties const& device) {
  if (kernel.arch >= 90 || kernel.threads > 128) return 1;
  return 2 * (kernel.smem_bytes + 1024) <= device.smem_per_block + 1024 ? 2 : 1;
}

/// Workers (clusters of CTAs) of a launch that are resident together.
inline int32_t resident_workers(KernelInfo const& kernel, DeviceProperties const& device) {
  int32_t const cluster = kernel.cluster_m * kernel.cluster_n;
  int32_t const size = cluster >= 8 ? 3 : cluster >= 4 ? 2 : cluster >= 2 ? 1 : 0;
  int32_t const clusters = size > 0 && device.max_clusters[size] > 0 ? device.max_clusters[size] : device.sm_count / cluster;
  return clusters * ctas_per_sm(kernel, device);
}

inline TileSchedulerParams schedule_of(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch,
                                       DeviceProperties const& device) {
  int64_t const rows = kernel.swap ? problem.n : problem.m;
  int64_t const columns = kernel.swap ? problem.m : problem.n;
  return make_schedule(ceil_div(rows, int64_t(kernel.tile_m) * kernel.cluster_m),
                       ceil_div(columns, int64_t(kernel.tile_n) * kernel.cluster_n), problem.batch, ceil_div(problem.k, kernel.tile_k),
                       resident_workers(kernel, device), launch.decomposition, launch.splits, launch.max_swizzle_size, launch.raster_order);
}

/// Groups of threads that each hold, and hand over, a share of a CTA's partial tile.
inline int32_t split_groups(KernelInfo const& kernel) { return kernel.schedule == Schedule::kCooperative ? 2 : 1; }

inline size_t workspace_of(KernelInfo const& kernel, TileSchedulerParams const& schedule) {
  int64_t const groups = int64_t(kernel.cluster_m) * kernel.cluster_n * split_groups(kernel);
  return split_workspace_bytes(schedule.slots() * groups, int64_t(kernel.tile_m) * kernel.tile_n / split_groups(kernel));
}

/// A number no earlier launch of this process used, and no memory holds by chance.
uint64_t next_nonce();

inline SplitWorkspace split_workspace(void* workspace, int64_t slots) {
  SplitWorkspace w;
  w.flags = static_cast<uint64_t*>(workspace);
  w.partials = reinterpret_cast<float*>(static_cast<char*>(workspace) + split_flag_bytes(slots));
  w.nonce = next_nonce();
  return w;
}

}  // namespace minfer::gemm
