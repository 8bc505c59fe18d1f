// What loads a prefill kernel's tiles: a warp, by TMA, or where keys and values are codes of a cache a warpgroup, which converts them.
#pragma once

#include "attention/prefill/convert.cuh"
#include "attention/prefill/traits.cuh"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace minfer::attention {

template <class Traits>
struct PrefillProducer : Traits {
  using Traits::blocks_of, Traits::handed_out, Traits::kConverts, Traits::kHeadDim, Traits::kHeadDimV;
  using Traits::kQueryStages, Traits::kStages, Traits::kTileM, Traits::kTileN, Traits::kv_head_of, Traits::mask_of, Traits::query_phase;
  using Traits::query_stage, Traits::release, Traits::rows_of;
  using typename Traits::Element, typename Traits::EmptyBarrier, typename Traits::FullBarrier, typename Traits::Params,
      typename Traits::Ring;
  using typename Traits::Rows, typename Traits::SharedStorage, typename Traits::Tiles;

  /// Calls load(box, row, page) for each TMA box of a block of keys or values, a lane each: its number in the block and what it begins with.
  template <class Load>
  static CUTLASS_DEVICE void for_boxes(Params const& params, QueryTile const& tile, int block, int lane, Load const& load) {
    for (int box = lane; box * params.box_rows < kTileN; box += 32) {
      int key = block * kTileN + box * params.box_rows, row = tile.row_k + key, page = 0;
      if (params.block_table != nullptr) {
        // Boxes whose keys nobody sees stand for their neighbours: their pages may be gone. Their scores are masked, their values cleared.
        int const seen = min(max(key, tile.first_key), tile.seqlen_k - 1);
        PageTable::Place const place = params.find(tile.batch, seen / params.box_rows * params.box_rows);
        page = place.page;
        row = place.row;
      } else if (params.cu_seqlens_k == nullptr) {
        page = tile.batch;
      }
      load(box, row, page);
    }
  }

  template <int kDim>
  static CUTLASS_DEVICE void load_block(Params const& params, CUtensorMap const& map, uint64_t* full, Element* to, QueryTile const& tile,
                                        int kv_head, int block, int lane) {
    using Hint = cute::TMA::CacheHintSm90;
    if (lane == 0) FullBarrier::arrive_and_expect_tx(full, uint32_t(kTileN * kDim * 2));
    __syncwarp();
    for_boxes(params, tile, block, lane, [&](int box, int row, int page) {
#pragma unroll
      for (int column = 0; column < kDim / 64; ++column) {
        cute::SM90_TMA_LOAD_4D::copy(&map, full, uint64_t(Hint::EVICT_NORMAL), to + (column * kTileN + box * params.box_rows) * 64,
                                     column * 64, kv_head, row, page);
      }
    });
  }

  /// By a warp.
  static CUTLASS_DEVICE void hand_out(SharedStorage& storage, int turn, QueryTile const& tile, int lane) {
    EmptyBarrier::wait(&storage.empty_tile[turn % 2], turn / 2 % 2 ^ 1);
    if (lane == 0) {
      storage.tile[turn % 2] = tile;
      EmptyBarrier::arrive(&storage.full_tile[turn % 2]);
    }
    __syncwarp();
  }

  /// Calls load(column, coordinates ..) for each TMA box of a tile's queries.
  template <class Load>
  static CUTLASS_DEVICE void for_columns(Params const& params, QueryTile const& tile, Load const& load) {
#pragma unroll
    for (int column = 0; column < kHeadDim / 64; ++column) {
      load(column, column * 64, 0, tile.row_q + tile.first, tile.head_unit, params.cu_seqlens_q != nullptr ? 0 : tile.batch);
    }
  }

