// The tile scheduler of batch-invariant prefill kernels. A sequence with few queries is divided into its splits (shared/splits.h), each an
// item of its own: its CTA leaves a partial in a slot of the workspace, and a kernel behind this one folds them (split_merge.cuh). Other
// sequences have a tile of queries to an item, as in other kernels, and the CTA folds its splits itself. Which of the two a sequence is
// does not change its bits: so it may depend on what is fastest.
#pragma once

#include <cstdint>

#include "attention/prefill/split_items.h"
#include "attention/prefill/tile_scheduler.cuh"

namespace minfer::attention {

struct SplitTile : QueryTile {
  int32_t split;         // the split that is computed; < 0: all of them
  int32_t split_blocks;  // key blocks of a split
};

/// Params: SplitParams of the kernel.
template <class Params, int kTileM, int kTileN, bool kReverses>
struct SplitTileScheduler : PrefillTileScheduler<kTileM, SequenceTableOf<256>, kReverses> {
  using Table = SequenceTableOf<256>;  // shared memory is the limit
  using Whole = PrefillTileScheduler<kTileM, Table, kReverses>;
  using Items = SplitItems<kTileM, kTileN>;
  using Storage = typename Table::Storage;

  static __device__ auto item_count(Params const& p) {
    return [&p](int b) { return Items::count(p, p.queries(b).count, p.Sequences::keys(b).count); };
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
      found.split_blocks = Items::kSplitBlocks;
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
    auto const [head_tile, first, split, split_blocks] = Items::at(p, queries.count, keys.count, number);
    found.head_tile = head_tile;
    found.first = first;
    found.split = split;
    found.split_blocks = split_blocks;
    return found;
  }
};

}  // namespace minfer::attention
