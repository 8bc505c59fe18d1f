// The device that a call runs on.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <memory>

#include "core/tensor.h"
#include "minfer/types.h"

namespace minfer::torch_binding {

/// The properties of a device of this machine, queried once per process. A negative index means an H200, which need not be here.
DeviceProperties const& device_properties(char const* op, int64_t device);

/// Makes a tensor's device the current one while the object lives, and holds what a launch on it needs. Refuses, in the batch-invariant
/// mode, operators that cannot compute in it.
class OnDevice {
 public:
  OnDevice(char const* op, Tensor const& x);

  int32_t index() const { return index_; }
  DeviceProperties const& properties() const { return *properties_; }
  /// Torch's current stream of the device.
  Stream stream() const { return stream_; }
  /// Whether kernels are launched as dependent launches (PDL).
  bool programmatic() const;

 private:
  struct Restore {
    void operator()(DeviceGuardHandle guard) const { aoti_torch_delete_device_guard(guard); }
  };

  int32_t index_;
  std::unique_ptr<DeviceGuardOpaque, Restore> guard_;
  DeviceProperties const* properties_ = nullptr;
  Stream stream_ = nullptr;
};

}  // namespace minfer::torch_binding
