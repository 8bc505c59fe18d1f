// What multiplies a prefill kernel's tiles: warpgroups with 64 rows of a tile each.
#pragma once

#include "attention/prefill/traits.cuh"
#include "attention/shared/outside_rows.cuh"
#include "attention/shared/softmax.cuh"
#include "cute/tensor.hpp"
#include "cutlass/numeric_conversion.h"

namespace minfer::attention {

template <class Traits>
struct PrefillConsumer : Traits {
  using Traits::blocks_of, Traits::handed_out, Traits::kConsumers, Traits::kConverts, Traits::kHeadDim, Traits::kHeadDimV;
  using Traits::kOutputs, Traits::kOwnOutput, Traits::kPingpong, Traits::kQueryStages, Traits::kScores, Traits::kStages, Traits::kTileM;
  using Traits::kTileN, Traits::kv_head_of, Traits::mask_of, Traits::over_pack, Traits::query_phase, Traits::query_stage, Traits::release;
  using Traits::rows_of;
  using typename Traits::Element, typename Traits::EmptyBarrier, typename Traits::FullBarrier, typename Traits::Params,
      typename Traits::Ring;
  using typename Traits::Rows, typename Traits::SharedStorage;

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
  // Rows of a block of values that no query of the sequence sees become zeros, for what they hold is multiplied by probabilities of zero, and
  // 0 * NaN is NaN: those behind the last key, and those before all windows, which the tile's first block may begin with. By all consumers, of
  // each block once, when it has arrived. The converter of codes leaves zeros itself.

  static CUTLASS_DEVICE bool has_unseen_end(Params const& params, QueryTile const& tile, int block) {
    return !kConverts && !params.keys_end_at_extent && tile.seqlen_k < (block + 1) * kTileN;
  }
  static CUTLASS_DEVICE void clear_end(QueryTile const& tile, Element* values, int block) {
    clear_values(values, tile.seqlen_k - block * kTileN, kTileN);
  }
  static CUTLASS_DEVICE bool has_unseen_begin(QueryTile const& tile, int block) { return !kConverts && tile.first_key > block * kTileN; }
  static CUTLASS_DEVICE void clear_begin(QueryTile const& tile, Element* values, int block) {
    clear_values(values, 0, min(tile.first_key - block * kTileN, kTileN));
  }
  static CUTLASS_DEVICE void clear_values(Element* values, int begin, int end) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // asked for here: kept over the mainloop, it would be spilled
    int const units = (end - begin) * 8;
#pragma unroll 1
    for (int i = thread - 128; i < units * (kHeadDimV / 64); i += kConsumers * 128) {
      int const column = i / units, unit = i - column * units;
      *reinterpret_cast<uint4*>(values + (column * kTileN + begin) * 64 + unit * 8) = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
    asm volatile("bar.sync %0, %1;" ::"n"(kAllBarrier), "n"(kConsumers * 128) : "memory");
  }

  /// A block that a warpgroup's own rows do not meet: its turn and its stages are passed on.
  static CUTLASS_DEVICE void pass_block(Params const& params, SharedStorage& storage, QueryTile const& tile, int block, Ring& keys,
                                        Ring& values, int consumer, int thread) {
    take_turn(consumer);
    pass_turn(consumer);
    FullBarrier::wait(&storage.full_k[keys.index], keys.phase);
    release(&storage.empty_k[keys.index], thread);
    FullBarrier::wait(&storage.full_v[values.index], values.phase);
    if (has_unseen_end(params, tile, block)) clear_end(tile, storage.v[values.index], block);
    if (has_unseen_begin(tile, block)) clear_begin(tile, storage.v[values.index], block);
    release(&storage.empty_v[values.index], thread);
    keys.advance();
    values.advance();
  }

  enum class Block { kFull, kMasked, kCapped };  // kCapped: full, beneath a softcap

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
      int block = blocks.end - 1;
      for (int const own_end = own_rows.first <= own_rows.last ? own.end : 0; block >= own_end && block >= blocks.begin; --block) {
        pass_block(params, storage, tile, block, keys, values, consumer, thread);
      }
      if (block >= blocks.begin) {
        float rescale[2];
        bool settled = false;
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
        auto const cap_and_mask = [&](bool masked, bool caps) CUTLASS_LAMBDA_FUNC_INLINE {
          if (caps) {
            float inner = params.cap.inner;
            if constexpr (kConverts) inner = scale_of(params, storage.tile[turn % 2]) / params.softcap;
            cap_scores<kScores>(scores, inner);
          }
          if (masked) {  // limits are worked out here: kept, they would cost registers in every block
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
        cap_and_mask(block >= own.full_end || block < own.full_begin, capped);
        softmax.step(scores, rescale);
        round();
        if (has_unseen_end(params, tile, block)) {
          FullBarrier::wait(&storage.full_v[values.index], values.phase);
          clear_end(tile, storage.v[values.index], block);
        }
        // The products of a block and of the values before it, and its softmax. The compiler moves the wait for the values before the softmax;
        // kept behind it, by a branch between them, most lengths from 512 to 16384 tokens took up to 3 % longer (H200). Beneath a softcap, it
        // stays behind: moved, head_dim 128 took as long and 256 4 % longer.
        auto const step = [&](auto kind) CUTLASS_LAMBDA_FUNC_INLINE {
          constexpr Block kBlock = kind;
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
          bool grown;
          if constexpr (kBlock == Block::kCapped) {
            float top[2];
            if (softmax.are_small(scores, top, params.cap, settled)) {
              grown = softmax.step_small(scores, rescale, top, params.cap, settled);
            } else {
              grown = softmax.step_large(scores, rescale, top, params.cap);
            }
          } else {
            cap_and_mask(kBlock == Block::kMasked, capped && (kConverts || kBlock == Block::kMasked));
            grown = softmax.step(scores, rescale);
          }
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
        for (--block; block > last_full && block >= own.begin; --block) step(constant<Block, Block::kMasked>{});
        int const first_full = own.full_begin > own.begin ? own.full_begin : own.begin;
        if (capped && !kConverts) {  // codes' K scale is known on the device alone
          for (; block >= first_full; --block) step(constant<Block, Block::kCapped>{});
        }
        for (; block >= first_full; --block) step(constant<Block, Block::kFull>{});
        for (; block >= own.begin; --block) step(constant<Block, Block::kMasked>{});

        release(&storage.empty_q[query_stage(turn)], thread);
        FullBarrier::wait(&storage.full_v[values.index], values.phase);
        if (has_unseen_begin(storage.tile[turn % 2], own.begin)) {
          clear_begin(storage.tile[turn % 2], storage.v[values.index], own.begin);
        }
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
        for (int before = rows.first <= rows.last ? own_first - 1 : first - 1; before >= first; --before) {
          pass_block(params, storage, done, before, keys, values, consumer, thread);
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

}  // namespace minfer::attention
