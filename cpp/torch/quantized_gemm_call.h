// A call of a GEMM with quantised weights on CUDA tensors, of 16-bit activations or of 8-bit ones with scales: its arguments, their checks,
// and how it is run.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "core/device.h"
#include "core/tensor.h"
#include "minfer/w4a16.h"
#include "output_codes.h"

namespace minfer::torch_binding {

/// A quantised weight as the caller gives it: codes in the packed layout, scales and zero points [groups, n].
struct PackedWeight {
  Tensor const &packed, &scales;
  std::optional<Tensor> const& zeros;
  WeightFormat format;
  int64_t group_size;
  double alpha;
};

/// The same weight as kernels read it.
struct Weight {
  Tensor packed, scales, zeros;  // zeros is undefined where there are no zero points
  WeightFormat format = WeightFormat::kDense;
  int64_t n = 0, k = 0, group_size = 0;  // group_size 0: one group holds all of k
  double alpha = 1.0;

  /// The leading dimension of the scales or of the zero points.
  int64_t ld(Tensor const& x) const { return x.size(0) > 1 ? x.stride(0) : round_up(n, 16); }
  /// Whether all of it is the caller's own memory. A copy is not constant: a preceding launch of the call itself writes it.
  bool is_callers(PackedWeight const& w) const {
    return packed.data_ptr() == w.packed.data_ptr() && scales.data_ptr() == w.scales.data_ptr() &&
           (!zeros.defined() || zeros.data_ptr() == w.zeros->data_ptr());
  }
  QuantizedWeight to_dequantize() const {
    QuantizedWeight w;
    w.format = format;
    w.packed = packed.data_ptr();
    w.scales = scales.data_ptr();
    w.ld_scales = ld(scales);
    if (zeros.defined()) {
      w.zeros = zeros.data_ptr();
      w.ld_zeros = ld(zeros);
    }
    w.group_size = group_size;
    w.n = n;
    w.k = k;
    w.alpha = float(alpha);
    return w;
  }
};

/// All of a weight [n, k] but the type of its scales, and that of its scales' device.
void check_weight(char const* op, PackedWeight const& w, int64_t n, int64_t k);
/// Of a checked weight.
Weight describe(char const* op, PackedWeight const& w, int64_t n, int64_t k);

struct QuantizedGemmCall {
  char const* op;
  Tensor const& a;
  PackedWeight weight;
  std::optional<Tensor> const &perm, &c, &bias;
  Activation activation;
  bool gated;
  bool constant_weights;  // no launch that is still running writes qweight, scales or zeros
  std::optional<std::string> const& kernel;
  OutputCodes codes;
  char const* a_name = "a";         // in messages
  Tensor const* a_scale = nullptr;  // of activations of 8 bits, e4m3 or int8
  std::optional<ScalarType> out_dtype = std::nullopt;

  int64_t n() const { return weight.scales.size(1); }  // of a checked call
  int64_t k() const { return a.size(a.dim() - 1); }
  /// The 16-bit type of the output, c and bias.
  ScalarType narrow() const { return a_scale != nullptr ? weight.scales.scalar_type() : a.scalar_type(); }
  int64_t columns() const { return gated ? n() / 2 : n(); }  // of the output
  ShapeArray output() const {
    ShapeArray shape(a.sizes());
    shape.back() = columns();
    return shape;
  }
  ScalarType output_type() const { return codes.type(out_dtype.value_or(narrow())); }
};

/// All arguments but the output.
void check_call(QuantizedGemmCall const& call);
Tensor allocate_output(QuantizedGemmCall const& call);
/// The `kernel=` of calls with activations of 8 bits that writes these in 16 bits, and runs the plan of 16-bit activations.
constexpr char const* kWidenFirst = "w4a16";

/// Runs a checked call into `out`, which is contiguous. `before` is called in front of the first launch that reads a.
void run(QuantizedGemmCall const& call, Tensor const& out, OnDevice const& on, std::function<void()> const& before = {});
/// Checks the call and runs it into a new tensor.
Tensor run(QuantizedGemmCall const& call);
/// Checks the call and runs it into the caller's tensor.
Tensor run_out(QuantizedGemmCall const& call, Tensor const& out);

}  // namespace minfer::torch_binding
