// Device memory of the benchmarks: one arena that grows and is carved afresh for every case, so that a sweep of many
// shapes does not pay a cudaMalloc and a cudaFree for each operand.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "common/check.h"

namespace minfer::bench {

constexpr int64_t kCarveAlignment = 256;  // bytes; what cudaMalloc gives, so a carved operand is as aligned as an allocated one

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

class Arena {
 public:
  Arena() = default;
  Arena(Arena const&) = delete;
  Arena& operator=(Arena const&) = delete;
  ~Arena() { cudaFree(data_); }

  /// Forgets what was carved and makes room for `bytes`.
  void reset(int64_t bytes) {
    used_ = 0;
    if (bytes <= capacity_) return;
    check(cudaFree(data_), "cudaFree");
    data_ = nullptr;
    capacity_ = 0;
    check(cudaMalloc(&data_, size_t(bytes)), "cudaMalloc of the operands");
    capacity_ = bytes;
  }

  void* carve(int64_t bytes) {
    if (used_ + bytes > capacity_) throw std::logic_error("arena: carved past its end");
    void* p = static_cast<char*>(data_) + used_;
    used_ += round_up(bytes, kCarveAlignment);
    return p;
  }

 private:
  void* data_ = nullptr;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
};

/// Sets of operands to rotate through, so that three L2s' worth of other bytes pass before a set is used again.
inline int64_t rotation_sets(int64_t bytes_per_set, int64_t l2_bytes) {
  int64_t const sets = 3 * l2_bytes / std::max<int64_t>(bytes_per_set, 1) + 1;
  return std::clamp<int64_t>(sets, 1, 512);
}

/// Waits for the stream.
template <typename T>
std::vector<T> download(void const* data, int64_t count, cudaStream_t stream) {
  std::vector<T> host(static_cast<size_t>(count));
  check(cudaMemcpyAsync(host.data(), data, host.size() * sizeof(T), cudaMemcpyDeviceToHost, stream), "download");
  check(cudaStreamSynchronize(stream), "download");
  return host;
}

}  // namespace minfer::bench
