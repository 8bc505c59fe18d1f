// Tile scheduler of the portable grouped kernel: the experts' tiles as on sm_90 (expert_tile_scheduler.cuh), in the form of the kernel
// layer (gemm/kernel_sm80.cuh). Only where it runs on sm_90 and later may its launch depend on its predecessor.
#pragma once

#include "moe/grouped/expert_tile_scheduler.cuh"

namespace minfer::moe {

template <class Tiles, int kThreads>
struct ExpertTileSchedulerSm80 : ExpertTileScheduler<Tiles, kThreads> {
  using Base = ExpertTileScheduler<Tiles, kThreads>;
  using typename Base::Params;
  using typename Base::SharedStorage;

  static CUTLASS_DEVICE void initialize(Params const& params, SharedStorage& storage, int thread) {
#if __CUDA_ARCH__ >= 900
    allow_dependent_launch();
    Base::initialize(params, storage, thread);
#else
    Tiles::build(storage.tiles, params.rows, params.weight_tiles, thread, kThreads);  // ends with a barrier of all threads
#endif
  }
};

}  // namespace minfer::moe
