// Operators with statistics over a row: normalisation, softmax, quantisation with a scale for each row.
//
// A group of threads has a row (row_group.cuh) and walks it once for each step:
//   statistics   each thread of its elements, then exchanges between threads: mean of squares; mean, then squared deviations from it, in
//                which no digits cancel; the maximum, then the sum of exponentials of what elements are below it; the largest magnitude,
//                which for the norm is found beside the sum, since the rest of its factor is the row's
//   results      stored as numbers or codes
// Where the row is between these steps (RowLocation):
//   kRegisters   a thread has up to kVectors vectors of 8 elements of it, all requested before the first is used: these are the bytes in
//                flight. CTAs end with their row: those that are waiting read while these store. Two other forms were slower on an H200 for
//                rows that fit: CTAs that stay and request the next row's vectors as this one's are used (4096 columns: 88 us instead of
//                70, for addresses and registers), and rows in shared memory, copied several turns ahead (86 us). Results whose magnitude
//                is needed, and exponentials, are kept in fp32
//   kRing        shared memory, for wide rows (row_ring.cuh)
//   kMemory      read again in each step, element by element: rows that are no multiples of 16 bytes, or fit into neither
// Weights and biases of few rows are prefetched into L2 before the preceding kernel has ended. They are read through L1, where the CTAs of
// an SM find them; x is read around it.
// Few rows take as long as their instructions: 4096 elements are 16 warps on one SM. Many rows of codes do so too, beside the bytes.
// Limits: 2^31 rows, 2^31 columns.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "fused/row_group.cuh"
#include "fused/row_operation.cuh"
#include "fused/row_quant.cuh"

namespace minfer::fused {

enum class RowLocation { kRegisters, kMemory, kRing };

/// Of a kernel that has no ring.
struct NoRing {
  template <class... Arguments>
  __device__ __forceinline__ explicit NoRing(Arguments const&...) {}
};

template <class Config, class Ring = NoRing>
class WholeRow {
 public:
  static constexpr RowOperation kOperation = Config::kOperation;
  static constexpr RowLocation kLocation = Config::kLocation;
  static constexpr bool kInRegisters = kLocation == RowLocation::kRegisters, kInRing = kLocation == RowLocation::kRing;
  static constexpr bool kFast = kLocation != RowLocation::kMemory;  // a vector is one access, or two
  static constexpr bool kGated = kOperation == RowOperation::kGatedActivation;
  static constexpr bool kSoftmax = kOperation == RowOperation::kSoftmax;
  static constexpr bool kQuantized = Config::kQuantized;
  static constexpr bool kExact = Config::kType == DataType::kF32;
  static constexpr int kVectors = kInRegisters ? Config::kVectors : 1;
  static constexpr int kFactors = kInRing                          ? kTileVectors
                                  : kVectors == 2 || kVectors == 4 ? 2
                                                                   : 1;  // vectors whose weights are requested together
  static constexpr bool kEarly =
      kInRegisters && kVectors <= 2;  // weights are requested with x: a row alone on its SM does not wait for them
  static constexpr bool kKeeps = kInRegisters && (kQuantized || kSoftmax) && kVectors <= 4;  // of a norm without the row's factor
  using T = RowType<Config::kType>;
  using Vector = RowVector<T>;

  __device__ __forceinline__ WholeRow(RowParams const& params, RowStorage& storage, Ring* ring = nullptr)
      : params_(params), group_(params, storage), ring_(ring) {
    if constexpr (!kInRing) begin(group_.row());
    if constexpr (is_norm(kOperation)) {
#pragma unroll
      for (int i = 0; i < kFactors; ++i) weight_[i] = constant_vector<T>(1.0f), bias_[i] = constant_vector<T>(0.0f);
    }
  }

  /// Before the preceding kernel has ended: what every row needs.
  __device__ __forceinline__ void prefetch() const {
    // Every CTA asks for the same lines, one thread for each: 512 CTAs of four rows, whose threads all asked, took twice their time.
    constexpr uint32_t kFewCtas = 256, kOfLine = 128 / (kVectorElements * sizeof(T));
    if (is_norm(kOperation) && gridDim.x <= kFewCtas && threadIdx.x < params_.threads && threadIdx.x % kOfLine == 0) {
      for (uint32_t at = group_.column(); at < params_.width; at += group_.column_step()) {
        if (params_.weight != nullptr) prefetch_into_l2(static_cast<T const*>(params_.weight) + at);
        if (params_.bias != nullptr) prefetch_into_l2(static_cast<T const*>(params_.bias) + at);
      }
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (kInRing) {
      ring_->start(group_.row());
      for (uint32_t row = group_.row(); row < params_.rows; row += ring_->row_step()) {
        begin(row);
        if (adds()) add_residual();
        store(summarize());
        ring_->next_row();
      }
    } else {
      if constexpr (kInRegisters) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) load(j);
        if constexpr (kEarly) load_factors(0);
      }
      if (kQuantized && params_.quant == RowQuant::kFp8Tensor) given_scale_ = load_operand(params_.scale);
      if (adds()) add_residual();
      RowSummary const summary = summarize();
      group_.finish();
      store(summary);
    }
  }

