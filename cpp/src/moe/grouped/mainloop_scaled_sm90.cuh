// Mainloop of the grouped GEMM of 8-bit operands for sm_90: e4m3 or int8, an expert's weights by TMA, its tokens by TMA where they lie in
// order, row by row by cp.async where they are gathered; WGMMA with both operands in shared memory.
//
// As in mainloop_sm90.cuh the weights' rows are the MMA's m and the tokens its n, and a tile computes as many tokens as it has, in steps of
// kStep. A stage is kTileK bytes of k of both, in lines of 128, and the scales of its tokens.
// Sums. WGMMA's sums of e4m3 keep about 14 bits: those of 128 of k are added up in fp32 (promotion), times their scales where operands are
// scaled by groups of k; a launch may leave that out (fast). int8's sums are integers; they are added up in fp32 only where tokens are
// scaled by groups of k. A group of a token is 128, 64 or 32 of k, one of the weight 128 rows and 128 of k (block_scales.cuh).
// Scales. Those of a stage's tokens are copied behind it by a warp of the producer's warpgroup, one cp.async each, so that any strides, rows
// that are gathered and all stages at once are the same to it. A weight's are one number, or one for gates and one for ups, of all of a
// warpgroup's rows: each thread loads them a k tile ahead.
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
#include "cutlass/pipeline/pipeline.hpp"
#include "gemm/block_scales.cuh"
#include "gemm/wgmma_sm90.cuh"
#include "minfer/types.h"
#include "moe/grouped/expert_tiles.cuh"
#include "moe/grouped/row_gather.cuh"

namespace minfer::moe {

/// Dispatch policy: 8-bit operands in shared memory, tokens in expert order or gathered, scales beside them.
template <class Config_>
struct MainloopSm90TmaScaledExperts {
  using Config = Config_;
  static constexpr int Stages = Config::kStages;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using ArchTag = cutlass::arch::Sm90;
  using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
};

/// Scales of the groups of tokens, and of the blocks of experts' weights.
struct ExpertScales {
  gemm::ScaleView tokens;    // of rows of a, and of groups of k; data is null: 1
  int64_t expert_offset;     // masked: from where an expert's rows would begin, were they numbered through, to where they do
  int32_t const* gather;     // the row of a that a row of d is of, or null
  int32_t rows;              // of a
  int32_t groups;            // of a row
  int32_t parts;             // groups in 128 of k: 1, 2 or 4
  int32_t blocks;            // of 128 of k
  gemm::ScaleView weight;    // of an expert's blocks
  int64_t expert_stride;     // to the next expert's
  int64_t up_offset;         // gated: from the gates' to the ups'
  int32_t n;                 // rows of an expert's weight that share its blocks: gated, half of them
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
  static constexpr bool kRelocates = kRereadsThread;
  static_assert(Config::kSchedule == minfer::Schedule::kCooperative && (kConsumers == 1 || kConsumers == 2));
  static constexpr int kLaunchRegisters = 65536 / (kThreads * Config::kCtasPerSm) / 8 * 8;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters =
      cute::min(232, (kLaunchRegisters * kThreads - kProducerRegisters * 128) / (kConsumers * 128) / 8 * 8);
  static constexpr int kGroupM = kTileM / kConsumers, kMmaM = kGroupM / 64;  // rows of a warpgroup, and blocks of 64 of them
  static constexpr int kStep = Config::kTokenStep;                          // tokens of a tile are rounded up to these
  static constexpr int kSmallBox = kStep < 16 ? 8 : 16, kLargeBox = kTileN >= 64 ? 64 : kSmallBox;  // rows of TMA's loads of tokens
  static constexpr int kLine = 128, kHalves = kTileK / kLine;                // bytes of a line, lines of a stage
  static constexpr int kBlockValues = kTileN / 2, kValues = kMmaM * kBlockValues;  // accumulators of a thread
  static constexpr int kMmaK = 32, kMmas = kLine / kMmaK;
  static constexpr int kMostParts = kLine / kMmaK;
  using Sum = cute::conditional_t<kIntegers, uint32_t, float>;  // of the MMA, in registers
  static_assert(sizeof(Element) == 1 && kGroupM % 64 == 0 && kTileN % kLargeBox == 0 && kTileN % kStep == 0 && kTileK % kLine == 0);
  static_assert(minfer::gemm::kScaleBlock % kGroupM == 0, "a warpgroup's rows share the scale of a block");

