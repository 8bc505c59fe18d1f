// Mainloop of 16-bit operands for sm_90: CUTLASS's CollectiveMma (MainloopSm90TmaGmmaWarpSpecialized) from its CollectiveBuilder, stages
// by TMA, both operands of WGMMA in shared memory. Its mma and mma_tail are CUTLASS's. The load is ours: it takes L2 eviction priorities
// at run time, any range of k tiles, and starts the first of them for L2 before the predecessor has finished.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "common/cutlass_element.cuh"
#include "common/dependent_launch.cuh"
#include "cute/tensor.hpp"
#include "cutlass/gemm/collective/builders/sm90_gmma_builder.inl"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "minfer/registry.h"
#include "minfer/types.h"

namespace minfer::gemm {

template <class Config>
struct MainloopSm90 {
  using Element = CutlassElement<Config::kType>;
  static constexpr bool kSwap = Config::kSwap;
  static constexpr bool kCooperative = Config::kSchedule == Schedule::kCooperative;
  static constexpr bool kPingpong = !kCooperative;
  static constexpr bool kOrdered = true;  // the barrier is set up in cooperative kernels, too: a few instructions
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
  using Collective = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, 8, Element, LayoutB, 8, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCount<Config::kStages>, KernelSchedule>::CollectiveOp;
  using TiledMma = typename Collective::TiledMma;
  using Pipeline = typename Collective::MainloopPipeline;
  using PipelineState = typename Collective::PipelineState;
  static constexpr int kValues = Config::kTileM * Config::kTileN / (kCooperative ? 256 : 128);  // accumulators per thread
  static constexpr bool kRereadsThread = kPingpong && kValues >= 128;  // there is no register for what follows from it
  static constexpr bool kRelocates = false;

  using Arguments = typename Collective::Arguments;
  struct Params {
    cute::Shape<int, int, int, int> problem;  // the kernel's own (m, n, k, l)
    int32_t early;                            // k tiles whose weight is in the ring before the predecessor has finished; swapped alone
    int32_t prefetch;                         // without these: k tiles that are sent for by then, into L2
    bool prefetch_a, prefetch_b;              // whose
    uint64_t hint_a, hint_b;                  // L2 eviction priorities
    typename Collective::Params operands;
  };
  using TensorStorage = typename Collective::TensorStorage;
  using PipelineStorage = typename Collective::PipelineStorage;
  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    TensorStorage tensors;
    typename Epilogue::TensorStorage staging;
    PipelineStorage pipeline;
    typename Epilogue::PipelineStorage epilogue;
    typename cutlass::OrderedSequenceBarrier<1, 2>::SharedStorage order;
    typename Scheduler::SharedStorage scheduler;
  };

  static Params to_underlying_arguments(cute::Shape<int, int, int, int> const& problem, Arguments const& arguments) {
    Params params{};
    params.problem = problem;
    params.operands = Collective::to_underlying_arguments(problem, arguments, nullptr);
    return params;
  }

  // ---- set-up -------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) { Collective::prefetch_tma_descriptors(params.operands); }
  static constexpr bool kPipelineFences = true;  // the pipeline sets up its own barriers
  template <class Storage>
  static CUTLASS_DEVICE void init_barriers(Params const&, Storage&) {}
  template <class Storage, class Location>
  CUTLASS_DEVICE MainloopSm90(Params const& params, Storage& storage, int warpgroup, int warp, Location const& at)
      : pipeline(make_pipeline(params, storage.pipeline, warpgroup, warp, at.thread_in_warpgroup())) {}

  // ---- producer -----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE PipelineState producer_start(Params const&) { return cutlass::make_producer_start_state<Pipeline>(); }
  static CUTLASS_DEVICE PipelineState consumer_start(Params const&) { return {}; }

  /// What the copies of an operand need.
  template <class Tiles, class Copy, class Stages>
  struct Operand {
    Tiles tiles;    // (BLK_M or BLK_N,BLK_K,m or n,k,l)
    Copy copy;      // of this CTA in its cluster
    Stages stages;  // (TMA,TMA_M or TMA_N,TMA_K,PIPE)
    uint16_t multicast;
    cute::TMA::CacheHintSm90 hint;
    CUTLASS_DEVICE auto k_tiles(int tile, int l) const {
      using cute::_;
      return copy.partition_S(tiles(_, _, tile, _, l));
    }
  };
  template <class OperandA, class OperandB>
  struct LoadInputs {
    OperandA a;
    OperandB b;
  };

