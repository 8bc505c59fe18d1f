// The RMS norm, and the quantisation of rows, as parts of other operators.
#pragma once

#include <optional>
#include <tuple>

#include "core/device.h"
#include "core/tensor.h"
#include "minfer/fused.h"

namespace minfer::torch_binding {

/// The arguments of minfer.rms_norm or, with a residual, of minfer.add_rms_norm, when they have been checked.
struct Norm {
  char const* op;
  Tensor const& x;
  std::optional<Tensor> const &weight, &residual;
  float eps, weight_offset;

  int64_t width() const { return x.size(x.dim() - 1); }
  int64_t rows() const;  // all modes of x but the last
};
/// Checks them in the words of minfer.rms_norm; in messages the weight is `norm_weight`.
Norm check_norm(char const* op, Tensor const& x, std::optional<Tensor> const& weight, double eps, double weight_offset,
                std::optional<Tensor> const& residual);
/// That a residual shares no memory with another argument.
void check_apart_from_residual(Norm const& norm, char const* name, std::optional<Tensor> const& other);

/// Adds x to the residual and writes the norm into `to`, [rows, width] and contiguous, by the row kernels.
void normalize(Norm const& norm, Tensor const& to, OnDevice const& on);

/// The norm's codes and scales as minfer.rms_norm returns them with `quant`, which finds the scales; without a residual.
std::tuple<Tensor, Tensor> normalize(Norm const& norm, RowQuant quant, OnDevice const& on);

/// The codes of x's rows, contiguous, and their scales as minfer.quantize returns them. `quant` finds the scales.
std::tuple<Tensor, Tensor> quantize_rows(char const* op, Tensor const& x, RowQuant quant, OnDevice const& on);

}  // namespace minfer::torch_binding
