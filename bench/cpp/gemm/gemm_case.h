// One problem of a sweep: what is computed, its operands in device memory, how it is written in a table.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "common/buffers.h"
#include "common/check.h"
#include "common/device_ops.h"
#include "minfer/gemm.h"
#include "minfer/w4a16.h"

namespace minfer::bench {

struct GemmCase {
  GemmProblem problem;
  float alpha = 1, beta = 0;
  bool bias = false;
  Activation activation = Activation::kNone;

  int64_t d_columns() const { return problem.gated ? problem.n / 2 : problem.n; }

  double flops() const { return 2.0 * double(problem.m) * double(problem.n) * double(problem.k) * double(problem.batch); }

  bool quantised() const { return problem.b_format != WeightFormat::kDense; }

  /// BLAS letters of A and B: "tn" is A [m, k] row-major and B = weight.t().
  std::string layout() const { return std::string(problem.a_major == Major::kK ? "t" : "n") + (problem.b_major == Major::kK ? "n" : "t"); }

  /// What tells operands of the same sizes and types apart: the layout, or how the weight is quantised ("int4/128", "int4/k zeros").
  std::string operands() const {
    if (!quantised()) return layout();
    std::string const group = problem.group_size > 0 ? std::to_string(problem.group_size) : std::string("k");
    return std::string(name_of(problem.b_format)) + "/" + group + (problem.has_zeros ? " zeros" : "");
  }

