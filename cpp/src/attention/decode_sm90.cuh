// Attention forward for sm_90a, few queries over a cache: split-KV, TMA + mma.sync, persistent, warp specialised. 16-bit keys and values, or
// fp8, int8 and int4 codes that become f16 in registers. After FlashDecoding (Dao et al., 2023).
//
// Bytes are the cost, so all is arranged around a ring of loads that never runs dry. The operands are swapped: S^T = K.Q^T has 16 keys a tile
// and needs no more than 8 or 16 columns for the rows of a unit, where Q.K^T would spend 16 rows or 64 on them.
// Warp roles. Warps 0, 2 and 3 fill the ring with slices of K and V (kSlice tokens each) and their scales: with scales, codes by warp 0, else K
// and V by two. Warp 1 brings the queries of the next piece in the order of B operands. Warps 4 to 11 are the consumers: slice i of a piece is warp i % 8's, which keeps a softmax and an
// output of its own; they meet when the piece ends.
// Pipelines. ring: full (the bytes of two TMA loads, the copies of scales), empty (its warp), and a count of the slices that were asked for.
// queries: two slots, full (warp 1), empty (each consumer warp).
// Pieces, and who merges those of a unit: decode_pieces.cuh. Fragments: kv_dequant.cuh.
// Scales leave the elements alone: int8's of K multiply scores, those of V probabilities; fp8's multiply once; int4's of K, which belong to
// channels, multiply the queries of each group of tokens, its minima make a score of their own, and V's multiply probabilities.
#pragma once

#include <algorithm>
#include <atomic>

#include "attention/decode_params.h"
#include "attention/decode_pieces.cuh"
#include "attention/kv_dequant.cuh"
#include "attention/launch.h"
#include "attention/mask.h"
#include "attention/softmax.cuh"
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
struct DecodeSm90 {
  static constexpr DataType kType = Config::kType;
  static constexpr WeightFormat kFormat = Config::kFormat;
  static constexpr int kHeadDim = Config::kHeadDim, kSlice = Config::kSlice, kStages = Config::kStages;
  static constexpr int kPart = kHeadDim <= 128 ? 32 : 16;  // tokens of a slice that are in registers at a time
  using Element = cute::conditional_t<kType == DataType::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  using Codes = KvCodes<kFormat>;
  static constexpr bool k16Bit = kFormat == WeightFormat::kDense, kInt8 = kFormat == WeightFormat::kInt8,
                        kInt4 = kFormat == WeightFormat::kInt4;
  static constexpr DataType kMmaType = k16Bit ? kType : DataType::kF16;
  static constexpr int kWarps = 8, kThreads = 384, kConsumerThreads = 32 * kWarps;
  static constexpr int kProducerRegisters = kHeadDim <= 128 ? 72 : 88, kConsumerRegisters = kHeadDim <= 128 ? 216 : 208;
  static constexpr int kMaxColumns = Config::kRows / 8;  // tiles of 8 rows: 1 or 2, as registers allow
  static constexpr int kRowBytes = kHeadDim * Codes::kBits / 8, kSwizzle = kRowBytes < 128 ? kRowBytes : 128, kBoxes = kRowBytes / kSwizzle;
  static constexpr int kCodeBytes = kSlice * kRowBytes;  // of K, and of V, in a slice
  static constexpr int kTokenTiles = kPart / 16, kSteps = kHeadDim / 16;
  // int8: a float a token of K, then of V. int4: of each group of tokens scales and minima of K's
  // channels, then a scale and a minimum of each group of V a token.
  static constexpr int kMaxGroupsV = kHeadDim / 32;
  static constexpr int kGroupBytes = 2 * kHeadDim * 2,
                       kMaxGroups = kSlice < 32 ? 1 : kSlice / 32;  // int4: of a group of tokens; in a slice
  static constexpr int kScaleBytes = kInt8 ? 2 * kSlice * 4 : kInt4 ? kMaxGroups * kGroupBytes + 2 * kMaxGroupsV * kSlice * 2 : 16;
  static constexpr bool kScales = kInt8 || kInt4;
  static constexpr int kHalf = kHeadDim < 128 ? kHeadDim : 128, kHalves = kHeadDim / kHalf, kVector = kHalf / 32;
  static constexpr int kPitch = kHalf + 4;
  static_assert(kHeadDim % 64 == 0 && kSlice % kPart == 0 && kSwizzle * 8 % 128 == 0);

