// New keys and values into a KV cache, in its format: one launch, nothing but the tokens' own slots is written.
//
// 16bit, fp8, int8: a warp has a head of a token, and a lane eight elements of its K and eight of its V, 16 bytes each: both loads are under
// way before the slot is known. int8's scale is a maximum over the warp, of the magnitudes' bits: NaN is above infinity there, so it shows.
//
// int4: K is quantised along tokens, in groups of 32 or 64; tokens of a group that is not whole after this call go to the sequence's residual,
// the others nowhere but into codes. A CTA has a head of one to sixteen tokens:
//   1. a warp for each token finds its sequence (a search in steps of 32 through cu_seqlens) and the sequence's first and last stored slot,
//      which tell whether its group becomes whole, for slots are consecutive inside a group and a group's slots are no other sequence's;
//      where it does not, the warp writes the residual row;
//   2. the last tokens of groups, if the CTA has any, are taken one after the other by all warps: the group's rows are loaded, those before
//      this call from the residual, all others from k and v; minima and maxima through shared memory; scales; codes.
// Residual rows are read by one CTA of a head only, that which completes the sequence's first group, and only rows < that of the first token
// of the call. Where tokens of the last group belong into just these rows, the reader writes them, after it has read: no other CTA may.
//
// Divisions and subtractions are IEEE's, in float32, and roundings to nearest even: codes are those of the CPU kernel, bit for bit.
// Source: int4 is KIVI's (Liu et al., 2024).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "minfer/kv_cache.h"

namespace minfer {

namespace attention {
namespace {

constexpr int kWarp = 32, kEach = 8;                                 // kEach: elements of a chunk, 16 bytes
constexpr int kRowThreads = 128;                                     // of the formats without groups
constexpr int kSideThreads = 256, kGroupThreads = 2 * kSideThreads;  // of int4: half of them K's, half V's
constexpr int kGroupCtas = 1;                                        // on an SM
constexpr int kMaxGroup = 64, kMaxChunks = int(kMaxCacheHeadDim) / kEach;
constexpr int kMaxGroupsV = kMaxChunks / 4;
constexpr int kMaxRows = 8;  // of a group that a thread has: 64 rows of 28 or 32 chunks, divided among kSideThreads
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kHalfMax = 65504.0f;
static_assert(kMaxChunks == kWarp && kMaxRows * (kSideThreads / kMaxChunks) == kMaxGroup);

struct RowsParams {
  uint16_t const* x;                   // [tokens, heads_kv, head_dim]
  int64_t x_token, x_head, x_element;  // strides
  uint8_t* cache;                      // [pages, page_size, heads_kv, bytes of codes]
  int64_t page_bytes, row_bytes, head_bytes;
  void* scale;
  int64_t scale_stride;
  uint16_t* residual;  // [batch, group, heads_kv, head_dim]
  int32_t chunks;      // head_dim / 8
};

struct AppendParams {
  RowsParams side[2];  // K, V
  int64_t const* slots;
  int64_t slots_stride, capacity, page_size;
  uint32_t tokens, heads;
  // int4
  int32_t const* cu_seqlens;
  int64_t cu_seqlens_stride, batch;
  int32_t group, group_log2, groups_v;
  int32_t cta_tokens;  // 1 to 16

