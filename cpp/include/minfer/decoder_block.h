// What lies between the attention of a decoder layer and that of the next one, for one or two tokens and int4 weights, in one launch:
//   x = residual + a . Wo^T + bias;   h = act(gate) * up of rms_norm(x) . Wgu^T;   x += h . Wd^T + bias;   residual = x;
//   d = rms_norm(x) . Wn^T + bias
//
//   DecoderBlockProblem  what is computed: sizes and types (no pointers)
//   plan_decoder_block   pure: problem x device -> DecoderBlockPlan: the launch, or why there is none and products are launched one by one
//   run_decoder_block    launches a plan that has one; allocates nothing, synchronises nothing
#pragma once

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

constexpr int kDecoderBlockProducts = 4;  // the output projection, gate and up, down, the next layer's first projection

/// What the scales of all e4m3 weights are of: rows, or whole weights; or blocks of 128 x 128, in float; or something else.
enum class DecoderBlockScales : int32_t { kRows = 0, kBlocks = 1, kOther = 2 };

struct DecoderBlockProblem {
  DataType type = DataType::kBF16;  // of a, the residual, norms, scales and d: 16-bit
  int64_t m = 0;
  int64_t attention = 0, hidden = 0, inter = 0, next = 0;  // columns of a, of the residual, of h, of d
  WeightFormat weights = WeightFormat::kInt4;              // or kFp8E4M3
  int64_t group_size = 0;                                  // int4: k of a scale; 0: all of k
  DecoderBlockScales scales = DecoderBlockScales::kRows;   // e4m3
  bool batch_invariant = false;

  /// Rows and columns of the weights.
  int64_t n(int product) const { return product == 1 ? 2 * inter : product == 3 ? next : hidden; }
  int64_t k(int product) const { return product == 0 ? attention : product == 2 ? inter : hidden; }
  bool operator==(DecoderBlockProblem const& other) const;
};

struct DecoderBlockOperands {
  struct Product {
    void const* weight = nullptr;  // packed int4 (w4_layout.h), or e4m3 [n, k], leading dimension ld_weight
    int64_t ld_weight = 0;
    void const* scales = nullptr;  // int4: [k / group_size, n], leading dimension ld_scales; e4m3: float, contiguous, as gemm_fp8's are
    int64_t ld_scales = 0;
    bool one_scale = false;      // e4m3: of the whole weight
    void const* norm = nullptr;  // [k], of products 1 and 3
    void const* bias = nullptr;  // [n] or null; not of product 1
    DataType bias_type = DataType::kBF16;
  } products[kDecoderBlockProducts];
  void const* a = nullptr;   // [m, attention]; all matrices are contiguous, and begin at multiples of 16 bytes
  void* residual = nullptr;  // [m, hidden]
  void* d = nullptr;         // [m, next]
  float eps = 0.0f, weight_offset = 0.0f;
  Activation activation = Activation::kSilu;
  bool weights_are_constant = false;  // nothing that still runs writes weights, scales or norms: they may be read before the launch's turn
};

struct DecoderBlockPlan {
  bool one_launch = false;
  int32_t ctas = 0, stages = 0;  // all CTAs are resident together; stages of the ring of weights
  int32_t ahead = 0;             // stages that are under way at a time
  int32_t smem_bytes = 0;        // of a CTA
  size_t workspace_bytes = 0;    // need not be initialised; 128-byte aligned
  char reason[200] = {0};
};

/// forced: one launch wherever it is possible, not only where it is expected to be faster. Pure and thread-safe.
/// @return kInvalidArgument: sizes or types; or one launch is forced and not possible.
Status plan_decoder_block(DecoderBlockProblem const& problem, DeviceProperties const& device, bool forced, DecoderBlockPlan* plan);

/// Launches a plan of one launch. `workspace` belongs to this launch alone.
Status run_decoder_block(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, DecoderBlockOperands const& operands,
                         DeviceProperties const& device, void* workspace, size_t workspace_bytes, bool programmatic, Stream stream);

}  // namespace minfer
