// Attention forward for sm_90a, few queries over a cache: split-KV, TMA + mma.sync, persistent, warp specialised. 16-bit keys and values, or
// fp8, int8 and int4 codes that become f16 in registers. After FlashDecoding (Dao et al., 2023).
//
// Bytes are the cost, so all is arranged around a ring of loads that never runs dry.
// Warp roles. Warps 0, 2 and 3 fill the ring with slices of K and V (kSlice tokens each) and their scales: with scales, codes by warp 0, else K
// and V by two. Warp 1 brings the queries of the next piece in the order of B operands. Warps 4 to 11 are the consumers: slice i of a piece is
// warp i % 8's, which keeps a softmax and an output of its own; they meet when the piece ends.
// Pipelines. ring: full (the bytes of two TMA loads, the copies of scales), empty (its warp), and a count of the slices that were asked for.
// queries: two slots, full (warp 1), empty (each consumer warp).
// Pieces, and who merges those of a unit: decode_pieces.cuh. What a warp does with a slice: decode_mainloop.cuh.
#pragma once

#include <algorithm>
#include <atomic>

#include "attention/decode_mainloop.cuh"
#include "attention/decode_merge.cuh"
#include "attention/decode_queries.cuh"
#include "attention/launch.h"
#include "attention/outside_rows.cuh"
#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "common/tensor_map.h"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"
#include "minfer/types.h"

