// Appends keys and values to a cache whose tokens are stored one by one: 16 bits, fp8, int8.
//
// A warp has one head of one token, and each lane one vector of its K and one of its V: both loads are issued before the slot is known.
// Where keys are prepared (norm_rope.cuh), the heads of queries come first, each with a warp of its own, or several to a warp.
// int8's scale is the largest magnitude over the warp / 127.
// Divisions are IEEE's, in float32, and roundings to nearest even: codes equal those of the CPU kernel, bit for bit.
#pragma once

#include <cuda_fp8.h>

#include "attention/cache/norm_rope.cuh"
#include "attention/cache/vector.cuh"
#include "common/dependent_launch.cuh"

namespace minfer::attention {

constexpr int kRowThreads = 128;

template <class T>
__device__ __forceinline__ uint2 codes_fp8(Vector const& x, float scale) {
  float values[kPerVector];
  unpack<T>(x, values);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPerVector; i += 2) {
    float2 const two = make_float2(__fdiv_rn(values[i], scale), __fdiv_rn(values[i + 1], scale));
    words[i / 4] |= uint32_t(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3)) << 8 * (i % 4);
  }
  return make_uint2(words[0], words[1]);
}

/// The largest magnitude of a warp's vectors, by the magnitudes' bits: NaN is above infinity there, so it is not lost.
template <class T>
__device__ __forceinline__ float largest_magnitude(Vector const& x) {
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, max(x.pair[i] & 0x7fffu, x.pair[i] >> 16 & 0x7fffu));
  return to_float(bits_as<T>(uint16_t(__reduce_max_sync(kAllLanes, largest))));
}

template <class T>
__device__ __forceinline__ uint2 codes_int8(Vector const& x, float scale) {
  float values[kPerVector];
  unpack<T>(x, values);
  float const divisor = scale == 0.0f ? 1.0f : scale;
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPerVector; ++i) {
    int const code = min(max(__float2int_rn(__fdiv_rn(values[i], divisor)), -127), 127);  // NaN becomes 0
    words[i / 4] |= (uint32_t(code) & 0xffu) << 8 * (i % 4);
  }
  return make_uint2(words[0], words[1]);
}

template <WeightFormat kFormat, class T, int kWidth, class Params>
__global__ void __launch_bounds__(kRowThreads) append_rows_kernel(__grid_constant__ Params const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  uint32_t const item = blockIdx.x * (kRowThreads / kWarp) + warp_of<Params::kPrepares>();
  uint32_t heads = params.heads;
  if constexpr (Params::kPrepares) heads += params.heads_of.q_items;
  uint32_t const token = item / heads;
  uint32_t head = item - token * heads;
  if (token >= params.tokens) return;  // before the wait, so that the division is, too; each CTA has a warp that waits
#if __CUDA_ARCH__ >= 900
  wait_for_predecessor();
#endif
  int const lane = int(threadIdx.x % kWarp);
  if constexpr (Params::kPrepares) {
    if (head < params.heads_of.q_items) {
      store_query_item<T>(params.heads_of, token, head, lane);
      return;
    }
    head -= params.heads_of.q_items;
  }
  int64_t const slot = params.slot(token);
  [[maybe_unused]] int32_t table_row = 0;
  if constexpr (Params::kPrepares) table_row = params.heads_of.table_row(token);
  Vector x[2] = {};
  [[maybe_unused]] float scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    RowsParams const& side = params.side[i];
    if (lane < side.vectors) x[i] = load_vector<kWidth>(side.row(token, head), side.x_element, lane);
    if constexpr (kFormat == WeightFormat::kFp8E4M3) scale[i] = static_cast<float const*>(side.scale)[head * side.scale_stride];
  }
  if (!params.stored(slot)) return;
  if constexpr (Params::kPrepares) x[0] = prepare_head<T>(params.heads_of, params.heads_of.k_weight, x[0], table_row, lane);
  int64_t const page = params.page_of(slot), row = slot - page * params.page_size;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    RowsParams const& side = params.side[i];
    float own = 1.0f;
    if constexpr (kFormat == WeightFormat::kFp8E4M3) own = scale[i];
    if constexpr (kFormat == WeightFormat::kInt8) {
      own = __fdiv_rn(largest_magnitude<T>(x[i]), 127.0f);
      if (lane == 0) static_cast<float*>(side.scale)[(page * params.heads + head) * params.page_size + row] = own;
    }
    if (lane >= side.vectors) continue;
    uint8_t* const codes = side.codes(page, row, head);
    if constexpr (kFormat == WeightFormat::kDense) {
      store_vector<kPerVector>(x[i], reinterpret_cast<uint16_t*>(codes), lane);
    } else if constexpr (kFormat == WeightFormat::kFp8E4M3) {
      reinterpret_cast<uint2*>(codes)[lane] = codes_fp8<T>(x[i], own);
    } else {
      reinterpret_cast<uint2*>(codes)[lane] = codes_int8<T>(x[i], own);
    }
  }
}

}  // namespace minfer::attention
