// The kernel layer of the sm_90 GEMMs, composed as CUTLASS composes its own: a mainloop, an epilogue and a tile scheduler. It says what
// its kernels have in common once: barriers and descriptors, warp roles and registers, the producer's walk over the work items, the
// consumers' walk with pingpong's order, the fix-up of split tiles, the tail. Compositions: gemm_sm90.cuh,
// quantized_gemm/w4a16_sm90.cuh, moe/grouped/grouped_sm90.cuh and moe/grouped/grouped_w4a16_sm90.cuh.
//
// Warp roles. Warpgroup 0 is the producer's and gives registers away: one thread of its warp 0 walks the work items and fills the
// mainloop's ring of stages. Where a mainloop has an auxiliary load (rows that are gathered), the warps after warp 0 do that. The other
// warpgroups are consumers:
//   cooperative  all of them compute every work item: rows of the tile each, or, sliced-K, a slice of each stage's k;
//   pingpong     two, with a tile each: they take work items in turns, and an ordered barrier lets one warpgroup's MMAs run at a time,
//                so that one's epilogue hides under the other's mainloop.
// Tile walk. Each role walks the schedule on its own: the work items of a worker follow from the kernel's parameters, or from a table that
// every CTA works out before the roles part. No queue is shared.
// Start. Barriers, descriptors and prefetches into L2 run under the preceding kernel's tail. Every role waits for that kernel before its
// first access to an operand (dependent_launch.cuh): in `Scheduler::initialize` where the tiles follow from device memory, else the
// producer in `Mainloop::load_first` and the consumers in `WorkItems::begin`.
// Shared memory. The mainloop lays it out as one flat struct: operands, then the epilogue's staging (both 1 KiB aligned), scales,
// barriers, bias.
//
// What differs between kernels, and where it is said. All three parts are given the layer's own parameters and storage, as in CUTLASS.
//   CollectiveMainloop  Params; SharedStorage<Epilogue, Scheduler>; PipelineState; kThreads, registers of the roles, kPingpong.
//                       Set-up: prefetch_tma_descriptors, init_barriers, the constructor (a pipeline object where there is one).
//                       Producer: load_init once, tile_inputs for each tile, load_first before and around the wait, load, load_tail;
//                       load_auxiliary on kAuxiliaryWarps warps where has_auxiliary_load says so.
//                       kRereadsThread, kRelocates: what a consumer has no register for over the mainloop.
//                       Consumers: mma_init, make_accumulator, mma, mma_tail (which says whether the warpgroup has sums to store).
//                       k_begin, where a mainloop has it, is that of the work item.
//                       gemm/mainloop_sm90.cuh: 16-bit operands, around the CollectiveMma of CUTLASS's CollectiveBuilder;
//                       gemm/mainloop_columns_sm90.cuh: in tiles of a width that the launch chooses.
//                       quantized_gemm/mainloop_sm90.cuh: a CollectiveMma specialisation that dequantises, with four inner loops.
//                       moe/grouped/mainloop_sm90.cuh, mainloop_dequantize_sm90.cuh: an expert's weights, tokens in order or gathered.
//   CollectiveEpilogue  Params; TensorStorage (staging) and PipelineStorage; begin once, locate (a warpgroup's rows of a tile), prefetch
//                       (bias, C) before the mainloop, store after it, store_tail by issues_stores' threads. gemm/epilogue_sm90.cuh,
//                       moe/grouped/grouped_collective_epilogue.cuh.
//   TileScheduler       Params, SharedStorage, Location (of a thread, its CTA and its worker), initialize (the barrier behind the set-up);
//                       WorkItems, one role's walk: first, next, valid, begin, tile, and fixup, which adds the partials of a split tile and
//                       has the owner store. gemm/tiles_sm90.cuh and quantized_gemm/tiles_sm90.cuh: data-parallel, split-K and stream-K;
//                       moe/grouped/expert_tile_scheduler.cuh: experts' tiles. kTileInSharedMemory: a consumer's tile is kept
//                       there over the mainloop and located after it.
// A new operand type or weight format is a mainloop, not a kernel.
#pragma once

