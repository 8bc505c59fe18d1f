// Texts of users and of tables as numbers and enumerators. What a text cannot be raises, beginning with `what`: an operator, or a place in a table.
#pragma once

#include <string>
#include <vector>

#include "minfer/gemm.h"

namespace minfer::torch_binding {

/// The parts between separators; none behind one that ends the text.
std::vector<std::string> split(std::string const& text, char separator);

/// A whole number within [least, most].
int64_t parse_integer(char const* what, std::string const& text, int64_t least, int64_t most);
/// A positive, finite number.
float parse_positive(char const* what, std::string const& text);
/// "0" or "1".
bool parse_flag(char const* what, std::string const& text);

Decomposition parse_decomposition(char const* what, std::string const& text);
RasterOrder parse_raster(char const* what, std::string const& text);
/// Splits of k, or tiles that are walked side by side.
int32_t parse_launch_number(char const* what, std::string const& text);
DataType parse_type(char const* what, std::string const& text);
Major parse_major(char const* what, std::string const& text);
/// A weight format of `bits` bits a code; 0: of any.
WeightFormat parse_format(char const* what, int bits, std::string const& name);
/// more: names beside these that are legal there, in the message, ", swigluoai".
Activation parse_activation(char const* what, std::string const& name, char const* more = "");

/// That the registry has the kernel; for calls that have nothing to compute, which no plan looks at.
void check_kernel_name(char const* what, char const* family, std::string const& name);

/// A group size as the operators take it, -1 for all of k, as GemmProblem has it.
int32_t group_of(char const* what, int64_t group_size);

}  // namespace minfer::torch_binding
