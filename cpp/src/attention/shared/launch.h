// The arguments of a generated launch function of an attention kernel. Private to the library.
#pragma once

#include "minfer/attention.h"

namespace minfer::attention {

/// A decode CTA leaves a partial as packets of 16 bytes. 64 elements of an output row take 34 of them: the row's maximum and sum, the stamp
/// that tags the others, and 32 pairs of elements.
constexpr int kPacketsOfPartial = 34;

struct AttentionLaunchArguments {
  AttentionPlan const* plan;
  AttentionProblem const* problem;
  AttentionOperands const* operands;
  DeviceProperties const* device;
  void* workspace;           // plan->workspace_bytes of any content, or null where that is 0
  uint64_t nonce;            // no other launch's, and not 0
  bool programmatic_launch;  // launch with programmatic stream serialization (sm_90 kernels)
  Stream stream;
};

/// Whether all tiles of queries visit the same number of keys.
inline bool tiles_cost_the_same(AttentionProblem const& p) { return !p.varlen && !p.cached && p.window_left < 0 && p.window_right < 0; }

using LaunchFunction = Status (*)(AttentionLaunchArguments const&);

}  // namespace minfer::attention
