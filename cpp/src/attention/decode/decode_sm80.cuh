// Attention forward for sm_80 onward, few queries over a cache: split-KV, cp.async + mma.sync, persistent. 16-bit keys and values, or fp8,
// int8 and int4 codes that become f16 in registers. The only path on A100, Ada and consumer Blackwell. After FlashDecoding (Dao et al.,
// 2023).
//
// All warps are alike: slice i of a piece is warp i % kWarps's, which loads it, keeps a softmax and an output of its own, and meets the
// others when the piece ends. It needs nobody for its loads: a ring of kStages slices in shared memory is its alone, a stage is asked for
// again when it was read, and the slices that are loaded run ahead of those that are computed, over the ends of pieces too.
// A load is a commit group of the warp, empty when there is no more: so the oldest stage is full when kStages - 1 groups are pending.
// Loads: 16 bytes a lane, laid out as TMA would on sm_90. Rows behind the last key are not read, they become zeros.
// Pieces, and who merges those of a unit: decode_pieces.cuh. What a warp does with a slice: decode_mainloop.cuh.
// Shared memory: two CTAs on an SM of 8.0 or 9.0 where the table says so, one in 99 KiB of 8.6, 8.9 and 12.0.
#pragma once

#include "attention/decode/arguments.cuh"
#include "attention/decode/boxes.cuh"
#include "attention/decode/mainloop.cuh"
#include "attention/decode/merge.cuh"
#include "attention/decode/queries.cuh"
#include "attention/decode/scales.cuh"
#include "attention/shared/key_rows.cuh"
#include "attention/shared/launch_kernel.cuh"
#include "attention/shared/outside_rows.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "cutlass/cutlass.h"
#include "minfer/types.h"

namespace minfer::attention {

struct DecodeSm80Params : DecodeParams {
  KeyRows key_rows, value_rows;
};

/// The parts of the warps are merged 64 elements at a time: their shared memory is the ring's that way.
template <class Config>
struct DecodeSm80Traits : DecodeTraits<Config, Config::kThreads / 32, 64> {
  static constexpr bool kAsyncLoads = false;
};

template <class Config>
struct DecodeSm80 : DecodeSm80Traits<Config> {
  using Traits = DecodeSm80Traits<Config>;
  using Mainloop = DecodeMainloop<Traits>;
  using Merge = DecodeMerge<Traits>;
  using Scales = DecodeScales<Traits>;
  using Traits::kCodeBytes, Traits::kInt4, Traits::kMaxColumns, Traits::kRowBytes, Traits::kScaleBytes, Traits::kScales, Traits::kSlice;
  using Traits::kStages, Traits::kWarps;
  using typename Traits::Pieces, typename Traits::Queries, typename Traits::SliceAddress;
  using Boxes = DecodeBoxes<Pieces>;
  using Params = DecodeSm80Params;
  static constexpr int kThreads = Config::kThreads, kMinCtas = Config::kCtasPerSm;

  struct SharedStorage {
    alignas(128) uint8_t codes[kWarps][kStages][2][kCodeBytes];
    alignas(16) uint8_t scales[kWarps][kStages][kScaleBytes];
    typename Merge::Storage merge;
    alignas(16) Queries queries;
    SequenceTable::Storage sequences;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
  static_assert(kWarps * (kSlice / 8) <= 32, "a warp's next slice is in the next window of boxes");

  /// A warp's slices on their way into its ring, which is full but for the stage that is being read.
  struct Loader {
    Params const& params;
    uint32_t codes, scales;  // of the warp's stage 0
    Pieces pieces;
    DecodePiece piece;
    Boxes boxes;
    int slice, end;  // of the piece
    uint32_t stage;  // that is filled next: while the ring is full, the oldest
    int warp, lane;

    CUTLASS_DEVICE Loader(Params const& params, SharedStorage& storage, Pieces const& pieces, int warp, int lane)
        : params(params),
          codes(shared_address(storage.codes[warp])),
          scales(shared_address(storage.scales[warp])),
          pieces(pieces),
          slice(0),
          end(0),
          stage(0),
          warp(warp),
          lane(lane) {
      piece.batch = 0;  // there may be one
#pragma unroll 1
      for (int s = 0; s < kStages; ++s) load_next();
    }

    CUTLASS_DEVICE SliceAddress oldest() const {
      uint32_t const keys = codes + stage * (2 * kCodeBytes);
      return {keys, keys + kCodeBytes, scales + stage * kScaleBytes};
    }

