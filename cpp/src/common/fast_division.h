// Division of numbers below 2^31 by a divisor that a launch chooses, as a multiplication and a shift: a GPU takes some 100 cycles for a
// division, one after the other in a chain that every role of a kernel waits for at each tile.
// Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MINFER_HOST_DEVICE __host__ __device__ inline
#else
#define MINFER_HOST_DEVICE inline
#endif

namespace minfer {

class FastDivisor {
 public:
  FastDivisor() = default;
  /// divisor: 1 to 2^31 - 1; others count as 1.
  explicit FastDivisor(int64_t divisor) {
    if (divisor <= 1 || divisor > INT32_MAX) return;
    divisor_ = uint32_t(divisor);
    int bits = 0;  // 2^(bits - 1) < divisor <= 2^bits
    while ((int64_t(1) << bits) < divisor) ++bits;
    // 2^(31 + bits) / divisor, rounded up, is below 2^32, and x times what it is too large by stays below 2^(31 + bits) / divisor.
    multiplier_ = uint32_t(((uint64_t(1) << (31 + bits)) + divisor_ - 1) / divisor_);
    shift_ = uint32_t(bits - 1);
  }

  MINFER_HOST_DEVICE int32_t divisor() const { return int32_t(divisor_); }
  /// x: from 0 on.
  MINFER_HOST_DEVICE int32_t quotient(int32_t x) const {
#if defined(__CUDA_ARCH__)
    uint32_t const high = __umulhi(uint32_t(x), multiplier_);
#else
    uint32_t const high = uint32_t(uint64_t(uint32_t(x)) * multiplier_ >> 32);
#endif
    return divisor_ == 1 ? x : int32_t(high >> shift_);
  }

 private:
  uint32_t divisor_ = 1, multiplier_ = 0, shift_ = 0;
};

}  // namespace minfer
