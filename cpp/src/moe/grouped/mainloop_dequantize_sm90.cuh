// Mainloop of the grouped GEMM with quantised weights for sm_90: an expert's packed weights, scales and zero points by TMA, its tokens by
// TMA where they lie in order, by cp.async where they are gathered; the multiplication is that of the GEMM with quantised weights
// (quantized_gemm/dequantizing_mma_sm90.cuh).
//
// A tile always computes kTileN tokens; those it does not have are what an earlier stage left, in columns of the sums that are not stored.
#pragma once

#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "moe/grouped/expert_tiles.cuh"
#include "moe/grouped/row_gather.cuh"
#include "quantized_gemm/dequantizing_mma_sm90.cuh"

namespace minfer::moe {

/// Dispatch policy: weights dequantised on their way through registers, tokens in expert order or gathered.
template <class Config_>
struct MainloopSm90TmaDequantizeExperts {
  using Config = Config_;
  static constexpr int Stages = Config::kStages;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using ArchTag = cutlass::arch::Sm90;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

}  // namespace minfer::moe

namespace cutlass::gemm::collective {

template <class Config, class TileShape_, class Codes, class StrideA, class ElementB, class StrideB, class TiledMma_, class GmemCopyA,
          class SmemLayoutA, class SmemCopyA, class TransformA, class GmemCopyB, class SmemLayoutB, class SmemCopyB, class TransformB>
struct CollectiveMma<minfer::moe::MainloopSm90TmaDequantizeExperts<Config>, TileShape_, Codes, StrideA, ElementB, StrideB, TiledMma_,
                     GmemCopyA, SmemLayoutA, SmemCopyA, TransformA, GmemCopyB, SmemLayoutB, SmemCopyB, TransformB>
    : minfer::w4a16::DequantizingMmaSm90<minfer::w4a16::StageSm90<Config, true>> {
  using S = minfer::w4a16::StageSm90<Config, true>;
  using Base = minfer::w4a16::DequantizingMmaSm90<S>;
  using DispatchPolicy = minfer::moe::MainloopSm90TmaDequantizeExperts<Config>;
  using TileShape = TileShape_;
  using Element = typename S::Element;
  using ExpertTile = minfer::moe::ExpertTile;
  using FullBarrier = typename S::FullBarrier;
  using EmptyBarrier = typename S::EmptyBarrier;
  using typename Base::PipelineState;
  static constexpr bool kRereadsThread = false;  // it keeps its tile in shared memory instead
  static constexpr int kTileM = S::kTileM, kTileN = S::kTileN, kTileK = S::kTileK, kHalves = kTileK / 64, kWeightRows = kTileM;
  /// Of many tokens zero points are always read, those of symmetric weights being filled in. There the tensor cores are the limit, and the
  /// loop that has a fifth fewer instructions seemed to cost time: Mixtral's layer of 4096 tokens took 5.1 and 5.2 ms with it and 4.9 with
  /// this one, but days apart, on H200s that may not have been the same.
  static constexpr bool kReadsZeros = S::kHasZeros && kTileN >= 128;
  static constexpr int kStep = 8;                                                 // tokens of a tile are rounded up to these
  static constexpr int kSmallBox = kStep, kLargeBox = kTileN >= 64 ? 64 : kStep;  // rows of TMA's loads of tokens
  using Gather = minfer::moe::RowGather<kTileN, kHalves, S::kStages, S::kBookBarrier - 1>;
  static_assert(S::kMmaM == 1 && S::kCluster == 1 && kTileN % kLargeBox == 0);

  struct Params {
    CUtensorMap weights;                               // [experts * n / 64, chunks of k, 256] of 8 bytes
    CUtensorMap scales, zeros;                         // [experts, k / group, n]
    CUtensorMap tokens, few_tokens;                    // [1, rows, k], in boxes of kLargeBox and kSmallBox rows
    typename Gather::template Source<Element> source;  // gather is null where tokens lie in order
    int32_t row_blocks;                                // of 64, of an expert's weight
    int32_t group_shift;                               // log2 of the group size; 30: one group
    int32_t weight_bytes;                              // of a stage, with scales and zeros
    bool has_zeros;
    uint64_t hint_tokens;
  };

  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    alignas(1024) Element activations[S::kStages][kTileN * kTileK];
    alignas(1024) uint4 weights[S::kStages][kTileM / 64][S::kSlices * S::kChunks][128];
    [[no_unique_address]] cute::conditional_t<S::kHasBook, typename S::BookStorage, cute::tuple<>> book;
    typename Epilogue::TensorStorage staging;
    alignas(128) typename S::Scale::Stored scales[S::kStages][S::kScaleRows][kTileM];
    [[no_unique_address]] cute::conditional_t<S::kHasZeros, typename S::Zeros, cute::tuple<>> zeros;
    [[no_unique_address]] cute::conditional_t<(S::kSlices > 1), typename S::Slices, cute::tuple<>> slices;
    alignas(8) uint64_t full[S::kStages], empty[S::kStages];
    typename Scheduler::SharedStorage scheduler;
    uint32_t source[kTileN];  // rows of a that are gathered: where they begin, in units of 16 bytes
    typename Epilogue::PipelineStorage epilogue;
  };

