// GEMMs of operands of 8 bits with scales, e4m3 and int8, on CUDA tensors.
#include <algorithm>
#include <tuple>

#include "core/checks.h"
#include "core/operators.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "gemm_call.h"
#include "scaled_gemm.h"

namespace minfer::torch_binding {

namespace {

constexpr int64_t kBlock = 128;  // of k, and of a weight's columns, to a scale

int64_t blocks_of(int64_t extent) { return (extent + kBlock - 1) / kBlock; }

/// Numbers for the rows of an operand, or the columns of one, [lines] or [lines, 1]; or one for all, whose stride is 0.
bool describe_lines(Tensor const& x, int64_t lines, int64_t* stride) {
  if (x.numel() == 1 && x.dim() <= 2) {
    *stride = 0;
    return true;
  }
  if (x.dim() < 1 || x.dim() > 2 || x.size(0) != lines || (x.dim() == 2 && x.size(1) != 1)) return false;
  *stride = x.stride(0);
  return true;
}

/// The scales of blocks that an operand may have: none; [lines, k / 128]; or [2, lines, k / 128], of gates and of ups.
enum class Blocks { kNone, kWhole, kHalves };

/// How `scale` scales an operand of `lines` rows of A, or columns of B, by k; `block_lines` of them have a scale of blocks.
OperandScales describe_scale(char const* op, char const* name, Tensor const& scale, int64_t lines, int64_t block_lines, int64_t k,
                             Blocks allowed, Tensor const& a) {
  bool const takes_blocks = allowed != Blocks::kNone, halves = allowed == Blocks::kHalves;
  check_same_device(op, name, scale, {"a", a});
  OperandScales s;
  s.data = scale.data_ptr();
  int64_t const modes = scale.dim();
  bool const blocks = takes_blocks && modes == (halves ? 3 : 2) && (!halves || scale.size(0) == 2) &&
                      scale.size(modes - 2) == block_lines && scale.size(modes - 1) == blocks_of(k);
  bool const of_lines = describe_lines(scale, lines, &s.row_stride);
  if (!of_lines && blocks) {
    s.blocks = true;
    s.row_stride = scale.stride(modes - 2);
    s.k_stride = scale.stride(modes - 1);
    s.halves = halves;
    s.up_offset = halves ? scale.stride(0) : 0;
  } else if (!of_lines && takes_blocks) {
    fail(op, ": ", name, " must be one number, [", lines, "] or [", lines, ", 1], or, of blocks, [", halves ? "2, " : "", block_lines, ", ",
         blocks_of(k), "], got ", scale);
  } else if (!of_lines) {
    fail(op, ": ", name, " must be one number, [", lines, "] or [", lines, ", 1], got ", scale);
  }
  if (scale.scalar_type() == ScalarType::Byte && s.blocks) {
    s.exponents = true;
  } else if (scale.scalar_type() != ScalarType::Float) {
    fail(op, ": ", name, " must be Float", takes_blocks ? " (of blocks also Byte, exponents of two)" : "", ", got ", scale.scalar_type());
  }
  return s;
}

/// The 16-bit type of the call: D's, else that of a bias or c of 16 bits.
ScalarType narrow_type(ScalarType d, std::optional<Tensor> const& bias, std::optional<Tensor> const& c) {
  if (is_16bit_float(d)) return d;
  if (bias && is_16bit_float(bias->scalar_type())) return bias->scalar_type();
  if (c && is_16bit_float(c->scalar_type())) return c->scalar_type();
  return ScalarType::BFloat16;
}

/// The type of D of e4m3 products.
ScalarType fp8_output(char const* op, std::optional<ScalarType> out_dtype, std::optional<Tensor> const& out_scale, Tensor const& a) {
  ScalarType const type = out_dtype.value_or(out_scale ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16);
  if (!is_16bit_float(type) && type != ScalarType::Float && type != ScalarType::Float8_e4m3fn) {
    fail(op, ": out_dtype must be Half, BFloat16, Float or Float8_e4m3fn, got ", type);
  }
  if (out_scale.has_value() != (type == ScalarType::Float8_e4m3fn)) {
    fail(op, ": out_scale must be given for a D of Float8_e4m3fn, and for no other, got out_dtype ", type);
  }
  if (out_scale) check_operand(op, "out_scale", *out_scale, ScalarType::Float, {1}, {"a", a});
  return type;
}

/// The type of D of int8 products.
ScalarType int8_output(char const* op, std::optional<ScalarType> out_dtype, bool takes_int32) {
  ScalarType const type = out_dtype.value_or(ScalarType::BFloat16);
  if (!is_16bit_float(type) && type != ScalarType::Float && !(takes_int32 && type == ScalarType::Int)) {
    fail(op, ": out_dtype must be Half, BFloat16", takes_int32 ? ", Float or Int" : " or Float", ", got ", type);
  }
  return type;
}

/// Arguments that a product of 8-bit operands has.
struct Arguments {
  char const* op;
  Tensor const &a, &b, &a_scale, &b_scale;
  std::optional<Tensor> const &c, &bias;
  double beta;
  std::string const& activation;
  std::optional<Tensor> const& out_scale;
  std::optional<std::string> const& kernel;
  ScaledOperands scaled;
  bool constant_weights;
  bool gated = false;
  Tensor const *a_zero = nullptr, *b_sums = nullptr;
};

/// Zero points of A, for which each sum of products is less the zero point times the sum of B's column.
void set_zeros(Arguments& x, Sizes const& sizes) {
  if ((x.a_zero != nullptr) != (x.b_sums != nullptr)) fail(x.op, ": a_zero and b_sums must be given together");
  if (x.a_zero == nullptr) return;
  if (x.scaled.int32) fail(x.op, ": a_zero is not for a D of Int, which holds the sums themselves");
  if (x.a_zero->scalar_type() != ScalarType::Int) fail(x.op, ": a_zero must be Int, got ", x.a_zero->scalar_type());
  check_same_device(x.op, "a_zero", *x.a_zero, {"a", x.a});
  if (!describe_lines(*x.a_zero, sizes.m, &x.scaled.a_zero_stride)) {
    fail(x.op, ": a_zero must be one number, [", sizes.m, "] or [", sizes.m, ", 1], got ", *x.a_zero);
  }
  check_operand(x.op, "b_sums", *x.b_sums, ScalarType::Int, {sizes.n}, {"a", x.a});
  x.scaled.a_zero = *x.a_zero;
  x.scaled.b_sums = x.b_sums->stride(0) == 1 || sizes.n == 1 ? *x.b_sums : copy_of(x.op, "b_sums", *x.b_sums);
}

/// Checks everything but a given output, then calls run(call).
template <class Run>
auto checked(Arguments& x, Run const& run) {
  bool const fp8 = x.scaled.type == ScalarType::Float8_e4m3fn;
  std::optional<std::string> quant;
  if (x.out_scale) quant = "fp8_tensor";
  GemmCall call{x.op, x.a, x.b, x.c, x.bias, x.kernel, {quant, x.out_scale, "out_scale"}};
  call.scaled = &x.scaled;
  call.gated = x.gated;
  call.constant_weights = x.constant_weights;
  if (x.a.dim() < 2) fail(x.op, ": a must be [.., m, k], got ", x.a);
  if (x.b.dim() != 2) fail(x.op, ": b must be [k, n], got ", x.b);
  check_call(call, 1.0, x.beta, x.activation);
  if (x.gated && call.sizes.n % 16 != 0) {
    fail(x.op, ": b must have a multiple of 16 columns (pack_gate_up: blocks of 8 gate and 8 up columns), got b ", x.b);
  }
  auto const [m, n, k] = std::tuple(call.sizes.m, call.sizes.n, call.sizes.k);
  x.scaled.a = describe_scale(x.op, "a_scale", x.a_scale, m, m, k, fp8 ? Blocks::kWhole : Blocks::kNone, x.a);
  x.scaled.b = describe_scale(x.op, "b_scale", x.b_scale, n, blocks_of(x.gated ? n / 2 : n), k,
                              !fp8      ? Blocks::kNone
                              : x.gated ? Blocks::kHalves
                                        : Blocks::kWhole,
                              x.a);
  set_zeros(x, call.sizes);
  return run(call);
}

/// A call whose A has more modes than two, as one of the matrix of its rows.
struct Flattened {
  ShapeArray output;  // D's shape
  Tensor a, a_scale, a_zero;
  std::optional<Tensor> c;

