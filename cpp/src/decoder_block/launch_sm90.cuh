// How a launch of decoder_block_sm90.cuh's kernels is filled: parameters and maps of a problem's operands.
#pragma once

#include <algorithm>

#include "common/context.h"
#include "common/cuda_check.h"
#include "common/nonce.h"
#include "common/tensor_map.h"
#include "decoder_block/decoder_block_sm90.cuh"
#include "minfer/decoder_block.h"

namespace minfer::decoder_block {

/// log2 of the group size; 30: all of k is one group.
inline int group_shift(int64_t group_size) {
  if (group_size == 0) return 30;
  int shift = 0;
  while ((int64_t(1) << shift) < group_size) ++shift;
  return shift;
}

/// Groups that a stage has scales of.
inline int32_t scale_rows_of(DecoderBlockProblem const& problem) { return std::max(1, kStageK >> group_shift(problem.group_size)); }

inline Status describe_int4(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, int64_t n, int64_t k,
                            DecoderBlockOperands::Product const& from, int i, LayerParams* layer) {
  if (problem.batch_invariant) {
    // A strip that reaches beyond its range has zeros there.
    int const ranges = plan.ranges[i], box[4] = {64, units_of_slab(ranges), kStripBlocks, ranges};
    int64_t const blocks = k / kBlockK / ranges, extents[4] = {64, 4, blocks, (n + 63) / 64 * ranges},
                  strides[3] = {512, 2048, blocks * 2048};
    return encode_tensor_map(&layer->maps[i], CU_TENSOR_MAP_DATA_TYPE_UINT64, 4, from.weight, extents, strides, box);
  }
  int64_t const extents[3] = {64, 4, (n + 63) / 64 * ((k + 63) / 64)}, strides[2] = {512, 2048};
  int const box[3] = {64, 1, kStageK / 64};
  Status const status = encode_tensor_map(&layer->maps[i], CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, from.weight, extents, strides, box);
  if (!status.ok()) return status;
  int64_t const groups = problem.group_size == 0 ? 1 : (k + problem.group_size - 1) / problem.group_size;
  int64_t const scale_extents[2] = {n, groups}, scale_strides[1] = {from.ld_scales * 2};
  int const scale_box[2] = {kUnit, scale_rows_of(problem)};
  return encode_tensor_map(&layer->scales[i], CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, from.scales, scale_extents, scale_strides, scale_box);
}

inline Status describe_e4m3(int64_t n, int64_t k, DecoderBlockOperands::Product const& from, int i, LayerParams* layer) {
  int64_t const k_blocks = k / 128;
  Weight& weight = layer->weights[i];
  weight.weight_scales = static_cast<float const*>(from.scales);
  weight.up_scales = weight.weight_scales + (n / 2 + 127) / 128 * k_blocks;
  weight.row_scale_stride = from.one_scale ? 0 : 1;
  int64_t const extents[3] = {128, n, k_blocks}, strides[2] = {from.ld_weight, 128};
  int const box[3] = {128, kUnit, kStageK / 128};
  return encode_tensor_map_rows(&layer->maps[i], 3, from.weight, extents, strides, box, 1);
}

inline Status describe_dense(int64_t n, int64_t k, DecoderBlockOperands::Product const& from, int i, LayerParams* layer) {
  int64_t const extents[3] = {64, n, k / 64}, strides[2] = {from.ld_weight * 2, 128};
  int const box[3] = {64, kUnit, kWarps};
  return encode_tensor_map_rows(&layer->maps[i], 3, from.weight, extents, strides, box);
}

inline Status describe(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, DecoderBlockOperands::Product const& from, int i,
                       LayerParams* layer) {
  int64_t const n = problem.n(i), k = problem.k(i);
  Weight& weight = layer->weights[i];
  weight.norm = from.norm;
  weight.bias = from.bias;
  weight.bias_f32 = from.bias_type == DataType::kF32;
  if (problem.weights == WeightFormat::kDense) return describe_dense(n, k, from, i, layer);
  if (problem.weights == WeightFormat::kFp8E4M3) return describe_e4m3(n, k, from, i, layer);
  return describe_int4(plan, problem, n, k, from, i, layer);
}

inline Product product_of(DecoderBlockProblem const& problem, int i) {
  int64_t const n = problem.n(i), k = problem.k(i);
  bool const int4 = problem.weights == WeightFormat::kInt4;
  Product product{};
  product.k = int32_t(k);
  product.k_blocks = int32_t(int4 ? (k + 63) / 64 : k / 128);
  product.scale_rows = int4 ? scale_rows_of(problem) : 0;
  product.gated = i == 1;
  product.columns = int32_t(i == 1 ? n / 2 : n);
  product.units = int32_t((n + kUnit - 1) / kUnit);
  product.stages = int32_t(k_stages(k, stage_of(problem.weights).k));
  product.converted = int32_t(k_stages(k));
  return product;
}

/// heads > 0. packets: behind those of the products.
inline AttentionParams describe_attention(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, DecoderAttention const& from,
                                          Packet* packets) {
  AttentionParams to{};
  to.qkv = from.qkv;
  std::copy(from.strides, from.strides + 3, to.strides);
  to.table = from.table;
  to.seq_lens = from.seq_lens;
  to.slots = from.slots;
  to.positions = from.positions;
  to.positions_64bit = from.positions_64bit;
  to.cos_sin = from.cos_sin;
  to.length = from.length;
  to.pages = from.pages;
  to.eps = from.eps;
  to.weight_offset = from.weight_offset;
  to.scale_log2 = from.scale * 1.44269504f;
  to.heads = int32_t(problem.heads);
  to.heads_kv = int32_t(problem.heads_kv);
  to.group = to.heads / to.heads_kv;
  to.pair_shift = to.group <= 2 ? 0 : to.group <= 4 ? 1 : 2;
  to.splits = plan.splits;
  while ((int64_t(1) << to.page_shift) < from.page_size) ++to.page_shift;
  to.capacity = int32_t(std::min<int64_t>(problem.capacity, INT32_MAX));
  AttentionPackets const counts = attention_packets_of(problem, plan.splits);
  to.out = packets;
  to.partials = to.out + counts.out;
  to.ends = to.partials + counts.partials;
  return to;
}

inline LayerAttention layer_of(DecoderAttention const& from) {
  return {from.k_cache, from.v_cache, from.q_weight, from.k_weight, int32_t(std::min<int64_t>(from.window, INT32_MAX))};
}

template <class Weights, DataType kType, int kTokens, bool kAttention, class Params>
Status launch(DecoderBlockPlan const& plan, Params const& params, bool programmatic, Stream stream, int smem_limit) {
  static std::atomic<uint64_t> allowed{0};
  auto* const kernel = &decoder_block_sm90_kernel<Weights, kType, kTokens, kAttention>;
  if (cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(kernel), smem_limit, allowed); error != cudaSuccess)
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(plan.ctas));
  config.blockDim = dim3(unsigned(BlockOf<Weights, kType, kTokens, kAttention>::kThreads));
  config.dynamicSmemBytes = size_t(plan.smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
  attributes[config.numAttrs++].val.cooperative = 1;
  if (programmatic) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  return cuda_status(cudaLaunchKernelEx(&config, kernel, params), "launch");
}

