// A torch tensor. Its sizes, strides, type, device and address are read once, when it is made: each of them costs a call of the stable
// ABI's C functions. Only cpp/torch includes torch's headers.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <vector>

#include "minfer/types.h"

namespace minfer::torch_binding {

using torch::headeronly::ScalarType;
/// Extents or strides of a tensor's modes, which lie elsewhere. A list in braces lives as long as the call that takes it.
using Shape = torch::headeronly::IntHeaderOnlyArrayRef;

/// Extents or strides that lie in the object itself, without an allocation for up to eight modes.
class ShapeArray {
 public:
  explicit ShapeArray(size_t modes) : count_(modes) {
    if (modes > few_.size()) many_.resize(modes);
  }
  explicit ShapeArray(Shape from) : ShapeArray(from.size()) { std::copy(from.begin(), from.end(), data()); }

  int64_t* data() { return many_.empty() ? few_.data() : many_.data(); }
  int64_t const* data() const { return many_.empty() ? few_.data() : many_.data(); }
  int64_t& operator[](size_t mode) { return data()[mode]; }
  int64_t& back() { return data()[count_ - 1]; }
  size_t size() const { return count_; }
  operator Shape() const { return {data(), count_}; }

 private:
  size_t count_;
  std::array<int64_t, 8> few_;
  std::vector<int64_t> many_;
};

/// A reference to a tensor, as at::Tensor is; by default to none. The tensor must not be resized while this lives.
class Tensor {
 public:
  Tensor() = default;
  /// Takes ownership of the handle.
  explicit Tensor(AtenTensorHandle handle);

  bool defined() const { return handle_ != nullptr; }
  AtenTensorHandle handle() const { return handle_.get(); }

  int64_t dim() const { return dim_; }
  Shape sizes() const { return {sizes_, size_t(dim_)}; }
  Shape strides() const { return {strides_, size_t(dim_)}; }
  int64_t size(int64_t mode) const { return sizes_[mode]; }
  int64_t stride(int64_t mode) const { return strides_[mode]; }  // in elements
  int64_t numel() const;
  bool is_contiguous() const;
  ScalarType scalar_type() const { return type_; }
  int64_t element_size() const { return element_size_; }
  void* data_ptr() const { return data_; }
  bool is_aligned(int64_t bytes) const { return reinterpret_cast<uintptr_t>(data_) % uint64_t(bytes) == 0; }
  bool is_cuda() const;
  bool is_cpu() const;
  int32_t device_type() const { return device_type_; }  // in the numbering of the C functions
  int32_t device() const { return device_; }

 private:
  std::shared_ptr<AtenTensorOpaque> handle_;
  int64_t const *sizes_ = nullptr, *strides_ = nullptr;  // memory of the tensor
  void* data_ = nullptr;
  int32_t dim_ = 0, element_size_ = 0, device_type_ = -1, device_ = -1;
  ScalarType type_ = ScalarType::Undefined;
};

bool same(Shape a, Shape b);

/// A message shows a tensor by its shape, "[2, 3]".
std::ostream& operator<<(std::ostream& out, Tensor const& x);
/// A shape in a message, since ArrayRef's own operator writes "{2, 3}".
struct Listed {
  Shape shape;
};
std::ostream& operator<<(std::ostream& out, Listed const& x);
/// The device of a tensor in a message: "cuda:1".
struct DeviceOf {
  Tensor const& x;
};
std::ostream& operator<<(std::ostream& out, DeviceOf const& x);

/// Types in the numbering of the C functions. Those that no operator takes are Undefined.
ScalarType type_of_code(int32_t code);
int32_t type_code(ScalarType type);
int64_t bytes_of(ScalarType type);
inline bool is_16bit_float(ScalarType type) { return type == ScalarType::Half || type == ScalarType::BFloat16; }
/// The type as kernels name it; raises for one that no kernel reads or writes.
DataType data_type(ScalarType type);

/// The largest power of two, at most 16, that divides all values, which are in bytes.
inline int32_t common_alignment(std::initializer_list<uint64_t> values) {
  uint64_t bits = 16;
  for (uint64_t value : values) bits |= value;
  return int32_t(bits & (~bits + 1));
}
inline uint64_t address_of(void const* data) { return reinterpret_cast<uintptr_t>(data); }

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

/// Whether TMA takes this stride, in elements of the tensor: it must be a multiple of 16 bytes.
inline bool is_aligned_stride(int64_t stride, Tensor const& x) { return stride * x.element_size() % 16 == 0; }

/// The stride, in elements, of a mode of size 1. No kernel steps along it, but TMA requires a multiple of 16 bytes, and it must be no less
/// than the extent of the modes that it steps over.
inline int64_t unused_stride(int64_t extent, int64_t element_bytes) { return round_up(std::max<int64_t>(extent, 1), 16 / element_bytes); }

}  // namespace minfer::torch_binding
