// Mainloop of int4 weights and activations of 8 bits, e4m3 or int8, for sm_90, in tiles of as many tokens as the launch says.
//
// The weights' rows (the caller's n) are the MMA's m, the tokens (the caller's m) its n. A k tile is 128 of k, whose weights of a row share
// a scale: its sums are the tensor core's, exact for int8, and are added up in fp32 times that scale, as in gemm/mainloop_columns_sm90.cuh.
// A consumer warpgroup has 64 rows. It decodes the weights of the next k tile into registers (int4_operand_sm90.cuh) while the MMAs of this
// one run: two sets of fragments, 32 registers. Sums of all the columns of a wide tile have none beside these and the accumulators: such a
// tile is multiplied in two parts, whose sums are added one after the other, while the other warpgroup's MMAs run.
//
// Pipeline: one pair of mbarriers a stage, as in gemm/mainloop_columns_sm90.cuh; everything comes by TMA. Stage: codes [64-row block][2
// blocks of 64 of k], tokens [columns][128] swizzled, scales [kTileM] of 16 bits.
// Multicast: the CTAs of a cluster's row load a part each of the codes that they have in common, those of a column a part of their tokens.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cuda.h>

#include "common/cutlass_element.cuh"
#include "common/dependent_launch.cuh"
#include "common/float16.cuh"
#include "common/stage_release.cuh"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "gemm/runtime_ring.cuh"
#include "gemm/wgmma_sm90.cuh"
#include "quantized_gemm/int4_operand_sm90.cuh"

namespace minfer::w4a8 {

/// Dispatch policy: stages by TMA, weights decoded into registers, tiles of a width that the launch chooses.
template <class Config_>
struct MainloopSm90TmaInt4 {
  using Config = Config_;
  static constexpr int Stages = 0;  // as many as fit
  using ClusterShape = cute::Shape<cute::Int<Config::kClusterM>, cute::Int<Config::kClusterN>, cute::_1>;
  using ArchTag = cutlass::arch::Sm90;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

}  // namespace minfer::w4a8

namespace cutlass::gemm::collective {

template <class Config, class TileShape_, class Codes, class StrideA, class Element, class StrideB, class TiledMma, class GmemCopyA,
          class SmemLayoutA, class SmemCopyA, class TransformA, class GmemCopyB, class SmemLayoutB, class SmemCopyB, class TransformB>
struct CollectiveMma<minfer::w4a8::MainloopSm90TmaInt4<Config>, TileShape_, Codes, StrideA, Element, StrideB, TiledMma, GmemCopyA,
                     SmemLayoutA, SmemCopyA, TransformA, GmemCopyB, SmemLayoutB, SmemCopyB, TransformB> {
  using DispatchPolicy = minfer::w4a8::MainloopSm90TmaInt4<Config>;
  using TileShape = TileShape_;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using PipelineState = minfer::gemm::RuntimeRing;

  static constexpr bool kIntegers = cute::is_same_v<Element, int8_t>;
  using Sum = cute::conditional_t<kIntegers, uint32_t, float>;  // of the MMA, in registers
  static constexpr bool kCooperative = true, kPingpong = false, kOrdered = false, kPipelineFences = false;
  static constexpr bool kRereadsThread = true, kRelocates = true;  // there is no register for what follows from the thread, or the tile
  static constexpr int kThreads = Config::kThreads, kConsumers = kThreads / 128 - 1;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232, kAuxiliaryWarps = 0;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK, kStep = Config::kColumnStep;
  static constexpr int kMmaK = minfer::w4a8::kMmaK;
  static_assert(kThreads == 384 && kTileM == 64 * kConsumers && kTileK == minfer::w4a8::kTileK);
  static_assert(kStep % 32 == 0 && kTileN % kStep == 0 && kTileN <= 224, "wider tiles spill");
  static constexpr int kClusterM = Config::kClusterM, kClusterN = Config::kClusterN, kCluster = kClusterM * kClusterN;
  static_assert(kStep % (8 * kClusterM) == 0 && kConsumers % kClusterN == 0);
  static constexpr bool kSplitsByCluster = kCluster == 1;
  static constexpr int kValues = kTileN / 2;  // accumulators of a thread; narrow tiles have fewer
  static constexpr int kMaxStages = 12;
  static constexpr int kRowBytes = kTileK;  // of a token
  static constexpr int kCodeBytes = kConsumers * minfer::w4a8::kRowBlockBytes, kScaleBytes = 2 * kTileM;
  static constexpr int kRingBytes = Config::kRingBytes;
  /// Up to so many columns are multiplied at once.
  static constexpr int kWhole = 112;
  static constexpr int first_part(int columns) { return columns <= kWhole ? columns : (columns / 2 + 15) / 16 * 16; }

  struct Params {
    CUtensorMap codes;    // packed, [n / 64, k / 64, 256] of 8 bytes
    CUtensorMap tokens;   // [1, m, k]
    CUtensorMap scales;   // [groups, n] of 16 bits
    int32_t group_shift;  // log2 of the group size; 30: one group
    bool bf16_scales;
    int32_t columns;  // of a tile
    int32_t stages, stage_bytes;
    int32_t ring_bytes;   // of stages; behind them, where the splits of a tile are a cluster's CTAs, its partials
    int32_t prefetch;     // k tiles sent for before the predecessor has finished
    uint64_t hint_codes;  // L2 eviction priority
  };
  /// Of a stage: codes, tokens, scales up to where the next stage's operands may begin.
  static CUTLASS_HOST_DEVICE int stage_bytes(int columns) { return kCodeBytes + columns * kRowBytes + (kScaleBytes + 1023) / 1024 * 1024; }

  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    alignas(1024) char ring[kRingBytes];
    typename Epilogue::TensorStorage staging;
    alignas(8) uint64_t full[kMaxStages];
    uint64_t empty[kMaxStages];
    typename Epilogue::PipelineStorage epilogue;
    typename Scheduler::SharedStorage scheduler;
  };