  using Gather = minfer::moe::RowGather<kTileN, kHalves, kStages, kConsumers + 1, kTileN <= 16 ? 1 : 2>;
  using PipelineState = minfer::Ring<kStages>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  struct Params {
    CUtensorMap weights;                               // [experts, n, k] or, gated, [experts, n / 16, 2, 8, k]
    CUtensorMap tokens, few_tokens;                    // [1, rows, k], in boxes of kLargeBox and kSmallBox rows
    typename Gather::template Source<Element> source;  // gather is null where tokens lie in order
    uint64_t hint_tokens;
    minfer::moe::ExpertScales scales;
    bool gated;
    bool adds;  // sums are added up in fp32
  };

  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    alignas(1024) Element weights[kStages][kTileM * kTileK];
    alignas(1024) Element tokens[kStages][kTileN * kTileK];
    typename Epilogue::TensorStorage staging;
    alignas(16) float scales[kStages][kHalves][kMostParts][kTileN];
    typename Epilogue::PipelineStorage epilogue;
    alignas(8) uint64_t full[kStages], empty[kStages];
    typename Scheduler::SharedStorage scheduler;
    uint32_t source[kTileN];  // rows of a that are gathered: where they begin, in units of 16 bytes
    typename cutlass::OrderedSequenceBarrier<1, 2>::SharedStorage order;
  };

