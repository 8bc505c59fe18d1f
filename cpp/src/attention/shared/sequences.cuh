// Where the sequences of a launch lie, how many keys they have, and in which pages: what only the device knows. Every kernel asks here, for no
// value of these tensors leads outside of q, k, v, the cache or the output, whatever it is:
//   cu_seqlens_q, cu_seqlens_k   are taken as rows within those there are; a sequence that ends before it begins is empty
//   seq_lens                     are taken as 0 to what the block table, or the sequence's own cache, has room for
//   block_table                  pages that there are not hold zeros; entries that no key needs are not looked at
#pragma once

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "cutlass/fast_math.h"

namespace minfer::attention {

/// Most keys of a sequence, and most items of a launch: sums and differences of two of them are numbers of 32 bits.
constexpr int64_t kMaxCounted = int64_t(1) << 30;

struct RowRange {
  int32_t first, count;
};

struct Sequences {
  int32_t const* cu_seqlens_q;  // [batch + 1], or null: every sequence has seqlen_q queries
  int32_t const* cu_seqlens_k;  // [batch + 1], or null
  int32_t const* seq_lens;      // [batch] keys in the cache, or null: seqlen_k
  int32_t batch, tokens_q, tokens_k;
  int32_t seqlen_q, seqlen_k;  // seqlen_k: of a cache, the most that it holds of a sequence

  /// Rows of q; without cu_seqlens_q counted from the sequence's own first.
  __device__ __forceinline__ RowRange queries(int b) const {
    return cu_seqlens_q == nullptr ? RowRange{0, seqlen_q} : between(cu_seqlens_q + b, cu_seqlens_q + b + 1, tokens_q);
  }
  /// Likewise of k and v.
  __device__ __forceinline__ RowRange keys(int b) const {
    if (cu_seqlens_k != nullptr) return between(cu_seqlens_k + b, cu_seqlens_k + b + 1, tokens_k);
    return {0, seq_lens != nullptr ? keys_in_cache(b) : seqlen_k};
  }
  __device__ __forceinline__ int32_t keys_in_cache(int b) const { return in_cache(load_operand(seq_lens + b)); }
  /// Rows of q that are some sequence's, from the first to the last: all of them without cu_seqlens_q.
  __device__ __forceinline__ RowRange all_queries() const {
    return cu_seqlens_q == nullptr ? RowRange{0, tokens_q} : between(cu_seqlens_q, cu_seqlens_q + batch, tokens_q);
  }
  __device__ __forceinline__ int32_t in_cache(int32_t length) const { return min(max(length, 0), seqlen_k); }

 private:
  static __device__ __forceinline__ RowRange between(int32_t const* begin, int32_t const* end, int32_t rows) {
    int32_t const first = min(max(load_operand(begin), 0), rows), last = min(max(load_operand(end), first), rows);
    return {first, last - first};
  }
};

/// A contiguous cache is a page for each sequence. What the table holds is handed out as it is: TMA answers a coordinate outside of the cache
/// with zeros, whatever it is; who forms addresses asks has() first.
struct PageTable {
  int32_t const* block_table;  // [batch, columns] pages, or null
  int64_t block_table_stride;
  int32_t pages, page_size;
  cutlass::FastDivmod by_page;

  struct Place {
    int32_t page, row;  // row < page_size
  };
  /// Where key `key` of sequence `b` lies, which is one of Sequences::keys(b): others' entries may be anything.
  __device__ __forceinline__ Place find(int b, int key) const {
    return find_by(b, key, [](int32_t const* from) { return load_operand(from); });
  }
  /// The same from memory that may be written meanwhile: a guess, before the launch's predecessor has finished.
  __device__ __forceinline__ Place guess(int b, int key) const {
    return find_by(b, key, [](int32_t const* from) {
      int32_t page;
      asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(page) : "l"(from) : "memory");
      return page;
    });
  }
  __device__ __forceinline__ int32_t row_of(int key) const { return block_table == nullptr ? key : key - by_page.div(key) * page_size; }
  __device__ __forceinline__ bool has(int32_t page) const { return uint32_t(page) < uint32_t(pages); }

 private:
  template <class Load>
  __device__ __forceinline__ Place find_by(int b, int key, Load const& load) const {
    if (block_table == nullptr) return {b, key};
    int column, row;
    by_page(column, row, key);
    return {load(block_table + b * block_table_stride + column), row};
  }
};

}  // namespace minfer::attention
