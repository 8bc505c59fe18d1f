// Tile scheduler: which (output tile, k-range) each persistent worker computes, in which order, and who adds up the pieces.
//
// A worker is a CTA, or a cluster of them. The walk is static: everything follows from (params, worker), so producer and consumer
// warps step through it independently and no queue lives in memory.
//
//   persistent  worker w takes tiles w, w + workers, ...
//   split_k     every tile is cut in `splits` k-ranges; items (tile, split) are dealt out like tiles, to a multiple of `splits` workers
//               where there are more of them than workers
//   stream_k    the first `stream_tiles` tiles are laid end to end as one line of k-iterations which is cut in `workers` equal stretches;
//               the remaining tiles, a whole number of waves, are dealt out data-parallel afterwards
//
// Pieces and owners. The piece that holds a tile's last k-iteration owns the tile: it adds the other pieces, in ascending k order (so the
// sum is the same in every run), and runs the epilogue.
//
// Progress. A worker takes its items one after the other (the two halves of a pingpong CTA in turns), and hands a piece over as soon as it
// is computed, without waiting. It waits only in items that own a tile, for the tile's other pieces, and these are
//   split_k   of the splits - 1 workers before its own: a launch with more items than workers has a multiple of `splits` workers, so that
//             worker w has split w % splits of all its tiles, and those who are waited for never wait;
//   stream_k  what lower workers begin with: a stretch is walked from its end to its start, so that its first piece is the head of a tile
//             that a later worker owns, and its last the tail of one that is its own.
// So a worker waits for lower ones alone, and for what they do before any wait of their own. Workers are started in the order of blockIdx
// and keep their SM, and the next launch starts none before all are started (dependent_launch.cuh): whoever waits, waits for some that run
// or have ended. A launch ends with any number of workers resident together, one too, whoever has the other SMs (MPS, a green context, a
// second stream whose kernels wait as well): tests/cpp/test_schedule_progress.cpp.
// Dealt out to any number of workers, tiles would lie across the end of a round, owners at the next one's start would wait for the last
// workers, and resident ones could all wait for some that have no place to start: 132 workers, 5 splits and 1057 tiles hang on 113 SMs.
#pragma once

#include <cstdint>

#include "minfer/gemm.h"

#if defined(__CUDACC__)
#define MINFER_HOST_DEVICE __host__ __device__ inline
#else
#define MINFER_HOST_DEVICE inline
#endif

namespace minfer::gemm {

struct TileSchedulerParams {
  int32_t tiles_m = 0, tiles_n = 0, batch = 1;  // in units of a worker's tile (CTA tile x cluster)
  int32_t k_tiles = 0;                          // k-iterations of a tile
  int32_t workers = 1;
  int32_t splits = 1;
  int32_t stream_tiles = 0;
  int32_t swizzle = 1;
  bool raster_along_n = false;
  int32_t stretch = 0, stretch_remainder = 0;  // stream_tiles * k_tiles = workers * stretch + stretch_remainder

  MINFER_HOST_DEVICE int32_t tiles() const { return tiles_m * tiles_n * batch; }
  /// Partial tiles that may be in flight: one slot each in the workspace.
  MINFER_HOST_DEVICE int32_t slots() const { return stream_tiles > 0 ? workers : (splits > 1 ? tiles() * (splits - 1) : 0); }

