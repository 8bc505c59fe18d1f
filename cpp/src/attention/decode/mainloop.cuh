// What a warp does with a slice of a decode piece: S^T = K.Q^T, softmax, O^T += V^T.P^T by mma.sync, with codes that become f16 in registers.
// The operands are swapped: S^T has 16 keys a tile and needs no more than 8 or 16 columns for the rows of a unit. Fragments: kv_dequant.cuh.
// Scales leave the elements alone: int8's of K multiply scores, those of V probabilities; fp8's multiply once; int4's of K, which belong to
// channels, multiply the queries of each group of tokens, its minima make a score of their own, and V's multiply probabilities.
#pragma once

#include "attention/decode/traits.cuh"
#include "attention/shared/mask.h"
#include "attention/shared/softmax.cuh"
#include "common/mma_sm80.cuh"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"

namespace minfer::attention {

template <class Traits>
struct DecodeMainloop : Traits {
  using Traits::k16Bit, Traits::kFormat, Traits::kGroupBytes, Traits::kHalf, Traits::kHalves, Traits::kHeadDim, Traits::kInt4,
      Traits::kInt8;
  using Traits::kAsyncLoads, Traits::kTokenTiles, Traits::kWarps;
  using Traits::kMaxGroups, Traits::kMmaType, Traits::kPart, Traits::kParts, Traits::kRowBytes, Traits::kSlice, Traits::kSteps,
      Traits::kSwizzle;
  using typename Traits::Codes, typename Traits::Element, typename Traits::Params, typename Traits::Pieces, typename Traits::Queries;
  using typename Traits::SliceAddress;

  static constexpr uint32_t kChunks = kSwizzle / 16;  // of 16 bytes, of a token's row in shared memory
  /// TMA's swizzle: these bits of an address are turned by the bits three places above them.
  static CUTLASS_DEVICE uint32_t swizzle(Params const& params) {
    constexpr uint32_t kOwn = kSwizzle - 16, kWhole = 0x70;
    return kAsyncLoads && kOwn != kWhole && params.row_shift > 0 ? kWhole : kOwn;
  }
  /// Where 16 bytes of a slice lie: chunk `chunk` of the row bytes of token `token`. As TMA leaves them.
  static CUTLASS_DEVICE uint32_t address_of(Params const& params, uint32_t base, uint32_t token, uint32_t chunk) {
    uint32_t const at = token * kSwizzle + chunk % kChunks * 16;
    return base + chunk / kChunks * (kSlice * kSwizzle) + (at ^ at >> 3 & swizzle(params));
  }
  /// As address_of, of chunk 2 j + c of token 16 t + r, from that of chunk c of token r.
  static CUTLASS_DEVICE uint32_t move_address(Params const& params, uint32_t first, uint32_t t, uint32_t j) {
    uint32_t turned = first ^ 2 * j % kChunks * 16;
    if (16 * kSwizzle < 1024 && t % 2 == 1) turned ^= swizzle(params) & 0x40;
    return turned + 2 * j / kChunks * (kSlice * kSwizzle) + t * (16 * kSwizzle);
  }

  static CUTLASS_DEVICE uint32_t pack(float low, float high) { return round_pair<kMmaType>(low, high); }
  static CUTLASS_DEVICE uint32_t multiply(uint32_t x, uint32_t y) {
    uint32_t z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
  }
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

  /// A warp's part of a piece. Columns of tile i that a lane has: rows 8 i + 2 (lane % 4) and the next.
  template <int kCols>
  struct State {
    float output[kSteps][kCols][4];  // of d (by Codes::row_of), columns as above; int4: in units of `unit_of_codes`
    float highest[kCols][2];         // that the exponentials are relative to, in units of log2; -inf: no key yet
    float sum[kCols][2];             // of this lane's tokens
    float unit;                      // int8: a power of two that scales of V are relative to; 0: none yet
    float unit_of_codes[2];          // int4: of rows g, and g + 8
    float least[kCols][4];           // int4: sums of minima of V: group lane / 4, columns as above

