// Decode's mainloop: what a warp computes of a work item. For each key block, S^T = K.Q^T, online softmax, O^T += V^T.P^T by mma.sync
// m16n8k16, with codes that become f16 in registers.
// Operands are swapped: S^T has 16 keys to a tile, and the 8 or 16 rows of an output tile are its columns, so that one query does not fill
// a tile of 16 rows. Fragments of codes: kv_dequant.cuh. What the cache format changes: format.cuh. Scores to probabilities: softmax.cuh.
#pragma once

#include "attention/decode/residual.cuh"
#include "attention/decode/softmax.cuh"
#include "attention/shared/mask.h"
#include "common/opaque.cuh"
#include "cutlass/cutlass.h"

namespace minfer::attention {

template <class Traits>
struct DecodeMainloop : Traits {
  using Softmax = DecodeSoftmax<Traits>;
  using KeyBlock = DecodeKeyBlock<Traits>;
  using Format = typename Softmax::Format;
  using Residual = DecodeResidual<Traits>;
  using Traits::k16Bit, Traits::kAsyncLoads, Traits::kFormat, Traits::kHeadDim, Traits::kInt4, Traits::kTileN, Traits::kTokenTiles;
  using Traits::kWarpKeys, Traits::kWarps, Traits::kWarpsOfBlock;
  using typename Traits::KeyBlockAddress, typename Traits::Params, typename Traits::Queries, typename Traits::TileScheduler;
  template <int kRowTiles>
  using State = typename Softmax::template State<kRowTiles>;
  template <int kRowTiles>
  using Scores = typename Softmax::template Scores<kRowTiles>;

  /// Warps that share a key block by taking kWarpKeys keys of it each. Without TMA, a warp has its own key blocks.
  static constexpr int kSharedBy = kAsyncLoads ? kWarpsOfBlock : 1;

  /// Computes the warp's part of a work item: of the shares of its key blocks, kSharedBy to a block, share number `warp` and every
  /// kWarps-th from there on. block_at(i) waits for key block i of the sequence and returns its address, release(i) gives the warp's share
  /// of it back. room: the shared memory of Residual.
  template <int kRowTiles, class BlockAt, class Release>
  static CUTLASS_DEVICE void compute(Params const& params, uint32_t room, DecodeWorkItem const& work, Queries const& queries,
                                     State<kRowTiles>& state, int warp, int lane, BlockAt const& block_at, Release const& release) {
    Mask const mask(work.seqlen_q, work.seqlen_k, params.window_left, params.window_right);
    Scores<kRowTiles> scores;
    scores.cap = params.softmax.softcap * kLog2E;
    scores.first_row = work.row;
    scores.shift = mask.shift;
    scores.first_key = mask.begin(0);
    set_factors(params, work, queries, scores, lane);
    int const keys_in_codes = TileScheduler::keys_in_codes(params, work.seqlen_k);
    int const codes_end = TileScheduler::codes_end(params, work.seqlen_k);
    int const end = work.block_end < codes_end ? work.block_end : codes_end;
    int const first_query = params.by_heads_per_kv.div(work.row), last_query = params.by_heads_per_kv.div(work.row + work.rows - 1);
    int const full_begin = mask.begin(last_query), full_end = min(mask.end(first_query), keys_in_codes);
    scores.last_key = keys_in_codes;
    state.clear();
    int share = work.block_begin * kSharedBy + warp;
    for (; share < end * kSharedBy; share += kWarps) {
      int const block = share / kSharedBy, begin = share % kSharedBy * (kTileN / kSharedBy);
      KeyBlockAddress const at = block_at(block);
#pragma unroll 1
      for (int first = begin; first < begin + kTileN / kSharedBy; first += kWarpKeys) {
        int const key = block * kTileN + first;
        if (key >= full_begin && key + kWarpKeys <= full_end) {
          Format::template compute_keys<Softmax, false, kRowTiles>(params, at, queries, state, scores, first, key, lane);
        } else if (key < keys_in_codes && key + kWarpKeys > scores.first_key) {  // scales of other keys may hold anything
          Format::template compute_keys<Softmax, true, kRowTiles>(params, at, queries, state, scores, first, key, lane);
        }
      }
      release(block);
    }
    if constexpr (kInt4) {
      if (share >= work.block_end) return;
      Format::template apply_code_scale<kRowTiles>(state);
      scores.last_key = work.seqlen_k;
      for (; share < work.block_end; share += kWarps) {
        int const first = (share - codes_end) * 16;
        if (first + keys_in_codes < work.seqlen_k) {
          Residual::compute(params, room, work, queries, state, scores, first, keys_in_codes, lane);
        }
      }
    }
  }

 private:
  /// The factors of products: the softmax's scale, of fp8 with K's, and what the queries were divided by.
  template <int kRowTiles>
  static CUTLASS_DEVICE void set_factors(Params const& params, DecodeWorkItem const& work, Queries const& queries,
                                         Scores<kRowTiles>& scores, int lane) {
    float scale = params.softmax.softcap > 0.0f ? params.softmax.scale / params.softmax.softcap : params.softmax.scale * kLog2E;
    if constexpr (kFormat == WeightFormat::kFp8E4M3) {
      scale *= load_operand(static_cast<float const*>(params.k_scale) + work.kv_head * params.scale_stride);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const row = 8 * i + 2 * (lane % 4) + e;
        scores.factor[i][e] = k16Bit ? scale : scale * queries.scale[row];
      }
    }
  }
};

}  // namespace minfer::attention
