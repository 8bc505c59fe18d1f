// Attention forward of many queries for sm_80 onward: cp.async + mma.sync. The only prefill kernel on A100, Ada and consumer Blackwell.
// After FlashAttention-2 (Dao, 2023).
//
// Warp roles. All warps are alike: each computes 16 rows of the tile over every key block.
// Pipelines. All threads load a key block of K and V by cp.async into one of two stages, the last block first, while they compute with the
// other stage: a block costs one barrier of the CTA.
// Packed heads. A tile holds `packed_heads` query heads of one KV head next to each other. With few queries they share the loads of K
// and V.
// Registers. Scores stay in registers: S = Q.K^T accumulates in fp32, and P = exp2(S - max) is rounded to 16 bits in the layout of an A
// operand. Queries stay in registers, too, or in shared memory where head_dim leaves no room.
// Shared memory. Queries, whose room stages the output at the end, and two stages of K and of V.
// Masks. Only key blocks on the edge of a mask are masked (mask.h). Keys that no query of the tile sees are not read, nor are their pages:
// they are zeros in shared memory, and their scores are masked.
// Tile walk: tile_scheduler.cuh. A CTA for each tile; or, where only the device knows their number, persistent CTAs and a counter.
// Limits: 16-bit; q, k and v aligned to 16 bytes in base and strides; head_dim a multiple of 8 up to kHeadDim, filled up with zeros.
#pragma once

#include "attention/prefill/arguments.cuh"
#include "attention/prefill/params.h"
#include "attention/prefill/tile_scheduler.cuh"
#include "attention/shared/clear_rows.cuh"
#include "attention/shared/launch_kernel.cuh"
#include "attention/shared/mask.h"
#include "attention/shared/paged_rows.cuh"
#include "attention/shared/softmax.cuh"
#include "common/cutlass_element.cuh"
#include "common/dependent_launch.cuh"
#include "common/float16.cuh"
#include "common/mma_sm80.cuh"
#include "common/opaque.cuh"
#include "cute/util/type_traits.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"
#include "cutlass/numeric_types.h"
#include "minfer/types.h"

namespace minfer::attention {

struct PrefillSm80Params : PrefillParams {
  PagedRows q_rows, key_rows, value_rows;
  float scale_log2;  // the softmax's scale times log2(e); computed on the device, it would cost a register
};

template <class Config>
struct PrefillSm80 {
  using Element = CutlassElement<Config::kType>;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kHeadDim = Config::kHeadDim;
  static constexpr int kWarps = kTileM / 16, kThreads = 32 * kWarps, kMinCtas = Config::kCtasPerSm;
  static constexpr int kScores = kTileN / 2;
  static constexpr bool kQueriesInRegisters = kHeadDim <= 128;
  static constexpr int kVectors = kHeadDim / 8,
                       kRowsAtOnce = kThreads / kVectors;  // of a row; rows that all threads copy at a time
  static_assert(kTileM % 16 == 0 && kTileN % 16 == 0 && kHeadDim % 64 == 0 && Config::kHeadDimV == kHeadDim && Config::kStages == 2);
  static_assert(kThreads % kVectors == 0 && kTileM % kRowsAtOnce == 0 && kTileN % kRowsAtOnce == 0);
  using TileScheduler = PrefillTileScheduler<kTileM>;
  using Params = PrefillSm80Params;

  struct SharedStorage {
    alignas(128) uint16_t q[kTileM * kHeadDim];  // [head_dim / 64][row][64], as all of them
    alignas(128) uint16_t k[2][kTileN * kHeadDim];
    alignas(128) uint16_t v[2][kTileN * kHeadDim];
    typename TileScheduler::Storage tiles;
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

  /// A tile and the keys that it visits.
  struct Walk {
    QueryTile tile;
    int32_t last;  // the last query of the tile
    Mask mask;
    KeyBlocks<kTileN> blocks;

