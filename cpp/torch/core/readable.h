// Operands as kernels read them: the caller's tensors, or copies of those that a kernel cannot read.
#pragma once

#include <vector>

#include "core/tensor.h"
#include "core/torch_calls.h"

namespace minfer::torch_binding {

/// How a kernel accesses a tensor: rows are contiguous along the last mode, and base and strides are multiples of `bytes`, a power of two.
struct RowAccess {
  int64_t bytes;
  bool broadcast;  // whether the other modes may have stride 0
};
constexpr RowAccess kTmaRows{16, false}, kVectorRows{16, true};

/// Whether a kernel can access the tensor as it is. The stride of a mode of size 1 does not matter, and an empty tensor always fits.
bool fits(Tensor const& x, RowAccess const& access);
/// The tensor, or a copy where it does not fit.
inline Tensor readable(char const* op, char const* name, Tensor const& x, RowAccess const& access) {
  return fits(x, access) ? x : copy_of(op, name, x);
}

/// The tensor, or a copy where its last mode has no unit stride.
inline Tensor unit_rows(char const* op, char const* name, Tensor const& x) {
  int64_t const last = x.dim() - 1;
  return x.stride(last) == 1 || x.size(last) <= 1 ? x : copy_of(op, name, x);
}

inline Tensor contiguous(char const* op, char const* name, Tensor const& x) { return x.is_contiguous() ? x : copy_of(op, name, x); }
/// The tensor, or a copy where it is not contiguous or its base is no multiple of 16 bytes.
inline Tensor aligned_contiguous(char const* op, char const* name, Tensor const& x) {
  return x.is_contiguous() && x.is_aligned(16) ? x : copy_of(op, name, x);
}

/// The matrix, or a copy where TMA cannot address its rows: unit stride, 16-byte aligned base and row stride.
Tensor aligned_rows(char const* op, char const* name, Tensor const& x);

/// Keeps the memory that a call's operands point to until the call is over: the caller's tensors, or copies of them.
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

/// The leading dimension of a matrix: the stride of its rows, or for a single row the number of columns.
inline int64_t leading(Tensor const& x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); }

}  // namespace minfer::torch_binding
