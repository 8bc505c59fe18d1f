// The mainloop of a consumer warpgroup of prefill: its 64 rows of a tile against the tile's key blocks, the last block first.
//
// Step i computes the scores of block i and, in the same batch of MMAs, the output of block i + 1, whose probabilities are in registers. The
// softmax of block i then runs while the tensor cores work for the other warpgroups. With pingpong, the order barrier lets the warpgroups issue
// their MMAs in turns. consumer.cuh walks the blocks: the first one has no earlier output to add, the last one no further scores to compute.
// Values of keys that no query of the sequence sees are set to zero in shared memory before they are multiplied: their probabilities are zero, but
// 0 * NaN is NaN. This concerns keys behind the last one, and in a tile's first block keys before all windows. All consumer warpgroups clear a
// block together, once, when it has arrived. The converter of codes writes zeros itself.
// Registers are the limit of this loop. What is needed in few blocks only is computed there, from shared memory or the parameters: kept over the
// loop it would be spilled.
#pragma once

#include "attention/prefill/convert.cuh"
#include "attention/prefill/mma.cuh"
#include "attention/shared/softmax.cuh"
#include "common/named_barrier.cuh"
#include "common/opaque.cuh"
#include "cutlass/numeric_conversion.h"

namespace minfer::attention {

template <class Traits>
struct PrefillMainloop : PrefillMma<Traits> {
  using Mma = PrefillMma<Traits>;
  using Traits::blocks_of, Traits::kConsumers, Traits::kConsumersBarrier, Traits::kConverts, Traits::kHeadDim, Traits::kHeadDimV;
  using Traits::kOrderBarrier, Traits::kOutputs, Traits::kPingpong, Traits::kScores, Traits::kTileN, Traits::kv_head_of;
  using Traits::mask_of, Traits::over_packed_heads, Traits::query_stage, Traits::queries_of, Traits::release;
  using typename Mma::MmaOutput, typename Mma::MmaScores, typename Mma::Output, typename Mma::Probabilities, typename Mma::Scores;
  using typename Traits::Element, typename Traits::FullBarrier, typename Traits::Params, typename Traits::Queries;
  using typename Traits::Ring, typename Traits::SharedStorage;
  using Softmax = OnlineSoftmax<kScores>;
  using QueryFragments = decltype(MmaScores{}.get_slice(0).partition_fragment_A(Mma::shared_queries(nullptr)));
  using KeyFragments = decltype(MmaScores{}.get_slice(0).partition_fragment_B(Mma::shared_keys(nullptr)));
  using ValueFragments = decltype(MmaOutput{}.get_slice(0).partition_fragment_B(Mma::shared_values(nullptr)));

  Params const& params;
  SharedStorage& storage;
  int const consumer, thread, lane;  // thread: of the warpgroup
  Ring keys, values;
  MmaScores mma_scores;
  MmaOutput mma_output;
  QueryFragments tSrQ;  // (MMA,MMA_M,MMA_K,PIPE), descriptors, as the next two
  KeyFragments tSrK;    // (MMA,MMA_N,MMA_K,PIPE)
  ValueFragments tOrV;  // (MMA,MMA_N,MMA_K,PIPE)

  CUTLASS_DEVICE PrefillMainloop(Params const& params, SharedStorage& storage, int consumer, int thread)
      : params(params),
        storage(storage),
        consumer(consumer),
        thread(thread),
        lane(thread % 32),
        tSrQ(mma_scores.get_slice(thread).partition_fragment_A(Mma::shared_queries(Mma::first_query(storage, consumer)))),
        tSrK(mma_scores.get_slice(thread).partition_fragment_B(Mma::shared_keys(&storage.k[0][0]))),
        tOrV(mma_output.get_slice(thread).partition_fragment_B(Mma::shared_values(&storage.v[0][0]))) {}

  /// The state of a tile while its blocks are computed.
  struct Tile {
    int const& iteration;  // the tile's number among the CTA's
    bool const& capped;    // there is a softcap
    int const& row;        // of the tile; the thread's other row is 8 below
    int const& block;      // the block that is computed
    Softmax& softmax;
    Output& output;  // (MMA,MMA_M,MMA_N)
    float rescale[2];
    bool min_is_negligible;       // OnlineSoftmax::within_polynomial
    Scores scores;                // (MMA,MMA_M,MMA_N)
    Probabilities probabilities;  // (MMA,MMA_M,MMA_K)

