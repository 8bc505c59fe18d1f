// Scales of 8-bit operands of grouped kernels that the mainloop multiplies sums by: of groups of k of tokens, and of blocks of experts'
// weights.
#pragma once

#include <cstdint>

#include "gemm/block_scales.cuh"

namespace minfer::moe {

/// Scales of the groups of tokens, and of the blocks of experts' weights.
struct ExpertScales {
  gemm::ScaleView tokens;  // of rows of a, and of groups of k; data is null: 1
  int64_t expert_offset;   // masked: from where an expert's rows would begin, were they numbered through, to where they do
  int32_t const* gather;   // the row of a that a row of d is of, or null
  int32_t rows;            // of a
  int32_t groups;          // of a row
  int32_t parts;           // groups in 128 of k: 1, 2 or 4
  int32_t blocks;          // of 128 of k
  gemm::ScaleView weight;  // of an expert's blocks
  int64_t expert_stride;   // to the next expert's
  int64_t up_offset;       // gated: from the gates' to the ups'
  int32_t n;               // rows of an expert's weight that share its blocks: gated, half of them

#if defined(__CUDACC__)
  __device__ __forceinline__ bool exist() const { return tokens.data != nullptr || weight.data != nullptr; }
#endif
};

/// Sends for a scale, the at-th number of `view`. Those of fp32 arrive later. Where it does not exist, it is 0, where there are none, 1.
__device__ __forceinline__ void send_scale(gemm::ScaleView const& view, int32_t at, bool exists, uint32_t to) {
  if (view.data != nullptr && !view.exponents) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(static_cast<float const*>(view.data) + at),
                 "r"(exists ? 4 : 0)
                 : "memory");
  } else {
    float const x = view.data == nullptr ? 1.0f : exists ? view.load(at) : 0.0f;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
  }
}

}  // namespace minfer::moe
