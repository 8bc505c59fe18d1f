#include "core/device.h"

#include <array>
#include <atomic>
#include <mutex>

#include "common/programmatic_launch.h"
#include "core/batch_invariance.h"
#include "core/torch_calls.h"
#include "minfer/registry.h"

// Weak, since a CPU-only torch has no such function and the module must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace minfer::torch_binding {

DeviceProperties const& device_properties(char const* op, int64_t device) {
  static DeviceProperties const h200 = h200_properties();
  static std::array<std::atomic<DeviceProperties const*>, 128> known{};  // torch's device indices are int8
  if (device < 0) return h200;
  if (device >= int64_t(known.size())) fail(op, ": there is no CUDA device ", device);
  auto& place = known[size_t(device)];
  if (DeviceProperties const* const found = place.load(std::memory_order_acquire)) return *found;
  static std::mutex mutex;
  std::lock_guard<std::mutex> const lock(mutex);
  if (DeviceProperties const* const found = place.load(std::memory_order_acquire)) return *found;
  DeviceProperties properties;
  Status const status = query_device(int32_t(device), &properties);
  if (!status.ok()) fail(op, ": ", status.message);
  DeviceProperties const* const kept = new DeviceProperties(properties);  // for as long as the process lives
  place.store(kept, std::memory_order_release);
  return *kept;
}

OnDevice::OnDevice(char const* op, Tensor const& x) : index_(x.device()) {
  check_batch_invariance(op);
  DeviceGuardHandle guard = nullptr;
  if (aoti_torch_create_device_guard(index_, &guard) != 0) {
    fail(op, ": ", DeviceOf{x}, " could not be made the current device: ", reason_of_torch());
  }
  guard_.reset(guard);
  properties_ = &device_properties(op, index_);
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr || aoti_torch_get_current_cuda_stream(index_, &stream) != 0) {
    fail(op, ": torch gave no current stream of ", DeviceOf{x});
  }
  stream_ = static_cast<Stream>(stream);
}

bool OnDevice::programmatic() const { return properties_->compute_capability() >= 90 && programmatic_launch_enabled(); }

}  // namespace minfer::torch_binding
