// Epilogue of the sm_90 kernels: accumulators of one consumer warpgroup -> D.
//
// Fast path (16-bit D that TMA can address, C absent or a full matrix of D's type): registers -> stmatrix -> swizzled shared memory -> TMA
// store, in boxes of up to 64 contiguous outputs. C arrives by TMA in the very box buffer that D leaves from: it is requested before the
// mainloop, read with ldmatrix in the fragment's own layout, and overwritten in place. A gated D leaves in boxes of half the width.
// Both paths round at the same places, D = fma(beta, C, alpha * acc) + bias, so that a row's bits do not follow from which one its tensor
// takes: the intrinsics keep the compiler from fusing what one of them keeps apart.
// The arithmetic goes in one pass per term (scale, C, bias, activation) over a group of boxes, so that the run-time choices are a branch
// per group and each pass has 32 or more independent instructions: a branch per 8-column block cost more than the stores.
// Bias: each thread loads its share before the mainloop; after it the warpgroup exchanges them through shared memory.
// Operands of 8 bits have scales: one for each row, one for each column, or one for all, by which the accumulators are multiplied first.
// They are copied into shared memory while the tensor cores work. The 16-bit type of D, C and bias is a run-time choice there.
// General path (D of float32, int32 or codes, broadcast or float32 C, unaligned D): 64 x 32 accumulators at a time go through the same
// shared memory in fp32 and are finished by a rolled, coalesced loop.
//
// Boxes of a warpgroup, kChunks for each MMA tile mi of 64 rows, box = mi * kChunks + chunk:
//   no swap: 64 rows of m x kBoxColumns (64, 32 or 16) columns of n
//   swap:    kTileN rows of m x 64 columns of n (the MMA rows are n), one chunk
//   where the launch chooses the tile's columns, a chunk is kColumnStep of them, and the tile has as many chunks as it has of these
// Where the launch chooses the columns, the boxes are numbered by groups of chunks, then by MMA tile, then by chunk of the group, so that
// a narrow tile lacks the last numbers. It also lacks some where its chunks do not fill their last group: these count as stored, with no
// bytes, for a buffer is taken again when so many stores after its own have been committed.
// Shared memory of a box: rows of kBoxColumns, their 16-byte units in TMA's swizzle for that width. Buffers are a ring of kBuffers boxes.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cuda.h>

#include "common/named_barrier.cuh"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "gemm/epilogue.cuh"

namespace minfer::gemm {

struct EpilogueSm90Params {
  CUtensorMap tma_c, tma_d;
  EpilogueParams general;
  bool store_by_tma;  // fast path
  bool load_c_by_tma;
  int32_t columns;  // of a tile, in kernels whose launches choose them
};

/// Where operands have 8 bits.
struct ScaledEpilogueSm90Params : EpilogueSm90Params, ScaledOutput {};

template <class Config>
struct EpilogueSm90 {
  static constexpr bool kScaled = size_of(Config::kType) == 1;
  // Of accumulators, in 8-byte accesses (mainloop_columns_sm90.cuh), where sums of 8-bit numbers are added up.
  static constexpr bool kSwapsPairs = Config::kType == DataType::kE4M3 || (kScaled && Config::kFormat != WeightFormat::kDense);
  using Params = cute::conditional_t<kScaled, ScaledEpilogueSm90Params, EpilogueSm90Params>;
  using Element = cute::conditional_t<kScaled, AnyFloat16, Float16<kScaled ? DataType::kF16 : Config::kType>>;

