// Where the sequences of a launch lie, how many keys they have, and in which pages the keys are. All of this is data that only the device
// knows, and every kernel looks it up here, so that no value of these tensors leads to an access outside of q, k, v, the cache or the
// output:
//   cu_seqlens_q, cu_seqlens_k   are clamped to the rows that exist; a sequence that ends before it begins is empty
//   seq_lens                     is clamped to 0 .. the keys that the block table, or the sequence's own cache, has room for
//   block_table                  pages outside of the cache read as zeros; entries that no key needs are never read
#pragma once

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "cutlass/fast_math.h"

namespace minfer::attention {

/// The largest number of keys of a sequence, and of items of a launch: sums and differences of two of them fit into 32 bits.
constexpr int64_t kMaxCount = int64_t(1) << 30;

struct RowRange {
  int32_t first, count;
};

struct Sequences {
  int32_t const* cu_seqlens_q;  // [batch + 1], or null: every sequence has seqlen_q queries
  int32_t const* cu_seqlens_k;  // [batch + 1], or null
  int32_t const* seq_lens;      // [batch] keys in the cache, or null: seqlen_k
  int32_t batch, tokens_q, tokens_k;
  int32_t seqlen_q, seqlen_k;  // with a cache, seqlen_k is the number of keys that it has room for in each sequence

  /// The rows of q that belong to sequence b. Without cu_seqlens_q they are counted from the sequence's own first row.
  __device__ __forceinline__ RowRange queries(int b) const {
    return cu_seqlens_q == nullptr ? RowRange{0, seqlen_q} : between(cu_seqlens_q + b, cu_seqlens_q + b + 1, tokens_q);
  }
  /// The rows of k and v that belong to sequence b, counted likewise.
  __device__ __forceinline__ RowRange keys(int b) const {
    if (cu_seqlens_k != nullptr) return between(cu_seqlens_k + b, cu_seqlens_k + b + 1, tokens_k);
    return {0, seq_lens != nullptr ? keys_in_cache(b) : seqlen_k};
  }
  __device__ __forceinline__ int32_t keys_in_cache(int b) const { return clamp_to_cache(load_operand(seq_lens + b)); }
  /// The rows of q from the first sequence's first to the last sequence's last; without cu_seqlens_q, all rows.
  __device__ __forceinline__ RowRange all_queries() const {
    return cu_seqlens_q == nullptr ? RowRange{0, tokens_q} : between(cu_seqlens_q, cu_seqlens_q + batch, tokens_q);
  }
  __device__ __forceinline__ int32_t clamp_to_cache(int32_t length) const { return min(max(length, 0), seqlen_k); }

 private:
  static __device__ __forceinline__ RowRange between(int32_t const* begin, int32_t const* end, int32_t rows) {
    int32_t const first = min(max(load_operand(begin), 0), rows), last = min(max(load_operand(end), first), rows);
    return {first, last - first};
  }
};

/// Finds the page of a key. A contiguous cache counts as one page for each sequence. The table's entries are returned unchecked: TMA
/// answers coordinates outside of the cache with zeros, and code that forms addresses calls has() first.
struct PageTable {
  int32_t const* block_table;  // [batch, columns] pages, or null
  int64_t block_table_stride;
  int32_t pages, page_size;
  cutlass::FastDivmod by_page;

  struct Location {
    int32_t page, row;  // row < page_size
  };
  /// Where key `key` of sequence `b` lies. The key must be one of Sequences::keys(b), since entries of other keys may hold anything.
  __device__ __forceinline__ Location find(int b, int key) const {
    return find_with(b, key, [](int32_t const* from) { return load_operand(from); });
  }
  /// The same before the preceding kernel of the stream has finished, which may still write the table: a speculative read, for prefetches.
  __device__ __forceinline__ Location find_speculatively(int b, int key) const {
    return find_with(b, key, [](int32_t const* from) {
      int32_t page;
      asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(page) : "l"(from) : "memory");
      return page;
    });
  }
  __device__ __forceinline__ int32_t row_of(int key) const { return block_table == nullptr ? key : key - by_page.div(key) * page_size; }
  __device__ __forceinline__ bool has(int32_t page) const { return uint32_t(page) < uint32_t(pages); }

 private:
  template <class Load>
  __device__ __forceinline__ Location find_with(int b, int key, Load const& load) const {
    if (block_table == nullptr) return {b, key};
    int column, row;
    by_page(column, row, key);
    return {load(block_table + b * block_table_stride + column), row};
  }
};

}  // namespace minfer::attention
