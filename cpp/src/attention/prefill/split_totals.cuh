// The splits of a tile that one CTA folds (shared/splits.h): a consumer warpgroup's running total of output, maximum and sum. The output
// of a split is in registers, of which there are none for a second one, so the total is in shared memory, or in the workspace where shared
// memory has no room. Each thread has its own part, which no other thread reads: no barrier is needed, and 16 bytes of neighbouring threads
// lie next to each other.
#pragma once

#include "attention/prefill/traits.cuh"
#include "attention/shared/splits.h"
#include "common/opaque.cuh"

namespace minfer::attention {

template <class Traits>
struct PrefillSplitTotals : Traits {
  using Traits::kConsumers, Traits::kOutputs, Traits::kSharedTotals, Traits::kTileM;
  using typename Traits::Params, typename Traits::SharedStorage;

  /// Vector number 0 of the thread's part of the total; the next one is 128 further.
  static CUTLASS_DEVICE float4* vectors_of(Params const& params, SharedStorage& storage, int consumer, int thread) {
    if constexpr (kSharedTotals) {
      return storage.totals.of + consumer * (kOutputs / 4) * 128 + thread;
    } else {
      return params.totals + (int64_t(blockIdx.x) * kConsumers + consumer) * (kOutputs / 4) * 128 + thread;
    }
  }

  /// Folds the split that softmax and output hold. first: there is no total yet; last: the total is left in softmax and output, else in
  /// memory, and they are made ready for the next split.
  template <class Softmax, class Output>
  static CUTLASS_DEVICE void fold(Params const& params, SharedStorage& storage, Softmax& softmax, Output& output, int consumer, int thread,
                                  bool first, bool last) {
    make_opaque(thread);
    make_opaque(consumer);  // addresses computed before the mainloop would be spilled
    int const lane = thread % 32, row = consumer * 64 + thread / 32 * 16 + lane / 4;  // the thread's other row is 8 below
    softmax.reduce_sums();
    if (first && last) return;
    SplitWeights weights[2];
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      SplitState total{-INFINITY, 0.0f};
      if (!first) total = storage.states.of[row + 8 * h];
      weights[h] = fold_state(total, {softmax.row_max[h], softmax.row_sum[h]});
      softmax.row_max[h] = total.max;
      softmax.row_sum[h] = total.sum;
    }
    __syncwarp();  // all lanes of a row have read its state
    float4* const vectors = vectors_of(params, storage, consumer, thread);
#pragma unroll
    for (int j = 0; j < kOutputs / 4; ++j) {
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (!first) total = vectors[j * 128];
      total.x = fold_output(total.x, output(4 * j), weights[0]);
      total.y = fold_output(total.y, output(4 * j + 1), weights[0]);
      total.z = fold_output(total.z, output(4 * j + 2), weights[1]);
      total.w = fold_output(total.w, output(4 * j + 3), weights[1]);
      output(4 * j) = total.x;
      output(4 * j + 1) = total.y;
      output(4 * j + 2) = total.z;
      output(4 * j + 3) = total.w;
      if (!last) vectors[j * 128] = total;
    }
    if (last) return;
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) storage.states.of[row + 8 * h] = {softmax.row_max[h], softmax.row_sum[h]};
    }
    softmax.clear();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output(i) = 0.0f;
  }
};

}  // namespace minfer::attention
