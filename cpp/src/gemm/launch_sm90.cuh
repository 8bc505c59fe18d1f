// What the launches of all sm_90 GEMM kernels share: schedule and workspace, the epilogue's descriptors, launch attributes.
#pragma once

#include "common/cuda_check.h"
#include "common/tensor_map.h"
#include "gemm/epilogue_sm90.cuh"
#include "gemm/launch.h"
#include "gemm/schedule.h"

namespace minfer::gemm {

/// The schedule of a launch and the workspace behind it.
template <class Config>
Status describe_schedule(GemmLaunchArguments const& arguments, TileSchedulerParams* schedule, SplitWorkspace* split) {
  KernelInfo geometry{};
  geometry.swap = Config::kSwap;
  geometry.tile_m = Config::kTileM;
  geometry.tile_n = Config::kTileN;
  geometry.tile_k = Config::kTileK;
  geometry.cluster_m = Config::kClusterM;
  geometry.cluster_n = Config::kClusterN;
  geometry.schedule = Config::kSchedule;
  geometry.threads = Config::kThreads;
  geometry.smem_bytes = Config::kSmemBytes;
  geometry.ctas_per_sm = Config::kCtasPerSm;
  geometry.arch = 90;
  geometry.b_format = Config::kFormat;
  *schedule = schedule_of(geometry, *arguments.problem, arguments.launch, *arguments.device);
  if (size_t const needed = workspace_of(geometry, *schedule); needed > arguments.workspace_bytes) {
    return Status::failure(StatusCode::kWorkspaceTooSmall, "workspace has %zu bytes, the plan needs %zu", arguments.workspace_bytes,
                           needed);
  }
  *split = split_workspace(arguments.workspace, int64_t(schedule->slots()) * Config::kClusterM * Config::kClusterN * split_groups(geometry),
                           split_is_tagged(geometry));
  return Status::success();
}

/// The fast epilogue takes 16-bit D that TMA addresses, C absent or in D's own form, gated without C. A TMA store of a row that does not end on
/// 16 bytes was seen to write the element after it (n = 1 and n = 31 on an H200): such rows are stored by threads.
template <class Epilogue>
Status describe_epilogue(GemmProblem const& problem, GemmOperands const& operands, EpilogueSm90Params* params) {
  params->general = make_epilogue(problem, operands);
  int64_t const n_out = problem.gated ? problem.n / 2 : problem.n;
  bool const c_fits = problem.has_c && problem.c_alignment == 16 && !problem.gated;
  params->store_by_tma = problem.d_alignment == 16 && n_out % 8 == 0 && problem.d_type != DataType::kF32 && (!problem.has_c || c_fits);
  params->load_c_by_tma = params->store_by_tma && c_fits;
  if (!params->store_by_tma) return Status::success();
  Status status =
      encode_tensor_map_16bit(&params->tma_d, operands.d, n_out, problem.m, problem.batch, operands.ldd, operands.d_batch_stride,
                              problem.gated ? Epilogue::kGatedColumns : Epilogue::kBoxColumns, Epilogue::kBoxRows);
  if (status.ok() && params->load_c_by_tma) {
    status = encode_tensor_map_16bit(&params->tma_c, operands.c, problem.n, problem.m, problem.batch, operands.c_stride_m,
                                     operands.c_batch_stride, Epilogue::kBoxColumns, Epilogue::kBoxRows);
  }
  return status;
}

/// Launches `kernel` on workers x cluster CTAs; `shared_memory_allowed` is the kernel's own.
template <class Config, class Params>
Status launch_sm90(void (*kernel)(Params const), Params const& params, GemmLaunchArguments const& arguments, int32_t workers,
                   int smem_bytes, std::atomic<uint64_t>& shared_memory_allowed) {
  if (cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(kernel), smem_bytes, shared_memory_allowed);
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  }
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (Config::kClusterM * Config::kClusterN > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim = {Config::kClusterM, Config::kClusterN, 1};
    ++count;
  }
  if (arguments.programmatic_launch) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(workers) * Config::kClusterM, Config::kClusterN, 1);
  config.blockDim = dim3(Config::kThreads, 1, 1);
  config.dynamicSmemBytes = size_t(smem_bytes);
  config.stream = arguments.stream;
  config.attrs = attributes;
  config.numAttrs = unsigned(count);
  return cuda_status(cudaLaunchKernelEx(&config, kernel, params), "launch");
}

}  // namespace minfer::gemm
