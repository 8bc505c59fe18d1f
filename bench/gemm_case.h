// One problem of a sweep: what is computed, its operands in device memory, how it is written in a table.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "common/buffers.h"
#include "common/device_ops.h"
#include "minfer/gemm.h"

namespace minfer::bench {

struct GemmCase {
  GemmProblem problem;
  float alpha = 1, beta = 0;
  bool bias = false;
  Activation activation = Activation::kNone;

  int64_t d_columns() const { return problem.gated ? problem.n / 2 : problem.n; }

  /// Bytes that one launch reads and writes at least.
  double bytes() const {
    GemmProblem const& p = problem;
    double const d = double(p.m) * double(d_columns()) * size_of(p.d_type);
    double const inputs = (double(p.m) + double(p.n)) * double(p.k) * size_of(p.ab_type);
    return double(p.batch) * (inputs + d * (p.has_c ? 2 : 1));
  }

  double flops() const { return 2.0 * double(problem.m) * double(problem.n) * double(problem.k) * double(problem.batch); }

  /// BLAS letters of A and B: "tn" is A [m, k] row-major and B = weight.t().
  std::string layout() const { return std::string(problem.a_major == Major::kK ? "t" : "n") + (problem.b_major == Major::kK ? "n" : "t"); }
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

/// Sets of operands filled with normal random numbers; results have deviation about 1 for any k.
class GemmSets {
 public:
  /// @param sets 0: enough to pass three L2s' worth of bytes between two uses of a set
  GemmSets(Arena& arena, GemmCase const& c, int64_t l2_bytes, int64_t sets, cudaStream_t stream) {
    GemmProblem const& p = c.problem;
    int64_t const a_count = p.batch * p.m * p.k, b_count = p.batch * p.n * p.k, d_count = p.batch * p.m * c.d_columns();
    int64_t const ab_size = size_of(p.ab_type);
    d_bytes_ = d_count * size_of(p.d_type);
    int64_t const bytes[] = {a_count * ab_size, b_count * ab_size, p.has_c ? d_bytes_ : 0, c.bias ? p.n * ab_size : 0, d_bytes_};
    int64_t per_set = 0;
    for (int64_t b : bytes) per_set += round_up(b, kCarveAlignment);
    if (sets == 0) sets = rotation_sets(per_set, l2_bytes);
    arena.reset(sets * per_set);
    for (int64_t i = 0; i < sets; ++i) {
      GemmOperands o;
      void* a = arena.carve(bytes[0]);
      void* b = arena.carve(bytes[1]);
      void* source = arena.carve(bytes[2]);
      void* bias = arena.carve(bytes[3]);
      uint64_t const seed = uint64_t(4 * i);
      fill_normal(a, p.ab_type, a_count, 1.0f, seed, stream);
      fill_normal(b, p.ab_type, b_count, 1.0f / std::sqrt(float(p.k > 0 ? p.k : 1)), seed + 1, stream);
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
      o.d = arena.carve(bytes[4]);
      o.ldd = c.d_columns();
      o.d_batch_stride = p.m * c.d_columns();
      o.alpha = c.alpha;
      o.beta = c.beta;
      o.activation = c.activation;
      sets_.push_back(o);
    }
  }

  GemmOperands const& operator[](int64_t i) const { return sets_[size_t(i)]; }
  std::vector<GemmOperands> const& all() const { return sets_; }
  int64_t count() const { return int64_t(sets_.size()); }
  int64_t d_bytes() const { return d_bytes_; }

 private:
  std::vector<GemmOperands> sets_;
  int64_t d_bytes_ = 0;
};

/// Norm-wise error that a correct kernel stays under: one rounding to D's type (twice over, for activations that cancel) and
/// fp32 accumulation, whose error grows with the square root of k.
inline double error_limit(GemmProblem const& p) {
  double const rounding = p.d_type == DataType::kF16 ? 0x1p-11 : p.d_type == DataType::kBF16 ? 0x1p-8 : 0x1p-24;
  return 2 * rounding + 2e-6 * std::sqrt(std::max(1.0, double(p.k) / 256));
}

}  // namespace minfer::bench
