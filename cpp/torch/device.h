// The device of a call.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <cstdint>

#include "minfer/types.h"
#include "tensor.h"

namespace minfer::torch_binding {

/// Facts of a device of this machine, asked for once per process.
DeviceProperties const& device_properties(int32_t device);

/// A tensor's device: the current one while this lives, and what a launch on it needs to know.
class OnDevice {
 public:
  explicit OnDevice(Tensor const& x);

  int32_t index() const { return index_; }
  DeviceProperties const& properties() const { return properties_; }
  /// The one torch runs on now.
  Stream stream() const { return stream_; }
  /// Whether launches may begin under their predecessor's tail.
  bool programmatic() const;

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
  DeviceProperties const& properties_;
  Stream stream_;
};

}  // namespace minfer::torch_binding
