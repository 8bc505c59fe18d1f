#include "common/context.h"

#include "common/cuda_check.h"
#include "common/driver.h"

namespace minfer {

namespace {

bool has_context() {
  static auto const get_current = driver_function<CUresult (*)(CUcontext*)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  return get_current != nullptr && get_current(&context) == CUDA_SUCCESS && context != nullptr;
}

}  // namespace

Status bind_context(DeviceProperties const& device) {
  if (has_context()) return Status::success();
  int index = device.index;
  if (index < 0) {
    if (Status status = cuda_status(cudaGetDevice(&index), "cudaGetDevice"); !status.ok()) return status;
  }
  return cuda_status(cudaSetDevice(index), "cudaSetDevice");  // binds since CUDA 12.0
}

}  // namespace minfer