  __device__ __forceinline__ int64_t slot(int64_t token) const { return slots[token * slots_stride]; }
  /// Whether there is such a slot; negative ones are skipped tokens'.
  __device__ __forceinline__ bool stored(int64_t slot) const { return uint64_t(slot) < uint64_t(capacity); }
  __device__ __forceinline__ int64_t page_of(int64_t slot) const { return int64_t(uint64_t(slot) / uint64_t(page_size)); }
  __device__ __forceinline__ int64_t seqlen_at(int64_t i) const { return cu_seqlens[i * cu_seqlens_stride]; }
};

// ---- eight elements ----------------------------------------------------------------------------------------------------------------

template <class T>
struct Pair;
template <>
struct Pair<__half> {
  using Type = __half2;
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

__device__ __forceinline__ float2 to_floats(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 to_floats(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class To, class From>
__device__ __forceinline__ To bits_as(From const& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

struct Chunk {
  uint32_t pair[4];  // of 16-bit numbers
};

/// kWidth: elements of an access, 8 or 1; `stride` is 1 where it is 8.
template <int kWidth>
__device__ __forceinline__ Chunk load_chunk(uint16_t const* row, int64_t stride, int chunk) {
  Chunk x;
  if constexpr (kWidth == kEach) {
    uint4 const v = reinterpret_cast<uint4 const*>(row)[chunk];
    x = {v.x, v.y, v.z, v.w};
  } else {
    uint16_t const* first = row + int64_t(chunk) * kEach * stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) x.pair[i] = uint32_t(first[2 * i * stride]) | uint32_t(first[(2 * i + 1) * stride]) << 16;
  }
  return x;
}

template <int kWidth>
__device__ __forceinline__ void store_chunk(Chunk const& x, uint16_t* row, int chunk) {
  if constexpr (kWidth == kEach) {
    reinterpret_cast<uint4*>(row)[chunk] = make_uint4(x.pair[0], x.pair[1], x.pair[2], x.pair[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) row[chunk * kEach + i] = uint16_t(x.pair[i / 2] >> 16 * (i % 2));
  }
}

template <class T>
__device__ __forceinline__ void unpack(Chunk const& x, float (&values)[kEach]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const two = to_floats(bits_as<typename Pair<T>::Type>(x.pair[i]));
    values[2 * i] = two.x;
    values[2 * i + 1] = two.y;
  }
}

// ---- 16bit, fp8, int8 --------------------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ uint2 codes_fp8(Chunk const& x, float scale) {
  float values[kEach];
  unpack<T>(x, values);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kEach; i += 2) {
    float2 const two = make_float2(__fdiv_rn(values[i], scale), __fdiv_rn(values[i + 1], scale));
    words[i / 4] |= uint32_t(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3)) << 8 * (i % 4);
  }
  return make_uint2(words[0], words[1]);
}

/// The largest magnitude of a warp's chunks; NaN where one is.
template <class T>
__device__ __forceinline__ float largest_magnitude(Chunk const& x) {
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, max(x.pair[i] & 0x7fffu, x.pair[i] >> 16 & 0x7fffu));
  return to_float(bits_as<T>(uint16_t(__reduce_max_sync(kAllLanes, largest))));
}

template <class T>
__device__ __forceinline__ uint2 codes_int8(Chunk const& x, float scale) {
  float values[kEach];
  unpack<T>(x, values);
  float const divisor = scale == 0.0f ? 1.0f : scale;
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int const code = min(max(__float2int_rn(__fdiv_rn(values[i], divisor)), -127), 127);  // of NaN: 0
    words[i / 4] |= (uint32_t(code) & 0xffu) << 8 * (i % 4);
  }
  return make_uint2(words[0], words[1]);
}

template <WeightFormat kFormat, class T, int kWidth>
__global__ void __launch_bounds__(kRowThreads) append_rows_kernel(__grid_constant__ AppendParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  uint32_t const item = blockIdx.x * (kRowThreads / kWarp) + threadIdx.x / kWarp;
  uint32_t const token = item / params.heads, head = item - token * params.heads;
  if (token >= params.tokens) return;
  int const lane = int(threadIdx.x % kWarp);
  int64_t const slot = params.slot(token);
  Chunk x[2] = {};
  float scale[2] = {1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    RowsParams const& side = params.side[i];
    if (lane < side.chunks) x[i] = load_chunk<kWidth>(side.x + token * side.x_token + head * side.x_head, side.x_element, lane);
    if constexpr (kFormat == WeightFormat::kFp8E4M3) scale[i] = static_cast<float const*>(side.scale)[head * side.scale_stride];
  }
  if (!params.stored(slot)) return;
  int64_t const page = params.page_of(slot), row = slot - page * params.page_size;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    RowsParams const& side = params.side[i];
    if constexpr (kFormat == WeightFormat::kInt8) {
      scale[i] = __fdiv_rn(largest_magnitude<T>(x[i]), 127.0f);
      if (lane == 0) static_cast<float*>(side.scale)[(page * params.heads + head) * params.page_size + row] = scale[i];
    }
    if (lane >= side.chunks) continue;
    uint8_t* const codes = side.cache + page * side.page_bytes + row * side.row_bytes + head * side.head_bytes;
    if constexpr (kFormat == WeightFormat::kDense) {
      store_chunk<kEach>(x[i], reinterpret_cast<uint16_t*>(codes), lane);
    } else if constexpr (kFormat == WeightFormat::kFp8E4M3) {
      reinterpret_cast<uint2*>(codes)[lane] = codes_fp8<T>(x[i], scale[i]);
    } else {
      reinterpret_cast<uint2*>(codes)[lane] = codes_int8<T>(x[i], scale[i]);
    }
  }
}

