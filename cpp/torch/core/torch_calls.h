// The calls of torch that can fail: memory, and copies. What has failed, for which operator, of how many bytes and why is in the message.
#pragma once

#include <string>
#include <utility>

#include "core/failure.h"
#include "core/tensor.h"

namespace minfer::torch_binding {

/// Torch's reason for the failure of the thread's last call, its first line.
std::string reason_of_torch();

/// Uninitialised and contiguous, on like's device; an empty tensor where torch could not.
Tensor try_allocate(Tensor const& like, Shape shape, ScalarType type);
[[noreturn]] void no_memory(char const* op, Tensor const& like, Shape shape, ScalarType type, std::string const& what);

template <class... Parts>
[[gnu::cold, gnu::noinline]] std::string text_of(Parts const&... parts) {
  std::ostringstream text;
  ((text << parts), ...);
  return text.str();
}

/// Uninitialised and contiguous, on like's device. what: streamed into the message when there is no memory, "out", or "a copy of ", name.
template <class... What>
Tensor allocate(char const* op, Tensor const& like, Shape shape, ScalarType type, What const&... what) {
  Tensor x = try_allocate(like, shape, type);
  if (!x.defined()) no_memory(op, like, shape, type, text_of(what...));
  return x;
}

/// Bytes for a launch, if it needs any: 256-byte aligned, of any content.
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

/// to = from, element by element, with from's type; they do not overlap. name: of the argument, in messages.
void copy_into(char const* op, char const* name, Tensor const& to, Tensor const& from);
/// Writes zeros everywhere.
void fill_with_zeros(char const* op, char const* name, Tensor const& x);

/// A contiguous copy in memory of its own, which is aligned.
Tensor copy_of(char const* op, char const* name, Tensor const& x);
/// A copy of x with other strides, of `elements` of memory.
Tensor copy_with_strides(char const* op, char const* name, Tensor const& x, Shape strides, int64_t elements);

}  // namespace minfer::torch_binding
