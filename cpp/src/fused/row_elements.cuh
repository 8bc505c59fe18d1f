// Operators whose results need nothing of the rest of their row: activations, gates, quantisation with a given scale or one for 128
// columns.
//
// Walk. Rows are cut into parts; a group of threads has a part, a CTA one group or several of as many threads as a power of two. A thread
// has one vector of 8 elements, and of gates their ups: more were no faster for any number of rows (fused/plan.cpp). CTAs end with their
// part: those that are waiting read while these store.
// The 128 columns that share a scale are the vectors of 16 neighbouring threads.
// Limits: 2^31 rows, 2^31 columns.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "fused/row_group.cuh"
#include "fused/row_operation.cuh"
#include "fused/row_quant.cuh"

namespace minfer::fused {

template <class Config, bool kFast>
__device__ __forceinline__ void compute_elements(RowParams const& params) {
  constexpr RowOperation kOperation = Config::kOperation;
  constexpr bool kGated = kOperation == RowOperation::kGatedActivation, kExact = Config::kType == DataType::kF32;
  using T = RowType<Config::kType>;
  bool const packed = params.rows_per_cta > 1;
  uint32_t const lane = packed ? threadIdx.x & (params.threads - 1) : threadIdx.x;
  uint32_t const item = packed ? blockIdx.x * params.rows_per_cta + (threadIdx.x >> (31 - __clz(params.threads))) : blockIdx.x;
  uint32_t const row = params.parts == 1 ? item : item / params.parts, part = item - row * params.parts;
  uint32_t const width = row < params.rows ? params.width : 0, existing = row < params.rows ? row : 0;
  uint32_t at = (part * params.threads + lane) * kVectorElements;
  int count = at >= width ? 0 : kFast ? kVectorElements : int(min(width - at, uint32_t(kVectorElements)));
  T const* x = row_in<T const>({params.x.data, params.x.outer_stride, params.x.inner_stride}, params.inner, existing);
  T* y = row_in<T>(params.y, params.inner, existing);
#if __CUDA_ARCH__ >= 900
  // Addresses are there when the predecessor ends.
  make_opaque(x);
  if constexpr (!Config::kQuantized) make_opaque(y);
  make_opaque(at);
  make_opaque(count);
  wait_for_predecessor();
#endif
  RowVector<T> first, second;
  if constexpr (kGated) {
    GateVectors const gate(params, at, count);
    first = load_vector(x, gate.first, gate.first_count, kFast);
    second = load_vector(x, gate.second, gate.second_count, kFast);
  } else {
    first = load_vector(x, at, count, kFast);
  }
  float given_scale = 0.0f;
  if (Config::kQuantized && params.quant == RowQuant::kFp8Tensor) given_scale = load_operand(params.scale);
  float results[kVectorElements];
  Beside beside;
  unpack(first, results);
  if constexpr (kGated) unpack(second, beside.up);
  if constexpr (has_bias(kOperation)) {
    RowVector<T> bias = constant_vector<T>(0.0f);
    load_factors<kFast>(params.bias, at, count, &bias);
    unpack(bias, beside.bias);
  }
  finish<kOperation, kExact>(params, RowSummary{}, beside, results);
  if constexpr (!Config::kQuantized) {
    store_vector(pack<T>(results), y, at, count, kFast);
  } else {
    QuantScale scale = scale_of(given_scale);
    if (params.quant == RowQuant::kFp8Block128) {
      float largest[1] = {0.0f};
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) largest[0] = fmaxf(largest[0], kFast || i < count ? fabsf(results[i]) : 0.0f);
      BlockScales<1> const block(largest);
      scale.inverse = block.inverse(0);
      if (block.is_first_thread() && count > 0) params.scales[at / kQuantBlock * params.scales_stride + row] = block.scale();
    }
    uint8_t* const codes = static_cast<uint8_t*>(params.q) + int64_t(row) * params.width;
    store_codes(codes_of(results, params.quant, scale.inverse), codes, at, count, kFast);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) row_elements_kernel(__grid_constant__ RowParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  compute_elements<Config, Config::kFast>(params);
}

/// The kernel beside registered ones for rows that are no multiples of 16 bytes.
template <class Config>
struct SlowElements : Config {
  static constexpr bool kFast = false;
};

template <class Config>
Status launch_row_elements(RowLaunchArguments const& arguments) {
  RowParams const& params = arguments.params;
  uint64_t const items = uint64_t(params.rows) * params.parts;
  LaunchShape shape;
  shape.threads = params.threads * params.rows_per_cta;
  shape.grid = dim3(unsigned((items + params.rows_per_cta - 1) / params.rows_per_cta));
  shape.programmatic = arguments.programmatic;
  shape.stream = arguments.stream;
  if (params.fast) return launch(shape, "launch", &row_elements_kernel<Config>, params);
  return launch(shape, "launch", &row_elements_kernel<SlowElements<Config>>, params);
}

}  // namespace minfer::fused
