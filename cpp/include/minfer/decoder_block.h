// What lies between the attention of a decoder layer and that of the next one, for one or two tokens and weights of 4, 8 or 16 bits, in
// a launch:
//   x = residual + a . Wo^T + bias;   h = act(gate) * up of rms_norm(x) . Wgu^T;   x += h . Wd^T + bias;   residual = x;
//   d = rms_norm(x) . Wn^T + bias
// Of the last layer, behind which there is no attention, d has no columns.
// The attention in front, of one token over a paged cache of 16 bits, can be part of the launch: then a is computed, not given. Then the
// launch may be of several layers, one behind the other: d of each is the next one's q, k and v.
//
//   DecoderBlockProblem  what is computed: sizes and types (no pointers)
//   plan_decoder_block   pure: problem x device -> DecoderBlockPlan: the launch, or why there is none and products are launched one by one
//   run_decoder_block    launches a plan that has one; allocates nothing, synchronises nothing
#pragma once

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

constexpr int64_t kDecoderHeadDim = 128;  // of an attention that is part of the launch
constexpr int kDecoderBlockProducts = 4;  // the output projection, gate and up, down, the next layer's first projection

/// What the scales of all e4m3 weights are of: rows, or whole weights; or blocks of 128 x 128, in float; or something else.
enum class DecoderBlockScales : int32_t { kRows = 0, kBlocks = 1, kOther = 2 };

struct DecoderBlockProblem {
  DataType type = DataType::kBF16;  // of a, the residual, norms, scales and d: 16-bit
  int64_t m = 0;
  int64_t attention = 0, hidden = 0, inter = 0, next = 0;  // columns of a, of the residual, of h, of d; next = 0: there is no d
  WeightFormat weights = WeightFormat::kInt4;              // or kFp8E4M3, or kDense: of a's type
  int64_t group_size = 0;                                  // int4: k of a scale; 0: all of k
  DecoderBlockScales scales = DecoderBlockScales::kRows;   // e4m3
  bool batch_invariant = false;
  int64_t heads = 0, heads_kv = 0;  // of the attention in front, where it is part of the launch: attention = heads * 128; else 0
  int64_t capacity = 0;             // of its sequence: the rows of the table's pages
  int64_t layers = 1;               // of one launch, all of these sizes; of more than one, `next` is that of the last: 0, or qkv()

  int64_t qkv() const { return (heads + 2 * heads_kv) * kDecoderHeadDim; }
  /// Rows and columns of the weights.
  int64_t n(int product) const { return product == 1 ? 2 * inter : product < 3 ? hidden : layers > 1 ? qkv() : next; }
  int64_t k(int product) const { return product == 0 ? attention : product == 2 ? inter : hidden; }
  bool operator==(DecoderBlockProblem const& other) const;
};

/// The attention of one token, which is stored and attends to what is in the cache and to itself. Heads have 128 elements; q and k are
/// normalised where there are weights, and rotated in halves, as minfer/kv_cache.h's NormRope does it. Of several layers in a launch, those
/// behind the first have caches, weights and a window of their own; the rest is the first one's.
struct DecoderAttention {
  void const* qkv = nullptr;                    // [heads + 2 * heads_kv, 128], contiguous, 16-byte aligned
  void *k_cache = nullptr, *v_cache = nullptr;  // [pages, page_size, heads_kv, 128]; rows 16-byte aligned
  int64_t strides[3] = {0, 0, 0};               // of both, in elements: of all modes but the last, which is contiguous
  int64_t pages = 0, page_size = 0;             // page_size: a power of two
  int32_t const* table = nullptr;               // [capacity / page_size], the sequence's pages
  int32_t const* seq_lens = nullptr;            // [1], the token among them
  int64_t const* slots = nullptr;               // [1]
  void const* positions = nullptr;              // [1]
  bool positions_64bit = true;
  float const* cos_sin = nullptr;                        // [length, 128]: cosines, then sines; contiguous
  int64_t length = 0;                                    // positions outside of 0..length - 1 read zeros
  void const *q_weight = nullptr, *k_weight = nullptr;   // [128], 16-byte aligned, or null
  float eps = 0.0f, weight_offset = 0.0f, scale = 1.0f;  // scale: of the scores
  int64_t window = -1;                                   // how many keys before its own the token sees at most, or -1: all
};

