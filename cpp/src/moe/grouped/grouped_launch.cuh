// What the launches of all grouped kernels share.
#pragma once

#include <atomic>

#include "common/cuda_check.h"
#include "common/tensor_map.h"
#include "moe/grouped/expert_tiles.cuh"
#include "moe/grouped/grouped_epilogue.cuh"
#include "moe/grouped/launch.h"

namespace minfer::moe {

/// Row i of the gate is row i * stride of the weight, its up row up_offset behind it; kBlocks: inside blocks of 16 rows.
struct GateRows {
  int64_t stride, up_offset;
};
inline GateRows gate_rows(GateLayout layout, int64_t n) {
  return layout == GateLayout::kHalves ? GateRows{1, n / 2} : layout == GateLayout::kAlternating ? GateRows{2, 1} : GateRows{1, 8};
}

inline ExpertRows describe_rows(GroupedProblem const& problem, GroupedOperands const& operands) {
  ExpertRows rows{};
  rows.offsets = operands.offsets;
  rows.experts = int32_t(problem.experts);
  rows.masked = problem.max_rows > 0;
  rows.rows = int32_t(rows.masked ? problem.max_rows : problem.rows);
  return rows;
}

template <class Params = GroupedEpilogueParams>
Params describe_epilogue(GroupedProblem const& problem, GroupedOperands const& operands) {
  Params e{};
  e.d = operands.d;
  e.bias = operands.bias;
  e.alpha = operands.alpha;
  e.row_scale = operands.row_scale;
  e.ldd = operands.ldd;
  e.bias_stride = operands.bias_stride;
  e.n = int32_t(problem.n);
  e.activation = operands.activation == Activation::kSilu ? make_sigmoid(operands.silu_scale) : make_activation(operands.activation);
  e.gate_max = operands.gate_max;
  e.up_max = operands.up_max;
  e.up_shift = operands.up_shift;
  e.gated = problem.gated;
  GateRows const rows = gate_rows(operands.gate_layout, problem.n);
  e.gate_row_stride = int32_t(rows.stride);
  e.up_row_offset = int32_t(rows.up_offset);
  e.gate_blocks = operands.gate_layout == GateLayout::kBlocks;
  e.d_scale = problem.d_fp8 ? operands.d_scale : nullptr;
  e.codes = problem.d_fp8 || problem.d_groups;
  e.vectors = problem.d_alignment >= (e.codes ? 8 : 16);
  return e;
}

/// The weight's part of an sm_90 kernel's parameters, in boxes of tile_m rows and 128 bytes.
inline Status describe_weights(GroupedProblem const& problem, GroupedOperands const& operands, int tile_m, CUtensorMap* map) {
  int const bytes = size_of(problem.type), line = 128 / bytes;
  int64_t const n = problem.n, k = problem.k, row = operands.ldb * bytes, expert = operands.b_expert_stride * bytes;
  if (problem.gated) {
    GateRows const rows = gate_rows(operands.gate_layout, n);
    int64_t const gate = rows.stride * row, up = rows.up_offset * row;
    bool const blocks = operands.gate_layout == GateLayout::kBlocks;
    int64_t const extents[5] = {k, 8, 2, n / 16, problem.experts};
    int64_t const strides[4] = {gate, up, blocks ? 16 * row : 8 * gate, expert};
    int const box[5] = {line, 8, 2, tile_m / 16, 1};
    return encode_tensor_map_rows(map, 5, operands.b, extents, strides, box, bytes);
  }
  int64_t const extents[3] = {k, n, problem.experts}, strides[2] = {row, expert};
  int const box[3] = {line, tile_m, 1};
  return encode_tensor_map_rows(map, 3, operands.b, extents, strides, box, bytes);
}

/// The rows' part of an sm_90 kernel's parameters.
template <class Mainloop, class Params>
Status describe_tokens(GroupedLaunchArguments const& arguments, Params* params) {
  GroupedProblem const& problem = *arguments.problem;
  GroupedOperands const& operands = *arguments.operands;
  int const bytes = size_of(problem.type);
  int64_t const extents[3] = {problem.k, operands.a_rows, 1}, strides[2] = {operands.lda * bytes, operands.lda * bytes};
  int box[3] = {128 / bytes, Mainloop::kLargeBox, 1};
  auto const encode = [&](CUtensorMap* map) { return encode_tensor_map_rows(map, 3, operands.a, extents, strides, box, bytes); };
  if (Status status = encode(&params->mainloop.tokens); !status.ok()) return status;
  box[1] = Mainloop::kSmallBox;
  if (Status status = encode(&params->mainloop.few_tokens); !status.ok()) return status;
  params->scheduler.rows = describe_rows(problem, operands);
  if (problem.gathered && double(operands.a_rows) * operands.lda * bytes >= 16.0 * Mainloop::Gather::kZeroRow) {
    return Status::failure(StatusCode::kNotSupported, "rows are gathered from up to 64 GiB, got %lld rows of %lld elements",
                           (long long)operands.a_rows, (long long)operands.lda);
  }
  params->mainloop.source = {static_cast<typename Mainloop::Element const*>(operands.a), operands.gather, uint32_t(operands.a_rows),
                             uint32_t(operands.lda * bytes / 16), int32_t(problem.k)};
  params->scheduler.k_tiles = int32_t((problem.k + Mainloop::kTileK - 1) / Mainloop::kTileK);
  params->scheduler.weight_tiles = int32_t((problem.n + Mainloop::kWeightRows - 1) / Mainloop::kWeightRows);
  // All tokens stay in L2 where they are few beside it.
  bool const keep = problem.rows * problem.k * bytes <= arguments.device->l2_bytes / 4;
  params->mainloop.hint_tokens = uint64_t(keep ? cute::TMA::CacheHintSm90::EVICT_LAST : cute::TMA::CacheHintSm90::EVICT_NORMAL);
  return Status::success();
}

/// CTAs of a persistent launch: all that are resident together. cluster: 1 or 2.
inline int resident_ctas(DeviceProperties const& device, int cluster, int ctas_per_sm) {
  if (cluster == 1) return device.sm_count * ctas_per_sm;
  return 2 * (device.max_clusters[1] > 0 ? device.max_clusters[1] : device.sm_count / 2);
}

template <class Params>
Status launch_grouped(void (*kernel)(Params const), Params const& params, GroupedLaunchArguments const& arguments, int threads,
                      int ctas_per_sm, int smem_bytes, std::atomic<uint64_t>& shared_memory_allowed, int cluster = 1) {
  if (cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(kernel), smem_bytes, shared_memory_allowed);
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  }
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim = {unsigned(cluster), 1, 1};
    ++count;
  }
  if (arguments.programmatic_launch && arguments.device->compute_capability() >= 90) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(resident_ctas(*arguments.device, cluster, ctas_per_sm)));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(smem_bytes);
  config.stream = arguments.stream;
  config.attrs = attributes;
  config.numAttrs = unsigned(count);
  return cuda_status(cudaLaunchKernelEx(&config, kernel, params), "launch");
}

}  // namespace minfer::moe
