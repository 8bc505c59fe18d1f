// Operators with statistics over a row: normalisation, softmax, quantisation with a scale for each row.
//
// Walk. A group of threads has a row (row_group.cuh), each thread kVectors vectors of 8 elements of it in registers, as they lie in memory.
//   load         all vectors of a thread are requested before the first is used: these are the bytes in flight
//   statistics   each thread of its elements, then exchanges between threads: mean of squares; mean, then squared deviations from it, in
//                which no digits cancel; maximum and sum of exponentials together; largest magnitude, which for the norm is found beside
//                the sum, since the rest of its factor is the row's
//   results      of the vectors in registers, stored as numbers or codes. Those whose magnitude was looked at are kept in fp32
// Weights and biases of few rows are prefetched into L2 before the preceding kernel has ended. They are read through L1, where the CTAs of
// an SM find them; x is read around it. CTAs end with their row: those that are waiting read while these store. Two other forms were
// slower on an H200: CTAs that stay and request the next row's vectors as this one's are used (4096 columns: 88 us instead of 70, for
// addresses and registers), and rows in shared memory, copied several turns ahead (86 us).
//
// Rows that are no multiples of 16 bytes, or do not fit into the registers of their threads, have a kernel that reads them from memory,
// element by element, in each of these steps (kFast is false).
// Limits: 2^31 rows, 2^31 columns.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "fused/row_group.cuh"
#include "fused/row_operation.cuh"
#include "fused/row_quant.cuh"

namespace minfer::fused {

template <class Config, bool kFast>
class WholeRow {
 public:
  static constexpr RowOperation kOperation = Config::kOperation;
  static constexpr bool kGated = kOperation == RowOperation::kGatedActivation;
  static constexpr bool kSoftmax = kOperation == RowOperation::kSoftmax;
  static constexpr bool kQuantized = Config::kQuantized;
  static constexpr bool kExact = Config::kType == DataType::kF32;
  static constexpr int kVectors = kFast ? Config::kVectors : 1;
  static constexpr int kFactors = kVectors == 2 || kVectors == 4 ? 2 : 1;  // vectors whose weights are requested together
  static constexpr bool kEarly = kFast && kVectors <= 2;  // weights are requested with x: a row alone on its SM does not wait for them
  using T = RowType<Config::kType>;
  using Vector = RowVector<T>;
  using Partial = std::conditional_t<kSoftmax, Exponentials<kExact>, std::conditional_t<kQuantized, SumAndMaximum, Total>>;
  static constexpr bool kKeeps = kFast && kQuantized && kVectors <= 4;  // results, those of a norm without the row's factor

  __device__ __forceinline__ WholeRow(RowParams const& params, RowStorage& storage)
      : params_(params), group_(params, storage), row_(group_.row()), inside_(row_ < params.rows) {
    uint32_t const existing = inside_ ? row_ : 0;
    x_ = row_in<T const>({params.x.data, params.x.outer_stride, params.x.inner_stride}, params.inner, existing);
    if constexpr (kOperation == RowOperation::kRmsNorm) residual_ = row_in<T>(params.residual, params.inner, existing);
  }

  /// Before the preceding kernel has ended: what every row needs.
  __device__ __forceinline__ void prefetch() const {
    constexpr uint32_t kFewCtas = 512;  // every CTA of many would ask for the same
    if (is_norm(kOperation) && gridDim.x <= kFewCtas) {
      for (uint32_t at = group_.column(); at < params_.width; at += group_.column_step()) {
        if (params_.weight != nullptr) prefetch_into_l2(static_cast<T const*>(params_.weight) + at);
        if (params_.bias != nullptr) prefetch_into_l2(static_cast<T const*>(params_.bias) + at);
      }
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (kFast) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) load(j);
      if constexpr (kEarly) load_factors(0);
    }
    if (adds()) add_residual();
    RowSummary const summary = summarize();
    group_.finish();
    store(summary);
  }

