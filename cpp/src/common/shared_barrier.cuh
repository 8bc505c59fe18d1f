// mbarriers, and the copies that arrive on them, by 32-bit addresses in shared memory. For producers that serve several rings, where each
// instruction counts: from a pointer, the compiler computes the address anew for each access.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace minfer {

/// Waits until the barrier's phase of this parity is complete.
__device__ __forceinline__ void wait_for_phase(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
/// Whether it is.
__device__ __forceinline__ bool is_complete(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
/// Arrives, and lets the phase wait for so many bytes of bulk copies.
__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Arrives when the thread's asynchronous copies up to here are complete. The barrier's count has to include it.
__device__ __forceinline__ void arrive_behind_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// Begins the load of a box of a tensor of four modes; its bytes count on the barrier. policy: of the L2 cache.
__device__ __forceinline__ void load_box(uint32_t to, CUtensorMap const* map, uint32_t barrier, uint64_t policy, int c0, int c1, int c2,
                                         int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], "
      "%7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

}  // namespace minfer
