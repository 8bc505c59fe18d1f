// Dense GEMM for sm_80 onward: cp.async + mma.sync. The only path on A100, Ada and consumer Blackwell; on Hopper it serves operands that
// TMA cannot address.
//
// All warps load and compute: a ring of kStages shared-memory stages filled by cp.async (16 bytes a copy; element by element when
// kUnaligned), ldmatrix into registers, mma.sync m16n8k16 with fp32 accumulators. The mainloop is CUTLASS's CollectiveMma
// (MainloopSm80CpAsync).
// Tile walk: the same persistent TileScheduler as on sm_90, so data-parallel, split-K and stream-K, with the ordered fix-up.
// Epilogue: accumulators through shared memory in fp32, finished by the general, coalesced loop (epilogue.cuh).
// Shared memory: max(ring, kTileM x (kTileN + 8) fp32), under 99 KiB so that it also fits Ada and consumer Blackwell.
// Limits: aligned kernels need 16-byte aligned operands whose contiguous extents are multiples of 8; kUnaligned ones need nothing.
#pragma once

#include "common/cutlass_element.cuh"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_mma.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/numeric_types.h"
#include "gemm/epilogue.cuh"
#include "gemm/launch_sm80.cuh"

namespace minfer::gemm {

/// How one operand travels: kExtent rows of m or n, kTileK of k, contiguous along k or along the rows.
template <class Element, Major kMajor, int kExtent, int kTileK, int kThreads, bool kUnaligned>
struct OperandSm80 {
  static_assert(kTileK == 32 || kTileK == 64);
  using VectorCopy = cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<cute::uint128_t>, Element>;
  using ScalarCopy = cute::Copy_Atom<cute::UniversalCopy<Element>, Element>;
  using Copy = cute::conditional_t<kUnaligned, ScalarCopy, VectorCopy>;
  static constexpr int kVector = kUnaligned ? 1 : 8;

  static constexpr auto gmem_copy() {
    using namespace cute;
    if constexpr (kMajor == Major::kK) {
      constexpr int kAlongK = kTileK / kVector;
      return make_tiled_copy(Copy{}, Layout<Shape<Int<kThreads / kAlongK>, Int<kAlongK>>, Stride<Int<kAlongK>, _1>>{},
                             Layout<Shape<_1, Int<kVector>>>{});
    } else {
      constexpr int kAlongRows = (kExtent / kVector < kThreads ? kExtent / kVector : kThreads);
      constexpr int kRows = kAlongRows < 16 || kUnaligned ? kAlongRows : 16;
      return make_tiled_copy(Copy{}, Layout<Shape<Int<kRows>, Int<kThreads / kRows>>, Stride<_1, Int<kRows>>>{},
                             Layout<Shape<Int<kVector>, _1>>{});
    }
  }
  using GmemCopy = decltype(gmem_copy());
  // Rows of 128 bytes (k-major: kTileK * 2 bytes), whose vectors are swizzled so that neither the copies nor ldmatrix have bank conflicts.
  using SmemAtom = cute::conditional_t<
      kMajor == Major::kK,
      cute::conditional_t<kTileK == 64,
                          decltype(cute::composition(cute::Swizzle<3, 3, 3>{},
                                                     cute::Layout<cute::Shape<cute::_8, cute::_64>, cute::Stride<cute::_64, cute::_1>>{})),
                          decltype(cute::composition(cute::Swizzle<2, 3, 3>{},
                                                     cute::Layout<cute::Shape<cute::_8, cute::_32>, cute::Stride<cute::_32, cute::_1>>{}))>,
      decltype(cute::composition(cute::Swizzle<3, 3, 3>{},
                                 cute::Layout<cute::Shape<cute::_64, cute::_8>, cute::Stride<cute::_1, cute::_64>>{}))>;
  using SmemCopy = cute::conditional_t<kMajor == Major::kK, cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>,
                                       cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>>;
  using GmemStride =
      cute::conditional_t<kMajor == Major::kK, cute::Stride<int64_t, cute::_1, int64_t>, cute::Stride<cute::_1, int64_t, int64_t>>;

