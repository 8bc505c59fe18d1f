// The steps of a grouped GEMM that do not depend on the format of its weights: checks, description, plan, launch.
#pragma once

#include <optional>
#include <string>

#include "core/checks.h"
#include "core/device.h"
#include "core/readable.h"
#include "minfer/moe.h"
#include "output_codes.h"

namespace minfer::torch_binding {

/// All arguments but a, the weight and the offsets.
struct GroupedArguments {
  std::optional<Tensor> const &bias, &gather, &row_scale;
  std::string const& activation;
  bool gated;
  std::string const& gate_layout;
  OutputCodes codes;
  std::optional<std::string> const& kernel;
};

/// A call as the kernels take it: what is computed, where the operands are, and what keeps their memory.
struct GroupedCall {
  char const* op;
  GroupedProblem problem{};
  GroupedOperands operands{};
  Held held{};

  /// Columns of d.
  int64_t columns() const { return problem.gated ? problem.n / 2 : problem.n; }
  int64_t output_bytes() const {  // of an element of d
    bool const wide = size_of(problem.type) > 1;
    return problem.d_fp8 || problem.d_groups ? 1 : size_of(wide ? problem.type : problem.d_type);
  }
};

/// The argument `kernel`: NAME[@gather_first=0|1].
struct GroupedOverride {
  std::string name;
  bool gather_first = false;
};
GroupedOverride parse_grouped_override(char const* op, std::string const& text);

/// A launch takes 1 to kMaxGroupedExperts experts.
void check_experts(char const* op, char const* name, Tensor const& weight, int64_t experts);
/// b is [experts, k, n], of a's type; returns n. a is [.., k].
int64_t check_experts_of(char const* op, Tensor const& a, Tensor const& b);
/// a is [experts, max_rows, k], for as many experts as b has.
void check_slabs(char const* op, Tensor const& a, Tensor const& b);
/// Checks the shapes of a [rows, k] and gather; returns the number of rows of d.
int64_t grouped_rows(char const* op, Tensor const& a, std::optional<Tensor> const& gather);
/// Activation, gate layout, and the n that a gated weight needs. Messages call the weight `weight` and its n `extent`: columns or rows.
void check_gate(char const* op, char const* weight, char const* extent, int64_t n, std::string const& activation, bool gated,
                std::string const& gate_layout);
/// The arguments of a call whose d has `rows` rows and whose weight, `weight` in messages, has these experts and this n.
void check_grouped(char const* op, Tensor const& a, int64_t rows, int64_t experts, int64_t n, char const* weight,
                   GroupedArguments const& arguments);
/// `offsets`, or in the masked form `counts`: one number for each expert.
void check_offsets(char const* op, char const* name, Tensor const& offsets, int64_t experts, NamedTensor const& a);
/// Those of bias, gather, row_scale and scale that the call has share no memory with the output.
void check_no_overlap(char const* op, Tensor const& out, GroupedArguments const& arguments);
/// An output [rows, columns] of a type; a names the operand that it must not overlap.
void check_grouped_out(char const* op, Tensor const& out, ScalarType type, int64_t rows, int64_t columns, NamedTensor const& a);
/// An output of slabs, [experts, max_rows, columns]; returns the elements from one row to the next.
int64_t check_masked_out(char const* op, Tensor const& out, ScalarType type, int64_t experts, int64_t max_rows, int64_t columns,
                         NamedTensor const& a);

void set_activation(GroupedCall* call, std::string const& activation, std::string const& gate_layout);
/// a: `rows` contiguous rows, lda elements apart.
void set_rows(GroupedCall* call, void const* a, int64_t rows, int64_t lda);
/// The rows of a matrix, which is copied where they are not contiguous.
void set_rows(GroupedCall* call, char const* name, Tensor const& a);
/// bias is [experts, n].
void set_bias(GroupedCall* call, char const* name, std::optional<Tensor> const& bias);
/// A 16-bit weight [experts, n, k], or with `transposed` [experts, k, n], which is copied where k is not contiguous.
void set_weight(GroupedCall* call, char const* name, Tensor const& weight, bool transposed);
/// Activation, bias, gather, row_scale, offsets and the scale of codes.
void set_arguments(GroupedCall* call, GroupedArguments const& arguments, char const* offsets_name, Tensor const& offsets);
/// d: contiguous rows, ldd elements apart.
void set_output(GroupedCall* call, void* d, int64_t ldd);

/// Whether there is anything to run.
inline bool is_empty(GroupedCall const& call) { return call.problem.rows == 0 || call.problem.n == 0; }
/// The plan for a described call. Each thread remembers those of calls that request no kernel.
GroupedPlan plan_of(GroupedCall const& call, std::optional<std::string> const& kernel, OnDevice const& on);
void run(GroupedCall const& call, GroupedPlan const& plan, void* workspace, OnDevice const& on);

/// Plans, allocates the workspace and runs.
void launch(GroupedCall& call, std::optional<std::string> const& kernel, Tensor const& d, int64_t ldd, OnDevice const& on);
/// The same into a new d [rows, columns], on like's device; without codes of like's type, where that has 16 bits, else of d_type.
Tensor launch(GroupedCall& call, std::optional<std::string> const& kernel, Tensor const& like, OnDevice const& on);
/// The same into an output that has been checked.
void launch_out(GroupedCall& call, std::optional<std::string> const& kernel, Tensor const& out, OnDevice const& on);

}  // namespace minfer::torch_binding
