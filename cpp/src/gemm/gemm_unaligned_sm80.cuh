// Dense GEMM of operands at any address and with any stride, for sm_80 onward, in one launch: what neither TMA nor 16-byte cp.async can
// address. On Hopper it serves small products, and products with a short k; operands that are read often are copied to aligned rows first
// (realign.h), for the kernels of sm_90.
//
// Composition (kernel_sm80.cuh has the walk): MainloopUnalignedSm80, EpilogueUnalignedSm80, the split scheduler.
// Tile walk: data-parallel launches have a CTA for each tile, as many resident as shared memory and registers allow, since with a short k
// the stores of one overlap with the copies of others; split-K and stream-K have the persistent walk of the other kernels.
// Launch: programmatic on sm_90 (common/dependent_launch.cuh). The mainloop waits for the predecessor, behind its arithmetic.
// Shared memory: the ring of stages, as many as there are k tiles, and in its place the epilogue's staging.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "gemm/describe_schedule.h"
#include "gemm/epilogue_unaligned_sm80.cuh"
#include "gemm/kernel_sm80.cuh"
#include "gemm/mainloop_unaligned_sm80.cuh"
#include "gemm/tiles_sm80.cuh"

namespace minfer::gemm {

/// The split scheduler, for launches that may depend on the preceding kernel, and data-parallel ones whose grid is that of the tiles: there
/// a CTA finds its tile without a division.
template <int kThreads, int kValues>
struct GridTileSchedulerSm80 : SplitTileSchedulerSm80<kThreads, kValues> {
  using Base = SplitTileSchedulerSm80<kThreads, kValues>;
  using Location = typename Base::Location;
  struct Params : Base::Params {
    bool grid_of_tiles;
  };

  class WorkItems {
   public:
    CUTLASS_DEVICE WorkItems(Params const& params, typename Base::SharedStorage const& storage, Location const& at)
        : params_(params), items_(params, storage, at) {}
    CUTLASS_DEVICE WorkItem first() {
      if (!params_.grid_of_tiles) return items_.first();
      WorkItem item;
      item.k_count = params_.schedule.k_tiles;
      item.valid = true;
      return item;
    }
    CUTLASS_DEVICE WorkItem next(WorkItem const& item) { return params_.grid_of_tiles ? WorkItem{} : items_.next(item); }
    CUTLASS_DEVICE static bool valid(WorkItem const& item) { return item.valid; }
    CUTLASS_DEVICE TileCoord tile(WorkItem const& item) const {
      if (!params_.grid_of_tiles) return items_.tile(item);
      int32_t const along = int32_t(blockIdx.x), across = int32_t(blockIdx.y), l = int32_t(blockIdx.z);
      return params_.schedule.raster_along_n ? TileCoord{across, along, l} : TileCoord{along, across, l};
    }
    template <class Accumulator, class Barrier, class Store>
    CUTLASS_DEVICE bool fixup(WorkItem const& item, Accumulator& accumulator, int group, int thread, Barrier const& barrier,
                              Store const& store) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      // Not earlier: CTAs that came before would share the SMs of this launch unevenly, some SMs with several and some with none
      // (301 x 299 x 295: 8.6 us on the H200, 4.2 like this).
      allow_dependent_launch();
#endif
      return items_.fixup(item, accumulator, group, thread, barrier, store);
    }

   private:
    Params const& params_;
    typename Base::WorkItems items_;
  };
};

template <class Config>
struct GemmUnalignedSm80 : GemmKernelSm80<MainloopUnalignedSm80<Config>, EpilogueUnalignedSm80<Config, MainloopUnalignedSm80<Config>>,
                                          GridTileSchedulerSm80<Config::kThreads, MainloopUnalignedSm80<Config>::kValues>> {
  static_assert(GemmUnalignedSm80::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    gemm_unaligned_sm80_kernel(__grid_constant__ typename GemmUnalignedSm80<Config>::Params const params) {
  extern __shared__ __align__(128) char smem_unaligned_sm80[];
  GemmUnalignedSm80<Config>::run(params, smem_unaligned_sm80);
}

constexpr int32_t kMaxGrid = 65535;  // CTAs along y and z

/// The schedule of a launch, and its grid: that of the tiles where no tile is divided.
template <class Config, class SchedulerParams>
Status describe_grid(GemmLaunchArguments const& arguments, SchedulerParams* scheduler, dim3* grid) {
  TileSchedulerParams& schedule = scheduler->schedule;
  if (Status status = describe_schedule<Config>(arguments, &schedule, &scheduler->split); !status.ok()) return status;
  *grid = dim3(unsigned(schedule.workers));
  if (schedule.splits != 1 || schedule.stream_tiles != 0) return Status::success();
  int32_t const along = schedule.raster_along_n ? schedule.tiles_n : schedule.tiles_m;
  int32_t const across = schedule.raster_along_n ? schedule.tiles_m : schedule.tiles_n;
  scheduler->grid_of_tiles = across <= kMaxGrid && schedule.batch <= kMaxGrid;
  schedule.workers = schedule.tiles();
  *grid = scheduler->grid_of_tiles ? dim3(unsigned(along), unsigned(across), unsigned(schedule.batch)) : dim3(unsigned(schedule.workers));
  return Status::success();
}

template <class Config>
Status launch_gemm_unaligned_sm80(GemmLaunchArguments const& arguments) {
  using Kernel = GemmUnalignedSm80<Config>;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  LaunchShape shape;
  if (Status status = describe_grid<Config>(arguments, &params.scheduler, &shape.grid); !status.ok()) return status;
  TileSchedulerParams const& schedule = params.scheduler.schedule;
  auto const describe = [](void const* base, int64_t leading, int64_t batch_stride, int64_t extent, auto* operand) {
    *operand = {reinterpret_cast<uint64_t>(base), 2 * leading, 2 * batch_stride, int32_t(extent)};
  };
  describe(operands.a, operands.lda, operands.a_batch_stride, problem.m, &params.mainloop.a);
  describe(operands.b, operands.ldb, operands.b_batch_stride, problem.n, &params.mainloop.b);
  params.mainloop.k = int32_t(problem.k);
  params.epilogue = make_epilogue(problem, operands);

  static std::atomic<uint64_t> shared_memory_allowed{0};
  if (cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(&gemm_unaligned_sm80_kernel<Config>), Kernel::kSmemBytes,
                                                    shared_memory_allowed);
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  }
  // Stages that no k tile comes to are behind the end of the shared memory, and more CTAs are resident.
  int32_t const stages = schedule.k_tiles < Config::kStages ? schedule.k_tiles : Config::kStages;
  size_t const ring_bytes = size_t(stages) * Kernel::Mainloop::kStageBytes,
               staging_bytes = sizeof(typename Kernel::Epilogue::TensorStorage);
  shape.threads = unsigned(Kernel::kThreads);
  shape.smem_bytes = ring_bytes > staging_bytes ? ring_bytes : staging_bytes;
  shape.programmatic = arguments.programmatic_launch && arguments.device->compute_capability() >= 90;
  shape.stream = arguments.stream;
  return launch(shape, "launch", &gemm_unaligned_sm80_kernel<Config>, params);
}

}  // namespace minfer::gemm
