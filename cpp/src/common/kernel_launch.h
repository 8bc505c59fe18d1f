// How kernels are launched: plain, or with the attributes of sm_90.
#pragma once

#include <atomic>

#include "common/cuda_check.h"
#include "minfer/types.h"

namespace minfer {

struct LaunchShape {
  dim3 grid;
  unsigned threads = 0;
  size_t smem_bytes = 0;
  // For kernels that take more than 48 KB, always the same number of bytes: the kernel's own bit set of devices (allow_shared_memory).
  std::atomic<uint64_t>* shared_memory_allowed = nullptr;
  unsigned cluster = 1;       // CTAs, along x
  bool programmatic = false;  // dependent_launch.cuh
  Stream stream = nullptr;
};

/// what: the call, in the message of a launch that fails.
template <class... Params, class... Arguments>
Status launch(LaunchShape const& shape, char const* what, void (*kernel)(Params...), Arguments const&... arguments) {
  if (shape.shared_memory_allowed != nullptr) {
    if (cudaError_t const error =
            allow_shared_memory(reinterpret_cast<void const*>(kernel), int(shape.smem_bytes), *shape.shared_memory_allowed);
        error != cudaSuccess) {
      return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
    }
  }
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim = {shape.cluster, 1, 1};
    ++count;
  }
  if (shape.programmatic) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.smem_bytes;
  config.stream = shape.stream;
  config.attrs = attributes;
  config.numAttrs = unsigned(count);
  return cuda_status(cudaLaunchKernelEx(&config, kernel, arguments...), what);
}

}  // namespace minfer
