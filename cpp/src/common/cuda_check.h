// CUDA results -> Status.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "minfer/status.h"

namespace minfer {

inline Status cuda_status(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return Status::success();
  Status status = Status::failure(StatusCode::kCudaError, "%s: %s (%s)", what, cudaGetErrorName(error), cudaGetErrorString(error));
  status.cuda_error = int32_t(error);
  return status;
}

/// Raises the limit of a kernel's dynamic shared memory on the current device: once for each of the first 64 devices, at every call for
/// others. `done` is a bit set of devices that belongs to this kernel.
inline cudaError_t allow_shared_memory(void const* kernel, int bytes, std::atomic<uint64_t>& done) {
  int device = 0;
  if (cudaError_t const error = cudaGetDevice(&device); error != cudaSuccess) return error;
  uint64_t const bit = device < 64 ? uint64_t(1) << device : 0;
  if (done.load(std::memory_order_acquire) & bit) return cudaSuccess;
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_release);
  return error;
}

}  // namespace minfer