constexpr int32_t kMostDecoderRanks = 8;

/// A layer that is divided among GPUs of a host: each has some heads, and some columns of the MLP. What their output projections, and their
/// down projections, add up to is exchanged within the launch; the residual, whose bits are the same on all of them, is added once. All
/// ranks must launch the same layers in the same order, and all of a launch's thread blocks must find room on each.
struct DecoderExchange {
  int32_t ranks = 1, rank = 0;
  void* buffers[kMostDecoderRanks] = {};  // of all ranks, where this process has mapped them: decoder_exchange_bytes() each, first zeros
};

/// Of a layer. Of several in a launch, those behind the first have products and attention of their own; the rest is the first one's.
struct DecoderBlockOperands {
  struct Product {
    void const* weight = nullptr;  // packed int4 (w4_layout.h), or [n, k], leading dimension ld_weight
    int64_t ld_weight = 0;
    void const* scales = nullptr;  // int4: [k / group_size, n], leading dimension ld_scales; e4m3: float, contiguous, as gemm_fp8's are
    int64_t ld_scales = 0;
    bool one_scale = false;      // e4m3: of the whole weight
    void const* norm = nullptr;  // [k], of products 1 and 3 (all of product 3 is ignored where next = 0)
    void const* bias = nullptr;  // [n] or null; not of product 1
    DataType bias_type = DataType::kBF16;
  } products[kDecoderBlockProducts];
  DecoderAttention attention;  // of a problem with heads
  DecoderExchange exchange;    // of a problem with heads
  void const* a = nullptr;     // [m, attention], of one without; all matrices are contiguous, and begin at multiples of 16 bytes
  void* residual = nullptr;    // [m, hidden]
  void* d = nullptr;           // [m, next]
  float eps = 0.0f, weight_offset = 0.0f;
  Activation activation = Activation::kSilu;
  bool weights_are_constant = false;  // nothing that still runs writes weights, scales or norms: they may be read before the launch's turn.
                                      // Nor what attention reads, except qkv
};

struct DecoderBlockPlan {
  bool one_launch = false;
  int32_t ctas = 0, stages = 0;  // all CTAs are resident together; stages of the ring of weights
  int32_t ahead = 0;             // stages that are under way at a time
  int32_t splits = 0;            // of the sequence, where attention is part of the launch
  int32_t most_layers = 1;       // of these sizes that a launch may have
  int32_t smem_bytes = 0;        // of a CTA
  // In the batch-invariant mode: the ranges of k that a row of each weight is summed in, and among how many threads minfer.rms_norm would
  // divide a row.
  int32_t ranges[kDecoderBlockProducts] = {}, norm_threads = 0;
  size_t workspace_bytes = 0;  // need not be initialised; 128-byte aligned
  char reason[200] = {0};
};

/// forced: one launch wherever it is possible, not only where it is expected to be faster. Pure and thread-safe.
/// @return kInvalidArgument: sizes or types; or one launch is forced and not possible.
Status plan_decoder_block(DecoderBlockProblem const& problem, DeviceProperties const& device, bool forced, DecoderBlockPlan* plan);

/// Of a rank's exchange buffer, for layers of `hidden` columns.
size_t decoder_exchange_bytes(int64_t hidden, int32_t ranks);

/// Launches a plan of one launch. `workspace` belongs to this launch alone.
/// layers: problem.layers of them.
Status run_decoder_block(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, DecoderBlockOperands const* layers,
                         DeviceProperties const& device, void* workspace, size_t workspace_bytes, bool programmatic, Stream stream);

}  // namespace minfer
