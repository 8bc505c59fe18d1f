// Decode's epilogue. The warps' partials of a work item become one in shared memory. Where the output tile has other splits, that one is
// left in a partial slot of the workspace, as packets, or, by the owner, merged with the others' in the order of the splits, whichever CTA
// left first. The owner normalises and stores the output. After FlashDecoding (Dao et al., 2023).
#pragma once

#include "attention/decode/mainloop.cuh"
#include "attention/shared/launch.h"
#include "common/named_barrier.cuh"
#include "common/opaque.cuh"
#include "common/packet.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeMerge : Traits {
  using Mainloop = DecodeMainloop<Traits>;
  using Traits::kConsumerThreads, Traits::kFormat, Traits::kMergedDim, Traits::kMergePasses, Traits::kHeadDim, Traits::kMaxRowTiles;
  using Traits::kPitch, Traits::kWarps;
  using typename Traits::Codes, typename Traits::Element, typename Traits::Params;
  template <int kRowTiles>
  using State = typename Mainloop::template State<kRowTiles>;

  struct Storage {
    alignas(16) float output[kWarps][8][kPitch];
    float2 states[kWarps][8 * kMaxRowTiles];
    uint64_t stamp;  // the tag of the packets of this CTA's partial
  };

  /// With the number in a register, the compiler recomputes other values to make room for it (portable int4 kernel of head_dim 64: 8
  /// instructions more).
  static CUTLASS_DEVICE void sync_consumers() { ConstantNamedBarrier<1, kConsumerThreads>::sync(); }

  /// Merges the warps' partials of a work item, and leaves the result in its partial slot or, as the owner, stores the output.
  template <int kRowTiles>
  static CUTLASS_DEVICE void finish(Params const& params, Storage& storage, DecodeWorkItem const& work, State<kRowTiles>& state, int warp,
                                    int lane) {
    int const g = lane / 4, c = lane % 4;
    Mainloop::Format::template finish<kRowTiles>(params, state, lane);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = state.row_sum[i][e];
#pragma unroll
        for (int x = 4; x < 32; x *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
        if (g == 0) storage.states[warp][8 * i + 2 * c + e] = make_float2(state.row_max[i][e], sum);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int pass = 0; pass < kMergePasses; ++pass) {
        float const scale = Mainloop::Format::output_scale(state);
        if (i + pass > 0) sync_consumers();  // the columns of the pass before were read
#pragma unroll
        for (int tile = 0; tile < kMergedDim / 16; ++tile) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            storage.output[warp][2 * c + x % 2][Codes::row_of(tile, g, x / 2)] =
                state.output[pass * (kMergedDim / 16) + tile][i][x] * scale;
          }
        }
        sync_consumers();
        constexpr int kSegments = kMergedDim / 64;
        int const rows = min(work.rows - 8 * i, 8);