  using Pieces = DecodePieces<kSlice, kInt4>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using Params = DecodeParams;

  struct Queries {
    uint2 of[kMaxColumns][kSteps][32];  // B operands
    float scale[8 * kMaxColumns];       // what a row was divided by
    DecodePiece piece;
  };
  struct SharedStorage {
    alignas(1024) uint8_t codes[kStages][2][kCodeBytes];
    alignas(128) uint8_t scales[kStages][kScaleBytes];
    alignas(16) float output[kWarps][8][kPitch];
    alignas(16) Queries queries[2];
    float2 states[kWarps][8 * kMaxColumns];
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
      clear_rows_outside(params, thread - 128);
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
    constexpr int kOwn = kHeadDim / 32, kAtOnce = kHeadDim <= 128 ? 4 : 2;  // elements of a row that a lane has; rows at a time
    using Vector = cute::conditional_t<kOwn == 8, uint4, cute::conditional_t<kOwn == 4, uint2, uint32_t>>;
    Pieces pieces(params, storage.sequences);
    for (uint32_t turn = 0;; ++turn) {
      DecodePiece const piece = pieces.take();
      Queries& queries = storage.queries[turn % 2];
      EmptyBarrier::wait(&storage.empty_q[turn % 2], turn / 2 % 2 ^ 1);
      if (piece.batch >= 0) {
        int64_t const batch = params.cu_seqlens_q != nullptr ? 0 : piece.batch;
        auto const* const q = static_cast<Element const*>(params.q) + batch * params.q_batch;
        for (int first = 0; first < 8 * params.columns; first += kAtOnce) {
          Vector loads[kAtOnce];
#pragma unroll
          for (int r = 0; r < kAtOnce; ++r) {
            loads[r] = Vector{};
            if (first + r < piece.rows && lane * kOwn < params.head_dim) {
              int query, head;
              params.by_group(query, head, piece.row + first + r);
              head += piece.kv_head * params.group;
              loads[r] =
                  __ldg(reinterpret_cast<Vector const*>(q + (piece.row_q + query) * params.q_row + head * params.q_head + lane * kOwn));
            }
          }
          if (turn == 0 && first == 0) loads_under_way();
#pragma unroll
          for (int r = 0; r < kAtOnce; ++r) {
            auto const* const own = reinterpret_cast<Element const*>(&loads[r]);
            float factor = 1.0f;
            if constexpr (!k16Bit) {  // f16 holds what bf16 holds, beside its row's largest
              float largest = 0.0f;
#pragma unroll
              for (int i = 0; i < kOwn; ++i) largest = fmaxf(largest, fabsf(float(own[i])));
#pragma unroll
              for (int s = 16; s > 0; s /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, s));
              int const exponent = __float_as_int(largest) >> 23;
              if (exponent > 0 && exponent < 255) factor = __int_as_float((exponent < 253 ? 254 - exponent : 1) << 23);
              if (lane == 0) queries.scale[first + r] = 1.0f / factor;
            }
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
              auto const place = Codes::place_of(lane * kOwn + i);
              auto* const to = reinterpret_cast<uint16_t*>(&queries.of[first / 8][place.step][4 * (first % 8 + r) + place.c]) +
                               2 * place.word + place.half;
              if constexpr (k16Bit) {
                *to = reinterpret_cast<uint16_t const&>(own[i]);
              } else {
                *to = __half_as_ushort(__float2half_rn(float(own[i]) * factor));
              }
            }
          }
        }
      }
      if (turn == 0 && piece.batch < 0) loads_under_way();
      if (lane == 0) queries.piece = piece;
      __syncwarp();
      if (lane == 0) EmptyBarrier::arrive(&storage.full_q[turn % 2]);
      if (piece.batch < 0) return;
    }
  }

  // ---- consumers: warps ---------------------------------------------------------------------------------------------------------

  /// Where 16 bytes of a slice lie: chunk `chunk` of the row bytes of token `token`, of `rows` tokens in a box column.
  template <int kRows>
  static CUTLASS_DEVICE uint32_t address_of(uint32_t base, int token, int chunk) {
    constexpr int kChunks = kSwizzle / 16;
    int const turn = kSwizzle == 128 ? token % 8 : kSwizzle == 64 ? token / 2 % 4 : token / 4 % 2;
    return base + chunk / kChunks * (kRows * kSwizzle) + token * kSwizzle + (chunk % kChunks ^ turn) * 16;
  }

  static CUTLASS_DEVICE uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (kMmaType == DataType::kF16) {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
  }
  static CUTLASS_DEVICE uint32_t multiply(uint32_t x, uint32_t y) {
    uint32_t z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
  }
  static CUTLASS_DEVICE uint4 load_16_bytes(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
    return x;
  }
  static CUTLASS_DEVICE uint32_t load_4_bytes(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
  }

  /// A warp's part of a piece. Columns of tile i that a lane has: rows 8 i + 2 (lane % 4) and the next.
  template <int kCols>
  struct State {
    float output[kSteps][kCols][4];  // of d (by Codes::row_of), columns as above
    float highest[kCols][2];         // that the exponentials are relative to, in units of log2; -inf: no key yet
    float sum[kCols][2];             // of this lane's tokens
    float unit;                      // int8: a power of two that scales of V are relative to; 0: none yet
    float least[kCols][4];           // int4: sums of minima of V: group lane / 4, columns as above

    CUTLASS_DEVICE void clear() {
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int m = 0; m < kSteps; ++m) output[m][i][e] = 0.0f;
          least[i][e] = 0.0f;
        }
        highest[i][0] = highest[i][1] = -INFINITY;
        sum[i][0] = sum[i][1] = 0.0f;
      }
      unit = 0.0f;
    }
  };

  /// What turns products into scores, in units of log2.
  template <int kCols>
  struct Scores {
    float factor[kCols][2], cap;  // cap > 0: score = cap * tanh(product * factor)
    int32_t aligned[kCols][2];    // key that the column's query is aligned to
    int32_t left, right;
    int32_t first_key, last_key;  // keys before, and from there on, are nobody's, and what the cache holds for them may be anything
  };

  /// Scores of kTiles x 16 tokens from `key` on -> B operands of the product with V, before scales of V. Follows a maximum that grows by more
  /// than 2^kSlack.
  /// key_scale: of the lane's tokens, lane / 4 and 8 behind; `raise`: int8's unit is to grow by 1 / raise, 1 where it does not.
  template <bool kMasked, int kTiles, int kCols>
  static CUTLASS_DEVICE void soften(float (&s)[kTiles][kCols][4], State<kCols>& state, Scores<kCols> const& scores,
                                    float const (&key_scale)[kTiles][2], int key, int lane, float largest_value, float& inverse_unit) {
    constexpr float kSlack = kInt4 ? 3.0f : 8.0f;  // int4: probabilities times scales of V are f16
    bool grown = kInt8 && largest_value > 16.0f * state.unit;
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          float score = s[t][i][x] * scores.factor[i][x % 2];
          if (kInt8) score *= key_scale[t][x / 2];
          s[t][i][x] = score;
        }
      }
      if (scores.cap > 0.0f) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int x = 0; x < 4; ++x) s[t][i][x] = scores.cap * tanh_fast(s[t][i][x]);
        }
      }
      if constexpr (kMasked) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            int const token = key + 16 * t + 8 * (x / 2) + lane / 4, aligned = scores.aligned[i][x % 2];
            bool const hidden = token >= scores.last_key || (scores.right >= 0 && token > aligned + scores.right) ||
                                (scores.left >= 0 && token < aligned - scores.left);
            if (hidden) s[t][i][x] = -INFINITY;
          }
        }
      }
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) top[x % 2] = fmaxf(top[x % 2], s[t][i][x]);
      }
      grown = grown || top[0] > state.highest[i][0] + kSlack || top[1] > state.highest[i][1] + kSlack;
    }
    if (__any_sync(0xffffffffu, grown)) {  // seldom after the first slices
      float lift = 1.0f;
      if constexpr (kInt8) {
        float largest = largest_value;
#pragma unroll
        for (int x = 16; x > 0; x /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, x));
        if (largest > state.unit) {
          float const unit = __int_as_float(__float_as_int(largest) & 0x7f800000);
          lift = unit > 0.0f ? state.unit / unit : 1.0f;
          if (unit > 0.0f) state.unit = unit;
        }
      }
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
        float rescale[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float top = -INFINITY;
#pragma unroll
          for (int t = 0; t < kTiles; ++t) top = fmaxf(top, fmaxf(s[t][i][e], s[t][i][2 + e]));
#pragma unroll
          for (int x = 4; x < 32; x *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, x));
          float const highest = fmaxf(state.highest[i][e], top);
          rescale[e] = highest == -INFINITY ? 1.0f : exp2_fast(state.highest[i][e] - highest);
          state.highest[i][e] = highest;
          state.sum[i][e] *= rescale[e];
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
#pragma unroll
          for (int m = 0; m < kSteps; ++m) state.output[m][i][x] *= rescale[x % 2] * lift;
          if (kInt4) state.least[i][x] *= rescale[x % 2];
        }
      }
    }
    if constexpr (kInt8) inverse_unit = state.unit > 0.0f ? 1.0f / state.unit : 0.0f;
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        float const offset = state.highest[i][x % 2] == -INFINITY ? 0.0f : state.highest[i][x % 2];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          s[t][i][x] = exp2_fast(s[t][i][x] - offset);
          state.sum[i][x % 2] += s[t][i][x];
        }
      }
    }
  }

  /// Exponentials -> B operands.
  template <int kTiles, int kCols>
  static CUTLASS_DEVICE void transpose(float const (&s)[kTiles][kCols][4], uint32_t (&p)[kTiles][kCols][2]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
        p[t][i][0] = transpose_matrix(pack(s[t][i][0], s[t][i][1]));
        p[t][i][1] = transpose_matrix(pack(s[t][i][2], s[t][i][3]));
      }
    }
  }

  template <int kProduct, int kCols>
  static CUTLASS_DEVICE void multiply_keys(float (&s)[kCols][4], uint32_t const (&x)[4], uint32_t const (&b)[Codes::kPerPair][kCols][2]) {
    uint32_t a[4];
    Codes::template keys<kProduct>(x, a);
#pragma unroll
    for (int i = 0; i < kCols; ++i) multiply_16x8x16<kMmaType>(s[i], a, b[kProduct][i][0], b[kProduct][i][1]);
    if constexpr (kProduct + 1 < Codes::kPerPair) multiply_keys<kProduct + 1>(s, x, b);
  }
  template <int kTile, int kCols>
  static CUTLASS_DEVICE void multiply_values(float (&output)[kSteps][kCols][4], int first_tile, uint32_t const (&x)[4],
                                             uint32_t const (&p)[kCols][2]) {
    uint32_t a[4];
    Codes::template values<kTile>(x, a);
#pragma unroll
    for (int i = 0; i < kCols; ++i) multiply_16x8x16<kMmaType>(output[first_tile + kTile][i], a, p[i][0], p[i][1]);
    if constexpr (kTile + 1 < Codes::kPerPair) multiply_values<kTile + 1>(output, first_tile, x, p);
  }

  /// kPart tokens of a slice, from number `first` of it on, which is token `key`.
  template <bool kMasked, int kCols>
  static CUTLASS_DEVICE void take_part(Params const& params, SharedStorage& storage, int stage, Queries const& queries, State<kCols>& state,
                                       Scores<kCols> const& scores, int first, int key, int lane) {
    constexpr int kPairs = kRowBytes / 32, kPer = Codes::kPerPair;
    if constexpr (kInt4) asm volatile("" : "+r"(lane));  // addresses are made again for each slice: kept, they would be spilled
    int const g = lane / 4, c = lane % 4;
    uint32_t const keys = shared_address(storage.codes[stage][0]), values = shared_address(storage.codes[stage][1]);
    uint32_t const scales = shared_address(storage.scales[stage]);
    uint32_t const group_scales = scales + (kInt4 && first >= params.group_tokens ? kGroupBytes : 0);

    // Matrices: tokens 0-7 and 8-15 of one chunk, then of the next.
    float s[kTokenTiles][kCols][4] = {}, least[kCols][4] = {};
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      uint32_t b[kPer][kCols][2];
#pragma unroll
      for (int product = 0; product < kPer; ++product) {
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
          uint2 const q = queries.of[i][j * kPer + product][lane];
          b[product][i][0] = q.x;
          b[product][i][1] = q.y;
        }
      }
      if constexpr (kInt4) {
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          uint4 const scale = load_16_bytes(group_scales + ((2 * j + chunk) * 32 + 8 * c) * 2);
          uint4 const minimum = load_16_bytes(group_scales + (kHeadDim + (2 * j + chunk) * 32 + 8 * c) * 2);
          // Elements 0 and 4, 1 and 5; 2 and 6, 3 and 7.
          uint32_t const of[4] = {Codes::select(scale.x, scale.z, 0x5410), Codes::select(scale.x, scale.z, 0x7632),
                                  Codes::select(scale.y, scale.w, 0x5410), Codes::select(scale.y, scale.w, 0x7632)};
          uint32_t const least_of[4] = {Codes::select(minimum.x, minimum.z, 0x5410), Codes::select(minimum.x, minimum.z, 0x7632),
                                        Codes::select(minimum.y, minimum.w, 0x5410), Codes::select(minimum.y, minimum.w, 0x7632)};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t const a[4] = {least_of[2 * half], least_of[2 * half], least_of[2 * half + 1], least_of[2 * half + 1]};
#pragma unroll
            for (int i = 0; i < kCols; ++i) {
              auto& of_product = b[2 * chunk + half][i];
              multiply_16x8x16<kMmaType>(least[i], a, of_product[0], of_product[1]);
              of_product[0] = multiply(of_product[0], of[2 * half]);
              of_product[1] = multiply(of_product[1], of[2 * half + 1]);
            }
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        uint32_t x[4];
        load_matrices(address_of<kSlice>(keys, first + 16 * t + lane % 16, 2 * j + lane / 16), x);
        multiply_keys<0>(s[t], x, b);
      }
    }
    if constexpr (kInt4) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