// ---- int4: which tokens ------------------------------------------------------------------------------------------------------------

/// A group that becomes whole, of one head.
struct GroupTask {
  int32_t token;      // its last one; -1: there is none
  int32_t begin;      // the sequence's first token
  int32_t last;       // the sequence's last stored token, row last_row of its group
  int32_t last_row;   // -1: nobody's rows are to be taken over
  int32_t taken;      // rows < taken of the last token's group are written by this group's CTA
  int64_t page, row;  // of the group's first token
  int64_t sequence;
};

/// By a warp: how many of cu_seqlens' batch + 1 values are not above `token`; they ascend.
__device__ __forceinline__ int64_t starts_up_to(AppendParams const& params, int64_t token, int lane) {
  int64_t low = 0, high = params.batch + 1;  // it is one of low .. high
  while (low < high) {
    int64_t const step = (high - low + kWarp - 1) / kWarp, i = low + lane * step;
    int const count = __popc(__ballot_sync(kAllLanes, i < high && params.seqlen_at(i) <= token));
    if (count == 0) break;
    high = min(high, low + count * step);
    low += (count - 1) * step + 1;
  }
  return low;
}

/// By a warp: the stored token that is nearest to `from`, up to but without `bound` or, going down, with it; its slot. There is one.
template <bool kDown>
__device__ __forceinline__ int64_t find_stored(AppendParams const& params, int64_t from, int64_t bound, int lane, int64_t* slot) {
  constexpr int kDirection = kDown ? -1 : 1;
  for (int64_t first = from; kDown ? first >= bound : first < bound; first += kDirection * kWarp) {
    int64_t const token = first + kDirection * lane;
    int64_t const own = (kDown ? token >= bound : token < bound) ? params.slot(token) : -1;
    unsigned const found = __ballot_sync(kAllLanes, params.stored(own));
    if (found != 0) {
      int const nearest = __ffs(int(found)) - 1;
      *slot = __shfl_sync(kAllLanes, own, nearest);
      return first + kDirection * nearest;
    }
  }
  *slot = -1;
  return -1;
}

/// By a warp: of a group whose row `row` is token `last`, source[r] becomes the token of each row r <= row, -1 where it came before `begin`.
__device__ __forceinline__ void find_rows(AppendParams const& params, int64_t begin, int64_t last, int row, int lane, int32_t* source) {
  for (int r = lane; r < row; r += kWarp) source[r] = -1;
  if (lane == 0) source[row] = int32_t(last);
  __syncwarp();
  for (int64_t behind = last; behind > begin && row > 0; behind -= kWarp) {  // rows < `row` are sought among tokens < `behind`
    int64_t const token = behind - 1 - lane;
    bool const stored = token >= begin && params.stored(params.slot(token));
    unsigned const found = __ballot_sync(kAllLanes, stored);
    int const own = row - 1 - __popc(found & ((1u << lane) - 1));
    if (stored && own >= 0) source[own] = int32_t(token);
    row -= __popc(found);
  }
}