 private:
  static __device__ __forceinline__ void prefetch_into_l2(void const* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

  __device__ __forceinline__ void begin(uint32_t row) {
    row_ = row;
    width_ = row < params_.rows ? params_.width : 0;
    uint32_t const existing = row < params_.rows ? row : 0;
    x_ = row_in<T const>({params_.x.data, params_.x.outer_stride, params_.x.inner_stride}, params_.inner, existing);
    if constexpr (kOperation == RowOperation::kRmsNorm) residual_ = row_in<T>(params_.residual, params_.inner, existing);
    make_opaque(x_);  // one addition for an address
    make_opaque(residual_);
  }
  __device__ __forceinline__ bool adds() const { return kOperation == RowOperation::kRmsNorm && params_.residual.data != nullptr; }
  __device__ __forceinline__ uint32_t column(uint32_t j) const { return group_.column() + j * group_.column_step(); }
  /// Elements of a vector that the row has.
  __device__ __forceinline__ int count(uint32_t at) const {
    if (at >= width_) return 0;
    return kFast ? kVectorElements : int(min(width_ - at, uint32_t(kVectorElements)));
  }

  // ---- a row's vectors ----

  /// Into registers. second: a gate's ups, or what is added to the residual.
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
  /// The residual becomes the sum, in memory and where the row is; what follows is of the rounded sum.
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
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) first_[j] = add(first_[j], second_[j], column(j));
    } else if constexpr (kInRing) {
      for_each_tile([&](uint32_t tile, uint32_t at) {
        ring_->wait(tile);
        Vector x[kTileVectors], to[kTileVectors];
#pragma unroll
        for (int i = 0; i < kTileVectors; ++i) to[i] = ring_->vector(tile, i), x[i] = ring_->vector(tile, i, 1);
#pragma unroll
        for (int i = 0; i < kTileVectors; ++i) ring_->vector(tile, i) = add(to[i], x[i], at + i * vector_step());
      });
    } else {
      for (uint32_t j = 0; j < params_.vectors; ++j) {
        uint32_t const at = column(j);
        add(load_vector(residual_, at, count(at), false), load_vector(x_, at, count(at), false), at);
      }
    }
  }
  /// kMemory. word 0: x, or the residual with the sum in it; 1: a gate's ups.
  __device__ __forceinline__ Vector read(uint32_t at, int word) const {
    if constexpr (kGated) {
      GateVectors const gate(params_, at, count(at));
      return word == 0 ? load_vector<false>(x_, gate.first, gate.first_count, false)
                       : load_vector<false>(x_, gate.second, gate.second_count, false);
    }
    return load_vector<false>(adds() ? residual_ : x_, at, count(at), false);
  }

  /// body(tile, column of its first vector) for each tile of the thread.
  template <class Body>
  __device__ __forceinline__ void for_each_tile(Body&& body) {
#pragma unroll 1
    for (uint32_t tile = 0; tile < params_.vectors / kTileVectors; ++tile) body(tile, ring_->column(tile));
  }
  __device__ __forceinline__ uint32_t vector_step() const {
    if constexpr (kInRing) return Ring::kVectorStep;
    return group_.column_step();
  }

  enum class Walk { kFirst, kAgain, kLast };  // of a row in a ring: the first waits for the copies, the last gives their room back

  /// body(numbers, column, count, j) for each vector of the thread, its number j among those whose weights are requested together, or of
  /// all where the row is in registers. All threads come through together.
  template <Walk kWalk, class Body>
  __device__ __forceinline__ void for_each(Body&& body) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        uint32_t const at = column(j);
        float v[kVectorElements];
        if constexpr (!kExact && kVectors > 2) make_opaque(first_[j]);  // or the compiler keeps the numbers of the walk before, in fp32
        unpack(first_[j], v);
        body(v, at, count(at), j);
      }
    } else if constexpr (kInRing) {
      for_each_tile([&](uint32_t tile, uint32_t at) {
        if (kWalk == Walk::kLast && is_norm(kOperation)) load_factors_at(at);
        if (kWalk == Walk::kFirst && !adds()) ring_->wait(tile);
        Vector x[kTileVectors];
#pragma unroll
        for (int i = 0; i < kTileVectors; ++i) x[i] = count(at + i * vector_step()) > 0 ? ring_->vector(tile, i) : Vector{};
#pragma unroll
        for (int i = 0; i < kTileVectors; ++i) {
          float v[kVectorElements];
          unpack(x[i], v);
          body(v, at + i * vector_step(), count(at + i * vector_step()), i);
        }
        if constexpr (kWalk == Walk::kLast) ring_->release(tile);
      });
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

  /// Requests the weights and biases of kFactors of the thread's vectors, the first of which begins at column `at`.
  __device__ __forceinline__ void load_factors_at(uint32_t at) {
#pragma unroll
    for (int i = 0; i < kFactors; ++i) {
      int const left = at >= params_.width ? 0 : kFast ? kVectorElements : int(min(params_.width - at, uint32_t(kVectorElements)));
      fused::load_factors<kFast>(params_.weight, at, left, &weight_[i]);
      if constexpr (has_bias(kOperation)) fused::load_factors<kFast>(params_.bias, at, left, &bias_[i]);
      at += vector_step();
    }
  }
  __device__ __forceinline__ void load_factors(int first) {
    if constexpr (is_norm(kOperation)) load_factors_at(column(first));
  }
  /// What is beside vector j, which begins at column `at`.
  __device__ __forceinline__ void take_beside(uint32_t at, int j, Beside* beside) {
    if constexpr (is_norm(kOperation)) {
      if (!kEarly && !kInRing && j % kFactors == 0) load_factors_at(at);
      unpack_weight(params_, weight_[j % kFactors], beside->weight);
      if constexpr (has_bias(kOperation)) unpack(bias_[j % kFactors], beside->bias);
    }
    if constexpr (kGated) unpack(kInRegisters ? second_[j] : read(at, 1), beside->up);
  }

  /// Of an operator whose results may be codes: these, but for a norm's factor of the row.
  __device__ __forceinline__ void take_unscaled(float (&v)[kVectorElements], uint32_t at, int j) {
    Beside beside;
    take_beside(at, j, &beside);
    if constexpr (is_norm(kOperation)) {
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) v[i] *= beside.weight[i];
    } else {
      finish<kOperation, kExact>(params_, RowSummary{}, beside, v);
    }
  }

  // ---- statistics ----

  __device__ __forceinline__ bool scales_rows() const {
    return kQuantized && (params_.quant == RowQuant::kFp8Token || params_.quant == RowQuant::kInt8Token);
  }
  /// body(number, element's number) of the elements that the thread has of a vector.
  template <class Body>
  static __device__ __forceinline__ void for_present(float const (&v)[kVectorElements], int left, Body&& body) {
    if (kFast && left == 0) return;
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      if (kFast || i < left) body(v[i]);
    }
  }

  __device__ __forceinline__ RowSummary summarize() {
    RowSummary row;
    if constexpr (kOperation == RowOperation::kRmsNorm) {
      SumAndMagnitude partial;
      bool const finds_largest = scales_rows();
      for_each<Walk::kFirst>([&](float(&v)[kVectorElements], uint32_t at, int, int j) {
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) partial.v[0] = fmaf(v[i], v[i], partial.v[0]);
        if constexpr (kQuantized) {
          if (!kKeeps && !finds_largest) return;
          take_unscaled(v, at, j);
          if (finds_largest) partial.v[1] = fmaxf(partial.v[1], largest_magnitude(v));
          if constexpr (kKeeps) keep(v, j);
        }
      });
      if (finds_largest) {
        group_.reduce(&partial);
      } else {
        Total sum{partial.v[0]};
        group_.reduce(&sum);
        partial.v[0] = sum.v[0];
      }
      row.scale = rsqrtf(__fdividef(partial.v[0], float(params_.width)) + params_.eps);
      if constexpr (kQuantized) largest_ = fmaxf(partial.v[1] * row.scale, 0.0f);  // of NaN 0
    } else if constexpr (kOperation == RowOperation::kLayerNorm) {
      Total sum, deviations;
      for_each<Walk::kFirst>([&](float(&v)[kVectorElements], uint32_t, int, int) {
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) sum.v[0] += v[i];
      });
      group_.reduce(&sum);
      row.shift = __fdividef(sum.v[0], float(params_.width));
      for_each<Walk::kAgain>([&](float(&v)[kVectorElements], uint32_t, int left, int) {
        for_present(v, left, [&](float x) { deviations.v[0] = fmaf(x - row.shift, x - row.shift, deviations.v[0]); });
      });
      group_.reduce(&deviations);
      row.scale = rsqrtf(__fdividef(deviations.v[0], float(params_.width)) + params_.eps);
    } else if constexpr (kSoftmax) {
      Maximum largest;
      Total sum;
      for_each<Walk::kFirst>([&](float(&v)[kVectorElements], uint32_t, int left, int) {
        for_present(v, left, [&](float x) { largest.v[0] = fmaxf(largest.v[0], x); });
      });
      group_.reduce(&largest);
      row.shift = largest.v[0];
      for_each<Walk::kAgain>([&](float(&v)[kVectorElements], uint32_t, int left, int j) {
        float e[kVectorElements];
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) e[i] = exponential<kExact>(v[i] - row.shift);
        for_present(e, left, [&](float x) { sum.v[0] += x; });
        if constexpr (kKeeps) {
          if (params_.logarithm) {
            keep(v, j);
          } else {
            keep(e, j);
          }
        }
      });
      group_.reduce(&sum);
      row.scale = params_.logarithm ? logf(sum.v[0]) : __fdiv_rn(1.0f, sum.v[0]);
    } else {
      Maximum largest;
      for_each<Walk::kFirst>([&](float(&v)[kVectorElements], uint32_t at, int left, int j) {
        take_unscaled(v, at, j);
        for_present(v, left, [&](float x) { largest.v[0] = fmaxf(largest.v[0], fabsf(x)); });
        if constexpr (kKeeps) keep(v, j);
      });
      group_.reduce(&largest);
      largest_ = fmaxf(largest.v[0], 0.0f);
    }
    return row;
  }

  __device__ __forceinline__ void keep(float const (&v)[kVectorElements], int j) {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) kept_[j].v[i] = v[i];
  }

  // ---- results ----

  __device__ __forceinline__ void store(RowSummary const& row) {
    if constexpr (kQuantized) {
      store_codes_of(row);
    } else {
      T* const y = row_in<T>(params_.y, params_.inner, width_ > 0 ? row_ : 0);
      if constexpr (kKeeps) {  // a softmax
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          uint32_t const at = column(j);
#pragma unroll
          for (int i = 0; i < kVectorElements; ++i) {
            kept_[j].v[i] = params_.logarithm ? kept_[j].v[i] - row.shift - row.scale : kept_[j].v[i] * row.scale;
          }
          store_vector(pack<T>(kept_[j].v), y, at, count(at), kFast);
        }
      } else {
        for_each<Walk::kLast>([&](float(&v)[kVectorElements], uint32_t at, int left, int j) {
          Beside beside;
          take_beside(at, j, &beside);
          finish<kOperation, kExact>(params_, row, beside, v);
          store_vector(pack<T>(v), y, at, left, kFast);
        });
      }
    }
  }

  __device__ __forceinline__ void store_codes_of(RowSummary const& row) {
    RowQuant const quant = params_.quant;
    bool const inside = width_ > 0, stores_y = params_.y.data != nullptr;
    T* const y = row_in<T>(params_.y, params_.inner, inside ? row_ : 0);
    uint8_t* codes = static_cast<uint8_t*>(params_.q) + int64_t(row_) * params_.width;
    make_opaque(codes);
    QuantScale scale{};
    if (quant == RowQuant::kFp8Tensor) scale = scale_of(given_scale_);
    if (scales_rows()) {
      scale = scale_for(largest_, quant == RowQuant::kInt8Token ? kLargestInt8 : kLargestE4M3);
      if (inside && group_.is_first_thread()) params_.scales[row_] = scale.scale;
    }
    float const of_row = is_norm(kOperation) ? row.scale : 1.0f;
    if constexpr (kKeeps) {
      if (stores_y) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          float v[kVectorElements];
#pragma unroll
          for (int i = 0; i < kVectorElements; ++i) v[i] = kept_[j].v[i] * of_row;
          store_vector(pack<T>(v), y, column(j), count(column(j)), kFast);
        }
      }
      float factors[kVectors];
      if (quant == RowQuant::kFp8Block128) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) factors[j] = largest_magnitude(kept_[j].v) * of_row;  // 0 of what the row lacks
        BlockScales<kVectors> const blocks(factors);
        uint32_t const at = column(blocks.block()) / kQuantBlock;
        if (blocks.is_first_thread() && at * kQuantBlock < width_) params_.scales[at * params_.scales_stride + row_] = blocks.scale();
