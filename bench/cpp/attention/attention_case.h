// One attention problem of a sweep: what is computed, its operands in device memory, the work it is.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/attention_reference.h"
#include "common/buffers.h"
#include "common/check.h"
#include "common/device_ops.h"
#include "minfer/attention.h"

namespace minfer::bench {

/// kPrefill: keys and values are tensors; kDecode: they lie in a cache.
enum class AttentionStage : int32_t { kPrefill = 0, kDecode = 1 };
inline char const* name_of(AttentionStage s) { return s == AttentionStage::kPrefill ? "prefill" : "decode"; }

struct AttentionCase {
  AttentionStage stage = AttentionStage::kPrefill;
  AttentionProblem problem;
  bool causal = true;

  AttentionCase(AttentionStage stage, DataType type, int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t head_dim, int64_t queries,
                int64_t keys, bool causal)
      : stage(stage), causal(causal) {
    AttentionProblem& p = problem;
    p.type = type;
    p.batch = batch;
    p.heads_q = heads_q;
    p.heads_kv = heads_kv;
    p.head_dim = p.head_dim_v = head_dim;
    p.seqlen_q = queries;
    p.seqlen_k = keys;
    p.tokens_q = batch * queries;
    p.tokens_k = batch * keys;
    p.window_right = causal ? 0 : -1;
  }

  /// page 0: contiguous. The keys must be whole pages, and those of int4 whole groups of 32 tokens.
  void set_cache(WeightFormat format, int64_t page, int64_t splits) {
    AttentionProblem& p = problem;
    p.cached = true;
    p.paged = page > 0;
    p.kv_format = format;
    p.page_size = page > 0 ? page : p.seqlen_k;
    p.pages = p.batch * p.seqlen_k / p.page_size;
    p.num_splits = splits;
    p.scale_per_head = true;
    if (format == WeightFormat::kInt4) {
      p.group_tokens = p.page_size % 64 == 0 ? 64 : 32;
      p.groups_v = p.head_dim_v % 64 == 0 ? p.head_dim_v / 64 : p.head_dim_v / 32;
    }
  }

  std::string layout() const {
    return !problem.cached ? "-" : problem.paged ? std::to_string(problem.page_size) : std::string("contiguous");
  }
  char const* format() const { return problem.kv_format == WeightFormat::kDense ? "16bit" : name_of(problem.kv_format); }

  // Of an operand, in bytes; K and V have as many.
  int64_t q_bytes() const { return problem.tokens_q * problem.heads_q * problem.head_dim * 2; }
  int64_t out_bytes() const { return problem.tokens_q * problem.heads_q * problem.head_dim_v * 2; }
  int64_t lse_bytes() const { return problem.tokens_q * problem.heads_q * 4; }
  int64_t codes_bytes() const { return problem.tokens_k * problem.heads_kv * problem.head_dim * bits_of(problem.kv_format) / 8; }
  int64_t scale_elements(bool of_k) const {
    AttentionProblem const& p = problem;
    switch (p.kv_format) {
      case WeightFormat::kFp8E4M3: return p.heads_kv;
      case WeightFormat::kInt8: return p.tokens_k * p.heads_kv;
      case WeightFormat::kInt4: return 2 * p.heads_kv * (of_k ? p.tokens_k / p.group_tokens * p.head_dim : p.tokens_k * p.groups_v);
      default: return 0;
    }
  }
  int64_t scale_bytes(bool of_k) const { return scale_elements(of_k) * (problem.kv_format == WeightFormat::kInt4 ? 2 : 4); }
  int64_t residual_bytes() const { return problem.batch * problem.group_tokens * problem.heads_kv * problem.head_dim * 2; }

  /// Pairs of a query and a key that it sees.
  double pairs() const {
    double const q = double(problem.seqlen_q), k = double(problem.seqlen_k);
    double const hidden = !causal ? 0.0 : q <= k ? q * (q - 1) / 2 : q * k - k * (k + 1) / 2;
    return double(problem.batch) * (q * k - hidden);
  }
};

/// What a launch must do at least.
struct AttentionWork {
  double bytes, flops, floor_us;

