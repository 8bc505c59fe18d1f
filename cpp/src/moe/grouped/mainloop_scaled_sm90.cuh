// Mainloop of the grouped GEMM of 8-bit operands for sm_90: e4m3 or int8, an expert's weights by TMA, its tokens by TMA where they lie in
// order, row by row by cp.async where they are gathered; WGMMA with both operands in shared memory.
//
// Swapped, as in mainloop_sm90.cuh, the weights' rows are the MMA's m and the tokens its n, and a tile computes as many tokens as it has,
// in steps of kStep. Else tokens are its m, in blocks of 64 that take turns at the warpgroups: of many tokens each thread then needs the
// scales of two for a block, and not those of all, whose way out of shared memory takes longer than the MMAs leave time for (128 x 128
// tiles: 256 of 512 cycles of its bandwidth). A stage is kTileK bytes of k of both, in lines of 128, and the scales of its tokens.
// Sums. WGMMA's sums of e4m3 keep about 14 bits: those of 128 of k are added up in fp32 (promotion), times their scales where operands are
// scaled by groups of k; a launch may leave that out (fast). int8's sums are integers; they are added up in fp32 only where tokens are
// scaled by groups of k. A group of a token is 128, 64 or 32 of k, one of the weight 128 rows and 128 of k (block_scales.cuh).
// Scales. Those of a stage's tokens are copied behind it by warps of the producer's warpgroup, one cp.async each, so that any strides, rows
// that are gathered and all stages at once are the same to them: one warp, or, where no rows are gathered, all. Likewise the weight's: one
// number, or one for gates and one for ups, of all rows of a tile. Kernels of clusters have them come by TMA, where tokens are contiguous
// and neither gathered nor masked: no warp's instructions are between a stage that is free and one that is full.
// Clusters. Where rows are tokens, the CTAs of a cluster have neighbouring tiles of the weight for the same tokens, of which each loads a
// part for all: by themselves, CTAs of 256 x 128 tiles take three quarters of what L2 can give, and are 3 to 7 % slower. What limits them
// then is shared memory: of 128 bytes a cycle MMAs of 64 x 128 read 94, and TMA writes 48.
// Pipeline: full (TMA's bytes, an arrival of each gathering thread and of each thread that copies scales), empty (one arrival of each
// consumer warp). A warpgroup adds the sums of one block of 64 rows while the tensor cores work for the others: those of its CTA, or of the
// other CTA on the SM.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cuda.h>

#include "common/dependent_launch.cuh"
#include "common/ring.cuh"
#include "common/stage_release.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "gemm/wgmma_sm90.cuh"
#include "minfer/types.h"
#include "moe/grouped/expert_scales.cuh"
#include "moe/grouped/expert_tiles.cuh"
#include "moe/grouped/row_gather.cuh"

