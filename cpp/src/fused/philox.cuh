// Random numbers that are a function of their place: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2,
// 3, 2011).
#pragma once

#include <cstdint>

namespace minfer::fused {

/// The product's upper and lower half.
__device__ __forceinline__ uint2 multiply_wide(uint32_t a, uint32_t b) {
  uint64_t product;  // in C++ the upper half would take another instruction
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return make_uint2(uint32_t(product >> 32), uint32_t(product));
}

/// Four numbers of 32 random bits.
__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint2 const a = multiply_wide(0xd2511f53u, counter.x), b = multiply_wide(0xcd9e8d57u, counter.z);
    counter = make_uint4(b.x ^ counter.y ^ key.x, b.y, a.x ^ counter.w ^ key.y, a.y);
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

/// The noise of a row's tokens, a function of seed, offset and token: four consecutive tokens are one counter.
struct TokenNoise {
  uint2 seed, offset;  // lower and upper halves

  __device__ __forceinline__ uint4 of_quad(uint32_t quad) const { return philox(make_uint4(quad, 0, offset.x, offset.y), seed); }
  __device__ __forceinline__ uint32_t of_token(uint32_t token) const {
    uint4 const bits = of_quad(token / 4);
    uint32_t const i = token % 4;
    return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
  }
  /// Of eight tokens from `at` on, a multiple of eight. Both counters pass through each round together, with one addition of the key.
  __device__ __forceinline__ void of_vector(uint32_t at, uint32_t (&bits)[8]) const {
    uint4 const first = of_quad(at / 4), second = of_quad(at / 4 + 1);
    bits[0] = first.x, bits[1] = first.y, bits[2] = first.z, bits[3] = first.w;
    bits[4] = second.x, bits[5] = second.y, bits[6] = second.z, bits[7] = second.w;
  }
};

}  // namespace minfer::fused
