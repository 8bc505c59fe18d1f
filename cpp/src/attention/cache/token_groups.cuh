// Which tokens of a call belong to which token group of an int4 cache, and which groups the call completes.
//
// Slots are consecutive inside a token group, and no other sequence has slots in it. So a token's slot and the slots of its sequence's
// first and last stored token in the call tell everything: whether its group is complete after the call, and which tokens are the group's
// other rows.
#pragma once

#include "attention/cache/norm_rope.cuh"
#include "attention/cache/vector.cuh"

namespace minfer::attention {

/// A token group that a call completes, of one head.
struct GroupTask {
  int32_t token;          // the group's last token in the call; -1: no task
  int32_t begin;          // the sequence's first token
  int32_t last;           // the sequence's last stored token, which is row last_row of its own group
  int32_t last_row;       // -1: this task writes no residual rows
  int32_t residual_rows;  // rows < residual_rows of the last token's group are written to the residual by this task
  int64_t page, row;      // where the group's first token is stored
  int64_t sequence;
};

/// How many of cu_seqlens' batch + 1 ascending values are <= token; called by a warp, which compares 32 of them in each step.
__device__ __forceinline__ int64_t starts_up_to(AppendParams const& params, int64_t token, int lane) {
  int64_t low = 0, high = params.batch + 1;  // the answer is one of low .. high
  while (low < high) {
    int64_t const step = (high - low + kWarp - 1) / kWarp, i = low + lane * step;
    int const count = __popc(__ballot_sync(kAllLanes, i < high && params.seqlen_at(i) <= token));
    if (count == 0) break;
    high = min(high, low + count * step);
    low += (count - 1) * step + 1;
  }
  return low;
}

/// The stored token nearest to `from` among [from, bound), or kDown among [bound, from], and its slot; called by a warp. The caller knows
/// that there is one.
template <bool kDown>
__device__ __forceinline__ int64_t find_stored(AppendParams const& params, int64_t from, int64_t bound, int lane, int64_t* slot) {
  constexpr int kDirection = kDown ? -1 : 1;
  for (int64_t first = from; kDown ? first >= bound : first < bound; first += kDirection * kWarp) {
    int64_t const token = first + kDirection * lane;
    int64_t const lane_slot = (kDown ? token >= bound : token < bound) ? params.slot(token) : -1;
    unsigned const found = __ballot_sync(kAllLanes, params.stored(lane_slot));
    if (found != 0) {
      int const nearest = __ffs(int(found)) - 1;
      *slot = __shfl_sync(kAllLanes, lane_slot, nearest);
      return first + kDirection * nearest;
    }
  }
  *slot = -1;
  return -1;
}

/// Finds the tokens of a token group's rows: where row `row` is token `last`, source[r] becomes the token of each row r <= row, or -1 where
/// that came before token `begin`, the first of the call. Called by a warp.
__device__ __forceinline__ void find_rows(AppendParams const& params, int64_t begin, int64_t last, int row, int lane, int32_t* source) {
  for (int r = lane; r < row; r += kWarp) source[r] = -1;
  if (lane == 0) source[row] = int32_t(last);
  __syncwarp();
  for (int64_t behind = last; behind > begin && row > 0; behind -= kWarp) {  // rows < `row` are searched for among tokens < `behind`
    int64_t const token = behind - 1 - lane;
    bool const stored = token >= begin && params.stored(params.slot(token));
    unsigned const found = __ballot_sync(kAllLanes, stored);
    int const lane_row = row - 1 - __popc(found & ((1u << lane) - 1));
    if (stored && lane_row >= 0) source[lane_row] = int32_t(token);
    row -= __popc(found);
  }
}

/// Stores a token's row in the residual if it stays there, and returns the task of its group if the token completes it. Called by a warp.
template <class T, int kWidth, class Params>
__device__ __forceinline__ GroupTask place_token(Params const& params, uint32_t token, uint32_t head, int lane) {
  GroupTask task{-1, 0, 0, -1, 0, 0, 0, 0};
  if (token >= params.tokens) return task;
  bool const alone = params.cu_seqlens == nullptr;
  Vector x[2] = {};
  auto const load = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) x[i] = load_side<T, kWidth>(params, i, token, head, lane);
  };
  if (alone) load();  // in a prefill, most tokens are not stored in the residual and need no load
  int64_t const slot = params.slot(token);
  if (agreed<Params::kPrepares>(!params.stored(slot))) return task;
  int64_t sequence = token, begin = token, last = token, first_slot = slot, last_slot = slot;
  if (!alone) {
    int64_t const starts = starts_up_to(params, token, lane);
    if (agreed<Params::kPrepares>(starts == 0 || starts > params.batch)) return task;  // outside of every sequence
    sequence = starts - 1;
    begin = max(params.seqlen_at(sequence), int64_t(0));
    int64_t const end = min(params.seqlen_at(starts), int64_t(params.tokens));
    if (end - begin > 1) {
      find_stored<false>(params, begin, end, lane, &first_slot);
      last = find_stored<true>(params, end - 1, begin, lane, &last_slot);
    }
  }
  int const mask = params.group - 1;
  int const row = int(slot) & mask, first_row = int(first_slot) & mask, last_row = int(last_slot) & mask;
  int64_t const group = slot >> params.group_log2, first_group = first_slot >> params.group_log2,
                last_group = last_slot >> params.group_log2;
  bool const has_rest = last_row != mask;  // the sequence's last group stays incomplete
  if (agreed<Params::kPrepares>(has_rest && group == last_group && row >= first_row)) {
    if (!alone) load();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      RowsParams const& side = params.side[i];
      int64_t const to = ((sequence * params.group + row) * params.heads + head) * side.vectors * kPerVector;
      if (lane < side.vectors) store_vector<kWidth>(x[i], side.residual + to, lane);
    }
  }
  if (row == mask) {
    task.token = int32_t(token);
    task.begin = int32_t(begin);
    task.page = params.page_of(slot);
    task.row = slot - task.page * params.page_size - mask;
    task.sequence = sequence;
    if (has_rest && group == first_group) {
      task.last = int32_t(last);
      task.last_row = last_row;
      task.residual_rows = min(first_row, last_row + 1);
    }
  }
  return task;
}

}  // namespace minfer::attention
