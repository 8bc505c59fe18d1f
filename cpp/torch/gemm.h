// The dense GEMM as a part of other operators.
#pragma once

#include "core/device.h"
#include "core/tensor.h"

namespace minfer::torch_binding {

/// x.w^T in float32, of x [m, k] and w [n, k] in 16 bits.
Tensor product_in_float(char const* op, Tensor const& x, Tensor const& w, OnDevice const& on);

}  // namespace minfer::torch_binding