#pragma unroll
          for (int x = 0; x < 4; ++x) s[t][i][x] += least[i][x];
        }
      }
    }

    float key_scale[kTokenTiles][2], value_scale[kTokenTiles][2], largest = 0.0f, inverse_unit;
    if constexpr (kInt8) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int const token = 16 * t + 8 * h + g;
          key_scale[t][h] = __uint_as_float(load_4_bytes(scales + (first + token) * 4));
          value_scale[t][h] = __uint_as_float(load_4_bytes(scales + (kSlice + first + token) * 4));
          if (kMasked && (key + token >= scores.last_key || key + token < scores.first_key)) value_scale[t][h] = 0.0f;
          largest = fmaxf(largest, value_scale[t][h]);
        }
      }
    }
    soften<kMasked>(s, state, scores, key_scale, key, lane, largest, inverse_unit);
    if constexpr (kInt8) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
#pragma unroll
          for (int x = 0; x < 4; ++x) s[t][i][x] *= value_scale[t][x / 2] * inverse_unit;
        }
      }
    }
    uint32_t p[kTokenTiles][kCols][2];
    transpose(s, p);

    if constexpr (kMasked && (k16Bit || kFormat == WeightFormat::kFp8E4M3)) {  // 0 * NaN is NaN: values of nobody's keys become zeros
      int const begin = scores.first_key - key, end = scores.last_key - key;
      if (begin > 0 || end < kPart) {
#pragma unroll 1
        for (int i = lane; i < kPart * (kRowBytes / 16); i += 32) {
          int const token = i / (kRowBytes / 16);
          if (token >= begin && token < end) continue;
          uint32_t const at = address_of<kSlice>(values, first + token, i % (kRowBytes / 16));
          asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
        }
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
      }
    }
    // Matrices: one chunk of tokens 0-7, the next chunk, then of tokens 8-15.
    if constexpr (!kInt4) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          uint32_t x[4];
          load_matrices_transposed(address_of<kSlice>(values, first + 16 * t + lane / 16 * 8 + lane % 8, 2 * j + lane / 8 % 2), x);
          multiply_values<0>(state.output, j * kPer, x, p[t]);
        }
      }
    } else {
      // A scale and a minimum of each group and token, f16, [2 * groups][tokens]; a group is head_dim_v / groups_v elements.
      int const per_chunk = params.groups_v * 32;
      uint32_t const of_values = scales + kMaxGroups * kGroupBytes + (first + 2 * c) * 2;
      auto const pair_at = [&](int plane, int token) {  // of tokens `token` + 2 c and the next
        return load_4_bytes(of_values + plane * (kSlice * 2) + token * 2);
      };
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        uint32_t a[4] = {0, 0, 0, 0};
        if (g < params.groups_v) {
          a[0] = pair_at(params.groups_v + g, 16 * t);
          a[2] = pair_at(params.groups_v + g, 16 * t + 8);
        }
#pragma unroll
        for (int i = 0; i < kCols; ++i) multiply_16x8x16<kMmaType>(state.least[i], a, p[t][i][0], p[t][i][1]);
      }
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          uint32_t x[4];
          load_matrices_transposed(address_of<kSlice>(values, first + 16 * t + lane / 16 * 8 + lane % 8, 2 * j + lane / 8 % 2), x);