namespace minfer::moe {

/// Dispatch policy: 8-bit operands in shared memory, tokens in expert order or gathered, scales beside them.
template <class Config_>
struct MainloopSm90TmaScaledExperts {
  using Config = Config_;
  static constexpr int Stages = Config::kStages;
  using ClusterShape = cute::Shape<cute::_1, cute::Int<Config::kCluster>, cute::_1>;
  using ArchTag = cutlass::arch::Sm90;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

}  // namespace minfer::moe

namespace cutlass::gemm::collective {

template <class Config, class TileShape_, class Element_, class StrideA, class ElementB, class StrideB, class TiledMma_, class GmemCopyA,
          class SmemLayoutA, class SmemCopyA, class TransformA, class GmemCopyB, class SmemLayoutB, class SmemCopyB, class TransformB>
struct CollectiveMma<minfer::moe::MainloopSm90TmaScaledExperts<Config>, TileShape_, Element_, StrideA, ElementB, StrideB, TiledMma_,
                     GmemCopyA, SmemLayoutA, SmemCopyA, TransformA, GmemCopyB, SmemLayoutB, SmemCopyB, TransformB> {
  using DispatchPolicy = minfer::moe::MainloopSm90TmaScaledExperts<Config>;
  using TileShape = TileShape_;
  using Element = Element_;
  using ExpertTile = minfer::moe::ExpertTile;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK, kStages = Config::kStages;
  static constexpr int kThreads = Config::kThreads, kConsumers = kThreads / 128 - 1;
  static constexpr bool kIntegers = cute::is_same_v<Element, int8_t>;
  static constexpr bool kPingpong = false, kOrdered = false, kPipelineFences = false;
  static constexpr bool kRereadsThread = kTileM * kTileN / (128 * kConsumers) > 64;  // there is no register for what follows from it
  static constexpr bool kRelocates = false;
  static_assert(Config::kSchedule == minfer::Schedule::kCooperative && (kConsumers == 1 || kConsumers == 2));
  static constexpr int kLaunchRegisters = 65536 / (kThreads * Config::kCtasPerSm) / 8 * 8;
  static constexpr int kProducerRegisters = kTileM > 128 && !Config::kSwap ? 56 : 40;  // those of 256 tokens' scales
  static constexpr int kConsumerRegisters =
      cute::min(232, (kLaunchRegisters * kThreads - kProducerRegisters * 128) / (kConsumers * 128) / 8 * 8);
  static constexpr bool kSwap = Config::kSwap;
  static constexpr int kCluster = Config::kCluster;
  static_assert(kCluster == 1 || !kSwap);
  static constexpr int kTokens = kSwap ? kTileN : kTileM, kWeightRows = kSwap ? kTileM : kTileN;  // of a tile
  static constexpr int kGroupM = kTileM / kConsumers, kMmaM = kGroupM / 64;  // rows of a warpgroup, and blocks of 64 of them
  static constexpr int kStep = Config::kTokenStep;                           // tokens of a tile are rounded up to these
  static constexpr int kSmallBox = kStep < 16 ? 8 : 16, kLargeBox = kTokens >= 64 ? 64 : kSmallBox;  // rows of TMA's loads of tokens
  static constexpr int kLine = 128, kHalves = kTileK / kLine;                                        // bytes of a line, lines of a stage
  static constexpr int kBlockValues = kTileN / 2, kValues = kMmaM * kBlockValues;                    // accumulators of a thread
  static constexpr int kMmaK = 32, kMmas = kLine / kMmaK;
  static constexpr int kMostParts = kLine / Config::kLeastGroup;  // groups of a token in 128 of k
  using Sum = cute::conditional_t<kIntegers, uint32_t, float>;    // of the MMA, in registers
  static constexpr int kMostSums = 64;  // of a thread, of several parts: an MMA takes registers that a thread is launched with
  static_assert(sizeof(Element) == 1 && kGroupM % 64 == 0 && kTokens % kLargeBox == 0 && kTokens % kStep == 0 && kTileK % kLine == 0);
  static_assert(minfer::gemm::kScaleBlock % kWeightRows == 0, "a tile's rows of the weight share the scale of a block");
  static constexpr bool kScalesByTma = kCluster > 1;  // where they lie as it wants them
  static constexpr int kUp = kScalesByTma ? 32 : 1;   // from the scale of gates to that of ups
  // Of a line: the scales of tokens, then the weight's, with padding: TMA writes to whole 128 bytes, from a whole 16 bytes of memory.
  static constexpr int kTokenScales = kScalesByTma ? kTokens + 32 : kMostParts * kTokens, kWeightScales = kScalesByTma ? 2 * kUp : 4;
  static constexpr int kStageScales = kTokenScales + kWeightScales;
  static_assert(!kScalesByTma || (kHalves == 1 && kMostParts == 1 && kTokens % 32 == 0 && kTokens <= 256));

  using Gather = minfer::moe::RowGather<kTokens, kHalves, kStages, kConsumers + 1, kTokens <= 16 ? 1 : 2>;
  using PipelineState = minfer::Ring<kStages>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  struct TmaScales {
    CUtensorMap tokens, last_tokens;  // [k / 128, rows]; in boxes of a tile's rows, and of kScaleQuad
    CUtensorMap gates, ups;           // [experts, n / 128, k / 128], in boxes of kScaleQuad
    int32_t quad_mask;                // of a row or k tile, its place among four that TMA loads together; 0 where it loads no scales
  };
  struct NoTmaScales {};
  static constexpr int kScaleQuad = 4;
  struct Params {
    cute::conditional_t<kScalesByTma, TmaScales, NoTmaScales> tma_scales;
    CUtensorMap weights;                               // [experts, n, k] or, gated, [experts, n / 16, 2, 8, k]
    CUtensorMap tokens, few_tokens;                    // [1, rows, k], in boxes of kLargeBox and kSmallBox rows
    typename Gather::template Source<Element> source;  // gather is null where tokens lie in order
    uint64_t hint_tokens;
    minfer::moe::ExpertScales scales;
    bool gated;
    bool adds;   // sums are added up in fp32
    bool never;  // false, which the compiler does not know
    float one;   // 1, likewise
  };

  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    alignas(1024) Element weights[kStages][kWeightRows * kTileK];
    alignas(1024) Element tokens[kStages][kTokens * kTileK];
    typename Epilogue::TensorStorage staging;
    alignas(kScalesByTma ? 128 : 16) float scales[kStages][kHalves][kStageScales];
    typename Epilogue::PipelineStorage epilogue;
    alignas(8) uint64_t full[kStages], empty[kStages];
    typename Scheduler::SharedStorage scheduler;
    uint32_t source[kTokens];  // rows of a that are gathered: where they begin, in units of 16 bytes
    typename cutlass::OrderedSequenceBarrier<1, 2>::SharedStorage order;
  };

