// The table of a rotary embedding and the positions of the tokens that it rotates, among an operator's arguments.
#pragma once

#include <optional>

#include "core/checks.h"

namespace minfer::torch_binding {

struct RotaryTable {
  int64_t length, rotary_dim;
  bool positions_64bit;
};

/// cos_sin is float32 [length, rotary_dim], and positions are int64 or int32 [tokens].
RotaryTable check_rotary_table(char const* op, Tensor const& cos_sin, Tensor const& positions, std::optional<int64_t> rotary_dim,
                               int64_t tokens, int64_t head_dim, NamedTensor const& other);

inline bool is_index(ScalarType type) { return type == ScalarType::Long || type == ScalarType::Int; }

}  // namespace minfer::torch_binding
