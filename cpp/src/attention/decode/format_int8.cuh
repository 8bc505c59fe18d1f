// int8 in decode's mainloop: every token has a float scale of K and one of V for each head. Scales of K multiply scores. Scales of V
// multiply probabilities, which are then rounded to 16 bits: so that they stay in range, scales of V are divided by a reference scale, a
// power of two that grows with the largest one met so far, and the output is multiplied by it at the end.
#pragma once

#include "attention/decode/format.cuh"
#include "attention/shared/query_factor.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeInt8 : DecodeDirect<Traits> {
  using KeyBlock = DecodeKeyBlock<Traits>;
  using Traits::kTileN, Traits::kTokenTiles;
  using typename KeyBlock::Fragments, typename Traits::KeyBlockAddress, typename Traits::Params, typename Traits::Queries;

  template <int kRowTiles>
  struct State {
    float v_reference_scale;  // 0 before the first key
    CUTLASS_DEVICE void clear() { v_reference_scale = 0.0f; }
  };
  template <int kTiles>
  struct TokenScales {
    float k[kTiles][2], v[kTiles][2];  // of tokens 16 t + lane / 4 and 8 behind
    float v_max;
  };

  template <int kTiles>
  static CUTLASS_DEVICE float scale_score(float score, TokenScales<kTiles> const& scales, int t, int x) {
    return score * scales.k[t][x / 2];
  }
  template <class State, class TokenScales>
  static CUTLASS_DEVICE bool exceeds_reference(State const& state, TokenScales const& scales) {
    return exceeds_reference(scales.v_max, state.format.v_reference_scale);
  }
  static CUTLASS_DEVICE bool exceeds_reference(float v_max, float reference) { return v_max > 16.0f * reference; }
  template <class State, class TokenScales>
  static CUTLASS_DEVICE float raise_reference(State& state, TokenScales const& scales) {
    float max = scales.v_max, output_rescale = 1.0f;
#pragma unroll
    for (int x = 16; x > 0; x /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, x));
    if (max > state.format.v_reference_scale) {
      float const reference = __int_as_float(__float_as_int(max) & 0x7f800000);
      output_rescale = reference > 0.0f ? state.format.v_reference_scale * inverse_of_power(reference) : 1.0f;
      if (reference > 0.0f) state.format.v_reference_scale = reference;
    }
    return output_rescale;
  }
  /// As DecodeDirect's. Values that no query sees need not be cleared: every code is a finite number, and their scales are set to zero
  /// here.
  template <class Softmax, bool kMasked, int kRowTiles, class State, class Scores>
  static CUTLASS_DEVICE void compute_keys(Params const& params, KeyBlockAddress const& block, Queries const& queries, State& state,
                                          Scores const& scores, int first, int key, int lane) {
    make_opaque(lane);  // addresses are computed anew for each block: kept, they would be spilled
    Fragments const at(params, block, first, uint32_t(lane));
    float s[kTokenTiles][kRowTiles][4] = {};
    KeyBlock::multiply_keys(params, at, queries, s, lane);
    TokenScales<kTokenTiles> token_scales;
    token_scales.v_max = 0.0f;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const token = 16 * t + 8 * h + int(uint32_t(lane) / 4);
        token_scales.k[t][h] = __uint_as_float(KeyBlock::load_4_bytes(at.scales + (first + token) * 4));
        token_scales.v[t][h] = __uint_as_float(KeyBlock::load_4_bytes(at.scales + (kTileN + first + token) * 4));
        if (kMasked && (key + token >= scores.last_key || key + token < scores.first_key)) token_scales.v[t][h] = 0.0f;
        token_scales.v_max = fmaxf(token_scales.v_max, token_scales.v[t][h]);
      }
    }
    Softmax::template step<kMasked>(params, s, state, scores, token_scales, key, lane);
    float const reference = state.format.v_reference_scale, inverse_reference = reference > 0.0f ? inverse_of_power(reference) : 0.0f;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) s[t][i][x] *= token_scales.v[t][x / 2] * inverse_reference;
      }
    }
    uint32_t p[kTokenTiles][kRowTiles][2];
    Softmax::transpose(s, p);
    KeyBlock::multiply_values(params, at, p, state.output);
  }

  template <class State>
  static CUTLASS_DEVICE float output_scale(State const& state) {
    return state.format.v_reference_scale;
  }
};

}  // namespace minfer::attention