#pragma unroll
          for (int chunk = 0; chunk < 2; ++chunk) {  // 32 of head_dim: of one group
            int const group = min((2 * j + chunk) * per_chunk / params.head_dim_v, params.groups_v - 1);
            uint32_t const low = pair_at(group, 16 * t), high = pair_at(group, 16 * t + 8);
            uint32_t weighted[kCols][2], a[2][4];
#pragma unroll
            for (int i = 0; i < kCols; ++i) {
              weighted[i][0] = multiply(p[t][i][0], low);
              weighted[i][1] = multiply(p[t][i][1], high);
            }
            if (chunk == 0) {
              Codes::template values<0>(x, a[0]);
              Codes::template values<1>(x, a[1]);
            } else {
              Codes::template values<2>(x, a[0]);
              Codes::template values<3>(x, a[1]);
            }
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
              for (int i = 0; i < kCols; ++i) {
                multiply_16x8x16<kMmaType>(state.output[4 * j + 2 * chunk + tile][i], a[tile], weighted[i][0], weighted[i][1]);
              }
            }
          }
        }
      }
    }
  }

  /// int4: 16 tokens of the residual from token `first` of it on, by way of the warp's room for outputs.
  template <int kCols>
  static CUTLASS_DEVICE void take_residual(Params const& params, SharedStorage& storage, DecodePiece const& piece, Queries const& queries,
                                           State<kCols>& state, Scores<kCols> const& scores, int first, int in_codes, int warp, int lane) {
    constexpr int kVectors = 16 * kHalf / 8 / 32, kAtOnce = kHeadDim <= 128 ? kVectors : 2;  // of 16 bytes, of a lane
    static_assert(16 * kHalf * 2 <= int(sizeof(storage.output[0])));
    asm volatile("" : "+r"(lane));  // as in take_part
    uint32_t const room = shared_address(storage.output[warp]);
    auto const room_at = [&](int token, int chunk) {  // rows of kHalf f16, chunks of 16 bytes
      return room + token * (kHalf * 2) + (chunk ^ token % 8) * 16;
    };
    int const valid = piece.seqlen_k - in_codes - first;
    // Elements are laid out in the order of the codes' operands, so that ldmatrix finds them where the queries and outputs have them.
    auto const bring = [&](void const* base, int head_dim, int half) {
      int64_t const row = int64_t(params.heads_kv) * head_dim;
      auto const* const from = static_cast<Element const*>(base) + (int64_t(piece.batch) * params.group_tokens + first) * row +
                               int64_t(piece.kv_head) * head_dim + half * kHalf;
      __syncwarp();
#pragma unroll 1
      for (int done = 0; done < kVectors; done += kAtOnce) {
        uint4 loads[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          int const token = ((done + i) * 32 + lane) / (kHalf / 8), d = ((done + i) * 32 + lane) % (kHalf / 8) * 8;
          loads[i] = make_uint4(0, 0, 0, 0);
          if (token < valid && half * kHalf + d < head_dim) loads[i] = __ldcg(reinterpret_cast<uint4 const*>(from + token * row + d));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          int const token = ((done + i) * 32 + lane) / (kHalf / 8), d = ((done + i) * 32 + lane) % (kHalf / 8) * 8;
          auto const* const own = reinterpret_cast<Element const*>(&loads[i]);
#pragma unroll
          for (int e = 0; e < 4; ++e) {  // elements e and e + 4 are neighbours
            int const position = d / 32 * 32 + e / 2 * 16 + e % 2 * 8 + d % 32 / 8 * 2;
            uint32_t const pair = pack(float(own[e]), float(own[e + 4]));
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(room_at(token, position / 8) + position % 8 * 2), "r"(pair) : "memory");
          }
        }
      }
      __syncwarp();
    };
    float s[1][kCols][4] = {};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      bring(params.k_residual, params.head_dim, half);
