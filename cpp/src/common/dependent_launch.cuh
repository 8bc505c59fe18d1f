// Programmatic dependent launch (sm_90): a kernel's prologue runs under its predecessor's tail.
//
// Our kernels let their successor start at once and wait for their predecessor before the first access to global memory that another kernel
// could have written or may still read: that is every operand, weights and other constants too, for the kernel in front may have just copied,
// packed or quantised them. What runs before the wait touches shared memory, kernel parameters and, by prefetch, the L2 cache only: L2 is where
// all SMs meet, so a line prefetched too early is updated by its writer, never stale. The one exception is a guess that is confirmed after the
// wait, before anything follows from it but prefetches (attention/decode/tile_scheduler.cuh).
// Every CTA executes the wait, so completion stays transitive along a stream.
#pragma once

namespace minfer {

__device__ __forceinline__ void allow_dependent_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// An operand's element, after the wait. Not __ldg: its path is for memory that nobody writes while the kernel runs, and the kernel runs before
/// the wait; its loads may be moved in front of the wait, and the wait says nothing of the cache that serves them.
template <class T>
__device__ __forceinline__ T load_operand(T const* from) {
  return *from;
}

}  // namespace minfer
