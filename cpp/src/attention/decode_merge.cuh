// The parts of a decode piece become one, and pieces of a unit its output: partial softmax results of the warps meet in shared memory, those
// of other CTAs in slots of the workspace, whose flags say when they are complete. After FlashDecoding (Dao et al., 2023).
#pragma once

#include "attention/decode_mainloop.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeMerge : Traits {
  using Mainloop = DecodeMainloop<Traits>;
  using Traits::kConsumerThreads, Traits::kFormat, Traits::kHalf, Traits::kHalves, Traits::kHeadDim, Traits::kInt4, Traits::kInt8;
  using Traits::kMaxColumns, Traits::kPitch, Traits::kRowsOfWarp, Traits::kVector, Traits::kWarps;
  using typename Traits::Codes, typename Traits::Element, typename Traits::Params;
  template <int kCols>
  using State = typename Mainloop::template State<kCols>;

  struct Storage {
    alignas(16) float output[kWarps][8][kPitch];
    float2 states[kWarps][8 * kMaxColumns];
  };

  static CUTLASS_DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory"); }

  /// A row of a piece, or of several: of a thread's elements of head_dim.
  struct Part {
    float highest, sum, output[kHalves][kVector];
  };

  static CUTLASS_DEVICE void add(Part& total, float highest, float sum, float const (&output)[kHalves][kVector]) {
    float const higher = fmaxf(total.highest, highest), base = higher == -INFINITY ? 0.0f : higher;
    float const keep = exp2_fast(total.highest - base), take = exp2_fast(highest - base);
    total.highest = higher;
    total.sum = total.sum * keep + (take > 0.0f ? sum * take : 0.0f);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int x = 0; x < kVector; ++x) total.output[h][x] = total.output[h][x] * keep + (take > 0.0f ? output[h][x] * take : 0.0f);
    }
  }

  /// The warps' parts of a piece become one, which is left in its slot, or merged with the others' and stored.
  template <int kCols>
  static CUTLASS_DEVICE void finish(Params const& params, Storage& storage, DecodePiece const& piece, State<kCols>& state, int warp,
                                    int lane) {
    int const g = lane / 4, c = lane % 4;
    if constexpr (kInt4) {  // minima of V: group g's sums are lane 4 g + c's
#pragma unroll
      for (int chunk = 0; chunk < kHeadDim / 32; ++chunk) {
        int const group = min(chunk * 32 * params.groups_v / params.head_dim_v, params.groups_v - 1);
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float const least = __shfl_sync(0xffffffffu, state.least[i][e], 4 * group + c);
#pragma unroll
            for (int x = e; x < 4; x += 2) {
              state.output[2 * chunk][i][x] += least;
              state.output[2 * chunk + 1][i][x] += least;
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = state.sum[i][e];
#pragma unroll
        for (int x = 4; x < 32; x *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
        if (g == 0) storage.states[warp][8 * i + 2 * c + e] = make_float2(state.highest[i][e], sum);
      }
    }
    Part part[kCols][kRowsOfWarp];  // of row row_of(i, r)
    auto const row_of = [&](int i, int r) { return 8 * i + kWarps * r + warp; };
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float const unit = kInt8 ? state.unit : 1.0f;
        if (i + half > 0) meet();  // the part before was read
#pragma unroll
        for (int tile = 0; tile < kHalf / 16; ++tile) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            storage.output[warp][2 * c + x % 2][Codes::row_of(tile, g, x / 2)] = state.output[half * (kHalf / 16) + tile][i][x] * unit;
          }
        }
        meet();
#pragma unroll
        for (int r = 0; r < kRowsOfWarp; ++r) {
          Part& own = part[i][r];
          float highest = -INFINITY;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, storage.states[w][row_of(i, r)].x);
          float const base = highest == -INFINITY ? 0.0f : highest;
          own.highest = highest;
          own.sum = 0.0f;
#pragma unroll
          for (int x = 0; x < kVector; ++x) own.output[half][x] = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            float2 const of_warp = storage.states[w][row_of(i, r)];
            float const weight = exp2_fast(of_warp.x - base);
            own.sum += of_warp.y * weight;
            auto const* const from = &storage.output[w][kWarps * r + warp][kVector * lane];
#pragma unroll
            for (int x = 0; x < kVector; ++x) own.output[half][x] += from[x] * weight;
          }
        }
      }
    }

    if (piece.parts == 0) {
      int64_t const slot = piece.slot;
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
#pragma unroll
        for (int r = 0; r < kRowsOfWarp; ++r) {
          if (row_of(i, r) >= piece.rows) continue;
          int64_t const at = slot * (8 * kCols) + row_of(i, r);
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int x = 0; x < kVector; x += 2) {
              *reinterpret_cast<float2*>(params.partials + at * kHeadDim + half * kHalf + kVector * lane + x) =
                  make_float2(part[i][r].output[half][x], part[i][r].output[half][x + 1]);
            }
          }
          if (lane == 0) params.states[at] = make_float2(part[i][r].highest, part[i][r].sum);
        }
      }
      meet();
      if (warp == 0 && lane == 0) {  // of all threads' writes, which the barrier put before it
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(params.arrived + slot), "l"(params.nonce) : "memory");
      }
      return;
    }
    int const lockstep = params.by_lockstep.divisor;
    if (piece.parts > 1) {
      for (int k = 32 * warp + lane; k < piece.parts; k += kConsumerThreads) {
        if (k == piece.own) continue;
        unsigned long long seen;
        do {
          asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(params.arrived + piece.slot + k * lockstep) : "memory");
        } while (seen != params.nonce);
        params.arrived[piece.slot + k * lockstep] = 0;  // a replay of the launch finds it empty
      }
      meet();
    }
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        int const row = row_of(i, r);
        if (row >= piece.rows) continue;
        Part total = part[i][r];
        if (piece.parts > 1) merge_parts(params, piece, part[i][r], total, int64_t(8 * kCols), row, lane);
        store(params, piece, total, row, lane);
      }
    }
    meet();  // outputs and states in shared memory were read
  }

  /// All parts of a unit's row, `own` among them, in order, whoever left them.
  static CUTLASS_DEVICE void merge_parts(Params const& params, DecodePiece const& piece, Part const& own, Part& total, int64_t rows_of_slot,
                                         int row, int lane) {
    int const lockstep = params.by_lockstep.divisor;
    total.highest = -INFINITY;
    total.sum = 0.0f;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int x = 0; x < kVector; ++x) total.output[half][x] = 0.0f;
    }