    CUTLASS_DEVICE void load_next() {
      while (slice >= end && piece.batch >= 0) {
        piece = pieces.take();
        if (piece.batch < 0) break;
        int const codes_end = Pieces::codes_end(params, piece.seqlen_k);
        slice = piece.slice_begin + warp;
        end = piece.slice_end < codes_end ? piece.slice_end : codes_end;
        if (slice < end) boxes = Boxes(params, piece, slice, lane);
      }
      if (slice < end) {
        load();
        slice += kWarps;
      }
      commit_copies();
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    CUTLASS_DEVICE void load() {
      constexpr int kChunks = kRowBytes / 16, kAtOnce = 32 / kChunks;  // of a row; rows at a time
      static_assert(32 % kChunks == 0 && kSlice % kAtOnce == 0);
      int lane = this->lane;
      asm volatile("" : "+r"(lane));  // addresses are made again for each slice: kept, they would be spilled
      int const first_box = slice * params.boxes_of_slice, chunk = lane % kChunks, own = lane / kChunks;
      boxes.advance_to(params, first_box, lane);
      int const readable = Pieces::in_codes(params, piece.seqlen_k) - slice * kSlice;  // behind the last key, nothing is read
      int const key_bytes = params.key_rows.bytes_from(16 * chunk), value_bytes = params.value_rows.bytes_from(16 * chunk);
      SliceAddress const to = oldest();
      auto const copy_row = [&](int page, int token, char const* key, char const* value) {
        bool const inside = token < readable && params.has(page);
        copy_async_16(Mainloop::address_of(params, to.keys, token, chunk), key + 16 * chunk, inside ? key_bytes : 0);
        copy_async_16(Mainloop::address_of(params, to.values, token, chunk), value + 16 * chunk, inside ? value_bytes : 0);
      };
      if (params.boxes_of_slice == 1) {
        int const page = boxes.page_of(first_box), row = boxes.row_of(first_box) + own;
        char const* key = params.key_rows.at(page, row, piece.kv_head);
        char const* value = params.value_rows.at(page, row, piece.kv_head);
#pragma unroll 2
        for (int first = 0; first < kSlice; first += kAtOnce) {
          copy_row(page, first + own, key, value);
          key += kAtOnce * params.key_rows.row;
          value += kAtOnce * params.value_rows.row;
        }
      } else {
        int const in_box = params.box_rows - 1, shift = 31 - __clz(params.box_rows);
#pragma unroll 2
        for (int first = 0; first < kSlice; first += kAtOnce) {
          int const token = first + own, box = first_box + (token >> shift);
          int const page = boxes.page_of(box), row = boxes.row_of(box) + (token & in_box);
          copy_row(page, token, params.key_rows.at(page, row, piece.kv_head), params.value_rows.at(page, row, piece.kv_head));
        }
      }
      if constexpr (kScales) {
        Scales::template load<0, false>(params, to.scales, piece.kv_head, boxes, first_box, lane);
        Scales::template load<1, false>(params, to.scales, piece.kv_head, boxes, first_box, lane);
      }
    }
  };

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    int const thread = int(threadIdx.x);
#if __CUDA_ARCH__ >= 900
    allow_dependent_launch();
#endif
    if constexpr (kInt4) {  // of channels and groups that the cache does not have, loads leave nothing
      for (int i = thread; i < kWarps * kStages * kScaleBytes / 16; i += kThreads) {
        reinterpret_cast<uint4*>(&storage.scales[0][0][0])[i] = make_uint4(0, 0, 0, 0);
      }
    }
#if __CUDA_ARCH__ >= 900
    wait_for_predecessor();
#endif
    if (thread == 0) storage.merge.stamp = new_stamp(params.nonce);
    Pieces::build(storage.sequences, params, thread, kThreads);
    __syncthreads();
    clear_rows_outside(params, thread, kThreads);
    if (params.columns == 1) {
      consume<1>(params, storage, thread);
    } else if constexpr (kMaxColumns == 2) {
      consume<2>(params, storage, thread);
    }
  }

  template <int kCols>
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int thread) {
    int const lane = thread % 32;
    int const warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler then knows that all of a warp have the same
    Pieces pieces(params, storage.sequences);
    Loader loader(params, storage, pieces, warp, lane);
    auto const slice_at = [&](int) {
      wait_for_copies<kStages - 1>();
      __syncwarp();
      return loader.oldest();
    };
    auto const release = [&](int) {
      __syncwarp();
      loader.load_next();
    };
    DecodePiece const& piece = storage.queries.piece;  // there, and not in registers, while the slices are taken
    for (DecodePiece next = pieces.take(); next.batch >= 0; next = pieces.take()) {
      DecodeQueries<Traits>::bring(params, next, storage.queries, lane, [] {}, warp, kWarps);
      if (thread == 0) storage.queries.piece = next;
      __syncthreads();
      typename Mainloop::template State<kCols> state;
      uint32_t const room = shared_address(storage.merge.output[warp]);
      Mainloop::take_piece(params, room, piece, storage.queries, state, warp, lane, slice_at, release);
      Merge::finish(params, storage.merge, piece, state, warp, lane);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(DecodeSm80<Config>::kThreads, DecodeSm80<Config>::kMinCtas)
    decode_sm80_kernel(__grid_constant__ DecodeSm80Params const params) {
  extern __shared__ __align__(128) char smem[];
  DecodeSm80<Config>::run(params, smem);
}

template <class Config>
Status launch_decode_sm80(AttentionLaunchArguments const& arguments) {
  using Kernel = DecodeSm80<Config>;
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  DecodeSm80Params params{};
  set_decode_arguments<Kernel>(arguments, &params);
  params.key_rows = KeyRows::of(o.k, o.k_strides, p.head_dim, bits_of(Kernel::kFormat));
  params.value_rows = KeyRows::of(o.v, o.v_strides, p.head_dim_v, bits_of(Kernel::kFormat));
  return launch_kernel<Kernel>(&decode_sm80_kernel<Config>, params, arguments, arguments.plan->ctas);
}

}  // namespace minfer::attention
