// The dense GEMM of 16-bit operands on CUDA tensors.
#include "gemm.h"

#include "core/checks.h"
#include "core/operators.h"
#include "core/readable.h"
#include "gemm_call.h"

namespace minfer::torch_binding {

namespace {

ScalarType check_output_type(GemmCall const& call, std::optional<ScalarType> out_dtype, ScalarType otherwise) {
  ScalarType const of_a = call.a.scalar_type(), type = out_dtype.value_or(otherwise), codes = call.codes.type(type);
  if (out_dtype && *out_dtype != codes) fail(call.op, ": out_dtype must be ", codes, " for ", *call.codes.quant, ", got ", *out_dtype);
  if (!call.codes.given() && type != of_a && type != ScalarType::Float) {
    fail(call.op, ": out_dtype must be ", of_a, " or Float, got ", type);
  }
  return codes;
}

Tensor gemm(Tensor const& a, Tensor const& b, std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double alpha, double beta,
            std::string const& activation, std::optional<ScalarType> out_dtype, std::optional<std::string> const& quant,
            std::optional<Tensor> const& scale, bool constant_weights, std::optional<std::string> const& kernel) {
  GemmCall call{"minfer::gemm", a, b, c, bias, kernel, {quant, scale}};
  call.constant_weights = constant_weights;
  check_call(call, alpha, beta, activation);
  ScalarType const type = check_output_type(call, out_dtype, a.scalar_type());
  return run(call, type, OnDevice(call.op, a));
}

Tensor gemm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double alpha,
                double beta, std::string const& activation, std::optional<ScalarType> out_dtype, std::optional<std::string> const& quant,
                std::optional<Tensor> const& scale, bool constant_weights, std::optional<std::string> const& kernel, Tensor const& out) {
  GemmCall call{"minfer::gemm", a, b, c, bias, kernel, {quant, scale}};
  call.constant_weights = constant_weights;
  check_call(call, alpha, beta, activation);
  check_output(call, out, check_output_type(call, out_dtype, out.scalar_type()));
  run_into(call, out, OnDevice(call.op, a));
  return out;
}

Tensor gemm_gated(Tensor const& a, Tensor const& b, std::optional<Tensor> const& bias, std::string const& activation,
                  std::optional<std::string> const& quant, std::optional<Tensor> const& scale, bool constant_weights,
                  std::optional<std::string> const& kernel) {
  std::optional<Tensor> const no_c;
  GemmCall call{"minfer::gemm_gated", a, b, no_c, bias, kernel, {quant, scale}};
  check_call(call, 1.0, 0.0, activation);
  if (call.sizes.n % 16 != 0) {
    fail(call.op, ": b must have a multiple of 16 columns (pack_gate_up: blocks of 8 gate and 8 up columns), got b ", b);
  }
  call.gated = true;
  call.constant_weights = constant_weights;
  return run(call, call.codes.type(a.scalar_type()), OnDevice(call.op, a));
}

constexpr Operator kOperators[] = {
    // D = activation(alpha * A.B + beta * C + bias); with quant = 'fp8_tensor' the e4m3 codes of D / scale
    {"gemm(Tensor a, Tensor b, *, Tensor? c=None, Tensor? bias=None, float alpha=1.0, float beta=0.0, str activation='none', "
     "ScalarType? out_dtype=None, str? quant=None, Tensor? scale=None, bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&gemm>, boxed<&gemm_out>},
    // D = activation(gate) * up of A.B + bias, where 8 columns of B are gate columns and the next 8 are up columns
    {"gemm_gated(Tensor a, Tensor b, *, Tensor? bias=None, str activation='silu', str? quant=None, Tensor? scale=None, "
     "bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&gemm_gated>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

Tensor product_in_float(char const* op, Tensor const& x, Tensor const& w, OnDevice const& on) {
  std::optional<Tensor> const none;
  std::optional<std::string> const any;
  GemmCall call{op, x, w, none, none, any, {any, none}};
  call.b_transposed = true;
  check_operands(call);
  return run(call, ScalarType::Float, on);
}

void multiply(Product const& product, Tensor const& out, OnDevice const& on, std::function<void()> const& before) {
  std::optional<Tensor> const none;
  std::optional<std::string> const no_codes;
  GemmCall call{product.op, product.a, product.b, none, product.bias, product.kernel, {no_codes, none}};
  call.activation = product.activation;
  call.gated = product.gated;
  call.constant_weights = product.constant_weights;
  call.sizes = {product.a.size(0), product.b.size(1), product.a.size(1), 1, false};
  run(call, out, on, before);
}

}  // namespace minfer::torch_binding
