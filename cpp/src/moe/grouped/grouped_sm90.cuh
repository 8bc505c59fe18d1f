// Grouped GEMM for sm_90a: d[rows of expert e] = epilogue(a[rows of e] . b[e]), 16-bit weights; persistent, warp specialised, WGMMA.
//
// The weights' rows are the MMA's m and the tokens its n, so that a tile computes as many tokens as it has, in steps of kStep, not as many as
// the kernel could take: one launch serves experts with one token and experts with thousands, and a ragged end costs little.
// Warp roles. Warpgroup 0: warp 0 fills the ring's weights, and the tokens where they lie in order, by TMA; where they are gathered, other
// warps fetch them row by row by cp.async. The other warpgroups are consumers:
//   pingpong     two, with a tile each: they take tiles in turns, an ordered barrier lets one's mainloop run at a time, and one's epilogue hides
//                under the other's;
//   cooperative  two that share a tile's rows; or one alone, two such CTAs to an SM, which hide each other's starts and ends.
// Pipelines. Ring of kStages stages: full (TMA's bytes, and an arrival of each gathering thread), empty (one arrival of each consumer warp).
// Tile walk: expert_tiles.cuh; worked out by every CTA from the offsets in device memory, so nothing is known, or synchronised, on the host.
// Weights are one 3-D tensor with the expert as a coordinate; gate and up rows of a gated tile are interleaved, 8 and 8, by the strides of a 5-D
// one, so that the checkpoint's order of them does not matter.
// It has a skeleton of its own: composed over gemm/kernel_sm90.cuh the compiler keeps kernel parameters in registers across the walks and makes
// other code (the 64 x 64 x 128 pingpong kernel has 4320 instructions instead of 4472), whose time has not been measured yet.
// Limits: k and n multiples of 8, operands 16-byte aligned, kMaxGroupedExperts experts.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "common/dependent_launch.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/pipeline/pipeline.hpp"
#include "moe/grouped/expert_tiles.cuh"
#include "moe/grouped/grouped_epilogue.cuh"
#include "moe/grouped/grouped_launch.cuh"
#include "moe/grouped/row_gather.cuh"

namespace minfer::moe {

template <class Config>
struct GroupedSm90 {
  using Element = cute::conditional_t<Config::kType == DataType::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK, kStages = Config::kStages;
  static constexpr int kThreads = Config::kThreads, kConsumers = kThreads / 128 - 1;
  static constexpr bool kPingpong = Config::kSchedule == Schedule::kPingpong;
  static_assert(kPingpong ? kConsumers == 2 : kConsumers == 1 || kConsumers == 2);
  static constexpr int kLaunchRegisters = 65536 / (kThreads * Config::kCtasPerSm) / 8 * 8;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters =
      cute::min(232, (kLaunchRegisters * kThreads - kProducerRegisters * 128) / (kConsumers * 128) / 8 * 8);
  static constexpr int kGroupM = kPingpong ? kTileM : kTileM / kConsumers;  // rows of a warpgroup
  static constexpr int kMmaM = kGroupM / 64;
  static constexpr int kStep = kTileN <= 128 ? 8 : 16;                            // tokens of a tile are rounded up to these
  static constexpr int kSmallBox = kStep, kLargeBox = kTileN >= 64 ? 64 : kStep;  // rows of TMA's loads of tokens
  static constexpr int kHalves = kTileK / 64;                                     // 128-byte columns of a stage
  static constexpr int kValues = kMmaM * kTileN / 2;                              // accumulators of a thread
  static_assert(kGroupM % 64 == 0 && kTileN % kLargeBox == 0 && kTileN <= 256 && kTileK % 64 == 0 && kValues <= 128);

  using Tiles = ExpertTiles<kTileN, kStep, panel_of(kTileM, kTileN)>;
  using Gather = RowGather<kTileN, kHalves, kStages, kConsumers + 1>;
  using Epilogue = GroupedEpilogue<Config::kType, kGroupM, kTileN>;
  using OrderBarrier = cutlass::OrderedSequenceBarrier<1, 2>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  struct Params {
    CUtensorMap weights;             // [experts, n, k] or, gated, [experts, n / 16, 2, 8, k]
    CUtensorMap tokens, few_tokens;  // [1, rows, k], in boxes of kLargeBox and kSmallBox rows
    ExpertRows rows;
    typename Gather::template Source<Element> source;  // gather is null where tokens lie in order
    GroupedEpilogueParams epilogue;
    int32_t k, k_tiles, weight_tiles;
    uint64_t hint_tokens;
  };