  // ---- set-up -------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.weights));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.tokens));
  }
  static CUTLASS_DEVICE bool gathers(Params const& params) { return params.source.gather != nullptr; }
  /// Whether sums are multiplied by scales as they are added up: then tokens and weight all have one, be it 1.
  static CUTLASS_DEVICE bool copies_scales(Params const& params) { return params.scales.exist(); }
  static CUTLASS_DEVICE bool loads_scales(Params const& params) {
    if constexpr (kScalesByTma) return params.tma_scales.quad_mask != 0;
    return false;
  }
  static CUTLASS_DEVICE int quad_mask(Params const& params) {
    if constexpr (kScalesByTma) return params.tma_scales.quad_mask;
    return 0;
  }
  static CUTLASS_DEVICE int scale_threads(Params const& params) {
    return !copies_scales(params) || loads_scales(params) ? 0 : gathers(params) ? 32 : 32 * kAuxiliaryWarps;
  }
  template <class Storage>
  static CUTLASS_DEVICE void init_barriers(Params const& params, Storage& storage) {
    int const arrivals = 1 + (gathers(params) ? Gather::kThreads : 0) + scale_threads(params);
    for (int s = 0; s < kStages; ++s) {
      FullBarrier::init(&storage.full[s], uint32_t(arrivals));
      EmptyBarrier::init(&storage.empty[s], 4 * kConsumers * kCluster);
    }
  }
  template <class Storage, class Location>
  CUTLASS_DEVICE CollectiveMma(Params const&, Storage&, int, int, Location const&) {}

  // ---- producers ----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE PipelineState producer_start(Params const&) { return PipelineState::of_producer(); }
  static CUTLASS_DEVICE PipelineState consumer_start(Params const&) { return {}; }
  struct LoadInputs {
    bool gated, ordered;
  };
  template <class Storage, class Location>
  static CUTLASS_DEVICE LoadInputs load_init(Params const& params, Storage&, Location const&) {
    return {params.gated, !gathers(params)};
  }

