// Mainloop of the grouped 16-bit GEMM for sm_90: an expert's weights by TMA, its tokens by TMA where they lie in order, row by row by
// cp.async where they are gathered; WGMMA with both operands in shared memory.
//
// The weights' rows are the MMA's m and the tokens its n, so that a tile computes as many tokens as it has, in steps of kStep, not as many
// as the kernel could take: one launch serves experts with one token and experts with thousands, and a ragged end costs little.
// Pipeline: full (TMA's bytes, and an arrival of each gathering thread), empty (one arrival of each consumer warp).
// Weights are one 3-D tensor with the expert as a coordinate; gate and up rows of a gated tile are interleaved, 8 and 8, by the strides of
// a 5-D one, so that the checkpoint's order of them does not matter.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cuda.h>

#include "common/ring.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "minfer/types.h"
#include "moe/grouped/expert_tiles.cuh"
#include "moe/grouped/row_gather.cuh"

namespace minfer::moe {

/// Dispatch policy: both operands in shared memory, tokens in expert order or gathered.
template <class Config_>
struct MainloopSm90TmaGmmaExperts {
  using Config = Config_;
  static constexpr int Stages = Config::kStages;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using ArchTag = cutlass::arch::Sm90;
  using Schedule = cute::conditional_t<Config::kSchedule == Schedule::kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                       cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
};

}  // namespace minfer::moe

namespace cutlass::gemm::collective {

template <class Config, class TileShape_, class Element_, class StrideA, class ElementB, class StrideB, class TiledMma_, class GmemCopyA,
          class SmemLayoutA, class SmemCopyA, class TransformA, class GmemCopyB, class SmemLayoutB, class SmemCopyB, class TransformB>
struct CollectiveMma<minfer::moe::MainloopSm90TmaGmmaExperts<Config>, TileShape_, Element_, StrideA, ElementB, StrideB, TiledMma_,
                     GmemCopyA, SmemLayoutA, SmemCopyA, TransformA, GmemCopyB, SmemLayoutB, SmemCopyB, TransformB> {
  using DispatchPolicy = minfer::moe::MainloopSm90TmaGmmaExperts<Config>;
  using TileShape = TileShape_;
  using Element = Element_;
  using ExpertTile = minfer::moe::ExpertTile;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK, kStages = Config::kStages;
  static constexpr int kWeightRows = kTileM;
  static constexpr int kThreads = Config::kThreads, kConsumers = kThreads / 128 - 1;
  static constexpr bool kPingpong = Config::kSchedule == minfer::Schedule::kPingpong;
  static constexpr bool kOrdered = true, kPipelineFences = false, kRereadsThread = false;
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

  using Gather = minfer::moe::RowGather<kTileN, kHalves, kStages, kConsumers + 1>;
  using PipelineState = minfer::Ring<kStages>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  struct Params {
    CUtensorMap weights;                               // [experts, n, k] or, gated, [experts, n / 16, 2, 8, k]
    CUtensorMap tokens, few_tokens;                    // [1, rows, k], in boxes of kLargeBox and kSmallBox rows
    typename Gather::template Source<Element> source;  // gather is null where tokens lie in order
    uint64_t hint_tokens;
    bool gated;
  };

  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    alignas(1024) Element weights[kStages][kTileM * kTileK];
    alignas(1024) Element tokens[kStages][kTileN * kTileK];
    typename Epilogue::TensorStorage staging;
    alignas(8) uint64_t full[kStages], empty[kStages];
    typename cutlass::OrderedSequenceBarrier<1, 2>::SharedStorage order;
    typename Scheduler::SharedStorage scheduler;
    uint32_t source[kTileN];  // rows of a that are gathered: where they begin, in units of 16 bytes
    typename Epilogue::PipelineStorage epilogue;
  };

