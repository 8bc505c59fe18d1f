// torch.ops.minfer.w4a16_* and w8a16_* on CUDA tensors.
#include "minfer/w4a16.h"

#include <cmath>

#include "bindings.h"
#include "core/checks.h"
#include "core/device.h"
#include "core/parse.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "gemm_planning.h"
#include "minfer/gemm.h"
#include "packed_weight.h"

namespace minfer::torch_binding {

namespace {

/// A quantised weight as the caller gives it: qweight [n / 64, k / 64, 512 (8-bit: 1024)], scales and zeros [groups, n].
struct PackedWeight {
  Tensor const &packed, &scales;
  std::optional<Tensor> const& zeros;
  WeightFormat format;
  int64_t group_size;
  double alpha;
};

/// .. as kernels read it.
struct Weight {
  Tensor packed, scales, zeros;  // without zero points no tensor
  WeightFormat format;
  int64_t n = 0, k = 0, group_size = 0;  // group_size 0: all of k
  double alpha = 1.0;

  int64_t ld(Tensor const& x) const { return x.size(0) > 1 ? x.stride(0) : round_up(n, 16); }
  /// Whether all of it is the caller's own memory; a copy has been written by the work in front of the kernel that reads it.
  bool is_callers(PackedWeight const& w) const {
    return packed.data_ptr() == w.packed.data_ptr() && scales.data_ptr() == w.scales.data_ptr() &&
           (!zeros.defined() || zeros.data_ptr() == w.zeros->data_ptr());
  }
  QuantizedWeight described() const {
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

void check_weight(char const* op, PackedWeight const& w, int64_t n, int64_t k) {
  auto const& [qweight, scales, zeros, format, group_size, alpha] = w;
  check_group_size(op, format, group_size);
  if (!std::isfinite(float(alpha))) fail(op, ": alpha must be finite in float32, got ", alpha);
  if (k % 8 != 0) fail(op, ": k must be a multiple of 8, got ", k);
  if (n % 8 != 0) fail(op, ": scales must have n = ", n, " columns, a multiple of 8, got ", scales);
  int64_t const groups = groups_of(group_size, k);
  auto const packed = packed_shape(format, n, k);
  if (!same(qweight.sizes(), packed)) {
    fail(op, ": qweight must be [ceil(n / 64), ceil(k / 64), ", packed[2], "] = ", Listed{packed}, " (",
         bits_of(format) == 4 ? "w4a16_pack" : "w8a16_pack", "), got ", qweight);
  }
  if (qweight.scalar_type() != ScalarType::Int) fail(op, ": qweight must be Int, got ", qweight.scalar_type());
  if (!same(scales.sizes(), {groups, n})) {
    fail(op, ": scales must be [groups, n] = [", groups, ", ", n, "] for k = ", k, " and group_size = ", group_size, ", got ", scales);
  }
  check_same_device(op, "scales", scales, {"qweight", qweight});
  if (!zeros) return;
  if (!has_zero_points(format)) fail(op, ": zeros must be None for ", name_of(format), ", got ", *zeros);
  if (!same(zeros->sizes(), {groups, n})) fail(op, ": zeros must be [groups, n] = [", groups, ", ", n, "], got ", *zeros);
  if (zeros->scalar_type() != scales.scalar_type()) {
    fail(op, ": zeros must be ", scales.scalar_type(), ", got ", zeros->scalar_type());
  }
  check_same_device(op, "zeros", *zeros, {"qweight", qweight});
}

Weight describe(char const* op, PackedWeight const& w, int64_t n, int64_t k) {
  Weight d;
  d.packed = aligned_contiguous(op, "qweight", w.packed);
  d.scales = aligned_rows(op, "scales", w.scales);
  if (w.zeros) d.zeros = aligned_rows(op, "zeros", *w.zeros);
  d.format = w.format;
  d.n = n;
  d.k = k;
  d.group_size = planned_group(w.group_size, k);
  d.alpha = w.alpha;
  return d;
}

/// [m, columns] of a tensor whose leading modes are walked as one.
struct Rows {
  Tensor tensor;
  int64_t m = 1, stride = 0;
};

int64_t rows_of(Tensor const& x) {
  int64_t m = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) m *= x.size(i);
  return m;
}

/// Whether rows are evenly spaced, contiguous and aligned as TMA wants them; the stride between them.
bool walks(Tensor const& x, int64_t m, int64_t* stride) {
  int64_t const last = x.dim() - 1;
  *stride = round_up(std::max<int64_t>(x.size(last), 1), 8);
  if (m == 0 || x.size(last) == 0) return true;
  bool even = x.stride(last) == 1 || x.size(last) == 1;
  int64_t expected = -1;
  for (int64_t i = last - 1; i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (expected < 0) {
      *stride = x.stride(i);
    } else {
      even = even && x.stride(i) == expected;
    }
    expected = x.stride(i) * x.size(i);
  }
  return even && x.is_aligned(16) && *stride % 8 == 0 && (m <= 1 || *stride >= x.size(last));
}

Rows flatten_rows(char const* op, char const* name, Tensor const& x) {
  Rows r{x, rows_of(x), 0};
  if (walks(x, r.m, &r.stride)) return r;
  r.tensor = copy_of(op, name, x);
  r.stride = x.size(x.dim() - 1);
  return r;
}

struct Call {
  char const* op;
  Tensor const& a;
  PackedWeight weight;
  std::optional<Tensor> const &perm, &c, &bias;
  Activation activation;
  bool gated;
  bool constant_weights;  // nothing that still runs writes qweight, scales or zeros
  std::optional<std::string> const& kernel;

