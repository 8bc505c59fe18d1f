// The consumer warpgroup of a batch-invariant kernel for few rows (few_rows_sm90.cuh): it computes all scores of an item, the softmax of
// all its blocks at once, and then the output. Numbers are those of PrefillConsumer with OnlineSoftmax, in the same order; a comment says
// where that order is kept.
#pragma once

#include "attention/prefill/convert.cuh"
#include "attention/prefill/few_rows_traits.cuh"
#include "attention/prefill/scale_queries.cuh"
#include "attention/prefill/split_merge.cuh"
#include "attention/shared/clear_rows.cuh"
#include "attention/shared/softmax.cuh"
#include "common/float16.cuh"
#include "common/named_barrier.cuh"
#include "cute/tensor.hpp"

namespace minfer::attention {

template <class Traits>
struct FewRowsConsumer : Traits {
  using Traits::blocks_of, Traits::for_splits, Traits::kConverts, Traits::kHeadDim, Traits::kScorePitch, Traits::kScoreTiles;
  using Traits::kMmaType, Traits::kScalesQueries;
  using Traits::kSplitBlocks, Traits::kTileM, Traits::kTileN, Traits::kType, Traits::kv_head_of, Traits::mask_of;
  using Traits::over_packed_heads, Traits::queries_of, Traits::query_phase, Traits::query_stage, Traits::read_tile, Traits::release;
  using typename Traits::Element, typename Traits::EmptyBarrier, typename Traits::FullBarrier, typename Traits::MmaElement,
      typename Traits::Params, typename Traits::Ring, typename Traits::SharedStorage, typename Traits::Tile, typename Traits::TileScheduler;
  using Items = typename TileScheduler::Items;
  static constexpr int kGroups = kTileN / 8;  // of 8 keys of a block

  static CUTLASS_DEVICE void synchronize() { NamedBarrier<128>{1}.sync(); }

  // ---- queries of bf16 beside keys of f16 -----------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void scale_queries(Params const& params, SharedStorage& storage, Tile const& tile, int stage, int thread) {
    if constexpr (kScalesQueries) {
      static_assert(kTileM == 8 && kHeadDim == 128);
      int const row = thread / 16, vector = thread % 16;
      uint32_t const at = cute::cast_smem_ptr_to_uint(&storage.q[stage][(vector / 8 * kTileM + row) * 64]) + vector % 8 * 16;
      float const scale = scale_query<1, 16>(at, 0, sign_of_keys(params, kv_head_of(params, tile)));
      if (vector == 0) storage.query_scale[row] = scale;
      cutlass::arch::fence_view_async_shared();
      synchronize();
    }
  }

  // ---- scores ---------------------------------------------------------------------------------------------------------------------

