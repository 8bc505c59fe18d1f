// Outputs of GEMMs as 8-bit codes: the arguments `quant` and `scale`, whose rules are those of the operators on rows (minfer/fused.h).
#pragma once

#include <optional>
#include <string>

#include "core/checks.h"

namespace minfer::torch_binding {

struct OutputCodes {
  std::optional<std::string> const& quant;
  std::optional<Tensor> const& scale;
  char const* scale_name = "scale";

  bool given() const { return quant.has_value(); }
  /// Of the output, which without codes has a type of its own.
  ScalarType type(ScalarType without) const { return given() ? ScalarType::Float8_e4m3fn : without; }
};

/// fp8_tensor alone, and its scale.
void check_output_codes(char const* op, OutputCodes const& codes, NamedTensor const& a);

}  // namespace minfer::torch_binding
