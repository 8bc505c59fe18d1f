// Attention forward of few queries over a cache for sm_80 onward: split-KV, cp.async + mma.sync, persistent. Keys and values in 16 bits, or
// fp8, int8 and int4 codes that become f16 in registers. The only decode kernel on A100, Ada and consumer Blackwell. After FlashDecoding
// (Dao et al., 2023).
//
// Warp roles. All warps are alike: key block i of a work item belongs to warp i % kWarps, which loads it, keeps a softmax and an output of
// its own, and is merged with the others only when the item ends.
// Pipelines. Each warp has a ring of kStages key blocks of its own in shared memory. A stage is loaded again as soon as it was read, so
// that loads run ahead of the computation, across the ends of work items, too. A load is a commit group of the warp, empty when none is
// left: the oldest stage is full when at most kStages - 1 groups are pending. A lane copies 16 bytes at a time, to where TMA would put them
// on sm_90. Rows behind the last key are not read; they become zeros.
// Shared memory. The rings, the partials of the warps at the end of an item, the queries. Two CTAs fit on an SM of 8.0 or 9.0 where the
// table says so, one into the 99 KiB of 8.6, 8.9 and 12.0.
// Distribution of the work: tile_scheduler.cuh. Mainloop: mainloop.cuh. Merging and the store: merge.cuh.
// Limits: head_dim a multiple of 8 up to kHeadDim, filled up with zeros; box_rows a power of two >= 8.
#pragma once

#include "attention/decode/arguments.cuh"
#include "attention/decode/boxes.cuh"
#include "attention/decode/mainloop.cuh"
#include "attention/decode/merge.cuh"
#include "attention/decode/queries.cuh"
#include "attention/decode/scales.cuh"
#include "attention/shared/clear_rows.cuh"
#include "attention/shared/launch_kernel.cuh"
#include "attention/shared/paged_rows.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "common/opaque.cuh"
#include "cutlass/cutlass.h"
#include "minfer/types.h"

namespace minfer::attention {

struct DecodeSm80Params : DecodeParams {
  PagedRows key_rows, value_rows;
};

/// The warps' partials are merged 64 elements at a time: that leaves more shared memory to the rings.
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
  using Traits::kCodeBytes, Traits::kInt4, Traits::kMaxRowTiles, Traits::kRowBytes, Traits::kScaleBytes, Traits::kScales, Traits::kTileN;
  using Traits::kStages, Traits::kWarps;
  using typename Traits::TileScheduler, typename Traits::Queries, typename Traits::KeyBlockAddress;
  using Boxes = DecodeBoxes<TileScheduler>;
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
  static_assert(kWarps * (kTileN / 8) <= 32, "a warp's next key block is in the next batch of boxes");

  /// Loads a warp's key blocks into its ring, ahead of the computation by all stages but the one that is being read.
  struct Loader {
    Params const& params;
    uint32_t codes, scales;  // addresses of the warp's first stage
    TileScheduler scheduler;
    DecodeWorkItem work;
    Boxes boxes;
    int block, end;  // key blocks of the work item
    uint32_t stage;  // the stage that is filled next; while the ring is full, the oldest one
    int warp, lane;

    CUTLASS_DEVICE Loader(Params const& params, SharedStorage& storage, TileScheduler const& scheduler, int warp, int lane)
        : params(params),
          codes(shared_address(storage.codes[warp])),
          scales(shared_address(storage.scales[warp])),
          scheduler(scheduler),
          block(0),
          end(0),
          stage(0),
          warp(warp),
          lane(lane) {
      work.batch = 0;  // >= 0: work items may be left
#pragma unroll 1
      for (int s = 0; s < kStages; ++s) load_next();
    }

    CUTLASS_DEVICE KeyBlockAddress oldest() const {
      uint32_t const keys = codes + stage * (2 * kCodeBytes);
      return {keys, keys + kCodeBytes, scales + stage * kScaleBytes};
    }

    CUTLASS_DEVICE void load_next() {
      while (block >= end && work.batch >= 0) {
        work = scheduler.take();
        if (work.batch < 0) break;
        int const codes_end = TileScheduler::codes_end(params, work.seqlen_k);
        block = work.block_begin + warp;
        end = work.block_end < codes_end ? work.block_end : codes_end;
        if (block < end) boxes = Boxes(params, work, block, lane);
      }
      if (block < end) {
        load();
        block += kWarps;
      }
      commit_copies();
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }

