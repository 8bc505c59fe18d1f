// Decode's tile scheduler: how a launch distributes the keys of all output tiles over its CTAs (split-KV).
//
// An output tile is a sequence, a KV head and up to 8 * row_tiles of its packed query rows. Its keys are divided into key blocks. CTAs
// stand in rows of `lockstep` neighbours, which compute neighbouring KV heads over the same keys: a token's row in the cache, which holds
// all heads, is then read at one time. The output tiles of a head are laid end to end, and every row of CTAs has a worker range of the same
// size in them.
// What is counted are steps: a step is a key block of an output tile, or, where the number of splits is given, a split. Then every output
// tile is divided into that many splits by its own length alone, whatever else is in the batch, and worker ranges consist of whole splits.
// A work item is the part of an output tile that lies in a worker range (one split of it, where splits are given). The owner of an output
// tile that was divided is the CTA that has its last key blocks: the others leave partials in slots of the workspace, and the owner merges
// them.
// Where there are more CTAs than output tiles, a worker range that begins in the middle of one and ends in the next takes longer for the
// second work item than for a few more key blocks. There an output tile's steps are rounded up to a multiple of the range, if ranges that
// are little longer have room for that: each CTA then has a part of one output tile. One that gives no more than a key block to each warp
// is not divided at all.
//
// Progress. A CTA walks its worker range from the end to the beginning, and waits only in work items that merge.
//   As many splits as fill the CTAs: an output tile that lies across ranges is at the end of each of these ranges but its last one, of
//   which it is the beginning. So a CTA computes first what others wait for, and leaves it without waiting; the item in which it waits
//   itself is its last.
//   A given number of splits: output tiles lie across ranges likewise, with several splits in a range. The owner leaves its own splits in
//   slots, too, except for the first one, which it takes last and merges with; lower ranges take their splits of that tile before all else.
// So a CTA waits only for CTAs of lower ranges of the same head, which have lower block numbers, and only for what these do before any wait
// of their own. Blocks are started in order of their numbers and keep their SM: a launch ends however few of its CTAs are resident together
// (gemm/tile_scheduler.h).
#pragma once

#include <cstdint>

#include "attention/decode/params.h"
#include "attention/shared/mask.h"
#include "attention/shared/sequence_table.cuh"

namespace minfer::attention {

struct DecodeWorkItem {
  int32_t batch, kv_head;  // batch < 0: none is left
  int32_t row, rows;       // the output tile's first row in the sequence, and its number of rows
  int32_t seqlen_q, seqlen_k;
  int32_t row_q;                   // where the sequence's queries begin in q, with cu_seqlens_q
  int32_t block_begin, block_end;  // key blocks of the sequence
  // partials > 0: the CTA is the owner and merges this many partials after the item: this one, number own_partial, and those in the slots
  // partial_slot + i * lockstep. partials == 0: this partial is left in partial_slot.
  int32_t partials;
  int32_t partial_slot, own_partial;
};

/// A work item that a warp reads from shared memory. The shuffles let the compiler know that all lanes hold the same values.
__device__ __forceinline__ DecodeWorkItem same_in_warp(DecodeWorkItem const& work) {
  static_assert(sizeof(DecodeWorkItem) % 4 == 0);
  DecodeWorkItem same;
#pragma unroll
  for (int i = 0; i < int(sizeof(DecodeWorkItem) / 4); ++i) {
    reinterpret_cast<int32_t*>(&same)[i] = __shfl_sync(0xffffffffu, reinterpret_cast<int32_t const*>(&work)[i], 0);
  }
  return same;
}

/// kTileN: keys of a block. kWarps: that compute a CTA's blocks. kResidual: keys of no complete token group are stored apart, in the
/// residual, and make blocks of 16 keys there.
/// Constructed and called by whole warps. With up to 32 sequences each lane holds one; more are in a table in shared memory, which the CTA
/// builds first.
template <int kTileN, int kWarps, bool kResidual>
class DecodeTileScheduler {
 public:
  static __device__ int keys_in_codes(DecodeParams const& p, int keys) { return kResidual ? keys & -p.group_tokens : keys; }
  /// The end of the key blocks of codes; those of the residual follow.
  static __device__ int codes_end(DecodeParams const& p, int keys) { return (keys_in_codes(p, keys) + kTileN - 1) / kTileN; }

