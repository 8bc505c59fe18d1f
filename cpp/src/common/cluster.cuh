// A thread-block cluster (sm_90): the CTA's rank in it, its barrier, reads of other CTAs' shared memory and stores to it. Before sm_90 a
// CTA is alone.
#pragma once

#include <cstdint>

namespace minfer {

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return int(size);
}
/// The two halves of the cluster's barrier, executed by all threads of all its CTAs. An arrival that releases waits until all the thread's
/// stores to global memory are done, and a wait empties L1: where a kernel exchanges a few numbers time after time, send_to_cta is faster.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
/// An arrival that tells the others nothing but itself: stores before it are not seen behind their wait.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/// The value at `here`, an address of this CTA's shared memory, in that of CTA `rank`.
__device__ __forceinline__ int load_from_cta(int const* here, int rank) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(here)), value;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return int(value);
}
/// Stores to the place of `here`, an address of this CTA's shared memory, in that of CTA `rank`.
__device__ __forceinline__ void store_to_cta(float* here, float value, int rank) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(here));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void store_to_cta(uint64_t* here, uint64_t value, int rank) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(here));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}
/// Stores to the place of `here` in CTA `rank`, whose mbarrier at the place of `arrived` counts the 4 bytes when they have come.
__device__ __forceinline__ void send_to_cta(float* here, float value, uint64_t* arrived, int rank) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(here)), barrier = uint32_t(__cvta_generic_to_shared(arrived));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(barrier) : "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(__float_as_uint(value)),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ uint64_t load_from_cta(uint64_t const* here, int rank) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(here));
  uint64_t value;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return value;
}
#else
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_arrive_relaxed() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ int load_from_cta(int const* here, int) { return *here; }
__device__ __forceinline__ void store_to_cta(float* here, float value, int) { *here = value; }
__device__ __forceinline__ void store_to_cta(uint64_t* here, uint64_t value, int) { *here = value; }
__device__ __forceinline__ uint64_t load_from_cta(uint64_t const* here, int) { return *here; }
#endif

}  // namespace minfer
