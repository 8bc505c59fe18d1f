// Shared-memory layouts of the prefill kernels for sm_90a: rows of 16-bit elements as TMA leaves them with the 128-byte shared-memory
// swizzle, [kDim / 64][kPitch rows][64], in kDepth stages.
#pragma once

#include "cute/layout_composed.hpp"
#include "cute/pointer_flagged.hpp"
#include "cute/swizzle.hpp"

namespace minfer::attention {

/// kRows of the rows, which are the operand's m or n: (kRows,kDim,PIPE).
template <int kRows, int kPitch, int kDim, int kDepth>
using KMajorRows = cute::ComposedLayout<
    cute::Swizzle<3, 4, 3>, cute::smem_ptr_flag_bits<16>,
    cute::Layout<
        cute::Shape<cute::Shape<cute::_8, cute::Int<kRows / 8>>, cute::Shape<cute::_64, cute::Int<kDim / 64>>, cute::Int<kDepth>>,
        cute::Stride<cute::Stride<cute::_64, cute::Int<512>>, cute::Stride<cute::_1, cute::Int<kPitch * 64>>, cute::Int<kPitch * kDim>>>>;

/// The same rows as the operand's k: (kDim,kRows,PIPE).
template <int kRows, int kDim, int kDepth>
using MnMajorRows = cute::ComposedLayout<
    cute::Swizzle<3, 4, 3>, cute::smem_ptr_flag_bits<16>,
    cute::Layout<
        cute::Shape<cute::Shape<cute::_64, cute::Int<kDim / 64>>, cute::Shape<cute::_8, cute::Int<kRows / 8>>, cute::Int<kDepth>>,
        cute::Stride<cute::Stride<cute::_1, cute::Int<kRows * 64>>, cute::Stride<cute::_64, cute::Int<512>>, cute::Int<kRows * kDim>>>>;

}  // namespace minfer::attention
