// Operators whose results need nothing of the rest of their row: activations, gates, quantisation with a given scale or one for 128
// columns.
//
// Walk. Rows are cut into parts; a group of threads has a part, a CTA one group of whole warps or several of a part of a warp. Each thread
// requests its kVectors vectors of 8 elements (and as many of the gate's ups), before it uses the first, and stores their results. CTAs end
// with their part: those that are waiting read while these store.
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
  constexpr int kVectors = Config::kVectors;
  constexpr bool kGated = kOperation == RowOperation::kGatedActivation, kExact = Config::kType == DataType::kF32;
  using T = RowType<Config::kType>;
  bool const packed = params.threads < 32;
  uint32_t const lane = packed ? threadIdx.x & (params.threads - 1) : threadIdx.x;
  uint32_t const item = packed ? blockIdx.x * params.rows_per_cta + (threadIdx.x >> (31 - __clz(params.threads))) : blockIdx.x;
  uint32_t const row = params.parts == 1 ? item : item / params.parts, part = item - row * params.parts;
  uint32_t const width = row < params.rows ? params.width : 0;
  auto const column = [&](int j) { return ((part * kVectors + j) * params.threads + lane) * kVectorElements; };
  auto const count = [&](uint32_t at) {
    if (at >= width) return 0;
    return kFast ? kVectorElements : int(min(width - at, uint32_t(kVectorElements)));
  };
  uint32_t const existing = row < params.rows ? row : 0;
  T const* const x = row_in<T const>({params.x.data, params.x.outer_stride, params.x.inner_stride}, params.inner, existing);
  T* const y = row_in<T>(params.y, params.inner, existing);
  RowVector<T> first[kVectors], second[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    uint32_t const at = column(j);
    if constexpr (kGated) {
      GateVectors const gate(params, at, count(at));
      first[j] = load_vector(x, gate.first, gate.first_count, kFast);
      second[j] = load_vector(x, gate.second, gate.second_count, kFast);
    } else {
      first[j] = load_vector(x, at, count(at), kFast);
    }
  }
  float given_scale = 0.0f;
  if (Config::kQuantized && params.quant == RowQuant::kFp8Tensor) given_scale = load_operand(params.scale);
  float results[kVectors][kVectorElements];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    uint32_t const at = column(j);
    int const left = count(at);
    Beside beside;
    unpack(first[j], results[j]);
    if constexpr (kGated) unpack(second[j], beside.up);
    if constexpr (has_bias(kOperation)) {
      RowVector<T> bias = constant_vector<T>(0.0f);
      load_factors<kFast>(params.bias, at, left, &bias);
      unpack(bias, beside.bias);
    }
    finish<kOperation, kExact>(params, RowSummary{}, beside, results[j]);
    if constexpr (!Config::kQuantized) store_vector(pack<T>(results[j]), y, at, left, kFast);
  }
  if constexpr (Config::kQuantized) {
    float inverse[kVectors];
    if (params.quant == RowQuant::kFp8Block128) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        int const left = count(column(j));
        inverse[j] = 0.0f;  // at first the largest magnitude
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) inverse[j] = fmaxf(inverse[j], kFast || i < left ? fabsf(results[j][i]) : 0.0f);
      }
      BlockScales<kVectors> const blocks(inverse);
      uint32_t const block = column(int(blocks.block())) / kQuantBlock;
      if (blocks.is_first_thread() && block * kQuantBlock < width) params.scales[block * params.scales_stride + row] = blocks.scale();
#pragma unroll
      for (int j = 0; j < kVectors; ++j) inverse[j] = blocks.inverse(j);
    } else {
      QuantScale const scale = scale_of(given_scale);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) inverse[j] = scale.inverse;
    }
    uint8_t* const codes = static_cast<uint8_t*>(params.q) + int64_t(row) * params.width;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      uint32_t const at = column(j);
      store_codes(codes_of(results[j], params.quant, inverse[j]), codes, at, count(at), kFast);
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) row_elements_kernel(__grid_constant__ RowParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
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
