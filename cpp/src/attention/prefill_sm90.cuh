// Attention forward for sm_90a, many queries: TMA + WGMMA, persistent, warp specialised. After FlashAttention-3 (Shah et al., 2024).
//
// Warp roles. Warpgroup 0: its warp 0 is the producer, which loads a tile's queries and its blocks of keys and values, the last block first.
// Warpgroups 1 to kConsumers: 64 rows of the tile each, and of its blocks those that they meet; the others they pass on. While a warpgroup's
// softmax of one block runs, the tensor cores have its product with the values of the block before and, where kPingpong, the other warpgroups'
// two products: ordered barriers let them issue in turns.
// Pipelines. q: full (TMA's bytes), empty (an arrival of each consumer warp), kQueryStages tiles. k and v: a ring of kStages blocks each,
// likewise. Tiles: two, as the producer hands them out.
// Rows of a tile. `pack` query heads of a KV head lie side by side: with few queries they share the loads of K and V.
// Scores never leave registers: S = Q.K^T accumulates in fp32, P = exp2(S - max) is rounded to 16 bits in place, in the layout of an A operand.
// Values behind the last key are set to zero in shared memory before they are used (0 * NaN is NaN); their scores are masked.
// kConverts: keys and values are codes of a cache. The whole of warpgroup 0 is the producer then: it converts them into the stages
// (prefill_convert.cuh), whose full barriers count its warps; one lane loads the queries and hands out the tiles.
// Tile walk: tile_scheduler.cuh. Masks: mask.h; only blocks on an edge are masked.
// Limits: 16-bit, q, k and v 16-byte aligned in base and strides, head_dim a multiple of 8 up to kHeadDim (TMA fills with zeros).
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <algorithm>

#include "attention/launch_kernel.cuh"
#include "attention/mask.h"
#include "attention/outside_rows.cuh"
#include "attention/prefill_arguments.cuh"
#include "attention/prefill_convert.cuh"
#include "attention/prefill_params.h"
#include "attention/softmax.cuh"
#include "attention/tile_scheduler.cuh"
#include "common/dependent_launch.cuh"
#include "common/tensor_map.h"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"
#include "minfer/types.h"

namespace minfer::attention {

template <class Config>
struct PrefillSm90 {
  using Element = cute::conditional_t<Config::kType == DataType::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStages = Config::kStages;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr int kConsumers = kTileM / 64, kThreads = 128 * (kConsumers + 1);
  static constexpr bool kPingpong = Config::kPingpong;
  static constexpr bool kOwnOutput = Config::kOwnOutput;   // output is staged in room of its own; else in that of the queries
  static constexpr int kQueryStages = kOwnOutput ? 2 : 1;  // of two, one is the next tile's
  static constexpr bool kConverts = Config::kConverts;     // keys and values from codes
  static constexpr int kConsumerRegisters = kConverts ? (kHeadDim == 256 ? 208 : 192) : kConsumers == 3 ? 160 : 240;
  static constexpr int kProducerRegisters = kConverts ? 504 - 2 * kConsumerRegisters : kConsumers == 3 ? 32 : 24;
  static constexpr int kScores = kTileN / 2, kOutputs = kHeadDimV / 2;  // of a thread
  static_assert(kTileM % 64 == 0 && kTileN % 16 == 0 && kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 && kHeadDimV <= kHeadDim);

  using Tiles = PrefillTiles<kTileM>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using Params = cute::conditional_t<kConverts, PrefillCodesParams, PrefillParams>;

  struct OutputStorage {
    alignas(1024) Element of[kTileM * kHeadDimV];
  };
  struct SharedStorage {
    alignas(1024) Element q[kQueryStages][kTileM * kHeadDim];  // [head_dim / 64][row][64], as all of them
    alignas(1024) Element k[kStages][kTileN * kHeadDim];
    alignas(1024) Element v[kStages][kTileN * kHeadDimV];
    [[no_unique_address]] cute::conditional_t<kOwnOutput, OutputStorage, cute::tuple<>> output;
    alignas(8) uint64_t full_q[kQueryStages], empty_q[kQueryStages], full_k[kStages], empty_k[kStages], full_v[kStages], empty_v[kStages];
    alignas(8) uint64_t full_tile[2], empty_tile[2];
    QueryTile tile[2];  // what the producer hands to the consumers
    typename Tiles::Storage tiles;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  struct Ring {
    int index = 0;
    uint32_t phase = 0;
    __device__ void advance() {
      if (++index == kStages) {
        index = 0;
        phase ^= 1;
      }
    }
  };
  static __device__ int query_stage(int turn) { return turn % kQueryStages; }
  static __device__ uint32_t query_phase(int turn) { return turn / kQueryStages % 2; }

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (cute::cast_smem_ptr_to_uint(smem) % 1024 != 0) __trap();
    int const thread = int(threadIdx.x);
    int const warpgroup = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();

