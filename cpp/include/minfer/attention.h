// Attention: out = softmax(scale * q . k^T) . v over the keys that each query sees, and lse, the logarithm of the softmax's denominator.
// Keys and values are tensors, or lie in a cache, paged or contiguous, as 16-bit numbers or codes.
//
//   AttentionProblem   what is computed: sizes, types, masks (no pointers)
//   plan_attention     pure: problem x device x options -> AttentionPlan
//   run_attention      launches a plan on a stream; allocates nothing, synchronises nothing
#pragma once

#include "minfer/gemm.h"
#include "minfer/registry.h"
#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

struct AttentionProblem {
  int64_t batch = 0;
  int64_t heads_q = 0, heads_kv = 0;     // query head h reads KV head h / (heads_q / heads_kv)
  int64_t seqlen_q = 0, seqlen_k = 0;    // of each sequence; varlen: of the longest
  int64_t tokens_q = 0, tokens_k = 0;    // of all sequences: batch * seqlen; varlen: rows of q, k and v
  int64_t head_dim = 0, head_dim_v = 0;  // multiples of 8
  // Keys that a query sees before and behind the one it is aligned to, where the last query is aligned to the last key; < 0: all.
  int64_t window_left = -1, window_right = -1;
  DataType type = DataType::kF16;
  bool varlen = false;  // the sequences of q lie end to end, and so do those of k and v unless they are cached
  // Keys and values in a cache. How many a sequence has is known on the device only; seqlen_k is the upper limit.
  bool cached = false, paged = false;
  WeightFormat kv_format = WeightFormat::kDense;  // kDense: 16 bits, of q's type; kFp8E4M3, kInt8 (symmetric), kInt4
  int64_t pages = 0, page_size = 0;               // a contiguous cache counts as one page for each sequence
  bool scale_per_head = false;                    // fp8: every KV head has a scale; else there is one for all
  int64_t group_tokens = 0, groups_v = 0;         // int4: tokens that share a scale of K, scales of a token of V
  int64_t num_splits = 0;                         // splits of each sequence's keys; 0: as many as fill the device
  // A query's bits depend on itself and on the keys and values that it sees alone; num_splits must be 0.
  bool batch_invariant = false;

  /// Whether all members are equal, so that a plan of one is a plan of the other.
  bool operator==(AttentionProblem const& other) const;
};

/// What is done to scores and to the softmax beside the mask. Kernels take it as it is, as a member of their parameters.
struct SoftmaxOptions {
  float scale = 1.0f;           // of the products q . k
  float softcap = 0.0f;         // > 0: scores are softcap * tanh(score / softcap)
  void const* sinks = nullptr;  // [heads_q] of q's type: each counts in the denominators of its head; or null
};

/// Strides are in elements; that of the last mode is 1.
struct AttentionOperands {
  void const *q = nullptr, *k = nullptr, *v = nullptr;              // [batch, seqlen, heads, head_dim]; varlen: [tokens, heads, head_dim]
  int64_t q_strides[3] = {}, k_strides[3] = {}, v_strides[3] = {};  // of batch, row, head
  void* out = nullptr;                                              // shaped as q with head_dim_v, contiguous
  float* lse = nullptr;
  int64_t lse_strides[2] = {};                                     // of batch (unused with varlen) and head; queries are contiguous
  int32_t const *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;  // varlen: [batch + 1]
  SoftmaxOptions softmax;
  // With a cache, k and v are [pages, page_size, heads_kv, head_dim] of codes, strides in their elements; an element of int4 is a byte of
  // two codes, of which the even one is the lower half.
  int32_t const* seq_lens = nullptr;     // [batch]
  int32_t const* block_table = nullptr;  // [batch, ..] the pages of each sequence, in order
  int64_t block_table_stride = 0;
  void const *k_scale = nullptr, *v_scale = nullptr;  // see attention_paged's documentation; those of int8 and int4 are 16-byte aligned
  void const *k_residual = nullptr, *v_residual = nullptr;  // int4: [batch, group_tokens, heads_kv, head_dim] of q's type
};

