// Mainloop of the GEMM with quantised weights for sm_90: packed weights, scales, zero points and activations come by TMA, codes go from
// shared memory through registers, where they are dequantised to A fragments of WGMMA (or mma.sync), and activations are read in shared
// memory.
//
// A thread reads its own codes of a 64 x 64 weight block by one 16-byte access (two of 8-bit weights; w4_layout.h), dequantises them to
// four A fragments and issues four WGMMAs; while these run it dequantises the next block into the other set of registers. With mma.sync
// several warps of an SM scheduler take each other's time. The inner loop is one of five, by where scales are applied: mainloop_*_sm90.cuh.
// Pipeline: one pair of mbarriers a stage. Full: TMA's bytes. Empty: one arrival of each consumer warp, when the WGMMAs that read the
// stage's activations have retired, or mma.sync's sums of them are there.
#pragma once

#include "common/dependent_launch.cuh"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "quantized_gemm/dequantizing_mma_sm90.cuh"

namespace minfer::w4a16 {

/// Dispatch policy: stages by TMA, weights dequantised on their way through registers. Config names tile, format, scaling and slices.
template <class Config_>
struct MainloopSm90TmaDequantize {
  using Config = Config_;
  static constexpr int Stages = Config::kStages;
  using ClusterShape = cute::Shape<cute::Int<Config::kClusterM>, cute::_1, cute::_1>;
  using ArchTag = cutlass::arch::Sm90;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

}  // namespace minfer::w4a16

namespace cutlass::gemm::collective {

template <class Config, class TileShape_, class Codes, class StrideA, class Element, class StrideB, class TiledMma, class GmemCopyA,
          class SmemLayoutA, class SmemCopyA, class TransformA, class GmemCopyB, class SmemLayoutB, class SmemCopyB, class TransformB>
struct CollectiveMma<minfer::w4a16::MainloopSm90TmaDequantize<Config>, TileShape_, Codes, StrideA, Element, StrideB, TiledMma, GmemCopyA,
                     SmemLayoutA, SmemCopyA, TransformA, GmemCopyB, SmemLayoutB, SmemCopyB, TransformB>
    : minfer::w4a16::DequantizingMmaSm90<minfer::w4a16::StageSm90<Config, false>> {
  using S = minfer::w4a16::StageSm90<Config, false>;
  using Base = minfer::w4a16::DequantizingMmaSm90<S>;
  using DispatchPolicy = minfer::w4a16::MainloopSm90TmaDequantize<Config>;
  using TileShape = TileShape_;
  using FullBarrier = typename S::FullBarrier;
  using EmptyBarrier = typename S::EmptyBarrier;
  using typename Base::PipelineState;
  static constexpr bool kRereadsThread = S::kRereadsThread, kRelocates = false;
  static constexpr bool kKeepsRanges = Config::kInPlaceRanges;
  static_assert(!kKeepsRanges || S::kSlices == 1);
  /// Stages. More take the predecessor's bandwidth: on 18 problems of 1 to 1200 tokens (H200) 2 stages were 3.5 % faster than none, 8
  /// stages 1.2, 24 stages 4 % slower. Loaded into the ring instead, 2 to 12 stages were 4.7 % faster than none.
  static constexpr int kPrefetched = 2;

  struct Params {
    CUtensorMap weights;      // [n / 64, chunks of k, 256] of 8 bytes
    CUtensorMap activations;  // [1, m, k]
    CUtensorMap scales;       // [k / group, n], 2 bytes or 1
    CUtensorMap zeros;        // likewise
    uint64_t hint_weights;
    int32_t group_shift;  // log2 of the group size; 30: one group
    int32_t stage_bytes;
    int32_t early_stages;  // whose weights are loaded before the predecessor has finished: 0 unless nobody writes them
    bool has_zeros;
  };
  template <class Epilogue, class Scheduler>
  using SharedStorage = typename S::template SharedStorage<typename Epilogue::TensorStorage, typename Scheduler::SharedStorage,
                                                           typename Epilogue::PipelineStorage>;

  // ---- set-up -------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.weights));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.activations));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.scales));
    if (params.has_zeros) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.zeros));
  }
  template <class Storage>
  static CUTLASS_DEVICE void init_barriers(Params const&, Storage& storage) {
    for (int s = 0; s < S::kStages; ++s) {
      FullBarrier::init(&storage.full[s], 1);
      EmptyBarrier::init(&storage.empty[s], S::kConsumers * 4 * S::kCluster);
    }
  }
  template <class Storage, class Location>
  CUTLASS_DEVICE CollectiveMma(Params const&, Storage&, int, int, Location const&) {}

  // ---- producer -----------------------------------------------------------------------------------------------------------------

  struct LoadInputs {
    int rank;  // in the cluster
  };
  struct TileInputs {
    int m, n;
  };
  template <class Storage, class Location>
  static CUTLASS_DEVICE LoadInputs load_init(Params const&, Storage&, Location const& at) {
    return {at.rank};
  }
  template <class Tile>
  static CUTLASS_DEVICE TileInputs tile_inputs(Params const&, LoadInputs const&, Tile const& tile) {
    return {tile.m(), tile.n()};
  }

  /// The first k tiles find every stage empty. Their weights are on their way, to L2 or, where nobody writes them, into the ring, before
  /// the predecessor has finished. Returns the k tiles that were loaded.
  template <class Storage>
  static CUTLASS_DEVICE int load_first(Params const& params, Storage& storage, PipelineState& state, LoadInputs const& inputs,
                                       TileInputs const& tile, int k, int k_count) {
    int const ahead = k_count < S::kStages ? k_count : S::kStages;
    int const early = ahead < params.early_stages ? ahead : params.early_stages;
#pragma unroll 1
    for (int i = 0; i < early; ++i) load_weights(params, storage, i, tile.m, k + i);
#pragma unroll 1
    for (int i = 0; i < ahead && i < kPrefetched && early == 0; ++i) prefetch_weights(params, tile.m, k + i);
    minfer::wait_for_predecessor();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      if (i >= early) load_weights(params, storage, i, tile.m, k + i);
      load_activations(params, storage, inputs.rank, i, tile.n, k + i);
      state.advance();
    }
    return ahead;
  }
  template <class Storage>
  static CUTLASS_DEVICE void load(Params const& params, Storage& storage, PipelineState& state, LoadInputs const& inputs,
                                  TileInputs const& tile, int k, int k_end) {
#pragma unroll 1
    for (; k < k_end; ++k) {
      EmptyBarrier::wait(&storage.empty[state.index], state.phase);
      load_weights(params, storage, state.index, tile.m, k);
      load_activations(params, storage, inputs.rank, state.index, tile.n, k);
      state.advance();
    }
  }
  static CUTLASS_DEVICE void load_tail(PipelineState&) {}

  static constexpr int kAuxiliaryWarps = 0;

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  template <class Storage, class Barrier>
  static CUTLASS_DEVICE void mma_init(Params const& params, Storage& storage, int consumer, int thread, Barrier const& barrier) {
    Base::mma_init(storage, params.has_zeros, consumer, thread, barrier);
  }
  template <class Storage, class Accumulator, class Output, class AfterLast>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator, int k_count,
                                 Output const&, int consumer, int thread, AfterLast const&) {
    minfer::w4a16::multiply<S>(storage, state, accumulator, k_count, params.group_shift, params.has_zeros, consumer, thread);
  }

  /// No CTA of a cluster may leave while another still sends to it.
  static CUTLASS_DEVICE void teardown() {
    if constexpr (S::kCluster > 1) {
      cute::cluster_arrive();
      cute::cluster_wait();
    }
  }

 private:
  template <class Storage>
  static CUTLASS_DEVICE void load_weights(Params const& params, Storage& storage, int stage, int tile_m, int k) {
    uint64_t* barrier = &storage.full[stage];
    auto const last = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
    FullBarrier::arrive_and_expect_tx(barrier, uint32_t(params.stage_bytes));
    cute::SM90_TMA_LOAD_3D::copy(&params.weights, barrier, params.hint_weights, &storage.weights[stage], 0, k * S::kSlices * S::kChunks,
                                 tile_m * (S::kTileM / 64));
    int const group = (k * S::kTileK) >> params.group_shift;
    cute::SM90_TMA_LOAD_3D::copy(&params.scales, barrier, last, &storage.scales[stage], tile_m * S::kTileM, group, 0);
    if constexpr (S::kHasZeros) {
      if (params.has_zeros)
        cute::SM90_TMA_LOAD_3D::copy(&params.zeros, barrier, last, &storage.zeros.of[stage], tile_m * S::kTileM, group, 0);
    }
  }
  /// What load_weights will request, into L2.
  static CUTLASS_DEVICE void prefetch_weights(Params const& params, int tile_m, int k) {
    using Prefetch = cute::SM90_TMA_LOAD_3D::PREFETCH;
    Prefetch::copy(&params.weights, 0, k * S::kSlices * S::kChunks, tile_m * (S::kTileM / 64));
    int const group = (k * S::kTileK) >> params.group_shift;
    Prefetch::copy(&params.scales, tile_m * S::kTileM, group, 0);
    if constexpr (S::kHasZeros) {
      if (params.has_zeros) Prefetch::copy(&params.zeros, tile_m * S::kTileM, group, 0);
    }
  }
  // Each CTA of a cluster loads its part of the tokens for all of them.
  template <class Storage>
  static CUTLASS_DEVICE void load_activations(Params const& params, Storage& storage, int rank, int stage, int tile_n, int k) {
    constexpr int kTokens = S::kTileN / S::kCluster;
    auto const last = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
#pragma unroll
    for (int b = 0; b < S::kSlices * S::kBlocks; ++b) {
      typename S::Element* destination = &storage.activations[stage][(b * S::kTileN + rank * kTokens) * minfer::w4a16::kBlockK];
      int const column = k * S::kTileK + b * minfer::w4a16::kBlockK, token = tile_n * S::kTileN + rank * kTokens;
      if constexpr (S::kCluster > 1) {
        cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&params.activations, &storage.full[stage], uint16_t((1 << S::kCluster) - 1), last,
                                               destination, column, token, 0);
      } else {
        cute::SM90_TMA_LOAD_3D::copy(&params.activations, &storage.full[stage], last, destination, column, token, 0);
      }
    }
  }
};

}  // namespace cutlass::gemm::collective
