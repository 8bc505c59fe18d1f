// Where the boxes of a decode work item lie in the cache. A box is box_rows consecutive tokens, all in one page. A warp holds the locations
// of a batch of 32 boxes, one in each lane, and those of the next batch, which are read ahead. Boxes whose keys are all masked are loaded
// from the nearest box that is seen, since their own pages may have been freed.
#pragma once

#include "attention/decode/params.h"
#include "attention/decode/tile_scheduler.cuh"
#include "cutlass/cutlass.h"

namespace minfer::attention {

template <class TileScheduler>
struct DecodeBoxes {
  int sequence, first, last, batch;    // boxes first .. last are seen; batch: number of the batch that is held
  int page, row, next_page, next_row;  // of this lane's box in the batch and in the next one

  DecodeBoxes() = default;
  CUTLASS_DEVICE DecodeBoxes(DecodeParams const& params, DecodeWorkItem const& work, int block, int lane) : sequence(work.batch) {
    Mask const mask(work.seqlen_q, work.seqlen_k, params.window_left, params.window_right);
    int const shift = 31 - __clz(params.box_rows);
    first = mask.begin(0) >> shift;
    last = (TileScheduler::keys_in_codes(params, work.seqlen_k) - 1) >> shift;
    batch = block * params.boxes_of_block / 32;
    find_all(params, lane);
  }
  CUTLASS_DEVICE void find_all(DecodeParams const& params, int lane) {
    find(params, batch, lane, page, row);
    find(params, batch + 1, lane, next_page, next_row);
  }
  CUTLASS_DEVICE void find(DecodeParams const& params, int of_batch, int lane, int& page, int& row) const {
    PageTable::Location const location = params.find_speculatively(sequence, min(max(32 * of_batch + lane, first), last) * params.box_rows);
    page = location.page;
    row = location.row;
  }
  /// Moves on to the batch of a box that is at most 32 boxes behind the last one asked for.
  CUTLASS_DEVICE void advance_to(DecodeParams const& params, int box, int lane) {
    if (box >> 5 == batch) return;
    ++batch;
    page = next_page;
    row = next_row;
    find(params, batch + 1, lane, next_page, next_row);
  }

  /// The page and row of a box of the batch; called by the whole warp.
  CUTLASS_DEVICE int page_of(int box) const { return __shfl_sync(0xffffffffu, page, box & 31); }
  CUTLASS_DEVICE int row_of(int box) const { return __shfl_sync(0xffffffffu, row, box & 31); }
};

}  // namespace minfer::attention
