// Tile scheduler: which work items (an output tile and a range of its k tiles) each persistent worker computes, in which order, and which
// worker adds the partials of a tile.
//
// A worker is a CTA, or a cluster of them. The walk is static: everything follows from (params, worker), so producer and consumer
// warps step through it independently and no queue lives in memory.
//
//   persistent  worker w takes tiles w, w + workers, ...
//   split_k     the k tiles of every output tile are divided into `splits` ranges; items (tile, split) are assigned like tiles, to a
//               multiple of `splits` workers where there are more items than workers. Where each worker has one item, those of one split
//               may come before those of the next (split_major): neighbours then read the same k, see "Order"
//   stream_k    the k tiles of the first `stream_tiles` output tiles are laid end to end and divided into `workers` equal worker ranges;
//               the remaining tiles, a whole number of waves, are assigned data-parallel afterwards
//
// Order. Workers with neighbouring numbers mostly run in the same GPC (seen on an H200: blocks 0, 1, .. fill one GPC after the other),
// where requests for the same line of L2 are merged: what 16 neighbours read together should be few rows and few columns.
//
// Partials and owners. The worker of the split with a tile's last k tile owns the tile: it adds the partials of the tile's other splits, in
// ascending k order (so that the sum is the same in every run), and runs the epilogue.
//
// Progress. A worker takes its items one after the other (the two halves of a pingpong CTA in turns), and publishes a partial as soon as it
// is computed, without waiting. It waits only in items that own a tile, for the tile's partials, and these come from
//   split_k   lower workers that have an earlier split of the tile: a launch with more items than workers has a multiple of `splits`
//             workers, so that worker w has split w % splits of all its tiles, and workers that are waited for never wait;
//   stream_k  the first items of lower workers: a worker range is walked from its end to its start, so that its first item is the head of
//             a tile that a later worker owns, and its last item the tail of a tile that the worker itself owns.
// So a worker waits only for lower workers, and only for what these do before they wait themselves. Workers are started in the order of
// blockIdx and keep their SM, and the next launch starts none before all are started (dependent_launch.cuh): every worker that is waited
// for runs or has ended. A launch therefore ends with any number of workers resident together, even with one, whatever occupies the other
// SMs (MPS, a green context, a second stream whose kernels wait as well): tests/cpp/test_schedule_progress.cpp.
// With an arbitrary number of workers, the splits of a tile would lie across the end of a round, owners at the start of the next round
// would wait for the last workers of this one, and the resident workers could all wait for workers that have no SM to start on: 132
// workers, 5 splits and 1057 tiles hang on 113 SMs.
#pragma once

#include <cstdint>

#include "common/fast_division.h"
#include "minfer/gemm.h"

namespace minfer::gemm {

struct TileSchedulerParams {
  int32_t tiles_m = 0, tiles_n = 0, batch = 1;  // in units of a worker's tile (CTA tile x cluster)
  int32_t k_tiles = 0;                          // of an output tile
  int32_t workers = 1;
  int32_t splits = 1;
  int32_t stream_tiles = 0;
  int32_t swizzle = 1;
  bool raster_along_n = false;
  bool split_major = false;                        // split_k with a worker for each item: those of a split follow each other
  bool in_place = false;                           // ranges: a worker has all splits of a tile, one after the other
  int32_t range_k_tiles = 0, range_remainder = 0;  // stream_tiles * k_tiles = workers * range_k_tiles + range_remainder

  int32_t split_k_tiles = 0, split_remainder = 0;  // k_tiles = splits * split_k_tiles + split_remainder
  FastDivisor by_batch_tiles, by_band_tiles;       // tiles of a product, and of a band of them that are `swizzle` side by side
  FastDivisor by_band, by_last_band;               // tiles side by side in a band, and in the last one
  FastDivisor by_tiles, by_splits, by_k_tiles, by_range, by_long_range;

  /// What follows from the fields before it. To be called when these have been set.
  void precompute() {
    int64_t const along = raster_along_n ? tiles_n : tiles_m, across = raster_along_n ? tiles_m : tiles_n;
    split_k_tiles = k_tiles / splits;
    split_remainder = k_tiles % splits;
    by_batch_tiles = FastDivisor(int64_t(tiles_m) * tiles_n);
    by_band_tiles = FastDivisor(along * swizzle);
    by_band = FastDivisor(swizzle);
    by_last_band = FastDivisor(across % swizzle);
    by_tiles = FastDivisor(tiles());
    by_splits = FastDivisor(splits);
    by_k_tiles = FastDivisor(k_tiles);
    by_range = FastDivisor(range_k_tiles);
    by_long_range = FastDivisor(range_k_tiles + 1);
  }

