// Queries of a piece -> B operands of K.Q^T in shared memory, by a warp or several. Beside codes, bf16 becomes f16: a row is divided by a
// power of two that its largest element is near.
#pragma once

#include "attention/decode/traits.cuh"
#include "common/dependent_launch.cuh"
#include "cutlass/cutlass.h"

namespace minfer::attention {

template <class Traits>
struct DecodeQueries : Traits {
  using Traits::k16Bit, Traits::kHeadDim;
  using typename Traits::Codes, typename Traits::Element, typename Traits::Params, typename Traits::Queries;

  /// `loaded` is called when the first loads are under way. With several warps, this is number `warp` of them.
  template <class Loaded>
  static CUTLASS_DEVICE void bring(Params const& params, DecodePiece const& piece, Queries& queries, int lane, Loaded const& loaded,
                                   int warp = 0, int warps = 1) {
    constexpr int kOwn = kHeadDim / 32, kAtOnce = kHeadDim <= 128 ? 4 : 2;  // elements of a row that a lane has; rows at a time
    using Vector = cute::conditional_t<kOwn == 8, uint4, cute::conditional_t<kOwn == 4, uint2, uint32_t>>;
    static_assert(sizeof(Vector) == kHeadDim / 16, "what the caller aligns queries to");
    int64_t const batch = params.cu_seqlens_q != nullptr ? 0 : piece.batch;
    auto const* const q = static_cast<Element const*>(params.q) + batch * params.q_batch;
    for (int first = kAtOnce * warp; first < 8 * params.columns; first += kAtOnce * warps) {
      Vector loads[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        loads[r] = Vector{};
        if (first + r < piece.rows && lane * kOwn < params.head_dim) {
          int query, head;
          params.by_group(query, head, piece.row + first + r);
          head += piece.kv_head * params.group;
          loads[r] =
              load_operand(reinterpret_cast<Vector const*>(q + (piece.row_q + query) * params.q_row + head * params.q_head + lane * kOwn));
        }
      }
      if (first == 0) loaded();
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        auto const* const own = reinterpret_cast<Element const*>(&loads[r]);
        float factor = 1.0f;
        if constexpr (!k16Bit) {  // f16 holds what bf16 holds, beside its row's largest
          float largest = 0.0f;
#pragma unroll
          for (int i = 0; i < kOwn; ++i) largest = fmaxf(largest, fabsf(float(own[i])));
#pragma unroll
          for (int s = 16; s > 0; s /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, s));
          int const exponent = __float_as_int(largest) >> 23;
          if (exponent > 0 && exponent < 255) factor = __int_as_float((exponent < 253 ? 254 - exponent : 1) << 23);
          if (lane == 0) queries.scale[first + r] = inverse_of(factor);
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          auto const place = Codes::place_of(lane * kOwn + i);
          auto* const to =
              reinterpret_cast<uint16_t*>(&queries.of[first / 8][place.step][4 * (first % 8 + r) + place.c]) + 2 * place.word + place.half;
          if constexpr (k16Bit) {
            *to = reinterpret_cast<uint16_t const&>(own[i]);
          } else {
            *to = __half_as_ushort(__float2half_rn(float(own[i]) * factor));
          }
        }
      }
    }
  }
};

}  // namespace minfer::attention
