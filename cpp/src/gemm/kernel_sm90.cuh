// The kernel layer of every sm_90 GEMM: dense, quantised weights, grouped, grouped with quantised weights. It is composed as CUTLASS composes
// its own, of a mainloop, an epilogue and a tile scheduler, and says what they have in common once: barriers and descriptors, warp roles and
// registers, the producer's walk over the tiles, the consumers' walk with pingpong's order, the fix-up of split tiles, the tail.
//
// Warp roles. Warpgroup 0 is the producer's and gives registers away: one thread of its warp 0 walks the work items and fills the mainloop's ring
// of stages; where a mainloop has an auxiliary load (rows that are gathered), the warps behind it do that. The other warpgroups are consumers:
//   cooperative  all of them compute every work item: rows of the tile each, or, sliced-K, a slice of each stage's k;
//   pingpong     two, with a tile each: they take work items in turns, and an ordered barrier lets one warpgroup's MMAs run at a time, so that
//                one's epilogue hides under the other's mainloop.
// Both roles walk a tile scheduler of their own, which needs no memory that they share: what it says follows from its parameters (tiles_sm90.cuh)
// or from what the CTA has worked out before the roles part (expert_tiles.cuh).
//
// Start. What needs no operand (barriers, descriptors, prefetches into L2) runs under the predecessor's tail; where the wait for it lies, each part
// says: `Scheduler::initialize` (the tiles follow from memory), else `Mainloop::load_first` and the consumers' `WorkItems::begin`.
//
// What differs, and where it is said:
//   CollectiveMainloop  Params, TensorStorage (the ring), PipelineStorage (its barriers, scales), AuxiliaryStorage, the warpgroups and registers of
//                       the roles; prefetch_tma_descriptors, init_barriers, Pipeline, load_init, load_first, load, load_tail, load_auxiliary; mma_init, mma,
//                       mma_tail. Specialisations of cutlass::gemm::collective::CollectiveMma: gemm/mainloop_sm90.cuh (16-bit, CUTLASS's own
//                       mainloop), quantized_gemm/mainloop_sm90.cuh (dequantising; four inner loops), moe/grouped/mainloop_*_sm90.cuh (tokens in
//                       expert order or gathered, 16-bit and dequantising).
//   CollectiveEpilogue  Params, TensorStorage (staging), PipelineStorage; prefetch (bias, C) before the mainloop, store after it, store_tail.
//   TileScheduler       Params, SharedStorage, initialize; WorkItems (one role's walk): first, next, valid, begin, tile; fixup brings
//                       the partials of a split tile together and lets the owner store.
// A new operand type or weight format is a mainloop, and with it dense and grouped kernels are there.
#pragma once

// All WGMMA widths, not only the powers of two: a 48-column tile is one instruction, not three. Before any CuTe header.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "common/dependent_launch.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/pipeline/pipeline.hpp"

namespace minfer::gemm {

template <class CollectiveMainloop, class CollectiveEpilogue, class TileScheduler>
struct GemmKernelSm90 {
  using Mainloop = CollectiveMainloop;
  using Epilogue = CollectiveEpilogue;
  using Scheduler = TileScheduler;
  using PipelineState = typename Mainloop::PipelineState;
  using WorkItems = typename Scheduler::WorkItems;
  using Location = typename Scheduler::Location;
  using OrderBarrier = cutlass::OrderedSequenceBarrier<1, 2>;

  static constexpr int kThreads = Mainloop::kThreads, kConsumers = kThreads / 128 - 1;
  static constexpr bool kPingpong = Mainloop::kPingpong;
  static_assert(!kPingpong || kConsumers == 2);

  struct Params {
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
    typename Scheduler::Params scheduler;
  };

  /// The mainloop lays it out: stages, `staging` and `epilogue` (the epilogue's), `order`, `scheduler`.
  using SharedStorage = typename Mainloop::template SharedStorage<Epilogue, Scheduler>;
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (cute::cast_smem_ptr_to_uint(smem) % 1024 != 0) __trap();  // TMA's and WGMMA's swizzles count from 1 KiB boundaries
    int const thread = int(threadIdx.x);
    int const warpgroup = cutlass::canonical_warp_group_idx();
    int const warp = cutlass::canonical_warp_idx_sync();
    Location const at = Scheduler::locate(thread);

