// Mainloop of the grouped GEMM of 8-bit operands for sm_80 onward: e4m3 or int8, an expert's weights and its tokens, in order or gathered,
// by cp.async, ldmatrix of both, mma.sync (common/mma_sm80.cuh, common/mma_e4m3_sm80.cuh).
//
// Four warps have 16 of every 64 rows of the weight each, and all tokens of the tile: the accumulators are those of the sm_90 kernels, and
// so the epilogue is theirs. A stage is 128 of k, in lines whose units of 16 bytes lie at u ^ line % 8, and the scales of its tokens and
// of the weight behind them: of groups of 128, 64 or 32 of k, and of blocks of 128 rows and 128 of k.
// Sums of e4m3 are added up in fp32 for each group, at least each 128 of k, times their scales. Those of int8 are integers, exact, and are
// added up in fp32 only where tokens or the weight have scales of groups.
#pragma once

#include "common/mma_e4m3_sm80.cuh"
#include "common/mma_sm80.cuh"
#include "cute/tensor.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "minfer/types.h"
#include "moe/grouped/expert_scales.cuh"
#include "moe/grouped/grouped_epilogue.cuh"

namespace minfer::moe {

/// Dispatch policy: 8-bit operands by cp.async, tokens in expert order or gathered, scales beside them.
template <class Config_>
struct MainloopSm80CpAsyncScaledExperts {
  using Config = Config_;
  static constexpr int Stages = Config::kStages;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using ArchTag = cutlass::arch::Sm80;
  using Schedule = cutlass::gemm::KernelMultistage;
};

}  // namespace minfer::moe

namespace cutlass::gemm::collective {

template <class Config, class TileShape_, class Element_, class StrideA, class ElementB, class StrideB, class TiledMma_, class GmemCopyA,
          class SmemLayoutA, class SmemCopyA, class TransformA, class GmemCopyB, class SmemLayoutB, class SmemCopyB, class TransformB>
struct CollectiveMma<minfer::moe::MainloopSm80CpAsyncScaledExperts<Config>, TileShape_, Element_, StrideA, ElementB, StrideB, TiledMma_,
                     GmemCopyA, SmemLayoutA, SmemCopyA, TransformA, GmemCopyB, SmemLayoutB, SmemCopyB, TransformB> {
  using DispatchPolicy = minfer::moe::MainloopSm80CpAsyncScaledExperts<Config>;
  using TileShape = TileShape_;
  using Element = Element_;
  using ExpertTile = minfer::moe::ExpertTile;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK, kStages = Config::kStages;
  static constexpr int kThreads = Config::kThreads, kMmaM = kTileM / 64, kMmaN = kTileN / 8;
  static constexpr bool kIntegers = cute::is_same_v<Element, int8_t>;
  static constexpr int kStep = 8;                    // tokens of a tile are rounded up to these
  static constexpr int kValues = kMmaM * kMmaN * 4;  // accumulators of a thread
  static constexpr bool kCopiesAhead = false;
  static constexpr int kLine = 128, kUnits = kLine / 16, kMmas = kLine / 32;  // bytes of a line, its units of 16, MMAs along it
  static constexpr int kMostParts = kLine / Config::kLeastGroup;              // groups of a token in a stage
  static constexpr int kStageScales = kMostParts * kTileN + 4;                // those of tokens, then the weight's of gates and of ups
  using Sum = cute::conditional_t<kIntegers, int32_t, float>;                 // of the MMA
  using Sums = Sum[kMmaM][kMmaN][4];
  static_assert(sizeof(Element) == 1 && kThreads == 128 && kTileM % 64 == 0 && kTileN % 16 == 0 && kTileK == kLine);
  static_assert(minfer::gemm::kScaleBlock % kTileM == 0, "a tile's rows of the weight share the scale of a block");

  struct Params {
    uint8_t const *a, *b;
    int32_t const* gather;  // rows of a, or null: in order
    int64_t lda, ldb, b_expert_stride;
    int32_t a_rows, k;
    minfer::moe::ExpertScales scales;
    bool adds;  // int8: sums are added up in fp32
    // Rows of an expert's weight and their order where they are gated: weight_row.
    bool gated, gate_blocks;
    int32_t n, gate_row_stride, up_row_offset;
  };
  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    alignas(128) uint8_t weights[kStages][kTileM * kLine];
    alignas(128) uint8_t tokens[kStages][kTileN * kLine];
    alignas(16) float scales[kStages][kStageScales];
    typename Epilogue::TensorStorage staging;
    typename Scheduler::SharedStorage scheduler;
    [[no_unique_address]] typename Epilogue::PipelineStorage epilogue;
  };

  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE cute::tuple<> load_init(Params const&, Storage&, WorkItems const&, int) {
    return {};
  }

