// Dense GEMM for sm_90a: TMA + WGMMA, persistent, warp specialised.
//
// Warp roles (384 threads). Warpgroup 0 keeps 40 registers; its warp 0 is the producer: it walks the schedule and fills the ring of kStages
// shared-memory stages by TMA. Warpgroups 1 and 2 are consumers with 232 registers each:
//   cooperative  both share a tile, 64-row slabs alternating between them; they walk every work item;
//   pingpong     each owns a tile; they take work items in turns, an ordered barrier lets one warpgroup's mainloop run at a time, so that one's
//                epilogue hides under the other's.
// Pipelines. Ring: CUTLASS's PipelineTmaAsync (full: TMA bytes; empty: consumer warps, through the whole multicast group). C: one mbarrier per
// epilogue buffer (epilogue_sm90.cuh). D: bulk groups of the storing thread.
// Tile walk: TileScheduler (data-parallel, split-K or stream-K, all at run time). A piece that does not own its tile goes to the workspace;
// the owner adds the pieces in k order (split_reduction.cuh).
// Shared memory: ring | epilogue buffers | barriers, bias, at most 227 KiB, one CTA per SM.
// Start: barriers and descriptors are set up under the predecessor's tail, with the first weights on their way to L2 (dependent_launch.cuh).
// The mainloop is CUTLASS's CollectiveMma (MainloopSm90TmaGmmaWarpSpecialized), from its CollectiveBuilder; kernel layer, scheduler and epilogue
// are ours. Limits: A, B, and for the fast epilogue D and C, 16-byte aligned in base and strides.
#pragma once

// All WGMMA widths, not only the powers of two: a 48-column tile is one instruction, not three. Before any CuTe header.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "common/dependent_launch.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/pipeline/pipeline.hpp"
#include "gemm/epilogue_sm90.cuh"
#include "gemm/launch_sm90.cuh"

namespace minfer::gemm {

/// Operand bytes a CTA sends for before its predecessor has finished. Measured at m = 16 on 4096 x 4096, 6144 x 4096 and 10240 x 8192: 64 to 128 KiB
/// gain 4 to 9 % over none, 256 KiB lose it again to the predecessor's own stream.
constexpr int kPrefetchBytes = 96 * 1024;

template <class Config>
struct GemmSm90 {
  using Element = cute::conditional_t<Config::kType == DataType::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr bool kSwap = Config::kSwap;
  static constexpr bool kCooperative = Config::kSchedule == Schedule::kCooperative;
  static constexpr bool kPingpong = !kCooperative;
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(Config::kThreads == kThreads);

  // The kernel's own A sits on the tile's M side: the caller's A, or B when swapped. The layouts are those of [m, k] and [k, n] matrices.
  static constexpr Major kMajorA = kSwap ? Config::kMajorB : Config::kMajorA;
  static constexpr Major kMajorB = kSwap ? Config::kMajorA : Config::kMajorB;
  using LayoutA = cute::conditional_t<kMajorA == Major::kK, cutlass::layout::RowMajor, cutlass::layout::ColumnMajor>;
  using LayoutB = cute::conditional_t<kMajorB == Major::kK, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;

  using TileShape = cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>;
  using ClusterShape = cute::Shape<cute::Int<Config::kClusterM>, cute::Int<Config::kClusterN>, cute::_1>;
  static constexpr int kCluster = Config::kClusterM * Config::kClusterN;
  using KernelSchedule = cute::conditional_t<kCooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                             cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, 8, Element, LayoutB, 8, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCount<Config::kStages>, KernelSchedule>::CollectiveOp;
  using TiledMma = typename Mainloop::TiledMma;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using PipelineState = typename Mainloop::PipelineState;
  using Epilogue = EpilogueSm90<Config>;
  using OrderBarrier = cutlass::OrderedSequenceBarrier<1, 2>;
  static constexpr int kValues = Config::kTileM * Config::kTileN / (kCooperative ? 256 : 128);  // accumulators per thread
  using Reduction = SplitReduction<128, kValues>;