    CUTLASS_DEVICE Tile(int const& iteration, bool const& capped, int const& row, int const& block, Softmax& softmax, Output& output)
        : iteration(iteration),
          capped(capped),
          row(row),
          block(block),
          softmax(softmax),
          output(output),
          min_is_negligible(false),
          scores(cute::partition_fragment_C(MmaScores{}, typename Mma::ScoresShape{})),
          probabilities(cute::make_tensor<Element>(typename Mma::ProbabilitiesLayout{})) {}
  };
  enum class BlockKind { kFull, kMasked, kCapped };  // kCapped: a full block with a softcap

  /// What scores are multiplied by before the softmax.
  static CUTLASS_DEVICE float scale_of(Params const& params, QueryTile const& tile) {
    if constexpr (kConverts) {
      return params.scale * scale_of_scores(params, kv_head_of(params, tile));
    } else {
      return params.scale;
    }
  }

  // ---- pingpong -------------------------------------------------------------------------------------------------------------------

  CUTLASS_DEVICE void begin_turns() const {
    if constexpr (kPingpong) {
      if (consumer == kConsumers - 1) pass_turn();
    }
  }
  CUTLASS_DEVICE void wait_for_turn() const {
    if constexpr (kPingpong) NamedBarrier<256>{kOrderBarrier + consumer}.sync();
  }
  CUTLASS_DEVICE void pass_turn() const {
    if constexpr (kPingpong) NamedBarrier<256>{kOrderBarrier + (consumer + 1) % kConsumers}.arrive();
  }

  // ---- values that no query sees --------------------------------------------------------------------------------------------------

  CUTLASS_DEVICE bool has_unseen_end(QueryTile const& tile, int block) const {
    return !kConverts && !params.keys_end_at_extent && tile.seqlen_k < (block + 1) * kTileN;
  }
  CUTLASS_DEVICE void clear_end(QueryTile const& tile, int block) const {
    clear_values(storage.v[values.index], tile.seqlen_k - block * kTileN, kTileN);
  }
  CUTLASS_DEVICE bool has_unseen_begin(QueryTile const& tile, int block) const { return !kConverts && tile.first_key > block * kTileN; }
  CUTLASS_DEVICE void clear_begin(QueryTile const& tile, int block) const {
    clear_values(storage.v[values.index], 0, min(tile.first_key - block * kTileN, kTileN));
  }
  /// Rows `begin` to `end` - 1 of a block of values become zeros; called by all consumer warpgroups.
  static CUTLASS_DEVICE void clear_values(Element* values, int begin, int end) {
    int const thread = reread_thread_index();
    int const vectors = (end - begin) * 8;  // of 64 columns of these rows
#pragma unroll 1
    for (int i = thread - 128; i < vectors * (kHeadDimV / 64); i += kConsumers * 128) {
      int const column = i / vectors, vector = i - column * vectors;
      *reinterpret_cast<uint4*>(values + (column * kTileN + begin) * 64 + vector * 8) = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
    NamedBarrier<kConsumers * 128>{kConsumersBarrier}.sync();
  }

  // ---- blocks ---------------------------------------------------------------------------------------------------------------------

  /// Passes on the turn and the stages of a block that other warpgroups' rows visit and this one's do not.
  CUTLASS_DEVICE void skip_block(QueryTile const& tile, int block) {
    wait_for_turn();
    pass_turn();
    FullBarrier::wait(&storage.full_k[keys.index], keys.phase);
    release(&storage.empty_k[keys.index], thread);
    FullBarrier::wait(&storage.full_v[values.index], values.phase);
    if (has_unseen_end(tile, block)) clear_end(tile, block);
    if (has_unseen_begin(tile, block)) clear_begin(tile, block);
    release(&storage.empty_v[values.index], thread);
    keys.advance();
    values.advance();
  }

  /// The scores and softmax of a block, and the output of the block before it. The compiler moves the wait for the values before the softmax; kept
  /// behind it, by a branch between them, most lengths from 512 to 16384 tokens took up to 3 % longer (H200). With a softcap it stays behind:
  /// moved before, head_dim 128 took as long and head_dim 256 4 % longer.
  template <BlockKind kKind>
  CUTLASS_DEVICE void step(Tile& tile) {
    auto packed = cute::recast<uint32_t>(tile.probabilities);  // (MMA / 2,MMA_M,MMA_K)
    FullBarrier::wait(&storage.full_k[keys.index], keys.phase);
    FullBarrier::wait(&storage.full_v[values.index], values.phase);
    wait_for_turn();
    cute::warpgroup_fence_operand(tile.scores);
    cute::warpgroup_fence_operand(tile.output);
    cute::warpgroup_fence_operand(packed);
    cute::warpgroup_arrive();
    multiply_keys(tile);
    multiply_values(tile);
    pass_turn();
    cute::warpgroup_wait<1>();
    cute::warpgroup_fence_operand(tile.scores);
    release(&storage.empty_k[keys.index], thread);
    keys.advance();
    bool const rescales = online_softmax_step<kKind>(tile);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(tile.output);
    release(&storage.empty_v[values.index], thread);
    values.advance();
    round_scores(tile);
    if (rescales) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOutputs; ++i) tile.output(i) *= tile.rescale[i / 2 % 2];
    }
  }