  static __host__ __device__ GmemStride stride(int64_t leading, int64_t batch) {
    if constexpr (kMajor == Major::kK) {
      return cute::make_stride(leading, cute::_1{}, batch);
    } else {
      return cute::make_stride(cute::_1{}, leading, batch);
    }
  }
};

template <class Config>
struct GemmSm80 {
  using Element = CutlassElement<Config::kType>;
  static constexpr int kThreads = Config::kThreads;
  static_assert(kThreads == 32 * Config::kWarpsM * Config::kWarpsN && !Config::kSwap);
  using TileShape = cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>;
  static_assert(size_of(Config::kType) == 2, "the instructions below are those of 16-bit operands");
  using MmaAtom =
      cute::conditional_t<Config::kType == DataType::kF16, cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  using TiledMma =
      cute::TiledMMA<cute::MMA_Atom<MmaAtom>, cute::Layout<cute::Shape<cute::Int<Config::kWarpsM>, cute::Int<Config::kWarpsN>, cute::_1>>,
                     cute::Tile<cute::Int<16 * Config::kWarpsM>, cute::Int<16 * Config::kWarpsN>, cute::_16>>;
  using OperandA = OperandSm80<Element, Config::kMajorA, Config::kTileM, Config::kTileK, kThreads, Config::kUnaligned>;
  using OperandB = OperandSm80<Element, Config::kMajorB, Config::kTileN, Config::kTileK, kThreads, Config::kUnaligned>;
  using Mainloop = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm80CpAsync<Config::kStages>, TileShape, Element, typename OperandA::GmemStride, Element,
      typename OperandB::GmemStride, TiledMma, typename OperandA::GmemCopy, typename OperandA::SmemAtom, typename OperandA::SmemCopy,
      cute::identity, typename OperandB::GmemCopy, typename OperandB::SmemAtom, typename OperandB::SmemCopy, cute::identity>;
  static constexpr int kValues = Config::kTileM * Config::kTileN / kThreads;
  using Reduction = SplitReduction<kThreads, kValues>;

  struct Params {
    Element const* a;
    Element const* b;
    int64_t lda, a_batch_stride, ldb, b_batch_stride;
    int32_t m, n, k, batch;
    EpilogueParams epilogue;
    TileSchedulerParams schedule;
    SplitWorkspace split;
  };

  static constexpr int kRingBytes = int(sizeof(typename Mainloop::SharedStorage));
  static constexpr int kStagingRow = Config::kTileN + 8;
  static constexpr int kStagingBytes = Config::kTileM * kStagingRow * 4;
  static constexpr int kSmemBytes = kRingBytes > kStagingBytes ? kRingBytes : kStagingBytes;
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    using namespace cute;
    int const thread = int(threadIdx.x);
    Tensor mA = make_tensor(make_gmem_ptr(params.a), make_shape(params.m, params.k, params.batch),
                            OperandA::stride(params.lda, params.a_batch_stride));  // (m,k,l)
    Tensor mB = make_tensor(make_gmem_ptr(params.b), make_shape(params.n, params.k, params.batch),
                            OperandB::stride(params.ldb, params.b_batch_stride));         // (n,k,l)
    Tensor gA_mkl = local_tile(mA, TileShape{}, make_coord(_, _, _), Step<_1, X, _1>{});  // (BLK_M,BLK_K,m,k,l)
    Tensor gB_nkl = local_tile(mB, TileShape{}, make_coord(_, _, _), Step<X, _1, _1>{});  // (BLK_N,BLK_K,n,k,l)
    TiledMma tiled_mma;
    Tensor coordinates = tiled_mma.get_slice(thread).partition_C(make_identity_tensor(take<0, 2>(TileShape{})));  // (MMA,MMA_M,MMA_N)

