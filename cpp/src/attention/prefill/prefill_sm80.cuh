// Attention forward for sm_80 onward, many queries: cp.async + mma.sync. The only path on A100, Ada and consumer Blackwell. After
// FlashAttention-2 (Dao, 2023).
//
// All warps are alike: 16 rows of the tile each, and every key. A tile's blocks of keys and values are loaded by all threads into one of
// two stages, the last block first, while they compute with the other: a block costs one barrier of the CTA.
// Rows of a tile. `pack` query heads of a KV head lie side by side: with few queries they share the loads of K and V.
// Queries stay in registers, or in shared memory where head_dim leaves none; the output is staged where they were.
// Scores never leave registers: S = Q.K^T accumulates in fp32, P = exp2(S - max) is rounded to 16 bits in the layout of an A operand.
// Keys that no query of the tile sees are not read, nor are their pages: they are zeros in shared memory, and their scores are masked.
// Tile walk: tile_scheduler.cuh; a CTA for each tile, or, where only the device knows how many there are, persistent CTAs and a counter.
// Masks: mask.h; only blocks on an edge are masked.
// Limits: 16-bit, q, k and v 16-byte aligned in base and strides, head_dim a multiple of 8 up to kHeadDim: padded with zeros.
#pragma once

#include "attention/prefill/arguments.cuh"
#include "attention/prefill/params.h"
#include "attention/shared/key_rows.cuh"
#include "attention/shared/launch_kernel.cuh"
#include "attention/shared/mask.h"
#include "attention/shared/outside_rows.cuh"
#include "attention/shared/softmax.cuh"
#include "attention/shared/tile_scheduler.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "cute/util/type_traits.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"
#include "cutlass/numeric_types.h"
#include "minfer/types.h"

namespace minfer::attention {

struct PrefillSm80Params : PrefillParams {
  KeyRows q_rows, key_rows, value_rows;
  float scale_log2;  // the softmax's; worked out on the device, it would cost a register
};

template <class Config>
struct PrefillSm80 {
  using Element = cute::conditional_t<Config::kType == DataType::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kHeadDim = Config::kHeadDim;
  static constexpr int kWarps = kTileM / 16, kThreads = 32 * kWarps, kMinCtas = Config::kCtasPerSm;
  static constexpr int kScores = kTileN / 2;
  static constexpr bool kQueriesInRegisters = kHeadDim <= 128;
  static constexpr int kChunks = kHeadDim / 8,
                       kRowsAtOnce = kThreads / kChunks;  // of 16 bytes of a row; rows that all threads copy at a time
  static_assert(kTileM % 16 == 0 && kTileN % 16 == 0 && kHeadDim % 64 == 0 && Config::kHeadDimV == kHeadDim && Config::kStages == 2);
  static_assert(kThreads % kChunks == 0 && kTileM % kRowsAtOnce == 0 && kTileN % kRowsAtOnce == 0);
  using Tiles = PrefillTiles<kTileM>;
  using Params = PrefillSm80Params;

  struct SharedStorage {
    alignas(128) uint16_t q[kTileM * kHeadDim];  // [head_dim / 64][row][64], as all of them
    alignas(128) uint16_t k[2][kTileN * kHeadDim];
    alignas(128) uint16_t v[2][kTileN * kHeadDim];
    typename Tiles::Storage tiles;
    int32_t tile;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  /// Scores or output of a warp's 16 rows, as softmax.cuh numbers them.
  template <int kColumns>
  struct Accumulators {
    float of[kColumns / 8][4];
    CUTLASS_DEVICE float& operator()(int i) { return of[i / 4][i % 4]; }
    CUTLASS_DEVICE float operator()(int i) const { return of[i / 4][i % 4]; }
    CUTLASS_DEVICE void clear() {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int x = 0; x < 4; ++x) of[j][x] = 0.0f;
      }
    }
  };

  /// A tile's walk over its keys.
  struct Walk {
    QueryTile tile;
    int32_t last;  // query
    Mask mask;
    KeyBlocks<kTileN> blocks;

