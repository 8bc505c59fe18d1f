// Appends keys and values to an int4 cache. After KIVI (Liu et al., 2024).
//
// K is quantised along tokens, in token groups of 32 or 64. Tokens of a group that is not complete after the call go to the sequence's
// residual, the others into codes only. A CTA has one head of one to sixteen tokens:
//   1. A warp for each token finds its sequence, by a search in steps of 32 through cu_seqlens, and whether its group is complete after the
//      call (token_groups.cuh). If it is not, the warp writes the residual row.
//   2. The tokens that are the last of their groups are taken one after the other by all warps: the group's rows are loaded, those from
//      before this call from the residual, all others from k and v; minima and maxima are found through shared memory; scales and codes are
//      stored.
// Residual rows of a head are read by one CTA only, the one that completes the sequence's first group, and only rows before that of the
// call's first token. Where tokens of the last group belong in just these rows, that CTA writes them after it has read: no other CTA may.
//
// Where keys are prepared (norm_rope.cuh), whole warps do that with a group's rows of the call, through shared memory; and the last CTAs of
// the grid have the heads of queries, one or several to a warp.
//
// Divisions and subtractions are IEEE's, in float32, and roundings to nearest even: codes equal those of the CPU kernel, bit for bit.
#pragma once

#include <cstddef>

#include "attention/cache/int4_steps.cuh"
#include "attention/cache/norm_rope.cuh"
#include "attention/cache/token_groups.cuh"
#include "attention/cache/vector.cuh"
#include "common/dependent_launch.cuh"

namespace minfer::attention {

constexpr int kSideThreads = 256, kGroupThreads = 2 * kSideThreads;  // half of a CTA's threads have K's vectors, half V's
constexpr int kGroupCtas = 1;                                        // CTAs on an SM
constexpr int kMaxGroup = 64, kMaxVectors = int(kMaxCacheHeadDim) / kPerVector;
constexpr int kMaxGroupsV = kMaxVectors / 4;
constexpr int kMaxRows = 8;  // rows of a group that a thread has: 64 rows of 28 or 32 vectors are divided among kSideThreads
static_assert(kMaxVectors == kWarp && kMaxRows * (kSideThreads / kMaxVectors) == kMaxGroup);

template <class T, bool kPrepares>
struct GroupStorage {
  static constexpr int kStride = kMaxVectors + 1;  // odd, since threads of neighbouring rows read a column
  GroupTask task[kGroupThreads / kWarp];
  int32_t source[kMaxGroup];                                 // the token of each row of the group; -1: the row is in the residual
  int32_t rest[kMaxGroup];                                   // the same of the sequence's last, incomplete group
  uint4 min_k[kSideThreads], max_k[kSideThreads];            // K: [row_step, head_dim], of a channel over a thread's rows
  T min_v[kMaxGroup * kStride], max_v[kMaxGroup * kStride];  // V: [group, kStride], of a vector of a row
  Steps steps_k[kMaxVectors * kPerVector];                   // K: [head_dim]
  Steps steps_v[kMaxGroupsV * kMaxGroup];                    // V: [groups_v, group]
  uint4 space[kPrepares ? 512 : 1];

