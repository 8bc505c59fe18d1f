// Grouped GEMM for sm_80 onward: cp.async + mma.sync, 16-bit weights. The only path on A100, Ada and consumer Blackwell; on Hopper it
// serves operands that TMA cannot address.
//
// Four warps, 16 of every 64 rows of the weight each, all tokens of the tile: the accumulators are those of the sm_90 kernels, and so is
// the epilogue. All threads load: a ring of kStages stages filled 16 bytes a copy, or element by element where operands are not aligned,
// units of 16 bytes at u ^ row % 8; ldmatrix; m16n8k16. Persistent over the same tiles as on sm_90 (expert_tiles.cuh).
// Shared memory: ring | staged output | tiles; under 99 KiB.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "moe/grouped/expert_tiles.cuh"
#include "moe/grouped/grouped_epilogue.cuh"
#include "moe/grouped/grouped_launch.cuh"

namespace minfer::moe {

template <class Config>
struct GroupedSm80 {
  using Half = gemm::ElementOf<Config::kType>;
  using Element = typename Half::Type;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK, kStages = Config::kStages;
  static constexpr int kThreads = Config::kThreads, kMmaM = kTileM / 64, kBlocks = kTileN / 8, kStep = 8;
  static_assert(kThreads == 128 && kTileM % 64 == 0 && kTileN % 16 == 0 && kTileK == 64);
  using Tiles = ExpertTiles<kTileN, kStep, panel_of(kTileM, kTileN)>;
  using Epilogue = GroupedEpilogue<Config::kType, kTileM, kTileN>;

  struct Params {
    ExpertRows rows;
    Element const* a;
    Element const* b;
    int32_t const* gather;
    int64_t lda, ldb, b_expert_stride;
    int32_t a_rows;
    GroupedEpilogueParams epilogue;
    int32_t k, weight_tiles;
    bool vectors;  // a and b are read 16 bytes at a time
  };
  struct SharedStorage {
    alignas(128) Element weights[kStages][kTileM * kTileK];
    alignas(128) Element tokens[kStages][kTileN * kTileK];
    alignas(128) char staged[Epilogue::kBytes];
    typename Tiles::Storage tiles;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  struct Accumulator {
    float of[kMmaM][kBlocks][4];
    __device__ float operator()(int i) const { return of[i / (kTileN / 2)][i % (kTileN / 2) / 4][i % 4]; }
  };

  // 8 of k of one row; zeros outside.
  static __device__ void copy_unit(Params const& params, Element* to, Element const* row, bool inside, int column) {
    if (params.vectors) {
      bool const reads = inside && column < params.k;
      copy_async_16(to, reads ? row + column : row, reads);
    } else {
      alignas(16) Element unit[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) unit[i] = inside && column + i < params.k ? row[column + i] : Half::from_float(0.0f);
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4 const*>(unit);
    }
  }

  static __device__ void load_stage(Params const& params, SharedStorage& storage, int stage, ExpertTile const& tile, int k, int thread) {
    int const unit = thread % 8, column = k * kTileK + unit * 8;
    Element const* const weight = params.b + tile.expert * params.b_expert_stride;
#pragma unroll
    for (int row = thread / 8; row < kTileM; row += kThreads / 8) {
      int const source = weight_row(params.epilogue, tile.weight_tile * kTileM + row);
      copy_unit(params, &storage.weights[stage][row * kTileK + (unit ^ row % 8) * 8], weight + (source < 0 ? 0 : source) * params.ldb,
                source >= 0, column);
    }
#pragma unroll
    for (int row = thread / 8; row < kTileN; row += kThreads / 8) {
      uint32_t source = uint32_t(tile.row + row);
      if (params.gather != nullptr && row < tile.tokens) source = uint32_t(params.gather[source]);
      bool const inside = row < tile.tokens && source < uint32_t(params.a_rows);  // a row that a does not have is zeros
      copy_unit(params, &storage.tokens[stage][row * kTileK + (unit ^ row % 8) * 8], params.a + (inside ? source : 0) * params.lda, inside,
                column);
    }
  }

