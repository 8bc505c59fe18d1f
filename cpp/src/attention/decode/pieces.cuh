// How a decode launch shares out the keys. A unit is a sequence, a KV head and up to 8 * columns of its rows; its keys are cut into slices.
// CTAs stand in rows of `lockstep`, neighbours for neighbouring heads: a row of the cache, which holds all heads of a token, is read at one
// time. All slices of a head's units lie end to end, and each row of CTAs has a range of them, as many as the others: a piece is the part of a
// unit in a range. With a number of splits given, every unit is cut into so many pieces by its own length alone, whatever else is in the
// batch, and CTAs take whole pieces.
//
// A unit in several pieces is merged by the CTA that has its last slices: the other pieces are left in slots of the workspace.
//
// Progress. A CTA goes through its range from the end, and waits in a piece that merges alone.
//   As many pieces as fill the CTAs: a unit that lies across ranges is the end of all of them but its last, whose beginning it is. What
//   others wait for is thus what a CTA does first, and left without waiting; the piece for which it waits itself is its last.
//   A number of splits: units lie across ranges likewise, several pieces to a range. The last of a unit's ranges leaves its own pieces
//   in slots, too, but for the first one, which it takes last and merges with; lower ranges take theirs before all else.
// So a CTA waits for lower ranges alone, those of the same head of blocks with lower numbers, and for what they do before any wait. Blocks are
// started in order and keep their SM: a launch ends however few of its CTAs are resident together (see gemm/tile_scheduler.h).
#pragma once

#include <cstdint>

#include "attention/decode/params.h"
#include "attention/shared/mask.h"
#include "attention/shared/sequence_table.cuh"

namespace minfer::attention {

struct DecodePiece {
  int32_t batch, kv_head;  // batch < 0: there is no more
  int32_t row, rows;       // first of the sequence's rows, and how many
  int32_t seqlen_q, seqlen_k;
  int32_t row_q;                   // where the sequence's queries begin in q, with cu_seqlens_q
  int32_t slice_begin, slice_end;  // of the sequence
  int32_t parts;      // that are merged after this piece by its CTA: itself, which is number `own`, and slots `slot` + i * lockstep
  int32_t slot, own;  // parts == 0: the piece itself is left in `slot`
};

/// What a warp has read from shared memory; the compiler then knows that all lanes have the same.
__device__ __forceinline__ DecodePiece same_in_warp(DecodePiece const& piece) {
  static_assert(sizeof(DecodePiece) % 4 == 0);
  DecodePiece same;
#pragma unroll
  for (int i = 0; i < int(sizeof(DecodePiece) / 4); ++i) {
    reinterpret_cast<int32_t*>(&same)[i] = __shfl_sync(0xffffffffu, reinterpret_cast<int32_t const*>(&piece)[i], 0);
  }
  return same;
}

/// kSlice: tokens of a slice. kResidual: tokens behind the last whole group are stored apart, and make slices of 16.
/// Made and asked by whole warps. Up to 32 sequences, each lane knows one; more are in a table in shared memory, which the CTA builds first.
template <int kSlice, bool kResidual>
class DecodePieces {
 public:
  static __device__ int in_codes(DecodeParams const& p, int keys) { return kResidual ? keys & -p.group_tokens : keys; }
  /// Slices of codes end here, those of the residual follow.
  static __device__ int codes_end(DecodeParams const& p, int keys) { return (in_codes(p, keys) + kSlice - 1) / kSlice; }

  /// Slices of codes in a piece, which are loaded.
  static __device__ int codes_of(DecodeParams const& p, DecodePiece const& piece) {
    int const end = codes_end(p, piece.seqlen_k), last = piece.slice_end < end ? piece.slice_end : end;
    return last > piece.slice_begin ? last - piece.slice_begin : 0;
  }

  /// By all `threads` of the CTA; nothing to do with few sequences.
  static __device__ void build(SequenceTable::Storage& storage, DecodeParams const& p, int thread, int threads) {
    if (p.batch > 32) SequenceTable::build(storage, p.batch, items_of(p), p.max_items, thread, threads);
  }

