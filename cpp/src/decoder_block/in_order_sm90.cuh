// The roles of decoder_block_sm90.cuh in the batch-invariant mode, of int4 weights: the bits of the mode's operators one by one.
//
// What the mode fixes of a product is the order in which a row of the weight is summed: in ranges of k (gemm/invariant_splits.h), of each
// one MMA behind the other from its first k on, and then the ranges' sums in tile_scheduler.h's order. mma.sync of 16 rows has the bits of
// WGMMA, in whose order the mode's kernels for few tokens sum, too (quantized_gemm/mainloop_sync_sm90.cuh). So a consumer warp has a unit
// and a range of its k, a quad of them a slab (layout.h), and four quads work at a time, on a round of slabs:
//   the ring      has the first strips of all slabs of a round, then the next ones, until the ranges end: each stage is one copy by TMA
//   a round       ends with all its slabs, and what is behind a product waits for its last one. Meanwhile the ring fills
// Warp roles.
//   0             copies codes
//   1             copies scales
//   2             makes the packets' tag
//   4-11          write activations as MMAs take them. They are 16-bit numbers as the operators leave them in memory. A norm's are rounded,
//                 so that the factor of the whole token comes first; its sum of squares has minfer.rms_norm's order (fused/row_group.cuh)
//   12-27         consumers. Of a unit, the warp of the last range adds up the ranges, finishes rows and publishes packets, or stores
#pragma once

#include "cutlass/arch/reg_reconfig.h"
#include "decoder_block/in_order_consumers_sm90.cuh"
#include "decoder_block/in_order_converters_sm90.cuh"
#include "decoder_block/in_order_producer_sm90.cuh"
#include "decoder_block/in_order_weights_sm90.cuh"

namespace minfer::decoder_block {

/// Warp 3 fills the first warpgroup, whose registers the consumers take.
template <class Weights, DataType kType>
class InOrderBlock : BlockFacts<Weights, kType, 1, false> {
  using Facts = BlockFacts<Weights, kType, 1, false>;
  using Facts::p_, Facts::storage_, Facts::make_tag, Facts::kConverters, Facts::kConsumers;
  using typename Facts::FullBarrier, typename Facts::EmptyBarrier;
  static constexpr int kProducerRegisters = 40, kConverterRegisters = 72, kConsumerRegisters = 80;
  static_assert(128 * kProducerRegisters + kConverters * kConverterRegisters + kConsumers * kConsumerRegisters <= 72 * Facts::kThreads);

 public:
  using Facts::kThreads;
  using typename Facts::Params;

  __device__ __forceinline__ InOrderBlock(Params const& params, char* smem) : Facts(params, smem) {}

  __device__ __forceinline__ void run() {
    Facts const& facts = *this;
    int const thread = int(threadIdx.x), warp = cutlass::canonical_warp_idx_sync();
    allow_dependent_launch();
    if (thread == 0) init_barriers();
    __syncthreads();
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (thread == 0) InOrderProducer(facts).copy_codes();
      if (warp == 1) InOrderProducer(facts).copy_scales(thread - 32);
      if (thread == 64) {
        wait_for_predecessor();
        make_tag();
      }
    } else if (warp < 4 + kConverterWarps) {
      cutlass::arch::warpgroup_reg_dealloc<kConverterRegisters>();
      InOrderConverter converter(facts);
      converter.prefetch_norms(thread - 128);
      wait_for_predecessor();
      converter.convert(thread - 128);
      // CTA 0 has had packets of all CTAs: they have read the number.
      if (blockIdx.x == 0 && thread == 128) atomicAdd(&launches, 1ull);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      wait_for_predecessor();
      InOrderConsumer(facts).consume(warp - 4 - kConverterWarps, thread % 32);
    }
  }

 private:
  __device__ __forceinline__ void init_barriers() {
    storage_.tag = 0;
    for (int i = 0; i < p_.stages; ++i) {
      FullBarrier::init(&storage_.full[i], 1 + 32);  // the codes' thread, the scales' lanes
      EmptyBarrier::init(&storage_.empty[i], kStrips);
    }
    for (int i = 0; i < 2 * kMostKStages; ++i) EmptyBarrier::init(&storage_.ready[i / kMostKStages][i % kMostKStages], kConverterWarps);
    for (int i = 0; i < 2; ++i) EmptyBarrier::init(&storage_.consumed[i], kWarps);
    for (int i = 0; i < kWarps; ++i) EmptyBarrier::init(&storage_.partial_full[i], kStrips - 1);
    cutlass::arch::fence_barrier_init();
  }
};

}  // namespace minfer::decoder_block