    allow_dependent_launch();
    if (warp == 0 && cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.q));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.k));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.v));
      for (int s = 0; s < kQueryStages; ++s) {
        FullBarrier::init(&storage.full_q[s], 1);
        EmptyBarrier::init(&storage.empty_q[s], 4 * kConsumers);
      }
      for (int s = 0; s < 2; ++s) {
        EmptyBarrier::init(&storage.full_tile[s], 1);
        EmptyBarrier::init(&storage.empty_tile[s], 4 * (kConsumers + kConverts));
      }
      for (int s = 0; s < kStages; ++s) {
        FullBarrier::init(&storage.full_k[s], kConverts ? 4 : 1);
        FullBarrier::init(&storage.full_v[s], kConverts ? 4 : 1);
        EmptyBarrier::init(&storage.empty_k[s], 4 * kConsumers);
        EmptyBarrier::init(&storage.empty_v[s], 4 * kConsumers);
      }
      cutlass::arch::fence_barrier_init();
    }
    if constexpr (kConverts) {
      if (params.keys.head_dim < kHeadDim || params.values.head_dim < kHeadDimV) {
        clear_padding(cute::cast_smem_ptr_to_uint(storage.k), int(sizeof(storage.k) + sizeof(storage.v)), thread, kThreads);
        cutlass::arch::fence_view_async_shared();
      }
    }
    wait_for_predecessor();
    Tiles::build(storage.tiles, params, thread, kThreads);
    __syncthreads();

    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if constexpr (kConverts) {
        switch (params.format) {
          case WeightFormat::kFp8E4M3: convert<WeightFormat::kFp8E4M3>(params, storage, warp, thread % 32); break;
          case WeightFormat::kInt8: convert<WeightFormat::kInt8>(params, storage, warp, thread % 32); break;
          default: convert<WeightFormat::kInt4>(params, storage, warp, thread % 32);
        }
      } else {
        if (warp == 0) produce(params, storage, thread);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(params, storage, warpgroup - 1, thread % 128);
    }
  }

  struct Rows {  // queries of a tile, or of a warpgroup's part of it: none where last < first
    int32_t first, last;
  };
  static CUTLASS_DEVICE Rows rows_of(Params const& params, QueryTile const& tile) {
    int32_t const last = tile.first + over_pack(params, kTileM) - 1;
    return {tile.first, last < tile.seqlen_q ? last : tile.seqlen_q - 1};
  }
  static CUTLASS_DEVICE Rows rows_of(Params const& params, QueryTile const& tile, int consumer) {
    int32_t const rows = over_pack(params, 64), first = tile.first + consumer * rows, last = first + rows - 1;
    return {first, last < tile.seqlen_q ? last : tile.seqlen_q - 1};
  }
  /// x / pack, which divides 64.
  static CUTLASS_DEVICE int32_t over_pack(Params const& params, int32_t x) { return x >> (31 - __clz(params.pack)); }

  static CUTLASS_DEVICE Mask mask_of(Params const& params, QueryTile const& tile) {
    return Mask(tile.seqlen_q, tile.seqlen_k, params.window_left, params.window_right);
  }
  static CUTLASS_DEVICE KeyBlocks<kTileN> blocks_of(Params const& params, QueryTile const& tile, Rows rows) {
    return KeyBlocks<kTileN>(mask_of(params, tile), rows.first, rows.last);
  }

  // ---- producer: a warp ---------------------------------------------------------------------------------------------------------

  /// Calls load(box, row, page) for each TMA box of a block of keys or values, a lane each: its number in the block and what it begins with.
  template <class Load>
  static CUTLASS_DEVICE void for_boxes(Params const& params, QueryTile const& tile, int block, int lane, Load const& load) {
    for (int box = lane; box * params.box_rows < kTileN; box += 32) {
      int key = block * kTileN + box * params.box_rows, row = tile.row_k + key, page = 0;
      if (params.block_table != nullptr) {
        int const last = (tile.seqlen_k - 1) / params.box_rows * params.box_rows;  // behind it, it is loaded again: masked
        key = key < last ? key : last;
        page = __ldg(params.block_table + tile.batch * params.block_table_stride + key / params.page_size);
        row = key % params.page_size;
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

  /// To L2.
  template <int kDim>
  static CUTLASS_DEVICE void prefetch_block(Params const& params, CUtensorMap const& map, QueryTile const& tile, int kv_head, int block,
                                            int lane) {
    for_boxes(params, tile, block, lane, [&](int, int row, int page) {
#pragma unroll
      for (int column = 0; column < kDim / 64; ++column) {
        cute::SM90_TMA_LOAD_4D::PREFETCH::copy(&map, column * 64, kv_head, row, page);
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

  /// The tile that was handed out, by a warp; the compiler knows then that all of its lanes have the same.
  static CUTLASS_DEVICE QueryTile handed_out(SharedStorage& storage, int turn, int lane) {
    constexpr int kWords = sizeof(QueryTile) / 4;
    static_assert(kWords == 7);
    int32_t const word = reinterpret_cast<int32_t const*>(&storage.tile[turn % 2])[lane < kWords ? lane : 0];
    auto const of = [word](int i) { return __shfl_sync(0xffffffffu, word, i); };
    return {of(0), of(1), of(2), of(3), of(4), of(5), of(6)};
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

  static CUTLASS_DEVICE int kv_head_of(Params const& params, QueryTile const& tile) { return tile.head_unit * params.pack / params.group; }

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int lane) {
    Ring keys, values;
    keys.phase = values.phase = 1;  // a fresh barrier's previous phase counts as passed: every stage starts empty
    int const tiles = Tiles::count(storage.tiles, params);
    int t = int(blockIdx.x);
    // A tile is announced, and what it begins with on its way, at least into L2, while the one before it has most of its blocks ahead.
    auto const meets_any = [&](KeyBlocks<kTileN> const& blocks) { return blocks.begin < blocks.end; };
    auto const announce = [&](int turn) CUTLASS_LAMBDA_FUNC_INLINE {
      QueryTile const tile = t < tiles ? Tiles::at(storage.tiles, params, t) : QueryTile::none();
      hand_out(storage, turn, tile, lane);
      if (tile.is_none()) return;
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, rows_of(params, tile));
      if (kQueryStages > 1 || turn == 0) load_queries(params, storage, tile, meets_any(blocks), turn, lane);
      if (turn == 0 || !meets_any(blocks)) return;
      if (kQueryStages == 1 && lane == 0)
        for_columns(params, tile, [&](int, auto const&... at) { cute::SM90_TMA_LOAD_5D::PREFETCH::copy(&params.q, at...); });
      prefetch_block<kHeadDim>(params, params.k, tile, kv_head_of(params, tile), blocks.end - 1, lane);
      prefetch_block<kHeadDimV>(params, params.v, tile, kv_head_of(params, tile), blocks.end - 1, lane);
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

  // ---- producer of codes: a warpgroup ---------------------------------------------------------------------------------------------

  template <WeightFormat kFormat>
  static CUTLASS_DEVICE void convert(Params const& params, SharedStorage& storage, int warp, int lane) {
    static_assert(!kConverts || kHeadDim == kHeadDimV);
    using Converter = BlockConverter<Config::kType, kFormat, kTileN, kHeadDim>;
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
        int const before = converter.page_of(block - 1);  // the nearest page where there is no such block, of which no row is seen
        uint32_t const stage = fills % kStages, phase = fills / kStages % 2 ^ 1;
        EmptyBarrier::wait(&storage.empty_k[stage], phase);
        converter.template store<true>(codes, block, cute::cast_smem_ptr_to_uint(storage.k[stage]),
                                       converter.template source<false>(block, page));
        filled(&storage.full_k[stage], lane);
        EmptyBarrier::wait(&storage.empty_v[stage], phase);
        converter.template store<false>(codes, block, cute::cast_smem_ptr_to_uint(storage.v[stage]),
                                        converter.template source<true>(block - 1, before));
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

  // ---- consumers: warpgroups ----------------------------------------------------------------------------------------------------

  template <int kRows, int kPitch, int kDim, int kDepth>
  using KMajor = cute::ComposedLayout<
      cute::Swizzle<3, 4, 3>, cute::smem_ptr_flag_bits<16>,
      cute::Layout<
          cute::Shape<cute::Shape<cute::_8, cute::Int<kRows / 8>>, cute::Shape<cute::_64, cute::Int<kDim / 64>>, cute::Int<kDepth>>,
          cute::Stride<cute::Stride<cute::_64, cute::Int<512>>, cute::Stride<cute::_1, cute::Int<kPitch * 64>>, cute::Int<kPitch * kDim>>>>;
  using ValuesLayout =
      cute::ComposedLayout<cute::Swizzle<3, 4, 3>, cute::smem_ptr_flag_bits<16>,
                           cute::Layout<cute::Shape<cute::Shape<cute::_64, cute::Int<kHeadDimV / 64>>,
                                                    cute::Shape<cute::_8, cute::Int<kTileN / 8>>, cute::Int<kStages>>,
                                        cute::Stride<cute::Stride<cute::_1, cute::Int<kTileN * 64>>,
                                                     cute::Stride<cute::_64, cute::Int<512>>, cute::Int<kTileN * kHeadDimV>>>>;
  using MmaScores = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kTileN>, cute::_64>>()));
  using MmaOutput = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kHeadDimV>, cute::Int<kTileN>>,
                                       cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>()));

  // Barriers 1 to kConsumers: whose turn it is; then each warpgroup's own; then that of all consumers.
  static constexpr int kOwnBarrier = 1 + kConsumers, kAllBarrier = 1 + 2 * kConsumers;
  static CUTLASS_DEVICE void take_turn(int consumer) {
    if constexpr (kPingpong) asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory");
  }
  static CUTLASS_DEVICE void pass_turn(int consumer) {
    if constexpr (kPingpong) asm volatile("bar.arrive %0, 256;" ::"r"(1 + (consumer + 1) % kConsumers) : "memory");
  }
  /// What products are multiplied by.
  static CUTLASS_DEVICE float scale_of(Params const& params, QueryTile const& tile) {
    if constexpr (kConverts) {
      return params.scale * scale_of_scores(params, kv_head_of(params, tile));
    } else {
      return params.scale;
    }
  }
  static CUTLASS_DEVICE void release(uint64_t* empty, int thread) {
    if (thread % 32 == 0) EmptyBarrier::arrive(empty);
  }

  /// Rows of a block of values from `valid` on become zeros; by all consumers.
  static CUTLASS_DEVICE void clear_values(Element* values, int valid, int consumer, int thread) {
    int const units = (kTileN - valid) * 8;
#pragma unroll 1
    for (int i = consumer * 128 + thread; i < units * (kHeadDimV / 64); i += kConsumers * 128) {
      int const column = i / units, unit = i - column * units;
      *reinterpret_cast<uint4*>(values + (column * kTileN + valid) * 64 + unit * 8) = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
    asm volatile("bar.sync %0, %1;" ::"n"(kAllBarrier), "n"(kConsumers * 128) : "memory");
  }

  /// A block that a warpgroup's own rows do not meet: its turn and its stages are passed on.
  static CUTLASS_DEVICE void pass_block(SharedStorage& storage, Ring& keys, Ring& values, int valid, bool clears, int consumer,
                                        int thread) {
    take_turn(consumer);
    pass_turn(consumer);
    FullBarrier::wait(&storage.full_k[keys.index], keys.phase);
    release(&storage.empty_k[keys.index], thread);
    FullBarrier::wait(&storage.full_v[values.index], values.phase);
    if (valid < kTileN && clears) clear_values(storage.v[values.index], valid, consumer, thread);
    release(&storage.empty_v[values.index], thread);
    keys.advance();
    values.advance();
  }

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int consumer, int thread) {
    using namespace cute;
    int const lane = thread % 32;
    Ring keys, values;
    MmaScores mma_scores;
    MmaOutput mma_output;
    using QueriesLayout = KMajor<64, kTileM, kHeadDim, kQueryStages>;
    Tensor sQ = make_tensor(make_smem_ptr(&storage.q[0][consumer * 64 * 64]), QueriesLayout{});             // (64,head_dim,PIPE)
    Tensor sK = make_tensor(make_smem_ptr(&storage.k[0][0]), KMajor<kTileN, kTileN, kHeadDim, kStages>{});  // (N,head_dim,PIPE)
    Tensor sV = make_tensor(make_smem_ptr(&storage.v[0][0]), ValuesLayout{});                               // (head_dim_v,N,PIPE)
    Tensor tSrQ = mma_scores.get_slice(thread).partition_fragment_A(sQ);  // (MMA,MMA_M,MMA_K,PIPE), descriptors
    Tensor tSrK = mma_scores.get_slice(thread).partition_fragment_B(sK);  // (MMA,MMA_N,MMA_K,PIPE)
    Tensor tOrV = mma_output.get_slice(thread).partition_fragment_B(sV);  // (MMA,MMA_N,MMA_K,PIPE)

    if constexpr (kPingpong) {
      if (consumer == kConsumers - 1) pass_turn(consumer);
    }
    clear_rows_outside(params, consumer * 128 + thread, kConsumers * 128);
    for (int turn = 0;; ++turn) {
      EmptyBarrier::wait(&storage.full_tile[turn % 2], turn / 2 % 2);
      QueryTile const tile = handed_out(storage, turn, lane);
      if (tile.is_none()) break;
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, rows_of(params, tile));
      Rows const own_rows = rows_of(params, tile, consumer);
      KeyBlocks<kTileN> const own = blocks_of(params, tile, own_rows);
      int const row = consumer * 64 + thread / 32 * 16 + lane / 4;  // of the tile; the thread's other one is 8 below

      Tensor output = partition_fragment_C(mma_output, Shape<_64, Int<kHeadDimV>>{});  // (MMA,MMA_M,MMA_N)
      clear(output);
      bool const capped = params.softcap > 0.0f;
      OnlineSoftmax<kScores> softmax((capped ? params.softcap : scale_of(params, tile)) * kLog2E);
      FullBarrier::wait(&storage.full_q[query_stage(turn)], query_phase(turn));
      bool const clears = !kConverts && !params.keys_end_at_extent;
      int block = blocks.end - 1;
      for (int const own_end = own_rows.first <= own_rows.last ? own.end : 0; block >= own_end && block >= blocks.begin; --block) {
        pass_block(storage, keys, values, tile.seqlen_k - block * kTileN, clears, consumer, thread);
      }
      if (block >= blocks.begin) {
        float rescale[2];
        Tensor scores = partition_fragment_C(mma_scores, Shape<_64, Int<kTileN>>{});                            // (MMA,MMA_M,MMA_N)
        Tensor probabilities = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kTileN / 16>>>{});  // (MMA,MMA_M,MMA_K)
        Tensor packed = recast<uint32_t>(probabilities);
        mma_output.accumulate_ = GMMA::ScaleOut::One;
        auto const multiply_keys = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          mma_scores.accumulate_ = GMMA::ScaleOut::Zero;
          auto rows = tSrQ;
          if constexpr (kConverts) {  // descriptors are worked out here: those of all slabs, kept, would cost registers in every block
            Element* q = &storage.q[0][consumer * 64 * 64];
            asm volatile("" : "+l"(q));
            rows = mma_scores.get_slice(thread).partition_fragment_A(make_tensor(make_smem_ptr(q), QueriesLayout{}));
          }
          CUTLASS_PRAGMA_UNROLL
          for (int slab = 0; slab < kHeadDim / 16; ++slab) {
            cute::gemm(mma_scores, rows(_, _, slab, query_stage(turn)), tSrK(_, _, slab, keys.index), scores);
            mma_scores.accumulate_ = GMMA::ScaleOut::One;
          }
          warpgroup_commit_batch();
        };
        auto const multiply_values = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          CUTLASS_PRAGMA_UNROLL
          for (int slab = 0; slab < kTileN / 16; ++slab) {
            cute::gemm(mma_output, probabilities(_, _, slab), tOrV(_, _, slab, values.index), output);
          }
          warpgroup_commit_batch();
        };
        auto const cap_and_mask = [&](auto masked) CUTLASS_LAMBDA_FUNC_INLINE {
          if (capped) {
            float inner = params.scale / params.softcap;
            if constexpr (kConverts) inner = scale_of(params, storage.tile[turn % 2]) / params.softcap;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kScores; ++i) scores(i) = tanh_fast(scores(i) * inner);
          }
          if (bool(masked)) {  // limits are worked out here: kept, they would cost registers in every block
            Mask const mask = mask_of(params, storage.tile[turn % 2]);
            int32_t begin[2], end[2];
            CUTLASS_PRAGMA_UNROLL
            for (int h = 0; h < 2; ++h) {
              int const query = storage.tile[turn % 2].first + over_pack(params, row + 8 * h);
              begin[h] = mask.begin(query);
              end[h] = mask.end(query);
            }
            apply_mask<kScores>(scores, begin, end, block * kTileN, lane);
          }
        };
        auto const round = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kScores; i += 2) {
            cutlass::NumericArrayConverter<Element, float, 2> const convert;
            cutlass::Array<float, 2> pair;
            pair[0] = scores(i);
            pair[1] = scores(i + 1);
            reinterpret_cast<cutlass::Array<Element, 2>&>(probabilities(i)) = convert(pair);
          }
        };

        FullBarrier::wait(&storage.full_k[keys.index], keys.phase);
        take_turn(consumer);
        warpgroup_fence_operand(scores);
        warpgroup_arrive();
        multiply_keys();
        pass_turn(consumer);
        warpgroup_wait<0>();
        warpgroup_fence_operand(scores);
        release(&storage.empty_k[keys.index], thread);
        keys.advance();
        cap_and_mask(block >= own.full_end || block < own.full_begin);
        softmax.step(scores, rescale);
        round();
        if constexpr (!kConverts) {
          int const valid = tile.seqlen_k - block * kTileN;
          if (valid < kTileN && clears) {
            FullBarrier::wait(&storage.full_v[values.index], values.phase);
            clear_values(storage.v[values.index], valid, consumer, thread);
          }
        }
        // The softmax of a block; beside it the tensor cores have the values of the block before it, and the other warpgroups' products.
        auto const step = [&](auto masked) CUTLASS_LAMBDA_FUNC_INLINE {
          FullBarrier::wait(&storage.full_k[keys.index], keys.phase);
          FullBarrier::wait(&storage.full_v[values.index], values.phase);
          take_turn(consumer);
          warpgroup_fence_operand(scores);
          warpgroup_fence_operand(output);
          warpgroup_fence_operand(packed);
          warpgroup_arrive();
          multiply_keys();
          multiply_values();
          pass_turn(consumer);
          warpgroup_wait<1>();
          warpgroup_fence_operand(scores);
          release(&storage.empty_k[keys.index], thread);
          keys.advance();
          cap_and_mask(masked);
          bool const grown = softmax.step(scores, rescale);
          warpgroup_wait<0>();
          warpgroup_fence_operand(output);
          release(&storage.empty_v[values.index], thread);
          values.advance();
          round();
          if (grown) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kOutputs; ++i) output(i) *= rescale[i / 2 % 2];
          }
        };
        int const last_full = own.full_end - 1;
        for (--block; block > last_full && block >= own.begin; --block) step(true_type{});
        int const first_full = own.full_begin > own.begin ? own.full_begin : own.begin;
        for (; block >= first_full; --block) step(false_type{});
        for (; block >= own.begin; --block) step(true_type{});

        release(&storage.empty_q[query_stage(turn)], thread);
        FullBarrier::wait(&storage.full_v[values.index], values.phase);
        warpgroup_fence_operand(output);
        warpgroup_fence_operand(packed);
        warpgroup_arrive();
        multiply_values();
        warpgroup_wait<0>();
        warpgroup_fence_operand(output);
        release(&storage.empty_v[values.index], thread);
        values.advance();
      } else {
        release(&storage.empty_q[query_stage(turn)], thread);
      }
      // What is known of the tile is read again: kept over the mainloop, it would be spilled.
      QueryTile const done = handed_out(storage, turn, lane);
      release(&storage.empty_tile[turn % 2], thread);
      if (params.window_left >= 0) {  // blocks before the window of this warpgroup's rows
        Rows const rows = rows_of(params, done, consumer);
        int32_t const first = blocks_of(params, done, rows_of(params, done)).begin, own_first = blocks_of(params, done, rows).begin;
        for (int n = rows.first <= rows.last ? own_first - first : 0; n > 0; --n) {
          pass_block(storage, keys, values, kTileN, false, consumer, thread);
        }
      }
      store(params, storage, done, softmax, output, consumer, thread);
    }
    if (thread == 0) tma_store_wait<0>();  // shared memory must outlive the reads of the last stores
  }

  template <class Softmax, class Output>
  static CUTLASS_DEVICE void store(Params const& params, SharedStorage& storage, QueryTile const& tile, Softmax& softmax, Output& output,
                                   int consumer, int thread) {
    asm volatile("" : "+r"(thread), "+r"(consumer));  // addresses worked out before the mainloop would be spilled
    int const lane = thread % 32, row = consumer * 64 + thread / 32 * 16 + lane / 4;  // of the tile; the thread's other one is 8 below
    Rows const own = rows_of(params, tile, consumer);
    if (own.first > own.last) return;
    softmax.add_up();
    float factor[2], lse[2];
    int query[2], head[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      query[h] = tile.first + over_pack(params, row + 8 * h);
      head[h] = tile.head_unit * params.pack + (row + 8 * h & (params.pack - 1));
      float sink = -INFINITY;
      if (params.sinks != nullptr && query[h] < tile.seqlen_q) sink = float(static_cast<Element const*>(params.sinks)[head[h]]);
      factor[h] = softmax.finish(h, sink, &lse[h]);
      if constexpr (kConverts) factor[h] *= scale_of_output(params, kv_head_of(params, tile));
    }
    int const batch = params.cu_seqlens_q != nullptr ? 0 : tile.batch;
    bool const whole = params.cu_seqlens_q == nullptr || own.first + over_pack(params, 64) <= tile.seqlen_q;  // TMA cuts at extents alone
    auto const rounded = [&](int block, int h) {  // columns 8 block + 2 (lane % 4) and the next
      cutlass::NumericArrayConverter<Element, float, 2> const convert;
      cutlass::Array<float, 2> pair;
      pair[0] = output(4 * block + 2 * h) * factor[h];
      pair[1] = output(4 * block + 2 * h + 1) * factor[h];
      auto const x = convert(pair);
      return reinterpret_cast<uint32_t const&>(x);
    };
    if (kOwnOutput && whole) {
      store_staged(params, storage, tile, rounded, own.first, batch, consumer, thread);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        auto* const to = static_cast<Element*>(params.out) + batch * params.out_batch + (tile.row_q + query[h]) * params.out_row +
                         head[h] * params.out_head;
#pragma unroll
        for (int block = 0; block < kHeadDimV / 8; block += 4) {
          uint32_t x[4] = {rounded(block, h), rounded(block + 1, h), rounded(block + 2, h), rounded(block + 3, h)};
          turn_quad(x, lane);
          int const column = 8 * (block + lane % 4);
          if (query[h] < tile.seqlen_q && column < params.head_dim_v)
            *reinterpret_cast<uint4*>(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
    if (params.lse == nullptr || lane % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // last: a fence would wait for it
      if (query[h] < tile.seqlen_q) params.lse[batch * params.lse_batch + head[h] * params.lse_head + tile.row_q + query[h]] = lse[h];
    }
  }

  /// x[i] of lane c of four becomes x[c] of lane i.
  static CUTLASS_DEVICE void turn_quad(uint32_t (&x)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      bool const upper = lane & bit;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        uint32_t const other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + bit], bit);
        x[i] = upper ? other : x[i];
        x[i + bit] = upper ? x[i + bit] : other;
      }
    }
  }

  /// By way of shared memory and TMA.
  template <class Rounded>
  static CUTLASS_DEVICE void store_staged(Params const& params, SharedStorage& storage, QueryTile const& tile, Rounded const& rounded,
                                          int first, int batch, int consumer, int thread) {
    if constexpr (kOwnOutput) {
      int const lane = thread % 32, barrier = kOwnBarrier + consumer;
      Element* const staged = storage.output.of + consumer * 64 * 64;
      if (thread == 0) cute::tma_store_wait<0>();  // the tile before this one has been read
      asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
      // Matrices of 8 rows x 8 columns: lane l addresses row l % 8 of the (l / 8)-th, which are the two halves of 16 rows, of two blocks of
      // columns.
      int const at_row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; j += 2) {
        int const block = j + lane / 16;
        Element* const to = staged + block / 8 * (kTileM * 64) + at_row * 64 + (block % 8 ^ at_row % 8) * 8;
        asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(cute::cast_smem_ptr_to_uint(to)),
                     "r"(rounded(j, 0)), "r"(rounded(j, 1)), "r"(rounded(j + 1, 0)), "r"(rounded(j + 1, 1))
                     : "memory");
      }
      cutlass::arch::fence_view_async_shared();
      asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
      if (thread != 0) return;
