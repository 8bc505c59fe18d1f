// What the cache format changes in decode's mainloop, as a policy with one interface for all formats:
//
//   kRescaleThreshold          a row's maximum is raised when it grows by more than 2^kRescaleThreshold of the exponentials
//   State                      what a warp accumulates for the format, next to output, maximum and sum
//   TokenScales                scales of a warp's tokens, in registers; load_token_scales() fills them in
//   multiply_keys()            S^T = K.Q^T of a warp's keys
//   scale_score()              one score by its token's scale
//   exceeds_reference(), raise_reference(), rescale(), after_rescale()   what the online softmax step does for the format
//   scale_probabilities()      probabilities by their tokens' scales of V
//   clear_unseen()             removes what could reach the output from keys that no query sees
//   multiply_values()          O^T += V^T.P^T of a warp's keys
//   finish(), output_scale()   what is left to apply to the output when the work item is done
//
// DecodeDirect below applies no scales in the mainloop: 16-bit keys and values, and fp8, whose scales of a head multiply scores and output as a
// whole. format_int8.cuh and format_int4.cuh hold the others; DecodeFormat chooses.
#pragma once

#include "attention/decode/key_block.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeDirect : DecodeKeyBlock<Traits> {
  using KeyBlock = DecodeKeyBlock<Traits>;
  using Traits::kHeadDim, Traits::kTokenTiles, Traits::kSteps;
  using typename KeyBlock::Fragments, typename Traits::Codes, typename Traits::KeyBlockAddress, typename Traits::Params;
  using typename Traits::Queries;

  static constexpr float kRescaleThreshold = 8.0f;

  template <int kRowTiles>
  struct State {
    CUTLASS_DEVICE void clear() {}
  };
  template <int kTiles>
  struct TokenScales {};

  template <int kRowTiles>
  static CUTLASS_DEVICE void multiply_keys(Params const& params, Fragments const& at, Queries const& queries,
                                           float (&s)[kTokenTiles][kRowTiles][4], int, int lane) {
#pragma unroll
    for (int j = 0; j < KeyBlock::kPairs; ++j) {
      uint32_t b[Codes::kPerPair][kRowTiles][2];
      KeyBlock::load_queries(queries, j, lane, b);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        uint32_t x[4];
        load_matrices(KeyBlock::move_address(params, at.keys, t, j), x);
        KeyBlock::template multiply_keys<0>(s[t], x, b);
      }
    }
  }

  template <bool kMasked, class Scores>
  static CUTLASS_DEVICE void load_token_scales(TokenScales<kTokenTiles>&, Fragments const&, Scores const&, int, int, uint32_t) {}
  template <int kTiles>
  static CUTLASS_DEVICE float scale_score(float score, TokenScales<kTiles> const&, int, int) {
    return score;
  }
  template <class State, class TokenScales>
  static CUTLASS_DEVICE bool exceeds_reference(State const&, TokenScales const&) {
    return false;
  }
  /// Returns what the output is to be multiplied by.
  template <class State, class TokenScales>
  static CUTLASS_DEVICE float raise_reference(State&, TokenScales const&) {
    return 1.0f;
  }
  template <class State>
  static CUTLASS_DEVICE void rescale(State&, int, int, float) {}
  template <class State, class TokenScales>
  static CUTLASS_DEVICE void after_rescale(State const&, TokenScales&) {}
  template <int kRowTiles>
  static CUTLASS_DEVICE void scale_probabilities(float (&)[kTokenTiles][kRowTiles][4], TokenScales<kTokenTiles> const&) {}

  template <class Scores>
  static CUTLASS_DEVICE void clear_unseen(Params const& params, KeyBlockAddress const& block, Scores const& scores, int first, int key,
                                          int lane) {
    KeyBlock::clear_values(params, block, first, scores.first_key - key, scores.last_key - key, lane);
  }

  template <bool kMasked, int kRowTiles, class State, class Scores>
  static CUTLASS_DEVICE void multiply_values(Params const& params, Fragments const& at, State& state,
                                             uint32_t const (&p)[kTokenTiles][kRowTiles][2], Scores const&, int, int, uint32_t) {
#pragma unroll
    for (int j = 0; j < KeyBlock::kPairs; ++j) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        uint32_t x[4];
        load_matrices_transposed(KeyBlock::move_address(params, at.values, t, j), x);
        KeyBlock::template multiply_values<0>(state.output, j * Codes::kPerPair, x, p[t]);
      }
    }
  }

  template <int kRowTiles, class State>
  static CUTLASS_DEVICE void finish(Params const&, State&, int) {}
  template <class State>
  static CUTLASS_DEVICE float output_scale(State const&) {
    return 1.0f;
  }
};

}  // namespace minfer::attention