/// Of a launch with room for kMost layers.
template <int kMost>
Status fill(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, DecoderBlockOperands const* layers, void* workspace,
            Params<kMost>* to) {
  Params<kMost>& params = *to;
  DecoderBlockOperands const& first = layers[0];
  Packet* packets = static_cast<Packet*>(workspace);
  int const products = products_of(problem);
  for (int i = 0; i < products; ++i) {
    params.products[i] = product_of(problem, i);
    if (packets_of(problem, i) == 0) continue;
    params.products[i].packets = packets;
    packets += packets_of(problem, i);
  }
  params.count = int32_t(problem.layers);
  params.last_units = int32_t((problem.next + kUnit - 1) / kUnit);
  for (int64_t layer = 0; layer < problem.layers; ++layer) {
    bool const ends = layer + 1 == problem.layers && problem.next == 0;
    for (int i = 0; i < (ends ? kDecoderBlockProducts - 1 : products); ++i) {
      Status const status = describe(plan, problem, layers[layer].products[i], i, &params.layers[layer]);
      if (!status.ok()) return status;
    }
    if (problem.heads > 0) params.layers[layer].attention = layer_of(layers[layer].attention);
  }
  if (problem.heads > 0) {
    int64_t const page_size = first.attention.page_size;
    if (page_size < 1 || (page_size & (page_size - 1)) != 0)
      return Status::failure(StatusCode::kInvalidArgument, "page_size must be a power of two, got %lld", (long long)page_size);
    params.attention = describe_attention(plan, problem, first.attention, packets);
  }
  DecoderExchange const& exchange = first.exchange;
  if (exchange.ranks < 1 || exchange.ranks > kMostDecoderRanks || exchange.rank < 0 || exchange.rank >= exchange.ranks)
    return Status::failure(StatusCode::kInvalidArgument, "rank %d of %d; there may be %d", exchange.rank, exchange.ranks,
                           kMostDecoderRanks);
  if (exchange.ranks > 1 && problem.heads == 0)
    return Status::failure(StatusCode::kInvalidArgument, "a layer is divided where its attention is part of the launch");
  params.ranks = exchange.ranks;
  params.rank = exchange.rank;
  for (int i = 0; i < exchange.ranks; ++i) params.exchange[i] = static_cast<char*>(exchange.buffers[i]);
  Layout const layout = layout_of(problem, plan.stages, fixed_bytes(problem.m, problem.batch_invariant));
  for (int parity = 0; parity < 2; ++parity) {
    params.pitch[parity] = int32_t(layout.pitch[parity]);
    params.activations[parity] = int32_t(layout.activations[parity]);
    params.groups[parity] = int32_t(layout.groups[parity]);
  }
  params.fixed = int32_t(layout.fixed);
  params.a = first.a;
  params.residual = first.residual;
  params.d = first.d;
  params.m = int32_t(problem.m);
  params.stages = plan.stages;
  params.group_shift = group_shift(problem.group_size);
  params.ahead = plan.ahead;
  params.eps = first.eps;
  params.weight_offset = first.weight_offset;
  params.activation = make_activation(first.activation);
  params.early = first.weights_are_constant;
  params.nonce = next_nonce();
  params.block_scales = problem.weights == WeightFormat::kFp8E4M3 && problem.scales == DecoderBlockScales::kBlocks;
  return Status::success();
}

