// GEMM with 4-bit and 8-bit weights for sm_90a: TMA + WGMMA with the weights in registers, persistent, warp specialised; in tiles of 8
// tokens, and some of 16, mma.sync takes WGMMA's place.
//
// The weights' rows (the caller's n) are the MMA's m, the tokens (the caller's m) its n, so that a few tokens are one narrow instruction.
// Composition (gemm/kernel_sm90.cuh has the warp roles and walks): the dequantising CollectiveMma (mainloop_sm90.cuh), EpilogueSm90 over
// the warpgroups that have a tile's sums in the end, ClusterSplitTileSchedulerSm90.
// Consumers: 64 rows of the tile each (or 128), or, sliced-K, a slice of each stage's k of 64 rows, whose sums the first slice's warpgroup
// adds up.
// Tile walk: data-parallel, split-K or stream-K at run time; partials are added in the workspace (split_reduction.cuh) or, split-K of one
// tile to a cluster, in the owner's shared memory (cluster_split.h).
// Start: the first stages of weights, scales and zeros come into L2 under the predecessor's tail; everything is read after it
// (dependent_launch.cuh). Where the caller vouches that nobody writes them any more, they come into the ring.
// Limits: activations 16-byte aligned in base and rows; groups of 32 (fine; nvfp4: 16) or 128 times a power of two, or all of k.
#pragma once

#include "gemm/epilogue_sm90.cuh"
#include "gemm/kernel_sm90.cuh"
#include "gemm/launch_sm90.cuh"
#include "quantized_gemm/mainloop_sm90.cuh"
#include "quantized_gemm/tiles_sm90.cuh"

namespace minfer::w4a16 {

/// The epilogue of the warpgroups that have a tile's sums in the end: not of those with a slice of k.
template <class Config>
struct RowGroups : Config {
  static constexpr int kThreads = 128 * ((Config::kThreads / 128 - 1) / Config::kSlices + 1);
};

template <class Config, class Stage = StageSm90<Config, false>>
using CollectiveMainloopSm90 =
    cutlass::gemm::collective::CollectiveMma<MainloopSm90TmaDequantize<Config>,
                                             cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>,
                                             typename Stage::Codes, cute::Stride<int64_t, cute::_1, int64_t>, typename Stage::Element,
                                             cute::Stride<int64_t, cute::_1, int64_t>, typename Stage::TiledMma, cute::SM90_TMA_LOAD, void,
                                             void, cute::identity, cute::SM90_TMA_LOAD, typename Stage::SmemLayoutB, void, cute::identity>;

template <class Config, class Stage = StageSm90<Config, false>>
struct W4A16Sm90
    : gemm::GemmKernelSm90<CollectiveMainloopSm90<Config>, gemm::EpilogueSm90<RowGroups<Config>>,
                           ClusterSplitTileSchedulerSm90<Config::kClusterM, Stage::kRowGroups, Stage::kValues,
                                                         max_cluster_partials(Config::kFormat, Config::kTileN), Config::kInPlaceRanges>> {
  using S = Stage;
  static_assert(W4A16Sm90::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
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
  auto& mainloop = params.mainloop;
  if (Status status = gemm::describe_schedule<Config>(arguments, &params.scheduler.schedule, &params.scheduler.split); !status.ok())
    return status;
  int64_t const blocks_n = gemm::ceil_div(problem.n, kBlockN), blocks_k = gemm::ceil_div(problem.k, kBlockK);
  params.scheduler.cluster_partials =
      cluster_partials(Config::kFormat, Config::kTileN, Config::kCtasPerSm, params.scheduler.schedule, *arguments.device);
  mainloop.group_shift = group_shift(problem.group_size, problem.k);
  mainloop.has_zeros = Kernel::S::kHasZeros && operands.b_zeros != nullptr;
  mainloop.hint_weights =
      uint64_t(params.scheduler.schedule.tiles_n == 1 ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);

  int64_t const chunks_k = blocks_k * (4 / Kernel::S::kChunkSlabs);
  int64_t const weight_extents[3] = {kChunkBytes / 8, chunks_k, blocks_n}, weight_strides[2] = {kChunkBytes, chunks_k * kChunkBytes};
  int const weight_box[3] = {kChunkBytes / 8, Kernel::S::kSlices * Kernel::S::kChunks, Config::kTileM / 64};
  Status status =
      encode_tensor_map(&mainloop.weights, CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, operands.b, weight_extents, weight_strides, weight_box);
  if (!status.ok()) return status;
  // Of fewer tokens than a tile has room for, boxes hold these alone: with rows outside of the tensor one token of 28672 x 4096 took 33 us
  // in tiles of 32 tokens, without them 24. What a stage's other rows hold goes into columns that nobody stores.
  int const tokens = Kernel::S::kCluster > 1 ? Config::kTileN / Kernel::S::kCluster : int(std::min<int64_t>(Config::kTileN, problem.m));
  status = encode_tensor_map_planes(&mainloop.activations, problem.ab_type, operands.a, problem.k, problem.m, 1, operands.lda, 0, kBlockK,
                                    tokens);
  if (!status.ok()) return status;
  int const group_rows = std::max(1, Config::kTileK >> mainloop.group_shift);
  int64_t const groups = mainloop.group_shift >= 30 ? 1 : gemm::ceil_div(problem.k, problem.group_size);
  int64_t const scale_extents[3] = {problem.n, groups, 1};
  int const scale_box[3] = {Config::kTileM, group_rows, 1};
  constexpr int kScaleBytes = scale_bytes_of(Config::kFormat);
  constexpr auto kScaleType = kScaleBytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  int64_t const scale_strides[2] = {operands.ld_scales * kScaleBytes, operands.ld_scales * kScaleBytes * groups};
  status = encode_tensor_map(&mainloop.scales, kScaleType, 3, operands.b_scales, scale_extents, scale_strides, scale_box);
  if (!status.ok()) return status;
  if (mainloop.has_zeros) {
    int64_t const zero_strides[2] = {operands.ld_zeros * 2, operands.ld_zeros * 2 * groups};
    status =
        encode_tensor_map(&mainloop.zeros, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, operands.b_zeros, scale_extents, zero_strides, scale_box);
    if (!status.ok()) return status;
  }
  mainloop.stage_bytes = Config::kTileM * Config::kTileK * bits_of(Config::kFormat) / 8 +
                         tokens * Kernel::S::kCluster * Config::kTileK * 2 +
                         Config::kTileM * group_rows * (kScaleBytes + (mainloop.has_zeros ? 2 : 0));
  mainloop.early_stages = !operands.b_is_constant                 ? 0
                          : params.scheduler.cluster_partials > 0 ? arguments.early.cluster_stages
                                                                  : Config::kStages;
  status = gemm::describe_epilogue<typename Kernel::Epilogue>(problem, operands, &params.epilogue);
  if (!status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  dim3 const cluster(params.scheduler.cluster_partials > 0 ? params.scheduler.cluster_partials + 1 : Config::kClusterM);
  return gemm::launch_sm90<Config>(&w4a16_sm90_kernel<Config>, params, arguments, params.scheduler.schedule.workers, Kernel::kSmemBytes,
                                   shared_memory_allowed, cluster);
}

}  // namespace minfer::w4a16
