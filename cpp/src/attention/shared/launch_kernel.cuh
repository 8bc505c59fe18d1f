// How every attention kernel over queries is launched, of prefill and decode, on any architecture.
#pragma once

#include <atomic>

#include "attention/shared/launch.h"
#include "common/kernel_launch.h"

namespace minfer::attention {

/// Launches `kernel`, the only one that runs Kernel, on `ctas` CTAs.
template <class Kernel, class Params>
Status launch_kernel(void (*kernel)(Params const), Params const& params, AttentionLaunchArguments const& arguments, int64_t ctas) {
  static std::atomic<uint64_t> shared_memory_allowed{0};
  LaunchShape shape;
  shape.grid = dim3(unsigned(ctas));
  shape.threads = unsigned(Kernel::kThreads);
  shape.smem_bytes = size_t(Kernel::kSmemBytes);
  shape.shared_memory_allowed = &shared_memory_allowed;
  shape.programmatic = arguments.programmatic_launch && arguments.device->compute_major >= 9;  // sm_90 code waits for its predecessor
  shape.stream = arguments.stream;
  return launch(shape, "launch", kernel, params);
}

}  // namespace minfer::attention
