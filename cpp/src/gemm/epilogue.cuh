// Epilogue arithmetic shared by all GEMM kernels: D = activation(alpha * acc + beta * C + bias), gated D = act(gate) * up.
//
// Everything is a run-time value: null or non-null C and bias, activation, output type. Activations other than relu are one formula,
//   act(x) = x * sigmoid(x * P(x^2)),
// with the polynomial P in the kernel's parameters: silu P = 1, gelu_tanh P = sqrt(8/pi) (1 + 0.044715 x^2), and the erf gelu a degree-6
// weighted minimax fit of logit(Phi(x)) / x on |x| <= 5.5 (|error of gelu| < 1e-7). So no kernel is instantiated per activation and no
// epilogue carries five copies of its loop.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "minfer/gemm.h"

namespace minfer::gemm {

struct ActivationParams {
  static constexpr int kTerms = 7;
  bool relu = false;
  bool smooth = false;
  float clamp = 0.0f;     // x^2 is clamped here before P
  float p[kTerms] = {0};  // P's coefficients in powers of x^2
};

inline ActivationParams make_activation(Activation activation) {
  ActivationParams a;
  switch (activation) {
    case Activation::kNone: break;
    case Activation::kRelu: a.relu = true; break;
    case Activation::kSilu:
      a.smooth = true;
      a.p[0] = 1.0f;
      break;
    case Activation::kGeluTanh:
      a.smooth = true;
      a.clamp = 64.0f;
      a.p[0] = 1.5957691216f;
      a.p[1] = 0.0713548163f;
      break;
    case Activation::kGelu: {
      a.smooth = true;
      a.clamp = 30.25f;
      constexpr float kFit[ActivationParams::kTerms] = {1.5957684517f,    0.0726685748f,     -6.62654493e-05f, -1.1047856970e-04f,
                                                        7.937954251e-06f, -2.668744798e-07f, 3.610771460e-09f};
      for (int i = 0; i < ActivationParams::kTerms; ++i) a.p[i] = kFit[i];
      break;
    }
  }
  return a;
}

/// The caller's D, C and bias. m and n index the caller's matrices, also in a swapped kernel; n counts B's columns.
struct EpilogueParams {
  void* d;
  void const* c;     // null: no C
  void const* bias;  // null: none
  int64_t ldd, d_batch_stride;
  int64_t c_stride_m, c_stride_n, c_batch_stride;
  int32_t m, n;
  float alpha, beta;
  ActivationParams activation;
  bool gated;
  bool d_f32, c_f32, bias_f32;
};

inline EpilogueParams make_epilogue(GemmProblem const& problem, GemmOperands const& operands) {
  EpilogueParams e{};
  e.d = operands.d;
  e.c = problem.has_c ? operands.c : nullptr;
  e.bias = operands.bias;
  e.ldd = operands.ldd;
  e.d_batch_stride = operands.d_batch_stride;
  e.c_stride_m = operands.c_stride_m;
  e.c_stride_n = operands.c_stride_n;
  e.c_batch_stride = operands.c_batch_stride;
  e.m = int32_t(problem.m);
  e.n = int32_t(problem.n);
  e.alpha = operands.alpha;
  e.beta = operands.beta;
  e.activation = make_activation(operands.activation);
  e.gated = problem.gated;
  e.d_f32 = problem.d_type == DataType::kF32;
  e.c_f32 = operands.c_type == DataType::kF32;
  e.bias_f32 = operands.bias_type == DataType::kF32;
  return e;
}

/// Columns of B per interleaved block of a gated weight: 8 gate columns, then 8 up columns.
constexpr int kGateBlock = 8;

#if defined(__CUDACC__)

template <DataType kType>
struct ElementOf;
template <>
struct ElementOf<DataType::kF16> {
  using Type = __half;
  using Pair = __half2;
  static __device__ float to_float(Type v) { return __half2float(v); }
  static __device__ Type from_float(float v) { return __float2half_rn(v); }
  static __device__ uint32_t pack(float lo, float hi) {
    Pair p = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&p);
  }
  static __device__ float2 unpack(uint32_t v) { return __half22float2(*reinterpret_cast<Pair*>(&v)); }
};
template <>
struct ElementOf<DataType::kBF16> {
  using Type = __nv_bfloat16;
  using Pair = __nv_bfloat162;
  static __device__ float to_float(Type v) { return __bfloat162float(v); }
  static __device__ Type from_float(float v) { return __float2bfloat16_rn(v); }
  static __device__ uint32_t pack(float lo, float hi) {
    Pair p = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t*>(&p);
  }
  static __device__ float2 unpack(uint32_t v) { return __bfloat1622float2(*reinterpret_cast<Pair*>(&v)); }
};

