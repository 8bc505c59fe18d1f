// What operators check of their arguments in common. Each raises, in the name of `op`, with the argument's name, what it must be and what it is.
#pragma once

#include <cstdint>

#include "core/failure.h"
#include "core/tensor.h"

namespace minfer::torch_binding {

/// An operand that others are compared with, by its name in messages.
struct Beside {
  char const* name;
  Tensor const& x;
};

/// That the argument is on the other's device.
void check_same_device(char const* op, char const* name, Tensor const& x, Beside const& other);
/// Shape, type and device.
void check_operand(char const* op, char const* name, Tensor const& x, ScalarType type, Shape shape, Beside const& other);

void check_16bit(char const* op, char const* name, Tensor const& x);
/// Of the other operand's 16-bit type, and on its device.
void check_16bit(char const* op, char const* name, Tensor const& x, Beside const& other);

/// [n], of a's type or float32.
void check_bias(char const* op, Tensor const& bias, int64_t n, Beside const& a);

/// That no element of an output lies where another one does.
void check_apart(char const* op, Tensor const& out);
/// That an output shares no memory with an argument, as far as can be told from where both begin and end: they do not begin at one address, and
/// where neither has gaps they have no byte in common. Views that take turns in one memory pass.
void check_no_overlap(char const* op, Tensor const& out, char const* name, Tensor const& x, char const* out_name = "out");

/// Whether each element of one is the other's.
bool is_same_view(Tensor const& a, Tensor const& b);

}  // namespace minfer::torch_binding
