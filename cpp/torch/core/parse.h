// Texts of users and of tables as numbers and enumerators. A text that is not legal raises with a message that begins with `what`: an
// operator, or a line and column of a table.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "minfer/gemm.h"

namespace minfer::torch_binding {

/// The texts between separators. A separator at the end has none after it.
std::vector<std::string> split(std::string const& text, char separator);

/// A whole number in [min, max].
int64_t parse_integer(char const* what, std::string const& text, int64_t min, int64_t max);
/// A positive, finite number.
float parse_positive(char const* what, std::string const& text);
/// "0" or "1".
bool parse_flag(char const* what, std::string const& text);

Decomposition parse_decomposition(char const* what, std::string const& text);
RasterOrder parse_raster(char const* what, std::string const& text);
/// A number of a launch configuration: splits of k, or tiles walked side by side.
int32_t parse_launch_number(char const* what, std::string const& text);
/// f16, bf16 or f32.
DataType parse_type(char const* what, std::string const& text);
/// The argument `type`, f16 or bf16.
DataType parse_16bit_type(char const* what, std::string const& text);
Major parse_major(char const* what, std::string const& text);
/// A weight format with codes of this many bits; with 0, any weight format.
WeightFormat parse_format(char const* what, int bits, std::string const& name);
/// more: further names for the message, ", swigluoai", which the caller handles itself.
Activation parse_activation(char const* what, std::string const& name, char const* more = "");

/// An activation of a gate, and what its gate and up go through: gate = min(gate, gate_max), up = clamp(up, +-up_max) + up_shift.
struct GateActivation {
  Activation activation = Activation::kNone;
  float silu_scale = 1.0f;  // silu(x) = x * sigmoid(silu_scale * x)
  float gate_max = std::numeric_limits<float>::infinity(), up_max = std::numeric_limits<float>::infinity(), up_shift = 0.0f;
};
/// gpt-oss's clamped SwiGLU: gate * sigmoid(1.702 * gate) * (up + 1), where gate is clamped to at most 7 and up to [-7, 7].
constexpr char const* kSwigluOai = "swigluoai";
/// An activation, or kSwigluOai.
GateActivation parse_gate_activation(char const* what, std::string const& name);
GateLayout parse_gate_layout(char const* what, std::string const& name);

/// Raises where the registry has no such kernel. For calls with nothing to compute, which are not planned.
void check_kernel_name(char const* what, char const* family, std::string const& name);

/// Turns an operator's group size, -1 for all of k, into GemmProblem's, 0 for all of k.
int32_t group_of(char const* what, int64_t group_size);

}  // namespace minfer::torch_binding