__device__ __forceinline__ float activate(ActivationParams const& a, float x) {
  if (a.smooth) {
    float const t = fminf(x * x, a.clamp);
    float q = a.p[ActivationParams::kTerms - 1];
#pragma unroll
    for (int i = ActivationParams::kTerms - 2; i >= 0; --i) q = fmaf(q, t, a.p[i]);
    // x * sigmoid(x q); exp2f and the reciprocal are the approximate instructions (2 ulp), an infinite exponential gives x * 0
    float const e = exp2f(-1.4426950409f * x * q);
    return __fdividef(x, 1.0f + e);
  }
  return a.relu ? (x < 0.0f ? 0.0f : x) : x;
}

template <DataType kType>
__device__ __forceinline__ float load_c(EpilogueParams const& e, int m, int n, int l) {
  int64_t const offset = l * e.c_batch_stride + m * e.c_stride_m + n * e.c_stride_n;
  return e.c_f32 ? static_cast<float const*>(e.c)[offset]
                 : ElementOf<kType>::to_float(static_cast<typename ElementOf<kType>::Type const*>(e.c)[offset]);
}

template <DataType kType>
__device__ __forceinline__ float load_bias(EpilogueParams const& e, int n) {
  return e.bias_f32 ? __ldg(static_cast<float const*>(e.bias) + n)
                    : ElementOf<kType>::to_float(static_cast<typename ElementOf<kType>::Type const*>(e.bias)[n]);
}

/// alpha * acc + beta * C + bias at (m, n) of batch l, before the activation; (m, n) is inside the matrix.
template <DataType kType>
__device__ __forceinline__ float affine(EpilogueParams const& e, float accumulator, int m, int n, int l) {
  float v = e.alpha * accumulator;
  if (e.c != nullptr) v = fmaf(e.beta, load_c<kType>(e, m, n, l), v);
  if (e.bias != nullptr) v += load_bias<kType>(e, n);
  return v;
}

template <DataType kType>
__device__ __forceinline__ void store_d(EpilogueParams const& e, float v, int m, int n_out, int l) {
  int64_t const offset = l * e.d_batch_stride + m * e.ldd + n_out;
  if (e.d_f32) {
    static_cast<float*>(e.d)[offset] = v;
  } else {
    static_cast<typename ElementOf<kType>::Type*>(e.d)[offset] = ElementOf<kType>::from_float(v);
  }
}

/// Writes the outputs of a rectangle of accumulators, element by element and coalesced along n: any alignment, any C, any output type, gated
/// or not. `accumulator(row, column)` reads the rectangle in the caller's orientation, row = m - m0 and column = n - n0; n0 is a multiple of 16
/// when gated.
template <DataType kType, class Accumulator>
__device__ __forceinline__ void store_rectangle(EpilogueParams const& e, int m0, int n0, int l, int rows, int columns, int thread,
                                                int threads, Accumulator&& accumulator) {
  int const outputs = e.gated ? columns / 2 : columns;
  for (int i = thread; i < rows * outputs; i += threads) {
    int const row = i / outputs;
    int const column = i - row * outputs;
    int const m = m0 + row;
    if (m >= e.m) continue;
    if (e.gated) {
      int const gate = column / kGateBlock * (2 * kGateBlock) + column % kGateBlock;
      int const up = gate + kGateBlock;
      if (n0 + up >= e.n) continue;
      float const g = affine<kType>(e, accumulator(row, gate), m, n0 + gate, l);
      float const u = affine<kType>(e, accumulator(row, up), m, n0 + up, l);
      store_d<kType>(e, activate(e.activation, g) * u, m, n0 / 2 + column, l);
    } else if (n0 + column < e.n) {
      store_d<kType>(e, activate(e.activation, affine<kType>(e, accumulator(row, column), m, n0 + column, l)), m, n0 + column, l);
    }
  }
}

#endif

}  // namespace minfer::gemm
