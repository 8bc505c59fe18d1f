// Grouped GEMM with quantised weights for sm_90a: the tiles of grouped_sm90.cuh, the stages and mainloops of the GEMM with quantised
// weights.
//
// Composition (gemm/kernel_sm90.cuh has the warp roles and walks): the CollectiveMma specialisation of mainloop_dequantize_sm90.cuh,
// GroupedCollectiveEpilogue, ExpertTileScheduler. Consumers have 64 rows of the tile each, or a slice of each stage's k of 64 rows. They
// have no registers to spare in the mainloop, so their tile waits in shared memory. Two CTAs to an SM hide each other's starts and ends.
// Limits: k and n multiples of 8, activations 16-byte aligned; groups as the kernel's; kMaxGroupedExperts experts.
#pragma once

#include "gemm/kernel_sm90.cuh"
#include "moe/grouped/expert_tile_scheduler.cuh"
#include "moe/grouped/grouped_collective_epilogue.cuh"
#include "moe/grouped/grouped_launch.cuh"
#include "moe/grouped/mainloop_dequantize_sm90.cuh"

namespace minfer::moe {

template <class Config, class Stage = w4a16::StageSm90<Config, true>>
using DequantizingMainloopSm90 =
    cutlass::gemm::collective::CollectiveMma<MainloopSm90TmaDequantizeExperts<Config>,
                                             cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>,
                                             typename Stage::Codes, cute::Stride<int64_t, cute::_1, int64_t>, typename Stage::Element,
                                             cute::Stride<int64_t, cute::_1, int64_t>, typename Stage::TiledMma, cute::SM90_TMA_LOAD, void,
                                             void, cute::identity, cute::SM90_TMA_LOAD, typename Stage::SmemLayoutB, void, cute::identity>;

template <class Config, class Mainloop = DequantizingMainloopSm90<Config>>
struct GroupedW4A16Sm90
    : gemm::GemmKernelSm90<Mainloop,
                           GroupedCollectiveEpilogue<Float16<Config::kType>, Config::kTileM / Mainloop::kRowGroups, Config::kTileM,
                                                     Config::kTileN, Mainloop::kRowGroups, SumFactor::kAlpha>,
                           ExpertTileScheduler<ExpertTiles<Config::kTileN, Mainloop::kStep, panel_of(Config::kTileM, Config::kTileN)>,
                                               Config::kThreads, Mainloop::kRowGroups>> {
  static_assert(GroupedW4A16Sm90::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    grouped_w4a16_sm90_kernel(__grid_constant__ typename GroupedW4A16Sm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  GroupedW4A16Sm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_grouped_w4a16_sm90(GroupedLaunchArguments const& arguments) {
  using Kernel = GroupedW4A16Sm90<Config>;
  using Mainloop = typename Kernel::Mainloop;
  using S = typename Mainloop::S;
  GroupedProblem const& problem = *arguments.problem;
  GroupedOperands const& operands = *arguments.operands;
  typename Kernel::Params params{};
  int64_t const n = problem.n, k = problem.k;
  int64_t const blocks_n = (n + w4a16::kBlockN - 1) / w4a16::kBlockN, blocks_k = (k + w4a16::kBlockK - 1) / w4a16::kBlockK;
  params.mainloop.group_shift = w4a16::group_shift(problem.group_size, k);
  params.mainloop.has_zeros = S::kHasZeros && operands.b_zeros != nullptr;

  int64_t const chunks_k = blocks_k * (4 / S::kChunkSlabs), row_bytes = chunks_k * w4a16::kChunkBytes;
  int64_t const weight_extents[3] = {w4a16::kChunkBytes / 8, chunks_k, blocks_n * problem.experts};
  int64_t const weight_strides[2] = {w4a16::kChunkBytes, row_bytes};
  int const weight_box[3] = {w4a16::kChunkBytes / 8, S::kSlices * S::kChunks, Config::kTileM / 64};
  Status status = encode_tensor_map(&params.mainloop.weights, CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, operands.b, weight_extents, weight_strides,
                                    weight_box);
  if (!status.ok()) return status;
  int const group_rows = std::max(1, Config::kTileK >> params.mainloop.group_shift);
  int64_t const groups = params.mainloop.group_shift >= 30 ? 1 : (k + problem.group_size - 1) / problem.group_size;
  int64_t const scale_extents[3] = {n, groups, problem.experts};
  int const scale_box[3] = {Config::kTileM, group_rows, 1};
  constexpr int kScaleBytes = scale_bytes_of(Config::kFormat);
  constexpr auto kScaleType = kScaleBytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  if (operands.ld_scales < n || operands.ld_scales * kScaleBytes % 16 != 0) {
    return Status::failure(StatusCode::kInvalidArgument, "ld_scales must be at least n = %lld and a multiple of 16 bytes, got %lld",
                           (long long)n, (long long)operands.ld_scales);
  }
  int64_t const scale_strides[2] = {operands.ld_scales * kScaleBytes, operands.ld_scales * kScaleBytes * groups};
  status = encode_tensor_map(&params.mainloop.scales, kScaleType, 3, operands.b_scales, scale_extents, scale_strides, scale_box);
  if (status.ok() && params.mainloop.has_zeros) {
    int64_t const zero_strides[2] = {n * 2, n * 2 * groups};
    status = encode_tensor_map(&params.mainloop.zeros, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, operands.b_zeros, scale_extents, zero_strides,
                               scale_box);
  }
  if (!status.ok()) return status;
  params.mainloop.weight_bytes = Config::kTileM * Config::kTileK * bits_of(Config::kFormat) / 8 +
                                 Config::kTileM * group_rows * (kScaleBytes + (params.mainloop.has_zeros ? 2 : 0));

  if (status = describe_tokens<Mainloop>(arguments, &params); !status.ok()) return status;
  params.epilogue = describe_epilogue(problem, operands);
  params.mainloop.row_blocks = int32_t(blocks_n);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_grouped(&grouped_w4a16_sm90_kernel<Config>, params, arguments, Config::kThreads, Config::kCtasPerSm, Kernel::kSmemBytes,
                        shared_memory_allowed);
}

}  // namespace minfer::moe
