// Grouped GEMM of 8-bit operands for sm_90a: d[rows of expert e] = epilogue(a[rows of e] . b[e]) with scales; e4m3 or int8; persistent,
// warp specialised, WGMMA.
//
// Composition (gemm/kernel_sm90.cuh has the warp roles and walks): the CollectiveMma specialisation of mainloop_scaled_sm90.cuh,
// GroupedCollectiveEpilogue or, where rows are tokens, GroupedRowsEpilogue, ExpertTileScheduler. Consumers are two that share a tile's
// rows; or one alone, with a second such CTA on the SM, so that the two hide each other's starts and ends.
// Tile walk: expert_tiles.cuh. Every CTA works it out from the offsets in device memory: nothing is known, or synchronised, on the host.
// Shared memory: ring with scales | staged tokens of d | scales of a tile's rows, barriers, table of the experts' tiles.
// Limits: operands 16-byte aligned, gated n a multiple of 16, kMaxGroupedExperts experts.
#pragma once

#include "common/cutlass_element.cuh"
#include "gemm/kernel_sm90.cuh"
#include "moe/grouped/expert_tile_scheduler.cuh"
#include "moe/grouped/grouped_collective_epilogue.cuh"
#include "moe/grouped/grouped_rows_epilogue.cuh"
#include "moe/grouped/grouped_scaled_launch.cuh"
#include "moe/grouped/mainloop_scaled_sm90.cuh"

