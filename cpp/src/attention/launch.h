// What a generated launch function of an attention kernel receives. Private to the library.
#pragma once

#include "minfer/attention.h"

namespace minfer::attention {

struct AttentionLaunchArguments {
  AttentionPlan const* plan;
  AttentionProblem const* problem;
  AttentionOperands const* operands;
  DeviceProperties const* device;
  int32_t* tile_counter;     // in the workspace, any content; or null
  bool programmatic_launch;  // launch with programmatic stream serialization (sm_90 kernels)
  Stream stream;
};

using LaunchFunction = Status (*)(AttentionLaunchArguments const&);

}  // namespace minfer::attention
