// What other operators take of the dense GEMM.
#pragma once

#include "core/device.h"
#include "core/tensor.h"

namespace minfer::torch_binding {

/// x.w^T of 16-bit x [m, k] and w [n, k], in float32.
Tensor product_in_float(char const* op, Tensor const& x, Tensor const& w, OnDevice const& on);

}  // namespace minfer::torch_binding
