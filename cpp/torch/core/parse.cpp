#include "core/parse.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <sstream>

#include "core/failure.h"
#include "minfer/registry.h"

namespace minfer::torch_binding {

namespace {

/// The enumerator that a text names, of those that are legal here.
template <class Enum>
Enum parse_name(char const* what, std::string const& text, std::initializer_list<Enum> legal) {
  std::string names;
  for (Enum const& value : legal) {
    if (text == name_of(value)) return value;
    char const* const separator = &value == legal.begin() ? "" : &value + 1 == legal.end() ? " or " : ", ";
    names += std::string(separator) + name_of(value);
  }
  fail(what, " must be ", names, ", got '", text, "'");
}

}  // namespace

std::vector<std::string> split(std::string const& text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0;;) {
    size_t const end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end == std::string::npos ? end : end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

int64_t parse_integer(char const* what, std::string const& text, int64_t min, int64_t max) {
  int64_t value = 0;
  char const* const end = text.data() + text.size();
  auto const [stop, error] = std::from_chars(text.data(), end, value);
  bool const whole = stop == end && (error == std::errc() || error == std::errc::result_out_of_range);
  if (!whole) fail(what, " must be an integer, got '", text, "'");
  if (error != std::errc() || value < min || value > max) fail(what, " must be ", min, " to ", max, ", got ", text);
  return value;
}

float parse_positive(char const* what, std::string const& text) {
  char* end = nullptr;
  float const value = std::strtof(text.c_str(), &end);
  if (end == text.c_str() || *end != 0 || !(value > 0.0f) || !std::isfinite(value))
    fail(what, " must be a positive number, got '", text, "'");
  return value;
}

bool parse_flag(char const* what, std::string const& text) {
  if (text != "0" && text != "1") fail(what, " must be 0 or 1, got '", text, "'");
  return text == "1";
}

Decomposition parse_decomposition(char const* what, std::string const& text) {
  return parse_name(what, text, {Decomposition::kDataParallel, Decomposition::kStreamK, Decomposition::kSplitK, Decomposition::kRanges});
}

RasterOrder parse_raster(char const* what, std::string const& text) {
  return parse_name(what, text, {RasterOrder::kAlongM, RasterOrder::kAlongN});
}

int32_t parse_launch_number(char const* what, std::string const& text) { return int32_t(parse_integer(what, text, 1, 4096)); }

DataType parse_type(char const* what, std::string const& text) {
  return parse_name(what, text, {DataType::kF16, DataType::kBF16, DataType::kF32});
}

DataType parse_16bit_type(char const* what, std::string const& text) {
  return parse_name((what + std::string(": type")).c_str(), text, {DataType::kF16, DataType::kBF16});
}

Major parse_major(char const* what, std::string const& text) {
  if (text != "k" && text != "mn") fail(what, " must be k or mn, got '", text, "'");
  return text == "k" ? Major::kK : Major::kMN;
}

WeightFormat parse_format(char const* what, int bits, std::string const& name) {
  std::string known;
  for (WeightFormat format : kWeightFormats) {
    if (bits != 0 && bits_of(format) != bits) continue;
    if (name == name_of(format)) return format;
    known += (known.empty() ? "" : ", ") + std::string(name_of(format));
  }
  fail(what, ": ", bits == 8 ? "w8_format" : "w4_format", " must be one of ", known, ", got '", name, "'");
}

Activation parse_activation(char const* what, std::string const& name, char const* more) {
  std::string known;
  for (Activation a : kActivations) {
    if (name == name_of(a)) return a;
    known += (known.empty() ? "" : ", ") + std::string(name_of(a));
  }
  fail(what, ": activation must be one of ", known, more, ", got '", name, "'");
}

GateActivation parse_gate_activation(char const* what, std::string const& name) {
  if (name != kSwigluOai) return {parse_activation(what, name, ", swigluoai")};
  return {Activation::kSilu, 1.702f, 7.0f, 7.0f, 1.0f};
}

GateLayout parse_gate_layout(char const* what, std::string const& name) {
  if (name == "halves") return GateLayout::kHalves;
  if (name == "alternating") return GateLayout::kAlternating;
  if (name == "blocks") return GateLayout::kBlocks;
  fail(what, ": gate_layout must be halves, alternating or blocks, got '", name, "'");
}

void check_kernel_name(char const* what, char const* family, std::string const& name) {
  KernelInfo const* const kernel = find_kernel(name.c_str());
  if (kernel == nullptr || std::strcmp(kernel->family, family) != 0) fail(what, ": kernel '", name, "' is not in the registry of ", family);
}

int32_t group_of(char const* what, int64_t group_size) {
  if (group_size < -1) fail(what, ": group_size must be -1 (all of k) or a power of two, got ", group_size);
  return group_size == -1 || group_size > INT32_MAX ? 0 : int32_t(group_size);  // k has fewer than 32 bits
}

}  // namespace minfer::torch_binding
