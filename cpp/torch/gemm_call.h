// A call of a dense GEMM on CUDA tensors: its arguments, their checks, and how it is run.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>

#include "core/device.h"
#include "core/tensor.h"
#include "minfer/gemm.h"
#include "output_codes.h"

namespace minfer::torch_binding {

struct Sizes {
  int64_t m, n, k, batch;
  bool batched;

  int64_t modes() const { return batched ? 3 : 2; }
  /// The shape of an output of so many columns; the first modes() numbers count.
  std::array<int64_t, 3> output(int64_t columns) const {
    return batched ? std::array<int64_t, 3>{batch, m, columns} : std::array<int64_t, 3>{m, columns, 0};
  }
};

/// What a product of operands of 8 bits has beside: scales as they are kept in memory, and a D of a type of its own.
struct ScaledOperands {
  ScalarType type;     // of A and B
  OperandScales a, b;  // of tensors that the caller keeps
  ScalarType narrow;   // the 16-bit type of D, or of C and bias where D has another
  bool fast_accum = false, int32 = false;
  Tensor a_zero = {}, b_sums = {};  // s8: int32 zero points of A's rows by a stride in elements, and sums of B's columns; or undefined
  int64_t a_zero_stride = 0;
};

struct GemmCall {
  char const* op;
  Tensor const &a, &b;
  std::optional<Tensor> const &c, &bias;
  std::optional<std::string> const& kernel;
  OutputCodes codes;
  float alpha = 1.0f, beta = 0.0f;
  Activation activation = Activation::kNone;
  bool gated = false, b_transposed = false;
  bool constant_weights = false;  // no launch that is still running writes B
  Sizes sizes{};
  ScaledOperands const* scaled = nullptr;

  int64_t columns() const { return gated ? sizes.n / 2 : sizes.n; }  // of the output
  /// The 16-bit type of C and bias.
  ScalarType narrow() const { return scaled != nullptr ? scaled->narrow : a.scalar_type(); }
};

/// Ranks, types, devices and sizes of A and B, which it sets.
void check_operands(GemmCall& call);
/// All arguments but the output and the scales of operands, and the numbers of the call, which it sets.
void check_call(GemmCall& call, double alpha, double beta, std::string const& activation);
/// That a given output is one of the call: [.., m, columns] of the type, apart from all inputs.
void check_output(GemmCall const& call, Tensor const& out, ScalarType type);

/// Into `out`, whose rows are contiguous. `before` is called in front of the launch.
void run(GemmCall const& call, Tensor const& out, OnDevice const& on, std::function<void()> const& before = {});
/// Into a new tensor.
Tensor run(GemmCall const& call, ScalarType type, OnDevice const& on);
/// Into any tensor, by a copy where its rows are not contiguous.
void run_into(GemmCall const& call, Tensor const& out, OnDevice const& on);

}  // namespace minfer::torch_binding
