// A consumer warpgroup of a prefill kernel: it takes the tiles that the producer publishes, computes its 64 rows of each over the tile's
// key blocks, the last block first, and stores them (epilogue.cuh).
//
// The mainloop. Step i computes the scores of block i and, in the same batch of MMAs, the output of block i + 1, whose probabilities are in
// registers. The softmax of block i then runs while the tensor cores work for the other warpgroups. With pingpong, the order barrier lets
// the warpgroups issue their MMAs in turns. The first block has no earlier output to add, the last one no further scores to compute.
// Values of keys that no query of the sequence sees are set to zero in shared memory before they are multiplied: their probabilities are
// zero, but 0 * NaN is NaN. This concerns keys behind the last one, and in a tile's first block keys before all windows. All consumer
// warpgroups clear a block together, once, when it has arrived. The converter of codes writes zeros itself.
// Batch-invariant kernels do all this for each split of the keys, and fold the splits' outputs (split_totals.cuh). Their softmax takes the
// same path for every block, whatever the other rows of a warp hold: a softcap is always tanh.approx.
// Registers are the limit here. What is needed in few blocks only is computed there, from shared memory or the parameters: kept over the
// mainloop, it would be spilled.
#pragma once

#include "attention/prefill/convert.cuh"
#include "attention/prefill/epilogue.cuh"
#include "attention/prefill/mma.cuh"
#include "attention/prefill/scale_queries.cuh"
#include "attention/prefill/split_merge.cuh"
#include "attention/prefill/split_totals.cuh"
#include "attention/prefill/traits.cuh"
#include "attention/shared/clear_rows.cuh"
#include "attention/shared/softmax.cuh"
#include "common/named_barrier.cuh"
#include "common/opaque.cuh"
#include "cute/tensor.hpp"
#include "cutlass/numeric_conversion.h"

namespace minfer::attention {

template <class Traits>
struct PrefillConsumer : PrefillMma<Traits> {
  using Mma = PrefillMma<Traits>;
  using Epilogue = PrefillEpilogue<Traits>;
  using SplitTotals = PrefillSplitTotals<Traits>;
  using SplitStore = PrefillSplitStore<Traits>;
  using Traits::blocks_of, Traits::kConsumers, Traits::kConsumersBarrier, Traits::kConverts, Traits::kHeadDim, Traits::kHeadDimV;
  using Traits::kFolds, Traits::kInvariant, Traits::kSplitBlocks, Traits::kSplits;
  using Traits::kOrderBarrier, Traits::kOutputs, Traits::kPingpong, Traits::kQueryStages, Traits::kScores, Traits::kTileN;
  using Traits::kScalesQueries, Traits::kTileM, Traits::kWarpgroupBarrier;
  using Traits::kv_head_of, Traits::mask_of, Traits::over_packed_heads, Traits::queries_of, Traits::query_phase, Traits::query_stage;
  using Traits::read_tile, Traits::release;
  using typename Mma::KeysLayout, typename Mma::MmaOutput, typename Mma::MmaScores, typename Mma::QueriesLayout, typename Mma::ValuesLayout;
  using typename Traits::EmptyBarrier, typename Traits::FullBarrier, typename Traits::MmaElement, typename Traits::Params;
  using typename Traits::Queries, typename Traits::Ring, typename Traits::SharedStorage, typename Traits::Tile;

  // ---- pingpong -------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void wait_for_turn(int consumer) {
    if constexpr (kPingpong) NamedBarrier<256>{kOrderBarrier + consumer}.sync();
  }
  static CUTLASS_DEVICE void pass_turn(int consumer) {
    if constexpr (kPingpong) NamedBarrier<256>{kOrderBarrier + (consumer + 1) % kConsumers}.arrive();
  }

