// The role of decoder_block_sm90.cuh that multiplies: warps 12 to 27, which compute the attention in front, too.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "decoder_block/attention_sm90.cuh"
#include "decoder_block/block_facts_sm90.cuh"

namespace minfer::decoder_block {

template <class Facts>
class ProductConsumer : Facts {
  using Facts::kTokens, Facts::kAttention, Facts::kInt4, Facts::kE4M3, Facts::kStage, Facts::p_, Facts::storage_, Facts::layers,
      Facts::units_of, Facts::tag_of, Facts::first_tag, Facts::activations, Facts::groups, Facts::codes_of, Facts::scales_of,
      Facts::advance, Facts::kTogether, Facts::kOfConverted, Facts::attention_of;
  using typename Facts::Weights, typename Facts::FullBarrier, typename Facts::EmptyBarrier, typename Facts::Group, typename Facts::Joined,
      typename Facts::KeysRequested, typename Facts::Gathered, typename Facts::QueriesReady;

 public:
  explicit __device__ __forceinline__ ProductConsumer(Facts const& facts) : Facts(facts) {}

  __device__ __forceinline__ void consume(int warp, int lane) {
#pragma unroll 1
    for (int layer = 0; layer < layers(); ++layer) {
      // What either computes of its arguments is not to be kept over the other, which needs the registers.
      if constexpr (kAttention) attend(layer, opaque(warp), opaque(lane));
      consume(layer, opaque(warp), opaque(lane));
    }
  }

 private:
  struct Ring {
    int stage = 0, part = 0;  // part: units so far
    uint32_t phase = 0;
  };

  __device__ __forceinline__ void attend(int layer, int warp, int lane) {
    bool const first = layer == 0;
    attention_of(layer, warp, lane)
        .run(
            [&] {
              if (first && !p_.early) wait_for_predecessor();
            },
            [&] {
              if (first) KeysRequested::arrive();
            },
            // From then on, too, the sums may come where the last product's activations were: all consumers have done with them.
            [&] { QueriesReady::sync(); },
            [&] {
              if (first) {
                Joined::sync();
              } else {
                Gathered::sync();
              }
              return tag_of(first_tag(), layer);
            });
    __syncwarp();
    if (lane == 0) EmptyBarrier::arrive(&storage_.consumed[1]);  // product 1's activations come where the sums were
  }

