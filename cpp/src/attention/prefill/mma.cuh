// The two products of prefill attention on sm_90a, for one consumer warpgroup: scores S = Q.K^T and output O += P.V, both by WGMMA with
// fp32 accumulators. Here are the shared-memory layouts, the tiled MMAs and the operand fragments; P comes from registers, the rest from
// shared memory.
#pragma once

#include "attention/prefill/smem_layouts.cuh"
#include "attention/prefill/traits.cuh"
#include "cute/tensor.hpp"

namespace minfer::attention {

template <class Traits>
struct PrefillMma : Traits {
  using Traits::kHeadDim, Traits::kHeadDimV, Traits::kQueryStages, Traits::kStages, Traits::kTileM, Traits::kTileN;
  using typename Traits::MmaElement;

  using QueriesLayout = KMajorRows<64, kTileM, kHeadDim, kQueryStages>;  // (64,head_dim,PIPE): a warpgroup's rows of a tile
  using KeysLayout = KMajorRows<kTileN, kTileN, kHeadDim, kStages>;      // (N,head_dim,PIPE)
  using ValuesLayout = MnMajorRows<kTileN, kHeadDimV, kStages>;          // (head_dim_v,N,PIPE)

  using ScoresShape = cute::Shape<cute::_64, cute::Int<kTileN>>;
  using OutputShape = cute::Shape<cute::_64, cute::Int<kHeadDimV>>;
  using MmaScores = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<MmaElement, MmaElement, float, cute::Shape<cute::_64, cute::Int<kTileN>, cute::_64>>()));
  using MmaOutput = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<MmaElement, MmaElement, float, cute::Shape<cute::_64, cute::Int<kHeadDimV>, cute::Int<kTileN>>,
                                       cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>()));
  /// P in registers as the A operand of O += P.V, (MMA,MMA_M,MMA_K).
  using ProbabilitiesLayout = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kTileN / 16>>>;
};

}  // namespace minfer::attention
