// Items of all sequences numbered end to end, where only the device knows how many each has: a table in shared memory finds the sequence of
// an item. Sequence b has count(b) items; beyond kGroups sequences, an entry of the table is a group of them. Items from number `limit` on are
// left out: lengths that fit into the operands make no more, others must not lead out of what the launch has made room for.
#pragma once

#include <cstdint>

namespace minfer::attention {

struct SequenceTable {
  static constexpr int kGroups = 512;
  struct Storage {
    int32_t first[kGroups + 1];  // item of each group, and how many there are
    int32_t warp_total[32];
  };

  static __device__ int step(int batch) { return batch > kGroups ? (batch + kGroups - 1) / kGroups : 1; }
  static __device__ int groups(int batch) { return (batch + step(batch) - 1) / step(batch); }

  /// x + y, at most limit; all of them from 0 to 2^31 - 1.
  static __device__ __forceinline__ int32_t add(int32_t x, int32_t y, int32_t limit) {
    return int32_t(min(uint32_t(x) + uint32_t(y), uint32_t(limit)));
  }

  /// By all `threads` of the CTA; ends with a barrier.
  template <class Count>
  static __device__ void build(Storage& storage, int batch, Count const& count, int32_t limit, int thread, int threads) {
    int const lane = thread % 32, warp = thread / 32, in_group = step(batch), all_groups = groups(batch);
    int32_t carry = 0;
    if (thread == 0) storage.first[0] = 0;
    for (int base = 0; base < all_groups; base += threads) {
      int const g = base + thread;
      int32_t sum = 0;
      for (int b = g * in_group; g < all_groups && b < (g + 1) * in_group && b < batch; ++b) sum = add(sum, count(b), limit);
#pragma unroll
      for (int s = 1; s < 32; s *= 2) {
        int32_t const before = __shfl_up_sync(0xffffffffu, sum, s);
        if (lane >= s) sum = add(sum, before, limit);
      }
      if (lane == 31) storage.warp_total[warp] = sum;
      __syncthreads();
      int32_t all = 0;
      for (int w = 0; w < threads / 32; ++w) {
        int32_t const total = storage.warp_total[w];
        if (w < warp) sum = add(sum, total, limit);
        all = add(all, total, limit);
      }
      if (g < all_groups) storage.first[g + 1] = add(carry, sum, limit);
      carry = add(carry, all, limit);
      __syncthreads();
    }
  }

  static __device__ int32_t total(Storage const& storage, int batch) { return storage.first[groups(batch)]; }

  /// The sequence that has item `item` < total(), and which of its own it is.
  template <class Count>
  static __device__ int find(Storage const& storage, int batch, Count const& count, int32_t item, int32_t* own) {
    int low = 0, high = groups(batch);  // first[low] <= item < first[high]
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      if (storage.first[middle] <= item) {
        low = middle;
      } else {
        high = middle;
      }
    }
    int32_t rest = item - storage.first[low];
    int b = low * step(batch);
    if (step(batch) > 1) {
      for (int32_t items = count(b); rest >= items; items = count(++b)) rest -= items;
    }
    *own = rest;
    return b;
  }
};

}  // namespace minfer::attention