#pragma unroll
      for (int column = 0; column < kHeadDimV / 64; ++column) {
        cute::SM90_TMA_STORE_5D::copy(&params.o, staged + column * (kTileM * 64), column * 64, 0, tile.row_q + first, tile.head_unit,
                                      batch);
      }
      cute::tma_store_arrive();
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(PrefillSm90<Config>::kThreads, 1)
    prefill_sm90_kernel(__grid_constant__ typename PrefillSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  PrefillSm90<Config>::run(params, smem);
#endif
}

/// A mode of extent 1 has any stride; TMA wants a legal one.
inline int64_t stride_bytes(int64_t extent, int64_t stride) { return extent > 1 ? stride * 2 : 16; }

/// Queries or output: [batch, head units, rows, pack, head_dim].
inline Status describe_queries(CUtensorMap* map, void const* base, AttentionProblem const& p, int64_t pack, int64_t head_dim, int64_t batch,
                               int64_t row, int64_t head, int box_rows) {
  int64_t const units = p.heads_q / pack, rows = p.varlen ? p.tokens_q : p.seqlen_q, batches = p.varlen ? 1 : p.batch;
  int64_t const extents[5] = {head_dim, pack, rows, units, batches};
  int64_t const strides[4] = {stride_bytes(pack, head), stride_bytes(rows, row), stride_bytes(units, pack * head),
                              stride_bytes(batches, batch)};
  int const box[5] = {64, int(pack), int(box_rows / pack), 1, 1};
  return encode_tensor_map_rows(map, 5, base, extents, strides, box, 2, RowFetch::kAlone);
}

