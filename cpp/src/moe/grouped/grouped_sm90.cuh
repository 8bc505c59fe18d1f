// Grouped GEMM for sm_90a: d[rows of expert e] = epilogue(a[rows of e] . b[e]), 16-bit weights; persistent, warp specialised, WGMMA.
//
// Composition (gemm/kernel_sm90.cuh has the warp roles and walks): the CollectiveMma specialisation of mainloop_sm90.cuh,
// GroupedCollectiveEpilogue, ExpertTileScheduler. Consumers are two in pingpong; two that share a tile's rows; or one alone, with a second
// such CTA on the SM, so that the two hide each other's starts and ends.
// Tile walk: expert_tiles.cuh. Every CTA works it out from the offsets in device memory: nothing is known, or synchronised, on the host.
// Shared memory: ring | staged tokens of d | barriers, table of the experts' tiles, rows that are gathered.
// Limits: k and n multiples of 8, operands 16-byte aligned, kMaxGroupedExperts experts.
#pragma once

#include "common/cutlass_element.cuh"
#include "gemm/kernel_sm90.cuh"
#include "moe/grouped/expert_tile_scheduler.cuh"
#include "moe/grouped/grouped_collective_epilogue.cuh"
#include "moe/grouped/grouped_launch.cuh"
#include "moe/grouped/mainloop_sm90.cuh"

namespace minfer::moe {

template <class Config, class Element = CutlassElement<Config::kType>>
using CollectiveMainloopSm90 = cutlass::gemm::collective::CollectiveMma<
    MainloopSm90TmaGmmaExperts<Config>, cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>,
    Element, cute::Stride<int64_t, cute::_1, int64_t>, Element, cute::Stride<int64_t, cute::_1, int64_t>, void, cute::SM90_TMA_LOAD, void,
    void, cute::identity, cute::SM90_TMA_LOAD, void, void, cute::identity>;

template <class Config, class Mainloop = CollectiveMainloopSm90<Config>>
struct GroupedSm90
    : gemm::GemmKernelSm90<
          Mainloop,
          GroupedCollectiveEpilogue<Float16<Config::kType>, Mainloop::kGroupM, Config::kTileM, Config::kTileN, Mainloop::kConsumers>,
          ExpertTileScheduler<ExpertTiles<Config::kTileN, Mainloop::kStep, panel_of(Config::kTileM, Config::kTileN)>, Config::kThreads>> {
  static_assert(GroupedSm90::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    grouped_sm90_kernel(__grid_constant__ typename GroupedSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  GroupedSm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_grouped_sm90(GroupedLaunchArguments const& arguments) {
  using Kernel = GroupedSm90<Config>;
  GroupedProblem const& problem = *arguments.problem;
  GroupedOperands const& operands = *arguments.operands;
  typename Kernel::Params params{};
  Status status = describe_weights(problem, operands, Config::kTileM, &params.mainloop.weights);
  if (status.ok()) status = describe_tokens<typename Kernel::Mainloop>(arguments, &params);
  if (!status.ok()) return status;
  params.mainloop.gated = problem.gated;
  params.epilogue = describe_epilogue(problem, operands);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_grouped(&grouped_sm90_kernel<Config>, params, arguments, Config::kThreads, Config::kCtasPerSm, Kernel::kSmemBytes,
                        shared_memory_allowed);
}

}  // namespace minfer::moe