    CUTLASS_DEVICE Walk(Params const& params, QueryTile const& tile)
        : tile(tile),
          last(min(tile.first + kTileM / params.packed_heads, tile.seqlen_q) - 1),
          mask(tile.seqlen_q, tile.seqlen_k, params.window_left, params.window_right),
          blocks(mask, tile.first, last) {}
    CUTLASS_DEVICE bool sees_keys() const { return blocks.begin < blocks.end; }
    CUTLASS_DEVICE int64_t batch(Params const& params) const { return params.cu_seqlens_q != nullptr ? 0 : tile.batch; }
    /// Query of the sequence and head of a row of the tile.
    CUTLASS_DEVICE int query(Params const& params, int row) const { return tile.first + row / params.packed_heads; }
    CUTLASS_DEVICE int head(Params const& params, int row) const {
      return tile.head_tile * params.packed_heads + row % params.packed_heads;
    }
  };

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    int const thread = int(threadIdx.x);
#if __CUDA_ARCH__ >= 900
    allow_dependent_launch();
    wait_for_predecessor();
#endif
    TileScheduler::build(storage.tiles, params, thread, kThreads);
    __syncthreads();
    clear_rows_outside_sequences(params, thread, kThreads);
    int const tiles = TileScheduler::count(storage.tiles, params);
    for (int t = int(blockIdx.x); t < tiles;) {
      compute(params, storage, t, thread);
      __syncthreads();  // shared memory was read, the number of this tile too
      if (params.tile_counter == nullptr) {
        t += int(gridDim.x);
      } else {
        if (thread == 0) storage.tile = TileScheduler::next(params, t);
        __syncthreads();
        t = storage.tile;
      }
    }
  }

  /// The address of a vector of [head_dim / 64][kRows][64] elements, with the shared-memory swizzle that keeps ldmatrix free of bank
  /// conflicts.
  template <int kRows>
  static CUTLASS_DEVICE uint32_t address_of(uint32_t base, int row, int vector) {
    return base + vector / 8 * (kRows * 128) + row * 128 + (vector % 8 ^ row % 8) * 16;
  }

  static CUTLASS_DEVICE void load_queries(Params const& params, SharedStorage& storage, Walk const& walk, int thread) {
    make_opaque(thread);  // as in load_block
    int const vector = thread % kVectors, bytes = params.q_rows.vector_bytes(16 * vector);
    uint32_t const to = shared_address(storage.q);
#pragma unroll 2
    for (int row = thread / kVectors; row < kTileM; row += kRowsAtOnce) {
      int const query = walk.query(params, row);
      bool const inside = query <= walk.last;
      char const* from = params.q_rows.at(walk.batch(params), walk.tile.row_q + (inside ? query : walk.last), walk.head(params, row));
      copy_async_16(address_of<kTileM>(to, row, vector), from + 16 * vector, inside ? bytes : 0);
    }
  }

  static CUTLASS_DEVICE void load_block(Params const& params, SharedStorage& storage, Walk const& walk, int block, int stage, int thread) {
    make_opaque(thread);  // addresses are computed anew for each block: kept, they would be spilled
    int const vector = thread % kVectors, kv_head = walk.tile.head_tile * params.packed_heads / params.heads_per_kv;
    int const key_bytes = params.key_rows.vector_bytes(16 * vector), value_bytes = params.value_rows.vector_bytes(16 * vector);
    uint32_t const keys = shared_address(storage.k[stage]), values = shared_address(storage.v[stage]);
    int const begin = walk.mask.begin(walk.tile.first), end = walk.mask.end(walk.last);
#pragma unroll
    for (int r = 0; r < kTileN; r += kRowsAtOnce) {
      int const block_row = r + thread / kVectors, key = block * kTileN + block_row;
      bool inside = key >= begin && key < end;
      int page = params.cu_seqlens_k != nullptr ? 0 : walk.tile.batch, row = walk.tile.row_k + key;
      if (params.block_table != nullptr) {
        PageTable::Location const location = inside ? params.find(walk.tile.batch, key) : PageTable::Location{-1, 0};
        page = location.page;
        row = location.row;
        inside = params.has(page);
      }
      copy_async_16(address_of<kTileN>(keys, block_row, vector), params.key_rows.at(page, row, kv_head) + 16 * vector,
                    inside ? key_bytes : 0);
      copy_async_16(address_of<kTileN>(values, block_row, vector), params.value_rows.at(page, row, kv_head) + 16 * vector,
                    inside ? value_bytes : 0);
    }
  }