  // ---- phases of a block ----------------------------------------------------------------------------------------------------------

  /// Issues the MMAs of S = Q.K^T.
  CUTLASS_DEVICE void multiply_keys(Tile& tile) {
    mma_scores.accumulate_ = cute::GMMA::ScaleOut::Zero;
    auto rows = tSrQ;
    if constexpr (kConverts) {  // descriptors are computed here: kept for all k blocks, they would cost registers in every key block
      Element* q = Mma::first_query(storage, consumer);
      make_opaque(q);
      rows = mma_scores.get_slice(thread).partition_fragment_A(Mma::shared_queries(q));
    }
    CUTLASS_PRAGMA_UNROLL
    for (int k_block = 0; k_block < kHeadDim / 16; ++k_block) {
      cute::gemm(mma_scores, rows(cute::_, cute::_, k_block, query_stage(tile.iteration)), tSrK(cute::_, cute::_, k_block, keys.index),
                 tile.scores);
      mma_scores.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  }

  /// Issues the MMAs of O += P.V.
  CUTLASS_DEVICE void multiply_values(Tile& tile) {
    CUTLASS_PRAGMA_UNROLL
    for (int k_block = 0; k_block < kTileN / 16; ++k_block) {
      cute::gemm(mma_output, tile.probabilities(cute::_, cute::_, k_block), tOrV(cute::_, cute::_, k_block, values.index), tile.output);
    }
    cute::warpgroup_commit_batch();
  }

  CUTLASS_DEVICE void cap_and_mask(Tile& tile, bool masked, bool caps) {
    if (caps) {
      float inner = params.cap.inner;
      if constexpr (kConverts) inner = scale_of(params, storage.tile[tile.iteration % 2]) / params.softcap;
      cap_scores<kScores>(tile.scores, inner);
    }
    if (masked) {  // limits are computed here: kept, they would cost registers in every block
      Mask const mask = mask_of(params, storage.tile[tile.iteration % 2]);
      int32_t begin[2], end[2];
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        int const query = storage.tile[tile.iteration % 2].first + over_packed_heads(params, tile.row + 8 * h);
        begin[h] = mask.begin(query);
        end[h] = mask.end(query);
      }
      apply_mask<kScores>(tile.scores, begin, end, tile.block * kTileN, lane);
    }
  }

  /// Turns a block's scores into probabilities. Returns whether the output is to be multiplied by tile.rescale.
  template <BlockKind kKind>
  CUTLASS_DEVICE bool online_softmax_step(Tile& tile) {
    if constexpr (kKind == BlockKind::kCapped) {
      float block_max[2];
      if (tile.softmax.within_polynomial(tile.scores, block_max, params.cap, tile.min_is_negligible)) {
        return tile.softmax.step_polynomial(tile.scores, tile.rescale, block_max, params.cap, tile.min_is_negligible);
      } else {
        return tile.softmax.step_tanh(tile.scores, tile.rescale, block_max, params.cap);
      }
    } else {
      cap_and_mask(tile, kKind == BlockKind::kMasked, tile.capped && (kConverts || kKind == BlockKind::kMasked));
      return tile.softmax.step(tile.scores, tile.rescale);
    }
  }

  /// Rounds probabilities to 16 bits, in the layout of the A operand, which is that of the accumulators.
  CUTLASS_DEVICE void round_scores(Tile& tile) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kScores; i += 2) {
      cutlass::NumericArrayConverter<Element, float, 2> const convert;
      cutlass::Array<float, 2> pair;
      pair[0] = tile.scores(i);
      pair[1] = tile.scores(i + 1);
      reinterpret_cast<cutlass::Array<Element, 2>&>(tile.probabilities(i)) = convert(pair);
    }
  }
};

}  // namespace minfer::attention
