#include "rotary_table.h"

namespace minfer::torch_binding {

RotaryTable check_rotary_table(char const* op, Tensor const& cos_sin, Tensor const& positions, std::optional<int64_t> rotary_dim,
                               int64_t tokens, int64_t head_dim, NamedTensor const& other) {
  if (cos_sin.dim() != 2) fail(op, ": cos_sin must be [length, rotary_dim], got ", cos_sin);
  int64_t const rotated = rotary_dim.value_or(cos_sin.size(1));
  if (rotated < 2 || rotated % 2 != 0 || rotated > head_dim) {
    fail(op, ": rotary_dim must be even, 2 to head_dim = ", head_dim, ", got ", rotated);
  }
  check_operand(op, "cos_sin", cos_sin, ScalarType::Float, {cos_sin.size(0), rotated}, other);
  if (!is_index(positions.scalar_type())) fail(op, ": positions must be int64 or int32, got ", positions.scalar_type());
  check_operand(op, "positions", positions, positions.scalar_type(), {tokens}, other);
  return {cos_sin.size(0), rotated, positions.scalar_type() == ScalarType::Long};
}

}  // namespace minfer::torch_binding
