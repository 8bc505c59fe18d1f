// mma.sync of e4m3 for sm_80 onward: the instruction of e4m3 on sm_89 and from sm_100 on, else two of halves, which hold each e4m3 number
// exactly. On sm_90 the instruction of e4m3 is such a pair as well, with conversions of its own that take more registers.
#pragma once

#include <cstdint>

#include "common/mma_sm80.cuh"

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ / 10 == 89 || __CUDA_ARCH__ >= 1000)
#define MINFER_HAS_E4M3_MMA 1
#else
#define MINFER_HAS_E4M3_MMA 0
#endif

namespace minfer {

/// Four e4m3 numbers as halves times 2^-8: those of the lower bytes in `low`. A code's exponent and fraction are those of the half with the
/// same value times 2^-8; NaN, the largest code, carries into the exponent's first bit, which makes it NaN.
__device__ __forceinline__ void halves_of_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
  auto const halves = [](uint32_t upper_bytes) {
    uint32_t const magnitude = (upper_bytes & 0x7f007f00u) >> 1, nan = (magnitude + 0x00800080u) & 0x40004000u;
    return (upper_bytes & 0x80008000u) | magnitude | nan;
  };
  low = halves(__byte_perm(codes, 0, 0x1404));
  high = halves(__byte_perm(codes, 0, 0x3424));
}

/// d += A.B of e4m3, m16n8k32. Lane l holds of A a[i]: row l / 4 + 8 (i % 2), columns 4 (l % 4) + 16 (i / 2) and the next three; of B b[i]:
/// the same rows of column l / 4; of D as multiply_16x8x16. Sums are those of the numbers divided by kE4M3SumFactor.
__device__ __forceinline__ void multiply_e4m3(float (&d)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
#if MINFER_HAS_E4M3_MMA
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  // The order of k within an MMA is the same for A and B: 2 of each 4 neighbours, then the other 2.
  uint32_t a_halves[2][4], b_halves[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) halves_of_e4m3(a[i], a_halves[0][i], a_halves[1][i]);
#pragma unroll
  for (int i = 0; i < 2; ++i) halves_of_e4m3(b[i], b_halves[0][i], b_halves[1][i]);
#pragma unroll
  for (int i = 0; i < 2; ++i) multiply_16x8x16<DataType::kF16>(d, a_halves[i], b_halves[i][0], b_halves[i][1]);
#endif
}
/// What sums of multiply_e4m3 are to be multiplied by.
constexpr float kE4M3SumFactor = MINFER_HAS_E4M3_MMA ? 1.0f : 65536.0f;
#undef MINFER_HAS_E4M3_MMA

}  // namespace minfer
