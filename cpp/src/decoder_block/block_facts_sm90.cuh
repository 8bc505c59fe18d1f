// What the roles of decoder_block_sm90.cuh share: sizes, shared memory, barriers, and where a layer's operands are.
#pragma once

#include <type_traits>

#include "common/float16.cuh"
#include "common/named_barrier.cuh"
#include "common/packet.cuh"
#include "cutlass/arch/barrier.h"
#include "decoder_block/attention_sm90.cuh"
#include "decoder_block/layout.h"
#include "decoder_block/params_sm90.cuh"
#include "distributed/epoch.cuh"
#include "fused/row_operation.cuh"

namespace minfer::decoder_block {

/// Launches of the kernels so far, which makes the tags of packets new in every replay of a graph, whatever has become of the workspace.
static __device__ unsigned long long launches;

template <class OfWeights, DataType kOfType, int kMostOfTokens, bool kWithAttention>
struct BlockFacts {
  using Weights = OfWeights;
  static constexpr DataType kType = kOfType;
  static constexpr int kTokens = kMostOfTokens;
  static constexpr bool kAttention = kWithAttention;
  static constexpr int kConverters = 32 * kConverterWarps, kFinishers = 3, kConsumers = 32 * kWarps;
  static constexpr bool kInOrder = Weights::kInOrder;
  static constexpr int kThreads = 128 + kConverters + kConsumers;
  static constexpr int kFinisherRegisters = 56, kConverterRegisters = 64, kConsumerRegisters = 80;
  static_assert(128 * kFinisherRegisters + kConverters * kConverterRegisters + kConsumers * kConsumerRegisters <= 72 * kThreads);
  static_assert(kStageK == 8 * kConverters && kMostKStages <= 32);
  using T = fused::RowType<kType>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  using Group = typename Weights::Group;
  using Params = std::conditional_t<Weights::kInOrder, InOrderParams, decoder_block::Params<kAttention ? kMostLayers : 1>>;
  static constexpr bool kInt4 = Weights::kFormat == WeightFormat::kInt4, kE4M3 = Weights::kFormat == WeightFormat::kFp8E4M3;
  static constexpr Stage kStage = stage_of(Weights::kFormat, kInOrder);
  static_assert(kInOrder || sizeof(Group) == group_bytes(Weights::kFormat, kTokens));
  static_assert(kStage.code_bytes == kUnit * kStage.k * bits_of(Weights::kFormat) / 8);
  // In order: what a warp is given by those of the other ranges. Else units whose sums are under way to the finishers.
  static constexpr int kPartialUnits = kInOrder ? kWarps : kPartials, kParts = kInOrder ? kStrips - 1 : kWarps;
  struct Storage {
    alignas(16) float partials[kPartialUnits][kParts][kTokens][kUnit];
    alignas(16) float squares[2][kTokens][kInOrder ? kNormWarps : kConverterWarps];
    alignas(16) uint64_t tag;
    uint64_t epoch;     // of a divided layer
    Sequence sequence;  // of a launch with attention
    alignas(8) uint64_t full[kMostStages], empty[kMostStages], ready[2][kMostKStages], consumed[2], partial_full[kPartialUnits],
        partial_empty[kPartialUnits];
  };
  static_assert(sizeof(Storage) <= fixed_bytes(kTokens, kInOrder) + 8);

  __device__ __forceinline__ BlockFacts(Params const& params, char* smem)
      : p_(params), smem_(smem), storage_(*reinterpret_cast<Storage*>(smem + params.fixed)) {}

  using Joined = ConstantNamedBarrier<1, 32 * kFinishers + kConverters + (kAttention ? kConsumers : 0)>;
  using KeysRequested = ConstantNamedBarrier<2, 32 + kConsumers>;
  using Gathered = ConstantNamedBarrier<3, kConsumers>;
  using QueriesReady = ConstantNamedBarrier<4, kConverters + kConsumers>;
  using Normed = ConstantNamedBarrier<5, kConverters>;
  using Tagged = ConstantNamedBarrier<6, kConverters + kConsumers>;

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
  /// In order: waits until it is made, which is behind the predecessor, too, but beside the first product's work.
  __device__ __forceinline__ uint64_t first_tag() const {
    uint64_t tag = *static_cast<uint64_t volatile*>(&storage_.tag);
    if constexpr (kInOrder) {
      while (tag == 0) tag = *static_cast<uint64_t volatile*>(&storage_.tag);
    }
    return tag;
  }

  /// By a thread, after the predecessor: the tag of the first layer's packets.
  __device__ __forceinline__ void make_tag() const {
    uint64_t count;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(&launches) : "memory");
    uint64_t x = p_.nonce + count * 0x9e3779b97f4a7c15u;  // SplitMix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    storage_.tag = (x ^ (x >> 31)) | 1;
  }

  __device__ __forceinline__ bool is_divided() const { return kAttention && p_.ranks > 1; }
  __device__ __forceinline__ distributed::ExchangeHeader* exchange_header() const {
    return reinterpret_cast<distributed::ExchangeHeader*>(p_.exchange[p_.rank]);
  }

  __device__ __forceinline__ char* activations(int product) const { return smem_ + p_.activations[product % 2]; }
  __device__ __forceinline__ Group* groups(int product) const { return reinterpret_cast<Group*>(smem_ + p_.groups[product % 2]); }

  // A stage of the ring.
  __device__ __forceinline__ char* codes_of(int stage) const { return smem_ + stage * kStage.pitch; }
  __device__ __forceinline__ char* scales_of(int stage) const {
    return kInt4 ? codes_of(stage) + kStage.code_bytes : smem_ + p_.stages * kStage.pitch + stage * kStage.scale_bytes;
  }
  __device__ __forceinline__ void advance(int& stage, uint32_t& phase) const {
    if (++stage == p_.stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  /// The order of stages, of producer and consumers. Of few stages of k, consumers keep the activations in registers, and take one unit
  /// after the other. Of more, they take two units by turns, so that a stage's activations are read once for both; and where activations
  /// come a stage at a time, all but the last stage of both units is behind them when that one arrives.
  static constexpr int kTogether = 2;
  static constexpr int kOfConverted = kStageK / kStage.k;  // stages of the ring in one of the converters'
  static __device__ __forceinline__ bool held(Product const& product) { return product.stages <= Weights::kMostHeld; }

  using Attention = TokenAttention<kType, LayerParams[kMostLayers]>;
  __device__ __forceinline__ Attention attention_of(int layer, int warp, int lane) const {
    return Attention(p_.attention, p_.layers, layer, storage_.sequence, activations(1), activations(0), warp, lane);
  }

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

  Params const& p_;
  char* smem_;
  Storage& storage_;
};

}  // namespace minfer::decoder_block
