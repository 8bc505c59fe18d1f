// What a generated launch function of an attention kernel receives. Private to the library.
#pragma once

#include "minfer/attention.h"

namespace minfer::attention {

/// 16 bytes each, that a decode kernel's CTA leaves of 64 elements of a row of output: maximum and sum, the others' stamp, and 32 pairs.
constexpr int kPacketsOfChunk = 34;

struct AttentionLaunchArguments {
  AttentionPlan const* plan;
  AttentionProblem const* problem;
  AttentionOperands const* operands;
  DeviceProperties const* device;
  void* workspace;           // plan->workspace_bytes of any content; or null
  uint64_t nonce;            // of this launch alone, not 0
  bool programmatic_launch;  // launch with programmatic stream serialization (sm_90 kernels)
  Stream stream;
};

/// Whether all tiles of queries meet as many keys.
inline bool tiles_alike(AttentionProblem const& p) { return !p.varlen && !p.cached && p.window_left < 0 && p.window_right < 0; }

using LaunchFunction = Status (*)(AttentionLaunchArguments const&);

}  // namespace minfer::attention
