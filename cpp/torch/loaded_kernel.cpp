// Private operators of minfer.fuse: kernels that are loaded from a cubin.
#include "minfer/loaded_kernel.h"

#include <cstring>

#include "core/checks.h"
#include "core/device.h"
#include "core/operators.h"

namespace minfer::torch_binding {

namespace {

/// code: uint8 of CPU memory.
int64_t load(Tensor const& code, std::string const& name, int64_t shared_bytes) {
  char const* op = "minfer::_load_kernel";
  if (!code.is_cpu() || code.element_size() != 1 || !code.is_contiguous() || code.numel() < 64) {
    fail(op, ": code must be the bytes of a cubin in CPU memory, got ", code, " of ", DeviceOf{code});
  }
  LoadedKernel const* kernel = nullptr;
  Status const status = load_kernel(code.data_ptr(), name.c_str(), size_t(shared_bytes), &kernel);
  if (!status.ok()) fail(op, ": ", name, ": ", status.message);
  return int64_t(reinterpret_cast<intptr_t>(kernel));
}

constexpr size_t kMostParameters = 64;

/// One parameter of a kernel; the descriptor of a TMA operand is the largest.
struct alignas(kTensorMapAlignment) Parameter {
  unsigned char bytes[kTensorMapBytes];
};

enum ParameterKind : int64_t { kAddress, kInt32, kInt64, kTensorMap };

/// Reads the words that describe parameters.
class Words {
 public:
  Words(char const* op, std::vector<int64_t> const& words) : op_(op), words_(words) {}
  bool at_end() const { return next_ == words_.size(); }
  int64_t take() {
    if (at_end()) fail(op_, ": parameters end within one");
    return words_[next_++];
  }

 private:
  char const* op_;
  std::vector<int64_t> const& words_;
  size_t next_ = 0;
};

void launch(std::vector<Tensor> const& tensors, int64_t kernel, std::vector<int64_t> const& parameters, std::vector<int64_t> const& grid,
            int64_t threads, int64_t cluster) {
  char const* op = "minfer::_launch_kernel";
  if (tensors.empty() || kernel == 0 || grid.size() != 3) fail(op, ": needs a tensor, a loaded kernel and a grid of three extents");
  if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return;
  OnDevice const on(op, tensors[0]);
  auto const tensor = [&](int64_t index) -> Tensor const& {
    if (index < 0 || index >= int64_t(tensors.size())) fail(op, ": parameters name tensor ", index, " of ", tensors.size());
    return tensors[size_t(index)];
  };
  Parameter values[kMostParameters];
  void* addresses[kMostParameters];
  size_t count = 0;
  for (Words words(op, parameters); !words.at_end(); ++count) {
    if (count == kMostParameters) fail(op, ": a kernel has at most ", kMostParameters, " parameters");
    unsigned char* const bytes = values[count].bytes;
    addresses[count] = bytes;
    switch (words.take()) {
      case kAddress: {
        Tensor const& x = tensor(words.take());
        if (x.device() != on.index() || x.device_type() != tensors[0].device_type()) {
          fail(op, ": all tensors must be on ", DeviceOf{tensors[0]}, ", got one on ", DeviceOf{x});
        }
        void const* const address = x.data_ptr();
        std::memcpy(bytes, &address, sizeof(address));
        break;
      }
      case kInt32: {
        auto const value = int32_t(words.take());
        std::memcpy(bytes, &value, sizeof(value));
        break;
      }
      case kInt64: {
        int64_t const value = words.take();
        std::memcpy(bytes, &value, sizeof(value));
        break;
      }
      case kTensorMap: {
        TensorMapArgument map{};
        Tensor const& x = tensor(words.take());
        map.base = x.data_ptr();
        map.element_bytes = int32_t(x.element_size());
        map.modes = int32_t(words.take());
        if (map.modes < 2 || map.modes > kMostTensorMapModes) fail(op, ": a TMA operand has 2 to 5 modes, got ", map.modes);
        for (int i = 0; i < map.modes; ++i) map.extents[i] = words.take();
        for (int i = 1; i < map.modes; ++i) map.strides[i] = words.take() * x.element_size();
        for (int i = 0; i < map.modes; ++i) map.box[i] = int32_t(words.take());
        map.swizzle_bytes = int32_t(words.take());
        Status const status = encode_tensor_map_argument(map, bytes);
        if (!status.ok()) fail(op, ": ", status.message);
        break;
      }
      default: fail(op, ": unknown kind of parameter");
    }
  }
  LoadedLaunch shape;
  std::memcpy(shape.grid, grid.data(), sizeof(shape.grid));
  shape.threads = int32_t(threads);
  shape.cluster = int32_t(cluster);
  shape.programmatic = on.programmatic();
  shape.stream = on.stream();
  Status const status = launch_loaded(*reinterpret_cast<LoadedKernel const*>(intptr_t(kernel)), shape, addresses);
  if (!status.ok()) fail(op, ": ", status.message);
}

constexpr Operator kLaunches[] = {
    // Launches a loaded kernel on the device and stream of tensors[0]. `parameters` describes each of its parameters by words: 0, number
    // of a tensor: its address; 1, value: int32; 2, value: int64; 3, number of a tensor, modes, extents, strides of all modes but the
    // first in elements, box, bytes of the swizzle: a TMA descriptor.
    {"_launch_kernel(Tensor(a!)[] tensors, int kernel, int[] parameters, int[] grid, int threads, int cluster) -> ()", boxed<&launch>},
};
constexpr Operator kLoads[] = {
    // A kernel of a cubin, which every launch of it names.
    {"_load_kernel(Tensor code, str name, int shared_bytes) -> int", boxed<&load>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) {
  define(m, kLaunches);
  define(m, kLoads);
}
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kLaunches); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CPU, m) { implement(m, kLoads); }

}  // namespace

}  // namespace minfer::torch_binding
