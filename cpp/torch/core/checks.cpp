#include "core/checks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace minfer::torch_binding {

void check_same_device(char const* op, char const* name, Tensor const& x, NamedTensor const& other) {
  if (x.device_type() != other.x.device_type() || x.device() != other.x.device()) {
    fail(op, ": ", name, " must be on ", other.name, "'s device ", DeviceOf{other.x}, ", got ", DeviceOf{x});
  }
}

void check_operand(char const* op, char const* name, Tensor const& x, ScalarType type, Shape shape, NamedTensor const& other) {
  if (!same(x.sizes(), shape)) fail(op, ": ", name, " must be ", Listed{shape}, ", got ", x);
  if (x.scalar_type() != type) fail(op, ": ", name, " must be ", type, ", got ", x.scalar_type());
  check_same_device(op, name, x, other);
}

void check_16bit(char const* op, char const* name, Tensor const& x) {
  if (!is_16bit_float(x.scalar_type())) fail(op, ": ", name, " must be float16 or bfloat16, got ", x.scalar_type());
}

void check_16bit(char const* op, char const* name, Tensor const& x, NamedTensor const& other) {
  check_16bit(op, other.name, other.x);
  if (x.scalar_type() != other.x.scalar_type()) {
    fail(op, ": ", name, " must be float16 or bfloat16 like ", other.name, ", got ", x.scalar_type(), " beside ", other.x.scalar_type());
  }
  check_same_device(op, name, x, other);
}

float in_float32(char const* op, char const* name, double value) {
  if (!std::isfinite(float(value))) fail(op, ": ", name, " must be finite in float32, got ", value);
  return float(value);
}

float eps_in_float32(char const* op, double eps) {
  if (!(eps >= 0) || !std::isfinite(float(eps))) fail(op, ": eps must be finite in float32 and not negative, got ", eps);
  return float(eps);
}

void check_bias(char const* op, Tensor const& bias, int64_t n, ScalarType type, NamedTensor const& a) {
  if (bias.dim() != 1 || bias.size(0) != n) fail(op, ": bias must be [n] = [", n, "], got ", bias);
  if (bias.scalar_type() != type && bias.scalar_type() != ScalarType::Float) {
    fail(op, ": bias must be ", type, " or Float, got ", bias.scalar_type());
  }
  check_same_device(op, "bias", bias, a);
}

namespace {

struct Mode {
  int64_t size, stride;
};

/// Whether two elements of a tensor of two modes have the same address: i * a.stride == j * b.stride with i and j within the modes.
bool meet(Mode const& a, Mode const& b) {
  int64_t const divisor = std::gcd(a.stride, b.stride);
  return divisor == 0 || (b.stride / divisor < a.size && a.stride / divisor < b.size);
}

/// Exact for two modes. With more, a tensor counts as overlapping unless every mode, by ascending stride, steps over all elements of those
/// before it.
bool overlaps_itself(Tensor const& x) {
  std::array<Mode, 64> modes;
  size_t count = 0;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) == 0) return false;
    if (x.size(i) == 1) continue;
    if (x.stride(i) == 0 || count == modes.size()) return true;
    modes[count++] = {x.size(i), x.stride(i)};
  }
  std::sort(modes.begin(), modes.begin() + int64_t(count), [](Mode const& a, Mode const& b) { return a.stride < b.stride; });
  int64_t reach = 0;  // from the first to the last element of the modes so far
  bool apart = true;
  for (size_t i = 0; i < count; ++i) {
    apart = apart && modes[i].stride > reach;
    reach += (modes[i].size - 1) * modes[i].stride;
  }
  return !apart && (count != 2 || meet(modes[0], modes[1]));
}

/// Bytes from the beginning of a tensor's first element to the end of its last one.
int64_t extent_of(Tensor const& x) {
  int64_t last = 0;
  for (int64_t i = 0; i < x.dim(); ++i) last += (x.size(i) - 1) * x.stride(i);
  return (last + 1) * x.element_size();
}

}  // namespace

void check_apart(char const* op, Tensor const& out, char const* name) {
  if (out.is_contiguous()) return;
  if (overlaps_itself(out)) fail(op, ": ", name, " must not overlap itself, got ", out, " with strides ", Listed{out.strides()});
}

void check_no_overlap(char const* op, Tensor const& out, char const* name, Tensor const& x, char const* out_name) {
  int64_t const elements = out.numel(), others = x.numel();
  if (elements == 0 || others == 0) return;
  uint64_t const begin = address_of(out.data_ptr()), other = address_of(x.data_ptr());
  int64_t const extent = extent_of(out), reach = extent_of(x);
  if (begin + uint64_t(extent) <= other || other + uint64_t(reach) <= begin) return;
  bool const dense = extent == elements * out.element_size() && reach == others * x.element_size();
  if (begin == other || dense) fail(op, ": ", out_name, " must not overlap ", name, ", got ", out, " and ", name, ' ', x, " in one memory");
}

bool is_same_view(Tensor const& a, Tensor const& b) {
  return a.data_ptr() == b.data_ptr() && a.scalar_type() == b.scalar_type() && same(a.sizes(), b.sizes()) && same(a.strides(), b.strides());
}

}  // namespace minfer::torch_binding
