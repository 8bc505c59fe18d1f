// Batch-invariant attention of few rows for sm_90a, for launches of many items: each warp computes items of its own, from the loads to the
// store, with the arithmetic of few_rows_sm90.cuh and therefore the same bits. Such launches are bound by the bytes of the cache, and what
// counts is that as many loads are under way as shared memory holds, over blocks and items.
//
// Warp roles. Eight warps, of int4 twelve, are consumers. Each has a ring of its own, whose stages are 16 or 32 keys or their values: a
// block's keys, then its values, from the last block of a split to the first. Scores, probabilities and output are in the consumer's
// registers, as are the queries. Four more warps, one to a scheduler, are producers, which fill the rings of two or three consumers each: a
// stage of one, then a stage of another, where there is room. What can be issued is the limit of consumers that convert codes, so that a
// producer's instructions count: a lane holds where a box of the item lies, and brings 16 bytes of a stage's scales.
// Limits: an item is one split (split_scheduler.cuh), or a tile whose keys are one split; fits() has others.
#pragma once

#include <numeric>

#include "attention/prefill/few_rows_warp.cuh"
#include "attention/prefill/few_rows_warps_loads.cuh"

namespace minfer::attention {

template <class Config>
struct FewRowsWarpsSm90 : FewRowsWarpsFacts<Config> {
  using Facts = FewRowsWarpsFacts<Config>;
  using Loads = FewRowsWarpsLoads<Facts>;
  using Facts::address_of_storage, Facts::kConsumerRegisters, Facts::kLocations, Facts::kProducerRegisters, Facts::kSplitStages,
      Facts::kStageKeys, Facts::kStages, Facts::kThreads, Facts::kTokenScales, Facts::kWarps;
  using typename Facts::EmptyBarrier, typename Facts::FullBarrier, typename Facts::Params, typename Facts::SharedStorage,
      typename Facts::TileScheduler;

  /// Whether lanes can hold where all boxes of a split lie, and a Place has room for the KV head.
  static bool fits(AttentionProblem const& problem, AttentionPlan const& plan) {
    int64_t const box_rows = std::gcd(plan.box_rows, int64_t(kStageKeys));
    return kSplitStages * kStageKeys <= 32 * kLocations * box_rows && problem.heads_kv <= Loads::Place::kMaxHeads;
  }

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (shared_address(smem) % 1024 != 0) __trap();
    int const thread = int(threadIdx.x), warp = cutlass::canonical_warp_idx_sync();
    allow_dependent_launch();
    if (thread < kWarps) {
      for (int s = 0; s < kStages; ++s) {
        FullBarrier::init(&storage.barriers[thread][s][0], kTokenScales > 0 ? 33 : 1);  // each lane brings scales
        EmptyBarrier::init(&storage.barriers[thread][s][1], 1);
      }
      cutlass::arch::fence_barrier_init();
    }
    wait_for_predecessor();
    TileScheduler::build(storage.tiles, params, thread, kThreads);
    __syncthreads();
    int const step = int(gridDim.x) * kWarps;
    int const count = TileScheduler::count(storage.tiles, params);
    if (warp >= kWarps) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      Loads(params, storage, warp - kWarps, thread % 32).run(count);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      clear_rows_outside_sequences(params, thread, 32 * kWarps);
      FewRowsWarp<Facts> of{{}, params, storage, warp, thread % 32, address_of_storage(storage)};
      for (int item = warp * int(gridDim.x) + int(blockIdx.x); item < count; item += step) {  // few items are on all SMs
        of.compute(TileScheduler::at(storage.tiles, params, item));
      }
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(FewRowsWarpsSm90<Config>::kThreads, 1)
    few_rows_warps_sm90_kernel(__grid_constant__ typename FewRowsWarpsSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  FewRowsWarpsSm90<Config>::run(params, smem);
#endif
}

}  // namespace minfer::attention
