// The device of a call.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <memory>

#include "core/tensor.h"
#include "minfer/types.h"

namespace minfer::torch_binding {

/// Facts of a device of this machine, asked for once per process; where the index is negative, of an H200, which need not be here.
DeviceProperties const& device_properties(char const* op, int64_t device);

/// A tensor's device: the current one while this lives, and what a launch on it needs to know.
class OnDevice {
 public:
  OnDevice(char const* op, Tensor const& x);

  int32_t index() const { return index_; }
  DeviceProperties const& properties() const { return *properties_; }
  /// The one torch runs on now.
  Stream stream() const { return stream_; }
  /// Whether launches may begin under their predecessor's tail.
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
