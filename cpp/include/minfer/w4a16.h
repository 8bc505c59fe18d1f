// 4-bit weights around the GEMM (gemm.h with GemmProblem::b_format): packing, dequantisation, the gather of act-order checkpoints.
#pragma once

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

/// Bytes of a packed [n, k] weight: n and k are rounded up to multiples of 64.
int64_t packed_weight_bytes(WeightFormat format, int64_t n, int64_t k);

/// codes: uint8 [n, k] in 0..15, leading dimension ld; the low four bits count. packed: packed_weight_bytes, 16-byte aligned; padding codes are 0.
Status pack_w4(uint8_t const* codes, int64_t n, int64_t k, int64_t ld, void* packed, Stream stream);

/// out [n, k] of `type`, contiguous: (code - zero) * scale, rounded once. scales and zeros
/// [ceil(k / group_size), n] of `type`; zeros null: 8; group_size 0: all of k, else a power of two from 32 on.
Status dequantize_w4(void const* packed, void const* scales, int64_t ld_scales, void const* zeros, int64_t ld_zeros, int64_t group_size,
                     int64_t n, int64_t k, DataType type, void* out, Stream stream);

/// out [m, k] = a[:, perm], 16-bit elements, contiguous; a [m, k] with leading dimension lda, perm int32 [k] in 0..k-1.
/// programmatic: launched with programmatic stream serialization (compute capability 9.0 on).
Status gather_columns(void const* a, int64_t lda, int32_t const* perm, int64_t m, int64_t k, void* out, bool programmatic, Stream stream);

}  // namespace minfer
