// Merges attention states, each over a subset of the keys, into the attention over all of them: out = sum of w_i out_i / sum of w_i with
// w_i = exp(lse_i - max lse). Source: the merge of cascade inference (Ye et al., 2024), which is that of online softmax (Milakov and
// Gimelshein, 2018).
//
// A thread has one vector of 16 bytes of a head of a row. It issues the loads of the first states' vectors and of all lses together, which
// is what hides the latency, and adds in float32 in the order of the states. A state without a key has weight 0, and its out is not
// multiplied at all, whatever it holds. Neighbouring threads cover a head's elements, then eight rows, then heads: outs are read in whole
// lines, and lses, of which a head's rows are contiguous, in whole sectors. Where bases, strides or head_dim do not allow 16 bytes, a
// thread has one element.
//
// States beyond the number that fits into a launch's parameters are added by more launches, to a float32 out and an lse that the launch
// before left in the workspace: the sum over all states is rounded once. The float32 out is replaced in place, each element by the thread
// that read it; lses alternate between two buffers, since each is read by many threads.
#include "attention/merge/merge_states.h"

#include <algorithm>
#include <cmath>

#include "common/aligned_vector.cuh"
#include "common/dependent_launch.cuh"
#include "common/float16.cuh"
#include "common/kernel_launch.h"

namespace minfer {

namespace attention {
namespace {

constexpr int kThreads = 128, kRows = 8, kTogether = 4;  // kTogether: states whose elements are loaded at a time

struct MergeParams {
  AttentionState state[kMergedStates];
  float const* sum_out;                      // sum over the states before these, [rows, heads, head_dim], or null
  float const* sum_lse;                      // [batch, heads, seqlen]
  void* out;                                 // [rows, heads, head_dim]
  float* lse;                                // [batch, heads, seqlen]
  int64_t rows, seqlen;                      // rows of all sequences
  uint32_t count, heads, head_dim, vectors;  // vectors: head_dim / kWidth, at least one
};

/// The elements that a thread has: some columns of a head of a row.
struct Elements {
  int64_t batch, token, row;
  uint32_t head, column;
};

/// dividend / divisor in 32 bits where both fit: a 64-bit division takes ten times as long.
__device__ __forceinline__ uint64_t quotient(uint64_t dividend, uint64_t divisor) {
  return ((dividend | divisor) >> 32) == 0 ? uint32_t(dividend) / uint32_t(divisor) : dividend / divisor;
}

template <int kWidth>
__device__ __forceinline__ Elements elements_of(MergeParams const& params, uint64_t item) {
  uint64_t const line = quotient(item, params.vectors);  // threads cover columns, then kRows rows, then heads, then blocks of rows
  uint64_t const head_rows = line / kRows, block = quotient(head_rows, params.heads);
  Elements at;
  at.column = uint32_t(item - line * params.vectors) * kWidth;
  at.head = uint32_t(head_rows - block * params.heads);
  at.row = int64_t(block * kRows + line % kRows);
  at.batch = int64_t(quotient(uint64_t(at.row), uint64_t(params.seqlen)));
  at.token = at.row - at.batch * params.seqlen;
  return at;
}

__device__ __forceinline__ float load_lse(AttentionState const& state, Elements const& at) {
  return state.lse[at.batch * state.lse_strides[0] + at.head * state.lse_strides[1] + at.token * state.lse_strides[2]];
}

template <class T, int kWidth>
__device__ __forceinline__ AlignedVector<T, kWidth> load_out(AttentionState const& state, Elements const& at) {
  int64_t const line = at.batch * state.out_strides[0] + at.token * state.out_strides[1] + at.head * state.out_strides[2];
  T const* const first = static_cast<T const*>(state.out) + line + at.column * state.out_strides[3];
  return *reinterpret_cast<AlignedVector<T, kWidth> const*>(first);
}

/// T: the type of the states' outs; Out: the type that is written.
template <class T, class Out, int kWidth>
__global__ void __launch_bounds__(kThreads) merge_states_kernel(__grid_constant__ MergeParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  Elements const at = elements_of<kWidth>(params, uint64_t(blockIdx.x) * kThreads + threadIdx.x);
  if (at.row >= params.rows) return;
  bool const filled = at.column < params.head_dim;  // with a head_dim of 0, there are lses all the same
  int64_t const own_line = (at.row * params.heads + at.head) * params.head_dim + at.column;
  int64_t const own_lse = (at.batch * params.heads + at.head) * params.seqlen + at.token;

  AlignedVector<T, kWidth> part[kTogether];
  auto const load_states = [&](uint32_t first) {
#pragma unroll
    for (uint32_t j = 0; j < kTogether; ++j) {
      if (filled && first + j < params.count) part[j] = load_out<T, kWidth>(params.state[first + j], at);
    }
  };
  load_states(0);
  float max_lse = params.sum_out == nullptr ? -INFINITY : params.sum_lse[own_lse];
  float const sum_lse = max_lse;
#pragma unroll 4
  for (uint32_t i = 0; i < params.count; ++i) max_lse = fmaxf(max_lse, load_lse(params.state[i], at));
  float const base = max_lse == -INFINITY ? 0.0f : max_lse;  // -inf - -inf would be NaN

  float total = 0.0f, sum[kWidth] = {};
  if (params.sum_out != nullptr) {
    total = expf(sum_lse - base);
    if (filled && total != 0.0f) {
      AlignedVector<float, kWidth> const before = *reinterpret_cast<AlignedVector<float, kWidth> const*>(params.sum_out + own_line);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] = total * before.value[e];
    }
  }
#pragma unroll 1
  for (uint32_t first = 0; first < params.count; first += kTogether) {
    float weight[kTogether];
#pragma unroll
    for (uint32_t j = 0; j < kTogether; ++j) {
      weight[j] = first + j < params.count ? expf(load_lse(params.state[first + j], at) - base) : 0.0f;
    }
#pragma unroll
    for (uint32_t j = 0; j < kTogether; ++j) {
      total += weight[j];
      if (filled && weight[j] != 0.0f) {  // a weight of 0 skips NaN, too
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sum[e] = fmaf(weight[j], to_float(part[j].value[e]), sum[e]);
      }
    }
    load_states(first + kTogether);
  }
  if (at.column == 0) params.lse[own_lse] = base + logf(total);
  if (!filled) return;
  float const scale = total == 0.0f ? 0.0f : 1.0f / total;
  AlignedVector<Out, kWidth> rounded;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) rounded.value[e] = from_float<Out>(sum[e] * scale);
  *reinterpret_cast<AlignedVector<Out, kWidth>*>(static_cast<Out*>(params.out) + own_line) = rounded;
}

// ---- launch ------------------------------------------------------------------------------------------------------------------------

/// Whether 16 bytes of every out are one access.
bool is_wide(AttentionMerge const& merge) {
  int64_t const width = 16 / size_of(merge.type), sizes[] = {merge.batch, merge.seqlen, merge.heads};
  bool wide = merge.head_dim_v % width == 0 && begins_vector(merge.out);
  for (int64_t i = 0; wide && i < merge.count; ++i) {
    AttentionState const& state = merge.states[i];
    wide = begins_vector(state.out) && state.out_strides[3] == 1;
    for (int mode = 0; mode < 3; ++mode) wide = wide && (sizes[mode] <= 1 || state.out_strides[mode] % width == 0);
  }
  return wide;
}

template <class T, class Out, int kWidth>
Status launch_merge(MergeParams const& params, bool programmatic, Stream stream) {
  MergeParams launch_params = params;
  launch_params.vectors = std::max<uint32_t>(params.head_dim / kWidth, 1);
  int64_t const blocks = (params.rows + kRows - 1) / kRows, lines = int64_t(params.heads) * launch_params.vectors;
  if (blocks > int64_t(0x7fffffff) * kThreads / kRows / lines) {
    return Status::failure(StatusCode::kNotSupported, "%lld rows of %u heads of %u elements are more than a launch covers",
                           (long long)params.rows, params.heads, params.head_dim);
  }
  int64_t const items = blocks * kRows * lines;
  LaunchShape shape;
  shape.grid = dim3(unsigned((items + kThreads - 1) / kThreads));
  shape.threads = kThreads;
  shape.programmatic = programmatic;
  shape.stream = stream;
  return launch(shape, "launch of merge_attention_states", &merge_states_kernel<T, Out, kWidth>, launch_params);
}

template <class T>
Status launch_type(MergeParams const& params, bool wide, bool last, bool programmatic, Stream stream) {
  constexpr int kWidth = 16 / int(sizeof(T));
  if (last) {
    return wide ? launch_merge<T, T, kWidth>(params, programmatic, stream) : launch_merge<T, T, 1>(params, programmatic, stream);
  }
  return wide ? launch_merge<T, float, kWidth>(params, programmatic, stream) : launch_merge<T, float, 1>(params, programmatic, stream);
}

}  // namespace
}  // namespace attention

