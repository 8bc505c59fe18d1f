// A consumer gives a stage of a ring back.
#pragma once

#include "cute/arch/util.hpp"
#include "cutlass/arch/barrier.h"

namespace minfer {

/// One arrival of each warp at a stage's empty barrier, in a cluster at that of every CTA, for each of them may write into the stage.
/// A predicate and no branch: control flow between WGMMAs makes ptxas serialise them.
template <int kCluster>
__device__ __forceinline__ void release_stage(uint64_t* empty, int thread, bool when = true) {
  if constexpr (kCluster > 1) {
    cutlass::arch::ClusterBarrier::arrive(empty, uint32_t(thread) % kCluster, uint32_t(when && thread % 32 < kCluster));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred chosen;\n"
        "setp.ne.u32 chosen, %1, 0;\n"
        "@chosen mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}" ::"r"(cute::cast_smem_ptr_to_uint(empty)),
        "r"(uint32_t(when && thread % 32 == 0))
        : "memory");
  }
}

}  // namespace minfer
