// int8 in decode's mainloop: every token has a float scale of K and one of V for each head. Scales of K multiply scores. Scales of V multiply
// probabilities, which are then rounded to 16 bits: so that they stay in range, scales of V are divided by a reference scale, a power of two that
// grows with the largest one met so far, and the output is multiplied by it at the end.
#pragma once

#include "attention/decode/format.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeInt8 : DecodeDirect<Traits> {
  using KeyBlock = DecodeKeyBlock<Traits>;
  using Traits::kTileN, Traits::kTokenTiles;
  using typename KeyBlock::Fragments, typename Traits::KeyBlockAddress, typename Traits::Params;

  template <int kRowTiles>
  struct State {
    float v_reference_scale;  // 0 before the first key
    CUTLASS_DEVICE void clear() { v_reference_scale = 0.0f; }
  };
  template <int kTiles>
  struct TokenScales {
    float k[kTiles][2], v[kTiles][2];  // of tokens 16 t + lane / 4 and 8 behind
    float v_max = 0.0f;
    float inverse_reference;
  };

  template <bool kMasked, class Scores>
  static CUTLASS_DEVICE void load_token_scales(TokenScales<kTokenTiles>& scales, Fragments const& at, Scores const& scores, int first,
                                               int key, uint32_t lane) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const token = 16 * t + 8 * h + int(lane / 4);
        scales.k[t][h] = __uint_as_float(KeyBlock::load_4_bytes(at.scales + (first + token) * 4));
        scales.v[t][h] = __uint_as_float(KeyBlock::load_4_bytes(at.scales + (kTileN + first + token) * 4));
        if (kMasked && (key + token >= scores.last_key || key + token < scores.first_key)) scales.v[t][h] = 0.0f;
        scales.v_max = fmaxf(scales.v_max, scales.v[t][h]);
      }
    }
  }
  template <int kTiles>
  static CUTLASS_DEVICE float scale_score(float score, TokenScales<kTiles> const& scales, int t, int x) {
    return score * scales.k[t][x / 2];
  }
  template <class State, class TokenScales>
  static CUTLASS_DEVICE bool exceeds_reference(State const& state, TokenScales const& scales) {
    return scales.v_max > 16.0f * state.format.v_reference_scale;
  }
  template <class State, class TokenScales>
  static CUTLASS_DEVICE float raise_reference(State& state, TokenScales const& scales) {
    float max = scales.v_max, output_rescale = 1.0f;
#pragma unroll
    for (int x = 16; x > 0; x /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, x));
    if (max > state.format.v_reference_scale) {
      float const reference = __int_as_float(__float_as_int(max) & 0x7f800000);
      output_rescale = reference > 0.0f ? state.format.v_reference_scale * inverse_of(reference) : 1.0f;
      if (reference > 0.0f) state.format.v_reference_scale = reference;
    }
    return output_rescale;
  }
  template <class State, class TokenScales>
  static CUTLASS_DEVICE void after_rescale(State const& state, TokenScales& scales) {
    scales.inverse_reference = state.format.v_reference_scale > 0.0f ? inverse_of(state.format.v_reference_scale) : 0.0f;
  }
  template <int kRowTiles>
  static CUTLASS_DEVICE void scale_probabilities(float (&s)[kTokenTiles][kRowTiles][4], TokenScales<kTokenTiles> const& scales) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) s[t][i][x] *= scales.v[t][x / 2] * scales.inverse_reference;
      }
    }
  }

  /// Nothing is left to do: load_token_scales() has set the scales of V of these keys to zero, and every code is a finite number.
  template <class Scores>
  static CUTLASS_DEVICE void clear_unseen(Params const&, KeyBlockAddress const&, Scores const&, int, int, int) {}

  template <class State>
  static CUTLASS_DEVICE float output_scale(State const& state) {
    return state.format.v_reference_scale;
  }
};

}  // namespace minfer::attention
