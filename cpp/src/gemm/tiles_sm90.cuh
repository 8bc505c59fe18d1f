// Tile scheduler of the sm_90 kernels whose tiles the host knows: the walk of tile_scheduler.h (data-parallel, split-K or stream-K, chosen
// at run time) in the form of the kernel layer (kernel_sm90.cuh). Partials of a split tile go through the workspace and are added in k
// order by the tile's owner (split_reduction.cuh).
#pragma once

#include "common/dependent_launch.cuh"
#include "common/opaque.cuh"
#include "cute/arch/cluster_sm90.hpp"
#include "gemm/split_reduction.cuh"
#include "gemm/tile_scheduler.h"

namespace minfer::gemm {

/// One role's walk over the work items of its CTA.
class StaticWorkItems {
 public:
  CUTLASS_DEVICE StaticWorkItems(TileSchedulerParams const& schedule, int worker) : scheduler_(schedule, worker) {}
  CUTLASS_DEVICE WorkItem first() { return scheduler_.next(); }
  CUTLASS_DEVICE WorkItem next(WorkItem const&) { return scheduler_.next(); }
  CUTLASS_DEVICE static bool valid(WorkItem const& item) { return item.valid; }
  CUTLASS_DEVICE static void begin() { wait_for_predecessor(); }

 private:
  TileScheduler scheduler_;
};

/// kRowGroups: consumer warpgroups that share a tile. kValues: accumulators of a thread. kBlockValues: of a block of 64 rows, where the
/// launch chooses how many of them a tile has.
/// Accumulators whose neighbours change places: accesses of several want them in registers one after the other, in this order.
template <class Accumulator>
struct SwappedPairs {
  Accumulator& of;
  CUTLASS_DEVICE float& operator()(int i) { return of(i ^ 1); }
  CUTLASS_DEVICE float operator()(int i) const { return of(i ^ 1); }
};

template <int kClusterM, int kClusterN, int kRowGroups, int kValues, int kBlockValues = 0, bool kSwapsPairs = false>
struct SplitTileSchedulerSm90 {
  static constexpr int kCluster = kClusterM * kClusterN;
  static constexpr bool kTileInSharedMemory = false;
  using Reduction = cute::conditional_t<kValues <= kMaxTaggedValues, TaggedReduction<128, cute::min(kValues, kMaxTaggedValues)>,
                                        SplitReduction<128, kValues, kBlockValues,
                                                       kSwapsPairs                         ? 4
                                                       : (kRowGroups == 3 || kValues > 96) ? 8
                                                                                           : 16>>;

  struct Params {
    TileSchedulerParams schedule;
    SplitWorkspace split;
  };
  struct SharedStorage {};

  static CUTLASS_DEVICE void init_barriers(Params const&, SharedStorage&) {}

  /// Where a thread is: in its warpgroup, its CTA in the cluster, and which worker that cluster is.
  struct Location {
    int thread;
    uint32_t rank;
    int m, n;
    /// Read where a role's walk begins: kept from the start on, it is spilled where roles have few registers.
    CUTLASS_DEVICE int worker() const { return reread_block_index() / kClusterM; }
    CUTLASS_DEVICE int thread_in_warpgroup() const { return thread; }
  };
  static CUTLASS_DEVICE Location locate(int thread) {
    int const in_warpgroup = thread % 128;
    uint32_t const rank = cute::block_rank_in_cluster();
    return {in_warpgroup, rank, int(rank) % kClusterM, int(rank) / kClusterM};
  }
  /// The CTA's threads synchronise, in a cluster with the threads of the other CTAs, whose barriers they signal.
  static CUTLASS_DEVICE void initialize(Params const&, SharedStorage&, int) {
    if constexpr (kCluster > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }
  }

  /// A CTA's tile of a cluster tile, counted in CTA tiles.
  struct Tile {
    TileCoord cluster_tile;
    Location at;
    CUTLASS_DEVICE int m() const { return cluster_tile.m * kClusterM + at.m; }
    CUTLASS_DEVICE int n() const { return cluster_tile.n * kClusterN + at.n; }
    CUTLASS_DEVICE int l() const { return cluster_tile.l; }
  };

  class WorkItems : public StaticWorkItems {
   public:
    CUTLASS_DEVICE WorkItems(Params const& params, SharedStorage const&, Location const& at)
        : StaticWorkItems(params.schedule, at.worker()), params_(params), at_(at) {}
    CUTLASS_DEVICE Tile tile(WorkItem const& item) const { return {TileScheduler::coordinate(params_.schedule, item.tile), at_}; }

    /// Publishes the partial of a split that does not own its tile; for the owner adds the others' and stores. Returns whether there may be
    /// another item.
    template <class Accumulator, class Barrier, class Store>
    CUTLASS_DEVICE bool fixup(WorkItem const& item, Accumulator& accumulator, int row_group, int thread, Barrier const& barrier,
                              Store const& store) const {
      // Partial slots hold the cluster's CTAs, and a CTA's warpgroups, one after the other.
      auto const partial_slot = [&](int slot) { return (slot * kCluster + int(at_.rank)) * kRowGroups + row_group; };
      auto const fixup_of = [&](auto& fragment) { return Reduction::fixup(params_.split, item, partial_slot, fragment, thread, barrier); };
      SwappedPairs<Accumulator> swapped{accumulator};
      bool whole;
      if constexpr (kSwapsPairs) {
        whole = fixup_of(swapped);
      } else {
        whole = fixup_of(accumulator);
      }
      if (whole) store();
      return true;
    }

   private:
    Params const& params_;
    Location at_;
  };
};

}  // namespace minfer::gemm
