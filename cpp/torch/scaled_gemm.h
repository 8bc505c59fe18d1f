// Products of e4m3 operands as parts of other operators.
#pragma once

#include <optional>

#include "core/device.h"
#include "core/tensor.h"
#include "gemm_call.h"

namespace minfer::torch_binding {

/// How the scale of an e4m3 weight [n, k] scales it, in the words of minfer.gemm_fp8: one number, one for each row, or of blocks; gated: of
/// gates and ups.
OperandScales check_weight_scale(char const* op, char const* name, Tensor const& scale, int64_t n, int64_t k, bool gated, Tensor const& a);

/// out [m, n] = activation(A.W^T + C + bias), of codes and scales as quantize_rows returns them and a checked weight [n, k]; gated:
/// act(gate) * up of half as many columns. out is contiguous and may be C.
struct Fp8Product {
  char const* op;
  Tensor const &a, &a_scale, &weight, &weight_scale;
  std::optional<Tensor> const &c, &bias;
  Activation activation;
  bool gated, constant_weights;
};
void run(Fp8Product const& product, Tensor const& out);

}  // namespace minfer::torch_binding