  // ---- set-up -------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.weights));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.scales));
    if (params.has_zeros) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.zeros));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.tokens));
  }
  template <class Storage>
  static CUTLASS_DEVICE void init_barriers(Params const& params, Storage& storage) {
    for (int s = 0; s < S::kStages; ++s) {
      FullBarrier::init(&storage.full[s], params.source.gather != nullptr ? 1 + Gather::kThreads : 1);
      EmptyBarrier::init(&storage.empty[s], S::kConsumers * 4);
    }
  }
  template <class Storage, class Location>
  CUTLASS_DEVICE CollectiveMma(Params const&, Storage&, int, int, Location const&) {}

  // ---- producers ----------------------------------------------------------------------------------------------------------------

  struct LoadInputs {
    bool ordered;
  };
  template <class Storage, class Location>
  static CUTLASS_DEVICE LoadInputs load_init(Params const& params, Storage&, Location const&) {
    return {params.source.gather == nullptr};
  }
  struct TileInputs {
    ExpertTile tile;
    int tokens;  // that TMA loads
    uint32_t bytes;
    uint64_t hint;
    int block, row;  // of the weights and of their scales
  };
  static CUTLASS_DEVICE TileInputs tile_inputs(Params const& params, LoadInputs const& load, ExpertTile const& tile) {
    using Hint = cute::TMA::CacheHintSm90;
    int const tokens = load.ordered ? (tile.tokens + kStep - 1) / kStep * kStep : 0;
    return {tile,
            tokens,
            uint32_t(params.weight_bytes + tokens * kTileK * 2),
            uint64_t(tile.alone ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL),
            tile.expert * params.row_blocks + tile.weight_tile * (kTileM / 64),
            tile.weight_tile * kTileM};
  }
  template <class Storage>
  static CUTLASS_DEVICE int load_first(Params const&, Storage&, PipelineState&, LoadInputs const&, TileInputs const&, int, int) {
    return 0;
  }
  template <class Storage>
  static CUTLASS_DEVICE void load(Params const& params, Storage& storage, PipelineState& state, LoadInputs const&, TileInputs const& inputs,
                                  int k_begin, int k_end) {
    auto const last = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
#pragma unroll 1
    for (int k = k_begin; k < k_end; ++k) {
      int const stage = state.index;
      EmptyBarrier::wait(&storage.empty[stage], state.phase);
      uint64_t* const full = &storage.full[stage];
      FullBarrier::arrive_and_expect_tx(full, inputs.bytes);
      cute::SM90_TMA_LOAD_3D::copy(&params.weights, full, inputs.hint, &storage.weights[stage], 0, k * S::kSlices * S::kChunks,
                                   inputs.block);
      int const group = (k * kTileK) >> params.group_shift;
      cute::SM90_TMA_LOAD_3D::copy(&params.scales, full, last, &storage.scales[stage], inputs.row, group, inputs.tile.expert);
      if constexpr (S::kHasZeros) {
        if (params.has_zeros)
          cute::SM90_TMA_LOAD_3D::copy(&params.zeros, full, last, &storage.zeros.of[stage], inputs.row, group, inputs.tile.expert);
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        int const column = k * kTileK + half * 64;
        Element* const rows = &storage.activations[stage][half * kTileN * 64];
        int token = 0;
        if constexpr (kLargeBox > kSmallBox) {
#pragma unroll 1
          for (; token + kLargeBox <= inputs.tokens; token += kLargeBox) {
            cute::SM90_TMA_LOAD_3D::copy(&params.tokens, full, params.hint_tokens, rows + token * 64, column, inputs.tile.row + token, 0);
          }
        }
#pragma unroll 1
        for (; token < inputs.tokens; token += kSmallBox) {
          cute::SM90_TMA_LOAD_3D::copy(&params.few_tokens, full, params.hint_tokens, rows + token * 64, column, inputs.tile.row + token, 0);
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
    typename Gather::Stages const stages{storage.source, storage.full, storage.empty,
                                         cute::cast_smem_ptr_to_uint(&storage.activations[0][0])};
    auto const at = [&](int t) { return items.at(t); };
    Gather::run(stages, at, int(blockIdx.x), items.count(), int(gridDim.x), items.k_tiles(), params.source, thread);
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  template <class Storage, class Barrier>
  static CUTLASS_DEVICE void mma_init(Params const& params, Storage& storage, int consumer, int thread, Barrier const& barrier) {
    Base::mma_init(storage, params.has_zeros, consumer, thread, barrier);
    if constexpr (kReadsZeros && S::kTwoLoops) {
      if (!params.has_zeros) {
        S::fill_zeros(storage, consumer, thread);
        barrier();
      }
    }
  }
  template <class Storage, class Accumulator, class Output, class AfterLast>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator, int k_count,
                                 Output const&, int consumer, int thread, AfterLast const&) {
    bool const reads_zeros = kReadsZeros || params.has_zeros;
    minfer::w4a16::multiply<S>(storage, state, accumulator, k_count, params.group_shift, reads_zeros, consumer, thread);
  }
  static CUTLASS_DEVICE void teardown() {}
};

}  // namespace cutlass::gemm::collective
