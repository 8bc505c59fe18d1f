// One launch of a mixture-of-experts layer in a sweep: its sizes, where its tokens go, its tensors in device memory.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "common/buffers.h"
#include "common/check.h"
#include "common/device_ops.h"
#include "gemm/gemm_case.h"
#include "minfer/moe.h"
#include "minfer/moe_routing.h"

namespace minfer::bench {

struct MoeShape {
  char const* model;  // empty: sizes of the command line
  int64_t experts, top_k, hidden, inter;
};

constexpr MoeShape kModels[] = {
    {"mixtral-8x7b", 8, 2, 4096, 14336}, {"mixtral-8x22b", 8, 2, 6144, 16384}, {"qwen3-30b-a3b", 128, 8, 2048, 768},
    {"deepseek-v3", 256, 8, 7168, 2048}, {"gpt-oss-120b", 128, 4, 2880, 2880},
};

/// How tokens choose: all experts alike; expert e with weight 1 / (e + 1); all tokens the same top_k experts.
enum class Routing : int32_t { kUniform = 0, kZipf = 1, kOneHot = 2 };
constexpr Routing kRoutings[] = {Routing::kUniform, Routing::kZipf, Routing::kOneHot};
inline char const* name_of(Routing r) { return r == Routing::kUniform ? "uniform" : r == Routing::kZipf ? "zipf" : "one_hot"; }

/// The launches of a layer, kLayer all but the first in a row.
enum class Stage : int32_t { kRouterGemm = 0, kRouter, kSort, kGemm1, kGemm2, kCombine, kLayer };
constexpr Stage kStages[] = {Stage::kRouterGemm, Stage::kRouter,  Stage::kSort, Stage::kGemm1,
                             Stage::kGemm2,      Stage::kCombine, Stage::kLayer};
constexpr Stage kLayerStages[] = {Stage::kRouter, Stage::kSort, Stage::kGemm1, Stage::kGemm2, Stage::kCombine};
inline char const* name_of(Stage s) {
  constexpr char const* kNames[] = {"router_gemm", "router", "sort", "gemm1", "gemm2", "combine", "layer"};
  return kNames[int32_t(s)];
}

enum Tensor : int32_t {
  kX,             // [tokens, hidden]
  kLogits,        // [tokens, experts] f32
  kRouterWeight,  // [experts, hidden]
  kWeights,       // [tokens, top_k] f32
  kIds,           // [tokens, top_k]
  kTokenIndex,    // [rows]
  kOffsets,       // [experts]
  kInverse,       // [tokens, top_k]
  kRowScale,      // [rows] f32: the weights in the order of the experts
  kW13,           // [experts, 2 * inter, hidden]: gate rows, then up rows
  kW2,            // [experts, hidden, inter]
  kA,             // [rows, hidden]: GEMM 1's rows where it does not gather
  kH,             // [rows, inter], not gated [rows, 2 * inter]
  kY,             // [rows, hidden]
  kOut,           // [tokens, hidden]
  // Of 8 bits, f32.
  kXScale,    // [groups of k, tokens]
  kAScale,    // [groups of k, rows]
  kHScale,    // [rows, groups of k]
  kW13Scale,  // [experts, 2 * inter], of blocks [experts, blocks of 128 rows, blocks of k], gates and ups with their own
  kW2Scale,   // [experts, hidden], likewise
  kTensors
};

/// The scales of a tensor of 8 bits; kTensors: it never is one.
inline Tensor scale_of(Tensor t) {
  return t == kX ? kXScale : t == kA ? kAScale : t == kH ? kHScale : t == kW13 ? kW13Scale : t == kW2 ? kW2Scale : kTensors;
}

struct MoeCase {
  MoeShape shape;
  int64_t tokens = 0;
  Routing routing = Routing::kUniform;
  DataType type = DataType::kBF16;  // of what the launch multiplies
  Stage stage = Stage::kLayer;
  bool in_layer = true;                // a layer, or a launch as it has it: GEMM 1 of 8 bits leaves codes to GEMM 2
  bool gathered = true, gated = true;  // of GEMM 1
  int32_t h_group = 0;                 // of 8 bits, of GEMM 2 alone: k of a scale of a row of h; 0: all of k
  Activation activation = Activation::kSilu;

  int64_t rows() const { return tokens * shape.top_k; }
  int64_t h_columns() const { return gated ? shape.inter : 2 * shape.inter; }

  // 8 bits. e4m3: scales of 128 of k of a row of x, and of 128 x 128 of the weights; s8: of rows of both.
  bool narrow() const { return is_8_bits(type); }
  bool has_blocks() const { return type == DataType::kE4M3; }
  int32_t x_group() const { return has_blocks() ? int32_t(kScaleBlock) : 0; }
  DataType d_type() const { return narrow() ? DataType::kBF16 : type; }  // of results
  bool makes_codes() const { return narrow() && in_layer; }              // GEMM 1

