// Codes and scales back to numbers (minfer/fused.h). Walk: row_parts.cuh.
#include <cuda_fp8.h>

#include "common/aligned_vector.cuh"
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "fused/row_parts.cuh"
#include "fused/row_vector.cuh"

namespace minfer {

namespace fused {
namespace {

struct DequantizeParams {
  Dequantize dequantize;
  RowParts walk;
  bool aligned;
};

__device__ __forceinline__ float value_of(uint32_t code, bool is_int8) {
  if (is_int8) return float(int8_t(code));
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(code), __NV_E4M3)));
}

template <class T>
__global__ void __launch_bounds__(kPartThreads) dequantize_kernel(__grid_constant__ DequantizeParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  Dequantize const& d = params.dequantize;
  uint32_t const row = params.walk.row(), step = blockDim.x * kVectorElements;
  uint32_t first_column = params.walk.column(0);
  bool const is_int8 = d.quant == RowQuant::kInt8Token;
  uint8_t const* from = static_cast<uint8_t const*>(d.q) + int64_t(row) * d.width;
  T* to = static_cast<T*>(d.y) + int64_t(row) * d.width;
#if __CUDA_ARCH__ >= 900
  // The addresses are there when the predecessor ends.
  make_opaque(from);
  make_opaque(to);
  make_opaque(first_column);
  wait_for_predecessor();
#endif
  auto const count = [&](uint32_t at) { return at < d.width ? int(min(uint32_t(d.width) - at, uint32_t(kVectorElements))) : 0; };
  uint2 codes[kPartVectors];
  float scale[kPartVectors];
#pragma unroll
  for (int j = 0; j < kPartVectors; ++j) {
    uint32_t const at = first_column + j * step;
    codes[j] = make_uint2(0, 0);
    scale[j] = 0.0f;
    if (count(at) <= 0) continue;
    int64_t const block = d.quant == RowQuant::kFp8Block128 ? at / kQuantBlock : 0;
    scale[j] = load_operand(d.scales + row * d.scales_row_stride + block * d.scales_block_stride);
    if (params.aligned) {
      codes[j] = load_operand(reinterpret_cast<uint2 const*>(from + at));
    } else {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {
        uint32_t const code = i < count(at) ? load_operand(from + at + i) : 0u;
        (i < 4 ? codes[j].x : codes[j].y) |= code << 8 * (i % 4);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kPartVectors; ++j) {
    uint32_t const at = first_column + j * step;
    float v[kVectorElements];
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) v[i] = value_of((i < 4 ? codes[j].x : codes[j].y) >> 8 * (i % 4) & 0xffu, is_int8) * scale[j];
    store_vector(pack<T>(v), to, at, count(at), params.aligned);
  }
}

template <class T>
Status launch_dequantize(Dequantize const& dequantize, bool programmatic, Stream stream) {
  DequantizeParams params{dequantize, {}, false};
  LaunchShape shape;
  if (!RowParts::of(dequantize.rows, dequantize.width, &params.walk, &shape)) {
    return Status::failure(StatusCode::kNotSupported, "%lld rows of %lld are more than a launch covers", (long long)dequantize.rows,
                           (long long)dequantize.width);
  }
  params.aligned =
      dequantize.width % kVectorElements == 0 && reinterpret_cast<uintptr_t>(dequantize.q) % 8 == 0 && begins_vector(dequantize.y);
  shape.programmatic = programmatic;
  shape.stream = stream;
  return launch(shape, "launch of dequantize", &dequantize_kernel<T>, params);
}

}  // namespace
}  // namespace fused

Status dequantize(Dequantize const& dequantize, bool programmatic, Stream stream) {
  if (dequantize.rows == 0 || dequantize.width == 0) return Status::success();
  switch (dequantize.type) {
    case DataType::kF16: return fused::launch_dequantize<__half>(dequantize, programmatic, stream);
    case DataType::kBF16: return fused::launch_dequantize<__nv_bfloat16>(dequantize, programmatic, stream);
    case DataType::kF32: return fused::launch_dequantize<float>(dequantize, programmatic, stream);
    default: return Status::failure(StatusCode::kInvalidArgument, "results of type %s", name_of(dequantize.type));
  }
}

}  // namespace minfer
