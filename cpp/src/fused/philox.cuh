// Random numbers that are a function of their place: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2,
// 3, 2011).
#pragma once

#include <cstdint>

namespace minfer::fused {

/// Four numbers of 32 random bits.
__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint32_t const high0 = __umulhi(0xd2511f53u, counter.x), low0 = 0xd2511f53u * counter.x;
    uint32_t const high1 = __umulhi(0xcd9e8d57u, counter.z), low1 = 0xcd9e8d57u * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key.x += 0x9e3779b9u;
    key.y += 0xbb67ae85u;
  }
  return counter;
}

/// The base-2 logarithm of an exponentially distributed number, of 32 random bits. The number is -log(1 - u), with u in (0, 1]; small ones,
/// which decide draws, keep all their digits.
__device__ __forceinline__ float log2_exponential_variate(uint32_t bits) {
  float const u = (float(bits) + 0.5f) * 0x1p-32f, rest = (float(~bits) + 0.5f) * 0x1p-32f;  // 1 - u, with digits of its own
  float log2_of_rest;
  asm("lg2.approx.f32 %0, %1;" : "=f"(log2_of_rest) : "f"(rest));
  float series = fmaf(u, 1.0f / 6, 1.0f / 5);
  series = fmaf(u, series, 1.0f / 4);
  series = fmaf(u, series, 1.0f / 3);
  series = fmaf(u, series, 0.5f);
  series = fmaf(u, series, 1.0f);
  float const variate = u < 0x1p-4f ? u * series : -0.693147181f * log2_of_rest, least = 0x1p-33f;
  float result;
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(fmaxf(variate, least)));
  return result;
}
constexpr float kLeastLog2Variate = -33.0f;

}  // namespace minfer::fused