  // ---- set-up -------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.codes));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.tokens));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.scales));
  }
  template <class Storage>
  static CUTLASS_DEVICE void init_barriers(Params const& params, Storage& storage) {
    for (int s = 0; s < params.stages; ++s) {
      FullBarrier::init(&storage.full[s], 1);
      EmptyBarrier::init(&storage.empty[s], kConsumers * 4 * kCluster);
    }
    if constexpr (kSplitsByCluster) storage.scheduler.at = cute::cast_smem_ptr_to_uint(storage.ring) + uint32_t(params.ring_bytes);
  }
  template <class Storage, class Location>
  CUTLASS_DEVICE CollectiveMma(Params const&, Storage&, int, int, Location const&) {}

  // ---- producer -----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE PipelineState producer_start(Params const& params) { return {0, 1, params.stages}; }
  static CUTLASS_DEVICE PipelineState consumer_start(Params const& params) { return {0, 0, params.stages}; }

  struct LoadInputs {
    int m, n;                                    // of the CTA in its cluster
    uint16_t multicast_codes, multicast_tokens;  // the CTAs of its cluster row and column
  };
  struct TileInputs {
    int row, block, token;  // of the part of each operand that this CTA loads; block: of 64 rows
  };
  template <class Storage, class Location>
  static CUTLASS_DEVICE LoadInputs load_init(Params const&, Storage&, Location const& thread) {
    auto const at = thread.in_cluster();
    LoadInputs inputs{at.m, at.n, 0, 0};
    for (int n = 0; n < kClusterN; ++n) inputs.multicast_codes |= uint16_t(1) << (at.m + kClusterM * n);
    for (int m = 0; m < kClusterM; ++m) inputs.multicast_tokens |= uint16_t(1) << (m + kClusterM * at.n);
    return inputs;
  }
  template <class Tile>
  static CUTLASS_DEVICE TileInputs tile_inputs(Params const& params, LoadInputs const& inputs, Tile const& tile) {
    int const row = tile.m() * kTileM;
    return {row, row / 64 + inputs.n * (kConsumers / kClusterN), tile.n() * params.columns + inputs.m * (params.columns / kClusterM)};
  }

