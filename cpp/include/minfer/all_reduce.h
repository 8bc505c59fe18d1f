// The sum of few numbers over the GPUs of one host, which reach each other's memory: in one launch, in less time than a ring of messages
// takes to go round. For many numbers NCCL is faster: here every GPU sends all of its numbers to every other one, with a flag beside each
// four bytes.
//
// Each rank has an exchange buffer, which all ranks' processes map. A launch counts epochs in its own buffer, so that it can be replayed in
// a CUDA graph; all ranks must launch the same sums in the same order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

constexpr int32_t kMostReduceRanks = 8;

struct AllReduce {
  DataType type;      // float16 or bfloat16
  void const* x;      // [count], 16-byte aligned
  void* out;          // [count], 16-byte aligned; may be x
  int64_t count = 0;  // a multiple of 8, at most `most`
  int32_t ranks = 1, rank = 0;
  void* buffers[kMostReduceRanks] = {};  // of all ranks, where this process has mapped them: all_reduce_bytes() each, first zeros
  int64_t most = 0;                      // numbers that the buffers are for
};

size_t all_reduce_bytes(int64_t most, int32_t ranks);

/// out becomes the sum of all ranks' x: added up in fp32, in the order of the ranks, and rounded once, so that all have the same bits.
Status all_reduce(AllReduce const& arguments, DeviceProperties const& device, bool programmatic, Stream stream);

/// By which another process of the host maps peer memory.
struct PeerHandle {
  unsigned char bytes[64];
};

/// Memory of the current device that other processes of the host can map; zeros.
Status allocate_peer_memory(size_t bytes, void** memory, PeerHandle* handle);
Status free_peer_memory(void* memory);
/// Maps another process' peer memory for kernels of the current device.
Status open_peer_memory(PeerHandle const& handle, void** memory);
Status close_peer_memory(void* memory);

}  // namespace minfer