    CUTLASS_DEVICE void clear() {
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int m = 0; m < kSteps; ++m) output[m][i][e] = 0.0f;
          least[i][e] = 0.0f;
        }
        highest[i][0] = highest[i][1] = -INFINITY;
        sum[i][0] = sum[i][1] = 0.0f;
      }
      unit = 0.0f;
      unit_of_codes[0] = Codes::kInt4Unit;
      unit_of_codes[1] = Codes::kInt4UpperUnit;
    }
  };

  /// What turns products into scores, in units of log2.
  template <int kCols>
  struct Scores {
    float factor[kCols][2], cap;  // cap > 0: score = cap * tanh(product * factor)
    int32_t first_row, shift;     // of the piece's rows; query i is aligned to key i + shift
    int32_t first_key, last_key;  // keys before, and from there on, are nobody's, and what the cache holds for them may be anything
  };

  /// Scores of kTiles x 16 tokens from `key` on -> B operands of the product with V, before scales of V. Follows a maximum that grows by more
  /// than 2^kSlack.
  /// key_scale: of the lane's tokens, lane / 4 and 8 behind; `raise`: int8's unit is to grow by 1 / raise, 1 where it does not.
  template <bool kMasked, int kTiles, int kCols>
  static CUTLASS_DEVICE void soften(Params const& params, float (&s)[kTiles][kCols][4], State<kCols>& state, Scores<kCols> const& scores,
                                    float const (&key_scale)[kTiles][2], int key, int lane, float largest_value, float& inverse_unit) {
    constexpr float kSlack = kInt4 ? 3.0f : 8.0f;  // int4: probabilities times scales of V are f16
    bool grown = kInt8 && largest_value > 16.0f * state.unit;
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          float score = s[t][i][x] * scores.factor[i][x % 2];
          if (kInt8) score *= key_scale[t][x / 2];
          s[t][i][x] = score;
        }
      }
      if (scores.cap > 0.0f) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int x = 0; x < 4; ++x) s[t][i][x] = scores.cap * tanh_fast(s[t][i][x]);
        }
      }
      if constexpr (kMasked) {
        int column = 8 * i + 2 * (lane % 4);
        asm volatile("" : "+r"(column));  // bounds of columns, kept for all slices, would be spilled
        int const left = params.window_left, right = params.window_right;
        int const aligned[2] = {params.by_group.div(scores.first_row + column) + scores.shift,
                                params.by_group.div(scores.first_row + column + 1) + scores.shift};
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            int const token = key + 16 * t + 8 * (x / 2) + lane / 4;
            bool const hidden =
                token >= scores.last_key || (right >= 0 && token > aligned[x % 2] + right) || (left >= 0 && token < aligned[x % 2] - left);
            if (hidden) s[t][i][x] = -INFINITY;
          }
        }
      }
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) top[x % 2] = fmaxf(top[x % 2], s[t][i][x]);
      }
      grown = grown || top[0] > state.highest[i][0] + kSlack || top[1] > state.highest[i][1] + kSlack;
    }
    if (__any_sync(0xffffffffu, grown)) {  // seldom after the first slices
      float lift = 1.0f;
      if constexpr (kInt8) {
        float largest = largest_value;
#pragma unroll
        for (int x = 16; x > 0; x /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, x));
        if (largest > state.unit) {
          float const unit = __int_as_float(__float_as_int(largest) & 0x7f800000);
          lift = unit > 0.0f ? state.unit * inverse_of(unit) : 1.0f;
          if (unit > 0.0f) state.unit = unit;
        }
      }
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
        float rescale[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float top = -INFINITY;
#pragma unroll
          for (int t = 0; t < kTiles; ++t) top = fmaxf(top, fmaxf(s[t][i][e], s[t][i][2 + e]));
#pragma unroll
          for (int x = 4; x < 32; x *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, x));
          float const highest = fmaxf(state.highest[i][e], top);
          rescale[e] = highest == -INFINITY ? 1.0f : exp2_fast(state.highest[i][e] - highest);
          state.highest[i][e] = highest;
          state.sum[i][e] *= rescale[e];
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
#pragma unroll
          for (int m = 0; m < kSteps; ++m) state.output[m][i][x] *= rescale[x % 2] * lift;
          if (kInt4) state.least[i][x] *= rescale[x % 2];
        }
      }
    }
    if constexpr (kInt8) inverse_unit = state.unit > 0.0f ? inverse_of(state.unit) : 0.0f;
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        float const offset = state.highest[i][x % 2] == -INFINITY ? 0.0f : state.highest[i][x % 2];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          s[t][i][x] = exp2_fast(s[t][i][x] - offset);
          state.sum[i][x % 2] += s[t][i][x];
        }
      }
    }
  }

  /// Exponentials -> B operands.
  template <int kTiles, int kCols>
  static CUTLASS_DEVICE void transpose(float const (&s)[kTiles][kCols][4], uint32_t (&p)[kTiles][kCols][2]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
        p[t][i][0] = transpose_matrix(pack(s[t][i][0], s[t][i][1]));
        p[t][i][1] = transpose_matrix(pack(s[t][i][2], s[t][i][3]));
      }
    }
  }

  template <int kProduct, int kCols>
  static CUTLASS_DEVICE void multiply_keys(float (&s)[kCols][4], uint32_t const (&x)[4], uint32_t const (&b)[Codes::kPerPair][kCols][2]) {
    uint32_t a[4];
    Codes::template keys<kProduct>(x, a);
#pragma unroll
    for (int i = 0; i < kCols; ++i) multiply_16x8x16<kMmaType>(s[i], a, b[kProduct][i][0], b[kProduct][i][1]);
    if constexpr (kProduct + 1 < Codes::kPerPair) multiply_keys<kProduct + 1>(s, x, b);
  }
  template <int kTile, int kCols>
  static CUTLASS_DEVICE void multiply_values(float (&output)[kSteps][kCols][4], int first_tile, uint32_t const (&x)[4],
                                             uint32_t const (&p)[kCols][2]) {
    uint32_t a[4];
    Codes::template values<kTile>(x, a);
#pragma unroll
    for (int i = 0; i < kCols; ++i) multiply_16x8x16<kMmaType>(output[first_tile + kTile][i], a, p[i][0], p[i][1]);
    if constexpr (kTile + 1 < Codes::kPerPair) multiply_values<kTile + 1>(output, first_tile, x, p);
  }

  /// int4: queries times the scales of K's channels in chunks 2 j and 2 j + 1, and what its minima add to the scores of a group's tokens.
  template <int kCols>
  static CUTLASS_DEVICE void scale_queries(uint32_t (&b)[Codes::kPerPair][kCols][2], float (&least)[kCols][4], uint32_t scales, uint32_t j,
                                           uint32_t c) {
    constexpr uint32_t kUpper = 0x2c002c00;  // 1 / 16
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      uint4 const scale = load_16_bytes(scales + ((2 * j + chunk) * 32 + 8 * c) * 2);
      uint4 const minimum = load_16_bytes(scales + (kHeadDim + (2 * j + chunk) * 32 + 8 * c) * 2);
      // Elements 0 and 4, 1 and 5; 2 and 6, 3 and 7.
      uint32_t const of[4] = {Codes::select(scale.x, scale.z, 0x5410), Codes::select(scale.x, scale.z, 0x7632),
                              Codes::select(scale.y, scale.w, 0x5410), Codes::select(scale.y, scale.w, 0x7632)};
      uint32_t const least_of[4] = {Codes::select(minimum.x, minimum.z, 0x5410), Codes::select(minimum.x, minimum.z, 0x7632),
                                    Codes::select(minimum.y, minimum.w, 0x5410), Codes::select(minimum.y, minimum.w, 0x7632)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const a[4] = {least_of[2 * half], least_of[2 * half], least_of[2 * half + 1], least_of[2 * half + 1]};
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
          auto& of_product = b[2 * chunk + half][i];
          multiply_16x8x16<kMmaType>(least[i], a, of_product[0], of_product[1]);
          of_product[0] = multiply(of_product[0], of[2 * half]);
          of_product[1] = multiply(multiply(of_product[1], of[2 * half + 1]), kUpper);
        }
      }
    }
  }

  /// kPart tokens of a slice, from number `first` of it on, which is token `key`.
  template <bool kMasked, int kCols>
  static CUTLASS_DEVICE void take_part(Params const& params, SliceAddress const& slice, Queries const& queries, State<kCols>& state,
                                       Scores<kCols> const& scores, int first, int key, int lane) {
    constexpr int kPairs = kRowBytes / 32, kPer = Codes::kPerPair;
    if constexpr (!k16Bit || kCols == 2 || kHeadDim > 128 || !kAsyncLoads)
      asm volatile("" : "+r"(lane));  // addresses are made again for each slice: kept, they would be spilled
    uint32_t const own = uint32_t(lane), g = own / 4, c = own % 4;
    uint32_t const keys = address_of(params, slice.keys + first * kSwizzle, own % 16, own / 16);
    uint32_t const values = address_of(params, slice.values + first * kSwizzle, own / 16 * 8 + own % 8, own / 8 % 2);
    uint32_t const scales = slice.scales;
    uint32_t const group_scales = scales + (kInt4 && first >= params.group_tokens ? kGroupBytes : 0);

    // Matrices: tokens 0-7 and 8-15 of one chunk, then of the next.
    constexpr int kGroupTiles = kInt4 && kTokenTiles > 2 ? 2 : kTokenTiles, kGroups = kTokenTiles / kGroupTiles;  // of tiles with one scale
    static_assert(kTokenTiles % kGroupTiles == 0);
    bool const one_group = !kInt4 || kGroups == 1 || params.group_tokens == 64;
    float s[kTokenTiles][kCols][4] = {}, least[kGroups][kCols][4] = {};
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      uint32_t b[kPer][kCols][2];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group == 0 || !one_group) {
#pragma unroll
          for (int product = 0; product < kPer; ++product) {
#pragma unroll
            for (int i = 0; i < kCols; ++i) {
              uint2 const q = queries.of[i][j * kPer + product][lane];
              b[product][i][0] = q.x;
              b[product][i][1] = q.y;
            }
          }
          if constexpr (kInt4) scale_queries(b, least[group], group_scales + group * kGroupBytes, j, c);
        }
