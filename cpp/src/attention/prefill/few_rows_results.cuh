// What the batch-invariant kernels for few rows leave of an item: the output and lse of a tile, or the partial of a split.
//
// Where each item of a launch has a CTA of its own and all CTAs run at the same time (folds_in_launch), partials pass between the CTAs as
// packets (common/packet.cuh), and the CTAs of a tile fold its splits themselves, each some rows: a launch behind this one costs 1 to 2 us.
// An item's packets are those of its CTA. Sequences that overlap, which no call should have, may have more items than the launch has CTAs:
// the items beyond are not computed, and not waited for.
// Else that launch folds them (split_merge.cuh). Both fold in the order of shared/splits.h, so with the same bits.
#pragma once

#include "attention/prefill/few_rows_traits.cuh"
#include "attention/prefill/split_merge.cuh"
#include "attention/shared/kv_dequant.cuh"
#include "attention/shared/softmax.cuh"
#include "common/float16.cuh"
#include "common/opaque.cuh"
#include "common/packet.cuh"

namespace minfer::attention {

template <class Traits>
struct FewRowsResults : Traits {
  using Traits::kChannelTiles, Traits::kCodes, Traits::kFormat, Traits::kHeadDim, Traits::kTileM, Traits::kType, Traits::kv_head_of;
  using Traits::over_packed_heads;
  using typename Traits::Element, typename Traits::Params, typename Traits::Tile, typename Traits::TileScheduler;
  using Items = typename TileScheduler::Items;
  using Codes = KvCodes<kFormat>;

  static CUTLASS_DEVICE bool is_query(Params const& params, Tile const& tile, int row) {
    return tile.first + over_packed_heads(params, row) < tile.seqlen_q;
  }
  /// The channel of value x of output tile i; its row is 2 * (thread % 4) + x % 2.
  static CUTLASS_DEVICE int column_of(int i, int x, int thread) {
    return Codes::row_of(thread / 32 * kChannelTiles + i, thread % 32 / 4, x / 2);
  }

  /// Leaves the partial of a split that is an item in its slot of the workspace; total: of the thread's two rows, column_of(i, x): the
  /// channel of output[i][x].
  template <int kTiles, class ColumnOf>
  static CUTLASS_DEVICE void store_partial(Params const& params, Tile const& tile, SplitState const (&total)[2],
                                           float const (&output)[kTiles][4], int thread, ColumnOf const& column_of) {
    int64_t const slot = Items::slot_of(params, params.cu_seqlens_q != nullptr, tile.batch, tile.row_q, tile.head_tile, tile.first,
                                        tile.split, tile.first_key / Items::kSplitKeys);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const row = 2 * (thread % 4) + e;
      if (!is_query(params, tile, row) || row >= params.slot_rows) continue;
      if (thread < 4) *state_in_slot(params, slot, row) = total[e];
      float* const to = output_in_slot(params, slot, row, kHeadDim);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if constexpr (kCodes) {  // neighbouring channels
          *reinterpret_cast<float2*>(to + column_of(i, e)) = make_float2(output[i][e], output[i][2 + e]);
        } else {
#pragma unroll
          for (int x = e; x < 4; x += 2) to[column_of(i, x)] = output[i][x];
        }
      }
    }
  }

  struct Finished {
    float factor;  // of the row's output
    uint16_t* to;  // where it is stored
  };
  /// What the output is multiplied by because of the values' scale; read at the end, it would be waited for.
  static CUTLASS_DEVICE float value_scale(Params const& params, Tile const& tile) {
    if constexpr (kCodes) return scale_of_output(params, kv_head_of(params, tile));
    return 1.0f;
  }
  /// Finishes a row whose splits are folded, and stores its lse if `stores_lse`.
  static CUTLASS_DEVICE Finished finish(Params const& params, Tile const& tile, float scale, int row, SplitState const& total,
                                        bool stores_lse) {
    int const head = tile.head_tile * params.packed_heads + (row & (params.packed_heads - 1));
    int64_t const of_batch = params.cu_seqlens_q != nullptr ? 0 : tile.batch;
    int64_t const at = int64_t(tile.row_q) + tile.first + over_packed_heads(params, row);
    float lse, factor = finish_row<Element, true>(params.softmax, head, true, total.max, total.sum, &lse);
    if constexpr (kCodes) factor = __fmul_rn(factor, scale);
    if (params.lse != nullptr && stores_lse) params.lse[of_batch * params.lse_batch + head * params.lse_head + at] = lse;
    return {factor, static_cast<uint16_t*>(params.out) + of_batch * params.out_batch + at * params.out_row + head * params.out_head};
  }

  /// Stores the output and lse of a tile whose splits are folded. scale: value_scale().
  template <int kTiles, class ColumnOf>
  static CUTLASS_DEVICE void store(Params const& params, Tile const& tile, float scale, SplitState const (&total)[2],
                                   float const (&output)[kTiles][4], int thread, ColumnOf const& column_of) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const row = 2 * (thread % 4) + e;
      if (!is_query(params, tile, row)) continue;
      auto const [factor, to] = finish(params, tile, scale, row, total[e], thread < 4);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int x = e; x < 4; x += 2) {
          int const column = column_of(i, x);
          if (column < params.head_dim_v) to[column] = uint16_t(Float16<kType>::pack(finish_output(output[i][x], factor), 0.0f));
        }
      }
    }
  }

  // ---- partials as packets --------------------------------------------------------------------------------------------------------

  // A segment of a row has 64 elements, a pair of them in each packet: the elements of rows g and g + 8 of an MMA's tile, pair 8 tile + g.
  static constexpr int kSegments = kHeadDim / 64, kAtOnce = Traits::kCtasPerSm == 1 ? 16 : 8;  // splits whose packets are polled

  /// The packets of a segment: maximum and sum, the stamp of those that follow, then the pairs.
  static CUTLASS_DEVICE Packet* packets_of(Params const& params, int item, int row, int segment) {
    return params.packets + ((int64_t(item) * kTileM + row) * kSegments + segment) * kPacketsOfPartial;
  }
  /// Leaves the partial of a split that is an item as packets with the CTA's stamp.
  static CUTLASS_DEVICE void leave_packets(Params const& params, uint64_t stamp, Tile const& tile, SplitState const (&total)[2],
                                           float const (&output)[kChannelTiles][4], int thread) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const row = 2 * (thread % 4) + e;
      if (!is_query(params, tile, row)) continue;
