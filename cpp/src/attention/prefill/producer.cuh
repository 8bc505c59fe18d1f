// The producer of a prefill kernel: it walks the tiles of queries, publishes them to the consumers, and fills the stages of queries, keys
// and values. Its warps do this by TMA (produce); where keys and values are codes of a cache, they convert them (convert).
#pragma once

#include "attention/prefill/convert.cuh"
#include "attention/prefill/traits.cuh"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace minfer::attention {

template <class Traits>
struct PrefillProducer : Traits {
  using Traits::blocks_of, Traits::kConverts, Traits::kHeadDim, Traits::kHeadDimV, Traits::kQueryStages, Traits::kStages, Traits::kTileM;
  using Traits::kTileN, Traits::kv_head_of, Traits::mask_of, Traits::queries_of, Traits::query_phase, Traits::query_stage;
  using Traits::read_tile, Traits::release;
  using typename Traits::EmptyBarrier, typename Traits::FullBarrier, typename Traits::MmaElement, typename Traits::Params;
  using typename Traits::Queries, typename Traits::Ring, typename Traits::SharedStorage, typename Traits::Tile,
      typename Traits::TileScheduler;

  // ---- boxes of TMA ---------------------------------------------------------------------------------------------------------------

  /// Where the first key of a box is.
  struct Place {
    int row, page;
  };
  /// That of a box of a key block. A box whose keys are all masked is loaded from the nearest box that is seen, since its own page may have
  /// been freed; its scores are masked and its values cleared.
  static CUTLASS_DEVICE Place place_of(Params const& params, Tile const& tile, int block, int box) {
    int const key = block * kTileN + box * params.box_rows;
    if (params.block_table != nullptr) {
      int seen = min(max(key, tile.first_key), tile.seqlen_k - 1);
      if (seen != key) seen = seen / params.box_rows * params.box_rows;
      PageTable::Location const location = params.find(tile.batch, seen);
      return {location.row, location.page};
    }
    return {tile.row_k + key, params.cu_seqlens_k == nullptr ? tile.batch : 0};
  }

  /// Loads a warp's share of a tile's blocks `block` down to `end` of keys or values, one lane a box: the 64 columns number kFirst, and
  /// each kStep further. The warp that has the first columns says how many bytes come; the others' may come before it has.
  template <int kDim, int kFirst, int kStep>
  static CUTLASS_DEVICE void load_blocks(Params const& params, CUtensorMap const& map, uint64_t* full, uint64_t* empty,
                                         MmaElement (*stages)[kTileN * kDim], Tile const& tile, Ring& ring, int lane, int block, int end) {
    using Hint = cute::TMA::CacheHintSm90;
    int const kv_head = kv_head_of(params, tile);
    for (; block >= end; --block) {
      Place place = {0, 0};  // looked up while the stage is not free yet
      if (lane * params.box_rows < kTileN) place = place_of(params, tile, block, lane);
      EmptyBarrier::wait(&empty[ring.index], ring.phase);
      if constexpr (kFirst == 0) {
        if (lane == 0) FullBarrier::arrive_and_expect_tx(&full[ring.index], uint32_t(kTileN * kDim * 2));
        __syncwarp();
      }
      for (int box = lane; box * params.box_rows < kTileN; box += 32) {
        if (box >= 32) place = place_of(params, tile, block, box);
#pragma unroll
        for (int column = kFirst; column < kDim / 64; column += kStep) {
          cute::SM90_TMA_LOAD_4D::copy(&map, &full[ring.index], uint64_t(Hint::EVICT_NORMAL),
                                       stages[ring.index] + (column * kTileN + box * params.box_rows) * 64, column * 64, kv_head, place.row,
                                       place.page);
        }
      }
      __syncwarp();
      ring.advance();
    }
  }

  /// Calls load(column, coordinates ..) for each TMA box of a tile's queries: 64 columns of all rows.
  template <class Load>
  static CUTLASS_DEVICE void for_columns(Params const& params, Tile const& tile, Load const& load) {
#pragma unroll
    for (int column = 0; column < kHeadDim / 64; ++column) {
      load(column, column * 64, 0, tile.row_q + tile.first, tile.head_tile, params.cu_seqlens_q != nullptr ? 0 : tile.batch);
    }
  }

  // ---- a tile ---------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE Tile none() { return {-1}; }
  /// Publishes the CTA's tile number `iteration` to the consumers, by a warp.
  static CUTLASS_DEVICE void publish_tile(SharedStorage& storage, int iteration, Tile const& tile, int lane) {
    EmptyBarrier::wait(&storage.empty_tile[iteration % 2], iteration / 2 % 2 ^ 1);
    if (lane == 0) {
      storage.tile[iteration % 2] = tile;
      EmptyBarrier::arrive(&storage.full_tile[iteration % 2]);
    }
    __syncwarp();
  }

