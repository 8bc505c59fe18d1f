// What all prefill kernels for sm_90a know of a tile: which queries, keys and key blocks are its own, and how it is published in shared
// memory. Their traits derive from this.
#pragma once

#include "attention/prefill/params.h"
#include "attention/prefill/split_scheduler.cuh"
#include "attention/prefill/tile_scheduler.cuh"
#include "attention/shared/mask.h"
#include "common/opaque.cuh"
#include "cute/util/type_traits.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "minfer/types.h"

namespace minfer::attention {

template <class Config>
struct PrefillTileFacts {
  static constexpr DataType kType = Config::kType;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr WeightFormat kFormat = Config::kFormat;             // kDense, kCodes, kInt8, or for few rows a cache's
  static constexpr bool kConverts = kFormat != WeightFormat::kDense;   // keys and values are codes, which are converted
  static constexpr bool kInvariant = Config::kInvariant;               // batch-invariant (shared/splits.h)
  static constexpr bool kSplits = kInvariant && has_splits(kHeadDim);  // keys are divided into splits
  static constexpr bool kFolds = kSplits && !Config::kDivides;         // a CTA folds those of a tile; else each is an item
  static constexpr int kSplitBlocks = split_blocks_of(kTileN);
  /// The type of the MMAs' operands. f16 holds the codes of fp8, and int4's numbers as their scales do, and the conversion to it takes a
  /// third of that to bf16. Queries of bf16 are then divided by a power of two (scale_queries.cuh), which is a factor of their scores.
  static constexpr DataType kMmaType = kConverts && kFormat != WeightFormat::kInt8 ? DataType::kF16 : kType;
  static constexpr bool kScalesQueries = kMmaType != kType;
  /// Calls convert(format) with the format of a call's cache.
  template <class Convert>
  static CUTLASS_DEVICE void for_format(WeightFormat format, Convert const& convert) {
    using F = WeightFormat;
    if constexpr (kFormat == F::kInt8) {
      convert(cute::integral_constant<F, F::kInt8>{});
    } else {
      if constexpr (!kScalesQueries) {
        if (format == F::kInt8) return convert(cute::integral_constant<F, F::kInt8>{});
      }
      if (format == F::kFp8E4M3) return convert(cute::integral_constant<F, F::kFp8E4M3>{});
      convert(cute::integral_constant<F, F::kInt4>{});
    }
  }

  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using WholeParams = cute::conditional_t<kConverts, PrefillCodesParams, PrefillParams>;
  using Params = cute::conditional_t<kInvariant, SplitParams<WholeParams>, WholeParams>;
  static constexpr bool kReverses = !kConverts;  // converters would spill a register for it
  using TileScheduler = cute::conditional_t<kInvariant, SplitTileScheduler<SplitParams<WholeParams>, kTileM, kTileN, kReverses>,
                                            PrefillTileScheduler<kTileM, SequenceTable, kReverses>>;
  using Tile = cute::conditional_t<kInvariant, SplitTile, QueryTile>;

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
    if constexpr (kSplits) {
      int const length = split_blocks_of_tile(tile);
      if (tile.split >= 0) blocks.cut(tile.split * length, (tile.split + 1) * length);
    }
    return blocks;
  }

  /// Key blocks of a split: kernels for few rows know them.
  static CUTLASS_DEVICE int split_blocks_of_tile(Tile const& tile) { return kTileM < 64 ? kSplitBlocks : tile.split_blocks; }

  /// Reads the published tile number `iteration`, by a whole warp. The shuffles let the compiler know that all lanes hold the same values.
  template <class SharedStorage>
  static CUTLASS_DEVICE Tile read_tile(SharedStorage& storage, int iteration, int lane) {
    constexpr int kWords = sizeof(Tile) / 4;
    static_assert(kWords == (kInvariant ? 10 : 8));
    if constexpr (kInvariant) make_opaque(lane);  // kept for the next tile, the word's address would be spilled
    int32_t const word = reinterpret_cast<int32_t const*>(&storage.tile[iteration % 2])[lane < kWords ? lane : 0];
    auto const of = [word](int i) { return __shfl_sync(0xffffffffu, word, i); };
    QueryTile const tile{of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)};
    if constexpr (kInvariant) {
      return {tile, of(8), of(9)};
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
