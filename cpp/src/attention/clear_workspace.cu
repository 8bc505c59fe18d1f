#include "attention/launch.h"
#include "common/cuda_check.h"

namespace minfer::attention {

Status clear_workspace(void* workspace, size_t bytes, Stream stream) {
  return cuda_status(cudaMemsetAsync(workspace, 0, bytes, stream), "cudaMemsetAsync(tile counter)");
}

}  // namespace minfer::attention
