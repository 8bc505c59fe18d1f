// What a stage of the sm_90 kernels holds, how it is divided among the warpgroups, and how a thread reads its codes: common to the
// mainloops.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "common/cutlass_element.cuh"
#include "common/ring.cuh"
#include "common/stage_release.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "quantized_gemm/dequantize.cuh"
#include "quantized_gemm/w4_layout.h"

namespace minfer::w4a16 {

/// kGathers: whether tokens may come by cp.async.
template <class Config, bool kGathers_>
struct StageSm90 {
  static constexpr bool kGathers = kGathers_;
  static constexpr DataType kType = Config::kType;
  using Element = CutlassElement<kType>;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK;  // rows of weights, tokens, k
  static constexpr int kThreads = Config::kThreads, kConsumers = kThreads / 128 - 1;
  static constexpr int kStages = Config::kStages;
  static constexpr int kSlices = Config::kSlices, kSliceK = kTileK / kSlices;  // warpgroups among which a stage's k is divided
  static constexpr int kRowGroups = kConsumers / kSlices;                      // warpgroups with different rows
  static constexpr int kBlocks = kSliceK / kBlockK;                            // weight blocks of 64 rows of a warpgroup, in a stage
  // The registers of all warpgroups together must be no more than the launch gave the CTA: setmaxnreg would wait for more forever.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * Config::kCtasPerSm) / 8 * 8;
  static constexpr int kProducerRegisters = kConsumers >= 4 || (Config::kCtasPerSm >= 2 && kGathers) ? 32
                                            : Config::kCtasPerSm >= 2                                ? 24
                                                                                                     : 40;
  static constexpr int kConsumerRegisters =
      cute::min(232, (kLaunchRegisters * kThreads - kProducerRegisters * 128) / (kConsumers * 128) / 8 * 8);
  static_assert(kProducerRegisters * 128 + kConsumerRegisters * 128 * kConsumers <= kLaunchRegisters * kThreads);
  // A warpgroup has kMmaM times 64 rows; the mi-th 64 rows of row group w are the (mi * kRowGroups + w)-th of the tile.
  static constexpr int kMmaM = kTileM / (64 * kRowGroups);
  static constexpr int kCluster = Config::kClusterM;
  static_assert(kConsumers % kSlices == 0 && kTileM % (64 * kRowGroups) == 0 && kTileK % (kSlices * kBlockK) == 0);
  static_assert(Config::kSwap && Config::kSchedule == Schedule::kCooperative && Config::kClusterN == 1 && kTileN % (8 * kCluster) == 0);

  // Few tokens: scales go in fp32 to the accumulators of a stage, kTileN / 2 multiply-adds; many: to the fragments, 16 multiplies a block.
  static constexpr Scaling kScaling = Config::kScaling;
  static constexpr bool kFine = kScaling == Scaling::kFine || kScaling == Scaling::kFineAccumulators;
  static_assert(kScaling == Scaling::kFragments || kScaling == Scaling::kFine || (kMmaM == 1 && kBlocks == 2));

  static constexpr WeightFormat kFormat = Config::kFormat;
  static constexpr bool kHasZeros = has_zero_points(kFormat), kHasBook = has_code_book(kFormat);
  static constexpr bool kInOrder = Config::kInOrder;  // mma.sync with the bits of WGMMA: k blocks are added one after the other
  // mma.sync, not WGMMA. With 16 tokens that is slower where WGMMA needs no wait for every 32 of k, and with code books (28672 x 4096:
  // 19.3 us against 18.6, nf4 26.5 against 21.8): every warp reads all tokens from shared memory, where the books are, too.
  static constexpr bool kSync = kInOrder || kTileN == 8 || (kTileN == 16 && kFine && !kHasBook);
  static_assert(!kSync || kMmaM == 1);
  /// Whether the loop is compiled with zero points and without; else those of symmetric weights are filled in.
  static constexpr bool kTwoLoops = kHasZeros && (kSync || kScaling != Scaling::kAccumulators);
  static_assert(kSlices == 1 || kSync || kScaling == Scaling::kAccumulators || kScaling == Scaling::kFineAccumulators);
  static constexpr int kGroup = !kFine ? kSliceK : fixed_group_of(kFormat) != 0 ? fixed_group_of(kFormat) : 32;  // the smallest
  static_assert(kGroup >= 32 || kScaling == Scaling::kFine);
  static constexpr int kScaleRows = kTileK / kGroup;  // groups that may begin in a stage
  static constexpr int kRing = 4;                     // A fragments in use
  static constexpr int kValues = kMmaM * kTileN / 2;  // accumulators of a thread
  using Codes = w4a16::Codes<Config::kType, kFormat, kScaling == Scaling::kFragments || kScaling == Scaling::kFine>;
  using Scale = w4a16::Scale<Config::kType, kFormat>;
  static constexpr int kChunkSlabs = 4 / Codes::kWords;       // k blocks in a thread's 16 bytes
  static constexpr int kChunks = kSliceK / 16 / kChunkSlabs;  // of 64 rows, in a warpgroup's slice of a stage

