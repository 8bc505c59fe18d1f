// Named barriers, of which a CTA has sixteen: each synchronises some of its warps. Number 0 is __syncthreads's.
//
// cutlass::arch::NamedBarrier adds 8 to the numbers of its callers and keeps the lower ones for CUTLASS itself. Kernels here use up to 15
// of them and no part of CUTLASS that takes any, so these are the hardware's numbers.
#pragma once

namespace minfer {

/// kThreads, a multiple of 32: the threads that arrive in a phase, by sync or arrive, always in whole warps.
template <int kThreads>
struct NamedBarrier {
  static_assert(kThreads > 0 && kThreads % 32 == 0);

  int number;  // 1 to 15

  /// Arrives and waits for the others.
  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory"); }
  /// Arrives, and does not wait.
  __device__ __forceinline__ void arrive() const { asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory"); }
};

/// The same with a compile-time number, which takes no register: in a kernel with none to spare, the compiler would recompute other values
/// to free one.
template <int kNumber, int kThreads>
struct ConstantNamedBarrier {
  static_assert(kNumber > 0 && kNumber < 16 && kThreads > 0 && kThreads % 32 == 0);

  static __device__ __forceinline__ void sync() { asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory"); }
  static __device__ __forceinline__ void arrive() { asm volatile("bar.arrive %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory"); }
};

}  // namespace minfer
