// The calls of torch that can fail: allocations and copies. The message of a failure says which operator it was for, how many bytes were
// asked for and why it failed.
#pragma once

#include <string>
#include <utility>

#include "core/failure.h"
#include "core/tensor.h"

namespace minfer::torch_binding {

/// The first line of torch's message about the thread's last failed call.
std::string reason_of_torch();

/// Uninitialised and contiguous, on like's device; undefined where torch could not allocate it.
Tensor try_allocate(Tensor const& like, Shape shape, ScalarType type);
/// The same with strides of its own, which keep elements apart.
Tensor try_allocate(Tensor const& like, Shape shape, Shape strides, ScalarType type);
/// Raises; torch's message must still be that of the failed allocation.
[[noreturn]] void no_memory(char const* op, Tensor const& like, Shape shape, ScalarType type, std::string const& what);

template <class... Parts>
[[gnu::cold, gnu::noinline]] std::string text_of(Parts const&... parts) {
  std::ostringstream text;
  ((text << parts), ...);
  return text.str();
}

/// Uninitialised and contiguous, on like's device. The parts of `what`, such as "a copy of ", name, are the message's words for the tensor.
template <class... What>
Tensor allocate(char const* op, Tensor const& like, Shape shape, ScalarType type, What const&... what) {
  Tensor x = try_allocate(like, shape, type);
  if (!x.defined()) no_memory(op, like, shape, type, text_of(what...));
  return x;
}

/// The same with strides of its own.
template <class... What>
Tensor allocate_strided(char const* op, Tensor const& like, Shape shape, Shape strides, ScalarType type, What const&... what) {
  Tensor x = try_allocate(like, shape, strides, type);
  if (!x.defined()) no_memory(op, like, shape, type, text_of(what...));
  return x;
}

/// The workspace of a launch: 256-byte aligned and uninitialised. No allocation where it needs none.
class Workspace {
 public:
  template <class... What>
  Workspace(char const* op, Tensor const& like, size_t bytes, What const&... what) : bytes_(bytes) {
    if (bytes > 0) memory_ = allocate(op, like, {int64_t(bytes)}, ScalarType::Byte, "the workspace of ", what...);
  }
  void* data() const { return memory_.data_ptr(); }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  Tensor memory_;
};

/// to = from, element by element, of one type and without overlap. name: the argument's, for messages.
void copy_into(char const* op, char const* name, Tensor const& to, Tensor const& from);
/// Writes zeros everywhere.
void fill_with_zeros(char const* op, char const* name, Tensor const& x);

/// A contiguous copy in a new allocation, which is aligned.
Tensor copy_of(char const* op, char const* name, Tensor const& x);
/// A copy of x with these strides, which reach over this many elements.
Tensor copy_with_strides(char const* op, char const* name, Tensor const& x, Shape strides, int64_t elements);

/// The memory of x, from its first element on, in another shape.
Tensor view_of(char const* op, char const* name, Tensor const& x, Shape shape, Shape strides);
/// The same, contiguous.
Tensor view_of(char const* op, char const* name, Tensor const& x, Shape shape);
/// All modes of x but the last as one, [rows, columns]: a view where they are evenly spaced, else undefined. x has at least one mode.
Tensor matrix_view(char const* op, char const* name, Tensor const& x);
/// The same; a copy where they are not evenly spaced.
Tensor as_matrix(char const* op, char const* name, Tensor const& x);

}  // namespace minfer::torch_binding