  /// Begins the load of a tile's queries when their stage is empty, by a warp. A tile that sees no keys needs none.
  static CUTLASS_DEVICE void load_queries(Params const& params, SharedStorage& storage, Tile const& tile, bool sees_keys, int iteration,
                                          int lane) {
    using Hint = cute::TMA::CacheHintSm90;
    uint64_t* const full = &storage.full_q[query_stage(iteration)];
    MmaElement* const to = storage.q[query_stage(iteration)];
    EmptyBarrier::wait(&storage.empty_q[query_stage(iteration)], query_phase(iteration) ^ 1);
    if (lane == 0) {
      FullBarrier::arrive_and_expect_tx(full, sees_keys ? uint32_t(kTileM * kHeadDim * 2) : 0);
      if (sees_keys)
        for_columns(params, tile, [&](int column, auto const&... at) {
          cute::SM90_TMA_LOAD_5D::copy(&params.q, full, uint64_t(Hint::EVICT_FIRST), to + column * kTileM * 64, at...);
        });
    }
    __syncwarp();
  }

  // ---- keys and values by TMA -----------------------------------------------------------------------------------------------------

  /// Warps that load keys and values. A warp issues one box after the other, and boxes are as short as the pages that a block crosses: with
  /// one warp for all of them, 8192 tokens of 32 heads took 1204 us in blocks of 80 keys (kInvariant) and pages of 64, and 1031 with four,
  /// which have half of the columns each. Where blocks are whole pages of the usual sizes, two are enough, and four take 3 % longer.
  static constexpr int kLoaders = kHeadDim > 64 && kTileN % 64 != 0 ? 4 : 2;

  static CUTLASS_DEVICE bool sees_keys(KeyBlocks<kTileN> const& blocks) { return blocks.begin < blocks.end; }

  /// A tile's blocks `block` down to `end`: even warps load keys, odd ones values.
  static CUTLASS_DEVICE void load_tile(Params const& params, SharedStorage& storage, Tile const& tile, Ring& ring, int warp, int lane,
                                       int block, int end) {
    constexpr int kStep = kLoaders / 2;
    auto const load = [&](auto first) CUTLASS_LAMBDA_FUNC_INLINE {
      constexpr int kFirst = first;
      if (warp % 2 == 0) {
        load_blocks<kHeadDim, kFirst, kStep>(params, params.k, storage.full_k, storage.empty_k, storage.k, tile, ring, lane, block, end);
      } else {
        load_blocks<kHeadDimV, kFirst, kStep>(params, params.v, storage.full_v, storage.empty_v, storage.v, tile, ring, lane, block, end);
      }
    };
    if (warp / 2 == 0) {
      load(cute::Int<0>{});
    } else {
      load(cute::Int<kStep - 1>{});
    }
  }

