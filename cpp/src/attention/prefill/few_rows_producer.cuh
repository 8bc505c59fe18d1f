// The producers of a batch-invariant kernel for few rows: warps that publish items and fill the ring with the item's key blocks, the last
// one first, and then with its value blocks, as they are in the cache, by TMA, and their scales by bulk copies.
#pragma once

#include "attention/prefill/few_rows_int4.cuh"
#include "attention/prefill/few_rows_traits.cuh"
#include "attention/prefill/producer.cuh"

namespace minfer::attention {

template <class Traits>
struct FewRowsProducer : PrefillProducer<Traits> {
  using Base = PrefillProducer<Traits>;
  using Base::first_key_of, Base::load_queries, Base::none, Base::publish_stage, Base::publish_tile;
  using Traits::blocks_of, Traits::for_splits, Traits::kBoxBytes, Traits::kColumns, Traits::kHeadDim, Traits::kInt4, Traits::kInt8,
      Traits::kProducerWarps, Traits::kRowBytes, Traits::kSplitBlocks, Traits::kTileN, Traits::kType, Traits::kv_head_of, Traits::mask_of;
  using Traits::queries_of, Traits::read_tile, Traits::release;
  using typename Traits::EmptyBarrier, typename Traits::FullBarrier, typename Traits::Params, typename Traits::Queries,
      typename Traits::Ring, typename Traits::SharedStorage, typename Traits::Tile, typename Traits::TileScheduler;

  static CUTLASS_DEVICE Tile item_at(SharedStorage& storage, Params const& params, int item, int count) {
    return item < count ? TileScheduler::at(storage.tiles, params, item) : none();
  }

  /// Where the box that begins with key `key` lies. A box whose keys are all masked is loaded from the nearest box that is seen, since its
  /// own page may have been freed; its scores are masked and its values cleared.
  static CUTLASS_DEVICE PageTable::Location find_box(Params const& params, Tile const& tile, int key) {
    if (params.block_table == nullptr) return {params.cu_seqlens_k == nullptr ? tile.batch : 0, tile.row_k + key};
    int end = tile.seqlen_k;
    if constexpr (kInt4) {  // the others are in the residual, and their pages may not exist
      end = FewRowsInt4<kType>::in_codes(params, end);
      if (end <= tile.first_key) return {-1, 0};
    }
    int seen = min(max(key, tile.first_key), end - 1);
    if (seen != key) seen = seen / params.box_rows * params.box_rows;
    return params.find(tile.batch, seen);
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

  /// Where a key lies, or the nearest one that is seen.
  static CUTLASS_DEVICE PageTable::Location find_token(Params const& params, Tile const& tile, int key) {
    return params.find(tile.batch, min(max(key, tile.first_key), tile.seqlen_k - 1));
  }

  /// What a lane copies of the scales of a stage in bulk; from: null: nothing.
  struct ScaleCopy {
    void const* from = nullptr;
    uint32_t to = 0, bytes = 0;  // the same number of bytes for all lanes that copy

    /// The bytes that the warp's copies bring.
    CUTLASS_DEVICE uint32_t bytes_of_warp() const { return __popc(__ballot_sync(0xffffffffu, from != nullptr)) * bytes; }
    CUTLASS_DEVICE void begin(uint64_t* full) const {
      if (from == nullptr) return;
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                   "r"(bytes), "r"(shared_address(full))
                   : "memory");
    }
  };
  /// The lane's part of the scales of a block's tokens from `key` on, which belong to `to`. What cannot be copied in bulk, or is not in the
  /// cache, is stored at once. location: of scales_of_box(lane); held: whether each box has a lane.
  static CUTLASS_DEVICE ScaleCopy copy_of_scales(Params const& params, Tile const& tile, bool keys, int kv_head, int key,
                                                 PageTable::Location const& location, bool held, int lane, typename Traits::Scale* to) {
    ScaleCopy copy;
    if constexpr (kInt4) {
      using Int4 = FewRowsInt4<kType>;
      if (lane / Int4::kPlanes < kTileN / Int4::kUnit) {
        uint32_t const unit = shared_address(to) + lane / Int4::kPlanes * Int4::kUnitBytes;
        typename Int4::PlaneCopy const of_plane(params, keys, kv_head, location, unit, lane % Int4::kPlanes);
        copy = {of_plane.from, of_plane.to, of_plane.bytes};
      }
      copy.bytes = __shfl_sync(0xffffffffu, copy.bytes, 0);
    } else if constexpr (kInt8) {
      QuantizedRows const& side = keys ? params.keys : params.values;
      auto const* const from = static_cast<float const*>(side.scale) + int64_t(kv_head) * params.page_size;
      int const box_rows = params.box_rows;
      if (held && box_rows % 4 == 0 && reinterpret_cast<uint64_t>(side.scale) % 16 == 0) {
        bool const mine = lane < kTileN / box_rows, has = mine && params.has(location.page) && location.row < params.page_size;
        copy = {has ? from + location.page * side.scale_page + location.row : nullptr, shared_address(to + lane * box_rows),
                uint32_t(4 * box_rows)};
        if (mine && !has) {
          for (int i = 0; i < box_rows; ++i) to[lane * box_rows + i] = 0.0f;
        }
      } else {
        for (int i = lane; i < kTileN; i += 32) {
          PageTable::Location const token = find_token(params, tile, key + i);
          to[i] = params.has(token.page) ? load_operand(from + token.page * side.scale_page + token.row) : 0.0f;
        }
      }
    }
    if constexpr (Traits::kTokenScales > 0) __syncwarp();
    return copy;
  }
  /// The box whose scales a lane copies.
  static CUTLASS_DEVICE int scales_of_box(int lane) { return kInt4 ? lane / FewRowsInt4<kType>::kPlanes : lane; }