  // ---- values that no query sees --------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE bool has_unseen_end(Params const& params, Tile const& tile, int block) {
    return !kConverts && !params.keys_end_at_extent && tile.seqlen_k < (block + 1) * kTileN;
  }
  static CUTLASS_DEVICE void clear_end(Tile const& tile, MmaElement* values, int block) {
    clear_values(values, tile.seqlen_k - block * kTileN, kTileN);
  }
  static CUTLASS_DEVICE bool has_unseen_begin(Tile const& tile, int block) { return !kConverts && tile.first_key > block * kTileN; }
  static CUTLASS_DEVICE void clear_begin(Tile const& tile, MmaElement* values, int block) {
    clear_values(values, 0, min(tile.first_key - block * kTileN, kTileN));
  }
  /// Rows `begin` to `end` - 1 of a block of values become zeros; called by all consumer warpgroups.
  static CUTLASS_DEVICE void clear_values(MmaElement* values, int begin, int end) {
    int const thread = reread_thread_index();
    int const vectors = (end - begin) * 8;  // in 64 columns of these rows
#pragma unroll 1
    for (int i = thread - 128; i < vectors * (kHeadDimV / 64); i += kConsumers * 128) {
      int const column = i / vectors, vector = i - column * vectors;
      *reinterpret_cast<uint4*>(values + (column * kTileN + begin) * 64 + vector * 8) = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
    NamedBarrier<kConsumers * 128>{kConsumersBarrier}.sync();
  }

  // ---- queries of bf16 beside keys of f16 -----------------------------------------------------------------------------------------

  /// Converts the warpgroup's rows of the queries.
  static CUTLASS_DEVICE void scale_queries(Params const& params, SharedStorage& storage, Tile const& tile, int stage, int consumer,
                                           int thread) {
    if constexpr (kScalesQueries) {
      float const sign = sign_of_keys(params, kv_head_of(params, tile));
      int const lane = thread % 32;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        int const row = consumer * 64 + thread / 32 * 16 + i * 4 + lane / 8;
        uint32_t const at = cute::cast_smem_ptr_to_uint(&storage.q[stage][row * 64]) + lane % 8 * 16;
        float const scale = scale_query<kHeadDim / 64, 8>(at, kTileM * 128, sign);
        if (lane % 8 == 0) storage.query_scale.of[row] = scale;
      }
      cutlass::arch::fence_view_async_shared();
      NamedBarrier<128>{kWarpgroupBarrier + consumer}.sync();
    }
  }

  // ---- blocks ---------------------------------------------------------------------------------------------------------------------

  /// Passes on the turn and the stages of a block that other warpgroups' rows visit and this one's do not.
  static CUTLASS_DEVICE void skip_block(Params const& params, SharedStorage& storage, Tile const& tile, int block, Ring& keys, Ring& values,
                                        int consumer, int thread) {
    wait_for_turn(consumer);
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

  /// Skips the blocks of a tile that lie before the windows of this warpgroup's rows.
  static CUTLASS_DEVICE void skip_blocks_before_window(Params const& params, SharedStorage& storage, Tile const& tile, Ring& keys,
                                                       Ring& values, int consumer, int thread) {
    Queries const queries = queries_of(params, tile, consumer);
    int32_t const tile_begin = blocks_of(params, tile, queries_of(params, tile)).begin, begin = blocks_of(params, tile, queries).begin;
    for (int block = queries.first <= queries.last ? begin - 1 : tile_begin - 1; block >= tile_begin; --block) {
      skip_block(params, storage, tile, block, keys, values, consumer, thread);
    }
  }

  enum class BlockKind { kFull, kMasked, kCapped };  // kCapped: a full block with a softcap

  /// thread: of the warpgroup.
  /// The phases of a block are lambdas of this one function on purpose: as methods of an object that holds the operands, or with the first
  /// and last block in functions of their own, the compiler orders a fifth of 7024 instructions differently or takes 8 more (sm_90a,
  /// head_dim 128).
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int consumer, int thread) {
    using namespace cute;
    int const lane = thread % 32;
    Ring keys, values;
    MmaScores mma_scores;
    MmaOutput mma_output;
    Tensor sQ = make_tensor(make_smem_ptr(&storage.q[0][consumer * 64 * 64]), QueriesLayout{});  // (64,head_dim,PIPE)
    Tensor sK = make_tensor(make_smem_ptr(&storage.k[0][0]), KeysLayout{});                      // (N,head_dim,PIPE)
    Tensor sV = make_tensor(make_smem_ptr(&storage.v[0][0]), ValuesLayout{});                    // (head_dim_v,N,PIPE)
    Tensor tSrQ = mma_scores.get_slice(thread).partition_fragment_A(sQ);                         // (MMA,MMA_M,MMA_K,PIPE), descriptors
    Tensor tSrK = mma_scores.get_slice(thread).partition_fragment_B(sK);                         // (MMA,MMA_N,MMA_K,PIPE)
    Tensor tOrV = mma_output.get_slice(thread).partition_fragment_B(sV);                         // (MMA,MMA_N,MMA_K,PIPE)

    if constexpr (kPingpong) {
      if (consumer == kConsumers - 1) pass_turn(consumer);
    }
    clear_rows_outside_sequences(params, consumer * 128 + thread, kConsumers * 128);
    for (int iteration = 0;; ++iteration) {
      EmptyBarrier::wait(&storage.full_tile[iteration % 2], iteration / 2 % 2);
      Tile const tile = read_tile(storage, iteration, lane);
      if (tile.is_none()) break;
      KeyBlocks<kTileN> const tile_blocks = blocks_of(params, tile, queries_of(params, tile));
      Queries const queries = queries_of(params, tile, consumer);
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, queries);  // that this warpgroup's rows visit
      int const row = consumer * 64 + thread / 32 * 16 + lane / 4;        // of the tile; the thread's other row is 8 below

      Tensor output = partition_fragment_C(mma_output, typename Mma::OutputShape{});  // (MMA,MMA_M,MMA_N)
      clear(output);
      bool const capped = params.softmax.softcap > 0.0f;
      OnlineSoftmax<kScores, kInvariant, kScalesQueries ? 2 : 1> softmax(
          (capped ? params.softmax.softcap : softmax_scale(params, kv_head_of(params, tile))) * kLog2E);
      FullBarrier::wait(&storage.full_q[query_stage(iteration)], query_phase(iteration));
      int block = tile_blocks.end - 1;
      for (int const end = queries.first <= queries.last ? blocks.end : 0; block >= end && block >= tile_blocks.begin; --block) {
        skip_block(params, storage, tile, block, keys, values, consumer, thread);
      }
      if (block >= tile_blocks.begin) {
        float rescale[2];
        bool min_is_negligible = false;
        if constexpr (kScalesQueries) {
          scale_queries(params, storage, tile, query_stage(iteration), consumer, thread);
          if (!capped) {
            CUTLASS_PRAGMA_UNROLL
            for (int h = 0; h < 2; ++h) softmax.scale_log2[h] *= storage.query_scale.of[row + 8 * h];
          }
        }
        Tensor scores = partition_fragment_C(mma_scores, typename Mma::ScoresShape{});        // (MMA,MMA_M,MMA_N)
        Tensor probabilities = make_tensor<MmaElement>(typename Mma::ProbabilitiesLayout{});  // (MMA,MMA_M,MMA_K)
        Tensor packed = recast<uint32_t>(probabilities);                                      // (MMA / 2,MMA_M,MMA_K)
        mma_output.accumulate_ = GMMA::ScaleOut::One;
        // The blocks that this warpgroup's rows visit. Kept over all splits, they would be spilled.
        auto const visited = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          if constexpr (kFolds) {
            Tile const again = read_tile(storage, iteration, lane);
            return blocks_of(params, again, queries_of(params, again, consumer));
          } else {
            return blocks;
          }
        };
        // Outside of the batch-invariant mode an item is a split.
        auto const is_one_split = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          if constexpr (kFolds) return params.split_count > 0;
          return true;
        };
        auto const is_masked = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          KeyBlocks<kTileN> const blocks = visited();
          return block >= blocks.full_end || block < blocks.full_begin;
        };
        // Issues the MMAs of S = Q.K^T.
        auto const multiply_keys = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          mma_scores.accumulate_ = GMMA::ScaleOut::Zero;
          auto rows = tSrQ;
          if constexpr (kConverts) {  // descriptors are computed here: kept for all k blocks, they would cost registers in every key block
            MmaElement* q = &storage.q[0][consumer * 64 * 64];
            make_opaque(q);
            rows = mma_scores.get_slice(thread).partition_fragment_A(make_tensor(make_smem_ptr(q), QueriesLayout{}));
          }
          CUTLASS_PRAGMA_UNROLL
          for (int k_block = 0; k_block < kHeadDim / 16; ++k_block) {
            cute::gemm(mma_scores, rows(_, _, k_block, query_stage(iteration)), tSrK(_, _, k_block, keys.index), scores);
            mma_scores.accumulate_ = GMMA::ScaleOut::One;
          }
          warpgroup_commit_batch();
        };
        // Issues the MMAs of O += P.V.
        auto const multiply_values = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          CUTLASS_PRAGMA_UNROLL
          for (int k_block = 0; k_block < kTileN / 16; ++k_block) {
            cute::gemm(mma_output, probabilities(_, _, k_block), tOrV(_, _, k_block, values.index), output);
          }
          warpgroup_commit_batch();
        };
        auto const cap_and_mask = [&](bool masked, bool caps) CUTLASS_LAMBDA_FUNC_INLINE {
          if (caps) {
            float inner = params.cap.inner;
            if constexpr (kConverts)
              inner = softmax_scale(params, kv_head_of(params, storage.tile[iteration % 2])) / params.softmax.softcap;
            float of_rows[2] = {inner, inner};
            if constexpr (kScalesQueries) {
              CUTLASS_PRAGMA_UNROLL
              for (int h = 0; h < 2; ++h) of_rows[h] *= storage.query_scale.of[row + 8 * h];
            }
            cap_scores<kScores>(scores, of_rows);
          }
          if (masked) {  // limits are computed here: kept, they would cost registers in every block
            Mask const mask = mask_of(params, storage.tile[iteration % 2]);
            int32_t begin[2], end[2];
            CUTLASS_PRAGMA_UNROLL
            for (int h = 0; h < 2; ++h) {
              int const query = storage.tile[iteration % 2].first + over_packed_heads(params, row + 8 * h);
              begin[h] = mask.begin(query);
              end[h] = mask.end(query);
            }
            apply_mask<kScores>(scores, begin, end, block * kTileN, lane);
          }
        };
        // Rounds probabilities to 16 bits, in the layout of the A operand, which is that of the accumulators.
        auto const round = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kScores; i += 2) {
            cutlass::NumericArrayConverter<MmaElement, float, 2> const convert;
            cutlass::Array<float, 2> pair;
            pair[0] = scores(i);
            pair[1] = scores(i + 1);
            reinterpret_cast<cutlass::Array<MmaElement, 2>&>(probabilities(i)) = convert(pair);
          }
        };
        // The scores and softmax of a block, and the output of the block before it. The compiler moves the wait for the values before the
        // softmax; kept behind it, by a branch between them, most lengths from 512 to 16384 tokens took up to 3 % longer (H200). With a
        // softcap it stays behind: moved before, head_dim 128 took as long and head_dim 256 4 % longer.
        auto const step = [&](auto kind) CUTLASS_LAMBDA_FUNC_INLINE {
          constexpr BlockKind kKind = kind;
          FullBarrier::wait(&storage.full_k[keys.index], keys.phase);
          FullBarrier::wait(&storage.full_v[values.index], values.phase);
          wait_for_turn(consumer);
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
          bool rescales;
          if constexpr (kKind == BlockKind::kCapped) {
            float block_max[2];
            if (softmax.within_polynomial(scores, block_max, params.cap, min_is_negligible)) {
              rescales = softmax.step_polynomial(scores, rescale, block_max, params.cap, min_is_negligible);
            } else {
              rescales = softmax.step_tanh(scores, rescale, block_max, params.cap);
            }
          } else {
            cap_and_mask(kKind == BlockKind::kMasked, capped && (kConverts || kInvariant || kKind == BlockKind::kMasked));
            rescales = softmax.step(scores, rescale);
          }
          warpgroup_wait<0>();
          warpgroup_fence_operand(output);
          release(&storage.empty_v[values.index], thread);
          values.advance();
          round();
          if (rescales) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kOutputs; ++i) output(i) *= rescale[i / 2 % 2];
          }
        };

        // The first block: its scores and its softmax.
        auto const begin_with_scores = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          FullBarrier::wait(&storage.full_k[keys.index], keys.phase);
          wait_for_turn(consumer);
          warpgroup_fence_operand(scores);
          warpgroup_arrive();
          multiply_keys();
          pass_turn(consumer);
          warpgroup_wait<0>();
          warpgroup_fence_operand(scores);
          release(&storage.empty_k[keys.index], thread);
          keys.advance();
          cap_and_mask(is_masked(), capped);
          softmax.step(scores, rescale);
          round();
          Tile const& unspilled = kFolds ? storage.tile[iteration % 2] : tile;
          if (has_unseen_end(params, unspilled, block)) {
            FullBarrier::wait(&storage.full_v[values.index], values.phase);
            clear_end(unspilled, storage.v[values.index], block);
          }
        };
        // The output of the last block, which begins at `begin`.
        auto const end_with_output = [&](int32_t begin, bool is_last) CUTLASS_LAMBDA_FUNC_INLINE {
          if (is_last) release(&storage.empty_q[query_stage(iteration)], thread);
          FullBarrier::wait(&storage.full_v[values.index], values.phase);
          if (has_unseen_begin(storage.tile[iteration % 2], begin)) {
            clear_begin(storage.tile[iteration % 2], storage.v[values.index], begin);
          }
          warpgroup_fence_operand(output);
          warpgroup_fence_operand(packed);
          warpgroup_arrive();
          multiply_values();
          warpgroup_wait<0>();
          warpgroup_fence_operand(output);
          release(&storage.empty_v[values.index], thread);
          values.advance();
          if constexpr (kFolds) {
            bool const is_first = is_one_split() || begin / kSplitBlocks == (visited().end - 1) / kSplitBlocks;
            SplitTotals::fold(params, storage, softmax, output, consumer, thread, is_first, is_last);
          }
        };
        // Both: a step whose block begins a split, from its last key on. The output that it completes is folded, and the softmax begins
        // anew.
        auto const step_into_split = [&]() CUTLASS_LAMBDA_FUNC_INLINE {
          FullBarrier::wait(&storage.full_k[keys.index], keys.phase);
          FullBarrier::wait(&storage.full_v[values.index], values.phase);
          wait_for_turn(consumer);
          warpgroup_fence_operand(scores);
          warpgroup_fence_operand(output);
          warpgroup_fence_operand(packed);
          warpgroup_arrive();
          multiply_keys();
          multiply_values();
          pass_turn(consumer);
          warpgroup_wait<0>();
          warpgroup_fence_operand(scores);
          warpgroup_fence_operand(output);
          release(&storage.empty_k[keys.index], thread);
          release(&storage.empty_v[values.index], thread);
          keys.advance();
          values.advance();
          if constexpr (kFolds) {
            bool const is_first = (block + 1) / kSplitBlocks == (visited().end - 1) / kSplitBlocks;
            SplitTotals::fold(params, storage, softmax, output, consumer, thread, is_first, false);
          }
          cap_and_mask(is_masked(), capped);
          softmax.step(scores, rescale);
          round();
        };

        // Where there are registers for scores beside an output that is folded, tensor cores have the same products in the same turns with
        // splits and without; else each split begins and ends as a tile does.
        constexpr bool kStepsIntoSplits = kFolds && kHeadDimV <= 128;
        if constexpr (!kFolds || kStepsIntoSplits) begin_with_scores();
        for (;;) {  // over the splits of batch-invariant kernels, from the last one on; others have one
          KeyBlocks<kTileN> const blocks = visited();
          int32_t const begin = kFolds && !is_one_split() ? max(blocks.begin, block / kSplitBlocks * kSplitBlocks) : blocks.begin;
          if constexpr (kFolds && !kStepsIntoSplits) begin_with_scores();
          // The other blocks: masked ones at the end of the keys, full ones, masked ones at the windows' begin.
          int const last_full = blocks.full_end - 1;
          for (--block; block > last_full && block >= begin; --block) step(constant<BlockKind, BlockKind::kMasked>{});
          int const first_full = blocks.full_begin > begin ? blocks.full_begin : begin;
          // The polynomial's constants depend on the scale of K, which of codes the device alone knows.
          if (capped && !kConverts && !kInvariant) {
            for (; block >= first_full; --block) step(constant<BlockKind, BlockKind::kCapped>{});
          }
          for (; block >= first_full; --block) step(constant<BlockKind, BlockKind::kFull>{});
          for (; block >= begin; --block) step(constant<BlockKind, BlockKind::kMasked>{});
          bool const is_last = !kFolds || begin == visited().begin;
          if constexpr (kStepsIntoSplits) {
            if (!is_last) {
              step_into_split();
              continue;
            }
          }
          end_with_output(begin, is_last);
          if (is_last) break;
        }
      } else {
        release(&storage.empty_q[query_stage(iteration)], thread);
      }
      // The tile is read again: kept over the mainloop, its numbers would be spilled.
      Tile const done = read_tile(storage, iteration, lane);
      release(&storage.empty_tile[iteration % 2], thread);
      if (params.window_left >= 0) skip_blocks_before_window(params, storage, done, keys, values, consumer, thread);
      if constexpr (kSplits) {
        if (done.split >= 0) {
          if constexpr (!kFolds) softmax.reduce_sums();
          SplitStore::store(params, done, softmax, output, consumer, thread);
          continue;
        }
      }
      Epilogue::store(params, storage, done, softmax, output, consumer, thread);
    }
    if (thread == 0) tma_store_wait<0>();  // shared memory must outlive the reads of the last stores
  }
};

}  // namespace minfer::attention
