// Epilogue of the grouped kernels: grouped_epilogue.cuh in the form of the kernel layers (gemm/kernel_sm90.cuh, gemm/kernel_sm80.cuh).
#pragma once

#include "moe/grouped/grouped_epilogue.cuh"

namespace minfer::moe {

/// kGroupM: rows of a warpgroup; kTileM: of the CTA; kGroups: warpgroups that store. kFactor, kStaged: as in GroupedEpilogue.
template <class Element, int kGroupM, int kTileM, int kTileN, int kGroups, SumFactor kFactor = SumFactor::kNone, int kStaged = 32>
struct GroupedCollectiveEpilogue : GroupedEpilogue<Element, kGroupM, kTileN, kFactor, kStaged> {
  using Base = GroupedEpilogue<Element, kGroupM, kTileN, kFactor, kStaged>;
  using Params = typename Base::Params;
  struct TensorStorage {
    alignas(1024) char staged[kGroups][Base::kBytes];
  };
  struct PipelineStorage {
    [[no_unique_address]] typename Base::Storage of[kGroups];
  };

  __device__ GroupedCollectiveEpilogue(Params const& params, TensorStorage& storage, PipelineStorage& small, int group, int thread)
      : Base(params, &storage.staged[group][0], &small.of[group], thread, group + 1) {}
  __device__ void place(TensorStorage& storage, PipelineStorage& small, int group, int thread_of_warpgroup) {
    Base::staged = &storage.staged[group][0];
    Base::storage = &small.of[group];
    Base::thread = thread_of_warpgroup;
    Base::barrier_id = group + 1;
  }
  static __device__ void prefetch_tma_descriptors(Params const&) {}
  static __device__ void init_barriers(PipelineStorage&) {}

  /// A warpgroup's rows of a tile: from which row of the expert's weight on.
  struct Output {
    ExpertTile tile;
    int row;
  };
  /// The number of tokens, on which loops depend, is the same in a warp, and the compiler is to know that: else the mainloop, which follows
  /// for the next tile, counts as diverged, and its descriptors are not computed in uniform registers.
  static __device__ Output locate(ExpertTile tile, int row_group) {
    tile.tokens = __shfl_sync(0xffffffffu, tile.tokens, 0);
    return {tile, tile.weight_tile * kTileM + row_group * kGroupM};
  }

  template <class SchedulerParams, class SchedulerStorage>
  static CUTLASS_DEVICE void begin(Params const& params, SchedulerParams const& walk, SchedulerStorage const& storage, int thread,
                                   int threads) {
    clear_rows_behind(walk.rows, storage.tiles, params, thread, threads);
  }
  __device__ void prefetch(Output const& at) { Base::prefetch(at.tile, at.row); }
  template <class Accumulator>
  __device__ void store(Accumulator& accumulator, Output const& at) {
    Base::store(accumulator, at.tile, at.row);
  }
  static __device__ bool issues_stores(int thread) { return thread == 0; }
  static __device__ void store_tail() {}
};

}  // namespace minfer::moe