/// By a warp: stores the token in the residual if it stays there; the task if its group becomes whole with it.
template <int kWidth>
__device__ __forceinline__ GroupTask place_token(AppendParams const& params, uint32_t token, uint32_t head, int lane) {
  GroupTask task{-1, 0, 0, -1, 0, 0, 0, 0};
  if (token >= params.tokens) return task;
  bool const alone = params.cu_seqlens == nullptr;
  Chunk x[2] = {};
  auto const load = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      RowsParams const& side = params.side[i];
      if (lane < side.chunks) x[i] = load_chunk<kWidth>(side.x + token * side.x_token + head * side.x_head, side.x_element, lane);
    }
  };
  if (alone) load();  // in a prefill, most tokens do not get here
  int64_t const slot = params.slot(token);
  if (!params.stored(slot)) return task;
  int64_t sequence = token, begin = token, last = token, first_slot = slot, last_slot = slot;
  if (!alone) {
    int64_t const starts = starts_up_to(params, token, lane);
    if (starts == 0 || starts > params.batch) return task;  // nobody's
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
  bool const rest = last_row != mask;  // the last group is not whole
  if (rest && group == last_group && row >= first_row) {
    if (!alone) load();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      RowsParams const& side = params.side[i];
      int64_t const to = ((sequence * params.group + row) * params.heads + head) * side.chunks * kEach;
      if (lane < side.chunks) store_chunk<kWidth>(x[i], side.residual + to, lane);
    }
  }
  if (row == mask) {
    task.token = int32_t(token);
    task.begin = int32_t(begin);
    task.page = params.page_of(slot);
    task.row = slot - task.page * params.page_size - mask;
    task.sequence = sequence;
    if (rest && group == first_group) {
      task.last = int32_t(last);
      task.last_row = last_row;
      task.taken = min(first_row, last_row + 1);
    }
  }
  return task;
}

// ---- int4: a group -----------------------------------------------------------------------------------------------------------------

/// What a code stands for is code * step + minimum, with a step of 1 for 0.
struct Steps {
  float minimum, step, reciprocal;
};

/// Stores scale and minimum as float16; codes are computed from what was stored. NaN passes through.
template <class T>
__device__ __forceinline__ Steps make_steps(T least, T most, __half* scale, __half* minimum) {
  float const low = to_float(least);
  __half const bottom = __float2half_rn(low < -kHalfMax ? -kHalfMax : low > kHalfMax ? kHalfMax : low);
  float const exact = __fdiv_rn(__fsub_rn(to_float(most), __half2float(bottom)), 15.0f);
  __half const size = __float2half_rn(exact < 0.0f ? 0.0f : exact > kHalfMax ? kHalfMax : exact);
  *scale = size;
  *minimum = bottom;
  float const step = size == __half(0.0f) ? 1.0f : __half2float(size);
  return {__half2float(bottom), step, __frcp_rn(step)};
}

/// round((x - minimum) / step), within 0 to 15; of NaN: 0. The quotient is IEEE's where codes differ (Markstein, 1990: a step is a float16, so
/// neither its reciprocal nor the remainder is subnormal there); beyond 32 it may be infinite and has no remainder.
__device__ __forceinline__ uint32_t code_int4(float x, Steps steps) {
  float const dividend = __fsub_rn(x, steps.minimum), estimate = __fmul_rn(dividend, steps.reciprocal);
  float const exact = __fmaf_rn(__fmaf_rn(-estimate, steps.step, dividend), steps.reciprocal, estimate);
  return uint32_t(__float2int_rn(fminf(fmaxf(fabsf(estimate) < 32.0f ? exact : estimate, 0.0f), 15.0f)));
}