  /// One launch alone. Those around the products have no codes, but 16-bit numbers.
  MoeCase at(Stage s) const {
    MoeCase c = *this;
    c.stage = s;
    c.in_layer = s == Stage::kLayer;
    if (s != Stage::kGemm1 && s != Stage::kGemm2 && s != Stage::kLayer) c.type = d_type();
    return c;
  }

  /// A launch of the layer.
  MoeCase part(Stage s) const {
    MoeCase c = at(s);
    c.in_layer = true;
    return c;
  }

  std::string stage_text() const {
    std::string text = name_of(stage);
    if (!gathered) text += " ordered";
    if (!gated) text += " ungated";
    if (stage == Stage::kGemm2 && narrow()) text += h_group > 0 ? " groups of " + std::to_string(h_group) : " rows";
    return text;
  }

  std::vector<Tensor> reads() const { return with_scales(numbers_read()); }
  std::vector<Tensor> writes() const { return with_scales(numbers_written()); }

  std::vector<Tensor> with_scales(std::vector<Tensor> tensors) const {
    for (size_t i = 0, count = tensors.size(); i < count; ++i)
      if (scale_of(tensors[i]) != kTensors && is_8_bits(type_of(tensors[i]))) tensors.push_back(scale_of(tensors[i]));
    return tensors;
  }

  std::vector<Tensor> numbers_read() const {
    switch (stage) {
      case Stage::kRouterGemm: return {kX, kRouterWeight};
      case Stage::kRouter: return {kLogits};
      case Stage::kSort: return {kIds, kWeights};
      case Stage::kGemm1: return gathered ? std::vector<Tensor>{kX, kTokenIndex, kOffsets, kW13} : std::vector<Tensor>{kA, kOffsets, kW13};
      case Stage::kGemm2: return {kH, kOffsets, kRowScale, kW2};
      case Stage::kCombine: return {kY, kInverse};
      case Stage::kLayer: return {kX, kLogits, kW13, kW2};
    }
    return {};
  }

  std::vector<Tensor> numbers_written() const {
    switch (stage) {
      case Stage::kRouterGemm:
      case Stage::kRouter: return {kWeights, kIds};
      case Stage::kSort: return {kTokenIndex, kOffsets, kInverse, kRowScale};
      case Stage::kGemm1: return {kH};
      case Stage::kGemm2: return {kY};
      case Stage::kCombine: return {kOut};
      case Stage::kLayer: return {kWeights, kIds, kTokenIndex, kOffsets, kInverse, kRowScale, kH, kY, kOut};
    }
    return {};
  }

  int64_t elements(Tensor t) const {
    MoeShape const& s = shape;
    switch (t) {
      case kX:
      case kOut: return tokens * s.hidden;
      case kLogits: return tokens * s.experts;
      case kRouterWeight: return s.experts * s.hidden;
      case kOffsets: return s.experts;
      case kW13: return s.experts * 2 * s.inter * s.hidden;
      case kW2: return s.experts * s.inter * s.hidden;
      case kA:
      case kY: return rows() * s.hidden;
      case kH: return rows() * h_columns();
      case kXScale: return tokens * groups_of(s.hidden, x_group());
      case kAScale: return rows() * groups_of(s.hidden, x_group());
      case kHScale: return rows() * groups_of(s.inter, stage == Stage::kGemm2 && !in_layer ? h_group : kLeastGroup);
      case kW13Scale: return s.experts * (has_blocks() ? w13_blocks() * (gated ? 2 : 1) * scale_blocks(s.hidden) : 2 * s.inter);
      case kW2Scale: return s.experts * (has_blocks() ? scale_blocks(s.hidden) * scale_blocks(s.inter) : s.hidden);
      default: return rows();
    }
  }

  /// What a layer's kernels make of h: a scale for 64 columns, or for 32.
  static constexpr int64_t kLeastGroup = 32;
  static int64_t groups_of(int64_t k, int64_t group) { return group > 0 ? scale_blocks(k, group) : 1; }
  int64_t w13_blocks() const { return scale_blocks(h_columns()); }  // of rows: gated, of the gates and of the ups

  DataType type_of(Tensor t) const {  // f32 stands for all of 32 bits
    switch (t) {
      case kX:
      case kA:
      case kRouterWeight:
      case kW13:
      case kW2: return type;
      case kH: return stage == Stage::kGemm1 && !makes_codes() ? d_type() : type;
      case kY:
      case kOut: return d_type();
      default: return DataType::kF32;
    }
  }

  int64_t bytes(Tensor t) const { return elements(t) * size_of(type_of(t)); }

