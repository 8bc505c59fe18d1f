// Mainloop of e4m3 for sm_80 onward: a ring of stages that cp.async fills, 16 bytes a copy, ldmatrix into registers, mma.sync
// (common/mma_e4m3_sm80.cuh).
//
// A stage is 128 of k, whose sums are added up in fp32, times the scales of its blocks where there are any: a token's for each thread's
// rows, and one of the weight for all columns of a tile, or one for gates and one for ups. They are copied behind the stage's operands.
// Pipeline: kStages - 1 stages are on their way; one barrier a stage.
// Shared memory: lines of 128 bytes, 16-byte unit u of line r at u ^ r % 8. Between two work items the ring's bytes are the epilogue's
// staging.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mma_e4m3_sm80.cuh"
#include "common/mma_sm80.cuh"
#include "cute/arch/mma_sm80.hpp"
#include "cute/tensor.hpp"
#include "gemm/block_scales.cuh"
#include "minfer/gemm.h"

namespace minfer::gemm {

template <class Config>
struct MainloopFp8Sm80 {
  static constexpr int kThreads = Config::kThreads, kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK;
  static constexpr int kStages = Config::kStages, kWarpsM = Config::kWarpsM, kWarpsN = Config::kWarpsN;
  static constexpr bool kCopiesAhead = false;
  static constexpr int kLine = 128, kUnits = kLine / 16;  // bytes, and 16-byte units, of a line
  static constexpr int kMmaM = kTileM / (16 * kWarpsM), kMmaN = kTileN / (8 * kWarpsN), kValues = 4 * kMmaM * kMmaN;
  static_assert(Config::kType == DataType::kE4M3 && !Config::kSwap && kTileK == kScaleBlock && kThreads == 32 * kWarpsM * kWarpsN);
  static constexpr int kScales = kTileM + 4;  // of a stage: those of the rows, then the weight's of gates and of ups
  static_assert(kMmaN % 2 == 0 && kWarpsN % 2 == 0 && kScaleBlock % kTileN == 0, "columns are read by 16, and share the scale of a block");
  static_assert(kTileM * kUnits % kThreads == 0 && kTileN * kUnits % kThreads == 0 && kThreads % kUnits == 0);
  // Of what is multiplied only the order of D's values counts here: the epilogue's.
  using TiledMma = cute::TiledMMA<cute::MMA_Atom<cute::SM80_16x8x32_S32S8S8S32_TN>,
                                  cute::Layout<cute::Shape<cute::Int<kWarpsM>, cute::Int<kWarpsN>, cute::_1>>,
                                  cute::Tile<cute::Int<16 * kWarpsM>, cute::Int<16 * kWarpsN>, cute::_32>>;

  struct Params {
    uint8_t const *a, *b;
    int64_t lda, ldb;
    int32_t m, n, k;
    BlockScales scales;
    bool scaled;  // by blocks
  };
  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    union {
      struct {
        alignas(128) uint8_t a[kStages][kTileM * kLine], b[kStages][kTileN * kLine];
        alignas(16) float scales[kStages][kScales];
      } ring;
      typename Epilogue::TensorStorage staging;
    };
    [[no_unique_address]] typename Scheduler::SharedStorage scheduler;
    [[no_unique_address]] typename Epilogue::PipelineStorage epilogue;
  };

  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE cute::tuple<> load_init(Params const&, Storage&, WorkItems const&, int) {
    return {};
  }
  static CUTLASS_DEVICE auto make_accumulator() {
    auto sums = cute::partition_fragment_C(TiledMma{}, cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{});  // (MMA,MMA_M,MMA_N)
    static_assert(decltype(size(sums))::value == kValues);
    auto accumulator = cute::make_fragment_like<float>(sums);
    cute::clear(accumulator);
    return accumulator;
  }

  /// Returns when all threads have read the ring.
  template <class Storage, class Inputs, class Accumulator, class Tile>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, Inputs const&, Accumulator& accumulator, int k_begin, int k_count,
                                 Tile const& tile, int thread) {
    __syncthreads();  // all have read the staging of the previous item
    int const row0 = tile.m * kTileM, column0 = tile.n * kTileN;
    auto& ring = storage.ring;
    auto const send = [&](int k) {
      if (k < k_begin + k_count) {
        int const stage = (k - k_begin) % kStages;
        copy<kTileM>(ring.a[stage], params.a, params.lda, row0, params.m, k * kTileK, params.k, thread);
        copy<kTileN>(ring.b[stage], params.b, params.ldb, column0, params.n, k * kTileK, params.k, thread);
        if (params.scaled) copy_scales(params, ring.scales[stage], row0, column0, k, thread);
      }
      commit_copies();
    };
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i + 1 < kStages; ++i) send(k_begin + i);

    int const warp = thread / 32, lane = thread % 32, warp_m = warp % kWarpsM, warp_n = warp / kWarpsM;
    auto const row_of = [&](int i) { return 16 * (warp_m + kWarpsM * i); };
    auto const column_of = [&](int j) { return 8 * (warp_n + kWarpsN * j); };