  static __device__ void multiply(SharedStorage const& storage, int stage, Accumulator& sum, int thread) {
    int const lane = thread % 32, warp = thread / 32, matrix = lane / 8;
    uint32_t const weights = shared_address(&storage.weights[stage][0]), tokens = shared_address(&storage.tokens[stage][0]);
#pragma unroll
    for (int slab = 0; slab < kTileK / 16; ++slab) {
      uint32_t a[kMmaM][4];
#pragma unroll
      for (int mi = 0; mi < kMmaM; ++mi) {
        int const row = 64 * mi + 16 * warp + 8 * (matrix % 2) + lane % 8, unit = 2 * slab + matrix / 2;
        load_matrices(weights + row * (kTileK * 2) + (unit ^ row % 8) * 16, a[mi]);
      }
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) {
        int const row = 8 * (j + matrix / 2) + lane % 8, unit = 2 * slab + matrix % 2;
        uint32_t b[4];
        load_matrices(tokens + row * (kTileK * 2) + (unit ^ row % 8) * 16, b);
#pragma unroll
        for (int mi = 0; mi < kMmaM; ++mi) {
          multiply_16x8x16<Config::kType>(sum.of[mi][j], a[mi], b[0], b[1]);
          multiply_16x8x16<Config::kType>(sum.of[mi][j + 1], a[mi], b[2], b[3]);
        }
      }
    }
  }

  static __device__ void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    int const thread = int(threadIdx.x);
#if __CUDA_ARCH__ >= 900
    allow_dependent_launch();
    wait_for_predecessor();
#endif
    Tiles::build(storage.tiles, params.rows, params.weight_tiles, thread, kThreads);
    clear_rows_behind(params.rows, storage.tiles, params.epilogue, thread, kThreads);
    Epilogue epilogue(params.epilogue, storage.staged, thread, 1);
    int const tiles = Tiles::count(storage.tiles, params.rows), k_tiles = (params.k + kTileK - 1) / kTileK;
    for (int t = int(blockIdx.x); t < tiles; t += int(gridDim.x)) {
      ExpertTile const tile = Tiles::at(storage.tiles, params.rows, params.weight_tiles, t);
      int const row = tile.weight_tile * kTileM;
      epilogue.prefetch(tile, row);
      Accumulator sum;
#pragma unroll
      for (int i = 0; i < kMmaM * kBlocks * 4; ++i) sum.of[i / (kBlocks * 4)][i / 4 % kBlocks][i % 4] = 0.0f;
      __syncthreads();  // all have read the previous tile's stages
#pragma unroll 1
      for (int k = 0; k < kStages - 1; ++k) {
        if (k < k_tiles) load_stage(params, storage, k, tile, k, thread);
        commit_copies();
      }
      int stage = 0;
#pragma unroll 1
      for (int k = 0; k < k_tiles; ++k) {
        wait_for_copies<kStages - 2>();
        __syncthreads();
        int const next = k + kStages - 1;
        if (next < k_tiles) load_stage(params, storage, next % kStages, tile, next, thread);
        commit_copies();
        multiply(storage, stage, sum, thread);
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      wait_for_copies<0>();
      epilogue.store(sum, tile, row);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    grouped_sm80_kernel(__grid_constant__ typename GroupedSm80<Config>::Params const params) {
  extern __shared__ __align__(128) char smem_grouped_sm80[];
  GroupedSm80<Config>::run(params, smem_grouped_sm80);
}

template <class Config>
Status launch_grouped_sm80(GroupedLaunchArguments const& arguments) {
  using Kernel = GroupedSm80<Config>;
  GroupedProblem const& problem = *arguments.problem;
  GroupedOperands const& operands = *arguments.operands;
  typename Kernel::Params params{};
  params.rows = describe_rows(problem, operands);
  params.a = static_cast<typename Kernel::Element const*>(operands.a);
  params.b = static_cast<typename Kernel::Element const*>(operands.b);
  params.gather = operands.gather;
  params.lda = operands.lda;
  params.a_rows = int32_t(operands.a_rows);
  params.ldb = operands.ldb;
  params.b_expert_stride = operands.b_expert_stride;
  params.epilogue = describe_epilogue(problem, operands);
  params.k = int32_t(problem.k);
  int64_t const rows = problem.gated ? (problem.n / 2 + 7) / 8 * 16 : problem.n;
  params.weight_tiles = int32_t((rows + Config::kTileM - 1) / Config::kTileM);
  params.vectors = problem.a_alignment == 16 && problem.b_alignment == 16 && problem.k % 8 == 0;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_grouped(&grouped_sm80_kernel<Config>, params, arguments, Kernel::kThreads, Config::kCtasPerSm, Kernel::kSmemBytes,
                        shared_memory_allowed);
}

}  // namespace minfer::moe
