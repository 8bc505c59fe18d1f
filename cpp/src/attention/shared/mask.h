// Which keys a query sees under a causal mask or a sliding window, both aligned to the bottom right: the last query is aligned to the last
// key. Also which key blocks a tile of queries has to visit, and which of these need a mask.
#pragma once

#include <cstdint>

namespace minfer::attention {

#if defined(__CUDACC__)
#define MINFER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MINFER_HOST_DEVICE inline
#endif

/// Query i sees key j when begin(i) <= j < end(i).
struct Mask {
  int32_t seqlen_k, shift;  // query i is aligned to key i + shift, where shift = seqlen_k - seqlen_q
  int32_t left, right;      // keys before and behind the aligned one that are seen; < 0: all

  MINFER_HOST_DEVICE Mask(int32_t seqlen_q, int32_t seqlen_k, int32_t left, int32_t right)
      : seqlen_k(seqlen_k), shift(seqlen_k - seqlen_q), left(left), right(right) {}
  MINFER_HOST_DEVICE int32_t end(int32_t query) const {
    if (right < 0) return seqlen_k;
    int32_t const limit = query + shift + right + 1;
    return limit < 0 ? 0 : limit < seqlen_k ? limit : seqlen_k;
  }
  MINFER_HOST_DEVICE int32_t begin(int32_t query) const {
    int32_t const limit = query + shift - left;
    return left < 0 || limit < 0 ? 0 : limit;
  }
};

/// The key blocks of kTileN keys that queries `first` to `last` visit are [begin, end). Of these, [full_begin, full_end) need no mask.
template <int kTileN>
struct KeyBlocks {
  int32_t begin, end, full_begin, full_end;

  MINFER_HOST_DEVICE KeyBlocks(Mask const& mask, int32_t first, int32_t last) {
    begin = mask.begin(first) / kTileN;
    end = (mask.end(last) + kTileN - 1) / kTileN;
    full_begin = (mask.begin(last) + kTileN - 1) / kTileN;
    full_end = mask.end(first) / kTileN;
  }
  /// Leaves those of blocks `first` to `last` - 1; where none is left, both ends are `first`.
  MINFER_HOST_DEVICE void cut(int32_t first, int32_t last) {
    begin = begin < first ? first : begin;
    end = end < last ? end : last;
    if (begin >= end) begin = end = first;
  }
};

}  // namespace minfer::attention
