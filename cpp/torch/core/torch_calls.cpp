#include "core/torch_calls.h"

#include <algorithm>
#include <iomanip>

#include "minfer/registry.h"

// Weak, since torch has it from 2.13 on. Older versions write the reason to standard error.
extern "C" __attribute__((weak)) char const* torch_exception_get_what_without_backtrace();

namespace minfer::torch_binding {

namespace {

constexpr double kKiB = 1024.0;

/// "1.5 KiB" for 1536.
std::string text_of_bytes(double bytes) {
  char const* const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  size_t unit = 0;
  for (; bytes >= kKiB && unit + 1 < std::size(units); ++unit) bytes /= kKiB;
  return text_of(std::fixed, std::setprecision(unit == 0 ? 0 : 1), bytes, ' ', units[unit]);
}

/// "; 1.5 GiB of cuda:0's 139.8 GiB are free", or nothing where the device cannot be queried.
std::string memory_of(Tensor const& like) {
  int64_t free = 0, total = 0;
  if (!like.is_cuda() || !query_memory(like.device(), &free, &total).ok()) return "";
  return text_of("; ", text_of_bytes(double(free)), " of ", DeviceOf{like}, "'s ", text_of_bytes(double(total)),
                 " are free, but for what torch holds");
}

ShapeArray contiguous_strides(Shape shape) {
  ShapeArray strides(shape.size());
  int64_t stride = 1;
  for (size_t mode = shape.size(); mode-- > 0;) {
    strides[mode] = stride;
    stride *= std::max<int64_t>(shape[mode], 1);
  }
  return strides;
}

[[noreturn, gnu::cold]] void no_copy(char const* op, char const* verb, char const* name, Tensor const& x) {
  fail(op, ": could not ", verb, " ", name, ' ', x, ": ", reason_of_torch());
}

}  // namespace

std::string reason_of_torch() {
  char const* const what = torch_exception_get_what_without_backtrace != nullptr ? torch_exception_get_what_without_backtrace() : nullptr;
  std::string reason = what != nullptr ? what : "";
  reason.erase(std::min(reason.find('\n'), reason.size()));
  return reason.empty() ? "torch gives its reason on standard error" : reason;
}

Tensor try_allocate(Tensor const& like, Shape shape, ScalarType type) { return try_allocate(like, shape, contiguous_strides(shape), type); }

Tensor try_allocate(Tensor const& like, Shape shape, Shape strides, ScalarType type) {
  AtenTensorHandle handle = nullptr;
  AOTITorchError const error = aoti_torch_empty_strided(int64_t(shape.size()), shape.data(), strides.data(), type_code(type),
                                                        like.device_type(), like.device(), &handle);
  return error == 0 ? Tensor(handle) : Tensor();
}

void no_memory(char const* op, Tensor const& like, Shape shape, ScalarType type, std::string const& what) {
  std::string const reason = reason_of_torch();
  double bytes = double(bytes_of(type));
  for (int64_t extent : shape) bytes *= double(extent);
  fail(op, ": could not allocate ", text_of_bytes(bytes), " for ", what, ": ", reason, memory_of(like));
}

void copy_into(char const* op, char const* name, Tensor const& to, Tensor const& from) {
  if (aoti_torch_copy_(to.handle(), from.handle(), 0) != 0) no_copy(op, "copy", name, from);
}

void fill_with_zeros(char const* op, char const* name, Tensor const& x) {
  if (aoti_torch_zero_(x.handle()) != 0) no_copy(op, "fill", name, x);
}

Tensor copy_of(char const* op, char const* name, Tensor const& x) {
  Tensor copy = allocate(op, x, x.sizes(), x.scalar_type(), "a copy of ", name, ' ', x);
  copy_into(op, name, copy, x);
  return copy;
}

Tensor copy_with_strides(char const* op, char const* name, Tensor const& x, Shape strides, int64_t elements) {
  Tensor const memory = allocate(op, x, {elements}, x.scalar_type(), "a copy of ", name, ' ', x);
  AtenTensorHandle handle = nullptr;
  if (aoti_torch__reinterpret_tensor(memory.handle(), x.dim(), x.sizes().data(), strides.data(), 0, &handle) != 0) {
    no_copy(op, "copy", name, x);
  }
  Tensor const copy(handle);
  copy_into(op, name, copy, x);
  return copy;
}

Tensor view_of(char const* op, char const* name, Tensor const& x, Shape shape, Shape strides) {
  AtenTensorHandle handle = nullptr;
  int64_t const offset = 0;  // past x's own
  if (aoti_torch__reinterpret_tensor(x.handle(), int64_t(shape.size()), shape.data(), strides.data(), offset, &handle) != 0) {
    no_copy(op, "view", name, x);
  }
  return Tensor(handle);
}

Tensor view_of(char const* op, char const* name, Tensor const& x, Shape shape) {
  return view_of(op, name, x, shape, contiguous_strides(shape));
}

Tensor matrix_view(char const* op, char const* name, Tensor const& x) {
  int64_t const last = x.dim() - 1;
  int64_t rows = 1, step = 0;  // of the rows so far, the innermost first
  for (int64_t mode = last - 1; mode >= 0; --mode) {
    int64_t const extent = x.size(mode);
    if (extent != 1 && rows != 0) {
      if (rows > 1 && x.stride(mode) != rows * step) return {};
      if (rows == 1) step = x.stride(mode);
    }
    rows *= extent;
  }
  return view_of(op, name, x, {rows, x.size(last)}, {step, x.stride(last)});
}

Tensor as_matrix(char const* op, char const* name, Tensor const& x) {
  Tensor const view = matrix_view(op, name, x);
  return view.defined() ? view : as_matrix(op, name, copy_of(op, name, x));
}

}  // namespace minfer::torch_binding
