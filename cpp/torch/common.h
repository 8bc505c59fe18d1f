// What every binding uses: argument checks, operand descriptions, the current stream, device facts. Only cpp/torch includes torch's headers.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer::torch_binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// Raises a Python RuntimeError whose text is the arguments streamed one after the other.
template <class... Parts>
[[noreturn]] void fail(Parts const&... parts) {
  std::ostringstream text;
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

template <class... Parts>
void check(bool condition, Parts const&... parts) {
  if (!condition) fail(parts...);
}

/// "[2, 3]"
std::string list_of(std::vector<int64_t> const& values);
std::string shape_of(Tensor const& tensor);
std::vector<int64_t> sizes_of(Tensor const& tensor);
char const* dtype_name(ScalarType type);
bool is_16bit_float(ScalarType type);
DataType data_type(ScalarType type);

/// The stream torch runs on now, for `device`.
Stream current_stream(int32_t device);

/// Facts of a device of this machine, asked for once per process.
DeviceProperties const& device_properties(int32_t device);

/// Largest power of two, at most 16, that divides all of `values` (bytes).
int32_t common_alignment(std::initializer_list<uint64_t> values);

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// A tensor with unit stride along its last mode; a copy where it has none.
inline Tensor unit_rows(Tensor const& x) {
  int64_t const last = x.dim() - 1;
  return x.stride(last) == 1 || x.size(last) <= 1 ? x : torch::stable::contiguous(x);
}

/// The rows of a matrix as TMA can address them: unit stride, 16-byte aligned base and row stride; a copy where they are not.
Tensor aligned_rows(Tensor const& x);

/// How a kernel reads or writes the rows of a tensor, which are contiguous along its last mode: so many bytes at a time that base and strides
/// must be multiples of them, a power of two.
struct RowAccess {
  int64_t bytes;
  bool broadcast;  // other modes may have stride 0
};
constexpr RowAccess kTmaRows{16, false}, kVectorRows{16, true};

/// Modes of one element may have any stride, a tensor without elements any strides.
bool fits(Tensor const& x, RowAccess const& access);
/// A copy where it does not fit, in memory of its own: contiguous() keeps a contiguous tensor whose base is not aligned.
Tensor readable(Tensor const& x, RowAccess const& access);
/// A contiguous tensor whose base is a multiple of 16 bytes; a copy where it is not.
Tensor aligned_contiguous(Tensor const& x);

/// An operand that others are compared with, by its name in messages.
struct Beside {
  char const* name;
  Tensor const& x;
};

/// Raise unless the argument can be used beside another, or an `a` on `device`.
void check_same_device(char const* op, char const* name, Tensor const& x, Beside const& other);
void check_same_device(char const* op, char const* name, Tensor const& tensor, int32_t device);
void check_bias(char const* op, Tensor const& bias, int64_t n, ScalarType type, int32_t device);

/// A JSON object or list built left to right; strings are escaped.
class Json {
 public:
  Json& open(char bracket);
  Json& close(char bracket);
  Json& key(char const* name);
  Json& value(char const* text);
  Json& value(std::string const& text) { return value(text.c_str()); }
  Json& value(int64_t number);
  Json& value(double number);
  Json& value(bool flag);
  std::string text() const { return text_; }

 private:
  void separate();
  std::string text_;
  bool first_ = true;
};

}  // namespace minfer::torch_binding