  /// Under the predecessor's tail the first k tiles start for L2. Returns how many were loaded: none.
  template <class Storage>
  static CUTLASS_DEVICE int load_first(Params const& params, Storage&, PipelineState&, LoadInputs const&, TileInputs const& tile,
                                       int k_begin, int k_count) {
    int const ahead = k_count < params.prefetch ? k_count : params.prefetch;
    for (int k = k_begin; k < k_begin + ahead; ++k) {
      cute::SM90_TMA_LOAD_3D::PREFETCH::copy(&params.codes, 0, 2 * k, tile.block);
      cute::SM90_TMA_LOAD_3D::PREFETCH::copy(&params.tokens, k * kTileK, tile.token, 0);
    }
    minfer::wait_for_predecessor();
    return 0;
  }
  template <class Storage>
  static CUTLASS_DEVICE void load(Params const& params, Storage& storage, PipelineState& state, LoadInputs const& inputs,
                                  TileInputs const& tile, int k, int k_end) {
    auto const normal = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    uint32_t const bytes = uint32_t(kCodeBytes + params.columns * kRowBytes + kScaleBytes);
#pragma unroll 1
    for (; k < k_end; ++k) {
      EmptyBarrier::wait(&storage.empty[state.index], state.phase);
      uint64_t* const full = &storage.full[state.index];
      FullBarrier::arrive_and_expect_tx(full, bytes);
      char* const codes = storage.ring + state.index * params.stage_bytes;
      char* const tokens = codes + kCodeBytes;
      copy<kClusterN>(params.codes, full, inputs.multicast_codes, params.hint_codes, codes + inputs.n * (kCodeBytes / kClusterN), 0, 2 * k,
                      tile.block);
      copy<kClusterM>(params.tokens, full, inputs.multicast_tokens, normal, tokens + inputs.m * (params.columns / kClusterM) * kRowBytes,
                      k * kTileK, tile.token, 0);
      cute::SM90_TMA_LOAD_2D::copy(&params.scales, full, normal, tokens + params.columns * kRowBytes, tile.row,
                                   (k * kTileK) >> params.group_shift);
      state.advance();
    }
  }
  static CUTLASS_DEVICE void load_tail(PipelineState&) {}

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE int output_group(int consumer) { return consumer; }
  static CUTLASS_DEVICE bool stores(int) { return true; }
  template <class Storage, class Barrier>
  static CUTLASS_DEVICE void mma_init(Params const&, Storage&, int, int, Barrier const&) {}

