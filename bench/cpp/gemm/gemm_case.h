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

/// Scales of operands of 8 bits: one each; of A's rows and B's columns; of 128 of k of a row of A, and of 128 x 128 of B.
enum class ScaleKind : int32_t { kOne = 0, kRows = 1, kBlocks = 2 };
constexpr ScaleKind kScaleKinds[] = {ScaleKind::kOne, ScaleKind::kRows, ScaleKind::kBlocks};
inline char const* name_of(ScaleKind kind) { return kind == ScaleKind::kOne ? "one" : kind == ScaleKind::kRows ? "rows" : "blocks"; }

constexpr int64_t kScaleBlock = 128;
inline int64_t scale_blocks(int64_t extent, int64_t block = kScaleBlock) { return (extent + block - 1) / block; }

inline bool is_8_bits(DataType type) { return type == DataType::kE4M3 || type == DataType::kS8; }

/// Deviation of random codes of 8 bits: the largest of a row are about the largest that there are.
inline float code_deviation(DataType type) { return type == DataType::kE4M3 ? 100.0f : 32.0f; }

/// Elements from a line along k to the next. Kernels of 8 bits read lines that begin at multiples of 16 bytes.
inline int64_t line_of(GemmProblem const& p) { return has_8_bits(p) ? round_up(p.k, 16) : p.k; }

struct GemmCase {
  GemmProblem problem;
  ScaleKind scales = ScaleKind::kRows;  // of operands of 8 bits
  float alpha = 1, beta = 0;
  bool bias = false;
  Activation activation = Activation::kNone;

  int64_t d_columns() const { return problem.gated ? problem.n / 2 : problem.n; }

  double flops() const { return 2.0 * double(problem.m) * double(problem.n) * double(problem.k) * double(problem.batch); }

  bool quantised() const { return problem.b_format != WeightFormat::kDense; }

  /// BLAS letters of A and B: "tn" is A [m, k] row-major and B = weight.t().
  std::string layout() const { return std::string(problem.a_major == Major::kK ? "t" : "n") + (problem.b_major == Major::kK ? "n" : "t"); }

  /// What tells operands of the same sizes and types apart: the layout, with the scales of 8 bits ("tn rows fast"), or how the weight is
  /// quantised ("int4/128", "int4/k zeros").
  std::string operands() const {
    if (has_8_bits(problem) && !quantised()) return layout() + " " + name_of(scales) + (problem.fast_accum ? " fast" : "");
    if (!quantised()) return layout();
    std::string const group = problem.group_size > 0 ? std::to_string(problem.group_size) : std::string("k");
    return std::string(name_of(problem.b_format)) + "/" + group + (problem.has_zeros ? " zeros" : "");
  }

  /// The same product with a quantised B in 16 bits.
  GemmCase dense() const {
    GemmCase c = *this;
    c.problem.b_format = WeightFormat::kDense;
    c.problem.group_size = 0;
    c.problem.has_zeros = false;
    return c;
  }

  /// What the reference computes: operands of 8 bits are float32 there.
  GemmProblem reference() const {
    GemmProblem p = dense().problem;
    if (has_8_bits(p)) p.ab_type = DataType::kF32;
    return p;
  }

  // Mean scales of 8 bits, so that products have deviation about 1. A single scale is its mean.
  float a_unit() const { return 1.0f / code_deviation(problem.ab_type); }
  float b_unit() const { return 1.0f / (code_deviation(problem.ab_type) * std::sqrt(float(problem.k > 0 ? problem.k : 1))); }

