// The products between two attentions for one or two tokens in one launch, for sm_90a: a dataflow over CTAs that stay.
//
// A token's products wait for memory or for each other. Here nothing but activations waits: each CTA has the same rows of every weight from
// the start on (units of 16 rows, every gridDim-th), its ring of weights runs on over the ends of products, and activations travel between
// CTAs as packets (common/packet.cuh), which those who need them poll. There is no barrier over all CTAs: the first 2048 columns of a
// product's activations are multiplied while the last ones are still computed elsewhere.
//
// Warp roles.
//   0       fills the ring by TMA: a stage is 2048 k of a unit and its scales, of 16-bit weights 1024 (producer_sm90.cuh). No more than
//           `ahead` stages are under way at a time, landed ones not counted: packets of activations pass through the same queues to memory
//           as the weights
//   1-3     finish units in turns: add the consumers' sums, norm's factor, bias, activation, residual; publish packets, or store
//           (finishers_sm90.cuh)
//   4-11    convert activations as they come: 8 numbers a thread of every stage (converters_sm90.cuh)
//   12-27   consumers: 128 k of each stage each, and their sums of a unit go to the finishers through shared memory (consumers_sm90.cuh)
// Arithmetic. The kernel is a template of the weights' format (int4_weights_sm90.cuh, e4m3_weights_sm90.cuh, dense_weights_sm90.cuh), which
//   says what converters make of activations and how consumers multiply. Of a norm, converters apply the weight alone: its factor is that
//   of the whole token, and finishers apply it.
// The attention in front can be part of the launch (attention_sm90.cuh): consumers compute it before their first product. Then a launch can
//   be of several layers: each role goes on from layer to layer, the ring with the next layer's weights, and what the last product makes is
//   the next layer's q, k and v, as packets.
// Progress. CTAs wait for each other in any order, so all are resident together: the launch is cooperative.
// Limits: plan.cpp.
#pragma once

#include "common/dependent_launch.cuh"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "decoder_block/block_facts_sm90.cuh"
#include "decoder_block/consumers_sm90.cuh"
#include "decoder_block/converters_sm90.cuh"
#include "decoder_block/dense_weights_sm90.cuh"
#include "decoder_block/e4m3_weights_sm90.cuh"
#include "decoder_block/finishers_sm90.cuh"
#include "decoder_block/in_order_sm90.cuh"
#include "decoder_block/int4_weights_sm90.cuh"
#include "decoder_block/producer_sm90.cuh"
#include "distributed/epoch.cuh"

namespace minfer::decoder_block {

template <class Weights, DataType kType, int kTokens, bool kAttention>
class DecoderBlock : BlockFacts<Weights, kType, kTokens, kAttention> {
  using Facts = BlockFacts<Weights, kType, kTokens, kAttention>;
  using Facts::kE4M3, Facts::p_, Facts::storage_, Facts::layers, Facts::epoch_of, Facts::first_tag, Facts::make_tag, Facts::is_divided,
      Facts::exchange_header, Facts::kFinisherRegisters, Facts::kConverterRegisters, Facts::kConsumerRegisters;
  using typename Facts::FullBarrier, typename Facts::EmptyBarrier, typename Facts::Joined;

 public:
  using Facts::kThreads;
  using typename Facts::Params;

  __device__ __forceinline__ DecoderBlock(Params const& params, char* smem) : Facts(params, smem) {}

  __device__ __forceinline__ void run() {
    Facts const& facts = *this;
    int const thread = int(threadIdx.x), warp = cutlass::canonical_warp_idx_sync();
    allow_dependent_launch();
    if (thread == 0) init_barriers();
    if (kAttention && warp == 1) {
      if (!p_.early) wait_for_predecessor();
      read_sequence(p_.attention, &storage_.sequence, thread % 32);
    }
    __syncthreads();
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kFinisherRegisters>();
      if (warp == 0) {
        if (thread == 0 || kE4M3 || kAttention) WeightProducer(facts).produce(thread);
      } else {
        OutputFinisher(facts).finish(warp - 1, read_tag(thread), thread % 32);
      }
    } else if (warp < 4 + kConverterWarps) {
      cutlass::arch::warpgroup_reg_dealloc<kConverterRegisters>();
      ActivationConverter converter(facts);
      converter.prefetch_norms(0, thread - 128);
      if constexpr (kAttention) {
        wait_for_predecessor();
        converter.prepare_queries(0, thread - 128, 0);
      }
      read_tag(thread);
      converter.convert(thread - 128);
      // CTA 0 has had packets of all CTAs: they have read the number.
      if (blockIdx.x == 0 && thread == 128) {
        atomicAdd(&launches, 1ull);
        if (is_divided()) exchange_header()->epoch = epoch_of(layers() - 1);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      ProductConsumer(facts).consume(warp - 4 - kConverterWarps, thread % 32);
    }
  }

 private:
  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < p_.stages; ++i) {
      FullBarrier::init(&storage_.full[i], 1 + (p_.block_scales ? 32 : 0));
      EmptyBarrier::init(&storage_.empty[i], kWarps);
    }
    for (int i = 0; i < 2 * kMostKStages; ++i) EmptyBarrier::init(&storage_.ready[i / kMostKStages][i % kMostKStages], kConverterWarps);
    for (int i = 0; i < 2; ++i) EmptyBarrier::init(&storage_.consumed[i], kWarps);
    for (int i = 0; i < kPartials; ++i) {
      EmptyBarrier::init(&storage_.partial_full[i], kWarps);
      EmptyBarrier::init(&storage_.partial_empty[i], 1);
    }
    cutlass::arch::fence_barrier_init();
  }

  /// The tag of the first layer's packets; by finishers and converters. With attention, not before consumers have its sums: to poll for its
  /// output would slow it down.
  __device__ __forceinline__ uint64_t read_tag(int thread) {
    wait_for_predecessor();
    if (thread == 32) {
      make_tag();
      if (is_divided()) storage_.epoch = distributed::begin_epoch(exchange_header());
    }
    Joined::sync();
    return first_tag();
  }
};

template <WeightFormat kFormat, DataType kType, int kTokens>
struct WeightsOf {
  using Type = DenseWeights<kType, kTokens>;
};
template <DataType kType, int kTokens>
struct WeightsOf<WeightFormat::kInt4, kType, kTokens> {
  using Type = Int4Weights<kType, kTokens>;
};
template <DataType kType, int kTokens>
struct WeightsOf<WeightFormat::kFp8E4M3, kType, kTokens> {
  using Type = E4m3Weights<kTokens>;
};

template <class Weights, DataType kType, int kTokens, bool kAttention>
using BlockOf = std::conditional_t<Weights::kInOrder, InOrderBlock<Weights, kType>, DecoderBlock<Weights, kType, kTokens, kAttention>>;

template <class Weights, DataType kType, int kTokens, bool kAttention>
__global__ void __launch_bounds__(BlockOf<Weights, kType, kTokens, kAttention>::kThreads, 1)
    decoder_block_sm90_kernel(__grid_constant__ typename BlockOf<Weights, kType, kTokens, kAttention>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  BlockOf<Weights, kType, kTokens, kAttention>(params, smem).run();
#endif
}

}  // namespace minfer::decoder_block