  /// @param group k of a scale of a row of h
  GroupedProblem problem(Stage s, int32_t group) const {
    bool const first = s == Stage::kGemm1;
    GroupedProblem p;
    p.rows = rows();
    p.experts = shape.experts;
    p.n = first ? 2 * shape.inter : shape.hidden;
    p.k = first ? shape.hidden : shape.inter;
    p.type = type;
    p.gated = first && gated;
    p.gathered = first && gathered;
    p.a_alignment = p.b_alignment = alignment_of(p.k, type);
    p.d_alignment = alignment_of(first ? h_columns() : shape.hidden, type_of(first ? kH : kY));
    if (narrow()) {
      p.d_type = d_type();
      p.a_group = first ? x_group() : group;
      p.b_blocks = has_blocks();
      p.d_groups = first && makes_codes();
    }
    return p;
  }
};

/// Where tokens go, from random logits by the plainest code: what routers, sorts and their users are checked against.
struct HostRouting {
  std::vector<float> logits, weights, row_scale;
  std::vector<int32_t> ids, token_index, offsets, inverse;
  int64_t active = 0;  // experts that have rows

  /// The top_k largest of a token's logits, among equals the first; weights are their softmax.
  static void choose(float const* logits, MoeShape const& shape, int32_t* ids, float* weights) {
    std::vector<int32_t> order(size_t(shape.experts));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + shape.top_k, order.end(),
                      [&](int32_t i, int32_t j) { return logits[i] != logits[j] ? logits[i] > logits[j] : i < j; });
    double total = 0;
    for (int64_t j = 0; j < shape.top_k; ++j) total += std::exp(double(logits[order[size_t(j)]]) - double(logits[order[0]]));
    for (int64_t j = 0; j < shape.top_k; ++j) {
      ids[j] = order[size_t(j)];
      weights[j] = float(std::exp(double(logits[ids[j]]) - double(logits[order[0]])) / total);
    }
  }

  explicit HostRouting(MoeCase const& c) {
    MoeShape const& s = c.shape;
    logits.resize(size_t(c.tokens * s.experts));
    weights.resize(size_t(c.rows()));
    row_scale = weights;
    ids.resize(size_t(c.rows()));
    token_index = inverse = ids;
    // The largest of logarithms of weights with Gumbel noise are a draw without replacement by these weights.
    std::mt19937_64 random(1);
    for (size_t i = 0; i < logits.size(); ++i) {
      double const e = double(i % size_t(s.experts)), u = (double(random() >> 11) + 0.5) * 0x1p-53;
      double const weight = c.routing == Routing::kZipf                            ? -std::log1p(e)
                            : c.routing == Routing::kOneHot && e < double(s.top_k) ? 50.0
                                                                                   : 0.0;
      logits[i] = float(weight - std::log(-std::log(u)));
    }
    std::vector<int32_t> counts(size_t(s.experts), 0);
    for (int64_t t = 0; t < c.tokens; ++t) {
      choose(&logits[size_t(t * s.experts)], s, &ids[size_t(t * s.top_k)], &weights[size_t(t * s.top_k)]);
    }
    for (int32_t id : ids) ++counts[size_t(id)];
    active = s.experts - std::count(counts.begin(), counts.end(), 0);
    offsets.resize(counts.size());
    std::partial_sum(counts.begin(), counts.end(), offsets.begin());
    std::vector<int32_t> next(counts.size());
    for (size_t e = 0; e < next.size(); ++e) next[e] = offsets[e] - counts[e];
    for (size_t pair = 0; pair < ids.size(); ++pair) {
      int32_t const place = next[size_t(ids[pair])]++;
      inverse[pair] = place;
      token_index[size_t(place)] = int32_t(int64_t(pair) / s.top_k);
      row_scale[size_t(place)] = weights[pair];
    }
  }

  /// The tensor's values, or null where they are not the routing's.
  void const* values(Tensor t) const {
    switch (t) {
      case kLogits: return logits.data();
      case kWeights: return weights.data();
      case kIds: return ids.data();
      case kTokenIndex: return token_index.data();
      case kOffsets: return offsets.data();
      case kInverse: return inverse.data();
      case kRowScale: return row_scale.data();
      default: return nullptr;
    }
  }
};

/// What a launch must do at least. A layer's is the sum of its launches'.
struct Work {
  double bytes = 0, flops = 0, floor_us = 0;

  Work(MoeCase const& c, HostRouting const& routing, DeviceProperties const& device) {
    if (c.stage == Stage::kLayer) {
      for (Stage s : kLayerStages) {
        Work const part(c.part(s), routing, device);
        bytes += part.bytes, flops += part.flops, floor_us += part.floor_us;
      }
      return;
    }
    for (std::vector<Tensor> const& tensors : {c.reads(), c.writes()})
      for (Tensor t : tensors) bytes += touched(c, routing, t);
    if (c.stage == Stage::kGemm1 || c.stage == Stage::kGemm2) {
      GroupedProblem const p = c.problem(c.stage, c.h_group);
      flops = 2.0 * double(p.rows) * double(p.n) * double(p.k);
    } else if (c.stage == Stage::kRouterGemm) {
      flops = 2.0 * double(c.tokens) * double(c.shape.experts) * double(c.shape.hidden);
    }
    floor_us = std::max(bytes / device.read_bandwidth, flops / (device.matrix_rate * (c.narrow() ? 2 : 1)));
  }