#pragma unroll 1
        for (uint32_t n = uint32_t(warp); int(n) < rows * kSegments; n += kWarps) {
          finish_segment(params, storage, work, 8 * i + int(n / kSegments), int(n % kSegments), pass * kSegments + int(n % kSegments),
                         lane);
        }
      }
    }
    sync_consumers();  // outputs and states in shared memory were read
    if (warp == 0 && lane == 0) storage.stamp = next_stamp(storage.stamp);
  }

  static CUTLASS_DEVICE uint64_t warp_xor(uint64_t x) {
    return uint64_t(__reduce_xor_sync(0xffffffffu, uint32_t(x >> 32))) << 32 | __reduce_xor_sync(0xffffffffu, uint32_t(x));
  }
  /// The maximum over the warp, by integers: flip() makes the order of floats that of their bits.
  static CUTLASS_DEVICE float warp_max(float x) {
    auto const flip = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(flip(__reduce_max_sync(0xffffffffu, flip(__float_as_int(x)))));
  }
  static CUTLASS_DEVICE float warp_sum(float x) {
#pragma unroll
    for (int with = 1; with < 32; with *= 2) x += __shfl_xor_sync(0xffffffffu, x, with);
    return x;
  }

  /// A segment is 64 elements of an output row, two in each lane. A partial of it is that of one split or of several.
  struct Partial {
    float max, sum;
    float2 output;
  };

  /// Merges the warps' partials of segment `segment` of a row, which is number `in_room` of those in shared memory.
  static CUTLASS_DEVICE void finish_segment(Params const& params, Storage const& storage, DecodeWorkItem const& work, int row, int in_room,
                                            int segment, int lane) {
    if (64 * segment >= params.head_dim_v) return;
    Partial partial{-INFINITY, 0.0f, make_float2(0.0f, 0.0f)};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) partial.max = fmaxf(partial.max, storage.states[w][row].x);
    float const base = partial.max == -INFINITY ? 0.0f : partial.max;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      float2 const of_warp = storage.states[w][row];
      float2 const output = *reinterpret_cast<float2 const*>(&storage.output[w][row % 8][64 * in_room + 2 * lane]);
      float const weight = exp2_fast(of_warp.x - base);
      partial.sum = fmaf(of_warp.y, weight, partial.sum);
      partial.output.x = fmaf(output.x, weight, partial.output.x);
      partial.output.y = fmaf(output.y, weight, partial.output.y);
    }
    if (work.partials == 0) {
      Packet* const to = segment_in_slot(params, work.partial_slot, row, segment);
      store_packet(to + 2 + lane, numbers_of(partial.output.x, partial.output.y), storage.stamp);
      if (lane < 2) store_packet(to + lane, lane == 0 ? numbers_of(partial.max, partial.sum) : storage.stamp, params.nonce);
      return;
    }
    if (__builtin_expect(work.partials > 1, false)) partial = merge_partials(params, work, partial, row, segment, lane);
    store(params, work, partial, row, segment, lane);
  }

  /// The packets of a segment of a row in a partial slot: maximum and sum, the stamp of the packets that follow, then a packet of each
  /// lane.
  static CUTLASS_DEVICE Packet* segment_in_slot(Params const& params, int64_t slot, int row, int segment) {
    return params.partial_slots + ((slot * (8 * params.row_tiles) + row) * (kHeadDim / 64) + segment) * kPacketsOfPartial;
  }

  /// Merges all partials of a segment of an output row in the order of the splits; `owners` is the one that this CTA has computed itself.
  static CUTLASS_DEVICE Partial merge_partials(Params const& params, DecodeWorkItem const& work, Partial const& owners, int row,
                                               int segment, int lane) {
    constexpr int kAtOnce =
        Traits::kAsyncLoads ? 8 : 4;  // 16 are slower (H200: more instructions to fetch); the portable kernel has no registers for 8
    int64_t const next = int64_t(params.by_lockstep.divisor) * (8 * params.row_tiles) * (kHeadDim / 64) * kPacketsOfPartial;
    Packet* const first = segment_in_slot(params, work.partial_slot, row, segment);
    Partial total{-INFINITY, 0.0f, make_float2(0.0f, 0.0f)};
#pragma unroll 1
    for (int begin = 0; begin < work.partials; begin += 32) {  // a partial in each lane
      int const end = min(work.partials - begin, 32);
      bool const is_owners = begin + lane == work.own_partial, wanted = lane < end && !is_owners;
      Packet* const lane_packets = first + (begin + lane) * next;
      Packet state{0, 0}, stamp{0, 0};
      uint32_t const all = __ballot_sync(0xffffffffu, wanted);
      uint32_t missing = all;
      float weight = 0.0f;
#pragma unroll 1
      for (int group = 0; group < end; group += kAtOnce) {
        Packet outputs[kAtOnce] = {};
        auto const poll_outputs = [&](uint32_t of_partials) {
          Packet const* from = first + (begin + group) * next + 2 + lane;
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k, from += next) {
            make_opaque(from);  // one address at a time: all of them would take as many registers as the outputs
            poll_packet(of_partials >> (group + k) & 1, outputs[k], from);
          }
        };
        if (group == 0) {
          do {  // poll only what has not arrived: reading all of it again would delay the arrival
            bool const is_missing = missing >> lane & 1;
            poll_packet(is_missing, state, lane_packets);
            poll_packet(is_missing, stamp, lane_packets + 1);
            poll_outputs(missing);  // stored before its state and polled after it: if the state is there, so is mostly the output
            missing = all & __ballot_sync(0xffffffffu, state.tag != params.nonce || stamp.tag != params.nonce);
          } while (missing != 0);
          if (wanted) clear_tag(lane_packets), clear_tag(lane_packets + 1);
          float2 const partial_state = is_owners ? make_float2(owners.max, owners.sum)
                                       : wanted  ? state.get()
                                                 : make_float2(-INFINITY, 0.0f);
          float const max = fmaxf(total.max, warp_max(partial_state.x));
          float const base = max == -INFINITY ? 0.0f : max, keep = exp2_fast(total.max - base);
          weight = exp2_fast(partial_state.x - base);
          total = Partial{max, fmaf(total.sum, keep, warp_sum(partial_state.y * weight)),
                          make_float2(total.output.x * keep, total.output.y * keep)};
        }
        uint64_t const group_tags = warp_xor(wanted && lane >= group && lane < group + kAtOnce ? stamp.numbers : 0);
        auto const found = [&] {
          uint64_t tags = 0;
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) tags ^= all >> (group + k) & 1 ? outputs[k].tag : 0;
          return tags;
        };
        while (__any_sync(0xffffffffu, found() != group_tags)) poll_outputs(all);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          float const factor = __shfl_sync(0xffffffffu, weight, (group + k) % 32);
          float2 const output = begin + group + k == work.own_partial ? owners.output : outputs[k].get();
          if (group + k >= end) continue;
          total.output.x = fmaf(output.x, factor, total.output.x);
          total.output.y = fmaf(output.y, factor, total.output.y);
        }
      }
    }
    return total;
  }

  /// Normalises a segment of an output row and stores it; the row's first segment stores the log-sum-exp, too.
  static CUTLASS_DEVICE void store(Params const& params, DecodeWorkItem const& work, Partial const& total, int row, int segment, int lane) {
    int query, head;
    params.by_heads_per_kv(query, head, work.row + row);
    head += work.kv_head * params.heads_per_kv;
    int64_t const batch = params.cu_seqlens_q != nullptr ? 0 : work.batch, at = work.row_q + query;
    float lse;
    float factor = finish_row<Element>(params.softmax, head, true, total.max, total.sum, &lse);
    if (segment == 0 && lane == 0 && params.lse != nullptr) params.lse[batch * params.lse_batch + head * params.lse_head + at] = lse;
    if constexpr (kFormat == WeightFormat::kFp8E4M3) {
      factor *= load_operand(static_cast<float const*>(params.v_scale) + work.kv_head * params.scale_stride);
    }
    int const d = 64 * segment + 2 * lane;
    if (d >= params.head_dim_v) return;
    Element const pair[2] = {Element(total.output.x * factor), Element(total.output.y * factor)};
    *reinterpret_cast<uint32_t*>(static_cast<Element*>(params.out) + batch * params.out_batch + at * params.out_row +
                                 int64_t(head) * params.head_dim_v + d) = reinterpret_cast<uint32_t const&>(pair);
  }
};

}  // namespace minfer::attention