    allow_dependent_launch();
    if (warp == 0 && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      Epilogue::prefetch_tma_descriptors(params.epilogue);
      Mainloop::init_barriers(params.mainloop, storage);
      Epilogue::init_barriers(storage.epilogue);
      Scheduler::init_barriers(params.scheduler, storage.scheduler);
      if constexpr (!Mainloop::kPipelineFences) cutlass::arch::fence_barrier_init();
    }
    Mainloop mainloop(params.mainloop, storage, warpgroup, warp, at);
    auto order = make_order(storage, warpgroup);
    Scheduler::initialize(params.scheduler, storage.scheduler, thread);  // every thread sees the barriers behind it

    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<Mainloop::kProducerRegisters>();
      if (warp == 0) {
        if (cute::elect_one_sync()) produce(params, storage, mainloop, at);
      } else if (mainloop.has_auxiliary_load(params.mainloop) && warp <= Mainloop::kAuxiliaryWarps) {
        mainloop.load_auxiliary(params.mainloop, storage, WorkItems(params.scheduler, storage.scheduler, at), thread - 32);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<Mainloop::kConsumerRegisters>();
      consume(params, storage, mainloop, order, at, warpgroup - 1, at.thread_in_warpgroup());
    }
    mainloop.teardown();
  }

 private:
  static CUTLASS_DEVICE auto make_order(SharedStorage& storage, int warpgroup) {
    if constexpr (Mainloop::kOrdered) {
      return OrderBarrier(storage.order, {Mainloop::order_group(warpgroup), 128});
    } else {
      return cute::tuple<>{};
    }
  }

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, Mainloop& mainloop, Location const& at) {
    PipelineState state = Mainloop::producer_start();
    auto const inputs = mainloop.load_init(params.mainloop, storage, at);
    bool first = true;
    WorkItems items(params.scheduler, storage.scheduler, at);
    for (auto item = items.first(); items.valid(item); item = items.next(item)) {
      auto const tile = mainloop.tile_inputs(params.mainloop, inputs, items.tile(item));
      int k = item.k_begin;
      int const k_end = item.k_begin + item.k_count;
      if (first) {
        k += mainloop.load_first(params.mainloop, storage, state, inputs, tile, k, item.k_count);
        first = false;
      }
      mainloop.load(params.mainloop, storage, state, inputs, tile, k, k_end);
    }
    mainloop.load_tail(state);
  }

  template <class Order>
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, Mainloop& mainloop, Order& order, Location const& at,
                                     int consumer, int thread) {
    int const group = Mainloop::output_group(consumer);
    Epilogue epilogue(params.epilogue, storage.staging, storage.epilogue, group, thread);
    int const row_group = kPingpong ? 0 : group;
    PipelineState state;
    [[maybe_unused]] int turn = 0;
    WorkItems items(params.scheduler, storage.scheduler, at);
    auto item = items.first();
    auto const synchronize = [&] { epilogue.synchronize(); };
    mainloop.mma_init(params.mainloop, storage, consumer, thread, synchronize);
    items.begin();  // from here on C, bias, D and the workspace are read and written
    Epilogue::begin(params.epilogue, params.scheduler, storage.scheduler, consumer * 128 + thread, kConsumers * 128);
    for (; items.valid(item); item = items.next(item)) {
      if constexpr (kPingpong) {
        if ((turn++ & 1) != consumer) {
          state.advance(item.k_count);
          continue;
        }
      }
      typename Epilogue::Output output;
      if constexpr (Scheduler::kTileInSharedMemory) {
        if (thread == 0 && Mainloop::stores(consumer)) items.write_tile(item, group);
      } else {
        output = Epilogue::locate(items.tile(item), row_group);
        if constexpr (Mainloop::kRereadsThread) epilogue.place(storage.staging, storage.epilogue, group, thread);
        if (item.owner() && Mainloop::stores(consumer)) epilogue.prefetch(output);
      }

      auto accumulator = Mainloop::make_accumulator();  // (MMA,MMA_M,MMA_N)
      if constexpr (kPingpong) order.wait();
      mainloop.mma(params.mainloop, storage, state, accumulator, item.k_count, output, consumer, thread, [&] {
        if constexpr (kPingpong) order.arrive();
      });
      if constexpr (Mainloop::kRereadsThread) {
        int id;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
        epilogue.place(storage.staging, storage.epilogue, Mainloop::output_group(id / 128 - 1), id % 128);
      }
      if (!mainloop.mma_tail(storage, state, accumulator, item.k_count, consumer, thread)) continue;
      if constexpr (Scheduler::kTileInSharedMemory) {  // the mainloop leaves no register for it
        epilogue.synchronize();
        output = Epilogue::locate(items.read_tile(group), row_group);
        epilogue.prefetch(output);
      }

      bool const more = items.fixup(item, accumulator, row_group, thread, synchronize, [&] { epilogue.store(accumulator, output); });
      if (!more) break;
    }
    if (thread == 0 && Mainloop::stores(consumer)) epilogue.store_tail();
  }
};

}  // namespace minfer::gemm
