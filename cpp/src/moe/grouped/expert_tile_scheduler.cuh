// Tile scheduler of the grouped kernels: the experts' tiles (expert_tiles.cuh) in the form of the kernel layers (gemm/kernel_sm90.cuh; with
// another start, gemm/kernel_sm80.cuh). Tiles follow from offsets in device memory, so every CTA works them out when its predecessor has
// finished; no tile is split.
#pragma once

#include "common/dependent_launch.cuh"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/tensor.hpp"
#include "moe/grouped/expert_tiles.cuh"

namespace minfer::moe {

/// kTileGroups: 0, or the consumer warpgroups that keep their tile in shared memory over the mainloop, which has no registers to spare.
/// kCluster: CTAs that work on neighbouring tiles of a weight, each for the same tokens.
template <class Tiles, int kThreads, int kTileGroups = 0, int kCluster = 1>
struct ExpertTileScheduler {
  static constexpr bool kTileInSharedMemory = kTileGroups > 0;

  struct Params {
    ExpertRows rows;
    int32_t k_tiles, weight_tiles;  // of a cluster's width
  };
  struct SharedStorage {
    typename Tiles::Storage tiles;
    ExpertTile current[kTileGroups > 0 ? kTileGroups : 1];  // of each warpgroup that stores
  };

  struct Location {
    static CUTLASS_DEVICE int thread_in_warpgroup() { return int(threadIdx.x) % 128; }
  };
  static CUTLASS_DEVICE Location locate(int) { return {}; }
  static CUTLASS_DEVICE void init_barriers(Params const&, SharedStorage&) {}
  static CUTLASS_DEVICE void initialize(Params const& params, SharedStorage& storage, int thread) {
    wait_for_predecessor();
    Tiles::build(storage.tiles, params.rows, params.weight_tiles, thread, kThreads);  // ends with a barrier of all threads
    if constexpr (kCluster > 1) {                                                     // whose barriers the other CTA signals
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    }
  }

  struct WorkItem {
    int tile, k_count;
    static constexpr int k_begin = 0;
    static CUTLASS_DEVICE bool owner() { return true; }
  };

  class WorkItems {
   public:
    CUTLASS_DEVICE WorkItems(Params const& params, SharedStorage& storage, Location const&)
        : params_(params), storage_(storage), tiles_(Tiles::count(storage.tiles, params.rows)) {}
    CUTLASS_DEVICE WorkItem first() const { return {first_tile(), params_.k_tiles}; }
    CUTLASS_DEVICE WorkItem next(WorkItem const& item) const { return {item.tile + step(), params_.k_tiles}; }
    /// Of a CTA's walk, and from one of its tiles to the next.
    static CUTLASS_DEVICE int first_tile() { return int(blockIdx.x) / kCluster; }
    static CUTLASS_DEVICE int step() { return int(gridDim.x) / kCluster; }
    CUTLASS_DEVICE bool valid(WorkItem const& item) const { return item.tile < tiles_; }
    static CUTLASS_DEVICE void begin() {}
    CUTLASS_DEVICE ExpertTile tile(WorkItem const& item) const { return at(item.tile); }
    /// Tiles of a walk: ascending.
    CUTLASS_DEVICE ExpertTile at(int tile) const {
      ExpertTile found = Tiles::at(storage_.tiles, params_.rows, params_.weight_tiles, tile, expert_);
      if constexpr (kCluster > 1) found.weight_tile = found.weight_tile * kCluster + int(cute::block_rank_in_cluster());
      return found;
    }
    CUTLASS_DEVICE int count() const { return tiles_; }
    CUTLASS_DEVICE int k_tiles() const { return params_.k_tiles; }

    CUTLASS_DEVICE void write_tile(WorkItem const& item, int group) const { storage_.current[group] = tile(item); }
    CUTLASS_DEVICE ExpertTile read_tile(int group) const { return storage_.current[group]; }

    template <class Accumulator, class Barrier, class Store>
    CUTLASS_DEVICE bool fixup(WorkItem const&, Accumulator&, int, int, Barrier const&, Store const& store) const {
      store();
      return true;
    }

   private:
    Params const& params_;
    SharedStorage& storage_;
    int tiles_;
    mutable int expert_ = 0;  // of the last tile
  };
};

}  // namespace minfer::moe