  static constexpr int kPrefetch = kPrefetchBytes / ((Config::kTileM + Config::kTileN) * Config::kTileK * 2);  // k-iterations

  struct Params {
    cute::Shape<int, int, int, int> problem;  // the kernel's own (m, n, k, l)
    typename Mainloop::Params mainloop;
    EpilogueSm90Params epilogue;
    TileSchedulerParams schedule;
    SplitWorkspace split;
    uint64_t hint_a, hint_b;  // L2 eviction priorities
    int32_t prefetch;         // k-iterations sent for before the predecessor has finished
  };

  struct SharedStorage {
    typename Mainloop::TensorStorage tensors;
    typename Epilogue::Buffers epilogue;
    typename Pipeline::SharedStorage pipeline;
    typename Epilogue::Small epilogue_small;
    typename OrderBarrier::SharedStorage order;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    using namespace cute;
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (cute::cast_smem_ptr_to_uint(smem) % 1024 != 0) __trap();  // TMA's and WGMMA's swizzles count from 1 KiB boundaries
    int const thread = int(threadIdx.x);
    int const warpgroup = cutlass::canonical_warp_group_idx();
    int const warp = cutlass::canonical_warp_idx_sync();
    int const thread_in_group = thread % cutlass::NumThreadsPerWarpGroup;
    uint32_t const rank = cute::block_rank_in_cluster();
    int const rank_m = int(rank) % Config::kClusterM, rank_n = int(rank) / Config::kClusterM;
    int const worker = int(blockIdx.x) / Config::kClusterM;

