// Where the boxes of a decode piece lie in the cache: box_rows tokens each, which lie in one page. A warp knows 32 of them, a lane each, and
// the 32 after them. Boxes whose keys nobody sees stand for their neighbours: their pages may be gone.
#pragma once

#include "attention/decode/params.h"
#include "attention/decode/pieces.cuh"
#include "cutlass/cutlass.h"

namespace minfer::attention {

template <class Pieces>
struct DecodeBoxes {
  int batch, first, last, window;
  int page, row, next_page, next_row;  // of this lane's box

  DecodeBoxes() = default;
  CUTLASS_DEVICE DecodeBoxes(DecodeParams const& params, DecodePiece const& piece, int slice, int lane) : batch(piece.batch) {
    Mask const mask(piece.seqlen_q, piece.seqlen_k, params.window_left, params.window_right);
    int const shift = 31 - __clz(params.box_rows);
    first = mask.begin(0) >> shift;
    last = (Pieces::in_codes(params, piece.seqlen_k) - 1) >> shift;
    window = slice * params.boxes_of_slice / 32;
    find_all(params, lane);
  }
  CUTLASS_DEVICE void find_all(DecodeParams const& params, int lane) {
    find(params, window, lane, page, row);
    find(params, window + 1, lane, next_page, next_row);
  }
  CUTLASS_DEVICE void find(DecodeParams const& params, int of_window, int lane, int& page, int& row) const {
    PageTable::Place const place = params.guess(batch, min(max(32 * of_window + lane, first), last) * params.box_rows);
    page = place.page;
    row = place.row;
  }
  /// To the window of a box that is no more than 32 behind the last one.
  CUTLASS_DEVICE void advance_to(DecodeParams const& params, int box, int lane) {
    if (box >> 5 == window) return;
    ++window;
    page = next_page;
    row = next_row;
    find(params, window + 1, lane, next_page, next_row);
  }

  /// Of a box of the window, by the whole warp.
  CUTLASS_DEVICE int page_of(int box) const { return __shfl_sync(0xffffffffu, page, box & 31); }
  CUTLASS_DEVICE int row_of(int box) const { return __shfl_sync(0xffffffffu, row, box & 31); }
};

}  // namespace minfer::attention
