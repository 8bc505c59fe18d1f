// The parts of a decode piece become one, and pieces of a unit its output: partial softmax results of the warps meet in shared memory, those
// of other CTAs in slots of the workspace, as packets. After FlashDecoding (Dao et al., 2023).
#pragma once

#include "attention/decode/mainloop.cuh"
#include "attention/shared/launch.h"
#include "attention/shared/packet.cuh"

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
    uint64_t stamp;  // of packets of this CTA's piece
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
    if (warp == 0 && lane == 0) storage.stamp = next_stamp(storage.stamp);
  }

  static CUTLASS_DEVICE uint64_t warp_xor(uint64_t x) {
    return uint64_t(__reduce_xor_sync(0xffffffffu, uint32_t(x >> 32))) << 32 | __reduce_xor_sync(0xffffffffu, uint32_t(x));
  }
  static CUTLASS_DEVICE float warp_max(float x) {  // of integers: the smaller a negative float, the larger its bits
    auto const flip = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(flip(__reduce_max_sync(0xffffffffu, flip(__float_as_int(x)))));
  }
  static CUTLASS_DEVICE float warp_sum(float x) {
#pragma unroll
    for (int with = 1; with < 32; with *= 2) x += __shfl_xor_sync(0xffffffffu, x, with);
    return x;
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
      send(to + 2 + lane, numbers_of(part.output.x, part.output.y), storage.stamp);
      if (lane < 2) send(to + lane, lane == 0 ? numbers_of(part.highest, part.sum) : storage.stamp, params.nonce);
      return;
    }
    if (__builtin_expect(piece.parts > 1, false)) part = merge_parts(params, piece, part, row, chunk, lane);
    store(params, piece, part, row, chunk, lane);
  }

  // A chunk of a row in a slot: maximum and sum, the stamp of what follows, a packet of each lane.
  static CUTLASS_DEVICE Packet* chunk_in_slot(Params const& params, int64_t slot, int row, int chunk) {
    return params.slots + ((slot * (8 * params.columns) + row) * (kHeadDim / 64) + chunk) * kPacketsOfChunk;
  }

  /// All parts of a chunk of a unit's row, `own` among them, in order, whoever left them.
  static CUTLASS_DEVICE Part merge_parts(Params const& params, DecodePiece const& piece, Part const& own, int row, int chunk, int lane) {
    constexpr int kAtOnce = Traits::kAsyncLoads ? 8 : 4;  // 16: slower (H200; more instructions to fetch); portable: registers
    int64_t const next = int64_t(params.by_lockstep.divisor) * (8 * params.columns) * (kHeadDim / 64) * kPacketsOfChunk;
    Packet* const first = chunk_in_slot(params, piece.slot, row, chunk);
    Part total{-INFINITY, 0.0f, make_float2(0.0f, 0.0f)};
#pragma unroll 1
    for (int begin = 0; begin < piece.parts; begin += 32) {  // a part for each lane
      int const end = min(piece.parts - begin, 32);
      bool const is_own = begin + lane == piece.own, wanted = lane < end && !is_own;
      Packet* const place = first + (begin + lane) * next;
      Packet state{0, 0}, stamp{0, 0};
      uint32_t const all = __ballot_sync(0xffffffffu, wanted);
      uint32_t missing = all;
      float weight = 0.0f;
#pragma unroll 1
      for (int group = 0; group < end; group += kAtOnce) {
        Packet outputs[kAtOnce] = {};
        auto const peek_outputs = [&](uint32_t of_parts) {
          Packet const* from = first + (begin + group) * next + 2 + lane;
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k, from += next) {
            asm volatile("" : "+l"(from));  // an address at a time: as many registers as outputs take, otherwise
            peek(of_parts >> (group + k) & 1, outputs[k], from);
          }
        };
        if (group == 0) {
          do {  // only for what is not there yet: reading all of it again would keep it from coming
            bool const is_missing = missing >> lane & 1;
            peek(is_missing, state, place);
            peek(is_missing, stamp, place + 1);
            peek_outputs(missing);  // sent before its state, and looked at after: there, if that is
            missing = all & __ballot_sync(0xffffffffu, state.tag != params.nonce || stamp.tag != params.nonce);
          } while (missing != 0);
          if (wanted) forget(place), forget(place + 1);
          float2 const of_part = is_own ? make_float2(own.highest, own.sum) : wanted ? state.get() : make_float2(-INFINITY, 0.0f);
          float const highest = fmaxf(total.highest, warp_max(of_part.x));
          float const base = highest == -INFINITY ? 0.0f : highest, keep = exp2_fast(total.highest - base);
          weight = exp2_fast(of_part.x - base);
          total =
              Part{highest, fmaf(total.sum, keep, warp_sum(of_part.y * weight)), make_float2(total.output.x * keep, total.output.y * keep)};
        }
        uint64_t const of_group = warp_xor(wanted && lane >= group && lane < group + kAtOnce ? stamp.numbers : 0);
        auto const found = [&] {
          uint64_t tags = 0;
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) tags ^= all >> (group + k) & 1 ? outputs[k].tag : 0;
          return tags;
        };
        while (__any_sync(0xffffffffu, found() != of_group)) peek_outputs(all);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          float const take = __shfl_sync(0xffffffffu, weight, (group + k) % 32);
          float2 const output = begin + group + k == piece.own ? own.output : outputs[k].get();
          if (group + k >= end) continue;
          total.output.x = fmaf(output.x, take, total.output.x);
          total.output.y = fmaf(output.y, take, total.output.y);
        }
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
      factor *= load_operand(static_cast<float const*>(params.v_scale) + piece.kv_head * params.scale_stride);
    }
    int const d = 64 * chunk + 2 * lane;
    if (d >= params.head_dim_v) return;
    Element const pair[2] = {Element(total.output.x * factor), Element(total.output.y * factor)};
    *reinterpret_cast<uint32_t*>(static_cast<Element*>(params.out) + batch * params.out_batch + at * params.out_row +
                                 int64_t(head) * params.head_dim_v + d) = reinterpret_cast<uint32_t const&>(pair);
  }
};

}  // namespace minfer::attention