  static CUTLASS_DEVICE auto make_accumulator() {
    auto accumulator = cute::make_tensor<float>(cute::Shape<cute::Int<kValues>>{});
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) accumulator(i) = 0.0f;
    return accumulator;
  }

  /// All MMAs have retired at the end.
  template <class Storage, class Accumulator, class Output, class AfterLast>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator, int k_count,
                                 Output const&, int consumer, int thread, AfterLast const& after_last) {
    mma_between<1, kTileN / kStep>(params, storage, state, accumulator, k_count, consumer, thread);
    after_last();
  }
  template <class Storage, class Accumulator>
  static CUTLASS_DEVICE bool mma_tail(Storage&, PipelineState&, Accumulator&, int, int, int) {
    return true;
  }

  /// No CTA of a cluster may leave while another still sends to it.
  static CUTLASS_DEVICE void teardown() {
    if constexpr (kCluster > 1) {
      cute::cluster_arrive();
      cute::cluster_wait();
    }
  }

 private:
  template <int kParts>
  static CUTLASS_DEVICE void copy(CUtensorMap const& map, uint64_t* full, uint16_t multicast, uint64_t hint, char* to, int x, int y,
                                  int z) {
    if constexpr (kParts > 1) {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, full, multicast, hint, to, x, y, z);
    } else {
      cute::SM90_TMA_LOAD_3D::copy(&map, full, hint, to, x, y, z);
    }
  }

  /// The loop of the launch's width, which is from kFirst to kLast steps.
  template <int kFirst, int kLast, class Storage, class Accumulator>
  static CUTLASS_DEVICE void mma_between(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator,
                                         int k_count, int row_group, int thread) {
    if constexpr (kFirst == kLast) {
      mma_columns<kFirst * kStep>(params, storage, state, accumulator, k_count, row_group, thread);
    } else {
      constexpr int kMiddle = (kFirst + kLast) / 2;
      if (params.columns <= kMiddle * kStep) {
        mma_between<kFirst, kMiddle>(params, storage, state, accumulator, k_count, row_group, thread);
      } else {
        mma_between<kMiddle + 1, kLast>(params, storage, state, accumulator, k_count, row_group, thread);
      }
    }
  }

  template <int kColumns, class Storage, class Accumulator>
  static CUTLASS_DEVICE void mma_columns(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator,
                                         int k_count, int row_group, int thread) {
    constexpr int kPart = first_part(kColumns), kRest = kColumns - kPart;
    using Fragments = uint32_t[minfer::w4a8::kFragmentRegisters];
    Sum sums[kPart / 2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPart / 2; ++i) sums[i] = 0;
    Fragments even, odd;
    minfer::w4a8::Int4Reader const reader(thread);
    minfer::StageReleaser<kCluster> const releaser(storage.empty, thread);
    uint32_t const ring = cute::cast_smem_ptr_to_uint(storage.ring), codes = ring + row_group * minfer::w4a8::kRowBlockBytes,
                   tokens = minfer::gemm::low_word_of(storage.ring + kCodeBytes);
    uint32_t const row_scales = ring + kCodeBytes + kColumns * kRowBytes + 2 * (row_group * 64 + thread / 32 * 16 + thread % 32 / 4);

    auto const fence = [&](auto count) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < decltype(count)::value; ++i) cute::warpgroup_fence_operand(sums[i]);
    };
    /// The MMAs of kCount columns from kFrom on.
    auto const issue = [&](auto from, auto count, uint32_t at, Fragments& fragments) {
      constexpr int kFrom = decltype(from)::value, kCount = decltype(count)::value;
      using Op = decltype(cute::GMMA::rs_op_selector<Element, Element, cute::conditional_t<kIntegers, int32_t, float>,
                                                     cute::Shape<cute::_64, cute::Int<kCount>, cute::Int<kTileK>>, cute::GMMA::Major::K,
                                                     cute::GMMA::Major::K>());
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kTileK / kMmaK; ++k) {
        minfer::gemm::multiply<Op>(
            fragments + 4 * k, minfer::gemm::descriptor_of(tokens + (at >> 4) + (kFrom * kRowBytes >> 4) + (kMmaK >> 4) * k), sums,
            k == 0 ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One, std::make_integer_sequence<int, kCount / 2>{});
      }
      cute::warpgroup_commit_batch();
    };
    auto const add = [&](auto from, auto count, float const(&scale)[2]) {
      constexpr int kFrom = decltype(from)::value, kCount = decltype(count)::value;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount / 2; ++i) {
        float const sum = kIntegers ? __int2float_rn(int(sums[i])) : float(sums[i]);
        accumulator(kFrom / 2 + i) = fmaf(sum, scale[i / 2 % 2], accumulator(kFrom / 2 + i));
      }
    };
    using First = cute::C<0>;
    using Part = cute::C<kPart>;
    using Rest = cute::C<kRest>;
    /// A k tile whose weights are in `now`; those of the next go into `next`. Behind the last there is none: its own are decoded again.
    auto const step = [&](Fragments& now, Fragments& next, bool more) {
      int const stage = state.index;
      uint32_t const at = stage * params.stage_bytes;
      issue(First{}, Part{}, at, now);
      float scale[2];
      read_scales(scale, params.bf16_scales, row_scales + at);
      PipelineState ahead = state;
      state.advance();
      if (more) ahead = state;
      if constexpr (kRest > 0) {
        cute::warpgroup_wait<0>();
        fence(Part{});
        add(First{}, Part{}, scale);
        fence(Part{});
        issue(Part{}, Rest{}, at, now);
      }
      FullBarrier::wait(&storage.full[ahead.index], ahead.phase);
      reader.template read<kIntegers>(codes + ahead.index * params.stage_bytes, next);
      cute::warpgroup_wait<0>();
      releaser.release(stage);
      if constexpr (kRest > 0) {
        fence(Rest{});
        add(Part{}, Rest{}, scale);
      } else {
        fence(Part{});
        add(First{}, Part{}, scale);
      }
    };
    FullBarrier::wait(&storage.full[state.index], state.phase);
    reader.template read<kIntegers>(codes + state.index * params.stage_bytes, even);
    fence(Part{});
    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_count > 1; k_count -= 2) {
      step(even, odd, true);
      step(odd, even, k_count > 2);
    }
    if (k_count > 0) step(even, odd, false);
    CUTLASS_PRAGMA_UNROLL
    for (int i = kColumns / 2; i < kValues; ++i) accumulator(i) = 0.0f;  // no registers in this loop
  }

  /// Those of a thread's two rows, 8 apart.
  static CUTLASS_DEVICE void read_scales(float (&scale)[2], bool bf16, uint32_t at) {
    CUTLASS_PRAGMA_UNROLL
    for (int h = 0; h < 2; ++h) {
      uint16_t bits;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(at + 16 * h) : "memory");
      float const unit = minfer::w4a8::DecodeInt4<kIntegers>::kUnit;
      scale[h] = unit * (bf16 ? __uint_as_float(uint32_t(bits) << 16) : __half2float(__ushort_as_half(bits)));
    }
  }
};

}  // namespace cutlass::gemm::collective
