// The roles of in_order_sm90.cuh that fill the ring of weights: warps 0 and 1.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "common/shared_barrier.cuh"
#include "cute/arch/copy_sm90_tma.hpp"
#include "decoder_block/block_facts_sm90.cuh"

namespace minfer::decoder_block {

using InOrder = InOrderParams::InOrder;

/// The slabs that a CTA has of a product: every gridDim-th.
__device__ __forceinline__ int own_slabs(InOrderParams const& p, int i) {
  return p.in_order[i].each + (int(blockIdx.x) < p.in_order[i].more ? 1 : 0);
}

/// Stages come in the order of consumers.
template <class Facts>
class InOrderProducer : Facts {
  using Facts::p_, Facts::storage_, Facts::units_of, Facts::params_of, Facts::codes_of, Facts::scales_of, Facts::advance, Facts::kStage;
  using typename Facts::T, typename Facts::FullBarrier, typename Facts::EmptyBarrier;

 public:
  explicit __device__ __forceinline__ InOrderProducer(Facts const& facts) : Facts(facts) {}

  /// By a thread. A stage has few instructions: one warp beside those that multiply has few turns.
  __device__ __forceinline__ void copy_codes() {
    LayerParams const& layer = params_of(0);
    for (int i = 0; i < kDecoderBlockProducts && units_of(0, i) > 0; ++i)
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&layer.maps[i]));
    if (!p_.early) wait_for_predecessor();
    int stage = 0, landed_stage = 0, under_way = 0;
    uint32_t phase = 1, landed_phase = 0;
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      InOrder const& in_order = p_.in_order[i];
      int const in_tile = (1 << in_order.range_shift) - 1, units = kStrips >> in_order.range_shift;
      for_each_stage(i, [&](int slab, int strip) {
        if (under_way == p_.ahead) {
          FullBarrier::wait(&storage_.full[landed_stage], landed_phase);
          advance(landed_stage, landed_phase);
          --under_way;
        }
        EmptyBarrier::wait(&storage_.empty[stage], phase);
        uint64_t* const barrier = &storage_.full[stage];
        FullBarrier::arrive_and_expect_tx(barrier, kStage.code_bytes);
        cute::SM90_TMA_LOAD_4D::copy(&layer.maps[i], barrier, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), codes_of(stage), 0,
                                     (slab & in_tile) * units, strip * kStripBlocks, slab & ~in_tile);
        advance(stage, phase);
        ++under_way;
      });
    }
  }
  /// Eight lanes have a strip's: of each 128 k two, half a unit each.
  __device__ __forceinline__ void copy_scales(int lane) {
    if (!p_.early) wait_for_predecessor();
    int stage = 0;
    uint32_t phase = 1;
    static_assert(2 * kStripScales * kStrips == 32);
    int const strip_of_stage = lane / (2 * kStripScales), of_strip = lane / 2 % kStripScales, half = lane % 2;
    uint32_t const to = shared_address(scales_of(0)) + lane * 16;
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      Product const& product = p_.products[i];
      InOrder const& in_order = p_.in_order[i];
      int const rows = product.gated ? 2 * product.columns : product.columns;
      int const range = strip_of_stage & ((1 << in_order.range_shift) - 1), unit = strip_of_stage >> in_order.range_shift;
      int const units = kStrips >> in_order.range_shift, first_k = (range * in_order.range_blocks + 2 * of_strip) * kBlockK;
      for_each_stage(i, [&](int slab, int strip) {
        EmptyBarrier::wait(&storage_.empty[stage], phase);
        int const row = (slab * units + unit) * kUnit + 8 * half;
        int const group = min((first_k + strip * (kStripBlocks * kBlockK)) >> p_.group_shift, in_order.groups - 1);
        T const* const from = static_cast<T const*>(in_order.scales) + group * in_order.ld_scales;
        bool const inside = row < rows;
        copy_async_16(to + stage * kStage.pitch, inside ? from + row : from, inside ? 16 : 0);
        arrive_behind_copies(shared_address(&storage_.full[stage]));
        advance(stage, phase);
      });
    }
  }

 private:
  /// body(slab, strip of its ranges)
  template <class Body>
  __device__ __forceinline__ void for_each_stage(int i, Body const& body) const {
    int const count = own_slabs(p_, i), strips = p_.in_order[i].strips;
#pragma unroll 1
    for (int first = 0; first < count; first += kQuads) {
      int const from = int(blockIdx.x) + first * int(gridDim.x), quads = min(kQuads, count - first);
#pragma unroll 1
      for (int strip = 0; strip < strips; ++strip) {
        int slab = from;
#pragma unroll 1
        for (int quad = 0; quad < quads; ++quad, slab += int(gridDim.x)) body(slab, strip);
      }
    }
  }
};

}  // namespace minfer::decoder_block
