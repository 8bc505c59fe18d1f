// The products between two attentions for one or two tokens in one launch, for sm_90a: a dataflow over CTAs that stay.
//
// A token's products wait for memory or for each other. Here nothing but activations waits: each CTA has the same rows of every weight from
// the start on (units of 16 rows, every gridDim-th), its ring of weights runs on over the ends of products, and activations travel between
// CTAs as packets (common/packet.cuh), which those who need them poll. There is no barrier over all CTAs: the first 2048 columns of a
// product's activations are multiplied while the last ones are still computed elsewhere.
//
// Warp roles.
//   0       fills the ring by TMA: a stage is 2048 k of a unit and its scales, of 16-bit weights 1024. No more than `ahead` stages are
//           under way at a time, landed ones not counted: packets of activations pass through the same queues to memory as the weights
//   1-3     finish units in turns: add the consumers' sums, norm's factor, bias, activation, residual; publish packets, or store
//   4-11    convert activations as they come: 8 numbers a thread of every stage
//   12-27   consumers: 128 k of each stage each, and their sums of a unit go to the finishers through shared memory
// Arithmetic. The kernel is a template of the weights' format (int4_weights_sm90.cuh, e4m3_weights_sm90.cuh, dense_weights_sm90.cuh), which
//   says what converters make of activations and how consumers multiply. Of a norm, converters apply the weight alone: its factor is that
//   of the whole token, and finishers apply it.
// The attention in front can be part of the launch (attention_sm90.cuh): consumers compute it before their first product. Then a launch can
//   be of several layers: each role goes on from layer to layer, the ring with the next layer's weights, and what the last product makes is
//   the next layer's q, k and v, as packets.
// Progress. CTAs wait for each other in any order, so all are resident together: the launch is cooperative.
// Limits: plan.cpp.
#pragma once

#include <cuda.h>

#include "common/activation.cuh"
#include "common/dependent_launch.cuh"
#include "common/named_barrier.cuh"
#include "common/packet.cuh"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "decoder_block/attention_sm90.cuh"
#include "decoder_block/dense_weights_sm90.cuh"
#include "decoder_block/e4m3_weights_sm90.cuh"
#include "decoder_block/int4_weights_sm90.cuh"
#include "decoder_block/layout.h"
#include "distributed/epoch.cuh"
#include "distributed/peer_packets.cuh"
#include "fused/row_operation.cuh"