    CUTLASS_DEVICE Walk(Params const& params, QueryTile const& tile)
        : tile(tile),
          last(min(tile.first + kTileM / params.pack, tile.seqlen_q) - 1),
          mask(tile.seqlen_q, tile.seqlen_k, params.window_left, params.window_right),
          blocks(mask, tile.first, last) {}
    CUTLASS_DEVICE bool sees_keys() const { return blocks.begin < blocks.end; }
    CUTLASS_DEVICE int64_t batch(Params const& params) const { return params.cu_seqlens_q != nullptr ? 0 : tile.batch; }
    /// Query of the sequence and head of a row of the tile.
    CUTLASS_DEVICE int query(Params const& params, int row) const { return tile.first + row / params.pack; }
    CUTLASS_DEVICE int head(Params const& params, int row) const { return tile.head_unit * params.pack + row % params.pack; }
  };

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    int const thread = int(threadIdx.x);
#if __CUDA_ARCH__ >= 900
    allow_dependent_launch();
    wait_for_predecessor();
#endif
    Tiles::build(storage.tiles, params, thread, kThreads);
    __syncthreads();
    clear_rows_outside(params, thread, kThreads);
    int const tiles = Tiles::count(storage.tiles, params);
    for (int t = int(blockIdx.x); t < tiles;) {
      compute(params, storage, t, thread);
      __syncthreads();  // shared memory was read, the number of this tile too
      if (params.tile_counter == nullptr) {
        t += int(gridDim.x);
      } else {
        if (thread == 0) storage.tile = Tiles::next(params, t);
        __syncthreads();
        t = storage.tile;
      }
    }
  }

  /// Where 16 bytes of [head_dim / 64][kRows][64] lie: the swizzle that ldmatrix needs.
  template <int kRows>
  static CUTLASS_DEVICE uint32_t address_of(uint32_t base, int row, int chunk) {
    return base + chunk / 8 * (kRows * 128) + row * 128 + (chunk % 8 ^ row % 8) * 16;
  }

  static CUTLASS_DEVICE void load_queries(Params const& params, SharedStorage& storage, Walk const& walk, int thread) {
    asm volatile("" : "+r"(thread));  // as in load_block
    int const chunk = thread % kChunks, bytes = params.q_rows.bytes_from(16 * chunk);
    uint32_t const to = shared_address(storage.q);
#pragma unroll 2
    for (int row = thread / kChunks; row < kTileM; row += kRowsAtOnce) {
      int const query = walk.query(params, row);
      bool const inside = query <= walk.last;
      char const* from = params.q_rows.at(walk.batch(params), walk.tile.row_q + (inside ? query : walk.last), walk.head(params, row));
      copy_async_16(address_of<kTileM>(to, row, chunk), from + 16 * chunk, inside ? bytes : 0);
    }
  }

  static CUTLASS_DEVICE void load_block(Params const& params, SharedStorage& storage, Walk const& walk, int block, int stage, int thread) {
    asm volatile("" : "+r"(thread));  // addresses are made again for each block: kept, they would be spilled
    int const chunk = thread % kChunks, kv_head = walk.tile.head_unit * params.pack / params.group;
    int const key_bytes = params.key_rows.bytes_from(16 * chunk), value_bytes = params.value_rows.bytes_from(16 * chunk);
    uint32_t const keys = shared_address(storage.k[stage]), values = shared_address(storage.v[stage]);
    int const begin = walk.mask.begin(walk.tile.first), end = walk.mask.end(walk.last);
#pragma unroll
    for (int r = 0; r < kTileN; r += kRowsAtOnce) {
      int const own = r + thread / kChunks, key = block * kTileN + own;
      bool inside = key >= begin && key < end;
      int page = params.cu_seqlens_k != nullptr ? 0 : walk.tile.batch, row = walk.tile.row_k + key;
      if (params.block_table != nullptr) {
        PageTable::Place const place = inside ? params.find(walk.tile.batch, key) : PageTable::Place{-1, 0};
        page = place.page;
        row = place.row;
        inside = params.has(page);
      }
      copy_async_16(address_of<kTileN>(keys, own, chunk), params.key_rows.at(page, row, kv_head) + 16 * chunk, inside ? key_bytes : 0);
      copy_async_16(address_of<kTileN>(values, own, chunk), params.value_rows.at(page, row, kv_head) + 16 * chunk,
                    inside ? value_bytes : 0);
    }
  }

  static CUTLASS_DEVICE void compute(Params const& params, SharedStorage& storage, int t, int thread) {
    Walk const walk(params, Tiles::at(storage.tiles, params, t));
    int const warp = thread / 32;
    int lane = thread % 32;
    Accumulators<kHeadDim> output;
    output.clear();
    bool const capped = params.softcap > 0.0f;
    bool settled = false;
    OnlineSoftmax<kScores> softmax(params.scale_log2);
    if (walk.sees_keys()) {
      uint32_t queries[kQueriesInRegisters ? kHeadDim / 16 : 1][4];
      // Matrices of 8 rows x 8 columns. Of queries: rows 0-7 and 8-15 of a chunk, then of the next.
      auto const query_at = [&](int step) {
        return address_of<kTileM>(shared_address(storage.q), warp * 16 + lane % 16, 2 * step + lane / 16);
      };
      load_queries(params, storage, walk, thread);
      load_block(params, storage, walk, walk.blocks.end - 1, 0, thread);
      commit_copies();
      int stage = 0;
#pragma unroll 1
      for (int block = walk.blocks.end - 1; block >= walk.blocks.begin; --block, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // the block is there, and nobody reads the one before it
        if (block > walk.blocks.begin) load_block(params, storage, walk, block - 1, stage ^ 1, thread);
        commit_copies();
        if constexpr (kQueriesInRegisters) {
          if (block == walk.blocks.end - 1) {
#pragma unroll
            for (int step = 0; step < kHeadDim / 16; ++step) load_matrices(query_at(step), queries[step]);
          }
        }
        asm volatile("" : "+r"(lane));  // as in load_block
        Accumulators<kTileN> scores;
        scores.clear();
        uint32_t const keys = shared_address(storage.k[stage]), values = shared_address(storage.v[stage]);
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
          if constexpr (!kQueriesInRegisters) load_matrices(query_at(step), queries[0]);
          auto const& a = queries[kQueriesInRegisters ? step : 0];
#pragma unroll
          for (int pair = 0; pair < kTileN / 16; ++pair) {  // a chunk of keys 0-7, the next chunk, then of keys 8-15
            uint32_t b[4];
            load_matrices(address_of<kTileN>(keys, 16 * pair + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2), b);
            multiply_16x8x16<Config::kType>(scores.of[2 * pair], a, b[0], b[1]);
            multiply_16x8x16<Config::kType>(scores.of[2 * pair + 1], a, b[2], b[3]);
          }
        }
        bool const masked = block >= walk.blocks.full_end || block < walk.blocks.full_begin;
        bool const by_size = kHeadDim <= 128 && capped && !masked;  // above, registers are few
        if (capped && !by_size) cap_scores<kScores>(scores, params.cap.inner);
        if (masked) {
          int32_t begin[2], end[2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            int const query = walk.query(params, warp * 16 + lane / 4 + 8 * h);
            begin[h] = walk.mask.begin(query);
            end[h] = walk.mask.end(query);
          }
          apply_mask<kScores>(scores, begin, end, block * kTileN, lane);
        }
        float rescale[2], top[2];
        bool grown;
        if (!by_size) {
          grown = softmax.step(scores, rescale);
        } else if (softmax.are_small(scores, top, params.cap, settled)) {
          grown = softmax.step_small(scores, rescale, top, params.cap, settled);
        } else {
          grown = softmax.step_large(scores, rescale, top, params.cap);
        }
        if (grown) {
#pragma unroll
          for (int i = 0; i < kHeadDim / 2; ++i) output(i) *= rescale[i / 2 % 2];
        }
#pragma unroll
        for (int step = 0; step < kTileN / 16; ++step) {
          uint32_t a[4];
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            auto const& from = scores.of[2 * step + x / 2];
            a[x] = round_pair<Config::kType>(from[x % 2 * 2], from[x % 2 * 2 + 1]);
          }
#pragma unroll
          for (int pair = 0; pair < kHeadDim / 16; ++pair) {  // keys 0-7 and 8-15 of a chunk, then of the next
            uint32_t b[4];
            load_matrices_transposed(address_of<kTileN>(values, 16 * step + lane % 16, 2 * pair + lane / 16), b);
            multiply_16x8x16<Config::kType>(output.of[2 * pair], a, b[0], b[1]);
            multiply_16x8x16<Config::kType>(output.of[2 * pair + 1], a, b[2], b[3]);
          }
        }
      }
    }
    asm volatile("" : "+r"(t));  // what is known of the tile is worked out again: kept over the blocks, it would be spilled
    store(params, storage, Walk(params, Tiles::at(storage.tiles, params, t)), softmax, output, warp, lane);
  }

  /// The warp's rows, by way of the room of their queries, which this warp alone has read.
  static CUTLASS_DEVICE void store(Params const& params, SharedStorage& storage, Walk const& walk, OnlineSoftmax<kScores>& softmax,
                                   Accumulators<kHeadDim>& output, int warp, int lane) {
    uint32_t const staged = shared_address(storage.q);
    __syncwarp();
    softmax.add_up();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const row = warp * 16 + lane / 4 + 8 * h, query = walk.query(params, row), head = walk.head(params, row);
      bool const inside = query <= walk.last;
      float sink = -INFINITY, lse;
      if (params.sinks != nullptr && inside) sink = float(static_cast<Element const*>(params.sinks)[head]);
      float const factor = softmax.finish(h, sink, &lse);
      if (params.lse != nullptr && inside && lane % 4 == 0) {
        params.lse[walk.batch(params) * params.lse_batch + head * params.lse_head + walk.tile.row_q + query] = lse;
      }
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        uint32_t const pair = round_pair<Config::kType>(output.of[j][2 * h] * factor, output.of[j][2 * h + 1] * factor);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address_of<kTileM>(staged, row, j) + lane % 4 * 4), "r"(pair) : "memory");
      }
    }
    __syncwarp();
