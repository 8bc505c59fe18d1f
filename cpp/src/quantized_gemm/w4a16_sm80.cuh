// GEMM with 4-bit weights for sm_80 onward: cp.async + ldmatrix + mma.sync, the weights dequantised in registers. The only path on A100,
// Ada and consumer Blackwell.
//
// The weights' rows (the caller's n) are the MMA's m, the tokens (the caller's m) its n, so that a few tokens are one narrow instruction.
// Warp roles. All warps copy and compute. Each warpgroup (four warps) takes all rows of the tile, 16 of every 64 a warp, and every second
// eight of the tokens where there are two warpgroups. Two warpgroups dequantise all weights twice, but with 64 tokens each that is little
// compared with the MMAs, and 32 rows to a warp halve what it reads of the activations: 16 rows would keep shared memory as busy as A100's
// tensor cores.
// A thread reads its codes of a weight block by one 16-byte access (w4_layout.h): the A fragments of four k blocks. Scales are applied to
// the fragments: products in the activations' type, as on sm_90.
// Pipeline. A ring of kStages stages of packed weights, activations, scales and zeros, filled by cp.async with zeros for what lies outside.
// The copies walk the schedule independently, kStages - 1 k tiles ahead of the MMAs and over the ends of tiles, so that the next weights
// arrive during an epilogue or a wait for another CTA's partial. One barrier a k tile: after it all warps may read the stage that has just
// arrived, and the stage before it is free.
// Tile walk: TileScheduler (data-parallel, split-K or stream-K at run time); partials go through the workspace (split_reduction.cuh).
// Epilogue: accumulators in fp32 through the one stage that no copy is in flight to, some tokens at a time, finished by the general loop
// (epilogue.cuh), whose warps write 32 consecutive n.
// Shared memory: the ring. Up to 49 KiB two CTAs of one warpgroup fit an SM of Ada or consumer Blackwell.
// Limits: activations, scales and zeros 16-byte aligned in base and rows; n and k multiples of 8; groups of 32 times a power of two, or all
// of k. Scales times 512 (fp16) must be finite.
#pragma once

#include "common/mma_sm80.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/launch_sm80.cuh"
#include "quantized_gemm/dequantize.cuh"
#include "quantized_gemm/w4_layout.h"

namespace minfer::w4a16 {

template <class Config>
struct W4A16Sm80 {
  static constexpr DataType kType = Config::kType;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK;  // rows of weights, tokens, k
  static constexpr int kThreads = Config::kThreads, kWarpgroups = kThreads / 128;
  static constexpr int kStages = Config::kStages;
  static constexpr int kBlocks = kTileK / kBlockK;          // 64 x 64 blocks of a stage, along k
  static constexpr int kMmaM = kTileM / kBlockN;            // and along the rows: each is 16 rows of a warp
  static constexpr int kMmaN = kTileN / (8 * kWarpgroups);  // tokens of a warp, in eights: its j-th are eight j * kWarpgroups + warpgroup
  static constexpr int kValues = kMmaM * kMmaN * 4;         // accumulators of a thread
  static constexpr int kScaleRows = kTileK / 32;            // groups that may begin in a stage
  static_assert(Config::kSwap && Config::kSchedule == Schedule::kMultistage && Config::kClusterM * Config::kClusterN == 1);
  static_assert(kThreads % 128 == 0 && kTileM % kBlockN == 0 && kTileK % kBlockK == 0 && kTileN % (8 * kWarpgroups) == 0 && kStages >= 2);

  using Codes = Int4<kType>;
  using Half = Half2<kType>;
  using Reduction = gemm::SplitReduction<kThreads, kValues>;

  struct Params {
    uint4 const* weights;         // [blocks_n, blocks_k, 128]
    uint16_t const* activations;  // [m, k]
    uint16_t const* scales;       // [groups, n]
    uint16_t const* zeros;        // likewise, or null: 8
    int64_t lda, ld_scales, ld_zeros;
    int32_t m, n, k, groups, blocks_n, blocks_k;
    int32_t group_shift;  // log2 of the group size; 31: one group
    gemm::EpilogueParams epilogue;
    gemm::TileSchedulerParams schedule;
    gemm::SplitWorkspace split;
  };

