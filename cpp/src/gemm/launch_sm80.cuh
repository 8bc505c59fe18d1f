// The launch of a portable GEMM kernel: without attributes.
#pragma once

#include "common/cuda_check.h"
#include "gemm/describe_schedule.h"

namespace minfer::gemm {

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
