// What is computed of a row: its statistics, and a result of each element, by operation (minfer::RowOperation).
//
// Statistics are taken by each thread of its own elements, and are then combined pair by pair.
#pragma once

#include "fused/row_vector.cuh"

namespace minfer::fused {

/// exp(x) of x <= 0, off by 2^-21 of itself where kExact, else by |x| 2^-24 in addition: nothing to a 16-bit result.
template <bool kExact>
__device__ __forceinline__ float exponential(float x) {
  constexpr float kLog2E = 1.44269502f, kRest = 1.92596303e-8f, kLn2 = 0.693147182f;
  float const power = x * kLog2E, e = approximate_exp2(power);
  if constexpr (!kExact) return e;
  float const rest = fmaf(x, kRest, fmaf(x, kLog2E, -power));  // of the power, which is rounded
  return power < -150.0f ? e : fmaf(e, rest * kLn2, e);        // of -inf there is none
}

// ---- what threads combine ------------------------------------------------------------------------------------------------------------
// combine() of (a, b) and of (b, a) have the same bits, so that all threads of a butterfly end with the same. Maxima leave NaN out.

struct Total {
  static constexpr int kFloats = 1;
  float v[kFloats] = {0.0f};
  __device__ __forceinline__ void combine(Total const& b) { v[0] += b.v[0]; }
};

struct Maximum {
  static constexpr int kFloats = 1;
  float v[kFloats] = {-__builtin_inff()};
  __device__ __forceinline__ void combine(Maximum const& b) { v[0] = fmaxf(v[0], b.v[0]); }
};

struct SumAndMagnitude {
  static constexpr int kFloats = 2;
  float v[kFloats] = {0.0f, 0.0f};
  __device__ __forceinline__ void combine(SumAndMagnitude const& b) {
    v[0] += b.v[0];
    v[1] = fmaxf(v[1], b.v[1]);
  }
};

/// What the results need of the row. softmax: the largest, and the inverse of the sum, or its logarithm.
struct RowSummary {
  float shift = 0.0f, scale = 0.0f;
};

// ---- results -------------------------------------------------------------------------------------------------------------------------

/// The factors of a norm or the bias of an activation, and a gate's up: numbers beside the 8 of x.
struct Beside {
  float weight[kVectorElements], bias[kVectorElements], up[kVectorElements];
};

/// v becomes the results of the 8 elements, in fp32.
template <RowOperation kOperation, bool kExact>
__device__ __forceinline__ void finish(RowParams const& params, RowSummary const& row, Beside& beside, float (&v)[kVectorElements]) {
  if constexpr (kOperation == RowOperation::kRmsNorm) {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) v[i] = v[i] * beside.weight[i] * row.scale;
  } else if constexpr (kOperation == RowOperation::kLayerNorm) {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) v[i] = fmaf((v[i] - row.shift) * row.scale, beside.weight[i], beside.bias[i]);
  } else if constexpr (kOperation == RowOperation::kSoftmax) {
    if (params.logarithm) {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) v[i] = v[i] - row.shift - row.scale;
    } else {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) v[i] = exponential<kExact>(v[i] - row.shift) * row.scale;
    }
  } else if constexpr (kOperation == RowOperation::kActivation) {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) v[i] += beside.bias[i];
    activate_all<kVectorElements>(params.activation, [&](int i) -> float& { return v[i]; });
  } else if constexpr (kOperation == RowOperation::kGatedActivation) {
    auto& up = beside.up;
    if (params.gate_layout == GateLayout::kAlternating) {
      float pairs[2 * kVectorElements];
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) pairs[i] = v[i], pairs[kVectorElements + i] = up[i];
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) v[i] = pairs[2 * i], up[i] = pairs[2 * i + 1];
    }
    if (params.clamps) {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {  // NaN stays
        v[i] = v[i] > params.gate_max ? params.gate_max : v[i];
        up[i] = (up[i] > params.up_max ? params.up_max : up[i] < -params.up_max ? -params.up_max : up[i]) + params.up_shift;
      }
    }
    activate_all<kVectorElements>(params.activation, [&](int i) -> float& { return v[i]; });
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) v[i] *= up[i];
  }
}

constexpr bool is_norm(RowOperation operation) { return operation == RowOperation::kRmsNorm || operation == RowOperation::kLayerNorm; }
constexpr bool has_bias(RowOperation operation) { return operation == RowOperation::kLayerNorm || operation == RowOperation::kActivation; }

/// The CUDA type of a kernel's rows.
template <DataType kType>
using RowType = std::conditional_t<kType == DataType::kF16, __half, std::conditional_t<kType == DataType::kBF16, __nv_bfloat16, float>>;

/// Eight weights, ones where there is none, or eight biases, else zeros: loaded where there is one, and unpacked alike.
template <class T>
__device__ __forceinline__ RowVector<T> constant_vector(float of) {
  float v[kVectorElements];
#pragma unroll
  for (int i = 0; i < kVectorElements; ++i) v[i] = of;
  return pack<T>(v);
}
template <bool kFast, class T>
__device__ __forceinline__ void load_factors(void const* given, uint32_t at, int count, RowVector<T>* factors) {
  if (given != nullptr) *factors = load_vector<false>(static_cast<T const*>(given), at, count, kFast);
}
template <class T>
__device__ __forceinline__ void unpack_weight(RowParams const& params, RowVector<T> const& weight, float (&v)[kVectorElements]) {
  unpack(weight, v);
  if (params.weight_offset != 0.0f) {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) v[i] += params.weight_offset;
  }
}

/// Where the gates and ups of outputs at, .., at + 7 are, of which there are `count`: halves of a row, or 16 consecutive elements.
struct GateVectors {
  uint32_t first, second;  // columns
  int first_count, second_count;

  __device__ __forceinline__ GateVectors(RowParams const& params, uint32_t at, int count) {
    bool const halves = params.gate_layout == GateLayout::kHalves, pairs = params.gate_layout == GateLayout::kAlternating;
    first = halves ? at : 2 * at;
    second = halves ? params.width + at : 2 * at + kVectorElements;
    first_count = halves ? count : min(2 * count, kVectorElements);
    second_count = pairs ? max(2 * count - kVectorElements, 0) : count;
  }
};

}  // namespace minfer::fused
