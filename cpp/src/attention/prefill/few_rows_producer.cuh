// The producer of a batch-invariant kernel for few rows: it publishes items and fills the ring with the item's key blocks, the last one
// first, and then with its value blocks. One warp does this by TMA; where keys and values are codes of a cache, four warps convert them.
#pragma once

#include "attention/prefill/few_rows_traits.cuh"
#include "attention/prefill/producer.cuh"

namespace minfer::attention {

template <class Traits>
struct FewRowsProducer : PrefillProducer<Traits> {
  using Base = PrefillProducer<Traits>;
  using Base::first_key_of, Base::load_block, Base::load_queries, Base::none, Base::publish_stage, Base::publish_tile;
  using Traits::blocks_of, Traits::for_splits, Traits::kHeadDim, Traits::kStages, Traits::kTileN, Traits::kType, Traits::kv_head_of,
      Traits::mask_of;
  using Traits::queries_of, Traits::read_tile, Traits::release;
  using typename Traits::EmptyBarrier, typename Traits::Params, typename Traits::Queries, typename Traits::Ring,
      typename Traits::SharedStorage, typename Traits::Tile, typename Traits::TileScheduler;

  static CUTLASS_DEVICE Tile item_at(SharedStorage& storage, Params const& params, int item, int count) {
    return item < count ? TileScheduler::at(storage.tiles, params, item) : none();
  }

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int lane) {
    Ring ring = Ring::of_producer();
    int const count = TileScheduler::count(storage.tiles, params);
    for (int iteration = 0, item = int(blockIdx.x);; ++iteration, item += int(gridDim.x)) {
      Tile const tile = item_at(storage, params, item, count);
      publish_tile(storage, iteration, tile, lane);
      if (tile.is_none()) break;
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, queries_of(params, tile));
      int const kv_head = kv_head_of(params, tile);
      auto const load = [&](CUtensorMap const& map, int block) {
        EmptyBarrier::wait(&storage.empty[ring.index], ring.phase);
        Base::template load_block<kHeadDim>(params, map, &storage.full[ring.index], storage.ring[ring.index], tile, kv_head, block, lane);
        ring.advance();
      };
      load_queries(params, storage, tile, blocks.begin < blocks.end, iteration, lane);
      for_splits(blocks, [&](int, KeyBlocks<kTileN> const& own) {
        for (int block = own.end - 1; block >= own.begin; --block) load(params.k, block);
        for (int block = own.end - 1; block >= own.begin; --block) load(params.v, block);
      });
    }
  }

  template <WeightFormat kFormat>
  static CUTLASS_DEVICE void convert(Params const& params, SharedStorage& storage, int warp, int lane) {
    using Converter = BlockConverter<kType, Traits::kMmaType, kFormat, kTileN, kHeadDim>;
    Ring ring = Ring::of_producer();
    for (int iteration = 0, item = int(blockIdx.x);; ++iteration, item += int(gridDim.x)) {
      if (warp == 0) publish_tile(storage, iteration, item_at(storage, params, item, TileScheduler::count(storage.tiles, params)), lane);
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
      // Blocks as they are converted: a split's keys from the last block to the first, then its values. Pages are found two blocks ahead.
      typename Converter::Block codes;
      int page;
      for_splits(blocks, [&](int, KeyBlocks<kTileN> const& own) CUTLASS_LAMBDA_FUNC_INLINE {
        int const first = own.begin, last = own.end - 1;
        auto const after = [&](int block) { return block > first ? block - 1 : last; };
        page = converter.page_of(after(last));
        converter.load(codes, converter.template source<true>(last, converter.page_of(last)));
        auto const fill = [&](auto is_keys, auto are_next_keys, int block, int next) CUTLASS_LAMBDA_FUNC_INLINE {
          int next_page;
          EmptyBarrier::wait(&storage.empty[ring.index], ring.phase);
          converter.template store<decltype(is_keys)::value>(codes, block, cute::cast_smem_ptr_to_uint(storage.ring[ring.index]),
                                                             converter.template source<decltype(are_next_keys)::value>(next, page),
                                                             [&] { next_page = converter.page_of(after(next)); });
          publish_stage(&storage.full[ring.index], lane);
          page = next_page;
          ring.advance();
        };
        int block = last;
        for (; block > first; --block) fill(cute::true_type{}, cute::true_type{}, block, block - 1);
        fill(cute::true_type{}, cute::false_type{}, first, last);
        // What is asked for behind the last block is not used.
        for (block = last; block >= first; --block) fill(cute::false_type{}, cute::false_type{}, block, block - 1);
      });
    }
  }
};

}  // namespace minfer::attention
