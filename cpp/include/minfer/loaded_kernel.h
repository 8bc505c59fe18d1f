// Kernels that are not part of the library: compiled elsewhere, for one architecture, loaded from their cubin and launched as the library's
// own are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

/// Of a process, until it ends.
struct LoadedKernel;

/// Loads `name` from a cubin, whose bytes may go afterwards. Every device runs it that has the cubin's architecture.
/// @param shared_bytes dynamic shared memory of each launch.
Status load_kernel(void const* cubin, char const* name, size_t shared_bytes, LoadedKernel const** kernel);

constexpr int kMostTensorMapModes = 5;

/// A TMA descriptor among the parameters of a kernel.
struct TensorMapArgument {
  void const* base;
  int32_t element_bytes = 0;                  // 1, 2 or 4
  int32_t modes = 0;                          // 2 to 5
  int64_t extents[kMostTensorMapModes] = {};  // elements; the first mode has unit stride
  int64_t strides[kMostTensorMapModes] = {};  // bytes; [0] is not read
  int32_t box[kMostTensorMapModes] = {};      // elements
  int32_t swizzle_bytes = 0;                  // 0, 32, 64 or 128
};

constexpr size_t kTensorMapBytes = 128, kTensorMapAlignment = 64;

/// Writes a descriptor of kTensorMapBytes, aligned to kTensorMapAlignment.
Status encode_tensor_map_argument(TensorMapArgument const& argument, void* map);

struct LoadedLaunch {
  int64_t grid[3] = {1, 1, 1};
  int32_t threads = 0;
  int32_t cluster = 1;  // CTAs, along the grid's first mode
  bool programmatic = false;
  Stream stream = nullptr;
};

/// @param parameters where each of the kernel's parameters is, in their order.
Status launch_loaded(LoadedKernel const& kernel, LoadedLaunch const& launch, void** parameters);

}  // namespace minfer
