// Errors inside a benchmark: exceptions that main() prints. The kernel library itself only ever returns Status.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "minfer/status.h"

namespace minfer::bench {

inline void check(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

inline void check(Status const& status, std::string const& what) {
  if (!status.ok()) throw std::runtime_error(what + ": " + status.message);
}

}  // namespace minfer::bench
