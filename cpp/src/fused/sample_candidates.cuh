// Lists of a row's largest tokens, and how they are put in order.
//
// To begin with each of 128 groups of the team's threads has told its largest key: the n-th largest logit of these is at most the row's
// n-th largest, so that a walk that lists the tokens from there on has the n largest among them, of n = 50 with some 15 others, and those
// of the same logit. Each CTA has a list of its own; a CTA that needs all gathers them, and sorts them by counting for each key the larger
// ones.
#pragma once

#include <cstdint>

#include "common/cluster.cuh"
#include "common/opaque.cuh"
#include "fused/sample_key.cuh"
#include "fused/sample_team.cuh"

namespace minfer::fused {

constexpr unsigned kGroups = 128;
constexpr unsigned kMostListed = 384;  // tokens

template <unsigned kThreads>
class Candidates : public Team<kThreads> {
 public:
  using Base = Team<kThreads>;
  using Base::ctas, Base::rank, Base::synchronize;

  struct Storage {
    alignas(16) Key largest[kGroups];
    Key found;
    uint32_t nth;
    Key list[kMostListed];  // this CTA's
    int listed;             // more than the list holds, if there are more
  };
  struct Order {
    Key all[kMostListed];  // the lists of all CTAs
    uint32_t weight[kMostListed];
    Key sorted[kMostListed];
    uint64_t before[kMostListed];  // the weights of the larger keys
  };

  __device__ __forceinline__ Candidates(typename Base::Storage& team, Storage& storage, Order& order, uint32_t ctas, uint32_t rank)
      : Base(team, ctas, rank), storage_(storage), order_(order) {}

  // ---- groups ----

  /// The largest key of each group of threads, to all CTAs. A group without a token has 0.
  __device__ __forceinline__ void share_largest(Key key) {
    // Powers of two. The thread's index is read again, here and below, lest what follows from it stays in registers until the next call.
    uint32_t const lanes = kThreads * ctas() / kGroups;  // of a group, at least as many as CTAs
    uint32_t const thread = rank() * kThreads + uint32_t(reread_thread_index()), lane = thread & (lanes - 1);
    if (lanes == 32) {
      key = largest_of_warp(key);
    } else {
      for (uint32_t offset = lanes / 2; offset > 0; offset /= 2) key = max(key, __shfl_xor_sync(0xffffffffu, key, offset));
    }
    if (lane < ctas()) store_to_cta(&storage_.largest[thread >> (31 - __clz(int(lanes)))], key, int(lane));
    synchronize();
  }
  __device__ __forceinline__ Key largest_of_group(uint32_t group) const { return storage_.largest[group]; }
  __device__ __forceinline__ Key largest_of_groups() const {
    uint32_t const lane = uint32_t(reread_thread_index()) % 32;
    Key largest = 0;
#pragma unroll
    for (unsigned i = 0; i < kGroups; i += 32) largest = max(largest, storage_.largest[i + lane]);
    return largest_of_warp(largest);
  }
  /// The first key of the n-th largest logit of the groups' keys, n from 1 on: at least n of the row's keys are as large. 0 if fewer groups
  /// have a token.
  __device__ __forceinline__ Key nth_of_groups(uint32_t n) {
    constexpr uint32_t kShares = kThreads / kGroups;  // threads that count for a key
    uint32_t const thread = uint32_t(reread_thread_index()), share = thread % kShares;
    if (thread == 0) storage_.nth = 0xffffffffu;
    __syncthreads();
    uint32_t const order = uint32_t(storage_.largest[thread / kShares] >> 32);
    auto const* pairs = reinterpret_cast<uint4 const*>(storage_.largest) + share;
    uint32_t above = 0;
#pragma unroll 8
    for (unsigned i = 0; i < kGroups / 2; i += kShares) {
      uint4 const pair = pairs[i];
      above += pair.y > order;
      above += pair.w > order;
    }
#pragma unroll
    for (uint32_t offset = kShares / 2; offset > 0; offset /= 2) above += __shfl_xor_sync(0xffffffffu, above, offset);
    // The least logit that fewer than n are above.
    uint32_t const least = __reduce_min_sync(0xffffffffu, above < n ? order : 0xffffffffu);
    if (thread % 32 == 0) atomicMin(&storage_.nth, least);
    __syncthreads();
    return Key(storage_.nth) << 32;
  }

