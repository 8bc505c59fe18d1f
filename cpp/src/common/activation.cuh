// Activations as every kernel applies them, in fp32: epilogues of GEMMs, elementwise operators. Which one is a run-time value, one branch
// for a group of elements, so that no kernel is instantiated per activation. To add one: a Kind and its lines in activate_all, a value of
// minfer::Activation and its lines in make_activation.
//
//   silu, gelu_tanh   x sigmoid(y), y = x or sqrt(8 / pi) (x + 0.044715 x^3)
//   gelu              x Phi(x), Phi the normal distribution: its lower tail Phi(-a) = exp(-a^2 / 2) R(1 / (1 + c a)), R a polynomial. It is
//                     a fit of the least relative error over 0 <= a <= 14, where exp reaches the end of fp32: 2^-21.5 everywhere, while
//                     fits of Phi itself have an absolute error, beside which small results have no right digit. The form is that of
//                     Hastings (Approximations for Digital Computers, 1955)
//   relu, relu2       max(x, 0), max(x, 0)^2
#pragma once

#include <cstdint>

#include "minfer/types.h"

namespace minfer {

struct ActivationParams {
  enum class Kind : int8_t { kNone, kRelu, kRelu2, kSigmoid, kSigmoidCubic, kNormal };
  static constexpr int kTerms = 8;
  Kind kind = Kind::kNone;
  // kSigmoid: y = p[0] x; kSigmoidCubic: y = x (p[0] + p[1] x^2); both times -log2(e), for sigmoid(y) = 1 / (1 + 2^(-log2(e) y)).
  // kNormal: R's coefficients.
  float p[kTerms] = {0};
};

inline ActivationParams make_activation(Activation activation) {
  using Kind = ActivationParams::Kind;
  constexpr float kMinusLog2E = -1.4426950409f;
  ActivationParams a;
  switch (activation) {
    case Activation::kNone: break;
    case Activation::kRelu: a.kind = Kind::kRelu; break;
    case Activation::kRelu2: a.kind = Kind::kRelu2; break;
    case Activation::kSilu:
      a.kind = Kind::kSigmoid;
      a.p[0] = kMinusLog2E;
      break;
    case Activation::kGeluTanh:
      a.kind = Kind::kSigmoidCubic;
      a.p[0] = kMinusLog2E * 1.5957691216f;
      a.p[1] = kMinusLog2E * 0.0713548163f;
      break;
    case Activation::kGelu: {
      a.kind = Kind::kNormal;
      constexpr float kFit[ActivationParams::kTerms] = {3.572471173e-05f, 1.029389448e-01f,  1.109704166e-01f, 6.021794849e-02f,
                                                        1.922050403e-01f, -1.354646523e-01f, 2.463362827e-01f, -7.723987340e-02f};
      for (int i = 0; i < ActivationParams::kTerms; ++i) a.p[i] = kFit[i];
      break;
    }
  }
  return a;
}

/// Of a gate: x sigmoid(slope x), as silu with another slope.
inline ActivationParams make_sigmoid(float slope) {
  ActivationParams a = make_activation(Activation::kSilu);
  a.p[0] *= slope;
  return a;
}

#if defined(__CUDACC__)

/// The instructions of 2 ulp, subnormal results being 0.
__device__ __forceinline__ float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// x * sigmoid(y) with y_log2 = -log2(e) y. An infinite power of two gives x * 0.
__device__ __forceinline__ float times_sigmoid(float x, float y_log2) {
  return x * approximate_reciprocal(1.0f + approximate_exp2(y_log2));
}

/// Activates the kCount values that `at(i)` refers to: one branch for all of them, so that their instructions interleave.
template <int kCount, class At>
__device__ __forceinline__ void activate_all(ActivationParams const& a, At&& at) {
  using Kind = ActivationParams::Kind;
  if (a.kind == Kind::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) at(i) = times_sigmoid(at(i), at(i) * a.p[0]);
  } else if (a.kind == Kind::kSigmoidCubic) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float const x = at(i);
      at(i) = times_sigmoid(x, x * fmaf(a.p[1] * x, x, a.p[0]));
    }
  } else if (a.kind == Kind::kNormal) {
    constexpr float kSlope = 0.26f, kHalfLog2E = 0.72134752f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float const x = at(i), t = approximate_reciprocal(fmaf(fabsf(x), kSlope, 1.0f));
      float tail = a.p[ActivationParams::kTerms - 1];
#pragma unroll
      for (int term = ActivationParams::kTerms - 2; term >= 0; --term) tail = fmaf(tail, t, a.p[term]);
      tail *= approximate_exp2(x * -kHalfLog2E * x);
      at(i) = x * (x < 0.0f ? tail : 1.0f - tail);
    }
  } else if (a.kind == Kind::kRelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) at(i) = at(i) < 0.0f ? 0.0f : at(i);  // NaN stays
  } else if (a.kind == Kind::kRelu2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) at(i) = at(i) < 0.0f ? 0.0f : at(i) * at(i);
  }
}

__device__ __forceinline__ float activate(ActivationParams const& a, float x) {
  activate_all<1>(a, [value = &x](int) -> float& { return *value; });
  return x;
}

#endif

}  // namespace minfer
