// Mainloop for sm_90 whose tiles are as wide as the launch says: kColumnStep, 2 kColumnStep .. kTileN columns.
//
// WGMMA has an instruction for every multiple of 8 columns up to 256. The other mainloop (mainloop_sm90.cuh) takes one of them when it is
// compiled, so that 200 tokens occupy a tile of 256, or a number of tiles that leaves a last wave nearly empty. Here a kernel holds an
// inner loop for each width; a launch divides the columns into tiles of equal width, and its stages hold no more than these need, so
// narrow tiles have a deeper ring. Stages, boxes and bytes follow from the width at run time, instructions and accumulators do not.
// A consumer warpgroup has kBlocks blocks of 64 rows, all of which multiply the same columns: the tokens are read from shared memory once
// for each block, but loaded once for all.
//
// CUTLASS's CollectiveMma takes the tile's shape, and with it the stages' layout, from its type; hence a specialisation of our own.
// Pipeline: one pair of mbarriers a stage. Full: TMA's bytes. Empty: one arrival of each consumer warp, at every CTA that writes into the
// stage, when the WGMMAs that read it have retired.
// Multicast: in a cluster the CTAs of a row load a part each of the rows of A that they have in common, those of a column a part each of
// their columns. Where such a part might end within 8 rows of the swizzle, the CTAs of a column take turns, and each loads all of them.
// Layouts: rows and columns are K-major, or contiguous along m and n: then a block of 64 of them is [64 of k][64 rows] in a stage, as many
// bytes as [64 rows][64 of k], and comes by a copy of its own; the CTAs of a cluster's row divide its k, those of a column take turns. Of
// columns contiguous along n a tile loads whole blocks, up to 56 columns of which it does not multiply.
//
// Operands of 8 bits are K-major. WGMMA's sums of e4m3 keep about 14 bits. By default those of 128 of k are added up in fp32 (promotion:
// DeepSeek-V3, 2024), times their scales where operands are scaled by blocks; a launch may leave that out (fast). A block's scales lie
// behind the operands of its stage: those of its rows, where these are tokens, else the products of its columns' and the weight's. They
// come by TMA, or warps of the producer's warpgroup write them (load_auxiliary), which counts as one more arrival at the stage's full
// barrier. int8's sums are integers, exact, and become fp32 at the end.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cuda.h>

#include "common/cutlass_element.cuh"
#include "common/dependent_launch.cuh"
#include "common/stage_release.cuh"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "gemm/runtime_ring.cuh"
#include "gemm/weight_scales_sm90.cuh"
#include "gemm/wgmma_sm90.cuh"
#include "minfer/types.h"

namespace minfer::gemm {

/// Dispatch policy: stages by TMA, tiles of a width that the launch chooses.
template <class Config_>
struct MainloopSm90TmaColumns {
  using Config = Config_;
  static constexpr int Stages = 0;  // as many as fit
  using ClusterShape = cute::Shape<cute::Int<Config::kClusterM>, cute::Int<Config::kClusterN>, cute::_1>;
  using ArchTag = cutlass::arch::Sm90;
  using Schedule = cute::conditional_t<Config::kSchedule == minfer::Schedule::kCooperative,
                                       cutlass::gemm::KernelTmaWarpSpecializedCooperative, cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
};

}  // namespace minfer::gemm

