// Attention forward of few queries over a cache for sm_90a: split-KV, TMA + mma.sync, persistent, warp specialised. Keys and values in 16
// bits, or fp8, int8 and int4 codes that become f16 in registers. After FlashDecoding (Dao et al., 2023).
//
// Decode is bound by the bytes of the cache, so everything is arranged around a ring of loads that never runs empty.
// Warp roles. Warps 0, 2 and 3 are producers: they fill the ring with key blocks of kTileN tokens of K and V, and with their scales. In
// formats with scales, warp 0 loads codes and warps 2 and 3 the scales of K and of V; else warp 0 loads K and warp 2 V. Warp 1 loads the
// queries of the next work item and stores them as B operands. Warps 4 to 11 are the consumers: key block i of a work item (or share i,
// where several warps share a block) belongs to warp i % 8. Each keeps a softmax and an output of its own, which are merged when the item
// ends.
// Pipelines. ring: full by the bytes of TMA and the arrival of copied scales, empty by its warps, and a count of the key blocks whose loads
// have begun. queries: two stages, full by warp 1, empty by each consumer warp.
// Distribution of the work: tile_scheduler.cuh. Mainloop: mainloop.cuh. Merging and the store: merge.cuh.
// Limits: head_dim a multiple of 8 up to kHeadDim, filled up with zeros by TMA; box_rows a power of two >= 8.
#pragma once

#include <algorithm>

#include "attention/decode/arguments.cuh"
#include "attention/decode/boxes.cuh"
#include "attention/decode/mainloop.cuh"
#include "attention/decode/merge.cuh"
#include "attention/decode/queries.cuh"
#include "attention/decode/scales.cuh"
#include "attention/shared/clear_rows.cuh"
#include "attention/shared/launch_kernel.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "common/named_barrier.cuh"
#include "common/shared_barrier.cuh"
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
  static constexpr bool kAsyncLoads = true;  // by TMA: what threads store into a stage must be fenced before its next load
};

