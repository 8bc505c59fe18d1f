// How route_tokens divides x.w_gate^T among CTAs; the launch and the size of the workspace have it from here.
#pragma once

#include <algorithm>
#include <cstdint>

namespace minfer::moe {

constexpr int kRouterUnit = 32;   // k of a warp's step
constexpr int kRouterBlock = 16;  // experts of an MMA

struct RouterGemmPlan {
  int32_t tile;           // experts of a CTA
  int32_t tokens;         // tokens of a CTA, a multiple of 8: all of them
  int32_t warps_k;        // warps that divide k
  int32_t tiles;          // along the experts
  int32_t splits, chunk;  // along k; units of a split
  int32_t ctas;

  int64_t vectors(int64_t experts) const { return (experts + kRouterBlock - 1) / kRouterBlock * (kRouterBlock / 2); }
  /// The workspace: partial sums, and behind them a mark of 8 bytes for each CTA that has tokens.
  size_t partials_bytes(int64_t token_count, int64_t experts) const {
    return size_t(token_count) * size_t(splits) * size_t(vectors(experts)) * 16;
  }
  size_t workspace_bytes(int64_t token_count, int64_t experts) const {
    return partials_bytes(token_count, experts) + size_t(std::min<int64_t>(token_count, ctas)) * 8;
  }
};

/// Up to 16 tokens the weights are most of the bytes: narrow tiles, k in as few pieces as fill the SMs, since each is summed again. From 17 on
/// 32 experts share what is read of x. A piece gives every warp something to read; not more CTAs than SMs, as each waits for the slowest.
inline RouterGemmPlan plan_router_gemm(int64_t tokens, int64_t hidden, int64_t experts, int32_t sm_count) {
  RouterGemmPlan p;
  p.tokens = tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64;
  p.tile = p.tokens <= 16 ? kRouterBlock : 2 * kRouterBlock;
  p.warps_k = p.tokens <= 32 ? 8 : 4;
  p.tiles = int32_t((experts + p.tile - 1) / p.tile);
  int64_t const units = std::max<int64_t>(1, (hidden + kRouterUnit - 1) / kRouterUnit), fill = std::max(1, sm_count / p.tiles);
  p.chunk = int32_t(std::max<int64_t>(p.warps_k, (units + fill - 1) / fill));
  p.splits = int32_t((units + p.chunk - 1) / p.chunk);
  p.ctas = std::max(1, std::min(p.tiles * p.splits, sm_count));
  return p;
}

}  // namespace minfer::moe