  static constexpr bool kSwap = Config::kSwap;
  static constexpr int kWarpgroups = Config::kThreads / 128 - 1;                                    // consumers; one more is the producer
  static constexpr int kConsumers = Config::kSchedule == Schedule::kCooperative ? kWarpgroups : 1;  // of them, those that share a tile
  static constexpr int kMmaM = Config::kTileM / (64 * kConsumers);
  static constexpr int kTileN = Config::kTileN;
  static constexpr bool kChoosesColumns = Config::kColumnStep > 0;  // up to kTileN, which shared memory and registers are laid out for
  static constexpr int kBoxRows = !kSwap ? 64 : kChoosesColumns ? cute::max(Config::kColumnStep, 16) : kTileN;
  static constexpr int kStoredRows = kSwap && kChoosesColumns ? Config::kColumnStep : kBoxRows;  // at a time: a tile may end within a box
  static constexpr int kBoxColumns = kSwap             ? 64
                                     : kChoosesColumns ? Config::kColumnStep
                                                       : (kTileN % 64 == 0 ? 64 : (kTileN % 32 == 0 ? 32 : 16));
  static constexpr int kGatedColumns = kBoxColumns / 2;
  static constexpr int kRowBytes = kBoxColumns * 2;
  static constexpr int kBoxBytes = kBoxRows * kRowBytes;
  static constexpr int kChunkColumns = kSwap ? kBoxRows : kBoxColumns;  // a box's columns of the tile
  static constexpr int kChunks = kTileN / kChunkColumns;
  static constexpr int kBoxes = kMmaM * kChunks;                   // of a warpgroup
  static constexpr int kBoxValues = kBoxRows * kBoxColumns / 128;  // accumulators of a thread
  // Finished together: 64 spill beside more than 128 accumulators, and with three consumers, which have 160 registers a thread.
  static constexpr int kGroupColumns = (kScaled && kSwap) || kMmaM * kTileN / 2 > 128 || (kChoosesColumns && kWarpgroups == 3) ? 32 : 64;
  static constexpr int kGroupBox = kSwap && !kChoosesColumns ? kGroupColumns : kChunkColumns;
  static constexpr int kGroup = kGroupBox > kGroupColumns ? 1 : cute::min(kChunks, kGroupColumns / kGroupBox);  // in boxes
  static constexpr int kBuffers = Config::kEpilogueChunks;
  static constexpr bool kWarpsStore = kScaled && kBuffers == kBoxes;  // all of a tile's boxes leave at once, a share by each warp
  static constexpr int kGeneralColumns = kTileN >= 32 ? 32 : (kTileN >= 16 ? 16 : 8);
  static constexpr int kGeneralBytes = 64 * kGeneralColumns * 4;
  static constexpr int kRegionBytes = ((kBuffers * kBoxBytes > kGeneralBytes ? kBuffers * kBoxBytes : kGeneralBytes) + 1023) / 1024 * 1024;
  static constexpr int kRows = kMmaM * 64;                       // of a warpgroup's tile
  static constexpr int kBiasFloats = kSwap ? kRows : kTileN;     // the n of it
  static constexpr int kBiasValues = (kBiasFloats + 127) / 128;  // of a thread
  static_assert(kTileN % 8 == 0 && kBoxRows <= 256 && (kSwap || kTileN % kBoxColumns == 0));
  static_assert(kBuffers >= kGroup && kBuffers <= kBoxes && kBuffers <= 32);
  static_assert(!kChoosesColumns || kMmaM == 1 || kChunks % kGroup == 0, "boxes are numbered by whole groups of chunks");
  static_assert(kBoxBytes % (8 * kRowBytes) == 0, "every box starts on a whole period of its swizzle");

  struct TensorStorage {
    alignas(1024) char of[kWarpgroups][kRegionBytes];  // [consumer warpgroup]
  };
  struct UnscaledStorage {
    alignas(16) float bias[kWarpgroups][kBiasFloats];
    alignas(8) uint64_t c_full[kWarpgroups][kBuffers];
  };
  struct ScaledStorage : UnscaledStorage {
    alignas(16) float scales[kWarpgroups][kTileN + kRows];  // of the tile's columns, then of its rows
  };
  using PipelineStorage = cute::conditional_t<kScaled, ScaledStorage, UnscaledStorage>;

  Params const& params;
  char* buffers;  // of this warpgroup
  float* bias;    // of its tile
  float* scales;
  uint64_t* c_full;
  int thread;      // in the warpgroup
  int barrier_id;  // named barrier of the warpgroup
  uint32_t c_phase = 0;
  float bias_share[kBiasValues];

  __device__ EpilogueSm90(Params const& params, TensorStorage& boxes, PipelineStorage& small, int warpgroup, int thread) : params(params) {
    place(boxes, small, warpgroup, thread);
  }
  __device__ void place(TensorStorage& boxes, PipelineStorage& small, int warpgroup, int thread_of_warpgroup) {
    buffers = boxes.of[warpgroup];
    bias = small.bias[warpgroup];
    if constexpr (kScaled) scales = small.scales[warpgroup];
    c_full = &small.c_full[warpgroup][0];
    thread = thread_of_warpgroup;
    barrier_id = warpgroup + 1;
  }