  /// Computes the scores of the blocks from the last one to the first and leaves them in shared memory, as [row][key of the split].
  static CUTLASS_DEVICE void compute_scores(SharedStorage& storage, KeyBlocks<kTileN> const& blocks, int first_block, int stage, Ring& ring,
                                            int thread) {
    using namespace cute;
    typename Traits::MmaScores mma;
    auto const slice = mma.get_slice(thread);
    Tensor tSrQ = slice.partition_fragment_B(make_tensor(make_smem_ptr(storage.q[0]), typename Traits::QueriesLayout{}));
    using Scores = decltype(partition_fragment_C(mma, Shape<_64, Int<kTileM>>{}));  // (MMA,1,1)
    int const warp = thread / 32, lane = thread % 32;
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      Scores scores[kScoreTiles];
      FullBarrier::wait(&storage.full[ring.index], ring.phase);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kScoreTiles; ++i) warpgroup_fence_operand(scores[i]);
      warpgroup_arrive();
      mma.accumulate_ = GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int k_block = 0; k_block < kHeadDim / 16; ++k_block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kScoreTiles; ++i) {
          Tensor keys = make_tensor(make_smem_ptr(&storage.ring[0][first_of(i) * 64]), typename Traits::KeysLayout{});
          Tensor tSrK = slice.partition_fragment_A(keys);
          cute::gemm(mma, tSrK(_, _, k_block, ring.index), tSrQ(_, _, k_block, stage), scores[i]);
        }
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kScoreTiles; ++i) warpgroup_fence_operand(scores[i]);
      release(&storage.empty[ring.index], thread);
      ring.advance();
      float* const to = storage.scores + (block - first_block) * kTileN + lane / 4;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kScoreTiles; ++i) {
        int const key = first_of(i) + 16 * warp;
        if (key < 64 * i) continue;  // the MMA before has it, too
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 4; ++v) to[(2 * (lane % 4) + v % 2) * kScorePitch + key + v / 2 * 8] = scores[i](v);
      }
    }
  }
  /// The first key of MMA number i of a block.
  static CUTLASS_DEVICE constexpr int first_of(int i) { return 64 * i + 64 <= kTileN ? 64 * i : kTileN - 64; }

  // ---- softmax --------------------------------------------------------------------------------------------------------------------

  /// Replaces scores by probabilities, rounded to 16 bits in the layout of the B operand. Thread (half, row, column) has the keys of every
  /// second block that are `column` modulo 8: those are what OnlineSoftmax adds up in one chain.
  static CUTLASS_DEVICE void compute_probabilities(Params const& params, SharedStorage& storage, Tile const& tile,
                                                   KeyBlocks<kTileN> const& blocks, int first_block, int thread) {
    int const column = thread % 8, row = thread / 8 % 8, half = thread / 64, count = blocks.end - blocks.begin;
    bool const capped = params.softmax.softcap > 0.0f;
    float const scale = softmax_scale(params, kv_head_of(params, tile)), of_row = kScalesQueries ? storage.query_scale[row] : 1.0f;
    float const scale_log2 = (capped ? params.softmax.softcap : scale) * kLog2E * (capped ? 1.0f : of_row);
    Mask const mask = mask_of(params, tile);
    int const query = tile.first + over_packed_heads(params, row), begin = mask.begin(query), end = mask.end(query);
    float scores[kSplitBlocks / 2][kGroups];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSplitBlocks / 2; ++i) {
      int const number = 2 * i + half, block = blocks.end - 1 - number;  // in the order of the softmax
      if (number >= count) break;
      float const* const from = storage.scores + row * kScorePitch + (block - first_block) * kTileN + column;
      float max = -INFINITY;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kGroups; ++j) {
        float score = from[8 * j];
        if (capped) {
          float inner = params.cap.inner;
          if constexpr (kConverts) inner = scale / params.softmax.softcap * of_row;
          score = tanh_fast(score * inner);
        }
        int const key = block * kTileN + 8 * j + column;
        if (key < begin || key >= end) score = -INFINITY;
        max = fmaxf(max, score);
        scores[i][j] = score;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int x = 1; x < 8; x *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, x));
      if (column == 0) storage.block_max[row][number] = __fmul_rn(max, scale_log2);
    }
    synchronize();
    // The running maximum, as OnlineSoftmax::raise_max() has it.
    float row_max = -INFINITY, offset[kSplitBlocks];
    CUTLASS_PRAGMA_UNROLL
    for (int number = 0; number < kSplitBlocks; ++number) {
      float rescale = 1.0f;
      if (number < count) {
        float const block_max = storage.block_max[row][number];
        if (block_max > row_max + kRaiseThreshold) {
          rescale = exp2_fast(row_max - block_max);
          row_max = block_max;
        }
      }
      offset[number] = row_max == -INFINITY ? 0.0f : row_max;
      if (column == 0 && half == 0) storage.rescale[row][number] = rescale;
    }
    if (column == 0 && half == 0) storage.row_max[row] = row_max;
    char* const probabilities = reinterpret_cast<char*>(storage.probabilities) + row * 128 + column * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSplitBlocks / 2; ++i) {
      int const number = 2 * i + half, local = (blocks.end - 1 - number - first_block) * kGroups;
      if (number >= count) break;
      float sum = 0.0f;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kGroups; ++j) {
        float const p = exp2_fast(fmaf(scores[i][j], scale_log2, half == 0 ? -offset[2 * i] : -offset[2 * i + 1]));
        sum += p;
        int const group = local + j;  // of 8 keys of the split
        *reinterpret_cast<uint16_t*>(probabilities + group / 8 * (kTileM * 128) + (group % 8 ^ row) * 16) =
            uint16_t(Float16<kMmaType>::pack(p, 0.0f));
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);  // even and odd columns of a thread of OnlineSoftmax
      if (column % 2 == 0) storage.block_sum[row][number][column / 2] = sum;
    }
    cutlass::arch::fence_view_async_shared();
    synchronize();
  }

  // ---- output ---------------------------------------------------------------------------------------------------------------------

  /// Values of keys that no query of the sequence sees become zeros: their probabilities are zero, but 0 * NaN is NaN.
  static CUTLASS_DEVICE void clear_unseen(Params const& params, Tile const& tile, MmaElement* values, int block, int thread) {
    if constexpr (kConverts) return;  // the converter writes zeros itself
    int const begin = min(max(tile.first_key - block * kTileN, 0), kTileN);
    int const end = params.keys_end_at_extent ? kTileN : min(tile.seqlen_k - block * kTileN, kTileN);
    if (begin == 0 && end == kTileN) return;
    constexpr int kVectors = kTileN * (kHeadDim / 64) * 8;  // of 16 bytes
#pragma unroll 1
    for (int i = thread; i < kVectors; i += 128) {
      int const key = i / 8 % kTileN;
      if (key < begin || key >= end) *reinterpret_cast<uint4*>(values + i * 8) = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
    synchronize();
  }

  /// O^T += V^T.P^T, block after block; output is what a thread has of it.
  template <class Output>
  static CUTLASS_DEVICE void compute_output(Params const& params, SharedStorage& storage, Tile const& tile, KeyBlocks<kTileN> const& blocks,
                                            int first_block, Ring& ring, Output& output, int thread) {
    using namespace cute;
    typename Traits::MmaOutput mma;
    auto const slice = mma.get_slice(thread);
    Tensor tOrV = slice.partition_fragment_A(make_tensor(make_smem_ptr(storage.ring[0]), typename Traits::ValuesLayout{}));
    Tensor tOrP = slice.partition_fragment_B(make_tensor(make_smem_ptr(storage.probabilities), typename Traits::ProbabilitiesLayout{}));
    mma.accumulate_ = GMMA::ScaleOut::One;
    int const row = 2 * (thread % 4);
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      int const number = blocks.end - 1 - block;
      FullBarrier::wait(&storage.full[ring.index], ring.phase);
      clear_unseen(params, tile, storage.ring[ring.index], block, thread);
      if (number > 0) {
        float const rescale[2] = {storage.rescale[row][number], storage.rescale[row + 1][number]};
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(output); ++i) output(i) *= rescale[i % 2];
      }
      warpgroup_fence_operand(output);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k_block = 0; k_block < kTileN / 16; ++k_block) {
        cute::gemm(mma, tOrV(_, _, k_block, ring.index), tOrP(_, _, (block - first_block) * (kTileN / 16) + k_block, 0), output);
      }
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(output);
      release(&storage.empty[ring.index], thread);
      ring.advance();
    }
  }

  /// The maximum and the sum of each row, for all threads. Lane 4 * row + i adds up what lane i of the row's four has in OnlineSoftmax.
  static CUTLASS_DEVICE void find_states(SharedStorage& storage, int count, int thread) {
    if (thread < 32) {
      int const row = thread / 4;
      float sum = 0.0f;
      for (int number = 0; number < count; ++number) {
        sum = fmaf(sum, storage.rescale[row][number], storage.block_sum[row][number][thread % 4]);
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (thread % 4 == 0) storage.states[row] = {storage.row_max[row], sum};
    }
    synchronize();
  }

  // ---- results --------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE bool is_query(Params const& params, Tile const& tile, int row) {
    return tile.first + over_packed_heads(params, row) < tile.seqlen_q;
  }
  /// Where value i of a thread's output is: its row is 2 * (thread % 4) + i % 2.
  static CUTLASS_DEVICE int column_of(int i, int thread) { return i / 4 * 64 + thread / 32 * 16 + i / 2 % 2 * 8 + thread % 32 / 4; }

  /// Leaves the partial of a split that is an item in its slot of the workspace; total: of the thread's two rows.
  template <class Output>
  static CUTLASS_DEVICE void store_partial(Params const& params, Tile const& tile, SplitState const (&total)[2], Output const& output,
                                           int thread) {
    int64_t const slot = Items::slot_of(params, params.cu_seqlens_q != nullptr, tile.batch, tile.row_q, tile.head_tile, tile.first,
                                        tile.split, tile.first_key / Items::kSplitKeys);
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < 2; ++e) {
      int const row = 2 * (thread % 4) + e;
      if (!is_query(params, tile, row) || row >= params.slot_rows) continue;
      if (thread < 4) *state_in_slot(params, slot, row) = total[e];
      float* const to = output_in_slot(params, slot, row, kHeadDim);
      CUTLASS_PRAGMA_UNROLL
      for (int i = e; i < int(cute::size(output)); i += 2) to[column_of(i, thread)] = output(i);
    }
  }

  /// Stores the output and lse of a tile whose splits are folded.
  template <class Output>
  static CUTLASS_DEVICE void store(Params const& params, Tile const& tile, SplitState const (&total)[2], Output const& output, int thread) {
    int64_t const of_batch = params.cu_seqlens_q != nullptr ? 0 : tile.batch;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < 2; ++e) {
      int const row = 2 * (thread % 4) + e, head = tile.head_tile * params.packed_heads + (row & (params.packed_heads - 1));
      if (!is_query(params, tile, row)) continue;
      int64_t const at = int64_t(tile.row_q) + tile.first + over_packed_heads(params, row);
      float lse, factor = finish_row<Element, true>(params.softmax, head, true, total[e].max, total[e].sum, &lse);
      if constexpr (kConverts) factor = __fmul_rn(factor, scale_of_output(params, kv_head_of(params, tile)));
      if (params.lse != nullptr && thread < 4) params.lse[of_batch * params.lse_batch + head * params.lse_head + at] = lse;
      auto* const to = static_cast<uint16_t*>(params.out) + of_batch * params.out_batch + at * params.out_row + head * params.out_head;
      CUTLASS_PRAGMA_UNROLL
      for (int i = e; i < int(cute::size(output)); i += 2) {
        int const column = column_of(i, thread);
        if (column < params.head_dim_v) to[column] = uint16_t(Float16<kType>::pack(finish_output(output(i), factor), 0.0f));
      }
    }
  }

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int thread) {
    using namespace cute;
    Ring ring;
    clear_rows_outside_sequences(params, thread, 128);
    for (int iteration = 0;; ++iteration) {
      EmptyBarrier::wait(&storage.full_tile[iteration % 2], iteration / 2 % 2);
      Tile const tile = read_tile(storage, iteration, thread % 32);
      release(&storage.empty_tile[iteration % 2], thread);
      if (tile.is_none()) break;
      int const stage = query_stage(iteration);
      FullBarrier::wait(&storage.full_q[stage], query_phase(iteration));
      using Output = decltype(partition_fragment_C(typename Traits::MmaOutput{}, Shape<Int<kHeadDim>, Int<kTileM>>{}));  // (MMA,MMA_M,1)
      Output all;
      clear(all);
      SplitState total[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};  // of the thread's two rows
      KeyBlocks<kTileN> const tile_blocks = blocks_of(params, tile, queries_of(params, tile));
      for_splits(tile_blocks, [&](int split, KeyBlocks<kTileN> const& blocks) CUTLASS_LAMBDA_FUNC_INLINE {
        int const first_block = split * kSplitBlocks;
        if (split == (tile_blocks.end - 1) / kSplitBlocks) scale_queries(params, storage, tile, stage, thread);
        compute_scores(storage, blocks, first_block, stage, ring, thread);
        if (split == tile_blocks.begin / kSplitBlocks) release(&storage.empty_q[stage], thread);
        synchronize();
        compute_probabilities(params, storage, tile, blocks, first_block, thread);
        Output output;
        clear(output);
        compute_output(params, storage, tile, blocks, first_block, ring, output, thread);
        find_states(storage, blocks.end - blocks.begin, thread);
        SplitWeights weights[2];
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) weights[e] = fold_state(total[e], storage.states[2 * (thread % 4) + e]);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < size(output); ++i) all(i) = fold_output(all(i), output(i), weights[i % 2]);
      });
      if (tile_blocks.begin >= tile_blocks.end) release(&storage.empty_q[stage], thread);
      if (tile.split >= 0) {
        store_partial(params, tile, total, all, thread);
      } else {
        store(params, tile, total, all, thread);
      }
    }
  }
};

}  // namespace minfer::attention
