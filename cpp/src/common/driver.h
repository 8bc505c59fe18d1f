// Functions of the driver, obtained through the runtime: the library does not link libcuda, and loads on a machine without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace minfer {

/// In the version of CUDA 12.0; null if the driver does not have the function.
template <class Function>
Function driver_function(char const* name) {
  void* pointer = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion(name, &pointer, 12000, cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<Function>(pointer);
}

}  // namespace minfer
