// Rows of queries, keys or values in global memory, for kernels that form addresses themselves instead of giving coordinates to TMA.
// A row is one token's elements of one head, as 16-bit numbers or as codes; the rows lie in the pages of a cache, or in a tensor whose
// sequences count as pages. Which page and row a key has: PageTable in sequences.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace minfer::attention {

struct PagedRows {
  char const* base;                             // [pages, page_size, heads, head_dim]
  int64_t page_bytes, token_bytes, head_bytes;  // strides of the first three modes
  int32_t row_bytes;                            // bytes of one row

  /// strides: of pages, tokens and heads, in elements of the tensor; two codes of int4 are one element.
  static PagedRows of(void const* base, int64_t const (&strides)[3], int64_t head_dim, int bits) {
    int64_t const element = bits < 8 ? 1 : bits / 8;
    return {static_cast<char const*>(base), strides[0] * element, strides[1] * element, strides[2] * element, int32_t(head_dim * bits / 8)};
  }
  __device__ __forceinline__ char const* at(int64_t page, int64_t token, int64_t head) const {
    return base + page * page_bytes + token * token_bytes + head * head_bytes;
  }
  /// How many of the 16 bytes from byte `first` on belong to the row; the rest is padding, which is loaded as zeros.
  __device__ __forceinline__ int vector_bytes(int first) const { return min(max(row_bytes - first, 0), 16); }
};

}  // namespace minfer::attention
