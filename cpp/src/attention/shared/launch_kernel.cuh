// Launches an attention kernel: prefill or decode, on any architecture.
#pragma once

#include <atomic>

#include "attention/shared/launch.h"
#include "common/kernel_launch.h"

namespace minfer::attention {

/// Launches `kernel` on `ctas` CTAs. It must be the only __global__ function that runs Kernel, since the record of devices on which it was
/// allowed its shared memory is kept by Kernel.
template <class Kernel, class Params>
Status launch_kernel(void (*kernel)(Params const), Params const& params, AttentionLaunchArguments const& arguments, int64_t ctas) {
  static std::atomic<uint64_t> shared_memory_allowed{0};
  LaunchShape shape;
  shape.grid = dim3(unsigned(ctas));
  shape.threads = unsigned(Kernel::kThreads);
  shape.smem_bytes = size_t(Kernel::kSmemBytes);
  shape.shared_memory_allowed = &shared_memory_allowed;
  // Only code compiled for sm_90 onward waits for the preceding kernel of the stream.
  shape.programmatic = arguments.programmatic_launch && arguments.device->compute_major >= 9;
  shape.stream = arguments.stream;
  return launch(shape, "launch", kernel, params);
}

}  // namespace minfer::attention
