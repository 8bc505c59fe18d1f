// Rows that are copied, element by element: each CTA has a part of a row, each thread kPartVectors vectors of it.
#pragma once

#include <algorithm>

#include "common/kernel_launch.h"
#include "fused/row_params.h"

namespace minfer::fused {

constexpr int kPartVectors = 4;
constexpr unsigned kPartThreads = 128;

struct RowParts {
  uint32_t vectors;  // of a row
  uint32_t parts;    // of a row

  /// Fills the shape of a launch; false where a launch does not cover so many rows.
  static bool of(int64_t rows, int64_t width, RowParts* walk, LaunchShape* shape) {
    int64_t const vectors = (width + kVectorElements - 1) / kVectorElements;
    int64_t const parts = (vectors + kPartVectors * kPartThreads - 1) / (kPartVectors * kPartThreads);
    int64_t const of_thread = (vectors + parts * kPartVectors - 1) / (parts * kPartVectors);
    *walk = {uint32_t(vectors), uint32_t(parts)};
    shape->threads = unsigned((of_thread + 31) / 32 * 32);
    if (width >= int64_t(1) << 31 || rows > 0x7fffffff / parts) return false;
    shape->grid = dim3(unsigned(rows * parts));
    return true;
  }

#if defined(__CUDACC__)
  __device__ __forceinline__ uint32_t row() const { return parts == 1 ? blockIdx.x : blockIdx.x / parts; }
  /// The row's first element of the thread's vector j.
  __device__ __forceinline__ uint32_t column(int j) const {
    uint32_t const part = blockIdx.x - row() * parts;
    return ((part * kPartVectors + j) * blockDim.x + threadIdx.x) * kVectorElements;
  }
#endif
};

}  // namespace minfer::fused
