// Splits that different CTAs compute (split_scheduler.cuh): how a consumer warpgroup leaves the partial of a split, and the kernel behind
// it that folds the partials of each row in the order of shared/splits.h, normalises and stores.
#pragma once

#include <type_traits>

#include "attention/prefill/convert.cuh"
#include "attention/prefill/split_scheduler.cuh"
#include "attention/prefill/traits.cuh"
#include "attention/shared/launch.h"
#include "common/dependent_launch.cuh"
#include "common/float16.cuh"
#include "common/kernel_launch.h"
#include "common/opaque.cuh"

namespace minfer::attention {

/// Slots of partials in the workspace. A slot has slot_rows rows of kHeadDimV floats.
template <class Params>
CUTLASS_DEVICE float* output_in_slot(Params const& params, int64_t slot, int row, int head_dim_v) {
  return params.partials + (slot * params.slot_rows + row) * head_dim_v;
}
template <class Params>
CUTLASS_DEVICE SplitState* state_in_slot(Params const& params, int64_t slot, int row) {
  return params.partial_states + slot * params.slot_rows + row;
}

template <class Traits>
struct PrefillSplitStore : Traits {
  using Traits::kHeadDimV, Traits::kTileM, Traits::over_packed_heads;
  using typename Traits::Params, typename Traits::Tile, typename Traits::TileScheduler;

  /// Leaves a warpgroup's rows of a split; the sums are those of whole rows.
  template <class Softmax, class Output>
  static CUTLASS_DEVICE void store(Params const& params, Tile const& tile, Softmax const& softmax, Output const& output, int consumer,
                                   int thread) {
    make_opaque(thread);
    make_opaque(consumer);  // as in PrefillSplitTotals
    int const lane = thread % 32, row = consumer * 64 + thread / 32 * 16 + lane / 4;
    using Items = typename TileScheduler::Items;
    int64_t const slot = Items::slot_of(params, params.cu_seqlens_q != nullptr, tile.batch, tile.row_q, tile.head_tile, tile.first,
                                        tile.split, tile.first_key / (Traits::split_blocks_of_tile(tile) * Traits::kTileN));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const of_tile = row + 8 * h;
      if (tile.first + over_packed_heads(params, of_tile) >= tile.seqlen_q || of_tile >= params.slot_rows) continue;
      if (lane % 4 == 0) *state_in_slot(params, slot, of_tile) = {softmax.row_max[h], softmax.row_sum[h]};
      float* const to = output_in_slot(params, slot, of_tile, kHeadDimV) + 2 * (lane % 4);
#pragma unroll
      for (int block = 0; block < kHeadDimV / 8; ++block) {
        *reinterpret_cast<float2*>(to + 8 * block) = make_float2(output(4 * block + 2 * h), output(4 * block + 2 * h + 1));
      }
    }
  }
};

/// A warp folds one row: query and head. A CTA has the rows of one sequence. kAtOnce: splits whose loads are under way, on which no bit
/// depends.
template <class Params, class TileScheduler, DataType kType, int kTileM, int kHeadDimV, int kAtOnce>
struct SplitMerge {
  using Element = CutlassElement<kType>;
  using Items = typename TileScheduler::Items;
  static constexpr int kWarps = 8, kColumns = kHeadDimV / 32;  // columns of a lane

