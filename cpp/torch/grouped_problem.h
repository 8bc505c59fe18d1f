// What the grouped operators share, whatever their weights: checks, description, plan, launch.
#pragma once

#include <optional>
#include <string>

#include "core/checks.h"
#include "core/device.h"
#include "core/readable.h"
#include "minfer/moe.h"

namespace minfer::torch_binding {

/// Arguments beside a, the weight and the offsets.
struct GroupedArguments {
  std::optional<Tensor> const &bias, &gather, &row_scale;
  std::string const& activation;
  bool gated;
  std::string const& gate_layout;
  std::optional<std::string> const& kernel;
};

/// A product: what is computed, and where its operands are.
struct GroupedCall {
  char const* op;
  GroupedProblem problem{};
  GroupedOperands operands{};
  Held held{};

  int64_t columns() const { return problem.gated ? problem.n / 2 : problem.n; }  // of d
};

/// That a weight has as many experts as a launch takes.
void check_experts(char const* op, char const* name, Tensor const& weight, int64_t experts);
/// Rows of d, of a [rows, k] or of its gather; checks both, a's type too.
int64_t grouped_rows(char const* op, Tensor const& a, std::optional<Tensor> const& gather);
/// Activation, gate layout, and what a gated weight of n columns or rows, `weight` of them, needs.
void check_gate(char const* op, char const* weight, char const* extent, int64_t n, std::string const& activation, bool gated,
                std::string const& gate_layout);
/// The arguments, for d of so many rows; experts and n are the weight's, whose name messages give.
void check_grouped(char const* op, Tensor const& a, int64_t rows, int64_t experts, int64_t n, char const* weight,
                   GroupedArguments const& arguments);
/// `offsets`, or `counts` of the masked form.
void check_offsets(char const* op, char const* name, Tensor const& offsets, int64_t experts, Beside const& a);
/// An output [rows, columns].
/// Bias, gather and row_scale, where there are any, share no memory with an output.
void check_no_overlap(char const* op, Tensor const& out, GroupedArguments const& arguments);
void check_grouped_out(char const* op, Tensor const& out, int64_t rows, int64_t columns, Beside const& a);

void set_activation(GroupedCall* call, std::string const& activation, std::string const& gate_layout);
/// Rows of a, lda apart with unit stride along them.
void set_rows(GroupedCall* call, void const* a, int64_t rows, int64_t lda);
/// A matrix, copied where it has no such rows.
void set_rows(GroupedCall* call, char const* name, Tensor const& a);
/// [experts, n], or none.
void set_bias(GroupedCall* call, char const* name, std::optional<Tensor> const& bias);
/// A weight's [experts, n, k], or with `transposed` [experts, k, n], of 16 bits; copied where k is not contiguous.
void set_weight(GroupedCall* call, char const* name, Tensor const& weight, bool transposed);
/// What check_grouped() has checked but the rows of a, and the offsets.
void set_arguments(GroupedCall* call, GroupedArguments const& arguments, char const* offsets_name, Tensor const& offsets);
/// Rows of d, ldd apart.
void set_output(GroupedCall* call, void* d, int64_t ldd);

/// Whether there is anything to run.
inline bool is_empty(GroupedCall const& call) { return call.problem.rows == 0 || call.problem.n == 0; }
/// The plan for what has been described; remembered where no kernel was asked for.
GroupedPlan plan_of(GroupedCall const& call, std::optional<std::string> const& kernel, OnDevice const& on);
void run(GroupedCall const& call, GroupedPlan const& plan, void* workspace, OnDevice const& on);

/// Plans, allocates the workspace and runs.
void launch(GroupedCall& call, std::optional<std::string> const& kernel, Tensor const& d, int64_t ldd, OnDevice const& on);
/// .. into a new d [rows, columns], on like's device and of its type.
Tensor launch(GroupedCall& call, std::optional<std::string> const& kernel, Tensor const& like, OnDevice const& on);
/// .. into an output that has been checked.
void launch_out(GroupedCall& call, std::optional<std::string> const& kernel, Tensor const& out, OnDevice const& on);

}  // namespace minfer::torch_binding
