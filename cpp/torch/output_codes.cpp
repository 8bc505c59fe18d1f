#include "output_codes.h"

#include "minfer/fused.h"

namespace minfer::torch_binding {

void check_output_codes(char const* op, OutputCodes const& codes, NamedTensor const& a) {
  if (!codes.given()) {
    if (codes.scale) fail(op, ": scale must be None where quant is, got ", *codes.scale);
    return;
  }
  std::string const& quant = *codes.quant;
  char const* const given = name_of(RowQuant::kFp8Tensor);
  for (RowQuant other : kRowQuants) {
    if (quant != name_of(other) || quant == given) continue;
    fail(op, ": quant must be ", given, ", whose scale is given, got '", quant,
         "', whose scales follow from whole rows: call it without quant, then minfer.quantize_",
         other == RowQuant::kInt8Token ? "int8" : "fp8");
  }
  if (quant != given) fail(op, ": quant must be ", given, ", got '", quant, "'");
  if (!codes.scale) fail(op, ": scale must be given for ", given);
  check_operand(op, "scale", *codes.scale, ScalarType::Float, {1}, a);
}

}  // namespace minfer::torch_binding
