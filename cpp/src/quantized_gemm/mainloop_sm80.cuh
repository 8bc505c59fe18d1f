// Mainloop of the GEMM with 4-bit weights for sm_80 onward: a ring of stages that cp.async fills, ldmatrix of the activations, the weights
// dequantised in registers, mma.sync m16n8k16.
//
// Each warpgroup (four warps) takes all rows of the tile, 16 of every 64 a warp, and its own tokens: eight of them, then the next
// warpgroup's eight, and so on. Two warpgroups dequantise everything twice, but with the 64 tokens of each that is little next to the MMAs,
// and 32 rows to a warp halve the activations that it reads: with 16 rows, shared memory would be as busy as A100's tensor cores.
// A thread reads its own codes of a 64 x 64 weight block by one 16-byte access (w4_layout.h): the A fragments of four k blocks. Scales are
// applied to the fragments, as products in the activations' type, as on sm_90.
// Pipeline. The copies (copies_sm80.cuh) are kStages - 1 k tiles ahead of the MMAs and run over the ends of work items. There is one
// barrier a k tile: after it all threads may read the stage that has arrived, and none reads the one before it, which is free. Between work
// items the free stage is the epilogue's staging.
#pragma once

#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "quantized_gemm/copies_sm80.cuh"

namespace minfer::w4a16 {

/// Dispatch policy: stages by cp.async, weights dequantised on their way through registers.
template <class Config_>
struct MainloopSm80CpAsyncDequantize {
  using Config = Config_;
  static constexpr int Stages = Config::kStages;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using ArchTag = cutlass::arch::Sm80;
  using Schedule = cutlass::gemm::KernelMultistage;
};

}  // namespace minfer::w4a16

namespace cutlass::gemm::collective {

template <class Config, class TileShape_, class Codes, class StrideA, class Element, class StrideB, class TiledMma_, class GmemCopyA,
          class SmemLayoutA, class SmemCopyA, class TransformA, class GmemCopyB, class SmemLayoutB, class SmemCopyB, class TransformB>
struct CollectiveMma<minfer::w4a16::MainloopSm80CpAsyncDequantize<Config>, TileShape_, Codes, StrideA, Element, StrideB, TiledMma_,
                     GmemCopyA, SmemLayoutA, SmemCopyA, TransformA, GmemCopyB, SmemLayoutB, SmemCopyB, TransformB> {
  using DispatchPolicy = minfer::w4a16::MainloopSm80CpAsyncDequantize<Config>;
  using TileShape = TileShape_;
  using TiledMma = TiledMma_;
  using Stage = minfer::w4a16::StageSm80<Config>;
  using Half = typename Stage::Half;
  static constexpr minfer::DataType kType = Config::kType;
  static constexpr int kThreads = Config::kThreads, kStages = Config::kStages, kValues = Stage::kValues;
  static constexpr int kMmaM = Stage::kMmaM, kMmaN = Stage::kMmaN, kBlocks = Stage::kBlocks, kWarpgroups = Stage::kWarpgroups;
  static constexpr bool kCopiesAhead = true;

  using Params = minfer::w4a16::CopySourcesSm80;
  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    union {
      Stage operands;
      typename Epilogue::TensorStorage staging;
    } stages[kStages];
    [[no_unique_address]] typename Scheduler::SharedStorage scheduler;
    [[no_unique_address]] typename Epilogue::PipelineStorage epilogue;
    static_assert(sizeof(stages) == sizeof(Stage) * kStages);
  };

  /// The copies; those of the first kStages - 1 k tiles are under way.
  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE auto load_init(Params const& params, Storage& storage, WorkItems const& items, int thread) {
    minfer::w4a16::CopiesSm80<Stage, WorkItems> copies(params, items, thread);
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) copies.copy(storage.stages[s].operands);
    return copies;
  }

  static CUTLASS_DEVICE auto make_accumulator() {
    using namespace cute;
    auto accumulator = partition_fragment_C(TiledMma{}, take<0, 2>(TileShape{}));  // (MMA,MMA_M,MMA_N)
    static_assert(decltype(size(accumulator))::value == kValues);
    clear(accumulator);
    return accumulator;
  }

  template <class Storage, class Copies, class Accumulator, class Output>
  CUTLASS_DEVICE void mma(Params const& params, Storage& storage, Copies& copies, Accumulator& accumulator, int, int k_count, Output const&,
                          int thread) {
    bool const fine = params.group_shift < (Config::kTileK == 64 ? 6 : 7);
#pragma unroll 1
    for (int i = 0; i < k_count; ++i) {
      minfer::wait_for_copies<kStages - 2>();
      __syncthreads();
      copies.copy(storage.stages[free_].operands);
      Stage const& stage = storage.stages[current_].operands;
      if (fine) {
        multiply<true>(params, stage, accumulator, thread);
      } else {
        multiply<false>(params, stage, accumulator, thread);
      }
      free_ = current_;
      if (++current_ == kStages) current_ = 0;
    }
  }

  /// The free stage: no copy writes it, but other threads may still read it.
  template <class Storage>
  CUTLASS_DEVICE auto& staging(Storage& storage) const {
    return storage.stages[free_].staging;
  }

 private:
  /// A thread's two rows have a scale and a zero point each, twice in a register: the scale times what int4_codes leaves to it, and -zero
  /// point * factor.
  struct RowScales {
    uint32_t scale[2], zero[2];

    CUTLASS_DEVICE void load(Stage const& stage, int scale_row, int row, bool has_zeros) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scale[h] = Half::mul(minfer::w4a16::both_halves(stage.scales[scale_row][row + 8 * h]), Codes::inverse(h));
        uint32_t const z = has_zeros ? minfer::w4a16::both_halves(stage.zeros[scale_row][row + 8 * h]) : Codes::kEight;
        zero[h] = Half::mul(z, Codes::factor(h) ^ 0x80008000u);
      }
    }
  };

  /// One k tile. kFine: groups begin inside of it.
  template <bool kFine, class Accumulator>
  static CUTLASS_DEVICE void multiply(Params const& params, Stage const& stage, Accumulator& accumulator, int thread) {
    using minfer::w4a16::kBlockK;
    using minfer::w4a16::kBlockN;
    int const lane = thread % 32, warpgroup = thread / 128;
    int const row = thread % 128 / 32 * 16 + lane / 4;  // of a block
    bool const has_zeros = params.zeros != nullptr;
    // Lane l addresses row (a token) l % 8 of matrix (8 of k) l / 8: four matrices are two k blocks of eight tokens. The k blocks 2 and 3
    // of a weight block are the vectors 4 to 7.
    uint32_t const tokens = minfer::shared_address(&stage.activations[0][8 * warpgroup][0]);
    uint32_t const lower = lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4), upper = lower ^ 64;

    RowScales scales[kMmaM];
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
          minfer::load_matrices(tokens + (pair == 0 ? lower : upper) + (block * Config::kTileN + j * 8 * kWarpgroups) * 128, b[j]);
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
            minfer::w4a16::int4_codes<kType>(word, scales[mi].zero, a);
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = Half::mul(a[i], scales[mi].scale[i % 2]);
#pragma unroll
            for (int j = 0; j < kMmaN; ++j) {
              auto& d = reinterpret_cast<float(&)[4]>(accumulator(0, mi, j));
              minfer::multiply_16x8x16<kType>(d, a, b[j][2 * half], b[j][2 * half + 1]);
            }
          }
        }
      }
    }
  }

  int current_ = 0, free_ = kStages - 1;  // the stages of the next k tile and of the one before it
};

}  // namespace cutlass::gemm::collective
