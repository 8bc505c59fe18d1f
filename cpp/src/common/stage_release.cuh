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

/// The same, whose address in the cluster is worked out once: an arrival is one instruction. Nothing was written that the other CTA reads,
/// so that the order of the CTA is enough: `.release.cluster` is a fence of the whole GPU's memory in front of each arrival.
template <int kCluster>
class StageReleaser {
 public:
  /// empty: those of the ring's stages.
  __device__ __forceinline__ StageReleaser(uint64_t* empty, int thread) : arrives_(thread % 32 < kCluster) {
    at_ = cute::cast_smem_ptr_to_uint(empty);
    if constexpr (kCluster > 1) at_ = cute::set_block_rank(at_, uint32_t(thread) % kCluster);
  }
  __device__ __forceinline__ void release(int stage, bool when = true) const {
    uint32_t const at = at_ + uint32_t(stage) * uint32_t(sizeof(uint64_t));
    if constexpr (kCluster > 1) {
      asm volatile(
          "{\n"
          ".reg .pred chosen;\n"
          "setp.ne.u32 chosen, %1, 0;\n"
          "@chosen mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
          "}" ::"r"(at),
          "r"(uint32_t(when && arrives_))
          : "memory");
    } else {
      asm volatile(
          "{\n"
          ".reg .pred chosen;\n"
          "setp.ne.u32 chosen, %1, 0;\n"
          "@chosen mbarrier.arrive.shared::cta.b64 _, [%0];\n"
          "}" ::"r"(at),
          "r"(uint32_t(when && arrives_))
          : "memory");
    }
  }

 private:
  uint32_t at_;
  bool arrives_;
};

}  // namespace minfer
