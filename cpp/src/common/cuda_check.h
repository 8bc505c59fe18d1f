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

/// Raises a kernel's dynamic shared memory limit once per device; `done` is the kernel's own bit set of devices.
inline cudaError_t allow_shared_memory(void const* kernel, int bytes, std::atomic<uint64_t>& done) {
  int device = 0;
  if (cudaError_t const error = cudaGetDevice(&device); error != cudaSuccess) return error;
  uint64_t const bit = uint64_t(1) << (device % 64);
  if (device < 64 && (done.load(std::memory_order_relaxed) & bit)) return cudaSuccess;
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

}  // namespace minfer
