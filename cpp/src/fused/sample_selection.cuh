// The n-th largest of a row's keys, for more tokens than the groups of threads bound: digit by digit.
//
// A walk counts how often each value of the keys' next 11 bits occurs among those whose upper bits are the n-th largest one's; the counts
// of all CTAs, added up from the largest digit on, tell its digit. As soon as the tokens with these bits fit into the lists, they are
// listed and sorted. Logits of 16 bits need two walks, whatever they are; rows with many equal ones go on to the bits of the tokens'
// numbers.
#pragma once

#include <cstdint>

#include "common/cluster.cuh"
#include "fused/sample_candidates.cuh"
#include "fused/sample_key.cuh"
#include "fused/sample_team.cuh"

namespace minfer::fused {

constexpr int kDigitBits = 11;
constexpr uint32_t kDigits = 1u << kDigitBits;

template <unsigned kThreads>
class Selection : public Candidates<kThreads> {
 public:
  using Base = Candidates<kThreads>;
  using Base::ctas, Base::synchronize;

  struct Storage {
    int counts[kDigits];
    uint32_t of_warp[kThreads / 32];
    uint32_t digit, above, within;  // the digit found, and how many keys have a larger one, and this one
  };

  __device__ __forceinline__ Selection(typename Base::Base::Storage& team, typename Base::Storage& candidates, typename Base::Order& order,
                                       Storage& storage, uint32_t ctas, uint32_t rank)
      : Base(team, candidates, order, ctas, rank), storage_(storage) {}

  /// The n-th largest of the keys from `from` on, n from 1 on; `from` if there are not so many.
  template <bool kRaw, class Row>
  __device__ __forceinline__ Key nth(Row const& row, Key from, uint32_t n) {
    Key low = from, high = kNanKey;  // the n-th is among low to high, both included, and there the n-th
    int shift = 64 - kDigitBits;
#pragma unroll 1
    while (true) {
      count_digits<kRaw>(row, low, high, max(shift, 0));
      if (!find_digit(n)) return from;
      n -= storage_.above;
      Key const first = prefix_of(high, shift + kDigitBits) | Key(storage_.digit) << max(shift, 0);
      low = max(low, first);
      high = first | ((Key(1) << max(shift, 0)) - 1);
      uint32_t const within = storage_.within;
      synchronize();  // counts were read
      if (shift <= 0) return low;
      if (within <= kMostListed) break;
      shift -= kDigitBits;
    }
    uint32_t const total = list<kRaw>(row, low, high);
    Key const found = this->nth_of_listed(total, n);
    synchronize();  // lists were read
    return found;
  }

  /// Lists the keys from `low` to `high`: how many there are in the team.
  template <bool kRaw, class Row>
  __device__ __forceinline__ uint32_t list(Row const& row, Key low, Key high) {
    this->begin();
    float const least = number_of(low);
    row.template for_each_vector<kRaw>([&](auto const& x, uint32_t at) {
      if (largest_of(x) < least) return;
      float v[kVectorElements];
      unpack(x, v);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {
        if (v[i] < least) continue;
        Key const key = key_of(v[i], at + i);
        if (key >= low && key <= high) this->add(key);
      }
    });
    synchronize();
    return this->total();
  }

 private:
  /// The bits of a key from `shift` on.
  static __device__ __forceinline__ Key prefix_of(Key key, int shift) { return shift >= 64 ? 0 : key >> shift << shift; }

  template <bool kRaw, class Row>
  __device__ __forceinline__ void count_digits(Row const& row, Key low, Key high, int shift) {
    for (uint32_t i = threadIdx.x; i < kDigits; i += kThreads) storage_.counts[i] = 0;
    __syncthreads();
    float const least = number_of(low);
    row.template for_each_vector<kRaw>([&](auto const& x, uint32_t at) {
      if (largest_of(x) < least) return;
      float v[kVectorElements];
      unpack(x, v);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) {
        Key const key = key_of(v[i], at + i);
        if (key >= low && key <= high) atomicAdd(&storage_.counts[uint32_t(key >> shift) & (kDigits - 1)], 1);
      }
    });
    synchronize();
  }

  /// The digit of the n-th largest of the counted keys. Whether there are n.
  __device__ __forceinline__ bool find_digit(uint32_t n) {
    constexpr uint32_t kOwn = kDigits / kThreads;  // digits of a thread, the largest ones being the first thread's
    uint32_t const first = kDigits - 1 - threadIdx.x * kOwn;
    uint32_t sum = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < kOwn; ++i) sum += count_of(first - i);
    uint32_t const lane = threadIdx.x % 32;
    uint32_t above = sum;  // and of the thread itself
#pragma unroll
    for (uint32_t offset = 1; offset < 32; offset *= 2) {
      uint32_t const other = __shfl_up_sync(0xffffffffu, above, offset);
      if (lane >= offset) above += other;
    }
    if (lane == 31) storage_.of_warp[threadIdx.x / 32] = above;
    __syncthreads();
    uint32_t total = 0;
    for (uint32_t warp = 0; warp < kThreads / 32; ++warp) {
      if (warp == threadIdx.x / 32) above += total;
      total += storage_.of_warp[warp];
    }
    above -= sum;
    if (above < n && n <= above + sum) {
      uint32_t digit = first, within = count_of(digit);
#pragma unroll 1
      while (above + within < n) {
        above += within;
        within = count_of(--digit);
      }
      storage_.digit = digit;
      storage_.above = above;
      storage_.within = within;
    }
    __syncthreads();
    return n <= total;
  }

  /// Of all CTAs.
  __device__ __forceinline__ uint32_t count_of(uint32_t digit) const {
    uint32_t count = 0;
#pragma unroll 1
    for (uint32_t cta = 0; cta < ctas(); ++cta) count += uint32_t(load_from_cta(&storage_.counts[digit], int(cta)));
    return count;
  }

  Storage& storage_;
};

}  // namespace minfer::fused
