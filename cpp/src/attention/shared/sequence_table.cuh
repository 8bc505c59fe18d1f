// Numbers the items of all sequences end to end, where only the device knows how many items each sequence has, and finds the sequence of an
// item. An item is a tile of queries (prefill) or a key block or split (decode); sequence b has count(b) of them.
// The table is prefix sums in shared memory. Beyond kBuckets sequences, an entry stands for a bucket of consecutive sequences, which find()
// searches one by one.
// Sums are cut off at `limit`: lengths that agree with the operands never exceed it, and lengths that do not must not lead outside of what
// the launch made room for.
#pragma once

#include <cstdint>

namespace minfer::attention {

template <int kBuckets>
struct SequenceTableOf {
  struct Storage {
    int32_t first[kBuckets + 1];  // number of each bucket's first item; the last entry used is the number of all items
    int32_t warp_total[32];
  };

  static __device__ int bucket_size(int batch) { return batch > kBuckets ? (batch + kBuckets - 1) / kBuckets : 1; }
  static __device__ int buckets(int batch) { return (batch + bucket_size(batch) - 1) / bucket_size(batch); }

  /// min(x + y, limit), for numbers from 0 to 2^31 - 1.
  static __device__ __forceinline__ int32_t add(int32_t x, int32_t y, int32_t limit) {
    return int32_t(min(uint32_t(x) + uint32_t(y), uint32_t(limit)));
  }

  /// Called by all `threads` of the CTA; ends with a barrier.
  template <class Count>
  static __device__ void build(Storage& storage, int batch, Count const& count, int32_t limit, int thread, int threads) {
    int const lane = thread % 32, warp = thread / 32, size = bucket_size(batch), all_buckets = buckets(batch);
    int32_t carry = 0;
    if (thread == 0) storage.first[0] = 0;
    for (int base = 0; base < all_buckets; base += threads) {
      int const bucket = base + thread;
      int32_t sum = 0;
      for (int b = bucket * size; bucket < all_buckets && b < (bucket + 1) * size && b < batch; ++b) sum = add(sum, count(b), limit);
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
      if (bucket < all_buckets) storage.first[bucket + 1] = add(carry, sum, limit);
      carry = add(carry, all, limit);
      __syncthreads();
    }
  }

  static __device__ int32_t total(Storage const& storage, int batch) { return storage.first[buckets(batch)]; }

  /// Returns the sequence of item `item` < total(), and in index_in_sequence the item's number among those of the sequence.
  template <class Count>
  static __device__ int find(Storage const& storage, int batch, Count const& count, int32_t item, int32_t* index_in_sequence) {
    int low = 0, high = buckets(batch);  // first[low] <= item < first[high]
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      if (storage.first[middle] <= item) {
        low = middle;
      } else {
        high = middle;
      }
    }
    int32_t rest = item - storage.first[low];
    int b = low * bucket_size(batch);
    if (bucket_size(batch) > 1) {
      for (int32_t items = count(b); rest >= items; items = count(++b)) rest -= items;
    }
    *index_in_sequence = rest;
    return b;
  }
};

using SequenceTable = SequenceTableOf<512>;

}  // namespace minfer::attention