  // How many scales of 8 bits there are. A's of blocks are column-major, in columns of multiples of 16 bytes.
  int64_t a_scale_rows() const { return round_up(problem.m, 4); }
  int64_t b_scale_blocks() const { return scale_blocks(d_columns()) * scale_blocks(problem.k); }  // gated: of the gates, and of the ups
  int64_t a_scale_count() const {
    if (!has_8_bits(problem)) return 0;
    return scales == ScaleKind::kOne ? 1 : scales == ScaleKind::kRows ? problem.m : a_scale_rows() * scale_blocks(problem.k);
  }
  int64_t b_scale_count() const {
    if (!has_8_bits(problem)) return 0;
    return scales == ScaleKind::kOne ? 1 : scales == ScaleKind::kRows ? problem.n : (problem.gated ? 2 : 1) * b_scale_blocks();
  }
  OperandScales a_scales(void const* data) const {
    if (scales == ScaleKind::kBlocks) return {data, 1, a_scale_rows(), true};
    return {data, scales == ScaleKind::kRows ? 1 : 0};
  }
  OperandScales b_scales(void const* data) const {
    if (scales == ScaleKind::kBlocks)
      return {data, scale_blocks(problem.k), 1, true, false, problem.gated, problem.gated ? b_scale_blocks() : 0};
    return {data, scales == ScaleKind::kRows ? 1 : 0};
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
  p->a_alignment = alignment_of(p->a_major == Major::kK ? line_of(*p) : p->m, p->ab_type);
  p->b_alignment = alignment_of(p->b_major == Major::kK ? line_of(*p) : p->n, p->ab_type);
  p->d_alignment = alignment_of(d_columns, p->d_type);
  p->c_alignment = p->has_c && alignment_of(p->n, p->d_type) == 16 ? 16 : 0;
}

/// Sets of operands filled with random numbers; results have deviation about 1 for any k.
class GemmSets {
 public:
  /// @param count 0: enough to pass three L2s' worth of bytes between two uses of a set
  /// @param all_dense of a quantised B, whether every set has its 16-bit form too, for a baseline; else only the first, for the reference.
  /// Beside an A of 8 bits it has none.
  GemmSets(Arena& arena, GemmCase const& c, int64_t l2_bytes, int64_t count, bool all_dense, cudaStream_t stream) {
    GemmProblem const& p = c.problem;
    bool const narrow = has_8_bits(p);
    int64_t const line = line_of(p), d_count = p.batch * p.m * c.d_columns();
    int64_t const a_count = p.batch * p.m * line, b_count = p.batch * p.n * line;
    int64_t const ab_size = size_of(p.ab_type), dense_bytes = b_count * ab_size;
    DataType const bias_type = narrow ? p.d_type : p.ab_type;
    DataType const scale_type = narrow ? p.d_type : p.ab_type;  // of a quantised B
    int64_t const groups = p.group_size > 0 ? (p.k + p.group_size - 1) / p.group_size : 1, scale_bytes = groups * p.n * size_of(scale_type);
    d_bytes_ = d_count * size_of(p.d_type);
    int64_t const bytes[] = {a_count * ab_size,
                             c.quantised() ? packed_weight_bytes(p.b_format, p.n, p.k) * p.batch : dense_bytes,
                             c.quantised() ? scale_bytes : c.b_scale_count() * 4,
                             c.quantised() && !narrow ? (p.has_zeros ? scale_bytes : 0) : c.a_scale_count() * 4,
                             p.has_c ? d_bytes_ : 0,
                             c.bias ? p.n * size_of(bias_type) : 0,
                             d_bytes_};
    int64_t per_set = 0;
    for (int64_t b : bytes) per_set += round_up(b, kCarveAlignment);
    if (count == 0) count = rotation_sets(per_set, l2_bytes);
    int64_t const dense_sets = c.quantised() && !narrow ? (all_dense ? count : 1) : 0, codes_bytes = c.quantised() ? b_count : 0;
    int64_t const wide_a = narrow ? p.m * p.k * 4 : 0, wide_b = narrow ? p.n * p.k * 4 : 0;  // for the reference
    arena.reset(count * per_set + dense_sets * round_up(dense_bytes, kCarveAlignment) + round_up(codes_bytes, kCarveAlignment) +
                round_up(wide_a, kCarveAlignment) + round_up(wide_b, kCarveAlignment));
    uint8_t* codes = static_cast<uint8_t*>(arena.carve(codes_bytes));
    float* const reference_a = static_cast<float*>(arena.carve(wide_a));
    float* const reference_b = static_cast<float*>(arena.carve(wide_b));
    for (int64_t i = 0; i < count; ++i) {
      GemmOperands o;
      void* a = arena.carve(bytes[0]);
      void* b = arena.carve(bytes[1]);
      void* scales = arena.carve(bytes[2]);  // of B
      void* zeros = arena.carve(bytes[3]);   // of a quantised B; of 8 bits A's scales
      void* source = arena.carve(bytes[4]);
      void* bias = arena.carve(bytes[5]);
      uint64_t const seed = uint64_t(8 * i);
      float const deviation = 1.0f / std::sqrt(float(p.k > 0 ? p.k : 1));
      fill_normal(a, p.ab_type, a_count, narrow ? code_deviation(p.ab_type) : 1.0f, seed, stream);
      o.a = a;
      o.lda = p.a_major == Major::kK ? line : p.m;
      o.a_batch_stride = p.m * line;
      o.b = b;
      o.ldb = p.b_major == Major::kK ? line : p.n;
      o.b_batch_stride = p.n * line;
      if (p.has_c) {
        fill_normal(source, p.d_type, d_count, 1.0f, seed + 2, stream);
        o.c = source;
        o.c_type = p.d_type;
        o.c_stride_m = p.n;
        o.c_stride_n = 1;
        o.c_batch_stride = p.m * p.n;
      }
      if (c.bias) {
        fill_normal(bias, bias_type, p.n, 1.0f, seed + 3, stream);
        o.bias = bias;
        o.bias_type = bias_type;
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
        fill_uniform(scales, scale_type, groups * p.n, 0.5f * unit, 1.5f * unit, seed + 4, stream);
        if (p.has_zeros) fill_uniform(zeros, p.ab_type, groups * p.n, 6.0f, 10.0f, seed + 5, stream);
        check(pack_weight(p.b_format, codes, p.n, p.k, p.k, b, stream), "pack_weight");
        o.b_scales = scales;
        o.b_scales_type = scale_type;
        o.b_zeros = p.has_zeros ? zeros : nullptr;
        o.ld_scales = o.ld_zeros = p.n;
        if (i < dense_sets) {
          void* w = arena.carve(dense_bytes);
          dequantise_codes(codes, scales, o.b_zeros, p.group_size, p.n, p.k, p.ab_type, p.ab_type, w, stream);
          dense.b = w;
          dense_.push_back(dense);
        }
        if (narrow) {
          fill_uniform(zeros, DataType::kF32, c.a_scale_count(), 0.5f * c.a_unit(), 1.5f * c.a_unit(), seed + 5, stream);
          o.a_scale = c.a_scales(zeros);
          if (i == 0) dequantise_codes(codes, scales, nullptr, p.group_size, p.n, p.k, scale_type, DataType::kF32, reference_b, stream);
        }
      } else {
        fill_normal(b, p.ab_type, b_count, narrow ? code_deviation(p.ab_type) : deviation, seed + 1, stream);
        if (narrow) {
          float const spread = c.scales == ScaleKind::kOne ? 0.0f : 0.5f;
          fill_uniform(scales, DataType::kF32, c.b_scale_count(), (1 - spread) * c.b_unit(), (1 + spread) * c.b_unit(), seed + 4, stream);
          fill_uniform(zeros, DataType::kF32, c.a_scale_count(), (1 - spread) * c.a_unit(), (1 + spread) * c.a_unit(), seed + 5, stream);
          o.a_scale = c.a_scales(zeros);
          o.b_scale = c.b_scales(scales);
        }
        dense_.push_back(o);
      }
      sets_.push_back(o);
    }
    reference_ = dense_.empty() ? sets_.front() : dense_.front();
    if (narrow) {
      GemmOperands const& o = sets_.front();
      dequantise_lines({o.a, p.ab_type, o.lda, o.a_scale, 1}, p.m, p.k, reference_a, stream);
      if (!c.quantised()) dequantise_lines({o.b, p.ab_type, o.ldb, o.b_scale, kScaleBlock}, p.n, p.k, reference_b, stream);
      reference_.a = reference_a;
      reference_.b = reference_b;
      reference_.lda = reference_.ldb = p.k;
      reference_.a_scale = reference_.b_scale = {};
    }
  }

