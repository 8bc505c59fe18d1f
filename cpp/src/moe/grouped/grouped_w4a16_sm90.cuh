// Grouped GEMM with quantised weights for sm_90a: grouped_sm90.cuh's walk over the experts' tiles, the W4A16 GEMM's stages and mainloops.
//
// Warp roles. Warpgroup 0: warp 0 fills the ring's weights, scales and zeros, and the tokens where they lie in order, by TMA; where they are
// gathered, other warps fetch them by cp.async. The other warpgroups are consumers: 64 rows of the tile each, or a slice of each stage's k
// of 64 rows. Two CTAs to an SM hide each other's starts and ends.
// A tile always computes kTileN tokens; those it does not have are what an earlier stage left, in columns of the sums that nobody stores.
// It has a skeleton of its own: composed over gemm/kernel_sm90.cuh the compiler keeps kernel parameters in registers across the walks and makes
// other code (the 64 x 8 x 256 int4 kernel has 2272 instructions, and 69 registers instead of 62), whose time has not been measured yet.
// Limits: k and n multiples of 8, activations 16-byte aligned; groups as the kernel's; kMaxGroupedExperts experts.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "common/dependent_launch.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "moe/grouped/expert_tiles.cuh"
#include "moe/grouped/grouped_epilogue.cuh"
#include "moe/grouped/grouped_launch.cuh"
#include "moe/grouped/row_gather.cuh"
#include "quantized_gemm/dequantizing_mma_sm90.cuh"

namespace minfer::moe {

/// What the epilogue and the tile walk need of a CTA's shared memory.
template <class Config>
struct GroupedW4A16Storage {
  static constexpr int kRowGroups = (Config::kThreads / 128 - 1) / Config::kSlices;
  static constexpr int kTileRows = Config::kTileM / kRowGroups, kStep = 8;
  using Tiles = ExpertTiles<Config::kTileN, kStep, panel_of(Config::kTileM, Config::kTileN)>;
  using Epilogue = GroupedEpilogue<Config::kType, kTileRows, Config::kTileN, true>;
  struct Buffers {
    alignas(1024) char staged[kRowGroups][Epilogue::kBytes];
  };
  struct Small {
    typename Tiles::Storage tiles;
    uint32_t source[Config::kTileN];
    ExpertTile current[kRowGroups];  // what a consumer needs of its tile after the mainloop, which has no registers to spare
  };
};

template <class Config>
struct GroupedW4A16Sm90 {
  using Storage = GroupedW4A16Storage<Config>;
  using S = w4a16::StageSm90<Config, true>;
  using SharedStorage = typename S::template SharedStorage<typename Storage::Buffers, cute::tuple<>, typename Storage::Small>;
  using Ring = typename S::PipelineState;
  using Tiles = typename Storage::Tiles;
  using Epilogue = typename Storage::Epilogue;
  using FullBarrier = typename S::FullBarrier;
  using EmptyBarrier = typename S::EmptyBarrier;
  using Element = typename S::Element;
  static constexpr int kTileM = S::kTileM, kTileN = S::kTileN, kTileK = S::kTileK, kHalves = kTileK / 64, kStep = Storage::kStep;
  static constexpr int kSmallBox = kStep, kLargeBox = kTileN >= 64 ? 64 : kStep;  // rows of TMA's loads of tokens
  using Gather = RowGather<kTileN, kHalves, S::kStages, S::kBookBarrier - 1>;
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
  static_assert(S::kMmaM == 1 && S::kCluster == 1 && kTileN % kLargeBox == 0);

  struct Params {
    CUtensorMap weights;             // [experts * n / 64, chunks of k, 256] of 8 bytes
    CUtensorMap scales, zeros;       // [experts, k / group, n]
    CUtensorMap tokens, few_tokens;  // [1, rows, k], in boxes of kLargeBox and kSmallBox rows
    ExpertRows rows;
    typename Gather::template Source<Element> source;  // gather is null where tokens lie in order
    GroupedEpilogueParams epilogue;
    int32_t k, k_tiles, weight_tiles, row_blocks;  // row_blocks: of 64, of an expert's weight
    int32_t group_shift;                           // log2 of the group size; 30: one group
    int32_t weight_bytes;                          // of a stage, with scales and zeros
    bool has_zeros;
    uint64_t hint_tokens;
  };

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (cute::cast_smem_ptr_to_uint(smem) % 1024 != 0) __trap();
    int const thread = int(threadIdx.x);
    int const warpgroup = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();

