// Normalisation and rotary embedding of a head of queries or keys, by a warp, as it is appended (minfer/kv_cache.h, NormRope).
//
// A lane has one vector of 8 elements. The other elements of its pairs are in the vector itself (interleaved), in the vector of the lane
// rotary_dim / 16 away, or, where rotary_dim / 2 is no multiple of 8, in two vectors. All of it is float32 and rounded once.
#pragma once

#include "attention/cache/append_params.cuh"
#include "attention/cache/vector.cuh"
#include "common/dependent_launch.cuh"

namespace minfer::attention {

constexpr int kQueriesTogether = 4;  // heads of queries that a warp has where there are many

struct NormRopeParams {
  uint16_t const* q;        // [tokens, heads_q, head_dim]
  int64_t q_token, q_head;  // strides
  uint16_t* q_out;          // [tokens, heads_q, head_dim], contiguous
  uint32_t heads_q;
  uint32_t q_items, q_together;         // warps that a token's heads of queries take, and heads of each: 1 or kQueriesTogether
  uint16_t const *q_weight, *k_weight;  // [head_dim], or null: no normalisation
  float eps, weight_offset;
  float const* cos_sin;  // [length, rotary_dim]
  int64_t length;
  void const* positions;  // [tokens]
  int32_t vectors;        // head_dim / 8
  int32_t rotary_dim;
  bool positions_64bit, interleaved;
  bool table_wide;  // four cosines are one access

  /// The token's row of the table; -1: it has none.
  __device__ __forceinline__ int32_t table_row(int64_t token) const {
    int64_t const position = positions_64bit ? load_operand(static_cast<int64_t const*>(positions) + token)
                                             : load_operand(static_cast<int32_t const*>(positions) + token);
    return uint64_t(position) < uint64_t(length) ? int32_t(position) : -1;
  }
};

/// Where keys are stored as they come.
struct PlainAppendParams : AppendParams {
  static constexpr bool kPrepares = false;
};
/// Where they are normalised and rotated first, and queries are, too.
struct PreparedAppendParams : AppendParams {
  static constexpr bool kPrepares = true;
  NormRopeParams heads_of;
  uint32_t group_ctas;  // int4: CTAs that have tokens of keys and values
};

/// The thread's warp. kUniform: so that the compiler sees that its lanes have the same, and exchanges among them need no code for those
/// that have gone another way.
template <bool kUniform>
__device__ __forceinline__ uint32_t warp_of() {
  uint32_t const warp = threadIdx.x / kWarp;
  return kUniform ? __shfl_sync(kAllLanes, warp, 0) : warp;
}

/// A condition that all lanes of the warp agree on, likewise.
template <bool kUniform>
__device__ __forceinline__ bool agreed(bool condition) {
  return kUniform ? __any_sync(kAllLanes, condition) : condition;
}

/// kCount numbers of the table; zeros where the position is none of it.
template <int kCount>
__device__ __forceinline__ void load_table(float const* from, bool known, bool wide, float (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float4 four = {};
    if (known && wide) four = load_operand(reinterpret_cast<float4 const*>(from + i));
    if (known && !wide) four = {from[i], from[i + 1], from[i + 2], from[i + 3]};
    to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
  }
}

/// Heads of one token: x becomes what is stored of them. Called by a warp; lanes from `vectors` on have zeros.
template <class T, int kHeads>
__device__ __forceinline__ void prepare_heads(NormRopeParams const& p, uint16_t const* weight, Vector (&x)[kHeads], int32_t table_row,
                                              int lane) {
  float v[kHeads][kPerVector];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) unpack<T>(x[h], v[h]);
  if (weight != nullptr) {
    Vector factors = {};
    if (lane < p.vectors) factors = load_vector<kPerVector>(weight, 1, lane);
    float sum[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      sum[h] = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) sum[h] = fmaf(v[h][i], v[h][i], sum[h]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) sum[h] += __shfl_xor_sync(kAllLanes, sum[h], offset);
    }
    float w[kPerVector];
    unpack<T>(factors, w);
#pragma unroll
    for (int i = 0; i < kPerVector; ++i) w[i] += p.weight_offset;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float const scale = rsqrtf(__fdividef(sum[h], float(p.vectors * kPerVector)) + p.eps);
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) v[h][i] = v[h][i] * w[i] * scale;
    }
  }
  bool const known = table_row >= 0;
  int const half = p.rotary_dim / 2, first = lane * kPerVector;
  float const* const row = p.cos_sin + int64_t(known ? table_row : 0) * p.rotary_dim;
  if (p.interleaved) {
    int const pair = first / 2;
    if (pair < half) {
      float c[kPerVector / 2] = {}, s[kPerVector / 2] = {};
      if (pair + kPerVector / 2 <= half) {
        load_table(row + pair, known, p.table_wide, c);
        load_table(row + half + pair, known, p.table_wide, s);
      } else if (known) {
#pragma unroll
        for (int i = 0; i < kPerVector / 2; ++i) {
          if (pair + i < half) c[i] = row[pair + i], s[i] = row[half + pair + i];
        }
      }
#pragma unroll
      for (int i = 0; i < kPerVector / 2; ++i) {
        if (pair + i >= half) continue;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          float const a = v[h][2 * i], b = v[h][2 * i + 1];
          v[h][2 * i] = fmaf(a, c[i], -(b * s[i]));
          v[h][2 * i + 1] = fmaf(b, c[i], a * s[i]);
        }
      }
    }
  } else if (half % kPerVector == 0) {
    bool const rotated = first < p.rotary_dim, is_first = first < half;
    int const step = half / kPerVector, partner = !rotated ? lane : is_first ? lane + step : lane - step;
    float const* const cosines = row + (is_first ? first : first - half);
    constexpr int kAtOnce = kPerVector / 2;
#pragma unroll
    for (int at = 0; at < kPerVector; at += kAtOnce) {
      float c[kAtOnce], s[kAtOnce];
      load_table(cosines + at, known && rotated, p.table_wide, c);
      load_table(cosines + half + at, known && rotated, p.table_wide, s);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float other[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) other[i] = __shfl_sync(kAllLanes, v[h][at + i], partner);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float const product = other[i] * s[i];
          if (rotated) v[h][at + i] = fmaf(v[h][at + i], c[i], is_first ? -product : product);
        }
      }
    }
  } else {
    // One element after the other, so that few registers are taken: v turns round, its first element is the next, and the results move up.
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float turned[kPerVector];
#pragma unroll 1
      for (int i = 0; i < kPerVector; ++i) {
        int const own = first + i, at = own < half ? own : own - half;
        bool const rotated = own < p.rotary_dim;
        int const partner = !rotated ? own : own < half ? own + half : at;
        float other = 0.0f;
#pragma unroll
        for (int k = 0; k < kPerVector; ++k) {
          float const candidate = __shfl_sync(kAllLanes, v[h][k], partner / kPerVector);
          if (partner % kPerVector == (k + i) % kPerVector) other = candidate;
        }
        float const c = known && rotated ? row[at] : 0.0f, s = known && rotated ? row[half + at] : 0.0f, product = other * s;
        float const current = v[h][0], result = rotated ? fmaf(current, c, own < half ? -product : product) : current;
#pragma unroll
        for (int k = 0; k + 1 < kPerVector; ++k) v[h][k] = v[h][k + 1], turned[k] = turned[k + 1];
        v[h][kPerVector - 1] = current;
        turned[kPerVector - 1] = result;
      }
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) v[h][i] = turned[i];
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[h].pair[i] = Float16<kDataTypeOf<T>>::pack(v[h][2 * i], v[h][2 * i + 1]);
  }
}

