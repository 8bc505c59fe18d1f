// The producer of a batch-invariant kernel for few rows: it publishes items and fills the ring with the item's key blocks, the last one
// first, and then with its value blocks. One warp does this by TMA, or four convert codes of int4 to 16 bits.
#pragma once

#include "attention/prefill/few_rows_traits.cuh"
#include "attention/prefill/producer.cuh"

namespace minfer::attention {

template <class Traits>
struct FewRowsProducer : PrefillProducer<Traits> {
  using Base = PrefillProducer<Traits>;
  using Base::first_key_of, Base::load_queries, Base::none, Base::publish_stage, Base::publish_tile;
  using Traits::blocks_of, Traits::for_splits, Traits::kColumns, Traits::kHeadDim, Traits::kInt8, Traits::kRowBytes, Traits::kSplitBlocks,
      Traits::kTileN, Traits::kType, Traits::kv_head_of, Traits::mask_of;
  using Traits::queries_of, Traits::read_tile, Traits::release;
  using typename Traits::EmptyBarrier, typename Traits::FullBarrier, typename Traits::Params, typename Traits::Queries,
      typename Traits::Ring, typename Traits::SharedStorage, typename Traits::Tile, typename Traits::TileScheduler;

  static CUTLASS_DEVICE Tile item_at(SharedStorage& storage, Params const& params, int item, int count) {
    return item < count ? TileScheduler::at(storage.tiles, params, item) : none();
  }

  // ---- keys and values as they are: one warp by TMA -------------------------------------------------------------------------------

  /// Where the box of key `key` lies. A box whose keys are all masked is loaded from the nearest box that is seen, since its own page may
  /// have been freed; its scores are masked and its values cleared.
  static CUTLASS_DEVICE PageTable::Location find_box(Params const& params, Tile const& tile, int key) {
    if (params.block_table == nullptr) return {params.cu_seqlens_k == nullptr ? tile.batch : 0, tile.row_k + key};
    int const seen = min(max(key, tile.first_key), tile.seqlen_k - 1);
    return params.find(tile.batch, seen / params.box_rows * params.box_rows);
  }

  /// The boxes of a split. Looked up one after the other, when a stage is empty, their pages' latency would be the loads'.
  struct Boxes {
    int of_block;     // boxes of a block
    bool held;        // lane i holds where the split's box i lies; else there are more boxes than lanes
    int first_block;  // of the split
    PageTable::Location of_lane{};

    CUTLASS_DEVICE Boxes(Params const& params) : of_block(kTileN / params.box_rows), held(of_block * kSplitBlocks <= 32), first_block(0) {}
    CUTLASS_DEVICE void find(Params const& params, Tile const& tile, int split, int lane) {
      first_block = split * kSplitBlocks;
      if (held) of_lane = find_box(params, tile, first_block * kTileN + min(lane, of_block * kSplitBlocks - 1) * params.box_rows);
    }
    /// Box number `box` of a block; called by the whole warp.
    CUTLASS_DEVICE PageTable::Location at(Params const& params, Tile const& tile, int block, int box) const {
      if (!held) return find_box(params, tile, block * kTileN + box * params.box_rows);
      int const from = (block - first_block) * of_block + min(box, of_block - 1);
      return {__shfl_sync(0xffffffffu, of_lane.page, from), __shfl_sync(0xffffffffu, of_lane.row, from)};
    }
  };

  /// Begins the loads of a block of keys or values, and of int8's scales, by a warp.
  static CUTLASS_DEVICE void load_block(Params const& params, SharedStorage& storage, bool keys, int stage, Tile const& tile, int kv_head,
                                        Boxes const& boxes, int block, int lane) {
    using Hint = cute::TMA::CacheHintSm90;
    uint64_t* const full = &storage.full[stage];
    PageTable::Location location = boxes.at(params, tile, block, lane);
    uint32_t scale_bytes = 0;  // that are copied
    float const* scales = nullptr;
    if constexpr (kInt8) {
      QuantizedRows const& side = keys ? params.keys : params.values;
      auto const* const from = static_cast<float const*>(side.scale) + int64_t(kv_head) * params.page_size;
      if (boxes.held && params.box_rows % 4 == 0 && reinterpret_cast<uint64_t>(side.scale) % 16 == 0) {
        bool const has = lane < boxes.of_block && params.has(location.page) && location.row < params.page_size;
        if (has) scales = from + location.page * side.scale_page + location.row;
        if (lane < boxes.of_block && !has) {
          for (int i = 0; i < params.box_rows; ++i) storage.scales[stage][lane * params.box_rows + i] = 0.0f;
        }
        scale_bytes = uint32_t(__popc(__ballot_sync(0xffffffffu, has)) * params.box_rows * 4);
      } else {
        for (int i = lane; i < kTileN; i += 32) {
          PageTable::Location const token = find_token(params, tile, block * kTileN + i);
          storage.scales[stage][i] = params.has(token.page) ? load_operand(from + token.page * side.scale_page + token.row) : 0.0f;
        }
      }
      __syncwarp();
    }
    if (lane == 0) FullBarrier::arrive_and_expect_tx(full, uint32_t(kTileN * kRowBytes) + scale_bytes);
    __syncwarp();
    if constexpr (kInt8) {
      if (scales != nullptr) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(&storage.scales[stage][lane * params.box_rows])),
                     "l"(scales), "r"(params.box_rows * 4), "r"(shared_address(full))
                     : "memory");
      }
    }
    for (int box = lane; box < boxes.of_block; box += 32) {
      if (box >= 32) location = find_box(params, tile, block * kTileN + box * params.box_rows);
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        cute::SM90_TMA_LOAD_4D::copy(keys ? &params.k : &params.v, full, uint64_t(Hint::EVICT_NORMAL),
                                     storage.ring[stage] + (column * kTileN + box * params.box_rows) * 128, column * (kHeadDim / kColumns),
                                     kv_head, location.row, location.page);
      }
    }
  }
  /// Where a key lies, or the nearest one that is seen.
  static CUTLASS_DEVICE PageTable::Location find_token(Params const& params, Tile const& tile, int key) {
    return params.find(tile.batch, min(max(key, tile.first_key), tile.seqlen_k - 1));
  }

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int lane) {
    Ring ring = Ring::of_producer();
    Boxes boxes(params);
    int const count = TileScheduler::count(storage.tiles, params);
    for (int iteration = 0, item = int(blockIdx.x);; ++iteration, item += int(gridDim.x)) {
      Tile const tile = item_at(storage, params, item, count);
      publish_tile(storage, iteration, tile, lane);
      if (tile.is_none()) break;
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, queries_of(params, tile));
      int const kv_head = kv_head_of(params, tile);
      auto const load = [&](bool keys, int block) {
        EmptyBarrier::wait(&storage.empty[ring.index], ring.phase);
        load_block(params, storage, keys, ring.index, tile, kv_head, boxes, block, lane);
        ring.advance();
      };
      load_queries(params, storage, tile, blocks.begin < blocks.end, iteration, lane);
      for_splits(blocks, [&](int split, KeyBlocks<kTileN> const& own) {
        boxes.find(params, tile, split, lane);
        for (int block = own.end - 1; block >= own.begin; --block) load(true, block);
        for (int block = own.end - 1; block >= own.begin; --block) load(false, block);
      });
    }
  }

  // ---- keys and values from codes: four warps -------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void convert(Params const& params, SharedStorage& storage, int warp, int lane) {
    using Converter = BlockConverter<kType, Traits::kMmaType, Traits::kFormat, kTileN, kHeadDim>;
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
