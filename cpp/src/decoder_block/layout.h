// What planner and kernel agree on: how shared memory and the workspace of a decoder block are divided.
#pragma once

#include <cstddef>
#include <cstdint>

#include "minfer/decoder_block.h"

namespace minfer::decoder_block {

constexpr int kUnit = 16;           // rows of a weight that a CTA computes at a time, an MMA's
constexpr int kStageK = 2048;       // k that are converted together; of a stage of the ring too, but of 16-bit weights
constexpr int kWarps = 16;          // consumers
constexpr int kMostStages = 16;     // of the ring
constexpr int kMostKStages = 16;    // of kStageK in a weight's row
constexpr int kDigits = 3;          // of an activation beside int4: 8 bits each
constexpr int kPartials = 4;        // units whose sums are under way from the consumers
constexpr int kConverterWarps = 8;  // a stage's activations are 8 for each of their threads
constexpr int kMostTokens = 2;
// In the batch-invariant mode, of int4 weights (in_order_sm90.cuh). A slab is four, two or one units beside each other, of rows that are
// summed in one, two or four ranges of k. A stage of the ring has of a slab, of each unit and range, a strip: up to kStripBlocks blocks of
// 64 k, with their scales. A quad of consumers multiplies it, a warp each strip.
constexpr int kStrips = 4, kQuads = kWarps / kStrips;
constexpr int kBlockK = 64, kStripBlocks = 8;
constexpr int kBlockBytes = kUnit * kBlockK / 2;
constexpr int kStripScales = kStripBlocks / 2, kStripScaleBytes = kStripScales * kUnit * 2;  // of each 128 k, the scales of their group
constexpr int kNormWarps = 16;  // most of those that minfer.rms_norm divides a row among
constexpr int units_of_slab(int ranges) { return kStrips / ranges; }
// Layers of a launch, whose operands are the kernel's parameters.
constexpr int kMostLayers = 24, kMostParameterBytes = 32764;
// Of an attention in the launch.
constexpr int kHeadDim = int(kDecoderHeadDim);
constexpr int kMostSplits = 32;                                   // of a sequence
constexpr int kMostGroup = 8;                                     // heads of queries of a head of keys
constexpr int kPagesOfSequence = 128;                             // in shared memory; further ones are looked up in the table
constexpr int kQueriesBytes = (kMostGroup + 2) * kHeadDim * 2;    // of shared memory: heads of queries, the new key and its value
constexpr int kAttentionBytes = kWarps * 2 * (kHeadDim * 4 + 8);  // of shared memory: a warp's sums for two heads

/// A stage of the ring. Codes of 8 and 16 bits are swizzled by TMA and begin at multiples of 1024: e4m3's scales stand behind all stages.
struct Stage {
  int k;                               // columns: as many of them for each consumer warp
  int code_bytes, scale_bytes, pitch;  // pitch: from one stage's codes to the next
};
constexpr Stage stage_of(WeightFormat format, bool in_order = false) {
  if (in_order) {
    int const codes = kStrips * kStripBlocks * kBlockBytes, scales = kStrips * kStripScaleBytes;
    return {kStrips * kStripBlocks * kBlockK, codes, scales, codes + scales};
  }
  if (format == WeightFormat::kDense) return {kStageK / 2, kUnit * kStageK, 0, kUnit * kStageK};
  if (format == WeightFormat::kFp8E4M3) return {kStageK, kUnit * kStageK, 2 * 4 * (kStageK / 128), kUnit * kStageK};
  int const codes = kUnit * kStageK / 2, scales = kUnit * 2 * (kStageK / 128);
  return {kStageK, codes, scales, codes + scales};
}

constexpr int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
constexpr int64_t k_stages(int64_t k, int stage_k = kStageK) { return (k + stage_k - 1) / stage_k; }

/// The parts of shared memory that depend on the sizes, one behind the other: stages, the fixed part, and for the activations of even and
/// of odd products the rows that converters make of them and what is known of each group of 128.
struct Layout {
  int64_t pitch[2];        // bytes from one row to the next
  int64_t activations[2];  // offsets
  int64_t groups[2];
  int64_t fixed, bytes;
};

constexpr int64_t group_bytes(WeightFormat format, int64_t tokens, bool in_order = false) {
  return in_order ? 0 : format == WeightFormat::kInt4 ? 64 : 4 * tokens;
}

/// fixed_bytes: of the kernel for so many tokens.
inline Layout layout_of(DecoderBlockProblem const& problem, int64_t stages, int64_t fixed_bytes) {
  Layout layout{};
  bool const in_order = problem.batch_invariant, digits = problem.weights == WeightFormat::kInt4 && !in_order;
  Stage const stage = stage_of(problem.weights, in_order);
  layout.fixed = stages * (stage.code_bytes + stage.scale_bytes);
  int64_t at = layout.fixed + round_up(fixed_bytes, 128);
  for (int parity = 0; parity < 2; ++parity) {
    int64_t most = 0;
    for (int i = parity; i < kDecoderBlockProducts; i += 2) most = most > k_stages(problem.k(i)) ? most : k_stages(problem.k(i));
    // Rows of int4's digits: ldmatrix's eight rows of 16 bytes meet all banks once. Of f16, what is read together: 64 bytes of two rows.
    layout.pitch[parity] = digits ? most * kStageK + 16 : most * kStageK * 2 + 64;
    layout.activations[parity] = at;
    int64_t bytes = (digits ? kDigits : 1) * problem.m * layout.pitch[parity];
    // Where product 1's activations come when attention's sums have left, and product 0's when it has done with queries.
    if (parity == 1 && problem.heads > 0 && bytes < kAttentionBytes) bytes = kAttentionBytes;
    if (parity == 0 && problem.heads > 0 && bytes < kQueriesBytes) bytes = kQueriesBytes;
    at += round_up(bytes, 128);
    layout.groups[parity] = at;
    at += round_up(most * (kStageK / 128) * group_bytes(problem.weights, problem.m, in_order), 128);
  }
  layout.bytes = at;
  return layout;
}

/// Bytes of the fixed part, of a kernel for `tokens`.
constexpr int64_t fixed_bytes(int64_t tokens, bool in_order = false) {
  int64_t const sums = in_order ? kWarps * (kStrips - 1) : kPartials * kWarps, partials = in_order ? kWarps : kPartials;
  return sums * tokens * kUnit * 4 + 2 * tokens * (in_order ? kNormWarps : kConverterWarps) * 4 + 16 + 4 * kPagesOfSequence + 24 +
         8 * (2 * kMostStages + 2 * kMostKStages + 2 + 2 * partials);
}

/// A model's last layer has no product behind the residual.
inline int products_of(DecoderBlockProblem const& problem) { return problem.n(3) == 0 ? kDecoderBlockProducts - 1 : kDecoderBlockProducts; }

/// 16-byte packets of 4 numbers each: of x, h, and x again, and of q, k and v where there is a layer behind; what the last product makes
/// does not travel.
inline int64_t packets_of(DecoderBlockProblem const& problem, int product) {
  if (product + 1 >= products_of(problem) && problem.layers == 1) return 0;
  return problem.m * (product == 1 ? problem.inter : problem.n(product)) / 4;
}

/// Packets of an attention in the launch: of its output, of all CTAs' sums, and of what these are relative to.
struct AttentionPackets {
  int64_t out, partials, ends;
};
inline AttentionPackets attention_packets_of(DecoderBlockProblem const& problem, int64_t splits) {
  if (problem.heads == 0) return {0, 0, 0};
  return {problem.attention / 4, problem.heads * splits * (kHeadDim / 2), problem.heads * splits};
}

/// Of a divided layer's exchange, behind a header: packets [epochs][output and down projection][ranks][hidden / 2] of 2 numbers, 16 bytes.
/// A launch writes those of its epoch while other ranks may still read those of the one before (distributed/exchange.h).
constexpr int kExchanges = 2;

}  // namespace minfer::decoder_block