  /// The number of key blocks of codes in a work item: those that are loaded through the ring.
  static __device__ int code_blocks(DecodeParams const& p, DecodeWorkItem const& work) {
    int const end = codes_end(p, work.seqlen_k), last = work.block_end < end ? work.block_end : end;
    return last > work.block_begin ? last - work.block_begin : 0;
  }

  /// Called by all `threads` of the CTA; does nothing for few sequences.
  static __device__ void build(SequenceTable::Storage& storage, DecodeParams const& p, int thread, int threads) {
    if (p.batch > 32) SequenceTable::build(storage, p.batch, steps_of(p), p.max_steps, thread, threads);
  }

  /// speculate: read the lengths before the preceding kernel of the stream has finished, which may still write them; validate() checks
  /// them.
  __device__ DecodeTileScheduler(DecodeParams const& p, SequenceTable::Storage const& storage, bool speculate = false)
      : p(p), storage(storage) {
    int const lane = int(threadIdx.x) % 32;
    rows = {0, 0};
    keys = 0;
    if (p.batch <= 32 && lane < p.batch) {
      rows = p.queries(lane);
      if (speculate) {
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(keys) : "l"(p.seq_lens + lane) : "memory");
        keys = p.clamp_to_cache(keys);
      } else {
        keys = p.keys_in_cache(lane);
      }
    }
    lay_out();
  }
  /// Whether the lengths may be read speculatively: each lane can hold its sequence's, to compare it later.
  static __device__ bool can_speculate(DecodeParams const& p) { return p.batch <= 32 && p.cu_seqlens_q == nullptr; }
  /// Called by the whole warp when the preceding kernel has finished: whether the lengths were right. If not, the walk begins anew.
  __device__ bool validate() {
    int const lane = int(threadIdx.x) % 32, now = lane < p.batch ? p.keys_in_cache(lane) : 0;
    if (__all_sync(0xffffffffu, now == keys)) return true;
    keys = now;
    lay_out();
    return false;
  }