  struct TileInputs {
    ExpertTile tile;
    int tokens;  // that TMA loads
    uint32_t bytes;
    uint64_t hint;
  };
  /// Rows of tokens, of which the CTAs of a cluster load boxes by turns.
  static CUTLASS_DEVICE void load_rows(CUtensorMap const& map, uint64_t* full, uint64_t hint, Element* to, int column, int row, int turn) {
    if constexpr (kCluster == 1) {
      cute::SM90_TMA_LOAD_3D::copy(&map, full, hint, to, column, row, 0);
    } else if (turn % kCluster == int(cute::block_rank_in_cluster())) {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, full, uint16_t((1 << kCluster) - 1), hint, to, column, row, 0);
    }
  }
  static CUTLASS_DEVICE TileInputs tile_inputs([[maybe_unused]] Params const& params, LoadInputs const& load, ExpertTile const& tile) {
    using Hint = cute::TMA::CacheHintSm90;
    int const tokens = load.ordered ? (tile.tokens + kSmallBox - 1) / kSmallBox * kSmallBox : 0;
    uint32_t const scales = loads_scales(params) ? (kTokens + (load.gated ? 3 : 2) * kScaleQuad) * uint32_t(sizeof(float)) : 0;
    return {tile, tokens, uint32_t(kWeightRows + tokens) * kTileK + scales, uint64_t(tile.alone ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL)};
  }
  template <class Storage>
  static CUTLASS_DEVICE int load_first(Params const&, Storage&, PipelineState&, LoadInputs const&, TileInputs const&, int, int) {
    return 0;
  }
  template <class Storage>
  static CUTLASS_DEVICE void load(Params const& params, Storage& storage, PipelineState& state, LoadInputs const& init,
                                  TileInputs const& inputs, int k_begin, int k_end) {
#pragma unroll 1
    for (int k = k_begin; k < k_end; ++k) {
      EmptyBarrier::wait(&storage.empty[state.index], state.phase);
      uint64_t* const full = &storage.full[state.index];
      FullBarrier::arrive_and_expect_tx(full, inputs.bytes);
      if constexpr (kScalesByTma) {
        if (loads_scales(params)) load_scales(params, &storage.scales[state.index][0][0], full, init, inputs, k);
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        int const column = k * kTileK + half * kLine;
        Element* const weights = &storage.weights[state.index][half * kWeightRows * kLine];
        if (init.gated) {
          cute::SM90_TMA_LOAD_5D::copy(&params.weights, full, inputs.hint, weights, column, 0, 0,
                                       inputs.tile.weight_tile * (kWeightRows / 16), inputs.tile.expert);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&params.weights, full, inputs.hint, weights, column, inputs.tile.weight_tile * kWeightRows,
                                       inputs.tile.expert);
        }
        Element* const rows = &storage.tokens[state.index][half * kTokens * kLine];
        int row = 0;
#pragma unroll 1
        for (; row + kLargeBox <= inputs.tokens; row += kLargeBox) {
          load_rows(params.tokens, full, params.hint_tokens, rows + row * kLine, column, inputs.tile.row + row, row / kLargeBox);
        }
#pragma unroll 1
        for (; row < inputs.tokens; row += kSmallBox) {
          load_rows(params.few_tokens, full, params.hint_tokens, rows + row * kLine, column, inputs.tile.row + row, row / kSmallBox);
        }
      }
      state.advance();
    }
  }
  /// Those of a tile's tokens, also of rows behind its last, whose sums nobody stores, and of the weight, each from a whole 16 bytes on.
  static CUTLASS_DEVICE void load_scales(Params const& params, float* to, uint64_t* full, LoadInputs const& init, TileInputs const& inputs,
                                         int k) {
    auto const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    ExpertTile const& tile = inputs.tile;
    int const row = tile.weight_tile * (init.gated ? kWeightRows / 2 : kWeightRows);
    int const block = min(row, params.scales.n - 1) / minfer::gemm::kScaleBlock;
    int const first = tile.row / kScaleQuad * kScaleQuad, k_first = k / kScaleQuad * kScaleQuad;
    float* const of_weight = to + kTokenScales;
    cute::SM90_TMA_LOAD_2D::copy(&params.tma_scales.tokens, full, hint, to, first, k);
    cute::SM90_TMA_LOAD_2D::copy(&params.tma_scales.last_tokens, full, hint, to + kTokens, first + kTokens, k);
    cute::SM90_TMA_LOAD_3D::copy(&params.tma_scales.gates, full, hint, of_weight, k_first, block, tile.expert);
    if (init.gated) cute::SM90_TMA_LOAD_3D::copy(&params.tma_scales.ups, full, hint, of_weight + kUp, k_first, block, tile.expert);
  }
  static CUTLASS_DEVICE void load_tail(PipelineState&) {}

  // The warps that gather rows, then the one that copies scales.
  static constexpr int kAuxiliaryWarps = Gather::kWarps + 1;
  static CUTLASS_DEVICE bool has_auxiliary_load(Params const& params) {
    return gathers(params) || (copies_scales(params) && !loads_scales(params));
  }
  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE void load_auxiliary(Params const& params, Storage& storage, WorkItems const& items, int thread) {
    if (!gathers(params)) {
      if (copies_scales(params)) copy_scales<kAuxiliaryWarps>(params, storage, items, thread);
      return;
    }
    if (thread >= Gather::kThreads) {
      if (copies_scales(params)) copy_scales<1>(params, storage, items, thread - Gather::kThreads);
      return;
    }
    typename Gather::Stages const stages{storage.source, storage.full, storage.empty, cute::cast_smem_ptr_to_uint(&storage.tokens[0][0])};
    auto const at = [&](int t) { return items.at(t); };
    Gather::run(stages, at, items.first_tile(), items.count(), items.step(), items.k_tiles(), params.source, thread);
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE int output_group(int consumer) { return consumer; }
  static CUTLASS_DEVICE bool stores(int) { return true; }
  template <class Storage, class Barrier>
  static CUTLASS_DEVICE void mma_init(Params const&, Storage&, int, int, Barrier const&) {}
  /// Zeros, which are in no sum where they are not added to: undefined, they would be set again in front of each width's loop.
  static CUTLASS_DEVICE auto make_accumulator() {
    auto accumulator = cute::make_tensor<float>(cute::Int<kValues>{});
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      accumulator(i) = 0.0f;
      cute::warpgroup_fence_operand(accumulator(i));
    }
    return accumulator;
  }

  /// after_last() is called when the last MMA has been issued.
  template <class Storage, class Accumulator, class Output, class AfterLast>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator, int k_count,
                                 Output const& output, int consumer, int thread, AfterLast const&) {
    if constexpr (kSwap) {
      multiply_at_most<kTileN>(output.tile.tokens, params, storage, state, accumulator, k_count, output, consumer * kMmaM, thread);
    } else {
      choose<kTileN>(params, storage, state, accumulator, k_count, output, consumer, thread);
    }
  }
  template <class Storage, class Accumulator>
  static CUTLASS_DEVICE bool mma_tail(Storage&, PipelineState& state, Accumulator&, int k_count, int, int) {
    state.advance(k_count);
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
  /// The scales of all tiles, by so many warps. Those behind k, or of a row that a does not have, are 0. Few instructions: this is as fast
  /// as the consumers ever are.
  template <int kWarps, class Storage, class WorkItems>
  static CUTLASS_DEVICE void copy_scales(Params const& params, Storage& storage, WorkItems const& items, int thread) {
    constexpr int kThreadsOf = 32 * kWarps, kOfThread = (kTokens + kThreadsOf - 1) / kThreadsOf;  // tokens
    auto const& scales = params.scales;
    auto state = producer_start(params);
    int const parts = scales.parts, tiles = items.count(), k_tiles = items.k_tiles();
    int32_t const token_step = int32_t(scales.tokens.k_stride), weight_step = int32_t(scales.weight.k_stride);
    uint32_t const all = cute::cast_smem_ptr_to_uint(&storage.scales[0][0][thread]);
    for (int t = items.first_tile(); t < tiles; t += items.step()) {
      ExpertTile const tile = items.at(t);
      int32_t tokens[kOfThread];
      uint32_t exists = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kOfThread; ++i) {
        int row = tile.row + thread + kThreadsOf * i;
        bool inside = thread + kThreadsOf * i < tile.tokens;
        if (scales.gather != nullptr && inside) {
          row = minfer::load_operand(scales.gather + row);
          inside = uint32_t(row) < uint32_t(scales.rows);
        }
        tokens[i] = inside ? int32_t(row * scales.tokens.row_stride + tile.expert * scales.expert_offset) : 0;
        exists |= uint32_t(inside) << i;
      }
      int const row = tile.weight_tile * (params.gated ? kWeightRows / 2 : kWeightRows);
      int const block = min(row, scales.n - 1) / minfer::gemm::kScaleBlock;
      int32_t weight = int32_t(tile.expert * scales.expert_stride + block * scales.weight.row_stride +
                               (params.gated && thread == 1 ? scales.up_offset : 0));
      int groups = scales.groups, blocks = scales.blocks;  // that are left
#pragma unroll 1
      for (int k = 0; k < k_tiles; ++k) {
        EmptyBarrier::wait(&storage.empty[state.index], state.phase);
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < kHalves; ++half) {
          uint32_t to = all + (state.index * kHalves + half) * (kStageScales * 4);
          if (thread < 2) {
            minfer::moe::send_scale(scales.weight, weight, blocks > 0, to + (kTokenScales + thread * (kUp - 1)) * 4);
          }
          if (--blocks > 0) weight += weight_step;
#pragma unroll 1
          for (int part = 0; part < parts; ++part, to += kTokens * 4) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kOfThread; ++i) {
              if (kTokens % kThreadsOf != 0 && thread + kThreadsOf * i >= kTokens) break;
              minfer::moe::send_scale(scales.tokens, tokens[i], groups > 0 && (exists >> i & 1) != 0, to + 4 * kThreadsOf * i);
              if (groups > 1) tokens[i] += token_step;
            }
            --groups;
          }
        }
        cutlass::arch::cpasync_barrier_arrive_noinc(&storage.full[state.index]);
        state.advance();
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  static CUTLASS_DEVICE float to_float(Sum sum) {
    if constexpr (kIntegers) {
      return __int2float_rn(int(sum));
    } else {
      return sum;
    }
  }

  /// The MMAs of one block of 64 rows on kCount times 32 of k, from units a and b of 16 bytes on; into sums that begin at 0, or are kept.
  template <int kColumns, int kCount>
  static CUTLASS_DEVICE void issue(uint32_t a, uint32_t b, Sum* sums, cute::GMMA::ScaleOut keep) {
    using Op = decltype(cute::GMMA::ss_op_selector<Element, Element, cute::conditional_t<kIntegers, int32_t, float>,
                                                   cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kLine>>, cute::GMMA::Major::K,
                                                   cute::GMMA::Major::K>());
    auto const numbers = std::make_integer_sequence<int, kColumns / 2>{};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      minfer::gemm::multiply<Op>(minfer::gemm::descriptor_of(a + 2 * i), minfer::gemm::descriptor_of(b + 2 * i), sums,
                                 i == 0 ? keep : cute::GMMA::ScaleOut::One, numbers);
    }
  }
  template <int kColumns>
  static CUTLASS_DEVICE void fence(Sum* sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns / 2; ++i) cute::warpgroup_fence_operand(sums[i]);
  }

  /// How sums are added up: not at all, as they are, times the scales of tokens and of the weight, one or one for gates and one for ups; or
  /// with two of the weight, those of each half or quarter of 128 of k.
  enum class Adds { kNone, kSums, kScaled, kGated, kHalves, kQuarters };

  template <int kColumns, Adds kAdds, class Storage, class Accumulator, class Output>
  static CUTLASS_DEVICE void multiply(Params const& params, Storage& storage, PipelineState ring, Accumulator& accumulator, int k_tiles,
                                      Output const& output, int slab, int thread) {
    constexpr int kParts = kAdds == Adds::kHalves ? 2 : kAdds == Adds::kQuarters ? 4 : 1, kPartMmas = kMmas / kParts;
    // Few tokens: the parts of a stage have sums of their own, and all of its MMAs are on their way before the first are waited for.
    constexpr int kSets = kHalves * kParts;
    constexpr bool kTogether = kAdds != Adds::kNone && kSwap && kMmaM == 1 && kSets > 1 && kSets * kColumns / 2 <= kMostSums;
    constexpr int kSums = kAdds == Adds::kNone ? kValues : kTogether ? kSets * kColumns / 2 : kBlockValues;
    constexpr uint32_t kStageUnitsA = kTileM * kTileK / 16, kStageUnitsB = kTileN * kTileK / 16;
    constexpr uint32_t kHalfUnitsA = kTileM * kLine / 16, kHalfUnitsB = kTileN * kLine / 16;
    constexpr uint32_t kSlabUnits = (kSwap ? 64 : 64 * kConsumers) * kLine / 16;  // from a block of 64 rows to the warpgroup's next
    auto& rows = operand_a(storage);
    auto& columns = operand_b(storage);
    uint32_t const a = minfer::gemm::low_word_of(&rows[0][slab * 64 * kLine]), b = minfer::gemm::low_word_of(&columns[0][0]);
    bool const gathered = gathers(params);
    minfer::StageReleaser<kCluster> const releaser(storage.empty, thread);
    auto const release = [&](int stage) {
      if constexpr (kCluster > 1) {
        releaser.release(stage);
      } else {
        minfer::release_stage<1>(&storage.empty[stage], thread);
      }
    };
    Sum sums[kSums];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
    auto const wait_for = [&](int stage, uint32_t phase) {
      FullBarrier::wait(&storage.full[stage], phase);
      if (gathered) cutlass::arch::fence_view_async_shared();  // cp.async wrote through another proxy than the tensor cores read by
    };
    if constexpr (kAdds == Adds::kNone) {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kMmaM; ++block) fence<kColumns>(sums + block * kBlockValues);
      int last = ring.index;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int k = 0; k < k_tiles; ++k) {
        int const stage = ring.index;
        wait_for(stage, ring.phase);
        cute::warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < kHalves; ++half) {
          auto const keep = half > 0 || k > 0 ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero;
          CUTLASS_PRAGMA_UNROLL
          for (int block = 0; block < kMmaM; ++block) {
            issue<kColumns, kMmas>(a + stage * kStageUnitsA + half * kHalfUnitsA + block * kSlabUnits,
                                   b + stage * kStageUnitsB + half * kHalfUnitsB, sums + block * kBlockValues, keep);
          }
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();
        if constexpr (kCluster > 1) {
          releaser.release(last, k > 0);
        } else {
          minfer::release_stage<1>(&storage.empty[last], thread, k > 0);
        }
        last = stage;
        ring.advance();
      }
      cute::warpgroup_wait<0>();
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kMmaM; ++block) fence<kColumns>(sums + block * kBlockValues);
      release(last);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) accumulator(i) = to_float(sums[i]) * params.one;  // a product, not a copy: see keep_in_other_bank
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums; i += kColumns / 2) fence<kColumns>(sums + i);
      bool full = FullBarrier::test_wait(&storage.full[ring.index], ring.phase, 1);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int k = 0; k < k_tiles; ++k) {
        int const stage = ring.index;
        if (!full) FullBarrier::wait(&storage.full[stage], ring.phase);
        if (gathered) cutlass::arch::fence_view_async_shared();
        ring.advance();
        auto const look_ahead = [&] {
          full = FullBarrier::test_wait(&storage.full[ring.index], ring.phase, 1);
        };  // answers during additions
        auto const send = [&](int half, int part, int block, Sum* to) {
          uint32_t const along = 2 * uint32_t(part * kPartMmas);
          issue<kColumns, kPartMmas>(a + stage * kStageUnitsA + half * kHalfUnitsA + block * kSlabUnits + along,
                                     b + stage * kStageUnitsB + half * kHalfUnitsB + along, to, cute::GMMA::ScaleOut::Zero);
          cute::warpgroup_commit_batch();
        };
        if constexpr (kTogether) {
          cute::warpgroup_arrive();
          CUTLASS_PRAGMA_UNROLL
          for (int set = 0; set < kSets; ++set) send(set / kParts, set % kParts, 0, sums + set * (kColumns / 2));
          cute::for_each(cute::make_int_sequence<kSets>{}, [&](auto set) {
            constexpr int kSet = decltype(set)::value;
            float const* const line = storage.scales[stage][kSet / kParts];
            Sum* const of_set = sums + kSet * (kColumns / 2);
            add<kColumns, kAdds>(line + kSet % kParts * kTokens, line + kTokenScales, &accumulator(0), of_set, thread, [&] {
              cute::warpgroup_wait<kSets - 1 - kSet>();
              fence<kColumns>(of_set);
              if constexpr (kSet == kSets - 1) look_ahead();
            });
          });
        } else {
          CUTLASS_PRAGMA_UNROLL
          for (int half = 0; half < kHalves; ++half) {
#pragma unroll 1
            for (int part = 0; part < kParts; ++part) {
              CUTLASS_PRAGMA_UNROLL
              for (int block = 0; block < kMmaM; ++block) {
                cute::warpgroup_arrive();
                send(half, part, block, sums);
                float const* const line = storage.scales[stage][half];
                float const *const factors = line + part * kTokens, *const weight = line + kTokenScales;
                auto const retire = [&] {
                  cute::warpgroup_wait<0>();
                  fence<kColumns>(sums);
                  if (half == kHalves - 1 && block == kMmaM - 1) look_ahead();
                };
                if constexpr (kSwap) {
                  add<kColumns, kAdds>(factors, weight, &accumulator(block * kBlockValues), sums, thread, retire);
                } else {
                  int const row = (block * kConsumers + slab) * 64 + thread / 32 * 16 + thread % 32 / 4;
                  float const* const of_row = factors + row + (output.tile.row & quad_mask(params));
                  float const* const of_k = weight + (k & quad_mask(params));
                  add_by_row<kAdds>(of_row, of_k, &accumulator(block * kBlockValues), sums, retire);
                }
              }
            }
          }
        }
        release(stage);
      }
      keep_in_other_bank(params, storage, accumulator);
    }
  }

  /// Accumulators lie in the other bank of registers than the sums that are added to them: an FFMA of three operands from one bank takes
  /// two cycles. Sums begin at an even register, as the MMA wants them. The compiler places what an access of 8 bytes has in such a pair,
  /// so that an access to each two accumulators, the second first, moves them by one. It is never executed.
  template <class Storage, class Accumulator>
  static CUTLASS_DEVICE void keep_in_other_bank(Params const& params, Storage& storage, Accumulator const& accumulator) {
    if (params.never) {
      auto* const pairs = reinterpret_cast<float2*>(&storage.tokens[0][0]);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; i += 2) pairs[i] = make_float2(accumulator(i + 1), accumulator(i));
    }
  }

  template <class Storage>
  static CUTLASS_DEVICE auto& operand_a(Storage& storage) {
    if constexpr (kSwap) {
      return storage.weights;
    } else {
      return storage.tokens;
    }
  }
  template <class Storage>
  static CUTLASS_DEVICE auto& operand_b(Storage& storage) {
    if constexpr (kSwap) {
      return storage.tokens;
    } else {
      return storage.weights;
    }
  }

  /// Adds the sums of a block of tokens, which retire() waits for. A thread has two tokens, 8 apart, whose scales are `tokens`; gates and
  /// ups take turns, 8 columns each.
  template <Adds kAdds, class Retire>
  static CUTLASS_DEVICE void add_by_row(float const* tokens, float const* weight, float* accumulator, Sum* sums, Retire const& retire) {
    constexpr bool kTwo = !kIntegers && kAdds != Adds::kScaled;
    float factor[2][2];  // of gates and ups
    if constexpr (kAdds != Adds::kSums) {
      float2 const of_weight = kUp == 1 ? *reinterpret_cast<float2 const*>(weight) : make_float2(weight[0], kTwo ? weight[kUp] : 0.0f);
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        float const token = tokens[8 * h];
        factor[0][h] = token * of_weight.x;
        factor[1][h] = kTwo ? token * of_weight.y : factor[0][h];
      }
    }
    retire();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTileN / 2; ++i) {
      if constexpr (kAdds == Adds::kSums) {
        accumulator[i] += to_float(sums[i]);
      } else {
        accumulator[i] = fmaf(to_float(sums[i]), factor[i / 4 % 2][i / 2 % 2], accumulator[i]);
      }
    }
  }

  /// Adds a block's sums, which retire() waits for. Tokens are 8 i + 2 (lane % 4) and the next; gates and ups are rows 8 apart.
  template <int kColumns, Adds kAdds, class Retire>
  static CUTLASS_DEVICE void add(float const* factors, float const* weight, float* accumulator, Sum* sums, int thread,
                                 Retire const& retire) {
    if constexpr (kAdds == Adds::kSums) {
      retire();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns / 2; ++i) accumulator[i] += to_float(sums[i]);
    } else {
      constexpr bool kTwo = !kIntegers && kAdds != Adds::kScaled;
      auto const* const pairs = reinterpret_cast<float2 const*>(factors) + thread % 4;
      float2 const of_weight = *reinterpret_cast<float2 const*>(weight);
      // Factors that are ready when the MMAs are, as many as there are registers for.
      constexpr int kMost = (kConsumerRegisters - 24 - kValues - kBlockValues) / (kTwo ? 4 : 2);
      constexpr int kEarly = kMost < 1 ? 1 : kColumns / 8 < kMost ? kColumns / 8 : kMost;
      float2 gates[kEarly], ups[kTwo ? kEarly : 1];
      auto const times = [](float2 x, float y) { return make_float2(x.x * y, x.y * y); };
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEarly; ++i) {
        float2 const token = pairs[4 * i];
        gates[i] = times(token, of_weight.x);
        if constexpr (kTwo) ups[i] = times(token, of_weight.y);
      }
      retire();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns / 8; ++i) {
        bool const early = i < kEarly;
        float2 const token = early ? make_float2(0.0f, 0.0f) : pairs[4 * i];
        float2 const gate = early ? gates[early ? i : 0] : times(token, of_weight.x);
        float2 const up = !kTwo ? gate : early ? ups[early ? i : 0] : times(token, of_weight.y);
        accumulator[4 * i] = fmaf(to_float(sums[4 * i]), gate.x, accumulator[4 * i]);
        accumulator[4 * i + 1] = fmaf(to_float(sums[4 * i + 1]), gate.y, accumulator[4 * i + 1]);
        accumulator[4 * i + 2] = fmaf(to_float(sums[4 * i + 2]), up.x, accumulator[4 * i + 2]);
        accumulator[4 * i + 3] = fmaf(to_float(sums[4 * i + 3]), up.y, accumulator[4 * i + 3]);
      }
    }
  }

  /// The loop for columns of a number that kColumns covers.
  template <int kColumns, class Storage, class Accumulator, class Output>
  static CUTLASS_DEVICE void multiply_at_most(int tokens, Params const& params, Storage& storage, PipelineState const& ring,
                                              Accumulator& accumulator, int k_tiles, Output const& output, int slab, int thread) {
    if constexpr (kColumns > kStep) {
      if (tokens <= kColumns - kStep) {
        multiply_at_most<kColumns - kStep>(tokens, params, storage, ring, accumulator, k_tiles, output, slab, thread);
        return;
      }
    }
    choose<kColumns>(params, storage, ring, accumulator, k_tiles, output, slab, thread);
  }
  /// The loop of the launch's scales.
  template <int kColumns, class Storage, class Accumulator, class Output>
  static CUTLASS_DEVICE void choose(Params const& params, Storage& storage, PipelineState const& ring, Accumulator& accumulator,
                                    int k_tiles, Output const& output, int slab, int thread) {
    auto const run = [&](auto adds) {
      multiply<kColumns, decltype(adds)::value>(params, storage, ring, accumulator, k_tiles, output, slab, thread);
    };
    if (!params.adds) {
      run(cute::integral_constant<Adds, Adds::kNone>{});
    } else if (kMostParts >= 2 && params.scales.parts == 2) {
      run(cute::integral_constant<Adds, Adds::kHalves>{});
    } else if (kMostParts == 4 && params.scales.parts == 4) {
      run(cute::integral_constant < Adds, kMostParts == 4 ? Adds::kQuarters : Adds::kHalves > {});
    } else if (kIntegers || (copies_scales(params) && !params.gated)) {
      run(cute::integral_constant<Adds, Adds::kScaled>{});
    } else if constexpr (!kIntegers) {
      if (copies_scales(params)) {
        run(cute::integral_constant<Adds, Adds::kGated>{});
      } else {
        run(cute::integral_constant<Adds, Adds::kSums>{});
      }
    }
  }
};

}  // namespace cutlass::gemm::collective
