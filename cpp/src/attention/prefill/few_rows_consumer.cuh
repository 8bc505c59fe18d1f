// The consumer warps of a batch-invariant kernel for few rows (few_rows_sm90.cuh). A warp computes the scores of one of a split's blocks,
// then the probabilities of all blocks are exchanged, and each warp computes the output's channels of its own. Numbers are those of
// PrefillConsumer with OnlineSoftmax, in the same order; a comment says where that order is kept.
//
// Of a score tile of 16 keys, lane 4 g + c has keys g and g + 8 of rows 2 c and 2 c + 1; of an output tile of 16 channels likewise.
#pragma once

#include "attention/prefill/convert.cuh"
#include "attention/prefill/few_rows_int4.cuh"
#include "attention/prefill/few_rows_results.cuh"
#include "attention/prefill/few_rows_traits.cuh"
#include "attention/prefill/scale_queries.cuh"
#include "attention/shared/clear_rows.cuh"
#include "attention/shared/softmax.cuh"
#include "common/float16.cuh"
#include "common/mma_sm80.cuh"
#include "common/named_barrier.cuh"
#include "common/opaque.cuh"

namespace minfer::attention {

template <class Traits>
struct FewRowsConsumer : FewRowsResults<Traits> {
  using Results = FewRowsResults<Traits>;
  using Results::column_of, Results::fold_packets, Results::is_query, Results::leave_packets, Results::store, Results::store_partial,
      Results::value_scale;
  using Traits::blocks_of, Traits::for_splits, Traits::kChannelTiles, Traits::kCodes, Traits::kConsumerThreads, Traits::kConsumerWarps;
  using Traits::kFormat, Traits::kHeadDim, Traits::kInt4, Traits::kInt8, Traits::kMmaType, Traits::kRowBytes, Traits::kScalesQueries;
  using Traits::kSigns, Traits::kSplitBlocks, Traits::kTileM, Traits::kTileN, Traits::kTokenTiles;
  using Traits::kType, Traits::kv_head_of, Traits::mask_of, Traits::over_packed_heads, Traits::queries_of, Traits::query_phase;
  using Traits::kWarpsOfBlock, Traits::kWarpTiles;
  using Traits::query_stage, Traits::read_tile, Traits::release;
  using typename Results::Codes, typename Results::Items;
  using typename Traits::Element, typename Traits::EmptyBarrier, typename Traits::FullBarrier, typename Traits::Params,
      typename Traits::Ring, typename Traits::SharedStorage, typename Traits::Tile, typename Traits::TileScheduler;
  using Converter = BlockConverter<kType, kMmaType, kCodes ? kFormat : WeightFormat::kInt8, 128, 128>;
  using Int4 = FewRowsInt4<kType>;
  static constexpr bool kSpare = Traits::kCtasPerSm == 1;  // registers for loads and conversions ahead

  static CUTLASS_DEVICE void synchronize() { NamedBarrier<kConsumerThreads>{1}.sync(); }

  // ---- queries of bf16 beside keys of f16 -----------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void scale_queries(Params const& params, SharedStorage& storage, Tile const& tile, int stage, int thread) {
    if constexpr (kScalesQueries) {
      static_assert(kTileM == 8 && kHeadDim == 128);
      int const row = thread / 16 % 8, vector = thread % 16;
      uint32_t const at = shared_address(&storage.q[stage][(vector / 8 * kTileM + row) * 64]) + vector % 8 * 16;
      if (thread < 128) {
        float const scale = scale_query<1, 16>(at, 0, sign_of_keys(params, kv_head_of(params, tile)));
        if (vector == 0) storage.query_scale[row] = scale;
      }
      cutlass::arch::fence_view_async_shared();
      synchronize();
    }
  }