  template <class Storage, class Location>
  CUTLASS_DEVICE auto load_init(Params const& params, Storage& storage, Location const& at) const {
    using namespace cute;
    auto [gA_mkl, gB_nkl] = Collective{}.load_init(params.problem, params.operands);  // (BLK_M,BLK_K,m,k,l), (BLK_N,BLK_K,n,k,l)
    Tensor sA = make_tensor(make_smem_ptr(storage.tensors.smem_A.data()), typename Collective::SmemLayoutA{});  // (BLK_M,BLK_K,PIPE)
    Tensor sB = make_tensor(make_smem_ptr(storage.tensors.smem_B.data()), typename Collective::SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
    auto copy_a = params.operands.tma_load_a.get_slice(at.n);
    auto copy_b = params.operands.tma_load_b.get_slice(at.m);
    Tensor tAsA = copy_a.partition_D(sA);  // (TMA,TMA_M,TMA_K,PIPE)
    Tensor tBsB = copy_b.partition_D(sB);  // (TMA,TMA_N,TMA_K,PIPE)
    // A goes to every CTA of this one's cluster row, B to every CTA of its column. Cluster rank: m + kClusterM * n.
    uint16_t multicast_a = 0, multicast_b = 0;
    if constexpr (Config::kClusterN > 1) {
      for (int n = 0; n < Config::kClusterN; ++n) multicast_a |= uint16_t(1) << (at.m + Config::kClusterM * n);
    }
    if constexpr (Config::kClusterM > 1) {
      for (int m = 0; m < Config::kClusterM; ++m) multicast_b |= uint16_t(1) << (m + Config::kClusterM * at.n);
    }
    auto const hint_a = static_cast<TMA::CacheHintSm90>(params.hint_a);
    auto const hint_b = static_cast<TMA::CacheHintSm90>(params.hint_b);
    Operand<decltype(gA_mkl), decltype(copy_a), decltype(tAsA)> a{gA_mkl, copy_a, tAsA, multicast_a, hint_a};
    Operand<decltype(gB_nkl), decltype(copy_b), decltype(tBsB)> b{gB_nkl, copy_b, tBsB, multicast_b, hint_b};
    return LoadInputs<decltype(a), decltype(b)>{a, b};
  }

  /// The k tiles of an output tile: (TMA,TMA_M,TMA_K,k), (TMA,TMA_N,TMA_K,k).
  template <class Inputs, class Tile>
  CUTLASS_DEVICE auto tile_inputs(Params const&, Inputs const& inputs, Tile const& tile) const {
    return cute::make_tuple(inputs.a.k_tiles(tile.m(), tile.l()), inputs.b.k_tiles(tile.n(), tile.l()));
  }

  /// Under the predecessor's tail the first k tiles start for L2 or, a weight's that nobody writes, for the ring. Returns how many were
  /// loaded.
  template <class Storage, class Inputs, class TileInputs>
  CUTLASS_DEVICE int load_first(Params const& params, Storage&, PipelineState& state, Inputs const& inputs, TileInputs const& tile,
                                int k_begin, int k_count) {
    using namespace cute;
    auto const& [a, b] = inputs;
    auto const& [tAgA, tBgB] = tile;
    if constexpr (kSwap) {
      if (params.early > 0) {
        int const early = k_count < params.early ? k_count : params.early;
        PipelineState ahead = state;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int k = k_begin; k < k_begin + early; ++k, ++ahead) {
          pipeline.producer_acquire(ahead);
          auto* barrier = pipeline.producer_get_barrier(ahead);
          copy(params.operands.tma_load_a.with(*barrier, a.multicast, a.hint), tAgA(_, _, _, k), a.stages(_, _, _, ahead.index()));
        }
        wait_for_predecessor();
        CUTLASS_PRAGMA_NO_UNROLL
        for (int k = k_begin; k < k_begin + early; ++k, ++state) {
          auto* barrier = pipeline.producer_get_barrier(state);
          copy(params.operands.tma_load_b.with(*barrier, b.multicast, b.hint), tBgB(_, _, _, k), b.stages(_, _, _, state.index()));
        }
        return early;
      }
    }
    int const ahead = k_count < params.prefetch ? k_count : params.prefetch;
    for (int k = 0; k < ahead; ++k) {
      if (params.prefetch_a) cute::prefetch(params.operands.tma_load_a, tAgA(_, _, _, k_begin + k));
      if (params.prefetch_b) cute::prefetch(params.operands.tma_load_b, tBgB(_, _, _, k_begin + k));
    }
    wait_for_predecessor();
    return 0;
  }

