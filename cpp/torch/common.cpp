#include "common.h"

#include <cstdio>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "minfer/registry.h"

// Weak: a CPU-only torch has no such function, and the module must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace minfer::torch_binding {

std::string list_of(std::vector<int64_t> const& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

std::string shape_of(Tensor const& tensor) { return list_of(sizes_of(tensor)); }

char const* dtype_name(ScalarType type) { return torch::headeronly::toString(type); }

bool is_16bit_float(ScalarType type) { return type == ScalarType::Half || type == ScalarType::BFloat16; }

DataType data_type(ScalarType type) {
  return type == ScalarType::Half ? DataType::kF16 : type == ScalarType::BFloat16 ? DataType::kBF16 : DataType::kF32;
}

std::vector<int64_t> sizes_of(Tensor const& x) {
  std::vector<int64_t> sizes(size_t(x.dim()));
  for (int64_t i = 0; i < x.dim(); ++i) sizes[size_t(i)] = x.size(i);
  return sizes;
}

Tensor aligned_rows(Tensor const& x) {
  Tensor const rows = unit_rows(x);
  bool const fits = reinterpret_cast<uintptr_t>(rows.data_ptr()) % 16 == 0 &&
                    (rows.size(0) <= 1 || rows.stride(0) * int64_t(rows.element_size()) % 16 == 0);
  if (fits) return rows;
  // Fresh rows whose stride is a multiple of 16 bytes; n is a multiple of 8, which for bytes may not be enough.
  int64_t const unit = 16 / int64_t(rows.element_size());
  std::vector<int64_t> const shape = {rows.size(0), round_up(rows.size(1), unit)};
  Tensor padded = torch::stable::new_empty(rows, shape);
  Tensor inside = torch::stable::narrow(padded, 1, 0, rows.size(1));
  torch::stable::copy_(inside, rows);
  return inside;
}

namespace {

bool is_aligned(Tensor const& x, int64_t bytes) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % uint64_t(bytes) == 0; }

Tensor copy_of(Tensor const& x) {
  Tensor copy = torch::stable::new_empty(x, sizes_of(x));
  torch::stable::copy_(copy, x);
  return copy;
}

}  // namespace

bool fits(Tensor const& x, RowAccess const& access) {
  if (x.numel() == 0) return true;
  if (!is_aligned(x, access.bytes)) return false;
  int64_t const element = int64_t(x.element_size()), last = x.dim() - 1;
  for (int64_t i = 0; i <= last; ++i) {
    if (x.size(i) == 1) continue;
    int64_t const stride = x.stride(i);
    if (i == last ? stride != 1 : stride * element % access.bytes != 0 || (stride == 0 && !access.broadcast)) return false;
  }
  return true;
}

Tensor readable(Tensor const& x, RowAccess const& access) { return fits(x, access) ? x : copy_of(x); }

Tensor aligned_contiguous(Tensor const& x) { return x.is_contiguous() && is_aligned(x, 16) ? x : copy_of(x); }

Stream current_stream(int32_t device) {
  check(aoti_torch_get_current_cuda_stream != nullptr, "minfer: this torch has no CUDA support, so its CUDA stream cannot be asked for");
  void* stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(device, &stream) == 0, "minfer: torch gave no current CUDA stream for device ", device);
  return static_cast<Stream>(stream);
}

DeviceProperties const& device_properties(int32_t device) {
  static std::mutex mutex;
  static std::unordered_map<int32_t, std::unique_ptr<DeviceProperties>> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto& entry = known[device];
  if (entry == nullptr) {
    auto properties = std::make_unique<DeviceProperties>();
    Status const status = query_device(device, properties.get());
    check(status.ok(), "minfer: ", status.message);
    entry = std::move(properties);
  }
  return *entry;
}

int32_t common_alignment(std::initializer_list<uint64_t> values) {
  uint64_t bits = 16;
  for (uint64_t value : values) bits |= value;
  return int32_t(bits & (~bits + 1));
}

namespace {

std::string device_of(Tensor const& x) {
  return x.is_cuda() ? "cuda:" + std::to_string(x.get_device_index()) : x.is_cpu() ? "cpu" : "another kind of device";
}

}  // namespace

void check_same_device(char const* op, char const* name, Tensor const& x, Beside const& other) {
  if (x.is_cuda() != other.x.is_cuda() || x.get_device_index() != other.x.get_device_index()) {
    fail(op, ": ", name, " must be on ", other.name, "'s device ", device_of(other.x), ", got ", device_of(x));
  }
}

void check_same_device(char const* op, char const* name, Tensor const& tensor, int32_t device) {
  if (!tensor.is_cuda() || tensor.get_device_index() != device) {
    fail(op, ": ", name, " must be on a's device cuda:", device, ", got ", device_of(tensor));
  }
}

void check_bias(char const* op, Tensor const& bias, int64_t n, ScalarType type, int32_t device) {
  check(bias.dim() == 1 && bias.size(0) == n, op, ": bias must be [n] = [", n, "], got ", shape_of(bias));
  check(bias.scalar_type() == type || bias.scalar_type() == ScalarType::Float, op, ": bias must be ", dtype_name(type), " or Float, got ",
        dtype_name(bias.scalar_type()));
  check_same_device(op, "bias", bias, device);
}

void Json::separate() {
  if (!first_) text_ += ", ";
  first_ = true;
}
Json& Json::open(char bracket) {
  separate();
  text_ += bracket;
  return *this;
}
Json& Json::close(char bracket) {
  text_ += bracket;
  first_ = false;
  return *this;
}
Json& Json::key(char const* name) {
  separate();
  text_ += '"';
  text_ += name;
  text_ += "\": ";
  return *this;
}
Json& Json::value(char const* text) {
  separate();
  text_ += '"';
  for (char const* c = text; *c != 0; ++c) {
    if (*c == '"' || *c == '\\') text_ += '\\';
    if (static_cast<unsigned char>(*c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", *c);
      text_ += escaped;
    } else {
      text_ += *c;
    }
  }
  text_ += '"';
  first_ = false;
  return *this;
}
Json& Json::value(int64_t number) {
  separate();
  text_ += std::to_string(number);
  first_ = false;
  return *this;
}
Json& Json::value(double number) {
  separate();
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.6g", number);
  text_ += buffer;
  first_ = false;
  return *this;
}
Json& Json::value(bool flag) {
  separate();
  text_ += flag ? "true" : "false";
  first_ = false;
  return *this;
}

}  // namespace minfer::torch_binding