#pragma unroll
      for (int step = 0; step < kHalf / 16; ++step) {
        uint32_t a[4];
        load_matrices(room_at(lane % 16, 2 * step + lane / 16), a);
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
          uint2 const q = queries.of[i][half * (kHalf / 16) + step][lane];
          multiply_16x8x16<kMmaType>(s[0][i], a, q.x, q.y);
        }
      }
    }
    float const no_scale[1][2] = {};
    float no_unit;
    soften<true>(s, state, scores, no_scale, in_codes + first, lane, 0.0f, no_unit);
    uint32_t p[1][kCols][2];
    transpose(s, p);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      bring(params.v_residual, params.head_dim_v, half);
#pragma unroll
      for (int tile = 0; tile < kHalf / 16; ++tile) {
        uint32_t a[4];
        load_matrices_transposed(room_at(lane / 16 * 8 + lane % 8, 2 * tile + lane / 8 % 2), a);
#pragma unroll
        for (int i = 0; i < kCols; ++i) {
          multiply_16x8x16<kMmaType>(state.output[half * (kHalf / 16) + tile][i], a, p[0][i][0], p[0][i][1]);
        }
      }
    }
    __syncwarp();
  }

  /// A parity tells a phase from its neighbours only, and a warp may be a whole ring ahead of a neighbour's load that is late: it waits until
  /// its own has begun.
  static CUTLASS_DEVICE void wait_for_slice(SharedStorage& storage, uint32_t at) {
    uint32_t issued;
    do {
      asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(issued) : "r"(shared_address(&storage.issued)) : "memory");
    } while (issued <= at);
    FullBarrier::wait(&storage.full[at % kStages], at / kStages % 2);
  }

  /// Rows of q before the first and behind the last sequence are nobody's: zeros, and -inf.
  static CUTLASS_DEVICE void clear_rows_outside(Params const& params, int thread) {
    if (params.cu_seqlens_q == nullptr) return;
    int const first = __ldg(params.cu_seqlens_q), last = __ldg(params.cu_seqlens_q + params.batch);
    int const outside = params.tokens_q - (last - first);
    for (int i = int(blockIdx.x); i < outside; i += int(gridDim.x)) {
      int64_t const row = i < first ? i : last + (i - first);
      for (int column = thread; column < params.heads_q * params.head_dim_v; column += kConsumerThreads) {
        static_cast<uint16_t*>(params.out)[row * params.out_row + column] = 0;
      }
      for (int head = thread; head < params.heads_q && params.lse != nullptr; head += kConsumerThreads) {
        params.lse[head * params.lse_head + row] = -INFINITY;
      }
    }
  }

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

  template <int kCols>
  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int thread) {
    int const warp = thread / 32, lane = thread % 32, c = lane % 4;
    uint32_t loaded = 0;  // slices of the pieces before this one
    for (uint32_t turn = 0;; ++turn) {
      Queries const& queries = storage.queries[turn % 2];
      EmptyBarrier::wait(&storage.full_q[turn % 2], turn / 2 % 2);
      DecodePiece const piece = queries.piece;
      if (piece.batch < 0) return;
      Mask const mask(piece.seqlen_q, piece.seqlen_k, params.window_left, params.window_right);
      Scores<kCols> scores;
      scores.cap = params.softcap * kLog2E;
      scores.left = params.window_left;
      scores.right = params.window_right;
      scores.first_key = mask.begin(0);
      float scale = params.softcap > 0.0f ? params.scale / params.softcap : params.scale * kLog2E;
      if constexpr (kFormat == WeightFormat::kFp8E4M3) {
        scale *= __ldg(static_cast<float const*>(params.k_scale) + piece.kv_head * params.scale_stride);
      }
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int const row = 8 * i + 2 * c + e;
          scores.factor[i][e] = k16Bit ? scale : scale * queries.scale[row];
          scores.aligned[i][e] = params.by_group.div(piece.row + row) + mask.shift;
        }
      }
      int const in_codes = Pieces::in_codes(params, piece.seqlen_k), codes_end = Pieces::codes_end(params, piece.seqlen_k);
      int const end = piece.slice_end < codes_end ? piece.slice_end : codes_end;
      int const first_query = params.by_group.div(piece.row), last_query = params.by_group.div(piece.row + piece.rows - 1);
      int const full_begin = mask.begin(last_query), full_end = min(mask.end(first_query), in_codes);
      scores.last_key = in_codes;
      State<kCols> state;
      state.clear();
      int slice = piece.slice_begin + warp;
      for (; slice < end; slice += kWarps) {
        uint32_t const at = loaded + uint32_t(slice - piece.slice_begin), stage = at % kStages;
        wait_for_slice(storage, at);
#pragma unroll 1
        for (int first = 0; first < kSlice; first += kPart) {
          int const key = slice * kSlice + first;
          if (key >= full_begin && key + kPart <= full_end) {
            take_part<false>(params, storage, stage, queries, state, scores, first, key, lane);
          } else if (key < in_codes && key + kPart > scores.first_key) {  // scales of others may be anything
            take_part<true>(params, storage, stage, queries, state, scores, first, key, lane);
          }
        }
        __syncwarp();
        if (lane == 0) EmptyBarrier::arrive(&storage.empty[stage]);
      }
      if constexpr (kInt4) {
        scores.last_key = piece.seqlen_k;
        for (; slice < piece.slice_end; slice += kWarps) {
          int const first = (slice - codes_end) * 16;
          if (first + in_codes < piece.seqlen_k) {
            take_residual(params, storage, piece, queries, state, scores, first, in_codes, warp, lane);
          }
        }
      }
      if (end > piece.slice_begin) loaded += uint32_t(end - piece.slice_begin);
      __syncwarp();
      if (lane == 0) EmptyBarrier::arrive(&storage.empty_q[turn % 2]);
      finish(params, storage, piece, state, warp, lane);
    }
  }

  /// The warps' parts of a piece become one, which is left in its slot, or merged with the others' and stored.
  template <int kCols>
  static CUTLASS_DEVICE void finish(Params const& params, SharedStorage& storage, DecodePiece const& piece, State<kCols>& state, int warp,
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
    Part part[kCols];  // of row 8 i + warp
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
        float highest = -INFINITY;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, storage.states[w][8 * i + warp].x);
        float const base = highest == -INFINITY ? 0.0f : highest;
        part[i].highest = highest;
        part[i].sum = 0.0f;
