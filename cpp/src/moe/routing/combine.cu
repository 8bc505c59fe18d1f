// Sums the rows of a token: out[t] = sum over j of weights[t, j] * y[inverse[t, j]], in fp32 and in the order of j.
//
// A CTA is 128 threads of one token. A thread sums 16 bytes of its columns and has the loads of eight rows in flight, which hides their
// latency. Where the bases, the row stride or n do not allow 16-byte accesses, a thread sums one element.
#include "common/aligned_vector.cuh"
#include "common/dependent_launch.cuh"
#include "common/float16.cuh"
#include "common/kernel_launch.h"
#include "minfer/moe_routing.h"

namespace minfer {

namespace moe {
namespace {

constexpr int kThreads = 128, kTogether = 8;  // kTogether: rows in flight

template <class T>
struct CombineParams {
  T const* y;              // [rows, n]
  int32_t const* inverse;  // [tokens, top_k]
  float const* weights;    // [tokens, top_k], or null: ones
  T* out;                  // [tokens, n]
  int64_t rows, ld;
  int32_t n, top_k;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) combine_kernel(__grid_constant__ CombineParams<T> const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  int64_t const token = blockIdx.x, column = (int64_t(blockIdx.y) * kThreads + threadIdx.x) * kWidth;
  if (column >= params.n) return;
  int32_t const* inverse = params.inverse + token * params.top_k;
  float const* weights = params.weights == nullptr ? nullptr : params.weights + token * params.top_k;
  float sum[kWidth] = {};
#pragma unroll 1
  for (int first = 0; first < params.top_k; first += kTogether) {
    int64_t row[kTogether];
    float weight[kTogether];
    AlignedVector<T, kWidth> part[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      bool const inside = first + j < params.top_k;
      row[j] = inside ? inverse[first + j] : -1;
      weight[j] = inside && weights != nullptr ? weights[first + j] : 1.0f;
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (uint64_t(row[j]) < uint64_t(params.rows)) {
        part[j] = *reinterpret_cast<AlignedVector<T, kWidth> const*>(params.y + row[j] * params.ld + column);
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (uint64_t(row[j]) < uint64_t(params.rows)) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] = fmaf(weight[j], to_float(part[j].value[i]), sum[i]);
      }
    }
  }
  AlignedVector<T, kWidth> rounded;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) rounded.value[i] = from_float<T>(sum[i]);
  *reinterpret_cast<AlignedVector<T, kWidth>*>(params.out + token * params.n + column) = rounded;
}

template <class T>
Status launch_combine(ExpertSum const& sum, bool programmatic, Stream stream) {
  constexpr int kWidth = 16 / int(sizeof(T));
  CombineParams<T> params{static_cast<T const*>(sum.y),
                          sum.inverse,
                          sum.weights,
                          static_cast<T*>(sum.out),
                          sum.rows,
                          sum.ld,
                          int32_t(sum.n),
                          int32_t(sum.top_k)};
  bool const wide = begins_vector(sum.y) && begins_vector(sum.out) && sum.n % kWidth == 0 && (sum.rows <= 1 || sum.ld % kWidth == 0);
  int64_t const columns = (wide ? sum.n / kWidth : sum.n), chunks = (columns + kThreads - 1) / kThreads;
  if (sum.tokens > 0x7fffffff || chunks > 65535 || sum.n > 0x7fffffff) {
    return Status::failure(StatusCode::kNotSupported, "[%lld, %lld] is more than a launch covers", (long long)sum.tokens, (long long)sum.n);
  }
  LaunchShape shape;
  shape.grid = dim3(unsigned(sum.tokens), unsigned(chunks));
  shape.threads = kThreads;
  shape.programmatic = programmatic;
  shape.stream = stream;
  return wide ? launch(shape, "launch of moe_combine", &combine_kernel<T, kWidth>, params)
              : launch(shape, "launch of moe_combine", &combine_kernel<T, 1>, params);
}

}  // namespace
}  // namespace moe

Status sum_experts(ExpertSum const& sum, bool programmatic, Stream stream) {
  if (sum.tokens == 0 || sum.n == 0) return Status::success();
  switch (sum.type) {
    case DataType::kF16: return moe::launch_combine<__half>(sum, programmatic, stream);
    case DataType::kBF16: return moe::launch_combine<__nv_bfloat16>(sum, programmatic, stream);
    case DataType::kF32: return moe::launch_combine<float>(sum, programmatic, stream);
    default: return Status::failure(StatusCode::kInvalidArgument, "y of type %s", name_of(sum.type));
  }
}

}  // namespace minfer