  /// Begins the loads of a block of keys or values, and of their scales, by a warp.
  static CUTLASS_DEVICE void load_block(Params const& params, SharedStorage& storage, bool keys, int stage, Tile const& tile, int kv_head,
                                        Boxes const& boxes, int block, int lane) {
    using Hint = cute::TMA::CacheHintSm90;
    uint64_t* const full = &storage.full[stage];
    ScaleCopy scales;
    uint32_t scale_bytes = 0;
    if constexpr (Traits::kTokenScales > 0) {
      PageTable::Location const location = boxes.at(params, tile, block, scales_of_box(lane));
      scales = copy_of_scales(params, tile, keys, kv_head, block * kTileN, location, boxes.held, lane, storage.scales[stage]);
      scale_bytes = scales.bytes_of_warp();
    }
    if (lane == 0) FullBarrier::arrive_and_expect_tx(full, uint32_t(kTileN * kRowBytes) + scale_bytes);
    __syncwarp();
    scales.begin(full);
    PageTable::Location location = boxes.at(params, tile, block, lane);
    for (int box = lane; box < boxes.of_block; box += 32) {
      if (box >= 32) location = find_box(params, tile, block * kTileN + box * params.box_rows);
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        cute::SM90_TMA_LOAD_4D::copy(keys ? &params.k : &params.v, full, uint64_t(Hint::EVICT_NORMAL),
                                     storage.ring[stage] + (column * kTileN + box * params.box_rows) * kBoxBytes,
                                     column * (kHeadDim / kColumns), kv_head, location.row, location.page);
      }
    }
  }

  /// Producer `number` of kProducerWarps: it loads the blocks whose turn it is; the first one also publishes tiles and loads queries.
  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int number, int lane) {
    Ring ring = Ring::of_producer();
    Boxes boxes(params);
    int const count = TileScheduler::count(storage.tiles, params);
    int turn = 0;  // whose the next block is
    for (int iteration = 0, item = int(blockIdx.x);; ++iteration, item += int(gridDim.x)) {
      Tile const tile = item_at(storage, params, item, count);
      if (number == 0) publish_tile(storage, iteration, tile, lane);
      if (tile.is_none()) break;
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, queries_of(params, tile));
      int const kv_head = kv_head_of(params, tile);
      auto const load = [&](bool keys, int block) {
        if (turn == number) {
          EmptyBarrier::wait(&storage.empty[ring.index], ring.phase);
          load_block(params, storage, keys, ring.index, tile, kv_head, boxes, block, lane);
        }
        if (++turn == kProducerWarps) turn = 0;
        ring.advance();
      };
      if (number == 0) load_queries(params, storage, tile, blocks.begin < blocks.end, iteration, lane);
      if constexpr (kInt4) {
        using Int4 = FewRowsInt4<kType>;
        bool const sees_last = blocks.end * kTileN > Int4::in_codes(params, tile.seqlen_k);
        if (number == kProducerWarps - 1 && sees_last) Int4::prefetch_residual(params, tile.batch, kv_head, tile.seqlen_k, lane);
      }
      for_splits(blocks, [&](int split, KeyBlocks<kTileN> const& own) {
        boxes.find(params, tile, split, lane);
        for (int block = own.end - 1; block >= own.begin; --block) load(true, block);
        for (int block = own.end - 1; block >= own.begin; --block) load(false, block);
      });
    }
  }
};

}  // namespace minfer::attention