#pragma unroll
      for (int i = 0; i < kChannelTiles; ++i) {
        int const pair = (thread / 32 * kChannelTiles + i) * 8 + thread % 32 / 4;
        store_packet(packets_of(params, int(blockIdx.x), row, pair / 32) + 2 + pair % 32, numbers_of(output[i][e], output[i][2 + e]),
                     stamp);
      }
      if (thread >= 4) continue;
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        Packet* const to = packets_of(params, int(blockIdx.x), row, segment);
        store_packet(to, numbers_of(total[e].max, total[e].sum), params.nonce);
        store_packet(to + 1, stamp, params.nonce);
      }
    }
  }

  /// Folds the warp's segment of the tile's rows, if it has one, over all `splits` of the sequence, and stores it. items: of the launch.
  static CUTLASS_DEVICE void fold_packets(Params const& params, Tile const& tile, float scale, typename Items::Splits const& splits,
                                          int items, int warp, int lane) {
    int const task = tile.split - splits.first + splits.count * warp, row = task / kSegments, segment = task % kSegments;
    if (row >= kTileM || !is_query(params, tile, row)) return;
    int const item = Items::item_of(params, int(blockIdx.x), tile.split, splits.first);  // of the first split
    int const exist = min(splits.count, (items - item + params.head_tiles - 1) / params.head_tiles);
    int64_t const next = int64_t(params.head_tiles) * kTileM * kSegments * kPacketsOfPartial;  // from a split's packets to the next one's
    Packet* const first = packets_of(params, item, row, segment);
    SplitState total{-INFINITY, 0.0f};
    float2 output = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (int end = exist; end > 0; end -= kAtOnce) {  // splits end - 1 and those before it
      bool const wanted = lane < min(end, kAtOnce);   // a split in each lane
      Packet* const of_lane = first + (end - 1 - lane) * next;
      Packet state{0, 0}, stamp{0, 0}, outputs[kAtOnce] = {};
      auto const poll_outputs = [&] {
        Packet const* from = first + (end - 1) * next + 2 + lane;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k, from -= next) {
          make_opaque(from);  // one address at a time: all of them would take as many registers as half the outputs
          poll_packet(k < end, outputs[k], from);
        }
      };
      bool missing = wanted;
      do {  // poll only what has not arrived: reading all of it again would delay the arrival
        poll_packet(missing, state, of_lane);
        poll_packet(missing, stamp, of_lane + 1);
        missing = wanted && (state.tag != params.nonce || stamp.tag != params.nonce);
      } while (__any_sync(0xffffffffu, missing));
      if (wanted) clear_tag(of_lane), clear_tag(of_lane + 1);  // a replay of the launch has the same nonce
      poll_outputs();
      uint64_t const stamps = warp_xor(wanted ? stamp.numbers : 0);
      auto const found = [&] {
        uint64_t tags = 0;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) tags ^= k < end ? outputs[k].tag : 0;
        return tags;
      };
      while (__any_sync(0xffffffffu, found() != stamps)) poll_outputs();
      float2 const of_split = state.get();
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        SplitState const split{__shfl_sync(0xffffffffu, of_split.x, k), __shfl_sync(0xffffffffu, of_split.y, k)};
        if (k >= end) continue;
        SplitWeights const weights = fold_state(total, split);
        output.x = fold_output(output.x, outputs[k].get().x, weights);
        output.y = fold_output(output.y, outputs[k].get().y, weights);
      }
    }
    int const pair = segment * 32 + lane;
    auto const [factor, to] = finish(params, tile, scale, row, total, segment == 0 && lane == 0);
    store_pair(params, to, Codes::row_of(pair / 8, pair % 8, 0), Codes::row_of(pair / 8, pair % 8, 1), finish_output(output.x, factor),
               finish_output(output.y, factor));
  }
  static CUTLASS_DEVICE uint64_t warp_xor(uint64_t x) {
    return uint64_t(__reduce_xor_sync(0xffffffffu, uint32_t(x >> 32))) << 32 | __reduce_xor_sync(0xffffffffu, uint32_t(x));
  }
  static CUTLASS_DEVICE void store_pair(Params const& params, uint16_t* to, int first, int second, float x, float y) {
    uint32_t const pair = Float16<kType>::pack(x, y);
    if constexpr (kCodes) {  // neighbouring channels; head_dim_v is even
      if (first < params.head_dim_v) *reinterpret_cast<uint32_t*>(to + first) = pair;
    } else {
      if (first < params.head_dim_v) to[first] = uint16_t(pair);
      if (second < params.head_dim_v) to[second] = uint16_t(pair >> 16);
    }
  }
};

}  // namespace minfer::attention
