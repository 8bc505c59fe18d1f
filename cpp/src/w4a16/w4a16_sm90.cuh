// GEMM with 4-bit and 8-bit weights for sm_90a: TMA + WGMMA with the weights in registers, persistent, warp specialised; in tiles of 8 tokens,
// and some of 16, mma.sync takes WGMMA's place.
//
// The weights' rows (the caller's n) are the MMA's m, the tokens (the caller's m) its n, so that a few tokens are one narrow instruction.
// Warp roles. Warpgroup 0: its warp 0 is the producer, which walks the schedule and fills a ring of kStages stages: packed weights, scales,
// zeros and activations, all by TMA. Warpgroups 1 to kConsumers: 64 rows of the tile each. A thread reads its own codes of a 64 x 64 block by one
// 16-byte access (two of 8-bit weights; w4_layout.h), dequantises them to four A fragments and issues four WGMMAs; while these run it
// dequantises the next block into the other set of registers. With mma.sync several warps of an SM scheduler take each other's time.
// Pipelines. Ring: one pair of mbarriers a stage (full: TMA bytes; empty: one arrival of each consumer warp, when the WGMMAs that read the
// stage's activations have retired, or mma.sync's sums of them are there). C and D: epilogue_sm90.cuh.
// Tile walk: TileScheduler (data-parallel, split-K or stream-K at run time); pieces meet in the workspace (split_reduction.cuh), or, split-K of
// one tile to a cluster, in the owner's shared memory (cluster_split.h).
// Start: weights, scales and zeros are constants, so the first stages of them are loaded under the predecessor's tail; activations, C and
// everything written wait for it (dependent_launch.cuh).
// Limits: activations 16-byte aligned in base and rows; groups of 32 (fine; nvfp4: 16) or 128 times a power of two, or all of k.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "gemm/epilogue_sm90.cuh"
#include "gemm/launch_sm90.cuh"
#include "w4a16/cluster_split.h"
#include "w4a16/dequantize.cuh"
#include "w4a16/w4_layout.h"

namespace minfer::w4a16 {

template <class Config>
struct W4A16Sm90 {
  using Element = cute::conditional_t<Config::kType == DataType::kF16, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK;  // rows of weights, tokens, k
  static constexpr int kThreads = Config::kThreads, kConsumers = kThreads / 128 - 1;
  static constexpr int kStages = Config::kStages;
  static constexpr int kBlocks = kTileK / kBlockK;  // of a warpgroup's rows, in a stage
  // What the warpgroups hold together must fit what the launch gave the CTA: more is waited for, forever.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * Config::kCtasPerSm) / 8 * 8;
  static constexpr int kProducerRegisters = kConsumers >= 4 ? 32 : Config::kCtasPerSm == 2 ? 24 : 40;
  static constexpr int kConsumerRegisters =
      cute::min(232, (kLaunchRegisters * kThreads - kProducerRegisters * 128) / (kConsumers * 128) / 8 * 8);
  static_assert(kProducerRegisters * 128 + kConsumerRegisters * 128 * kConsumers <= kLaunchRegisters * kThreads);
  static constexpr int kMmaM = kTileM / (64 * kConsumers);  // 64-row slabs of a warpgroup: slab mi of warpgroup w is mi * kConsumers + w
  static constexpr int kCluster = Config::kClusterM;
  static_assert(kTileM % (64 * kConsumers) == 0 && kTileK % kBlockK == 0);
  static_assert(Config::kSwap && Config::kSchedule == Schedule::kCooperative && Config::kClusterN == 1 && kTileN % (8 * kCluster) == 0);

  // Few tokens: scales go in fp32 to the accumulators of a stage, kTileN / 2 multiply-adds; many: to the fragments, 16 multiplies a block.
  static constexpr Scaling kScaling = Config::kScaling;
  static constexpr bool kFine = kScaling == Scaling::kFine || kScaling == Scaling::kFineAccumulators;
  static_assert(kScaling == Scaling::kFragments || kScaling == Scaling::kFine || (kMmaM == 1 && kBlocks == 2));

  static constexpr WeightFormat kFormat = Config::kFormat;
  static constexpr bool kHasZeros = has_zero_points(kFormat), kHasBook = has_code_book(kFormat);
  // mma.sync, not WGMMA. With 16 tokens that is slower where WGMMA needs no wait for every 32 of k, and with code books (28672 x 4096: 19.3 us
  // against 18.6, nf4 26.5 against 21.8): every warp reads all tokens from shared memory, where the books are, too.
  static constexpr bool kSync = kTileN == 8 || (kTileN == 16 && kScaling == Scaling::kFineAccumulators && !kHasBook);
  static_assert(!kSync || kMmaM == 1);
  static constexpr int kGroup = !kFine ? kTileK : fixed_group_of(kFormat) != 0 ? fixed_group_of(kFormat) : 32;  // the smallest
  static_assert(kGroup >= 32 || kScaling == Scaling::kFine);
  static constexpr int kScaleRows = kTileK / kGroup;  // groups that may begin in a stage
  static constexpr int kRing = 4;                     // A fragments in use
  static constexpr int kValues = kMmaM * kTileN / 2;  // accumulators of a thread
  using Epilogue = gemm::EpilogueSm90<Config>;
  static constexpr bool kTagged = kValues <= gemm::kMaxTaggedValues;
  using Reduction = cute::conditional_t<kTagged, gemm::TaggedReduction<128, cute::min(kValues, gemm::kMaxTaggedValues)>,
                                        gemm::SplitReduction<128, kValues>>;
  using Codes = w4a16::Codes<Config::kType, kFormat>;
  using Scale = w4a16::Scale<Config::kType, kFormat>;
  static constexpr int kChunkSlabs = 4 / Codes::kWords;      // slabs of 16 of k in a thread's 16 bytes
  static constexpr int kChunks = kTileK / 16 / kChunkSlabs;  // of a slab of 64 rows, in a stage