    allow_dependent_launch();
    if (warp == 0 && cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.weights));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.scales));
      if (params.has_zeros) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.zeros));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.tokens));
      for (int s = 0; s < S::kStages; ++s) {
        FullBarrier::init(&storage.full[s], params.source.gather != nullptr ? 1 + Gather::kThreads : 1);
        EmptyBarrier::init(&storage.empty[s], S::kConsumers * 4);
      }
      cutlass::arch::fence_barrier_init();
    }
    if constexpr (S::kHasBook) {
      if (warpgroup == 0) w4a16::fill_book<S::kType, S::kFormat>(storage.book.bytes, thread, 128);
    }
    wait_for_predecessor();
    Tiles::build(storage.epilogue.tiles, params.rows, params.weight_tiles, thread,
                 S::kThreads);  // ends with a barrier of all threads

    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<S::kProducerRegisters>();
      if (warp == 0) {
        if (cute::elect_one_sync()) produce(params, storage);
      } else if (params.source.gather != nullptr && warp <= Gather::kWarps) {
        gather(params, storage, thread - 32);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<S::kConsumerRegisters>();
      consume(params, storage, warpgroup - 1, thread % 128);
    }
  }

  // ---- producers ----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage) {
    using Hint = cute::TMA::CacheHintSm90;
    auto const last = uint64_t(Hint::EVICT_LAST);
    Ring ring;
    ring.phase = 1;  // a fresh barrier's previous phase counts as passed: every stage starts empty
    typename Tiles::Storage const& walk = storage.epilogue.tiles;
    int const tiles = Tiles::count(walk, params.rows);
    bool const ordered = params.source.gather == nullptr;
    for (int t = int(blockIdx.x); t < tiles; t += int(gridDim.x)) {
      ExpertTile const tile = Tiles::at(walk, params.rows, params.weight_tiles, t);
      int const tokens = ordered ? (tile.tokens + kStep - 1) / kStep * kStep : 0;
      uint32_t const bytes = uint32_t(params.weight_bytes + tokens * kTileK * 2);
      uint64_t const hint = uint64_t(tile.alone ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL);
      int const block = tile.expert * params.row_blocks + tile.weight_tile * (S::kTileM / 64), row = tile.weight_tile * S::kTileM;
#pragma unroll 1
      for (int k = 0; k < params.k_tiles; ++k) {
        int const stage = ring.index;
        EmptyBarrier::wait(&storage.empty[stage], ring.phase);
        uint64_t* const full = &storage.full[stage];
        FullBarrier::arrive_and_expect_tx(full, bytes);
        cute::SM90_TMA_LOAD_3D::copy(&params.weights, full, hint, &storage.weights[stage], 0, k * S::kSlices * S::kChunks, block);
        int const group = (k * kTileK) >> params.group_shift;
        cute::SM90_TMA_LOAD_3D::copy(&params.scales, full, last, &storage.scales[stage], row, group, tile.expert);
        if constexpr (S::kHasZeros) {
          if (params.has_zeros) cute::SM90_TMA_LOAD_3D::copy(&params.zeros, full, last, &storage.zeros.of[stage], row, group, tile.expert);
        }
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          int const column = k * kTileK + half * 64;
          Element* const rows = &storage.activations[stage][half * kTileN * 64];
          int token = 0;
          if constexpr (kLargeBox > kSmallBox) {
#pragma unroll 1
            for (; token + kLargeBox <= tokens; token += kLargeBox) {
              cute::SM90_TMA_LOAD_3D::copy(&params.tokens, full, params.hint_tokens, rows + token * 64, column, tile.row + token, 0);
            }
          }
#pragma unroll 1
          for (; token < tokens; token += kSmallBox) {
            cute::SM90_TMA_LOAD_3D::copy(&params.few_tokens, full, params.hint_tokens, rows + token * 64, column, tile.row + token, 0);
          }
        }
        ring.advance();
      }
    }
  }

  static CUTLASS_DEVICE void gather(Params const& params, SharedStorage& storage, int thread) {
    typename Gather::Stages const stages{storage.epilogue.source, storage.full, storage.empty,
                                         cute::cast_smem_ptr_to_uint(&storage.activations[0][0])};
    auto const at = [&](int t) { return Tiles::at(storage.epilogue.tiles, params.rows, params.weight_tiles, t); };
    Gather::run(stages, at, int(blockIdx.x), Tiles::count(storage.epilogue.tiles, params.rows), int(gridDim.x), params.k_tiles,
                params.source, thread);
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int consumer, int thread) {
    using namespace cute;
    int const rows = consumer % S::kRowGroups;
    Epilogue epilogue(params.epilogue, &storage.staging.staged[rows][0], thread, rows + 1);
    typename Tiles::Storage const& walk = storage.epilogue.tiles;
    ExpertTile& current = storage.epilogue.current[rows];
    Ring ring;
    if constexpr (S::kHasZeros && !S::kSync) {
      if (!params.has_zeros) {
        S::fill_zeros(storage, consumer, thread);
        asm volatile("bar.sync %0, %1;" ::"n"(S::kBookBarrier), "n"(S::kConsumers * 128) : "memory");
      }
    }
    int const tiles = Tiles::count(walk, params.rows);
    clear_rows_behind(params.rows, walk, params.epilogue, consumer * 128 + thread, S::kConsumers * 128);
    for (int t = int(blockIdx.x); t < tiles; t += int(gridDim.x)) {
      if (thread == 0 && consumer < S::kRowGroups) current = Tiles::at(walk, params.rows, params.weight_tiles, t);
      Tensor accumulator = partition_fragment_C(typename S::TiledMma{}, Shape<_64, Int<kTileN>>{});  // (MMA,MMA_M,MMA_N)
      w4a16::multiply<S>(storage, ring, accumulator, params.k_tiles, params.group_shift, params.has_zeros, consumer, thread);
      if (!w4a16::add_slices<S>(storage, accumulator, consumer, thread)) continue;
      epilogue.synchronize();
      ExpertTile const tile = current;
      int const row = tile.weight_tile * S::kTileM + rows * 64;
      epilogue.prefetch(tile, row);
      epilogue.store(accumulator, tile, row);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    grouped_w4a16_sm90_kernel(__grid_constant__ typename GroupedW4A16Sm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  GroupedW4A16Sm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_grouped_w4a16_sm90(GroupedLaunchArguments const& arguments) {
  using Kernel = GroupedW4A16Sm90<Config>;
  using S = typename Kernel::S;
  GroupedProblem const& problem = *arguments.problem;
  GroupedOperands const& operands = *arguments.operands;
  typename Kernel::Params params{};
  int64_t const n = problem.n, k = problem.k;
  int64_t const blocks_n = (n + w4a16::kBlockN - 1) / w4a16::kBlockN, blocks_k = (k + w4a16::kBlockK - 1) / w4a16::kBlockK;
  params.group_shift = w4a16::group_shift(problem.group_size, k);
  params.has_zeros = S::kHasZeros && operands.b_zeros != nullptr;

  int64_t const chunks_k = blocks_k * (4 / S::kChunkSlabs), row_bytes = chunks_k * w4a16::kChunkBytes;
  int64_t const weight_extents[3] = {w4a16::kChunkBytes / 8, chunks_k, blocks_n * problem.experts};
  int64_t const weight_strides[2] = {w4a16::kChunkBytes, row_bytes};
  int const weight_box[3] = {w4a16::kChunkBytes / 8, S::kSlices * S::kChunks, Config::kTileM / 64};
  Status status =
      encode_tensor_map(&params.weights, CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, operands.b, weight_extents, weight_strides, weight_box);
  if (!status.ok()) return status;
  int const group_rows = std::max(1, Config::kTileK >> params.group_shift);
  int64_t const groups = params.group_shift >= 30 ? 1 : (k + problem.group_size - 1) / problem.group_size;
  int64_t const scale_extents[3] = {n, groups, problem.experts};
  int const scale_box[3] = {Config::kTileM, group_rows, 1};
  constexpr int kScaleBytes = scale_bytes_of(Config::kFormat);
  constexpr auto kScaleType = kScaleBytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  if (operands.ld_scales < n || operands.ld_scales * kScaleBytes % 16 != 0) {
    return Status::failure(StatusCode::kInvalidArgument, "ld_scales must be at least n = %lld and a multiple of 16 bytes, got %lld",
                           (long long)n, (long long)operands.ld_scales);
  }
  int64_t const scale_strides[2] = {operands.ld_scales * kScaleBytes, operands.ld_scales * kScaleBytes * groups};
  status = encode_tensor_map(&params.scales, kScaleType, 3, operands.b_scales, scale_extents, scale_strides, scale_box);
  if (status.ok() && params.has_zeros) {
    int64_t const zero_strides[2] = {n * 2, n * 2 * groups};
    status = encode_tensor_map(&params.zeros, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, operands.b_zeros, scale_extents, zero_strides, scale_box);
  }
  if (!status.ok()) return status;
  params.weight_bytes = Config::kTileM * Config::kTileK * bits_of(Config::kFormat) / 8 +
                        Config::kTileM * group_rows * (kScaleBytes + (params.has_zeros ? 2 : 0));

  if (status = describe_tokens<Kernel>(arguments, &params); !status.ok()) return status;
  params.epilogue = describe_epilogue(problem, operands);
  params.row_blocks = int32_t(blocks_n);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_grouped(&grouped_w4a16_sm90_kernel<Config>, params, arguments, Config::kThreads, Config::kCtasPerSm, Kernel::kSmemBytes,
                        shared_memory_allowed);
}

}  // namespace minfer::moe
