// How route_tokens divides x.w_gate^T among CTAs. Both the launch and the size of the workspace follow from it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace minfer::moe {

constexpr int kRouterStepK = 32;       // k of a warp's step
constexpr int kRouterMmaExperts = 16;  // m of an MMA

struct RouterGemmPlan {
  int32_t tile;                 // experts of a work item
  int32_t tokens;               // tokens of a work item: all of them, rounded up to what the kernel computes
  int32_t warps_k;              // warps that divide a split
  int32_t tiles;                // along the experts
  int32_t splits, split_steps;  // along k; a split is split_steps steps, the last one may be shorter
  int32_t ctas;

  /// Of a token and split: two logits each.
  int64_t packets(int64_t experts) const { return (experts + kRouterMmaExperts - 1) / kRouterMmaExperts * (kRouterMmaExperts / 2); }
  /// The workspace holds the partials, and behind them a flag of 8 bytes for each CTA that owns tokens.
  size_t partials_bytes(int64_t token_count, int64_t experts) const {
    return size_t(token_count) * size_t(splits) * size_t(packets(experts)) * 16;
  }
  size_t workspace_bytes(int64_t token_count, int64_t experts) const {
    return partials_bytes(token_count, experts) + size_t(std::min<int64_t>(token_count, ctas)) * 8;
  }
};

/// Up to 16 tokens the weights are most of the bytes: tiles are narrow, and k has as few splits as fill the SMs, since every split is added
/// up again. From 17 tokens on 32 experts share what is read of x. A split has at least one step for every warp. There are no more CTAs
/// than SMs: the owners wait for the slowest CTA, and a second wave would come after the first.
inline RouterGemmPlan plan_router_gemm(int64_t tokens, int64_t hidden, int64_t experts, int32_t sm_count) {
  RouterGemmPlan p;
  p.tokens = tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64;
  p.tile = p.tokens <= 16 ? kRouterMmaExperts : 2 * kRouterMmaExperts;
  p.warps_k = p.tokens <= 32 ? 8 : 4;
  p.tiles = int32_t((experts + p.tile - 1) / p.tile);
  int64_t const steps = std::max<int64_t>(1, (hidden + kRouterStepK - 1) / kRouterStepK), fill = std::max(1, sm_count / p.tiles);
  p.split_steps = int32_t(std::max<int64_t>(p.warps_k, (steps + fill - 1) / fill));
  p.splits = int32_t((steps + p.split_steps - 1) / p.split_steps);
  p.ctas = std::max(1, std::min(p.tiles * p.splits, sm_count));
  return p;
}

}  // namespace minfer::moe