  static __device__ void prefetch_tma_descriptors(Params const& params) {
    if (params.store_by_tma) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.tma_d));
    if (params.load_c_by_tma) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.tma_c));
  }
  static __device__ void init_barriers(PipelineStorage& small) {
    for (int w = 0; w < kWarpgroups; ++w) {
      for (int b = 0; b < kBuffers; ++b) cutlass::arch::ClusterTransactionBarrier::init(&small.c_full[w][b], 1);
    }
  }

  /// Conversions of D's, C's and the bias' 16-bit numbers.
  __device__ __forceinline__ Element element() const {
    if constexpr (kScaled) {
      return {params.bf16};
    } else {
      return {};
    }
  }
  __device__ void synchronize() const { NamedBarrier<128>{barrier_id}.sync(); }
  /// Of a tile.
  __device__ int columns() const { return kChoosesColumns ? params.columns : kTileN; }
  /// Box b is of this chunk and this MMA tile.
  static __device__ int box_chunk(int b) { return kChoosesColumns ? b / (kGroup * kMmaM) * kGroup + b % kGroup : b % kChunks; }
  static __device__ int box_mi(int b) { return kChoosesColumns ? b / kGroup % kMmaM : b / kChunks; }
  /// Whether a tile of this launch has the box.
  __device__ bool has_box(int b) const { return b < kBoxes && (!kChoosesColumns || box_chunk(b) * kChunkColumns < params.columns); }

  // Top left corner of box b in the caller's (m, n); tile_row and tile_column are of the kernel's own tile.
  static __device__ int box_m(int b, int tile_row, int tile_column, int warpgroup) {
    return kSwap ? tile_column + box_chunk(b) * kBoxRows : mma_row(box_mi(b), tile_row, warpgroup);
  }
  static __device__ int box_n(int b, int tile_row, int tile_column, int warpgroup) {
    return kSwap ? mma_row(box_mi(b), tile_row, warpgroup) : tile_column + box_chunk(b) * kBoxColumns;
  }
  // TMA's swizzle of the 16-byte units of a row of 128, 64, 32 or 16 bytes.
  template <int kBytes>
  static __device__ int swizzle(int unit, int row) {
    return unit ^ (kBytes == 128 ? row & 7 : kBytes == 64 ? row >> 1 & 3 : kBytes == 32 ? row >> 2 & 1 : 0);
  }
  static __device__ int mma_row(int mi, int tile_row, int warpgroup) { return tile_row + (mi * kConsumers + warpgroup) * 64; }

  __device__ void request_c(int b, int tile_row, int tile_column, int l, int warpgroup) {
    uint64_t* barrier = &c_full[b % kBuffers];
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(barrier, kBoxBytes);
    cute::SM90_TMA_LOAD_3D::copy(&params.tma_c, barrier, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                 buffers + b % kBuffers * kBoxBytes, box_n(b, tile_row, tile_column, warpgroup),
                                 box_m(b, tile_row, tile_column, warpgroup), l);
  }

  /// A warpgroup's rows of a tile: the tile's first row and column, and which 64-row blocks of it are the warpgroup's.
  struct Output {
    int row, column, l, row_group;
  };
  template <class Tile>
  __device__ Output locate(Tile const& tile, int row_group) const {
    return {tile.m() * Config::kTileM, tile.n() * columns(), tile.l(), row_group};
  }
  template <class SchedulerParams, class SchedulerStorage>
  static __device__ void begin(Params const&, SchedulerParams const&, SchedulerStorage const&, int, int) {}
  __device__ void prefetch(Output const& at) { prefetch(at.row, at.column, at.l, at.row_group); }
  template <class Accumulator>
  __device__ void store(Accumulator const& acc, Output const& at) {
    store(acc, at.row, at.column, at.l, at.row_group);
  }
  static __device__ bool issues_stores(int thread) { return thread == 0 || (kWarpsStore && thread % 32 == 0); }
  /// By the threads that issued the stores: shared memory must outlive the reads of the last of them.
  __device__ void store_tail() const { cute::tma_store_wait<0>(); }

  /// Before the mainloop of a tile this CTA owns: asks for C and bias while the tensor cores work.
  __device__ void prefetch(int tile_row, int tile_column, int l, int warpgroup) {
    if (params.load_c_by_tma && thread == 0) {
      cute::tma_store_wait<0>();  // the previous tile's stores have left the buffers
#pragma unroll 1
      for (int b = 0; b < kBuffers; ++b) {
        if (!kChoosesColumns || has_box(b)) request_c(b, tile_row, tile_column, l, warpgroup);
      }
#pragma unroll 1
      for (int b = kBuffers; b < kBoxes; ++b) {  // asked for when a buffer is free, by then out of L2
        if (kChoosesColumns && !has_box(b)) continue;
        cute::SM90_TMA_LOAD_3D::PREFETCH::copy(&params.tma_c, box_n(b, tile_row, tile_column, warpgroup),
                                               box_m(b, tile_row, tile_column, warpgroup), l);
      }
    }
    if (!params.store_by_tma) prefetch_general(tile_row, tile_column, l, warpgroup);
    if constexpr (kScaled) {
      if (!kWarpsStore || has_line_scales() || !is_plain()) request_scales(tile_row, tile_column, warpgroup);
    }
    if (params.store_by_tma && params.general.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kBiasValues; ++i) {
        int const at = thread + 128 * i;
        int const n = kSwap ? mma_row(at / 64, tile_row, warpgroup) + at % 64 : tile_column + at;
        float const share = at < kBiasFloats && n < params.general.n ? load_bias(element(), params.general, n) : 0.0f;
        if constexpr (!kScaled) {
          bias_share[i] = share;
        } else if (at < kBiasFloats) {  // at once: there is no register to keep it in
          bias[at] = share;
        }
      }
    }
  }

  /// Sends for the scales of a tile.
  __device__ void request_scales(int tile_row, int tile_column, int warpgroup) {
    if (!kWarpsStore || !is_plain()) synchronize();  // those of the last tile have been read, before its stores where all warps issue them
    auto const request = [](ScaleVector const& vector, float* to, int64_t at, bool exists) {
      if (!exists || vector.data == nullptr) {
        *to = 1.0f;
      } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(to)),
                     "l"(vector.data + at * vector.stride)
                     : "memory");
      }
    };
    ScaleVector const &of_columns = kSwap ? params.m_scales : params.n_scales, &of_rows = kSwap ? params.n_scales : params.m_scales;
    int const all_columns = kSwap ? params.general.m : params.general.n, all_rows = kSwap ? params.general.n : params.general.m;
