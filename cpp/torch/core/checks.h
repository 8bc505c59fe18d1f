// Checks of arguments that operators have in common. A check that fails raises with the names of operator and argument, what the argument
// must be and what it is.
#pragma once

#include <cstdint>

#include "core/failure.h"
#include "core/tensor.h"

namespace minfer::torch_binding {

/// An operand and its name in messages. Other operands are compared with it.
struct NamedTensor {
  char const* name;
  Tensor const& x;
};

/// The argument is on the other's device.
void check_same_device(char const* op, char const* name, Tensor const& x, NamedTensor const& other);
/// The argument has this shape and type, and is on the other's device.
void check_operand(char const* op, char const* name, Tensor const& x, ScalarType type, Shape shape, NamedTensor const& other);

/// float16 or bfloat16.
void check_16bit(char const* op, char const* name, Tensor const& x);
/// Both are of one 16-bit type and on one device.
void check_16bit(char const* op, char const* name, Tensor const& x, NamedTensor const& other);

/// A number as kernels compute with it; it is finite there.
float in_float32(char const* op, char const* name, double value);
/// The same of `eps`, which is not negative either.
float eps_in_float32(char const* op, double eps);

/// [n], of this type or float32, on a's device.
void check_bias(char const* op, Tensor const& bias, int64_t n, ScalarType type, NamedTensor const& a);
/// Of a's type or float32.
inline void check_bias(char const* op, Tensor const& bias, int64_t n, NamedTensor const& a) {
  check_bias(op, bias, n, a.x.scalar_type(), a);
}

/// No two elements of an output have the same address.
void check_apart(char const* op, Tensor const& out, char const* name = "out");
/// An output shares no memory with an argument, as far as their first and last addresses show: they do not begin at the same address, and
/// where neither has gaps they have no byte in common. Interleaved views of the same memory pass.
void check_no_overlap(char const* op, Tensor const& out, char const* name, Tensor const& x, char const* out_name = "out");

/// Whether both have the same elements at the same addresses.
bool is_same_view(Tensor const& a, Tensor const& b);

}  // namespace minfer::torch_binding
