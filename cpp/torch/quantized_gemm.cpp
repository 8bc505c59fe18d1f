// GEMMs with weights in 4-bit and 8-bit codes on CUDA tensors. Operators of both widths, and those with activations of 8 bits, have one
// implementation (quantized_gemm_call.h); they differ in defaults, in the formats that they take and in the names that messages give.
#include "core/checks.h"
#include "core/device.h"
#include "core/operators.h"
#include "core/parse.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "fused.h"
#include "packed_weight.h"
#include "quantized_gemm_call.h"

namespace minfer::torch_binding {

namespace {

Tensor pack(char const* op, WeightFormat format, Tensor const& codes) {
  if (codes.dim() != 2) fail(op, ": codes must be [n, k], got ", codes);
  if (codes.scalar_type() != ScalarType::Byte) fail(op, ": codes must be Byte, got ", codes.scalar_type());
  int64_t const n = codes.size(0), k = codes.size(1);
  if (n % 8 != 0) fail(op, ": codes must have n rows, a multiple of 8, got ", codes);
  if (k % 8 != 0) fail(op, ": codes must have k columns, a multiple of 8, got ", codes);
  OnDevice const on(op, codes);
  Tensor const rows = unit_rows(op, "codes", codes);
  Tensor const packed = allocate(op, codes, packed_shape(format, n, k), ScalarType::Int, "the packed weight of codes ", codes);
  Status const status =
      pack_weight(format, static_cast<uint8_t const*>(rows.data_ptr()), n, k, leading(rows), packed.data_ptr(), on.stream());
  if (!status.ok()) fail(op, ": codes ", codes, ": ", status.message);
  return packed;
}

Tensor dequantize(char const* op, PackedWeight const& weight, int64_t n, int64_t k, std::optional<ScalarType> out_dtype) {
  auto const& [qweight, scales, zeros, format, group_size, alpha] = weight;
  bool const wide = scale_bytes_of(format) == 2;
  if (wide) {
    check_16bit(op, "scales", scales);
  } else if (scales.scalar_type() != ScalarType::Byte) {
    fail(op, ": scales must be Byte for ", name_of(format), ", got ", scales.scalar_type());
  }
  ScalarType const type = out_dtype ? *out_dtype : wide ? scales.scalar_type() : ScalarType::BFloat16;
  if (!is_16bit_float(type)) fail(op, ": out_dtype must be float16 or bfloat16, got ", type);
  if (wide && type != scales.scalar_type()) fail(op, ": out_dtype must be scales' dtype ", scales.scalar_type(), ", got ", type);
  if (n < 0 || k < 0) fail(op, ": n and k must not be negative, got ", n, " and ", k);
  if (scales.dim() != 2 || scales.size(1) != n) fail(op, ": scales must be [groups, n] with n = ", n, ", got ", scales);
  check_weight(op, weight, n, k);
  OnDevice const on(op, qweight);
  Weight const w = describe(op, weight, n, k);
  Tensor const out = allocate(op, scales, {n, k}, type, "the weight [", n, ", ", k, "] in 16 bits");
  Status const status = dequantize_weight(w.to_dequantize(), data_type(type), out.data_ptr(), on.stream());
  if (!status.ok()) fail(op, ": a weight [", n, ", ", k, "]: ", status.message);
  return out;
}

template <int bits>
constexpr char const* kGemm = bits == 4 ? "minfer::w4a16_gemm" : "minfer::w8a16_gemm";

template <int bits>
Tensor gemm(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
            double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
            std::string const& activation, std::string const& format, bool constant_weights, std::optional<ScalarType> out_dtype,
            std::optional<std::string> const& quant, std::optional<Tensor> const& scale, std::optional<std::string> const& kernel) {
  char const* op = kGemm<bits>;
  PackedWeight const weight{qweight, scales, zeros, parse_format(op, bits, format), group_size, alpha};
  Activation const of_sums = parse_activation(op, activation);
  return run({op, a, weight, perm, c, bias, of_sums, false, constant_weights, kernel, {quant, scale}, "a", nullptr, out_dtype});
}

template <int bits>
Tensor gemm_out(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                std::string const& activation, std::string const& format, bool constant_weights, std::optional<ScalarType> out_dtype,
                std::optional<std::string> const& quant, std::optional<Tensor> const& scale, std::optional<std::string> const& kernel,
                Tensor const& out) {
  char const* op = kGemm<bits>;
  PackedWeight const weight{qweight, scales, zeros, parse_format(op, bits, format), group_size, alpha};
  Activation const of_sums = parse_activation(op, activation);
  if (!out_dtype && !quant && out.scalar_type() == ScalarType::Float) out_dtype = ScalarType::Float;
  return run_out({op, a, weight, perm, c, bias, of_sums, false, constant_weights, kernel, {quant, scale}, "a", nullptr, out_dtype}, out);
}

template <int bits>
Tensor gemm_gated(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                  double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& bias, std::string const& activation,
                  std::string const& format, bool constant_weights, std::optional<std::string> const& quant,
                  std::optional<Tensor> const& scale, std::optional<std::string> const& kernel) {
  char const* op = bits == 4 ? "minfer::w4a16_gemm_gated" : "minfer::w8a16_gemm_gated";
  std::optional<Tensor> const no_c;
  PackedWeight const weight{qweight, scales, zeros, parse_format(op, bits, format), group_size, alpha};
  return run({op, a, weight, perm, no_c, bias, parse_activation(op, activation), true, constant_weights, kernel, {quant, scale}});
}

/// The norm of x is written by the row kernel, and is the GEMM's a: two launches.
Tensor run_behind_norm(Norm const& norm, QuantizedGemmCall call) {
  check_call(call);
  check_apart_from_residual(norm, "qweight", call.weight.packed);
  check_apart_from_residual(norm, "scales", call.weight.scales);
  check_apart_from_residual(norm, "zeros", call.weight.zeros);
  check_apart_from_residual(norm, "perm", call.perm);
  check_apart_from_residual(norm, "bias", call.bias);
  OnDevice const on(call.op, norm.x);
  Tensor const out = allocate_output(call);
  Tensor const a = allocate(call.op, norm.x, {norm.rows(), norm.width()}, norm.x.scalar_type(), "the norm of x ", norm.x);
  run(QuantizedGemmCall{call.op, a, call.weight, call.perm, call.c, call.bias, call.activation, call.gated, call.constant_weights,
                        call.kernel, call.codes},
      out, on, [&] { normalize(norm, a, on); });
  return out;
}

constexpr char const* kTwoLaunches = "two_launches";  // the `kernel=` that says what is done anyway

template <int bits, bool gated>
Tensor rms_norm_gemm(Tensor const& x, std::optional<Tensor> const& norm_weight, Tensor const& qweight, Tensor const& scales,
                     std::optional<Tensor> const& zeros, double eps, std::optional<Tensor> const& residual, double weight_offset,
                     int64_t group_size, double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& bias,
                     std::string const& activation, std::string const& format, bool constant_weights,
                     std::optional<std::string> const& kernel) {
  char const* op = bits == 4 ? (gated ? "minfer::rms_norm_w4a16_gemm_gated" : "minfer::rms_norm_w4a16_gemm")
                             : (gated ? "minfer::rms_norm_w8a16_gemm_gated" : "minfer::rms_norm_w8a16_gemm");
  std::optional<Tensor> const no_c;
  std::optional<std::string> const any;
  Norm const norm = check_norm(op, x, norm_weight, eps, weight_offset, residual);
  PackedWeight const weight{qweight, scales, zeros, parse_format(op, bits, format), group_size, alpha};
  bool const said = kernel && *kernel == kTwoLaunches;
  return run_behind_norm(
      norm,
      {op, x, weight, perm, no_c, bias, parse_activation(op, activation), gated, constant_weights, said ? any : kernel, {any, no_c}, "x"});
}

Tensor w4a16_pack(Tensor const& codes, std::string const& w4_format) {
  char const* op = "minfer::w4a16_pack";
  return pack(op, parse_format(op, 4, w4_format), codes);
}

/// All 8-bit formats have one layout.
Tensor w8a16_pack(Tensor const& codes) { return pack("minfer::w8a16_pack", WeightFormat::kInt8, codes); }

Tensor w4a16_dequantize(Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size, double alpha,
                        int64_t n, int64_t k, std::string const& w4_format, std::optional<ScalarType> out_dtype) {
  char const* op = "minfer::w4a16_dequantize";
  return dequantize(op, {qweight, scales, zeros, parse_format(op, 4, w4_format), group_size, alpha}, n, k, out_dtype);
}

/// Every 8-bit format has 16-bit scales, whose type is the output's.
Tensor w8a16_dequantize(Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size, double alpha,
                        int64_t n, int64_t k, std::string const& w8_format) {
  char const* op = "minfer::w8a16_dequantize";
  return dequantize(op, {qweight, scales, zeros, parse_format(op, 8, w8_format), group_size, alpha}, n, k, std::nullopt);
}

QuantizedGemmCall w4a8(char const* op, Tensor const& a, Tensor const& a_scale, PackedWeight const& weight,
                       std::optional<Tensor> const& none, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                       std::string const& activation, bool gated, std::optional<std::string> const& quant,
                       std::optional<Tensor> const& scale, std::optional<std::string> const& kernel) {
  return {op, a, weight, none, c, bias, parse_activation(op, activation), gated, false, kernel, {quant, scale}, "a", &a_scale};
}

std::optional<Tensor> const kNone;

Tensor w4a8_gemm(Tensor const& a, Tensor const& a_scale, Tensor const& qweight, Tensor const& scales, int64_t group_size, double alpha,
                 std::optional<Tensor> const& c, std::optional<Tensor> const& bias, std::string const& activation,
                 std::optional<std::string> const& quant, std::optional<Tensor> const& scale, std::optional<std::string> const& kernel) {
  PackedWeight const weight{qweight, scales, kNone, WeightFormat::kInt4, group_size, alpha};
  return run(w4a8("minfer::w4a8_gemm", a, a_scale, weight, kNone, c, bias, activation, false, quant, scale, kernel));
}

Tensor w4a8_gemm_out(Tensor const& a, Tensor const& a_scale, Tensor const& qweight, Tensor const& scales, int64_t group_size, double alpha,
                     std::optional<Tensor> const& c, std::optional<Tensor> const& bias, std::string const& activation,
                     std::optional<std::string> const& quant, std::optional<Tensor> const& scale, std::optional<std::string> const& kernel,
                     Tensor const& out) {
  PackedWeight const weight{qweight, scales, kNone, WeightFormat::kInt4, group_size, alpha};
  return run_out(w4a8("minfer::w4a8_gemm", a, a_scale, weight, kNone, c, bias, activation, false, quant, scale, kernel), out);
}

Tensor w4a8_gemm_gated(Tensor const& a, Tensor const& a_scale, Tensor const& qweight, Tensor const& scales, int64_t group_size,
                       double alpha, std::optional<Tensor> const& bias, std::string const& activation,
                       std::optional<std::string> const& quant, std::optional<Tensor> const& scale,
                       std::optional<std::string> const& kernel) {
  PackedWeight const weight{qweight, scales, kNone, WeightFormat::kInt4, group_size, alpha};
  return run(w4a8("minfer::w4a8_gemm_gated", a, a_scale, weight, kNone, kNone, bias, activation, true, quant, scale, kernel));
}

constexpr Operator kOperators[] = {
    // D = activation(alpha * A.W^T + C + bias), where W [n, k] is (code - zero) * scale, or a code book's value * scale, of 4-bit codes
    {"w4a16_gemm(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=128, float alpha=1.0, Tensor? perm=None, "
     "Tensor? c=None, Tensor? bias=None, str activation='none', str w4_format='int4', bool constant_weights=False, "
     "ScalarType? out_dtype=None, str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&gemm<4>>, boxed<&gemm_out<4>>},
    {"w4a16_gemm_gated(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=128, float alpha=1.0, "
     "Tensor? perm=None, Tensor? bias=None, str activation='silu', str w4_format='int4', bool constant_weights=False, "
     "str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&gemm_gated<4>>},
    {"w4a16_pack(Tensor codes, *, str w4_format='int4') -> Tensor", boxed<&w4a16_pack>},
    {"w4a16_dequantize(Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=128, float alpha=1.0, int n, int k, "
     "str w4_format='int4', ScalarType? out_dtype=None) -> Tensor",
     boxed<&w4a16_dequantize>},
    // The same of 8-bit codes
    {"w8a16_gemm(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=-1, float alpha=1.0, Tensor? perm=None, "
     "Tensor? c=None, Tensor? bias=None, str activation='none', str w8_format='int8', bool constant_weights=False, "
     "ScalarType? out_dtype=None, str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&gemm<8>>, boxed<&gemm_out<8>>},
    {"w8a16_gemm_gated(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=-1, float alpha=1.0, "
     "Tensor? perm=None, Tensor? bias=None, str activation='silu', str w8_format='int8', bool constant_weights=False, "
     "str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&gemm_gated<8>>},
    {"w8a16_pack(Tensor codes) -> Tensor", boxed<&w8a16_pack>},
    {"w8a16_dequantize(Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=-1, float alpha=1.0, int n, int k, "
     "str w8_format='int8') -> Tensor",
     boxed<&w8a16_dequantize>},
    // D = activation(alpha * (A * a_scale).W^T + C + bias), A of e4m3 or int8, W of int4 codes without zero points
    {"w4a8_gemm(Tensor a, Tensor a_scale, Tensor qweight, Tensor scales, *, int group_size=128, float alpha=1.0, Tensor? c=None, "
     "Tensor? bias=None, str activation='none', str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&w4a8_gemm>, boxed<&w4a8_gemm_out>},
    {"w4a8_gemm_gated(Tensor a, Tensor a_scale, Tensor qweight, Tensor scales, *, int group_size=128, float alpha=1.0, Tensor? bias=None, "
     "str activation='silu', str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&w4a8_gemm_gated>},
    // The same of 16-bit activations a = rms_norm(x), or rms_norm(residual += x)
    {"rms_norm_w4a16_gemm(Tensor x, Tensor? norm_weight, Tensor qweight, Tensor scales, Tensor? zeros=None, float eps=1e-06, *, "
     "Tensor(a!)? residual=None, float weight_offset=0.0, int group_size=128, float alpha=1.0, Tensor? perm=None, Tensor? bias=None, "
     "str activation='none', str w4_format='int4', bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&rms_norm_gemm<4, false>>},
    {"rms_norm_w4a16_gemm_gated(Tensor x, Tensor? norm_weight, Tensor qweight, Tensor scales, Tensor? zeros=None, float eps=1e-06, *, "
     "Tensor(a!)? residual=None, float weight_offset=0.0, int group_size=128, float alpha=1.0, Tensor? perm=None, Tensor? bias=None, "
     "str activation='silu', str w4_format='int4', bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&rms_norm_gemm<4, true>>},
    {"rms_norm_w8a16_gemm(Tensor x, Tensor? norm_weight, Tensor qweight, Tensor scales, Tensor? zeros=None, float eps=1e-06, *, "
     "Tensor(a!)? residual=None, float weight_offset=0.0, int group_size=-1, float alpha=1.0, Tensor? perm=None, Tensor? bias=None, "
     "str activation='none', str w8_format='int8', bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&rms_norm_gemm<8, false>>},
    {"rms_norm_w8a16_gemm_gated(Tensor x, Tensor? norm_weight, Tensor qweight, Tensor scales, Tensor? zeros=None, float eps=1e-06, *, "
     "Tensor(a!)? residual=None, float weight_offset=0.0, int group_size=-1, float alpha=1.0, Tensor? perm=None, Tensor? bias=None, "
     "str activation='silu', str w8_format='int8', bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&rms_norm_gemm<8, true>>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
