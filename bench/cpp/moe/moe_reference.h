// What a launch of a mixture-of-experts layer must return, and how far from it set 0's results are.
#pragma once

#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "moe/moe_case.h"

namespace minfer::bench {

/// Computed once for a case, from the host's routing and float64 products.
class Reference {
 public:
  Reference(Arena& arena, MoeCase const& c, HostRouting const& routing, MoeSets const& sets, cudaStream_t stream)
      : arena_(arena), c_(c), routing_(routing), sets_(sets), stream_(stream) {
    MoeShape const& s = c.shape;
    // Products of codes are those of the float32 numbers that they stand for.
    int64_t const size = size_of(number_type()), pairs = c.rows();
    int64_t const w13_bytes = c.narrow() ? 2 * s.inter * s.hidden * 4 : 0, w2_bytes = c.narrow() ? s.hidden * s.inter * 4 : 0;
    switch (c.stage) {
      case Stage::kRouterGemm: {
        reset({c.bytes(kLogits)});
        float* logits = product(sets.get(0, kX), sets.get(0, kRouterWeight), c.tokens, s.experts, s.hidden, carve<float>(c.bytes(kLogits)));
        logits_ = download<float>(logits, c.elements(kLogits), stream);
        weights_.resize(size_t(pairs));
        ids_.resize(size_t(pairs));
        for (int64_t t = 0; t < c.tokens; ++t)
          HostRouting::choose(&logits_[size_t(t * s.experts)], s, &ids_[size_t(t * s.top_k)], &weights_[size_t(t * s.top_k)]);
        break;
      }
      case Stage::kRouter:
        logits_ = routing.logits;
        weights_ = routing.weights;
        ids_ = routing.ids;
        break;
      case Stage::kSort: break;
      case Stage::kGemm1: {
        reset({pairs * 4, pairs * s.hidden * size, pairs * 2 * s.inter * 4, pairs * c.h_columns() * 4, w13_bytes});
        result_ = carve<float>(pairs * c.h_columns() * 4);
        hidden_rows(DataType::kF32, result_);
        break;
      }
      case Stage::kGemm2: {
        reset({pairs * 4, pairs * s.hidden * 4, pairs * s.hidden * 4, c.narrow() ? pairs * s.inter * 4 : 0, w2_bytes});
        result_ = carve<float>(pairs * s.hidden * 4);
        output_rows(numbers(kH, s.inter, c.h_group, pairs, nullptr), DataType::kF32, result_);
        break;
      }
      case Stage::kCombine: {
        reset({pairs * 4, c.tokens * s.hidden * 4});
        result_ = carve<float>(c.tokens * s.hidden * 4);
        sum_rows(sets.get(0, kY), c.d_type(), upload(routing.inverse), c.tokens, s.top_k, s.hidden, result_, stream);
        break;
      }
      case Stage::kLayer: {
        int64_t const h_bytes = pairs * s.inter * size, y_bytes = pairs * s.hidden * size_of(c.d_type());
        reset({pairs * 4, pairs * 4, pairs * 4, pairs * s.hidden * size, pairs * 2 * s.inter * 4, pairs * s.hidden * 4, h_bytes, y_bytes,
               c.tokens * s.hidden * 4, w13_bytes, w2_bytes});
        void* h = carve<void>(h_bytes);
        void* y = carve<void>(y_bytes);
        result_ = carve<float>(c.tokens * s.hidden * 4);
        hidden_rows(number_type(), h);
        output_rows(h, c.d_type(), y);
        sum_rows(y, c.d_type(), upload(routing.inverse), c.tokens, s.top_k, s.hidden, result_, stream);
        break;
      }
    }
    check(cudaStreamSynchronize(stream), "reference");
  }

  /// Norm-wise; of a sort, the share of wrong places.
  double error() const {
    MoeShape const& s = c_.shape;
    switch (c_.stage) {
      case Stage::kRouterGemm:
      case Stage::kRouter: return router_error();
      case Stage::kSort: return sort_error();
      case Stage::kGemm1: return relative(kH, c_.rows(), c_.h_columns());
      case Stage::kGemm2: return relative(kY, c_.rows(), s.hidden);
      default: return relative(kOut, c_.tokens, s.hidden);
    }
  }