template <class T>
struct GroupStorage {
  static constexpr int kStride = kMaxChunks + 1;  // odd, for threads of neighbouring rows read a column
  GroupTask task[kGroupThreads / kWarp];
  int32_t source[kMaxGroup];                                    // tokens of the group's rows; -1: in the residual
  int32_t taken[kMaxGroup];                                     // likewise of the sequence's last group
  uint4 least_k[kSideThreads], most_k[kSideThreads];            // [slices, head_dim] K: of a channel in a thread's rows
  T least_v[kMaxGroup * kStride], most_v[kMaxGroup * kStride];  // V: of a row's chunk
  Steps steps_k[kMaxChunks * kEach];                            // of channels
  Steps steps_v[kMaxGroupsV * kMaxGroup];                       // [groups_v, group]
};

template <class T, int kWidth>
__device__ __forceinline__ void complete_group(AppendParams const& params, GroupStorage<T>& shared, GroupTask const& task, uint32_t head) {
  using T2 = typename Pair<T>::Type;
  int const group = params.group, lane = int(threadIdx.x) % kWarp;
  if (threadIdx.x / kWarp == 0) find_rows(params, task.begin, task.token, group - 1, lane, shared.source);
  if (threadIdx.x / kWarp == 1 && task.taken > 0) find_rows(params, task.begin, task.last, task.last_row, lane, shared.taken);
  __syncthreads();

  // A thread has one chunk of rows slice, slice + slices, .., of K or of V.
  bool const of_v = threadIdx.x >= kSideThreads;
  RowsParams const& side = params.side[of_v ? 1 : 0];
  int const thread = int(threadIdx.x) % kSideThreads, chunks = side.chunks, head_dim = chunks * kEach;
  int const slices = min(kSideThreads / chunks, group), slice = thread / chunks, chunk = thread - slice * chunks;
  bool const active = slice < slices;
  uint16_t* const residual = side.residual + (task.sequence * group * params.heads + head) * head_dim;  // [group, heads_kv, head_dim]
  int64_t const residual_stride = int64_t(params.heads) * head_dim;
  uint16_t const* const x_head = side.x + head * side.x_head;
  Chunk x[kMaxRows];
#pragma unroll
  for (int j = 0; j < kMaxRows; ++j) {
    int const r = slice + j * slices;
    if (active && r < group) {
      int const token = shared.source[r];
      uint16_t const* const row = token >= 0 ? x_head + token * side.x_token : residual + r * residual_stride;
      x[j] = load_chunk<kWidth>(row, token >= 0 ? side.x_element : 1, chunk);
    }
  }
  if (active && !of_v) {  // over rows
    T2 least[4], most[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) least[p] = most[p] = bits_as<T2>(x[0].pair[p]);
#pragma unroll
    for (int j = 1; j < kMaxRows; ++j) {
      if (slice + j * slices < group) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          T2 const two = bits_as<T2>(x[j].pair[p]);
          least[p] = __hmin2_nan(least[p], two);
          most[p] = __hmax2_nan(most[p], two);
        }
      }
    }
    auto const words = [](T2 const(&x)[4]) {
      return make_uint4(bits_as<uint32_t>(x[0]), bits_as<uint32_t>(x[1]), bits_as<uint32_t>(x[2]), bits_as<uint32_t>(x[3]));
    };
    shared.least_k[thread] = words(least);  // thread = slice * chunks + chunk
    shared.most_k[thread] = words(most);
  }
  if (active && of_v) {  // over a row's eight channels
#pragma unroll
    for (int j = 0; j < kMaxRows; ++j) {
      int const r = slice + j * slices;
      if (r < group) {
        T2 const two[4] = {bits_as<T2>(x[j].pair[0]), bits_as<T2>(x[j].pair[1]), bits_as<T2>(x[j].pair[2]), bits_as<T2>(x[j].pair[3])};
        T2 const least = __hmin2_nan(__hmin2_nan(two[0], two[1]), __hmin2_nan(two[2], two[3]));
        T2 const most = __hmax2_nan(__hmax2_nan(two[0], two[1]), __hmax2_nan(two[2], two[3]));
        shared.least_v[r * shared.kStride + chunk] = __hmin_nan(least.x, least.y);
        shared.most_v[r * shared.kStride + chunk] = __hmax_nan(most.x, most.y);
      }
    }
  }
  __syncthreads();  // all of the residual's rows are in registers

  int64_t const head_page = task.page * params.heads + head;
  int const groups_v = params.groups_v, chunks_v = chunks / groups_v;  // of a group of channels
  if (!of_v && thread < head_dim) {
    T const* const least_of = reinterpret_cast<T const*>(shared.least_k) + thread;  // [slices, head_dim]
    T const* const most_of = reinterpret_cast<T const*>(shared.most_k) + thread;
    T least = least_of[0], most = most_of[0];
    for (int i = 1; i < slices; ++i) {
      least = __hmin_nan(least, least_of[i * head_dim]);
      most = __hmax_nan(most, most_of[i * head_dim]);
    }
    int64_t const groups = params.page_size >> params.group_log2;
    __half* const scale = static_cast<__half*>(side.scale) + (head_page * groups + (task.row >> params.group_log2)) * 2 * head_dim + thread;
    shared.steps_k[thread] = make_steps(least, most, scale, scale + head_dim);
  }
  if (of_v) {
    for (int i = thread; i < groups_v * group; i += kSideThreads) {
      int const g = i >> params.group_log2, r = i & (group - 1);
      T const* const least_of = shared.least_v + r * shared.kStride + g * chunks_v;
      T const* const most_of = shared.most_v + r * shared.kStride + g * chunks_v;
      T least = least_of[0], most = most_of[0];
      for (int c = 1; c < chunks_v; ++c) {
        least = __hmin_nan(least, least_of[c]);
        most = __hmax_nan(most, most_of[c]);
      }
      __half* const scale = static_cast<__half*>(side.scale) + (head_page * 2 * groups_v + g) * params.page_size + task.row + r;
      shared.steps_v[i] = make_steps(least, most, scale, scale + groups_v * params.page_size);
    }
  }
  for (int r = thread / kWarp; r < task.taken; r += kSideThreads / kWarp) {
    int32_t const token = shared.taken[r];  // negative where slots that do not follow each other name a row that no token has
    uint16_t const* const row = x_head + token * side.x_token;
    if (token >= 0 && lane < chunks)
      store_chunk<kWidth>(load_chunk<kWidth>(row, side.x_element, lane), residual + r * residual_stride, lane);
  }
  __syncthreads();

  if (!active) return;
  uint8_t* const codes = side.cache + task.page * side.page_bytes + task.row * side.row_bytes + head * side.head_bytes + chunk * 4;
  Steps const* const steps_of_row = shared.steps_v + chunk / chunks_v * group;
  // The codes of a pair take the pair's place.
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    Steps low, high;
    if (!of_v) {
      low = shared.steps_k[chunk * kEach + 2 * p];
      high = shared.steps_k[chunk * kEach + 2 * p + 1];
    }