  /// Weights of experts without rows are not read.
  static double touched(MoeCase const& c, HostRouting const& routing, Tensor t) {
    bool const weight = t == kW13 || t == kW2 || t == kW13Scale || t == kW2Scale;
    double const share = weight ? double(routing.active) / double(c.shape.experts) : 1.0;
    return share * double(c.bytes(t));
  }
};

/// Sets of the tensors of a launch: random numbers, the routing the same in all. Results have deviation about 1 before a gate.
class MoeSets {
 public:
  /// @param count 0: enough to pass three L2s' worth of bytes that are touched between two uses of a set
  MoeSets(Arena& arena, MoeCase const& c, HostRouting const& routing, int64_t l2_bytes, int64_t count, cudaStream_t stream)
      : writes_(c.writes()), case_(c) {
    std::vector<Tensor> tensors = c.reads();
    tensors.insert(tensors.end(), writes_.begin(), writes_.end());
    int64_t per_set = 0;
    double touched = 0;
    for (Tensor t : tensors) {
      per_set += round_up(c.bytes(t), kCarveAlignment);
      touched += Work::touched(c, routing, t);
    }
    if (count == 0) count = rotation_sets(int64_t(touched), l2_bytes);
    arena.reset(count * per_set);
    for (int64_t i = 0; i < count; ++i) {
      std::array<void*, kTensors>& set = sets_.emplace_back();
      set.fill(nullptr);
      for (Tensor t : tensors) {
        set[t] = arena.carve(c.bytes(t));
        if (void const* values = routing.values(t)) {
          check(cudaMemcpyAsync(set[t], values, size_t(c.bytes(t)), cudaMemcpyHostToDevice, stream), "copy of the routing");
        } else {
          float const k = float(t == kW2 || t == kW2Scale ? c.shape.inter : c.shape.hidden);
          bool const weight = t == kW13 || t == kW2 || t == kRouterWeight || t == kW13Scale || t == kW2Scale;
          float const deviation = weight ? 1.0f / std::sqrt(k) : 1.0f;  // of numbers
          DataType const type = c.type_of(t);
          uint64_t const seed = uint64_t(i * kTensors + t);
          if (t >= kXScale) {
            float const mean = deviation / code_deviation(c.type);
            fill_uniform(set[t], type, c.elements(t), 0.5f * mean, 1.5f * mean, seed, stream);
          } else {
            fill_normal(set[t], type, c.elements(t), is_8_bits(type) ? code_deviation(type) : deviation, seed, stream);
          }
        }
      }
    }
  }

  int64_t count() const { return int64_t(sets_.size()); }

  template <typename T = void>
  T* get(int64_t set, Tensor t) const {
    return static_cast<T*>(sets_[size_t(set)][t]);
  }

  /// Of rows of x, of a or of h, in 8 bits; `group`: k of one, 0 for all of k.
  OperandScales row_scales(int64_t set, Tensor t, int64_t group) const {
    void const* data = get(set, scale_of(t));
    if (group == 0) return {data, 1};
    if (t == kH) return {data, MoeCase::groups_of(case_.shape.inter, group), 1, true};
    return {data, 1, t == kX ? case_.tokens : case_.rows(), true};
  }

  /// Of the first expert's rows of a weight of 8 bits, or of its blocks: those of w13's ups lie behind the gates'.
  OperandScales weight_scales(int64_t set, Tensor t) const {
    void const* data = get(set, scale_of(t));
    if (!case_.has_blocks()) return {data, 1};
    int64_t const blocks = scale_blocks(t == kW13 ? case_.shape.hidden : case_.shape.inter);  // of k
    bool const halves = t == kW13 && case_.gated;
    return {data, blocks, 1, true, false, halves, halves ? case_.w13_blocks() * blocks : 0};
  }

  /// From the scales of an expert's weight to the next one's.
  int64_t expert_scales(Tensor t) const { return case_.elements(scale_of(t)) / case_.shape.experts; }

  /// Set 0's results.
  void poison_results(cudaStream_t stream) const {
    for (Tensor t : writes_) poison(get(0, t), case_.bytes(t), stream);
  }

 private:
  std::vector<std::array<void*, kTensors>> sets_;
  std::vector<Tensor> writes_;
  MoeCase case_;
};

}  // namespace minfer::bench
