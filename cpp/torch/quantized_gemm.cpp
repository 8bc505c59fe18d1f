// GEMMs with weights in 4-bit and 8-bit codes on CUDA tensors. Operators of both widths have one implementation; they differ in defaults,
// in the formats that they take and in the names that messages give. A call goes through check_call(), then run(): describe the operands,
// plan, allocate the workspace, launch.
#include "minfer/w4a16.h"

#include "core/checks.h"
#include "core/device.h"
#include "core/operators.h"
#include "core/parse.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "fused.h"
#include "gemm.h"
#include "gemm_planning.h"
#include "minfer/gemm.h"
#include "output_codes.h"
#include "packed_weight.h"

namespace minfer::torch_binding {

namespace {

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

void check_weight(char const* op, PackedWeight const& w, int64_t n, int64_t k) {
  auto const& [qweight, scales, zeros, format, group_size, alpha] = w;
  check_group_size(op, format, group_size);
  in_float32(op, "alpha", alpha);
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

/// A tensor as a matrix: all modes but the last together are its m rows.
struct Rows {
  Tensor tensor;
  int64_t m = 1, stride = 0;
};

int64_t rows_of(Tensor const& x) {
  int64_t m = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) m *= x.size(i);
  return m;
}

/// Whether a tensor's m rows are evenly spaced, contiguous and aligned as TMA wants them; `stride` is from one row to the next.
bool are_rows_of_a_matrix(Tensor const& x, int64_t m, int64_t* stride) {
  int64_t const last = x.dim() - 1;
  *stride = unused_stride(x.size(last), x.element_size());
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
  return even && x.is_aligned(16) && is_aligned_stride(*stride, x) && (m <= 1 || *stride >= x.size(last));
}

Rows flatten_rows(char const* op, char const* name, Tensor const& x) {
  Rows r{x, rows_of(x), 0};
  if (are_rows_of_a_matrix(x, r.m, &r.stride)) return r;
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
  bool constant_weights;  // no launch that is still running writes qweight, scales or zeros
  std::optional<std::string> const& kernel;
  OutputCodes codes;
  char const* a_name = "a";  // in messages

  int64_t n() const { return weight.scales.size(1); }  // of a checked call
  int64_t k() const { return a.size(a.dim() - 1); }
  int64_t columns() const { return gated ? n() / 2 : n(); }  // of the output
  ShapeArray output() const {
    ShapeArray shape(a.sizes());
    shape.back() = columns();
    return shape;
  }
  ScalarType output_type() const { return codes.type(a.scalar_type()); }
};

void check_addend(Call const& call) {
  char const* op = call.op;
  Tensor const& c = *call.c;
  ShapeArray shape = call.output();
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
  check_scale_type(op, "scales", scales, call.weight.format, a.scalar_type(), call.a_name);
  NamedTensor const reference{call.a_name, a};
  check_same_device(op, "qweight", call.weight.packed, reference);
  int64_t const n = call.n(), k = call.k();
  if (call.gated && n % 16 != 0) {
    fail(op, ": scales must have a multiple of 16 columns (blocks of 8 gate and 8 up rows), got ", scales);
  }
  check_weight(op, call.weight, n, k);
  if (call.bias) check_bias(op, *call.bias, n, reference);
  if (call.perm) {
    Tensor const& perm = *call.perm;
    if (!same(perm.sizes(), {k})) fail(op, ": perm must be [k] = [", k, "], got ", perm);
    if (perm.scalar_type() != ScalarType::Int) fail(op, ": perm must be Int, got ", perm.scalar_type());
    check_same_device(op, "perm", perm, reference);
  }
  if (call.c) check_addend(call);
  check_output_codes(op, call.codes, reference);
}

/// A call as the kernels take it, and the tensors whose memory the operands point to.
struct KernelCall {
  GemmProblem problem;
  GemmOperands operands;
  Rows a, ungathered;  // the same but with act-order
  Weight weight;
  Tensor c, bias, scale, dense, perm;  // dense: the weight in 16 bits, where it was dequantised for this call
};

/// a, or with act-order the memory for a[:, perm].
void set_input(Call const& call, KernelCall* x) {
  char const* op = call.op;
  int64_t const k = call.k(), bytes = call.a.element_size();
  x->ungathered = flatten_rows(op, "a", call.a);
  x->a = x->ungathered;
  Rows& a = x->a;
  if (call.perm && k > 0) {
    x->perm = contiguous(op, "perm", *call.perm);
    a.tensor = allocate(op, call.a, {a.m, k}, call.a.scalar_type(), "a[:, perm] of a ", call.a);
    a.stride = k;
  }
  x->problem.m = a.m;
  x->problem.k = k;
  x->problem.ab_type = data_type(call.a.scalar_type());
  x->operands.a = a.tensor.data_ptr();
  x->operands.lda = a.stride;
  x->operands.a_batch_stride = unused_stride(a.m * a.stride, bytes);
}

void set_weight(Call const& call, KernelCall* x) {
  GemmProblem& p = x->problem;
  GemmOperands& o = x->operands;
  x->weight = describe(call.op, call.weight, call.n(), call.k());
  Weight const& w = x->weight;
  p.n = w.n;
  o.ldb = unused_stride(w.k, call.a.element_size());
  if (w.k == 0) return;  // only the epilogue is left, which the dense kernels compute
  p.b_format = w.format;
  p.group_size = int32_t(w.group_size);
  p.has_zeros = w.zeros.defined();
  o.b = w.packed.data_ptr();
  o.b_scales = w.scales.data_ptr();
  o.ld_scales = w.ld(w.scales);
  if (p.has_zeros) {
    o.b_zeros = w.zeros.data_ptr();
    o.ld_zeros = w.ld(w.zeros);
  }
  o.b_is_constant = call.constant_weights && w.is_callers(call.weight);
  o.alpha = float(w.alpha);
}

/// `out` is contiguous.
void set_output(Call const& call, Tensor const& out, KernelCall* x) {
  GemmOperands& o = x->operands;
  int64_t const columns = call.columns(), bytes = out.element_size();
  o.d = out.data_ptr();
  o.ldd = columns;
  o.d_batch_stride = unused_stride(x->a.m * columns, bytes);
  x->problem.d_type = x->problem.ab_type;
  x->problem.d_alignment = common_alignment({address_of(o.d), uint64_t(columns * bytes)});
  x->problem.d_fp8 = call.codes.given();
  if (x->problem.d_fp8) {
    x->scale = contiguous(call.op, "scale", *call.codes.scale);
    o.d_scale = static_cast<float const*>(x->scale.data_ptr());
  }
}

/// C: a number or a row, which kernels repeat, or a matrix, into which every other tensor is copied. TMA reads a matrix of out's type;
/// c_alignment 0 says that it does not.
void set_addend(Call const& call, Tensor const& out, KernelCall* x) {
  GemmOperands& o = x->operands;
  int64_t const m = x->a.m;
  Tensor c = *call.c;
  if (c.dim() <= 1) {
    o.c_stride_n = c.dim() == 1 && c.size(0) != 1 ? c.stride(0) : 0;
  } else {
    int64_t stride = 0;
    if (!same(c.sizes(), out.sizes()) || !are_rows_of_a_matrix(c, m, &stride)) {
      c = allocate(call.op, out, out.sizes(), c.scalar_type(), "c ", *call.c, " of the output's shape");
      copy_into(call.op, "c", c, *call.c);
      stride = c.size(c.dim() - 1);
    }
    o.c_stride_m = stride;
    o.c_stride_n = 1;
    o.c_batch_stride = unused_stride(m * stride, c.element_size());
    bool const by_tma = c.scalar_type() == out.scalar_type() && is_aligned_stride(stride, c) && c.is_aligned(16);
    x->problem.c_alignment = by_tma ? 16 : 0;
  }
  o.beta = 1.0f;
  o.c = c.data_ptr();
  o.c_type = data_type(c.scalar_type());
  x->problem.has_c = true;
  x->c = c;
}

/// C, bias and the activation.
void set_epilogue(Call const& call, Tensor const& out, KernelCall* x) {
  GemmOperands& o = x->operands;
  x->problem.gated = call.gated;
  x->problem.c_alignment = 0;
  o.activation = call.activation;
  if (call.c) set_addend(call, out, x);
  if (call.bias) {
    x->bias = unit_rows(call.op, "bias", *call.bias);
    o.bias = x->bias.data_ptr();
    o.bias_type = data_type(x->bias.scalar_type());
  }
}

/// Writes the weight in 16 bits, which makes the call a dense GEMM. alpha stays with the accumulators: a small one would take the weights
/// below fp16's range.
void dequantize_first(Call const& call, OnDevice const& on, KernelCall* x) {
  Weight const& w = x->weight;
  x->dense = allocate(call.op, call.a, {w.n, w.k}, call.a.scalar_type(), "the weight [", w.n, ", ", w.k, "] in 16 bits, beside a ", call.a);
  QuantizedWeight weight = w.to_dequantize();
  weight.alpha = 1.0f;
  Status const status = dequantize_weight(weight, x->problem.ab_type, x->dense.data_ptr(), on.stream());
  if (!status.ok()) fail(call.op, ": writing the weight [", w.n, ", ", w.k, "] in 16 bits: ", status.message);
  x->problem = dequantized(x->problem);
  x->operands.b = x->dense.data_ptr();
  x->operands.b_is_constant = false;
  x->operands.ldb = w.k;
}

/// The kernel that the call requests by name goes into *requested. For many tokens it is predicted to be faster to dequantise the weight
/// first, and a format that no kernel reads leaves no other way.
GemmPlan const& choose_plan(Call const& call, OnDevice const& on, KernelCall* x, GemmPlan* requested) {
  char const* op = call.op;
  int64_t const k = call.k();
  bool const first = call.kernel && *call.kernel == kDequantizeFirst;
  if (call.kernel && !first) {
    KernelOverride const override = parse_override(op, *call.kernel);
    GemmProblem problem = x->problem;
    problem.b_format = x->weight.format;  // without k too: a name is checked before it is refused
    plan_as_requested(op, problem, override, on, requested);
    if (k == 0) fail(op, ": kernel ", override.name, " cannot compute this problem: it needs k > 0");
    return *requested;
  }
  if (k > 0 && (first || cached_dequantize_first(op, x->problem, on))) dequantize_first(call, on, x);
  return cached_plan(op, x->problem, on);
}

/// Writes a[:, perm].
void gather(Call const& call, KernelCall const& x, OnDevice const& on) {
  Status const status = gather_columns(x.ungathered.tensor.data_ptr(), x.ungathered.stride, static_cast<int32_t const*>(x.perm.data_ptr()),
                                       x.a.m, x.a.stride, x.a.tensor.data_ptr(), on.programmatic(), on.stream());
  if (!status.ok()) fail(call.op, ": a[:, perm] of a ", call.a, ": ", status.message);
}

void launch(Call const& call, KernelCall const& x, GemmPlan const& plan, Workspace const& workspace, OnDevice const& on) {
  GemmProblem const& p = x.problem;
  if (x.perm.defined()) gather(call, x, on);
  Status const status = run_gemm(plan, p, x.operands, on.properties(), workspace.data(), workspace.bytes(), on.stream());
  if (!status.ok()) fail(call.op, ": ", plan.kernel->name, " on m = ", p.m, ", n = ", p.n, ", k = ", p.k, ": ", status.message);
}

/// Runs the call into `out`, which is contiguous. `before` is called in front of the first launch that reads a.
template <class Before = Nothing>
void run(Call const& call, Tensor const& out, OnDevice const& on, Before const& before = {}) {
  char const* op = call.op;
  if (rows_of(call.a) == 0 || call.n() == 0) {
    if (call.kernel && *call.kernel != kDequantizeFirst) check_kernel_name(op, "w4a16", parse_override(op, *call.kernel).name);
    before();
    return;
  }
  KernelCall x;
  set_weight(call, &x);
  set_input(call, &x);
  set_output(call, out, &x);
  set_epilogue(call, out, &x);
  GemmPlan requested;
  GemmPlan const& plan = choose_plan(call, on, &x, &requested);
  Workspace const workspace(op, out, plan.workspace_bytes, plan.kernel->name, " on a ", call.a, " and a weight [", call.n(), ", ", call.k(),
                            ']');
  before();
  launch(call, x, plan, workspace, on);
}

Tensor allocate_output(Call const& call) {
  return allocate(call.op, call.a, call.output(), call.output_type(), "the output of a ", call.a, " and a weight [", call.n(), ", ",
                  call.k(), ']');
}

/// Checks the call and runs it into a new tensor.
Tensor run(Call const& call) {
  check_call(call);
  OnDevice const on(call.op, call.a);
  Tensor const out = allocate_output(call);
  run(call, out, on);
  return out;
}

/// Checks the call and runs it into the caller's tensor.
Tensor run_out(Call const& call, Tensor const& out) {
  check_call(call);
  char const* op = call.op;
  Tensor const& a = call.a;
  ShapeArray const shape = call.output();
  if (out.scalar_type() != call.output_type()) fail(op, ": out must be ", call.output_type(), ", got ", out.scalar_type());
  if (!same(out.sizes(), shape)) fail(op, ": out must be [..., n] = a's shape with n = ", call.columns(), ", got ", out);
  check_same_device(op, "out", out, {"a", a});
  check_apart(op, out);
  check_no_overlap(op, out, "a", a);
  check_no_overlap(op, out, "qweight", call.weight.packed);
  check_no_overlap(op, out, "scales", call.weight.scales);
  if (call.weight.zeros) check_no_overlap(op, out, "zeros", *call.weight.zeros);
  if (call.perm) check_no_overlap(op, out, "perm", *call.perm);
  if (call.bias) check_no_overlap(op, out, "bias", *call.bias);
  if (call.codes.scale) check_no_overlap(op, out, "scale", *call.codes.scale);
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
  Status const status = dequantize_weight(w.to_dequantize(), data_type(type), out.data_ptr(), on.stream());
  if (!status.ok()) fail(op, ": a weight [", n, ", ", k, "]: ", status.message);
  return out;
}

template <int bits>
constexpr char const* kGemm = bits == 4 ? "minfer::w4a16_gemm" : "minfer::w8a16_gemm";

template <int bits>
Tensor gemm(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
            double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
            std::string const& activation, std::string const& format, bool constant_weights, std::optional<std::string> const& quant,
            std::optional<Tensor> const& scale, std::optional<std::string> const& kernel) {
  char const* op = kGemm<bits>;
  PackedWeight const weight{qweight, scales, zeros, parse_format(op, bits, format), group_size, alpha};
  return run({op, a, weight, perm, c, bias, parse_activation(op, activation), false, constant_weights, kernel, {quant, scale}});
}

template <int bits>
Tensor gemm_out(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                std::string const& activation, std::string const& format, bool constant_weights, std::optional<std::string> const& quant,
                std::optional<Tensor> const& scale, std::optional<std::string> const& kernel, Tensor const& out) {
  char const* op = kGemm<bits>;
  PackedWeight const weight{qweight, scales, zeros, parse_format(op, bits, format), group_size, alpha};
  return run_out({op, a, weight, perm, c, bias, parse_activation(op, activation), false, constant_weights, kernel, {quant, scale}}, out);
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
Tensor run_behind_norm(Norm const& norm, Call call) {
  check_call(call);
  check_apart_from_residual(norm, "qweight", call.weight.packed);
  check_apart_from_residual(norm, "scales", call.weight.scales);
  check_apart_from_residual(norm, "zeros", call.weight.zeros);
  check_apart_from_residual(norm, "perm", call.perm);
  check_apart_from_residual(norm, "bias", call.bias);
  OnDevice const on(call.op, norm.x);
  Tensor const out = allocate_output(call);
  Tensor const a = allocate(call.op, norm.x, {norm.rows(), norm.width()}, norm.x.scalar_type(), "the norm of x ", norm.x);
  run(Call{call.op, a, call.weight, call.perm, call.c, call.bias, call.activation, call.gated, call.constant_weights, call.kernel,
           call.codes},
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

constexpr Operator kOperators[] = {
    // D = activation(alpha * A.W^T + C + bias), where W [n, k] is (code - zero) * scale, or a code book's value * scale, of 4-bit codes
    {"w4a16_gemm(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=128, float alpha=1.0, Tensor? perm=None, "
     "Tensor? c=None, Tensor? bias=None, str activation='none', str w4_format='int4', bool constant_weights=False, "
     "str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
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
     "str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&gemm<8>>, boxed<&gemm_out<8>>},
    {"w8a16_gemm_gated(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=-1, float alpha=1.0, "
     "Tensor? perm=None, Tensor? bias=None, str activation='silu', str w8_format='int8', bool constant_weights=False, "
     "str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&gemm_gated<8>>},
    {"w8a16_pack(Tensor codes) -> Tensor", boxed<&w8a16_pack>},
    {"w8a16_dequantize(Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=-1, float alpha=1.0, int n, int k, "
     "str w8_format='int8') -> Tensor",
     boxed<&w8a16_dequantize>},
    // The same of a = rms_norm(x), or rms_norm(residual += x)
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
STABLE_TORCH_LIBRARY_FRAGMENT(minfer, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(minfer, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
