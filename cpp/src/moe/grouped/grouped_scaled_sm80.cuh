// Grouped GEMM of 8-bit operands for sm_80 onward: cp.async + mma.sync, e4m3 or int8, with scales. The path on A100, Ada and consumer
// Blackwell.
//
// Composition (gemm/kernel_sm80.cuh has the walk): the CollectiveMma specialisation of mainloop_scaled_sm80.cuh, and, since accumulators
// and tiles are those of the sm_90 kernels, their epilogue and their tile scheduler.
// Tile walk: expert_tiles.cuh, persistent.
// Shared memory: ring with scales | staged output | tiles | scales of a tile's rows; under 99 KiB.
// Limits: operands 16-byte aligned in base and strides.
#pragma once

#include "common/cutlass_element.cuh"
#include "gemm/kernel_sm80.cuh"
#include "moe/grouped/expert_tiles_sm80.cuh"
#include "moe/grouped/grouped_collective_epilogue.cuh"
#include "moe/grouped/grouped_scaled_launch.cuh"
#include "moe/grouped/mainloop_scaled_sm80.cuh"

namespace minfer::moe {

template <class Config, class Element = CutlassElement<Config::kType>>
using ScaledMainloopSm80 = cutlass::gemm::collective::CollectiveMma<
    MainloopSm80CpAsyncScaledExperts<Config>, cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>,
    Element, cute::Stride<int64_t, cute::_1, int64_t>, Element, cute::Stride<int64_t, cute::_1, int64_t>, void,
    cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>, void, void, cute::identity, cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>, void,
    void, cute::identity>;

template <class Config, class Mainloop = ScaledMainloopSm80<Config>>
struct GroupedScaledSm80
    : gemm::GemmKernelSm80<Mainloop,
                           GroupedCollectiveEpilogue<AnyFloat16, Config::kTileM, Config::kTileM, Config::kTileN, 1, SumFactor::kScales,
                                                     Config::kStagedTokens>,
                           ExpertTileSchedulerSm80<ExpertTiles<Config::kTileN, Mainloop::kStep, panel_of(Config::kTileM, Config::kTileN)>,
                                                   Config::kThreads>> {
  static_assert(GroupedScaledSm80::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    grouped_scaled_sm80_kernel(__grid_constant__ typename GroupedScaledSm80<Config>::Params const params) {
  extern __shared__ __align__(1024) char smem_grouped_scaled_sm80[];
  GroupedScaledSm80<Config>::run(params, smem_grouped_scaled_sm80);
}

template <class Config>
Status launch_grouped_scaled_sm80(GroupedLaunchArguments const& arguments) {
  using Kernel = GroupedScaledSm80<Config>;
  GroupedProblem const& problem = *arguments.problem;
  GroupedOperands const& operands = *arguments.operands;
  typename Kernel::Params params{};
  auto& mainloop = params.mainloop;
  if (Status status = describe_scales(arguments, problem, operands, &mainloop.scales); !status.ok()) return status;
  params.epilogue = describe_scaled_epilogue(arguments, problem, operands);
  mainloop.a = static_cast<uint8_t const*>(operands.a);
  mainloop.b = static_cast<uint8_t const*>(operands.b);
  mainloop.gather = operands.gather;
  mainloop.lda = operands.lda;
  mainloop.ldb = operands.ldb;
  mainloop.b_expert_stride = operands.b_expert_stride;
  mainloop.a_rows = int32_t(operands.a_rows);
  mainloop.k = int32_t(problem.k);
  mainloop.adds = adds_scaled(problem, operands);
  mainloop.gated = params.epilogue.gated;
  mainloop.gate_blocks = params.epilogue.gate_blocks;
  mainloop.n = params.epilogue.n;
  mainloop.gate_row_stride = params.epilogue.gate_row_stride;
  mainloop.up_row_offset = params.epilogue.up_row_offset;
  int64_t const rows = problem.gated ? (problem.n / 2 + 7) / 8 * 16 : problem.n;
  params.scheduler.rows = describe_rows(problem, operands);
  params.scheduler.k_tiles = int32_t((problem.k + Config::kTileK - 1) / Config::kTileK);
  params.scheduler.weight_tiles = int32_t((rows + Config::kTileM - 1) / Config::kTileM);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_grouped(&grouped_scaled_sm80_kernel<Config>, params, arguments, Kernel::kThreads, Config::kCtasPerSm, Kernel::kSmemBytes,
                        shared_memory_allowed);
}

}  // namespace minfer::moe