  struct KeyRange {
    int begin, end;
  };
  static CUTLASS_DEVICE auto residual_of(Params const& params, QuantizedRows const& side, Tile const& tile, KeyRange const& seen) {
    return typename Int4::Residual(params, side, tile.batch, kv_head_of(params, tile), Int4::in_codes(params, tile.seqlen_k), seen.begin,
                                   seen.end);
  }
  /// The keys whose values are multiplied: of codes those that a query of the tile sees, as in the converter, else of the sequence.
  static CUTLASS_DEVICE KeyRange seen_keys(Params const& params, Tile const& tile) {
    if constexpr (kCodes) {
      auto const queries = queries_of(params, tile);
      Mask const mask = mask_of(params, tile);
      return {mask.begin(queries.first), mask.end(queries.last)};
    } else {
      return {tile.first_key, params.keys_end_at_extent ? 0x7fffffff : tile.seqlen_k};
    }
  }
  template <int kTiles>
  static CUTLASS_DEVICE void clear(float (&x)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i][j] = 0.0f;
    }
  }

  // ---- scores ---------------------------------------------------------------------------------------------------------------------

  /// The address of vector `vector` (16 bytes) of row `row` in rows that TMA swizzled: [128 bytes of a row][rows][128].
  static CUTLASS_DEVICE uint32_t address_of(uint32_t base, int rows, int row, int vector) {
    return base + (vector / 8 * rows + row) * 128 + ((vector ^ row) % 8) * 16;
  }

  /// S^T of a block: 16 keys to a tile. As in the prefill kernel, an MMA adds up 16 neighbouring elements of head_dim, the first ones
  /// first. In which order it takes those 16 changes no bit of its sum; codes have another one (KvCodes). first: the warp's first tile of
  /// the block. sign: what codes of K are multiplied by.
  static CUTLASS_DEVICE void multiply_keys(SharedStorage& storage, int stage, int of_ring, int first, int lane, float sign,
                                           float (&scores)[kWarpTiles][4]) {
    uint32_t const queries = shared_address(storage.q[stage]), keys = shared_address(storage.ring[of_ring]);
    uint32_t const kept = sign == 0.0f ? 0 : 0xffffffffu;
    clear(scores);
#pragma unroll(kSpare ? 2 : 1)
    for (int vector = 0; vector < kHeadDim / 8; vector += 4) {  // of queries; a vector of codes has the elements of two
      uint32_t b[2][2];
      load_queries(queries, vector, lane, sign, b);
      if constexpr (kCodes) {
#pragma unroll
        for (int t = 0; t < kWarpTiles; ++t) {
          uint32_t x[4], a[4];
          load_matrices(address_of(keys, kTileN, 16 * (first + t) + lane % 16, vector / 2 + lane / 16), x);
          if constexpr (kSigns) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] &= kept;
          }
          TokenScale scales[2];  // read each time: kept, they would be spilled
          if constexpr (kInt8) {
#pragma unroll
            for (int i = 0; i < 2; ++i) scales[i] = TokenScale(storage.scales[of_ring][16 * (first + t) + 8 * i + lane / 4]);
          }
          convert_keys<0>(x, scales, a);
          multiply_16x8x16<kMmaType>(scores[t], a, b[0][0], b[0][1]);
          convert_keys<1>(x, scales, a);
          multiply_16x8x16<kMmaType>(scores[t], a, b[1][0], b[1][1]);
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int t = 0; t < kWarpTiles; ++t) {
            uint32_t a[4];
            load_matrices(address_of(keys, kTileN, 16 * (first + t) + lane % 16, vector + 2 * half + lane / 16), a);
            multiply_16x8x16<kMmaType>(scores[t], a, b[half][0], b[half][1]);
          }
        }
      }
    }
  }
  /// The same over int4, with block `block`, whose keys are codes up to in_codes().
  static CUTLASS_DEVICE void multiply_int4_keys(Params const& params, SharedStorage& storage, Tile const& tile, KeyRange const& seen,
                                                int stage, int of_ring, int block, int first, int lane, float (&scores)[kWarpTiles][4]) {
    uint32_t const queries = shared_address(storage.q[stage]), keys = shared_address(storage.ring[of_ring]);
    uint32_t const units = shared_address(storage.scales[of_ring]);
    int const in_codes = Int4::in_codes(params, tile.seqlen_k);
    clear(scores);
#pragma unroll
    for (int t = 0; t < kWarpTiles; t += 2) {  // a unit: codes, or in the residual
      int const key = block * kTileN + 16 * (first + t);
      if (key < in_codes) {
        typename Int4::Constants const constants(tile.batch, lane);
        uint32_t const unit = units + (first + t) / 2 * Int4::kUnitBytes;
#pragma unroll(kSpare ? 2 : 1)
        for (int vector = 0; vector < kHeadDim / 8; vector += 4) {  // of queries: one of codes
          uint32_t b[2][2];
          load_queries(queries, vector, lane, 1.0f, b);
          typename Int4::KeyScales const low(unit, vector / 2, lane), high(unit, vector / 2 + 1, lane);
          uint32_t const of_lane = Int4::address_of_keys(keys, 16 * (first + t), vector / 4, lane);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            uint32_t a[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              uint4 const x = Int4::load_keys(of_lane + (16 * j + 8 * i) * Int4::kRowBytes);
              Int4::convert_keys(x.x, x.y, low, constants, a[0][i], a[0][2 + i]);
              Int4::convert_keys(x.z, x.w, high, constants, a[1][i], a[1][2 + i]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) multiply_16x8x16<kMmaType>(scores[t + j], a[half], b[half][0], b[half][1]);
          }
        }
      } else {
        int own = lane;
        make_opaque(own);
        auto const residual = residual_of(params, params.keys, tile, seen);
#pragma unroll 1
        for (int vector = 0; vector < kHeadDim / 8; vector += 4) {
          uint32_t b[2][2], a[2][2][4];
#pragma unroll
          for (int i = 0; i < 4; ++i) residual.load_keys(key + 16 * (i / 2), vector / 2 + i % 2, own, a[i / 2][i % 2]);
          load_queries(queries, vector, own, 1.0f, b);
#pragma unroll
          for (int i = 0; i < 4; ++i) multiply_16x8x16<kMmaType>(scores[t + i / 2], a[i / 2][i % 2], b[i % 2][0], b[i % 2][1]);
        }
      }
    }
  }
  /// The B operands of 32 elements from vector `vector` of the queries on.
  static CUTLASS_DEVICE void load_queries(uint32_t queries, int vector, int lane, float sign, uint32_t (&b)[2][2]) {
    if constexpr (kCodes) {  // Codes::operand_of
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const at = address_of(queries, kTileM, lane / 4, vector + 2 * half + lane % 4 / 2) + lane % 2 * 8;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(b[half][0]), "=r"(b[half][1]) : "r"(at) : "memory");
        if constexpr (kSigns) {
#pragma unroll
          for (int i = 0; i < 2; ++i) b[half][i] = with_sign(b[half][i], sign);
        }
      }
    } else {
      uint32_t x[4];
      load_matrices(address_of(queries, kTileM, lane % 8, vector + lane / 8), x);
      b[0][0] = x[0], b[0][1] = x[1], b[1][0] = x[2], b[1][1] = x[3];
    }
  }
  /// A pair of f16, negative if `sign` is.
  static CUTLASS_DEVICE uint32_t with_sign(uint32_t pair, float sign) { return sign < 0.0f ? pair ^ 0x80008000u : pair; }

  // ---- codes ----------------------------------------------------------------------------------------------------------------------

  /// The scale of a token of int8, as BlockConverter rounds it.
  struct TokenScale {
    float scale;
    TokenScale() = default;
    explicit CUTLASS_DEVICE TokenScale(float s) {
      float const wide = __fmul_rn(s, 513.0f);
      scale = __fsub_rn(wide, __fsub_rn(wide, s));
    }
    CUTLASS_DEVICE float offset() const { return __fmul_rn(scale, -Converter::kInt8Offset); }
  };
  /// The A operand of product kProduct of two vectors of keys, as KvCodes::keys; scales: of tokens g and g + 8.
  template <int kProduct>
  static CUTLASS_DEVICE void convert_keys(uint32_t const (&x)[4], TokenScale const (&scales)[2], uint32_t (&a)[4]) {
    if constexpr (kInt8) {
      uint32_t const base = 0x47000000u;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Converter::convert(x[2 * kProduct + i], scales[i].scale, scales[i].offset(), base, a[i], a[2 + i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) from_e4m3(x[2 * kProduct + i], a[i], a[2 + i]);
    }
  }
  /// Four codes as two pairs of f16: KvCodes::from_e4m3 of both halves, without the shift.
  static CUTLASS_DEVICE void from_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high)
        : "r"(codes));
  }
  /// The A operand of row tile kTile of two vectors of values, as KvCodes::values; scales: of tokens 2 c, 2 c + 1 and 8 behind them.
  template <int kTile>
  static CUTLASS_DEVICE void convert_values(uint32_t const (&x)[4], TokenScale const (&scales)[4], uint32_t (&a)[4]) {
    if constexpr (kInt8) {
      uint32_t const base = 0x47000000u;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t const biased = x[kTile + 2 * i] ^ 0x80808080u;
        TokenScale const &first = scales[2 * i], &second = scales[2 * i + 1];
        auto const number = [](float code, TokenScale const& s) { return fmaf(code, s.scale, s.offset()); };
        a[2 * i] = Converter::pack(number(Converter::template float_of_int8<0>(biased, base), first),
                                   number(Converter::template float_of_int8<2>(biased, base), second));
        a[2 * i + 1] = Converter::pack(number(Converter::template float_of_int8<1>(biased, base), first),
                                       number(Converter::template float_of_int8<3>(biased, base), second));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) from_e4m3(__byte_perm(x[kTile + 2 * i], 0, 0x3120), a[2 * i], a[2 * i + 1]);
    }
  }

  // ---- softmax --------------------------------------------------------------------------------------------------------------------

  /// Of the thread's two rows.
  struct Rows {
    float scale_log2[2], inner[2];  // of scores, times log2(e); of a softcap
    int begin[2], end[2];           // of the keys that the row sees
  };
  /// query_scale: of the two rows' queries.
  static CUTLASS_DEVICE Rows rows_of(Params const& params, float const (&query_scale)[2], Tile const& tile, int lane) {
    Rows rows;
    bool const capped = params.softmax.softcap > 0.0f;
    float const scale = softmax_scale(params, kv_head_of(params, tile));
    Mask const mask = mask_of(params, tile);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const row = 2 * (lane % 4) + e, query = tile.first + over_packed_heads(params, row);
      float const of_row = kScalesQueries ? query_scale[e] : 1.0f;
      rows.scale_log2[e] = (capped ? params.softmax.softcap : scale) * kLog2E * (capped ? 1.0f : of_row);
      rows.inner[e] = params.cap.inner;
      if constexpr (kCodes) rows.inner[e] = scale / params.softmax.softcap * of_row;
      rows.begin[e] = mask.begin(query);
      rows.end[e] = mask.end(query);
    }
    return rows;
  }

  /// Caps and masks scores of kTiles times 16 keys from `key` on.
  template <int kTiles>
  static CUTLASS_DEVICE void cap_and_mask(Params const& params, Rows const& rows, int key, int lane, float (&scores)[kTiles][4]) {
    if (params.softmax.softcap > 0.0f) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) scores[t][x] = tanh_fast(scores[t][x] * rows.inner[x % 2]);
      }
    }
    if (__all_sync(0xffffffffu, key >= max(rows.begin[0], rows.begin[1]) && key + 16 * kTiles <= min(rows.end[0], rows.end[1]))) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        int const at = key + 16 * t + x / 2 * 8 + lane / 4;
        if (at < rows.begin[x % 2] || at >= rows.end[x % 2]) scores[t][x] = -INFINITY;
      }
    }
  }

  /// Caps and masks the warp's scores of a block and leaves the rows' maxima.
  static CUTLASS_DEVICE void find_max(Params const& params, SharedStorage& storage, Rows const& rows, int block, int number, int first,
                                      int lane, float (&scores)[kWarpTiles][4]) {
    cap_and_mask(params, rows, block * kTileN + 16 * first, lane, scores);
    float max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) {
#pragma unroll
      for (int x = 0; x < 4; ++x) max[x % 2] = fmaxf(max[x % 2], scores[t][x]);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int x = 4; x < 32; x *= 2) max[e] = fmaxf(max[e], __shfl_xor_sync(0xffffffffu, max[e], x));
      if (lane < 4) storage.block_max[2 * lane + e][number][first / kWarpTiles] = __fmul_rn(max[e], rows.scale_log2[e]);
    }
  }

  /// The running maxima of the thread's two rows over a split's blocks, as OnlineSoftmax::raise_max() has them: row_max is the last one,
  /// offset what is subtracted from the exponents of the warp's block. Warp 0 leaves what the output is multiplied by before each block.
  static CUTLASS_DEVICE void raise_maxima(SharedStorage& storage, int count, int warp, int lane, float (&row_max)[2], float (&offset)[2]) {
    float of_block[2][kSplitBlocks];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int number = 0; number < kSplitBlocks; ++number) {
        float const(&of_warps)[kWarpsOfBlock] = storage.block_max[2 * (lane % 4) + e][number];
        of_block[e][number] = of_warps[0];
        if constexpr (kWarpsOfBlock == 2) of_block[e][number] = fmaxf(of_warps[0], of_warps[1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      row_max[e] = -INFINITY;
      offset[e] = 0.0f;
#pragma unroll
      for (int number = 0; number < kSplitBlocks; ++number) {
        if (number >= count) continue;
        float rescale = 1.0f;
        if (of_block[e][number] > row_max[e] + kRaiseThreshold) {
          rescale = exp2_fast(row_max[e] - of_block[e][number]);
          row_max[e] = of_block[e][number];
        }
        if (warp == 0 && lane < 4) storage.rescale[2 * lane + e][number] = rescale;
        if (number == warp / kWarpsOfBlock) offset[e] = row_max[e] == -INFINITY ? 0.0f : row_max[e];
      }
    }
  }

  /// Leaves the probabilities of the warp's keys of a block, rounded to 16 bits, as B operands, and their sums: a chain for each column
  /// modulo 8, of which even and odd neighbours are added, as in a thread of OnlineSoftmax. The second warp of a pair has to continue the
  /// first one's chains.
  static CUTLASS_DEVICE void store_probabilities(SharedStorage& storage, Rows const& rows, float const (&offset)[2], int number, int first,
                                                 int lane, float (&scores)[kWarpTiles][4]) {
#pragma unroll
    for (int t = 0; t < kWarpTiles; ++t) {
#pragma unroll
      for (int x = 0; x < 4; ++x) scores[t][x] = exp2_fast(fmaf(scores[t][x], rows.scale_log2[x % 2], -offset[x % 2]));
      using F = Float16<kMmaType>;
      storage.probabilities[number * kTokenTiles + first + t][lane] =
          make_uint2(transpose_matrix(F::pack(scores[t][0], scores[t][1])), transpose_matrix(F::pack(scores[t][2], scores[t][3])));
    }
    if (first == 0) add_probabilities(storage, number, first, lane, scores);
  }
  static CUTLASS_DEVICE void add_probabilities(SharedStorage& storage, int number, int first, int lane,
                                               float const (&scores)[kWarpTiles][4]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const row = 2 * (lane % 4) + e;
      float sum = first == 0 ? 0.0f : storage.warp_sum[row][number][lane / 4];
#pragma unroll
      for (int t = 0; t < kWarpTiles; ++t) {
#pragma unroll
        for (int x = e; x < 4; x += 2) sum += scores[t][x];
      }
      if (first + kWarpTiles < kTokenTiles) {
        storage.warp_sum[row][number][lane / 4] = sum;
      } else {
        sum += __shfl_xor_sync(0xffffffffu, sum, 4);
        if (lane / 4 % 2 == 0) storage.block_sum[row][number][lane / 8] = sum;
      }
    }
  }

  /// The states of the thread's two rows.
  static CUTLASS_DEVICE void find_states(SharedStorage const& storage, float const (&row_max)[2], int count, int lane,
                                         SplitState (&states)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const row = 2 * (lane % 4) + e;
      float sum = 0.0f;
      for (int number = 0; number < count; ++number) {
        sum = fmaf(sum, storage.rescale[row][number], storage.block_sum[row][number][lane / 8]);
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      states[e] = {row_max[e], sum};
    }
  }

  // ---- output ---------------------------------------------------------------------------------------------------------------------

  /// Values of other keys become zeros in the warp's channels: their probabilities are zero, but 0 * NaN is NaN.
  static CUTLASS_DEVICE void clear_unseen(KeyRange const& seen, SharedStorage& storage, int of_ring, int block, int warp, int lane) {
    int const begin = min(max(seen.begin - block * kTileN, 0), kTileN), end = min(max(seen.end - block * kTileN, 0), kTileN);
    if (begin == 0 && end == kTileN) return;
    if constexpr (kInt4) {  // with these scales they are zeros; all warps write the same
#pragma unroll 1
      for (int key = lane; key < kTileN; key += 32) {
        if (key >= begin && key < end) continue;
        auto* const of_unit = &storage.scales[of_ring][key / Int4::kUnit * (Int4::kUnitBytes / 2) + key % Int4::kUnit];
        for (int plane = 0; plane < Int4::kPlanes; ++plane) of_unit[plane * Int4::kUnit] = 0;
      }
    } else {
      uint32_t const values = shared_address(storage.ring[of_ring]);
      constexpr int kVectors = kChannelTiles * 16 * kRowBytes / kHeadDim / 16;  // of the warp's channels of a key
#pragma unroll 1
      for (int i = lane; i < kTileN * kVectors; i += 32) {
        int const key = i / kVectors;
        if (key >= begin && key < end) continue;
        uint32_t const at = address_of(values, kTileN, key, warp * kVectors + i % kVectors);
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
        if constexpr (kInt8) storage.scales[of_ring][key] = 0.0f;  // all warps write the same
      }
    }
    cutlass::arch::fence_view_async_shared();  // before TMA loads into the stage again
    __syncwarp();
  }

  using Output = float[kChannelTiles][4];
  /// O^T += V^T.P^T of a block.
  static CUTLASS_DEVICE void multiply_values(SharedStorage& storage, int of_ring, int number, int warp, int lane, Output& output) {
    uint32_t const values = shared_address(storage.ring[of_ring]);
    auto const probabilities = [&](int t) { return storage.probabilities[number * kTokenTiles + t][lane]; };
    if constexpr (kCodes) {
#pragma unroll(kInt8 ? (kSpare ? 2 : 1) : kTokenTiles / 2)
      for (int t = 0; t < kTokenTiles; t += 2) {  // a vector of codes of 32 keys, for the warp's 16 channels
        uint32_t x[4], a[4];
        load_matrices_transposed(address_of(values, kTileN, 16 * t + lane, warp), x);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t const of[4] = {x[2 * half], 0, x[2 * half + 1], 0};
          TokenScale scales[4];
          if constexpr (kInt8) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              auto const* const pair = &storage.scales[of_ring][16 * (t + half) + 8 * i + lane % 4 * 2];
              scales[2 * i] = TokenScale(pair[0]);
              scales[2 * i + 1] = TokenScale(pair[1]);
            }
          }
          convert_values<0>(of, scales, a);
          uint2 const p = probabilities(t + half);
          multiply_16x8x16<kMmaType>(output[0], a, p.x, p.y);
        }
      }
    } else {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        uint2 const p = probabilities(t);
#pragma unroll
        for (int i = 0; i < kChannelTiles; ++i) {
          uint32_t a[4];
          load_matrices_transposed(
              address_of(values, kTileN, 16 * t + lane / 16 * 8 + lane % 8, 2 * (warp * kChannelTiles + i) + lane / 8 % 2), a);
          multiply_16x8x16<kMmaType>(output[i], a, p.x, p.y);
        }
      }
    }
  }

  /// The same over int4, as multiply_int4_keys().
  static CUTLASS_DEVICE void multiply_int4_values(Params const& params, SharedStorage& storage, Tile const& tile, KeyRange const& seen,
                                                  int of_ring, int block, int number, int warp, int lane, Output& output) {
    uint32_t const values = shared_address(storage.ring[of_ring]), units = shared_address(storage.scales[of_ring]);
    int const vector = warp / 2, row_tile = warp % 2, plane = vector / params.vectors_of_group;  // the warp has one of 32 channels' two
    int const tiles_in_codes = (Int4::in_codes(params, tile.seqlen_k) - block * kTileN) / 16;
    typename Int4::Constants const constants(tile.batch, lane);
    auto const multiply = [&](int t, uint32_t const(&a)[2][4]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint2 const p = storage.probabilities[number * kTokenTiles + t + half][lane];
        multiply_16x8x16<kMmaType>(output[0], a[half], p.x, p.y);
      }
    };
    int t = 0;
