// Dense GEMM of e4m3 with scales for sm_80 onward: cp.async + mma.sync. The path on A100, Ada and consumer Blackwell.
//
// Composition (kernel_sm80.cuh has the walk): MainloopFp8Sm80, EpilogueSm80, SplitTileSchedulerSm80.
// Tile walk: the persistent one of sm_90, so data-parallel, split-K and stream-K, with the ordered fix-up.
// Shared memory: the ring of stages, and in its place the epilogue's kTileM x (kTileN + 8) fp32; under 99 KiB.
// Limits: operands 16-byte aligned in base and strides, of any extents.
#pragma once

#include "gemm/epilogue_sm80.cuh"
#include "gemm/kernel_sm80.cuh"
#include "gemm/launch_sm80.cuh"
#include "gemm/mainloop_fp8_sm80.cuh"
#include "gemm/tiles_sm80.cuh"

namespace minfer::gemm {

template <class Config>
struct GemmFp8Sm80 : GemmKernelSm80<MainloopFp8Sm80<Config>, EpilogueSm80<Config, typename MainloopFp8Sm80<Config>::TiledMma>,
                                    SplitTileSchedulerSm80<Config::kThreads, MainloopFp8Sm80<Config>::kValues>> {
  static_assert(GemmFp8Sm80::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    gemm_fp8_sm80_kernel(__grid_constant__ typename GemmFp8Sm80<Config>::Params const params) {
  extern __shared__ __align__(128) char smem_fp8_sm80[];
  GemmFp8Sm80<Config>::run(params, smem_fp8_sm80);
}

template <class Config>
Status launch_gemm_fp8_sm80(GemmLaunchArguments const& arguments) {
  using Kernel = GemmFp8Sm80<Config>;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  if (Status status = describe_schedule<Config>(arguments, &params.scheduler.schedule, &params.scheduler.split); !status.ok())
    return status;
  auto& mainloop = params.mainloop;
  mainloop.a = static_cast<uint8_t const*>(operands.a);
  mainloop.b = static_cast<uint8_t const*>(operands.b);
  mainloop.lda = operands.lda;
  mainloop.ldb = operands.ldb;
  mainloop.m = int32_t(problem.m);
  mainloop.n = int32_t(problem.n);
  mainloop.k = int32_t(problem.k);
  auto const blocks = [](OperandScales const& scale) {
    return ScaleView{scale.blocks ? scale.data : nullptr, scale.row_stride, scale.k_stride, scale.exponents};
  };
  OperandScales const& of_b = operands.b_scale;
  mainloop.scales = {blocks(operands.a_scale), blocks(of_b), mainloop.m, mainloop.n, of_b.halves, of_b.up_offset};
  mainloop.scaled = problem.block_scaled;
  static_cast<EpilogueParams&>(params.epilogue) = make_epilogue(problem, operands);
  static_cast<ScaledOutput&>(params.epilogue) = make_scaled_output(problem, operands);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_sm80(&gemm_fp8_sm80_kernel<Config>, params, arguments, params.scheduler.schedule.workers, Kernel::kThreads,
                     Kernel::kSmemBytes, shared_memory_allowed);
}

}  // namespace minfer::gemm