  // ---- set-up -------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.weights));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.tokens));
  }
  static CUTLASS_DEVICE bool gathers(Params const& params) { return params.source.gather != nullptr; }
  /// Whether sums are multiplied by scales as they are added up: then each token has one, be it 1.
  static CUTLASS_DEVICE bool copies_scales(Params const& params) {
    return params.scales.tokens.data != nullptr || params.scales.weight.data != nullptr;
  }
  template <class Storage>
  static CUTLASS_DEVICE void init_barriers(Params const& params, Storage& storage) {
    int const arrivals = 1 + (gathers(params) ? Gather::kThreads : 0) + (copies_scales(params) ? 32 : 0);
    for (int s = 0; s < kStages; ++s) {
      FullBarrier::init(&storage.full[s], uint32_t(arrivals));
      EmptyBarrier::init(&storage.empty[s], 4 * kConsumers);
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
  static CUTLASS_DEVICE TileInputs tile_inputs(Params const&, LoadInputs const& load, ExpertTile const& tile) {
    using Hint = cute::TMA::CacheHintSm90;
    int const tokens = load.ordered ? (tile.tokens + kSmallBox - 1) / kSmallBox * kSmallBox : 0;
    return {tile, tokens, uint32_t(kTileM + tokens) * kTileK, uint64_t(tile.alone ? Hint::EVICT_FIRST : Hint::EVICT_NORMAL)};
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
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        int const column = k * kTileK + half * kLine;
        Element* const weights = &storage.weights[state.index][half * kTileM * kLine];
        if (init.gated) {
          cute::SM90_TMA_LOAD_5D::copy(&params.weights, full, inputs.hint, weights, column, 0, 0, inputs.tile.weight_tile * (kTileM / 16),
                                       inputs.tile.expert);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&params.weights, full, inputs.hint, weights, column, inputs.tile.weight_tile * kTileM,
                                       inputs.tile.expert);
        }
        Element* const rows = &storage.tokens[state.index][half * kTileN * kLine];
        int row = 0;
#pragma unroll 1
        for (; row + kLargeBox <= inputs.tokens; row += kLargeBox) {
          cute::SM90_TMA_LOAD_3D::copy(&params.tokens, full, params.hint_tokens, rows + row * kLine, column, inputs.tile.row + row, 0);
        }
#pragma unroll 1
        for (; row < inputs.tokens; row += kSmallBox) {
          cute::SM90_TMA_LOAD_3D::copy(&params.few_tokens, full, params.hint_tokens, rows + row * kLine, column, inputs.tile.row + row, 0);
        }
      }
      state.advance();
    }
  }
  static CUTLASS_DEVICE void load_tail(PipelineState&) {}

  // The warps that gather rows, then the one that copies scales.
  static constexpr int kAuxiliaryWarps = Gather::kWarps + 1;
  static CUTLASS_DEVICE bool has_auxiliary_load(Params const& params) { return gathers(params) || copies_scales(params); }
  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE void load_auxiliary(Params const& params, Storage& storage, WorkItems const& items, int thread) {
    if (thread >= Gather::kThreads) {
      if (copies_scales(params)) copy_scales(params, storage, items, thread - Gather::kThreads);
      return;
    }
    if (!gathers(params)) return;
    typename Gather::Stages const stages{storage.source, storage.full, storage.empty, cute::cast_smem_ptr_to_uint(&storage.tokens[0][0])};
    auto const at = [&](int t) { return items.at(t); };
    Gather::run(stages, at, int(blockIdx.x), items.count(), int(gridDim.x), items.k_tiles(), params.source, thread);
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
    multiply_at_most<kTileN>(output.tile.tokens, params, storage, state, accumulator, k_count, output, consumer * kMmaM, thread);
  }
  template <class Storage, class Accumulator>
  static CUTLASS_DEVICE bool mma_tail(Storage&, PipelineState& state, Accumulator&, int k_count, int, int) {
    state.advance(k_count);
    return true;
  }
  static CUTLASS_DEVICE void teardown() {}

 private:
  /// The scales of all tiles' tokens, a lane for each 32nd token. Those behind the last group, or of a row that a does not have, are 0.
  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE void copy_scales(Params const& params, Storage& storage, WorkItems const& items, int lane) {
    constexpr int kTokens = (kTileN + 31) / 32;  // of a lane
    auto const& scales = params.scales;
    auto state = producer_start(params);
    int const parts = scales.parts, tiles = items.count(), k_tiles = items.k_tiles();
    int64_t const k_stride = scales.tokens.k_stride;
    for (int t = int(blockIdx.x); t < tiles; t += int(gridDim.x)) {
      ExpertTile const tile = items.at(t);
      int64_t from[kTokens];
      uint32_t exists = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTokens; ++i) {
        int const token = lane + 32 * i;
        from[i] = 0;
        if (token < tile.tokens) {
          int64_t row = tile.row + token;
          if (scales.gather != nullptr) row = minfer::load_operand(scales.gather + row);
          bool const inside = scales.gather == nullptr || uint64_t(row) < uint64_t(scales.rows);
          from[i] = inside ? row * scales.tokens.row_stride + tile.expert * scales.expert_offset : 0;
          exists |= uint32_t(inside) << i;
        }
      }
      int group = 0;
#pragma unroll 1
      for (int k = 0; k < k_tiles; ++k) {
        EmptyBarrier::wait(&storage.empty[state.index], state.phase);
#pragma unroll 1
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll 1
          for (int part = 0; part < parts; ++part, ++group) {
            float* const to = &storage.scales[state.index][half][part][0];
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kTokens; ++i) {
              int const token = lane + 32 * i;
              if (token >= tile.tokens) continue;
              bool const is_there = (exists >> i & 1) != 0 && group < scales.groups;
              int64_t const at = is_there ? from[i] + group * k_stride : 0;
              if (scales.tokens.exponents || scales.tokens.data == nullptr) {
                to[token] = is_there || scales.tokens.data == nullptr ? scales.tokens.load(at) : 0.0f;
              } else {
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(cute::cast_smem_ptr_to_uint(to + token)),
                             "l"(static_cast<float const*>(scales.tokens.data) + at), "r"(is_there ? 4 : 0)
                             : "memory");
              }
            }
          }
        }
        cutlass::arch::cpasync_barrier_arrive_noinc(&storage.full[state.index]);
        state.advance();
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  /// The scales of a warpgroup's rows of the weight, those of gates and of ups, of 128 of k and, on their way, of the next.
  struct WeightScales {
    float gate = 1.0f, up = 1.0f, next_gate = 1.0f, next_up = 1.0f;
    int64_t at, k_stride, up_offset;
    minfer::gemm::ScaleView const& of;
    int left;  // of k's blocks, those that have not been loaded

    template <class Output>
    CUTLASS_DEVICE WeightScales(Params const& params, Output const& output) : of(params.scales.weight), left(params.scales.blocks) {
      auto const& scales = params.scales;
      int const row = params.gated ? output.row / 2 : output.row, last = scales.n - 1;
      int const block = (row < last ? row : last) / minfer::gemm::kScaleBlock;
      at = output.tile.expert * scales.expert_stride + block * of.row_stride;
      k_stride = of.k_stride;
      up_offset = params.gated ? scales.up_offset : 0;
      load();
      advance();
    }
    CUTLASS_DEVICE void load() {
      if (of.data == nullptr || left <= 0) return;
      next_gate = of.load(at);
      next_up = of.load(at + up_offset);
      at += k_stride;
      --left;
    }
    CUTLASS_DEVICE void advance() {
      gate = next_gate;
      up = next_up;
      load();
    }
  };

  static CUTLASS_DEVICE float to_float(Sum sum) {
    if constexpr (kIntegers) {
      return __int2float_rn(int(sum));
    } else {
      return sum;
    }
  }

  /// The MMAs of one block of 64 rows on kCount times 32 of k, from units a and b of 16 bytes on; into sums that begin at 0, or are kept.
  template <int kTokens, int kCount>
  static CUTLASS_DEVICE void issue(uint32_t a, uint32_t b, Sum* sums, cute::GMMA::ScaleOut keep) {
    using Op = decltype(cute::GMMA::ss_op_selector<Element, Element, cute::conditional_t<kIntegers, int32_t, float>,
                                                   cute::Shape<cute::_64, cute::Int<kTokens>, cute::Int<kLine>>, cute::GMMA::Major::K,
                                                   cute::GMMA::Major::K>());
    auto const numbers = std::make_integer_sequence<int, kTokens / 2>{};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      minfer::gemm::multiply<Op>(minfer::gemm::descriptor_of(a + 2 * i), minfer::gemm::descriptor_of(b + 2 * i), sums,
                                 i == 0 ? keep : cute::GMMA::ScaleOut::One, numbers);
    }
  }
  template <int kTokens>
  static CUTLASS_DEVICE void fence(Sum* sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTokens / 2; ++i) cute::warpgroup_fence_operand(sums[i]);
  }

  /// How sums are added up: not at all, as they are, times the scales of tokens and of the weight, one or one for gates and one for ups; or
  /// with two of the weight, those of each half or quarter of 128 of k.
  enum class Adds { kNone, kSums, kScaled, kGated, kHalves, kQuarters };

  template <int kTokens, Adds kAdds, class Storage, class Accumulator, class Output>
  static CUTLASS_DEVICE void multiply(Params const& params, Storage& storage, PipelineState ring, Accumulator& accumulator, int k_tiles,
                                      Output const& output, int slab, int thread) {
    constexpr int kSums = kAdds == Adds::kNone ? kValues : kBlockValues;
    constexpr uint32_t kStageUnitsA = kTileM * kTileK / 16, kStageUnitsB = kTileN * kTileK / 16;
    constexpr uint32_t kHalfUnitsA = kTileM * kLine / 16, kHalfUnitsB = kTileN * kLine / 16, kSlabUnits = 64 * kLine / 16;
    uint32_t const a = minfer::gemm::low_word_of(&storage.weights[0][slab * 64 * kLine]),
                   b = minfer::gemm::low_word_of(&storage.tokens[0][0]);
    bool const gathered = gathers(params);
    Sum sums[kSums];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
    auto const wait_for = [&](int stage, uint32_t phase) {
      FullBarrier::wait(&storage.full[stage], phase);
      if (gathered) cutlass::arch::fence_view_async_shared();  // cp.async wrote through another proxy than the tensor cores read by
    };
    if constexpr (kAdds == Adds::kNone) {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kMmaM; ++block) fence<kTokens>(sums + block * kBlockValues);
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
            issue<kTokens, kMmas>(a + stage * kStageUnitsA + half * kHalfUnitsA + block * kSlabUnits,
                                  b + stage * kStageUnitsB + half * kHalfUnitsB, sums + block * kBlockValues, keep);
          }
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();
        minfer::release_stage<1>(&storage.empty[last], thread, k > 0);
        last = stage;
        ring.advance();
      }
      cute::warpgroup_wait<0>();
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kMmaM; ++block) fence<kTokens>(sums + block * kBlockValues);
      minfer::release_stage<1>(&storage.empty[last], thread);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) accumulator(i) = to_float(sums[i]);
    } else {
      constexpr int kParts = kAdds == Adds::kHalves ? 2 : kAdds == Adds::kQuarters ? 4 : 1, kPartMmas = kMmas / kParts;
      WeightScales weight(params, output);
      fence<kTokens>(sums);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int k = 0; k < k_tiles; ++k) {
        int const stage = ring.index;
        wait_for(stage, ring.phase);
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < kHalves; ++half) {
          auto const part_of_k = [&](int part) {
            CUTLASS_PRAGMA_UNROLL
            for (int block = 0; block < kMmaM; ++block) {
              uint32_t const along = 2 * uint32_t(part * kPartMmas);
              cute::warpgroup_arrive();
              issue<kTokens, kPartMmas>(a + stage * kStageUnitsA + half * kHalfUnitsA + block * kSlabUnits + along,
                                        b + stage * kStageUnitsB + half * kHalfUnitsB + along, sums, cute::GMMA::ScaleOut::Zero);
              cute::warpgroup_commit_batch();
              add<kTokens, kAdds>(&storage.scales[stage][half][part][0], weight, &accumulator(block * kBlockValues), sums, thread);
            }
          };
#pragma unroll 1
          for (int part = 0; part < kParts; ++part) part_of_k(part);
          if constexpr (kAdds != Adds::kSums) weight.advance();
        }
        minfer::release_stage<1>(&storage.empty[stage], thread);
        ring.advance();
      }
    }
  }

  /// Waits for a block's sums and adds them. Tokens are 8 i + 2 (lane % 4) and the next; gates and ups are rows 8 apart.
  template <int kTokens, Adds kAdds>
  static CUTLASS_DEVICE void add(float const* factors, WeightScales const& weight, float* accumulator, Sum* sums, int thread) {
    auto const retire = [&] {
      cute::warpgroup_wait<0>();
      fence<kTokens>(sums);
    };
    if constexpr (kAdds == Adds::kSums) {
      retire();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTokens / 2; ++i) accumulator[i] += to_float(sums[i]);
    } else {
      constexpr bool kTwo = kAdds != Adds::kScaled;
      auto const* const pairs = reinterpret_cast<float2 const*>(factors) + thread % 4;
      constexpr int kEarly = kTokens / 8 < 4 ? kTokens / 8 : 4;  // factors that are read while the MMAs run
      float2 early[kEarly];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEarly; ++i) early[i] = pairs[4 * i];
      retire();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTokens / 8; ++i) {
        float2 const token = i < kEarly ? early[i < kEarly ? i : 0] : pairs[4 * i];
        float const gate[2] = {token.x * weight.gate, token.y * weight.gate};
        float const up[2] = {kTwo ? token.x * weight.up : gate[0], kTwo ? token.y * weight.up : gate[1]};
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 2; ++e) {
          accumulator[4 * i + e] = fmaf(to_float(sums[4 * i + e]), gate[e], accumulator[4 * i + e]);
          accumulator[4 * i + 2 + e] = fmaf(to_float(sums[4 * i + 2 + e]), up[e], accumulator[4 * i + 2 + e]);
        }
      }
    }
  }

  template <int kTokens, class Storage, class Accumulator, class Output>
  static CUTLASS_DEVICE void multiply_at_most(int tokens, Params const& params, Storage& storage, PipelineState const& ring,
                                              Accumulator& accumulator, int k_tiles, Output const& output, int slab, int thread) {
    if constexpr (kTokens > kStep) {
      if (tokens <= kTokens - kStep) {
        multiply_at_most<kTokens - kStep>(tokens, params, storage, ring, accumulator, k_tiles, output, slab, thread);
        return;
      }
    }
    auto const run = [&](auto adds) {
      multiply<kTokens, decltype(adds)::value>(params, storage, ring, accumulator, k_tiles, output, slab, thread);
    };
    if (!params.adds) {
      run(cute::integral_constant<Adds, Adds::kNone>{});
    } else if (params.scales.parts == 2) {
      run(cute::integral_constant<Adds, Adds::kHalves>{});
    } else if (params.scales.parts == 4) {
      run(cute::integral_constant<Adds, Adds::kQuarters>{});
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