#pragma unroll 1
    for (int k = k_begin; k < k_begin + k_count; ++k) {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // the stage is everyone's, and the one before has been read
      send(k + kStages - 1);
      int const stage = (k - k_begin) % kStages;
      uint32_t const a = shared_address(ring.a[stage]), b = shared_address(ring.b[stage]);
      float sums[kMmaM][kMmaN][4] = {};
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kTileK / 32; ++step) {
        uint32_t of_a[kMmaM][4], of_b[kMmaN][2];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kMmaM; ++i) load_matrices(unit_address(a, row_of(i) + lane % 16, 2 * step + lane / 16), of_a[i]);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kMmaN; j += 2) {
          uint32_t four[4];
          load_matrices(unit_address(b, column_of(j + lane / 16) + lane % 8, 2 * step + lane / 8 % 2), four);
          of_b[j][0] = four[0], of_b[j][1] = four[1], of_b[j + 1][0] = four[2], of_b[j + 1][1] = four[3];
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kMmaM; ++i) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kMmaN; ++j) multiply_e4m3(sums[i][j], of_a[i], of_b[j]);
        }
      }
      float const* const scales = ring.scales[stage];
      // Gates and ups take turns, 8 columns each: a warp has one of them alone.
      float const weight = params.scaled ? kE4M3SumFactor * scales[kTileM + warp_n % 2] : kE4M3SumFactor;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kMmaM; ++i) {
        float token[2] = {1.0f, 1.0f};
        if (params.scaled) token[0] = scales[row_of(i) + lane / 4], token[1] = scales[row_of(i) + lane / 4 + 8];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kMmaN; ++j) {
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 4; ++v) {
            float& sum = accumulator(v + 4 * (i + kMmaM * j));
            sum = fmaf(sums[i][j][v], weight * token[v / 2], sum);
          }
        }
      }
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  template <class Storage>
  static CUTLASS_DEVICE auto& staging(Storage& storage) {
    return storage.staging;
  }

 private:
  static CUTLASS_DEVICE uint32_t unit_address(uint32_t lines, int line, int unit) { return lines + line * kLine + (unit ^ line % 8) * 16; }

  /// The scales of k tile k: of rows that do not exist 0, of an operand without any 1.
  static CUTLASS_DEVICE void copy_scales(Params const& params, float* to, int row0, int column0, int k, int thread) {
    auto const& s = params.scales;
    auto const send = [](ScaleView const& view, int64_t at, bool exists, float* destination) {
      if (view.data != nullptr && !view.exponents) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(destination)),
                     "l"(static_cast<float const*>(view.data) + (exists ? at : 0)), "r"(exists ? 4 : 0)
                     : "memory");
      } else {
        *destination = exists ? view.load(at) : 0.0f;
      }
    };
    for (int i = thread; i < kTileM; i += kThreads) send(s.tokens, s.tokens.offset(row0 + i, k), row0 + i < params.m, to + i);
    int const half = thread - (kThreads - 2);  // the last two threads
    if (half >= 0) {
      int const block = column0 / (s.halves ? 2 * kScaleBlock : kScaleBlock);
      send(s.weight, s.weight.offset(block, k) + (s.halves && half == 1 ? s.up_offset : 0), true, to + kTileM + half);
    }
  }

  /// kLines lines of a stage, from line `first` of an operand's `lines` and byte `k0` of their k: zeros behind either.
  template <int kLines>
  static CUTLASS_DEVICE void copy(uint8_t* to, uint8_t const* from, int64_t stride, int first, int lines, int k0, int k, int thread) {
    int const unit = thread % kUnits, column = k0 + 16 * unit, inside = min(max(k - column, 0), 16);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kLines * kUnits / kThreads; ++i) {
      int const line = thread / kUnits + i * (kThreads / kUnits), bytes = first + line < lines ? inside : 0;
      copy_async_16(unit_address(shared_address(to), line, unit), bytes > 0 ? from + (first + line) * stride + column : from, bytes);
    }
  }
};

}  // namespace minfer::gemm
