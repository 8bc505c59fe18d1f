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
  dim3 cluster;               // CTAs
  bool programmatic = false;  // dependent_launch.cuh
  Stream stream = nullptr;
};

/// The runtime's form of a LaunchShape, for cudaLaunchKernelEx and the occupancy queries. Points into itself.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};

  explicit LaunchConfig(LaunchShape const& shape) {
    config.gridDim = shape.grid;
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.smem_bytes;
    config.stream = shape.stream;
    config.attrs = attributes;
    if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
    }
    if (shape.programmatic) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  LaunchConfig(LaunchConfig const&) = delete;
  LaunchConfig& operator=(LaunchConfig const&) = delete;
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
  LaunchConfig const launch_config(shape);
  return cuda_status(cudaLaunchKernelEx(&launch_config.config, kernel, arguments...), what);
}

}  // namespace minfer