  static CUTLASS_DEVICE void compute(Params const& params, SharedStorage& storage, int t, int thread) {
    Walk const walk(params, TileScheduler::at(storage.tiles, params, t));
    int const warp = thread / 32;
    int lane = thread % 32;
    Accumulators<kHeadDim> output;
    output.clear();
    bool const capped = params.softmax.softcap > 0.0f;
    bool min_is_negligible = false;
    OnlineSoftmax<kScores> softmax(params.scale_log2);
    if (walk.sees_keys()) {
      uint32_t queries[kQueriesInRegisters ? kHeadDim / 16 : 1][4];
      // ldmatrix: rows 0-7 and 8-15 of a vector, then of the next.
      auto const query_at = [&](int k_block) {
        return address_of<kTileM>(shared_address(storage.q), warp * 16 + lane % 16, 2 * k_block + lane / 16);
      };
      load_queries(params, storage, walk, thread);
      load_block(params, storage, walk, walk.blocks.end - 1, 0, thread);
      commit_copies();
      int stage = 0;
#pragma unroll 1
      for (int block = walk.blocks.end - 1; block >= walk.blocks.begin; --block, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // the block is there, and no thread reads the one before it any more
        if (block > walk.blocks.begin) load_block(params, storage, walk, block - 1, stage ^ 1, thread);
        commit_copies();
        if constexpr (kQueriesInRegisters) {
          if (block == walk.blocks.end - 1) {
#pragma unroll
            for (int k_block = 0; k_block < kHeadDim / 16; ++k_block) load_matrices(query_at(k_block), queries[k_block]);
          }
        }
        make_opaque(lane);  // as in load_block
        Accumulators<kTileN> scores;
        scores.clear();
        multiply_keys(shared_address(storage.k[stage]), queries, query_at, scores, lane);
        bool const masked = block >= walk.blocks.full_end || block < walk.blocks.full_begin;
        bool const by_polynomial = kHeadDim <= 128 && capped && !masked;  // above 128, registers do not suffice
        if (capped && !by_polynomial) cap_scores<kScores>(scores, params.cap.inner);
        if (masked) mask(params, walk, scores, block, warp, lane);
        float rescale[2], block_max[2];
        bool rescales;
        if (!by_polynomial) {
          rescales = softmax.step(scores, rescale);
        } else if (softmax.within_polynomial(scores, block_max, params.cap, min_is_negligible)) {
          rescales = softmax.step_polynomial(scores, rescale, block_max, params.cap, min_is_negligible);
        } else {
          rescales = softmax.step_tanh(scores, rescale, block_max, params.cap);
        }
        if (rescales) {
#pragma unroll
          for (int i = 0; i < kHeadDim / 2; ++i) output(i) *= rescale[i / 2 % 2];
        }
        multiply_values(shared_address(storage.v[stage]), scores, output, lane);
      }
    }
    make_opaque(t);  // the tile is looked up again: kept over the blocks, its numbers would be spilled
    store(params, storage, Walk(params, TileScheduler::at(storage.tiles, params, t)), softmax, output, warp, lane);
  }

  /// S = Q.K^T of the warp's rows and a block of keys.
  template <class Queries, class QueryAt>
  static CUTLASS_DEVICE void multiply_keys(uint32_t keys, Queries& queries, QueryAt const& query_at, Accumulators<kTileN>& scores,
                                           int lane) {
#pragma unroll
    for (int k_block = 0; k_block < kHeadDim / 16; ++k_block) {
      if constexpr (!kQueriesInRegisters) load_matrices(query_at(k_block), queries[0]);
      auto const& a = queries[kQueriesInRegisters ? k_block : 0];
#pragma unroll
      for (int pair = 0; pair < kTileN / 16; ++pair) {  // ldmatrix: a vector of keys 0-7, the next vector, then of keys 8-15
        uint32_t b[4];
        load_matrices(address_of<kTileN>(keys, 16 * pair + lane / 16 * 8 + lane % 8, 2 * k_block + lane / 8 % 2), b);
        multiply_16x8x16<Config::kType>(scores.of[2 * pair], a, b[0], b[1]);
        multiply_16x8x16<Config::kType>(scores.of[2 * pair + 1], a, b[2], b[3]);
      }
    }
  }