namespace cutlass::gemm::collective {

template <class Config, class TileShape_, class Element, class StrideA, class ElementB, class StrideB, class TiledMma, class GmemCopyA,
          class SmemLayoutA, class SmemCopyA, class TransformA, class GmemCopyB, class SmemLayoutB, class SmemCopyB, class TransformB>
struct CollectiveMma<minfer::gemm::MainloopSm90TmaColumns<Config>, TileShape_, Element, StrideA, ElementB, StrideB, TiledMma, GmemCopyA,
                     SmemLayoutA, SmemCopyA, TransformA, GmemCopyB, SmemLayoutB, SmemCopyB, TransformB> {
  using DispatchPolicy = minfer::gemm::MainloopSm90TmaColumns<Config>;
  using TileShape = TileShape_;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using PipelineState = minfer::gemm::RuntimeRing;

  static constexpr bool kNarrow = sizeof(Element) == 1;  // operands of 8 bits
  static constexpr bool kIntegers = cute::is_same_v<Element, int8_t>;
  static constexpr bool kSwap = Config::kSwap;  // rows are the weight's
  static constexpr bool kCooperative = Config::kSchedule == minfer::Schedule::kCooperative;
  static constexpr bool kPingpong = !kCooperative;
  static constexpr bool kOrdered = kPingpong;
  static constexpr int kThreads = Config::kThreads;
  static constexpr bool kRereadsThread = kThreads == 512 || (kNarrow && !kIntegers);  // there is no register for what follows from it
  static constexpr bool kRelocates = kNarrow && !kIntegers && kSwap;                  // nor is there one for where the tile is
  static_assert(kThreads == 384 || (kThreads == 512 && kCooperative));
  // Those of all warpgroups together are no more than the launch gives the CTA, else the consumers wait for theirs for ever: 168 a thread
  // of three warpgroups, 128 of four. Auxiliary warps that multiply scales need more than the producer.
  static constexpr bool kMultipliesScales = kNarrow && !kIntegers && kSwap;
  static constexpr int kProducerRegisters = kThreads != 384 ? 32 : kMultipliesScales ? 56 : 40;
  static constexpr int kConsumerRegisters = kThreads != 384 ? 160 : kMultipliesScales ? 224 : 232;
  static_assert(kProducerRegisters + (kThreads / 128 - 1) * kConsumerRegisters <= kThreads / 128 * (kThreads == 384 ? 168 : 128));
  static constexpr bool kColumnsAlongK = (kSwap ? Config::kMajorA : Config::kMajorB) == minfer::Major::kK;
  static constexpr bool kRowsAlongK = (kSwap ? Config::kMajorB : Config::kMajorA) == minfer::Major::kK;

  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStep = Config::kColumnStep;
  static constexpr int kTileK = 128 / int(sizeof(Element));  // a swizzled row of 128 bytes
  static constexpr int kMmaK = kTileK / 4;
  using Sum = cute::conditional_t<kIntegers, uint32_t, float>;  // of the MMA, in registers
  static_assert(Config::kTileK == kTileK && (kNarrow ? kColumnsAlongK && kRowsAlongK : sizeof(Element) == 2));
  static constexpr int kCluster = Config::kClusterM * Config::kClusterN;
  static constexpr int kConsumers = kThreads / 128 - 1, kSharing = kCooperative ? kConsumers : 1;  // warpgroups; those that share a tile
  static constexpr int kBlocks = kTileM / (64 * kSharing);  // of 64 rows, of a warpgroup; those that share a tile take turns at them
  static_assert(kTileM == 64 * kSharing * kBlocks && kBlocks >= 1 && kBlocks <= 3);
  static constexpr bool kSplitsByCluster = kNarrow && kCluster == 1 && kBlocks == 1;
  static constexpr int kBlockValues = kTileN / 2, kValues = kBlocks * kBlockValues;  // accumulators of a thread; narrow tiles have fewer
  static constexpr int kMaxStages = kIntegers && kSwap && kTileM == 64 ? 20 : 12;    // of e4m3 more were slower
  static constexpr int kRowBytes = 128, kBytesA = kTileM * kRowBytes;
  static constexpr int kRingBytes = Config::kRingBytes;
  // The boxes in which A comes: rows and k of one, and how many a CTA loads for a stage.
  static constexpr int kBoxRows = kRowsAlongK ? kTileM / Config::kClusterN : 64, kBoxK = kRowsAlongK ? kTileK : kTileK / Config::kClusterN;
  static constexpr int kBoxes = kRowsAlongK ? 1 : kTileM / 64, kBoxBytes = kBoxRows * kBoxK * int(sizeof(Element));

  struct WideParams {
    CUtensorMap a, b;  // the kernel's own operands, [l, rows, k]; a [l, k, rows] where its rows are contiguous
    int32_t columns;   // of a tile
    int32_t stages, stage_bytes;
    int32_t early;     // k tiles whose weight is in the ring before the predecessor has finished; swapped alone
    int32_t prefetch;  // without these: k tiles that are sent for by then, into L2
    bool prefetch_a, prefetch_b;
    uint64_t hint_a, hint_b;  // L2 eviction priorities
  };
  struct NarrowParams : WideParams {
    minfer::gemm::BlockScales scales;
    int32_t scale_bytes;     // of a stage, behind its operands; 0 where none are scaled by blocks
    CUtensorMap row_scales;  // of tokens, [k / 128, m]
    bool load_row_scales;    // by TMA: no auxiliary load
    int32_t ring_bytes;      // of stages; behind them, where the splits of a tile are a cluster's CTAs, its partials
    float one;               // 1, which the compiler does not know
    bool fast;               // e4m3: sums of all of k are left to the tensor core
    bool integers;           // int8: sums are stored as they are, not as fp32
  };
  using Params = cute::conditional_t<kNarrow, NarrowParams, WideParams>;
  // Of blocks. Swapped: the product of each column's scale and the weight's, and again of a gated weight's ups. Else: of each row.
  /// So that the next stage's operands begin at a whole swizzle.
  static constexpr int scale_bytes(bool halves) {
    int const floats = kSwap ? kTileN * (halves ? 2 : 1) : kTileM;
    return (floats * int(sizeof(float)) + 1023) / 1024 * 1024;
  }
  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    alignas(1024) char ring[kRingBytes];  // of each stage: [kTileM][64], then [stored_columns][64]
    typename Epilogue::TensorStorage staging;
    alignas(8) uint64_t full[kMaxStages];
    uint64_t empty[kMaxStages];
    typename Epilogue::PipelineStorage epilogue;
    typename cutlass::OrderedSequenceBarrier<1, 2>::SharedStorage order;
    typename Scheduler::SharedStorage scheduler;
  };

  // ---- set-up -------------------------------------------------------------------------------------------------------------------

  /// Whether the CTAs of a cluster's column take turns at loading their columns: parts of them would end within 8 rows of the swizzle, or
  /// within a block.
  static CUTLASS_HOST_DEVICE bool takes_turns(int columns) {
    return kColumnsAlongK ? columns % (8 * Config::kClusterM) != 0 : Config::kClusterM > 1;
  }
  /// Columns of a tile that a CTA loads at a time.
  static CUTLASS_HOST_DEVICE int loaded_columns(int columns) { return takes_turns(columns) ? columns : columns / Config::kClusterM; }
  /// Columns of a tile that a stage has room for.
  static CUTLASS_HOST_DEVICE int stored_columns(int columns) { return kColumnsAlongK ? columns : (columns + 63) / 64 * 64; }