#pragma unroll 2
    for (int i = lane; i < 16 * kChunks; i += 32) {
      int const chunk = i % kChunks, row = warp * 16 + i / kChunks, query = walk.query(params, row), head = walk.head(params, row);
      if (query > walk.last || chunk * 8 >= params.head_dim_v) continue;
      uint4 x;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "r"(address_of<kTileM>(staged, row, chunk))
                   : "memory");
      *reinterpret_cast<uint4*>(static_cast<Element*>(params.out) + walk.batch(params) * params.out_batch +
                                (walk.tile.row_q + query) * params.out_row + head * params.out_head + chunk * 8) = x;
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(PrefillSm80<Config>::kThreads, PrefillSm80<Config>::kMinCtas)
    prefill_sm80_kernel(__grid_constant__ PrefillSm80Params const params) {
  extern __shared__ __align__(128) char smem[];
  PrefillSm80<Config>::run(params, smem);
}

template <class Config>
Status launch_prefill_sm80(AttentionLaunchArguments const& arguments) {
  using Kernel = PrefillSm80<Config>;
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  PrefillSm80Params params{};
  set_prefill_arguments(arguments, Kernel::kTileM, &params);
  params.q_rows = KeyRows::of(o.q, o.q_strides, p.head_dim, 16);
  params.key_rows = KeyRows::of(o.k, o.k_strides, p.head_dim, 16);
  params.value_rows = KeyRows::of(o.v, o.v_strides, p.head_dim_v, 16);
  params.scale_log2 = (o.softcap > 0.0f ? o.softcap : o.scale) * kLog2E;
  if (Status const status = clear_tile_counter(arguments, params); !status.ok()) return status;
  return launch_kernel<Kernel>(&prefill_sm80_kernel<Config>, params, arguments, arguments.plan->ctas);
}

}  // namespace minfer::attention