#pragma unroll
        for (int x = 0; x < kVector; ++x) part[i].output[half][x] = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          float2 const of_warp = storage.states[w][8 * i + warp];
          float const weight = exp2_fast(of_warp.x - base);
          part[i].sum += of_warp.y * weight;
          auto const* const from = &storage.output[w][warp][kVector * lane];
#pragma unroll
          for (int x = 0; x < kVector; ++x) part[i].output[half][x] += from[x] * weight;
        }
      }
    }

    if (piece.parts == 0) {
      int64_t const slot = piece.slot;
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
        int const row = 8 * i + warp;
        if (row < piece.rows) {
          int64_t const at = slot * (8 * kCols) + row;
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int x = 0; x < kVector; x += 2) {
              *reinterpret_cast<float2*>(params.partials + at * kHeadDim + half * kHalf + kVector * lane + x) =
                  make_float2(part[i].output[half][x], part[i].output[half][x + 1]);
            }
          }
          if (lane == 0) params.states[at] = make_float2(part[i].highest, part[i].sum);
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
      int const row = 8 * i + warp;
      if (row >= piece.rows) continue;
      Part total = part[i];
      if (piece.parts > 1) {
        total.highest = -INFINITY;
        total.sum = 0.0f;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
          for (int x = 0; x < kVector; ++x) total.output[half][x] = 0.0f;
        }
#pragma unroll 8
        for (int k = 0; k < piece.parts; ++k) {  // in order, whoever left them
          int64_t const at = int64_t(piece.slot + k * lockstep) * (8 * kCols) + row;
          float2 of_slot = __ldcg(params.states + at);
          float output[kHalves][kVector];
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
#pragma unroll
            for (int x = 0; x < kVector; x += 2) {
              float2 const pair =
                  __ldcg(reinterpret_cast<float2 const*>(params.partials + at * kHeadDim + half * kHalf + kVector * lane + x));
              output[half][x] = k == piece.own ? part[i].output[half][x] : pair.x;
              output[half][x + 1] = k == piece.own ? part[i].output[half][x + 1] : pair.y;
            }
          }
          if (k == piece.own) of_slot = make_float2(part[i].highest, part[i].sum);
          add(total, of_slot.x, of_slot.y, output);
        }
      }
      store(params, piece, total, row, lane);
    }
    meet();  // outputs and states in shared memory were read
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