namespace minfer::decoder_block {

/// What a product is in all layers of a launch.
struct Product {
  int32_t k, k_blocks, columns;                  // k_blocks: of int4 64, of e4m3 128; columns: of the output
  int32_t units, stages, converted, scale_rows;  // of k: stages of the ring, and of kStageK
  Packet* packets;                               // of the output, for the products behind; null: there are none
  bool gated;
};

/// What a layer multiplies with, beside the weight itself.
struct Weight {
  float const* weight_scales;  // e4m3: of rows, [n] or of all, or of blocks [n / 128, k_blocks]
  float const* up_scales;      // of blocks of ups
  void const *norm, *bias;
  int32_t row_scale_stride;  // 1, or 0: one for all
  bool bias_f32;
};

struct LayerParams {
  CUtensorMap maps[kDecoderBlockProducts];    // int4: [blocks of 64 x 64, 4, 64] of 8 bytes; e4m3: [k / 128, n, 128]; else [k / 64, n, 64]
  CUtensorMap scales[kDecoderBlockProducts];  // int4: [groups, n]
  Weight weights[kDecoderBlockProducts];
  LayerAttention attention;
};

/// Of a launch of up to kMost layers. They are parameters of the kernel, not memory, so that a CUDA graph keeps them.
template <int kMost>
struct Params {
  Product products[kDecoderBlockProducts];
  int32_t count, last_units;  // layers; units of the last layer's last product
  void const* a;
  void *residual, *d;
  int32_t m, stages, ahead, group_shift;
  int32_t pitch[2], activations[2], groups[2], fixed;  // layout.h
  float eps, weight_offset;
  ActivationParams activation;
  bool block_scales;
  bool early;  // weights may be read before the predecessor has finished, and what attention reads but q, k and v
  uint64_t nonce;
  AttentionParams attention;
  int32_t ranks, rank;  // of a layer that is divided among GPUs; else 1
  char* exchange[kMostDecoderRanks];
  LayerParams layers[kMost];
};
static_assert(sizeof(Params<kMostLayers>) <= kMostParameterBytes);

/// Launches of the kernels so far, which makes the tags of packets new in every replay of a graph, whatever has become of the workspace.
__device__ unsigned long long launches;

template <class Weights, DataType kType, int kTokens, bool kAttention>
class DecoderBlock {
 public:
  static constexpr int kConverters = 32 * kConverterWarps, kFinishers = 3, kConsumers = 32 * kWarps;
  static constexpr int kThreads = 128 + kConverters + kConsumers;
  static constexpr int kFinisherRegisters = 56, kConverterRegisters = 64, kConsumerRegisters = 80;
  static_assert(128 * kFinisherRegisters + kConverters * kConverterRegisters + kConsumers * kConsumerRegisters <= 72 * kThreads);
  static_assert(kStageK == 8 * kConverters && kMostKStages <= 32);
  using T = fused::RowType<kType>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  using Group = typename Weights::Group;
  using Params = decoder_block::Params<kAttention ? kMostLayers : 1>;
  static constexpr bool kInt4 = Weights::kFormat == WeightFormat::kInt4, kE4M3 = Weights::kFormat == WeightFormat::kFp8E4M3;
  static constexpr Stage kStage = stage_of(Weights::kFormat);
  static_assert(sizeof(Group) == group_bytes(Weights::kFormat, kTokens) &&
                kStage.code_bytes == kUnit * kStage.k * bits_of(Weights::kFormat) / 8);
  struct Storage {
    alignas(16) float partials[kPartials][kWarps][kTokens][kUnit];
    alignas(16) float squares[2][kTokens][kConverterWarps];
    alignas(16) uint64_t tag;
    uint64_t epoch;     // of a divided layer
    Sequence sequence;  // of a launch with attention
    alignas(8) uint64_t full[kMostStages], empty[kMostStages], ready[2][kMostKStages], consumed[2], partial_full[kPartials],
        partial_empty[kPartials];
  };
  static_assert(sizeof(Storage) <= fixed_bytes(kTokens) + 8);

  __device__ __forceinline__ DecoderBlock(Params const& params, char* smem)
      : p_(params), smem_(smem), storage_(*reinterpret_cast<Storage*>(smem + params.fixed)) {}

