// The analytic cost model of kernels with quantised weights.
#pragma once

#include "gemm/cost_model.h"

namespace minfer::w4a16 {

/// Predicted time of a legal candidate, us.
double predict_us(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device,
                  gemm::ScaledModel const& model);

/// Bytes of the packed weight, its scales and zero points.
double weight_bytes(GemmProblem const& problem);

}  // namespace minfer::w4a16
