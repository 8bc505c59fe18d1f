// Prefetches of an int4 cache's residual, which the warps that multiply it read themselves: its rows come from memory while others are
// multiplied.
#pragma once

#include <cstdint>

namespace minfer::attention {

/// Prefetches `rows` rows of `row_bytes` bytes, `stride` bytes apart, into L2; called by a whole warp.
__device__ __forceinline__ void prefetch_rows(char const* first, int64_t stride, int row_bytes, int rows, int lane) {
  constexpr int kLine = 128;
  for (int row = lane; row < rows; row += 32) {
    for (int at = 0; at < row_bytes; at += kLine) asm volatile("prefetch.global.L2 [%0];" ::"l"(first + row * stride + at));
  }
}

}  // namespace minfer::attention
