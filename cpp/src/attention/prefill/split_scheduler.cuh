// The tile scheduler of batch-invariant prefill kernels. A sequence with few queries is divided into its splits (shared/splits.h), each an
// item of its own: its CTA leaves a partial in a slot of the workspace, and a kernel behind this one folds them (split_merge.cuh). Other
// sequences have a tile of queries to an item, as in other kernels, and the CTA folds its splits itself. Which of the two a sequence is
// does not change its bits: so it may depend on what is fastest.
// Kernels for few rows take a sequence's last split, which is shorter than the others, behind all whole splits of all sequences: by turns,
// CTAs would have as many items but not as many keys. With 8 KV heads and three splits, a third of 264 CTAs had short splits alone.
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

  /// Whether the last splits of all sequences come behind the others. CTAs that fold each other's partials have the other numbers.
  static __device__ bool last_apart(Params const& p) { return kTileM < 64 && p.packets == nullptr && p.cu_seqlens_q == nullptr; }
  static __device__ auto item_count(Params const& p) {
    return [&p](int b) {
      int const queries = p.queries(b).count, keys = p.Sequences::keys(b).count;
      return last_apart(p) ? Items::count_of_whole(p, queries, keys) : Items::count(p, queries, keys);
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
    if (p.split_rows == 0) return Whole::count(storage, p);
    int32_t const total = Table::total(storage, p.batch);
    if (!last_apart(p)) return total;
    int64_t const all = total + int64_t(p.batch) * Items::count_of_last(p, p.seqlen_q);
    return int32_t(min(all, int64_t(p.max_items)));
  }

  static __device__ SplitTile at(Storage const& storage, Params const& p, int32_t item) {
    SplitTile found;
    if (p.split_rows == 0) {
      static_cast<QueryTile&>(found) = Whole::at(storage, p, item);
      found.split = -1;
      found.split_blocks = Items::kSplitBlocks;
      return found;
    }
    int32_t number = item;
    auto part = Items::Part::kAll;
    if (last_apart(p)) {
      int32_t const whole = Table::total(storage, p.batch);
      part = item < whole ? Items::Part::kWhole : Items::Part::kLast;
      number = item - whole;
    }
    if (part == Items::Part::kLast) {
      int32_t const each = Items::count_of_last(p, p.seqlen_q);
      found.batch = number / each;
      number -= found.batch * each;
    } else {
      found.batch = Table::find(storage, p.batch, item_count(p), item, &number);
    }
    RowRange const queries = p.queries(found.batch), keys = p.Sequences::keys(found.batch);
    found.seqlen_q = queries.count;
    found.row_q = queries.first;
    found.seqlen_k = keys.count;
    found.row_k = keys.first;
    found.first_key = Mask(queries.count, keys.count, p.window_left, p.window_right).begin(0);
    auto const [head_tile, first, split, split_blocks] = Items::at(p, queries.count, keys.count, number, part);
    found.head_tile = head_tile;
    found.first = first;
    found.split = split;
    found.split_blocks = split_blocks;
    return found;
  }
};

}  // namespace minfer::attention