#pragma unroll
        for (int t = group * kGroupTiles; t < (group + 1) * kGroupTiles; ++t) {
          uint32_t x[4];
          load_matrices(move_address(params, keys, t, j), x);
          multiply_keys<0>(s[t], x, b);
        }
      }
    }
    if constexpr (kInt4) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            s[t][i][x] = fmaf(s[t][i][x], Codes::kInt4Unit, one_group ? least[0][i][x] : least[t / kGroupTiles][i][x]);
          }
        }
      }
    }

    float key_scale[kTokenTiles][2], value_scale[kTokenTiles][2], largest = 0.0f, inverse_unit;
    if constexpr (kInt8) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int const token = 16 * t + 8 * h + int(g);
          key_scale[t][h] = __uint_as_float(load_4_bytes(scales + (first + token) * 4));
          value_scale[t][h] = __uint_as_float(load_4_bytes(scales + (kSlice + first + token) * 4));
          if (kMasked && (key + token >= scores.last_key || key + token < scores.first_key)) value_scale[t][h] = 0.0f;
          largest = fmaxf(largest, value_scale[t][h]);
        }
      }
    }
    soften<kMasked>(params, s, state, scores, key_scale, key, lane, largest, inverse_unit);
    if constexpr (kInt8) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
#pragma unroll
          for (int x = 0; x < 4; ++x) s[t][i][x] *= value_scale[t][x / 2] * inverse_unit;
        }
      }
    }
    uint32_t p[kTokenTiles][kCols][2];
    transpose(s, p);

    if constexpr (kMasked && (k16Bit || kFormat == WeightFormat::kFp8E4M3)) {  // 0 * NaN is NaN: values of nobody's keys become zeros
      int const begin = scores.first_key - key, end = scores.last_key - key;
      if (begin > 0 || end < kPart) {
#pragma unroll 1
        for (int i = lane; i < kPart * (kRowBytes / 16); i += 32) {
          int const token = i / (kRowBytes / 16);
          if (token >= begin && token < end) continue;
          uint32_t const at = address_of(params, slice.values, first + token, i % (kRowBytes / 16));
          asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
        }
        if constexpr (kAsyncLoads) cutlass::arch::fence_view_async_shared();  // before the stage's next load
        __syncwarp();
      }
    }
    if constexpr (kMasked && kInt4) {  // likewise scales and minima of V before the first key, beside those of others in a tile
      int const unseen = (scores.first_key - key) & 15, tile = scores.first_key - key - unseen;
      if (tile >= 0 && tile < kPart && unseen > 0) {
        uint32_t const at = scales + kMaxGroups * kGroupBytes + (first + tile + lane % 16) * 2;
#pragma unroll 1
        for (int plane = lane / 16; plane < 2 * params.groups_v && lane % 16 < unseen; plane += 2) {
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(at + plane * (kSlice * 2)), "h"(uint16_t(0)) : "memory");
        }
        __syncwarp();
      }
    }
    // Matrices: one chunk of tokens 0-7, the next chunk, then of tokens 8-15.
    if constexpr (!kInt4) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          uint32_t x[4];
          load_matrices_transposed(move_address(params, values, t, j), x);
          multiply_values<0>(state.output, j * kPer, x, p[t]);
        }
      }
    } else {
      // A scale and a minimum of each group and token, f16, [2 * groups][tokens].
      uint32_t const of_values = scales + kMaxGroups * kGroupBytes + (first + 2 * c) * 2;
      auto const seen = [&](int t) {  // whether anyone sees some of its tokens; scales of others may be anything
        return !kMasked || (key + 16 * t < scores.last_key && key + 16 * t + 16 > scores.first_key);
      };
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        uint32_t a[4] = {0, 0, 0, 0};
        if (int(g) < params.groups_v && seen(t)) {  // tokens 2 c and the next, and 8 behind them
          uint32_t const from = of_values + (params.groups_v + g) * (kSlice * 2) + t * 32;
          a[0] = load_4_bytes(from);
          a[2] = load_4_bytes(from + 16);
        }
#pragma unroll
        for (int i = 0; i < kCols; ++i) multiply_16x8x16<kMmaType>(state.least[i], a, p[t][i][0], p[t][i][1]);
      }
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        uint32_t from[2];  // scales of each chunk of 32 of head_dim, which is of one group
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) from[chunk] = of_values + params.group_v_of(2 * j + chunk) * (kSlice * 2);
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          uint32_t x[4];
          load_matrices_transposed(move_address(params, values, t, j), x);
