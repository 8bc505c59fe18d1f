// A call of minfer.decoder_block, w4a16_decoder_block or fp8_decoder_block, also with the attention in front: what they have in common.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/readable.h"
#include "core/tensor.h"
#include "decoder_attention.h"
#include "minfer/decoder_block.h"

namespace minfer::torch_binding {

inline constexpr char const* kProductNames[kDecoderBlockProducts] = {"o", "gate_up", "down", "next"};

struct DecoderBlockCall {
  char const* op;
  Tensor const &a, &residual, &mlp_norm, &next_norm;
  std::optional<Tensor> const &o_bias, &down_bias, &next_bias;
  bool constant_weights;
  DecoderAttentionCall const* attention_call = nullptr;  // of the attention in front, which makes a: one launch or none
  DecoderExchange exchange{};                            // of a layer that is divided among GPUs
  int64_t n[kDecoderBlockProducts] = {};                 // rows of the weights
  float eps = 0.0f, weight_offset = 0.0f;
  Activation activation = Activation::kNone;

  int64_t attention() const { return a.size(a.dim() - 1); }
  int64_t hidden() const { return residual.size(residual.dim() - 1); }
  /// Of the last layer, whose last weight has no rows, one less: nothing is read of that one.
  int products() const { return n[3] == 0 ? kDecoderBlockProducts - 1 : kDecoderBlockProducts; }
  int64_t rows() const { return residual.numel() / std::max<int64_t>(1, hidden()); }
  int64_t k(int product) const { return product == 0 ? attention() : product == 2 ? n[1] / 2 : hidden(); }
  std::optional<Tensor> const& bias(int product) const;
  /// Without what only one kind of weights has.
  DecoderBlockProblem problem() const;
};

/// Of a layer that is divided among GPUs: where this process has all ranks' exchange buffers; none: it is not divided.
DecoderExchange exchange_of(char const* op, std::vector<int64_t> const& buffers, int64_t rank);

/// a and the residual.
void check_tokens(DecoderBlockCall const& call);
/// The norms and the biases; `n` is set.
void check_norms_and_biases(DecoderBlockCall const& call);
/// That the residual shares no memory with an argument, or with the ones that all calls have.
void check_apart(DecoderBlockCall const& call, std::string const& name, Tensor const& x);
void check_apart(DecoderBlockCall const& call);

/// Checks the numbers, plans and runs a checked call; returns D.
///   weights     sets the weights and scales of the operands; returns whether all of them are the caller's own memory
///   one_by_one  the operators one after the other, into D
Tensor run(DecoderBlockCall& call, DecoderBlockProblem problem, double eps, double weight_offset, std::string const& activation,
           std::optional<std::string> const& kernel, std::function<bool(DecoderBlockOperands*, Held*)> const& weights,
           std::function<void(Tensor const&, OnDevice const&)> const& one_by_one);

/// Layers one behind the other, each with its attention, in one launch: checked calls of layers of the same sizes. The first one has qkv
/// and the residual of all. Returns the last one's D.
///   weights  sets those of a layer, by its number
Tensor run_layers(std::span<DecoderBlockCall> calls, DecoderBlockProblem problem, double eps, double weight_offset,
                  std::string const& activation, std::function<bool(size_t, DecoderBlockOperands*, Held*)> const& weights);

/// The tensors of a call of several layers, by layers. Lists of what a layer may lack have a tensor for each layer, or none.
struct DecoderLayers {
  char const* op;
  Tensor const &qkv, &residual;
  std::vector<Tensor> const &k_caches, &v_caches;
  Tensor const &block_table, &seq_lens, &slot_mapping, &positions, &cos_sin;
  std::vector<Tensor> const &q_weights, &k_weights;
  double scale;
  std::vector<int64_t> const& windows;
  double qk_eps, qk_weight_offset;
  std::vector<Tensor> const &mlp_norms, &next_norms, &o_biases, &down_biases, &next_biases;
  bool constant;
  std::vector<int64_t> const& exchange;
  int64_t rank;
};

/// Calls of the layers, with what they refer to.
class DecoderLayerCalls {
 public:
  explicit DecoderLayerCalls(DecoderLayers const& layers);
  /// That a list has a tensor for each layer.
  void check_count(char const* name, size_t count) const;
  std::span<DecoderBlockCall> calls() { return calls_; }

 private:
  /// Of a list that may be empty.
  std::vector<std::optional<Tensor>> optional(char const* name, std::vector<Tensor> const& list) const;

  DecoderLayers const& layers_;
  std::vector<std::optional<Tensor>> q_weights_, k_weights_, o_biases_, down_biases_, next_biases_;
  std::optional<Tensor> a_;
  std::vector<DecoderAttentionCall> attention_;
  std::vector<DecoderBlockCall> calls_;
};

}  // namespace minfer::torch_binding
