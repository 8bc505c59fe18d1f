// Memory that other processes map (minfer/all_reduce.h).
#include <cstring>

#include "common/cuda_check.h"
#include "minfer/all_reduce.h"

namespace minfer {

Status allocate_peer_memory(size_t bytes, void** memory, PeerHandle* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(PeerHandle));
  *memory = nullptr;
  void* found = nullptr;
  if (Status const status = cuda_status(cudaMalloc(&found, bytes), "cudaMalloc of memory for other processes"); !status.ok()) return status;
  cudaIpcMemHandle_t exported;
  Status status = cuda_status(cudaMemset(found, 0, bytes), "cudaMemset");
  if (status.ok()) status = cuda_status(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  if (status.ok()) status = cuda_status(cudaIpcGetMemHandle(&exported, found), "cudaIpcGetMemHandle");
  if (!status.ok()) {
    cudaFree(found);
    return status;
  }
  std::memcpy(handle->bytes, &exported, sizeof(exported));
  *memory = found;
  return status;
}

Status free_peer_memory(void* memory) { return cuda_status(cudaFree(memory), "cudaFree"); }

Status open_peer_memory(PeerHandle const& handle, void** memory) {
  cudaIpcMemHandle_t exported;
  std::memcpy(&exported, handle.bytes, sizeof(exported));
  Status const status = cuda_status(cudaIpcOpenMemHandle(memory, exported, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  if (!status.ok()) cudaGetLastError();  // the caller goes on without it
  return status;
}

Status close_peer_memory(void* memory) { return cuda_status(cudaIpcCloseMemHandle(memory), "cudaIpcCloseMemHandle"); }

}  // namespace minfer