#pragma unroll(kSpare ? 2 : 1)
    for (; t < min(tiles_in_codes, kTokenTiles); t += 2) {  // a unit
      uint32_t x[4], a[2][4];
      load_matrices_transposed(Int4::address_of(values, 16 * t + lane, vector), x);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        typename Int4::ValueScales const scales(units + t / 2 * Int4::kUnitBytes, half, plane, params.groups_v, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Int4::convert_values(x[2 * half + i] >> 8 * row_tile, scales.scale[i], scales.minimum[i], constants, a[half][2 * i],
                               a[half][2 * i + 1]);
        }
      }
      multiply(t, a);
    }
#pragma unroll 1
    for (; t < kTokenTiles; t += 2) {
      int own = lane;
      make_opaque(own);
      auto const residual = residual_of(params, params.values, tile, seen);
      uint32_t a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) residual.load_values(block * kTileN + 16 * (t + half), vector, row_tile, own, a[half]);
      multiply(t, a);
    }
  }

  // ---- a split ----------------------------------------------------------------------------------------------------------------------

  /// Computes a split: its output, in the warp's channels, and the states of the thread's two rows. The ring has its key blocks, the last
  /// one first, and then its value blocks. release_queries() is called after the last use of the queries.
  template <class ReleaseQueries>
  static CUTLASS_DEVICE void compute_split(Params const& params, SharedStorage& storage, Tile const& tile, int iteration,
                                           KeyBlocks<kTileN> const& blocks, Ring& ring, int thread, ReleaseQueries const& release_queries,
                                           Output& output, SplitState (&states)[2]) {
    make_opaque(thread);  // addresses computed before the first split would be spilled
    int const warp = thread / 32, lane = thread % 32, count = blocks.end - blocks.begin;
    int const own = warp / kWarpsOfBlock, first = warp % kWarpsOfBlock * kWarpTiles;  // the warp's block, and its first tile of 16 keys
    float scores[kWarpTiles][4], sign = 1.0f;
    if constexpr (kSigns) sign = sign_of_keys(params, kv_head_of(params, tile));
    auto const find_rows = [&] {
      int of_rows = lane;
      make_opaque(of_rows);  // each time: kept, they would be spilled
      float const query_scale[2] = {storage.query_scale[of_rows % 4 * 2], storage.query_scale[of_rows % 4 * 2 + 1]};
      return rows_of(params, query_scale, tile, of_rows);
    };
    for (int number = 0; number < count; ++number) {
      FullBarrier::wait(&storage.full[ring.index], ring.phase);
      if (number == own) {
        if constexpr (kInt4) {
          multiply_int4_keys(params, storage, tile, seen_keys(params, tile), query_stage(iteration), ring.index, blocks.end - 1 - number,
                             first, lane, scores);
        } else {
          multiply_keys(storage, query_stage(iteration), ring.index, first, lane, sign, scores);
        }
      }
      __syncwarp();
      release(&storage.empty[ring.index], thread);
      ring.advance();
      if (number == own) {
        find_max(params, storage, find_rows(), blocks.end - 1 - number, number, first, lane, scores);
      }
    }
    release_queries();
    synchronize();
    float row_max[2], offset[2];
    raise_maxima(storage, count, warp, lane, row_max, offset);
    if (own < count) store_probabilities(storage, find_rows(), offset, own, first, lane, scores);
    synchronize();
    if (kWarpsOfBlock == 2 && first > 0 && own < count) add_probabilities(storage, own, first, lane, scores);
    clear(output);
    KeyRange const seen = seen_keys(params, tile);
#pragma unroll 1
    for (int number = 0; number < count; ++number) {
      FullBarrier::wait(&storage.full[ring.index], ring.phase);
      clear_unseen(seen, storage, ring.index, blocks.end - 1 - number, warp, lane);
      if (number > 0) {
        float const rescale[2] = {storage.rescale[2 * (lane % 4)][number], storage.rescale[2 * (lane % 4) + 1][number]};
#pragma unroll
        for (int i = 0; i < kChannelTiles; ++i) {
#pragma unroll
          for (int x = 0; x < 4; ++x) output[i][x] *= rescale[x % 2];
        }
      }
      if constexpr (kInt4) {
        multiply_int4_values(params, storage, tile, seen, ring.index, blocks.end - 1 - number, number, warp, lane, output);
      } else {
        multiply_values(storage, ring.index, number, warp, lane, output);
      }
      __syncwarp();
      release(&storage.empty[ring.index], thread);
      ring.advance();
    }
    if constexpr (kWarpsOfBlock == 2) synchronize();  // sums are complete
    find_states(storage, row_max, count, lane, states);
  }

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int thread) {
    Ring ring;
    clear_rows_outside_sequences(params, thread, kConsumerThreads);
    for (int iteration = 0;; ++iteration) {
      EmptyBarrier::wait(&storage.full_tile[iteration % 2], iteration / 2 % 2);
      Tile const tile = read_tile(storage, iteration, thread % 32);
      if (tile.is_none()) break;
      int const stage = query_stage(iteration);
      float scale = 1.0f;
      if constexpr (kSpare) scale = value_scale(params, tile);
      FullBarrier::wait(&storage.full_q[stage], query_phase(iteration));
      Output all;
      clear(all);
      SplitState total[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};  // of the thread's two rows
      KeyBlocks<kTileN> const tile_blocks = blocks_of(params, tile, queries_of(params, tile));
      auto const release_queries = [&] {
        int of_queries = iteration;
        make_opaque(of_queries);  // kept, the barrier's address would be spilled
        __syncwarp();
        release(&storage.empty_q[query_stage(of_queries)], thread);
      };
      for_splits(tile_blocks, [&](int split, KeyBlocks<kTileN> const& blocks) CUTLASS_LAMBDA_FUNC_INLINE {
        if (split == (tile_blocks.end - 1) / kSplitBlocks) scale_queries(params, storage, tile, stage, thread);
        Output output;
        SplitState states[2];
        auto const after_scores = [&] {
          if (split == tile_blocks.begin / kSplitBlocks) release_queries();
        };
        compute_split(params, storage, tile, iteration, blocks, ring, thread, after_scores, output, states);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          SplitWeights const weights = fold_state(total[e], states[e]);
#pragma unroll
          for (int i = 0; i < kChannelTiles; ++i) {
#pragma unroll
            for (int x = e; x < 4; x += 2) all[i][x] = fold_output(all[i][x], output[i][x], weights);
          }
        }
      });
      if (tile_blocks.begin >= tile_blocks.end) release_queries();
      Tile const again = read_tile(storage, iteration, thread % 32);  // kept, it would be spilled
      release(&storage.empty_tile[iteration % 2], thread);
      int own = thread;
      make_opaque(own);  // what is computed of it before the mainloop would be spilled
      if constexpr (!kSpare) scale = value_scale(params, again);
      auto const column = [&](int i, int x) { return column_of(i, x, own); };
      if (again.split >= 0 && params.packets == nullptr) {
        store_partial(params, again, total, all, own, column);
      } else if (auto const splits = Items::splits_of(params, again.seqlen_q, again.seqlen_k); again.split >= 0 && splits.count > 1) {
        leave_packets(params, storage.stamp, again, total, all, own);
        fold_packets(params, again, scale, splits, TileScheduler::count(storage.tiles, params), own / 32, own % 32);
        return;  // the CTA has no other item
      } else {
        store(params, again, scale, total, all, own, column);
      }
    }
  }
};

}  // namespace minfer::attention