  __device__ __forceinline__ void run() {
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
        if (thread == 0 || kE4M3 || kAttention) produce(thread);
      } else {
        finish(warp - 1, read_tag(thread), thread % 32);
      }
    } else if (warp < 4 + kConverterWarps) {
      cutlass::arch::warpgroup_reg_dealloc<kConverterRegisters>();
      prefetch_norms(0, thread - 128);
      if constexpr (kAttention) {
        wait_for_predecessor();
        prepare_queries(0, thread - 128, 0);
      }
      read_tag(thread);
      convert(thread - 128);
      // CTA 0 has had packets of all CTAs: they have read the number.
      if (blockIdx.x == 0 && thread == 128) {
        atomicAdd(&launches, 1ull);
        if (is_divided()) exchange_header()->epoch = epoch_of(layers() - 1);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(warp - 4 - kConverterWarps, thread % 32);
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

  using Joined = ConstantNamedBarrier<1, 32 * kFinishers + kConverters + (kAttention ? kConsumers : 0)>;
  using KeysRequested = ConstantNamedBarrier<2, 32 + kConsumers>;
  using Gathered = ConstantNamedBarrier<3, kConsumers>;
  using QueriesReady = ConstantNamedBarrier<4, kConverters + kConsumers>;

  __device__ __forceinline__ int layers() const { return kAttention ? p_.count : 1; }
  /// Of the rows of a layer's weight. The last layer may have no product behind the residual.
  __device__ __forceinline__ int units_of(int layer, int i) const {
    return i == kDecoderBlockProducts - 1 && layer + 1 == layers() ? p_.last_units : p_.products[i].units;
  }
  __device__ __forceinline__ LayerParams const& params_of(int layer) const { return p_.layers[kAttention ? layer : 0]; }
  __device__ __forceinline__ Weight const& weight_of(int layer, int i) const { return params_of(layer).weights[i]; }
  /// A layer's packets are where those of the one in front were, which have all been read by then (plan.cpp), and have a tag of their own.
  static __device__ __forceinline__ uint64_t tag_of(uint64_t tag, int layer) { return kAttention ? tag ^ uint64_t(layer) << 40 : tag; }
  __device__ __forceinline__ uint64_t epoch_of(int layer) const { return storage_.epoch + uint64_t(layer); }

  /// The tag of the first layer's packets; by finishers and converters. With attention, not before consumers have its sums: to poll for its
  /// output would slow it down.
  __device__ __forceinline__ uint64_t read_tag(int thread) {
    wait_for_predecessor();
    if (thread == 32) {
      uint64_t count;
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(&launches) : "memory");
      uint64_t x = p_.nonce + count * 0x9e3779b97f4a7c15u;  // SplitMix64
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
      storage_.tag = (x ^ (x >> 31)) | 1;
      if (is_divided()) storage_.epoch = distributed::begin_epoch(exchange_header());
    }
    Joined::sync();
    return first_tag();
  }
  __device__ __forceinline__ uint64_t first_tag() const { return *static_cast<uint64_t volatile*>(&storage_.tag); }

  __device__ __forceinline__ bool is_divided() const { return kAttention && p_.ranks > 1; }
  __device__ __forceinline__ distributed::ExchangeHeader* exchange_header() const {
    return reinterpret_cast<distributed::ExchangeHeader*>(p_.exchange[p_.rank]);
  }

  /// Into L2: a product's first stage waits for its norm's weight.
  __device__ __forceinline__ void prefetch_norms(int layer, int thread) const {
    for (int i = 1; i < kDecoderBlockProducts; i += 2) {
      if (units_of(layer, i) == 0) continue;
      for (int at = thread * 64; at < p_.products[i].k; at += kConverters * 64) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<T const*>(weight_of(layer, i).norm) + at));
      }
    }
  }

  __device__ __forceinline__ char* activations(int product) const { return smem_ + p_.activations[product % 2]; }
  __device__ __forceinline__ Group* groups(int product) const { return reinterpret_cast<Group*>(smem_ + p_.groups[product % 2]); }

  // ---- weights: warp 0, of int4 its first thread ----

  __device__ __forceinline__ char* codes_of(int stage) const { return smem_ + stage * kStage.pitch; }
  __device__ __forceinline__ char* scales_of(int stage) const {
    return kInt4 ? codes_of(stage) + kStage.code_bytes : smem_ + p_.stages * kStage.pitch + stage * kStage.scale_bytes;
  }

  __device__ __forceinline__ void prefetch_maps(int layer) const {
    for (int i = 0; i < kDecoderBlockProducts && units_of(layer, i) > 0; ++i) {
      LayerParams const& own = params_of(layer);
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&own.maps[i]));
      if (kInt4) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&own.scales[i]));
    }
  }
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
  __device__ __forceinline__ void advance(int& stage, uint32_t& phase) const {
    if (++stage == p_.stages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // ---- attention: warps 12 to 27 ----

  using Attention = TokenAttention<kType, LayerParams[kMostLayers]>;
  __device__ __forceinline__ Attention attention_of(int layer, int warp, int lane) const {
    return Attention(p_.attention, p_.layers, layer, storage_.sequence, activations(1), activations(0), warp, lane);
  }
  /// thread: of the converters. tag: of the first layer's packets. That layer has its q, k and v in memory.
  __device__ __forceinline__ void prepare_queries(int layer, int thread, uint64_t tag) const {
    Packet const* const packets = layer == 0 ? nullptr : p_.products[kDecoderBlockProducts - 1].packets;
    attention_of(layer, thread / 32, thread % 32).prepare(packets, tag_of(tag, layer - 1));
    QueriesReady::arrive();
  }
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

  // ---- activations: warps 4 to 11 ----

  static __device__ __forceinline__ void unpack(uint64_t numbers, float* x) {
    if constexpr (kType == DataType::kBF16) {
      x[0] = __uint_as_float(uint32_t(numbers) << 16);
      x[1] = __uint_as_float(uint32_t(numbers) & 0xffff0000u);
      x[2] = __uint_as_float(uint32_t(numbers >> 32) << 16);
      x[3] = __uint_as_float(uint32_t(numbers >> 32) & 0xffff0000u);
    } else {
      float2 const low = Float16<kType>::unpack(uint32_t(numbers)), high = Float16<kType>::unpack(uint32_t(numbers >> 32));
      x[0] = low.x;
      x[1] = low.y;
      x[2] = high.x;
      x[3] = high.y;
    }
  }
  /// The first of a converter's numbers: columns 4 v to 4 v + 3 of a half of 16, and 8 further on.
  static __device__ __forceinline__ int column_of(int v) { return v / 2 * 16 + v % 2 * 4; }
  static __device__ __forceinline__ void load(void const* row, int v, bool inside, uint64_t (&numbers)[2]) {
    auto const* const from = reinterpret_cast<uint64_t const*>(static_cast<T const*>(row) + column_of(v));
    numbers[0] = inside ? load_operand(from) : 0;
    numbers[1] = inside ? load_operand(from + 2) : 0;
  }

  /// thread: of kConverters. A thread has 8 numbers of each stage; two stages are requested together, for a trip to L2 takes as long as two
  /// are converted.
  __device__ __forceinline__ void convert(int thread) {
#pragma unroll 1
    for (int layer = 0; layer < layers(); ++layer) {
      if (layer + 1 < layers()) prefetch_norms(layer + 1, thread);
      if constexpr (kAttention) {
        if (layer > 0) {
          EmptyBarrier::wait(&storage_.consumed[0], 1);  // where queries come were product 2's activations
          prepare_queries(layer, opaque(thread), first_tag());
        }
      }
#pragma unroll 1
      for (int i = 0; i < kDecoderBlockProducts; ++i) {
        if (units_of(layer, i) > 0) convert(opaque(layer), i, opaque(thread));
      }
    }
  }
  /// Waits until consumers have done with what was there. They count down consumed[0] for products 0 and 2, and consumed[1] for attention,
  /// product 1 and product 3; attention itself uses the place of product 1's activations. Product 0 waits for attention, too: to poll for
  /// its output would slow it down.
  __device__ __forceinline__ void wait_for_place(int layer, int i) {
    if constexpr (kAttention) {
      if (i == 2) EmptyBarrier::wait(&storage_.consumed[0], 0);
      if (i == 1 || (i == 0 && layer > 0)) EmptyBarrier::wait(&storage_.consumed[1], uint32_t(layer) & 1);
      if (i == 3) EmptyBarrier::wait(&storage_.consumed[1], uint32_t(layer + 1) & 1);
    } else if (i >= 2) {
      EmptyBarrier::wait(&storage_.consumed[i % 2], 0);
    }
  }
  __device__ __forceinline__ void convert(int layer, int i, int thread) {
    uint64_t const tag = tag_of(first_tag(), layer);
    int const lane = thread % 32;
    Product const& product = p_.products[i];
    void const* const norm = weight_of(layer, i).norm;
    int const parity = i % 2, vectors = product.k / 8;
    wait_for_place(layer, i);
    float squares[kTokens] = {};
#pragma unroll 1
    for (int first = 0; first < product.converted; first += 2) {
      uint64_t weights[2][2] = {};
      if (norm != nullptr) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          int const v = thread + (first + t) * kConverters;
          load(norm, v, v < vectors, weights[t]);
        }
      }
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token >= p_.m) break;
        uint64_t numbers[2][2];
        if (kAttention && i == 0) {
          receive(p_.attention.out, thread + first * kConverters, vectors, tag, numbers);
        } else if (i == 0) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            int const v = thread + (first + t) * kConverters;
            load(static_cast<T const*>(p_.a) + int64_t(token) * product.k, v, v < vectors, numbers[t]);
          }
        } else {
          receive(p_.products[i - 1].packets + int64_t(token) * (product.k / 4), thread + first * kConverters, vectors, tag, numbers);
        }
        __syncwarp();
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (first + t >= product.converted) break;
          int const v = thread + (first + t) * kConverters;
          float const sum = store_numbers(i, token, v, numbers[t], norm != nullptr, weights[t], lane);
          squares[token] += sum;
        }
      }
      if (first + 2 >= product.converted && norm != nullptr) {
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
#pragma unroll
          for (int offset = 16; offset > 0; offset /= 2) squares[token] += __shfl_xor_sync(0xffffffffu, squares[token], offset);
          if (lane == 0) storage_.squares[parity][token][thread / 32] = squares[token];
        }
      }
      __syncwarp();
      if (lane == 0) {
        EmptyBarrier::arrive(&storage_.ready[parity][first]);
        if (first + 1 < product.converted) EmptyBarrier::arrive(&storage_.ready[parity][first + 1]);
      }
    }
  }

  /// A thread's numbers of two stages, when they are there.
  __device__ __forceinline__ void receive(Packet const* row, int v, int vectors, uint64_t tag, uint64_t (&numbers)[2][2]) const {
    Packet packets[2][2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) packets[t][half] = {0, v + t * kConverters < vectors ? ~tag : tag};
    }
    // One packet alone before all of them, the warp's last, which the CTAs' last units make: they get about as far at a time. To poll for
    // all would take so much of L2 that those who store them are in each other's way.
    {
      int const last = min((v | 31) + kConverters, vectors - 1);
      Packet packet{0, ~tag};
      do {
        if (threadIdx.x % 32 == 0) poll_packet(packet, row + column_of(last) / 4 + 2);
      } while (__shfl_sync(0xffffffffu, uint32_t(packet.tag == tag), 0) == 0);
    }
    while (true) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        Packet const* const from = row + column_of(v + t * kConverters) / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) poll_packet(packets[t][half].tag != tag, packets[t][half], from + 2 * half);
      }
      if (packets[0][0].tag == tag && packets[0][1].tag == tag && packets[1][0].tag == tag && packets[1][1].tag == tag) break;
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) numbers[t][half] = packets[t][half].numbers;
    }
  }

  /// A thread's 8 numbers, times the norm's weight. Returns the sum of the numbers' squares.
  __device__ __forceinline__ float store_numbers(int product, int token, int v, uint64_t const (&numbers)[2], bool norm,
                                                 uint64_t const (&weights)[2], int lane) const {
    float x[8], squares = 0.0f;
    unpack(numbers[0], x);
    unpack(numbers[1], x + 4);
    if (norm) {
      float weight[8];
      unpack(weights[0], weight);
      unpack(weights[1], weight + 4);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        squares = fmaf(x[e], x[e], squares);
        x[e] *= weight[e] + p_.weight_offset;
      }
    }
    typename Weights::Made const made = Weights::make(x);
    Weights::store(made, activations(product), p_.pitch[product % 2], groups(product), token, v, lane);
    return squares;
  }

  // ---- products: warps 12 to 27 ----

  /// The order of stages, of producer and consumers. Of few stages of k, consumers keep the activations in registers, and take one unit
  /// after the other. Of more, they take two units by turns, so that a stage's activations are read once for both; and where activations
  /// come a stage at a time, all but the last stage of both units is behind them when that one arrives.
  static constexpr int kTogether = 2;
  static constexpr int kOfConverted = kStageK / kStage.k;  // stages of the ring in one of the converters'
  static __device__ __forceinline__ bool held(Product const& product) { return product.stages <= Weights::kMostHeld; }

  struct Ring {
    int stage = 0, part = 0;  // part: units so far
    uint32_t phase = 0;
  };

  __device__ __forceinline__ void consume(int warp, int lane) {
#pragma unroll 1
    for (int layer = 0; layer < layers(); ++layer) {
      // What either computes of its arguments is not to be kept over the other, which needs the registers.
      if constexpr (kAttention) attend(layer, opaque(warp), opaque(lane));
      consume(layer, opaque(warp), opaque(lane));
    }
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

  // ---- outputs: warps 1 to 3 ----

  static __device__ __forceinline__ float element(uint64_t numbers, int i) {
    float x[4];
    unpack(numbers, x);
    return i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3];
  }

  /// A lane's output is row lane % 16 of the unit; both halves of the warp have the same after the sums.
  __device__ __forceinline__ void finish(int own, uint64_t tag, int lane) {
    int part = 0;
#pragma unroll 1
    for (int layer = 0; layer < layers(); ++layer) {
#pragma unroll 1
      for (int i = 0; i < kDecoderBlockProducts; ++i) finish(layer, i, part, own, tag, lane);
    }
  }
  /// tag: of the first layer.
  __device__ __forceinline__ void finish(int layer, int i, int& part, int own, uint64_t tag, int lane) {
    int const row = lane % 16, units = units_of(layer, i);
    Product const& product = p_.products[i];
    Weight const& weight = weight_of(layer, i);
    int const outputs = product.gated ? 8 : 16;
    bool const divided = is_divided() && i % 2 == 0;
    int sent = -1;  // the unit whose part the other ranks have been sent, and which is still to be summed
    float factor[kTokens];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) factor[token] = 1.0f;
    if (weight.norm != nullptr && int(blockIdx.x) < units) {
      // Products 1 and 3 have as many stages of k: those of the first are the barriers' phases of one parity.
      EmptyBarrier::wait(&storage_.ready[1][product.converted - 1], i / 2);
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token < p_.m) factor[token] = norm_factor(i, token);
      }
    }
