// GEMM with 4-bit and 8-bit weights for sm_90a: TMA + WGMMA with the weights in registers, persistent, warp specialised; in tiles of 8 tokens,
// and some of 16, mma.sync takes WGMMA's place.
//
// The weights' rows (the caller's n) are the MMA's m, the tokens (the caller's m) its n, so that a few tokens are one narrow instruction.
// Warp roles. Warpgroup 0: its warp 0 is the producer, which walks the schedule and fills a ring of kStages stages: packed weights, scales,
// zeros and activations, all by TMA. Warpgroups 1 to kConsumers: 64 rows of the tile each, or, sliced-K, a slice of each stage's k of 64 rows,
// whose sums the first slice's warpgroup adds up. A thread reads its own codes of a 64 x 64 block by one
// 16-byte access (two of 8-bit weights; w4_layout.h), dequantises them to four A fragments and issues four WGMMAs; while these run it
// dequantises the next block into the other set of registers. With mma.sync several warps of an SM scheduler take each other's time.
// Pipelines. Ring: one pair of mbarriers a stage (full: TMA bytes; empty: one arrival of each consumer warp, when the WGMMAs that read the
// stage's activations have retired, or mma.sync's sums of them are there). C and D: epilogue_sm90.cuh.
// Tile walk: TileScheduler (data-parallel, split-K or stream-K at run time); pieces meet in the workspace (split_reduction.cuh), or, split-K of
// one tile to a cluster, in the owner's shared memory (cluster_split.h).
// Start: the first stages of weights, scales and zeros come into L2 under the predecessor's tail; everything is read after it
// (dependent_launch.cuh). Where the caller vouches that nobody writes them any more, they come into the ring.
// Limits: activations 16-byte aligned in base and rows; groups of 32 (fine; nvfp4: 16) or 128 times a power of two, or all of k.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "common/dependent_launch.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "gemm/launch_sm90.cuh"
#include "quantized_gemm/mainloop_sm90.cuh"
#include "quantized_gemm/partial_sums_sm90.cuh"

namespace minfer::w4a16 {

template <class Config>
struct W4A16Sm90 {
  using S = StageSm90<Config>;
  using SharedStorage = typename S::SharedStorage;
  using Ring = typename S::Ring;
  using Epilogue = typename S::Epilogue;
  using Reduction = typename S::Reduction;
  using FullBarrier = typename S::FullBarrier;
  using EmptyBarrier = typename S::EmptyBarrier;

  struct Params {
    CUtensorMap weights;      // [n / 64, chunks of k, 256] of 8 bytes
    CUtensorMap activations;  // [1, m, k]
    CUtensorMap scales;       // [k / group, n], 2 bytes or 1
    CUtensorMap zeros;        // likewise
    gemm::EpilogueSm90Params epilogue;
    gemm::TileSchedulerParams schedule;
    gemm::SplitWorkspace split;
    uint64_t hint_weights;
    int32_t group_shift;  // log2 of the group size; 30: one group
    int32_t stage_bytes;
    int32_t early_stages;    // whose weights are loaded before the predecessor has finished: 0 unless nobody writes them
    int32_t cluster_pieces;  // > 0: the pieces of a tile are the CTAs of a cluster, its last one owns the tile
    bool has_zeros;
  };

  /// Stages. More take the predecessor's bandwidth: on 18 problems of 1 to 1200 tokens (H200) 2 stages were 3.5 % faster than none, 8 stages 1.2,
  /// 24 stages 4 % slower. Loaded into the ring instead, 2 to 12 stages were 4.7 % faster than none.
  static constexpr int kPrefetched = 2;

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (cute::cast_smem_ptr_to_uint(smem) % 1024 != 0) __trap();
    int const warpgroup = cutlass::canonical_warp_group_idx();
    int const warp = cutlass::canonical_warp_idx_sync();