#pragma unroll
    for (int j = 0; j < kMaxRows; ++j) {
      int const r = slice + j * slices;
      if (r >= group) break;
      if (of_v) low = high = steps_of_row[r];
      float2 const two = to_floats(bits_as<T2>(x[j].pair[p]));
      x[j].pair[p] = code_int4(two.x, low) | code_int4(two.y, high) << 4;
    }
  }
#pragma unroll
  for (int j = 0; j < kMaxRows; ++j) {
    int const r = slice + j * slices;
    if (r >= group) break;
    uint32_t const word = x[j].pair[0] | x[j].pair[1] << 8 | x[j].pair[2] << 16 | x[j].pair[3] << 24;
    *reinterpret_cast<uint32_t*>(codes + r * side.row_bytes) = word;
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kGroupThreads, kGroupCtas) append_groups_kernel(__grid_constant__ AppendParams const params) {
  __shared__ GroupStorage<T> shared;
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  uint32_t const block = blockIdx.x / params.heads, head = blockIdx.x - block * params.heads;
  int const warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  bool whole = false;
  if (warp < params.cta_tokens) {
    GroupTask const task = place_token<kWidth>(params, block * uint32_t(params.cta_tokens) + uint32_t(warp), head, lane);
    if (lane == 0) shared.task[warp] = task;
    whole = task.token >= 0;
  }
  if (!__syncthreads_or(whole)) return;
#pragma unroll 1
  for (int i = 0; i < params.cta_tokens; ++i) {
    // The next group's first writes are to what only this one's first half reads, which ends with a barrier.
    if (shared.task[i].token >= 0) complete_group<T, kWidth>(params, shared, shared.task[i], head);
  }
}

