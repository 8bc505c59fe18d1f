// The compile-time facts of a prefill kernel: sizes, registers, shared memory with its pipelines, and which rows and key blocks of a tile a
// warpgroup computes.
#pragma once

#include "attention/prefill/tile_facts.cuh"
#include "common/cutlass_element.cuh"
#include "common/ring.cuh"
#include "cute/container/tuple.hpp"
#include "cute/util/type_traits.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"
#include "minfer/types.h"

namespace minfer::attention {

template <class Config>
struct PrefillTraits : PrefillTileFacts<Config> {
  using Facts = PrefillTileFacts<Config>;
  using Facts::kConverts, Facts::kFolds, Facts::kHeadDim, Facts::kHeadDimV, Facts::kTileM, Facts::kTileN, Facts::kType;
  using Facts::kMmaType, Facts::kScalesQueries;
  using typename Facts::Tile, typename Facts::TileScheduler;
  using Element = CutlassElement<kType>;        // of queries in global memory, and of the output
  using MmaElement = CutlassElement<kMmaType>;  // of the MMAs' operands
  static constexpr int kStages = Config::kStages;
  static constexpr int kConsumers = kTileM / 64, kThreads = 128 * (kConsumers + 1);
  static constexpr bool kPingpong = Config::kPingpong;
  static constexpr bool kOwnOutput = Config::kOwnOutput;   // the output is staged in shared memory of its own, else stored from registers
  static constexpr int kQueryStages = kOwnOutput ? 2 : 1;  // with two, the next tile's queries are loaded while this tile is computed
  static constexpr bool kSharedTotals = has_shared_totals(kHeadDim);  // totals over splits are in shared memory, else in the workspace
  // Registers of a thread. A launch gives a CTA of three warpgroups 504 in total over its warpgroups and one of four 512, or fewer.
  // Batch-invariant consumers keep one scale more where queries are scaled, and converters to f16 need fewer registers.
  static constexpr int kMoreRegisters = Facts::kInvariant && Facts::kFormat == WeightFormat::kCodes && kHeadDim < 256 ? 8 : 0;
  static constexpr int kConsumerRegisters = kConverts                           ? (kHeadDim == 256 ? 208 : 192) + kMoreRegisters
                                            : kConsumers == 3                   ? 160
                                            : kConsumers == 2 && kHeadDim < 256 ? 232
                                                                                : 240;
  static constexpr int kProducerRegisters = kConverts                   ? 504 - 2 * kConsumerRegisters
                                            : kConsumers == 3           ? 32
                                            : kConsumerRegisters == 232 ? 40
                                                                        : 24;
  static constexpr int kScores = kTileN / 2, kOutputs = kHeadDimV / 2;  // accumulators of a thread
  static_assert(kTileM % 64 == 0 && kTileN % 16 == 0 && kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 && kHeadDimV <= kHeadDim);

  // Named barriers: kConsumers of pingpong's order, one of each consumer warpgroup, and one of all consumers.
  static constexpr int kOrderBarrier = 1, kWarpgroupBarrier = 1 + kConsumers, kConsumersBarrier = 1 + 2 * kConsumers;

  struct OutputStorage {
    alignas(1024) Element of[kTileM * kHeadDimV];  // [head_dim_v / 64][row][64]
  };
  struct TotalsStorage {
    alignas(16) float4 of[kConsumers * (kOutputs / 4) * 128];  // [warpgroup][vector][thread]
  };
  struct QueryScaleStorage {
    float of[kTileM];  // what scores are multiplied by: scale_queries.cuh; of a row, its warp writes and reads it
  };
  struct StatesStorage {
    SplitState of[kTileM];
  };
  struct SharedStorage {
    alignas(1024) MmaElement q[kQueryStages][kTileM * kHeadDim];  // each stage [head_dim / 64][row][64], as of k and v
    alignas(1024) MmaElement k[kStages][kTileN * kHeadDim];
    alignas(1024) MmaElement v[kStages][kTileN * kHeadDimV];
    [[no_unique_address]] cute::conditional_t<kOwnOutput, OutputStorage, cute::tuple<>> output;
    alignas(8) uint64_t full_q[kQueryStages], empty_q[kQueryStages], full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    alignas(8) uint64_t full_tile[2], empty_tile[2];
    [[no_unique_address]] cute::conditional_t<kFolds && kSharedTotals, TotalsStorage, cute::tuple<>> totals;
    [[no_unique_address]] cute::conditional_t<kFolds, StatesStorage, cute::tuple<>> states;
    [[no_unique_address]] cute::conditional_t<kScalesQueries, QueryScaleStorage, cute::tuple<>> query_scale;
    Tile tile[2];  // tiles that the producer publishes to the consumers
    typename TileScheduler::Storage tiles;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));

  using Ring = minfer::Ring<kStages>;
  /// The stage of the queries of the CTA's tile number `iteration`, and its phase. The published tiles have two stages likewise.
  static __device__ int query_stage(int iteration) { return iteration % kQueryStages; }
  static __device__ uint32_t query_phase(int iteration) { return iteration / kQueryStages % 2; }
};

}  // namespace minfer::attention
