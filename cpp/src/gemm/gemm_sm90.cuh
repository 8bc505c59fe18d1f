// Dense GEMM for sm_90a: TMA + WGMMA, persistent, warp specialised.
//
// Composition (kernel_sm90.cuh has the warp roles and walks): MainloopSm90 (CUTLASS's CollectiveMma), EpilogueSm90, SplitTileSchedulerSm90.
// 384 threads: the producer's warpgroup keeps 40 registers, the two consumers have 232 each and share a tile, 64-row blocks alternating
// between them (cooperative), or have a tile each (pingpong).
// Pipelines. Ring: CUTLASS's PipelineTmaAsync (full: TMA bytes; empty: consumer warps, through the whole multicast group). C: one mbarrier
// per epilogue buffer. D: bulk groups of the storing thread.
// Tile walk: data-parallel, split-K or stream-K, all at run time. A split that does not own its tile goes to the workspace; the owner adds
// the partials in k order (split_reduction.cuh), or continues them (continued_sums_sm90.cuh).
// Shared memory: ring | epilogue buffers | barriers, bias, at most 227 KiB, one CTA per SM.
// Limits: A, B, and for the fast epilogue D and C, 16-byte aligned in base and strides.
#pragma once

#include <algorithm>

#include "gemm/continued_sums_sm90.cuh"
#include "gemm/epilogue_sm90.cuh"
#include "gemm/kernel_sm90.cuh"
#include "gemm/launch_sm90.cuh"
#include "gemm/mainloop_sm90.cuh"
#include "gemm/tiles_sm90.cuh"

namespace minfer::gemm {

template <class Config, bool kContinuesSums>
struct GemmPartsSm90 {
  using Mainloop = MainloopSm90<Config>;
  using Scheduler = SplitTileSchedulerSm90<Config::kClusterM, Config::kClusterN, Mainloop::kCooperative ? 2 : 1, Mainloop::kValues>;
};
template <class Config>
struct GemmPartsSm90<Config, true> {
  using Mainloop = ContinuedMainloopSm90<Config>;
  using Scheduler = ContinuedTileSchedulerSm90<Mainloop::kValues>;
};

template <class Config>
constexpr bool continues_sums() {
  if constexpr (requires { Config::kContinuesSums; }) return Config::kContinuesSums;
  return false;
}

template <class Config>
struct GemmSm90 : GemmKernelSm90<typename GemmPartsSm90<Config, continues_sums<Config>()>::Mainloop, EpilogueSm90<Config>,
                                 typename GemmPartsSm90<Config, continues_sums<Config>()>::Scheduler> {
  static_assert(GemmSm90::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(GemmSm90<Config>::kThreads, 1)
    gemm_sm90_kernel(__grid_constant__ typename GemmSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  GemmSm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_gemm_sm90(GemmLaunchArguments const& arguments) {
  using Kernel = GemmSm90<Config>;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  using Mainloop = typename Kernel::Mainloop;
  using Element = typename Mainloop::Element;
  typename Kernel::Params params{};
  constexpr bool kSwap = Config::kSwap;
  int const rows = int(kSwap ? problem.n : problem.m), columns = int(kSwap ? problem.m : problem.n);

  auto const set_stride = [](auto& stride, int64_t leading, int64_t batch) {
    if constexpr (cute::is_same_v<cute::remove_cvref_t<decltype(cute::get<0>(stride))>, int64_t>) {
      cute::get<0>(stride) = leading;
    } else {
      cute::get<1>(stride) = leading;
    }
    cute::get<2>(stride) = batch;
  };
  typename Mainloop::Arguments mainloop{};
  mainloop.ptr_A = static_cast<Element const*>(kSwap ? operands.b : operands.a);
  mainloop.ptr_B = static_cast<Element const*>(kSwap ? operands.a : operands.b);
  set_stride(mainloop.dA, kSwap ? operands.ldb : operands.lda, kSwap ? operands.b_batch_stride : operands.a_batch_stride);
  set_stride(mainloop.dB, kSwap ? operands.lda : operands.ldb, kSwap ? operands.a_batch_stride : operands.b_batch_stride);
  params.mainloop = Mainloop::to_underlying_arguments(cute::make_shape(rows, columns, int(problem.k), int(problem.batch)), mainloop);

  auto& schedule = params.scheduler.schedule;
  if (Status status = describe_schedule<Config>(arguments, &schedule, &params.scheduler.split); !status.ok()) return status;

  if constexpr (continues_sums<Config>()) params.mainloop.split = params.scheduler.split;

  // A weight matrix that no second row of tiles reads again leaves L2 to the activations.
  bool const stream_a = schedule.tiles_n == 1, stream_b = schedule.tiles_m == 1;
  params.mainloop.hint_a = uint64_t(stream_a ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);
  params.mainloop.hint_b = uint64_t(stream_b ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);

  EarlyLoads const& early = arguments.early;
  params.mainloop.early = Config::kSwap ? std::min(early.ring_bytes / (Config::kTileM * Config::kTileK * 2), Config::kStages) : 0;
  params.mainloop.prefetch = early.l2_bytes / ((Config::kTileM + Config::kTileN) * Config::kTileK * 2);

  auto const [prefetch_a, prefetch_b] = prefetches_of<Config>(arguments.launch);
  params.mainloop.prefetch_a = prefetch_a;
  params.mainloop.prefetch_b = prefetch_b;

  if (Status status = describe_epilogue<typename Kernel::Epilogue>(problem, operands, &params.epilogue); !status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_sm90<Config>(&gemm_sm90_kernel<Config>, params, arguments, schedule.workers, Kernel::kSmemBytes, shared_memory_allowed);
}

}  // namespace minfer::gemm
