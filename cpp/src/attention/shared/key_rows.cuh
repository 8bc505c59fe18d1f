// Rows of keys or values in global memory, of a kernel that addresses them itself: codes or 16-bit numbers, in pages or not.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace minfer::attention {

struct KeyRows {
  char const* base;
  int64_t page, row, head;  // strides in bytes; a page may be a sequence
  int32_t bytes;            // of a row of one head

  /// strides: of page, row and head, in elements.
  static KeyRows of(void const* base, int64_t const (&strides)[3], int64_t head_dim, int bits) {
    int64_t const element = bits < 8 ? 1 : bits / 8;  // int4: pairs
    return {static_cast<char const*>(base), strides[0] * element, strides[1] * element, strides[2] * element, int32_t(head_dim * bits / 8)};
  }
  __device__ __forceinline__ char const* at(int64_t of_page, int64_t of_row, int64_t of_head) const {
    return base + of_page * page + of_row * row + of_head * head;
  }
  /// How many of 16 bytes, from byte `first` of a row on, it has.
  __device__ __forceinline__ int bytes_from(int first) const { return min(max(bytes - first, 0), 16); }
};

}  // namespace minfer::attention
