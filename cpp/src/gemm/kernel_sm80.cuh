// The kernel layer of the portable GEMMs (sm_80 onward), composed as that of sm_90 is (kernel_sm90.cuh): a mainloop, an epilogue and a
// tile scheduler. It says what its kernels have in common once: the walk over the work items, the mainloop of each, the fix-up of split
// tiles, the epilogue through shared memory. Compositions: gemm_sm80.cuh, gemm_unaligned_sm80.cuh, quantized_gemm/w4a16_sm80.cuh,
// moe/grouped/grouped_sm80.cuh.
//
// Warp roles. None: all warps copy by cp.async and compute by mma.sync, and every thread holds a part of the tile's accumulators.
// Tile walk. Persistent: the work items of a CTA follow from the kernel's parameters, or from a table that every CTA computes first.
// Copies. The copies of most mainloops end with the work item. The others run ahead of the MMAs and over the ends of work items
// (kCopiesAhead), so that the next item's operands arrive during an epilogue, or while the owner of a split tile waits for a partial. They
// walk the schedule on their own, and leave one stage free for the epilogue.
// Shared memory. The mainloop lays it out: stages and `staging` (the epilogue's), apart or in the same bytes, then `scheduler` and
// `epilogue`, which take no bytes where they are empty.
//
// What differs between kernels, and where it is said. All three parts are given the layer's own parameters and storage.
//   CollectiveMainloop  Params; SharedStorage<Epilogue, Scheduler>; kThreads, kCopiesAhead; load_init once, which is given a walk of its
//                       own and starts the copies that run ahead; make_accumulator (zeros); mma, which adds the products of a work item's
//                       k tiles; staging, the epilogue's storage after mma. An epilogue may return before all threads have read its
//                       staging, so mma has a barrier before it fills a stage that was staging.
//                       gemm/mainloop_sm80.cuh: 16-bit floats and int8, around the CollectiveMma of CUTLASS's MainloopSm80CpAsync.
//                       gemm/mainloop_unaligned_sm80.cuh: the same at any address and with any stride.
//                       quantized_gemm/mainloop_sm80.cuh: a CollectiveMma specialisation that dequantises; its copies run ahead.
//                       moe/grouped/mainloop_sm80.cuh: one for an expert's weights, tokens in order or gathered.
//   CollectiveEpilogue  Params; TensorStorage (staging) and PipelineStorage; begin once; Output (a tile, which mma is given too where its
//                       copies do not run ahead); locate, prefetch (bias) and store as in the layer of sm_90; move_staging where copies
//                       run ahead. gemm/epilogue_sm80.cuh: dense and quantised kernels; moe/grouped/grouped_collective_epilogue.cuh.
//   TileScheduler       Params, SharedStorage, Location; initialize, which waits for the preceding kernel where the launch may depend on
//                       it; WorkItems with first, next, valid, tile and fixup as in the layer of sm_90. gemm/tiles_sm80.cuh:
//                       data-parallel, split-K and stream-K; moe/grouped/expert_tiles_sm80.cuh: the tiles of the experts.
// A new operand type or weight format is a mainloop, not a kernel.
#pragma once

#include "cutlass/cutlass.h"

namespace minfer::gemm {

template <class CollectiveMainloop, class CollectiveEpilogue, class TileScheduler>
struct GemmKernelSm80 {
  using Mainloop = CollectiveMainloop;
  using Epilogue = CollectiveEpilogue;
  using Scheduler = TileScheduler;
  using WorkItems = typename Scheduler::WorkItems;
  using Location = typename Scheduler::Location;

  static constexpr int kThreads = Mainloop::kThreads;

  struct Params {
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
    typename Scheduler::Params scheduler;
  };

  using SharedStorage = typename Mainloop::template SharedStorage<Epilogue, Scheduler>;
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    int const thread = int(threadIdx.x);
    Location const at = Scheduler::locate(thread);
    Scheduler::initialize(params.scheduler, storage.scheduler, thread);

    Mainloop mainloop;
    auto inputs = mainloop.load_init(params.mainloop, storage, WorkItems(params.scheduler, storage.scheduler, at), thread);
    Epilogue epilogue(params.epilogue, mainloop.staging(storage), storage.epilogue, 0, thread);
    Epilogue::begin(params.epilogue, params.scheduler, storage.scheduler, thread, kThreads);
    auto const synchronize = [] { __syncthreads(); };
    WorkItems items(params.scheduler, storage.scheduler, at);
    for (auto item = items.first(); items.valid(item); item = items.next(item)) {
      typename Epilogue::Output output;
      if constexpr (!Mainloop::kCopiesAhead) {
        output = Epilogue::locate(items.tile(item), 0);
        if (item.owner()) epilogue.prefetch(output);
      }
      auto accumulator = Mainloop::make_accumulator();
      mainloop.mma(params.mainloop, storage, inputs, accumulator, item.k_begin, item.k_count, output, thread);
      bool const more = items.fixup(item, accumulator, 0, thread, synchronize, [&] {
        if constexpr (Mainloop::kCopiesAhead) {  // only the epilogue needs the tile, so no register holds it over the mainloop
          output = Epilogue::locate(items.tile(item), 0);
          epilogue.prefetch(output);
          epilogue.move_staging(mainloop.staging(storage));
        }
        epilogue.store(accumulator, output);
      });
      if (!more) break;
    }
  }
};

}  // namespace minfer::gemm