Status merge_attention_states(AttentionMerge const& merge, void* workspace, size_t workspace_bytes, bool programmatic, Stream stream) {
  using namespace attention;
  if (merge.count < 1) return Status::failure(StatusCode::kInvalidArgument, "%lld states", (long long)merge.count);
  if (merge.batch == 0 || merge.seqlen == 0 || merge.heads == 0) return Status::success();
  if (std::max(merge.heads, merge.head_dim_v) > 0x7fffffff) {
    return Status::failure(StatusCode::kNotSupported, "%lld heads of %lld elements are more than a launch covers", (long long)merge.heads,
                           (long long)merge.head_dim_v);
  }
  size_t const needed = merge_attention_states_workspace(merge);
  if (workspace_bytes < needed) {
    return Status::failure(StatusCode::kWorkspaceTooSmall, "workspace of %zu bytes, %zu are needed", workspace_bytes, needed);
  }
  MergeWorkspace const layout(merge);
  uint8_t* const base = static_cast<uint8_t*>(workspace);
  bool const wide = is_wide(merge);
  MergeParams params{};
  params.rows = merge.batch * merge.seqlen;
  params.seqlen = merge.seqlen;
  params.heads = uint32_t(merge.heads);
  params.head_dim = uint32_t(merge.head_dim_v);
  for (int64_t first = 0, step = 0; first < merge.count; first += kMergedStates, ++step) {
    int64_t const count = std::min(kMergedStates, merge.count - first);
    bool const last = first + count == merge.count;
    std::copy_n(merge.states + first, count, params.state);
    params.count = uint32_t(count);
    if (last) {
      params.out = merge.out;
      params.lse = merge.lse;
    } else {
      params.out = base;
      params.lse = reinterpret_cast<float*>(base + layout.out_bytes + step % 2 * layout.lse_bytes);
    }
    Status status;
    switch (merge.type) {
      case DataType::kF16: status = launch_type<__half>(params, wide, last, programmatic, stream); break;
      case DataType::kBF16: status = launch_type<__nv_bfloat16>(params, wide, last, programmatic, stream); break;
      case DataType::kF32: status = launch_type<float>(params, wide, last, programmatic, stream); break;
      default: status = Status::failure(StatusCode::kInvalidArgument, "states of type %s", name_of(merge.type));
    }
    if (!status.ok()) return status;
    params.sum_out = reinterpret_cast<float const*>(base);
    params.sum_lse = params.lse;
  }
  return Status::success();
}

}  // namespace minfer
