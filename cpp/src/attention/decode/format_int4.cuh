// int4 in decode's mainloop: an element is code * scale + minimum. Scales and minima of K belong to channels of a token group; those of V
// to groups of channels of a token. No element is dequantised: codes enter the products as f16's subnormal numbers (kv_dequant.cuh), and
//   scales of K    multiply the queries, anew for each token group
//   minima of K    make a second product with the queries, one number for all tokens of a group, which is added to their scores
//   scales of V    multiply probabilities, anew for each group of channels
//   minima of V    make a second product with the probabilities, one number for each group of channels, which is added to the output at the
//   end
// The newest tokens, of no complete token group, are in the residual: residual.cuh.
#pragma once

#include "attention/decode/format.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeInt4 : DecodeDirect<Traits> {
  using KeyBlock = DecodeKeyBlock<Traits>;
  using Traits::kGroupBytes, Traits::kHeadDim, Traits::kMaxGroups, Traits::kMmaType, Traits::kSteps, Traits::kTileN, Traits::kTokenTiles;
  using Traits::kWarpKeys;
  using typename KeyBlock::Fragments, typename Traits::Codes, typename Traits::KeyBlockAddress, typename Traits::Params;
  using typename Traits::Queries;

  static constexpr float kRescaleThreshold = 3.0f;               // probabilities times scales of V must fit into f16
  static constexpr int kScaleOffset = kMaxGroups * kGroupBytes;  // where V's scales begin: f16 [2 * groups_v][kTileN], scales, then minima
  /// Tiles of 16 tokens that surely share the scales of K, and how many such sets a warp's keys are.
  static constexpr int kGroupTiles = kTokenTiles > 2 ? 2 : kTokenTiles, kGroups = kTokenTiles / kGroupTiles;
  static_assert(kTokenTiles % kGroupTiles == 0);

  template <int kRowTiles>
  struct State {
    float code_scale[2];            // the output is in units of these: rows g, and g + 8
    float v_min_sum[kRowTiles][4];  // sums of probabilities times minima of V: group lane / 4, columns as of the output
    CUTLASS_DEVICE void clear() {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) v_min_sum[i][e] = 0.0f;
      }
      code_scale[0] = Codes::kInt4LowScale;
      code_scale[1] = Codes::kInt4HighScale;
    }
  };

  static CUTLASS_DEVICE uint32_t multiply(uint32_t x, uint32_t y) {
    uint32_t z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
  }

  /// Multiplies the queries of vector pair j by the scales of K's channels there, and adds what the minima contribute to the group's
  /// scores.
  template <int kRowTiles>
  static CUTLASS_DEVICE void scale_queries(uint32_t (&b)[Codes::kPerPair][kRowTiles][2], float (&min_scores)[kRowTiles][4], uint32_t scales,
                                           uint32_t j, uint32_t c) {
    constexpr uint32_t kHighToLow = 0x2c002c00;  // 1 / 16: odd codes stand four bits higher
#pragma unroll
    for (int vector = 0; vector < 2; ++vector) {
      uint4 const scale = KeyBlock::load_16_bytes(scales + ((2 * j + vector) * 32 + 8 * c) * 2);
      uint4 const minimum = KeyBlock::load_16_bytes(scales + (kHeadDim + (2 * j + vector) * 32 + 8 * c) * 2);
      // Elements 0 and 4, 1 and 5; 2 and 6, 3 and 7: the order of the codes' operands.
      uint32_t const scale_pairs[4] = {Codes::select(scale.x, scale.z, 0x5410), Codes::select(scale.x, scale.z, 0x7632),
                                       Codes::select(scale.y, scale.w, 0x5410), Codes::select(scale.y, scale.w, 0x7632)};
      uint32_t const min_pairs[4] = {Codes::select(minimum.x, minimum.z, 0x5410), Codes::select(minimum.x, minimum.z, 0x7632),
                                     Codes::select(minimum.y, minimum.w, 0x5410), Codes::select(minimum.y, minimum.w, 0x7632)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const a[4] = {min_pairs[2 * half], min_pairs[2 * half], min_pairs[2 * half + 1], min_pairs[2 * half + 1]};
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          auto& query = b[2 * vector + half][i];
          multiply_16x8x16<kMmaType>(min_scores[i], a, query[0], query[1]);
          query[0] = multiply(query[0], scale_pairs[2 * half]);
          query[1] = multiply(multiply(query[1], scale_pairs[2 * half + 1]), kHighToLow);
        }
      }
    }
  }

  template <class State>
  static CUTLASS_DEVICE void rescale(State& state, int i, int x, float factor) {
    state.format.v_min_sum[i][x] *= factor;
  }

  /// As DecodeDirect's. It is one function on purpose: with the two products in functions of their own, the compiler forms the addresses of
  /// scales differently and takes up to eight more instructions (sm_90a, head_dim 128).
  template <class Softmax, bool kMasked, int kRowTiles, class State, class Scores>
  static CUTLASS_DEVICE void compute_keys(Params const& params, KeyBlockAddress const& block, Queries const& queries, State& state,
                                          Scores const& scores, int first, int key, int lane) {
    make_opaque(lane);  // addresses are computed anew for each block: kept, they would be spilled
    uint32_t const index = uint32_t(lane), g = index / 4, c = index % 4;
    Fragments const at(params, block, first, index);
    uint32_t const group_scales = at.scales + (first >= params.group_tokens ? kGroupBytes : 0);
    bool const one_group = kGroups == 1 || params.group_tokens == 64;

    // S^T = K.Q^T, with queries that are multiplied by the scales of each token group.
    float s[kTokenTiles][kRowTiles][4] = {}, min_scores[kGroups][kRowTiles][4] = {};
#pragma unroll
    for (int j = 0; j < KeyBlock::kPairs; ++j) {
      uint32_t b[Codes::kPerPair][kRowTiles][2];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group == 0 || !one_group) {
          KeyBlock::load_queries(queries, j, lane, b);
          scale_queries(b, min_scores[group], group_scales + group * kGroupBytes, j, c);
        }
#pragma unroll
        for (int t = group * kGroupTiles; t < (group + 1) * kGroupTiles; ++t) {
          uint32_t x[4];
          load_matrices(KeyBlock::move_address(params, at.keys, t, j), x);
          KeyBlock::template multiply_pair_of_keys<0>(s[t], x, b);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          s[t][i][x] = fmaf(s[t][i][x], Codes::kInt4LowScale, one_group ? min_scores[0][i][x] : min_scores[t / kGroupTiles][i][x]);
        }
      }
    }

    typename DecodeDirect<Traits>::template TokenScales<kTokenTiles> no_scales;
    Softmax::template step<kMasked>(params, s, state, scores, no_scales, key, lane);
    uint32_t p[kTokenTiles][kRowTiles][2];
    Softmax::transpose(s, p);

    if constexpr (kMasked) {
      // Scales and minima of V of tokens before the first key that is seen become zero, in the tile of 16 that also has tokens that are
      // seen. Those of other tiles are not read.
      int const unseen = (scores.first_key - key) & 15, tile = scores.first_key - key - unseen;
      if (tile >= 0 && tile < kWarpKeys && unseen > 0) {
        uint32_t const to = at.scales + kScaleOffset + (first + tile + lane % 16) * 2;
#pragma unroll 1
        for (int plane = lane / 16; plane < 2 * params.groups_v && lane % 16 < unseen; plane += 2) {
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + plane * (kTileN * 2)), "h"(uint16_t(0)) : "memory");
        }
        __syncwarp();
      }
    }

    // Minima of V: a product with the probabilities for each group of channels.
    uint32_t const token_scales = at.scales + kScaleOffset + (first + 2 * c) * 2;
    auto const seen = [&](int t) {  // whether some of the tile's tokens are seen; scales of other tiles may hold anything
      return !kMasked || (key + 16 * t < scores.last_key && key + 16 * t + 16 > scores.first_key);
    };
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      uint32_t a[4] = {0, 0, 0, 0};
      if (int(g) < params.groups_v && seen(t)) {  // tokens 2 c and the next, and those 8 behind
        uint32_t const from = token_scales + (params.groups_v + g) * (kTileN * 2) + t * 32;
        a[0] = KeyBlock::load_4_bytes(from);
        a[2] = KeyBlock::load_4_bytes(from + 16);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) multiply_16x8x16<kMmaType>(state.format.v_min_sum[i], a, p[t][i][0], p[t][i][1]);
    }

    // O^T += V^T.P^T, with probabilities that are multiplied by the scales of each group of channels.