  struct SharedStorage {
    alignas(1024) Element weights[kStages][kTileM * kTileK];
    alignas(1024) Element tokens[kStages][kTileN * kTileK];
    alignas(1024) char staged[kConsumers][Epilogue::kBytes];
    alignas(8) uint64_t full[kStages], empty[kStages];
    typename OrderBarrier::SharedStorage order;
    typename Tiles::Storage tiles;
    uint32_t source[kTileN];  // rows of a that are gathered: where they begin, in units of 16 bytes
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  struct Ring {
    int index = 0;
    uint32_t phase = 0;
    __device__ void advance() {
      if (++index == kStages) {
        index = 0;
        phase ^= 1;
      }
    }
    __device__ void advance(int count) {
      int const at = index + count, rounds = at / kStages;
      index = at - rounds * kStages;
      phase ^= rounds & 1;
    }
  };

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (cute::cast_smem_ptr_to_uint(smem) % 1024 != 0) __trap();
    int const thread = int(threadIdx.x);
    int const warpgroup = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();

    allow_dependent_launch();
    if (warp == 0 && cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.weights));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.tokens));
      for (int s = 0; s < kStages; ++s) {
        FullBarrier::init(&storage.full[s], params.source.gather != nullptr ? 1 + Gather::kThreads : 1);
        EmptyBarrier::init(&storage.empty[s], kPingpong ? 4 : 4 * kConsumers);
      }
      cutlass::arch::fence_barrier_init();
    }
    OrderBarrier order(storage.order, {uint32_t(warpgroup == 2), 128});
    wait_for_predecessor();
    Tiles::build(storage.tiles, params.rows, params.weight_tiles, thread, kThreads);  // ends with a barrier of all threads

    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (warp == 0) {
        if (cute::elect_one_sync()) produce(params, storage);
      } else if (params.source.gather != nullptr && warp <= Gather::kWarps) {
        gather(params, storage, thread - 32);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(params, storage, order, warpgroup - 1, thread % 128);
    }
  }

  // ---- producers ----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage) {
    using Hint = cute::TMA::CacheHintSm90;
    Ring ring;
    ring.phase = 1;  // a fresh barrier's previous phase counts as passed: every stage starts empty
    int const tiles = Tiles::count(storage.tiles, params.rows);
    bool const gated = params.epilogue.gated, ordered = params.source.gather == nullptr;
    for (int t = int(blockIdx.x); t < tiles; t += int(gridDim.x)) {
      ExpertTile const tile = Tiles::at(storage.tiles, params.rows, params.weight_tiles, t);
      int const tokens = ordered ? (tile.tokens + kStep - 1) / kStep * kStep : 0;
      uint32_t const bytes = uint32_t(kTileM + tokens) * kTileK * 2;
      uint64_t const hint = uint64_t(tile.alone ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL);
#pragma unroll 1
      for (int k = 0; k < params.k_tiles; ++k) {
        EmptyBarrier::wait(&storage.empty[ring.index], ring.phase);
        uint64_t* const full = &storage.full[ring.index];
        FullBarrier::arrive_and_expect_tx(full, bytes);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          int const column = k * kTileK + half * 64;
          Element* const weights = &storage.weights[ring.index][half * kTileM * 64];
          if (gated) {
            cute::SM90_TMA_LOAD_5D::copy(&params.weights, full, hint, weights, column, 0, 0, tile.weight_tile * (kTileM / 16), tile.expert);
          } else {
            cute::SM90_TMA_LOAD_3D::copy(&params.weights, full, hint, weights, column, tile.weight_tile * kTileM, tile.expert);
          }
          Element* const rows = &storage.tokens[ring.index][half * kTileN * 64];
          int row = 0;
#pragma unroll 1
          for (; row + kLargeBox <= tokens; row += kLargeBox) {
            cute::SM90_TMA_LOAD_3D::copy(&params.tokens, full, params.hint_tokens, rows + row * 64, column, tile.row + row, 0);
          }
#pragma unroll 1
          for (; row < tokens; row += kSmallBox) {
            cute::SM90_TMA_LOAD_3D::copy(&params.few_tokens, full, params.hint_tokens, rows + row * 64, column, tile.row + row, 0);
          }
        }
        ring.advance();
      }
    }
  }

  static CUTLASS_DEVICE void gather(Params const& params, SharedStorage& storage, int thread) {
    typename Gather::Stages const stages{storage.source, storage.full, storage.empty, cute::cast_smem_ptr_to_uint(&storage.tokens[0][0])};
    auto const at = [&](int t) { return Tiles::at(storage.tiles, params.rows, params.weight_tiles, t); };
    Gather::run(stages, at, int(blockIdx.x), Tiles::count(storage.tiles, params.rows), int(gridDim.x), params.k_tiles, params.source,
                thread);
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  template <int kTokens>
  using AtomOf =
      decltype(cute::SM90::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kTokens>, cute::_64>>());
  using Swizzled = cute::Swizzle<3, 4, 3>;
  // [rows][64 of k] columns of 128 bytes, one behind the other.
  template <int kRows, int kPitch>
  using SmemLayout = cute::ComposedLayout<
      Swizzled, cute::smem_ptr_flag_bits<16>,
      cute::Layout<cute::Shape<cute::Shape<cute::_8, cute::Int<kRows / 8>>, cute::Shape<cute::_64, cute::Int<kHalves>>, cute::Int<kStages>>,
                   cute::Stride<cute::Stride<cute::_64, cute::Int<512>>, cute::Stride<cute::_1, cute::Int<kPitch * 64>>,
                                cute::Int<kPitch * kTileK>>>>;

  /// The tile's sums, for up to kTokens tokens. after_last() is called when the last of the instructions has been issued.
  template <int kTokens, class Accumulator, class AfterLast>
  static CUTLASS_DEVICE void multiply(SharedStorage& storage, Ring ring, Accumulator& accumulator, int k_tiles, bool gathered, int slab,
                                      int thread, AfterLast const& after_last) {
    using namespace cute;
    using TiledMma = decltype(make_tiled_mma(AtomOf<kTokens>{}));
    TiledMma mma;
    Tensor sA = make_tensor(make_smem_ptr(&storage.weights[0][slab * 64 * 64]), SmemLayout<kGroupM, kTileM>{});  // (rows,BLK_K,PIPE)
    Tensor sB = make_tensor(make_smem_ptr(&storage.tokens[0][0]), SmemLayout<kTokens, kTileN>{});                // (tokens,BLK_K,PIPE)
    auto thread_mma = mma.get_slice(thread);
    Tensor tCrA = thread_mma.make_fragment_A(thread_mma.partition_A(sA));  // (MMA,MMA_M,MMA_K,PIPE), descriptors
    Tensor tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));  // (MMA,MMA_N,MMA_K,PIPE)
    Tensor tCrC = make_tensor(accumulator.data(), Layout<Shape<Shape<_2, _2, Int<kTokens / 8>>, Int<kMmaM>, _1>,
                                                         Stride<Stride<_1, _2, _4>, Int<kTileN / 2>, _0>>{});  // (MMA,MMA_M,MMA_N)
    int previous = -1;
    mma.accumulate_ = GMMA::ScaleOut::Zero;
    warpgroup_fence_operand(accumulator);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = 0; k < k_tiles; ++k) {
      FullBarrier::wait(&storage.full[ring.index], ring.phase);
      if (gathered) cutlass::arch::fence_view_async_shared();  // cp.async wrote through another proxy than the tensor cores read by
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int slab = 0; slab < kTileK / 16; ++slab) {
        CUTLASS_PRAGMA_UNROLL
        for (int mi = 0; mi < kMmaM; ++mi) {
          cute::gemm(mma, tCrA(_, mi, slab, ring.index), tCrB(_, _0{}, slab, ring.index), tCrC(_, mi, _0{}));
        }
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      release(storage, previous, thread);
      previous = ring.index;
      ring.advance();
    }
    after_last();
    warpgroup_wait<0>();
    warpgroup_fence_operand(accumulator);
    release(storage, previous, thread);
  }
  static CUTLASS_DEVICE void release(SharedStorage& storage, int stage, int thread) {
    if (stage >= 0 && thread % 32 == 0) EmptyBarrier::arrive(&storage.empty[stage]);
  }

  template <int kTokens, class... Arguments>
  static CUTLASS_DEVICE void multiply_at_most(int tokens, Arguments&&... arguments) {
    if constexpr (kTokens > kStep) {
      if (tokens <= kTokens - kStep) {
        multiply_at_most<kTokens - kStep>(tokens, arguments...);
        return;
      }
    }
    multiply<kTokens>(arguments...);
  }

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, OrderBarrier& order, int consumer, int thread) {
    using namespace cute;
    Epilogue epilogue(params.epilogue, &storage.staged[consumer][0], thread, consumer + 1);
    Ring ring;
    int const tiles = Tiles::count(storage.tiles, params.rows);
    clear_rows_behind(params.rows, storage.tiles, params.epilogue, consumer * 128 + thread, kConsumers * 128);
    int const slab = kPingpong ? 0 : consumer * kMmaM;  // the warpgroup's first 64 rows of the tile
    int turn = 0;
    for (int t = int(blockIdx.x); t < tiles; t += int(gridDim.x)) {
      if (kPingpong && (turn++ & 1) != consumer) {
        ring.advance(params.k_tiles);
        continue;
      }
      ExpertTile const tile = Tiles::at(storage.tiles, params.rows, params.weight_tiles, t);
      int const row = tile.weight_tile * kTileM + slab * 64;
      epilogue.prefetch(tile, row);
      Tensor accumulator = make_tensor<float>(Int<kValues>{});
      if constexpr (kPingpong) order.wait();
      multiply_at_most<kTileN>(tile.tokens, storage, ring, accumulator, params.k_tiles, params.source.gather != nullptr, slab, thread, [&] {
        if constexpr (kPingpong) order.arrive();
      });
      ring.advance(params.k_tiles);
      epilogue.store(accumulator, tile, row);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    grouped_sm90_kernel(__grid_constant__ typename GroupedSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  GroupedSm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_grouped_sm90(GroupedLaunchArguments const& arguments) {
  using Kernel = GroupedSm90<Config>;
  GroupedProblem const& problem = *arguments.problem;
  GroupedOperands const& operands = *arguments.operands;
  typename Kernel::Params params{};
  int64_t const n = problem.n, k = problem.k;
  Status status;
  if (problem.gated) {
    GateRows const rows = gate_rows(operands.gate_layout, n);
    int64_t const gate = rows.stride * operands.ldb, up = rows.up_offset * operands.ldb;
    bool const blocks = operands.gate_layout == GateLayout::kBlocks;
    int64_t const extents[5] = {k, 8, 2, n / 16, problem.experts};
    int64_t const strides[4] = {gate * 2, up * 2, (blocks ? 16 * operands.ldb : 8 * gate) * 2, operands.b_expert_stride * 2};
    int const box[5] = {64, 8, 2, Config::kTileM / 16, 1};
    status = encode_tensor_map_rows(&params.weights, 5, operands.b, extents, strides, box);
  } else {
    int64_t const extents[3] = {k, n, problem.experts}, strides[2] = {operands.ldb * 2, operands.b_expert_stride * 2};
    int const box[3] = {64, Config::kTileM, 1};
    status = encode_tensor_map_rows(&params.weights, 3, operands.b, extents, strides, box);
  }
  if (!status.ok()) return status;
  if (status = describe_tokens<Kernel>(arguments, &params); !status.ok()) return status;
  params.epilogue = describe_epilogue(problem, operands);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_grouped(&grouped_sm90_kernel<Config>, params, arguments, Config::kThreads, Config::kCtasPerSm, Kernel::kSmemBytes,
                        shared_memory_allowed);
}

}  // namespace minfer::moe
