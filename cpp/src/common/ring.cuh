// Where a thread stands in a pipeline whose stages form a ring, and the parity of the barriers that it waits for there.
#pragma once

#include <cstdint>

namespace minfer {

/// A consumer's first stage is stage 0, whose full barrier completes its first phase, of parity 0, when the data has arrived.
template <int kStages>
struct Ring {
  int index = 0;       // of the stage
  uint32_t phase = 0;  // parity to wait for

  /// A fresh mbarrier counts the phase before its first, of parity 1, as complete: a producer that starts with this parity finds every stage
  /// empty and waits for no consumer in its first round.
  static __device__ __forceinline__ Ring of_producer() { return {0, 1}; }

  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int stages) {
    int const at = index + stages, rounds = at / kStages;
    index = at - rounds * kStages;
    phase ^= rounds & 1;
  }
};

}  // namespace minfer