    // CUTLASS shifts the operands so that the first k tile is the partial one: k_residue = k - k_tiles * kTileK <= 0.
    int const k_residue = params.k - params.schedule.k_tiles * Config::kTileK;
    TileScheduler scheduler(params.schedule, int(blockIdx.x));
    for (WorkItem item = scheduler.next(); item.valid; item = scheduler.next()) {
      TileCoord const tile = TileScheduler::coordinate(params.schedule, item.tile);
      int const row = tile.m * Config::kTileM, column = tile.n * Config::kTileN;
      Tensor gA = gA_mkl(_, _, tile.m, _, tile.l);                                    // (BLK_M,BLK_K,k)
      Tensor gB = gB_nkl(_, _, tile.n, _, tile.l);                                    // (BLK_N,BLK_K,k)
      Tensor accumulator = partition_fragment_C(tiled_mma, take<0, 2>(TileShape{}));  // (MMA,MMA_M,MMA_N)
      static_assert(decltype(size(accumulator))::value == kValues);
      clear(accumulator);
      // A split that begins later has no partial k tile: it gets the shift without the predicate.
      bool const head = item.k_begin == 0;
      int const shift = head ? 0 : k_residue;
      auto residue = make_tuple(params.m - row, params.n - column, head ? k_residue : 0);
      auto k_iterator = make_coord_iterator(item.k_begin, params.schedule.k_tiles);
      if (item.k_count > 0) {
        Mainloop{}(accumulator, domain_offset(make_coord(0, shift, 0), gA), domain_offset(make_coord(0, shift, 0), gB), accumulator,
                   k_iterator, item.k_count, residue, thread, smem);
      }
      auto const barrier = [] { __syncthreads(); };
      if (!item.owner()) {
        Reduction::publish(params.split, item.slot, accumulator, thread, barrier);
        continue;
      }
      for (int i = 0; i < item.partials; ++i) Reduction::add(params.split, item.first_partial + i, accumulator, thread, barrier);

      // [kTileM][kTileN + 8] fp32: eight columns of padding keep the fragment's eight rows in different banks, and addresses affine
      float* staged = reinterpret_cast<float*>(smem);
      auto at = [&](int r, int c) -> float& { return staged[r * kStagingRow + c]; };
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) at(get<0>(coordinates(i)), get<1>(coordinates(i))) = accumulator(i);
      __syncthreads();
      store_rectangle<Config::kType>(params.epilogue, row, column, tile.l, Config::kTileM, Config::kTileN, thread, kThreads,
                                     [&](int r, int c) { return at(r, c); });
      __syncthreads();
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kThreads <= 128 ? 2 : 1)
    gemm_sm80_kernel(__grid_constant__ typename GemmSm80<Config>::Params const params) {
  extern __shared__ __align__(128) char smem_sm80[];
  GemmSm80<Config>::run(params, smem_sm80);
}

template <class Config>
Status launch_gemm_sm80(GemmLaunchArguments const& arguments) {
  using Kernel = GemmSm80<Config>;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;
  typename Kernel::Params params{};
  params.a = static_cast<typename Kernel::Element const*>(operands.a);
  params.b = static_cast<typename Kernel::Element const*>(operands.b);
  params.lda = operands.lda;
  params.ldb = operands.ldb;
  params.a_batch_stride = operands.a_batch_stride;
  params.b_batch_stride = operands.b_batch_stride;
  params.m = int32_t(problem.m);
  params.n = int32_t(problem.n);
  params.k = int32_t(problem.k);
  params.batch = int32_t(problem.batch);
  params.epilogue = make_epilogue(problem, operands);

  if (Status status = describe_schedule<Config>(arguments, &params.schedule, &params.split); !status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_sm80(&gemm_sm80_kernel<Config>, params, arguments, params.schedule.workers, Kernel::kThreads, Kernel::kSmemBytes,
                     shared_memory_allowed);
}

}  // namespace minfer::gemm