#pragma unroll 1
    for (int at = thread; at < columns(); at += 128) {
      request(of_columns, scales + at, tile_column + at, tile_column + at < all_columns);
    }
#pragma unroll 1
    for (int at = thread; at < kRows; at += 128) {
      int const row = mma_row(at / 64, tile_row, warpgroup) + at % 64;
      request(of_rows, scales + kTileN + at, row, row < all_rows);
    }
  }

  template <class Accumulator>
  __device__ void store(Accumulator const& acc, int tile_row, int tile_column, int l, int warpgroup) {
    if constexpr (kScaled) asm volatile("cp.async.wait_all;" ::: "memory");  // before a barrier that makes them everyone's
    if (!params.store_by_tma) {
      store_general(acc, tile_row, tile_column, l, warpgroup);
      return;
    }
    bool const biased = params.general.bias != nullptr;
    if (biased && !kScaled) {
#pragma unroll
      for (int i = 0; i < kBiasValues; ++i) {
        if (thread + 128 * i < kBiasFloats) bias[thread + 128 * i] = bias_share[i];
      }
    }
    if (!params.load_c_by_tma && issues_stores(thread)) cute::tma_store_wait<0>();  // with C the buffers were free before the mainloop
    if (kScaled || !params.load_c_by_tma || biased) synchronize();
    if constexpr (kScaled) {
      if (is_plain()) {
        if constexpr (kWarpsStore) {
          auto const store = [&](auto element) {
            if (has_line_scales()) {
              store_plain<true>(element, acc, tile_row, tile_column, l, warpgroup);
            } else {
              store_plain<false>(element, acc, tile_row, tile_column, l, warpgroup);
            }
          };
          params.bf16 ? store(Float16<DataType::kBF16>{}) : store(Float16<DataType::kF16>{});
        } else {
          store_plain<true>(element(), acc, tile_row, tile_column, l, warpgroup);
        }
        return;
      }
    }
    if constexpr (kHasShort) {
      if (is_short()) {
        for_each_group([&](auto group) { store_group<decltype(group), true>(acc, tile_row, tile_column, l, warpgroup); });
        return;
      }
    }
    for_each_group([&](auto group) { store_group<decltype(group), false>(acc, tile_row, tile_column, l, warpgroup); });
  }

  /// Whether scales are all that the accumulators need. That code is short: in the other groups' the instruction cache misses at each jump
  /// over the terms that a call lacks, which were most of 8000 cycles for a tile of 256 x 128.
  __device__ bool is_plain() const {
    EpilogueParams const& e = params.general;
    return params.store_by_tma && e.alpha == 1.0f && e.bias == nullptr && !params.load_c_by_tma && !e.gated &&
           e.activation.kind == ActivationParams::Kind::kNone;
  }

  /// The same of 16-bit operands, with alpha and C. Not where accumulators leave no register: 128 x 176 of one warpgroup would spill.
  static constexpr bool kHasShort = !kScaled && Config::kTileM * kTileN <= 160 * 128 * kConsumers;
  __device__ bool is_short() const {
    EpilogueParams const& e = params.general;
    return e.bias == nullptr && !e.gated && e.activation.kind == ActivationParams::Kind::kNone;
  }

  /// Calls visit(Group) for the groups that a tile of this launch has.
  template <class Visit>
  __device__ __forceinline__ void for_each_group(Visit const& visit) const {
    constexpr int kGroups = (kChunks + kGroup - 1) / kGroup;  // of an MMA tile
    cute::for_each(cute::make_int_sequence<kMmaM * kGroups>{}, [&](auto group) {
      constexpr int kAt = decltype(group)::value, kMi = kChoosesColumns ? kAt % kMmaM : kAt / kGroups;
      constexpr int kChunk = (kChoosesColumns ? kAt / kMmaM : kAt % kGroups) * kGroup;
      constexpr int kCount = kChunks - kChunk < kGroup ? kChunks - kChunk : kGroup;
      if (!kChoosesColumns || kChunk * kChunkColumns < params.columns) visit(Group<kMi, kChunk, kCount>{});
    });
  }

  /// What was written into the buffers is TMA's to read.
  __device__ void release_buffers() const {
    cutlass::arch::fence_view_async_shared();
    synchronize();
  }

  /// Where a group takes buffers for the second time: the stores that last left them have been read.
  template <class G>
  __device__ __forceinline__ void await_buffers() const {
    if constexpr (G::kFirstBox + G::kCount > kBuffers) {
      if (thread == 0) cute::tma_store_wait<kBuffers - G::kCount>();
      synchronize();
    }
  }

  /// Whether rows or columns have scales, as opposed to blocks, which are the mainloop's.
  __device__ bool has_line_scales() const { return params.m_scales.data != nullptr || params.n_scales.data != nullptr; }

  template <bool kHasScales, class OwnElement, class Accumulator>
  __device__ __forceinline__ void store_plain(OwnElement element, Accumulator const& acc, int tile_row, int tile_column, int l,
                                              int warpgroup) {
    for_each_group([&](auto group) {
      using G = decltype(group);
      float v[G::kValues];
#pragma unroll
      for (int i = 0; i < G::kValues; ++i) v[i] = acc(G::kMi * (kTileN / 2) + G::kFirstBlock * 4 + i);
      if constexpr (kHasScales) scale<G>(v);
      await_buffers<G>();
      stage_values<G>(element, v);
      if constexpr (!kWarpsStore) {
        release_buffers();
        if (thread == 0) store_boxes<G>(tile_row, tile_column, l, warpgroup);
      }
    });
    if constexpr (kWarpsStore) {
      release_buffers();
      if (thread % 32 == 0) {
#pragma unroll 1
        for (int b = thread / 32; b < kBoxes; b += 4) {
          if (has_box(b)) store_box(b, tile_row, tile_column, l, warpgroup);
        }
        cute::tma_store_arrive();
      }
    }
  }

  // Boxes kChunk to kChunk + kCount of MMA tile kMi, which are finished together. Accumulator e + 2 h + 4 j + (kTileN / 2) mi of a thread
  // is row 16 (thread / 32) + 8 h + lane / 4 of MMA tile mi, column 8 j + 2 (lane % 4) + e (the WGMMA accumulator layout).
  template <int kMi_, int kChunk, int kCount_>
  struct Group {
    static constexpr int kMi = kMi_, kCount = kCount_;
    static constexpr int kFirstBox = kChoosesColumns ? kChunk * kMmaM + kMi * kGroup : kMi * kChunks + kChunk;
    static constexpr int kFirstBlock = kChunk * (kSwap ? kBoxRows : kBoxColumns) / 8;  // 8-column blocks of the accumulator
    static constexpr int kBoxBlocks = kBoxValues / 4;
    static constexpr int kValues = kCount * kBoxValues, kBlocks = kValues / 4;
  };

  /// kShort: see is_short().
  template <class G, bool kShort, class Accumulator>
  __device__ __forceinline__ void store_group(Accumulator const& acc, int tile_row, int tile_column, int l, int warpgroup) {
    EpilogueParams const& e = params.general;
    float
        v[G::kValues];  // not in place: WGMMA's registers, once written by others, make ptxas serialise the mainloop of wide pingpong tiles
#pragma unroll
    for (int i = 0; i < G::kValues; ++i) v[i] = __fmul_rn(e.alpha, acc(G::kMi * (kTileN / 2) + G::kFirstBlock * 4 + i));
    if constexpr (kScaled) scale<G>(v);
    if (params.load_c_by_tma) {
      add_c<G>(v);
    } else {
      await_buffers<G>();
    }
    if (!kShort && e.bias != nullptr) add_bias<G>(v);
    if constexpr (kShort) {
      stage_values<G>(element(), v);
    } else if (!e.gated) {
      stage<G>(v);
    } else if constexpr (kSwap) {
      stage_gated_tokens<G>(v);
    } else {
      stage_gated_rows<G>(v);
    }
    release_buffers();
    if (thread == 0) store_boxes<G>(tile_row, tile_column, l, warpgroup);
  }

  template <class G>
  __device__ __forceinline__ void scale(float (&v)[G::kValues]) const {
    int const lane = thread % 32, warp = thread / 32;
    float const* const rows = scales + kTileN + G::kMi * 64 + 16 * warp + lane / 4;
    float const row[2] = {rows[0], rows[8]};
    float2 const* const columns = reinterpret_cast<float2 const*>(scales + G::kFirstBlock * 8 + 2 * (lane % 4));
#pragma unroll
    for (int j = 0; j < G::kBlocks; ++j) {
      float2 const column = columns[4 * j];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        v[4 * j + 2 * h] = __fmul_rn(v[4 * j + 2 * h], __fmul_rn(row[h], column.x));
        v[4 * j + 2 * h + 1] = __fmul_rn(v[4 * j + 2 * h + 1], __fmul_rn(row[h], column.y));
      }
    }
  }

  // beta * C, which lies in the group's buffers in the fragment's own layout.
  template <class G>
  __device__ __forceinline__ void add_c(float (&v)[G::kValues]) {
#pragma unroll
    for (int box = 0; box < G::kCount; ++box) {
      int const buffer = (G::kFirstBox + box) % kBuffers;
      if (kChoosesColumns && !has_box(G::kFirstBox + box)) break;
      cutlass::arch::ClusterTransactionBarrier::wait(&c_full[buffer], c_phase >> buffer & 1);
      c_phase ^= 1u << buffer;
    }
#pragma unroll
    for (int j = 0; j < G::kBlocks; j += 2) {
      bool const pair = j % G::kBoxBlocks + 1 < G::kBoxBlocks;
      uint32_t c[4];
      load_matrices(unit_address(G::kFirstBox + j / G::kBoxBlocks, j % G::kBoxBlocks, pair), c, pair);
#pragma unroll
      for (int i = 0; i < (pair ? 4 : 2); ++i) {
        float2 const pair_of_c = element().unpack(c[i]);
        v[4 * j + 2 * i] = fmaf(params.general.beta, pair_of_c.x, v[4 * j + 2 * i]);
        v[4 * j + 2 * i + 1] = fmaf(params.general.beta, pair_of_c.y, v[4 * j + 2 * i + 1]);
      }
    }
  }

  template <class G>
  __device__ __forceinline__ void add_bias(float (&v)[G::kValues]) const {
    int const lane = thread % 32, warp = thread / 32;
    if constexpr (kSwap) {
      float const row_bias[2] = {bias[G::kMi * 64 + 16 * warp + lane / 4], bias[G::kMi * 64 + 16 * warp + 8 + lane / 4]};
#pragma unroll
      for (int i = 0; i < G::kValues; ++i) v[i] = __fadd_rn(v[i], row_bias[i / 2 % 2]);
    } else {
      float2 const* columns = reinterpret_cast<float2 const*>(bias + G::kFirstBlock * 8 + 2 * (lane % 4));
#pragma unroll
      for (int j = 0; j < G::kBlocks; ++j) {
        float2 const b = columns[4 * j];
        v[4 * j] = __fadd_rn(v[4 * j], b.x);
        v[4 * j + 1] = __fadd_rn(v[4 * j + 1], b.y);
        v[4 * j + 2] = __fadd_rn(v[4 * j + 2], b.x);
        v[4 * j + 3] = __fadd_rn(v[4 * j + 3], b.y);
      }
    }
  }

  // Activation, rounding, and the way into the group's buffers: not gated.
  template <class G>
  __device__ __forceinline__ void stage(float (&v)[G::kValues]) const {
    activate_all<G::kValues>(params.general.activation, [&](int i) -> float& { return v[i]; });
    stage_values<G>(element(), v);
  }
  template <class G, class OwnElement>
  __device__ __forceinline__ void stage_values(OwnElement element, float const (&v)[G::kValues]) const {
#pragma unroll
    for (int j = 0; j < G::kBlocks; j += 2) {
      bool const pair = j % G::kBoxBlocks + 1 < G::kBoxBlocks;  // a last single block of a swapped tile is stored with .x2
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < (pair ? 4 : 2); ++i) packed[i] = element.pack(v[4 * j + 2 * i], v[4 * j + 2 * i + 1]);
      store_matrices(unit_address(G::kFirstBox + j / G::kBoxBlocks, j % G::kBoxBlocks, pair), packed, pair);
    }
  }
  // The same, gated and swapped: gate and up of an output are rows 8 h apart of the same thread.
  template <class G>
  __device__ __forceinline__ void stage_gated_tokens(float (&v)[G::kValues]) const {
    activate_all<G::kValues / 2>(params.general.activation, [&](int i) -> float& { return v[i / 2 * 4 + i % 2]; });
#pragma unroll
    for (int j = 0; j < G::kBlocks; j += 4) {
      constexpr int kLast = G::kBlocks - 1;
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const block = 4 * (j + i < G::kBlocks ? j + i : kLast);
        packed[i] = element().pack(v[block] * v[block + 2], v[block + 1] * v[block + 3]);
      }
      store_gated_tokens<G::kBoxBlocks>(G::kFirstBox, j, G::kBlocks - j < 4 ? G::kBlocks - j : 4, packed);
    }
  }
  // The same, gated: gate and up are 8-column blocks 2 i and 2 i + 1 of the same thread.
  template <class G>
  __device__ __forceinline__ void stage_gated_rows(float (&v)[G::kValues]) const {
    activate_all<G::kValues / 2>(params.general.activation, [&](int i) -> float& { return v[i / 4 * 8 + i % 4]; });
#pragma unroll
    for (int j = 0; j < G::kBlocks; j += 2) {
      uint32_t packed[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const gate = 4 * j + 2 * h;
        packed[h] = element().pack(v[gate] * v[gate + 4], v[gate + 1] * v[gate + 5]);
      }
      store_gated_rows(G::kFirstBox + j / G::kBoxBlocks, j % G::kBoxBlocks / 2, packed);
    }
  }

  // By one thread: a box leaves.
  __device__ __forceinline__ void store_box(int b, int tile_row, int tile_column, int l, int warpgroup) const {
    char* const from = buffers + b % kBuffers * kBoxBytes;
    int const n = box_n(b, tile_row, tile_column, warpgroup);
    int const m = box_m(b, tile_row, tile_column, warpgroup), pitch = params.general.gated ? kGatedColumns * 2 : kRowBytes;
#pragma unroll
    for (int row = 0; row < kBoxRows; row += kStoredRows) {
      if (row > 0 && box_chunk(b) * kBoxRows + row >= columns()) break;
      cute::SM90_TMA_STORE_3D::copy(&params.tma_d, from + row * pitch, params.general.gated ? n / 2 : n, m + row, l);
    }
  }

  // By one thread: the boxes leave, and C of the boxes that take their buffers next is requested.
  template <class G>
  __device__ __forceinline__ void store_boxes(int tile_row, int tile_column, int l, int warpgroup) {
#pragma unroll
    for (int box = 0; box < G::kCount; ++box) {
      int const b = G::kFirstBox + box;
      if (!kChoosesColumns || has_box(b)) store_box(b, tile_row, tile_column, l, warpgroup);
      cute::tma_store_arrive();  // also of a box that the tile lacks: the wait for a buffer counts them
    }
    if (params.load_c_by_tma && G::kFirstBox + kBuffers < kBoxes) {
      cute::tma_store_wait<0>();
#pragma unroll
      for (int box = 0; box < G::kCount; ++box) {
        if (has_box(G::kFirstBox + box + kBuffers)) request_c(G::kFirstBox + box + kBuffers, tile_row, tile_column, l, warpgroup);
      }
    }
  }

  // Where a lane's row of the 8x8 matrices of column blocks j and j + 1 lies: matrix q = lane / 8 is rows 8 (q % 2) of the warp's 16, block
  // j + q / 2; lane 8 q + r addresses its row r.
  __device__ uint32_t unit_address(int box, int j, bool pair) const {
    int const lane = thread % 32, warp = thread / 32, q = lane / 8, r = lane % 8;
    int const row = kSwap ? 8 * (j + (pair ? q / 2 : 0)) + r : 16 * warp + 8 * (q % 2) + r;
    int const unit = kSwap ? 2 * warp + q % 2 : j + q / 2;
    return cute::cast_smem_ptr_to_uint(buffers) + box % kBuffers * kBoxBytes + row * kRowBytes + (swizzle<kRowBytes>(unit, row) << 4);
  }

  // Swapped and gated: one matrix (8 outputs of n, 8 tokens) a token block, `count` of them from block j of the boxes from `box` on.
  template <int kBoxBlocks>
  __device__ void store_gated_tokens(int box, int j, int count, uint32_t const (&packed)[4]) const {
    int const lane = thread % 32, warp = thread / 32, q = lane / 8, r = lane % 8;
    int const block = j + (q < count ? q : count - 1);  // matrices beyond count repeat the last one
    int const row = 8 * (block % kBoxBlocks) + r;
    uint32_t const address = cute::cast_smem_ptr_to_uint(buffers) + (box + block / kBoxBlocks) % kBuffers * kBoxBytes +
                             row * (kGatedColumns * 2) + (swizzle<kGatedColumns * 2>(warp, row) << 4);
    asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(packed[0]), "r"(packed[1]),
                 "r"(packed[2]), "r"(packed[3])
                 : "memory");
  }
  // Gated: the two row halves of output block `unit`.
  __device__ void store_gated_rows(int box, int unit, uint32_t const (&packed)[2]) const {
    int const lane = thread % 32, warp = thread / 32;
    int const row = 16 * warp + lane % 16;
    uint32_t const address = cute::cast_smem_ptr_to_uint(buffers) + box % kBuffers * kBoxBytes + row * (kGatedColumns * 2) +
                             (swizzle<kGatedColumns * 2>(unit, row) << 4);
    asm volatile("stmatrix.sync.aligned.x2.m8n8.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(packed[0]), "r"(packed[1]) : "memory");
  }

  __device__ void prefetch_general(int tile_row, int tile_column, int l, int warpgroup) const {
#pragma unroll
    for (int mi = 0; mi < kMmaM; ++mi) {
      int const row0 = mma_row(mi, tile_row, warpgroup);
      if constexpr (kSwap) {
        prefetch_c(params.general, tile_column, row0, l, columns(), 64, thread, 128);
      } else {
        prefetch_c(params.general, row0, tile_column, l, 64, columns(), thread, 128);
      }
    }
  }

  template <class Accumulator>
  __device__ void store_general(Accumulator const& acc, int tile_row, int tile_column, int l, int warpgroup) {
    int const lane = thread % 32, warp = thread / 32;
    float* staged = reinterpret_cast<float*>(buffers);  // [64][kGeneralColumns], 16-byte unit u of row r at u ^ (r % kUnits)
    constexpr int kUnits = kGeneralColumns / 4;
    auto at = [&](int row, int column) -> float& {
      return staged[row * kGeneralColumns + ((column / 4) ^ (row & (kUnits - 1))) * 4 + column % 4];
    };
#pragma unroll
    for (int mi = 0; mi < kMmaM; ++mi) {
      int const row0 = mma_row(mi, tile_row, warpgroup);
#pragma unroll
      for (int column0 = 0; column0 < kTileN; column0 += kGeneralColumns) {
        if (kChoosesColumns && column0 >= columns()) break;
        constexpr int kBlocks = kGeneralColumns / 8;
        synchronize();
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          if (column0 + 8 * j < kTileN) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              int const index = mi * (kTileN / 2) + (column0 / 8 + j) * 4 + h * 2;
              float2* slot = reinterpret_cast<float2*>(&at(16 * warp + 8 * h + lane / 4, 8 * j + 2 * (lane % 4)));
              *slot = kSwapsPairs ? make_float2(acc(index + 1), acc(index)) : make_float2(acc(index), acc(index + 1));
            }
          }
        }
        synchronize();
        int const rest = columns() - column0, width = rest < kGeneralColumns ? rest : kGeneralColumns;
        int const m0 = kSwap ? tile_column + column0 : row0, n0 = kSwap ? row0 : tile_column + column0;
        int const rows = kSwap ? width : 64, columns_of_n = kSwap ? 64 : width;
        constexpr int kSwapped = kSwapsPairs ? 1 : 0;
        auto const staged_at = [&](int row, int column) -> float {
          return kSwap ? at(column, row ^ kSwapped) : at(row, column ^ kSwapped);
        };
        if constexpr (kScaled) {
          if (params.integers) {
            store_integers(params.general, m0, n0, l, rows, columns_of_n, thread, 128, staged_at);
          } else {
            float const *const of_columns = scales + column0, *const of_rows = scales + kTileN + mi * 64;
            store_rectangle(element(), params.general, m0, n0, l, rows, columns_of_n, thread, 128, [&](int row, int column) {
              float const value = without_zero(params, staged_at(row, column), m0 + row, n0 + column);
              return value * (kSwap ? of_columns[row] * of_rows[column] : of_rows[row] * of_columns[column]);
            });
          }
        } else {
          store_rectangle(element(), params.general, m0, n0, l, rows, columns_of_n, thread, 128, staged_at);
        }
      }
    }
    synchronize();
  }

  static __device__ void load_matrices(uint32_t address, uint32_t (&d)[4], bool four) {
    if constexpr (kSwap) {
      if (four) {
        asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(address)
                     : "memory");
      } else {
        asm volatile("ldmatrix.sync.aligned.x2.trans.m8n8.shared.b16 {%0, %1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(address) : "memory");
        d[2] = d[3] = 0;
      }
    } else {
      asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                   : "r"(address)
                   : "memory");
    }
  }
  static __device__ void store_matrices(uint32_t address, uint32_t const (&d)[4], bool four) {
    if constexpr (kSwap) {
      if (four) {
        asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(d[0]), "r"(d[1]),
                     "r"(d[2]), "r"(d[3])
                     : "memory");
      } else {
        asm volatile("stmatrix.sync.aligned.x2.trans.m8n8.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(d[0]), "r"(d[1]) : "memory");
      }
    } else {
      asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(d[0]), "r"(d[1]), "r"(d[2]),
                   "r"(d[3])
                   : "memory");
    }
  }
};

}  // namespace minfer::gemm
