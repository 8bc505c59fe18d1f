// Mainloop for sm_80 onward: CUTLASS's CollectiveMma (MainloopSm80CpAsync), a ring of stages that cp.async fills, 16 bytes a copy, ldmatrix
// into registers, mma.sync: m16n8k16 of 16-bit floats with fp32 accumulators, m16n8k32 of int8 with int32 ones. Those are exact, and
// become fp32 at the end of a work item, or stay what they are where D is int32.
//
// The ring is filled anew for each work item, so between two of them its bytes are the epilogue's staging.
#pragma once

#include "common/cutlass_element.cuh"
#include "cute/tensor.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/sm80_mma_multistage.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/numeric_types.h"
#include "gemm/operand_sm80.cuh"

namespace minfer::gemm {

template <class Config>
struct MainloopSm80 {
  using Element = CutlassElement<Config::kType>;
  static constexpr int kThreads = Config::kThreads;
  static constexpr bool kCopiesAhead = false;
  static_assert(kThreads == 32 * Config::kWarpsM * Config::kWarpsN && !Config::kSwap);
  static constexpr bool kIntegers = Config::kType == DataType::kS8;
  static_assert(size_of(Config::kType) == 2 || kIntegers, "the instructions below are those of 16-bit floats and of int8");
  using TileShape = cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>;
  using MmaAtom = cute::conditional_t<
      kIntegers, cute::SM80_16x8x32_S32S8S8S32_TN,
      cute::conditional_t<Config::kType == DataType::kF16, cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>>;
  using TiledMma =
      cute::TiledMMA<cute::MMA_Atom<MmaAtom>, cute::Layout<cute::Shape<cute::Int<Config::kWarpsM>, cute::Int<Config::kWarpsN>, cute::_1>>,
                     cute::Tile<cute::Int<16 * Config::kWarpsM>, cute::Int<16 * Config::kWarpsN>, cute::Int<kIntegers ? 32 : 16>>>;
  using OperandA = OperandSm80<Element, Config::kMajorA, Config::kTileM, Config::kTileK, kThreads>;
  using OperandB = OperandSm80<Element, Config::kMajorB, Config::kTileN, Config::kTileK, kThreads>;
  using Collective = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm80CpAsync<Config::kStages>, TileShape, Element, typename OperandA::GmemStride, Element,
      typename OperandB::GmemStride, TiledMma, typename OperandA::GmemCopy, typename OperandA::SmemAtom, typename OperandA::SmemCopy,
      cute::identity, typename OperandB::GmemCopy, typename OperandB::SmemAtom, typename OperandB::SmemCopy, cute::identity>;
  static constexpr int kValues = Config::kTileM * Config::kTileN / kThreads;  // accumulators of a thread

  using Arguments = typename Collective::Arguments;
  struct FloatParams {
    cute::Shape<int, int, int, int> problem;  // (m, n, k, l)
    int32_t k_residue;                        // k minus that of whole k tiles: 0 or negative
    typename Collective::Params operands;
  };
  struct IntegerParams : FloatParams {
    bool integers;  // sums are stored as they are, not as fp32
  };
  using Params = cute::conditional_t<kIntegers, IntegerParams, FloatParams>;
  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    union {
      typename Collective::SharedStorage ring;
      typename Epilogue::TensorStorage staging;
    };
    [[no_unique_address]] typename Scheduler::SharedStorage scheduler;
    [[no_unique_address]] typename Epilogue::PipelineStorage epilogue;
  };

  static Params to_underlying_arguments(cute::Shape<int, int, int, int> const& problem, Arguments const& arguments) {
    int const last_k = cute::get<2>(problem) % Config::kTileK;
    Params params{};
    params.problem = problem;
    params.k_residue = last_k == 0 ? 0 : last_k - Config::kTileK;
    params.operands = Collective::to_underlying_arguments(problem, arguments, nullptr);
    return params;
  }

  /// The operands in tiles: (BLK_M,BLK_K,m,k,l) and (BLK_N,BLK_K,n,k,l).
  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE auto load_init(Params const& params, Storage&, WorkItems const&, int) {
    using namespace cute;
    auto const [m, n, k, l] = params.problem;
    Tensor mA = make_tensor(make_gmem_ptr(params.operands.ptr_A), make_shape(m, k, l), params.operands.dA);  // (m,k,l)
    Tensor mB = make_tensor(make_gmem_ptr(params.operands.ptr_B), make_shape(n, k, l), params.operands.dB);  // (n,k,l)
    return make_tuple(local_tile(mA, TileShape{}, make_coord(_, _, _), Step<_1, X, _1>{}),
                      local_tile(mB, TileShape{}, make_coord(_, _, _), Step<X, _1, _1>{}));
  }

  static CUTLASS_DEVICE auto make_accumulator() {
    auto sums = cute::partition_fragment_C(TiledMma{}, cute::take<0, 2>(TileShape{}));  // (MMA,MMA_M,MMA_N)
    static_assert(decltype(size(sums))::value == kValues);
    if constexpr (kIntegers) {
      auto accumulator = cute::make_fragment_like<float>(sums);
      cute::clear(accumulator);
      return accumulator;
    } else {
      cute::clear(sums);
      return sums;
    }
  }

  /// Returns when all threads have read the ring. CUTLASS shifts the operands along k so that the first k tile is the partial one. A split
  /// that does not begin with it has whole k tiles alone, which are shifted as well but need no predicate.
  template <class Storage, class Inputs, class Accumulator, class Tile>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, Inputs const& inputs, Accumulator& accumulator, int k_begin,
                                 int k_count, Tile const& tile, int thread) {
    using namespace cute;
    __syncthreads();  // all have read the staging of the previous item
    if (k_count == 0) return;
    auto const& [gA_mkl, gB_nkl] = inputs;
    Tensor gA = gA_mkl(_, _, tile.m, _, tile.l);  // (BLK_M,BLK_K,k)
    Tensor gB = gB_nkl(_, _, tile.n, _, tile.l);  // (BLK_N,BLK_K,k)
    bool const first = k_begin == 0;
    auto const shift = make_coord(0, first ? 0 : params.k_residue, 0);
    auto const residue = make_tuple(get<0>(params.problem) - tile.m * Config::kTileM, get<1>(params.problem) - tile.n * Config::kTileN,
                                    first ? params.k_residue : 0);
    if constexpr (kIntegers) {
      auto sums = partition_fragment_C(TiledMma{}, take<0, 2>(TileShape{}));
      clear(sums);
      Collective{}(sums, domain_offset(shift, gA), domain_offset(shift, gB), sums, make_coord_iterator(k_begin, size<2>(gA)), k_count,
                   residue, thread, reinterpret_cast<char*>(&storage.ring));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues; ++i) accumulator(i) = params.integers ? __int_as_float(sums(i)) : __int2float_rn(sums(i));
    } else {
      Collective{}(accumulator, domain_offset(shift, gA), domain_offset(shift, gB), accumulator, make_coord_iterator(k_begin, size<2>(gA)),
                   k_count, residue, thread, reinterpret_cast<char*>(&storage.ring));
    }
  }

  template <class Storage>
  static CUTLASS_DEVICE auto& staging(Storage& storage) {
    return storage.staging;
  }
};

}  // namespace minfer::gemm
