// Programmatic dependent launch (sm_90): a kernel's prologue runs under its predecessor's tail.
//
// The predecessor is the preceding kernel of the stream. Our kernels let their successor start at once, and wait for their predecessor
// before the first access to global memory that another kernel could have written or may still read. That is every operand, also weights
// and other constants: the predecessor may have just copied, packed or quantised them. Before the wait a kernel accesses shared memory, its
// parameters and, by prefetches, the L2 cache. All SMs share L2, so a line that is prefetched too early is updated by its writer and never
// stale. There are two exceptions: weights of which the caller promises that nothing writes them any more (GemmOperands::b_is_constant),
// and speculative reads of attention's decode kernels, which steer prefetches only and are validated after the wait
// (attention/decode/tile_scheduler.cuh).
// Every CTA executes the wait, so completion stays transitive along a stream.
#pragma once

namespace minfer {

__device__ __forceinline__ void allow_dependent_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Loads an operand's element after the wait. Not by __ldg, which is for memory that is not written while the kernel runs, and the kernel
/// runs before the wait: the compiler may move such loads in front of the wait, and the wait does not invalidate the cache that serves
/// them.
template <class T>
__device__ __forceinline__ T load_operand(T const* from) {
  return *from;
}

}  // namespace minfer
