// The parameters of decoder_block_sm90.cuh's kernels.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/activation.cuh"
#include "common/packet.cuh"
#include "decoder_block/attention_sm90.cuh"
#include "decoder_block/layout.h"

namespace minfer::decoder_block {

/// What a product is in all layers of a launch.
struct Product {
  int32_t k, k_blocks, columns;                  // k_blocks: of int4 64, of e4m3 128; columns: of the output
  int32_t units, stages, converted, scale_rows;  // of k: stages of the ring, and of kStageK
  Packet* packets;                               // of the output, for the products behind; null: there are none
  bool gated;
};

/// What a layer multiplies with, beside the weight itself.
struct Weight {
  float const* weight_scales;  // e4m3: of rows, [n] or of all, or of blocks [n / 128, k_blocks]
  float const* up_scales;      // of blocks of ups
  void const *norm, *bias;
  int32_t row_scale_stride;  // 1, or 0: one for all
  bool bias_f32;
};

struct LayerParams {
  // int4: [blocks of 64 x 64, 4, 64] of 8 bytes, in order [ranges, blocks of one, 4, 64]; e4m3: [k / 128, n, 128]; else [k / 64, n, 64].
  CUtensorMap maps[kDecoderBlockProducts];
  CUtensorMap scales[kDecoderBlockProducts];  // int4: [groups, n]
  Weight weights[kDecoderBlockProducts];
  LayerAttention attention;
};

/// Of a launch of up to kMost layers. They are parameters of the kernel, not memory, so that a CUDA graph keeps them.
template <int kMost>
struct Params {
  Product products[kDecoderBlockProducts];
  int32_t count, last_units;  // layers; units of the last layer's last product
  void const* a;
  void *residual, *d;
  int32_t m, stages, ahead, group_shift;
  int32_t pitch[2], activations[2], groups[2], fixed;  // layout.h
  float eps, weight_offset;
  ActivationParams activation;
  bool block_scales;
  bool early;  // weights may be read before the predecessor has finished, and what attention reads but q, k and v
  uint64_t nonce;
  AttentionParams attention;
  int32_t ranks, rank;  // of a layer that is divided among GPUs; else 1
  char* exchange[kMostDecoderRanks];
  LayerParams layers[kMost];
};
static_assert(sizeof(Params<kMostLayers>) <= kMostParameterBytes);

/// Of a launch in the batch-invariant mode.
struct InOrderParams : Params<1> {
  struct InOrder {
    int32_t each, more;            // slabs of the weight that each CTA has, and CTAs with one more
    int32_t range_shift;           // log2 of a row's ranges of k
    int32_t range_blocks, strips;  // of a range: blocks of 64 k, strips
    int32_t groups;                // of k
    void const* scales;            // [groups, rows of the weight], leading dimension ld_scales
    int64_t ld_scales;
  } in_order[kDecoderBlockProducts];
  int32_t norm_threads;  // of minfer.rms_norm, among which a row is divided
};

}  // namespace minfer::decoder_block