#pragma unroll
          for (int chunk = 0; chunk < 2; ++chunk) {
            uint32_t const low = seen(t) ? load_4_bytes(from[chunk] + t * 32) : 0;
            uint32_t const high = seen(t) ? load_4_bytes(from[chunk] + t * 32 + 16) : 0;
            uint32_t weighted[kCols][2], a[2][4];
#pragma unroll
            for (int i = 0; i < kCols; ++i) {
              weighted[i][0] = multiply(p[t][i][0], low);
              weighted[i][1] = multiply(p[t][i][1], high);
            }
            if (chunk == 0) {
              Codes::template values<0>(x, a[0]);
              Codes::template values<1>(x, a[1]);
            } else {
              Codes::template values<2>(x, a[0]);
              Codes::template values<3>(x, a[1]);
            }
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
              for (int i = 0; i < kCols; ++i) {
                multiply_16x8x16<kMmaType>(state.output[4 * j + 2 * chunk + tile][i], a[tile], weighted[i][0], weighted[i][1]);
              }
            }
          }
        }
      }
    }
  }

  /// int4: 16 tokens of the residual from token `first` of it on, by way of shared memory: 16 rows of kHalf f16, 16-byte aligned.
  template <int kCols>
  static CUTLASS_DEVICE void take_residual(Params const& params, uint32_t room, DecodePiece const& piece, Queries const& queries,
                                           State<kCols>& state, Scores<kCols> const& scores, int first, int in_codes, int lane) {
    constexpr int kVectors = 16 * kHalf / 8 / 32, kAtOnce = kHeadDim <= 128 ? kVectors / 2 : 2;  // of 16 bytes, of a lane
    asm volatile("" : "+r"(lane));                                                               // as in take_part
    auto const room_at = [&](int token, int chunk) {                                             // rows of kHalf f16, chunks of 16 bytes
      return room + token * (kHalf * 2) + (chunk ^ token % 8) * 16;
    };
    int const begin = scores.first_key - in_codes - first, end = piece.seqlen_k - in_codes - first;  // tokens that are seen
    // Elements are laid out in the order of the codes' operands, so that ldmatrix finds them where the queries and outputs have them.
    auto const bring = [&](void const* base, int head_dim, int half) {
      int64_t const row = int64_t(params.heads_kv) * head_dim;
      auto const* const from = static_cast<Element const*>(base) + (int64_t(piece.batch) * params.group_tokens + first) * row +
                               int64_t(piece.kv_head) * head_dim + half * kHalf;
      __syncwarp();
#pragma unroll 1
      for (int done = 0; done < kVectors; done += kAtOnce) {
        uint4 loads[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          int const token = ((done + i) * 32 + lane) / (kHalf / 8), d = ((done + i) * 32 + lane) % (kHalf / 8) * 8;
          loads[i] = make_uint4(0, 0, 0, 0);
          if (token >= begin && token < end && half * kHalf + d < head_dim) {
            loads[i] = __ldcg(reinterpret_cast<uint4 const*>(from + token * row + d));
          }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          int const token = ((done + i) * 32 + lane) / (kHalf / 8), d = ((done + i) * 32 + lane) % (kHalf / 8) * 8;
          auto const* const own = reinterpret_cast<Element const*>(&loads[i]);
#pragma unroll
          for (int e = 0; e < 4; ++e) {  // elements e and e + 4 are neighbours
            int const position = d / 32 * 32 + e / 2 * 16 + e % 2 * 8 + d % 32 / 8 * 2;
            uint32_t const pair = pack(float(own[e]), float(own[e + 4]));
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(room_at(token, position / 8) + position % 8 * 2), "r"(pair) : "memory");
          }
        }
      }
      __syncwarp();
    };
    float s[1][kCols][4] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      bring(params.k_residual, params.head_dim, half);
