// A consumer warpgroup of a prefill kernel: it takes the tiles that the producer publishes, computes its 64 rows of each (mainloop.cuh) and
// stores them (epilogue.cuh).
#pragma once

#include "attention/prefill/epilogue.cuh"
#include "attention/prefill/mainloop.cuh"
#include "attention/prefill/traits.cuh"
#include "attention/shared/clear_rows.cuh"

namespace minfer::attention {

template <class Traits>
struct PrefillConsumer : Traits {
  using Mainloop = PrefillMainloop<Traits>;
  using Epilogue = PrefillEpilogue<Traits>;
  using BlockKind = typename Mainloop::BlockKind;
  using Traits::blocks_of, Traits::kConsumers, Traits::kConverts, Traits::kTileN, Traits::queries_of, Traits::query_phase,
      Traits::query_stage;
  using Traits::read_tile, Traits::release;
  using typename Traits::EmptyBarrier, typename Traits::FullBarrier, typename Traits::Params, typename Traits::Queries;
  using typename Traits::SharedStorage;

  /// thread: of the warpgroup.
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int consumer, int thread) {
    int const lane = thread % 32;
    Mainloop mainloop(params, storage, consumer, thread);
    mainloop.begin_turns();
    clear_rows_outside_sequences(params, consumer * 128 + thread, kConsumers * 128);
    for (int iteration = 0;; ++iteration) {
      EmptyBarrier::wait(&storage.full_tile[iteration % 2], iteration / 2 % 2);
      QueryTile const tile = read_tile(storage, iteration, lane);
      if (tile.is_none()) break;
      KeyBlocks<kTileN> const tile_blocks = blocks_of(params, tile, queries_of(params, tile));
      Queries const queries = queries_of(params, tile, consumer);
      KeyBlocks<kTileN> const blocks = blocks_of(params, tile, queries);  // of this warpgroup's rows
      int const row = consumer * 64 + thread / 32 * 16 + lane / 4;        // of the tile; the thread's other row is 8 below

      typename Mainloop::Output output = cute::partition_fragment_C(mainloop.mma_output, typename Mainloop::OutputShape{});
      cute::clear(output);  // (MMA,MMA_M,MMA_N)
      bool const capped = params.softcap > 0.0f;
      typename Mainloop::Softmax softmax((capped ? params.softcap : Mainloop::scale_of(params, tile)) * kLog2E);
      FullBarrier::wait(&storage.full_q[query_stage(iteration)], query_phase(iteration));
      int block = tile_blocks.end - 1;
      for (int const own_end = queries.first <= queries.last ? blocks.end : 0; block >= own_end && block >= tile_blocks.begin; --block) {
        mainloop.skip_block(tile, block);
      }
      if (block >= tile_blocks.begin) {
        typename Mainloop::Tile state(iteration, capped, row, block, softmax, output);
        auto packed = cute::recast<uint32_t>(state.probabilities);  // (MMA / 2,MMA_M,MMA_K)
        mainloop.mma_output.accumulate_ = cute::GMMA::ScaleOut::One;
        // The first block: its scores and its softmax.
        FullBarrier::wait(&storage.full_k[mainloop.keys.index], mainloop.keys.phase);
        mainloop.wait_for_turn();
        cute::warpgroup_fence_operand(state.scores);
        cute::warpgroup_arrive();
        mainloop.multiply_keys(state);
        mainloop.pass_turn();
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(state.scores);
        release(&storage.empty_k[mainloop.keys.index], thread);
        mainloop.keys.advance();
        mainloop.cap_and_mask(state, block >= blocks.full_end || block < blocks.full_begin, capped);
        softmax.step(state.scores, state.rescale);
        mainloop.round_scores(state);
        if (mainloop.has_unseen_end(tile, block)) {
          FullBarrier::wait(&storage.full_v[mainloop.values.index], mainloop.values.phase);
          mainloop.clear_end(tile, block);
        }
        // The blocks between: the scores of one, and the output of the one before.
        int const last_full = blocks.full_end - 1;
        for (--block; block > last_full && block >= blocks.begin; --block) mainloop.template step<BlockKind::kMasked>(state);
        int const first_full = blocks.full_begin > blocks.begin ? blocks.full_begin : blocks.begin;
        if (capped && !kConverts) {  // with codes the polynomial's constants depend on K's scale, which the device alone knows
          for (; block >= first_full; --block) mainloop.template step<BlockKind::kCapped>(state);
        }
        for (; block >= first_full; --block) mainloop.template step<BlockKind::kFull>(state);
        for (; block >= blocks.begin; --block) mainloop.template step<BlockKind::kMasked>(state);
        // The last block: its output.
        release(&storage.empty_q[query_stage(iteration)], thread);
        FullBarrier::wait(&storage.full_v[mainloop.values.index], mainloop.values.phase);
        if (mainloop.has_unseen_begin(storage.tile[iteration % 2], blocks.begin)) {
          mainloop.clear_begin(storage.tile[iteration % 2], blocks.begin);
        }
        cute::warpgroup_fence_operand(output);
        cute::warpgroup_fence_operand(packed);
        cute::warpgroup_arrive();
        mainloop.multiply_values(state);
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(output);
        release(&storage.empty_v[mainloop.values.index], thread);
        mainloop.values.advance();
      } else {
        release(&storage.empty_q[query_stage(iteration)], thread);
      }
      // The tile is read again: kept over the mainloop, its numbers would be spilled.
      QueryTile const done = read_tile(storage, iteration, lane);
      release(&storage.empty_tile[iteration % 2], thread);
      if (params.window_left >= 0) {  // blocks of the tile before the windows of this warpgroup's rows
        Queries const rows = queries_of(params, done, consumer);
        int32_t const first = blocks_of(params, done, queries_of(params, done)).begin, own_first = blocks_of(params, done, rows).begin;
        for (int before = rows.first <= rows.last ? own_first - 1 : first - 1; before >= first; --before) mainloop.skip_block(done, before);
      }
      Epilogue::store(params, storage, done, softmax, output, consumer, thread);
    }
    if (thread == 0) cute::tma_store_wait<0>();  // shared memory must outlive the reads of the last stores
  }
};

}  // namespace minfer::attention