struct AttentionPlan {
  KernelInfo const* kernel = nullptr;
  int64_t packed_heads = 1;  // query heads of one KV head that lie next to each other in a tile of queries
  bool counted = false;      // persistent CTAs take their tiles from a counter in the workspace
  int64_t box_rows = 0;      // rows of one TMA load of K and V
  // Split-KV kernels. An output tile has up to 8 * row_tiles rows; a CTA computes at least min_key_blocks key blocks, or a whole output
  // tile; partials are left in partial_slots slots of the workspace; CTAs of `lockstep` neighbouring KV heads compute over the same keys at
  // the same time.
  int64_t row_tiles = 0, min_key_blocks = 0, partial_slots = 0, lockstep = 1;
  // Batch-invariant kernels. Keys are divided into splits of split_keys keys; 0: all keys are one. A sequence of at most split_rows packed
  // rows and max_splits splits has its splits computed by different CTAs, which leave slot_rows rows in each of partial_slots slots; 0:
  // there is none. Outside of the mode these kernels compute few tiles of queries over many keys, those of each sequence in split_count
  // splits.
  int64_t split_keys = 0, split_rows = 0, max_splits = 0, slot_rows = 0, split_count = 0;
  int64_t ctas = 0;            // set for split-KV and portable kernels
  size_t workspace_bytes = 0;  // of any content; aligned to 256 bytes
  double predicted_us = 0, floor_us = 0;
  PlanSource source = PlanSource::kAnalytic;
  char reason[200] = {0};
};

struct AttentionPlanOptions {
  char const* kernel = nullptr;  // force this kernel by name
  bool only_runnable = true;     // false: also kernels without code in this build
};

/// Chooses the kernel: the one asked for by name, else the one with the shortest predicted time.
/// @return kInvalidArgument (sizes, types), kUnknownKernel, kNotCompiled, kNotSupported.
Status plan_attention(AttentionProblem const& problem, DeviceProperties const& device, AttentionPlanOptions const& options,
                      AttentionPlan* plan);

/// Launches the plan on `stream`; `workspace` holds plan.workspace_bytes bytes. Every element of out and lse is written.
Status run_attention(AttentionPlan const& plan, AttentionProblem const& problem, AttentionOperands const& operands,
                     DeviceProperties const& device, void* workspace, size_t workspace_bytes, Stream stream);

/// A state: attention over a subset of the keys. Strides are in elements.
struct AttentionState {
  void const* out = nullptr;              // [batch, seqlen, heads, head_dim_v]
  float const* lse = nullptr;             // [batch, heads, seqlen]; -inf: there was no key, and out may hold anything
  int64_t out_strides[4] = {0, 0, 0, 0};  // rows that are contiguous and 16-byte aligned in all states are faster
  int64_t lse_strides[3] = {0, 0, 0};
};

/// The attention over the keys of all states: lse = log(sum of exp(lse_i)), out = sum of out_i exp(lse_i - lse).
struct AttentionMerge {
  DataType type = DataType::kF16;          // of the states' outs and of out
  AttentionState const* states = nullptr;  // on the host
  int64_t count = 0;                       // >= 1
  int64_t batch = 0, seqlen = 0, heads = 0, head_dim_v = 0;
  void* out = nullptr;   // [batch, seqlen, heads, head_dim_v], contiguous, 16-byte aligned; must not overlap a state's out
  float* lse = nullptr;  // [batch, heads, seqlen], contiguous
};

/// Size of the workspace of a merge, 256-byte aligned and of any content: 0 for up to 16 states, which are merged by one launch.
size_t merge_attention_states_workspace(AttentionMerge const& merge);

/// Adds in float32 in the order of the states and rounds out once. programmatic: as in append_to_kv_cache().
Status merge_attention_states(AttentionMerge const& merge, void* workspace, size_t workspace_bytes, bool programmatic, Stream stream);

}  // namespace minfer
