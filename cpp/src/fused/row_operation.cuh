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
// combine() of (a, b) and of (b, a) have the same bits, so that all threads of a butterfly end with the same.

struct Total {
  static constexpr int kFloats = 1;
  float v[kFloats] = {0.0f};
  __device__ __forceinline__ void combine(Total const& b) { v[0] += b.v[0]; }
};

struct SumAndMaximum {
  static constexpr int kFloats = 2;
  float v[kFloats] = {0.0f, 0.0f};  // the maximum is of magnitudes; NaN is left out of it
  __device__ __forceinline__ void combine(SumAndMaximum const& b) {
    v[0] += b.v[0];
    v[1] = fmaxf(v[1], b.v[1]);
  }
};

/// The largest number, and the sum of the exponentials of the differences from it. Source: Milakov and Gimelshein, 2018.
template <bool kExact>
struct Exponentials {
  static constexpr int kFloats = 2;
  float v[kFloats] = {-__builtin_inff(), 0.0f};
  __device__ __forceinline__ void combine(Exponentials const& b) {
    float const largest = fmaxf(v[0], b.v[0]);
    auto const factor = [&](float own) { return own == largest ? 1.0f : exponential<kExact>(own - largest); };
    v[1] = __fadd_rn(__fmul_rn(v[1], factor(v[0])), __fmul_rn(b.v[1], factor(b.v[0])));
    v[0] = largest;
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
    for (int i = 0; i < kVectorElements; ++i) v[i] = v[i] * (beside.weight[i] + params.weight_offset) * row.scale;
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

/// A weight's or a bias' numbers, or the one that stands for none.
template <class T>
__device__ __forceinline__ void unpack_factors(void const* given, RowVector<T> const& loaded, float other, float (&v)[kVectorElements]) {
  if (given != nullptr) {
    unpack(loaded, v);
  } else {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) v[i] = other;
  }
}
template <bool kFast, class T>
__device__ __forceinline__ void load_factors(void const* given, uint32_t at, int count, float other, float (&v)[kVectorElements]) {
  unpack_factors(given, load_vector<false>(static_cast<T const*>(given), at, given != nullptr ? count : 0, kFast), other, v);
}
/// All numbers beside 8 elements that are not the row's own.
template <RowOperation kOperation, bool kFast, class T>
__device__ __forceinline__ void load_beside(RowParams const& params, uint32_t at, int count, Beside* beside) {
  if constexpr (is_norm(kOperation)) load_factors<kFast, T>(params.weight, at, count, 1.0f, beside->weight);
  if constexpr (has_bias(kOperation)) load_factors<kFast, T>(params.bias, at, count, 0.0f, beside->bias);
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
