// GEMM with int4 weights and activations of 8 bits, e4m3 or int8, for sm_90a: TMA + WGMMA with the weights in registers, persistent, warp
// specialised, in tiles of as many tokens as the launch says.
//
// The weight is the one that w4a16_sm90.cuh reads: codes packed for 16-bit activations, 16-bit scales of groups of 128 of k or more, no
// zero points. Composition (gemm/kernel_sm90.cuh has the warp roles and walks): the CollectiveMma of mainloop_w4a8_sm90.cuh, EpilogueSm90,
// which has the tokens' scales, SplitTileSchedulerSm90. 384 threads: two consumers with 64 rows of a tile each.
// Tile walk: data-parallel, split-K or stream-K at run time; the splits of a tile may be a cluster's CTAs (gemm/cluster_splits.h).
// Shared memory: ring, as many stages as fit | epilogue buffers of the widest tile | barriers, bias, scales; one CTA per SM.
// Limits: activations 16-byte aligned in base and rows; for the fast epilogue D and C, too.
#pragma once

#include "gemm/cluster_splits.h"
#include "gemm/epilogue_sm90.cuh"
#include "gemm/kernel_sm90.cuh"
#include "gemm/launch_sm90.cuh"
#include "gemm/tiles_sm90.cuh"
#include "quantized_gemm/mainloop_w4a8_sm90.cuh"

namespace minfer::w4a8 {

template <class Config>
using CollectiveMainloopSm90 = cutlass::gemm::collective::CollectiveMma<
    MainloopSm90TmaInt4<Config>, cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>, uint8_t,
    cute::Stride<int64_t, cute::_1, int64_t>, CutlassElement<Config::kType>, cute::Stride<int64_t, cute::_1, int64_t>, void,
    cute::SM90_TMA_LOAD, void, void, cute::identity, cute::SM90_TMA_LOAD, void, void, cute::identity>;

template <class Config, class Mainloop = CollectiveMainloopSm90<Config>>
struct W4A8Sm90
    : gemm::GemmKernelSm90<
          Mainloop, gemm::EpilogueSm90<Config>,
          gemm::SplitTileSchedulerSm90<Config::kClusterM, Config::kClusterN, Mainloop::kConsumers, Mainloop::kValues, Mainloop::kValues,
                                       gemm::SplitTileOptions{.swaps_pairs = gemm::EpilogueSm90<Config>::kSwapsPairs,
                                                              .splits_by_cluster = Mainloop::kSplitsByCluster,
                                                              .rereads_rank = true}>> {
  static_assert(W4A8Sm90::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) w4a8_sm90_kernel(__grid_constant__ typename W4A8Sm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  W4A8Sm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_w4a8_sm90(gemm::GemmLaunchArguments const& arguments) {
  using Kernel = W4A8Sm90<Config>;
  using Mainloop = typename Kernel::Mainloop;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  auto& mainloop = params.mainloop;
  auto& schedule = params.scheduler.schedule;
  if (Status status = gemm::describe_schedule<Config>(arguments, &schedule, &params.scheduler.split); !status.ok()) return status;
  int const columns = arguments.launch.columns > 0 ? arguments.launch.columns : Config::kTileN;
  mainloop.columns = params.epilogue.columns = columns;
  params.scheduler.split.values = columns / 2;
  mainloop.stage_bytes = Mainloop::stage_bytes(columns);
  mainloop.ring_bytes = Mainloop::kRingBytes;
  if constexpr (Mainloop::kSplitsByCluster) {
    int32_t const partial_bytes = Kernel::Scheduler::partial_bytes(params.scheduler);
    int32_t const partials = gemm::cluster_partials(schedule, *arguments.device, mainloop.ring_bytes, mainloop.stage_bytes, partial_bytes);
    params.scheduler.cluster_partials = partials;
    mainloop.ring_bytes = (mainloop.ring_bytes - partials * partial_bytes) / 16 * 16;
  }
  mainloop.stages = std::min(mainloop.ring_bytes / mainloop.stage_bytes, Mainloop::kMaxStages);
  mainloop.group_shift = w4a16::group_shift(problem.group_size, problem.k);
  mainloop.bf16_scales = operands.b_scales_type == DataType::kBF16;
  // A weight matrix that no second row of tiles reads again leaves L2 to the activations.
  mainloop.hint_codes = uint64_t(schedule.tiles_n == 1 ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);
  mainloop.prefetch = arguments.early.l2_bytes / mainloop.stage_bytes;

  int64_t const blocks_n = gemm::ceil_div(problem.n, w4a16::kBlockN), blocks_k = gemm::ceil_div(problem.k, w4a16::kBlockK);
  int64_t const code_extents[3] = {w4a16::kChunkBytes / 8, blocks_k, blocks_n},
                code_strides[2] = {w4a16::kChunkBytes, blocks_k * w4a16::kChunkBytes};
  int const code_box[3] = {w4a16::kChunkBytes / 8, kTileK / w4a16::kBlockK, Mainloop::kConsumers / Config::kClusterN};
  Status status = encode_tensor_map(&mainloop.codes, CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, operands.b, code_extents, code_strides, code_box);
  if (!status.ok()) return status;
  status = encode_tensor_map_planes(&mainloop.tokens, problem.ab_type, operands.a, problem.k, problem.m, 1, operands.lda, 0, kTileK,
                                    columns / Config::kClusterM);
  if (!status.ok()) return status;
  int64_t const groups = mainloop.group_shift >= 30 ? 1 : gemm::ceil_div(problem.k, problem.group_size);
  int64_t const scale_extents[2] = {problem.n, groups}, scale_strides[1] = {operands.ld_scales * 2};
  int const scale_box[2] = {Config::kTileM, 1};
  status =
      encode_tensor_map(&mainloop.scales, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, operands.b_scales, scale_extents, scale_strides, scale_box);
  if (status.ok()) status = gemm::describe_epilogue<typename Kernel::Epilogue>(problem, operands, &params.epilogue);
  if (!status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  int32_t const partials = params.scheduler.cluster_partials;
  return gemm::launch_sm90<Config>(&w4a8_sm90_kernel<Config>, params, arguments, schedule.workers, Kernel::kSmemBytes,
                                   shared_memory_allowed, partials > 0 ? dim3(partials + 1) : dim3(Config::kClusterM, Config::kClusterN));
}

}  // namespace minfer::w4a8