#pragma unroll
      for (int step = 0; step < kHalf / 16; ++step) {
        uint32_t a[4];
        load_matrices(room_at(lane % 16, 2 * step + lane / 16), a);
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
          uint2 const q = queries.of[i][half * (kHalf / 16) + step][lane];
          multiply_16x8x16<kMmaType>(s[0][i], a, q.x, q.y);
        }
      }
    }
    float const no_scale[1][2] = {};
    float no_unit;
    soften<true>(params, s, state, scores, no_scale, in_codes + first, lane, 0.0f, no_unit);
    uint32_t p[1][kCols][2];
    transpose(s, p);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      bring(params.v_residual, params.head_dim_v, half);
#pragma unroll
      for (int tile = 0; tile < kHalf / 16; ++tile) {
        uint32_t a[4];
        load_matrices_transposed(room_at(lane / 16 * 8 + lane % 8, 2 * tile + lane / 8 % 2), a);
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
          multiply_16x8x16<kMmaType>(state.output[half * (kHalf / 16) + tile][i], a, p[0][i][0], p[0][i][1]);
        }
      }
    }
    __syncwarp();
  }

  static constexpr int kShared = kAsyncLoads ? kParts : 1;  // warps that share a slice, a part each; without TMA, a warp has its own slices
  /// What of a piece is this warp's: of the slices' kShared shares number `warp`, and every kWarps-th from there on. `slice_at(i)` waits for
  /// slice i of the sequence and gives its address, `release(i)` gives the share back. room: take_residual's.
  template <int kCols, class SliceAt, class Release>
  static CUTLASS_DEVICE void take_piece(Params const& params, uint32_t room, DecodePiece const& piece, Queries const& queries,
                                        State<kCols>& state, int warp, int lane, SliceAt const& slice_at, Release const& release) {
    int const c = lane % 4;
    Mask const mask(piece.seqlen_q, piece.seqlen_k, params.window_left, params.window_right);
    Scores<kCols> scores;
    scores.cap = params.softcap * kLog2E;
    scores.first_row = piece.row;
    scores.shift = mask.shift;
    scores.first_key = mask.begin(0);
    float scale = params.softcap > 0.0f ? params.scale / params.softcap : params.scale * kLog2E;
    if constexpr (kFormat == WeightFormat::kFp8E4M3) {
      scale *= load_operand(static_cast<float const*>(params.k_scale) + piece.kv_head * params.scale_stride);
    }
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const row = 8 * i + 2 * c + e;
        scores.factor[i][e] = k16Bit ? scale : scale * queries.scale[row];
      }
    }
    int const in_codes = Pieces::in_codes(params, piece.seqlen_k), codes_end = Pieces::codes_end(params, piece.seqlen_k);
    int const end = piece.slice_end < codes_end ? piece.slice_end : codes_end;
    int const first_query = params.by_group.div(piece.row), last_query = params.by_group.div(piece.row + piece.rows - 1);
    int const full_begin = mask.begin(last_query), full_end = min(mask.end(first_query), in_codes);
    scores.last_key = in_codes;
    state.clear();
    int share = piece.slice_begin * kShared + warp;
    for (; share < end * kShared; share += kWarps) {
      int const slice = share / kShared, begin = share % kShared * (kSlice / kShared);
      SliceAddress const at = slice_at(slice);
#pragma unroll 1
      for (int first = begin; first < begin + kSlice / kShared; first += kPart) {
        int const key = slice * kSlice + first;
        if (key >= full_begin && key + kPart <= full_end) {
          take_part<false>(params, at, queries, state, scores, first, key, lane);
        } else if (key < in_codes && key + kPart > scores.first_key) {  // scales of others may be anything
          take_part<true>(params, at, queries, state, scores, first, key, lane);
        }
      }
      release(slice);
    }
    if constexpr (kInt4) {
      if (share >= piece.slice_end) return;
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
#pragma unroll
          for (int x = 0; x < 4; ++x) state.output[m][i][x] *= x < 2 ? Codes::kInt4Unit : Codes::kInt4UpperUnit;
        }
      }
      state.unit_of_codes[0] = state.unit_of_codes[1] = 1.0f;
      scores.last_key = piece.seqlen_k;
      for (; share < piece.slice_end; share += kWarps) {
        int const first = (share - codes_end) * 16;
        if (first + in_codes < piece.seqlen_k) {
          take_residual(params, room, piece, queries, state, scores, first, in_codes, lane);
        }
      }
    }
  }
};

}  // namespace minfer::attention
