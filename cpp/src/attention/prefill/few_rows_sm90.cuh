// Batch-invariant attention of few rows for sm_90a: decode, and the verification of a few drafted tokens. It returns the bits of the
// batch-invariant prefill kernel of the same head dimension and cache (prefill_sm90.cuh), whose tiles have 64 rows and more.
//
// MMAs are mma.sync m16n8k16, whose results have the bits of WGMMA's (tests/attention/test_batch_invariant_gpu.py). Operands are swapped:
// scores are computed as S^T = K.Q^T and the output as O^T = V^T.P^T, with keys or channels as the MMA's m and the tile's 8 rows as its n.
// What an element adds up, and in which order, does not depend on which operand is which. A warp keeps the scores of one of a split's
// (shared/splits.h) blocks in registers, so that the softmax of all its blocks is computed at once, by the running maxima that the prefill
// kernel has block after block. Where a split is an item of its own, the CTAs of a tile fold them, or a kernel behind this one does
// (few_rows_results.cuh).
// Warp roles. The first 4 or 8 warps are consumers. The others load keys and values by TMA. Codes become 16 bits in the consumers'
// registers. Where there are few items, a CTA has an SM alone, its ring has room for as much of a split as fits, and it has four producers;
// else two share an SM, with a producer each.
// Pipeline. One ring of blocks, a split's key blocks first and then its value blocks; two stages of queries and of published items.
// Limits: equal head dimensions.
#pragma once

#include <algorithm>

#include "attention/prefill/few_rows_consumer.cuh"
#include "attention/prefill/few_rows_producer.cuh"
#include "attention/prefill/prefill_sm90.cuh"

namespace minfer::attention {

/// The kernel for launches of few items, with one CTA an SM: its ring has room for as much of a split as fits.
template <class Config>
struct FewItems : Config {
  using Traits = FewRowsTraits<Config>;
  static constexpr int kCtasPerSm = 1, kSmemBytes = 227 * 1024, kBeside = Traits::kSmemBytes - Config::kStages * Traits::kStageBytes;
  static constexpr int kStages = std::min((kSmemBytes - kBeside) / Traits::kStageBytes, 2 * Traits::kSplitBlocks);
};

template <class Config>
struct FewRowsSm90 {
  using Traits = FewRowsTraits<Config>;
  using Producer = FewRowsProducer<Traits>;
  using Consumer = FewRowsConsumer<Traits>;
  using Params = typename Traits::Params;
  using SharedStorage = typename Traits::SharedStorage;
  using FullBarrier = typename Traits::FullBarrier;
  using EmptyBarrier = typename Traits::EmptyBarrier;
  static constexpr int kThreads = Traits::kThreads, kSmemBytes = Traits::kSmemBytes;
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (cute::cast_smem_ptr_to_uint(smem) % 1024 != 0) __trap();
    int const thread = int(threadIdx.x), warp = cutlass::canonical_warp_idx_sync();
    allow_dependent_launch();
    if (warp == 0 && cute::elect_one_sync()) {
      init_barriers(params, storage);
      storage.stamp = new_stamp(params.nonce);
    }
    wait_for_predecessor();
    Traits::TileScheduler::build(storage.tiles, params, thread, kThreads);
    __syncthreads();
    if (warp < Traits::kConsumerWarps) {
      Consumer::consume(params, storage, thread);
    } else {
      Producer::produce(params, storage, warp - Traits::kConsumerWarps, thread % 32);
    }
  }

  static CUTLASS_DEVICE void init_barriers(Params const& params, SharedStorage& storage) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.q));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.k));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.v));
    for (int s = 0; s < Traits::kQueryStages; ++s) {
      FullBarrier::init(&storage.full_q[s], 1);
      EmptyBarrier::init(&storage.empty_q[s], Traits::kConsumerWarps);
    }
    for (int s = 0; s < 2; ++s) {
      EmptyBarrier::init(&storage.full_tile[s], 1);
      EmptyBarrier::init(&storage.empty_tile[s], Traits::kConsumerWarps);
    }
    for (int s = 0; s < Traits::kStages; ++s) {
      FullBarrier::init(&storage.full[s], 1);
      EmptyBarrier::init(&storage.empty[s], Traits::kConsumerWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
};

template <class Config>
__global__ void __launch_bounds__(FewRowsSm90<Config>::kThreads, Config::kCtasPerSm)
    few_rows_sm90_kernel(__grid_constant__ typename FewRowsSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  FewRowsSm90<Config>::run(params, smem);
#endif
}

}  // namespace minfer::attention
