// The arguments of a generated launch function of an attention kernel. Private to the library.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention/shared/splits.h"
#include "minfer/attention.h"

namespace minfer::attention {

/// A decode CTA leaves a partial as packets of 16 bytes. 64 elements of an output row take 34 of them: the row's maximum and sum, the stamp
/// that tags the others, and 32 pairs of elements.
constexpr int kPacketsOfPartial = 34;

/// Whether it is a kernel of the batch-invariant mode, where the others are not considered.
inline bool is_invariant(KernelInfo const& kernel) { return std::strcmp(kernel.operation, "attention_invariant") == 0; }

/// Whether it is a kernel that is chosen for dividing keys among CTAs alone.
inline bool is_dividing(KernelInfo const& kernel) { return std::strcmp(kernel.operation, "attention_divided") == 0; }

/// Whether it is one for few rows, whose rows are the MMA's n.
inline bool is_for_few_rows(KernelInfo const& kernel) { return is_invariant(kernel) && kernel.tile_m < 64; }

/// Whether the CTAs of a launch for few rows fold their splits themselves: where each item has a CTA of its own, and all run at once.
inline bool folds_in_launch(KernelInfo const& kernel, AttentionPlan const& plan, DeviceProperties const& device) {
  constexpr int64_t kCtasPerSm = 2;
  return is_for_few_rows(kernel) && plan.split_rows > 0 && plan.partial_slots <= kCtasPerSm * device.sm_count;
}

/// Where a batch-invariant kernel has what in its workspace, in bytes: the tile counter, partials of splits, their states, totals. Partials
/// as packets take the place of the others and of their states.
struct SplitWorkspace {
  size_t partials, states, totals, bytes;
};
constexpr size_t kCounterBytes = 256;
inline SplitWorkspace split_workspace_of(KernelInfo const& kernel, AttentionPlan const& plan, DeviceProperties const& device) {
  auto const aligned = [](size_t bytes) { return (bytes + 255) & ~size_t(255); };
  size_t const rows = plan.split_rows > 0 ? size_t(plan.partial_slots) * size_t(plan.slot_rows) : 0;
  size_t const totals =
      has_shared_totals(kernel.tile_k) || !has_splits(kernel.tile_k) ? 0 : size_t(device.sm_count) * kernel.tile_m * kernel.head_dim_v * 4;
  SplitWorkspace at;
  at.partials = plan.counted ? kCounterBytes : 0;
  at.states = at.partials + aligned(rows * kernel.head_dim_v * 4);
  at.totals = at.states + aligned(rows * 8);
  if (folds_in_launch(kernel, plan, device)) {
    size_t const packets = size_t(plan.partial_slots) * kernel.tile_m * (kernel.head_dim_v / 64) * kPacketsOfPartial * 16;
    at.totals = std::max(at.totals, at.partials + aligned(packets));
  }
  at.bytes = at.totals + aligned(totals);
  return at;
}

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
