// The parts of a decode piece become one, and pieces of a unit its output: partial softmax results of the warps meet in shared memory, those
// of other CTAs in slots of the workspace, as packets. After FlashDecoding (Dao et al., 2023).
#pragma once

#include "attention/decode_mainloop.cuh"
#include "attention/packet.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeMerge : Traits {
  using Mainloop = DecodeMainloop<Traits>;
  using Traits::kConsumerThreads, Traits::kFormat, Traits::kHalf, Traits::kHalves, Traits::kHeadDim, Traits::kInt4, Traits::kInt8;
  using Traits::kMaxColumns, Traits::kPitch, Traits::kWarps;
  using typename Traits::Codes, typename Traits::Element, typename Traits::Params;
  template <int kCols>
  using State = typename Mainloop::template State<kCols>;

  struct Storage {
    alignas(16) float output[kWarps][8][kPitch];
    float2 states[kWarps][8 * kMaxColumns];
  };

  static CUTLASS_DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory"); }

  /// The warps' parts of a piece become one, which is left in its slot, or merged with the others' and stored.
  template <int kCols>
  static CUTLASS_DEVICE void finish(Params const& params, Storage& storage, DecodePiece const& piece, State<kCols>& state, int warp,
                                    int lane) {
    int const g = lane / 4, c = lane % 4;
    if constexpr (kInt4) {  // minima of V: group g's sums are lane 4 g + c's
#pragma unroll
      for (int chunk = 0; chunk < kHeadDim / 32; ++chunk) {
        int const group = int(params.group_v_of(chunk));
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float const least = __shfl_sync(0xffffffffu, state.least[i][e], 4 * group + c);
#pragma unroll
            for (int x = e; x < 4; x += 2) {
              state.output[2 * chunk][i][x] = fmaf(state.output[2 * chunk][i][x], state.unit_of_codes[x / 2], least);
              state.output[2 * chunk + 1][i][x] = fmaf(state.output[2 * chunk + 1][i][x], state.unit_of_codes[x / 2], least);
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
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float const unit = kInt8 ? state.unit : 1.0f;
        if (i + half > 0) meet();  // the columns before were read
#pragma unroll
        for (int tile = 0; tile < kHalf / 16; ++tile) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            storage.output[warp][2 * c + x % 2][Codes::row_of(tile, g, x / 2)] = state.output[half * (kHalf / 16) + tile][i][x] * unit;
          }
        }
        meet();
        constexpr int kChunks = kHalf / 64;
        int const rows = min(piece.rows - 8 * i, 8);
#pragma unroll 1
        for (uint32_t n = uint32_t(warp); int(n) < rows * kChunks; n += kWarps) {
          finish_chunk(params, storage, piece, 8 * i + int(n / kChunks), int(n % kChunks), half * kChunks + int(n % kChunks), lane);
        }
      }
    }
    meet();  // outputs and states in shared memory were read
  }

  /// A row's part of a piece, or of several: 64 of its elements, two in a lane.
  struct Part {
    float highest, sum;
    float2 output;
  };

  /// Chunk `chunk` of a row, number `in_room` of those in shared memory.
  static CUTLASS_DEVICE void finish_chunk(Params const& params, Storage const& storage, DecodePiece const& piece, int row, int in_room,
                                          int chunk, int lane) {
    if (64 * chunk >= params.head_dim_v) return;
    Part part{-INFINITY, 0.0f, make_float2(0.0f, 0.0f)};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) part.highest = fmaxf(part.highest, storage.states[w][row].x);
    float const base = part.highest == -INFINITY ? 0.0f : part.highest;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      float2 const of_warp = storage.states[w][row];
      float2 const output = *reinterpret_cast<float2 const*>(&storage.output[w][row % 8][64 * in_room + 2 * lane]);
      float const weight = exp2_fast(of_warp.x - base);
      part.sum = fmaf(of_warp.y, weight, part.sum);
      part.output.x = fmaf(output.x, weight, part.output.x);
      part.output.y = fmaf(output.y, weight, part.output.y);
    }
    if (piece.parts == 0) {
      Packet* const to = chunk_in_slot(params, piece.slot, row, chunk);
      if (lane == 0) send(to, part.highest, part.sum, params.nonce);
      send(to + 1 + lane, part.output.x, part.output.y, params.nonce);
      return;
    }
    if (__builtin_expect(piece.parts > 1, false)) part = merge_parts(params, piece, part, row, chunk, lane);
    store(params, piece, part, row, chunk, lane);
  }

  // A chunk of a row in a slot: maximum and sum, then a packet of each lane.
  static constexpr int kPackets = 33;
  static CUTLASS_DEVICE Packet* chunk_in_slot(Params const& params, int64_t slot, int row, int chunk) {
    return params.slots + ((slot * (8 * params.columns) + row) * (kHeadDim / 64) + chunk) * kPackets;
  }

  /// All parts of a chunk of a unit's row, `own` among them, in order, whoever left them.
  static CUTLASS_DEVICE Part merge_parts(Params const& params, DecodePiece const& piece, Part const& own, int row, int chunk, int lane) {
    constexpr int kAtOnce = Traits::kAsyncLoads && kHeadDim <= 128 ? 8 : 4;  // more would be spilled
    int64_t const next = int64_t(params.by_lockstep.divisor) * (8 * params.columns) * (kHeadDim / 64) * kPackets;
    Packet* const first = chunk_in_slot(params, piece.slot, row, chunk);
    Part total{-INFINITY, 0.0f, make_float2(0.0f, 0.0f)};
#pragma unroll 1
    for (int begin = 0; begin < piece.parts; begin += kAtOnce) {
      Packet states[kAtOnce], outputs[kAtOnce];
      auto const place = [&](int k) { return first + (begin + k) * next; };
      auto const wanted = [&](int k) { return begin + k < piece.parts && begin + k != piece.own; };
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) states[k].nonce = outputs[k].nonce = wanted(k) ? 0 : params.nonce;
      bool missing;
      do {  // only for what is not there yet: reading all of it again would keep it from coming
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (states[k].nonce != params.nonce) states[k] = peek(place(k));
          if (outputs[k].nonce != params.nonce) outputs[k] = peek(place(k) + 1 + lane);
        }
        missing = false;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) missing = missing || states[k].nonce != params.nonce || outputs[k].nonce != params.nonce;
      } while (__any_sync(0xffffffffu, missing));
      Part parts[kAtOnce];
      float highest = total.highest;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        parts[k] = Part{-INFINITY, 0.0f, make_float2(0.0f, 0.0f)};
        if (begin + k == piece.own) parts[k] = own;
        if (wanted(k)) {
          parts[k] = Part{states[k].get().x, states[k].get().y, outputs[k].get()};
          if (lane == 0) forget(place(k));
          forget(place(k) + 1 + lane);
        }
        highest = fmaxf(highest, parts[k].highest);
      }
      float const base = highest == -INFINITY ? 0.0f : highest, keep = exp2_fast(total.highest - base);
      total = Part{highest, total.sum * keep, make_float2(total.output.x * keep, total.output.y * keep)};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        float const take = exp2_fast(parts[k].highest - base);
        total.sum = fmaf(parts[k].sum, take, total.sum);
        total.output.x = fmaf(parts[k].output.x, take, total.output.x);
        total.output.y = fmaf(parts[k].output.y, take, total.output.y);
      }
    }
    return total;
  }

  static CUTLASS_DEVICE void store(Params const& params, DecodePiece const& piece, Part const& total, int row, int chunk, int lane) {
    int query, head;
    params.by_group(query, head, piece.row + row);
    head += piece.kv_head * params.group;
    int64_t const batch = params.cu_seqlens_q != nullptr ? 0 : piece.batch, at = piece.row_q + query;
    float sink = -INFINITY;
    if (params.sinks != nullptr) sink = float(static_cast<Element const*>(params.sinks)[head]) * kLog2E;
    float const higher = fmaxf(total.highest, sink), base = higher == -INFINITY ? 0.0f : higher;
    float const keep = exp2_fast(total.highest - base), sum = fmaf(total.sum, keep, exp2_fast(sink - base));
    float factor = sum == 0.0f ? 0.0f : keep * inverse_fast(sum);
    float const lse = (base + log2_fast(sum)) * kLn2;
    if (chunk == 0 && lane == 0 && params.lse != nullptr) params.lse[batch * params.lse_batch + head * params.lse_head + at] = lse;
    if constexpr (kFormat == WeightFormat::kFp8E4M3) {
      factor *= __ldg(static_cast<float const*>(params.v_scale) + piece.kv_head * params.scale_stride);
    }
    int const d = 64 * chunk + 2 * lane;
    if (d >= params.head_dim_v) return;
    Element const pair[2] = {Element(total.output.x * factor), Element(total.output.y * factor)};
    *reinterpret_cast<uint32_t*>(static_cast<Element*>(params.out) + batch * params.out_batch + at * params.out_row +
                                 int64_t(head) * params.head_dim_v + d) = reinterpret_cast<uint32_t const&>(pair);
  }
};

}  // namespace minfer::attention
