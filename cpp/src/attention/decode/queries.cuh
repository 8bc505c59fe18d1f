// Loads the queries of a work item and stores them to shared memory as B operands of S^T = K.Q^T; by a warp or several. Where keys are
// codes, which become f16, bf16 queries become f16, too: each row is divided by a power of two close to its largest element.
#pragma once

#include "attention/decode/traits.cuh"
#include "attention/shared/query_factor.cuh"
#include "common/dependent_launch.cuh"
#include "cutlass/cutlass.h"

namespace minfer::attention {

template <class Traits>
struct DecodeQueries : Traits {
  using Traits::k16Bit, Traits::kHeadDim;
  using typename Traits::Codes, typename Traits::Element, typename Traits::Params, typename Traits::Queries;

  /// `issued` is called once the first loads are issued. warp: the number of this warp among the `warps` that call.
  template <class Issued>
  static CUTLASS_DEVICE void load(Params const& params, DecodeWorkItem const& work, Queries& queries, int lane, Issued const& issued,
                                  int warp = 0, int warps = 1) {
    constexpr int kPerLane = kHeadDim / 32, kAtOnce = kHeadDim <= 128 ? 4 : 2;  // elements of a row in a lane; rows at a time
    using Vector = cute::conditional_t<kPerLane == 8, uint4, cute::conditional_t<kPerLane == 4, uint2, uint32_t>>;
    static_assert(sizeof(Vector) == kHeadDim / 16, "the alignment that callers guarantee");
    int64_t const batch = params.cu_seqlens_q != nullptr ? 0 : work.batch;
    auto const* const q = static_cast<Element const*>(params.q) + batch * params.q_batch;
    for (int first = kAtOnce * warp; first < 8 * params.row_tiles; first += kAtOnce * warps) {
      Vector loads[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        loads[r] = Vector{};
        if (first + r < work.rows && lane * kPerLane < params.head_dim) {
          int query, head;
          params.by_heads_per_kv(query, head, work.row + first + r);
          head += work.kv_head * params.heads_per_kv;
          loads[r] = load_operand(
              reinterpret_cast<Vector const*>(q + (work.row_q + query) * params.q_row + head * params.q_head + lane * kPerLane));
        }
      }
      if (first == 0) issued();
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        auto const* const elements = reinterpret_cast<Element const*>(&loads[r]);
        float factor = 1.0f;
        if constexpr (!k16Bit) {  // relative to its largest element, a row of bf16 fits into f16
          float max = 0.0f;
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) max = fmaxf(max, fabsf(float(elements[i])));
#pragma unroll
          for (int s = 16; s > 0; s /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, s));
          factor = query_factor(max);
          if (lane == 0) queries.scale[first + r] = inverse_of_power(factor);
        }
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          auto const operand = Codes::operand_of(lane * kPerLane + i);
          auto* const to = reinterpret_cast<uint16_t*>(&queries.of[first / 8][operand.step][4 * (first % 8 + r) + operand.c]) +
                           2 * operand.word + operand.half;
          if constexpr (k16Bit) {
            *to = reinterpret_cast<uint16_t const&>(elements[i]);
          } else {
            *to = __half_as_ushort(__float2half_rn(float(elements[i]) * factor));
          }
        }
      }
    }
  }
};

}  // namespace minfer::attention