  struct Stage {
    uint4 weights[kMmaM][kBlocks][128];
    uint4 activations[kBlocks][kTileN][8];  // vector v (8 of k) of token t at v ^ t % 8, against bank conflicts of copies and ldmatrix
    uint16_t scales[kScaleRows][kTileM], zeros[kScaleRows][kTileM];
  };
  static constexpr int kSmemBytes = kStages * int(sizeof(Stage));
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  // The epilogue's [tokens][kTileM + 4] fp32: four floats of padding put a fragment's 8 rows and 4 pairs of tokens in different banks.
  static constexpr int kStagingRow = kTileM + 4;
  static constexpr int staged_eights() {
    int count = kMmaN;
    while (count * 8 * kWarpgroups * kStagingRow * 4 > int(sizeof(Stage))) count /= 2;
    return count;
  }
  static constexpr int kStagedMmaN = staged_eights(), kStagedTokens = kStagedMmaN * 8 * kWarpgroups;
  static_assert(kStagedMmaN >= 1 && kMmaN % kStagedMmaN == 0 && (kStagedTokens & (kStagedTokens - 1)) == 0);

  struct Accumulator {
    float value[kMmaM][kMmaN][4];
    __device__ __forceinline__ float& operator()(int i) { return value[i / (4 * kMmaN)][i / 4 % kMmaN][i % 4]; }
    __device__ __forceinline__ float const& operator()(int i) const { return value[i / (4 * kMmaN)][i / 4 % kMmaN][i % 4]; }
  };

  /// The copies' walk over the schedule.
  struct Feed {
    Params const& params;
    int const thread;
    gemm::TileScheduler scheduler;
    bool valid = true;
    int k = 0, k_end = 0;  // in tiles
    int row = 0, token = 0;

    __device__ __forceinline__ Feed(Params const& params, int thread)
        : params(params), thread(thread), scheduler(params.schedule, int(blockIdx.x)) {
      next_item();
    }

    __device__ __forceinline__ void next_item() {
      gemm::WorkItem item = scheduler.next();
      while (item.valid && item.k_count == 0) item = scheduler.next();
      valid = item.valid;
      if (!valid) return;
      gemm::TileCoord const tile = gemm::TileScheduler::coordinate(params.schedule, item.tile);
      k = item.k_begin;
      k_end = item.k_begin + item.k_count;
      row = tile.m * kTileM;
      token = tile.n * kTileN;
    }

    /// Issues the copies of the next k tile as one group; after the walk's end an empty one, so that there is one group for each k tile.
    __device__ __forceinline__ void copy(Stage& stage) {
      if (valid) {
        copy_weights(stage);
        copy_activations(stage);
        copy_scales(stage);
        if (++k == k_end) next_item();
      }
      commit_copies();
    }

    __device__ __forceinline__ void copy_weights(Stage& stage) const {
#pragma unroll
      for (int i = 0; i < kMmaM * kBlocks; i += kWarpgroups) {
        int const u = i + thread / 128, mi = u / kBlocks, block = u % kBlocks;
        if (kMmaM * kBlocks % kWarpgroups == 0 || u < kMmaM * kBlocks) {
          int const block_n = row / kBlockN + mi, block_k = k * kBlocks + block;
          uint4 const* source = params.weights + (int64_t(block_n) * params.blocks_k + block_k) * 128 + thread % 128;
          copy_async_16(&stage.weights[mi][block][thread % 128], source, block_n < params.blocks_n && block_k < params.blocks_k);
        }
      }
    }

    // Eight threads to 64 of k of a token.
    __device__ __forceinline__ void copy_activations(Stage& stage) const {
      constexpr int kTogether = kThreads / 8;                           // tokens, or tokens of several blocks
      constexpr int kTokens = kTileN < kTogether ? kTileN : kTogether;  // different ones
      int const vector = thread % 8;
#pragma unroll
      for (int i = 0; i < kBlocks * kTileN; i += kTogether) {
        int const t = thread / 8 % kTokens + i % kTileN, block = i / kTileN + thread / 8 / kTokens;
        if (kBlocks * kTileN % kTogether == 0 || block < kBlocks) {
          int const column = k * kTileK + block * kBlockK + vector * 8;
          uint16_t const* source = params.activations + int64_t(token + t) * params.lda + column;
          copy_async_16(&stage.activations[block][t][vector ^ t % 8], source, token + t < params.m && column < params.k);
        }
      }
    }

