// Batch-invariant attention of few rows for sm_90a: decode, and the verification of a few drafted tokens. It returns the bits of the
// batch-invariant prefill kernel of the same head dimension and cache (prefill_sm90.cuh), whose tiles have 64 rows and more.
//
// Operands are swapped: scores are computed as S^T = K.Q^T and the output as O^T = V^T.P^T, with keys or channels as the MMA's m and the
// tile's 8 rows as its n, so that few rows take an eighth of the MMAs' time. What an element adds up, and in which order, does not depend
// on which operand is which. All scores of a split of the keys (shared/splits.h) fit in shared memory, so that the softmax of all its key
// blocks is computed at once, by the running maxima that the prefill kernel has block after block. Where a split is an item of its own, a
// kernel behind this one folds them (split_merge.cuh).
// Warp roles. Warps 0 to 3 are the consumer warpgroup. Warp 4 loads keys and values by TMA; where they are codes of a cache, warps 4 to 7
// convert them (convert.cuh). Several CTAs share an SM: while one computes a softmax, others load, convert or multiply.
// Pipeline. One ring of blocks, a split's key blocks first and then its value blocks; two stages of queries and of published items.
// Limits: equal head dimensions.
#pragma once

#include <algorithm>

#include "attention/prefill/few_rows_consumer.cuh"
#include "attention/prefill/few_rows_producer.cuh"
#include "attention/prefill/prefill_sm90.cuh"

namespace minfer::attention {

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
    if (warp == 0 && cute::elect_one_sync()) init_barriers(params, storage);
    if constexpr (Traits::kConverts) {
      if (params.keys.head_dim < Traits::kHeadDim) {
        clear_padding(cute::cast_smem_ptr_to_uint(storage.ring), int(sizeof(storage.ring)), thread, kThreads);
        cutlass::arch::fence_view_async_shared();
      }
    }
    wait_for_predecessor();
    Traits::TileScheduler::build(storage.tiles, params, thread, kThreads);
    __syncthreads();
    if (warp < 4) {
      if constexpr (Traits::kConverts) cutlass::arch::warpgroup_reg_dealloc<Traits::kConsumerRegisters>();
      Consumer::consume(params, storage, thread);
    } else if constexpr (Traits::kConverts) {
      cutlass::arch::warpgroup_reg_alloc<Traits::kConverterRegisters>();
      Traits::for_format(params.format, [&](auto format) { Producer::template convert<format()>(params, storage, warp - 4, thread % 32); });
    } else {
      Producer::produce(params, storage, thread % 32);
    }
  }

  static CUTLASS_DEVICE void init_barriers(Params const& params, SharedStorage& storage) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.q));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.k));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.v));
    for (int s = 0; s < Traits::kQueryStages; ++s) {
      FullBarrier::init(&storage.full_q[s], 1);
      EmptyBarrier::init(&storage.empty_q[s], 4);
    }
    for (int s = 0; s < 2; ++s) {
      EmptyBarrier::init(&storage.full_tile[s], 1);
      EmptyBarrier::init(&storage.empty_tile[s], 4 + (Traits::kConverts ? 4 : 0));
    }
    for (int s = 0; s < Traits::kStages; ++s) {
      FullBarrier::init(&storage.full[s], Traits::kConverts ? 4 : 1);
      EmptyBarrier::init(&storage.empty[s], 4);
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

template <class Config>
Status launch_few_rows_sm90(AttentionLaunchArguments const& arguments) {
  using Kernel = FewRowsSm90<Config>;
  AttentionProblem const& p = *arguments.problem;
  AttentionPlan const& plan = *arguments.plan;
  typename Kernel::Params params{};
  Status status = describe_operands<Config>(arguments, &params);
  if (!status.ok()) return status;
  set_prefill_arguments(arguments, Config::kTileM, &params);
  set_split_arguments<typename Kernel::Traits>(arguments, &params);
  int64_t const tiles = p.varlen ? int64_t(params.max_tiles) : int64_t(params.q_tiles) * params.head_tiles * params.batch;
  int64_t const items = plan.split_rows > 0 ? int64_t(params.max_items) : tiles;
  int64_t const ctas = std::min<int64_t>(int64_t(arguments.device->sm_count) * Config::kCtasPerSm, std::max<int64_t>(items, 1));
  status = launch_kernel<Kernel>(&few_rows_sm90_kernel<Config>, params, arguments, ctas);
  if (status.ok() && plan.split_rows > 0) status = launch_split_merge<typename Kernel::Traits>(params, arguments);
  return status;
}

}  // namespace minfer::attention
