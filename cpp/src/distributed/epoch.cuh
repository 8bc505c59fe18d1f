// What launches over several GPUs have in common: an epoch, which each launch counts in its own buffer, and waiting for other GPUs.
#pragma once

#include "distributed/exchange.h"

namespace minfer::distributed {

/// The launch's epoch, from 1 on. All threads of all CTAs call it.
__device__ __forceinline__ uint64_t begin_epoch(ExchangeHeader const* header) {
  uint64_t epoch;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(epoch) : "l"(&header->epoch) : "memory");
  return epoch + 1;
}

/// The CTA's end: all threads of all CTAs. The last CTA counts the epoch, when all have read it.
__device__ __forceinline__ void end_epoch(ExchangeHeader* header, uint64_t epoch) {
  __syncthreads();  // every thread has read the epoch
  if (threadIdx.x == 0 && atomicAdd(&header->finished, 1u) == gridDim.x - 1) {
    header->finished = 0;
    header->epoch = epoch;
  }
}

/// Polls of memory that another GPU writes; traps where that takes ten minutes, as that of a rank that has died does.
class Patience {
 public:
  __device__ __forceinline__ void poll() {
    if (++polls_ % (1u << 20) != 0) return;
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (began_ == 0) began_ = now;
    if (now - began_ > kNanoseconds) __trap();
  }

 private:
  static constexpr uint64_t kNanoseconds = 600ull * 1000 * 1000 * 1000;
  uint64_t began_ = 0;
  uint32_t polls_ = 0;
};

}  // namespace minfer::distributed
