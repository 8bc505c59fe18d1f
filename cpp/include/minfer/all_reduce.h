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

constexpr int64_t kMostReduceNormWidth = 16384;

/// The sum of few rows, and what stands behind it in a layer: the residual and the RMS norm.
struct AllReduceRmsNorm {
  DataType type;       // float16 or bfloat16, of all tensors. They are contiguous and 16-byte aligned
  void const* x;       // [rows, width]
  void* sum;           // [rows, width], may be x: where the rounded sum is stored
  bool adds = false;   // whether `sum` holds a residual, the same on all ranks, which is added
  void const* weight;  // [width], of the norm
  float eps = 0.0f, weight_offset = 0.0f;
  void* out;                     // [rows, width], apart from the others
  int64_t rows = 0;              // rows * width is at most `most`
  int64_t width = 0;             // a multiple of 8, at most kMostReduceNormWidth
  bool batch_invariant = false;  // a row is divided among threads as its width says, and as it is for run_rows() in that mode
  int32_t ranks = 1, rank = 0;
  void* buffers[kMostReduceRanks] = {};  // those of AllReduce: launches of both kinds may alternate in them
  int64_t most = 0;                      // numbers that the buffers are for
};

/// sum becomes the sum of all ranks' x, and the residual: added up in fp32, the ranks in their order and then the residual, and rounded
/// once. out becomes sum / sqrt(mean(sum^2) + eps) * (weight + weight_offset) of the rounded sum, in fp32, rounded once. All ranks have the
/// same bits of both. Without a residual the sum has the bits of all_reduce's, and in the batch-invariant mode out has those of the norm's
/// own kernel.
Status all_reduce_rms_norm(AllReduceRmsNorm const& arguments, DeviceProperties const& device, bool programmatic, Stream stream);

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
