// The dense GEMM as a part of other operators.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "core/device.h"
#include "core/tensor.h"

namespace minfer::torch_binding {

/// x.w^T in float32, of x [m, k] and w [n, k] in 16 bits.
Tensor product_in_float(char const* op, Tensor const& x, Tensor const& w, OnDevice const& on);

/// In front of a product whose a is there.
struct Nothing {
  void operator()() const {}
};

/// A product with what minfer.gemm and minfer.gemm_gated do behind it, whose arguments have been checked: a [m, k] and b [k, n] are of one
/// 16-bit type, bias is [n].
struct Product {
  char const* op;
  Tensor const &a, &b;
  std::optional<Tensor> const& bias;
  Activation activation;
  bool gated, constant_weights;
  std::optional<std::string> const& kernel;  // as minfer.gemm takes it
};
/// Into `out` of a's type, contiguous, m rows in all. `before` launches what writes a: when nothing but the launch itself can fail any
/// more, and also where there is nothing to multiply.
void multiply(Product const& product, Tensor const& out, OnDevice const& on, std::function<void()> const& before);

}  // namespace minfer::torch_binding
