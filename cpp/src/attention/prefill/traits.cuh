// The compile-time facts of a prefill kernel: sizes, registers, shared memory with its pipelines, and which rows and key blocks of a tile a
// warpgroup computes.
#pragma once

#include "attention/prefill/params.h"
#include "attention/prefill/split_scheduler.cuh"
#include "attention/prefill/tile_scheduler.cuh"
#include "attention/shared/mask.h"
#include "common/cutlass_element.cuh"
#include "common/opaque.cuh"
#include "common/ring.cuh"
#include "cute/container/tuple.hpp"
#include "cute/util/type_traits.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"
#include "minfer/types.h"

namespace minfer::attention {

template <class Config>
struct PrefillTraits {
  static constexpr DataType kType = Config::kType;
  using Element = CutlassElement<kType>;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStages = Config::kStages;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr int kConsumers = kTileM / 64, kThreads = 128 * (kConsumers + 1);
  static constexpr bool kPingpong = Config::kPingpong;
  static constexpr bool kOwnOutput = Config::kOwnOutput;   // the output is staged in shared memory of its own, else stored from registers
  static constexpr int kQueryStages = kOwnOutput ? 2 : 1;  // with two, the next tile's queries are loaded while this tile is computed
  static constexpr bool kConverts = Config::kConverts;     // keys and values are codes, which the producer converts
  static constexpr bool kInvariant = Config::kInvariant;   // batch-invariant (shared/splits.h)
  static constexpr bool kFolds = kInvariant && has_splits(kHeadDim);  // keys are divided into splits
  static constexpr bool kSharedTotals = has_shared_totals(kHeadDim);  // totals over splits are in shared memory, else in the workspace
  static constexpr int kSplitBlocks = split_blocks_of(kTileN);
  // Registers of a thread. A launch gives a CTA of three warpgroups 504 in total over its warpgroups and one of four 512, or fewer.
  static constexpr int kConsumerRegisters = kConverts                           ? (kHeadDim == 256 ? 208 : 192)
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

  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using WholeParams = cute::conditional_t<kConverts, PrefillCodesParams, PrefillParams>;
  using Params = cute::conditional_t<kInvariant, SplitParams<WholeParams>, WholeParams>;
  using TileScheduler =
      cute::conditional_t<kInvariant, SplitTileScheduler<SplitParams<WholeParams>, kTileM, kTileN>, PrefillTileScheduler<kTileM>>;
  using Tile = cute::conditional_t<kInvariant, SplitTile, QueryTile>;

  struct OutputStorage {
    alignas(1024) Element of[kTileM * kHeadDimV];  // [head_dim_v / 64][row][64]
  };
  struct TotalsStorage {
    alignas(16) float4 of[kConsumers * (kOutputs / 4) * 128];  // [warpgroup][vector][thread]
  };
  struct StatesStorage {
    SplitState of[kTileM];
  };
  struct SharedStorage {
    alignas(1024) Element q[kQueryStages][kTileM * kHeadDim];  // each stage [head_dim / 64][row][64], as of k and v
    alignas(1024) Element k[kStages][kTileN * kHeadDim];
    alignas(1024) Element v[kStages][kTileN * kHeadDimV];
    [[no_unique_address]] cute::conditional_t<kOwnOutput, OutputStorage, cute::tuple<>> output;
    alignas(8) uint64_t full_q[kQueryStages], empty_q[kQueryStages], full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    alignas(8) uint64_t full_tile[2], empty_tile[2];
    [[no_unique_address]] cute::conditional_t<kFolds && kSharedTotals, TotalsStorage, cute::tuple<>> totals;
    [[no_unique_address]] cute::conditional_t<kFolds, StatesStorage, cute::tuple<>> states;
    Tile tile[2];  // tiles that the producer publishes to the consumers
    typename TileScheduler::Storage tiles;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));

  using Ring = minfer::Ring<kStages>;
  /// The stage of the queries of the CTA's tile number `iteration`, and its phase. The published tiles have two stages likewise.
  static __device__ int query_stage(int iteration) { return iteration % kQueryStages; }
  static __device__ uint32_t query_phase(int iteration) { return iteration / kQueryStages % 2; }

  /// The queries `first` to `last` of a tile, or of a warpgroup's 64 rows of it; none where last < first.
  struct Queries {
    int32_t first, last;
  };
  static CUTLASS_DEVICE Queries queries_of(Params const& params, Tile const& tile) {
    int32_t const last = tile.first + over_packed_heads(params, kTileM) - 1;
    return {tile.first, last < tile.seqlen_q ? last : tile.seqlen_q - 1};
  }
  static CUTLASS_DEVICE Queries queries_of(Params const& params, Tile const& tile, int consumer) {
    int32_t const queries = over_packed_heads(params, 64), first = tile.first + consumer * queries, last = first + queries - 1;
    return {first, last < tile.seqlen_q ? last : tile.seqlen_q - 1};
  }
  /// x / packed_heads, which is a power of two up to 64.
  static CUTLASS_DEVICE int32_t over_packed_heads(Params const& params, int32_t x) { return x >> (31 - __clz(params.packed_heads)); }

  static CUTLASS_DEVICE Mask mask_of(Params const& params, Tile const& tile) {
    return Mask(tile.seqlen_q, tile.seqlen_k, params.window_left, params.window_right);
  }
  static CUTLASS_DEVICE KeyBlocks<kTileN> blocks_of(Params const& params, Tile const& tile, Queries queries) {
    return blocks_of(mask_of(params, tile), tile, queries);
  }
  static CUTLASS_DEVICE KeyBlocks<kTileN> blocks_of(Mask const& mask, Tile const& tile, Queries queries) {
    KeyBlocks<kTileN> blocks(mask, queries.first, queries.last);
    if constexpr (kFolds) {
      if (tile.split >= 0) blocks.cut(tile.split * kSplitBlocks, (tile.split + 1) * kSplitBlocks);
    }
    return blocks;
  }

  /// Reads the published tile number `iteration`, by a whole warp. The shuffles let the compiler know that all lanes hold the same values.
  static CUTLASS_DEVICE Tile read_tile(SharedStorage& storage, int iteration, int lane) {
    constexpr int kWords = sizeof(Tile) / 4;
    static_assert(kWords == (kInvariant ? 9 : 8));
    if constexpr (kInvariant) make_opaque(lane);  // kept for the next tile, the word's address would be spilled
    int32_t const word = reinterpret_cast<int32_t const*>(&storage.tile[iteration % 2])[lane < kWords ? lane : 0];
    auto const of = [word](int i) { return __shfl_sync(0xffffffffu, word, i); };
    QueryTile const tile{of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)};
    if constexpr (kInvariant) {
      return {tile, of(8)};
    } else {
      return tile;
    }
  }

  static CUTLASS_DEVICE int kv_head_of(Params const& params, Tile const& tile) {
    return tile.head_tile * params.packed_heads / params.heads_per_kv;
  }

  /// Gives a stage back to the producer: one arrival for each warp.
  static CUTLASS_DEVICE void release(uint64_t* empty, int thread) {
    if (thread % 32 == 0) EmptyBarrier::arrive(empty);
  }
};

}  // namespace minfer::attention