  /// That a correct launch stays under. A layer rounds h and y on the way, and so does the reference; but h in 8 bits, which are 2.5 % of
  /// the norm (s8: 0.9 %) away from the reference's float32 (docs/numerics.md).
  double limit() const {
    double const of_codes = !c_.narrow() ? 0.0 : c_.type == DataType::kE4M3 ? 0.04 : 0.02;
    GemmProblem p;
    p.ab_type = c_.type;
    p.d_type = c_.d_type();
    p.k = c_.stage == Stage::kCombine ? c_.shape.top_k : c_.stage == Stage::kGemm2 ? c_.shape.inter : c_.shape.hidden;
    switch (c_.stage) {
      case Stage::kRouterGemm: return 1e-4;
      case Stage::kRouter: return 1e-5;
      case Stage::kSort: return 0;
      case Stage::kLayer: return 2 * error_limit(p) + of_codes;
      default: return error_limit(p);
    }
  }

 private:
  void reset(std::initializer_list<int64_t> bytes) {
    int64_t total = 0;
    for (int64_t b : bytes) total += round_up(b, kCarveAlignment);
    arena_.reset(total);
  }

  template <typename T>
  T* carve(int64_t bytes) {
    return static_cast<T*>(arena_.carve(bytes));
  }

  template <typename T>
  T const* upload(std::vector<T> const& values) {
    int64_t const bytes = int64_t(values.size() * sizeof(T));
    T* data = carve<T>(bytes);
    check(cudaMemcpyAsync(data, values.data(), size_t(bytes), cudaMemcpyHostToDevice, stream_), "upload");
    return data;
  }

  /// Of what is multiplied here.
  DataType number_type() const { return c_.narrow() ? DataType::kF32 : c_.type; }

  float* product(void const* a, void const* b, int64_t m, int64_t n, int64_t k, float* out) const {
    GemmProblem p;
    p.m = m, p.n = n, p.k = k;
    p.ab_type = number_type();
    p.d_type = DataType::kF32;
    GemmOperands o;
    o.a = a;
    o.b = b;
    o.lda = o.ldb = k;
    gemm_reference(p, o, nullptr, out, stream_);
    return out;
  }

  /// The numbers of rows of k that lie as the tensor has them, or of the rows that `index` names.
  void const* numbers(Tensor t, int64_t k, int64_t group, int64_t rows, int32_t const* index) {
    void const* data = sets_.get(0, t);
    if (!c_.narrow() && index == nullptr) return data;
    void* out = carve<void>(rows * k * size_of(number_type()));
    if (c_.narrow()) {
      dequantise_lines({data, c_.type, k, sets_.row_scales(0, t, group), 1, group, index}, rows, k, static_cast<float*>(out), stream_);
    } else {
      gather_rows(data, index, rows, k, out, stream_);
    }
    return out;
  }

  /// An expert's weight of 8 bits, as numbers.
  void expert_numbers(Tensor w, int64_t expert, int64_t n, int64_t k, float* out) const {
    OperandScales s = sets_.weight_scales(0, w);
    float const* const scales = static_cast<float const*>(s.data) + expert * sets_.expert_scales(w);
    int64_t const parts = s.halves ? 2 : 1, lines = n / parts;  // gates, then ups
    s.halves = false;
    for (int64_t part = 0; part < parts; ++part) {
      s.data = scales + part * s.up_offset;
      uint8_t const* const codes = sets_.get<uint8_t>(0, w) + (expert * n + part * lines) * k;
      dequantise_lines({codes, c_.type, k, s, kScaleBlock}, lines, k, out + part * lines * k, stream_);
    }
  }