// All WGMMA widths, not only the powers of two: a 48-column tile is one instruction, not three. Before any CuTe header.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "common/dependent_launch.cuh"
#include "common/opaque.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"

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
  /// Whether a thread keeps the sum of the ranges of k that its CTA computes one after the other; else they pass through memory.
  static constexpr bool kKeepsRanges = requires { requires Mainloop::kKeepsRanges; };
  static_assert(!kKeepsRanges || !kPingpong);
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
      } else if constexpr (Mainloop::kAuxiliaryWarps > 0) {
        if (mainloop.has_auxiliary_load(params.mainloop) && warp <= Mainloop::kAuxiliaryWarps) {
          mainloop.load_auxiliary(params.mainloop, storage, WorkItems(params.scheduler, storage.scheduler, at), thread - 32);
        }
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
      return OrderBarrier(storage.order, {uint32_t(warpgroup == 0 ? 0 : warpgroup - 1), 128});
    } else {
      return cute::tuple<>{};
    }
  }

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, Mainloop& mainloop, Location const& at) {
    PipelineState state = Mainloop::producer_start(params.mainloop);
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
    PipelineState state = Mainloop::consumer_start(params.mainloop);
    [[maybe_unused]] int turn = 0;
    WorkItems items(params.scheduler, storage.scheduler, at);
    auto item = items.first();
    auto const synchronize = [&] { epilogue.synchronize(); };
    mainloop.mma_init(params.mainloop, storage, consumer, thread, synchronize);
    items.begin();  // from here on C, bias, D and the workspace are read and written
    Epilogue::begin(params.epilogue, params.scheduler, storage.scheduler, consumer * 128 + thread, kConsumers * 128);
    [[maybe_unused]] cute::conditional_t<kKeepsRanges, decltype(Mainloop::make_accumulator()), cute::tuple<>> total;
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
        output = epilogue.locate(items.tile(item), row_group);
        if constexpr (Mainloop::kRereadsThread) epilogue.place(storage.staging, storage.epilogue, group, thread);
        if (item.owner() && Mainloop::stores(consumer)) epilogue.prefetch(output);
      }

      auto accumulator = Mainloop::make_accumulator();  // (MMA,MMA_M,MMA_N)
      if constexpr (kPingpong) order.wait();
      if constexpr (requires { mainloop.k_begin; }) mainloop.k_begin = item.k_begin;
      mainloop.mma(params.mainloop, storage, state, accumulator, item.k_count, output, consumer, thread, [&] {
        if constexpr (kPingpong) order.arrive();
      });
      if constexpr (Mainloop::kRereadsThread) {  // no register to spare: what follows from the thread is not kept over the mainloop
        int const id = reread_thread_index();
        thread = id % 128;
        epilogue.place(storage.staging, storage.epilogue, Mainloop::output_group(id / 128 - 1), thread);
        if constexpr (Mainloop::kRelocates)
          output = epilogue.locate(items.tile(item), kPingpong ? 0 : Mainloop::output_group(id / 128 - 1));
      }
      if (!mainloop.mma_tail(storage, state, accumulator, item.k_count, consumer, thread)) continue;
      if constexpr (kKeepsRanges) {
        if (item.in_place) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < cute::size(total); ++i) total(i) = item.partials > 0 ? total(i) + accumulator(i) : accumulator(i);
          if (!item.owner()) continue;
          epilogue.store(total, output);
          continue;
        }
      }
      if constexpr (Scheduler::kTileInSharedMemory) {  // the mainloop has no registers to spare for it
        epilogue.synchronize();
        output = epilogue.locate(items.read_tile(group), row_group);
        epilogue.prefetch(output);
      }

      bool const more = items.fixup(item, accumulator, row_group, thread, synchronize, [&] { epilogue.store(accumulator, output); });
      if (!more) break;
    }
    if (Epilogue::issues_stores(thread) && Mainloop::stores(consumer)) epilogue.store_tail();
  }
};

}  // namespace minfer::gemm