  template <class Storage, class Inputs, class TileInputs>
  CUTLASS_DEVICE void load(Params const& params, Storage&, PipelineState& state, Inputs const& inputs, TileInputs const& tile, int k_begin,
                           int k_end) {
    using namespace cute;
    auto const& [a, b] = inputs;
    auto const& [tAgA, tBgB] = tile;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = k_begin; k < k_end; ++k) {
      pipeline.producer_acquire(state);
      auto* barrier = pipeline.producer_get_barrier(state);
      copy(params.operands.tma_load_a.with(*barrier, a.multicast, a.hint), tAgA(_, _, _, k), a.stages(_, _, _, state.index()));
      copy(params.operands.tma_load_b.with(*barrier, b.multicast, b.hint), tBgB(_, _, _, k), b.stages(_, _, _, state.index()));
      ++state;
    }
  }

  /// In a cluster no CTA may leave while another still signals its barriers.
  CUTLASS_DEVICE void load_tail(PipelineState& state) {
    if constexpr (kCluster > 1) pipeline.producer_tail(state);
  }

  static constexpr int kAuxiliaryWarps = 0;

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  /// The warpgroup's number among those that share a tile's rows, pingpong: among all. All of them store.
  static CUTLASS_DEVICE int output_group(int consumer) { return consumer; }
  static CUTLASS_DEVICE bool stores(int) { return true; }
  template <class Storage, class Barrier>
  CUTLASS_DEVICE void mma_init(Params const&, Storage&, int, int, Barrier const&) {}

  static CUTLASS_DEVICE auto make_accumulator() {
    auto accumulator = cute::partition_fragment_C(TiledMma{}, cute::take<0, 2>(TileShape{}));  // (MMA,MMA_M,MMA_N)
    static_assert(decltype(size(accumulator))::value == kValues && decltype(cute::size<2>(accumulator))::value == 1,
                  "one instruction spans the tile's columns");
    return accumulator;
  }

  /// after_last() is called when the last MMA has been issued.
  template <class Storage, class Accumulator, class Output, class AfterLast>
  CUTLASS_DEVICE void mma(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator, int k_count,
                          Output const&, int consumer, int thread, AfterLast const& after_last) {
    Collective{}.mma(pipeline, state, accumulator, k_count, kCooperative ? consumer * 128 + thread : thread, storage.tensors,
                     params.operands);
    after_last();
  }
  /// Waits for the MMAs and releases their stages. Returns whether this warpgroup has sums to store.
  template <class Storage, class Accumulator>
  CUTLASS_DEVICE bool mma_tail(Storage&, PipelineState& state, Accumulator&, int k_count, int, int) {
    Collective{}.mma_tail(pipeline, state, k_count);
    state.advance(k_count);
    return true;
  }

  static CUTLASS_DEVICE void teardown() {}

 protected:
  static CUTLASS_DEVICE Pipeline make_pipeline(Params const& params, PipelineStorage& storage, int warpgroup, int warp, int thread) {
    typename Pipeline::Params pipeline;
    pipeline.role = warpgroup == 0 ? (warp == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::NonParticipant)
                                   : Pipeline::ThreadCategory::Consumer;
    pipeline.is_leader = thread == 0;
    pipeline.num_consumers = kCooperative ? 256 : 128;
    pipeline.transaction_bytes = params.operands.tma_transaction_bytes;
    return Pipeline(storage, pipeline, ClusterShape{});
  }

  Pipeline pipeline;
};

}  // namespace minfer::gemm
