// How calls of GEMMs with quantised weights are run: describe the operands, plan, allocate the workspace, launch.
#include "quantized_gemm_call.h"

#include "core/batch_invariance.h"
#include "core/checks.h"
#include "core/parse.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "gemm_planning.h"
#include "minfer/fused.h"
#include "minfer/gemm.h"
#include "packed_weight.h"

namespace minfer::torch_binding {

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

namespace {

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

void check_addend(QuantizedGemmCall const& call) {
  char const* op = call.op;
  Tensor const& c = *call.c;
  ShapeArray shape = call.output();
  bool fits = c.dim() <= int64_t(shape.size());
  for (int64_t i = 0; fits && i < c.dim(); ++i) fits = c.size(i) == 1 || c.size(i) == shape[shape.size() - size_t(c.dim() - i)];
  if (!fits) fail(op, ": c must broadcast to the output, got c ", c);
  if (c.scalar_type() != call.narrow() && c.scalar_type() != ScalarType::Float) {
    fail(op, ": c must be ", call.narrow(), " or Float, got ", c.scalar_type());
  }
  check_same_device(op, "c", c, {"a", call.a});
}

/// Activations of 8 bits and their scales: one number, or one for each row.
void check_scaled(QuantizedGemmCall const& call) {
  char const* op = call.op;
  Tensor const &a = call.a, &scale = *call.a_scale;
  int64_t const k = call.k(), group_size = call.weight.group_size;
  if (a.scalar_type() != ScalarType::Float8_e4m3fn && a.scalar_type() != ScalarType::Char) {
    fail(op, ": a must be Float8_e4m3fn or Char, got ", a.scalar_type());
  }
  if (k % 16 != 0) fail(op, ": k must be a multiple of 16, got ", k);
  if (group_size != -1 && (group_size < 128 || (group_size & (group_size - 1)) != 0)) {
    fail(op, ": group_size must be -1 (all of k) or a power of two from 128 on, got ", group_size);
  }
  check_16bit(op, "scales", call.weight.scales);
  if (scale.scalar_type() != ScalarType::Float) fail(op, ": a_scale must be Float, got ", scale.scalar_type());
  check_same_device(op, "a_scale", scale, {"a", a});
  if (scale.numel() == 1) return;
  int64_t const m = rows_of(a);
  size_t const modes = size_t(scale.dim()), leading = size_t(a.dim()) - 1;
  bool const column = modes > 0 && scale.size(int64_t(modes) - 1) == 1;
  auto const is = [&](Shape shape) { return same(scale.sizes(), shape) || (column && same({scale.sizes().data(), modes - 1}, shape)); };
  if (!is({a.sizes().data(), leading}) && !is({m})) {
    fail(op, ": a_scale must be one number, or one for each row, [...] or [..., 1] beside a [..., k], or numbered through, got a ", a,
         ", a_scale ", scale);
  }
}

}  // namespace

void check_call(QuantizedGemmCall const& call) {
  char const* op = call.op;
  Tensor const &a = call.a, &scales = call.weight.scales;
  if (scales.dim() != 2) fail(op, ": scales must be [groups, n], got ", scales);
  if (a.dim() < 1) fail(op, ": a must be [..., k], got a ", a);
  if (call.a_scale != nullptr) {
    check_scaled(call);
  } else {
    check_16bit(op, "a", a);
    check_scale_type(op, "scales", scales, call.weight.format, a.scalar_type(), call.a_name);
  }
  NamedTensor const reference{call.a_name, a};
  check_same_device(op, "qweight", call.weight.packed, reference);
  int64_t const n = call.n(), k = call.k();
  if (call.gated && n % 16 != 0) {
    fail(op, ": scales must have a multiple of 16 columns (blocks of 8 gate and 8 up rows), got ", scales);
  }
  check_weight(op, call.weight, n, k);
  if (call.bias) check_bias(op, *call.bias, n, call.narrow(), reference);
  if (call.perm) {
    Tensor const& perm = *call.perm;
    if (!same(perm.sizes(), {k})) fail(op, ": perm must be [k] = [", k, "], got ", perm);
    if (perm.scalar_type() != ScalarType::Int) fail(op, ": perm must be Int, got ", perm.scalar_type());
    check_same_device(op, "perm", perm, reference);
  }
  if (call.c) check_addend(call);
  check_output_codes(op, call.codes, reference);
  if (!call.out_dtype) return;
  ScalarType const type = *call.out_dtype, codes = call.codes.type(type);
  if (type != codes) fail(op, ": out_dtype must be ", codes, " for ", *call.codes.quant, ", got ", type);
  if (!call.codes.given() && type != call.narrow() && type != ScalarType::Float) {
    fail(op, ": out_dtype must be ", call.narrow(), " or Float, got ", type);
  }
}

namespace {

/// A call as the kernels take it, and the tensors whose memory the operands point to.
struct KernelCall {
  GemmProblem problem;
  GemmOperands operands;
  Rows a, ungathered;  // the same but with act-order
  Weight weight;
  Tensor c, bias, scale, a_scale, dense, perm;  // dense: the weight in 16 bits, where it was dequantised for this call
};

/// a, or with act-order the memory for a[:, perm].
void set_input(QuantizedGemmCall const& call, KernelCall* x) {
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
  x->problem.batch_invariant = batch_invariant();
  x->problem.ab_type = data_type(k > 0 ? call.a.scalar_type() : call.narrow());
  if (call.a_scale != nullptr && k > 0) {
    x->a_scale = contiguous(op, "a_scale", *call.a_scale);
    x->operands.a_scale.data = x->a_scale.data_ptr();
    x->operands.a_scale.row_stride = x->a_scale.numel() == 1 ? 0 : 1;
  }
  x->operands.a = a.tensor.data_ptr();
  x->operands.lda = a.stride;
  x->operands.a_batch_stride = unused_stride(a.m * a.stride, bytes);
}

void set_weight(QuantizedGemmCall const& call, KernelCall* x) {
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
  if (scale_bytes_of(w.format) == 2) o.b_scales_type = data_type(w.scales.scalar_type());
  if (p.has_zeros) {
    o.b_zeros = w.zeros.data_ptr();
    o.ld_zeros = w.ld(w.zeros);
  }
  o.b_is_constant = call.constant_weights && w.is_callers(call.weight);
  o.alpha = float(w.alpha);
}

/// `out` is contiguous.
void set_output(QuantizedGemmCall const& call, Tensor const& out, KernelCall* x) {
  GemmOperands& o = x->operands;
  int64_t const columns = call.columns(), bytes = out.element_size();
  o.d = out.data_ptr();
  o.ldd = columns;
  o.d_batch_stride = unused_stride(x->a.m * columns, bytes);
  x->problem.d_type = data_type(call.codes.given() ? call.narrow() : out.scalar_type());
  x->problem.d_alignment = common_alignment({address_of(o.d), uint64_t(columns * bytes)});
  x->problem.d_fp8 = call.codes.given();
  if (x->problem.d_fp8) {
    x->scale = contiguous(call.op, "scale", *call.codes.scale);
    o.d_scale = static_cast<float const*>(x->scale.data_ptr());
  }
}

/// C: a number or a row, which kernels repeat, or a matrix, into which every other tensor is copied. TMA reads a matrix of out's type;
/// c_alignment 0 says that it does not.
void set_addend(QuantizedGemmCall const& call, Tensor const& out, KernelCall* x) {
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
    bool const by_tma =
        c.scalar_type() == out.scalar_type() && is_16bit_float(out.scalar_type()) && is_aligned_stride(stride, c) && c.is_aligned(16);
    x->problem.c_alignment = by_tma ? 16 : 0;
  }
  o.beta = 1.0f;
  o.c = c.data_ptr();
  o.c_type = data_type(c.scalar_type());
  x->problem.has_c = true;
  x->c = c;
}

/// C, bias and the activation.
void set_epilogue(QuantizedGemmCall const& call, Tensor const& out, KernelCall* x) {
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
void dequantize_first(QuantizedGemmCall const& call, OnDevice const& on, KernelCall* x) {
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
GemmPlan const& choose_plan(QuantizedGemmCall const& call, OnDevice const& on, KernelCall* x, GemmPlan* requested) {
  char const* op = call.op;
  int64_t const k = call.k();
  bool const first = call.kernel && *call.kernel == kDequantizeFirst && call.a_scale == nullptr;
  if (call.kernel && !first) {
    KernelOverride const override = parse_override(op, *call.kernel);
    GemmProblem problem = x->problem;
    problem.b_format = x->weight.format;  // without k too: a name is checked before it is refused
    plan_as_requested(op, problem, override, on, requested);
    if (k == 0) fail(op, ": kernel ", override.name, " cannot compute this problem: it needs k > 0");
    return *requested;
  }
  if (k > 0 && call.a_scale == nullptr && (first || cached_dequantize_first(op, x->problem, on))) dequantize_first(call, on, x);
  return cached_plan(op, x->problem, on);
}

/// Writes a[:, perm].
void gather(QuantizedGemmCall const& call, KernelCall const& x, OnDevice const& on) {
  Status const status = gather_columns(x.ungathered.tensor.data_ptr(), x.ungathered.stride, static_cast<int32_t const*>(x.perm.data_ptr()),
                                       x.a.m, x.a.stride, x.a.tensor.data_ptr(), on.programmatic(), on.stream());
  if (!status.ok()) fail(call.op, ": a[:, perm] of a ", call.a, ": ", status.message);
}

void launch(QuantizedGemmCall const& call, KernelCall const& x, GemmPlan const& plan, Workspace const& workspace, OnDevice const& on) {
  GemmProblem const& p = x.problem;
  if (x.perm.defined()) gather(call, x, on);
  Status const status = run_gemm(plan, p, x.operands, on.properties(), workspace.data(), workspace.bytes(), on.stream());
  if (!status.ok()) fail(call.op, ": ", plan.kernel->name, " on m = ", p.m, ", n = ", p.n, ", k = ", p.k, ": ", status.message);
}

/// Writes activations of 8 bits in 16, which makes the call one of these.
void widen_and_run(QuantizedGemmCall const& call, KernelCall const& x, Tensor const& out, OnDevice const& on) {
  std::optional<std::string> const any;
  Tensor const q = contiguous(call.op, "a", call.a);
  Tensor const a = allocate(call.op, call.a, call.a.sizes(), call.narrow(), "a ", call.a, " in 16 bits");
  Dequantize d;
  bool const one = x.operands.a_scale.row_stride == 0;
  d.quant = call.a.scalar_type() == ScalarType::Char ? RowQuant::kInt8Token : one ? RowQuant::kFp8Tensor : RowQuant::kFp8Token;
  d.type = data_type(call.narrow());
  d.rows = x.problem.m;
  d.width = call.k();
  d.q = q.data_ptr();
  d.scales = static_cast<float const*>(x.operands.a_scale.data);
  d.scales_row_stride = x.operands.a_scale.row_stride;
  d.y = a.data_ptr();
  Status const status = dequantize(d, on.programmatic(), on.stream());
  if (!status.ok()) fail(call.op, ": writing a ", call.a, " in 16 bits: ", status.message);
  run(QuantizedGemmCall{call.op, a, call.weight, call.perm, call.c, call.bias, call.activation, call.gated, call.constant_weights, any,
                        call.codes},
      out, on);
}

}  // namespace

void run(QuantizedGemmCall const& call, Tensor const& out, OnDevice const& on, std::function<void()> const& before) {
  char const* op = call.op;
  bool const scaled = call.a_scale != nullptr, widen = scaled && call.kernel && *call.kernel == kWidenFirst;
  if (rows_of(call.a) == 0 || call.n() == 0) {
    bool const named = call.kernel && !widen && (scaled || *call.kernel != kDequantizeFirst);
    if (named) check_kernel_name(op, scaled ? "w4a8" : "w4a16", parse_override(op, *call.kernel).name);
    if (before) before();
    return;
  }
  KernelCall x;
  set_weight(call, &x);
  set_input(call, &x);
  set_output(call, out, &x);
  set_epilogue(call, out, &x);
  if (scaled && call.k() > 0 && (widen || (!call.kernel && !cached_has_kernel(op, x.problem, on)))) {
    widen_and_run(call, x, out, on);
    return;
  }
  GemmPlan requested;
  GemmPlan const& plan = choose_plan(call, on, &x, &requested);
  Workspace const workspace(op, out, plan.workspace_bytes, plan.kernel->name, " on a ", call.a, " and a weight [", call.n(), ", ", call.k(),
                            ']');
  if (before) before();
  launch(call, x, plan, workspace, on);
}

Tensor allocate_output(QuantizedGemmCall const& call) {
  return allocate(call.op, call.a, call.output(), call.output_type(), "the output of a ", call.a, " and a weight [", call.n(), ", ",
                  call.k(), ']');
}

Tensor run(QuantizedGemmCall const& call) {
  check_call(call);
  OnDevice const on(call.op, call.a);
  Tensor const out = allocate_output(call);
  run(call, out, on);
  return out;
}

Tensor run_out(QuantizedGemmCall const& call, Tensor const& out) {
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
  if (call.a_scale != nullptr) check_no_overlap(op, out, "a_scale", *call.a_scale);
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

}  // namespace minfer::torch_binding