#pragma unroll 1
    for (int unit = int(blockIdx.x); unit < units; unit += int(gridDim.x), ++part) {
      if (part % kFinishers != own) continue;
      int const slot = part % kPartials, column = unit * outputs + row % outputs;
      float addend[kTokens], scale = 1.0f;
      if (kE4M3 && !p_.block_scales && unit * kUnit + row < (product.gated ? 2 : 1) * product.columns) {
        scale = load_operand(weight.weight_scales + (unit * kUnit + row) * weight.row_scale_stride);
      }
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        addend[token] = 0.0f;
        if (token >= p_.m || column >= product.columns) continue;
        if (i % 2 == 0 && !divided) addend[token] = residual_of(layer, i, token, column, tag);
        if (weight.bias != nullptr) {
          addend[token] += weight.bias_f32 ? load_operand(static_cast<float const*>(weight.bias) + column)
                                           : minfer::to_float(load_operand(static_cast<T const*>(weight.bias) + column));
        }
      }
      EmptyBarrier::wait(&storage_.partial_full[slot], uint32_t(part / kPartials) & 1);
      float y[kTokens];
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        y[token] = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps / 2; ++w) y[token] += storage_.partials[slot][lane / 16 * (kWarps / 2) + w][token][row];
        y[token] += __shfl_xor_sync(0xffffffffu, y[token], 16);
      }
      __syncwarp();
      if (lane == 0) EmptyBarrier::arrive(&storage_.partial_empty[slot]);
      if (divided) {  // of one token; the last unit's sum is waited for while this one's travels
        send_part(layer, i, column, y[0] * scale + addend[0], lane);
        if (sent >= 0) sum_parts(layer, i, sent * outputs + row, tag, lane);
        sent = unit;
        continue;
      }
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token < p_.m) store(layer, i, token, column, y[token] * (factor[token] * scale), addend[token], tag, lane);
      }
    }
    if (sent >= 0) sum_parts(layer, i, sent * outputs + row, tag, lane);
  }
  /// What products 0 and 2 are added to: the residual, of layers behind the first what the CTA has published itself; and x, likewise.
  __device__ __forceinline__ float residual_of(int layer, int i, int token, int column, uint64_t first_tag) const {
    int64_t const at = int64_t(token) * p_.products[i].columns + column;
    if (i == 0 && layer == 0) return minfer::to_float(load_operand(static_cast<T const*>(p_.residual) + at));
    uint64_t const tag = tag_of(first_tag, i == 0 ? layer - 1 : layer);
    Packet packet{0, ~tag};
    while (packet.tag != tag) poll_packet(packet, p_.products[2 - i].packets + at / 4);
    return element(packet.numbers, column % 4);
  }

  // Of a layer that is divided among GPUs: the ranks' parts of products 0 and 2. Every rank sends its own to all, itself among them, and
  // adds up all of them in the order of the ranks, so that all have the same bits.
  __device__ __forceinline__ distributed::PeerPacket* part_of(int buffer, int layer, int i, int rank, int column) const {
    int64_t const row = (int64_t(epoch_of(layer) % distributed::kEpochs) * kExchanges + i / 2) * p_.ranks + rank;
    return reinterpret_cast<distributed::PeerPacket*>(p_.exchange[buffer] + sizeof(distributed::ExchangeHeader)) +
           row * (p_.products[i].columns / 2) + column / 2;
  }
  __device__ __forceinline__ void send_part(int layer, int i, int column, float part, int lane) const {
    float const next = __shfl_down_sync(0xffffffffu, part, 1);
    if (lane % 2 == 1 || column >= p_.products[i].columns) return;
    uint32_t const flag = distributed::flag_of(epoch_of(layer));
    for (int rank = lane / 16; rank < p_.ranks; rank += 2)
      distributed::send(part_of(rank, layer, i, p_.rank, column), __float_as_uint(part), __float_as_uint(next), flag);
  }
  __device__ __forceinline__ void sum_parts(int layer, int i, int column, uint64_t tag, int lane) const {
    bool const inside = column < p_.products[i].columns;
    uint32_t const flag = distributed::flag_of(epoch_of(layer));
    float sum = 0.0f;
#pragma unroll 1
    for (int first = 0; first < p_.ranks; first += 2) {  // a rank for each half of the warp
      int const rank = first + lane / 16;
      distributed::PeerPacket found{};
      if (inside && rank < p_.ranks) {
        distributed::PeerPacket const* const from = part_of(p_.rank, layer, i, rank, column);
        for (distributed::Patience patience; found = distributed::poll(from), !distributed::has_come(found, flag);) patience.poll();
      }
      __syncwarp();
      float const own = __uint_as_float(uint32_t(column % 2 == 0 ? found.first : found.second));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const part = __shfl_sync(0xffffffffu, own, lane % 16 + 16 * half);
        if (first + half < p_.ranks) sum += part;
      }
    }
    float const addend = inside ? residual_of(layer, i, 0, column, tag) : 0.0f;
    store(layer, i, 0, column, sum, addend, tag, lane);
  }
  __device__ __forceinline__ float norm_factor(int i, int token) const {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kConverterWarps; ++w) sum += storage_.squares[i % 2][token][w];
    return rsqrtf(__fdividef(sum, float(p_.products[i].k)) + p_.eps);
  }
  /// tag: of the first layer.
  __device__ __forceinline__ void store(int layer, int i, int token, int column, float y, float addend, uint64_t tag, int lane) const {
    Product const& product = p_.products[i];
    if (product.gated) {  // rows 0 to 7 are gates, the others their ups
      float const up = __shfl_xor_sync(0xffffffffu, y, 8);
      y = activate(p_.activation, y) * up;
    }
    y += addend;
    uint32_t bits;
    if constexpr (kType == DataType::kBF16) {
      bits = __bfloat16_as_ushort(__float2bfloat16(y));
    } else {
      bits = __half_as_ushort(__float2half(y));
    }
    bits |= __shfl_down_sync(0xffffffffu, bits, 1) << 16;
    uint32_t const next = __shfl_down_sync(0xffffffffu, bits, 2);
    if (lane % 4 != 0 || lane >= (product.gated ? 8 : 16) || column >= product.columns) return;  // columns are a multiple of 8
    uint64_t const numbers = bits | uint64_t(next) << 32;
    int64_t const at = int64_t(token) * product.columns + column;
    bool const last = layer + 1 == layers();
    if (product.packets != nullptr) store_packet(product.packets + at / 4, numbers, tag_of(tag, layer));
    if (last && i >= 2) *reinterpret_cast<uint64_t*>(static_cast<T*>(i == 2 ? p_.residual : p_.d) + at) = numbers;
  }

  Params const& p_;
  char* smem_;
  Storage& storage_;
};

template <WeightFormat kFormat, DataType kType, int kTokens, bool kAttention>
using DecoderBlockOf = DecoderBlock<
    std::conditional_t<kFormat == WeightFormat::kInt4, Int4Weights<kType, kTokens>,
                       std::conditional_t<kFormat == WeightFormat::kDense, DenseWeights<kType, kTokens>, E4m3Weights<kTokens>>>,
    kType, kTokens, kAttention>;

template <WeightFormat kFormat, DataType kType, int kTokens, bool kAttention>
__global__ void __launch_bounds__(DecoderBlockOf<kFormat, kType, kTokens, kAttention>::kThreads, 1)
    decoder_block_sm90_kernel(__grid_constant__ Params<kAttention ? kMostLayers : 1> const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  DecoderBlockOf<kFormat, kType, kTokens, kAttention>(params, smem).run();
#endif
}

}  // namespace minfer::decoder_block