  using Atom = decltype(cute::SM90::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kTileN>, cute::_64>>());
  using TiledMma = decltype(cute::make_tiled_mma(Atom{}));
  using SmemLayoutB = decltype(cute::tile_to_shape(cute::SM90::GMMA::Layout_K_SW128_Atom<Element>{},
                                                   cute::Shape<cute::Int<kTileN>, cute::Int<kTileK>, cute::Int<kStages>>{}));

  struct Zeros {
    alignas(128) uint16_t of[kStages][kScaleRows][kTileM];
  };
  static constexpr int kBookBarrier = 15;  // of all consumers
  // In kernels with no register to spare, a thread's indices are not kept over the mainloop but computed again.
  static constexpr bool kRereadsThread = kConsumers * Config::kCtasPerSm >= 3 && kValues >= 16;
  struct Slices {
    alignas(16) float4 of[cute::max(1, kSlices - 1)][kRowGroups][kValues / 4][128];
  };
  struct BookStorage {
    alignas(128) char bytes[kBookBytes];
  };
  /// One flat struct: behind a nested one each address of a mainloop would cost an addition. Partials: of the tile scheduler.
  template <class Staging, class Partials, class EpilogueSmall>
  struct SharedStorage {
    alignas(1024) Element activations[kStages][kTileN * kTileK];
    alignas(1024) uint4 weights[kStages][kTileM / 64][kSlices * kChunks][128];
    [[no_unique_address]] cute::conditional_t<kHasBook, BookStorage, cute::tuple<>> book;
    Staging staging;
    alignas(128) typename Scale::Stored scales[kStages][kScaleRows][kTileM];
    [[no_unique_address]] cute::conditional_t<kHasZeros, Zeros, cute::tuple<>> zeros;
    [[no_unique_address]] Partials scheduler;
    [[no_unique_address]] cute::conditional_t<(kSlices > 1), Slices, cute::tuple<>> slices;
    alignas(8) uint64_t full[kStages], empty[kStages];
    EpilogueSmall epilogue;
  };

  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  using PipelineState = Ring<kStages>;

  /// Waits for the ring's stage. cp.async writes through another proxy than WGMMA reads by.
  template <class Storage>
  static CUTLASS_DEVICE void wait(Storage& storage, PipelineState const& ring) {
    FullBarrier::wait(&storage.full[ring.index], ring.phase);
    if constexpr (kGathers && !kSync) cutlass::arch::fence_view_async_shared();
  }

  // A stage is free again: each warp arrives at the barrier of every CTA that writes into the stage. One arrival for a warpgroup would not
  // do: its warps do not wait for each other in WGMMAs, and a late warp still has codes and scales to read (seen with cold caches and
  // groups of 32).
  template <class Storage>
  static CUTLASS_DEVICE void release(Storage& storage, int stage, int thread, bool when = true) {
    release_stage<kCluster>(&storage.empty[stage], thread, when);
  }

  // -zero * factor of a thread's two rows. Without a branch for symmetric weights: control flow between WGMMAs makes ptxas serialise them.
  // Most loops are compiled twice instead.
  template <class Storage>
  static CUTLASS_DEVICE void load_zeros(Storage& storage, int stage, int group, int row, uint32_t (&z)[2]) {
    if constexpr (kHasZeros) {
      uint16_t const* zeros = &storage.zeros.of[stage][group][row];
      z[0] = Half2<Config::kType>::mul(both_halves(zeros[0]), Codes::factor(0) ^ 0x80008000u);
      z[1] = Half2<Config::kType>::mul(both_halves(zeros[8]), Codes::factor(1) ^ 0x80008000u);
    }
  }

  // The scales of a thread's two rows, twice in a register, for its fragments.
  static CUTLASS_DEVICE void scales_of_rows(typename Scale::Stored const* scales, uint32_t (&twice)[2]) {
    typename Scale::Stored const of_rows[2] = {scales[0], scales[8]};
    Scale::rows(of_rows, twice);
    if constexpr (kHasZeros) {
      twice[0] = Half2<Config::kType>::mul(twice[0], Codes::inverse(0));
      twice[1] = Half2<Config::kType>::mul(twice[1], Codes::inverse(1));
    }
  }

