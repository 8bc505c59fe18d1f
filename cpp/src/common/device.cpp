#include <cstdio>

#include "common/context.h"
#include "minfer/registry.h"

namespace minfer {

DeviceProperties h200_properties() {
  DeviceProperties p;
  std::snprintf(p.name, sizeof(p.name), "NVIDIA H200");
  p.compute_major = 9;
  p.compute_minor = 0;
  p.sm_count = 132;
  int32_t const clusters[4] = {132, 66, 30, 14};
  for (int i = 0; i < 4; ++i) p.max_clusters[i] = clusters[i];
  p.smem_per_block = 232448;
  p.l2_bytes = int64_t(60) << 20;
  p.memory_bytes = int64_t(143771) << 20;
  p.read_bandwidth = 4.45e6;  // bytes / us
  p.matrix_rate = 750e6;      // flop / us
  return p;
}

#if !MINFER_WITH_CUDA
Status bind_context(DeviceProperties const&) { return Status::success(); }

Status query_device(int32_t device_index, DeviceProperties*) {
  return Status::failure(StatusCode::kNotSupported, "device %d cannot be queried: this build has no CUDA (configure with MINFER_CUDA=ON)",
                         device_index);
}

Status query_memory(int32_t device_index, int64_t*, int64_t*) {
  return Status::failure(StatusCode::kNotSupported, "device %d cannot be queried: this build has no CUDA (configure with MINFER_CUDA=ON)",
                         device_index);
}

Status query_event(void*, bool*) {
  return Status::failure(StatusCode::kNotSupported, "an event cannot be queried: this build has no CUDA (configure with MINFER_CUDA=ON)");
}
#endif

}  // namespace minfer
