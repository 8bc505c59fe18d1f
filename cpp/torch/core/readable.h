// Operands as kernels read them: themselves, or copies where they cannot.
#pragma once

#include <vector>

#include "core/tensor.h"
#include "core/torch_calls.h"

namespace minfer::torch_binding {

/// How a kernel reads or writes the rows of a tensor, which are contiguous along its last mode: so many bytes at a time that base and strides
/// must be multiples of them, a power of two.
struct RowAccess {
  int64_t bytes;
  bool broadcast;  // other modes may have stride 0
};
constexpr RowAccess kTmaRows{16, false}, kVectorRows{16, true};

/// Modes of one element may have any stride, a tensor without elements any strides.
bool fits(Tensor const& x, RowAccess const& access);
/// A copy where it does not fit.
inline Tensor readable(char const* op, char const* name, Tensor const& x, RowAccess const& access) {
  return fits(x, access) ? x : copy_of(op, name, x);
}

/// A tensor with unit stride along its last mode.
inline Tensor unit_rows(char const* op, char const* name, Tensor const& x) {
  int64_t const last = x.dim() - 1;
  return x.stride(last) == 1 || x.size(last) <= 1 ? x : copy_of(op, name, x);
}

inline Tensor contiguous(char const* op, char const* name, Tensor const& x) { return x.is_contiguous() ? x : copy_of(op, name, x); }
/// Contiguous, with a base that is a multiple of 16 bytes.
inline Tensor aligned_contiguous(char const* op, char const* name, Tensor const& x) {
  return x.is_contiguous() && x.is_aligned(16) ? x : copy_of(op, name, x);
}

/// The rows of a matrix as TMA can address them: unit stride, 16-byte aligned base and row stride.
Tensor aligned_rows(char const* op, char const* name, Tensor const& x);

/// What the operands of a call point to, until it is over: the caller's tensors, or copies of them.
class Held {
 public:
  Held() { tensors_.reserve(12); }
  void* keep(Tensor const& x) {
    tensors_.push_back(x);
    return x.data_ptr();
  }

 private:
  std::vector<Tensor> tensors_;
};

/// From one row of a matrix to the next; of one row, its columns.
inline int64_t leading(Tensor const& x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); }

}  // namespace minfer::torch_binding
