// Epilogue arithmetic shared by all GEMM kernels: D = activation(alpha * acc + beta * C + bias), gated D = act(gate) * up.
//
// Everything is a run-time value: null or non-null C and bias, activation (common/activation.cuh), output type. Codes of D
// (common/e4m3.cuh) are made of the fp32 results as a whole tile is stored; partials of split tiles are sums as ever.
#pragma once

#include <cstdint>

#include "common/activation.cuh"
#include "minfer/gemm.h"

#if defined(__CUDACC__)
#include "common/dependent_launch.cuh"
#include "common/e4m3.cuh"
#include "common/float16.cuh"
#endif

namespace minfer::gemm {

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
  float const* d_scale;  // D's elements are e4m3 codes of values / *d_scale; null: numbers
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
  e.d_scale = problem.d_fp8 ? operands.d_scale : nullptr;
  return e;
}

/// Scales of the caller's rows or columns of D, or one of all: a stride of 0.
struct ScaleVector {
  float const* data;  // null: 1
  int64_t stride;
};

/// What operands of 8 bits have beside: each accumulator, less zero * sum, is multiplied by the scales of its row and its column.
struct ScaledOutput {
  ScaleVector m_scales, n_scales;
  int32_t const *zeros, *sums;  // of the caller's rows and columns; null: 0
  int64_t zero_stride;
  bool bf16;      // D, or C and bias where D has another type
  bool integers;  // the accumulators are int32, and so is D
};

inline ScaledOutput make_scaled_output(GemmProblem const& problem, GemmOperands const& operands) {
  auto const vector = [](OperandScales const& scale) {  // scales of blocks are the mainloop's
    return ScaleVector{scale.blocks ? nullptr : static_cast<float const*>(scale.data), scale.row_stride};
  };
  ScaledOutput o{};
  o.m_scales = vector(operands.a_scale);
  o.n_scales = vector(operands.b_scale);
  o.zeros = operands.a_zero;
  o.zero_stride = operands.a_zero_stride;
  o.sums = operands.b_sums;
  bool const of_d = problem.d_type != DataType::kF32 && !problem.d_fp8 && !problem.d_int32;
  bool const of_bias = operands.bias != nullptr && operands.bias_type != DataType::kF32;
  o.bf16 = (of_d ? problem.d_type : of_bias ? operands.bias_type : operands.c_type) == DataType::kBF16;
  o.integers = problem.d_int32;
  return o;
}

/// Columns of B per interleaved block of a gated weight: 8 gate columns, then 8 up columns.
constexpr int kGateBlock = 8;

#if defined(__CUDACC__)

/// element: Float16, or AnyFloat16.
template <class Element>
__device__ __forceinline__ float load_c(Element element, EpilogueParams const& e, int m, int n, int l) {
  int64_t const offset = l * e.c_batch_stride + m * e.c_stride_m + n * e.c_stride_n;
  return e.c_f32 ? static_cast<float const*>(e.c)[offset] : element.to_float(static_cast<typename Element::Type const*>(e.c)[offset]);
}

template <class Element>
__device__ __forceinline__ float load_bias(Element element, EpilogueParams const& e, int n) {
  return e.bias_f32 ? static_cast<float const*>(e.bias)[n] : element.to_float(static_cast<typename Element::Type const*>(e.bias)[n]);
}

/// An accumulator of the caller's row and column less what the zero points add to it.
__device__ __forceinline__ float without_zero(ScaledOutput const& o, float value, int m, int n) {
  if (o.zeros == nullptr) return value;
  return fmaf(-float(load_operand(o.zeros + m * o.zero_stride)), float(load_operand(o.sums + n)), value);
}

/// D of int32: the accumulators' bits, of a rectangle as in store_rectangle.
template <class Accumulator>
__device__ __forceinline__ void store_integers(EpilogueParams const& e, int m0, int n0, int l, int rows, int columns, int thread,
                                               int threads, Accumulator const& accumulator) {
  for (int at = thread; at < rows * columns; at += threads) {
    int const row = at / columns, column = at % columns;
    if (m0 + row >= e.m || n0 + column >= e.n) continue;
    static_cast<float*>(e.d)[l * e.d_batch_stride + (m0 + row) * e.ldd + n0 + column] = accumulator(row, column);
  }
}