 private:
  static __device__ __forceinline__ void prefetch_into_l2(void const* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

  __device__ __forceinline__ bool adds() const { return kOperation == RowOperation::kRmsNorm && params_.residual.data != nullptr; }
  __device__ __forceinline__ uint32_t column(uint32_t j) const { return group_.column() + j * group_.column_step(); }
  /// Elements of a vector that the row has.
  __device__ __forceinline__ int count(uint32_t at) const {
    if (!inside_ || at >= params_.width) return 0;
    return kFast ? kVectorElements : int(min(params_.width - at, uint32_t(kVectorElements)));
  }

  // ---- a row's vectors ----

  /// kFast: into registers. second: a gate's ups, or what is added to the residual.
  __device__ __forceinline__ void load(int j) {
    uint32_t const at = column(j);
    int const left = count(at);
    if constexpr (kGated) {
      GateVectors const gate(params_, at, left);
      first_[j] = load_vector(x_, gate.first, gate.first_count, kFast);
      second_[j] = load_vector(x_, gate.second, gate.second_count, kFast);
    } else if (adds()) {
      first_[j] = load_vector(residual_, at, left, kFast);
      second_[j] = load_vector(x_, at, left, kFast);
    } else {
      first_[j] = load_vector(x_, at, left, kFast);
    }
  }
  /// The residual becomes the sum, in memory and in registers; what follows is of the rounded sum.
  __device__ __forceinline__ void add_residual() {
    auto const add = [&](Vector const& to, Vector const& x, uint32_t at) {
      float a[kVectorElements], b[kVectorElements];
      unpack(to, a);
      unpack(x, b);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) a[i] += b[i];
      Vector const sum = pack<T>(a);
      store_vector(sum, residual_, at, count(at), kFast);
      return sum;
    };
    if constexpr (kFast) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) first_[j] = add(first_[j], second_[j], column(j));
    } else {
      for (uint32_t j = 0; j < params_.vectors; ++j) {
        uint32_t const at = column(j);
        add(load_vector(residual_, at, count(at), false), load_vector(x_, at, count(at), false), at);
      }
    }
  }
  /// word 0: x, or the residual with the sum in it; 1: a gate's ups.
  __device__ __forceinline__ Vector read(uint32_t at, int word) const {
    if constexpr (kGated) {
      GateVectors const gate(params_, at, count(at));
      return word == 0 ? load_vector<false>(x_, gate.first, gate.first_count, false)
                       : load_vector<false>(x_, gate.second, gate.second_count, false);
    }
    return load_vector<false>(adds() ? residual_ : x_, at, count(at), false);
  }

  /// body(numbers, column, count, j) for each vector of the thread, its number j. All threads come through together.
  template <class Body>
  __device__ __forceinline__ void for_each(Body&& body) {
    if constexpr (kFast) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        uint32_t const at = column(j);
        float v[kVectorElements];
        if constexpr (!kExact) make_opaque(first_[j]);  // otherwise the compiler keeps the numbers of the walk before, in fp32
        unpack(first_[j], v);
        body(v, at, count(at), j);
      }
    } else {
#pragma unroll 1
      for (uint32_t j = 0; j < params_.vectors; ++j) {
        uint32_t const at = column(j);
        float v[kVectorElements];
        unpack(read(at, 0), v);
        body(v, at, count(at), 0);
      }
    }
  }

  /// Requests the weights and biases of kFactors of the thread's vectors, from number `first` on.
  __device__ __forceinline__ void load_factors(int first) {
#pragma unroll
    for (int i = 0; i < kFactors; ++i) {
      uint32_t const at = column(first + i);
      int const left = at < params_.width ? kVectorElements : 0;
      if constexpr (is_norm(kOperation)) {
        if (params_.weight != nullptr) weight_[i] = load_vector<false>(static_cast<T const*>(params_.weight), at, left, kFast);
      }
      if constexpr (has_bias(kOperation)) {
        if (params_.bias != nullptr) bias_[i] = load_vector<false>(static_cast<T const*>(params_.bias), at, left, kFast);
      }
    }
  }
  /// What is beside vector j.
  __device__ __forceinline__ void take_beside(uint32_t at, int left, int j, Beside* beside) {
    if constexpr (!kFast) {
      load_beside<kOperation, kFast, T>(params_, at, left, beside);
      if constexpr (kGated) unpack(read(at, 1), beside->up);
    } else {
      if (!kEarly && j % kFactors == 0) load_factors(j);
      if constexpr (is_norm(kOperation)) unpack_factors(params_.weight, weight_[j % kFactors], 1.0f, beside->weight);
      if constexpr (has_bias(kOperation)) unpack_factors(params_.bias, bias_[j % kFactors], 0.0f, beside->bias);
      if constexpr (kGated) unpack(second_[j], beside->up);
    }
  }
  // ---- statistics ----

  __device__ __forceinline__ bool scales_rows() const {
    return kQuantized && (params_.quant == RowQuant::kFp8Token || params_.quant == RowQuant::kInt8Token);
  }

  __device__ __forceinline__ RowSummary summarize() {
    RowSummary row;
    Partial partial;
    if constexpr (kOperation == RowOperation::kRmsNorm) {
      bool const finds_largest = scales_rows();
      for_each([&](float(&v)[kVectorElements], uint32_t at, int left, int j) {
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) partial.v[0] = fmaf(v[i], v[i], partial.v[0]);
        if constexpr (kQuantized) {
          if (!kKeeps && !finds_largest) return;
          Beside beside;
          take_beside(at, left, j, &beside);
#pragma unroll
          for (int i = 0; i < kVectorElements; ++i) {
            float const weighted = v[i] * (beside.weight[i] + params_.weight_offset);
            partial.v[1] = fmaxf(partial.v[1], fabsf(weighted));
            if constexpr (kKeeps) kept_[j].v[i] = weighted;
          }
        }
      });
      group_.reduce(&partial);
      row.scale = rsqrtf(__fdividef(partial.v[0], float(params_.width)) + params_.eps);
      if constexpr (kQuantized) largest_ = fmaxf(partial.v[1] * row.scale, 0.0f);  // of NaN 0
    } else if constexpr (kOperation == RowOperation::kLayerNorm) {
      for_each([&](float(&v)[kVectorElements], uint32_t, int, int) {
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) partial.v[0] += v[i];
      });
      group_.reduce(&partial);
      row.shift = __fdividef(partial.v[0], float(params_.width));
      Partial deviations;
      for_each([&](float(&v)[kVectorElements], uint32_t, int left, int) {
        if (kFast && left == 0) return;
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) {
          float const deviation = kFast || i < left ? v[i] - row.shift : 0.0f;
          deviations.v[0] = fmaf(deviation, deviation, deviations.v[0]);
        }
      });
      group_.reduce(&deviations);
      row.scale = rsqrtf(__fdividef(deviations.v[0], float(params_.width)) + params_.eps);
    } else if constexpr (kSoftmax) {
      for_each([&](float(&v)[kVectorElements], uint32_t, int left, int) {
        if (kFast && left == 0) return;
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) partial.v[0] = kFast || i < left ? fmaxf(partial.v[0], v[i]) : partial.v[0];
      });
      for_each([&](float(&v)[kVectorElements], uint32_t, int left, int) {
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) {  // of -inf exp is 0, also where the thread has no other numbers
          float const e = v[i] == -__builtin_inff() ? 0.0f : exponential<kExact>(v[i] - partial.v[0]);
          if (kFast ? left > 0 : i < left) partial.v[1] += e;
        }
      });
      group_.reduce(&partial);
      row.shift = partial.v[0];
      row.scale = params_.logarithm ? logf(partial.v[1]) : __fdiv_rn(1.0f, partial.v[1]);
    } else {  // the largest magnitude
      for_each([&](float(&v)[kVectorElements], uint32_t at, int left, int j) {
        Beside beside;
        take_beside(at, left, j, &beside);
        finish<kOperation, kExact>(params_, row, beside, v);
        if (left > 0) partial.v[1] = fmaxf(partial.v[1], largest_magnitude(v));
        if constexpr (kKeeps) {
#pragma unroll
          for (int i = 0; i < kVectorElements; ++i) kept_[j].v[i] = v[i];
        }
      });
      group_.reduce(&partial);
      largest_ = partial.v[1];
    }
    return row;
  }

  // ---- results ----

  __device__ __forceinline__ void store(RowSummary const& row) {
    T* const y = row_in<T>(params_.y, params_.inner, inside_ ? row_ : 0);
    RowQuant const quant = kQuantized ? params_.quant : RowQuant::kNone;
    uint8_t* const codes = kQuantized ? static_cast<uint8_t*>(params_.q) + int64_t(row_) * params_.width : nullptr;
    QuantScale scale{};
    if constexpr (kQuantized) {
      if (quant == RowQuant::kFp8Tensor) scale = scale_of(load_operand(params_.scale));
      if (quant == RowQuant::kFp8Token) scale = scale_for(largest_, kLargestE4M3);
      if (quant == RowQuant::kInt8Token) scale = scale_for(largest_, kLargestInt8);
      if (scales_rows() && inside_ && group_.is_first_thread()) params_.scales[row_] = scale.scale;
    }
    auto const store_results = [&](float(&v)[kVectorElements], uint32_t at, int left) {
      if constexpr (kQuantized) {
        if (quant == RowQuant::kFp8Block128) {
          scale = scale_of_block(v, left);
          if (at % kQuantBlock == 0 && left > 0) params_.scales[at / kQuantBlock * params_.scales_stride + row_] = scale.scale;
        }
        store_codes(codes_of(v, quant, scale.inverse), codes, at, left, kFast);
      }
      if (!kQuantized || params_.y.data != nullptr) store_vector(pack<T>(v), y, at, left, kFast);
    };
    if constexpr (kKeeps) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if constexpr (is_norm(kOperation)) {
#pragma unroll
          for (int i = 0; i < kVectorElements; ++i) kept_[j].v[i] *= row.scale;
        }
        store_results(kept_[j].v, column(j), count(column(j)));
      }
    } else {
      for_each([&](float(&v)[kVectorElements], uint32_t at, int left, int j) {
        Beside beside;
        take_beside(at, left, j, &beside);
        finish<kOperation, kExact>(params_, row, beside, v);
        store_results(v, at, left);
      });
    }
  }

  RowParams const& params_;
  RowGroup group_;
  uint32_t row_;
  bool inside_;  // whether the group has a row
  T const* x_ = nullptr;
  T* residual_ = nullptr;
  Vector first_[kVectors], second_[kVectors], weight_[kFactors], bias_[kFactors];
  struct Kept {
    float v[kVectorElements];
  } kept_[kKeeps ? kVectors : 1];
  float largest_ = 0.0f;  // magnitude of the row's results
};