    __device__ __forceinline__ void copy_scales(Stage& stage) const {
      constexpr int kUnits = kTileM / 8;
      static_assert(kScaleRows * kUnits <= kThreads);
      int const scale_row = thread / kUnits, column = thread % kUnits * 8;
      if (scale_row == 0 || scale_row < kTileK >> params.group_shift) {
        int const group = (k * kTileK >> params.group_shift) + scale_row;
        bool const inside = row + column < params.n && group < params.groups;
        copy_async_16(&stage.scales[scale_row][column], params.scales + group * params.ld_scales + row + column, inside);
        if (params.zeros != nullptr) {
          copy_async_16(&stage.zeros[scale_row][column], params.zeros + group * params.ld_zeros + row + column, inside);
        }
      }
    }
  };

  /// For a thread's two rows, each value twice in a register: the scale times the power of two that int4_codes leaves to it, and
  /// -zero * factor.
  struct Scales {
    uint32_t scale[2], zero[2];

    __device__ __forceinline__ void load(Stage const& stage, int scale_row, int row, bool has_zeros) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scale[h] = Half::mul(both_halves(stage.scales[scale_row][row + 8 * h]), Codes::inverse(h));
        uint32_t const z = has_zeros ? both_halves(stage.zeros[scale_row][row + 8 * h]) : Codes::kEight;
        zero[h] = Half::mul(z, Codes::factor(h) ^ 0x80008000u);
      }
    }
  };

  /// One k tile. kFine: groups begin inside of it.
  template <bool kFine>
  static __device__ __forceinline__ void multiply(Params const& params, Stage const& stage, Accumulator& accumulator, int thread) {
    int const lane = thread % 32, warpgroup = thread / 128;
    int const row = thread % 128 / 32 * 16 + lane / 4;  // of a block
    bool const has_zeros = params.zeros != nullptr;
    // Lane l addresses row (a token) l % 8 of matrix (8 of k) l / 8: four matrices are two k blocks of eight tokens. The k blocks 2 and 3
    // of a weight block are the vectors 4 to 7.
    uint32_t const tokens = shared_address(&stage.activations[0][8 * warpgroup][0]);
    uint32_t const lower = lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4), upper = lower ^ 64;

    Scales scales[kMmaM];
    if constexpr (!kFine) {
#pragma unroll
      for (int mi = 0; mi < kMmaM; ++mi) scales[mi].load(stage, 0, mi * kBlockN + row, has_zeros);
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint4 codes[kMmaM];
#pragma unroll
      for (int mi = 0; mi < kMmaM; ++mi) codes[mi] = stage.weights[mi][block][thread % 128];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t b[kMmaN][4];  // [eight tokens][half of a k block]
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
          load_matrices(tokens + (pair == 0 ? lower : upper) + (block * kTileN + j * 8 * kWarpgroups) * 128, b[j]);
        }
        if constexpr (kFine) {
          int const scale_row = (block * kBlockK + pair * 32) >> params.group_shift;
#pragma unroll
          for (int mi = 0; mi < kMmaM; ++mi) scales[mi].load(stage, scale_row, mi * kBlockN + row, has_zeros);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int mi = 0; mi < kMmaM; ++mi) {
            uint32_t const word = pair == 0 ? (half == 0 ? codes[mi].x : codes[mi].y) : (half == 0 ? codes[mi].z : codes[mi].w);
            uint32_t a[4];
            int4_codes<kType>(word, scales[mi].zero, a);
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = Half::mul(a[i], scales[mi].scale[i % 2]);
#pragma unroll
            for (int j = 0; j < kMmaN; ++j) multiply_16x8x16<kType>(accumulator.value[mi][j], a, b[j][2 * half], b[j][2 * half + 1]);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void store(Params const& params, Accumulator const& accumulator, float* staged, gemm::TileCoord tile,
                                               int thread) {
    int const lane = thread % 32;
    int const token = tile.n * kTileN, row = tile.m * kTileM;
    float* mine = staged + (thread / 128 * 8 + lane % 4 * 2) * kStagingRow + thread % 128 / 32 * 16 + lane / 4;
#pragma unroll 1
    for (int pass = 0; pass < kMmaN / kStagedMmaN && token + pass * kStagedTokens < params.m; ++pass) {
      __syncthreads();  // the stage has been read, or the pass before it
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        if (j / kStagedMmaN == pass) {
#pragma unroll
          for (int i = 0; i < kMmaM * 4; ++i) {
            int const mi = i / 4, h = i % 4 / 2, e = i % 2;
            mine[(j % kStagedMmaN * 8 * kWarpgroups + e) * kStagingRow + mi * kBlockN + 8 * h] = accumulator.value[mi][j][2 * h + e];
          }
        }
      }
      __syncthreads();
      gemm::store_rectangle<kType>(params.epilogue, token + pass * kStagedTokens, row, 0, kStagedTokens, kTileM, thread, kThreads,
                                   [&](int r, int c) { return staged[r * kStagingRow + c]; });
    }
  }

  static __device__ __forceinline__ void run(Params const& params, Stage* stages) {
    int const thread = int(threadIdx.x);
    Feed feed(params, thread);
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) feed.copy(stages[s]);

    bool const fine = params.group_shift < (kTileK == 64 ? 6 : 7);
    auto const barrier = [] { __syncthreads(); };
    int current = 0, freed = kStages - 1;  // stages: of the next k tile, and of the one before it
    gemm::TileScheduler scheduler(params.schedule, int(blockIdx.x));
    for (gemm::WorkItem item = scheduler.next(); item.valid; item = scheduler.next()) {
      Accumulator accumulator;
#pragma unroll
      for (int i = 0; i < kValues; ++i) accumulator(i) = 0.0f;
#pragma unroll 1
      for (int i = 0; i < item.k_count; ++i) {
        wait_for_copies<kStages - 2>();
        __syncthreads();
        feed.copy(stages[freed]);
        if (fine) {
          multiply<true>(params, stages[current], accumulator, thread);
        } else {
          multiply<false>(params, stages[current], accumulator, thread);
        }
        freed = current;
        if (++current == kStages) current = 0;
      }
      if (!item.owner()) {
        Reduction::publish(params.split, item.slot, accumulator, thread, barrier);
        continue;
      }
      for (int i = 0; i < item.partials; ++i) Reduction::add(params.split, item.first_partial + i, accumulator, thread, barrier);
      store(params, accumulator, reinterpret_cast<float*>(&stages[freed]), gemm::TileScheduler::coordinate(params.schedule, item.tile),
            thread);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kThreads <= 128 ? 2 : 1)
    w4a16_sm80_kernel(__grid_constant__ typename W4A16Sm80<Config>::Params const params) {
  extern __shared__ __align__(128) char smem_sm80[];
  W4A16Sm80<Config>::run(params, reinterpret_cast<typename W4A16Sm80<Config>::Stage*>(smem_sm80));
}

