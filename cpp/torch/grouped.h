// What the grouped operators share, whatever their weights: checks, description, launch.
#pragma once

#include "common.h"
#include "minfer/moe.h"

namespace minfer::torch_binding {

/// Arguments beside a, the weight and the offsets.
struct GroupedArguments {
  std::optional<Tensor> bias, gather, row_scale;
  std::string activation;
  bool gated;
  std::string gate_layout;
  std::optional<std::string> kernel;
};

/// A call, checked and described; its tensors are what the operands point to, copies where they had to be.
struct GroupedCall {
  char const* op;
  Tensor a, b, offsets;
  std::optional<Tensor> scales, zeros, alpha;  // of quantised weights
  std::optional<Tensor> bias, gather, row_scale;
  std::optional<std::string> kernel;
  GroupedProblem problem;
  GroupedOperands operands;
  int32_t device;

  int64_t columns() const { return problem.gated ? problem.n / 2 : problem.n; }  // of d
};

/// Shape, type and device; that of an `a`, or of another operand.
void check_operand(char const* op, char const* name, Tensor const& x, ScalarType type, std::vector<int64_t> const& shape, int32_t device);
void check_operand(char const* op, char const* name, Tensor const& x, ScalarType type, std::vector<int64_t> const& shape,
                   Beside const& other);
void check_16bit(char const* op, char const* name, Tensor const& x);
/// Of the other operand's 16-bit type, and on its device.
void check_16bit(char const* op, char const* name, Tensor const& x, Beside const& other);
/// That a weight has as many experts as a launch takes.
void check_experts(char const* op, char const* name, Tensor const& weight, int64_t experts);

/// Rows of d, of a [rows, k] or of its gather; checks both, a's type too.
int64_t grouped_rows(char const* op, Tensor const& a, std::optional<Tensor> const& gather);

/// The call without weight and offsets; checks the arguments. a [.., k] of 16 bits; experts and n are the weight's, whose name messages give.
GroupedCall grouped_call(char const* op, Tensor const& a, int64_t rows, int64_t experts, int64_t n, char const* weight,
                         GroupedArguments const& arguments);

/// Offsets, or counts of the masked form.
void set_offsets(GroupedCall* call, char const* name, Tensor const& offsets);

/// Plans, allocates the workspace and runs; rows of d are ldd apart.
void launch_grouped(GroupedCall& call, Tensor const& d, int64_t ldd);
/// Into a new d [rows, columns].
Tensor launch_grouped(GroupedCall& call);
/// Into `out`, which is checked.
Tensor launch_grouped_out(GroupedCall& call, Tensor const& out);

/// A layer's x [tokens, hidden]; then all else beside its weights, n being the gate and up rows of an expert.
void check_tokens(char const* op, Tensor const& x);
void check_layer(char const* op, Tensor const& x, int64_t experts, int64_t n, Tensor const& weights, Tensor const& ids,
                 std::optional<Tensor> const& b13, std::optional<Tensor> const& b2, std::string const& activation,
                 std::string const& gate_layout);

}  // namespace minfer::torch_binding