namespace minfer::moe {

template <class Config, class Element = CutlassElement<Config::kType>>
using ScaledMainloopSm90 = cutlass::gemm::collective::CollectiveMma<
    MainloopSm90TmaScaledExperts<Config>, cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>,
    Element, cute::Stride<int64_t, cute::_1, int64_t>, Element, cute::Stride<int64_t, cute::_1, int64_t>, void, cute::SM90_TMA_LOAD, void,
    void, cute::identity, cute::SM90_TMA_LOAD, void, void, cute::identity>;

template <class Config, class Mainloop = ScaledMainloopSm90<Config>>
using ScaledEpilogueSm90 = cute::conditional_t<Config::kSwap,
                                               GroupedCollectiveEpilogue<AnyFloat16, Mainloop::kGroupM, Config::kTileM, Config::kTileN,
                                                                         Mainloop::kConsumers, SumFactor::kScales, Config::kStagedTokens>,
                                               GroupedRowsEpilogue<Mainloop::kMmaM, Mainloop::kWeightRows, Mainloop::kConsumers>>;

template <class Config, class Mainloop = ScaledMainloopSm90<Config>>
struct GroupedScaledSm90
    : gemm::GemmKernelSm90<Mainloop, ScaledEpilogueSm90<Config>,
                           ExpertTileScheduler<ExpertTiles<Mainloop::kTokens, Mainloop::kStep,
                                                           panel_of(Mainloop::kWeightRows* Mainloop::kCluster, Mainloop::kTokens)>,
                                               Config::kThreads, 0, Mainloop::kCluster>> {
  static_assert(GroupedScaledSm90::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    grouped_scaled_sm90_kernel(__grid_constant__ typename GroupedScaledSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  GroupedScaledSm90<Config>::run(params, smem);
#endif
}

/// Whether the mainloop's scales come by TMA: numbers of both operands, contiguous along rows of a and along k of the weight, with all
/// other strides multiples of 16 bytes.
template <class Mainloop>
Status describe_tma_scales(GroupedProblem const& problem, ExpertScales const& scales, typename Mainloop::TmaScales* described) {
  auto const aligned = [](int64_t stride) { return stride * int64_t(sizeof(float)) % 16 == 0; };
  auto const at_16_bytes = [](void const* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  gemm::ScaleView const &tokens = scales.tokens, &weight = scales.weight;
  int64_t const rows = (scales.n + gemm::kScaleBlock - 1) / gemm::kScaleBlock;
  bool const by_tma = !problem.gathered && scales.gather == nullptr && problem.max_rows == 0 && tokens.data != nullptr &&
                      !tokens.exponents && tokens.row_stride == 1 && tokens.k_stride >= scales.rows && aligned(tokens.k_stride) &&
                      at_16_bytes(tokens.data) && weight.data != nullptr && !weight.exponents && weight.k_stride == 1 &&
                      weight.row_stride >= scales.blocks && aligned(weight.row_stride) &&
                      scales.expert_stride >= rows * weight.row_stride && aligned(scales.expert_stride) && at_16_bytes(weight.data) &&
                      (!problem.gated || (scales.up_offset > 0 && aligned(scales.up_offset)));
  constexpr int kQuad = Mainloop::kScaleQuad;
  described->quad_mask = by_tma ? kQuad - 1 : 0;
  if (!by_tma) return Status::success();
  auto const bytes = [](int64_t stride) { return stride * int64_t(sizeof(float)); };
  int64_t const token_extents[2] = {scales.rows, scales.groups}, token_strides[1] = {bytes(tokens.k_stride)};
  int const token_box[2] = {Mainloop::kTokens, 1}, last_box[2] = {kQuad, 1};
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  Status status = encode_tensor_map(&described->tokens, kType, 2, tokens.data, token_extents, token_strides, token_box);
  if (status.ok()) status = encode_tensor_map(&described->last_tokens, kType, 2, tokens.data, token_extents, token_strides, last_box);
  int64_t const extents[3] = {scales.blocks, rows, problem.experts};
  int64_t const strides[2] = {bytes(weight.row_stride), bytes(scales.expert_stride)};
  int const box[3] = {kQuad, 1, 1};
  auto const* const gates = static_cast<float const*>(weight.data);
  if (status.ok()) status = encode_tensor_map(&described->gates, kType, 3, gates, extents, strides, box);
  if (status.ok() && problem.gated) status = encode_tensor_map(&described->ups, kType, 3, gates + scales.up_offset, extents, strides, box);
  return status;
}

template <class Config>
Status launch_grouped_scaled_sm90(GroupedLaunchArguments const& arguments) {
  using Kernel = GroupedScaledSm90<Config>;
  GroupedProblem problem = *arguments.problem;
  GroupedOperands operands = *arguments.operands;
  bool const reads = problem.k > 0;
  if (!reads) {  // nothing is multiplied: the descriptors of operands, which nobody reads, are of anything that there is
    problem.k = operands.lda = operands.ldb = 16;
    operands.b_expert_stride = 16 * problem.n;
    operands.a = operands.b = reinterpret_cast<void const*>(reinterpret_cast<uintptr_t>(operands.offsets) / 16 * 16);
  }
  GroupedLaunchArguments described = arguments;
  described.problem = &problem;
  described.operands = &operands;
  typename Kernel::Params params{};
  Status status = describe_weights(problem, operands, Kernel::Mainloop::kWeightRows, &params.mainloop.weights);
  if (status.ok()) status = describe_tokens<typename Kernel::Mainloop>(described, &params);
  if (!status.ok()) return status;
  if (!reads) params.scheduler.k_tiles = 0;
  params.scheduler.weight_tiles = (params.scheduler.weight_tiles + Kernel::Mainloop::kCluster - 1) / Kernel::Mainloop::kCluster;
  if (status = describe_scales(arguments, problem, operands, &params.mainloop.scales); !status.ok()) return status;
  if constexpr (Kernel::Mainloop::kScalesByTma) {
    if (status = describe_tma_scales<typename Kernel::Mainloop>(problem, params.mainloop.scales, &params.mainloop.tma_scales); !status.ok())
      return status;
  }
  params.mainloop.gated = problem.gated;
  params.mainloop.one = 1.0f;
  params.mainloop.adds = reads && adds_scaled(problem, operands);
  static_cast<ScaledGroupedEpilogueParams&>(params.epilogue) = describe_scaled_epilogue(arguments, problem, operands);
  static std::atomic<uint64_t> shared_memory_allowed{0};
  return launch_grouped(&grouped_scaled_sm90_kernel<Config>, params, described, Config::kThreads, Config::kCtasPerSm, Kernel::kSmemBytes,
                        shared_memory_allowed, Kernel::Mainloop::kCluster);
}

}  // namespace minfer::moe