    allow_dependent_launch();
    if (warp == 0 && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      if (params.epilogue.store_by_tma) cute::prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.epilogue.tma_d));
      if (params.epilogue.load_c_by_tma) cute::prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.epilogue.tma_c));
      Epilogue::initialize(storage.epilogue_small);
    }

    typename Pipeline::Params pipeline_params;
    pipeline_params.role = warpgroup == 0 ? (warp == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::NonParticipant)
                                          : Pipeline::ThreadCategory::Consumer;
    pipeline_params.is_leader = thread_in_group == 0;
    pipeline_params.num_consumers = kCooperative ? 256 : 128;
    pipeline_params.transaction_bytes = params.mainloop.tma_transaction_bytes;
    Pipeline pipeline(storage.pipeline, pipeline_params, ClusterShape{});

    OrderBarrier order(storage.order, {uint32_t(warpgroup == 0 ? 0 : warpgroup - 1), 128});

    if constexpr (kCluster > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }

    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (warp == 0) produce(params, storage, pipeline, worker, rank_m, rank_n);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(params, storage, pipeline, order, worker, rank, rank_m, rank_n, warpgroup - 1, thread_in_group);
    }
  }

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, Pipeline& pipeline, int worker, int rank_m, int rank_n) {
    using namespace cute;
    PipelineState state = cutlass::make_producer_start_state<Pipeline>();
    auto [gA_mkl, gB_nkl] = Mainloop{}.load_init(params.problem, params.mainloop);  // (BLK_M,BLK_K,m,k,l), (BLK_N,BLK_K,n,k,l)
    if (cute::elect_one_sync()) {
      Tensor sA = make_tensor(make_smem_ptr(storage.tensors.smem_A.data()), typename Mainloop::SmemLayoutA{});  // (BLK_M,BLK_K,PIPE)
      Tensor sB = make_tensor(make_smem_ptr(storage.tensors.smem_B.data()), typename Mainloop::SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
      auto copy_a = params.mainloop.tma_load_a.get_slice(rank_n);
      auto copy_b = params.mainloop.tma_load_b.get_slice(rank_m);
      Tensor tAsA = copy_a.partition_D(sA);  // (TMA,TMA_M,TMA_K,PIPE)
      Tensor tBsB = copy_b.partition_D(sB);  // (TMA,TMA_N,TMA_K,PIPE)
      // A goes to every CTA of this one's cluster row, B to every CTA of its column. Cluster rank: rank_m + kClusterM * rank_n.
      uint16_t multicast_a = 0, multicast_b = 0;
      if constexpr (Config::kClusterN > 1) {
        for (int n = 0; n < Config::kClusterN; ++n) multicast_a |= uint16_t(1) << (rank_m + Config::kClusterM * n);
      }
      if constexpr (Config::kClusterM > 1) {
        for (int m = 0; m < Config::kClusterM; ++m) multicast_b |= uint16_t(1) << (m + Config::kClusterM * rank_n);
      }
      auto const hint_a = static_cast<TMA::CacheHintSm90>(params.hint_a);
      auto const hint_b = static_cast<TMA::CacheHintSm90>(params.hint_b);

      bool first = true;
      TileScheduler scheduler(params.schedule, worker);
      for (WorkItem item = scheduler.next(); item.valid; item = scheduler.next()) {
        TileCoord const tile = TileScheduler::coordinate(params.schedule, item.tile);
        Tensor tAgA = copy_a.partition_S(gA_mkl(_, _, tile.m * Config::kClusterM + rank_m, _, tile.l));  // (TMA,TMA_M,TMA_K,k)
        Tensor tBgB = copy_b.partition_S(gB_nkl(_, _, tile.n * Config::kClusterN + rank_n, _, tile.l));  // (TMA,TMA_N,TMA_K,k)
        if (first) {
          // Under the predecessor's tail: the first k-iterations start for L2.
          int const ahead = item.k_count < params.prefetch ? item.k_count : params.prefetch;
          for (int k = 0; k < ahead; ++k) {
            cute::prefetch(params.mainloop.tma_load_a, tAgA(_, _, _, item.k_begin + k));
            cute::prefetch(params.mainloop.tma_load_b, tBgB(_, _, _, item.k_begin + k));
          }
          wait_for_predecessor();
          first = false;
        }
        CUTLASS_PRAGMA_NO_UNROLL
        for (int k = item.k_begin; k < item.k_begin + item.k_count; ++k) {
          pipeline.producer_acquire(state);
          auto* barrier = pipeline.producer_get_barrier(state);
          copy(params.mainloop.tma_load_a.with(*barrier, multicast_a, hint_a), tAgA(_, _, _, k), tAsA(_, _, _, state.index()));
          copy(params.mainloop.tma_load_b.with(*barrier, multicast_b, hint_b), tBgB(_, _, _, k), tBsB(_, _, _, state.index()));
          ++state;
        }
      }
      // In a cluster no CTA may leave while another still signals its barriers.
      if constexpr (kCluster > 1) pipeline.producer_tail(state);
    }
  }

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, Pipeline& pipeline, OrderBarrier& order, int worker,
                                     uint32_t rank, int rank_m, int rank_n, int consumer, int thread) {
    using namespace cute;
    Mainloop mainloop;
    Epilogue epilogue(params.epilogue, storage.epilogue, storage.epilogue_small, consumer, thread);
    int const slab = kCooperative ? consumer : 0;  // which 64-row slabs of the tile are this warpgroup's
    PipelineState state;
    int turn = 0;
    TileScheduler scheduler(params.schedule, worker);
    WorkItem item = scheduler.next();
    wait_for_predecessor();  // C, bias, D and the workspace are read and written from here
    for (; item.valid; item = scheduler.next()) {
      if (kPingpong && (turn++ & 1) != consumer) {
        state.advance(item.k_count);
        continue;
      }
      TileCoord const tile = TileScheduler::coordinate(params.schedule, item.tile);
      int const row = (tile.m * Config::kClusterM + rank_m) * Config::kTileM;
      int const column = (tile.n * Config::kClusterN + rank_n) * Config::kTileN;
      if (item.owner()) epilogue.prefetch(row, column, tile.l, slab);

      TiledMma tiled_mma;
      Tensor accumulator = partition_fragment_C(tiled_mma, take<0, 2>(TileShape{}));  // (MMA,MMA_M,MMA_N)
      static_assert(decltype(size(accumulator))::value == kValues && decltype(size<2>(accumulator))::value == 1,
                    "one instruction spans the tile's columns");
      if constexpr (kPingpong) order.wait();
      mainloop.mma(pipeline, state, accumulator, item.k_count, kCooperative ? consumer * 128 + thread : thread, storage.tensors,
                   params.mainloop);
      if constexpr (kPingpong) order.arrive();
      mainloop.mma_tail(pipeline, state, item.k_count);
      state.advance(item.k_count);

      // A slot holds the cluster's CTAs, and a cooperative CTA's two warpgroups, one after the other.
      auto const place = [&](int slot) { return (slot * kCluster + int(rank)) * (kCooperative ? 2 : 1) + slab; };
      auto const barrier = [&] { epilogue.synchronize(); };
      if (!item.owner()) {
        Reduction::publish(params.split, place(item.slot), accumulator, thread, barrier);
        continue;
      }
      for (int piece = 0; piece < item.pieces; ++piece) {
        Reduction::add(params.split, place(item.first_piece + piece), accumulator, thread, barrier);
      }
      epilogue.store(accumulator, row, column, tile.l, slab);
    }
    if (thread == 0) cute::tma_store_wait<0>();  // shared memory must outlive the reads of the last stores
  }
};

