// Scans over the threads of a CTA: inside a warp by shuffles, across warps by their totals in shared memory.
#pragma once

#include <cstdint>

namespace minfer {

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T x, T y) const {
    return x + y;
  }
};

/// The values of the warp's lanes up to and with this one, combined by `add`, an associative function of two values.
template <class T, class Add = Sum>
__device__ __forceinline__ T warp_inclusive_scan(T value, int lane, Add const& add = {}) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    T const before = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value = add(value, before);
  }
  return value;
}

/// The values of the CTA's threads up to and with this one; *total gets those of all. `warp_totals`: shared memory, one for each warp, written
/// before the one barrier that stands inside; the caller has another barrier between two scans. `threads` is all of the CTA's, a multiple of 32.
template <class T, class Add = Sum>
__device__ __forceinline__ T block_inclusive_scan(T value, T* warp_totals, int thread, int threads, T* total, Add const& add = {}) {
  int const warp = thread / 32;
  T sum = warp_inclusive_scan(value, thread % 32, add);
  if (thread % 32 == 31) warp_totals[warp] = sum;
  __syncthreads();
  T all = 0;
  for (int w = 0; w < threads / 32; ++w) {
    T const of_warp = warp_totals[w];
    if (w < warp) sum = add(sum, of_warp);
    all = add(all, of_warp);
  }
  *total = all;
  return sum;
}

/// Sum of the values of the CTA's threads before this one, without their total: the warps' sums are then added across lanes, in five steps for up
/// to 32 warps. Memory and barriers as in block_inclusive_scan.
template <class T>
__device__ __forceinline__ T block_exclusive_sum(T value, T* warp_totals, int thread, int threads) {
  int const lane = thread % 32, warp = thread / 32;
  T const inclusive = warp_inclusive_scan(value, lane);
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  T before = lane < warp && lane < threads / 32 ? warp_totals[lane] : 0;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) before += __shfl_xor_sync(0xffffffffu, before, distance);
  return before + inclusive - value;
}

}  // namespace minfer
