// 4-bit and 8-bit weights, but for their GEMM (gemm.h with GemmProblem::b_format): packing, dequantisation, the gather for act-order.
#pragma once

#include "minfer/gemm.h"
#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

/// A packed weight [n, k] of any format but kDense.
struct QuantizedWeight {
  WeightFormat format = WeightFormat::kInt4;
  void const* packed = nullptr;  // packed_weight_bytes, 16-byte aligned
  void const* scales = nullptr;  // [ceil(k / group_size), n], leading dimension ld_scales; 16-bit or bytes (scale_bytes_of)
  int64_t ld_scales = 0;
  void const* zeros = nullptr;  // likewise, 16-bit; null: 8 (int4), 128 (int8)
  int64_t ld_zeros = 0;
  int64_t group_size = 0;  // 0: all of k; else a power of two from 32 on (nvfp4: 16)
  int64_t n = 0, k = 0;
  float alpha = 1.0f;  // of the whole weight
};

/// Bytes of a packed [n, k] weight: n and k are rounded up to multiples of 64.
int64_t packed_weight_bytes(WeightFormat format, int64_t n, int64_t k);

/// codes: uint8 [n, k], leading dimension ld; of 4-bit formats the low four bits count. packed: packed_weight_bytes, 16-byte aligned;
/// padding codes are 0. The layout depends on the format (quantized_gemm/w4_layout.h).
Status pack_weight(WeightFormat format, uint8_t const* codes, int64_t n, int64_t k, int64_t ld, void* packed, Stream stream);

/// out [n, k] of `type`, contiguous, 16-byte aligned: value * scale * alpha, computed in fp32, rounded once. 16-bit scales are of `type`.
Status dequantize_weight(QuantizedWeight const& weight, DataType type, void* out, Stream stream);

/// The GEMM that is left of a quantised one when its weight has been dequantised into a contiguous [n, k].
GemmProblem dequantized(GemmProblem const& problem);

/// Whether dequantize_weight and a dense GEMM are predicted to be faster than the best kernel for `problem`, or none reads its format.
/// Not beside activations of 8 bits.
Status dequantize_first(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options, bool* first);

/// Predicted time of dequantize_weight for the problem's weight, in us.
double dequantize_us(GemmProblem const& problem, DeviceProperties const& device);

/// out [m, k] = a[:, perm], 16-bit elements, contiguous, 16-byte aligned; k a multiple of 8; a [m, k] with leading dimension lda, perm
/// int32 [k] in 0..k-1, a constant like the weights: it is read before the stream's previous launch is waited for.
/// programmatic: launched with programmatic stream serialization (compute capability 9.0 on).
Status gather_columns(void const* a, int64_t lda, int32_t const* perm, int64_t m, int64_t k, void* out, bool programmatic, Stream stream);

}  // namespace minfer