/// Asks L2 for the C of a rectangle, so that store_rectangle, which comes back to it row by row, does not wait for memory. A C that is
/// broadcast along m is small, and one whose rows are not contiguous would take a request an element: neither is asked for.
__device__ __forceinline__ void prefetch_c(EpilogueParams const& e, int m0, int n0, int l, int rows, int columns, int thread, int threads) {
  if (e.c == nullptr || e.c_stride_n != 1 || e.c_stride_m == 0) return;
  constexpr int kLine = 128;  // bytes
  int const element = e.c_f32 ? 4 : 2;
  int const inside = columns < e.n - n0 ? columns : e.n - n0, rows_inside = rows < e.m - m0 ? rows : e.m - m0;
  int const lines = (inside * element + kLine - 1) / kLine + 1;  // of a row, which may begin anywhere
  char const* const from = static_cast<char const*>(e.c) + (l * e.c_batch_stride + m0 * e.c_stride_m + n0) * element;
  for (int row = thread; inside > 0 && row < rows_inside; row += threads) {
    for (int line = 0; line < lines; ++line) {
      int const at = line * kLine < inside * element ? line * kLine : inside * element - 1;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + row * e.c_stride_m * element + at));
    }
  }
}

/// What D's values are multiplied by to be codes.
__device__ __forceinline__ float load_code_factor(float const* d_scale) {
  float const scale = load_operand(d_scale);
  return code_factor(scale, reciprocal_without_call(scale));
}

/// Writes the outputs of a rectangle of accumulators, element by element and coalesced along n: any alignment, any C, any output type,
/// gated or not. `accumulator(row, column)` reads the rectangle in the caller's orientation, row = m - m0 and column = n - n0; n0 is a
/// multiple of 16 when gated; rows, threads and the columns up to 32 are powers of two. element: as in load_c.
template <class Element, class Accumulator>
__device__ __forceinline__ void store_rectangle(Element element, EpilogueParams const& e, int m0, int n0, int l, int rows, int columns,
                                                int thread, int threads, Accumulator&& accumulator) {
  constexpr int kBatch = 4;  // rows in flight together; 8 spill beside 128 accumulators
  int const outputs = e.gated ? columns / 2 : columns;
  int const lanes = outputs < 32 ? outputs : 32;  // threads along a row
  int const lane_bits = 31 - __clz(lanes);
  int const row_step = threads >> lane_bits;
  int const n_out = e.gated ? e.n / 2 : e.n;
  int const rows_inside = rows < e.m - m0 ? rows : e.m - m0;
  float const factor = e.d_scale != nullptr ? load_code_factor(e.d_scale) : 0.0f;
#pragma unroll 1
  for (int column = thread & (lanes - 1); column < outputs; column += lanes) {
    int const n = (e.gated ? n0 / 2 : n0) + column;
    if (n >= n_out) break;
    int const gate = e.gated ? column / kGateBlock * (2 * kGateBlock) + column % kGateBlock : column;
    float const bias = e.bias != nullptr ? load_bias(element, e, n0 + gate) : 0.0f;
#pragma unroll 1
    for (int row = thread >> lane_bits; row < rows_inside; row += kBatch * row_step) {
      float v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int const r = row + i * row_step;
        v[i] = __fmul_rn(e.alpha, r < rows_inside ? accumulator(r, gate) : 0.0f);
      }
      if (e.c != nullptr) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          int const r = row + i * row_step;
          if (r < rows_inside) v[i] = fmaf(e.beta, load_c(element, e, m0 + r, n, l), v[i]);
        }
      }
      if (e.bias != nullptr) {  // not the sum with a zero, whose sign is another
#pragma unroll
        for (int i = 0; i < kBatch; ++i) v[i] = __fadd_rn(v[i], bias);
      }
      activate_all<kBatch>(e.activation, [&](int i) -> float& { return v[i]; });
      if (e.gated) {
        float const up_bias = e.bias != nullptr ? load_bias(element, e, n0 + gate + kGateBlock) : 0.0f;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          int const r = row + i * row_step;
          if (r >= rows_inside) continue;
          float const up = __fmul_rn(e.alpha, accumulator(r, gate + kGateBlock));
          v[i] = __fmul_rn(v[i], e.bias != nullptr ? __fadd_rn(up, up_bias) : up);
        }
      }
      int64_t const offset = l * e.d_batch_stride + (m0 + row) * e.ldd + n, step = row_step * e.ldd;
      if (e.d_scale != nullptr) {
#pragma unroll
        for (int i = 0; i < kBatch; i += 2) {  // a warp's codes of a row are a sector of 32 bytes
          uint32_t const codes = codes_e4m3(v[i], v[i + 1], factor);
          uint8_t* const to = static_cast<uint8_t*>(e.d) + offset + i * step;
          if (row + i * row_step < rows_inside) *to = uint8_t(codes);
          if (row + (i + 1) * row_step < rows_inside) to[step] = uint8_t(codes >> 8);
        }
      } else if (e.d_f32) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (row + i * row_step < rows_inside) static_cast<float*>(e.d)[offset + i * step] = v[i];
        }
      } else {
        using Type = typename Element::Type;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (row + i * row_step < rows_inside) static_cast<Type*>(e.d)[offset + i * step] = element.from_float(v[i]);
        }
      }
    }
  }
}

#endif

}  // namespace minfer::gemm