  int64_t n() const { return weight.scales.size(1); }  // of a checked call
  int64_t k() const { return a.size(a.dim() - 1); }
  int64_t columns() const { return gated ? n() / 2 : n(); }  // of the output
  OwnShape output() const {
    OwnShape shape(a.sizes());
    shape.back() = columns();
    return shape;
  }
};

void check_addend(Call const& call) {
  char const* op = call.op;
  Tensor const& c = *call.c;
  OwnShape shape = call.output();
  bool fits = c.dim() <= int64_t(shape.size());
  for (int64_t i = 0; fits && i < c.dim(); ++i) fits = c.size(i) == 1 || c.size(i) == shape[shape.size() - size_t(c.dim() - i)];
  if (!fits) fail(op, ": c must broadcast to the output, got c ", c);
  if (c.scalar_type() != call.a.scalar_type() && c.scalar_type() != ScalarType::Float) {
    fail(op, ": c must be ", call.a.scalar_type(), " or Float, got ", c.scalar_type());
  }
  check_same_device(op, "c", c, {"a", call.a});
}

/// All arguments but the output.
void check_call(Call const& call) {
  char const* op = call.op;
  Tensor const &a = call.a, &scales = call.weight.scales;
  if (scales.dim() != 2) fail(op, ": scales must be [groups, n], got ", scales);
  if (a.dim() < 1) fail(op, ": a must be [..., k], got a ", a);
  check_16bit(op, "a", a);
  check_scale_type(op, "scales", scales, call.weight.format, a.scalar_type());
  Beside const beside{"a", a};
  check_same_device(op, "qweight", call.weight.packed, beside);
  int64_t const n = call.n(), k = call.k();
  if (call.gated && n % 16 != 0) {
    fail(op, ": scales must have a multiple of 16 columns (blocks of 8 gate and 8 up rows), got ", scales);
  }
  check_weight(op, call.weight, n, k);
  if (call.bias) check_bias(op, *call.bias, n, beside);
  if (call.perm) {
    Tensor const& perm = *call.perm;
    if (!same(perm.sizes(), {k})) fail(op, ": perm must be [k] = [", k, "], got ", perm);
    if (perm.scalar_type() != ScalarType::Int) fail(op, ": perm must be Int, got ", perm.scalar_type());
    check_same_device(op, "perm", perm, beside);
  }
  if (call.c) check_addend(call);
}

/// The operands' and the problem's part of C; returns what they point to.
Tensor describe_addend(Call const& call, int64_t m, Tensor const& out, GemmProblem* problem, GemmOperands* operands) {
  operands->beta = 1.0f;
  problem->has_c = true;
  Tensor c = *call.c;
  operands->c_type = data_type(c.scalar_type());
  if (c.dim() <= 1) {
    operands->c_stride_n = c.dim() == 1 && c.size(0) != 1 ? c.stride(0) : 0;
  } else {
    int64_t stride = 0;
    if (!same(c.sizes(), out.sizes()) || !walks(c, m, &stride)) {
      c = allocate(call.op, out, out.sizes(), c.scalar_type(), "c ", *call.c, " of the output's shape");
      copy_into(call.op, "c", c, *call.c);
      stride = c.size(c.dim() - 1);
    }
    operands->c_stride_m = stride;
    operands->c_stride_n = 1;
    operands->c_batch_stride = round_up(m * stride, 8);
    problem->c_alignment = c.scalar_type() == out.scalar_type() && stride % 8 == 0 && c.is_aligned(16) ? 16 : 0;
  }
  operands->c = c.data_ptr();
  return c;
}

/// The weight in 16 bits; alpha stays with the accumulators, for a small one would take the weights below fp16's range.
Tensor dequantized_weight(Call const& call, Weight const& w, OnDevice const& on) {
  Tensor const dense =
      allocate(call.op, call.a, {w.n, w.k}, call.a.scalar_type(), "the weight [", w.n, ", ", w.k, "] in 16 bits, beside a ", call.a);
  QuantizedWeight weight = w.described();
  weight.alpha = 1.0f;
  Status const status = dequantize_weight(weight, data_type(call.a.scalar_type()), dense.data_ptr(), on.stream());
  if (!status.ok()) fail(call.op, ": writing the weight [", w.n, ", ", w.k, "] in 16 bits: ", status.message);
  return dense;
}

/// Runs the call into `out`, contiguous.
void run(Call const& call, Tensor const& out, OnDevice const& on) {
  char const* op = call.op;
  int64_t const k = call.k(), n = call.n(), columns = call.columns();
  Rows a = flatten_rows(op, "a", call.a);
  if (a.m == 0 || n == 0) {
    if (call.kernel && *call.kernel != kDequantizeFirst) check_kernel_name(op, "w4a16", parse_override(op, *call.kernel).name);
    return;
  }
  Weight const w = describe(op, call.weight, n, k);

  GemmProblem problem;
  GemmOperands operands;
  problem.m = a.m;
  problem.n = n;
  problem.k = k;
  problem.ab_type = problem.d_type = data_type(call.a.scalar_type());
  problem.gated = call.gated;
  if (k > 0) {  // without k only the epilogue is left, which the dense kernels compute
    problem.b_format = w.format;
    problem.group_size = int32_t(w.group_size);
    problem.has_zeros = w.zeros.defined();
    operands.b = w.packed.data_ptr();
    operands.b_scales = w.scales.data_ptr();
    operands.ld_scales = w.ld(w.scales);
    if (w.zeros.defined()) {
      operands.b_zeros = w.zeros.data_ptr();
      operands.ld_zeros = w.ld(w.zeros);
    }
    operands.b_is_constant = call.constant_weights && w.is_callers(call.weight);
    operands.alpha = float(w.alpha);
    if (call.perm) {
      Tensor const perm = contiguous(op, "perm", *call.perm);
      Tensor const gathered = allocate(op, call.a, {a.m, k}, call.a.scalar_type(), "a[:, perm] of a ", call.a);
      Status const status = gather_columns(a.tensor.data_ptr(), a.stride, static_cast<int32_t const*>(perm.data_ptr()), a.m, k,
                                           gathered.data_ptr(), on.programmatic(), on.stream());
      if (!status.ok()) fail(op, ": a[:, perm] of a ", call.a, ": ", status.message);
      a.tensor = gathered;
      a.stride = k;
    }
  }
  operands.a = a.tensor.data_ptr();
  operands.lda = a.stride;
  operands.a_batch_stride = round_up(a.m * a.stride, 8);
  operands.ldb = round_up(std::max<int64_t>(k, 1), 8);
  operands.d = out.data_ptr();
  operands.ldd = columns;
  operands.d_batch_stride = round_up(a.m * columns, 8);
  problem.d_alignment = common_alignment({address_of(operands.d), uint64_t(columns * 2)});
  operands.activation = call.activation;
  problem.c_alignment = 0;
  Tensor const c = call.c ? describe_addend(call, a.m, out, &problem, &operands) : Tensor();
  Tensor const bias = call.bias ? unit_rows(op, "bias", *call.bias) : Tensor();
  if (call.bias) {
    operands.bias = bias.data_ptr();
    operands.bias_type = data_type(bias.scalar_type());
  }

  // Many tokens: the weight written out in 16 bits and a dense GEMM, where that is predicted to be faster, or where no kernel reads the format.
  Tensor dense;
  GemmPlan forced;
  GemmPlan const* plan = nullptr;
  bool const first_asked = call.kernel && *call.kernel == kDequantizeFirst;
  if (call.kernel && !first_asked) {
    KernelOverride const override = parse_override(op, *call.kernel);
    GemmPlanOptions options;
    options.kernel = override.name.c_str();
    if (override.launch) options.launch = &*override.launch;
    GemmProblem asked = problem;
    asked.b_format = w.format;  // without k too: a name is checked before it is refused
    Status const status = plan_gemm(asked, on.properties(), options, &forced);
    if (!status.ok()) fail(op, ": ", status.message);
    if (k == 0) fail(op, ": kernel ", override.name, " cannot compute this problem: it needs k > 0");
    plan = &forced;
  } else if (k > 0 && (first_asked || cached_dequantize_first(op, problem, on))) {
    dense = dequantized_weight(call, w, on);
    problem = dequantized(problem);
    operands.b = dense.data_ptr();
    operands.b_is_constant = false;
    operands.ldb = k;
  }
  if (plan == nullptr) plan = &cached_plan(op, problem, on);
  Workspace const workspace(op, out, plan->workspace_bytes, plan->kernel->name, " on a ", call.a, " and a weight [", n, ", ", k, ']');
  Status const status = run_gemm(*plan, problem, operands, on.properties(), workspace.data(), workspace.bytes(), on.stream());
  if (!status.ok()) {
    fail(op, ": ", plan->kernel->name, " on m = ", problem.m, ", n = ", problem.n, ", k = ", problem.k, ": ", status.message);
  }
}

Tensor allocate_output(Call const& call) {
  return allocate(call.op, call.a, call.output(), call.a.scalar_type(), "the output of a ", call.a, " and a weight [", call.n(), ", ",
                  call.k(), ']');
}

Tensor gemm_quantized(Call const& call) {
  check_call(call);
  OnDevice const on(call.op, call.a);
  Tensor const out = allocate_output(call);
  run(call, out, on);
  return out;
}

Tensor gemm_quantized_out(Call const& call, Tensor const& out) {
  check_call(call);
  char const* op = call.op;
  Tensor const& a = call.a;
  OwnShape const shape = call.output();
  if (out.scalar_type() != a.scalar_type()) fail(op, ": out must be ", a.scalar_type(), ", got ", out.scalar_type());
  if (!same(out.sizes(), shape)) fail(op, ": out must be [..., n] = a's shape with n = ", call.columns(), ", got ", out);
  check_same_device(op, "out", out, {"a", a});
  check_apart(op, out);
  check_no_overlap(op, out, "a", a);
  check_no_overlap(op, out, "qweight", call.weight.packed);
  check_no_overlap(op, out, "scales", call.weight.scales);
  if (call.weight.zeros) check_no_overlap(op, out, "zeros", *call.weight.zeros);
  if (call.perm) check_no_overlap(op, out, "perm", *call.perm);
  if (call.bias) check_no_overlap(op, out, "bias", *call.bias);
  if (call.c && !is_same_view(out, *call.c)) check_no_overlap(op, out, "c", *call.c);
  OnDevice const on(op, a);
  if (out.is_contiguous()) {
    run(call, out, on);
  } else {
    Tensor const staged = allocate_output(call);
    run(call, staged, on);
    copy_into(op, "out", out, staged);
  }
  return out;
}

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
  Status const status = dequantize_weight(w.described(), data_type(type), out.data_ptr(), on.stream());
  if (!status.ok()) fail(op, ": a weight [", n, ", ", k, "]: ", status.message);
  return out;
}

constexpr char const *kW4 = "minfer::w4a16_gemm", *kW4Gated = "minfer::w4a16_gemm_gated", *kW8 = "minfer::w8a16_gemm",
                     *kW8Gated = "minfer::w8a16_gemm_gated";
std::optional<Tensor> const kNoAddend;

}  // namespace

Tensor w4a16_gemm(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                  double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                  std::string const& activation, std::string const& w4_format, bool constant_weights,
                  std::optional<std::string> const& kernel) {
  PackedWeight const weight{qweight, scales, zeros, parse_format(kW4, 4, w4_format), group_size, alpha};
  return gemm_quantized({kW4, a, weight, perm, c, bias, parse_activation(kW4, activation), false, constant_weights, kernel});
}

Tensor w4a16_gemm_out(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                      double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                      std::string const& activation, std::string const& w4_format, bool constant_weights,
                      std::optional<std::string> const& kernel, Tensor const& out) {
  PackedWeight const weight{qweight, scales, zeros, parse_format(kW4, 4, w4_format), group_size, alpha};
  return gemm_quantized_out({kW4, a, weight, perm, c, bias, parse_activation(kW4, activation), false, constant_weights, kernel}, out);
}

Tensor w4a16_gemm_gated(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros,
                        int64_t group_size, double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& bias,
                        std::string const& activation, std::string const& w4_format, bool constant_weights,
                        std::optional<std::string> const& kernel) {
  PackedWeight const weight{qweight, scales, zeros, parse_format(kW4Gated, 4, w4_format), group_size, alpha};
  return gemm_quantized(
      {kW4Gated, a, weight, perm, kNoAddend, bias, parse_activation(kW4Gated, activation), true, constant_weights, kernel});
}

Tensor w4a16_pack(Tensor const& codes, std::string const& w4_format) {
  char const* op = "minfer::w4a16_pack";
  return pack(op, parse_format(op, 4, w4_format), codes);
}

Tensor w8a16_gemm(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                  double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                  std::string const& activation, std::string const& w8_format, bool constant_weights,
                  std::optional<std::string> const& kernel) {
  PackedWeight const weight{qweight, scales, zeros, parse_format(kW8, 8, w8_format), group_size, alpha};
  return gemm_quantized({kW8, a, weight, perm, c, bias, parse_activation(kW8, activation), false, constant_weights, kernel});
}

Tensor w8a16_gemm_out(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                      double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                      std::string const& activation, std::string const& w8_format, bool constant_weights,
                      std::optional<std::string> const& kernel, Tensor const& out) {
  PackedWeight const weight{qweight, scales, zeros, parse_format(kW8, 8, w8_format), group_size, alpha};
  return gemm_quantized_out({kW8, a, weight, perm, c, bias, parse_activation(kW8, activation), false, constant_weights, kernel}, out);
}

Tensor w8a16_gemm_gated(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros,
                        int64_t group_size, double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& bias,
                        std::string const& activation, std::string const& w8_format, bool constant_weights,
                        std::optional<std::string> const& kernel) {
  PackedWeight const weight{qweight, scales, zeros, parse_format(kW8Gated, 8, w8_format), group_size, alpha};
  return gemm_quantized(
      {kW8Gated, a, weight, perm, kNoAddend, bias, parse_activation(kW8Gated, activation), true, constant_weights, kernel});
}

Tensor w8a16_pack(Tensor const& codes) { return pack("minfer::w8a16_pack", WeightFormat::kInt8, codes); }

Tensor w4a16_dequantize(Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size, double alpha,
                        int64_t n, int64_t k, std::string const& w4_format, std::optional<ScalarType> out_dtype) {
  char const* op = "minfer::w4a16_dequantize";
  return dequantize(op, {qweight, scales, zeros, parse_format(op, 4, w4_format), group_size, alpha}, n, k, out_dtype);
}

Tensor w8a16_dequantize(Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size, double alpha,
                        int64_t n, int64_t k, std::string const& w8_format) {
  char const* op = "minfer::w8a16_dequantize";
  return dequantize(op, {qweight, scales, zeros, parse_format(op, 8, w8_format), group_size, alpha}, n, k, std::nullopt);
}

}  // namespace minfer::torch_binding