  /// Where a layer begins in the ring: not kept over attention, which needs the registers.
  __device__ __forceinline__ Ring ring_of(int layer) const {
    if (layer == 0) return {};
    int const block = opaque(int(blockIdx.x));
    int parts = 0, stages = 0;
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      int const units = (p_.products[i].units - block + int(gridDim.x) - 1) / int(gridDim.x);
      parts += units;
      stages += units * p_.products[i].stages;
    }
    stages *= layer;
    return {stages % p_.stages, parts * layer, uint32_t(stages / p_.stages) & 1};
  }
  __device__ __forceinline__ void consume(int layer, int warp, int lane) {
    Ring ring = ring_of(layer);
    // Bit k is the parity of stage k's activations, of even and of odd products. A layer's odd products have as many stages each.
    uint32_t even = layer % 2 == 0 ? 0 : ((1u << p_.products[0].converted) - 1) ^ ((1u << p_.products[2].converted) - 1), odd = 0;
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      Product const& product = p_.products[i];
      int const parity = i % 2;
      uint32_t const phases = parity == 0 ? even : odd;
      if (int(blockIdx.x) < units_of(layer, i)) {
        if constexpr (Weights::kMostHeld == 2) {
          if (product.stages == 1) {
            consume_held<1>(product, i, phases, ring, warp, lane);
          } else if (product.stages == 2) {
            consume_held<2>(product, i, phases, ring, warp, lane);
          } else {
            consume_streamed(product, i, phases, ring, warp, lane);
          }
        } else {
          static_assert(Weights::kMostHeld == 0);
          consume_streamed(product, i, phases, ring, warp, lane);
        }
      }
      uint32_t const stages = (1u << product.converted) - 1;
      if (parity == 0) {
        even ^= stages;
      } else {
        odd ^= stages;
      }
      __syncwarp();
      if (lane == 0) EmptyBarrier::arrive(&storage_.consumed[parity]);
    }
  }

  template <int kStages>
  __device__ __forceinline__ void consume_held(Product const& product, int i, uint32_t phases, Ring& ring, int warp, int lane) {
    uint32_t const at = Weights::first_of(shared_address(activations(i)), p_.pitch[i % 2], p_.m, warp, lane);
    typename Weights::Activations x[kStages];
#pragma unroll
    for (int k = 0; k < kStages; ++k) {
      EmptyBarrier::wait(&storage_.ready[i % 2][k], phases >> k & 1);
      x[k] = Weights::load(at + k * Weights::kStep, groups(i)[k * Weights::kGroupStep + Weights::group_of(warp)], lane);
    }
#pragma unroll 1
    for (int unit = int(blockIdx.x); unit < product.units; unit += int(gridDim.x)) {
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int k = 0; k + 1 < kStages; k += 2) multiply_two(x[k], x[k + 1], ring, warp, lane, sums, sums);
      if constexpr (kStages % 2 == 1) multiply(x[kStages - 1], ring, warp, lane, sums);
      leave(ring.part++, warp, lane, sums);
    }
  }
  __device__ __forceinline__ void consume_streamed(Product const& product, int i, uint32_t phases, Ring& ring, int warp, int lane) {
    uint32_t const at = Weights::first_of(shared_address(activations(i)), p_.pitch[i % 2], p_.m, warp, lane);
#pragma unroll 1
    for (int unit = int(blockIdx.x); unit < product.units; unit += kTogether * int(gridDim.x)) {
      bool const two = unit + int(gridDim.x) < product.units;
      float sums[kTogether][4] = {};
      uint32_t from = at;
      Group const* group = groups(i) + Weights::group_of(warp);
#pragma unroll 1
      for (int k = 0; k < product.stages; ++k) {
        if (unit == int(blockIdx.x) && k % kOfConverted == 0)
          EmptyBarrier::wait(&storage_.ready[i % 2][k / kOfConverted], phases >> (k / kOfConverted) & 1);
        auto const x = Weights::load(from, *group, lane);
        from += Weights::kStep;
        group += Weights::kGroupStep;
        if (two) {
          multiply_two(x, x, ring, warp, lane, sums[0], sums[1]);
        } else {
          multiply(x, ring, warp, lane, sums[0]);
        }
      }
      leave(ring.part++, warp, lane, sums[0]);
      if (two) leave(ring.part++, warp, lane, sums[1]);
    }
  }

  /// The warp's part of a stage of the ring, which it then releases.
  __device__ __forceinline__ void multiply(typename Weights::Activations const& x, Ring& ring, int warp, int lane, float (&sums)[4]) {
    FullBarrier::wait(&storage_.full[ring.stage], ring.phase);
    char const* const codes = codes_of(ring.stage) + warp * (kStage.code_bytes / kWarps);
    if constexpr (kInt4) {
      auto const own = Weights::load_codes(codes, group_scales_of(ring.stage, warp, lane), lane);
      int32_t d[4];
      Weights::multiply(own, x, d);
      Weights::add(d, own, x, sums);
    } else if constexpr (!kE4M3) {
      Weights::multiply(codes, x, lane, sums);
    } else {
      float2 const of_block = *reinterpret_cast<float2 const*>(scales_of(ring.stage) + warp * 8);
      Weights::multiply(codes, p_.block_scales ? of_block : make_float2(1.0f, 1.0f), x, lane, sums);
    }
    release(ring.stage, lane, sums);
    advance(ring.stage, ring.phase);
  }
  /// Two stages, so that the one's latencies are the other's work. sums0 and sums1 may be the same.
  __device__ __forceinline__ void multiply_two(typename Weights::Activations const& x0, typename Weights::Activations const& x1, Ring& ring,
                                               int warp, int lane, float (&sums0)[4], float (&sums1)[4]) {
    if constexpr (kInt4) {
      int const stage0 = ring.stage;
      FullBarrier::wait(&storage_.full[stage0], ring.phase);
      advance(ring.stage, ring.phase);
      int const stage1 = ring.stage;
      FullBarrier::wait(&storage_.full[stage1], ring.phase);
      advance(ring.stage, ring.phase);
      int const from = warp * (kStage.code_bytes / kWarps);
      auto const codes0 = Weights::load_codes(codes_of(stage0) + from, group_scales_of(stage0, warp, lane), lane);
      auto const codes1 = Weights::load_codes(codes_of(stage1) + from, group_scales_of(stage1, warp, lane), lane);
      int32_t d0[4], d1[4];
      Weights::multiply(codes0, x0, d0);
      Weights::multiply(codes1, x1, d1);
      Weights::add(d0, codes0, x0, sums0);
      Weights::add(d1, codes1, x1, sums1);
      release(stage0, lane, sums0);
      release(stage1, lane, sums1);
    } else {
      multiply(x0, ring, warp, lane, sums0);
      multiply(x1, ring, warp, lane, sums1);
    }
  }
  /// int4: of the warp's 128 columns, row lane / 4.
  __device__ __forceinline__ char const* group_scales_of(int stage, int warp, int lane) const {
    return codes_of(stage) + kStage.code_bytes + ((warp * 128) >> p_.group_shift) * (kUnit * 2) + lane / 4 * 2;
  }
  /// When the sums are complete, and with them all reads of the stage (quantized_gemm/mainloop_sync_sm90.cuh).
  __device__ __forceinline__ void release(int stage, int lane, float const (&sums)[4]) {
    constexpr uint32_t kNever = 0x7fedcba9u;
    bool const read = __float_as_uint(sums[0]) != kNever && __float_as_uint(sums[2]) != kNever;
    __syncwarp();
    if (lane == 0 && read) EmptyBarrier::arrive(&storage_.empty[stage]);
  }

  /// The sums of each token go to the finishers.
  __device__ __forceinline__ void leave(int part, int warp, int lane, float const (&sums)[4]) const {
    int const slot = part % kPartials;
    EmptyBarrier::wait(&storage_.partial_empty[slot], (uint32_t(part / kPartials) & 1) ^ 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        float const sum = Weights::total(sums, half, token, lane);
        if (lane % 4 == 0) storage_.partials[slot][warp][token][lane / 4 + half * 8] = sum;
      }
    }
    __syncwarp();
    if (lane == 0) EmptyBarrier::arrive(&storage_.partial_full[slot]);
  }
};

}  // namespace minfer::decoder_block
