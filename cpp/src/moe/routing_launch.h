// How the routing kernels are launched: plain, or with the attributes of sm_90.
#pragma once

#include "common/cuda_check.h"
#include "minfer/types.h"

namespace minfer::moe {

struct LaunchShape {
  dim3 grid;
  unsigned threads = 0;
  size_t smem_bytes = 0;
  unsigned cluster = 1;  // CTAs, along x
  bool programmatic = false;
  Stream stream = nullptr;
};

template <class... Params, class... Arguments>
Status launch(LaunchShape const& shape, char const* what, void (*kernel)(Params...), Arguments const&... arguments) {
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

}  // namespace minfer::moe