  /// Products of rows that are sorted by expert.
  float* products(void const* a, Tensor w, int64_t n, int64_t k) {
    float* z = carve<float>(c_.rows() * n * 4);
    float* const numbers = c_.narrow() ? carve<float>(n * k * 4) : nullptr;
    int64_t const size = size_of(number_type());
    int64_t begin = 0;
    for (int64_t e = 0; e < c_.shape.experts; ++e) {
      int64_t const end = routing_.offsets[size_t(e)];
      if (end == begin) continue;
      if (c_.narrow()) expert_numbers(w, e, n, k, numbers);
      void const* b = numbers;
      if (!c_.narrow()) b = sets_.get<char>(0, w) + e * n * k * size;
      product(static_cast<char const*>(a) + begin * k * size, b, end - begin, n, k, z + begin * n);
      begin = end;
    }
    return z;
  }

  void hidden_rows(DataType type, void* out) {
    MoeShape const& s = c_.shape;
    int32_t const* index = c_.gathered ? upload(routing_.token_index) : nullptr;
    void const* a = numbers(c_.gathered ? kX : kA, s.hidden, c_.x_group(), c_.rows(), index);
    float const* z = products(a, kW13, 2 * s.inter, s.hidden);
    grouped_epilogue(z, c_.rows(), 2 * s.inter, c_.gated, c_.activation, nullptr, type, out, stream_);
  }

  void output_rows(void const* h, DataType type, void* out) {
    float const* z = products(h, kW2, c_.shape.hidden, c_.shape.inter);
    grouped_epilogue(z, c_.rows(), c_.shape.hidden, false, Activation::kNone, upload(routing_.row_scale), type, out, stream_);
  }

  double relative(Tensor t, int64_t rows, int64_t columns) const {
    return relative_error(sets_.get(0, t), c_.type_of(t), columns, 0, result_, 1, rows, columns, stream_);
  }

  /// Experts are compared by their logits: equals may change places.
  double router_error() const {
    int64_t const top_k = c_.shape.top_k, experts = c_.shape.experts;
    std::vector<float> const weights = download<float>(sets_.get(0, kWeights), c_.rows(), stream_);
    std::vector<int32_t> const ids = download<int32_t>(sets_.get(0, kIds), c_.rows(), stream_);
    double of_weights[2] = {0, 0}, of_logits[2] = {0, 0};
    auto const add = [](double value, double wanted, double* sums) {
      sums[0] += (value - wanted) * (value - wanted);
      sums[1] += wanted * wanted;
    };
    for (size_t pair = 0; pair < ids.size(); ++pair) {
      size_t const token = pair / size_t(top_k);
      bool valid = ids[pair] >= 0 && ids[pair] < experts;
      for (size_t before = token * size_t(top_k); before < pair; ++before) valid = valid && ids[before] != ids[pair];
      if (!valid) return std::numeric_limits<double>::infinity();
      add(double(weights[pair]), double(weights_[pair]), of_weights);
      float const* logits = &logits_[token * size_t(experts)];
      add(double(logits[ids[pair]]), double(logits[ids_[pair]]), of_logits);
    }
    double const a = std::sqrt(of_weights[0] / of_weights[1]), b = std::sqrt(of_logits[0] / std::max(of_logits[1], 1e-30));
    return a <= b ? b : a;  // a NaN stays
  }

  double sort_error() const {
    int64_t const pairs = c_.rows();
    int64_t wrong = 0, count = 0;
    auto const compare = [&](auto const& have, auto const& want) {
      for (size_t i = 0; i < want.size(); ++i) wrong += !(have[i] == want[i]);
      count += int64_t(want.size());
    };
    compare(download<int32_t>(sets_.get(0, kTokenIndex), pairs, stream_), routing_.token_index);
    compare(download<int32_t>(sets_.get(0, kOffsets), c_.shape.experts, stream_), routing_.offsets);
    compare(download<int32_t>(sets_.get(0, kInverse), pairs, stream_), routing_.inverse);
    compare(download<float>(sets_.get(0, kRowScale), pairs, stream_), routing_.row_scale);
    return double(wrong) / double(count);
  }

  Arena& arena_;
  MoeCase const& c_;
  HostRouting const& routing_;
  MoeSets const& sets_;
  cudaStream_t stream_;
  float* result_ = nullptr;
  std::vector<float> logits_, weights_;
  std::vector<int32_t> ids_;
};

}  // namespace minfer::bench
