// Which CTA of a launch of route_tokens owns which tokens, and how long it waits for the packets of the others. Why the launch ends is
// explained in router_gemm.cu.
//
// A CTA's rank is the number of CTAs that start after it. Rank r owns the tokens r, r + ctas, ...: the last CTAs own the tokens, and the
// last one, of rank 0, owns token 0.
#pragma once

#include <cstdint>

#include "gemm/tile_scheduler.h"

namespace minfer::moe {

struct RouterOwners {
  static constexpr int32_t kForever = -1;
  /// Polls before an owner leaves its tokens, each of half a microsecond or more: CTAs that are resident together are done within a few.
  static constexpr int32_t kPatience = 24;

  int32_t tokens = 0;  // 1 to 64: a set of tokens, or of ranks, is a word with a bit for each
  int32_t ctas = 1;
  uint64_t of_last = 0;  // the tokens of rank 0

  RouterOwners() = default;
  RouterOwners(int32_t tokens, int32_t ctas) : tokens(tokens), ctas(ctas) {
    for (int32_t token = 0; token < tokens; token += ctas) of_last |= uint64_t(1) << token;
  }

  /// Number of owners: the CTAs of the ranks 0 to count() - 1.
  MINFER_HOST_DEVICE int32_t count() const { return tokens < ctas ? tokens : ctas; }
  MINFER_HOST_DEVICE int32_t rank_of(int32_t cta) const { return ctas - 1 - cta; }

  /// The tokens of a set of ranks. A product without carries: the tokens of rank 0 are `ctas` apart, and ranks are below `ctas`.
  MINFER_HOST_DEVICE uint64_t tokens_of(uint64_t ranks) const { return of_last * ranks & ~uint64_t(0) >> (64 - tokens); }

  /// Polls before an owner leaves its tokens to rank 0, which itself waits without a limit, for CTAs that have started. CTAs that started
  /// earlier leave earlier, one after the other: rank 0 needs the place of one CTA only, and chooses for the tokens that are left to it one
  /// by one.
  MINFER_HOST_DEVICE int32_t patience(int32_t rank) const { return rank == 0 ? kForever : kPatience + count() - 1 - rank; }
};

}  // namespace minfer::moe
