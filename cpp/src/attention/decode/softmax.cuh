// Decode's online softmax over the transposed scores of a warp, S^T: 16 keys to a tile of rows, output rows in columns. Lane 4 g + c holds
// of tile t keys 16 t + g and 8 behind, and of row tile i the output rows 8 i + 2 c and the next.
#pragma once

#include <cmath>

#include "attention/decode/format_int4.cuh"
#include "attention/decode/format_int8.cuh"
#include "attention/shared/mask.h"
#include "attention/shared/softmax.cuh"
#include "common/opaque.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeSoftmax : Traits {
  using Format =
      cute::conditional_t<Traits::kInt4, DecodeInt4<Traits>, cute::conditional_t<Traits::kInt8, DecodeInt8<Traits>, DecodeDirect<Traits>>>;
  using Traits::kSteps;
  using typename Traits::Codes, typename Traits::Params;

  template <int kTiles>
  using TokenScales = typename Format::template TokenScales<kTiles>;

  /// A warp's partial of a work item.
  template <int kRowTiles>
  struct State {
    float output[kSteps][kRowTiles][4];  // O^T: elements of head_dim (KvCodes::row_of) by output rows, not normalised
    float row_max[kRowTiles][2];         // the maximum that exponentials are relative to, in units of log2; -inf before the first key
    float row_sum[kRowTiles][2];         // over this lane's keys
    typename Format::template State<kRowTiles> format;

    CUTLASS_DEVICE void clear() {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int m = 0; m < kSteps; ++m) output[m][i][e] = 0.0f;
        }
        row_max[i][0] = row_max[i][1] = -INFINITY;
        row_sum[i][0] = row_sum[i][1] = 0.0f;
      }
      format.clear();
    }
  };

  /// What turns products of a work item into scores in units of log2.
  template <int kRowTiles>
  struct Scores {
    float factor[kRowTiles][2], cap;  // cap > 0: a score is cap * tanh(product * factor)
    int32_t first_row, shift;         // the output tile's first row; query i is aligned to key i + shift
    int32_t first_key, last_key;      // keys outside of [first_key, last_key) are masked for all rows; their scales may hold anything
  };

  /// Turns the products of kTiles x 16 keys from `key` on into exponentials relative to the rows' maxima, adds them to the sums, and raises
  /// the maxima that grew past the format's threshold, rescaling what was accumulated.
  template <bool kMasked, int kTiles, int kRowTiles>
  static CUTLASS_DEVICE void step(Params const& params, float (&s)[kTiles][kRowTiles][4], State<kRowTiles>& state,
                                  Scores<kRowTiles> const& scores, TokenScales<kTiles> const& token_scales, int key, int lane) {
    bool grown = Format::exceeds_reference(state, token_scales);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      scale_and_cap(s, scores, token_scales, i);
      if constexpr (kMasked) mask(params, s, scores, key, lane, i);
      float max[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) max[x % 2] = fmaxf(max[x % 2], s[t][i][x]);
      }
      grown = grown || max[0] > state.row_max[i][0] + Format::kRescaleThreshold || max[1] > state.row_max[i][1] + Format::kRescaleThreshold;
    }
    if (__any_sync(0xffffffffu, grown)) rescale(s, state, token_scales);  // seldom after the first blocks
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        float const offset = state.row_max[i][x % 2] == -INFINITY ? 0.0f : state.row_max[i][x % 2];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          s[t][i][x] = exp2_fast(s[t][i][x] - offset);
          state.row_sum[i][x % 2] += s[t][i][x];
        }
      }
    }
  }

  /// Rounds exponentials to 16 bits and transposes them to the B operands of O^T += V^T.P^T.
  template <int kTiles, int kRowTiles>
  static CUTLASS_DEVICE void transpose(float const (&s)[kTiles][kRowTiles][4], uint32_t (&p)[kTiles][kRowTiles][2]) {
    using KeyBlock = DecodeKeyBlock<Traits>;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        p[t][i][0] = transpose_matrix(KeyBlock::pack(s[t][i][0], s[t][i][1]));
        p[t][i][1] = transpose_matrix(KeyBlock::pack(s[t][i][2], s[t][i][3]));
      }
    }
  }

 private:
  template <int kTiles, int kRowTiles>
  static CUTLASS_DEVICE void scale_and_cap(float (&s)[kTiles][kRowTiles][4], Scores<kRowTiles> const& scores,
                                           TokenScales<kTiles> const& token_scales, int i) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int x = 0; x < 4; ++x) s[t][i][x] = Format::scale_score(s[t][i][x] * scores.factor[i][x % 2], token_scales, t, x);
    }
    if (scores.cap > 0.0f) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) s[t][i][x] = scores.cap * tanh_fast(s[t][i][x]);
      }
    }
  }

  template <int kTiles, int kRowTiles>
  static CUTLASS_DEVICE void mask(Params const& params, float (&s)[kTiles][kRowTiles][4], Scores<kRowTiles> const& scores, int key,
                                  int lane, int i) {
    int column = 8 * i + 2 * (lane % 4);
    make_opaque(column);  // bounds of the columns, kept for all key blocks, would be spilled
    int const left = params.window_left, right = params.window_right;
    int const aligned[2] = {params.by_heads_per_kv.div(scores.first_row + column) + scores.shift,
                            params.by_heads_per_kv.div(scores.first_row + column + 1) + scores.shift};
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

  /// Raises the maxima of all rows to those of this block and rescales sums and output.
  template <int kTiles, int kRowTiles>
  static CUTLASS_DEVICE void rescale(float const (&s)[kTiles][kRowTiles][4], State<kRowTiles>& state,
                                     TokenScales<kTiles> const& token_scales) {
    float const output_rescale = Format::raise_reference(state, token_scales);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float block_max = -INFINITY;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) block_max = fmaxf(block_max, fmaxf(s[t][i][e], s[t][i][2 + e]));
#pragma unroll
        for (int x = 4; x < 32; x *= 2) block_max = fmaxf(block_max, __shfl_xor_sync(0xffffffffu, block_max, x));
        float const raised = fmaxf(state.row_max[i][e], block_max);
        factor[e] = raised == -INFINITY ? 1.0f : exp2_fast(state.row_max[i][e] - raised);
        state.row_max[i][e] = raised;
        state.row_sum[i][e] *= factor[e];
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
#pragma unroll
        for (int m = 0; m < kSteps; ++m) state.output[m][i][x] *= factor[x % 2] * output_rescale;
        Format::rescale(state, i, x, factor[x % 2]);
      }
    }
  }
};

}  // namespace minfer::attention