  static CUTLASS_DEVICE auto make_accumulator() {
    auto accumulator = cute::make_tensor<float>(cute::Int<kValues>{});  // d[4] of instruction j of the 64 rows mi, with j the inner index
    cute::clear(accumulator);
    return accumulator;
  }

  template <class Storage, class Inputs, class Accumulator, class Output>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, Inputs const&, Accumulator& accumulator, int, int k_tiles,
                                 Output const& output, int thread) {
    if constexpr (kIntegers) {
      if (!params.adds) {
        Sums sums = {};
        for_each_stage(params, storage, output.tile, k_tiles, thread, [&](int stage) { multiply<kMmas>(storage, stage, 0, sums, thread); });
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kValues; ++i) accumulator(i) = __int2float_rn(sums[i / 4 / kMmaN][i / 4 % kMmaN][i % 4]);
        return;
      }
    }
    auto const run = [&](auto parts) {
      for_each_stage(params, storage, output.tile, k_tiles, thread,
                     [&](int stage) { multiply_and_add<decltype(parts)::value>(params, storage, stage, accumulator, thread); });
    };
    if (kMostParts >= 4 && params.scales.parts == 4) {
      run(cute::C < kMostParts >= 4 ? 4 : 1 > {});
    } else if (kMostParts >= 2 && params.scales.parts == 2) {
      run(cute::C < kMostParts >= 2 ? 2 : 1 > {});
    } else {
      run(cute::C<1>{});
    }
  }

  template <class Storage>
  static CUTLASS_DEVICE auto& staging(Storage& storage) {
    return storage.staging;
  }

 private:
  /// Calls visit(stage) for the k tiles, one after the other, when they have arrived.
  template <class Storage, class Visit>
  static CUTLASS_DEVICE void for_each_stage(Params const& params, Storage& storage, ExpertTile const& tile, int k_tiles, int thread,
                                            Visit const& visit) {
    __syncthreads();  // all have read the previous tile's stages
#pragma unroll 1
    for (int k = 0; k < kStages - 1; ++k) {
      if (k < k_tiles) load_stage(params, storage, k, tile, k, thread);
      minfer::commit_copies();
    }
    int stage = 0;
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k) {
      minfer::wait_for_copies<kStages - 2>();
      __syncthreads();
      int const next = k + kStages - 1;
      if (next < k_tiles) load_stage(params, storage, next % kStages, tile, next, thread);
      minfer::commit_copies();
      visit(stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    minfer::wait_for_copies<0>();
  }

  static CUTLASS_DEVICE uint32_t unit_address(uint32_t lines, int line, int unit) { return lines + line * kLine + (unit ^ line % 8) * 16; }

  template <class Storage>
  static CUTLASS_DEVICE void load_stage(Params const& params, Storage& storage, int stage, ExpertTile const& tile, int k, int thread) {
    int const unit = thread % kUnits, column = k * kTileK + unit * 16, inside = min(max(params.k - column, 0), 16);
    auto const copy = [&](uint32_t lines, int line, uint8_t const* operand, int64_t row, int64_t stride, bool exists) {
      int const bytes = exists ? inside : 0;
      minfer::copy_async_16(unit_address(lines, line, unit), bytes > 0 ? operand + row * stride + column : operand, bytes);
    };
    uint8_t const* const weight = params.b + tile.expert * params.b_expert_stride;
    uint32_t const weights = minfer::shared_address(storage.weights[stage]), tokens = minfer::shared_address(storage.tokens[stage]);
#pragma unroll
    for (int line = thread / kUnits; line < kTileM; line += kThreads / kUnits) {
      int const row = minfer::moe::weight_row(params, tile.weight_tile * kTileM + line);
      copy(weights, line, weight, row, params.ldb, row >= 0);
    }
#pragma unroll
    for (int line = thread / kUnits; line < kTileN; line += kThreads / kUnits) {
      uint32_t row = uint32_t(tile.row + line);
      if (params.gather != nullptr && line < tile.tokens) row = uint32_t(params.gather[row]);
      copy(tokens, line, params.a, row, params.lda, line < tile.tokens && row < uint32_t(params.a_rows));  // rows that a lacks are zeros
    }
    if (params.scales.exist()) send_scales(params, minfer::shared_address(storage.scales[stage]), tile, k, thread);
  }

  /// Those behind k, or of a row that a does not have, are 0.
  static CUTLASS_DEVICE void send_scales(Params const& params, uint32_t to, ExpertTile const& tile, int k, int thread) {
    auto const& scales = params.scales;
#pragma unroll 1
    for (int i = thread; i < scales.parts * kTileN; i += kThreads) {
      int const token = i % kTileN, group = k * scales.parts + i / kTileN;
      int row = tile.row + token;
      bool exists = token < tile.tokens && group < scales.groups;
      if (exists && scales.gather != nullptr) {
        row = minfer::load_operand(scales.gather + row);
        exists = uint32_t(row) < uint32_t(scales.rows);
      }
      int64_t const at = row * scales.tokens.row_stride + tile.expert * scales.expert_offset + group * scales.tokens.k_stride;
      minfer::moe::send_scale(scales.tokens, exists ? int32_t(at) : 0, exists, to + 4 * i);
    }
    if (int const half = kThreads - 1 - thread; half < 2) {  // of gates, and of ups
      int const row = min(tile.weight_tile * (params.gated ? kTileM / 2 : kTileM), scales.n - 1);
      int64_t const at = tile.expert * scales.expert_stride + row / minfer::gemm::kScaleBlock * scales.weight.row_stride +
                         k * scales.weight.k_stride + (params.gated && half == 1 ? scales.up_offset : 0);
      minfer::moe::send_scale(scales.weight, int32_t(at), true, to + 4 * (kMostParts * kTileN + half));
    }
  }

  /// Adds the products of kCount times 32 of k, from the `first`-th on, to sums.
  template <int kCount, class Storage>
  static CUTLASS_DEVICE void multiply(Storage const& storage, int stage, int first, Sums& sums, int thread) {
    int const lane = thread % 32, warp = thread / 32;
    uint32_t const weights = minfer::shared_address(storage.weights[stage]), tokens = minfer::shared_address(storage.tokens[stage]);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kCount; ++step) {
      int const unit = 2 * (first + step);
      uint32_t a[kMmaM][4];
      CUTLASS_PRAGMA_UNROLL
      for (int mi = 0; mi < kMmaM; ++mi)
        minfer::load_matrices(unit_address(weights, 64 * mi + 16 * warp + lane % 16, unit + lane / 16), a[mi]);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kMmaN; j += 2) {
        uint32_t four[4];
        minfer::load_matrices(unit_address(tokens, 8 * (j + lane / 16) + lane % 8, unit + lane / 8 % 2), four);
        uint32_t const b[2][2] = {{four[0], four[1]}, {four[2], four[3]}};
        CUTLASS_PRAGMA_UNROLL
        for (int mi = 0; mi < kMmaM; ++mi) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2; ++i) {
            if constexpr (kIntegers) {
              minfer::multiply_s8(sums[mi][j + i], a[mi], b[i]);
            } else {
              minfer::multiply_e4m3(sums[mi][j + i], a[mi], b[i]);
            }
          }
        }
      }
    }
  }

  /// A stage's products, in kParts groups of k, times their scales. A thread's rows of the weight 8 apart are a gate and its up.
  template <int kParts, class Storage, class Accumulator>
  static CUTLASS_DEVICE void multiply_and_add(Params const& params, Storage const& storage, int stage, Accumulator& accumulator,
                                              int thread) {
    constexpr float kFactor = kIntegers ? 1.0f : minfer::kE4M3SumFactor;
    float const* const scales = storage.scales[stage];
    bool const scaled = params.scales.exist();
    float weight[2] = {kFactor, kFactor};
    if (scaled) {
      weight[0] *= scales[kMostParts * kTileN];
      weight[1] *= scales[kMostParts * kTileN + 1];
    }
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      Sums sums = {};
      multiply<kMmas / kParts>(storage, stage, part * (kMmas / kParts), sums, thread);
      auto const* const pairs = reinterpret_cast<float2 const*>(scales + part * kTileN) + thread % 4;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kMmaN; ++j) {
        float2 const token = scaled ? pairs[4 * j] : make_float2(1.0f, 1.0f);
        CUTLASS_PRAGMA_UNROLL
        for (int mi = 0; mi < kMmaM; ++mi) {
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 4; ++v) {
            float& sum = accumulator((mi * kMmaN + j) * 4 + v);
            sum = fmaf(float(sums[mi][j][v]), weight[v / 2] * (v % 2 == 0 ? token.x : token.y), sum);
          }
        }
      }
    }
  }
};

}  // namespace cutlass::gemm::collective
