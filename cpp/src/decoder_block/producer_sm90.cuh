// The role of decoder_block_sm90.cuh that fills the ring of weights by TMA: warp 0, of int4 its first thread.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "cute/arch/copy_sm90_tma.hpp"
#include "decoder_block/block_facts_sm90.cuh"

namespace minfer::decoder_block {

template <class Facts>
class WeightProducer : Facts {
  using Facts::kAttention, Facts::kInt4, Facts::kE4M3, Facts::kStage, Facts::p_, Facts::storage_, Facts::layers, Facts::units_of,
      Facts::params_of, Facts::weight_of, Facts::codes_of, Facts::scales_of, Facts::advance, Facts::kTogether, Facts::held;
  using typename Facts::FullBarrier, typename Facts::EmptyBarrier, typename Facts::KeysRequested;

 public:
  explicit __device__ __forceinline__ WeightProducer(Facts const& facts) : Facts(facts) {}

  __device__ __forceinline__ void produce(int lane) {
    prefetch_maps(0);
    if (!p_.early) wait_for_predecessor();
    if constexpr (kAttention) {
      KeysRequested::sync();
      if (!kE4M3 && lane != 0) return;
    }
    int stage = 0, landed_stage = 0, under_way = 0;
    uint32_t phase = 1, landed_phase = 0;
#pragma unroll 1
    for (int layer = 0; layer < layers(); ++layer) {
      if (layer + 1 < layers()) prefetch_maps(layer + 1);
#pragma unroll 1
      for (Place at(int(blockIdx.x)); at.product < kDecoderBlockProducts; next(at, layer)) {
        if (under_way == p_.ahead) {
          FullBarrier::wait(&storage_.full[landed_stage], landed_phase);
          advance(landed_stage, landed_phase);
          --under_way;
        }
        EmptyBarrier::wait(&storage_.empty[stage], phase);
        fetch(layer, at.product, at.unit, at.k, stage, lane);
        advance(stage, phase);
        ++under_way;
      }
    }
  }

 private:
  __device__ __forceinline__ void prefetch_maps(int layer) const {
    for (int i = 0; i < kDecoderBlockProducts && units_of(layer, i) > 0; ++i) {
      LayerParams const& own = params_of(layer);
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&own.maps[i]));
      if (kInt4) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&own.scales[i]));
    }
  }
  /// Of a stage of weights, in the order of consumers (kTogether). All CTAs have units of product 0.
  struct Place {
    int product = 0, first, unit, k = 0;  // first: of the units that are taken by turns
    __device__ __forceinline__ explicit Place(int block) : first(block), unit(block) {}
  };
  __device__ __forceinline__ void next(Place& at, int layer) const {
    Product const& product = p_.products[at.product];
    int const behind = at.first + (held(product) ? 1 : kTogether) * int(gridDim.x);
    at.unit += int(gridDim.x);
    if (at.unit < min(product.units, behind)) return;
    at.unit = at.first;
    if (++at.k < product.stages) return;
    at.k = 0;
    at.first = behind;
    if (at.first >= product.units) {
      at.first = int(blockIdx.x);
      do {
        ++at.product;
      } while (at.product < kDecoderBlockProducts && at.first >= units_of(layer, at.product));
    }
    at.unit = at.first;
  }
  __device__ __forceinline__ void fetch(int layer, int i, int unit, int k, int stage, int lane) const {
    Product const& product = p_.products[i];
    CUtensorMap const& map = params_of(layer).maps[i];
    uint64_t* const barrier = &storage_.full[stage];
    constexpr auto kFirst = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
    if constexpr (kInt4) {
      FullBarrier::arrive_and_expect_tx(barrier, uint32_t(kStage.code_bytes + product.scale_rows * kUnit * 2));
      // Behind k come codes of other rows, which meet digits that are zeros.
      cute::SM90_TMA_LOAD_3D::copy(&map, barrier, kFirst, codes_of(stage), 0, unit % 4, unit / 4 * product.k_blocks + k * (kStage.k / 64));
      cute::SM90_TMA_LOAD_2D::copy(&params_of(layer).scales[i], barrier, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), scales_of(stage),
                                   unit * kUnit, (k * kStage.k) >> p_.group_shift);
    } else {
      if (lane == 0) {
        FullBarrier::arrive_and_expect_tx(barrier, uint32_t(kStage.code_bytes));
        cute::SM90_TMA_LOAD_3D::copy(&map, barrier, kFirst, codes_of(stage), 0, unit * kUnit, k * kWarps);
      }
      if constexpr (!kE4M3) return;
      __syncwarp();
      if (!p_.block_scales) return;
      // A lane's number is of one consumer warp and of rows 0 to 7 or the others. Behind k codes are zeros, and so are scales.
      int const block = k * kWarps + lane % 16, rows = unit * kUnit / (product.gated ? 2 : 1) / 128;
      bool const inside = block < product.k_blocks;
      Weight const& weight = weight_of(layer, i);
      float const* const from =
          (product.gated && lane >= 16 ? weight.up_scales : weight.weight_scales) + (inside ? rows * product.k_blocks + block : 0);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\ncp.async.mbarrier.arrive.noinc.shared::cta.b64 [%3];" ::"r"(
                       shared_address(scales_of(stage)) + lane % 16 * 8 + lane / 16 * 4),
                   "l"(from), "r"(inside ? 4 : 0), "r"(shared_address(barrier))
                   : "memory");
    }
  }
};

}  // namespace minfer::decoder_block