    CUTLASS_DEVICE void load() {
      constexpr int kVectors = kRowBytes / 16, kAtOnce = 32 / kVectors;  // vectors of a row; rows at a time
      static_assert(32 % kVectors == 0 && kTileN % kAtOnce == 0);
      int lane = this->lane;
      make_opaque(lane);  // addresses are computed anew for each key block: kept, they would be spilled
      int const first_box = block * params.boxes_of_block, vector = lane % kVectors, lane_row = lane / kVectors;
      boxes.advance_to(params, first_box, lane);
      int const readable = TileScheduler::keys_in_codes(params, work.seqlen_k) - block * kTileN;  // rows behind the last key are not read
      int const key_bytes = params.key_rows.vector_bytes(16 * vector), value_bytes = params.value_rows.vector_bytes(16 * vector);
      KeyBlockAddress const to = oldest();
      auto const copy_row = [&](int page, int token, char const* key, char const* value) {
        bool const inside = token < readable && params.has(page);
        copy_async_16(Mainloop::KeyBlock::address_of(params, to.keys, token, vector), key + 16 * vector, inside ? key_bytes : 0);
        copy_async_16(Mainloop::KeyBlock::address_of(params, to.values, token, vector), value + 16 * vector, inside ? value_bytes : 0);
      };
      if (params.boxes_of_block == 1) {
        int const page = boxes.page_of(first_box), row = boxes.row_of(first_box) + lane_row;
        char const* key = params.key_rows.at(page, row, work.kv_head);
        char const* value = params.value_rows.at(page, row, work.kv_head);
#pragma unroll 2
        for (int first = 0; first < kTileN; first += kAtOnce) {
          copy_row(page, first + lane_row, key, value);
          key += kAtOnce * params.key_rows.token_bytes;
          value += kAtOnce * params.value_rows.token_bytes;
        }
      } else {
        int const in_box = params.box_rows - 1, shift = 31 - __clz(params.box_rows);
#pragma unroll 2
        for (int first = 0; first < kTileN; first += kAtOnce) {
          int const token = first + lane_row, box = first_box + (token >> shift);
          int const page = boxes.page_of(box), row = boxes.row_of(box) + (token & in_box);
          copy_row(page, token, params.key_rows.at(page, row, work.kv_head), params.value_rows.at(page, row, work.kv_head));
        }
      }
      if constexpr (kScales) {
        Scales::template load<0, false>(params, to.scales, work.kv_head, boxes, first_box, lane);
        Scales::template load<1, false>(params, to.scales, work.kv_head, boxes, first_box, lane);
      }
    }
  };

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    int const thread = int(threadIdx.x);
#if __CUDA_ARCH__ >= 900
    allow_dependent_launch();
#endif
    if constexpr (kInt4) {  // loads write nothing for channels and groups that the cache does not have
      for (int i = thread; i < kWarps * kStages * kScaleBytes / 16; i += kThreads) {
        reinterpret_cast<uint4*>(&storage.scales[0][0][0])[i] = make_uint4(0, 0, 0, 0);
      }
    }
#if __CUDA_ARCH__ >= 900
    wait_for_predecessor();
#endif
    if (thread == 0) storage.merge.stamp = new_stamp(params.nonce);
    TileScheduler::build(storage.sequences, params, thread, kThreads);
    __syncthreads();
    clear_rows_outside_sequences(params, thread, kThreads);
    if (params.row_tiles == 1) {
      consume<1>(params, storage, thread);
    } else if constexpr (kMaxRowTiles == 2) {
      consume<2>(params, storage, thread);
    }
  }

  template <int kRowTiles>
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int thread) {
    int const lane = thread % 32;
    int const warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // the compiler then knows that all lanes hold the same value
    TileScheduler scheduler(params, storage.sequences);
    Loader loader(params, storage, scheduler, warp, lane);
    auto const block_at = [&](int) {
      wait_for_copies<kStages - 1>();
      __syncwarp();
      return loader.oldest();
    };
    auto const release = [&](int) {
      __syncwarp();
      loader.load_next();
    };
    DecodeWorkItem const& work = storage.queries.work;  // kept there, and not in registers, during the mainloop
    for (DecodeWorkItem next = scheduler.take(); next.batch >= 0; next = scheduler.take()) {
      DecodeQueries<Traits>::load(params, next, storage.queries, lane, [] {}, warp, kWarps);
      if (thread == 0) storage.queries.work = next;
      __syncthreads();
      typename Mainloop::template State<kRowTiles> state;
      uint32_t const room = shared_address(storage.merge.output[warp]);
      Mainloop::compute(params, room, work, storage.queries, state, warp, lane, block_at, release);
      Merge::finish(params, storage.merge, work, state, warp, lane);
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
  params.key_rows = PagedRows::of(o.k, o.k_strides, p.head_dim, bits_of(Kernel::kFormat));
  params.value_rows = PagedRows::of(o.v, o.v_strides, p.head_dim_v, bits_of(Kernel::kFormat));
  return launch_kernel<Kernel>(&decode_sm80_kernel<Config>, params, arguments, arguments.plan->ctas);
}

}  // namespace minfer::attention
