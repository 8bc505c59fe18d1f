// What the cache format changes in decode's mainloop, as a policy with one interface for all formats:
//
//   compute_keys()             adds a warp's keys of a block to its partial: S^T = K.Q^T, Softmax::step(), O^T += V^T.P^T
//   State                      what a warp accumulates for the format, next to output, maximum and sum
//   TokenScales                scales of a warp's tokens in registers, for Softmax::step(), which calls the next four:
//   kRescaleThreshold          a row's maximum is raised when it grows by more than 2^kRescaleThreshold of the exponentials
//   scale_score()              multiplies a score by its token's scale
//   exceeds_reference(), raise_reference(), rescale()   whether State asks for rescaling, and what it needs then
//   finish(), output_scale()   what is left to apply to the output when the work item is done
//
// DecodeDirect applies no scales in the mainloop: 16-bit keys and values, and fp8, whose scales of a head multiply scores and output as a
// whole. format_int8.cuh and format_int4.cuh hold the others.
#pragma once

#include "attention/decode/key_block.cuh"
#include "common/opaque.cuh"

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

  /// Computes kWarpKeys keys of a block, from number `first` of it on, which is key `key` of the sequence.
  template <class Softmax, bool kMasked, int kRowTiles, class State, class Scores>
  static CUTLASS_DEVICE void compute_keys(Params const& params, KeyBlockAddress const& block, Queries const& queries, State& state,
                                          Scores const& scores, int first, int key, int lane) {
    if constexpr (!Traits::k16Bit || kRowTiles == 2 || kHeadDim > 128 || !Traits::kAsyncLoads)
      make_opaque(lane);  // addresses are computed anew for each block: kept, they would be spilled
    Fragments const at(params, block, first, uint32_t(lane));
    float s[kTokenTiles][kRowTiles][4] = {};
    KeyBlock::multiply_keys(params, at, queries, s, lane);
    TokenScales<kTokenTiles> no_scales;
    Softmax::template step<kMasked>(params, s, state, scores, no_scales, key, lane);
    uint32_t p[kTokenTiles][kRowTiles][2];
    Softmax::transpose(s, p);
    if constexpr (kMasked) KeyBlock::clear_values(params, block, first, scores.first_key - key, scores.last_key - key, lane);
    KeyBlock::multiply_values(params, at, p, state.output);
  }

  template <int kRowTiles, class State>
  static CUTLASS_DEVICE void finish(Params const&, State&, int) {}
  template <class State>
  static CUTLASS_DEVICE float output_scale(State const&) {
    return 1.0f;
  }
};

}  // namespace minfer::attention
