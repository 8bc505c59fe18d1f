// A layer of experts, whatever its weights: sort, two products, sum. What lies between them is one piece of memory.
#pragma once

#include "grouped_problem.h"

namespace minfer::torch_binding {

/// Arguments of a layer beside its weights; n: gate and up rows of an expert.
struct LayerArguments {
  Tensor const &x, &weights, &ids;
  std::optional<Tensor> const &b13, &b2;
  std::string const &activation, &gate_layout;
};

/// x [tokens, hidden].
void check_tokens(char const* op, Tensor const& x);
/// All else; w13 is the name of the weight that has the n rows.
void check_layer(char const* op, LayerArguments const& arguments, int64_t experts, int64_t n, char const* w13);

/// Runs the layer. up and down are the products, of which everything is described but rows, gather, offsets, scales of rows and outputs.
Tensor run_layer(char const* op, LayerArguments const& arguments, GroupedCall& up, GroupedCall& down, OnDevice const& on);

/// A product of a layer: `rows` of d, k columns of a and n of the weight.
GroupedCall layer_product(char const* op, LayerArguments const& arguments, int64_t experts, int64_t n, int64_t k, bool gated);

}  // namespace minfer::torch_binding