  static CUTLASS_DEVICE void run(Params const& params, int batch, int number) {
    int const lane = int(threadIdx.x) % 32;
    RowRange const queries = params.queries(batch), keys = params.Sequences::keys(batch);
    int const query = number / params.heads_q, head = number - query * params.heads_q;
    auto const splits = Items::splits_of(params, queries.count, keys.count);
    if (query >= queries.count || !Items::is_divided(params, queries.count, splits)) return;
    int const first_query = query - query % (kTileM / params.packed_heads), head_tile = head / params.packed_heads;
    int const row = (query - first_query) * params.packed_heads + (head & (params.packed_heads - 1));
    Mask const mask(queries.count, keys.count, params.window_left, params.window_right);
    int const begin = mask.begin(query), end = mask.end(query);
    int const length = splits.blocks * Items::kBlockKeys, first = begin / length, seen = begin < end ? (end + length - 1) / length : first;
    int64_t const slot =
        Items::slot_of(params, params.cu_seqlens_q != nullptr, batch, queries.first, head_tile, first_query, first, splits.first);
    SplitState total{-INFINITY, 0.0f};
    float output[kColumns] = {};
#pragma unroll 1
    for (int next = seen - first; next > 0; next -= kAtOnce) {  // splits `first` + next - 1 and those before it
      SplitState states[kAtOnce];
      float parts[kAtOnce][kColumns];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int64_t const from = slot + max(next - 1 - i, 0);
        states[i] = *state_in_slot(params, from, row);
        load(parts[i], output_in_slot(params, from, row, kHeadDimV) + lane * kColumns);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i >= next) continue;
        SplitWeights const weights = fold_state(total, states[i]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) output[c] = fold_output(output[c], parts[i][c], weights);
      }
    }
    float lse;
    float factor = finish_row<Element, true>(params.softmax, head, true, total.max, total.sum, &lse);
    if constexpr (requires { params.format; }) factor = __fmul_rn(factor, scale_of_output(params, head / params.heads_per_kv));
    int64_t const of_batch = params.cu_seqlens_q != nullptr ? 0 : batch, at = queries.first + query;
    if (params.lse != nullptr && lane == 0) params.lse[of_batch * params.lse_batch + head * params.lse_head + at] = lse;
    auto* const to = static_cast<Element*>(params.out) + of_batch * params.out_batch + at * params.out_row + head * params.out_head;
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      uint32_t const pair = Float16<kType>::pack(finish_output(output[c], factor), finish_output(output[c + 1], factor));
      if (lane * kColumns + c < params.head_dim_v) *reinterpret_cast<uint32_t*>(to + lane * kColumns + c) = pair;
    }
  }
  static CUTLASS_DEVICE void load(float (&to)[kColumns], float const* from) {
    constexpr int kVector = kColumns % 4 == 0 ? 4 : 2;
    using Vector = std::conditional_t<kVector == 4, float4, float2>;
#pragma unroll
    for (int c = 0; c < kColumns; c += kVector) {
      Vector const x = *reinterpret_cast<Vector const*>(from + c);
#pragma unroll
      for (int i = 0; i < kVector; ++i) to[c + i] = reinterpret_cast<float const*>(&x)[i];
    }
  }
};

template <class Params, class TileScheduler, DataType kType, int kTileM, int kHeadDimV, int kAtOnce>
__global__ void __launch_bounds__(256) merge_splits_kernel(__grid_constant__ Params const params) {
  allow_dependent_launch();
  wait_for_predecessor();
  using Merge = SplitMerge<Params, TileScheduler, kType, kTileM, kHeadDimV, kAtOnce>;
  Merge::run(params, int(blockIdx.x), int(blockIdx.y) * Merge::kWarps + int(threadIdx.x) / 32);
}

/// Launches the merge of all rows that may be divided, behind the kernel that leaves their partials.
template <class Traits, class Params = typename Traits::Params>
Status launch_split_merge(Params const& params, AttentionLaunchArguments const& arguments) {
  int64_t const rows = params.split_rows / params.packed_heads * params.heads_q;  // of a sequence, at most
  LaunchShape shape;
  shape.grid = dim3(unsigned(params.batch), unsigned((rows + 7) / 8));
  shape.threads = 256;
  shape.programmatic = arguments.programmatic_launch;
  shape.stream = arguments.stream;
  auto const launch_with = [&](auto at_once) {
    return launch(shape, "launch of the merge of splits",
                  &merge_splits_kernel<Params, typename Traits::TileScheduler, Traits::kType, Traits::kTileM, Traits::kHeadDimV, at_once()>,
                  params);
  };
  // Many rows of few splits want many warps on an SM, few rows of many splits all loads under way.
  if constexpr (Traits::kTileM >= 64) {
    if (params.max_splits <= 4) return launch_with(std::integral_constant<int, 4>{});
    if (params.max_splits <= 8) return launch_with(std::integral_constant<int, 8>{});
  }
  return launch_with(std::integral_constant<int, 16>{});
}

}  // namespace minfer::attention
