// Dense GEMM for sm_90a in tiles of a width that the launch chooses: TMA + WGMMA, persistent, warp specialised.
//
// Swapped, the weight's rows (the caller's n) are on the tile's M side, the tokens (the caller's m) on its N side, which the launch divides
// into tiles of equal width: no instruction multiplies rows that are not there, and the number of tiles can be that of the SMs. Kernels for
// many tokens have these on the M side: the scales of a token's blocks are one number for all of a thread's row.
// Composition (kernel_sm90.cuh has the warp roles and walks): a CollectiveMma under MainloopSm90TmaColumns, EpilogueSm90,
// SplitTileSchedulerSm90. 384 threads, two consumers with one or two blocks of 64 rows each: of one tile, in turns (cooperative), or a
// tile each (pingpong). Tiles of 192 rows: 512 threads, three consumers with a block each.
// Tile walk: data-parallel, split-K or stream-K, all at run time.
// Shared memory: ring, as many stages as fit | epilogue buffers of the widest tile | barriers, bias, at most 227 KiB, one CTA per SM.
// Limits: operands of either layout, 16-byte aligned in base and strides; for the fast epilogue D and C, too.
#pragma once

#include "gemm/cluster_splits.h"
#include "gemm/epilogue_sm90.cuh"
#include "gemm/kernel_sm90.cuh"
#include "gemm/launch_sm90.cuh"
#include "gemm/mainloop_columns_sm90.cuh"
#include "gemm/tiles_sm90.cuh"