  MINFER_HOST_DEVICE int32_t stretch_begin(int32_t worker) const {
    return worker * stretch + (worker < stretch_remainder ? worker : stretch_remainder);
  }
  MINFER_HOST_DEVICE int32_t worker_of(int32_t iteration) const {
    int32_t const long_part = stretch_remainder * (stretch + 1);
    return iteration < long_part ? iteration / (stretch + 1) : stretch_remainder + (iteration - long_part) / stretch;
  }
};

struct WorkItem {
  int32_t tile = 0;
  int32_t k_begin = 0, k_count = 0;
  int32_t slot = -1;                    // >= 0: not the owner, the partial tile goes to this slot
  int32_t first_piece = 0, pieces = 0;  // owner: slots to add, ascending
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
      stretch_begin_ = params.stretch_begin(worker);
      stretch_end_ = params.stretch_begin(worker + 1);
    }
  }

  MINFER_HOST_DEVICE WorkItem next() {
    WorkItem item;
    int32_t const k_tiles = params_.k_tiles;
    if (stretch_end_ > stretch_begin_) {
      item.tile = (stretch_end_ - 1) / k_tiles;
      int32_t const tile_begin = item.tile * k_tiles;
      int32_t const begin = stretch_begin_ > tile_begin ? stretch_begin_ : tile_begin;
      item.k_begin = begin - tile_begin;
      item.k_count = stretch_end_ - begin;
      if (stretch_end_ < tile_begin + k_tiles) {
        item.slot = worker_;
      } else if (item.k_begin > 0) {
        item.first_piece = params_.worker_of(tile_begin);
        item.pieces = worker_ - item.first_piece;
      }
      item.valid = true;
      stretch_end_ = begin;
      return item;
    }
    int32_t const splits = params_.splits;
    if (splits == 1) {  // without the divisions: they would lengthen every launch's start
      item.tile = params_.stream_tiles + next_item_;
      item.k_count = k_tiles;
      item.valid = item.tile < params_.tiles();
      next_item_ += params_.workers;
      return item;
    }
    int32_t const tile = params_.stream_tiles + next_item_ / splits;
    item.valid = tile < params_.tiles();
    if (item.valid) {
      int32_t const split = next_item_ % splits;
      int32_t const share = k_tiles / splits, rest = k_tiles % splits;
      item.tile = tile;
      item.k_begin = split * share + (split < rest ? split : rest);
      item.k_count = share + (split < rest ? 1 : 0);
      if (split < splits - 1) {
        item.slot = tile * (splits - 1) + split;
      } else {
        item.first_piece = tile * (splits - 1);
        item.pieces = splits - 1;
      }
      next_item_ += params_.workers;
    }
    return item;
  }

  /// Linear tile -> coordinate: `swizzle` tiles side by side, then one step along the raster direction, so that what the resident CTAs
  /// read together stays in L2.
  MINFER_HOST_DEVICE static TileCoord coordinate(TileSchedulerParams const& p, int32_t tile) {
    int32_t const per_batch = p.tiles_m * p.tiles_n;
    int32_t const l = p.batch == 1 ? 0 : tile / per_batch;
    int32_t const rest = tile - l * per_batch;
    int32_t const along = p.raster_along_n ? p.tiles_n : p.tiles_m;
    int32_t const across = p.raster_along_n ? p.tiles_m : p.tiles_n;
    if (across == 1) return p.raster_along_n ? TileCoord{0, rest, l} : TileCoord{rest, 0, l};
    int32_t const band = rest / (along * p.swizzle);
    int32_t const first = band * p.swizzle;
    int32_t const width = across - first < p.swizzle ? across - first : p.swizzle;
    int32_t const inside = rest - band * along * p.swizzle;
    int32_t const step = inside / width;
    int32_t const side = first + inside - step * width;
    return p.raster_along_n ? TileCoord{side, step, l} : TileCoord{step, side, l};
  }

 private:
  TileSchedulerParams const& params_;
  int32_t worker_;
  int32_t next_item_;
  int32_t stretch_begin_ = 0, stretch_end_ = 0;
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
  if (decomposition == Decomposition::kSplitK && splits > 1 && k_tiles > 1) {
    p.splits = int32_t(splits < k_tiles ? splits : k_tiles);
    if (p.splits > max_workers) p.splits = max_workers;
    int64_t const items = tiles * p.splits;
    p.workers = int32_t(items <= max_workers ? items : max_workers / p.splits * p.splits);  // see Progress
  } else if (decomposition == Decomposition::kStreamK && k_tiles > 1) {
    // Whole waves but the last run data-parallel; the last full wave joins the tail so that every stretch is at least a tile long.
    int64_t const waves = tiles / max_workers;
    int64_t const tail = tiles % max_workers;
    int64_t const stream = tail == 0 ? 0 : (waves == 0 ? tiles : tail + max_workers);
    if (stream > 0) {
      int64_t const iterations = stream * k_tiles;
      p.workers = int32_t(iterations < max_workers ? iterations : max_workers);
      p.stream_tiles = int32_t(stream);
      p.stretch = int32_t(iterations / p.workers);
      p.stretch_remainder = int32_t(iterations % p.workers);
    }
  }
  return p;
}

}  // namespace minfer::gemm