  /// The queries of a tile, if it meets any keys; by a warp.
  static CUTLASS_DEVICE void load_queries(Params const& params, SharedStorage& storage, QueryTile const& tile, bool any, int turn,
                                          int lane) {
    using Hint = cute::TMA::CacheHintSm90;
    uint64_t* const full = &storage.full_q[query_stage(turn)];
    Element* const to = storage.q[query_stage(turn)];
    EmptyBarrier::wait(&storage.empty_q[query_stage(turn)], query_phase(turn) ^ 1);
    if (lane == 0) {
      FullBarrier::arrive_and_expect_tx(full, any ? uint32_t(kTileM * kHeadDim * 2) : 0);
      if (any)
        for_columns(params, tile, [&](int column, auto const&... at) {
          cute::SM90_TMA_LOAD_5D::copy(&params.q, full, uint64_t(Hint::EVICT_FIRST), to + column * kTileM * 64, at...);
        });
    }
    __syncwarp();
  }

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int lane) {
    Ring keys, values;
    keys.phase = values.phase = 1;  // a fresh barrier's previous phase counts as passed: every stage starts empty
    int const tiles = Tiles::count(storage.tiles, params);
    int t = int(blockIdx.x);
    // A tile is announced, and its queries on their way, at least into L2, while the one before it has most of its blocks ahead.
    auto const meets_any = [&](KeyBlocks<kTileN> const& blocks) { return blocks.begin < blocks.end; };
    auto const announce = [&](int turn) CUTLASS_LAMBDA_FUNC_INLINE {
      QueryTile const tile = t < tiles ? Tiles::at(storage.tiles, params, t) : QueryTile::none();
      hand_out(storage, turn, tile, lane);
      if (tile.is_none()) return;
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, rows_of(params, tile));
      if (kQueryStages > 1 || turn == 0) load_queries(params, storage, tile, meets_any(blocks), turn, lane);
      if (kQueryStages == 1 && turn > 0 && meets_any(blocks) && lane == 0)
        for_columns(params, tile, [&](int, auto const&... at) { cute::SM90_TMA_LOAD_5D::PREFETCH::copy(&params.q, at...); });
    };
    announce(0);
    for (int turn = 0;; ++turn) {
      QueryTile const tile = handed_out(storage, turn, lane);
      if (tile.is_none()) break;
      if (lane == 0) t = Tiles::next(params, t);
      t = __shfl_sync(0xffffffffu, t, 0);
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, rows_of(params, tile));
      int const kv_head = kv_head_of(params, tile);
      for (int block = blocks.end; block >= blocks.begin && meets_any(blocks); --block) {  // keys of block - 1, values of block
        if (block > blocks.begin) {
          EmptyBarrier::wait(&storage.empty_k[keys.index], keys.phase);
          load_block<kHeadDim>(params, params.k, &storage.full_k[keys.index], storage.k[keys.index], tile, kv_head, block - 1, lane);
          keys.advance();
        }
        if (block < blocks.end) {
          EmptyBarrier::wait(&storage.empty_v[values.index], values.phase);
          load_block<kHeadDimV>(params, params.v, &storage.full_v[values.index], storage.v[values.index], tile, kv_head, block, lane);
          values.advance();
        }
        if (block == blocks.end - 1) announce(turn + 1);
      }
      if (!meets_any(blocks)) announce(turn + 1);
      if constexpr (kQueryStages == 1) {  // free when this tile's last product with them is done
        QueryTile const next = handed_out(storage, turn + 1, lane);
        if (!next.is_none()) load_queries(params, storage, next, meets_any(blocks_of(params, next, rows_of(params, next))), turn + 1, lane);
      }
    }
  }

  template <WeightFormat kFormat>
  static CUTLASS_DEVICE void convert(Params const& params, SharedStorage& storage, int warp, int lane) {
    static_assert(!kConverts || kHeadDim == kHeadDimV);
    using Converter = BlockConverter<Traits::kType, kFormat, kTileN, kHeadDim>;
    uint32_t fills = 0;
    int t = int(blockIdx.x);
    for (int turn = 0;; ++turn) {
      if (warp == 0) {
        if (turn > 0) t = __shfl_sync(0xffffffffu, lane == 0 ? Tiles::next(params, t) : 0, 0);
        hand_out(storage, turn, t < Tiles::count(storage.tiles, params) ? Tiles::at(storage.tiles, params, t) : QueryTile::none(), lane);
      }
      EmptyBarrier::wait(&storage.full_tile[turn % 2], turn / 2 % 2);
      QueryTile const tile = handed_out(storage, turn, lane);
      release(&storage.empty_tile[turn % 2], lane);
      if (tile.is_none()) break;
      Rows const rows = rows_of(params, tile);
      Mask const mask = mask_of(params, tile);
      KeyBlocks<kTileN> const blocks(mask, rows.first, rows.last);
      if (warp == 0) load_queries(params, storage, tile, blocks.begin < blocks.end, turn, lane);
      if (blocks.begin >= blocks.end) continue;
      Converter const converter(params, tile.batch, kv_head_of(params, tile), mask.begin(rows.first), mask.end(rows.last), tile.seqlen_k,
                                warp, lane);
      int block = blocks.end - 1, page = converter.page_of(block);
      typename Converter::Block codes;
      converter.load(codes, converter.template source<true>(block, page));
      for (; (block + 1) * kTileN > converter.first_key; --block, ++fills) {
        int before;
        auto const look_up = [&] { before = converter.page_of(block - 1); };  // the nearest page where no row of such a block is seen
        uint32_t const stage = fills % kStages, phase = fills / kStages % 2 ^ 1;
        EmptyBarrier::wait(&storage.empty_k[stage], phase);
        converter.template store<true>(codes, block, cute::cast_smem_ptr_to_uint(storage.k[stage]),
                                       converter.template source<false>(block, page), look_up);
        filled(&storage.full_k[stage], lane);
        EmptyBarrier::wait(&storage.empty_v[stage], phase);
        converter.template store<false>(codes, block, cute::cast_smem_ptr_to_uint(storage.v[stage]),
                                        converter.template source<true>(block - 1, before), [] {});
        filled(&storage.full_v[stage], lane);
        page = before;
      }
    }
  }

  /// A warp's part of a stage is written.
  static CUTLASS_DEVICE void filled(uint64_t* full, int lane) {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane == 0) FullBarrier::arrive(full);
  }
};

}  // namespace minfer::attention