  using Atom = decltype(cute::SM90::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kTileN>, cute::_64>>());
  using TiledMma = decltype(cute::make_tiled_mma(Atom{}));
  using SmemLayoutB = decltype(cute::tile_to_shape(cute::SM90::GMMA::Layout_K_SW128_Atom<Element>{},
                                                   cute::Shape<cute::Int<kTileN>, cute::Int<kTileK>, cute::Int<kStages>>{}));

  struct Params {
    CUtensorMap weights;      // [n / 64, chunks of k, 256] of 8 bytes
    CUtensorMap activations;  // [1, m, k]
    CUtensorMap scales;       // [k / group, n], 2 bytes or 1
    CUtensorMap zeros;        // likewise
    gemm::EpilogueSm90Params epilogue;
    gemm::TileSchedulerParams schedule;
    gemm::SplitWorkspace split;
    uint64_t hint_weights;
    int32_t group_shift;  // log2 of the group size; 30: one group
    int32_t stage_bytes;
    int32_t cluster_pieces;  // > 0: the pieces of a tile are the CTAs of a cluster, its last one owns the tile
    bool has_zeros;
  };

  struct BookStorage {
    alignas(128) char bytes[kBookBytes];
  };
  struct Zeros {
    alignas(128) uint16_t of[kStages][kScaleRows][kTileM];
  };
  static constexpr int kMaxPieces = max_cluster_pieces(kFormat, kTileN);
  struct Pieces {
    alignas(16) float4 of[cute::max(1, kMaxPieces)][kConsumers][kValues / 4][128];
    alignas(8) uint64_t full[kConsumers];
  };
  struct SharedStorage {
    alignas(1024) Element activations[kStages][kTileN * kTileK];
    alignas(1024) uint4 weights[kStages][kTileM / 64][kChunks][128];
    [[no_unique_address]] cute::conditional_t<kHasBook, BookStorage, cute::tuple<>> book;
    typename Epilogue::Buffers epilogue;
    alignas(128) typename Scale::Stored scales[kStages][kScaleRows][kTileM];
    [[no_unique_address]] cute::conditional_t<kHasZeros, Zeros, cute::tuple<>> zeros;
    [[no_unique_address]] cute::conditional_t<(kMaxPieces > 0), Pieces, cute::tuple<>> pieces;
    alignas(8) uint64_t full[kStages], empty[kStages];
    typename Epilogue::Small epilogue_small;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  struct Ring {
    int index = 0;
    uint32_t phase = 0;
    __device__ void advance() {
      if (++index == kStages) {
        index = 0;
        phase ^= 1;
      }
    }
  };

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (cute::cast_smem_ptr_to_uint(smem) % 1024 != 0) __trap();
    int const warpgroup = cutlass::canonical_warp_group_idx();
    int const warp = cutlass::canonical_warp_idx_sync();