#pragma unroll
        for (int j = 0; j < kVectors; ++j) factors[j] = times_inverse(of_row, blocks.inverse(j));
      } else {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) factors[j] = times_inverse(of_row, scale.inverse);
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        uint32_t const at = column(j);
        store_codes(codes_of(kept_[j].v, quant, factors[j]), codes, at, count(at), kFast);
      }
    } else {
      for_each<Walk::kLast>([&](float(&v)[kVectorElements], uint32_t at, int left, int j) {
        take_unscaled(v, at, j);
        if (quant == RowQuant::kFp8Block128) {
          float largest[1] = {0.0f};
          for_present(v, left, [&](float x) { largest[0] = fmaxf(largest[0], fabsf(x)); });
          largest[0] *= of_row;
          BlockScales<1> const block(largest);
          scale.inverse = block.inverse(0);
          if (block.is_first_thread() && left > 0) params_.scales[at / kQuantBlock * params_.scales_stride + row_] = block.scale();
        }
        store_codes(codes_of(v, quant, times_inverse(of_row, scale.inverse)), codes, at, left, kFast);
        if (!stores_y) return;
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) v[i] *= of_row;
        store_vector(pack<T>(v), y, at, left, kFast);
      });
    }
  }

  RowParams const& params_;
  RowGroup group_;
  Ring* ring_;
  uint32_t row_ = 0, width_ = 0;  // of no row a width of 0
  T const* x_ = nullptr;
  T* residual_ = nullptr;
  Vector first_[kVectors], second_[kVectors], weight_[kFactors], bias_[kFactors];
  struct Kept {
    float v[kVectorElements];
  } kept_[kKeeps ? kVectors : 1];
  float largest_ = 0.0f, given_scale_ = 0.0f;  // magnitude of the row's results; fp8_tensor's scale
};