/// What a launch in the batch-invariant mode has beside.
inline void fill_in_order(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, DecoderBlockOperands const& layer,
                          InOrderParams* to) {
  for (int i = 0; i < products_of(problem); ++i) {
    InOrderParams::InOrder& product = to->in_order[i];
    int const ranges = plan.ranges[i];
    int32_t const slabs = (to->products[i].units + units_of_slab(ranges) - 1) / units_of_slab(ranges);
    product.each = slabs / plan.ctas;
    product.more = slabs % plan.ctas;
    product.range_shift = ranges == 4 ? 2 : ranges - 1;
    product.range_blocks = int32_t(problem.k(i) / kBlockK / ranges);
    product.strips = (product.range_blocks + kStripBlocks - 1) / kStripBlocks;
    product.groups = int32_t(problem.group_size == 0 ? 1 : (problem.k(i) + problem.group_size - 1) / problem.group_size);
    product.scales = layer.products[i].scales;
    product.ld_scales = layer.products[i].ld_scales;
  }
  to->norm_threads = plan.norm_threads;
}

template <class Weights, DataType kType, int kTokens, bool kAttention>
Status fill_and_launch(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, DecoderBlockOperands const* layers,
                       DeviceProperties const& device, void* workspace, bool programmatic, Stream stream) {
  typename BlockOf<Weights, kType, kTokens, kAttention>::Params params{};
  if (Status const status = fill < kAttention ? kMostLayers : 1 > (plan, problem, layers, workspace, &params); !status.ok()) return status;
  if constexpr (Weights::kInOrder) fill_in_order(plan, problem, layers[0], &params);
  return launch<Weights, kType, kTokens, kAttention>(plan, params, programmatic, stream, device.smem_per_block);
}

}  // namespace minfer::decoder_block