  // ---- set-up -------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.weights));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.tokens));
  }
  template <class Storage>
  static CUTLASS_DEVICE void init_barriers(Params const& params, Storage& storage) {
    for (int s = 0; s < kStages; ++s) {
      FullBarrier::init(&storage.full[s], params.source.gather != nullptr ? 1 + Gather::kThreads : 1);
      EmptyBarrier::init(&storage.empty[s], kPingpong ? 4 : 4 * kConsumers);
    }
  }
  template <class Storage, class Location>
  CUTLASS_DEVICE CollectiveMma(Params const&, Storage&, int, int, Location const&) {}

  // ---- producers ----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE PipelineState producer_start(Params const&) { return PipelineState::of_producer(); }
  static CUTLASS_DEVICE PipelineState consumer_start(Params const&) { return {}; }
  struct LoadInputs {
    bool gated, ordered;
  };
  template <class Storage, class Location>
  static CUTLASS_DEVICE LoadInputs load_init(Params const& params, Storage&, Location const&) {
    return {params.gated, params.source.gather == nullptr};
  }

  struct TileInputs {
    ExpertTile tile;
    int tokens;  // that TMA loads
    uint32_t bytes;
    uint64_t hint;
  };
  static CUTLASS_DEVICE TileInputs tile_inputs(Params const&, LoadInputs const& load, ExpertTile const& tile) {
    using Hint = cute::TMA::CacheHintSm90;
    int const tokens = load.ordered ? (tile.tokens + kStep - 1) / kStep * kStep : 0;
    return {tile, tokens, uint32_t(kTileM + tokens) * kTileK * 2, uint64_t(tile.alone ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL)};
  }
  template <class Storage>
  static CUTLASS_DEVICE int load_first(Params const&, Storage&, PipelineState&, LoadInputs const&, TileInputs const&, int, int) {
    return 0;
  }
  template <class Storage>
  static CUTLASS_DEVICE void load(Params const& params, Storage& storage, PipelineState& state, LoadInputs const& init,
                                  TileInputs const& inputs, int k_begin, int k_end) {
#pragma unroll 1
    for (int k = k_begin; k < k_end; ++k) {
      EmptyBarrier::wait(&storage.empty[state.index], state.phase);
      uint64_t* const full = &storage.full[state.index];
      FullBarrier::arrive_and_expect_tx(full, inputs.bytes);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        int const column = k * kTileK + half * 64;
        Element* const weights = &storage.weights[state.index][half * kTileM * 64];
        if (init.gated) {
          cute::SM90_TMA_LOAD_5D::copy(&params.weights, full, inputs.hint, weights, column, 0, 0, inputs.tile.weight_tile * (kTileM / 16),
                                       inputs.tile.expert);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&params.weights, full, inputs.hint, weights, column, inputs.tile.weight_tile * kTileM,
                                       inputs.tile.expert);
        }
        Element* const rows = &storage.tokens[state.index][half * kTileN * 64];
        int row = 0;
#pragma unroll 1
        for (; row + kLargeBox <= inputs.tokens; row += kLargeBox) {
          cute::SM90_TMA_LOAD_3D::copy(&params.tokens, full, params.hint_tokens, rows + row * 64, column, inputs.tile.row + row, 0);
        }
#pragma unroll 1
        for (; row < inputs.tokens; row += kSmallBox) {
          cute::SM90_TMA_LOAD_3D::copy(&params.few_tokens, full, params.hint_tokens, rows + row * 64, column, inputs.tile.row + row, 0);
        }
      }
      state.advance();
    }
  }
  static CUTLASS_DEVICE void load_tail(PipelineState&) {}

  static constexpr int kAuxiliaryWarps = Gather::kWarps;
  static CUTLASS_DEVICE bool has_auxiliary_load(Params const& params) { return params.source.gather != nullptr; }
  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE void load_auxiliary(Params const& params, Storage& storage, WorkItems const& items, int thread) {
    typename Gather::Stages const stages{storage.source, storage.full, storage.empty, cute::cast_smem_ptr_to_uint(&storage.tokens[0][0])};
    auto const at = [&](int t) { return items.at(t); };
    Gather::run(stages, at, int(blockIdx.x), items.count(), int(gridDim.x), items.k_tiles(), params.source, thread);
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE int output_group(int consumer) { return consumer; }
  static CUTLASS_DEVICE bool stores(int) { return true; }
  template <class Storage, class Barrier>
  static CUTLASS_DEVICE void mma_init(Params const&, Storage&, int, int, Barrier const&) {}
  static CUTLASS_DEVICE auto make_accumulator() { return cute::make_tensor<float>(cute::Int<kValues>{}); }

  /// after_last() is called when the last MMA has been issued.
  template <class Storage, class Accumulator, class Output, class AfterLast>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator, int k_count,
                                 Output const& output, int consumer, int thread, AfterLast const& after_last) {
    int const slab = kPingpong ? 0 : consumer * kMmaM;  // the warpgroup's first 64 rows of the tile
    multiply_at_most<kTileN>(output.tile.tokens, storage, state, accumulator, k_count, params.source.gather != nullptr, slab, thread,
                             after_last);
  }
  template <class Storage, class Accumulator>
  static CUTLASS_DEVICE bool mma_tail(Storage&, PipelineState& state, Accumulator&, int k_count, int, int) {
    state.advance(k_count);
    return true;
  }
  static CUTLASS_DEVICE void teardown() {}

 private:
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
  template <int kTokens, class Storage, class Accumulator, class AfterLast>
  static CUTLASS_DEVICE void multiply(Storage& storage, PipelineState ring, Accumulator& accumulator, int k_tiles, bool gathered, int slab,
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
  template <class Storage>
  static CUTLASS_DEVICE void release(Storage& storage, int stage, int thread) {
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
};

}  // namespace cutlass::gemm::collective