  __device__ DecodeWorkItem take() {
    DecodeWorkItem work;
    work.batch = -1;
    if (next <= begin) return work;
    int32_t const last = next - 1;
    int32_t in_sequence;  // the number of step `last` among those of its sequence
    if (p.batch <= 32) {  // its sequence is the last one that has steps and begins at `last` or before
      int const lane = int(threadIdx.x) % 32;
      work.batch = 31 - __clz(__ballot_sync(0xffffffffu, lane < p.batch && steps > 0 && first <= last));
      in_sequence = last - __shfl_sync(0xffffffffu, first, work.batch);
      work.row_q = __shfl_sync(0xffffffffu, rows.first, work.batch);
      work.seqlen_q = __shfl_sync(0xffffffffu, rows.count, work.batch);
      work.seqlen_k = __shfl_sync(0xffffffffu, keys, work.batch);
    } else {
      work.batch = SequenceTable::find(storage, p.batch, steps_of(p), last, &in_sequence);
      RowRange const rows = p.queries(work.batch);
      work.row_q = rows.first;
      work.seqlen_q = rows.count;
      work.seqlen_k = p.keys_in_cache(work.batch);
    }
    int const first_block = first_block_of(p, work.seqlen_q, work.seqlen_k), blocks = blocks_of(p, work.seqlen_q, work.seqlen_k);
    int const tile_steps = p.num_splits > 0 ? p.num_splits : padded(blocks);
    int const tile = divide(in_sequence, tile_steps), step = in_sequence - tile * tile_steps;  // output tile of the sequence, its step
    int const all_rows = work.seqlen_q * p.heads_per_kv, row_tiles = row_tiles_of(p, all_rows);
    int const heads = row_tiles == 1 ? tile : tile / row_tiles, lockstep = p.by_lockstep.divisor;
    work.kv_head = heads * lockstep + head;
    work.row = (tile - heads * row_tiles) * 8 * p.row_tiles;
    work.rows = all_rows - work.row < 8 * p.row_tiles ? all_rows - work.row : 8 * p.row_tiles;
    int32_t const tile_begin = last - step, tile_end = tile_begin + tile_steps;
    if (p.num_splits > 0) {
      work.block_begin = first_block + int(int64_t(blocks) * step / tile_steps);
      work.block_end = first_block + int(int64_t(blocks) * (step + 1) / tile_steps);
      bool const owner = tile_end <= int64_t(range + 1) * per_range, last_here = last == begin || step == 0;
      work.partials = owner && last_here ? tile_steps : 0;
      work.partial_slot = (work.partials > 0 ? tile_begin : last) * lockstep + head;
      work.own_partial = step;
      next = last;
    } else {
      int32_t const start = tile_begin > begin ? tile_begin : begin;
      work.block_begin = first_block + (start - tile_begin);
      work.block_end = first_block + min(step + 1, blocks);
      int const first_range = start == tile_begin ? range : divide(tile_begin, per_range);
      work.partials = next == tile_end ? range - first_range + 1 : 0;
      work.partial_slot = (work.partials > 0 ? first_range : range) * lockstep + head;
      work.own_partial = work.partials - 1;
      next = start;
    }
    return work;
  }