template <class Config>
__global__ void __launch_bounds__(GemmSm90<Config>::kThreads, 1)
    gemm_sm90_kernel(__grid_constant__ typename GemmSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  GemmSm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_gemm_sm90(GemmLaunchArguments const& arguments) {
  using Kernel = GemmSm90<Config>;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  constexpr bool kSwap = Config::kSwap;
  int const rows = int(kSwap ? problem.n : problem.m), columns = int(kSwap ? problem.m : problem.n);
  params.problem = cute::make_shape(rows, columns, int(problem.k), int(problem.batch));

  auto const set_stride = [](auto& stride, int64_t leading, int64_t batch) {
    if constexpr (cute::is_same_v<cute::remove_cvref_t<decltype(cute::get<0>(stride))>, int64_t>) {
      cute::get<0>(stride) = leading;
    } else {
      cute::get<1>(stride) = leading;
    }
    cute::get<2>(stride) = batch;
  };
  typename Kernel::Mainloop::Arguments mainloop{};
  mainloop.ptr_A = static_cast<typename Kernel::Element const*>(kSwap ? operands.b : operands.a);
  mainloop.ptr_B = static_cast<typename Kernel::Element const*>(kSwap ? operands.a : operands.b);
  set_stride(mainloop.dA, kSwap ? operands.ldb : operands.lda, kSwap ? operands.b_batch_stride : operands.a_batch_stride);
  set_stride(mainloop.dB, kSwap ? operands.lda : operands.ldb, kSwap ? operands.a_batch_stride : operands.b_batch_stride);
  params.mainloop = Kernel::Mainloop::to_underlying_arguments(params.problem, mainloop, nullptr);

  if (Status status = describe_schedule<Config>(arguments, &params.schedule, &params.split); !status.ok()) return status;

  // A weight matrix that no second row of tiles reads again leaves L2 to the activations.
  bool const stream_a = params.schedule.tiles_n == 1, stream_b = params.schedule.tiles_m == 1;
  params.hint_a = uint64_t(stream_a ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);
  params.hint_b = uint64_t(stream_b ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);

  // Where the tensor cores are the limit it only delays the first loads: 1024 cubed takes 6.4 us with it, 6.0 without.
  double const operations = 2.0 * double(problem.m) * double(problem.n) * double(problem.k);
  double const bytes =
      2.0 * (double(problem.m) * double(problem.k) + double(problem.n) * double(problem.k) + double(problem.m) * double(problem.n));
  bool const streams = bytes / arguments.device->read_bandwidth >= operations / arguments.device->matrix_rate;
  params.prefetch = streams ? Kernel::kPrefetch : 0;

  if (Status status = describe_epilogue<typename Kernel::Epilogue>(problem, operands, &params.epilogue); !status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_sm90<Config>(&gemm_sm90_kernel<Config>, params, arguments, params.schedule.workers, Kernel::kSmemBytes,
                             shared_memory_allowed);
}

}  // namespace minfer::gemm
