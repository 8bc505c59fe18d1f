// Values whose origin is hidden from the compiler, which steers what it computes where.
#pragma once

namespace minfer {

/// Hides from the compiler how `x` was computed, without an instruction. Values that depend on `x` are then computed after this point from
/// the register that holds it: not before a loop, where the results would occupy registers throughout the loop or be spilled.
template <class T>
__device__ __forceinline__ void make_opaque(T& x) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if constexpr (sizeof(T) == 4) {
    asm volatile("" : "+r"(x));
  } else {
    asm volatile("" : "+l"(x));
  }
}

/// Keeps memory accesses behind this point from being moved in front of it, and so in front of the arrival of the loaded `value`, of 32
/// bits: it counts as used here, and the hardware waits for a load where its result is first used.
template <class T>
__device__ __forceinline__ void wait_for_load(T const& value) {
  static_assert(sizeof(T) == 4);
  asm volatile("" ::"r"(value) : "memory");
}

/// threadIdx.x, read again from the special register: one instruction, where a copy kept over a mainloop would occupy a register or be
/// spilled.
__device__ __forceinline__ int reread_thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// blockIdx.x, likewise.
__device__ __forceinline__ int reread_block_index() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

}  // namespace minfer
