// How a merge of attention states is cut into launches. Private to the library.
#pragma once

#include "minfer/attention.h"

namespace minfer::attention {

constexpr int64_t kMergedStates = 16;  // states of a launch: 1.2 KB of its 4 KB of parameters

/// The workspace of a merge of more states, which is several launches: out [rows, heads, head_dim_v] in float32, and two lses [batch,
/// heads, seqlen], of which a launch reads one and writes the other.
struct MergeWorkspace {
  int64_t out_bytes, lse_bytes;

  explicit MergeWorkspace(AttentionMerge const& merge) {
    int64_t const pairs = merge.batch * merge.seqlen * merge.heads;
    auto const bytes = [](int64_t floats) { return (floats * int64_t(sizeof(float)) + 255) / 256 * 256; };
    out_bytes = bytes(pairs * merge.head_dim_v);
    lse_bytes = bytes(pairs);
  }
  size_t bytes() const { return size_t(out_bytes + 2 * lse_bytes); }
};

}  // namespace minfer::attention