  Arguments call(Arguments const& x) const {
    return {x.op,
            a,
            x.b,
            a_scale,
            x.b_scale,
            c,
            x.bias,
            x.beta,
            x.activation,
            x.out_scale,
            x.kernel,
            x.scaled,
            x.constant_weights,
            x.gated,
            x.a_zero != nullptr ? &a_zero : nullptr,
            x.b_sums};
  }
};

/// Scales of [.., m], [.., m, 1] or [.., m, blocks] belong to A's rows one by one; others are left as they are. Likewise zero points.
Tensor flatten_scale(char const* op, char const* name, Tensor const& scale, Tensor const& a) {
  int64_t const modes = a.dim() - 1;
  if (scale.dim() < modes || scale.dim() > modes + 1 || !same({scale.sizes().data(), size_t(modes)}, {a.sizes().data(), size_t(modes)})) {
    return scale;
  }
  if (scale.dim() == modes + 1) return as_matrix(op, name, scale);
  ShapeArray shape(size_t(modes) + 1), strides(size_t(modes) + 1);
  std::copy(scale.sizes().begin(), scale.sizes().end(), shape.data());
  std::copy(scale.strides().begin(), scale.strides().end(), strides.data());
  shape.back() = 1;
  strides.back() = 1;
  return as_matrix(op, name, view_of(op, name, scale, shape, strides));
}

/// C, which broadcasts to [.., m, n], so that it broadcasts to the matrix of all rows.
Tensor flatten_addend(char const* op, Tensor const& c, Shape output) {
  size_t const modes = output.size(), own = size_t(c.dim());
  if (own > modes) fail(op, ": c must broadcast to the output, got c ", c);
  bool repeats = true;    // every row is the same
  bool whole = own >= 2;  // it has all rows
  for (size_t i = 0; i < modes; ++i) {
    int64_t const extent = i < modes - own ? 1 : c.size(int64_t(i + own - modes));
    if (extent != 1 && extent != output[i]) fail(op, ": c must broadcast to ", Listed{output}, ", got c ", c);
    if (i + 1 == modes) break;
    repeats = repeats && extent == 1;
    whole = whole && extent == output[i];
  }
  if (own < 2) return c;
  if (repeats) return view_of(op, "c", c, {1, c.size(c.dim() - 1)}, {0, c.stride(c.dim() - 1)});
  if (whole) return as_matrix(op, "c", c);
  ShapeArray shape(output);
  shape.back() = c.size(c.dim() - 1);
  Tensor const copy = allocate(op, c, shape, c.scalar_type(), "a copy of c ", c);
  copy_into(op, "c", copy, c);
  return as_matrix(op, "c", copy);
}

Flattened flatten(Arguments const& x) {
  Flattened flat{ShapeArray(x.a.sizes()), as_matrix(x.op, "a", x.a), flatten_scale(x.op, "a_scale", x.a_scale, x.a), {}, {}};
  if (x.a_zero != nullptr) flat.a_zero = flatten_scale(x.op, "a_zero", *x.a_zero, x.a);
  if (x.b.dim() != 2) fail(x.op, ": b must be [k, n], got ", x.b);
  flat.output.back() = x.gated ? x.b.size(1) / 2 : x.b.size(1);
  if (x.c) flat.c = flatten_addend(x.op, *x.c, flat.output);
  return flat;
}

Tensor into_new(Arguments x, ScalarType type) {
  if (x.a.dim() > 2) {
    Flattened const flat = flatten(x);
    return view_of(x.op, "the output", into_new(flat.call(x), type), flat.output);
  }
  return checked(x, [&](GemmCall const& call) { return run(call, type, OnDevice(x.op, x.a)); });
}

Tensor into_given(Arguments x, ScalarType type, Tensor const& out) {
  if (x.a.dim() > 2) {
    Flattened const flat = flatten(x);
    check_operand(x.op, "out", out, type, flat.output, {"a", x.a});
    check_apart(x.op, out);
    check_no_overlap(x.op, out, "a", x.a);
    check_no_overlap(x.op, out, "a_scale", x.a_scale);
    if (x.a_zero != nullptr) check_no_overlap(x.op, out, "a_zero", *x.a_zero);
    if (x.c && in_float32(x.op, "beta", x.beta) != 0.0f && !is_same_view(out, *x.c)) check_no_overlap(x.op, out, "c", *x.c);
    Tensor const rows = matrix_view(x.op, "out", out);
    if (rows.defined()) {
      into_given(flat.call(x), type, rows);
    } else {
      copy_into(x.op, "out", out, into_new(x, type));
    }
    return out;
  }
  return checked(x, [&](GemmCall const& call) {
    check_output(call, out, type);
    check_no_overlap(x.op, out, "a_scale", x.a_scale);
    check_no_overlap(x.op, out, "b_scale", x.b_scale);
    if (x.a_zero != nullptr) {
      check_no_overlap(x.op, out, "a_zero", *x.a_zero);
      check_no_overlap(x.op, out, "b_sums", *x.b_sums);
    }
    run_into(call, out, OnDevice(x.op, x.a));
    return out;
  });
}

std::optional<Tensor> const kNoTensor;

Arguments fp8(char const* op, Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale,
              std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double beta, std::string const& activation,
              std::optional<Tensor> const& out_scale, bool fast_accum, bool constant_weights, std::optional<std::string> const& kernel,
              ScalarType d) {
  return {op,
          a,
          b,
          a_scale,
          b_scale,
          c,
          bias,
          beta,
          activation,
          out_scale,
          kernel,
          {ScalarType::Float8_e4m3fn, {}, {}, narrow_type(d, bias, c), fast_accum, false},
          constant_weights};
}

Tensor gemm_fp8(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, std::optional<Tensor> const& c,
                std::optional<Tensor> const& bias, double beta, std::string const& activation, std::optional<ScalarType> out_dtype,
                std::optional<Tensor> const& out_scale, bool fast_accum, bool constant_weights, std::optional<std::string> const& kernel) {
  char const* op = "minfer::gemm_fp8";
  ScalarType const type = fp8_output(op, out_dtype, out_scale, a);
  return into_new(fp8(op, a, b, a_scale, b_scale, c, bias, beta, activation, out_scale, fast_accum, constant_weights, kernel, type), type);
}

Tensor gemm_fp8_out(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, std::optional<Tensor> const& c,
                    std::optional<Tensor> const& bias, double beta, std::string const& activation, std::optional<ScalarType> out_dtype,
                    std::optional<Tensor> const& out_scale, bool fast_accum, bool constant_weights,
                    std::optional<std::string> const& kernel, Tensor const& out) {
  char const* op = "minfer::gemm_fp8";
  ScalarType const type = fp8_output(op, out_dtype ? out_dtype : out.scalar_type(), out_scale, a);
  return into_given(fp8(op, a, b, a_scale, b_scale, c, bias, beta, activation, out_scale, fast_accum, constant_weights, kernel, type), type,
                    out);
}

Tensor gemm_fp8_gated(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, std::optional<Tensor> const& bias,
                      std::string const& activation, std::optional<ScalarType> out_dtype, std::optional<Tensor> const& out_scale,
                      bool fast_accum, bool constant_weights, std::optional<std::string> const& kernel) {
  char const* op = "minfer::gemm_fp8_gated";
  ScalarType const type = fp8_output(op, out_dtype, out_scale, a);
  Arguments x = fp8(op, a, b, a_scale, b_scale, kNoTensor, bias, 0.0, activation, out_scale, fast_accum, constant_weights, kernel, type);
  x.gated = true;
  return into_new(x, type);
}

Arguments int8(char const* op, Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale,
               std::optional<Tensor> const& a_zero, std::optional<Tensor> const& b_sums, std::optional<Tensor> const& c,
               std::optional<Tensor> const& bias, double beta, std::string const& activation, bool constant_weights,
               std::optional<std::string> const& kernel, ScalarType d) {
  bool const int32 = d == ScalarType::Int;
  if (int32 && (c || bias || activation != "none")) {
    fail(op, ": c, bias and activation are not for a D of Int, which holds the sums themselves");
  }
  Arguments x{op,
              a,
              b,
              a_scale,
              b_scale,
              c,
              bias,
              beta,
              activation,
              kNoTensor,
              kernel,
              {ScalarType::Char, {}, {}, narrow_type(d, bias, c), false, int32},
              constant_weights};
  x.a_zero = a_zero ? &*a_zero : nullptr;
  x.b_sums = b_sums ? &*b_sums : nullptr;
  return x;
}

Tensor gemm_int8(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, std::optional<Tensor> const& a_zero,
                 std::optional<Tensor> const& b_sums, std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double beta,
                 std::string const& activation, std::optional<ScalarType> out_dtype, bool constant_weights,
                 std::optional<std::string> const& kernel) {
  char const* op = "minfer::gemm_int8";
  ScalarType const type = int8_output(op, out_dtype, true);
  return into_new(int8(op, a, b, a_scale, b_scale, a_zero, b_sums, c, bias, beta, activation, constant_weights, kernel, type), type);
}

Tensor gemm_int8_out(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, std::optional<Tensor> const& a_zero,
                     std::optional<Tensor> const& b_sums, std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double beta,
                     std::string const& activation, std::optional<ScalarType> out_dtype, bool constant_weights,
                     std::optional<std::string> const& kernel, Tensor const& out) {
  char const* op = "minfer::gemm_int8";
  ScalarType const type = int8_output(op, out_dtype ? out_dtype : out.scalar_type(), true);
  return into_given(int8(op, a, b, a_scale, b_scale, a_zero, b_sums, c, bias, beta, activation, constant_weights, kernel, type), type, out);
}

Tensor gemm_int8_gated(Tensor const& a, Tensor const& b, Tensor const& a_scale, Tensor const& b_scale, std::optional<Tensor> const& a_zero,
                       std::optional<Tensor> const& b_sums, std::optional<Tensor> const& bias, std::string const& activation,
                       std::optional<ScalarType> out_dtype, bool constant_weights, std::optional<std::string> const& kernel) {
  char const* op = "minfer::gemm_int8_gated";
  ScalarType const type = int8_output(op, out_dtype, false);
  Arguments x = int8(op, a, b, a_scale, b_scale, a_zero, b_sums, kNoTensor, bias, 0.0, activation, constant_weights, kernel, type);
  x.gated = true;
  return into_new(x, type);
}

constexpr Operator kOperators[] = {
    // D = activation((A * a_scale).(B * b_scale) + beta * C + bias), A and B of e4m3
    {"gemm_fp8(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, *, Tensor? c=None, Tensor? bias=None, float beta=0.0, "
     "str activation='none', ScalarType? out_dtype=None, Tensor? out_scale=None, bool fast_accum=False, bool constant_weights=False, str? "
     "kernel=None) -> Tensor",
     boxed<&gemm_fp8>, boxed<&gemm_fp8_out>},
    {"gemm_fp8_gated(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, *, Tensor? bias=None, str activation='silu', "
     "ScalarType? out_dtype=None, Tensor? out_scale=None, bool fast_accum=False, bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&gemm_fp8_gated>},
    // the same, A and B of int8
    {"gemm_int8(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, *, Tensor? a_zero=None, Tensor? b_sums=None, Tensor? c=None, Tensor? "
     "bias=None, float beta=0.0, "
     "str activation='none', ScalarType? out_dtype=None, bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&gemm_int8>, boxed<&gemm_int8_out>},
    {"gemm_int8_gated(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, *, Tensor? a_zero=None, Tensor? b_sums=None, Tensor? bias=None, "
     "str activation='silu', "
     "ScalarType? out_dtype=None, bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&gemm_int8_gated>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

OperandScales check_weight_scale(char const* op, char const* name, Tensor const& scale, int64_t n, int64_t k, bool gated, Tensor const& a) {
  return describe_scale(op, name, scale, n, blocks_of(gated ? n / 2 : n), k, gated ? Blocks::kHalves : Blocks::kWhole, a);
}

void run(Fp8Product const& p, Tensor const& out) {
  Tensor const b = view_of(p.op, "the weight", p.weight, {p.weight.size(1), p.weight.size(0)}, {p.weight.stride(1), p.weight.stride(0)});
  std::string const activation = name_of(p.activation);  // Arguments refers to it
  std::optional<std::string> const any;
  Arguments x = fp8(p.op, p.a, b, p.a_scale, p.weight_scale, p.c, p.bias, p.c ? 1.0 : 0.0, activation, kNoTensor, false, p.constant_weights,
                    any, out.scalar_type());
  x.gated = p.gated;
  into_given(x, out.scalar_type(), out);
}

}  // namespace minfer::torch_binding
