// The analytic cost model of the GEMM planner: microseconds for (kernel, launch, problem, device).
#pragma once

#include "gemm/schedule.h"

namespace minfer::gemm {

/// Predicted time of a legal candidate, us.
double predict_us(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device);

}  // namespace minfer::gemm