template <class T>
__device__ __forceinline__ Vector prepare_head(NormRopeParams const& p, uint16_t const* weight, Vector const& x, int32_t table_row,
                                               int lane) {
  Vector one[1] = {x};
  prepare_heads<T>(p, weight, one, table_row, lane);
  return one[0];
}

/// Queries of a token from head `first` on, kHeads of them or as many as there are; called by a warp.
template <class T, int kHeads>
__device__ __forceinline__ void store_queries(NormRopeParams const& p, uint32_t token, uint32_t first, int lane) {
  int32_t const table_row = p.table_row(token);
  uint16_t const* const from = p.q + token * p.q_token + first * p.q_head;
  uint16_t* const to = p.q_out + (int64_t(token) * p.heads_q + first) * p.vectors * kPerVector;
  auto const exists = [&](int h) { return lane < p.vectors && (h == 0 || first + h < p.heads_q); };
  Vector x[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    x[h] = {};
    if (exists(h)) x[h] = load_vector<kPerVector>(from + h * p.q_head, 1, lane);
  }
  prepare_heads<T>(p, p.q_weight, x, table_row, lane);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (exists(h)) store_vector<kPerVector>(x[h], to + h * p.vectors * kPerVector, lane);
  }
}

/// Item number `item` of all tokens' queries; an item is q_together heads of one token. Called by a warp.
template <class T>
__device__ __forceinline__ void store_query_item(NormRopeParams const& p, uint32_t token, uint32_t item, int lane) {
  if (p.q_together == 1) {
    store_queries<T, 1>(p, token, item, lane);
  } else {
    store_queries<T, kQueriesTogether>(p, token, item * kQueriesTogether, lane);
  }
}

/// A vector of a row of keys (side 0) or values of the call; called by a warp, lane for lane.
template <class T, int kWidth, class Params>
__device__ __forceinline__ Vector load_side(Params const& params, int side_index, int64_t token, uint32_t head, int lane) {
  RowsParams const& side = params.side[side_index];
  Vector x = {};
  if (lane < side.vectors) x = load_vector<kWidth>(side.row(token, head), side.x_element, lane);
  if constexpr (Params::kPrepares) {
    if (side_index == 0) x = prepare_head<T>(params.heads_of, params.heads_of.k_weight, x, params.heads_of.table_row(token), lane);
  }
  return x;
}

}  // namespace minfer::attention
