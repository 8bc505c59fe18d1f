// What a generated launch function receives. Private to the library.
#pragma once

#include "minfer/gemm.h"

namespace minfer::gemm {

struct GemmLaunchArguments {
  GemmProblem const* problem;
  GemmOperands const* operands;
  GemmLaunch launch;
  DeviceProperties const* device;
  void* workspace;
  size_t workspace_bytes;
  bool programmatic_launch;  // launch with programmatic stream serialization (sm_90 kernels)
  Stream stream;
};

using LaunchFunction = Status (*)(GemmLaunchArguments const&);

}  // namespace minfer::gemm