    allow_dependent_launch();
    if (warp == 0 && cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.weights));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.activations));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.scales));
      if (params.has_zeros) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.zeros));
      if (params.epilogue.store_by_tma) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.epilogue.tma_d));
      if (params.epilogue.load_c_by_tma) {
        cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.epilogue.tma_c));
      }
      for (int s = 0; s < S::kStages; ++s) {
        FullBarrier::init(&storage.full[s], 1);
        EmptyBarrier::init(&storage.empty[s], S::kConsumers * 4 * S::kCluster);
      }
      Epilogue::initialize(storage.epilogue_small);
      if constexpr (S::kMaxPieces > 0) {
        if (params.cluster_pieces > 0) {
          for (int c = 0; c < S::kRowGroups; ++c) {
            FullBarrier::init(&storage.pieces.full[c], 1);
            FullBarrier::arrive_and_expect_tx(&storage.pieces.full[c], uint32_t(params.cluster_pieces * S::kValues * 128 * 4));
          }
        }
      }
      cutlass::arch::fence_barrier_init();
    }
    int const rank = S::kCluster > 1 ? int(cute::block_rank_in_cluster()) : 0;
    if (S::kCluster > 1 || (S::kMaxPieces > 0 && params.cluster_pieces > 0)) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }

    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<S::kProducerRegisters>();
      if (warp == 0 && cute::elect_one_sync()) produce(params, storage, rank);
    } else {
      cutlass::arch::warpgroup_reg_alloc<S::kConsumerRegisters>();
      consume(params, storage, rank, warpgroup - 1, int(threadIdx.x) % 128);
    }
    if constexpr (S::kCluster > 1) {  // no CTA may leave while another still sends to it
      cute::cluster_arrive();
      cute::cluster_wait();
    }
  }

  // ---- producer -----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void load_weights(Params const& params, SharedStorage& storage, int stage, int tile_m, int k) {
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
  /// What load_weights will ask for, into L2.
  static CUTLASS_DEVICE void prefetch_weights(Params const& params, int tile_m, int k) {
    using Prefetch = cute::SM90_TMA_LOAD_3D::PREFETCH;
    Prefetch::copy(&params.weights, 0, k * S::kSlices * S::kChunks, tile_m * (S::kTileM / 64));
    int const group = (k * S::kTileK) >> params.group_shift;
    Prefetch::copy(&params.scales, tile_m * S::kTileM, group, 0);
    if constexpr (S::kHasZeros) {
      if (params.has_zeros) Prefetch::copy(&params.zeros, tile_m * S::kTileM, group, 0);
    }
  }
  // Each CTA of a cluster fetches its share of the tokens for all of them.
  static CUTLASS_DEVICE void load_activations(Params const& params, SharedStorage& storage, int rank, int stage, int tile_n, int k) {
    constexpr int kShare = S::kTileN / S::kCluster;
    auto const last = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
#pragma unroll
    for (int b = 0; b < S::kSlices * S::kBlocks; ++b) {
      typename S::Element* destination = &storage.activations[stage][(b * S::kTileN + rank * kShare) * kBlockK];
      int const column = k * S::kTileK + b * kBlockK, token = tile_n * S::kTileN + rank * kShare;
      if constexpr (S::kCluster > 1) {
        cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&params.activations, &storage.full[stage], uint16_t((1 << S::kCluster) - 1), last,
                                               destination, column, token, 0);
      } else {
        cute::SM90_TMA_LOAD_3D::copy(&params.activations, &storage.full[stage], last, destination, column, token, 0);
      }
    }
  }

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int rank) {
    Ring ring;
    ring.phase = 1;  // a fresh barrier's previous phase counts as passed: every stage starts empty
    bool first = true;
    gemm::TileScheduler scheduler(params.schedule, int(blockIdx.x) / S::kCluster);
    for (gemm::WorkItem item = scheduler.next(); item.valid; item = scheduler.next()) {
      gemm::TileCoord const tile = gemm::TileScheduler::coordinate(params.schedule, item.tile);
      int const tile_m = tile.m * S::kCluster + rank;
      int k = item.k_begin;
      int const k_end = item.k_begin + item.k_count;
      if (first) {
        int const ahead = item.k_count < S::kStages ? item.k_count : S::kStages;
        int const early = ahead < params.early_stages ? ahead : params.early_stages;
#pragma unroll 1
        for (int i = 0; i < early; ++i) load_weights(params, storage, i, tile_m, k + i);
#pragma unroll 1
        for (int i = 0; i < ahead && i < kPrefetched && early == 0; ++i) prefetch_weights(params, tile_m, k + i);
        wait_for_predecessor();
#pragma unroll 1
        for (int i = 0; i < ahead; ++i) {
          if (i >= early) load_weights(params, storage, i, tile_m, k + i);
          load_activations(params, storage, rank, i, tile.n, k + i);
          ring.advance();
        }
        k += ahead;
        first = false;
      }
#pragma unroll 1
      for (; k < k_end; ++k) {
        EmptyBarrier::wait(&storage.empty[ring.index], ring.phase);
        load_weights(params, storage, ring.index, tile_m, k);
        load_activations(params, storage, rank, ring.index, tile.n, k);
        ring.advance();
      }
    }
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int rank, int consumer, int thread) {
    using namespace cute;
    int const rows = consumer % S::kRowGroups;
    Epilogue epilogue(params.epilogue, storage.epilogue, storage.epilogue_small, rows, thread);
    Ring ring;
    gemm::TileScheduler scheduler(params.schedule, int(blockIdx.x) / S::kCluster);
    gemm::WorkItem item = scheduler.next();
    if constexpr (S::kHasZeros && !S::kSync) {
      if (!params.has_zeros) {
        S::fill_zeros(storage, consumer, thread);
        if constexpr (S::kSlices > 1) {  // each warpgroup has filled in a part of its rows'
          asm volatile("bar.sync %0, %1;" ::"n"(S::kBookBarrier), "n"(S::kConsumers * 128) : "memory");
        } else {
          epilogue.synchronize();
        }
      }
    }
    if constexpr (S::kHasBook) {
      fill_book<S::kType, S::kFormat>(storage.book.bytes, consumer * 128 + thread, S::kConsumers * 128);
      asm volatile("bar.sync %0, %1;" ::"n"(S::kBookBarrier), "n"(S::kConsumers * 128) : "memory");
    }
    wait_for_predecessor();  // C, bias, D and the workspace are read and written from here
    for (; item.valid; item = scheduler.next()) {
      gemm::TileCoord const tile = gemm::TileScheduler::coordinate(params.schedule, item.tile);
      int const row = (tile.m * S::kCluster + rank) * S::kTileM, column = tile.n * S::kTileN;
      if constexpr (S::kForget) epilogue.place(storage.epilogue, storage.epilogue_small, rows, thread);
      if (item.owner() && consumer < S::kRowGroups) epilogue.prefetch(row, column, 0, rows);

      Tensor accumulator = partition_fragment_C(typename S::TiledMma{}, Shape<Int<64 * S::kMmaM>, Int<S::kTileN>>{});  // (MMA,MMA_M,MMA_N)
      static_assert(decltype(size(accumulator))::value == S::kValues);
      multiply<S>(storage, ring, accumulator, item.k_count, params.group_shift, params.has_zeros, consumer, thread);
      if constexpr (S::kForget) {
        int place;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(place));
        epilogue.place(storage.epilogue, storage.epilogue_small, (place / 128 - 1) % S::kRowGroups, place % 128);
      }
      if (!add_slices<S>(storage, accumulator, consumer, thread)) continue;

      if constexpr (S::kMaxPieces > 0) {
        if (params.cluster_pieces > 0) {  // the CTA's only tile
          if (!item.owner()) {
            send_piece<S>(storage, accumulator, int(cute::block_rank_in_cluster()), params.cluster_pieces, rows, thread);
            break;
          }
          add_pieces<S>(storage, accumulator, params.cluster_pieces, rows, thread);
          epilogue.store(accumulator, row, column, 0, rows);
          break;
        }
      }
      auto const place = [&](int slot) { return (slot * S::kCluster + rank) * S::kRowGroups + rows; };
      auto const barrier = [&] { epilogue.synchronize(); };
      if (!item.owner()) {
        if constexpr (S::kTagged) {
          Reduction::publish(params.split, place(item.slot), accumulator, thread);
        } else {
          Reduction::publish(params.split, place(item.slot), accumulator, thread, barrier);
        }
        continue;
      }
      if constexpr (S::kTagged) {
        auto const slot_of = [&](int i) { return place(item.first_piece + i); };
        if (item.pieces > 0) Reduction::gather(params.split, slot_of, item.pieces, accumulator, thread);
      } else {
        for (int piece = 0; piece < item.pieces; ++piece) {
          Reduction::add(params.split, place(item.first_piece + piece), accumulator, thread, barrier);
        }
      }
      epilogue.store(accumulator, row, column, 0, rows);
    }
    if (thread == 0 && consumer < S::kRowGroups) cute::tma_store_wait<0>();  // shared memory must outlive the reads of the last stores
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    w4a16_sm90_kernel(__grid_constant__ typename W4A16Sm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  W4A16Sm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_w4a16_sm90(gemm::GemmLaunchArguments const& arguments) {
  using Kernel = W4A16Sm90<Config>;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  if (Status status = gemm::describe_schedule<Config>(arguments, &params.schedule, &params.split); !status.ok()) return status;
  int64_t const blocks_n = gemm::ceil_div(problem.n, kBlockN), blocks_k = gemm::ceil_div(problem.k, kBlockK);
  params.cluster_pieces = cluster_pieces(Config::kFormat, Config::kTileN, Config::kCtasPerSm, params.schedule, *arguments.device);
  params.group_shift = group_shift(problem.group_size, problem.k);
  params.has_zeros = Kernel::S::kHasZeros && operands.b_zeros != nullptr;
  params.hint_weights =
      uint64_t(params.schedule.tiles_n == 1 ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);

  int64_t const chunks_k = blocks_k * (4 / Kernel::S::kChunkSlabs);
  int64_t const weight_extents[3] = {kChunkBytes / 8, chunks_k, blocks_n}, weight_strides[2] = {kChunkBytes, chunks_k * kChunkBytes};
  int const weight_box[3] = {kChunkBytes / 8, Kernel::S::kSlices * Kernel::S::kChunks, Config::kTileM / 64};
  Status status =
      encode_tensor_map(&params.weights, CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, operands.b, weight_extents, weight_strides, weight_box);
  if (!status.ok()) return status;
  status = encode_tensor_map_planes(&params.activations, problem.ab_type, operands.a, problem.k, problem.m, 1, operands.lda, 0, kBlockK,
                                    Config::kTileN / Kernel::S::kCluster);
  if (!status.ok()) return status;
  int const group_rows = std::max(1, Config::kTileK >> params.group_shift);
  int64_t const groups = params.group_shift >= 30 ? 1 : gemm::ceil_div(problem.k, problem.group_size);
  int64_t const scale_extents[3] = {problem.n, groups, 1};
  int const scale_box[3] = {Config::kTileM, group_rows, 1};
  constexpr int kScaleBytes = scale_bytes_of(Config::kFormat);
  constexpr auto kScaleType = kScaleBytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  int64_t const scale_strides[2] = {operands.ld_scales * kScaleBytes, operands.ld_scales * kScaleBytes * groups};
  status = encode_tensor_map(&params.scales, kScaleType, 3, operands.b_scales, scale_extents, scale_strides, scale_box);
  if (!status.ok()) return status;
  if (params.has_zeros) {
    int64_t const zero_strides[2] = {operands.ld_zeros * 2, operands.ld_zeros * 2 * groups};
    status = encode_tensor_map(&params.zeros, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, operands.b_zeros, scale_extents, zero_strides, scale_box);
    if (!status.ok()) return status;
  }
  params.stage_bytes = Config::kTileM * Config::kTileK * bits_of(Config::kFormat) / 8 + Config::kTileN * Config::kTileK * 2 +
                       Config::kTileM * group_rows * (kScaleBytes + (params.has_zeros ? 2 : 0));
  // 4096 x 14336 at m = 16 by clusters: 10.8 us, with all stages 11.7.
  params.early_stages = !operands.b_is_constant ? 0 : params.cluster_pieces > 0 ? 2 : Config::kStages;
  status = gemm::describe_epilogue<typename Kernel::Epilogue>(problem, operands, &params.epilogue);
  if (!status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  dim3 const cluster(params.cluster_pieces > 0 ? params.cluster_pieces + 1 : Config::kClusterM);
  return gemm::launch_sm90<Config>(&w4a16_sm90_kernel<Config>, params, arguments, params.schedule.workers, Kernel::S::kSmemBytes,
                                   shared_memory_allowed, cluster);
}

}  // namespace minfer::w4a16