  static CUTLASS_DEVICE void symmetric_zeros(uint32_t (&z)[2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      z[r] = 0;
      if constexpr (kHasZeros) z[r] = Half2<kType>::mul(Codes::kSymmetricZero, Codes::factor(r) ^ 0x80008000u);
    }
  }

  // ---- scales on the fragments; kZeroPoints: whether zero points are read ----------------------------------------------------------

  template <bool kZeroPoints>
  static constexpr bool kFolded = kHasZeros && !kZeroPoints && Codes::kFolds;
  /// What sums of products of fragments still lack.
  template <bool kZeroPoints>
  static constexpr float rest() {
    if constexpr (kFolded<kZeroPoints>) {
      return Codes::kFoldedRest;
    } else {
      return Scale::kRest;
    }
  }
  /// The scales of a thread's two rows and their zero points, as scaled_fragment takes them.
  template <bool kZeroPoints, class Storage>
  static CUTLASS_DEVICE void load_scales(Storage& storage, int stage, int group, int row, uint32_t (&scale)[2], uint32_t (&zero)[2]) {
    typename Scale::Stored const* const scales = &storage.scales[stage][group][row];
    if constexpr (kFolded<kZeroPoints>) {
      typename Scale::Stored const of_rows[2] = {scales[0], scales[8]};
      uint32_t twice[2];
      Scale::rows(of_rows, twice);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        scale[r] = Half2<kType>::mul(twice[r], Codes::folded_factor(r));
        zero[r] = Half2<kType>::mul(twice[r], Codes::kFoldedZero);
      }
    } else {
      scales_of_rows(scales, scale);
      if constexpr (kZeroPoints) {
        load_zeros(storage, stage, group, row, zero);
      } else {
        symmetric_zeros(zero);
      }
    }
  }
  template <bool kZeroPoints>
  static CUTLASS_DEVICE void scaled_fragment(uint32_t const (&words)[Codes::kWords], uint32_t const (&scale)[2], uint32_t const (&zero)[2],
                                             w4a16::Book const& book, uint32_t (&a)[4]) {
    if constexpr (kFolded<kZeroPoints>) {
      Codes::folded(words, scale, zero, a);
    } else {
      Codes::fragment(words, zero, book, a);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 4; ++r) a[r] = Half2<kType>::mul(a[r], scale[r % 2]);
    }
  }

  // ----------------------------------------------------------------------------------------------------------------------------------

  // The zero point of symmetric weights, in this warpgroup's rows of every stage.
  template <class Storage>
  static CUTLASS_DEVICE void fill_zeros(Storage& storage, int consumer, int thread) {
    for (int i = consumer / kRowGroups * 128 + thread; i < kStages * kScaleRows * kMmaM * 32; i += kSlices * 128) {
      int const mi = i / 32 % kMmaM, stage_row = i / 32 / kMmaM;
      uint32_t* rows = reinterpret_cast<uint32_t*>(&storage.zeros.of[stage_row / kScaleRows][stage_row % kScaleRows][0]);
      rows[(mi * kRowGroups + consumer % kRowGroups) * 32 + i % 32] = Codes::kSymmetricZero;
    }
  }

  template <class Registers>
  static CUTLASS_DEVICE void set(Registers& registers, int set, int k_block, uint32_t const (&a)[4]) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 4; ++r) registers(r + 4 * k_block + 16 * set) = a[r];
  }

  // The compiler must not move the fragments' arithmetic between WGMMAs: it would have to serialise them.
  template <class Registers>
  static CUTLASS_DEVICE void pin(Registers& registers, int set) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 16; ++i) cute::warpgroup_fence_operand(registers(i + 16 * set));
  }

  // The words of a k block, out of the 16-byte chunks that hold the codes of its weight block.
  static CUTLASS_DEVICE void words_of(uint4 const* chunks, int k_block, uint32_t (&words)[Codes::kWords]) {
    uint4 const& chunk = chunks[k_block / kChunkSlabs];
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < Codes::kWords; ++w) {
      int const i = k_block % kChunkSlabs * Codes::kWords + w;
      words[w] = i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
    }
  }

  // Codes of the mi-th 64 rows of a warpgroup, in its slice of the stage.
  template <class Storage>
  static CUTLASS_DEVICE uint4 load_codes(Storage& storage, int stage, int mi, int chunk, int consumer, int thread) {
    return storage.weights[stage][mi * kRowGroups + consumer % kRowGroups][consumer / kRowGroups * kChunks + chunk][thread];
  }

  template <class Storage>
  static CUTLASS_DEVICE w4a16::Book book_of(Storage& storage, int thread) {
    if constexpr (kHasBook) {
      return {storage.book.bytes, uint32_t(thread % 32 * 4)};
    } else {
      return {};
    }
  }
};

}  // namespace minfer::w4a16