#pragma unroll
    for (int j = 0; j < KeyBlock::kPairs; ++j) {
      uint32_t from[2];  // scales of each vector, 32 elements of head_dim that are in one group
#pragma unroll
      for (int vector = 0; vector < 2; ++vector) from[vector] = token_scales + params.group_v_of(2 * j + vector) * (kTileN * 2);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        uint32_t x[4];
        load_matrices_transposed(KeyBlock::move_address(params, at.values, t, j), x);
#pragma unroll
        for (int vector = 0; vector < 2; ++vector) {
          uint32_t const low = seen(t) ? KeyBlock::load_4_bytes(from[vector] + t * 32) : 0;
          uint32_t const high = seen(t) ? KeyBlock::load_4_bytes(from[vector] + t * 32 + 16) : 0;
          uint32_t weighted[kRowTiles][2], a[2][4];
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            weighted[i][0] = multiply(p[t][i][0], low);
            weighted[i][1] = multiply(p[t][i][1], high);
          }
          if (vector == 0) {
            Codes::template values<0>(x, a[0]);
            Codes::template values<1>(x, a[1]);
          } else {
            Codes::template values<2>(x, a[0]);
            Codes::template values<3>(x, a[1]);
          }
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
              multiply_16x8x16<kMmaType>(state.output[4 * j + 2 * vector + tile][i], a[tile], weighted[i][0], weighted[i][1]);
            }
          }
        }
      }
    }
  }

  /// Applies the codes' scale and adds the minima of V; the sums of group g are in lanes 4 g + c.
  template <int kRowTiles, class State>
  static CUTLASS_DEVICE void finish(Params const& params, State& state, int lane) {
    int const c = lane % 4;
#pragma unroll
    for (int vector = 0; vector < kHeadDim / 32; ++vector) {
      int const group = int(params.group_v_of(vector));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float const minimum = __shfl_sync(0xffffffffu, state.format.v_min_sum[i][e], 4 * group + c);
#pragma unroll
          for (int x = e; x < 4; x += 2) {
            state.output[2 * vector][i][x] = fmaf(state.output[2 * vector][i][x], state.format.code_scale[x / 2], minimum);
            state.output[2 * vector + 1][i][x] = fmaf(state.output[2 * vector + 1][i][x], state.format.code_scale[x / 2], minimum);
          }
        }
      }
    }
  }
  /// Applies the codes' scale to the output before tokens of the residual, which are no codes, are added to it.
  template <int kRowTiles, class State>
  static CUTLASS_DEVICE void apply_code_scale(State& state) {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) state.output[m][i][x] *= x < 2 ? Codes::kInt4LowScale : Codes::kInt4HighScale;
      }
    }
    state.format.code_scale[0] = state.format.code_scale[1] = 1.0f;
  }
};

}  // namespace minfer::attention
