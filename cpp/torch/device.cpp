#include "device.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <atomic>
#include <mutex>

#include "failure.h"
#include "gemm/launch.h"
#include "minfer/registry.h"

// Weak: a CPU-only torch has no such function, and the module must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace minfer::torch_binding {

namespace {

Stream current_stream(int32_t device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr || aoti_torch_get_current_cuda_stream(device, &stream) != 0) {
    fail("minfer: torch gave no current CUDA stream for device ", device);
  }
  return static_cast<Stream>(stream);
}

}  // namespace

DeviceProperties const& device_properties(int32_t device) {
  static std::array<std::atomic<DeviceProperties const*>, 128> known{};  // torch's indices have 8 bits
  if (device < 0 || size_t(device) >= known.size()) fail("minfer: there is no CUDA device ", device);
  auto& place = known[size_t(device)];
  if (DeviceProperties const* const found = place.load(std::memory_order_acquire)) return *found;
  static std::mutex mutex;
  std::lock_guard<std::mutex> const lock(mutex);
  if (DeviceProperties const* const found = place.load(std::memory_order_acquire)) return *found;
  DeviceProperties properties;
  Status const status = query_device(device, &properties);
  if (!status.ok()) fail("minfer: ", status.message);
  DeviceProperties const* const kept = new DeviceProperties(properties);  // for as long as the process lives
  place.store(kept, std::memory_order_release);
  return *kept;
}

OnDevice::OnDevice(Tensor const& x)
    : index_(x.device()), guard_(index_), properties_(device_properties(index_)), stream_(current_stream(index_)) {}

bool OnDevice::programmatic() const { return properties_.compute_capability() >= 90 && gemm::programmatic_launch_enabled(); }

}  // namespace minfer::torch_binding