  /// guess: what the lengths are before the launch's predecessor has finished, which may still write them; see confirm().
  __device__ DecodePieces(DecodeParams const& p, SequenceTable::Storage const& storage, bool guess = false) : p(p), storage(storage) {
    int const lane = int(threadIdx.x) % 32;
    rows = {0, 0};
    keys = 0;
    if (p.batch <= 32 && lane < p.batch) {
      rows = p.queries(lane);
      if (guess) {
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(keys) : "l"(p.seq_lens + lane) : "memory");
        keys = p.in_cache(keys);
      } else {
        keys = p.keys_in_cache(lane);
      }
    }
    lay_out();
  }
  /// Where pieces can be guessed: by lengths that each lane knows.
  static __device__ bool can_guess(DecodeParams const& p) { return p.batch <= 32 && p.cu_seqlens_q == nullptr; }
  /// After the predecessor: whether the guess was right; if not, pieces begin anew. By the whole warp.
  __device__ bool confirm() {
    int const lane = int(threadIdx.x) % 32, now = lane < p.batch ? p.keys_in_cache(lane) : 0;
    if (__all_sync(0xffffffffu, now == keys)) return true;
    keys = now;
    lay_out();
    return false;
  }

  __device__ DecodePiece take() {
    DecodePiece piece;
    piece.batch = -1;
    if (next <= begin) return piece;
    int32_t const last = next - 1;
    int32_t own;
    if (p.batch <= 32) {  // the last sequence that has items and begins at `last` or before
      int const lane = int(threadIdx.x) % 32;
      piece.batch = 31 - __clz(__ballot_sync(0xffffffffu, lane < p.batch && items > 0 && first <= last));
      own = last - __shfl_sync(0xffffffffu, first, piece.batch);
      piece.row_q = __shfl_sync(0xffffffffu, rows.first, piece.batch);
      piece.seqlen_q = __shfl_sync(0xffffffffu, rows.count, piece.batch);
      piece.seqlen_k = __shfl_sync(0xffffffffu, keys, piece.batch);
    } else {
      piece.batch = SequenceTable::find(storage, p.batch, items_of(p), last, &own);
      RowRange const rows = p.queries(piece.batch);
      piece.row_q = rows.first;
      piece.seqlen_q = rows.count;
      piece.seqlen_k = p.keys_in_cache(piece.batch);
    }
    int const first_slice = slices_begin(p, piece.seqlen_q, piece.seqlen_k), slices = slices_of(p, piece.seqlen_q, piece.seqlen_k);
    int const of_unit = p.num_splits > 0 ? p.num_splits : slices, unit = divide(own, of_unit), item = own - unit * of_unit;
    int const all_rows = piece.seqlen_q * p.group, tiles = tiles_of(p, all_rows);
    int const heads = tiles == 1 ? unit : unit / tiles, lockstep = p.by_lockstep.divisor;
    piece.kv_head = heads * lockstep + head;
    piece.row = (unit - heads * tiles) * 8 * p.columns;
    piece.rows = all_rows - piece.row < 8 * p.columns ? all_rows - piece.row : 8 * p.columns;
    int32_t const unit_begin = last - item, unit_end = unit_begin + of_unit;
    if (p.num_splits > 0) {
      piece.slice_begin = first_slice + int(int64_t(slices) * item / of_unit);
      piece.slice_end = first_slice + int(int64_t(slices) * (item + 1) / of_unit);
      bool const owner = unit_end <= int64_t(range + 1) * per_range, last_here = last == begin || item == 0;
      piece.parts = owner && last_here ? of_unit : 0;
      piece.slot = (piece.parts > 0 ? unit_begin : last) * lockstep + head;
      piece.own = item;
      next = last;
    } else {
      int32_t const start = unit_begin > begin ? unit_begin : begin;
      piece.slice_begin = first_slice + (start - unit_begin);
      piece.slice_end = first_slice + item + 1;
      int const first_range = start == unit_begin ? range : divide(unit_begin, per_range);
      piece.parts = next == unit_end ? range - first_range + 1 : 0;
      piece.slot = (piece.parts > 0 ? first_range : range) * lockstep + head;
      piece.own = piece.parts - 1;
      next = start;
    }
    return piece;
  }