 private:
  /// Lays the steps of all sequences end to end and finds the CTA's worker range.
  __device__ void lay_out() {
    unit = 0;
    int32_t total = count_steps();
    per_range = p.by_ranges.div(total + p.by_ranges.divisor - 1);
    if (p.num_splits == 0) {
      if (p.batch <= 32) unit = whole_range();
      if (unit > 0) {
        total = count_steps();
        per_range = unit;
      } else {
        per_range = max(per_range, p.min_key_blocks);
      }
    }
    p.by_lockstep(range, head, int(blockIdx.x));
    int64_t const first_step = int64_t(range) * per_range;
    begin = first_step < total ? int32_t(first_step) : total;
    next = first_step + per_range < total ? int32_t(first_step + per_range) : total;
  }
  /// Numbers the steps of each sequence and returns how many there are.
  __device__ int32_t count_steps() {
    if (p.batch > 32) return SequenceTable::total(storage, p.batch);
    int const lane = int(threadIdx.x) % 32;
    steps = lane < p.batch ? steps_with(p, rows.count, keys, unit) : 0;
    int32_t end = min(steps, p.max_steps);
    for (int s = 1; s < p.batch; s *= 2) {
      int32_t const before = __shfl_up_sync(0xffffffffu, end, s);
      if (lane >= s) end = SequenceTable::add(end, before, p.max_steps);
    }
    first = __shfl_up_sync(0xffffffffu, end, 1);
    if (lane == 0) first = 0;
    return __shfl_sync(0xffffffffu, end, p.batch > 0 ? p.batch - 1 : 0);
  }
  /// The key blocks of worker ranges that no two output tiles share, or 0 where such ranges would be much longer. Up to 32 sequences.
  __device__ int32_t whole_range() const {
    bool const mine = int(threadIdx.x) % 32 < p.batch;
    int32_t const ranges = p.by_ranges.divisor, tiles = mine ? tiles_of(p, rows.count) : 0;
    if (int32_t(__reduce_add_sync(0xffffffffu, uint32_t(tiles))) > ranges || per_range >= 1 << 16) return 0;
    int32_t const blocks = mine ? blocks_of(p, rows.count, keys) : 1, longest = __reduce_max_sync(0xffffffffu, blocks);
    int32_t size = longest <= kWarps ? longest : max(per_range, p.min_key_blocks);
    int32_t const limit = max(size, per_range + kWarps);
    while (size <= limit) {
      int32_t const needed = int32_t(__reduce_add_sync(0xffffffffu, uint32_t(tiles * divide(blocks + size - 1, size))));
      // Short ranges leave a quarter of the CTAs idle, which takes less time than a launch that fills the device.
      int32_t const most = size < 2 * kWarps && size < longest ? ranges - ranges / 4 : ranges;
      if (needed <= most) return size;
      int32_t const next = max(size + 1, divide(size * needed, most));
      size = size < longest ? min(next, longest) : next;
    }
    return 0;
  }
  /// The steps of an output tile with so many key blocks.
  __device__ int padded(int blocks) const { return unit > 1 ? divide(blocks + unit - 1, unit) * unit : blocks; }
  /// a / b through floats, since an integer division is a chain of many more instructions; a >= 0, b > 0, and the quotient is below 2^20.
  static __device__ int divide(int a, int b) {
    int quotient = int(__fdividef(float(a), float(b)));
    int const rest = a - quotient * b;
    if (rest < 0) return quotient - 1;
    return rest >= b ? quotient + 1 : quotient;
  }
  /// Output tiles of a sequence and head.
  static __device__ int row_tiles_of(DecodeParams const& p, int rows) { return (rows + 8 * p.row_tiles - 1) >> (p.row_tiles == 1 ? 3 : 4); }
  /// The first key block that holds a key of codes that a query sees; where there is none, the residual's first.
  static __device__ int first_block_of(DecodeParams const& p, int queries, int keys) {
    int const begin = Mask(queries, keys, p.window_left, p.window_right).begin(0);
    return begin < keys_in_codes(p, keys) ? begin / kTileN : codes_end(p, keys);
  }
  /// The number of key blocks; at least one, since an output tile without a key is visited too: its output is zeros.
  static __device__ int blocks_of(DecodeParams const& p, int queries, int keys) {
    int const blocks_end = codes_end(p, keys) + (kResidual ? (keys - keys_in_codes(p, keys) + 15) / 16 : 0);
    int const blocks = blocks_end - first_block_of(p, queries, keys);
    return blocks > 1 ? blocks : 1;
  }
  /// The steps of a sequence with this many queries and keys. The product saturates: the lengths may be anything that the block table has
  /// room for, which may be more than the cache holds.
  static __device__ int steps_with(DecodeParams const& p, int queries, int keys, int unit = 0) {
    int tile_steps = p.num_splits;
    if (p.num_splits == 0) tile_steps = blocks_of(p, queries, keys);
    if (unit > 1) tile_steps = divide(tile_steps + unit - 1, unit) * unit;
    return int(min(int64_t(tiles_of(p, queries)) * tile_steps, int64_t(p.max_steps)));
  }
  /// Output tiles of a sequence with this many queries, of the heads of a row of CTAs.
  static __device__ int tiles_of(DecodeParams const& p, int queries) {
    return p.by_lockstep.div(p.heads_kv) * row_tiles_of(p, queries * p.heads_per_kv);
  }
  static __device__ auto steps_of(DecodeParams const& p) {
    return [&p](int b) { return steps_with(p, p.queries(b).count, p.keys_in_cache(b)); };
  }

  DecodeParams const& p;
  SequenceTable::Storage const& storage;
  int32_t per_range;           // steps of a worker range
  int32_t unit;                // > 0: an output tile's steps are a multiple of it, of which those behind its key blocks are empty
  int32_t range, head;         // the CTA's worker range, and its head among the `lockstep` ones of its row
  int32_t begin, next;         // the first step of the range, and the end of those that are left
  RowRange rows;               // rows in q of sequence number `lane`
  int32_t keys, steps, first;  // its keys, its number of steps, and its first step
};

}  // namespace minfer::attention