  static CUTLASS_DEVICE void mask(Params const& params, Walk const& walk, Accumulators<kTileN>& scores, int block, int warp, int lane) {
    int32_t begin[2], end[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const query = walk.query(params, warp * 16 + lane / 4 + 8 * h);
      begin[h] = walk.mask.begin(query);
      end[h] = walk.mask.end(query);
    }
    apply_mask<kScores>(scores, begin, end, block * kTileN, lane);
  }

  /// O += P.V of the warp's rows and a block of values; `probabilities` are rounded here.
  static CUTLASS_DEVICE void multiply_values(uint32_t values, Accumulators<kTileN>& probabilities, Accumulators<kHeadDim>& output,
                                             int lane) {
#pragma unroll
    for (int k_block = 0; k_block < kTileN / 16; ++k_block) {
      uint32_t a[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        auto const& from = probabilities.of[2 * k_block + x / 2];
        a[x] = Float16<Config::kType>::pack(from[x % 2 * 2], from[x % 2 * 2 + 1]);
      }
#pragma unroll
      for (int pair = 0; pair < kHeadDim / 16; ++pair) {  // ldmatrix: keys 0-7 and 8-15 of a vector, then of the next
        uint32_t b[4];
        load_matrices_transposed(address_of<kTileN>(values, 16 * k_block + lane % 16, 2 * pair + lane / 16), b);
        multiply_16x8x16<Config::kType>(output.of[2 * pair], a, b[0], b[1]);
        multiply_16x8x16<Config::kType>(output.of[2 * pair + 1], a, b[2], b[3]);
      }
    }
  }

  /// Stores the warp's rows. They are staged where the warp's queries were, which no other warp has read.
  static CUTLASS_DEVICE void store(Params const& params, SharedStorage& storage, Walk const& walk, OnlineSoftmax<kScores>& softmax,
                                   Accumulators<kHeadDim>& output, int warp, int lane) {
    uint32_t const staged = shared_address(storage.q);
    __syncwarp();
    softmax.reduce_sums();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const row = warp * 16 + lane / 4 + 8 * h, query = walk.query(params, row), head = walk.head(params, row);
      bool const inside = query <= walk.last;
      float lse;
      float const factor = finish_row<Element>(params.softmax, head, inside, softmax.row_max[h], softmax.row_sum[h], &lse);
      if (params.lse != nullptr && inside && lane % 4 == 0) {
        params.lse[walk.batch(params) * params.lse_batch + head * params.lse_head + walk.tile.row_q + query] = lse;
      }
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        uint32_t const pair = Float16<Config::kType>::pack(output.of[j][2 * h] * factor, output.of[j][2 * h + 1] * factor);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address_of<kTileM>(staged, row, j) + lane % 4 * 4), "r"(pair) : "memory");
      }
    }
    __syncwarp();
#pragma unroll 2
    for (int i = lane; i < 16 * kVectors; i += 32) {
      int const vector = i % kVectors, row = warp * 16 + i / kVectors, query = walk.query(params, row), head = walk.head(params, row);
      if (query > walk.last || vector * 8 >= params.head_dim_v) continue;
      uint4 x;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "r"(address_of<kTileM>(staged, row, vector))
                   : "memory");
      *reinterpret_cast<uint4*>(static_cast<Element*>(params.out) + walk.batch(params) * params.out_batch +
                                (walk.tile.row_q + query) * params.out_row + head * params.out_head + vector * 8) = x;
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
  params.q_rows = PagedRows::of(o.q, o.q_strides, p.head_dim, 16);
  params.key_rows = PagedRows::of(o.k, o.k_strides, p.head_dim, 16);
  params.value_rows = PagedRows::of(o.v, o.v_strides, p.head_dim_v, 16);
  params.scale_log2 = (o.softmax.softcap > 0.0f ? o.softmax.softcap : o.softmax.scale) * kLog2E;
  if (Status const status = clear_tile_counter(arguments, params); !status.ok()) return status;
  return launch_kernel<Kernel>(&prefill_sm80_kernel<Config>, params, arguments, arguments.plan->ctas);
}

}  // namespace minfer::attention
