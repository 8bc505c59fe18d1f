// Geometry of the portable GEMM with 4-bit weights: a CTA's tile, its warps, a stage of the ring.
#pragma once

#include "common/cutlass_element.cuh"
#include "cute/tensor.hpp"
#include "quantized_gemm/dequantize.cuh"
#include "quantized_gemm/w4_layout.h"

namespace minfer::w4a16 {

template <class Config>
struct StageSm80 {
  static constexpr DataType kType = Config::kType;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK;  // rows of weights, tokens, k
  static constexpr int kThreads = Config::kThreads, kWarpgroups = kThreads / 128;
  static constexpr int kStages = Config::kStages;
  static constexpr int kBlocks = kTileK / kBlockK;          // weight blocks of a stage, along k
  static constexpr int kMmaM = kTileM / kBlockN;            // and along the rows: each is 16 rows of a warp
  static constexpr int kMmaN = kTileN / (8 * kWarpgroups);  // tokens of a warp, in eights: its j-th are eight j * kWarpgroups + warpgroup
  static constexpr int kValues = kMmaM * kMmaN * 4;         // accumulators of a thread
  static constexpr int kScaleRows = kTileK / 32;            // groups that may begin in a stage
  static_assert(Config::kSwap && Config::kSchedule == Schedule::kMultistage && Config::kClusterM * Config::kClusterN == 1);
  static_assert(kThreads % 128 == 0 && kTileM % kBlockN == 0 && kTileK % kBlockK == 0 && kTileN % (8 * kWarpgroups) == 0 && kStages >= 2);

  using Codes = Int4<kType>;
  using Half = Half2<kType>;
  using Element = CutlassElement<kType>;
  using MmaAtom = cute::conditional_t<kType == DataType::kF16, cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  using TiledMma = cute::TiledMMA<cute::MMA_Atom<MmaAtom>, cute::Layout<cute::Shape<cute::_4, cute::Int<kWarpgroups>, cute::_1>>,
                                  cute::Tile<cute::_64, cute::Int<8 * kWarpgroups>, cute::_16>>;

  uint4 weights[kMmaM][kBlocks][128];
  uint4 activations[kBlocks][kTileN][8];  // vector u (8 of k) of token t at u ^ t % 8: neither copies nor ldmatrix conflict in a bank
  uint16_t scales[kScaleRows][kTileM], zeros[kScaleRows][kTileM];
};

}  // namespace minfer::w4a16