namespace minfer::gemm {

/// Whether launches of Config's kernel may have a tile's ranges of k computed by one CTA.
template <class Config>
constexpr bool has_ranges_in_place() {
  if constexpr (requires { Config::kInPlaceRanges; }) return Config::kInPlaceRanges;
  return false;
}

template <class Config>
using CollectiveMainloopColumnsSm90 = cutlass::gemm::collective::CollectiveMma<
    MainloopSm90TmaColumns<Config>, cute::Shape<cute::Int<Config::kTileM>, cute::Int<Config::kTileN>, cute::Int<Config::kTileK>>,
    CutlassElement<Config::kType>, cute::Stride<int64_t, cute::_1, int64_t>, CutlassElement<Config::kType>,
    cute::Stride<int64_t, cute::_1, int64_t>, void, cute::SM90_TMA_LOAD, void, void, cute::identity, cute::SM90_TMA_LOAD, void, void,
    cute::identity>;

template <class Config>
struct GemmColumnsSm90
    : GemmKernelSm90<
          CollectiveMainloopColumnsSm90<Config>, EpilogueSm90<Config>,
          SplitTileSchedulerSm90<Config::kClusterM, Config::kClusterN, CollectiveMainloopColumnsSm90<Config>::kSharing,
                                 CollectiveMainloopColumnsSm90<Config>::kValues, CollectiveMainloopColumnsSm90<Config>::kBlockValues,
                                 SplitTileOptions{.swaps_pairs = Config::kType == DataType::kE4M3,
                                                  .splits_by_cluster = CollectiveMainloopColumnsSm90<Config>::kSplitsByCluster,
                                                  .in_place = has_ranges_in_place<Config>()}>> {
  static_assert(GemmColumnsSm90::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(GemmColumnsSm90<Config>::kThreads, 1)
    gemm_columns_sm90_kernel(__grid_constant__ typename GemmColumnsSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  GemmColumnsSm90<Config>::run(params, smem);
#endif
}

template <class Config>
Status launch_gemm_columns_sm90(GemmLaunchArguments const& arguments) {
  using Kernel = GemmColumnsSm90<Config>;
  using Mainloop = typename Kernel::Mainloop;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  auto& mainloop = params.mainloop;
  auto& schedule = params.scheduler.schedule;
  if (Status status = describe_schedule<Config>(arguments, &schedule, &params.scheduler.split); !status.ok()) return status;
  int const columns = arguments.launch.columns > 0 ? arguments.launch.columns : Config::kTileN;
  mainloop.columns = params.epilogue.columns = columns;
  params.scheduler.split.values = columns / 2;
  mainloop.stage_bytes = (Config::kTileM + Mainloop::stored_columns(columns)) * Mainloop::kRowBytes;
  if constexpr (Mainloop::kNarrow) {
    auto const blocks = [](OperandScales const& scale) {
      return ScaleView{scale.blocks ? scale.data : nullptr, scale.row_stride, scale.k_stride, scale.exponents};
    };
    OperandScales const& of_b = operands.b_scale;
    mainloop.scales = {blocks(operands.a_scale), blocks(of_b), int32_t(problem.m), int32_t(problem.n), of_b.halves, of_b.up_offset};
    mainloop.scale_bytes = problem.block_scaled ? Mainloop::scale_bytes(of_b.halves) : 0;
    ScaleView const& of_tokens = mainloop.scales.tokens;
    mainloop.load_row_scales = Mainloop::kRowScales && problem.block_scaled && of_tokens.by_fours() && of_tokens.k_stride > 0;
    mainloop.fast = problem.fast_accum;
    mainloop.one = 1.0f;
    mainloop.integers = problem.d_int32;
    mainloop.stage_bytes += mainloop.scale_bytes;
  }
  int32_t ring_bytes = Mainloop::kRingBytes;
  if constexpr (Mainloop::kSplitsByCluster) {
    int32_t const partial_bytes = Kernel::Scheduler::partial_bytes(params.scheduler);
    int32_t const partials = cluster_partials(schedule, *arguments.device, ring_bytes, mainloop.stage_bytes, partial_bytes);
    params.scheduler.cluster_partials = partials;
    if (partials > 0) schedule.split_major = false;  // the CTAs of a cluster, which are neighbours, have splits of one tile
    ring_bytes = mainloop.ring_bytes = (ring_bytes - partials * partial_bytes) / 16 * 16;
  }
  mainloop.stages = ring_bytes / mainloop.stage_bytes;
  if (mainloop.stages > Mainloop::kMaxStages) mainloop.stages = Mainloop::kMaxStages;

  // A weight matrix that no second row of tiles reads again leaves L2 to the activations.
  auto const hint = [](bool streams) {
    return uint64_t(streams ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);
  };
  mainloop.hint_a = hint(schedule.tiles_n == 1);
  mainloop.hint_b = hint(schedule.tiles_m == 1);
  EarlyLoads const& early = arguments.early;
  mainloop.early = Config::kSwap ? std::min(early.ring_bytes / Mainloop::kBytesA, mainloop.stages) : 0;
  if constexpr (Mainloop::kSplitsByCluster) {
    if (params.scheduler.cluster_partials > 0) mainloop.early = std::min(mainloop.early, early.cluster_stages);
  }
  mainloop.prefetch = early.l2_bytes / mainloop.stage_bytes;
  auto const [prefetch_a, prefetch_b] = prefetches_of<Config>(arguments.launch);
  mainloop.prefetch_a = prefetch_a;
  mainloop.prefetch_b = prefetch_b;

  struct Operand {
    void const* data;
    int64_t lines, stride, batch_stride;
  };
  Operand const tokens{operands.a, problem.m, operands.lda, operands.a_batch_stride},
      weight{operands.b, problem.n, operands.ldb, operands.b_batch_stride};
  auto const encode = [&](CUtensorMap* map, Operand const& x, bool along_k, int box_k, int box_lines) {
    return encode_tensor_map_planes(map, problem.ab_type, x.data, along_k ? problem.k : x.lines, along_k ? x.lines : problem.k,
                                    problem.batch, x.stride, x.batch_stride, along_k ? box_k : box_lines, along_k ? box_lines : box_k);
  };
  Status status = encode(&mainloop.a, Config::kSwap ? weight : tokens, Mainloop::kRowsAlongK, Mainloop::kBoxK, Mainloop::kBoxRows);
  if (status.ok()) {
    status = encode(&mainloop.b, Config::kSwap ? tokens : weight, Mainloop::kColumnsAlongK, Mainloop::kTileK,
                    Mainloop::kColumnsAlongK ? Mainloop::loaded_columns(columns) : 64);
  }
  if constexpr (Mainloop::kRowScales) {
    if (status.ok() && mainloop.load_row_scales) {
      int64_t const extents[2] = {problem.m, (problem.k + kScaleBlock - 1) / kScaleBlock};
      int64_t const strides[1] = {mainloop.scales.tokens.k_stride * int64_t(sizeof(float))};
      int const box[2] = {Config::kTileM, 1};
      status =
          encode_tensor_map(&mainloop.row_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, mainloop.scales.tokens.data, extents, strides, box);
    }
  }
  if (status.ok()) status = describe_epilogue<typename Kernel::Epilogue>(problem, operands, &params.epilogue);
  if (!status.ok()) return status;
  static std::atomic<uint64_t> shared_memory_allowed{0};
  int32_t const partials = params.scheduler.cluster_partials;
  return launch_sm90<Config>(&gemm_columns_sm90_kernel<Config>, params, arguments, schedule.workers, Kernel::kSmemBytes,
                             shared_memory_allowed, partials > 0 ? dim3(partials + 1) : dim3(Config::kClusterM, Config::kClusterN));
}

}  // namespace minfer::gemm