  static CUTLASS_DEVICE void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.a));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.b));
    if constexpr (kRowScales) {
      if (params.load_row_scales) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.row_scales));
    }
  }
  static constexpr bool kPipelineFences = false;
  template <class Storage>
  static CUTLASS_DEVICE void init_barriers(Params const& params, Storage& storage) {
    for (int s = 0; s < params.stages; ++s) {
      FullBarrier::init(&storage.full[s], 1 + int(has_auxiliary_load(params)));
      EmptyBarrier::init(&storage.empty[s], kSharing * 4 * kCluster);
    }
    if constexpr (kSplitsByCluster) storage.scheduler.at = cute::cast_smem_ptr_to_uint(storage.ring) + uint32_t(params.ring_bytes);
  }
  template <class Storage, class Location>
  CUTLASS_DEVICE CollectiveMma(Params const&, Storage&, int, int, Location const&) {}
  int k_begin = 0;  // of a consumer's work item; the kernel layer sets it

  // ---- producer -----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE PipelineState producer_start(Params const& params) { return {0, 1, params.stages}; }
  static CUTLASS_DEVICE PipelineState consumer_start(Params const& params) { return {0, 0, params.stages}; }

  struct LoadInputs {
    int m, n;                           // of the CTA in its cluster
    uint16_t multicast_a, multicast_b;  // the CTAs of its cluster row and column
  };
  struct TileInputs {
    int row, column, l;  // of the part of each operand that this CTA loads
    int k;               // of A, from that of the tile on
  };
  template <class Storage, class Location>
  static CUTLASS_DEVICE LoadInputs load_init(Params const&, Storage&, Location const& at) {
    LoadInputs inputs{at.m, at.n, 0, 0};
    for (int n = 0; n < Config::kClusterN; ++n) inputs.multicast_a |= uint16_t(1) << (at.m + Config::kClusterM * n);
    for (int m = 0; m < Config::kClusterM; ++m) inputs.multicast_b |= uint16_t(1) << (m + Config::kClusterM * at.n);
    return inputs;
  }
  template <class Tile>
  static CUTLASS_DEVICE TileInputs tile_inputs(Params const& params, LoadInputs const& inputs, Tile const& tile) {
    int const column = tile.n() * params.columns + first_column(params, inputs);
    int const row = tile.m() * kTileM;
    if constexpr (!kRowsAlongK) return {row, column, tile.l(), inputs.n * kBoxK};
    return {row + inputs.n * kBoxRows, column, tile.l(), 0};
  }

  /// Under the predecessor's tail the first k tiles start for L2 or, a weight's that nobody writes, for the ring. Returns how many were
  /// loaded.
  template <class Storage>
  static CUTLASS_DEVICE int load_first(Params const& params, Storage& storage, PipelineState& state, LoadInputs const& inputs,
                                       TileInputs const& tile, int k_begin, int k_count) {
    if constexpr (kSwap) {
      if (params.early > 0) {
        int const early = k_count < params.early ? k_count : params.early;
#pragma unroll 1
        for (int i = 0; i < early; ++i) {
          FullBarrier::arrive_and_expect_tx(&storage.full[i], uint32_t(operand_bytes(params)));
          load_rows(params, storage, i, inputs, tile, k_begin + i);
        }
        minfer::wait_for_predecessor();
#pragma unroll 1
        for (int i = 0; i < early; ++i) {
          load_columns(params, storage, i, inputs, tile, k_begin + i);
          state.advance();
        }
        return early;
      }
    }
    int const ahead = k_count < params.prefetch ? k_count : params.prefetch;
    for (int k = k_begin; k < k_begin + ahead; ++k) {
      if (params.prefetch_a) {
        for_each_box(tile, k, [&](int, int x, int y) { cute::SM90_TMA_LOAD_3D::PREFETCH::copy(&params.a, x, y, tile.l); });
      }
      if (params.prefetch_b && loads_columns(params, inputs, k)) {
        for_each_columns_box(params, tile, k, [&](int, int x, int y) { cute::SM90_TMA_LOAD_3D::PREFETCH::copy(&params.b, x, y, tile.l); });
      }
    }
    minfer::wait_for_predecessor();
    return 0;
  }
  template <class Storage>
  static CUTLASS_DEVICE void load(Params const& params, Storage& storage, PipelineState& state, LoadInputs const& inputs,
                                  TileInputs const& tile, int k, int k_end) {
#pragma unroll 1
    for (; k < k_end; ++k) {
      EmptyBarrier::wait(&storage.empty[state.index], state.phase);
      uint64_t* const full = &storage.full[state.index];
      if (kRowScales && loads_row_scales(params)) {
        FullBarrier::arrive_and_expect_tx(full, uint32_t(operand_bytes(params) + kTileM * int(sizeof(float))));
        load_row_scales(params, storage, state.index, tile.row - inputs.n * kBoxRows, k);
      } else {
        FullBarrier::arrive_and_expect_tx(full, uint32_t(operand_bytes(params)));
      }
      load_rows(params, storage, state.index, inputs, tile, k);
      load_columns(params, storage, state.index, inputs, tile, k);
      state.advance();
    }
  }
  static CUTLASS_DEVICE void load_tail(PipelineState&) {}

  template <class Storage>
  static CUTLASS_DEVICE void load_rows(Params const& params, Storage& storage, int stage, LoadInputs const& inputs, TileInputs const& tile,
                                       int k) {
    char* const a = storage.ring + stage * params.stage_bytes;
    for_each_box(tile, k, [&](int box, int x, int y) {
      char* const to = a + (box * Config::kClusterN + inputs.n) * kBoxBytes;
      copy<Config::kClusterN>(params.a, &storage.full[stage], inputs.multicast_a, params.hint_a, to, x, y, tile.l);
    });
  }
  /// An empty stage is empty in every CTA of the cluster.
  template <class Storage>
  static CUTLASS_DEVICE void load_columns(Params const& params, Storage& storage, int stage, LoadInputs const& inputs,
                                          TileInputs const& tile, int k) {
    if (!loads_columns(params, inputs, k)) return;
    char* const b = storage.ring + stage * params.stage_bytes + kBytesA + first_column(params, inputs) * kRowBytes;
    for_each_columns_box(params, tile, k, [&](int column, int x, int y) {
      copy<Config::kClusterM>(params.b, &storage.full[stage], inputs.multicast_b, params.hint_b, b + column * kRowBytes, x, y, tile.l);
    });
  }

  // Warps that write the scales of stages, by turns: while one waits for memory, the others have theirs under way.
  static constexpr int kAuxiliaryWarps = kNarrow && !kIntegers ? 3 : 0;
  static constexpr bool kRowScales = kNarrow && !kIntegers && !kSwap;
  static CUTLASS_HOST_DEVICE bool has_auxiliary_load(Params const& params) {
    if constexpr (kAuxiliaryWarps > 0) return params.scale_bytes > 0 && !params.load_row_scales;
    return false;
  }
  /// thread: among those of the auxiliary warps. They share issue slots with the consumers, which wait for the slowest of their four warps:
  /// each instruction here counts.
  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE void load_auxiliary(Params const& params, Storage& storage, WorkItems items, int thread) {
    auto const& scales = params.scales;
    int const lane = thread % 32, block_bits = scales.halves ? 8 : 7;  // of a weight's rows that share a scale
    static_assert(minfer::gemm::kScaleBlock == 1 << 7);
    bool const by_fours = scales.tokens.by_fours() && !scales.weight.exponents;
    PipelineState state = producer_start(params);
    int turn = thread / 32;  // k tiles until the next of this warp
    state.advance_few(turn);
    minfer::wait_for_predecessor();
    for (auto item = items.first(); items.valid(item); item = items.next(item)) {
      auto const tile = items.tile(item);
      FactorSource from;
      int const row = tile.m() * kTileM, column = tile.n() * params.columns;
      from.token = kSwap ? column : row;
      from.tokens = kSwap ? params.columns : kTileM;
      from.has_weight = kSwap && row < scales.n;  // a tile's rows share one scale
      from.weight = row >> block_bits;
      int const k_end = item.k_begin + item.k_count;
      int k = item.k_begin + turn;
      if (by_fours && from.token + from.tokens <= scales.m) {
        write_factors<true>(params, storage, state, from, k, k_end, lane);
      } else {
        write_factors<false>(params, storage, state, from, k, k_end, lane);
      }
      turn = k - k_end;
    }
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE int output_group(int consumer) { return consumer; }
  static CUTLASS_DEVICE bool stores(int) { return true; }
  template <class Storage, class Barrier>
  static CUTLASS_DEVICE void mma_init(Params const&, Storage&, int, int, Barrier const&) {}

  /// Zeros, which are in no sum: the first WGMMA has the accumulators as operands though it overwrites them, and a narrow tile leaves some
  /// as they are. Undefined, they would be set again in front of each width's loop.
  static CUTLASS_DEVICE auto make_accumulator() {
    auto accumulator = cute::make_tensor<float>(cute::Shape<cute::Int<kValues>>{});
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      accumulator(i) = 0.0f;
      cute::warpgroup_fence_operand(accumulator(i));
    }
    return accumulator;
  }

  /// after_last() is called when the last MMA has been issued. All have retired at the end: what is in flight must not cross the place
  /// where the widths' loops meet, or ptxas serialises them.
  template <class Storage, class Accumulator, class Output, class AfterLast>
  CUTLASS_DEVICE void mma(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator, int k_count,
                          Output const& output, int consumer, int thread, AfterLast const& after_last) {
    minfer::gemm::WeightColumns const weight{output.column, k_begin};
    mma_between<1, kTileN / kStep>(params, storage, state, accumulator, k_count, weight, kCooperative ? consumer : 0, thread, after_last);
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
  struct FactorSource {
    int token, tokens;  // of a tile
    int weight;         // row of scales
    bool has_weight;
  };
  /// Waits until a stage is empty, in a warp that does not wait for all stages one after the other. A parity tells only two consecutive
  /// phases apart. Pingpong's warpgroups give stages back in no common order: one may have given back its first while the other still adds
  /// up its last, and the warps of later stages go on. Of a stage that has not been given back twice, the second wait would then return at
  /// once, and a k tile's factors would be written over those of two rounds before. The first wait is for the round in between to be full.
  template <class Storage>
  static CUTLASS_DEVICE void await_empty(Storage& storage, PipelineState const& state) {
    static_assert(kRingBytes / ((kTileM + kTileN) * kRowBytes + scale_bytes(true)) >= kAuxiliaryWarps);
    if constexpr (kPingpong) FullBarrier::wait(&storage.full[state.index], state.phase);
    EmptyBarrier::wait(&storage.empty[state.index], state.phase);
  }
  /// The factors of each kAuxiliaryWarps-th k tile from k on; k and the state are then those of the warp's next. kByFours: tokens' scales
  /// are fp32, contiguous and aligned, and those of the tile all exist.
  template <bool kByFours, class Storage>
  static CUTLASS_DEVICE void write_factors(Params const& params, Storage& storage, PipelineState& state, FactorSource const& from, int& k,
                                           int k_end, int lane) {
    constexpr int kVectors = ((kSwap ? kTileN : kTileM) + 127) / 128;  // of four tokens, of a lane
    auto const& scales = params.scales;
    bool const fixed_weight = !from.has_weight || scales.weight.data == nullptr;
    int64_t const step = scales.weight.k_stride * kAuxiliaryWarps, token_step = scales.tokens.k_stride * kAuxiliaryWarps;
    float const* of_weight = static_cast<float const*>(scales.weight.data) + scales.weight.offset(from.weight, k);
    float const* of_token = static_cast<float const*>(scales.tokens.data) + scales.tokens.offset(from.token + 4 * lane, k);
#pragma unroll 1
    for (; k < k_end; k += kAuxiliaryWarps) {
      float weight = from.has_weight ? 1.0f : 0.0f, up = weight;
      auto const store = [&](float* to, int at, float4 x) {
        auto const times = [](float4 x, float y) { return make_float4(x.x * y, x.y * y, x.z * y, x.w * y); };
        *reinterpret_cast<float4*>(to + at) = kSwap ? times(x, weight) : x;
        if (kSwap && scales.halves) *reinterpret_cast<float4*>(to + kTileN + at) = times(x, up);
      };
      float* to = stage_factors(params, storage, state.index);
      if constexpr (kByFours) {
        float4 of_tokens[kVectors];
        if (!fixed_weight) {
          weight = minfer::load_operand(of_weight);
          if (scales.halves) up = minfer::load_operand(of_weight + scales.up_offset);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          if (128 * i + 4 * lane < from.tokens) of_tokens[i] = minfer::load_operand(reinterpret_cast<float4 const*>(of_token + 128 * i));
        }
        of_weight += step;
        of_token += token_step;
        await_empty(storage, state);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          if (128 * i + 4 * lane < from.tokens) store(to, 128 * i + 4 * lane, of_tokens[i]);
        }
      } else {
        if (!fixed_weight) {
          int64_t const at = scales.weight.offset(from.weight, k);
          weight = scales.weight.load(at);
          if (scales.halves) up = scales.weight.load(at + scales.up_offset);
        }
        await_empty(storage, state);
#pragma unroll 1
        for (int at = 4 * lane; at < from.tokens; at += 128) {  // one by one: there are no registers for more of them
          store(to, at, scales.tokens.load_four(from.token + at, k, scales.m - from.token - at));
        }
      }
      __syncwarp();
      if (lane == 0) EmptyBarrier::arrive(&storage.full[state.index]);
      state.advance_few(kAuxiliaryWarps);
    }
  }

  static CUTLASS_DEVICE bool loads_row_scales(Params const& params) {
    if constexpr (kNarrow) return params.load_row_scales;
    return false;
  }
  /// As a tensor, in boxes: by bulk copies of the same bytes a k tile took CTAs of a cluster 150 cycles more.
  template <class Storage>
  static CUTLASS_DEVICE void load_row_scales(Params const& params, Storage& storage, int stage, int row, int k) {
    if constexpr (kNarrow) {
      auto const hint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
      cute::SM90_TMA_LOAD_2D::copy(&params.row_scales, &storage.full[stage], hint, stage_factors(params, storage, stage), row, k);
    }
  }

  /// Of a stage: what TMA loads, beside rows' scales.
  static CUTLASS_DEVICE int operand_bytes(Params const& params) {
    if constexpr (kNarrow) return params.stage_bytes - params.scale_bytes;
    return params.stage_bytes;
  }
  /// A stage's scales, behind its operands.
  template <class Storage>
  static CUTLASS_DEVICE float* stage_factors(Params const& params, Storage& storage, int stage) {
    return reinterpret_cast<float*>(storage.ring + (stage + 1) * params.stage_bytes - params.scale_bytes);
  }

  /// Whether this CTA loads columns of k tile `k`, a part of them or, in its turn, all.
  static CUTLASS_DEVICE bool loads_columns(Params const& params, LoadInputs const& inputs, int k) {
    return !takes_turns(params.columns) || k % Config::kClusterM == inputs.m;
  }
  /// The first column of a tile that this CTA loads.
  static CUTLASS_DEVICE int first_column(Params const& params, LoadInputs const& inputs) {
    return takes_turns(params.columns) ? 0 : inputs.m * loaded_columns(params.columns);
  }

  /// Calls visit(box, x, y) for the boxes of A that this CTA loads of k tile `k`, with their coordinates in A's tensor map.
  template <class Visit>
  static CUTLASS_DEVICE void for_each_box(TileInputs const& tile, int k, Visit const& visit) {
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < kBoxes; ++box) {
      int const row = tile.row + box * kBoxRows, first_k = k * kTileK + tile.k;
      kRowsAlongK ? visit(box, first_k, row) : visit(box, row, first_k);
    }
  }

  /// Calls visit(column, x, y) for the boxes of columns that a CTA loads of k tile `k`: where they begin, and their coordinates in B's map.
  template <class Visit>
  static CUTLASS_DEVICE void for_each_columns_box(Params const& params, TileInputs const& tile, int k, Visit const& visit) {
    if constexpr (kColumnsAlongK) {
      visit(0, k * kTileK, tile.column);
    } else {
      for (int column = 0; column < params.columns; column += 64) visit(column, tile.column + column, k * kTileK);
    }
  }

  template <int kParts>
  static CUTLASS_DEVICE void copy(CUtensorMap const& map, uint64_t* full, uint16_t multicast, uint64_t hint, char* to, int x, int y,
                                  int l) {
    if constexpr (kParts > 1) {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, full, multicast, hint, to, x, y, l);
    } else {
      cute::SM90_TMA_LOAD_3D::copy(&map, full, hint, to, x, y, l);
    }
  }

  /// The loop of the launch's width, which is from kFirst to kLast steps.
  template <int kFirst, int kLast, class Storage, class Accumulator, class AfterLast>
  static CUTLASS_DEVICE void mma_between(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator,
                                         int k_count, minfer::gemm::WeightColumns const& weight, int row_group, int thread,
                                         AfterLast const& after_last) {
    if constexpr (kFirst == kLast) {
      mma_columns<kFirst * kStep>(params, storage, state, accumulator, k_count, weight, row_group, thread, after_last);
    } else {
      constexpr int kMiddle = (kFirst + kLast) / 2;
      if (params.columns <= kMiddle * kStep) {
        mma_between<kFirst, kMiddle>(params, storage, state, accumulator, k_count, weight, row_group, thread, after_last);
      } else {
        mma_between<kMiddle + 1, kLast>(params, storage, state, accumulator, k_count, weight, row_group, thread, after_last);
      }
    }
  }

  template <int kColumns, class Storage, class Accumulator, class AfterLast>
  static CUTLASS_DEVICE void mma_columns(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator,
                                         int k_count, minfer::gemm::WeightColumns const& weight, int row_group, int thread,
                                         AfterLast const& after_last) {
    using Op =
        decltype(cute::GMMA::ss_op_selector < Element, Element, cute::conditional_t<kIntegers, int32_t, float>,
                 cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kTileK>>, kRowsAlongK ? cute::GMMA::Major::K : cute::GMMA::Major::MN,
                 kColumnsAlongK ? cute::GMMA::Major::K : cute::GMMA::Major::MN > ());
    auto const numbers = std::make_integer_sequence<int, kColumns / 2>{};
    constexpr int kBlockUnits = kSharing * 64 * kRowBytes >> 4;  // from a block of 64 rows to the warpgroup's next, as in EpilogueSm90
    // From an MMA's k to the next: along a line, or as many lines.
    constexpr int kStepUnitsA = kRowsAlongK ? 32 >> 4 : kMmaK * 128 >> 4, kStepUnitsB = kColumnsAlongK ? 32 >> 4 : kMmaK * 128 >> 4;
    uint32_t const a = minfer::gemm::low_word_of(storage.ring + row_group * 64 * kRowBytes),
                   b = kNarrow ? a + ((kBytesA - row_group * 64 * kRowBytes) >> 4)  // one addition, where it is computed for each stage
                               : minfer::gemm::low_word_of(storage.ring + kBytesA, kColumnsAlongK ? 1 : 64 * kRowBytes >> 4);
    auto const fence = [&](Sum* sums) {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kColumns / 2; ++i) cute::warpgroup_fence_operand(sums[block * kBlockValues + i]);
      }
    };
    /// The MMAs of blocks kFrom to kTo of a stage, into sums of their own.
    uint32_t const stage_units = uint32_t(params.stage_bytes) >> 4;
    auto const issue = [&](auto from, auto to, uint32_t at, Sum* sums, cute::GMMA::ScaleOut keep) {
      constexpr int kFrom = decltype(from)::value, kTo = decltype(to)::value;
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kTileK / kMmaK; ++k) {
        CUTLASS_PRAGMA_UNROLL
        for (int block = kFrom; block < kTo; ++block) {
          minfer::gemm::multiply<Op>(minfer::gemm::descriptor_of(a + at + kStepUnitsA * k + block * kBlockUnits),
                                     minfer::gemm::descriptor_of(b + at + kStepUnitsB * k), sums + (block - kFrom) * kBlockValues,
                                     k == 0 ? keep : cute::GMMA::ScaleOut::One, numbers);
        }
      }
      cute::warpgroup_commit_batch();
    };

    /// All of k by the tensor core.
    auto const multiply_all = [&](Sum* sums) {
      fence(sums);
      int last = state.index;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int k = 0; k < k_count; ++k) {  // with the first k tile in front of the loop, ptxas serialises the WGMMAs of two blocks
        int const stage = state.index;
        FullBarrier::wait(&storage.full[stage], state.phase);
        issue(cute::C<0>{}, cute::C<kBlocks>{}, stage * stage_units, sums, k == 0 ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One);
        cute::warpgroup_wait<1>();
        minfer::release_stage<kCluster>(&storage.empty[last], thread, k > 0);
        last = stage;
        state.advance();
      }
      fence(sums);
      after_last();
      cute::warpgroup_wait<0>();
      fence(sums);
      minfer::release_stage<kCluster>(&storage.empty[last], thread);
    };
    if constexpr (!kNarrow) {
      multiply_all(accumulator.data());
    } else {
      // The MMA's sums have registers of their own in all loops: an instruction takes no more than a thread is launched with, and where the
      // accumulators were the MMA's in one loop and were added to in another, they and the sums of a k tile had to be among these.
      constexpr int kSumCount = cute::max(kValues, has_two_sets(kColumns) ? kColumns : 0);
      Sum sums[kSumCount];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSumCount; ++i) sums[i] = 0;
      if constexpr (kIntegers) {
        multiply_all(sums);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kValues; ++i) accumulator(i) = params.integers ? __int_as_float(int(sums[i])) : __int2float_rn(int(sums[i]));
      } else {
        if (params.scale_bytes > 0 && params.scales.halves) {
          multiply_and_add<kColumns, 2>(params, storage, state, accumulator, sums, k_count, weight, row_group, thread, issue, after_last);
          return;
        }
        if (params.scale_bytes > 0) {
          multiply_and_add<kColumns, 1>(params, storage, state, accumulator, sums, k_count, weight, row_group, thread, issue, after_last);
          return;
        }
        if (!params.fast) {
          multiply_and_add<kColumns, 0>(params, storage, state, accumulator, sums, k_count, weight, row_group, thread, issue, after_last);
          return;
        }
        multiply_all(sums);
        // A product, not a copy: the sums' registers are in the order that the MMA wants; so would the accumulators' be in all loops, to
        // spare copies. Added up, an accumulator and its sum would then always come from the same bank of registers, as may a scale.
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kValues; ++i) accumulator(i) = sums[i] * params.one;
      }
    }
  }

  /// Whether tiles of so many columns have registers for two sets of sums.
  static constexpr bool has_two_sets(int columns) {
    if constexpr (!kNarrow || kIntegers || kBlocks > 1) return false;
    return kSwap ? 2 * columns <= kTileN && columns <= 80 : columns <= 128;
  }

  /// The sums of a k tile are added up, times its scales where operands are scaled by blocks: kScales of the weight, those of gates and of
  /// ups if there are two. Blocks of 64 rows take turns at one set of sums.
  template <int kColumns, int kScales, class Storage, class Accumulator, class Issue, class AfterLast>
  static CUTLASS_DEVICE void multiply_and_add(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator,
                                              Sum* sums, int k_count, minfer::gemm::WeightColumns const& columns, int row_group, int thread,
                                              Issue const& issue, AfterLast const& after_last) {
    minfer::gemm::WeightScales<kColumns, kSwap ? 0 : kScales> weight(params.scales, columns, k_count, thread % 32);
    constexpr int kSums = kColumns / 2;
    uint32_t const stage_units = uint32_t(params.stage_bytes) >> 4;
    auto const fence = [&](Sum* of) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums; ++i) cute::warpgroup_fence_operand(of[i]);
    };
    /// Adds a block's sums, of a stage, which is that of k tile `at`. retire() waits for them, release() gives the stage back.
    auto const add = [&](auto block, Sum* of, int stage, [[maybe_unused]] int at, auto const& retire, auto const& release) {
      [[maybe_unused]] constexpr int kBlock = decltype(block)::value;
      if constexpr (kScales == 0) {
        retire();
        release();
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSums; ++i) accumulator(kBlock * kBlockValues + i) += of[i];
      } else if constexpr (kSwap) {
        add_by_column<kColumns, kScales>(stage_factors(params, storage, stage), accumulator, of, thread, retire);
        release();
      } else {
        float row[2];
        read_rows<kBlock>(row, params, storage, stage, row_group, thread);
        weight.read(at);
        retire();
        release();
        add_by_row<kColumns, kScales, kBlock>(row, weight, accumulator, of);
      }
    };
    weight.for_each_range(k_count, [&](int k, int const end) {
      if constexpr (has_two_sets(kColumns)) {
        // One set is added while the MMAs of the other run. Otherwise few tokens would take as long as a k tile's MMAs and the additions
        // behind them, one after the other. No MMA is in flight at the loop's end, where ptxas would serialise them.
        auto const send = [&](Sum* to) {
          int const stage = state.index;
          FullBarrier::wait(&storage.full[stage], state.phase);
          issue(cute::C<0>{}, cute::C<1>{}, stage * stage_units, to, cute::GMMA::ScaleOut::Zero);
          state.advance();
          return stage;
        };
        auto const add_set = [&](Sum* of, int stage, auto in_flight, int at) {
          add(
              cute::C<0>{}, of, stage, at,
              [&] {
                cute::warpgroup_wait<decltype(in_flight)::value>();
                fence(of);
              },
              [&] { minfer::release_stage<kCluster>(&storage.empty[stage], thread); });
        };
        Sum *const even = sums, *const odd = sums + kSums;
        fence(even);
        fence(odd);
        CUTLASS_PRAGMA_NO_UNROLL
        for (; k + 4 <= end; k += 4) {
          int const first = send(even), second = send(odd);
          add_set(even, first, cute::C<1>{}, k);
          int const third = send(even);
          add_set(odd, second, cute::C<1>{}, k + 1);
          int const fourth = send(odd);
          if (k + 4 == k_count) after_last();
          add_set(even, third, cute::C<1>{}, k + 2);
          add_set(odd, fourth, cute::C<0>{}, k + 3);
        }
      }
      fence(sums);
      uint32_t next = state.index * stage_units;  // where the next stage is; a product would be on the way to its first MMA
      bool full = k < end && FullBarrier::test_wait(&storage.full[state.index], state.phase, 1);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; k < end; ++k) {
        int const stage = state.index;
        uint32_t const at = next;
        if (!full) FullBarrier::wait(&storage.full[stage], state.phase);
        state.advance();
        next = state.index == 0 ? 0 : at + stage_units;
        cute::for_each(cute::make_int_sequence<kBlocks>{}, [&](auto block) {
          constexpr bool kLast = decltype(block)::value + 1 == kBlocks;
          issue(block, cute::C<decltype(block)::value + 1>{}, at, sums, cute::GMMA::ScaleOut::Zero);
          if (kLast && k + 1 == k_count) after_last();
          add(
              block, sums, stage, k,
              [&] {
                cute::warpgroup_wait<0>();
                fence(sums);
                // Answers while sums are added.
                if constexpr (kLast) full = FullBarrier::test_wait(&storage.full[state.index], state.phase, 1);
              },
              [&] {
                if constexpr (kLast) minfer::release_stage<kCluster>(&storage.empty[stage], thread);
              });
        });
      }
    });
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = kSums; i < kBlockValues; ++i) accumulator(block * kBlockValues + i) = 0.0f;  // no registers in this loop
    }
  }

  /// Factors of columns, which are the tokens: of 8 i + 2 (lane % 4) and the next. There are no registers for those of wide tiles at once:
  /// the first are read while the MMAs run. Gates and ups are rows 8 apart.
  template <int kColumns, int kScales, class Accumulator, class Retire>
  static CUTLASS_DEVICE void add_by_column(float const* factors, Accumulator& accumulator, Sum* sums, int thread, Retire const& retire) {
    constexpr int kFree = kColumns < 160 ? 168 - kColumns : 8;  // registers
    constexpr int kBlocksOf8 = kColumns / 8, kMost = kFree / (2 * kScales), kEarly = kBlocksOf8 < kMost ? kBlocksOf8 : kMost;
    auto const* const pairs = reinterpret_cast<float2 const*>(factors) + thread % 4;
    float2 early[kScales][kEarly];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kEarly; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kScales; ++j) early[j][i] = pairs[j * (kTileN / 2) + 4 * i];
    }
    retire();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBlocksOf8; ++i) {
      float2 const first = i < kEarly ? early[0][i < kEarly ? i : 0] : pairs[4 * i];
      float2 const second = kScales == 1 ? first : i < kEarly ? early[kScales - 1][i < kEarly ? i : 0] : pairs[kTileN / 2 + 4 * i];
      int const v = 4 * i;
      accumulator(v) = fmaf(sums[v], first.x, accumulator(v));
      accumulator(v + 1) = fmaf(sums[v + 1], first.y, accumulator(v + 1));
      accumulator(v + 2) = fmaf(sums[v + 2], second.x, accumulator(v + 2));
      accumulator(v + 3) = fmaf(sums[v + 3], second.y, accumulator(v + 3));
    }
  }

  /// Scales of a thread's two rows of a block of 64, which are tokens.
  template <int kBlock, class Storage>
  static CUTLASS_DEVICE void read_rows(float (&row)[2], Params const& params, Storage& storage, int stage, int row_group, int thread) {
    float const* const rows =
        stage_factors(params, storage, stage) + (kBlock * kSharing + row_group) * 64 + thread / 32 * 16 + thread % 32 / 4;
    row[0] = rows[0];
    row[1] = rows[8];
  }

  /// Sums times the scales of their rows and of the weight. Gates and ups take turns, 8 columns each.
  template <int kColumns, int kScales, int kBlock, class Weight, class Accumulator>
  static CUTLASS_DEVICE void add_by_row(float const (&row)[2], Weight const& weight, Accumulator& accumulator, Sum const* sums) {
    constexpr int kSpan = Weight::kSpan;
    CUTLASS_PRAGMA_UNROLL
    for (int span = 0; span < kColumns / kSpan; ++span) {
      float factor[kScales][2];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kScales; ++j) {
        factor[j][0] = row[0] * weight.of(j, span);
        factor[j][1] = row[1] * weight.of(j, span);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSpan / 2; ++i) {
        int const v = span * (kSpan / 2) + i, at = kBlock * kBlockValues + v;
        accumulator(at) = fmaf(sums[v], factor[kScales == 1 ? 0 : v / 4 % 2][v / 2 % 2], accumulator(at));
      }
    }
  }
};

}  // namespace cutlass::gemm::collective
