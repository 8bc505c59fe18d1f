// What a generated launch function receives. Private to the library.
#pragma once

#include "minfer/gemm.h"

namespace minfer::gemm {

/// What a CTA of a sm_90 kernel loads before its predecessor has finished.
struct EarlyLoads {
  int32_t ring_bytes;      // of B into its ring; 0 where something may still write B
  int32_t cluster_stages;  // of the ring at most, where a cluster's CTAs share the k of a tile
  int32_t l2_bytes;        // of operands into L2, where the ring gets nothing
};

struct GemmLaunchArguments {
  GemmProblem const* problem;
  GemmOperands const* operands;
  GemmLaunch launch;
  DeviceProperties const* device;
  void* workspace;
  size_t workspace_bytes;
  bool programmatic_launch;  // launch with programmatic stream serialization (sm_90 kernels)
  EarlyLoads early;
  Stream stream;
};

using LaunchFunction = Status (*)(GemmLaunchArguments const&);

}  // namespace minfer::gemm