/// Threads that an SM should hold, for which registers are budgeted.
template <class Config>
constexpr int kResidentThreads =
    Config::kLocation == RowLocation::kRegisters && Config::kVectors * (Config::kOperation == RowOperation::kGatedActivation ? 2 : 1) <= 4
        ? 1024
        : Config::kThreads;

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, kResidentThreads<Config> / Config::kThreads)
    whole_row_kernel(__grid_constant__ RowParams const params) {
  __shared__ RowStorage storage;
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  WholeRow<Config> row(params, storage);
#if __CUDA_ARCH__ >= 900
  row.prefetch();
  wait_for_predecessor();
#endif
  row.run();
}

/// The kernel beside registered ones for rows that are read from memory: one for each operation and type.
template <DataType kType_, RowOperation kOperation_, bool kQuantized_>
struct SlowRows {
  static constexpr DataType kType = kType_;
  static constexpr RowOperation kOperation = kOperation_;
  static constexpr RowLocation kLocation = RowLocation::kMemory;
  static constexpr bool kQuantized = kQuantized_;
  static constexpr int kVectors = 1, kThreads = kMaxRowThreads;
};

inline LaunchShape shape_of(RowLaunchArguments const& arguments) {
  RowParams const& params = arguments.params;
  LaunchShape shape;
  shape.threads = params.threads * params.rows_per_cta;
  shape.grid = dim3((params.rows + params.rows_per_cta - 1) / params.rows_per_cta * params.cluster);
  shape.cluster = dim3(params.cluster);
  shape.programmatic = arguments.programmatic;
  shape.stream = arguments.stream;
  return shape;
}
template <class Config>
Status launch_slow_rows(RowLaunchArguments const& arguments) {
  using Slow = SlowRows<Config::kType, Config::kOperation, Config::kQuantized>;
  return launch(shape_of(arguments), "launch", &whole_row_kernel<Slow>, arguments.params);
}

template <class Config>
Status launch_whole_rows(RowLaunchArguments const& arguments) {
  if (!arguments.params.fast) return launch_slow_rows<Config>(arguments);
  return launch(shape_of(arguments), "launch", &whole_row_kernel<Config>, arguments.params);
}

}  // namespace minfer::fused
