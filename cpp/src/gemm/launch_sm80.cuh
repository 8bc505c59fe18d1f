// What the launches of all portable GEMM kernels share: schedule and workspace, and the launch, which has no attributes.
#pragma once

#include "common/cuda_check.h"
#include "gemm/launch.h"
#include "gemm/schedule.h"

namespace minfer::gemm {

/// The schedule of a launch and the workspace behind it.
template <class Config>
Status describe_schedule_sm80(GemmLaunchArguments const& arguments, TileSchedulerParams* schedule, SplitWorkspace* split) {
  KernelInfo geometry{};
  geometry.swap = Config::kSwap;
  geometry.tile_m = Config::kTileM;
  geometry.tile_n = Config::kTileN;
  geometry.tile_k = Config::kTileK;
  geometry.cluster_m = geometry.cluster_n = 1;
  geometry.schedule = Schedule::kMultistage;
  geometry.arch = 80;
  geometry.b_format = Config::kFormat;
  geometry.threads = Config::kThreads;
  geometry.smem_bytes = Config::kSmemBytes;
  geometry.ctas_per_sm = Config::kCtasPerSm;
  *schedule = schedule_of(geometry, *arguments.problem, arguments.launch, *arguments.device);
  if (size_t const needed = workspace_of(geometry, *schedule); needed > arguments.workspace_bytes) {
    return Status::failure(StatusCode::kWorkspaceTooSmall, "workspace has %zu bytes, the plan needs %zu", arguments.workspace_bytes,
                           needed);
  }
  *split = split_workspace(arguments.workspace, schedule->slots(), split_is_tagged(geometry));
  return Status::success();
}

/// Launches `kernel` on `workers` CTAs; `shared_memory_allowed` is the kernel's own.
template <class Params>
Status launch_sm80(void (*kernel)(Params const), Params const& params, GemmLaunchArguments const& arguments, int32_t workers, int threads,
                   int smem_bytes, std::atomic<uint64_t>& shared_memory_allowed) {
  if (cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(kernel), smem_bytes, shared_memory_allowed);
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  }
  kernel<<<unsigned(workers), unsigned(threads), size_t(smem_bytes), arguments.stream>>>(params);
  return cuda_status(cudaGetLastError(), "launch");
}

}  // namespace minfer::gemm