// ---- launch ------------------------------------------------------------------------------------------------------------------------

RowsParams describe(KvRows const& rows, int64_t code_bytes) {
  RowsParams params{};
  params.x = static_cast<uint16_t const*>(rows.x);
  params.x_token = rows.x_strides[0];
  params.x_head = rows.x_strides[1];
  params.x_element = rows.x_strides[2];
  params.cache = static_cast<uint8_t*>(rows.cache);
  params.page_bytes = rows.cache_strides[0] * code_bytes;
  params.row_bytes = rows.cache_strides[1] * code_bytes;
  params.head_bytes = rows.cache_strides[2] * code_bytes;
  params.scale = rows.scale;
  params.scale_stride = rows.scale_stride;
  params.residual = static_cast<uint16_t*>(rows.residual);
  params.chunks = int32_t(rows.head_dim / kEach);
  return params;
}

/// Whether eight elements are one access, of x and of the residual.
bool is_wide(KvRows const& rows, KvAppend const& append) {
  auto const aligned = [](void const* base) { return reinterpret_cast<uintptr_t>(base) % 16 == 0; };
  return aligned(rows.x) && aligned(rows.residual) && rows.x_strides[2] == 1 && (append.tokens <= 1 || rows.x_strides[0] % kEach == 0) &&
         (append.heads_kv <= 1 || rows.x_strides[1] % kEach == 0);
}

template <WeightFormat kFormat, class T, int kWidth>
Status launch_append(AppendParams const& params, DeviceProperties const& device, bool programmatic, Stream stream) {
  LaunchShape shape;
  shape.programmatic = programmatic;
  shape.stream = stream;
  if constexpr (kFormat == WeightFormat::kInt4) {
    // As few tokens to a CTA as one wave allows: what completes groups in a CTA goes one after the other.
    int64_t const pairs = int64_t(params.tokens) * params.heads, wave = std::max(device.sm_count, 1) * kGroupCtas;
    AppendParams own = params;
    own.cta_tokens = int32_t(std::clamp<int64_t>((pairs + wave - 1) / wave, 1, kGroupThreads / kWarp));
    shape.grid = dim3((params.tokens + unsigned(own.cta_tokens) - 1) / unsigned(own.cta_tokens) * params.heads);
    shape.threads = kGroupThreads;
    return launch(shape, "launch of kv_cache_append", &append_groups_kernel<T, kWidth>, own);
  } else {
    constexpr unsigned kWarps = kRowThreads / kWarp;
    shape.grid = dim3((params.tokens * params.heads + kWarps - 1) / kWarps);
    shape.threads = kRowThreads;
    return launch(shape, "launch of kv_cache_append", &append_rows_kernel<kFormat, T, kWidth>, params);
  }
}