    allow_dependent_launch();
    if (warp == 0 && cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.weights));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.activations));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.scales));
      if (params.has_zeros) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.zeros));
      if (params.epilogue.store_by_tma) cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.epilogue.tma_d));
      if (params.epilogue.load_c_by_tma) {
        cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.epilogue.tma_c));
      }
      for (int s = 0; s < kStages; ++s) {
        FullBarrier::init(&storage.full[s], 1);
        EmptyBarrier::init(&storage.empty[s], kConsumers * 4 * kCluster);
      }
      Epilogue::initialize(storage.epilogue_small);
      if constexpr (kMaxPieces > 0) {
        if (params.cluster_pieces > 0) {
          for (int c = 0; c < kConsumers; ++c) {
            FullBarrier::init(&storage.pieces.full[c], 1);
            FullBarrier::arrive_and_expect_tx(&storage.pieces.full[c], uint32_t(params.cluster_pieces * kValues * 128 * 4));
          }
        }
      }
      cutlass::arch::fence_barrier_init();
    }
    int const rank = kCluster > 1 ? int(cute::block_rank_in_cluster()) : 0;
    if (kCluster > 1 || (kMaxPieces > 0 && params.cluster_pieces > 0)) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }

    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (warp == 0 && cute::elect_one_sync()) produce(params, storage, rank);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(params, storage, rank, warpgroup - 1, int(threadIdx.x) % 128);
    }
    if constexpr (kCluster > 1) {  // no CTA may leave while another still sends to it
      cute::cluster_arrive();
      cute::cluster_wait();
    }
  }

  // ---- producer -----------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE void load_weights(Params const& params, SharedStorage& storage, int stage, int tile_m, int k) {
    uint64_t* barrier = &storage.full[stage];
    auto const last = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
    FullBarrier::arrive_and_expect_tx(barrier, uint32_t(params.stage_bytes));
    cute::SM90_TMA_LOAD_3D::copy(&params.weights, barrier, params.hint_weights, &storage.weights[stage], 0, k * kChunks,
                                 tile_m * (kTileM / 64));
    int const group = (k * kTileK) >> params.group_shift;
    cute::SM90_TMA_LOAD_3D::copy(&params.scales, barrier, last, &storage.scales[stage], tile_m * kTileM, group, 0);
    if constexpr (kHasZeros) {
      if (params.has_zeros) cute::SM90_TMA_LOAD_3D::copy(&params.zeros, barrier, last, &storage.zeros.of[stage], tile_m * kTileM, group, 0);
    }
  }
  // Each CTA of a cluster fetches its share of the tokens for all of them.
  static CUTLASS_DEVICE void load_activations(Params const& params, SharedStorage& storage, int rank, int stage, int tile_n, int k) {
    constexpr int kShare = kTileN / kCluster;
    auto const last = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      Element* destination = &storage.activations[stage][(b * kTileN + rank * kShare) * kBlockK];
      int const column = k * kTileK + b * kBlockK, token = tile_n * kTileN + rank * kShare;
      if constexpr (kCluster > 1) {
        cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&params.activations, &storage.full[stage], uint16_t((1 << kCluster) - 1), last, destination,
                                               column, token, 0);
      } else {
        cute::SM90_TMA_LOAD_3D::copy(&params.activations, &storage.full[stage], last, destination, column, token, 0);
      }
    }
  }

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int rank) {
    Ring ring;
    ring.phase = 1;  // a fresh barrier's previous phase counts as passed: every stage starts empty
    bool first = true;
    gemm::TileScheduler scheduler(params.schedule, int(blockIdx.x) / kCluster);
    for (gemm::WorkItem item = scheduler.next(); item.valid; item = scheduler.next()) {
      gemm::TileCoord const tile = gemm::TileScheduler::coordinate(params.schedule, item.tile);
      int const tile_m = tile.m * kCluster + rank;
      int k = item.k_begin;
      int const k_end = item.k_begin + item.k_count;
      if (first) {
        int const ahead = item.k_count < kStages ? item.k_count : kStages;
#pragma unroll 1
        for (int i = 0; i < ahead; ++i) load_weights(params, storage, i, tile_m, k + i);
        wait_for_predecessor();
#pragma unroll 1
        for (int i = 0; i < ahead; ++i) {
          load_activations(params, storage, rank, i, tile.n, k + i);
          ring.advance();
        }
        k += ahead;
        first = false;
      }
#pragma unroll 1
      for (; k < k_end; ++k) {
        EmptyBarrier::wait(&storage.empty[ring.index], ring.phase);
        load_weights(params, storage, ring.index, tile_m, k);
        load_activations(params, storage, rank, ring.index, tile.n, k);
        ring.advance();
      }
    }
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------------------

  // A stage is free again: each warp tells the producer of every CTA that writes into it. One arrival for a warpgroup would not do: its warps do
  // not wait for each other in WGMMAs, and one that comes late still has codes and scales to read (seen with cold caches and groups of 32).
  // A predicate and no branch: control flow between WGMMAs makes ptxas serialise them.
  static CUTLASS_DEVICE void release(SharedStorage& storage, int stage, int thread, bool when = true) {
    if constexpr (kCluster > 1) {
      EmptyBarrier::arrive(&storage.empty[stage], uint32_t(thread) % kCluster, uint32_t(when && thread % 32 < kCluster));
    } else {
      asm volatile(
          "{\n"
          ".reg .pred chosen;\n"
          "setp.ne.u32 chosen, %1, 0;\n"
          "@chosen mbarrier.arrive.shared::cta.b64 _, [%0];\n"
          "}" ::"r"(cute::cast_smem_ptr_to_uint(&storage.empty[stage])),
          "r"(uint32_t(when && thread % 32 == 0))
          : "memory");
    }
  }

  // -zero * factor of a thread's two rows. Without a branch for symmetric weights: control flow between WGMMAs makes ptxas serialise them.
  static CUTLASS_DEVICE void load_zeros(SharedStorage const& storage, int stage, int group, int row, uint32_t (&z)[2]) {
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

  // The zero point of symmetric weights, in this warpgroup's rows of every stage.
  static CUTLASS_DEVICE void fill_zeros(SharedStorage& storage, int consumer, int thread) {
    for (int i = thread; i < kStages * kScaleRows * kMmaM * 32; i += 128) {
      int const slab = i / 32 % kMmaM, stage_row = i / 32 / kMmaM;
      uint32_t* rows = reinterpret_cast<uint32_t*>(&storage.zeros.of[stage_row / kScaleRows][stage_row % kScaleRows][0]);
      rows[(slab * kConsumers + consumer) * 32 + i % 32] = Codes::kSymmetricZero;
    }
  }

  template <class Registers>
  static CUTLASS_DEVICE void set(Registers& registers, int set, int slab, uint32_t const (&a)[4]) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 4; ++r) registers(r + 4 * slab + 16 * set) = a[r];
  }

  // The compiler must not move the fragments' arithmetic between WGMMAs: it would have to serialise them.
  template <class Registers>
  static CUTLASS_DEVICE void pin(Registers& registers, int set) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 16; ++i) cute::warpgroup_fence_operand(registers(i + 16 * set));
  }

  // A slab's words out of the chunks of 16 bytes that hold its block's codes.
  static CUTLASS_DEVICE void words_of(uint4 const* chunks, int slab, uint32_t (&words)[Codes::kWords]) {
    uint4 const& chunk = chunks[slab / kChunkSlabs];
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < Codes::kWords; ++w) {
      int const i = slab % kChunkSlabs * Codes::kWords + w;
      words[w] = i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
    }
  }

  // The 64-row slab mi of a warpgroup.
  static CUTLASS_DEVICE uint4 load_codes(SharedStorage const& storage, int stage, int mi, int chunk, int consumer, int thread) {
    return storage.weights[stage][mi * kConsumers + consumer][chunk][thread];
  }

  static CUTLASS_DEVICE w4a16::Book book_of(SharedStorage const& storage, int thread) {
    if constexpr (kHasBook) {
      return {storage.book.bytes, uint32_t(thread % 32 * 4)};
    } else {
      return {};
    }
  }

  /// Scales in the fragments. A WGMMA holds its warps until it has read A's registers, so with many tokens the warp is the tensor core's: each
  /// slab of 16 of k is a batch of its own, dequantised while the one before runs, in a ring of four fragments.
  template <class Accumulator>
  static CUTLASS_DEVICE void mainloop_fragments(Params const& params, SharedStorage& storage, Ring& ring, Accumulator& accumulator,
                                                int k_count, int consumer, int thread) {
    using namespace cute;
    using H = Half2<Config::kType>;
    TiledMma mma;
    Tensor sB = make_tensor(make_smem_ptr(&storage.activations[0][0]), SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
    auto thread_mma = mma.get_slice(thread);
    Tensor tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));        // (MMA,MMA_N,MMA_K,PIPE), descriptors
    Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, Int<kRing>>{});  // (MMA,RING)
    auto registers = recast<uint32_t>(tCrA);

    w4a16::Book const book = book_of(storage, thread);
    int previous = 0;
    warpgroup_fence_operand(accumulator);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < k_count; ++i) {
      int const stage = ring.index;
      FullBarrier::wait(&storage.full[stage], ring.phase);
      uint4 codes[kMmaM][kChunks];
      CUTLASS_PRAGMA_UNROLL
      for (int u = 0; u < kChunks * kMmaM; ++u)
        codes[u % kMmaM][u / kMmaM] = load_codes(storage, stage, u % kMmaM, u / kMmaM, consumer, thread);
      uint32_t scale[kMmaM][2], zero[kMmaM][2];  // [slab][row]
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kTileK / 16 * kMmaM; ++step) {
        int const mi = step % kMmaM, slab = step / kMmaM;
        if (slab % (kGroup / 16) == 0) {
          int const row = (mi * kConsumers + consumer) * 64 + thread / 32 * 16 + thread % 32 / 4;
          int const group = kFine ? (slab * 16) >> params.group_shift : 0;
          typename Scale::Stored const* scales = &storage.scales[stage][group][row];
          scales_of_rows(scales, scale[mi]);
          load_zeros(storage, stage, group, row, zero[mi]);
        }
        uint32_t words[Codes::kWords];
        words_of(codes[mi], slab, words);
        warpgroup_wait<kRing - 1>();                                       // this fragment's last reader
        if (step == kRing - 1) release(storage, previous, thread, i > 0);  // with it all of the previous stage has retired
        uint32_t a[4];
        Codes::fragment(words, zero[mi], book, a);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 4; ++r) {
          registers(r + 4 * (step % kRing)) = H::mul(a[r], scale[mi][r % 2]);
          warpgroup_fence_operand(registers(r + 4 * (step % kRing)));
        }
        warpgroup_fence_operand(accumulator);
        warpgroup_arrive();
        mma.accumulate_ = slab == 0 && i == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        cute::gemm(mma, tCrA(_, step % kRing), tCrB(_, _0{}, slab, stage), accumulator(_, mi, _0{}));
        warpgroup_commit_batch();
        warpgroup_fence_operand(accumulator);
      }
      previous = stage;
      ring.advance();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(accumulator);
    release(storage, previous, thread);
  }

  /// Scales on the accumulators of each stage.
  template <class Accumulator>
  static CUTLASS_DEVICE void mainloop_accumulators(Params const& params, SharedStorage& storage, Ring& ring, Accumulator& accumulator,
                                                   int k_count, int consumer, int thread) {
    using namespace cute;
    TiledMma mma;
    Tensor sB = make_tensor(make_smem_ptr(&storage.activations[0][0]), SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
    auto thread_mma = mma.get_slice(thread);
    Tensor tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));        // (MMA,MMA_N,MMA_K,PIPE), descriptors
    Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, _4, _2>{});  // (MMA,MMA_M,MMA_K of a block,SET)
    auto registers = recast<uint32_t>(tCrA);
    Tensor even = make_fragment_like(accumulator), odd = make_fragment_like(accumulator);  // (MMA,MMA_M,MMA_N), of a stage
    int const row = consumer * 64 + thread / 32 * 16 + thread % 32 / 4;

    w4a16::Book const book = book_of(storage, thread);

    auto const dequantize = [&](uint4 const* codes, uint32_t const(&zero)[2], int block) {
      CUTLASS_PRAGMA_UNROLL
      for (int slab = 0; slab < 4; ++slab) {
        uint32_t words[Codes::kWords], a[4];
        words_of(codes, block * 4 + slab, words);
        Codes::fragment(words, zero, book, a);
        set(registers, block, slab, a);
      }
    };
    auto const multiply = [&](int block, int stage, auto& partial) {
      pin(registers, block);
      warpgroup_fence_operand(partial);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int slab = 0; slab < 4; ++slab) {
        mma.accumulate_ = block == 0 && slab == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        cute::gemm(mma, tCrA(_, _0{}, slab, block), tCrB(_, _0{}, block * 4 + slab, stage), partial(_, _0{}, _0{}));
      }
      warpgroup_commit_batch();
      warpgroup_fence_operand(partial);
    };

    float scale[2] = {0.0f, 0.0f};
    int previous = -1;
    auto const scale_and_add = [&](auto& partial) {
      warpgroup_fence_operand(partial);
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kValues; ++v) accumulator(v) = fmaf(scale[v / 2 % 2], partial(v), accumulator(v));
    };
    // One stage. At most two batches of WGMMAs are in flight, and each has the time of a dequantisation.
    auto const step = [&](auto& partial, auto& previous_partial) {
      int const stage = ring.index;
      FullBarrier::wait(&storage.full[stage], ring.phase);
      uint4 codes[kChunks];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kChunks; ++i) codes[i] = load_codes(storage, stage, 0, i, consumer, thread);
      uint32_t zero[2];
      load_zeros(storage, stage, 0, row, zero);
      warpgroup_wait<1>();
      dequantize(codes, zero, 0);
      multiply(0, stage, partial);
      warpgroup_wait<1>();  // the previous stage has retired
      release(storage, previous, thread, previous >= 0);
      scale_and_add(previous_partial);
      dequantize(codes, zero, 1);
      multiply(1, stage, partial);
      scale[0] = Scale::to_float(storage.scales[stage][0][row]);
      scale[1] = Scale::to_float(storage.scales[stage][0][row + 8]);
      previous = stage;
      ring.advance();
    };
    auto const finish = [&](auto& partial) {
      warpgroup_wait<0>();
      release(storage, previous, thread);
      scale_and_add(partial);
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kValues; ++v) accumulator(v) *= Codes::inverse_float(v / 2 % 2);
    };

    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kValues; ++v) accumulator(v) = even(v) = odd(v) = 0.0f;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int left = k_count;;) {
      step(even, odd);
      if (--left == 0) {
        finish(even);
        break;
      }
      step(odd, even);
      if (--left == 0) {
        finish(odd);
        break;
      }
    }
  }

  /// Scales on the accumulators of every 32 of k: while a piece's two WGMMAs run the next one's codes are dequantised into the other set.
  /// kZeroPoints: whether they are read; in two forms, as there are as many of them as scales.
  template <bool kZeroPoints, class Accumulator>
  static CUTLASS_DEVICE void mainloop_fine_accumulators(Params const& params, SharedStorage& storage, Ring& ring, Accumulator& accumulator,
                                                        int k_count, int consumer, int thread) {
    using namespace cute;
    TiledMma mma;
    Tensor sB = make_tensor(make_smem_ptr(&storage.activations[0][0]), SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
    auto thread_mma = mma.get_slice(thread);
    Tensor tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));                  // (MMA,MMA_N,MMA_K,PIPE), descriptors
    Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, Int<kGroup / 16>, _2>{});  // (MMA,MMA_K of a piece,SET)
    auto registers = recast<uint32_t>(tCrA);
    Tensor partial = make_fragment_like(accumulator);  // (MMA,MMA_M,MMA_N), of a piece
    int const row = consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
    constexpr int kPiece = kGroup, kSlabs = kPiece / 16, kPieces = kTileK / kPiece;
    uint32_t symmetric[2] = {0, 0};
    if constexpr (kHasZeros && !kZeroPoints) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) {
        symmetric[r] = Half2<Config::kType>::mul(Codes::kSymmetricZero, Codes::factor(r) ^ 0x80008000u);
      }
    }
    w4a16::Book const book = book_of(storage, thread);

    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kValues; ++v) accumulator(v) = partial(v) = 0.0f;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < k_count; ++i) {
      int const stage = ring.index;
      FullBarrier::wait(&storage.full[stage], ring.phase);
      uint4 codes[kChunks];
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kChunks; ++c) codes[c] = load_codes(storage, stage, 0, c, consumer, thread);
      auto const dequantize = [&](int piece) {
        uint32_t zero[2];
        if constexpr (kZeroPoints) {
          load_zeros(storage, stage, (piece * kPiece) >> params.group_shift, row, zero);
        } else {
          zero[0] = symmetric[0];
          zero[1] = symmetric[1];
        }
        CUTLASS_PRAGMA_UNROLL
        for (int slab = 0; slab < kSlabs; ++slab) {
          uint32_t words[Codes::kWords], a[4];
          words_of(codes, piece * kSlabs + slab, words);
          Codes::fragment(words, zero, book, a);
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 4; ++r) {
            registers(r + 4 * slab + 4 * kSlabs * (piece % 2)) = a[r];
            warpgroup_fence_operand(registers(r + 4 * slab + 4 * kSlabs * (piece % 2)));
          }
        }
      };
      dequantize(0);
      CUTLASS_PRAGMA_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        warpgroup_fence_operand(partial);
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int slab = 0; slab < kSlabs; ++slab) {
          mma.accumulate_ = slab == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
          cute::gemm(mma, tCrA(_, slab, piece % 2), tCrB(_, _0{}, piece * kSlabs + slab, stage), partial(_, _0{}, _0{}));
        }
        warpgroup_commit_batch();
        if (piece + 1 < kPieces) dequantize(piece + 1);
        int const group = (piece * kPiece) >> params.group_shift;
        float const scale[2] = {Scale::to_float(storage.scales[stage][group][row]), Scale::to_float(storage.scales[stage][group][row + 8])};
        warpgroup_wait<0>();
        warpgroup_fence_operand(partial);
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kValues; ++v) accumulator(v) = fmaf(scale[v / 2 % 2], partial(v), accumulator(v));
      }
      release(storage, stage, thread);
      ring.advance();
    }
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kValues; ++v) accumulator(v) *= Codes::inverse_float(v / 2 % 2);
  }

  /// Few tokens, by mma.sync: fewer instructions than the WGMMA loop and no waiting for its batches (8192 x 8192 at m = 1: 11.8 us, 12.6 by WGMMA).
  /// The accumulators are the WGMMA's.
  template <bool kZeroPoints, class Accumulator>
  static CUTLASS_DEVICE void mainloop_sync(Params const& params, SharedStorage& storage, Ring& ring, Accumulator& accumulator, int k_count,
                                           int consumer, int thread) {
    using H = Half2<Config::kType>;
    constexpr bool kOnFragments = kScaling == Scaling::kFragments || kScaling == Scaling::kFine;
    constexpr int kSlabs = kTileK / 16, kEights = kTileN / 8;                       // of k and of tokens
    constexpr int kPiece = kOnFragments ? kSlabs : cute::min(kGroup, kTileK) / 16;  // slabs between scalings of the accumulators
    constexpr int kChains = kPiece > 2 ? 2 : 1;                                     // sums that take turns
    int const lane = thread % 32, row = consumer * 64 + thread / 32 * 16 + lane / 4;
    // ldmatrix: lane l gives the address of unit l / 8 (8 of k) of token l % 8; units lie at u ^ token % 8 of 128 bytes.
    uint32_t const tokens = cute::cast_smem_ptr_to_uint(&storage.activations[0][0]) + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
    w4a16::Book const book = book_of(storage, thread);
    uint32_t zero[2] = {0, 0}, scale[2];
    if constexpr (kHasZeros && !kZeroPoints) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2; ++r) zero[r] = H::mul(Codes::kSymmetricZero, Codes::factor(r) ^ 0x80008000u);
    }
    float sum[kChains][kEights][4];
    auto const clear = [&] {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kChains * kValues; ++i) sum[i / kValues][i % kValues / 4][i % 4] = 0.0f;
    };
    auto const total = [&](int v) { return kChains == 2 ? sum[0][v / 4][v % 4] + sum[kChains - 1][v / 4][v % 4] : sum[0][v / 4][v % 4]; };

    clear();
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kValues; ++v) accumulator(v) = 0.0f;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < k_count; ++i) {
      int const stage = ring.index;
      FullBarrier::wait(&storage.full[stage], ring.phase);
      uint4 codes[kChunks];
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kChunks; ++c) codes[c] = load_codes(storage, stage, 0, c, consumer, thread);
      uint32_t b[kSlabs / 2][kEights][4];
      CUTLASS_PRAGMA_UNROLL
      for (int u = 0; u < kSlabs / 2 * kEights; ++u) {
        int const pair = u / kEights, eight = u % kEights;  // [64 of k][tokens][unit]
        uint32_t const at = tokens + stage * (kTileN * kTileK * 2) + pair / 2 * (kTileN * 128) + eight * 1024;
        load_matrices(at ^ pair % 2 * 64, b[pair][eight]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        int const group = kFine ? (slab * 16) >> params.group_shift : 0;
        typename Scale::Stored const* scales = &storage.scales[stage][group][row];
        if (slab % (kGroup / 16) == 0) {
          if constexpr (kZeroPoints) load_zeros(storage, stage, group, row, zero);
          if constexpr (kOnFragments) scales_of_rows(scales, scale);
        }
        if (!kOnFragments && slab % kPiece == 0) clear();
        uint32_t words[Codes::kWords], a[4];
        words_of(codes, slab, words);
        Codes::fragment(words, zero, book, a);
        if constexpr (kOnFragments) {
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < 4; ++r) a[r] = H::mul(a[r], scale[r % 2]);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < kEights; ++e) {
          multiply_16x8x16<Config::kType>(sum[slab % kChains][e], a, b[slab / 2][e][slab % 2 * 2], b[slab / 2][e][slab % 2 * 2 + 1]);
        }
        if (!kOnFragments && slab % kPiece == kPiece - 1) {
          float const factor[2] = {Scale::to_float(scales[0]), Scale::to_float(scales[8])};
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < kValues; ++v) accumulator(v) = fmaf(factor[v / 2 % 2], total(v), accumulator(v));
        }
      }
      // Not before the sums are there, and with them all that was read. Released as soon as the last ldmatrix was issued, stages were overwritten
      // under it: 2 of 24 test cases with tails in m, n and k were wrong, and none since. No sum has these bits: NaNs of arithmetic have others.
      constexpr uint32_t kNever = 0x7fedcba9u;
      float const low = kOnFragments ? total(0) : accumulator(0), high = kOnFragments ? total(kValues - 1) : accumulator(kValues - 1);
      release(storage, stage, thread, __float_as_uint(low) != kNever && __float_as_uint(high) != kNever);
      ring.advance();
    }
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kValues; ++v) accumulator(v) = kOnFragments ? total(v) : accumulator(v) * Codes::inverse_float(v / 2 % 2);
  }

  // ---- pieces of a tile in one cluster --------------------------------------------------------------------------------------------

  // Straight into the owner's shared memory, whose barrier counts the bytes: 0.2 us, where the way through L2 takes 1 to 2.
  template <class Accumulator>
  static CUTLASS_DEVICE void send_piece(SharedStorage& storage, Accumulator const& accumulator, int piece, int owner, int consumer,
                                        int thread) {
    uint32_t const barrier = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&storage.pieces.full[consumer]), owner);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues / 4; ++i) {
      uint32_t const at = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&storage.pieces.of[piece][consumer][i][thread]), owner);
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
                   "f"(accumulator(4 * i)), "f"(accumulator(4 * i + 1)), "f"(accumulator(4 * i + 2)), "f"(accumulator(4 * i + 3)),
                   "r"(barrier)
                   : "memory");
    }
  }
  template <class Accumulator>
  static CUTLASS_DEVICE void add_pieces(SharedStorage& storage, Accumulator& accumulator, int pieces, int consumer, int thread) {
    FullBarrier::wait(&storage.pieces.full[consumer], 0);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int piece = 0; piece < pieces; ++piece) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues / 4; ++i) {
        float4 const part = storage.pieces.of[piece][consumer][i][thread];
        accumulator(4 * i) += part.x;
        accumulator(4 * i + 1) += part.y;
        accumulator(4 * i + 2) += part.z;
        accumulator(4 * i + 3) += part.w;
      }
    }
  }

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int rank, int consumer, int thread) {
    using namespace cute;
    Epilogue epilogue(params.epilogue, storage.epilogue, storage.epilogue_small, consumer, thread);
    Ring ring;
    gemm::TileScheduler scheduler(params.schedule, int(blockIdx.x) / kCluster);
    gemm::WorkItem item = scheduler.next();
    if constexpr (kHasZeros && !kSync) {
      if (!params.has_zeros) {
        fill_zeros(storage, consumer, thread);
        epilogue.synchronize();
      }
    }
    if constexpr (kHasBook) {
      fill_book<Config::kType, kFormat>(storage.book.bytes, consumer * 128 + thread, kConsumers * 128);
      asm volatile("bar.sync %0, %1;" ::"n"(kConsumers + 1), "n"(kConsumers * 128) : "memory");  // the epilogues have 1 to kConsumers
    }
    wait_for_predecessor();  // C, bias, D and the workspace are read and written from here
    for (; item.valid; item = scheduler.next()) {
      gemm::TileCoord const tile = gemm::TileScheduler::coordinate(params.schedule, item.tile);
      int const row = (tile.m * kCluster + rank) * kTileM, column = tile.n * kTileN;
      if (item.owner()) epilogue.prefetch(row, column, 0, consumer);

      Tensor accumulator = partition_fragment_C(TiledMma{}, Shape<Int<64 * kMmaM>, Int<kTileN>>{});  // (MMA,MMA_M,MMA_N)
      static_assert(decltype(size(accumulator))::value == kValues);
      if constexpr (kSync) {
        if (kHasZeros && params.has_zeros) {
          mainloop_sync<kHasZeros>(params, storage, ring, accumulator, item.k_count, consumer, thread);
        } else {
          mainloop_sync<false>(params, storage, ring, accumulator, item.k_count, consumer, thread);
        }
      } else if constexpr (kScaling == Scaling::kFineAccumulators) {
        if (kHasZeros && params.has_zeros) {
          mainloop_fine_accumulators<kHasZeros>(params, storage, ring, accumulator, item.k_count, consumer, thread);
        } else {
          mainloop_fine_accumulators<false>(params, storage, ring, accumulator, item.k_count, consumer, thread);
        }
      } else if constexpr (kScaling == Scaling::kAccumulators) {
        mainloop_accumulators(params, storage, ring, accumulator, item.k_count, consumer, thread);
      } else {
        mainloop_fragments(params, storage, ring, accumulator, item.k_count, consumer, thread);
      }

      if constexpr (kMaxPieces > 0) {
        if (params.cluster_pieces > 0) {  // the CTA's only tile
          if (!item.owner()) {
            send_piece(storage, accumulator, int(cute::block_rank_in_cluster()), params.cluster_pieces, consumer, thread);
            break;
          }
          add_pieces(storage, accumulator, params.cluster_pieces, consumer, thread);
          epilogue.store(accumulator, row, column, 0, consumer);
          break;
        }
      }
      auto const place = [&](int slot) { return (slot * kCluster + rank) * kConsumers + consumer; };
      auto const barrier = [&] { epilogue.synchronize(); };
      if (!item.owner()) {
        if constexpr (kTagged) {
          Reduction::publish(params.split, place(item.slot), accumulator, thread);
        } else {
          Reduction::publish(params.split, place(item.slot), accumulator, thread, barrier);
        }
        continue;
      }
      if constexpr (kTagged) {
        auto const slot_of = [&](int i) { return place(item.first_piece + i); };
        if (item.pieces > 0) Reduction::gather(params.split, slot_of, item.pieces, accumulator, thread);
      } else {
        for (int piece = 0; piece < item.pieces; ++piece) {
          Reduction::add(params.split, place(item.first_piece + piece), accumulator, thread, barrier);
        }
      }
      epilogue.store(accumulator, row, column, 0, consumer);
    }
    if (thread == 0) cute::tma_store_wait<0>();  // shared memory must outlive the reads of the last stores
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    w4a16_sm90_kernel(__grid_constant__ typename W4A16Sm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  W4A16Sm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_w4a16_sm90(gemm::GemmLaunchArguments const& arguments) {
  using Kernel = W4A16Sm90<Config>;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  if (Status status = gemm::describe_schedule<Config>(arguments, &params.schedule, &params.split); !status.ok()) return status;
  int64_t const blocks_n = gemm::ceil_div(problem.n, kBlockN), blocks_k = gemm::ceil_div(problem.k, kBlockK);
  params.cluster_pieces = cluster_pieces(Config::kFormat, Config::kTileN, Config::kCtasPerSm, params.schedule, *arguments.device);
  params.group_shift = group_shift(problem.group_size, problem.k);
  params.has_zeros = Kernel::kHasZeros && operands.b_zeros != nullptr;
  params.hint_weights =
      uint64_t(params.schedule.tiles_n == 1 ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);

  int64_t const chunks_k = blocks_k * (4 / Kernel::kChunkSlabs);
  int64_t const weight_extents[3] = {kChunkBytes / 8, chunks_k, blocks_n}, weight_strides[2] = {kChunkBytes, chunks_k * kChunkBytes};
  int const weight_box[3] = {kChunkBytes / 8, Kernel::kChunks, Config::kTileM / 64};
  Status status =
      encode_tensor_map(&params.weights, CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, operands.b, weight_extents, weight_strides, weight_box);
  if (!status.ok()) return status;
  status = encode_tensor_map_16bit(&params.activations, operands.a, problem.k, problem.m, 1, operands.lda, 0, kBlockK,
                                   Config::kTileN / Kernel::kCluster);
  if (!status.ok()) return status;
  int const group_rows = std::max(1, Config::kTileK >> params.group_shift);
  int64_t const groups = params.group_shift >= 30 ? 1 : gemm::ceil_div(problem.k, problem.group_size);
  int64_t const scale_extents[3] = {problem.n, groups, 1};
  int const scale_box[3] = {Config::kTileM, group_rows, 1};
  constexpr int kScaleBytes = scale_bytes_of(Config::kFormat);
  constexpr auto kScaleType = kScaleBytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  int64_t const scale_strides[2] = {operands.ld_scales * kScaleBytes, operands.ld_scales * kScaleBytes * groups};
  status = encode_tensor_map(&params.scales, kScaleType, 3, operands.b_scales, scale_extents, scale_strides, scale_box);
  if (!status.ok()) return status;
  if (params.has_zeros) {
    int64_t const zero_strides[2] = {operands.ld_zeros * 2, operands.ld_zeros * 2 * groups};
    status = encode_tensor_map(&params.zeros, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, operands.b_zeros, scale_extents, zero_strides, scale_box);
    if (!status.ok()) return status;
  }
  params.stage_bytes = Config::kTileM * Config::kTileK * bits_of(Config::kFormat) / 8 + Config::kTileN * Config::kTileK * 2 +
                       Config::kTileM * group_rows * (kScaleBytes + (params.has_zeros ? 2 : 0));
  status = gemm::describe_epilogue<typename Kernel::Epilogue>(problem, operands, &params.epilogue);
  if (!status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  dim3 const cluster(params.cluster_pieces > 0 ? params.cluster_pieces + 1 : Config::kClusterM);
  return gemm::launch_sm90<Config>(&w4a16_sm90_kernel<Config>, params, arguments, params.schedule.workers, Kernel::kSmemBytes,
                                   shared_memory_allowed, cluster);
}

}  // namespace minfer::w4a16