  // ---- lists ----

  /// Nothing of the lists before is read any more: since then the team has synchronised.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) storage_.listed = 0;
    __syncthreads();
  }
  __device__ __forceinline__ void add(Key key) {
    uint32_t const at = uint32_t(atomicAdd(&storage_.listed, 1));
    if (at < kMostListed) storage_.list[at] = key;
  }
  /// How many tokens all lists have. The team has synchronised since the last was added.
  __device__ __forceinline__ uint32_t total() const {
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t cta = 0; cta < kMostCtas; ++cta) sum += cta < ctas() ? uint32_t(listed_of(cta)) : 0;
    return sum;
  }

  /// Sorts the `total` tokens of all CTAs' lists, the largest first, with the sums of the weights of those before. Up to kMostListed.
  template <class WeightOf>
  __device__ __forceinline__ void sort(uint32_t total, WeightOf&& weight_of) {
    gather(total);
    for (uint32_t i = threadIdx.x; i < total; i += kThreads) order_.weight[i] = weight_of(number_of(order_.all[i]));
    __syncthreads();
    // As many threads count for a key as there are.
    uint32_t shares = 1;
    while (shares < 32 && shares * 2 * total <= kThreads) shares *= 2;
    uint32_t const share = threadIdx.x % shares;
    for (uint32_t first = 0; first < total; first += kThreads / shares) {
      uint32_t const i = first + threadIdx.x / shares;
      Key const key = i < total ? order_.all[i] : kNanKey;
      uint32_t place = 0;
      uint64_t before = 0;
#pragma unroll 4
      for (uint32_t other = share; other < total; other += shares) {
        if (order_.all[other] > key) {
          ++place;
          before += order_.weight[other];
        }
      }
      for (uint32_t offset = shares / 2; offset > 0; offset /= 2) {
        place += __shfl_xor_sync(0xffffffffu, place, offset);
        before += __shfl_xor_sync(0xffffffffu, before, offset);
      }
      if (share == 0 && i < total) {
        order_.sorted[place] = key;
        order_.before[place] = before;
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ Key sorted(uint32_t place) const { return order_.sorted[place]; }
  __device__ __forceinline__ uint64_t before(uint32_t place) const { return order_.before[place]; }

  /// The n-th largest of the `total` tokens of all CTAs' lists, n from 1 on.
  __device__ __forceinline__ Key nth_of_listed(uint32_t total, uint32_t n) {
    gather(total);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < total; i += kThreads) {
      Key const key = order_.all[i];
      uint32_t place = 1;
#pragma unroll 4
      for (uint32_t other = 0; other < total; ++other) place += order_.all[other] > key;
      if (place == n) storage_.found = key;
    }
    __syncthreads();
    return storage_.found;
  }

 private:
  /// The tokens of all CTAs' lists: each thread those that it is the first to read.
  __device__ __forceinline__ void gather(uint32_t total) {
    for (uint32_t i = threadIdx.x; i < total; i += kThreads) {
      uint32_t at = i, cta = 0;
      for (; cta + 1 < ctas(); ++cta) {
        uint32_t const listed = uint32_t(listed_of(cta));
        if (at < listed) break;
        at -= listed;
      }
      order_.all[i] = load_from_cta(&storage_.list[at], int(cta));
    }
  }
  __device__ __forceinline__ int listed_of(uint32_t cta) const { return load_from_cta(&storage_.listed, int(cta)); }

  Storage& storage_;
  Order& order_;
};

}  // namespace minfer::fused