  GemmOperands const& operator[](int64_t i) const { return sets_[size_t(i)]; }
  int64_t count() const { return int64_t(sets_.size()); }
  int64_t d_bytes() const { return d_bytes_; }

  /// The same operands with a quantised B in 16 bits: those of the baselines.
  std::vector<GemmOperands> const& dense() const { return dense_; }

  /// Set 0 as GemmCase::reference() takes it.
  GemmOperands const& reference() const { return reference_; }

 private:
  std::vector<GemmOperands> sets_, dense_;
  GemmOperands reference_;
  int64_t d_bytes_ = 0;
};

/// Norm-wise error that a correct kernel stays under: one rounding to D's type (twice over, for activations that cancel) and
/// fp32 accumulation, whose error grows with the square root of k. Quantised weights that a kernel leaves unrounded are within the same.
/// The tensor core's sums of e4m3 keep 13 bits behind the first: 2^-12 where it adds up 128 of k, and 2e-3 where 4096 (docs/numerics.md).
inline double error_limit(GemmProblem const& p) {
  double const rounding = p.d_type == DataType::kF16 ? 0x1p-11 : p.d_type == DataType::kBF16 ? 0x1p-8 : 0x1p-24;
  double const of_tensor_core = p.ab_type != DataType::kE4M3 ? 0.0 : p.fast_accum ? std::max(0x1p-12, double(p.k) * 0x1p-21) : 0x1p-12;
  return 2 * rounding + of_tensor_core + 2e-6 * std::sqrt(std::max(1.0, double(p.k) / 256));
}

}  // namespace minfer::bench
