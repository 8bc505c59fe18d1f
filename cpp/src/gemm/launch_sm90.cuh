// What the launches of all sm_90 GEMM kernels share: the epilogue's descriptors, launch attributes.
#pragma once

#include "common/cuda_check.h"
#include "common/tensor_map.h"
#include "gemm/describe_schedule.h"
#include "gemm/epilogue_sm90.cuh"

namespace minfer::gemm {

/// The fast epilogue takes 16-bit D that TMA addresses, C absent or in D's own form, gated without C, no zero points. A TMA store of a row
/// that does not end on 16 bytes was seen to write the element after it (n = 1 and n = 31 on an H200): such rows are stored by threads.
template <class Epilogue>
Status describe_epilogue(GemmProblem const& problem, GemmOperands const& operands, typename Epilogue::Params* params) {
  if constexpr (Epilogue::kScaled) static_cast<ScaledOutput&>(*params) = make_scaled_output(problem, operands);
  params->general = make_epilogue(problem, operands);
  int64_t const n_out = problem.gated ? problem.n / 2 : problem.n;
  bool const c_fits = problem.has_c && problem.c_alignment == 16 && !problem.gated;
  params->store_by_tma = problem.d_alignment == 16 && n_out % 8 == 0 && problem.d_type != DataType::kF32 && !problem.d_fp8 &&
                         !problem.d_int32 && operands.a_zero == nullptr && (!problem.has_c || c_fits);
  params->load_c_by_tma = params->store_by_tma && c_fits;
  if (!params->store_by_tma) return Status::success();
  Status status = encode_tensor_map_planes(&params->tma_d, problem.d_type, operands.d, n_out, problem.m, problem.batch, operands.ldd,
                                           operands.d_batch_stride, problem.gated ? Epilogue::kGatedColumns : Epilogue::kBoxColumns,
                                           Epilogue::kStoredRows);
  if (status.ok() && params->load_c_by_tma) {
    status = encode_tensor_map_planes(&params->tma_c, problem.d_type, operands.c, problem.n, problem.m, problem.batch, operands.c_stride_m,
                                      operands.c_batch_stride, Epilogue::kBoxColumns, Epilogue::kBoxRows);
  }
  return status;
}

/// Whether to send for an operand before the predecessor has finished. These prefetches fill L2 alone, which all SMs and TMA read through:
/// a line that comes too early is not stale, as the copy that writes an operand in front of the kernel writes it there as well. But what
/// they fetch of such an operand is what its memory held before: they move its bytes for nothing, and are left out.
struct Prefetches {
  bool a, b;  // the kernel's own
};
template <class Config>
Prefetches prefetches_of(GemmLaunch const& launch) {
  return {!(Config::kSwap ? launch.realign_b : launch.realign_a), !(Config::kSwap ? launch.realign_a : launch.realign_b)};
}

/// Launches `kernel` on workers x the kernel's own cluster CTAs; `shared_memory_allowed` is the kernel's own. `cluster`: of the launch.
template <class Config, class Params>
Status launch_sm90(void (*kernel)(Params const), Params const& params, GemmLaunchArguments const& arguments, int32_t workers,
                   int smem_bytes, std::atomic<uint64_t>& shared_memory_allowed,
                   dim3 cluster = dim3(Config::kClusterM, Config::kClusterN)) {
  if (cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(kernel), smem_bytes, shared_memory_allowed);
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  }
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (cluster.x * cluster.y > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim = {cluster.x, cluster.y, 1};
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