  /// kPrepares: K's prepared rows [group, vectors] lie where the statistics are later.
  __device__ __forceinline__ uint4* prepared() {
    static_assert(!kPrepares || sizeof(GroupStorage) - offsetof(GroupStorage, min_k) >= sizeof(uint4) * kMaxGroup * kMaxVectors);
    return min_k;
  }
};

/// Quantises and stores a token group; called by the whole CTA. It is one function on purpose: with its phases as functions the compiler
/// renames registers of four kernels, and as methods of an object it takes 40 more instructions (sm_90a).
template <class T, int kWidth, class Params>
__device__ __forceinline__ void complete_group(Params const& params, GroupStorage<T, Params::kPrepares>& shared, GroupTask const& task,
                                               uint32_t head) {
  using T2 = typename Float16<kDataTypeOf<T>>::Pair;
  int const group = params.group, lane = int(threadIdx.x) % kWarp;
  if (threadIdx.x / kWarp == 0) find_rows(params, task.begin, task.token, group - 1, lane, shared.source);
  if (threadIdx.x / kWarp == 1 && task.residual_rows > 0) find_rows(params, task.begin, task.last, task.last_row, lane, shared.rest);
  __syncthreads();

  // A thread has one vector of each of the rows row_phase, row_phase + row_step, .., of K or of V.
  bool const is_v = threadIdx.x >= kSideThreads;
  RowsParams const& side = params.side[is_v ? 1 : 0];
  int const thread = int(threadIdx.x) % kSideThreads, vectors = side.vectors, head_dim = vectors * kPerVector;
  int const row_step = min(kSideThreads / vectors, group), row_phase = thread / vectors, vector = thread - row_phase * vectors;
  bool const active = row_phase < row_step;
  uint16_t* const residual = side.residual + (task.sequence * group * params.heads + head) * head_dim;  // [group, heads_kv, head_dim]
  int64_t const residual_stride = int64_t(params.heads) * head_dim;
  uint16_t const* const x_head = side.x + head * side.x_head;
  if constexpr (Params::kPrepares) {
    int const warp = int(warp_of<true>());
    if (warp < kSideThreads / kWarp) {
      for (int r = warp; r < group; r += kSideThreads / kWarp) {
        int32_t const token = __shfl_sync(kAllLanes, shared.source[r], 0);
        if (token < 0) continue;
        Vector const y = load_side<T, kWidth>(params, 0, token, head, lane);
        if (lane < vectors) shared.prepared()[r * vectors + lane] = make_uint4(y.pair[0], y.pair[1], y.pair[2], y.pair[3]);
      }
    }
    __syncthreads();
  }
  Vector x[kMaxRows];
#pragma unroll
  for (int j = 0; j < kMaxRows; ++j) {
    int const r = row_phase + j * row_step;
    if (active && r < group) {
      int const token = shared.source[r];
      if (Params::kPrepares && !is_v && token >= 0) {
        uint4 const y = shared.prepared()[r * vectors + vector];
        x[j] = {y.x, y.y, y.z, y.w};
        continue;
      }
      uint16_t const* const row = token >= 0 ? x_head + token * side.x_token : residual + r * residual_stride;
      x[j] = load_vector<kWidth>(row, token >= 0 ? side.x_element : 1, vector);
    }
  }
  if constexpr (Params::kPrepares) __syncthreads();
  if (active && !is_v) {  // K: minima and maxima of the vector's channels over the thread's rows
    T2 low[4], high[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) low[p] = high[p] = bits_as<T2>(x[0].pair[p]);
#pragma unroll
    for (int j = 1; j < kMaxRows; ++j) {
      if (row_phase + j * row_step < group) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          T2 const two = bits_as<T2>(x[j].pair[p]);
          low[p] = __hmin2_nan(low[p], two);
          high[p] = __hmax2_nan(high[p], two);
        }
      }
    }
    auto const words = [](T2 const(&x)[4]) {
      return make_uint4(bits_as<uint32_t>(x[0]), bits_as<uint32_t>(x[1]), bits_as<uint32_t>(x[2]), bits_as<uint32_t>(x[3]));
    };
    shared.min_k[thread] = words(low);  // thread = row_phase * vectors + vector
    shared.max_k[thread] = words(high);
  }
  if (active && is_v) {  // V: minimum and maximum of each row's eight channels
#pragma unroll
    for (int j = 0; j < kMaxRows; ++j) {
      int const r = row_phase + j * row_step;
      if (r < group) {
        T2 const two[4] = {bits_as<T2>(x[j].pair[0]), bits_as<T2>(x[j].pair[1]), bits_as<T2>(x[j].pair[2]), bits_as<T2>(x[j].pair[3])};
        T2 const low = __hmin2_nan(__hmin2_nan(two[0], two[1]), __hmin2_nan(two[2], two[3]));
        T2 const high = __hmax2_nan(__hmax2_nan(two[0], two[1]), __hmax2_nan(two[2], two[3]));
        shared.min_v[r * shared.kStride + vector] = __hmin_nan(low.x, low.y);
        shared.max_v[r * shared.kStride + vector] = __hmax_nan(high.x, high.y);
      }
    }
  }
  __syncthreads();  // all of the residual's rows are in registers

  int64_t const head_page = task.page * params.heads + head;
  int const groups_v = params.groups_v, vectors_of_group = vectors / groups_v;  // vectors of a group of channels
  if (!is_v && thread < head_dim) {
    T const* const min_of = reinterpret_cast<T const*>(shared.min_k) + thread;  // [row_step, head_dim]
    T const* const max_of = reinterpret_cast<T const*>(shared.max_k) + thread;
    T low = min_of[0], high = max_of[0];
    for (int i = 1; i < row_step; ++i) {
      low = __hmin_nan(low, min_of[i * head_dim]);
      high = __hmax_nan(high, max_of[i * head_dim]);
    }
    int64_t const groups = params.page_size >> params.group_log2;
    __half* const scale = static_cast<__half*>(side.scale) + (head_page * groups + (task.row >> params.group_log2)) * 2 * head_dim + thread;
    shared.steps_k[thread] = make_steps(low, high, scale, scale + head_dim);
  }
  if (is_v) {
    for (int i = thread; i < groups_v * group; i += kSideThreads) {
      int const g = i >> params.group_log2, r = i & (group - 1);
      T const* const min_of = shared.min_v + r * shared.kStride + g * vectors_of_group;
      T const* const max_of = shared.max_v + r * shared.kStride + g * vectors_of_group;
      T low = min_of[0], high = max_of[0];
      for (int c = 1; c < vectors_of_group; ++c) {
        low = __hmin_nan(low, min_of[c]);
        high = __hmax_nan(high, max_of[c]);
      }
      __half* const scale = static_cast<__half*>(side.scale) + (head_page * 2 * groups_v + g) * params.page_size + task.row + r;
      shared.steps_v[i] = make_steps(low, high, scale, scale + groups_v * params.page_size);
    }
  }
  auto const store_rest = [&] {
    int const warp = int(warp_of<Params::kPrepares>()), side_warp = warp % (kSideThreads / kWarp);
    for (int r = side_warp; r < task.residual_rows; r += kSideThreads / kWarp) {
      int32_t const token = shared.rest[r];  // negative where slots that are not consecutive name a row that no token has
      if (agreed<Params::kPrepares>(token < 0)) continue;
      Vector const row = load_side<T, kWidth>(params, warp < kSideThreads / kWarp ? 0 : 1, token, head, lane);
      if (lane < vectors) store_vector<kWidth>(row, residual + r * residual_stride, lane);
    }
  };
  if constexpr (!Params::kPrepares) store_rest();
  __syncthreads();
  auto const store_codes = [&] {
    if (!active) return;
    uint8_t* const codes = side.cache + task.page * side.page_bytes + task.row * side.row_bytes + head * side.head_bytes + vector * 4;
    Steps const* const steps_of_row = shared.steps_v + vector / vectors_of_group * group;
    // The codes of a pair of elements replace the pair in its register.
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      Steps low, high;
      if (!is_v) {
        low = shared.steps_k[vector * kPerVector + 2 * p];
        high = shared.steps_k[vector * kPerVector + 2 * p + 1];
      }
#pragma unroll
      for (int j = 0; j < kMaxRows; ++j) {
        int const r = row_phase + j * row_step;
        if (r >= group) break;
        if (is_v) low = high = steps_of_row[r];
        float2 const two = Float16<kDataTypeOf<T>>::unpack(x[j].pair[p]);
        x[j].pair[p] = code_int4(two.x, low) | code_int4(two.y, high) << 4;
      }
    }