  AttentionWork(AttentionCase const& c, DeviceProperties const& device) {
    AttentionProblem const& p = c.problem;
    bytes = double(c.q_bytes() + c.out_bytes() + c.lse_bytes() + 2 * c.codes_bytes() + c.scale_bytes(true) + c.scale_bytes(false));
    flops = 2.0 * c.pairs() * double(p.heads_q) * double(p.head_dim + p.head_dim_v);
    floor_us = std::max(bytes / device.read_bandwidth, flops / device.matrix_rate);
  }
};

/// Sets of operands filled with random numbers; lengths and the table of pages, in random order, are the same in all.
class AttentionSets {
 public:
  /// @param count 0: enough to pass three L2s' worth of bytes between two uses of a set
  AttentionSets(Arena& arena, AttentionCase const& c, int64_t l2_bytes, int64_t count, cudaStream_t stream) : case_(c) {
    AttentionProblem const& p = c.problem;
    int64_t const bytes[] = {c.q_bytes(),        c.codes_bytes(),    c.codes_bytes(), c.scale_bytes(true), c.scale_bytes(false),
                             c.residual_bytes(), c.residual_bytes(), c.out_bytes(),   c.lse_bytes()};
    int64_t per_set = 0;
    for (int64_t b : bytes) per_set += round_up(b, kCarveAlignment);
    if (count == 0) count = rotation_sets(per_set, l2_bytes);
    int64_t const lengths_bytes = p.batch * 4, table_bytes = p.paged ? p.pages * 4 : 0;
    arena.reset(count * per_set + round_up(lengths_bytes, kCarveAlignment) + round_up(table_bytes, kCarveAlignment));
    int32_t const* const lengths = upload(arena, std::vector<int32_t>(size_t(p.batch), int32_t(p.seqlen_k)), stream);
    std::vector<int32_t> order(p.paged ? size_t(p.pages) : 0);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    int32_t const* const table = upload(arena, order, stream);
    for (int64_t i = 0; i < count; ++i) {
      void* operand[std::size(bytes)];
      for (size_t j = 0; j < std::size(bytes); ++j) operand[j] = bytes[j] > 0 ? arena.carve(bytes[j]) : nullptr;
      uint64_t const seed = uint64_t(i) * std::size(bytes);
      fill_normal(operand[0], p.type, c.q_bytes() / 2, 1.0f, seed, stream);
      for (int side = 0; side < 2; ++side) {
        fill_codes(operand[1 + side], seed + 1 + uint64_t(side), stream);
        fill_scales(operand[3 + side], side == 0, seed + 3 + uint64_t(side), stream);
        fill_normal(operand[5 + side], p.type, c.residual_bytes() / 2, 1.0f, seed + 5 + uint64_t(side), stream);
      }
      AttentionOperands& o = sets_.emplace_back();
      o.q = operand[0];
      o.k = operand[1];
      o.v = operand[2];
      o.k_scale = operand[3];
      o.v_scale = operand[4];
      o.k_residual = operand[5];
      o.v_residual = operand[6];
      o.out = operand[7];
      o.lse = static_cast<float*>(operand[8]);
      int64_t const row = p.kv_format == WeightFormat::kInt4 ? p.head_dim / 2 : p.head_dim;  // elements of a head of K and V
      set_strides(o.q_strides, p.seqlen_q, p.heads_q, p.head_dim);
      for (auto* strides : {&o.k_strides, &o.v_strides}) {
        set_strides(*strides, p.cached ? p.page_size : p.seqlen_k, p.heads_kv, row);
        if (p.kv_format == WeightFormat::kDense) continue;
        (*strides)[1] = row;  // as minfer.allocate_kv_cache lays codes out: a head's rows of a page follow each other
        (*strides)[2] = p.page_size * row;
      }
      o.lse_strides[0] = p.heads_q * p.seqlen_q;
      o.lse_strides[1] = p.seqlen_q;
      o.softmax.scale = 1.0f / std::sqrt(float(p.head_dim));
      if (p.cached) o.seq_lens = lengths;
      if (p.paged) o.block_table = table;
      o.block_table_stride = p.paged ? p.seqlen_k / p.page_size : 0;
    }
    check(cudaStreamSynchronize(stream), "operands");  // before the host's vectors go
  }

  AttentionOperands const& operator[](int64_t i) const { return sets_[size_t(i)]; }
  int64_t count() const { return int64_t(sets_.size()); }

  /// Set 0's results.
  void poison_results(cudaStream_t stream) const {
    poison(sets_[0].out, case_.out_bytes(), stream);
    poison(sets_[0].lse, case_.lse_bytes(), stream);
  }

 private:
  static void set_strides(int64_t (&strides)[3], int64_t rows, int64_t heads, int64_t row) {
    strides[0] = rows * heads * row;
    strides[1] = heads * row;
    strides[2] = row;
  }

  static int32_t const* upload(Arena& arena, std::vector<int32_t> const& values, cudaStream_t stream) {
    if (values.empty()) return nullptr;
    int64_t const bytes = int64_t(values.size()) * 4;
    void* const data = arena.carve(bytes);
    check(cudaMemcpyAsync(data, values.data(), size_t(bytes), cudaMemcpyHostToDevice, stream), "upload");
    return static_cast<int32_t const*>(data);
  }

  /// Values are of magnitude 1.
  void fill_codes(void* codes, uint64_t seed, cudaStream_t stream) const {
    switch (case_.problem.kv_format) {
      case WeightFormat::kDense: return fill_normal(codes, case_.problem.type, case_.codes_bytes() / 2, 1.0f, seed, stream);
      case WeightFormat::kFp8E4M3: return fill_bytes(codes, case_.codes_bytes(), 0x9f, 0x20, seed, stream);  // 2^-3 to 2
      default: return fill_bytes(codes, case_.codes_bytes(), 0xff, 0x00, seed, stream);
    }
  }
  void fill_scales(void* scales, bool of_k, uint64_t seed, cudaStream_t stream) const {
    AttentionProblem const& p = case_.problem;
    int64_t const count = case_.scale_elements(of_k);
    switch (p.kv_format) {
      case WeightFormat::kFp8E4M3: return fill_uniform(scales, DataType::kF32, count, 0.5f, 1.5f, seed, stream);
      case WeightFormat::kInt8: return fill_uniform(scales, DataType::kF32, count, 0.5f / 64, 1.5f / 64, seed, stream);
      case WeightFormat::kInt4: return fill_scales_and_minima(scales, count, of_k ? p.head_dim : p.groups_v * p.page_size, seed, stream);
      default: return;
    }
  }

  AttentionCase case_;
  std::vector<AttentionOperands> sets_;
};

/// Norm-wise error that a correct kernel stays under: exponentials and out are rounded to 16 bits, quantised keys' and values' scales with
/// the queries and the exponentials.
inline double attention_error_limit(DataType type) { return 2 * (type == DataType::kF16 ? 0x1p-11 : 0x1p-8); }
/// Of lse, absolute.
constexpr double kLseErrorLimit = 2e-3;

}  // namespace minfer::bench
