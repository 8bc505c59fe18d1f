// A key block of decode in shared memory: where its vectors of 16 bytes lie, and how fragments are read from it.
#pragma once

#include "attention/decode/traits.cuh"
#include "common/float16.cuh"
#include "common/mma_sm80.cuh"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"

namespace minfer::attention {

template <class Traits>
struct DecodeKeyBlock : Traits {
  using Traits::kAsyncLoads, Traits::kHeadDim, Traits::kMmaType, Traits::kRowBytes, Traits::kSteps, Traits::kSwizzle, Traits::kTileN;
  using Traits::kTokenTiles;
  using typename Traits::Codes, typename Traits::KeyBlockAddress, typename Traits::Params, typename Traits::Queries;

  static constexpr uint32_t kVectors = kSwizzle / 16;  // of a token in a row of shared memory
  static constexpr int kPairs = kRowBytes / 32;        // pairs of vectors of a token: what one ldmatrix.x4 reads of 16 tokens

  /// The address bits that TMA's shared-memory swizzle exclusive-ors with the bits three places above them.
  static CUTLASS_DEVICE uint32_t swizzle_bits(Params const& params) {
    constexpr uint32_t kOfRow = kSwizzle - 16, kOf128Bytes = 0x70;
    return kAsyncLoads && kOfRow != kOf128Bytes && params.row_shift > 0 ? kOf128Bytes : kOfRow;
  }
  /// The address of vector `vector` of token `token`, as TMA leaves the block.
  static CUTLASS_DEVICE uint32_t address_of(Params const& params, uint32_t base, uint32_t token, uint32_t vector) {
    uint32_t const at = token * kSwizzle + vector % kVectors * 16;
    return base + vector / kVectors * (kTileN * kSwizzle) + (at ^ at >> 3 & swizzle_bits(params));
  }
  /// From the address of vector c of token r, that of vector 2 j + c of token 16 t + r.
  static CUTLASS_DEVICE uint32_t move_address(Params const& params, uint32_t first, uint32_t t, uint32_t j) {
    uint32_t swizzled = first ^ 2 * j % kVectors * 16;
    if (16 * kSwizzle < 1024 && t % 2 == 1) swizzled ^= swizzle_bits(params) & 0x40;
    return swizzled + 2 * j / kVectors * (kTileN * kSwizzle) + t * (16 * kSwizzle);
  }

  static CUTLASS_DEVICE uint32_t pack(float low, float high) { return Float16<kMmaType>::pack(low, high); }
  static CUTLASS_DEVICE uint4 load_16_bytes(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
    return x;
  }
  static CUTLASS_DEVICE uint32_t load_4_bytes(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
  }

  /// A warp's keys of a block, kWarpKeys of them from number `first` on: where a lane's matrices of 16 tokens x 2 vectors begin.
  struct Fragments {
    uint32_t keys;    // ldmatrix: tokens 0-7 and 8-15 of one vector, then of the next
    uint32_t values;  // ldmatrix, transposed: tokens 0-7 of one vector, of the next, then tokens 8-15 likewise
    uint32_t scales;  // of the whole block

    CUTLASS_DEVICE Fragments(Params const& params, KeyBlockAddress const& block, int first, uint32_t lane)
        : keys(address_of(params, block.keys + first * kSwizzle, lane % 16, lane / 16)),
          values(address_of(params, block.values + first * kSwizzle, lane / 16 * 8 + lane % 8, lane / 8 % 2)),
          scales(block.scales) {}
  };

  /// The B operands of the products of vector pair j.
  template <int kRowTiles>
  static CUTLASS_DEVICE void load_queries(Queries const& queries, int j, int lane, uint32_t (&b)[Codes::kPerPair][kRowTiles][2]) {
#pragma unroll
    for (int product = 0; product < Codes::kPerPair; ++product) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint2 const q = queries.of[i][j * Codes::kPerPair + product][lane];
        b[product][i][0] = q.x;
        b[product][i][1] = q.y;
      }
    }
  }
  /// S^T += K.Q^T of 16 tokens and one pair of vectors, x.
  template <int kProduct, int kRowTiles>
  static CUTLASS_DEVICE void multiply_pair_of_keys(float (&s)[kRowTiles][4], uint32_t const (&x)[4],
                                                   uint32_t const (&b)[Codes::kPerPair][kRowTiles][2]) {
    uint32_t a[4];
    Codes::template keys<kProduct>(x, a);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) multiply_16x8x16<kMmaType>(s[i], a, b[kProduct][i][0], b[kProduct][i][1]);
    if constexpr (kProduct + 1 < Codes::kPerPair) multiply_pair_of_keys<kProduct + 1>(s, x, b);
  }
  /// O^T += V^T.P^T of 16 tokens and one pair of vectors, x.
  template <int kTile, int kRowTiles>
  static CUTLASS_DEVICE void multiply_pair_of_values(float (&output)[kSteps][kRowTiles][4], int first_tile, uint32_t const (&x)[4],
                                                     uint32_t const (&p)[kRowTiles][2]) {
    uint32_t a[4];
    Codes::template values<kTile>(x, a);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) multiply_16x8x16<kMmaType>(output[first_tile + kTile][i], a, p[i][0], p[i][1]);
    if constexpr (kTile + 1 < Codes::kPerPair) multiply_pair_of_values<kTile + 1>(output, first_tile, x, p);
  }

  /// S^T += K.Q^T of a warp's keys, for formats whose queries are the same for all tokens.
  template <int kRowTiles>
  static CUTLASS_DEVICE void multiply_keys(Params const& params, Fragments const& at, Queries const& queries,
                                           float (&s)[kTokenTiles][kRowTiles][4], int lane) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      uint32_t b[Codes::kPerPair][kRowTiles][2];
      load_queries(queries, j, lane, b);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        uint32_t x[4];
        load_matrices(move_address(params, at.keys, t, j), x);
        multiply_pair_of_keys<0>(s[t], x, b);
      }
    }
  }
  /// O^T += V^T.P^T of a warp's keys, for formats whose probabilities are the same for all channels.
  template <int kRowTiles>
  static CUTLASS_DEVICE void multiply_values(Params const& params, Fragments const& at, uint32_t const (&p)[kTokenTiles][kRowTiles][2],
                                             float (&output)[kSteps][kRowTiles][4]) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        uint32_t x[4];
        load_matrices_transposed(move_address(params, at.values, t, j), x);
        multiply_pair_of_values<0>(output, j * Codes::kPerPair, x, p[t]);
      }
    }
  }

  /// Sets values of tokens outside of [begin, end) to zero: their probabilities are zero, but 0 * NaN is NaN. Called by the warp.
  static CUTLASS_DEVICE void clear_values(Params const& params, KeyBlockAddress const& block, int first, int begin, int end, int lane) {
    constexpr int kRowVectors = kRowBytes / 16;
    if (begin > 0 || end < Traits::kWarpKeys) {
#pragma unroll 1
      for (int i = lane; i < Traits::kWarpKeys * kRowVectors; i += 32) {
        int const token = i / kRowVectors;
        if (token >= begin && token < end) continue;
        uint32_t const at = address_of(params, block.values, first + token, i % kRowVectors);
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
      }
      if constexpr (kAsyncLoads) cutlass::arch::fence_view_async_shared();  // before TMA loads into the stage again
      __syncwarp();
    }
  }
};

}  // namespace minfer::attention
