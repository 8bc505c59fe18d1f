// The items of prefill kernels that divide keys, as numbers alone: which sequences are divided into their splits, which tile and split an
// item is, and which slot of the workspace it has. Compiled for the host, too, where tests count all items of a launch.
//
// In the batch-invariant mode all splits have the length of shared/splits.h. Outside of it a sequence has about `split_count` splits,
// whatever its length is, so that few tiles of queries over many keys fill the SMs; each split is an item, which folds nothing.
// An item's slot follows from the tile, so that no table of slots is needed: tiles of a varlen sequence are numbered from
// row * packed_heads / kTileM + sequence on, which is at least one behind the last tile of the sequence before.
#pragma once

#include <cstdint>

#include "attention/shared/mask.h"
#include "attention/shared/splits.h"

namespace minfer::attention {

/// Params have the fields of PrefillParams and SplitFields.
template <int kTileM, int kTileN>
struct SplitItems {
  static constexpr int kBlockKeys = kTileN, kSplitKeys = split_keys_of(kTileN), kSplitBlocks = split_blocks_of(kTileN);
  static constexpr bool kFixed = kTileM < 64;  // the kernels for few rows are of the mode alone

  struct Splits {
    int32_t first, count;  // of a sequence
    int32_t blocks;        // of a split, which begin at multiples of that
  };
  template <class Params>
  static MINFER_HOST_DEVICE int32_t blocks_of_split(Params const& p, int begin, int keys) {
    if constexpr (!kFixed) {
      if (p.split_count > 0) {
        int32_t const blocks = (keys + kTileN - 1) / kTileN - begin / kTileN, each = (blocks + p.split_count - 1) / p.split_count;
        return each > kLeastSplitBlocks ? each : kLeastSplitBlocks;
      }
    }
    return kSplitBlocks;
  }
  /// The splits that hold a key which a query of the sequence sees; one without keys if there is none.
  template <class Params>
  static MINFER_HOST_DEVICE Splits splits_of(Params const& p, int queries, int keys) {
    int const begin = Mask(queries, keys, p.window_left, p.window_right).begin(0);
    int32_t const blocks = blocks_of_split(p, begin, keys), length = blocks * kTileN, first = begin / length;
    int32_t const count = (keys + length - 1) / length - first;
    return {first, count > 1 ? count : 1, blocks};
  }
  /// Whether a sequence is divided: if the workspace has room for its rows and splits.
  template <class Params>
  static MINFER_HOST_DEVICE bool is_divided(Params const& p, int queries, Splits const& splits) {
    return int64_t(queries) * p.packed_heads <= p.split_rows && splits.count <= p.max_splits;
  }
  template <class Params>
  static MINFER_HOST_DEVICE int64_t tiles_of(Params const& p, int queries) {
    return (int64_t(queries) * p.packed_heads + kTileM - 1) / kTileM;
  }
  /// The items of a sequence, at most max_items.
  template <class Params>
  static MINFER_HOST_DEVICE int32_t count(Params const& p, int queries, int keys) {
    Splits const splits = splits_of(p, queries, keys);
    int64_t const tiles = tiles_of(p, queries) * p.head_tiles, items = is_divided(p, queries, splits) ? tiles * splits.count : tiles;
    return int32_t(items < p.max_items ? items : p.max_items);
  }

  /// Where all sequences have as many queries: the items of a sequence but those of its last splits, which are numbered behind those of all
  /// sequences. Its last split is as long as it happens to be, and what is shortest should come last.
  template <class Params>
  static MINFER_HOST_DEVICE int32_t count_of_whole(Params const& p, int queries, int keys) {
    Splits const splits = splits_of(p, queries, keys);
    int64_t const items = is_divided(p, queries, splits) ? tiles_of(p, queries) * p.head_tiles * (splits.count - 1) : 0;
    return int32_t(items < p.max_items ? items : p.max_items);
  }
  /// The number of the others.
  template <class Params>
  static MINFER_HOST_DEVICE int32_t count_of_last(Params const& p, int queries) {
    int64_t const items = tiles_of(p, queries) * p.head_tiles;
    return int32_t(items < p.max_items ? items : p.max_items);
  }

  struct Item {
    int32_t head_tile, first;  // first: the tile's first query
    int32_t split;             // < 0: all splits
    int32_t split_blocks;      // of a split
  };
  enum class Part { kAll, kWhole, kLast };
  /// Item `number` of a sequence: the last queries first; neighbouring heads, which read neighbouring keys, next to each other.
  /// part: of which items it is number `number`.
  template <class Params>
  static MINFER_HOST_DEVICE Item at(Params const& p, int queries, int keys, int32_t number, Part part = Part::kAll) {
    Splits const splits = splits_of(p, queries, keys);
    int32_t from_end = number / p.head_tiles;
    Item item{number - from_end * p.head_tiles, 0, -1, splits.blocks};
    if (is_divided(p, queries, splits)) {
      int32_t const begin = part == Part::kLast ? splits.count - 1 : 0, end = part == Part::kWhole ? splits.count - 1 : splits.count;
      int32_t const tile = from_end / (end - begin);
      item.split = splits.first + begin + from_end - tile * (end - begin);
      from_end = tile;
    }
    item.first = (int32_t(tiles_of(p, queries)) - 1 - from_end) * (kTileM / p.packed_heads);
    return item;
  }

  /// The item of split `other` of the tile that split `split` is item `number` of.
  template <class Params>
  static MINFER_HOST_DEVICE int32_t item_of(Params const& p, int32_t number, int split, int other) {
    return number + (other - split) * p.head_tiles;
  }

  /// The slot of a split of a divided sequence. row_q: where the sequence's queries begin, with varlen.
  template <class Params>
  static MINFER_HOST_DEVICE int64_t slot_of(Params const& p, bool varlen, int batch, int row_q, int head_tile, int first_query, int split,
                                            int first_split) {
    int64_t const tile = first_query / (kTileM / p.packed_heads);
    int64_t const of_sequence = varlen ? int64_t(row_q) * p.packed_heads / kTileM + batch : int64_t(batch) * p.q_tiles;
    return ((of_sequence + tile) * p.head_tiles + head_tile) * p.max_splits + (split - first_split);
  }
};

}  // namespace minfer::attention
