#include "attention/attention_reference.h"

#include <cmath>

#include "common/check.h"
#include "common/element.cuh"

namespace minfer::bench {
namespace {

constexpr int kThreads = 256, kHeadThreads = 1024;

__device__ double e4m3(uint8_t bits) {
  int const exponent = bits >> 3 & 15, mantissa = bits & 7;
  double const magnitude = exponent == 0 ? ldexp(double(mantissa), -9) : ldexp(double(8 + mantissa), exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

/// K or V, in a tensor or a cache.
struct KvView {
  void const *codes, *scale, *residual;
  int64_t page_stride, row_stride, head_stride;  // of codes; of tensors, a page is a sequence
  int64_t head_dim;
  bool keys;
};

struct ReferenceParams {
  AttentionProblem problem;
  AttentionOperands operands;
  int64_t sequence, query, keys;  // keys: that the query sees, the first of the sequence
  bool rounds_keys;
  KvView k, v;
  double* scores;
  float *out, *lse;
};

__device__ double value_of(ReferenceParams const& params, KvView const& view, int64_t token, int64_t head, int64_t d) {
  AttentionProblem const& p = params.problem;
  int64_t const rows = p.cached ? p.page_size : p.seqlen_k, b = params.sequence;
  int64_t const page = p.paged ? params.operands.block_table[b * params.operands.block_table_stride + token / rows] : b, row = token % rows;
  int64_t const place = page * view.page_stride + row * view.row_stride + head * view.head_stride;
  switch (p.kv_format) {
    case WeightFormat::kFp8E4M3:
      return e4m3(static_cast<uint8_t const*>(view.codes)[place + d]) * double(static_cast<float const*>(view.scale)[head]);
    case WeightFormat::kInt8:
      return double(static_cast<int8_t const*>(view.codes)[place + d]) *
             double(static_cast<float const*>(view.scale)[(page * p.heads_kv + head) * rows + row]);
    case WeightFormat::kInt4: break;
    default: return load(view.codes, p.type, place + d);
  }
  int64_t const in_codes = p.seqlen_k / p.group_tokens * p.group_tokens;
  if (token >= in_codes) {
    return load(view.residual, p.type, ((b * p.group_tokens + token - in_codes) * p.heads_kv + head) * view.head_dim + d);
  }
  uint8_t const pair = static_cast<uint8_t const*>(view.codes)[place + d / 2];
  int const code = d % 2 == 0 ? pair & 15 : pair >> 4;
  int64_t scale, minimum;
  if (view.keys) {
    scale = (((page * p.heads_kv + head) * (rows / p.group_tokens) + row / p.group_tokens) * 2) * view.head_dim + d;
    minimum = scale + view.head_dim;
  } else {
    scale = ((page * p.heads_kv + head) * 2 * p.groups_v + d / (view.head_dim / p.groups_v)) * rows + row;
    minimum = scale + p.groups_v * rows;
  }
  return code * load(view.scale, DataType::kF16, scale) + load(view.scale, DataType::kF16, minimum);
}

__global__ void scores_kernel(ReferenceParams const params) {
  AttentionProblem const& p = params.problem;
  int64_t const key = int64_t(blockIdx.x) * kThreads + threadIdx.x, head = blockIdx.y;
  if (key >= params.keys) return;
  int64_t const q = ((params.sequence * p.seqlen_q + params.query) * p.heads_q + head) * p.head_dim;
  double sum = 0;
  for (int64_t d = 0; d < p.head_dim; ++d) {
    double k = value_of(params, params.k, key, head / (p.heads_q / p.heads_kv), d);
    if (params.rounds_keys)
      k = p.type == DataType::kF16 ? double(__half2float(__double2half(k))) : double(__bfloat162float(__double2bfloat16(k)));
    sum += load(params.operands.q, p.type, q + d) * k;
  }
  params.scores[head * p.seqlen_k + key] = sum * double(params.operands.softmax.scale);
}

/// Of all threads, to all threads.
template <class Combine>
__device__ double reduce(double value, double* shared, Combine const& combine) {
  __syncthreads();
  shared[threadIdx.x] = value;
  for (int half = kHeadThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  __syncthreads();
  return shared[0];
}

__global__ void __launch_bounds__(kHeadThreads) softmax_kernel(ReferenceParams const params) {
  __shared__ double shared[kHeadThreads];
  AttentionProblem const& p = params.problem;
  int64_t const head = blockIdx.x;
  double* const scores = params.scores + head * p.seqlen_k;
  double highest = -INFINITY, total = 0;
  for (int64_t key = threadIdx.x; key < params.keys; key += kHeadThreads) highest = fmax(highest, scores[key]);
  highest = reduce(highest, shared, [](double a, double b) { return fmax(a, b); });
  for (int64_t key = threadIdx.x; key < params.keys; key += kHeadThreads) {
    scores[key] = exp(scores[key] - highest);
    total += scores[key];
  }
  total = reduce(total, shared, [](double a, double b) { return a + b; });  // ends with a barrier: exponentials are there
  if (threadIdx.x == 0) params.lse[head] = params.keys > 0 ? float(highest + log(total)) : -INFINITY;
  // Shares of the keys lie side by side; the column's first thread adds them.
  int const columns = int(p.head_dim_v), shares = kHeadThreads / columns;
  int const column = int(threadIdx.x) % columns, share = int(threadIdx.x) / columns;
  double sum = 0;
  if (share < shares) {
    for (int64_t key = share; key < params.keys; key += shares) {
      sum += scores[key] * value_of(params, params.v, key, head / (p.heads_q / p.heads_kv), column);
    }
  }
  __syncthreads();
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (share != 0) return;
  for (int other = 1; other < shares; ++other) sum += shared[other * columns + column];
  params.out[head * columns + column] = params.keys > 0 ? float(sum / total) : 0.0f;
}

}  // namespace

void attention_reference(AttentionProblem const& problem, AttentionOperands const& operands, bool rounds_keys, int64_t sequence,
                         int64_t query, double* scores, float* out, float* lse, cudaStream_t stream) {
  int64_t const aligned = query + problem.seqlen_k - problem.seqlen_q + 1;
  int64_t const keys = problem.window_right < 0 ? problem.seqlen_k : aligned < 0 ? 0 : aligned;
  AttentionOperands const& o = operands;
  ReferenceParams const params{problem,
                               operands,
                               sequence,
                               query,
                               keys,
                               rounds_keys,
                               {o.k, o.k_scale, o.k_residual, o.k_strides[0], o.k_strides[1], o.k_strides[2], problem.head_dim, true},
                               {o.v, o.v_scale, o.v_residual, o.v_strides[0], o.v_strides[1], o.v_strides[2], problem.head_dim_v, false},
                               scores,
                               out,
                               lse};
  if (keys > 0) {
    scores_kernel<<<dim3(unsigned((keys + kThreads - 1) / kThreads), unsigned(problem.heads_q)), kThreads, 0, stream>>>(params);
    check(cudaGetLastError(), "attention_reference");
  }
  softmax_kernel<<<unsigned(problem.heads_q), kHeadThreads, 0, stream>>>(params);
  check(cudaGetLastError(), "attention_reference");
}

}  // namespace minfer::bench