/// Threads that an SM should hold, for which registers are budgeted.
template <class Config>
constexpr int kResidentThreads =
    Config::kFast && Config::kVectors * (Config::kOperation == RowOperation::kGatedActivation ? 2 : 1) <= 4 ? 1024 : Config::kThreads;

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, kResidentThreads<Config> / Config::kThreads)
    whole_row_kernel(__grid_constant__ RowParams const params) {
  __shared__ RowStorage storage;
  WholeRow<Config, Config::kFast> row(params, storage);
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  row.prefetch();
  wait_for_predecessor();
#endif
  row.run();
}

/// The kernel of registered ones for rows that are not fast: one for each operation and type.
template <DataType kType_, RowOperation kOperation_, bool kQuantized_>
struct SlowRows {
  static constexpr DataType kType = kType_;
  static constexpr RowOperation kOperation = kOperation_;
  static constexpr bool kQuantized = kQuantized_, kFast = false;
  static constexpr int kVectors = 1, kThreads = kMaxRowThreads;
};

template <class Config>
Status launch_whole_rows(RowLaunchArguments const& arguments) {
  RowParams const& params = arguments.params;
  LaunchShape shape;
  shape.threads = params.threads * params.rows_per_cta;
  shape.grid = dim3((params.rows + params.rows_per_cta - 1) / params.rows_per_cta * params.cluster);
  shape.cluster = dim3(params.cluster);
  shape.programmatic = arguments.programmatic;
  shape.stream = arguments.stream;
  if (params.fast) return launch(shape, "launch", &whole_row_kernel<Config>, params);
  return launch(shape, "launch", &whole_row_kernel<SlowRows<Config::kType, Config::kOperation, Config::kQuantized>>, params);
}

}  // namespace minfer::fused
