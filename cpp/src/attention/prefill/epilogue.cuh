// The epilogue of a consumer warpgroup of prefill: its 64 rows of the output are divided by the softmax's denominator, rounded and stored,
// and their log-sum-exp is written. A warpgroup whose rows all lie in the sequence stores by TMA from shared memory, where the kernel has
// room for that (kOwnOutput); otherwise the threads store 16 bytes each.
#pragma once

#include "attention/prefill/convert.cuh"
#include "attention/prefill/traits.cuh"
#include "attention/shared/splits.h"
#include "common/named_barrier.cuh"
#include "common/opaque.cuh"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/numeric_conversion.h"

namespace minfer::attention {

template <class Traits>
struct PrefillEpilogue : Traits {
  using Traits::kConverts, Traits::kFolds, Traits::kHeadDimV, Traits::kInvariant, Traits::kOwnOutput, Traits::kTileM, Traits::kv_head_of,
      Traits::kWarpgroupBarrier;
  using Traits::over_packed_heads, Traits::queries_of;
  using typename Traits::Element, typename Traits::Params, typename Traits::Queries, typename Traits::SharedStorage, typename Traits::Tile;

  template <class Softmax, class Output>
  static CUTLASS_DEVICE void store(Params const& params, SharedStorage& storage, Tile const& tile, Softmax& softmax, Output& output,
                                   int consumer, int thread) {
    make_opaque(thread);
    make_opaque(consumer);  // addresses computed before the mainloop would be spilled
    int const lane = thread % 32, row = consumer * 64 + thread / 32 * 16 + lane / 4;  // of the tile; the thread's other row is 8 below
    Queries const queries = queries_of(params, tile, consumer);
    if (queries.first > queries.last) return;
    if constexpr (!kFolds) softmax.reduce_sums();  // PrefillSplitTotals::fold() has done that
    float factor[2], lse[2];
    int query[2], head[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      query[h] = tile.first + over_packed_heads(params, row + 8 * h);
      head[h] = tile.head_tile * params.packed_heads + (row + 8 * h & (params.packed_heads - 1));
      bool const inside = query[h] < tile.seqlen_q;
      factor[h] = finish_row<Element, kInvariant>(params.softmax, head[h], inside, softmax.row_max[h], softmax.row_sum[h], &lse[h]);
      if constexpr (kConverts) factor[h] = multiply<kInvariant>(factor[h], scale_of_output(params, kv_head_of(params, tile)));
    }
    int const batch = params.cu_seqlens_q != nullptr ? 0 : tile.batch;
    // TMA cuts boxes off at the tensor's extent only, not where a sequence ends.
    bool const whole = params.cu_seqlens_q == nullptr || queries.first + over_packed_heads(params, 64) <= tile.seqlen_q;
    auto const rounded = [&](int block, int h) {  // columns 8 block + 2 (lane % 4) and the next, of row h
      cutlass::NumericArrayConverter<Element, float, 2> const convert;
      cutlass::Array<float, 2> pair;
      float const x0 = output(4 * block + 2 * h), x1 = output(4 * block + 2 * h + 1);
      pair[0] = kInvariant ? finish_output(x0, factor[h]) : x0 * factor[h];
      pair[1] = kInvariant ? finish_output(x1, factor[h]) : x1 * factor[h];
      auto const x = convert(pair);
      return reinterpret_cast<uint32_t const&>(x);
    };
    if (kOwnOutput && whole) {
      store_by_tma(params, storage, tile, rounded, queries.first, batch, consumer, thread);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        auto* const to = static_cast<Element*>(params.out) + batch * params.out_batch + (tile.row_q + query[h]) * params.out_row +
                         head[h] * params.out_head;
#pragma unroll
        for (int block = 0; block < kHeadDimV / 8; block += 4) {
          uint32_t x[4] = {rounded(block, h), rounded(block + 1, h), rounded(block + 2, h), rounded(block + 3, h)};
          transpose_quad(x, lane);
          int const column = 8 * (block + lane % 4);
          if (query[h] < tile.seqlen_q && column < params.head_dim_v)
            *reinterpret_cast<uint4*>(to + column) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
    if (params.lse == nullptr || lane % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // stored last: the fence of store_by_tma would wait for it
      if (query[h] < tile.seqlen_q) params.lse[batch * params.lse_batch + head[h] * params.lse_head + tile.row_q + query[h]] = lse[h];
    }
  }

  /// Transposes a 4 x 4 matrix over the four lanes of a quad: x[i] of lane c becomes x[c] of lane i.
  static CUTLASS_DEVICE void transpose_quad(uint32_t (&x)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      bool const upper = lane & bit;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        uint32_t const other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + bit], bit);
        x[i] = upper ? other : x[i];
        x[i + bit] = upper ? x[i + bit] : other;
      }
    }
  }

  /// Stages the warpgroup's rows in shared memory and stores them by TMA.
  template <class Rounded>
  static CUTLASS_DEVICE void store_by_tma(Params const& params, SharedStorage& storage, Tile const& tile, Rounded const& rounded,
                                          int first_query, int batch, int consumer, int thread) {
    if constexpr (kOwnOutput) {
      NamedBarrier<128> const warpgroup_barrier{kWarpgroupBarrier + consumer};
      int const lane = thread % 32;
      Element* const staged = storage.output.of + consumer * 64 * 64;
      if (thread == 0) cute::tma_store_wait<0>();  // TMA has read the tile before this one
      warpgroup_barrier.sync();
      // stmatrix stores four matrices of 8 rows x 8 columns: lane l gives the address of row l % 8 of matrix l / 8. Matrices 0 and 1 are
      // the upper and lower half of the warp's 16 rows, matrices 2 and 3 the same of the next eight columns.
      int const at_row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; j += 2) {
        int const block = j + lane / 16;
        Element* const to = staged + block / 8 * (kTileM * 64) + at_row * 64 + (block % 8 ^ at_row % 8) * 8;
        asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(cute::cast_smem_ptr_to_uint(to)),
                     "r"(rounded(j, 0)), "r"(rounded(j, 1)), "r"(rounded(j + 1, 0)), "r"(rounded(j + 1, 1))
                     : "memory");
      }
      cutlass::arch::fence_view_async_shared();
      warpgroup_barrier.sync();
      if (thread != 0) return;
#pragma unroll
      for (int column = 0; column < kHeadDimV / 64; ++column) {
        cute::SM90_TMA_STORE_5D::copy(&params.o, staged + column * (kTileM * 64), column * 64, 0, tile.row_q + first_query, tile.head_tile,
                                      batch);
      }
      cute::tma_store_arrive();
    }
  }
};

}  // namespace minfer::attention
