// The analytic cost model of kernels with quantised weights.
#pragma once

#include <cstring>

#include "gemm/cost_model.h"

namespace minfer::w4a16 {

/// Whether a kernel for sm_90 multiplies fragments by their scales, not sums.
inline bool scales_fragments(KernelInfo const& kernel) { return std::strcmp(kernel.sums, "wgmma16") == 0; }
/// Whether such a kernel has (code - zero) * scale by one multiply-add (dequantize.cuh).
inline bool folds(DataType type, WeightFormat format, bool zeros) { return type == DataType::kBF16 && has_zero_points(format) && !zeros; }

/// Predicted time of a legal candidate, us.
double predict_us(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device,
                  gemm::ScaledModel const& model);

/// Bytes of the packed weight, its scales and zero points.
double weight_bytes(GemmProblem const& problem);

}  // namespace minfer::w4a16