#pragma unroll
    for (int j = 0; j < kMaxRows; ++j) {
      int const r = row_phase + j * row_step;
      if (r >= group) break;
      uint32_t const word = x[j].pair[0] | x[j].pair[1] << 8 | x[j].pair[2] << 16 | x[j].pair[3] << 24;
      *reinterpret_cast<uint32_t*>(codes + r * side.row_bytes) = word;
    }
  };
  store_codes();
  if constexpr (Params::kPrepares) {  // only now, when x takes no registers any more
    store_rest();
    __syncthreads();
  }
}

template <class T, int kWidth, class Params>
__global__ void __launch_bounds__(kGroupThreads, kGroupCtas) append_groups_kernel(__grid_constant__ Params const params) {
  __shared__ GroupStorage<T, Params::kPrepares> shared;
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  int const warp = int(warp_of<Params::kPrepares>()), lane = int(threadIdx.x) % kWarp;
  if constexpr (Params::kPrepares) {
    if (blockIdx.x >= params.group_ctas) {
      uint32_t const item = (blockIdx.x - params.group_ctas) * (kGroupThreads / kWarp) + uint32_t(warp);
      uint32_t const token = item / params.heads_of.q_items;
      if (token < params.tokens) store_query_item<T>(params.heads_of, token, item - token * params.heads_of.q_items, lane);
      return;
    }
  }
  uint32_t const block = blockIdx.x / params.heads, head = blockIdx.x - block * params.heads;
  bool completes = false;
  if (warp < params.cta_tokens) {
    GroupTask const task = place_token<T, kWidth>(params, block * uint32_t(params.cta_tokens) + uint32_t(warp), head, lane);
    if (lane == 0) shared.task[warp] = task;
    completes = task.token >= 0;
  }
  if (!__syncthreads_or(completes)) return;
#pragma unroll 1
  for (int i = 0; i < params.cta_tokens; ++i) {
    // The next group first writes what this one reads only before its second barrier.
    if (shared.task[i].token >= 0) complete_group<T, kWidth>(params, shared, shared.task[i], head);
  }
}

}  // namespace minfer::attention