template <class Config>
Status launch_w4a16_sm80(gemm::GemmLaunchArguments const& arguments) {
  using Kernel = W4A16Sm80<Config>;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  if (Status status = gemm::describe_schedule<Config>(arguments, &params.schedule, &params.split); !status.ok()) return status;
  params.weights = static_cast<uint4 const*>(operands.b);
  params.activations = static_cast<uint16_t const*>(operands.a);
  params.scales = static_cast<uint16_t const*>(operands.b_scales);
  params.zeros = static_cast<uint16_t const*>(operands.b_zeros);
  params.lda = operands.lda;
  params.ld_scales = operands.ld_scales;
  params.ld_zeros = operands.ld_zeros;
  params.m = int32_t(problem.m);
  params.n = int32_t(problem.n);
  params.k = int32_t(problem.k);
  params.blocks_n = int32_t(gemm::ceil_div(problem.n, kBlockN));
  params.blocks_k = int32_t(gemm::ceil_div(problem.k, kBlockK));
  params.groups = problem.group_size == 0 ? 1 : int32_t(gemm::ceil_div(problem.k, problem.group_size));
  params.group_shift = params.groups <= 1 ? 31 : group_shift(problem.group_size, problem.k);
  params.epilogue = gemm::make_epilogue(problem, operands);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return gemm::launch_sm80(&w4a16_sm80_kernel<Config>, params, arguments, params.schedule.workers, Kernel::kThreads, Kernel::kSmemBytes,
                           shared_memory_allowed);
}

}  // namespace minfer::w4a16
