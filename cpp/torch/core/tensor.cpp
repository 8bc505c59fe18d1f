#include "core/tensor.h"

#include <array>
#include <ostream>

#include "core/failure.h"

namespace minfer::torch_binding {

namespace {

/// Torch can always answer these questions about a tensor that it has passed to an operator.
void require(AOTITorchError error, char const* what) {
  if (error != 0) fail("minfer: torch could not say a tensor's ", what);
}

struct Type {
  ScalarType type;
  int32_t code, bytes;
};

/// The types that operators take, or that messages name.
std::array<Type, 12> const& types() {
  static std::array<Type, 12> const all{{{ScalarType::Half, aoti_torch_dtype_float16(), 2},
                                         {ScalarType::BFloat16, aoti_torch_dtype_bfloat16(), 2},
                                         {ScalarType::Float, aoti_torch_dtype_float32(), 4},
                                         {ScalarType::Int, aoti_torch_dtype_int32(), 4},
                                         {ScalarType::Byte, aoti_torch_dtype_uint8(), 1},
                                         {ScalarType::Long, aoti_torch_dtype_int64(), 8},
                                         {ScalarType::Char, aoti_torch_dtype_int8(), 1},
                                         {ScalarType::Float8_e4m3fn, aoti_torch_dtype_float8_e4m3fn(), 1},
                                         {ScalarType::Double, aoti_torch_dtype_float64(), 8},
                                         {ScalarType::Bool, aoti_torch_dtype_bool(), 1},
                                         {ScalarType::Short, aoti_torch_dtype_int16(), 2},
                                         {ScalarType::Float8_e5m2, aoti_torch_dtype_float8_e5m2(), 1}}};
  return all;
}

Type const& type_of(ScalarType type) {
  for (Type const& t : types()) {
    if (t.type == type) return t;
  }
  fail("minfer: no operator makes a tensor of ", type);
}

Type const* find_code(int32_t code) {
  for (Type const& t : types()) {
    if (t.code == code) return &t;
  }
  return nullptr;
}

int32_t cuda_type() {
  static int32_t const type = aoti_torch_device_type_cuda();
  return type;
}

}  // namespace

Tensor::Tensor(AtenTensorHandle handle) : handle_(handle, [](AtenTensorHandle owned) { aoti_torch_delete_tensor_object(owned); }) {
  int64_t modes = 0, *sizes = nullptr, *strides = nullptr;
  int32_t code = 0;
  require(aoti_torch_get_dim(handle, &modes), "modes");
  require(aoti_torch_get_sizes(handle, &sizes), "sizes");
  require(aoti_torch_get_strides(handle, &strides), "strides");
  require(aoti_torch_get_dtype(handle, &code), "type");
  require(aoti_torch_get_device_type(handle, &device_type_), "device");
  require(aoti_torch_get_device_index(handle, &device_), "device");
  require(aoti_torch_get_data_ptr(handle, &data_), "memory");
  dim_ = int32_t(modes);
  sizes_ = sizes;
  strides_ = strides;
  Type const* const known = find_code(code);
  type_ = known != nullptr ? known->type : ScalarType::Undefined;
  element_size_ = known != nullptr ? known->bytes : int32_t(aoti_torch_dtype_element_size(code));
}

int64_t Tensor::numel() const {
  int64_t count = 1;
  for (int64_t extent : sizes()) count *= extent;
  return count;
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  bool dense = true;
  for (int64_t mode = dim_ - 1; mode >= 0; --mode) {
    dense = dense && (sizes_[mode] == 1 || strides_[mode] == expected);
    expected *= sizes_[mode];
  }
  return dense || expected == 0;
}

bool Tensor::is_cuda() const { return device_type_ == cuda_type(); }
bool Tensor::is_cpu() const { return device_type_ == aoti_torch_device_type_cpu(); }

bool same(Shape a, Shape b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

std::ostream& operator<<(std::ostream& out, Listed const& x) {
  out << '[';
  for (size_t i = 0; i < x.shape.size(); ++i) out << (i ? ", " : "") << x.shape[i];
  return out << ']';
}
std::ostream& operator<<(std::ostream& out, Tensor const& x) { return out << Listed{x.sizes()}; }
std::ostream& operator<<(std::ostream& out, DeviceOf const& place) {
  if (place.x.is_cuda()) return out << "cuda:" << place.x.device();
  return out << (place.x.is_cpu() ? "cpu" : "another kind of device");
}

ScalarType type_of_code(int32_t code) {
  Type const* const known = find_code(code);
  return known != nullptr ? known->type : ScalarType::Undefined;
}
int32_t type_code(ScalarType type) { return type_of(type).code; }
int64_t bytes_of(ScalarType type) { return type_of(type).bytes; }

DataType data_type(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return DataType::kF16;
    case ScalarType::BFloat16: return DataType::kBF16;
    case ScalarType::Float: return DataType::kF32;
    case ScalarType::Float8_e4m3fn: return DataType::kE4M3;
    case ScalarType::Char: return DataType::kS8;
    default: fail("minfer: no kernel reads or writes elements of ", type);
  }
}

}  // namespace minfer::torch_binding
