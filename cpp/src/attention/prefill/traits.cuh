// What a prefill kernel's configuration comes to: sizes, shared memory with its pipelines, and whose rows and blocks of a tile are whose.
#pragma once

#include "attention/prefill/params.h"
#include "attention/shared/mask.h"
#include "attention/shared/tile_scheduler.cuh"
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
  using Element = cute::conditional_t<kType == DataType::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStages = Config::kStages;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr int kConsumers = kTileM / 64, kThreads = 128 * (kConsumers + 1);
  static constexpr bool kPingpong = Config::kPingpong;
  static constexpr bool kOwnOutput = Config::kOwnOutput;   // output is staged in room of its own; else in that of the queries
  static constexpr int kQueryStages = kOwnOutput ? 2 : 1;  // of two, one is the next tile's
  static constexpr bool kConverts = Config::kConverts;     // keys and values from codes
  // Of a thread. Those of all warpgroups add up to what a launch gives them, 504 for three, 512 for four, or less.
  static constexpr int kConsumerRegisters = kConverts                           ? (kHeadDim == 256 ? 208 : 192)
                                            : kConsumers == 3                   ? 160
                                            : kConsumers == 2 && kHeadDim < 256 ? 232
                                                                                : 240;
  static constexpr int kProducerRegisters = kConverts                   ? 504 - 2 * kConsumerRegisters
                                            : kConsumers == 3           ? 32
                                            : kConsumerRegisters == 232 ? 40
                                                                        : 24;
  static constexpr int kScores = kTileN / 2, kOutputs = kHeadDimV / 2;  // of a thread
  static_assert(kTileM % 64 == 0 && kTileN % 16 == 0 && kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 && kHeadDimV <= kHeadDim);

  using Tiles = PrefillTiles<kTileM>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using Params = cute::conditional_t<kConverts, PrefillCodesParams, PrefillParams>;

  struct OutputStorage {
    alignas(1024) Element of[kTileM * kHeadDimV];
  };
  struct SharedStorage {
    alignas(1024) Element q[kQueryStages][kTileM * kHeadDim];  // [head_dim / 64][row][64], as all of them
    alignas(1024) Element k[kStages][kTileN * kHeadDim];
    alignas(1024) Element v[kStages][kTileN * kHeadDimV];
    [[no_unique_address]] cute::conditional_t<kOwnOutput, OutputStorage, cute::tuple<>> output;
    alignas(8) uint64_t full_q[kQueryStages], empty_q[kQueryStages], full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    alignas(8) uint64_t full_tile[2], empty_tile[2];
    QueryTile tile[2];  // what the producer hands to the consumers
    typename Tiles::Storage tiles;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));

  struct Ring {
    int index = 0;
    uint32_t phase = 0;
    __device__ void advance() {
      if (++index == kStages) {
        index = 0;
        phase ^= 1;
      }
    }
  };
  static __device__ int query_stage(int turn) { return turn % kQueryStages; }
  static __device__ uint32_t query_phase(int turn) { return turn / kQueryStages % 2; }

  struct Rows {  // queries of a tile, or of a warpgroup's part of it: none where last < first
    int32_t first, last;
  };
  static CUTLASS_DEVICE Rows rows_of(Params const& params, QueryTile const& tile) {
    int32_t const last = tile.first + over_pack(params, kTileM) - 1;
    return {tile.first, last < tile.seqlen_q ? last : tile.seqlen_q - 1};
  }
  static CUTLASS_DEVICE Rows rows_of(Params const& params, QueryTile const& tile, int consumer) {
    int32_t const rows = over_pack(params, 64), first = tile.first + consumer * rows, last = first + rows - 1;
    return {first, last < tile.seqlen_q ? last : tile.seqlen_q - 1};
  }
  /// x / pack, which divides 64.
  static CUTLASS_DEVICE int32_t over_pack(Params const& params, int32_t x) { return x >> (31 - __clz(params.pack)); }

  static CUTLASS_DEVICE Mask mask_of(Params const& params, QueryTile const& tile) {
    return Mask(tile.seqlen_q, tile.seqlen_k, params.window_left, params.window_right);
  }
  static CUTLASS_DEVICE KeyBlocks<kTileN> blocks_of(Params const& params, QueryTile const& tile, Rows rows) {
    return KeyBlocks<kTileN>(mask_of(params, tile), rows.first, rows.last);
  }

  /// The tile that was handed out, by a warp; the compiler knows then that all of its lanes have the same.
  static CUTLASS_DEVICE QueryTile handed_out(SharedStorage& storage, int turn, int lane) {
    constexpr int kWords = sizeof(QueryTile) / 4;
    static_assert(kWords == 8);
    int32_t const word = reinterpret_cast<int32_t const*>(&storage.tile[turn % 2])[lane < kWords ? lane : 0];
    auto const of = [word](int i) { return __shfl_sync(0xffffffffu, word, i); };
    return {of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)};
  }

  static CUTLASS_DEVICE int kv_head_of(Params const& params, QueryTile const& tile) { return tile.head_unit * params.pack / params.group; }

  static CUTLASS_DEVICE void release(uint64_t* empty, int thread) {
    if (thread % 32 == 0) EmptyBarrier::arrive(empty);
  }
};

}  // namespace minfer::attention