namespace minfer::attention {

template <class Config>
struct DecodeSm90Traits : DecodeTraits<Config, 8> {
  static constexpr bool kAsyncLoads = true;  // by TMA: what is stored into a stage is fenced before its next load
};

template <class Config>
struct DecodeSm90 : DecodeSm90Traits<Config> {
  using Traits = DecodeSm90Traits<Config>;
  using Mainloop = DecodeMainloop<Traits>;
  using Merge = DecodeMerge<Traits>;
  using Traits::k16Bit, Traits::kBoxes, Traits::kCodeBytes, Traits::kFormat, Traits::kGroupBytes, Traits::kHeadDim, Traits::kInt4;
  using Traits::kInt8, Traits::kMaxColumns, Traits::kMaxGroups, Traits::kScaleBytes, Traits::kScales, Traits::kSlice, Traits::kStages;
  using Traits::kSwizzle, Traits::kWarps;
  using typename Traits::Element, typename Traits::Params, typename Traits::Pieces, typename Traits::Queries, typename Traits::SliceAddress;
  static constexpr int kThreads = 384;
  static constexpr int kProducerRegisters = kHeadDim <= 128 ? 72 : 88, kConsumerRegisters = kHeadDim <= 128 ? 216 : 208;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  struct SharedStorage {
    alignas(1024) uint8_t codes[kStages][2][kCodeBytes];
    alignas(128) uint8_t scales[kStages][kScaleBytes];
    typename Merge::Storage merge;
    alignas(16) Queries queries[2];
    alignas(8) uint64_t full[kStages], empty[kStages], full_q[2], empty_q[2];
    uint32_t issued;  // slices whose loads have begun
    SequenceTable::Storage sequences;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (shared_address(smem) % 1024 != 0) __trap();
    int const thread = int(threadIdx.x), warp = cutlass::canonical_warp_idx_sync();
    allow_dependent_launch();
    if (warp == 0 && cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.k));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.v));
      for (int s = 0; s < kStages; ++s) {
        FullBarrier::init(&storage.full[s], kScales ? 1 + 64 : 2);
        EmptyBarrier::init(&storage.empty[s], 1);
      }
      for (int s = 0; s < 2; ++s) {
        EmptyBarrier::init(&storage.full_q[s], 1);
        EmptyBarrier::init(&storage.empty_q[s], kWarps);
      }
      storage.issued = 0;
      cutlass::arch::fence_barrier_init();
    }
    if constexpr (kInt4) {  // of channels and groups that the cache does not have, loads leave nothing
      for (int i = thread; i < kStages * kScaleBytes / 16; i += kThreads) {
        reinterpret_cast<uint4*>(&storage.scales[0][0])[i] = make_uint4(0, 0, 0, 0);
      }
      cutlass::arch::fence_view_async_shared();
    }
    prefetch_lengths(params, thread);
    __syncthreads();
    wait_for_predecessor();
    Pieces::build(storage.sequences, params, thread, kThreads);
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      int const lane = thread % 32;
      if (warp == 1) bring_queries(params, storage, lane);
      if constexpr (kScales) {
        if (warp == 0) load_codes<0, 1>(params, storage, lane);
        if (warp == 2) load_scales<0>(params, storage, lane);
        if (warp == 3) load_scales<1>(params, storage, lane);
      } else {
        if (warp == 0) load_codes<0, 0>(params, storage, lane);
        if (warp == 2) load_codes<1, 1>(params, storage, lane);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      clear_rows_outside(params, thread - 128, Traits::kConsumerThreads);
      if (params.columns == 1) {
        consume<1>(params, storage, thread - 128);
      } else if constexpr (kMaxColumns == 2) {
        consume<2>(params, storage, thread - 128);
      }
    }
  }

  /// Into L2, where also a predecessor's late writes go: what every load depends on.
  static CUTLASS_DEVICE void prefetch_lengths(Params const& params, int thread) {
    auto const prefetch = [](void const* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); };
    if (thread >= 64 && thread < 96 && (thread - 64) * 32 < params.batch) {
      prefetch(params.seq_lens + (thread - 64) * 32);
      if (params.cu_seqlens_q != nullptr) prefetch(params.cu_seqlens_q + (thread - 64) * 32);
    }
    // Queries too, a part by each CTA, ahead of the keys that would stand before them in line.
    if (int64_t const line = int64_t(blockIdx.x) * 128 + thread - 256; thread >= 256 && line * 128 < params.q_bytes) {
      prefetch(static_cast<char const*>(params.q) + line * 128);
    }
    if (thread == 96 && params.block_table != nullptr && int64_t(blockIdx.x) * 128 < params.block_table_bytes) {
      prefetch(reinterpret_cast<char const*>(params.block_table) + int64_t(blockIdx.x) * 128);
    }
  }

  // ---- keys and values: warps 0, 2, 3 -------------------------------------------------------------------------------------------

  /// Where the boxes of a piece lie: 32 of them, a lane each, and the 32 after them. Boxes whose keys nobody sees stand for their neighbours:
  /// their pages may be gone.
  struct Boxes {
    Params const& params;
    int batch, first, last, window, lane;
    int page, row, next_page, next_row;

    CUTLASS_DEVICE Boxes(Params const& params, DecodePiece const& piece, int slice, int lane)
        : params(params), batch(piece.batch), lane(lane) {
      Mask const mask(piece.seqlen_q, piece.seqlen_k, params.window_left, params.window_right);
      int const shift = 31 - __clz(params.box_rows);
      first = mask.begin(0) >> shift;
      last = (Pieces::in_codes(params, piece.seqlen_k) - 1) >> shift;
      window = slice * params.boxes_of_slice / 32;
      find(window, page, row);
      find(window + 1, next_page, next_row);
    }
    CUTLASS_DEVICE void find(int of_window, int& page, int& row) const {
      int const token = min(max(32 * of_window + lane, first), last) * params.box_rows;
      page = batch;
      row = token;
      if (params.block_table != nullptr) {
        int index;
        params.by_page(index, row, token);
        page = __ldg(params.block_table + batch * params.block_table_stride + index);
      }
    }
    CUTLASS_DEVICE void advance_to(int box) {
      if (box >> 5 == window) return;
      ++window;
      page = next_page;
      row = next_row;
      find(window + 1, next_page, next_row);
    }
  };

  /// Calls `load` with the piece, the place of its boxes, a slice and its stage, for all slices of codes in turn, each when its stage is empty.
  template <class Load>
  static CUTLASS_DEVICE void for_each_slice(Params const& params, SharedStorage& storage, int lane, Load const& load) {
    Pieces pieces(params, storage.sequences);
    int const boxes_of_slice = params.boxes_of_slice;
    uint32_t stage = 0, phase = 1;  // a fresh barrier's previous phase counts as passed
    for (DecodePiece piece = pieces.take(); piece.batch >= 0; piece = pieces.take()) {
      int const codes_end = Pieces::codes_end(params, piece.seqlen_k), end = piece.slice_end < codes_end ? piece.slice_end : codes_end;
      if (piece.slice_begin >= end) continue;
      Boxes boxes(params, piece, piece.slice_begin, lane);
      for (int slice = piece.slice_begin; slice < end; ++slice) {
        boxes.advance_to(slice * boxes_of_slice);
        EmptyBarrier::wait(&storage.empty[stage], phase);
        load(piece, boxes, slice, stage);
        if (++stage == kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
  }

  template <int kBytes>
  static CUTLASS_DEVICE void copy_async(uint32_t to, void const* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  }

  /// Scales of a slice's keys (kWhich = 0) or values; the stage is full when they are there, too.
  template <int kWhich>
  static CUTLASS_DEVICE void load_scales(Params const& params, SharedStorage& storage, int lane) {
    for_each_slice(params, storage, lane, [&](DecodePiece const& piece, Boxes const& boxes, int slice, uint32_t stage) {
      load_scales_of<kWhich>(params, storage, piece, boxes, slice * params.boxes_of_slice, stage, lane);
    });
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  template <int kWhich>
  static CUTLASS_DEVICE void load_scales_of(Params const& params, SharedStorage& storage, DecodePiece const& piece, Boxes const& boxes,
                                            int first_box, uint32_t stage, int lane) {
    uint32_t const scales = shared_address(storage.scales[stage]);
    uint32_t const in_box = uint32_t(params.box_rows) - 1, shift = uint32_t(31 - __clz(params.box_rows));
    auto const page_at = [&](int token) { return int64_t(__shfl_sync(0xffffffffu, boxes.page, (first_box + (token >> shift)) & 31)); };
    auto const row_at = [&](int token) {
      return __shfl_sync(0xffffffffu, boxes.row, (first_box + (token >> shift)) & 31) + int(token & in_box);
    };
    if constexpr (kInt8) {
#pragma unroll
      for (int token = lane; token < (kSlice + 31) / 32 * 32; token += 32) {
        int64_t const from =
            page_at(token % kSlice) * params.k_scale_page + int64_t(piece.kv_head) * params.page_size + row_at(token % kSlice);
        if (token < kSlice) {
          auto const* const scale = static_cast<float const*>(kWhich == 0 ? params.k_scale : params.v_scale);
          copy_async<4>(scales + (kWhich * kSlice + token) * 4, scale + from);
        }
      }
    } else if constexpr (kWhich == 0) {
      int const group_shift = params.group_tokens == 64 ? 6 : 5, chunks = params.head_dim / 8;  // of 16 bytes
#pragma unroll
      for (int g = 0; g < kMaxGroups; ++g) {
        int const token = g << group_shift;
        if (token >= kSlice) break;
        int64_t const page = page_at(token), group = int64_t(piece.kv_head) * params.groups_of_page + (row_at(token) >> group_shift);
        auto const* const from = static_cast<__half const*>(params.k_scale) + page * params.k_scale_page + group * 2 * params.head_dim;
#pragma unroll
        for (int i = lane; i < kHeadDim / 4; i += 32) {
          if (i < 2 * chunks) {
            copy_async<16>(scales + g * kGroupBytes + (i < chunks ? i : kHeadDim / 8 + i - chunks) * 16, from + i * 8);
          }
        }
      }
    } else {
      constexpr int kChunks = kSlice / 8, kAtOnce = 32 / kChunks;  // of 8 tokens; planes at a time
      int const token = lane % kChunks * 8;
      int64_t const plane = int64_t(piece.kv_head) * 2 * params.groups_v + lane / kChunks;
      auto const* from =
          static_cast<__half const*>(params.v_scale) + page_at(token) * params.v_scale_page + plane * params.page_size + row_at(token);
      for (int p = lane / kChunks; p < 2 * params.groups_v; p += kAtOnce) {
        copy_async<16>(scales + kMaxGroups * kGroupBytes + (p * kChunks + lane % kChunks) * 16, from);
        from += kAtOnce * params.page_size;
      }
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&storage.full[stage])) : "memory");
  }

  /// Keys (kFirst = 0) or values (kLast = 1), or both.
  template <int kFirst, int kLast>
  static CUTLASS_DEVICE void load_codes(Params const& params, SharedStorage& storage, int lane) {
    using Hint = cute::TMA::CacheHintSm90;
    uint64_t const hint = uint64_t(params.seqlen_q * params.group > 8 * params.columns ? Hint::EVICT_NORMAL : Hint::EVICT_FIRST);
    int const boxes_of_slice = params.boxes_of_slice, box_rows = params.box_rows;
    bool const elected = cute::elect_one_sync(), simple = boxes_of_slice == 1 && params.k_loads == 1 && params.v_loads == 1;
    uint32_t issued = 0;
    for_each_slice(params, storage, lane, [&](DecodePiece const& piece, Boxes const& boxes, int slice, uint32_t stage) {
      if (issued++ == 0) loads_under_way();
      if (elected) {
        FullBarrier::arrive_and_expect_tx(&storage.full[stage], kCodeBytes * (kLast - kFirst + 1));
        if (kFirst == 0) {
          asm volatile("st.relaxed.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&storage.issued)), "r"(issued) : "memory");
        }
      }
      if (simple) {
        int const page = __shfl_sync(0xffffffffu, boxes.page, slice & 31), row = __shfl_sync(0xffffffffu, boxes.row, slice & 31);
        if (elected) {
          auto const load = [&](CUtensorMap const& map, int which) {
            cute::SM90_TMA_LOAD_5D::copy(&map, &storage.full[stage], hint, storage.codes[stage][which], 0, row, 0, piece.kv_head, page);
          };
          if (kFirst == 0) load(params.k, 0);
          if (kLast == 1) load(params.v, 1);
        }
      }
#pragma unroll 1
      for (int i = simple ? boxes_of_slice : 0; i < boxes_of_slice; ++i) {
        int const box = slice * boxes_of_slice + i;
        int const page = __shfl_sync(0xffffffffu, boxes.page, box & 31), row = __shfl_sync(0xffffffffu, boxes.row, box & 31);
        if (elected) {
          auto const load = [&](CUtensorMap const& map, int which, int loads) {
            uint8_t* const to = storage.codes[stage][which] + i * box_rows * kSwizzle;
#pragma unroll 1
            for (int column = 0; column < loads; ++column) {
              cute::SM90_TMA_LOAD_5D::copy(&map, &storage.full[stage], hint, to + column * (kSlice * kSwizzle),
                                           column * (kSwizzle / (k16Bit ? 2 : 1)), row, 0, piece.kv_head, page);
            }
          };
          if (kFirst == 0) load(params.k, 0, params.k_loads);
          if (kLast == 1) load(params.v, 1, params.v_loads);
        }
      }
    });
    if (issued == 0) loads_under_way();
  }

  // ---- queries: warp 1 ----------------------------------------------------------------------------------------------------------

  /// Warp 1 and those that load codes: the first of these come after the queries', which would wait behind a whole ring of them.
  static CUTLASS_DEVICE void loads_under_way() { asm volatile("bar.sync 2, %0;" ::"n"(kScales ? 64 : 96) : "memory"); }

  static CUTLASS_DEVICE void bring_queries(Params const& params, SharedStorage& storage, int lane) {
    Pieces pieces(params, storage.sequences);
    for (uint32_t turn = 0;; ++turn) {
      DecodePiece const piece = pieces.take();
      Queries& queries = storage.queries[turn % 2];
      EmptyBarrier::wait(&storage.empty_q[turn % 2], turn / 2 % 2 ^ 1);
      auto const loaded = [&] {
        if (turn == 0) loads_under_way();
      };
      if (piece.batch >= 0) {
        DecodeQueries<Traits>::bring(params, piece, queries, lane, loaded);
      } else {
        loaded();
      }
      if (lane == 0) queries.piece = piece;
      __syncwarp();
      if (lane == 0) EmptyBarrier::arrive(&storage.full_q[turn % 2]);
      if (piece.batch < 0) return;
    }
  }

  // ---- consumers: warps ---------------------------------------------------------------------------------------------------------

  /// A parity tells a phase from its neighbours only, and a warp may be a whole ring ahead of a neighbour's load that is late: it waits until
  /// its own has begun.
  static CUTLASS_DEVICE void wait_for_slice(SharedStorage& storage, uint32_t at) {
    uint32_t issued;
    do {
      asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(issued) : "r"(shared_address(&storage.issued)) : "memory");
    } while (issued <= at);
    FullBarrier::wait(&storage.full[at % kStages], at / kStages % 2);
  }

  template <int kCols>
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int thread) {
    int const warp = thread / 32, lane = thread % 32;
    uint32_t loaded = 0;  // slices of the pieces before this one
    for (uint32_t turn = 0;; ++turn) {
      Queries const& queries = storage.queries[turn % 2];
      EmptyBarrier::wait(&storage.full_q[turn % 2], turn / 2 % 2);
      DecodePiece const piece = queries.piece;
      if (piece.batch < 0) return;
      auto const slice_at = [&](int i) {
        uint32_t const stage = (loaded + uint32_t(i)) % kStages;
        wait_for_slice(storage, loaded + uint32_t(i));
        return SliceAddress{shared_address(storage.codes[stage][0]), shared_address(storage.codes[stage][1]),
                            shared_address(storage.scales[stage])};
      };
      auto const release = [&](int i) {
        __syncwarp();
        if (lane == 0) EmptyBarrier::arrive(&storage.empty[(loaded + uint32_t(i)) % kStages]);
      };
      typename Mainloop::template State<kCols> state;
      Mainloop::take_piece(params, shared_address(storage.merge.output[warp]), piece, queries, state, warp, lane, slice_at, release);
      int const codes_end = Pieces::codes_end(params, piece.seqlen_k), end = piece.slice_end < codes_end ? piece.slice_end : codes_end;
      if (end > piece.slice_begin) loaded += uint32_t(end - piece.slice_begin);
      __syncwarp();
      if (lane == 0) EmptyBarrier::arrive(&storage.empty_q[turn % 2]);
      Merge::finish(params, storage.merge, piece, state, warp, lane);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(DecodeSm90<Config>::kThreads, 1) decode_sm90_kernel(__grid_constant__ DecodeParams const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  DecodeSm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_decode_sm90(AttentionLaunchArguments const& arguments) {
  using Kernel = DecodeSm90<Config>;
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  AttentionPlan const& plan = *arguments.plan;
  DecodeParams params{};
  auto const describe = [&](CUtensorMap* map, int32_t* loads, void const* base, int64_t head_dim, int64_t const(&strides)[3]) {
    int const bytes = Kernel::k16Bit ? 2 : 1;
    int64_t const columns = head_dim * bits_of(Kernel::kFormat) / 8 / bytes, width = Kernel::kSwizzle / bytes;
    bool const whole = columns % width == 0 && plan.box_rows == Kernel::kSlice;  // a box's column blocks lie box_rows apart
    auto const stride = [&](int64_t extent, int64_t elements) { return extent > 1 ? elements * bytes : 16; };
    int64_t const extents[5] = {whole ? width : columns, p.page_size, whole ? columns / width : 1, p.heads_kv, p.pages};
    int64_t const in_bytes[4] = {stride(p.page_size, strides[1]), whole ? Kernel::kSwizzle : 16, stride(p.heads_kv, strides[2]),
                                 stride(p.pages, strides[0])};
    int const box[5] = {int(width), int(plan.box_rows), whole ? Kernel::kBoxes : 1, 1, 1};
    *loads = whole ? 1 : Kernel::kBoxes;
    return encode_tensor_map_rows(map, 5, base, extents, in_bytes, box, bytes);
  };
  if (p.pages > 0 && p.page_size > 0) {
    Status status = describe(&params.k, &params.k_loads, o.k, p.head_dim, o.k_strides);
    if (status.ok()) status = describe(&params.v, &params.v_loads, o.v, p.head_dim_v, o.v_strides);
    if (!status.ok()) return status;
  }
  params.q = o.q;
  params.q_bytes = o.q_strides[1] == p.heads_q * p.head_dim ? p.tokens_q * o.q_strides[1] * 2 : 0;
  params.q_batch = o.q_strides[0];
  params.q_row = o.q_strides[1];
  params.q_head = o.q_strides[2];
  params.out = o.out;
  params.out_row = p.heads_q * p.head_dim_v;
  params.out_batch = p.seqlen_q * params.out_row;
  params.lse = o.lse;
  params.lse_batch = o.lse_strides[0];
  params.lse_head = o.lse_strides[1];
  params.cu_seqlens_q = o.cu_seqlens_q;
  params.seq_lens = o.seq_lens;
  params.block_table = o.block_table;
  params.block_table_stride = o.block_table_stride;
  params.block_table_bytes = p.batch * o.block_table_stride * 4;
  params.page_size = int32_t(p.page_size);
  params.box_rows = int32_t(plan.box_rows);
  params.boxes_of_slice = int32_t(Kernel::kSlice / plan.box_rows);
  params.by_group = cutlass::FastDivmod(int(p.heads_q / p.heads_kv));
  params.by_page = cutlass::FastDivmod(int(std::max<int64_t>(p.page_size, 1)));
  params.by_lockstep = cutlass::FastDivmod(int(plan.lockstep));
  params.by_ranges = cutlass::FastDivmod(int(plan.ctas / plan.lockstep));
  params.batch = int32_t(p.batch);
  params.tokens_q = int32_t(p.tokens_q);
  params.heads_q = int32_t(p.heads_q);
  params.heads_kv = int32_t(p.heads_kv);
  params.group = int32_t(p.heads_q / p.heads_kv);
  params.seqlen_q = int32_t(p.seqlen_q);
  params.head_dim = int32_t(p.head_dim);
  params.head_dim_v = int32_t(p.head_dim_v);
  params.columns = int32_t(plan.columns);
  params.window_left = int32_t(p.window_left);
  params.window_right = int32_t(p.window_right);
  params.scale = o.scale;
  params.softcap = o.softcap;
  params.sinks = o.sinks;
  params.k_scale = o.k_scale;
  params.v_scale = o.v_scale;
  params.scale_stride = int32_t(p.scale_per_head);
  params.group_tokens = int32_t(p.group_tokens);
  params.groups_v = int32_t(p.groups_v);
  params.k_scale_page = p.heads_kv * (Kernel::kInt4 ? p.page_size / std::max<int64_t>(p.group_tokens, 1) * 2 * p.head_dim : p.page_size);
  params.v_scale_page = p.heads_kv * p.page_size * (Kernel::kInt4 ? 2 * p.groups_v : 1);
  params.groups_of_page = int32_t(p.group_tokens > 0 ? p.page_size / p.group_tokens : 0);
  params.k_residual = o.k_residual;
  params.v_residual = o.v_residual;
  params.num_splits = int32_t(p.num_splits);
  params.min_slices = int32_t(plan.min_slices);
  auto* const workspace = static_cast<char*>(arguments.workspace);
  params.partials = reinterpret_cast<float*>(workspace);
  params.states = reinterpret_cast<float2*>(workspace + plan.slots * 8 * plan.columns * Kernel::kHeadDim * 4);
  params.arrived = reinterpret_cast<unsigned long long*>(params.states + plan.slots * 8 * plan.columns);
  params.nonce = arguments.nonce;

  static std::atomic<uint64_t> shared_memory_allowed{0};
  if (cudaError_t const error =
          allow_shared_memory(reinterpret_cast<void const*>(&decode_sm90_kernel<Config>), Kernel::kSmemBytes, shared_memory_allowed);
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(plan.ctas));
  config.blockDim = dim3(unsigned(Kernel::kThreads));
  config.dynamicSmemBytes = size_t(Kernel::kSmemBytes);
  config.stream = arguments.stream;
  config.attrs = &attribute;
  config.numAttrs = arguments.programmatic_launch ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, &decode_sm90_kernel<Config>, params), "launch");
}

}  // namespace minfer::attention
