// Where a thread stands in a ring of stages whose number a launch chooses; common/ring.cuh has the constant ones.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace minfer::gemm {

/// A stage, and the parity of its barriers.
struct RuntimeRing {
  int index = 0;       // of the stage
  uint32_t phase = 0;  // parity to wait for
  int stages = 1;

  CUTLASS_DEVICE void advance() {
    if (++index == stages) {
      index = 0;
      phase ^= 1;
    }
  }
  CUTLASS_DEVICE void advance(int count) {
    int const at = index + count, rounds = at / stages;
    index = at - rounds * stages;
    phase ^= rounds & 1;
  }
  /// By a few stages, which a division would take longer than.
  CUTLASS_DEVICE void advance_few(int count) {
    for (index += count; index >= stages; index -= stages) phase ^= 1;
  }
};

}  // namespace minfer::gemm
