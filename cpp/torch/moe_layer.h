// A layer of experts with weights of any format: sort, two products, sum. One allocation holds all intermediate results.
#pragma once

#include "grouped_problem.h"

namespace minfer::torch_binding {

/// All arguments of a layer but its weights.
struct LayerArguments {
  Tensor const &x, &weights, &ids;
  std::optional<Tensor> const &b13, &b2;
  std::string const &activation, &gate_layout;
};

/// x is [tokens, hidden].
void check_tokens(char const* op, Tensor const& x);
/// weights and ids.
void check_routes(char const* op, LayerArguments const& arguments);
/// All arguments but x and the experts' weights. n counts the gate and up rows of an expert in the weight that messages call `w13`.
void check_layer(char const* op, LayerArguments const& arguments, int64_t experts, int64_t n, char const* w13);

/// Runs the layer. The products `up` and `down` are described but for a, gather, offsets, row_scale and d, which are intermediate results.
/// Of operands of 8 bits arguments.x are codes, whose scales `up` has; those of its results are found in its epilogue. `out`: the result's
/// type.
Tensor run_layer(char const* op, LayerArguments const& arguments, GroupedCall& up, GroupedCall& down, ScalarType out, OnDevice const& on);
/// The same into x's type.
Tensor run_layer(char const* op, LayerArguments const& arguments, GroupedCall& up, GroupedCall& down, OnDevice const& on);

/// A product of the layer: sizes, activation and bias, without weight. The gated one is `up`.
GroupedCall layer_product(char const* op, LayerArguments const& arguments, int64_t experts, int64_t n, int64_t k, bool gated);

}  // namespace minfer::torch_binding