template <class Config>
struct DecodeSm90 : DecodeSm90Traits<Config> {
  using Traits = DecodeSm90Traits<Config>;
  using Mainloop = DecodeMainloop<Traits>;
  using Merge = DecodeMerge<Traits>;
  using Traits::k16Bit, Traits::kBoxes, Traits::kCodeBytes, Traits::kFormat, Traits::kHeadDim, Traits::kInt4, Traits::kMaxRowTiles;
  using Traits::kRowBytes, Traits::kScaleBytes, Traits::kScales, Traits::kTileN, Traits::kStages, Traits::kSwizzle, Traits::kWarps;
  using typename Traits::Element, typename Traits::Params, typename Traits::TileScheduler, typename Traits::Queries,
      typename Traits::KeyBlockAddress;
  static constexpr int kThreads = 384;
  static constexpr bool kTogether = !kScales && kHeadDim <= 128;  // one function loads keys, values and queries: see produce()
  // Producers that also convert queries need more registers.
  static constexpr int kProducerRegisters = kTogether && !k16Bit ? 104 : 88, kConsumerRegisters = kTogether && !k16Bit ? 200 : 208;
  static constexpr int kPrefetched =
      4;  // key blocks, at most, that are prefetched into L2 before the preceding kernel of the stream has finished
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  struct SharedStorage {
    alignas(1024) uint8_t codes[kStages][2][kCodeBytes];
    alignas(128) uint8_t scales[kStages][kScaleBytes];
    typename Merge::Storage merge;
    alignas(16) Queries queries[2];
    alignas(8) uint64_t full[kStages], empty[kStages], full_q[2], empty_q[2];
    uint32_t issued;  // key blocks whose loads have begun
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
        EmptyBarrier::init(&storage.empty[s], Mainloop::kSharedBy);
      }
      for (int s = 0; s < 2; ++s) {
        EmptyBarrier::init(&storage.full_q[s], 1);
        EmptyBarrier::init(&storage.empty_q[s], kWarps);
      }
      storage.issued = 0;
      cutlass::arch::fence_barrier_init();
    }
    if constexpr (kInt4) {  // loads write nothing for channels and groups that the cache does not have
      for (int i = thread; i < kStages * kScaleBytes / 16; i += kThreads) {
        reinterpret_cast<uint4*>(&storage.scales[0][0])[i] = make_uint4(0, 0, 0, 0);
      }
      cutlass::arch::fence_view_async_shared();
    }
    if (thread == kThreads - 1) storage.merge.stamp = new_stamp(params.nonce);
    prefetch_lengths(params, thread);
    __syncthreads();
    if (!TileScheduler::can_speculate(params)) {
      wait_for_predecessor();
      TileScheduler::build(storage.sequences, params, thread, kThreads);
    }
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      int const lane = thread % 32;
      // The producers' loops are chains of a few instructions: the base address stays in a register that the compiler knows to be uniform.
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
      clear_rows_outside_sequences(params, thread - 128, Traits::kConsumerThreads);
      if (params.row_tiles == 1) {
        consume<1>(params, storage);
      } else if constexpr (kMaxRowTiles == 2) {
        consume<2>(params, storage);
      }
    }
  }

  /// Prefetches what every load depends on into L2, where late writes of the preceding kernel go, too.
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
    // Queries, too, some by each CTA: they would otherwise queue behind the keys.
    if (int64_t const line = int64_t(blockIdx.x) * 128 + thread - 256; thread >= 256 && line * 128 < params.q_bytes) {
      prefetch(static_cast<char const*>(params.q) + line * 128);
    }
    if (thread == 96 && params.block_table != nullptr && int64_t(blockIdx.x) * 128 < params.block_table_bytes) {
      prefetch(reinterpret_cast<char const*>(params.block_table) + int64_t(blockIdx.x) * 128);
    }
  }

  // ---- keys and values: warps 0, 2, 3 -------------------------------------------------------------------------------------------

  using Boxes = DecodeBoxes<TileScheduler>;

  static constexpr int kQueries = 3;  // the role of warp 1
  /// Loads key blocks into the ring. With scales, role 0 loads the codes of keys and values, roles 1 and 2 the scales of keys and of
  /// values; else role 0 loads keys and role 1 values. It is one class for all roles, since warps that share their instructions fetch them
  /// once.
  struct Loader {
    using Scales = DecodeScales<Traits>;
    using Location = uint2;  // page and row of a box, or the address of its scales
    Params const& params;
    SharedStorage& storage;
    int const lane, role;
    bool const elected, simple;  // simple: a key block is one box and one load
    int const row_shift;
    uint64_t hint;
    int kv_head;
    uint32_t issued = 0;
    Location lane_box;  // of this lane's box in the batch
    bool whole;         // all pages of the batch are in the cache

    CUTLASS_DEVICE Loader(Params const& params, SharedStorage& storage, int lane, int role)
        : params(params),
          storage(storage),
          lane(lane),
          role(role),
          elected(cute::elect_one_sync()),
          simple(params.boxes_of_block == 1 && params.k_loads == 1 && params.v_loads == 1),
          row_shift(kSwizzle < 128 ? params.row_shift : 0) {
      using Hint = cute::TMA::CacheHintSm90;
      hint = uint64_t(params.seqlen_q * params.heads_per_kv > 8 * params.row_tiles ? Hint::EVICT_NORMAL : Hint::EVICT_FIRST);
    }
    CUTLASS_DEVICE bool has_scales() const { return kScales && role > 0; }

    /// Prefetches key blocks that are one box, with the memory bandwidth that the preceding kernel leaves unused.
    CUTLASS_DEVICE void prefetch(DecodeWorkItem const& work, Boxes const& boxes, int blocks) {
      if (!has_scales()) {
        read_locations(work, boxes);
        for (int block = work.block_begin; simple && block < work.block_begin + blocks && block / 32 == boxes.batch; ++block) {
          Location const location = find(block);
          if (!elected) continue;
          auto const prefetch = [&](CUtensorMap const& map) {
            cute::SM90_TMA_LOAD_5D::PREFETCH::copy(&map, 0, int(location.y), 0, kv_head, int(location.x));
          };
          prefetch(kScales || role == 0 ? params.k : params.v);
          if (kScales) prefetch(params.v);
        }
      } else if (params.boxes_of_block == 1) {
        if (role == 1) Scales::template prefetch<0>(params, work.kv_head, boxes, work.block_begin, blocks, lane);
        if (role == 2) Scales::template prefetch<1>(params, work.kv_head, boxes, work.block_begin, blocks, lane);
      }
    }
    /// Reads the locations of another batch of boxes.
    CUTLASS_DEVICE void read_locations(DecodeWorkItem const& work, Boxes const& boxes) {
      kv_head = work.kv_head;
      lane_box = make_uint2(uint32_t(boxes.page), uint32_t(boxes.row >> row_shift));
      if (has_scales()) {
        whole = __all_sync(0xffffffffu, params.has(boxes.page));
        uint64_t const from = reinterpret_cast<uint64_t>(role == 1 ? Scales::template source_of<0>(params, kv_head, boxes.page, boxes.row)
                                                                   : Scales::template source_of<1>(params, kv_head, boxes.page, boxes.row));
        lane_box = make_uint2(uint32_t(from), uint32_t(from >> 32));
      }
    }
    CUTLASS_DEVICE Location find(int box) const {
      return make_uint2(__shfl_sync(0xffffffffu, lane_box.x, box & 31), __shfl_sync(0xffffffffu, lane_box.y, box & 31));
    }
    /// Loads key blocks `block` to `end` - 1, whose boxes are in one batch.
    CUTLASS_DEVICE void load(Boxes const& boxes, int block, int end, uint32_t& stage, uint32_t& phase) {
      auto const each = [&](auto const& load) {
#pragma unroll 1
        for (; block < end; ++block) {
          Location const location = find(block * params.boxes_of_block);
          EmptyBarrier::wait(&storage.empty[stage], phase);
          load(location);
          if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
          }
        }
      };
      if (!has_scales() && simple) {
        each([&](Location const& location) { load_box(location, stage); });
      } else if (!has_scales()) {
        BoxLoads const loads(params, role);
        each([&](Location const&) { load_boxes(loads, block, stage); });
      }
      if constexpr (kScales) {
        auto const load_scales = [&](auto which) {  // a loop each, so that the usual ones are short
          if (!whole) {
            each([&](Location const&) { load_scales_of_boxes<which, false>(boxes, block, stage); });
          } else if (params.boxes_of_block == 1) {
            each([&](Location const& location) { load_scales_of_box<which>(location, stage); });
          } else {
            each([&](Location const&) { load_scales_of_boxes<which, true>(boxes, block, stage); });
          }
        };
        if (role == 1) load_scales(cute::Int<0>{});
        if (role == 2) load_scales(cute::Int<1>{});
      }
    }
    template <int kWhich>
    CUTLASS_DEVICE void load_scales_of_box(Location const& location, uint32_t stage) const {
      auto const* const from = reinterpret_cast<char const*>(uint64_t(location.y) << 32 | location.x);
      Scales::template load_box<kWhich>(params, shared_address(storage.scales[stage]), from, lane);
      arrive_with_copies(stage);
    }
    template <int kWhich, bool kAll>
    CUTLASS_DEVICE void load_scales_of_boxes(Boxes const& boxes, int block, uint32_t stage) const {
      Scales::template load<kWhich, kAll>(params, shared_address(storage.scales[stage]), kv_head, boxes, block * params.boxes_of_block,
                                          lane);
      arrive_with_copies(stage);
    }
    CUTLASS_DEVICE void arrive_with_copies(uint32_t stage) const { arrive_behind_copies(shared_address(&storage.full[stage])); }
    /// Before the loads of a key block's codes.
    CUTLASS_DEVICE void begin_block(uint32_t stage) {
      if (issued++ == 0) sync_first_loads();
      if (elected) {
        FullBarrier::arrive_and_expect_tx(&storage.full[stage], kCodeBytes * (kScales ? 2 : 1));
        if (role == 0) {
          asm volatile("st.relaxed.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&storage.issued)), "r"(issued) : "memory");
        }
      }
    }
    /// Loads a key block that is one box and one load.
    CUTLASS_DEVICE void load_box(Location const& location, uint32_t stage) {
      begin_block(stage);
      if (!elected) return;
      copy(kScales ? 0 : role, stage, 0, 0, location);
      if (kScales) copy(1, stage, 0, 0, location);
    }
    /// The loads of key blocks of several boxes. A shuffle keeps the numbers in registers: ptxas would read them from the parameters again
    /// for every box, and with pages of 16 tokens this loop's latency is what bounds the kernel.
    struct BoxLoads {
      int boxes, box_bytes, columns[kScales ? 2 : 1];  // columns: loads of a box

      CUTLASS_DEVICE BoxLoads(Params const& params, int role) {
        auto const keep = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };
        boxes = keep(params.boxes_of_block);
        box_bytes = keep(params.box_rows * kSwizzle);
        columns[0] = keep(kScales || role == 0 ? params.k_loads : params.v_loads);
        if constexpr (kScales) columns[1] = keep(params.v_loads);
      }
    };
    /// Loads a key block of several boxes, or of several loads for one box. The locations of kAtOnce boxes are read together.
    CUTLASS_DEVICE void load_boxes(BoxLoads const& loads, int block, uint32_t stage) {
      constexpr int kAtOnce = 4;
      begin_block(stage);
      int const first = block * loads.boxes;
#pragma unroll 1
      for (int i = 0; i < loads.boxes; i += kAtOnce) {
        Location boxes[kAtOnce];  // some behind the block's last
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) boxes[j] = find(first + i + j);
        if (!elected) continue;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (i + j >= loads.boxes) break;
          int const to = (i + j) * loads.box_bytes;
#pragma unroll
          for (int which = 0; which < (kScales ? 2 : 1); ++which) {
#pragma unroll
            for (int column = 0; column < kBoxes; ++column) {
              if (column >= loads.columns[which]) continue;
              copy(kScales ? which : role, stage, column * kTileN * kSwizzle + to, column * (kSwizzle / (k16Bit ? 2 : 1)), boxes[j]);
            }
          }
        }
      }
    }
    CUTLASS_DEVICE void copy(int which, uint32_t stage, int to, int column, Location const& from) const {
      cute::SM90_TMA_LOAD_5D::copy(which == 0 ? &params.k : &params.v, &storage.full[stage], hint, storage.codes[stage][which] + to, column,
                                   int(from.y), 0, kv_head, int(from.x));
    }
    CUTLASS_DEVICE void finish() const {
      if (has_scales()) {
        asm volatile("cp.async.wait_all;" ::: "memory");
      } else if (issued == 0) {
        sync_first_loads();
      }
    }
  };

  // ---- queries: warp 1 ----------------------------------------------------------------------------------------------------------

  /// Called by warp 1 when the first queries' loads are issued, and by the warps that load codes before their first load: queries would
  /// otherwise wait behind a whole ring of codes.
  static CUTLASS_DEVICE void sync_first_loads() { NamedBarrier<kScales ? 64 : 96>{2}.sync(); }

  /// Loads the queries of the CTA's work item number `iteration`. loaded: key blocks of the items before it.
  static CUTLASS_DEVICE void load_queries(Params const& params, SharedStorage& storage, DecodeWorkItem const& work, uint32_t iteration,
                                          uint32_t loaded, int lane) {
    Queries& queries = storage.queries[iteration % 2];
    EmptyBarrier::wait(&storage.empty_q[iteration % 2], iteration / 2 % 2 ^ 1);
    if (lane == 0) {
      queries.work = work;
      queries.loaded = loaded;
    }
    auto const issued = [&] {
      if (iteration == 0) sync_first_loads();
    };
    if (work.batch < 0) {
      issued();
    } else {
      DecodeQueries<Traits>::load(params, work, queries, lane, issued);
    }
    __syncwarp();
    if (lane == 0) EmptyBarrier::arrive(&storage.full_q[iteration % 2]);
  }

  // ---- work items: warps 0 to 3 -----------------------------------------------------------------------------------------------------

  enum class Roles { kAll, kLoaders, kQueries };
  /// Walks the CTA's work items in a producer warp. role: of the Loader, or kQueries. The roles in kRoles share the code for an item: by
  /// the time of the next item its instructions have to be fetched anew, which takes longer than to execute them. Where all roles together
  /// would spill registers, the queries have a function of their own.
  /// Before the preceding kernel of the stream has finished, the first item is read speculatively and prefetched: it is right unless that
  /// kernel writes lengths or pages.
  template <Roles kRoles>
  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int lane, int role) {
    Loader loader(params, storage, lane, role);
    bool speculative = TileScheduler::can_speculate(params);
    TileScheduler scheduler(params, storage.sequences, speculative);
    uint32_t stage = 0, phase = 1;  // a fresh barrier's previous phase counts as passed
    bool const loads_queries = kRoles == Roles::kAll ? role == kQueries : kRoles == Roles::kQueries;
    uint32_t iteration = 0, loaded = 0;
#pragma unroll 1
    while (true) {
      DecodeWorkItem const work = scheduler.take();
      int block = 0, end = 0;
      Boxes boxes;
      if (work.batch >= 0) {
        block = __shfl_sync(0xffffffffu, work.block_begin, 0);  // the compiler then knows that all lanes hold the same value
        end = block + __shfl_sync(0xffffffffu, TileScheduler::code_blocks(params, work), 0);
      }
      bool const loads = !loads_queries && block < end;
      if (loads) boxes = Boxes(params, work, block, lane);
      if (speculative) {
        speculative = false;
        if (loads) loader.prefetch(work, boxes, min(end - block, kPrefetched));
        wait_for_predecessor();
        if (!scheduler.validate()) continue;
        if (loads) boxes.find_all(params, lane);
      }
      if (loads_queries) load_queries(params, storage, work, iteration++, loaded, lane);
      if (work.batch < 0) break;
      if constexpr (kInt4) {
        if (loads_queries && work.block_end > TileScheduler::codes_end(params, work.seqlen_k)) {
          DecodeResidual<Traits>::prefetch(params, work, TileScheduler::keys_in_codes(params, work.seqlen_k), lane);
        }
      }
      loaded += uint32_t(end - block);
#pragma unroll 1
      while (loads && block < end) {
        boxes.advance_to(params, block * params.boxes_of_block, lane);
        loader.read_locations(work, boxes);
        int const stop = min(end, __shfl_sync(0xffffffffu, (boxes.batch + 1) * 32 / params.boxes_of_block, 0));
        loader.load(boxes, block, stop, stage, phase);
        block = stop;
      }
    }
    if (!loads_queries) loader.finish();
  }

  // ---- consumers: warps ---------------------------------------------------------------------------------------------------------

  /// Waits for the CTA's key block number `at`. A barrier's parity only tells a phase from its neighbours, and a warp may be a whole ring
  /// ahead of another warp's load that is late: so it first waits until its own load has begun.
  static CUTLASS_DEVICE void wait_for_block(SharedStorage& storage, uint32_t at) {
    uint32_t issued;
    do {
      asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(issued) : "r"(shared_address(&storage.issued)) : "memory");
    } while (issued <= at);
    FullBarrier::wait(&storage.full[at % kStages], at / kStages % 2);
  }

  /// Reads the thread's number anew: what is computed from it, kept for the next work item, would be spilled.
  static CUTLASS_DEVICE void read_thread(int& warp, int& lane) {
    uint32_t const thread = uint32_t(reread_thread_index());
    warp = int(thread / 32) - 4;
    lane = int(thread % 32);
  }

  template <int kRowTiles>
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage) {
    for (uint32_t iteration = 0;; ++iteration) {
      Queries const& queries = storage.queries[iteration % 2];
      EmptyBarrier::wait(&storage.full_q[iteration % 2], iteration / 2 % 2);
      DecodeWorkItem const work = same_in_warp(queries.work);
      if (work.batch < 0) return;
      int warp, lane;
      read_thread(warp, lane);
      uint32_t const before = __shfl_sync(0xffffffffu, queries.loaded, 0) - uint32_t(work.block_begin);
      auto const block_at = [&](int block) {
        uint32_t const at = before + uint32_t(block), stage = at % kStages;
        wait_for_block(storage, at);
        return KeyBlockAddress{shared_address(storage.codes[stage][0]), shared_address(storage.codes[stage][1]),
                               shared_address(storage.scales[stage])};
      };
      auto const release = [&](int block) {
        __syncwarp();
        if (lane == 0) EmptyBarrier::arrive(&storage.empty[(before + uint32_t(block)) % kStages]);
      };
      typename Mainloop::template State<kRowTiles> state;
      Mainloop::compute(params, shared_address(storage.merge.output[warp]), work, queries, state, warp, lane, block_at, release);
      __syncwarp();
      if (lane == 0) EmptyBarrier::arrive(&storage.empty_q[iteration % 2]);
      read_thread(warp, lane);
      Merge::finish(params, storage.merge, work, state, warp, lane);
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
  // Rows narrower than 128 bytes are loaded as rows of 128 bytes where they are contiguous.
  auto const contiguous = [](int64_t head_dim, int64_t const(&strides)[3]) {
    return head_dim == Kernel::kHeadDim && strides[1] == Kernel::kRowBytes;
  };
  if (Kernel::kSwizzle < 128 && contiguous(p.head_dim, o.k_strides) && contiguous(p.head_dim_v, o.v_strides)) {
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
    bool const whole = columns % width == 0 && plan.box_rows == Kernel::kTileN;  // a box's column blocks would lie box_rows apart
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