/// Keys or values: [batch, rows, heads_kv, head_dim], or the pages of a cache.
inline Status describe_keys(CUtensorMap* map, void const* base, AttentionProblem const& p, int64_t head_dim, int64_t const (&stride)[3],
                            int box_rows) {
  int64_t const rows = p.cached ? p.page_size : p.varlen ? p.tokens_k : p.seqlen_k, batches = p.cached ? p.pages : p.varlen ? 1 : p.batch;
  int64_t const extents[4] = {head_dim, p.heads_kv, rows, batches};
  int64_t const strides[3] = {stride_bytes(p.heads_kv, stride[2]), stride_bytes(rows, stride[1]), stride_bytes(batches, stride[0])};
  int const box[4] = {64, 1, box_rows, 1};
  return encode_tensor_map_rows(map, 4, base, extents, strides, box, 2, RowFetch::kAlone);
}

template <class Config>
Status launch_prefill_sm90(AttentionLaunchArguments const& arguments) {
  using Kernel = PrefillSm90<Config>;
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  AttentionPlan const& plan = *arguments.plan;
  int64_t const pack = plan.pack, out_row = p.heads_q * p.head_dim_v;
  typename Kernel::Params params{};
  Status status = describe_queries(&params.q, o.q, p, pack, p.head_dim, o.q_strides[0], o.q_strides[1], o.q_strides[2], Config::kTileM);
  if (status.ok()) status = describe_queries(&params.o, o.out, p, pack, p.head_dim_v, p.seqlen_q * out_row, out_row, p.head_dim_v, 64);
  if (!status.ok()) return status;
  if constexpr (Config::kConverts) {
    describe_codes(&params, p, o);
    params.k = params.v = params.q;
  } else if (p.tokens_k > 0) {  // without keys nothing is loaded
    status = describe_keys(&params.k, o.k, p, p.head_dim, o.k_strides, int(plan.box_rows));
    if (status.ok()) status = describe_keys(&params.v, o.v, p, p.head_dim_v, o.v_strides, int(plan.box_rows));
    if (!status.ok()) return status;
  } else {
    params.k = params.v = params.q;
  }
  set_prefill_arguments(arguments, Config::kTileM, &params);
  if (status = clear_tile_counter(arguments, params); !status.ok()) return status;
  int64_t const tiles = p.varlen ? arguments.device->sm_count : int64_t(params.q_tiles) * params.head_units * params.batch;
  return launch_kernel<Kernel>(&prefill_sm90_kernel<Config>, params, arguments, std::min<int64_t>(arguments.device->sm_count, tiles));
}

}  // namespace minfer::attention