  MINFER_HOST_DEVICE int32_t tiles() const { return tiles_m * tiles_n * batch; }
  /// Partials that may wait for their owners at once: each has a slot in the workspace.
  MINFER_HOST_DEVICE int32_t slots() const {
    return stream_tiles > 0 || (in_place && splits > 1) ? workers : splits > 1 ? tiles() * (splits - 1) : 0;
  }

  /// stream_k: where a worker's range begins, and whose range a k tile is in, both counted from the first k tile of the first output tile.
  MINFER_HOST_DEVICE int32_t range_begin(int32_t worker) const {
    return worker * range_k_tiles + (worker < range_remainder ? worker : range_remainder);
  }
  MINFER_HOST_DEVICE int32_t worker_of(int32_t k_tile) const {
    int32_t const in_long_ranges = range_remainder * (range_k_tiles + 1);
    return k_tile < in_long_ranges ? by_long_range.quotient(k_tile) : range_remainder + by_range.quotient(k_tile - in_long_ranges);
  }
};

struct WorkItem {
  int32_t tile = 0;
  int32_t k_begin = 0, k_count = 0;
  int32_t slot = -1;                        // >= 0: the worker does not own the tile, and its partial goes to this slot
  int32_t first_partial = 0, partials = 0;  // of the owner: the slots of the partials to add, ascending
  bool in_place = false;  // ranges: a partial is what the worker's own threads left; of the items of a tile, the last one owns it
  bool valid = false;

  MINFER_HOST_DEVICE bool owner() const { return slot < 0; }
};

struct TileCoord {
  int32_t m, n, l;
};

class TileScheduler {
 public:
  MINFER_HOST_DEVICE TileScheduler(TileSchedulerParams const& params, int32_t worker)
      : params_(params), worker_(worker), next_item_(worker) {
    if (params.stream_tiles > 0) {
      range_begin_ = params.range_begin(worker);
      range_end_ = params.range_begin(worker + 1);
    }
  }

  /// kInPlace: the schedule may be one of ranges in place.
  template <bool kInPlace = false>
  MINFER_HOST_DEVICE WorkItem next() {
    WorkItem item;
    int32_t const k_tiles = params_.k_tiles;
    if (range_end_ > range_begin_) {
      item.tile = params_.by_k_tiles.quotient(range_end_ - 1);
      int32_t const tile_begin = item.tile * k_tiles;
      int32_t const begin = range_begin_ > tile_begin ? range_begin_ : tile_begin;
      item.k_begin = begin - tile_begin;
      item.k_count = range_end_ - begin;
      if (range_end_ < tile_begin + k_tiles) {
        item.slot = worker_;
      } else if (item.k_begin > 0) {
        item.first_partial = params_.worker_of(tile_begin);
        item.partials = worker_ - item.first_partial;
      }
      item.valid = true;
      range_end_ = begin;
      return item;
    }
    int32_t const splits = params_.splits;
    if (splits == 1) {
      item.tile = params_.stream_tiles + next_item_;
      item.k_count = k_tiles;
      item.valid = item.tile < params_.tiles();
      next_item_ += params_.workers;
      return item;
    }
    if (kInPlace && params_.in_place) {
      // As split-K's owner adds them up: the last range, its own, then those of the others from the first one on.
      int32_t const split = turn_ == 0 ? splits - 1 : turn_ - 1, per_split = params_.split_k_tiles, rest = params_.split_remainder;
      item.tile = next_item_;
      item.k_begin = split * per_split + (split < rest ? split : rest);
      item.k_count = per_split + (split < rest ? 1 : 0);
      item.in_place = true;
      item.first_partial = worker_;
      item.partials = turn_ > 0 ? 1 : 0;
      item.valid = item.tile < params_.tiles();
      if (++turn_ < splits) {
        item.slot = worker_;
      } else {
        turn_ = 0;
        next_item_ += params_.workers;
      }
      return item;
    }
    int32_t const tiles = params_.tiles(), inner = params_.split_major ? tiles : splits;
    int32_t const quotient = (params_.split_major ? params_.by_tiles : params_.by_splits).quotient(next_item_),
                  rest_of_item = next_item_ - quotient * inner;
    int32_t const tile = params_.split_major ? rest_of_item : quotient, split = params_.split_major ? quotient : rest_of_item;
    item.valid = tile < tiles && split < splits;
    if (item.valid) {
      int32_t const per_split = params_.split_k_tiles, rest = params_.split_remainder;
      item.tile = tile;
      item.k_begin = split * per_split + (split < rest ? split : rest);
      item.k_count = per_split + (split < rest ? 1 : 0);
      if (split < splits - 1) {
        item.slot = tile * (splits - 1) + split;
      } else {
        item.first_partial = tile * (splits - 1);
        item.partials = splits - 1;
      }
      next_item_ += params_.workers;
    }
    return item;
  }

