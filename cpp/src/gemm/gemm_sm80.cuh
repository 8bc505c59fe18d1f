// Dense GEMM for sm_80 onward, of 16-bit floats or of int8 with scales: cp.async + mma.sync. The path on A100, Ada and consumer Blackwell,
// beside that of unaligned operands (gemm_unaligned_sm80.cuh).
//
// Composition (kernel_sm80.cuh has the walk): MainloopSm80 (CUTLASS's CollectiveMma), EpilogueSm80, SplitTileSchedulerSm80.
// Tile walk: the persistent one of sm_90, so data-parallel, split-K and stream-K, with the ordered fix-up.
// Shared memory: the ring of stages, and in its place the epilogue's kTileM x (kTileN + 8) fp32; under 99 KiB so that it also fits Ada and
// consumer Blackwell.
// Limits: 16-byte aligned operands whose contiguous extents are whole vectors of 16 bytes.
#pragma once

#include "gemm/epilogue_sm80.cuh"
#include "gemm/kernel_sm80.cuh"
#include "gemm/launch_sm80.cuh"
#include "gemm/mainloop_sm80.cuh"
#include "gemm/tiles_sm80.cuh"

namespace minfer::gemm {

template <class Config>
struct GemmSm80 : GemmKernelSm80<MainloopSm80<Config>, EpilogueSm80<Config, typename MainloopSm80<Config>::TiledMma>,
                                 SplitTileSchedulerSm80<Config::kThreads, MainloopSm80<Config>::kValues>> {
  static_assert(GemmSm80::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
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
  using Mainloop = typename Kernel::Mainloop;
  using Element = typename Mainloop::Element;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  if (Status status = describe_schedule<Config>(arguments, &params.scheduler.schedule, &params.scheduler.split); !status.ok())
    return status;
  params.mainloop = Mainloop::to_underlying_arguments(
      cute::make_shape(int(problem.m), int(problem.n), int(problem.k), int(problem.batch)),
      {static_cast<Element const*>(operands.a), Mainloop::OperandA::stride(operands.lda, operands.a_batch_stride),
       static_cast<Element const*>(operands.b), Mainloop::OperandB::stride(operands.ldb, operands.b_batch_stride)});
  static_cast<EpilogueParams&>(params.epilogue) = make_epilogue(problem, operands);
  if constexpr (Mainloop::kIntegers) {
    params.mainloop.integers = problem.d_int32;
    static_cast<ScaledOutput&>(params.epilogue) = make_scaled_output(problem, operands);
  }
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_sm80(&gemm_sm80_kernel<Config>, params, arguments, params.scheduler.schedule.workers, Kernel::kThreads, Kernel::kSmemBytes,
                     shared_memory_allowed);
}

}  // namespace minfer::gemm
