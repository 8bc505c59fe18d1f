// Tile scheduler of the portable kernels whose tiles follow from the problem's sizes: the walk of tile_scheduler.h (data-parallel, split-K
// or stream-K, chosen at run time) in the form of the kernel layer (kernel_sm80.cuh). A worker is a CTA. Partials of a split tile go
// through the workspace and are added in k order by the tile's owner (split_reduction.cuh).
#pragma once

#include "cutlass/cutlass.h"
#include "gemm/split_reduction.cuh"
#include "gemm/tile_scheduler.h"

namespace minfer::gemm {

/// kValues: accumulators of a thread.
template <int kThreads, int kValues>
struct SplitTileSchedulerSm80 {
  using Reduction = SplitReduction<kThreads, kValues>;

  struct Params {
    TileSchedulerParams schedule;
    SplitWorkspace split;
  };
  struct SharedStorage {};

  struct Location {
    int worker;
  };
  static CUTLASS_DEVICE Location locate(int) { return {int(blockIdx.x)}; }
  static CUTLASS_DEVICE void initialize(Params const&, SharedStorage&, int) {}

  class WorkItems {
   public:
    CUTLASS_DEVICE WorkItems(Params const& params, SharedStorage const&, Location const& at)
        : params_(params), scheduler_(params.schedule, at.worker) {}
    CUTLASS_DEVICE WorkItem first() { return scheduler_.next(); }
    CUTLASS_DEVICE WorkItem next(WorkItem const&) { return scheduler_.next(); }
    CUTLASS_DEVICE static bool valid(WorkItem const& item) { return item.valid; }
    CUTLASS_DEVICE TileCoord tile(WorkItem const& item) const { return TileScheduler::coordinate(params_.schedule, item.tile); }

    /// Publishes the partial of a split that does not own its tile; for the owner adds the others' and stores. Returns whether there may be
    /// another item.
    template <class Accumulator, class Barrier, class Store>
    CUTLASS_DEVICE bool fixup(WorkItem const& item, Accumulator& accumulator, int, int thread, Barrier const& barrier,
                              Store const& store) const {
      auto const slot_of = [](int slot) { return slot; };
      if (Reduction::fixup(params_.split, item, slot_of, accumulator, thread, barrier)) store();
      return true;
    }

   private:
    Params const& params_;
    TileScheduler scheduler_;
  };
};

}  // namespace minfer::gemm
