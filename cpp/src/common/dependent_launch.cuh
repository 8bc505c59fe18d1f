// Programmatic dependent launch (sm_90): a kernel's prologue runs under its predecessor's tail.
//
// Our kernels let their successor start at once and wait for their predecessor before the first access to global memory that another kernel
// could have written or may still read. What runs before the wait touches shared memory, kernel parameters and, by prefetch, the L2 cache
// only: L2 is where all SMs meet, so a line prefetched too early is updated by its writer, never stale.
// Every CTA executes the wait, so completion stays transitive along a stream.
#pragma once

namespace minfer {

__device__ __forceinline__ void allow_dependent_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace minfer
