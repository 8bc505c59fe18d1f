// Attention forward for sm_90a, few queries over a cache: split-KV, TMA + mma.sync, persistent, warp specialised. 16-bit keys and values, or
// fp8, int8 and int4 codes that become f16 in registers. After FlashDecoding (Dao et al., 2023).
//
// Bytes are the cost, so all is arranged around a ring of loads that never runs dry.
// Warp roles. Warps 0, 2 and 3 fill the ring with slices of K and V (kSlice tokens each) and their scales: with scales, codes by warp 0, else K
// and V by two. Warp 1 brings the queries of the next piece in the order of B operands. Warps 4 to 11 are the consumers: slice i of a piece, or
// where a slice has parts, part i, is warp i % 8's, which keeps a softmax and an output of its own; they meet when the piece ends.
// Pipelines. ring: full (the bytes of two TMA loads, the copies of scales), empty (its warp), and a count of the slices that were asked for.
// queries: two slots, full (warp 1), empty (each consumer warp).
// Pieces, and who merges those of a unit: decode_pieces.cuh. What a warp does with a slice: decode_mainloop.cuh.
#pragma once

#include <algorithm>

#include "attention/decode/arguments.cuh"
#include "attention/decode/boxes.cuh"
#include "attention/decode/mainloop.cuh"
#include "attention/decode/merge.cuh"
#include "attention/decode/queries.cuh"
#include "attention/decode/scales.cuh"
#include "attention/shared/launch_kernel.cuh"
#include "attention/shared/outside_rows.cuh"
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
  using Traits::k16Bit, Traits::kBoxes, Traits::kCodeBytes, Traits::kFormat, Traits::kHeadDim, Traits::kInt4, Traits::kMaxColumns;
  using Traits::kRowBytes, Traits::kScaleBytes, Traits::kScales, Traits::kSlice, Traits::kStages, Traits::kSwizzle, Traits::kWarps;
  using typename Traits::Element, typename Traits::Params, typename Traits::Pieces, typename Traits::Queries, typename Traits::SliceAddress;
  static constexpr int kThreads = 384;
  static constexpr bool kTogether = !kScales && kHeadDim <= 128;  // loads and queries: see produce()
  // Producers that also quantise queries take more.
  static constexpr int kProducerRegisters = kTogether && !k16Bit ? 104 : 88, kConsumerRegisters = kTogether && !k16Bit ? 200 : 208;
  static constexpr int kPrefetched = 4;  // slices at most, into L2 before the launch's predecessor has finished
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
        EmptyBarrier::init(&storage.empty[s], Mainloop::kShared);
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
    if (thread == kThreads - 1) storage.merge.stamp = new_stamp(params.nonce);
    prefetch_lengths(params, thread);
    __syncthreads();
    if (!Pieces::can_guess(params)) {
      wait_for_predecessor();
      Pieces::build(storage.sequences, params, thread, kThreads);
    }
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      int const lane = thread % 32;
      // Loops of producers are chains of a few instructions: the base of addresses stays in a register, and the compiler knows it for a warp's.
      uint32_t const base = __shfl_sync(0xffffffffu, shared_address(smem), 0);
      SharedStorage& storage = *static_cast<SharedStorage*>(__cvta_shared_to_generic(base));
      int const role = warp == 1 ? kQueries : warp == 0 ? 0 : warp - 1;
      if constexpr (kTogether) {
        if (warp < 3) produce<Roles::kAll>(params, storage, lane, role);
      } else if (role == kQueries) {
        produce<Roles::kQueries>(params, storage, lane, role);
      } else if (kScales || warp < 3) {
        produce<Roles::kLoaders>(params, storage, lane, role);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      wait_for_predecessor();
      clear_rows_outside(params, thread - 128, Traits::kConsumerThreads);
      if (params.columns == 1) {
        consume<1>(params, storage);
      } else if constexpr (kMaxColumns == 2) {
        consume<2>(params, storage);
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
    if constexpr (Traits::kFormat == WeightFormat::kFp8E4M3) {
      if (thread == 97) prefetch(params.k_scale);
      if (thread == 98) prefetch(params.v_scale);
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

  using Boxes = DecodeBoxes<Pieces>;

  static constexpr int kQueries = 3;  // a role
  /// What a warp loads of each slice. With scales role 0 has the codes of keys and values, 1 and 2 the scales of keys and of values; else role 0
  /// has keys and 1 values. One class, for warps that share their instructions fetch them once.
  struct Loader {
    using Scales = DecodeScales<Traits>;
    using Place = uint2;  // page and row of a box, or the address of its scales
    Params const& params;
    SharedStorage& storage;
    int const lane, role;
    bool const elected, simple;  // simple: a box a slice, a load each
    int const row_shift;
    uint64_t hint;
    int kv_head;
    uint32_t issued = 0;
    Place own;   // of this lane's box
    bool whole;  // all pages of the window's boxes are there

    CUTLASS_DEVICE Loader(Params const& params, SharedStorage& storage, int lane, int role)
        : params(params),
          storage(storage),
          lane(lane),
          role(role),
          elected(cute::elect_one_sync()),
          simple(params.boxes_of_slice == 1 && params.k_loads == 1 && params.v_loads == 1),
          row_shift(kSwizzle < 128 ? params.row_shift : 0) {
      using Hint = cute::TMA::CacheHintSm90;
      hint = uint64_t(params.seqlen_q * params.group > 8 * params.columns ? Hint::EVICT_NORMAL : Hint::EVICT_FIRST);
    }
    CUTLASS_DEVICE bool has_scales() const { return kScales && role > 0; }

    /// Of whole slices that are a box: what a predecessor leaves of the memory's rate.
    CUTLASS_DEVICE void prefetch(DecodePiece const& piece, Boxes const& boxes, int slices) {
      if (!has_scales()) {
        look(piece, boxes);
        for (int slice = piece.slice_begin; simple && slice < piece.slice_begin + slices && slice / 32 == boxes.window; ++slice) {
          Place const place = find(slice);
          if (!elected) continue;
          auto const prefetch = [&](CUtensorMap const& map) {
            cute::SM90_TMA_LOAD_5D::PREFETCH::copy(&map, 0, int(place.y), 0, kv_head, int(place.x));
          };
          prefetch(kScales || role == 0 ? params.k : params.v);
          if (kScales) prefetch(params.v);
        }
      } else if (params.boxes_of_slice == 1) {
        if (role == 1) Scales::template prefetch<0>(params, piece.kv_head, boxes, piece.slice_begin, slices, lane);
        if (role == 2) Scales::template prefetch<1>(params, piece.kv_head, boxes, piece.slice_begin, slices, lane);
      }
    }
    /// At another window of boxes.
    CUTLASS_DEVICE void look(DecodePiece const& piece, Boxes const& boxes) {
      kv_head = piece.kv_head;
      own = make_uint2(uint32_t(boxes.page), uint32_t(boxes.row >> row_shift));
      if (has_scales()) {
        whole = __all_sync(0xffffffffu, params.has(boxes.page));
        uint64_t const from = reinterpret_cast<uint64_t>(role == 1 ? Scales::template source_of<0>(params, kv_head, boxes.page, boxes.row)
                                                                   : Scales::template source_of<1>(params, kv_head, boxes.page, boxes.row));
        own = make_uint2(uint32_t(from), uint32_t(from >> 32));
      }
    }
    CUTLASS_DEVICE Place find(int box) const {
      return make_uint2(__shfl_sync(0xffffffffu, own.x, box & 31), __shfl_sync(0xffffffffu, own.y, box & 31));
    }
    /// The slices from `slice` to `end`, which are of one window.
    CUTLASS_DEVICE void load(Boxes const& boxes, int slice, int end, uint32_t& stage, uint32_t& phase) {
      auto const each = [&](auto const& load) {
#pragma unroll 1
        for (; slice < end; ++slice) {
          Place const place = find(slice * params.boxes_of_slice);
          EmptyBarrier::wait(&storage.empty[stage], phase);
          load(place);
          if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
          }
        }
      };
      if (!has_scales()) each([&](Place const& place) { load_codes(place, slice, stage); });
      if constexpr (kScales) {
        if (role == 1) each([&](Place const& place) { load_scales<0>(boxes, place, slice, stage); });
        if (role == 2) each([&](Place const& place) { load_scales<1>(boxes, place, slice, stage); });
      }
    }
    template <int kWhich>
    CUTLASS_DEVICE void load_scales(Boxes const& boxes, Place const& place, int slice, uint32_t stage) const {
      uint32_t const to = shared_address(storage.scales[stage]);
      int const box = slice * params.boxes_of_slice;
      if (!whole) {
        Scales::template load<kWhich, false>(params, to, kv_head, boxes, box, lane);
      } else if (params.boxes_of_slice == 1) {
        Scales::template load_box<kWhich>(params, to, reinterpret_cast<char const*>(uint64_t(place.y) << 32 | place.x), lane);
      } else {
        Scales::template load<kWhich, true>(params, to, kv_head, boxes, box, lane);
      }
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&storage.full[stage])) : "memory");
    }
    CUTLASS_DEVICE void load_codes(Place const& place, int slice, uint32_t stage) {
      if (issued++ == 0) loads_under_way();
      if (elected) {
        FullBarrier::arrive_and_expect_tx(&storage.full[stage], kCodeBytes * (kScales ? 2 : 1));
        if (role == 0) {
          asm volatile("st.relaxed.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&storage.issued)), "r"(issued) : "memory");
        }
        if (simple) {
          copy(kScales ? 0 : role, stage, 0, 0, place);
          if (kScales) copy(1, stage, 0, 0, place);
        }
      }
#pragma unroll 1
      for (int i = simple ? params.boxes_of_slice : 0; i < params.boxes_of_slice; ++i) {
        Place const of_box = find(slice * params.boxes_of_slice + i);
        if (!elected) continue;
        auto const copy_columns = [&](int which) {
          int const loads = which == 0 ? params.k_loads : params.v_loads;
#pragma unroll
          for (int column = 0; column < kBoxes; ++column) {
            int const to = (column * kSlice + i * params.box_rows) * kSwizzle;
            if (column < loads) copy(which, stage, to, column * (kSwizzle / (k16Bit ? 2 : 1)), of_box);
          }
        };
        copy_columns(kScales ? 0 : role);
        if (kScales) copy_columns(1);
      }
    }
    CUTLASS_DEVICE void copy(int which, uint32_t stage, int to, int column, Place const& from) const {
      cute::SM90_TMA_LOAD_5D::copy(which == 0 ? &params.k : &params.v, &storage.full[stage], hint, storage.codes[stage][which] + to, column,
                                   int(from.y), 0, kv_head, int(from.x));
    }
    CUTLASS_DEVICE void finish() const {
      if (has_scales()) {
        asm volatile("cp.async.wait_all;" ::: "memory");
      } else if (issued == 0) {
        loads_under_way();
      }
    }
  };

  // ---- queries: warp 1 ----------------------------------------------------------------------------------------------------------

  /// Warp 1 and those that load codes: the first of these come after the queries', which would wait behind a whole ring of them.
  static CUTLASS_DEVICE void loads_under_way() { asm volatile("bar.sync 2, %0;" ::"n"(kScales ? 64 : 96) : "memory"); }

  /// Of the next piece, number `turn`; `loaded`: slices of those before it.
  static CUTLASS_DEVICE void bring_queries(Params const& params, SharedStorage& storage, DecodePiece const& piece, uint32_t turn,
                                           uint32_t loaded, int lane) {
    Queries& queries = storage.queries[turn % 2];
    EmptyBarrier::wait(&storage.empty_q[turn % 2], turn / 2 % 2 ^ 1);
    if (lane == 0) {
      queries.piece = piece;
      queries.loaded = loaded;
    }
    auto const under_way = [&] {
      if (turn == 0) loads_under_way();
    };
    if (piece.batch < 0) {
      under_way();
    } else {
      DecodeQueries<Traits>::bring(params, piece, queries, lane, under_way);
    }
    __syncwarp();
    if (lane == 0) EmptyBarrier::arrive(&storage.full_q[turn % 2]);
  }

  // ---- pieces: warps 0 to 3 -----------------------------------------------------------------------------------------------------

  enum class Roles { kAll, kLoaders, kQueries };
  /// Goes through the pieces of the CTA: a role is the Loader's, or kQueries. Roles share what is done with a piece: by then its instructions have
  /// to be fetched anew, which takes longer than they do. kRoles: those that do; where all would be spilled, queries go alone.
  /// Before the launch's predecessor has finished, the first piece is guessed; it is prefetched from boxes and slices that are right but for a
  /// predecessor that writes lengths or pages.
  template <Roles kRoles>
  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int lane, int role) {
    Loader loader(params, storage, lane, role);
    bool guess = Pieces::can_guess(params);
    Pieces pieces(params, storage.sequences, guess);
    uint32_t stage = 0, phase = 1;  // a fresh barrier's previous phase counts as passed
    bool const brings = kRoles == Roles::kAll ? role == kQueries : kRoles == Roles::kQueries;
    uint32_t turn = 0, loaded = 0;
#pragma unroll 1
    while (true) {
      DecodePiece const piece = pieces.take();
      int slice = 0, end = 0;
      Boxes boxes;
      if (piece.batch >= 0) {
        slice = __shfl_sync(0xffffffffu, piece.slice_begin, 0);  // that all lanes have the same, the compiler knows then
        end = slice + __shfl_sync(0xffffffffu, Pieces::codes_of(params, piece), 0);
      }
      bool const loads = !brings && slice < end;
      if (loads) boxes = Boxes(params, piece, slice, lane);
      if (guess) {
        guess = false;
        if (loads) loader.prefetch(piece, boxes, min(end - slice, kPrefetched));
        wait_for_predecessor();
        if (!pieces.confirm()) continue;
        if (loads) boxes.find_all(params, lane);
      }
      if (brings) bring_queries(params, storage, piece, turn++, loaded, lane);
      if (piece.batch < 0) break;
      loaded += uint32_t(end - slice);
#pragma unroll 1
      while (loads && slice < end) {
        boxes.advance_to(params, slice * params.boxes_of_slice, lane);
        loader.look(piece, boxes);
        int const stop = min(end, __shfl_sync(0xffffffffu, (boxes.window + 1) * 32 / params.boxes_of_slice, 0));
        loader.load(boxes, slice, stop, stage, phase);
        slice = stop;
      }
    }
    if (!brings) loader.finish();
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

  /// Again and again: what follows from it, kept for the next piece, would be spilled.
  static CUTLASS_DEVICE void ask_thread(int& warp, int& lane) {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    warp = int(thread / 32) - 4;
    lane = int(thread % 32);
  }

  template <int kCols>
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage) {
    for (uint32_t turn = 0;; ++turn) {
      Queries const& queries = storage.queries[turn % 2];
      EmptyBarrier::wait(&storage.full_q[turn % 2], turn / 2 % 2);
      DecodePiece const piece = same_in_warp(queries.piece);
      if (piece.batch < 0) return;
      int warp, lane;
      ask_thread(warp, lane);
      uint32_t const before = __shfl_sync(0xffffffffu, queries.loaded, 0) - uint32_t(piece.slice_begin);
      auto const slice_at = [&](int slice) {
        uint32_t const at = before + uint32_t(slice), stage = at % kStages;
        wait_for_slice(storage, at);
        return SliceAddress{shared_address(storage.codes[stage][0]), shared_address(storage.codes[stage][1]),
                            shared_address(storage.scales[stage])};
      };
      auto const release = [&](int slice) {
        __syncwarp();
        if (lane == 0) EmptyBarrier::arrive(&storage.empty[(before + uint32_t(slice)) % kStages]);
      };
      typename Mainloop::template State<kCols> state;
      Mainloop::take_piece(params, shared_address(storage.merge.output[warp]), piece, queries, state, warp, lane, slice_at, release);
      __syncwarp();
      if (lane == 0) EmptyBarrier::arrive(&storage.empty_q[turn % 2]);
      ask_thread(warp, lane);
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
  // Narrow rows that follow each other are loaded as rows of 128 bytes.
  auto const follow = [](int64_t head_dim, int64_t const(&strides)[3]) {
    return head_dim == Kernel::kHeadDim && strides[1] == Kernel::kRowBytes;
  };
  if (Kernel::kSwizzle < 128 && follow(p.head_dim, o.k_strides) && follow(p.head_dim_v, o.v_strides)) {
    params.row_shift = Kernel::kSwizzle == 64 ? 1 : 2;
  }
  auto const describe = [&](CUtensorMap* map, int32_t* loads, void const* base, int64_t head_dim, int64_t const(&strides)[3]) {
    int const bytes = Kernel::k16Bit ? 2 : 1;
    if (params.row_shift > 0) {
      int64_t const extents[5] = {128, p.page_size >> params.row_shift, 1, p.heads_kv, p.pages};
      int64_t const in_bytes[4] = {128, 128, p.heads_kv > 1 ? strides[2] : 128, p.pages > 1 ? strides[0] : 128};
      int const box[5] = {128, int(plan.box_rows) >> params.row_shift, 1, 1, 1};
      *loads = 1;
      return encode_tensor_map_rows(map, 5, base, extents, in_bytes, box, bytes, RowFetch::kAlone);
    }
    int64_t const columns = head_dim * bits_of(Kernel::kFormat) / 8 / bytes, width = Kernel::kSwizzle / bytes;
    bool const whole = columns % width == 0 && plan.box_rows == Kernel::kSlice;  // a box's column blocks lie box_rows apart
    auto const stride = [&](int64_t extent, int64_t elements) { return extent > 1 ? elements * bytes : 16; };
    int64_t const extents[5] = {whole ? width : columns, p.page_size, whole ? columns / width : 1, p.heads_kv, p.pages};
    int64_t const in_bytes[4] = {stride(p.page_size, strides[1]), whole ? Kernel::kSwizzle : 16, stride(p.heads_kv, strides[2]),
                                 stride(p.pages, strides[0])};
    int const box[5] = {int(width), int(plan.box_rows), whole ? Kernel::kBoxes : 1, 1, 1};
    *loads = whole ? 1 : Kernel::kBoxes;
    return encode_tensor_map_rows(map, 5, base, extents, in_bytes, box, bytes, RowFetch::kAlone);
  };
  if (p.pages > 0 && p.page_size > 0) {
    Status status = describe(&params.k, &params.k_loads, o.k, p.head_dim, o.k_strides);
    if (status.ok()) status = describe(&params.v, &params.v_loads, o.v, p.head_dim_v, o.v_strides);
    if (!status.ok()) return status;
  }
  set_decode_arguments<Kernel>(arguments, &params);
  return launch_kernel<Kernel>(&decode_sm90_kernel<Config>, params, arguments, plan.ctas);
}

}  // namespace minfer::attention
