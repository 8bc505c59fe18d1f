// Checks of packed weights among an operator's arguments: shapes and types of codes and scales.
#pragma once

#include <array>

#include "core/failure.h"
#include "core/tensor.h"
#include "quantized_gemm/w4_layout.h"

namespace minfer::torch_binding {

inline void check_group_size(char const* op, WeightFormat format, int64_t group_size) {
  if (int const fixed = fixed_group_of(format); fixed != 0) {
    if (group_size != fixed) fail(op, ": group_size must be ", fixed, " for ", name_of(format), ", got ", group_size);
  } else if (group_size != -1 && (group_size < 32 || (group_size & (group_size - 1)) != 0)) {
    fail(op, ": group_size must be -1 (all of k) or a power of two from 32 on, got ", group_size);
  }
}

/// A legal group_size as kernels take it: 0 says that one group holds all of k.
inline int64_t planned_group(int64_t group_size, int64_t k) { return group_size == -1 || group_size >= k ? 0 : group_size; }

/// Groups of k, which are the rows of the scales.
inline int64_t groups_of(int64_t group_size, int64_t k) { return group_size == -1 ? 1 : (k + group_size - 1) / group_size; }

/// The packed codes are [ceil(n / 64), ceil(k / 64), 32-bit words of a weight block].
inline std::array<int64_t, 3> packed_shape(WeightFormat format, int64_t n, int64_t k) {
  return {(n + w4a16::kBlockN - 1) / w4a16::kBlockN, (k + w4a16::kBlockK - 1) / w4a16::kBlockK, w4a16::block_words(bits_of(format))};
}

/// Scales for activations of `type`, which messages call `a`: bytes or of that type, whichever the format has.
inline void check_scale_type(char const* op, char const* name, Tensor const& scales, WeightFormat format, ScalarType type,
                             char const* a = "a") {
  if (scale_bytes_of(format) == 1) {
    if (scales.scalar_type() != ScalarType::Byte) {
      fail(op, ": ", name, " must be Byte for ", name_of(format), ", got ", scales.scalar_type());
    }
  } else if (scales.scalar_type() != type) {
    fail(op, ": ", name, " must have ", a, "'s dtype ", type, ", got ", scales.scalar_type());
  }
}

}  // namespace minfer::torch_binding
