// Epilogue arithmetic shared by all GEMM kernels: D = activation(alpha * acc + beta * C + bias), gated D = act(gate) * up.
//
// Everything is a run-time value: null or non-null C and bias, activation, output type. Activations other than relu are one formula,
//   act(x) = x * sigmoid(x * P(x^2)),
// with the polynomial P in the kernel's parameters: silu P = 1, gelu_tanh P = sqrt(8/pi) (1 + 0.044715 x^2), and the erf gelu a degree-6
// weighted minimax fit of logit(Phi(x)) / x on |x| <= 5.5 (|error of gelu| < 1e-7). So no kernel is instantiated per activation.
#pragma once

#include <cstdint>

#include "minfer/gemm.h"

#if defined(__CUDACC__)
#include "common/float16.cuh"
#endif

namespace minfer::gemm {

struct ActivationParams {
  enum class Kind : int8_t { kNone, kRelu, kConstant, kPolynomial };  // kConstant: P = p[0]
  static constexpr int kTerms = 7;
  Kind kind = Kind::kNone;
  float clamp = 0.0f;     // x^2 is clamped here before P
  float p[kTerms] = {0};  // P's coefficients in powers of x^2, times -log2(e): sigmoid(y) = 1 / (1 + 2^(-log2(e) y))
};

inline ActivationParams make_activation(Activation activation) {
  using Kind = ActivationParams::Kind;
  ActivationParams a;
  switch (activation) {
    case Activation::kNone: break;
    case Activation::kRelu: a.kind = Kind::kRelu; break;
    case Activation::kSilu:
      a.kind = Kind::kConstant;
      a.p[0] = 1.0f;
      break;
    case Activation::kGeluTanh:
      a.kind = Kind::kPolynomial;
      a.clamp = 64.0f;
      a.p[0] = 1.5957691216f;
      a.p[1] = 0.0713548163f;
      break;
    case Activation::kGelu: {
      a.kind = Kind::kPolynomial;
      a.clamp = 30.25f;
      constexpr float kFit[ActivationParams::kTerms] = {1.5957684517f,    0.0726685748f,     -6.62654493e-05f, -1.1047856970e-04f,
                                                        7.937954251e-06f, -2.668744798e-07f, 3.610771460e-09f};
      for (int i = 0; i < ActivationParams::kTerms; ++i) a.p[i] = kFit[i];
      break;
    }
  }
  for (float& coefficient : a.p) coefficient *= -1.4426950409f;
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

/// x * sigmoid(y) with y_log2 = -log2(e) y. Both approximate instructions are good to 2 ulp; an infinite power of two gives x * 0.
__device__ __forceinline__ float times_sigmoid(float x, float y_log2) {
  float power, sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(y_log2));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + power));
  return x * sigmoid;
}

/// Activates the kCount values that `at(i)` refers to: one branch for all of them, so that their instructions interleave.
template <int kCount, class At>
__device__ __forceinline__ void activate_all(ActivationParams const& a, At&& at) {
  using Kind = ActivationParams::Kind;
  if (a.kind == Kind::kPolynomial) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float const x = at(i), t = fminf(x * x, a.clamp);
      float q = a.p[ActivationParams::kTerms - 1];
#pragma unroll
      for (int term = ActivationParams::kTerms - 2; term >= 0; --term) q = fmaf(q, t, a.p[term]);
      at(i) = times_sigmoid(x, x * q);
    }
  } else if (a.kind == Kind::kConstant) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) at(i) = times_sigmoid(at(i), at(i) * a.p[0]);
  } else if (a.kind == Kind::kRelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) at(i) = at(i) < 0.0f ? 0.0f : at(i);  // NaN stays
  }
}

__device__ __forceinline__ float activate(ActivationParams const& a, float x) {
  activate_all<1>(a, [value = &x](int) -> float& { return *value; });
  return x;
}

template <DataType kType>
__device__ __forceinline__ float load_c(EpilogueParams const& e, int m, int n, int l) {
  int64_t const offset = l * e.c_batch_stride + m * e.c_stride_m + n * e.c_stride_n;
  return e.c_f32 ? static_cast<float const*>(e.c)[offset]
                 : Float16<kType>::to_float(static_cast<typename Float16<kType>::Type const*>(e.c)[offset]);
}

template <DataType kType>
__device__ __forceinline__ float load_bias(EpilogueParams const& e, int n) {
  return e.bias_f32 ? static_cast<float const*>(e.bias)[n]
                    : Float16<kType>::to_float(static_cast<typename Float16<kType>::Type const*>(e.bias)[n]);
}

/// Writes the outputs of a rectangle of accumulators, element by element and coalesced along n: any alignment, any C, any output type,
/// gated or not. `accumulator(row, column)` reads the rectangle in the caller's orientation, row = m - m0 and column = n - n0; n0 is a
/// multiple of 16 when gated; rows, threads and the columns up to 32 are powers of two.
template <DataType kType, class Accumulator>
__device__ __forceinline__ void store_rectangle(EpilogueParams const& e, int m0, int n0, int l, int rows, int columns, int thread,
                                                int threads, Accumulator&& accumulator) {
  constexpr int kBatch = 4;  // rows in flight together
  int const outputs = e.gated ? columns / 2 : columns;
  int const lanes = outputs < 32 ? outputs : 32;  // threads along a row
  int const lane_bits = 31 - __clz(lanes);
  int const row_step = threads >> lane_bits;
  int const n_out = e.gated ? e.n / 2 : e.n;
  int const rows_inside = rows < e.m - m0 ? rows : e.m - m0;
#pragma unroll 1
  for (int column = thread & (lanes - 1); column < outputs; column += lanes) {
    int const n = (e.gated ? n0 / 2 : n0) + column;
    if (n >= n_out) break;
    int const gate = e.gated ? column / kGateBlock * (2 * kGateBlock) + column % kGateBlock : column;
    float const bias = e.bias != nullptr ? load_bias<kType>(e, n0 + gate) : 0.0f;
#pragma unroll 1
    for (int row = thread >> lane_bits; row < rows_inside; row += kBatch * row_step) {
      float v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int const r = row + i * row_step;
        v[i] = fmaf(e.alpha, r < rows_inside ? accumulator(r, gate) : 0.0f, bias);
      }
      if (e.c != nullptr) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          int const r = row + i * row_step;
          if (r < rows_inside) v[i] = fmaf(e.beta, load_c<kType>(e, m0 + r, n, l), v[i]);
        }
      }
      activate_all<kBatch>(e.activation, [&](int i) -> float& { return v[i]; });
      if (e.gated) {
        float const up_bias = e.bias != nullptr ? load_bias<kType>(e, n0 + gate + kGateBlock) : 0.0f;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          int const r = row + i * row_step;
          if (r < rows_inside) v[i] *= fmaf(e.alpha, accumulator(r, gate + kGateBlock), up_bias);
        }
      }
      int64_t const offset = l * e.d_batch_stride + (m0 + row) * e.ldd + n, step = row_step * e.ldd;
      if (e.d_f32) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (row + i * row_step < rows_inside) static_cast<float*>(e.d)[offset + i * step] = v[i];
        }
      } else {
        using Type = typename Float16<kType>::Type;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (row + i * row_step < rows_inside) static_cast<Type*>(e.d)[offset + i * step] = Float16<kType>::from_float(v[i]);
        }
      }
    }
  }
}

#endif

}  // namespace minfer::gemm
