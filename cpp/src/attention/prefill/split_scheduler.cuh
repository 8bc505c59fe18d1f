// The tile scheduler of batch-invariant prefill kernels. A sequence with few queries is divided into its splits (shared/splits.h), each an
// item of its own: its CTA leaves a partial in a slot of the workspace, and a kernel behind this one folds them (split_merge.cuh). Other
// sequences have a tile of queries to an item, as in other kernels, and the CTA folds its splits itself. Which of the two a sequence is
// does not change its bits: so it may depend on what is fastest.
//
// An item's slot follows from the tile, so that no table of slots is needed: tiles of a varlen sequence are numbered from
// row * packed_heads / kTileM + sequence on, which is at least one behind the last tile of the sequence before.
#pragma once

#include <cstdint>

#include "attention/prefill/tile_scheduler.cuh"
#include "attention/shared/splits.h"

namespace minfer::attention {

struct SplitTile : QueryTile {
  int32_t split;  // the split that is computed; < 0: all of them
};

/// Params: SplitParams of the kernel.
template <class Params, int kTileM, int kTileN>
struct SplitTileScheduler : PrefillTileScheduler<kTileM, SequenceTableOf<256>> {
  using Table = SequenceTableOf<256>;  // shared memory is the limit
  using Whole = PrefillTileScheduler<kTileM, Table>;
  using Storage = typename Table::Storage;
  static constexpr int kSplitKeys = split_keys_of(kTileN);

  struct Splits {
    int32_t first, count;  // of a sequence
  };
  /// The splits that hold a key which a query of the sequence sees.
  static __device__ Splits splits_of(Params const& p, int queries, int keys) {
    int32_t const first = Mask(queries, keys, p.window_left, p.window_right).begin(0) / kSplitKeys;
    int32_t const end = (keys + kSplitKeys - 1) / kSplitKeys;
    return {first, max(end - first, 0)};
  }
  /// Whether a sequence is divided: if the workspace has room for its rows and splits.
  static __device__ bool is_divided(Params const& p, int queries, Splits const& splits) {
    return int64_t(queries) * p.packed_heads <= p.split_rows && splits.count <= p.max_splits;
  }
  static __device__ int64_t slot_of(Params const& p, QueryTile const& tile, int split, int first_split) {
    int64_t const q_tile = tile.first / (kTileM / p.packed_heads);
    int64_t const of_sequence =
        p.cu_seqlens_q != nullptr ? int64_t(tile.row_q) * p.packed_heads / kTileM + tile.batch : int64_t(tile.batch) * p.q_tiles;
    return ((of_sequence + q_tile) * p.head_tiles + tile.head_tile) * p.max_splits + (split - first_split);
  }

  static __device__ auto item_count(Params const& p) {
    return [&p](int b) {
      int const queries = p.queries(b).count;
      Splits const splits = splits_of(p, queries, p.Sequences::keys(b).count);
      int64_t const tiles = int64_t((queries * p.packed_heads + kTileM - 1) / kTileM) * p.head_tiles;
      return int32_t(min(is_divided(p, queries, splits) ? tiles * splits.count : tiles, int64_t(p.max_items)));
    };
  }
  static __device__ void build(Storage& storage, Params const& p, int thread, int threads) {
    if (p.split_rows == 0) {
      Whole::build(storage, p, thread, threads);
    } else {
      Table::build(storage, p.batch, item_count(p), p.max_items, thread, threads);
    }
  }
  static __device__ int32_t count(Storage const& storage, Params const& p) {
    return p.split_rows == 0 ? Whole::count(storage, p) : Table::total(storage, p.batch);
  }

  static __device__ SplitTile at(Storage const& storage, Params const& p, int32_t item) {
    SplitTile found;
    if (p.split_rows == 0) {
      static_cast<QueryTile&>(found) = Whole::at(storage, p, item);
      found.split = -1;
      return found;
    }
    int32_t number;
    found.batch = Table::find(storage, p.batch, item_count(p), item, &number);
    RowRange const queries = p.queries(found.batch), keys = p.Sequences::keys(found.batch);
    found.seqlen_q = queries.count;
    found.row_q = queries.first;
    found.seqlen_k = keys.count;
    found.row_k = keys.first;
    found.first_key = Mask(queries.count, keys.count, p.window_left, p.window_right).begin(0);
    Splits const splits = splits_of(p, queries.count, keys.count);
    int32_t from_end = number / p.head_tiles;  // neighbouring heads read neighbouring keys
    found.head_tile = number - from_end * p.head_tiles;
    found.split = -1;
    if (is_divided(p, queries.count, splits)) {
      int32_t const tile = from_end / splits.count;
      found.split = splits.first + from_end - tile * splits.count;
      from_end = tile;
    }
    found.first = (Whole::q_tiles(p, found.batch) - 1 - from_end) * (kTileM / p.packed_heads);
    return found;
  }
};

}  // namespace minfer::attention