  /// The same product with B in 16 bits.
  GemmCase dense() const {
    GemmCase c = *this;
    c.problem.b_format = WeightFormat::kDense;
    c.problem.group_size = 0;
    c.problem.has_zeros = false;
    return c;
  }
};

/// Largest power of two up to 16, in bytes, that divides a contiguous operand's leading dimension; carved bases are aligned to 256.
inline int32_t alignment_of(int64_t leading_dimension, DataType type) {
  int64_t const bytes = leading_dimension * size_of(type);
  int32_t alignment = 16;
  while (bytes % alignment != 0) alignment /= 2;
  return alignment;
}

/// Sets the alignments that dense operands of these sizes have.
inline void set_alignments(GemmProblem* p, int64_t d_columns) {
  p->a_alignment = alignment_of(p->a_major == Major::kK ? p->k : p->m, p->ab_type);
  p->b_alignment = alignment_of(p->b_major == Major::kK ? p->k : p->n, p->ab_type);
  p->d_alignment = alignment_of(d_columns, p->d_type);
  p->c_alignment = p->has_c && alignment_of(p->n, p->d_type) == 16 ? 16 : 0;
}

/// Sets of operands filled with random numbers; results have deviation about 1 for any k.
class GemmSets {
 public:
  /// @param count 0: enough to pass three L2s' worth of bytes between two uses of a set
  /// @param all_dense of a quantised B, whether every set has its 16-bit form too, for a baseline; else only the first, for the reference
  GemmSets(Arena& arena, GemmCase const& c, int64_t l2_bytes, int64_t count, bool all_dense, cudaStream_t stream) {
    GemmProblem const& p = c.problem;
    int64_t const a_count = p.batch * p.m * p.k, b_count = p.batch * p.n * p.k, d_count = p.batch * p.m * c.d_columns();
    int64_t const ab_size = size_of(p.ab_type), dense_bytes = b_count * ab_size;
    int64_t const groups = p.group_size > 0 ? (p.k + p.group_size - 1) / p.group_size : 1, scale_bytes = groups * p.n * ab_size;
    d_bytes_ = d_count * size_of(p.d_type);
    int64_t const bytes[] = {a_count * ab_size,
                             packed_weight_bytes(p.b_format, p.n, p.k) * p.batch,
                             c.quantised() ? scale_bytes : 0,
                             p.has_zeros ? scale_bytes : 0,
                             p.has_c ? d_bytes_ : 0,
                             c.bias ? p.n * ab_size : 0,
                             d_bytes_};
    int64_t per_set = 0;
    for (int64_t b : bytes) per_set += round_up(b, kCarveAlignment);
    if (count == 0) count = rotation_sets(per_set, l2_bytes);
    int64_t const dense_sets = c.quantised() ? (all_dense ? count : 1) : 0, codes_bytes = c.quantised() ? b_count : 0;
    arena.reset(count * per_set + dense_sets * round_up(dense_bytes, kCarveAlignment) + codes_bytes);
    uint8_t* codes = static_cast<uint8_t*>(arena.carve(codes_bytes));
    for (int64_t i = 0; i < count; ++i) {
      GemmOperands o;
      void* a = arena.carve(bytes[0]);
      void* b = arena.carve(bytes[1]);
      void* scales = arena.carve(bytes[2]);
      void* zeros = arena.carve(bytes[3]);
      void* source = arena.carve(bytes[4]);
      void* bias = arena.carve(bytes[5]);
      uint64_t const seed = uint64_t(8 * i);
      float const deviation = 1.0f / std::sqrt(float(p.k > 0 ? p.k : 1));
      fill_normal(a, p.ab_type, a_count, 1.0f, seed, stream);
      o.a = a;
      o.lda = p.a_major == Major::kK ? p.k : p.m;
      o.a_batch_stride = p.m * p.k;
      o.b = b;
      o.ldb = p.b_major == Major::kK ? p.k : p.n;
      o.b_batch_stride = p.n * p.k;
      if (p.has_c) {
        fill_normal(source, p.d_type, d_count, 1.0f, seed + 2, stream);
        o.c = source;
        o.c_type = p.d_type;
        o.c_stride_m = p.n;
        o.c_stride_n = 1;
        o.c_batch_stride = p.m * p.n;
      }
      if (c.bias) {
        fill_normal(bias, p.ab_type, p.n, 1.0f, seed + 3, stream);
        o.bias = bias;
        o.bias_type = p.ab_type;
      }
      o.d = arena.carve(bytes[6]);
      o.ldd = c.d_columns();
      o.d_batch_stride = p.m * c.d_columns();
      o.alpha = c.alpha;
      o.beta = c.beta;
      o.activation = c.activation;
      GemmOperands dense = o;
      if (c.quantised()) {
        float const unit = deviation / 4.6f;  // the deviation of a code
        fill_codes(codes, b_count, seed + 1, stream);
        fill_uniform(scales, p.ab_type, groups * p.n, 0.5f * unit, 1.5f * unit, seed + 4, stream);
        if (p.has_zeros) fill_uniform(zeros, p.ab_type, groups * p.n, 6.0f, 10.0f, seed + 5, stream);
        check(pack_weight(p.b_format, codes, p.n, p.k, p.k, b, stream), "pack_weight");
        o.b_scales = scales;
        o.b_zeros = p.has_zeros ? zeros : nullptr;
        o.ld_scales = o.ld_zeros = p.n;
        if (i < dense_sets) {
          void* w = arena.carve(dense_bytes);
          dequantise_codes(codes, scales, o.b_zeros, p.group_size, p.n, p.k, p.ab_type, w, stream);
          dense.b = w;
          dense_.push_back(dense);
        }
      } else {
        fill_normal(b, p.ab_type, b_count, deviation, seed + 1, stream);
        dense_.push_back(dense);
      }
      sets_.push_back(o);
    }
  }

  GemmOperands const& operator[](int64_t i) const { return sets_[size_t(i)]; }
  int64_t count() const { return int64_t(sets_.size()); }
  int64_t d_bytes() const { return d_bytes_; }

  /// The same operands with B in 16 bits: those of the reference (the first) and of the baselines.
  std::vector<GemmOperands> const& dense() const { return dense_; }

 private:
  std::vector<GemmOperands> sets_, dense_;
  int64_t d_bytes_ = 0;
};

/// Norm-wise error that a correct kernel stays under: one rounding to D's type (twice over, for activations that cancel) and
/// fp32 accumulation, whose error grows with the square root of k. Quantised weights that a kernel leaves unrounded are within the same.
inline double error_limit(GemmProblem const& p) {
  double const rounding = p.d_type == DataType::kF16 ? 0x1p-11 : p.d_type == DataType::kBF16 ? 0x1p-8 : 0x1p-24;
  return 2 * rounding + 2e-6 * std::sqrt(std::max(1.0, double(p.k) / 256));
}

}  // namespace minfer::bench