  /// Warp 0 also walks the tiles, publishes them to all, and loads queries.
  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int warp, int lane) {
    Ring ring = Ring::of_producer();
    if (warp >= kLoaders) return;
    if (warp > 0) {
      for (int iteration = 0;; ++iteration) {
        EmptyBarrier::wait(&storage.full_tile[iteration % 2], iteration / 2 % 2);
        Tile const tile = read_tile(storage, iteration, lane);
        release(&storage.empty_tile[iteration % 2], lane);
        if (tile.is_none()) return;
        KeyBlocks<kTileN> const blocks = blocks_of(params, tile, queries_of(params, tile));
        load_tile(params, storage, tile, ring, warp, lane, blocks.end - 1, blocks.begin);
      }
    }
    int const tiles = TileScheduler::count(storage.tiles, params);
    int t = int(blockIdx.x);
    // Publishes tile t and begins the load of its queries, at least into L2, while the tile before it still has most of its key blocks
    // ahead.
    auto const publish_next = [&](int iteration) CUTLASS_LAMBDA_FUNC_INLINE {
      Tile const tile = t < tiles ? TileScheduler::at(storage.tiles, params, t) : none();
      publish_tile(storage, iteration, tile, lane);
      if (tile.is_none()) return;
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, queries_of(params, tile));
      if (kQueryStages > 1 || iteration == 0) load_queries(params, storage, tile, sees_keys(blocks), iteration, lane);
      if (kQueryStages == 1 && iteration > 0 && sees_keys(blocks) && lane == 0)
        for_columns(params, tile, [&](int, auto const&... at) { cute::SM90_TMA_LOAD_5D::PREFETCH::copy(&params.q, at...); });
    };
    publish_next(0);
    for (int iteration = 0;; ++iteration) {
      Tile const tile = read_tile(storage, iteration, lane);
      if (tile.is_none()) break;
      if (lane == 0) t = TileScheduler::next(params, t);
      t = __shfl_sync(0xffffffffu, t, 0);
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, queries_of(params, tile));
      int const some = max(blocks.end - 2, blocks.begin);
      load_tile(params, storage, tile, ring, warp, lane, blocks.end - 1, some);
      publish_next(iteration + 1);
      load_tile(params, storage, tile, ring, warp, lane, some - 1, blocks.begin);
      if constexpr (kQueryStages == 1) {  // the stage becomes empty when this tile's last product with its queries is done
        Tile const next = read_tile(storage, iteration + 1, lane);
        if (!next.is_none()) {
          load_queries(params, storage, next, sees_keys(blocks_of(params, next, queries_of(params, next))), iteration + 1, lane);
        }
      }
    }
  }

  // ---- keys and values from codes: a warpgroup ------------------------------------------------------------------------------------

  /// The first key that is converted for a tile: what lies before its split is read by others.
  static CUTLASS_DEVICE int32_t first_key_of(Mask const& mask, Tile const& tile, Queries const& queries) {
    if constexpr (Traits::kSplits) {
      return max(mask.begin(queries.first), tile.split * Traits::split_blocks_of_tile(tile) * kTileN);
    } else {
      return mask.begin(queries.first);
    }
  }

  template <WeightFormat kFormat>
  static CUTLASS_DEVICE void convert(Params const& params, SharedStorage& storage, int warp, int lane) {
    static_assert(!kConverts || kHeadDim == kHeadDimV);
    using Converter = BlockConverter<Traits::kType, Traits::kMmaType, kFormat, kTileN, kHeadDim>;
    uint32_t fills = 0;  // key blocks whose stages were filled
    int t = int(blockIdx.x);
    for (int iteration = 0;; ++iteration) {
      if (warp == 0) {
        if (iteration > 0) t = __shfl_sync(0xffffffffu, lane == 0 ? TileScheduler::next(params, t) : 0, 0);
        publish_tile(storage, iteration,
                     t < TileScheduler::count(storage.tiles, params) ? TileScheduler::at(storage.tiles, params, t) : none(), lane);
      }
      EmptyBarrier::wait(&storage.full_tile[iteration % 2], iteration / 2 % 2);
      Tile const tile = read_tile(storage, iteration, lane);
      release(&storage.empty_tile[iteration % 2], lane);
      if (tile.is_none()) break;
      Queries const queries = queries_of(params, tile);
      Mask const mask = mask_of(params, tile);
      KeyBlocks<kTileN> const blocks = blocks_of(mask, tile, queries);
      if (warp == 0) load_queries(params, storage, tile, blocks.begin < blocks.end, iteration, lane);
      if (blocks.begin >= blocks.end) continue;
      Converter const converter(params, tile.batch, kv_head_of(params, tile), first_key_of(mask, tile, queries), mask.end(queries.last),
                                tile.seqlen_k, warp, lane);
      int block = blocks.end - 1, page = converter.page_of(block);
      typename Converter::Block codes;
      converter.load(codes, converter.template source<true>(block, page));
      for (; (block + 1) * kTileN > converter.first_key; --block, ++fills) {
        int next_page;
        auto const find_next_page = [&] { next_page = converter.page_of(block - 1); };
        uint32_t const stage = fills % kStages, phase = fills / kStages % 2 ^ 1;
        EmptyBarrier::wait(&storage.empty_k[stage], phase);
        converter.template store<true>(codes, block, cute::cast_smem_ptr_to_uint(storage.k[stage]),
                                       converter.template source<false>(block, page), find_next_page);
        publish_stage(&storage.full_k[stage], lane);
        EmptyBarrier::wait(&storage.empty_v[stage], phase);
        converter.template store<false>(codes, block, cute::cast_smem_ptr_to_uint(storage.v[stage]),
                                        converter.template source<true>(block - 1, next_page), [] {});
        publish_stage(&storage.full_v[stage], lane);
        page = next_page;
      }
    }
  }

  /// Publishes a warp's quarter of a stage that it has written.
  static CUTLASS_DEVICE void publish_stage(uint64_t* full, int lane) {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane == 0) FullBarrier::arrive(full);
  }
};

}  // namespace minfer::attention
