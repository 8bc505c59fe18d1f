// Rows of q before the first sequence of cu_seqlens_q and behind the last one belong to no sequence. Their output is zeros and their
// log-sum-exp -inf, so that no element of out and lse stays unwritten.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/shared/sequences.cuh"

namespace minfer::attention {

/// Called by `threads` threads of every CTA. Params: PrefillParams or DecodeParams.
template <class Params>
__device__ __forceinline__ void clear_rows_outside_sequences(Params const& params, int thread, int threads) {
  if (params.cu_seqlens_q == nullptr) return;
  RowRange const inside = params.all_queries();
  int const outside = params.tokens_q - inside.count;
  for (int i = int(blockIdx.x); i < outside; i += int(gridDim.x)) {
    int64_t const row = i < inside.first ? i : i + inside.count;
    for (int column = thread; column < params.heads_q * params.head_dim_v; column += threads) {
      static_cast<uint16_t*>(params.out)[row * params.out_row + column] = 0;
    }
    for (int head = thread; head < params.heads_q && params.lse != nullptr; head += threads) {
      params.lse[head * params.lse_head + row] = -INFINITY;
    }
  }
}

}  // namespace minfer::attention
