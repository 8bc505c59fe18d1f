// GEMM with 4-bit weights for sm_80 onward: cp.async + ldmatrix + mma.sync, the weights dequantised in registers. The only path on A100,
// Ada and consumer Blackwell.
//
// The weights' rows (the caller's n) are the MMA's m, the tokens (the caller's m) its n, so that a few tokens are one narrow instruction.
// Composition (gemm/kernel_sm80.cuh has the walk): the dequantising CollectiveMma (mainloop_sm80.cuh), EpilogueSm80 in the one stage that
// is free, SplitTileSchedulerSm80.
// Tile walk: data-parallel, split-K or stream-K at run time; partials are added in the workspace (gemm/split_reduction.cuh).
// Shared memory: the ring. Up to 49 KiB two CTAs of one warpgroup fit an SM of Ada or consumer Blackwell.
// Limits: activations, scales and zeros 16-byte aligned in base and rows; n and k multiples of 8; groups of 32 times a power of two, or all
// of k. Scales times 512 (fp16) must be finite.
#pragma once

#include "gemm/epilogue_sm80.cuh"
#include "gemm/kernel_sm80.cuh"
#include "gemm/launch_sm80.cuh"
#include "gemm/tiles_sm80.cuh"
#include "quantized_gemm/mainloop_sm80.cuh"

namespace minfer::w4a16 {

template <class Config, class Stage = StageSm80<Config>>
using CollectiveMainloopSm80 = cutlass::gemm::collective::CollectiveMma<
    MainloopSm80CpAsyncDequantize<Config>, cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>,
    typename Stage::Codes, cute::Stride<int64_t, cute::_1, int64_t>, typename Stage::Element, cute::Stride<int64_t, cute::_1, int64_t>,
    typename Stage::TiledMma, cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>, void, void, cute::identity,
    cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>, void, void, cute::identity>;

template <class Config, class Stage = StageSm80<Config>>
struct W4A16Sm80
    : gemm::GemmKernelSm80<CollectiveMainloopSm80<Config>, gemm::EpilogueSm80<Config, typename Stage::TiledMma, int(sizeof(Stage))>,
                           gemm::SplitTileSchedulerSm80<Config::kThreads, Stage::kValues>> {
  static_assert(W4A16Sm80::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kThreads <= 128 ? 2 : 1)
    w4a16_sm80_kernel(__grid_constant__ typename W4A16Sm80<Config>::Params const params) {
  extern __shared__ __align__(128) char smem_sm80[];
  W4A16Sm80<Config>::run(params, smem_sm80);
}

template <class Config>
Status launch_w4a16_sm80(gemm::GemmLaunchArguments const& arguments) {
  using Kernel = W4A16Sm80<Config>;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  auto& schedule = params.scheduler.schedule;
  if (Status status = gemm::describe_schedule<Config>(arguments, &schedule, &params.scheduler.split); !status.ok()) return status;
  auto& mainloop = params.mainloop;
  mainloop.weights = static_cast<uint4 const*>(operands.b);
  mainloop.activations = static_cast<uint16_t const*>(operands.a);
  mainloop.scales = static_cast<uint16_t const*>(operands.b_scales);
  mainloop.zeros = static_cast<uint16_t const*>(operands.b_zeros);
  mainloop.lda = operands.lda;
  mainloop.ld_scales = operands.ld_scales;
  mainloop.ld_zeros = operands.ld_zeros;
  mainloop.m = int32_t(problem.m);
  mainloop.n = int32_t(problem.n);
  mainloop.k = int32_t(problem.k);
  mainloop.blocks_n = int32_t(gemm::ceil_div(problem.n, kBlockN));
  mainloop.blocks_k = int32_t(gemm::ceil_div(problem.k, kBlockK));
  mainloop.groups = problem.group_size == 0 ? 1 : int32_t(gemm::ceil_div(problem.k, problem.group_size));
  mainloop.group_shift = mainloop.groups <= 1 ? 31 : group_shift(problem.group_size, problem.k);
  params.epilogue = gemm::make_epilogue(problem, operands);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return gemm::launch_sm80(&w4a16_sm80_kernel<Config>, params, arguments, schedule.workers, Kernel::kThreads, Kernel::kSmemBytes,
                           shared_memory_allowed);
}

}  // namespace minfer::w4a16
