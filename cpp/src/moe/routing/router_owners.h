// Whose tokens are whose in a launch of route_tokens (router_gemm.cu, which tells how it ends), and how long their CTA waits for the
// others.
//
// A CTA's rank is the number of CTAs that are started after it. Rank r has the tokens r, r + ctas, ...: the last CTAs have them, and the
// last one, of rank 0, has the first.
#pragma once

#include <cstdint>

#include "gemm/tile_scheduler.h"

namespace minfer::moe {

struct RouterOwners {
  static constexpr int32_t kForever = -1;
  /// Polls of a CTA that waits, of half a microsecond and more each: CTAs that are resident together are done within a few.
  static constexpr int32_t kPatience = 24;

  int32_t tokens = 0;  // 1 to 64: sets of them, and of ranks, are bits
  int32_t ctas = 1;
  uint64_t of_last = 0;  // tokens of rank 0

  RouterOwners() = default;
  RouterOwners(int32_t tokens, int32_t ctas) : tokens(tokens), ctas(ctas) {
    for (int32_t token = 0; token < tokens; token += ctas) of_last |= uint64_t(1) << token;
  }

  /// CTAs with tokens: those of the ranks 0 to count() - 1.
  MINFER_HOST_DEVICE int32_t count() const { return tokens < ctas ? tokens : ctas; }
  MINFER_HOST_DEVICE int32_t rank_of(int32_t cta) const { return ctas - 1 - cta; }

  /// A product of bits none of which meet: rank 0's tokens are `ctas` apart, and ranks are below that.
  MINFER_HOST_DEVICE uint64_t tokens_of(uint64_t ranks) const { return of_last * ranks & ~uint64_t(0) >> (64 - tokens); }

  /// Polls before a rank leaves its tokens to rank 0, which itself waits for CTAs that have been started. Those who were started first go
  /// first, one by one: rank 0 needs one place, and takes the tokens over one after the other.
  MINFER_HOST_DEVICE int32_t patience(int32_t rank) const { return rank == 0 ? kForever : kPatience + count() - 1 - rank; }
};

}  // namespace minfer::moe