  /// Linear tile -> coordinate: `swizzle` tiles side by side, then one step along the raster direction, so that what the resident CTAs
  /// read together stays in L2.
  MINFER_HOST_DEVICE static TileCoord coordinate(TileSchedulerParams const& p, int32_t tile) {
    int32_t const per_batch = p.tiles_m * p.tiles_n;
    int32_t const l = p.batch == 1 ? 0 : p.by_batch_tiles.quotient(tile);
    int32_t const rest = tile - l * per_batch;
    int32_t const along = p.raster_along_n ? p.tiles_n : p.tiles_m;
    int32_t const across = p.raster_along_n ? p.tiles_m : p.tiles_n;
    if (across == 1) return p.raster_along_n ? TileCoord{0, rest, l} : TileCoord{rest, 0, l};
    int32_t const band = p.by_band_tiles.quotient(rest);
    int32_t const first = band * p.swizzle;
    bool const last = across - first < p.swizzle;
    int32_t const width = last ? across - first : p.swizzle;
    int32_t const inside = rest - band * along * p.swizzle;
    int32_t const step = (last ? p.by_last_band : p.by_band).quotient(inside);
    int32_t const side = first + inside - step * width;
    return p.raster_along_n ? TileCoord{side, step, l} : TileCoord{step, side, l};
  }

 private:
  TileSchedulerParams const& params_;
  int32_t worker_;
  int32_t next_item_, turn_ = 0;
  int32_t range_begin_ = 0, range_end_ = 0;
};

/// Fills the schedule for a problem of tiles_m x tiles_n x batch worker tiles; `max_workers` are resident at once.
/// The launch's knobs are clamped to what the problem allows (splits <= k_tiles, workers <= work).
inline TileSchedulerParams make_schedule(int64_t tiles_m, int64_t tiles_n, int64_t batch, int64_t k_tiles, int32_t max_workers,
                                         Decomposition decomposition, int32_t splits, int32_t swizzle, RasterOrder raster) {
  TileSchedulerParams p;
  p.tiles_m = int32_t(tiles_m);
  p.tiles_n = int32_t(tiles_n);
  p.batch = int32_t(batch);
  p.k_tiles = int32_t(k_tiles);
  p.raster_along_n = raster == RasterOrder::kAlongN;
  // More than all tiles across, side by side, are the same walk, in products that 32 bits may not hold.
  int64_t const along = p.raster_along_n ? tiles_n : tiles_m, across = p.raster_along_n ? tiles_m : tiles_n;
  p.swizzle = swizzle < 1 ? 1 : along * swizzle > INT32_MAX && swizzle > across ? int32_t(across) : swizzle;
  int64_t const tiles = tiles_m * tiles_n * batch;
  p.workers = int32_t(tiles < max_workers ? tiles : max_workers);
  bool const split = decomposition == Decomposition::kSplitK || decomposition == Decomposition::kRanges;
  if (split && splits > 1 && k_tiles > 1) {
    p.splits = int32_t(splits < k_tiles ? splits : k_tiles);
    if (p.splits > max_workers) p.splits = max_workers;
    p.in_place = decomposition == Decomposition::kRanges;
  }
  if (p.splits > 1 && !p.in_place) {
    int64_t const items = tiles * p.splits;
    p.workers = int32_t(items <= max_workers ? items : max_workers / p.splits * p.splits);  // see Progress
  } else if (decomposition == Decomposition::kStreamK && k_tiles > 1) {
    // Whole waves but the last run data-parallel; the last full wave joins the tail so that every worker range is at least a tile long.
    int64_t const waves = tiles / max_workers;
    int64_t const tail = tiles % max_workers;
    int64_t const stream = tail == 0 ? 0 : (waves == 0 ? tiles : tail + max_workers);
    if (stream > 0) {
      int64_t const stream_k_tiles = stream * k_tiles;
      p.workers = int32_t(stream_k_tiles < max_workers ? stream_k_tiles : max_workers);
      p.stream_tiles = int32_t(stream);
      p.range_k_tiles = int32_t(stream_k_tiles / p.workers);
      p.range_remainder = int32_t(stream_k_tiles % p.workers);
    }
  }
  p.precompute();
  return p;
}

}  // namespace minfer::gemm