#pragma unroll 8
    for (int k = 0; k < piece.parts; ++k) {
      int64_t const at = int64_t(piece.slot + k * lockstep) * rows_of_slot + row;
      float2 of_slot = __ldcg(params.states + at);
      float output[kHalves][kVector];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int x = 0; x < kVector; x += 2) {
          float2 const pair = __ldcg(reinterpret_cast<float2 const*>(params.partials + at * kHeadDim + half * kHalf + kVector * lane + x));
          output[half][x] = k == piece.own ? own.output[half][x] : pair.x;
          output[half][x + 1] = k == piece.own ? own.output[half][x + 1] : pair.y;
        }
      }
      if (k == piece.own) of_slot = make_float2(own.highest, own.sum);
      add(total, of_slot.x, of_slot.y, output);
    }
  }

  static CUTLASS_DEVICE void store(Params const& params, DecodePiece const& piece, Part& total, int row, int lane) {
    int query, head;
    params.by_group(query, head, piece.row + row);
    head += piece.kv_head * params.group;
    int64_t const batch = params.cu_seqlens_q != nullptr ? 0 : piece.batch, at = piece.row_q + query;
    float top = total.highest, sum = total.sum, factor, lse;
    if (params.sinks != nullptr) {
      float const sink = float(static_cast<Element const*>(params.sinks)[head]) * kLog2E, higher = fmaxf(top, sink);
      float const keep = higher == -INFINITY ? 0.0f : exp2_fast(top - higher);
      sum = sum * keep + (higher == -INFINITY ? 0.0f : exp2_fast(sink - higher));
      factor = sum == 0.0f ? 0.0f : keep / sum;
      lse = sum == 0.0f ? -INFINITY : (higher + log2f(sum)) * kLn2;
    } else {
      factor = sum == 0.0f ? 0.0f : 1.0f / sum;
      lse = sum == 0.0f ? -INFINITY : (top + log2f(sum)) * kLn2;
    }
    if (lane == 0 && params.lse != nullptr) params.lse[batch * params.lse_batch + head * params.lse_head + at] = lse;
    if constexpr (kFormat == WeightFormat::kFp8E4M3) {
      factor *= __ldg(static_cast<float const*>(params.v_scale) + piece.kv_head * params.scale_stride);
    }
    auto* const out =
        static_cast<Element*>(params.out) + batch * params.out_batch + at * params.out_row + int64_t(head) * params.head_dim_v;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      int const d = half * kHalf + kVector * lane;
      if (d < params.head_dim_v) {
        cute::conditional_t<kVector == 4, uint2, uint32_t> packed;
        auto* const pairs = reinterpret_cast<Element*>(&packed);
#pragma unroll
        for (int x = 0; x < kVector; ++x) pairs[x] = Element(total.output[half][x] * factor);
        *reinterpret_cast<decltype(packed)*>(out + d) = packed;
      }
    }
  }
};

}  // namespace minfer::attention