 private:
  __device__ void lay_out() {
    int32_t total;
    if (p.batch <= 32) {
      int const lane = int(threadIdx.x) % 32;
      items = lane < p.batch ? items_with(p, rows.count, keys) : 0;
      int32_t end = min(items, p.max_items);
      for (int s = 1; s < p.batch; s *= 2) {
        int32_t const before = __shfl_up_sync(0xffffffffu, end, s);
        if (lane >= s) end = SequenceTable::add(end, before, p.max_items);
      }
      total = __shfl_sync(0xffffffffu, end, p.batch > 0 ? p.batch - 1 : 0);
      first = __shfl_up_sync(0xffffffffu, end, 1);
      if (lane == 0) first = 0;
    } else {
      total = SequenceTable::total(storage, p.batch);
    }
    per_range = p.by_ranges.div(total + p.by_ranges.divisor - 1);
    if (p.num_splits == 0 && per_range < p.min_slices) per_range = p.min_slices;
    p.by_lockstep(range, head, int(blockIdx.x));
    int64_t const first_item = int64_t(range) * per_range;
    begin = first_item < total ? int32_t(first_item) : total;
    next = first_item + per_range < total ? int32_t(first_item + per_range) : total;
  }
  /// a / b by way of floats: an integer division is a chain of many more instructions; a >= 0, b > 0, the quotient below 2^20.
  static __device__ int divide(int a, int b) {
    int quotient = int(__fdividef(float(a), float(b)));
    int const rest = a - quotient * b;
    if (rest < 0) return quotient - 1;
    return rest >= b ? quotient + 1 : quotient;
  }
  static __device__ int tiles_of(DecodeParams const& p, int rows) { return (rows + 8 * p.columns - 1) >> (p.columns == 1 ? 3 : 4); }
  /// The first slice that holds a key of codes that a query sees; where none does, that of the residual.
  static __device__ int slices_begin(DecodeParams const& p, int queries, int keys) {
    int const begin = Mask(queries, keys, p.window_left, p.window_right).begin(0);
    return begin < in_codes(p, keys) ? begin / kSlice : codes_end(p, keys);
  }
  /// A unit without a key is visited too: its output is zeros.
  static __device__ int slices_of(DecodeParams const& p, int queries, int keys) {
    int const slices_end = codes_end(p, keys) + (kResidual ? (keys - in_codes(p, keys) + 15) / 16 : 0);
    int const slices = slices_end - slices_begin(p, queries, keys);
    return slices > 1 ? slices : 1;
  }
  /// What rows of CTAs share out: slices, or pieces where their number is given. The product saturates: lengths may be anything that the
  /// table has room for, and that may be more than the cache holds.
  static __device__ int items_with(DecodeParams const& p, int queries, int keys) {
    int const units = p.by_lockstep.div(p.heads_kv) * tiles_of(p, queries * p.group);
    return int(min(int64_t(units) * (p.num_splits > 0 ? p.num_splits : slices_of(p, queries, keys)), int64_t(p.max_items)));
  }
  static __device__ auto items_of(DecodeParams const& p) {
    return [&p](int b) { return items_with(p, p.queries(b).count, p.keys_in_cache(b)); };
  }

  DecodeParams const& p;
  SequenceTable::Storage const& storage;
  int32_t per_range;           // items
  int32_t range, head;         // that the CTA has; of `lockstep` heads
  int32_t begin, next;         // its first item, and the end of those that are left
  RowRange rows;               // of q: sequence number lane's
  int32_t keys, items, first;  // likewise
};

}  // namespace minfer::attention