template <WeightFormat kFormat>
Status launch_format(AppendParams const& params, DataType type, bool wide, DeviceProperties const& device, bool programmatic,
                     Stream stream) {
  if (kFormat == WeightFormat::kDense || type == DataType::kF16) {  // a copy is one of bits
    return wide ? launch_append<kFormat, __half, kEach>(params, device, programmatic, stream)
                : launch_append<kFormat, __half, 1>(params, device, programmatic, stream);
  }
  if constexpr (kFormat != WeightFormat::kDense) {
    return wide ? launch_append<kFormat, __nv_bfloat16, kEach>(params, device, programmatic, stream)
                : launch_append<kFormat, __nv_bfloat16, 1>(params, device, programmatic, stream);
  }
  return Status::success();
}

}  // namespace
}  // namespace attention

Status append_to_kv_cache(KvAppend const& append, DeviceProperties const& device, bool programmatic, Stream stream) {
  using namespace attention;
  int64_t const capacity = append.pages * append.page_size;
  if (append.tokens == 0 || append.heads_kv == 0 || capacity == 0) return Status::success();
  if (append.type == DataType::kF32) return Status::failure(StatusCode::kInvalidArgument, "k of type %d", int(append.type));
  for (int64_t const head_dim : {append.k.head_dim, append.v.head_dim}) {
    int const unit = append.kv_format == WeightFormat::kInt4 ? 32 : kEach;
    if (head_dim < unit || head_dim > kMaxCacheHeadDim || head_dim % unit != 0) {
      return Status::failure(StatusCode::kInvalidArgument, "head_dim %lld", (long long)head_dim);
    }
  }
  if (append.tokens > 0x7fffffff / append.heads_kv) {
    return Status::failure(StatusCode::kNotSupported, "%lld tokens of %lld heads are more than a launch covers", (long long)append.tokens,
                           (long long)append.heads_kv);
  }
  int64_t const code_bytes = append.kv_format == WeightFormat::kDense ? 2 : 1;
  AppendParams params{};
  params.side[0] = describe(append.k, code_bytes);
  params.side[1] = describe(append.v, code_bytes);
  params.slots = append.slots;
  params.slots_stride = append.slots_stride;
  params.capacity = capacity;
  params.page_size = append.page_size;
  params.tokens = uint32_t(append.tokens);
  params.heads = uint32_t(append.heads_kv);
  bool const wide = is_wide(append.k, append) && is_wide(append.v, append);
  switch (append.kv_format) {
    case WeightFormat::kDense: return launch_format<WeightFormat::kDense>(params, append.type, wide, device, programmatic, stream);
    case WeightFormat::kFp8E4M3: return launch_format<WeightFormat::kFp8E4M3>(params, append.type, wide, device, programmatic, stream);
    case WeightFormat::kInt8: return launch_format<WeightFormat::kInt8>(params, append.type, wide, device, programmatic, stream);
    case WeightFormat::kInt4: break;
    default: return Status::failure(StatusCode::kInvalidArgument, "a cache of format %s", name_of(append.kv_format));
  }
  if ((append.group_tokens != 32 && append.group_tokens != 64) || append.page_size % append.group_tokens != 0 || append.groups_v < 1 ||
      append.v.head_dim / 32 % append.groups_v != 0) {
    return Status::failure(StatusCode::kInvalidArgument, "groups of %lld tokens, %lld groups of channels", (long long)append.group_tokens,
                           (long long)append.groups_v);
  }
  params.cu_seqlens = append.cu_seqlens;
  params.cu_seqlens_stride = append.cu_seqlens_stride;
  params.batch = append.batch;
  params.group = int32_t(append.group_tokens);
  params.group_log2 = append.group_tokens == 32 ? 5 : 6;
  params.groups_v = int32_t(append.groups_v);
  return launch_format<WeightFormat::kInt4>(params, append.type, wide, device, programmatic, stream);
}

}  // namespace minfer
